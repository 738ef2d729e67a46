"""What a conversation is, whichever dialect it came in: the shapes that the rest of the tokenizer works on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenizer.job import Reject


@dataclass(slots=True)
class Reply:
    """What is known of one assistant turn beside its message."""

    finish: str = "stop"  # "stop" | "length"
    weight: float = 1.0  # 0 -> context, not learnt
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None  # as the server reported them, unchecked; an empty list is None
    output_tokens: int | None = None  # of the server's usage, to detect lost reasoning
    reject: Reject | None = None  # this turn alone cannot be taken


@dataclass(slots=True)
class Conversation:
    """One input row, normalised.

    A message is {"role": "system|user|assistant|tool|developer", "content": str} and, where the row has them,
    "reasoning_content": str, "tool_calls": [{"type": "function", "function": {"name": str, "arguments": dict}}],
    "tool_call_id": str, "name": str. Text is byte for byte the row's; inline think tags stay in the content.
    """

    messages: list[dict[str, Any]]
    replies: dict[int, Reply]  # key: index in messages; one for every assistant turn
    tools: list[dict[str, Any]] | None = None  # [{"type": "function", "function": {...}}]
    kwargs: dict[str, Any] = field(default_factory=dict)  # the row's chat_template_kwargs
    source_id: str = ""
    text: str | None = None  # a `text` row, already rendered; messages is empty then
