"""A dataset that was damaged after it had succeeded is told by name, with a remedy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_fixtures import ctl, tokenize
from job_fixtures import answer, chat_line

from dflashctl import verify
from dflashctl.records import Out

SHARD = "data-00000-of-00002.arrow"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    for name in ("a", "b"):
        lines = [chat_line(f"{name}{n}", answer(n)) + "\n" for n in range(20)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "_SUCCESS").touch()
    (folder / "a.jsonl.tmp").write_text("half")
    done = tokenize(folder, ".", "./out", "--shards", "2", "--min-loss-tokens", "1")
    assert done.code == 0, done.err
    return folder / "out"


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "deleted": (SHARD, Path.unlink, "is missing"),
    "cut": (SHARD, lambda path: path.write_bytes(path.read_bytes()[:-9]), "were written"),
    "one bit": (SHARD, flipped, "another content"),
    "rejects": ("rejected/00001.jsonl", Path.unlink, "is missing"),
    "tokenizer": ("tokenizer/tokenizer.json", Path.unlink, "is missing"),
    "state": ("state.json", Path.unlink, "is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset, tmp_path / "out")
    file, change, words = DAMAGE[name]
    change(tmp_path / "out" / file)
    done = ctl(tmp_path, "inspect", "./out", "-o", "json")
    assert done.code == 4 and done.json()["rows"] == 40  # the report is made from the records, and is printed
    assert f"out/{file}` " in done.err and words in done.err and "hint: restore it" in done.err


@pytest.mark.parametrize("name", [name for name in DAMAGE if name != "one bit"])
def test_the_run_tells_of_it_too_by_its_name(name: str, tmp_path: Path) -> None:
    lines = [chat_line(f"q{n}", answer(n)) + "\n" for n in range(20)]
    for source in ("a", "b"):
        (tmp_path / f"{source}.jsonl").write_text("".join(lines))
    run = tokenize(tmp_path, ".", "./out", "--shards", "2", "--min-loss-tokens", "1", "-o", "name").out.strip()
    file, change, words = DAMAGE[name]
    change(tmp_path / "out" / file)
    for reference in (run, "./out"):
        told = ctl(tmp_path, "status", reference, "-o", "json")
        assert told.code == 0 and told.json()["state"] == "failed" and told.json()["rows"] == 40
        assert f"out/{file}` " in told.json()["reason"] and words in told.json()["reason"]
    assert ctl(tmp_path, "ls", "-o", "json").json()["runs"][0]["state"] == "failed"
    waited = ctl(tmp_path, "wait", run)
    assert waited.code == 3 and file in waited.err and f"`dflashctl why {run}`" in waited.err
    (cause,) = ctl(tmp_path, "why", run, "-o", "json").json()["causes"]
    assert cause["kind"] == "Damaged" and file in cause["message"] and cause["remedy"] == verify.REMEDY
    same = tokenize(tmp_path, ".", "./out", "--shards", "2", "--min-loss-tokens", "1")
    for again in (ctl(tmp_path, "resume", run), same):
        assert again.code == 4 and words in again.err and verify.REMEDY in again.err


def test_an_out_that_is_gone_is_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(chat_line(f"q{n}", answer(n)) + "\n" for n in range(20)))
    args = ("a.jsonl", "./out", "--min-loss-tokens", "1")
    run = tokenize(tmp_path, *args, "-o", "name").out.strip()
    shutil.rmtree(tmp_path / "out")
    told = ctl(tmp_path, "status", run, "-o", "json")
    assert told.code == 0 and told.json()["state"] == "failed" and "no plan any more" in told.json()["reason"]
    assert told.json()["rows"] == 0 and told.json()["indexes"]["succeeded"] == 0
    (cause,) = ctl(tmp_path, "why", run, "-o", "json").json()["causes"]
    assert "the same `dflashctl tokenize` again" in cause["remedy"]
    again = tokenize(tmp_path, *args, "-o", "json")
    assert again.code == 0 and again.json()["rows"] == 20


def test_a_whole_dataset_is_none(dataset: Path, tmp_path: Path) -> None:
    done = ctl(tmp_path, "inspect", str(dataset))
    assert done.code == 0 and "error" not in done.err and "warning" not in done.err
    assert "1 marker, 1 temporary" in done.out  # what the listing left out, beside the figures
    other = ctl(tmp_path, "inspect", str(dataset), "--against", str(dataset), "-o", "json")
    assert other.code == 0 and other.json()["same_rows"]


def test_hashes_of_large_datasets_are_left_to_their_readers(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(dataset, tmp_path / "out")
    flipped(tmp_path / "out" / SHARD)
    out = Out(str(tmp_path / "out"))
    record = out.dataset()
    assert record is not None
    assert len(list(verify.damage(out, record, hashes=True))) == 1
    assert not list(verify.damage(out, record, hashes=False))
    monkeypatch.setattr(verify, "HASHED_BYTES", 100)
    assert not list(verify.damage(out, record, hashes=True))


def test_doctor_looks_at_out_too(dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset, tmp_path / "out")
    (tmp_path / "out" / SHARD).unlink()
    (tmp_path / "dflash.toml").write_text('[tokenize]\nout = "./out"\n')
    done = ctl(tmp_path, "doctor", "-o", "json")
    (check,) = [check for check in done.json()["checks"] if check["name"] == "out"]
    assert done.code == 4 and check["state"] == "failed" and SHARD in check["detail"]


@pytest.mark.parametrize(("text", "words"), [("{}", "is not a record"), ('{"contract": 2}', "contract version 2")])
def test_a_record_of_something_else_is_refused_by_name(dataset: Path, tmp_path: Path, text: str, words: str) -> None:
    shutil.copytree(dataset, tmp_path / "out")
    (tmp_path / "out" / "dataset.json").write_text(text)
    for verb in ("inspect", "status"):
        done = ctl(tmp_path, verb, "./out")
        assert done.code == 4 and "out/dataset.json`" in done.err and words in done.err, done.err


def test_a_file_is_no_dataset(dataset: Path, tmp_path: Path) -> None:
    for file in (dataset / "dataset.json", dataset.parent / "a.jsonl"):
        done = ctl(tmp_path, "inspect", str(file))
        assert done.code == 4 and "is a file, not a dataset" in done.err and "--preview" in done.err


@pytest.mark.s3
def test_on_s3_too(s3: str, dataset: Path, tmp_path: Path) -> None:
    from tokenizer.store import open_store

    store = open_store(s3)
    for path in sorted(dataset.rglob("*")):
        if path.is_file():
            store.upload_file(path, f"out/{path.relative_to(dataset)}")
    for marker in ("out/", "out"):  # a folder marker, and an object of the very name of the prefix
        store.put_bytes(marker, b"")
    for uri in (f"{s3}/out", f"{s3}/out/"):
        whole = ctl(tmp_path, "inspect", uri, "-o", "json")
        assert whole.code == 0 and whole.json()["rows"] == 40, whole.err
    data = store.get_bytes(f"out/{SHARD}")
    store.put_bytes(f"out/{SHARD}", data[:100] + b"?" + data[101:])
    damaged = ctl(tmp_path, "inspect", f"{s3}/out")
    assert damaged.code == 4 and f"`{s3}/out/{SHARD}` has another content" in damaged.err
    store.delete(f"out/{SHARD}")
    assert "is missing" in ctl(tmp_path, "inspect", f"{s3}/out").err
    store.put_bytes("x.jsonl", b"{}")
    assert "is a file, not a dataset" in ctl(tmp_path, "inspect", f"{s3}/x.jsonl").err
