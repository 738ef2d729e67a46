"""One parsed JSON row of any known dialect -> one Conversation, or a Reject that names why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizer.job import Reject
from tokenizer.messages import Conversation, Reply

__all__ = ["Conversation", "Lookup", "Reply", "parse"]

Lookup = Callable[[str], dict[str, Any] | None]


def parse(row: object, lookup: Lookup | None = None) -> Conversation:
    """Normalises one row; raises Reject."""
    raise Reject("unknown_dialect", f"a row must be a JSON object, not {type(row).__name__}")
