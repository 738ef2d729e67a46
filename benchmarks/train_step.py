"""One training step of the drafter beside SpecForge's and speculators', and beside its bare matrix products.

    python benchmarks/train_step.py --config A        CPU, one thread, CPU seconds
    python benchmarks/train_step.py --config B        the shape ratios of the real model
    PYTHONPATH=. python benchmarks/train_step.py      on a GPU: the Qwen3.6 drafter, 512 anchors, 2,073 tokens, bf16

A step is forward and backward of one row with cross entropy on the labels, without an optimiser, at each peer's own
defaults (its attention and its chunks). Every implementation runs in a process of its own, so that its memory is its
own; the processes take turns, round by round, so that a busy machine slows all alike. Time is CPU seconds on a CPU, and
wall seconds between synchronisations on a GPU. Peers that are not installed are named and skipped.
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent  # its tokenize.py would stand in for the standard library's
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != HERE)]

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import resource
import subprocess
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any

BLOCK = 16


@dataclass(frozen=True)
class Shape:
    hidden: int
    taps: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tokens: int
    anchors: int
    window: int | None = None
    learnt: float = 0.7  # share of the row's end that is a completion, in one span


SHAPES = {
    "tiny": Shape(64, 3, 2, 96, 4, 2, 16, 500, 160, 8, 100),  # for the test that this script runs
    "A": Shape(512, 5, 2, 1536, 8, 2, 64, 32000, 1024, 64),
    "B": Shape(512, 5, 5, 1741, 6, 2, 64, 24832, 1024, 224),
    "qwen36": Shape(5120, 5, 5, 17408, 32, 8, 128, 248320, 2073, 512, 2048, 0.875),
}
PEERS = {"specforge": "specforge", "speculators": "speculators"}


def drafter_config(s: Shape) -> Any:
    from trainer.config import FULL, SLIDING, DrafterConfig

    kinds = (SLIDING,) * (s.layers - 1) + (FULL,) if s.window else (FULL,) * s.layers
    return DrafterConfig(
        hidden_size=s.hidden,
        intermediate_size=s.inner,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        vocab_size=s.vocab,
        num_target_layers=64,
        target_layer_ids=tuple(1 + 15 * i for i in range(s.taps)),
        mask_token_id=s.vocab - 1,
        block_size=BLOCK,
        layer_types=kinds,
        sliding_window=s.window,
    )


class Data:
    """One random row on `device`: ids and loss mask [1, S], tap states [1, S, K * H], embedding and head [V, H]."""

    def __init__(self, s: Shape, device: str) -> None:
        import torch

        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(0)
        with torch.device(device):
            self.ids = torch.randint(0, s.vocab - 1, (1, s.tokens))
            self.mask = (torch.arange(s.tokens) >= (1 - s.learnt) * s.tokens).long()[None]
            self.taps = torch.randn(1, s.tokens, s.taps * s.hidden, dtype=dtype)
            self.embed = torch.randn(s.vocab, s.hidden, dtype=dtype).mul_(0.02)
            self.head = torch.randn(s.vocab, s.hidden, dtype=dtype).mul_(0.02)
        self.dtype = dtype


def ours(s: Shape, d: Data, device: str) -> Any:
    import torch

    from trainer.drafter import Drafter
    from trainer.loss import Objective, block_loss, sample_anchors

    with torch.device(device):
        model = Drafter(drafter_config(s)).to(d.dtype).init(0)
    ids, mask, objective, epoch = d.ids.cpu(), d.mask.cpu(), Objective(7.0), iter(range(10**9))

    def step() -> Any:
        anchors, keep = sample_anchors(mask, ["row"], seed=0, epoch=next(epoch), count=s.anchors)
        out = block_loss(model, d.taps, ids, mask, anchors, keep, d.embed, d.head, objective)
        return out.total / out.divisor

    return model, step


def qwen3_config(s: Shape, attention: str) -> Any:
    from transformers import Qwen3Config

    config = Qwen3Config(**drafter_config(s).to_dict())
    config._attn_implementation = attention
    return config


def specforge(s: Shape, d: Data, device: str) -> Any:
    import torch
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    attention = "flex_attention" if device == "cuda" else "sdpa"
    with torch.device(device):
        model = DFlashDraftModel(qwen3_config(s, attention)).to(d.dtype)
    embed, head = frozen(d)
    wrapped = OnlineDFlashModel(
        model, head, embed, s.vocab - 1, BLOCK, attention, num_anchors=s.anchors, loss_decay_gamma=7.0
    )
    mask = d.mask.to(torch.float32)
    return model, lambda: wrapped(d.ids, d.taps, mask)[0]


def speculators(s: Shape, d: Data, device: str) -> Any:
    import torch
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    gpu = device == "cuda"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=qwen3_config(s, "simple_flex_attention" if gpu else "sdpa"),
        draft_vocab_size=s.vocab,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[2 + 15 * i for i in range(s.taps)],
        mask_token_id=s.vocab - 1,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    with torch.device(device):
        model = DFlashDraftModel(config).to(d.dtype)
    embed, head = frozen(d)
    model.embed_tokens, model.lm_head, model.verifier_lm_head = embed, head, head  # they start as NaN
    states = torch.randn(1, s.tokens, s.hidden, dtype=d.dtype, device=device)
    documents = torch.zeros(1, s.tokens, dtype=torch.long, device=device)
    loss = resolve_loss_config("ce", "fused" if gpu else "eager")

    def step() -> Any:
        out = model(d.taps, d.ids, d.mask, states, documents, loss_config=loss, gamma=7.0, max_anchors=s.anchors)
        return out[1]

    return model, step


def frozen(d: Data) -> Any:
    """The target's embedding and head as modules that share the row's tensors."""
    from torch import nn

    embed = nn.Embedding.from_pretrained(d.embed, freeze=True)
    head = nn.Linear(1, 1, bias=False, device="meta")
    head.weight = nn.Parameter(d.head, requires_grad=False)
    return embed, head


BUILD = {"ours": ours, "specforge": specforge, "speculators": speculators}


def worker(name: str, s: Shape, device: str) -> None:
    """Answer each line on stdin, a number of steps, with one JSON line: seconds a step, and peak memory in MB."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # peers print
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    data = Data(s, device)
    model, step = BUILD[name](s, data, device)
    model.train()
    gpu = device == "cuda"

    def run() -> None:
        model.zero_grad(set_to_none=True)
        step().backward()
        if gpu:
            torch.cuda.synchronize()

    base = torch.cuda.memory_allocated() if gpu else resident()
    clear_peak(gpu)
    for line in sys.stdin:
        clock = time.perf_counter if gpu else time.process_time
        begin = clock()
        for _ in range(int(line)):
            run()
        used = (clock() - begin) / int(line)
        peak = (torch.cuda.max_memory_allocated() if gpu else resident("VmHWM")) - base
        weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(json.dumps({"s": used, "mb": peak / 1e6, "trainable": weights}), file=answers, flush=True)
        if gpu:
            torch.cuda.empty_cache()  # the next process takes its turn on the same device
            clear_peak(gpu)


