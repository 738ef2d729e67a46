"""What is known of a training: what its OUT says of it, and how a moment of it is shown.

    OUT/job.json    its newest Job, written by `train` and `resume`, so that any directory finds it again
    OUT/run.json    what is trained; latest, metrics.jsonl, provenance.json: how far it is, written by the trainer

A live Job is asked through its backend; OUT answers for one whose Job is gone, and from any other directory.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflashctl import show
from dflashctl.backends.base import Known
from dflashctl.progress import Index
from tokenizer.store import NotFound, StoreError

if TYPE_CHECKING:
    from dflashctl.records import Out
    from dflashctl.runs import Status

JOB, RUN, PROVENANCE, LATEST, METRICS = "job.json", "run.json", "provenance.json", "latest", "metrics.jsonl"
TAIL = 1 << 18  # bytes at the end of metrics.jsonl that are read for the newest figures
#: Keys of `training` in `status -o json`; null where nothing was said of it yet.
KEYS = (
    "step",
    "steps",
    "epoch",
    "loss",
    "accuracy",
    "held_out_tau",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "target_busy",
    "drafter_busy",
    "ring_depth",
    "memory_bytes",
    "saved_step",
    "eta_s",
)


@dataclass(frozen=True, slots=True)
class Told:
    """What OUT says: whether the training is complete, and its newest figures by the names of a progress line."""

    finished: bool = False
    figures: Mapping[str, Any] = field(default_factory=dict)


def read_json(out: Out, key: str) -> dict[str, Any]:
    """A JSON object of OUT; {} where there is none. Raises StoreError."""
    try:
        value = json.loads(out.store.get_bytes(key))
    except (NotFound, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def told(out: Out) -> Told:
    """What OUT says now. Raises StoreError."""
    story = read_json(out, PROVENANCE)
    finished = story.get("finished") is True
    figures = newest(tail(out))
    figures |= {key: story[key] for key in ("steps", "held_out_tau") if finished and story.get(key) is not None}
    with contextlib.suppress(NotFound, ValueError):
        figures["saved_step"] = int(out.store.get_bytes(LATEST).decode().strip().removeprefix("step-"))
    return Told(finished, figures)


def tail(out: Out) -> bytes:
    """The end of metrics.jsonl; the trainer may be writing it."""
    stat = out.store.stat(METRICS)
    data = b""
    if stat is not None:
        start = max(0, stat.size - TAIL)
        try:
            for piece in out.store.open_stream(METRICS, size=stat.size, start=start):
                data += piece
        except StoreError:
            if not data:
                raise
    return data


def newest(data: bytes) -> dict[str, Any]:
    """Figures of the last step and the last walk in these lines of metrics.jsonl; pure."""
    figures: dict[str, Any] = {}
    for line in data.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut: the first of a tail, or the last while it is written
        if "loss" in entry:
            figures |= {key: value for key, value in entry.items() if key not in ("rows", "tokens")}
        elif "held_out_tau" in entry:
            figures["held_out_tau"] = entry["held_out_tau"]
    return figures


def known_of(out: Out, known: list[Known]) -> Known | None:
    """The training of an OUT, newest first: of this backend, else as OUT tells; None where OUT is no training's."""
    for run in known:
        if run.kind == "train" and run.out == out.uri:
            return run
    job = read_json(out, JOB)
    if {"run", "created"} <= job.keys():
        name = str((job.get("job") or {}).get("job") or job["run"])
        return Known(job["run"], "train", out.uri, name, float(job["created"]), home_of(job))
    return Known(out.uri, "train", out.uri, "", 0.0) if "identity" in read_json(out, RUN) else None


def home_of(job: Mapping[str, Any]) -> str:
    """Where this machine keeps the state of that Job; empty for another machine's, or one that is gone."""
    home = str(job.get("home") or "")
    return home if home and job.get("host") == socket.gethostname() and Path(home).is_dir() else ""


def job_record(home: str, submission: Mapping[str, Any], created: float) -> bytes:
    """OUT/job.json. home: where this machine keeps the Job's state; empty for a Job of a cluster."""
    record = {
        "schema": "dflash.train-job/1",
        "run": submission["run"],
        "created": created,
        "host": socket.gethostname(),
        "home": home,
        "job": dict(submission),
    }
    return json.dumps(record, ensure_ascii=False, indent=1).encode() + b"\n"


def filled(indexes: tuple[Index, ...], out: Told) -> tuple[Index, ...]:
    """The one index of a training with OUT's figures where its process has said none, or nothing newer; pure.

    A process tells of a step every few seconds: what a kill left behind in OUT is further on. Which step is saved is
    what OUT says, unless the process has said a later one.
    """
    index = indexes[0] if indexes else Index(0, "succeeded" if out.finished else "pending")
    said = index.message
    ahead = index.state != "running" and out.figures.get("step", -1) > said.get("step", -1)
    message = {**out.figures, **said} | (dict(out.figures) if ahead else {})
    saved = max(said.get("saved_step", -1), out.figures.get("saved_step", -1))
    return (replace(index, message=message | ({"saved_step": saved} if "step" in message else {})),)


# ---- shown


def document(status: Status) -> dict[str, Any]:
    """The object `training` of `status -o json`."""
    said = status.indexes[0].message if status.indexes else {}
    return {key: said.get(key) for key in KEYS}


def block(status: Status) -> list[str]:
    """A training in full, as lines."""
    pairs = [("run", status.run), ("state", status.state), ("out", status.out)]
    if status.reason:
        pairs.append(("reason", show.printable(status.reason)))
    tries = status.indexes[0].tries if status.indexes else 0
    if tries > 1:
        pairs.append(("try", str(tries)))
    return show.pairs([*pairs, *figures(status)])


def line(status: Status) -> str:
    """A training as one whole line."""
    return ", ".join([f"{status.run} {status.state}", *(f"{name} {value}" for name, value in figures(status))])


def figures(status: Status) -> list[tuple[str, str]]:
    """What the trainer said last, as far as it said it."""
    said = status.indexes[0].message if status.indexes else {}
    live = status.state in ("queued", "pending", "running")
    if said.get("step") is None:
        return [("now", show.printable(str(said["said"])))] if live and said.get("said") else []
    accuracy = " ".join(f"{share:.2f}" for share in said.get("accuracy") or ())
    pairs = [("step", f"{said['step']} of {said.get('steps', '?')}"), ("loss", f"{said['loss']:.4f}")]
    pairs.append(("accuracy", f"{accuracy} by position"))
    if said.get("held_out_tau") is not None:
        pairs.append(("held-out tau", f"{said['held_out_tau']:.2f} tokens a pass"))
    if live:
        pairs.append(("speed", show.rate(float(said["tokens_per_s"]), "tokens")))
        busy = f"target {said['target_busy']:.0%}, drafter {said['drafter_busy']:.0%}, ring {said['ring_depth']:.1f}"
        pairs.append(("busy", busy))
    if said.get("saved_step", -1) >= 0:
        pairs.append(("saved", f"step {said['saved_step']}"))
    if live and said["step"] == said.get("steps") and said.get("said"):  # the end takes its time, too
        pairs.append(("now", show.printable(str(said["said"]))))
    elif live and said.get("eta_s") is not None:
        pairs.append(("ETA", show.span(float(said["eta_s"]))))
    return pairs
