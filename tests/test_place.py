"""Where pods go, and what a training's Job is made of: resolved from settings, remembered, refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from dflashctl import config, training
from dflashctl.errors import UsageError
from dflashctl.place import Placing, by_digest, parse_env, release
from dflashctl.render import Node

PROFILES = {"node.b200": {"cpu": "64", "gpus": 7, "split": "4+3", "image": "r/t@sha256:" + "b" * 64, "volumes": {"model": "60Gi"}}}  # fmt: skip


def placing(flags: dict[str, Any] | None = None, file: dict[str, Any] | None = None, kind: str = "tokenize", registry: str = "") -> Placing:  # fmt: skip
    sections = {kind: file or {}, **PROFILES}
    return Placing(config.resolve(kind, flags or {}, {}, sections, "dflash.toml"), sections, registry)


def test_what_was_said_last_holds() -> None:
    first = placing(file={"image": "typo", "queue": "q"}).flags({})
    assert (first["image"], first["queue"]) == ("typo", "q")
    mended = placing({"image": "good"}, {"image": "typo", "queue": "q"}).flags(first)
    assert mended["image"] == "good"
    assert placing(file={"image": "typo", "queue": "q"}).flags(mended)["image"] == "good"  # the file is as it was
    assert placing(file={"image": "newer"}).flags(mended)["image"] == "newer"  # the file has been edited since
    assert placing().flags(mended)["queue"] == "q"  # from another folder


def test_image_by_flag_profile_or_registry() -> None:
    assert placing().place("tokenize", {"image": "i"}).image == "i"
    assert by_digest(placing().place("train", {"node": "b200"}).image)
    tagged = placing(registry="reg.example/x/").place("train", {}).image
    assert tagged == f"reg.example/x/dflash-trainer:{release()}" and not by_digest(tagged)
    assert placing().place("tokenize", {}).image == ""
    place = placing().place(
        "train",
        {"node": "b200", "env": {"A": "1"}, "set": ["a=b"], "s3_secret": "s", "service_account": "me", "queue": "q"},
    )
    assert place.node == Node(cpu="64", gpus=7, volumes={"model": "60Gi"})
    assert (place.env, place.sets, place.s3_secret, place.service_account, place.queue) == (
        {"A": "1"},
        ("a=b",),
        "s",
        "me",
        "q",
    )


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(UsageError, match="'b300' is no node profile") as error:
        placing().place("train", {"node": "b300"})
    assert "b200" in error.value.hint
    with pytest.raises(UsageError) as error:
        Placing({}).profile("x")
    assert "[node.x]" in error.value.hint
    with pytest.raises(UsageError, match=r"env\.A"):
        placing().place("train", {"env": {"A": 1}})
    with pytest.raises(UsageError, match=r"volumes\.model"):
        Placing({}, {"node.x": {"volumes": {"model": 60}}}).place("train", {"node": "x"})
    assert parse_env(["A=1=2", "B="]) == {"A": "1=2", "B": ""}
    for wrong in ("marker", "=marker"):
        with pytest.raises(UsageError) as error:
            parse_env([wrong])
        assert "marker" not in str(error.value)


def test_a_package_that_is_not_installed_has_no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("dflashctl.place.version", missing)
    assert release() == "latest"


def declared(profile: dict[str, Any] | None = None, **flags: Any) -> Any:
    given = {"dataset": "s3://d", "out": "s3://o/Qwen_3.6", "target": "/model/x"} | flags
    return training.declare(config.resolve("train", given, {}, {}, ""), False, profile or {})


def test_a_training_is_declared_with_the_split_of_its_profile() -> None:
    args = declared(PROFILES["node.b200"])
    assert args.split == "4+3" and declared(PROFILES["node.b200"], split="2+2").split == "2+2"
    job = training.submission(args, training.run_name(args, None), {"node": "b200"})
    assert job.run == f"trn-qwen-3-6-{training.sha256(args)[:8]}" and job.kind == "train"
    assert "--split=4+3" in job.argv and job.model == "/model/x" and job.indexes == (0,)
    assert training.run_name(declared(), None) == training.run_name(declared(split="1+2"), None)  # operational
    assert training.run_name(declared(), None) != training.run_name(declared(lr=1e-3), None)
    assert training.run_name(declared(), "mine") == "mine"


@pytest.mark.parametrize(
    ("profile", "flags", "named"),
    [
        ({}, {"target": None}, "`target` in [train]"),
        ({}, {"dataset": None}, "`dataset` in [train]"),
        ({}, {"out": "gs://x"}, "scheme `gs`"),
        ({}, {"lr": 0.0}, "--lr"),
        ({}, {"split": "4x3"}, "--split"),
        ({"gpus": 7}, {"split": "5+3"}, "needs 8 GPUs"),
    ],
)
def test_a_training_that_cannot_be(profile: dict[str, Any], flags: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError) as error:
        declared(profile, **flags)
    assert named in f"{error.value.message} {error.value.hint}"


def test_profiles_of_the_file_are_typed(tmp_path: Any) -> None:
    for text, named in (
        ("[node.x]\ncpus = '4'\n", "`node.x.cpus`"),
        ("[node]\nx = 4\n", "`node.x`"),
        ("[node.x]\ngpus = '7'\n", "whole number"),
        ("[node.x]\ntolerations = ['a']\n", "list of tables"),
    ):
        (tmp_path / "dflash.toml").write_text(text)
        with pytest.raises(UsageError) as error:
            config.load_file(None, tmp_path)
        assert named in error.value.message
