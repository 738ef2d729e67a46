"""Figures of a training: metrics.jsonl, which is the lineage of the parameters, and TensorBoard.

metrics.jsonl has one line a step, with the numbers of the rows that were trained, and one a measurement. A resume cuts
it back to the checkpoint it goes on from, so a step that was lost and done again is in it once.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from trainer.board import Board
from trainer.checkpoint import BOARD, METRICS
from trainer.link import World
from trainer.loop import Step, acceptance
from trainer.loss import position_accuracy, uniform_tau

RECENT = 50  # steps whose mean time the remaining time is reckoned from
NOTHING = {"rows": 0, "tokens": 0, "empty_steps": 0}  # trained yet


def cut_back(folder: Path, step: int) -> int:
    """Drop the lines of metrics.jsonl that lie behind `step` steps, and the walk after those, which is done again.

    Returns how many steps were lost.
    """
    path = folder / METRICS
    if not path.is_file():
        return 0
    kept, lost = [], 0
    for line in path.read_text("utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut in the middle by a kill
        trained = "loss" in entry
        if entry["step"] < step + trained:
            kept.append(line)
        else:
            lost += trained
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(f"{line}\n" for line in kept), "utf-8")
    os.replace(fresh, path)
    return lost


class Metrics:
    """Written by the leader. `last` is what a progress line says."""

    def __init__(self, folder: Path, world: World, board: Board, total: int, counts: dict[str, int]) -> None:
        """total: steps of the whole training. counts: rows, tokens and empty steps so far, counted on in place."""
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / METRICS).open("a", encoding="utf-8")
        self.world, self.board, self.total, self.counts = world, board, total, counts
        self.last: dict[str, Any] = {"steps": total}
        self._at, self._busy = time.monotonic(), self._sums()
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._events: Any = None
        with contextlib.suppress(ImportError):  # an optional part
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder / BOARD))  # type: ignore[no-untyped-call]

    def _sums(self) -> tuple[float, float]:
        """Busy seconds so far, of all targets and of all drafters."""
        busy = [self.board.get(rank, "busy") for rank in range(self.world.size)]
        return sum(busy[: self.world.targets]), sum(busy[self.world.targets :])

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """The time within, such as a walk's, is no step's. What ranks do ahead meanwhile counts for the next step."""
        at = time.monotonic()
        yield
        self._at += time.monotonic() - at

    def step(self, found: Step) -> None:
        """Log one step. A micro-batch counts where it ends; it may have been made before the step: at most 1."""
        now, busy = time.monotonic(), self._sums()
        seconds = max(1e-9, now - self._at)
        shares = [
            round(min(1.0, (after - before) / seconds / max(1, ranks)), 4)
            for after, before, ranks in zip(busy, self._busy, (self.world.targets, self.world.drafters), strict=True)
        ]
        self._at, self._busy = now, busy
        self._seconds.append(seconds)
        self.counts["rows"] += len(found.rows)
        self.counts["tokens"] += found.tokens
        self.counts["empty_steps"] += found.empty
        depths = [self.board.depth(rank) for rank in range(self.world.targets, self.world.size)]
        memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _resident()
        entry = {
            "step": found.number + 1,
            "epoch": found.epoch,
            "loss": found.loss,
            "lr": found.lr,
            "grad_norm": found.norm,
            "accuracy": [round(value, 4) for value in position_accuracy(found.table)],
            "uniform_tau": round(uniform_tau(found.table), 4),
            "seconds": round(seconds, 4),
            "tokens": found.tokens,
            "tokens_per_s": round(found.tokens / seconds, 1),
            "target_busy": shares[0] if self.world.targets else shares[1],
            "drafter_busy": shares[1],
            "ring_depth": sum(depths) / len(depths),
            "targets": self.world.targets,
            "drafters": self.world.drafters,
            "memory_bytes": memory,
        }
        if found.empty:
            entry["empty"] = True
        self._write(entry | {"rows": found.rows})
        self.last |= entry | {"eta_s": round(mean(self._seconds) * (self.total - found.number - 1), 1), **self.counts}
        self._draw(entry)

    def measured(self, step: int, counts: list[int], kind: str = "held_out_tau") -> float | None:
        """Log a walk over the held-out rows after `step` steps; its mean yield."""
        tau = acceptance(counts)
        if tau is not None:
            entry = {"step": step, kind: round(tau, 4), "blocks": sum(counts), "yields": counts}
            self._write(entry)
            self.last[kind] = entry[kind]
            self._draw(entry)
        return tau

    def _write(self, entry: dict[str, Any]) -> None:
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()

    def _draw(self, entry: dict[str, Any]) -> None:
        if self._events is None:
            return
        for name, value in entry.items():
            if name == "accuracy":
                for place, share in enumerate(value, 1):
                    self._events.add_scalar(f"accuracy/{place}", share, entry["step"])
            elif isinstance(value, int | float) and name != "step":
                self._events.add_scalar(name, value, entry["step"])

    def close(self) -> None:
        self.file.close()
        if self._events is not None:
            self._events.close()


def _resident() -> int:
    """Peak bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
