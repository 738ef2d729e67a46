"""What else this machine does to a training: a second process in its OUT, a file of the dataset changed under it."""

import hashlib
import os
import signal

import pytest
from train_fixtures import random_rows, write_dataset
from train_runs import Forked, args, metrics

from tokenizer.job import JobError
from trainer.cache import check_unchanged, stamped


def steps_of(out):
    return [m["step"] for m in metrics(out) if "loss" in m] if (out / "metrics.jsonl").exists() else []


def test_two_at_once_on_one_machine_lose_no_line(tmp_path):
    """The second would cut the first one's metrics.jsonl back to the checkpoint that it goes on from."""
    told = args(
        write_dataset(tmp_path / "data", random_rows(60)),
        tmp_path / "out",
        steps=10000,
        checkpoint_every="10",
        held_out=0.0,
    )
    first = Forked(told, tmp_path / "log")
    first.until(lambda: (tmp_path / "out" / "latest").exists())
    second = Forked(told, tmp_path / "second")
    assert second.wait() == 75, second.text()
    assert "another process of this machine trains into" in second.lines()[-1]["message"]
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait() == 143, first.text()
    steps = steps_of(tmp_path / "out")
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 10


def test_a_shard_that_is_changed_meanwhile_reaches_no_checkpoint(tmp_path):
    """Rows are read in place: what is not what was checked ends the run with the file's name, and a touch does not."""
    rows, out = random_rows(60), tmp_path / "out"
    told = args(write_dataset(tmp_path / "data", rows), out, steps=10000, checkpoint_every="4", held_out=0.0)
    run = Forked(told, tmp_path / "log")
    run.until(lambda: (out / "latest").exists())
    shard = tmp_path / "data" / "data-00001-of-00002.arrow"
    whole = shard.read_bytes()
    shard.touch()
    before = (out / "latest").read_text()
    run.until(lambda: (out / "latest").read_text() != before)
    with shard.open("r+b") as file:
        file.seek(1000)
        file.write(bytes(len(whole) - 2000))
    assert run.wait() == 65, run.text()
    assert f"`{shard}` was changed while it was trained on" in run.lines()[-1]["message"]
    shard.write_bytes(whole)
    saved = int((out / "latest").read_text().removeprefix("step-"))
    again = Forked(told, tmp_path / "again")
    again.until(lambda: f"goes on after step {saved} of" in again.text())  # metrics.jsonl still has later steps before
    os.kill(again.pid, signal.SIGTERM)
    assert again.wait() == 143, again.text()
    assert steps_of(out) == list(range(1, len(steps_of(out)) + 1))


def test_a_file_that_may_have_changed_while_it_was_hashed_is_hashed_again(tmp_path):
    shard, other = tmp_path / "data-0.arrow", tmp_path / "data-1.arrow"
    shard.write_bytes(b"rows")
    other.write_bytes(b"more")
    record = {"shards": [{"sha256": hashlib.sha256(data).hexdigest()} for data in (b"rows", b"more")]}
    young = stamped([shard, other], record, since=0)
    assert [entry["stamp"] for entry in young] == [None, None]
    check_unchanged(young)
    assert all(entry["stamp"] for entry in young)
    other.unlink()  # still mapped
    check_unchanged(young)
    stat = shard.stat()
    shard.write_bytes(b"ROWS")
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    with pytest.raises(JobError, match="was changed while it was trained on"):
        check_unchanged(young)
