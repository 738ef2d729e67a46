"""Where the cluster suite runs: on the double with pods as processes, or on the cluster of DFLASH_TEST_KUBECONFIG.

On a real cluster these may be set, else the defaults are tried:
    DFLASH_TEST_IMAGE       tokenizer image that its nodes can start; default localhost/dflash-tokenizer:<version>
    DFLASH_TEST_NAMESPACE   must exist; default the context's
    DFLASH_TEST_S3_HOST     address under which its pods reach this machine, where the S3 server runs
Its Secret, service account and Jobs are made in that namespace. What only the double can do on order (an OOM kill, a
cut stream, an expired token) are steps of their own, which are skipped there by name.
"""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from cli_fixtures import Done, command, environment
from cli_fixtures import ctl as run_ctl
from double.api import Double
from double.kubelet import Process
from job_fixtures import ROOT
from vocab import tiny_dir

from dflashctl.backends.kube import Api, Refused
from dflashctl.embedded import EmbeddedS3
from dflashctl.place import release

__all__ = ["site"]
KUBECONFIG = os.environ.get("DFLASH_TEST_KUBECONFIG")
SECRET = "dflash-test-s3"
IMAGE = "test.example/dflash-tokenizer:double"


class Site:
    """One cluster with a namespace, a bucket that its pods reach, and a folder to type commands in."""

    def __init__(self, folder: Path, double: Double | None, image: str, bucket: str, pod_env: dict[str, str]) -> None:
        self.folder, self.double, self.image, self.bucket = folder, double, image, bucket
        self.pod_env = pod_env
        self.api = Api()
        self.namespace = double.namespace if double else os.environ.get("DFLASH_TEST_NAMESPACE") or self.api.namespace
        self.jobs = f"/apis/batch/v1/namespaces/{self.namespace}/jobs"
        self.pods = f"/api/v1/namespaces/{self.namespace}/pods"

    def settings(self, **tokenize: Any) -> Path:
        """A fresh folder with a dflash.toml that means this cluster."""
        self.folder.mkdir(parents=True, exist_ok=True)
        folder = self.folder / f"cwd-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        values = {"model": str(tiny_dir()), "image": self.image, "s3_secret": SECRET, "workers": 1} | tokenize
        lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
        text = f'backend = "kube"\nnamespace = "{self.namespace}"\n[tokenize]\nnode = "small"\n' + "\n".join(lines)
        text += f"\n[tokenize.env]\nAWS_ENDPOINT_URL_S3 = {_toml(self.pod_env['AWS_ENDPOINT_URL_S3'])}\n"
        text += '[node.small]\ncpu = "500m"\nmemory = "1Gi"\nvolumes = { scratch = "1Gi" }\n'
        (folder / "dflash.toml").write_text(text)
        return folder

    def ctl(self, cwd: Path, *args: str, **env: str) -> Done:
        """One command as typed; no DFLASH_ variable is set."""
        return run_ctl(cwd, *args, DFLASH_BACKEND="", **env)

    def command(self, *args: str) -> tuple[list[str], dict[str, str]]:
        """(argv, environment) to start one in the background."""
        return command(*args), environment(DFLASH_BACKEND="")

    def of(self, run: str) -> list[dict[str, Any]]:
        return self.api.items(self.jobs, labelSelector=f"dflashctl/run={run}")

    def pods_of(self, run: str) -> list[dict[str, Any]]:
        return self.api.items(self.pods, labelSelector=f"dflashctl/run={run}")

    def delete_pod(self, pod: dict[str, Any]) -> None:
        self.api.delete(f"{self.pods}/{pod['metadata']['name']}", pod["metadata"]["uid"])

    def needs_double(self, what: str) -> Double:
        """The double, or a skip that names the step."""
        if self.double is None:
            pytest.skip(f"a real cluster does not {what} on order")
        return self.double


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def until(condition: Callable[[], Any], seconds: float = 90.0) -> Any:
    """The first true value of the condition; fails after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError("it did not happen")


@pytest.fixture(scope="module")
def site(s3_server: EmbeddedS3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("cluster")
    patch = pytest.MonkeyPatch()
    with contextlib.ExitStack() as stack:
        stack.callback(patch.undo)
        bucket = f"{folder.name}-{os.getpid()}"  # by the folder: two modules may share a process and its store
        s3_server.create_bucket(bucket)
        for name, value in {**s3_server.env(), "AWS_CONFIG_FILE": "/dev/null"}.items():
            patch.setenv(name, value)
        secret = {k: v for k, v in s3_server.env().items() if k != "AWS_ENDPOINT_URL_S3"}
        if KUBECONFIG:
            patch.setenv("KUBECONFIG", KUBECONFIG)
            host = os.environ.get("DFLASH_TEST_S3_HOST") or _address(KUBECONFIG)
            port = stack.enter_context(forwarder(s3_server.endpoint))
            image = os.environ.get("DFLASH_TEST_IMAGE") or f"localhost/dflash-tokenizer:{release()}"
            found = Site(folder, None, image, f"s3://{bucket}", {"AWS_ENDPOINT_URL_S3": f"http://{host}:{port}"})
            stack.enter_context(furnished(found, secret))
        else:
            double = stack.enter_context(Double(folder))
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            runner = Process({"PATH": path, "PYTHONPATH": str(ROOT), "AWS_CONFIG_FILE": "/dev/null"})
            double.cluster.images[IMAGE] = runner
            double.cluster.secrets[SECRET] = secret
            patch.setenv("KUBECONFIG", str(double.kubeconfig))
            found = Site(folder / "typed", double, IMAGE, f"s3://{bucket}", s3_server.env())
        yield found


def _address(kubeconfig: str) -> str:
    """This machine's address as the cluster sees it: the one that packets to its API server leave from."""
    config = yaml.safe_load(Path(kubeconfig).read_text())
    server = urlsplit(config["clusters"][0]["cluster"]["server"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((server.hostname or "127.0.0.1", server.port or 443))
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def forwarder(endpoint: str) -> Iterator[int]:
    """A port of all interfaces that leads to the S3 server, which listens on loopback alone."""
    target = urlsplit(endpoint)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((target.hostname, target.port)) as upstream:
                back = threading.Thread(target=_copy, args=(upstream, self.request), daemon=True)
                back.start()
                _copy(self.request, upstream)
                back.join()

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, allow_reuse_address = True, True

    with Server(("0.0.0.0", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def furnished(site: Site, secret: dict[str, str]) -> Iterator[None]:
    """The Secret and the service account in the namespace of a real cluster; our Jobs are removed at the end."""
    core = f"/api/v1/namespaces/{site.namespace}"
    data = {k: base64.b64encode(v.encode()).decode() for k, v in secret.items()}
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "data": data}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "dflash-tokenize"}}
    for plural, document in (("secrets", body), ("serviceaccounts", account)):
        try:
            site.api.create(f"{core}/{plural}", document)
        except Refused as error:
            if error.status != 409:
                raise
            site.api.patch(f"{core}/{plural}/{document['metadata']['name']}", document)
    try:
        yield
    finally:
        for job in site.api.items(site.jobs, labelSelector="app.kubernetes.io/managed-by=dflashctl"):
            site.api.delete(f"{site.jobs}/{job['metadata']['name']}", job["metadata"]["uid"])
