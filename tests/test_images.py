"""Images, really built and run: by buildah or podman, from a base that needs no registry, with pods through podman."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import ctl
from double.api import Double
from double.kubelet import Podman
from job_fixtures import ROOT, contents, write_corpus
from vocab import tiny_dir

from dflashctl.place import release
from tokenizer.store import open_store

pytestmark = pytest.mark.containers
NEVER = {"transformers", "torch", "datasets", "pandas", "typer", "kubernetes", "dflashctl", "dflash", "pytest"}
# runc instead of crun (a hybrid cgroup tree), limits below those of small machines, the host's network
CONTAINERS_CONF = """[containers]
default_ulimits = ["nofile=16384:16384", "nproc=8192:8192"]
netns = "host"
[engine]
runtime = "runc"
events_logger = "file"
cgroup_manager = "cgroupfs"
"""


@pytest.fixture(scope="module", autouse=True)
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Podman as this machine needs it, unless somebody has said how."""
    patch = pytest.MonkeyPatch()
    if "CONTAINERS_CONF" not in os.environ:
        file = tmp_path_factory.mktemp("podman") / "containers.conf"
        file.write_text(CONTAINERS_CONF)
        patch.setenv("CONTAINERS_CONF", str(file))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def built(podman: None) -> str:
    """The tokenizer image, built as `make images` does it; its name."""
    base = run("sh", "tests/local_base.sh").strip()
    run("sh", "images/build.sh", "tokenizer", BASE=base, TOOL="podman")
    return f"localhost/dflash-tokenizer:{release()}"


def run(*argv: str, **env: str) -> str:
    done = subprocess.run(argv, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def inside(image: str, *argv: str, flags: tuple[str, ...] = ()) -> str:
    """What a command prints in a container as a pod would run: no network, read-only root, no capabilities."""
    hardened = ["--network", "none", "--read-only", "--read-only-tmpfs=false", "--cap-drop", "ALL"]
    return run("podman", "run", "--rm", *hardened, *flags, "--entrypoint", argv[0], image, *argv[1:])


def described(image: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(run("podman", "image", "inspect", image))[0]
    return value


def test_the_tokenizer_image_holds_what_it_needs_and_no_more(built: str, capsys: pytest.CaptureFixture[str]) -> None:
    packages = {
        p["name"]: p["version"] for p in json.loads(inside(built, "python", "-m", "pip", "list", "--format=json"))
    }
    with capsys.disabled():
        size = described(built)["Size"] / 2**20
        print(f"\n{built}: {size:.0f} MiB, {', '.join(f'{n} {v}' for n, v in sorted(packages.items()))}")
    assert not {name.lower() for name in packages} & NEVER
    locked = dict(
        re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", (ROOT / "images" / "requirements-tokenizer.txt").read_text(), re.M)
    )
    here = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in packages.items()}
    assert {name: here.get(re.sub(r"[-_.]+", "-", name).lower()) for name in locked} == locked


def test_it_imports_without_anything_outside(built: str) -> None:
    names = [p.stem for p in (ROOT / "tokenizer").glob("*.py") if p.stem not in ("__init__", "__main__")]
    code = "import " + ", ".join(f"tokenizer.{name}" for name in names) + "; print('imported')"
    assert inside(built, "python", "-P", "-c", code) == "imported\n"


def test_it_runs_as_nobody_in_exec_form_with_labels(built: str) -> None:
    config = described(built)["Config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["python", "-P", "-m", "tokenizer"] and config["Cmd"] == ["run"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.version"] == release() and labels["org.opencontainers.image.licenses"]
    assert len(labels["org.opencontainers.image.revision"]) in (len("unknown"), 40)
    assert inside(built, "id", "-u") == "10001\n"


def test_nothing_of_the_builders_machine_stays(built: str) -> None:
    found = inside(built, "sh", "-c", "ls /etc/pip.conf /run/ca.crt /run/wheels/* /root/.cache 2>/dev/null; true")
    assert found == ""


@pytest.mark.s3
def test_end_to_end_through_pods_of_the_image(built: str, s3: str, s3_server: Any, tmp_path: Path, monkeypatch: Any) -> None:  # fmt: skip
    store = open_store(s3)
    for file in sorted(write_corpus(tmp_path / "in", 4, 5).iterdir()):
        store.upload_file(file, f"raw/{file.name}")
    (tmp_path / "dflash.toml").write_text(
        f'backend = "kube"\n[tokenize]\ninput = "{s3}/raw/"\nmodel = "{tiny_dir()}"\nshards = 4\nworkers = 1\n'
        f'image = "{built}"\ns3_secret = "s3"\n[tokenize.env]\nAWS_ENDPOINT_URL_S3 = "{s3_server.endpoint}"\n'
    )
    with Double(tmp_path) as double:
        double.cluster.images[built] = Podman(built)
        double.cluster.secrets["s3"] = {k: v for k, v in s3_server.env().items() if k != "AWS_ENDPOINT_URL_S3"}
        monkeypatch.setenv("KUBECONFIG", str(double.kubeconfig))
        done = ctl(tmp_path, "tokenize", "--out", f"{s3}/out", "--parallelism", "2", "-o", "json", DFLASH_BACKEND="")
        logs = ctl(tmp_path, "logs", f"{s3}/out", "--grep", "committed", DFLASH_BACKEND="")
    assert done.code == 0 and done.json()["rows"] == 20, done.err + logs.out
    assert len(logs.out.splitlines()) == 4
    # this environment and the image have the same locked versions, so their bytes are the same
    local = ctl(tmp_path, "tokenize", "--backend", "local", "--out", f"{s3}/local", "-o", "json")
    assert local.code == 0, local.err
    mine, theirs = (contents(f"{s3}/{name}", "plan.json") for name in ("out", "local"))
    assert [k for k in theirs if mine.get(k) != theirs[k]] == []


@pytest.mark.slow
def test_the_cpu_trainer_image(podman: None, capsys: pytest.CaptureFixture[str]) -> None:
    if not os.environ.get("DFLASH_TRAINER_IMAGE"):
        pytest.skip("slow: set DFLASH_TRAINER_IMAGE=1 to build the CPU variant of the trainer image (1.5 GB)")
    base = run("sh", "tests/local_base.sh").strip()
    run("sh", "images/build.sh", "trainer-cpu", BASE=base, TOOL="podman")
    image = f"localhost/dflash-trainer-cpu:{release()}"
    packages = json.loads(inside(image, "python", "-m", "pip", "list", "--format=json"))
    with capsys.disabled():
        print(f"\n{image}: {described(image)['Size'] / 2**20:.0f} MiB, {len(packages)} packages")
    assert {p["name"] for p in packages} >= {"torch", "transformers", "datasets"}
    assert inside(image, "python", "-P", "-c", "import trainer.job, torch, transformers, datasets; print(1)",
                  flags=("--tmpfs", "/tmp", "--env", "HOME=/tmp")) == "1\n"  # fmt: skip


def test_the_gpu_variant_says_that_it_was_not_built() -> None:
    text = (ROOT / "images" / "trainer.Containerfile").read_text()
    assert "flash-linear-attention" in text and "causal-conv1d" in text and "has not been built" in text
