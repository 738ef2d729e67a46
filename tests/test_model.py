"""Where the tokenizer's files are found, and what is said where they are not."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from vocab import tiny_dir

from dflashctl import model
from dflashctl.errors import PreflightError

TEMPLATE = "{{ messages[0].content }}"


def directory(folder: Path, template: Any = None, **files: str) -> Path:
    """A model directory whose template is in tokenizer_config.json alone, if anywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"eos_token": "<|im_end|>"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    "found",
    [
        {"template": TEMPLATE},
        {"template": [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": "x"}]},
        {"template": [{"name": "only", "template": TEMPLATE}]},
        {"chat_template_DOT_json": json.dumps({"chat_template": TEMPLATE})},
        {"chat_template_DOT_jinja": TEMPLATE, "template": "older"},
        {"additional_chat_templates__default_DOT_jinja": TEMPLATE},
    ],
)
def test_the_template_is_found_where_releases_put_it(tmp_path: Path, found: dict[str, Any]) -> None:
    files = model.resolve_model(str(directory(tmp_path / "m", **found))).files
    assert files["chat_template.jinja"] == TEMPLATE.encode()
    assert set(files) == {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}


def test_what_is_missing_or_unusable_is_named(tmp_path: Path) -> None:
    def said(folder: Path) -> str:
        with pytest.raises(PreflightError) as caught:
            model.resolve_model(str(folder))
        return f"{caught.value.message} {caught.value.hint}"

    assert "no chat template" in said(directory(tmp_path / "a"))
    several = [{"name": "rag", "template": "x"}, {"name": "tools", "template": "y"}]
    assert "rag, tools" in said(directory(tmp_path / "b", several))
    (directory(tmp_path / "c", TEMPLATE) / "tokenizer.json").unlink()
    assert "tokenizer.json" in said(tmp_path / "c") and "save_pretrained" in said(tmp_path / "c")
    (directory(tmp_path / "d", TEMPLATE) / "tokenizer_config.json").unlink()
    assert "tokenizer_config.json" in said(tmp_path / "d")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    assert "LFS" in said(directory(tmp_path / "e", TEMPLATE, tokenizer_DOT_json=pointer))
    assert "not a JSON object" in said(directory(tmp_path / "f", TEMPLATE, tokenizer_DOT_json="[]"))


def test_a_hub_id_is_read_from_the_local_cache_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--org--name"
    shutil.copytree(tiny_dir(), repo / "snapshots" / sha)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(sha)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("org/name", f"org/name@{sha}", "org/name@main"):
        found = model.resolve_model(name)
        assert found.name == f"org/name@{sha}"  # the revision is pinned
        assert found.files["tokenizer.json"] == (tiny_dir() / "tokenizer.json").read_bytes()
    for name in ("org/other", "org/name@v2"):
        with pytest.raises(PreflightError, match="HF_HUB_OFFLINE"):
            model.resolve_model(name)


class Hub(types.ModuleType):
    """Stands for huggingface_hub: what it is asked, and what comes of it."""

    def __init__(self, found: Path | Exception) -> None:
        super().__init__("huggingface_hub")
        self.found, self.asked = found, []

    def snapshot_download(self, repo: str, revision: str, allow_patterns: list[str]) -> str:
        self.asked.append((repo, revision, "tokenizer.json" in allow_patterns))
        if isinstance(self.found, Exception):
            raise self.found
        return str(self.found)


def test_a_hub_is_asked_only_through_its_own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub = Hub(directory(tmp_path / "abc123", TEMPLATE))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert model.resolve_model("org/name@v1").name == "org/name@abc123"
    assert hub.asked == [("org/name", "v1", True)]
    hub.found = OSError("503 from the hub\nand a long story")
    with pytest.raises(PreflightError, match=r"503 from the hub$"):
        model.resolve_model("org/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PreflightError) as caught:
        model.resolve_model("org/name")
    assert "install huggingface_hub" in caught.value.hint


@pytest.mark.parametrize("name", ["./no-such-directory", "/no/such", "~/no-such", "a b", "a/b/c"])
def test_what_cannot_be_a_hub_id_is_a_directory_that_is_not_there(name: str) -> None:
    with pytest.raises(PreflightError, match="is not there"):
        model.resolve_model(name)


@pytest.mark.s3
def test_from_a_prefix(s3: str) -> None:
    from tokenizer.store import open_store

    store = open_store(s3)
    with pytest.raises(PreflightError, match=r"no tokenizer\.json"):
        model.resolve_model(f"{s3}/model")
    for file in tiny_dir().iterdir():
        store.upload_file(file, f"model/{file.name}")
    assert model.resolve_model(f"{s3}/model").files == model.resolve_model(str(tiny_dir())).files
