"""The contract: argv, plan, run records, gate and finalise. All pure."""

from __future__ import annotations

import ast
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer.gate import Commit, degenerate_reasons, finalise
from tokenizer.job import (
    CONTRACT,
    DATASET,
    DATASET_INFO,
    FILTERED,
    MALFORMED,
    STATE,
    Exit,
    GateFlags,
    JobError,
    Obj,
    Plan,
    PreviewArgs,
    RunRecord,
    Spec,
    TokenizeArgs,
    default_shards,
    make_plan,
    newest_gate,
    object_difference,
    overlay,
    spec_difference,
)

ARGS = TokenizeArgs("s3://bucket/out", "tok-x-12345678", workers=3, downloads=4)
SPEC = Spec({"tokenizer.json": "aa", "chat_template.jinja": "bb"})


def obj(name: str, size: int = 10, etag: str = "e") -> Obj:
    return Obj(f"s3://raw/{name}", size, etag, name)


# ---- argv


def test_argv_is_read_back_as_it_was_written() -> None:
    assert TokenizeArgs.from_argv(ARGS.to_argv()) == ARGS
    assert TokenizeArgs.from_argv([*ARGS.to_argv(), "--index", "7"]).index == 7
    preview = PreviewArgs("/m", ("s3://a b/ü.jsonl",), template_kwargs={"enable_thinking": False}, max_length=9)
    assert PreviewArgs.from_argv(preview.to_argv()) == preview


def test_another_contract_version_is_78_even_with_flags_of_the_future() -> None:
    argv = ARGS.to_argv()
    argv[argv.index("--contract") + 1] = str(CONTRACT + 1)
    for wrong in ([*argv, "--new-flag", "x"], ["--out", "x"], []):
        with pytest.raises(JobError) as error:
            TokenizeArgs.from_argv(wrong)
        assert error.value.code == Exit.CONFIG
        assert str(CONTRACT) in error.value.message


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([*ARGS.to_argv(), "--colour", "red"], "--colour"),
        ([*ARGS.to_argv(), "stray", "x"], "stray"),
        ([*ARGS.to_argv(), "--index"], "--index"),
        ([*ARGS.to_argv(), "--workers", "many"], "--workers"),
        (["--contract", str(CONTRACT), "--run", "r"], "--out"),
    ],
)
def test_a_wrong_argument_is_64_and_named(argv: list[str], named: str) -> None:
    with pytest.raises(JobError) as error:
        TokenizeArgs.from_argv(argv)
    assert error.value.code == Exit.USAGE
    assert named in error.value.message


def test_the_contract_needs_the_standard_library_alone() -> None:
    for module in ("errors", "plan", "job", "gate", "closing"):
        tree = ast.parse((Path(__file__).parent.parent / "tokenizer" / f"{module}.py").read_text())
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] in {*sys.stdlib_module_names, "tokenizer"}, (module, name)


# ---- plan

sizes = st.lists(st.integers(1, 10_000), min_size=1, max_size=60)


@given(sizes, st.integers(1, 70), st.randoms(use_true_random=False))
def test_batches_are_contiguous_complete_and_the_same_for_any_listing_order(
    found: list[int], shards: int, rng: random.Random
) -> None:
    objects = [obj(f"{i:03d}.jsonl", size) for i, size in enumerate(found)]
    plan = make_plan(objects, SPEC, shards)
    assert [o for batch in plan.batches for o in batch.objects] == objects
    assert all(batch.objects for batch in plan.batches)
    assert len(plan.batches) == plan.spec.shards == min(shards, len(objects))
    shuffled = [*objects, objects[0]]  # one is named twice
    rng.shuffle(shuffled)
    assert make_plan(shuffled, SPEC, shards).to_json() == plan.to_json()
    assert Plan.from_json(plan.to_json()) == plan


@given(sizes, st.integers(1, 20))
def test_batches_are_balanced_to_one_object(found: list[int], shards: int) -> None:
    plan = make_plan([obj(f"{i:03d}", size) for i, size in enumerate(found)], SPEC, shards)
    share = sum(found) / len(plan.batches)
    if len(found) >= 4 * len(plan.batches) and max(found) <= share:
        assert max(sum(o.size for o in b.objects) for b in plan.batches) <= share + 2 * max(found)


def test_default_shards() -> None:
    assert default_shards(1, 100) == 1
    assert default_shards((96 << 20) + 1, 100) == 2
    assert default_shards(1 << 40, 7) == 7
    assert len(make_plan([obj(str(i), 96 << 20) for i in range(5)], SPEC).batches) == 5


