"""What the INPUTs hold: each object once, with the path that its row ids start with, and what was left out.

An OpenAI batch output has replies only; its prompts are in the request file it was made from. So the first lines of
objects are looked at: request files found among the INPUTs are taken out of the data and pinned, with those named
by `--batch-input`, for the outputs that need them.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dflashctl import show
from dflashctl.errors import PreflightError
from tokenizer.job import Obj
from tokenizer.store import Listing, Options, StoreError, expand, join, locate

PEEK = 64 << 10  # bytes of an object's head that are read to know its kind
THREADS = 16
SAMPLES = 8  # objects on S3 with names of one kind that are looked into
_CUSTOM_ID = re.compile(rb'^\s*\{.{0,200}"custom_id"\s*:', re.DOTALL)
_REQUEST = re.compile(rb'"url"\s*:\s*"/v1/.*"body"\s*:\s*\{', re.DOTALL)
_OUTPUT = re.compile(rb'"response"\s*:\s*\{\s*"status_code"')


@dataclass(slots=True)
class Found:
    """The objects of all INPUTs, the request files that each needs (by key), and what was skipped by reason."""

    objects: list[Obj]
    skipped: dict[str, int] = field(default_factory=dict)
    batch_inputs: dict[str, tuple[Obj, ...]] = field(default_factory=dict)

    def total_bytes(self) -> int:
        return sum(o.size for o in self.objects)

    def skips(self) -> str:
        """What was skipped as one clause; empty if nothing was."""
        what = ", ".join(f"{number} {reason}" for reason, number in sorted(self.skipped.items()))
        return f"skipped {what}" if what else ""


def find(inputs: Sequence[str], batch_inputs: Sequence[str], out: str, options: Options) -> Found:
    """List every INPUT; raises PreflightError when one is not there or cannot be read.

    out: OUT as its store spells it; what lies below it is output, not input, and is counted as `below_out`.
    """
    objects, skipped = _gather(inputs, options)
    requests, more = _gather(batch_inputs, options)
    for reason, number in more.items():
        skipped[reason] = skipped.get(reason, 0) + number
    inputs_alone = [o for o in objects if not o.key.startswith(out.rstrip("/") + "/")]
    if len(inputs_alone) < len(objects):
        skipped["below_out"] = len(objects) - len(inputs_alone)
        objects = inputs_alone
    if not objects:
        what = ", ".join(f"{reason} {n}" for reason, n in skipped.items())
        raise PreflightError(
            f"no input file in {', '.join(f'`{uri}`' for uri in inputs)}" + (f" (skipped: {what})" if what else ""),
            "name an --out that the inputs do not lie below"
            if skipped.get("below_out")
            else "name .jsonl, .jsonl.gz or .jsonl.zst files, a directory, a prefix or a glob",
        )
    for obj in (*objects, *requests):
        if not obj.key.isprintable() and any("\ud800" <= char <= "\udfff" for char in obj.key):
            raise PreflightError(f"the name of input `{show.printable(obj.key)}` is not UTF-8", "rename it")
        if obj.key.startswith(("/dev/", "/proc/")):
            raise PreflightError(f"input `{obj.key}` is another file in every process", "name the file itself")
    named = {o.key for o in requests}
    objects = [o for o in objects if o.key not in named]
    kinds = dict(zip((o.key for o in objects), _kinds(objects, options), strict=True))
    requests += [o for o in objects if kinds[o.key] == "request"]
    outputs = [o for o in objects if kinds[o.key] == "output"]
    if outputs and not requests:
        raise PreflightError(
            f"`{outputs[0].key}` is an OpenAI batch output, and its request file is not among the inputs",
            "name the request file with `--batch-input`",
        )
    data = [o for o in objects if kinds[o.key] != "request"]
    if not data:
        raise PreflightError(
            "every input is an OpenAI batch request file, none has replies", "name the output files too"
        )
    pinned = tuple(sorted(requests))
    needing = outputs or (data if batch_inputs else [])  # a file may mix its dialects: the user knows better
    return Found(data, skipped, {o.key: pinned for o in needing})


def _gather(uris: Iterable[str], options: Options) -> tuple[list[Obj], dict[str, int]]:
    """Every object once; one that two INPUTs name keeps its longer path, whatever their order."""
    found: dict[str, Obj] = {}
    skipped: Counter[str] = Counter()
    for uri in uris:
        listing = _expand(uri, options)
        skipped.update(listing.skipped_by_reason())
        for stat in listing.objects:
            obj = Obj(join(listing.root, stat.key), stat.size, stat.etag, stat.key)
            if obj.key not in found or len(found[obj.key].path) < len(obj.path):
                found[obj.key] = obj
    objects = _without_links(found.values())
    if len(objects) < len(found):
        skipped["same_file"] = len(found) - len(objects)
    return objects, dict(sorted(skipped.items()))


def _without_links(objects: Iterable[Obj]) -> list[Obj]:
    """Every file of this machine once, however many symbolic links lead to it: under its own name if that is there."""
    here: list[tuple[bool, Obj]] = []
    others = []
    for obj in objects:
        if obj.key.startswith("s3://"):
            others.append(obj)
        else:
            here.append((os.path.islink(obj.key), obj))
    folders: dict[str, str] = {}  # of many files in few directories
    files: dict[str, Obj] = {}
    for link, obj in sorted(here):
        folder, name = os.path.split(obj.key)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        real = os.path.realpath(obj.key) if link else os.path.join(folders[folder], name)
        if real not in files or real == obj.key:
            files[real] = obj
    return sorted([*others, *files.values()])


def _expand(uri: str, options: Options) -> Listing:
    try:
        return expand(uri, options)
    except ValueError as error:
        raise PreflightError(f"input {error}") from None
    except StoreError as error:
        raise PreflightError(f"input {error.message}", error.hint) from None


def _kinds(objects: Sequence[Obj], options: Options) -> list[str]:
    """ "request", "output" or "" of each object, by its first line; raises PreflightError if one cannot be opened.

    Every file of this machine is looked into. On S3 a GET each would cost more than the listing: a few of every set of
    names that differ by numbers alone stand for the rest, unless one of them belongs to a batch.
    """

    def kind(number: int) -> str:
        obj = objects[number]
        store, key = locate(obj.key, options)
        stream = store.open_stream(key, size=min(obj.size, PEEK))
        try:
            head = next(iter(stream), b"")[:PEEK]
        except StoreError as error:
            raise PreflightError(f"input {error.message}", error.hint) from None
        finally:
            close: Callable[[], None] | None = getattr(stream, "close", None)
            if close:
                close()
        return kind_of(first_line(head))

    def look(numbers: Sequence[int]) -> dict[int, str]:
        if len(numbers) < THREADS:
            return {number: kind(number) for number in numbers}
        with ThreadPoolExecutor(THREADS) as pool:
            return dict(zip(numbers, pool.map(kind, numbers), strict=True))

    first = samples([o.key for o in objects])
    kinds = look(first)
    if any(kinds.values()):
        kinds |= look([n for n in range(len(objects)) if n not in kinds])
    return [kinds.get(n, "") for n in range(len(objects))]


def samples(keys: Sequence[str]) -> list[int]:
    """Which of the keys (sorted) are looked into first: every file here, and of S3's some of each kind of name."""
    groups: dict[str, list[int]] = {}
    chosen = []
    for number, key in enumerate(keys):
        if key.startswith("s3://"):
            groups.setdefault(re.sub(r"[0-9]+", "0", key), []).append(number)
        else:
            chosen.append(number)
    for alike in groups.values():
        step = max(1, len(alike) // SAMPLES)
        chosen += {*alike[::step], alike[-1]}
    return sorted(chosen)


def first_line(head: bytes) -> bytes:
    """The first line in the head of an object, decompressed if need be; what cannot be told is empty."""
    if head.startswith(b"\x1f\x8b"):
        try:
            head = zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(head, PEEK)
        except (zlib.error, gzip.BadGzipFile):
            return b""
    elif head.startswith(b"\x28\xb5\x2f\xfd"):
        try:
            import zstandard
        except ImportError:
            return b""
        try:
            head = zstandard.ZstdDecompressor().decompressobj().decompress(head)
        except zstandard.ZstdError:
            return b""
    return next((line for line in head.split(b"\n") if line.strip()), b"")


def kind_of(line: bytes) -> str:
    """ "request" for a line of an OpenAI batch request file, "output" for one of its output, else "".

    A line that was cut by the peek is told by the keys at its beginning.
    """
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        if not _CUSTOM_ID.search(line):
            return ""
        return "request" if _REQUEST.search(line) else "output" if _OUTPUT.search(line) else ""
    if not isinstance(row, dict) or "custom_id" not in row:
        return ""
    if isinstance(row.get("body"), dict) and "url" in row:
        return "request"
    failed = row.get("error") is not None and row.get("response", "") is None
    return "output" if failed or isinstance(row.get("response"), dict) else ""
