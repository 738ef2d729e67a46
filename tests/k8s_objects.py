"""Small Kubernetes objects for pure tests, shaped like the ones a 1.36 cluster sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Watch streams of a real 1.36 cluster, one file a scenario: {request, job, pods, events: [{t, type, object}], logs},
#: t in seconds since the request; of the objects what anything here reads.
RECORDINGS = Path(__file__).resolve().parent / "recorded"
SCENARIOS = sorted(path.stem for path in RECORDINGS.glob("*.json"))


def job(*, completions: int = 4, uid: str = "u1", **status: Any) -> dict[str, Any]:
    return {
        "kind": "Job",
        "metadata": {"name": "run", "namespace": "n", "uid": uid, "labels": {}},
        "spec": {"completions": completions, "parallelism": completions, "completionMode": "Indexed", "suspend": False},
        "status": status,
    }


def ended(kind: str, reason: str, message: str = "") -> dict[str, str]:
    return {"type": kind, "status": "True", "reason": reason, "message": message}


def pod(index: int, phase: str = "Running", *, uid: str = "u1", n: int = 0, **status: Any) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {
            "name": f"run-{index}-{n}",
            "uid": f"p{index}-{n}",
            "creationTimestamp": f"2026-01-01T00:00:{n:02d}Z",
            "labels": {"batch.kubernetes.io/job-completion-index": str(index)},
            "ownerReferences": [{"kind": "Job", "name": "run", "uid": uid}],
        },
        "spec": {"nodeName": "node-a", "containers": [{"name": "c", "resources": {"limits": {"memory": "6Gi"}}}]},
        "status": {"phase": phase, **status},
    }


def container(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "c", "state": state}]


def exited(code: int, reason: str = "Error", message: str = "") -> list[dict[str, Any]]:
    return container(terminated={"exitCode": code, "reason": reason, "message": message})


def event(uid: str, reason: str, message: str, kind: str = "Job") -> dict[str, Any]:
    return {
        "kind": "Event",
        "metadata": {},
        "involvedObject": {"kind": kind, "uid": uid},
        "reason": reason,
        "message": message,
    }


class Recording:
    """One recorded scenario: what was visible at any time t (seconds since the request)."""

    def __init__(self, name: str) -> None:
        self.data = json.loads((RECORDINGS / f"{name}.json").read_text())

    def times(self) -> list[float]:
        return sorted({e["t"] for kind in ("job", "pods", "events") for e in self.data[kind]})

    def at(self, t: float) -> tuple[dict[str, Any] | None, list[dict[str, Any]], list[dict[str, Any]]]:
        job: dict[str, Any] | None = None
        for e in self.data["job"]:
            if e["t"] <= t:
                job = None if e["type"] == "DELETED" else e["object"]
        pods: dict[str, dict[str, Any]] = {}
        for e in self.data["pods"]:
            if e["t"] <= t:
                pods[e["object"]["metadata"]["name"]] = e["object"]
                if e["type"] == "DELETED":
                    del pods[e["object"]["metadata"]["name"]]
        return job, list(pods.values()), [e["object"] for e in self.data["events"] if e["t"] <= t]
