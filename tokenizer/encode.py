"""Pieces of rows in, token ids and loss mask out: exact first, fast second.

What is exact is defined with one Hugging Face `tokenizers.Tokenizer`. Every piece is encoded apart and the ids are
joined: a PROMPT piece as a server encodes the rendered template (no tokens added by a post-processor, all added tokens
recognised), a REPLY piece with special added tokens as ordinary text, since a server strips real ones from what it
returns; added tokens that are not special (`<think>`, `<tool_call>`) are their ids there too.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenizer.job import Exit, JobError, Reject

if TYPE_CHECKING:
    from tokenizer.chat import Piece, TextRow

PROMPT, REPLY, END, IDS = range(4)  # Piece.kind, as in tokenizer.chat

Ids = NDArray[np.int32]
Offsets = NDArray[np.int64]


class Encoded(NamedTuple):
    """The rows of one `Encoder.encode` call, flat.

    ids: int32 [tokens]; offsets: int64 [rows + 1], row i is ids[offsets[i]:offsets[i + 1]]; mask: int8 [tokens], 1 where
    the token is learnt; rejects: row -> why, such a row is an empty slice; control_literals: literals of special added
    tokens in reply texts, which became ordinary text.
    """

    ids: Ids
    offsets: Offsets
    mask: NDArray[np.int8]
    rejects: dict[int, Reject]
    control_literals: int


class Engine(Protocol):
    """One BPE implementation."""

    def encode(self, texts: list[str], split_special: bool) -> tuple[Ids, Offsets]:
        """Encodes texts apart: flat ids and offsets [texts + 1]. split_special: special added tokens are plain text."""


class Reference:
    """`tokenizers`: slow, and what exact means."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        self.tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        self.tokenizer.no_truncation()  # as servers do: a limit stored in the file would cut rows in silence
        self.tokenizer.no_padding()
        self.tokenizer.post_processor = None  # adds nothing without add_special_tokens, but may trim offsets

    def encode(self, texts: list[str], split_special: bool) -> tuple[Ids, Offsets]:
        self.tokenizer.encode_special_tokens = split_special
        parts = [e.ids for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(p) for p in parts], out=offsets[1:])
        return np.fromiter((i for p in parts for i in p), np.int32, int(offsets[-1])), offsets

    def first_token_from(self, text: str, char: int) -> int:
        """Index of the first token of a reply that starts at or after a character offset."""
        self.tokenizer.encode_special_tokens = True
        starts = [start for start, _ in self.tokenizer.encode(text, add_special_tokens=False).offsets]
        return int(np.searchsorted(np.asarray(starts, np.int64), char))


class Encoder:
    """Encodes rows of pieces. `load` before the fork, `encode` after it: nothing here starts a thread before."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        inner = reference.tokenizer
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)
        self.control_tokens = tuple(t.content for t in inner.get_added_tokens_decoder().values() if t.special)

    @classmethod
    def load(cls, tokenizer_dir: Path, batch_bytes: int = 8 << 20) -> Encoder:
        """Loads tokenizer_dir/tokenizer.json. batch_bytes: how much input there is in all, to choose the engine.

        Raises JobError(CONFIG) where the file is absent or unreadable.
        """
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork; one worker is one core
        path = tokenizer_dir / "tokenizer.json"
        if not path.is_file():
            raise JobError(Exit.CONFIG, f"{path} does not exist", "the model directory needs a tokenizer.json")
        try:
            return cls(Reference(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise JobError(Exit.CONFIG, f"{path} cannot be read as a tokenizer: {error}") from error

    def encode(self, rows: Sequence[TextRow]) -> Encoded:
        """Encodes rows; see Encoded. A row whose given ids are foreign to this tokenizer is in `rejects`."""
        rejects: dict[int, Reject] = {}
        texts: dict[int, list[str]] = {PROMPT: [], REPLY: []}
        plan: list[tuple[int, Piece]] = []
        for number, row in enumerate(rows):
            reject = next((r for p in row.pieces if p.kind == IDS and (r := self._foreign(p))), None)
            if reject:
                rejects[number] = reject
                continue
            for piece in row.pieces:
                if piece.kind in texts:
                    texts[piece.kind].append(piece.text)
                plan.append((number, piece))
        flat = {kind: self.reference.encode(texts[kind], kind == REPLY) for kind in texts}
        taken = {PROMPT: 0, REPLY: 0}
        parts: list[Ids] = []
        masks: list[NDArray[np.int8]] = []
        lengths = np.zeros(len(rows) + 1, np.int64)
        for number, piece in plan:
            if piece.kind in taken:
                ids, offsets = flat[piece.kind]
                at = taken[piece.kind]
                taken[piece.kind] += 1
                part = ids[offsets[at] : offsets[at + 1]]
            else:
                part = np.asarray(piece.ids, np.int32)
            mask = np.full(len(part), piece.loss, np.int8)
            if piece.loss and piece.loss_from:
                mask[: self.reference.first_token_from(piece.text, piece.loss_from)] = 0
            parts.append(part)
            masks.append(mask)
            lengths[number + 1] += len(part)
        empty_ids, empty_mask = np.zeros(0, np.int32), np.zeros(0, np.int8)
        controls = sum(self.count_control(text) for text in texts[REPLY])
        return Encoded(
            np.concatenate([empty_ids, *parts]),
            np.cumsum(lengths),
            np.concatenate([empty_mask, *masks]),
            rejects,
            controls,
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return str(self.reference.tokenizer.decode(list(ids), skip_special_tokens=False))

    def count_control(self, text: str) -> int:
        """How many literals of special added tokens are in a text (message content, not a rendered prompt)."""
        return sum(text.count(token) for token in self.control_tokens)

    def _foreign(self, piece: Piece) -> Reject | None:
        """Why the ids of an IDS piece cannot be this tokenizer's."""
        ids = piece.ids or []
        bad = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if bad is not None:
            return Reject("foreign_token_ids", f"id {bad} is outside the vocabulary of {self.vocab_size}")
        if piece.text and self.decode(ids) not in (piece.text, unicodedata.normalize("NFC", piece.text)):
            return Reject("foreign_token_ids", "the ids do not decode to the text of the row")
        return None
