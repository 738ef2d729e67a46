"""Forked workers: one single-threaded parent hands out tasks, children do them and report over a socket.

What is loaded before the fork is shared; threads are started in children alone (a lock held by a thread at the fork
would never be released). Messages are JSON lines: {"next"}, {"progress"}, {"warning"}, {"error"} upwards,
a task number or an empty line (no more) downwards. A child whose parent is gone ends at its next message.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenizer.job import Exit, JobError
from tokenizer.scratch import base
from tokenizer.talk import Warnings

Report = Callable[[dict[str, int]], None]  # what a task calls with its progress since the last call
ENDINGS = (signal.SIGTERM, signal.SIGINT)
PR_SET_THP_DISABLE = 41  # linux/prctl.h
TICK = 0.5  # seconds between two looks at the world while all workers are busy


class WorkerFailed(JobError):
    """A worker's error in its parent; `trace` is the worker's traceback, for the log file alone."""

    def __init__(self, code: Exit, message: str, hint: str = "", trace: str = "") -> None:
        super().__init__(code, message, hint)
        self.trace = trace


def describe(error: BaseException) -> tuple[Exit, str, str, str]:
    """Exit code, message, hint and traceback of any exception: what is not ours is tried again (75)."""
    trace = (
        "" if isinstance(error, JobError) and error.__cause__ is None else "".join(traceback.format_exception(error))
    )
    if isinstance(error, WorkerFailed):
        return error.code, error.message, error.hint, error.trace
    if isinstance(error, JobError):
        return error.code, error.message, error.hint, trace
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or f"scratch directory {base()}"  # a store has words of its own for its disk
        hint = "give it more room, or set DFLASH_SCRATCH to a directory that has it"
        return Exit.DISK_FULL, f"no space left on the disk: {where}", hint, trace
    if isinstance(error, MemoryError):
        return Exit.RETRY, "out of memory", "give the pod more memory or fewer --workers", trace
    text = f"internal error, {type(error).__name__}: {error}"
    return Exit.RETRY, text, "report it with the log below OUT/logs", trace


def run(
    tasks: Sequence[int],
    workers: int,
    work: Callable[[Callable[[], int | None], Report], None],
    on_progress: Callable[[dict[str, int]], None],
    on_tick: Callable[[], None] = lambda: None,
    on_warning: Callable[[str], None] = lambda text: None,
    fork_one: bool = False,
) -> None:
    """Runs `work(next_task, report)` in min(workers, tasks) children until all tasks are done, in the order given.

    One worker needs no child: it runs here, since after a fork every object it touches is a copied page (a fifth of
    the CPU seconds of 10 M tokens). So nobody may fork after a run of one, unless that had its child (fork_one).

    work: called once in each child; takes tasks from next_task() until that is None. on_tick is called in the parent,
    at least every TICK seconds (with one worker: at each report); on_warning gets what children log. Raises the first
    failure as WorkerFailed (with one worker: as it is); then, as
    on any other exception here, no child is left behind.
    """
    if min(workers, len(tasks)) == 1 and not fork_one:
        _here(tasks, work, on_progress, on_tick)
        return
    queue = list(reversed(tasks))
    children: dict[socket.socket, int] = {}
    selector = selectors.DefaultSelector()
    buffers: dict[socket.socket, bytes] = {}
    try:
        for _ in range(min(workers, len(tasks))):
            here, there = socket.socketpair()
            pid = _fork(work, there, [here, *children])
            there.close()
            children[here] = pid
            buffers[here] = b""
            selector.register(here, selectors.EVENT_READ)
        while children:
            for key, _ in selector.select(TICK):
                channel = key.fileobj
                assert isinstance(channel, socket.socket)
                try:
                    data = channel.recv(1 << 16)
                except ConnectionError:
                    data = b""
                if not data:
                    selector.unregister(channel)
                    pid = children.pop(channel)
                    channel.close()
                    _reap(pid)
                    continue
                *lines, buffers[channel] = (buffers[channel] + data).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if "error" in message:
                        code, text, hint, trace = message["error"]
                        raise WorkerFailed(Exit(code), text, hint, trace)
                    if "progress" in message:
                        on_progress(message["progress"])
                    if "warning" in message:
                        on_warning(message["warning"])
                    if "next" in message:
                        with contextlib.suppress(BrokenPipeError):
                            channel.sendall(b"%d\n" % queue.pop() if queue else b"\n")
            on_tick()
    finally:
        for channel, pid in children.items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            channel.close()
        selector.close()


def _here(
    tasks: Sequence[int],
    work: Callable[[Callable[[], int | None], Report], None],
    on_progress: Callable[[dict[str, int]], None],
    on_tick: Callable[[], None],
) -> None:
    left = iter(tasks)

    def report(progress: dict[str, int]) -> None:
        on_progress(progress)
        on_tick()

    work(lambda: next(left, None), report)


def _reap(pid: int) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:
        name = signal.Signals(-status).name
        why = ", most often for lack of memory" if -status == signal.SIGKILL else ""
        raise WorkerFailed(
            Exit.RETRY, f"a worker process was ended by {name}{why}", "give the pod more memory or fewer --workers"
        )
    if status:
        raise WorkerFailed(Exit.RETRY, f"a worker process ended with {status} and no word", "see the log")


def _fork(work: Callable[[Callable[[], int | None], Report], None], channel: socket.socket, close: list[Any]) -> int:
    pid = fork()
    if pid:
        return pid
    status = 1
    try:
        for other in close:
            other.close()
        _child(work, channel)
        status = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            channel.sendall(json.dumps({"error": describe(error)}).encode() + b"\n")
            status = 0  # the message says it all
    finally:
        os._exit(status)


def fork() -> int:
    """os.fork where no signal can interrupt the hooks around it; in the child SIGTERM and SIGINT are as by default."""
    sys.stdout.flush()
    sys.stderr.flush()
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return pid
    for number in ENDINGS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
    return 0


def _child(work: Callable[[Callable[[], int | None], Report], None], channel: socket.socket) -> None:
    replies = _lines(channel)
    lock = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        with lock:
            channel.sendall(json.dumps(message).encode() + b"\n")

    def next_task() -> int | None:
        send({"next": True})
        answer = next(replies, b"")
        return int(answer) if answer else None

    def report(progress: dict[str, int]) -> None:
        send({"progress": progress})

    logger = logging.getLogger("tokenizer")
    logger.handlers = [Warnings(lambda text: send({"warning": text}))]
    logger.propagate = False
    _small_pages()
    _apart(lambda: work(next_task, report))


def _small_pages() -> None:
    """From here on no huge pages for this process (prctl(2), PR_SET_THP_DISABLE); nothing where there is none.

    A worker's new memory is a few tens of MB, thinly used. Where a hypervisor takes free memory back, two fresh MB
    cost milliseconds: 40 of them were a third of a worker's CPU seconds.
    """
    if set_option := getattr(ctypes.CDLL(None), "prctl", None):
        set_option(PR_SET_THP_DISABLE, 1, 0, 0, 0)


def _apart(act: Callable[[], None]) -> None:
    """Acts in a thread of its own, for its memory: malloc gives a thread a fresh arena, where the first one's free
    chunks lie between what was loaded, so that taking one copies a page shared with the parent. Half as many page
    faults, a tenth of the user seconds.
    """
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def _lines(channel: socket.socket) -> Iterator[bytes]:
    buffer = b""
    while data := channel.recv(4096):
        *lines, buffer = (buffer + data).split(b"\n")
        yield from lines


def cpus() -> int:
    """CPUs that this process may use: the affinity mask, cut by the cgroup's quota (v1 and v2), at least 1."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for quota in _quotas():
        count = min(count, quota)
    return max(1, int(count + 0.5))


def _quotas(root: str = "/sys/fs/cgroup") -> Iterator[float]:
    """Quotas in CPUs of the cgroup that a container sees at its root (and, in v2, of its own path below it)."""
    own = ""
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="ascii") as file:
        own = next((line[3:].strip() for line in file if line.startswith("0::")), "")
    folders = {root}
    while own not in ("", "/"):
        folders.add(root + own)
        own = os.path.dirname(own)
    for folder in sorted(folders):
        with contextlib.suppress(OSError, ValueError), open(f"{folder}/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
            if quota != "max":
                yield int(quota) / int(period)
    for folder in (f"{root}/cpu", f"{root}/cpu,cpuacct"):
        with contextlib.suppress(OSError, ValueError):
            with open(f"{folder}/cpu.cfs_quota_us", encoding="ascii") as file:
                quota_us = int(file.read())
            with open(f"{folder}/cpu.cfs_period_us", encoding="ascii") as file:
                period_us = int(file.read())
            if quota_us > 0:
                yield quota_us / period_us
