"""What the CLI and the trainer's processes agree on, in the standard library alone.

The CLI builds a child's or a pod's argv with `to_argv`, `python -P -m trainer` parses it with `from_argv`: one class a
verb, so the two cannot drift. Exit codes are `tokenizer.job.Exit`'s.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from tokenizer.job import Exit, JobError

CONTRACT = 1  # version of the argv below; another one exits 78
EVAL_SCHEMA = "dflash.eval/1"
EVAL_KEYS = (
    "schema",
    "acceptance_length",
    "per_position",
    "lossless",
    "tokens",
    "blocks",
    "target_passes",
    "tokens_per_pass",
    "prompts",
)
FORMATS = ("z-lab", "speculators")
SCHEDULES = ("cosine", "wsd")
COLOCATED = "colocated"
OPERATIONAL = ("dataset", "out", "target", "split", "checkpoint_every", "allow_degenerate")  # may change in a resume
KINDS = {"int": int, "float": float, "str": str}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise JobError(Exit.USAGE, message, "the CLI and the trainer must be of one version")


def _truth(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(text)
    return text == "True"


@dataclass(frozen=True, slots=True)
class _Args:
    """Every field is a flag of its name; `contract` travels along and is checked first."""

    def to_argv(self) -> list[str]:
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return [f"--{name.replace('_', '-')}={value}" for name, value in {"contract": CONTRACT, **named}.items()]

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> Self:
        """Raises JobError: 64 for flags it does not know or cannot read, 78 for another contract version."""
        parser = _Parser(add_help=False, allow_abbrev=False)
        parser.add_argument("--contract", type=int, required=True)
        for field in dataclasses.fields(cls):
            required = field.default is dataclasses.MISSING
            kind = _truth if field.type == "bool" else KINDS[str(field.type)]
            flag = f"--{field.name.replace('_', '-')}"
            parser.add_argument(flag, type=kind, required=required, default=None if required else field.default)
        known = vars(parser.parse_args(list(argv)))
        version = known.pop("contract")
        if version != CONTRACT:
            raise JobError(
                Exit.CONFIG, f"contract {version} is not {CONTRACT}", "use a CLI and a trainer of one version"
            )
        return cls(**known)


@dataclass(frozen=True, slots=True)
class EvalArgs(_Args):
    """Drive a checkpoint the way a server does, on the first `num_prompts` rows of `prompts` (0: all of them).

    checkpoint: z-lab directory. target: model directory, GGUF file or hub id@revision. prompts: JSONL in any dialect of
    `tokenize`; a row's prompt is what precedes its first assistant turn. max_new_tokens: per prompt, the first one that
    the prefill yields included. The result is one JSON object on stdout with the keys of EVAL_KEYS.
    """

    checkpoint: str
    target: str
    prompts: str
    num_prompts: int = 32
    max_new_tokens: int = 256


@dataclass(frozen=True, slots=True)
class ExportArgs(_Args):
    """Write a checkpoint as a directory to serve.

    format: one of FORMATS. target: what the speculators format names as its verifier (that reader takes embedding and
    head from there), so it is required for it alone.
    """

    checkpoint: str
    out: str
    format: str = "z-lab"
    target: str = ""


@dataclass(frozen=True, slots=True)
class TrainArgs(_Args):
    """Train a drafter on `dataset` (of `tokenize`) for `target` into `out`: paths, file:// or s3://.

    split: `T+D` target and drafter ranks, or `colocated[:N]`, N ranks that are both (default: one a GPU).
    steps: optimiser steps, 0 = by `epochs`. layers, block_size: of the drafter. taps: comma-separated target layers,
    empty = spread evenly. mask_token_id: -1 = by the target. anchors: blocks a row and epoch. max_length: longer rows
    are cut. batch_rows: rows of a micro-batch; accumulate: micro-batches of a step, all ranks together, so that a
    split changes no update. schedule: one of SCHEDULES. init_from: z-lab directory to start from, or empty.
    checkpoint_every: steps (`200`) or time (`90s`, `10m`, `2h`). held_out: share of input lines that are never
    trained, but measured. allow_degenerate: train on a dataset that the gate calls degenerate.
    """

    dataset: str
    out: str
    target: str
    split: str = "1+1"
    steps: int = 0
    epochs: int = 6
    layers: int = 5
    block_size: int = 16
    taps: str = ""
    mask_token_id: int = -1
    anchors: int = 512
    max_length: int = 3072
    batch_rows: int = 4
    accumulate: int = 12
    lr: float = 6e-4
    schedule: str = "cosine"
    seed: int = 0
    init_from: str = ""
    checkpoint_every: str = "10m"
    held_out: float = 0.01
    allow_degenerate: bool = False

    def __post_init__(self) -> None:
        """Raises JobError(64) naming the flag whose value cannot be."""
        parse_split(self.split)
        parse_cadence(self.checkpoint_every)
        self.tap_list()
        counts = ("epochs", "layers", "anchors", "batch_rows", "accumulate")
        wrong = next((name for name in counts if getattr(self, name) < 1), None)
        if wrong:
            raise _usage(wrong, getattr(self, wrong), "give at least 1")
        if self.steps < 0:
            raise _usage("steps", self.steps, "give a number of steps, or 0 for --epochs")
        if self.block_size < 2:
            raise _usage("block_size", self.block_size, "a block is the anchor and at least one drafted token")
        if self.mask_token_id < -1:
            raise _usage("mask_token_id", self.mask_token_id, "give a row of the target's embedding, or -1: chosen")
        if self.max_length < 2:
            raise _usage("max_length", self.max_length, "a row needs at least two tokens")
        if not 0 < self.lr < 1:
            raise _usage("lr", self.lr, "give a learning rate such as 6e-4")
        if not 0 <= self.held_out < 1:
            raise _usage("held_out", self.held_out, "give a share such as 0.01, or 0")
        if self.schedule not in SCHEDULES:
            raise _usage("schedule", self.schedule, f"known are {', '.join(SCHEDULES)}")

    def tap_list(self) -> tuple[int, ...] | None:
        """The taps that were given; None: to be chosen by the target."""
        hint = "give layer numbers, ascending, such as 1,16,31,46,61"
        try:
            taps = tuple(int(tap) for tap in self.taps.split(",")) if self.taps else None
        except ValueError:
            raise _usage("taps", self.taps, hint) from None
        if taps and (taps[0] < 0 or any(a >= b for a, b in itertools.pairwise(taps))):
            raise _usage("taps", self.taps, hint)
        return taps

    def identity(self) -> dict[str, object]:
        """What makes the drafter, beside the dataset's content and the target's revision."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if name not in OPERATIONAL}


