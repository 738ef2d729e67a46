"""Watching a run until it ends, and what is said about it at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflashctl import show
from dflashctl.backends.base import Backend, Known
from dflashctl.errors import ApiError, Detached, TimedOut
from dflashctl.plan import ranges
from dflashctl.progress import Index
from dflashctl.records import Out
from dflashctl.runs import ENDED, LIVE, Status, combine, look


@dataclass(frozen=True, slots=True)
class Speed:
    """Progress since a first look. rows, tokens: per second; eta: seconds, None where it cannot be told."""

    rows: float
    tokens: float
    eta: float | None


def speed(first: Status, now: Status, seconds: float) -> Speed:
    """Rates between two looks at a run, `seconds` apart; pure."""
    if seconds <= 0:
        return Speed(0.0, 0.0, None)
    read = (now.bytes - first.bytes) / seconds
    eta = (now.total_bytes - now.bytes) / read if read > 0 else None
    rows, tokens = (now.rows - first.rows) / seconds, (now.tokens - first.tokens) / seconds
    return Speed(max(0.0, rows), max(0.0, tokens), eta)


def progress_line(status: Status, pace: Speed) -> str:
    """One whole ASCII line about a run."""
    if status.kind == "train":
        return ", ".join([f"{status.run} {status.state}", *(f"{name} {value}" for name, value in _training(status))])
    parts = [
        f"{status.run} {status.state}",
        f"{status.succeeded}/{status.total} indexes",
        f"{show.count(status.rows)} rows",
        f"{show.count(status.tokens)} tokens",
        show.rate(pace.rows, "rows"),
        show.rate(pace.tokens, "tokens"),
    ]
    if status.failed:
        parts.insert(2, f"{len(status.failed)} failed")
    if pace.eta is not None and status.state in LIVE:
        parts.append(f"ETA {show.span(pace.eta)}")
    return ", ".join(parts)


def index_table(status: Status, wide: bool, busy_first: bool) -> list[str]:
    """One line per index that has begun; busy_first: what a small screen should show before it ends."""
    header = ["index", "state", "try", "rows", "tokens", "read", "reason"]
    rows = []
    for index in sorted(status.indexes, key=_interest) if busy_first else status.indexes:
        message = index.message
        total = int(message.get("total_bytes") or 0)
        read = f"{int(message.get('bytes') or 0) / total:.0%}" if total else ""
        row = [str(index.index), index.state, str(index.tries), *_counts(message), read, show.printable(index.reason)]
        rows.append(row + ([index.pod, index.node] if wide else []))
    return show.table(header + (["pod", "node"] if wide else []), rows, right=(0, 2, 3, 4, 5)) if rows else []


def _interest(index: Index) -> tuple[int, int]:
    order = ("running", "stuck", "failed", "pending")
    return (order.index(index.state) if index.state in order else len(order), index.index)


def _counts(message: Mapping[str, Any]) -> list[str]:
    return [show.count(int(message[key])) if key in message else "" for key in ("rows", "tokens")]


def status_block(status: Status, pace: Speed | None, wide: bool, busy_first: bool = False) -> list[str]:
    """A run in full, as lines; see index_table."""
    if status.kind == "train":
        return training_block(status)
    failed = f", {len(status.failed)} failed" if status.failed else ""
    active = f", {status.active} active" if status.active else ""
    pairs = [
        ("run", status.run),
        ("state", status.state),
        ("out", status.out),
        ("indexes", f"{status.succeeded} of {status.total} succeeded{active}{failed}"),
        ("rows", show.count(status.rows)),
        ("tokens", f"{show.count(status.tokens)} ({show.count(status.loss_tokens)} learnt)"),
    ]
    if status.failed:
        pairs.append(("failed", ranges(status.failed)))
    if status.reason:
        pairs.insert(2, ("reason", show.printable(status.reason)))
    if pace is not None and status.state in LIVE:
        eta = "" if pace.eta is None else f", ETA {show.span(pace.eta)}"
        pairs.append(("speed", f"{show.rate(pace.rows, 'rows')}, {show.rate(pace.tokens, 'tokens')}{eta}"))
    table = index_table(status, wide, busy_first)
    return [*show.pairs(pairs), *([""] if table else []), *table]


def training_block(status: Status) -> list[str]:
    """A training in full, as lines."""
    pairs = [("run", status.run), ("state", status.state), ("out", status.out)]
    if status.reason:
        pairs.append(("reason", show.printable(status.reason)))
    return show.pairs([*pairs, *_training(status)])


def _training(status: Status) -> list[tuple[str, str]]:
    """What the trainer said last, as far as it said it."""
    told = status.indexes[0].message if status.indexes else {}
    pairs = []
    if "step" in told:
        pairs += [("step", f"{told['step']} of {told.get('steps', '?')}"), ("loss", f"{told['loss']:.4f}")]
        pairs.append(("accuracy", " ".join(f"{share:.2f}" for share in told["accuracy"])))
        if "held_out_tau" in told:
            pairs.append(("held-out tau", f"{told['held_out_tau']:.2f}"))
        pairs.append(("speed", show.rate(float(told["tokens_per_s"]), "tokens")))
        busy = f"target {told['target_busy']:.0%}, drafter {told['drafter_busy']:.0%}, ring {told['ring_depth']:.1f}"
        pairs.append(("busy", busy))
        if told.get("saved_step", -1) >= 0:
            pairs.append(("saved", f"step {told['saved_step']}"))
        if status.state in LIVE:
            pairs.append(("ETA", show.span(float(told["eta_s"]))))
    return pairs


def watch(
    backend: Backend,
    known: Known,
    out: Out,
    stop_at: Callable[[Status], bool],
    *,
    every_change: bool = False,
    wide: bool = False,
    timeout: float | None = None,
    quiet: bool = False,
) -> Status:
    """Look again and again until `stop_at`; Ctrl-C raises Detached and leaves the run alone, `timeout` TimedOut.

    A live Job is asked through its backend alone; OUT is read at the start and when the Job has come to rest.
    every_change: without a terminal print each change of state at once, besides the line every ten seconds.
    """
    screen, begin = show.Screen(sys.stderr, time.monotonic), time.monotonic()
    try:
        status, facts = look(backend, known, out)
        first, looks = status, 0
        while True:
            if facts.unread and status.state not in LIVE:
                raise ApiError(facts.unread, "the run is not touched; ask again with `dflashctl status`")
            pace = speed(first, status, time.monotonic() - begin)
            if not quiet:
                _draw(screen, status, pace, wide, every_change)
            if stop_at(status):
                return status
            if timeout is not None and time.monotonic() - begin >= timeout:
                raise TimedOut(f"run `{known.run}` is {status.state} after {show.span(timeout)}", "it goes on")
            time.sleep(backend.pauses[min(looks // 10, len(backend.pauses) - 1)])
            looks += 1
            snapshot = backend.snapshot(known.run)
            if snapshot is not None and snapshot.state in LIVE:
                status = combine(known, facts, snapshot)
            else:
                status, facts = look(backend, known, out)
    except KeyboardInterrupt:
        raise Detached(
            f"detached, run `{known.run}` goes on", f"see it with `dflashctl status {known.run} -w`"
        ) from None


def _draw(screen: show.Screen, status: Status, pace: Speed, wide: bool, every_change: bool) -> None:
    line = f"{status.run} {status.state}: {status.reason}" if status.reason else progress_line(status, pace)
    key = (status.state, status.reason, status.failed)
    screen.update(lambda: status_block(status, pace, wide, busy_first=True), line, key if every_change else None)


class Patience:
    """When watching is over: the run has ended, is in one of `more`, or was stuck for longer than `limit` seconds."""

    def __init__(self, limit: float, more: tuple[str, ...] = ()) -> None:
        self._limit, self._ends, self._since = limit, (*ENDED, *more), 0.0

    def over(self, now: Status) -> bool:
        """Whether this status ends the watching."""
        if now.state != "stuck":
            self._since = 0.0
            return now.state in self._ends
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since >= self._limit


def result(known: Known, out: Out, state: str, seconds: float) -> dict[str, Any]:
    """The object of `tokenize -o json`, whatever became of the run."""
    record = out.dataset() or (out.refused() if state == "refused" else None) or out.summary()
    return {
        "schema": "dflash.tokenize/1",
        "run": known.run,
        "state": state,
        "out": known.out,
        "lines_seen": record["lines"]["seen"],
        "lines_kept": record["lines"]["kept"],
        "lines_rejected": record["lines"]["rejected"],
        "turns_rejected": record["turns_rejected"],
        "rows": record["rows"],
        "tokens": record["tokens"],
        "loss_tokens": record["loss_tokens"],
        "seconds": round(seconds, 3),
    }


def result_lines(document: Mapping[str, Any]) -> list[str]:
    """The same as a table."""
    rejected: Mapping[str, int] = document["lines_rejected"]
    turns: Mapping[str, int] = document["turns_rejected"]
    reasons = "".join(f", {number} {reason}" for reason, number in rejected.items())
    pairs = [
        ("run", document["run"]),
        ("state", document["state"]),
        ("out", document["out"]),
        ("lines", f"{show.count(document['lines_seen'])} seen, {show.count(document['lines_kept'])} kept{reasons}"),
        ("rows", show.count(document["rows"])),
        ("tokens", f"{show.count(document['tokens'])} ({show.count(document['loss_tokens'])} learnt)"),
        ("seconds", f"{document['seconds']:.1f}"),
    ]
    if turns:
        pairs.insert(4, ("turns rejected", ", ".join(f"{number} {reason}" for reason, number in turns.items())))
    return show.pairs(pairs)
