"""What the supervisor concludes, from numbers alone."""

import json
import signal
from pathlib import Path

import pytest
from safetensors import SafetensorError
from train_runs import args, start

from tokenizer.job import Exit, JobError
from trainer.board import Board, Phase
from trainer.checkpoint import METRICS
from trainer.job import parse_cadence, parse_split
from trainer.metrics import cut_back
from trainer.supervisor import full, silent, verdict, visible


def board(*phases):
    made = Board(len(phases))
    for rank, phase in enumerate(phases):
        made.beat(rank, phase)
    return made


def quiet_for(seconds, *phases, steps=()):
    made = board(*phases)
    return silent(made, made.get(0, "beat") + seconds, list(steps), range(len(phases)))


def test_each_phase_may_be_silent_for_its_time():
    assert quiet_for(1700, Phase.LOAD, Phase.STEP) is None
    assert quiet_for(1900, Phase.LOAD, Phase.LOAD) is not None
    assert quiet_for(890, Phase.FIRST, Phase.FIRST) is None
    assert quiet_for(910, Phase.FIRST, Phase.STEP) is not None
    assert quiet_for(119, Phase.STEP, Phase.STEP, steps=[1.0, 1.0, 2.0]) is None
    assert quiet_for(121, Phase.STEP, Phase.STEP, steps=[1.0, 1.0, 2.0]) is not None
    assert quiet_for(121, Phase.STEP, Phase.STEP, steps=[10.0, 11.0, 12.0]) is None  # 20 x the median is 220 s
    assert quiet_for(221, Phase.STEP, Phase.STEP, steps=[10.0, 11.0, 12.0]) is not None


def test_ranks_that_wait_for_one_that_saves_are_not_silent():
    assert quiet_for(600, Phase.STEP, Phase.SAVE, steps=[1.0]) is None
    assert quiet_for(1900, Phase.STEP, Phase.EXPORT, steps=[1.0]) is not None


def test_the_quietest_rank_is_named():
    made = board(Phase.STEP, Phase.STEP, Phase.STEP)
    last = made.get(1, "beat")
    made.rows[1, 1] = last - 500
    assert silent(made, last, [1.0], range(3)) == 1
    assert silent(made, last, [1.0], [0, 2]) is None  # it has ended since


def test_one_that_waits_for_another_is_not_the_one_to_name():
    made = board(Phase.STEP, Phase.STEP, Phase.STEP)
    last = made.get(1, "beat")
    for rank, seconds in enumerate((130, 100, 1)):
        made.rows[rank, 1] = last - seconds
    with made.waiting(0):
        assert silent(made, last, [1.0], range(3)) == 1
        with made.waiting(1):
            assert silent(made, last, [1.0], range(3)) == 0  # all that are late wait: the one that began
    assert silent(made, last, [1.0], range(3)) == 0


def test_a_rank_at_its_end_gives_the_others_no_more_time():
    assert quiet_for(121, Phase.END, Phase.STEP, steps=[1.0]) is not None
    assert quiet_for(1790, Phase.END, Phase.END, steps=[1.0]) is None


def test_a_full_disk_is_known_by_code_and_by_words():
    assert full(OSError(28, "No space left on device")) and full(OSError(122, "Disk quota exceeded"))
    assert full(SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert not full(OSError(2, "No such file")) and not full(ValueError("28"))


@pytest.mark.parametrize(
    ("codes", "stopping", "wanted"),
    [
        ({"target:0": 0, "drafter:0": 0}, False, (0, "")),
        ({"target:0": 0, "drafter:0": 143}, True, (143, "")),
        ({"target:0": -9, "drafter:0": 71}, False, (71, "target:0")),  # the one that was killed, not its peers
        ({"target:0": 71, "drafter:0": 76}, False, (76, "drafter:0")),  # the one that knows why
        ({"target:0": 71, "drafter:0": -9, "drafter:1": 73}, False, (73, "drafter:1")),
        ({"target:0": 1, "drafter:0": 0}, False, (71, "target:0")),
        ({"target:0": 0, "drafter:0": 73}, True, (73, "drafter:0")),  # a SIGTERM does not hide a failed save
        ({"target:0": 0, "drafter:0": 0}, True, (0, "")),  # it came after the last step
    ],
)
def test_verdicts(codes, stopping, wanted):
    assert verdict(codes, stopping) == wanted


def test_each_rank_sees_its_own_gpu():
    assert [visible(None, number) for number in range(3)] == ["0", "1", "2"]
    assert [visible("GPU-a,GPU-b,4", number) for number in range(3)] == ["GPU-a", "GPU-b", "4"]


def test_a_resume_cuts_what_is_done_again_out_of_the_lineage(tmp_path):
    """Steps behind the checkpoint, and the walk after its step."""
    assert cut_back(tmp_path, 3) == 0
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(1, 7)]
    lines.insert(4, json.dumps({"step": 4, "held_out_tau": 2.0}))
    lines.insert(2, json.dumps({"step": 2, "held_out_tau": 1.5}))
    (tmp_path / METRICS).write_text("\n".join(lines) + '\n{"step": 7, "lo')
    assert cut_back(tmp_path, 4) == 2
    kept = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [entry["step"] for entry in kept] == [1, 2, 2, 3, 4]


def test_splits_and_cadences():
    assert parse_split("4+3") == (4, 3) and parse_split("1+1") == (1, 1)
    assert parse_split("colocated") == (0, 0) and parse_split("colocated:2") == (0, 2)
    assert parse_cadence("200") == (200, 0) and parse_cadence("90s") == (0, 90) and parse_cadence("2h") == (0, 7200)
    for parse, texts in (
        (parse_split, ("4", "0+1", "1+0", "1+1+1", "colocated:", "-1+2")),
        (parse_cadence, ("", "0", "m", "1d", "-5")),
    ):
        for text in texts:
            with pytest.raises(JobError) as caught:
                parse(text)
            assert caught.value.code == Exit.USAGE


def test_a_stop_that_comes_during_the_imports_is_heard(tmp_path):
    """As the first process of a container it would never get a signal that it does not handle."""
    process = start(args(tmp_path / "data", tmp_path / "out"))
    maps = Path(f"/proc/{process.pid}/maps")
    while "libtorch" not in maps.read_text():  # in the middle of the imports
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == int(Exit.SIGTERM)
