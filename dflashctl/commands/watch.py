"""The verbs that look at runs and steer them: `status`, `logs`, `wait`, `stop`, `ls`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl import show
from dflashctl.commands.common import LATEST, RunRef, Session, seconds, verb
from dflashctl.errors import ApiError, Detached, RunFailed, UsageError

if TYPE_CHECKING:
    from dflashctl.backends.base import Backend, Known, LogLine
    from dflashctl.records import Out
    from dflashctl.runs import Status

STUCK_AFTER = "10m"


def add(app: typer.Typer) -> None:
    """Register the verbs."""

    @verb(app)
    def status(
        session: Session,
        run: RunRef = LATEST,
        watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow it; Ctrl-C leaves the run alone.")] = False,
    ) -> int:
        """Say where a run stands, and why.

        Exits 0 whenever it could answer.
        """
        from dflashctl import follow
        from dflashctl.runs import ENDED, look

        backend, known, out = _opened(session, run)
        wide = session.output == "wide"
        if watch:
            text = session.output in ("table", "wide")
            seen = text and show.is_terminal(sys.stderr) and show.is_terminal(sys.stdout)
            now = follow.watch(
                backend,
                known,
                out,
                lambda s: s.state in (*ENDED, "suspended"),
                every_change=True,
                wide=wide,
                quiet=not text,
            )
            if seen:  # the last picture stands on the screen already
                return 0
        else:
            now, facts = look(backend, known, out)
            if facts.unread:
                show.warn(facts.unread, "what the backend knows is shown")
        show.emit(now.document(), session.output, lambda: follow.status_block(now, None, wide), known.run)
        return 0

    @verb(app)
    def logs(
        session: Session,
        run: RunRef = LATEST,
        index: Annotated[str | None, typer.Option("--index", metavar="N", help="One index, or 0-2,5.")] = None,
        failed: Annotated[bool, typer.Option("--failed", help="Only indexes that failed.")] = False,
        follow_: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
        previous: Annotated[bool, typer.Option("--previous", help="The try before the newest one.")] = False,
        grep: Annotated[str | None, typer.Option("--grep", metavar="REGEX", help="Only lines that match.")] = None,
    ) -> int:
        """Print what a run's indexes said.

        Each line bears its index unless one alone was asked for.
        """
        from dflashctl import plan
        from dflashctl.runs import look

        try:
            pattern = re.compile(grep or "")
        except re.error as error:
            raise UsageError(f"`--grep` {grep!r} is not a regular expression: {error}") from None
        backend, known, out = _opened(session, run)
        indexes = None if index is None else plan.parse_indexes(index)
        if failed:
            broken = set(look(backend, known, out)[0].failed)
            indexes = sorted(broken if indexes is None else broken & set(indexes))
        some = False
        try:
            for line in _log_lines(backend, known, out, indexes, previous, follow_):
                some = True
                if pattern.search(line.text):
                    prefix = "" if indexes is not None and len(indexes) == 1 else f"[{line.index}] "
                    show.out(prefix + show.printable(line.text))
        except KeyboardInterrupt:
            raise Detached(f"detached, run `{known.run}` goes on") from None
        if not some:
            what = "no index of it has failed" if failed and not indexes else "there is no log to show"
            show.say(f"run {known.run}: {what}")
        return 0

    @verb(app)
    def wait(
        session: Session,
        run: RunRef = LATEST,
        timeout: Annotated[
            str | None, typer.Option("--timeout", metavar="TIME", help="Exit 124 after 90s, 10m, 2h.")
        ] = None,
        stuck_after: Annotated[
            str, typer.Option("--stuck-after", metavar="TIME", help="Exit 3 when stuck for longer.")
        ] = STUCK_AFTER,
    ) -> int:
        """Wait for the end of a run.

        Exits by it: 0 succeeded; 3 failed, refused, deleted or stuck; 124 timeout.
        """
        from dflashctl import follow

        limit = None if timeout is None else seconds(timeout, "--timeout")
        patience = _Patience(seconds(stuck_after, "--stuck-after"))
        backend, known, out = _opened(session, run)
        now = follow.watch(backend, known, out, patience.over, timeout=limit)
        show.emit(now.document(), session.output, lambda: follow.status_block(now, None, False), known.run)
        if now.state != "succeeded":
            raise RunFailed(f"run `{known.run}` {now.state}" + (f": {now.reason}" if now.reason else ""))
        return 0

    @verb(app)
    def stop(session: Session, run: RunRef = LATEST) -> int:
        """Suspend a run; resume goes on."""
        from dflashctl.runs import ENDED, look

        backend, known, out = _opened(session, run)
        now, _ = look(backend, known, out)
        if now.state in ENDED or now.state == "suspended":
            show.say(f"run {known.run} is {now.state} already")
        else:
            backend.stop(known.run)
            now, _ = look(backend, known, out)
            show.say(f"run {known.run} {now.state}")
        show.emit(now.document(), session.output, list, known.run)
        return 0

    @verb(app)
    def ls(session: Session) -> int:
        """List the runs that are known here."""
        backend = session.backend()
        unread: dict[str, str] = {}
        found = [_listed(backend, known, unread) for known in backend.runs()]
        document = {"schema": "dflash.ls/1", "runs": [_row(now) for now in found]}
        lines = [
            (now.run, now.kind, now.state, f"{now.succeeded}/{now.total}", show.count(now.rows), now.out)
            for now in found
        ]
        header = ("run", "kind", "state", "indexes", "rows", "out")
        show.emit(
            document, session.output, lambda: show.table(header, lines, right=(4,)), "\n".join(n.run for n in found)
        )
        return 0


class _Patience:
    """When `wait` is over: the run has ended, or it was stuck for longer than `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self._limit, self._since = limit, 0.0

    def over(self, now: Status) -> bool:
        """Whether this status ends the waiting."""
        from dflashctl.runs import ENDED

        if now.state != "stuck":
            self._since = 0.0
            return now.state in ENDED
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since >= self._limit


def _opened(session: Session, reference: str) -> tuple[Backend, Known, Out]:
    """The backend, the run that is meant, and its OUT."""
    from dflashctl.records import QUICK, Out
    from dflashctl.runs import find

    backend = session.backend()
    known = find(reference, backend, session.settings)
    return backend, known, Out(known.out, QUICK)


def _listed(backend: Backend, known: Known, unread: dict[str, str]) -> Status:
    """One run's status; a store that did not answer (by its root) is not asked again for the next run."""
    from dflashctl.records import QUICK, Out
    from dflashctl.runs import Facts, combine, look

    root = "/".join(known.out.split("/")[:3]) if known.out.startswith("s3://") else known.out
    if root in unread:
        return combine(known, Facts(unread=unread[root]), backend.snapshot(known.run))
    now, facts = look(backend, known, Out(known.out, QUICK))
    if facts.unread:
        unread[root] = facts.unread
        show.warn(facts.unread)
    return now


def _row(now: Status) -> dict[str, Any]:
    return {key: value for key, value in now.document().items() if key != "schema"} | {"out": now.out}


def _log_lines(
    backend: Backend, known: Known, out: Out, indexes: list[int] | None, previous: bool, following: bool
) -> Iterator[LogLine]:
    """From the backend; where it has nothing left, the tails of failed tries that were kept in OUT."""
    from tokenizer.store import StoreError

    some = False
    for line in backend.logs(known.run, indexes, previous, following):
        some = True
        yield line
    if some or following:
        return
    try:
        yield from out.kept_logs(known.job, indexes, previous)
    except StoreError as error:
        raise ApiError(f"the kept logs cannot be read: {error.message}", error.hint) from None
