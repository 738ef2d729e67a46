"""A training as a run of this machine: submitted, seen, stopped, resumed, tried again."""

import os
import signal
import time

from train_fixtures import random_rows, write_dataset
from train_runs import args, metrics

from dflashctl.backends.local import LocalBackend
from dflashctl.training import submission
from trainer.job import TrainArgs


def until(happened, seconds=120):
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


def test_what_no_retry_mends_ends_the_run_with_its_words(tmp_path):
    data = write_dataset(tmp_path / "data", random_rows(60), degenerate=True, reasons=["one text only"])
    backend = LocalBackend(tmp_path / ".dflash")
    backend.submit(submission(args(data, tmp_path / "out"), "trn-y", {}))
    until(lambda: backend.snapshot("trn-y").state != "running")
    found = backend.snapshot("trn-y")
    assert found.state == "failed" and "one text only" in found.reason
    assert (found.indexes[0].exit_code, found.indexes[0].tries) == (65, 1)
