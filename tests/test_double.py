"""The double against a real cluster's recordings: the recorded request, sent to the double, ends as it was recorded."""

from __future__ import annotations

import os
import time

import pytest
from double.api import Double
from double.kubelet import Process
from double.state import index_of, phase
from k8s_objects import SCENARIOS, Recording

from dflashctl.backends.kube import Api, Refused
from dflashctl.progress import fold

PLAYED = ["indexed_ok", "fail_index", "max_failed_indexes", "backoff_exceeded", "fail_job", "image_missing", "oom",
          "unschedulable_gpu", "deadline", "suspend", "delete_running", "pod_deleted_by_hand"]  # fmt: skip
# what the double lacks: a runtime that cannot start a command, configmaps, success policies, two containers
LACKS = {"bad_command", "bad_configmap", "success_policy", "sidecar_target", "peer_dies"}


def test_every_recording_is_played_or_named_as_lacking():
    assert set(SCENARIOS) == set(PLAYED) | LACKS


@pytest.fixture
def double(tmp_path, monkeypatch):
    with Double(tmp_path, namespace="default") as double:
        double.cluster.images["localhost/t:2"] = Process({"PATH": os.environ["PATH"]})
        monkeypatch.setenv("KUBECONFIG", str(double.kubeconfig))
        yield double


def ends(job):
    """What of a finished Job's status is a promise: conditions in order, indexes, counts."""
    status = job["status"]
    conditions = [(c["type"], c["status"], c["reason"]) for c in status.get("conditions", [])]
    kept = ("succeeded", "failed", "completedIndexes", "failedIndexes")
    return conditions, {k: status[k] for k in kept if k in status}


@pytest.mark.parametrize("name", PLAYED)
def test_a_recorded_request_ends_as_recorded(name, double):
    recording, api = Recording(name), Api()
    body = recording.data["request"]
    jobs, pods = "/apis/batch/v1/namespaces/default/jobs", "/api/v1/namespaces/default/pods"
    if name == "oom":
        double.cluster.oom.add((body["metadata"]["name"], 0))
    api.create(jobs, body)
    path = f"{jobs}/{body['metadata']['name']}"
    want_job, want_pods, want_events = recording.at(1e9)
    want = fold(want_job, want_pods, want_events)
    acted = False
    end = time.monotonic() + 60
    while time.monotonic() < end:
        job, found, events = api.find(path), api.items(pods), api.items("/api/v1/namespaces/default/events")
        got = fold(job, found, events)
        if name in ("delete_running", "pod_deleted_by_hand") and got.state == "running" and not acted:
            acted = True
            if name == "delete_running":
                api.delete(path, job["metadata"]["uid"])
            else:
                api.delete(f"{pods}/{found[0]['metadata']['name']}", found[0]["metadata"]["uid"])
        settled = job is None or len(job["status"].get("conditions", [])) >= len(
            (want_job or job)["status"].get("conditions", [])
        )
        if got.state == want.state and settled:
            break
        time.sleep(0.1)
    assert got.state == want.state
    assert got.reason.split(":")[0] == want.reason.split(":")[0]
    if want_job is None:
        assert job is None
        return
    if want.ended:
        # pods that a policy stops are counted as failed too; how many ran at that moment is a race, also in reality
        conditions, counts = ends(job)
        expected, recorded_counts = ends(want_job)
        assert conditions == expected
        for key in ("completedIndexes", "failedIndexes", "succeeded"):
            assert counts.get(key) == recorded_counts.get(key), key
    tries = {i.index: i.exit_code for i in got.indexes}
    for index in want.indexes:
        if index.state in ("succeeded", "failed") and index.exit_code != 137:
            assert tries[index.index] == index.exit_code


def test_strict_validation_conflicts_and_absence(double):
    api, jobs = Api(), "/apis/batch/v1/namespaces/default/jobs"
    body = Recording("indexed_ok").data["request"]
    wrong = {**body, "spec": {**body["spec"], "paralelism": 1}}
    with pytest.raises(Refused, match="paralelism") as error:
        api.create(jobs, wrong)
    assert error.value.status == 400
    api.create(jobs, body, dry_run=True)
    assert api.items(jobs) == []
    api.create(jobs, body)
    with pytest.raises(Refused) as error:
        api.create(jobs, body)
    assert error.value.status == 409
    assert api.find(jobs + "/nope") is None


def test_a_token_that_expires_is_read_anew_once_and_faults_are_retried(double):
    api = Api()
    double.rotate_token()
    assert api.items("/api/v1/namespaces/default/pods") == []
    double.cluster.refuse = [503, 500, 429]
    assert api.items("/api/v1/namespaces/default/pods") == []
    double.rotate_token(renew=False)
    with pytest.raises(Refused, match="Unauthorized") as error:
        api.items("/api/v1/namespaces/default/pods")
    assert "log in" in error.value.hint


def test_lists_are_paged_and_logs_of_a_run_are_read_once(double):
    api = Api()
    body = Recording("indexed_ok").data["request"]
    body["spec"] |= {"completions": 9, "parallelism": 9}
    api.create("/apis/batch/v1/namespaces/default/jobs", body)
    pods = "/api/v1/namespaces/default/pods"
    end = time.monotonic() + 30
    while time.monotonic() < end and [phase(p) for p in api.items(pods)] != ["Succeeded"] * 9:
        time.sleep(0.1)
    found = api.items(pods)
    assert sorted(index_of(p) for p in found) == list(range(9))
    assert [list(api.lines(f"{pods}/{p['metadata']['name']}/log")) for p in found]
