"""The encoder equals `tokenizers` wherever it is fast, and says so where it does not."""

from __future__ import annotations

import itertools
import json
import random
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import fuzz
import numpy as np
import pytest
from tokenizers import Tokenizer
from vocab import qwen36_dir, tiny_dir

from tokenizer import encode, engines
from tokenizer.encode import Encoder
from tokenizer.job import Exit, JobError
from tokenizer.pieces import BARE, END, IDS, PROMPT, REPLY, Piece, TextRow

WORDS = [
    "return",
    "def f(x):\n    ",
    "the",
    " model",
    "\n\n",
    "模型",
    "训练数据",
    "naïve",
    "      ",
    "x = 1\r\n",
    "ﬁ",
    "Ω",
]
SMALL_VOCABULARY = 30_000  # the first tokens of the real one: large enough for every kind of merge, loads at once


def row(*pieces: Piece) -> TextRow:
    return TextRow(0, list(pieces), [], None)


def prompt(text: str) -> Piece:
    return Piece(text, None, PROMPT, False)


def reply(text: str, loss_from: int = 0) -> Piece:
    return Piece(text, None, REPLY, True, loss_from)


def given(ids: list[int], text: str = "", loss_from: int = 0) -> Piece:
    return Piece(text, ids, IDS, True, loss_from)


@cache
def whole() -> Encoder:
    """The real vocabulary, fast."""
    return Encoder.load(qwen36_dir())


@cache
def definition() -> Tokenizer:
    return Tokenizer.from_file(str(qwen36_dir() / "tokenizer.json"))


def defined_ids(text: str, kind: int) -> list[int]:
    tokenizer = definition()
    tokenizer.encode_special_tokens = kind == REPLY
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def texts(encoder: Encoder, encoded: encode.Encoded) -> list[str]:
    """The learnt text of each row."""
    bounds = encoded.offsets.tolist()
    return [encoder.decode(encoded.ids[a:b][encoded.mask[a:b] == 1].tolist()) for a, b in itertools.pairwise(bounds)]


@cache
def small_json() -> dict[str, Any]:
    """The real tokenizer.json with its first tokens alone."""
    data = engines.parse((qwen36_dir() / "tokenizer.json").read_bytes())
    model = data["model"]
    vocab = {token: number for token, number in model["vocab"].items() if number < SMALL_VOCABULARY}
    merges = [pair for pair in model["merges"] if pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab]
    for number, token in enumerate(data["added_tokens"], SMALL_VOCABULARY):
        token["id"] = number
    return {**data, "model": {**model, "vocab": vocab, "merges": merges}}


def fuzzed(count: int, seed: int) -> list[str]:
    return fuzz.strings(count, [token["content"] for token in small_json()["added_tokens"]], WORDS, seed)


def splits() -> list[Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    steps = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in sorted(engines.SPLITS)
    ]
    return [{"type": "Sequence", "pretokenizers": [step, level]} for step in steps] + [{**level, "use_regex": True}]


# what exact means


def test_a_control_token_is_its_id_in_a_prompt_and_text_in_a_reply() -> None:
    encoded = whole().encode([row(prompt("<|im_end|>")), row(reply("say <|im_end|> </think>")), row(reply("plain"))])
    ids = [encoded.ids[a:b].tolist() for a, b in zip(encoded.offsets, encoded.offsets[1:], strict=False)]
    end, closing = whole().reference.tokenizer.token_to_id("<|im_end|>"), definition().token_to_id("</think>")
    assert ids[0] == [end]
    assert end not in ids[1] and ids[1][-1] == closing
    assert encoded.control_literals == 1
    assert texts(whole(), encoded) == ["", "say <|im_end|> </think>", "plain"]


def test_pieces_are_encoded_apart_and_joined() -> None:
    parts = row(prompt("<think>\n"), reply("\nyes"), Piece("<|im_end|>", [248046], END, True))
    encoded = whole().encode([row(prompt("a")), parts])
    joined = defined_ids("<think>\n", PROMPT) + defined_ids("\nyes", REPLY) + [248046]
    assert encoded.ids.tolist() == defined_ids("a", PROMPT) + joined
    assert encoded.ids.tolist()[1:] != defined_ids(
        "<think>\n\nyes<|im_end|>", PROMPT
    )  # the whole merges over the border
    assert encoded.mask.tolist() == [0, 0, 0, 1, 1, 1]
    assert encoded.offsets.tolist() == [0, 1, 6]
    assert (encoded.ids.dtype, encoded.offsets.dtype, encoded.mask.dtype) == (np.int32, np.int64, np.int8)


def test_no_rows_and_empty_rows() -> None:
    assert whole().encode([]).offsets.tolist() == [0]
    encoded = whole().encode([row(), row(prompt("")), row(reply("x"))])
    assert encoded.offsets.tolist() == [0, 0, 0, 1]


