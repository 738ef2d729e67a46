"""`dflashctl train --backend local`: refused before anything starts, found from anywhere, stopped, resumed, explained."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import Done, ctl
from train_fixtures import random_rows, write_dataset
from train_runs import target_dir

from dflashctl import trained, training
from dflashctl.backends.local import LocalBackend, fold
from dflashctl.errors import PreflightError
from dflashctl.progress import Index
from dflashctl.runs import Status
from dflashctl.why import TRAIN_EXIT_CODES, of_indexes
from tokenizer.job import Exit, JobError
from tokenizer.store import open_store
from trainer.check import check, free_memory
from trainer.job import TrainArgs

SMALL = ["--layers", "1", "--block-size", "4", "--anchors", "4", "--max-length", "32", "--accumulate", "2"]
SMALL += ["--batch-rows", "2", "--held-out", "0.2"]


def train(cwd: Path, data: str, out: str, *more: str) -> Done:
    told = ["train", data, "--out", out, "--target", str(target_dir()), *SMALL, *more]
    return ctl(cwd, *told, OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "set", random_rows(40))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target of its own, to be broken."""
    return Path(shutil.copytree(target_dir(), tmp_path / "target"))


def args(data: Path, out: Path, target: Path | str, **more: Any) -> TrainArgs:
    return TrainArgs(str(data), str(out), str(target), **{"layers": 1, "block_size": 4, "held_out": 0.2, **more})


# ---- the check, in this process


def edited(target: Path, **changes: Any) -> None:
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(target: Path) -> None:
    os.truncate(target / "model.safetensors", (target / "model.safetensors").stat().st_size - 5)


