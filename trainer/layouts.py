"""The two layouts of a drafter on disk, as plain data: what config.json says, and which tensors there are.

z-lab's layout is `DrafterConfig.to_dict`. speculators' has the same tensors and another config, whose
`aux_hidden_state_layer_ids` count from 1: the *input* of the next layer is what z-lab calls a layer's output. Engines
ignore keys that they do not know, and a misnamed tensor becomes random weights, so names, shapes and values are checked
on both ways, and `engine_places` lists every place that some engine reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenizer.job import Exit, JobError
from trainer.config import COUNTS, FULL, SLIDING, DrafterConfig

ZLAB, SPECULATORS = "z-lab", "speculators"
ARCHITECTURES = ["DFlashDraftModel"]
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


def plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without the prefix of `torch.compile`, which no engine would find."""
    return {name.removeprefix("_orig_mod."): tensor for name, tensor in tensors.items()}


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
        "architectures": ARCHITECTURES,
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


def read_layout(data: Mapping[str, Any], layout: str, num_target_layers: int) -> DrafterConfig:
    """The drafter that a config.json of either layout describes, as it would be served.

    num_target_layers: for speculators' layout, which leaves the target's depth to the target. Raises JobError(78)
    naming the field where the file is not of this layout or describes no drafter of this kind.
    """
    if layout == ZLAB:
        return DrafterConfig.from_dict(data)
    layer, taps = data.get("transformer_layer_config"), data.get("aux_hidden_state_layer_ids")
    if not isinstance(layer, dict):
        raise JobError(Exit.CONFIG, f"transformer_layer_config: {layer!r} is no config of layers")
    if not isinstance(taps, list) or not all(type(tap) is int for tap in taps):
        raise JobError(Exit.CONFIG, f"aux_hidden_state_layer_ids: {taps!r} are no layers")
    for name, wanted in (
        ("speculators_model_type", "dflash"),
        ("sample_from_anchor", False),  # else slot 0 is drafted too
        ("draft_vocab_size", layer.get("vocab_size")),  # else d2t and t2d translate a reduced vocabulary
    ):
        if data.get(name) != wanted:
            raise JobError(Exit.CONFIG, f"{name}: {data.get(name)!r}, where only {wanted!r} can be read")
    own = {
        "block_size": data.get("block_size"),
        "mask_token_id": data.get("mask_token_id"),
        "target_layer_ids": [tap - 1 for tap in taps],
    }
    causal = False if data.get("sliding_window_non_causal") else None
    whole = layer | {"dflash_config": own, "num_target_layers": num_target_layers, "is_causal": causal}
    return DrafterConfig.from_dict(whole)


def engine_places(config: DrafterConfig, layout: str, verifier: str = "") -> dict[str, Any]:
    """Dotted place in config.json -> what must stand there, None for nothing, for every place that some engine reads.

    Where engines look in different places for one thing, all of them are listed.
    """
    sliding = SLIDING in config.layer_types
    layer = {name: getattr(config, name) for name in COUNTS if name != "num_target_layers"} | {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rms_norm_eps": config.rms_norm_eps,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": sliding,  # transformers forgets the window without it
        "rope_theta": config.rope_theta,  # of transformers 4 and the engines of its time
        "rope_parameters.rope_theta": config.rope_theta,
        "rope_parameters.rope_type": "default",
        "rope_parameters.partial_rotary_factor": None,
        "partial_rotary_factor": None,
        "rope_scaling": None,
    }
    if layout == ZLAB:
        return layer | {
            "architectures": ARCHITECTURES,
            "num_target_layers": config.num_target_layers,
            "block_size": config.block_size,
            "dflash_config.block_size": config.block_size,
            "dflash_config.mask_token_id": config.mask_token_id,
            "dflash_config.target_layer_ids": list(config.target_layer_ids),
            "is_causal": config.is_causal,
            "eagle_aux_hidden_state_layer_ids": None,  # vLLM would take it as it stands, counting from 1
        }
    proposal = "speculators_config.proposal_methods.0"
    return {f"transformer_layer_config.{place}": value for place, value in layer.items()} | {
        "architectures": ARCHITECTURES,
        "speculators_model_type": "dflash",
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "draft_vocab_size": config.vocab_size,
        "sample_from_anchor": False,
        "sliding_window_non_causal": config.is_causal is False,
        "speculators_config.algorithm": "dflash",
        "speculators_config.default_proposal_method": "greedy",
        f"{proposal}.proposal_type": "greedy",
        f"{proposal}.speculative_tokens": config.block_size - 1,
        "speculators_config.verifier.name_or_path": verifier,
    }
