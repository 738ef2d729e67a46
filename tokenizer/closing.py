"""`finalise` and a store: reads the records below OUT, writes what they decide. Anyone may, at any time, again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizer.gate import Commit, finalise
from tokenizer.job import (
    COMMITS_DIR,
    CONTRACT,
    DATASET,
    PLAN,
    REFUSED,
    RUNS_DIR,
    Exit,
    JobError,
    Plan,
    RunRecord,
    commit_name,
    newest_gate,
)

if TYPE_CHECKING:
    from tokenizer.store import Store


@dataclass(frozen=True, slots=True)
class Closed:
    """state: complete | refused | incomplete. missing: plan indexes without a commit; record: dataset.json or
    refused.json as a dict."""

    state: str
    reasons: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()
    record: dict[str, Any] | None = None


def read_runs(store: Store) -> list[RunRecord]:
    return [RunRecord.from_json(store.get_bytes(s.key)) for s in store.list(f"{RUNS_DIR}/") if s.key.endswith(".json")]


def read_commit(store: Store, index: int) -> Commit:
    """JobError 78 where it is none, or of another contract version."""
    name = commit_name(index)
    try:
        commit: Commit = json.loads(store.get_bytes(name))
        version = commit["contract"]
    except (ValueError, KeyError, TypeError):
        raise JobError(Exit.CONFIG, f"{store.uri(name)} is not a commit record", "choose another --out") from None
    if version != CONTRACT:
        raise JobError(
            Exit.CONFIG, f"{store.uri(name)} has contract version {version}", "use the release that wrote this dataset"
        )
    return commit


def missing_commits(store: Store, plan: Plan) -> list[int]:
    """Plan indexes without a commit record."""
    names = {stat.key for stat in store.list(f"{COMMITS_DIR}/")}
    return [i for i in range(len(plan.batches)) if commit_name(i) not in names]


def close(store: Store) -> Closed:
    """Finalises OUT if every index has its commit. Idempotent; once dataset.json exists nothing is written.

    Raises StoreError, also where OUT may be read but not written.
    """
    if store.stat(DATASET) is not None:
        return Closed("complete", record=json.loads(store.get_bytes(DATASET)))
    plan = Plan.from_json(store.get_bytes(PLAN))
    missing = missing_commits(store, plan)
    if missing:
        return Closed("incomplete", missing=tuple(missing))
    gate = newest_gate(read_runs(store))
    final = finalise(plan, [read_commit(store, i) for i in range(len(plan.batches))], gate)
    if final.refusal is not None:
        there = store.stat(REFUSED)
        if there is None or store.get_bytes(REFUSED) != final.refusal:
            store.put_bytes(REFUSED, final.refusal)
        return Closed("refused", final.reasons, record=json.loads(final.refusal))
    for name, data in final.files.items():
        store.put_bytes(name, data, if_none_match=name == DATASET)  # a store said it first, or we do: the same bytes
    store.delete(REFUSED)
    return Closed("complete", record=json.loads(final.files[DATASET]))
