"""An OUT leads to its run from every directory of the machine, and says what was done too late for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from cli_fixtures import command, ctl, environment, tokenize
from job_fixtures import answer, chat_line, contents, write_corpus
from test_local import state_dir, until

from dflashctl.backends.base import Known
from dflashctl.runs import known_of
from tokenizer.job import RunRecord

ARGS = ("--shards", "4", "--parallelism", "2", "--workers", "1")


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path, str]:
    """Where a run is started, another directory, and the OUT."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    write_corpus(tmp_path / "in", 4, 3000)
    return tmp_path / "here", tmp_path / "there", str(tmp_path / "out")


def test_a_live_run_is_seen_followed_and_stopped_from_another_directory(places: tuple[Path, Path, str]) -> None:
    here, there, out = places
    source = str(here.parent / "in")
    assert tokenize(here, source, out, *ARGS, "--detach").code == 0
    pool = json.loads((state_dir(here) / "started.json").read_text())["pid"]
    os.killpg(pool, signal.SIGSTOP)  # it is alive, and gets no further
    seen = ctl(there, "status", out, "-o", "json")
    assert seen.json()["state"] in ("pending", "running") and f"was started in {here}" in seen.err
    again = tokenize(there, source, out, *ARGS, "--detach")
    assert again.code == 0 and "is running already" in again.err and not list(there.glob(".dflash/runs/*"))
    with subprocess.Popen(command("stop", out), cwd=there, env=environment(), stderr=subprocess.PIPE) as stop:
        until(lambda: (state_dir(here) / "suspended.json").exists())
        os.killpg(pool, signal.SIGCONT)
        _, said = stop.communicate(timeout=120)
    assert stop.returncode == 0 and b"suspended" in said
    assert ctl(here, "status", "-o", "json").json()["state"] == "suspended"
    assert ctl(there, "logs", out).code == 0
    done = ctl(there, "resume", out, "-o", "json")
    assert (done.code, done.json()["state"]) == (0, "succeeded"), done.err
    assert [path.name for path in Path(out, "runs").iterdir()] == [f"{done.json()['run']}.json"]  # its Job went on


def record(**flags: str) -> RunRecord:
    return RunRecord("tok-a-r2", 2, (0,), flags={"backend": "local", **flags})


def test_which_directory_keeps_a_run(tmp_path: Path) -> None:
    here = Known("tok-a", "tokenize", "/out", "tok-a-r2", 5.0)
    old = Known("tok-a", "tokenize", "/out", "tok-a", 5.0)
    host = os.uname().nodename
    flags = {"host": host, "home": str(tmp_path)}
    assert known_of(record(**flags), "/out", [here]) == here  # this one has the newest Job itself
    assert known_of(record(**flags), "/out", [old]).home == str(tmp_path)
    assert known_of(record(**flags), "/out", []).home == str(tmp_path)
    other = known_of(record(host="box-7", home="/work/.dflash"), "/out", [])
    assert (other.home, other.away) == ("", "on box-7 in /work")
    assert known_of(record(), "/out", []) == Known("tok-a", "tokenize", "/out", "tok-a-r2", 0.0)


def test_the_other_machine_is_named(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 2, 20)
    assert tokenize(tmp_path, "in", "./out", "--name", "a").code == 0
    for name in ("dataset.json", "commits/00000.json"):  # as if it went on over there
        (tmp_path / "out" / name).unlink()
    path = tmp_path / "out" / "runs" / "a.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "flags": {**kept["flags"], "host": "box-7", "home": "/work/.dflash"}}))
    (tmp_path / "elsewhere").mkdir()
    seen = ctl(tmp_path / "elsewhere", "status", "../out", "-o", "json").json()
    assert seen["state"] == "deleted" and "last started on box-7 in /work" in seen["reason"]
    done = ctl(tmp_path / "elsewhere", "resume", "../out")
    assert done.code == 0 and "if it goes on there" in done.err


# what comes too late


def spoilt(folder: Path) -> Path:
    """An input of which 1 line in 5 is no JSON: refused."""
    path = folder / "in" / "a.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [chat_line(f"q{n}", answer(n)) if n % 5 else "{" for n in range(40)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_mended_file_of_a_refused_dataset_goes_into_another_out(tmp_path: Path) -> None:
    path = spoilt(tmp_path)
    refused = tokenize(tmp_path, "in", "./out")
    assert refused.code == 3 and "mended input goes into another --out" in refused.err
    path.write_text("".join(chat_line(f"q{n}", answer(n)) + "\n" for n in range(40)))
    again = tokenize(tmp_path, "in", "./out")
    assert again.code == 5 and str(path) in again.err and "choose another --out: every index" in again.err
    resumed = ctl(tmp_path, "resume")
    assert resumed.code == 3 and f"`{path}` has changed since it was read" in resumed.err
    assert "choose another --out" in resumed.err
    assert tokenize(tmp_path, "in", "./out2").code == 0
    allowed = ctl(tmp_path, "resume", "./out", "--max-reject", "0.5", "-o", "json")
    assert allowed.code == 0 and allowed.json()["lines_rejected"] == {"invalid_json": 8}


def test_what_is_asked_of_a_complete_dataset_is_not_passed_over(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 2, 20)
    assert tokenize(tmp_path, "in", "./out", "--shards", "2").code == 0
    before = contents(str(tmp_path / "out"))
    first = tmp_path / "in" / "part-000.jsonl"
    skipped = ctl(tmp_path, "resume", "--skip-file", "part-000.jsonl")
    assert skipped.code == 0 and f"`--skip-file {first}` is not applied" in skipped.err
    assert ctl(tmp_path, "resume", "--skip-file", "nothing.jsonl").code == 2
    first.write_text(first.read_text() + chat_line("q", answer(1)) + "\n")
    changed = ctl(tmp_path, "resume")
    assert changed.code == 0 and f"`{first}` has changed since it was read, and is not read again" in changed.err
    first.unlink()
    gone = ctl(tmp_path, "resume")
    assert gone.code == 0 and "warning" not in gone.err and "unchanged" in gone.err
    assert contents(str(tmp_path / "out")) == before


def test_an_out_that_cannot_be_finalised_has_failed(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 2, 20)
    (tmp_path / "out" / "dataset_info.json" / "in-the-way").mkdir(parents=True)
    done = tokenize(tmp_path, "in", "./out", "--shards", "2", "-o", "json")
    assert (done.code, done.json()["state"]) == (3, "failed") and "dataset_info.json" in done.err, done.err
    state = next((tmp_path / ".dflash").glob("runs/*/*/pool.json"))
    state.write_text(json.dumps({**json.loads(state.read_text()), "state": "succeeded", "reason": ""}))
    seen = ctl(tmp_path, "wait", "--timeout", "60s")
    assert seen.code == 3 and "the dataset is not finalised" in seen.err and "dataset_info.json" in seen.err
    (tmp_path / "out" / "dataset_info.json" / "in-the-way").rmdir()
    (tmp_path / "out" / "dataset_info.json").rmdir()
    assert ctl(tmp_path, "resume").code == 0
