"""`train`: parse, render, hand over."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl import show
from dflashctl.commands.common import Session, verb
from dflashctl.commands.places import Account, DryRun, Env, Image, Node, Queue, S3Secret, Set, check_side, place_flags

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflashctl.backends.base import Backend, Submission
    from dflashctl.config import Value
    from dflashctl.training import Started

STUCK_S = 600.0


def add(app: typer.Typer) -> None:
    """Register the verb."""

    @verb(app)
    def train(
        session: Session,
        dataset: Annotated[str | None, typer.Argument(metavar="DATASET", help="OUT of a tokenize.")] = None,
        out: Annotated[str | None, typer.Option("--out", metavar="URI", help="Checkpoints, metrics, export.")] = None,
        target: Annotated[
            str | None,
            typer.Option("--target", metavar="M", help="Path on the model volume, s3:// or hub-id@revision."),
        ] = None,
        split: Annotated[
            str | None, typer.Option("--split", metavar="T+D", help="Target and drafter ranks, or colocated.")
        ] = None,
        steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Optimiser steps.")] = None,
        epochs: Annotated[int | None, typer.Option("--epochs", metavar="N", help="Passes over the dataset.")] = None,
        layers: Annotated[
            int | None, typer.Option("--layers", metavar="N", help="Decoder layers of the drafter.")
        ] = None,
        block_size: Annotated[
            int | None, typer.Option("--block-size", metavar="N", help="Tokens of a block, the anchor included.")
        ] = None,
        taps: Annotated[str | None, typer.Option("--taps", metavar="A,B,..", help="Target layers to ship.")] = None,
        mask_token_id: Annotated[
            int | None, typer.Option("--mask-token-id", metavar="N", help="The mask token.")
        ] = None,
        anchors: Annotated[int | None, typer.Option("--anchors", metavar="N", help="Anchors of a row.")] = None,
        max_length: Annotated[
            int | None, typer.Option("--max-length", metavar="N", help="Rows are cut to N tokens; default 3072.")
        ] = None,
        batch_rows: Annotated[
            int | None, typer.Option("--batch-rows", metavar="N", help="Rows of a micro-batch.")
        ] = None,
        accumulate: Annotated[
            int | None, typer.Option("--accumulate", metavar="N", help="Micro-batches of a step.")
        ] = None,
        lr: Annotated[float | None, typer.Option("--lr", metavar="X", help="Peak learning rate.")] = None,
        schedule: Annotated[
            str | None, typer.Option("--schedule", metavar="cosine|wsd", help="Of the learning rate.")
        ] = None,
        seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Default 0.")] = None,
        init_from: Annotated[
            str | None, typer.Option("--init-from", metavar="CKPT", help="z-lab drafter to start from.")
        ] = None,
        checkpoint_every: Annotated[
            str | None, typer.Option("--checkpoint-every", metavar="N|TIME", help="Steps, or 90s, 10m, 2h.")
        ] = None,
        held_out: Annotated[
            float | None, typer.Option("--held-out", metavar="X", help="Share of lines that are measured, not trained.")
        ] = None,
        allow_degenerate: Annotated[
            bool, typer.Option("--allow-degenerate", help="Though the gate calls the dataset degenerate.")
        ] = False,
        name: Annotated[str | None, typer.Option("--name", metavar="RUN", help="Default: trn-<out>-<sha8>.")] = None,
        image: Image = None,
        node: Node = None,
        queue: Queue = None,
        env: Env = None,
        s3_secret: S3Secret = None,
        service_account: Account = None,
        set_: Set = None,
        dry_run: DryRun = None,
        detach: Annotated[bool, typer.Option("--detach", help="Return at once; the run goes on.")] = False,
    ) -> int:
        """Train a drafter.

        One pod, or this machine, with target and drafter ranks side by side. The same command again goes on from the
        last checkpoint, or says that nothing is left to do.
        """
        from dflashctl import training
        from dflashctl.backends.choice import cluster
        from dflashctl.backends.cluster import KubeBackend
        from dflashctl.backends.local import LocalBackend

        flags: dict[str, Any] = {
            "dataset": dataset,
            "out": out,
            "target": target,
            "split": split,
            "steps": steps,
            "epochs": epochs,
            "layers": layers,
            "block_size": block_size,
            "taps": taps,
            "mask_token_id": mask_token_id,
            "anchors": anchors,
            "max_length": max_length,
            "batch_rows": batch_rows,
            "accumulate": accumulate,
            "lr": lr,
            "schedule": schedule,
            "seed": seed,
            "init_from": init_from,
            "checkpoint_every": checkpoint_every,
            "held_out": held_out,
            **place_flags(image, node, queue, env, s3_secret, service_account, set_),
        }
        check_side(dry_run)
        values: Mapping[str, Value] = session.settings.section("train", flags)
        if values["node"].value and session.settings.section("")["backend"].value != "local":
            backend: Backend = cluster(session.settings, "train", flags)  # a node profile is a cluster's
            show.say(backend.words)
        else:
            backend = session.backend("train", flags)
        place = backend.flags({})
        profile: Mapping[str, Any] = {}
        if isinstance(backend, KubeBackend):
            values, profile = backend.placing.values, backend.placing.profile(str(place.get("node") or ""))
        args = training.declare(values, allow_degenerate, profile)
        if isinstance(backend, LocalBackend):
            args = training.here(args)
        job = training.submission(args, training.run_name(args, name), place)
        if dry_run is not None:
            return _dry_run(session, backend, job, dry_run)
        if isinstance(backend, LocalBackend):
            return follow_on(session, training.start_here(args, job, backend, show.say), detach)
        return follow_on(session, training.start_there(args, job, backend), detach)


def _dry_run(session: Session, backend: Backend, job: Submission, side: str) -> int:
    """Print what would be submitted; `server` also has it checked."""
    from dflashctl.backends.cluster import KubeBackend, warn_of_tag
    from dflashctl.render import to_yaml

    rendered = backend.render(job)
    if isinstance(backend, KubeBackend):
        if side == "server":
            backend.check(job)
        else:
            warn_of_tag(rendered)
        if session.output in ("table", "wide", "yaml"):
            show.out(to_yaml([rendered]).rstrip("\n"))
            return 0
    document = {"schema": "dflash.dry-run/1", "backend": backend.name, "run": job.run, "job": rendered}
    show.emit(document, "yaml" if session.output in ("table", "wide") else session.output, list, job.run)
    return 0


def follow_on(session: Session, done: Started, detach: bool) -> int:
    """Say what happened, follow the run unless told not to, print where it stands; the exit code follows its state."""
    from dflashctl import trained
    from dflashctl.follow import Patience, watch
    from dflashctl.records import QUICK, Out
    from dflashctl.runs import look

    known, backend, out = done.known, done.backend, Out(done.known.out, QUICK)
    if done.outcome == "unchanged":
        show.say(f"run {known.run} unchanged: {known.out} is complete")
        now, _ = look(backend, known, out)
        document = now.document() | {"state": "succeeded"}
        show.emit(document, session.output, lambda: trained.block(replace(now, state="succeeded")), known.run)
        return 0
    show.say(f"run {known.run} {'started' if done.outcome == 'started' else 'is running already'}")
    if detach:
        show.say(f"see it with `dflashctl status {known.run} -w`")
        document = {"schema": "dflash.train/1", "run": known.run, "state": "running"}
        show.emit(document, session.output, lambda: [known.run], known.run)
        return 0
    status = watch(backend, known, out, Patience(STUCK_S, ("suspended",)).over)
    if status.state != "succeeded":
        text = f"run {known.run} {status.state}" + (f": {status.reason}" if status.reason else "")
        causes = backend.why(known.run) if status.state == "failed" else []
        show.fail(text, causes[0].remedy if causes else f"`dflashctl resume {known.run}` goes on")
    show.emit(status.document(), session.output, lambda: trained.block(status), known.run)
    return 0 if status.state == "succeeded" else 3
