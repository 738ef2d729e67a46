"""Who may see what in a drafting step, defined once, and the two kernels that compute it.

Queries are the A blocks of a row, one block an anchor. Keys are the row's context, then the same blocks again:
`[context 0..C) | block tokens 0..A*block)`. A query sees the context strictly before its anchor (the anchor's own
target state does not exist when served) and its own block; in a sliding layer also only keys closer than the window,
counted from the query itself, and in a causal layer only earlier slots. Padding needs no rule: it lies behind every
anchor, and a padded block stands at anchor 0, where it sees itself alone.

`visibility` is that rule. On a GPU it feeds block-sparse FlexAttention; elsewhere, where FlexAttention has no backward,
dense SDPA runs on small groups of neighbouring blocks and reads the context no further than the group's last anchor.

Shapes: B rows, A anchors a row, T = A * block_size block tokens, C context positions, N heads, M key-value heads,
D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

TILE = 128  # FlexAttention's sparse block, in queries and in keys
CONTEXT_STEP = (
    1024  # context keys are padded to a multiple of this: few shapes to compile, and masked tiles cost nothing
)
GROUP = 8  # blocks that share one dense SDPA call on a CPU


@dataclass(frozen=True, slots=True)
class Kind:
    """What distinguishes the layers' masks. window: keys visible to a query, itself included; None = all."""

    window: int | None
    causal: bool


