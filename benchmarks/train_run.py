"""A whole training with our loss and with speculators', all else equal: what the drafters are worth on held-out rows.

    python benchmarks/train_run.py --target DIR [--steps 400] [--seeds 3]

The target is SmolLM2-135M, the rows are its own greedy replies to made-up questions, written once (some CPU minutes)
and kept in .cache. Both start from the same weights, see the same rows in the same order with as many anchors, and have
the same optimiser and schedule; only the loss differs: its anchors, labels, weights and normalisation. What is measured
is the walk over the held-out rows: what serving would accept. Another seed is another order and other anchors, so the
interval that decides is over seeds, in pairs. Each training runs in a process of its own, with one thread, the sides in
turn; a fifth of the steps pass before seconds are taken.
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

BLOCK, LAYERS, ANCHORS, BATCH, LENGTH, RATE = 8, 2, 8, 2, 192, 2e-3
REPLY, MAKE = 144, 16  # tokens of a reply at most, rows that are made at once
THINGS = (
    "rain", "bread", "a compass", "the moon", "soap", "a bridge", "honey", "the heart", "a volcano", "glass",
    "a clock", "the ocean", "a forest", "electricity", "music", "a magnet", "coffee", "an island", "a train", "paper",
    "the sun", "a desert", "cheese", "a river", "the brain", "a market", "snow", "a library", "gold", "a garden",
)  # fmt: skip
QUESTIONS = (
    "Explain {} in a few sentences.", "Write a short poem about {}.", "Give three facts about {}.",
    "Why do people like {}?", "Tell a story about {}.", "How would you describe {} to a child?",
    "What is {} used for?", "Write a question about {} and answer it.",
)  # fmt: skip
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # 97.5 %, 1 to 10 degrees of freedom
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


def write_replies(name: str, path: Path) -> None:
    """The target's greedy replies to every question about every thing, one JSON line each, as a server logs them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    tokenizer.pad_token = "<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chats = [[{"role": "user", "content": shape.format(thing)}] for thing in THINGS for shape in QUESTIONS]
    lines = []
    for start in range(0, len(chats), MAKE):
        part = chats[start : start + MAKE]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in part]
        given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            made = model.generate(**given, max_new_tokens=REPLY, do_sample=False, pad_token_id=end, eos_token_id=end)
        for messages, ids in zip(part, made[:, given.input_ids.shape[1] :].tolist(), strict=True):
            reply = tokenizer.decode(ids[: ids.index(end)] if end in ids else ids)
            row = {"messages": [*messages, {"role": "assistant", "content": reply}]}
            lines.append(json.dumps(row | {"finish_reason": "stop" if end in ids else "length"}) + "\n")
        print(f"made {len(lines)} of {len(chats)} rows", flush=True)
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_suffix(".part")
    fresh.write_text("".join(lines), "utf-8")
    fresh.rename(path)


def read_rows(path: Path, folder: Path) -> list[tuple[str, list[int], list[int]]]:
    """Name, tokens and loss mask of each row, cut at LENGTH tokens, in an order of their own."""
    renderer, encoder = chat.Renderer.load(folder), Encoder.load(folder, 0)
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        found, _ = chat.rows(dialects.parse(dialects.loads(line)), renderer, chat.ChatOptions())
        encoded = encoder.encode(found[:1])
        mask = encoded.mask.tolist()[:LENGTH]
        if sum(mask) > BLOCK:
            rows.append((f"{path.name}:{number}", encoded.ids.tolist()[:LENGTH], mask))
    return sorted(rows, key=lambda row: blake2b(row[0].encode()).digest())


