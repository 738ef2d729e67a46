"""Runs on Kubernetes: one Job a run (`<run>`, then `<run>-r2`, ...), found again by its labels alone.

What the Job's name cannot tell stands in its annotations: OUT, and which plan index each of its own indexes does. So
`status` and `logs` need no state on this machine, and two people see the same run. The one thing that is kept here is
that a run existed (`.dflash/kube/<run>.json`), so that it is `deleted` and not unknown once its Job is gone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dflashctl import show
from dflashctl.backends.base import Known, LogLine, Submission
from dflashctl.backends.kube import Api, Refused
from dflashctl.backends.kueue import Kueue
from dflashctl.backends.podlogs import LogReader, each
from dflashctl.errors import ApiError, PreflightError, TakenError, UsageError, secrets_of
from dflashctl.overrides import refuse_values
from dflashctl.place import Place, Placing, by_digest
from dflashctl.progress import Object, Snapshot, fold, last_said, own_pods, parse_ranges, pod_index
from dflashctl.render import Run, base, render
from dflashctl.why import Cause, why

RUN_LABEL = "dflashctl/run"
MINE = "app.kubernetes.io/managed-by=dflashctl"
OUT, INDEXES, SPEC = "dflashctl/out", "dflashctl/indexes", "dflashctl/spec-sha256"
DELETE_WAIT_S = 90.0  # beyond the grace period of the pods
PROGRESS_EVERY_S = 10.0  # how often a running pod is asked for its last line
LAST_LINES = 20  # of a log that are looked through for one that tells progress
ASKED_AT_ONCE = 8
LINES_S = 3.0  # within which those lines have to be there: a node may have gone


def ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5", as Kubernetes writes completed indexes; order is kept only if ascending."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def manifest(submission: Submission, place: Place, namespace: str) -> dict[str, Any]:
    """The Job of a submission: pure, byte-identical every time."""
    job = render(
        base(submission.kind),
        Run(
            kind=submission.kind,
            run=submission.run,
            job=submission.job,
            namespace=namespace,
            image=place.image,
            argv=submission.argv,
            node=place.node,
            model=submission.model,
            spec_sha256=submission.spec_sha256,
            completions=len(submission.indexes),
            parallelism=submission.parallelism,
            queue=place.queue,
            env=place.env,
            s3_secret=place.s3_secret,
            service_account=place.service_account,
            sets=place.sets,
        ),
    )
    job["metadata"]["annotations"] |= {OUT: submission.out, INDEXES: ranges(submission.indexes)}
    return job


def attempt(job: Object) -> int:
    """`run-r3` -> 3; the first Job of a run is 1, and so is one that somebody else gave our label."""
    found = re.fullmatch(r".*-r([0-9]+)", job["metadata"]["name"])
    return int(found[1]) if found else 1


def planned(job: Object) -> list[int]:
    """The plan's index of each of the Job's own."""
    annotated = parse_ranges((job["metadata"].get("annotations") or {}).get(INDEXES))
    return annotated or list(range(int((job.get("spec") or {}).get("completions") or 1)))


def patience_of(job: Object) -> float:
    """Seconds that the pods of a Job may take to end: they save their work within the grace period."""
    pod = job["spec"]["template"].get("spec") or {}
    return float(pod.get("terminationGracePeriodSeconds") or 30) + DELETE_WAIT_S


def warn_of_tag(job: Object) -> None:
    """A tag can mean another image tomorrow: said, and no reason to stop."""
    image = job["spec"]["template"]["spec"]["containers"][0]["image"]
    if not by_digest(image):
        show.warn(f"image `{image}` is a tag, it may mean another image tomorrow", "name it as REF@sha256:...")


class KubeBackend:
    """Implements `base.Backend` on one namespace; the API is connected to when it is first needed."""

    name = "kube"
    pauses = (0.5, 1.0, 2.0)

    def __init__(
        self, connect: Callable[[], Api], context: str, namespace: str, placing: Placing, home: Path | None = None
    ) -> None:
        self._connect = connect
        self.words = f"context {context or '(none)'}, namespace {namespace}"
        self.namespace = namespace
        self.placing = placing
        self.home = home
        self._jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._events = f"/api/v1/namespaces/{namespace}/events"
        self._asked: dict[str, tuple[float, Mapping[str, Any]]] = {}

    @functools.cached_property
    def api(self) -> Api:
        return self._connect()

    @functools.cached_property
    def kueue(self) -> Kueue:
        return Kueue(self.api, self.namespace)

    # ---- Backend

    def flags(self, last: Mapping[str, Any]) -> dict[str, Any]:
        return self.placing.flags(last)

    def render(self, submission: Submission) -> dict[str, Any]:
        job = manifest(submission, self.placing.place(submission.kind, submission.flags), self.namespace)
        refuse_values(job, secrets_of(os.environ))
        return job

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to hold: the API server makes a Job of one name once, and `submit` takes the one that is there."""
        return contextlib.nullcontext()

    def check(self, submission: Submission) -> None:
        """The API server's own verdict (`--dry-run=server`); nothing is kept there."""
        job = self.render(submission)
        warn_of_tag(job)
        try:
            self.api.create(self._jobs, job, dry_run=True)
        except Refused as error:
            if error.status in (400, 422):
                raise UsageError(f"the API server refuses the Job: {error.message}", "look at --set") from None
            if error.status in (401, 403, 404):
                raise PreflightError(f"Jobs cannot be submitted: {error.message}", error.hint) from None
            if error.status != 409:
                raise
            there = self.api.find(f"{self._jobs}/{submission.job}")
            if there is not None and ((there["metadata"].get("labels") or {}).get(RUN_LABEL) != submission.run):
                raise TakenError(f"Job `{submission.job}` in namespace `{self.namespace}` is not one of dflashctl's",
                                 "choose another --name") from None  # fmt: skip

    def submit(self, submission: Submission) -> None:
        """Of commands that resume at once the one with the newest Job wins: that does all that is missing."""
        job = self.render(submission)
        if not self._is_newest(job):
            return
        try:
            self.api.create(self._jobs, job)
        except Refused as error:
            if error.status != 409:
                raise
            there = self.api.find(f"{self._jobs}/{submission.job}")
            if there is not None and not _same(there, job):
                raise TakenError(f"Job `{submission.job}` of another spec is in namespace `{self.namespace}`",
                                 "choose another --name, or `dflashctl rm` it") from None  # fmt: skip
        self._is_newest(job)
        self._remember(Known(submission.run, submission.kind, submission.out, submission.job, time.time()))

    def _is_newest(self, job: Object) -> bool:
        """Whether no Job of the run is newer; those that are older than the newest are deleted, be it this one."""
        jobs = self._of(job["metadata"]["labels"][RUN_LABEL])
        newest = max([attempt(job), *map(attempt, jobs)])
        for old in jobs:
            if attempt(old) < newest:
                self._delete(old)
        return newest == attempt(job)

    def runs(self) -> list[Known]:
        newest: dict[str, Object] = {}
        for job in self.api.items(self._jobs, labelSelector=MINE):
            run = (job["metadata"].get("labels") or {}).get(RUN_LABEL)
            if run and (run not in newest or attempt(job) > attempt(newest[run])):
                newest[run] = job
        known = [_known(run, job) for run, job in newest.items()]
        known += [k for k in self._remembered() if k.run not in newest]
        return sorted(known, key=lambda k: (-k.created, k.run))

    def snapshot(self, run: str) -> Snapshot | None:
        job, pods = self._objects(run)
        if job is None:
            return None
        events = [] if pods else self._job_events(job)
        seen = fold(job, pods, events, self.kueue.workload(job))
        plan = planned(job)
        said = self._progress(p for p in pods if (p.get("status") or {}).get("phase") == "Running")
        return replace(
            seen,
            failed=tuple(plan[i] for i in seen.failed),
            indexes=tuple(
                replace(i, index=plan[i.index], message=i.message or said.get(i.pod, {})) for i in seen.indexes
            ),
        )

    def logs(self, run: str, indexes: Sequence[int] | None, previous: bool, follow: bool) -> Iterator[LogLine]:
        job, _ = self._objects(run)
        if job is None:
            return iter(())
        plan = planned(job)

        said = ""

        def pods() -> tuple[list[tuple[int, Object]], bool]:
            nonlocal said
            newest, found = self._objects(run)
            seen = fold(newest, found)
            words = f"run {run} is {seen.state}" + (f": {seen.reason}" if seen.reason else "")
            if follow and words != said and seen.state in ("queued", "pending", "stuck", "suspended"):
                show.say(f"{words}; its logs are waited for")
            said = words
            chosen = [(plan[pod_index(p)], p) for p in found]
            return [(i, p) for i, p in chosen if indexes is None or i in indexes], seen.ended

        return LogReader(self.api, self._pods, pods).read(previous=previous, follow=follow)

    def stop(self, run: str) -> None:
        """Suspend: through Kueue's Workload where a queue holds the Job, since Kueue would un-suspend it again."""
        patience = patience_of(self._set_active(run, active=False))
        end = time.monotonic() + patience
        while time.monotonic() < end:
            _, pods = self._objects(run)
            if not any((p.get("status") or {}).get("phase") in ("Pending", "Running") for p in pods):
                return
            time.sleep(0.5)
        raise ApiError(f"pods of `{run}` still run after {patience:.0f} s", "`dflashctl why` names the node")

    def unsuspend(self, run: str) -> None:
        self._set_active(run, active=True)

    def scale(self, run: str, parallelism: int) -> int:
        job = self._newest(run)
        if job["spec"].get("completionMode") != "Indexed":
            raise UsageError(f"run `{run}` is one pod, it has no parallelism", "a training is scaled by its --split")
        usable = min(parallelism, int(job["spec"].get("completions") or 1))
        self.api.patch(f"{self._jobs}/{job['metadata']['name']}", {"spec": {"parallelism": usable}})
        return usable

    def remove(self, run: str) -> None:
        """Delete the run's Jobs with their pods; bucket data is never touched."""
        for job in self._of(run):
            self._delete(job)
        if self.home:
            (self.home / f"{run}.json").unlink(missing_ok=True)

    def why(self, run: str) -> list[Cause]:
        job, pods = self._objects(run)
        nodes = self._nodes(pods) if any(p["metadata"].get("deletionTimestamp") for p in pods) else []
        events = self.api.items(self._events) if job else []
        workload = self.kueue.workload(job) if job else None
        if job and workload:
            workload = {**workload, "pending": self.kueue.pending(job)}
        causes = why(job, pods, events, workload, nodes, time.time())
        plan = planned(job) if job else []
        return [replace(c, indexes=tuple(plan[i] for i in c.indexes)) for c in causes]

    def bundle(self, run: str) -> dict[str, Any]:
        job, pods = self._objects(run)
        events, workload = (self.api.items(self._events), self.kueue.workload(job)) if job else ([], None)
        return {"job": job, "pods": pods, "events": events} | ({"workload": workload} if workload else {})

    # ---- what is remembered here

    def _remember(self, known: Known) -> None:
        if self.home:
            self.home.mkdir(parents=True, exist_ok=True)
            record = asdict(known) | {"namespace": self.namespace}
            (self.home / f"{known.run}.json").write_text(json.dumps(record) + "\n", encoding="utf-8")

    def _remembered(self) -> list[Known]:
        found = []
        for path in sorted(self.home.glob("*.json")) if self.home else ():
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # half a file is no run
                record = json.loads(path.read_bytes())
                if record.pop("namespace") == self.namespace:
                    found.append(Known(**record))
        return found

    # ---- objects

    def _of(self, run: str) -> list[dict[str, Any]]:
        found = self.api.items(self._jobs, labelSelector=f"{RUN_LABEL}={run}")
        return sorted(found, key=attempt)

    def _newest(self, run: str) -> dict[str, Any]:
        jobs = self._of(run)
        if not jobs:
            raise ApiError(f"run `{run}` has no Job in namespace `{self.namespace}`", "see `dflashctl ls`")
        return jobs[-1]

    def _objects(self, run: str) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        jobs = self._of(run)
        if not jobs:
            return None, []
        pods = self.api.items(self._pods, labelSelector=f"batch.kubernetes.io/job-name={jobs[-1]['metadata']['name']}")
        return jobs[-1], own_pods(jobs[-1], pods)  # type: ignore[return-value]

    def _job_events(self, job: Object) -> list[dict[str, Any]]:
        return self.api.items(self._events, fieldSelector=f"involvedObject.uid={job['metadata']['uid']}")

    def _nodes(self, pods: Sequence[Object]) -> list[dict[str, Any]]:
        """The pods' nodes, where this account may read them: a namespaced Role may not, and `why` does without."""
        names = {n for p in pods if (n := (p.get("spec") or {}).get("nodeName"))}
        try:
            return [o for n in sorted(names) if (o := self.api.find(f"/api/v1/nodes/{n}"))]
        except Refused:
            return []

    def _set_active(self, run: str, active: bool) -> Object:
        """The Job that was told."""
        job = self._newest(run)
        workload = self.kueue.workload(job)
        if workload is not None:
            self.kueue.set_active(workload, active)
        else:
            self.api.patch(f"{self._jobs}/{job['metadata']['name']}", {"spec": {"suspend": not active}})
        return job

    def _delete(self, job: Object) -> None:
        path = f"{self._jobs}/{job['metadata']['name']}"
        self.api.delete(path, job["metadata"]["uid"])
        patience = patience_of(job)
        end = time.monotonic() + patience
        while (there := self.api.find(path)) is not None and there["metadata"]["uid"] == job["metadata"]["uid"]:
            if time.monotonic() > end:
                raise ApiError(f"Job `{job['metadata']['name']}` is still being deleted after {patience:.0f} s",
                               "`dflashctl why` names the node that does not answer")  # fmt: skip
            time.sleep(0.3)

    def _progress(self, pods: Iterable[Object]) -> dict[str, Mapping[str, Any]]:
        """Pod name -> the last JSON line it printed, asked at most every PROGRESS_EVERY_S a pod."""
        names, now = [p["metadata"]["name"] for p in pods], time.monotonic()
        due = [n for n in names if now - self._asked.get(n, (-1e9, {}))[0] >= PROGRESS_EVERY_S]
        said = each(self._last_line, due, ASKED_AT_ONCE, LINES_S)
        for name in due:
            self._asked[name] = (now, said.get(name) or self._asked.get(name, (0.0, {}))[1])
        return {n: self._asked[n][1] for n in names}

    def _last_line(self, pod: str) -> Mapping[str, Any]:
        try:
            return last_said(list(self.api.lines(f"{self._pods}/{pod}/log", LINES_S, tailLines=LAST_LINES)))
        except (Refused, ConnectionError):
            return {}  # a pod without a readable last line has no progress to show, and says so by its dashes


def _known(run: str, job: Object) -> Known:
    meta = job["metadata"]
    created = datetime.fromisoformat(meta["creationTimestamp"]).timestamp()
    kind = meta["labels"].get("app.kubernetes.io/component", "tokenize")
    return Known(run, kind, (meta.get("annotations") or {}).get(OUT, ""), meta["name"], created)


def _same(there: Object, mine: Object) -> bool:
    keys = (SPEC, OUT, INDEXES)
    a, b = (o["metadata"].get("annotations") or {} for o in (there, mine))
    return all(a.get(k) == b.get(k) for k in keys)
