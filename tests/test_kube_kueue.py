"""Kueue, played as its controllers behave: it owns `suspend` of a queued Job, and is steered by its Workload alone.

Shapes are those of kueue.x-k8s.io and visibility.kueue.x-k8s.io (v1beta1 and v1beta2): conditions of a Workload, its
label with the Job's uid, and the list of what waits in a queue, whose positions count from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import Done, ctl
from double.api import Double, Handler
from job_fixtures import write_corpus
from served import standing
from vocab import tiny_dir

WORDS = (
    "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor default-flavor, 2 more needed"
)
QUEUE = "kueue.x-k8s.io/queue-name"
PATH = re.compile(
    r"/apis/(?P<group>visibility\.)?kueue\.x-k8s\.io/(?P<version>[^/]+)/namespaces/default"
    r"/(?:workloads(?:/(?P<name>[^/?]+))?|localqueues/(?P<queue>[^/]+)/pendingworkloads)"
)


class Kueue(Handler):
    """A cluster with one queue that is full until `free`, and another run ahead of ours."""

    version = "v1beta1"
    free = False
    visible = True
    active: dict[str, bool]

    def workload(self, job: dict[str, Any]) -> dict[str, Any]:
        uid = job["metadata"]["uid"]
        admitted = type(self).free and type(self).active.setdefault(uid, True)
        reserved = {"type": "QuotaReserved", "status": "True" if admitted else "False", "reason": "Pending"}
        return {
            "metadata": {"name": f"job-{job['metadata']['name']}-a1b2c", "labels": {"kueue.x-k8s.io/job-uid": uid}},
            "spec": {"active": type(self).active.get(uid, True), "queueName": "cpu"},
            "status": {"conditions": [reserved | ({} if admitted else {"message": WORDS})]},
        }

    def reconcile(self) -> None:
        """A queued Job runs when its Workload is admitted, whatever anybody wrote into `suspend`."""
        for job in self.queued():
            held = self.workload(job)
            admitted = held["status"]["conditions"][0]["status"] == "True"
            job["spec"]["suspend"] = not admitted

    def queued(self) -> list[dict[str, Any]]:
        return [j for j in self.double.cluster.live("jobs") if QUEUE in j["metadata"]["labels"]]

    def serve(self) -> None:
        path, _, query = self.path.partition("?")
        found = PATH.fullmatch(path)
        with self.double.cluster.lock:
            self.reconcile()
            if found is None:
                return super().serve()
            if found["version"] != type(self).version or (found["group"] and not type(self).visible):
                return self.fail(404, "NotFound", "the server could not find the requested resource")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            if found["queue"]:
                items = [{"metadata": {"name": "job-other", "ownerReferences": [{"kind": "Job", "uid": "other"}]},
                          "positionInLocalQueue": 0, "positionInClusterQueue": 3}]  # fmt: skip
                for number, job in enumerate(self.queued(), 1):
                    owner = {"kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
                    items.append({"metadata": {"name": "x", "ownerReferences": [owner]}, "priority": 0,
                                  "positionInLocalQueue": number, "positionInClusterQueue": 3 + number})  # fmt: skip
                return self.answer(200, {"kind": "PendingWorkloadsSummary", "items": items})
            if found["name"]:
                job = next(j for j in self.queued() if self.workload(j)["metadata"]["name"] == found["name"])
                type(self).active[job["metadata"]["uid"]] = '"active": true' in body
                self.reconcile()
                return self.answer(200, self.workload(job))
            held = [self.workload(j) for j in self.queued()]
            held = [w for w in held if w["metadata"]["labels"]["kueue.x-k8s.io/job-uid"] in query]
            return self.answer(200, {"kind": "WorkloadList", "metadata": {}, "items": held})

    do_GET = do_POST = do_PATCH = do_DELETE = serve


@pytest.fixture(params=["v1beta1", "v1beta2"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    double = Double(tmp_path, namespace="default")
    kind = type("Bound", (Kueue,), {"double": double, "version": request.param, "active": {}})
    double.server.RequestHandlerClass = kind
    with standing(double):
        yield kind


def typed(kind: Any, cwd: Path, *args: str) -> Done:
    return ctl(cwd, *args, KUBECONFIG=str(kind.double.kubeconfig), DFLASH_BACKEND="kube")


def test_queued_stopped_resumed_admitted(queue: Any, tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", 2, 3)
    begun = typed(queue, tmp_path, "tokenize", "in", "--out", "./out", "--model", str(tiny_dir()), "--name", "queued",
                  "--queue", "cpu", "--image", "i", "--shards", "2", "--detach")  # fmt: skip
    assert begun.code == 0, begun.err
    [job] = queue.double.cluster.live("jobs")
    assert job["spec"]["suspend"] is True and job["metadata"]["labels"][QUEUE] == "cpu"
    seen = typed(queue, tmp_path, "status", "queued", "-o", "json").json()
    assert (seen["state"], seen["queue"]) == ("queued", "cpu") and "cpu" in seen["reason"]
    cause = typed(queue, tmp_path, "why", "queued", "-o", "json").json()["causes"][0]
    assert cause["kind"] == "KueueNotAdmitted"
    assert cause["message"] == f"queue cpu, position 2 of the queue, 5 of its cluster queue: {WORDS}"
    queue.visible = False  # an older Kueue, or one whose visibility may not be asked
    assert typed(queue, tmp_path, "why", "queued", "-o", "json").json()["causes"][0]["message"] == f"queue cpu: {WORDS}"
    assert typed(queue, tmp_path, "wait", "queued", "--timeout", "0s").code == 124

    stopped = typed(queue, tmp_path, "stop", "queued", "-o", "json")
    assert stopped.code == 0 and stopped.json()["state"] == "suspended"
    assert list(queue.active.values()) == [False]
    queue.free = True  # were the Job told instead of the Workload, it would run now
    assert typed(queue, tmp_path, "status", "queued", "-o", "json").json()["state"] == "suspended"
    assert "already" in typed(queue, tmp_path, "stop", "queued").err

    queue.free = False
    resumed = typed(queue, tmp_path, "resume", "queued", "--detach")
    assert resumed.code == 0 and list(queue.active.values()) == [True], resumed.err
    assert typed(queue, tmp_path, "status", "queued", "-o", "json").json()["state"] == "queued"
    queue.free = True
    assert typed(queue, tmp_path, "status", "queued", "-o", "json").json()["state"] == "pending"
    assert [j["metadata"]["name"] for j in queue.double.cluster.live("jobs")] == ["queued"]
