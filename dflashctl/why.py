"""Why a run stands still or failed: a pure function of Kubernetes objects and events -> causes, each with its remedy.

Every cause is told in the cluster's own words (the scheduler's, the registry's, the admission's), then what to do. The
most weighty comes first: what stops every pod, then what stops some, then what only delays. What can no longer be seen
(events live about an hour) is said instead of guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dflashctl.progress import (
    QUEUE_LABEL,
    Index,
    Object,
    condition,
    own_events,
    own_pods,
    parse_ranges,
    pod_index,
    terminated,
    termination_message,
    unschedulable,
    waiting,
)
from tokenizer.job import Exit


@dataclass(frozen=True)
class Cause:
    """One reason with its remedy; `indexes` are the Job's own completion indexes it was seen on."""

    kind: str
    message: str
    remedy: str
    weight: int
    indexes: tuple[int, ...] = ()


#: Our exit codes (tokenizer.job.Exit) -> what it means, what to do.
EXIT_CODES: Mapping[int, tuple[str, str]] = {
    Exit.USAGE: ("the pod did not understand its arguments", "use an image of the same release as this CLI"),
    Exit.DATA: ("bad or refused data", "repair the named file and `dflashctl resume`, or `resume --skip-file KEY`"),
    Exit.SELF_CHECK: ("the self-check failed: two encoders disagreed", "report the printed row; nothing was written"),
    Exit.RANK_DIED: ("a rank died", "read `dflashctl logs --failed`; the next try goes on from the last checkpoint"),
    Exit.DISK_FULL: ("the disk is full", "raise the volume's size in the node profile, then `dflashctl resume`"),
    Exit.RETRY: ("a passing fault, to be tried again", "nothing, unless it repeats: read `dflashctl logs --failed`"),
    Exit.DIVERGED: ("the loss is not a number", "lower --lr or look at the rows that the log names"),
    Exit.CONFIG: (
        "credentials, bucket, contract or tokenizer are wrong for all",
        "`dflashctl doctor`, then `dflashctl resume`",
    ),
    Exit.SIGTERM: (
        "stopped by SIGTERM, the index is done again",
        "`dflashctl resume`, unless the Job tries again itself",
    ),
}

KILLED = 128 + 9
AGAIN = "`dflashctl resume` goes on from the last checkpoint"
#: The same for a training (trainer/job.py); the words of the trainer itself, where it left some, outweigh the remedy.
TRAIN_EXIT_CODES: Mapping[int, tuple[str, str]] = {
    Exit.USAGE: ("a flag cannot be", "correct the flag that is named, then `dflashctl train` again"),
    Exit.DATA: ("the dataset is incomplete, refused or degenerate, or a row does not fit", "see `dflashctl inspect`"),
    Exit.SELF_CHECK: (
        "a self-check failed: the drafter that was exported, or the rows of a step, are not those that were trained",
        "report the line above; nothing was overwritten",
    ),
    Exit.RANK_DIED: ("a rank died or fell silent", f"read the end of `dflashctl logs`; {AGAIN}"),
    Exit.DISK_FULL: ("the disk is full, or the data does not fit its cache", f"free space, then {AGAIN}"),
    Exit.RETRY: ("a passing fault, or another attempt trains into OUT", f"see that only one attempt runs; {AGAIN}"),
    Exit.DIVERGED: ("loss or gradients are no numbers", "train again into another --out with a lower --lr"),
    Exit.CONFIG: ("target, tokenizer, drafter, OUT or GPUs do not fit", "correct what is named, then `train` again"),
    Exit.SIGTERM: ("stopped by SIGTERM, the last step is saved", AGAIN),
    KILLED: (
        "killed by SIGKILL, which is what running out of memory looks like",
        f"a smaller --split, --batch-rows or --max-length needs less memory; {AGAIN}",
    ),
}


def meaning(code: int | None, kind: str) -> tuple[str, str]:
    """(what an exit code of ours means, what to do) for a Job of that kind; ("", where to look) for another code."""
    codes = TRAIN_EXIT_CODES if kind == "train" else EXIT_CODES
    look = "read `dflashctl logs`" if kind == "train" else "read `dflashctl logs --failed`"
    return codes.get(code or 0, ("", look))


