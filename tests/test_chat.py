"""The template as Transformers renders it, the boundary rule turn by turn, and the direct Qwen3.6 renderer."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import corpus
import pytest
from families import family_dir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Reference, Refused

from tokenizer import qwen
from tokenizer.chat import BARE, END, IDS, PROMPT, REPLY, ChatOptions, Piece, Renderer, TextRow, rows, same_text
from tokenizer.job import JobError, Reject
from tokenizer.messages import Conversation, Reply
from tokenizer.template import JinjaView

Row = dict[str, Any]
USER = {"role": "user", "content": "hi"}
HEAD = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@cache
def renderer(family: str = "qwen36") -> Renderer:
    return Renderer.load(family_dir(family))


def conversation(*messages: Row, tools: Any = None, kwargs: Row | None = None, **last: Any) -> Conversation:
    positions = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    replies = {i: Reply() for i in positions}
    if positions:
        replies[positions[-1]] = Reply(**last)
    return Conversation(list(messages), replies, tools, kwargs or {})


def said(content: str = "", reasoning: str | None = None, calls: Any = None) -> Row:
    message: Row = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
        ]
    return message


def take(conv: Conversation, family: str = "qwen36", **options: Any) -> list[TextRow]:
    kept, rejected = rows(conv, renderer(family), ChatOptions(**options))
    assert not rejected, rejected
    return kept


def refused(conv: Conversation, family: str = "qwen36", **options: Any) -> list[tuple[int, str]]:
    return [(turn, reject.reason) for turn, reject in rows(conv, renderer(family), ChatOptions(**options))[1]]


def emitted(message: Row, family: str = "qwen36", **known: Any) -> str:
    """The learnt text of a conversation of one turn, its control tokens included."""
    options = known.pop("options", {})
    [row] = take(conversation(USER, message, **known), family, **options)
    return "".join(piece.text for piece in row.pieces if piece.loss)


# --- the template


@pytest.mark.parametrize("family", ["qwen36", "qwen3", "chatml", "llama3", "gemma"])
def test_renders_what_transformers_renders(family: str) -> None:
    reference = Reference(family_dir(family), family)
    compared = 0
    for row in corpus.chats(300, seed=5):
        for prompt in (True, False):
            arguments = (row["messages"], row.get("tools"), row.get("chat_template_kwargs", {}), prompt)
            try:
                wanted = reference.render(*arguments)
            except Refused:
                with pytest.raises(Reject, match="template_error"):
                    renderer(family).render(arguments[0], arguments[1], prompt, arguments[2])
                continue
            assert renderer(family).render(arguments[0], arguments[1], prompt, arguments[2]) == wanted
            compared += 1
    assert compared > 100


def test_real_templates_of_many_models_render_alike_and_never_fail_unnamed() -> None:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl, whose package holds the templates of many models, is not installed")
    reference = Reference(family_dir("chatml"), "chatml")
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    reference.hf.bos_token = named["bos_token"]
    chats = [{k: v for k, v in row.items() if k != "chat_template_kwargs"} for row in corpus.chats(23, seed=9)]
    compared: Counter[str] = Counter()
    for file in sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja")):
        template = file.read_text()
        if "strftime_now" in template or file.stem.endswith("_training"):
            continue
        reference.hf.chat_template = template
        control = sorted({*re.findall(r"<[|｜][^'\"<>]*?[|｜]>|</?(?:end|start)_of_\w+>", template), "<|im_end|>"})
        mine = Renderer(template, named, {token: (number, True) for number, token in enumerate(control)})
        for row in chats:
            wanted = got = "refused"
            with contextlib.suppress(Refused):
                wanted = reference.render(row["messages"], row.get("tools"), {}, True)
            with contextlib.suppress(Reject):
                got = mine.render(row["messages"], row.get("tools"), True, {})
            assert got == wanted, file.name
            conv = Conversation(row["messages"], {}, row.get("tools"))
            conv.replies = {i: Reply() for i, m in enumerate(row["messages"]) if m["role"] == "assistant"}
            assert any(rows(conv, mine, ChatOptions()))
            compared[file.stem] += got != "refused"
    assert sum(count > 0 for count in compared.values()) >= 20


def test_the_environment_is_that_of_transformers() -> None:
    template = (
        "{{ bos_token }}{% generation %}\n"
        "  {% for m in messages %}\n"
        "    {% if loop.index0 == 1 %}{% continue %}{% endif %}\n"
        "    {% set kept = m.content %}\n"
        "{{ {'k': '<é&>', 'l': [1, none]} | tojson }}{{ {'k': 1} | tojson(indent=2) }}{{ kept }}{{ eos_token }}|\n"
        "  {% endfor %}\n"
        "{% endgeneration %}{{ tools is none }}{{ documents is defined }}{{ unk_token is defined }}"
    )
    messages = [{"role": "user", "content": c} for c in ("a", "b", "c")]
    reference = Reference(family_dir("gemma"), "gemma", template)
    mine = Renderer(template, {"bos_token": "<bos>", "eos_token": "<end_of_turn>"}, {})
    wanted = reference.hf.apply_chat_template(messages, tokenize=False)
    assert mine.render(messages, None, False, {}) == wanted
    assert mine.render(messages, [], False, {}) == wanted  # no tools, however it is said


def test_the_clock_stands_still_or_the_row_is_refused() -> None:
    template = "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}"
    mine = Renderer(template, {}, {})
    with pytest.raises(Reject, match=r"template_error.*strftime_now"):
        mine.render([USER], None, False, {})
    assert mine.render([USER], None, False, {"strftime_now": "2026-01-31"}) == "31 Jan 2026hi"


def test_a_kwarg_may_not_take_the_place_of_the_messages() -> None:
    with pytest.raises(Reject, match=r"template_error.*`messages`"):
        renderer().render([USER], None, True, {"messages": []})


def test_a_directory_tells_its_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 5, "content": "<e>", "special": true}]}')
    with pytest.raises(JobError, match="no chat template"):
        Renderer.load(tmp_path)
    config = {
        "eos_token": {"content": "<e>"},
        "chat_template": [{"name": "default", "template": "d{{ eos_token }}"}, {"name": "tool_use", "template": "t"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    both = Renderer.load(tmp_path)
    assert both.ids == {"<e>": 5}
    assert both.render([USER], None, True, {}) == "d<e>" and both.render([USER], [{}], True, {}) == "t"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Renderer.load(tmp_path).render([USER], None, True, {}) == "file"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(JobError, match="no Jinja: line 1"):
        Renderer.load(tmp_path)


# --- the direct renderer

VALUE = st.text(max_size=6) | st.sampled_from(
    [*corpus.CONTROL, *corpus.THINK, "\n", " x ", "<tool_response>\n</tool_response>"]
)
BODY = st.lists(VALUE, max_size=3).map("".join)
ARGUMENTS = st.dictionaries(
    BODY, BODY | st.integers() | st.floats(allow_nan=False) | st.none() | st.lists(BODY), max_size=2
)
CALL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": BODY}, optional={"arguments": ARGUMENTS | st.just("{}") | st.none()})}
) | st.fixed_dictionaries({"name": BODY, "arguments": ARGUMENTS})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "user", "assistant", "assistant", "tool", "system", "developer"])},
    optional={
        "content": BODY | st.none() | st.just([{"type": "text", "text": "part"}]) | st.just(3),
        "reasoning_content": BODY | st.none() | st.just(7),
        "tool_calls": st.lists(CALL, max_size=2) | st.none() | st.just({}),
    },
)
KWARGS = st.fixed_dictionaries(
    {},
    optional={
        "enable_thinking": st.sampled_from([True, False, None, 0, "false"]),
        "preserve_thinking": st.sampled_from([True, False, None, 1]),
        "tool_prefix": st.just("x"),
    },
)


def outcome(call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Reject as reject:
        return reject.reason, reject.detail.split(":")[0] if reject.reason == "template_error" else ""


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(MESSAGE, max_size=6), st.none() | st.just([]) | st.just(corpus.TOOLS), KWARGS, st.booleans())
def test_direct_renderer_equals_jinja(messages: list[Row], tools: Any, kwargs: Row, prompt: bool) -> None:
    wanted = outcome(renderer().render_jinja, messages, tools, prompt, kwargs)
    assert outcome(renderer().render, messages, tools, prompt, kwargs) == wanted


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(MESSAGE, max_size=6), st.none() | st.just(corpus.TOOLS), KWARGS)
def test_direct_view_equals_renderings_with_stand_ins(messages: list[Row], tools: Any, kwargs: Row) -> None:
    messages = [USER, *messages]
    direct = qwen.view(messages, tools, kwargs)
    if direct is None:
        return
    slow = JinjaView(renderer(), messages, tools, kwargs)
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    for index in turns:
        assert outcome(direct.prompt, index) == outcome(slow.prompt, index)
        assert slow.opening(index).endswith(direct.opening(index)[-30:])
        if any(not call["function"]["name"] for call in messages[index].get("tool_calls") or ()):
            continue
        for reasoned in (False, True):
            for spoken in (False, True):
                got = outcome(direct.shape, index, reasoned, spoken)
                assert got == outcome(slow.shape, index, reasoned, spoken)
        for last in turns[: turns.index(index)]:
            assert direct.history(last, index) == slow.history(last, index)


def test_direct_renderer_serves_the_corpus_and_only_its_template() -> None:
    served = [qwen.view(r["messages"], r.get("tools"), r.get("chat_template_kwargs", {})) for r in corpus.chats(500)]
    assert sum(view is not None for view in served) > 480
    altered = Renderer(renderer().template + " ", {}, {"<|im_end|>": (1, True)})
    assert altered.render([USER], None, True, {}).endswith("<think>\n ")


# --- one turn


def test_a_turn_is_prompt_reply_and_end() -> None:
    [row] = take(conversation(USER, said(" a\n", "r ")))
    end = renderer().ids["<|im_end|>"]
    assert row.pieces == [
        Piece(HEAD + "<think>\n", None, PROMPT, False),
        Piece("r \n</think>\n\n a\n", None, REPLY, True),
        Piece("<|im_end|>", [end], END, True),
    ]
    assert (row.turn, row.replies) == (0, ["r \n</think>\n\n a\n"])


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (said("a"), "\n</think>\n\na"),  # no thinking came: the block that the template closes
        (said("a", ""), "\n</think>\n\na"),
        (said("\n\na"), "\n</think>\n\na"),
        (said("\n\na", "r\n"), "r\n</think>\n\na"),  # separators that the parts hold
        (said("\na", "\nr\n\n"), "\nr\n\n</think>\n\na"),
        (said("a", "\n"), "\n</think>\n\na"),
        (said("a", "<think>\nr"), "r\n</think>\n\na"),
        (said("a", "r</think>"), "r</think>\n\na"),
        (said("r\n</think>\n\na"), "r\n</think>\n\na"),  # inline
        (said("<think>\nr\n</think>\n\na"), "r\n</think>\n\na"),
        (said("<think>\n\nr</think>a </think> b "), "\nr</think>a </think> b "),
        (said("<think>r"), "r"),
        (said("it is </think> and <|im_start|>", "r"), "r\n</think>\n\nit is </think> and <|im_start|>"),
        (said("a<|im_end|>", "r"), "r\n</think>\n\na"),  # the real end token
        (said("a<|im_end|>\n", "r"), "r\n</think>\n\na<|im_end|>\n"),
        (said("a<|endoftext|>", "r"), "r\n</think>\n\na<|endoftext|>"),
        (said("", "r"), "r\n</think>\n\n"),
    ],
)
def test_what_the_model_emitted(message: Row, wanted: str) -> None:
    assert emitted(message) == wanted + "<|im_end|>"


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (said("", "r "), "r "),  # cut while thinking: no closing tag
        (said("a ", "r"), "r\n</think>\n\na "),
        (said("<think>\nr"), "r"),
        (said("r"), "r"),
        (said("r\n</think>\n\na"), "r\n</think>\n\na"),
    ],
)
def test_a_cut_reply_gets_no_closing_tag_and_no_end(message: Row, wanted: str) -> None:
    assert emitted(message, finish="length") == wanted


def test_a_cut_reply_without_text_is_nothing() -> None:
    assert refused(conversation(USER, said(), finish="length")) == [(0, "no_supervised_tokens")]


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (said(" a"), " a"),
        (said("a", "\n"), "a"),
        (said("<think>\n\n</think>\n\na"), "a"),
        (said("say </think> or <think>"), "say </think> or <think>"),
    ],
)
def test_without_thinking_the_prompt_holds_the_empty_block(message: Row, wanted: str) -> None:
    kwargs = {"enable_thinking": False}
    assert emitted(message, kwargs=kwargs) == wanted + "<|im_end|>"
    [row] = take(conversation(USER, message, kwargs=kwargs))
    assert row.pieces[0].text == HEAD + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("message", [said("a", "r"), said("<think>\nr\n</think>\n\na")])
def test_thinking_after_a_closed_block_is_unstable(message: Row) -> None:
    assert refused(conversation(USER, message, kwargs={"enable_thinking": False})) == [(0, "unstable_boundary")]


def test_row_kwargs_go_over_the_options() -> None:
    conv = conversation(USER, said("a"), kwargs={"enable_thinking": True})
    [row] = take(conv, template_kwargs={"enable_thinking": False})
    assert row.pieces[0].text == HEAD + "<think>\n"
    options = ChatOptions({"preserve_thinking": False, "x": 1}, preserve_thinking=True)
    assert options.kwargs({}) == {"preserve_thinking": True, "x": 1}
    assert options.kwargs({"preserve_thinking": False})["preserve_thinking"] is False


CALLS = [("f", {"a": "<|im_end|>", "b": [1]})]
XML = "<tool_call>\n<function=f>\n<parameter=a>\n<|im_end|>\n</parameter>\n<parameter=b>\n[1]\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("content", "reasoning", "wanted"),
    [
        ("", "r", "r\n</think>\n\n" + XML),
        ("\n\n", "r", "r\n</think>\n\n" + XML),  # white space before a call is the seam
        ("\n\n", None, "\n</think>\n\n" + XML),
        ("see\n\n", "r", "r\n</think>\n\nsee\n\n" + XML),
        ("see", "r", "r\n</think>\n\nsee\n\n" + XML),
        ("r\n</think>\n\nsee\n", None, "r\n</think>\n\nsee\n\n" + XML),
    ],
)
def test_tool_calls_are_what_the_template_writes(content: str, reasoning: str | None, wanted: str) -> None:
    message = said(content, reasoning, CALLS)
    assert emitted(message) == wanted + "<|im_end|>"
    altered = Renderer(renderer().template + "\n", {}, {"<|im_end|>": (9, True), "<think>": (8, False)})  # by Jinja
    kept, rejected = rows(conversation(USER, message), altered, ChatOptions())
    assert not rejected and "".join(p.text for p in kept[0].pieces if p.loss) == wanted + "<|im_end|>"


@pytest.mark.parametrize(
    ("message", "finish", "wanted"),
    [
        (said("\n a", "r"), "stop", "a<|im_end|>"),
        (said("r</think>\n\na"), "stop", "a<|im_end|>"),
        (said("a"), "stop", "a<|im_end|>"),
        (said("a </think> b", "r"), "length", "a </think> b"),
        (said("", "r", CALLS), "stop", XML + "<|im_end|>"),
    ],
)
def test_loss_on_response_starts_behind_the_thinking(message: Row, finish: str, wanted: str) -> None:
    [row] = take(conversation(USER, message, finish=finish), loss_on="response")
    assert "".join(piece.text[piece.loss_from :] for piece in row.pieces if piece.loss) == wanted
    assert row.replies == [wanted.removesuffix("<|im_end|>")]


def test_loss_on_response_without_a_response() -> None:
    conv = conversation(USER, said("", "r"), finish="length")
    assert refused(conv, loss_on="response") == [(0, "no_supervised_tokens")]
    [row] = take(conversation(USER, said("  a"), kwargs={"enable_thinking": False}), loss_on="response")
    assert row.pieces[1] == Piece("  a", None, REPLY, True, 0)  # no thinking, nothing to leave out


def test_what_the_server_counted_is_kept_only_without_thinking() -> None:
    assert take(conversation(USER, said("a"), output_tokens=900))[0].output_tokens == 900
    assert take(conversation(USER, said("a", "r"), output_tokens=900))[0].output_tokens is None
    assert take(conversation(USER, said("r</think>a"), output_tokens=900))[0].output_tokens is None


# --- ids that the row brings


def test_given_ids_are_used_as_they_are() -> None:
    end = renderer().ids["<|im_end|>"]
    [row] = take(conversation(USER, said("a", "r"), prompt_token_ids=[1, 2], token_ids=[3, end]))
    assert row.pieces == [
        Piece(HEAD + "<think>\n", [1, 2], IDS, False),
        Piece("r\n</think>\n\na<|im_end|>", [3, end], IDS, True),
    ]
    [row] = take(conversation(USER, said(), finish="length", token_ids=[3, 4]))
    assert row.pieces[1] == Piece("", [3, 4], IDS, True)  # the row shows no text: nothing to compare


def test_a_reply_with_nothing_but_prompt_ids_before_it() -> None:
    [row] = take(conversation(said("a", "r"), prompt_token_ids=[1, 2]))
    assert [p.kind for p in row.pieces] == [BARE, REPLY, END] and row.pieces[1].text == "r\n</think>\n\na"
    [row] = take(conversation(said("a", "r"), prompt_token_ids=[1, 2], prompt_text="<user>q"))
    assert row.pieces[0] == Piece("<user>q", [1, 2], BARE, False)
    assert refused(conversation(said("a"))) == [(0, "no_prompt")]


def test_given_ids_of_turns_join_where_the_next_prompt_extends_them() -> None:
    end = renderer().ids["<|im_end|>"]
    conv = conversation(USER, said("a"), USER, said("b"))
    conv.replies = {
        1: Reply(prompt_token_ids=[1], token_ids=[2, end]),
        3: Reply(prompt_token_ids=[1, 2, end, 5], token_ids=[6]),
    }
    [row] = take(conv)
    assert [p.ids for p in row.pieces] == [[1], [2, end], [5], [6]]
    conv.replies[3].prompt_token_ids = [1, 9, end, 5]
    assert [row.turn for row in take(conv)] == [0, 1]


def test_loss_on_response_of_bare_ids_starts_behind_the_closing_tag() -> None:
    close = renderer().ids["</think>"]
    [row] = take(conversation(USER, said(), token_ids=[3, close, 4]), loss_on="response")
    assert row.pieces[1:] == [Piece("", [3, close], IDS, False), Piece("", [4], IDS, True, 1)]


def test_given_ids_without_a_closing_tag_say_that_no_empty_block_was_emitted() -> None:
    """A server asked not to think, by a row that does not say so: only the ids of its prompt show it."""
    opened, close, end = (renderer().ids[t] for t in ("<think>", "</think>", "<|im_end|>"))
    ids = {"prompt_token_ids": [1, opened, 2, close, 2], "token_ids": [3, end]}
    for loss_on in ("all", "response"):
        [row] = take(conversation(said("a"), **ids), loss_on=loss_on)
        assert row.pieces[1] == Piece("a<|im_end|>", [3, end], IDS, True) and row.replies == ["a"]
    [row] = take(conversation(said("a"), **ids | {"token_ids": [2, close, 2, 3, end]}))
    assert row.pieces[1].text == "\n</think>\n\na<|im_end|>"


def test_given_ids_that_end_while_thinking_hold_no_response() -> None:
    opened = renderer().ids["<think>"]
    for message in (said(), said("a")):
        thinking = conversation(message, prompt_token_ids=[1, opened], token_ids=[3], finish="length")
        assert refused(thinking, loss_on="response") == [(0, "no_supervised_tokens")]
        assert take(thinking)[0].pieces[1].ids == [3]


def test_same_text_looks_over_white_space_and_a_broken_end() -> None:
    assert same_text("r\n</think>\n\na\ufffd", "r</think> a")
    assert not same_text("r</think>b", "r</think>a")


# --- several turns


def test_history_that_is_rewritten_gives_a_row_per_turn() -> None:
    one, two = take(conversation(USER, said("a", "r"), USER, said("b", "s")))
    assert two.pieces[0].text == HEAD + "a<|im_end|>\n" + HEAD + "<think>\n"
    assert (one.turn, two.turn) == (0, 1)


def test_append_only_history_gives_one_row_with_the_emitted_text() -> None:
    [row] = take(conversation(USER, said("a ", "r"), USER, said("b", "s")), preserve_thinking=True)
    assert [(p.text, p.loss) for p in row.pieces] == [
        (HEAD + "<think>\n", False),
        ("r\n</think>\n\na ", True),
        ("<|im_end|>", True),
        ("\n" + HEAD + "<think>\n", False),
        ("s\n</think>\n\nb", True),
        ("<|im_end|>", True),
    ]
    assert row.replies == ["r\n</think>\n\na ", "s\n</think>\n\nb"]


def test_a_tool_chain_is_one_row_and_the_next_query_another() -> None:
    tool = {"role": "tool", "content": "1"}
    conv = conversation(USER, said("", "r", CALLS), tool, said("b", "s"), USER, said("c", "t"))
    assert [(row.turn, len(row.replies)) for row in take(conv)] == [(0, 2), (2, 1)]


def test_a_cut_turn_in_a_row_is_closed_by_the_context() -> None:
    conv = conversation(USER, said("", "r"), USER, said("b", "s"))
    conv.replies[1].finish = "length"
    [row] = take(conv, preserve_thinking=True)
    assert [(p.text, p.loss) for p in row.pieces][1:3] == [
        ("r", True),
        ("\n</think>\n\n<|im_end|>\n" + HEAD + "<think>\n", False),
    ]
    conv = conversation(USER, said("a "), USER, said("b", "s"))
    conv.replies[1].finish = "length"
    [row] = take(conv, preserve_thinking=True)
    assert [(p.text, p.loss) for p in row.pieces][1:3] == [("a ", True), ("<|im_end|>\n" + HEAD + "<think>\n", False)]


def test_turns_of_no_weight_and_rejected_turns_are_context() -> None:
    conv = conversation(USER, said("a"), USER, said("b"), USER, said("c"))
    conv.replies[1].weight = 0.0
    conv.replies[3].reject = Reject("bad_finish_reason", "error")
    kept, rejected = rows(conv, renderer(), ChatOptions(preserve_thinking=True))
    assert [(row.turn, row.replies) for row in kept] == [(2, ["\n</think>\n\nc"])]
    assert [(turn, reject.reason) for turn, reject in rejected] == [(1, "bad_finish_reason")]
    conv.replies[3].reject = None
    [row] = take(conv, preserve_thinking=True)
    assert row.turn == 1 and len(row.replies) == 2


def test_nothing_to_learn_is_said() -> None:
    assert refused(conversation(USER, said("a"), weight=0)) == [(0, "no_supervised_tokens")]
    assert refused(conversation(USER)) == [(0, "no_completion")]


# --- other families


def test_bos_of_the_template_is_the_only_one() -> None:
    from tokenizer.encode import Encoder

    for family in ("llama3", "gemma"):
        encoder = Encoder.load(family_dir(family))
        encoded = encoder.encode(take(conversation(USER, said("a")), family))
        bos = renderer(family).ids[renderer(family).named_tokens["bos_token"]]
        assert encoded.ids.tolist().count(bos) == 1 and encoded.ids[0] == bos


def test_a_model_without_thinking_loses_it_aloud() -> None:
    assert refused(conversation(USER, said("a", "r")), "chatml") == [(0, "reasoning_lost")]
    assert emitted(said("<think>r</think> a"), "chatml") == "<think>r</think> a<|im_end|>"
    assert refused(conversation(USER, said("", None, CALLS)), "chatml") == [(0, "unstable_boundary")]


def test_control_tokens_between_channels_are_ids_and_literals_are_text() -> None:
    ids = renderer("channels").ids
    [row] = take(conversation(USER, said("a<|next|>", "r<|end|>", [("f", {"k": "<|end|>"})])), "channels")
    assert [(p.text, p.ids) for p in row.pieces[1:]] == [
        ("<|channel|>", [ids["<|channel|>"]]),
        ("thought", None),
        ("<|message|>", [ids["<|message|>"]]),
        ("r<|end|>", None),
        ("<|next|>", [ids["<|next|>"]]),
        ("<|channel|>", [ids["<|channel|>"]]),
        ("final", None),
        ("<|message|>", [ids["<|message|>"]]),
        ("a<|next|>", None),
        ("<|call|>", [ids["<|call|>"]]),
        ('f {"k": "<|end|>"}', None),
        ("<|end|>", [ids["<|end|>"]]),
    ]
    [row] = take(conversation(USER, said("a", "r")), "channels", loss_on="response")
    assert [p.text[p.loss_from :] for p in row.pieces if p.loss] == ["a", "<|end|>"]


def test_a_template_that_drops_text_beside_calls_is_not_guessed() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content if not m.tool_calls }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<e>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    mine = Renderer(template, {}, {"<e>": (1, True)})
    kept, rejected = rows(conversation(USER, said("see", None, CALLS)), mine, ChatOptions())
    assert not kept and rejected[0][1].reason == "unstable_boundary" and "beside tool calls" in rejected[0][1].detail
    [row] = rows(conversation(USER, said("", None, CALLS)), mine, ChatOptions())[0]
    assert [p.text for p in row.pieces] == ["[user]hi<e>[assistant]", "f", "<e>"]


# --- rendered texts


def rendered(text: str, family: str = "qwen36", **options: Any) -> tuple[list[TextRow], list[tuple[int, str]]]:
    kept, rejected = rows(Conversation([], {0: Reply()}, text=text), renderer(family), ChatOptions(**options))
    return kept, [(turn, reject.reason) for turn, reject in rejected]


def test_a_rendered_text_is_cut_at_its_own_prompts() -> None:
    text = HEAD + "a<|im_end|>\n" + HEAD + "<think>\nr\n</think>\n\nb<|im_end|>\n"
    [row], rejected = rendered(text)
    assert [(p.text, p.loss) for p in row.pieces] == [
        (HEAD + "a<|im_end|>\n" + HEAD + "<think>\n", False),
        ("r\n</think>\n\nb", True),
        ("<|im_end|>", True),
    ]
    assert row.turn == 1 and rejected == [(0, "unstable_boundary")]
    [row], _ = rendered(text, loss_on="response")
    assert row.replies == ["b"]
    [row], _ = rendered(HEAD + "<think>\nr")
    assert [(p.text, p.loss) for p in row.pieces][1:] == [("r", True)]


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma", "qwen3"])
def test_rendered_text_gives_the_row_of_its_messages(family: str) -> None:
    conv = conversation(USER, said("a"), USER, said("b"))
    if family == "qwen3":
        conv = conversation(USER, said("a"))
    text = renderer(family).render(conv.messages, None, False, {})
    [row], rejected = rendered(text, family)
    assert not rejected and row.pieces == take(conv, family)[0].pieces


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no markers at all", "no_completion"),
        ("<|im_start|>user\nsay <|im_start|>assistant\n<think>\nx<|im_end|>\n", "unstable_boundary"),
        (HEAD + "<think>\nsay <|im_start|>assistant\n<think>\n now<|im_end|>\n", "unstable_boundary"),
        (HEAD + "<think>\n", "no_supervised_tokens"),
    ],
)
def test_a_rendered_text_that_is_not_sure_is_refused(text: str, reason: str) -> None:
    assert rendered(text) == ([], [(0, reason)])
