"""Everything that can refuse a training, before the first rank starts: data, target, drafter, OUT, checkpoint.

Runs once, in a process of its own, and leaves what it found in a folder that the ranks read: none of them looks at the
data again, and none waits for another that does.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenizer.job import Exit, JobError
from tokenizer.store import Options, open_store, parse_uri
from trainer.cache import local_shards, read_record, stamped
from trainer.checkpoint import META, find
from trainer.config import DrafterConfig, Specials, check_mask, derive
from trainer.data import Dataset, Index, Schedule
from trainer.evaluate import check_pair, tokenizer_files
from trainer.export import read_drafter_config
from trainer.fetch import Tell, local_target
from trainer.job import TrainArgs, parse_split
from trainer.link import World
from trainer.provenance import check_out, check_tokenizer, fingerprint, identity, lock, only, story
from trainer.target import read_config

READY, INDEX, PROVENANCE = "ready.json", "index.npz", "provenance.json"
STAGING_ENV = "DFLASH_CHECKPOINTS"  # where what goes to S3 is written first; two checkpoints must fit
STORE = Options(auth_patience=90.0)
FLAGS = {  # field of a drafter -> the flag that sets it
    "num_hidden_layers": "layers",
    "block_size": "block-size",
    "target_layer_ids": "taps",
    "mask_token_id": "mask-token-id",
}


@dataclass(frozen=True, slots=True)
class Ready:
    """What the ranks start from. target: its path on this machine. local: where OUT is written on it.

    shards: what each of `paths` was when its bytes were checked, see cache.stamped. checkpoint: directory, or empty.
    finished: OUT holds the end of this very training already.
    """

    paths: tuple[str, ...]
    shards: tuple[dict[str, Any], ...]
    target: str
    config: dict[str, Any]
    identity: dict[str, Any]
    story: dict[str, Any]
    local: str
    remote: bool
    checkpoint: str
    start: int
    finished: bool

    def write(self, work: Path) -> None:
        (work / READY).write_text(json.dumps({name: getattr(self, name) for name in self.__slots__}), "utf-8")

    @classmethod
    def read(cls, work: Path) -> Ready:
        values = json.loads((work / READY).read_text("utf-8"))
        return cls(**{**values, "paths": tuple(values["paths"]), "shards": tuple(values["shards"])})


def world_of(split: str) -> World:
    """The ranks of a split on this machine. Raises JobError(78) where it has fewer GPUs than ranks."""
    targets, drafters = parse_split(split)
    gpus = torch.cuda.device_count()
    world = World(targets, drafters or max(1, gpus))
    if gpus and world.size > gpus:
        raise JobError(
            Exit.CONFIG, f"--split {split} needs {world.size} GPUs, {gpus} are visible here", "choose a smaller split"
        )
    return world


def schedule(args: TrainArgs, index: Index) -> Schedule:
    """The steps of this training."""
    return Schedule(
        index,
        seed=args.seed,
        batch_rows=args.batch_rows,
        accumulate=args.accumulate,
        epochs=args.epochs,
        steps=args.steps,
    )


def prepare(args: TrainArgs, work: Path, tell: Tell, beat: Callable[[], None]) -> Ready:
    """Check everything, fetch the target, take OUT, find the checkpoint; leave `Ready` and the index in `work`.

    tell: gets `note` and `fetch` events. Raises JobError: 65 the data, 73 no room for data or target, 75 what may pass,
    78 target, tokenizer, drafter or OUT do not fit.
    """

    def say(text: str) -> None:
        tell({"event": "note", "message": text})

    try:
        store, out, uri = open_store(args.dataset, STORE), open_store(args.out, STORE), parse_uri(args.out)
    except ValueError as error:
        raise JobError(Exit.USAGE, str(error), "give paths, file:// or s3://") from error
    record = read_record(store, args.allow_degenerate)
    check_out(out, args, record)  # before the target is paid for
    where = local_target(args.target, tell, lambda folder: check_tokenizer(folder, record, args.target))
    target = read_config(where)
    text = target.get_text_config(decoder=True)
    since = time.time_ns()
    paths = local_shards(args.dataset, record, say)
    shards = stamped(paths, record, since)
    dataset = Dataset(paths, args.max_length)
    with tokenizer_files(where) as folder:
        check_tokenizer(folder, record, args.target)
        specials = Specials.read(folder)
    index, used = dataset.index(record, int(text.vocab_size), args.held_out, beat)
    say(f"dataset: {index.counts['rows']} rows, {index.counts['tokens']} tokens, {len(index.trained)} rows are trained")
    for name, why in (
        ("cut_rows", f"rows are cut at {args.max_length} tokens: {index.counts['cut_loss_tokens']} loss tokens less"),
        ("no_anchor", "rows have no place for an anchor and are left out"),
        ("held_out", "rows are held out"),
    ):
        if index.counts[name]:
            say(f"{index.counts[name]} {why}")
    config, origin = choose(args, target, specials, np.flatnonzero(used).tolist())
    generator = record["spec"].get("generator", "")
    if generator and model_name(generator) != model_name(args.target):
        say(f"warning: the completions were made by `{generator}`, the target is `{args.target}`")
    wanted = identity(args, record, fingerprint(where))
    lock(out, wanted)
    remote = uri.scheme == "s3"
    scratch = Path(os.environ.get("DFLASH_SCRATCH") or tempfile.gettempdir())
    own = hashlib.sha256(args.out.rstrip("/").encode()).hexdigest()[:12]  # another OUT may be written at the same time
    staging = Path(os.environ.get(STAGING_ENV) or scratch / "training") / own
    local = staging if remote else Path(uri.path)
    local.mkdir(parents=True, exist_ok=True)
    with only(local):  # nobody else trains there while the checkpoint is looked for
        found = find(out, local, wanted, say, remote)
        if remote and found and out.stat("metrics.jsonl"):
            (local / "metrics.jsonl").write_bytes(out.get_bytes("metrics.jsonl"))
    start = int(json.loads((found / META).read_text())["step"]) if found else 0
    ended = out.stat(PROVENANCE) is not None and json.loads(out.get_bytes(PROVENANCE)).get("finished") is True
    index.save(work / INDEX)
    ready = Ready(
        paths=tuple(str(path) for path in dataset.paths),
        shards=shards,
        target=where,
        config=config.to_dict(),
        identity=wanted,
        story=story(wanted, args, record, drafter=origin, rows=dict(index.counts)),
        local=str(local),
        remote=remote,
        checkpoint=str(found or ""),
        start=start,
        finished=ended and start >= schedule(args, index).total,
    )
    ready.write(work)
    return ready


def model_name(text: str) -> str:
    """`org/Name@rev`, `s3://models/Name` and `/model/Name` are the same model by this name."""
    return text.partition("@")[0].rstrip("/").rpartition("/")[2]


def choose(args: TrainArgs, target: Any, specials: Specials, used: list[int]) -> tuple[DrafterConfig, dict[str, str]]:
    """The drafter's shape, and where each value comes from. used: token ids that occur in the data.

    Raises JobError: 64 naming the flag whose value does not fit this target, 78 anything else that does not fit.
    """
    if args.init_from:
        config = read_drafter_config(Path(args.init_from))
        check_pair(config, target)
        check_mask(config.mask_token_id, target.to_dict(), specials)
        return config, {"all": f"of {args.init_from}"}
    chosen = {
        "num_hidden_layers": args.layers,
        "block_size": args.block_size,
        "target_layer_ids": args.tap_list(),
        "mask_token_id": args.mask_token_id if args.mask_token_id >= 0 else None,
    }
    try:
        choice = derive(target.to_dict(), specials, chosen, used)
    except JobError as error:
        name, _, why = error.message.partition(": ")
        if name in FLAGS and chosen[name] is not None:
            raise JobError(Exit.USAGE, f"--{FLAGS[name]} cannot be: {why}", error.hint) from error
        raise
    return choice.config, dict(choice.origin)
