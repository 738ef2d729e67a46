"""A target by its hub id: through huggingface_hub, whose cache on the model volume keeps it for the retries.

A revision is required: what a name alone means may be another model at the next retry. A hub that does not answer is
asked for as long as a store would be; then a copy that is whole already is used, and else the error says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizer.job import Exit, JobError
from tokenizer.store import Stat
from trainer.fetch import (
    FOLDER_ENV,
    INDEX,
    OTHER_WEIGHTS,
    SAID_S,
    WEIGHTS,
    Tell,
    cache_folder,
    check_revision,
    check_room,
    chosen,
    is_weights,
    note,
)

PATIENCE_S = 90.0  # how long a hub that does not answer is asked again
ELSEWHERE = "name a path, or an s3:// prefix that holds the model"


def from_hub(target: str, tell: Tell, check: Callable[[Path], None]) -> Path:
    """The snapshot directory of `ID@REVISION`. Raises JobError: 73 no room, 75 it broke off, 78 it cannot be had."""
    repo, revision = check_revision(target)
    from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()
    home = str(cache_folder() / "hub") if os.environ.get(FOLDER_ENV) else constants.HF_HUB_CACHE
    Path(home).mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = {"repo_id": repo, "revision": revision, "cache_dir": home}
    try:
        told = _retried(target, lambda: HfApi().model_info(repo, revision=revision, files_metadata=True), tell)
    except JobError as error:
        found = _kept(known)
        if found is None or error.code != Exit.RETRY:
            raise _final(error) from error
        note(tell, f"{error.message}; the copy in `{found}` is whole and is used")
        return found
    files = chosen([Stat(entry.rfilename, entry.size or 0, "") for entry in told.siblings])
    cached = {f.key for f in files if isinstance(try_to_load_from_cache(repo, f.key, home, told.sha), str)}
    missing = sum(f.size for f in files if f.key not in cached)
    check_room(missing, Path(home), target)
    note(tell, f"target `{target}`: {len(files)} files, {missing} bytes of them are not here yet")
    names = [f.key for f in files]
    light = [name for name in names if not is_weights(name)]
    with _said(tell, Path(home) / f"models--{repo.replace('/', '--')}" / "blobs", missing):
        folder = Path(_retried(target, lambda: snapshot_download(**known, allow_patterns=light), tell))
        if (folder / "tokenizer.json").is_file():
            check(folder)
        folder = Path(_retried(target, lambda: snapshot_download(**known, allow_patterns=names), tell))
    return folder


def _kept(known: dict[str, Any]) -> Path | None:
    """The snapshot in the cache, if it is there with all its weights."""
    from huggingface_hub import snapshot_download

    try:
        left_out = [f"*{suffix}" for suffix in OTHER_WEIGHTS] + ["*/*", ".*"]
        folder = Path(snapshot_download(**known, ignore_patterns=left_out, local_files_only=True))
        index = json.loads((folder / INDEX).read_text()) if (folder / INDEX).exists() else {"weight_map": {}}
        wanted = set(index["weight_map"].values())
    except (OSError, ValueError, KeyError):
        return None
    there = {path.name for path in folder.iterdir()}
    weights = wanted or {name for name in there if name.endswith(WEIGHTS)}
    return folder if weights and wanted <= there and "config.json" in there else None


def _retried(target: str, ask: Callable[[], Any], tell: Tell) -> Any:
    """What the hub answers. Raises JobError: 78 it says no, 75 it could not be reached."""
    import httpx
    from huggingface_hub import constants, errors

    end, pause = time.monotonic() + PATIENCE_S, 1.0
    while True:
        try:
            return ask()
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
            hint = "check id and revision; a gated model needs HF_TOKEN, from the Secret of --s3-secret"
            raise JobError(Exit.CONFIG, f"target `{target}`: {_words(error)}", hint) from None
        except (httpx.HTTPError, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
            offline = isinstance(error, errors.OfflineModeIsEnabled)
            if offline or time.monotonic() > end:
                words = "HF_HUB_OFFLINE is set" if offline else _words(error)
                what = f"target `{target}`: no hub can be reached at {constants.ENDPOINT}: {words}"
                raise JobError(Exit.RETRY, what, ELSEWHERE) from None
            note(tell, f"the hub does not answer, it is asked again: {_words(error)}")
            time.sleep(min(pause, max(0.1, end - time.monotonic())))
            pause = min(2 * pause, 20.0)


def _final(error: JobError) -> JobError:
    """A hub that never answered is what every pod would meet."""
    return JobError(Exit.CONFIG, error.message, error.hint)


@contextlib.contextmanager
def _said(tell: Tell, blobs: Path, total: int) -> Iterator[None]:
    """A progress line every few seconds, read from the files as they grow."""
    over = threading.Event()

    def held() -> int:
        found = 0
        for path in blobs.glob("*"):
            with contextlib.suppress(OSError):
                found += path.stat().st_size
        return found

    def run() -> None:
        before, begin = held(), time.monotonic()
        while not over.wait(SAID_S):
            done = held() - before
            rate = round(done / max(1e-3, time.monotonic() - begin))
            tell({"event": "fetch", "file": "", "bytes": done, "total_bytes": total, "bytes_per_s": rate})

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _words(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
