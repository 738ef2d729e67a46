"""Every row dialect against small inputs, the examples of docs/dialects.md, real samples where present, and noise."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer.dialects import Conversation, loads, parse
from tokenizer.job import FILTERED, MALFORMED, Reject

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


# --- the table of the documentation


def documented() -> list[Any]:
    rows = []
    for line in (ROOT / "docs" / "dialects.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if len(cells) == 4 and (example := re.fullmatch(r"`(\{.*\})`", cells[2])):
            rows.append(pytest.param(example[1], cells[3], id=cells[0]))
    return rows


@pytest.mark.parametrize(("example", "result"), documented())
def test_the_documented_examples_parse_as_the_table_says(example: str, result: str) -> None:
    assert outcome(example.encode()) == result


def test_the_documented_table_is_whole() -> None:
    text = (ROOT / "docs" / "dialects.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(documented()) == len(rows) - 1 >= 25  # but its head


# --- small inputs


def conversations(name: str) -> list[Conversation]:
    lookup = requests(INPUTS / "batch_input.jsonl").get
    return [parse(loads(line), lookup) for line in lines(INPUTS / name)]


def test_messages() -> None:
    got = conversations("messages.jsonl")
    assert [describe(c) for c in got] == [
        "user, **assistant**",
        "system, user, **assistant**",
        "user, **assistant**, tool, **assistant**",
        "system, user, **assistant**",
        "user, **assistant** cut",
        "user, assistant, user, **assistant**",
        "user, **assistant**",
        "user, **assistant**, tool, **assistant**",
        "user, **assistant**",
    ]
    assert got[1].messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Two parts?"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "They ask."},
    ]
    assert got[1].source_id == "m-2"
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert got[2].messages[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4 C", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Four degrees.", "reasoning_content": "The tool says 4."},
    ]
    function = {"name": "weather", "parameters": {"type": "object"}, "strict": True}
    assert got[2].tools == [{"type": "function", "function": function}]
    assert got[3].kwargs == {"enable_thinking": False}
    assert got[6].messages[1]["content"] == "a line\u2028another"
    assert got[7].tools is None and got[7].messages[2] == {"role": "tool", "content": "nothing", "name": "find"}
    assert got[7].messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    assert [c["function"]["arguments"] for c in got[8].messages[1]["tool_calls"]] == [{"r": 1}, {"r": 2}]
    assert got[8].messages[1]["reasoning_content"] == "Call twice."


def test_conversations() -> None:
    got = conversations("conversations.jsonl")
    assert [describe(c) for c in got] == [
        "user, **assistant**",
        "system, user, **assistant**, tool, **assistant**",
        "user, **assistant**",
        "system, user, **assistant**",
    ]
    assert got[1].messages[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert got[2].messages[1]["reasoning_content"] == ""  # empty, not absent
    assert [c.source_id for c in got] == ["s-1", "", "7", ""]
    assert got[3].messages[0] == {"role": "system", "content": "Be kind."}


def test_prompts() -> None:
    got = conversations("prompts.jsonl")
    assert [describe(c) for c in got] == [
        "user, **assistant**",
        "user, assistant, user, **assistant** cut",
        "user, **assistant**",
        "user, **assistant**",
        "user, **assistant** cut",
        "user, **assistant** cut",
        "user, **assistant**",
        "rendered text",
        "rendered text cut",
    ]
    assert got[0].messages[1]["content"] == "She did.<|endoftext|>"
    assert got[1].messages[3] == {"role": "assistant", "content": "c", "reasoning_content": "hm"}
    assert got[4].replies[1].output_tokens == 5
    assert got[6].kwargs == {"enable_thinking": True}
    assert got[8].replies[0].output_tokens == 1 and got[8].messages == [] and got[8].replies[0].token_ids is None


def test_ids_of_servers() -> None:
    got = conversations("served_ids.jsonl")
    assert [describe(c) for c in got] == [
        "**assistant** ids",
        "**assistant** cut ids",
        "user, **assistant** ids",
        "user, **assistant** cut ids",
        "user, **assistant**",
        "user, **assistant** ids",
    ]
    assert got[0].messages == [{"role": "assistant"}]  # no text is known, which is not an empty text
    assert got[1].messages == [{"role": "assistant", "content": "Hello"}]
    prompts = [c.replies[max(c.replies)].prompt_token_ids for c in got]
    assert prompts == [[10, 11], [10, 11], [10, 11], None, None, [10, 11]]


def test_the_text_of_a_prompt_is_kept_to_check_its_ids() -> None:
    row = {"prompt": "<user>q", "prompt_token_ids": [3], "outputs": [{"text": "a", "token_ids": [4]}]}
    assert parse(row).replies[0].prompt_text == "<user>q"
    told = {"messages": [{"role": "user", "content": "q"}], "completion": "a", "prompt_token_ids": [3], "prompt": "q"}
    assert parse(told).replies[1].prompt_text == ""  # the messages say more


def test_responses() -> None:
    got = conversations("responses.jsonl")
    assert [describe(c) for c in got] == [
        "system, user, **assistant**, tool, tool, **assistant**",
        "user, **assistant** cut",
        "system, user, **assistant**, user, **assistant**",
        "user, **assistant**",
        "user, **assistant** ids",
    ]
    turn = got[0].messages[2]
    assert (turn["reasoning_content"], turn["content"]) == ("\nLook it up.\n", "\n\n")
    assert [c["function"]["arguments"] for c in turn["tool_calls"]] == [{"id": 1}, {"id": 2}]
    assert got[0].tools is not None and "type" not in got[0].tools[0]["function"]
    assert got[1].messages[1] == {"role": "assistant", "content": "<think>\nI could"}
    assert [m["content"] for m in got[2].messages] == ["S", "one", "a1", "two", "a2"]
    assert got[3].replies[1].output_tokens is None  # 0 is not a count
    assert got[4].replies[1].prompt_token_ids == [10] and got[4].replies[1].output_tokens == 2


def test_batch_output_needs_its_requests() -> None:
    known = requests(INPUTS / "batch_input.jsonl")
    rows = lines(INPUTS / "batch_output.jsonl")
    assert [outcome(row, known.get) for row in rows] == [
        "system, user, **assistant**",
        "user, **assistant**",
        "`no_completion`",
        "`no_prompt`",
    ]
    joined = parse(loads(rows[1]), known.get)
    assert joined.kwargs == {"enable_thinking": False} and joined.source_id == "r-1"
    assert [outcome(row) for row in rows] == ["`no_prompt`", "`no_prompt`", "`no_completion`", "`no_prompt`"]
    assert "--batch-input" in detail(loads(rows[0]))
    assert {outcome(row) for row in lines(INPUTS / "batch_input.jsonl")} == {"`no_completion`"}


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


def called(arguments: object) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


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
    ["{", '{"x": NaN}', "[1]", "3", '"{}"', [1], 3, '{"x": "\\ud800"}', "[" * 5000, {"x": 1.2345678901234568e29}],
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


def rollout(*output: Any, given: Any = "q", **response: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": given}, "response": {"output": list(output), **response}}


MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
REASONING = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]}


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


# --- lines


@pytest.mark.parametrize(
    ("line", "expected", "where"),
    [
        (b'{"a": "\\ud800"}', "lone_surrogate", "7"),
        (b'{"a": "\\udc00\\ud800"}', "lone_surrogate", "7"),
        (b'{"a": "\xff"}', "invalid_utf8", "byte 7"),
        (b'{"a": "\xed\xa0\x80"}', "invalid_utf8", "byte 7"),
        (b'{"a": NaN}', "invalid_json", "6"),
        (b'{"a": -Infinity}', "invalid_json", "7"),
        (b'{"a": "cut off', "invalid_json", ""),
        (b'{"a": "\\ud800", ', "invalid_json", ""),
        (b'{"a": 1} {"b": 2}', "invalid_json", "9"),
        (b"version https://git-lfs.github.com/spec/v1", "invalid_json", "0"),
        (b"", "invalid_json", ""),
        (b"\xef\xbb\xbf" * 3000, "invalid_json", ""),
        (b"[" * 3000, "invalid_json", ""),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json", ""),
    ],
)
def test_lines_that_are_not_rows(line: bytes, expected: str, where: str) -> None:
    with pytest.raises(Reject) as caught:
        loads(line)
    assert caught.value.reason == expected and where in caught.value.detail and "\n" not in caught.value.detail


def test_lines_that_are_rows() -> None:
    assert loads(b'\xef\xbb\xbf{"a": 1}\r') == {"a": 1}
    assert loads(b'{"a": 1, "a": 2}') == {"a": 2}
    assert loads(b'{"a": "\\ud83d\\ude00"}') == {"a": "😀"}
    assert loads('{"a": "x\u2028y"}'.encode()) == {"a": "x\u2028y"}


@pytest.mark.parametrize("row", [[], "text", 3, None, True, {}])
def test_rows_that_are_no_objects(row: object) -> None:
    assert reason(row) == "unknown_dialect"


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


# --- real files of people who do this job, where they are at hand

EXPECTED = {
    "02-gym-qwen3-32b-mixed-think-truncated.jsonl": {"user, **assistant**": 2, "user, **assistant** cut": 3},
    "03-gym-qwen3-thinking2507-close-only.jsonl": {"system, user, **assistant**": 5},
    "05-gym-qwen3-xlam-tools-reasoning.jsonl": {
        "system, user, **assistant**, tool, **assistant**": 4,
        "system, user, **assistant**, tool, tool, **assistant**": 1,
    },
    "08-gym-hermes-empty-token-ids.jsonl": {
        "user, **assistant**": 4,
        "user, **assistant**, tool, **assistant**, tool, **assistant**, tool, **assistant**": 1,
    },
    "11-webdancer-think-toolcall-text.jsonl": 16,
    "12-specforge-tool-use.jsonl": {
        "system, user, **assistant**, tool"
        + ", ~~assistant~~ `bad_tool_arguments`, tool" * 4
        + ", ~~assistant~~ `bad_tool_arguments`": 1
    },
    "14-torchspec-regen-with-50k-line.jsonl": 260,
    "15-llamafactory-v1-reason-tool.jsonl": 49,
    "16-llamafactory-v1-loss-weight.jsonl": {"user, **assistant**": 337},
    "22-openai-batch-output.jsonl": {"`no_prompt`": 65},
    "23-openai-batch-input.jsonl": {"`no_completion`": 65},
    "26-openai-ft-toolcalls-no-content-key.jsonl": {"system, user, **assistant**": 86},
    "28-openai-ft-chartqa-images.jsonl": {"`multimodal`": 100},
    "29-openai-dpo-preferred.jsonl": {"`unknown_dialect`": 89},
    "31-arena-hard-content-dict-u2028.jsonl": {"user, **assistant**": 24},
    "32-mtbench-reference-choices-turns.jsonl": {"`no_prompt`": 30},
    "37-promptcompletion-endoftext-literal.jsonl": {"user, **assistant**": 200},
    "40-axolotl-pretokenized-labels.jsonl": {"`unknown_dialect`": 1},
    "42-functiongemma-developer-role.jsonl": 7,
    "47-git-lfs-pointer.jsonl": {"`invalid_json`": 3},
}


def sample(name: str) -> Path:
    if not (SAMPLES / name).is_file():
        pytest.skip(f"{name} is not at hand")
    return SAMPLES / name


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_samples(name: str) -> None:
    got = Counter(outcome(line) for line in lines(sample(name)))
    expected = EXPECTED[name]
    if isinstance(expected, int):  # many shapes: all usable
        assert sum(got.values()) == expected and not any("`" in key for key in got)
    else:
        assert got == expected


def test_samples_of_a_batch_joined() -> None:
    known = requests(sample("23-openai-batch-input.jsonl"))
    output = lines(sample("22-openai-batch-output.jsonl"))
    assert Counter(outcome(line, known.get) for line in output) == {"system, user, **assistant**": 65}


def test_samples_that_are_one_json_text() -> None:
    rows = json.loads(sample("21-fastchat-dummy-pretty-list.json").read_bytes())
    assert all(describe(parse(row)).startswith("user, **assistant**") for row in rows) and len(rows) == 500
    assert reason(rows) == "unknown_dialect"
    log = json.loads(sample("41-nemorl-message-log-token-ids.jsonl").read_bytes())
    assert reason(log) == "no_completion"


def test_samples_keep_reasoning_calls_and_white_space() -> None:
    rollouts = [parse(loads(line)) for line in lines(sample("05-gym-qwen3-xlam-tools-reasoning.jsonl"))]
    for conv in rollouts:
        turn = conv.messages[2]
        assert turn["content"] == "\n\n" and turn["reasoning_content"].startswith("\n") and turn["tool_calls"]
        assert conv.tools and all(set(t) == {"type", "function"} for t in conv.tools)
    parts = [parse(loads(line)) for line in lines(sample("15-llamafactory-v1-reason-tool.jsonl"))]
    turns = [c.messages[n] for c in parts for n in c.replies]
    assert len(turns) == 111 and all(t["reasoning_content"] for t in turns)
    assert sum(len(t.get("tool_calls", ())) for t in turns) == 68
