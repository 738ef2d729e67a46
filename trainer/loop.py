"""Training itself, on one rank: what a target does, what a drafter does, and what a step is.

A step is the sum of the losses of its micro-batches over the sum of their weights, wherever they were computed:
gradients of sum-losses are added over micro-batches and ranks and divided once. Every drafter joins every collective of
every step, with zeros where it had no micro-batch, so none waits for another and the update is the same function of the
rows however many ranks there are. The same message carries which rows were trained, and is checked against the list.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tokenizer.job import Exit, JobError
from trainer.blocks import walk
from trainer.board import Board, Phase
from trainer.data import Dataset, Index, Item, Schedule, load
from trainer.drafter import Drafter
from trainer.link import Groups, Receiver, Sender, Source, World, ring_depth
from trainer.loss import Objective, block_loss, sample_anchors
from trainer.optim import AdamW, learning_rate
from trainer.target import Target

SHOWN = 8  # rows that a message names


class Teacher(Protocol):
    """What makes tap states of token ids [B, S]: a Target, or something of known cost."""

    def states(self, ids_BS: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Rules:
    """What makes the update, beside the data."""

    seed: int
    anchors: int
    lr: float
    schedule: str
    objective: Objective


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of the world and what all of them know."""

    world: World
    groups: Groups
    board: Board
    dataset: Dataset
    index: Index
    plan: Schedule
    finals: int = 0  # measurements of the held-out rows after the last step

    @property
    def me(self) -> int:
        return self.groups.rank

    def items(self, start: int) -> Iterator[Item]:
        return self.plan.stream(start, self.finals)

    def ids(self, item: Item) -> Tensor:
        return torch.from_numpy(load(self.dataset, self.index, item).ids)


def run_target(rank: Rank, target: Teacher, start: int) -> None:
    """Compute and send the states of this rank's micro-batches from step `start` on, until nobody wants any."""
    sender, world, board = Sender(rank.groups, rank.board), rank.world, rank.board
    served = world.drafters // math.gcd(world.targets, world.drafters)  # drafters that it ever meets
    for item in rank.items(start):
        drafter = world.drafter_of(item)
        if world.target_of(item) != rank.me or not sender.wanted(drafter):
            if len(sender.stopped) == served:
                break
            continue
        board.beat(rank.me, Phase.STEP if board.get(rank.me, "items") else Phase.FIRST)
        sender.send(timed_states(rank, target, item), drafter)
        board.add(rank.me, "items", 1)
    sender.close()
    board.beat(rank.me, Phase.END)


def timed_states(rank: Rank, target: Teacher, item: Item) -> Tensor:
    """States of a micro-batch, really there: a GPU's own time counts as busy, and the next beat means progress.

    Busy is what steps cost: a walk's micro-batches do not count.
    """
    started = time.monotonic()
    states = target.states(rank.ids(item))
    if states.is_cuda:
        torch.cuda.current_stream().synchronize()
    if not item.held:
        rank.board.add(rank.me, "busy", time.monotonic() - started)
    return states


class Own:
    """States of a colocated target: computed here when they are due."""

    def __init__(self, rank: Rank, target: Teacher) -> None:
        self.rank, self.target = rank, target

    @contextmanager
    def take(self, item: Item) -> Iterator[Tensor]:
        yield timed_states(self.rank, self.target, item)

    def close(self) -> None:
        """Nothing is under way."""


def source_for(rank: Rank, target: Teacher | None, start: int, width: int, dtype: torch.dtype) -> Source:
    """Where this drafter's states come from, from step `start` on."""
    if target is not None:
        return Own(rank, target)
    mine = (item for item in rank.items(start) if rank.world.drafter_of(item) == rank.me)
    return Receiver(rank.groups, rank.board, mine, ring_depth(rank.world), width, dtype)


@dataclass(frozen=True, slots=True)
class Shipped:
    """Stands in for a target whose states are here already."""

    taps: Tensor
    embed_VH: Tensor
    head_VH: Tensor

    @property
    def device(self) -> torch.device:
        return self.taps.device

    def states(self, ids_BS: Tensor) -> Tensor:
        return self.taps


@dataclass(slots=True)
class Step:
    """What a step was, the same on every drafter. rows: row numbers in order. table: see BlockLoss, summed."""

    number: int
    epoch: int
    loss: float
    lr: float
    norm: float
    rows: list[int]
    tokens: int
    table: Tensor
    empty: bool  # nothing had weight: no update
    stop: bool
    save: bool


