"""Proof that an export, read by a fresh process, is the drafter in memory: taps, mask token, rotary, logits.

Good training figures and an acceptance near 1 when served have one cause: what was written is not what was trained (a
shifted tap list, another mask token, a rotary base that a reader does not find). So before an export is put in place a
new interpreter reads its files alone, three ways:

- every place of config.json that some engine reads, and not only those that our own reader prefers, holds what the
  drafter means;
- transformers makes of it, as engines do, the drafter's shape, window and rotary;
- every tensor is the drafter's, rounded to bfloat16, bit for bit, and with our reader of the layout they draft what the
  drafter in memory drafts once rounded, which in turn stays near what it drafts unrounded.

Either layout is checked so, with neither z-lab's package nor speculators installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenizer.job import Exit, JobError
from trainer.config import SLIDING, DrafterConfig
from trainer.drafter import Drafter, rotary
from trainer.export import CONFIG, read_config_json, read_tensors, with_tensors
from trainer.layouts import ZLAB, check_tensors, engine_places, plain_names, read_layout

CONTEXT, VOCABULARY = 24, 128  # size of the made-up problem
TOLERANCE = 1e-4  # of logits, relative to their largest: both processes compute in float32
ROUNDING = 0.1  # of logits, likewise: what bfloat16 may cost; 0.01 is usual


def _problem(config: DrafterConfig) -> dict[str, Tensor]:
    """Random tap states [1, C, K * H], block embeddings [1, B, H] and head [V, H]; positions reach far out."""
    generator = torch.Generator().manual_seed(0)
    width = len(config.target_layer_ids) * config.hidden_size

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    far = [0, 1, 100, config.max_position_embeddings - 1]
    return {
        "states": draw(1, CONTEXT, width),
        "noise": draw(1, config.block_size, config.hidden_size),
        "head": draw(VOCABULARY, config.hidden_size),
        "positions": torch.tensor(far),
    }


@torch.no_grad()
def _logits(tensors: Mapping[str, Tensor], config: DrafterConfig, problem: Mapping[str, Tensor]) -> Tensor:
    """What a drafter of these tensors drafts, computed in float32 on the CPU."""
    drafter = with_tensors(config, {name: tensor.to("cpu", torch.float32) for name, tensor in tensors.items()}).eval()
    hidden = drafter(problem["noise"], drafter.context(problem["states"]), torch.tensor([[CONTEXT]]))
    return drafter.logits(hidden, problem["head"])


def _difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def _digest(tensor: Tensor) -> str:
    """Of its dtype and bytes."""
    data = tensor.contiguous().view(torch.uint8).numpy().data
    return f"{tensor.dtype} {hashlib.sha256(data).hexdigest()}"


def record(drafter: Drafter, reference: Path, layout: str = ZLAB, verifier: str = "") -> None:
    """Write what the live drafter means and computes, for `compare`.

    Raises JobError(70) where bfloat16 is too coarse for its weights.
    """
    config, problem = drafter.config, _problem(drafter.config)
    live = plain_names(drafter.state_dict())
    rounded = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in live.items()}
    logits = _logits(rounded, config, problem)
    if any(tensor.dtype != torch.bfloat16 for tensor in live.values()):
        lost = _difference(logits, _logits(live, config, problem))
        if not lost <= ROUNDING:
            raise JobError(
                Exit.SELF_CHECK,
                f"self-check of the export: bfloat16 changes the logits by {lost:.1e} of their largest",
                "its weights do not survive the rounding that every engine serves with",
            )
    cos, sin = rotary(problem["positions"], config, torch.float32)
    digests = {name: _digest(tensor) for name, tensor in rounded.items()}
    meaning = {"config": asdict(config), "layout": layout, "verifier": verifier, "digests": digests}
    known = problem | {"logits": logits, "cos": cos[0], "sin": sin[0]}
    save_file(known, reference, metadata={"meaning": json.dumps(meaning)})


def self_check(drafter: Drafter, export: Path, layout: str = ZLAB, verifier: str = "") -> None:
    """Compare directory `export` with the live drafter. JobError(70) says what differs.

    layout: one of FORMATS. verifier: the target that speculators' layout must name.
    """
    package = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.safetensors"
        record(drafter, reference, layout, verifier)
        child = subprocess.run(
            [sys.executable, "-P", "-m", "trainer", "selfcheck", str(export), str(reference)],
            env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit {child.returncode} without a word"]
        why = next((line for line in lines if line.startswith("error: ")), lines[-1]).removeprefix("error: ")
        raise JobError(Exit.SELF_CHECK, f"self-check of the export: {why}", "the files do not hold the drafter")


def compare(export: Path, reference: Path) -> None:
    """What the fresh process does. Raises JobError(70) with the first difference."""
    from safetensors import safe_open

    with safe_open(reference, "pt") as file:
        meaning = json.loads(file.metadata()["meaning"])
    live = DrafterConfig.build(meaning["config"])
    layout, known = meaning["layout"], load_file(reference)
    try:
        data = read_config_json(export)
        for place, wanted in engine_places(live, layout, meaning["verifier"]).items():
            _same(place, _dig(data, place), wanted)
        served = read_layout(data, layout, live.num_target_layers)
        for name, wanted in _meant(live).items():
            _same(name, _meant(served)[name], wanted)
        _check_transformers(data if layout == ZLAB else data["transformer_layer_config"], live, known)
        tensors = read_tensors(export)
        check_tensors(tensors, served, str(export))
        for name, tensor in tensors.items():
            if _digest(tensor) != meaning["digests"][name]:
                raise JobError(Exit.SELF_CHECK, f"{name} in the file is not the drafter's in bfloat16")
    except JobError as error:
        raise JobError(Exit.SELF_CHECK, error.message, error.hint) from error
    _near("logits", _logits(tensors, served, known), known["logits"])


def _meant(config: DrafterConfig) -> dict[str, Any]:
    """A drafter's fields without what may be said in two ways, and its dtype, which is bfloat16 in files."""
    values = asdict(config) | {"is_causal": [config.causal(i) for i in range(config.num_hidden_layers)]}
    del values["dtype"]
    return values


