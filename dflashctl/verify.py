"""Whether a complete dataset is still what was written: files may be lost or changed long after a run has succeeded.

Names and sizes cost one listing and are always compared; hashes cost a read of everything, so only those of datasets
that are read in seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflashctl.errors import PreflightError
from dflashctl.records import Out
from tokenizer.job import DATASET_INFO, STATE, TOKENIZER_DIR, rejected_name

HASHED_BYTES = 256 << 20  # of a dataset whose shards are read
REMEDY = (
    "restore it from a copy, or run `dflashctl tokenize` on the same input into another --out: the bytes are the same"
)


def damage(out: Out, record: Mapping[str, Any], hashes: bool) -> Iterator[str]:
    """What of a complete OUT is not as its dataset.json says, each in one clause that names the file.

    record: dataset.json. hashes: also read the shards, unless they are larger than HASHED_BYTES together.
    """
    there = {stat.key: stat.size for stat in out.store.list()}
    shards = record["shards"]
    names = [DATASET_INFO, STATE, *(f"{TOKENIZER_DIR}/{name}" for name in record["spec"]["tokenizer"])]
    for name in [*names, *(rejected_name(shard["index"]) for shard in shards)]:
        if name not in there:
            yield f"`{out.store.uri(name)}` is missing"
    read = hashes and sum(shard["bytes"] for shard in shards) <= HASHED_BYTES
    for shard in shards:
        name, uri = shard["name"], out.store.uri(shard["name"])
        if name not in there:
            yield f"`{uri}` is missing"
        elif there[name] != shard["bytes"]:
            yield f"`{uri}` has {there[name]} bytes, {shard['bytes']} were written"
        elif read and _sha256(out, name) != shard["sha256"]:
            yield f"`{uri}` has another content than was written"


def words(found: Sequence[str]) -> str:
    """What `damage` found, as one clause; pure."""
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return f"damaged since it was complete: {found[0]}{more}"


def refuse(out: Out, record: Mapping[str, Any]) -> None:
    """Raises PreflightError where files of a complete OUT are lost or of another size: nothing writes it again."""
    if found := list(damage(out, record, hashes=False)):
        raise PreflightError(f"`{out.uri}` is {words(found)}", REMEDY)


def _sha256(out: Out, name: str) -> str:
    digest = hashlib.sha256()
    for piece in out.store.open_stream(name):
        digest.update(piece)
    return digest.hexdigest()
