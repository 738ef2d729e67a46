"""What a drafter is trained on: anchors, the labels of their blocks, and a cross entropy whose logits never pile up.

An anchor may stand where its own token and the next one are learnt. Slot k of its block is trained on the token at
anchor + k, up to the first token that is not learnt; slot 0, the anchor itself, is not. Nothing else has weight, and
tokens without weight reach neither the last MLP nor the output head.

The head is frozen, so no logits are needed once the gradient with respect to its input is known: `LinearLoss` makes
both in the forward pass, a few blocks at a time, with two matrix products where recomputation would take three.

Shapes: B rows, S row positions, A anchors a row, K = block_size - 1 drafted slots, R tokens with weight, H hidden size,
V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from trainer.drafter import Drafter, noise_ids

CHUNK_ELEMENTS = {"cpu": 8 << 20, "cuda": 256 << 20}  # logits alive at once: rows x V


def default_gamma(block_size: int) -> float:
    """The paper's decay of position weights: 7, 5 and 4 for blocks of 16, 10 and 8; half a block between them."""
    return min(7.0, block_size / 2)


@dataclass(frozen=True, slots=True)
class Objective:
    """gamma: slot k weighs exp(-(k - 1) / gamma). dpace: alpha of D-PACE weights, which replace these, or None."""

    gamma: float
    dpace: float | None = None


def eligible(loss_mask: Tensor) -> Tensor:
    """bool [..., S]: where an anchor may stand. loss_mask: [..., S], 1 where the token is learnt, 0 in padding."""
    learnt = loss_mask > 0
    ok = torch.zeros_like(learnt)
    ok[..., :-1] = learnt[..., :-1] & learnt[..., 1:]
    return ok


