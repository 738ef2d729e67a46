"""The work of one index on this machine: its objects in; a shard file, a reject file and a commit record out.

Every object is one task of a forked worker, which leaves four files in the scratch directory: record-batch messages,
rejects, text hashes, and a JSON record of counts. The parent puts them together in the plan's order.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizer import chat, requests, workers
from tokenizer.convert import Converter, decoded
from tokenizer.encode import Encoder
from tokenizer.gate import LISTED_TEXT, Commit
from tokenizer.job import (
    CONTRACT,
    TOKENIZER_DIR,
    TOKENIZER_FILES,
    Batch,
    Exit,
    JobError,
    Obj,
    Plan,
    Spec,
    rejected_name,
    shard_name,
)
from tokenizer.read import LineReader, Refused, refused_by_head
from tokenizer.shard import START, batch_digest, content_sha256, join
from tokenizer.store import Options, Store, StoreError, locate
from tokenizer.tally import Tally, repeated

LOOKED_INTO = 256  # objects of an index that has failed, for others that cannot be read
NAMED = 12  # of those
REQUESTS = "requests.json"  # in the scratch directory: digests of the request files
NO_DATA = "name it with `--batch-input`, into another --out, if its replies are among the inputs"
GLANCE = Options(patience=5, on_retry=lambda text: None)


@dataclass(frozen=True, slots=True)
class Model:
    """What is loaded once and shared by every forked worker."""

    encoder: Encoder
    renderer: chat.Renderer
    options: chat.ChatOptions


def fetch_tokenizer(store: Store, spec: Spec, folder: Path) -> Path:
    """OUT/tokenizer/ into `folder`, checked against the plan; JobError 78 where it is not what was planned."""
    folder.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        if name not in spec.tokenizer:
            continue
        key = f"{TOKENIZER_DIR}/{name}"
        if store.stat(key) is None:
            raise JobError(Exit.CONFIG, f"{store.uri(key)} is missing", "run the same `dflashctl tokenize` again")
        data = store.get_bytes(key)
        if hashlib.sha256(data).hexdigest() != spec.tokenizer[name]:
            raise JobError(
                Exit.CONFIG, f"{store.uri(key)} is not the file of the plan", "run the same `dflashctl tokenize` again"
            )
        (folder / name).write_bytes(data)
    return folder


def load_model(folder: Path, spec: Spec, input_bytes: int) -> Model:
    """Encoder and renderer from a local tokenizer directory. JobError 78 where a file is missing or unusable."""
    encoder = Encoder.load(folder, input_bytes)
    renderer = chat.Renderer.load(folder)
    options = chat.ChatOptions(
        loss_on=spec.loss_on,
        preserve_thinking=spec.preserve_thinking,
        template_kwargs=spec.template_kwargs,
    )
    return Model(encoder, renderer, options)


def _part(folder: Path, task: int, suffix: str) -> Path:
    return folder / f"{task:07d}.{suffix}"


def convert_object(
    obj: Obj, task: int, model: Model, spec: Spec, lookup: Any, folder: Path, options: Options, report: workers.Report
) -> None:
    """One object into its four files. Raises JobError 65 where it changed or cannot be read to its end."""
    store, key = locate(obj.key, options)
    converter = Converter(obj.path, model.encoder, model.renderer, model.options, spec, lookup)
    digests: list[str] = []
    lines = LineReader(store.open_stream(key, obj.etag, obj.size), obj.key)
    told = {"rows": 0, "tokens": 0, "loss_tokens": 0, "bytes": 0}
    with (
        _part(folder, task, "arrow").open("wb") as messages,
        _part(folder, task, "jsonl").open("wb") as rejects,
        _part(folder, task, "hashes").open("wb") as hashes,
    ):
        if task == 0:
            messages.write(START)
        for chunk in lines:
            for output in converter.chunk(chunk):
                if output.batch is not None:
                    messages.write(output.batch.serialize())
                    digests.append(batch_digest(output.batch).hex())
                rejects.write(output.rejects)
                hashes.write(output.hashes)
            tally = converter.tally
            total = {
                "rows": tally.rows,
                "tokens": tally.tokens,
                "loss_tokens": tally.loss_tokens,
                "bytes": lines.bytes_read,
            }
            report({name: total[name] - told[name] for name in told})
            told = total
            gc.collect()
    tally = converter.tally
    if tally.lines_seen and converter.requests == tally.lines_seen:
        raise Refused(obj.key, "OpenAI batch requests alone, no replies", NO_DATA)
    if task == 0:  # decoding may load a tokenizer: for the samples that will be shown, not for those of every object
        tally.samples = [decoded(s, model.encoder.decode) for s in tally.samples]
    record = {
        "sha256": lines.sha256,
        "digests": digests,
        "tally": tally.to_json(),
        "texts": {key.hex(): text for key, text in converter.frequent.texts.items()},
    }
    _part(folder, task, "json").write_text(json.dumps(record), encoding="utf-8")
    report({"rows": 0, "tokens": 0, "loss_tokens": 0, "bytes": obj.size - told["bytes"]})


def convert_index(
    index: int,
    plan: Plan,
    skipped: frozenset[str],
    model: Model,
    folder: Path,
    *,
    count: int,
    downloads: int,
    on_progress: Callable[[dict[str, int]], None],
    on_tick: Callable[[], None] = lambda: None,
    on_warning: Callable[[str], None] = lambda text: None,
) -> tuple[Path, Path, Commit]:
    """Shard file, reject file and commit record of one index. `plan` bears the newest pins; count: worker processes."""
    spec = plan.spec
    batch = plan.batches[index]
    objects = [o for o in batch.objects if o.key not in skipped]
    spool = requests.Spool(folder / "requests.sqlite")
    joined = requests_of(batch, skipped)
    options = Options(threads=max(1, downloads // max(1, count)), auth_patience=90)

    def fill(next_task: Callable[[], int | None], report: workers.Report) -> None:
        while next_task() is not None:
            digests, refused = spool.fill(joined, options)
            if refused:
                found = {refusal.key: refusal for refusal in refused}
                name_all(refused[0], refused[0].key, found | unreadable(objects))
                raise refused[0]
            (folder / REQUESTS).write_text(json.dumps(digests), encoding="ascii")

    def work(next_task: Callable[[], int | None], report: workers.Report) -> None:
        gc.freeze()  # what was loaded before the fork is never garbage; a chunk's own is collected after it
        gc.disable()
        lookup = spool.lookup() if joined else None
        while (task := next_task()) is not None:
            convert_object(objects[task], task, model, spec, lookup, folder, options, report)

    if joined:  # in a child, too: reading may start threads, and nobody forks after those
        workers.run([0], 1, fill, on_progress, on_tick, on_warning, fork_one=True)
    largest_first = sorted(range(len(objects)), key=lambda i: (-objects[i].size, i))
    try:
        workers.run(largest_first, count, work, on_progress, on_tick, on_warning)
    except JobError as error:
        if error.code == Exit.DATA:
            own = next((obj.key for obj in objects if error.message.startswith(f"{obj.key}: ")), "")
            name_all(error, own, unreadable(objects))
        raise
    return _assemble(index, plan, objects, joined, batch, folder, model)


def unreadable(objects: Sequence[Obj]) -> dict[str, JobError]:
    """Refusals by key of those objects whose heads tell that they cannot be read.

    A store that says no ends the looking: what it is for stands without it.
    """
    found: dict[str, JobError] = {}
    for obj in objects[:LOOKED_INTO]:
        store, key = locate(obj.key, GLANCE)
        stream = store.open_stream(key, obj.etag, obj.size)
        with contextlib.closing(stream):  # type: ignore[type-var]
            refusal = refused_by_head(stream, obj.key)
        if isinstance(refusal, StoreError) and refusal.code != Exit.DATA:
            break
        if refusal is not None and not isinstance(refusal, StoreError):
            found[obj.key] = refusal
    return found


def name_all(error: JobError, own: str, found: Mapping[str, JobError]) -> None:
    """Add the refusals of others to that of one object (`own`): so all are mended, or left out, at once."""
    others = {key: refusal for key, refusal in found.items() if key != own}
    named = dict(list(others.items())[:NAMED])
    if named:
        error.message += "; also unreadable: " + "; ".join(refusal.message for refusal in named.values())
        error.message += f"; and {len(others) - len(named)} more" if len(others) > len(named) else ""
        flags = " ".join(f"--skip-file {shlex.quote(key)}" for key in sorted({*named, *([own] if own else [])}))
        error.hint += f"; all of them: `resume {flags}`"


def requests_of(batch: Batch, skipped: frozenset[str]) -> Sequence[Obj]:
    return [o for o in batch.batch_inputs if o.key not in skipped]


def _records(folder: Path, objects: Sequence[Obj]) -> Iterator[dict[str, Any]]:
    for task in range(len(objects)):
        yield json.loads(_part(folder, task, "json").read_text(encoding="utf-8"))


def _assemble(
    index: int, plan: Plan, objects: Sequence[Obj], joined: Sequence[Obj], batch: Batch, folder: Path, model: Model
) -> tuple[Path, Path, Commit]:
    total = Tally()
    digests: list[bytes] = []
    read_objects = []
    for obj, record in zip(objects, _records(folder, objects), strict=True):
        total.add(Tally.from_json(record["tally"]))
        digests += map(bytes.fromhex, record["digests"])
        read_objects.append({"key": obj.key, "sha256": record["sha256"]})
    total.samples = [decoded(s, model.encoder.decode) for s in total.samples]
    rows = total.before.total()
    common = repeated([_part(folder, t, "hashes") for t in range(len(objects))], rows, LISTED_TEXT)
    texts: dict[str, str] = {}
    if common:
        for record in _records(folder, objects):
            for key in record["texts"]:
                if bytes.fromhex(key) in common:
                    texts.setdefault(key, record["texts"][key])
    shard, rejects = folder / "shard.arrow", folder / "rejects.jsonl"
    shard_sha256, shard_bytes = join([_part(folder, t, "arrow") for t in range(len(objects))], shard)
    requested = json.loads((folder / REQUESTS).read_text(encoding="ascii")) if joined else []
    digest = hashlib.sha256()
    with rejects.open("wb") as file:
        for task in range(len(objects)):
            with _part(folder, task, "jsonl").open("rb") as part:
                while data := part.read(1 << 20):
                    digest.update(data)
                    file.write(data)
    commit: dict[str, Any] = {
        "contract": CONTRACT,
        "spec_sha256": plan.spec.sha256(),
        "index": index,
        "shard": {"name": shard_name(index, len(plan.batches)), "sha256": shard_sha256, "bytes": shard_bytes},
        "rejected": {
            "name": rejected_name(index),
            "sha256": digest.hexdigest(),
            "bytes": rejects.stat().st_size,
        },
        "objects": read_objects,
        "batch_inputs": [{"key": o.key, "sha256": sha256} for o, sha256 in zip(joined, requested, strict=True)],
        "skipped": sorted({o.key for o in batch.objects} - {o.key for o in objects}),
        **total.record(),
        "supervised": [
            {"hash": key.hex(), "text": texts.get(key.hex(), ""), "count": n}
            for key, n in sorted(common.items(), key=lambda item: (-item[1], item[0]))
        ],
        "content_sha256": content_sha256(digests),
    }
    return shard, rejects, commit  # type: ignore[return-value]
