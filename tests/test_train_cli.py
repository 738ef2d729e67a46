"""`dflashctl train --backend local` as real processes: refused, found from anywhere, stopped, explained, resumed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import Done, ctl
from train_fixtures import random_rows, write_dataset
from train_runs import target_dir

from tokenizer.store import open_store

SMALL = ["--layers", "1", "--block-size", "4", "--anchors", "4", "--max-length", "32", "--accumulate", "2"]
SMALL += ["--batch-rows", "2", "--held-out", "0.2"]


def train(cwd: Path, data: str, out: str, *more: str) -> Done:
    told = ["train", data, "--out", out, "--target", str(target_dir()), *SMALL, *more]
    return ctl(cwd, *told, OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "set", random_rows(40))


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a training that is complete, in ./out."""
    cwd = tmp_path_factory.mktemp("done")
    first = train(cwd, str(data), "out", "--steps", "4")
    assert first.code == 0, first.err
    assert "drafter: num_hidden_layers 1 (given)" in first.err and "started" in first.err
    return cwd


def test_the_same_again_is_unchanged_from_any_directory(done: Path, data: Path, tmp_path: Path) -> None:
    again = train(tmp_path, str(data), str(done / "out"), "--steps", "4", "-o", "json")
    assert again.code == 0 and "unchanged" in again.err, again.err
    document = again.json()
    assert (document["state"], document["training"]["step"], document["training"]["steps"]) == ("succeeded", 4, 4)
    assert not (tmp_path / ".dflash/runs").exists()


def test_another_training_of_that_out_exits_5_naming_what_differs(done: Path, data: Path, tmp_path: Path) -> None:
    other = write_dataset(tmp_path / "data", random_rows(40, seed=9))
    for dataset, more, words in (
        (data, ["--lr", "0.01"], "lr is 0.0006 there, 0.01 here"),
        (other, [], "dataset_sha256 is "),
    ):
        refused = train(done, str(dataset), "out", "--steps", "4", *more)
        assert (refused.code, words in refused.err) == (5, True), refused.err
    into = train(done, str(data), str(data), "--steps", "4")
    assert (into.code, "holds a dataset" in into.err) == (5, True), into.err


def test_an_out_is_a_run_in_every_directory(done: Path, tmp_path: Path) -> None:
    out = str(done / "out")
    for verb in (["status"], ["wait"], ["why"], ["resume"], ["stop"]):
        found = ctl(tmp_path, *verb, out, "-o", "json")
        assert (found.code, found.json()["state"]) == (0, "succeeded"), found.err
    steps = ctl(tmp_path, "logs", out, "--role", "drafter", "--grep", '"event": "progress"')
    assert steps.code == 0 and all(json.loads(line)["rank"] == "drafter:0" for line in steps.out.splitlines())
    assert len(steps.out.splitlines()) >= 2
    assert "no line of its log matches" in ctl(tmp_path, "logs", out, "--grep", "nothing like this").err
    assert ctl(tmp_path, "logs", out, "--role", "judge").code == 2
    shutil.move(done / ".dflash", tmp_path / "gone")  # what OUT says is enough
    try:
        found = ctl(tmp_path, "status", out, "-o", "json").json()
    finally:
        shutil.move(tmp_path / "gone", done / ".dflash")
    assert (found["state"], found["training"]["step"]) == ("succeeded", 4)


def test_nothing_is_started_where_it_would_fail(data: Path, tmp_path: Path) -> None:
    for told, code, words in (
        (["none", "out"], 4, "holds no dataset"),
        ([str(data), "out", "--taps", "1,9"], 2, "--taps cannot be"),
        ([str(data), "bucket/out"], 2, "looks like a bucket"),
    ):
        refused = train(tmp_path, *told)
        assert (refused.code, words in refused.err, "Traceback" in refused.err) == (code, True, False), refused.err
    assert not (tmp_path / "out").exists() and not (tmp_path / ".dflash/runs").exists()


