"""Runs on this machine: the same argv as a pod's, in processes that outlive the command.

    .dflash/runs/<run>/run.json      what was submitted, and the run's Jobs
    .dflash/runs/<run>/<job>/        state of one Job: index-00003.json and pool.json, written by the pool, and logs/

The pool is started in a session of its own, so that Ctrl-C reaches the command and not the run. It inherits a locked
file: the kernel drops the lock when the last process of the Job is gone, however it went, so a killed pool is never
taken for a running one and no process id is ever trusted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflashctl.backends.base import Known, LogLine, Submission
from dflashctl.errors import ApiError, Detached, PreflightError, TakenError, UsageError
from dflashctl.progress import Index, Snapshot
from dflashctl.why import Cause, of_indexes

HOME = ".dflash"
LOG_NAME = re.compile(r"([0-9]+)-([0-9]+)\.txt")
STOP_WAIT = {"tokenize": 60.0, "train": 600.0}  # seconds after SIGTERM to write off a shard, or end a step and save it
START_WAIT = 10.0  # seconds within which a pool that started says so
PAUSE = 0.1  # seconds between two looks
SAID = ("said", "hint")  # of a training's state: its last note, and the remedy of how it ended


@dataclass(frozen=True, slots=True)
class LocalBackend:
    """State of all runs below `home`/runs."""

    home: Path
    name: str = "local"
    words: str = "backend local"
    pauses: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 1.0)

    @classmethod
    def here(cls) -> LocalBackend:
        """The runs of the current directory."""
        return cls(Path.cwd() / HOME)

    def of(self, known: Known) -> LocalBackend:
        """The backend that keeps this run: itself, or that of the directory where it was started."""
        return replace(self, home=Path(known.home)) if known.home else self

    def last(self, run: str) -> dict[str, Any]:
        """The submission of the run's newest Job as a document; {} for a run that is not known."""
        record = _read(self._folder(run) / "run.json")
        return dict(record["jobs"][-1]) if record else {}

    # ---- Backend

    def render(self, submission: Submission) -> dict[str, Any]:
        """The processes' command line beside the submission."""
        return {**submission.document(), "command": self._command(submission)}

    def flags(self, last: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing: every process of this machine has the same place."""
        return {}

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """A lock of this directory; where it may not be written, nothing is going to be started either."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self.home.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(open(self.home / "submit.lock", "ab"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def check(self, submission: Submission) -> None:
        there = next(path for path in (self.home / "runs", self.home, self.home.parent) if os.path.lexists(path))
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise PreflightError(
                f"the state of runs cannot be written below `{there}`", "run it in a directory that you may write to"
            )

    def submit(self, submission: Submission) -> None:
        folder = self._folder(submission.run)
        record = _read(folder / "run.json")
        if record and record.get("out") != submission.out:
            raise TakenError(
                f"run `{submission.run}` is the name of a run with the OUT `{record.get('out')}`",
                "choose another --name",
            )
        jobs = [job for job in (record or {}).get("jobs", []) if job["job"] != submission.job]
        created = (record or {}).get("created") or time.time()
        folder.mkdir(parents=True, exist_ok=True)
        document = {
            "schema": "dflash.local-run/1",
            "run": submission.run,
            "kind": submission.kind,
            "out": submission.out,
            "created": created,
            "jobs": [*jobs, submission.document()],
        }
        _write(folder / "run.json", document)
        self._start(submission)

    def runs(self) -> list[Known]:
        records = [_read(path) for path in sorted((self.home / "runs").glob("*/run.json"))]
        needed = {"run", "kind", "out", "jobs", "created"}
        ours = [record for record in records if record and record.keys() >= needed]
        known = [Known(r["run"], r["kind"], r["out"], r["jobs"][-1]["job"], float(r["created"])) for r in ours]
        return sorted(known, key=lambda run: (-run.created, run.run))

    def snapshot(self, run: str) -> Snapshot | None:
        record = _read(self._folder(run) / "run.json")
        if not record:
            return None
        folder = self._folder(run) / record["jobs"][-1]["job"]
        alive = _locked(folder)  # before the files: what a pool wrote last is seen with its end
        indexes: dict[int, Index] = {}
        for job in record["jobs"]:
            indexes.update(read_indexes(self._folder(run) / job["job"]))
        suspended = (folder / "suspended.json").exists()
        pool, planned, goes_on = _read(folder / "pool.json"), record["jobs"][-1]["indexes"], record["kind"] == "train"
        return fold(pool, alive, suspended, indexes, planned, goes_on)

    def logs(self, run: str, indexes: Sequence[int] | None, previous: bool, follow: bool) -> Iterator[LogLine]:
        record = _read(self._folder(run) / "run.json")
        if not record:
            return
        folder = self._folder(run) / record["jobs"][-1]["job"]
        read: dict[Path, int] = {}
        newest: dict[int, Path] = {}
        while True:
            alive = _locked(folder)
            for index, path in self._log_files(run, record, indexes, previous):
                if (before := newest.get(index, path)) != path:  # the try that was followed has ended
                    yield from _new_lines(index, before, read, final=True)
                newest[index] = path
                yield from _new_lines(index, path, read, final=not (alive and follow))
            if not (alive and follow):
                return
            time.sleep(PAUSE)

    def stop(self, run: str) -> None:
        record = _read(self._folder(run) / "run.json")
        if not record:
            raise ApiError(f"run `{run}` is not known on this machine")
        folder = self._folder(run) / record["jobs"][-1]["job"]
        _write(folder / "suspended.json", {"suspended": True})
        pid = int((_read(folder / "pool.json") or _read(folder / "started.json") or {}).get("pid") or 0)
        wait = STOP_WAIT[record["kind"]]
        deadline = time.monotonic() + wait
        sent = 0.0
        while _locked(folder):
            if time.monotonic() > deadline:
                raise ApiError(f"run `{run}` has not ended {wait:.0f} s after SIGTERM", f"look at {folder}/logs")
            if pid and time.monotonic() - sent > 5.0:
                sent = time.monotonic()
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    # The pool tells its workers; where it was killed, its group is what is left of it.
                    os.kill(pid, signal.SIGTERM) if Path(f"/proc/{pid}").exists() else os.killpg(pid, signal.SIGTERM)
            time.sleep(PAUSE)

    def unsuspend(self, run: str) -> None:
        record = _read(self._folder(run) / "run.json")
        if not record:
            raise ApiError(f"run `{run}` is not known on this machine")
        job = record["jobs"][-1]
        self._start(Submission(**{**job, "argv": tuple(job["argv"]), "indexes": tuple(job["indexes"])}))

    def scale(self, run: str, parallelism: int) -> int:
        raise UsageError(
            "a Job on this machine keeps its parallelism",
            f"`dflashctl stop {run}`, then `dflashctl resume {run} --parallelism {parallelism}`",
        )

    def remove(self, run: str) -> None:
        if (self._folder(run) / "run.json").exists():
            self.stop(run)
        shutil.rmtree(self._folder(run), ignore_errors=True)

    def why(self, run: str) -> list[Cause]:
        snapshot = self.snapshot(run)
        if snapshot is None:
            return []
        causes = of_indexes(snapshot.indexes, kind=str((_read(self._folder(run) / "run.json") or {}).get("kind")))
        if snapshot.state == "failed" and not snapshot.failed:  # what ended the pool itself is no index's
            record = _read(self._folder(run) / "run.json") or {"jobs": [{"job": ""}]}
            hint = (_read(self._folder(run) / record["jobs"][-1]["job"] / "pool.json") or {}).get("hint")
            again = f"`dflashctl resume {run}`"
            remedy = hint if hint and "dflashctl" in hint else f"{hint}, then {again}" if hint else again
            causes.insert(0, Cause("PoolFailed", snapshot.reason, remedy, 100))
        return causes

    def bundle(self, run: str) -> dict[str, Any]:
        folder = self._folder(run)
        return {str(path.relative_to(folder)): _read(path) for path in sorted(folder.rglob("*.json"))}

    # ---- processes and files

    def _folder(self, run: str) -> Path:
        return self.home / "runs" / run

    def _command(self, submission: Submission) -> list[str]:
        state = self._folder(submission.run) / submission.job
        # -P: a tokenizer.py in the user's directory must not be what runs
        package = "trainer" if submission.kind == "train" else "tokenizer"
        pool = [sys.executable, "-P", "-m", package, "pool"]
        return [*pool, "--state", str(state), "--jobs", str(submission.parallelism), *submission.argv]

    def _start(self, submission: Submission) -> None:
        folder = self._folder(submission.run) / submission.job
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "ab") as lock, open(folder / "pool.log", "ab") as log, _telling(submission.run):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TakenError(f"run `{submission.run}` is running already", "see `dflashctl status -w`") from None
            for name in ("pool.json", "suspended.json"):
                (folder / name).unlink(missing_ok=True)
            child = subprocess.Popen(
                self._command(submission),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[lock.fileno()],
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
            _write(folder / "started.json", {"pid": child.pid})
            self._await_start(child, folder)

    def _await_start(self, child: subprocess.Popen[bytes], folder: Path) -> None:
        """Until the pool has written its first state; an early end is told with its last words."""
        deadline = time.monotonic() + START_WAIT
        while not (folder / "pool.json").exists() and time.monotonic() < deadline:
            if child.poll() is not None:
                if (folder / "pool.json").exists():
                    return
                words = (folder / "pool.log").read_text(errors="replace").strip().splitlines()[-1:]
                raise ApiError(
                    f"the pool of workers ended with exit code {child.returncode}" + (f": {words[0]}" if words else ""),
                    f"see {folder / 'pool.log'}",
                )
            time.sleep(0.02)

    def _log_files(
        self, run: str, record: dict[str, Any], indexes: Sequence[int] | None, previous: bool
    ) -> list[tuple[int, Path]]:
        """The log of each index's newest try (or the one before it), over all Jobs of the run."""
        tries: dict[int, list[Path]] = {}
        for job in record["jobs"]:
            folder = self._folder(run) / job["job"] / "logs"
            named = [(int(m[1]), int(m[2]), p) for p in folder.glob("*.txt") if (m := LOG_NAME.fullmatch(p.name))]
            for index, _, path in sorted(named):
                tries.setdefault(index, []).append(path)
        back = 2 if previous else 1
        return [
            (index, paths[-back])
            for index, paths in sorted(tries.items())
            if len(paths) >= back and (indexes is None or index in indexes)
        ]


# ---- what a pool writes, read


def fold(
    pool: dict[str, Any] | None,
    alive: bool,
    suspended: bool,
    indexes: dict[int, Index],
    planned: Sequence[int],
    goes_on: bool = False,
) -> Snapshot:
    """A Job's state; pure. pool: pool.json; alive: one of its processes is there; planned: the Job's indexes.

    goes_on: an unfinished index is not begun again, as that of a training.
    """
    of_job = [indexes[i] for i in planned if i in indexes]
    failed = tuple(index.index for index in of_job if index.state == "failed")
    active = sum(index.state == "running" for index in of_job)
    ended = str((pool or {}).get("state") or "")
    reason = str((pool or {}).get("reason") or "")
    if alive:
        state = "running" if pool else "pending"
    elif ended == "succeeded":
        state = "succeeded"
    elif suspended or ended == "stopped":
        state, reason = "suspended", ""
    else:
        state = "failed"
        if ended != "failed":
            reason = "the pool of workers was killed"
        elif not reason and failed:
            reason = "; ".join(f"index {index.index}: {index.reason}" for index in of_job if index.state == "failed")
    if not alive:
        indexes = {i: _not_running(index, goes_on) for i, index in indexes.items()}
    return Snapshot(
        state=state,
        reason=reason,
        total=len({*planned, *indexes}),
        succeeded=sum(index.state == "succeeded" for index in indexes.values()),
        active=active if alive else 0,
        failed=failed,
        indexes=tuple(indexes[i] for i in sorted(indexes)),
    )


def _not_running(index: Index, goes_on: bool) -> Index:
    """Nothing runs in a Job whose processes are gone; unless it goes on, what an index had done is done again."""
    if index.state in ("succeeded", "failed"):
        return index
    return replace(index, state="pending", message=index.message if goes_on else {})


def read_indexes(folder: Path) -> dict[int, Index]:
    """The indexes that a pool has written to its state directory."""
    found: dict[int, Index] = {}
    for path in sorted(folder.glob("index-*.json")):
        record = _read(path)
        if record:
            found[int(record["index"])] = Index(
                index=int(record["index"]),
                state=str(record["state"]),
                tries=int(record.get("try") or 0) + (record.get("pid") is not None),
                pod=str(record.get("pid") or ""),
                reason=str(record.get("reason") or ""),
                exit_code=record.get("exit"),
                message=(record.get("progress") or {}) | {key: record[key] for key in SAID if record.get(key)},
            )
    return found


@contextlib.contextmanager
def _telling(run: str) -> Iterator[None]:
    """Ctrl-C while a pool is being started may come before or after its start: never without a word."""
    try:
        yield
    except KeyboardInterrupt:
        raise Detached(
            f"interrupted while run `{run}` was being started", f"`dflashctl status {run}` says whether it goes on"
        ) from None


def _locked(folder: Path) -> bool:
    """Whether a process of this Job is alive: the pool and its workers hold the lock as long as they are."""
    try:
        with open(folder / "lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _new_lines(index: int, path: Path, read: dict[Path, int], final: bool) -> Iterator[LogLine]:
    """Lines of a log since the last look; one without its newline only when nothing more can come (`final`)."""
    with open(path, "rb") as file:
        file.seek(read.get(path, 0))
        data = file.read()
    end = len(data) if final else data.rfind(b"\n") + 1
    if not end:
        return
    read[path] = read.get(path, 0) + end
    for line in data[:end].split(b"\n")[: None if final and not data.endswith(b"\n") else -1]:
        yield LogLine(index, line.decode("utf-8", "replace"))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _write(path: Path, value: dict[str, Any]) -> None:
    """All or nothing: a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ApiError(f"`{path}` cannot be written: {error.strerror}") from None
