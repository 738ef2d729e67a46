r"""Qwen3.6's chat template, written out: what Jinja needs 70 us for, in 3.

It serves one template, known by its sha256, and only conversations of plain text under kwargs that it knows; `view` is
None for all else, and Jinja takes over. Tests prove it equal to Jinja on whatever it accepts.

How the template speaks: content is stripped; a reply shows its thinking if it comes after the last user query (or
`preserve_thinking` is true), so a new query rewrites history; the generation prompt opens the think tag, or with
`enable_thinking` false holds an empty think block.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from tokenizer.job import Reject
from tokenizer.view import Message, Shape

TEMPLATE_SHA256 = "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259"
KWARGS = frozenset(("enable_thinking", "preserve_thinking", "add_vision_id"))

END = "<|im_end|>"
CLOSE = "\n</think>\n\n"
THINKING = "<|im_start|>assistant\n<think>\n"
NOT_THINKING = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
TOOLS = "<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>"
TOOLS_RULES = (
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
    "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within "
    "<tool_call></tool_call> XML tags\n- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function call, "
    "but NOT after\n"
    "- If there is no function call available, answer the question like normal with your current knowledge and do not "
    "tell the user about function calls\n</IMPORTANT>"
)

WITH_REASONING = Shape("", CLOSE, "", END, "\n")  # thinking, with a reasoning and a content
WITHOUT_REASONING = Shape(CLOSE, "", "", END, "\n")  # thinking, but no reasoning came
PLAIN = Shape("", "", "", END, "\n")  # the generation prompt closed the think block


class QwenView:
    """One accepted conversation: the text of each message, put together on demand."""

    __slots__ = ("_generation", "_head", "_messages", "_preserve", "_queries", "_texts", "_thinking")

    def __init__(
        self, messages: list[Message], head: str, texts: list[str | None], queries: list[int], kwargs: Mapping[str, Any]
    ) -> None:
        self._messages, self._head, self._texts, self._queries = messages, head, texts, queries
        self._preserve = kwargs.get("preserve_thinking") is True
        self._thinking = kwargs.get("enable_thinking") is not False
        self._generation = THINKING if self._thinking else NOT_THINKING

    def prompt(self, index: int) -> str:
        return self._join(index) + self._generation

    def opening(self, index: int) -> str:
        return self._generation

    def render(self, add_generation_prompt: bool) -> str:
        """The whole conversation."""
        text = self._join(len(self._messages))
        return text + self._generation if add_generation_prompt else text

    def shape(self, index: int, reasoned: bool, spoken: bool) -> Shape:
        if reasoned and not self._thinking:
            raise Reject(
                "unstable_boundary", "a reasoning, but the prompt closed the think block: enable_thinking=false"
            )
        calls = self._messages[index].get("tool_calls")
        if not calls:
            return WITH_REASONING if reasoned else WITHOUT_REASONING if self._thinking else PLAIN
        text = _calls(calls, spoken)
        if reasoned:
            return Shape("", CLOSE, text, END, "\n") if spoken else Shape("", CLOSE + text, "", END, "\n")
        lead = CLOSE if self._thinking else ""
        return Shape(lead, "", text, END, "\n") if spoken else Shape(lead + text, "", "", END, "\n")

    def history(self, last: int, index: int) -> tuple[str, str] | None:
        queries = self._queries
        if not self._preserve and bisect_left(queries, index) != bisect_left(queries, last):
            return None  # a later query: the turn loses its thinking
        own = self._reply(last, True)
        if not own.startswith(self._generation):
            return None
        rest = [
            self._reply(j, True) if text is None else text
            for j, text in enumerate(self._texts[last + 1 : index], last + 1)
        ]
        return own[len(self._generation) :], "".join(rest) + self._generation

    def _join(self, index: int) -> str:
        """The messages before `index`, as the template shows them when there are no others."""
        at = bisect_left(self._queries, index)
        if not at:
            raise Reject("template_error", "TemplateError: No user query found in messages.")
        visible = -1 if self._preserve else self._queries[at - 1]
        parts = [self._head]
        for j, text in enumerate(self._texts[:index]):
            parts.append(self._reply(j, j > visible) if text is None else text)
        return "".join(parts)

    def _reply(self, index: int, visible: bool) -> str:
        """An assistant turn as history, with its thinking or without."""
        message = self._messages[index]
        content = (message.get("content") or "").strip()
        reasoning = message.get("reasoning_content")
        if reasoning is None:
            reasoning = ""
            if "</think>" in content:
                reasoning = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
                content = content.split("</think>")[-1].lstrip("\n")
        text = THINKING + reasoning.strip() + CLOSE + content if visible else "<|im_start|>assistant\n" + content
        calls = message.get("tool_calls")
        if calls:
            text += _calls(calls, bool(content.strip()))
        return text + "<|im_end|>\n"


def view(messages: list[Message], tools: list[Any] | None, kwargs: Mapping[str, Any]) -> QwenView | None:
    """The conversation, or None where only Jinja knows what the template makes of it."""
    if kwargs and not KWARGS.issuperset(kwargs):
        return None
    texts: list[str | None] = []
    queries: list[int] = []
    head = ""
    size = len(messages)
    for index, message in enumerate(messages):
        content = message.get("content")
        if type(content) is not str:
            if content is not None:
                return None
            content = ""
        role = message.get("role")
        if role == "assistant":
            if not _plain(message):
                return None
            texts.append(None)
            continue
        content = content.strip()
        if role == "user":
            texts.append("<|im_start|>user\n" + content + "<|im_end|>\n")
            if not (content.startswith("<tool_response>") and content.endswith("</tool_response>")):
                queries.append(index)
        elif role == "tool":
            first = index > 0 and messages[index - 1].get("role") != "tool"
            last = index + 1 == size or messages[index + 1].get("role") != "tool"
            texts.append(
                ("<|im_start|>user" if first else "")
                + "\n<tool_response>\n"
                + content
                + ("\n</tool_response><|im_end|>\n" if last else "\n</tool_response>")
            )
        elif role == "system" and index == 0:
            texts.append("")
            head = content if tools else "<|im_start|>system\n" + content + "<|im_end|>\n"
        else:
            return None
    if not queries:
        return None  # the template raises; let it say so itself
    if tools:
        if type(tools) is not list:
            return None
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        head = TOOLS + listed + TOOLS_RULES + ("\n\n" + head if head else "") + "<|im_end|>\n"
    return QwenView(messages, head, texts, queries, kwargs)


def _plain(message: Message) -> bool:
    """Whether an assistant message has only what this renderer knows."""
    reasoning = message.get("reasoning_content")
    if reasoning is not None and type(reasoning) is not str:
        return False
    calls = message.get("tool_calls")
    if not calls:
        return True
    if type(calls) is not list:
        return False
    for call in calls:
        function = call.get("function") if type(call) is dict else None
        if type(function) is not dict or type(function.get("name")) is not str:
            return False
        if type(function.get("arguments")) is not dict or not all(type(k) is str for k in function["arguments"]):
            return False
    return True


def _calls(calls: list[dict[str, Any]], spoken: bool) -> str:
    """Tool calls as the template's XML, behind a content or not."""
    parts: list[str] = []
    for number, call in enumerate(calls):
        function = call["function"]
        parts.append("\n" if number else "\n\n" if spoken else "")
        parts.append("<tool_call>\n<function=" + function["name"] + ">\n")
        for name, value in function["arguments"].items():
            text = value if type(value) is str else json.dumps(value, ensure_ascii=False)
            parts.append("<parameter=" + name + ">\n" + text + "\n</parameter>\n")
        parts.append("</function>\n</tool_call>")
    return "".join(parts)
