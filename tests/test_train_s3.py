"""A training whose data, target and OUT are on S3: a lost machine costs the steps behind the last checkpoint, no more."""

import dataclasses
import json
import os
import signal

import pytest
from train_fixtures import random_rows, write_dataset
from train_runs import Forked, args, finish, start, target_dir, train

from tokenizer.store import open_store


@pytest.mark.s3
def test_another_machine_goes_on_where_one_was_told_to_stop(tmp_path, s3):
    data, out = write_dataset(tmp_path / "data", random_rows(60)), open_store(f"{s3}/out")
    raw = open_store(f"{s3}/data")
    for path in data.iterdir():
        raw.upload_file(path, path.name)
    models = open_store(f"{s3}/models")
    for path in target_dir().iterdir():
        models.upload_file(path, f"Tiny/{path.name}")
    told = args(f"{s3}/data", f"{s3}/out", steps=60, checkpoint_every="2", target=f"{s3}/models/Tiny")

    first = start(told, DFLASH_SCRATCH=str(tmp_path / "one"), XDG_CACHE_HOME=str(tmp_path / "cache"))
    for line in first.stdout:
        if '"event": "progress"' in line:
            break
    os.kill(first.pid, signal.SIGTERM)
    code, lines, text = finish(first)
    assert code == 143, text
    stopped = int(out.get_bytes("latest").decode().strip().removeprefix("step-"))
    assert 1 <= stopped < 60
    assert len(list((tmp_path / "one" / "datasets").glob("*.arrow"))) == 2

    # the next one saves at its end alone: of more, a loaded machine would overtake some
    told = dataclasses.replace(told, checkpoint_every="1h")
    code, lines, text = train(told, DFLASH_SCRATCH=str(tmp_path / "two"), DFLASH_MODEL_CACHE=str(tmp_path / "model"))
    assert code == 0, text
    fetched = [line for line in lines if line["event"] == "fetch"]
    assert fetched[-1]["bytes"] == fetched[-1]["total_bytes"] > 0
    [here], [there] = ((tmp_path / "cache" / "dflash" / "targets").glob("Tiny-*"), (tmp_path / "model").glob("Tiny-*"))
    assert here.name == there.name  # the same objects are the same directory, wherever it is
    verifier = json.loads(out.get_bytes("export-speculators/config.json"))["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == f"{s3}/models/Tiny"
    assert any(f"goes on after step {stopped} of 60" in str(line.get("message")) for line in lines)
    steps = [json.loads(line) for line in out.get_bytes("metrics.jsonl").splitlines()]
    assert [m["step"] for m in steps if "loss" in m] == list(range(1, 61))
    keys = {stat.key for stat in out.list()}
    assert {"export/config.json", "export/model.safetensors", "export-speculators/config.json", "run.json"} <= keys
    assert sorted({key.split("/")[1] for key in keys if key.startswith("checkpoints/")}) == [
        f"step-{stopped:06d}",
        "step-000060",
    ]
    assert json.loads(out.get_bytes("provenance.json"))["finished"] is True
    assert [path.name for path in (tmp_path / "two" / "training").glob("*/checkpoints/*")] == ["step-000060"]

    code, lines, text = train(told, DFLASH_SCRATCH=str(tmp_path / "three"), DFLASH_MODEL_CACHE=str(tmp_path / "model"))
    assert code == 0 and any(line["event"] == "unchanged" for line in lines), text
    assert any("already" in str(line.get("message")) for line in lines)


@pytest.mark.s3
def test_two_trainings_at_once_on_one_machine_keep_apart(tmp_path, s3):
    """The same data and the same room for what goes to S3: each OUT gets its own steps, events and parameters."""
    data, scratch = write_dataset(tmp_path / "data", random_rows(60)), {"DFLASH_SCRATCH": str(tmp_path / "scratch")}
    places = [f"{s3}/one", f"{s3}/two"]
    told = [args(data, place, steps=8, checkpoint_every="2", seed=seed) for seed, place in enumerate(places)]
    for run in [start(one, **scratch) for one in told]:
        code, _, text = finish(run)
        assert code == 0, text
    weights = set()
    for out in map(open_store, places):
        steps = [json.loads(line) for line in out.get_bytes("metrics.jsonl").splitlines()]
        assert [m["step"] for m in steps if "loss" in m] == list(range(1, 9))
        assert len(list(out.list("tensorboard/"))) == 1
        weights.add(out.get_bytes("export/model.safetensors"))
    assert len(weights) == 2


@pytest.mark.s3
def test_a_slow_s3_holds_up_no_step(tmp_path, s3, s3_faults, monkeypatch):
    """A checkpoint of every step, ten seconds a request: steps go on, and the last one gets there all the same."""
    monkeypatch.setenv("DFLASH_SCRATCH", str(tmp_path / "scratch"))
    out = f"{s3}/out"
    data = write_dataset(tmp_path / "data", random_rows(60))
    run = Forked(args(data, out, steps=10000, checkpoint_every="1", held_out=0.0), tmp_path / "log")
    run.until(lambda: any(line["event"] == "start" for line in run.lines()))
    s3_faults.latency = 10.0

    def steps():
        found = [*(tmp_path / "scratch").glob("training/*/metrics.jsonl")]
        return len(found[0].read_text().splitlines()) if found else 0

    def moved():
        return [r for r in s3_faults.requests if r.method == "PUT" and r.path.endswith("/out/latest")]

    run.until(lambda: steps() >= 10)
    assert any(r.method == "PUT" for r in s3_faults.requests) and not moved()  # the first is on its way
    s3_faults.latency = 0.0
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 143, run.text()
    stopped = int(open_store(out).get_bytes("latest").decode().strip().removeprefix("step-"))
    assert stopped >= 10 and len(moved()) < stopped / 2  # those between were replaced by newer ones