@dataclass
class Learner:
    """A drafter rank's part of each step."""

    rank: Rank
    drafter: Drafter
    optimizer: AdamW
    rules: Rules
    source: Source
    embed_VH: Tensor
    head_VH: Tensor
    chunk_elements: int | None = None

    def step(self, number: int, *, stop: bool = False, save: bool = False) -> Step:
        """Train step `number`. stop, save: what this rank wants; it happens where any rank wants it.

        Raises JobError: 76 loss or gradients are not finite, 70 the rows trained are not those of the list.
        """
        items = self.rank.plan.step(number)
        board, me = self.rank.board, self.rank.me
        board.beat(me, Phase.STEP if board.get(me, "steps") else Phase.FIRST)
        slots = self.drafter.config.block_size - 1
        room = self.rank.plan.accumulate * self.rank.plan.batch_rows
        # loss, divisor, tokens, stop, save | table [4, K] | row number + 1 of each place of the step
        told = torch.zeros(5 + 4 * slots + room, dtype=torch.float64)
        told[3], told[4] = float(stop), float(save)
        for item in items:
            if self.rank.world.drafter_of(item) != me:
                continue
            self._micro(item, told, slots)
            board.beat(me)
        with board.waiting(me):
            for bucket in self.optimizer.buckets():
                dist.all_reduce(bucket, group=self.rank.groups.drafters)
            dist.all_reduce(told, group=self.rank.groups.drafters)
        divisor = float(told[1])
        rate = learning_rate(number, self.rank.plan.total, self.rules.lr, self.rules.schedule)
        norm = self.optimizer.step(rate, divisor) if divisor > 0 else 0.0
        loss = float(told[0]) / divisor if divisor > 0 else 0.0
        if not (math.isfinite(loss) and math.isfinite(norm) and math.isfinite(divisor)):
            raise JobError(
                Exit.DIVERGED,
                f"step {number + 1}: loss {loss}, gradient norm {norm}: training has diverged, on {self._ids(items)}",
                "resume goes on from the last checkpoint; lower --lr or look at these rows",
            )
        rows = self._trained(items, told[5 + 4 * slots :])
        board.add(me, "steps", 1)
        return Step(
            number=number,
            epoch=items[0].epoch,
            loss=loss,
            lr=rate,
            norm=norm,
            rows=rows,
            tokens=int(told[2]),
            table=told[5 : 5 + 4 * slots].view(4, slots),
            empty=divisor <= 0,
            stop=bool(told[3]),
            save=bool(told[4]),
        )

    def _micro(self, item: Item, told: Tensor, slots: int) -> None:
        board, me = self.rank.board, self.rank.me
        padded = load(self.rank.dataset, self.rank.index, item)
        mask = torch.from_numpy(padded.mask)
        anchors, keep = sample_anchors(
            mask, padded.names, seed=self.rules.seed, epoch=item.epoch, count=self.rules.anchors
        )
        with self.source.take(item) as taps:
            started = time.monotonic()
            found = block_loss(
                self.drafter,
                taps,
                torch.from_numpy(padded.ids),
                mask,
                anchors,
                keep,
                self.embed_VH,
                self.head_VH,
                self.rules.objective,
                self.chunk_elements,
            )
            found.total.backward()  # type: ignore[no-untyped-call]
            self.optimizer.collect()
            total = found.total.detach().double().cpu()
            if not (torch.isfinite(total) or torch.isfinite(taps).all()):
                where = f"step {item.step + 1}: loss {float(total)}"
                raise JobError(
                    Exit.DIVERGED,
                    f"{where}: the target's states are no numbers, on {self._ids([item])}",
                    "look at the target's weights: a drafter cannot learn from them",
                )
            told[0] += total
            told[1] += found.divisor.double().cpu()
            board.add(me, "busy", time.monotonic() - started)
        told[2] += sum(int(self.rank.index.length[row]) for row in item.rows)
        told[5 : 5 + 4 * slots] += found.table.flatten().cpu()
        first = 5 + 4 * slots + item.slot * self.rank.plan.batch_rows
        told[first : first + len(item.rows)] += torch.tensor(item.rows, dtype=torch.float64) + 1.0
        board.add(me, "items", 1)

    def _trained(self, items: list[Item], places: Tensor) -> list[int]:
        """Row numbers that all drafters together say they trained; each of the step's rows must be there once."""
        expected = torch.zeros_like(places)
        for item in items:
            first = item.slot * self.rank.plan.batch_rows
            expected[first : first + len(item.rows)] = torch.tensor(item.rows, dtype=torch.float64) + 1.0
        if not torch.equal(places, expected):
            raise JobError(
                Exit.SELF_CHECK,
                f"step {items[0].step + 1}: the rows trained by all ranks are not the rows of the step",
                "this is a bug of the trainer",
            )
        return [row for item in items for row in item.rows]

    def _ids(self, items: list[Item]) -> str:
        """The rows of a step by their ids, for people."""
        found = [name for item in items for name in load(self.rank.dataset, self.rank.index, item).names]
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        return f"rows {', '.join(found[:SHOWN])}{more}"

    @torch.no_grad()
    def measure(self, drafter: Drafter, step: int, stop: Callable[[], bool] = lambda: False) -> list[int] | None:
        """After `step` steps: how many blocks of the held-out walk yielded 0, 1, .. block_size tokens, all ranks.

        stop: whether this rank is to stop, asked before each micro-batch. None where any rank was: all have left then,
        and their sources are closed. A rank that leaves closes at once, or targets would wait for its credits while it
        waits for the others in the one collective of a walk.
        """
        counts = torch.zeros(drafter.config.block_size + 1, dtype=torch.float64)
        left = False
        for item in self.rank.plan.measurement(step):
            if self.rank.world.drafter_of(item) != self.rank.me:
                continue
            if left := stop():
                break
            self.rank.board.beat(self.rank.me, Phase.MEASURE)
            padded = load(self.rank.dataset, self.rank.index, item)
            with self.source.take(item) as taps:
                stand_in = cast(Target, Shipped(taps, self.embed_VH, self.head_VH))
                ids, mask = torch.from_numpy(padded.ids), torch.from_numpy(padded.mask)
                for yields in walk(drafter, stand_in, ids, mask):
                    for count in yields:
                        counts[count] += 1
        left = left or stop()
        if left:
            self.source.close()
        told = torch.cat([counts, torch.tensor([left], dtype=torch.float64)])
        with self.rank.board.waiting(self.rank.me):
            dist.all_reduce(told, group=self.rank.groups.drafters)
        if not told[-1]:
            return [int(count) for count in told[:-1]]
        if not left:
            self.source.close()
        return None


def acceptance(counts: list[int]) -> float | None:
    """Mean yield of the held-out blocks, which is what serving measures; None where nothing is held out."""
    blocks = sum(counts)
    return sum(size * count for size, count in enumerate(counts)) / blocks if blocks else None
