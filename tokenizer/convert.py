"""Lines in, record batches and named rejects out: the one place where a line's fate is decided and counted.

A line is parsed (dialects), becomes rows of pieces (chat), then ids and mask (encode); rows are cut and filtered here.
Encoding is by the chunk, everything after it by the array: Python runs per row, never per token.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from tokenizer import chat, dialects
from tokenizer.encode import Encoded, Encoder
from tokenizer.job import Exit, JobError, Reject, Spec
from tokenizer.pieces import IDS
from tokenizer.read import LONGEST_LINE, Chunk
from tokenizer.shard import Rows, cut, loss_per_row, record_batch, select
from tokenizer.tally import SAMPLES, Frequent, Tally, text_hash

BATCH_CHARS = 12 << 20  # rendered characters encoded at once: bounds memory where many turns share a long history
SAMPLE_TOKENS = 160  # of a segment that are shown
SAMPLE_SEGMENTS = 16


@dataclass(slots=True)
class _Entry:
    """A line between parsing and encoding; its rows are rows[first:last] of the pending ones."""

    number: int  # from 1, blank lines counted
    raw: bytes
    source_id: str = ""
    first: int = 0
    last: int = 0
    rejected: list[tuple[int | None, Reject]] = field(default_factory=list)  # turn (None: the whole line), why


class Output(NamedTuple):
    """What some lines became. batch: None where no row is left; rejects: JSON lines; hashes: 8 bytes a row."""

    batch: pa.RecordBatch | None
    rejects: bytes
    hashes: bytes


class Converter:
    """Converts the lines of one object; `tally` and `frequent` grow with it."""

    def __init__(
        self,
        path: str,
        encoder: Encoder,
        renderer: chat.Renderer,
        options: chat.ChatOptions,
        spec: Spec,
        lookup: dialects.Lookup | None = None,
    ) -> None:
        self.path = path
        self.encoder = encoder
        self.renderer = renderer
        self.options = options
        self.spec = spec
        self.lookup = lookup
        self.tally = Tally()
        self.requests = 0  # lines that are OpenAI batch requests, all of them rejected
        self.frequent = Frequent()

    def chunk(self, chunk: Chunk) -> Iterator[Output]:
        """The outputs of one chunk of lines: one, or more where the rendered text is far longer than the input."""
        entries: list[_Entry] = []
        rows: list[chat.TextRow] = []
        size = 0
        for number, raw in chunk.numbered():
            entry = _Entry(number, raw, first=len(rows))
            try:
                size += self._parse(entry, rows)
            except Reject as reject:
                entry.rejected = [(None, reject)]
                self.requests += reject.detail == dialects.REQUEST_ALONE
            except RecursionError:  # what the JSON reader still takes, nobody can walk through
                entry.rejected = [(None, Reject("invalid_json", "nested too deep"))]
            except Exception as error:
                # a bug, not bad data: it must not pass for a reject, and whoever mends it needs the line
                what = f"{self.path}:{number}: internal error, {type(error).__name__}: {error}"
                raise JobError(Exit.RETRY, what, "report it with the log below OUT/logs") from error
            entry.last = len(rows)
            entries.append(entry)
            if size > BATCH_CHARS:
                yield self._flush(entries, rows)
                entries, rows, size = [], [], 0
        if chunk.too_long is not None:
            number, head = chunk.too_long
            entry = _Entry(number, whole_characters(head), first=len(rows), last=len(rows))
            entry.rejected = [(None, Reject("line_too_long", f"longer than {LONGEST_LINE >> 20} MiB"))]
            entries.append(entry)
        if entries:
            yield self._flush(entries, rows)

    def _parse(self, entry: _Entry, rows: list[chat.TextRow]) -> int:
        """Adds the line's rows; returns their characters. Raises Reject for the whole line."""
        conversation = dialects.parse(dialects.loads(entry.raw), self.lookup)
        entry.source_id = conversation.source_id
        kept, rejected = chat.rows(conversation, self.renderer, self.options)
        rows += kept
        entry.rejected += rejected
        return sum(len(piece.text) for row in kept for piece in row.pieces)

    def _flush(self, entries: Sequence[_Entry], text_rows: Sequence[chat.TextRow]) -> Output:
        tally = self.tally
        encoded = self.encoder.encode(text_rows)
        whole = Rows(encoded.ids, encoded.offsets, encoded.mask)
        rows = cut(whole, self.spec.max_length)
        loss = loss_per_row(rows)
        whole_loss = loss if rows is whole else loss_per_row(whole)
        fates = self._fates(text_rows, encoded, whole_loss, loss)
        malformed = np.zeros(len(loss), bool)
        keep = np.ones(len(loss), bool)
        for row, reject in fates.items():
            keep[row] = False
            malformed[row] = reject.reason in ("foreign_token_ids", "reasoning_lost")
        hashes = [text_hash(row.replies) for row in text_rows]
        shown = [row.replies for row in text_rows]
        for row, text_row in enumerate(text_rows):
            if not all(text_row.replies) and _has_ids_alone(text_row):
                part = slice(whole.offsets[row], whole.offsets[row + 1])
                ids = whole.ids[part][whole.mask[part] > 0].tolist()
                hashes[row], shown[row] = text_hash([*text_row.replies, str(ids)]), [self.encoder.decode(ids)]
        for row in np.flatnonzero(~malformed).tolist():
            self.frequent.add(hashes[row], shown[row])
        _count(tally.before, loss[~malformed])
        kept = select(rows, keep)
        kept_loss = loss[keep]
        _count(tally.after, kept_loss)
        if rows is not whole:
            tally.rows_cut += int((np.diff(rows.offsets) < np.diff(whole.offsets)).sum())
            tally.loss_tokens_cut += int(whole_loss.sum() - loss.sum())
        tally.control_tokens += encoded.control_literals
        rejects = []
        names: list[str] = []
        source_ids: list[str] = []
        for entry in entries:
            tally.lines_seen += 1
            turns = entry.rejected
            if fates:
                turns = turns + [(text_rows[r].turn, fates[r]) for r in range(entry.first, entry.last) if r in fates]
            line_id = f"{self.path}:{entry.number}#"
            taken = [r for r in range(entry.first, entry.last) if r not in fates]
            for row in taken:
                names.append(f"{line_id}{text_rows[row].turn}")
                source_ids.append(entry.source_id)
            unlearnt = sum(reject.reason == "no_supervised_tokens" for _, reject in entry.rejected)
            if unlearnt:  # never became rows, but the gate has to see them
                tally.before[0] += unlearnt
            if not taken:
                turns = turns or [(None, Reject("no_supervised_tokens", "no assistant turn is to be learnt"))]
                turns = sorted(turns, key=lambda item: -1 if item[0] is None else item[0])[:1]
                tally.lines_rejected[turns[0][1].reason] += 1
            else:
                tally.lines_kept += 1
                tally.turns_rejected.update(reject.reason for _, reject in turns)
            rejects += [self._reject(entry, turn, reject) for turn, reject in turns]
        tally.rows += len(names)
        tally.tokens += len(kept.ids)
        tally.loss_tokens += int(kept_loss.sum())
        for row in range(min(SAMPLES - len(tally.samples), len(names))):
            tally.samples.append(sample(names[row], kept, row))
        batch = record_batch(kept, names, source_ids, kept_loss) if names else None
        spool = b"".join(h for h, bad in zip(hashes, malformed.tolist(), strict=True) if not bad)
        return Output(batch, b"".join(rejects), spool)

    def _fates(
        self, text_rows: Sequence[chat.TextRow], encoded: Encoded, whole_loss: Any, loss: Any
    ) -> dict[int, Reject]:
        """Row -> why it is not taken, for those that are not."""
        fates = dict(encoded.rejects)
        for row, text_row in enumerate(text_rows):
            told = text_row.output_tokens
            if told is not None and row not in fates and told > 2 * int(whole_loss[row]) + 64:
                fates[row] = Reject(
                    "reasoning_lost",
                    f"the server counted {told} output tokens, the reply has {int(whole_loss[row])} and no reasoning",
                )
        least = self.spec.min_loss_tokens
        for row in np.flatnonzero(loss < max(1, least)).tolist():
            if row in fates:
                continue
            if not whole_loss[row]:
                fates[row] = Reject("no_supervised_tokens", "no token of this row was generated by the model")
            elif not loss[row]:
                fates[row] = Reject("truncated_away", f"nothing to learn in the first {self.spec.max_length} tokens")
            else:
                fates[row] = Reject("too_few_loss_tokens", f"{int(loss[row])} loss tokens, the least is {least}")
        return fates

    def _reject(self, entry: _Entry, turn: int | None, reject: Reject) -> bytes:
        record: dict[str, Any] = {
            "object": self.path,
            "line": entry.number,
            "turn": turn,
            "reason": reject.reason,
            "detail": reject.detail,
        }
        try:
            record["raw"] = entry.raw.decode()
        except UnicodeDecodeError:
            record |= {"raw": base64.b64encode(entry.raw).decode(), "encoding": "base64"}
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def _has_ids_alone(row: chat.TextRow) -> bool:
    """Whether the row brought a reply as ids and no words of it."""
    return any(piece.kind == IDS and piece.loss and not piece.text for piece in row.pieces)


