"""Speculative decoding block by block, as a server does it: draft, verify, keep the right prefix and one token more.

Greedy throughout. The drafter is a function, the target is a verifier, so that the loop is a pure matter of counting:
what a block yields is the drafted tokens that are the target's own choices, plus the target's next token (the bonus).

Shapes: n committed tokens, m tokens of a block (its anchor first), B rows, S positions, K taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.drafter import Context, Drafter, noise_ids
from trainer.target import Target, is_hybrid

Propose = Callable[[Tensor, int, int], list[int]]
"""(tap states [1, n, K * H] committed since its last call, anchor token, how many to draft) -> drafted tokens."""


class Proposer:
    """A drafter at one prompt: keeps the context keys and values of what is committed, never those of a block."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.drafter, self.target = drafter, target
        self.context: Context = []
        self.length = 0

    @torch.no_grad()
    def __call__(self, states: Tensor, anchor: int, count: int) -> list[int]:
        fresh = self.drafter.context(states, self.length)
        if self.context:
            fresh = [
                (torch.cat([keys, more_keys], 2), torch.cat([values, more_values], 2))
                for (keys, values), (more_keys, more_values) in zip(self.context, fresh, strict=True)
            ]
        self.context, self.length = fresh, self.length + states.shape[1]
        ids = noise_ids(torch.tensor([[anchor]], device=states.device), self.drafter.config)[:, : count + 1]
        noise = self.drafter.embed(ids, self.target.embed_VH)
        hidden = self.drafter(noise, self.context, torch.tensor([[self.length]], device=states.device))
        drafted: list[int] = self.drafter.logits(hidden[0, 1:], self.target.head_VH).argmax(-1).tolist()
        return drafted


class Verifier(Protocol):
    """A target that reads blocks behind a committed prefix."""

    def prefill(self, ids: Sequence[int]) -> tuple[int, Tensor]:
        """Commit a prompt: the first token after it, and its tap states [1, n, K * H]."""

    def verify(self, block: Sequence[int]) -> tuple[list[int], Tensor]:
        """The target's choice after each of the m tokens of a block, and the block's tap states [1, m, K * H]."""

    def keep(self, count: int) -> None:
        """Commit the first `count` tokens of the block just verified and forget the others."""


def _choices(output: Any) -> list[int]:
    chosen: list[int] = output.logits[0].argmax(-1).tolist()
    return chosen


class CachedVerifier:
    """Keeps keys and values and cuts them back: exact where every layer is attention."""

    def __init__(self, target: Target) -> None:
        self.target, self.cache, self.pending = target, None, 0

    def _forward(self, ids: Sequence[int], logits_to_keep: int) -> tuple[list[int], Tensor]:
        ids_1S = torch.tensor([list(ids)], device=self.target.device)
        with torch.no_grad(), self.target.recorded() as found:
            output = self.target.model(
                ids_1S, past_key_values=self.cache, use_cache=True, logits_to_keep=logits_to_keep
            )
        return _choices(output), torch.cat(found, -1)

    def prefill(self, ids: Sequence[int]) -> tuple[int, Tensor]:
        from transformers import DynamicCache

        self.cache = DynamicCache()  # without a config: windowed layers keep everything, so that all can be cut back
        chosen, states = self._forward(ids, 1)
        return chosen[0], states

    def verify(self, block: Sequence[int]) -> tuple[list[int], Tensor]:
        self.pending = len(block)
        return self._forward(block, 0)

    def keep(self, count: int) -> None:
        if self.pending > count:
            self.cache.crop(count - self.pending)  # type: ignore[attr-defined]
        self.pending = 0


class RecomputeVerifier:
    """Reads the whole prefix again for every block: slow, and exact for layers whose running state has no way back."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.ids: list[int] = []
        self.block: list[int] = []

    def _forward(self, ids: Sequence[int], last: int) -> tuple[list[int], Tensor]:
        ids_1S = torch.tensor([list(ids)], device=self.target.device)
        with torch.no_grad(), self.target.recorded() as found:
            output = self.target.model(ids_1S, use_cache=False, logits_to_keep=last)
        return _choices(output), torch.cat(found, -1)

    def prefill(self, ids: Sequence[int]) -> tuple[int, Tensor]:
        self.ids = list(ids)
        chosen, states = self._forward(ids, 1)
        return chosen[0], states

    def verify(self, block: Sequence[int]) -> tuple[list[int], Tensor]:
        self.block = list(block)
        chosen, states = self._forward(self.ids + self.block, len(block))
        return chosen, states[:, len(self.ids) :]

    def keep(self, count: int) -> None:
        self.ids += self.block[:count]


def verifier_for(target: Target) -> Verifier:
    """The fastest exact verifier of a target."""
    return RecomputeVerifier(target) if is_hybrid(target.config) else CachedVerifier(target)


@dataclass(frozen=True, slots=True)
class Decoded:
    """tokens: what followed the prompt, the prefill's token first. accepted: tokens that each block yielded, >= 1."""

    tokens: list[int]
    accepted: list[int]


