"""The target as a directory of this machine: where it lies, or fetched to the model volume, once for all retries.

    FOLDER/<name>-<digest>/            whole: renamed only once every file is there; RECORD describes them
    FOLDER/.<name>-<digest>.partial/   being fetched; `x.part` goes on at its last byte after a kill
    FOLDER/hub/                        huggingface_hub's own cache, for ID@REVISION

The digest is of what the prefix lists (names, sizes, etags), so another model under the same prefix is another
directory. Every ranged GET bears the listed etag, so no file is half of one object and half of another; where that etag
is an MD5, the bytes are checked against it. Small files come first: a target with another tokenizer is refused before
its weights are paid for.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizer.job import Exit, JobError
from tokenizer.store import Options, Stat, Store, StoreError, open_store, parse_uri

FOLDER_ENV, LIMIT_ENV = "DFLASH_MODEL_CACHE", "DFLASH_MODEL_CACHE_BYTES"
RECORD = ".dflash-target.json"
RESERVE = 256 << 20  # bytes of the disk that stay free where no limit is given
WEIGHTS = (".safetensors", ".gguf")
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".ot")  # formats that are not loaded
INDEX = "model.safetensors.index.json"
TRIES = 3  # readings of a file whose bytes are not those of its etag
SAID_S = 3.0  # seconds between two progress lines
MD5 = re.compile(r"[0-9a-f]{32}")
STORE = Options(threads=8, auth_patience=90.0)

Tell = Callable[[Mapping[str, Any]], None]


def cache_folder() -> Path:
    """Where fetched targets are kept: the pod's model volume, or the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get(FOLDER_ENV) or Path(home) / "dflash" / "targets")


def local_target(target: str, tell: Tell, check: Callable[[Path], None]) -> str:
    """The path of `target` on this machine, fetched if it is an s3:// prefix or ID@REVISION of a hub.

    tell: gets `note` and `fetch` events. check: is given a directory with all files but the weights, and raises where
    this cannot be the target. Raises JobError: 73 no room, 75 what may pass, 78 no such target or no access to it.
    """
    if target.startswith("s3://"):
        with _room_errors(cache_folder()):
            return str(_from_s3(target, cache_folder(), tell, check))
    if target.startswith("file:"):
        return parse_uri(target).path
    if not is_hub_id(target):
        return target  # what is not there is named by whoever reads it
    from trainer.hub import from_hub

    with _room_errors(cache_folder()):
        return str(from_hub(target, tell, check))


def is_hub_id(target: str) -> bool:
    """Whether a target that is neither an s3:// prefix nor a file: URI means a model of a hub."""
    return not (Path(target).exists() or target.startswith((".", "/", "~")) or target.partition("@")[0].count("/") > 1)


def check_revision(target: str) -> tuple[str, str]:
    """(id, revision) of a hub id. Raises JobError(78) without a revision: the next retry might get another model."""
    repo, _, revision = target.partition("@")
    if not revision:
        raise JobError(
            Exit.CONFIG,
            f"target `{target}` is no directory here, and as a hub id it names no revision",
            f"write `{target}@REVISION` (a commit, a tag or a branch), a path, or an s3:// prefix",
        )
    return repo, revision


def chosen(files: Sequence[Stat]) -> list[Stat]:
    """The files of a model that are loaded or describe it, small ones first; weights in other formats, files of
    folders below and hidden ones are left out.
    """
    names = [f for f in files if "/" not in f.key and not f.key.startswith(".") and f.size]
    if any(f.key.endswith(".safetensors") for f in names):
        names = [f for f in names if not f.key.endswith((*OTHER_WEIGHTS, ".gguf"))]
    return sorted(names, key=lambda f: (is_weights(f.key), f.size, f.key))


def is_weights(name: str) -> bool:
    return name.endswith((*WEIGHTS, *OTHER_WEIGHTS))


def check_room(missing: int, folder: Path, what: str) -> None:
    """Raises JobError(73), naming the volume and its size, where `missing` bytes more do not fit below `folder`."""
    told = os.environ.get(LIMIT_ENV)
    free = shutil.disk_usage(folder).free - RESERVE
    if told:
        held = sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
        free = min(free, int(told) - held)
    if missing > free:
        size = f"the volume has {gib(int(told)) if told else gib(shutil.disk_usage(folder).total)}"
        others = sorted(p.name for p in folder.iterdir() if p.is_dir() and (p / RECORD).is_file())
        held_by = f"; it holds {', '.join(others)}" if others else ""
        raise JobError(
            Exit.DISK_FULL,
            f"target `{what}` needs {gib(missing)} more below `{folder}`, {gib(max(0, free))} is free; {size}{held_by}",
            "raise `volumes.model` of the node profile, or remove targets that are no longer used",
        )


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**28 else f"{size} bytes"