def _count(histogram: Counter[int], values: Any) -> None:
    lengths, rows = np.unique(values, return_counts=True)
    histogram.update(dict(zip(lengths.tolist(), rows.tolist(), strict=True)))


def whole_characters(raw: bytes) -> bytes:
    """Without the beginning of a UTF-8 character that a limit has cut at the end."""
    for back in range(1, min(4, len(raw)) + 1):
        if raw[-back] >= 0xC0:  # the last lead byte: how many bytes does it announce?
            needed = 2 if raw[-back] < 0xE0 else 3 if raw[-back] < 0xF0 else 4
            return raw if back >= needed else raw[:-back]
        if raw[-back] < 0x80:
            break
    return raw


def spans(mask: Any) -> list[tuple[int, int, bool]]:
    """Runs of equal mask values: (start, end, learnt)."""
    if not len(mask):
        return []
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [(a, b, bool(mask[a])) for a, b in pairwise(edges)]


def sample(row_id: str, rows: Rows, row: int) -> dict[str, Any]:
    """One row for human eyes: cut into learnt and other segments, each shortened in the middle; ids, not yet text."""
    start, end = int(rows.offsets[row]), int(rows.offsets[row + 1])
    ids, mask = rows.ids[start:end].tolist(), rows.mask[start:end]
    segments = []
    for a, b, learnt in spans(mask)[:SAMPLE_SEGMENTS]:
        parts = (
            [ids[a:b]] if b - a <= SAMPLE_TOKENS else [ids[a:][: SAMPLE_TOKENS // 2], ids[b - SAMPLE_TOKENS // 2 : b]]
        )
        segments.append({"ids": parts, "loss": learnt})
    return {"id": row_id, "tokens": end - start, "loss_tokens": int(mask.sum()), "segments": segments}


def decoded(found: dict[str, Any], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """A sample with text in place of ids; one that has text already stays as it is."""
    segments = [
        {"text": " ... ".join(map(decode, s["ids"])), "loss": s["loss"]} if "ids" in s else s for s in found["segments"]
    ]
    return {**found, "segments": segments}
