"""A split changes speed and nothing else; ranks stay in step whatever they have to do."""

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

from trainer.data import Schedule
from trainer.link import World, ring_depth

SPLITS = [World(1, 1), World(2, 1), World(1, 2), World(5, 2), World(2, 3), World(0, 1), World(0, 2)]
STEPS = 20


def train(world, dataset, index, folder, *, dtype, steps, accumulate=4):
    """Per-step (loss, norm, rows), the first step's gradient by name and the final parameters of each drafter rank."""
    plan = Schedule(index, seed=3, batch_rows=2, accumulate=accumulate, epochs=9, steps=steps)

    def body(number, store, board):
        rank = rank_of(world, number, store, board, dataset, index, plan)
        teacher = Made(dtype=dtype)
        if world.is_target(number):
            run_target(rank, teacher, 0)
            rank.groups.close()
            return None
        model = tiny.drafter(dtype=dtype)
        part = learner(rank, model, teacher)
        if not world.colocated:
            assert {buffer.dtype for _, _, buffer, _ in part.source.posted} == {dtype}  # as the ring carries them
        seen, first = [], {}
        for step in range(steps):
            found = part.step(step)
            seen.append((found.loss, found.norm, found.rows))
            if step == 0:  # the first moment is 0.1 of the clipped gradient
                scale = 10 * max(1.0, found.norm)
                first = {n[6:]: scale * v for n, v in part.optimizer.state().items() if n.startswith("first.")}
        rank.groups.close()
        return seen, first, {name: p.detach().clone() for name, p in model.named_parameters()}

    return [result for result in fork_world(world.size, body, folder) if result is not None]


def error(found, known):
    return float((found.double() - known.double()).norm() / known.double().norm())


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Rows of 6 to 60 tokens, micro-batches of one length and of very different ones."""
    dataset, index = open_dataset(write_dataset(tmp_path_factory.mktemp("loop") / "data", random_rows(40)))
    assert index.length.max() > 7 * index.length.min()
    return dataset, index


@pytest.fixture(scope="module")
def known(uneven, tmp_path_factory):
    """What one rank that is both gives in float64: nothing is transferred, nothing is added up across ranks."""
    return train(World(0, 1), *uneven, tmp_path_factory.mktemp("known"), dtype=torch.float64, steps=STEPS)[0]


@pytest.mark.parametrize("world", SPLITS, ids=lambda world: f"{world.targets}+{world.drafters}")
def test_every_split_gives_the_same_update(world, uneven, known, tmp_path):
    """In float64 to 1e-9; in float32 the first gradient to 1e-5 and, 20 steps on, each parameter to 1e-4."""
    start = dict(tiny.drafter(dtype=torch.float64).named_parameters())
    assert all((known[2][name] - start[name]).abs().max() > 1e-3 for name in start)  # it did learn
    bounds = {torch.float64: (1e-9, 1e-9), torch.float32: (1e-5, 1e-4)}
    for dtype, (of_gradient, of_parameter) in bounds.items():
        results = train(world, *uneven, tmp_path, dtype=dtype, steps=STEPS)
        assert len(results) == world.drafters
        for seen, first, parameters in results:
            assert [rows for _, _, rows in seen] == [rows for _, _, rows in known[0]]
            assert first.keys() == parameters.keys() == known[2].keys()
            worst = max((error(first[name], value), name) for name, value in known[1].items())
            assert worst[0] < of_gradient, (dtype, worst)
            worst = max((error(parameters[name], value), name) for name, value in known[2].items())
            assert worst[0] < of_parameter, (dtype, worst)


@pytest.mark.parametrize("world", [World(1, 2), World(2, 3), World(0, 2)], ids=lambda w: f"{w.targets}+{w.drafters}")
@pytest.mark.parametrize("after", [0, 2, None])
def test_all_leave_a_walk_that_one_drafter_is_asked_to_stop(world, after, tmp_path):
    """The last drafter is asked at its micro-batch `after`, or (None) when its walk is over, the others never."""
    folder = write_dataset(tmp_path / "data", random_rows(120))
    dataset, index = open_dataset(folder, held_out=0.5)
    plan = Schedule(index, seed=3, batch_rows=1, accumulate=4, epochs=9, steps=3)
    assert len(plan.held_out) > world.drafters * (2 + ring_depth(world) * 2)  # more than all rings hold
    last = world.size - 1
    end = sum(world.drafter_of(item) == last for item in plan.held_out)

    def body(number, store, board):
        rank, teacher = rank_of(world, number, store, board, dataset, index, plan), Made(dtype=torch.float32)
        found = None
        if world.is_target(number):
            run_target(rank, teacher, 0)
        else:
            part, asked = learner(rank, tiny.drafter(dtype=torch.float32), teacher), []

            def stop():
                asked.append(number == last)
                return asked[-1] and len(asked) > (end if after is None else after)

            part.step(0)
            found = part.measure(part.drafter, 1, stop), len(part.source.posted) if world.targets else 0
        rank.groups.close()
        return found

    results = [result for result in fork_world(world.size, body, tmp_path) if result is not None]
    assert results == [(None, 0)] * world.drafters


def test_more_ranks_than_micro_batches_and_rows_without_weight_stay_in_step(tmp_path):
    """9 rows make 5 micro-batches: steps of 3 and of 2 for 4 drafters, some of which have nothing at all to do."""
    dataset, index = open_dataset(write_dataset(tmp_path / "data", random_rows(9)))
    results = train(World(3, 4), dataset, index, tmp_path, dtype=torch.float64, steps=4, accumulate=3)
    assert len(results) == 4
    for seen, _, parameters in results:
        assert seen == results[0][0]
        assert all(torch.equal(parameters[name], value) for name, value in results[0][2].items())
        assert sorted(row for _, _, rows in seen[:2] for row in rows) == list(range(9))
        assert all(loss > 0 and norm > 0 for loss, norm, _ in seen)
