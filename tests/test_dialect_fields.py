"""The fields of a row: why a reply ended, its reasoning, its calls, its weight."""

from __future__ import annotations

import json

import pytest
from dialect_rows import (
    assistant,
    called,
    chat,
    only,
    reason,
    user,
)

from tokenizer.dialects import parse

# --- why a reply ended


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "stop"),
        ("stop", "stop"),
        ("tool_calls", "stop"),
        ("length", "length"),
        ("max_tokens", "length"),
        ("MAX_TOKENS", "length"),
        ("max_output_tokens", "length"),
        ("incomplete", "length"),
        ({"type": "stop", "matched": 151645}, "stop"),
        ({"type": "stop", "matched": "</answer>"}, "length"),
        ({"type": "length", "length": 9}, "length"),
        ("error", "bad"),
        ("content_filter", "bad"),
        ("abort", "bad"),
        ("surprise", "bad"),
        (3, "bad"),
        ({}, "bad"),
    ],
)
def test_finish_reasons(value: object, expected: str) -> None:
    exchange = {"request": {"messages": [user()]}, "response": {"choices": [{"message": {"content": "a"}}]}}
    places = [
        chat(assistant(finish_reason=value)),
        chat(assistant(), finish_reason=value),
        chat(assistant(), metadata={"finish_reason": value}),
        {"prompt": "q", "completion": "a", "meta_info": {"finish_reason": value}},
        {**exchange, "response": {"choices": [{"message": {"content": "a"}, "finish_reason": value}]}},
    ]
    for row in places:
        _, reply = only(parse(row))
        if expected == "bad":
            assert reply.reject is not None and reply.reject.reason == "bad_finish_reason"
        else:
            assert (reply.finish, reply.reject) == (expected, None)


def test_a_finish_reason_beside_the_messages_speaks_of_the_last_reply() -> None:
    conv = parse(chat(assistant(), user(), assistant(), finish_reason="length"))
    assert [conv.replies[n].finish for n in sorted(conv.replies)] == ["stop", "length"]
    conv = parse(chat(assistant(), user(), assistant(), finish_reason="error"))
    assert conv.replies[1].reject is None and conv.replies[3].reject is not None


def test_a_cut_that_one_place_reports_stands() -> None:
    assert only(parse(chat(assistant(finish_reason="length"), finish_reason="stop")))[1].finish == "length"
    assert only(parse(chat(assistant(finish_reason="stop"), finish_reason="length")))[1].finish == "length"


def test_usage_is_of_one_reply_or_of_none() -> None:
    usage = {"completion_tokens": 9}
    assert only(parse(chat(assistant(), usage=usage)))[1].output_tokens == 9
    several = parse(chat(assistant(), user(), assistant(), usage=usage))
    assert [reply.output_tokens for reply in several.replies.values()] == [None, None]
    prompted = parse({"prompt": [user(), assistant(), user()], "completion": "a", "usage": usage})
    assert [reply.output_tokens for reply in prompted.replies.values()] == [None, 9]


def test_stop_reason_of_a_server() -> None:
    assert only(parse(chat(assistant(), stop_reason="max_tokens")))[1].finish == "length"
    assert only(parse(chat(assistant(), stop_reason="end_turn")))[1].finish == "stop"
    assert only(parse(chat(assistant(), finish_reason="stop", stop_reason=151645)))[1].finish == "stop"
    assert only(parse(chat(assistant(), finish_reason="stop", stop_reason="\n\n")))[1].finish == "length"


# --- reasoning


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "thinking_content"])
def test_reasoning_fields(name: str) -> None:
    message, _ = only(parse(chat(assistant(**{name: "\nhm\n"}))))
    assert message["reasoning_content"] == "\nhm\n"
    message, _ = only(parse(chat(assistant(**{name: None}))))
    assert "reasoning_content" not in message


def test_two_names_of_one_reasoning() -> None:
    message, _ = only(parse(chat(assistant(reasoning="r", reasoning_content="r"))))
    assert message["reasoning_content"] == "r"
    for fields in ({"reasoning_content": "r", "reasoning": ""}, {"reasoning_content": "", "reasoning": "r"}):
        assert only(parse(chat(assistant(**fields))))[0]["reasoning_content"] == "r"
    assert reason(chat(assistant(reasoning="r", reasoning_content="s"))) == "unknown_dialect"
    assert reason(chat(assistant(reasoning={"effort": "low"}))) == "unknown_dialect"


def test_inline_thinking_stays_in_the_content() -> None:
    text = "hm\n</think>\n\na </think> b "
    assert only(parse(chat({"role": "assistant", "content": text})))[0] == {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "thinking_content"])
