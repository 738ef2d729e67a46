"""`train`: parse, render, hand over."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dflashctl import show
from dflashctl.commands.common import Session, verb
from dflashctl.commands.places import Account, DryRun, Env, Image, Node, Queue, S3Secret, Set, check_side, place_flags
from dflashctl.errors import UsageError


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
    ) -> int:
        """Train a drafter on a cluster node.

        One pod, target and drafter ranks side by side. So far the Job is rendered and checked, not submitted.
        """
        from dflashctl import training
        from dflashctl.backends.choice import cluster
        from dflashctl.backends.cluster import warn_of_tag
        from dflashctl.render import to_yaml

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
        backend = cluster(session.settings, "train", flags)  # a node profile is a cluster's: nothing else runs it yet
        show.say(backend.words)
        place = backend.flags({})
        profile = backend.placing.profile(str(place.get("node") or ""))
        args = training.declare(backend.placing.values, allow_degenerate, profile)
        job = training.submission(args, training.run_name(args, name), place)
        rendered = backend.render(job)
        if dry_run is None:
            raise UsageError(
                "training cannot be started by this release: its image has no training loop yet",
                "`dflashctl train --dry-run` prints and checks the Job",
            )
        if dry_run == "server":
            backend.check(job)
        else:
            warn_of_tag(rendered)
        if session.output in ("table", "wide", "yaml"):
            show.out(to_yaml([rendered]).rstrip("\n"))
        else:
            document = {"schema": "dflash.dry-run/1", "backend": backend.name, "run": job.run, "job": rendered}
            show.emit(document, session.output, list, job.run)
        return 0
