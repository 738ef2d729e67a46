"""The optimiser is AdamW on master weights; schedules begin, peak and end where they say."""

import pytest
import tiny
import torch

from trainer.optim import CLIP, WEIGHT_DECAY, AdamW, learning_rate


def gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for name, p in model.named_parameters()
    }


def test_it_is_adamw_with_clipping_and_no_decay_of_norms():
    ours, theirs = tiny.drafter(dtype=torch.float64), tiny.drafter(dtype=torch.float64)
    mine = AdamW(ours)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.999), eps=1e-8)
    for step in range(5):
        found, rate, divisor = gradients(ours, step), 10.0 ** -(step + 1), 3.0 + 1000 * (step % 2)
        for name, parameter in ours.named_parameters():
            parameter.grad = found[name]
        mine.collect()
        for name, parameter in theirs.named_parameters():
            parameter.grad = found[name] / divisor
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), CLIP)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        assert mine.step(rate, divisor) == pytest.approx(float(norm), rel=1e-12)
        assert not mine.grad.any()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)  # torch adds 1e-6 to the norm it clips by


def test_gradients_of_micro_batches_add_up():
    model = tiny.drafter()
    optimizer = AdamW(model)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.5)
        optimizer.collect()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert (optimizer.grad == 3.0).all()


def test_a_bfloat16_model_has_float32_masters_that_small_steps_reach():
    model = tiny.drafter(dtype=torch.bfloat16)
    optimizer = AdamW(model)
    assert optimizer.master.dtype == optimizer.grad.dtype == torch.float32
    before, seen = optimizer.master.clone(), [p.detach().clone() for p in model.parameters()]
    for _ in range(50):
        optimizer.grad.fill_(1.0)
        optimizer.step(1e-6, 1.0)
    assert ((before - optimizer.master) > 3e-5).all()  # each step is below what bfloat16 can show
    flat = torch.cat([p.detach().flatten() for p in optimizer.parameters])
    assert torch.equal(flat, optimizer.master.to(torch.bfloat16))
    assert any((now != then).any() for now, then in zip(model.parameters(), seen, strict=True))


def test_what_is_no_number_changes_nothing():
    model = tiny.drafter()
    optimizer = AdamW(model)
    before = optimizer.master.clone()
    optimizer.grad[3] = float("inf")
    assert optimizer.step(1e-3, 1.0) == float("inf")
    assert torch.equal(before, optimizer.master) and optimizer.updates == 0


def test_state_comes_back_bit_by_bit():
    one, other = AdamW(tiny.drafter()), AdamW(tiny.drafter(seed=9))
    one.grad.normal_(generator=torch.Generator().manual_seed(1))
    one.step(1e-3, 1.0)
    other.restore(one.state(), one.updates)
    for optimizer in (one, other):
        optimizer.grad.normal_(generator=torch.Generator().manual_seed(2))
        optimizer.step(1e-3, 1.0)
    assert torch.equal(one.master, other.master) and torch.equal(one.second, other.second)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters, other.parameters, strict=True))


def test_schedules():
    cosine = [learning_rate(step, 100, 1.0, "cosine") for step in range(100)]
    assert cosine[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert cosine[52] == pytest.approx(0.5) and 0 < cosine[-1] < 1e-3
    assert cosine[4:] == sorted(cosine[4:], reverse=True)
    wsd = [learning_rate(step, 100, 1.0, "wsd") for step in range(100)]
    assert wsd[:4] == cosine[:4] and wsd[4:80] == [1.0] * 76
    assert wsd[90] == pytest.approx(0.55) and 0.1 < wsd[-1] < 0.15
    assert learning_rate(0, 1, 1.0, "cosine") == 1.0
