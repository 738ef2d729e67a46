"""A whole training with our loss and with speculators', all else equal: what the drafters are worth on held-out rows.

    python benchmarks/train_run.py --target DIR_OR_GGUF [--steps 80] [--seeds 3]

The target is SmolLM2-135M, the rows are its own greedy completions (examples/completions). Both start from the same
weights, see the same rows in the same order with as many anchors, and have the same optimiser and schedule; only the
loss differs: its anchors, labels, weights and normalisation. What is measured is the walk over the held-out rows: what
serving would accept. Each training runs in a process of its own, with one thread.
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent  # its tokenize.py would stand in for the standard library's
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != HERE)]

import argparse
import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from tokenizer import chat, dialects
from tokenizer.encode import Encoder
from trainer.blocks import walk
from trainer.config import DrafterConfig, Specials, derive
from trainer.data import mix
from trainer.drafter import Drafter
from trainer.evaluate import tokenizer_files
from trainer.loss import Objective, block_loss, default_gamma, sample_anchors
from trainer.optim import AdamW, learning_rate
from trainer.target import Target, read_config

BLOCK, LAYERS, ANCHORS, BATCH, LENGTH, RATE = 8, 2, 12, 4, 128, 2e-3
Loss = Callable[["Rows", int], Tensor]


@dataclass(frozen=True)
class Rows:
    """Right-padded rows and what the target says of them: taps [B, S, K * H], final hidden states [B, S, H]."""

    names: list[str]
    ids: Tensor
    mask: Tensor
    taps: Tensor
    last: Tensor


@dataclass(frozen=True)
class Setting:
    config: DrafterConfig
    embed: Tensor
    head: Tensor
    train: list[Rows]  # one row each
    held_out: list[Rows]


def read_rows(folder: Path, limit: int) -> list[tuple[str, list[int], list[int]]]:
    """Name, tokens and loss mask of the demo's single-turn completions, cut at LENGTH tokens."""
    renderer, encoder = chat.Renderer.load(folder), Encoder.load(folder, 0)
    rows = []
    for path in sorted((HERE.parent / "examples" / "completions").glob("*.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            found, _ = chat.rows(dialects.parse(dialects.loads(line)), renderer, chat.ChatOptions())
            if found:
                encoded = encoder.encode(found[:1])
                mask = encoded.mask.tolist()[:LENGTH]
                if sum(mask) > BLOCK:
                    rows.append((f"{path.name}:{number}", encoded.ids.tolist()[:LENGTH], mask))
    return sorted(rows, key=lambda row: blake2b(row[0].encode()).digest())[:limit]


def setting(name: str, limit: int) -> Setting:
    """The target's part, computed once: every fifth row is held out."""
    with tokenizer_files(name) as folder:
        rows, specials = read_rows(folder, limit), Specials.read(folder)
    used = {token for _, ids, _ in rows for token in ids}
    choice = derive(read_config(name).to_dict(), specials, {"block_size": BLOCK, "num_hidden_layers": LAYERS}, used)
    target = Target.load(name, choice.config.target_layer_ids, dtype=torch.float32, truncate=False)
    made = []
    for row_name, ids, mask in rows:
        one = torch.tensor([ids])
        with torch.no_grad(), target.recorded() as found:
            last = target.body(input_ids=one, use_cache=False).last_hidden_state
        made.append(Rows([row_name], one, torch.tensor([mask]), torch.cat(found, -1), last))
    held_out = made[::5]
    train = [row for number, row in enumerate(made) if number % 5]
    return Setting(choice.config, target.embed_VH.clone(), target.head_VH.clone(), train, held_out)


def stack(rows: list[Rows]) -> Rows:
    """Some rows as one right-padded batch."""
    width = max(row.ids.shape[1] for row in rows)

    def pad(tensor: Tensor) -> Tensor:
        shape = [0, 0] * (tensor.ndim - 2) + [0, width - tensor.shape[1]]
        return nn.functional.pad(tensor, shape)

    parts = [[pad(getattr(row, name)) for row in rows] for name in ("ids", "mask", "taps", "last")]
    return Rows([row.names[0] for row in rows], *(torch.cat(part) for part in parts))


def ours(s: Setting, drafter: Drafter, seed: int) -> tuple[nn.Module, Loss]:
    objective = Objective(default_gamma(BLOCK))

    def loss(rows: Rows, step: int) -> Tensor:
        anchors, keep = sample_anchors(rows.mask, rows.names, seed=seed, epoch=step, count=ANCHORS)
        found = block_loss(drafter, rows.taps, rows.ids, rows.mask, anchors, keep, s.embed, s.head, objective)
        return found.total / found.divisor

    return drafter, loss


def speculators(s: Setting, drafter: Drafter, seed: int) -> tuple[nn.Module, Loss]:
    """Its model with our initial weights; a batch is one packed row with document marks, as it trains."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    layer = Qwen3Config(**s.config.to_dict())
    layer._attn_implementation = "sdpa"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=s.config.vocab_size,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[tap + 1 for tap in s.config.target_layer_ids],
        mask_token_id=s.config.mask_token_id,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model = DFlashDraftModel(config)
    missing = model.load_state_dict(drafter.state_dict(), strict=False)
    assert not missing.unexpected_keys, missing
    embed = nn.Embedding.from_pretrained(s.embed, freeze=True)
    head = nn.Linear(1, 1, bias=False, device="meta")
    head.weight = nn.Parameter(s.head, requires_grad=False)
    model.embed_tokens, model.lm_head, model.verifier_lm_head = embed, head, head
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in drafter.state_dict())
    criterion = resolve_loss_config("ce", "eager")

    def loss(rows: Rows, step: int) -> Tensor:
        torch.manual_seed(seed * 100003 + step)  # it draws its anchors from the global generator
        real = [int(n) for n in (rows.ids != 0).long().cumsum(1).argmax(1) + 1]

        def pack(tensor: Tensor) -> Tensor:
            return torch.cat([tensor[place, :length] for place, length in enumerate(real)])[None]

        documents = torch.cat([torch.full((n,), place) for place, n in enumerate(real)])[None]
        count = ANCHORS * len(real)
        found = model(
            pack(rows.taps), pack(rows.ids), pack(rows.mask), pack(rows.last), documents,
            loss_config=criterion, gamma=default_gamma(BLOCK), max_anchors=count,
        )  # fmt: skip
        result: Tensor = found[1]
        return result

    return model, loss


BUILD = {"ours": ours, "speculators": speculators}


def train(name: str, s: Setting, seed: int, steps: int) -> dict[str, Any]:
    """One training; figures of it."""
    warnings.filterwarnings("ignore")
    drafter = Drafter(s.config).init(seed)
    model, loss = BUILD[name](s, drafter, seed)
    trained = nn.ParameterDict({n.replace(".", "/"): p for n, p in model.named_parameters() if p.requires_grad})
    optimizer = AdamW(trained)
    Path("/proc/self/clear_refs").write_text("5")
    base, began, spent, wall = resident("VmRSS"), time.process_time(), [], time.monotonic()
    per_epoch = len(s.train) // BATCH
    for step in range(steps):
        epoch, within = divmod(step, per_epoch)
        order = mix(seed, epoch, torch.arange(len(s.train)).numpy()).argsort()
        rows = stack([s.train[place] for place in order[within * BATCH : (within + 1) * BATCH]])
        began = time.process_time()
        value = loss(rows, step)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.collect()
        optimizer.step(learning_rate(step, steps, RATE, "cosine"), 1.0)
        spent.append(time.process_time() - began)
    peak = resident("VmHWM") - base
    weights = {key.replace("/", "."): parameter.detach() for key, parameter in trained.items()}
    drafter.load_state_dict(weights)
    return {
        "cpu_s": statistics.median(spent),
        "wall_s": (time.monotonic() - wall) / steps,
        "peak_mb": peak / 1e6,
        "loss": float(value),
        "yields": held_out(s, drafter.eval()),
    }


class Known:
    """The target of rows whose states are there already."""

    def __init__(self, s: Setting, taps: Tensor) -> None:
        self.embed_VH, self.head_VH, self.taps, self.device = s.embed, s.head, taps, taps.device

    def states(self, ids: Tensor) -> Tensor:
        return self.taps


def held_out(s: Setting, drafter: Drafter) -> list[list[int]]:
    return [walk(drafter, Known(s, row.taps), row.ids, row.mask)[0] for row in s.held_out]  # type: ignore[arg-type]


def resident(field: str) -> int:
    """Bytes: VmRSS now, VmHWM the peak since it was cleared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def forked(body: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `body` returns in a process of its own, so that its memory is its own."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(source)
            with os.fdopen(sink, "w") as file:
                json.dump(body(), file)
            code = 0
        finally:
            os._exit(code)
    os.close(sink)
    with os.fdopen(source) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise SystemExit("a training failed; its words are above")
    found: dict[str, Any] = json.loads(text)
    return found


def tau(yields: list[list[int]]) -> float:
    pooled = [count for row in yields for count in row]
    return sum(pooled) / len(pooled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="SmolLM2-135M-Instruct: a directory or GGUF file")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=160)
    args = parser.parse_args()
    torch.set_num_threads(1)
    s = setting(args.target, args.rows)
    print(
        f"{len(s.train)} rows, {len(s.held_out)} held out, {args.steps} steps of {BATCH} rows, {ANCHORS} anchors a row"
    )
    print(f"{'':14}{'seed':>5}{'tau':>8}{'loss':>8}{'CPU s a step':>14}{'wall s':>9}{'peak MB':>9}", flush=True)
    differences: list[float] = []
    for seed in range(args.seeds):
        found = {}
        for name in BUILD:
            f = found[name] = forked(lambda name=name, seed=seed: train(name, s, seed, args.steps))
            figures = f"{tau(f['yields']):8.3f}{f['loss']:8.3f}{f['cpu_s']:14.3f}{f['wall_s']:9.3f}{f['peak_mb']:9.0f}"
            print(f"{name:14}{seed:>5}{figures}", flush=True)
        pairs = zip(found["ours"]["yields"], found["speculators"]["yields"], strict=True)
        differences += [statistics.mean(one) - statistics.mean(other) for one, other in pairs]
    mean, error = statistics.mean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
    low, high = mean - 2 * error, mean + 2 * error
    print(f"ours - speculators, tau of a held-out row: {mean:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}")


if __name__ == "__main__":
    main()
