"""A dataset as local files that can be mapped into memory: where it is, or in a cache of limited size.

A shard is cached under its sha256 and only gets that name once its bytes have hashed to it, so a torn download, a
changed object or two trainers at once cannot leave a wrong file behind. Every start hashes all shards anew (1.5 GB/s),
so a file that went bad on the disk is fetched again, or refused where it is the only one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizer.job import CONTRACT, DATASET, PLAN, REFUSED, Exit, JobError
from tokenizer.store import NotFound, Store, open_store, parse_uri

CACHE_ENV, LIMIT_ENV = "DFLASH_DATA_CACHE", "DFLASH_DATA_CACHE_BYTES"
CLOCK = 2_000_000_000  # nanoseconds by which the time of a file may lie behind the clock
RESERVE = 256 << 20  # bytes of the disk that the cache leaves free where no limit is given


def read_record(store: Store, allow_degenerate: bool) -> dict[str, Any]:
    """dataset.json of a complete dataset. Raises JobError: 65 incomplete, refused or degenerate, 78 another version."""
    try:
        record = json.loads(store.get_bytes(DATASET))
    except NotFound:
        raise _incomplete(store) from None
    except ValueError:
        record = None
    if not isinstance(record, dict) or "shards" not in record:
        raise JobError(Exit.DATA, f"`{store.uri(DATASET)}` is no dataset record", "tokenize again into another OUT")
    if record.get("contract") != CONTRACT:
        raise JobError(
            Exit.CONFIG,
            f"`{store.uri(DATASET)}` is of contract version {record.get('contract')}, not {CONTRACT}",
            "use a tokenizer and a trainer of the same release",
        )
    if record["degenerate"] and not allow_degenerate:
        raise JobError(
            Exit.DATA,
            f"dataset `{store.root}` is degenerate: {'; '.join(record['reasons'])}",
            f"look at `dflashctl inspect {store.root}`; --allow-degenerate trains on it all the same",
        )
    return record


def _incomplete(store: Store) -> JobError:
    try:
        reasons = json.loads(store.get_bytes(REFUSED))["reasons"]
    except (NotFound, ValueError, KeyError):
        if store.stat(PLAN) is None:
            return JobError(Exit.DATA, f"`{store.root}` holds no dataset", "name the OUT of a `dflashctl tokenize`")
        return JobError(
            Exit.DATA, f"dataset `{store.root}` is not complete: it has no {DATASET}", "run `dflashctl resume` first"
        )
    return JobError(
        Exit.DATA,
        f"dataset `{store.root}` was refused: {'; '.join(reasons)}",
        f"look at `dflashctl inspect {store.root}`",
    )


def local_shards(dataset: str, record: Mapping[str, Any], say: Callable[[str], None]) -> list[Path]:
    """The dataset's shards as local files, in order; from S3 through the cache. Raises JobError 65, 73."""
    uri, shards = parse_uri(dataset), record["shards"]
    folder = Path(uri.path)
    if uri.scheme == "s3":
        return cached(open_store(dataset), shards, *_cache(), say)
    paths = [folder / shard["name"] for shard in shards]
    for path, shard in zip(paths, shards, strict=True):
        size = path.stat().st_size if path.is_file() else None
        if size != shard["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes"
            raise JobError(Exit.DATA, f"shard `{path}` {found}, {DATASET} says {shard['bytes']}", "tokenize again")
        if _sha256(path) != shard["sha256"]:
            raise JobError(
                Exit.DATA,
                f"shard `{path}` has other bytes than those of {DATASET}",
                "the file was changed; restore it or tokenize again into another OUT",
            )
    return paths


def stamped(paths: Sequence[Path], record: Mapping[str, Any], since: int) -> tuple[dict[str, Any], ...]:
    """What each shard is by its size and time, for `check_unchanged`, and by its hash, which was checked since `since`.

    since: nanoseconds of the epoch. A file that is newer may have been changed right after its bytes were read: it has
    no stamp, so the first look hashes it again. Files of the cache bear the name of their hash and are never changed.
    """
    found = []
    for path, shard in zip(paths, record["shards"], strict=True):
        stamp = _stamp(path)
        sure = stamp[1] < since - CLOCK or path.stem == shard["sha256"]
        found.append({"path": str(path), "stamp": stamp if sure else None, "sha256": shard["sha256"]})
    return tuple(found)


def check_unchanged(shards: Sequence[dict[str, Any]]) -> None:
    """Raises JobError(65) naming a shard whose bytes changed since they were checked: rows are read in place.

    A file that was touched is hashed again, and its new stamp is kept in `shards`. One that is gone is still mapped.
    """
    for shard in shards:
        path = Path(shard["path"])
        try:
            now = _stamp(path)
            if now == shard["stamp"]:
                continue
            if _sha256(path) == shard["sha256"]:
                shard["stamp"] = now
                continue
        except FileNotFoundError:
            continue
        raise changed(path)


def changed(path: Path) -> JobError:
    """Exit 65 for a shard whose bytes are not those that were checked."""
    return JobError(
        Exit.DATA,
        f"shard `{path}` was changed while it was trained on: what came after the last checkpoint is not saved",
        "restore the file; the same command goes on from the last checkpoint",
    )


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cache() -> tuple[Path, int]:
    """Folder of the cache and how many bytes it may hold."""
    scratch = os.environ.get("DFLASH_SCRATCH", tempfile.gettempdir())
    folder = Path(os.environ.get(CACHE_ENV) or Path(scratch) / "datasets")
    folder.mkdir(parents=True, exist_ok=True)
    told = os.environ.get(LIMIT_ENV)
    held = sum(entry.stat().st_size for entry in folder.iterdir() if entry.is_file())
    return folder, int(told) if told else held + max(0, shutil.disk_usage(folder).free - RESERVE)


def cached(
    store: Store, shards: Sequence[Mapping[str, Any]], folder: Path, limit: int, say: Callable[[str], None]
) -> list[Path]:
    """Shards of `store` as files of `folder`, downloaded where absent, hashes checked; others make room, oldest first.

    Raises JobError: 65 a shard whose bytes are not those of the record, 73 they do not fit into `limit` bytes.
    """
    wanted = {shard["sha256"]: shard for shard in shards}
    total = sum(shard["bytes"] for shard in wanted.values())
    if total > limit:
        raise JobError(
            Exit.DISK_FULL,
            f"dataset `{store.root}` has {total} bytes, the cache `{folder}` may hold {limit}",
            f"give the pod a larger data volume, or raise {LIMIT_ENV}",
        )
    others = [entry for entry in folder.iterdir() if entry.is_file() and entry.stem not in wanted]
    others.sort(key=lambda entry: entry.stat().st_mtime)
    held = sum(entry.stat().st_size for entry in others)
    for entry in others:
        if held + total <= limit:
            break
        held -= entry.stat().st_size
        entry.unlink()
    paths = []
    for number, shard in enumerate(shards):
        path = folder / f"{shard['sha256']}.arrow"
        if path.is_file() and path.stat().st_size == shard["bytes"] and _sha256(path) == shard["sha256"]:
            os.utime(path)
        else:
            _download(store, shard, path)
            say(f"cached shard {number + 1} of {len(shards)}: {shard['name']}, {shard['bytes']} bytes")
        paths.append(path)
    return paths


def _download(store: Store, shard: Mapping[str, Any], path: Path) -> None:
    digest, size = hashlib.sha256(), 0
    descriptor, name = tempfile.mkstemp(prefix=".shard.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for piece in store.open_stream(shard["name"]):
                digest.update(piece)
                size += len(piece)
                file.write(piece)
        if digest.hexdigest() != shard["sha256"]:
            raise JobError(
                Exit.DATA,
                f"shard `{store.uri(shard['name'])}` has {size} bytes that are not those of {DATASET}",
                "the object was changed or cut; restore it or tokenize again into another OUT",
            )
        os.rename(name, path)
    except OSError as error:
        raise JobError(Exit.DISK_FULL, f"cache `{path.parent}`: {error.strerror}", "free space") from error
    finally:
        if os.path.exists(name):
            os.unlink(name)
