"""tokenizer.store when the network and the server misbehave, through a proxy in front of a real S3 server."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from faultproxy import FaultProxy

from dflashctl.embedded import EmbeddedS3
from tokenizer import retry
from tokenizer import s3 as s3_module
from tokenizer.job import Exit
from tokenizer.s3 import S3Store
from tokenizer.store import NotFound, Options, StoreError, expand, open_store

pytestmark = pytest.mark.s3
MIB = 1 << 20


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries wait a hundredth of their time; their number and order stay."""
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.002)
    monkeypatch.setattr(retry, "LONGEST_WAIT", 0.2)


# -- B1: what is on the wire

INTEGRITY = re.compile(r"x-amz-checksum-|x-amz-sdk-checksum|x-amz-trailer|aws-chunked|trailer", re.IGNORECASE)


def integrity_headers(proxy: FaultProxy) -> set[str]:
    found: set[str] = set()
    for request in proxy.requests:
        for name, value in request.headers.items():
            found |= {m.group().lower() for m in INTEGRITY.finditer(f"{name}: {value}")}
    return found


def both_uploads(root: str, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(os.urandom(9 * MIB))
    store = open_store(root)
    store.put_bytes("small", b"x" * 1000, if_none_match=True)
    store.upload_file(tmp_path / "large", "large", if_none_match=True)
    assert store.get_bytes("small") == b"x" * 1000
    assert len(store.get_bytes("large")) == 9 * MIB
    store.delete("small")


def test_a_custom_endpoint_gets_no_checksum_it_did_not_ask_for(s3: str, s3_faults: FaultProxy, tmp_path: Path) -> None:
    both_uploads(s3, tmp_path)
    sent = [(r.method, r.path.partition("?")[2].partition("=")[0]) for r in s3_faults.requests]
    assert ("PUT", "") in sent and ("POST", "uploads") in sent and sent.count(("PUT", "uploadId")) == 2
    assert integrity_headers(s3_faults) == set()
    assert all(r.path.startswith("/" + s3.removeprefix("s3://")) for r in s3_faults.requests)  # path-style
    assert all("content-length" in r.headers for r in s3_faults.requests if r.method == "PUT")


def test_checksums_appear_when_the_user_asks(
    s3: str, s3_faults: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    both_uploads(s3, tmp_path)
    assert "x-amz-checksum-" in integrity_headers(s3_faults)


def test_a_profile_may_ask_as_well(
    s3: str, s3_faults: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"[default]\nrequest_checksum_calculation = when_supported\nendpoint_url = {s3_faults.endpoint}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    both_uploads(s3, tmp_path)
    assert "x-amz-checksum-" in integrity_headers(s3_faults)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_a_private_ca(s3: str, s3_server: EmbeddedS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-keyout", key, "-out", cert),
            *("-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    with FaultProxy(s3_server.endpoint, tls=tls) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        for bundle, words in [(None, "not trusted"), ("absent.pem", "does not exist"), ("key.pem", "without certif")]:
            if bundle:
                monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / bundle))
            monkeypatch.setattr(s3_module, "_connections", {})
            with pytest.raises(StoreError, match=words) as error:
                open_store(s3, Options(patience=1)).put_bytes("a", b"x")
            assert error.value.kind == "endpoint" and "AWS_CA_BUNDLE" in error.value.hint
        monkeypatch.setattr(s3_module, "_connections", {})
        monkeypatch.setenv("AWS_CA_BUNDLE", str(cert))
        both_uploads(s3, tmp_path)
        assert integrity_headers(proxy) == set()


# -- B5: bodies that break off


@pytest.mark.parametrize("size", [5 * MIB, 20 * MIB])
def test_a_body_cut_twice_is_resumed_at_its_last_byte(
    s3: str, s3_faults: FaultProxy, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = os.urandom(size)
    store = open_store(s3, Options(threads=4))
    etag = store.put_bytes("raw/a.jsonl", data).etag
    s3_faults.requests.clear()
    for cut in (3 * MIB, MIB):
        s3_faults.plan(f"cut:{cut}")
    with caplog.at_level(logging.WARNING):
        assert b"".join(store.open_stream("raw/a.jsonl", etag, size)) == data
    assert store.retries == 2 and s3_faults.faults["cut"] == 2
    assert len(caplog.records) == 2  # one for each retry, and none about the pool
    assert all(f"{s3}/raw/a.jsonl" in r.message and r.levelname == "WARNING" for r in caplog.records)
    asked = [r.headers["range"] for r in s3_faults.requests]
    starts = sorted(int(re.findall(r"\d+", one)[0]) for one in asked)
    assert len(set(starts)) == len(starts)  # nothing is asked for from the same byte twice
    resumed = [start for start in starts if start % (8 * MIB)]
    assert len(resumed) == 2 and all(start % (8 * MIB) >= MIB for start in resumed)
    assert all(r.headers["if-match"] == f'"{etag}"' for r in s3_faults.requests)


def test_get_is_resumed_and_bound_to_the_first_answer(s3: str, s3_faults: FaultProxy) -> None:
    data = os.urandom(3 * MIB)
    store = open_store(s3)
    etag = store.put_bytes("a", data).etag
    s3_faults.requests.clear()
    s3_faults.plan(f"cut:{MIB}", 1)
    assert store.get("a") == (data, etag)
    first, second = s3_faults.requests
    assert "range" not in first.headers and second.headers["if-match"] == f'"{etag}"'
    assert second.headers["range"].endswith(f"-{len(data) - 1}")


def test_many_cuts_are_outlived(s3: str, s3_faults: FaultProxy) -> None:
    """Each try brings it a bit further."""
    data = os.urandom(4 * MIB)
    store = open_store(s3)
    store.put_bytes("a", data)
    s3_faults.plan(f"cut:{600_000}", 6)
    assert store.get_bytes("a") == data and store.retries == 6


# -- one call in ten fails


@pytest.mark.parametrize("seed", [1, 3])
def test_with_one_call_in_ten_failing_nothing_is_lost(
    s3: str, s3_server: EmbeddedS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    lines: list[str] = []
    with FaultProxy(s3_server.endpoint, seed=seed) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        store = open_store(s3, Options(threads=4, patience=30, on_retry=lines.append))
        proxy.fail = 0.1
        data = {f"d/{n:02}.jsonl": os.urandom(1000 * n) for n in range(40)}
        for key, value in data.items():
            assert store.put_bytes(key, value, if_none_match=True).created
        large = os.urandom(20 * MIB)
        (tmp_path / "large").write_bytes(large)
        put = store.upload_file(tmp_path / "large", "d/large.jsonl", if_none_match=True)
        assert put.created
        assert not store.put_bytes("d/01.jsonl", b"other", if_none_match=True).created
        etag = store.stat("d/02.jsonl").etag  # type: ignore[union-attr]
        assert store.put_bytes("d/02.jsonl", b"new", if_match=etag).created
        data["d/02.jsonl"] = b"new"
        found = expand(s3)
        assert {o.key: o.size for o in found.objects} == {
            **{k: len(v) for k, v in data.items() if v},
            "d/large.jsonl": len(large),
        }
        assert found.skipped_by_reason() == {"empty": 1}
        for stat in found.objects:
            got = hashlib.sha256(b"".join(store.open_stream(stat.key, stat.etag, stat.size))).digest()
            assert got == hashlib.sha256(data.get(stat.key, large)).digest()
        assert sum(proxy.faults.values()) >= 3 and lines


# -- writes whose answer is lost


@pytest.mark.parametrize("condition", ["none_match", "match"])
def test_a_lost_answer_of_our_own_write_is_recognised(s3: str, s3_faults: FaultProxy, condition: str) -> None:
    store = open_store(s3)
    where = {"if_none_match": True}
    if condition == "match":
        where = {"if_match": store.put_bytes("k", b"before").etag}  # type: ignore[dict-item]
    s3_faults.plan("lost", 1, "PUT ")
    put = store.put_bytes("k", b"mine", **where)  # type: ignore[arg-type]
    assert put.created and store.get("k") == (b"mine", put.etag) and store.retries == 1


def test_a_lost_answer_of_a_lost_race_is_a_lost_race(s3: str, s3_faults: FaultProxy) -> None:
    store = open_store(s3)
    store.put_bytes("k", b"theirs")
    s3_faults.plan("lost", 1, "PUT ")
    assert not store.put_bytes("k", b"mine", if_none_match=True).created
    assert store.get_bytes("k") == b"theirs"


def test_a_lost_answer_of_a_completed_upload_is_recognised(s3: str, s3_faults: FaultProxy, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(os.urandom(9 * MIB))
    store = open_store(s3)
    s3_faults.plan("lost", 1, r"POST .*uploadId")
    put = store.upload_file(tmp_path / "f", "k", if_none_match=True)
    assert put.created and store.get("k") == ((tmp_path / "f").read_bytes(), put.etag)


def unfinished(root: str) -> list[object]:
    import boto3

    answer = boto3.client("s3").list_multipart_uploads(Bucket=root.removeprefix("s3://"))
    return list(answer.get("Uploads", []))


def test_a_failed_upload_leaves_nothing(s3: str, s3_faults: FaultProxy, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(os.urandom(20 * MIB))
    store = open_store(s3)
    s3_faults.plan("slowdown", 2, r"PUT .*partNumber=1")
    s3_faults.plan("denied", 1, r"PUT .*partNumber=2")
    with pytest.raises(StoreError) as error:
        store.upload_file(tmp_path / "f", "k", if_none_match=True)
    assert error.value.kind == "denied" and "PUT part 2" in error.value.message
    assert store.stat("k") is None and unfinished(s3) == []


def test_an_upload_that_was_removed_is_no_fault_of_the_data(
    s3: str, s3_faults: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a clean-up rule of the bucket does with uploads that take too long."""
    (tmp_path / "f").write_bytes(os.urandom(9 * MIB))
    complete = S3Store._complete

    def removed(self: S3Store, key: str, upload: str, *rest: object) -> object:
        self._abort(key, upload)
        return complete(self, key, upload, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(S3Store, "_complete", removed)
    with pytest.raises(StoreError) as error:
        open_store(s3).upload_file(tmp_path / "f", "k", if_none_match=True)
    assert error.value.code is Exit.RETRY and f"{s3}/k" in error.value.message


def test_an_upload_that_loses_the_race_leaves_nothing(
    s3: str, s3_faults: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(os.urandom(9 * MIB))
    store = open_store(s3)
    store.put_bytes("k", b"theirs")
    sent = len(s3_faults.requests)
    assert not store.upload_file(tmp_path / "f", "k", if_none_match=True).created
    assert len(s3_faults.requests) == sent + 1  # it looks before it sends
    monkeypatch.setattr(S3Store, "stat", lambda *_: None)  # as if the other came in between
    assert not store.upload_file(tmp_path / "f", "k", if_none_match=True).created
    assert store.get_bytes("k") == b"theirs" and unfinished(s3) == []


# -- the end of patience


def test_an_unreachable_store_is_said_once_patience_ends(s3: str, s3_faults: FaultProxy) -> None:
    lines: list[str] = []
    store = open_store(s3 + "/raw", Options(patience=0.3, on_retry=lines.append))
    s3_faults.down = True
    with pytest.raises(StoreError) as error:
        store.get("a")
    assert error.value.kind == "unreachable" and error.value.code is Exit.RETRY
    assert f"{s3}/raw/a" in error.value.message and s3_faults.endpoint in error.value.message
    assert re.search(r"\d+ tries in \d+ s", error.value.message) and "AWS_ENDPOINT_URL_S3" in error.value.hint
    assert len(lines) == store.retries > 0


def test_it_comes_back(s3: str, s3_faults: FaultProxy) -> None:
    def back(_: str) -> None:
        s3_faults.down = False

    store = open_store(s3, Options(on_retry=back))
    store.put_bytes("a", b"x")
    s3_faults.down = True
    assert store.get_bytes("a") == b"x" and store.retries == 1


def test_an_answer_is_not_waited_for_without_end(s3: str, s3_faults: FaultProxy) -> None:
    open_store(s3).put_bytes("a", b"x")
    store = open_store(s3, Options(patience=1.0))
    s3_faults.latency = 3.0
    with pytest.raises(StoreError) as error:
        store.get("a")
    assert "timed out" in error.value.message


def test_a_vanished_object_is_not_retried(s3: str, s3_faults: FaultProxy) -> None:
    store = open_store(s3)
    etag = store.put_bytes("a", bytes(20 * MIB)).etag
    store.delete("a")
    with pytest.raises(NotFound) as error:
        list(store.open_stream("a", etag, 20 * MIB))
    assert error.value.code is Exit.DATA and store.retries == 0
