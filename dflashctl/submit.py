"""Starting what has to be done, and nothing else: the one path of `tokenize` and `resume`.

OUT decides: its plan is the lock, its commits say what is left, its run records say how often it was tried. So a
command that crashed, was repeated or is run from another machine finds its way without any local state.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dflashctl import listing
from dflashctl import plan as plans
from dflashctl.backends.base import Backend, Known, Submission
from dflashctl.backends.local import LocalBackend
from dflashctl.changes import changed_objects, skip_key, tell_late
from dflashctl.errors import ApiError, PreflightError, TakenError
from dflashctl.model import Model, check_model, resolve_model
from dflashctl.records import PATIENT, Out
from dflashctl.runs import LIVE, known_of
from dflashctl.verify import refuse
from tokenizer.job import (
    GateFlags,
    JobError,
    Obj,
    Plan,
    RunRecord,
    TokenizeArgs,
    make_plan,
    newest_gate,
    object_difference,
    overlay,
    spec_difference,
)

Say = Callable[[str], None]
APPEARS_S = 15.0  # between the record of a Job and the Job
COMMITTED = ": every index of this one has its commit, and is not read again"
DOWNLOADS = 32  # objects that all pods of a run read at once, about


@dataclass(frozen=True, slots=True)
class Started:
    """What came of a submit: `started` a Job, `running` already, `settled` without one, or `unchanged`."""

    known: Known
    out: Out
    outcome: str


@dataclass(frozen=True, slots=True)
class Operation:
    """What may differ between two Jobs of one dataset.

    place: `Backend.flags` of this Job. model and spec_sha256 (digest of the declaration) only travel along.
    """

    parallelism: int
    workers: int
    gate: GateFlags
    model: str
    spec_sha256: str
    place: Mapping[str, Any]
    repinned: tuple[Obj, ...] = ()
    skipped: tuple[str, ...] = ()

    def flags(self, backend: Backend) -> dict[str, Any]:
        """What the run record keeps, for people and for `resume`."""
        kept = {"parallelism": self.parallelism, "workers": self.workers, "model": self.model}
        place = {**self.place, **_whereabouts(backend)}
        return {"backend": backend.name, **kept, "spec_sha256": self.spec_sha256, **place}


def _whereabouts(backend: Backend) -> dict[str, Any]:
    """Where a run of this machine is kept: for whoever finds it by its OUT, from another directory or machine."""
    return {"host": socket.gethostname(), "home": str(backend.home)} if isinstance(backend, LocalBackend) else {}


def operation_of(declaration: plans.Declaration, backend: Backend) -> Operation:
    """The first Job of a declaration."""
    return Operation(
        declaration.parallelism,
        declaration.workers,
        declaration.gate,
        declaration.model,
        declaration.sha256(),
        backend.flags({}),
    )


@dataclass(frozen=True, slots=True)
class Prepared:
    """A declaration with its input listed and its tokenizer read; nothing is written yet."""

    run: str
    out: Out
    plan: Plan
    model: Model
    found: listing.Found


def prepare(declaration: plans.Declaration, name: str | None, say: Say) -> Prepared:
    """Preflight: list the input, read the tokenizer, cut the plan. Raises PreflightError, UsageError."""
    out = Out(declaration.out, PATIENT)
    run = declaration.run_name(name)
    found = listing.find(declaration.inputs, declaration.batch_inputs, out.uri, PATIENT)
    if skips := found.skips():
        say(skips)
    requests = sorted({o.key for pinned in found.batch_inputs.values() for o in pinned})
    if requests:
        say("prompts of batch outputs are taken from " + ", ".join(f"`{key}`" for key in requests))
    model = resolve_model(declaration.model, PATIENT)
    if warning := check_model(model, declaration.template_kwargs):
        say(f"warning: {warning}")
    plan = cut_plan(declaration, model, found)
    if declaration.shards is not None and len(plan.batches) < declaration.shards:
        say(f"shards {declaration.shards} is clamped to the {len(plan.batches)} input files")
    return Prepared(run, out, plan, model, found)


def cut_plan(declaration: plans.Declaration, model: Model, found: listing.Found) -> Plan:
    """The plan of a declaration; two inputs that give one row id are a PreflightError."""
    try:
        return make_plan(
            found.objects,
            declaration.spec(model.digests()),
            declaration.shards,
            batch_inputs=found.batch_inputs,
            model=model.name,
            left_out=found.skipped,
        )
    except JobError as error:
        raise PreflightError(error.message, error.hint) from None


def submission(run: str, job: str, out: str, indexes: Sequence[int], operation: Operation) -> Submission:
    """One Job over those plan indexes."""
    parallelism, _ = plans.clamp_parallelism(operation.parallelism, len(indexes))
    downloads = max(2, DOWNLOADS // parallelism)
    arguments = TokenizeArgs(out=out, run=job, workers=operation.workers, downloads=downloads)
    return Submission(
        run,
        job,
        out,
        tuple(arguments.to_argv()),
        tuple(indexes),
        parallelism,
        model=operation.model,
        spec_sha256=operation.spec_sha256,
        flags=operation.place,
    )


def declared(declaration: plans.Declaration, name: str | None, backend: Backend) -> dict[str, Any]:
    """What would be submitted as far as it is known without asking any store."""
    run, out = declaration.run_name(name), Out(declaration.out).uri
    job = submission(run, run, out, range(declaration.shards or 1), operation_of(declaration, backend))
    return {"schema": "dflash.dry-run/1", "backend": backend.name, "run": run, "job": backend.render(job)}


def first_job(prepared: Prepared, declaration: plans.Declaration, backend: Backend) -> Submission:
    """The Job that a new OUT would begin with."""
    indexes = range(len(prepared.plan.batches))
    return submission(prepared.run, prepared.run, prepared.out.uri, indexes, operation_of(declaration, backend))


def planned(
    prepared: Prepared, declaration: plans.Declaration, backend: Backend, ask_server: bool = False
) -> dict[str, Any]:
    """What would be submitted, with the input listed; `ask_server`: the backend has to agree to it."""
    plan, found = prepared.plan, prepared.found
    job = first_job(prepared, declaration, backend)
    if ask_server:
        backend.check(job)
    return {
        "schema": "dflash.dry-run/1",
        "backend": backend.name,
        "run": prepared.run,
        "input": {"objects": len(found.objects), "bytes": found.total_bytes(), "skipped": found.skipped},
        "spec": asdict(plan.spec),
        "job": backend.render(job),
    }


def tokenize(declaration: plans.Declaration, name: str | None, backend: Backend, say: Say) -> Started:
    """Do what has no commit of the declared dataset; raises TakenError where OUT or the name is another's."""
    declared(declaration, name, backend)  # what cannot be is refused before anybody is asked
    prepared = prepare(declaration, name, say)
    run, out = prepared.run, prepared.out
    for other in backend.runs():
        if other.run == run and other.out != out.uri:
            raise TakenError(f"run `{run}` is the name of a run with the OUT `{other.out}`", "choose another --name")
    backend.check(first_job(prepared, declaration, backend))
    there = out.plan() or out.lock(prepared.plan)
    with backend.exclusive():
        records = out.runs()
        same_identity(prepared, declaration.shards, there, records)
        if (dataset := out.dataset()) is not None:
            refuse(out, dataset)
            newest = plans.run_of(records[-1].run) if records else run
            return Started(Known(newest, "tokenize", out.uri, newest, 0.0), out, "unchanged")
        out.put_tokenizer(prepared.model)
        operation = operation_of(declaration, backend)
        as_before = bool(records) and records[-1].flags == operation.flags(backend)
        if records and (away := known_of(records[-1], out.uri, backend.runs())).home:
            snapshot = LocalBackend(Path(away.home)).snapshot(away.run)
            if snapshot is not None and snapshot.state in LIVE:
                return Started(away, out, "running")
        for other in backend.runs():
            snapshot = backend.snapshot(other.run) if other.out == out.uri else None
            # what is stuck keeps its place in the cluster's queue unless it is asked for in another way
            if snapshot is not None and snapshot.state in (*LIVE, *(["stuck"] if as_before else [])):
                return Started(other, out, "running")
        return _start(run, out, there, records, operation, backend, say)


