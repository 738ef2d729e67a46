"""Runs on this machine outlive the command, survive kills, and end in the same bytes whatever happened to them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import Done, command, ctl, environment, tokenize
from job_fixtures import contents, write_corpus
from vocab import tiny_dir

from dflashctl.backends.base import Submission
from dflashctl.backends.local import LocalBackend, fold, read_indexes
from dflashctl.errors import Detached
from dflashctl.progress import Index

LINES = 3000  # of each of four files: some seconds of work, so that there is something to kill


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), 4, LINES)


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The dataset's objects when nothing happens to its run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert tokenize(folder, str(corpus), "out", "--shards", "4", "--parallelism", "2").code == 0
    return contents(str(folder / "out"))


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true value of the condition; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def state_dir(cwd: Path) -> Path:
    """The state directory of the newest Job of the only run."""
    (run,) = (cwd / ".dflash" / "runs").iterdir()
    record = json.loads((run / "run.json").read_text())
    return run / str(record["jobs"][-1]["job"])


def running(cwd: Path) -> list[int]:
    """Process ids of the indexes that are at work."""
    records = [json.loads(path.read_text()) for path in state_dir(cwd).glob("index-*.json")]
    return [r["pid"] for r in records if r["state"] == "running" and r["pid"]]


def held(cwd: Path) -> list[int]:
    """The processes of indexes that stand still from now on; [] where all were done before."""
    pids = running(cwd)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        until(lambda pid=pid: process(pid, "State")[:1] in ("T", "Z", ""))
    return [pid for pid in pids if process(pid, "State")[:1] == "T"]


def process(pid: int, field: str) -> str:
    """A field of the kernel's record of a process; empty for one that is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{field}:"))
    return ""