_JOB_REASONS: Mapping[str, tuple[str, int]] = {
    "DeadlineExceeded": ("raise the deadline with --set, then `dflashctl resume`: commits are kept", 80),
    "BackoffLimitExceeded": ("see the pod's cause; then `dflashctl resume`", 40),
    "MaxFailedIndexesExceeded": (
        "too many indexes failed, the rest was stopped: see causes, then `dflashctl resume`",
        45,
    ),
    "FailedIndexes": ("see the failed indexes' causes, then `dflashctl resume`: only they run again", 40),
}

_WAITING: Mapping[str, tuple[str, int]] = {
    "ErrImagePull": ("check image name, digest and pull secret; then `dflashctl resume --image REF`", 90),
    "ImagePullBackOff": ("check image name, digest and pull secret; then `dflashctl resume --image REF`", 90),
    "InvalidImageName": ("the image reference is no valid name; `dflashctl resume --image REF`", 92),
    "ErrImageNeverPull": ("the node may not pull it: load it there, or `dflashctl resume --image REF`", 90),
    "CreateContainerConfigError": ("create the named secret or configmap here; the pod then starts by itself", 88),
    "CreateContainerError": ("the container cannot be made; read the message", 85),
    "RunContainerError": ("the container cannot be started; read the message", 85),
}


def why(
    job: Object | None,
    pods: Iterable[Object],
    events: Iterable[Object] = (),
    workload: Object | None = None,
    nodes: Iterable[Object] = (),
    now: float = 0.0,
) -> list[Cause]:
    """All causes the objects show, most weighty first; [] when nothing is wrong.

    `now`: seconds since the epoch, used only to tell a pod that is past its grace period from one that ends in time.
    """
    if job is None:
        return [
            Cause(
                "Deleted",
                "the Job is gone, and its pods and events with it",
                "`dflashctl resume` submits what has no commit",
                100,
            )
        ]
    own = own_pods(job, pods)
    told = own_events(job, own, events)
    done = set(parse_ranges((job.get("status") or {}).get("completedIndexes")))
    own = [p for p in own if pod_index(p) not in done]  # what an index overcame is no cause
    causes = [*_job_causes(job, own, told, workload), *_pod_causes(own, told, nodes, now)]
    if causes and not told:
        causes.append(
            Cause(
                "EventsGone",
                "no event is left (they live about an hour): earlier causes cannot be seen",
                "`dflashctl logs --failed` and OUT/logs keep what the pods said",
                1,
            )
        )
    return sorted(causes, key=lambda c: (-c.weight, c.indexes, c.kind))


def _job_causes(job: Object, pods: Sequence[Object], events: Sequence[Object], workload: Object | None) -> list[Cause]:
    causes: list[Cause] = []
    refused = [e for e in events if e.get("reason") == "FailedCreate"]
    if refused and not any((p.get("status") or {}).get("phase") in ("Pending", "Running") for p in pods):
        causes.append(_failed_create(str(refused[-1].get("message") or "")))
    queue = ((job.get("metadata") or {}).get("labels") or {}).get(QUEUE_LABEL)
    if queue and (job.get("spec") or {}).get("suspend"):
        causes.append(_kueue(queue, workload))
    ended = condition(job, "Failed") or condition(job, "FailureTarget")
    if ended:
        reason, message = str(ended.get("reason") or ""), str(ended.get("message") or "")
        if reason == "PodFailurePolicy":
            causes.append(_policy(message, job))
        else:
            remedy, weight = _JOB_REASONS.get(reason, ("read the message, then `dflashctl resume`", 40))
            causes.append(Cause(reason, message, remedy, weight))
    return causes


def _failed_create(message: str) -> Cause:
    """No pod exists: the API server refused it. Quota, Pod Security, a webhook or a missing service account."""
    if "exceeded quota" in message:
        return Cause("Quota", message, "ask for more quota, or lower --parallelism or the profile's resources", 99)
    if "violates PodSecurity" in message:
        return Cause("PodSecurity", message, "remove the --set that breaks the restricted profile", 99)
    if "serviceaccount" in message and "not found" in message:
        return Cause("ServiceAccount", message, "`kubectl apply -k k8s/base`, or name one with --service-account", 99)
    return Cause("FailedCreate", message, "the API server refuses the pods: read its message", 98)


