"""What makes a dataset (`Plan`) and what may change from Job to Job (`RunRecord`), as pure values; names below OUT.

plan.json is written once and is the lock of OUT; runs/<run>.json is written before each Job.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from tokenizer.errors import Exit, JobError

CONTRACT = 1  # version of argv, plan, commit and shard; another version in a plan or argv exits 78

# ---- names below OUT

PLAN = "plan.json"
DATASET = "dataset.json"  # its presence is the dataset's completeness
REFUSED = "refused.json"
DATASET_INFO = "dataset_info.json"
STATE = "state.json"
TOKENIZER_DIR = "tokenizer"
TOKENIZER_FILES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
COMMITS_DIR, RUNS_DIR, REJECTED_DIR, STATS_DIR, LOGS_DIR = "commits", "runs", "rejected", "stats", "logs"


def shard_name(index: int, shards: int) -> str:
    return f"data-{index:05d}-of-{shards:05d}.arrow"


def rejected_name(index: int) -> str:
    return f"{REJECTED_DIR}/{index:05d}.jsonl"


def commit_name(index: int) -> str:
    return f"{COMMITS_DIR}/{index:05d}.json"


def stats_name(run: str, index: int) -> str:
    return f"{STATS_DIR}/{run}-{index:05d}.json"


def run_name(run: str) -> str:
    return f"{RUNS_DIR}/{run}.json"


def log_name(run: str, index: int, attempt: int) -> str:
    """Where the last 64 KiB of a failed pod's log go."""
    return f"{LOGS_DIR}/{run}/{index:05d}-{attempt}.txt"


def canonical(value: object) -> bytes:
    """JSON with sorted keys, UTF-8, one field a line: the same value is the same bytes, and a human can diff it."""
    return (json.dumps(value, sort_keys=True, ensure_ascii=False, indent=1) + "\n").encode()


# ---- the plan: what makes the data

RESERVED_KWARGS = ("messages", "tools", "documents", "add_generation_prompt")  # a template's own variables


@dataclass(frozen=True, slots=True)
class Spec:
    """The identity of a dataset beside its input objects: another value of any field is another dataset."""

    tokenizer: dict[str, str]  # file name of TOKENIZER_FILES -> sha256 (hex) of its bytes
    shards: int = 0  # 0: not yet decided (`make_plan` fills it)
    loss_on: str = "all"  # "all" | "response"
    preserve_thinking: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    min_loss_tokens: int = 16
    max_length: int | None = None
    generator: str = ""  # NAME@REV of the model and sampling that made the completions
    contract: int = CONTRACT

    def sha256(self) -> str:
        return hashlib.sha256(canonical(asdict(self))).hexdigest()


@dataclass(frozen=True, slots=True, order=True)
class Obj:
    """One input object. `key`: its URI; `path`: relative to the input root, the first part of every row id."""

    key: str
    size: int
    etag: str
    path: str


