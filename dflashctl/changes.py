"""Inputs that are not any more as the plan has them: which have changed, and which a user wants left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from dflashctl.errors import PreflightError, UsageError
from dflashctl.records import PATIENT, QUICK
from tokenizer.job import Obj, Plan
from tokenizer.store import Options, StoreError, locate, parse_uri

THREADS = 16
TOLD = 5  # changed files that are named one by one


def skip_key(text: str, plan: Plan, committed: Iterable[int]) -> str:
    """The key that `--skip-file` means: as printed, the path that row ids start with, or a path as INPUT is typed.

    Raises UsageError.
    """
    done = set(committed)
    try:
        typed = str(parse_uri(text))
    except ValueError:
        typed = text
    for index, batch in enumerate(plan.batches):
        for obj in (*batch.objects, *batch.batch_inputs):
            if text in (obj.key, obj.path) or typed == obj.key:
                if index in done:
                    raise UsageError(f"`--skip-file` `{text}` is in index {index}, which has its commit already")
                return obj.key
    raise UsageError(f"`--skip-file` `{text}` is no input of this dataset", "give the key as the error names it")


def changed_objects(plan: Plan, indexes: Sequence[int], skipped: Iterable[str]) -> tuple[Obj, ...]:
    """Objects of those indexes that are not as pinned, as they are now; raises PreflightError for one that is gone."""
    ordered = _objects(plan, indexes, skipped)
    found = _now(ordered, PATIENT)
    for obj, stat in zip(ordered, found, strict=True):
        if stat is None:
            raise PreflightError(f"input `{obj.key}` is no longer there", f"leave it out with `--skip-file {obj.key}`")
    return tuple(stat for obj, stat in zip(ordered, found, strict=True) if stat is not None and stat != obj)


def tell_late(plan: Plan, skipped: Iterable[str], why: str, say: Callable[[str], None]) -> None:
    """Says which inputs have changed after they were read, since nothing is read again; one that is gone may be."""
    ordered = _objects(plan, range(len(plan.batches)), skipped)
    try:
        changed = [
            obj.key for obj, now in zip(ordered, _now(ordered, QUICK), strict=True) if now is not None and now != obj
        ]
    except PreflightError:  # an input that cannot be asked does not matter here
        return
    for key in changed[:TOLD]:
        say(f"warning: `{key}` has changed since it was read, and is not read again: {why}; choose another --out")
    if len(changed) > TOLD:
        say(f"warning: so have {len(changed) - TOLD} others")


def _objects(plan: Plan, indexes: Sequence[int], skipped: Iterable[str]) -> list[Obj]:
    """The objects of those indexes, request files included, each once."""
    left_out = set(skipped)
    batches = [plan.batches[i] for i in indexes]
    objects = {o.key: o for b in batches for o in (*b.objects, *b.batch_inputs) if o.key not in left_out}
    return [objects[key] for key in sorted(objects)]


def _now(objects: Sequence[Obj], options: Options) -> list[Obj | None]:
    """Each object as it is now, None for one that is gone; raises PreflightError where that cannot be told."""

    def now(obj: Obj) -> Obj | None:
        store, key = locate(obj.key, options)
        try:
            stat = store.stat(key)
        except StoreError as error:
            raise PreflightError(f"input {error.message}", error.hint) from None
        return None if stat is None else replace(obj, size=stat.size, etag=stat.etag)

    if len(objects) < THREADS:
        return [now(obj) for obj in objects]
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(now, objects))
