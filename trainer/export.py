"""Drafters on disk: read them, write them for serving.

Two layouts, both config.json + model.safetensors in bfloat16. z-lab's is read by vLLM, SGLang, SpecForge and z-lab's
own package; it has no embedding and no head, which are the target's. speculators' has the same tensors and another
config, whose `aux_hidden_state_layer_ids` count from 1: the *input* of the next layer is what z-lab calls a layer's
output. Engines ignore keys that they do not know, and a misnamed tensor becomes random weights, so names, shapes and
values are checked on both ways.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenizer.job import Exit, JobError
from trainer.config import FULL, DrafterConfig
from trainer.drafter import Drafter
from trainer.job import FORMATS, ExportArgs
from trainer.target import read_config

CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "provenance.json"
INDEX = "model.safetensors.index.json"  # of a published checkpoint in several files
OURS = frozenset({CONFIG, WEIGHTS, PROVENANCE})  # what an export may replace
SPECULATORS_VERSION = "0.9.0"  # the release whose layout is written
NOT_A_LAYER = frozenset({"architectures", "block_size", "dflash_config", "num_target_layers", "is_causal"})


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each of the 11 * layers + 3 tensors of a checkpoint."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (width,),
        "self_attn.k_norm": (width,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for index in range(config.num_hidden_layers):
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def check_tensors(tensors: Mapping[str, Tensor], config: DrafterConfig, where: str) -> None:
    """Raises JobError(70) naming every missing, unexpected, misshapen, float16 or non-finite tensor."""
    shapes = tensor_shapes(config)
    wrong = [f"missing {name}" for name in shapes if name not in tensors]
    for name, tensor in tensors.items():
        if name not in shapes:
            wrong.append(f"unexpected {name}")
        elif tuple(tensor.shape) != shapes[name]:
            wrong.append(f"{name} is {tuple(tensor.shape)}, not {shapes[name]}")
        elif tensor.dtype == torch.float16:
            wrong.append(f"{name} is float16, which hidden states overflow")
        elif not torch.isfinite(tensor).all():
            wrong.append(f"{name} holds NaN or infinity")
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise JobError(Exit.SELF_CHECK, f"{where}: {'; '.join(wrong[:5])}{more}", "this is not a whole DFlash drafter")


def read_drafter_config(path: Path) -> DrafterConfig:
    """The config.json of a z-lab directory. Raises JobError(78) for what is none."""
    try:
        data = json.loads((path / CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise JobError(Exit.CONFIG, f"checkpoint `{path}`: no readable {CONFIG}", "name a z-lab directory") from error
    if not isinstance(data, dict) or "speculators_model_type" in data:
        raise JobError(Exit.CONFIG, f"checkpoint `{path}` is not in z-lab's layout", "name a z-lab directory")
    return DrafterConfig.from_dict(data)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    index = path / INDEX
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [WEIGHTS]
    try:
        return {name: tensor for file in files for name, tensor in load_file(path / file).items()}
    except (OSError, ValueError) as error:
        raise JobError(Exit.CONFIG, f"checkpoint `{path}`: {error}", "the weights are missing or cut short") from error


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
    tensors = _read_tensors(path)
    check_tensors(tensors, config, str(path))
    return with_tensors(config, tensors).to(device=device, dtype=dtype)


def serving_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The checkpoint's tensors in bfloat16 on the CPU, checked."""
    tensors = {
        name.removeprefix("_orig_mod."): tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    check_tensors(tensors, drafter.config, "the drafter to export")
    return tensors


def speculators_config(config: DrafterConfig, verifier: str, architectures: list[str]) -> dict[str, Any]:
    """config.json of speculators' layout. verifier: where its reader finds the target's embedding and head.

    Raises JobError(78) for a drafter that this layout cannot describe.
    """
    if config.is_causal and FULL in config.layer_types:
        raise JobError(
            Exit.CONFIG, "is_causal: speculators has no causal full-attention layer", "export z-lab's layout"
        )
    if config.input_embedding_scale != 1.0:
        raise JobError(Exit.CONFIG, "input_embedding_scale: speculators has none", "export z-lab's layout")
    layer = {key: value for key, value in config.to_dict().items() if key not in NOT_A_LAYER}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "dtype": "bfloat16",
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.vocab_size,
        "sample_from_anchor": False,
        "sliding_window_non_causal": config.is_causal is False,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
    }


