"""Building images and looking into them, with podman as this machine needs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from job_fixtures import ROOT

from dflashctl.place import release

__all__ = ["podman"]
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


def build(image: str) -> str:
    """Build it as `make images` does, on a base that needs no registry; its name."""
    base = run("sh", "tests/local_base.sh").strip()
    run("sh", "images/build.sh", image, BASE=base, TOOL="podman")
    return f"localhost/dflash-{image}:{release()}"


def run(*argv: str, **env: str) -> str:
    done = subprocess.run(argv, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def inside(image: str, *argv: str, flags: tuple[str, ...] = ()) -> str:
    """What a command prints in a container as a pod would run: no network, read-only root, no capabilities."""
    hardened = ["--network", "none", "--read-only", "--read-only-tmpfs=false", "--cap-drop", "ALL"]
    return run("podman", "run", "--rm", *hardened, *flags, "--entrypoint", argv[0], image, *argv[1:])


def described(image: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(run("podman", "image", "inspect", image))[0]
    return value


def inventory(image: str) -> dict[str, str]:
    """Package -> version of what is installed in it; printed with its size."""
    listed = json.loads(inside(image, "python", "-m", "pip", "list", "--format=json"))
    words = ", ".join(f"{p['name']} {p['version']}" for p in listed)
    print(f"\n{image}: {described(image)['Size'] / 2**20:.0f} MiB, {len(listed)} packages: {words}")
    return {normal(p["name"]): p["version"] for p in listed}


def locked(image: str) -> dict[str, str]:
    """Package -> version of the image's lock."""
    text = (ROOT / "images" / f"requirements-{image}.txt").read_text()
    return {normal(name): version for name, version in re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", text, re.M)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
