"""What a pod says: JSON log lines on stdout, a termination message for Kubernetes, the tail of its log for OUT/logs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import IO, Any

TAIL_BYTES = 64 << 10
TERMINATION_BYTES = 4096  # what Kubernetes keeps
PROGRESS_SECONDS = 3.0


def now() -> str:
    """UTC to the millisecond."""
    t = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(t)) + f".{int(t % 1 * 1000):03d}Z"


class Warnings(logging.Handler):
    """Hands the text of warnings on."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self.say(record.getMessage())


class Log:
    """Lines {"time", "level", "event", ...} to `stream`; the last 64 KiB of them, and tracebacks, in `tail`."""

    def __init__(self, stream: IO[str], **fields: Any) -> None:
        self.stream = stream
        self.fields = fields
        self._tail: deque[bytes] = deque()
        self._size = 0

    def say(self, event: str, *, level: str = "info", **values: Any) -> None:
        line = json.dumps({"time": now(), "level": level, "event": event, **self.fields, **values}, ensure_ascii=False)
        with contextlib.suppress(OSError, ValueError):  # nobody listens any more: that must not end the work
            self.stream.write(line + "\n")
            self.stream.flush()
        self.keep(line)

    def warn(self, text: str) -> None:
        self.say("warning", level="warn", message=text)

    def take_warnings(self) -> None:
        """What the store logs (retries) becomes lines here."""
        logger = logging.getLogger("tokenizer")
        logger.handlers = [Warnings(self.warn)]
        logger.propagate = False

    def keep(self, text: str) -> None:
        """Into the tail alone: what would only frighten on stdout."""
        data = text.encode("utf-8", "replace") + b"\n"
        self._tail.append(data)
        self._size += len(data)
        while self._size > TAIL_BYTES and len(self._tail) > 1:
            self._size -= len(self._tail.popleft())

    def tail(self) -> bytes:
        return b"".join(self._tail)[-TAIL_BYTES:]


class Progress:
    """Adds up what workers report and says it every few seconds."""

    def __init__(self, log: Log, total_bytes: int) -> None:
        self.log = log
        self.total_bytes = total_bytes
        self.counts = {"rows": 0, "tokens": 0, "loss_tokens": 0, "bytes": 0}
        self.started = self.said = time.monotonic()

    def add(self, delta: dict[str, int]) -> None:
        for name, value in delta.items():
            self.counts[name] += value

    def snapshot(self) -> dict[str, Any]:
        seconds = max(1e-3, time.monotonic() - self.started)
        return {
            **self.counts,
            "total_bytes": self.total_bytes,
            "rows_per_s": round(self.counts["rows"] / seconds, 1),
            "tokens_per_s": round(self.counts["tokens"] / seconds, 1),
        }

    def tick(self, final: bool = False) -> bool:
        """Says the state of things if it is time to; returns whether it did."""
        if not final and time.monotonic() - self.said < PROGRESS_SECONDS:
            return False
        self.said = time.monotonic()
        self.log.say("progress", **self.snapshot())
        return True


def terminate(message: dict[str, Any]) -> None:
    """Writes the termination message where Kubernetes (or $TERMINATION_LOG) wants it, if that place exists."""
    path = os.environ.get("TERMINATION_LOG", "/dev/termination-log")
    message = dict(message)
    for field in ("hint", "message"):
        data = json.dumps(message, ensure_ascii=False).encode()
        over = len(data) - TERMINATION_BYTES + 1
        if over > 0 and field in message:
            text = str(message[field]).encode()
            message[field] = text[: max(0, len(text) - over - 16)].decode("utf-8", "ignore") + "..."
    with contextlib.suppress(OSError), open(path, "r+b" if "TERMINATION_LOG" not in os.environ else "wb") as file:
        file.write(json.dumps(message, ensure_ascii=False).encode())
