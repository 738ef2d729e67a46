"""What a pod does: one index from OUT/plan.json to its commit record, and how it ends.

The order of writes is the whole protocol: shard, rejects, then the commit record, each created only if absent. So a
kill at any moment leaves either no commit (the index is done again, to the same bytes) or all three.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizer import closing, workers
from tokenizer.gate import Commit
from tokenizer.index import Model, convert_index, fetch_tokenizer, load_model
from tokenizer.job import (
    CONTRACT,
    DATASET,
    PLAN,
    Exit,
    JobError,
    Plan,
    RunRecord,
    TokenizeArgs,
    canonical,
    commit_name,
    log_name,
    overlay,
    run_name,
    stats_name,
)
from tokenizer.scratch import scratch
from tokenizer.store import NotFound, Options, Store, open_store
from tokenizer.talk import Log, Progress, terminate

POD = Options(auth_patience=90)


class Terminated(BaseException):
    """SIGTERM (or Ctrl-C) arrived."""


@dataclass(slots=True)
class Task:
    """One try at one index, and what is known of it so far; the rest goes into logs and messages."""

    args: TokenizeArgs
    store: Store
    log: Log
    attempt: int = 0
    index: int | None = None  # of the plan
    totals: dict[str, Any] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None  # raises if the process has been told to end


@dataclass(frozen=True, slots=True)
class Job:
    """What the records below OUT say about this run: the plan with its newest pins, skipped keys, index -> batch."""

    plan: Plan
    skipped: frozenset[str]
    indexes: tuple[int, ...]


def read_job(store: Store, args: TokenizeArgs) -> Job:
    """The plan, checked against this run's record, overlaid by the records up to it. JobError 78."""
    data = _record(store, PLAN)
    own = RunRecord.from_json(_record(store, run_name(args.run)))
    if hashlib.sha256(data).hexdigest() != own.plan_sha256:
        raise JobError(Exit.CONFIG, f"{store.uri(PLAN)} is not the plan of this Job", "submit the run again")
    plan = Plan.from_json(data)
    runs = [run for run in closing.read_runs(store) if run.sequence <= own.sequence]
    pinned, skipped = overlay(plan, runs)
    return Job(pinned, skipped, own.indexes)


def _record(store: Store, key: str) -> bytes:
    try:
        return store.get_bytes(key)
    except NotFound:
        raise JobError(Exit.CONFIG, f"{store.uri(key)} is missing", "submit the run again") from None


def plan_index(job: Job, args: TokenizeArgs) -> int:
    """The plan's index of this pod, from the Job's own."""
    given = args.index if args.index is not None else os.environ.get("JOB_COMPLETION_INDEX")
    if given is None or not str(given).isdigit():
        raise JobError(Exit.USAGE, "which index? neither --index nor JOB_COMPLETION_INDEX is set")
    if int(given) >= len(job.indexes):
        raise JobError(Exit.CONFIG, f"index {given} of a run of {len(job.indexes)}", "submit the run again")
    return job.indexes[int(given)]


