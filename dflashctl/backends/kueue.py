"""What Kueue knows of a Job: its Workload, which `stop` and `resume` steer, and its place in the queue.

A cluster serves one or two versions of Kueue's APIs; the first that answers is taken. Where Kueue is not installed, or
may not be asked, there is no Workload, and the Job alone is what there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflashctl.backends.kube import Api, Refused
from dflashctl.progress import QUEUE_LABEL, Object

VERSIONS = ("v1beta1", "v1beta2")


class Kueue:
    """Kueue in one namespace."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api, self._namespace = api, namespace

    def workload(self, job: Object) -> dict[str, Any] | None:
        """The Workload of a Job that a queue holds, with the name of its API's version as `version`."""
        if not queue_of(job):
            return None
        for version in VERSIONS:
            try:
                found = self._api.items(
                    self._workloads(version), labelSelector=f"kueue.x-k8s.io/job-uid={job['metadata']['uid']}"
                )
            except Refused as error:
                if error.status not in (403, 404):
                    raise
                continue
            return {**found[0], "version": version} if found else None
        return None

    def pending(self, job: Object) -> dict[str, Any]:
        """The Job's line in the list of what waits in its queue, as Kueue's visibility API tells it; {} without."""
        queue = queue_of(job)
        for version in VERSIONS if queue else ():
            path = f"/apis/visibility.kueue.x-k8s.io/{version}/namespaces/{self._namespace}/localqueues"
            try:
                summary = self._api.get(f"{path}/{queue}/pendingworkloads")
            except Refused:  # this one is a comfort: another version, or none
                continue
            for item in summary.get("items") or []:
                owners = (item.get("metadata") or {}).get("ownerReferences") or []
                if job["metadata"]["uid"] in [owner.get("uid") for owner in owners]:
                    return dict(item)
        return {}

    def set_active(self, workload: Mapping[str, Any], active: bool) -> None:
        """Let Kueue evict the Job, or take it into the queue again."""
        path = f"{self._workloads(workload['version'])}/{workload['metadata']['name']}"
        self._api.patch(path, {"spec": {"active": active}})

    def _workloads(self, version: str) -> str:
        return f"/apis/kueue.x-k8s.io/{version}/namespaces/{self._namespace}/workloads"


def queue_of(job: Object) -> str:
    """The LocalQueue that a Job is submitted to, or ""."""
    return str((job["metadata"].get("labels") or {}).get(QUEUE_LABEL) or "")
