"""Anchors, labels and weights by their rule; the chunked loss against plain autograd; nothing leaks, nothing piles up."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.drafter import Drafter, noise_ids
from trainer.loss import (
    BlockLoss,
    Objective,
    block_labels,
    block_loss,
    default_gamma,
    dpace_weights,
    eligible,
    position_accuracy,
    sample_anchors,
    uniform_tau,
)

PLAIN = Objective(3.0)


def run(model: Drafter, b: tiny.Batch, objective: Objective = PLAIN, **options: Any) -> BlockLoss:
    return block_loss(model, b.taps, b.ids, b.mask, b.anchors, b.keep, b.embed, b.head, objective, **options)


def all_logits(model: Drafter, b: tiny.Batch) -> Tensor:
    """[B, A, block_size, V] without any of the loss's shortcuts."""
    noise = model.embed(noise_ids(b.ids.gather(1, b.anchors), model.config), b.embed)
    hidden = model(noise, model.context(b.taps), b.anchors)
    return model.logits(hidden, b.head).unflatten(1, (-1, model.config.block_size))


# anchors and labels


@given(st.lists(st.integers(0, 1), min_size=1, max_size=40), st.integers(1, 12), st.integers(2, 6))
@settings(max_examples=60, deadline=None)
def test_anchors_and_labels_by_hand(mask: list[int], count: int, block: int) -> None:
    learnt = torch.tensor([mask])
    ids = torch.arange(len(mask))[None] + 100
    places = [i for i in range(len(mask) - 1) if mask[i] and mask[i + 1]]
    assert eligible(learnt)[0].nonzero()[:, 0].tolist() == places
    anchors, keep = sample_anchors(learnt, ["x"], seed=1, epoch=2, count=count)
    real = anchors[0][keep[0]].tolist()
    assert real == sorted(set(real)) and set(real) <= set(places) and len(real) == min(count, len(places))
    assert anchors.shape == (1, count) and not anchors[0][len(real) :].any() and not keep[0][len(real) :].any()
    labels, counts = block_labels(ids, learnt, anchors, keep, block)
    for a in range(count):
        run_length = 0
        if keep[0, a]:
            while run_length < block - 1 and real[a] + run_length + 1 < len(mask) and mask[real[a] + run_length + 1]:
                run_length += 1
            assert labels[0, a, :run_length].tolist() == [real[a] + 101 + i for i in range(run_length)]
            assert run_length >= 1
        assert counts[0, a].tolist() == [i < run_length for i in range(block - 1)]


def test_a_row_draws_the_same_anchors_in_any_batch() -> None:
    mask = torch.ones(3, 50, dtype=torch.int8)
    together, _ = sample_anchors(mask, ["a", "b", "c"], seed=0, epoch=1, count=8)
    alone, _ = sample_anchors(F.pad(mask[1:2], (0, 30)), ["b"], seed=0, epoch=1, count=8)
    assert torch.equal(together[1:2], alone)
    others = [sample_anchors(mask[:1], [i], seed=s, epoch=e, count=8)[0] for s, e, i in ((0, 2, "b"), (1, 1, "b"))]
    assert len({tuple(t[0].tolist()) for t in (*others, together[0:1], together[1:2], together[2:3])}) == 5


def test_anchors_are_uniform() -> None:
    mask = torch.ones(1, 11, dtype=torch.int8)
    hits = torch.zeros(11)
    for epoch in range(2000):
        hits[sample_anchors(mask, ["r"], seed=0, epoch=epoch, count=3)[0][0]] += 1
    expected = 2000 * 3 / 10
    chi = float(((hits[:10] - expected) ** 2 / expected).sum())
    assert hits[10] == 0 and chi < 27.9  # 9 degrees of freedom, p = 0.001


def test_gamma_of_the_paper() -> None:
    assert [default_gamma(b) for b in (16, 10, 8)] == [7.0, 5.0, 4.0]


# the loss


