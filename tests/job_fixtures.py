"""Helpers of the job tests: an OUT that is ready for pods, made without the CLI, and pods run as real processes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from vocab import tiny_dir

from tokenizer.index import Model, convert_index, load_model
from tokenizer.job import (
    PLAN,
    TOKENIZER_DIR,
    TOKENIZER_FILES,
    GateFlags,
    Obj,
    Plan,
    RunRecord,
    Spec,
    TokenizeArgs,
    make_plan,
    run_name,
)
from tokenizer.shard import Commit
from tokenizer.store import Store, expand, join, open_store

ROOT = Path(__file__).resolve().parent.parent


def chat_line(question: str, answer: str, **more: Any) -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages, **more}, ensure_ascii=False)


def answer(number: int) -> str:
    """A text of its own for every number, of some 40 to 90 tokens of the tiny vocabulary."""
    return f"the answer to {number} is {number * number}, " + "and then some " * (1 + number % 3)


def write_corpus(folder: Path, files: int, lines: int) -> Path:
    """files x lines good rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for f in range(files):
        text = "".join(chat_line(f"what is {i}?", answer(i)) + "\n" for i in range(f * lines, (f + 1) * lines))
        (folder / f"part-{f:03d}.jsonl").write_text(text, encoding="utf-8")
    return folder


def objects(source: str) -> list[Obj]:
    listing = expand(source)
    return [Obj(join(listing.root, s.key), s.size, s.etag, s.key) for s in listing.objects]


def prepare(
    out: str,
    source: str,
    *,
    shards: int | None = None,
    run: str = "tok-test",
    tokenizer: Path | None = None,
    gate: GateFlags | None = None,
    batch_inputs: dict[str, Sequence[Obj]] | None = None,
    **spec: Any,
) -> tuple[Plan, TokenizeArgs, Store]:
    """Does what a submit does: plan, tokenizer and run record below OUT."""
    folder = tokenizer or tiny_dir()
    files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES}
    shas = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    needed = {o.key for found in (batch_inputs or {}).values() for o in found}
    found = [o for o in objects(source) if o.key not in needed]
    plan = make_plan(found, Spec(shas, **spec), shards, batch_inputs=batch_inputs)
    store = open_store(out)
    store.put_bytes(PLAN, plan.to_json(), if_none_match=True)
    for name, data in files.items():
        store.put_bytes(f"{TOKENIZER_DIR}/{name}", data)
    start(store, plan, run, gate=gate or GateFlags())
    return plan, TokenizeArgs(out=out, run=run), store


def start(store: Store, plan: Plan, run: str, *, sequence: int = 1, **more: Any) -> None:
    """The run record of one Job over all indexes."""
    record = RunRecord(run, sequence, tuple(range(len(plan.batches))), plan_sha256=plan.sha256(), **more)
    store.put_bytes(run_name(run), record.to_json(), if_none_match=True)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **more}


def pod(args: TokenizeArgs, index: int, **env: str) -> subprocess.Popen[str]:
    """One pod as a process, started as in the image."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tokenizer", "run", *args.to_argv()],
        env=environment(JOB_COMPLETION_INDEX=str(index), **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, JSON log lines, stderr."""
    out, err = process.communicate(timeout=120)
    return process.returncode, [json.loads(line) for line in out.splitlines()], err


def contents(out: str, *skip: str) -> dict[str, bytes]:
    """Every object below OUT but those of the given folders and stats/, logs/, runs/: what must always be the same."""
    store = open_store(out)
    left_out = ("stats/", "logs/", "runs/", *skip)
    return {s.key: store.get_bytes(s.key) for s in store.list() if not s.key.startswith(left_out)}


@cache
def tiny_model(**options: Any) -> Model:
    return load_model(tiny_dir(), Spec({}, **options), 0)


def convert(plan: Plan, index: int, folder: Path, count: int = 2, skipped: frozenset[str] = frozenset()) -> Commit:
    folder.mkdir()
    model = tiny_model(loss_on=plan.spec.loss_on)
    commit: Commit = convert_index(
        index, plan, skipped, model, folder, count=count, downloads=2, on_progress=lambda delta: None
    )[2]
    return commit


def rejects(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rejects.jsonl").read_bytes().splitlines()]


def run_all(out: str, source: str, tmp_path: Path, **more: Any) -> tuple[Plan, Store]:
    """Every index by a pod of its own."""
    plan, args, store = prepare(out, source, **more)
    for index in range(len(plan.batches)):
        code, lines, err = finish(pod(args, index, DFLASH_SCRATCH=str(tmp_path / "scratch")))
        assert (code, err) == (0, ""), (lines, err)
    return plan, store