def _write(
    out: Path,
    config: Mapping[str, Any],
    tensors: dict[str, Tensor],
    provenance: Mapping[str, Any] | None,
    check: Callable[[Path], None],
) -> None:
    """Write beside `out`, check there, then put in place: a reader never sees half an export, or a wrong one."""
    if out.exists() and (not out.is_dir() or {entry.name for entry in out.iterdir()} - OURS):
        raise JobError(Exit.CONFIG, f"`{out}` holds other files than an export", "name a new directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        fresh.chmod(0o755)
        save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt"})
        (fresh / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
        if provenance is not None:
            (fresh / PROVENANCE).write_text(json.dumps(provenance, indent=2, sort_keys=True) + "\n", "utf-8")
        for entry in fresh.iterdir():
            with entry.open("rb") as file:
                os.fsync(file.fileno())
        check(fresh)
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
            out.rename(old / "old")
            fresh.rename(out)
            shutil.rmtree(old)
        else:
            fresh.rename(out)
    except OSError as error:
        raise JobError(Exit.DISK_FULL, f"`{out}`: {error.strerror or error}", "free space or name another") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_zlab(drafter: Drafter, out: Path, provenance: Mapping[str, Any] | None = None) -> None:
    """Write z-lab's layout to `out`, replacing an earlier export, after the self-check.

    Raises JobError: 70 the self-check failed, 73 the disk, 78 `out` holds something else.
    """
    from trainer.selfcheck import self_check

    tensors = serving_tensors(drafter)
    config = drafter.config.to_dict() | {"dtype": "bfloat16"}
    _write(out, config, tensors, provenance, lambda fresh: self_check(tensors, drafter.config, fresh))


def write_speculators(drafter: Drafter, out: Path, target: str, provenance: Mapping[str, Any] | None = None) -> None:
    """Write speculators' layout to `out`; `target` is stored as its verifier and must stay resolvable there.

    Raises JobError: 70 the tensors are not whole, 73 the disk, 78 `out` holds something else or no such target.
    """
    config, found = drafter.config, read_config(target)
    depth = int(found.get_text_config(decoder=True).num_hidden_layers)
    if depth != config.num_target_layers:
        raise JobError(
            Exit.CONFIG,
            f"target `{target}` has {depth} layers, the drafter was trained on {config.num_target_layers}",
            "name the target that the drafter was trained on",
        )
    name = str(Path(target).resolve()) if Path(target).exists() else target.partition("@")[0]
    tensors = serving_tensors(drafter)
    written = speculators_config(config, name, list(found.architectures or []))

    def check(fresh: Path) -> None:
        check_tensors(_read_tensors(fresh), config, str(fresh))

    _write(out, written, tensors, provenance, check)


def run(args: ExportArgs) -> None:
    """The verb `export`: a checkpoint to a directory to serve, its provenance carried along."""
    source, out = Path(args.checkpoint), Path(args.out)
    drafter = load_drafter(source)
    story = source / PROVENANCE
    provenance = json.loads(story.read_text("utf-8")) if story.is_file() else None
    if args.format == "z-lab":
        write_zlab(drafter, out, provenance)
    elif args.format != "speculators":
        raise JobError(Exit.USAGE, f"format `{args.format}` is none of {', '.join(FORMATS)}")
    elif not args.target:
        raise JobError(Exit.USAGE, "the speculators layout stores its target", "give --target")
    else:
        write_speculators(drafter, out, args.target, provenance)
