"""Rows in brief, and what becomes of them in the notation of docs/dialects.md, for the tests of the dialects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenizer.dialects import Conversation, loads, parse
from tokenizer.job import MALFORMED, Reject

ROOT = Path(__file__).parents[1]
INPUTS = ROOT / "tests" / "inputs"
SAMPLES = ROOT.parent / "shared" / "samples"


def lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().split(b"\n") if line.strip()]


def requests(path: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in lines(path)]
    return {row["custom_id"]: row for row in rows}


def reason(row: object, **kwargs: Any) -> str:
    with pytest.raises(Reject) as caught:
        parse(row, **kwargs)
    assert caught.value.reason in MALFORMED
    return caught.value.reason


def detail(row: object) -> str:
    with pytest.raises(Reject) as caught:
        parse(row)
    return caught.value.detail


def describe(conv: Conversation) -> str:
    """The notation of docs/dialects.md."""

    def turn(name: str, n: int) -> str:
        reply = conv.replies[n]
        if reply.reject is not None:
            return f"~~{name}~~ `{reply.reject.reason}`"
        cut = " cut" if reply.finish == "length" else ""
        ids = " ids" if reply.token_ids else ""
        return (f"**{name}**" if reply.weight and name == "assistant" else name) + cut + ids

    if conv.text is not None:
        return turn("rendered text", 0)
    return ", ".join(
        turn("assistant", n) if m["role"] == "assistant" else m["role"] for n, m in enumerate(conv.messages)
    )


def outcome(line: bytes, lookup: Any = None) -> str:
    try:
        return describe(parse(loads(line), lookup))
    except Reject as e:
        return f"`{e.reason}`"


def user(text: str = "q") -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "a", **fields}


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [user(), *messages], **fields}


def only(conv: Conversation) -> tuple[dict[str, Any], Any]:
    """The message and the reply of a conversation with one assistant turn."""
    (n,) = conv.replies
    return conv.messages[n], conv.replies[n]


# --- small inputs


def conversations(name: str) -> list[Conversation]:
    lookup = requests(INPUTS / "batch_input.jsonl").get
    return [parse(loads(line), lookup) for line in lines(INPUTS / name)]


def called(arguments: object) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def rollout(*output: Any, given: Any = "q", **response: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": given}, "response": {"output": list(output), **response}}


MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
REASONING = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]}
