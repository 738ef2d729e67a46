r"""One conversation -> rows of pieces: what the server saw, what the model produced, and which of it is learnt.

Every assistant turn is a prompt, the template rendered with its generation prompt, and a completion: the model's own
text, byte for byte. Where the text came in parts (reasoning, content, tool calls) the template's own seams join them;
they are read off a rendering with stand-ins, so that no trimming of the template touches what the model wrote. A turn
whose full rendering does not start with its prompt is rejected, never guessed.

    prompt    ...<|im_start|>assistant\n<think>\n                             not learnt
    reply     reasoning  \n</think>\n\n  content                              learnt, encoded on its own
    end       <|im_end|>                                                      learnt, unless the reply was cut

Turns share a row as long as the next prompt extends the last turn (a tool chain, or `preserve_thinking`); where the
template rewrites history, a turn starts a row of its own.

Text with think tags and no reasoning beside it is the completion as it stands: its thinking ends at the first closing
tag. An empty reasoning says the same as none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tokenizer.job import Reject
from tokenizer.messages import Conversation, Reply
from tokenizer.pieces import BARE, END, IDS, PROMPT, REPLY, Piece, TextRow, same_text
from tokenizer.rendered import rendered_rows
from tokenizer.seams import (
    CLOSE_TAG,
    EMPTY_BLOCK,
    OPEN_TAG,
    behind_space,
    behind_thinking,
    controlled,
    join,
    starts_open,
    trim_start,
    unblank,
    without_open,
)
from tokenizer.template import Renderer
from tokenizer.view import Message, Shape, View

__all__ = ["BARE", "END", "IDS", "PROMPT", "REPLY", "ChatOptions", "Piece", "Renderer", "TextRow", "rows", "same_text"]


@dataclass(frozen=True)
class ChatOptions:
    """Mask options of a run; `template_kwargs` yield to the row's own."""

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    preserve_thinking: bool = False
    loss_on: str = "all"  # "all" | "response": only what follows the thinking

    def kwargs(self, of_row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The template's kwargs for a row: its own over --preserve-thinking over --template-kwargs."""
        if self.preserve_thinking:
            return {**self.template_kwargs, "preserve_thinking": True, **of_row}
        return {**self.template_kwargs, **of_row} if of_row else self.template_kwargs


class _Completion(NamedTuple):
    """The text of one turn, as emitted.

    parts: its raw texts (at `first_raw`, then every second) and the seams between them. thought: where its response
    starts, behind the thinking; 0 where there is none. seen: whether thinking came with it.
    """

    parts: list[str]
    first_raw: int
    shape: Shape
    thought: int
    seen: bool


class _Turn(NamedTuple):
    """A completion as pieces: its text without end token, how much of that is not learnt, whether it ended."""

    pieces: list[Piece]
    text: str
    skip: int
    shape: Shape
    ended: bool
    output_tokens: int | None


def rows(
    conv: Conversation, renderer: Renderer, options: ChatOptions
) -> tuple[list[TextRow], list[tuple[int, Reject]]]:
    """The rows of a conversation, and the turns that cannot be taken, each with its number and why.

    There is at least one of either. A turn of weight 0 is context and counts as neither.
    """
    kwargs = options.kwargs(conv.kwargs)
    response = options.loss_on == "response"
    if conv.text is not None:
        bad = next((reply.reject for reply in conv.replies.values() if reply.reject), None)
        return ([], [(0, bad)]) if bad else rendered_rows(conv.text, renderer, kwargs, response)
    view = renderer.view(_ended_once(conv, renderer, kwargs), conv.tools, kwargs)
    out: list[TextRow] = []
    rejects: list[tuple[int, Reject]] = []
    last = -1
    before: _Turn | None = None
    for number, index in enumerate(sorted(conv.replies)):
        reply = conv.replies[index]
        if reply.reject is not None:
            rejects.append((number, reply.reject))
            continue
        if reply.weight <= 0:
            continue
        try:
            if index:
                turn = _turn(view, index, conv.messages[index], reply, renderer, response)
            else:
                turn = _first(conv, reply, renderer, kwargs, response)
            between = None if before is None else _between(view, reply, last, index, before, out[-1])
            if between is None:
                ids = reply.prompt_token_ids
                shown = view.prompt(index) if index else reply.prompt_text
                prompt = Piece(shown, ids, PROMPT if ids is None else IDS if index else BARE, False)
                out.append(TextRow(number, [prompt, *turn.pieces], [turn.text[turn.skip :]], turn.output_tokens))
            else:
                row = out[-1]
                row.pieces.append(between)
                row.pieces.extend(turn.pieces)
                row.replies.append(turn.text[turn.skip :])
                told = None
                if row.output_tokens is not None and turn.output_tokens is not None:
                    told = row.output_tokens + turn.output_tokens
                out[-1] = row._replace(output_tokens=told)
        except Reject as reject:
            rejects.append((number, reject))
            continue
        last, before = index, turn
    if not out and not rejects:
        why = "every reply has weight 0" if conv.replies else "no assistant turn"
        rejects.append((0, Reject("no_supervised_tokens" if conv.replies else "no_completion", why)))
    return out, rejects


def _ended_once(conv: Conversation, renderer: Renderer, kwargs: Mapping[str, Any]) -> list[Message]:
    """The messages as the history of later turns shows them: the end token that a reply brings is not written again.

    A request is left as the server got it.
    """
    messages = conv.messages
    last = len(messages) - 1
    added = tuple(renderer.ids)
    for index in conv.replies:
        message = messages[index]
        content = message.get("content")
        if not conv.asked <= index < last or not content or not content.endswith(added) or message.get("tool_calls"):
            continue
        # A reasoning that this template cannot render rejects the turn itself; its end is the same without.
        for reasoned in (True, False) if message.get("reasoning_content") else (False,):
            with contextlib.suppress(Reject):  # which the turn itself meets as well
                end = renderer.view(conv.messages, conv.tools, kwargs).shape(index, reasoned, True).end
                ended = {**message, "content": content.removesuffix(end)}
                messages = [*messages[:index], ended, *messages[index + 1 :]]
                break
    return messages


def _first(conv: Conversation, reply: Reply, renderer: Renderer, kwargs: Mapping[str, Any], response: bool) -> _Turn:
    """A completion with nothing before it but the ids of its prompt: any user message stands in for the seams."""
    if reply.prompt_token_ids is None:
        raise Reject("no_prompt", "the conversation starts with an assistant turn")
    messages = [{"role": "user", "content": "-"}, conv.messages[0]]
    return _turn(renderer.view(messages, conv.tools, kwargs), 1, messages[1], reply, renderer, response)


def _turn(view: View, index: int, message: Message, reply: Reply, renderer: Renderer, response: bool) -> _Turn:
    """The completion of one assistant turn as pieces; raises Reject."""
    cut = reply.finish == "length"
    parts, first_raw, shape, thought, seen = _completion(view, index, message, cut)
    text = "".join(parts)
    end = renderer.ids[shape.end]
    skip = behind_space(text, thought) if response and thought else 0
    if reply.token_ids is not None:
        return _given(reply, reply.token_ids, message, shape, text, skip, renderer, response, view.opening(index))
    if cut and skip >= len(text):
        raise Reject("no_supervised_tokens", "the reply was cut before its response" if text else "the reply is empty")
    if shape.split is not None:
        pieces = controlled(parts, first_raw, shape.split, skip)
    else:
        pieces = [Piece(text, None, REPLY, True, skip)] if text else []
    if not cut:
        pieces.append(Piece(shape.end, [end], END, True))
    return _Turn(pieces, text, skip, shape, not cut, None if seen else reply.output_tokens)


def _given(
    reply: Reply,
    given: list[int],
    message: Message,
    shape: Shape,
    text: str,
    skip: int,
    renderer: Renderer,
    response: bool,
    opening: str,
) -> _Turn:
    """The completion of a turn that brings its ids, with `text` as the row shows it; raises Reject.

    Without a closing tag among the ids no thinking ended here: the row's own text is the completion, and whether that
    is the response or a thinking that never ended, the prompt tells.
    """
    open_id, close = renderer.ids.get(OPEN_TAG), renderer.ids.get(CLOSE_TAG)
    opened = opening.rstrip().endswith(OPEN_TAG)
    unclosed = close is not None and close not in given
    if unclosed and response:
        tags = [token for token in reply.prompt_token_ids or () if token in (open_id, close)]
        if open_id in given or (opened if reply.prompt_token_ids is None else tags[-1:] == [open_id]):
            raise Reject("no_supervised_tokens", "the ids end before the response")
    ended = given[-1] == renderer.ids[shape.end]
    content = message.get("content")
    more = message.get("reasoning_content") or message.get("tool_calls")
    if unclosed and content and CLOSE_TAG in text and not more:
        text, skip = (without_open(content, opening) if opened else content).removesuffix(shape.end), 0
    if content or more:
        return _Turn([Piece(text + shape.end * ended, given, IDS, True, skip)], text, skip, shape, ended, None)
    at = given.index(close) + 1 if response and close in given else 0
    pieces = [Piece("", given[:at], IDS, False)] if at else []
    return _Turn([*pieces, Piece("", given[at:], IDS, True, min(at, 1))], "", 0, shape, ended, None)


def _completion(view: View, index: int, message: Message, cut: bool) -> _Completion:
    """The text of a turn put together from what the row knows of it; raises Reject."""
    content: str = message.get("content") or ""
    reasoning: str = message.get("reasoning_content") or ""
    called = bool(message.get("tool_calls"))
    opening = view.opening(index)
    generation = opening.rstrip()
    opened, closed = generation.endswith(OPEN_TAG), generation.endswith(CLOSE_TAG)
    if not reasoning:
        tagged = CLOSE_TAG in content or OPEN_TAG in content
        inline = False  # thinking stands in the content
        if tagged and closed:
            block = EMPTY_BLOCK.match(content)
            if block:  # the prompt has it already
                content = content[block.end() :]
            else:  # else a tag that is only quoted
                inline = starts_open(content) and CLOSE_TAG in content
        elif tagged:
            inline = starts_open(content) or CLOSE_TAG in content
            if opened:
                content = without_open(content, opening)
        if inline or (cut and not called):
            return _raw(view, index, content, opened, closed and inline, inline)
    elif OPEN_TAG in reasoning:
        reasoning = without_open(reasoning, opening if opened else OPEN_TAG + "\n")
    spoken = bool(content) and not (called and not content.strip())
    reasoned = bool(reasoning)
    try:
        shape = view.shape(index, reasoned, spoken)
    except Reject:
        if not reasoned or reasoning.strip():
            raise
        reasoned = False  # blank: the template's own empty block may fit
        shape = view.shape(index, False, spoken)
    if not called:  # a server may leave the end token in the text
        content = content.removesuffix(shape.end)
    if not spoken:
        content = ""
    if not reasoned:
        parts = join(shape.lead if spoken else unblank(shape.lead), content, unblank(shape.tail), "", "")
        return _Completion(parts, 1, shape, behind_thinking(parts[0]) if CLOSE_TAG in parts[0] else 0, False)
    if cut and not called and not spoken:  # while it was thinking
        parts = join(shape.lead, reasoning.removesuffix(shape.end), "", "", "")
        return _Completion(parts, 1, shape, sum(map(len, parts)), True)
    parts = join(shape.lead, reasoning, shape.mid, content, unblank(shape.tail))
    return _Completion(parts, 1, shape, len(parts[0]) + len(parts[1]) + behind_thinking(parts[2]), True)


def _raw(view: View, index: int, content: str, opened: bool, mismatched: bool, inline: bool) -> _Completion:
    """A content that is the completion as it stands; only its end, and tool calls, come from the template."""
    if mismatched:  # thinking after a closed think block: the prompt was another one
        shape = view.shape(index, True, True)
    else:
        try:
            shape = view.shape(index, False, True)
        except Reject:
            if not opened:
                raise
            shape = view.shape(index, True, True)
    content = content.removesuffix(shape.end)
    tail = trim_start(content, shape.tail) if unblank(shape.tail) else ""
    return _Completion([content, tail], 0, shape, behind_thinking(content) if inline or opened else 0, inline)


def _between(view: View, reply: Reply, last: int, index: int, before: _Turn, row: TextRow) -> Piece | None:
    """What joins a turn to the row of the last one: the context between them, or None where it needs its own row."""
    given = reply.prompt_token_ids
    if given is not None:
        if any(piece.ids is None for piece in row.pieces):
            return None
        ids = [token for piece in row.pieces for token in piece.ids or ()]
        return Piece("", given[len(ids) :], IDS, False) if given[: len(ids)] == ids else None
    if not last:
        return None
    joined = view.history(last, index)
    if joined is None:
        return None
    own, rest = joined
    shape = before.shape
    close = shape.end + shape.after
    if not own.endswith(close):
        return None
    if before.ended:
        return Piece(shape.after + rest, None, PROMPT, False)
    if before.text and own.startswith(before.text):  # a cut reply: the template closed what the model did not
        return Piece(own[len(before.text) :] + rest, None, PROMPT, False)
    return Piece(close + rest, None, PROMPT, False)
