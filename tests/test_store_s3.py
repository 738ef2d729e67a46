"""tokenizer.store on a real S3 server: listings, refusals, credentials, threads."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenizer.job import Exit
from tokenizer.store import PIECE, Options, Stat, StoreError, expand, open_store, skip_reason


def fill(root: str, names: list[str]) -> None:
    store = open_store(root)
    for name in names:
        store.put_bytes(name, b"" if name.endswith("/") else b"{}\n")


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


def test_a_stream_runs_ahead_by_a_few_pieces_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """So its memory does not depend on the object's size: 100 pieces, of which one is taken."""
    from tokenizer.s3 import IN_FLIGHT, S3Store

    started: list[int] = []

    def fetch(self: S3Store, key: str, start: int, *_: object) -> tuple[bytes, str]:
        started.append(start)
        return b"x", "e"

    monkeypatch.setattr(S3Store, "_fetch", fetch)
    monkeypatch.setattr(S3Store, "_connection", lambda self: None)
    stream = open_store("s3://b", Options(threads=16)).open_stream("k", "e", 100 * PIECE)
    assert next(stream) == b"x"
    stream.close()  # type: ignore[attr-defined]
    assert set(started) <= set(range(0, IN_FLIGHT * PIECE, PIECE))
    rest = list(open_store("s3://b", Options(threads=16)).open_stream("k", "e", 100 * PIECE))
    assert len(rest) == 100 and set(started) == set(range(0, 100 * PIECE, PIECE))


def test_importing_the_store_loads_no_sdk() -> None:
    code = (
        "import sys, tokenizer.store, tokenizer.files, tokenizer.s3; print({'boto3', 'botocore'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=True
    )
    assert done.stdout.strip() == "set()"
