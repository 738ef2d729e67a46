"""What is no row is refused by name, and any JSON at all is a conversation or a reject."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from dialect_rows import (
    INPUTS,
    MESSAGE,
    REASONING,
    assistant,
    chat,
    describe,
    detail,
    lines,
    only,
    reason,
    rollout,
    user,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer.dialects import loads, parse
from tokenizer.job import FILTERED, MALFORMED, Reject

# --- what is refused, by name


@pytest.mark.parametrize(
    "content",
    [3, True, {}, {"text": "a"}, {"answer": 3}, {"answer": "a", "more": "b"}, ["a"], [{"type": "blob", "data": "x"}]],
)
def test_unknown_content_is_an_error_and_never_an_empty_reply(content: object) -> None:
    assert reason(chat({"role": "assistant", "content": content})) == "unknown_dialect"


def test_order_of_parts_that_no_template_renders() -> None:
    text, thought = {"type": "text", "text": "a"}, {"type": "reasoning", "value": "r"}
    assert only(parse(chat(assistant(content=[thought, text]))))[0]["reasoning_content"] == "r"
    assert reason(chat(assistant(content=[text, thought]))) == "unknown_dialect"


def test_a_reply_of_nothing() -> None:
    assert reason(chat({"role": "assistant"})) == "unknown_dialect"
    _, reply = only(parse(chat({"role": "assistant", "content": None})))
    assert reply.reject is not None and reply.reject.reason == "no_completion"
    assert only(parse(chat(assistant(content=""))))[1].reject is None  # the model ended its turn at once
    message, reply = only(parse(chat({"role": "assistant", "content": None, "reasoning": "r"}, finish_reason="length")))
    assert (message["content"], message["reasoning_content"], reply.finish) == ("", "r", "length")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://example.invalid/a.png"}},
        {"type": "input_image"},
        {"type": "image"},
        {"type": "input_audio"},
        {"type": "video"},
        {"type": "file"},
    ],
)
def test_media_are_never_fetched(part: dict[str, Any]) -> None:
    for messages in ([{"role": "user", "content": [part]}, assistant()], [user(), assistant(content=[part])]):
        assert reason({"messages": messages}) == "multimodal"


@pytest.mark.parametrize("name", ["images", "image", "audio", "videos"])
def test_media_beside_the_text_of_a_message_are_not_dropped(name: str) -> None:
    assert reason({"messages": [{**user(), name: ["iVBORw0KGgo="]}, assistant()]}) == "multimodal"
    assert reason(chat(assistant(**{name: {"id": "a"}}))) == "multimodal"
    assert only(parse({"messages": [{**user(), name: []}, assistant()]}))[1].reject is None


def test_two_different_answers_and_records_of_errors_are_refused() -> None:
    assert reason({"prompt": "q", "completion": "a", "output": "b"}) == "unknown_dialect"
    assert only(parse({"prompt": "q", "completion": "a", "output": "a", "response": ""}))[0]["content"] == "a"
    assert reason(chat(assistant(), error="timeout")) == "bad_finish_reason"
    assert reason({"prompt": "q", "completion": "a", "error": {"code": 500}}) == "bad_finish_reason"
    assert only(parse(chat(assistant(), error=None, metadata={"error": "x"})))[1].reject is None


def test_no_prompt_and_no_completion() -> None:
    assert reason({"messages": [assistant()]}) == "no_prompt"
    assert reason({"conversations": [{"from": "gpt", "value": "a"}, {"from": "human", "value": "q"}]}) == "no_prompt"
    assert reason({"choices": [{"message": {"content": "a"}}]}) == "no_prompt"
    assert reason({"prompt_token_ids": [], "token_ids": [5]}) == "no_prompt"
    for row in (chat(), {"messages": []}, {"prompt": "q"}, {"prompt": "q", "completion": None}):
        assert reason(row) == "no_completion"
    assert reason({"messages": [user(), assistant(), user()], "choices": []}) == "no_completion"
    # What a request quotes was not generated for it.
    assert reason({"prompt": [user(), assistant(), user()]}) == "no_completion"
    assert reason({"prompt_token_ids": [3], "token_ids": []}) == "no_completion"
    assert reason({"text": " \n"}) == "no_completion"


def test_ambiguous_rows_name_what_clashes() -> None:
    other = "says something else"
    assert other in detail(chat(assistant(), response="b")) and parse(chat(assistant(), response="a"))
    assert other in detail(chat(assistant(), response={"choices": []}))
    assert "2 choices" in detail(chat(choices=[{"message": {}}, {"message": {}}]))
    assert "already ends" in detail(chat(assistant(), choices=[{"message": {"content": "b"}}]))
    assert "messages and conversations" in detail({"messages": [], "conversations": []})
    assert "system_prompt differs" in detail(
        {"system_prompt": "A", "messages": [{"role": "system", "content": "B"}, user(), assistant()]}
    )
    rollout = {"responses_create_params": {"input": "q"}, "response": {"output": [assistant(), assistant()]}}
    assert "2 answers" in detail(rollout)
    assert "'answer', 'question'" in detail({"question": 1, "answer": 2})
    assert "the role 'critic'" in detail(chat({"role": "critic", "content": "x"}))
    assert "status is 'error'" in detail({"conversations": [user()], "status": "error"})


def test_a_failed_batch_request_says_why() -> None:
    row = {"custom_id": "r", "response": None, "error": {"code": "expired"}}
    assert reason(row) == "no_completion" and "expired" in detail(row)


def test_ids_of_a_wrong_type() -> None:
    for ids in (["1"], [1.0], "12", [True], {"a": 1}):
        _, reply = only(parse({"prompt": "q", "completion": "a", "token_ids": ids}))
        assert reply.reject is not None and reply.reject.reason == "foreign_token_ids"


def test_developer_messages() -> None:
    first, later = {"role": "developer", "content": "A"}, {"role": "developer", "content": "B"}
    conv = parse({"messages": [first, later, user(), assistant()]})
    assert [m["role"] for m in conv.messages] == ["system", "developer", "user", "assistant"]


def test_template_arguments_of_a_row() -> None:
    kwargs = {"enable_thinking": False}
    for row in (
        chat(assistant(), chat_template_kwargs=kwargs),
        chat(assistant(), extra_body={"chat_template_kwargs": kwargs}),
        chat(assistant(), metadata={"chat_template_kwargs": kwargs}),
        {
            "request": {"messages": [user()], "extra_body": {"chat_template_kwargs": kwargs}},
            "response": chat(choices=[{"message": {"content": "a"}}]),
        },
    ):
        assert parse(row).kwargs == kwargs
    nearer = chat(assistant(), chat_template_kwargs={"a": 1}, metadata={"chat_template_kwargs": {"a": 2, "b": 3}})
    assert parse(nearer).kwargs == {"a": 1, "b": 3}
    assert reason(chat(assistant(), chat_template_kwargs="no")) == "unknown_dialect"


# --- rarer shapes


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (rollout(MESSAGE, error={"code": "overloaded"}), "bad_finish_reason"),
        (rollout(MESSAGE, given=[]), "no_prompt"),
        (rollout(MESSAGE, given=[MESSAGE]), "no_prompt"),
        (rollout(), "no_completion"),
        (rollout({**REASONING, "token_ids": [1]}, {**MESSAGE, "token_ids": [2]}), "foreign_token_ids"),
        (rollout({"type": "web_search_call"}), "unknown_dialect"),
        (rollout({"type": "message", "content": "a"}), "unknown_dialect"),
        (rollout({"type": "reasoning", "summary": [{"text": 3}]}), "unknown_dialect"),
        ({"responses_create_params": {"input": "q"}}, "no_completion"),
        ({"custom_id": "r", "body": {"messages": [user()]}, "response": {"body": "a"}}, "unknown_dialect"),
        ({"custom_id": "r", "error": True}, "no_completion"),
        ({"message_log": [user(), assistant(content="", token_ids=[])]}, "no_completion"),
        ({"prompt": "q", "outputs": []}, "no_completion"),
        ({"prompt": "q", "outputs": [{"text": "a"}, {"text": "b"}]}, "unknown_dialect"),
        ({"prompt": "<user>q", "choices": [{"text": "a"}]}, "unknown_dialect"),
        ({"prompt": "q", "completion": ["a", "b"]}, "unknown_dialect"),
        ({"prompt": "q", "completion": {"score": 1}}, "unknown_dialect"),
        ({"prompt": 3, "completion": "a"}, "unknown_dialect"),
        (chat(assistant(tool_calls={"name": "f"})), "unknown_dialect"),
        (chat(assistant(tool_calls=[{"id": "c1"}])), "unknown_dialect"),
        (chat(assistant(tool_calls=[{"name": "f"}], function_call={"name": "f"})), "unknown_dialect"),
        (chat(assistant(reasoning="r", content=[{"type": "thinking", "thinking": "s"}])), "unknown_dialect"),
        (chat(assistant(content=[{"type": "redacted_thinking", "data": "x"}])), "reasoning_lost"),
        (chat(assistant(content=[{"type": "tool_call", "value": "{"}])), "bad_tool_arguments"),
        (chat({"role": "function_call", "content": None}), "unknown_dialect"),
        (chat(assistant(audio={"id": "x"})), "multimodal"),
        (
            {"messages": [{"role": "user", "content": [{"type": "reasoning", "text": "r"}]}, assistant()]},
            "unknown_dialect",
        ),
        ({"messages": [{"role": "user", "text": "q"}, assistant()]}, "unknown_dialect"),
        ({"system": ["S"], **chat(assistant())}, "unknown_dialect"),
        ({"messages": "[]"}, "unknown_dialect"),
        ({"id": 1, "conversations": {"a": 1}}, "unknown_dialect"),
    ],
)
def test_shapes_that_are_refused(row: dict[str, Any], expected: str) -> None:
    assert reason(row) == expected


def test_shapes_that_are_read() -> None:
    ids = {"prompt": "<user>q", "choices": [{"text": "a", "prompt_token_ids": [3], "token_ids": [4]}]}
    assert describe(parse(ids)) == "**assistant** ids"
    assert describe(parse({"prompt": "q", "choices": [{"message": {"content": "a"}}]})) == "user, **assistant**"
    unprompted = {"choices": [{"message": {"content": "a"}, "token_ids": [4]}], "prompt_token_ids": [3]}
    assert describe(parse(unprompted)) == "**assistant** ids"
    turn, _ = only(parse(rollout(REASONING, REASONING, MESSAGE)))
    assert (turn["reasoning_content"], turn["content"]) == ("rr", "a")
    turn, _ = only(parse(rollout({**MESSAGE, "reasoning_content": "r"})))
    assert turn["reasoning_content"] == "r"
    nested = {"prompt": [user()], "response": {"message": {"content": "a"}, "finish_reason": "length"}}
    assert describe(parse(nested)) == "user, **assistant** cut"
    answered = {"prompt": "q", "response": {"object": "response", "output": [MESSAGE], "status": "incomplete"}}
    assert describe(parse(answered)) == "user, **assistant** cut"
    # A conversation that goes on after its last reply: the reply is learnt, what follows is not needed.
    assert describe(parse(chat(assistant(), user()))) == "user, **assistant**, user"
    assert parse({"messages": [{"role": "system", "content": None}, user(), assistant()]}).messages[0]["content"] == ""
    _, reply = only(parse(chat(assistant(content=None, refusal="No."))))
    assert reply.reject is not None and reply.reject.reason == "bad_finish_reason"
    message, reply = only(parse(chat(assistant(content=None, reasoning="r", token_ids=[4]))))
    assert message["content"] == "" and reply.token_ids == [4]


# --- noise

SEEDS = [
    json.loads(line)
    for name in ("messages", "conversations", "prompts", "served_ids", "responses", "batch_input", "batch_output")
    for line in lines(INPUTS / f"{name}.jsonl")
]
KEYS = sorted(
    set(re.findall(r'"([a-z_]+)":', json.dumps(SEEDS))) | {"from", "value", "status", "labels", "chosen", "image"}
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(KEYS)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=25,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += [(value, key), *places(inner)]
    return found


def check(row: Any) -> None:
    before = copy.deepcopy(row)
    try:
        conv = parse(row, lambda name: SEEDS[0])
    except Reject as e:
        assert e.reason in MALFORMED | FILTERED and e.detail and len(e.detail) < 1000
        return
    finally:
        assert repr(row) == repr(before), "the row was changed"
    assert conv.replies and (
        conv.text is not None
        or set(conv.replies) == {n for n, m in enumerate(conv.messages) if m["role"] == "assistant"}
    )
    for n, message in enumerate(conv.messages):
        assert message["role"] in ("system", "developer", "user", "assistant", "tool")
        assert isinstance(message.get("content", ""), str) and isinstance(message.get("reasoning_content", ""), str)
        assert "content" in message or conv.replies[n].token_ids or conv.replies[n].reject
        for call in message.get("tool_calls", ()):
            good = isinstance(call["function"]["arguments"], dict)
            assert isinstance(call["function"]["name"], str) and (good or conv.replies[n].reject)
    for reply in conv.replies.values():
        assert reply.finish in ("stop", "length") and reply.weight >= 0


@given(JSON)
@settings(max_examples=400, deadline=None)
def test_any_json_is_a_conversation_or_a_reject(row: Any) -> None:
    check(row)


@given(st.sampled_from(SEEDS), st.data())
@settings(max_examples=800, deadline=None)
def test_a_known_row_with_one_value_replaced_is_a_conversation_or_a_reject(seed: Any, data: st.DataObject) -> None:
    row = copy.deepcopy(seed)
    holder, key = data.draw(st.sampled_from(places(row)))
    holder[key] = data.draw(JSON)
    check(row)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_value_or_a_reject(line: bytes) -> None:
    try:
        loads(line)
    except Reject as e:
        assert e.reason in ("invalid_json", "invalid_utf8", "lone_surrogate")
