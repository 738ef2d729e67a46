"""`eval` and `export` hand over to the trainer in a child: its exit codes, its words, and what is said without it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import ctl

from dflashctl import cli


@pytest.mark.parametrize(
    "args",
    [["eval", "nothing", "--target", "none", "--prompts", "none.jsonl"], ["export", "nothing", "--out", "there"]],
)
def test_a_checkpoint_that_is_not_there_is_one_clear_line(tmp_path: Path, args: list[str]) -> None:
    failed = ctl(tmp_path, *args)
    assert failed.code == 4 and "nothing" in failed.err and failed.out == ""
    assert "Traceback" not in failed.err and failed.err.count("error: ") == 1


@pytest.mark.parametrize(
    "args",
    [
        ["eval", "c", "--target", "t"],
        ["eval", "c", "--target", "t", "--prompts", "p", "-n", "-1"],
        ["eval", "c", "--target", "t", "--prompts", "p", "--max-new-tokens", "1"],
        ["export", "c", "--out", "o", "--format", "gguf"],
    ],
)
def test_impossible_flags_start_no_child(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a child was started"))
    assert cli.main(args) == 2


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["export", "c", "--out", "o"]) == 4
    assert "dflashctl[trainer]" in capsys.readouterr().err


@pytest.mark.parametrize(("ended", "code"), [(0, 0), (64, 2), (65, 4), (70, 3), (78, 4), (75, 1), (-9, 1)])
def test_exit_codes_are_those_of_the_command_line(
    ended: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[bytes]:
        seen.append(command)
        return subprocess.CompletedProcess(command, ended, b'{"schema": "s", "acceptance_length": 2.5}\n')

    monkeypatch.setattr(subprocess, "run", run)
    assert cli.main(["eval", "c", "--target", "t", "--prompts", "p", "-n", "3", "-o", "json"]) == code
    assert seen[0][1:5] == ["-P", "-m", "trainer", "eval"] and "--num-prompts=3" in seen[0]
    printed = capsys.readouterr().out
    assert json.loads(printed)["acceptance_length"] == 2.5 if code == 0 else printed == ""
