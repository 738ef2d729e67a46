"""From settings to the Job of a training: what is impossible is refused here, before anything is started.

On this machine a child (`trainer check`) looks at data, target, drafter and OUT first, since nothing here may know
torch; on a cluster the target lies on the model volume, and the pod looks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dflashctl import show, trained
from dflashctl.backends.base import Backend, Known, Submission
from dflashctl.config import Value
from dflashctl.errors import ApiError, CliError, PreflightError, TakenError, UsageError
from dflashctl.plan import NAME_MAX, check_name, check_out, check_scheme
from dflashctl.records import PATIENT, QUICK, Out
from dflashctl.runs import LIVE
from tokenizer.job import DATASET, PLAN, Exit, JobError
from tokenizer.store import Store, StoreError
from trainer.job import TrainArgs, parse_split

if TYPE_CHECKING:
    from dflashctl.backends.local import LocalBackend

Say = Callable[[str], None]
SHOWN = ("num_hidden_layers", "block_size", "target_layer_ids", "mask_token_id")  # of the drafter, said at a start


def declare(values: Mapping[str, Value], allow_degenerate: bool, profile: Mapping[str, Any]) -> TrainArgs:
    """The settings of [train] with those of the node profile; raises UsageError naming the flag."""
    for key, what in (("dataset", "dataset"), ("out", "OUT (`--out`)"), ("target", "target (`--target`)")):
        if not values[key].value:
            raise UsageError(
                f"no {what} is given", f"name it on the command line or as `{key}` in [train] of dflash.toml"
            )
    check_scheme(values["dataset"].value, "dataset")
    check_out(values["out"].value, os.path.isdir)
    given = {
        f.name: v.value for f in dataclasses.fields(TrainArgs) if (v := values.get(f.name)) and v.value is not None
    }
    if "split" not in given and profile.get("split"):
        given["split"] = profile["split"]
    given["allow_degenerate"] = bool(allow_degenerate or given.get("allow_degenerate"))
    try:
        args = TrainArgs(**given)
        ranks = sum(parse_split(args.split))
    except JobError as error:
        raise UsageError(error.message, error.hint) from None
    gpus = profile.get("gpus")
    if gpus is not None and ranks > gpus:
        raise UsageError(
            f"`--split` {args.split} needs {ranks} GPUs, the node profile has {gpus}",
            "choose fewer ranks, or another --node",
        )
    return args


def here(args: TrainArgs) -> TrainArgs:
    """The same with every path of this machine absolute: a run is found again from any directory."""

    def path(text: str) -> str:
        there = os.path.abspath(os.path.expanduser(text))
        return there if text and os.path.exists(there) else text

    return dataclasses.replace(
        args,
        dataset=Out(args.dataset).uri,
        out=Out(args.out).uri,
        target=path(args.target),
        init_from=path(args.init_from),
    )


def declared(args: TrainArgs) -> dict[str, object]:
    """What was declared: what makes the drafter, by name, and where it goes; pure."""
    return {"dataset": args.dataset, "target": args.target, "out": args.out, **args.identity()}


def sha256(args: TrainArgs) -> str:
    """Digest of the declaration."""
    return hashlib.sha256(json.dumps(declared(args), sort_keys=True).encode()).hexdigest()


def run_name(args: TrainArgs, name: str | None) -> str:
    """`name` once checked, else trn-<slug of OUT>-<8 hex digits of the declaration>."""
    if name is not None:
        return check_name(name)
    last = args.out.rstrip("/").rsplit("/", 1)[-1].lower()
    slug = re.sub(r"[^a-z0-9]+", "-", last).strip("-")[: NAME_MAX - len("trn--") - 8].rstrip("-") or "out"
    return f"trn-{slug}-{sha256(args)[:8]}"


def check_lock(args: TrainArgs, store: Store) -> None:
    """Raises TakenError, naming the flags that differ, where OUT is another training's or a dataset; a store that is
    not there is the trainer's to complain about.
    """
    try:
        if any(store.stat(key) is not None for key in (PLAN, DATASET)):
            raise TakenError(f"OUT `{args.out}` holds a dataset", "choose another --out")
        stored = json.loads(store.get_bytes(trained.RUN))["identity"]
    except (StoreError, ValueError, KeyError, TypeError):
        return
    mine = args.identity()
    wrong = [
        f"{name} is {stored[name]} there, {mine[name]} here"
        for name in mine
        if stored.get(name, mine[name]) != mine[name]
    ]
    if wrong:
        raise _taken(args.out, wrong)


def _taken(out: str, differences: list[str]) -> TakenError:
    return TakenError(f"OUT `{out}` is of another training: {'; '.join(differences)}", "choose another --out")


def submission(args: TrainArgs, run: str, flags: Mapping[str, Any]) -> Submission:
    """The one Job of a training."""
    return Submission(
        run=run,
        job=run,
        out=args.out,
        argv=tuple(args.to_argv()),
        indexes=(0,),
        parallelism=1,
        kind="train",
        model=args.target,
        spec_sha256=sha256(args),
        flags=flags,
    )


# ---- on this machine


def preflight(args: TrainArgs) -> dict[str, Any]:
    """What a training here would start from, as trainer/check.py tells it.

    Raises UsageError for a flag that does not fit the target, PreflightError for anything else that would end it.
    """
    if importlib.util.find_spec("torch") is None:
        raise PreflightError("`train` on this machine needs the trainer's packages", "pip install 'dflashctl[trainer]'")
    # -P: a trainer.py in the user's directory must not be what runs
    command = [sys.executable, "-P", "-m", "trainer", "check", *args.to_argv()]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        words = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ApiError(f"the check before a training ended: {words}", "please report it") from None
    if done.returncode:
        kind: type[CliError] = UsageError if found["exit"] == Exit.USAGE else PreflightError
        raise kind(found["message"], found["hint"])
    return found


def say_found(found: Mapping[str, Any], say: Say) -> None:
    """The drafter's shape, and the memory that is needed, before the start."""
    drafter = found["drafter"]
    words = [f"{name} {drafter[name]['value']} ({drafter[name]['why']})" for name in SHOWN if name in drafter]
    if words:
        say(f"drafter: {', '.join(words)}")
    memory = found["memory"]
    if memory["needed"] > memory["free"]:
        copies = f"{memory['copies']} cop{'y' if memory['copies'] == 1 else 'ies'} of the target"
        show.warn(
            f"memory: about {show.size(memory['needed'])} are needed ({copies} of {show.size(memory['target'])} each),"
            f" {show.size(memory['free'])} are free",
            "a smaller --split needs fewer copies",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """What came of it: `started`, `running` already, or `unchanged`. backend: the one that keeps the run."""

    known: Known
    backend: Backend
    outcome: str


def start_here(args: TrainArgs, job: Submission, backend: LocalBackend, say: Say) -> Started:
    """Start a training on this machine, or find that it runs or is complete.

    Raises TakenError where OUT or the name is another training's, and as `preflight`.
    """
    out = Out(job.out, PATIENT)
    for other in backend.runs():
        if other.run == job.run and other.out != job.out:
            raise TakenError(
                f"run `{job.run}` is the name of a run with the OUT `{other.out}`", "choose another --name"
            )
    check_lock(args, out.store)
    live = running(out, backend)
    if live is not None and live[1] == job.spec_sha256:
        return live[0]
    backend.check(job)
    found = preflight(args)
    if found["taken"]:
        raise _taken(args.out, found["taken"])
    if live is not None:
        return live[0]
    known = Known(job.run, job.kind, job.out, job.job, time.time())
    if found["finished"]:
        return Started(known, backend, "unchanged")
    say_found(found, say)
    with backend.exclusive():
        live = running(out, backend)
        if live is not None:
            return live[0]
        _record(out, job, str(backend.home))
        backend.submit(job)
    return Started(known, backend, "started")


def running(out: Out, backend: LocalBackend) -> tuple[Started, str] | None:
    """The training that is being done into OUT, here or from another directory, and the digest of its declaration."""
    known = trained.known_of(out, backend.runs())
    place = backend.of(known) if known is not None else backend
    snapshot = place.snapshot(known.run) if known is not None else None
    if known is None or snapshot is None or snapshot.state not in LIVE:
        return None
    return Started(known, place, "running"), str(place.last(known.run).get("spec_sha256"))


def _record(out: Out, job: Submission, home: str) -> None:
    try:
        out.store.put_bytes(trained.JOB, trained.job_record(home, job.document(), time.time()))
    except StoreError as error:
        raise PreflightError(f"OUT cannot be written: {error.message}", error.hint) from None


def resume(known: Known, backend: Backend) -> Started:
    """Let a training go on from its last checkpoint. Raises ApiError where nothing here knows what was started."""
    out = Out(known.out, PATIENT)
    snapshot = backend.snapshot(known.run)
    if snapshot is not None and snapshot.state in LIVE:
        return Started(known, backend, "running")
    if trained.told(out).finished:
        return Started(known, backend, "unchanged")
    if snapshot is not None and backend.name == "local":
        backend.unsuspend(known.run)
    elif job := trained.read_json(out, trained.JOB).get("job"):
        submission = Submission(**{**job, "argv": tuple(job["argv"]), "indexes": tuple(job["indexes"])})
        place = backend.flags(submission.flags)
        moved = any(submission.flags.get(key) != value for key, value in place.items())
        if snapshot is not None and snapshot.state == "suspended" and not moved:
            backend.unsuspend(known.run)
        elif backend.name == "local":
            backend.submit(submission)
        else:
            _submit_there(dataclasses.replace(submission, flags=place), out, backend)
    elif snapshot is not None and snapshot.state == "suspended":
        backend.unsuspend(known.run)
    else:
        raise ApiError(f"no Job of `{known.run}` is known here", "`dflashctl train` again goes on")
    return Started(known, backend, "started")


# ---- on a cluster


def start_there(args: TrainArgs, job: Submission, backend: Backend) -> Started:
    """Submit to a cluster, or find that it runs or is complete; nobody can look at the target before, so the pod does.

    A Job that has ended or hangs makes room for the run's next one, which goes on from the last checkpoint. Raises
    TakenError where OUT or the name is another training's.
    """
    out = Out(job.out, QUICK)
    check_lock(args, out.store)
    known = next(
        (k for k in backend.runs() if k.run == job.run), Known(job.run, job.kind, job.out, job.job, time.time())
    )
    if known.out != job.out:
        raise TakenError(f"run `{job.run}` is the name of a run with another OUT", "choose another --name")
    snapshot = backend.snapshot(job.run)
    if snapshot is not None and snapshot.state in LIVE:
        return Started(known, backend, "running")
    with contextlib.suppress(StoreError):  # a store that is not there is the pod's to complain about
        if trained.told(out).finished:
            return Started(known, backend, "unchanged")
    _submit_there(job, out, backend)
    return Started(known, backend, "started")


def _submit_there(job: Submission, out: Out, backend: Backend) -> None:
    """The run's next Job, on record in OUT for a `resume` from anywhere."""
    taken = [known.job for known in backend.runs() if known.run == job.run]
    job = dataclasses.replace(job, job=job.run if not taken else after(job.run, taken[0]))
    backend.render(job)  # what is impossible is refused before anything is written
    try:
        _record(out, job, "")
    except PreflightError as error:
        show.warn(error.message, "`resume` will not know this Job: the same `train` command goes on")
    backend.submit(job)


def after(run: str, job: str) -> str:
    """The name of the Job after `job`: `run`, `run-r2`, `run-r3`, ..."""
    number = job.removeprefix(f"{run}-r")
    return f"{run}-r{int(number) + 1 if number.isdigit() else 2}"