def test_reasoning_beside_the_messages_is_not_dropped(name: str) -> None:
    reply = only(parse(chat(assistant(), **{name: "because"})))[1]
    assert reply.reject is not None and reply.reject.reason == "reasoning_lost" and name in reply.reject.detail
    for whole in (assistant(reasoning="because"), assistant(content="because</think>a")):
        assert only(parse(chat(whole, **{name: "because"})))[1].reject is None
    for setting in ("on", "High", " ", None, True):
        assert only(parse(chat(assistant(), **{name: setting})))[1].reject is None
    assert only(parse({"prompt": "q", "completion": "a", name: "because"}))[0]["reasoning_content"] == "because"
    assert "reasoning_content" not in only(parse({"prompt": "q", "completion": "a", name: "on"}))[0]


def test_lost_reasoning() -> None:
    usage = {"completion_tokens": 50, "completion_tokens_details": {"reasoning_tokens": 40}}
    assert reason(chat(assistant(), usage=usage)) == "reasoning_lost"
    assert only(parse(chat(assistant(reasoning="r"), usage=usage)))[1].output_tokens == 50
    assert only(parse(chat(assistant(content="hm</think>a"), usage=usage)))[1].reject is None
    item = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    rollout = {"responses_create_params": {"input": "q"}, "response": {"output": [item, assistant(type="message")]}}
    assert reason(rollout) == "reasoning_lost"
    _, reply = only(parse(chat(assistant(thought="hm"))))
    assert reply.reject is not None and reply.reject.reason == "reasoning_lost"


# --- tool calls


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ('{"x": [1, 2.5, "é"]}', {"x": [1, 2.5, "é"]}),
        ({"x": 1}, {"x": 1}),
        ("", {}),
        ("  ", {}),
        ("null", {}),
        (None, {}),
        ('{"x": 123456789012345678901234567890}', {"x": 123456789012345678901234567890}),
    ],
)
def test_arguments(given_: object, expected: object) -> None:
    message, reply = only(parse(chat(called(given_))))
    assert message["tool_calls"][0]["function"]["arguments"] == expected and reply.reject is None


@pytest.mark.parametrize(
    "given_",
    [
        "{",
        '{"x": NaN}',
        '{"x": -1e999}',
        "[1]",
        "3",
        '"{}"',
        [1],
        3,
        '{"x": "\\ud800"}',
        "[" * 5000,
        {"x": 1.2345678901234568e29},
    ],
)
def test_bad_arguments_reject_their_turn_and_the_later_ones(given_: object) -> None:
    conv = parse(chat(assistant(), user(), called(given_), {"role": "tool", "content": "1"}, assistant()))
    rejects = [conv.replies[n].reject for n in sorted(conv.replies)]
    assert rejects[0] is None
    assert [r.reason for r in rejects[1:] if r] == ["bad_tool_arguments", "bad_tool_arguments"]


def test_calls_as_turns_join_what_generated_them() -> None:
    call = {"from": "function_call", "value": '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": "{}"}]'}
    conv = parse({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "Wait."}, call]})
    message, _ = only(conv)
    assert message["content"] == "Wait." and [c["function"]["name"] for c in message["tool_calls"]] == ["f", "g"]
    conv = parse({"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "f(x)"}]})
    assert conv.replies[1].reject is not None and conv.replies[1].reject.reason == "bad_tool_arguments"


def test_tools() -> None:
    flat = {"type": "function", "name": "f", "description": "d", "parameters": {"b": 1, "a": 2}}
    inner = {"name": "f", "description": "d", "parameters": {"b": 1, "a": 2}}
    wrapped = {"type": "function", "function": inner}
    for tools in ([flat], [wrapped], json.dumps([flat]), json.dumps([wrapped]), [inner]):
        got = parse(chat(assistant(), tools=tools)).tools
        assert json.dumps(got) == json.dumps([wrapped])
    assert parse(chat(assistant(), functions=[inner])).tools == [wrapped]
    empty: object
    for empty in (None, [], "", "[]", "null"):
        assert parse(chat(assistant(), tools=empty)).tools is None
    bad: object
    for bad in ("{", [{"type": "web_search"}], [3], {"f": 1}):
        assert reason(chat(assistant(), tools=bad)) == "unknown_dialect"


# --- weights


@pytest.mark.parametrize("name", ["loss_weight", "weight", "train", "mask"])
def test_weights(name: str) -> None:
    for value, weight in ((0, 0.0), (0.0, 0.0), (False, 0.0), (1, 1.0), (True, 1.0), (0.5, 0.5), (None, 1.0)):
        assert only(parse(chat(assistant(**{name: value}))))[1].weight == weight
    for bad in (-1, "0", [], float("nan"), float("inf")):
        assert reason(chat(assistant(**{name: bad}))) == "unknown_dialect"
