"""What the CLI and the trainer's processes agree on, in the standard library alone.

The CLI builds a child's or a pod's argv with `to_argv`, `python -P -m trainer` parses it with `from_argv`: one class a
verb, so the two cannot drift. Exit codes are `tokenizer.job.Exit`'s.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Self

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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise JobError(Exit.USAGE, message, "the CLI and the trainer must be of one version")


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
            kind = int if field.type == "int" else str
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
