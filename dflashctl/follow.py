"""Watching a run until it ends, and what is said about it at the end."""

from __future__ import annotations

import functools
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dflashctl import show, trained
from dflashctl.backends.base import Backend, Known
from dflashctl.errors import ApiError, Detached, TimedOut
from dflashctl.plan import ranges
from dflashctl.progress import Index
from dflashctl.records import Out
from dflashctl.runs import ENDED, LIVE, Status, combine, look, unsure

ANSWER_S = 10.0  # how long a question may take although the time is up
T = TypeVar("T")


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
        return trained.line(status)
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


TEXTS = ("state", "pod", "node", "reason")  # columns of the table that hold no numbers
LOCAL = ("pod", "node", "completion")  # columns that are left out where there is nothing in them: runs of this machine


def index_table(status: Status, columns: int | None = None, wide: bool = False, busy_first: bool = False) -> list[str]:
    """One line per index that has begun.

    columns: the width to fit, pods and nodes are shortened for it; wide: with the Job's own index; busy_first: what a
    small screen should show before it ends.
    """
    indexes = sorted(status.indexes, key=_interest) if busy_first else status.indexes
    lines: list[str] = []
    for short in (False, True):
        rows = [_cells(index, short) for index in indexes]
        header = [
            name for name in (rows[0] if rows else ())
            if (wide or name != "completion") and (name not in LOCAL or any(row[name] for row in rows))
        ]  # fmt: skip
        right = [at for at, name in enumerate(header) if name not in TEXTS]
        lines = show.table(header, [[row[name] for name in header] for row in rows], right) if rows else []
        if columns is None or all(show.width_of(line) <= columns for line in lines):
            break
    return lines


def _cells(index: Index, short: bool) -> dict[str, str]:
    """The line of one index by column; rates are its pod's own, as it said them last."""
    message = index.message
    total, read = int(message.get("total_bytes") or 0), int(message.get("bytes") or 0)
    pace = eta = ""
    if index.state == "running" and message.get("tokens_per_s"):
        pace = show.number(float(message["tokens_per_s"]))
        seconds = float(message.get("tokens") or 0) / float(message["tokens_per_s"])
        eta = show.span((total - read) * seconds / read) if total and read else ""
    return {
        "index": str(index.index),
        "completion": "" if index.own is None else str(index.own),
        "state": index.state,
        "try": str(index.tries),
        "pod": "-".join(index.pod.rsplit("-", 2)[-2:]) if short else index.pod,
        "node": index.node.partition(".")[0] if short else index.node,
        "rows": show.count(int(message["rows"])) if "rows" in message else "",
        "tokens": show.count(int(message["tokens"])) if "tokens" in message else "",
        "tokens/s": pace,
        "read": f"{read / total:.0%}" if total else "",
        "ETA": eta,
        "reason": show.printable(index.reason),
    }


def _interest(index: Index) -> tuple[int, int]:
    order = ("running", "stuck", "failed", "pending")
    return (order.index(index.state) if index.state in order else len(order), index.index)


def status_block(
    status: Status, pace: Speed | None, columns: int | None = None, wide: bool = False, busy_first: bool = False
) -> list[str]:
    """A run in full, as lines; see index_table."""
    if status.kind == "train":
        return trained.block(status)
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
    table = index_table(status, columns, wide, busy_first)
    return [*show.pairs(pairs), *([""] if table else []), *table]


def within(ask: Callable[[], T], seconds: float | None) -> T:
    """ask(), by a thread that nobody waits for: Ctrl-C comes through whatever it hangs on, and so does a time-out.

    Raises queue.Empty when it has not answered within `seconds`.
    """
    answer: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()

    def work() -> None:
        try:
            value = ask()
        except Exception as error:
            answer.put(functools.partial(_throw, error))
        else:
            answer.put(lambda: value)

    threading.Thread(target=work, daemon=True).start()
    return answer.get(timeout=seconds)()


def _throw(error: Exception) -> Any:
    raise error


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
    state = "not known yet"

    def ask(question: Callable[[], T]) -> T:
        left = None if timeout is None else max(ANSWER_S, begin + timeout - time.monotonic())
        try:
            return within(question, left)
        except queue.Empty:
            raise TimedOut(f"run `{known.run}` is {state}, and nothing answers", "it goes on") from None

    try:
        status, facts = ask(lambda: look(backend, known, out))
        first, looks = status, 0
        while True:
            state = status.state
            pace = speed(first, status, time.monotonic() - begin)
            if not quiet:
                _draw(screen, status, pace, wide, every_change)
            if stop_at(status):
                if unsure(status, facts):
                    raise ApiError(facts.unread, "the run is not touched; ask again with `dflashctl status`")
                return status
            if timeout is not None and time.monotonic() - begin >= timeout:
                raise TimedOut(f"run `{known.run}` is {state} after {show.span(timeout)}", "it goes on")
            pause = backend.pauses[min(looks // 10, len(backend.pauses) - 1)]
            time.sleep(pause if timeout is None else max(0.0, min(pause, begin + timeout - time.monotonic())))
            looks += 1
            snapshot = ask(lambda: backend.snapshot(known.run))
            if snapshot is not None and snapshot.state in LIVE:
                status = combine(known, facts, snapshot)
            else:
                status, facts = ask(lambda: look(backend, known, out))
    except KeyboardInterrupt:
        raise Detached(
            f"detached, run `{known.run}` goes on", f"see it with `dflashctl status {known.run} -w`"
        ) from None


def _draw(screen: show.Screen, status: Status, pace: Speed, wide: bool, every_change: bool) -> None:
    line = f"{status.run} {status.state}: {status.reason}" if status.reason else progress_line(status, pace)
    key = (status.state, status.reason, status.failed)

    def block() -> list[str]:
        columns = None if wide else shutil.get_terminal_size().columns
        return status_block(status, pace, columns, wide, busy_first=True)

    screen.update(block, line, key if every_change else None)


class Patience:
    """When watching is over: the run has ended, is in one of `more`, or was stuck for longer than `limit` seconds.

    unplaced: the limit while no node has room. Other pods end and nodes are added, so that may pass by itself.
    """

    def __init__(self, limit: float, more: tuple[str, ...] = (), unplaced: float | None = None) -> None:
        self._limit, self._ends, self._since = limit, (*ENDED, *more), 0.0
        self._unplaced = limit if unplaced is None else unplaced

    def over(self, now: Status) -> bool:
        """Whether this status ends the watching."""
        if now.state != "stuck":
            self._since = 0.0
            return now.state in self._ends
        self._since = self._since or time.monotonic()
        limit = self._unplaced if now.reason.startswith("Unschedulable") else self._limit
        return time.monotonic() - self._since >= limit


def result(known: Known, out: Out, state: str, seconds: float) -> tuple[dict[str, Any], str]:
    """The object of `tokenize -o json`, whatever became of the run; and that the dataset is not complete, if so."""
    record = out.dataset() or (out.refused() if state == "refused" else None) or out.summary()
    document = {
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
    return document, "" if record.get("complete", True) else record["reasons"][0]


def result_lines(document: Mapping[str, Any], verdict: str) -> list[str]:
    """The same as a table; verdict: how much of a dataset that has not come to its end is counted here, else empty."""
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
    if verdict:
        pairs.insert(3, ("dataset", f"{verdict}, this is what is committed so far"))
    if turns:
        pairs.insert(-3, ("turns rejected", ", ".join(f"{number} {reason}" for reason, number in turns.items())))
    return show.pairs(pairs)