def visibility(anchors_BA: Tensor, context: int, block_size: int, kind: Kind) -> MaskMod:
    """The rule: `(row, head, query, key)` index tensors, broadcast together -> bool, True where the query sees the key.

    anchors_BA: int64, ascending positions, padded with 0. context: keys before the block tokens (C, or C padded).
    """

    window, causal = kind.window, kind.causal

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        anchor = anchors_BA[b, q // block_size]
        slot = q % block_size
        token = k - context  # negative for a context key
        key_slot = token % block_size
        before = (token < 0) & (k < anchor)
        own = (token >= 0) & (token // block_size == q // block_size)
        if window is not None:
            before = before & (anchor + slot - k < window)
            own = own & (slot - key_slot < window)
            if not causal:
                own = own & (key_slot - slot < window)
        if causal:
            own = own & (key_slot <= slot)
        return before | own

    return visible


@dataclass(frozen=True, slots=True)
class _Group:
    """Neighbouring blocks of one row: queries [first, last), context keys [low, high), and their dense mask."""

    row: int
    first: int
    last: int
    low: int
    high: int
    bias: Tensor  # [queries, high - low + queries], 0 where visible, -inf elsewhere


@dataclass
class Blocks:
    """The blocks of one step, and their masks, built once and shared by all layers of a kind.

    anchors_BA: int64 [B, A] on the model's device, ascending a row, padding behind with 0. context: C, positions of
    which keys are given; no anchor lies behind it. flex: FlexAttention (compiled on a GPU), else grouped SDPA.
    """

    anchors_BA: Tensor
    block_size: int
    context: int
    flex: bool
    _groups: dict[tuple[Kind, torch.dtype], list[_Group]] = field(default_factory=dict)
    _sparse: dict[Kind, BlockMask] = field(default_factory=dict)

    @classmethod
    def of(cls, anchors_BA: Tensor, block_size: int, context: int) -> Blocks:
        """Choose the kernel: FlexAttention where it has a backward and fills its tiles, else SDPA."""
        return cls(anchors_BA, block_size, context, anchors_BA.is_cuda and anchors_BA.shape[1] * block_size >= TILE)

    @cached_property
    def positions_BT(self) -> Tensor:
        """Absolute position of every block token."""
        slots = torch.arange(self.block_size, device=self.anchors_BA.device)
        return (self.anchors_BA[:, :, None] + slots).flatten(1)

    def attend(
        self, q_BNTD: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], kind: Kind
    ) -> Tensor:
        """Attention of block queries over context and block keys and values, each [B, M, C or T, D] -> [B, N, T, D]."""
        if self.flex:
            return self._flex(q_BNTD, context, block, kind)
        return self._grouped(q_BNTD, context, block, kind)

    def _grouped(
        self, q_BNTD: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], kind: Kind
    ) -> Tensor:
        key = (kind, q_BNTD.dtype)
        if key not in self._groups:
            self._groups[key] = list(self._make_groups(kind, q_BNTD.dtype))
        rows: list[list[Tensor]] = [[] for _ in range(q_BNTD.shape[0])]
        for g in self._groups[key]:
            keys, values = (
                torch.cat([c[g.row : g.row + 1, :, g.low : g.high], t[g.row : g.row + 1, :, g.first : g.last]], 2)
                for c, t in zip(context, block, strict=True)
            )
            query = q_BNTD[g.row : g.row + 1, :, g.first : g.last]
            rows[g.row].append(F.scaled_dot_product_attention(query, keys, values, attn_mask=g.bias, enable_gqa=True))
        return torch.cat([torch.cat(parts, 2) if len(parts) > 1 else parts[0] for parts in rows])

    def _make_groups(self, kind: Kind, dtype: torch.dtype) -> Iterator[_Group]:
        device, size = self.anchors_BA.device, self.block_size
        rule = visibility(self.anchors_BA, self.context, size, kind)
        for row, anchors in enumerate(self.anchors_BA.tolist()):
            for start in range(0, len(anchors), GROUP):
                some = anchors[start : start + GROUP]
                high = max(some)
                low = 0 if kind.window is None else max(0, min(a for a in some if a or not high) - kind.window + 1)
                low = min(low, high)
                first, last = start * size, (start + len(some)) * size
                q = torch.arange(first, last, device=device)[:, None]
                k = torch.cat([torch.arange(low, high), torch.arange(first, last) + self.context]).to(device)[None]
                b = torch.full_like(q, row)
                seen = rule(b, torch.zeros_like(q), q, k)
                bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
                yield _Group(row, first, last, low, high, bias)

    def _flex(self, q_BNTD: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], kind: Kind) -> Tensor:
        padded = -(-self.context // CONTEXT_STEP) * CONTEXT_STEP
        if kind not in self._sparse:
            self._sparse[kind] = sparse_mask(self.anchors_BA, padded, self.block_size, kind)
        keys, values = (
            torch.cat([F.pad(c, (0, 0, 0, padded - c.shape[2])), t], 2) for c, t in zip(context, block, strict=True)
        )
        attention = _compiled() if q_BNTD.is_cuda else flex_attention
        out: Tensor = attention(q_BNTD, keys, values, block_mask=self._sparse[kind], enable_gqa=True)
        return out


@cache
def _compiled() -> Any:
    torch._dynamo.config.recompile_limit = 64  # one kernel a shape; beyond the limit it would run dense, without a word
    return torch.compile(flex_attention, dynamic=False)


def sparse_mask(anchors_BA: Tensor, context: int, block_size: int, kind: Kind) -> BlockMask:
    """FlexAttention's sparse form of `visibility`, from the anchors alone: the dense [T, C + T] mask never exists.

    A tile pair is listed if some query may see some key, and as full only if every query sees every key.
    """
    device = anchors_BA.device
    rows, count = anchors_BA.shape
    length = count * block_size
    tiles_q, tiles_k = -(-length // TILE), -(-(context + length) // TILE)
    first = torch.arange(tiles_q, device=device) * TILE
    last = torch.clamp(first + TILE, max=length) - 1
    positions = (anchors_BA[:, :, None] + torch.arange(block_size, device=device)).flatten(1)
    anchor = anchors_BA.repeat_interleave(block_size, 1)
    pad = tiles_q * TILE - length
    tile_anchor = F.pad(anchor, (0, pad), value=-1).view(rows, tiles_q, TILE)
    tile_position = F.pad(positions, (0, pad), value=-1).view(rows, tiles_q, TILE)
    real = tile_anchor >= 0
    big = torch.iinfo(torch.int64).max // 2
    high = tile_anchor.amax(2)[..., None]  # context keys below this are seen by some query
    sure = tile_anchor.masked_fill(~real, big).amin(2)[..., None]  # and below this by all
    low = torch.zeros_like(high)
    sure_low = low
    if kind.window is not None:
        low = (tile_position.masked_fill(tile_anchor <= 0, big).amin(2)[..., None] - kind.window + 1).clamp(min=0)
        sure_low = (tile_position.amax(2)[..., None] - kind.window + 1).clamp(min=0)
    begin = torch.arange(tiles_k, device=device) * TILE
    end = begin + TILE  # exclusive
    in_context = (torch.clamp(end, max=context) > low) & (begin < torch.clamp(high, max=context))
    own_first = context + first // block_size * block_size
    own_last = context + last // block_size * block_size + block_size - 1
    in_blocks = (end[None, :] > own_first[:, None]) & (begin[None, :] <= own_last[:, None])
    full = (end <= torch.clamp(sure, max=context)) & (begin >= sure_low) & real.all(2)[..., None]
    part = (in_context | in_blocks) & ~full
    lists = [_tile_list(chosen) for chosen in (part, full)]
    return BlockMask.from_kv_blocks(
        *lists[0],
        *lists[1],
        BLOCK_SIZE=TILE,
        mask_mod=visibility(anchors_BA, context, block_size, kind),
        seq_lengths=(length, context + length),
    )


def _tile_list(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, Q, K] tile pairs -> (count [B, 1, Q], key tile numbers, the chosen first, [B, 1, Q, K]), int32."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None].contiguous(), order.to(torch.int32)[:, None].contiguous()
