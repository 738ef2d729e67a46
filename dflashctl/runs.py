"""Where a run stands: what its backend sees of processes and what OUT holds, folded into one status.

`combine` is pure, so `status`, `wait`, `tokenize` and `ls` cannot disagree. OUT wins over any backend: a dataset that
is complete has succeeded, whatever became of its Job, and one whose files were lost since then has not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflashctl import plan as plans
from dflashctl import trained, verify
from dflashctl.backends.base import Backend, Known
from dflashctl.config import Settings
from dflashctl.errors import ApiError
from dflashctl.progress import Index, Snapshot
from dflashctl.records import QUICK, Out
from tokenizer.job import Plan, RunRecord
from tokenizer.store import StoreError

LIVE = ("queued", "pending", "running")  # states that change by themselves
ENDED = ("failed", "refused", "succeeded", "deleted")
LATEST = "@latest"  # the newest run that the backend knows


@dataclass(frozen=True, slots=True)
class Facts:
    """What OUT says. sizes: input bytes of each index; commits: the records there are; refused: its record."""

    sizes: tuple[int, ...] = ()
    commits: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    dataset: Mapping[str, Any] | None = None
    damage: tuple[str, ...] = ()  # what of a complete dataset is lost or of another size
    refused: Mapping[str, Any] | None = None
    unsettled: str = ""  # why the dataset could not be finalised, though every index has its commit
    unread: str = ""  # why OUT could not be asked; then the rest is not known
    training: trained.Told | None = None  # of a training, instead of all the others


@dataclass(frozen=True, slots=True)
class Status:
    """One moment of a run. rows, tokens, loss_tokens, bytes: of what is committed, and of what runs as far as it is."""

    run: str
    kind: str
    out: str
    state: str
    reason: str = ""
    queue: str = ""
    total: int = 0
    succeeded: int = 0
    active: int = 0
    failed: tuple[int, ...] = ()
    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    bytes: int = 0
    total_bytes: int = 0
    indexes: tuple[Index, ...] = ()

    def document(self) -> dict[str, Any]:
        """The object of `status -o json`."""
        found: dict[str, Any] = {
            "schema": "dflash.status/1",
            "run": self.run,
            "kind": self.kind,
            "state": self.state,
            "reason": self.reason,
            "queue": self.queue,
            "indexes": {
                "total": self.total,
                "succeeded": self.succeeded,
                "active": self.active,
                "failed": list(self.failed),
            },
            "rows": self.rows,
            "tokens": self.tokens,
        }
        return found | ({"training": trained.document(self)} if self.kind == "train" else {})


def combine(known: Known, facts: Facts, snapshot: Snapshot | None) -> Status:
    """The status of a run from what OUT and its backend say; `snapshot` None: the backend knows no Job of it."""
    shown = snapshot.indexes if snapshot else ()
    if facts.training is not None:
        shown = trained.filled(shown, facts.training)
    total = len(facts.sizes) or (snapshot.total if snapshot else len(shown))
    state, reason = _state(known, facts, snapshot, total)
    live = snapshot is not None and state in LIVE
    counts = _counts(known.kind, facts, live)
    seen = {index.index: index if counts(index) else replace(index, message={}) for index in shown}
    done = set(facts.commits) | {i for i, index in seen.items() if index.state == "succeeded" and counts(index)}
    counted: list[Mapping[str, Any]] = [*facts.commits.values()]
    counted += [index.message for i, index in seen.items() if i not in facts.commits]
    totals = facts.dataset or {}
    return Status(
        run=known.run,
        kind=known.kind,
        out=known.out,
        state=state,
        reason=reason,
        queue=snapshot.queue if snapshot else "",
        total=total,
        succeeded=total if facts.dataset else len(done),
        active=snapshot.active if snapshot and live else 0,
        failed=tuple(i for i in snapshot.failed if i not in facts.commits) if snapshot and not facts.dataset else (),
        rows=int(totals.get("rows") or _sum(counted, "rows")),
        tokens=int(totals.get("tokens") or _sum(counted, "tokens")),
        loss_tokens=int(totals.get("loss_tokens") or _sum(counted, "loss_tokens")),
        bytes=sum(facts.sizes)
        if facts.dataset
        else sum(_read_of(i, size, done, seen) for i, size in enumerate(facts.sizes)),
        total_bytes=sum(facts.sizes),
        indexes=tuple(sorted(seen.values(), key=lambda index: index.index)),
    )


def _counts(kind: str, facts: Facts, live: bool) -> Callable[[Index], bool]:
    """Whether what an index said counts. One without a commit is done again once nothing runs; while a Job runs OUT is
    not read at every look, and an OUT that cannot be asked says nothing of commits. A training counts for itself.
    """
    states = ("running", "succeeded") if live else ("succeeded",) if facts.unread else ()
    known = kind == "train" or facts.dataset is not None
    return lambda index: known or index.index in facts.commits or index.state in states


def _state(known: Known, facts: Facts, snapshot: Snapshot | None, total: int) -> tuple[str, str]:
    kind, away = known.kind, known.away
    if facts.damage:
        return "failed", verify.words(facts.damage)
    if facts.dataset is not None or (snapshot is None and facts.training is not None and facts.training.finished):
        return "succeeded", ""
    if snapshot is not None and snapshot.state in (*LIVE, "suspended", "stuck"):
        return snapshot.state, snapshot.reason
    if facts.unread:
        told = f"as far as can be told without OUT: {facts.unread}"
        if snapshot is None:
            return "deleted", told
        return snapshot.state, "; ".join(filter(None, (snapshot.reason, told)))
    complete = total > 0 and len(facts.commits) >= total
    if facts.refused is not None and complete:
        return "refused", "; ".join(str(reason) for reason in facts.refused.get("reasons") or [])
    unsettled = f"every index has its commit, the dataset is not finalised: {facts.unsettled}" if complete else ""
    if snapshot is None:
        away = f" (it was last started {away})" if away else ""
        return "deleted", f"no Job of it is known here{away}, and " + (unsettled or "OUT is not complete")
    if snapshot.state == "succeeded" and kind == "tokenize":
        if complete:  # the pods could not finalise it, and neither can we; else it is done any moment
            return "failed" if facts.unsettled else "running", unsettled
        if not facts.sizes:
            return "failed", "the Job ended, but OUT holds no plan any more: it was removed or moved away"
        return "failed", f"the Job ended, but {total - len(facts.commits)} of {total} indexes have no commit"
    return snapshot.state, snapshot.reason


def unsure(status: Status, facts: Facts) -> bool:
    """Whether the end depends on an OUT that could not be asked; pure. A Job that failed has failed, one that stands
    still stands still, but what a Job did that succeeded or is gone is known by OUT alone.
    """
    return bool(facts.unread) and (
        status.state == "deleted" or (status.state == "succeeded" and status.kind == "tokenize")
    )


def after_refusal(reason: str) -> str:
    """What may be done about a refused dataset; pure. Malformed lines and degenerate rows are allowed by flags of
    their own, a dataset without rows by none.
    """
    clauses = reason.split("; ")
    malformed = [clause for clause in clauses if "more than --max-reject" in clause]
    flags = ["--max-reject FRACTION"] * bool(malformed) + ["--allow-degenerate"] * (len(clauses) > len(malformed))
    look = "look at it with `dflashctl inspect`, and at the lines below `rejected/`"
    if "no row is left to train on" in clauses:
        return f"{look}; no flag finalises a dataset without rows"
    again = "; mended input goes into another --out" if malformed else ""
    return f"{look}; `dflashctl resume {' '.join(flags)}` finalises what is kept{again}"


def _read_of(index: int, size: int, done: set[int], seen: Mapping[int, Index]) -> int:
    """Input bytes of an index that are behind it."""
    if index in done:
        return size
    return min(size, int(seen[index].message.get("bytes") or 0)) if index in seen else 0


def _sum(records: list[Mapping[str, Any]], key: str) -> int:
    return sum(int(record.get(key) or 0) for record in records)


# ---- effects: asking a backend and OUT


def read_facts(out: Out) -> Facts:
    """What OUT holds now; finalises it first if that is all that is missing. Raises JobError (StoreError)."""
    plan = out.plan()
    if plan is None:
        return Facts()
    sizes, dataset = sizes_of(plan), out.dataset()
    if dataset is not None:
        return Facts(sizes, {}, dataset, _damage(out, dataset))
    commits = out.commits(out.committed())
    unsettled = ""
    if len(commits) == len(sizes):
        try:
            out.settle()
        except StoreError as error:
            unsettled = error.message
        dataset = out.dataset()
    if dataset is not None:
        return Facts(sizes, commits, dataset, _damage(out, dataset))
    return Facts(sizes, commits, refused=out.refused(), unsettled=unsettled)


def _damage(out: Out, dataset: Mapping[str, Any]) -> tuple[str, ...]:
    """By names and sizes alone; where OUT may be read but not listed, nothing is known to be lost."""
    with contextlib.suppress(StoreError):
        return tuple(verify.damage(out, dataset, hashes=False))
    return ()


def sizes_of(plan: Plan) -> tuple[int, ...]:
    """Input bytes of each index."""
    return tuple(sum(o.size for o in batch.objects) for batch in plan.batches)


def look(backend: Backend, known: Known, out: Out) -> tuple[Status, Facts]:
    """(status, OUT's part of it): a store that is not there is no reason to fail, `Facts.unread` says so."""
    snapshot = backend.snapshot(known.run)
    try:
        facts = Facts(training=trained.told(out)) if known.kind == "train" else read_facts(out)
    except StoreError as error:
        plan = out.cached_plan()
        facts = Facts(sizes_of(plan) if plan else (), unread=error.message)
    return combine(known, facts, snapshot), facts


def find(reference: str, backend: Backend, settings: Settings) -> Known:
    """The run that a user means by a name, `@latest` or the URI of an OUT; raises ApiError if nobody knows it."""
    known = backend.runs()
    if "/" in reference:
        return _of_out(reference, known, None)
    if reference == LATEST and known:
        return known[0]
    for run in known:
        if run.run == reference:
            return run
    configured = settings.section("tokenize", {})["out"].value or settings.section("train", {})["out"].value
    if configured:
        return _of_out(configured, known, None if reference == LATEST else reference)
    if reference == LATEST:
        raise ApiError(
            "no run is known here", "name the OUT of one instead, e.g. `dflashctl status s3://bucket/dataset`"
        )
    raise ApiError(f"run `{reference}` is not known here", "see `dflashctl ls`, or name its OUT, with a slash: `./OUT`")


def _of_out(uri: str, known: list[Known], run: str | None) -> Known:
    """The newest run (or that run) of an OUT, from its own records."""
    out = Out(uri, QUICK)
    training = trained.known_of(out, known)
    if training is not None and run in (None, training.run):
        return training
    records = [record for record in out.runs() if run in (None, plans.run_of(record.run))]
    if not records:
        what = f"run `{run}` is not known here, nor to `{out.uri}`" if run else f"`{out.uri}` holds no run"
        raise ApiError(what, "see `dflashctl ls`")
    return known_of(records[-1], out.uri, known)


def known_of(record: RunRecord, out: str, known: list[Known]) -> Known:
    """A record of OUT as a known run: this backend's if it keeps that Job, else of where on this machine it started."""
    name = plans.run_of(record.run)
    here = next((k for k in known if k.run == name and k.out == out), None)
    flags = record.flags
    home, host = str(flags.get("home") or ""), str(flags.get("host") or "")
    if (here is not None and here.job == record.run) or not home:
        return here or Known(name, "tokenize", out, record.run, 0.0)
    if trained.home_of(flags):
        return Known(name, "tokenize", out, record.run, 0.0, home)
    return replace(here or Known(name, "tokenize", out, record.run, 0.0), away=f"on {host} in {Path(home).parent}")
