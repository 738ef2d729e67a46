"""Each cause the design names, by the objects that show it; then what a real cluster recorded."""

from __future__ import annotations

import pytest
from k8s_objects import Recording, container, ended, event, exited, job, pod

from dflashctl.progress import Index
from dflashctl.why import EXIT_CODES, as_json, of_indexes, why
from tokenizer.job import Exit


def kinds(*args, **kw):
    return [c.kind for c in why(*args, **kw)]


def test_nothing_is_wrong_with_a_healthy_run():
    assert why(job(), [pod(0)], [event("u1", "SuccessfulCreate", "")]) == []


def test_a_job_that_is_gone():
    assert kinds(None, []) == ["Deleted"]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ('pods "run-0" is forbidden: exceeded quota: compute, requested: cpu=4', "Quota"),
        ('pods "run-0" is forbidden: violates PodSecurity "restricted:latest"', "PodSecurity"),
        ('error looking up service account n/x: serviceaccount "x" not found', "ServiceAccount"),
        ('admission webhook "policy" denied the request', "FailedCreate"),
    ],
)
def test_no_pod_exists_because_it_was_refused(message, kind):
    [cause] = why(job(), [], [event("u1", "FailedCreate", message)])
    assert (cause.kind, cause.message) == (kind, message)
    assert cause.remedy
    assert why(job(), [pod(0)], [event("u1", "FailedCreate", message)]) == []


def test_kueue_tells_the_position_and_the_reason():
    waiting = job()
    waiting["spec"]["suspend"] = True
    waiting["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpu"
    workload = {
        "status": {
            "conditions": [
                {"type": "QuotaReserved", "status": "False", "message": "insufficient quota for nvidia.com/gpu"}
            ]
        },
        "pending": {"positionInLocalQueue": 0, "positionInClusterQueue": 2},
    }
    cause = why(waiting, [], [], workload)[0]
    assert (cause.kind, cause.message) == (
        "KueueNotAdmitted",
        "queue gpu, position 1 of the queue, 3 of its cluster queue: insufficient quota for nvidia.com/gpu",
    )
    assert why(waiting, [], [], {})[0].message == "queue gpu: not admitted yet"
    assert "installed" in why(waiting, [])[0].remedy
    assert kinds(waiting, [], [], {"spec": {"active": False}}) == ["KueueStopped", "EventsGone"]


def test_the_schedulers_words_are_counted_by_kind():
    words = (
        "0/9 nodes are available: 2 node(s) had untolerated taint {x: y}, 7 Insufficient nvidia.com/gpu. "
        "preemption: 0/9 nodes are available: 9 No preemption victims found."
    )
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}]
    pods = [pod(i, "Pending", conditions=conditions) for i in (2, 0)]
    cause = why(job(), pods)[0]
    assert (
        cause.message
        == "0/9 nodes are available: 7 x Insufficient nvidia.com/gpu, 2 x node(s) had untolerated taint {x: y}"
    )
    assert cause.indexes == (0, 2)
    conditions[0]["message"] = "no nodes"
    assert why(job(), pods)[0].message == "no nodes"


@pytest.mark.parametrize(
    "reason",
    ["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"],
)
def test_containers_that_wait_for_a_person(reason):
    status = container(waiting={"reason": reason, "message": 'secret "s3" not found'})
    cause = why(job(), [pod(1, "Pending", containerStatuses=status)])[0]
    assert (cause.kind, cause.message, cause.indexes) == (reason, 'secret "s3" not found', (1,))


