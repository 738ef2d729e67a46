"""The verbs that look at runs: `status`, `wait`, `ls`."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl import show
from dflashctl.commands.common import LATEST, RunRef, Session, opened, seconds, verb
from dflashctl.errors import RunFailed

if TYPE_CHECKING:
    from dflashctl.backends.base import Backend, Known
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

        backend, known, out = opened(session, run)
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
        columns = None if wide or not show.is_terminal(sys.stdout) else shutil.get_terminal_size().columns
        show.emit(now.document(), session.output, lambda: follow.status_block(now, None, columns, wide), known.run)
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
        patience = follow.Patience(seconds(stuck_after, "--stuck-after"))
        backend, known, out = opened(session, run)
        now = follow.watch(backend, known, out, patience.over, timeout=limit)
        show.emit(now.document(), session.output, lambda: follow.status_block(now, None), known.run)
        if now.state != "succeeded":
            words = f"run `{known.run}` {now.state}" + (f": {now.reason}" if now.reason else "")
            raise RunFailed(words, f"see `dflashctl why {known.run}`")
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
