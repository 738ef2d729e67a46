"""Killed anywhere, any number of times, then resumed: the bytes of the undisturbed run, nothing lost, nothing twice."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import format_reader
import psutil
import pytest
from faultproxy import FaultProxy
from job_fixtures import answer, chat_line, contents, environment, prepare
from vocab import tiny_dir

from tokenizer.files import FileStore
from tokenizer.index import Model, load_model
from tokenizer.job import GateFlags, Spec, TokenizeArgs
from tokenizer.pod import Task, read_job, run_index
from tokenizer.store import Put, Store, open_store
from tokenizer.talk import Log

KILLS = 100
FILES, LINES, SHARDS = 12, 40, 6


def write_input(folder: Path) -> tuple[set[str], int]:
    """Good and bad lines; the ids that must come out, and how many lines must be rejected."""
    folder.mkdir()
    ids, bad = set(), 0
    for f in range(FILES):
        lines = []
        for n in range(1, LINES + 1):
            if (f + n) % 13 == 0:
                lines.append("{broken")
                bad += 1
            else:
                lines.append(chat_line(f"what is {n} of {f}?", answer(f * LINES + n)))
                ids.add(f"part-{f:03d}.jsonl:{n}#0")
        (folder / f"part-{f:03d}.jsonl").write_text("\n".join(lines) + "\n")
    return ids, bad


def prepared(out: str, source: str) -> TokenizeArgs:
    return prepare(out, source, shards=SHARDS, gate=GateFlags(max_reject=0.2))[1]


def pool(args: TokenizeArgs, state: Path, scratch: Path) -> subprocess.Popen[bytes]:
    argv = ["--state", str(state), "--jobs", "2", *args.to_argv()]
    argv[argv.index("--workers") + 1] = "2"
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tokenizer", "pool", *argv],
        env=environment(DFLASH_SCRATCH=str(scratch)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def check_rows(out: Path, ids: set[str], bad: int) -> None:
    """Against a count that knows nothing of the product."""
    rows, content = format_reader.read(out)
    dataset = json.loads((out / "dataset.json").read_bytes())
    assert len(rows) == len(ids) and {r["id"] for r in rows} == ids
    assert dataset["content_sha256"] == content
    assert dataset["lines"] == {"seen": len(ids) + bad, "kept": len(ids), "rejected": {"invalid_json": bad}}
    assert dataset["tokens"] == sum(len(r["input_ids"]) for r in rows)
    assert dataset["loss_tokens"] == sum(sum(r["loss_mask"]) for r in rows) == sum(r["n_loss"] for r in rows)
    # by name: a killed writer may leave a hidden unfinished file, which the next write of its name removes
    rejected = [line for path in (out / "rejected").glob("[0-9]*.jsonl") for line in path.read_text().splitlines()]
    assert len(rejected) == bad


def kill_at_random(process: subprocess.Popen[bytes], rng: random.Random, kills: int) -> int:
    """Kills processes of a pool until it has ended or `kills` are done; returns how many."""
    done = 0
    root = psutil.Process(process.pid)
    while done < kills and process.poll() is None:
        with contextlib.suppress(psutil.Error, subprocess.TimeoutExpired):
            process.wait(rng.uniform(0, 0.08))  # that long, unless it ends before
        with contextlib.suppress(psutil.Error):
            victims = root.children(recursive=True)
            if victims and rng.random() < 0.07:
                victims = [root]
            if victims:
                rng.choice(victims).kill()
                done += 1
    return done


def orphans(name: str) -> list[psutil.Process]:
    """Processes of a pool that outlived it; they end at their next message."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if name in (process.info["cmdline"] or ()):
            found.append(process)
    return found


def run_with_kills(args: TokenizeArgs, state: Path, scratch: Path, rng: random.Random, kills: int) -> int:
    """One run, killed and started again until it is through; returns the kills."""
    done = 0
    while True:
        process = pool(args, state, scratch)
        done += kill_at_random(process, rng, kills - done)
        err = process.communicate(timeout=120)[1]
        assert b"Traceback" not in err, err
        if process.returncode == 0:
            return done
        psutil.wait_procs(orphans(str(state)), timeout=60)


