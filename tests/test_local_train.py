"""A training as a run of this machine: submitted, seen, stopped, resumed, tried again."""

import json
import os
import signal
import subprocess
import sys
import time

from train_fixtures import random_rows, write_dataset
from train_runs import ROOT, args, metrics, target_dir

from dflashctl.backends.local import LocalBackend
from dflashctl.training import submission
from trainer.job import TrainArgs


def until(happened, seconds=300):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_training_is_a_run_like_any_other(tmp_path):
    data, out = write_dataset(tmp_path / "data", random_rows(60)), tmp_path / "out"
    told = args(data, out, checkpoint_every="2")
    assert TrainArgs.from_argv(told.to_argv()) == told
    backend = LocalBackend(tmp_path / ".dflash")
    backend.submit(submission(told, "trn-x", {}))
    until(lambda: (out / "metrics.jsonl").exists() and len(metrics(out)) >= 4)
    assert backend.snapshot("trn-x").state == "running"
    backend.stop("trn-x")
    assert backend.snapshot("trn-x").state == "suspended"
    assert (out / "latest").exists()
    assert any("stopped after step" in line.text for line in backend.logs("trn-x", None, False, False))

    backend.unsuspend("trn-x")
    until(lambda: any("goes on after step" in line.text for line in backend.logs("trn-x", None, False, False)))
    until(lambda: backend.snapshot("trn-x").indexes[0].message)
    supervisor = int(backend.snapshot("trn-x").indexes[0].pod)
    os.kill(supervisor, signal.SIGKILL)  # as a lost pod: another one goes on
    until(lambda: backend.snapshot("trn-x").state != "running")
    found = backend.snapshot("trn-x")
    assert (found.state, found.indexes[0].state) == ("succeeded", "succeeded")
    assert [m["step"] for m in metrics(out) if "loss" in m] == list(range(1, 13))


def test_tries_that_each_save_something_never_run_out(tmp_path):
    """Kills between two progress lines: what a try saved shows in what the next one says of its start."""
    data, out = write_dataset(tmp_path / "data", random_rows(60)), tmp_path / "out"
    backend = LocalBackend(tmp_path / ".dflash")
    backend.submit(submission(args(data, out, steps=60, checkpoint_every="2", held_out=0.0), "trn-z", {}))

    def saved():
        return int((out / "latest").read_text().strip().removeprefix("step-")) if (out / "latest").exists() else 0

    for _ in range(4):
        before = saved()
        until(lambda before=before: saved() > before)
        supervisor = int(backend.snapshot("trn-z").indexes[0].pod)
        os.kill(supervisor, signal.SIGKILL)
        until(lambda gone=str(supervisor): backend.snapshot("trn-z").indexes[0].pod != gone)
    before = saved()
    until(lambda: backend.snapshot("trn-z").indexes[0].message["step"] > before)
    assert backend.snapshot("trn-z").indexes[0].message["saved_step"] >= before
    until(lambda: backend.snapshot("trn-z").state != "running")
    assert backend.snapshot("trn-z").state == "succeeded"
    assert [m["step"] for m in metrics(out) if "loss" in m] == list(range(1, 61))


def test_what_no_retry_mends_ends_the_run_with_its_words(tmp_path):
    data = write_dataset(tmp_path / "data", random_rows(60), degenerate=True, reasons=["one text only"])
    backend = LocalBackend(tmp_path / ".dflash")
    backend.submit(submission(args(data, tmp_path / "out"), "trn-y", {}))
    until(lambda: backend.snapshot("trn-y").state != "running")
    found = backend.snapshot("trn-y")
    assert found.state == "failed" and "one text only" in found.reason
    assert (found.indexes[0].exit_code, found.indexes[0].tries) == (65, 1)


def cli(*told, cwd):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dflashctl", *map(str, told)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command_line_starts_follows_and_recognises_a_training(tmp_path):
    write_dataset(tmp_path / "data", random_rows(40))
    told = ["train", "data", "--out", "out", "--target", target_dir(), "--backend", "local", "--split", "1+1"]
    told += ["--steps", 4, "--layers", 1, "--block-size", 4, "--anchors", 4, "--max-length", 32, "--accumulate", 2]
    code, out, err = cli(*told, "--dry-run", "-o", "json", cwd=tmp_path)
    assert code == 0 and json.loads(out)["job"]["kind"] == "train" and not (tmp_path / "out").exists(), err
    code, out, err = cli(*told, cwd=tmp_path)
    assert code == 0, err
    assert ["step", "4", "of", "4"] in [line.split() for line in out.splitlines()]
    code, out, err = cli("status", "--backend", "local", "-o", "json", cwd=tmp_path)
    assert code == 0 and json.loads(out)["state"] == "succeeded", err
    code, _, err = cli(*told, cwd=tmp_path)
    assert code == 0, err  # nothing is left to do
    code, _, err = cli(*told, "--lr", "0.01", cwd=tmp_path)
    assert code == 5 and "lr is 0.0006 there, 0.01 here" in err
