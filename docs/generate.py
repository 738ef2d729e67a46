"""Write docs/cli.md from the help texts: `python docs/generate.py`. A test keeps the two equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer.main

from dflashctl.cli import build

WIDTH = 96
HEAD = """# Command line reference

Generated from `--help` by `python docs/generate.py`. The global options stand before or after the verb.
Every setting of `tokenize` is also a key of [tokenize] in dflash.toml and a variable `DFLASH_TOKENIZE_<KEY>`; of
`train`, [train] and `DFLASH_TRAIN_<KEY>`.
"""


def helps() -> dict[str, str]:
    """Verb -> its help text ("": that of the program)."""
    command: Any = typer.main.get_command(build())
    width = {"terminal_width": WIDTH, "max_content_width": WIDTH}
    root = command.make_context("dflashctl", [], resilient_parsing=True, **width)
    found = {"": root.get_help()}
    for name, verb in command.commands.items():
        found[name] = verb.make_context(name, [], parent=root, resilient_parsing=True, **width).get_help()
    return found


def reference() -> str:
    """The text of docs/cli.md."""
    parts = [HEAD]
    for name, text in helps().items():
        lines = "\n".join(line.rstrip() for line in text.splitlines())
        parts.append(f"## dflashctl{' ' * bool(name)}{name}\n\n```text\n{lines}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (Path(__file__).parent / "cli.md").write_text(reference(), encoding="utf-8")
