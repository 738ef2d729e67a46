"""Whether a model's tokenizer files can be used at all: asked by the CLI before anything is started.

Where the fast engine would be taken, the layout is looked at and not loaded, which would cost more than all the rest of
a small run; any other tokenizer is loaded.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizer import engines
from tokenizer.errors import Exit, JobError, Reject
from tokenizer.job import parse_flags
from tokenizer.template import CONTENT, Renderer

FIELDS = frozenset(("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"))
TALKS = (("user",), ("system", "user"), ("user", "assistant", "user"))  # what stands before a reply


def check(folder: Path, kwargs: Mapping[str, Any]) -> str:
    """Raises JobError 78, naming the file, for what no row could be made with; returns a warning, or nothing.

    kwargs: the run's template arguments. Rows may bring others, so a template that fails on a plain conversation is no
    error yet.
    """
    _tokenizer(folder / "tokenizer.json")
    renderer = Renderer.load(folder)
    failed: Reject | None = None
    for roles in TALKS:
        messages = [{"role": role, "content": "-"} for role in roles] + [{"role": "assistant", "content": CONTENT}]
        try:
            text = renderer.render(messages, None, False, kwargs)
        except Reject as reject:
            failed = failed or reject
            continue
        _, content, tail = text.partition(CONTENT)
        if not content:
            raise JobError(Exit.CONFIG, "chat_template.jinja does not render what the assistant says", REMEDY)
        try:
            renderer.ending(tail)
        except Reject:
            what = f"with {tail[:40]!r}, which holds" if tail else "with"
            raise JobError(
                Exit.CONFIG, f"chat_template.jinja ends a reply {what} no added token of tokenizer.json", REMEDY
            ) from None
        return ""
    return f"chat_template.jinja renders no plain conversation: {failed.detail}" if failed else ""


REMEDY = "use the chat template and the tokenizer.json of one model"


def _tokenizer(path: Path) -> None:
    try:
        data = engines.parse(path.read_bytes())
        proven = engines.unproven(data) is None and _whole(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        proven = False
    if not proven:
        engines.Reference(path)


def _whole(data: Mapping[str, Any]) -> bool:
    """Whether nothing is missing in a proven layout that loading it would ask for."""
    vocab = data["model"]["vocab"]
    pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in data["model"]["merges"])
    complete = all(first in vocab and second in vocab and first + second in vocab for first, second in pairs)
    return complete and all(token.keys() >= FIELDS for token in data.get("added_tokens") or [])


def main(argv: list[str]) -> int:
    """`python -m tokenizer check --contract N --tokenizer DIR --template-kwargs JSON`: at most two lines on stderr."""
    gc.disable()  # it would walk a whole vocabulary several times, for a process that ends at once
    try:
        flags = parse_flags(argv, ("tokenizer", "template-kwargs"))
        warning = check(Path(flags["tokenizer"]), json.loads(flags["template-kwargs"]))
    except JobError as error:
        print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return int(error.code)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    return int(Exit.OK)
