"""The verbs about data and set-up: `inspect` and `doctor`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from dflashctl import show
from dflashctl.commands.common import Session, verb
from dflashctl.errors import PreflightError, UsageError


def add(app: typer.Typer) -> None:
    """Register the verbs."""

    @verb(app)
    def inspect(
        session: Session,
        out: Annotated[str, typer.Argument(metavar="OUT", help="A dataset: a path or s3://.")],
        against: Annotated[
            str | None, typer.Option("--against", metavar="OTHER", help="Set this dataset beside it.")
        ] = None,
    ) -> int:
        """Report on a dataset.

        Rows, tokens, what is learnt, what was rejected and why, and whether it would teach anything.
        """
        from dflashctl import inspect as reports

        record, damaged = _record(out)
        if against is not None:
            other, more = _record(against)
            damaged += more
            document = reports.against((out, record), (against, other))
            standings = [reports.standing(record), reports.standing(other)]
            show.emit(document, session.output, lambda: reports.against_lines(document, standings), out)
        else:
            wide = session.output == "wide"
            show.emit(reports.report(record), session.output, lambda: reports.lines(record, wide), out)
        if damaged:
            from dflashctl.verify import REMEDY

            for found in damaged[1:]:
                show.warn(found)
            raise PreflightError(damaged[0], REMEDY)
        return 0

    @verb(app)
    def doctor(
        session: Session,
        what: Annotated[str, typer.Argument(metavar="tokenize|train", help="What is to be run.")] = "tokenize",
        verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every setting and where it came from.")] = False,
    ) -> int:
        """Look for what would stop a run.

        Nothing is written. Exits 4 if something would.
        """
        from dflashctl import doctor as doctors
        from dflashctl import doctor_train

        if what not in ("tokenize", "train"):
            raise UsageError(f"doctor of {what!r} is not known", "known are tokenize, train")
        found = list((doctors if what == "tokenize" else doctor_train).checks(session.settings))
        found += doctors.cluster_checks(session.settings, what)
        settings = doctors.origins(session.settings)
        document: dict[str, Any] = {
            "schema": "dflash.doctor/1",
            "checks": [asdict(check) for check in found],
            "settings": [{"name": name, "value": value, "origin": origin} for name, value, origin in settings],
        }
        more = ["", *show.table(("setting", "value", "origin"), settings)] if verbose else []
        failed = [check.name for check in found if check.state == "failed"]
        show.emit(document, session.output, lambda: [*doctors.lines(found), *more], "\n".join(failed))
        return 4 if failed else 0


def _record(uri: str) -> tuple[dict[str, Any], list[str]]:
    """dataset.json, else refused.json, else the same figures of what is committed so far; and what of it is damaged."""
    from dflashctl.records import QUICK, Out
    from dflashctl.verify import damage
    from tokenizer.store import locate

    out = Out(uri, QUICK)
    store, key = locate(uri, QUICK)
    one = bool(key) and not uri.endswith("/") and store.stat(key) is not None
    if one and (not uri.startswith("s3://") or out.plan() is None):
        raise PreflightError(
            f"`{uri}` is a file, not a dataset",
            "name the OUT of a `dflashctl tokenize`; `tokenize FILE --preview 3` shows the rows of an input file",
        )
    record = out.dataset()
    if record is not None:
        return record, list(damage(out, record, hashes=True))
    record = out.refused()
    if record is None:
        if out.plan() is None:
            raise PreflightError(f"`{out.uri}` holds no dataset", "name the OUT of a `dflashctl tokenize`")
        record = out.summary()
        show.warn(f"`{out.uri}` is not complete, this is what is committed so far")
    return record, []
