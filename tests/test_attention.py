"""The visibility rule against its prose, and the kernels against the rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from trainer.attention import GROUP, TILE, Blocks, Kind, sparse_mask, visibility

torch.set_num_threads(1)
KINDS = [Kind(None, False), Kind(9, True), Kind(3, False), Kind(2, True), Kind(None, True)]


def anchors(rows: int, count: int, context: int, real: int | None = None) -> torch.Tensor:
    """Ascending, up to the end of the context; from the second row on only `real` of them, padded with 0."""
    g = torch.Generator().manual_seed(count)
    out = torch.zeros(rows, count, dtype=torch.int64)
    for row in range(rows):
        n = count if row == 0 or real is None else real
        out[row, :n] = torch.randperm(context, generator=g)[:n].sort().values + 1
    return out


def seen_by_hand(where: torch.Tensor, context: int, block: int, kind: Kind) -> torch.Tensor:
    rows, count = where.shape
    mask = torch.zeros(rows, count * block, context + count * block, dtype=torch.bool)
    for row in range(rows):
        for a, anchor in enumerate(where[row].tolist()):
            for slot in range(block):
                position = anchor + slot
                for key in range(anchor):
                    mask[row, a * block + slot, key] = kind.window is None or position - key < kind.window
                for other in range(block):
                    distance = slot - other
                    ok = distance >= 0 if kind.causal else True
                    ok = ok and (kind.window is None or abs(distance) < kind.window)
                    mask[row, a * block + slot, context + a * block + other] = ok
    return mask


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_is_its_prose(kind: Kind) -> None:
    where = anchors(2, 5, 20, real=3)
    rule = visibility(where, 20, 4, kind)
    dense = create_mask(rule, 2, None, 20, 40, "cpu")[:, 0]
    assert torch.equal(dense, seen_by_hand(where, 20, 4, kind))
    assert dense.any(-1).all()  # no query sees nothing: softmax over nothing is NaN


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, GROUP, 2 * GROUP + 3])
def test_grouped_and_flex_equal_dense_attention(kind: Kind, count: int) -> None:
    context, block, g = 30, 4, torch.Generator().manual_seed(0)
    where = anchors(2, count, context, real=(count + 1) // 2)
    tokens = count * block
    q = torch.randn(2, 4, tokens, 8, generator=g, dtype=torch.float64)
    ctx = tuple(torch.randn(2, 2, context, 8, generator=g, dtype=torch.float64) for _ in range(2))
    own = tuple(torch.randn(2, 2, tokens, 8, generator=g, dtype=torch.float64) for _ in range(2))
    mask = seen_by_hand(where, context, block, kind)[:, None]
    keys, values = (torch.cat([c, o], 2) for c, o in zip(ctx, own, strict=True))
    dense = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
    for flex in (False, True):
        out = Blocks(where, block, context, flex).attend(q, ctx, own, kind)
        torch.testing.assert_close(out, dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [Kind(None, False), Kind(300, True), Kind(150, False)])
@pytest.mark.parametrize(("count", "block", "context"), [(40, 16, 1024), (64, 16, 2048), (21, 8, 300), (3, 6, 700)])
def test_sparse_tiles_are_those_of_the_dense_mask(kind: Kind, count: int, block: int, context: int) -> None:
    where = anchors(2, count, context, real=count // 2)
    ours = sparse_mask(where, context, block, kind)
    length = count * block
    rule = visibility(where, context, block, kind)
    theirs = create_block_mask(rule, 2, None, length, context + length, "cpu", BLOCK_SIZE=TILE)
    listed, needed = ours.to_dense().bool(), theirs.to_dense().bool()
    assert not (needed & ~listed).any()
    if kind.window is None:
        assert torch.equal(listed, needed)
    else:  # a gap between the windows of two anchors of one tile may be listed too
        assert listed.sum() < 1.3 * needed.sum()
    full = ours.full_kv_num_blocks
    assert full is not None and theirs.full_kv_num_blocks is not None
    assert (full <= theirs.full_kv_num_blocks).all()
    dense = F.pad(create_mask(rule, 2, None, length, context + length, "cpu"), (0, TILE, 0, TILE))
    indices = ours.full_kv_indices
    assert indices is not None
    for b, h, q in torch.cartesian_prod(*map(torch.arange, full.shape)).tolist():
        for k in indices[b, h, q, : full[b, h, q]].tolist():
            assert dense[b, h, q * TILE : (q + 1) * TILE, k * TILE : (k + 1) * TILE].all()


def test_grouped_attention_reads_only_what_its_blocks_may_see() -> None:
    where = anchors(1, 2 * GROUP, 200)
    blocks = Blocks(where, 4, 200, flex=False)
    groups = list(blocks._make_groups(Kind(20, True), torch.float32))
    assert [g.high for g in groups] == [int(where[0, GROUP - 1]), int(where[0, -1])]
    assert [g.low for g in groups] == [max(0, int(where[0, i]) - 19) for i in (0, GROUP)]


def test_a_cpu_and_a_lone_block_take_sdpa() -> None:
    assert not Blocks.of(anchors(1, 64, 100), 16, 100).flex


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Kind(None, False), Kind(100, True)])
def test_flex_gradients_equal_grouped_on_a_gpu(kind: Kind) -> None:
    context, block, count = 500, 16, 40
    where = anchors(2, count, context, real=17).cuda()
    g = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, 8, count * block, 64), *[(2, 2, context, 64)] * 2, *[(2, 2, count * block, 64)] * 2]
    leaves = [torch.randn(s, generator=g, device="cuda", requires_grad=True) for s in shapes]
    weight = torch.randn(shapes[0], generator=g, device="cuda")
    grads = []
    for flex in (False, True):
        q, kc, vc, kb, vb = leaves
        out = Blocks(where, block, context, flex).attend(q, (kc, vc), (kb, vb), kind)
        grads.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    for one, other in zip(*grads, strict=True):
        assert (one - other).abs().max() <= 2e-3 * one.abs().max()
