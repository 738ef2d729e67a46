"""Checkpoints are whole or not there, newest first, never in a step's way, and one attempt's alone."""

import json
import threading

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from tokenizer.job import JobError
from tokenizer.store import open_store
from trainer.checkpoint import LATEST, META, STATE, Snapshot, Writer, find, prunable, read, step_name, write
from trainer.export import load_drafter
from trainer.optim import AdamW
from trainer.provenance import fingerprint

IDENTITY = {"seed": 0, "lr": 0.1}


def snapshot(step, seed=0):
    model = tiny.drafter(seed=seed)
    state = {name: tensor.clone() for name, tensor in AdamW(model).state().items()}
    return Snapshot(step, step, state, {"rows": 3})


def silent(text):
    pass


def writer(store, local, remote=False, say=silent):
    return Writer(store, local, tiny.config(), IDENTITY, say, remote)


def names(store):
    return sorted({stat.key.split("/")[1] for stat in store.list("checkpoints/")})


def test_a_checkpoint_is_read_as_it_was_written_and_can_be_served(tmp_path):
    place = write(tmp_path / "checkpoints", snapshot(100), tiny.config(), IDENTITY)
    found = find(open_store(str(tmp_path)), tmp_path, IDENTITY, silent, False)
    assert found == place and place.name == "step-000100"
    back = read(found)
    assert (back.step, back.updates, back.counters) == (100, 100, {"rows": 3})
    assert all(torch.equal(back.state[name], value) for name, value in snapshot(100).state.items())
    served = load_drafter(place)
    wanted = tiny.drafter().to(torch.bfloat16).state_dict()
    assert all(torch.equal(value.to(torch.bfloat16), wanted[name]) for name, value in served.state_dict().items())


@pytest.mark.parametrize("torn", ["cut", "flipped", "missing", "no meta", "half meta"])
def test_a_torn_newest_one_is_passed_over(tmp_path, torn):
    for step in (1, 2):
        place = write(tmp_path / "checkpoints", snapshot(step), tiny.config(), IDENTITY)
    data = (place / STATE).read_bytes()
    if torn == "cut":
        (place / STATE).write_bytes(data[:-9])
    elif torn == "flipped":
        (place / STATE).write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif torn == "missing":
        (place / STATE).unlink()
    elif torn == "no meta":
        (place / META).unlink()
    else:
        (place / META).write_text((place / META).read_text()[:40])
    said = []
    found = find(open_store(str(tmp_path)), tmp_path, IDENTITY, said.append, False)
    assert found is not None and found.name == step_name(1)
    assert torn == "no meta" or "step-000002" in said[0]


def test_another_training_is_refused_with_the_difference(tmp_path):
    write(tmp_path / "checkpoints", snapshot(1), tiny.config(), IDENTITY)
    with pytest.raises(JobError) as caught:
        find(open_store(str(tmp_path)), tmp_path, {"seed": 1, "lr": 0.1}, silent, False)
    assert caught.value.code == 78 and "seed is 0 there, 1 here" in caught.value.message


