"""Whole trainings as real processes: a tiny target with a tokenizer, and `python -P -m trainer train`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_models
import torch
import transformers as hf
from vocab import cached, tiny_dir

from trainer.job import TrainArgs
from trainer.supervisor import Supervisor

ROOT = Path(__file__).resolve().parent.parent
VOCAB = 288  # rows of the embedding: more than the tokenizer has tokens


def target_dir() -> Path:
    """A random llama of 6 small layers with the tiny tokenizer."""
    return cached("tiny-target-1", _target)


def _target(directory: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**tiny_models.SHAPE | {"vocab_size": VOCAB}))
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_dir() / name, directory / name)


def args(dataset: Path | str, out: Path | str, **changes: Any) -> TrainArgs:
    """A training of seconds: 2 layers, blocks of 5, 8 anchors, steps of 4 micro-batches of 2 rows."""
    values: dict[str, Any] = {
        "target": str(target_dir()),
        "steps": 12,
        "layers": 2,
        "block_size": 5,
        "anchors": 8,
        "max_length": 48,
        "batch_rows": 2,
        "accumulate": 4,
        "lr": 5e-3,
        "checkpoint_every": "5",
        "held_out": 0.1,
    }
    return TrainArgs(str(dataset), str(out), **values | changes)


def start(told: TrainArgs, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "trainer", "train", *told.to_argv()],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    )


class Forked:
    """A training forked from this process, which has imported everything: it starts in no time."""

    def __init__(self, told: TrainArgs, log: Path) -> None:
        self.log = log
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
                sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, closefd=False) for fd in (1, 2))  # not pytest's
                os.environ["TERMINATION_LOG"] = str(log.with_suffix(".end"))
                code = Supervisor(told).run()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines() if line.startswith("{") and line.endswith("}")]

    def ranks(self) -> dict[int, str]:
        """Process ids of the supervisor's children that are alive."""
        found = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return {int(pid): pid for pid in found}

    def wait(self, seconds: float = 600.0) -> int:
        """Exit code; killed where it does not end."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"a training did not end:\n{self.text()[-3000:]}")

    def until(self, happened: Callable[[], bool], seconds: float = 600.0) -> None:
        """Wait for something of the run to be seen; fails where the run ends before."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline and Path(f"/proc/{self.pid}/exe").exists(), self.text()[-3000:]
            time.sleep(0.005)


def finish(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, the supervisor's JSON lines, everything it printed."""
    text, _ = process.communicate(timeout=600)
    return process.returncode, [json.loads(line) for line in text.splitlines() if line.startswith("{")], text


def train(told: TrainArgs, **env: str) -> tuple[int, list[dict[str, Any]], str]:
    return finish(start(told, **env))


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
