"""The HTTP face of the double: the requests that the product makes, answered as a 1.36 API server answers them."""

from __future__ import annotations

import copy
import json
import re
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import kubernetes_validate
import yaml

from double.controller import Controller
from double.kubelet import Kubelet
from double.state import Cluster, Node, Object, now, phase

ROUTE = re.compile(
    r"/(?:api/v1|apis/batch/v1|apis/kueue\.x-k8s\.io/v1beta1)"
    r"/(?:namespaces/(?P<ns>[^/]+)/)?(?P<plural>jobs|pods|events|nodes|workloads)(?:/(?P<name>[^/]+))?(?:/(?P<sub>log))?"
)
KIND = {"jobs": ("batch/v1", "Job"), "pods": ("v1", "Pod"), "events": ("v1", "Event")}


class Double:
    """A cluster for the length of a `with` block; `kubeconfig` is the path of a file that leads to it."""

    def __init__(self, folder: Path, nodes: list[Node] | None = None, namespace: str = "dflash") -> None:
        self.cluster = Cluster(nodes)
        self.kubelet = Kubelet(self.cluster, folder / "pods")
        self.controller = Controller(self.cluster, self.kubelet)
        handler = type("Bound", (Handler,), {"double": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.namespace = namespace
        self.kubeconfig = folder / "kubeconfig"
        self.write_kubeconfig()

    def write_kubeconfig(self) -> None:
        address = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1", "kind": "Config", "current-context": "double",
                    "clusters": [{"name": "double", "cluster": {"server": address}}],
                    "users": [{"name": "me", "user": {"token": self.cluster.token}}],
                    "contexts": [{"name": "double", "context": {"cluster": "double", "user": "me", "namespace": self.namespace}}],
                }
            )
        )  # fmt: skip

    def rotate_token(self, renew: bool = True) -> None:
        """The token expires; with `renew` the kubeconfig holds the next one already."""
        self.cluster.token = f"token-{time.monotonic_ns()}"
        if renew:
            self.write_kubeconfig()

    def __enter__(self) -> Double:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        self.controller.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.controller.halt.set()
        self.controller.join(5)
        self.kubelet.close()
        self.server.shutdown()
        self.server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    double: Double

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, code: int, body: Object) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def fail(self, code: int, reason: str, message: str) -> None:
        self.answer(
            code,
            {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": reason,
                "message": message,
                "code": code,
            },
        )

    def serve(self) -> None:
        cluster = self.double.cluster
        url = urllib.parse.urlparse(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        if self.headers.get("Authorization") != f"Bearer {cluster.token}":
            return self.fail(401, "Unauthorized", "Unauthorized")
        if cluster.refuse:
            return self.fail(
                cluster.refuse.pop(0), "ServiceUnavailable", "the server is currently unable to handle the request"
            )
        if self.command in cluster.forbidden:
            return self.fail(403, "Forbidden", "jobs.batch is forbidden: cannot do this to the resource")
        if url.path == "/version":
            return self.answer(200, {"major": "1", "minor": "36", "gitVersion": "v1.36.0-double"})
        found = ROUTE.fullmatch(url.path)
        if not found or found["plural"] == "workloads":
            return self.fail(404, "NotFound", "the server could not find the requested resource")
        plural, namespace, name = found["plural"], found["ns"], found["name"]
        if plural == "nodes":
            return self.node(name)
        if name is None and self.command == "POST":
            return self.create(plural, namespace, body, query)
        if name is None:
            items = [o for o in cluster.list(plural, namespace) if _selected(o, query)]
            return self.answer(200, _page(plural, items, query))
        with cluster.lock:
            obj = cluster.get(plural, namespace, name)
            if obj is None:
                return self.fail(404, "NotFound", f'{plural} "{name}" not found')
            if found["sub"] is None:
                return self.one(plural, obj, body)
        return self.log(obj, query)

    do_GET = do_POST = do_PATCH = do_DELETE = serve

    def node(self, name: str) -> None:
        node = self.double.cluster.nodes.get(name)
        if node is None:
            return self.fail(404, "NotFound", f'nodes "{name}" not found')
        ready = {"type": "Ready", "status": "True" if node.ready else "Unknown"}
        return self.answer(200, {"kind": "Node", "metadata": {"name": name}, "status": {"conditions": [ready]}})

    def create(self, plural: str, namespace: str, body: Object, query: dict[str, str]) -> None:
        cluster = self.double.cluster
        api, kind = KIND[plural]
        try:
            kubernetes_validate.validate(
                {"apiVersion": api, "kind": kind, **body}, "1.36", strict=query.get("fieldValidation") == "Strict"
            )
        except kubernetes_validate.ValidationError as error:
            where = ".".join(str(p) for p in error.path)
            return self.fail(400, "BadRequest", f"strict decoding error: {where}: {error.message}")
        spec, meta = body["spec"], body["metadata"]
        if wrong := _invalid(body):
            return self.fail(422, "Invalid", f'Job.batch "{meta["name"]}" is invalid: {wrong}')
        with cluster.lock:
            if cluster.get(plural, namespace, meta["name"]):
                return self.fail(409, "AlreadyExists", f'jobs.batch "{meta["name"]}" already exists')
            job = copy.deepcopy(body)
            job["metadata"] |= {"namespace": namespace, "generation": 1, "creationTimestamp": now()}
            job["spec"] = {"parallelism": 1, "completions": 1, "backoffLimit": 6, "suspend": False, **spec}
            job["status"] = {}
            if query.get("dryRun") != "All":
                cluster.put(plural, job)
            return self.answer(201, job)

    def one(self, plural: str, obj: Object, body: Object | None) -> None:
        """GET, PATCH or DELETE of one object; the lock is held."""
        cluster = self.double.cluster
        if self.command == "PATCH":
            for key in ("completions", "completionMode", "template"):
                if key in (body or {}).get("spec", {}) and body["spec"][key] != obj["spec"].get(key):
                    return self.fail(422, "Invalid", f"spec.{key}: Invalid value: field is immutable")
            _merge(obj, body or {})
            cluster.put(plural, obj)
        elif self.command == "DELETE":
            wanted = ((body or {}).get("preconditions") or {}).get("uid")
            if wanted not in (None, obj["metadata"]["uid"]):
                return self.fail(409, "Conflict", "the UID in the precondition does not match")
            if plural == "pods":
                self.double.kubelet.terminate(obj, delete=True)
            else:
                obj["metadata"].setdefault("deletionTimestamp", now())
                cluster.put(plural, obj)
        return self.answer(200, obj)

    def chunk(self, data: bytes) -> None:
        """In two pieces, cut anywhere: a client that decodes what it gets tears characters."""
        for piece in filter(None, (data[: len(data) // 2], data[len(data) // 2 :])):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()

    def log(self, pod: Object, query: dict[str, str]) -> None:
        name = pod["metadata"]["name"]
        path = self.double.kubelet.logs.get(name)
        if path is None:
            container = pod["spec"]["containers"][0]["name"]
            return self.fail(
                400, "BadRequest", f'container "{container}" in pod "{name}" is waiting to start: ContainerCreating'
            )
        follow, stamps = query.get("follow") == "true", query.get("timestamps") == "true"
        since, tail = query.get("sinceTime", ""), query.get("tailLines")
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent = 0
        with path.open("rb") as file:
            if tail is not None:
                lines = file.readlines()
                file.seek(sum(len(line) for line in lines[: max(0, len(lines) - int(tail))]))
            while True:
                over = phase(pod) in ("Succeeded", "Failed")  # before the read: what is there then is all
                line = file.readline()
                if line.endswith(b"\n"):
                    stamp, _, text = line.partition(b" ")
                    if stamp.decode()[:19] < since[:19]:
                        continue
                    data = line if stamps else text
                    limit = self.double.cluster.cut_logs_after
                    if limit is not None and sent + len(data) > limit:
                        self.double.cluster.cut_logs_after = None
                        self.wfile.write(b"%x\r\n%s" % (len(data), data[: len(data) // 2]))
                        self.wfile.flush()
                        self.connection.close()
                        self.close_connection = True
                        return None
                    sent += len(data)
                    self.chunk(data)
                    limit = self.double.cluster.end_logs_after
                    if limit is not None and sent > limit:
                        self.double.cluster.end_logs_after = None
                        break
                    continue
                if not follow or over:
                    self.chunk(line if stamps else line.partition(b" ")[2])  # the last one, without its newline
                    break
                file.seek(-len(line), 1)
                time.sleep(0.05)
        self.wfile.write(b"0\r\n\r\n")
        return None


def _invalid(job: Object) -> str:
    spec = job["spec"]
    restart = spec["template"]["spec"].get("restartPolicy")
    if restart not in ("Never", "OnFailure"):
        return 'spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"'
    if spec.get("completionMode") == "Indexed" and not spec.get("completions"):
        return "spec.completions: Required value: when completion mode is Indexed"
    if spec.get("maxFailedIndexes") is not None and spec["maxFailedIndexes"] > spec.get("completions", 1):
        return "spec.maxFailedIndexes: Invalid value: must be less than or equal to completions"
    if len(job["metadata"]["name"]) > 63:
        return "metadata.name: Invalid value: must be no more than 63 characters"
    return ""


def _selected(obj: Object, query: dict[str, str]) -> bool:
    labels, involved = obj["metadata"].get("labels") or {}, obj.get("involvedObject") or {}
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = term.partition("=")
        if labels.get(key) != value:
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        key, _, value = term.partition("=")
        if key == "involvedObject.uid" and involved.get("uid") != value:
            return False
    return True


def _page(plural: str, items: list[Object], query: dict[str, str]) -> Object:
    """Small pages on purpose: a client that reads only the first one must fail here, not in a big cluster."""
    start, limit = int(query.get("continue", "0")), min(int(query.get("limit", "500")), 7)
    more = str(start + limit) if start + limit < len(items) else ""
    bare = [{k: v for k, v in o.items() if k not in ("kind", "apiVersion")} for o in items[start : start + limit]]
    return {
        "kind": f"{KIND[plural][1]}List",
        "apiVersion": KIND[plural][0],
        "metadata": {"continue": more},
        "items": bare,
    }


def _merge(into: Object, patch: Object) -> None:
    """A merge patch (RFC 7386)."""
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
