"""Figures of a step by known numbers: what lies between two steps is charged to neither."""

import json
from types import SimpleNamespace

import pytest
import torch

from dflashctl import balance
from trainer import metrics as module
from trainer.board import Board
from trainer.checkpoint import METRICS
from trainer.link import World
from trainer.loop import Step
from trainer.metrics import NOTHING, Metrics

TARGET, FIRST, SECOND = range(3)


def step(number):
    table = torch.ones(4, 3, dtype=torch.float64)
    return Step(number, 0, 2.0, 1e-3, 1.0, [number], 1000, table, empty=False, stop=False, save=False)


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Metrics of 1+2 ranks, its board, and the clock they read."""
    clock, board = SimpleNamespace(now=100.0), Board(3)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    found = Metrics(tmp_path, World(1, 2), board, 50, dict(NOTHING))

    def trained(number):
        """10 s, for which the target was busy for 4, 3 of them ahead in the walk before, and the drafters for 6 and 8."""
        clock.now += 10
        for rank, seconds in ((TARGET, 4 if number == 0 else 1), (FIRST, 6), (SECOND, 8)):
            board.add(rank, "busy", seconds)
        found.step(step(number))

    yield SimpleNamespace(metrics=found, board=board, clock=clock, trained=trained, path=tmp_path / METRICS)
    found.close()


def lines(told):
    return [json.loads(line) for line in told.path.read_text().splitlines()]


def test_a_walk_is_charged_to_no_step(told):
    for number in range(8):
        told.trained(number)
        with told.metrics.apart():
            told.clock.now += 300
            told.board.add(TARGET, "busy", 3)  # a part of the next step's states is made already
        told.metrics.measured(number + 1, [0, 5, 5])
    steps = [line for line in lines(told) if "loss" in line]
    assert len(steps) == 8
    for line in steps:
        assert (line["seconds"], line["tokens_per_s"]) == (10.0, 100.0)
        assert (line["target_busy"], line["drafter_busy"]) == (0.4, 0.7)
    assert told.metrics.last["eta_s"] == 42 * 10.0 and told.metrics.last["held_out_tau"] == 1.5
    cost = balance.cost(steps)
    assert (cost.target, cost.drafter) == (pytest.approx(4 / 1000), pytest.approx(14 / 1000))


def test_what_is_done_beside_a_walk_still_belongs_to_its_step(told):
    told.trained(0)
    told.clock.now += 2  # a snapshot for the checkpoint
    with told.metrics.apart():
        told.clock.now += 300
    told.trained(1)
    assert [line["seconds"] for line in lines(told)] == [10.0, 12.0]


def test_no_rank_is_busy_for_longer_than_a_step(told):
    """A micro-batch that began before the step counts where it ends."""
    told.board.add(TARGET, "busy", 30)
    told.trained(0)
    assert (lines(told)[0]["target_busy"], lines(told)[0]["drafter_busy"]) == (1.0, 0.7)
