"""Servers for tests of commands that follow: objects that stand still, a server that is silent, one that is deaf."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from cli_fixtures import command, environment
from double.api import Double

MINE = {"app.kubernetes.io/managed-by": "dflashctl", "app.kubernetes.io/component": "tokenize"}


def write_kubeconfig(path: Path, port: int, token: str = "a-token") -> Path:
    """One context, named `here`, in namespace `default`."""
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "me", "user": {"token": token}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "default"}}],
    }  # fmt: skip
    path.write_text(yaml.safe_dump(config))
    return path


class Silent:
    """Takes connections and requests, and says nothing."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self.socket.getsockname()[1]
        self.asked = threading.Event()
        self._kept: list[socket.socket] = []

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                self._kept.append(connection)
                threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if connection.recv(1):
                self.asked.set()
            while connection.recv(65536):
                pass


@contextlib.contextmanager
def silent() -> Iterator[Silent]:
    server = Silent()
    threading.Thread(target=server.run, daemon=True).start()
    yield server
    server.socket.close()


@contextlib.contextmanager
def deaf() -> Iterator[int]:
    """A port whose queue of connections is full: connecting to it hangs."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()[1]


@contextlib.contextmanager
def standing(double: Double) -> Iterator[Double]:
    """The double's API alone: its controllers are not started, so objects change by the test's hand only."""
    threading.Thread(target=double.server.serve_forever, args=(0.05,), daemon=True).start()
    yield double
    double.server.shutdown()
    double.server.server_close()


def put(double: Double, plural: str, obj: dict[str, Any]) -> None:
    """Into the double's `default` namespace, resource version and uid as they are."""
    obj["metadata"].setdefault("namespace", "default")
    with double.cluster.lock:
        double.cluster.objects[(plural, "default", obj["metadata"]["name"])] = obj


def a_job(run: str, out: str, completions: int = 1, **status: Any) -> dict[str, Any]:
    """A Job of ours over the plan's first indexes."""
    return {
        "kind": "Job", "apiVersion": "batch/v1",
        "metadata": {
            "name": run, "namespace": "default", "uid": f"uid-{run}", "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"dflashctl/run": run, **MINE},
            "annotations": {"dflashctl/out": out, "dflashctl/indexes": f"0-{completions - 1}"},
        },
        "spec": {"completions": completions, "parallelism": completions, "completionMode": "Indexed",
                 "template": {"spec": {}}}, "status": status,
    }  # fmt: skip


def a_pod(job: dict[str, Any], index: int, phase: str = "Running", **status: Any) -> dict[str, Any]:
    name = job["metadata"]["name"]
    return {
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-{index}-abcde", "namespace": "default", "uid": f"pod-{name}-{index}",
            "creationTimestamp": "2026-01-01T00:00:01Z",
            "labels": {"batch.kubernetes.io/job-completion-index": str(index), "batch.kubernetes.io/job-name": name,
                       "dflashctl/run": name},
            "ownerReferences": [{"uid": job["metadata"]["uid"]}],
        },
        "spec": {"nodeName": "node-a", "containers": [{"name": "tokenizer"}]},
        "status": {"phase": phase, **status},
    }  # fmt: skip


class Typed:
    """A command in the background, its output in files."""

    def __init__(self, cwd: Path, *args: str, **env: str) -> None:
        self.files = [cwd / f"{name}-{time.monotonic_ns()}" for name in ("out", "err")]
        with self.files[0].open("wb") as out, self.files[1].open("wb") as err:
            self.process = subprocess.Popen(
                command(*args), cwd=cwd, env=environment(DFLASH_BACKEND="kube", **env), stdout=out, stderr=err
            )

    @property
    def out(self) -> str:
        return self.files[0].read_text(errors="replace")

    @property
    def err(self) -> str:
        return self.files[1].read_text(errors="replace")

    def says(self, words: str, seconds: float = 60.0) -> None:
        """Wait until the words stand in its output."""
        end = time.monotonic() + seconds
        while words not in self.out + self.err:
            assert self.process.poll() is None and time.monotonic() < end, (words, self.out, self.err)
            time.sleep(0.02)

    def interrupt(self) -> float:
        """Ctrl-C; seconds until the process is gone."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        self.process.wait()
        return time.monotonic() - began

    def end(self, seconds: float = 60.0) -> int:
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()
