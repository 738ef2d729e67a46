"""Tiny random targets of each family that the tests need, float32, and drafters for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from trainer.blocks import plain_greedy
from trainer.config import DrafterConfig
from trainer.drafter import Drafter
from trainer.loss import Objective, block_loss, default_gamma, sample_anchors
from trainer.target import Target

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large enough for greedy choices that are no near-ties
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HYBRID: dict[str, Any] = SHAPE | {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
    },
}


def seeded(build: Callable[[], Any]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().float().eval()


def qwen3() -> Any:
    return seeded(lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE)))


def llama() -> Any:
    return seeded(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)))


def qwen35() -> Any:
    """Hybrid: GatedDeltaNet layers, whose state cannot be rolled back, and gated full attention."""
    return seeded(lambda: hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**HYBRID)))


def nested_qwen35() -> Any:
    """The same language model inside a vision-language one, as Qwen3.5 and 3.6 are published."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = hf.Qwen3_5Config(text_config=HYBRID, vision_config=vision, tie_word_embeddings=False)
    return seeded(lambda: hf.Qwen3_5ForConditionalGeneration(config))


def saved(build: Callable[[], Any], folder: Path) -> Path:
    """The model of `build` as a transformers directory under `folder`."""
    path = folder / "target"
    build().save_pretrained(path)
    return path


def drafter(**overrides: Any) -> Drafter:
    """A random drafter for the targets above: 2 layers, the first sliding, taps 1, 3 and 4."""
    values: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 96,
        "num_target_layers": 6,
        "target_layer_ids": (1, 3, 4),
        "mask_token_id": 95,
        "block_size": 5,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 7,
        "rope_theta": 500000.0,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }
    return Drafter(DrafterConfig(**values | overrides)).init(0).eval()


def taught(target: Target, prompts: list[list[int]], tokens: int, steps: int = 60, **overrides: Any) -> Drafter:
    """A drafter trained for seconds on the target's own replies to `prompts`: right often, wrong often."""
    rows = torch.tensor([prompt + plain_greedy(prompt, target, tokens) for prompt in prompts])
    mask = torch.ones_like(rows)
    mask[:, : len(prompts[0])] = 0
    model = drafter(**overrides).train()
    states, ids = target.states(rows), [str(number) for number in range(len(rows))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for epoch in range(steps):
        anchors, keep = sample_anchors(mask, ids, seed=0, epoch=epoch, count=16)
        loss = block_loss(
            model, states, rows, mask, anchors, keep, target.embed_VH, target.head_VH, Objective(default_gamma(5))
        )
        optimizer.zero_grad()
        (loss.total / loss.divisor).backward()
        optimizer.step()
    return model.eval()
