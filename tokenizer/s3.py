"""The store on S3 and what speaks its language.

Downloads are ranged GETs with If-Match, several in flight, each resumed at the last byte that arrived; uploads are
one PUT or parallel parts, abandoned as a whole on failure. A conditional write whose answer was lost is tried again,
and a refusal then is looked into: the bytes already there may be our own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from tokenizer.retry import NotFound, Patience, StoreError, changed, diagnose, note_success
from tokenizer.store import PIECE, Connection, Options, Put, Stat, Store, connect

T = TypeVar("T")
Parts = list[dict[str, Any]]  # number and etag of each, as CompleteMultipartUpload takes them
PART = 8 << 20  # bytes of a part of an upload; a file of at most this size is one PUT
MOST_PARTS = 10_000  # of S3
IN_FLIGHT = 4  # pieces or parts of one object, so a stream holds at most 5 x 8 MiB
ABORT_PATIENCE = 10.0  # seconds: a process that was told to stop must not hang here
SLICE = 256 << 10  # bytes of one read of a body: what a broken connection can cost

# By process: neither sockets nor threads outlive a fork.
_connections: dict[tuple[int, int, float], Connection] = {}
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_lock = threading.Lock()


class _Precondition(Exception):
    """412: the condition of a read or write does not hold."""


class S3Store(Store):
    """Keys are relative to `prefix` in `bucket`."""

    def __init__(self, bucket: str, prefix: str, options: Options) -> None:
        self.root = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._options = options
        self._bucket_seen = False

    def check(self) -> None:
        self._page("", {"MaxKeys": 1})

    def list(self, prefix: str = "") -> Iterator[Stat]:
        more: dict[str, Any] = {}
        while True:
            page = self._page(prefix, more)
            for item in page.get("Contents", ()):
                yield Stat(item["Key"][len(self._prefix) :], item["Size"], item["ETag"].strip('"'))
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def stat(self, key: str) -> Stat | None:
        try:
            head = self._call("HEAD", key, lambda client: client.head_object(**self._at(key)))
        except NotFound:
            if not self._bucket_seen:
                self.check()  # a HEAD cannot tell a missing bucket from a missing key
            return None
        except StoreError as error:
            if error.kind in ("credentials", "denied", "other"):
                self.check()  # has a body, so it says what is wrong
            raise
        return Stat(key, head["ContentLength"], head["ETag"].strip('"'))

    def get(self, key: str) -> tuple[bytes, str]:
        return self._fetch(key, 0, None, None, threading.Event())

    def open_stream(
        self, key: str, etag: str | None = None, size: int | None = None, start: int = 0
    ) -> Iterator[bytes]:
        if etag is None or size is None:
            stat = self.stat(key)
            if stat is None:
                raise NotFound(self.uri(key))
            if etag is not None and etag != stat.etag:
                raise changed(self.uri(key))
            etag, size = stat.etag, stat.size
        stop = threading.Event()
        starts = range(start, size, PIECE)
        if len(starts) <= 1:
            if start < size:
                yield self._fetch(key, start, size, etag, stop)[0]
            return
        self._connection()  # made here, not by several threads at once
        pool, waiting, following = self._pool(), deque[Future[tuple[bytes, str]]](), iter(starts)
        ahead = min(IN_FLIGHT, self._options.threads + 1)
        try:
            while True:
                while len(waiting) < ahead and (at := next(following, None)) is not None:
                    waiting.append(pool.submit(self._fetch, key, at, min(at + PIECE, size), etag, stop))
                if not waiting:
                    return
                yield waiting.popleft().result()[0]
        finally:
            stop.set()
            for future in waiting:
                future.cancel()

    def put_bytes(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> Put:
        tries = 0

        def put(client: Any) -> Any:
            nonlocal tries
            tries += 1
            return client.put_object(**self._at(key), Body=data, **_condition(if_none_match, if_match))

        try:
            answer = self._call("PUT", key, put)
        except (_Precondition, NotFound) as error:
            if isinstance(error, NotFound) and if_match is None:
                raise
            if tries > 1 and (etag := self._ours(key, len(data), iter([data]))):
                return Put(True, etag)
            return Put(False, "")
        return Put(True, answer["ETag"].strip('"'))

    def upload_file(
        self, path: str | os.PathLike[str], key: str, *, if_none_match: bool = False, if_match: str | None = None
    ) -> Put:
        size = os.path.getsize(path)
        if size <= PART:
            with open(path, "rb") as file:
                return self.put_bytes(key, file.read(), if_none_match=if_none_match, if_match=if_match)
        if if_none_match and self.stat(key) is not None:  # saves sending it all; completing it decides
            return Put(False, "")
        upload = self._call("POST", key, lambda client: client.create_multipart_upload(**self._at(key)))["UploadId"]
        done = False
        try:
            put = self._complete(key, upload, self._send_parts(path, size, key, upload), path, if_none_match, if_match)
            done = put.created
            return put
        finally:
            if not done:
                self._abort(key, upload)

    def delete(self, key: str) -> None:
        self._call("DELETE", key, lambda client: client.delete_object(**self._at(key)))

    # -- uploads

    def _send_parts(self, path: str | os.PathLike[str], size: int, key: str, upload: str) -> Parts:
        """Upload the file in parallel."""
        part = max(PART, -(-size // MOST_PARTS))
        stop = threading.Event()

        def send(number: int) -> dict[str, Any]:
            data = os.pread(handle, part, (number - 1) * part)
            answer = self._call(
                f"PUT part {number} of",
                key,
                lambda client: client.upload_part(**self._at(key), UploadId=upload, PartNumber=number, Body=data),
                stop,
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        handle = os.open(path, os.O_RDONLY)
        waiting: deque[Future[dict[str, Any]]] = deque()
        parts: Parts = []
        try:
            for number in range(1, -(-size // part) + 1):
                if len(waiting) == IN_FLIGHT:
                    parts.append(waiting.popleft().result())
                waiting.append(self._pool().submit(send, number))
            while waiting:
                parts.append(waiting.popleft().result())
            return parts
        finally:
            stop.set()
            for future in waiting:  # none may read the handle, or send, once this returns
                if not future.cancel():
                    future.exception()
            os.close(handle)

    def _complete(
        self,
        key: str,
        upload: str,
        parts: Parts,
        path: str | os.PathLike[str],
        if_none_match: bool,
        if_match: str | None,
    ) -> Put:
        tries = 0

        def complete(client: Any) -> Any:
            nonlocal tries
            tries += 1
            return client.complete_multipart_upload(
                **self._at(key),
                UploadId=upload,
                MultipartUpload={"Parts": parts},
                **_condition(if_none_match, if_match),
            )

        try:
            return Put(True, self._call("POST", key, complete)["ETag"].strip('"'))
        except (_Precondition, NotFound) as error:
            # After a lost answer the upload is gone because it was completed.
            if tries > 1 and (etag := self._ours(key, os.path.getsize(path), _pieces(path))):
                return Put(True, etag)
            if isinstance(error, NotFound) and if_match is None:
                raise StoreError(
                    "other", self.uri(key), "the upload was removed before its end", "try again"
                ) from error
            return Put(False, "")

    def _abort(self, key: str, upload: str) -> None:
        """Free the parts; that this fails as well must not hide why."""
        with contextlib.suppress(StoreError, _Precondition):
            self._call(
                "DELETE parts of",
                key,
                lambda client: client.abort_multipart_upload(**self._at(key), UploadId=upload),
                patience=Patience(min(self._options.patience, ABORT_PATIENCE)),
            )

    def _ours(self, key: str, size: int, pieces: Iterator[bytes]) -> str | None:
        """The etag of the object if it holds exactly these bytes."""
        stat = self.stat(key)
        if stat is None or stat.size != size:
            return None
        mine, there = hashlib.sha256(), hashlib.sha256()
        for piece in pieces:
            mine.update(piece)
        for piece in self.open_stream(key, stat.etag, stat.size):
            there.update(piece)
        return stat.etag if mine.digest() == there.digest() else None

    # -- downloads

    def _fetch(
        self, key: str, start: int, end: int | None, etag: str | None, stop: threading.Event
    ) -> tuple[bytes, str]:
        """Bytes `start` to `end` (None: all) and their etag, resumed as often as patience allows."""
        slices: list[bytes] = []
        position = start
        patience = Patience(self._options.patience)

        def get(client: Any) -> None:
            nonlocal position, end, etag
            asked = dict(self._at(key))
            if end is not None:
                asked["Range"] = f"bytes={position}-{end - 1}"
            if etag is not None:
                asked["IfMatch"] = f'"{etag}"'
            answer = client.get_object(**asked)
            body = answer["Body"]
            try:
                etag = answer["ETag"].strip('"')
                if end is None:
                    end = int(answer["ContentLength"])
                elif answer["ContentLength"] != end - position:
                    raise _Precondition
                while data := body.read(SLICE):
                    slices.append(data)
                    position += len(data)
                    patience.progress()
                    if stop.is_set():
                        body.close()
                        return
            except BaseException:
                body.close()  # an unread rest would be taken for the next answer
                raise

        try:
            self._call("GET", key, get, stop, patience, lambda: f" after {position - start} bytes" if slices else "")
        except _Precondition:
            raise changed(self.uri(key)) from None
        return b"".join(slices), etag or ""

    def _page(self, prefix: str, more: dict[str, Any]) -> dict[str, Any]:
        page: dict[str, Any] = self._call(
            "LIST",
            prefix,
            lambda client: client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix + prefix, **more),
        )
        return page

    # -- one call

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _call(
        self,
        verb: str,
        key: str,
        work: Callable[[Any], T],
        stop: threading.Event | None = None,
        patience: Patience | None = None,
        state: Callable[[], str] = lambda: "",
    ) -> T:
        """Do `work` with a client until it succeeds, fails for good, or patience ends."""
        patience = patience or Patience(self._options.patience)
        began, tries = time.monotonic(), 0
        connection: Connection | None = None
        while True:
            tries += 1
            try:
                connection = self._connection()
                result = work(connection.client)
            except Exception as error:
                fault = diagnose(error)
                if fault is None:
                    raise
                if fault.kind == "precondition":
                    raise _Precondition from error
                if fault.kind == "missing":
                    raise NotFound(self.uri(key)) from error
                allowed = patience.seconds if fault.kind == "unreachable" else self._options.auth_patience
                wait = None if fault.kind == "other" or (stop and stop.is_set()) else patience.next_wait(allowed)
                if wait is None:
                    took = time.monotonic() - began
                    raise self._failure(verb, key, *fault, tries, took, connection) from error
                with _lock:
                    self.retries += 1
                self._options.on_retry(
                    f"retry {tries} of {verb} {self.uri(key)}{state()} in {wait:.1f} s: {fault.words}"
                )
                if fault.kind == "credentials":
                    self._forget()  # the next try reads renewed ones
                if stop:
                    stop.wait(wait)
                else:
                    time.sleep(wait)
            else:
                self._bucket_seen = True
                note_success()
                return result

    def _failure(
        self, verb: str, key: str, kind: str, words: str, tries: int, seconds: float, connection: Connection | None
    ) -> StoreError:
        endpoint = connection.endpoint if connection else "the endpoint"
        found = connection.credentials if connection else "none"
        tried = f"{verb} at {endpoint}, {tries} tries in {seconds:.0f} s" if tries > 1 else f"{verb} at {endpoint}"
        message, hint = {
            "credentials": (
                f"credentials refused: {words} (source: {found})",
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or a workload identity",
            ),
            "denied": (
                f"access denied: {words} (credentials from: {found})",
                "allow s3:ListBucket, GetObject, PutObject and DeleteObject on it to this identity",
            ),
            "bucket": (
                f"no bucket `{self._bucket}`: {words}",
                "create it or correct the name; AWS_ENDPOINT_URL_S3 selects the endpoint",
            ),
            "unreachable": (f"gave up: {words}", "check AWS_ENDPOINT_URL_S3, the network and the load of the store"),
            "endpoint": (
                f"cannot use the endpoint: {words}",
                "set AWS_ENDPOINT_URL_S3; AWS_CA_BUNDLE names the file of a private CA",
            ),
        }.get(kind, (f"refused: {words}", "the store may lack this operation"))
        return StoreError(kind, self.uri(key), f"{message}; tried {tried}", hint)

    def _connection(self) -> Connection:
        key = (os.getpid(), self._options.threads, self._options.patience)
        with _lock:
            if key not in _connections:
                _connections[key] = connect(self._options)
            return _connections[key]

    def _forget(self) -> None:
        with _lock:
            _connections.pop((os.getpid(), self._options.threads, self._options.patience), None)

    def _pool(self) -> ThreadPoolExecutor:
        key = (os.getpid(), self._options.threads)
        with _lock:
            if key not in _pools:
                _pools[key] = ThreadPoolExecutor(self._options.threads, thread_name_prefix="store")
            return _pools[key]


def _condition(if_none_match: bool, if_match: str | None) -> dict[str, str]:
    if if_none_match:
        return {"IfNoneMatch": "*"}
    return {"IfMatch": f'"{if_match}"'} if if_match is not None else {}


def _pieces(path: str | os.PathLike[str]) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            yield piece
