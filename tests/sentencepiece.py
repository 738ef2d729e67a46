"""Small tokenizers of the SentencePiece kind, as Llama 2, Mistral and Phi-3 have them: merges over characters, bytes for
what is unknown, and a space written in front of texts in one of three ways.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from vocab import cached

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
WORDS = (
    "A reply goes on from its prompt, so what stands in front of it is never written a second time. Some models begin "
    "with a word that has its space, others with a line of its own; the answer is there, then the answer is over. "
)
#: "prepend": a normalizer, in front of every section; "always" and "first": a Metaspace pre-tokenizer.
FORMS = ("prepend", "always", "first")

TEMPLATES = {
    # the template writes a space around each reply
    "llama2": (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
        "{% elif m['role'] == 'assistant' %}{{ ' '  + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    # text behind the end token
    "zephyr": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
    # control tokens that take the white space behind them
    "phi3": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
}
END = {"llama2": "</s>", "zephyr": "</s>", "phi3": "<|end|>"}


def sentencepiece_dir(form: str, template: str) -> Path:
    """A model directory."""

    def build(directory: Path) -> None:
        data = _tokenizer(form)
        if template == "phi3":
            for name in ("<|user|>", "<|assistant|>", "<|end|>"):
                data["added_tokens"].append(_added(_rows(data), name) | {"rstrip": True})
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (directory / "tokenizer.json").write_text(json.dumps(data))
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        (directory / "chat_template.jinja").write_text(TEMPLATES[template])

    return cached(f"sentencepiece-{form}-{template}-2", build)


def _added(number: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": True}


def _rows(data: dict[str, Any]) -> int:
    return max(len(data["model"]["vocab"]), *(token["id"] + 1 for token in data["added_tokens"]))


def _tokenizer(form: str) -> dict[str, Any]:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, special_tokens=["\n"])
    text = ["a   b    c", "    return x", "[INST] user [/INST]", "the other one, the end (the), bathe"] * 40 + [WORDS]
    trained.train_from_iterator(text, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = [
        "<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)),
        *(t for t in model["vocab"] if "\n" not in t), SPACE * 2,
    ]  # fmt: skip
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]] + [[SPACE, SPACE]]
    prepend = [{"type": "Prepend", "prepend": SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": form, "split": False}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "version": "1.0",
        "added_tokens": [_added(number, token) for number, token in enumerate(("<unk>", "<s>", "</s>"))],
        "normalizer": {"type": "Sequence", "normalizers": prepend} if form == "prepend" else None,
        "pre_tokenizer": None if form == "prepend" else metaspace,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocab, "merges": merges,
        },
    }  # fmt: skip


class Plain:
    """The same tokenizer without anything around it: merges by rank over one text, written out."""

    def __init__(self, directory: Path) -> None:
        model = json.loads((directory / "tokenizer.json").read_text())["model"]
        self.vocab: dict[str, int] = model["vocab"]
        self.ranks = {(a, b): rank for rank, (a, b) in enumerate(model["merges"])}
        self.tokens = {number: token for token, number in self.vocab.items()}

    def ids(self, text: str) -> list[int]:
        parts: list[str] = []
        for char in text.replace(" ", SPACE):
            parts += [char] if char in self.vocab else [f"<0x{byte:02X}>" for byte in char.encode()]
        while True:
            pairs = [(self.ranks[pair], at) for at, pair in enumerate(itertools.pairwise(parts)) if pair in self.ranks]
            if not pairs:
                return [self.vocab[part] for part in parts]
            at = min(pairs)[1]
            parts[at : at + 2] = ["".join(parts[at : at + 2])]

    def text(self, ids: list[int]) -> str:
        """What the ids say in the middle of a text: nothing is stripped."""
        data = b""
        for number in ids:
            token = self.tokens[number]
            byte = token.startswith("<0x") and len(token) == 6
            data += bytes([int(token[3:5], 16)]) if byte else token.replace(SPACE, " ").encode()
        return data.decode()
