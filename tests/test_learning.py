"""Learning is real: SmolLM2-135M as the target, a few CPU minutes, from the demo's JSON lines to served blocks."""

import runpy
import time
from pathlib import Path

import pytest
import tiny
import torch
from vocab import smollm2_dir

from trainer.blocks import Proposer, decode, verifier_for, walk
from trainer.export import load_drafter
from trainer.target import Target

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[1] / "examples/overfit_smollm2.py"
STEPS = 200


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE), run_name="example")


@pytest.fixture(scope="module")
def learnt(example, tmp_path_factory):
    """The export and the figures."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("learnt") / "export"
    yield out, example["learn"](str(smollm2_dir()), out, STEPS)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def served(example, learnt):
    """The target, the drafter as loaded from its export, and the rows."""
    drafter = load_drafter(learnt[0]).eval()
    target = Target.load(str(smollm2_dir()), drafter.config.target_layer_ids, dtype=torch.float32, truncate=False)
    return target, drafter, example["read_rows"](smollm2_dir())


def test_the_bar(learnt):
    _, found = learnt
    print({key: value for key, value in found.items() if key != "config"})
    assert found["train"]["acceptance_length"] >= 5  # of 8
    assert found["train"]["lossless"]
    assert found["held_out"][1] > found["untrained_walk"][2]  # intervals do not touch
    assert found["held_out_walk"][1] > found["untrained_walk"][2]
    assert found["held_out_walk"][0] == pytest.approx(
        found["held_out"][0], rel=0.1
    )  # the walk tells what serving gives
    assert found["train_walk"][0] == pytest.approx(found["train"]["acceptance_length"], rel=0.1)


def test_zlab_serves_it_with_the_same_blocks(example, learnt, served, monkeypatch):
    zlab = tiny.peer("dflash.model")
    monkeypatch.setattr(zlab, "_cuda_time", time.perf_counter)
    draft, info = zlab.DFlashDraftModel.from_pretrained(learnt[0], output_loading_info=True, dtype=torch.float32)
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
    target, drafter, data = served
    for row in [*data.train[::4], *data.held_out[::4]]:
        prompt = row.ids[: row.prompt]
        theirs = zlab.dflash_generate(
            draft.eval(), target.model, torch.tensor([prompt]), example["REPLY"], None, 0.0, return_stats=True
        )
        ours = decode(
            prompt,
            verifier_for(target),
            Proposer(drafter, target),
            block_size=drafter.config.block_size,
            max_new_tokens=example["REPLY"],
        )
        assert ours.accepted == theirs.acceptance_lengths
        assert ours.tokens == theirs.output_ids[0, len(prompt) :].tolist()


def test_a_guessed_tap_list_is_seen(example, served):
    """Taps of the right number from the wrong layers: acceptance falls although every state has the right shape.

    A shift by one layer is not seen here: a drafter that knows its rows by heart takes neighbouring layers for its own
    (7.6 to 7.8 instead of 7.8). That is why the export's self-check compares the lists themselves.
    """
    target, drafter, data = served
    rows = example["padded"](data.train)
    right = example["interval"](walk(drafter, target, *rows))
    wrong = example["interval"](walk(drafter, Target.wrap(target.model, (0, 1, 2, 3, 4)), *rows))
    assert wrong[2] < 2 < 5 < right[1]
