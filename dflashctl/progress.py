"""Where a Job stands: a pure fold of the objects a cluster shows (job, pods, events, workload) into one snapshot.

The same plain dicts come from a live cluster, a recording or a test. Nothing here talks to anything, so `status`,
`wait` and `why` can never disagree about what they saw. The order of conditions is that of streams recorded on a real
1.36 cluster: FailureTarget precedes Failed, SuccessCriteriaMet precedes Complete, and an image, a config or a
scheduling error puts no condition on the Job at all, so pods and events are read too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.job import said

Object = Mapping[str, Any]

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

#: Waiting reasons that no amount of waiting mends: a person has to change something.
STUCK_WAITING = frozenset({
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError",
    "CreateContainerError", "RunContainerError", "ImageInspectError", "RegistryUnavailable",
})  # fmt: skip


@dataclass(frozen=True)
class Index:
    """One index: what its newest pod does. `index` is the plan's once a backend has said which; `own` is the Job's."""

    index: int
    state: str  # pending | running | stuck | failed | succeeded
    tries: int = 0
    pod: str = ""
    node: str = ""
    reason: str = ""
    exit_code: int | None = None
    message: Mapping[str, Any] = field(default_factory=dict)  # the pod's termination message, where it is JSON
    own: int | None = None  # completion index of the Job


@dataclass(frozen=True)
class Snapshot:
    """One moment of a run; `state` is one of design's list, without `refused`, which only OUT can tell."""

    state: str
    reason: str = ""
    queue: str = ""
    total: int = 0
    succeeded: int = 0
    active: int = 0
    failed: tuple[int, ...] = ()
    indexes: tuple[Index, ...] = ()

    @property
    def ended(self) -> bool:
        return self.state in ("failed", "succeeded", "deleted")