@dataclass(frozen=True, slots=True)
class Batch:
    """The objects of one index in reading order, and the OpenAI batch request files their rows are joined with."""

    objects: tuple[Obj, ...]
    batch_inputs: tuple[Obj, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    spec: Spec
    batches: tuple[Batch, ...]
    model: str = ""  # as the user named it; for people, not part of the identity (the tokenizer's sha is)
    left_out: dict[str, int] = field(default_factory=dict)  # reason -> files that the listing skipped; for people too

    def to_json(self) -> bytes:
        return canonical(
            {
                "contract": self.spec.contract,
                "model": self.model,
                "spec": asdict(self.spec),
                "batches": [asdict(batch) for batch in self.batches],
                **({"left_out": self.left_out} if self.left_out else {}),
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> Plan:
        """Raises JobError 78 for another contract version or something that is no plan."""
        value = _load(data, PLAN)
        try:
            return cls(
                spec=Spec(**value["spec"]),
                batches=tuple(
                    Batch(
                        tuple(Obj(**o) for o in batch["objects"]),
                        tuple(Obj(**o) for o in batch["batch_inputs"]),
                    )
                    for batch in value["batches"]
                ),
                model=value["model"],
                left_out=value.get("left_out", {}),
            )
        except (KeyError, TypeError) as error:
            raise JobError(Exit.CONFIG, f"`{PLAN}` is not a plan: {error}", "choose another --out") from None

    def sha256(self) -> str:
        return hashlib.sha256(self.to_json()).hexdigest()

    def total_bytes(self) -> int:
        return sum(o.size for batch in self.batches for o in batch.objects)


def _load(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict) or "contract" not in value:
        raise JobError(Exit.CONFIG, f"`{name}` is not a record of this tool", "choose another --out")
    if value["contract"] != CONTRACT:
        raise JobError(
            Exit.CONFIG,
            f"`{name}` has contract version {value['contract']}, this program speaks {CONTRACT}",
            "use the image and the CLI of the same release",
        )
    return value


SHARD_BYTES = 96 << 20


def default_shards(total_bytes: int, files: int) -> int:
    return max(1, min(files, math.ceil(total_bytes / SHARD_BYTES)))


def make_plan(
    objects: Iterable[Obj],
    spec: Spec,
    shards: int | None = None,
    *,
    batch_inputs: Mapping[str, Sequence[Obj]] | None = None,
    model: str = "",
    left_out: Mapping[str, int] | None = None,
) -> Plan:
    """Cut `objects` into `shards` batches: contiguous in key order, balanced by bytes, the same for any listing order.

    shards: None takes `default_shards`; more than there are objects is clamped to their number.
    batch_inputs: key of an object -> the OpenAI batch request files its rows need.
    Raises JobError 64: no object at all, or two objects that would give the same row ids.
    """
    ordered = sorted({o.key: o for o in objects}.values())
    if not ordered:
        raise JobError(Exit.USAGE, "no input object", "name at least one .jsonl, .jsonl.gz or .jsonl.zst file")
    seen: dict[str, str] = {}
    for o in ordered:
        if o.path in seen:
            raise JobError(
                Exit.USAGE,
                f"`{seen[o.path]}` and `{o.key}` would both give the row ids `{o.path}:LINE`",
                "give their common folder as the one input",
            )
        seen[o.path] = o.key
    total = sum(o.size for o in ordered)
    count = default_shards(total, len(ordered)) if shards is None else max(1, min(shards, len(ordered)))
    needs = batch_inputs or {}
    batches = []
    start = done = 0
    for i in range(count):
        target = total * (i + 1) / count
        last = len(ordered) - (count - 1 - i)  # every later batch still gets an object
        end, size = start + 1, done + ordered[start].size
        # an object joins this batch while that brings its end nearer to the even share
        while end < last and (i == count - 1 or abs(size + ordered[end].size - target) <= abs(size - target)):
            size += ordered[end].size
            end += 1
        part = tuple(ordered[start:end])
        pinned = sorted({o.key: o for p in part for o in needs.get(p.key, ())}.values())
        batches.append(Batch(part, tuple(pinned)))
        start, done = end, size
    return Plan(replace(spec, shards=count), tuple(batches), model, dict(left_out or {}))


def spec_difference(mine: Spec, theirs: Spec) -> str | None:
    """None if equal, else one clause that names the first differing field and both values."""
    for f in fields(Spec):
        a, b = getattr(mine, f.name), getattr(theirs, f.name)
        if a != b:
            if f.name == "tokenizer":
                name = next(k for k in sorted({*a, *b}) if a.get(k) != b.get(k))
                return f"`tokenizer` differs in {name}"
            return f"`{f.name}` is {json.dumps(a, sort_keys=True)} here and {json.dumps(b, sort_keys=True)} there"
    return None


def object_difference(listing: Iterable[Obj], plan: Plan, runs: Iterable[RunRecord] = ()) -> str | None:
    """None if the listing is what the plan (overlaid by its runs) has pinned, else one clause naming the key."""
    pinned, skipped = overlay(plan, runs)
    there = {o.key: o for batch in pinned.batches for o in batch.objects}
    here = {o.key: o for o in listing}
    for key in sorted(there.keys() | here.keys()):
        if key in skipped:
            continue
        if key not in there:
            return f"input `{key}` is not in the plan"
        if key not in here:
            return f"input `{key}` of the plan is no longer there"
        if here[key] != there[key]:
            return f"input `{key}` has changed since the plan was made"
    return None


# ---- runs: what may change from Job to Job


@dataclass(frozen=True, slots=True)
class GateFlags:
    max_reject: float = 0.01  # share of the lines seen that may be malformed
    allow_degenerate: bool = False


@dataclass(frozen=True, slots=True)
class RunRecord:
    """runs/<run>.json: one Job of a run. Job index i does plan index `indexes[i]`.

    sequence: 1 + the highest one below OUT at the time of writing; the newest record's gate holds (ties: by name).
    """

    run: str
    sequence: int
    indexes: tuple[int, ...]
    gate: GateFlags = GateFlags()
    repinned: tuple[Obj, ...] = ()  # changed objects of uncommitted batches, as they are now
    skipped: tuple[str, ...] = ()  # keys dropped by --skip-file
    flags: dict[str, Any] = field(default_factory=dict)  # operational, for people: image, parallelism, workers, ...
    plan_sha256: str = ""  # of plan.json as the submit saw it; a pod that finds another one ends with 78

    def to_json(self) -> bytes:
        return canonical({"contract": CONTRACT, **asdict(self)})

    @classmethod
    def from_json(cls, data: bytes) -> RunRecord:
        value = _load(data, RUNS_DIR)
        try:
            return cls(
                run=value["run"],
                sequence=value["sequence"],
                indexes=tuple(value["indexes"]),
                plan_sha256=value["plan_sha256"],
                gate=GateFlags(**value["gate"]),
                repinned=tuple(Obj(**o) for o in value["repinned"]),
                skipped=tuple(value["skipped"]),
                flags=value["flags"],
            )
        except (KeyError, TypeError) as error:
            raise JobError(Exit.CONFIG, f"a record below `{RUNS_DIR}/` is not one: {error}", "") from None


def in_order(runs: Iterable[RunRecord]) -> list[RunRecord]:
    return sorted(runs, key=lambda r: (r.sequence, r.run))


def newest_gate(runs: Iterable[RunRecord]) -> GateFlags:
    ordered = in_order(runs)
    return ordered[-1].gate if ordered else GateFlags()


def overlay(plan: Plan, runs: Iterable[RunRecord]) -> tuple[Plan, frozenset[str]]:
    """The plan with every re-pinned object in its newest form (skipped ones stay in it), and the skipped keys."""
    ordered = in_order(runs)
    pins = {o.key: o for r in ordered for o in r.repinned}
    skipped = frozenset(key for r in ordered for key in r.skipped)
    if pins:
        batches = tuple(
            Batch(
                tuple(pins.get(o.key, o) for o in batch.objects),
                tuple(pins.get(o.key, o) for o in batch.batch_inputs),
            )
            for batch in plan.batches
        )
        plan = replace(plan, batches=batches)
    return plan, skipped
