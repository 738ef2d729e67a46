"""`balance`: which split is fastest, by what a training measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dflashctl import show
from dflashctl.commands.common import Session, verb
from dflashctl.errors import PreflightError, UsageError


def add(app: typer.Typer) -> None:
    """Register the verb."""

    @verb(app)
    def balance(
        session: Session,
        out: Annotated[str, typer.Argument(metavar="OUT", help="Of a training, some steps old: a path or s3://.")],
        ranks: Annotated[
            int | None, typer.Option("--ranks", metavar="N", help="Ranks to split; default: as many as it has.")
        ] = None,
    ) -> int:
        """Say which split would be fastest.

        Tokens a second, hours and memory of every split, from the busy seconds that a training measured of itself.
        They overlap fully and sending is free in this model: a bound, not a promise.
        """
        from dflashctl import balance as model
        from dflashctl import report, trained
        from dflashctl.records import QUICK, Out
        from trainer.job import TrainArgs

        if ranks is not None and ranks < 1:
            raise UsageError(f"`--ranks` {ranks} is below 1", "one rank is both, colocated")
        place = Out(out, QUICK)
        identity = trained.read_json(place, trained.RUN).get("identity")
        if identity is None or place.store.stat(trained.METRICS) is None:
            raise PreflightError(f"`{place.uri}` holds no training that has made a step", "train some steps first")
        steps, _ = report.read_metrics(place.store.get_bytes(trained.METRICS))
        found = model.cost(steps)
        job = trained.read_json(place, trained.JOB).get("job")
        target = TrainArgs.from_argv(job["argv"]).target if job else ""
        whole = int(trained.told(place).figures.get("steps") or identity.get("steps") or 0)
        document: dict[str, Any] = {
            "schema": "dflash.balance/1",
            "out": place.uri,
            "measured": {
                "steps": found.measured,
                "target_s_per_mtoken": round(found.target * 1e6, 3),
                "drafter_s_per_mtoken": round(found.drafter * 1e6, 3),
            },
            "splits": model.splits(found, ranks or found.ranks, identity["accumulate"], whole, _weights(target)),
        }
        show.emit(document, session.output, lambda: model.lines(document), document["splits"][0]["split"])
        return 0


def _weights(target: str) -> int:
    """Bytes of the target's files where they lie on this machine, else 0."""
    return sum(path.stat().st_size for path in Path(target).glob("*.safetensors")) if target else 0
