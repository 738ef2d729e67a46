"""From settings to the declaration of a run: what is impossible is refused here, by the name of the flag.

Pure: no file, no store, no clock. The declaration is what the user wrote; the spec in OUT/plan.json is what it led to
once the input was listed and the tokenizer read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dflashctl.config import Value
from dflashctl.errors import UsageError
from tokenizer.job import RESERVED_KWARGS, GateFlags, Spec

#: (lowest, highest) of each number. shards: what an Indexed Job may have; max_length: what an offset can count.
LIMITS = {
    "parallelism": (1, 100_000),
    "shards": (1, 100_000),
    "workers": (1, 100_000),
    "max_length": (2, 2**31 - 1),
    "min_loss_tokens": (0, 2**31 - 1),
}
NAME_MAX = 40  # leaves room for what Jobs and pods append to a name of at most 63 characters
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True, slots=True)
class Declaration:
    """A tokenize run as declared; every field is checked."""

    inputs: tuple[str, ...]
    out: str
    model: str
    parallelism: int
    shards: int | None
    workers: int  # 0: the CPUs that a pod may use
    max_length: int | None
    loss_on: str
    preserve_thinking: bool
    min_loss_tokens: int
    template_kwargs: Mapping[str, Any]
    generator: str
    batch_inputs: tuple[str, ...]
    gate: GateFlags

    def spec(self, tokenizer: Mapping[str, str]) -> Spec:
        """The identity of the dataset, given the sha256 of each tokenizer file."""
        return Spec(tokenizer=dict(tokenizer), **self._options())

    def _options(self) -> dict[str, Any]:
        return {
            "max_length": self.max_length,
            "loss_on": self.loss_on,
            "preserve_thinking": self.preserve_thinking,
            "min_loss_tokens": self.min_loss_tokens,
            "template_kwargs": dict(self.template_kwargs),
            "generator": self.generator,
        }

    def sha256(self) -> str:
        """Digest of what was declared: URIs, model, mask options, shards; no listing, nothing operational."""
        declared = {
            "inputs": sorted(self.inputs),
            "out": self.out,
            "model": self.model,
            "shards": self.shards,
            "batch_inputs": sorted(self.batch_inputs),
            **self._options(),
        }
        return hashlib.sha256(json.dumps(declared, sort_keys=True).encode()).hexdigest()

    def run_name(self, name: str | None) -> str:
        """`name` once checked, else tok-<slug of OUT>-<8 hex digits of the declaration>."""
        if name is not None:
            return check_name(name)
        last = self.out.rstrip("/").rsplit("/", 1)[-1].lower()
        slug = re.sub(r"[^a-z0-9]+", "-", last).strip("-")[: NAME_MAX - len("tok--") - 8].rstrip("-") or "out"
        return f"tok-{slug}-{self.sha256()[:8]}"


def check_name(name: str) -> str:
    """`name` if it can be a run's name; raises UsageError."""
    if len(name) > NAME_MAX or not _LABEL.fullmatch(name):
        raise UsageError(
            f"`--name` {name!r} is not a DNS label of at most {NAME_MAX} characters",
            "use lower-case letters, digits and hyphens, e.g. `chats-2`",
        )
    if run_of(name) != name:
        raise UsageError(
            f"`--name` {name!r} ends like a Job of another run", "choose a name that does not end in -r and a number"
        )
    return name


