"""What the processes of one machine tell each other without messages: a few numbers a rank in shared memory.

The supervisor makes it before it forks. A rank writes its own row alone, so there are no locks; the supervisor sees
from it who is silent, and the log what each was busy with and how full the rings are.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np


class Phase(IntEnum):
    """What a rank does; each phase may be silent for a different time."""

    START = 0
    LOAD = 1
    FIRST = 2  # the first step: kernels are compiled
    STEP = 3
    SAVE = 4
    MEASURE = 5
    EXPORT = 6
    END = 7


FIELDS = ("phase", "beat", "steps", "busy", "items", "waits")


class Board:
    """Rows of FIELDS, one a rank, and for each pair of ranks how many micro-batches went over it and were taken."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        sizes = (ranks * len(FIELDS), ranks * ranks, ranks * ranks)
        memory = np.frombuffer(mmap.mmap(-1, 8 * sum(sizes)), np.float64)
        rows, sent, taken = np.split(memory, np.cumsum(sizes)[:-1])
        self.rows = rows.reshape(ranks, len(FIELDS))
        self.sent, self.taken = sent.reshape(ranks, ranks), taken.reshape(ranks, ranks)
        self.rows[:, FIELDS.index("beat")] = time.monotonic()

    def get(self, rank: int, name: str) -> float:
        return float(self.rows[rank, FIELDS.index(name)])

    def add(self, rank: int, name: str, value: float) -> None:
        self.rows[rank, FIELDS.index(name)] += value

    def beat(self, rank: int, phase: Phase | None = None) -> None:
        """Say that the rank's main loop is alive, and what it does now."""
        if phase is not None:
            self.rows[rank, FIELDS.index("phase")] = phase
        self.rows[rank, FIELDS.index("beat")] = time.monotonic()

    @contextmanager
    def waiting(self, rank: int) -> Iterator[None]:
        """While the rank waits for another one, its silence is not its own."""
        self.rows[rank, FIELDS.index("waits")] = 1.0
        yield
        self.rows[rank, FIELDS.index("waits")] = 0.0

    def phase(self, rank: int) -> Phase:
        return Phase(int(self.get(rank, "phase")))

    def depth(self, drafter: int) -> int:
        """Micro-batches that were sent to a drafter and are not taken yet."""
        return int(self.sent[:, drafter].sum() - self.taken[:, drafter].sum())
