"""The boundary rule: what of one turn is prompt, what the model emitted, and what is learnt."""

from __future__ import annotations

import pytest
from chat_turns import CALLS, HEAD, USER, XML, Row, conversation, emitted, refused, renderer, said, take

from tokenizer.chat import END, PROMPT, REPLY, ChatOptions, Piece, Renderer, rows

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
