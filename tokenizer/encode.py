"""Pieces of rows in, token ids and loss mask out: exact first, fast second.

What is exact is defined with one Hugging Face `tokenizers.Tokenizer`. Every piece is encoded apart and the ids are
joined: a PROMPT piece as a server encodes the rendered template (no tokens added by a post-processor, all added tokens
recognised), a REPLY piece with special added tokens as ordinary text, since a server strips real ones from what it
returns; added tokens that are not special (`<think>`, `<tool_call>`) are their ids there too. Tokenizers that write a
space in front of a text (SentencePiece) do so only where a server's would: at the start of a prompt and, if they are
made so, behind a control token in it; never in front of a reply, which goes on from its prompt.

All texts of a call are one flat batch of a fast engine; Python runs per piece, never per token. The first rows after a
load are encoded by the definition as well, and a difference ends the pod.
"""

from __future__ import annotations

import itertools
import mmap
import os
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenizer import engines
from tokenizer.engines import Engine, Fast, Ids, Offsets, Reference
from tokenizer.job import Exit, JobError, Reject
from tokenizer.pieces import BARE, IDS, REPLY, Piece, TextRow, holds_text, same_text

SMALL_INPUT = 12 << 20  # bytes up to which the whole fast vocabulary is not worth its load
PRUNE_FROM = 1 << 20  # characters of one call from which a pruned vocabulary is worth its load
PATIENCE = 3.0  # CPU seconds that a small input may cost before the whole fast vocabulary is loaded after all
REFERENCE_SPEED = 2e6  # characters a CPU second
PRUNED_LOAD = 0.7  # CPU seconds
CHECK_ROWS, CHECK_CHARS = 16, 32 << 10  # what is encoded twice after a load


class Encoded(NamedTuple):
    """The rows of one `Encoder.encode` call, flat.

    ids: int32 [tokens]. offsets: int64 [rows + 1]; row i is ids[offsets[i]:offsets[i + 1]]. mask: int8 [tokens], 1 for
    a learnt token. rejects: row -> why; such a row is an empty slice. control_literals: literals of special added
    tokens in reply texts, which became ordinary text.
    """

    ids: Ids
    offsets: Offsets
    mask: NDArray[np.int8]
    rejects: dict[int, Reject]
    control_literals: int


