"""`report`: a dataset or a training to look at."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflashctl import show
from dflashctl.commands.common import Session, keeper, verb
from dflashctl.errors import ApiError, PreflightError

if TYPE_CHECKING:
    from dflashctl.records import Out
    from dflashctl.runs import Status


def add(app: typer.Typer) -> None:
    """Register the verb."""

    @verb(app)
    def report(
        session: Session,
        out: Annotated[str, typer.Argument(metavar="OUT", help="Of a dataset or a training: a path or s3://.")],
        html: Annotated[
            bool, typer.Option("--html", help="Write NAME-report.html here, one file with its charts.")
        ] = False,
    ) -> int:
        """Report on a dataset or a training.

        As text, or as one page to look at: counts, rejects and samples, or loss, acceptance and speed over the steps.
        """
        from dflashctl.records import QUICK, Out

        place = Out(out, QUICK)
        text = _page(session, place) if html else ""
        if not html:
            return _as_text(session, place)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", place.uri.rstrip("/").rpartition("/")[2]) or "out"
        path = Path(f"{name}-report.html")
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ApiError(f"`{path}` cannot be written: {error.strerror}", "run it in another directory") from None
        document = {"schema": "dflash.report/1", "out": place.uri, "file": str(path)}
        show.emit(document, session.output, lambda: [str(path)], str(path))
        return 0


def _page(session: Session, out: Out) -> str:
    from dflashctl import report, trained
    from tokenizer.store import NotFound

    if (record := out.dataset() or out.refused()) is not None:
        return report.of_dataset(out.uri, record)
    identity = trained.read_json(out, trained.RUN).get("identity")
    if identity is not None and (now := _training(session, out)) is not None:
        story = trained.read_json(out, trained.PROVENANCE)
        try:
            metrics = out.store.get_bytes(trained.METRICS)
        except NotFound:
            metrics = b""
        state = "complete" if now.state == "succeeded" else f"not complete, {now.state}"
        return report.of_training(out.uri, state, metrics, identity, story)
    if out.plan() is not None:
        return report.of_dataset(out.uri, out.summary())
    raise PreflightError(f"`{out.uri}` holds neither a dataset nor a training", "name the OUT of one")


def _training(session: Session, out: Out) -> Status | None:
    """Where a training stands, as `status` says it; None where OUT is none's. One that is complete needs no backend."""
    from dflashctl import trained
    from dflashctl.runs import Facts, combine, look

    known = trained.known_of(out, [])
    if known is None:
        return None
    if (told := trained.told(out)).finished:
        return combine(known, Facts(training=told), None)
    backend = session.backend()
    known = trained.known_of(out, backend.runs()) or known
    return look(keeper(backend, known), known, out)[0]


def _as_text(session: Session, out: Out) -> int:
    """What `inspect` or `status` say of it."""
    from dflashctl import inspect, trained

    now = _training(session, out)
    if now is not None:
        show.emit(now.document(), session.output, lambda: trained.block(now), now.run)
        return 0
    record = out.dataset() or out.refused()
    if record is None and out.plan() is None:
        raise PreflightError(f"`{out.uri}` holds neither a dataset nor a training", "name the OUT of one")
    found = record or out.summary()
    show.emit(inspect.report(found), session.output, lambda: inspect.lines(found, session.output == "wide"), out.uri)
    return 0
