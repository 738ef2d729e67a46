"""PID 1: starts the ranks, passes on what they say, and ends them all when one cannot go on.

It forks everything from one process that has imported what the ranks need and runs one thread: a rank costs
milliseconds and its pages are shared. It never touches a GPU or the data; a first child does all that can refuse a
training, then each rank gets its GPU, a pipe for its output and one for its events.

    [drafter:0] a line of a rank's own output
    {"time": ..., "level": "info", "event": "progress", "step": 120, "loss": 2.31, ...}
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tokenizer.job import Exit, JobError
from trainer.board import Board, Phase
from trainer.job import TrainArgs
from trainer.link import World
from trainer.prepare import Ready, prepare, world_of
from trainer.provenance import only
from trainer.rank import Place, run
from trainer.tail import Tail

LIMITS = {  # seconds that a rank's main loop may be silent
    Phase.START: 1800.0,
    Phase.LOAD: 1800.0,
    Phase.FIRST: 900.0,
    Phase.STEP: 120.0,
    Phase.SAVE: 1800.0,
    Phase.MEASURE: 1800.0,
    Phase.EXPORT: 1800.0,
    Phase.END: 1800.0,
}
STEPS = 20  # a step may last so many times the median step
LINGER = 1.0  # seconds after a death in which others that it takes along are waited for
TICK = 0.1
PARENT_DIED = 1  # PR_SET_PDEATHSIG
LOST_PEER = re.compile(r"Connection (closed|reset) by peer|Broken pipe|remote process exited")  # of gloo and NCCL
HINTS = {  # what a signal that ends a rank looks like
    int(signal.SIGKILL): "SIGKILL is what running out of memory looks like",
    int(signal.SIGBUS): "SIGBUS is what a shard that was cut while it was read, or a full /dev/shm, looks like",
}
KNOWN = frozenset(Exit) - {Exit.OK, Exit.SIGTERM}


def silent(board: Board, now: float, steps: list[float], alive: Collection[int]) -> int | None:
    """The rank that has been silent for too long, or None. steps: seconds of the last steps. alive: ranks that run.

    Ranks wait for one another, so the most patient phase that any of them works in holds for all, and it is not one
    that waits for another which is named.
    """
    working = [board.phase(rank) for rank in alive if board.phase(rank) != Phase.END]
    limit = max((LIMITS[phase] for phase in working), default=LIMITS[Phase.END])
    if steps:
        limit = max(limit, STEPS * median(steps))
    quiet = {rank: now - board.get(rank, "beat") for rank in alive}
    if max(quiet.values(), default=0.0) <= limit:
        return None
    busy = [rank for rank in alive if not board.get(rank, "waits") and quiet[rank] > limit / 2]
    return max(busy or alive, key=lambda rank: quiet[rank])


def verdict(codes: Mapping[str, int], stopping: bool) -> tuple[int, str]:
    """Exit code of the whole and the rank that decided it. codes: what each rank that has ended ended with.

    A rank that says why it ended outweighs one that was killed, and that one those that only lost a peer.
    """
    for name, code in codes.items():
        if code in KNOWN and code != Exit.RANK_DIED:
            return code, name
    for name, code in codes.items():
        if code < 0:
            return int(Exit.RANK_DIED), name
    for name, code in codes.items():
        if code not in (Exit.OK, Exit.SIGTERM):
            return int(Exit.RANK_DIED), name
    asked = stopping and Exit.SIGTERM in codes.values()
    return int(Exit.SIGTERM if asked else Exit.OK), ""


@dataclass
class Child:
    """A process of ours. output, events: read ends of its pipes, -1 once closed; rest: what has no newline yet."""

    name: str
    pid: int
    output: int
    events: int
    rest: dict[int, bytes] = field(default_factory=dict)
    code: int | None = None


class Supervisor:
    """Runs one training on this machine."""

    def __init__(self, args: TrainArgs) -> None:
        self.args = args
        self.stopping = False
        self.children: list[Child] = []
        self.selector = selectors.DefaultSelector()
        self.error: dict[str, Any] = {}
        self.steps: list[float] = []
        self.finished: dict[str, Any] = {}
        self.tail = Tail()
        self.heard = time.monotonic()  # when a child last told something

    # ---- what it says

    def say(self, event: str, level: str = "info", **values: Any) -> None:
        """One JSON line on stdout."""
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        self._print(json.dumps({"time": stamp, "level": level, "event": event, **values}, ensure_ascii=False))

    def _print(self, line: str) -> None:
        data = line.encode("utf-8", "replace") + b"\n"
        self.tail.keep(data)
        with contextlib.suppress(OSError):  # nobody listens: that must not end a training
            os.write(1, data)

    # ---- processes

    def fork(self, name: str, body: Callable[[Callable[[Mapping[str, Any]], None]], int], gpu: int | None) -> Child:
        """A child that runs `body(tell)` and exits with its code, a JobError's, or 71."""
        output, output_end = os.pipe()
        events, events_end = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = int(Exit.RANK_DIED)
            try:
                ctypes.CDLL(None).prctl(PARENT_DIED, signal.SIGKILL)
                os.dup2(output_end, 1)
                os.dup2(output_end, 2)
                for signum in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(signum, signal.SIG_DFL)
                if gpu is not None:
                    os.environ["CUDA_VISIBLE_DEVICES"] = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), gpu)

                def tell(event: Mapping[str, Any]) -> None:
                    os.write(events_end, json.dumps(event).encode() + b"\n")

                code = self._child(body, tell)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(output_end)
        os.close(events_end)
        child = Child(name, pid, output, events)
        for descriptor in (output, events):
            os.set_blocking(descriptor, False)
            self.selector.register(descriptor, selectors.EVENT_READ, child)
        self.children.append(child)
        return child

    @staticmethod
    def _child(
        body: Callable[[Callable[[Mapping[str, Any]], None]], int], tell: Callable[[Mapping[str, Any]], None]
    ) -> int:
        try:
            return body(tell)
        except JobError as error:
            tell({"event": "error", "exit": int(error.code), "message": error.message, "hint": error.hint})
            return int(error.code)
        except MemoryError:
            tell({"event": "error", "exit": 71, "message": "out of memory", "hint": "give the pod more memory"})
        except Exception as error:
            if full(error):
                message = f"the disk is full: {getattr(error, 'filename', None) or error}"
                tell({"event": "error", "exit": int(Exit.DISK_FULL), "message": message, "hint": "free space"})
                return int(Exit.DISK_FULL)
            if LOST_PEER.search(str(error)):
                print("a rank that this one needs is gone")
            else:
                traceback.print_exc()
        return int(Exit.RANK_DIED)

    def pump(self, timeout: float) -> None:
        """Pass on whole lines of output, act on events, and reap."""
        for key, _ in self.selector.select(timeout):
            self._read(key.data, key.fd)
        for child in self.children:
            if child.code is not None:
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                child.code = os.waitstatus_to_exitcode(status)
                for descriptor in (child.output, child.events):
                    self._read(child, descriptor, final=True)

    def _read(self, child: Child, descriptor: int, final: bool = False) -> None:
        if descriptor < 0 or descriptor not in (child.output, child.events):
            return
        data = child.rest.pop(descriptor, b"")
        ended = final
        with contextlib.suppress(BlockingIOError):
            while True:
                piece = os.read(descriptor, 1 << 16)
                data += piece
                if not piece:
                    ended = True
                    break
        *lines, rest = data.split(b"\n")
        if rest and ended:
            lines.append(rest)
        elif rest:
            child.rest[descriptor] = rest
        for line in lines:
            if descriptor == child.events:
                with contextlib.suppress(ValueError):  # cut by a kill
                    self._event(child, json.loads(line))
            elif text := line.decode("utf-8", "replace").rstrip().rpartition("\r")[2]:  # the end of a progress bar
                self._print(f"[{child.name}] {text}")
        if ended:
            self.selector.unregister(descriptor)
            os.close(descriptor)
            if descriptor == child.events:
                child.events = -1
            else:
                child.output = -1

    def _event(self, child: Child, event: dict[str, Any]) -> None:
        name = event.pop("event")
        self.heard = time.monotonic()
        if name == "error":
            self.error.setdefault(child.name, event)
            return
        if name == "progress" and "seconds" in event:
            self.steps = [*self.steps[-99:], float(event["seconds"])]
        if name == "finished":
            self.finished = event
        self.say(name, rank=child.name, **event)

    def kill(self) -> None:
        """End every child at once and reap it."""
        for child in self.children:
            if child.code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
        while any(child.code is None for child in self.children):
            self.pump(TICK)

    # ---- the two acts

    def run(self) -> int:
        """Exit code of the training."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._stop)
        from transformers import AutoModelForCausalLM  # noqa: F401  imported once for all children

        work = Path(tempfile.mkdtemp(prefix="dflash-train-"))
        try:
            code = self._prepared(work)
            if code is None:
                code = self._alone(work)
        finally:
            self.kill()
            shutil.rmtree(work, ignore_errors=True)
        self._end(code)
        if code != Exit.OK:
            self.tail.put(self.args.out)
        return code

    def _stop(self, number: int, frame: object) -> None:
        self.stopping = True

    def _prepared(self, work: Path) -> int | None:
        """Run `prepare` in a child; an exit code if the training ends here."""
        board = Board(1)

        def body(tell: Callable[[Mapping[str, Any]], None]) -> int:
            world_of(self.args.split)
            prepare(self.args, work, tell, lambda: board.beat(0, Phase.LOAD))
            return int(Exit.OK)

        child = self.fork("prepare", body, None)
        while child.code is None:
            self.pump(TICK)
            if self.stopping:
                return int(Exit.SIGTERM)
            quiet = time.monotonic() - max(board.get(0, "beat"), self.heard)
            if quiet > LIMITS[Phase.LOAD]:
                return self._silent(child.name, quiet)
        if child.code:
            return verdict({child.name: child.code}, False)[0]
        ready = Ready.read(work)
        if ready.finished:
            self.say("unchanged", message="this training is complete: nothing to do", out=self.args.out)
            return int(Exit.OK)
        return None

    def _alone(self, work: Path) -> int:
        """Train as the only one on this machine that trains there."""
        try:
            with only(Path(Ready.read(work).local)):  # the ranks inherit it
                return self._trained(work)
        except JobError as error:
            self.error = {"supervisor": {"message": error.message, "hint": error.hint}}
            return int(error.code)

    def _trained(self, work: Path) -> int:
        ready, world = Ready.read(work), world_of(self.args.split)
        board = Board(world.size)
        self.say("start", targets=world.targets, drafters=world.drafters, step=ready.start)
        gpus = torch.cuda.device_count() > 0
        for number in range(world.size):
            self._rank(work, ready, world, number, board, number if gpus else None)
        told = False
        died_at = 0.0
        while any(child.code is None for child in self.children):
            self.pump(TICK)
            if self.stopping and not told:
                told = True
                if any(board.phase(rank) < Phase.FIRST for rank in range(world.size)):
                    self.say("stopping", message="stopping: SIGTERM; nothing is trained since the last checkpoint")
                    return int(Exit.SIGTERM)
                self.say("stopping", message="stopping: SIGTERM; the step is finished and saved first")
                for child in self.children:
                    if child.code is None and child.name != "prepare":
                        os.kill(child.pid, signal.SIGTERM)
            failed = [c for c in self.children if c.code not in (None, 0, Exit.SIGTERM)]
            if failed and not died_at:
                died_at = time.monotonic()
            if died_at and time.monotonic() - died_at > LINGER:
                break
            now, alive = time.monotonic(), [n for n, c in enumerate(self.children[1:]) if c.code is None]
            rank = silent(board, now, self.steps, alive)
            if rank is not None:
                return self._silent(world.name(rank), now - board.get(rank, "beat"))
        return self._judge()

    def _silent(self, name: str, seconds: float) -> int:
        """What a child that no longer says that it is alive means."""
        hint = "look at its last lines; a retry goes on from the last checkpoint"
        self.error = {name: {"message": f"{name} has been silent for {seconds:.0f} s", "hint": hint}}
        return int(Exit.RANK_DIED)

    def _rank(self, work: Path, ready: Ready, world: World, number: int, board: Board, gpu: int | None) -> None:
        def body(tell: Callable[[Mapping[str, Any]], None]) -> int:
            return run(Place(self.args, ready, world, number, board, work, tell))

        self.fork(world.name(number), body, gpu)

    def _judge(self) -> int:
        codes = {child.name: child.code for child in self.children if child.code is not None}
        code, name = verdict(codes, self.stopping)
        if name and name not in self.error:
            ended = codes[name]
            how = f"was killed by {signal.Signals(-ended).name}" if ended < 0 else f"ended with {ended}"
            hint = HINTS.get(-ended, "")
            self.error = {name: {"message": f"{name} {how}", "hint": hint}}
        elif name:
            self.error = {name: self.error[name]}
        return code

    def _end(self, code: int) -> None:
        """The last JSON line, and the termination message for Kubernetes."""
        first: dict[str, Any] = next(iter(self.error.values()), {}) if code not in (Exit.OK, Exit.SIGTERM) else {}
        message: dict[str, Any] = {"exit": code, "reason": Exit(code).name.lower(), **self.finished}
        message |= {name: str(first[name])[:1500] for name in ("message", "hint") if first.get(name)}
        event = {Exit.OK: "done", Exit.SIGTERM: "stopped"}.get(Exit(code), "failed")
        self.say(event, level="info" if code == Exit.OK else "error", **message)
        path = os.environ.get("TERMINATION_LOG", "/dev/termination-log")
        with contextlib.suppress(OSError), open(path, "wb" if "TERMINATION_LOG" in os.environ else "r+b") as file:
            file.write(json.dumps(message, ensure_ascii=False).encode()[:4095])


def full(error: BaseException) -> bool:
    """Whether it says that a disk or a quota is full; safetensors tells so in words alone."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "errno", None) in codes or any(f"(os error {code})" in str(error) for code in codes)


def visible(told: str | None, number: int) -> str:
    """CUDA_VISIBLE_DEVICES of a rank: the number-th of those that the supervisor may see."""
    return told.split(",")[number] if told else str(number)
