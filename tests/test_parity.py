"""The same weights through the peers' own code: z-lab's model for the forward pass, SpecForge's for loss and gradients."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers

from trainer.config import FULL, SLIDING, DrafterConfig
from trainer.drafter import noise_ids
from trainer.loss import Objective, block_loss, uniform_tau


def peer_config(c: DrafterConfig) -> Any:
    config = transformers.Qwen3Config(**c.to_dict())
    config._attn_implementation = "sdpa"
    return config


def load(model: torch.nn.Module, ours: torch.nn.Module) -> Any:
    missing, unexpected = model.load_state_dict(ours.state_dict(), strict=False)
    assert not missing and not unexpected
    return model


LAYOUTS = {
    "full": {"layer_types": (FULL,) * 3, "sliding_window": None},
    "sliding": {"layer_types": (SLIDING,) * 3},
    "mixed": {},
    "window shorter than a block": {"sliding_window": 4},
    "causal everywhere": {"is_causal": True},
    "bidirectional windows": {"is_causal": False, "sliding_window": 4},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, 5, 40])
def test_forward_equals_zlab(layout: str, length: int) -> None:
    zlab = tiny.peer("dflash.model")
    c = tiny.config(**LAYOUTS[layout])
    ours = tiny.drafter(c, torch.float64)
    theirs = load(zlab.DFlashDraftModel(peer_config(c)).double(), ours)
    g = torch.Generator().manual_seed(length)
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        ours, theirs = ours.to(dtype), theirs.to(dtype)
        taps = torch.randn(1, length, 3 * c.hidden_size, generator=g, dtype=dtype)
        for block in (c.block_size, 2):  # the last block of a reply may be shorter
            noise = torch.randn(1, block, c.hidden_size, generator=g, dtype=dtype)
            with torch.no_grad():
                one = ours(noise, ours.context(taps), torch.tensor([[length]]))
                positions = torch.arange(length + block)[None]
                other = theirs(position_ids=positions, noise_embedding=noise, target_hidden=taps)
            assert (one - other).abs().max() <= bound * other.abs().max()


def test_optional_keys_are_read_as_zlab_reads_them() -> None:
    zlab = tiny.peer("dflash.model")
    c = tiny.config(input_embedding_scale=5.0, output_multiplier=0.5, final_logit_softcapping=3.0)
    ours = tiny.drafter(c, torch.float64)
    theirs = load(zlab.DFlashDraftModel(peer_config(c)).double(), ours)
    b = tiny.batch(c, torch.float64)
    head = torch.nn.Linear(c.hidden_size, c.vocab_size, bias=False, dtype=torch.float64)
    head.weight.data = b.head
    hidden = 3 * torch.randn(4, c.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(hidden, b.head), theirs.compute_logits(hidden, head))
    target = torch.nn.Module()
    embedding = torch.nn.Embedding.from_pretrained(b.embed)
    target.get_input_embeddings = lambda: embedding  # type: ignore[assignment]
    ids = noise_ids(b.ids.gather(1, b.anchors), c)
    scale = float(zlab._draft_value(theirs.config, "input_embedding_scale", 1.0))
    assert torch.equal(ours.embed(ids, b.embed), zlab._raw_input_embeddings(target, ids, scale))


@pytest.mark.parametrize(
    ("layout", "objective", "peer"),
    [
        ("full", Objective(7.0), {}),
        ("mixed", Objective(4.0), {}),
        ("sliding", Objective(7.0), {}),
        ("mixed", Objective(7.0, dpace=0.5), {"loss_type": "dpace"}),
        ("full", Objective(7.0, dpace=0.2), {"loss_type": "dpace", "dpace_alpha": 0.2}),
    ],
)
def test_loss_and_every_gradient_equal_specforge(layout: str, objective: Objective, peer: dict[str, Any]) -> None:
    family = tiny.peer("specforge.algorithms.common.dflash_family_model")
    draft = tiny.peer("specforge.modeling.draft.dflash")
    c = tiny.config(**LAYOUTS[layout])
    ours, b = tiny.drafter(c), tiny.batch(c)
    theirs = load(draft.DFlashDraftModel(peer_config(c)), ours)
    embed = torch.nn.Embedding.from_pretrained(b.embed, freeze=True)
    head = torch.nn.Linear(c.hidden_size, c.vocab_size, bias=False)
    head.weight = torch.nn.Parameter(b.head, requires_grad=False)
    step = family.OnlineDFlashModel(
        theirs, head, embed, c.mask_token_id, c.block_size, "sdpa", b.anchors.shape[1], objective.gamma, 5, **peer
    )
    step._sample_anchor_positions = lambda *_: (b.anchors, b.keep)
    loss, accuracy, _ = step(b.ids, b.taps, b.mask.float())
    loss.backward()
    out = block_loss(
        ours, b.taps, b.ids, b.mask, b.anchors, b.keep, b.embed, b.head, objective, chunk_elements=7 * c.vocab_size
    )
    (out.total / out.divisor).backward()
    assert abs(float(loss.detach()) / float((out.total / out.divisor).detach()) - 1) <= 1e-5
    assert float(out.table[1].sum() / out.table[0].sum()) == pytest.approx(float(accuracy))
    for name, parameter in theirs.named_parameters():
        grad = dict(ours.named_parameters())[name].grad
        assert grad is not None and parameter.grad is not None
        assert (grad - parameter.grad).abs().max() <= 1e-5 * parameter.grad.abs().max(), name


@pytest.mark.slow
def test_the_benchmark_measures_every_implementation() -> None:
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "train_step.py"
    command = [sys.executable, str(script), "--config", "tiny", "--rounds", "1", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line}
    for name in ("ours", "specforge", "speculators"):
        if importlib.util.find_spec(name) is None and name != "ours":
            assert rows[f"{name}:"][0] == "skipped,"
        else:
            assert rows[name][-1] == rows["ours"][-1]  # as many trainable parameters
    assert "bare matrix products" in done.stdout


def test_uniform_tau_equals_specforge_accept_length() -> None:
    family = tiny.peer("specforge.algorithms.common.dflash_family_model")
    c = tiny.config()
    ours, b = tiny.drafter(c), tiny.batch(c)
    with torch.no_grad():
        context = ours.context(b.taps)
        noise = ours.embed(noise_ids(b.ids.gather(1, b.anchors), c), b.embed)
        drafted = ours.logits(ours(noise, context, b.anchors), b.head).argmax(-1).view(2, -1, c.block_size)[..., 1:]
        mask = torch.ones_like(b.mask)
        mask[1, 38:] = 0
        ids = b.ids.clone()  # let most of the drafted tokens be right
        for row in range(2):
            for a in b.anchors[row, ::3].tolist():
                block = b.anchors[row].tolist().index(a)
                end = min(a + c.block_size, ids.shape[1])
                ids[row, a + 1 : end] = drafted[row, block, : end - a - 1]
                ids[row, a] = b.ids[row, a]
        out = block_loss(ours, b.taps, ids, mask, b.anchors, b.keep, b.embed, b.head, Objective(7.0))
        context = ours.context(b.taps)
        noise = ours.embed(noise_ids(ids.gather(1, b.anchors), c), b.embed)
        drafted = ours.logits(ours(noise, context, b.anchors), b.head).argmax(-1).view(2, -1, c.block_size)
    places = b.anchors[..., None] + torch.arange(c.block_size)
    inside = (places < ids.shape[1]) & b.keep[..., None]
    safe = places.clamp(max=ids.shape[1] - 1).flatten(1)
    labels, learnt = (t.gather(1, safe).view_as(places) for t in (ids, mask.long()))
    valid = inside & (learnt > 0)
    theirs = family.compute_accept_len(drafted[..., 1:], labels[..., 1:], valid[..., 1:])
    assert float(theirs.sum()) > 0
    assert uniform_tau(out.table) == pytest.approx(1 + float(theirs.sum() / b.keep.sum()))
