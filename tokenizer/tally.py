"""What is counted while rows are made: per object by a worker, added up per index, written into the commit record.

All of it is exact and the same for any number of workers. Memory stays bounded however many rows there are: the
histogram has one entry per loss count, repeated texts are found from 8-byte hashes spooled to disk.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HASH_BYTES = 8
CANDIDATES = 128  # a text in 1 % of some rows is among their 128 most frequent candidates (1/100 > 1/129)
EXCERPT = 200  # characters of a repeated text that are kept
SAMPLES = 3
READ = 1 << 20  # hashes looked at in one go
BUCKETS = 1 << 16


def text_hash(replies: Sequence[str]) -> bytes:
    """8 bytes that stand for the supervised texts of one row."""
    return hashlib.sha256("\0".join(replies).encode("utf-8", "surrogatepass")).digest()[:HASH_BYTES]


@dataclass(slots=True)
class Frequent:
    """Misra-Gries: holds the beginning of every text that makes up more than 1/(CANDIDATES + 1) of those added."""

    counts: dict[bytes, int] = field(default_factory=dict)
    texts: dict[bytes, str] = field(default_factory=dict)

    def add(self, key: bytes, replies: Sequence[str]) -> None:
        counts = self.counts
        if key in counts:
            counts[key] += 1
        elif len(counts) < CANDIDATES:
            counts[key] = 1
            self.texts[key] = "\n".join(replies)[:EXCERPT]
        else:
            self.counts = {k: n - 1 for k, n in counts.items() if n > 1}
            self.texts = {k: self.texts[k] for k in self.counts}


def repeated(spools: Iterable[Path], total: int, share: float) -> dict[bytes, int]:
    """Hash -> count, exact, of every hash that is at least twice and in `share` of the `total` in the spool files.

    Two passes: only the few of 65,536 buckets that are full enough to hold such a hash are looked into.
    """
    least = max(2, int(np.ceil(share * total)))
    files = list(spools)
    fill = np.zeros(BUCKETS, np.int64)
    for block in _blocks(files):
        fill += np.bincount((block % BUCKETS).astype(np.int64), minlength=BUCKETS)
    full = fill >= least
    counts: Counter[int] = Counter()
    if full.any():
        for block in _blocks(files):
            values, numbers = np.unique(block[full[(block % BUCKETS).astype(np.int64)]], return_counts=True)
            counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
    return {value.to_bytes(HASH_BYTES, "little"): n for value, n in counts.items() if n >= least}


def _blocks(files: Sequence[Path]) -> Iterable[Any]:
    for path in files:
        with path.open("rb") as file:
            while data := file.read(READ * HASH_BYTES):
                yield np.frombuffer(data, "<u8")


@dataclass(slots=True)
class Tally:
    """Counts of some lines; `add` puts two together. `lines_seen == lines_kept + lines_rejected.total()`."""

    lines_seen: int = 0
    lines_kept: int = 0
    lines_rejected: Counter[str] = field(default_factory=Counter)
    turns_rejected: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    rows_cut: int = 0
    loss_tokens_cut: int = 0
    control_tokens: int = 0
    before: Counter[int] = field(default_factory=Counter)  # loss tokens of a row -> rows, ahead of the filter
    after: Counter[int] = field(default_factory=Counter)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for name in ("lines_seen", "lines_kept", "rows", "tokens", "loss_tokens", "rows_cut", "loss_tokens_cut"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.control_tokens += other.control_tokens
        for name in ("lines_rejected", "turns_rejected", "before", "after"):
            getattr(self, name).update(getattr(other, name))
        self.samples = [*self.samples, *other.samples][:SAMPLES]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, for a worker to hand to its parent."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Tally:
        tally = cls(**value)
        for name in ("lines_rejected", "turns_rejected"):
            setattr(tally, name, Counter(value[name]))
        for name in ("before", "after"):
            setattr(tally, name, Counter({int(k): n for k, n in value[name].items()}))
        return tally

    def record(self) -> dict[str, Any]:
        """The fields of a commit record."""
        return {
            "lines": {
                "seen": self.lines_seen,
                "kept": self.lines_kept,
                "rejected": dict(sorted(self.lines_rejected.items())),
            },
            "turns_rejected": dict(sorted(self.turns_rejected.items())),
            "rows": self.rows,
            "tokens": self.tokens,
            "loss_tokens": self.loss_tokens,
            "cut": {"rows": self.rows_cut, "loss_tokens": self.loss_tokens_cut},
            "control_tokens": self.control_tokens,
            "histogram": {
                "before": {str(k): n for k, n in sorted(self.before.items())},
                "after": {str(k): n for k, n in sorted(self.after.items())},
            },
            "samples": self.samples,
        }
