"""From a dataset to micro-batches: every row once an epoch, in an order of its own, and nothing wrong gets in."""

import json

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from train_fixtures import VOCAB, open_dataset, random_rows, write_dataset

from tokenizer.job import JobError
from tokenizer.shard import END_OF_STREAM, SCHEMA, START
from tokenizer.store import open_store
from trainer.cache import cached, local_shards, read_record
from trainer.data import PAD, Dataset, Index, Schedule, held_out_lines, load, mix
from trainer.loss import eligible

ROWS = random_rows(100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "set", ROWS)


def plan(index, **changes):
    return Schedule(index, **{"seed": 0, "batch_rows": 4, "accumulate": 3, "epochs": 2, **changes})


def record(folder):
    return json.loads((folder / "dataset.json").read_text())


def test_rows_are_read_as_they_are_and_cut_like_the_tokenizer_cuts(folder):
    dataset, index = open_dataset(folder, max_length=30)
    for number, (ids, mask) in enumerate(ROWS):
        found, marks, name = dataset.read(int(index.batch[number]), int(index.row[number]))
        assert (found.tolist(), marks.tolist(), name) == (ids[:30], mask[:30], f"a.jsonl:{number + 1}#0")
    long = [mask for ids, mask in ROWS if len(ids) > 30]
    assert index.counts["cut_rows"] == len(long)
    assert index.counts["cut_loss_tokens"] == sum(sum(mask[30:]) for mask in long)
    assert index.length.tolist() == [min(30, len(ids)) for ids, _ in ROWS]
    places = [int(eligible(torch.tensor([mask[:30]])).sum()) for _, mask in ROWS]
    assert index.places.tolist() == places
    assert index.counts["no_anchor"] == places.count(0) == 3


def test_row_numbers_are_those_of_load_from_disk(folder):
    """What metrics.jsonl says was trained can be looked up by anybody."""
    theirs, (dataset, index) = datasets.load_from_disk(str(folder)), open_dataset(folder, max_length=60)
    assert len(theirs) == len(index.length)
    for number, row in enumerate(theirs):
        ids, mask, name = dataset.read(int(index.batch[number]), int(index.row[number]))
        assert (ids.tolist(), mask.tolist(), name) == (row["input_ids"], row["loss_mask"], row["id"])


def test_an_epoch_has_every_row_once_and_no_two_the_same_order(folder):
    _, index = open_dataset(folder)
    found = plan(index)
    epochs = [[], []]
    for step in range(found.total):
        for item in found.step(step):
            epochs[item.epoch].append(item.rows)
    for micros in epochs:
        assert sorted(row for rows in micros for row in rows) == index.trained.tolist()
    assert epochs[0] != epochs[1]
    numbers = [item.number for step in range(found.total) for item in found.step(step)]
    assert numbers == list(range(2 * found.micros_per_epoch))
    other = plan(index, seed=1)
    assert [i.rows for i in other.step(0)] != [i.rows for i in found.step(0)]
    again = plan(index)  # a later process, at any step
    assert again.step(5) == found.step(5)


def test_length_buckets_keep_padding_small_and_steps_mixed():
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(7, 0.8, 8192), 20, 3072).astype(np.int32)
    zero = np.zeros(len(lengths), np.int32)
    index = Index(zero, zero, lengths, zero + 5, zero > 0)
    found = plan(index, accumulate=12, epochs=1)
    items = [item for step in range(found.total) for item in found.step(step)]
    padded = sum(len(item.rows) * item.width for item in items)
    assert lengths.sum() / padded > 0.97
    assert all(item.width % PAD == 0 and item.width >= lengths[list(item.rows)].max() for item in items)
    means = [np.mean([item.width for item in found.step(step)]) for step in range(found.total)]
    assert np.std(means) < np.std([item.width for item in items]) / 2
    assert found.widest == max(item.width for item in items)


def test_all_turns_of_a_line_are_held_out_together(folder):
    ids = [f"b/c#d.jsonl:{line}#{turn}" for line in range(2000) for turn in range(3)]
    held = held_out_lines(ids, 0.1).reshape(2000, 3)
    assert (held.all(1) == held.any(1)).all() and 0.07 < held.mean() < 0.13
    assert not held_out_lines(ids, 0.0).any()
    _, index = open_dataset(folder, held_out=0.2)
    found = plan(index)
    measured = [row for item in found.held_out for row in item.rows]
    assert measured and set(measured) == set(np.flatnonzero(index.held & (index.places > 0)))
    assert not set(measured) & set(index.trained)


def test_padding_is_zero_on_the_right(folder):
    dataset, index = open_dataset(folder)
    item = plan(index).step(0)[0]
    batch = load(dataset, index, item)
    assert batch.ids.shape == batch.mask.shape == (len(item.rows), item.width)
    for place, row in enumerate(item.rows):
        ids, mask = ROWS[row]
        length = min(48, len(ids))
        assert batch.ids[place].tolist() == ids[:length] + [0] * (item.width - length)
        assert batch.mask[place].tolist() == mask[:length] + [0] * (item.width - length)
        assert batch.names[place] == f"a.jsonl:{row + 1}#0"


def test_the_order_is_a_fixed_function():
    assert mix(0, 0, np.arange(2)).tolist() != mix(0, 1, np.arange(2)).tolist()
    index = np.arange(1000)
    first = np.argsort(mix(0, 0, index), kind="stable")[:5].tolist()
    assert first == FIRST


FIRST = [713, 27, 844, 653, 496]


