"""Precedence and origins of settings; what is misspelt or mistyped is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflashctl import config
from dflashctl.errors import UsageError


def settings(
    tmp_path: Path, text: str | None, env: dict[str, str] | None = None, **flags: Any
) -> dict[str, config.Value]:
    if text is not None:
        (tmp_path / "dflash.toml").write_text(text)
    sections, file = config.load_file(None, tmp_path)
    return config.resolve("tokenize", flags, env or {}, sections, file)


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    text = '[tokenize]\nout = "file"\nshards = 3\nparallelism = 5\n'
    env = {"DFLASH_TOKENIZE_OUT": "env", "DFLASH_TOKENIZE_SHARDS": "4"}
    values = settings(tmp_path, text, env, out="flag")
    assert values["out"] == config.Value("flag", "--out")
    assert values["shards"] == config.Value(4, "environment DFLASH_TOKENIZE_SHARDS")
    assert values["parallelism"] == config.Value(5, str(tmp_path / "dflash.toml"))
    assert values["min_loss_tokens"] == config.Value(16, "default")


def test_a_false_or_zero_flag_is_given_and_an_empty_list_is_not(tmp_path: Path) -> None:
    values = settings(tmp_path, '[tokenize]\nmin_loss_tokens = 9\ninput = "a"\n', min_loss_tokens=0, input=[])
    assert values["min_loss_tokens"].value == 0
    assert values["input"].value == ["a"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[tokenise]\nout = 'x'\n", ["`[tokenise]`", "did you mean `tokenize`"]),
        ("[tokenize]\nmax_lenght = 3\n", ["`tokenize.max_lenght`", "did you mean `max_length`"]),
        ("bakend = 'local'\n", ["`bakend`", "did you mean `backend`"]),
        ("[tokenize]\nshards = '3'\n", ["`tokenize.shards`", "'3'", "whole number"]),
        ("[tokenize]\nshards = true\n", ["`tokenize.shards`", "whole number"]),
        ("[tokenize]\nmax_reject = 'few'\n", ["`tokenize.max_reject`", "a number"]),
        ("[tokenize]\ninput = [1]\n", ["`tokenize.input`", "list of strings"]),
        ("[tokenize]\ntemplate_kwargs = 'x'\n", ["`tokenize.template_kwargs`", "a table"]),
        ("[tokenize\n", ["not valid TOML"]),
        ("node = 5\n", ["`node`", "[node.NAME]"]),
    ],
)
def test_what_the_file_gets_wrong_is_named(tmp_path: Path, text: str, names: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        settings(tmp_path, text)
    assert all(name in f"{caught.value.message} {caught.value.hint}" for name in [str(tmp_path), *names])


@pytest.mark.parametrize(
    ("name", "text"),
    [("SHARDS", "many"), ("MAX_REJECT", "x"), ("PRESERVE_THINKING", "perhaps"), ("TEMPLATE_KWARGS", "[1]")],
)
def test_a_variable_of_the_wrong_type_is_named(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"DFLASH_TOKENIZE_{name}"):
        settings(tmp_path, None, {f"DFLASH_TOKENIZE_{name}": text})


def test_variables_have_the_types_of_the_file(tmp_path: Path) -> None:
    env = {
        "DFLASH_TOKENIZE_INPUT": "a b",
        "DFLASH_TOKENIZE_PRESERVE_THINKING": "true",
        "DFLASH_TOKENIZE_TEMPLATE_KWARGS": '{"enable_thinking": false}',
        "DFLASH_TOKENIZE_MAX_REJECT": "0.5",
    }
    values = settings(tmp_path, None, env)
    assert values["input"].value == ["a", "b"]
    assert values["preserve_thinking"].value is True
    assert values["template_kwargs"].value == {"enable_thinking": False}
    assert values["max_reject"].value == 0.5


def test_a_named_file_must_exist_and_the_default_need_not(tmp_path: Path) -> None:
    assert config.load_file(None, tmp_path) == ({}, "")
    with pytest.raises(UsageError, match="does not exist"):
        config.load_file(tmp_path / "other.toml", tmp_path)


def test_the_example_is_valid_as_it_stands(root: Path, tmp_path: Path) -> None:
    values = settings(tmp_path, (root / "dflash.example.toml").read_text())
    assert values["input"].value and values["out"].value and values["model"].value


def test_variables_that_nothing_reads_are_found() -> None:
    env = {"DFLASH_TOKENIZE_OUTT": "x", "DFLASH_TOKENIZE_OUT": "x", "DFLASH_CONFIG": "x", "HOME": "x"}
    assert config.unknown_variables(env) == ["DFLASH_TOKENIZE_OUTT"]
