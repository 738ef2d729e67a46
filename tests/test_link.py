"""The ring between targets and drafters: bounded, in order, overlapping, and closed without losing anything."""

import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny
import torch
import train_fixtures
from train_fixtures import (
    Made,
    fork_world,
    learner,
    open_dataset,
    random_rows,
    rank_of,
    run_target,
    write_dataset,
)

from trainer.board import Board
from trainer.data import Schedule, load
from trainer.link import Receiver, Sender, World, ring_depth
from trainer.loop import source_for


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return open_dataset(write_dataset(tmp_path_factory.mktemp("link") / "data", random_rows(64)))


def width():
    return len(tiny.config().target_layer_ids) * tiny.config().hidden_size


@pytest.mark.parametrize("split", [(1, 1), (2, 3), (3, 2), (5, 2), (2, 2)])
def test_every_micro_batch_arrives_once_as_it_was_sent(data, tmp_path, split):
    world, (dataset, index) = World(*split), data
    plan = Schedule(index, seed=1, batch_rows=2, accumulate=4, epochs=2)

    def body(number, store, board):
        rank, teacher = rank_of(world, number, store, board, dataset, index, plan), Made()
        seen = []
        if world.is_target(number):
            run_target(rank, teacher, 0)
        else:
            source = source_for(rank, None, 0, width(), torch.float64)
            for item in rank.items(0):
                if world.drafter_of(item) != number:
                    continue
                with source.take(item) as states:
                    expected = teacher.states(torch.from_numpy(load(dataset, index, item).ids))
                    seen.append((item.number, torch.equal(states, expected)))
                assert board.depth(number) <= ring_depth(world)
            assert len(source.free) == ring_depth(world)
        rank.groups.close()
        return seen

    found = [pair for seen in fork_world(world.size, body, tmp_path) for pair in seen]
    assert sorted(number for number, _ in found) == list(range(2 * plan.micros_per_epoch))
    assert all(equal for _, equal in found)


@pytest.mark.parametrize("split", [(1, 1), (2, 3), (3, 2), (2, 2)])
def test_drafters_that_stop_early_let_their_targets_end(data, tmp_path, split):
    world, (dataset, index) = World(*split), data
    plan = Schedule(index, seed=1, batch_rows=2, accumulate=4, epochs=500)

    def body(number, store, board):
        rank, teacher = rank_of(world, number, store, board, dataset, index, plan), Made()
        if world.is_target(number):
            run_target(rank, teacher, 0)
        else:
            part = learner(rank, tiny.drafter(dtype=torch.float64), teacher)
            for step in range(3):
                part.step(step, stop=step == 2 and number == world.leader)
            part.source.close()
            assert board.depth(number) <= ring_depth(world)
        rank.groups.close()
        return (0, board.sent[number].sum()) if world.is_target(number) else (board.get(number, "items"), 0)

    items, sent = zip(*fork_world(world.size, body, tmp_path), strict=True)
    assert sum(items) == 12  # three steps of four, and nothing more was learnt
    assert 12 < sum(sent) <= 12 + world.drafters * ring_depth(world)


class Slow(Made):
    """A target of known cost."""

    def states(self, ids_BS):
        time.sleep(self.delay)
        return torch.zeros(*ids_BS.shape, width(), dtype=torch.float64)


class Timed(Board):
    """Knows for how long this process waited for others."""

    waited = 0.0

    @contextmanager
    def waiting(self, rank):
        started = time.monotonic()
        with super().waiting(rank):
            yield
        self.waited += time.monotonic() - started


