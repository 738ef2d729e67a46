"""A row before its encoding: stretches of text and ids, each with how it is encoded and whether it is learnt."""

from __future__ import annotations

from typing import NamedTuple

PROMPT, REPLY, END, IDS, BARE = range(5)


class Piece(NamedTuple):
    """A stretch of one row.

    kind PROMPT: text, encoded as a server does, every added token recognised, behind what stands before it in the row.
    REPLY: text that goes on from its prompt; control tokens in it are ordinary text. END: one control token that the
    model emitted, by id. IDS: ids that the row brought, used as they are once they agree with `text` (empty: the row
    has none), see `same_text`. loss_from: characters of `text` that are not learnt although `loss` is set; of ids
    without text, any but 0 means the white space that they start with. BARE: ids of a prompt that hold `text` among
    others, since the row shows no more of it.
    """

    text: str
    ids: list[int] | None
    kind: int
    loss: bool
    loss_from: int = 0


class TextRow(NamedTuple):
    """One row of the dataset before its encoding.

    turn: number of its first supervised assistant turn, from 0. replies: the supervised texts, without end tokens.
    output_tokens: what the server says that it produced, for rows whose replies came without any thinking; far more
    than the row's loss tokens means that the thinking is lost.
    """

    turn: int
    pieces: list[Piece]
    replies: list[str]
    output_tokens: int | None


def same_text(decoded: str, expected: str) -> bool:
    """Whether given ids, decoded, are the text that the row shows: an IDS piece is foreign if not.

    White space does not count: a server's parsers trim what they cut out of a completion, and tool arguments are
    written anew. Nor does a character that the end of a cut reply breaks.
    """
    return "".join(decoded.split()).rstrip("\ufffd") == "".join(expected.split()).rstrip("\ufffd")


def holds_text(decoded: str, expected: str) -> bool:
    """Whether given ids, decoded, hold the text that the row shows of them; white space does not count."""
    return "".join(expected.split()) in "".join(decoded.split())
