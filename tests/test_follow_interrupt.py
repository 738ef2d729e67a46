"""Ctrl-C ends every command within a second with 130, whatever it waits for; the run goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_fixtures import environment
from double.api import Double
from served import Typed, a_job, a_pod, deaf, put, silent, standing, write_kubeconfig
from vocab import tiny_dir

from dflashctl import interrupt

LIMIT_S = 1.0
PODS = 64
TOKENIZE = ["tokenize", "in", "--out", "out", "--image", "i", "--model"]
FOLLOWING = [
    ["status", "-w"], ["wait"], ["logs", "-f"], ["logs"], ["resume"], ["stop"], TOKENIZE, ["ls"], ["why"], ["rm", "run"],
    ["scale", "run", "--parallelism", "2"],
]  # fmt: skip


def typed(cwd: Path, args: list[str], **env: str) -> Typed:
    (cwd / "in").mkdir(exist_ok=True)
    (cwd / "in" / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    return Typed(cwd, *args, *([str(tiny_dir())] if args == TOKENIZE else []), **env)


@pytest.mark.parametrize("args", FOLLOWING, ids=lambda args: args[0] + "".join(a for a in args[1:2] if a[0] == "-"))
def test_while_an_api_server_is_silent(args: list[str], tmp_path: Path) -> None:
    with silent() as server:
        config = write_kubeconfig(tmp_path / "kubeconfig", server.port)
        process = typed(tmp_path, args, KUBECONFIG=str(config))
        assert server.asked.wait(60), process.err
        took = process.interrupt()
    assert process.process.returncode == 130 and took < LIMIT_S, (took, process.err)
    assert "error" not in process.err and "interrupted" in process.err


@pytest.mark.parametrize("args", [["wait"], ["logs", "-f"], TOKENIZE], ids=["wait", "logs", "tokenize"])
def test_while_it_connects(args: list[str], tmp_path: Path) -> None:
    with deaf() as port:
        config = write_kubeconfig(tmp_path / "kubeconfig", port)
        process = typed(tmp_path, args, KUBECONFIG=str(config))
        process.says("context here")
        time.sleep(1.0)  # into the connecting, past the import of the client
        took = process.interrupt()
    assert process.process.returncode == 130 and took < LIMIT_S, (took, process.err)


@pytest.mark.parametrize("verb", [["status", "-w"], ["wait"], ["resume"], ["stop"], ["status"]], ids=lambda v: v[0])
def test_while_the_bucket_does_not_answer(verb: list[str], tmp_path: Path) -> None:
    with silent() as bucket, standing(Double(tmp_path, namespace="default")) as double:
        put(double, "jobs", a_job("run", "s3://bucket/out", active=1))
        s3 = {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{bucket.port}", "AWS_ACCESS_KEY_ID": "a",
              "AWS_SECRET_ACCESS_KEY": "not-a-real-one", "AWS_CONFIG_FILE": "/dev/null"}  # fmt: skip
        process = typed(tmp_path, [verb[0], "run", *verb[1:]], KUBECONFIG=str(double.kubeconfig), **s3)
        assert bucket.asked.wait(60), process.err
        took = process.interrupt()
    assert process.process.returncode == 130 and took < LIMIT_S, (took, process.err)
    assert "Traceback" not in process.err


@pytest.mark.parametrize("args", [["status", "-w"], ["wait"], ["logs", "-f"]], ids=lambda args: args[0])
def test_while_many_pods_are_followed(args: list[str], tmp_path: Path) -> None:
    with standing(Double(tmp_path, namespace="default")) as double:
        job = a_job("run", str(tmp_path / "out"), PODS, active=PODS)
        put(double, "jobs", job)
        for index in range(PODS):
            pod = a_pod(job, index)
            put(double, "pods", pod)
            path = tmp_path / f"log-{index}"
            path.write_text(f"2026-01-01T00:00:00.{index:09d}Z hello from {index}\n")
            double.kubelet.logs[pod["metadata"]["name"]] = path
        process = typed(tmp_path, [args[0], "run", *args[1:]], KUBECONFIG=str(double.kubeconfig))
        for words in [f"hello from {i}\n" for i in range(PODS)] if args[0] == "logs" else ["run running"]:
            process.says(words)
        took = process.interrupt()
        there = double.cluster.get("jobs", "default", "run")
    assert process.process.returncode == 130 and took < LIMIT_S, (took, process.err)
    assert "detached, run `run` goes on" in process.err and there == job
    assert "pool is full" not in process.err and "error" not in process.err


STUBBORN = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from dflashctl import interrupt
interrupt.guard()
try:
    with ThreadPoolExecutor(2) as pool:
        pool.submit(time.sleep, 60)
        print("ready", flush=True)
        threading.Event().wait()
except KeyboardInterrupt:
    sys.exit(interrupt.leave(130))
"""
SWALLOWED = """
import time
from dflashctl import interrupt
interrupt.guard()
while True:
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        pass
"""
PROMPT = """
import atexit, sys, time
from dflashctl import interrupt
interrupt.guard()
atexit.register(time.sleep, 60)
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(interrupt.leave(130))
"""


@pytest.mark.parametrize("code", [STUBBORN, SWALLOWED, PROMPT], ids=["joins", "swallows", "exits"])
def test_whatever_the_main_thread_does(code: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        began = time.monotonic()
        process.send_signal(2)
        process.wait()
        took = time.monotonic() - began
        assert process.stderr is not None
        assert process.stderr.read() == ("" if code == PROMPT else f"{interrupt.WORDS}\n")
    assert process.returncode == 130 and took < LIMIT_S