@contextlib.contextmanager
def _room_errors(folder: Path) -> Iterator[None]:
    """What a file system refuses, in words."""
    try:
        yield
    except OSError as error:
        full = error.errno in (28, 122)  # no space left, quota
        raise JobError(
            Exit.DISK_FULL if full else Exit.CONFIG,
            f"targets cannot be kept below `{folder}`: {error.strerror or error}",
            f"raise `volumes.model` of the node profile, or let {FOLDER_ENV} name another folder",
        ) from error


# ---- from S3


def _from_s3(uri: str, folder: Path, tell: Tell, check: Callable[[Path], None]) -> Path:
    try:
        store = open_store(uri, STORE)
        listed = list(store.list())
        files = chosen(listed)
        _check_listing(uri, store, files)
        digest = hashlib.sha256(json.dumps([store.root, *sorted(files)]).encode()).hexdigest()[:12]
        name = f"{store.root.rsplit('/', 1)[-1]}-{digest}"
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{name}.lock", lambda: note(tell, f"`{uri}` is being fetched by another process")):
            return _fetched(uri, store, files, folder, name, len(listed) - len(files), tell, check)
    except ValueError as error:
        raise JobError(Exit.CONFIG, f"target {error}", "name a path, s3://bucket/prefix or ID@REVISION") from error
    except StoreError as error:
        passing = error.kind in ("missing", "changed")  # replaced while it was read: the next try lists it anew
        raise JobError(
            Exit.RETRY if passing else error.code,
            f"target `{uri}` cannot be fetched: {error.message}",
            "it was replaced meanwhile, the next try takes it as it is then" if passing else error.hint,
        ) from error


