"""The end of a pod's log, kept in OUT/logs where the pod failed: what `logs` shows once the pod is gone."""

from __future__ import annotations

import contextlib
import os
from collections import deque

from tokenizer.job import LOGS_DIR, log_name
from tokenizer.store import Options, StoreError, open_store

JOB_ENV = "DFLASH_JOB"  # name of the Job that this pod is of; a process of this machine has its log in a file
TAIL_BYTES = 64 << 10
STORE = Options(patience=10.0, on_retry=lambda line: None)


class Tail:
    """The last 64 KiB of what was printed, in whole lines."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self._size = 0

    def keep(self, line: bytes) -> None:
        self._lines.append(line)
        self._size += len(line)
        while self._size > TAIL_BYTES and len(self._lines) > 1:
            self._size -= len(self._lines.popleft())

    def put(self, out: str) -> None:
        """To OUT/logs/<job>/00000-<try>.txt of a pod; a store that is not there must not change how a training ends."""
        job = os.environ.get(JOB_ENV)
        if not job:
            return
        with contextlib.suppress(StoreError, ValueError, OSError):
            store = open_store(out, STORE)
            tries = sum(1 for _ in store.list(f"{LOGS_DIR}/{job}/"))
            store.put_bytes(log_name(job, 0, tries), b"".join(self._lines)[-TAIL_BYTES:])
