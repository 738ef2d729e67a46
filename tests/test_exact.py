"""Ids and loss mask are what the server saw and the model produced: equal to an independent reference, on every row."""

from __future__ import annotations

from functools import cache
from typing import Any

import corpus
import pytest
from families import family_dir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Reference

from tokenizer import chat, dialects
from tokenizer.encode import Encoder

Row = dict[str, Any]


@cache
def parts(family: str) -> tuple[Encoder, chat.Renderer, Reference]:
    directory = family_dir(family)
    return Encoder.load(directory), chat.Renderer.load(directory), Reference(directory, family)


def differences(family: str, rows: list[Row], **kwargs: Any) -> tuple[list[str], int, int]:
    """Rows that differ from the reference, each in words; how many rows and rejected turns were compared."""
    encoder, renderer, reference = parts(family)
    options = chat.ChatOptions(template_kwargs=kwargs)
    text_rows: list[chat.TextRow] = []
    wanted = []
    bad: list[str] = []
    refusals = 0
    for row in rows:
        kept, rejected = chat.rows(dialects.parse(row), renderer, options)
        turns, refused = reference.rows(row, **kwargs)
        got = [(number, reject.reason) for number, reject in rejected if reject.detail != "every reply has weight 0"]
        refusals += len(refused)
        if got != refused or [r.turn for r in kept] != [t.number for t in turns]:
            bad.append(f"{row}\n  rows {[r.turn for r in kept]} {got}, wanted {[t.number for t in turns]} {refused}")
            continue
        text_rows += kept
        wanted += [(row, turn) for turn in turns]
    encoded = encoder.encode(text_rows)
    assert not encoded.rejects
    for k, (row, turn) in enumerate(wanted):
        span = slice(int(encoded.offsets[k]), int(encoded.offsets[k + 1]))
        ids, mask = encoded.ids[span].tolist(), encoded.mask[span].tolist()
        if ids != turn.ids or mask != turn.mask:
            pieces = [piece for piece in text_rows[k].pieces if piece.loss]
            bad.append(
                f"{row}\n  {pieces}\n  got    {reference.hf.decode(ids)!r}\n  wanted {reference.hf.decode(turn.ids)!r}"
            )
    return bad, len(wanted), refusals


def test_qwen36_equals_the_reference_on_the_whole_corpus() -> None:
    bad, rows, refused = differences("qwen36", corpus.chats())
    assert not bad, f"{len(bad)} of {rows} rows differ, the first:\n{bad[0]}"
    assert rows > 4000 and refused > 100


def test_qwen36_packed_by_preserve_thinking() -> None:
    multi = [row for row in corpus.chats(1500, seed=1) if len(row["messages"]) > 3]
    bad, rows, _ = differences("qwen36", multi, preserve_thinking=True)
    assert not bad, f"{len(bad)} of {rows} rows differ, the first:\n{bad[0]}"


@pytest.mark.parametrize("family", ["qwen3", "chatml", "llama3", "gemma"])
def test_other_families_equal_the_reference(family: str) -> None:
    bad, rows, refused = differences(family, corpus.chats(1000, seed=2))
    assert not bad, f"{len(bad)} of {rows} rows differ, the first:\n{bad[0]}"
    assert rows > 300 and refused > 10


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma"])
def test_other_families_without_thinking_pack_whole_conversations(family: str) -> None:
    plain = []
    for row in corpus.chats(400, seed=3):
        messages = [
            {k: v for k, v in m.items() if k not in ("reasoning_content", "tool_calls")} for m in row["messages"]
        ]
        if not any(m["role"] == "tool" for m in messages):
            plain.append({**row, "messages": messages})
    bad, rows, _ = differences(family, plain)
    assert not bad, f"{len(bad)} of {rows} rows differ, the first:\n{bad[0]}"


TEXT = st.text(max_size=12) | st.sampled_from(
    [*corpus.EMOJI, *corpus.CHINESE, *corpus.EDGES, "a  b", "x\n\ny", " word"]
)
CONTENT = st.lists(TEXT | st.sampled_from([*corpus.CONTROL, *corpus.THINK]), max_size=5).map("".join)
CALL = st.builds(
    lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
    st.sampled_from(["weather", "f"]),
    st.dictionaries(
        st.sampled_from(["a", "b c"]), CONTENT | st.integers(0, 9) | st.none() | st.lists(TEXT), max_size=2
    ),
)
ASSISTANT = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": CONTENT},
    optional={"reasoning_content": CONTENT, "tool_calls": st.lists(CALL, min_size=1, max_size=2)},
)
OTHER = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, CONTENT),
    st.builds(lambda text: {"role": "tool", "content": text}, CONTENT),
)
CHAT = st.builds(
    lambda system, first, rest, last, finish, kwargs, tools: {
        "messages": [*system, {"role": "user", "content": first}, *rest, last],
        **finish,
        "chat_template_kwargs": kwargs,
        **tools,
    },
    st.lists(st.builds(lambda text: {"role": "system", "content": text}, CONTENT), max_size=1),
    CONTENT,
    st.lists(ASSISTANT | OTHER, max_size=4),
    ASSISTANT,
    st.sampled_from([{}, {}, {"finish_reason": "length"}]),
    st.fixed_dictionaries({}, optional={"enable_thinking": st.booleans(), "preserve_thinking": st.booleans()}),
    st.sampled_from([{}, {}, {"tools": corpus.TOOLS}]),
)


@pytest.mark.parametrize("family", ["qwen36", "qwen3", "chatml"])
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(row=CHAT)
def test_any_conversation_equals_the_reference(family: str, row: Row) -> None:
    bad, _, _ = differences(family, [row])
    assert not bad, bad[0]