def _until_stop(tokens: list[int], stops: Collection[int]) -> tuple[list[int], bool]:
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1], True
    return tokens, False


def decode(
    prompt: Sequence[int],
    verifier: Verifier,
    propose: Propose,
    *,
    block_size: int,
    max_new_tokens: int,
    stops: Collection[int] = (),
) -> Decoded:
    """Decode `prompt` speculatively until a stop token (kept) or `max_new_tokens`.

    The last block is cut where the reply ends, so the last token emitted then stands for the bonus: a block that ends
    the reply with d right drafts and no room for a bonus yields d tokens.
    """
    first, states = verifier.prefill(prompt)
    (tokens, stopped), accepted = _until_stop([first], stops), []
    while len(tokens) < max_new_tokens and not stopped:
        room = max_new_tokens - len(tokens)
        drafted = propose(states, tokens[-1], min(block_size - 1, room))
        chosen, block_states = verifier.verify([tokens[-1], *drafted])
        right = next((i for i, token in enumerate(drafted) if token != chosen[i]), len(drafted))
        emitted, stopped = _until_stop([*drafted[:right], chosen[right]][:room], stops)
        verifier.keep(len(emitted))
        states = block_states[:, : len(emitted)]
        tokens += emitted
        accepted.append(len(emitted))
    return Decoded(tokens, accepted)


@torch.no_grad()
def plain_greedy(prompt: Sequence[int], target: Target, max_new_tokens: int, stops: Collection[int] = ()) -> list[int]:
    """What the target alone says: its best token, one forward pass each, with transformers' own cache."""
    tokens: list[int] = []
    ids, cache = torch.tensor([list(prompt)], device=target.device), None
    while len(tokens) < max_new_tokens:
        output: Any = target.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, ids = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(ids))
        if tokens[-1] in stops:
            break
    return tokens


def per_position(accepted: Sequence[int], block_size: int) -> list[float]:
    """Share of blocks with the first k drafted tokens right, k from 1 to block_size - 1: their sum + 1 is the mean."""
    return [sum(count > k for count in accepted) / len(accepted) for k in range(1, block_size)] if accepted else []


@torch.no_grad()
def walk(drafter: Drafter, target: Target, ids_BS: Tensor, loss_BS: Tensor) -> list[list[int]]:
    """Yields of the blocks that serving would have drafted along stored rows: the held-out acceptance.

    From a row's first loss token draft a block, count its right prefix, jump by it and one more; a block ends with the
    loss tokens around its anchor, where the next span begins anew. Uniform anchors would weigh easy stretches too much.
    ids_BS: int64, padded on the right. loss_BS: 1 where the target generated the token, 0 in padding.
    """
    config, device = drafter.config, target.device
    context = drafter.context(target.states(ids_BS))
    rows, loss = ids_BS.tolist(), loss_BS.tolist()
    spans = [list(_spans(mask)) for mask in loss]
    found: list[list[int]] = [[] for _ in rows]
    while any(spans):
        at = [row[0][0] if row else 0 for row in spans]
        tokens = torch.tensor([[row[a]] for row, a in zip(rows, at, strict=True)], device=device)
        noise = drafter.embed(noise_ids(tokens, config), target.embed_VH)
        hidden = drafter(noise, context, torch.tensor(at, device=device)[:, None])
        drafts = drafter.logits(hidden[:, 1:], target.head_VH).argmax(-1).tolist()
        for row, spanned, drafted, counts in zip(rows, spans, drafts, found, strict=True):
            if not spanned:
                continue
            start, end = spanned[0]
            labels = row[start + 1 : min(start + config.block_size, end)]
            right = next((i for i, token in enumerate(labels) if token != drafted[i]), len(labels))
            counts.append(min(right + 1, end - start - 1))  # the bonus, unless the span ends first
            spanned[0] = (start + counts[-1], end)
            if spanned[0][0] >= end - 1:  # a lone last token has nothing to predict
                del spanned[0]
    return found


def _spans(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[start, end) of every run of at least two loss tokens."""
    start = None
    for position, learnt in enumerate([*mask, 0]):
        if learnt and start is None:
            start = position
        elif not learnt and start is not None:
            if position - start > 1:
                yield start, position
            start = None