def setting(name: str) -> Setting:
    """The target's part, computed once: every fourth row is held out."""
    replies = HERE.parent / ".cache" / f"train_run-{REPLY}.jsonl"
    if not replies.is_file():
        write_replies(name, replies)
    with tokenizer_files(name) as folder:
        rows, specials = read_rows(replies, folder), Specials.read(folder)
    used = {token for _, ids, _ in rows for token in ids}
    choice = derive(read_config(name).to_dict(), specials, {"block_size": BLOCK, "num_hidden_layers": LAYERS}, used)
    target = Target.load(name, choice.config.target_layer_ids, dtype=torch.float32, truncate=False)
    made = []
    for row_name, ids, mask in rows:
        one = torch.tensor([ids])
        with torch.no_grad(), target.recorded() as found:
            last = target.body(input_ids=one, use_cache=False).last_hidden_state
        made.append(Rows([row_name], one, torch.tensor([mask]), torch.cat(found, -1), last))
    train = [row for number, row in enumerate(made) if number % 4]
    return Setting(choice.config, target.embed_VH.clone(), target.head_VH.clone(), train, made[::4])


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
    base, spent, walls = resident("VmRSS"), [], []
    per_epoch = len(s.train) // BATCH
    for step in range(steps):
        epoch, within = divmod(step, per_epoch)
        order = mix(seed, epoch, torch.arange(len(s.train)).numpy()).argsort()
        rows = stack([s.train[place] for place in order[within * BATCH : (within + 1) * BATCH]])
        began, at = time.process_time(), time.monotonic()
        value = loss(rows, step)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.collect()
        optimizer.step(learning_rate(step, steps, RATE, "cosine"), 1.0)
        spent.append(time.process_time() - began)
        walls.append(time.monotonic() - at)
    warm = steps // 5
    peak = resident("VmHWM") - base
    weights = {key.replace("/", "."): parameter.detach() for key, parameter in trained.items()}
    drafter.load_state_dict(weights)
    return {
        "cpu_s": statistics.median(spent[warm:]),
        "wall_s": statistics.median(walls[warm:]),
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
    """Yields of the blocks of each held-out row."""
    found = []
    for start in range(0, len(s.held_out), MAKE):
        rows = stack(s.held_out[start : start + MAKE])
        found += walk(drafter, Known(s, rows.taps), rows.ids, rows.mask)  # type: ignore[arg-type]
    return found


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


def interval(values: list[float]) -> str:
    """Mean and its 95 % interval by Student's t."""
    degrees = len(values) - 1
    quantile = STUDENT[degrees - 1] if degrees <= len(STUDENT) else 1.96 + 2.65 / degrees  # to 0.01
    mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.3f} [{mean - quantile * error:+.3f}, {mean + quantile * error:+.3f}]"


def tau(yields: list[list[int]]) -> float:
    return statistics.mean(count for row in yields for count in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="SmolLM2-135M-Instruct, a directory")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    s = setting(args.target)
    print(f"{len(s.train)} rows, {len(s.held_out)} held out; {args.steps} steps of {BATCH} rows with {ANCHORS} anchors")
    print(f"{'':14}{'seed':>5}{'tau':>8}{'loss':>8}{'CPU s a step':>14}{'wall s':>9}{'peak MB':>9}{'load':>7}")
    rows: dict[str, list[list[float]]] = {name: [[] for _ in s.held_out] for name in BUILD}
    taus: dict[str, list[float]] = {name: [] for name in BUILD}
    for seed in range(args.seeds):
        for name in list(BUILD)[:: -1 if seed % 2 else 1]:
            f = forked(lambda name=name, seed=seed: train(name, s, seed, args.steps))
            for found, yields in zip(rows[name], f["yields"], strict=True):
                found.append(statistics.mean(yields))
            taus[name].append(tau(f["yields"]))
            figures = f"{tau(f['yields']):8.3f}{f['loss']:8.3f}{f['cpu_s']:14.3f}{f['wall_s']:9.3f}{f['peak_mb']:9.0f}"
            print(f"{name:14}{seed:>5}{figures}{os.getloadavg()[1]:7.1f}", flush=True)
    for name, values in taus.items():
        print(f"{name:14} tau of a training: {interval(values)}")
    print(f"ours - speculators, seed by seed: {interval(differences(taus))}")
    means = {name: [statistics.mean(found) for found in rows[name]] for name in BUILD}
    print(f"  row by row, these trainings as they are: {interval(differences(means))}")


def differences(values: dict[str, list[float]]) -> list[float]:
    return [one - other for one, other in zip(values["ours"], values["speculators"], strict=True)]


if __name__ == "__main__":
    main()