def run_index(
    task: Task,
    job: Job,
    index: int,
    load: Callable[[Path], Model],
    on_tick: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Does one index unless its commit exists, then closes the dataset if it was the last one."""
    store, log = task.store, task.log
    task.index = log.fields["index"] = index
    started, cpu = time.monotonic(), time.process_time()
    if store.stat(DATASET) is not None or store.stat(commit_name(index)) is not None:
        log.say("unchanged", message="this index has a commit")
    else:
        with scratch() as folder:
            model = load(folder)
            count = task.args.workers or workers.cpus()
            objects = [o for o in job.plan.batches[index].objects if o.key not in job.skipped]
            progress = Progress(log, sum(o.size for o in objects))
            log.say("started", objects=len(objects), workers=count, total_bytes=progress.total_bytes)

            def tick() -> None:
                task.check()
                progress.tick()
                on_tick(progress)

            shard, rejects, commit = convert_index(
                index,
                job.plan,
                job.skipped,
                model,
                folder,
                count=count,
                downloads=task.args.downloads,
                on_progress=progress.add,
                on_tick=tick,
                on_warning=log.warn,
            )
            progress.tick(final=True)
            on_tick(progress)
            converted = time.monotonic()
            publish(store, commit, shard, rejects, log)
            task.totals = {k: commit[k] for k in ("rows", "tokens", "loss_tokens")}
            log.say("committed", **task.totals, lines=commit["lines"], turns_rejected=commit["turns_rejected"])
            stats = {
                "contract": CONTRACT,
                "run": task.args.run,
                "index": index,
                "try": task.attempt,
                "host": os.uname().nodename,
                "workers": count,
                "seconds": round(time.monotonic() - started, 3),
                "seconds_convert": round(converted - started, 3),
                "cpu_seconds": round(time.process_time() - cpu + _children_cpu(), 3),
                "store_retries": store.retries,
                "versions": versions(),
            }
            store.put_bytes(stats_name(task.args.run, index), canonical(stats))
    closed = closing.close(store)
    log.say("closed", state=closed.state, reasons=list(closed.reasons))


def publish(store: Store, commit: Commit, shard: Path, rejects: Path, log: Log) -> None:
    """Shard, rejects, commit; leaves everything alone once another attempt has committed."""
    name = commit_name(commit["index"])
    put = []
    for ref, path in ((commit["shard"], shard), (commit["rejected"], rejects)):
        etag = put_or_verify(store, ref["name"], path, ref["sha256"], name)
        if etag is None:
            log.say("unchanged", message="another attempt has committed this index")
            return
        put.append((ref["name"], etag))
    for key, etag in put:  # an attempt of another image could have replaced it meanwhile
        stat = store.stat(key)
        if stat is None or stat.etag != etag:
            raise JobError(Exit.RETRY, f"{store.uri(key)} was replaced while it was being committed", "one run per OUT")
    if not store.put_bytes(name, canonical(commit), if_none_match=True).created:
        log.say("unchanged", message="another attempt has committed this index")


def put_or_verify(store: Store, key: str, path: Path, sha256: str, commit: str) -> str | None:
    """The etag of `key` with the bytes of `path`, written or found there; None once there is a commit.

    What an attempt without a commit left is taken if it is the same, else replaced (If-Match, so that only what was
    looked at is replaced).
    """
    for _ in range(8):
        put = store.upload_file(path, key, if_none_match=True)
        if put.created:
            return put.etag
        if store.stat(commit) is not None:
            return None
        there = store.stat(key)
        if there is None:
            continue
        if there.size == path.stat().st_size and _sha256(store, key, there.etag, there.size) == sha256:
            return there.etag
        put = store.upload_file(path, key, if_match=there.etag)
        if put.created:
            return put.etag
    raise JobError(Exit.RETRY, f"{store.uri(key)} keeps changing under this pod", "one run per OUT")


def _sha256(store: Store, key: str, etag: str, size: int) -> str | None:
    digest = hashlib.sha256()
    try:
        for piece in store.open_stream(key, etag=etag, size=size):
            digest.update(piece)
    except JobError as error:
        if error.code == Exit.DATA:  # changed or gone while it was read
            return None
        raise
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Of what decides the bytes, for stats/ alone."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for name in ("pyarrow", "numpy", "tokenizers", "fastokens", "jinja2", "orjson"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _children_cpu() -> float:
    times = os.times()
    return times.children_user + times.children_system


class Ending:
    """SIGTERM and Ctrl-C become `Terminated`, once: what follows must not interrupt the way out."""

    def __init__(self) -> None:
        self.asked = False
        for number in workers.ENDINGS:
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: Any) -> None:
        self.asked = True
        ignore_endings()
        raise Terminated

    def check(self) -> None:
        """Raises `Terminated` if it was raised before: in a finaliser Python swallows it."""
        if self.asked:
            raise Terminated


def ignore_endings() -> None:
    for number in workers.ENDINGS:
        signal.signal(number, signal.SIG_IGN)


def guarded(task: Task, body: Callable[[], None]) -> int:
    """Runs the body; whatever ends it becomes an exit code, one clear line, a termination message and a log tail."""
    message: dict[str, Any] = {"run": task.args.run}
    try:
        ending = Ending()
        task.check = ending.check
        body()
        ending.check()
        code = Exit.OK
    except Terminated:
        code = Exit.SIGTERM
        message |= {"message": "stopped by SIGTERM"}
    except BaseException as error:
        code, text, hint, trace = workers.describe(error)
        message |= {"message": text, "hint": hint}
        if trace:
            task.log.keep(trace)
    ignore_endings()
    message |= {"exit": int(code), "reason": code.name.lower(), "index": task.index, "try": task.attempt, **task.totals}
    if code:
        task.log.say("stopped" if code == Exit.SIGTERM else "failed", level="error", **message)
        if task.index is not None:
            _upload_tail(task)
    terminate(message)
    return int(code)


def _upload_tail(task: Task) -> None:
    assert task.index is not None
    try:
        brief = open_store(task.args.out, Options(patience=8, auth_patience=0, on_retry=lambda text: None))
        brief.put_bytes(log_name(task.args.run, task.index, task.attempt), task.log.tail())
    except (JobError, OSError, ValueError) as error:
        task.log.warn(f"the log could not be stored: {error}")


def attempt_from_env() -> int:
    """$DFLASH_TRY: how often this index has failed so far (Kubernetes counts it in an annotation)."""
    text = os.environ.get("DFLASH_TRY", "0")
    return int(text) if text.isdigit() else 0


def main(argv: list[str]) -> int:
    """`python -m tokenizer run ARGS`: exit code."""
    log = Log(sys.stdout)
    log.take_warnings()
    try:
        args = TokenizeArgs.from_argv(argv)
        store = open_store(args.out, POD)
    except (JobError, ValueError) as error:
        known = error if isinstance(error, JobError) else JobError(Exit.USAGE, str(error))
        code, text, hint, _ = workers.describe(known)
        log.say("failed", level="error", message=text, hint=hint, exit=int(code))
        terminate({"exit": int(code), "reason": code.name.lower(), "message": text, "hint": hint})
        return int(code)
    log.fields["run"] = args.run
    task = Task(args, store, log, attempt_from_env())

    def body() -> None:
        job = read_job(store, args)
        index = plan_index(job, args)

        def load(folder: Path) -> Model:
            spec = job.plan.spec
            total = sum(o.size for o in job.plan.batches[index].objects)
            return load_model(fetch_tokenizer(store, spec, folder / "tokenizer"), spec, total)

        run_index(task, job, index, load)

    return guarded(task, body)
