"""Commit records in, a dataset's closing files or a refusal out: pure, in the standard library alone.

Every pod calls `finalise` after its commit, and so does the CLI: whoever comes last writes, and all would write the
same bytes. The gate looks at all rows before the filter, so that a data set of six learnt tokens a row is refused
whatever the filter hides (the historic failure: 87 % of rows with six loss tokens, an hour of training on them).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from tokenizer.job import (
    COMMITS_DIR,
    CONTRACT,
    DATASET,
    DATASET_INFO,
    MALFORMED,
    STATE,
    Exit,
    GateFlags,
    JobError,
    Plan,
    canonical,
    commit_name,
)

SHARED_LOSS_COUNT = 32  # more than half of the rows with one loss count up to this is degenerate
SHARED_TEXT = 0.20  # so is one supervised text in more than this share of the rows
LISTED_TEXT = 0.01  # a text in at least this share of an index's rows is in its commit


class FileRef(TypedDict):
    name: str
    sha256: str
    bytes: int


class Lines(TypedDict):
    """seen == kept + sum(rejected.values())"""

    seen: int
    kept: int
    rejected: dict[str, int]


class Histogram(TypedDict):
    """Loss tokens per row (as a decimal string) -> rows, exact; before: with the rows that the filter took out."""

    before: dict[str, int]
    after: dict[str, int]


class Supervised(TypedDict):
    """A supervised text that several rows share; `hash` joins it across indexes, `text` is its beginning."""

    hash: str
    text: str
    count: int


class Commit(TypedDict):
    """commits/<index>.json, a function of input, spec, contract version and image only."""

    contract: int
    spec_sha256: str
    index: int
    shard: FileRef
    rejected: FileRef
    objects: list[dict[str, str]]  # key, sha256 of the bytes read
    batch_inputs: list[dict[str, str]]  # the same of the request files that rows were joined with
    skipped: list[str]
    lines: Lines
    turns_rejected: dict[str, int]
    rows: int
    tokens: int
    loss_tokens: int
    cut: dict[str, int]  # rows and loss_tokens that --max-length cost
    control_tokens: int  # literals of control tokens in replies, encoded as ordinary text
    histogram: Histogram
    supervised: list[Supervised]
    samples: list[dict[str, Any]]
    content_sha256: str


@dataclass(frozen=True, slots=True)
class Final:
    """What `finalise` decides. files: name -> bytes, to be written in this order; refusal: bytes of refused.json."""

    files: dict[str, bytes]
    refusal: bytes | None
    reasons: tuple[str, ...]


def degenerate_reasons(
    before: Mapping[str, int], rows: int, supervised: Iterable[Supervised], min_loss_tokens: int
) -> list[str]:
    """Why these rows teach nothing; empty if they do. before: histogram ahead of the filter; rows: kept ones."""
    reasons = []
    total = sum(before.values())
    if not rows:
        reasons.append("no row is left to train on")
    if total:
        loss, count = max(before.items(), key=lambda item: (item[1], -int(item[0])))
        if count > max(1, total / 2) and int(loss) <= SHARED_LOSS_COUNT:
            reasons.append(f"{count / total:.1%} of {total} rows have exactly {loss} loss tokens")
        few = sum(n for length, n in before.items() if int(length) < min_loss_tokens)
        if few > total / 2:
            reasons.append(f"{few / total:.1%} of {total} rows have fewer than {min_loss_tokens} loss tokens")
        top = max(supervised, key=lambda s: (s["count"], s["hash"]), default=None)
        if top and top["count"] > max(1, total * SHARED_TEXT):
            reasons.append(f"{top['count'] / total:.1%} of {total} rows learn the same text: {top['text'][:60]!r}")
    return reasons


def merge_supervised(parts: Iterable[Iterable[Supervised]]) -> list[Supervised]:
    """Counts of equal texts added up, most common first; a part lists only what is in 1 % of its rows."""
    texts: dict[str, Supervised] = {}
    for part in parts:
        for s in part:
            known = texts.setdefault(s["hash"], {**s, "count": 0})
            known["count"] += s["count"]
    return sorted(texts.values(), key=lambda s: (-s["count"], s["hash"]))


def merge_counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(sorted(total.items()))


def summary(plan: Plan, commits: Sequence[Commit]) -> dict[str, Any]:
    """The whole dataset in figures, from some or all of its commits (in any order)."""
    ordered = sorted(commits, key=lambda c: c["index"])
    before = merge_counts(c["histogram"]["before"] for c in ordered)
    rows = sum(c["rows"] for c in ordered)
    supervised = [
        s
        for s in merge_supervised(c["supervised"] for c in ordered)
        if s["count"] >= max(2, math.ceil(LISTED_TEXT * sum(before.values())))
    ]
    reasons = degenerate_reasons(before, rows, supervised, plan.spec.min_loss_tokens)
    return {
        "rows": rows,
        "tokens": sum(c["tokens"] for c in ordered),
        "loss_tokens": sum(c["loss_tokens"] for c in ordered),
        "lines": {
            "seen": sum(c["lines"]["seen"] for c in ordered),
            "kept": sum(c["lines"]["kept"] for c in ordered),
            "rejected": merge_counts(c["lines"]["rejected"] for c in ordered),
        },
        "turns_rejected": merge_counts(c["turns_rejected"] for c in ordered),
        "cut": merge_counts(c["cut"] for c in ordered),
        "control_tokens": sum(c["control_tokens"] for c in ordered),
        "histogram": {"before": before, "after": merge_counts(c["histogram"]["after"] for c in ordered)},
        "supervised": supervised,
        "samples": [s for c in ordered for s in c["samples"]][:3],
        "skipped": sorted(key for c in ordered for key in c["skipped"]),
        "left_out": plan.left_out,
        "degenerate": bool(reasons),
        "reasons": reasons,
    }


def too_many_rejects(lines: Lines, max_reject: float) -> str | None:
    """One clause if more than `max_reject` of the lines seen are malformed; filtered lines do not count."""
    malformed = {reason: n for reason, n in lines["rejected"].items() if reason in MALFORMED}
    bad = sum(malformed.values())
    if not bad or bad <= max_reject * lines["seen"]:
        return None
    worst = ", ".join(f"{reason} {n}" for reason, n in sorted(malformed.items(), key=lambda i: (-i[1], i[0])))
    return f"{bad} of {lines['seen']} lines are malformed, more than --max-reject {max_reject:g} allows ({worst})"


def check_keys(plan: Plan, commits: Sequence[Commit]) -> None:
    """Every plan key is in exactly one commit, that of its index, as read or skipped; JobError 78 otherwise."""
    for commit in commits:
        name = commit_name(commit["index"])
        if commit["contract"] != CONTRACT or commit["spec_sha256"] != plan.spec.sha256():
            raise JobError(Exit.CONFIG, f"`{name}` belongs to another plan or contract version", "choose another --out")
        have = sorted([o["key"] for o in commit["objects"]] + commit["skipped"])
        if have != sorted(o.key for o in plan.batches[commit["index"]].objects):
            raise JobError(Exit.CONFIG, f"`{name}` does not hold the objects of its index", "choose another --out")


def finalise(plan: Plan, commits: Sequence[Commit], gate: GateFlags) -> Final:
    """The closing files of a dataset whose every index has a commit, or its refusal; the same bytes by whoever asks.

    Raises JobError 78 where a commit is missing, doubled or of another plan.
    """
    indexes = sorted(c["index"] for c in commits)
    if indexes != list(range(len(plan.batches))):
        raise JobError(
            Exit.CONFIG, f"`{COMMITS_DIR}/` does not hold one record for each of {len(plan.batches)} indexes"
        )
    check_keys(plan, commits)
    ordered = sorted(commits, key=lambda c: c["index"])
    report = summary(plan, ordered)
    reasons = [] if gate.allow_degenerate and report["rows"] else list(report["reasons"])
    rejects = too_many_rejects(report["lines"], gate.max_reject)
    if rejects:
        reasons.append(rejects)
    content = hashlib.sha256(b"".join(bytes.fromhex(c["content_sha256"]) for c in ordered)).hexdigest()
    record: dict[str, Any] = {
        "contract": CONTRACT,
        "spec": asdict(plan.spec),
        "spec_sha256": plan.spec.sha256(),
        "model": plan.model,
        "gate": asdict(gate),
        **report,
        "content_sha256": content,
    }
    if reasons:
        return Final({}, canonical({**record, "reasons": reasons}), tuple(reasons))
    record["shards"] = [
        {**c["shard"], **{k: c[k] for k in ("index", "rows", "tokens", "loss_tokens", "content_sha256")}}
        for c in ordered
    ]
    files = {
        DATASET_INFO: canonical(dataset_info()),
        STATE: canonical(state([c["shard"]["name"] for c in ordered], content)),
        DATASET: canonical(record),
    }
    return Final(files, None, ())


def features() -> dict[str, Any]:
    """The columns in the words of Hugging Face `datasets`."""

    def value(dtype: str) -> dict[str, Any]:
        return {"dtype": dtype, "_type": "Value"}

    def listed(dtype: str) -> dict[str, Any]:
        return {"feature": value(dtype), "_type": "List"}

    return {
        "input_ids": listed("int32"),
        "loss_mask": listed("int8"),
        "id": value("string"),
        "source_id": value("string"),
        "n_loss": value("int32"),
    }


def dataset_info() -> dict[str, Any]:
    return {"citation": "", "description": "", "features": features(), "homepage": "", "license": ""}


def state(shards: Sequence[str], content_sha256: str) -> dict[str, Any]:
    return {
        "_data_files": [{"filename": name} for name in shards],
        "_fingerprint": content_sha256[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
