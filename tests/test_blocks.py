"""The block loop: lossless by construction, and every block's yield counted as z-lab's loop counts it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import llama, qwen3, qwen35
from transformers import DynamicCache

from trainer.blocks import CachedVerifier, RecomputeVerifier, decode, per_position, plain_greedy, verifier_for
from trainer.target import Target

TAPS = (1, 3)
STATES = torch.zeros(1, 1, 1)


def rule(tokens):
    """A target for the loop alone: the next token follows from all before it."""
    return (sum(tokens) * 31 + len(tokens)) % 17


class Rule:
    def __init__(self):
        self.ids, self.block = [], []

    def prefill(self, ids):
        self.ids = list(ids)
        return rule(self.ids), STATES

    def verify(self, block):
        self.block = list(block)
        return [rule(self.ids + self.block[: i + 1]) for i in range(len(block))], STATES.expand(1, len(block), 1)

    def keep(self, count):
        self.ids += self.block[:count]


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 16), min_size=1, max_size=5),
    rights=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    block_size=st.integers(2, 8),
    budget=st.integers(1, 40),
    stops=st.sets(st.integers(0, 16), max_size=2),
)
def test_any_drafter_leaves_the_text_alone(prompt, rights, block_size, budget, stops):
    asked = []

    def propose(_states, _anchor, count):
        """Right for as many tokens as the script says, wrong behind them."""
        right, known, drafted = rights[len(asked) % len(rights)], list(verifier.ids), []
        known.append(_anchor)
        for i in range(count):
            drafted.append(rule(known + drafted) if i < right else 99)
        asked.append(min(right, count))
        return drafted

    verifier = Rule()
    found = decode(prompt, verifier, propose, block_size=block_size, max_new_tokens=budget, stops=stops)

    expected = []
    while len(expected) < budget and not (expected and expected[-1] in stops):
        expected.append(rule(prompt + expected))
    assert found.tokens == expected
    assert sum(found.accepted) == len(expected) - 1  # the first token is the prefill's
    assert all(1 <= count <= block_size for count in found.accepted)
    assert [a for a in found.accepted[:-1]] == [right + 1 for right in asked[:-1]]
    assert verifier.ids == prompt + expected[:-1]  # the last token is not yet read
    shares = per_position(found.accepted, block_size)
    if found.accepted:
        assert len(shares) == block_size - 1 and shares == sorted(shares, reverse=True)
        assert 1 + sum(shares) == pytest.approx(sum(found.accepted) / len(found.accepted))


def test_what_a_block_counts():
    """Two blocks of 4, one of them all right with its bonus, one with its second draft wrong."""
    assert per_position([4, 2], 4) == [1.0, 0.5, 0.5]
    assert per_position([], 4) == []


def oracle(target, prompt, count):
    """A proposer that knows the reply and spoils every third draft."""
    known, gathered = plain_greedy(prompt, target, count), []

    def propose(states, anchor, wanted):
        gathered.append(states)
        at = sum(some.shape[1] for some in gathered) - len(prompt)
        assert known[at] == anchor
        drafts = (known[at + 1 : at + 1 + wanted] + [0] * wanted)[:wanted]
        return [(token + 1) % 96 if (at + i) % 3 == 2 else token for i, token in enumerate(drafts)]

    return known, propose, gathered


@pytest.mark.parametrize(
    ("build", "kind"),
    [(qwen3, CachedVerifier), (llama, CachedVerifier), (qwen35, RecomputeVerifier)],
    ids=["qwen3", "llama", "qwen3_5"],
)
def test_verifiers_are_exact_after_every_cut(build, kind):
    """Tap states gathered over many roll-backs are those of one pass over the final text."""
    target, prompt = Target.wrap(build(), TAPS), [5, 9, 33, 2, 71]
    verifier = verifier_for(target)
    assert type(verifier) is kind
    known, propose, gathered = oracle(target, prompt, 40)
    found = decode(prompt, verifier, propose, block_size=6, max_new_tokens=40)
    assert found.tokens == known
    assert max(found.accepted) > 1 and min(found.accepted) < 6
    text = torch.tensor([prompt + known])
    states = torch.cat(gathered, 1)
    assert states.shape[1] > len(prompt) + 20
    torch.testing.assert_close(states, target.states(text)[:, : states.shape[1]], rtol=1e-4, atol=1e-4)


def test_a_cut_cache_is_wrong_for_a_hybrid_target():
    """The reason for the recompute verifier: the running state of GatedDeltaNet has no way back.

    Once transformers rolls it back this fails, and the recompute verifier can go.
    """
    model, prompt = qwen35(), torch.tensor([[5, 9, 33, 2, 71]])
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(prompt, past_key_values=cache)
    model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
    cache.crop(-3)
    after = model(torch.tensor([[8]]), past_key_values=cache).logits[0, -1]
    fresh = model(torch.cat([prompt, torch.tensor([[8]])], 1)).logits[0, -1]
    assert (after - fresh).abs().max() > 1e-3


def test_plain_greedy_is_generate():
    for build in (qwen3, qwen35):
        model, prompt = build(), [5, 9, 33, 2, 71]
        model.generation_config.eos_token_id = None
        reference = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
        assert plain_greedy(prompt, Target.wrap(model, TAPS), 20) == reference.tolist()
    stop = reference[3].item()
    assert plain_greedy(prompt, Target.wrap(model, TAPS), 20, {stop})[-1] == stop
