"""The store on a file system: conditions, links, killed writers, full disks; and patience without a clock."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tokenizer import files
from tokenizer.job import Exit
from tokenizer.retry import Patience, StoreError, diagnose
from tokenizer.store import (
    Store,
    expand,
    open_store,
)

# -- files


def test_an_etag_changes_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")
    os.utime(path, ns=(5, 5))
    store = open_store(str(tmp_path))
    etag = store.stat("a").etag  # type: ignore[union-attr]
    assert store.stat("a").etag == etag  # type: ignore[union-attr]
    path.write_bytes(b"two")
    assert store.stat("a").etag != etag  # type: ignore[union-attr]
    (tmp_path / "b").write_bytes(b"one")
    os.utime(tmp_path / "b", ns=(5, 5))
    assert store.stat("b").etag != etag  # type: ignore[union-attr]


def test_a_file_written_to_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(9 << 20))
    stream = open_store(str(tmp_path)).open_stream("a")
    next(stream)
    with (tmp_path / "a").open("ab") as file:
        file.write(b"more")
    with pytest.raises(StoreError, match="changed"):
        list(stream)


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.jsonl").write_bytes(b"{}")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "in" / "b.jsonl").symlink_to(tmp_path / "real" / "a.jsonl")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "broken.jsonl").symlink_to(tmp_path / "gone")
    (tmp_path / "in" / "itself.jsonl").symlink_to("itself.jsonl")
    found = expand(str(tmp_path / "in"))
    assert [o.key for o in found.objects] == ["b.jsonl", "link/a.jsonl"]
    assert found.skipped_by_reason() == {"broken_link": 2}


def test_pipes_are_left_out_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")
    (tmp_path / "a.jsonl").write_bytes(b"{}")
    for uri in (str(tmp_path), f"{tmp_path}/*.jsonl"):
        found = expand(uri)
        assert [o.key for o in found.objects] == ["a.jsonl"] and found.skipped_by_reason() == {"pipe_or_device": 1}
    assert expand(str(tmp_path / "p.jsonl")).skipped_by_reason() == {"pipe_or_device": 1}


def test_what_a_killed_writer_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    code = f"""
import os, sys
from tokenizer.store import open_store
from tokenizer import files
def stop(*_):
    print("writing", flush=True)
    sys.stdin.read()
files.os.fsync = stop
open_store({str(tmp_path)!r}).put_bytes("a", bytes(1000))
"""
    writer = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parent.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout and writer.stdout.readline() == b"writing\n"
    store = open_store(str(tmp_path))
    store.put_bytes("a", b"one")
    store.put_bytes("b", b"two")
    assert len(os.listdir(tmp_path)) == 3  # the unfinished file is still in use
    assert [stat.key for stat in store.list()] == ["a", "b"]
    writer.kill()
    writer.communicate()
    store.put_bytes("b", b"two")
    assert len(os.listdir(tmp_path)) == 3
    store.put_bytes("a", b"three")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_new_files_follow_the_umask(tmp_path: Path) -> None:
    open_store(str(tmp_path)).put_bytes("a", b"")
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_without_hard_links_conditions_still_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_link)
    store = open_store(str(tmp_path))
    assert store.put_bytes("a", b"one", if_none_match=True).created
    monkeypatch.setattr(os.path, "lexists", lambda _: False)  # as if it came in between
    assert not store.put_bytes("a", b"two", if_none_match=True).created
    assert store.get_bytes("a") == b"one" and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("fails", ["fsync", "link"])
def test_a_full_disk_has_its_code_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, fails, full)
    with pytest.raises(StoreError) as error:
        open_store(str(tmp_path)).put_bytes("d/a", b"one", if_none_match=True)
    assert error.value.code is Exit.DISK_FULL and str(tmp_path / "d" / "a") in error.value.message
    assert os.listdir(tmp_path / "d") == []


def test_no_permission_is_said_with_the_path() -> None:
    """In a child that gives up root, which nothing is refused to."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        locked = os.path.join(folder, "locked")
        os.mkdir(locked)
        code = f"""
import os
import tokenizer.files
from tokenizer.store import StoreError, expand, open_store
os.chmod({locked!r}, 0)
if os.geteuid() == 0:
    os.setuid(65534)
for work in (lambda: expand({locked!r}), lambda: open_store({locked!r}).put_bytes("b", b"")):
    try:
        work()
    except StoreError as error:
        print(error.kind, error.message)
"""
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=True
        )
        os.chmod(locked, 0o755)
    assert done.stdout.count(f"denied {locked}") == 2, done.stdout


def test_keys_stay_below_the_root(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "root"))
    for key in ("../a", "/etc/passwd", ""):
        with pytest.raises(ValueError, match="not a key"):
            store.put_bytes(key, b"")


# -- retries, without a clock of their own


def test_patience_is_full_jitter_with_an_end() -> None:
    now, drawn = [100.0], iter([1.0, 0.5, 0.0, 1.0, 1.0, 1.0])
    patience = Patience(10, clock=lambda: now[0], rand=lambda: next(drawn))
    assert patience.next_wait(0) is None
    now[0] = 200.0  # however long the first try took: time runs from its failure
    assert [patience.next_wait() for _ in range(4)] == [0.2, 0.2, 0.0, 1.6]
    now[0] = 209.5
    assert patience.next_wait() == 0.5  # never beyond the end
    now[0] = 210.0
    assert patience.next_wait() is None
    patience.progress()
    assert patience.next_wait() == 0.2


def test_what_is_no_fault_of_the_store_is_left_alone() -> None:
    assert diagnose(KeyError("x")) is None and diagnose(ValueError("x")) is None
    assert diagnose(ConnectionResetError()) == ("unreachable", "connection reset")


def test_both_kinds_are_stores(tmp_path: Path) -> None:
    assert isinstance(open_store(str(tmp_path)), Store) and isinstance(open_store("s3://b/p"), Store)