def stop(cwd: Path) -> Done:
    """`stop` of a run that is not over before it: its indexes stand still until SIGTERM waits for them."""
    pids = until(lambda: held(cwd))
    command_line = subprocess.Popen(
        command("stop", "-o", "json"), cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for pid in pids:
        until(lambda pid=pid: int(process(pid, "ShdPnd") or "0", 16) >> (signal.SIGTERM - 1) & 1)
        os.kill(pid, signal.SIGCONT)
    out, err = command_line.communicate(timeout=60)
    return Done(command_line.returncode, out, err)


def start(cwd: Path, corpus: Path) -> None:
    done = tokenize(cwd, str(corpus), "out", "--shards", "4", "--parallelism", "2", "--workers", "1", "--detach")
    assert done.code == 0, done.err


def status(cwd: Path) -> dict[str, Any]:
    return ctl(cwd, "status", "-o", "json").json()


def test_a_killed_pool_is_seen_and_resume_does_what_is_missing(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    start(tmp_path, corpus)
    until(lambda: running(tmp_path))
    os.kill(json.loads((state_dir(tmp_path) / "pool.json").read_text())["pid"], signal.SIGKILL)
    until(lambda: status(tmp_path)["state"] != "running")
    seen = status(tmp_path)
    if seen["state"] != "succeeded":  # a worker that is all but done may still finish
        assert seen["state"] == "failed" and "killed" in seen["reason"]
        assert ctl(tmp_path, "wait").code == 3
        resumed = ctl(tmp_path, "resume", "-o", "json")
        assert resumed.code == 0, resumed.err
    assert contents(str(tmp_path / "out")) == undisturbed


def test_killed_workers_are_tried_again(corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    start(tmp_path, corpus)
    for pid in until(lambda: running(tmp_path)):
        os.kill(pid, signal.SIGKILL)
    assert ctl(tmp_path, "wait", "--timeout", "2m").code == 0
    assert contents(str(tmp_path / "out")) == undisturbed
    assert any(r["try"] for r in (json.loads(p.read_text()) for p in state_dir(tmp_path).glob("index-*.json")))


def test_stop_and_resume(corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    start(tmp_path, corpus)
    stopped = stop(tmp_path)
    assert stopped.code == 0 and stopped.json()["state"] == "suspended", stopped.err
    assert not (tmp_path / "out" / "dataset.json").exists()
    [cause] = ctl(tmp_path, "why", "-o", "json").json()["causes"]
    assert cause["kind"] == "Suspended" and cause["remedy"] == f"`dflashctl resume {stopped.json()['run']}`"
    assert ctl(tmp_path, "stop").code == 0  # again: nothing to do
    assert ctl(tmp_path, "wait", "--timeout", "0s").code == 124
    resumed = ctl(tmp_path, "resume", "-o", "json")
    assert resumed.code == 0 and resumed.json()["rows"] == 4 * LINES
    assert [p.name for p in (tmp_path / "out" / "runs").iterdir()] == [f"{resumed.json()['run']}.json"]
    assert contents(str(tmp_path / "out")) == undisturbed


@pytest.mark.parametrize("how", ["tokenize", "resume"])
def test_out_is_enough_when_the_local_state_is_lost(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path, how: str
) -> None:
    start(tmp_path, corpus)
    assert stop(tmp_path).code == 0
    shutil.rmtree(tmp_path / ".dflash")
    lost = ctl(tmp_path, "status", "./out", "-o", "json")
    assert lost.code == 0 and lost.json()["state"] == "deleted"
    kept = ctl(tmp_path, "logs", "./out", "--grep", "SIGTERM")  # the tails that the workers stored in OUT
    assert kept.code == 0 and "stopped by SIGTERM" in kept.out
    if how == "tokenize":
        done = tokenize(tmp_path, str(corpus), "out", "--shards", "4", "-o", "json")
    else:
        done = ctl(tmp_path, "resume", "./out", "-o", "json")
    assert done.code == 0 and done.json()["rows"] == 4 * LINES, done.err
    assert sorted(p.name for p in (tmp_path / "out" / "runs").iterdir()) == [
        f"{done.json()['run']}-r2.json",
        f"{done.json()['run']}.json",
    ]
    assert contents(str(tmp_path / "out")) == undisturbed


def test_a_lost_out_begins_anew_though_the_local_state_is_there(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 2, 8)
    assert tokenize(tmp_path, "in", "out").code == 0
    shutil.rmtree(tmp_path / "out")
    assert status(tmp_path)["state"] != "succeeded"
    again = tokenize(tmp_path, "in", "out", "-o", "json")
    assert again.code == 0 and again.json()["rows"] == 16


def test_a_bad_file_ends_its_index_alone_and_can_be_skipped_or_mended(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 3, 20)
    bad = tmp_path / "in" / "part-001.jsonl.gz"
    (tmp_path / "in" / "part-001.jsonl").unlink()
    bad.write_bytes(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03cut")
    failed = tokenize(tmp_path, "in", "out", "--shards", "3", "-o", "json")
    assert failed.code == 3 and failed.json()["state"] == "failed" and failed.json()["rows"] == 40
    assert "part-001.jsonl.gz" in failed.err
    seen = status(tmp_path)
    assert seen["state"] == "failed" and seen["indexes"]["failed"] == [1] and "part-001.jsonl.gz" in seen["reason"]
    assert "part-001.jsonl.gz" in ctl(tmp_path, "logs", "--failed").out
    part = ctl(tmp_path, "inspect", "out")
    assert part.out.endswith("\nnot complete (2 of 3 indexes)\n") and "degenerate" not in part.out
    assert "not complete (2 of 3 indexes)" in ctl(tmp_path, "report", "out").out
    assert "no row is left" not in ctl(tmp_path, "inspect", "out", "-o", "json").out
    beyond = ctl(tmp_path, "logs", "--index", "9")
    assert beyond.code == 2 and "its indexes are 0-2" in beyond.err
    shutil.copytree(tmp_path, tmp_path / "other", symlinks=True)
    assert ctl(tmp_path, "resume", "--skip-file", "no-such.jsonl").code == 2
    assert ctl(tmp_path, "resume", "--skip-file", "part-000.jsonl").code == 2  # has its commit
    skipped = ctl(tmp_path, "resume", "--skip-file", "./in/part-001.jsonl.gz", "-o", "json")
    assert skipped.code == 0 and skipped.json()["rows"] == 40, skipped.err
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["skipped"] == [str(bad)]


def test_a_mended_file_is_pinned_anew(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 2, 20)
    bad = tmp_path / "in" / "part-001.jsonl"
    good = bad.read_text()
    bad.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    failed = tokenize(tmp_path, "in", "out", "--shards", "2")
    assert failed.code == 3 and "part-001.jsonl" in failed.err
    bad.write_text(good)
    changed = tokenize(tmp_path, "in", "out", "--shards", "2")
    assert changed.code == 5 and "part-001.jsonl" in changed.err and "resume" in changed.err
    resumed = ctl(tmp_path, "resume", "-o", "json")
    assert resumed.code == 0 and resumed.json()["rows"] == 40 and "part-001.jsonl" in resumed.err
    unchanged = tokenize(tmp_path, "in", "out", "--shards", "2")
    assert unchanged.code == 0 and "unchanged" in unchanged.err


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 1, 8)
    (tmp_path / "in" / "bad.jsonl").write_text("[\n{}\n]\n")
    assert tokenize(tmp_path, "in", "out", "--shards", "2").code == 3
    (tmp_path / "in" / "bad.jsonl").unlink()
    gone = ctl(tmp_path, "resume")
    assert gone.code == 4 and "bad.jsonl" in gone.err and "--skip-file" in gone.err
    assert ctl(tmp_path, "resume", "--skip-file", "bad.jsonl").code == 0


def test_modules_in_the_users_directory_are_not_what_runs(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 1, 8)
    for name in ("tokenizer.py", "json.py", "orjson.py"):
        (tmp_path / name).write_text("raise SystemExit('hijacked')\n")
    code = "from dflashctl.__main__ import main; raise SystemExit(main())"
    args = ["tokenize", "in", "--out", "out", "--model", str(tiny_dir())]
    done = subprocess.run(
        [command()[0], "-P", "-c", code, *args],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "hijacked" not in done.stderr, done.stderr


def test_submits_at_once_start_one_job_and_all_follow_it(corpus: Path, tmp_path: Path) -> None:
    args = ["tokenize", str(corpus), "--out", "out", "--model", str(tiny_dir()), "--shards", "4", "-o", "json"]
    many = [
        subprocess.Popen(
            command(*args), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(3)
    ]
    ends = [(p.communicate(timeout=180), p.returncode) for p in many]
    assert [code for _, code in ends] == [0, 0, 0], ends
    assert (tmp_path / "out" / "dataset.json").exists()
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 1


def test_a_directory_that_cannot_be_written_is_said_before_anything_is(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "in", 1, 20)
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / ".dflash").touch()
    failed = tokenize(tmp_path / "cwd", str(corpus), "../out")
    assert failed.code == 4 and f"`{tmp_path / 'cwd' / '.dflash'}`" in failed.err, failed.err
    assert not (tmp_path / "out").exists()


def test_what_ended_the_pool_itself_is_why(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 1, 20)
    (tmp_path / "full").touch()
    assert tokenize(tmp_path, "in", "out", DFLASH_SCRATCH=str(tmp_path / "full" / "x")).code == 3
    (cause,) = ctl(tmp_path, "why", "-o", "json").json()["causes"]
    assert str(tmp_path / "full" / "x") in cause["message"]
    assert "DFLASH_SCRATCH" in cause["remedy"] and "resume" in cause["remedy"]
    assert tokenize(tmp_path, "in", "out").code == 0
    (tmp_path / "out" / "dataset.json").unlink()
    (tmp_path / "out" / "commits" / "00000.json").unlink()
    (tmp_path / "out" / "tokenizer" / "tokenizer.json").write_text("{}")
    assert ctl(tmp_path, "resume").code == 3
    (cause,) = ctl(tmp_path, "why", "-o", "json").json()["causes"]
    assert cause["remedy"] == "run the same `dflashctl tokenize` again"
    assert tokenize(tmp_path, "in", "out").code == 0


def test_ctrl_c_while_a_pool_starts_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalBackend, "_await_start", interrupted)
    monkeypatch.setattr(LocalBackend, "_command", lambda self, submission: ["true"])
    with pytest.raises(Detached, match="`r` was being started"):
        LocalBackend(tmp_path).submit(Submission("r", "r", "out", (), (0,), 1))


def test_a_local_record_of_something_else_is_left_out(tmp_path: Path) -> None:
    for name, text in (("a", "{"), ("b", '{"run": "b"}')):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text(text)
    assert LocalBackend(tmp_path).runs() == []


def test_a_stopped_run_tells_whoever_follows_it_how_to_go_on(corpus: Path, tmp_path: Path) -> None:
    args = ["tokenize", str(corpus), "--out", "out", "--model", str(tiny_dir()), "--shards", "4", "--workers", "1"]
    follower = subprocess.Popen(
        command(*args), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until(lambda: list(tmp_path.glob(".dflash/runs/*/run.json")) and running(tmp_path))
    assert stop(tmp_path).code == 0
    _, err = follower.communicate(timeout=60)
    assert follower.returncode == 3 and "suspended" in err and "`dflashctl resume tok-out-" in err, err


# ---- the fold, pure


def index(number: int, state: str, **more: Any) -> Index:
    return Index(number, state, **more)


@pytest.mark.parametrize(
    ("pool", "alive", "suspended", "state"),
    [
        (None, True, False, "pending"),
        ({"state": "running"}, True, False, "running"),
        ({"state": "succeeded"}, False, False, "succeeded"),
        ({"state": "succeeded"}, False, True, "succeeded"),
        ({"state": "stopped"}, False, True, "suspended"),
        ({"state": "stopped"}, False, False, "suspended"),
        ({"state": "running"}, False, True, "suspended"),
        ({"state": "running"}, False, False, "failed"),
        ({"state": "failed", "reason": "index 3: bad"}, False, False, "failed"),
        (None, False, False, "failed"),
    ],
)
def test_the_state_of_a_job(pool: dict[str, Any] | None, alive: bool, suspended: bool, state: str) -> None:
    assert fold(pool, alive, suspended, {}, [0, 1]).state == state


def test_nothing_runs_in_a_job_whose_processes_are_gone() -> None:
    indexes = {
        0: index(0, "succeeded", message={"rows": 5}),
        1: index(1, "running", message={"rows": 3}),
        2: index(2, "failed"),
    }
    snapshot = fold({"state": "running"}, False, False, indexes, [0, 1, 2])
    assert [i.state for i in snapshot.indexes] == ["succeeded", "pending", "failed"]
    assert snapshot.active == 0 and snapshot.failed == (2,) and snapshot.indexes[1].message == {}
    assert "killed" in snapshot.reason


def test_half_written_and_foreign_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "index-00000.json").write_text('{"index": 0, "state": "running", "try": 1, "pid": 7}')
    (tmp_path / "index-00001.json").write_text('{"index": 1, "sta')
    found = read_indexes(tmp_path)
    assert list(found) == [0] and found[0].tries == 2


def test_logs_are_followed_to_their_last_line(tmp_path: Path) -> None:
    logs = tmp_path / "runs" / "r" / "r" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "runs" / "r" / "run.json").write_text(json.dumps({"jobs": [{"job": "r"}]}))
    (logs / "00000-0.txt").write_bytes(b"old\n")
    (logs / "00000-1.txt").write_bytes("first\nsecond [/x]\ntorn \u00e9".encode()[:-1])
    backend = LocalBackend(tmp_path)
    assert [line.text for line in backend.logs("r", None, False, True)] == ["first", "second [/x]", "torn \ufffd"]
    assert [line.text for line in backend.logs("r", [0], True, False)] == ["old"]
    assert list(backend.logs("r", [1], False, False)) == []
