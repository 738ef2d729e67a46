"""One class a verb: what the CLI writes is what the trainer reads."""

import subprocess
import sys
from pathlib import Path

import pytest

from tokenizer.job import Exit, JobError
from trainer.__main__ import main
from trainer.job import CONTRACT, EvalArgs, ExportArgs


@pytest.mark.parametrize(
    "args",
    [
        EvalArgs("ckpt", "target", "p.jsonl"),
        EvalArgs("a b", "org/name@main", "-p=x.jsonl", 0, 7),
        ExportArgs("ckpt", "--out"),
        ExportArgs("ckpt", "out", "speculators", "target"),
    ],
)
def test_argv_round_trip(args):
    assert type(args).from_argv(args.to_argv()) == args
    assert args.to_argv()[0] == f"--contract={CONTRACT}"


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--contract=2", "--checkpoint=c", "--out=o"], Exit.CONFIG, "contract 2 is not 1"),
        (["--contract=1", "--checkpoint=c"], Exit.USAGE, "--out"),
        (["--contract=1", "--checkpoint=c", "--out=o", "--more=1"], Exit.USAGE, "--more"),
        (["--contract=1", "--check=c", "--out=o"], Exit.USAGE, "--check"),
    ],
)
def test_what_is_not_the_contract_is_refused(argv, code, words, capsys):
    with pytest.raises(JobError, match=words) as caught:
        ExportArgs.from_argv(argv)
    assert caught.value.code == code
    assert main(["export", *argv]) == code
    assert words in capsys.readouterr().err


def test_an_unknown_verb_is_refused(capsys):
    assert main(["evaluate"]) == main([]) == Exit.USAGE
    assert "`evaluate` is no verb of the trainer" in capsys.readouterr().err


def test_the_contract_is_standard_library():
    """The CLI imports it: torch and transformers must stay out of it."""
    heavy = "('torch', 'transformers', 'numpy')"
    code = f"import sys, trainer.job, trainer.config; print(any(m in sys.modules for m in {heavy}))"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "False\n"
