"""The local backend: the indexes of a run as processes of this machine, forked from one parent that has loaded once.

    python -P -m tokenizer pool --state DIR --jobs N ARGS-OF-A-POD

Plays the Job controller with the same rules: two more tries for an index (not for exit 65), 64, 70 and 78 end the run,
and so do more failed indexes than 5 %. State below DIR, each file replaced as a whole: pool.json, index-00003.json,
logs/00003-<try>.txt.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizer import workers
from tokenizer.closing import close, missing_commits
from tokenizer.index import Model, fetch_tokenizer, load_model
from tokenizer.job import Exit, JobError, TokenizeArgs
from tokenizer.pod import POD, Ending, Job, Task, Terminated, guarded, read_job, run_index
from tokenizer.scratch import scratch
from tokenizer.store import Store, open_store
from tokenizer.talk import Log, Progress, now

RETRIES = 2  # backoffLimitPerIndex
STOPS_RUN = (Exit.USAGE, Exit.SELF_CHECK, Exit.CONFIG)
FAILS_INDEX = (Exit.DATA,)


def max_failed_indexes(indexes: int) -> int:
    return max(1, math.ceil(0.05 * indexes))


class Pool:
    """One Job on this machine."""

    def __init__(self, state: Path, jobs: int, args: TokenizeArgs, store: Store, log: Log) -> None:
        self.state = state
        self.jobs = jobs
        self.args = args
        self.store = store
        self.log = log
        self.running: dict[int, tuple[int, int]] = {}  # pid -> plan index, failures so far
        self.failed: list[int] = []
        self.started = now()
        self.ending = Ending()
        (state / "logs").mkdir(parents=True, exist_ok=True)

    def say(self, state: str, reason: str = "", hint: str = "") -> None:
        ended = now() if state != "running" else None
        record = {"pid": os.getpid(), "state": state, "reason": reason, "hint": hint}
        write(self.state / "pool.json", {**record, "started": self.started, "ended": ended})

    def run(self) -> None:
        """All indexes of the run; JobError for what ends a run, DATA where indexes failed."""
        job = read_job(self.store, self.args)
        missing = set(missing_commits(self.store, job.plan))
        for index in job.indexes:
            if index not in missing:
                self._index(index, state="succeeded", exit=0)
        todo = deque((index, 0) for index in job.indexes if index in missing)
        if not todo:
            self.log.say("closed", state=close(self.store).state)
            return
        for index, _ in todo:
            self._index(index, state="pending")
        with scratch() as folder:
            spec = job.plan.spec
            total = sum(o.size for index, _ in todo for o in job.plan.batches[index].objects)
            model = load_model(fetch_tokenizer(self.store, spec, folder / "tokenizer"), spec, total)
            gc.freeze()
            try:
                self._work(todo, job, model)
            finally:
                self._end()
        if self.failed:
            raise JobError(Exit.DATA, "; ".join(f"index {i}: {self._reason(i)}" for i in self.failed), "`resume`")

    def _work(self, todo: deque[tuple[int, int]], job: Job, model: Model) -> None:
        count = max(1, min(self.jobs, workers.cpus()))
        limit = max_failed_indexes(len(job.indexes))
        while todo or self.running:
            while todo and len(self.running) < count:
                index, failures = todo.popleft()
                attempt = self._next_try(index)
                # SIGTERM between the fork and its record would leave a process that nobody ends
                held = signal.pthread_sigmask(signal.SIG_BLOCK, workers.ENDINGS)
                try:
                    pid = self._fork(job, index, attempt, model, max(1, workers.cpus() // count))
                    self.running[pid] = (index, failures)
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, held)
            pid, status = os.waitpid(-1, 0)
            self.ending.check()
            if pid not in self.running:
                continue
            index, failures = self.running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            reason = self._reason(index) if code > 0 else f"ended by signal {-code}" if code else ""
            code = 128 - code if code < 0 else code  # as a container tells it: SIGKILL is 137
            if code == Exit.OK:
                self._index(index, state="succeeded", exit=0)
            elif code in STOPS_RUN:
                self._index(index, state="failed", exit=code, reason=reason)
                raise JobError(Exit(code), f"index {index}: {reason}")
            elif code in FAILS_INDEX or failures >= RETRIES:
                self._index(index, state="failed", exit=code, reason=reason)
                self.failed.append(index)
                if len(self.failed) > limit:
                    raise JobError(Exit.DATA, f"{len(self.failed)} indexes failed, the last: index {index}: {reason}")
            else:
                self._index(index, state="pending", exit=code, reason=reason)
                todo.append((index, failures + 1))
            self.log.say("index", index=index, exit=code, message=reason)

    def _fork(self, job: Job, index: int, attempt: int, model: Model, count: int) -> int:
        parent = os.getpid()
        self._index(
            index, state="running", attempt=attempt, started=now(), ended=None, exit=None, reason="", progress={}
        )
        pid = workers.fork()
        if pid:
            return pid
        code = int(Exit.RETRY)
        try:
            self.running.clear()
            path = self.state / "logs" / f"{index:05d}-{attempt}.txt"
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            for stream in (1, 2):
                os.dup2(handle, stream)
            os.close(handle)
            os.environ["TERMINATION_LOG"] = str(self._message(index))
            log = Log(sys.stdout, run=self.args.run)
            log.take_warnings()
            task = Task(self.args, self.store, log, attempt)
            self._index(index, pid=os.getpid())
            if not self.args.workers:
                task.args = replace(self.args, workers=count)
            told = 0.0

            def tick(progress: Progress) -> None:
                nonlocal told
                if os.getppid() != parent:
                    raise JobError(Exit.RETRY, "the pool of workers is gone")
                if time.monotonic() - told > 0.5 or progress.counts["bytes"] >= progress.total_bytes:
                    told = time.monotonic()
                    self._index(index, progress=progress.snapshot())

            code = guarded(task, lambda: run_index(task, job, index, lambda folder: model, tick))
        finally:
            os._exit(code)

    def _end(self) -> None:
        """SIGTERM to every process of an index, then wait: each uploads its last words and exits."""
        for pid in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for pid, (index, _) in self.running.items():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            self._index(index, state="pending", exit=int(Exit.SIGTERM), reason="stopped")
        self.running.clear()

    def _next_try(self, index: int) -> int:
        """Tries are numbered on over stops and restarts of the pool, so that no log is overwritten."""
        tries = [int(p.stem.split("-")[1]) for p in (self.state / "logs").glob(f"{index:05d}-*.txt")]
        return max(tries, default=-1) + 1

    def _message(self, index: int) -> Path:
        return self.state / f"termination-{index:05d}.json"

    def _reason(self, index: int) -> str:
        try:
            said = json.loads(self._message(index).read_bytes())
            return str(said["message"]) + (f" ({said['hint']})" if said.get("hint") else "")
        except (OSError, ValueError, KeyError):
            return "no word"

    def _index(self, index: int, **values: Any) -> None:
        path = self.state / f"index-{index:05d}.json"
        record: dict[str, Any] = {"index": index, "state": "pending", "try": 0, "exit": None, "pid": None}
        with contextlib.suppress(OSError, ValueError):
            record |= json.loads(path.read_bytes())
        if "attempt" in values:
            values["try"] = values.pop("attempt")
        if values.get("state") in ("succeeded", "failed"):
            values["ended"] = now()
        write(path, {**record, **values})


def write(path: Path, value: dict[str, Any]) -> None:
    """All or nothing: a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def parse(argv: list[str]) -> tuple[Path, int, TokenizeArgs]:
    """--state DIR --jobs N and a pod's argv; JobError 64 or 78."""
    if len(argv) < 4 or argv[0] != "--state" or argv[2] != "--jobs" or not argv[3].isdigit() or argv[3] == "0":
        raise JobError(Exit.USAGE, "pool takes --state DIR --jobs N and then a pod's arguments")
    return Path(argv[1]), int(argv[3]), TokenizeArgs.from_argv(argv[4:])


def main(argv: list[str]) -> int:
    """`python -m tokenizer pool`: 0, 143 after SIGTERM, 65 if indexes failed, else what ended the run."""
    log = Log(sys.stdout)
    try:
        state, jobs, args = parse(argv)
        pool = Pool(state, jobs, args, open_store(args.out, POD), log)
        log.take_warnings()
        pool.say("running")
        return _ended(pool, log, pool.run)
    except Terminated:
        return int(Exit.SIGTERM)
    except (JobError, ValueError, OSError) as error:
        known = JobError(Exit.USAGE, str(error)) if isinstance(error, ValueError) else error
        code, text, hint, _ = workers.describe(known)
        log.say("failed", level="error", message=text, hint=hint, exit=int(code))
        return int(code)


def _ended(pool: Pool, log: Log, body: Callable[[], None]) -> int:
    """Runs the body and says in pool.json how it ended."""
    try:
        body()
    except Terminated:
        pool.say("stopped")
        return int(Exit.SIGTERM)
    except BaseException as error:
        code, text, hint, _ = workers.describe(error)
        log.say("failed", level="error", message=text, hint=hint, exit=int(code))
        pool.say("failed", text, hint)
        return int(code)
    pool.say("succeeded")
    return int(Exit.OK)
