"""Text that a template puts between a reply's parts, joined to what the model wrote without changing a byte of that."""

from __future__ import annotations

import re

from tokenizer.pieces import END, REPLY, Piece
from tokenizer.view import Split

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
EMPTY_BLOCK = re.compile(r"\s*<think>\s*</think>\s*")


def join(first: str, a: str, second: str, b: str, third: str) -> list[str]:
    """Seams (first, second, third) and raw texts (a, b) in turn; a separator that a raw text holds leaves the seam.

    Without `a`, second is empty; without `b`, third is.
    """
    if a:
        if first and a[0].isspace():  # a text that was not stripped has all the white space that there was
            first = _trim_end(first, a) if first.strip() else ""
        if CLOSE_TAG in a and a.rstrip().endswith(CLOSE_TAG) and CLOSE_TAG in second:
            second = second[behind_thinking(second) :]
        if second and a[-1].isspace():
            second = trim_start(a, second)
    if b:
        if second and b[0].isspace():
            second = _trim_end(second, b)
        if third and b[-1].isspace():
            third = trim_start(b, third)
    return [first, a, second, b, third]


def trim_start(text: str, seam: str) -> str:
    """The seam without the longest start, of white space, that the text before it ends in."""
    for size in range(len(seam) - len(seam.lstrip()), 0, -1):
        if text.endswith(seam[:size]):
            return seam[size:]
    return seam


def _trim_end(seam: str, text: str) -> str:
    """The seam without the longest end, of white space, that the text behind it starts with."""
    for size in range(len(seam) - len(seam.rstrip()), 0, -1):
        if text.startswith(seam[len(seam) - size :]):
            return seam[: len(seam) - size]
    return seam


def unblank(seam: str) -> str:
    """A seam in front of the end token, or none where it is white space alone: nothing takes that from the end of what
    the model wrote, so what the text does not hold was not emitted.
    """
    return seam if seam.strip() else ""


def starts_open(text: str) -> bool:
    """Whether a text starts with the think tag."""
    return text.lstrip().startswith(OPEN_TAG)


def without_open(text: str, opening: str) -> str:
    """A text without its leading think tag and the white space that `opening` has behind its own."""
    if not starts_open(text):
        return text
    return text.lstrip()[len(OPEN_TAG) :].removeprefix(opening[opening.rfind(OPEN_TAG) + len(OPEN_TAG) :])


def behind_thinking(text: str) -> int:
    """Where a text goes on behind its first closing tag; its length where there is none."""
    at = text.find(CLOSE_TAG)
    return len(text) if at < 0 else at + len(CLOSE_TAG)


def behind_space(text: str, start: int) -> int:
    """The first character at or after `start` that is no white space."""
    return len(text) - len(text[start:].lstrip())


def controlled(parts: list[str], first_raw: int, split: Split, loss_from: int) -> list[Piece]:
    """Pieces of a completion in whose seams the model emitted control tokens (channels, tool markers).

    parts: raw texts at first_raw, first_raw + 2, ..., seams between them.
    """
    cut: list[tuple[str, int | None]] = []
    for number, part in enumerate(parts):
        raw = number % 2 == first_raw
        for text, token in [(part, None)] if raw else split(part):
            if cut and token is None and cut[-1][1] is None:
                cut[-1] = (cut[-1][0] + text, None)
            else:
                cut.append((text, token))
    pieces = []
    at = 0
    for text, token in cut:
        skip = min(max(loss_from - at, 0), len(text))
        at += len(text)
        learnt = skip < len(text)
        if token is not None:
            pieces.append(Piece(text, [token], END, learnt))
        elif text:
            pieces.append(Piece(text, None, REPLY, learnt, skip if learnt else 0))
    return pieces
