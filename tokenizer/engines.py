"""The BPE engines behind `encode`: `tokenizers` is exact by definition, `fastokens` is 40 times as fast.

fastokens is used only for layouts of tokenizer.json whose equality with `tokenizers` the tests prove (`unproven` says
why one is not). Its load costs seconds, nearly all of it in proportion to the vocabulary, so for a small input it gets
a smaller one: `pruned` leaves out every token that cannot occur in the texts at hand.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from tokenizer.job import Exit, JobError

Ids = NDArray[np.int32]
Offsets = NDArray[np.int64]

# Split patterns whose scanners in fastokens are proven equal: Qwen3.5/3.6, Qwen2 to Qwen3, Llama 3
_REST = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = frozenset(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?" + body + _REST
    for body in (
        r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+",
        r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+",
        r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+",
    )
)

# byte-level BPE writes a byte as a printable character: itself, or one from U+0100 on
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTER_BYTE = {**{byte: byte for byte in _PRINTABLE}, **{0x100 + i: byte for i, byte in enumerate(_OTHERS)}}

GRAM = 4  # bytes per window when a vocabulary is pruned
GRAM_BITS = 22  # a table of 4 MiB; a collision keeps a token too many, never one too few
_GRAM_FACTOR = np.uint32(2654435761)


class Engine(Protocol):
    """One BPE implementation with one vocabulary."""

    def encode(self, texts: list[str], split_special: bool) -> tuple[Ids, Offsets]:
        """Encodes texts apart: flat ids and offsets [texts + 1]. split_special: special added tokens are plain text."""


def single_threaded() -> None:
    """Keeps both engines to the calling thread, so that a fork after their use is safe: one worker is one core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["FASTOKENS_BPE_THREADS"] = "1"


