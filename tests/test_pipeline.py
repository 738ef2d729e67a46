"""The whole way in one test: completions, tokenize, train, SIGTERM, resume, export, eval."""

import json
import os
import signal

from job_fixtures import finish, pod, prepare, write_corpus
from train_runs import Forked, args, metrics, target_dir

from trainer.__main__ import main
from trainer.export import load_drafter
from trainer.job import EVAL_KEYS, EvalArgs, ExportArgs


def test_from_completions_to_a_drafter_that_serves(tmp_path, capfd):
    corpus, data, out = tmp_path / "raw", tmp_path / "data", tmp_path / "out"
    write_corpus(corpus, files=1, lines=80)
    _, tokenize, _ = prepare(str(data), str(corpus), shards=1)
    code, _, err = finish(pod(tokenize, 0))
    assert code == 0 and (data / "dataset.json").is_file(), err

    told = args(data, out, steps=60, max_length=64, anchors=16, accumulate=2, lr=1e-2, checkpoint_every="1h")
    run = Forked(told, tmp_path / "log")
    run.until(lambda: (out / "metrics.jsonl").exists() and len(metrics(out)) >= 20)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 143, run.text()
    run = Forked(told, tmp_path / "log2")
    assert run.wait() == 0, run.text()
    steps = [m["step"] for m in metrics(out) if "loss" in m]
    assert steps == list(range(1, 61))
    story = json.loads((out / "provenance.json").read_text())
    measured = [m["held_out_tau"] for m in metrics(out) if "held_out_tau" in m]
    assert measured[-1] == round(story["held_out_tau"], 4) > 1.2 > measured[0]  # the answers repeat themselves
    assert abs(story["exported_tau"] - story["held_out_tau"]) < 0.05 * story["held_out_tau"]

    again = tmp_path / "again"  # a checkpoint is a drafter as it is
    assert main(["export", *ExportArgs(str(out / "checkpoints" / "step-000060"), str(again)).to_argv()]) == 0
    one, other = load_drafter(out / "export").state_dict(), load_drafter(again).state_dict()
    assert all((one[name] == other[name]).all() for name in one)

    capfd.readouterr()
    prompts = str(next(corpus.iterdir()))
    asked = EvalArgs(str(out / "export"), str(target_dir()), prompts, num_prompts=2, max_new_tokens=12)
    assert main(["eval", *asked.to_argv()]) == 0
    report = json.loads(capfd.readouterr().out)
    assert tuple(report) == EVAL_KEYS and report["lossless"] and report["acceptance_length"] >= 1
