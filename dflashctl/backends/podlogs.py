"""Logs of many pods at once, each line exactly once: through cut streams, rotation, pods that come later and restarts.

Every stream is asked for with time stamps. After a break it is opened anew from the second of the last line, and lines
up to that very stamp (counted, since two lines can share one) are dropped. Lines are cut on the newline byte and
decoded whole, so a character is never torn; an end without a newline counts only once its pod is dead, for a proxy may
have cut there. A stream that says nothing after its pod is dead is given up on and read to its end by another request.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from dflashctl import show
from dflashctl.backends.base import LogLine
from dflashctl.backends.kube import PASSING, PATIENCE_S, Api, Refused
from dflashctl.errors import ApiError, CliError
from dflashctl.progress import Object

LOOK_S = 1.0  # how often new pods are looked for
RETRY_S = 0.5
QUIET_S = 3.0  # how long a dead pod's stream may be silent
READ_S = 10.0  # of a log that is read to its present end
BREAKS = 3  # of such a log
OURS = ("tokenizer", "trainer")
_STAMP = re.compile(rb"(\S{19})(?:\.([0-9]+))?(\S+)")
T = TypeVar("T")


def each(ask: Callable[[str], T], names: Sequence[str], at_once: int, seconds: float | None = None) -> dict[str, T]:
    """name -> ask(name), some at once; after `seconds` without those that have not answered.

    By threads that nobody waits for: neither Ctrl-C nor the other answers wait for one that hangs.
    """
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[str, T | Exception]] = queue.SimpleQueue()
    for name in names:
        todo.put(name)

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                name = todo.get_nowait()
                try:
                    done.put((name, ask(name)))
                except Exception as error:
                    done.put((name, error))

    for _ in range(min(at_once, len(names))):
        threading.Thread(target=work, daemon=True).start()
    end = None if seconds is None else time.monotonic() + seconds
    found: dict[str, T] = {}
    with contextlib.suppress(queue.Empty):
        for _ in names:
            name, value = done.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
            if isinstance(value, Exception):
                raise value
            found[name] = value
    return found


def moment(stamp: bytes) -> tuple[float, str]:
    """A kubelet's time stamp, in whatever zone its node lives, as something that can be compared."""
    found = _STAMP.fullmatch(stamp)
    if found is None:
        return 0.0, ""
    seconds = datetime.fromisoformat((found[1] + found[3]).decode()).timestamp()
    return seconds, (found[2] or b"").decode().ljust(9, "0")


def since(stamp: bytes) -> str:
    """The whole second of a stamp, as `sinceTime` takes it."""
    return _STAMP.sub(rb"\1\3", stamp).decode()


@dataclass
class Reading:
    """How far one pod's log has been read, and by which of its readers (`turn`): those before it count no more."""

    index: int
    pod: str
    container: str
    last: bytes = b""  # stamp of the newest line given
    same: int = 0  # how many lines bore it
    heard: float = field(default_factory=time.monotonic)
    turn: int = 0
    over: bool = False


@dataclass(frozen=True)
class Seen:
    """One look at the pods: (plan index, pod) of each, and whether the Job has ended."""

    pods: list[tuple[int, Object]]
    ended: bool


@dataclass(frozen=True)
class Trouble:
    """One log cannot be read on; the others go on."""

    words: str


Told = LogLine | Seen | Trouble | Exception