def test_impossible_inputs_are_named() -> None:
    with pytest.raises(JobError, match="no input object"):
        make_plan([], SPEC)
    twice = [Obj("s3://a/x/1.jsonl", 1, "e", "1.jsonl"), Obj("s3://a/y/1.jsonl", 1, "e", "1.jsonl")]
    with pytest.raises(JobError, match=r"x/1\.jsonl.*y/1\.jsonl"):
        make_plan(twice, SPEC)


def test_request_files_are_pinned_where_they_are_needed() -> None:
    requests = obj("requests.jsonl")
    plan = make_plan([obj("a"), obj("b")], SPEC, 2, batch_inputs={"s3://raw/b": [requests, requests]})
    assert [batch.batch_inputs for batch in plan.batches] == [(), (requests,)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss_on": "response"}, '`loss_on` is "response" here and "all" there'),
        ({"max_length": 5}, "`max_length` is 5 here and null there"),
        ({"template_kwargs": {"a": 1}}, "`template_kwargs`"),
        ({"tokenizer": {**SPEC.tokenizer, "chat_template.jinja": "cc"}}, "`tokenizer` differs in chat_template.jinja"),
        ({"shards": 4}, "`shards` is 4 here and 0 there"),
    ],
)
def test_another_spec_is_told_by_its_field(change: dict[str, Any], words: str) -> None:
    other = Spec(**{"tokenizer": SPEC.tokenizer, **change})
    assert words in (spec_difference(other, SPEC) or "")
    assert other.sha256() != SPEC.sha256()
    assert spec_difference(SPEC, SPEC) is None


def test_a_changed_listing_is_told_by_its_key_unless_a_run_took_it_in() -> None:
    plan = make_plan([obj("a"), obj("b"), obj("c")], SPEC, 2)
    now = [obj("a"), obj("b", etag="other"), obj("c")]
    assert "`s3://raw/b` has changed" in (object_difference(now, plan) or "")
    assert "`s3://raw/c` of the plan is no longer there" in (object_difference([*now[:1], obj("b")], plan) or "")
    assert "`s3://raw/d` is not in the plan" in (object_difference([*map(obj, "abcd")], plan) or "")
    repin = RunRecord("r", 2, (0,), repinned=(obj("b", etag="other"),))
    assert object_difference(now, plan, [repin]) is None
    assert object_difference(now[::2], plan, [RunRecord("r", 2, (0,), skipped=("s3://raw/b",))]) is None


def test_the_newest_record_rules_whatever_the_listing_order() -> None:
    old = RunRecord("tok", 1, (0, 1), GateFlags(0.5))
    new = RunRecord("tok-r10", 10, (1,), GateFlags(0.2, True), repinned=(obj("a", etag="2"),), skipped=("s3://raw/b",))
    mid = RunRecord("tok-r9", 9, (1,), repinned=(obj("a", etag="1"),))
    assert newest_gate([new, mid, old]) == newest_gate([old, new, mid]) == GateFlags(0.2, True)
    assert newest_gate([]) == GateFlags()
    plan, skipped = overlay(make_plan([obj("a"), obj("b")], SPEC, 1), [new, old, mid])
    assert [o.etag for o in plan.batches[0].objects] == ["2", "e"]
    assert skipped == {"s3://raw/b"}
    assert RunRecord.from_json(new.to_json()) == new


def test_a_foreign_plan_is_refused() -> None:
    for data in (b"[]", b"{", b'{"contract": 99}', b'{"contract": 1, "spec": {"colour": 1}}'):
        with pytest.raises(JobError) as error:
            Plan.from_json(data)
        assert error.value.code == Exit.CONFIG


# ---- gate and finalise


def commit(index: int, plan: Plan, loss: dict[int, int], **more: Any) -> Commit:
    """A record of an index whose rows have those loss counts."""
    least = plan.spec.min_loss_tokens
    rows = sum(n for length, n in loss.items() if length >= least)
    record: dict[str, Any] = {
        "contract": CONTRACT,
        "spec_sha256": plan.spec.sha256(),
        "index": index,
        "shard": {"name": f"data-{index}", "sha256": "00", "bytes": 1},
        "rejected": {"name": f"rejected-{index}", "sha256": "00", "bytes": 1},
        "objects": [{"key": o.key, "sha256": "11"} for o in plan.batches[index].objects],
        "batch_inputs": [],
        "skipped": [],
        "lines": {"seen": sum(loss.values()), "kept": rows, "rejected": {}},
        "turns_rejected": {},
        "rows": rows,
        "tokens": rows * 100,
        "loss_tokens": sum(length * n for length, n in loss.items() if length >= least),
        "cut": {"rows": 0, "loss_tokens": 0},
        "control_tokens": 0,
        "histogram": {
            "before": {str(length): n for length, n in loss.items()},
            "after": {str(length): n for length, n in loss.items() if length >= least},
        },
        "supervised": [],
        "samples": [],
        "content_sha256": f"{index:064x}",
    }
    return {**record, **more}  # type: ignore[typeddict-item,return-value]


