"""What would refuse a training, found before one is started: everything but the one pass over the data.

The command line runs `python -P -m trainer check` with the flags of `train` on the machine that is to train, since it
knows neither torch nor transformers itself. Nothing that is written stays, no weights are read beyond their headers,
nothing large is fetched. The answer is one JSON object on stdout: what was found, or `exit`, `message` and `hint` of
the refusal.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tokenizer.job import Exit, JobError
from tokenizer.store import Options, Store, StoreError, open_store, parse_uri
from trainer.cache import read_record
from trainer.checkpoint import differences
from trainer.config import DrafterConfig, Specials
from trainer.drafter import Drafter
from trainer.evaluate import tokenizer_files
from trainer.fetch import check_revision, is_hub_id
from trainer.job import TrainArgs
from trainer.link import World
from trainer.prepare import PROVENANCE, choose, world_of
from trainer.provenance import RUN, check_tokenizer, fingerprint, identity
from trainer.target import FETCH, read_config, text_config

SCHEMA = "dflash.check/1"
STORE = Options(patience=30.0)
SMALL = ("config.json", "tokenizer.json", "tokenizer_config.json")  # all that is read of a target that is not here
INDEX = "model.safetensors.index.json"
LFS = b"version https://git-lfs"
LAYER = re.compile(r"\.layers\.(\d+)\.")
PREFIXES = ("", "model.", "language_model.", "model.language_model.")  # a vision-language model nests the decoder
STATE_BYTES = 4 + 8 + 4 + 12  # of a drafter's parameter: master weight, two moments, gradient, the copy that is saved


def check(args: TrainArgs) -> dict[str, Any]:
    """What a training of these flags would start from. Raises JobError as `prepare` does.

    identity: as in OUT/run.json; of a target that is not here only its name is known. taken: how another training
    of OUT differs, field by field. finished: OUT holds the end of this training. drafter: its fields, and where each
    comes from. memory: bytes that are needed, and those that are free.
    """
    try:
        store, out = open_store(args.dataset, STORE), open_store(args.out, STORE)
    except ValueError as error:
        raise JobError(Exit.USAGE, str(error), "give paths, file:// or s3://") from error
    world = world_of(args.split)
    record = read_record(store, args.allow_degenerate)
    check_shards(store, record)
    with small(args.target) as where:
        target = read_config(where)
        with tokenizer_files(where) as folder:
            check_tokenizer(folder, record, args.target)
            config, origin = choose(args, target, Specials.read(folder), [])
        here = Path(where).exists() and not args.target.startswith("s3://")
        parameters = check_weights(Path(where), target) if here and Path(where).is_dir() else 0
        mine = identity(args, record, fingerprint(where) if here else "")
    check_writable(args.out)
    stored = _json(out, RUN).get("identity")
    if not here:  # its revision is that of the files, which are fetched at the start
        mine["target_revision"] = (stored or {}).get("target_revision", "")
    taken = differences(stored, mine) if stored is not None else []
    return {
        "schema": SCHEMA,
        "identity": mine,
        "taken": taken,
        "finished": stored is not None and not taken and _json(out, PROVENANCE).get("finished") is True,
        "rows": record["rows"],
        "tokens": record.get("tokens", sum(shard["tokens"] for shard in record["shards"])),
        "drafter": {name: {"value": getattr(config, name, None), "why": why} for name, why in origin.items()},
        "memory": memory(world, parameters, config),
    }


def _json(store: Store, key: str) -> dict[str, Any]:
    """A JSON object of OUT; {} where there is none."""
    try:
        value = json.loads(store.get_bytes(key))
    except (StoreError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def check_shards(store: Store, record: Mapping[str, Any]) -> None:
    """Raises JobError(65) naming a shard that is not there or has another size than its record says."""
    there = {stat.key: stat.size for stat in store.list("data-")}
    for shard in record["shards"]:
        found = there.get(shard["name"])
        if found != shard["bytes"]:
            what = "is not there" if found is None else f"has {found} bytes, its record {shard['bytes']}"
            raise JobError(
                Exit.DATA,
                f"shard `{store.uri(shard['name'])}` {what}",
                "restore it, or tokenize again into another OUT",
            )


@contextmanager
def small(target: str) -> Iterator[str]:
    """`target` where it can be read as it is, else a directory with its small files."""
    if not target.startswith(("s3://", "file:")):
        if is_hub_id(target):
            check_revision(target)
        yield target
        return
    try:
        store = open_store(target, STORE)
    except ValueError as error:
        raise JobError(Exit.USAGE, f"target {error}", "name a directory, an s3:// prefix or ID@REVISION") from error
    if not target.startswith("s3://"):
        yield parse_uri(target).path
        return
    with tempfile.TemporaryDirectory() as made:
        there = {stat.key for stat in store.list("") if stat.key in SMALL}
        if "config.json" not in there:
            raise JobError(Exit.CONFIG, f"target `{target}` has no config.json", "name the prefix that holds it")
        for name in there:
            (Path(made) / name).write_bytes(store.get_bytes(name))
        yield made


# ---- weights, by their headers


def check_weights(folder: Path, config: Any) -> int:
    """How many parameters a target has. Raises JobError(78) where files are missing, cut, or not of this config.json.

    Only shapes of tensors that bear the model's own names are compared: loading converts others, and checks them.
    """
    shapes: dict[str, list[int]] = {}
    for path in weight_files(folder):
        shapes |= read_shapes(path)
    if not shapes:
        return 0
    depth = int(text_config(config).num_hidden_layers)
    found = max((int(match[1]) for name in shapes if (match := LAYER.search(name))), default=-1) + 1
    if 0 < found < depth:
        raise _other(folder, f"config.json has {depth} layers, the weights have {found}")
    if getattr(config, "quantization_config", None) is None:
        for name, wanted in model_shapes(config).items():
            given = next((shapes[prefix + name] for prefix in PREFIXES if prefix + name in shapes), None)
            if given is not None and given != wanted:
                raise _other(folder, f"`{name}` is {given} in the weights, {wanted} by config.json")
    return sum(math.prod(shape) for shape in shapes.values())


def _other(folder: Path, why: str) -> JobError:
    return JobError(Exit.CONFIG, f"target `{folder}`: {why}", FETCH)


def weight_files(folder: Path) -> Sequence[Path]:
    """The safetensors files of a target; of other formats only that they are there is known."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise JobError(Exit.CONFIG, f"`{index}` is no index of weights", "fetch it again") from None
        gone = [name for name in names if not (folder / name).is_file()]
        if gone:
            raise JobError(
                Exit.CONFIG,
                f"target `{folder}` lacks {len(gone)} of {len(names)} files of weights: {gone[0]}",
                "fetch it",
            )
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if not found and not [*folder.glob("*.bin"), *folder.glob("*.gguf")]:
        raise JobError(Exit.CONFIG, f"target `{folder}` has no weights", "name a directory with its .safetensors files")
    return found


