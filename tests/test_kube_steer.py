"""Commands that meet each other, or a cluster that is not as they left it: submits and resumes at once, and again."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_fixtures import *  # noqa: F403
from cluster_fixtures import Site, until
from job_fixtures import write_corpus

from tokenizer.store import open_store

pytestmark = pytest.mark.s3
KEYS = ["schema", "run", "kind", "state", "reason", "queue", "indexes", "rows", "tokens"]


def prepared(site: Site, folder: Path, name: str, files: int, lines: int, **settings: Any) -> Path:
    """A folder with a dflash.toml for files x lines rows, a shard each."""
    store = open_store(site.bucket)
    for file in sorted(write_corpus(folder, files, lines).iterdir()):
        store.upload_file(file, f"{name}/{file.name}")
    return site.settings(input=[f"{site.bucket}/{name}/"], out=f"{site.bucket}/{name}-out", shards=files, **settings)


def at_once(site: Site, cwd: Path, *args: str, times: int = 2) -> list[tuple[int, str]]:
    """(exit code, stderr) of the same command typed several times at once."""
    argv, env = site.command(*args)
    typed = [
        subprocess.Popen(argv, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(times)
    ]
    said = [process.communicate(timeout=240)[1] for process in typed]
    return [(process.returncode, err) for process, err in zip(typed, said, strict=True)]


def test_submits_and_resumes_at_once_are_one_run(site: Site, tmp_path: Path) -> None:
    cwd = prepared(site, tmp_path / "in", "at-once", 4, 50, parallelism=4)
    both = at_once(site, cwd, "tokenize", "--image", f"{site.image}-typo", "--detach", times=3)
    assert [code for code, _ in both] == [0, 0, 0], both
    run = site.ctl(cwd, "ls", "-o", "name").out.split()[0]
    assert [j["metadata"]["name"] for j in site.of(run)] == [run]
    until(lambda: site.ctl(cwd, "status", "-o", "json").json()["state"] == "stuck")
    both = at_once(site, cwd, "resume", "--image", site.image, times=3)
    assert [code for code, _ in both] == [0, 0, 0], both
    assert site.ctl(cwd, "status", "-o", "json").json()["rows"] == 200
    assert len(site.of(run)) == 1


def test_one_name_for_two_datasets_is_taken(site: Site, tmp_path: Path) -> None:
    cwd = prepared(site, tmp_path / "in", "one-name", 1, 5)
    assert site.ctl(cwd, "tokenize", "--name", "one-name").code == 0
    other = site.ctl(cwd, "tokenize", "--name", "one-name", "--out", f"{site.bucket}/other-out")
    assert other.code == 5 and "`one-name`" in other.err and "one-name-out" in other.err
    assert open_store(f"{site.bucket}/other-out").stat("plan.json") is None
    differs = site.ctl(cwd, "tokenize", "--name", "one-name", "--min-loss-tokens", "3")
    assert differs.code == 5 and "min_loss_tokens" in differs.err


def test_a_job_of_our_name_that_is_not_ours(site: Site, tmp_path: Path) -> None:
    cwd = prepared(site, tmp_path / "in", "foreign", 1, 5)
    [job] = yaml.safe_load_all(site.ctl(cwd, "tokenize", "--name", "foreign", "--dry-run=client").out)
    job["metadata"] |= {"labels": {"team": "another"}, "annotations": {}}
    job["spec"] |= {"suspend": True}
    site.api.create(site.jobs, job)
    try:
        refused = site.ctl(cwd, "tokenize", "--name", "foreign")
        assert refused.code == 5 and "not one of dflashctl's" in refused.err, refused.err
        assert open_store(f"{site.bucket}/foreign-out").stat("plan.json") is None
        assert site.ctl(cwd, "ls").code == 0
        [there] = [j for j in site.api.items(site.jobs) if j["metadata"]["name"] == "foreign"]
        assert there["metadata"]["labels"].get("team") == "another"
        there["metadata"]["labels"] |= {"dflashctl/run": "foreign", "app.kubernetes.io/managed-by": "dflashctl"}
        site.api.patch(f"{site.jobs}/foreign", {"metadata": {"labels": there["metadata"]["labels"]}})
        # with our labels, yet without our notes, it is shown as far as it goes
        for verb in (["ls"], ["status", "foreign"], ["why", "foreign"], ["logs", "foreign", "--no-wait"]):
            assert "internal error" not in site.ctl(cwd, *verb).err, verb
    finally:
        site.api.delete(f"{site.jobs}/foreign", there["metadata"]["uid"])


def test_stop_scale_resume_and_rm_again_and_again(site: Site, tmp_path: Path) -> None:
    cwd = prepared(site, tmp_path / "in", "again", 6, 10, parallelism=1)
    assert site.ctl(cwd, "tokenize", "--detach", "--image", f"{site.image}-typo").code == 0
    run = site.ctl(cwd, "ls", "-o", "name").out.split()[0]
    for words in ("suspended", "suspended already"):
        stopped = site.ctl(cwd, "stop", run, "-o", "json")
        assert stopped.code == 0 and stopped.json()["state"] == "suspended" and words in stopped.err
    scaled = site.ctl(cwd, "scale", run, "--parallelism", "99", "-o", "json")
    assert scaled.code == 0 and "clamped to the 6 shards" in scaled.err and list(scaled.json()) == KEYS
    assert site.of(run)[0]["spec"]["parallelism"] == 6
    assert site.ctl(cwd, "resume", run, "--image", site.image).code == 0
    again = site.ctl(cwd, "resume", run, "-o", "json")
    assert again.code == 0 and again.json()["rows"] == 60 and "unchanged" in again.err
    for verb in (["stop", run], ["scale", run, "--parallelism", "2"]):
        assert "succeeded already" in site.ctl(cwd, *verb).err
    assert site.ctl(cwd, "rm", run).code == 0 and site.ctl(cwd, "rm", run).code == 0
    assert site.of(run) == [] and open_store(f"{site.bucket}/again-out").stat("dataset.json")
    assert site.ctl(cwd, "rm", "nobody").code == 1
    # OUT is the truth: complete without any Job
    assert site.ctl(cwd, "status", run, "-o", "json").json()["state"] == "succeeded"
    assert site.ctl(cwd, "wait", run).code == 0
    assert "unchanged" in site.ctl(cwd, "resume", f"{site.bucket}/again-out").err


def test_a_suspended_run_whose_dataset_another_backend_completed(site: Site, tmp_path: Path) -> None:
    cwd = prepared(site, tmp_path / "in", "shared", 3, 20, parallelism=1)
    assert site.ctl(cwd, "tokenize", "--detach", "--image", f"{site.image}-typo").code == 0
    run = site.ctl(cwd, "ls", "-o", "name").out.split()[0]
    stopped = site.ctl(cwd, "stop", run, "-o", "json")
    assert stopped.code == 0 and stopped.json()["state"] == "suspended", stopped.err
    here = site.ctl(cwd, "resume", f"{site.bucket}/shared-out", "--backend", "local", "-o", "json")
    assert here.code == 0 and here.json()["rows"] == 60, here.err
    resumed = site.ctl(cwd, "resume", run, "-o", "json")
    assert resumed.code == 0 and "unchanged" in resumed.err
    for reference in (run, "@latest", f"{site.bucket}/shared-out"):
        assert site.ctl(cwd, "status", reference, "-o", "json").json()["state"] == "succeeded"
    listed = [site.ctl(cwd, "ls", "--backend", name, "-o", "json").json()["runs"] for name in ("kube", "local")]
    assert all(any(row["run"] == run and row["state"] == "succeeded" for row in rows) for rows in listed), listed


def test_status_in_every_format_by_every_name(site: Site, tmp_path: Path) -> None:
    cwd = prepared(site, tmp_path / "in", "formats", 2, 20, parallelism=2)
    assert site.ctl(cwd, "tokenize").code == 0
    run = site.ctl(cwd, "ls", "-o", "name").out.split()[0]
    documents = [
        site.ctl(cwd, "status", r, "-o", "json").json() for r in (run, "@latest", f"{site.bucket}/formats-out")
    ]
    assert documents[0] == documents[1] == documents[2]
    assert list(documents[0]) == KEYS and list(documents[0]["indexes"]) == ["total", "succeeded", "active", "failed"]
    assert documents[0]["schema"] == "dflash.status/1" and documents[0]["rows"] == 40
    assert yaml.safe_load(site.ctl(cwd, "status", "-o", "yaml").out) == documents[0]
    assert site.ctl(cwd, "status", "-o", "name").out == f"{run}\n"
    table, wide = (site.ctl(cwd, "status", "-o", form).out for form in ("table", "wide"))
    header = next(line.split() for line in table.splitlines() if line.startswith("index "))
    assert header == ["index", "state", "try", "pod", "node", "rows", "tokens", "tokens/s", "read", "ETA", "reason"]
    assert "completion" in wide and "completion" not in table and f"{run}-0-" in table


def test_without_a_terminal_it_is_a_line_a_change(site: Site, tmp_path: Path) -> None:
    cwd = prepared(site, tmp_path / "in", "lines", 2, 500, parallelism=1)
    assert site.ctl(cwd, "tokenize", "--detach").code == 0
    done = site.ctl(cwd, "status", "-w", "-o", "json")
    assert done.code == 0 and done.json()["state"] == "succeeded" and done.err.count("\n") == 1
    again = site.ctl(cwd, "status", "-w")
    lines = again.err.splitlines()
    assert again.code == 0 and len(lines) == 2 and " succeeded, 2/2 indexes" in lines[1]
    assert "\r" not in again.err + again.out and "\x1b" not in again.err + again.out
