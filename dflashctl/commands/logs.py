"""`logs`: what pods or processes print, and what the failed ones left in OUT once they are gone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl import show
from dflashctl.commands.common import LATEST, RunRef, Session, opened, verb
from dflashctl.errors import ApiError, Detached, RunFailed, UsageError

if TYPE_CHECKING:
    from dflashctl.backends.base import Backend, Known, LogLine
    from dflashctl.records import Out

ROLES = ("target", "drafter", "supervisor")  # who speaks in the log of a training
PAUSE = 1.0  # seconds between two looks for a first pod


def add(app: typer.Typer) -> None:
    """Register the verb."""

    @verb(app)
    def logs(
        session: Session,
        run: RunRef = LATEST,
        index: Annotated[str | None, typer.Option("--index", metavar="N", help="One index, or 0-2,5.")] = None,
        failed: Annotated[bool, typer.Option("--failed", help="Only indexes that failed.")] = False,
        role: Annotated[
            str | None, typer.Option("--role", metavar="target|drafter|supervisor", help="Of a training: who spoke.")
        ] = None,
        follow_: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
        previous: Annotated[bool, typer.Option("--previous", help="The try before the newest one.")] = False,
        grep: Annotated[str | None, typer.Option("--grep", metavar="REGEX", help="Only lines that match.")] = None,
        no_wait: Annotated[bool, typer.Option("--no-wait", help="Exit 3 if nothing has started yet.")] = False,
    ) -> int:
        """Print what a run's indexes said.

        Each line bears its index unless one alone was asked for; -o json prints one object at the end.
        """
        from dflashctl import plan
        from dflashctl.runs import look

        try:
            pattern = re.compile(grep or "")
        except re.error as error:
            raise UsageError(f"`--grep` {grep!r} is not a regular expression: {error}") from None
        if role not in (None, *ROLES):
            raise UsageError(f"`--role` is {role!r}", f"known are {', '.join(ROLES)}")
        backend, known, out = opened(session, run)
        if role is not None and known.kind != "train":
            raise UsageError(f"`--role` is of trainings, `{known.run}` is none", "name a training")
        indexes = None if index is None else plan.parse_indexes(index)
        if indexes:
            now, facts = look(backend, known, out)
            if not facts.unread and 0 < now.total <= indexes[-1]:
                raise UsageError(f"`--index` {index} is not of run `{known.run}`", f"its indexes are 0-{now.total - 1}")
        if failed:
            broken = set(look(backend, known, out)[0].failed)
            indexes = sorted(broken if indexes is None else broken & set(indexes))
        if no_wait and follow_:
            snapshot = backend.snapshot(known.run)
            follow_ = snapshot is not None and any(i.state not in ("pending", "stuck") for i in snapshot.indexes)
        alone = known.kind == "train" or (indexes is not None and len(indexes) == 1)
        some = shown = False
        as_object = session.output in ("json", "yaml")
        kept: list[dict[str, Any]] = []
        try:
            for line in _lines(backend, known, out, indexes, previous, follow_, no_wait or failed or previous):
                some = True
                if not pattern.search(line.text) or (role is not None and not _of_role(line.text, role)):
                    continue
                shown = True
                if as_object:
                    kept.append({"index": line.index, "text": line.text})
                else:
                    show.out(("" if alone else f"[{line.index}] ") + show.printable(line.text))
        except KeyboardInterrupt:
            raise Detached(f"detached, run `{known.run}` goes on") from None
        if as_object and (some or not no_wait):
            document = {"schema": "dflash.logs/1", "run": known.run, "lines": kept}
            show.emit(document, session.output, list, known.run)
        if some:
            if not shown and not as_object:
                show.say(f"run {known.run}: no line of its log matches")
            return 0
        if no_wait:
            now = look(backend, known, out)[0]
            words = f"run `{known.run}` is {now.state}" + (f": {now.reason}" if now.reason else "")
            raise RunFailed(f"{words}; nothing of it has started", f"see `dflashctl why {known.run}`")
        what = "no index of it has failed" if failed and not indexes else "there is no log to show"
        show.say(f"run {known.run}: {what}")
        return 0


def _of_role(line: str, role: str) -> bool:
    """Whether a rank of that role said a line of a training's log, in its own words or as an event that bears it; the
    supervisor said what no rank did.
    """
    if role == "supervisor":
        return not any(_of_role(line, other) for other in ROLES if other != role)
    return line.startswith(f"[{role}:") or (line.startswith("{") and f'"rank": "{role}:' in line)


def _lines(
    backend: Backend, known: Known, out: Out, indexes: list[int] | None, previous: bool, following: bool, at_once: bool
) -> Iterator[LogLine]:
    """From the backend; of indexes it has nothing of, the tails that failed tries left in OUT.

    Unless `at_once`, a run whose pods have not started yet is waited for.
    """
    from tokenizer.store import StoreError

    seen: set[int] = set()
    said = ""
    while True:
        for line in backend.logs(known.run, indexes, previous, following):
            seen.add(line.index)
            yield line
        snapshot = None if seen or at_once else backend.snapshot(known.run)
        if snapshot is None or snapshot.state not in ("queued", "pending", "running", "stuck"):
            break
        words = f"run {known.run} is {snapshot.state}" + (f": {snapshot.reason}" if snapshot.reason else "")
        if words != said:
            show.say(f"{words}; waiting for its first line")
            said = words
        time.sleep(PAUSE)
    try:
        for line in out.kept_logs(known.job, indexes, previous):
            if line.index not in seen:
                yield line
    except StoreError as error:
        if not seen:
            raise ApiError(f"the kept logs cannot be read: {error.message}", error.hint) from None
        show.warn(f"the kept logs cannot be read: {error.message}", error.hint)
