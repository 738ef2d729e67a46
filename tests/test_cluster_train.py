"""A training on the cluster, as typed: from a dataset on S3 to an export there, through a drain, a kill, a stop, and NaN.

On the double every pod is really the trainer: seven ranks on CPUs. On a real cluster (cluster_fixtures.py) the CPU image
runs, whose name DFLASH_TEST_TRAINER_IMAGE gives, on a node that offers seven nvidia.com/gpu: an extended resource will do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cluster_fixtures import *  # noqa: F403
from cluster_fixtures import SECRET, Site, until
from double.kubelet import Process
from double.state import Node
from job_fixtures import write_corpus
from safetensors.torch import load_file, save_file
from train_runs import target_dir

from dflashctl.place import release
from tokenizer.job import Exit
from tokenizer.store import Store, open_store

pytestmark = pytest.mark.s3
IMAGE = "test.example/dflash-trainer:double"
STEPS = 400  # enough that a drain, a kill and a stop each fall between them on a fast machine, too
TOML = """backend = "kube"
namespace = "{namespace}"

[tokenize]
input = ["{bucket}/raw/"]
out = "{bucket}/dataset"
model = "{model}"
image = "{tokenizer}"
s3_secret = "{secret}"
node = "small"
workers = 1
[tokenize.env]
AWS_ENDPOINT_URL_S3 = "{endpoint}"

[train]
dataset = "{bucket}/dataset"
out = "{bucket}/drafter"
target = "{bucket}/models/Tiny"
image = "{image}"
s3_secret = "{secret}"
steps = {steps}
layers = 2
block_size = 5
anchors = 16
max_length = 96
batch_rows = 4
accumulate = 8
lr = 5e-3
checkpoint_every = "20"
held_out = 0.1
[train.env]
AWS_ENDPOINT_URL_S3 = "{endpoint}"
OMP_NUM_THREADS = "1"

[node.small]
cpu = "500m"
memory = "1Gi"
volumes = {{ scratch = "1Gi" }}

[node.b200]
gpus = 7
cpu = "{cpu}"
memory = "4Gi"
shm = "256Mi"
split = "4+3"
selector = {selector}
volumes = {{ model = "1Gi", data = "1Gi", checkpoints = "1Gi", cache = "1Gi" }}
"""


class Place:
    """A folder with a dflash.toml, the site it means, and the bucket below it."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site, self.folder, self.image = site, folder, ""
        self.store: Store = open_store(site.bucket)

    def ctl(self, *args: str) -> Any:
        return self.site.ctl(self.folder, *args)

    def log(self, pod: dict[str, Any]) -> list[dict[str, Any]]:
        """The JSON lines of a pod so far."""
        lines = self.site.api.lines(f"{self.site.pods}/{pod['metadata']['name']}/log")
        return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}\n")]

    def running(self, run: str, but: str = "") -> dict[str, Any]:
        """The pod of the run once it has logged a step; another one than `but`."""

        def found() -> Any:
            pods = [p for p in self.site.pods_of(run) if (p.get("status") or {}).get("phase") == "Running"]
            others = [p for p in pods if p["metadata"]["name"] != but]
            return next((p for p in others if any(line["event"] == "progress" for line in self.log(p))), None)

        try:
            return dict(until(found, 600))
        except AssertionError:
            said = self.ctl("status", run).out, self.ctl("why", run).out, self.ctl("logs", run, "--no-wait").out[-3000:]
            raise AssertionError("\n".join(said)) from None

    def latest(self, out: str) -> int:
        return int(self.store.get_bytes(f"{out}/latest").decode().strip().removeprefix("step-"))

    def state(self, out: str) -> dict[str, bytes]:
        """What the training came to: everything that a drafter and its resume consist of."""
        names = ("export/model.safetensors", f"checkpoints/step-{STEPS:06d}/state.safetensors")
        return {name: self.store.get_bytes(f"{out}/{name}") for name in names}


def bring(store: Store, folder: Path, prefix: str) -> None:
    for path in sorted(folder.iterdir()):
        store.upload_file(path, f"{prefix}/{path.name}")


