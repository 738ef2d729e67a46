"""Hidden states from target ranks to drafter ranks: a bounded ring, filled only against credits.

Both ends know the list of micro-batches, hence whose turn it is and the shape of what comes, so states travel alone.
A drafter posts the receives of its next few micro-batches and grants one credit for each; a target computes ahead, but
sends only what has a credit. So a slow drafter holds its targets back, memory is bounded by the ring, and nothing is
ever dropped or overtaken. A credit of 0 says that the drafter takes no more: the target goes on for the others.

With `colocated` every rank is both, and nothing is transferred.

Each pair of ranks has a process group of its own, gloo for CPU tensors and credits, NCCL for states on GPUs. On GPUs a
receive is posted from the stream that used the slot before, so it waits for that use, and its credit is granted only
once that use is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.board import Board
from trainer.data import Item

STATES, CREDIT = 0, 1  # tags
AHEAD = 2  # micro-batches that a target may have under way


@dataclass(frozen=True, slots=True)
class World:
    """Who is who: ranks 0..T-1 are targets, T..T+D-1 drafters; with no target, D ranks that are both."""

    targets: int
    drafters: int

    @property
    def colocated(self) -> bool:
        return self.targets == 0

    @property
    def size(self) -> int:
        return self.targets + self.drafters

    @property
    def leader(self) -> int:
        """The drafter rank that logs and saves."""
        return self.targets

    def target_of(self, item: Item) -> int:
        return item.number % self.targets if self.targets else self.drafter_of(item)

    def drafter_of(self, item: Item) -> int:
        return self.targets + item.number % self.drafters

    def is_target(self, rank: int) -> bool:
        return rank < self.targets

    def name(self, rank: int) -> str:
        return f"target:{rank}" if rank < self.targets else f"drafter:{rank - self.targets}"


class Groups:
    """Process groups of a rank: `drafters` of all drafters, `heads` of rank 0 and the drafters, and one a pair."""

    def __init__(self, world: World, device: torch.device, store: Any, rank: int) -> None:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self.world, self.rank, self.device = world, rank, device
        forever = timedelta(days=7)  # the supervisor knows better what takes too long
        dist.init_process_group(backend, store=store, rank=rank, world_size=world.size, timeout=forever)
        drafters = list(range(world.targets, world.size))

        def group(ranks: list[int]) -> dist.ProcessGroup | None:
            made: Any = dist.new_group(ranks, backend=backend, timeout=forever)
            return made if rank in ranks else None

        self.everyone = group(list(range(world.size)))
        self.drafters = group(drafters)
        self.heads = group([0, *(r for r in drafters if r)])
        self.pairs = {(t, d): group([t, d]) for t in range(world.targets) for d in drafters}

    def close(self) -> None:
        """Leave together: what was sent last still arrives."""
        meet(self.everyone)
        dist.destroy_process_group()


def meet(group: dist.ProcessGroup | None) -> None:
    """Wait until every rank of a group is here; over gloo, also where states go over NCCL."""
    dist.all_reduce(torch.zeros(1), group=group)


class Sender:
    """The target's end."""

    def __init__(self, groups: Groups, board: Board) -> None:
        self.groups, self.board = groups, board
        self.stopped: set[int] = set()
        self.pending: deque[tuple[Any, Tensor]] = deque()

    def wanted(self, drafter: int) -> bool:
        """Whether the drafter still takes what is computed for it, as far as is known."""
        return drafter not in self.stopped

    def send(self, states: Tensor, drafter: int) -> None:
        """Hand over one micro-batch once there is a credit for it; without effect where the drafter says stop."""
        me, group = self.groups.rank, self.groups.pairs[self.groups.rank, drafter]
        credit = torch.zeros(1, dtype=torch.int32)
        with self.board.waiting(me):
            dist.recv(credit, drafter, group=group, tag=CREDIT)
        if not credit.item():
            self.stopped.add(drafter)
            return
        states = states.contiguous()
        self.pending.append((dist.isend(states, drafter, group=group, tag=STATES), states))
        with self.board.waiting(me):
            while len(self.pending) > AHEAD:
                self.pending.popleft()[0].wait()
        self.board.sent[me, drafter] += 1

    def close(self) -> None:
        """Wait until everything has arrived."""
        with self.board.waiting(self.groups.rank):
            while self.pending:
                self.pending.popleft()[0].wait()


class Source(Protocol):
    """Where a drafter gets the states of its micro-batches from, in their order."""

    def take(self, item: Item) -> Any:
        """Context manager: states [B, S, K * H] of the next micro-batch, valid until it is left."""

    def close(self) -> None:
        """Take no more; nothing is left under way."""


class Receiver:
    """The drafter's end: a ring of `depth` buffers, filled in the order of `items`."""

    def __init__(
        self, groups: Groups, board: Board, items: Iterator[Item], depth: int, width: int, dtype: torch.dtype
    ) -> None:
        """items: this drafter's micro-batches. width: K * H."""
        self.groups, self.board, self.items = groups, board, items
        self.width, self.dtype = width, dtype
        self.free: deque[tuple[Tensor, Any]] = deque()
        self.posted: deque[tuple[Item, Any, Tensor, Tensor]] = deque()
        self.granted: deque[tuple[Any, Tensor]] = deque()
        for _ in range(depth):
            self.free.append((torch.empty(0, dtype=dtype, device=groups.device), None))
        self._post()

    def _post(self) -> None:
        """Post a receive and grant its credit for every free buffer."""
        me = self.groups.rank
        while self.free and (item := next(self.items, None)) is not None:
            buffer, used = self.free.popleft()
            if used is not None:
                used.synchronize()
            shape = (len(item.rows), item.width, self.width)
            size = shape[0] * shape[1] * shape[2]
            if len(buffer) < size:
                buffer = torch.empty(size, dtype=self.dtype, device=self.groups.device)
            states = buffer[:size].view(shape)
            target = self.groups.world.target_of(item)
            group = self.groups.pairs[target, me]
            work = dist.irecv(states, target, group=group, tag=STATES)
            self._grant(target, 1)
            self.posted.append((item, work, buffer, states))

    def _grant(self, target: int, value: int) -> None:
        """Never blocks: a target reads its credits when it gets there."""
        credit = torch.full((1,), value, dtype=torch.int32)
        group = self.groups.pairs[target, self.groups.rank]
        self.granted.append((dist.isend(credit, target, group=group, tag=CREDIT), credit))

    @contextmanager
    def take(self, item: Item) -> Iterator[Tensor]:
        me = self.groups.rank
        if self.posted[0][0] != item:
            raise RuntimeError(f"the ring holds micro-batch {self.posted[0][0].number}, {item.number} is due")
        _, work, buffer, states = self.posted.popleft()
        with self.board.waiting(me):
            work.wait()
            self.granted.popleft()[0].wait()  # read, or the states would not be here
        self.board.taken[self.groups.world.target_of(item), me] += 1
        yield states
        used = None
        if states.is_cuda:
            used = torch.cuda.Event()  # type: ignore[no-untyped-call]
            used.record()
        self.free.append((buffer, used))
        self._post()

    def close(self) -> None:
        for _, work, _, _ in self.posted:  # credits are promises: what they were given for still comes
            work.wait()
        self.posted.clear()
        for target in range(self.groups.world.targets):
            self._grant(target, 0)  # who has nothing left for this drafter never reads it


def ring_depth(world: World) -> int:
    """Buffers of a drafter: one in use, one arriving, and one for each target more than it has drafters to share."""
    return 2 + -(-world.targets // world.drafters)
