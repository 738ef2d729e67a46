"""tokenizer.store on a file system and on a real S3 server, without faults."""

from __future__ import annotations

import errno
import hashlib
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from s3_fixtures import *  # noqa: F403

from tokenizer import files
from tokenizer.job import Exit
from tokenizer.retry import Patience, StoreError, diagnose
from tokenizer.store import (
    NotFound,
    Options,
    Skip,
    Stat,
    Store,
    expand,
    glob_pattern,
    join,
    locate,
    open_store,
    parse_uri,
    skip_reason,
)

BOTH = ["file", pytest.param("s3", marks=pytest.mark.s3)]


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty root: a directory or a bucket."""
    return str(tmp_path / "root") if request.param == "file" else str(request.getfixturevalue("s3"))


both = pytest.mark.parametrize("root", BOTH, indirect=True)


def fill(root: str, names: list[str], data: bytes = b"{}\n") -> None:
    store = open_store(root)
    for name in names:
        store.put_bytes(name, b"" if name.endswith("/") else data)


# -- names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://b/p/q", ("s3", "b", "p/q")),
        ("s3://b", ("s3", "b", "")),
        ("file:///a/b%20c", ("file", "", "/a/b c")),
        ("file:/a", ("file", "", "/a")),
        ("file://localhost/a", ("file", "", "/a")),
        ("/a/../b", ("file", "", "/b")),
    ],
)
def test_parse_uri(text: str, expected: tuple[str, str, str]) -> None:
    assert tuple(parse_uri(text)) == expected


def test_a_path_without_scheme_is_local() -> None:
    assert parse_uri("bucket/path") == ("file", "", f"{os.getcwd()}/bucket/path")


@pytest.mark.parametrize("text", ["s3://", "s3:///key", "gs://b/k", "file://host/a", "", "s3://b*/k"])
def test_what_is_no_location_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|empty") as error:
        parse_uri(text)
    assert text in str(error.value)


def test_join_and_locate(tmp_path: Path) -> None:
    assert join("s3://b/p", "k/l") == "s3://b/p/k/l" and join("s3://b/p", "") == "s3://b/p"
    store, key = locate(str(tmp_path / "a" / "b.jsonl"))
    assert (store.root, key) == (str(tmp_path / "a"), "b.jsonl")
    assert locate("s3://b/p/k")[1] == "p/k"


@pytest.mark.parametrize(
    ("glob", "yes", "no"),
    [
        ("*.jsonl", ["a.jsonl"], ["d/a.jsonl", "a.json"]),
        ("**/*.jsonl", ["a.jsonl", "d/a.jsonl", "d/e/a.jsonl"], ["a.json"]),
        ("d/**", ["d/a", "d/e/f"], ["a"]),
        ("a?c[0-9]", ["abc1"], ["abbc1", "a/c1", "abcx"]),
        ("[!a]x", ["bx"], ["ax"]),
        ("a+b(*)", ["a+b(1)"], ["aab(1)"]),
    ],
)
def test_glob(glob: str, yes: list[str], no: list[str]) -> None:
    pattern = glob_pattern(glob)
    assert all(pattern.fullmatch(name) for name in yes) and not any(pattern.fullmatch(name) for name in no)


# -- both kinds of store alike


@both
def test_conditions(root: str) -> None:
    store = open_store(root)
    first = store.put_bytes("a/b", b"one", if_none_match=True)
    assert first.created and store.stat("a/b") == Stat("a/b", 3, first.etag)
    assert not store.put_bytes("a/b", b"two", if_none_match=True).created
    assert not store.put_bytes("a/b", b"two", if_match="0" * 32).created
    assert not store.put_bytes("absent", b"two", if_match=first.etag).created
    assert store.get("a/b") == (b"one", first.etag)
    second = store.put_bytes("a/b", b"two", if_match=first.etag)
    assert second.created and second.etag != first.etag
    assert not store.put_bytes("a/b", b"six", if_match=first.etag).created
    assert store.get("a/b") == (b"two", second.etag)
    store.delete("a/b")
    store.delete("a/b")
    assert store.stat("a/b") is None and store.stat("absent") is None
    with pytest.raises(NotFound) as error:
        store.get("a/b")
    assert error.value.code is Exit.DATA and store.uri("a/b") in error.value.message


@both
@pytest.mark.parametrize("size", [0, 8 << 20, 20_000_000])
def test_upload_and_stream(root: str, size: int, tmp_path: Path) -> None:
    data = os.urandom(size)
    source = tmp_path / "source"
    source.write_bytes(data)
    store = open_store(root)
    put = store.upload_file(source, "x/data.bin", if_none_match=True)
    stat = store.stat("x/data.bin")
    assert put.created and stat == Stat("x/data.bin", size, put.etag)
    for pieces in (
        list(store.open_stream("x/data.bin", put.etag, size)),
        list(store.open_stream("x/data.bin")),
    ):
        assert b"".join(pieces) == data
        assert all(0 < len(piece) <= 8 << 20 for piece in pieces)
    assert store.get("x/data.bin") == (data, put.etag)
    assert not store.upload_file(source, "x/data.bin", if_none_match=True).created
    assert not store.upload_file(source, "x/data.bin", if_match="0" * 32).created
    assert store.upload_file(source, "x/data.bin", if_match=put.etag).created
    assert [stat.key for stat in store.list()] == ["x/data.bin"]  # nothing temporary, no half object


@both
@pytest.mark.parametrize("size", [10, 20_000_000])
def test_a_changed_object_names_itself(root: str, size: int) -> None:
    store = open_store(root)
    etag = store.put_bytes("in/a.jsonl", b"a" * size).etag
    stream = store.open_stream("in/a.jsonl", etag, size)
    store.put_bytes("in/a.jsonl", b"b" * size)
    with pytest.raises(StoreError) as error:
        list(stream)
    assert (error.value.kind, error.value.code) == ("changed", Exit.DATA)
    assert store.uri("in/a.jsonl") in error.value.message


@both
def test_a_stream_can_be_left(root: str) -> None:
    store = open_store(root)
    store.put_bytes("a", bytes(30 << 20))
    stream = store.open_stream("a")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert store.get_bytes("a") == bytes(30 << 20)


MIXED = ["b.jsonl", "a.jsonl.gz", "d/c.jsonl.zst", "d/e/f.json", "README.md", "part-00000", "_SUCCESS"]
MIXED += [".hidden.jsonl", ".git/x.jsonl", "t.jsonl.tmp", "_temporary/0/p.jsonl", "z.jsonl~"]
SKIPPED = {"hidden": 2, "marker": 1, "other_format": 2, "temporary": 3, "empty": 1}


@both
def test_expand_a_directory(root: str) -> None:
    fill(root, MIXED)
    fill(root, ["empty.jsonl"], b"")
    for uri in (root, root + "/"):
        listing = expand(uri)
        assert listing.root == root
        assert [o.key for o in listing.objects] == ["a.jsonl.gz", "b.jsonl", "d/c.jsonl.zst", "d/e/f.json"]
        assert listing.skipped_by_reason() == dict(sorted(SKIPPED.items()))
        assert all(o == open_store(root).stat(o.key) for o in listing.objects)
    assert expand(root + "/d").root == root + "/d"
    assert [o.key for o in expand(root + "/d").objects] == ["c.jsonl.zst", "e/f.json"]


@both
def test_expand_a_file_and_globs(root: str) -> None:
    fill(root, [*MIXED, "k[1].jsonl", "k1.jsonl", "d/x.jsonl"])

    def keys(pattern: str) -> tuple[str, list[str]]:
        listing = expand(f"{root}/{pattern}")
        return listing.root.removeprefix(root), [o.key for o in listing.objects]

    assert keys("b.jsonl") == ("", ["b.jsonl"])
    assert keys("d/e/f.json") == ("/d/e", ["f.json"])
    assert keys("README.md") == ("", ["README.md"])  # named, so any name will do
    assert keys("part-*") == ("", ["part-00000"])
    assert keys("d/**/*.json*") == ("/d", ["c.jsonl.zst", "e/f.json", "x.jsonl"])
    assert keys("*/*.jsonl") == ("", ["d/x.jsonl"])
    assert keys("k[1].jsonl") == ("", ["k[1].jsonl"])  # the literal name wins
    assert keys("k[0-9].jsonl") == ("", ["k1.jsonl"])
    assert expand(f"{root}/_SUC*").skipped == [Skip("_SUCCESS", "marker")]
    for absent in ("nothing.jsonl", "x/*.jsonl", "nodir/"):
        with pytest.raises(NotFound) as error:
            expand(f"{root}/{absent}")
        assert f"{root}/{absent}" in error.value.message


@both
def test_list_starts_with(root: str) -> None:
    fill(root, ["commits/00001.json", "commits/00000.json", "commits2/x", "plan.json"])
    store = open_store(root)
    assert [s.key for s in store.list("commits/")] == ["commits/00000.json", "commits/00001.json"]
    assert [s.key for s in store.list("com")] == ["commits/00000.json", "commits/00001.json", "commits2/x"]
    assert [s.key for s in open_store(root + "/commits").list()] == ["00000.json", "00001.json"]
    assert list(store.list("none")) == [] and list(open_store(root + "/none").list()) == []


def _race(root: str, number: int, start: object, out: object) -> None:
    store = open_store(root)
    start.wait()  # type: ignore[attr-defined]
    created = [store.put_bytes(f"k{k}", f"{number}".encode(), if_none_match=True).created for k in range(20)]
    out.put((number, created))  # type: ignore[attr-defined]


@both
def test_if_none_match_has_one_winner_across_processes(root: str) -> None:
    fork = multiprocessing.get_context("fork")
    open_store(root).put_bytes("warm", b"")  # a client in the parent, that no child may use
    start, out = fork.Barrier(4), fork.Queue()
    children = [fork.Process(target=_race, args=(root, number, start, out)) for number in range(4)]
    for child in children:
        child.start()
    results = dict(out.get(timeout=60) for _ in children)
    for child in children:
        child.join()
    store = open_store(root)
    for key in range(20):
        winners = [number for number in results if results[number][key]]
        assert len(winners) == 1 and store.get_bytes(f"k{key}") == str(winners[0]).encode()


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
    assert [o.key for o in expand(str(tmp_path / "in")).objects] == ["b.jsonl", "link/a.jsonl"]


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


# -- S3


@pytest.mark.s3
def test_every_page_is_read(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pages of 3 keys, where a server's are of 1000."""
    from tokenizer.s3 import S3Store

    pages: list[int] = []
    whole = S3Store._page

    def small(self: S3Store, prefix: str, more: dict[str, object]) -> dict[str, object]:
        page = whole(self, prefix, {**more, "MaxKeys": 3})
        pages.append(len(page.get("Contents", ())))
        return page

    monkeypatch.setattr(S3Store, "_page", small)
    names = [f"raw/{n:02}.jsonl" for n in range(8)]
    fill(s3, [*names, "raw/d/"])
    assert [s3 + "/" + name for name in names] == [expand(s3).root + "/" + o.key for o in expand(s3).objects]
    assert len(pages) >= 6 and max(pages) == 3


