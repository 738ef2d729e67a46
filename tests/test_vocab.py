"""The vocabulary that all exactness tests rest on is the real one."""

from __future__ import annotations

import hashlib
import json

from vocab import qwen36_dir, smollm2_dir, tiny_dir

# of the vocabulary by id and the merges, as compact JSON
QWEN36_MODEL = "30ad820c65ffd5e596bc304add89bd51c247abd5bb27366c5cabe15ee2a89898"
QWEN36_TEMPLATE = "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259"


def test_qwen36_is_the_known_vocabulary_and_template() -> None:
    directory = qwen36_dir()
    data = json.loads((directory / "tokenizer.json").read_bytes())
    model = data["model"]
    assert (len(model["vocab"]), len(model["merges"]), len(data["added_tokens"])) == (248044, 247587, 33)
    by_id = sorted(model["vocab"].items(), key=lambda item: item[1])
    text = json.dumps([by_id, model["merges"]], separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == QWEN36_MODEL
    assert hashlib.sha256((directory / "chat_template.jinja").read_bytes()).hexdigest() == QWEN36_TEMPLATE
    ordinary = {token["content"] for token in data["added_tokens"] if not token["special"]}
    assert {"<think>", "</think>", "<tool_call>", "</tool_response>"} < ordinary
    assert not {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} & ordinary


def test_building_again_leaves_the_directory_alone() -> None:
    before = (qwen36_dir() / "tokenizer.json").stat()
    after = (qwen36_dir() / "tokenizer.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_the_other_tokenizers_load_with_their_templates() -> None:
    from tokenizers import Tokenizer

    for directory in (tiny_dir(), smollm2_dir()):
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        ids = tokenizer.encode("<|im_start|>user\nthe thing<|im_end|>", add_special_tokens=False).ids
        assert ids[0] == tokenizer.token_to_id("<|im_start|>") and ids[-1] == tokenizer.token_to_id("<|im_end|>")
        assert "<|im_start|>" in (directory / "chat_template.jinja").read_text()
    assert (smollm2_dir() / "model.safetensors").is_file()
