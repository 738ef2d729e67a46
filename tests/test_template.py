"""The template as Transformers renders it, and the direct Qwen3.6 renderer."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import corpus
import pytest
from chat_turns import USER, Row, renderer
from families import family_dir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Reference, Refused

from tokenizer import qwen
from tokenizer.chat import ChatOptions, Renderer, rows
from tokenizer.job import JobError, Reject
from tokenizer.messages import Conversation, Reply
from tokenizer.template import JinjaView

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