def test_a_folder_marker_is_skipped_by_name() -> None:
    assert skip_reason(Stat("raw/d/", 0, "e"), named=False) == "folder_marker"
    assert skip_reason(Stat("raw/d_$folder$", 0, "e"), named=True) == "folder_marker"


@pytest.mark.s3
def test_a_prefix_does_not_take_its_neighbour(s3: str) -> None:
    fill(s3, ["raw/a.jsonl", "raw2/b.jsonl"])
    assert [o.key for o in expand(s3 + "/raw").objects] == ["a.jsonl"]


@pytest.mark.s3
@pytest.mark.parametrize("name", ["ü ï/a+b &=?%.jsonl", "a'b\"<c>.jsonl", "tab\tx.jsonl"])
def test_strange_keys(s3: str, name: str) -> None:
    fill(s3, [name])
    (stat,) = open_store(s3).list()
    assert stat.key == name and open_store(s3).get_bytes(name) == b"{}\n"
    assert b"".join(open_store(s3).open_stream(name, stat.etag, stat.size)) == b"{}\n"


def message(error: pytest.ExceptionInfo[StoreError]) -> str:
    return f"{error.value.message}\nhint: {error.value.hint}"


@pytest.mark.s3
def test_refusals_say_what_and_where_but_no_secret(
    s3: str, monkeypatch: pytest.MonkeyPatch, fresh_pod: None, s3_server: object
) -> None:
    from tokenizer import s3 as module

    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    endpoint = os.environ["AWS_ENDPOINT_URL_S3"]

    def attempt(uri: str) -> pytest.ExceptionInfo[StoreError]:
        module._connections.clear()
        with pytest.raises(StoreError) as error:
            expand(uri)
        assert secret not in message(error) and "wrong-secret" not in message(error)
        assert "AKIAWRONG" not in message(error) and error.value.hint
        return error

    missing = attempt("s3://no-such-bucket/raw/a.jsonl")
    assert (missing.value.kind, missing.value.code) == ("bucket", Exit.CONFIG)
    assert "no-such-bucket" in missing.value.message and endpoint in missing.value.message

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    wrong = attempt(s3 + "/raw/a.jsonl")
    assert wrong.value.kind == "credentials" and wrong.value.code is Exit.CONFIG
    assert s3 in wrong.value.message and "env" in wrong.value.message

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAWRONG")
    assert attempt(s3).value.kind == "credentials"

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    none = attempt(s3)
    assert none.value.kind == "credentials" and "no credentials found" in none.value.message

    monkeypatch.setenv("AWS_PROFILE", "absent")
    assert "AWS_PROFILE" in attempt(s3).value.message
    monkeypatch.delenv("AWS_PROFILE")

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "not a url")
    assert attempt(s3).value.kind == "endpoint"