@given(st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=4), st.floats(0, 1), st.data())
@settings(max_examples=40, deadline=None)
def test_dpace_weights_by_hand(q: list[list[float]], alpha: float, data: st.DataObject) -> None:
    lengths = [data.draw(st.integers(0, 4)) for _ in q]
    counts = torch.tensor([[k < n for k in range(4)] for n in lengths])
    out = dpace_weights(torch.tensor(q, dtype=torch.float64), counts, alpha)
    for row, n in enumerate(lengths):
        for j in range(4):
            standing = [math.prod((1 - alpha) * q[row][i] + alpha for i in range(m + 1)) for m in range(j, n)]
            assert float(out[row, j]) == pytest.approx(sum(standing) if j < n else 0.0, abs=1e-12)


def by_autograd(model: Drafter, b: tiny.Batch, objective: Objective) -> tuple[Tensor, Tensor]:
    labels, counts = block_labels(b.ids, b.mask, b.anchors, b.keep, model.config.block_size)
    logits = all_logits(model, b)[:, :, 1:]
    ce = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(labels)
    if objective.dpace is None:
        slot = torch.arange(labels.shape[2], dtype=ce.dtype)
        weight = counts * torch.exp(-slot / objective.gamma)
        return (ce * weight).sum(), weight.sum()
    q = torch.exp(-ce.detach()).flatten(0, 1)
    weight = dpace_weights(q, counts.flatten(0, 1), objective.dpace).view_as(ce)
    return (ce * weight).sum(), torch.tensor(float(len(b.ids)))


@pytest.mark.parametrize("objective", [PLAIN, Objective(7.0, dpace=0.5)])
@pytest.mark.parametrize("keys", [{}, {"output_multiplier": 0.5, "final_logit_softcapping": 2.0}])
@pytest.mark.parametrize("rows", [1, 13, 1000])
def test_chunked_loss_and_gradients_equal_plain_autograd(
    objective: Objective, keys: dict[str, float], rows: int
) -> None:
    c = tiny.config(input_embedding_scale=2.0, **keys)
    model, b = tiny.drafter(c, torch.float64), tiny.batch(c, torch.float64)
    total, divisor = by_autograd(model, b, objective)
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected = torch.autograd.grad(total, parameters)
    out = run(model, b, objective, chunk_elements=rows * c.vocab_size)
    assert float(out.total.detach()) == pytest.approx(float(total.detach()), rel=1e-10)
    assert float(out.divisor) == pytest.approx(float(divisor), rel=1e-10)
    for name, one, other in zip(names, torch.autograd.grad(out.total / 3, parameters), expected, strict=True):
        assert (3 * one - other).abs().max() <= 1e-6 * other.abs().max(), name


def test_counts_of_the_table_by_hand() -> None:
    model, b = tiny.drafter(), tiny.batch(tiny.config())
    labels, counts = block_labels(b.ids, b.mask, b.anchors, b.keep, 6)
    logits = all_logits(model, b).detach()
    ids = b.ids.clone()
    right = logits[0, 0, 1].argmax()  # make one drafted token right
    ids[0, b.anchors[0, 0] + 1] = right
    b.ids = ids
    labels, counts = block_labels(b.ids, b.mask, b.anchors, b.keep, 6)
    logits = all_logits(model, b).detach()
    hit = (logits[:, :, 1:].argmax(-1) == labels) & counts
    out = run(model, b)
    assert out.table[0].tolist() == counts.sum((0, 1)).tolist()
    assert out.table[1].tolist() == hit.sum((0, 1)).tolist() and hit.any()
    prefix = hit.long().cumprod(2)
    assert uniform_tau(out.table) == pytest.approx(1 + float(prefix.sum() / b.keep.sum()))
    assert position_accuracy(out.table) == pytest.approx((hit.sum((0, 1)) / counts.sum((0, 1))).tolist())