def resident(field: str = "VmRSS") -> int:
    """Bytes of memory of this process: VmRSS now, VmHWM its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def clear_peak(gpu: bool) -> None:
    if gpu:
        import torch

        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def products(s: Shape) -> tuple[Counter[tuple[int, int, int]], float]:
    """The matrix products (m, k, n) of one of our steps and how often each, and the attention's operations."""
    blocks, context = s.anchors * BLOCK, s.tokens
    rows = s.anchors * (BLOCK - 1)
    wide, narrow = s.heads * s.head_dim, s.kv_heads * s.head_dim
    list_: Counter[tuple[int, int, int]] = Counter()

    def linear(m: int, k: int, n: int, input_grad: bool = True, weight_grad: bool = True) -> None:
        list_[m, k, n] += 1
        list_[m, n, k] += input_grad
        list_[n, m, k] += weight_grad

    linear(context, s.taps * s.hidden, s.hidden, input_grad=False)
    for layer in range(s.layers):
        kept = rows if layer == s.layers - 1 else blocks
        linear(blocks, s.hidden, wide)
        for _ in range(2):
            linear(blocks, s.hidden, narrow)
            linear(context, s.hidden, narrow)
            linear(kept, s.hidden, s.inner)
        linear(kept, wide, s.hidden)
        linear(kept, s.inner, s.hidden)
    linear(rows, s.hidden, s.vocab, weight_grad=False)
    seen = (1 - s.learnt / 2) * s.tokens + BLOCK  # keys that a query sees, on average over anchors
    return list_, s.layers * 14 * blocks * seen * wide  # two products forward, five backward