@pytest.mark.parametrize(
    ("split", "target", "drafter", "items"),
    [
        ((1, 1), 0.4, 0.4, 24),
        ((1, 1), 0.3, 0.1, 20),
        ((1, 1), 0.1, 0.3, 20),
        ((2, 1), 0.3, 0.3, 30),
        ((1, 2), 0.3, 0.3, 30),
    ],
)
def test_a_step_takes_as_long_as_the_busier_side(data, tmp_path, monkeypatch, split, target, drafter, items):
    """At most 1.1 times that; one after the other they would take 1.33 to 2 times as long.

    Costs are sleeps, and what a side takes is all its time but that of waiting for the other: what a busy machine adds
    to a sleep counts as its cost, and what the link itself did would be seen in CPU seconds.
    """
    monkeypatch.setattr(train_fixtures, "Board", Timed)
    world, (dataset, index) = World(*split), data
    plan = Schedule(index, seed=1, batch_rows=2, accumulate=items, epochs=1, steps=1)

    def body(number, store, board):
        rank = rank_of(world, number, store, board, dataset, index, plan)
        board.waited, started, spent = 0.0, time.monotonic(), time.process_time()
        if world.is_target(number):
            run_target(rank, Slow(delay=target), 0)
        else:
            source = source_for(rank, None, 0, width(), torch.float64)
            for item in rank.items(0):
                if world.drafter_of(item) == number:
                    with source.take(item):
                        time.sleep(drafter)
        ended = time.monotonic()
        found = started, ended, ended - started - board.waited, time.process_time() - spent
        rank.groups.close()
        return found

    starts, ends, busy, spent = zip(*fork_world(world.size, body, tmp_path), strict=True)
    wall, busier = max(ends) - max(starts), max(busy)
    print(f"overlap {split} {target} {drafter}: {wall / busier:.3f} of the busier side, {max(spent):.2f} CPU s")
    assert wall <= 1.1 * busier
    assert sum(busy) > 1.3 * busier  # there was something to overlap
    assert max(spent) < 0.1 * items * max(target / world.targets, drafter / world.drafters)


def allocated():
    """Resident bytes of this process that are no file's: a fork meets the pages of libraries anew, one by one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_memory_is_bounded_by_the_ring(data, tmp_path):
    """A fast target and a slow drafter, 4 MiB a micro-batch, 744 MiB in all: what is held does not grow with what is sent.

    At most four are alive on the target; a heap that many tests have used keeps up to 15 (it plateaus there).
    """
    world, (dataset, index) = World(1, 1), data
    plan = Schedule(index, seed=1, batch_rows=2, accumulate=32, epochs=6)
    size, wide = 4 << 20, (4 << 20) // (2 * 64 * 4)

    def body(number, store, board):
        rank = rank_of(world, number, store, board, dataset, index, plan)
        items = [item._replace(width=64) for item in rank.items(0)]
        base, seen, depth = allocated(), [], 0
        if world.is_target(number):
            sender = Sender(rank.groups, board)
            for _ in items:
                sender.send(torch.full((2, 64, wide), 1.0), 1)
                seen.append(allocated())
            sender.close()
        else:
            source = Receiver(rank.groups, board, iter(items), ring_depth(world), wide, torch.float32)
            for item in items:
                time.sleep(0.02)
                depth = max(depth, board.depth(number))
                with source.take(item) as states:
                    assert (states == 1.0).all()
                    seen.append(allocated())
        rank.groups.close()
        return len(items), max(seen) - base, depth

    (count, sent, _), (_, taken, depth) = fork_world(world.size, body, tmp_path)
    print(f"{count} micro-batches: target {sent / size:.1f}, drafter {taken / size:.1f} of them at most")
    assert count == 6 * plan.micros_per_epoch > 180 and depth <= ring_depth(world)
    assert max(sent, taken) < 24 * size


def test_a_micro_batch_out_of_turn_is_noticed(data, tmp_path):
    world, (dataset, index) = World(1, 1), data
    plan = Schedule(index, seed=1, batch_rows=2, accumulate=4, epochs=1, steps=1)

    def body(number, store, board):
        rank = rank_of(world, number, store, board, dataset, index, plan)
        if world.is_target(number):
            run_target(rank, Made(), 0)
        else:
            items = list(rank.items(0))
            source = Receiver(rank.groups, board, iter(items), 2, width(), torch.float64)
            with pytest.raises(RuntimeError, match="is due"), source.take(items[1]):
                pass
            source.close()
        rank.groups.close()

    fork_world(2, body, tmp_path)
