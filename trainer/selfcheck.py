"""Proof that an export, read by a fresh process, is the drafter in memory: taps, mask token, rotary, logits.

Good training figures and an acceptance near 1 when served have one cause: what was written is not what was trained (a
shifted tap list, another mask token, a rotary base that a reader does not find). So before an export is put in place a
new interpreter reads its files alone, and must draft what this process drafts with the same bfloat16 weights. Rotary is
built there by transformers from config.json, as inference engines do it, not by our own reading.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenizer.job import Exit, JobError
from trainer.config import DrafterConfig
from trainer.drafter import Drafter, rotary
from trainer.export import CONFIG, load_drafter, with_tensors

CONTEXT, VOCABULARY = 24, 128  # size of the made-up problem
TOLERANCE = 1e-4  # of logits, relative to their largest: both processes compute in float32
MEANING = ("target_layer_ids", "mask_token_id", "block_size", "layer_types", "sliding_window", "rope_theta")


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
def _logits(drafter: Drafter, problem: Mapping[str, Tensor]) -> Tensor:
    anchor = torch.tensor([[CONTEXT]])
    hidden = drafter(problem["noise"], drafter.context(problem["states"]), anchor)
    return drafter.logits(hidden, problem["head"])


def record(tensors: Mapping[str, Tensor], config: DrafterConfig, reference: Path) -> None:
    """Write what the drafter of these bfloat16 tensors means and computes, for `compare`."""
    drafter = with_tensors(config, {name: tensor.float() for name, tensor in tensors.items()})
    problem = _problem(config)
    cos, sin = rotary(problem["positions"], config, torch.float32)
    known = problem | {"logits": _logits(drafter.eval(), problem), "cos": cos[0], "sin": sin[0]}
    meaning = {name: getattr(config, name) for name in MEANING}
    save_file(known, reference, metadata={"config": json.dumps(meaning)})


def self_check(tensors: Mapping[str, Tensor], config: DrafterConfig, export: Path) -> None:
    """Compare z-lab directory `export` with the drafter of these bfloat16 tensors. JobError(70) says what differs."""
    package = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.safetensors"
        record(tensors, config, reference)
        child = subprocess.run(
            [sys.executable, "-P", "-m", "trainer", "selfcheck", str(export), str(reference)],
            env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit {child.returncode} without a word"]
        why = lines[0].removeprefix("error: ")
        raise JobError(Exit.SELF_CHECK, f"self-check of the export: {why}", "the files do not hold the drafter")


def compare(export: Path, reference: Path) -> None:
    """What the fresh process does. Raises JobError(70) with the first difference."""
    from safetensors import safe_open
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    with safe_open(reference, "pt") as file:
        meaning = json.loads(file.metadata()["config"])
    known = load_file(reference)
    drafter = load_drafter(export).eval()
    for name, trained in meaning.items():
        written = getattr(drafter.config, name)
        written = list(written) if isinstance(written, tuple) else written
        if written != trained:
            raise JobError(Exit.SELF_CHECK, f"{name} is {written} in {CONFIG}, {trained} in the drafter")
    turn = Qwen3RotaryEmbedding(Qwen3Config.from_json_file(export / CONFIG))
    cos, sin = turn(known["noise"], known["positions"][None])
    for name, found in {"cos": cos[0], "sin": sin[0], "logits": _logits(drafter, known)}.items():
        wanted = known[name]
        if found.shape != wanted.shape:
            raise JobError(Exit.SELF_CHECK, f"{name}: shape {tuple(found.shape)} is not {tuple(wanted.shape)}")
        error = float((found - wanted).abs().max() / wanted.abs().max())
        if not error <= TOLERANCE:
            raise JobError(Exit.SELF_CHECK, f"{name} differ by {error:.1e} of their largest")
