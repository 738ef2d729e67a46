"""The report is arithmetic on records: percentiles, buckets, shares, and what is said of a refused dataset."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dflashctl import inspect


def record(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "rows": 4,
        "tokens": 200,
        "loss_tokens": 50,
        "lines": {"seen": 6, "kept": 4, "rejected": {"invalid_json": 1, "no_prompt": 1}},
        "turns_rejected": {"unstable_boundary": 2},
        "cut": {"rows": 0, "loss_tokens": 0},
        "control_tokens": 0,
        "histogram": {"before": {"3": 1, "10": 2, "15": 2}, "after": {"10": 2, "15": 2}},
        "supervised": [{"hash": "00", "text": "yes [/x]\n[1, 16]", "count": 2}],
        "samples": [
            {"id": "a.jsonl:1#0", "segments": [{"text": "q\x1b[2J", "loss": False}, {"text": "a", "loss": True}]}
        ],
        "skipped": [],
        "degenerate": False,
        "reasons": [],
        "content_sha256": "11",
        "spec": {"max_length": None, "shards": 2},
    }
    return {**base, **changes}


def test_the_report() -> None:
    report = inspect.report(record())
    assert report["loss_share"] == 0.25
    assert report["lines"] == {"seen": 6, "kept": 4, "rejected": {"invalid_json": 1, "no_prompt": 1}}
    assert report["loss_per_row"] == {"min": 10, "p10": 10, "p50": 10, "p90": 15, "max": 15}
    assert report["histogram"] == {"10": 2, "15": 2}
    assert report["most_common_supervised"] == [{"text": "yes [/x]\n[1, 16]", "count": 2}]


def test_of_no_row_at_all() -> None:
    report = inspect.report(record(rows=0, tokens=0, loss_tokens=0, histogram={"before": {"0": 3}, "after": {}}))
    assert report["loss_share"] == 0.0
    assert set(report["loss_per_row"].values()) == {None}
    assert any("no row" in line for line in inspect.lines(record(histogram={"before": {}, "after": {}}), False))


def test_percentiles_are_those_of_the_sorted_list() -> None:
    dice = random.Random(3)
    for _ in range(50):
        values = sorted(dice.randrange(40) for _ in range(dice.randrange(1, 60)))
        histogram = {str(v): values.count(v) for v in sorted(set(values))}
        found = inspect.percentiles(histogram)
        for name, share in (("p10", 10), ("p50", 50), ("p90", 90)):
            assert found[name] == values[-(-share * len(values) // 100) - 1]
        assert (found["min"], found["max"]) == (values[0], values[-1])


def test_buckets_are_powers_of_two_and_keep_every_row() -> None:
    histogram = {"0": 1, "1": 2, "2": 3, "3": 4, "16": 5, "31": 6}
    assert inspect.buckets(histogram) == [("0", 1), ("1", 2), ("2-3", 7), ("4-7", 0), ("8-15", 0), ("16-31", 11)]
    assert inspect.buckets({}) == []


def test_text_is_exact_and_cannot_drive_the_terminal() -> None:
    text = "\n".join(inspect.lines(record(), False))
    assert "yes [/x]\\n[1, 16]" in text and "q\\x1b[2J{+a+}" in text and "\x1b" not in text
    assert "turns unstable_boundary" in text


@pytest.mark.parametrize(("degenerate", "head"), [(True, "degenerate"), (False, "refused")])
def test_reasons_are_shown_under_their_name(degenerate: bool, head: str) -> None:
    lines = inspect.lines(record(degenerate=degenerate, reasons=["87.0% of 100 rows"]), False)
    assert lines[-2:] == [head, "  87.0% of 100 rows"]


def test_what_was_cut_skipped_or_quoted_is_said() -> None:
    changed = record(cut={"rows": 1, "loss_tokens": 7}, control_tokens=3, skipped=["s3://b/[k]"])
    text = "\n".join(inspect.lines(changed, True))
    assert (
        "1 rows, 7 loss tokens" in text and "3 quoted" in text and "s3://b/[k]" in text and "before the filter" in text
    )


def test_two_datasets_side_by_side() -> None:
    other = record(
        rows=5,
        content_sha256="22",
        spec={"max_length": 9, "shards": 2},
        lines={**record()["lines"], "rejected": {"multimodal": 2}},
    )
    both = inspect.against(("a", record()), ("b", other))
    assert both["spec"] == {"max_length": [None, 9]} and both["same_rows"] is False
    assert [d["out"] for d in both["datasets"]] == ["a", "b"]
    rows = {line.split("  ")[0].strip(): line.split()[-2:] for line in inspect.against_lines(both, ["complete"] * 2)}
    assert rows["rows"] == ["4", "5"] and "no" in rows["same rows"]
    text = "\n".join(inspect.against_lines(both, ["complete"] * 2))
    assert "multimodal" in text and "no_prompt" in text and "spec max_length" in text
    assert inspect.against(("a", record()), ("a", record()))["same_rows"] is True


def test_what_is_not_complete_or_refused_is_said_of_each_side() -> None:
    refused = record(reasons=["no row is left to train on"], degenerate=True)
    part = record(reasons=["not complete (2 of 4 indexes)"], complete=False)
    standings = [inspect.standing(one) for one in (record(), refused, part, refused | {"shards": []})]
    assert standings == ["complete", "refused", "not complete", "complete"]  # the last was allowed
    assert inspect.lines(part, False)[-2:] == ["", "not complete (2 of 4 indexes)"]
    text = inspect.against_lines(inspect.against(("a", refused), ("b", part)), standings[1:3])
    assert text[-2:] == ["a is refused; no row is left to train on", "b is not complete (2 of 4 indexes)"]
    assert next(line for line in text if line.startswith("degenerate")).split() == ["degenerate", "yes", "-"]