def test_a_training_is_stopped_explained_and_resumed_from_elsewhere(data: Path, tmp_path: Path) -> None:
    cwd, elsewhere = tmp_path / "a", tmp_path / "b"
    cwd.mkdir(), elsewhere.mkdir()
    more = ["--steps", "100000", "--checkpoint-every", "1h", "--detach"]
    began = train(cwd, str(data), "../out", *more)
    assert began.code == 0, began.err
    assert began.out == ctl(cwd, "ls", "-o", "name").out.splitlines()[0] + "\n"

    def now() -> dict[str, Any]:
        return ctl(elsewhere, "status", "../out", "-o", "json").json()

    def until(happened: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + 300
        while not happened(seen := now()):
            assert time.monotonic() < deadline and seen["state"] in ("pending", "running"), seen
            time.sleep(0.5)
        return seen

    until(lambda seen: (seen["training"]["step"] or 0) >= 2)
    attached = train(elsewhere, str(data), "../out", *more)
    assert attached.code == 0 and "is running already" in attached.err, attached.err
    refused = train(elsewhere, str(data), "../out", *more, "--seed", "5")
    assert (refused.code, "seed is 0 there, 5 here" in refused.err) == (5, True), refused.err
    told = ctl(elsewhere, "report", "../out", "-o", "json")
    assert (told.code, told.json()["state"]) == (0, "running"), told.err
    assert ctl(elsewhere, "report", "../out", "--html").code == 0
    assert "not complete, running" in (elsewhere / "out-report.html").read_text()
    stopped = ctl(elsewhere, "stop", "../out", "-o", "json")
    assert (stopped.code, stopped.json()["state"]) == (0, "suspended"), stopped.err
    assert "the step under way is finished and saved first" in stopped.err
    reached = now()["training"]["step"]
    assert reached >= 2
    [cause] = ctl(elsewhere, "why", "../out", "-o", "json").json()["causes"]
    assert cause["kind"] == "Exit143" and "resume" in cause["remedy"]
    resumed = ctl(elsewhere, "resume", "../out", "--detach", OMP_NUM_THREADS="1")
    assert (resumed.code, "started" in resumed.err) == (0, True), resumed.err
    until(lambda seen: (seen["training"]["step"] or 0) > reached)
    assert ctl(cwd, "stop").code == 0
    first = ctl(elsewhere, "logs", "../out", "--previous").out
    assert "stopped after step" in first and "goes on after step" not in first
    assert "goes on after step" in ctl(elsewhere, "logs", "../out").out
    removed = ctl(elsewhere, "rm", "../out")
    assert removed.code == 0 and not list((cwd / ".dflash/runs").iterdir()) and (tmp_path / "out/latest").exists()
    [cause] = ctl(elsewhere, "why", "../out", "-o", "json").json()["causes"]
    assert cause["kind"] == "Deleted" and "resume" in cause["remedy"]
    assert now()["training"]["saved_step"] > reached  # what OUT says is left


def test_doctor_says_what_would_stop_a_training(data: Path, tmp_path: Path) -> None:
    def doctor(dataset: Path | str, target: Path | str) -> tuple[int, dict[str, str], str]:
        told = {"DFLASH_TRAIN_DATASET": str(dataset), "DFLASH_TRAIN_TARGET": str(target), "DFLASH_TRAIN_OUT": "out"}
        done = ctl(tmp_path, "doctor", "train", "-v", "-o", "json", **told)
        origins = {entry["name"]: (entry["value"], entry["origin"]) for entry in done.json()["settings"]}
        assert origins["train.target"] == (str(target), "environment DFLASH_TRAIN_TARGET")
        assert origins["train.split"] == ("1+1", "default")
        checks = done.json()["checks"]
        return done.code, {check["name"]: check["state"] for check in checks}, str(checks)

    code, states, words = doctor(data, target_dir())
    assert (code, states["training"]) == (0, "ok") and "fit one another; about" in words
    assert {"torch", "cpus", "memory", "/dev/shm", "scratch", "dataset", "target", "out"} <= set(states)
    code, states, words = doctor("none", "./gone")
    assert (code, states["dataset"], states["target"]) == (4, "failed", "failed") and "training" not in states
    assert "holds no dataset" in words and "`./gone` does not exist" in words
    other = {"tokenizer": {"tokenizer.json": "0" * 64}, "generator": ""}
    code, states, words = doctor(write_dataset(tmp_path / "other", random_rows(8), spec=other), target_dir())
    assert (code, states["dataset"], states["target"], states["training"]) == (4, "ok", "ok", "failed")
    assert "the dataset was made with 000000000000" in words and not (tmp_path / "out").exists()


def test_the_release_is_printed() -> None:
    done = ctl(Path(), "--version")
    assert done.code == 0 and done.out.startswith("dflashctl") and done.err == ""


def test_where_pods_go_is_not_for_this_machine(data: Path, tmp_path: Path) -> None:
    told = train(tmp_path, str(data), "out", "--node", "b200", "--image", "x", "--dry-run")
    assert told.code == 0 and "--image, --node: not used by the local backend" in told.err
    assert "not used" not in train(tmp_path, str(data), "out", "--dry-run").err


@pytest.mark.s3
def test_from_s3_to_s3_it_is_looked_at_too(s3: str, data: Path, tmp_path: Path) -> None:
    raw, models = open_store(f"{s3}/data"), open_store(f"{s3}/models/tiny")
    for path in data.iterdir():
        raw.upload_file(path, path.name)
    for path in target_dir().iterdir():
        models.upload_file(path, path.name)
    told = ["train", f"{s3}/data", "--out", f"{s3}/out", "--target", f"{s3}/models/tiny", *SMALL, "--steps", "2"]
    here = {"OMP_NUM_THREADS": "1", "DFLASH_SCRATCH": str(tmp_path / "s"), "DFLASH_MODEL_CACHE": str(tmp_path / "m")}
    refused = ctl(tmp_path, *told, "--mask-token-id", "999", **here)
    assert (refused.code, "--mask-token-id cannot be: 999" in refused.err) == (2, True), refused.err
    gone = ctl(tmp_path, *told[:-4], "--target", f"{s3}/models/none", **here)
    assert (gone.code, "has no config.json" in gone.err) == (4, True), gone.err
    assert not list(open_store(f"{s3}/out").list()) and not (tmp_path / "m").exists()
    done = ctl(tmp_path, *told, **here)
    assert done.code == 0, done.err
    elsewhere = tmp_path / "b"
    elsewhere.mkdir()
    status = ctl(elsewhere, "status", f"{s3}/out", "-o", "json").json()
    assert (status["state"], status["training"]["step"]) == ("succeeded", 2)
    again = ctl(elsewhere, *told, **here)
    assert (again.code, "unchanged" in again.err) == (0, True), again.err
    other = ctl(elsewhere, *told, "--lr", "0.01", **here)
    assert (other.code, "lr is 0.0006 there, 0.01 here" in other.err) == (5, True), other.err
