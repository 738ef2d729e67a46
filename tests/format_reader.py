"""A reader of tokenizer/FORMAT.md in the standard library alone: nothing of ours, no Arrow. Follows the document."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def field(meta: bytes, table: int, number: int) -> int:
    """Where field `number` of a FlatBuffers table lies, 0 if it is absent."""
    vtable = table - struct.unpack_from("<i", meta, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", meta, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", meta, vtable + 4 + 2 * number)[0]
    return table + offset if offset else 0


def follow(meta: bytes, at: int) -> int:
    return at + struct.unpack_from("<I", meta, at)[0]


def record_batches(data: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Rows and the 16 buffers of every record batch."""
    at = 0
    while True:
        mark, size = struct.unpack_from("<Ii", data, at)
        assert mark == 0xFFFFFFFF
        if size == 0:
            assert at + 8 == len(data)
            return
        meta = data[at + 8 : at + 8 + size]
        root = follow(meta, 0)
        kind = meta[field(meta, root, 1)]
        length_at = field(meta, root, 3)
        body = at + 8 + size
        at = body + (struct.unpack_from("<q", meta, length_at)[0] if length_at else 0)
        if kind == 3:
            batch = follow(meta, field(meta, root, 2))
            rows_at, vector = field(meta, batch, 0), follow(meta, field(meta, batch, 2))
            count = struct.unpack_from("<I", meta, vector)[0]
            pairs = [struct.unpack_from("<qq", meta, vector + 4 + 16 * i) for i in range(count)]
            rows = struct.unpack_from("<q", meta, rows_at)[0] if rows_at else 0
            yield rows, [data[body + start : body + start + length] for start, length in pairs]


def read(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """All rows of a dataset, and its content_sha256 computed anew."""
    found: list[dict[str, Any]] = []
    shards = b""
    for shard in json.loads((folder / "dataset.json").read_bytes())["shards"]:
        digests = b""
        for rows, b in record_batches((folder / shard["name"]).read_bytes()):
            digest = hashlib.sha256(struct.pack("<q", rows))
            columns = []
            for first, form, width in ((0, "i", 4), (4, "b", 1), (8, "", 1), (11, "", 1)):
                ends = struct.unpack_from(f"<{rows + 1}i", b[first + 1])
                lengths = [y - x for x, y in itertools.pairwise(ends)]
                values = b[first + (3 if form else 2)][: ends[-1] * width]
                digest.update(struct.pack(f"<{rows}q", *lengths) + values)
                cells = [values[x * width : y * width] for x, y in itertools.pairwise(ends)]
                columns.append([struct.unpack(f"<{len(c) // width}{form}", c) if form else c.decode() for c in cells])
            digest.update(b[15][: 4 * rows])
            columns.append(struct.unpack_from(f"<{rows}i", b[15]))
            names = ("input_ids", "loss_mask", "id", "source_id", "n_loss")
            found += [dict(zip(names, row, strict=False)) for row in zip(*columns, strict=False)]
            digests += digest.digest()
        assert hashlib.sha256(digests).hexdigest() == shard["content_sha256"]
        shards += hashlib.sha256(digests).digest()
    return found, hashlib.sha256(shards).hexdigest()
