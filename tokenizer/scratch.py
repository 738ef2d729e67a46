"""Room on the local disk that does not survive its process, not even one that was killed.

A directory is owned by whoever holds the lock on the file beside it; the next start removes those that nobody holds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizer.job import Exit, JobError

PREFIX = "dflash-tokenize-"


def base() -> Path:
    """$DFLASH_SCRATCH, else the system's temporary directory."""
    return Path(os.environ.get("DFLASH_SCRATCH") or tempfile.gettempdir())


@contextmanager
def scratch(where: Path | None = None) -> Iterator[Path]:
    """A fresh directory, removed at the end; leftovers of killed processes are removed first. JobError 78 or 73."""
    where = where or base()
    try:
        where.mkdir(parents=True, exist_ok=True)
        sweep(where)
        lock, handle = _claim(where)
    except OSError as error:
        raise JobError(
            Exit.DISK_FULL if error.errno == errno.ENOSPC else Exit.CONFIG,
            f"cannot write to the scratch directory {where}: {error.strerror}",
            "set DFLASH_SCRATCH to a directory with room",
        ) from None
    path = lock.with_suffix("")
    owner = os.getpid()
    try:
        path.mkdir()
        yield path
    finally:
        if os.getpid() == owner:  # never in a forked child
            try:
                _release(path, lock)
            except BaseException:  # SIGTERM in the middle of tidying up: it is raised once, the tidying comes first
                _release(path, lock)
                raise
            finally:
                os.close(handle)


def _release(path: Path, lock: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    lock.unlink(missing_ok=True)


def sweep(where: Path) -> None:
    """Removes the directories whose owner is gone."""
    for lock in where.glob(PREFIX + "*.lock"):
        with contextlib.suppress(OSError), lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)


def _claim(where: Path) -> tuple[Path, int]:
    while True:
        lock = where / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}.lock"
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(lock).st_ino == os.fstat(handle).st_ino:
                return lock, handle
        except OSError:  # a sweep got between: the name is being removed
            pass
        os.close(handle)
