"""What would stop a run, found before one is started: each check is one line with a remedy.

Nothing is written anywhere: OUT is listed, not tried.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from dflashctl import listing, show
from dflashctl.config import Settings, Value, unknown_variables
from dflashctl.errors import CliError
from dflashctl.model import check_model, resolve_model
from dflashctl.plan import check_out, check_scheme
from dflashctl.records import QUICK, Out
from dflashctl.verify import refuse
from tokenizer.job import JobError
from trainer.job import TrainArgs

TOKENIZER_NEEDS = ("pyarrow", "numpy", "orjson", "jinja2", "tokenizers", "fastokens", "zstandard")
FLOOR = (1, 33)  # of Kubernetes
SCRATCH_BYTES = 4 << 30  # below this much room for scratch files, large shards may not fit


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: state is `ok`, `warning` or `failed`."""

    name: str
    state: str
    detail: str
    hint: str = ""


def checks(settings: Settings) -> Iterator[Check]:
    """Every check of `doctor tokenize`, in the order in which a run would meet what they look at."""
    yield from ours(settings)
    yield packages("tokenizer", TOKENIZER_NEEDS)
    yield Check("cpus", "ok", f"{len(os.sched_getaffinity(0))} for this process")
    yield scratch()
    values = settings.section("tokenize", {})
    yield attempt("model", values["model"], _model)
    yield attempt("input", values["input"], _input)
    yield attempt("out", values["out"], _out)


def ours(settings: Settings) -> Iterator[Check]:
    """Of this program itself."""
    yield Check("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
    yield Check("settings", "ok", settings.file or "no dflash.toml here; flags, environment and defaults")
    for name in unknown_variables(settings.env):
        yield Check("environment", "warning", f"`{name}` is read by nothing", "see `doctor -v` for the names")


def packages(extra: str, names: Sequence[str]) -> Check:
    """Whether what an extra brings is installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        return Check("packages", "failed", f"missing: {', '.join(missing)}", f"pip install 'dflashctl[{extra}]'")
    return Check("packages", "ok", f"the {extra}'s are all installed")


def cluster_checks(settings: Settings, what: str) -> Iterator[Check]:
    """The cluster's part: reachable, new enough, and willing to take the Job as it would be sent; nothing is kept."""
    from dflashctl.backends.base import Submission
    from dflashctl.backends.choice import choose

    try:
        backend = choose(settings, what, {})
    except CliError as error:
        yield Check("backend", "failed", error.message, error.hint)
        return
    yield Check("backend", "ok", backend.words)
    if backend.name != "kube":
        return
    job = Submission("doctor", "doctor", "s3://bucket/out", (), (0,), 1, kind=what, flags=backend.flags({}))
    try:
        version = backend.api.get("/version")  # type: ignore[attr-defined]
        number = int(version["major"]), int(re.sub(r"[^0-9]", "", version["minor"]))
        words = f"Kubernetes {number[0]}.{number[1]}"
        if number < FLOOR:
            yield Check("cluster", "failed", words, f"{FLOOR[0]}.{FLOOR[1]} is the oldest that is supported")
        else:
            yield Check("cluster", "ok", words)
        backend.check(job)
    except CliError as error:
        yield Check("job", "failed", error.message, error.hint)
        return
    yield Check("job", "ok", "the API server would take it")


def scratch() -> Check:
    folder = Path(os.environ.get("DFLASH_SCRATCH") or os.environ.get("TMPDIR") or "/tmp")
    if not os.access(folder, os.W_OK):
        return Check(
            "scratch", "failed", f"`{folder}` cannot be written", "set DFLASH_SCRATCH to a directory with room"
        )
    free = shutil.disk_usage(folder).free
    state = "ok" if free >= SCRATCH_BYTES else "warning"
    hint = "" if state == "ok" else "set DFLASH_SCRATCH to a directory with room"
    return Check("scratch", state, f"{show.size(free)} free in `{folder}`", hint)


def attempt(name: str, value: Value, look: object) -> Check:
    if not value.value:
        return Check(name, "ok", "not set; name it on the command line")
    try:
        detail = look(value.value)  # type: ignore[operator]
    except (CliError, JobError) as error:
        return Check(name, "failed", error.message, error.hint)
    return Check(name, "ok", f"{detail} ({value.origin})")


def _model(model: str) -> str:
    found = resolve_model(model, QUICK)
    check_model(found, {})
    return f"`{found.name}`: {', '.join(f'{n} {show.size(len(d))}' for n, d in sorted(found.files.items()))}"


def _input(inputs: list[str]) -> str:
    for uri in inputs:
        check_scheme(uri, "input")
    found = listing.find(inputs, [], "\0", QUICK)
    return f"{show.count(len(found.objects))} files, {show.size(found.total_bytes())}"


def _out(uri: str) -> str:
    out = Out(check_out(uri, os.path.isdir), QUICK)
    out.store.check()
    record = out.dataset()
    if record is not None:
        refuse(out, record)
        return f"`{out.uri}` holds a complete dataset"
    return f"`{out.uri}` holds {'an unfinished dataset' if out.plan() else 'nothing yet'}"


def lines(found: list[Check]) -> list[str]:
    """The checks as a table, each hint below its line."""
    rows = show.table(("check", "state", "detail"), [(c.name, c.state, show.printable(c.detail)) for c in found])
    text = rows[:1]
    for row, check in zip(rows[1:], found, strict=True):
        text += [row, *([f"  hint: {check.hint}"] if check.hint else [])]
    return text


def origins(settings: Settings) -> list[tuple[str, str, str]]:
    """(setting, value, origin) of everything, for `doctor -v`; secrets are no settings, so none is here."""
    sections: Mapping[str, Mapping[str, Value]] = {
        "": settings.section(""),
        "tokenize": settings.section("tokenize", {}),
        "train": settings.section("train", {}),
    }
    trainers = {field.name: field.default for field in fields(TrainArgs) if field.default is not MISSING}

    def shown(section: str, key: str, value: object) -> str:
        if value is None and section == "train":  # the trainer's own defaults, which the command line leaves alone
            value = trainers.get(key)
        return "" if value is None else str(value)

    return [
        (f"{section}.{key}" if section else key, shown(section, key, value.value), value.origin)
        for section, values in sections.items()
        for key, value in values.items()
    ]