def batch_with(column, values, rows=2):
    arrays = {
        "input_ids": pa.array([[1, 2, 3]] * rows, pa.list_(pa.int32())),
        "loss_mask": pa.array([[0, 1, 1]] * rows, pa.list_(pa.int8())),
        "id": pa.array([f"a:{row}#0" for row in range(rows)]),
        "source_id": pa.array([""] * rows),
        "n_loss": pa.array([2] * rows, pa.int32()),
    }
    arrays[column] = pa.array(values, SCHEMA.field(column).type)
    return pa.RecordBatch.from_arrays([arrays[name] for name in SCHEMA.names], schema=SCHEMA)


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("loss_mask", [[0, 1, 1], [0, 1]], "row `a:1#0`: 3 tokens, but a loss mask of 2"),
        ("loss_mask", [[0, 1, 1], [0, 2, 0]], "row `a:1#0`: loss mask holds 2"),
        ("input_ids", [[1, 2, 3], [1, 2, VOCAB]], f"row `a:1#0`: token id {VOCAB} is none of the target's {VOCAB}"),
        ("input_ids", [[1, -1, 3], [1, 2, 3]], "row `a:0#0`: token id -1"),
        ("n_loss", [2, 3], "row `a:1#0`: 2 loss tokens, n_loss says 3"),
        ("n_loss", [2, None], "column `n_loss` holds nulls"),
    ],
)
def test_a_row_that_does_not_fit_is_named(tmp_path, column, values, words):
    path = tmp_path / "shard.arrow"
    path.write_bytes(START + batch_with(column, values).serialize().to_pybytes() + END_OF_STREAM)
    with pytest.raises(JobError) as caught:
        Dataset([path], 48).index({"shards": [{"rows": 2}]}, VOCAB, 0.0)
    assert caught.value.code == 65 and words in caught.value.message and str(path) in caught.value.message


def test_files_that_are_no_shards_are_named(tmp_path, folder):
    other = tmp_path / "other.arrow"
    wide = pa.schema([pa.field(f.name, pa.int64() if f.name == "n_loss" else f.type) for f in SCHEMA])
    with pa.OSFile(str(other), "wb") as sink, pa.ipc.new_stream(sink, wide) as stream:
        stream.write_batch(pa.RecordBatch.from_pylist([], schema=wide))
    cut = tmp_path / "cut.arrow"
    whole = (folder / record(folder)["shards"][0]["name"]).read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    for path, words in ((other, "column `n_loss` is int64, not int32"), (cut, "cannot be read")):
        with pytest.raises(JobError) as caught:
            Dataset([path], 48)
        assert caught.value.code == 65 and words in caught.value.message and str(path) in caught.value.message


def test_shards_and_record_must_agree(folder, tmp_path):
    store = open_store(str(folder))
    assert len(local_shards(str(folder), read_record(store, False), print)) == 2
    wrong = record(folder)
    wrong["shards"][0]["sha256"] = "0" * 64
    with pytest.raises(JobError, match="has other bytes than those of"):
        local_shards(str(folder), wrong, print)
    wrong = record(folder)
    wrong["shards"][1]["bytes"] += 1
    with pytest.raises(JobError, match=r"dataset\.json says"):
        local_shards(str(folder), wrong, print)
    wrong["shards"][1]["rows"] += 1
    with pytest.raises(JobError, match="its record"):
        Dataset([folder / shard["name"] for shard in wrong["shards"]], 48).index(wrong, VOCAB, 0.0)


def test_rows_that_cannot_be_trained_are_said(tmp_path):
    rows = [([1, 2, 3, 4], [0, 1, 0, 1]), ([1, 2, 3, 4], [0, 0, 0, 1])]
    with pytest.raises(JobError, match="none of 2 rows can be trained: 2 have no place for an anchor"):
        open_dataset(write_dataset(tmp_path / "set", rows, shards=1))


@pytest.mark.s3
def test_s3_shards_are_cached_checked_and_limited(folder, tmp_path, s3):
    store, shards = open_store(f"{s3}/set"), record(folder)["shards"]
    for shard in shards:
        store.upload_file(folder / shard["name"], shard["name"])
    total, cache = sum(shard["bytes"] for shard in shards), tmp_path / "cache"
    cache.mkdir()
    (cache / "other.arrow").write_bytes(b"x" * 100)
    said = []
    paths = cached(store, shards, cache, total + 100, said.append)
    assert len(said) == 2 and (cache / "other.arrow").exists()
    assert [path.read_bytes() for path in paths] == [(folder / s["name"]).read_bytes() for s in shards]
    assert cached(store, shards, cache, total + 50, said.append) == paths
    assert len(said) == 2 and not (cache / "other.arrow").exists()  # nothing was fetched, and room was made
    with pytest.raises(JobError) as caught:
        cached(store, shards, cache, total - 1, said.append)
    assert caught.value.code == 73 and str(total) in caught.value.message
    paths[0].write_bytes(b"z" * shards[0]["bytes"])  # went bad on the disk
    assert cached(store, shards, cache, total, said.append) == paths
    assert len(said) == 3 and paths[0].read_bytes() == (folder / shards[0]["name"]).read_bytes()
    paths[0].unlink()
    store.put_bytes(shards[0]["name"], b"y" * shards[0]["bytes"])
    with pytest.raises(JobError) as caught:
        cached(store, shards, cache, total, said.append)
    assert caught.value.code == 65 and shards[0]["name"] in caught.value.message
    assert not list(cache.glob(".shard*")) and not paths[0].exists()