GOOD = {40: 30, 50: 30, 60: 40}
PLAN2 = make_plan([obj("a"), obj("b")], SPEC, 2)


def test_closing_files_are_the_same_bytes_in_any_order_and_whoever_asks() -> None:
    commits = [commit(0, PLAN2, GOOD), commit(1, PLAN2, GOOD)]
    final = finalise(PLAN2, commits, GateFlags())
    assert final == finalise(PLAN2, commits[::-1], GateFlags())
    assert list(final.files) == [DATASET_INFO, STATE, DATASET]  # dataset.json last
    assert final.refusal is None


def test_the_historic_dataset_is_refused_whatever_the_flags() -> None:
    """87 % of the rows with six loss tokens."""
    loss = {6: 87, 300: 6, 400: 7}
    for least in (0, 1, 16):
        plan = make_plan([obj("a")], Spec({}, min_loss_tokens=least))
        for reject in (0.0, 1.0):
            final = finalise(plan, [commit(0, plan, loss)], GateFlags(max_reject=reject))
            assert final.refusal and "87.0% of 100 rows have exactly 6 loss tokens" in final.reasons
            assert not final.files
        allowed = finalise(plan, [commit(0, plan, loss)], GateFlags(allow_degenerate=True))
        assert allowed.refusal is None
        assert b'"degenerate": true' in allowed.files[DATASET]


@pytest.mark.parametrize(
    ("loss", "top", "reason"),
    [
        (GOOD, 0, None),
        ({32: 51, 40: 49}, 0, "exactly 32"),
        ({33: 51, 40: 49}, 0, None),
        ({32: 50, 40: 50}, 0, None),  # half is not more than half
        ({15: 26, 14: 25, 40: 49}, 0, "fewer than 16"),
        (GOOD, 21, "learn the same text"),
        (GOOD, 20, None),
        ({20: 1}, 0, None),  # one row shares nothing with anyone
        ({5: 1}, 0, "no row"),
        ({}, 0, "no row"),
    ],
)
def test_degenerate(loss: dict[int, int], top: int, reason: str | None) -> None:
    rows = sum(n for length, n in loss.items() if length >= 16)
    before = {str(length): n for length, n in loss.items()}
    texts = [{"hash": "00", "text": "I cannot", "count": top}]
    reasons = degenerate_reasons(before, rows, texts, 16)  # type: ignore[arg-type]
    assert (reason in "; ".join(reasons)) if reason else not reasons


def test_equal_texts_are_joined_across_indexes() -> None:
    texts = [[{"hash": "aa", "text": "no", "count": n}] for n in (15, 30)]
    commits = [commit(i, PLAN2, GOOD, supervised=texts[i]) for i in (0, 1)]
    assert "22.5% of 200 rows learn the same text: 'no'" in finalise(PLAN2, commits, GateFlags()).reasons


def test_no_row_is_never_a_dataset() -> None:
    plan = make_plan([obj("a")], SPEC)
    final = finalise(plan, [commit(0, plan, {3: 5})], GateFlags(1.0, allow_degenerate=True))
    assert final.refusal and any("no row" in reason for reason in final.reasons)


def test_max_reject_counts_malformed_lines_alone() -> None:
    plan = make_plan([obj("a")], SPEC)
    lines = {"seen": 200, "kept": 100, "rejected": {"invalid_json": 2, "multimodal": 1, "too_few_loss_tokens": 97}}
    record = commit(0, plan, GOOD, lines=lines)
    assert finalise(plan, [record], GateFlags(0.015)).refusal is None
    refused = finalise(plan, [record], GateFlags(0.014, allow_degenerate=True))
    assert "3 of 200 lines are malformed" in refused.reasons[0]
    assert "invalid_json 2, multimodal 1" in refused.reasons[0]
    assert not MALFORMED & FILTERED


def test_commits_that_do_not_make_up_the_plan_are_refused() -> None:
    commits = [commit(0, PLAN2, GOOD), commit(1, PLAN2, GOOD)]
    skipped = commit(1, PLAN2, GOOD, objects=[], skipped=["s3://raw/b"])
    assert b'"s3://raw/b"' in finalise(PLAN2, [commits[0], skipped], GateFlags()).files[DATASET]
    for wrong in (
        commits[:1],
        [commits[0], commits[0]],
        [commits[0], commit(1, PLAN2, GOOD, objects=[])],
        [commits[0], commit(1, PLAN2, GOOD, skipped=["s3://raw/b"])],
        [commits[0], commit(1, PLAN2, GOOD, spec_sha256="other")],
    ):
        with pytest.raises(JobError) as error:
            finalise(PLAN2, wrong, GateFlags())
        assert error.value.code == Exit.CONFIG
