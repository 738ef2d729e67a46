"""What tokenizer.chat asks of one conversation under one template, whoever renders it: Jinja or a proven shortcut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

Message = dict[str, Any]
Split = Callable[[str], list[tuple[str, int | None]]]


class Shape(NamedTuple):
    """What the template puts around one reply, after the prompt: lead [reasoning] mid [content] tail, end, after.

    end: the end-of-turn token; after: what follows it until the next message. split: None where the seams hold no
    control token; else it cuts a seam into (text, None) and (control token, its id).
    """

    lead: str
    mid: str
    tail: str
    end: str
    after: str
    split: Split | None = None


class View(Protocol):
    """One conversation under one template. Every method raises Reject."""

    def prompt(self, index: int) -> str:
        """The text that the server saw before assistant message `index`."""

    def opening(self, index: int) -> str:
        """The end of that text: as much as is needed to see an opened or closed think tag."""

    def shape(self, index: int, reasoned: bool, spoken: bool) -> Shape:
        """The seams around assistant message `index`, with a reasoning and a content or without."""

    def history(self, last: int, index: int) -> tuple[str, str] | None:
        """Turn `last` as the history of `index` shows it, and the rest of that prompt; None where it is rewritten."""
