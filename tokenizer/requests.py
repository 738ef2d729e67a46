"""OpenAI batch requests by custom_id, spooled to disk: batch outputs bring only the id of what was asked."""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from tokenizer.job import Obj, Reject
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

        Lines that are no requests are passed over: whoever needs one of them finds its id missing.
        """
        store, key = locate(obj.key, options)
        lines = LineReader(store.open_stream(key, obj.etag, obj.size), obj.key)
        try:
            with closing(sqlite3.connect(self.path)) as base:
                base.execute("PRAGMA journal_mode = OFF")
                base.execute("PRAGMA synchronous = OFF")
                base.execute("CREATE TABLE IF NOT EXISTS requests (id TEXT PRIMARY KEY, line BLOB) WITHOUT ROWID")
                for chunk in lines:
                    found = ((_custom_id(raw), raw, AMBIGUOUS) for _, raw in chunk.numbered())
                    base.executemany(INSERT, (row for row in found if row[0] is not None))
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
            value: dict[str, Any] = json.loads(row[0])
            return value

        return find


def _custom_id(raw: bytes) -> str | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("body"), dict):
        return None
    custom_id = value.get("custom_id")
    return custom_id if isinstance(custom_id, str) else None