def _kueue(queue: str, workload: Object | None) -> Cause:
    """`pending` of the workload: its line in the queue's list of what waits, positions counted from 0."""
    if workload is None:
        return Cause(
            "KueueNotAdmitted",
            f"queue {queue}: no Workload of this Job can be seen",
            "is Kueue installed, does it watch this namespace, and may you see its Workloads? Without Kueue, "
            "`dflashctl resume` lets the Job run",
            95,
        )
    conditions = {c.get("type"): c for c in (workload.get("status") or {}).get("conditions") or []}
    words = conditions.get("QuotaReserved", {}).get("message") or "not admitted yet"
    if (workload.get("spec") or {}).get("active") is False:
        return Cause("KueueStopped", f"queue {queue}: its Workload is inactive", "`dflashctl resume` queues it", 95)
    pending = workload.get("pending") or {}
    places = [("positionInLocalQueue", "of the queue"), ("positionInClusterQueue", "of its cluster queue")]
    place = ", ".join(f"{int(pending[key]) + 1} {of}" for key, of in places if key in pending)
    return Cause(
        "KueueNotAdmitted",
        f"queue {queue}" + (f", position {place}" if place else "") + f": {words}",
        "wait, or ask the queue's owner for quota of this node kind",
        95,
    )


def _policy(message: str, job: Object) -> Cause:
    """`Container c for pod ns/name-3-x failed with exit code 42 matching FailJob rule at index 0`; only the pods of an
    Indexed Job bear their index.
    """
    found = re.search(r"exit code (\d+) matching \w+ rule at index (\d+)", message)
    words, remedy = meaning(int(found.group(1)) if found else None, _kind(job))
    indexed = (job.get("spec") or {}).get("completionMode") == "Indexed"
    index = re.search(r"pod \S+?-(\d+)-\w+ failed", message) if indexed else None
    return Cause(
        "PodFailurePolicy",
        f"{message}{': ' + words if words else ''}",
        remedy,
        75,
        (int(index.group(1)),) if index else (),
    )


def _kind(obj: Object) -> str:
    """Whether a Job or a pod is of `tokenize` or `train`."""
    labels = (obj.get("metadata") or {}).get("labels") or {}
    return str(labels.get("app.kubernetes.io/component") or "tokenize")


def _pod_causes(pods: Sequence[Object], events: Sequence[Object], nodes: Iterable[Object], now: float) -> list[Cause]:
    lost = {n["metadata"]["name"] for n in nodes if not condition(n, "Ready")}
    seen: dict[tuple[str, str, str, int], set[int]] = {}

    def add(kind: str, message: str, remedy: str, weight: int, pod: Object) -> None:
        seen.setdefault((kind, message, remedy, weight), set()).add(pod_index(pod))

    for pod in pods:
        for cause in _of_pod(pod, events, lost, now):
            add(*cause, pod)
    return [Cause(k, m, r, w, tuple(sorted(i))) for (k, m, r, w), i in seen.items()]


def _of_pod(pod: Object, events: Sequence[Object], lost: set[str], now: float) -> list[tuple[str, str, str, int]]:
    found: list[tuple[str, str, str, int]] = []
    status, spec = pod.get("status") or {}, pod.get("spec") or {}
    if words := unschedulable(pod):
        found.append(
            ("Unschedulable", _scheduler(words), "free or add such nodes, or choose another --node profile", 93)
        )
    reason, message = waiting(pod)
    if reason in _WAITING:
        remedy, weight = _WAITING[reason]
        found.append((reason, message, remedy, weight))
    mine = [e for e in events if (e.get("involvedObject") or {}).get("uid") == pod["metadata"].get("uid")]
    if status.get("phase") == "Pending":
        mount = next((e for e in reversed(mine) if e.get("reason") in ("FailedMount", "FailedAttachVolume")), None)
        if mount:
            found.append(("FailedMount", str(mount.get("message") or ""), "check the named volume or secret", 87))
    if condition(pod, "DisruptionTarget"):
        c = condition(pod, "DisruptionTarget") or {}
        found.append(
            (
                "DisruptionTarget",
                str(c.get("message") or c.get("reason") or "the node gave the pod up"),
                "nothing: it does not count as a failure and runs again",
                20,
            )
        )
    if status.get("reason") == "Evicted":
        found.append(("Evicted", str(status.get("message") or ""), "raise the named resource in the node profile", 72))
    ends_by = pod["metadata"].get("deletionTimestamp")  # already includes the grace period
    if ends_by and (spec.get("nodeName") in lost or _epoch(ends_by) + 30 < now):
        found.append(
            (
                "NodeNotReady",
                f"node {spec.get('nodeName')} does not answer and its pod still terminates",
                "nothing replaces it by itself: bring the node back, or delete the node object",
                89,
            )
        )
    end = terminated(pod)
    if end and end.get("exitCode"):
        found.append(_exit(pod, end))
    return found


