"""Learning from end to end on a laptop: SmolLM2-135M as the target, a small drafter, a few CPU minutes.

    python examples/overfit_smollm2.py --target DIR_OR_GGUF [--steps 200] [--out DIR]

Tokenizes the demo's code questions (with greedy replies of the same model), reads the target's tap states once, trains
a drafter of two layers on a handful of rows, exports it, and serves the export on the rows it was trained on and on
prompts it has never seen, with an untrained drafter beside it. Overfitting on purpose: it proves that labels, masks,
positions, taps and export agree, since one of them wrong leaves the acceptance length near 1.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tokenizer import chat, dialects  # noqa: E402
from tokenizer.encode import Encoder  # noqa: E402
from trainer.blocks import Proposer, decode, verifier_for, walk  # noqa: E402
from trainer.config import Specials, derive  # noqa: E402
from trainer.drafter import Drafter  # noqa: E402
from trainer.evaluate import evaluate, stop_tokens, tokenizer_files  # noqa: E402
from trainer.export import load_drafter, write_zlab  # noqa: E402
from trainer.loss import Objective, block_loss, default_gamma, sample_anchors  # noqa: E402
from trainer.target import Target, read_config  # noqa: E402

TRAIN, REPLY = 16, 48  # rows to train on, tokens of a reply that are used
BLOCK, ANCHORS, BATCH, RATE, WARM = 8, 8, 4, 2e-3, 15
T_95 = {7: 2.365, 15: 2.131}  # Student's t by degrees of freedom, two-sided


class Row(NamedTuple):
    """A prompt and its reply, cut: token ids and which of them the target generated."""

    ids: list[int]
    mask: list[int]
    prompt: int  # tokens before the reply


@dataclass(frozen=True)
class Data:
    train: list[Row]
    held_out: list[Row]


def read_rows(tokenizer_dir: Path) -> Data:
    """The demo's code questions: TRAIN rows to train on, the others held out; replies cut at REPLY tokens."""
    renderer, encoder = chat.Renderer.load(tokenizer_dir), Encoder.load(tokenizer_dir, 0)
    rows = []
    for line in (ROOT / "examples/completions/code.jsonl").read_bytes().splitlines():
        found, _ = chat.rows(dialects.parse(dialects.loads(line)), renderer, chat.ChatOptions())
        encoded = encoder.encode(found)
        prompt = encoded.mask.tolist().index(1)
        end = min(len(encoded.ids), prompt + REPLY)
        rows.append(Row(encoded.ids[:end].tolist(), encoded.mask[:end].tolist(), prompt))
    return Data(rows[:TRAIN], rows[TRAIN:])


def padded(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 and loss mask [B, S], padded on the right with zeros."""
    width = max(len(row.ids) for row in rows)
    ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in rows])
    return ids, torch.tensor([row.mask + [0] * (width - len(row.mask)) for row in rows])


def rate(step: int, steps: int) -> float:
    """Cosine with warm-up."""
    return RATE * min(1.0, (step + 1) / WARM) * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(drafter: Drafter, target: Target, rows: list[Row], steps: int) -> float:
    """Trains in place; returns the last loss."""
    ids, mask = padded(rows)
    states = torch.cat([target.states(part) for part in ids.split(BATCH)])  # frozen: read once
    objective = Objective(default_gamma(BLOCK))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=RATE, weight_decay=0.0, betas=(0.9, 0.95))
    per_epoch = len(rows) // BATCH
    value, started = math.nan, time.monotonic()
    for step in range(steps):
        epoch, turn = divmod(step, per_epoch)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
        chosen = order[turn * BATCH : (turn + 1) * BATCH]
        anchors, keep = sample_anchors(mask[chosen], [str(i) for i in chosen], seed=0, epoch=epoch, count=ANCHORS)
        taps, tokens, learnt = states[chosen], ids[chosen], mask[chosen]
        part = block_loss(drafter, taps, tokens, learnt, anchors, keep, target.embed_VH, target.head_VH, objective)
        loss = part.total / part.divisor
        value = loss.item()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: loss {value:.3f}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return value


def interval(accepted: list[list[int]]) -> tuple[float, float, float]:
    """Mean over prompts of the acceptance length, and the ends of its 95 % interval."""
    taus = [sum(blocks) / len(blocks) for blocks in accepted if blocks]
    mean = statistics.fmean(taus)
    half = T_95[len(taus) - 1] * statistics.stdev(taus) / math.sqrt(len(taus))
    return mean, mean - half, mean + half


def learn(name: str, out: Path, steps: int) -> dict[str, object]:
    """Train, export to `out` and serve; the figures as a JSON object."""
    cpu = time.process_time()
    with tokenizer_files(name) as folder:
        data = read_rows(folder)
        specials = Specials.read(folder)
        used = {token for row in data.train for token in row.ids}
        overrides = {"block_size": BLOCK, "num_hidden_layers": 2}
        choice = derive(read_config(name).to_dict(), specials, overrides, used)
        target = Target.load(name, choice.config.target_layer_ids, dtype=torch.float32, truncate=False)
        stops = stop_tokens(target, folder)
    drafter = Drafter(choice.config).init(0)
    untrained = walk(drafter.eval(), target, *padded(data.held_out))
    started = time.process_time()
    loss = train(drafter.train(), target, data.train, steps)
    trained = time.process_time() - started
    write_zlab(drafter, out, {"example": "overfit_smollm2", "steps": steps})
    drafter = load_drafter(out).eval()

    def prompts(rows: list[Row]) -> list[list[int]]:
        return [row.ids[: row.prompt] for row in rows]

    on_train = evaluate(drafter, target, prompts(data.train), REPLY, stops)
    served = [
        decode(
            prompt,
            verifier_for(target),
            Proposer(drafter, target),
            block_size=BLOCK,
            max_new_tokens=REPLY,
            stops=stops,
        ).accepted
        for prompt in prompts(data.held_out)
    ]
    return {
        "config": choice.lines(),
        "steps": steps,
        "loss": loss,
        "train": on_train.report(),
        "train_walk": interval(walk(drafter, target, *padded(data.train))),
        "held_out": interval(served),
        "held_out_walk": interval(walk(drafter, target, *padded(data.held_out))),
        "untrained_walk": interval(untrained),
        "train_cpu_s": trained,
        "cpu_s": time.process_time() - cpu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(learn(args.target, args.out or Path(folder) / "export", args.steps), indent=2))


if __name__ == "__main__":
    main()
