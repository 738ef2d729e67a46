"""Which split of N ranks is fastest, by what a training measured of itself; pure.

A simple model, all of it: a rank costs the seconds that it was busy for a token, whatever the split (the median of the
steps: some are long for other reasons). Targets and drafters overlap fully, sending is free, and a step is as long as
its slower side. The micro-batches of a step are whole, so a drafter of D does ceil(accumulate / D)
of them; targets run ahead into the next step, so theirs need not come out even. Memory is that of a drafter's peak, and
for a target that of its weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dflashctl import show
from dflashctl.errors import PreflightError

WARM = 2  # steps after a start that do not count: kernels are compiled, caches are cold
LEAST = 5  # steps that must be left


@dataclass(frozen=True, slots=True)
class Cost:
    """target, drafter: busy seconds of a rank for a token. tokens: of a step. memory: a drafter's peak, bytes."""

    target: float
    drafter: float
    tokens: float
    memory: int
    ranks: int
    measured: int


def cost(steps: Sequence[Mapping[str, Any]]) -> Cost:
    """What the newest steps of one split cost. steps: lines of metrics.jsonl.

    Raises PreflightError where they are too few, or were colocated, which tells no cost of either side.
    """
    split = _split(steps[-1]) if steps else (0, 0)
    first = next((at for at in range(len(steps), 0, -1) if _split(steps[at - 1]) != split), 0)
    kept = [entry for entry in steps[first + WARM :] if entry["tokens"]]
    targets, drafters = split
    if len(kept) < LEAST:
        raise PreflightError(
            f"{len(kept)} steps of one split are measured, {LEAST} are needed after the first {WARM}",
            "train some more steps first, with a split such as 1+1",
        )
    if not targets:
        raise PreflightError("the newest steps were colocated: they tell no side's cost apart", "train some as T+D")

    def busy(key: str) -> float:
        return float(median(entry[key] * entry["seconds"] / entry["tokens"] for entry in kept))

    return Cost(
        target=targets * busy("target_busy"),
        drafter=drafters * busy("drafter_busy"),
        tokens=sum(entry["tokens"] for entry in kept) / len(kept),
        memory=max(int(entry["memory_bytes"]) for entry in kept),
        ranks=targets + drafters,
        measured=len(kept),
    )


def _split(entry: Mapping[str, Any]) -> tuple[int, int]:
    return int(entry.get("targets", 0)), int(entry.get("drafters", 0))


def splits(found: Cost, ranks: int, accumulate: int, steps: int, weights: int) -> list[dict[str, Any]]:
    """Every split of `ranks`, fastest first. steps: of the whole training, 0 where it is not known; weights: bytes of
    the target, 0 likewise; what depends on them is None then.
    """
    micro = found.tokens / accumulate

    def row(name: str, targets: int, drafters: int, seconds: float) -> dict[str, Any]:
        return {
            "split": name,
            "tokens_per_s": round(found.tokens / seconds, 1),
            "step_seconds": round(seconds, 4),
            "hours": round(steps * seconds / 3600, 2) if steps else None,
            "memory_bytes": targets * weights + drafters * found.memory if weights else None,
        }

    rows = []
    for targets in range(1, ranks):
        drafters = ranks - targets
        slower = max(accumulate / targets * found.target, math.ceil(accumulate / drafters) * found.drafter)
        rows.append(row(f"{targets}+{drafters}", targets, drafters, slower * micro))
    both = math.ceil(accumulate / ranks) * (found.target + found.drafter) * micro
    rows.append(row(f"colocated:{ranks}", ranks, ranks, both))
    return sorted(rows, key=lambda entry: -entry["tokens_per_s"])


def lines(document: Mapping[str, Any]) -> list[str]:
    """The splits as a table."""
    rows = [
        (
            entry["split"],
            show.number(entry["tokens_per_s"]),
            "-" if entry["hours"] is None else f"{entry['hours']:.2f}",
            "-" if entry["memory_bytes"] is None else show.size(entry["memory_bytes"]),
        )
        for entry in document["splits"]
    ]
    told = document["measured"]
    head = f"by {told['steps']} steps: a target rank is busy {told['target_s_per_mtoken']:.1f} s for a million tokens,"
    return [
        f"{head} a drafter rank {told['drafter_s_per_mtoken']:.1f} s",
        "",
        *show.table(("split", "tokens/s", "hours", "memory"), rows, right=(1, 2, 3)),
    ]
