"""The live table on a real terminal, full and narrow; Ctrl-C leaves it, and it can be attached to again."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_fixtures import command, environment
from double.api import Double
from served import a_job, a_pod, put, standing

from dflashctl.follow import index_table
from dflashctl.progress import Index
from dflashctl.runs import Status

COLUMNS = ["index", "state", "try", "pod", "node", "rows", "tokens", "tokens/s", "read", "ETA", "reason"]
RUN = "tok-completions-0a1b2c3d"
SAID = {"event": "progress", "rows": 1200, "tokens": 450_000, "bytes": 25, "total_bytes": 100, "tokens_per_s": 45_000.0}


@contextlib.contextmanager
def terminal(cwd: Path, columns: int, *args: str, **env: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command on a terminal of its own: (process, the terminal's other end)."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    given = environment(DFLASH_BACKEND="kube", TERM="xterm", **env)
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        given.pop(name, None)
    process = subprocess.Popen(
        command(*args), cwd=cwd, env=given, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    try:
        yield process, master
    finally:
        process.kill()
        process.wait()
        os.close(master)


def shown(master: int, pattern: str, seconds: float = 120.0) -> str:
    """What the terminal showed up to the pattern."""
    seen, end = "", time.monotonic() + seconds
    while not re.search(pattern, seen):
        assert time.monotonic() < end, seen
        if select.select([master], [], [], 1.0)[0]:
            with contextlib.suppress(OSError):
                seen += os.read(master, 65536).decode("utf-8", "replace")
    return seen


def lines_of(text: str) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).rstrip("\r") for line in text.split("\n")]


@pytest.mark.parametrize("columns", [200, 80])
def test_the_live_table_on_a_terminal(columns: int, tmp_path: Path) -> None:
    with standing(Double(tmp_path, namespace="default")) as double:
        job = a_job(RUN, str(tmp_path / "out"), 2, active=2)
        put(double, "jobs", job)
        log = tmp_path / "log"
        log.write_text(f"2026-01-01T00:00:00.000000000Z {json.dumps(SAID)}\n")
        waits = {"name": "tokenizer", "state": {"waiting": {"reason": "ErrImagePull", "message": "no"}}}
        for pod in (a_pod(job, 0), a_pod(job, 1, "Pending", containerStatuses=[waits])):
            pod["spec"]["nodeName"] = "node-a.cluster.internal"
            put(double, "pods", pod)
        double.kubelet.logs[f"{RUN}-0-abcde"] = log
        config = {"KUBECONFIG": str(double.kubeconfig)}
        with terminal(tmp_path, columns, "status", RUN, "-w", **config) as (process, master):
            seen = lines_of(shown(master, r"ErrImagePull[^\n]*\n(.*\n)*.*stuck[^\n]*\n|1 +stuck[^\n]*\n"))
            assert max(map(len, seen)) <= columns
            header = next(line for line in seen if line.startswith("index "))
            running = next(line.split() for line in seen if re.match(r" +0  running ", line))
            if columns == 200:
                assert header.split() == COLUMNS
                pod, node = f"{RUN}-0-abcde", "node-a.cluster.internal"
                assert running == ["0", "running", "1", pod, node, "1,200", "450,000", "45.0", "k", "25%", "30s"]
                assert next(line.split()[-1] for line in seen if " stuck " in line) == "ErrImagePull"
            else:
                assert header.split()[:9] == COLUMNS[:9] and running[3:5] == ["0-abcde", "node-a"]
            began = time.monotonic()
            os.write(master, b"\x03")  # Ctrl-C as a terminal sends it
            process.wait()
            assert process.returncode == 130 and time.monotonic() - began < 1.0
            assert "goes on" in shown(master, "goes on")
        with terminal(tmp_path, columns, "status", RUN, "-w", **config) as (process, master):
            shown(master, "running")
            failed = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}
            put(double, "jobs", {**job, "status": {"conditions": [failed]}})
            assert "DeadlineExceeded" in shown(master, "DeadlineExceeded")
            assert process.wait() == 0


def test_runs_of_this_machine_have_neither_pods_nor_nodes() -> None:
    status = Status("r", "tokenize", "o", "running", indexes=(Index(3, "running", 1, message={"rows": 5}),))
    assert index_table(status)[0].split() == [
        "index",
        "state",
        "try",
        "rows",
        "tokens",
        "tokens/s",
        "read",
        "ETA",
        "reason",
    ]
    assert index_table(Status("r", "tokenize", "o", "pending")) == []


def test_the_jobs_own_index_shows_in_wide_alone() -> None:
    status = Status("r", "tokenize", "o", "running", indexes=(Index(7, "running", 1, pod="r-r2-0-x", own=0),))
    assert "completion" not in index_table(status)[0]
    header, row = index_table(status, wide=True)
    assert dict(zip(header.split(), row.split(), strict=False))["completion"] == "0"