def test_a_tie_in_16_bits_drafts_the_first_of_the_largest() -> None:
    model, b = tiny.drafter(dtype=torch.bfloat16), tiny.batch(tiny.config(), torch.bfloat16)
    b.head = b.head[:1].repeat(tiny.VOCAB, 1)  # every logit equal: token 0 is drafted
    b.ids[:] = 5
    assert run(model, b).table[1].sum() == 0
    b.ids[:] = 0
    out = run(model, b)
    assert torch.equal(out.table[1], out.table[0])


def test_a_batch_without_an_anchor_is_zero_and_harmless() -> None:
    model, b = tiny.drafter(), tiny.batch(tiny.config())
    b.mask = torch.zeros_like(b.mask)
    b.anchors, b.keep = sample_anchors(b.mask, ["a", "b"], seed=0, epoch=0, count=4)
    out = run(model, b)
    out.total.backward()
    assert float(out.total.detach()) == 0 and float(out.divisor) == 0 and uniform_tau(out.table) == 1.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


class Watch(TorchDispatchMode):
    """What every operation makes: its name and shape, views of `known` left out; and how much of it lives at once.

    peak: most elements alive in tensors whose last dimension is `known`'s first, each storage counted once.
    """

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.known = known.untyped_storage().data_ptr()
        self.width = known.shape[0]
        self.made: list[tuple[str, tuple[int, ...]]] = []
        self.wide: list[weakref.ref[Tensor]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        new = [t for t in tensors if t.untyped_storage().data_ptr() != self.known]
        self.made += [(func.overloadpacket.__name__, tuple(t.shape)) for t in new]
        self.wide += [weakref.ref(t) for t in new if t.shape[-1:] == (self.width,)]
        alive = [t for t in (ref() for ref in self.wide) if t is not None]
        self.wide = [weakref.ref(t) for t in alive]
        self.peak = max(self.peak, sum({t.untyped_storage().data_ptr(): t.numel() for t in alive}.values()))
        return out


@pytest.mark.parametrize("objective", [PLAIN, Objective(3.0, dpace=0.5)])
def test_logits_live_one_chunk_at_a_time_and_only_for_rows_with_weight(objective: Objective) -> None:
    c = tiny.config(vocab_size=4096)  # larger than any other dimension here
    model, b = tiny.drafter(c), tiny.batch(c)
    _, counts = block_labels(b.ids, b.mask, b.anchors, b.keep, c.block_size)
    weighted, chunk = int(counts.sum()), 10
    assert weighted < counts.numel()
    watch = Watch(b.head)
    with watch:
        out = run(model, b, objective, chunk_elements=chunk * 4096)
    logits = [(name, shape) for name, shape in watch.made if shape[-1:] == (4096,)]
    assert sum(shape[0] for name, shape in logits if name == "mm") == weighted
    assert max(math.prod(shape) for _, shape in logits) <= chunk * 4096
    assert 4096 < watch.peak <= chunk * 4096  # one chunk is gone before the next is made
    backward = Watch(b.head)
    with backward:
        out.total.backward()
    assert not [shape for _, shape in backward.made if 4096 in shape]  # the gradient was made in the forward pass


def test_bfloat16_is_near_float32() -> None:
    c = tiny.config()
    wide = run(tiny.drafter(c), tiny.batch(c))
    narrow = run(tiny.drafter(c, torch.bfloat16), tiny.batch(c, torch.bfloat16))
    assert narrow.total.dtype == torch.float32
    assert float(narrow.total.detach()) == pytest.approx(float(wide.total.detach()), rel=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("objective", [PLAIN, Objective(7.0, dpace=0.5)])
def test_a_gpu_gives_the_loss_and_gradients_of_the_cpu(objective: Objective) -> None:
    c = tiny.config(head_dim=16, block_size=16)
    results = []
    for device in ("cpu", "cuda"):
        model, b = tiny.drafter(c).to(device), tiny.batch(c, count=16)
        b.taps, b.embed, b.head = (t.to(device) for t in (b.taps, b.embed, b.head))
        out = run(model, b, objective, chunk_elements=40 * c.vocab_size)
        out.total.backward()
        results.append([out.total, out.table, *(p.grad for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert (one - other.cpu()).abs().max() <= 5e-3 * one.abs().max()


# no leak: perturb one thing and see exactly which blocks change


def changed(model: Drafter, b: tiny.Batch, perturb: Callable[[tiny.Batch], None]) -> Tensor:
    """bool [B, A]: blocks whose logits are not bit for bit what they were."""
    with torch.no_grad():
        before = all_logits(model, b)
        perturb(b)
        after = all_logits(model, b)
    return (before != after).flatten(2).any(2)


def shift(place: int, row: int = 0) -> Callable[[tiny.Batch], None]:
    def perturb(b: tiny.Batch) -> None:
        b.taps[row, place] += 1.0

    return perturb


@pytest.mark.parametrize("layers", ["full", "sliding", "mixed"])
def test_a_target_state_reaches_the_blocks_behind_it_and_no_other(layers: str) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "full": {"layer_types": ("full_attention",) * 3, "sliding_window": None},
        "sliding": {"layer_types": ("sliding_attention",) * 3},
        "mixed": {},
    }
    c = tiny.config(**kinds[layers])
    model = tiny.drafter(c, torch.float64)
    for place in (13, 20, 21, 30, 53):
        b = tiny.batch(c, torch.float64, count=40)
        reach = place + c.sliding_window if layers == "sliding" and c.sliding_window else 10**6
        expected = (b.anchors > place) & (b.anchors < reach) & b.keep
        expected[1] = False  # the neighbour in the batch
        assert expected.any() == (place < 53)  # the last anchor stands at 53 and does not see its own state
        assert torch.equal(changed(model, b, shift(place)), expected)


def test_a_window_is_counted_from_the_query() -> None:
    c = tiny.config(layer_types=("sliding_attention",), num_hidden_layers=1)
    model, b = tiny.drafter(c, torch.float64), tiny.batch(c, torch.float64, count=40)
    with torch.no_grad():
        before = all_logits(model, b)[0]
        b.taps[0, 20] += 1.0
        slots = (before != all_logits(model, b)[0]).any(-1)
    for a, anchor in enumerate(b.anchors[0].tolist()):
        assert slots[a].tolist() == [anchor > 20 and anchor + k - 20 < 11 for k in range(c.block_size)]


def test_tokens_reach_only_the_block_they_anchor() -> None:
    c = tiny.config()
    model = tiny.drafter(c, torch.float64)
    for place in (20, 33, 54, 59):
        b = tiny.batch(c, torch.float64, count=40)

        def perturb(b: tiny.Batch, place: int = place) -> None:
            b.ids[0, place] = (b.ids[0, place] + 1) % tiny.MASK_ID

        expected = (b.anchors == place) & b.keep
        expected[1] = False
        assert torch.equal(changed(model, b, perturb), expected)


def test_padding_and_neighbours_change_nothing() -> None:
    c = tiny.config()
    model, b = tiny.drafter(c, torch.float64), tiny.batch(c, torch.float64)
    both = run(model, b)
    alone = []
    for row, length in ((0, 60), (1, 38)):
        one = tiny.Batch(*(t[row : row + 1] for t in (b.ids, b.mask, b.taps, b.anchors, b.keep)), b.embed, b.head)
        one.ids, one.mask, one.taps = one.ids[:, :length], one.mask[:, :length], one.taps[:, :length]
        alone.append(run(model, one))
    torch.testing.assert_close(both.table, alone[0].table + alone[1].table, rtol=1e-12, atol=0)
    torch.testing.assert_close(both.total, alone[0].total + alone[1].total, rtol=1e-12, atol=0)
    b.taps[1, 38:] = 1e4
    b.ids[1, 38:] = 3
    assert torch.equal(run(model, b).table, both.table)
