"""`balance`: the stated model, from lines as a training writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import ctl

from dflashctl.balance import cost, lines, splits
from dflashctl.errors import PreflightError
from trainer.job import TrainArgs

TARGET, DRAFTER = 3e-6, 1e-6  # seconds of a rank for a token


def steps(targets: int, drafters: int, count: int = 12, tokens: int = 1000) -> list[dict[str, Any]]:
    """Lines of a split whose sides cost TARGET and DRAFTER; every fourth step is interrupted by something long."""
    found = []
    for number in range(1, count + 1):
        seconds = tokens * max(TARGET / targets, DRAFTER / drafters) * (50 if number % 4 == 0 else 1)
        shares = {
            "target_busy": tokens * TARGET / targets / seconds,
            "drafter_busy": tokens * DRAFTER / drafters / seconds,
        }
        ranks = {"targets": targets, "drafters": drafters, "memory_bytes": 100 + number}
        found.append({"step": number, "loss": 1.0, "seconds": seconds, "tokens": tokens, **shares, **ranks})
    return found


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (4, 3), (2, 5)])
def test_the_cost_of_a_side_is_the_same_by_whatever_split_it_was_measured(targets: int, drafters: int) -> None:
    found = cost([*steps(3, 3), *steps(targets, drafters)])
    assert (found.target, found.drafter) == (pytest.approx(TARGET), pytest.approx(DRAFTER))
    assert (found.tokens, found.memory, found.ranks, found.measured) == (1000, 112, targets + drafters, 10)


def test_the_fastest_split_gives_the_costly_side_more_ranks() -> None:
    found = splits(cost(steps(1, 1)), ranks=8, accumulate=24, steps=3600, weights=1000)
    assert [entry["split"] for entry in found][:2] == ["6+2", "colocated:8"]  # a tie, by whole micro-batches
    by = {entry["split"]: entry for entry in found}
    assert by["6+2"]["step_seconds"] == by["colocated:8"]["step_seconds"] == pytest.approx(5e-4, abs=1e-4)
    assert by["6+2"]["hours"] == pytest.approx(0.0, abs=0.01) and by["6+2"]["memory_bytes"] == 6000 + 2 * 112
    assert by["7+1"]["tokens_per_s"] == pytest.approx(1e6)  # the drafter is the slower side
    assert by["1+7"]["tokens_per_s"] == pytest.approx(1e6 / 3, rel=1e-3)
    assert len(found) == 8


def test_micro_batches_are_whole() -> None:
    found = cost(steps(1, 1))
    by = {entry["split"]: entry["tokens_per_s"] for entry in splits(found, ranks=8, accumulate=7, steps=0, weights=0)}
    assert by["6+2"] == pytest.approx(1e6 * 7 / 4, rel=1e-3)  # one of two drafters does four of seven
    assert by["colocated:8"] == pytest.approx(1e6 / 4 * 7, rel=1e-3)


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    for found, words in (([], "0 steps"), (steps(1, 1, 6), "4 steps"), (steps(4, 4) + steps(2, 1, 3), "1 steps")):
        with pytest.raises(PreflightError, match=words):
            cost(found)
    together = [{**entry, "targets": 0} for entry in steps(1, 1)]
    with pytest.raises(PreflightError, match="colocated"):
        cost(together)
    none = ctl(tmp_path, "balance", "./none")
    assert (none.code, "holds no training that has made a step" in none.err) == (4, True)


def test_the_table_of_an_out(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in steps(1, 1)))
    (out / "run.json").write_text(json.dumps({"identity": {"accumulate": 12, "steps": 1_000_000}}))
    job = {"argv": TrainArgs("d", str(out), str(tmp_path)).to_argv()}
    (out / "job.json").write_text(json.dumps({"run": "trn-a", "created": 1, "job": job}))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    done = ctl(tmp_path, "balance", "./out", "--ranks", "4", "-o", "json")
    document = done.json()
    assert document["measured"] == {"steps": 10, "target_s_per_mtoken": 3.0, "drafter_s_per_mtoken": 1.0}
    assert [entry["split"] for entry in document["splits"]] == ["3+1", "colocated:4", "2+2", "1+3"]
    assert document["splits"][0]["hours"] == pytest.approx(1000 * 1e-6 * 1e6 / 3600, abs=0.01)
    assert document["splits"][0]["memory_bytes"] == 3 * 1000 + 112
    text = ctl(tmp_path, "balance", "./out").out
    assert text.splitlines() == lines(
        {**document, "splits": ctl(tmp_path, "balance", "./out", "-o", "json").json()["splits"]}
    )