def read_shapes(path: Path) -> dict[str, list[int]]:
    """Tensor -> shape, from the header alone. Raises JobError(78) for a file that is cut or none."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start + file.read(len(LFS) - 8) == LFS:
            raise JobError(Exit.CONFIG, f"`{path}` is a Git LFS pointer", "fetch the file itself with `git lfs pull`")
        length = int.from_bytes(start, "little")
        file.seek(8)
        try:
            header: Any = json.loads(file.read(length)) if 8 + length <= size else None
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
            shapes = {name: list(entry["shape"]) for name, entry in tensors.items()}
        except (ValueError, AttributeError, KeyError, TypeError, IndexError):
            raise JobError(Exit.CONFIG, f"`{path}` is no safetensors file", "fetch it again") from None
    if 8 + length + end != size:
        raise JobError(Exit.CONFIG, f"`{path}` has {size} bytes, by its header {8 + length + end}", "fetch it again")
    return shapes


def model_shapes(config: Any) -> dict[str, list[int]]:
    """Parameter -> shape of the model that config.json describes; {} where it cannot be laid out without weights."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception:  # of many kinds, by family: loading it says why in its own words
        return {}
    return {name: list(value.shape) for name, value in model.named_parameters()}


# ---- this machine


def check_writable(out: str) -> None:
    """Raises JobError(78) where OUT is a path that cannot be made or written to; S3 is asked when the lock is put."""
    uri = parse_uri(out)
    if uri.scheme == "s3":
        return
    path = Path(uri.path)
    there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not there.is_dir():
        raise JobError(Exit.CONFIG, f"OUT `{out}`: `{there}` is no directory", "choose another --out")
    try:
        with tempfile.TemporaryDirectory(prefix=".dflash-", dir=there):
            pass
    except OSError as error:
        raise JobError(
            Exit.CONFIG, f"OUT `{out}` cannot be written: `{there}`: {error.strerror}", "choose another --out"
        ) from error


def memory(world: World, parameters: int, config: DrafterConfig) -> dict[str, int]:
    """Bytes, about, where ranks are on CPUs: every copy of the target is float32, and each drafter holds its master
    weights and moments, and the target's embedding and head.

    needed: of all ranks together, 0 where the target's size is not known. free: of this machine or its container.
    """
    if torch.cuda.is_available() or not parameters:
        return {"needed": 0, "free": 0, "copies": 0, "target": 0}
    copies, target = world.targets or world.drafters, parameters * 4
    with torch.device("meta"):
        own = sum(parameter.numel() for parameter in Drafter(config).parameters()) * STATE_BYTES
    own += 0 if world.colocated else 2 * config.vocab_size * config.hidden_size * 4
    return {"needed": copies * target + world.drafters * own, "free": free_memory(), "copies": copies, "target": target}


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that new processes may take: the machine's, cut by the limit of its container (cgroup v2)."""
    text = (root / "proc/meminfo").read_text()
    free = int(re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)[1]) << 10  # type: ignore[index]
    group = root / "sys/fs/cgroup"
    try:
        limit, used = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text()
        return free if limit == "max" else min(free, max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        return free


def main(argv: Sequence[str]) -> int:
    """The verb `check`: one JSON object on stdout; exit code 0, or that of the refusal."""
    try:
        print(json.dumps(check(TrainArgs.from_argv(argv))))
    except JobError as error:
        print(json.dumps({"exit": int(error.code), "message": error.message, "hint": error.hint}))
        return int(error.code)
    return int(Exit.OK)
