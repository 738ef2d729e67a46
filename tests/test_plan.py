"""The declaration of a run: what cannot be is refused by the flag's name, names are stable, OUT is asked about."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl import config, plan
from dflashctl.errors import UsageError


def declare(**changes: Any) -> plan.Declaration:
    values = config.resolve("tokenize", {"input": ["in"], "out": "./o/my Data.v2", "model": "m", **changes}, {}, {}, "")
    return plan.declare(values, False, lambda path: False)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("parallelism", 0, "`--parallelism` 0 (--parallelism) is below 1"),
        ("shards", 0, "`--shards` 0"),
        ("workers", 0, "`--workers` 0"),
        ("max_length", 1, "`--max-length` 1"),
        ("min_loss_tokens", -1, "`--min-loss-tokens` -1"),
        ("shards", 10**30, f"`--shards` {10**30} (--shards) is above 100000"),
        ("max_length", 2**31, "is above 2147483647"),
        ("max_reject", 1.5, "`--max-reject` 1.5"),
        ("loss_on", "prompt", "`--loss-on` 'prompt'"),
        ("template_kwargs", {"messages": []}, "may not set `messages`"),
        ("template_kwargs", {"a": float("nan")}, "is no JSON"),
        ("template_kwargs", {"a": "\ud800"}, "is no JSON"),
        ("input", ["gs://b/x"], "scheme `gs`"),
        ("out", "https://b/x", "scheme `https`"),
        ("out", "s3://user:pw@b/x", "OUT has credentials"),
        ("model", "https://pw@b/x", "model has credentials"),
        ("out", "s3:/b/x", "`s3:/b/x` is no S3 URI"),
        ("input", ["s3:b/x"], "`s3:b/x` is no S3 URI"),
        ("out", "", "no OUT"),
        ("model", "", "no model"),
    ],
)
def test_impossible_values_are_refused_by_flag(key: str, value: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        declare(**{key: value})
    assert words in caught.value.message


def test_no_input_is_refused() -> None:
    values = config.resolve("tokenize", {"out": "o", "model": "m"}, {}, {}, "")
    with pytest.raises(UsageError, match="no input"):
        plan.declare(values, False, lambda path: False)


@pytest.mark.parametrize("out", ["bucket/path", "my-bucket/a/b", "b.ucket/x/"])
def test_a_forgotten_scheme_is_asked_about(out: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan.check_out(out, lambda path: False)
    assert f"s3://{out}" in caught.value.hint and f"./{out}" in caught.value.hint


@pytest.mark.parametrize(
    "out", ["data", "./data/x", "../x/y", "/abs/x", "~/x/y", "s3://b/x", "file:///x", "Data/x", "data/"]
)
def test_what_cannot_be_a_bucket_is_a_path(out: str) -> None:
    assert plan.check_out(out, lambda path: False) == out


def test_below_a_directory_that_exists_it_is_a_path() -> None:
    assert plan.check_out("data/x", lambda path: path == "data") == "data/x"


def test_the_run_name_is_of_the_declaration_alone() -> None:
    name = declare().run_name(None)
    assert re.fullmatch(r"tok-my-data-v2-[0-9a-f]{8}", name)
    assert declare(parallelism=7, workers=3, max_reject=0.5).run_name(None) == name  # operational
    for change in (
        {"max_length": 9},
        {"shards": 2},
        {"model": "n"},
        {"input": ["other"]},
        {"out": "./p/my Data.v2"},
        {"loss_on": "response"},
        {"template_kwargs": {"a": 1}},
    ):
        assert declare(**change).run_name(None) != name


def test_the_order_of_inputs_is_no_part_of_the_name() -> None:
    assert declare(input=["a", "b", "a"]).run_name(None) == declare(input=["b", "a"]).run_name(None)


@given(st.text(min_size=1, max_size=60).map(lambda text: "./x/" + text))
def test_every_run_name_is_a_label_of_at_most_40_characters(out: str) -> None:
    name = declare(out=out).run_name(None)
    assert plan.check_name(name) == name


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "a.b", "x" * 41, "tok-x-r2"])
def test_names_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        declare().run_name(name)


def test_jobs_of_a_run_are_numbered() -> None:
    assert plan.job_name("tok-a", []) == "tok-a"
    assert plan.job_name("tok-a", ["tok-a"]) == "tok-a-r2"
    assert plan.job_name("tok-a", ["tok-a", "tok-a-r2", "tok-b-r3"]) == "tok-a-r3"
    assert plan.run_of("tok-a-r12") == "tok-a" == plan.run_of("tok-a")


def test_parallelism_is_clamped_and_said() -> None:
    assert plan.clamp_parallelism(64, 3) == (3, "parallelism 64 is clamped to the 3 shards of this dataset")
    assert plan.clamp_parallelism(3, 3) == (3, "")


@given(st.sets(st.integers(0, 300), min_size=1))
def test_ranges_and_back(indexes: set[int]) -> None:
    assert plan.parse_indexes(plan.ranges(indexes)) == sorted(indexes)


def test_ranges_are_short() -> None:
    assert plan.ranges([5, 0, 2, 1]) == "0-2,5"


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1"])
def test_indexes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--index"):
        plan.parse_indexes(text)


def test_the_spec_carries_every_mask_option_and_nothing_operational() -> None:
    options: dict[str, Any] = {
        "max_length": 9,
        "loss_on": "response",
        "preserve_thinking": True,
        "min_loss_tokens": 3,
        "template_kwargs": {"enable_thinking": False},
        "generator": "m@1",
    }
    spec = declare(**options, parallelism=7, workers=2, max_reject=0.5).spec({"tokenizer.json": "00"})
    assert {name: getattr(spec, name) for name in options} == options
    assert spec.tokenizer == {"tokenizer.json": "00"} and spec.shards == 0
    assert declare(**options).spec({"tokenizer.json": "00"}) == spec