def _check_listing(uri: str, store: Store, files: Sequence[Stat]) -> None:
    """Raises JobError(78) where a prefix cannot be a model, before anything is fetched."""
    names = {f.key for f in files}
    if not names:
        raise JobError(Exit.CONFIG, f"target `{uri}`: nothing lies below this prefix", "check --target")
    if not any(name.endswith(WEIGHTS) for name in names):
        raise JobError(Exit.CONFIG, f"target `{uri}` has no .safetensors or .gguf file", "upload the model's weights")
    if "config.json" not in names and not any(name.endswith(".gguf") for name in names):
        raise JobError(Exit.CONFIG, f"target `{uri}` has no config.json", "name the prefix that holds it")
    if INDEX in names:
        try:
            wanted = set(json.loads(store.get_bytes(INDEX))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise JobError(Exit.CONFIG, f"{INDEX} of target `{uri}` is no index", "upload the whole model") from None
        if lost := sorted(wanted - names):
            raise JobError(
                Exit.CONFIG,
                f"target `{uri}` lacks {len(lost)} of the {len(wanted)} files of {INDEX}, the first is {lost[0]}",
                "upload the whole model",
            )


def _fetched(
    uri: str,
    store: Store,
    files: Sequence[Stat],
    folder: Path,
    name: str,
    skipped: int,
    tell: Tell,
    check: Callable[[Path], None],
) -> Path:
    """The directory of these files, the caller holding its lock."""
    whole, partial = folder / name, folder / f".{name}.partial"
    if whole.is_dir():
        if _intact(whole):
            note(tell, f"target `{uri}` is in `{whole}` already")
            return whole
        note(tell, f"target in `{whole}` is not what was fetched: it is fetched again")
        shutil.rmtree(partial, ignore_errors=True)
        whole.rename(partial)
    partial.mkdir(exist_ok=True)
    _forget_lost_writes(partial)
    total = sum(f.size for f in files)
    there = sum(p.stat().st_size for p in partial.iterdir() if not p.name.startswith("."))
    check_room(total - there, folder, uri)
    others = f", {skipped} other objects are left out" if skipped else ""
    note(tell, f"target `{uri}`: {len(files)} files, {gib(total)}, {gib(there)} of them are here{others}")
    progress = Progress(tell, total)
    described: dict[str, Any] = {}
    checked = False
    for file in files:
        if is_weights(file.key) and not checked:
            checked = True
            if (partial / "tokenizer.json").is_file():
                check(partial)
        described[file.key] = _fetch(store, file, partial, progress)
    progress.say()
    record = {"target": uri, "files": described}
    (partial / RECORD).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", "utf-8")
    partial.rename(whole)
    return whole


def _fetch(store: Store, file: Stat, folder: Path, progress: Progress) -> dict[str, Any]:
    """One file, from where an earlier try was killed; its description. Only whole, synced files get their name."""
    path, part = folder / file.key, folder / f"{file.key}.part"
    if path.is_file():
        found = _digests(path, progress)
        if path.stat().st_size == file.size and found[1] == (file.etag if MD5.fullmatch(file.etag) else found[1]):
            return _described(path, file, found[0])
        progress.done -= path.stat().st_size
        path.unlink()
    seen: list[str] = []
    while True:
        sha256, md5 = _download(store, file, part, progress)
        if not MD5.fullmatch(file.etag) or md5 == file.etag or md5 in seen:
            break  # an encrypted bucket's etags are no MD5: the same bytes twice are believed
        seen.append(md5)
        if len(seen) == TRIES:
            raise JobError(Exit.RETRY, f"`{store.uri(file.key)}` gives other bytes each time", "look at the store")
        progress.done -= file.size
        part.unlink()
    part.rename(path)
    return _described(path, file, sha256)


def _download(store: Store, file: Stat, part: Path, progress: Progress) -> tuple[str, str]:
    """Bring `part` to its full size; (sha256, md5) of all of it. Raises JobError(75) for bytes that do not agree."""
    if part.is_file() and part.stat().st_size > file.size:
        part.unlink()
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    with part.open("a+b") as out:
        out.seek(0)
        while piece := out.read(8 << 20):
            sha256.update(piece)
            md5.update(piece)
            progress.add(len(piece), file.key)
        at = out.tell()
        for piece in store.open_stream(file.key, file.etag, file.size, start=at):
            out.write(piece)
            sha256.update(piece)
            md5.update(piece)
            progress.add(len(piece), file.key)
        out.flush()
        os.fsync(out.fileno())
        size = out.tell()
    if size != file.size:
        raise JobError(Exit.RETRY, f"`{store.uri(file.key)}` gave {size} bytes of {file.size}", "it is tried again")
    return sha256.hexdigest(), md5.hexdigest()


def _digests(path: Path, progress: Progress) -> tuple[str, str]:
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(8 << 20):
            sha256.update(piece)
            md5.update(piece)
            progress.add(len(piece), path.name)
    return sha256.hexdigest(), md5.hexdigest()


def _described(path: Path, file: Stat, sha256: str) -> dict[str, Any]:
    return {"bytes": file.size, "etag": file.etag, "sha256": sha256, "mtime_ns": path.stat().st_mtime_ns}


def _intact(whole: Path) -> bool:
    """Whether a directory still holds what was fetched: sizes and times, and the bytes of a file whose time differs."""
    try:
        files = json.loads((whole / RECORD).read_text("utf-8"))["files"]
    except (OSError, ValueError, KeyError):
        return False
    for name, told in files.items():
        path = whole / name
        if not path.is_file() or path.stat().st_size != told["bytes"]:
            return False
        if path.stat().st_mtime_ns != told["mtime_ns"]:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != told["sha256"]:
                    path.unlink()  # the rest is kept
                    return False
    return True


def _forget_lost_writes(partial: Path) -> None:
    """After a crash of the machine an unsynced file may have holes: what another boot began is begun again."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    mark = partial / ".boot"
    if mark.is_file() and mark.read_text() != boot:
        for path in partial.glob("*.part"):
            path.unlink()
    mark.write_text(boot)


# ---- what both share


class Progress:
    """Says how far it is, every few seconds."""

    def __init__(self, tell: Tell, total: int) -> None:
        self.tell, self.total, self.done, self.file = tell, total, 0, ""
        self.started = self.said = time.monotonic()

    def add(self, size: int, name: str) -> None:
        self.done += size
        self.file = name
        if time.monotonic() - self.said >= SAID_S:
            self.say()

    def say(self) -> None:
        self.said = time.monotonic()
        rate = self.done / max(1e-3, self.said - self.started)
        line = {"event": "fetch", "file": self.file, "bytes": self.done, "total_bytes": self.total}
        self.tell({**line, "bytes_per_s": round(rate)})


def note(tell: Tell, text: str) -> None:
    tell({"event": "note", "message": text})


@contextlib.contextmanager
def _locked(path: Path, waits: Callable[[], None]) -> Iterator[None]:
    """One process of this volume at a time; where the file system has no locks, whoever is last wins."""
    with path.open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
