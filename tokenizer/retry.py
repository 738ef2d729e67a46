"""Which failures of a store pass by themselves, how long to try again, and what to tell the user when it is over.

Pure but for the clock: full jitter (a random wait between 0 and a bound that doubles), so that 64 pods that were
slowed down together do not come back together.
"""

from __future__ import annotations

import logging
import mmap
import random
import time
from collections.abc import Callable

from tokenizer.job import Exit, JobError

log = logging.getLogger("tokenizer")
FIRST_WAIT, LONGEST_WAIT = 0.2, 20.0  # seconds, bounds of the random wait

# One byte shared with forked children: has any S3 call succeeded in this pod? Before, refused credentials are what
# every pod would hit (78); after, they expired or were rotated (75).
_succeeded = mmap.mmap(-1, 1)


class StoreError(JobError):
    """A store said no. `kind`: credentials, denied, bucket, missing, changed, unreachable, endpoint, disk_full, other.

    The code follows from it: 65 for missing and changed objects, 73 for a full disk, 75 for what may pass, 78 for the
    rest as long as no S3 call has succeeded in this pod.
    """

    def __init__(self, kind: str, uri: str, message: str, hint: str = "") -> None:
        code = {"missing": Exit.DATA, "changed": Exit.DATA, "disk_full": Exit.DISK_FULL, "unreachable": Exit.RETRY}.get(
            kind, Exit.RETRY if succeeded() else Exit.CONFIG
        )
        super().__init__(code, f"{uri}: {message}", hint)
        self.kind = kind
        self.uri = uri


class NotFound(StoreError):
    """There is no such object (kind "missing")."""

    def __init__(self, uri: str, message: str = "no such object", hint: str = "check the spelling") -> None:
        super().__init__("missing", uri, message, hint)


def changed(uri: str) -> StoreError:
    return StoreError(
        "changed", uri, "the object changed since it was listed", "`resume` takes it anew, `--skip-file` leaves it out"
    )


def succeeded() -> bool:
    return _succeeded[0] == 1


def note_success() -> None:
    _succeeded[0] = 1


def log_retry(line: str) -> None:
    log.warning(line)


class Patience:
    """Decides, after each failure of one operation, how long to wait, or that it is over.

    `progress()` starts the clock anew: a download that moves at all goes on.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        rand: Callable[[], float] = random.random,
    ) -> None:
        self.seconds, self.clock, self.rand = seconds, clock, rand
        self.progress()

    def progress(self) -> None:
        self.since, self.failures = self.clock(), 0

    def next_wait(self, seconds: float | None = None) -> float | None:
        """Seconds to wait before the next try; None when `seconds` (default: the patience) are used up."""
        left = (self.seconds if seconds is None else seconds) - (self.clock() - self.since)
        if left <= 0:
            return None
        self.failures += 1
        bound = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(self.failures - 1, 10))
        return min(self.rand() * bound, left)