def same_identity(prepared: Prepared, shards: int | None, there: Plan, records: Sequence[RunRecord]) -> None:
    """Raises TakenError, naming the field or the key, unless OUT's plan is the one that was prepared."""
    given = shards is not None and shards != there.spec.shards  # fewer files than shards: the files differ, not those
    mine = prepared.plan.spec if given else replace(prepared.plan.spec, shards=there.spec.shards)
    uri, hint = prepared.out.uri, "choose another --out"
    if difference := spec_difference(mine, there.spec):
        raise TakenError(f"OUT `{uri}` belongs to another spec: {difference}", hint)
    if difference := object_difference(prepared.found.objects, there, records):
        open_still = len(prepared.out.committed()) < len(there.batches)
        more = "; `dflashctl resume` takes a changed file whose index has no commit yet" if open_still else COMMITTED
        raise TakenError(f"OUT `{uri}` belongs to another input: {difference}", hint + more)
    pinned, _ = overlay(there, records)
    here = {o.key: o for objects in prepared.found.batch_inputs.values() for o in objects}
    of_plan = {o.key: o for batch in pinned.batches for o in batch.batch_inputs}
    for key in sorted(here.keys() | of_plan.keys()):
        if here.get(key) != of_plan.get(key):
            raise TakenError(f"OUT `{uri}` belongs to other batch inputs: `{key}` differs", hint)


