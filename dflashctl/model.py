"""The three tokenizer files of `--model`: from a directory, an s3:// prefix or a hub id.

They are read once, here, and uploaded to OUT/tokenizer/: pods read only that copy, so a laptop's directory works and
64 pods do not hit a hub. A hub id is looked up in the local hub cache first; the network is asked only through
`huggingface_hub`, where that is installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashctl.errors import ApiError, PreflightError
from tokenizer.job import CONTRACT, TOKENIZER_FILES
from tokenizer.store import NotFound, Options, StoreError, open_store

TEMPLATE, TOKENIZER, CONFIG = TOKENIZER_FILES
CHECK_NEEDS = ("numpy", "orjson", "jinja2", "tokenizers")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")
_NAMED = "additional_chat_templates"
_SOURCES = (TOKENIZER, CONFIG, TEMPLATE, "chat_template.json")


@dataclass(frozen=True, slots=True)
class Model:
    """The resolved files by name, and the model's name with the revision where one is known (`org/name@sha`)."""

    name: str
    files: Mapping[str, bytes]

    def digests(self) -> dict[str, str]:
        """sha256 (hex) of each file, as the plan pins them."""
        return {name: hashlib.sha256(data).hexdigest() for name, data in sorted(self.files.items())}


def resolve_model(model: str, options: Options | None = None) -> Model:
    """Read the files of `model`; raises PreflightError with one clear line when they cannot be had."""
    if model.startswith(("s3://", "file:")):
        return Model(model, _files(model, _reader(model, options)))
    if os.path.isdir(os.path.expanduser(model)):
        return Model(model, _files(model, _reader(model, options)))
    if model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model):
        raise PreflightError(f"model `{model}` is not there", "name a directory, an s3:// prefix or a hub id")
    repo, _, revision = model.partition("@")
    snapshot = cached_snapshot(repo, revision or "main") or _download(repo, revision or "main")
    return Model(f"{repo}@{snapshot.name}", _files(model, _reader(str(snapshot), options)))


def _reader(root: str, options: Options | None) -> Callable[[str], bytes | None]:
    try:
        store = open_store(root, options)
    except ValueError as error:
        raise PreflightError(f"model {error}") from None

    def read(name: str) -> bytes | None:
        try:
            return store.get_bytes(name)
        except NotFound:
            return None
        except StoreError as error:
            raise PreflightError(f"model `{root}` cannot be read: {error.message}", error.hint) from None

    return read


def _files(model: str, read: Callable[[str], bytes | None]) -> dict[str, bytes]:
    tokenizer, config = read(TOKENIZER), read(CONFIG)
    if tokenizer is None:
        raise PreflightError(
            f"model `{model}` has no {TOKENIZER}",
            "load it with AutoTokenizer of transformers and call save_pretrained: that writes one",
        )
    if config is None:
        raise PreflightError(f"model `{model}` has no {CONFIG}", "it belongs beside tokenizer.json in every release")
    _object(model, TOKENIZER, tokenizer)
    template = _template(model, read, _json(model, CONFIG, config))
    return {TEMPLATE: template.encode(), TOKENIZER: tokenizer, CONFIG: config}


def check_model(model: Model, kwargs: Mapping[str, Any]) -> str:
    """Raises PreflightError for files that no row could be made with; returns a warning, or nothing.

    kwargs: the run's template arguments. The tokenizer's own code looks, in a child; where its packages are not
    installed, on a machine that only submits, the pods find out.
    """
    if any(importlib.util.find_spec(name) is None for name in CHECK_NEEDS):
        _json(model.name, TOKENIZER, model.files[TOKENIZER])
        return ""
    with tempfile.TemporaryDirectory(prefix="dflash-model-") as folder:
        for name, data in model.files.items():
            (Path(folder) / name).write_bytes(data)
        arguments = ["--contract", str(CONTRACT), "--tokenizer", folder, "--template-kwargs", json.dumps(dict(kwargs))]
        # -P: a tokenizer.py in the user's directory must not be what runs
        command = [sys.executable, "-P", "-m", "tokenizer", "check", *arguments]
        child = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    said = child.stderr.replace(folder + os.sep, "").strip().splitlines()
    if child.returncode:
        error = next((line.removeprefix("error: ") for line in said if line.startswith("error: ")), "")
        hint = next((line.removeprefix("hint: ") for line in said if line.startswith("hint: ")), "")
        if not error:
            raise ApiError(f"model `{model.name}` could not be checked: {said[-1] if said else 'no word'}")
        raise PreflightError(f"model `{model.name}`: {error}", hint)
    return next((line.removeprefix("warning: ") for line in said), "")


