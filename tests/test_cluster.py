"""The cluster end to end: commands as typed, through HTTP, pods and S3 and back; on the double or on a real cluster."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_fixtures import *  # noqa: F403
from cluster_fixtures import SECRET, Site, until
from job_fixtures import contents, write_corpus

from tokenizer.job import Exit
from tokenizer.store import open_store

pytestmark = pytest.mark.s3
MINE = {"app.kubernetes.io/managed-by": "dflashctl", "app.kubernetes.io/component": "train"}
INDEXES, OOM, BAD = 64, 3, 5
STATUS = ["schema", "run", "kind", "state", "reason", "queue", "indexes", "rows", "tokens"]


def upload(site: Site, folder: Path, prefix: str, files: int, lines: int) -> str:
    """files x lines good rows below a prefix of the bucket; its URI."""
    store = open_store(site.bucket)
    for file in sorted(write_corpus(folder, files, lines).iterdir()):
        store.upload_file(file, f"{prefix}/{file.name}")
    return f"{site.bucket}/{prefix}/"


class Story:
    """What happened to one run of 64 indexes, step by step."""

    cwd: Path
    raw: str
    out: str
    typo: Any
    failed: Any
    mended: Any
    run: str
    deleted: list[str]


@pytest.fixture(scope="module")
def story(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """An image that is not there; then one index killed for memory, a pod deleted by hand, a file that is none."""
    told = Story()
    told.raw = upload(site, tmp_path_factory.mktemp("corpus"), "raw", INDEXES, 3)
    store = open_store(site.bucket)
    bad = f"raw/part-{BAD:03d}.jsonl"
    good = store.get_bytes(bad)
    store.put_bytes(bad, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    told.out = f"{site.bucket}/out"
    told.cwd = site.settings(input=[told.raw], out=told.out, shards=INDEXES, image=f"{site.image}-typo")
    told.typo = site.ctl(told.cwd, "tokenize", "--parallelism", "16", "-o", "json")
    told.run = told.typo.json()["run"]
    if site.double:
        site.double.cluster.oom.add((f"{told.run}-r2", OOM))
    told.deleted = []
    hand = threading.Thread(target=_delete_one, args=(site, told))
    hand.start()
    told.failed = site.ctl(told.cwd, "resume", "--image", site.image, "-o", "json")
    hand.join()
    told.status = site.ctl(told.cwd, "status", "-o", "json")
    told.wide = site.ctl(told.cwd, "status", "-o", "wide")
    told.why = site.ctl(told.cwd, "why", "-o", "json")
    told.bundle = site.ctl(told.cwd, "why", "--bundle")
    told.pods = site.pods_of(told.run)
    told.logs = site.ctl(told.cwd, "logs", "--failed")
    for pod in told.pods:
        if pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] == str(BAD):
            site.delete_pod(pod)
    until(lambda: not any(_index(p) == BAD for p in site.pods_of(told.run)))
    told.kept = site.ctl(told.cwd, "logs", "--failed")
    store.put_bytes(bad, good)
    told.mended = site.ctl(told.cwd, "resume", "-o", "json")
    return told


def _index(pod: dict[str, Any]) -> int:
    return int(pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"])


def _delete_one(site: Site, told: Story) -> None:
    """By hand, one pod of the second Job while it runs, neither the bad one nor the one without memory."""

    def running() -> Any:
        return [
            p for p in site.pods_of(told.run)
            if p["metadata"]["labels"]["batch.kubernetes.io/job-name"] == f"{told.run}-r2"
            and (p.get("status") or {}).get("phase") == "Running" and _index(p) not in (OOM, BAD)
        ]  # fmt: skip

    pod = until(running)[0]
    told.deleted.append(pod["metadata"]["name"])
    site.delete_pod(pod)


def test_an_image_that_is_not_there_is_stuck_and_says_so(story: Story) -> None:
    assert story.typo.code == 3 and story.typo.json()["state"] == "stuck"
    assert "ErrImage" in story.typo.err or "ImagePullBackOff" in story.typo.err
    assert story.typo.err.splitlines()[0].startswith("context ") and ", namespace " in story.typo.err.splitlines()[0]
    assert "may mean another image" in story.typo.err


def test_a_bad_file_fails_its_index_alone(site: Site, story: Story) -> None:
    assert story.failed.code == 3, story.failed.err
    assert story.failed.json()["state"] == "failed"
    assert story.failed.json()["rows"] == (INDEXES - 1) * 3
    seen = story.status.json()
    assert list(seen) == STATUS and seen["schema"] == "dflash.status/1"
    assert (seen["run"], seen["kind"], seen["state"], seen["queue"]) == (story.run, "tokenize", "failed", "")
    assert seen["reason"] == "FailedIndexes"
    assert seen["indexes"] == {"total": INDEXES, "succeeded": INDEXES - 1, "active": 0, "failed": [BAD]}
    assert (
        story.status.code == 0 and site.ctl(story.cwd, "wait", story.run, "--timeout", "9s").code == 0
    )  # mended since


def test_the_causes_name_the_file_and_the_remedy(story: Story) -> None:
    causes = story.why.json()["causes"]
    cause = next(c for c in causes if c["kind"] == f"Exit{int(Exit.DATA)}")
    assert (
        cause["indexes"] == [BAD] and f"part-{BAD:03d}.jsonl" in cause["message"] and "--skip-file" in cause["remedy"]
    )
    bundle = json.loads((story.cwd / f"{story.run}-bundle.json").read_text())
    assert bundle["objects"]["job"]["metadata"]["name"] == f"{story.run}-r2" and bundle["objects"]["pods"]


def test_the_pod_that_was_deleted_and_the_one_without_memory_ran_again(site: Site, story: Story) -> None:
    assert story.deleted and story.failed.json()["rows"] == (INDEXES - 1) * 3
    if site.double is None:
        pytest.skip("a real cluster does not kill for memory on order")
    killed = [p for p in story.pods if _index(p) == OOM]
    ends = [p["status"]["containerStatuses"][0]["state"]["terminated"]["reason"] for p in killed]
    assert sorted(ends) == ["Completed", "OOMKilled"]
    lines = [line.split() for line in story.wide.out.splitlines()]
    header = next(line for line in lines if line[:1] == ["index"])
    row = dict(zip(header, next(line for line in lines if line[:1] == [str(OOM)]), strict=False))
    assert (row["state"], row["try"]) == ("succeeded", "2")


def test_logs_of_the_failed_come_from_the_pod_and_from_out_once_it_is_gone(story: Story) -> None:
    for shown in (story.logs, story.kept):
        assert shown.code == 0 and f"part-{BAD:03d}.jsonl" in shown.out, shown.err
        assert {json.loads(line).get("index", BAD) for line in shown.out.splitlines()} == {BAD}


def test_mended_it_is_the_local_backends_bytes(site: Site, story: Story) -> None:
    assert story.mended.code == 0, story.mended.err
    assert story.mended.json()["rows"] == INDEXES * 3 and f"part-{BAD:03d}.jsonl" in story.mended.err
    assert [j["metadata"]["name"] for j in site.of(story.run)] == [f"{story.run}-r3"]
    assert site.of(story.run)[0]["metadata"]["annotations"]["dflashctl/indexes"] == str(BAD)
    local = f"{site.bucket}/local"
    done = site.ctl(story.cwd, "tokenize", "--backend", "local", "--out", local, "--parallelism", "2", "-o", "json")
    assert done.code == 0 and done.err.startswith("backend local"), done.err
    theirs, mine = contents(local, "plan.json"), contents(story.out, "plan.json")
    assert mine.keys() == theirs.keys() and len([k for k in mine if k.startswith("data-")]) == INDEXES
    assert [k for k in mine if mine[k] != theirs[k]] == []


def test_the_same_again_is_unchanged(site: Site, story: Story) -> None:
    again = site.ctl(story.cwd, "tokenize", "-o", "json")
    assert again.code == 0 and "unchanged" in again.err and again.json()["rows"] == INDEXES * 3
    assert [r["run"] for r in site.ctl(story.cwd, "ls", "-o", "json").json()["runs"]][:1] == [story.run]


def test_no_secret_is_anywhere(site: Site, story: Story, s3_server: Any) -> None:
    marker = s3_server.env()["AWS_SECRET_ACCESS_KEY"]
    rendered = site.ctl(story.cwd, "tokenize", "--dry-run=client").out
    assert f"name: {SECRET}" in rendered
    said = [d.out + d.err for d in (story.typo, story.failed, story.mended, story.logs, story.why, story.bundle)]
    shown = [rendered, json.dumps(site.of(story.run)), json.dumps(story.pods), *said]
    shown += [path.read_text() for path in story.cwd.rglob("*") if path.is_file()]
    if site.double:
        shown += [path.read_text(errors="replace") for path in site.double.kubelet.folder.rglob("log")]
    shown += [
        open_store(story.out).get_bytes(s.key).decode("utf-8", "replace") for s in open_store(story.out).list("runs/")
    ]
    assert not [text for text in shown if marker in text]
    argv = site.ctl(story.cwd, "tokenize", "--env", f"AWS_SECRET_ACCESS_KEY={marker}", "--dry-run=client")
    assert argv.code == 2 and marker not in argv.err and "--s3-secret" in argv.err


# ---- as typed


def test_tokenize_exactly_as_typed(site: Site, tmp_path: Path) -> None:
    raw = upload(site, tmp_path / "in", "typed", 3, 4)
    cwd = site.settings(input=[raw], out=f"{site.bucket}/typed-out")
    done = site.ctl(cwd, "tokenize", "--parallelism", "64")
    assert done.code == 0, done.err
    assert "parallelism 64 is clamped to the 1 shard" in done.err and "12" in done.out
    assert site.ctl(cwd, "status", "-o", "json").json()["state"] == "succeeded"
    assert site.ctl(cwd, "wait", "--timeout", "9s").code == 0
    followed = site.ctl(cwd, "logs", "-f", "--grep", "committed")
    assert followed.code == 0 and followed.out.count("committed") == 1


def test_dry_runs_print_what_is_sent_and_send_nothing(site: Site, root: Path, tmp_path: Path) -> None:
    example = (root / "dflash.example.toml").read_text()
    (tmp_path / "dflash.toml").write_text(example)
    away = {"KUBECONFIG": str(tmp_path / "none"), "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}
    train = site.ctl(tmp_path, "train", "--node", "b200", "--dry-run=client", **away)
    assert train.code == 0, train.err
    [job] = yaml.safe_load_all(train.out)
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "7" and "--split=4+3" in container["args"]
    first, second = (
        site.ctl(
            tmp_path,
            "tokenize",
            "--backend",
            "kube",
            "--parallelism",
            "64",
            "--shards",
            "64",
            "--dry-run=client",
            **away,
        )
        for _ in range(2)
    )
    assert first.code == 0 and first.out == second.out, first.err
    [job] = yaml.safe_load_all(first.out)
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["maxFailedIndexes"]) == (64, 64, 4)
    assert site.ctl(tmp_path, "train", "--node", "b200", **away).code == 4  # no cluster to send it to
    assert site.ctl(tmp_path, "train", "--node", "b300", "--dry-run", **away).code == 2


def test_the_dry_run_is_the_job_that_is_sent(site: Site, tmp_path: Path) -> None:
    raw = upload(site, tmp_path / "in", "dry", 2, 4)
    cwd = site.settings(input=[raw], out=f"{site.bucket}/dry-out", shards=2)
    before = site.api.items(site.jobs)
    [shown] = yaml.safe_load_all(site.ctl(cwd, "tokenize", "--dry-run=client").out)
    server = site.ctl(cwd, "tokenize", "--dry-run=server")
    assert server.code == 0 and [shown] == list(yaml.safe_load_all(server.out)), server.err
    refused = site.ctl(cwd, "tokenize", "--set", "spec.backoffLimitPerIndex=many", "--dry-run=server")
    assert refused.code == 2 and "backoffLimitPerIndex" in refused.err
    assert [j["metadata"]["name"] for j in site.api.items(site.jobs)] == [j["metadata"]["name"] for j in before]
    assert open_store(f"{site.bucket}/dry-out").stat("plan.json") is None
    assert site.ctl(cwd, "tokenize").code == 0
    [sent] = site.of(shown["metadata"]["name"])
    assert sent["metadata"]["annotations"].items() >= shown["metadata"]["annotations"].items()
    assert (
        sent["spec"]["template"]["spec"]["containers"][0]["args"]
        == shown["spec"]["template"]["spec"]["containers"][0]["args"]
    )


def test_doctor_asks_the_cluster(site: Site, tmp_path: Path) -> None:
    raw = upload(site, tmp_path / "in", "doctor", 1, 2)
    cwd = site.settings(input=[raw], out=f"{site.bucket}/doctor-out")
    well = site.ctl(cwd, "doctor", "-o", "json")
    assert well.code == 0 and well.json()["checks"][-1]["detail"] == "the API server would take it", well.out
    (cwd / "dflash.toml").write_text((cwd / "dflash.toml").read_text().replace("image =", "# image ="))
    ill = site.ctl(cwd, "doctor", "-o", "json")
    assert ill.code == 4 and [c["name"] for c in ill.json()["checks"] if c["state"] == "failed"] == ["job"]
    assert site.ctl(cwd, "doctor", "--context", "nowhere").code == 4


def test_contexts(site: Site, tmp_path: Path) -> None:
    cwd = site.settings(input=["in"], out="out")
    for verb in (["tokenize"], ["status"], ["rm", "x"], ["stop"]):
        unknown = site.ctl(cwd, *verb, "--context", "nowhere")
        assert unknown.code == 2 and "`nowhere`" in unknown.err and "known are" in unknown.err
    other = site.ctl(cwd, "ls", "-n", "elsewhere")
    assert ", namespace elsewhere" in other.err.splitlines()[0]
    (cwd / "dflash.toml").write_text("")
    assert site.ctl(cwd, "ls").err.startswith("context ")
    assert site.ctl(cwd, "ls", KUBECONFIG=str(tmp_path / "none")).err.startswith("backend local")
    assert site.ctl(cwd, "ls", "--backend", "local").err.startswith("backend local")


# ---- a run that is interfered with


def test_ctrl_c_stop_resume_scale_and_rm(site: Site, tmp_path: Path) -> None:
    raw = upload(site, tmp_path / "in", "steered", 12, 500)
    cwd = site.settings(input=[raw], out=f"{site.bucket}/steered-out", shards=12)
    argv, env = site.command("tokenize", "--parallelism", "1")
    process = subprocess.Popen(argv, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    while " started" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    took = time.monotonic() - asked
    assert process.returncode == 130 and "goes on" in err and out == "", err
    assert took < 1.0
    run = site.ctl(cwd, "ls", "-o", "name").out.split()[0]
    stopped = site.ctl(cwd, "stop", "-o", "json")
    assert stopped.code == 0 and stopped.json()["state"] == "suspended", stopped.err
    assert site.ctl(cwd, "status", "-o", "json").json()["state"] == "suspended"
    scaled = site.ctl(cwd, "scale", run, "--parallelism", "2")
    assert scaled.code == 0 and site.of(run)[0]["spec"]["parallelism"] == 2
    assert site.ctl(cwd, "scale", run, "--parallelism", "0").code == 2
    assert site.ctl(cwd, "wait", "--timeout", "0s").code == 124
    assert not [p for p in site.pods_of(run) if (p.get("status") or {}).get("phase") == "Running"]
    removed = site.ctl(cwd, "rm", run)
    assert removed.code == 0 and site.of(run) == [] and open_store(f"{site.bucket}/steered-out").stat("plan.json")
    gone = site.ctl(cwd, "status", run, "-o", "json")
    assert gone.code == 0 and gone.json()["state"] == "deleted"
    assert site.ctl(cwd, "wait", run, "--timeout", "9s").code == 3
    again = site.ctl(cwd, "tokenize", "--parallelism", "3", "--detach")
    assert again.code == 0, again.err
    attached = site.ctl(cwd, "tokenize", "-o", "json")
    assert attached.code == 0 and attached.json()["rows"] == 6000, attached.err
    assert [j["metadata"]["name"] for j in site.of(run)] == [f"{run}-r2"]


def test_a_suspended_run_goes_on_in_the_same_job(site: Site, tmp_path: Path) -> None:
    raw = upload(site, tmp_path / "in", "paused", 8, 250)
    cwd = site.settings(input=[raw], out=f"{site.bucket}/paused-out", shards=8, parallelism=1)
    assert site.ctl(cwd, "tokenize", "--detach").code == 0
    assert site.ctl(cwd, "stop").code == 0
    run = site.ctl(cwd, "ls", "-o", "name").out.split()[0]
    job = site.of(run)[0]["metadata"]["uid"]
    assert site.ctl(cwd, "scale", run, "--parallelism", "8").code == 0
    resumed = site.ctl(cwd, "resume", "-o", "json")
    assert resumed.code == 0 and resumed.json()["rows"] == 2000, resumed.err
    assert site.of(run)[0]["metadata"]["uid"] == job


def test_a_run_whose_job_is_gone_is_deleted_and_one_that_nobody_knows_is_an_error(site: Site, tmp_path: Path) -> None:
    raw = upload(site, tmp_path / "in", "gone", 2, 2000)
    cwd = site.settings(input=[raw], out=f"{site.bucket}/gone-out", shards=2)
    assert site.ctl(cwd, "tokenize", "--detach", "--image", f"{site.image}-typo").code == 0
    run = site.ctl(cwd, "ls", "-o", "name").out.split()[0]
    early = site.ctl(cwd, "logs", "--no-wait")
    assert early.code == 3 and "has started" in early.err
    until(lambda: site.ctl(cwd, "status", "-o", "json").json()["state"] == "stuck")
    assert site.ctl(cwd, "wait", "--stuck-after", "0s").code == 3
    assert "remedy" in site.ctl(cwd, "why").out and "resume --image" in site.ctl(cwd, "why").out
    [job] = site.of(run)
    site.api.delete(f"{site.jobs}/{run}", job["metadata"]["uid"])
    until(lambda: not site.of(run))
    assert site.ctl(cwd, "status", run, "-o", "json").json()["state"] == "deleted"
    (cwd / "dflash.toml").write_text((cwd / "dflash.toml").read_text().replace("out =", "# out ="))
    assert site.ctl(cwd, "status", run, "-o", "json").json()["state"] == "deleted"  # this folder remembers it
    unknown = site.ctl(cwd, "status", "nobody-knows-it")
    assert unknown.code == 1 and "`nobody-knows-it`" in unknown.err


def test_a_missing_secret_is_named_and_mends_itself(site: Site, tmp_path: Path) -> None:
    raw = upload(site, tmp_path / "in", "late", 1, 2)
    cwd = site.settings(input=[raw], out=f"{site.bucket}/late-out", s3_secret="dflash-test-later")
    first = site.ctl(cwd, "tokenize", "-o", "json")
    assert first.code == 3 and first.json()["state"] == "stuck" and "CreateContainerConfigError" in first.err
    assert 'secret "dflash-test-later" not found' in site.ctl(cwd, "why").out
    site.put_secret("dflash-test-later", site.secret)
    assert site.ctl(cwd, "wait", "--timeout", "2m").code == 0


@pytest.mark.parametrize("account", ["stranger", "reader"])
def test_no_permission_is_preflight_and_nothing_is_written(site: Site, tmp_path: Path, account: str) -> None:
    raw = upload(site, tmp_path / "in", "denied", 1, 2)
    cwd = site.settings(input=[raw], out=f"{site.bucket}/denied-out")
    with site.rights(account) as env:
        denied = site.ctl(cwd, "tokenize", **env)
    assert denied.code == 4 and "Role" in denied.err
    assert open_store(f"{site.bucket}/denied-out").stat("plan.json") is None
