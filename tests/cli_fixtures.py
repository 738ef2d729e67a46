"""Helpers of the command line's tests: real processes in a directory of their own, with the tiny tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from job_fixtures import ROOT
from vocab import tiny_dir


class Done(NamedTuple):
    """How one command ended."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.out)
        return value


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "dflashctl", *args]


def environment(**more: str) -> dict[str, str]:
    """This process's, without settings of the developer, with the checkout on the path of every child."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_")}
    return {**kept, "PYTHONPATH": str(ROOT), "DFLASH_BACKEND": "local", **more}


def ctl(cwd: Path, *args: str, **env: str) -> Done:
    """Run dflashctl to its end in `cwd`."""
    done = subprocess.run(
        command(*args), cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=300, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def tokenize(cwd: Path, source: str, out: str, *args: str, **env: str) -> Done:
    """`dflashctl tokenize` with the tiny tokenizer; rows of any length are kept."""
    return ctl(cwd, "tokenize", source, "--out", out, "--model", str(tiny_dir()), *args, **env)