def _exit(pod: Object, end: Object) -> tuple[str, str, str, int]:
    code, reason = int(end["exitCode"]), str(end.get("reason") or "Error")
    said = termination_message(pod)
    words = str(said.get("message") or "") + (f" ({said['hint']})" if said.get("hint") else "")
    if reason == "OOMKilled":
        limit = _memory_limit(pod)
        peak = f", peak seen {said['peak_rss']}" if said.get("peak_rss") else ""
        return (
            "OOMKilled",
            f"killed at its memory limit {limit}{peak}",
            "raise memory in the node profile, then `dflashctl resume`",
            78,
        )
    if reason == "StartError":
        return "StartError", str(end.get("message") or ""), "the image has no such command: use ours, by digest", 86
    if code == KILLED:
        return "Killed", "killed (exit 137): by the node, a deletion or a person", "nothing, unless it repeats", 30
    known, remedy = meaning(code, _kind(pod))
    text = f"exit {code}" + (f": {known}" if known else "") + (f": {words}" if words else "")
    return f"Exit{code}", text, remedy, 25 if code in (Exit.RETRY, Exit.SIGTERM) else 70


def of_indexes(indexes: Iterable[Index], kind: str = "tokenize") -> list[Cause]:
    """The causes that indexes tell by their exit codes alone, as processes of this machine do."""
    found: dict[tuple[int | None, str, str], list[int]] = {}
    for index in indexes:
        if index.state not in ("succeeded", "running") and (index.exit_code or index.reason):
            key = (index.exit_code, index.reason, str(index.message.get("hint") or ""))
            found.setdefault(key, []).append(index.index)
    causes = []
    for (code, reason, hint), numbers in found.items():
        words, remedy = meaning(code, kind)
        text = ": ".join(filter(None, (f"exit {code}" if code else "", words, reason)))
        if hint:
            remedy = f"{hint}; {remedy}" if code in (Exit.RANK_DIED, Exit.RETRY, Exit.DISK_FULL) else hint
        weight = 25 if code in (Exit.RETRY, Exit.SIGTERM) else 70
        causes.append(Cause(f"Exit{code}" if code else "Killed", text, remedy, weight, tuple(sorted(numbers))))
    return sorted(causes, key=lambda c: (-c.weight, c.indexes))


def _epoch(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def _memory_limit(pod: Object) -> str:
    for c in (pod.get("spec") or {}).get("containers") or []:
        limit = ((c.get("resources") or {}).get("limits") or {}).get("memory")
        if limit:
            return str(limit)
    return "of the node (none is set)"


def _scheduler(words: str) -> str:
    """`0/9 nodes are available: 8 Insufficient nvidia.com/gpu, 1 node(s) had ...` -> counted by kind, largest first."""
    head, _, rest = words.partition(": ")
    parts: Counter[str] = Counter()
    for part in rest.partition(". ")[0].rstrip(".").split(", "):
        number = re.match(r"(\d+) (.+)", part)
        if number:
            parts[number.group(2)] += int(number.group(1))
    return f"{head}: " + ", ".join(f"{n} x {kind}" for kind, n in parts.most_common()) if parts else words


def as_json(causes: Sequence[Cause]) -> list[dict[str, Any]]:
    return [{"kind": c.kind, "message": c.message, "remedy": c.remedy, "indexes": list(c.indexes)} for c in causes]
