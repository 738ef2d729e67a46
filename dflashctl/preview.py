"""Rows as the trainer will see them, before anything is run: what is learnt is marked.

The tokenizer does the work, in a child: the command line never loads a tokenizer itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflashctl import listing, show
from dflashctl import plan as plans
from dflashctl.errors import ApiError, PreflightError, UsageError
from dflashctl.model import resolve_model
from dflashctl.records import PATIENT
from tokenizer.job import PREVIEW_REJECTS, Exit, PreviewArgs

NO_OUT = "\0"  # nothing lies below it
MOST_OBJECTS = 200  # that are looked through for rows: they travel in one argument


def show_rows(declaration: plans.Declaration, number: int, output: str) -> int:
    """Print the first `number` rows of the input and what is not taken before them; with -o json as one array.

    Returns the exit code.
    """
    if number < 1:
        raise UsageError(f"`--preview` {number} is below 1")
    found = listing.find(declaration.inputs, declaration.batch_inputs, NO_OUT, PATIENT)
    if skips := found.skips():
        show.say(skips)
    if len(found.objects) > MOST_OBJECTS:
        show.say(f"the first {MOST_OBJECTS} of {len(found.objects)} files are looked through")
    model = resolve_model(declaration.model, PATIENT)
    requests = sorted({o.key for objects in found.batch_inputs.values() for o in objects})
    with tempfile.TemporaryDirectory(prefix="dflash-preview-") as folder:
        for name, data in model.files.items():
            (Path(folder) / name).write_bytes(data)
        arguments = PreviewArgs(
            tokenizer=folder,
            objects=tuple(o.key for o in found.objects[:MOST_OBJECTS]),
            batch_inputs=tuple(requests),
            rows=number,
            loss_on=declaration.loss_on,
            preserve_thinking=declaration.preserve_thinking,
            template_kwargs=dict(declaration.template_kwargs),
            min_loss_tokens=declaration.min_loss_tokens,
            max_length=declaration.max_length,
        )
        rows = _rows(arguments)
        if output in ("json", "yaml"):
            show.emit({"schema": "dflash.preview/1", "rows": list(rows)}, output, list)
        else:
            _print(rows, output)
    return 0


def _print(rows: Iterator[dict[str, Any]], output: str) -> None:
    kept = rejected = 0
    for row in rows:
        kept += row["rejected"] is None
        rejected += row["rejected"] is not None
        show.out(str(row["id"]) if output == "name" else "\n".join(row_lines(row)))
    if rejected == PREVIEW_REJECTS:
        show.say(f"{kept} rows; looked no further after {rejected} that are not taken")
    elif not kept:
        show.say("no row")


def row_lines(row: Mapping[str, Any]) -> list[str]:
    """One row, or why there is none, as lines."""
    if row["rejected"]:
        rejected = row["rejected"]
        head = f"{row['id']}: rejected, {rejected['reason']}: {rejected['detail']}"
        return [show.paint(show.printable(head), show.RED, sys.stdout), ""]
    head = f"{row['id']}: {row['tokens']} tokens, {row['loss_tokens']} learnt {show.learnt('marked so')}"
    return [show.paint(head, show.BOLD, sys.stdout), show.segments(row["segments"]), ""]


def _rows(arguments: PreviewArgs) -> Iterator[dict[str, Any]]:
    # -P: a tokenizer.py in the user's directory must not be what runs
    command = [sys.executable, "-P", "-m", "tokenizer", "preview", *arguments.to_argv()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        for line in child.stdout:
            yield json.loads(line)
        said = child.stderr.read().decode("utf-8", "replace").strip().splitlines()
    if child.returncode:
        message = next((line for line in said if line.startswith("error: ")), said[-1] if said else "no word")
        hint = next((line.removeprefix("hint: ") for line in said if line.startswith("hint: ")), "")
        kind = PreflightError if child.returncode in (Exit.DATA, Exit.CONFIG) else ApiError
        raise kind(f"the preview ended: {message.removeprefix('error: ')}", hint)
