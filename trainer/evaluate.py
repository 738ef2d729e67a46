"""What a checkpoint is worth when served: its files, driven block by block on real prompts, against the target alone.

Good training figures with an acceptance near 1 when served are the commonest failure of drafters. So this reads the
exported directory as an engine would, drafts and verifies greedily, and compares every reply with plain greedy decoding
of the target.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenizer import chat, dialects
from tokenizer.encode import Encoder
from tokenizer.job import Exit, JobError, Reject
from tokenizer.read import LineReader
from trainer.blocks import Proposer, decode, per_position, plain_greedy, verifier_for
from trainer.config import DrafterConfig, Specials
from trainer.drafter import Drafter
from trainer.export import load_drafter, read_drafter_config
from trainer.job import EVAL_SCHEMA, EvalArgs
from trainer.target import Target, read_config, resolve, text_config

QUIET = 10.0  # seconds between lines of progress


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Per prompt: `accepted`, the tokens that each block yielded; `lossless`, whether the reply is the target's own;
    `replies`, its tokens.
    """

    accepted: list[list[int]]
    lossless: list[bool]
    replies: list[list[int]]
    block_size: int

    def report(self) -> dict[str, Any]:
        """The JSON object of `eval`. Every figure leaves the prefill and its token out, so a block is a target pass."""
        pooled = [count for prompt in self.accepted for count in prompt]
        if not pooled:
            raise JobError(
                Exit.DATA,
                "no block was drafted: every reply ends with its first token",
                "give other prompts or more tokens",
            )
        tokens, blocks = sum(pooled), len(pooled)
        return {
            "schema": EVAL_SCHEMA,
            "acceptance_length": tokens / blocks,
            "per_position": per_position(pooled, self.block_size),
            "lossless": all(self.lossless),
            "tokens": tokens,
            "blocks": blocks,
            "target_passes": blocks,
            "tokens_per_pass": tokens / blocks,
            "prompts": len(self.accepted),
        }


def evaluate(
    drafter: Drafter, target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, stops: frozenset[int]
) -> Evaluation:
    """Decode every prompt twice: in blocks with the drafter, and one token at a time without it.

    A reply that ends with its first token, which is the prefill's, has no block; such prompts are counted on stderr.
    """
    accepted, lossless, replies = [], [], []
    said = time.monotonic()
    for number, prompt in enumerate(prompts, 1):
        found = decode(
            prompt,
            verifier_for(target),
            Proposer(drafter, target),
            block_size=drafter.config.block_size,
            max_new_tokens=max_new_tokens,
            stops=stops,
        )
        plain = plain_greedy(prompt, target, max_new_tokens, stops)
        accepted.append(found.accepted)
        lossless.append(found.tokens == plain)
        replies.append(found.tokens)
        if found.tokens != plain:
            pairs = zip(found.tokens, plain, strict=False)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(found.tokens)))
            print(f"prompt {number}: differs from plain greedy decoding at token {place}", file=sys.stderr)
        if time.monotonic() - said >= QUIET:
            said = time.monotonic()
            print(f"{number} of {len(prompts)} prompts", file=sys.stderr)
    if not all(accepted):
        print(f"{accepted.count([])} of {len(prompts)} replies end with their first token: no block", file=sys.stderr)
    return Evaluation(accepted, lossless, replies, drafter.config.block_size)


@contextmanager
def tokenizer_files(name: str) -> Iterator[Path]:
    """A directory with the target's tokenizer.json and chat template; made by transformers for a GGUF file or an id."""
    folder = Path(name)
    if (folder / "tokenizer.json").is_file():
        yield folder
        return
    from transformers import AutoTokenizer

    source, where = resolve(name)
    with tempfile.TemporaryDirectory() as made:
        try:
            AutoTokenizer.from_pretrained(source, **where).save_pretrained(made)
        except (OSError, ValueError) as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise JobError(Exit.CONFIG, f"tokenizer of target `{name}`: {why}", "check --target") from error
        yield Path(made)


def _conversation(row: object) -> dialects.Conversation:
    """A row of any dialect; a row that asks and has no answer yet gets a stand-in, which is not used."""
    try:
        return dialects.parse(row)
    except Reject as reject:
        if reject.reason != "no_completion" or not isinstance(row, dict):
            raise
        body = row.get("body")  # a line of a batch request file
        return dialects.parse({**(body if isinstance(body, dict) else row), "completion": "-"})


