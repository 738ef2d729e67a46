"""What the CLI and a pod agree on, in the standard library alone.

The CLI builds a pod's argv with `TokenizeArgs.to_argv`, the image parses it with `TokenizeArgs.from_argv`; what makes
the data travels in OUT/plan.json (`Plan`), what may change from Job to Job in OUT/runs/<run>.json (`RunRecord`).
Whoever needs the contract imports it from here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from tokenizer.errors import FILTERED, MALFORMED, Exit, JobError, Reject
from tokenizer.plan import (
    COMMITS_DIR,
    CONTRACT,
    DATASET,
    DATASET_INFO,
    LOGS_DIR,
    PLAN,
    REFUSED,
    REJECTED_DIR,
    RESERVED_KWARGS,
    RUNS_DIR,
    SHARD_BYTES,
    STATE,
    STATS_DIR,
    TOKENIZER_DIR,
    TOKENIZER_FILES,
    Batch,
    GateFlags,
    Obj,
    Plan,
    RunRecord,
    Spec,
    canonical,
    commit_name,
    default_shards,
    in_order,
    log_name,
    make_plan,
    newest_gate,
    object_difference,
    overlay,
    rejected_name,
    run_name,
    shard_name,
    spec_difference,
    stats_name,
)

__all__ = [
    "COMMITS_DIR",
    "CONTRACT",
    "DATASET",
    "DATASET_INFO",
    "FILTERED",
    "LOGS_DIR",
    "MALFORMED",
    "PLAN",
    "REFUSED",
    "REJECTED_DIR",
    "RESERVED_KWARGS",
    "RUNS_DIR",
    "SHARD_BYTES",
    "STATE",
    "STATS_DIR",
    "TOKENIZER_DIR",
    "TOKENIZER_FILES",
    "Batch",
    "Exit",
    "GateFlags",
    "JobError",
    "Obj",
    "Plan",
    "PreviewArgs",
    "Reject",
    "RunRecord",
    "Spec",
    "TokenizeArgs",
    "canonical",
    "commit_name",
    "default_shards",
    "in_order",
    "log_name",
    "make_plan",
    "newest_gate",
    "object_difference",
    "overlay",
    "parse_flags",
    "rejected_name",
    "run_name",
    "shard_name",
    "spec_difference",
    "stats_name",
]


@dataclass(frozen=True, slots=True)
class TokenizeArgs:
    """Everything a pod is told on its command line; the same for every index of a Job.

    run: names the record runs/<run>.json, which tells everything else and the plan's sha256. index: the Job's
    completion index; None takes $JOB_COMPLETION_INDEX. workers: 0 takes the cgroup's CPUs.
    downloads: objects read at once by this pod.
    """

    out: str
    run: str
    workers: int = 0
    downloads: int = 2
    index: int | None = None

    def to_argv(self) -> list[str]:
        argv = ["--contract", str(CONTRACT)]
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None:
                argv += ["--" + f.name.replace("_", "-"), str(value)]
        return argv

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> TokenizeArgs:
        """Raises JobError 78 for another contract version (looked at first), 64 for anything else that is wrong."""
        flags = parse_flags(argv, {f.name.replace("_", "-") for f in fields(cls)})
        numbers = ("workers", "downloads", "index")
        try:
            values: dict[str, Any] = {n: int(flags.pop(n)) for n in numbers if n in flags}
        except ValueError as error:
            raise JobError(Exit.USAGE, f"--workers, --downloads and --index take a whole number: {error}") from None
        values |= {name.replace("-", "_"): value for name, value in flags.items()}
        missing = [n for n in ("out", "run") if not values.get(n)]
        if missing:
            raise JobError(Exit.USAGE, f"--{missing[0].replace('_', '-')} is missing")
        return cls(**values)


def parse_flags(argv: Sequence[str], known: Iterable[str]) -> dict[str, str]:
    """`--name value` pairs after the contract check; JobError 78 or 64 as in `TokenizeArgs.from_argv`."""
    pairs = list(zip(argv[::2], [*argv[1::2], None] if len(argv) % 2 else argv[1::2], strict=True))
    version = next((value for name, value in pairs if name == "--contract"), None)
    if version != str(CONTRACT):
        raise JobError(
            Exit.CONFIG,
            f"this image speaks contract version {CONTRACT}, its command line {version or 'none'}",
            "use the image and the CLI of the same release",
        )
    allowed = {"contract", *known}
    flags: dict[str, str] = {}
    for name, value in pairs:
        if not name.startswith("--") or name[2:] not in allowed:
            raise JobError(Exit.USAGE, f"unknown argument `{name}`")
        if value is None:
            raise JobError(Exit.USAGE, f"`{name}` needs a value")
        flags[name[2:]] = value
    del flags["contract"]
    return flags


PREVIEW_REJECTS = 20  # after that many lines that are not taken a preview ends


@dataclass(frozen=True, slots=True)
class PreviewArgs:
    """What `python -P -m tokenizer preview` is told: some rows of some inputs, nothing written.

    tokenizer: a local directory; objects and batch_inputs: URIs of single objects. It prints one JSON object a row:
    {"id", "source_id", "tokens", "loss_tokens", "segments": [{"text", "loss"}], "rejected": null} or, for what would
    not be taken, {"id", "rejected": {"reason", "detail"}}, with an empty segments list.
    """

    tokenizer: str
    objects: tuple[str, ...]
    rows: int = 3
    batch_inputs: tuple[str, ...] = ()
    loss_on: str = "all"
    preserve_thinking: bool = False
    template_kwargs: dict[str, Any] | None = None
    min_loss_tokens: int = 16
    max_length: int | None = None

    def to_argv(self) -> list[str]:
        return ["--contract", str(CONTRACT), "--preview", json.dumps(asdict(self), ensure_ascii=False)]

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> PreviewArgs:
        """Raises JobError 78 for another contract version, 64 for anything else that is wrong."""
        text = parse_flags(argv, {"preview"}).get("preview", "")
        try:
            values = json.loads(text)
            return cls(**{**values, "objects": tuple(values["objects"]), "batch_inputs": tuple(values["batch_inputs"])})
        except (ValueError, TypeError, KeyError) as error:
            raise JobError(Exit.USAGE, f"--preview takes a JSON object: {error}") from None