def resume(
    known: Known,
    backend: Backend,
    say: Say,
    skip: Sequence[str],
    gate: Callable[[GateFlags], GateFlags],
    parallelism: int | None,
    workers: int | None,
) -> Started:
    """Do what has no commit; changed files are pinned anew, `skip` names keys to drop, `gate` changes the gate."""
    with backend.exclusive():
        out = Out(known.out, PATIENT)
        plan = out.plan()
        if plan is None:
            again = "train" if known.kind == "train" else "tokenize"
            raise ApiError(f"`{out.uri}` has no plan", f"`dflashctl {again}` again goes on")
        records = out.runs()
        pinned, skipped = overlay(plan, records)
        if (dataset := out.dataset()) is not None:
            refuse(out, dataset)
            done = set(dataset["skipped"])
            for key in [skip_key(text, pinned, ()) for text in skip]:
                if key not in done:
                    say(f"warning: `--skip-file {key}` is not applied: the dataset is complete, and the file is in it")
            tell_late(pinned, done, "the dataset is complete", say)
            return Started(known, out, "unchanged")
        snapshot = backend.snapshot(known.run)
        if snapshot is not None and snapshot.state in LIVE:
            return Started(known, out, "running")
        flags = records[-1].flags if records else {}
        committed = out.committed()
        missing = [i for i in range(len(plan.batches)) if i not in committed]
        dropped = tuple(skip_key(text, pinned, committed) for text in skip)
        wanted = gate(newest_gate(records))
        repinned = changed_objects(pinned, missing, skipped | set(dropped))
        for obj in repinned:
            say(f"`{obj.key}` has changed, it is taken as it is now")
        if not missing:  # refused: a mended file is the first thing that a user tries
            tell_late(pinned, skipped, "every index has its commit", say)
        place = backend.flags(flags)
        moved = flags.get("backend") != backend.name or any(flags.get(key) != value for key, value in place.items())
        unchanged = not (dropped or repinned or parallelism or workers or moved) and wanted == newest_gate(records)
        if snapshot is not None and snapshot.state == "suspended" and unchanged:
            backend.unsuspend(known.run)
            return Started(known, out, "started")
        operation = Operation(
            parallelism or int(flags.get("parallelism") or 1),
            int(flags.get("workers") or 0) if workers is None else workers,
            wanted,
            str(flags.get("model") or plan.model),
            str(flags.get("spec_sha256") or plan.spec.sha256()),
            place,
            repinned,
            dropped,
        )
        if missing and known.away:
            say(f"warning: run {known.run} was last started {known.away}; if it goes on there, both do the same work")
        if missing:
            job = plans.job_name(known.run, (record.run for record in records))
            backend.check(submission(known.run, job, out.uri, missing, operation))
        return _start(known.run, out, plan, records, operation, backend, say)


def _start(
    run: str, out: Out, plan: Plan, records: Sequence[RunRecord], operation: Operation, backend: Backend, say: Say
) -> Started:
    """Record the next Job in OUT, then start it; without missing indexes the record alone may finalise."""
    committed = out.committed()
    missing = [i for i in range(len(plan.batches)) if i not in committed]
    job = plans.job_name(run, (record.run for record in records))
    known = Known(run, "tokenize", out.uri, job, 0.0)
    if not missing and records and operation.gate == newest_gate(records):
        return Started(known, out, "settled")
    _, remark = plans.clamp_parallelism(operation.parallelism, len(missing) or len(plan.batches))
    if remark:
        say(remark)
    record = RunRecord(
        run=job,
        sequence=1 + max((record.sequence for record in records), default=0),
        indexes=tuple(missing),
        plan_sha256=plan.sha256(),
        gate=operation.gate,
        repinned=operation.repinned,
        skipped=operation.skipped,
        flags=operation.flags(backend),
    )
    try:
        out.put_run(record)
    except TakenError:  # of two commands at once the faster one starts the Job, and both follow it
        if not missing or not _appears(known, backend):
            raise
        return Started(known, out, "running")
    if not missing:
        return Started(known, out, "settled")
    backend.submit(submission(run, job, out.uri, missing, operation))
    return Started(known, out, "started")


def _appears(known: Known, backend: Backend) -> bool:
    """Whether the Job that another command has just recorded is there soon."""
    end = time.monotonic() + APPEARS_S
    while not any(other.job == known.job for other in backend.runs()):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
