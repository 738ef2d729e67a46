"""One small interface for `file://` (or a plain path) and `s3://`, so that nothing else asks where data lives.

    store = open_store("s3://bucket/prefix")       # or a directory; keys are relative to this root
    store.put_bytes("plan.json", data, if_none_match=True).created
    for piece in store.open_stream(key, etag=etag, size=size): ...
    found = expand("s3://bucket/raw/**/*.jsonl")    # the objects of one INPUT, and what was skipped

Retries live here alone (`retry.py`; those of botocore are off). Every failure is a `StoreError`, which is a
`JobError`: its `kind` lets a command line choose its exit code, its `code` is what a pod exits with.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from stat import S_ISREG
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from tokenizer.retry import NotFound, StoreError, log_retry

__all__ = [
    "PIECE",
    "Listing",
    "NotFound",
    "Options",
    "Put",
    "Skip",
    "Stat",
    "Store",
    "StoreError",
    "Uri",
    "expand",
    "join",
    "locate",
    "open_store",
    "parse_uri",
]

PIECE = 8 << 20  # bytes of one ranged GET and of one element of a stream
SUFFIXES = (".jsonl", ".ndjson", ".json")
COMPRESSED = (".gz", ".zst")
GLOB = re.compile(r"[*?\[]")
SPECIAL = "special"  # etag of a pipe, a socket or a device: what is read of it cannot be read again


class Uri(NamedTuple):
    """A parsed location: `bucket` is empty for files; `path` is an S3 key without leading slash or an absolute path."""

    scheme: str  # "file" | "s3"
    bucket: str
    path: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.path}".rstrip("/") if self.scheme == "s3" else self.path


class Stat(NamedTuple):
    """An object: key relative to the root of its store, bytes, and an etag that changes whenever its content does."""

    key: str
    size: int
    etag: str


class Put(NamedTuple):
    """`created` is False when the condition did not hold (it exists, or has another etag): nothing was written."""

    created: bool
    etag: str  # of what was written; empty when nothing was


class Skip(NamedTuple):
    """An object that a listing leaves out.

    `reason`: folder_marker, marker (`_SUCCESS` and the like), hidden, temporary, broken_link, pipe_or_device, empty or
    other_format.
    """

    key: str
    reason: str


@dataclass(slots=True)
class Listing:
    """The objects of one INPUT, sorted by key; keys are relative to `root`, the input root that ids are relative to."""

    root: str
    objects: list[Stat] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)

    def skipped_by_reason(self) -> dict[str, int]:
        return dict(sorted(Counter(skip.reason for skip in self.skipped).items()))


@dataclass(frozen=True, slots=True)
class Options:
    """How hard a store tries.

    threads: parallel requests of this process, all stores together. patience: seconds from the first failure without
    progress in which a call retries what passes by itself (503, resets, timeouts); it ends within 2 x patience.
    auth_patience: the same for refused credentials and missing buckets: 0 on a command line, 90 in a pod, whose
    identity may not be ready yet. on_retry gets one line per retry, by default a WARNING of the logger "tokenizer".
    """

    threads: int = 8
    patience: float = 90.0
    auth_patience: float = 0.0
    on_retry: Callable[[str], None] = log_retry


class Store(ABC):
    """A root and the objects below it. Not shared between threads; safe to use in a child after a fork."""

    root: str
    retries: int = 0  # so far, by this object

    def uri(self, key: str = "") -> str:
        return join(self.root, key)

    @abstractmethod
    def check(self) -> None:
        """Raise StoreError unless the root can be listed (a directory that does not exist yet is fine)."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[Stat]:
        """Every object whose key starts with `prefix`, sorted by key, markers and empty ones included."""

    @abstractmethod
    def stat(self, key: str) -> Stat | None:
        """None if there is no such object."""

    @abstractmethod
    def get(self, key: str) -> tuple[bytes, str]:
        """All bytes and the etag that belongs to them; starts no thread. Raises NotFound."""

    def get_bytes(self, key: str) -> bytes:
        return self.get(key)[0]

    @abstractmethod
    def open_stream(
        self, key: str, etag: str | None = None, size: int | None = None, start: int = 0
    ) -> Iterator[bytes]:
        """The bytes from `start` on, in order, in pieces of at most PIECE; memory and requests in flight are bounded.

        With `etag` (as listed): another content is a StoreError of kind "changed" (exit 65) that names the key.
        Close the iterator to stop early.
        """

    @abstractmethod
    def put_bytes(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> Put:
        """Write all or nothing. if_none_match: only if there is no such object; if_match: only over this etag."""

    @abstractmethod
    def upload_file(
        self, path: str | os.PathLike[str], key: str, *, if_none_match: bool = False, if_match: str | None = None
    ) -> Put:
        """As put_bytes, from a file, in parallel parts; a failure leaves no part behind."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the object; one that does not exist is fine."""


def parse_uri(text: str) -> Uri:
    """A plain path, `file:///path` or `s3://bucket/prefix`. Raises ValueError, naming the text, for anything else.

    `bucket/path` without a scheme is a local path here: whether that is meant is for the caller to ask.
    """
    if text.startswith("s3://"):
        bucket, _, path = text[5:].partition("/")
        if "@" in bucket:  # never echoed
            raise ValueError("an s3:// URI with credentials in it, set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        if not bucket or GLOB.search(bucket):
            raise ValueError(f"`{text}` names no bucket, expected s3://bucket/prefix")
        return Uri("s3", bucket, path)
    if text.startswith("file:"):
        rest = text[5:]
        host, _, path = rest[2:].partition("/") if rest.startswith("//") else ("", "", rest.removeprefix("/"))
        if host not in ("", "localhost") or not rest.startswith("/"):
            raise ValueError(f"`{text}` is not a local file, expected file:///absolute/path")
        return Uri("file", "", os.path.abspath("/" + unquote(path)))
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise ValueError(f"`{text}` has an unknown scheme, expected a path, file:// or s3://")
    if not text:
        raise ValueError("an empty path")
    return Uri("file", "", os.path.abspath(os.path.expanduser(text)))


def join(root: str, key: str) -> str:
    """URI (or absolute path) of `key` below `root`."""
    return f"{root.rstrip('/')}/{key}" if key else root


def open_store(root: str, options: Options | None = None) -> Store:
    """The store whose keys are relative to `root`; opens no connection yet. Raises ValueError as parse_uri does."""
    uri = parse_uri(root)
    if uri.scheme == "s3":
        from tokenizer.s3 import S3Store

        return S3Store(uri.bucket, uri.path.rstrip("/"), options or Options())
    from tokenizer.files import FileStore

    return FileStore(uri.path)


def locate(uri: str, options: Options | None = None) -> tuple[Store, str]:
    """The store and key of one object given by its full URI or path (the store of its bucket, or of its directory)."""
    parsed = parse_uri(uri)
    if parsed.scheme == "s3":
        return open_store(f"s3://{parsed.bucket}", options), parsed.path
    return open_store(os.path.dirname(parsed.path), options), os.path.basename(parsed.path)


def expand(uri: str, options: Options | None = None) -> Listing:
    """The objects that one INPUT means: a file, a directory or prefix (recursive), or a glob (`**` crosses slashes).

    An object of exactly this name wins over a glob or prefix of the same spelling, a directory or prefix of it over a
    glob. Raises NotFound if there is nothing at all, ValueError as parse_uri does, StoreError.
    """
    parsed = parse_uri(uri)
    if parsed.path and not uri.endswith("/"):
        store, key = locate(uri, options)
        if (one := store.stat(key)) is not None:
            root, _, name = str(parsed).rpartition("/")
            return _select(root, [one._replace(key=name)], lambda _: True, named=True)
    globbed = GLOB.search(parsed.path) is not None and not any(True for _ in open_store(str(parsed), options).list())
    if globbed:
        fixed = parsed.path[: GLOB.search(parsed.path).start()].rpartition("/")[0]  # type: ignore[union-attr]
        pattern = glob_pattern(parsed.path[len(fixed) :].lstrip("/"))
        store = open_store(str(parsed._replace(path=fixed or ("/" if parsed.scheme == "file" else ""))), options)
        listing = _select(store.root, store.list(), lambda key: pattern.fullmatch(key) is not None, named=True)
    else:
        store = open_store(str(parsed), options)
        listing = _select(store.root, store.list(), lambda _: True, named=False)
        if parsed.scheme == "s3" and not (listing.objects or listing.skipped) and not uri.endswith("/"):
            above, _, start = parsed.path.rpartition("/")  # a bare prefix, such as s3://bucket/raw/part-
            store = open_store(str(parsed._replace(path=above)), options)
            listing = _select(store.root, store.list(start), lambda _: True, named=True)
    if not listing.objects and not listing.skipped:
        if parsed.scheme == "file" and os.path.isdir(parsed.path):
            raise NotFound(uri, "an empty directory", "put .jsonl files into it, or leave it out")
        raise NotFound(uri, "nothing matches" if globbed else "no such file, directory or object")
    return listing


def glob_pattern(glob: str) -> re.Pattern[str]:
    """`*` and `?` stay within a path component, `**/` is any number of them, `[a-c]` and `[!a]` are sets.

    Raises ValueError for a range that runs backwards.
    """
    out, i = "", 0
    while i < len(glob):
        if glob.startswith("**/", i):
            out, i = out + "(?:[^/]+/)*", i + 3
        elif glob.startswith("**", i):
            out, i = out + ".*", i + 2
        elif glob[i] == "*":
            out, i = out + "[^/]*", i + 1
        elif glob[i] == "?":
            out, i = out + "[^/]", i + 1
        elif glob[i] == "[" and (end := glob.find("]", i + 2 + (glob[i + 1 : i + 2] in ("!", "^")))) > 0:
            out, i = out + _set(glob[i + 1 : end]), end + 1
        else:
            out, i = out + re.escape(glob[i]), i + 1
    return re.compile(out, re.DOTALL)


def _set(body: str) -> str:
    """The set of a regular expression for what stands between the brackets of a glob."""
    inverse = body[0] in "!^"
    members = ""
    for first, last in re.findall(r"(.)(?:-(.))?", body[inverse:], re.DOTALL):
        if last and first > last:
            raise ValueError(f"`[{body}]` has the range `{first}-{last}`, which runs backwards")
        members += re.escape(first) + (f"-{re.escape(last)}" if last else "")
    return f"[^/{members}]" if inverse else f"[{members}]"


def skip_reason(stat: Stat, named: bool) -> str | None:
    """Why an object of a listing is no input, or None. `named`: its name was given or matched, any suffix will do."""
    *folders, name = stat.key.split("/")
    if not name or name.endswith("_$folder$"):
        return "folder_marker"
    if any(part.startswith(".") for part in (*folders, name)):
        return "hidden"
    if "_temporary" in folders or name.endswith(("~", ".tmp", ".temp", ".part", ".partial", ".crdownload", ".swp")):
        return "temporary"
    if name.startswith(("_SUCCESS", "_started", "_committed", "_metadata")):
        return "marker"
    if stat.etag == SPECIAL:
        return "pipe_or_device"
    if stat.size == 0:
        return "empty" if stat.etag else "broken_link"
    if not named and not name.lower().endswith(tuple(s + c for s in SUFFIXES for c in ("", *COMPRESSED))):
        return "other_format"
    return None


def _select(root: str, stats: Any, match: Callable[[str], bool], named: bool) -> Listing:
    listing = Listing(root)
    for stat in stats:
        if match(stat.key):
            if (reason := skip_reason(stat, named)) is None:
                listing.objects.append(stat)
            else:
                listing.skipped.append(Skip(stat.key, reason))
    return listing


class Connection(NamedTuple):
    """A boto3 client, and what may be said of it: its endpoint, and where its credentials were found."""

    client: Any
    endpoint: str
    credentials: str


def connect(options: Options) -> Connection:
    """A client as S3-compatible stores need it: on another endpoint than AWS, path-style names and no checksums that
    were not asked for, each unless the user's environment or profile says otherwise.
    """
    import boto3
    import botocore.session
    from botocore.config import Config

    core = botocore.session.get_session()
    core.register_component("data_loader", _service_models())
    profile = core.get_scoped_config()
    session = boto3.Session(botocore_session=core)
    wait = min(options.patience / 2, 60.0)
    settings: dict[str, Any] = {
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": options.threads + 4,  # the pool's threads, and callers beside them
        "connect_timeout": max(1.0, min(wait, 10.0)),
        "read_timeout": max(1.0, wait),
    }
    region = session.region_name or "us-east-1"
    client = session.client("s3", region_name=region, config=Config(**settings))
    endpoint = urlsplit(client.meta.endpoint_url)
    if not re.search(r"\.amazonaws\.com(\.cn)?$", endpoint.hostname or ""):
        for setting in ("request_checksum_calculation", "response_checksum_validation"):
            if f"AWS_{setting.upper()}" not in os.environ and setting not in profile:
                settings[setting] = "when_required"
        own = profile.get("s3")
        if not (isinstance(own, dict) and "addressing_style" in own):
            settings["s3"] = {"addressing_style": "path"}
        client = session.client("s3", region_name=region, config=Config(**settings))
    found = session.get_credentials()
    shown = endpoint._replace(netloc=endpoint.netloc.rpartition("@")[2]).geturl()
    return Connection(client, shown, found.method if found else "none")


@cache
def _service_models() -> Any:
    """Parsed once, where a session would parse them anew: forked children inherit them."""
    from botocore.loaders import create_loader

    return create_loader()


def file_etag(stat: os.stat_result) -> str:
    """Of a file: another modification time, size or inode is another etag; SPECIAL for what is no file."""
    if not S_ISREG(stat.st_mode):
        return SPECIAL
    return f"{stat.st_mtime_ns:x}-{stat.st_size:x}-{stat.st_ino:x}"
