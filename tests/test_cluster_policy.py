"""What a cluster does of itself to runs: exit codes, evictions, quota, admission, TTL; on the double or on a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_fixtures import *  # noqa: F403
from cluster_fixtures import Site, until
from job_fixtures import write_corpus

from dflashctl.progress import pod_index
from tokenizer.store import open_store

pytestmark = pytest.mark.s3
# the first process of a container has no default for SIGTERM: it must take it
SLEEP = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); time.sleep({seconds})"


def submit(site: Site, name: str, script: str, indexes: int, *flags: str) -> Path:
    """A run of ours whose pods are `python -c script` instead; the folder to ask about it from."""
    cwd = site.settings(input=["s3://x/in"], out="/nonexistent/out", shards=indexes)
    rendered = site.ctl(cwd, "tokenize", "--name", name, "--parallelism", str(indexes), "--dry-run=client", *flags)
    [job] = yaml.safe_load_all(rendered.out)
    job["spec"]["template"]["spec"]["containers"][0] |= {"command": ["python", "-c", script], "args": []}
    site.api.create(site.jobs, job)
    return cwd


def exits(**codes: int) -> str:
    """A script that ends with the code of its index, 0 where none is given."""
    numbers = {key.removeprefix("i"): code for key, code in codes.items()}
    return f"import os, sys; sys.exit({numbers}.get(os.environ['JOB_COMPLETION_INDEX'], 0))"


def status(site: Site, cwd: Path, name: str) -> dict[str, Any]:
    return site.ctl(cwd, "status", name, "-o", "json").json()


def causes(site: Site, cwd: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = site.ctl(cwd, "why", name, "-o", "json").json()["causes"]
    return found


def ended(site: Site, cwd: Path, name: str, seconds: float = 120.0) -> dict[str, Any]:
    found: dict[str, Any] = until(
        lambda: s if (s := status(site, cwd, name))["state"] in ("failed", "succeeded") else None, seconds
    )
    return found


@pytest.mark.parametrize("code", [64, 70, 78])
def test_a_code_that_every_pod_would_end_with_fails_the_job_at_once(site: Site, code: int) -> None:
    name = f"all-{code}"
    cwd = submit(site, name, exits(i1=code), 3)
    found = ended(site, cwd, name)
    assert (found["state"], found["reason"].split(";")[0]) == ("failed", "PodFailurePolicy")
    first = causes(site, cwd, name)[0]
    assert (first["kind"], first["indexes"]) == ("PodFailurePolicy", [1])
    assert f"exit code {code}" in first["message"] and first["remedy"]
    assert len([p for p in site.pods_of(name) if pod_index(p) == 1]) == 1


def test_bad_data_fails_its_index_without_another_try(site: Site) -> None:
    cwd = submit(site, "data", exits(i1=65), 3)
    found = ended(site, cwd, "data")
    assert found["indexes"]["failed"] == [1] and found["reason"].startswith("FailedIndexes")
    assert len([p for p in site.pods_of("data") if pod_index(p) == 1]) == 1
    assert {c["kind"] for c in causes(site, cwd, "data")} >= {"Exit65", "FailedIndexes"}


@pytest.mark.parametrize("code", [75, 137])
def test_a_code_without_a_rule_is_tried_three_times(site: Site, code: int) -> None:
    name = f"again-{code}"
    cwd = submit(site, name, exits(i0=code), 2)
    found = ended(site, cwd, name)
    assert found["indexes"]["failed"] == [0] and found["reason"].startswith("FailedIndexes")
    tries = [p["metadata"]["annotations"]["batch.kubernetes.io/job-index-failure-count"] for p in site.pods_of(name)
             if pod_index(p) == 0]  # fmt: skip
    assert sorted(tries) == ["0", "1", "2"]
    wide = site.ctl(cwd, "status", name, "-o", "wide").out
    cells = next(line.split() for line in wide.splitlines() if line.split()[:1] == ["0"])
    assert cells[cells.index("failed") + 1] == "3"


def test_an_eviction_does_not_count_and_the_index_runs_again(site: Site) -> None:
    cwd = submit(site, "evicted", SLEEP.format(seconds=6), 1)

    def running() -> Any:
        return next((p for p in site.pods_of("evicted") if (p.get("status") or {}).get("phase") == "Running"), None)

    first = until(running)
    site.evict(first)
    until(lambda: (p := running()) and p["metadata"]["uid"] != first["metadata"]["uid"])
    until(lambda: site.of("evicted")[0]["status"].get("succeeded"))
    assert site.of("evicted")[0]["status"].get("failedIndexes") == ""
    again = next(p for p in site.pods_of("evicted") if p["metadata"]["uid"] != first["metadata"]["uid"])
    assert again["metadata"]["annotations"]["batch.kubernetes.io/job-index-failure-count"] == "0"
    assert "Evict" not in site.ctl(cwd, "why", "evicted").out  # what an index overcame is no cause


def test_a_pod_without_memory_is_named_with_its_limit(site: Site) -> None:
    """On a real cluster it takes more than it may; the double kills one that sleeps."""
    if site.double:
        site.double.cluster.oom.add(("greedy", 0))
    greedy = "kept = bytearray(3 << 30)\nfor i in range(0, len(kept), 4096): kept[i] = 1"
    script = SLEEP.format(seconds=60) if site.double else greedy
    cwd = submit(site, "greedy", script, 1, "--set", "spec.backoffLimitPerIndex=0")
    assert ended(site, cwd, "greedy")["indexes"]["failed"] == [0]
    first = causes(site, cwd, "greedy")[0]
    assert (first["kind"], first["indexes"]) == ("OOMKilled", [0]) and "limit 1Gi" in first["message"]


def test_pods_that_the_quota_forbids_are_named(site: Site) -> None:
    with site.quota(pods=0):
        cwd = submit(site, "quota", exits(), 1)
        until(lambda: status(site, cwd, "quota")["state"] == "stuck")
        [cause] = causes(site, cwd, "quota")
        assert cause["kind"] == "Quota" and "exceeded quota" in cause["message"]
        assert site.ctl(cwd, "wait", "quota", "--stuck-after", "0s").code == 3


def test_a_node_that_is_not_there_is_unschedulable_in_the_schedulers_words(site: Site) -> None:
    place = "spec.template.spec.nodeSelector.example.com/disk=none"
    cwd = submit(site, "nowhere", exits(), 1, "--set", place)
    until(lambda: status(site, cwd, "nowhere")["state"] == "stuck")
    cause = causes(site, cwd, "nowhere")[0]
    assert cause["kind"] == "Unschedulable" and cause["message"].startswith("0/1 nodes are available: 1 x node(s) ")


def test_a_run_whose_job_its_ttl_removed_is_known_by_its_out(site: Site, tmp_path: Path) -> None:
    store = open_store(site.bucket)
    for file in sorted(write_corpus(tmp_path / "in", 2, 3).iterdir()):
        store.upload_file(file, f"short/{file.name}")
    cwd = site.settings(input=[f"{site.bucket}/short/"], out=f"{site.bucket}/short-out", shards=2)
    done = site.ctl(cwd, "tokenize", "--set", "spec.ttlSecondsAfterFinished=1", "-o", "json")
    assert done.code == 0 and done.json()["rows"] == 6, done.err
    run = done.json()["run"]
    until(lambda: not site.of(run))
    assert not site.pods_of(run)
    assert status(site, cwd, run)["state"] == "succeeded"
    assert site.ctl(cwd, "wait", run, "--timeout", "9s").code == 0
    again = site.ctl(cwd, "tokenize")
    assert again.code == 0 and "unchanged" in again.err and not site.of(run)


def test_pods_are_admitted_by_the_restricted_profile(site: Site) -> None:
    """Each base Job as it stands, and one that asks for too much."""
    double = site.double
    if double is not None:
        pytest.skip("the double admits every pod")
    cwd = submit(site, "open", exits(), 1, "--set", "spec.template.spec.hostNetwork=true")
    until(lambda: status(site, cwd, "open")["state"] == "stuck")
    assert causes(site, cwd, "open")[0]["kind"] == "PodSecurity"