@pytest.fixture
def fresh_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no S3 call had succeeded in this pod yet."""
    from tokenizer import retry

    monkeypatch.setattr(retry, "_succeeded", bytearray(1))


@pytest.mark.s3
def test_after_a_success_refused_credentials_are_worth_another_try(
    s3: str, fresh_pod: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizer import s3 as module

    lines: list[str] = []
    store = open_store(s3, Options(auth_patience=0.3, on_retry=lines.append))
    store.put_bytes("a", b"")
    module._connections.clear()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "rotated")
    with pytest.raises(StoreError) as error:
        store.get("a")
    assert error.value.code is Exit.RETRY and error.value.kind == "credentials"
    assert lines and all("credentials" not in line and s3 + "/a" in line for line in lines)


@pytest.mark.s3
def test_renewed_credentials_are_picked_up_between_tries(
    s3: str, fresh_pod: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = os.environ["AWS_SECRET_ACCESS_KEY"]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "stale")
    store = open_store(s3, Options(auth_patience=60, on_retry=lambda _: os.environ.update(AWS_SECRET_ACCESS_KEY=good)))
    assert store.put_bytes("a", b"x").created and store.retries == 1


@pytest.mark.s3
def test_a_large_tree_needs_no_thread_in_the_parent(s3: str) -> None:
    """get and put of one piece start no thread, so that a parent may fork afterwards."""
    code = f"""
import threading
from tokenizer.store import open_store
store = open_store({s3!r})
store.put_bytes("a", bytes(1 << 20)); store.get("a"); store.stat("a"); list(store.list()); list(store.open_stream("a"))
print(threading.active_count())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=True
    )
    assert done.stdout.strip() == "1"


@pytest.mark.s3
def test_the_pool_is_as_large_as_the_threads(s3: str, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(s3, Options(threads=16))
    data = os.urandom(20 << 20)
    store.put_bytes("a", data)
    with caplog.at_level(logging.WARNING):
        assert hashlib.sha256(b"".join(store.open_stream("a"))).digest() == hashlib.sha256(data).digest()
    assert not caplog.records


def test_importing_the_store_loads_no_sdk() -> None:
    code = (
        "import sys, tokenizer.store, tokenizer.files, tokenizer.s3; print({'boto3', 'botocore'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=True
    )
    assert done.stdout.strip() == "set()"


def test_both_kinds_are_stores(tmp_path: Path) -> None:
    assert isinstance(open_store(str(tmp_path)), Store) and isinstance(open_store("s3://b/p"), Store)
