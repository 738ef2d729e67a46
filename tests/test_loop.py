"""A split changes speed and nothing else; ranks stay in step whatever they have to do."""

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
from trainer.link import World

SPLITS = [World(2, 1), World(1, 2), World(2, 3), World(5, 2), World(0, 1), World(0, 2)]


def train(world, dataset, index, folder, *, dtype, steps, accumulate=4):
    """Per-step (loss, norm, rows), the first step's gradients and the final parameters of each drafter rank."""
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
        seen, first = [], None
        for step in range(steps):
            found = part.step(step)
            seen.append((found.loss, found.norm, found.rows))
            if step == 0:
                first = part.optimizer.first.clone()  # 0.1 of the clipped gradient
        rank.groups.close()
        return seen, first, {name: p.detach().clone() for name, p in model.named_parameters()}

    return [result for result in fork_world(world.size, body, folder) if result is not None]


def test_every_split_gives_the_same_parameters_in_float64(tmp_path):
    dataset, index = open_dataset(write_dataset(tmp_path / "data", random_rows(40)))
    known = train(World(1, 1), dataset, index, tmp_path, dtype=torch.float64, steps=20)[0]
    start = dict(tiny.drafter(dtype=torch.float64).named_parameters())
    assert all((known[2][name] - start[name]).abs().max() > 1e-3 for name in start)  # it did learn
    for world in SPLITS:
        results = train(world, dataset, index, tmp_path, dtype=torch.float64, steps=20)
        assert len(results) == world.drafters
        for seen, _, parameters in results:
            assert [rows for _, _, rows in seen] == [rows for _, _, rows in known[0]]
            for name, value in known[2].items():
                error = float((parameters[name] - value).norm() / value.norm())
                assert error < 1e-9, (world, name, error)


def test_float32_splits_agree_to_rounding(tmp_path):
    dataset, index = open_dataset(write_dataset(tmp_path / "data", random_rows(40)))
    known = train(World(0, 1), dataset, index, tmp_path, dtype=torch.float32, steps=20)[0]
    for world in (World(1, 1), World(2, 3)):
        _, first, parameters = train(world, dataset, index, tmp_path, dtype=torch.float32, steps=20)[0]
        assert float((first - known[1]).norm() / known[1].norm()) < 1e-5, world
        for name, value in known[2].items():
            assert float((parameters[name] - value).norm() / value.norm()) < 1e-4, (world, name)


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
