"""The normal form of a conversation, and the way of one message into it.

Every dialect is first put into a list of OpenAI-like messages; `Builder` is the one place that reads their fields.
It is strict on purpose: text in a field or a shape that is not known here would otherwise become an empty reply, and
an empty reply trains a drafter to end the turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenizer.fields import (
    MEDIA,
    MISSING,
    REASONING,
    TOKEN_IDS,
    Json,
    decode_json,
    finish,
    kind,
    no_media,
    part_text,
    short,
    token_ids,
    unknown,
    weight,
    wrap_call,
)
from tokenizer.job import Reject


@dataclass(slots=True)
class Reply:
    """What is known of one assistant turn beside its message."""

    finish: str = "stop"  # "stop" | "length"; length = the model did not emit the end of the turn
    weight: float = 1.0  # 0 -> context, not learnt
    prompt_token_ids: list[int] | None = None
    prompt_text: str = ""  # beside the ids where no message precedes the reply: their text, or a part of it
    token_ids: list[int] | None = None  # integers as the server reported them, range unchecked; an empty list is None
    output_tokens: int | None = None  # of the server's usage, to detect lost reasoning
    reject: Reject | None = None  # this turn alone cannot be taken


@dataclass(slots=True)
class Conversation:
    """One input row, normalised.

    A message is {"role": "system|user|assistant|tool|developer", "content": str} and, where the row has them,
    "reasoning_content": str, "tool_calls": [{"type": "function", "function": {"name": str, "arguments": dict}}],
    "tool_call_id": str, "name": str. Text is byte for byte the row's; inline think tags stay in the content.
    "content" is missing in one case: the row brings the reply's token ids and not its text.
    The arguments of a turn rejected as bad_tool_arguments are left as the row has them; it and every later turn of the
    line carry that reject, since the later prompts would contain it.
    """

    messages: list[Json]
    replies: dict[int, Reply]  # key: index in messages, one for every assistant turn; a text row: {0: its last reply}
    tools: list[Json] | None = None  # [{"type": "function", "function": {...}}]
    kwargs: Json = field(default_factory=dict)  # the row's chat_template_kwargs
    source_id: str = ""
    text: str | None = None  # a `text` row, already rendered; messages is empty then
    asked: int = 0  # so many messages, from the first, are a request as it was sent


ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_call": "call",  # a turn that is nothing but JSON calls
    "tool_call": "call",
}
TEXT_PARTS = frozenset(("text", "output_text", "input_text"))
REASONING_PARTS = frozenset(("reasoning", "thinking", "reasoning_text", "summary_text"))
KNOWN = frozenset((*REASONING, "finish_reason", "stop_reason"))
CALL_PARTS = frozenset(("tool_call", "function_call"))


class Builder:
    """Collects messages in the normal form."""

    __slots__ = ("broken", "messages", "replies")

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.replies: dict[int, Reply] = {}
        self.broken: Reject | None = None  # a turn that no later prompt can be rendered without

    def add(self, message: object, learnt: bool = True) -> None:
        """Appends one message of any dialect (`role`/`content` or `from`/`value`); raises Reject."""
        if type(message) is not dict:
            unknown(f"message {len(self.messages)} is {kind(message)}, not an object")
        if "role" in message:
            name, content = message["role"], message.get("content", MISSING)
        else:
            name, content = message.get("from"), message.get("value", MISSING)
        if len(message) > 2:
            no_media(message, f"message {len(self.messages)}")
        role = ROLES.get(name) if type(name) is str else None
        if role is None:
            unknown(f"message {len(self.messages)} has the role {short(name)} (keys {short(sorted(message))})")
        if role == "assistant":
            if type(content) is str and len(message) == 2 and self.broken is None:
                self.replies[len(self.messages)] = Reply() if learnt else Reply(weight=0.0)
                self.messages.append({"role": "assistant", "content": content})
            else:
                self._assistant(message, content, learnt)
        elif role == "call":
            self._calls(message, content, learnt)
        else:
            if type(content) is not str:
                content = self._context(role, content)
            out: Json = {"role": role, "content": content}
            if len(message) > 2:
                for key in ("tool_call_id", "name"):
                    if type(message.get(key)) is str:
                        out[key] = message[key]
            self.messages.append(out)

    def _context(self, role: str, content: object) -> str:
        if content is None:
            return ""
        if type(content) is not list:
            what = "without content" if content is MISSING else f"whose content is {kind(content)}"
            unknown(f"message {len(self.messages)} is a {role} message {what}")
        texts = []
        for part in content:
            name = self._part_type(part)
            if name not in TEXT_PARTS:
                unknown(f"a {role} message holds a content part of type {name!r}")
            texts.append(part_text(part, name))
        return "".join(texts)

    def _part_type(self, part: object) -> str:
        name = part.get("type", "text") if type(part) is dict else None
        if type(name) is not str:
            unknown(f"message {len(self.messages)} holds a content part that is not known: {short(part)}")
        if any(media in name for media in MEDIA):
            raise Reject("multimodal", f"message {len(self.messages)} holds a part of type {name!r}; text only")
        return name

    def _assistant(self, message: Json, content: object, learnt: bool) -> None:
        reply = Reply(weight=weight(message) if learnt else 0.0)
        reasoning = self._reasoning(message)
        calls = message.get("tool_calls") or []
        if type(calls) is not list:
            unknown(f"tool_calls of message {len(self.messages)} is {kind(calls)}, not a list")
        legacy = message.get("function_call")
        if legacy:
            if calls:
                unknown(f"message {len(self.messages)} has tool_calls and a function_call")
            calls = [legacy]
        if type(content) is list:
            content, inner, more = self._parts(content)
            if inner is not None:
                if reasoning:
                    unknown(f"message {len(self.messages)} has reasoning both in a field and in a content part")
                reasoning = inner
            calls = [*calls, *more]
        elif type(content) is dict:
            if content.keys() != {"answer"} or type(content["answer"]) is not str:
                unknown(f"content of an assistant message is an object with keys {short(sorted(content))}")
            content = content["answer"]
        elif content is not None and content is not MISSING and type(content) is not str:
            unknown(f"content of an assistant message is {kind(content)}")

        out: Json = {"role": "assistant", "content": content}
        if reasoning is not None:
            out["reasoning_content"] = reasoning
        if calls:
            self._wrap(out, calls, reply)
        try:
            reply.prompt_token_ids = token_ids(message.get("prompt_token_ids"), "prompt_token_ids")
            for name in TOKEN_IDS:
                reply.token_ids = reply.token_ids or token_ids(message.get(name), name)
        except Reject as e:
            reply.reject = reply.reject or e
        if message.get("refusal"):
            reply.reject = reply.reject or Reject("bad_finish_reason", f"a refusal: {short(message['refusal'])}")
        reply.finish, bad = finish(message.get("finish_reason"))
        reply.reject = reply.reject or bad
        self._check_extra(message, reasoning, reply)
        if type(content) is not str:
            if reply.token_ids is None:
                if not (reasoning or calls):
                    if content is MISSING:
                        unknown(f"an assistant message without content (keys {short(sorted(message))})")
                    reply.reject = reply.reject or Reject("no_completion", "the content of the reply is null")
                out["content"] = ""
            elif reasoning or calls:
                out["content"] = ""
            else:
                del out["content"]
        self._append(out, reply)

    def _append(self, out: Json, reply: Reply) -> None:
        reply.reject = reply.reject or self.broken
        self.replies[len(self.messages)] = reply
        self.messages.append(out)

    def _wrap(self, out: Json, calls: list[Any], reply: Reply) -> None:
        wrapped = out.setdefault("tool_calls", [])
        for call in calls:
            done, bad = wrap_call(call)
            wrapped.append(done)
            if bad is not None:
                self.broken = self.broken or bad
                reply.reject = reply.reject or bad

    def _calls(self, message: Json, content: object, learnt: bool) -> None:
        """A turn of its own that holds JSON calls: what follows an assistant turn directly was generated with it."""
        if not isinstance(content, (str, list, dict)):
            unknown(f"message {len(self.messages)} is a tool call without content (keys {short(sorted(message))})")
        try:
            calls = content if type(content) is not str else decode_json(content, "a tool call", "bad_tool_arguments")
            calls = calls if type(calls) is list else [calls]
            bad = None
        except Reject as e:
            calls, bad = [{"name": "", "arguments": content}], e
        last = len(self.messages) - 1
        if last not in self.replies:
            self._append({"role": "assistant", "content": ""}, Reply(weight=weight(message) if learnt else 0.0))
            last += 1
        if bad is not None:
            self.broken = self.broken or bad
            self.replies[last].reject = self.replies[last].reject or bad
        else:
            self._wrap(self.messages[last], calls, self.replies[last])

    def _parts(self, content: list[Any]) -> tuple[str | None, str | None, list[Any]]:
        """Content parts -> text, reasoning, calls; in the only order that a template can render."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[Any] = []
        for part in content:
            name = self._part_type(part)
            if name in TEXT_PARTS:
                texts.append(part_text(part, name))
                late = bool(calls)
            elif name in REASONING_PARTS:
                thoughts.append(part_text(part, name))
                late = bool(texts or calls)
            elif name in CALL_PARTS:
                call = part.get("value", part.get(name, part))
                calls.append(decode_json(call, "a tool call", "bad_tool_arguments") if type(call) is str else call)
                late = False
            elif name == "redacted_thinking":
                raise Reject("reasoning_lost", "the reasoning of a reply is redacted")
            else:
                unknown(f"an assistant message holds a content part of type {name!r}")
            if late:
                unknown(f"a {name} part follows the answer or a tool call; no template renders that order")
        return "".join(texts) if texts else None, "".join(thoughts) if thoughts else None, calls

    def _reasoning(self, message: Json) -> str | None:
        found: str | None = None
        for name in REASONING:
            value = message.get(name)
            if value is None:
                continue
            if type(value) is not str:
                unknown(f"{name} of an assistant message is {kind(value)}, not a string")
            if found and value and found != value:
                unknown(f"an assistant message has two different reasoning texts, one in {name}")
            found = found or value
        return found

    def _check_extra(self, message: Json, reasoning: str | None, reply: Reply) -> None:
        """Thinking under a name that is not known must not be dropped in silence."""
        for name, value in message.items():
            if name in KNOWN or reasoning or not value or not isinstance(value, (str, list, dict)):
                continue
            if "reason" in name or "think" in name or "thought" in name:
                reply.reject = reply.reject or Reject("reasoning_lost", f"reasoning in the unknown field {name!r}")
