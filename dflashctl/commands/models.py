"""`eval` and `export`: the trainer's verbs, run as a child, since the CLI never imports torch."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Annotated, Any

import typer

from dflashctl import show
from dflashctl.commands.common import Session, verb
from dflashctl.errors import ApiError, PreflightError, UsageError

Checkpoint = Annotated[str, typer.Argument(metavar="CKPT", help="A drafter checkpoint: a directory.")]


def add(app: typer.Typer) -> None:
    """Register the verbs."""

    @verb(app, name="eval")
    def evaluate(
        session: Session,
        checkpoint: Checkpoint,
        target: Annotated[str, typer.Option("--target", metavar="M", help="The target: a directory or hub id.")],
        prompts: Annotated[str, typer.Option("--prompts", metavar="FILE", help="JSONL rows, as `tokenize` takes.")],
        number: Annotated[int, typer.Option("-n", metavar="N", help="Prompts to use; 0: all.")] = 32,
        max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", metavar="N", help="Per prompt.")] = 256,
    ) -> int:
        """Measure a drafter's acceptance length.

        Block by block as a server drafts, greedy, and checked against the target's own decoding.
        """
        from trainer.job import EvalArgs

        _at_least("-n", number, 0)
        _at_least("--max-new-tokens", max_new_tokens, 2)  # the first token is the prefill's
        code, text = _child(
            "eval", EvalArgs(checkpoint, target, prompts, number, max_new_tokens).to_argv(), capture=True
        )
        if code == 0:
            try:
                document: dict[str, Any] = json.loads(text)
            except ValueError:
                raise ApiError("the evaluation printed no result", "see what it said above") from None
            show.emit(
                document, session.output, lambda: show.pairs(_pair(item) for item in document.items()), checkpoint
            )
        return code

    @verb(app)
    def export(
        session: Session,
        checkpoint: Checkpoint,
        out: Annotated[str, typer.Option("--out", metavar="DIR", help="Where the files go.")],
        format_: Annotated[str, typer.Option("--format", metavar="z-lab|speculators", help="Of the files.")] = "z-lab",
        target: Annotated[str, typer.Option("--target", metavar="M", help="The target that speculators names.")] = "",
    ) -> int:
        """Write a checkpoint for inference engines."""
        from trainer.job import FORMATS, ExportArgs

        if format_ not in FORMATS:
            raise UsageError(f"`--format` is {format_!r}", f"known are {', '.join(FORMATS)}")
        code, _ = _child("export", ExportArgs(checkpoint, out, format_, target).to_argv(), capture=False)
        return code


def _at_least(flag: str, number: int, low: int) -> None:
    if number < low:
        raise UsageError(f"`{flag}` {number} is below {low}")


def _pair(item: tuple[str, Any]) -> tuple[str, str]:
    return item[0].replace("_", " "), str(item[1])


def _child(name: str, argv: list[str], capture: bool) -> tuple[int, str]:
    """Run a verb of the trainer; what it says on stderr goes where ours goes."""
    import subprocess

    from tokenizer.job import Exit

    if importlib.util.find_spec("torch") is None:
        raise PreflightError(f"`{name}` needs the trainer's packages", "pip install 'dflashctl[trainer]'")
    # -P: a trainer.py in the user's directory must not be what runs
    command = [sys.executable, "-P", "-m", "trainer", name, *argv]
    done = subprocess.run(command, stdout=subprocess.PIPE if capture else None, check=False)
    exits = {Exit.OK: 0, Exit.USAGE: 2, Exit.DATA: 4, Exit.CONFIG: 4, Exit.SELF_CHECK: 3}
    known = {int(code): exit_code for code, exit_code in exits.items()}
    return known.get(done.returncode, 1), (done.stdout or b"").decode("utf-8", "replace")
