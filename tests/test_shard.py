"""Rows to bytes and back: schema, cut, record batches, the hash of the content, FORMAT.md as another reader sees it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import datasets
import format_reader
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_fixtures import run_all, write_corpus

from tokenizer import shard, tally
from tokenizer.gate import dataset_info, state
from tokenizer.job import canonical
from tokenizer.shard import Rows, batch_digest, batches, content_sha256, cut, join, loss_per_row, record_batch, select

ROOT = Path(__file__).resolve().parent.parent
one_row = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 1)), max_size=12)


def rows_of(found: list[list[tuple[int, int]]]) -> Rows:
    flat = [pair for row in found for pair in row]
    offsets = np.zeros(len(found) + 1, np.int64)
    np.cumsum([len(row) for row in found], out=offsets[1:])
    return Rows(np.array([i for i, _ in flat], np.int32), offsets, np.array([m for _, m in flat], np.int8))


def as_lists(rows: Rows) -> list[list[tuple[int, int]]]:
    pairs = list(zip(rows.ids.tolist(), rows.mask.tolist(), strict=True))
    return [pairs[a:b] for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)]


def batch_of(found: list[list[tuple[int, int]]], start: int = 0) -> pa.RecordBatch:
    rows = rows_of(found)
    ids = [f"pärt.jsonl:{i}#0" for i in range(start, start + len(found))]
    return record_batch(rows, ids, ["" if i % 2 else f"src-{i}" for i in range(len(found))], loss_per_row(rows))


@given(st.lists(one_row, max_size=8), st.integers(1, 14))
def test_cut_keeps_the_first_tokens_of_each_row(found: list[list[tuple[int, int]]], limit: int) -> None:
    rows = rows_of(found)
    assert as_lists(cut(rows, limit)) == [row[:limit] for row in found]
    assert cut(rows, None) is rows
    assert loss_per_row(cut(rows, limit)).tolist() == [sum(m for _, m in row[:limit]) for row in found]


@given(st.lists(st.tuples(one_row, st.booleans()), max_size=8))
def test_select_keeps_whole_rows(found: list[tuple[list[tuple[int, int]], bool]]) -> None:
    rows = rows_of([row for row, _ in found])
    kept = select(rows, np.array([keep for _, keep in found], bool))
    assert as_lists(kept) == [row for row, keep in found if keep]


@given(st.lists(one_row, min_size=1, max_size=8))
def test_a_record_batch_holds_what_it_was_given(found: list[list[tuple[int, int]]]) -> None:
    batch = batch_of(found)
    batch.validate(full=True)
    assert batch.schema == shard.SCHEMA
    assert [list(zip(r["input_ids"], r["loss_mask"], strict=True)) for r in batch.to_pylist()] == found
    assert batch.column("n_loss").to_pylist() == [sum(m for _, m in row) for row in found]
    assert all(column.null_count == 0 for column in batch.columns)


@given(st.lists(one_row, min_size=1, max_size=8))
def test_the_digest_sees_every_value_and_no_layout(found: list[list[tuple[int, int]]]) -> None:
    batch = batch_of(found)
    padded = pa.RecordBatch.from_arrays(
        [pa.concat_arrays([c.slice(0, 1), c])[1:] for c in batch.columns], schema=shard.SCHEMA
    )
    assert batch_digest(padded) == batch_digest(batch)  # the same rows at an offset in longer buffers
    other = [[*found[0], (7, 1)], *found[1:]]
    assert batch_digest(batch_of(other)) != batch_digest(batch)
    assert batch_digest(batch_of(found, start=5)) != batch_digest(batch)


def test_schema_is_fixed_to_the_type() -> None:
    kinds = {f.name: str(f.type) for f in shard.SCHEMA}
    assert kinds == {
        "input_ids": "list<item: int32>",
        "loss_mask": "list<item: int8>",
        "id": "string",
        "source_id": "string",
        "n_loss": "int32",
    }


def write_dataset(folder: Path, shards: list[list[pa.RecordBatch]]) -> list[str]:
    """Shards and closing files as a run writes them; the shards' hashes."""
    folder.mkdir()
    names, digests, listed = [], [], []
    for number, found in enumerate(shards):
        parts = []
        for place, batch in enumerate(found):  # every batch from a worker of its own
            part = folder / f"{place}.part"
            part.write_bytes((shard.START if place == 0 else b"") + batch.serialize().to_pybytes())
            parts.append(part)
        names.append(f"data-{number:05d}-of-{len(shards):05d}.arrow")
        join(parts, folder / names[-1])
        digests.append(content_sha256(map(batch_digest, found)))
        listed.append({"name": names[-1], "content_sha256": digests[-1]})
    (folder / "dataset.json").write_bytes(canonical({"shards": listed}))
    (folder / "dataset_info.json").write_bytes(canonical(dataset_info()))
    (folder / "state.json").write_bytes(canonical(state(names, content_sha256(map(bytes.fromhex, digests)))))
    return digests