class LogReader:
    """`pods()` tells (plan index, pod) of all pods there are now, and whether the Job has ended."""

    def __init__(self, api: Api, path: str, pods: Callable[[], tuple[list[tuple[int, Object]], bool]]) -> None:
        self._api = api
        self._path = path
        self._pods = pods

    def read(self, previous: bool, follow: bool) -> Iterator[LogLine]:
        """Lines as they come; without `follow` those that are there now, index by index.

        Raises ApiError at the end if a log could not be read.
        """
        if follow and not previous:
            yield from self._follow()
            return
        pods, _ = self._pods()
        tries: dict[int, list[Object]] = {}
        for index, pod in sorted(pods, key=lambda p: (p[0], p[1]["metadata"].get("creationTimestamp") or "")):
            tries.setdefault(index, []).append(pod)
        unread: ApiError | None = None
        for index, of_index in tries.items():
            for pod in of_index[:-1][-1:] if previous else of_index[-1:]:
                reading = _reading(index, pod)
                try:
                    for text in self._stream(reading, follow=False):
                        yield LogLine(index, text)
                except ApiError as error:
                    unread = error
        if unread is not None:
            raise unread

    def _follow(self) -> Iterator[LogLine]:
        told: queue.Queue[Told] = queue.Queue(10000)
        threading.Thread(target=self._look, args=(told,), daemon=True).start()
        readings: dict[str, Reading] = {}
        while True:
            match told.get():
                case LogLine() as line:
                    yield line
                case Seen() as seen:
                    self._begin(seen, readings, told)
                    if seen.ended and all(reading.over for reading in readings.values()):
                        yield from _rest(told)
                        return
                case Trouble() as trouble:
                    show.warn(trouble.words)
                case Exception() as error:
                    raise error

    def _look(self, told: queue.Queue[Told]) -> None:
        """Say who is there, again and again."""
        while True:
            try:
                told.put(Seen(*self._pods()))
            except Exception as error:
                told.put(error)
                return
            time.sleep(LOOK_S)

    def _begin(self, seen: Seen, readings: dict[str, Reading], told: queue.Queue[Told]) -> None:
        """A reader for each new pod, and another one where the stream of a dead pod has nothing to say."""
        alive = set()
        for index, pod in seen.pods:
            name = pod["metadata"]["name"]
            alive |= set() if _dead(pod) else {name}
            if name not in readings and _started(pod):
                readings[name] = _reading(index, pod)
                self._start(readings[name], told, follow=True)
        for name, reading in readings.items():
            quiet = time.monotonic() - reading.heard > QUIET_S
            if name not in alive and quiet and not reading.over and reading.turn == 0:
                reading.turn = 1
                self._start(reading, told, follow=False)

    def _start(self, reading: Reading, told: queue.Queue[Told], follow: bool) -> None:
        threading.Thread(target=self._pump, args=(reading, told, reading.turn, follow), daemon=True).start()

    def _pump(self, reading: Reading, told: queue.Queue[Told], turn: int, follow: bool) -> None:
        try:
            for text in self._stream(reading, follow):
                told.put(LogLine(reading.index, text))
        except Exception as error:
            if reading.turn == turn:
                words = error.message if isinstance(error, CliError) else f"{type(error).__name__}: {error}"
                told.put(Trouble(f"the log of {reading.pod} cannot be read on: {words}"))
        finally:
            if reading.turn == turn:
                reading.over = True

    def _stream(self, reading: Reading, follow: bool) -> Iterator[str]:
        """What is new to the reading; ends when the pod is dead, or at the log's present end without `follow`."""
        turn, breaks, patient = reading.turn, 0, time.monotonic() + PATIENCE_S
        tail = b""
        while True:
            query: dict[str, Any] = {"timestamps": True, "container": reading.container}
            query |= {"follow": True} if follow else {"read_s": READ_S}
            if reading.last:
                query["sinceTime"] = since(reading.last)
            edge, skip = moment(reading.last), reading.same
            try:
                for line in self._api.lines(f"{self._path}/{reading.pod}/log", **query):
                    if reading.turn != turn:
                        return
                    if follow and not line.endswith(b"\n"):
                        tail = line
                        break
                    stamp, _, text = line.partition(b" ")
                    if edge != (0.0, ""):  # opened anew: what was given already comes first
                        now = moment(stamp)
                        skip -= now == edge
                        if now < edge or (now == edge and skip >= 0):
                            continue
                        edge = (0.0, "") if now > edge else edge
                    reading.same = reading.same + 1 if stamp == reading.last else 1
                    reading.last, reading.heard = stamp, time.monotonic()
                    patient = reading.heard + PATIENCE_S
                    yield _text(text)
                if not follow:
                    yield from _newer(tail, reading.last)
                    return
                # a stream also ends at a rotation: what a dead pod wrote after that is read once more
                follow = not self._gone_or_done(reading.pod)
                if not follow:
                    continue
            except ConnectionError:
                breaks += not follow
                if breaks > BREAKS:
                    raise ApiError(f"the log stream of {reading.pod} broke off", "ask again") from None
            except Refused as error:
                if error.status == 404:  # deleted: what it could write stands in OUT/logs
                    yield from _newer(tail, reading.last)
                    return
                if error.status == 400:  # no container yet, or never
                    if not follow or self._gone_or_done(reading.pod):
                        return
                elif error.status not in PASSING or time.monotonic() > patient or breaks == BREAKS:
                    raise
                breaks += not follow
            time.sleep(RETRY_S)

    def _gone_or_done(self, pod: str) -> bool:
        """A stream also ends when the kubelet rotates the file or a proxy is bored: only a dead pod ends a log."""
        there = self._api.find(f"{self._path}/{pod}")
        return there is None or _dead(there)


def _rest(told: queue.Queue[Told]) -> Iterator[LogLine]:
    """What was said before the last look, and has not been given yet."""
    with contextlib.suppress(queue.Empty):
        while True:
            item = told.get_nowait()
            if isinstance(item, LogLine):
                yield item


def _newer(tail: bytes, last: bytes) -> Iterator[str]:
    """The line without a newline that was kept back, unless it was read whole since."""
    stamp, _, text = tail.partition(b" ")
    if tail and moment(stamp) > moment(last):
        yield _text(text)


def _reading(index: int, pod: Object) -> Reading:
    """Of the container that is ours: an admission webhook may have put others beside it."""
    names = [c["name"] for c in (pod.get("spec") or {}).get("containers") or []]
    return Reading(index, pod["metadata"]["name"], next((n for n in names if n in OURS), names[0] if names else ""))


def _text(line: bytes) -> str:
    return line.removesuffix(b"\n").decode("utf-8", "replace").rstrip("\r")


def _started(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Running", "Succeeded", "Failed")


def _dead(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
