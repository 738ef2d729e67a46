"""The ring between targets and drafters: bounded, in order, overlapping, and closed without losing anything."""

import time

import pytest
import tiny
import torch
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

from trainer.data import Schedule, load
from trainer.link import Receiver, World, ring_depth
from trainer.loop import source_for

COST, ITEMS = 0.1, 20  # seconds of a micro-batch on either side, micro-batches


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return open_dataset(write_dataset(tmp_path_factory.mktemp("link") / "data", random_rows(40)))


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


@pytest.mark.parametrize("costs", [(COST, COST), (COST, COST / 4), (COST / 4, COST)])
def test_target_and_drafter_work_at_the_same_time(data, tmp_path, costs):
    """Of sleeps alone, so that it holds on a busy machine; one after the other it would take 1.25 or 2 times as long."""
    world, (dataset, index) = World(1, 1), data
    plan = Schedule(index, seed=1, batch_rows=2, accumulate=ITEMS, epochs=1, steps=1)

    def body(number, store, board):
        rank = rank_of(world, number, store, board, dataset, index, plan)
        if world.is_target(number):
            run_target(rank, Made(delay=costs[0]), 0)
            rank.groups.close()
            return board.get(number, "items")
        source = source_for(rank, None, 0, width(), torch.float64)
        started, deepest = time.monotonic(), 0
        for item in rank.items(0):
            with source.take(item):
                deepest = max(deepest, board.depth(number))
                time.sleep(costs[1])
        seconds = time.monotonic() - started
        rank.groups.close()
        return seconds, deepest

    items, (seconds, deepest) = fork_world(world.size, body, tmp_path)
    assert items == ITEMS
    print(f"overlap {costs}: {seconds / (ITEMS * max(costs)):.3f} of the slower side")
    assert seconds < (0.5 * (sum(costs) + max(costs))) * ITEMS + COST  # closer to the slower side than to both in turn
    assert deepest <= ring_depth(world)


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
