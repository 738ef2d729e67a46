"""Drafters on disk: read them, write them for serving.

Both layouts are config.json + model.safetensors in bfloat16. z-lab's is read by vLLM, SGLang, SpecForge and z-lab's own
package; it has no embedding and no head, which are the target's. speculators' names the target that its reader takes
them from. What the files say is `layouts`; here they are read, and put in place only whole and checked.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenizer.job import Exit, JobError
from trainer.config import DrafterConfig
from trainer.drafter import Drafter
from trainer.job import FORMATS, ExportArgs
from trainer.layouts import SPECULATORS, ZLAB, check_tensors, plain_names, speculators_config
from trainer.target import read_config, resolve

CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "provenance.json"
INDEX = "model.safetensors.index.json"  # of a published checkpoint in several files
OURS = frozenset({CONFIG, WEIGHTS, PROVENANCE})  # what an export may replace
ZLAB_HINT = "name a z-lab directory: OUT/export or OUT/checkpoints/step-* of a training"


def read_config_json(path: Path) -> dict[str, Any]:
    """config.json of a checkpoint's directory. Raises JobError(78) where there is none."""
    try:
        data = json.loads((path / CONFIG).read_text("utf-8"))
    except OSError as error:
        why = error.strerror or str(error)
    except ValueError as error:
        why = f"not JSON: {error}"
    else:
        if isinstance(data, dict):
            return data
        why = "not a JSON object"
    raise JobError(Exit.CONFIG, f"checkpoint `{path}`: no readable {CONFIG}: {why}", ZLAB_HINT)


def read_drafter_config(path: Path) -> DrafterConfig:
    """The config.json of a z-lab directory. Raises JobError(78) for what is none."""
    data = read_config_json(path)
    if "speculators_model_type" in data:
        raise JobError(Exit.CONFIG, f"checkpoint `{path}` is not in z-lab's layout", ZLAB_HINT)
    try:
        return DrafterConfig.from_dict(data)
    except JobError as error:
        raise JobError(error.code, f"{error.message} (`{path / CONFIG}`)", error.hint) from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint in one file, or several with an index. Raises JobError(78) where one is not whole."""
    found: dict[str, Tensor] = {}
    for name in _weight_files(path):
        try:
            found |= load_file(path / name)
        except (OSError, SafetensorError) as error:
            why = "is missing" if not (path / name).exists() else f"cannot be read: {error}"
            hint = "the checkpoint is only half there: write it again"
            raise JobError(Exit.CONFIG, f"checkpoint `{path}`: {name} {why}", hint) from error
    return found


def _weight_files(path: Path) -> list[str]:
    index = path / INDEX
    if not index.is_file():
        return [WEIGHTS]
    try:
        return sorted({str(name) for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JobError(Exit.CONFIG, f"checkpoint `{path}`: {INDEX} is no index of weights", "write it again") from error


def with_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> Drafter:
    """A drafter that takes over these tensors: no time is spent on drawing weights, no memory on a second copy."""
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict(tensors, strict=True, assign=True)
    return drafter


def load_drafter(path: Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Drafter:
    """A drafter from a z-lab directory, ours or published: for evaluation, export and `--init-from`.

    Raises JobError: 78 unreadable or impossible config, 70 tensors that do not fit it.
    """
    config = read_drafter_config(path)
    tensors = read_tensors(path)
    check_tensors(tensors, config, str(path))
    return with_tensors(config, tensors).to(device=device, dtype=dtype)


def serving_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The checkpoint's tensors in bfloat16 on the CPU, checked."""
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in plain_names(drafter.state_dict()).items()
    }
    check_tensors(tensors, drafter.config, "the drafter to export")
    return tensors


