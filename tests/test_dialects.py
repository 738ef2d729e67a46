"""Every row dialect against small inputs, the examples of docs/dialects.md, real samples where present, and noise."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dialect_rows import (
    INPUTS,
    ROOT,
    SAMPLES,
    conversations,
    describe,
    detail,
    lines,
    outcome,
    reason,
    requests,
)

from tokenizer.dialects import loads, parse
from tokenizer.job import Reject

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