def _object(model: str, name: str, data: bytes) -> None:
    """What can be seen of a JSON object at its first bytes."""
    if data.startswith(b"version https://git-lfs"):
        raise PreflightError(
            f"{name} of model `{model}` is a Git LFS pointer", "fetch the file itself with `git lfs pull`"
        )
    if data[:64].lstrip()[:1] != b"{":
        raise PreflightError(f"{name} of model `{model}` is not a JSON object")


def _json(model: str, name: str, data: bytes) -> dict[str, Any]:
    _object(model, name, data)
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise PreflightError(f"{name} of model `{model}` is not a JSON object")
    return value


def _template(model: str, read: Callable[[str], bytes | None], config: Mapping[str, Any]) -> str:
    """The chat template: a file of its own wins over the one in tokenizer_config.json, as in transformers."""
    if (data := read(TEMPLATE)) is not None:
        return _text(model, data)
    stored = config.get("chat_template")
    if not stored and (data := read("chat_template.json")) is not None:
        stored = _json(model, "chat_template.json", data).get("chat_template")
    if not stored and (data := read(f"{_NAMED}/default.jinja")) is not None:
        stored = _text(model, data)
    if isinstance(stored, list):
        named = {str(entry.get("name")): entry.get("template") for entry in stored if isinstance(entry, dict)}
        stored = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
        if not isinstance(stored, str):
            raise PreflightError(
                f"model `{model}` has the templates {', '.join(sorted(named))} and none named default",
                f"copy the directory and save the wanted one as {TEMPLATE}",
            )
    if not isinstance(stored, str) or not stored:
        raise PreflightError(
            f"model `{model}` has no chat template", f"save the one it is served with as {TEMPLATE} beside it"
        )
    return stored


def _text(model: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise PreflightError(f"{TEMPLATE} of model `{model}` is not UTF-8") from None


def cached_snapshot(repo: str, revision: str) -> Path | None:
    """The directory of that revision in the local hub cache, if it is there; asks no network."""
    home = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface"), "hub"
    )
    folder = Path(home) / f"models--{repo.replace('/', '--')}"
    named = folder / "refs" / revision
    commit = named.read_text().strip() if named.is_file() else revision
    snapshot = folder / "snapshots" / commit
    return snapshot if (snapshot / TOKENIZER).is_file() else None


def _download(repo: str, revision: str) -> Path:
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    if offline:
        raise PreflightError(
            f"model `{repo}` is neither a directory here nor in the local hub cache, and HF_HUB_OFFLINE is set",
            "name a directory with its tokenizer files, or unset HF_HUB_OFFLINE",
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise PreflightError(
            f"model `{repo}` is neither a directory here nor in the local hub cache",
            "name a directory with its tokenizer files, or install huggingface_hub to fetch them",
        ) from None
    try:
        found = snapshot_download(repo, revision=revision, allow_patterns=[*_SOURCES, f"{_NAMED}/*"])
    except Exception as error:  # of many kinds: HTTP, DNS, TLS, gated, disk; each is one reason that it cannot be had
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise PreflightError(
            f"model `{repo}` cannot be fetched from its hub: {reason}",
            "check the id, the network and the token, or name a directory with its tokenizer files",
        ) from None
    return Path(found)