def _write(
    out: Path,
    config: Mapping[str, Any],
    drafter: Drafter,
    provenance: Mapping[str, Any] | None,
    layout: str,
    verifier: str = "",
) -> None:
    """Write beside `out`, check there, then put in place: a reader never sees half an export, or a wrong one."""
    from trainer.selfcheck import self_check

    if out.exists() and (not out.is_dir() or {entry.name for entry in out.iterdir()} - OURS):
        raise JobError(Exit.CONFIG, f"`{out}` holds other files than an export", "name a new directory")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise JobError(
            Exit.CONFIG, f"`{out}` cannot be made in `{out.parent}`: {error.strerror}", "name another directory"
        ) from error
    try:
        fresh.chmod(0o755)
        save_file(serving_tensors(drafter), fresh / WEIGHTS, metadata={"format": "pt"})
        (fresh / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
        if provenance is not None:
            (fresh / PROVENANCE).write_text(json.dumps(provenance, indent=2, sort_keys=True) + "\n", "utf-8")
        for entry in fresh.iterdir():
            entry.chmod(0o644)  # safetensors makes files that no other user may serve
            with entry.open("rb") as file:
                os.fsync(file.fileno())
        self_check(drafter, fresh, layout, verifier)
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
            out.rename(old / "old")
            fresh.rename(out)
            shutil.rmtree(old)
        else:
            fresh.rename(out)
    except (OSError, SafetensorError) as error:  # the latter where the weights do not fit
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise JobError(Exit.DISK_FULL, f"`{out}`: {why}", "free space or name another") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_zlab(drafter: Drafter, out: Path, provenance: Mapping[str, Any] | None = None) -> None:
    """Write z-lab's layout to `out`, replacing an earlier export, after the self-check.

    Raises JobError: 70 the self-check failed, 73 the disk, 78 `out` holds something else.
    """
    config = replace(drafter.config, dtype="bfloat16").to_dict()
    _write(out, config, drafter, provenance, ZLAB)


def write_speculators(
    drafter: Drafter, out: Path, target: str, provenance: Mapping[str, Any] | None = None, known_as: str = ""
) -> None:
    """Write speculators' layout to `out`, after the self-check; `target` is stored as its verifier and must stay there.

    known_as: where `target` was fetched from, an s3:// prefix or a hub id, which is stored instead.
    Raises JobError: 70 the self-check failed, 73 the disk, 78 `out` holds something else, or no such target.
    """
    config, found = replace(drafter.config, dtype="bfloat16"), read_config(target)
    if "gguf_file" in resolve(target)[1]:
        raise JobError(
            Exit.CONFIG,
            f"target `{target}` is a GGUF file, which speculators cannot take embedding and head from",
            "name the target's safetensors directory, or export z-lab's layout",
        )
    depth = getattr(found.get_text_config(decoder=True), "num_hidden_layers", None)
    if depth != config.num_target_layers:
        raise JobError(
            Exit.CONFIG,
            f"target `{target}` has {depth} layers, the drafter was trained on {config.num_target_layers}",
            "name the target that the drafter was trained on",
        )
    name = known_as or (str(Path(target).resolve()) if Path(target).exists() else target.partition("@")[0])
    written = speculators_config(config, name, list(found.architectures or []))
    _write(out, written, drafter, provenance, SPECULATORS, name)


def _story(path: Path) -> dict[str, Any] | None:
    """A checkpoint's provenance, where it has one."""
    try:
        return dict(json.loads(path.read_text("utf-8"))) if path.is_file() else None
    except (OSError, ValueError, TypeError) as error:
        raise JobError(Exit.CONFIG, f"`{path}` cannot be read: {error}", "restore it, or remove it") from error


def run(args: ExportArgs) -> None:
    """The verb `export`: a checkpoint to a directory to serve, its provenance carried along."""
    source, out = Path(args.checkpoint), Path(args.out)
    replaces = out.is_dir() and any(out.iterdir())
    drafter = load_drafter(source)
    provenance = _story(source / PROVENANCE)
    if args.format == ZLAB:
        write_zlab(drafter, out, provenance)
    elif args.format != SPECULATORS:
        raise JobError(Exit.USAGE, f"format `{args.format}` is none of {', '.join(FORMATS)}")
    elif not args.target:
        raise JobError(Exit.USAGE, "the speculators layout stores its target", "give --target")
    else:
        write_speculators(drafter, out, args.target, provenance)
    print(f"replaced the export in `{out}`" if replaces else f"wrote `{out}`", file=sys.stderr)
