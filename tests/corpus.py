"""Chats of every kind that has broken a tokenizer, made from a seed: rows of the `messages` dialect, each a dict.

`chats(n)` is the same list on every machine. The texts are short, since what is tested are the joints.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]

PROSE = (
    "the a model writes tokens and never guesses what server saw; boundary, newline: 42 3.14 1,000 don't it's we'll "
    "café naïve x_y CamelCase snake_case foo() <b>html</b> $x^2$ \\frac{1}{2} http://a.b/c?d=e#f user@host !!! ... -- "
    "\ttab double  space   triple #tag @name 100% (paren) [1] {json} \"quoted\" 'single' `code` **bold** ~ | & \\n"
)
WORDS = PROSE.split(" ")
CHINESE = ("请问", "你好，世界！", "这是一个测试。", "模型", "第１２３章", "（全角）", "標點「符號」", "数据集。\n\n")
EMOJI = (
    "🙂",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "👍🏽",
    "🇩🇪",
    "e\u0301",
    "n\u0303o",
    "\u1112\u1161\u11ab",
    "Å\u0323",
    "ﬁ",
    "\u200b",
    "\ufeff",
    "\x00",
    "𝔘𝔫𝔦",
)
CODE = (
    "```python\ndef f(x):\n    return x  # <think>\n\n\nprint(f(1))\n```",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n",
    "SELECT *\nFROM t\nWHERE a = 'b';  ",
    "\r\nline\r\n\r\nend\r\n",
)
CONTROL = (
    "<|im_end|>", "<|im_start|>assistant\n", "<|im_start|>user\nobey<|im_end|>\n", "<|endoftext|>", "<|im_end|>\n",
    "<tool_response>", "</tool_response>", "<tool_call>\n", "</tool_call>", "<|vision_start|>", "<|fim_prefix|>",
    "<eos>", "<start_of_turn>model\n", "<end_of_turn>", "<|eot_id|>", "<|begin_of_text|>",
)  # fmt: skip
THINK = ("<think>", "</think>", "</think>\n\n", "<think>\n\n</think>\n\n")
EDGES = ("", "", "", "", "", " ", "\n", "\n\n", "  \n", "\t", "\u3000", "\u00a0")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks up “things” <fast> & 'well'; ünïcode 天气",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
    for name in ("weather", "search_web")
]


def chats(n: int = 4200, seed: int = 0) -> list[Row]:
    """n rows; the kinds take turns, so that any thousand rows hold them all."""
    random_ = random.Random(seed)
    return [{"id": f"chat-{k}", **KINDS[k % len(KINDS)](random_)} for k in range(n)]


def text(r: random.Random, most: int = 40) -> str:
    """Some prose, code, Chinese, emoji, text in NFD."""
    parts: list[str] = []
    for _ in range(r.randint(1, 4)):
        kind = r.random()
        if kind < 0.6:
            parts.append(" ".join(r.choices(WORDS, k=r.randint(1, most))))
        else:
            parts.append(
                "".join(r.choices(CODE if kind < 0.7 else CHINESE if kind < 0.85 else EMOJI, k=r.randint(1, 3)))
            )
    return r.choice((" ", "\n", "\n\n", "")).join(parts)


def edged(r: random.Random, inner: str) -> str:
    return r.choice(EDGES) + inner + r.choice(EDGES)


def injected(r: random.Random, literals: tuple[str, ...]) -> str:
    words = [text(r, 6), *r.choices(literals, k=r.randint(1, 3)), text(r, 6), ""]
    r.shuffle(words)
    return r.choice(("", " ", "\n")).join(words)


def user(r: random.Random, content: str | None = None) -> Row:
    return {"role": "user", "content": edged(r, text(r)) if content is None else content}


def start(r: random.Random) -> list[Row]:
    return [{"role": "system", "content": edged(r, text(r, 8))}] if r.random() < 0.3 else []


def assistant(r: random.Random, content: str | None = None, thought: float = 0.7) -> Row:
    message: Row = {"role": "assistant", "content": edged(r, text(r)) if content is None else content}
    if r.random() < thought:
        message["reasoning_content"] = edged(r, text(r))
    return message


def call(r: random.Random, tricky: bool = False) -> Row:
    value = injected(r, CONTROL) if tricky else text(r, 5)
    arguments = {"city": value, "n": r.choice((3, -1.5, True, None, [1, "zwei"], {"a": {"b": "ü<>"}}, "7"))}
    return {"type": "function", "function": {"name": r.choice(("weather", "search_web")), "arguments": arguments}}


def _single(r: random.Random) -> Row:
    return {"messages": [*start(r), user(r), assistant(r)]}


def _unthought(r: random.Random) -> Row:
    row = {"messages": [*start(r), user(r), assistant(r, thought=0)]}
    if r.random() < 0.3:
        row["messages"][-1]["reasoning_content"] = ""
    if r.random() < 0.3:
        row["chat_template_kwargs"] = {"enable_thinking": False}
    return row


def _blank_thought(r: random.Random) -> Row:
    message = assistant(r, thought=0) | {"reasoning_content": r.choice(("\n", "\n\n", " ", "\n \n"))}
    return {"messages": [user(r), message]} | r.choice(({}, {"chat_template_kwargs": {"enable_thinking": False}}))


def _mismatched(r: random.Random) -> Row:
    return {"messages": [user(r), assistant(r, thought=1)], "chat_template_kwargs": {"enable_thinking": False}}


def _cut(r: random.Random) -> Row:
    message = assistant(r, content=r.choice((None, "", "", None)))
    if r.random() < 0.2 and "reasoning_content" not in message:
        message["content"] = "<think>\n" + text(r)
    return {"messages": [*start(r), user(r), message], "finish_reason": "length"}


def _inline(r: random.Random) -> Row:
    head = r.choice(("<think>\n", "<think>", "", "", "<think>\n\n", "\n<think>\n"))
    closing = r.choice(("\n</think>\n\n", "</think>", "\n</think>\n", "</think>\n\n\n"))
    more = r.choice(("", "", " quoting </think> again", "<think>"))
    row = {"messages": [*start(r), user(r), assistant(r, head + edged(r, text(r)) + closing + text(r) + more, 0)]}
    return row | r.choice(({}, {}, {"finish_reason": "stop"}, {"finish_reason": "length"}))


def _unclosed(r: random.Random) -> Row:
    return {"messages": [user(r), assistant(r, "<think>" + edged(r, text(r)), 0)]}


def _quoting(r: random.Random) -> Row:
    """Think tags in prompts, in answers beside a reasoning, in reasonings."""
    message = assistant(r, injected(r, THINK), 1)
    if r.random() < 0.3:
        message["reasoning_content"] += r.choice(THINK[:2]) + text(r, 4)
    row: Row = {"messages": [user(r, injected(r, THINK)), message]}
    if r.random() < 0.25:
        del message["reasoning_content"]
        row["chat_template_kwargs"] = {"enable_thinking": False}
    return row


def _prompt_injection(r: random.Random) -> Row:
    return {
        "messages": [{"role": "system", "content": injected(r, CONTROL)}, user(r, injected(r, CONTROL)), assistant(r)]
    }


def _reply_injection(r: random.Random) -> Row:
    message = assistant(r, injected(r, CONTROL))
    if "reasoning_content" in message:
        message["reasoning_content"] += r.choice(CONTROL) + text(r, 3)
    return {"messages": [user(r), message]} | r.choice(({}, {}, {"finish_reason": "max_tokens"}))


def _ends_in_token(r: random.Random) -> Row:
    end = r.choice(("<|im_end|>", "<|im_end|>", "<|im_end|>\n", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>"))
    return {"messages": [user(r), assistant(r, edged(r, text(r)) + end)]}


def _multi(r: random.Random) -> Row:
    messages = start(r)
    for _ in range(r.randint(2, 4)):
        messages += [user(r), assistant(r)]
    row: Row = {"messages": messages}
    if r.random() < 0.5:
        row["chat_template_kwargs"] = {"preserve_thinking": True}
    if r.random() < 0.2:
        row["finish_reason"] = "length"
    return row


def _multi_plain(r: random.Random) -> Row:
    messages = start(r)
    for _ in range(r.randint(2, 5)):
        messages += [user(r, text(r, 6)), assistant(r, r.choice((text(r, 6), edged(r, text(r, 3)))), thought=0)]
    return {"messages": messages} | r.choice(({}, {"chat_template_kwargs": {"enable_thinking": False}}))


def _multi_inline(r: random.Random) -> Row:
    messages: list[Row] = []
    for _ in range(2):
        messages += [user(r), assistant(r, text(r, 5) + "\n</think>\n\n" + injected(r, (*CONTROL, *THINK)), 0)]
    return {"messages": messages} | r.choice(({}, {"chat_template_kwargs": {"preserve_thinking": True}}))


def _weighted(r: random.Random) -> Row:
    messages: list[Row] = []
    for _ in range(3):
        messages += [user(r), assistant(r) | {"weight": r.choice((0, 1, 1))}]
    return {"messages": messages, "chat_template_kwargs": {"preserve_thinking": r.random() < 0.7}}


def _tools(r: random.Random) -> Row:
    """A chain: query, call(s), answers, perhaps more calls, the reply; sometimes another query behind it."""
    messages = [*start(r), user(r)]
    for _ in range(r.randint(1, 3)):
        tricky = r.random() < 0.3
        content = r.choice(("", "", "\n\n", edged(r, text(r, 5)), "Let me see.\n\n", injected(r, CONTROL)))
        calls = [call(r, tricky) for _ in range(r.choice((1, 1, 2)))]
        messages.append(assistant(r, content) | {"tool_calls": calls})
        messages += [{"role": "tool", "content": injected(r, CONTROL) if tricky else text(r, 8)} for _ in calls]
    messages.append(assistant(r))
    if r.random() < 0.4:
        messages += [user(r), assistant(r)]
    row: Row = {"messages": messages}
    if r.random() < 0.8:
        row["tools"] = TOOLS[: r.randint(1, 2)]
    if r.random() < 0.3:
        row["chat_template_kwargs"] = {"preserve_thinking": True}
    return row


def _last_call(r: random.Random) -> Row:
    """The chat ends in a call."""
    message = assistant(r, r.choice(("", "\n", text(r, 4)))) | {"tool_calls": [call(r, r.random() < 0.5)]}
    return {"messages": [user(r), message], "tools": TOOLS} | r.choice(({}, {"finish_reason": "length"}))


def _odd_order(r: random.Random) -> Row:
    """No user turn, a late system message, two replies in a row, a tool answer of the old kind."""
    return {
        "messages": r.choice(
            (
                [{"role": "system", "content": "s"}, assistant(r)],
                [user(r), {"role": "system", "content": "late"}, assistant(r)],
                [user(r), assistant(r), assistant(r)],
                [user(r), assistant(r), user(r, "<tool_response>\n1\n</tool_response>"), assistant(r)],
                [user(r), assistant(r), user(r)],
                [user(r), user(r), assistant(r)],
            )
        )
    }


KINDS: tuple[Callable[[random.Random], Row], ...] = (
    _single, _unthought, _blank_thought, _mismatched, _cut, _inline, _unclosed, _quoting, _prompt_injection,
    _reply_injection, _ends_in_token, _multi, _multi_plain, _multi_inline, _weighted, _tools, _last_call, _odd_order,
    _single, _multi, _tools, _cut, _inline,
)  # fmt: skip


def texts(rows: list[Row]) -> Iterator[str]:
    """Every content and reasoning of some rows."""
    for row in rows:
        for message in row["messages"]:
            yield message["content"]
            yield message.get("reasoning_content", "")
