"""One status from what OUT holds and what a backend sees; OUT wins, and what is not known is not judged."""

from __future__ import annotations

from typing import Any

import pytest

from dflashctl.backends.base import Known
from dflashctl.progress import Index, Snapshot
from dflashctl.runs import Facts, Status, after_refusal, combine

KNOWN = Known("tok-a", "tokenize", "s3://b/out", "tok-a-r2", 1.0)
COMMIT = {"rows": 10, "tokens": 100, "loss_tokens": 50}
BOTH = {0: COMMIT, 1: COMMIT}
SIZES = (1000, 3000)


def status(facts: Facts, snapshot: Snapshot | None) -> Status:
    return combine(KNOWN, facts, snapshot)


def facts(**more: Any) -> Facts:
    return Facts(**{"sizes": SIZES, **more})


@pytest.mark.parametrize(
    ("facts", "snapshot", "state", "reason"),
    [
        (facts(dataset={"rows": 20}), None, "succeeded", ""),
        (facts(dataset={"rows": 20}), Snapshot("failed", "x"), "succeeded", ""),
        (facts(dataset={"rows": 20}, damage=("`a` is missing",)), Snapshot("succeeded"), "failed", "`a` is missing"),
        (facts(dataset={"rows": 20}, damage=("a", "b", "c")), None, "failed", "damaged since it was complete: a, and 2"),
        (Facts(), Snapshot("succeeded", total=2), "failed", "OUT holds no plan any more"),
        (facts(), Snapshot("running"), "running", ""),
        (facts(), Snapshot("queued", "waits in queue q"), "queued", "waits in queue q"),
        (facts(), Snapshot("suspended"), "suspended", ""),
        (facts(), Snapshot("stuck", "ImagePullBackOff"), "stuck", "ImagePullBackOff"),
        (facts(commits={0: COMMIT}), Snapshot("failed", "index 1: bad"), "failed", "index 1: bad"),
        (facts(commits={0: COMMIT}), None, "deleted", "no Job of it is known here, and OUT is not complete"),
        (facts(), Snapshot("deleted", "the Job is gone"), "deleted", "the Job is gone"),
        (facts(commits=BOTH, refused={"reasons": ["a", "b"]}), Snapshot("succeeded"), "refused", "a; b"),
        (facts(commits=BOTH, refused={"reasons": ["a"]}), None, "refused", "a"),
        (facts(commits=BOTH, refused={"reasons": ["a"]}), Snapshot("running"), "running", ""),
        (facts(commits=BOTH, unsettled="denied"), Snapshot("succeeded"), "failed", "not finalised: denied"),
        (facts(commits=BOTH, unsettled="denied"), None, "deleted", "not finalised: denied"),
        (facts(commits={0: COMMIT}), Snapshot("succeeded"), "failed", "1 of 2 indexes have no commit"),
        (facts(unread="no route"), Snapshot("succeeded"), "succeeded", "without OUT: no route"),
        (facts(unread="no route"), Snapshot("failed"), "failed", "without OUT: no route"),
        (facts(unread="no route"), None, "deleted", "without OUT: no route"),
        (facts(unread="no route"), Snapshot("running"), "running", ""),
    ],
)
def test_the_state(facts: Facts, snapshot: Snapshot | None, state: str, reason: str) -> None:
    seen = status(facts, snapshot)
    assert seen.state == state and reason in seen.reason and bool(reason) == bool(seen.reason)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("83% of 9 rows learn the same text: 'ok'", "`dflashctl resume --allow-degenerate` finalises"),
        ("1 of 2 lines are malformed, more than --max-reject 0.01 allows (x 1)", "`dflashctl resume --max-reject FRAC"),
        (
            "a; 1 of 2 lines are malformed, more than --max-reject 0 allows (x 1)",
            "FRACTION --allow-degenerate` finalis",
        ),
        ("no row is left to train on", "no flag finalises"),
    ],
)
def test_a_refusal_names_the_flag_that_allows_it(reason: str, words: str) -> None:
    assert words in after_refusal(reason)


def test_counts_are_of_commits_and_of_what_runs() -> None:
    running = Index(
        1, "running", message={"rows": 3, "tokens": 30, "loss_tokens": 9, "bytes": 1500, "total_bytes": 3000}
    )
    snapshot = Snapshot("running", total=2, active=1, indexes=(Index(0, "succeeded", message={"rows": 10}), running))
    seen = status(facts(commits={0: COMMIT}), snapshot)
    assert (seen.rows, seen.tokens, seen.loss_tokens) == (13, 130, 59)
    assert (seen.bytes, seen.total_bytes) == (2500, 4000)
    assert (seen.total, seen.succeeded, seen.active, seen.failed) == (2, 1, 1, ())


@pytest.mark.parametrize("state", ["failed", "suspended", "stuck"])
def test_what_stands_still_counts_by_its_commits_alone(state: str) -> None:
    begun = {"rows": 3, "tokens": 30, "loss_tokens": 9, "bytes": 1500, "total_bytes": 3000}
    indexes = (Index(0, "succeeded", message={"rows": 10}), Index(1, "failed", message=begun), Index(2, "running"))
    seen = combine(KNOWN, Facts((1000, 3000, 500), {0: COMMIT}), Snapshot(state, total=3, indexes=indexes))
    assert (seen.rows, seen.tokens, seen.loss_tokens, seen.bytes) == (10, 100, 50, 1000)
    assert [dict(index.message) for index in seen.indexes] == [{"rows": 10}, {}, {}]


def test_while_others_run_what_waits_for_another_try_does_not_count() -> None:
    begun = {"rows": 3, "tokens": 30, "bytes": 1500}
    indexes = (Index(0, "pending", 1, message=begun), Index(1, "succeeded", message={"rows": 7, "tokens": 70}))
    seen = status(facts(), Snapshot("running", total=2, active=1, indexes=indexes))
    assert (seen.rows, seen.tokens, seen.succeeded, seen.bytes) == (7, 70, 1, 3000)


def test_a_job_that_succeeded_has_no_rows_in_an_out_that_is_gone() -> None:
    done = Snapshot("succeeded", total=1, succeeded=1, indexes=(Index(0, "succeeded", message={"rows": 7}),))
    assert (status(Facts(), done).rows, status(Facts(), done).succeeded) == (0, 0)
    unread = status(Facts(unread="no route"), done)
    assert (unread.rows, unread.succeeded) == (7, 1)  # the best that is known


def test_an_index_that_failed_and_has_its_commit_now_is_not_failed() -> None:
    snapshot = Snapshot("failed", total=2, failed=(0, 1), indexes=(Index(0, "failed"), Index(1, "failed")))
    assert status(facts(commits={0: COMMIT}), snapshot).failed == (1,)


def test_a_complete_dataset_counts_by_its_own_record() -> None:
    seen = status(facts(dataset={"rows": 20, "tokens": 200, "loss_tokens": 99}), Snapshot("failed", failed=(1,)))
    assert (seen.rows, seen.tokens, seen.succeeded, seen.failed, seen.bytes) == (20, 200, 2, (), 4000)
    assert seen.document() == {
        "schema": "dflash.status/1",
        "run": "tok-a",
        "kind": "tokenize",
        "state": "succeeded",
        "reason": "",
        "queue": "",
        "indexes": {"total": 2, "succeeded": 2, "active": 0, "failed": []},
        "rows": 20,
        "tokens": 200,
    }