def floor(s: Shape, device: str) -> float:
    """Seconds that the bare matrix products of one step take, attention at the rate of the others."""
    import torch

    torch.set_num_threads(1)
    gpu = device == "cuda"
    clock = time.perf_counter if gpu else time.process_time
    total = work = 0.0
    sizes, attention = products(s)
    for (m, k, n), times in sizes.items():
        dtype = torch.bfloat16 if gpu else torch.float32
        cap = min(m, 1024) if n == s.vocab else m  # logits of one chunk, as many times
        a, b = torch.randn(cap, k, dtype=dtype, device=device), torch.randn(n, k, dtype=dtype, device=device)
        spent = []
        for _ in range(4):
            begin = clock()
            a @ b.T
            if gpu:
                torch.cuda.synchronize()
            spent.append(clock() - begin)
        total += times * min(spent) * m / cap
        work += times * 2.0 * m * k * n
    return total + attention * total / work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=SHAPES, help="default: qwen36 on a GPU, else A")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="steps of each implementation a round")
    parser.add_argument("--only", nargs="+", choices=BUILD, default=list(BUILD))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker, SHAPES[args.config], args.device)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = args.config or ("qwen36" if device == "cuda" else "A")
    shape = SHAPES[name]
    machine = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.processor() or platform.machine()}, 1 thread"
    )
    print(f"config {name} on {machine}, torch {torch.__version__}: {shape}")
    running: dict[str, subprocess.Popen[str]] = {}
    results: dict[str, list[dict[str, float]]] = {}
    for which in args.only:
        if which in PEERS and importlib.util.find_spec(PEERS[which]) is None:
            print(f"{which}: skipped, not installed")
            continue
        command = [sys.executable, __file__, "--worker", which, "--config", name, "--device", device]
        running[which] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for turn in range(args.rounds + 1):  # the first turn warms up, and measures memory
        for which, process in list(running.items()):
            answer = ask(process, args.steps if turn else 1)
            if answer is None:
                print(f"{which}: failed, exit {process.wait()}; its words are above")
                del running[which]
            else:
                results.setdefault(which, []).append(answer)
    for process in running.values():
        assert process.stdin
        process.stdin.close()
        process.wait()
    report(shape, device, {which: results[which] for which in running})


def ask(process: subprocess.Popen[str], steps: int) -> dict[str, float] | None:
    """The worker's answer to a number of steps, or None if it ended."""
    assert process.stdin and process.stdout
    with contextlib.suppress(BrokenPipeError):
        print(steps, file=process.stdin, flush=True)
    line = process.stdout.readline()
    return json.loads(line) if line else None


def report(shape: Shape, device: str, results: dict[str, list[dict[str, float]]]) -> None:
    if not results:
        sys.exit(1)
    first = next(iter(results))
    seconds = {which: [answer["s"] for answer in answers[1:]] for which, answers in results.items()}
    base = median(seconds[first])
    unit = "s" if device == "cuda" else "CPU s"
    row = "{:14}{:>14}{:>18}{:>10}{:>10}{:>8}{:>12}"
    print(row.format("", f"{unit} a step", "[min-max]", f"x {first}", "peak MB", "ours %", "trainable"))
    memory = {which: answers[device == "cuda"]["mb"] for which, answers in results.items()}  # on a GPU, not compiling
    for which, answers in results.items():
        spent, mb = seconds[which], memory[which]
        figures = f"{median(spent):.3f}", f"[{min(spent):.3f}-{max(spent):.3f}]", f"{median(spent) / base:.2f}"
        print(row.format(which, *figures, f"{mb:.0f}", f"{100 * memory[first] / mb:.0f}", answers[0]["trainable"]))
    bare = floor(shape, device)
    print(f"bare matrix products of our step: {bare:.3f} {unit}, {100 * bare / base:.0f} % of `{first}`")


if __name__ == "__main__":
    main()