def test_a_hundred_kills_and_the_same_bytes(tmp_path: Path) -> None:
    rng = random.Random(20)
    ids, bad = write_input(tmp_path / "in")
    clean, scratch = tmp_path / "clean", tmp_path / "scratch"
    assert pool(prepared(str(clean), str(tmp_path / "in")), tmp_path / "state", scratch).wait(120) == 0
    check_rows(clean, ids, bad)
    expected = contents(str(clean))
    kills = rounds = 0
    while kills < KILLS:
        out = tmp_path / f"out-{rounds}"
        args = prepared(str(out), str(tmp_path / "in"))
        kills += run_with_kills(args, tmp_path / f"state-{rounds}", scratch, rng, KILLS - kills)
        assert contents(str(out)) == expected
        check_rows(out, ids, bad)
        rounds += 1
    assert kills == KILLS
    args = prepared(str(tmp_path / "last"), str(tmp_path / "in"))
    assert pool(args, tmp_path / "state-last", scratch).wait(120) == 0
    assert list(scratch.iterdir()) == []  # a start removes what the killed left behind


@pytest.mark.s3
def test_kills_while_every_tenth_call_to_s3_fails(s3: str, s3_faults: FaultProxy, tmp_path: Path) -> None:
    rng = random.Random(21)
    write_input(tmp_path / "in")
    bucket = open_store(s3)
    for path in (tmp_path / "in").iterdir():
        bucket.upload_file(path, f"raw/{path.name}")
    scratch = tmp_path / "scratch"
    clean = prepared(f"{s3}/clean", f"{s3}/raw")
    assert pool(clean, tmp_path / "state", scratch).wait(120) == 0
    args = prepared(f"{s3}/out", f"{s3}/raw")
    s3_faults.fail = 0.1
    kills = run_with_kills(args, tmp_path / "state-out", scratch, rng, 15)
    s3_faults.fail = 0.0
    assert kills and sum(s3_faults.faults.values())
    assert contents(f"{s3}/out") == contents(f"{s3}/clean")


# ---- every point between two writes


class Killing(FileStore):
    """Ends its own process before (or after) the given write, as a kill -9 would."""

    def __init__(self, root: str, write: int, after: bool) -> None:
        super().__init__(root)
        self.left = write
        self.after = after

    def _at(self, do: Callable[[], Any]) -> Any:
        self.left -= 1
        if self.left == 0 and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = do()
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def put_bytes(self, *args: Any, **kwargs: Any) -> Put:
        result: Put = self._at(lambda: super(Killing, self).put_bytes(*args, **kwargs))
        return result

    def upload_file(self, *args: Any, **kwargs: Any) -> Put:
        result: Put = self._at(lambda: super(Killing, self).upload_file(*args, **kwargs))
        return result

    def delete(self, key: str) -> None:
        self._at(lambda: super(Killing, self).delete(key))


def in_child(store: Store, args: TokenizeArgs, model: Model) -> int:
    """All indexes in a forked process; its wait status."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            task = Task(args, store, Log(io.StringIO()))
            job = read_job(store, args)
            for index in job.indexes:
                run_index(task, job, index, lambda folder: model)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_killed_between_any_two_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_SCRATCH", str(tmp_path / "scratch"))
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_text("\n".join([chat_line(f"q {n}", answer(n)) for n in range(12)]))
    (source / "b.jsonl").write_text("\n".join([chat_line(f"r {n}", answer(n + 50)) for n in range(12)]))
    model = load_model(tiny_dir(), Spec({}), 0)

    def fresh(name: str) -> tuple[str, TokenizeArgs]:
        out = str(tmp_path / name)
        _, args, _ = prepare(out, str(source), shards=2)
        return out, replace(args, workers=1)

    clean, args = fresh("clean")
    assert in_child(open_store(clean), args, model) == 0
    expected = contents(clean)
    write = 0
    while True:
        write += 1
        codes = set()
        for after in (False, True):
            out, args = fresh(f"out-{write}-{after}")
            codes.add(in_child(Killing(out, write, after), args, model))
            found = contents(out)
            if "dataset.json" in found:
                assert found == expected  # complete means complete
            if "commits/00000.json" in found:
                assert all(found[k] == expected[k] for k in ("data-00000-of-00002.arrow", "rejected/00000.jsonl"))
            assert in_child(open_store(out), args, model) == 0
            assert contents(out) == expected
        if codes == {0}:
            break
        assert codes == {-signal.SIGKILL}
    assert write == 1 + 2 * 4 + 4  # shard, rejects, commit and stats of two indexes; three closing files and a delete
