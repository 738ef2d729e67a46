"""The Kubernetes backend against objects that the double does not have: Kueue's Workloads, refusals of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflashctl.backends.base import Submission
from dflashctl.backends.cluster import KubeBackend, attempt, ranges
from dflashctl.backends.kube import Refused, kubeconfig
from dflashctl.errors import ApiError, CliError, PreflightError, TakenError, UsageError
from dflashctl.place import Placing

JOBS = "/apis/batch/v1/namespaces/n/jobs"
SUBMISSION = Submission(
    "run", "run", "s3://b/out", ("--contract", "1"), (0, 1), 2, flags={"image": "i@sha256:" + "a" * 64, "queue": "cpu"}
)


class Fake:
    """An API server that is a dict; `refuse` maps (method, part of the path) to what it answers instead."""

    def __init__(self, *objects: tuple[str, dict[str, Any]], refuse: dict[tuple[str, str], int] | None = None) -> None:
        self.objects, self.refuse = dict(objects), refuse or {}
        self.sent: list[tuple[str, str, Any]] = []

    def _see(self, method: str, path: str, body: Any = None) -> None:
        self.sent.append((method, path, body))
        for (refused, part), status in self.refuse.items():
            if refused == method and part in path:
                raise Refused(status, "Refused", "it says no", "a hint")

    def find(self, path: str) -> dict[str, Any] | None:
        self._see("GET", path)
        return self.objects.get(path)

    def get(self, path: str) -> dict[str, Any]:
        self._see("GET", path)
        if path not in self.objects:
            raise Refused(404, "NotFound", "not found")
        return self.objects[path]

    def items(self, path: str, **query: Any) -> list[dict[str, Any]]:
        self._see("LIST", path)
        return [o for p, o in self.objects.items() if p.rsplit("/", 1)[0] == path]

    def create(self, path: str, body: Any, dry_run: bool = False) -> None:
        self._see("POST", path, body)

    def patch(self, path: str, body: Any) -> None:
        self._see("PATCH", path, body)

    def delete(self, path: str, uid: str) -> None:
        self._see("DELETE", path, uid)
        self.objects.pop(path, None)


def backend(fake: Fake, home: Path | None = None) -> KubeBackend:
    return KubeBackend(lambda: fake, "c", "n", Placing({}), home)  # type: ignore[arg-type,return-value]


def a_job(name: str = "run", queue: str = "cpu", **annotations: str) -> tuple[str, dict[str, Any]]:
    labels = {"dflashctl/run": "run"} | ({"kueue.x-k8s.io/queue-name": queue} if queue else {})
    meta = {
        "name": name,
        "uid": f"uid-{name}",
        "labels": labels,
        "annotations": annotations,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return f"{JOBS}/{name}", {"metadata": meta, "spec": {"suspend": True, "completions": 2, "template": {"spec": {}}}, "status": {}}


WORKLOAD = (
    "/apis/kueue.x-k8s.io/v1beta1/namespaces/n/workloads/job-run",
    {"metadata": {"name": "job-run"}, "spec": {"active": True}, "status": {}},
)


def test_kueue_is_told_and_not_gone_behind() -> None:
    fake = Fake(a_job(), WORKLOAD)
    backend(fake).stop("run")
    backend(fake).unsuspend("run")
    assert [s for s in fake.sent if s[0] == "PATCH"] == [
        ("PATCH", WORKLOAD[0], {"spec": {"active": False}}),
        ("PATCH", WORKLOAD[0], {"spec": {"active": True}}),
    ]
    seen = backend(fake).snapshot("run")
    assert seen is not None and (seen.state, seen.queue) == ("queued", "cpu")


@pytest.mark.parametrize("status", [403, 404])
def test_without_kueue_or_the_right_to_see_it_the_job_is_patched(status: int) -> None:
    fake = Fake(a_job(), refuse={("LIST", "workloads"): status})
    backend(fake).stop("run")
    assert ("PATCH", f"{JOBS}/run", {"spec": {"suspend": True}}) in fake.sent
    with pytest.raises(Refused):
        backend(Fake(a_job(), refuse={("LIST", "workloads"): 500})).stop("run")


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (400, UsageError, 2),
        (422, UsageError, 2),
        (401, PreflightError, 4),
        (403, PreflightError, 4),
        (404, PreflightError, 4),
        (500, ApiError, 1),
    ],
)
def test_what_the_server_refuses_before_anything_is_written(status: int, error: type[CliError], code: int) -> None:
    with pytest.raises(error, match="it says no") as caught:
        backend(Fake(refuse={("POST", "jobs"): status})).check(SUBMISSION)
    assert caught.value.code == code
    backend(Fake(refuse={("POST", "jobs"): 409})).check(SUBMISSION)


def test_an_older_job_of_the_run_goes_first_and_the_same_job_is_taken_as_it_is(tmp_path: Path) -> None:
    fake = Fake(a_job("run-r2"), a_job("run"))
    newer = Submission("run", "run-r3", "s3://b/out", (), (0,), 1, flags=SUBMISSION.flags)
    backend(fake, tmp_path).submit(newer)
    assert [s[:2] for s in fake.sent if s[0] in ("DELETE", "POST")] == [
        ("DELETE", f"{JOBS}/run"),
        ("DELETE", f"{JOBS}/run-r2"),
        ("POST", JOBS),
    ]
    made = backend(fake).render(SUBMISSION)["metadata"]["annotations"]
    same = Fake(a_job("run", **made), refuse={("POST", "jobs"): 409})
    backend(same, tmp_path).submit(SUBMISSION)
    other = Fake(a_job("run", **{**made, "dflashctl/spec-sha256": "other"}), refuse={("POST", "jobs"): 409})
    with pytest.raises(TakenError):
        backend(other, tmp_path).submit(SUBMISSION)
    with pytest.raises(Refused):
        backend(Fake(refuse={("POST", "jobs"): 500}), tmp_path).submit(SUBMISSION)


def test_runs_are_the_cluster_s_and_those_remembered_here(tmp_path: Path) -> None:
    fake = Fake(a_job("run-r2", **{"dflashctl/out": "s3://b/out"}), a_job("run"))
    (tmp_path / "half.json").write_text('{"run": "ha')
    for run, namespace in (("old", "n"), ("elsewhere", "m"), ("run", "n")):
        record = {"run": run, "kind": "tokenize", "out": "o", "job": run, "created": 1.0, "namespace": namespace}
        (tmp_path / f"{run}.json").write_text(json.dumps(record))
    known = backend(fake, tmp_path).runs()
    assert [(k.run, k.job) for k in known] == [("run", "run-r2"), ("old", "old")]
    backend(fake, tmp_path).remove("run")
    assert not (tmp_path / "run.json").exists() and backend(fake, tmp_path).snapshot("run") is None
    assert list(backend(fake).logs("run", None, False, False)) == []
    with pytest.raises(ApiError):
        backend(fake).scale("run", 2)


def test_causes_bear_the_plan_s_indexes_and_nodes_that_may_not_be_read_are_done_without() -> None:
    ended = {
        "containerStatuses": [{"name": "t", "state": {"terminated": {"exitCode": 65, "reason": "Error"}}}],
        "phase": "Failed",
    }
    meta = {
        "name": "run-1-x",
        "uid": "p",
        "labels": {"batch.kubernetes.io/job-completion-index": "1"},
        "ownerReferences": [{"uid": "uid-run"}],
    }
    pod = {"metadata": meta | {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "spec": {"nodeName": "a"}, "status": ended}
    fake = Fake(
        a_job("run", "", **{"dflashctl/indexes": "4,7"}),
        ("/api/v1/namespaces/n/pods/run-1-x", pod),
        refuse={("GET", "nodes"): 403},
    )
    causes = backend(fake).why("run")
    assert [c.indexes for c in causes if c.kind == "Exit65"] == [(7,)]
    assert set(backend(fake).bundle("run")) >= {"job", "pods", "events"}


def test_small_parts() -> None:
    assert ranges([0, 1, 2, 5]) == "0-2,5" and ranges([]) == ""
    assert [attempt(a_job(name)[1]) for name in ("run", "run-r2", "run-r12")] == [1, 2, 12]


def test_a_kubeconfig_is_read_without_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, bad = tmp_path / "one", tmp_path / "two", tmp_path / "bad"
    one.write_text("contexts: [{name: a, context: {namespace: x}}]\n")
    two.write_text("current-context: b\ncontexts: [{name: b}, {name: a, context: {namespace: later}}]\n")
    bad.write_text("contexts: 7\n")
    monkeypatch.setenv("KUBECONFIG", f"{one}:{tmp_path / 'none'}:{two}")
    assert kubeconfig() == ("b", {"a": "x", "b": "default"})
    monkeypatch.setenv("KUBECONFIG", str(bad))
    with pytest.raises(PreflightError, match="cannot be read"):
        kubeconfig()