class Reference:
    """`tokenizers`: slow, and what exact means."""

    def __init__(self, path: Path) -> None:
        import tokenizers  # type: ignore[import-untyped]

        try:
            self.tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise JobError(Exit.CONFIG, f"{path} cannot be read as a tokenizer: {error}") from error
        self.tokenizer.no_truncation()  # as servers do: a limit stored in the file would cut rows in silence
        self.tokenizer.no_padding()
        self.tokenizer.post_processor = None  # adds nothing without add_special_tokens, but may trim offsets
        added = self.tokenizer.get_added_tokens_decoder()
        self.rows: int = max(self.tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.control_tokens: tuple[str, ...] = tuple(token.content for token in added.values() if token.special)
        self._controls = alternation(self.control_tokens)
        self._normalizers = self._steps("normalizer", "normalizers")
        self._pre_tokenizers = self._steps("pre_tokenizer", "pretokenizers")
        # whether the ids of a text depend on what stands before it
        self.in_context: bool = any(
            first is not rest for first, rest in (self._normalizers, self._pre_tokenizers)
        ) or any(token.lstrip or token.rstrip or token.single_word for token in added.values())

    def _steps(self, name: str, many: str) -> tuple[Any, Any]:
        """A component as it stands, and without what writes a space in front of a text; one object if nothing does."""
        own = getattr(self.tokenizer, name)
        config = json.loads(own.__getstate__()) if own is not None else None
        bare = without_prefix(config, many)
        if bare == config:
            return own, own
        empty = {"model": {"type": "BPE", "vocab": {}, "merges": []}, name: bare}
        return own, getattr(type(self.tokenizer).from_str(json.dumps(empty)), name)

    @contextlib.contextmanager
    def _continuing(self) -> Iterator[None]:
        """Within it nothing writes a space in front of a text."""
        (first, rest), (first_cut, rest_cut) = self._normalizers, self._pre_tokenizers
        self.tokenizer.normalizer, self.tokenizer.pre_tokenizer = rest, rest_cut
        try:
            yield
        finally:
            self.tokenizer.normalizer, self.tokenizer.pre_tokenizer = first, first_cut

    def encode(self, texts: list[str], split_special: bool) -> tuple[Ids, Offsets]:
        self.tokenizer.encode_special_tokens = split_special
        parts = [np.asarray(e.ids, np.int32) for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return np.concatenate([np.zeros(0, np.int32), *parts]), offsets

    def ids(self, text: str, split_special: bool) -> list[int]:
        """Ids of one text at the start of a row."""
        self.tokenizer.encode_special_tokens = split_special
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def ids_of_reply(self, text: str) -> list[int]:
        """Ids of a reply: it goes on from the prompt, so a space in front of it is one that the model emitted."""
        with self._continuing():
            return self.ids(text, True)

    def ids_behind(self, text: str, token: str) -> list[int]:
        """Ids of a prompt's text in the middle of a row, behind a control token or (empty) in the middle of a text."""
        if token:
            return self.ids(token + text, False)[1:]
        control = self._controls.search(text)
        head = text[: control.start()] if control else text
        with self._continuing():
            ids = self.ids(head, False)
        return ids + self.ids(text[len(head) :], False)

    def control_token(self, number: int) -> str:
        """The control token of an id; empty where it is another token's."""
        token = self.tokenizer.id_to_token(number)
        return str(token) if token in self.control_tokens else ""

    def first_token_from(self, text: str, char: int) -> int:
        """Index of the first token of a reply that starts at or after a character offset."""
        self.tokenizer.encode_special_tokens = True
        with self._continuing():
            starts = [start for start, _ in self.tokenizer.encode(text, add_special_tokens=False).offsets]
        return int(np.searchsorted(np.asarray(starts, np.int64), char))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


class Fast:
    """fastokens. `real_ids` [rows of its vocabulary] maps the ids of a pruned vocabulary back."""

    def __init__(self, tokenizer_json: str, real_ids: Ids | None = None) -> None:
        from fastokens import Tokenizer

        self.tokenizer: Any = Tokenizer.from_json_str(tokenizer_json)
        self.tokenizer.encode_batch_flat(["a"])  # builds tables, a quarter of a second, that forks can share
        self.real_ids = real_ids

    def encode(self, texts: list[str], split_special: bool) -> tuple[Ids, Offsets]:
        ids, offsets = self.tokenizer.encode_batch_flat(texts, split_special_tokens=split_special)
        flat = np.frombuffer(ids, np.int32)
        return flat if self.real_ids is None else self.real_ids[flat], np.frombuffer(offsets, np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Only with the whole vocabulary."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def without_prefix(config: Any, many: str) -> Any:
    """A normalizer's or pre-tokenizer's JSON without the space that SentencePiece writes in front of a text.

    many: under which key a sequence of it has its steps.
    """
    if not isinstance(config, dict):
        return config
    if config.get("type") == "Sequence":
        steps = [without_prefix(step, many) for step in config[many]]
        return {**config, many: [step for step in steps if step is not None]}
    if config.get("type") == "Prepend":
        return None
    if config.get("type") == "Metaspace":
        return {**config, "prepend_scheme": "never"}
    return {**config, "add_prefix_space": False} if config.get("add_prefix_space") else config


def alternation(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest first; nothing where there is none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def parse(raw: bytes) -> dict[str, Any]:
    """tokenizer.json as a dict. The collector would walk half a million fresh objects again and again: it waits."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        data: dict[str, Any] = orjson.loads(raw)
    finally:
        if enabled:
            gc.enable()
    return data


def unproven(data: dict[str, Any]) -> str | None:
    """Why fastokens is not proven exact for a tokenizer.json; None where it is."""
    model: dict[str, Any] = data.get("model") or {}
    if model.get("type") != "BPE":
        return f"model type {model.get('type')}"
    for field in (
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "fuse_unk",
        "byte_fallback",
    ):
        if model.get(field):
            return f"model.{field} is set"
    vocab: dict[str, int] = model["vocab"]
    if not all(chr(character) in vocab for character in CHARACTER_BYTE):
        return "not byte-level BPE"
    if sorted(vocab.values()) != list(range(len(vocab))):
        return "the ids of the vocabulary have gaps"
    if data.get("normalizer") not in (None, {"type": "NFC"}):
        return "normalizer other than NFC"
    if not _known_split(data.get("pre_tokenizer")):
        return "pre-tokenizer of another kind"
    if data.get("truncation") or data.get("padding"):
        return "truncation or padding is stored"
    for token in data.get("added_tokens") or []:
        if not token["content"] or any(token.get(flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")):
            return f"added token {token['content']!r} has flags"
        if token["id"] != vocab.get(token["content"], token["id"]):
            return f"added token {token['content']!r} has two ids"
    return None


def _known_split(config: Any) -> bool:
    if not isinstance(config, dict):
        return False
    if config.get("type") == "ByteLevel":  # GPT-2's own pattern
        return config.get("use_regex") is True and not config.get("add_prefix_space")
    steps = config.get("pretokenizers") or []
    if config.get("type") != "Sequence" or len(steps) != 2:
        return False
    split, level = steps
    return (
        split.get("type") == "Split"
        and split.get("pattern", {}).get("Regex") in SPLITS
        and (split.get("behavior"), split.get("invert")) == ("Isolated", False)
        and (level.get("type"), level.get("use_regex"), level.get("add_prefix_space")) == ("ByteLevel", False, False)
    )


def byte_lengths(data: dict[str, Any]) -> NDArray[np.int32]:
    """[rows of the vocabulary, added tokens included]: UTF-8 bytes of the text that each token stands for."""
    vocab, added = data["model"]["vocab"], data.get("added_tokens") or []
    lengths = np.zeros(max([len(vocab) - 1, *(token["id"] for token in added)]) + 1, np.int32)
    lengths[np.fromiter(vocab.values(), np.int64, len(vocab))] = np.fromiter(map(len, vocab), np.int32, len(vocab))
    for token in added:
        lengths[token["id"]] = len(token["content"].encode())
    return lengths


def _windows(data: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Hash of every GRAM consecutive bytes, [len(data) - GRAM + 1]."""
    wide = data.astype(np.uint32)
    packed = wide[:-3] | wide[1:-2] << np.uint32(8) | wide[2:-1] << np.uint32(16) | wide[3:] << np.uint32(24)
    hashes: NDArray[np.uint32] = (packed * _GRAM_FACTOR) >> np.uint32(32 - GRAM_BITS)
    return hashes


def pruned(data: dict[str, Any], texts: Sequence[str]) -> Fast:
    """An engine that is exact for these texts alone, from a proven layout, which it uses up.

    A token is left out if four bytes in a row of it occur nowhere in the texts: it is no part of any of them, so no
    merge can make it, and the merges that remain apply in the same order. The texts are NFC already, if the tokenizer
    normalizes; tokens beyond U+FFFF stay, for a later Unicode may compose there what Python's does not.
    """
    text_bytes = np.frombuffer("".join(texts).encode() + bytes(GRAM), np.uint8)
    seen = np.zeros(1 << GRAM_BITS, np.bool_)
    seen[_windows(text_bytes)] = True
    vocab, added = data["model"]["vocab"], data.get("added_tokens") or []
    tokens = list(vocab)
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    vocab_bytes = np.frombuffer("".join(tokens).translate(CHARACTER_BYTE).encode("latin-1"), np.uint8)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    absent = np.zeros(len(vocab_bytes) + 1, np.int64)  # windows before a position that occur in no text
    absent[1 : len(vocab_bytes) - GRAM + 2] = np.cumsum(~seen[_windows(vocab_bytes)])
    keep = absent[np.maximum(ends - GRAM + 1, starts)] == absent[starts]
    keep |= np.maximum.reduceat(vocab_bytes, starts) >= 0xF0
    own = {token["content"] for token in added}
    kept = [token for token, wanted in zip(tokens, keep.tolist(), strict=True) if wanted or token in own]
    ids = {token: number for number, token in enumerate(kept)}
    real_ids = [vocab[token] for token in kept]
    for token in added:
        if token["content"] not in ids:
            real_ids.append(token["id"])
            token["id"] = len(real_ids) - 1
        else:
            token["id"] = ids[token["content"]]
    model = data["model"]
    merges = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
    model |= {"vocab": ids, "merges": [pair for pair in merges if pair[0] + pair[1] in ids]}
    return Fast(orjson.dumps(data).decode(), np.array(real_ids, np.int32))
