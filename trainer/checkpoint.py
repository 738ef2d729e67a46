"""Checkpoints: whole or not there, newest first, and never in the way of a step.

    checkpoints/step-000100/config.json, model.safetensors   the drafter in z-lab's layout: to serve, `eval`, `export`
                            state.safetensors                master weights and both moments, exactly as they were
                            trainer.json                     written last: step, identity, size and sha256 of the rest
    latest                                                   the newest one's name, replaced by If-Match

A step hands over a copy of its state and goes on; a thread writes it beside its place, renames it, sends it to S3 where
OUT is there, and moves `latest`. The data's order, anchors and learning rate are functions of the step, so the step and
the state are all there is to go on from, bit by bit, whatever the split. A torn checkpoint is passed over for the one
before it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenizer.job import Exit, JobError
from tokenizer.store import NotFound, Store, StoreError
from trainer.config import DrafterConfig
from trainer.export import CONFIG, WEIGHTS

FOLDER, LATEST, META, STATE = "checkpoints", "latest", "trainer.json", "state.safetensors"
METRICS, BOARD = "metrics.jsonl", "tensorboard"
NAME = re.compile(r"step-(\d{6,})")
KEEP = 2  # newest ones that are not pruned


def step_name(step: int) -> str:
    return f"step-{step:06d}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything after `step` steps, on the CPU and not shared with the model. counters: rows and tokens trained."""

    step: int
    updates: int
    state: Mapping[str, Tensor]
    counters: Mapping[str, int] = field(default_factory=dict)


def write(folder: Path, snapshot: Snapshot, config: DrafterConfig, identity: Mapping[str, Any]) -> Path:
    """Write a checkpoint below `folder`, durable before it gets its name. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / step_name(snapshot.step)
    fresh = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=folder))
    try:
        fresh.chmod(0o755)
        serving = {
            name.removeprefix("master."): tensor.to(torch.bfloat16)
            for name, tensor in snapshot.state.items()
            if name.startswith("master.")
        }
        save_file(serving, fresh / WEIGHTS, metadata={"format": "pt"})
        save_file(dict(snapshot.state), fresh / STATE)
        text = json.dumps(config.to_dict() | {"dtype": "bfloat16"}, indent=2, sort_keys=True) + "\n"
        (fresh / CONFIG).write_text(text, "utf-8")
        files = {name: _described(fresh / name) for name in (CONFIG, WEIGHTS, STATE)}
        meta = {
            "step": snapshot.step,
            "updates": snapshot.updates,
            "counters": dict(snapshot.counters),
            "identity": dict(identity),
            "files": files,
        }
        (fresh / META).write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n", "utf-8")
        for path in fresh.iterdir():
            path.chmod(0o644)  # safetensors makes files that no other user may serve
            _sync(path)
        _sync(fresh)
        if place.exists():
            shutil.rmtree(place)  # of a resume that passed it over
        fresh.rename(place)
        _sync(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return place


def _sync(path: Path) -> None:
    """What was written there is on the disk; without effect where there is nothing."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _described(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """`name is A there, B here`, one for each field that two identities do not share."""
    return [
        f"{name} is {json.dumps(stored.get(name))} there, {json.dumps(wanted.get(name))} here"
        for name in sorted({*stored, *wanted})
        if stored.get(name) != wanted.get(name)
    ]


def check_identity(stored: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Raises JobError(78) naming what differs: another drafter is being trained there."""
    found = differences(stored, wanted)
    if found:
        raise JobError(Exit.CONFIG, f"`{where}` is of another training: {'; '.join(found)}", "choose another --out")


def find(
    store: Store, local: Path, identity: Mapping[str, Any], say: Callable[[str], None], remote: bool
) -> Path | None:
    """The newest whole checkpoint below OUT, as a local directory; None where there is none.

    local: OUT itself unless `remote`. One that is torn or cannot be read is passed over, and said. Raises JobError(78)
    for one of another training.
    """
    steps = []
    for stat in store.list(f"{FOLDER}/"):
        folder, _, name = stat.key.removeprefix(f"{FOLDER}/").partition("/")
        if name == META and (match := NAME.fullmatch(folder)):
            steps.append((int(match[1]), folder))
    for _, folder in sorted(steps, reverse=True):
        where = f"{FOLDER}/{folder}"
        try:
            meta = json.loads(store.get_bytes(f"{where}/{META}"))
            check_identity(meta["identity"], identity, store.uri(where))
            return _whole(store, where, meta, local / FOLDER / folder, remote)
        except (ValueError, KeyError, NotFound) as error:
            say(f"checkpoint `{store.uri(where)}` is not whole ({error}): the one before it is used")
    return None


def _whole(store: Store, where: str, meta: Mapping[str, Any], local: Path, remote: bool) -> Path:
    """Fetch what is not here yet and check every file; ValueError names the first that is wrong."""
    for name, described in meta["files"].items():
        path = local / name
        if remote and not (path.is_file() and _described(path) == described):
            local.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for piece in store.open_stream(f"{where}/{name}"):
                    file.write(piece)
        if not path.is_file() or _described(path) != described:
            raise ValueError(f"{name} has other bytes than were written")
    if remote:
        (local / META).write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n", "utf-8")
    return local


