"""Whole trainings on this machine: stopped, killed and refused in every way, and the same drafter in the end."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_fixtures import random_rows, write_dataset
from train_runs import Forked, args, metrics, target_dir

from tokenizer.job import JobError
from trainer import checkpoint, export, loop, supervisor
from trainer.board import Phase
from trainer.link import Receiver, Sender
from trainer.rank import compare

STEPS, KILLS = 12, 20


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "set", random_rows(60))


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    """OUT of a training that nothing happened to."""
    folder = tmp_path_factory.mktemp("straight")
    run = Forked(args(data, folder / "out"), folder / "log")
    assert run.wait() == 0, run.text()
    return folder / "out"


def state(out):
    return load_file(out / "checkpoints" / f"step-{STEPS:06d}" / "state.safetensors")


def lineage(out):
    """(step, loss, lr, rows) of every step line."""
    return [(m["step"], m["loss"], m["lr"], m["rows"]) for m in metrics(out) if "loss" in m]


def same_state(one, other):
    a, b = state(one), state(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def steps_done(run):
    return [line["step"] for line in run.lines() if line["event"] == "progress"]


def metrics_steps(out):
    return len(lineage(out)) if (out / "metrics.jsonl").exists() else 0


def test_a_training_ends_with_everything_that_serving_needs(straight, data):
    assert (straight / "latest").read_text() == f"step-{STEPS:06d}\n"
    for path in [*straight.glob("export*/*"), *straight.glob("checkpoints/*/*")]:
        assert path.stat().st_mode & 0o444 == 0o444, path  # whoever serves it is another user
    for name in ("export", "export-speculators"):
        assert {path.name for path in (straight / name).iterdir()} == {
            "config.json",
            "model.safetensors",
            "provenance.json",
        }
    story = json.loads((straight / "provenance.json").read_text())
    record = json.loads((data / "dataset.json").read_text())
    assert story["finished"] and story["identity"]["dataset_sha256"] == record["content_sha256"]
    assert story["exported_tau"] == pytest.approx(story["held_out_tau"], rel=0.1)
    assert list((straight / "tensorboard").glob("events*"))
    numbers = [step for step, _, _, _ in lineage(straight)]
    assert numbers == list(range(1, STEPS + 1))
    epoch = [row for m in metrics(straight) if m.get("epoch") == 0 for row in m["rows"]]
    counts = story["rows"]
    assert counts["no_anchor"] == 2 and counts["held_out"] == 2
    assert len(epoch) == len(set(epoch)) == counts["rows"] - counts["held_out"] - counts["no_anchor"]


def test_sigterm_saves_the_step_and_a_resume_goes_on_bit_by_bit(straight, data, tmp_path):
    out = tmp_path / "out"
    run = Forked(args(data, out), tmp_path / "log")
    run.until(lambda: metrics_steps(out) >= 3)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 143, run.text()
    stopped = metrics_steps(out)
    assert 3 <= stopped < STEPS
    assert (out / "latest").read_text() == f"step-{stopped:06d}\n"
    end = json.loads((tmp_path / "log.end").read_text())
    assert (end["exit"], end["reason"]) == (143, "sigterm")

    again = Forked(args(data, out), tmp_path / "log2")
    assert again.wait() == 0, again.text()
    assert same_state(out, straight)
    assert lineage(out) == lineage(straight)

    finished = Forked(args(data, out), tmp_path / "log3")
    assert finished.wait() == 0
    assert [line["event"] for line in finished.lines() if line["event"] != "note"] == ["unchanged", "done"]


@pytest.mark.parametrize("split", ["1+2", "colocated:1"])
def test_sigterm_breaks_off_a_walk_which_is_done_again(data, tmp_path, monkeypatch, split):
    """No step follows the walk that a signal meets; the step before it is saved, though no checkpoint was due."""
    begun, walk = tmp_path / "walked", loop.walk

    def slow_walk(*told):
        with begun.open("a") as file:
            file.write(".")
        time.sleep(0.3)
        return walk(*told)

    def walked(out):
        return [m["step"] for m in metrics(out) if "held_out_tau" in m]

    out = tmp_path / "out"
    told = args(data, out, split=split, held_out=0.5, checkpoint_every="1h", steps=4)
    monkeypatch.setattr(loop, "walk", slow_walk)
    run = Forked(told, tmp_path / "log")
    run.until(lambda: (out / "metrics.jsonl").exists() and 1 in walked(out) and metrics_steps(out) == 2)
    met = begun.stat().st_size
    run.until(lambda: begun.stat().st_size > met)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 143, run.text()
    assert [step for step, _, _, _ in lineage(out)] == [1, 2] and walked(out) == [1]
    assert begun.stat().st_size - met < 8 and (out / "latest").read_text() == "step-000002\n"
    assert "stopping: SIGTERM; the step is finished and saved first" in run.text()

    monkeypatch.setattr(loop, "walk", walk)
    again = Forked(told, tmp_path / "log2")
    assert again.wait() == 0, again.text()
    assert [step for step, _, _, _ in lineage(out)] == [1, 2, 3, 4] and walked(out) == [1, 2, 3, 4]


def test_a_resume_may_change_the_split(straight, data, tmp_path):
    out = tmp_path / "out"
    run = Forked(args(data, out, split="2+1"), tmp_path / "log")
    run.until(lambda: metrics_steps(out) >= 3)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 143, run.text()
    again = Forked(args(data, out, split="colocated:2", checkpoint_every="1h"), tmp_path / "log2")
    assert again.wait() == 0, again.text()
    ours, known = state(out), state(straight)
    for name in known:
        if name.startswith("master"):
            assert float((ours[name] - known[name]).norm() / known[name].norm()) < 1e-4, name


def slow_link(monkeypatch, draw):
    """Both ends of the link take their time, each its own."""
    send, take = Sender.send, Receiver.take

    def slow_send(self, states, drafter):
        time.sleep(draw.random() / 50)
        send(self, states, drafter)

    def slow_take(self, item):
        time.sleep(draw.random() / 50)
        return take(self, item)

    monkeypatch.setattr(Sender, "send", slow_send)
    monkeypatch.setattr(Receiver, "take", slow_take)


def slow_disk(monkeypatch, draw):
    """Every file of a checkpoint takes longer than some steps: a kill finds it half there."""
    save = checkpoint.save_file

    def slow_save(*args, **more):
        time.sleep(draw.random() / 4)
        save(*args, **more)
        time.sleep(draw.random() / 4)

    monkeypatch.setattr(checkpoint, "save_file", slow_save)


def nothing_slow(monkeypatch, draw):
    pass


def test_a_torn_newest_checkpoint_costs_steps_and_nothing_else(straight, data, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(straight, out)
    (out / "provenance.json").unlink()  # with it, it is complete
    newest = out / "checkpoints" / f"step-{STEPS:06d}" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    run = Forked(args(data, out), tmp_path / "log")
    assert run.wait() == 0, run.text()
    notes = [line["message"] for line in run.lines() if line["event"] == "note"]
    assert any(f"step-{STEPS:06d}` is not whole" in note for note in notes)
    assert any(f"goes on after step 10 of {STEPS}; 2 steps are done again" in note for note in notes)
    assert same_state(out, straight) and lineage(out) == lineage(straight)


def test_an_exporter_with_a_wrong_tap_list_is_caught(straight, data, tmp_path, monkeypatch):
    """Sabotage behind every check of the configuration: the list that is written is not the one that was trained."""
    out, write = tmp_path / "out", export._write
    shutil.copytree(straight, out)
    (out / "provenance.json").unlink()

    def sabotage(where, config, *more):
        inner = config["dflash_config"]
        shifted = inner | {"target_layer_ids": [tap - 1 for tap in inner["target_layer_ids"]]}
        return write(where, config | {"dflash_config": shifted}, *more)

    monkeypatch.setattr(export, "_write", sabotage)
    code, message = refused(args(data, out), tmp_path)
    assert code == 70 and "target_layer_ids" in message
    assert not (out / "provenance.json").exists()


def test_what_is_served_may_not_be_worse_than_what_was_trained():
    compare([0, 500, 500], [0, 520, 480])  # chance
    compare([0, 5, 5], [0, 8, 2])  # too few blocks to tell
    compare([0, 0, 0], [0, 0, 0])  # nothing is held out
    with pytest.raises(JobError, match=r"1\.50 in training and 1\.10 with the exported files") as caught:
        compare([0, 500, 500], [0, 900, 100])
    assert caught.value.code == 70


def test_another_attempt_that_took_over_out_ends_this_one(data, tmp_path):
    out = tmp_path / "out"
    run = Forked(args(data, out, steps=10000, checkpoint_every="2"), tmp_path / "log")
    run.until(lambda: (out / "latest").exists())
    (out / "latest").write_text("step-009999\n")
    assert run.wait() == 75
    assert "was moved by another attempt" in last(run)["message"]
    assert (out / "latest").read_text() == "step-009999\n"


def test_a_kill_leaves_no_half_export_for_good(straight, data, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(straight, out)
    (out / "provenance.json").unlink()
    (out / ".export.k1ll3d" / "old").mkdir(parents=True)
    run = Forked(args(data, out), tmp_path / "log")
    assert run.wait() == 0, run.text()
    assert not [*out.glob(".export*")] and (out / "export" / "config.json").exists()


def kill_once(told, out, log, draw):
    """Start or go on, and kill a rank or the supervisor: while it loads, or some steps further on."""
    before, further = metrics_steps(out), draw.choice([0, 1, 1, 2])
    run = Forked(told, log)
    if further:
        run.until(lambda: bool(steps_done(run)))
        run.until(lambda: metrics_steps(out) >= min(before + further, STEPS - 2))
    else:
        run.until(lambda: any(line["event"] == "start" for line in run.lines()) and len(run.ranks()) >= 2)
    os.kill(draw.choice([*run.ranks(), run.pid]), signal.SIGKILL)
    assert run.wait() in (71, -9), run.text()


def test_any_process_may_be_killed_at_any_time(straight, data, tmp_path, monkeypatch):
    """20 kills of ranks and supervisors, over slow links and slow disks too: every row is once in the lineage of the
    very same parameters."""
    out, draw = tmp_path / "out", random.Random(5)
    told = args(data, out, checkpoint_every="2")
    for kill in range(KILLS):
        with monkeypatch.context() as patched:
            (nothing_slow, slow_link, slow_disk)[kill % 3](patched, draw)
            kill_once(told, out, tmp_path / f"log{kill}", draw)
    run = Forked(told, tmp_path / "log")
    assert run.wait() == 0, run.text()
    assert same_state(out, straight)
    assert lineage(out) == lineage(straight)


def last(run):
    """The final JSON line."""
    return run.lines()[-1]


def test_a_dead_rank_is_named_at_once(data, tmp_path):
    run = Forked(args(data, tmp_path / "out", steps=10000), tmp_path / "log")
    run.until(lambda: bool(steps_done(run)))
    target = next(iter(sorted(run.ranks())))
    os.kill(target, signal.SIGKILL)
    assert run.wait(30) == 71
    assert "Traceback" not in run.text() and "[drafter:0] a rank that this one needs is gone" in run.text()
    assert last(run)["message"] == "target:0 was killed by SIGKILL"
    assert "memory" in last(run)["hint"]


@pytest.mark.parametrize("victim", [0, 1], ids=["target:0", "drafter:0"])
def test_a_silent_rank_is_named_and_ends_the_run(data, tmp_path, monkeypatch, victim, request):
    """Stopped, as a hanging driver is; the other one falls silent too, since it waits."""
    monkeypatch.setattr(supervisor, "LIMITS", dict.fromkeys(Phase, 300.0) | {Phase.STEP: 20.0})
    monkeypatch.setattr(supervisor, "STEPS", 0)
    run = Forked(args(data, tmp_path / "out", steps=10000, held_out=0.0), tmp_path / "log")
    run.until(lambda: metrics_steps(tmp_path / "out") >= 3)
    stopped = sorted(run.ranks())[victim]
    os.kill(stopped, signal.SIGSTOP)
    assert run.wait() == 71
    assert last(run)["message"].startswith(f"{request.node.callspec.id} has been silent for")
    assert not Path(f"/proc/{stopped}").exists()


def test_a_preparation_that_hangs_ends_too(data, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "LIMITS", dict.fromkeys(Phase, 4.0))
    monkeypatch.setattr(supervisor, "prepare", lambda *_: time.sleep(300))
    run = Forked(args(data, tmp_path / "out"), tmp_path / "log")
    assert run.wait() == 71
    assert last(run)["message"].startswith("prepare has been silent for")


def test_sigterm_before_the_first_step_has_nothing_to_save(data, tmp_path):
    run = Forked(args(data, tmp_path / "out"), tmp_path / "log")
    run.until(lambda: len(run.ranks()) >= 1)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(30) == 143
    assert not (tmp_path / "out" / "latest").exists()


def refused(told, tmp_path):
    run = Forked(told, tmp_path / "log")
    code = run.wait()
    assert "Traceback" not in run.text()
    return code, last(run).get("message", "")


def test_data_that_cannot_be_trained_is_refused_by_name(data, tmp_path):
    out = tmp_path / "out"
    assert refused(args(tmp_path / "none", out), tmp_path)[0] == 65
    bad = tmp_path / "degenerate"
    shutil.copytree(data, bad)
    record = json.loads((bad / "dataset.json").read_text())
    told = record | {"degenerate": True, "reasons": ["87 % of 60 rows have exactly 6 loss tokens"]}
    (bad / "dataset.json").write_text(json.dumps(told))
    code, message = refused(args(bad, out), tmp_path)
    assert code == 65 and "exactly 6 loss tokens" in message
    spec = record["spec"] | {"tokenizer": {"tokenizer.json": "0" * 64}}
    (bad / "dataset.json").write_text(json.dumps(record | {"spec": spec}))
    code, message = refused(args(bad, out), tmp_path)
    assert code == 78 and "tokenizer.json" in message
    assert not out.exists()


def test_another_training_in_out_is_refused_with_the_difference(straight, data, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(straight, out)
    code, message = refused(args(data, out, lr=1e-3), tmp_path)
    assert code == 78 and "lr is 0.005 there, 0.001 here" in message
    other = write_dataset(tmp_path / "other", random_rows(60, seed=1))
    code, message = refused(args(other, out), tmp_path)
    here = json.loads((other / "dataset.json").read_text())["content_sha256"]
    assert code == 78 and "dataset_sha256 is" in message and f'"{here}" here' in message


def test_a_target_whose_weights_do_not_fit_is_one_line(data, tmp_path):
    broken = tmp_path / "target"
    shutil.copytree(target_dir(), broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    code, message = refused(args(data, tmp_path / "out", target=str(broken)), tmp_path)
    assert code == 78 and "`model.layers.0.mlp.down_proj.weight` is (32, 64), not (32, 48)" in message
    own = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("[target:0]")]
    assert own == []


def test_what_is_no_number_stops_the_run_and_saves_nothing(data, tmp_path):
    broken = tmp_path / "target"
    shutil.copytree(target_dir(), broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][:] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    code, message = refused(args(data, out, target=str(broken), split="1+2"), tmp_path)
    assert code == 76 and message.startswith("step 1: loss nan: the target's states are no numbers, on rows a.")
    assert not (out / "latest").exists()


def test_a_full_disk_has_its_own_code(data, tmp_path):
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / f"step-{5:06d}").write_text("in the way")  # a rename over a file fails as a full disk does
    code, message = refused(args(data, out), tmp_path)
    assert code == 73 and "step 5" in message


def test_a_disk_that_fills_up_has_it_too(data, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").symlink_to("/dev/full")  # the kernel's own full disk
    code, message = refused(args(data, out), tmp_path)
    assert code == 73 and message.startswith("the disk is full")


def test_flags_that_cannot_be(tmp_path):
    from trainer.__main__ import main

    for wrong in ("--split=0+1", "--lr=2", "--taps=a", "--schedule=linear", "--checkpoint-every=soon"):
        told = [*args("d", "o").to_argv(), wrong]
        assert main(["train", *told]) == 64
    assert main(["train", "--contract=99", "--dataset=d", "--out=o", "--target=t"]) == 78
