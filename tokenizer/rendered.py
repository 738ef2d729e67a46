"""Rows that bring a text already rendered: where the replies are, read off the template's own marks.

The control tokens in such a text are real. A reply is what stands between a generation prompt and the next end-of-turn
token. A turn that shows no whole generation prompt is history whose thinking was taken away: context. An assistant
header inside a message makes every turn unsure: the line is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizer.job import Reject
from tokenizer.pieces import END, PROMPT, REPLY, Piece, TextRow
from tokenizer.seams import OPEN_TAG, behind_space, behind_thinking, starts_open
from tokenizer.template import Renderer


def rendered_rows(
    text: str, renderer: Renderer, kwargs: Mapping[str, Any], response: bool
) -> tuple[list[TextRow], list[tuple[int, Reject]]]:
    """The one row of a rendered text and the turns that cannot be taken. response: learn what follows the thinking."""
    try:
        before, header, opening, end = renderer.markers(kwargs)
    except Reject as reject:
        return [], [(0, reject)]
    rejects: list[tuple[int, Reject]] = []
    pieces: list[Piece] = []
    replies: list[str] = []
    first = -1
    number, cursor, at = -1, 0, text.find(header)
    while at >= 0:
        number += 1
        if not text.endswith(before, 0, at):
            return [], [(0, Reject("unstable_boundary", f"an assistant header inside a message, character {at}"))]
        start = at + len(header)
        stop = text.find(end, start)
        at = text.find(header, start)
        if not text.startswith(opening, start):
            rejects.append((number, Reject("unstable_boundary", "a history turn without its generation prompt")))
            continue
        start += len(opening)
        body = text[start:] if stop < 0 else text[start:stop]
        skip = 0
        if response and (opening.rstrip().endswith(OPEN_TAG) or starts_open(body)):
            skip = behind_space(body, behind_thinking(body))
        if stop < 0 and skip >= len(body):
            rejects.append((number, Reject("no_supervised_tokens", "the text ends before the reply")))
            continue
        first = number if first < 0 else first
        pieces.append(Piece(text[cursor:start], None, PROMPT, False))
        if body:
            pieces.append(Piece(body, None, REPLY, True, skip))
        if stop >= 0:
            pieces.append(Piece(end, [renderer.ids[end]], END, True))
            cursor = stop + len(end)
        replies.append(body[skip:])
    if number < 0:
        return [], [(0, Reject("no_completion", f"no assistant turn as this template opens it: {header!r}"))]
    return ([TextRow(first, pieces, replies, None)] if pieces else []), rejects