def prompt_pieces(row: object, renderer: chat.Renderer) -> list[chat.Piece]:
    """What stands before the first assistant turn that is to be generated, as a server would see it. Raises Reject."""
    conversation = _conversation(row)
    if conversation.text is not None:
        rows, rejects = chat.rows(conversation, renderer, chat.ChatOptions())
        if not rows:
            raise rejects[0][1]
        return rows[0].pieces[:1]
    turn = min((index for index, reply in conversation.replies.items() if reply.weight > 0), default=None)
    if turn is None:
        raise Reject("no_supervised_tokens", "every reply has weight 0")
    given = conversation.replies[turn].prompt_token_ids
    if given is not None:
        return [chat.Piece("", given, chat.IDS, False)]
    text = renderer.render(conversation.messages[:turn], conversation.tools, True, conversation.kwargs)
    return [chat.Piece(text, None, chat.PROMPT, False)]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of the lines of a JSONL file that are not blank; plain, gzip or zstd."""
    try:
        with path.open("rb") as file:
            for chunk in LineReader(iter(lambda: file.read(1 << 20), b""), str(path)):
                yield from chunk.numbered()
    except OSError as error:
        raise JobError(Exit.CONFIG, f"prompts `{path}`: {error.strerror}", "name a JSONL file") from error
    except JobError as error:
        raise JobError(error.code, error.message, error.hint.partition(", or leave it out")[0]) from None  # no run here


def read_prompts(path: Path, tokenizer_dir: Path, limit: int) -> list[list[int]]:
    """Token ids of the first `limit` prompts (0: all) of a JSONL file.

    Rows that hold none are counted on stderr by reason, with the line of the first.

    Raises JobError: 65 not one prompt, or no JSON lines; 78 no such file, no chat template.
    """
    renderer, encoder = chat.Renderer.load(tokenizer_dir), Encoder.load(tokenizer_dir, 0)
    prompts: list[list[int]] = []
    skipped: Counter[str] = Counter()
    first: dict[str, int] = {}
    for number, raw in _lines(path):
        if limit and len(prompts) == limit:
            break
        try:
            pieces = prompt_pieces(dialects.loads(raw), renderer)
            encoded = encoder.encode([chat.TextRow(0, pieces, [], None)])
            if encoded.rejects:
                raise encoded.rejects[0]
            prompts.append(encoded.ids.tolist())
        except Reject as reject:
            skipped[reject.reason] += 1
            first.setdefault(reject.reason, number)
    if skipped:
        reasons = ", ".join(f"{reason} {count} (line {first[reason]})" for reason, count in sorted(skipped.items()))
        print(f"skipped {skipped.total()} rows of `{path}`: {reasons}", file=sys.stderr)
    if not prompts:
        raise JobError(Exit.DATA, f"`{path}` holds no prompt", "rows need messages or a prompt, as for tokenize")
    return prompts


def check_pair(config: DrafterConfig, target: Any) -> None:
    """Raises JobError(78) naming what a drafter and a target's config do not share."""
    text = text_config(target)
    for ours, theirs in (
        ("hidden_size", "hidden_size"),
        ("num_target_layers", "num_hidden_layers"),
        ("vocab_size", "vocab_size"),
    ):
        drafted, found = getattr(config, ours), getattr(text, theirs, None)
        if drafted != found:
            raise JobError(
                Exit.CONFIG,
                f"{ours} is {drafted} in the drafter, {found} in the target",
                "name the target that the drafter was trained on",
            )


def stop_tokens(target: Target, tokenizer_dir: Path) -> frozenset[int]:
    """Ids that end a reply when served: the model's own, the tokenizer's, and end-of-turn tokens."""
    named = Specials.read(tokenizer_dir).named
    found = set(named.get("eos", ())) | set(named["end of turn"])
    for config in (target.config, getattr(target.model, "generation_config", None)):
        told = getattr(config, "eos_token_id", None)
        found.update(told if isinstance(told, list) else [] if told is None else [told])
    return frozenset(found)


def run(args: EvalArgs) -> None:
    """The verb `eval`: one JSON object on stdout."""
    from transformers.utils.logging import disable_progress_bar

    if args.max_new_tokens < 2:
        raise JobError(Exit.USAGE, f"--max-new-tokens {args.max_new_tokens} leaves nothing to draft", "give at least 2")
    if not sys.stderr.isatty():
        disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    checkpoint = Path(args.checkpoint)
    config = read_drafter_config(checkpoint)
    check_pair(config, read_config(args.target))
    with tokenizer_files(args.target) as tokenizer_dir:
        prompts = read_prompts(Path(args.prompts), tokenizer_dir, args.num_prompts)
        drafter = load_drafter(checkpoint, dtype=dtype, device=device).eval()
        target = Target.load(args.target, config.target_layer_ids, dtype=dtype, device=device, truncate=False)
        stops = stop_tokens(target, tokenizer_dir)
    print(json.dumps(evaluate(drafter, target, prompts, args.max_new_tokens, stops).report()))
