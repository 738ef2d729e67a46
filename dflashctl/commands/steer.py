"""The verbs that find out why, and change a run that is there: `why`, `stop`, `scale`, `rm`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl import show
from dflashctl.commands.common import LATEST, RunRef, Session, opened, verb
from dflashctl.errors import UsageError, redact, secrets_of

if TYPE_CHECKING:
    from dflashctl.backends.base import Known
    from dflashctl.runs import Facts, Status
    from dflashctl.why import Cause

STOPPED = "Exit143"  # of what SIGTERM has ended


def add(app: typer.Typer) -> None:
    """Register the verbs."""

    @verb(app)
    def why(
        session: Session,
        run: RunRef = LATEST,
        bundle: Annotated[
            bool, typer.Option("--bundle", help="Write what this is read from to RUN-bundle.json.")
        ] = False,
    ) -> int:
        """Say why a run stands still or failed.

        Causes with a remedy each, most weighty first. Exits 0 whenever it could answer.
        """
        from dflashctl.runs import look
        from dflashctl.why import as_json

        backend, known, out = opened(session, run)
        now, facts = look(backend, known, out)
        causes = backend.why(known.run)
        if now.state == "suspended":  # that its processes were ended is no cause beside it
            causes = [cause for cause in causes if cause.kind != STOPPED or known.kind == "train"]
        causes = [*_of_out(now, facts, known, causes), *causes]
        if now.state == "succeeded":
            causes = []
        document: dict[str, Any] = {
            "schema": "dflash.why/1",
            "run": known.run,
            "state": now.state,
            "reason": now.reason,
            "causes": as_json(causes),
        }
        if facts.unread:
            show.warn(facts.unread, "what the backend knows is shown")
        if bundle:
            path = Path(f"{known.run}-bundle.json")
            text = json.dumps({**document, "objects": backend.bundle(known.run)}, ensure_ascii=False, indent=1)
            path.write_text(redact(text, secrets_of(os.environ)) + "\n", encoding="utf-8")
            show.say(f"wrote {path}")
        show.emit(document, session.output, lambda: _lines(known.run, now.state, causes), known.run)
        return 0

    @verb(app)
    def stop(session: Session, run: RunRef = LATEST) -> int:
        """Suspend a run; resume goes on.

        A pod or process gets SIGTERM: a training ends its step and saves it before it goes.
        """
        from dflashctl.runs import ENDED, look

        backend, known, out = opened(session, run)
        now, _ = look(backend, known, out)
        if now.state in ENDED or now.state == "suspended":
            show.say(f"run {known.run} is {now.state} already" + (f": {now.reason}" if now.reason else ""))
        else:
            if known.kind == "train":
                show.say("the step under way is finished and saved first")
            backend.stop(known.run)
            now, _ = look(backend, known, out)
            show.say(f"run {known.run} {now.state}")
        show.emit(now.document(), session.output, list, known.run)
        return 0

    @verb(app)
    def scale(
        session: Session,
        run: RunRef,
        parallelism: Annotated[int, typer.Option("--parallelism", metavar="N", help="Indexes that run at once.")],
    ) -> int:
        """Change how much of a run goes on at once."""
        from dflashctl.plan import clamp_parallelism
        from dflashctl.runs import ENDED, look

        if parallelism < 1:
            raise UsageError(f"`--parallelism` {parallelism} is below 1", "`dflashctl stop` suspends a run")
        backend, known, out = opened(session, run)
        now, _ = look(backend, known, out)
        if now.state in ENDED:
            show.say(f"run {known.run} is {now.state} already" + (f": {now.reason}" if now.reason else ""))
        else:
            usable = backend.scale(known.run, parallelism)
            _, remark = clamp_parallelism(parallelism, usable)
            show.say(remark or f"run {known.run} scaled to parallelism {usable}")
        show.emit(now.document(), session.output, list, known.run)
        return 0

    @verb(app)
    def rm(session: Session, run: RunRef) -> int:
        """Remove a run's Jobs and pods; OUT stays.

        What is committed stays in OUT, and `tokenize` or `resume OUT` goes on from it. Data is never removed.
        """
        backend, known, _ = opened(session, run)
        backend.remove(known.run)
        show.say(f"run {known.run} removed; {known.out} is as it was")
        document = {"schema": "dflash.rm/1", "run": known.run, "out": known.out, "removed": time.time()}
        show.emit(document, session.output, list, known.run)
        return 0


def _of_out(now: Status, facts: Facts, known: Known, told: list[Cause]) -> list[Cause]:
    """What no pod can tell: the gate refused the dataset, it was damaged, or (unless more was told) the run is
    suspended, unknown, or without what it had written.
    """
    from dflashctl.runs import after_refusal
    from dflashctl.verify import REMEDY
    from dflashctl.why import Cause

    state, reason = now.state, now.reason
    if facts.damage:
        return [Cause("Damaged", reason, REMEDY, 100)]
    if state == "failed" and not told:
        again = f"`dflashctl resume {known.run}` does what has no commit"
        gone = "put OUT back where it was, or run the same `dflashctl tokenize` again"
        return [Cause("NotComplete", reason, again if facts.sizes else gone, 100)]
    if state == "deleted" and not told:
        return [Cause("Deleted", reason, f"`dflashctl resume {known.out}` goes on with what it holds", 100)]
    if state == "suspended" and not any("dflashctl resume" in cause.remedy for cause in told):
        words = reason or "stopped; what has a commit is done, all else begins anew"
        return [Cause("Suspended", words, f"`dflashctl resume {known.run}`", 100)]
    if state != "refused":
        return []
    return [Cause("Refused", reason, after_refusal(reason), 100)]


def _lines(run: str, state: str, causes: list[Cause]) -> list[str]:
    from dflashctl.plan import ranges

    lines = [f"{run} {state}" + ("" if causes else ": nothing is wrong that can be seen")]
    for cause in causes:
        where = f" (index {ranges(cause.indexes)})" if cause.indexes else ""
        lines += [f"{cause.kind}{where}: {show.printable(cause.message)}", f"  remedy: {cause.remedy}"]
    return lines