def test_nothing_stored_in_the_file_adds_or_cuts_tokens(tmp_path: Path) -> None:
    data = json.loads((tiny_dir() / "tokenizer.json").read_text())
    start = data["added_tokens"][0]
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "S", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"S": {"id": "S", "ids": [start["id"]], "tokens": [start["content"]]}},
    }
    data["truncation"] = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    plain = Encoder.load(tiny_dir()).encode([row(prompt("one two three"))])
    for size in (0, 1 << 40):
        assert Encoder.load(tmp_path, size).encode([row(prompt("one two three"))]).ids.tolist() == plain.ids.tolist()


# the fast engines


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
@pytest.mark.parametrize("split", range(len(engines.SPLITS) + 1))
def test_every_proven_layout_equals_the_definition(split: int, normalizer: Any, ignore_merges: bool) -> None:
    data = small_json() | {"pre_tokenizer": splits()[split], "normalizer": normalizer}
    data["model"] = data["model"] | {"ignore_merges": ignore_merges}
    assert engines.unproven(data) is None
    text = json.dumps(data)
    reference, fast = Tokenizer.from_str(text), engines.Fast(text)
    samples = fuzzed(1500, split)
    for special in (False, True):
        reference.encode_special_tokens = special
        expected = [e.ids for e in reference.encode_batch(samples, add_special_tokens=False)]
        ids, offsets = fast.encode(samples, special)
        for number, sample in enumerate(samples):
            assert ids[offsets[number] : offsets[number + 1]].tolist() == expected[number], repr(sample)
    assert [fast.decode(ids) for ids in expected] == [reference.decode(i, skip_special_tokens=False) for i in expected]


def test_the_real_vocabulary_equals_the_definition() -> None:
    samples = fuzzed(4000, 11)
    encoded = whole().encode([row(piece(sample)) for sample in samples for piece in (prompt, reply)])
    for number, sample in enumerate(samples):
        for kind in (PROMPT, REPLY):
            a, b = encoded.offsets[2 * number + kind : 2 * number + kind + 2]
            assert encoded.ids[a:b].tolist() == defined_ids(sample, kind), repr(sample)


def test_a_pruned_vocabulary_equals_the_whole_one() -> None:
    raw = (qwen36_dir() / "tokenizer.json").read_bytes()
    for seed in range(3):
        samples = [s for s in fuzzed(300, seed) if unicodedata.is_normalized("NFC", s)]
        fast = engines.pruned(engines.parse(raw), samples)
        assert fast.real_ids is not None and len(fast.real_ids) < 60_000
        for special in (False, True):
            expected = whole().fast
            assert expected is not None
            for got, want in zip(fast.encode(samples, special), expected.encode(samples, special), strict=True):
                assert np.array_equal(got, want)


def test_small_and_large_inputs_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(prompt("<|im_start|>" + s), reply(s, min(3, len(s)))) for s in fuzzed(300, 5)]
    rows += [row(reply(unicodedata.normalize("NFC", s), 1)) for s in fuzzed(300, 6)]
    nfc = [r for r in rows if all(unicodedata.is_normalized("NFC", p.text) for p in r.pieces)]
    small = Encoder.load(qwen36_dir(), 1000)
    for size, batch in ((1 << 20, rows), (1, nfc), (1, rows)):  # by the reference, pruned, refused by NFD
        monkeypatch.setattr(encode, "PRUNE_FROM", size)
        got, want = small.encode(batch), whole().encode(batch)
        assert all(np.array_equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))
        assert got[3:] == want[3:]
        assert small.fast is None
    monkeypatch.setattr(encode, "PATIENCE", 0.0)
    assert np.array_equal(small.encode(rows).ids, whole().encode(rows).ids)
    assert small.fast is not None and small.engine == "fastokens"


def changed(**fields: Any) -> dict[str, Any]:
    return small_json() | fields


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (changed(normalizer={"type": "NFKC"}), "normalizer"),
        (changed(normalizer={"type": "Sequence", "normalizers": []}), "normalizer"),
        (changed(pre_tokenizer=None), "pre-tokenizer"),
        (changed(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}), "pre-tokenizer"),
        (changed(model=small_json()["model"] | {"dropout": 0.1}), "dropout"),
        (changed(model=small_json()["model"] | {"byte_fallback": True}), "byte_fallback"),
        (changed(model=small_json()["model"] | {"type": "Unigram"}), "Unigram"),
        (changed(model=small_json()["model"] | {"vocab": {"a": 0}}), "byte-level"),
        (changed(padding={"strategy": "BatchLongest"}), "padding"),
        (changed(added_tokens=[small_json()["added_tokens"][0] | {"lstrip": True}]), "flags"),
        (changed(added_tokens=[small_json()["added_tokens"][0] | {"normalized": True}]), "flags"),
        (changed(added_tokens=[{"id": 7, "content": "!", "special": True}]), "two ids"),
    ],
)
def test_any_other_layout_is_left_to_the_definition(data: dict[str, Any], why: str) -> None:
    assert why in (engines.unproven(data) or "")


