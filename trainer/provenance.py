"""What a drafter was made of: the identity that locks OUT, and the story that travels beside every export."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tokenizer.job import Exit, JobError
from tokenizer.store import NotFound, Store
from trainer.checkpoint import FOLDER, check_identity
from trainer.job import TrainArgs
from trainer.target import resolve

RUN = "run.json"
PIECES, PIECE = 16, 1 << 16  # of a file of weights that its fingerprint reads, and bytes of one
PATIENCE = 10.0  # seconds in which the ranks of a try that was killed have ended
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "pyarrow")


def fingerprint(target: str) -> str:
    """Of a target: the hub's `id@revision`, or a hash of a directory's config.json and of its weights' names and sizes.

    Of each file of weights some pieces are hashed too: another fine-tune has the same names and sizes.
    """
    source, where = resolve(target)
    folder = Path(source)
    if not folder.is_dir():
        return f"{source}@{where.get('revision', 'main')}"
    digest = hashlib.sha256()
    if "gguf_file" in where:
        weights = [folder / where["gguf_file"]]
    else:
        digest.update((folder / "config.json").read_bytes())
        weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for part in range(PIECES):
                file.seek(size * part // PIECES)
                digest.update(file.read(PIECE))
    return digest.hexdigest()[:16]


def identity(args: TrainArgs, record: Mapping[str, Any], target: str) -> dict[str, Any]:
    """Everything that decides the final parameters, up to rounding. record: dataset.json. target: its fingerprint."""
    return {**args.identity(), "dataset_sha256": record["content_sha256"], "target_revision": target}


def check_out(store: Store, args: TrainArgs, record: Mapping[str, Any]) -> None:
    """Raises JobError(78) where OUT is of another training, as far as can be told before the target is here."""
    try:
        stored = json.loads(store.get_bytes(RUN))["identity"]
    except (NotFound, ValueError, KeyError):
        return  # `lock` looks again
    mine = {name: value for name, value in identity(args, record, "").items() if name != "target_revision"}
    check_identity({name: stored.get(name) for name in mine}, mine, store.root)


def lock(store: Store, wanted: Mapping[str, Any]) -> None:
    """Take OUT for this training. Raises JobError(78) naming what differs where another one has it."""
    data = json.dumps({"identity": dict(wanted)}, indent=2, sort_keys=True).encode() + b"\n"
    if store.put_bytes(RUN, data, if_none_match=True).created:
        return
    try:
        stored = json.loads(store.get_bytes(RUN))["identity"]
    except (ValueError, KeyError) as error:
        raise JobError(Exit.CONFIG, f"`{store.uri(RUN)}` is no record of a training", "choose another --out") from error
    check_identity(stored, wanted, store.root)


@contextlib.contextmanager
def only(folder: Path) -> Iterator[None]:
    """Be the only training on this machine that writes to `folder`; freed by the end of the last process that has it.

    `latest` tells of a second attempt anywhere, but late: by then it would have cut back the lines of metrics.jsonl
    that the first one wrote. Raises JobError(75) where another one does not end within PATIENCE seconds.
    """
    room = folder / FOLDER  # not `folder` itself: a store locks that for a moment to move `latest`
    room.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(room, os.O_RDONLY | os.O_DIRECTORY)
    try:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise JobError(
                        Exit.RETRY,
                        f"another process of this machine trains into `{folder}`",
                        "wait for its end or stop it",
                    ) from None
                time.sleep(0.1)
                continue
            except OSError:  # a file system without locks: `latest` alone
                pass
            break
        yield
    finally:
        os.close(descriptor)


def check_tokenizer(folder: Path, record: Mapping[str, Any], target: str) -> None:
    """Raises JobError(78) unless the target's tokenizer.json is the one that made the dataset."""
    told = record["spec"]["tokenizer"].get("tokenizer.json")
    found = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    if told and told != found:
        raise JobError(
            Exit.CONFIG,
            f"tokenizer.json of target `{target}` is {found[:12]}, the dataset was made with {told[:12]}",
            "train on the model whose tokenizer made the dataset, or tokenize again",
        )


def story(wanted: Mapping[str, Any], args: TrainArgs, record: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """provenance.json: identity, where things were, versions, and what else is given."""
    return {
        "identity": dict(wanted),
        "dataset": args.dataset,
        "target": args.target,
        "generator": record["spec"].get("generator", ""),
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
        **more,
    }