def _check_transformers(layer: Mapping[str, Any], live: DrafterConfig, known: Mapping[str, Tensor]) -> None:
    """What inference engines start from: transformers' reading of the layers' config, and its rotary."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    read = Qwen3Config(**layer)
    for entry in fields(live):
        if hasattr(read, entry.name) and entry.name not in ("dtype", "is_causal", "sliding_window"):
            _same(f"transformers' {entry.name}", getattr(read, entry.name), getattr(live, entry.name))
    if SLIDING in live.layer_types:
        _same("transformers' sliding_window", read.sliding_window, live.sliding_window)
    cos, sin = Qwen3RotaryEmbedding(read)(known["noise"], known["positions"][None])
    _near("cos", cos[0], known["cos"])
    _near("sin", sin[0], known["sin"])


def _dig(data: Any, place: str) -> Any:
    """The value at a dotted place, a number standing for an index; None where there is none."""
    for key in place.split("."):
        if isinstance(data, list) and key.isdigit():
            data = data[int(key)] if int(key) < len(data) else None
        else:
            data = data.get(key) if isinstance(data, dict) else None
    return data


def _same(place: str, found: Any, wanted: Any) -> None:
    plain_found, plain_wanted = (list(v) if isinstance(v, tuple) else v for v in (found, wanted))
    if plain_found != plain_wanted:
        raise JobError(Exit.SELF_CHECK, f"{place} is {plain_found} in {CONFIG}, {plain_wanted} in the drafter")


def _near(name: str, found: Tensor, wanted: Tensor) -> None:
    if found.shape != wanted.shape:
        raise JobError(Exit.SELF_CHECK, f"{name}: shape {tuple(found.shape)} is not {tuple(wanted.shape)}")
    error = _difference(found, wanted)
    if not error <= TOLERANCE:
        raise JobError(Exit.SELF_CHECK, f"{name} differ by {error:.1e} of their largest")