def test_an_unproven_tokenizer_is_encoded_by_the_definition(tmp_path: Path) -> None:
    data = json.loads((tiny_dir() / "tokenizer.json").read_text()) | {"normalizer": {"type": "Lowercase"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    encoder = Encoder.load(tmp_path)
    assert encoder.engine == "tokenizers" and encoder.unproven
    assert texts(encoder, encoder.encode([row(reply("THE <|im_end|>"))])) == ["the <|im_end|>"]


def test_a_difference_ends_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder.load(tiny_dir())
    right = engines.Fast.encode

    def wrong(self: engines.Fast, texts: list[str], split_special: bool) -> Any:
        ids, offsets = right(self, texts, split_special)
        return np.where(ids == ids.max(initial=-1), 0, ids).astype(np.int32), offsets

    monkeypatch.setattr(engines.Fast, "encode", wrong)
    with pytest.raises(JobError) as caught:
        encoder.encode([row(prompt("same")), row(reply("the other"))])
    assert caught.value.code == Exit.SELF_CHECK and "row 1" in caught.value.message


def test_unreadable_directories_say_so(tmp_path: Path) -> None:
    for content in (None, b"", b"{", b"[]", b"{}", b'{"model": {"type": "BPE"}}', b"\xff"):
        if content is not None:
            (tmp_path / "tokenizer.json").write_bytes(content)
        for size in (0, 1 << 40):
            with pytest.raises(JobError) as caught:
                Encoder.load(tmp_path, size)
            assert caught.value.code == Exit.CONFIG and "tokenizer.json" in caught.value.message


# masks and given ids


def test_loss_from_counts_characters_of_the_reply() -> None:
    small = Encoder.load(qwen36_dir(), 0)
    rnd = random.Random(3)
    samples = [(s, rnd.randint(0, len(s))) for s in fuzzed(400, 21)]
    rows = [row(reply(s, at)) for s, at in samples]
    got, want = whole().encode(rows), small.encode(rows)
    assert np.array_equal(got.mask, want.mask) and np.array_equal(got.ids, want.ids)
    definition().encode_special_tokens = True
    for number, (text, at) in enumerate(samples):
        starts = [start for start, _ in definition().encode(text, add_special_tokens=False).offsets]
        a, b = got.offsets[number : number + 2]
        assert got.mask[a:b].tolist() == [int(start >= at) for start in starts], repr(text)


def test_loss_from_leaves_the_neighbours_alone() -> None:
    text = "think\n</think>\n\nanswer"
    for pieces in ([reply("a"), reply(text, 16), reply("b")], [reply(text, 16), Piece("", [5], END, True)]):
        encoded = whole().encode([row(*pieces)])
        assert texts(whole(), encoded)[0] == "".join(p.text[p.loss_from :] if p.ids is None else "&" for p in pieces)


def test_given_ids_are_used_when_they_agree_with_the_text() -> None:
    text = "Grüße </think>\n\n e\u0301 done"
    ids = defined_ids(text, REPLY)
    encoded = whole().encode([row(given(ids, text)), row(given(ids)), row(given([*ids, 248046], text + "<|im_end|>"))])
    assert not encoded.rejects
    assert encoded.ids.tolist() == ids + ids + [*ids, 248046]


def test_foreign_ids_reject_their_row_alone() -> None:
    rows = [
        row(reply("a")),
        row(prompt("x"), given([9, 248077])),
        row(given([-1])),
        row(given(defined_ids("other words", REPLY), "the text"), reply("b")),
        row(reply("c")),
    ]
    encoded = whole().encode(rows)
    assert sorted(encoded.rejects) == [1, 2, 3]
    assert {reject.reason for reject in encoded.rejects.values()} == {"foreign_token_ids"}

    assert "248077" in encoded.rejects[1].detail
    assert encoded.offsets.tolist() == [0, 1, 1, 1, 1, 2]
    assert texts(whole(), encoded) == ["a", "", "", "", "c"]


def test_ids_of_a_prompt_hold_the_text_that_the_row_shows() -> None:
    """Ids of another vocabulary are in range and decode to something else; a row may show the user's words alone."""
    ids = defined_ids("<|im_start|>user\nWhy cafe\u0301?<|im_end|>\n", PROMPT)
    other = [token + 1 for token in ids]
    rows = [row(Piece("Why cafe\u0301?", got, BARE, False), reply("yes")) for got in (ids, other)]
    assert list(whole().encode(rows).rejects) == [1]


def test_loss_from_in_given_ids_starts_behind_the_white_space() -> None:
    ids = defined_ids("why\n</think>\n\nBecause.", REPLY)
    shown = "why </think> Because."  # white space differs: a parser trimmed it
    encoded = whole().encode([row(given(ids, shown, len("why </think> ")))])
    assert texts(whole(), encoded) == ["Because."]


def test_control_tokens_are_counted_once_each() -> None:
    assert whole().count_control("<|im_start|>user <|im_start|> <|im_end|> <think> <| <tts_text_bos_single>") == 4
    assert Encoder.load(qwen36_dir(), 0).control_tokens == whole().control_tokens
    assert Encoder.load(qwen36_dir(), 0).vocab_size == whole().vocab_size == 248077
