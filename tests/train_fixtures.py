"""Datasets made of nothing, and worlds of forked ranks: what the trainer's tests share."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
import torch.distributed as dist

from tokenizer.gate import dataset_info, state
from tokenizer.job import CONTRACT, DATASET, shard_name
from tokenizer.plan import DATASET_INFO, STATE
from tokenizer.shard import END_OF_STREAM, START, Rows, batch_digest, content_sha256, loss_per_row, record_batch
from trainer.board import Board
from trainer.data import Dataset, Index, Schedule
from trainer.drafter import Drafter
from trainer.link import Groups, World
from trainer.loop import Learner, Rank, Rules, run_target, source_for
from trainer.loss import Objective, default_gamma
from trainer.optim import AdamW

VOCAB, MASK_ID = tiny.VOCAB, tiny.MASK_ID
WAIT = 600.0  # seconds after which a world of ranks has failed


def random_rows(count: int, seed: int = 0, longest: int = 60) -> list[tuple[list[int], list[int]]]:
    """Tokens and loss masks of very uneven lengths; every seventh row is of two spans, every 29th has no anchor."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        length = int(draw.integers(6, 14)) if number % 3 else int(draw.integers(longest // 2, longest))
        ids = draw.integers(0, MASK_ID, length).tolist()
        prompt = int(draw.integers(1, length // 2 + 1))
        mask = [0] * prompt + [1] * (length - prompt)
        if number % 7 == 0 and length > 20:
            mask[length - 6 : length - 3] = [0, 0, 0]
        if number % 29 == 28:
            mask = [0] * (length - 1) + [1]
        rows.append((ids, mask))
    return rows


def write_dataset(
    folder: Path, rows: list[tuple[list[int], list[int]]], shards: int = 2, per_batch: int = 7, **record: Any
) -> Path:
    """A dataset as `tokenize` writes it, of these rows; row i is line i + 1 of `a.jsonl`."""
    folder.mkdir(parents=True)
    described, start = [], 0
    for number in range(shards):
        end = len(rows) * (number + 1) // shards
        data, digests, tokens, losses = START, [], 0, 0
        for at in range(start, end, per_batch):
            some = rows[at : min(at + per_batch, end)]
            offsets = np.cumsum([0] + [len(ids) for ids, _ in some]).astype(np.int64)
            flat = Rows(
                np.concatenate([ids for ids, _ in some]).astype(np.int32),
                offsets,
                np.concatenate([mask for _, mask in some]).astype(np.int8),
            )
            names = [f"a.jsonl:{at + i + 1}#0" for i in range(len(some))]
            batch = record_batch(flat, names, [""] * len(some), loss_per_row(flat))
            data += batch.serialize().to_pybytes()
            digests.append(batch_digest(batch))
            tokens, losses = tokens + len(flat.ids), losses + int(flat.mask.sum())
        data += END_OF_STREAM
        name = shard_name(number, shards)
        (folder / name).write_bytes(data)
        described.append(
            {
                "index": number,
                "name": name,
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "rows": end - start,
                "tokens": tokens,
                "loss_tokens": losses,
                "content_sha256": content_sha256(digests),
            }
        )
        start = end
    content = hashlib.sha256(b"".join(bytes.fromhex(str(s["content_sha256"])) for s in described)).hexdigest()
    whole = {
        "contract": CONTRACT,
        "rows": len(rows),
        "shards": described,
        "content_sha256": content,
        "degenerate": False,
        "reasons": [],
        "spec": {"tokenizer": {}, "generator": ""},
        "model": "tiny",
    }
    (folder / DATASET).write_text(json.dumps(whole | record))
    (folder / DATASET_INFO).write_text(json.dumps(dataset_info()))
    (folder / STATE).write_text(json.dumps(state([str(shard["name"]) for shard in described], content)))
    return folder


def open_dataset(folder: Path, max_length: int = 48, held_out: float = 0.0) -> tuple[Dataset, Index]:
    record = json.loads((folder / DATASET).read_text())
    dataset = Dataset([folder / shard["name"] for shard in record["shards"]], max_length)
    return dataset, dataset.index(record, VOCAB, held_out)[0]


class Made:
    """A causal stand-in for a target: each tap is a running mean of a random embedding, mixed."""

    def __init__(self, config: Any = None, dtype: torch.dtype = torch.float64, delay: float = 0.0) -> None:
        config = config or tiny.config()
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.embed_VH = draw(config.vocab_size, config.hidden_size) / 3
        self.head_VH = draw(config.vocab_size, config.hidden_size) / 3
        self.wide = draw(config.hidden_size, len(config.target_layer_ids) * config.hidden_size)
        self.delay = delay

    def states(self, ids_BS: torch.Tensor) -> torch.Tensor:
        time.sleep(self.delay)
        seen = self.embed_VH[ids_BS].cumsum(1) / torch.arange(1, ids_BS.shape[1] + 1)[:, None]
        return torch.tanh(seen @ self.wide)


def fork_world(size: int, body: Callable[[int, Any, Board], Any], folder: Path) -> list[Any]:
    """What `body(rank, store, board)` returns in each of `size` forked processes; all must succeed."""
    board = Board(size)
    (folder / "store").unlink(missing_ok=True)
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                store = dist.FileStore(str(folder / "store"), size)
                (folder / f"{rank}.pickle").write_bytes(pickle.dumps(body(rank, store, board)))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    codes: dict[int, int] = {}
    deadline = time.monotonic() + WAIT
    while len(codes) < size:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > deadline:
            for left in set(pids) - set(codes):
                os.kill(left, signal.SIGKILL)
                os.waitpid(left, 0)
            raise AssertionError(f"ranks ended with {[codes.get(pid) for pid in pids]}")
        time.sleep(0.005)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(size)]


RULES = Rules(seed=3, anchors=6, lr=5e-3, schedule="cosine", objective=Objective(default_gamma(6)))


def learner(rank: Rank, drafter: Drafter, teacher: Made, start: int = 0, rules: Rules = RULES) -> Learner:
    own = teacher if rank.world.colocated else None
    width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    dtype = teacher.embed_VH.dtype
    source = source_for(rank, own, start, width, dtype)
    return Learner(rank, drafter, AdamW(drafter), rules, source, teacher.embed_VH, teacher.head_VH)


def rank_of(
    world: World, number: int, store: Any, board: Board, dataset: Dataset, index: Index, plan: Schedule
) -> Rank:
    return Rank(world, Groups(world, torch.device("cpu"), store, number), board, dataset, index, plan)


__all__ = [
    "MASK_ID",
    "RULES",
    "VOCAB",
    "Made",
    "fork_world",
    "learner",
    "open_dataset",
    "random_rows",
    "rank_of",
    "run_target",
    "write_dataset",
]
