"""OpenAI batch requests by custom_id, spooled to disk: batch outputs bring only the id of what was asked."""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from tokenizer import dialects
from tokenizer.job import Exit, JobError, Obj, Reject
from tokenizer.read import LineReader
from tokenizer.store import Options, locate

AMBIGUOUS = b""  # stands for an id that two different requests bear
INSERT = "INSERT INTO requests VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET line = ? WHERE line != excluded.line"


class Spool:
    """A SQLite file: custom_id -> the request's line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, obj: Obj, options: Options) -> str:
        """Adds the requests of one object; returns the SHA-256 (hex) of the bytes read.

        Raises JobError 65 for a line that is no request: nobody else reads this object, so it would be lost silently.
        """
        store, key = locate(obj.key, options)
        lines = LineReader(store.open_stream(key, obj.etag, obj.size), obj.key)
        try:
            with closing(sqlite3.connect(self.path)) as base:
                base.execute("PRAGMA journal_mode = OFF")
                base.execute("PRAGMA synchronous = OFF")
                base.execute("CREATE TABLE IF NOT EXISTS requests (id TEXT PRIMARY KEY, line BLOB) WITHOUT ROWID")
                for chunk in lines:
                    base.executemany(INSERT, ((_custom_id(obj, n, raw), raw, AMBIGUOUS) for n, raw in chunk.numbered()))
                    if chunk.too_long is not None:
                        raise _no_request(obj, chunk.too_long[0])
                base.commit()
        except sqlite3.OperationalError as error:
            if "full" not in str(error):
                raise
            raise OSError(errno.ENOSPC, "no space left", str(self.path)) from error
        return lines.sha256

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


def _custom_id(obj: Obj, number: int, raw: bytes) -> str:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and isinstance(value.get("body"), dict) and isinstance(value.get("custom_id"), str):
        return str(value["custom_id"])
    raise _no_request(obj, number)


def _no_request(obj: Obj, number: int) -> JobError:
    return JobError(
        Exit.DATA,
        f"{obj.key}:{number}: no OpenAI batch request, in a file of them",
        "a request file holds `custom_id` and `body` in every line: put other rows into a file of their own",
    )