def said(line: Mapping[str, Any]) -> str:
    """What a JSON line of the supervisor says of a training that has made no step yet; "" for other lines."""
    if line.get("event") == "note":
        return str(line.get("message") or "")
    if line.get("event") == "fetch":
        done, total, rate = (float(line.get(key) or 0) for key in ("bytes", "total_bytes", "bytes_per_s"))
        return f"fetching the target: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e6:.0f} MB/s"
    return ""


def _usage(name: str, value: object, hint: str) -> JobError:
    return JobError(Exit.USAGE, f"--{name.replace('_', '-')} {value} cannot be", hint)


def parse_split(text: str) -> tuple[int, int]:
    """(targets, drafters) of `T+D`; (0, N) of `colocated:N` and (0, 0) of `colocated`. Raises JobError(64)."""
    hint = "give T+D, such as 4+3, or colocated"
    first, mark, second = text.partition(":" if text.startswith(COLOCATED) else "+")
    parts = [second] if first == COLOCATED and mark else [] if first == COLOCATED else [first, second]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 1000 for part in parts):
        raise _usage("split", text, hint)
    numbers = [int(part) for part in parts]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, sum(numbers))


def parse_cadence(text: str) -> tuple[int, float]:
    """(steps, 0) of a plain number, (0, seconds) of `90s`, `10m` or `2h`. Raises JobError(64)."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    number = text[:-1] if unit else text
    if not (number.isascii() and number.isdigit() and int(number)):
        raise _usage("checkpoint_every", text, "give steps (200) or a time (90s, 10m, 2h)")
    return (0, int(number) * unit) if unit else (int(number), 0.0)
