"""Given ids, several turns, other model families and rendered texts under the boundary rule."""

from __future__ import annotations

from typing import Any

import pytest
from chat_turns import CALLS, HEAD, USER, conversation, emitted, refused, renderer, said, take
from families import family_dir

from tokenizer.chat import BARE, END, IDS, REPLY, ChatOptions, Piece, Renderer, TextRow, rows, same_text
from tokenizer.job import Reject
from tokenizer.messages import Conversation, Reply

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
