"""Images, really built and run: by buildah or podman, from a base that needs no registry, with pods through podman."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import ctl
from double.api import Double
from double.kubelet import Podman
from image_fixtures import *  # noqa: F403
from image_fixtures import build, described, inside, inventory, locked
from job_fixtures import ROOT, contents, write_corpus
from vocab import tiny_dir

from dflashctl.place import release
from tokenizer.store import open_store

pytestmark = pytest.mark.containers
NEVER = {"transformers", "torch", "datasets", "pandas", "typer", "kubernetes", "dflashctl", "dflash", "pytest"}


@pytest.fixture(scope="module")
def built(podman: None) -> str:
    """The tokenizer image, built as `make images` does it; its name."""
    return build("tokenizer")


def test_the_tokenizer_image_holds_what_it_needs_and_no_more(built: str, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        packages = inventory(built)
    assert not set(packages) & NEVER
    assert {name: packages.get(name) for name in locked("tokenizer")} == locked("tokenizer")


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


def test_the_gpu_variant_says_that_it_was_not_built() -> None:
    for name in ("trainer.Containerfile", "README.md"):
        text = (ROOT / "images" / name).read_text()
        assert "flash-linear-attention" in text and "causal-conv1d" in text and "not been built" in text
