"""Forked workers, their number, and the room they work in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from job_fixtures import (
    ROOT,
)

from tokenizer import workers
from tokenizer.job import Exit, JobError
from tokenizer.scratch import PREFIX, scratch

# ---- parts


def test_scratch_of_the_killed_is_removed_and_of_the_living_is_not(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from tokenizer.scratch import scratch\n"
        f"with scratch(pathlib.Path({str(tmp_path)!r})) as folder:\n"
        "    (folder / 'big').write_bytes(b'x'); print(folder, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    theirs = Path(process.stdout.readline().strip())
    with scratch(tmp_path) as mine:
        assert theirs.exists() and mine.exists() and mine != theirs
    process.kill()
    process.communicate()
    assert theirs.exists()
    with scratch(tmp_path):
        assert not theirs.exists()
    assert list(tmp_path.glob(f"{PREFIX}*")) == []


def test_scratch_goes_even_if_the_tidying_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = shutil.rmtree, []

    def interrupted(path: Path, ignore_errors: bool) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(path, ignore_errors=ignore_errors)

    with pytest.raises(KeyboardInterrupt), scratch(tmp_path) as folder:
        (folder / "big").write_bytes(b"x")
        monkeypatch.setattr("tokenizer.scratch.shutil.rmtree", interrupted)
    assert list(tmp_path.iterdir()) == []


def test_workers_do_every_task_once_and_the_first_error_ends_all() -> None:
    seen: list[dict[str, int]] = []
    before = psutil.Process().children()

    def work(next_task: Any, report: Any) -> None:
        while (task := next_task()) is not None:
            if task == 999:
                raise JobError(Exit.DATA, "task 999", "leave it out")
            report({"task": task})

    workers.run(range(100), 4, work, seen.append)
    assert sorted(s["task"] for s in seen) == list(range(100))
    with pytest.raises(workers.WorkerFailed) as error:
        workers.run([1, 999, 2], 2, work, seen.append)
    assert (error.value.code, error.value.message, error.value.hint) == (Exit.DATA, "task 999", "leave it out")
    assert psutil.Process().children() == before


def test_forked_workers_take_no_huge_pages_and_leave_their_parent_as_it_was() -> None:
    def huge_pages() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("THP_enabled:")))

    def work(next_task: Any, report: Any) -> None:
        while next_task() is not None:
            report({"huge": huge_pages(), "tasks": 1})

    before, told = huge_pages(), []
    workers.run(range(4), 2, work, told.append)
    assert told == [{"huge": 0, "tasks": 1}] * 4
    assert huge_pages() == before


def test_cpus_are_those_of_the_cgroup(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert list(workers._quotas(str(tmp_path))) == [1.5]
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("400000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert list(workers._quotas(str(tmp_path))) == [4.0]
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert list(workers._quotas(str(tmp_path))) == []
    assert 1 <= workers.cpus() <= (os.cpu_count() or 1)
