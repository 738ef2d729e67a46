"""The encoder in many processes: forks after its use, one check for all, and memory that does not grow."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from vocab import ROOT, qwen36_dir

# processes and memory

CHILD = """
import os, sys, random
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from tokenizer.encode import Encoder
from tokenizer.pieces import Piece, TextRow
encoder = Encoder.load(Path({directory!r}), {size})
def rows(n, length, seed, alphabet):
    rnd = random.Random(seed)
    return [TextRow(0, [Piece("".join(rnd.choices(alphabet, k=length)), None, 1, True)], [], None) for _ in range(n)]
def threads():
    return len(os.listdir("/proc/self/task"))
"""


def child(code: str, size: int) -> str:
    head = CHILD.format(root=str(ROOT), tests=str(ROOT / "tests"), directory=str(qwen36_dir()), size=size)
    run = subprocess.run(
        [sys.executable, "-c", head + code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("size", [0, 1 << 40])
def test_workers_forked_after_use_do_not_hang(size: int) -> None:
    code = """
first = encoder.encode(rows(400, 200, 0, "ab c\\n")).ids.tolist()
assert threads() == 1, threads()
children = []
for _ in range(2):
    pid = os.fork()
    if not pid:
        os._exit(0 if encoder.encode(rows(400, 200, 0, "ab c\\n")).ids.tolist() == first else 1)
    children.append(pid)
print([os.waitpid(pid, 0)[1] for pid in children])
"""
    assert child(code, size) == "[0, 0]\n"


def test_one_process_of_a_pod_makes_the_check_and_another_if_it_died() -> None:
    code = """
seen = []
def fork(check):
    pid = os.fork()
    if not pid:
        encoder._cross_check = check
        encoder.encode(rows(1, 9, 0, "ab"))
        os._exit(0)
    seen.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
fork(lambda *_: os.kill(os.getpid(), 9))
fork(lambda *_: seen.append("made"))
fork(lambda *_: os._exit(8))
print(seen)
encoder._check[:] = b"\\1\\0\\0\\0\\0"  # a living process is at it
fork(lambda *_: os._exit(8))
encoder._check[:] = bytes(5)
fork(lambda *_: os._exit(8))
print(seen)
"""
    assert child(code, 1 << 40) == "[-9, 0, 0]\n[-9, 0, 0, 0, 8]\n"


def test_long_words_leave_memory_flat() -> None:
    """The caches of the engine keep long words too, up to some 100 MB; unbounded they would grow by 30 MB here."""
    code = """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
start, seen = resident(), []
for seed in range(50):
    batch = rows(10, 60_000, seed, "abcdefghijklmnop") if seed < 5 else rows(1, 1_000_000, seed, "abcdefghijklmnopäö中文")
    encoder.encode(batch)
    seen.append(resident())
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(start, max(seen[:40]), max(seen[40:]), int(peak) >> 10)
"""
    start, first, second, peak = map(int, child(code, 1 << 40).split())
    assert second <= first + 8, (first, second)
    assert peak < start + 600 and peak < 700, (start, peak)