def test_mounts_evictions_disruptions_and_lost_nodes():
    pending = pod(0, "Pending")
    mount = event("p0-0", "FailedMount", 'secret "ca" not found', kind="Pod")
    assert kinds(job(), [pending], [mount]) == ["FailedMount"]
    evicted = pod(0, "Failed", reason="Evicted", message="The node was low on resource: ephemeral-storage.")
    assert kinds(job(), [evicted])[0] == "Evicted"
    preempted = pod(0, "Failed", conditions=[ended("DisruptionTarget", "PreemptionByScheduler", "preempting")])
    assert kinds(job(), [preempted])[0] == "DisruptionTarget"
    leaving = pod(0)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    node = {"metadata": {"name": "node-a"}, "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
    assert kinds(job(), [leaving], nodes=[node])[0] == "NodeNotReady"
    assert kinds(job(), [leaving]) == []
    assert kinds(job(), [leaving], now=2e9)[0] == "NodeNotReady"


def test_out_of_memory_tells_the_limit_and_the_peak():
    status = exited(137, "OOMKilled", '{"peak_rss": "5.9 GiB"}')
    cause = why(job(), [pod(0, "Failed", containerStatuses=status)])[0]
    assert (cause.kind, cause.message) == ("OOMKilled", "killed at its memory limit 6Gi, peak seen 5.9 GiB")
    unlimited = pod(0, "Failed", containerStatuses=exited(137, "OOMKilled"))
    unlimited["spec"]["containers"][0]["resources"] = {}
    assert why(job(), [unlimited])[0].message == "killed at its memory limit of the node (none is set)"


def test_a_killed_pod_and_an_unknown_code():
    assert kinds(job(), [pod(0, "Failed", containerStatuses=exited(137))])[0] == "Killed"
    cause = why(job(), [pod(0, "Failed", containerStatuses=exited(3))])[0]
    assert (cause.kind, cause.message) == ("Exit3", "exit 3")


@pytest.mark.parametrize("code", [c for c in Exit if c])
def test_every_exit_code_of_ours_is_explained(code):
    status = exited(int(code), message='{"message": "s3://b/k[/x]: cut gzip", "hint": "copy it again"}')
    cause = why(job(), [pod(0, "Failed", containerStatuses=status)])[0]
    assert cause.kind == f"Exit{int(code)}"
    assert EXIT_CODES[code][0] in cause.message
    assert "s3://b/k[/x]: cut gzip (copy it again)" in cause.message


@pytest.mark.parametrize(
    "reason", ["DeadlineExceeded", "BackoffLimitExceeded", "MaxFailedIndexesExceeded", "FailedIndexes", "Other"]
)
def test_the_jobs_own_end(reason):
    cause = why(job(conditions=[ended("Failed", reason, "words")]), [])[0]
    assert (cause.kind, cause.message) == (reason, "words")
    assert "resume" in cause.remedy


def test_a_failure_policy_names_rule_code_and_index():
    message = "Container c for pod n/run-3-abcde failed with exit code 78 matching FailJob rule at index 1"
    cause = why(job(conditions=[ended("Failed", "PodFailurePolicy", message)]), [])[0]
    assert cause.indexes == (3,)
    assert EXIT_CODES[78][0] in cause.message
    assert cause.remedy == EXIT_CODES[78][1]
    other = why(job(conditions=[ended("Failed", "PodFailurePolicy", "words")]), [])[0]
    assert (other.message, other.indexes) == ("words", ())


def test_a_training_has_remedies_of_its_own_and_no_index_in_its_pods_name():
    labels = {"app.kubernetes.io/component": "train"}
    words = "Container trainer for pod n/trn-out-12345678-abcde failed with exit code 65 matching FailJob rule at index 1"
    training = job(completions=1, conditions=[ended("Failed", "PodFailurePolicy", words)])
    training["spec"].pop("completionMode")
    failed = pod(0, "Failed", containerStatuses=exited(65))
    for obj in (training, failed):
        obj["metadata"]["labels"] |= labels
    causes = why(training, [failed], [event("u1", "x", "y")])
    assert [cause.kind for cause in causes] == ["PodFailurePolicy", "Exit65"]
    assert causes[0].indexes == () and all("inspect" in cause.remedy for cause in causes)


def test_it_says_that_events_are_gone_and_orders_by_weight():
    failed = job(conditions=[ended("Failed", "BackoffLimitExceeded", "limit")])
    seen = why(failed, [pod(0, "Failed", containerStatuses=exited(137, "OOMKilled"))])
    assert [c.kind for c in seen] == ["OOMKilled", "BackoffLimitExceeded", "EventsGone"]
    assert as_json(seen)[0]["indexes"] == [0]
    assert kinds(failed, [], [event("u1", "BackoffLimitExceeded", "")]) == ["BackoffLimitExceeded"]


FIRST = {
    "fail_index": "Exit42", "max_failed_indexes": "Exit1", "backoff_exceeded": "Exit1", "fail_job": "PodFailurePolicy",
    "image_missing": "ErrImageNeverPull", "bad_command": "StartError", "bad_configmap": "CreateContainerConfigError",
    "oom": "OOMKilled", "unschedulable_gpu": "Unschedulable", "deadline": "DeadlineExceeded", "peer_dies": "Exit7",
    "delete_running": "Deleted", "indexed_ok": None, "success_policy": None, "suspend": None, "sidecar_target": None,
    "pod_deleted_by_hand": None,
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), FIRST.items())
def test_the_first_cause_of_every_recorded_scenario(name, kind):
    seen = why(*Recording(name).at(1e9))
    assert (seen[0].kind if seen else None) == kind
    assert all(c.remedy for c in seen)


def test_indexes_alone_tell_their_exit_codes():
    """As the backend without pods has them."""
    indexes = [
        Index(3, "failed", exit_code=65, reason="a.jsonl is cut"),
        Index(1, "failed", exit_code=65, reason="a.jsonl is cut"),
        Index(2, "pending", exit_code=75, reason="slow down"),
        Index(4, "failed", reason="ended by signal 9"),
        Index(5, "succeeded", exit_code=0),
        Index(6, "running", reason="x"),
    ]
    causes = of_indexes(indexes)
    assert [(c.kind, c.indexes) for c in causes] == [("Exit65", (1, 3)), ("Killed", (4,)), ("Exit75", (2,))]
    assert causes[0].message == "exit 65: bad or refused data: a.jsonl is cut" and "--skip-file" in causes[0].remedy
