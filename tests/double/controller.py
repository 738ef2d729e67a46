"""The Job controller of the double: one pass over each Job at a time, order of conditions as recorded on a real cluster."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

from double.kubelet import Kubelet
from double.state import RETRY_S, Cluster, Object, compress, index_of, now, phase, suffix


class Controller(threading.Thread):
    def __init__(self, cluster: Cluster, kubelet: Kubelet) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self.kubelet = kubelet
        self.halt = threading.Event()
        self.books: dict[str, Books] = {}

    def run(self) -> None:
        while not self.halt.is_set():
            with self.cluster.lock:
                for job in self.cluster.live("jobs"):
                    books = self.books.setdefault(job["metadata"]["uid"], Books())
                    self.reconcile(job, books)
                self.schedule()
            self.halt.wait(0.05)

    # ---- one Job

    def reconcile(self, job: Object, books: Books) -> None:
        pods = self.cluster.pods_of(job)
        if job["metadata"].get("deletionTimestamp"):
            self._end_pods(pods)
            if not [p for p in pods if phase(p) in ("Pending", "Running")]:
                for pod in pods:
                    self.cluster.drop("pods", pod)
                self.cluster.drop("jobs", job)
            return
        if _has(job, "Complete") or _has(job, "Failed"):
            ttl = job["spec"].get("ttlSecondsAfterFinished")
            books.ended = books.ended or time.monotonic()
            if ttl is not None and time.monotonic() - books.ended > ttl:
                job["metadata"]["deletionTimestamp"] = now()
            return
        spec = job["spec"]
        self._count(job, books, pods)
        target = _has(job, "FailureTarget")
        deadline = spec.get("activeDeadlineSeconds")
        if (
            books.fail is None
            and deadline is not None
            and books.started
            and time.monotonic() - books.started > deadline
        ):
            books.fail = ("DeadlineExceeded", "Job was active longer than specified deadline")
        if books.fail and target is None:
            self._condition(job, "FailureTarget", *books.fail)
        alive = [p for p in pods if phase(p) in ("Pending", "Running")]
        if books.fail:
            self._end_pods(alive, delete=True)
            if not alive:
                self._condition(job, "Failed", *books.fail)
                self.cluster.event(job, books.fail[0], books.fail[1], "Warning")
        elif spec.get("suspend"):
            self._end_pods(alive, delete=True)
            if not _has(job, "Suspended"):
                self._condition(job, "Suspended", "JobSuspended", "Job suspended")
                self.cluster.event(job, "Suspended", "Job suspended")
        else:
            if _has(job, "Suspended"):
                job["status"]["conditions"] = [c for c in job["status"]["conditions"] if c["type"] != "Suspended"]
            self._advance(job, books, alive)
        self._status(job, books, alive)

    def _count(self, job: Object, books: Books, pods: list[Object]) -> None:
        """Take each ended pod into the books once, by the first rule of podFailurePolicy that matches."""
        for pod in pods:
            uid, index = pod["metadata"]["uid"], index_of(pod) or 0
            if uid in books.counted or phase(pod) not in ("Succeeded", "Failed"):
                continue
            books.counted.add(uid)
            if phase(pod) == "Succeeded":
                books.done.add(index)
                continue
            books.next_at[index] = time.monotonic() + RETRY_S
            action, why = _policy(job, pod)
            if action == "Ignore":
                continue
            books.failed += 1
            if books.fail:  # the verdict stands: what ends after it changes the counts alone
                continue
            if action == "FailJob":
                books.fail = ("PodFailurePolicy", why)
            elif action == "FailIndex":
                books.broken.add(index)
            else:
                books.failures[index] = books.failures.get(index, 0) + 1
                limit = job["spec"].get("backoffLimitPerIndex")
                if limit is not None and books.failures[index] > limit:
                    books.broken.add(index)
                elif limit is None and books.failed > job["spec"].get("backoffLimit", 6):
                    books.fail = ("BackoffLimitExceeded", "Job has reached the specified backoff limit")
            most = job["spec"].get("maxFailedIndexes")
            if most is not None and len(books.broken) > most:
                words = "Job has exceeded the specified maximal number of failed indexes"
                books.fail = ("MaxFailedIndexesExceeded", words)

    def _advance(self, job: Object, books: Books, alive: list[Object]) -> None:
        spec = job["spec"]
        books.started = books.started or time.monotonic()
        job["status"].setdefault("startTime", now())
        busy = {index_of(p) or 0 for p in alive}
        open_ = [i for i in range(spec.get("completions", 1)) if i not in books.done | books.broken]
        if not open_ and not alive:
            if books.broken:
                books.fail = ("FailedIndexes", "Job has failed indexes")
                self._condition(job, "FailureTarget", *books.fail)
            else:
                for kind in ("SuccessCriteriaMet", "Complete"):
                    self._condition(job, kind, "CompletionsReached", "Reached expected number of succeeded pods")
                job["status"]["completionTime"] = now()
                self.cluster.event(job, "Completed", "Job completed")
            return
        for index in open_:
            if len(busy) >= spec.get("parallelism", 1):
                return
            if index not in busy and time.monotonic() >= books.next_at.get(index, 0.0):
                busy.add(index)
                self._create(job, index, books.failures.get(index, 0))

    def _create(self, job: Object, index: int, failures: int) -> None:
        lives = [p for p in self.cluster.live("pods") if phase(p) in ("Pending", "Running")]
        name, indexed = job["metadata"]["name"], job["spec"].get("completionMode") == "Indexed"
        pod_name = f"{name}-{index}-{suffix()}" if indexed else f"{name}-{suffix()}"
        if self.cluster.quota is not None and len(lives) >= self.cluster.quota:
            words = f'Error creating: pods "{pod_name}" is forbidden: exceeded quota: pods, limited: pods={self.cluster.quota}'
            self.cluster.event(job, "FailedCreate", words, "Warning")
            return
        template = copy.deepcopy(job["spec"]["template"])
        meta = template.setdefault("metadata", {})
        labels = {**meta.get("labels", {}), "batch.kubernetes.io/job-name": name, "job-name": name}
        notes = dict(meta.get("annotations", {}))
        if indexed:
            labels["batch.kubernetes.io/job-completion-index"] = str(index)
            notes |= {
                "batch.kubernetes.io/job-completion-index": str(index),
                "batch.kubernetes.io/job-index-failure-count": str(failures),
            }
            for container in template["spec"]["containers"]:
                path = "metadata.labels['batch.kubernetes.io/job-completion-index']"
                ref = {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}
                container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "valueFrom": ref})
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": name,
            "uid": job["metadata"]["uid"],
            "controller": True,
        }
        self.cluster.put(
            "pods",
            {
                "kind": "Pod",
                "apiVersion": "v1",
                "metadata": {
                    "name": pod_name, "namespace": job["metadata"]["namespace"], "labels": labels, "annotations": notes,
                    "ownerReferences": [owner],
                },
                "spec": template["spec"],
                "status": {"phase": "Pending"},
            },
        )  # fmt: skip
        self.cluster.event(job, "SuccessfulCreate", f"Created pod: {pod_name}")

    def _end_pods(self, pods: list[Object], delete: bool = False) -> None:
        for pod in pods:
            if phase(pod) in ("Pending", "Running"):
                self.kubelet.terminate(pod, delete=delete)

    def _condition(self, job: Object, kind: str, reason: str, message: str) -> None:
        job["status"].setdefault("conditions", []).append(
            {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now()}
        )
        self.cluster.put("jobs", job)

    def _status(self, job: Object, books: Books, alive: list[Object]) -> None:
        before = dict(job["status"])
        counts: dict[str, Any] = {"active": len(alive), "succeeded": len(books.done), "failed": books.failed}
        job["status"] |= {k: v for k, v in counts.items() if v}
        for key in [k for k, v in counts.items() if not v]:
            job["status"].pop(key, None)
        if job["spec"].get("completionMode") == "Indexed":
            if books.done:
                job["status"]["completedIndexes"] = compress(list(books.done))
            if job["spec"].get("backoffLimitPerIndex") is not None:
                job["status"]["failedIndexes"] = compress(list(books.broken))
        if job["status"] != before:
            self.cluster.put("jobs", job)

    # ---- the scheduler

    def schedule(self) -> None:
        for pod in self.cluster.live("pods"):
            if phase(pod) != "Pending" or pod["spec"].get("nodeName") or pod["metadata"].get("deletionTimestamp"):
                continue
            node, words = self._fit(pod)
            if node is None:
                if not pod["status"].get("conditions"):
                    pod["status"]["conditions"] = [
                        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
                    ]
                    self.cluster.put("pods", pod)
                    self.cluster.event(pod, "FailedScheduling", words, "Warning")
                continue
            pod["spec"]["nodeName"] = node
            pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
            self.cluster.put("pods", pod)
            self.kubelet.start(pod)

    def _fit(self, pod: Object) -> tuple[str | None, str]:
        lacks: dict[str, int] = {}
        for node in self.cluster.nodes.values():
            if any(node.labels.get(k) != v for k, v in pod["spec"].get("nodeSelector", {}).items()):
                why = "node(s) didn't match Pod's node affinity/selector"
            elif _gpus(pod) > node.gpus - sum(_gpus(p) for p in self._on(node.name)):
                why = "Insufficient nvidia.com/gpu"
            elif _cpu(pod) > node.cpu - sum(_cpu(p) for p in self._on(node.name)):
                why = "Insufficient cpu"
            else:
                return node.name, ""
            lacks[why] = lacks.get(why, 0) + 1
        total = len(self.cluster.nodes)
        kinds = ", ".join(f"{n} {why}" for why, n in sorted(lacks.items()))
        return None, f"0/{total} nodes are available: {kinds}. preemption: 0/{total} nodes are available."

    def _on(self, node: str) -> list[Object]:
        return [
            p
            for p in self.cluster.live("pods")
            if p["spec"].get("nodeName") == node and phase(p) in ("Pending", "Running")
        ]


class Books:
    """What the controller remembers of one Job between passes."""

    def __init__(self) -> None:
        self.counted: set[str] = set()
        self.done: set[int] = set()
        self.broken: set[int] = set()
        self.failures: dict[int, int] = {}
        self.next_at: dict[int, float] = {}
        self.failed = 0
        self.started: float | None = None
        self.ended: float | None = None
        self.fail: tuple[str, str] | None = None


def _has(job: Object, kind: str) -> Object | None:
    return next((c for c in job["status"].get("conditions", []) if c["type"] == kind), None)


def _policy(job: Object, pod: Object) -> tuple[str, str]:
    """(action, words) of the first matching rule; ("Count", "") where none does."""
    meta = pod["metadata"]
    for number, rule in enumerate((job["spec"].get("podFailurePolicy") or {}).get("rules", [])):
        for wanted in rule.get("onPodConditions", []):
            for have in pod["status"].get("conditions", []):
                if have["type"] == wanted["type"] and have["status"] == wanted.get("status", "True"):
                    return rule["action"], ""
        codes = rule.get("onExitCodes")
        for status in pod["status"].get("containerStatuses", []) if codes else []:
            code = status["state"].get("terminated", {}).get("exitCode", 0)
            if (
                code
                and codes.get("containerName") in (None, status["name"])
                and (code in codes["values"]) == (codes["operator"] == "In")
            ):
                words = f"Container {status['name']} for pod {meta['namespace']}/{meta['name']} failed with exit code {code}"
                return rule["action"], f"{words} matching {rule['action']} rule at index {number}"
    return "Count", ""


def _limit(pod: Object, key: str) -> str:
    return str(sum(_number(c.get("resources", {}).get("limits", {}).get(key, 0)) for c in pod["spec"]["containers"]))


def _number(value: Any) -> float:
    text = str(value)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def _gpus(pod: Object) -> float:
    return float(_limit(pod, "nvidia.com/gpu"))


def _cpu(pod: Object) -> float:
    return float(_limit(pod, "cpu"))
