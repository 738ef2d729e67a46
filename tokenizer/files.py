"""The store on a file system: whole files only, conditions that hold across processes.

A file is written beside its target under a hidden temporary name, synced, then linked (fails if the target exists:
that is if-none-match) or renamed; if-match compares and renames under a lock of the directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from typing import IO

from tokenizer.retry import NotFound, StoreError, changed
from tokenizer.store import PIECE, Put, Stat, Store, file_etag

TEMPORARY = ".dflash-"  # start of the names of unfinished files: hidden, so no listing takes them
NOWHERE = (errno.ENOENT, errno.ELOOP)  # of a link to nothing, or to itself
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)


class FileStore(Store):
    """Keys are paths below `root`, with slashes."""

    def __init__(self, root: str) -> None:
        self.root = root

    def _path(self, key: str) -> str:
        path = os.path.normpath(os.path.join(self.root, key))
        if not key or os.path.commonpath([path, self.root]) != os.path.normpath(self.root):
            raise ValueError(f"`{key}` is not a key below {self.root}")
        return path

    def check(self) -> None:
        if os.path.exists(self.root):
            with _errors(self.root):
                os.listdir(self.root)

    def list(self, prefix: str = "") -> Iterator[Stat]:
        if os.path.lexists(self.root) and not os.path.isdir(self.root):
            return
        found: list[Stat] = []
        seen: set[tuple[int, int]] = set()
        links = [("", self.root)]
        while links:  # what is below a directory has its own names, whatever else leads to it
            key, folder = links.pop(0)
            _walk(folder, key, prefix, found, seen, links)
            links.sort()
        yield from sorted(found)

    def stat(self, key: str) -> Stat | None:
        path = self._path(key)
        with _errors(path):
            try:
                stat = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return None if os.path.isdir(path) else Stat(key, stat.st_size, file_etag(stat))

    def get(self, key: str) -> tuple[bytes, str]:
        path = self._path(key)
        with _errors(path), open(path, "rb") as file:
            etag = file_etag(os.fstat(file.fileno()))
            return file.read(), etag

    def open_stream(
        self, key: str, etag: str | None = None, size: int | None = None, start: int = 0
    ) -> Iterator[bytes]:
        path = self._path(key)
        with _errors(path), open(path, "rb", buffering=0) as file:
            before = file_etag(os.fstat(file.fileno()))
            if etag is not None and before != etag:
                raise changed(path)
            file.seek(start)
            while piece := file.read(PIECE):
                yield piece
            if file_etag(os.fstat(file.fileno())) != before:  # written to while it was read
                raise changed(path)

    def put_bytes(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> Put:
        return self._write(key, lambda file: file.write(data), if_none_match, if_match)

    def upload_file(
        self, path: str | os.PathLike[str], key: str, *, if_none_match: bool = False, if_match: str | None = None
    ) -> Put:
        def copy(file: IO[bytes]) -> None:
            with open(path, "rb") as source:
                shutil.copyfileobj(source, file, PIECE)

        return self._write(key, copy, if_none_match, if_match)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _errors(path), contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def _write(self, key: str, fill: Callable[[IO[bytes]], object], if_none_match: bool, if_match: str | None) -> Put:
        path = self._path(key)
        folder = os.path.dirname(path)
        with _errors(path):
            if if_none_match and os.path.lexists(path):
                return Put(False, "")
            os.makedirs(folder, exist_ok=True)
            file, temporary = _begin(folder, os.path.basename(path))
            try:
                with file:  # its lock is held until it has its name
                    fill(file)
                    file.flush()
                    os.fsync(file.fileno())
                    etag = file_etag(os.fstat(file.fileno()))
                    if not _publish(temporary, path, folder, if_none_match, if_match):
                        return Put(False, "")
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
            return Put(True, etag)


def _begin(folder: str, name: str) -> tuple[IO[bytes], str]:
    """An unfinished file for `name`, locked as long as its writer lives; those of dead writers are removed."""
    start = f"{TEMPORARY}{hashlib.sha256(os.fsencode(name)).hexdigest()[:12]}-"
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(start):
                with contextlib.suppress(OSError), open(entry.path, "rb") as left:
                    fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)
    while True:
        path = os.path.join(folder, start + secrets.token_hex(6))
        file = open(path, "xb")  # noqa: SIM115 (handed to the caller)
        with contextlib.suppress(OSError):  # a file system without locks leaves more behind after a kill
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file, path
        file.close()  # taken for a dead writer's before it was locked


def _publish(temporary: str, path: str, folder: str, if_none_match: bool, if_match: str | None) -> bool:
    if if_none_match:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
        else:
            _sync(folder)
            return True
    lock = os.open(folder, os.O_RDONLY)
    try:
        if if_none_match or if_match is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
            here = file_etag(os.stat(path)) if os.path.exists(path) else None
            if here is not None if if_none_match else here != if_match:
                return False
        os.replace(temporary, path)
        os.fsync(lock)
        return True
    finally:
        os.close(lock)


def _sync(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _walk(
    folder: str, key: str, prefix: str, found: list[Stat], seen: set[tuple[int, int]], links: list[tuple[str, str]]
) -> None:
    """Follows links to files (one to nothing gets no etag); those to directories are added to `links`. A directory that
    was seen already (a loop) is not entered again.
    """
    with _errors(folder):
        try:
            here = os.stat(folder)
        except FileNotFoundError:
            return
        if (here.st_dev, here.st_ino) in seen:
            return
        seen.add((here.st_dev, here.st_ino))
        with os.scandir(folder) as entries:
            for entry in entries:
                name = key + entry.name
                if _is_dir(entry):
                    if prefix.startswith(name + "/") or (name + "/").startswith(prefix):
                        if entry.is_symlink():
                            links.append((name + "/", entry.path))
                        else:
                            _walk(entry.path, name + "/", prefix, found, seen, links)
                elif name.startswith(prefix) and not entry.name.startswith(TEMPORARY):
                    try:
                        stat = entry.stat()
                    except OSError as error:
                        if error.errno not in NOWHERE:
                            raise
                        if entry.is_symlink():  # to nothing; else it was removed meanwhile
                            found.append(Stat(name, 0, ""))
                    else:
                        found.append(Stat(name, stat.st_size, file_etag(stat)))


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno not in NOWHERE:
            raise
        return False


@contextlib.contextmanager
def _errors(path: str) -> Iterator[None]:
    """The errors of the operating system, in the words of a store."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(_named(error, path), "no such file") from error
    except PermissionError as error:
        raise StoreError(
            "denied", _named(error, path), "permission denied", f"uid {os.geteuid()} needs access to it"
        ) from error
    except NotADirectoryError as error:
        raise StoreError(
            "other", _named(error, path), "a part of this path is a file", "name another, a directory or none yet"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                "disk_full", path, "no space left on the disk", "free some or use a larger volume"
            ) from error
        raise StoreError("other", _named(error, path), error.strerror or str(error)) from error


def _named(error: OSError, path: str) -> str:
    """The file that an error is about: not the unfinished one that nobody but its writer knows."""
    name = str(error.filename or path)
    return path if os.path.basename(name).startswith(TEMPORARY) else name