def pointer(target: Path) -> None:
    (target / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def unlisted(target: Path) -> None:
    index = {"weight_map": {"a": "model-00001.safetensors", "b": "model.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (lambda t: shutil.rmtree(t), "does not exist"),
    (lambda t: (t / "config.json").unlink(), "has no config.json"),
    (lambda t: (t / "config.json").write_text("{"), "target"),
    (lambda t: edited(t, vocab_size=300), "`model.embed_tokens.weight` is [288, 32] in the weights, [300, 32] by"),
    (lambda t: edited(t, num_hidden_layers=8), "config.json has 8 layers, the weights have 6"),
    (cut, "by its header"),
    (pointer, "is a Git LFS pointer"),
    (unlisted, "lacks 1 of 2 files of weights: model-00001.safetensors"),
    (lambda t: (t / "model.safetensors").unlink(), "has no weights"),
    (lambda t: (t / "model.safetensors").write_bytes(b"\0" * 64), "is no safetensors file"),
]


@pytest.mark.parametrize(("harm", "words"), BROKEN)
def test_a_target_that_cannot_be_trained_on_is_refused_by_its_files(
    data: Path, target: Path, tmp_path: Path, harm: Callable[[Path], Any], words: str
) -> None:
    harm(target)
    with pytest.raises(JobError) as caught:
        check(args(data, tmp_path / "out", target))
    assert words in caught.value.message and caught.value.code == Exit.CONFIG and caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"taps": "1,9"}, "--taps cannot be: [1, 9] leaves 0..4 of a target of 6 layers"),
        ({"mask_token_id": 999}, "--mask-token-id cannot be: 999 is not one of the target's 288 embedding rows"),
    ],
)
def test_a_flag_that_does_not_fit_the_target_is_a_mistake_of_usage(
    data: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(JobError) as caught:
        check(args(data, tmp_path / "out", target_dir(), **changes))
    assert words in caught.value.message and caught.value.code == Exit.USAGE


@pytest.mark.parametrize("taps", ["4,3", "2,2", "-1,2", "a"])
def test_taps_that_no_target_has_are_refused_at_once(taps: str) -> None:
    with pytest.raises(JobError, match="--taps"):
        TrainArgs("d", "o", "t", taps=taps)


def test_data_that_cannot_be_trained_is_refused(data: Path, tmp_path: Path) -> None:
    out, rows = tmp_path / "out", random_rows(8)

    def refusal(dataset: Path) -> JobError:
        with pytest.raises(JobError) as caught:
            check(args(dataset, out, target_dir()))
        return caught.value

    found = refusal(tmp_path / "none")
    assert (found.code, "holds no dataset" in found.message) == (Exit.DATA, True)
    found = refusal(write_dataset(tmp_path / "deg", rows, degenerate=True, reasons=["one text only"]))
    assert (found.code, "one text only" in found.message) == (Exit.DATA, True)
    spec = {"tokenizer": {"tokenizer.json": "0" * 64}, "generator": ""}
    found = refusal(write_dataset(tmp_path / "other", rows, spec=spec))
    assert (found.code, "the dataset was made with 000000000000" in found.message) == (Exit.CONFIG, True)
    half = write_dataset(tmp_path / "half", rows)
    shard = half / "data-00001-of-00002.arrow"
    os.truncate(shard, shard.stat().st_size - 1)
    found = refusal(half)
    assert found.code == Exit.DATA and f"`{shard}` has" in found.message
    shard.unlink()
    assert f"`{shard}` is not there" in refusal(half).message
    (half / "dataset.json").unlink()
    (half / "plan.json").write_text("{}")
    assert "is not complete" in refusal(half).message
    (half / "refused.json").write_text('{"reasons": ["no row is left"]}')
    assert "was refused: no row is left" in refusal(half).message


def test_an_out_that_cannot_be_written_is_refused(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out, words in ((tmp_path / "file" / "out", "is no directory"), (Path("/proc/nobody/out"), "cannot be written")):
        with pytest.raises(JobError, match=words):
            check(args(data, out, target_dir()))


def test_what_fits_is_told_with_its_memory(data: Path, tmp_path: Path) -> None:
    one = check(args(data, tmp_path / "out", target_dir()))
    four = check(args(data, tmp_path / "out", target_dir(), split="4+1"))
    assert one["drafter"]["mask_token_id"]["why"] == "first unused embedding row"
    assert (one["taken"], one["finished"], one["rows"]) == ([], False, 40)
    assert four["memory"]["needed"] - one["memory"]["needed"] == 3 * one["memory"]["target"] > 0
    assert not (tmp_path / "out").exists()


def test_free_memory_is_cut_by_the_container(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert free_memory(tmp_path) == 4 << 20
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000\n")
    for limit, free in (("max", 4 << 20), ("3000", 2000), ("900", 0)):
        (group / "memory.max").write_text(f"{limit}\n")
        assert free_memory(tmp_path) == free


def test_too_little_memory_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    memory = {"needed": 3 << 30, "free": 1 << 30, "copies": 2, "target": 1 << 30}
    training.say_found({"drafter": {}, "memory": memory}, print)
    assert (
        "about 3.0 GiB are needed (2 copies of the target of 1.0 GiB each), 1.0 GiB are free" in capsys.readouterr().err
    )
    training.say_found({"drafter": {}, "memory": memory | {"free": 4 << 30}}, print)
    assert capsys.readouterr().err == ""


# ---- names, figures and causes


def test_a_run_is_named_after_all_that_was_declared() -> None:
    base = TrainArgs("/data", "/out", "/target")
    names = {training.run_name(base, None)}
    for change in ({"dataset": "/other"}, {"target": "/t2"}, {"out": "/b/out"}, {"lr": 1e-3}, {"seed": 1}):
        names.add(
            training.run_name(TrainArgs(**{"dataset": "/data", "out": "/out", "target": "/target", **change}), None)
        )
    assert len(names) == 6
    for change in ({"split": "4+3"}, {"checkpoint_every": "7"}, {"allow_degenerate": True}):
        same = TrainArgs(**{"dataset": "/data", "out": "/out", "target": "/target", **change})
        assert training.run_name(same, None) in names


def test_figures_are_those_of_the_last_step_and_the_last_walk() -> None:
    lines = [
        {"step": 1, "loss": 3.0, "rows": [1, 2], "tokens": 9},
        {"step": 1, "held_out_tau": 1.5},
        {"step": 2, "loss": 2.0, "rows": [3], "tokens": 8},
    ]
    data = b'cut short"}\n' + b"".join(json.dumps(line).encode() + b"\n" for line in lines) + b'{"step": 3, "lo'
    assert trained.newest(data) == {"step": 2, "loss": 2.0, "held_out_tau": 1.5}


def test_every_exit_code_has_its_cause_and_remedy() -> None:
    assert set(TRAIN_EXIT_CODES) == set(Exit) - {Exit.OK} | {137}
    for code in TRAIN_EXIT_CODES:
        [cause] = of_indexes([Index(0, "failed", 1, reason="its words", exit_code=code)], "train")
        assert cause.kind == f"Exit{int(code)}" and cause.message.endswith(": its words") and cause.remedy
    told = Index(0, "failed", 1, reason="the disk is full", exit_code=73, message={"hint": "give it a larger volume"})
    assert of_indexes([told], "train")[0].remedy.startswith("give it a larger volume; ")


def test_a_stopped_training_keeps_its_figures() -> None:
    running = {0: Index(0, "running", 1, message={"step": 7})}
    ended = {"state": "stopped"}
    assert fold(ended, False, True, running, [0], goes_on=True).indexes[0].message == {"step": 7}
    assert fold(ended, False, True, running, [0]).indexes[0].message == {}


def test_the_log_of_a_try_that_ended_is_followed_to_its_end(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / ".dflash")
    folder = tmp_path / ".dflash/runs/t"
    logs = folder / "t/logs"
    logs.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run": "t", "kind": "train", "jobs": [{"job": "t", "indexes": [0]}]}))
    with open(folder / "t/lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (logs / "00000-0.txt").write_text("one\n")
        lines = backend.logs("t", None, previous=False, follow=True)
        assert next(lines).text == "one"
        with (logs / "00000-0.txt").open("a") as file:
            file.write("two\n")
        (logs / "00000-1.txt").write_text("three\n")
        assert [next(lines).text, next(lines).text] == ["two", "three"]
    assert [line.text for line in lines] == []
    assert [line.text for line in backend.logs("t", None, previous=True, follow=False)] == ["one", "two"]


def test_what_is_shown_of_a_moment() -> None:
    said = {"step": 3, "steps": 9, "loss": 1.25, "accuracy": [0.5, 0.25], "held_out_tau": 2.5, "tokens_per_s": 1e4}
    said |= {"target_busy": 0.9, "drafter_busy": 0.4, "ring_depth": 2.0, "saved_step": 2, "eta_s": 75.0}
    now = Status("trn-a", "train", "/out", "running", indexes=(Index(0, "running", 2, message=said),))
    line = trained.line(now)
    for part in ("step 3 of 9", "loss 1.2500", "0.50 0.25", "tau 2.50", "10.0 k tokens/s", "target 90%, drafter 40%"):
        assert part in line
    assert "ETA 1m15s" in line and ["try", "2"] in [text.split() for text in trained.block(now)]
    assert list(trained.document(now)) == list(trained.KEYS) and now.document()["training"]["lr"] is None


# ---- real processes


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


def test_a_child_that_cannot_even_start_is_one_line(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = args(data, tmp_path / "out", target_dir())
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PreflightError, match="needs the trainer's packages"):
        training.preflight(told)


def test_a_training_is_stopped_explained_and_resumed_from_elsewhere(data: Path, tmp_path: Path) -> None:
    cwd, elsewhere = tmp_path / "a", tmp_path / "b"
    cwd.mkdir(), elsewhere.mkdir()
    more = ["--steps", "100000", "--checkpoint-every", "1h", "--detach"]
    began = train(cwd, str(data), "../out", *more)
    assert began.code == 0, began.err

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
    stopped = ctl(elsewhere, "stop", "../out", "-o", "json")
    assert (stopped.code, stopped.json()["state"]) == (0, "suspended"), stopped.err
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