@pytest.fixture(scope="module")
def place(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A dataset that the cluster tokenized, a target beside it, and a node of seven GPUs."""
    folder = tmp_path_factory.mktemp("typed")
    given = Place(site, folder)
    bring(given.store, write_corpus(folder / "in", 2, 30), "raw")
    bring(given.store, target_dir(), "models/Tiny")
    labels = {"nvidia.com/gpu.product": "NVIDIA-B200"}
    image = os.environ.get("DFLASH_TEST_TRAINER_IMAGE") or f"localhost/dflash-trainer-cpu:{release()}"
    if site.double:
        site.double.cluster.nodes["gpu-a"] = Node("gpu-a", cpu=64, gpus=7, labels=labels)
        runner = next(iter(site.double.cluster.images.values()))
        site.double.cluster.images[IMAGE] = Process(runner.env)
        image = IMAGE
    text = TOML.format(
        namespace=site.namespace, bucket=site.bucket, model=target_dir(), tokenizer=site.image, image=image, secret=SECRET,
        endpoint=site.pod_env["AWS_ENDPOINT_URL_S3"], steps=STEPS,
        cpu="64" if site.double else "1", selector='{ "nvidia.com/gpu.product" = "NVIDIA-B200" }' if site.double else "{}",
    )  # fmt: skip
    (folder / "dflash.toml").write_text(text)
    given.image = image
    tokenized = given.ctl("tokenize", "--parallelism", "2")
    assert tokenized.code == 0, tokenized.err
    return given


class Told:
    """What was seen of a training: one was left alone, one met everything."""

    run: str
    done: tuple[str, str]
    watched: tuple[str, str, int]
    seen: Any
    block: Any
    logs: dict[str, Any]
    drained: dict[str, Any]
    wide: dict[str, Any]
    killed: list[dict[str, Any]]
    third: list[dict[str, Any]]
    stopped: Any
    saved: int
    resumed: Any
    ended: Any


@pytest.fixture(scope="module")
def undisturbed(place: Place) -> Told:
    told = Told()
    argv, env = place.site.command("train", "--node", "b200")
    process = subprocess.Popen(argv, cwd=place.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def known() -> list[str]:
        assert process.poll() is None, process.communicate()
        return [name for name in place.ctl("ls", "-o", "name").out.split() if name.startswith("trn-")]

    run = until(known)[0]
    told.run = run
    watching, env = place.site.command("status", run, "-w")
    watch = subprocess.Popen(watching, cwd=place.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    place.running(run)
    told.seen = place.ctl("status", run, "-o", "json")
    told.block = place.ctl("status", run)
    told.logs = {role: place.ctl("logs", run, "--role", role) for role in ("target", "drafter", "supervisor")}
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    told.done = (out, err)
    told.watched = (*watch.communicate(timeout=900), watch.returncode)
    return told


def test_train_as_typed_reaches_its_export(place: Place, undisturbed: Told) -> None:
    out, err = undisturbed.done
    assert "succeeded" in out and ["step", str(STEPS), "of", str(STEPS)] in [line.split() for line in out.splitlines()], err
    keys = {stat.key.removeprefix("drafter/") for stat in place.store.list("drafter/")}
    assert {"run.json", "latest", "metrics.jsonl", "provenance.json", "export/config.json", "export/model.safetensors"} <= keys
    assert json.loads(place.store.get_bytes("drafter/provenance.json"))["finished"] is True
    steps = [json.loads(line) for line in place.store.get_bytes("drafter/metrics.jsonl").splitlines()]
    assert [m["step"] for m in steps if "loss" in m] == list(range(1, STEPS + 1))
    again = place.ctl("train", "--node", "b200")
    assert again.code == 0, again.err


def test_the_job_that_ran_is_the_one_of_the_dry_run(place: Place, undisturbed: Told) -> None:
    [job] = place.site.of(undisturbed.run)
    [shown] = yaml.safe_load_all(place.ctl("train", "--node", "b200", "--dry-run=client").out)
    for version in ("1.33", "1.37"):
        kubernetes_validate.validate(shown, version, strict=True)
    sent, dry = (j["spec"]["template"]["spec"]["containers"][0] for j in (job, shown))
    assert (sent["args"], sent["resources"]) == (dry["args"], dry["resources"]) and "--split=4+3" in sent["args"]


def test_status_tells_a_running_training(undisturbed: Told) -> None:
    seen = undisturbed.seen.json()
    assert (seen["kind"], seen["state"], seen["indexes"]["active"]) == ("train", "running", 1), undisturbed.seen.err
    told = seen["training"]
    assert 0 < told["step"] <= STEPS and told["steps"] == STEPS and told["loss"] > 0 and told["tokens_per_s"] > 0
    assert told["eta_s"] is not None and told["target_busy"] >= 0 and told["drafter_busy"] >= 0
    lines = {line.split()[0] for line in undisturbed.block.out.splitlines() if line.split()}
    assert {"step", "loss", "speed", "busy", "ETA"} <= lines or "succeeded" in undisturbed.block.out


def test_a_training_is_watched_to_its_end(undisturbed: Told) -> None:
    out, err, code = undisturbed.watched
    assert code == 0 and ["step", str(STEPS), "of", str(STEPS)] in [line.split() for line in out.splitlines()], err
    assert "running" in err and "succeeded" in err and "\r" not in err  # whole lines where there is no terminal


def test_logs_are_those_of_a_role(place: Place, undisturbed: Told) -> None:
    assert {role: done.code for role, done in undisturbed.logs.items()} == dict.fromkeys(undisturbed.logs, 0)
    whole = place.ctl("logs", undisturbed.run).out.splitlines()
    parts = {role: place.ctl("logs", undisturbed.run, "--role", role).out.splitlines() for role in undisturbed.logs}
    assert sorted(line for part in parts.values() for line in part) == sorted(whole)
    supervisor = [json.loads(line) for line in parts["supervisor"] if line.startswith("{")]
    assert {"fetch", "start", "done"} <= {line["event"] for line in supervisor}
    assert any(line["event"] == "start" and (line["targets"], line["drafters"]) == (4, 3) for line in supervisor)
    drafter = [json.loads(line) for line in parts["drafter"] if line.startswith("{")]
    assert {"progress"} <= {line["event"] for line in drafter}
    assert all(line.startswith("[target:") for line in parts["target"])
    assert place.ctl("logs", undisturbed.run, "--role", "pilot").code == 2


@pytest.fixture(scope="module")
def disturbed(place: Place, undisturbed: Told) -> Told:
    """A drain, a kill of all processes, a stop and a resume, each in the middle of the steps."""
    told = Told()
    begun = place.ctl("train", "--node", "b200", "--out", f"{place.site.bucket}/tossed", "--detach", "-o", "name")
    assert begun.code == 0, begun.err
    told.run = begun.out.strip()
    pod = place.running(told.run)
    place.site.evict(pod)
    double = place.site.double
    second = place.running(told.run, but=pod["metadata"]["name"])
    told.drained = {"saved": place.latest("tossed"), "log": place.log(second)}
    told.wide = place.ctl("status", told.run, "-o", "json").json()
    if double:
        process = double.kubelet.processes[second["metadata"]["uid"]]
        double.cluster.images[IMAGE].kill(second, process, signal.SIGKILL)
        third = place.running(told.run, but=second["metadata"]["name"])
        told.killed = [p for p in place.site.pods_of(told.run) if p["metadata"]["name"] == second["metadata"]["name"]]
        told.third = place.log(third)
    told.stopped = place.ctl("stop", told.run, "-o", "json")
    told.saved = place.latest("tossed")
    told.resumed = place.ctl("resume", told.run, "--detach")
    assert told.resumed.code == 0, told.resumed.err

    def finished() -> Any:
        done = place.ctl("wait", told.run, "--timeout", "2m", "-o", "json")
        return None if done.code == 124 else done

    told.ended = until(finished, 1800)
    return told


def test_a_drained_node_costs_no_step_and_no_bit(place: Place, disturbed: Told) -> None:
    saved, log = disturbed.drained["saved"], disturbed.drained["log"]
    goes_on = [line for line in log if "goes on after step" in str(line.get("message"))]
    assert goes_on and "0 steps are done again" in goes_on[0]["message"], log  # saved inside the grace period
    assert 1 <= saved < STEPS and disturbed.wide["state"] == "running"
    assert disturbed.ended.code == 0 and disturbed.ended.json()["state"] == "succeeded", disturbed.ended.err
    assert place.state("tossed") == place.state("drafter")
    steps = [json.loads(line) for line in place.store.get_bytes("tossed/metrics.jsonl").splitlines()]
    assert [m["step"] for m in steps if "loss" in m] == list(range(1, STEPS + 1))


def test_a_pod_that_was_killed_is_tried_again(place: Place, disturbed: Told) -> None:
    place.site.needs_double("kill a container's processes")
    [pod] = disturbed.killed
    [ended] = [s["state"]["terminated"] for s in pod["status"]["containerStatuses"]]
    assert ended["exitCode"] == 137
    assert any("goes on after step" in str(line.get("message")) for line in disturbed.third)


def test_a_stop_saves_and_a_resume_goes_on(disturbed: Told) -> None:
    assert disturbed.stopped.code == 0 and disturbed.stopped.json()["state"] == "suspended", disturbed.stopped.err
    assert 1 <= disturbed.saved < STEPS


def test_a_loss_that_is_no_number_ends_the_run_and_why_says_so(place: Place, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    for path in target_dir().iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][:] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    bring(place.store, folder, "models/Broken")
    done = place.ctl("train", "--node", "b200", "--target", f"{place.site.bucket}/models/Broken", "--split", "1+1",
                     "--out", f"{place.site.bucket}/broken", "-o", "json")  # fmt: skip
    assert done.code == 3 and done.json()["state"] == "failed", done.err
    run = done.json()["run"]
    [job] = place.site.of(run)
    [failed] = [c for c in job["status"]["conditions"] if c["type"] == "Failed"]
    assert failed["reason"] == "PodFailurePolicy" and f"exit code {int(Exit.DIVERGED)}" in failed["message"]
    assert len(place.site.pods_of(run)) <= 1  # not tried again
    causes = place.ctl("why", run, "-o", "json").json()["causes"]
    assert any(str(int(Exit.DIVERGED)) in c["message"] and "--lr" in c["remedy"] for c in causes), causes
    assert any("loss nan" in c["message"] for c in causes), causes  # the pod's own words
    assert place.ctl("wait", run, "--timeout", "1m").code == 3
    for pod in place.site.pods_of(run):
        place.site.delete_pod(pod)
    until(lambda: not place.site.pods_of(run))
    kept = place.ctl("logs", run)
    assert kept.code == 0 and f'"exit": {int(Exit.DIVERGED)}' in kept.out, kept.err
    again = place.ctl("resume", run, "--detach", "--image", f"{place.image}-other")
    assert again.code == 0, again.err
    [job] = place.site.of(run)
    assert job["metadata"]["name"] == f"{run}-r2"  # the run keeps its name, its next Job has another image
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == f"{place.image}-other"
    until(lambda: place.ctl("status", run, "-o", "json").json()["state"] == "stuck")
    assert place.ctl("rm", run).code == 0 and place.site.of(run) == []


def test_once_the_job_is_gone_out_tells(place: Place, undisturbed: Told) -> None:
    """What the time to live of the Job does, by hand."""
    [job] = place.site.of(undisturbed.run)
    place.site.api.delete(f"{place.site.jobs}/{job['metadata']['name']}", job["metadata"]["uid"])
    until(lambda: not place.site.of(undisturbed.run))
    for reference in (undisturbed.run, f"{place.site.bucket}/drafter"):
        seen = place.ctl("status", reference, "-o", "json")
        assert seen.code == 0 and seen.json()["state"] == "succeeded", seen.err
        assert seen.json()["training"]["step"] == STEPS
    assert place.ctl("wait", undisturbed.run, "--timeout", "1m").code == 0
