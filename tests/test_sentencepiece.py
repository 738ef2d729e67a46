"""SentencePiece tokenizers: a space that is written in front of a text is never taken for one that the model emitted."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import END, FORMS, Plain, sentencepiece_dir
from transformers import PreTrainedTokenizerFast

from tokenizer import chat, dialects, engines
from tokenizer.encode import Encoder

FAMILIES = [(form, template) for form in FORMS for template in END]


class Family:
    """The product and, beside it, Transformers for prompts and plain merges for replies."""

    def __init__(self, form: str, template: str) -> None:
        directory = sentencepiece_dir(form, template)
        self.encoder, self.renderer = Encoder.load(directory), chat.Renderer.load(directory)
        self.hf = PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
        )
        self.hf.chat_template = (directory / "chat_template.jinja").read_text()
        self.plain = Plain(directory)
        self.end = self.hf.convert_tokens_to_ids(END[template])

    def rows(self, *messages: dict[str, Any], loss_on: str = "all") -> list[tuple[list[int], list[int]]]:
        """Ids and mask of each row that the product makes."""
        conv = dialects.parse({"messages": list(messages)})
        kept, rejected = chat.rows(conv, self.renderer, chat.ChatOptions(loss_on=loss_on))
        assert not rejected
        encoded = self.encoder.encode(kept)
        bounds = encoded.offsets.tolist()
        return [(encoded.ids[a:b].tolist(), encoded.mask[a:b].tolist()) for a, b in itertools.pairwise(bounds)]

    def prompt(self, *messages: dict[str, Any]) -> list[int]:
        """What a server sends to the model."""
        text = self.hf.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return list(self.hf(text, add_special_tokens=False)["input_ids"])


@cache
def family(form: str, template: str) -> Family:
    return Family(form, template)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def emitted(template: str, content: str) -> str:
    """The completion: the content as it stands, behind the template's space where it brings none of its own."""
    return " " + content if template == "llama2" and content and not content[0].isspace() else content


TEXT = st.lists(
    st.sampled_from(["Hello", " Hello", "the", " the", "  ", "    return", "\n", "\n\n", ".", "é", "模型", "😀", "</s>", "<s>"])
    | st.text(max_size=4),
    max_size=6,
).map("".join)  # fmt: skip


@pytest.mark.parametrize(("form", "template"), FAMILIES)
@settings(max_examples=100, deadline=None)
@given(asked=TEXT, answer=TEXT)
def test_a_reply_is_what_goes_on_from_the_prompt(form: str, template: str, asked: str, answer: str) -> None:
    made = family(form, template)
    while answer.endswith(END[template]):  # that would be the real one
        answer = answer.removesuffix(END[template])
    ((ids, mask),) = made.rows(user(asked), said(answer))
    prompt, reply = made.prompt(user(asked)), made.plain.ids(emitted(template, answer))
    assert ids == [*prompt, *reply, made.end]
    assert mask == [0] * len(prompt) + [1] * (len(reply) + 1)
    assert made.plain.text(reply) == emitted(template, answer)


@pytest.mark.parametrize(("form", "template"), FAMILIES)
def test_a_space_that_the_model_emitted_is_one_token_and_no_second_is_added(form: str, template: str) -> None:
    made = family(form, template)
    space = made.plain.vocab["\u2581the"]
    ((ids, _),) = made.rows(user("q"), said(" the"))
    assert ids == [*made.prompt(user("q")), space, made.end]
    ((ids, _),) = made.rows(user("q"), said("the"))
    first = space if template == "llama2" else made.plain.vocab["the"]
    assert ids == [*made.prompt(user("q")), first, made.end]


@pytest.mark.parametrize("form", FORMS)
def test_white_space_that_the_template_writes_before_the_end_is_not_emitted(form: str) -> None:
    made = family(form, "llama2")
    for content, wanted in (("the", " the"), ("the ", " the "), ("", "")):
        ((ids, _),) = made.rows(user("q"), said(content))
        assert ids == [*made.prompt(user("q")), *made.plain.ids(wanted), made.end]


@pytest.mark.parametrize(("form", "template"), FAMILIES)
@pytest.mark.parametrize("cut", [False, True])
def test_the_context_between_two_turns_is_as_the_server_encodes_it(form: str, template: str, cut: bool) -> None:
    """Behind an end token as in the whole prompt; behind the text of a cut reply no space is written either."""
    made = family(form, template)
    answer = said(" the answer", finish_reason="length") if cut else said(" the answer")
    ((ids, mask),) = made.rows(user("q"), answer, user("and  then"), said(" the end"))
    first, second = made.prompt(user("q")), made.prompt(user("q"), said(" the answer"), user("and  then"))
    reply, end = made.plain.ids(" the answer"), made.plain.ids(" the end")
    ends = [at for at, token in enumerate(second) if token == made.end]
    between = second[ends[first.count(made.end)] + 1 :]
    closing = made.plain.ids(" ") if cut and template == "llama2" else []
    assert ids == [*first, *reply, *closing, made.end, *between, *end, made.end]
    learnt = [1] * len(reply) + ([0] * len(closing) + [0] if cut else [1])
    assert mask == [0] * len(first) + learnt + [0] * len(between) + [1] * (len(end) + 1)


@pytest.mark.parametrize("form", FORMS)
def test_the_response_alone_starts_at_the_same_token(form: str) -> None:
    made = family(form, "zephyr")
    for content in ("<think>a</think>\n\nthe end", "a\n</think>\n\n模 the"):
        ((whole, _),) = made.rows(user("q"), said(content))
        ((ids, mask),) = made.rows(user("q"), said(content), loss_on="response")
        learnt = [token for token, on in zip(ids, mask, strict=True) if on]
        assert ids == whole
        assert learnt == [*made.plain.ids(content.partition("\n\n")[2]), made.end]


def test_only_such_tokenizers_are_encoded_piece_by_piece() -> None:
    assert all(Encoder.load(sentencepiece_dir(*names)).reference.in_context for names in FAMILIES)
    assert engines.without_prefix({"type": "NFC"}, "normalizers") == {"type": "NFC"}
    level = {"type": "ByteLevel", "add_prefix_space": True}
    steps = {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, level]}
    assert engines.without_prefix(steps, "pretokenizers")["pretokenizers"][1]["add_prefix_space"] is False
