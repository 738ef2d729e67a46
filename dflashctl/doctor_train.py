"""What would stop a training, found before one is started; beside dflashctl/doctor.py, whose checks it shares.

What this machine has is looked at only where it would train; on a cluster the target lies on the model volume. Nothing
that is written stays.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from dflashctl import show, trained, training
from dflashctl.config import Settings, Value
from dflashctl.doctor import Check, attempt, ours, packages, scratch
from dflashctl.errors import CliError, PreflightError
from dflashctl.plan import check_out, check_scheme
from dflashctl.records import QUICK, Out
from tokenizer.job import JobError

NEEDS = ("torch", "transformers", "safetensors", "pyarrow", "numpy")
SHM_BYTES = 1 << 30  # ranks on several GPUs of one machine meet in /dev/shm


def checks(settings: Settings) -> Iterator[Check]:
    """Every check of `doctor train`, in the order in which a training would meet what they look at."""
    yield from ours(settings)
    values, here = settings.section("train", {}), _trains_here(settings)
    found = list(_machine()) if here else []
    found.append(attempt("dataset", values["dataset"], _dataset))
    found.append(attempt("target", values["target"], _target if here else "`{}`, which the pod looks at".format))
    found.append(attempt("out", values["out"], _out))
    yield from found
    named = all(values[key].value for key in ("dataset", "target", "out"))
    if here and named and all(check.state != "failed" for check in found):
        yield _whole(values)


def _trains_here(settings: Settings) -> bool:
    from dflashctl.backends.choice import choose

    try:
        return choose(settings, "train", {}).name == "local"
    except CliError:
        return False  # the cluster's checks say it


def _machine() -> Iterator[Check]:
    installed = packages("trainer", NEEDS)
    yield installed
    if installed.state == "ok":
        yield Check("torch", "ok", f"{metadata.version('torch')}, transformers {metadata.version('transformers')}")
    yield Check("cpus", "ok", f"{len(os.sched_getaffinity(0))} for this process")
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    yield Check("memory", "ok", f"{show.size(int(text.partition('MemAvailable:')[2].split()[0]) << 10)} available")
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    small = "mount it larger, e.g. `--shm-size 1g` of a container: ranks on several GPUs meet there"
    yield Check(
        "/dev/shm",
        *(("ok", f"{show.size(free)} free") if free >= SHM_BYTES else ("warning", f"{show.size(free)} free", small)),
    )
    yield scratch()


def _dataset(uri: str) -> str:
    out = Out(check_scheme(uri, "dataset"), QUICK)
    record = out.dataset()
    if record is None:
        what = "is not complete" if out.plan() else "holds no dataset"
        raise PreflightError(f"`{out.uri}` {what}", "`dflashctl tokenize` makes it, `dflashctl resume` completes it")
    if record["degenerate"]:
        raise PreflightError(f"`{out.uri}` is degenerate: {'; '.join(record['reasons'])}", "see `dflashctl inspect`")
    return f"`{out.uri}`: {show.count(record['rows'])} rows"


def _target(name: str) -> str:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) and not folder.exists():
            raise PreflightError(f"`{name}` does not exist", "name a directory, an s3:// prefix or hub-id@revision")
        return f"`{name}`, looked at when a training starts"
    try:
        kind = json.loads((folder / "config.json").read_bytes())["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        raise PreflightError(f"`{folder}` has no config.json that can be read", "name a model's directory") from None
    return f"`{folder}`: {kind}, {show.size(sum(path.stat().st_size for path in folder.glob('*.safetensors')))}"


def _out(uri: str) -> str:
    out = Out(check_out(uri, os.path.isdir), QUICK)
    out.store.check()
    if trained.known_of(out, []) is None:
        return f"`{out.uri}` holds no training yet"
    told = trained.told(out)
    return f"`{out.uri}` holds a training: " + ("complete" if told.finished else f"step {told.figures.get('step', 0)}")


def _whole(values: Mapping[str, Value]) -> Check:
    """The very check that a training begins with."""
    try:
        found = training.preflight(training.here(training.declare(values, False, {})))
    except (CliError, JobError) as error:
        return Check("training", "failed", error.message, error.hint)
    if found["taken"]:
        return Check("training", "failed", f"OUT is of another training: {'; '.join(found['taken'])}", "another --out")
    needed, free = found["memory"]["needed"], found["memory"]["free"]
    words = "data, target, drafter and OUT fit one another"
    words += f"; about {show.size(needed)} of memory are needed, {show.size(free)} are free" if needed else ""
    if needed > free:
        return Check("training", "warning", words, "a smaller --split needs fewer copies of the target")
    return Check("training", "ok", words)
