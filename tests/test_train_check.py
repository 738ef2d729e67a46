"""What is found and told before a training starts, and what is told of it: names, figures, causes. No run is started."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train_fixtures import random_rows, write_dataset
from train_runs import target_dir

from dflashctl import trained, training
from dflashctl.backends.local import LocalBackend, fold
from dflashctl.errors import PreflightError
from dflashctl.progress import Index
from dflashctl.runs import Status
from dflashctl.why import TRAIN_EXIT_CODES, of_indexes
from tokenizer.job import Exit, JobError
from trainer.check import check, free_memory
from trainer.job import TrainArgs


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


def test_a_child_that_cannot_even_start_is_one_line(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = args(data, tmp_path / "out", target_dir())
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PreflightError, match="needs the trainer's packages"):
        training.preflight(told)


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


def test_what_a_kill_left_in_out_is_further_on_than_what_was_said_before() -> None:
    out = trained.Told(figures={"step": 22, "loss": 2.0, "saved_step": 20})
    said = {"step": 13, "steps": 60, "loss": 3.0, "saved_step": -1, "eta_s": 9.0}

    def shown(state: str, message: dict[str, Any], out: trained.Told = out) -> dict[str, Any]:
        [index] = trained.filled((Index(0, state, message=message),), out)
        return dict(index.message)

    assert shown("failed", said) == {"step": 22, "steps": 60, "loss": 2.0, "saved_step": 20, "eta_s": 9.0}
    assert shown("running", said) == said | {"saved_step": 20}  # a resume does what lies behind its checkpoint again
    assert shown("failed", said | {"step": 30, "saved_step": 30})["step"] == 30  # OUT on S3 gets it with a checkpoint
    assert shown("failed", said | {"step": 30, "saved_step": 30})["saved_step"] == 30
    assert shown("pending", {"said": "looking"}, trained.Told()) == {"said": "looking"}


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