def test_another_reader_and_datasets_see_the_same_rows(tmp_path: Path) -> None:
    found = [[(i * 100 + j, j % 2) for j in range(i % 7 + 1)] for i in range(40)]
    first, second, third = batch_of(found[:13]), batch_of(found[13:14], 13), batch_of(found[14:], 14)
    digests = write_dataset(tmp_path / "d", [[first, second], [], [third]])  # one shard without rows
    rows, content = format_reader.read(tmp_path / "d")
    assert [list(zip(r["input_ids"], r["loss_mask"], strict=True)) for r in rows] == found
    assert content == content_sha256(map(bytes.fromhex, digests))
    loaded = datasets.load_from_disk(str(tmp_path / "d"))
    assert [(tuple(r["input_ids"]), r["id"], r["source_id"], r["n_loss"]) for r in loaded] == [
        (r["input_ids"], r["id"], r["source_id"], r["n_loss"]) for r in rows
    ]
    assert loaded.features == datasets.Features.from_arrow_schema(shard.SCHEMA)
    names = json.loads((tmp_path / "d" / "dataset.json").read_bytes())["shards"]
    read = [content_sha256(map(batch_digest, batches(tmp_path / "d" / s["name"]))) for s in names]
    assert read == digests


def test_many_batches_are_never_combined(tmp_path: Path) -> None:
    """What would overflow an offset when concatenated stays many record batches, in order and complete."""
    many = [batch_of([[(n, 1)] * 3], n) for n in range(500)]
    write_dataset(tmp_path / "d", [many])
    read = list(batches(tmp_path / "d" / "data-00000-of-00001.arrow"))
    assert [b.num_rows for b in read] == [1] * 500
    assert [b.column("id")[0].as_py() for b in read] == [f"pärt.jsonl:{n}#0" for n in range(500)]


def test_more_tokens_than_an_offset_can_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "MAX_TOKENS", 5)
    batch_of([[(1, 1)] * 5])
    with pytest.raises(OverflowError):
        batch_of([[(1, 1)] * 6])


def test_writing_rows_imports_neither_pandas_nor_any_model_library() -> None:
    code = (
        "import sys, numpy as np; from tokenizer.shard import *;"
        "r = Rows(np.zeros(2, np.int32), np.array([0, 2]), np.ones(2, np.int8));"
        "b = record_batch(r, ['a'], ['b'], loss_per_row(r)); b.serialize(); batch_digest(b);"
        "print(sorted({'pandas', 'torch', 'transformers', 'datasets'} & sys.modules.keys()))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "[]"


# ---- what is counted


@given(st.lists(st.integers(0, 40), max_size=300), st.integers(1, 5), st.integers(1, 40))
def test_repeated_texts_are_counted_exactly(texts: list[int], files: int, percent: int) -> None:
    import tempfile

    hashes = [tally.text_hash([str(t)]) for t in texts]
    with tempfile.TemporaryDirectory() as folder:
        spools = [Path(folder) / str(n) for n in range(files)]
        for n, spool in enumerate(spools):
            spool.write_bytes(b"".join(hashes[n::files]))
        found = tally.repeated(spools, len(texts), percent / 100)
    least = max(2, int(np.ceil(percent / 100 * len(texts))))
    assert found == {h: hashes.count(h) for h in set(hashes) if hashes.count(h) >= least}


def test_a_text_in_one_percent_of_the_rows_is_always_a_candidate() -> None:
    frequent = tally.Frequent()
    for n in range(20_000):  # the worst order: it comes first, then distinct texts push
        text = "the same" if n < 200 else f"text {n}"
        frequent.add(tally.text_hash([text]), [text])
    assert "the same" in frequent.texts.values()
    assert len(frequent.texts) <= tally.CANDIDATES


def test_json_files_are_as_the_format_says(tmp_path: Path) -> None:
    """Each names its contract version, and the hash of the spec can be made again from FORMAT.md alone."""
    source = write_corpus(tmp_path / "in", 1, 30)
    _, store = run_all(str(tmp_path / "out"), str(source), tmp_path, shards=1)
    exempt = {"dataset_info.json", "state.json"}
    found = [s.key for s in store.list() if s.key.endswith(".json") and not s.key.startswith("tokenizer/")]
    assert {key.split("/")[0] for key in found} == {*exempt, "plan.json", "dataset.json", "commits", "runs", "stats"}
    for key in found:
        data = store.get_bytes(key)
        value = json.loads(data)
        assert key in exempt or value["contract"] == 1, key
        assert data == (json.dumps(value, sort_keys=True, ensure_ascii=False, indent=1) + "\n").encode(), key
    spec = json.loads(store.get_bytes("plan.json"))["spec"]
    told = (json.dumps(spec, sort_keys=True, ensure_ascii=False, indent=1) + "\n").encode()
    for key in ("commits/00000.json", "dataset.json"):
        assert json.loads(store.get_bytes(key))["spec_sha256"] == hashlib.sha256(told).hexdigest()
