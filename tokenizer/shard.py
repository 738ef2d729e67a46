"""The shard: one index's rows as an Arrow IPC stream whose bytes depend on the rows alone. Prose: FORMAT.md.

Workers write whole record-batch messages; `join` puts them behind one schema message as they are. So neither the
number of workers nor who finished first can be seen in a shard, and nothing is ever decoded twice or combined.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokenizer.closing import Closed, close, missing_commits, read_commit, read_runs
from tokenizer.gate import Commit, Final, Supervised, check_keys, features, finalise, summary

__all__ = [
    "SCHEMA",
    "START",
    "Closed",
    "Commit",
    "Final",
    "Rows",
    "Supervised",
    "batch_digest",
    "batches",
    "check_keys",
    "close",
    "content_sha256",
    "cut",
    "finalise",
    "join",
    "list_column",
    "loss_per_row",
    "missing_commits",
    "read_commit",
    "read_runs",
    "record_batch",
    "select",
    "summary",
]

SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.int8())),
        pa.field("id", pa.string()),
        pa.field("source_id", pa.string()),
        pa.field("n_loss", pa.int32()),
    ],
    metadata={"huggingface": json.dumps({"info": {"features": features()}}, sort_keys=True)},
)
START = SCHEMA.serialize().to_pybytes()  # the schema message: the first bytes of every shard
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
COPY = 1 << 20  # bytes
MAX_TOKENS = (1 << 31) - 1  # of one record batch: list offsets are int32


class Rows(NamedTuple):
    """Some rows, flat. Row i is ids[offsets[i]:offsets[i + 1]], and the same slice of mask.

    ids: int32 [tokens]; offsets: int64 [rows + 1], offsets[0] == 0; mask: int8 [tokens], 1 = to be learnt.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    mask: NDArray[np.int8]


def loss_per_row(rows: Rows) -> NDArray[np.int32]:
    """Loss tokens of each row, int32 [rows]."""
    lengths = np.diff(rows.offsets)
    loss = np.zeros(len(lengths), np.int32)
    full = lengths > 0  # reduceat takes an empty slice for one element
    loss[full] = np.add.reduceat(rows.mask, rows.offsets[:-1][full], dtype=np.int32) if full.any() else 0
    return loss


def cut(rows: Rows, max_length: int | None) -> Rows:
    """Every row's first `max_length` tokens: what is over is lost at the end, ids and mask alike.

    The one place where a row is shortened, for the tokenizer and for the trainer. A cut row ends without its
    end-of-turn token, so nothing teaches the drafter to stop there.
    """
    lengths = np.diff(rows.offsets)
    if max_length is None or not len(lengths) or lengths.max() <= max_length:
        return rows
    place = np.arange(len(rows.ids)) - np.repeat(rows.offsets[:-1], lengths)
    keep = place < max_length
    return Rows(rows.ids[keep], _offsets(np.minimum(lengths, max_length)), rows.mask[keep])


def select(rows: Rows, keep: NDArray[np.bool_]) -> Rows:
    """The rows whose entry in keep [rows] is true."""
    if keep.all():
        return rows
    lengths = np.diff(rows.offsets)
    tokens = np.repeat(keep, lengths)
    return Rows(rows.ids[tokens], _offsets(lengths[keep]), rows.mask[tokens])


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def record_batch(
    rows: Rows, ids: Sequence[str], source_ids: Sequence[str], n_loss: NDArray[np.int32]
) -> pa.RecordBatch:
    """One record batch of SCHEMA over the buffers of `rows`; OverflowError above MAX_TOKENS tokens.

    Built from buffers: the converting constructors of pyarrow import pandas wherever it is installed (0.3 s).
    """
    if len(rows.ids) > MAX_TOKENS:
        raise OverflowError(f"{len(rows.ids)} tokens in one record batch, {MAX_TOKENS} fit")
    offsets = pa.py_buffer(rows.offsets.astype("<i4"))
    columns = [
        _lists(pa.int32(), offsets, rows.ids, len(n_loss)),
        _lists(pa.int8(), offsets, rows.mask, len(n_loss)),
        _strings(ids),
        _strings(source_ids),
        pa.Array.from_buffers(pa.int32(), len(n_loss), [None, pa.py_buffer(n_loss)]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _lists(kind: pa.DataType, offsets: pa.Buffer, values: NDArray[Any], rows: int) -> pa.Array:
    child = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])
    return pa.Array.from_buffers(pa.list_(kind), rows, [None, offsets], children=[child])


def _strings(texts: Sequence[str]) -> pa.Array:
    data = [text.encode() for text in texts]
    offsets = np.zeros(len(data) + 1, "<i4")
    np.cumsum([len(d) for d in data], out=offsets[1:])
    return pa.Array.from_buffers(pa.string(), len(data), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(data))])


def list_column(column: pa.Array, dtype: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Values [tokens] and offsets [rows + 1] (offsets[0] == 0) of a list column, as views where they can be."""
    offsets = _view(column.buffers()[1], "<i4")[column.offset : column.offset + len(column) + 1]
    if not len(column):
        return np.zeros(0, dtype), np.zeros(1, np.int32)
    return _view(column.buffers()[3], dtype)[offsets[0] : offsets[-1]], offsets - offsets[0]


def _view(buffer: pa.Buffer | None, dtype: str) -> NDArray[Any]:
    return np.frombuffer(buffer, dtype) if buffer is not None and buffer.size else np.zeros(0, dtype)


def batch_digest(batch: pa.RecordBatch) -> bytes:
    """SHA-256 of a record batch's logical columns, as FORMAT.md lays them out: no padding, no library in it."""
    digest = hashlib.sha256(np.array([batch.num_rows], "<i8").data)
    for name, dtype in (("input_ids", "<i4"), ("loss_mask", "<i1")):
        values, offsets = list_column(batch.column(name), dtype)
        digest.update(np.diff(offsets).astype("<i8").data)
        digest.update(np.ascontiguousarray(values).data)
    for name in ("id", "source_id"):
        texts = [text.encode() for text in batch.column(name).to_pylist()]
        digest.update(np.array([len(t) for t in texts], "<i8").data)
        digest.update(b"".join(texts))
    n_loss = batch.column("n_loss")
    digest.update(_view(n_loss.buffers()[1], "<i4")[n_loss.offset : n_loss.offset + len(n_loss)].data)
    return digest.digest()


def content_sha256(digests: Iterable[bytes]) -> str:
    """SHA-256 (hex) of the record batches' digests in order."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def join(parts: Sequence[Path], shard: Path) -> tuple[str, int]:
    """A shard from `parts` in order: the first begins with `START`, all hold record-batch messages; none is left.

    The first becomes the shard and the others are appended, so an index of one object is never copied. Returns
    SHA-256 (hex) and bytes of the shard.
    """
    if parts:
        parts[0].replace(shard)
    else:
        shard.write_bytes(START)
    with shard.open("ab") as out:
        for part in parts[1:]:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out, COPY)
            part.unlink()
        out.write(END_OF_STREAM)
    with shard.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), shard.stat().st_size


def batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The record batches of a local shard, memory-mapped: columns point into the file."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
        yield from stream
