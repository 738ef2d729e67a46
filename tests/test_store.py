"""tokenizer.store on a file system and on a real S3 server, without faults."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from tokenizer.job import Exit
from tokenizer.retry import StoreError
from tokenizer.store import (
    NotFound,
    Skip,
    Stat,
    expand,
    glob_pattern,
    join,
    locate,
    open_store,
    parse_uri,
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


def test_credentials_in_a_uri_are_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="credentials") as caught:
        parse_uri("s3://user:hunter22@bucket/key")
    assert "hunter22" not in str(caught.value)


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
        ("a[!b]c", ["axc"], ["abc", "a/c"]),
        ("[]x]", ["]", "x"], ["[]x]"]),
        ("[^]", ["[^]"], ["x"]),
        ("[!]]", ["x"], ["]"]),
        (r"[\d]", ["d", "\\"], ["1"]),
        ("[[:a]", ["[", ":", "a"], ["b"]),
        ("[a-]", ["a", "-"], ["b"]),
    ],
)
@pytest.mark.filterwarnings("error")
def test_glob(glob: str, yes: list[str], no: list[str]) -> None:
    pattern = glob_pattern(glob)
    assert all(pattern.fullmatch(name) for name in yes) and not any(pattern.fullmatch(name) for name in no)


def test_a_range_that_runs_backwards_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(ValueError, match=r"`\[z-a\]` has the range `z-a`"):
        expand(f"{tmp_path}/[z-a]*")


def test_an_empty_directory_is_told_from_a_misspelt_one(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="an empty directory"):
        expand(str(tmp_path))
    with pytest.raises(NotFound, match="no such file"):
        expand(str(tmp_path / "none"))


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
    fill(root, ["g [v1]/x.jsonl", "g v/y.jsonl"])
    assert keys("g [v1]") == keys("g [v1]/") == ("/g [v1]", ["x.jsonl"])  # of directories too
    assert keys("g [v]/*.jsonl") == ("", ["g v/y.jsonl"])
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


def _overwrite(root: str, number: int) -> None:
    store = open_store(root)
    for _ in range(100):
        assert store.put_bytes("k", f"{number}".encode() * 1000).created


def test_writers_of_one_file_do_not_take_each_other_for_dead(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=_overwrite, args=(str(tmp_path), number)) for number in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0] and os.listdir(tmp_path) == ["k"]


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
