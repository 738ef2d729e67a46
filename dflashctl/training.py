"""From settings to the Job of a training: what is impossible is refused here, by the name of the flag."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from dflashctl.backends.base import Submission
from dflashctl.config import Value
from dflashctl.errors import TakenError, UsageError
from dflashctl.plan import NAME_MAX, check_name, check_scheme
from tokenizer.job import JobError
from tokenizer.store import Store, StoreError
from trainer.job import TrainArgs, parse_split


def declare(values: Mapping[str, Value], allow_degenerate: bool, profile: Mapping[str, Any]) -> TrainArgs:
    """The settings of [train] with those of the node profile; raises UsageError naming the flag."""
    for key, what in (("dataset", "dataset"), ("out", "OUT (`--out`)"), ("target", "target (`--target`)")):
        if not values[key].value:
            raise UsageError(
                f"no {what} is given", f"name it on the command line or as `{key}` in [train] of dflash.toml"
            )
    for key in ("dataset", "out"):
        check_scheme(values[key].value, key)
    given = {
        f.name: v.value for f in dataclasses.fields(TrainArgs) if (v := values.get(f.name)) and v.value is not None
    }
    if "split" not in given and profile.get("split"):
        given["split"] = profile["split"]
    given["allow_degenerate"] = bool(allow_degenerate or given.get("allow_degenerate"))
    try:
        args = TrainArgs(**given)
        ranks = sum(parse_split(args.split))
    except JobError as error:
        raise UsageError(error.message, error.hint) from None
    gpus = profile.get("gpus")
    if gpus is not None and ranks > gpus:
        raise UsageError(
            f"`--split` {args.split} needs {ranks} GPUs, the node profile has {gpus}",
            "choose fewer ranks, or another --node",
        )
    return args


def sha256(args: TrainArgs) -> str:
    """Digest of the declaration: what makes the drafter, and where it goes."""
    return hashlib.sha256(json.dumps({"out": args.out, **args.identity()}, sort_keys=True).encode()).hexdigest()


def run_name(args: TrainArgs, name: str | None) -> str:
    """`name` once checked, else trn-<slug of OUT>-<8 hex digits of the declaration>."""
    if name is not None:
        return check_name(name)
    last = args.out.rstrip("/").rsplit("/", 1)[-1].lower()
    slug = re.sub(r"[^a-z0-9]+", "-", last).strip("-")[: NAME_MAX - len("trn--") - 8].rstrip("-") or "out"
    return f"trn-{slug}-{sha256(args)[:8]}"


def check_lock(args: TrainArgs, store: Store) -> None:
    """Raises TakenError, naming the flags that differ, where OUT is another training's; a store that is not there is
    the trainer's to complain about.
    """
    try:
        stored = json.loads(store.get_bytes("run.json"))["identity"]
    except (StoreError, ValueError, KeyError, TypeError):
        return
    mine = args.identity()
    wrong = [
        f"{name} is {stored[name]} there, {mine[name]} here"
        for name in mine
        if stored.get(name, mine[name]) != mine[name]
    ]
    if wrong:
        raise TakenError(f"OUT `{args.out}` is of another training: {'; '.join(wrong)}", "choose another --out")


def submission(args: TrainArgs, run: str, flags: Mapping[str, Any]) -> Submission:
    """The one Job of a training."""
    return Submission(
        run=run,
        job=run,
        out=args.out,
        argv=tuple(args.to_argv()),
        indexes=(0,),
        parallelism=1,
        kind="train",
        model=args.target,
        spec_sha256=sha256(args),
        flags=flags,
    )