def test_another_fine_tune_of_the_same_shape_is_another_target(tmp_path):
    """Same names, same sizes: its weights tell, wherever it lies."""
    found = []
    for name, seed in (("a", 1), ("copy of a", 1), ("b", 2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        generator = torch.Generator().manual_seed(seed)
        save_file({"w": torch.randn(1 << 20, generator=generator)}, folder / "model.safetensors")
        found.append(fingerprint(str(folder)))
    assert found[0] == found[1] != found[2]


def test_latest_moves_last_and_old_ones_go(tmp_path):
    store = open_store(str(tmp_path))
    saves = writer(store, tmp_path)
    for step in (10, 20, 30):
        saves.submit(snapshot(step))
        while saves.saved != step:
            saves.check()
    saves.close()
    assert store.get_bytes(LATEST) == b"step-000030\n"
    assert names(store) == ["step-000020", "step-000030"]
    assert prunable(["step-000010", "step-000020", "step-000030", "other"], 20, 1) == {"step-000010"}


def test_two_attempts_do_not_train_into_one_out(tmp_path):
    store = open_store(str(tmp_path))
    first, second = writer(store, tmp_path), writer(store, tmp_path)
    first.submit(snapshot(1))
    first.close()
    second.submit(snapshot(2))
    with pytest.raises(JobError) as caught:
        second.close()
    assert caught.value.code == 75 and "another attempt" in caught.value.message
    assert store.get_bytes(LATEST) == b"step-000001\n"


class Held:
    """A store whose uploads wait until they are let go."""

    def __init__(self, store):
        self.store, self.go = store, threading.Event()

    def __getattr__(self, name):
        return getattr(self.store, name)

    def upload_file(self, *args, **more):
        assert self.go.wait(60)
        return self.store.upload_file(*args, **more)


@pytest.mark.s3
def test_a_push_never_stalls_a_step_and_the_newest_gets_there(tmp_path, s3):
    held = Held(open_store(f"{s3}/out"))
    saves = writer(held, tmp_path, remote=True)
    for step in range(1, 6):  # returns at once, though nothing is uploaded
        saves.submit(snapshot(step))
    held.go.set()
    saves.close()
    assert saves.replaced >= 3 and saves.saved == 5
    assert held.get_bytes(LATEST) == b"step-000005\n"
    fresh = tmp_path / "another machine"
    found = find(held, fresh, IDENTITY, silent, True)
    assert found is not None and read(found).step == 5
    known = snapshot(5).state
    assert all(torch.equal(value, known[name]) for name, value in load_file(found / STATE).items())


@pytest.mark.s3
def test_another_attempt_is_noticed_on_s3_and_a_lost_answer_is_none(tmp_path, s3, s3_faults):
    store = open_store(f"{s3}/out")
    saves, other = writer(store, tmp_path / "one", remote=True), writer(store, tmp_path / "other", remote=True)
    for step in (1, 2):  # created, then replaced: S3 did so, but its answer does not come
        s3_faults.plan("lost", match=r"PUT /[^/]+/out/latest")
        saves.submit(snapshot(step))
        while saves.saved != step:
            saves.check()
    assert s3_faults.faults["lost"] == 2
    other.submit(snapshot(3))
    with pytest.raises(JobError) as caught:
        other.close()
    assert caught.value.code == 75 and "another attempt" in caught.value.message
    assert store.get_bytes(LATEST) == b"step-000002\n"
    saves.submit(snapshot(4))
    saves.close()
    assert store.get_bytes(LATEST) == b"step-000004\n"


@pytest.mark.s3
def test_a_torn_one_on_s3_is_passed_over_and_a_bad_copy_here_is_fetched_again(tmp_path, s3):
    store = open_store(f"{s3}/out")
    for step in (1, 2):
        saves = writer(store, tmp_path / str(step), remote=True)
        saves.submit(snapshot(step))
        saves.close()
    data = store.get_bytes(f"checkpoints/step-000002/{STATE}")
    store.put_bytes(f"checkpoints/step-000002/{STATE}", data[:-1])
    said = []
    found = find(store, tmp_path / "new", IDENTITY, said.append, True)
    assert found is not None and read(found).step == 1 and "step-000002" in said[0]
    (found / STATE).write_bytes(b"bad")
    assert read(find(store, tmp_path / "new", IDENTITY, said.append, True)).step == 1


@pytest.mark.s3
def test_metrics_travel_with_the_checkpoint(tmp_path, s3):
    store = open_store(f"{s3}/out")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    saves = writer(store, tmp_path, remote=True)
    saves.submit(snapshot(1))
    saves.close()
    assert json.loads(store.get_bytes("metrics.jsonl")) == {"step": 1}


def test_whatever_ends_the_thread_is_not_taken_for_a_save(tmp_path, monkeypatch):
    saves = writer(open_store(str(tmp_path)), tmp_path)
    monkeypatch.setattr(saves, "_save", lambda _: {}["of nobody"])
    saves.submit(snapshot(1))
    with pytest.raises(JobError, match="step 1: KeyError: 'of nobody'") as caught:
        saves.close()
    assert caught.value.code == 71


def test_a_disk_that_fails_ends_the_training_with_its_code(tmp_path):
    store = open_store(str(tmp_path))
    saves = writer(store, tmp_path)
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    (tmp_path / "checkpoints" / "step-000001").write_text("a file, where a directory is to be")
    saves.submit(snapshot(1))
    with pytest.raises(JobError) as caught:
        saves.close()
    assert caught.value.code == 73
    assert not (tmp_path / LATEST).exists()
