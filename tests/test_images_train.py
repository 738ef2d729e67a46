"""The CPU variant of the trainer image, really built, and a training in its pods that a drain moves to another one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import ctl
from cluster_fixtures import until
from double.api import Double
from double.kubelet import Podman, disrupt
from double.state import Node
from image_fixtures import *  # noqa: F403
from image_fixtures import build, described, inside, inventory, locked
from job_fixtures import ROOT
from train_fixtures import random_rows, write_dataset
from train_runs import target_dir

from tokenizer.store import open_store

pytestmark = pytest.mark.containers
#: What a pod gives it beside the image: a place for files and a home.
WRITABLE = ("--tmpfs", "/tmp", "--env", "HOME=/tmp")


@pytest.fixture(scope="module")
def built(podman: None) -> str:
    """The image, built as `make images IMAGES=trainer-cpu` does it; its name."""
    return build("trainer-cpu")


def test_the_trainer_image_holds_what_was_locked(built: str, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        packages = inventory(built)
    assert {name: packages.get(name) for name in locked("trainer")} == locked("trainer")
    [pin] = re.findall(r"^TORCH=(.*)", (ROOT / "images" / "versions.env").read_text(), re.M)
    assert packages["torch"].partition("+")[0] == pin
    assert not [name for name in packages if name.startswith("nvidia-") or name in ("kubernetes", "dflashctl")]


def test_it_imports_without_anything_outside(built: str) -> None:
    names = [p.stem for p in (ROOT / "trainer").glob("*.py") if p.stem not in ("__init__", "__main__")]
    code = "import " + ", ".join(f"trainer.{name}" for name in names) + "; print('imported')"
    assert inside(built, "python", "-P", "-c", code, flags=WRITABLE).splitlines()[-1] == "imported"


def test_it_runs_as_nobody_in_exec_form_with_labels(built: str) -> None:
    config = described(built)["Config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["python", "-P", "-m", "trainer"] and config["Cmd"] == ["train"]
    assert config["Labels"]["org.opencontainers.image.title"] == "dflash trainer (cpu)"
    found = inside(built, "sh", "-c", "ls /etc/pip.conf /run/ca.crt /run/wheels/* /root/.cache 2>/dev/null; true")
    assert found == ""


@pytest.mark.s3
def test_a_training_in_its_pods_survives_a_drain(built: str, s3: str, s3_server: Any, tmp_path: Path, monkeypatch: Any) -> None:  # fmt: skip
    store = open_store(s3)
    for folder, prefix in ((write_dataset(tmp_path / "data", random_rows(60)), "data"), (target_dir(), "Tiny")):
        for path in folder.iterdir():
            store.upload_file(path, f"{prefix}/{path.name}")
    (tmp_path / "dflash.toml").write_text(
        f'backend = "kube"\n[train]\ndataset = "{s3}/data"\nout = "{s3}/out"\ntarget = "{s3}/Tiny"\nimage = "{built}"\n'
        f's3_secret = "s3"\nsteps = 60\nlayers = 2\nblock_size = 5\nanchors = 8\nmax_length = 48\nbatch_rows = 2\n'
        f'accumulate = 4\ncheckpoint_every = "20"\n[train.env]\nAWS_ENDPOINT_URL_S3 = "{s3_server.endpoint}"\n'
        'OMP_NUM_THREADS = "1"\n[node.b200]\ngpus = 2\ncpu = "2"\nmemory = "4Gi"\nshm = "256Mi"\nsplit = "1+1"\n'
        'volumes = { model = "1Gi", data = "1Gi", checkpoints = "1Gi", cache = "1Gi" }\n'
    )
    with Double(tmp_path, [Node(gpus=7)]) as double:
        double.cluster.images[built] = Podman(built)
        double.cluster.secrets["s3"] = {k: v for k, v in s3_server.env().items() if k != "AWS_ENDPOINT_URL_S3"}
        monkeypatch.setenv("KUBECONFIG", str(double.kubeconfig))
        begun = ctl(tmp_path, "train", "--node", "b200", "--detach", "-o", "name", DFLASH_BACKEND="")
        assert begun.code == 0, begun.err
        run = begun.out.strip()

        def stepped() -> Any:
            live = {p["metadata"]["name"]: p for p in double.cluster.list("pods") if p["status"]["phase"] == "Running"}
            logs = {name: double.kubelet.logs[name].read_text() for name in live if name in double.kubelet.logs}
            return next((live[name] for name, text in logs.items() if '"event": "progress"' in text), None)

        pod = until(stepped, 600)
        disrupt(double.cluster, double.kubelet, double.cluster.get("pods", "dflash", pod["metadata"]["name"]))

        def finished() -> Any:
            done = ctl(tmp_path, "wait", run, "--timeout", "2m", "-o", "json", DFLASH_BACKEND="")
            return None if done.code == 124 else done

        done = until(finished, 1800)
        logs = ctl(tmp_path, "logs", run, DFLASH_BACKEND="")
        drained = double.kubelet.logs[pod["metadata"]["name"]].read_text()
    assert done.code == 0 and done.json()["training"]["step"] == 60, done.err + logs.out
    assert '"event": "stopped", "exit": 143' in drained, drained
    assert "goes on after step" in logs.out
    assert {"export/config.json", "export/model.safetensors"} <= {stat.key for stat in open_store(f"{s3}/out").list()}