def parse_ranges(text: str | None) -> list[int]:
    """`"0-2,5"` (Job status, KEP-2214) -> [0, 1, 2, 5]; empty or absent -> []."""
    numbers: list[int] = []
    for part in filter(None, (text or "").split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def condition(obj: Object | None, kind: str) -> Object | None:
    """The condition of that type if it holds (status "True"), else None."""
    for c in ((obj or {}).get("status") or {}).get("conditions") or []:
        if c.get("type") == kind and c.get("status") == "True":
            return c  # type: ignore[no-any-return]
    return None


def pod_index(pod: Object) -> int:
    """The pod's completion index; 0 for a Job that is not Indexed."""
    meta = pod["metadata"]
    text = (meta.get("labels") or {}).get(INDEX_LABEL) or (meta.get("annotations") or {}).get(INDEX_LABEL) or "0"
    return int(text)


def unschedulable(pod: Object) -> str:
    """The scheduler's words if it cannot place the pod, else ""."""
    for c in (pod.get("status") or {}).get("conditions") or []:
        if c.get("type") == "PodScheduled" and c.get("status") == "False" and c.get("reason") == "Unschedulable":
            return str(c.get("message") or "Unschedulable")
    return ""


def containers(pod: Object) -> list[Object]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def waiting(pod: Object) -> tuple[str, str]:
    """(reason, message) of the first container that waits for something, else ("", "")."""
    for c in containers(pod):
        w = (c.get("state") or {}).get("waiting")
        if w:
            return str(w.get("reason") or ""), str(w.get("message") or "")
    return "", ""


def terminated(pod: Object) -> Object | None:
    """The state of the container that decided the pod's end: the first that failed, else the last that ended."""
    ended = [t for c in containers(pod) if (t := (c.get("state") or {}).get("terminated"))]
    return next((t for t in ended if t.get("exitCode")), ended[-1] if ended else None)


def termination_message(pod: Object) -> Mapping[str, Any]:
    """The JSON object a pod of ours left behind; {} for anything else (a number in a log once crashed a client)."""
    end = terminated(pod)
    try:
        value = json.loads((end or {}).get("message") or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def last_said(lines: Sequence[bytes]) -> Mapping[str, Any]:
    """The newest progress among the last lines of a pod's log, else what a training said last, as {"said": words}.

    Lines of ranks and libraries may stand between; one that is cut is no JSON and is passed over.
    """
    words: dict[str, Any] = {}
    for line in reversed(lines):
        try:
            value = json.loads(line) if line.startswith(b"{") else None
        except ValueError:
            continue
        if isinstance(value, dict) and "rows" in value:
            return value
        if isinstance(value, dict) and not words and (text := said(value)):
            words = {"said": text}
    return words


def _age(pod: Object) -> tuple[str, str]:
    return (pod["metadata"].get("creationTimestamp") or "", pod["metadata"].get("name", ""))


def read_index(index: int, pods: Sequence[Object]) -> Index:
    """One index from all its pods, oldest first or not; the newest pod speaks for it unless one succeeded."""
    ordered = sorted(pods, key=_age)
    pod = next((p for p in ordered if _phase(p) == "Succeeded"), ordered[-1])
    state, reason, code = _pod_state(pod)
    return Index(
        index=index,
        state=state,
        tries=len(ordered),
        pod=pod["metadata"].get("name", ""),
        node=(pod.get("spec") or {}).get("nodeName") or "",
        reason=reason,
        exit_code=code,
        message=termination_message(pod),
        own=index,
    )


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase") or "Pending")


def _pod_state(pod: Object) -> tuple[str, str, int | None]:
    """(state, reason, exit code) of one pod."""
    phase, end = _phase(pod), terminated(pod)
    code = None if end is None else int(end.get("exitCode") or 0)
    if phase == "Succeeded":
        return "succeeded", "", code
    if phase == "Failed":
        why = (pod.get("status") or {}).get("reason") or (end or {}).get("reason") or "Error"
        if condition(pod, "DisruptionTarget"):
            why = "DisruptionTarget"
        return "failed", str(why), code
    if words := unschedulable(pod):
        return "stuck", f"Unschedulable: {words}", code
    reason, _ = waiting(pod)
    if reason in STUCK_WAITING:
        return "stuck", reason, code
    if phase == "Running":
        return "running", "Terminating" if pod["metadata"].get("deletionTimestamp") else "", code
    return "pending", reason, code


def own_pods(job: Object, pods: Iterable[Object]) -> list[Object]:
    """The pods that this very Job owns: same UID, not merely the same name (a resumed run reuses names)."""
    uid = (job.get("metadata") or {}).get("uid")
    return [p for p in pods if uid in [r.get("uid") for r in p["metadata"].get("ownerReferences") or []]]


def own_events(job: Object, pods: Iterable[Object], events: Iterable[Object]) -> list[Object]:
    """The events about this Job or one of its pods, by UID; older objects of the same name don't count."""
    uids = {o["metadata"].get("uid") for o in (job, *pods)}
    return [e for e in events if (e.get("involvedObject") or {}).get("uid") in uids]


def fold(
    job: Object | None, pods: Iterable[Object], events: Iterable[Object] = (), workload: Object | None = None
) -> Snapshot:
    """What the objects say, as one snapshot. Pods and events of other Jobs may be among them: they don't count."""
    if job is None:
        return Snapshot("deleted", "the Job is gone")
    spec, status = job.get("spec") or {}, job.get("status") or {}
    by_index: dict[int, list[Object]] = {}
    pods = own_pods(job, pods)
    for pod in pods:
        by_index.setdefault(pod_index(pod), []).append(pod)
    done, broken = set(parse_ranges(status.get("completedIndexes"))), set(parse_ranges(status.get("failedIndexes")))
    indexes = tuple(_settled(read_index(i, by_index[i]), i in done, i in broken) for i in sorted(by_index))
    total = int(spec.get("completions") or 1)
    queue = ((job.get("metadata") or {}).get("labels") or {}).get(QUEUE_LABEL) or ""
    state, reason = _job_state(job, indexes, own_events(job, pods, events), workload, queue)
    return Snapshot(
        state=state,
        reason=reason,
        queue=queue,
        total=total,
        succeeded=int(status.get("succeeded") or 0),
        active=int(status.get("active") or 0),
        failed=tuple(sorted(broken)),
        indexes=indexes,
    )


def _settled(index: Index, done: bool, broken: bool) -> Index:
    """The Job's own verdict outweighs the newest pod: a failed pod of a live index will be tried again."""
    if done:
        state = "succeeded"
    elif broken:
        state = "failed"
    elif index.state == "failed":
        state = "pending"
    else:
        return index
    return Index(**{**index.__dict__, "state": state})


def _job_state(
    job: Object, indexes: Sequence[Index], events: Sequence[Object], workload: Object | None, queue: str
) -> tuple[str, str]:
    if condition(job, "Complete") or condition(job, "SuccessCriteriaMet"):
        return "succeeded", ""
    if c := condition(job, "Failed") or condition(job, "FailureTarget"):
        return "failed", str(c.get("reason") or "")
    if (job.get("metadata") or {}).get("deletionTimestamp"):
        return "deleted", "the Job is being deleted"
    if (job.get("spec") or {}).get("suspend"):
        # Kueue suspends a Job until it is admitted; a person's stop clears the workload's spec.active
        stopped = workload is not None and (workload.get("spec") or {}).get("active") is False
        return ("queued", f"waits in queue {queue}") if queue and not stopped else ("suspended", "")
    stuck = next((i for i in indexes if i.state == "stuck"), None)
    if any(i.state == "running" for i in indexes):
        return "running", stuck.reason if stuck else ""
    if stuck:
        return "stuck", stuck.reason
    live = [i for i in indexes if i.state == "pending"]
    refused = next((e for e in reversed(events) if e.get("reason") == "FailedCreate"), None)
    if refused and not live:
        return "stuck", f"FailedCreate: {refused.get('message') or ''}"
    return "pending", next((i.reason for i in live if i.reason), "")
