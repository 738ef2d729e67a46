"""What the double of a cluster knows: objects, events, nodes, images, secrets; one lock for all of it.

It plays the API server, the Job controller (batch/v1 Indexed Jobs, KEPs 2214, 3329, 3850), a scheduler that counts, and a
kubelet that really runs each pod. It lacks, and says so: watches (the product lists), TLS, admission webhooks, Kueue,
sidecars, success policies, memory limits (an OOM kill is ordered by the test), back-off of ten seconds (RETRY_S).
"""

from __future__ import annotations

import copy
import datetime
import random
import threading
import uuid
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]

RETRY_S = 0.3  # a real controller waits about ten seconds after a failure
NAMES = "bcdfghjklmnpqrstvwxz2456789"


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def suffix() -> str:
    return "".join(random.choices(NAMES, k=5))


@dataclass
class Node:
    name: str = "node-a"
    cpu: float = 64.0
    gpus: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    ready: bool = True


class Cluster:
    """All state; `changed` is notified at every write."""

    def __init__(self, nodes: list[Node] | None = None) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.objects: dict[tuple[str, str, str], Object] = {}  # (plural, namespace, name)
        self.nodes = {n.name: n for n in nodes or [Node()]}
        self.images: dict[str, Any] = {}  # reference -> runner (kubelet.Process or kubelet.Podman)
        self.secrets: dict[str, dict[str, str]] = {}
        self.quota: int | None = None  # most pods that may live at once in the namespace
        self.oom: set[tuple[str, int]] = set()  # (job, index): the next pod of it is killed for memory, once
        self.token = "first-token"
        self.refuse: list[int] = []  # HTTP codes to answer the next requests with
        self.forbidden: set[str] = set()  # HTTP methods that are answered with 403
        self.cut_logs_after: int | None = None  # bytes of a log stream before the connection is dropped
        self.end_logs_after: int | None = None  # bytes of a log stream before it ends, as at a rotation of the file
        self._version = 100

    def put(self, plural: str, obj: Object) -> Object:
        with self.lock:
            self._version += 1
            meta = obj["metadata"]
            meta["resourceVersion"] = str(self._version)
            meta.setdefault("uid", str(uuid.uuid4()))
            meta.setdefault("creationTimestamp", now())
            self.objects[(plural, meta["namespace"], meta["name"])] = obj
            self.changed.notify_all()
            return obj

    def get(self, plural: str, namespace: str, name: str) -> Object | None:
        with self.lock:
            return self.objects.get((plural, namespace, name))

    def drop(self, plural: str, obj: Object) -> None:
        with self.lock:
            self.objects.pop((plural, obj["metadata"]["namespace"], obj["metadata"]["name"]), None)
            self.changed.notify_all()

    def list(self, plural: str, namespace: str | None = None) -> list[Object]:
        with self.lock:
            found = [o for (p, n, _), o in sorted(self.objects.items()) if p == plural and namespace in (None, n)]
            return copy.deepcopy(found)

    def live(self, plural: str) -> list[Object]:
        """The objects themselves, for the controllers; hold the lock."""
        return [o for (p, _, _), o in sorted(self.objects.items()) if p == plural]

    def pods_of(self, job: Object) -> list[Object]:
        uid = job["metadata"]["uid"]
        return [p for p in self.live("pods") if p["metadata"]["ownerReferences"][0]["uid"] == uid]

    def event(self, about: Object, reason: str, message: str, kind: str = "Normal") -> None:
        meta = about["metadata"]
        self.put(
            "events",
            {
                "kind": "Event",
                "apiVersion": "v1",
                "metadata": {"name": f"{meta['name']}.{uuid.uuid4().hex[:16]}", "namespace": meta["namespace"]},
                "involvedObject": {
                    "kind": about["kind"],
                    "name": meta["name"],
                    "namespace": meta["namespace"],
                    "uid": meta["uid"],
                },
                "reason": reason,
                "message": message,
                "type": kind,
                "eventTime": now(),
            },
        )


def index_of(pod: Object) -> int | None:
    text = pod["metadata"]["labels"].get("batch.kubernetes.io/job-completion-index")
    return None if text is None else int(text)


def phase(pod: Object) -> str:
    return pod["status"].get("phase", "Pending")


def compress(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"; two neighbours are written "0,1", as the controller does."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}-{b}" for a, b in runs)
