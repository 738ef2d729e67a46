"""Conversations in brief and what becomes of them under a template, for the tests of the boundary rule."""

from __future__ import annotations

from functools import cache
from typing import Any

from families import family_dir

from tokenizer.chat import ChatOptions, Renderer, TextRow, rows
from tokenizer.messages import Conversation, Reply

Row = dict[str, Any]
USER = {"role": "user", "content": "hi"}
CALLS = [("f", {"a": "<|im_end|>", "b": [1]})]
XML = "<tool_call>\n<function=f>\n<parameter=a>\n<|im_end|>\n</parameter>\n<parameter=b>\n[1]\n</parameter>\n</function>\n</tool_call>"
HEAD = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@cache
def renderer(family: str = "qwen36") -> Renderer:
    return Renderer.load(family_dir(family))


def conversation(*messages: Row, tools: Any = None, kwargs: Row | None = None, **last: Any) -> Conversation:
    positions = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    replies = {i: Reply() for i in positions}
    if positions:
        replies[positions[-1]] = Reply(**last)
    return Conversation(list(messages), replies, tools, kwargs or {})


def said(content: str = "", reasoning: str | None = None, calls: Any = None) -> Row:
    message: Row = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
        ]
    return message


def take(conv: Conversation, family: str = "qwen36", **options: Any) -> list[TextRow]:
    kept, rejected = rows(conv, renderer(family), ChatOptions(**options))
    assert not rejected, rejected
    return kept


def refused(conv: Conversation, family: str = "qwen36", **options: Any) -> list[tuple[int, str]]:
    return [(turn, reject.reason) for turn, reject in rows(conv, renderer(family), ChatOptions(**options))[1]]


def emitted(message: Row, family: str = "qwen36", **known: Any) -> str:
    """The learnt text of a conversation of one turn, its control tokens included."""
    options = known.pop("options", {})
    [row] = take(conversation(USER, message, **known), family, **options)
    return "".join(piece.text for piece in row.pieces if piece.loss)
