"""The fold of cluster objects into a state, on objects of our own and on every stream that a real cluster sent."""

from __future__ import annotations

import pytest
from k8s_objects import SCENARIOS, Recording, container, ended, event, exited, job, pod

from dflashctl.progress import condition, fold, last_said, parse_ranges


@pytest.mark.parametrize(
    ("text", "numbers"), [(None, []), ("", []), ("3", [3]), ("0-2,5", [0, 1, 2, 5]), ("1,2", [1, 2])]
)
def test_ranges(text, numbers):
    assert parse_ranges(text) == numbers


def test_a_job_that_is_gone_is_deleted():
    assert fold(None, []).state == "deleted"
    leaving = job()
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert fold(leaving, []).state == "deleted"


def test_conditions_decide_before_pods():
    running = [pod(0)]
    assert fold(job(conditions=[ended("FailureTarget", "DeadlineExceeded")]), running).state == "failed"
    assert fold(job(conditions=[ended("SuccessCriteriaMet", "CompletionsReached")]), running).state == "succeeded"
    not_yet = {"type": "Failed", "status": "False"}
    assert condition(job(conditions=[not_yet]), "Failed") is None
    assert fold(job(conditions=[not_yet]), running).state == "running"


def test_suspended_and_queued_differ_by_the_queue_and_by_who_stopped_it():
    suspended = job()
    suspended["spec"]["suspend"] = True
    assert fold(suspended, []).state == "suspended"
    suspended["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpu"
    assert (fold(suspended, []).state, fold(suspended, []).queue) == ("queued", "gpu")
    assert fold(suspended, [], workload={"spec": {"active": False}}).state == "suspended"
    assert fold(suspended, [], workload={"spec": {"active": True}}).state == "queued"


def test_pods_that_cannot_start_are_stuck_at_once():
    for reason in ("ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError", "InvalidImageName"):
        seen = fold(job(), [pod(0, "Pending", containerStatuses=container(waiting={"reason": reason, "message": "x"}))])
        assert (seen.state, seen.reason) == ("stuck", reason)
    words = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}]
    seen = fold(job(), [pod(0, "Pending", conditions=conditions)])
    assert (seen.state, seen.reason) == ("stuck", f"Unschedulable: {words}")


def test_a_run_with_one_stuck_and_one_running_pod_runs_and_says_what_is_stuck():
    bad = pod(1, "Pending", containerStatuses=container(waiting={"reason": "ErrImagePull"}))
    seen = fold(job(), [pod(0), bad])
    assert (seen.state, seen.reason) == ("running", "ErrImagePull")


def test_no_pod_could_be_made():
    refused = event("u1", "FailedCreate", "exceeded quota: compute")
    assert fold(job(), [], [refused]).state == "stuck"
    assert fold(job(), [], [event("of-another-job", "FailedCreate", "exceeded quota")]).state == "pending"
    assert fold(job(), [pod(0, "Pending")], [refused]).state == "pending"


def test_container_creating_is_pending_with_its_reason():
    seen = fold(job(), [pod(0, "Pending", containerStatuses=container(waiting={"reason": "ContainerCreating"}))])
    assert (seen.state, seen.reason) == ("pending", "ContainerCreating")


def test_a_failed_pod_of_a_live_index_is_pending_and_counts_its_tries():
    tries = [pod(0, "Failed", n=1, containerStatuses=exited(137, "OOMKilled")), pod(0, "Pending", n=2)]
    [index] = fold(job(), tries).indexes
    assert (index.state, index.tries, index.pod) == ("pending", 2, "run-0-2")
    [index] = fold(job(), tries[:1]).indexes
    assert (index.state, index.reason, index.exit_code) == ("pending", "OOMKilled", 137)
    [index] = fold(job(failedIndexes="0"), tries[:1]).indexes
    assert index.state == "failed"


def test_an_index_that_succeeded_stays_so_whatever_pod_came_after():
    pods = [pod(0, "Succeeded", n=1, containerStatuses=exited(0, "Completed")), pod(0, "Failed", n=2)]
    [index] = fold(job(completedIndexes="0"), pods).indexes
    assert (index.state, index.pod) == ("succeeded", "run-0-1")


def test_disruption_and_terminating_are_named():
    [index] = fold(job(), [pod(0, "Failed", conditions=[ended("DisruptionTarget", "PreemptionByScheduler")])]).indexes
    assert index.reason == "DisruptionTarget"
    leaving = pod(0)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    [index] = fold(job(), [leaving]).indexes
    assert (index.state, index.reason) == ("running", "Terminating")


def test_termination_message_must_be_a_json_object():
    for message, want in (('{"rows": 5}', {"rows": 5}), ("42", {}), ("not json", {}), ("", {})):
        [index] = fold(job(), [pod(0, "Failed", containerStatuses=exited(65, message=message))]).indexes
        assert index.message == want


def test_the_last_lines_of_a_log_tell_progress_or_the_last_words():
    line = b'{"event": "progress", "rows": 7}\n'
    assert last_said([b"talk\n", line, b'{"cut": ', b"[0] more\n"]) == {"rows": 7, "event": "progress"}
    assert last_said([b"talk\n", b"7\n"]) == {}
    notes = [b'{"event": "note", "message": "%s"}\n' % words for words in (b"compiling", b"loading")]
    assert last_said([*notes, b"[target:0] x\n"]) == {"said": "loading"}


def test_pods_of_another_job_with_the_same_name_do_not_count():
    assert fold(job(uid="new"), [pod(0, uid="old")]).indexes == ()


FINAL = {
    "indexed_ok": "succeeded", "fail_index": "failed", "max_failed_indexes": "failed", "backoff_exceeded": "failed",
    "fail_job": "failed", "image_missing": "stuck", "bad_command": "failed", "bad_configmap": "stuck", "oom": "failed",
    "unschedulable_gpu": "stuck", "deadline": "failed", "success_policy": "succeeded", "suspend": "suspended",
    "delete_running": "deleted", "pod_deleted_by_hand": "succeeded", "peer_dies": "failed", "sidecar_target": "succeeded",
}  # fmt: skip


@pytest.mark.parametrize(("name", "state"), FINAL.items())
def test_every_recorded_stream_ends_in_the_right_state_and_never_leaves_an_end(name, state):
    recording = Recording(name)
    seen = [fold(*recording.at(t)) for t in recording.times() if t >= recording.data["job"][0]["t"]]
    assert seen[-1].state == state
    ends = [i for i, s in enumerate(seen) if s.ended]
    assert ends == list(range(ends[0], len(seen))) if ends else state in ("stuck", "suspended")
    known = {"queued", "pending", "running", "suspended", "stuck", "failed", "succeeded", "deleted"}
    assert {s.state for s in seen} <= known


def test_every_scenario_that_was_recorded_is_tested():
    assert set(SCENARIOS) == set(FINAL)


def test_recorded_failed_indexes_name_their_exit_codes():
    recording = Recording("fail_index")
    seen = fold(*recording.at(1e9))
    assert seen.failed == (1, 2)
    assert {i.index: i.exit_code for i in seen.indexes} == {0: 0, 1: 42, 2: 3, 3: 0}
    assert {i.index: i.tries for i in seen.indexes}[2] == 2