def read(folder: Path) -> Snapshot:
    """A checkpoint that `find` returned."""
    meta = json.loads((folder / META).read_text("utf-8"))
    return Snapshot(meta["step"], meta["updates"], load_file(folder / STATE), meta["counters"])


class Writer:
    """Saves in a thread. At most one snapshot waits; a newer one takes its place, so that no step ever waits."""

    def __init__(
        self,
        store: Store,
        local: Path,
        config: DrafterConfig,
        identity: Mapping[str, Any],
        say: Callable[[str], None],
        remote: bool,
        start: int = 0,
    ) -> None:
        """local: where checkpoints are written; OUT itself unless `remote`. start: step that is gone on from."""
        self.store, self.local, self.config, self.identity = store, local, config, identity
        self.say, self.remote = say, remote
        self.saved = start or -1  # the newest step that is saved
        self.replaced = 0  # snapshots that a newer one overtook
        self._etag = self._seen()
        self._waiting: Snapshot | None = None
        self._closing = False
        self._error: JobError | None = None
        self._changed = threading.Condition()
        for leftover in (local / FOLDER).glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def _seen(self) -> str | None:
        try:
            return self.store.get(LATEST)[1]
        except NotFound:
            return None

    def submit(self, snapshot: Snapshot) -> None:
        """Have a snapshot saved. Raises as `check`, of an earlier one."""
        with self._changed:
            self.check()
            self.replaced += self._waiting is not None
            self._waiting = snapshot
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until everything is saved. Raises as `check`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raises JobError where a save has failed: 73 the disk is full, 75 OUT is another attempt's now."""
        if self._error:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                snapshot, self._waiting = self._waiting, None
                if snapshot is None:
                    return
            try:
                self._save(snapshot)
            except JobError as error:
                self._fail(error)
                return
            except (OSError, SafetensorError) as error:
                self._fail(
                    JobError(
                        Exit.DISK_FULL,
                        f"checkpoint of step {snapshot.step} cannot be written: {error}",
                        "free space or give the checkpoints a larger volume; resume goes on from the last one",
                    )
                )
                return
            except Exception as error:  # a thread that dies in silence would pass for one that has saved
                why = f"checkpoint of step {snapshot.step}: {type(error).__name__}: {error}"
                self._fail(JobError(Exit.RANK_DIED, why, "resume goes on from the last one"))
                return

    def _fail(self, error: JobError) -> None:
        with self._changed:
            self._error = error

    def _save(self, snapshot: Snapshot) -> None:
        place = write(self.local / FOLDER, snapshot, self.config, self.identity)
        if self.remote:
            try:
                self._push(place)
            except StoreError as error:
                self.say(f"checkpoint of step {snapshot.step} is not in {self.store.root} yet: {error.message}")
                if self._closing and self._waiting is None:
                    raise  # the last chance to get it there
                return
        else:
            _sync(self.local / METRICS)  # the lineage is not shorter than the checkpoint, even after a power cut
        condition: dict[str, Any] = {"if_match": self._etag} if self._etag else {"if_none_match": True}
        put = self.store.put_bytes(LATEST, f"{place.name}\n".encode(), **condition)
        if not put.created:
            raise JobError(
                Exit.RETRY,
                f"`{self.store.uri(LATEST)}` was moved by another attempt: this one ends",
                "two attempts must not train into one OUT",
            )
        self._etag, self.saved = put.etag, snapshot.step
        self._prune(snapshot.step)

    def _push(self, place: Path) -> None:
        push_figures(self.store, self.local)
        for name in (CONFIG, WEIGHTS, STATE, META):  # META last: it makes the others a checkpoint
            self.store.upload_file(place / name, f"{FOLDER}/{place.name}/{name}")

    def _prune(self, newest: int) -> None:
        """Delete all but the newest ones up to this; of a remote OUT the newest alone is kept here."""
        folders = [path.name for path in (self.local / FOLDER).glob("step-*")]
        for name in prunable(folders, newest, 1 if self.remote else KEEP):
            shutil.rmtree(self.local / FOLDER / name, ignore_errors=True)
        if not self.remote:
            return
        keys = [stat.key for stat in self.store.list(f"{FOLDER}/step-")]
        gone = prunable([key.split("/")[1] for key in keys], newest, KEEP)
        for key in sorted(keys, key=lambda key: not key.endswith(META)):  # META first: half of one is none
            if key.split("/")[1] in gone:
                self.store.delete(key)


def push_figures(store: Store, local: Path) -> None:
    """Send metrics.jsonl and TensorBoard's files, which grow meanwhile, as they are now."""
    for path in (local / METRICS, *sorted((local / BOARD).glob("*"))):
        if path.is_file():
            store.put_bytes(path.relative_to(local).as_posix(), path.read_bytes())


def prunable(names: Iterable[str], newest: int, keep: int) -> set[str]:
    """Which checkpoints to delete: those of steps up to `newest`, but for the last `keep` of them."""
    steps = {int(match[1]): name for name in names if (match := NAME.fullmatch(name))}
    upto = sorted(step for step in steps if step <= newest)
    return {steps[step] for step in upto[:-keep]}