def declare(values: Mapping[str, Value], allow_degenerate: bool, is_directory: Callable[[str], bool]) -> Declaration:
    """Check the settings of `[tokenize]` together; raises UsageError naming the first that cannot be."""

    def bad(key: str, why: str, hint: str = "") -> UsageError:
        value = values[key]
        return UsageError(f"`--{key.replace('_', '-')}` {value.value!r} ({value.origin}) {why}", hint)

    def needed(key: str, what: str) -> Any:
        if not values[key].value:
            raise UsageError(
                f"no {what} is given", f"name it on the command line or as `{key}` in [tokenize] of dflash.toml"
            )
        return values[key].value

    inputs = tuple(dict.fromkeys(needed("input", "input")))
    out = needed("out", "OUT (`--out`)")
    model = needed("model", "model (`--model`)")
    for key, (low, high) in LIMITS.items():
        number = values[key].value
        if number is not None and not low <= number <= high:
            raise bad(key, f"is below {low}" if number < low else f"is above {high}")
    if not 0 <= values["max_reject"].value <= 1:
        raise bad("max_reject", "is not a share between 0 and 1", "0.01 is one line in a hundred")
    if values["loss_on"].value not in ("all", "response"):
        raise bad("loss_on", "is not known", "known are all, response")
    kwargs = values["template_kwargs"].value
    if name := next((name for name in RESERVED_KWARGS if name in kwargs), None):
        raise bad("template_kwargs", f"may not set `{name}`")
    try:
        json.dumps(kwargs, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError) as error:
        raise bad("template_kwargs", f"is no JSON: {error}") from None
    for uri in (*inputs, *values["batch_input"].value):
        check_scheme(uri, "input")
    check_secrets(model, "model")
    return Declaration(
        inputs=inputs,
        out=check_out(out, is_directory),
        model=model,
        parallelism=values["parallelism"].value,
        shards=values["shards"].value,
        workers=values["workers"].value or 0,
        max_length=values["max_length"].value,
        loss_on=values["loss_on"].value,
        preserve_thinking=values["preserve_thinking"].value,
        min_loss_tokens=values["min_loss_tokens"].value,
        template_kwargs=values["template_kwargs"].value,
        generator=values["generator"].value,
        batch_inputs=tuple(dict.fromkeys(values["batch_input"].value)),
        gate=GateFlags(values["max_reject"].value, allow_degenerate),
    )


def check_secrets(uri: str, what: str) -> None:
    """A URI is recorded and printed, so one with credentials in it is a UsageError that does not echo it."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://[^/]*@", uri):
        raise UsageError(f"{what} has credentials in its URI", "S3 takes them from AWS_ACCESS_KEY_ID and its like")


def check_scheme(uri: str, what: str) -> str:
    """`uri` if it is a path, file:// or s3://; raises UsageError."""
    check_secrets(uri, what)
    if re.match(r"[sS]3:(?!//)", uri):
        raise UsageError(
            f"{what} `{uri}` is no S3 URI", f"write `s3://{uri[3:].lstrip('/')}`, or `./{uri}` for a path here"
        )
    scheme = _SCHEME.match(uri)
    if scheme and scheme[1] not in ("s3", "file"):
        raise UsageError(f"{what} `{uri}` has the scheme `{scheme[1]}`", "known are s3://, file:// and plain paths")
    return uri


def check_out(out: str, is_directory: Callable[[str], bool]) -> str:
    """OUT if it can be one; `bucket/path` is asked about, since a forgotten s3:// would fill the local disk."""
    check_scheme(out, "OUT")
    first, slash, rest = out.partition("/")
    if not _SCHEME.match(out) and slash and rest and _BUCKET.fullmatch(first) and not is_directory(first):
        raise UsageError(
            f"OUT `{out}` looks like a bucket without its scheme",
            f"write `s3://{out}` for the bucket or `./{out}` for a directory here",
        )
    return out


def clamp_parallelism(parallelism: int, shards: int) -> tuple[int, str]:
    """(parallelism that can be used, what to say about it)."""
    if parallelism <= shards:
        return parallelism, ""
    return (
        shards,
        f"parallelism {parallelism} is clamped to the {shards} shard{'s' if shards > 1 else ''} of this dataset",
    )


def job_name(run: str, jobs: Iterable[str]) -> str:
    """The name of the run's next Job: the run's own, then `<run>-r2`, `<run>-r3`, ..."""
    taken = set(jobs)
    if run not in taken:
        return run
    number = 2
    while f"{run}-r{number}" in taken:
        number += 1
    return f"{run}-r{number}"


def run_of(job: str) -> str:
    """The run that a Job belongs to."""
    return re.sub(r"-r[0-9]+$", "", job)


def ranges(indexes: Iterable[int]) -> str:
    """Indexes in short, e.g. `0-2,5`."""
    parts: list[list[int]] = []
    for index in sorted(set(indexes)):
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def parse_indexes(text: str) -> list[int]:
    """`0-2,5` -> [0, 1, 2, 5]; raises UsageError."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"`--index` is {text!r}, not indexes", "write them as 3 or 0-2,5")
        found.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(set(found))
