"""A model that no row could be made with is refused before anything is written, by the name of its file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import ctl
from families import family_dir
from sentencepiece import END, FORMS, sentencepiece_dir
from vocab import tiny_dir

from tokenizer.check import check
from tokenizer.job import JobError

ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a reply of some words, " * 9}]}


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "tokenizer.json"
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return edit


def holds(name: str, text: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).write_text(text)

    return edit


def template(text: str) -> Callable[[Path], None]:
    return holds("chat_template.jinja", text)


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (holds("tokenizer.json", '{"a": 1}'), "tokenizer.json"),
    "no JSON": (holds("tokenizer.json", '{"model": {'), "tokenizer.json"),
    "a list": (holds("tokenizer.json", "[]"), "tokenizer.json"),
    "merges of what is no token": (edited(lambda d: d["model"]["merges"].append(["never", "seen"])), "tokenizer.json"),
    "half an added token": (edited(lambda d: d["added_tokens"][0].pop("lstrip")), "tokenizer.json"),
    "without the end token": (edited(lambda d: d.update(added_tokens=[])), "no added token of tokenizer.json"),
    "no Jinja": (template("{% for m in messages %}{{ m.content"), "chat template is no Jinja: line 1"),
    "no such filter": (template("{{ messages | nothing }}"), "no Jinja"),
    "drops replies": (template("{{ messages[0].content }}<|im_end|>"), "does not render what the assistant says"),
    "no template": (without_template, "no chat template"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unusable_model_is_a_preflight(name: str, tmp_path: Path) -> None:
    change, words = REFUSED[name]
    shutil.copytree(tiny_dir(), tmp_path / "model")
    change(tmp_path / "model")
    (tmp_path / "in.jsonl").write_text(json.dumps(ROW) + "\n")
    done = ctl(tmp_path, "tokenize", "in.jsonl", "--out", "./out", "--model", "./model")
    assert done.code == 4, done
    assert words in done.err and "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["qwen36", "qwen3", "chatml", "llama3", "gemma", "channels"])
def test_a_usable_model_is_none(family: str) -> None:
    assert check(family_dir(family), {}) == ""


def test_sentencepiece_is_none_either() -> None:
    assert [check(sentencepiece_dir(form, name), {}) for form in FORMS for name in END] == [""] * 9


def test_a_template_that_wants_what_rows_may_bring_is_a_warning(tmp_path: Path) -> None:
    shutil.copytree(tiny_dir(), tmp_path / "model")
    source = (tmp_path / "model" / "chat_template.jinja").read_text()
    template("{{ strftime_now('%Y') }}" + source)(tmp_path / "model")
    assert "renders no plain conversation" in check(tmp_path / "model", {})
    assert check(tmp_path / "model", {"strftime_now": "2026-01-31"}) == ""


def test_what_a_system_message_is_needed_for(tmp_path: Path) -> None:
    shutil.copytree(tiny_dir(), tmp_path / "model")
    source = (tmp_path / "model" / "chat_template.jinja").read_text()
    template("{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + source)(tmp_path / "model")
    assert check(tmp_path / "model", {}) == ""
    template("plain words")(tmp_path / "model")
    with pytest.raises(JobError, match="does not render"):
        check(tmp_path / "model", {})
