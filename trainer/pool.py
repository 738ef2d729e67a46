"""The local backend of a training: `train` as a process of this machine, started again where that helps.

    python -P -m trainer pool --state DIR --jobs 1 ARGS-OF-TRAIN

Plays the Job controller for its one pod with the same rules, and keeps its state below DIR as the tokenizer's pool does
for its indexes: pool.json, index-00000.json, logs/00000-<try>.txt. Standard library alone: the weight is in the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizer.job import Exit, JobError
from trainer.job import TrainArgs, said

RETRIES = 2  # in a row without a new checkpoint
FINAL = frozenset(
    {Exit.USAGE, Exit.DATA, Exit.SELF_CHECK, Exit.DISK_FULL, Exit.DIVERGED, Exit.CONFIG}
)  # podFailurePolicy
ENDS = ("done", "stopped", "failed")  # the last event of a supervisor, by how it ended
PARENT_DIED = 1  # PR_SET_PDEATHSIG


def _now() -> str:
    t = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(t)) + f".{int(t % 1 * 1000):03d}Z"


def _write(path: Path, record: Mapping[str, Any]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(record), "utf-8")
    os.replace(fresh, path)


class Pool:
    """One training on this machine."""

    def __init__(self, state: Path, argv: Sequence[str]) -> None:
        """argv: of `train`. state: made where it is not there."""
        self.state, self.argv = state, list(argv)
        self.started = _now()
        self.stopping = False
        self.child: subprocess.Popen[str] | None = None
        self.record: dict[str, Any] = {"index": 0, "state": "pending", "try": 0}
        (state / "logs").mkdir(parents=True, exist_ok=True)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._stop)

    def say(self, state: str, reason: str = "", hint: str = "") -> None:
        ended = None if state == "running" else _now()
        record = {"pid": os.getpid(), "state": state, "reason": reason, "started": self.started, "ended": ended}
        record |= {"hint": hint} if hint else {}
        _write(self.state / "pool.json", record)

    def _index(self, **changes: Any) -> None:
        self.record |= changes
        _write(self.state / "index-00000.json", self.record)

    def _stop(self, number: int, frame: object) -> None:
        self.stopping = True
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(signal.SIGTERM)

    def run(self) -> int:
        """Exit code of the run."""
        failures, saved = 0, -1
        while True:
            code, last = self._try()
            hint = str(last.get("hint") or "")
            reason = str(last.get("message") or f"exit code {code}")
            if code == Exit.OK:
                self._index(state="succeeded", exit=0, ended=_now(), reason="", hint="")
                self.say("succeeded")
                return int(Exit.OK)
            if code == Exit.SIGTERM or self.stopping:
                self._index(state="pending", exit=int(Exit.SIGTERM), ended=_now(), reason="stopped", hint="")
                self.say("stopped")
                return int(Exit.SIGTERM)
            now_saved = int(self.record.get("progress", {}).get("saved_step", -1))
            failures, saved = (0 if now_saved > saved else failures) + 1, max(saved, now_saved)
            if code in FINAL or failures > RETRIES:
                self._index(state="failed", exit=code, ended=_now(), reason=reason, hint=hint)
                self.say("failed", reason, hint)
                return code
            self._index(state="pending", exit=code, ended=_now(), reason=reason, hint=hint)

    def _try(self) -> tuple[int, dict[str, Any]]:
        """One pod: its exit code, 128 + N where signal N ended it, and the JSON line that tells how it ended."""
        tries = [int(path.stem.split("-")[1]) for path in (self.state / "logs").glob("00000-*.txt")]
        attempt = max(tries, default=-1) + 1
        last: dict[str, Any] = {}
        with (self.state / "logs" / f"00000-{attempt}.txt").open("w", encoding="utf-8") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-P", "-m", "trainer", "train", *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                close_fds=False,  # the lock by which a run is known to be alive
                env=os.environ | {"TERMINATION_LOG": str(self.state / "termination-00000.json")},
                preexec_fn=lambda: ctypes.CDLL(None).prctl(PARENT_DIED, signal.SIGTERM),
            )
            self._index(**{"try": attempt}, state="running", pid=self.child.pid, started=_now(), ended=None, exit=None)
            if self.stopping:
                self._stop(signal.SIGTERM, None)
            assert self.child.stdout
            for line in self.child.stdout:
                log.write(line)
                log.flush()
                if line.startswith("{"):
                    with contextlib.suppress(ValueError):
                        last = json.loads(line)
                        if last.get("event") == "progress":
                            self._index(progress=last)
                        elif words := said(last):
                            self._index(said=words)
            code = self.child.wait()
            self.child = None
        if code < 0:
            return 128 - code, {"message": f"ended by {signal.Signals(-code).name}"}
        return code, last if last.get("event") in ENDS else {}


def main(argv: Sequence[str]) -> int:
    """The verb `pool`; what is wrong with the flags is said before anything is written. Raises JobError."""
    if list(argv[:1]) != ["--state"] or list(argv[2:3]) != ["--jobs"] or len(argv) < 5:
        raise JobError(Exit.USAGE, "expected --state DIR --jobs N and the flags of train")
    TrainArgs.from_argv(argv[4:])
    pool = Pool(Path(argv[1]), argv[4:])
    pool.say("running")
    return pool.run()
