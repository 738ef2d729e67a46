"""OpenAI batch requests by custom_id, spooled to disk: batch outputs bring only the id of what was asked."""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tokenizer import dialects
from tokenizer.job import Obj, Reject
from tokenizer.read import LineReader, Refused
from tokenizer.store import Options, locate

AMBIGUOUS = b""  # stands for an id that two different requests bear
INSERT = "INSERT INTO requests VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET line = ? WHERE line != excluded.line"


class Spool:
    """A SQLite file: custom_id -> the request's line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, objects: Sequence[Obj], options: Options) -> tuple[list[str], list[Refused]]:
        """Takes the requests of the objects: the SHA-256 (hex) of each one's bytes, and those that cannot be taken.

        A line that is no request refuses its object: nobody else reads that, so the line would be lost silently. All
        are read to their end, so that all are named; where one is refused, what is in the file is of no use.
        """
        digests: list[str] = []
        refused: list[Refused] = []
        try:
            with closing(sqlite3.connect(self.path)) as base:
                base.execute("PRAGMA journal_mode = OFF")
                base.execute("PRAGMA synchronous = OFF")
                base.execute("CREATE TABLE IF NOT EXISTS requests (id TEXT PRIMARY KEY, line BLOB) WITHOUT ROWID")
                for obj in objects:
                    store, key = locate(obj.key, options)
                    lines = LineReader(store.open_stream(key, obj.etag, obj.size), obj.key)
                    try:
                        for requests in _requests(obj, lines):
                            base.executemany(INSERT, requests)
                    except Refused as error:
                        refused.append(error)
                    digests.append(lines.sha256)
                base.commit()
        except sqlite3.OperationalError as error:
            if "full" not in str(error):
                raise
            raise OSError(errno.ENOSPC, "no space left", str(self.path)) from error
        return digests, refused

    def lookup(self) -> Callable[[str], dict[str, Any] | None]:
        """The request of an id, None if there is none; Reject `no_prompt` if two requests share it. After the fork."""
        base = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)

        def find(custom_id: str) -> dict[str, Any] | None:
            row = base.execute("SELECT line FROM requests WHERE id = ?", (custom_id,)).fetchone()
            if row is None:
                return None
            if row[0] == AMBIGUOUS:
                raise Reject("no_prompt", f"custom_id {custom_id!r} is in several different requests")
            value = dialects.loads(row[0])  # a lone surrogate in a request is the reject of the row that needs it
            return value if isinstance(value, dict) else None

        return find


def _requests(obj: Obj, lines: LineReader) -> Iterator[list[tuple[str, bytes, bytes]]]:
    """The values of INSERT, chunk by chunk. Raises Refused."""
    for chunk in lines:
        yield [(_custom_id(obj, number, raw), raw, AMBIGUOUS) for number, raw in chunk.numbered()]
        if chunk.too_long is not None:
            raise _no_request(obj, chunk.too_long[0])


def _custom_id(obj: Obj, number: int, raw: bytes) -> str:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and isinstance(value.get("body"), dict) and isinstance(value.get("custom_id"), str):
        return str(value["custom_id"])
    raise _no_request(obj, number)


def _no_request(obj: Obj, number: int) -> Refused:
    mend = "a request file holds `custom_id` and `body` in every line: put other rows into a file of their own"
    return Refused(obj.key, "no OpenAI batch request, in a file of them", mend, number)