def sample_anchors(
    loss_mask_BS: Tensor, row_ids: Sequence[str], *, seed: int, epoch: int, count: int
) -> tuple[Tensor, Tensor]:
    """`count` anchors a row, drawn uniformly without replacement from the eligible positions: all of them if fewer.

    A row's draw depends on (seed, epoch, row id) alone, not on its batch, rank or place. Returns anchors_BA int64,
    ascending, padded behind with 0, and keep_BA bool, False for padding; both on the CPU.
    """
    anchors = torch.zeros(len(row_ids), count, dtype=torch.int64)
    keep = torch.zeros(len(row_ids), count, dtype=torch.bool)
    for row, (ok, row_id) in enumerate(zip(eligible(loss_mask_BS.cpu()), row_ids, strict=True)):
        places = ok.nonzero()[:, 0]
        digest = blake2b(f"{seed} {epoch} {row_id}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        drawn = places[torch.randperm(len(places), generator=generator)[:count]].sort().values
        anchors[row, : len(drawn)], keep[row, : len(drawn)] = drawn, True
    return anchors, keep


def block_labels(
    input_ids_BS: Tensor, loss_mask_BS: Tensor, anchors_BA: Tensor, keep_BA: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Labels int64 [B, A, K] of slots 1..K, and bool [B, A, K]: which of them count.

    Slots count up to the first token that is not learnt or lies behind the row; those of padded anchors never do.
    """
    places = anchors_BA[:, :, None] + torch.arange(1, block_size, device=anchors_BA.device)
    inside = places < input_ids_BS.shape[1]
    flat = places.clamp(max=input_ids_BS.shape[1] - 1).flatten(1)
    labels = input_ids_BS.gather(1, flat).view_as(places)
    learnt = (loss_mask_BS.gather(1, flat) > 0).view_as(places)
    counts = (inside & learnt & keep_BA[:, :, None]).to(torch.int8).cumprod(2).bool()
    return labels, counts


def dpace_weights(probability_AK: Tensor, counts_AK: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): slot j weighs the chance that the draft still stands at j and after, smoothed.

    w_j = sum over m >= j of prod over i <= m of (1 - alpha) q_i + alpha, q the label's probability; slots that do not
    count are neutral in products and absent from sums. Returns [A, K], 0 where a slot does not count.
    """
    smooth = torch.where(counts_AK, (1 - alpha) * probability_AK + alpha, 1.0)
    standing = smooth.cumprod(1) * counts_AK
    return standing.flip(1).cumsum(1).flip(1) * counts_AK


@dataclass(frozen=True, slots=True)
class Slots:
    """The R tokens with weight, in the order of their blocks, and the chunks in which they meet the output head.

    label_R, block_R (0 .. B * A), slot_R (0 is the first drafted): int64. chunks: (first row, end row, first block, end
    block); a chunk never cuts a block, since D-PACE weighs a block as a whole.
    """

    label_R: Tensor
    block_R: Tensor
    slot_R: Tensor
    blocks: int  # B * A
    slots: int  # K
    chunks: tuple[tuple[int, int, int, int], ...]

    @classmethod
    def of(cls, labels_BAK: Tensor, counts_BAK: Tensor, chunk_rows: int, device: torch.device) -> Slots:
        """From `block_labels` on the CPU; `chunk_rows` bounds a chunk unless one block alone is larger."""
        counts = counts_BAK.flatten(0, 1)
        block, slot = counts.nonzero(as_tuple=True)
        chunks: list[tuple[int, int, int, int]] = []
        row = first = first_block = 0
        for i, rows in enumerate(counts.sum(1).tolist()):
            if row > first and row - first + rows > chunk_rows:
                chunks.append((first, row, first_block, i))
                first, first_block = row, i
            row += rows
        if row > first:
            chunks.append((first, row, first_block, len(counts)))
        label = labels_BAK.flatten(0, 1)[block, slot]
        label, block, slot = (t.to(device, non_blocking=True) for t in (label, block, slot))
        return cls(label, block, slot, len(counts), counts.shape[1], tuple(chunks))

    @property
    def token_R(self) -> Tensor:
        """Index of each row among the B * T block tokens."""
        return self.block_R * (self.slots + 1) + self.slot_R + 1

    def weights(self, ce: Tensor, chunk: tuple[int, int, int, int], objective: Objective) -> Tensor:
        """Weights [n] of one chunk's rows, given their cross entropy [n]."""
        first, end, first_block, end_block = chunk
        slot = self.slot_R[first:end]
        if objective.dpace is None:
            return torch.exp(-slot.to(ce.dtype) / objective.gamma)
        where = (self.block_R[first:end] - first_block, slot)
        probability = ce.new_zeros(end_block - first_block, self.slots).index_put(where, torch.exp(-ce))
        counts = torch.zeros_like(probability, dtype=torch.bool).index_put(where, torch.ones_like(slot) > 0)
        return dpace_weights(probability, counts, objective.dpace)[where]

    def grid(self, value_R: Tensor) -> Tensor:
        """[B * A, K] of a figure a row, 0 elsewhere."""
        return value_R.new_zeros(self.blocks, self.slots).index_put((self.block_R, self.slot_R), value_R)


def _errors(logits: Tensor, label: Tensor, scale: float, cap: float | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of head outputs [n, V] (overwritten): softmax minus one-hot, times `norm`; norm, cross entropy, right [n].

    Softmax is left unnormalised: dividing [n, H] by `norm` afterwards is cheaper than dividing [n, V].
    """
    low = logits.dtype in (torch.bfloat16, torch.float16)
    wide = logits.float() if low else logits
    slope = None
    if scale != 1.0 or cap:
        wide = wide.mul_(scale)
        if cap:
            wide = wide.div_(cap).tanh_()
            slope = 1 - wide.square()
            wide = wide.mul_(cap)
    top = wide.amax(1, keepdim=True)
    own = wide.gather(1, label[:, None])
    # 16-bit logits tie often, and then the first of the largest is drafted; in float32 a tie is a coincidence
    right = wide.argmax(1) == label if low else (own >= top)[:, 0]
    wide = wide.sub_(top).exp_()
    norm = wide.sum(1, keepdim=True)
    ce = norm.log() + top - own
    wide = wide.scatter_add_(1, label[:, None], -norm)
    if slope is not None:
        wide = wide.mul_(slope)
    return wide.to(logits.dtype), norm, ce[:, 0], right


@cache
def _fused_errors() -> Any:
    return torch.compile(_errors, dynamic=True)


class LinearLoss(torch.autograd.Function):
    """Weighted sum of the cross entropy of `scale * x @ head.T`, capped; the gradient in x is made here and now.

    Returns the sum, the sum of weights, and of every row its cross entropy and whether its label is drafted.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_RH: Tensor,
        head_VH: Tensor,
        slots: Slots,
        objective: Objective,
        scale: float,
        cap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(x_RH.dtype, torch.float32)
        grad_RH = torch.empty_like(x_RH)
        ce_R = torch.empty(len(x_RH), dtype=wide, device=x_RH.device)
        right_R = torch.empty(len(x_RH), dtype=torch.bool, device=x_RH.device)
        total, mass = ce_R.new_zeros(()), ce_R.new_zeros(())
        errors = _fused_errors() if x_RH.is_cuda else _errors
        for chunk in slots.chunks:
            rows = slice(chunk[0], chunk[1])
            error, norm, ce, right = errors(x_RH[rows] @ head_VH.T, slots.label_R[rows], scale, cap)
            weight = slots.weights(ce, chunk, objective)
            total += (ce * weight).sum()
            mass += weight.sum()
            ce_R[rows], right_R[rows] = ce, right
            torch.mm(error, head_VH, out=grad_RH[rows])
            del error
            grad_RH[rows] *= weight[:, None] / norm * scale
        ctx.save_for_backward(grad_RH)
        ctx.mark_non_differentiable(mass, ce_R, right_R)
        return total, mass, ce_R, right_R

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (grad_RH,) = ctx.saved_tensors
        return grad_RH * grad.to(grad_RH.dtype), None, None, None, None, None


@dataclass(frozen=True, slots=True)
class BlockLoss:
    """One micro-batch on one rank; every part is a plain sum, to be added over micro-batches and ranks.

    total: differentiable. divisor: the sum of position weights, or of rows under D-PACE. table [4, K], float64: per
    slot the tokens, the right ones, blocks right up to here, and cross entropy. `uniform_tau` is over uniformly drawn
    anchors, which overweigh easy stretches: it is not the acceptance length that serving measures.
    """

    total: Tensor
    divisor: Tensor
    table: Tensor


def position_accuracy(table: Tensor) -> list[float]:
    """Share of right tokens of each slot, from a (summed) table of BlockLoss."""
    return [float(v) for v in table[1] / table[0].clamp(min=1)]


def uniform_tau(table: Tensor) -> float:
    """Mean length of the correct prefix + 1 over uniformly drawn anchors, from a (summed) table of BlockLoss."""
    return 1.0 + float(table[2].sum() / table[0, 0].clamp(min=1))


def block_loss(
    drafter: Drafter,
    taps_BSX: Tensor,
    input_ids_BS: Tensor,
    loss_mask_BS: Tensor,
    anchors_BA: Tensor,
    keep_BA: Tensor,
    embed_VH: Tensor,
    head_VH: Tensor,
    objective: Objective,
    chunk_elements: int | None = None,
) -> BlockLoss:
    """Forward pass and loss of one right-padded micro-batch.

    taps_BSX: target states [B, S, K * H] in the drafter's dtype, on its device, as all weights are. input_ids_BS,
    loss_mask_BS, anchors_BA, keep_BA: best on the CPU, where they are read. embed_VH, head_VH: the target's, frozen.
    chunk_elements: logits alive at once, by default 8 M on a CPU and 256 M on a GPU.
    """
    device, config = taps_BSX.device, drafter.config
    ids, anchors, keep = input_ids_BS.cpu().long(), anchors_BA.cpu(), keep_BA.cpu()
    if device.type == "cpu":  # no kernel to compile for each shape: padded blocks need not be computed
        width = max(1, int(keep.sum(1).max()))
        anchors, keep = anchors[:, :width], keep[:, :width]
    labels, counts = block_labels(ids, loss_mask_BS.cpu(), anchors, keep, config.block_size)
    chunk_rows = max(1, (chunk_elements or CHUNK_ELEMENTS[device.type]) // len(head_VH))
    slots = Slots.of(labels, counts, chunk_rows, device)
    context = drafter.context(taps_BSX[:, : max(1, int(anchors.max()))])  # nothing behind the last anchor is ever seen
    noise = drafter.embed(noise_ids(ids.gather(1, anchors), config).to(device, non_blocking=True), embed_VH)
    hidden_RH = drafter(noise, context, anchors.to(device, non_blocking=True), slots.token_R)
    total, mass, ce_R, right_R = LinearLoss.apply(  # type: ignore[no-untyped-call]
        hidden_RH, head_VH, slots, objective, config.output_multiplier, config.final_logit_softcapping
    )
    divisor = mass if objective.dpace is None else mass.new_tensor(float(len(ids)))
    present, right = slots.grid(torch.ones_like(ce_R)), slots.grid(right_R.to(ce_R.dtype))
    table = torch.stack([t.sum(0, dtype=torch.float64) for t in (present, right, right.cumprod(1), slots.grid(ce_R))])
    return BlockLoss(total, divisor, table)