class Encoder:
    """Encodes rows of pieces with the tokenizer of one directory; `load` it once and fork as you like after that."""

    def __init__(self, path: Path, small: bool) -> None:
        self.path = path
        self.fast: Fast | None = None  # with the whole vocabulary
        self.unproven: str | None = None  # why the reference is used for everything
        self._lengths: NDArray[np.int32] | None = None  # bytes per token, known once a fast engine was
        self._nfc = False
        self._spent = 0.0
        self._check = mmap.mmap(-1, 5)  # shared with forks: pid of the one that makes the check, 1 once it is made
        if not small:
            self._load_fast()
        self.control_tokens: tuple[str, ...]
        if self.fast is None:
            self.vocab_size, self.control_tokens = self.reference.rows, self.reference.control_tokens
        # cheap gates in front of the regular expression: no control token without its first characters
        self._gates = [sorted({token[:length] for token in self.control_tokens}) for length in (1, 2)]
        self._controls = engines.alternation(self.control_tokens)

    @classmethod
    def load(cls, tokenizer_dir: Path, input_bytes: int = 1 << 40) -> Encoder:
        """Loads tokenizer_dir/tokenizer.json. input_bytes: all input of this process and its forks; a small one is
        encoded without loading the whole fast vocabulary, which takes about two CPU seconds.

        Raises JobError(CONFIG) where the file is absent or unreadable.
        """
        engines.single_threaded()
        path = tokenizer_dir / "tokenizer.json"
        if not path.is_file():
            raise JobError(Exit.CONFIG, f"{path} does not exist", "the model directory needs a tokenizer.json")
        return cls(path, input_bytes <= SMALL_INPUT)

    @property
    def engine(self) -> str:
        """Name of the engine in use, for the statistics of a run."""
        return "tokenizers" if self.fast is None else "fastokens"

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.path)

    def encode(self, rows: Sequence[TextRow]) -> Encoded:
        """Encodes rows; see Encoded. JobError(SELF_CHECK) where the fast engine differs from `tokenizers`."""
        rejects: dict[int, Reject] = {}
        pieces: list[Piece] = []
        counts = np.zeros(len(rows) + 1, np.int64)  # pieces up to each row
        for number, row in enumerate(rows):
            given = [piece for piece in row.pieces if piece.kind in (IDS, BARE)]
            reject = next(filter(None, map(self._foreign, given)), None) if given else None
            if reject:
                rejects[number] = reject
            else:
                pieces += row.pieces
            counts[number + 1] = len(pieces)
        plain: list[str] = []
        split: list[str] = []  # replies with the literal of a control token in them
        literals = 0
        where: list[list[str] | None] = []
        for piece in pieces:
            target = None
            if piece.ids is None:
                target = plain
                if piece.kind == REPLY and all(any(gate in piece.text for gate in gates) for gates in self._gates):
                    found = self.count_control(piece.text)
                    literals += found
                    target = split if found else plain
                target.append(piece.text)
            where.append(target)
        if self.fast is None and self.reference.in_context:
            engine: Engine = self.reference
            bounds = itertools.pairwise(counts.tolist())
            parts = [np.asarray(ids, np.int32) for a, b in bounds for ids in self._in_context(pieces[a:b])]
        else:
            engine = self._engine(plain, split)
            flat = {id(texts): _slices(*engine.encode(texts, texts is split)) for texts in (plain, split)}
            parts = [
                np.asarray(piece.ids, np.int32) if target is None else next(flat[id(target)])
                for piece, target in zip(pieces, where, strict=True)
            ]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        mask = np.repeat(np.fromiter((piece.loss for piece in pieces), np.int8, len(pieces)), lengths)
        for number, piece in enumerate(pieces):
            if piece.loss_from and piece.loss:
                start = int(ends[number])
                mask[start : start + self._first_learnt(piece, parts[number])] = 0
        ids = np.concatenate([np.zeros(0, np.int32), *parts])
        encoded = Encoded(ids, ends[counts], mask, rejects, literals)
        if not isinstance(engine, Reference) and rows and self._claims_check():
            self._cross_check(rows, encoded)
            self._check[4] = 1
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return (self.fast or self.reference).decode(ids)

    def count_control(self, text: str) -> int:
        """How many literals of special added tokens are in a text (message content, not a rendered prompt)."""
        return sum(1 for _ in self._controls.finditer(text))

    def _in_context(self, pieces: Sequence[Piece]) -> Iterator[list[int]]:
        """The ids of each piece of one row, for a tokenizer that looks at what stands before a text."""
        reference = self.reference
        before: str | None = None  # a control token, empty for other text, None at the start of the row
        for piece in pieces:
            if piece.ids is not None:
                yield piece.ids
                before = reference.control_token(piece.ids[-1]) if piece.ids else before
                continue
            if piece.kind == REPLY:
                yield reference.ids_of_reply(piece.text)
            else:
                yield reference.ids(piece.text, False) if before is None else reference.ids_behind(piece.text, before)
            before = "" if piece.text else before

    def _load_fast(self) -> None:
        """Loads the whole fast vocabulary if the layout is proven; sets what else is known from the file."""
        raw, data = self._read()
        if self.unproven is None and self._lengths is not None:
            self.vocab_size = len(self._lengths)
            self.control_tokens = tuple(t["content"] for t in data.get("added_tokens") or [] if t["special"])
            data.clear()  # 100 MB that the engine is about to need as well
            self.fast = Fast(raw.decode())

    def _read(self) -> tuple[bytes, dict[str, Any]]:
        """tokenizer.json raw and parsed; sets what is known of its layout."""
        try:
            raw = self.path.read_bytes()
            data = engines.parse(raw)
            self.unproven = engines.unproven(data)
            if self.unproven is None:
                self._lengths = engines.byte_lengths(data)
                self._nfc = data.get("normalizer") is not None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise JobError(Exit.CONFIG, f"{self.path} cannot be read as a tokenizer: {error}") from error
        return raw, data

    def _engine(self, *batches: Sequence[str]) -> Engine:
        """The cheapest engine for these texts."""
        if self.fast is not None:
            return self.fast
        if self.unproven is not None:
            return self.reference
        texts = [text for batch in batches for text in batch]
        size = sum(map(len, texts))
        prune = size >= PRUNE_FROM and all(map(_is_nfc, texts))
        self._spent += PRUNED_LOAD if prune else size / REFERENCE_SPEED
        if self._spent > PATIENCE:  # many calls with little each: as dear as one load
            self._load_fast()
            return self.fast or self.reference
        if not prune:
            return self.reference
        _, data = self._read()
        return self.reference if self.unproven is not None else engines.pruned(data, texts)

    def _claims_check(self) -> bool:
        """Whether this process is to make the check: it is not made, and no living process is at it."""
        owner = int.from_bytes(self._check[:4], "little")
        if self._check[4] or (owner not in (0, os.getpid()) and _alive(owner)):
            return False
        self._check[:4] = os.getpid().to_bytes(4, "little")
        return True

    def _cross_check(self, rows: Sequence[TextRow], encoded: Encoded) -> None:
        """Encodes the first rows by the definition; JobError(SELF_CHECK) where that differs."""
        size = 0
        for number, row in enumerate(rows[:CHECK_ROWS]):
            start, end = int(encoded.offsets[number]), int(encoded.offsets[number + 1])
            if number in encoded.rejects:
                continue
            expected: list[int] = []
            for piece in row.pieces:
                size += len(piece.text)
                expected += piece.ids if piece.ids is not None else self.reference.ids(piece.text, piece.kind == REPLY)
            if expected != encoded.ids[start:end].tolist():
                raise JobError(
                    Exit.SELF_CHECK,
                    f"row {number} of the first batch: the fast encoding with {self.path} differs from `tokenizers`",
                    "do not use the output; report the versions of fastokens and tokenizers",
                )
            if size > CHECK_CHARS:
                break

    def _first_learnt(self, piece: Piece, ids: Ids) -> int:
        """Index of the first token of a piece that starts at or after its `loss_from`."""
        text, char = piece.text, piece.loss_from
        if piece.kind == IDS:
            return self._first_given(text[:char], ids)
        if self._lengths is None or (self._nfc and not _is_nfc(text)):
            return self.reference.first_token_from(text, char)
        ends = np.cumsum(self._lengths[ids])
        return int(np.searchsorted(ends[:-1], len(text[:char].encode()))) + 1

    def _first_given(self, head: str, ids: Ids) -> int:
        """The same for given ids, whose text equals the row's but for white space: `head` is not learnt."""
        wanted = len("".join(head.split()))
        low, high = 0, len(ids)
        while low < high:  # the least number of tokens that hold all visible characters of the head
            middle = (low + high) // 2
            if len("".join(self.decode(ids[:middle].tolist()).split())) < wanted:
                low = middle + 1
            else:
                high = middle
        while low < len(ids) and self.decode(ids[low : low + 1].tolist())[:1].isspace():
            low += 1
        return low

    def _foreign(self, piece: Piece) -> Reject | None:
        """Why the ids of an IDS or BARE piece cannot be this tokenizer's."""
        ids = piece.ids or []
        bad = next((i for i in (min(ids, default=0), max(ids, default=0)) if not 0 <= i < self.vocab_size), None)
        if bad is not None:
            return Reject("foreign_token_ids", f"id {bad} is outside the vocabulary of {self.vocab_size}")
        if piece.text:
            decoded = self.decode(ids)
            agree = holds_text if piece.kind == BARE else same_text
            if not agree(decoded, piece.text) and not agree(decoded, unicodedata.normalize("NFC", piece.text)):
                what = "prompt" if not piece.loss else "reply"
                return Reject("foreign_token_ids", f"the ids do not decode to the text of the row ({what})")
        return None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # gone, or its number is another user's by now
        return False
    return True


def _is_nfc(text: str) -> bool:
    return text.isascii() or unicodedata.is_normalized("NFC", text)


def _slices(ids: Ids, offsets: Offsets) -> Iterator[Ids]:
    bounds = offsets.tolist()
    return (ids[a:b] for a, b in itertools.pairwise(bounds))
