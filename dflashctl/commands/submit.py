"""`tokenize` and `resume`: parse, hand over, print."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl import show
from dflashctl.commands.common import LATEST, RunRef, Session, keeper, verb
from dflashctl.commands.places import (
    Account,
    DryRun,
    Env,
    Image,
    Node,
    Queue,
    S3Secret,
    Set,
    check_side,
    place_flags,
)
from dflashctl.errors import Detached, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflashctl.backends.base import Backend, Known
    from dflashctl.plan import Declaration
    from dflashctl.submit import Started
    from tokenizer.job import GateFlags

STUCK_S = 5.0  # how long a run may be stuck before the command that started it gives up watching
UNPLACED_S = 600.0  # the same while no node has room for any of its pods

Parallelism = Annotated[
    int | None, typer.Option("--parallelism", metavar="N", help="Indexes that run at once.", show_default=False)
]
Workers = Annotated[
    int | None, typer.Option("--workers", metavar="N", help="Processes of one index; default: its CPUs.")
]
MaxReject = Annotated[
    float | None,
    typer.Option("--max-reject", metavar="FRACTION", help="Malformed lines allowed; default 0.01. Above: refused."),
]
AllowDegenerate = Annotated[
    bool, typer.Option("--allow-degenerate", help="Finalise what is kept of a degenerate dataset; recorded.")
]
Detach = Annotated[bool, typer.Option("--detach", help="Return as soon as the run has started.")]


def add(app: typer.Typer) -> None:
    """Register the verbs."""

    @verb(app)
    def tokenize(
        session: Session,
        inputs: Annotated[
            list[str] | None,
            typer.Argument(metavar="INPUT", help="Files, directories, globs or prefixes of completions."),
        ] = None,
        out: Annotated[str | None, typer.Option("--out", metavar="URI", help="The dataset: a path or s3://.")] = None,
        model: Annotated[
            str | None, typer.Option("--model", metavar="M", help="Tokenizer: a directory, s3:// or hub id.")
        ] = None,
        parallelism: Parallelism = None,
        shards: Annotated[
            int | None, typer.Option("--shards", metavar="M", help="Default: about 96 MiB of input each.")
        ] = None,
        workers: Workers = None,
        name: Annotated[str | None, typer.Option("--name", metavar="RUN", help="Default: tok-<out>-<sha8>.")] = None,
        max_length: Annotated[
            int | None, typer.Option("--max-length", metavar="N", help="Cut rows to N tokens; default: no cut.")
        ] = None,
        loss_on: Annotated[
            str | None, typer.Option("--loss-on", metavar="all|response", help="What is learnt; default all.")
        ] = None,
        preserve_thinking: Annotated[
            bool | None,
            typer.Option("--preserve-thinking", help="Keep the thinking of earlier turns: one row a conversation."),
        ] = None,
        min_loss_tokens: Annotated[
            int | None, typer.Option("--min-loss-tokens", metavar="N", help="Fewer are filtered; default 16.")
        ] = None,
        template_kwargs: Annotated[
            str | None, typer.Option("--template-kwargs", metavar="JSON", help="For rows that bring none.")
        ] = None,
        generator: Annotated[
            str | None, typer.Option("--generator", metavar="NAME@REV", help="What wrote the completions.")
        ] = None,
        max_reject: MaxReject = None,
        allow_degenerate: AllowDegenerate = False,
        batch_input: Annotated[
            list[str] | None,
            typer.Option("--batch-input", metavar="URI", help="Requests of OpenAI batch outputs; may be repeated."),
        ] = None,
        show_rows: Annotated[
            int | None, typer.Option("--preview", metavar="N", help="Print N rows, what is learnt marked; run nothing.")
        ] = None,
        image: Image = None,
        node: Node = None,
        queue: Queue = None,
        env: Env = None,
        s3_secret: S3Secret = None,
        service_account: Account = None,
        set_: Set = None,
        dry_run: DryRun = None,
        detach: Detach = False,
    ) -> int:
        """Tokenize completions into a dataset.

        Every row is the exact ids that a server saw and the model emitted, with the mask of what is learnt. The same
        command again does what is missing, or says that nothing is.
        """
        from dflashctl import plan, preview, submit
        from dflashctl.config import parse_text

        started = time.monotonic()
        flags: dict[str, Any] = {
            "input": inputs,
            "out": out,
            "model": model,
            "parallelism": parallelism,
            "shards": shards,
            "workers": workers,
            "max_length": max_length,
            "loss_on": loss_on,
            "preserve_thinking": preserve_thinking,
            "min_loss_tokens": min_loss_tokens,
            "template_kwargs": None
            if template_kwargs is None
            else parse_text("json", template_kwargs, "--template-kwargs"),
            "generator": generator,
            "max_reject": max_reject,
            "batch_input": batch_input,
            **place_flags(image, node, queue, env, s3_secret, service_account, set_),
        }
        check_side(dry_run)
        values = session.settings.section("tokenize", flags)
        if show_rows is not None and not values["out"].value:
            values["out"] = replace(values["out"], value="./preview")
        declaration = plan.declare(values, allow_degenerate, os.path.isdir)
        if show_rows is not None:
            return preview.show_rows(declaration, show_rows, session.output)
        backend = session.backend("tokenize", flags)
        if dry_run is not None:
            return _dry_run(session, declaration, name, backend, dry_run)
        done = submit.tokenize(declaration, name, backend, show.say)
        return _finish(session, done, keeper(backend, done.known), detach, started)

    @verb(app)
    def resume(
        session: Session,
        run: RunRef = LATEST,
        skip_file: Annotated[
            list[str] | None,
            typer.Option("--skip-file", metavar="KEY", help="Leave this input out; recorded. May be repeated."),
        ] = None,
        max_reject: MaxReject = None,
        allow_degenerate: AllowDegenerate = False,
        parallelism: Parallelism = None,
        workers: Workers = None,
        image: Image = None,
        node: Node = None,
        queue: Queue = None,
        env: Env = None,
        s3_secret: S3Secret = None,
        service_account: Account = None,
        set_: Set = None,
        detach: Detach = False,
    ) -> int:
        """Let a run go on after a stop, a failure or a crash.

        A dataset: what has no commit, changed input files as they are now. A training: from its last checkpoint.
        """
        from dflashctl import submit
        from dflashctl.runs import find

        started = time.monotonic()
        for flag, number in (("parallelism", parallelism), ("workers", workers)):
            if number is not None and number < 1:
                raise UsageError(f"`--{flag}` {number} is below 1")
        if max_reject is not None and not 0 <= max_reject <= 1:
            raise UsageError(f"`--max-reject` {max_reject} is not a share between 0 and 1")

        def gate(flags: GateFlags) -> GateFlags:
            return replace(
                flags,
                allow_degenerate=flags.allow_degenerate or allow_degenerate,
                max_reject=flags.max_reject if max_reject is None else max_reject,
            )

        place = place_flags(image, node, queue, env, s3_secret, service_account, set_)
        backend = session.backend("tokenize", place)
        known = find(run, backend, session.settings)
        if known.kind == "train":
            return _resume_training(session, known, backend, place, detach)
        backend = keeper(backend, known)
        done = submit.resume(known, backend, show.say, skip_file or [], gate, parallelism, workers)
        return _finish(session, done, backend, detach, started)


def _resume_training(session: Session, known: Known, backend: Backend, place: Mapping[str, Any], detach: bool) -> int:
    from dflashctl import training
    from dflashctl.backends.choice import cluster
    from dflashctl.commands.train import follow_on

    if backend.name == "kube":  # where its pods go is said in [train]
        backend = cluster(session.settings, "train", place)
    return follow_on(session, training.resume(known, keeper(backend, known)), detach)


def _dry_run(session: Session, declaration: Declaration, name: str | None, backend: Backend, side: str) -> int:
    """Print the submission; `client` with --shards asks neither the input nor the model."""
    from dflashctl import submit
    from dflashctl.backends.cluster import warn_of_tag

    document = submit.declared(declaration, name, backend)
    if side == "server" or declaration.shards is None:
        prepared = submit.prepare(declaration, name, show.say)
        document = submit.planned(prepared, declaration, backend, ask_server=side == "server")
    if backend.name == "kube" and side == "client":
        warn_of_tag(document["job"])
    if backend.name == "kube" and session.output in ("table", "wide", "yaml"):
        show.out(manifest(document["job"]))
        return 0
    output = "yaml" if session.output in ("table", "wide") else session.output
    show.emit(document, output, list, str(document["run"]))
    return 0


def manifest(job: dict[str, Any]) -> str:
    """A Job as the YAML that `kubectl apply -f -` takes."""
    from dflashctl.render import to_yaml

    return to_yaml([job]).rstrip("\n")


def _finish(session: Session, done: Started, backend: Backend, detach: bool, started: float) -> int:
    """Say what happened, follow the run unless told not to, print its result; the exit code follows its state."""
    run = done.known.run
    try:
        state = _follow(done, backend, detach)
    except KeyboardInterrupt:  # also while the modules of the following are loaded
        raise Detached(f"detached, run `{run}` goes on", f"see it with `dflashctl status {run} -w`") from None
    from dflashctl import follow

    document, verdict = follow.result(done.known, done.out, state, time.monotonic() - started)
    detached = detach and state == "running"
    show.emit(document, session.output, lambda: [run] if detached else follow.result_lines(document, verdict), run)
    return 0 if detached or state == "succeeded" else 3


def _follow(done: Started, backend: Backend, detach: bool) -> str:
    """The state that the run came to; with `detach`, that it runs."""
    known = done.known
    if done.outcome == "unchanged":
        show.say(f"run {known.run} unchanged: {known.out} is complete")
        return "succeeded"
    words = {"started": "started", "running": "is running already", "settled": "needs no further Job"}
    show.say(f"run {known.run} {words[done.outcome]}")
    if detach and done.outcome != "settled":
        show.say(f"see it with `dflashctl status {known.run} -w`")
        return "running"
    from dflashctl import follow

    status = follow.watch(backend, known, done.out, follow.Patience(STUCK_S, ("suspended",), UNPLACED_S).over)
    if status.state != "succeeded":
        text = f"run {known.run} {status.state}" + (f": {status.reason}" if status.reason else "")
        show.fail(text, _hint(status.state, known.run, status.reason))
    return status.state


def _hint(state: str, run: str, reason: str) -> str:
    if state == "refused":
        from dflashctl.runs import after_refusal

        return after_refusal(reason)
    if state == "suspended":
        return f"go on with `dflashctl resume {run}`"
    if state == "stuck":
        return f"see `dflashctl why {run}`; once it is mended the run goes on, or `dflashctl resume {run}`"
    return f"see `dflashctl logs {run} --failed`, then `dflashctl resume {run}`"
