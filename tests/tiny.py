"""Tiny random drafters and batches, with weights far from their initial values so that nothing is near zero."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.config import FULL, SLIDING, DrafterConfig
from trainer.drafter import Drafter
from trainer.loss import sample_anchors

torch.set_num_threads(1)

VOCAB, MASK_ID = 97, 96


def peer(module: str) -> Any:
    """A module of another project; without it the test is skipped by name, or fails under DFLASH_REQUIRE=peers."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if "peers" in os.environ.get("DFLASH_REQUIRE", "").split(","):
            raise
        pytest.skip(f"{module}: {error}; benchmarks/peers.sh installs it")


def config(**changes: Any) -> DrafterConfig:
    """3 layers: sliding, full, sliding; a window of 11 keys, shorter than the rows; blocks of 6."""
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "num_target_layers": 8,
        "target_layer_ids": (1, 3, 5),
        "mask_token_id": MASK_ID,
        "block_size": 6,
        "layer_types": (SLIDING, FULL, SLIDING),
        "sliding_window": 11,
        "dtype": "float32",
    }
    return DrafterConfig(**shape | changes)


def drafter(c: DrafterConfig | None = None, dtype: torch.dtype = torch.float32, seed: int = 0) -> Drafter:
    model = Drafter(c or config()).init(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            else:
                parameter *= 8
    return model.to(dtype)


@dataclass
class Batch:
    """Two right-padded rows, the second shorter and with fewer anchors than asked for."""

    ids: Tensor  # [B, S]
    mask: Tensor  # [B, S]
    taps: Tensor  # [B, S, K * H]
    anchors: Tensor
    keep: Tensor
    embed: Tensor  # [V, H]
    head: Tensor  # [V, H]


def batch(c: DrafterConfig, dtype: torch.dtype = torch.float32, count: int = 11, seed: int = 3) -> Batch:
    g = torch.Generator().manual_seed(seed)
    rows, length = 2, 60
    ids = torch.randint(0, MASK_ID, (rows, length), generator=g)
    mask = torch.zeros(rows, length, dtype=torch.int8)
    mask[0, 14:55] = 1
    mask[1, 30:38] = 1  # ends where the row does: tokens behind are padding
    ids[1, 38:] = 0
    taps = torch.randn(rows, length, len(c.target_layer_ids) * c.hidden_size, generator=g, dtype=torch.float64)
    embed, head = torch.randn(2, c.vocab_size, c.hidden_size, generator=g, dtype=torch.float64) / 3
    anchors, keep = sample_anchors(mask, ["a:1#0", "a:2#0"], seed=5, epoch=0, count=count)
    return Batch(ids, mask, taps.to(dtype), anchors, keep, embed.to(dtype), head.to(dtype))
