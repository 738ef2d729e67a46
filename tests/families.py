"""Model directories of several template families: small tokenizers with each family's control tokens."""

from __future__ import annotations

import json
from pathlib import Path

from vocab import cached, qwen36_dir, tiny_dir

TEMPLATES = Path(__file__).resolve().parent / "templates"

# family -> what its control tokens are called, in place of the tiny tokenizer's three, and further ones
TOKENS = {
    "chatml": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>", "<|end_header_id|>"),
    "gemma": ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    "channels": ("<|bos|>", "<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|next|>", "<|call|>"),
}


def family_dir(family: str) -> Path:
    """A model directory: qwen36 is the real vocabulary and template, the others are tests/templates/FAMILY.jinja."""
    if family == "qwen36":
        return qwen36_dir()
    template = (TEMPLATES / f"{family}.jinja").read_bytes()

    def build(directory: Path) -> None:
        tokenizer = json.loads((tiny_dir() / "tokenizer.json").read_text())
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TOKENS[family][2]}
        added = tokenizer["added_tokens"]
        for entry, name in zip(added, TOKENS[family][:3], strict=False):
            entry["content"] = name
        for name in TOKENS[family][3:]:
            added.append({**added[0], "id": added[-1]["id"] + 1, "content": name})
        if family in ("llama3", "gemma"):  # a post-processor that prepends BOS, which the template has written already
            bos = added[0]
            config["bos_token"] = bos["content"]
            single = [{"SpecialToken": {"id": bos["content"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
            special = {bos["content"]: {"id": bos["content"], "ids": [bos["id"]], "tokens": [bos["content"]]}}
            pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
            tokenizer["post_processor"] = {
                "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special,
            }  # fmt: skip
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        (directory / "chat_template.jinja").write_bytes(template)

    return cached(f"family-{family}-3", build)


def template_of(family: str) -> str:
    return (family_dir(family) / "chat_template.jinja").read_text()
