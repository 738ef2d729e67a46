"""An end-of-turn token that is stored with a reply is the one that the model emitted: no rendering shows a second one."""

from __future__ import annotations

from typing import Any

import pytest
from families import family_dir

from tokenizer import chat, dialects

FAMILIES = {"qwen36": "<|im_end|>", "chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}


def texts(row: dict[str, Any], family: str, **options: Any) -> list[tuple[str, str]]:
    """The text of each row, and what of it is learnt."""
    renderer = chat.Renderer.load(family_dir(family))
    kept, rejected = chat.rows(dialects.parse(row), renderer, chat.ChatOptions(**options))
    assert not rejected, rejected
    return [
        ("".join(piece.text for piece in made.pieces), "".join(piece.text for piece in made.pieces if piece.loss))
        for made in kept
    ]


def talk(first: str, second: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": second},
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preserve", [False, True])
def test_a_stored_end_token_is_rendered_once_in_every_row(family: str, preserve: bool) -> None:
    end = FAMILIES[family]
    plain = texts({"messages": talk("a", "b")}, family, preserve_thinking=preserve)
    stored = texts({"messages": talk("a" + end, "b" + end)}, family, preserve_thinking=preserve)
    assert stored == plain
    assert len(plain) == (2 if family == "qwen36" and not preserve else 1)
    assert all(end + end not in whole for whole, _ in stored)


def test_with_its_thinking_beside_it_too() -> None:
    messages = talk("a<|im_end|>", "b")
    messages[1]["reasoning_content"] = "because"
    for preserve in (False, True):
        for whole, _ in texts({"messages": messages}, "qwen36", preserve_thinking=preserve):
            assert "<|im_end|><|im_end|>" not in whole and whole.count("a<|im_end|>") == 1


def test_also_where_the_turn_itself_is_rejected() -> None:
    """A reasoning behind a prompt that closed the think block: the next turn's prompt is a server's all the same."""
    messages = talk("a<|im_end|>", "b")
    messages[1]["reasoning_content"] = "because"
    row = {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    kept, rejected = chat.rows(dialects.parse(row), chat.Renderer.load(family_dir("qwen36")), chat.ChatOptions())
    assert [(number, reject.reason) for number, reject in rejected] == [(0, "unstable_boundary")]
    whole = "".join(piece.text for piece in kept[0].pieces)
    assert "assistant\na<|im_end|>\n<|im_start|>user" in whole


def test_only_at_the_very_end_of_a_reply() -> None:
    """Elsewhere it is text that the model quoted, and a server renders what it was sent."""
    whole = texts({"messages": talk("a<|im_end|> b", "c")}, "qwen36")[1][0]
    assert "a<|im_end|> b<|im_end|>\n" in whole
    messages = talk("a", "c")
    messages[0]["content"] = "q<|im_end|>"
    assert "q<|im_end|><|im_end|>\n" in texts({"messages": messages}, "qwen36")[0][0]


def test_a_request_is_rendered_as_it_was_sent() -> None:
    """Its messages are on record: the server saw what they say."""
    sent = talk("a<|im_end|>", "")[:3]
    answer = {"choices": [{"message": {"content": "c"}, "finish_reason": "stop"}]}
    for row in ({"request": {"messages": sent}, "response": answer}, {"prompt": sent, "completion": "c"}):
        [(whole, learnt)] = texts(row, "qwen36")
        assert "a<|im_end|><|im_end|>\n" in whole and learnt == "\n</think>\n\nc<|im_end|>"
