"""Logs of many pods at once, each line exactly once: through cut streams, rotation, pods that come later and restarts.

Every stream is asked for with time stamps. After a break it is opened anew from the second of the last line, and lines
up to that very stamp (counted, since two lines can share one) are dropped. Lines are cut on the newline byte and
decoded whole, so a character is never torn.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from dflashctl.backends.base import LogLine
from dflashctl.backends.kube import Api, Refused
from dflashctl.errors import ApiError
from dflashctl.progress import Object

LOOK_S = 1.0  # how often new pods are looked for
RETRY_S = 0.5
BREAKS = 5  # of a log that is read to its present end
T = TypeVar("T")


def each(ask: Callable[[str], T], names: Sequence[str], at_once: int) -> list[T]:
    """ask(name) of every name, some at once. Threads that nobody waits for: Ctrl-C must not wait for an answer."""
    todo: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, T | Exception]] = queue.SimpleQueue()
    for item in enumerate(names):
        todo.put(item)

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                number, name = todo.get_nowait()
                try:
                    done.put((number, ask(name)))
                except Exception as error:
                    done.put((number, error))

    for _ in range(min(at_once, len(names))):
        threading.Thread(target=work, daemon=True).start()
    found = dict(done.get() for _ in names)
    for value in found.values():
        if isinstance(value, Exception):
            raise value
    return [found[i] for i in range(len(names))]  # type: ignore[misc]


class LogReader:
    """`pods()` tells (plan index, pod) of all pods there are now, and whether the Job has ended."""

    def __init__(self, api: Api, path: str, pods: Callable[[], tuple[list[tuple[int, Object]], bool]]) -> None:
        self._api = api
        self._path = path
        self._pods = pods

    def read(self, previous: bool, follow: bool) -> Iterator[LogLine]:
        """Lines as they come; without `follow` those that are there now, index by index."""
        if follow:
            yield from self._follow()
            return
        pods, _ = self._pods()
        tries: dict[int, list[Object]] = {}
        for index, pod in sorted(pods, key=lambda p: (p[0], p[1]["metadata"].get("creationTimestamp") or "")):
            tries.setdefault(index, []).append(pod)
        for index, of_index in tries.items():
            chosen = of_index[:-1][-1:] if previous else of_index[-1:]
            for pod in chosen:
                for text in self._stream(pod["metadata"]["name"], follow=False):
                    yield LogLine(index, text)

    def _follow(self) -> Iterator[LogLine]:
        lines: queue.Queue[LogLine | None] = queue.Queue(10000)
        threads: dict[str, threading.Thread] = {}
        ended = False
        while True:
            pods, ended = self._pods()
            for index, pod in pods:
                name = pod["metadata"]["name"]
                if name not in threads and _started(pod):
                    threads[name] = threading.Thread(target=self._pump, args=(index, name, lines), daemon=True)
                    threads[name].start()
            end = time.monotonic() + LOOK_S
            while (left := end - time.monotonic()) > 0:
                try:
                    line = lines.get(timeout=left)
                except queue.Empty:
                    break
                if line is not None:
                    yield line
            if ended and not any(t.is_alive() for t in threads.values()) and lines.empty():
                return

    def _pump(self, index: int, pod: str, lines: queue.Queue[LogLine | None]) -> None:
        try:
            for text in self._stream(pod, follow=True):
                lines.put(LogLine(index, text))
        except ApiError as error:
            lines.put(LogLine(index, f"[dflashctl] the log of {pod} cannot be read on: {error.message}"))

    def _stream(self, pod: str, follow: bool) -> Iterator[str]:
        last, same, breaks = b"", 0, 0  # stamp of the newest line given, how many lines bore it
        while True:
            query: dict[str, Any] = {"timestamps": True} | ({"follow": True} if follow else {})
            if last:
                query["sinceTime"] = last.decode()[:19] + "Z"
            skip = same
            try:
                for line in self._api.lines(f"{self._path}/{pod}/log", **query):
                    stamp, _, text = line.partition(b" ")
                    if last and (stamp < last or (stamp == last and skip > 0)):
                        skip -= stamp == last
                        continue
                    same = same + 1 if stamp == last else 1
                    last = stamp
                    yield text.decode("utf-8", "replace").rstrip("\r")
                if not follow:
                    return
                # a stream also ends at a rotation: what a dead pod wrote after that is read once more
                follow = not self._gone_or_done(pod)
                if not follow:
                    continue
            except ConnectionError:
                if not follow and breaks == BREAKS:
                    raise ApiError(f"the log stream of {pod} broke off", "ask again") from None
                breaks += not follow
            except Refused as error:
                if error.status == 404 or not follow:
                    return  # deleted: what it could write stands in OUT/logs
                if error.status != 400:
                    raise
            time.sleep(RETRY_S)

    def _gone_or_done(self, pod: str) -> bool:
        """A stream also ends when the kubelet rotates the file or a proxy is bored: only a dead pod ends a log."""
        there = self._api.find(f"{self._path}/{pod}")
        return there is None or (there.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _started(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Running", "Succeeded", "Failed")
