"""Where the cluster suite runs: on the double with pods as processes, or on the cluster of DFLASH_TEST_KUBECONFIG.

On a real cluster these may be set, else the defaults are tried:
    DFLASH_TEST_IMAGE       tokenizer image that its nodes can start; default localhost/dflash-tokenizer:<version>
    DFLASH_TEST_NAMESPACE   must exist; default the context's
    DFLASH_TEST_S3_HOST     address under which its pods reach this machine, where the S3 server runs
The kubeconfig is an administrator's of that namespace, for the suite alone: it makes the Secret, the service accounts
and the Role of k8s/base there, and the commands run as a service account that is bound to that Role and to no more.
What only the double can do on order (an OOM kill, a cut stream, an expired token) are steps of their own, which are
skipped there by name.
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
from double.kubelet import Process, disrupt
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

    def __init__(self, folder: Path, double: Double | None, image: str, bucket: str, pod_env: dict[str, str],
                 secret: dict[str, str]) -> None:  # fmt: skip
        self.folder, self.double, self.image, self.bucket = folder, double, image, bucket
        self.pod_env = pod_env
        self.secret = secret
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

    def evict(self, pod: dict[str, Any]) -> None:
        """As a node drain does it."""
        if self.double:
            mine = self.double.cluster.get("pods", self.namespace, pod["metadata"]["name"])
            disrupt(self.double.cluster, self.double.kubelet, mine or pod)
            return
        meta = {"name": pod["metadata"]["name"], "namespace": self.namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
        self.api.create(f"{self.pods}/{meta['name']}/eviction", body)

    @contextlib.contextmanager
    def quota(self, pods: int) -> Iterator[None]:
        """At most so many pods may live in the namespace."""
        path = f"/api/v1/namespaces/{self.namespace}/resourcequotas"
        if self.double:
            self.double.cluster.quota = pods
        else:
            meta, hard = {"name": "dflash-test"}, {"pods": str(pods)}
            body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": meta, "spec": {"hard": hard}}
            apply(self, "resourcequotas", body)
            until(lambda: (self.api.get(f"{path}/dflash-test").get("status") or {}).get("hard"))
        try:
            yield
        finally:
            if self.double:
                self.double.cluster.quota = None
            else:
                self.api.delete(f"{path}/dflash-test", self.api.get(f"{path}/dflash-test")["metadata"]["uid"])

    def put_secret(self, name: str, values: dict[str, str]) -> None:
        if self.double:
            self.double.cluster.secrets[name] = values
            return
        data = {k: base64.b64encode(v.encode()).decode() for k, v in values.items()}
        apply(self, "secrets", {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data})

    @contextlib.contextmanager
    def rights(self, account: str) -> Iterator[dict[str, str]]:
        """Environment of somebody who may do nothing in the namespace (`stranger`) or only look at it (`reader`)."""
        if self.double is None:
            yield {"KUBECONFIG": str(user(self, str(KUBECONFIG), f"dflash-test-{account}"))}
            return
        self.double.cluster.forbidden = {"POST", "PATCH", "DELETE"} | ({"GET"} if account == "stranger" else set())
        try:
            yield {}
        finally:
            self.double.cluster.forbidden = set()

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
            found = Site(
                folder, None, image, f"s3://{bucket}", {"AWS_ENDPOINT_URL_S3": f"http://{host}:{port}"}, secret
            )
            stack.enter_context(furnished(found))
            patch.setenv("KUBECONFIG", str(user(found, KUBECONFIG, "dflash-test-user")))
        else:
            double = stack.enter_context(Double(folder))
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            runner = Process({"PATH": path, "PYTHONPATH": str(ROOT), "AWS_CONFIG_FILE": "/dev/null"})
            double.cluster.images[IMAGE] = runner
            double.cluster.secrets[SECRET] = secret
            patch.setenv("KUBECONFIG", str(double.kubeconfig))
            found = Site(folder / "typed", double, IMAGE, f"s3://{bucket}", s3_server.env(), secret)
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
def furnished(site: Site) -> Iterator[None]:
    """The Secret, the accounts and the Role in the namespace of a real cluster; our Jobs are removed at the end."""
    site.put_secret(SECRET, site.secret)
    base = ROOT / "k8s" / "base"
    for account in yaml.safe_load_all((base / "serviceaccounts.yaml").read_text()):
        apply(site, "serviceaccounts", account)
    role = yaml.safe_load((base / "role.yaml").read_text())
    reads = [rule | {"verbs": ["get", "list", "watch"]} for rule in role["rules"]]
    reader = role | {"metadata": {"name": "dflash-test-reader"}, "rules": reads}
    for account, bound in (("user", role), ("reader", reader), ("stranger", None)):
        meta = {"name": f"dflash-test-{account}"}
        apply(site, "serviceaccounts", {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
        if bound:
            group = "rbac.authorization.k8s.io"
            apply(site, "roles", bound)
            binding = {
                "apiVersion": f"{group}/v1",
                "kind": "RoleBinding",
                "metadata": meta,
                "roleRef": {"apiGroup": group, "kind": "Role", "name": bound["metadata"]["name"]},
                "subjects": [{"kind": "ServiceAccount", "name": meta["name"], "namespace": site.namespace}],
            }
            apply(site, "rolebindings", binding)
    try:
        yield
    finally:
        for job in site.api.items(site.jobs, labelSelector="app.kubernetes.io/managed-by=dflashctl"):
            site.api.delete(f"{site.jobs}/{job['metadata']['name']}", job["metadata"]["uid"])


def apply(site: Site, plural: str, document: dict[str, Any]) -> None:
    """Create it in the namespace of the site, or bring what is there to this form."""
    version = document["apiVersion"]
    root = f"/api/{version}" if version == "v1" else f"/apis/{version}"
    path = f"{root}/namespaces/{site.namespace}/{plural}"
    try:
        site.api.create(path, document)
    except Refused as error:
        if error.status != 409:
            raise
        site.api.patch(f"{path}/{document['metadata']['name']}", document)


def user(site: Site, kubeconfig: str, account: str) -> Path:
    """A kubeconfig of that service account on the same cluster, with a token of two hours."""
    path = f"/api/v1/namespaces/{site.namespace}/serviceaccounts/{account}/token"
    token = site.api.create(path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
                                   "spec": {"expirationSeconds": 7200}})["status"]["token"]  # fmt: skip
    config = yaml.safe_load(Path(kubeconfig).read_text())
    context = next(c for c in config["contexts"] if c["name"] == config["current-context"])
    context["context"] |= {"user": account, "namespace": site.namespace}
    config["users"] = [{"name": account, "user": {"token": token}}]
    file = site.folder / f"{account}.kubeconfig"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(config))
    return file
