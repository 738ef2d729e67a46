"""From a dataset to a fixed list of padded micro-batches, made before anybody knows how many ranks there are.

Rows are mapped into memory and read in place. One pass at the start checks every row against the contract and the
target and keeps a few numbers of each; order, epochs and steps are then pure functions of (seed, epoch, row number), so
that any rank, and any later process, computes the same list. Sorting rows by length within a window keeps padding
small, and shuffling the micro-batches of an epoch afterwards keeps a step from being all short or all long rows.

Shapes: N rows, B rows of a micro-batch, S positions. Row numbers count the dataset's rows in order, from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokenizer.job import Exit, JobError
from tokenizer.shard import SCHEMA, Rows, batches, cut, list_column, loss_per_row
from trainer.cache import changed

WINDOW = 2048  # rows that are sorted by length together
PAD = 32  # positions of a micro-batch are a multiple of this: few shapes
MEASUREMENTS = 20  # of the held-out rows in a run
COLUMNS = ("batch", "row", "length", "places", "held")
HELD_OUT_ROWS = 256  # most rows that the held-out walk takes

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Index:
    """What is known of each row after the one pass over the data, and what that pass counted.

    batch, row: where a row lies, int32 [N]. length: tokens after the cut, int32 [N]. places: where an anchor may
    stand, int32 [N]. held: bool [N], of a held-out input line. counts: rows, tokens, cut_rows, cut_loss_tokens,
    no_anchor, held_out.
    """

    batch: NDArray[np.int32]
    row: NDArray[np.int32]
    length: NDArray[np.int32]
    places: NDArray[np.int32]
    held: NDArray[np.bool_]
    counts: Mapping[str, int] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        arrays: dict[str, Any] = {name: getattr(self, name) for name in COLUMNS}
        arrays |= {f"count_{name}": np.int64(value) for name, value in self.counts.items()}
        np.savez(path, **arrays)

    @classmethod
    def load(cls, path: Path) -> Index:
        with np.load(path) as file:
            counts = {name[6:]: int(file[name]) for name in file.files if name.startswith("count_")}
            return cls(**{name: file[name] for name in COLUMNS}, counts=counts)

    @property
    def trained(self) -> Int:
        """Numbers of the rows that are trained: not held out, with a place for an anchor."""
        return np.flatnonzero(~self.held & (self.places > 0))

    @property
    def measured(self) -> Int:
        """Numbers of the held-out rows that are measured, spread over the dataset."""
        rows = np.flatnonzero(self.held & (self.places > 0))
        picked = rows[np.argsort(mix(0, 0, rows), kind="stable")[:HELD_OUT_ROWS]]
        return np.sort(picked)


class Dataset:
    """The record batches of some shards, mapped into memory."""

    def __init__(self, paths: Sequence[Path], max_length: int) -> None:
        """Raises JobError(65) naming a file that is no shard of this format."""
        self.paths, self.max_length = list(paths), max_length
        self.batches: list[pa.RecordBatch] = []
        self.shard: list[int] = []  # of each record batch
        for number, path in enumerate(self.paths):
            try:
                found = list(batches(path))
            except (pa.ArrowInvalid, OSError) as error:
                why = str(error).splitlines()[0]
                raise JobError(Exit.DATA, f"shard `{path}` cannot be read: {why}", "tokenize again") from error
            for batch in found:
                if not batch.schema.equals(SCHEMA):
                    raise JobError(Exit.DATA, f"shard `{path}`: {_schema_difference(batch.schema)}", "tokenize again")
            self.batches += found
            self.shard += [number] * len(found)

    def read(self, batch: int, row: int) -> tuple[NDArray[np.int32], NDArray[np.int8], str]:
        """Tokens, loss mask and id of one row, cut to the longest length that is trained."""
        one = self.batches[batch].slice(row, 1)
        ids, offsets = list_column(one.column("input_ids"), "<i4")
        mask, _ = list_column(one.column("loss_mask"), "<i1")
        rows = cut(Rows(ids, offsets.astype(np.int64), mask), self.max_length)
        return rows.ids, rows.mask, str(one.column("id")[0])

    def index(
        self,
        record: Mapping[str, Any],
        vocab_size: int,
        held_out: float,
        beat: Callable[[], None] = lambda: None,
    ) -> tuple[Index, NDArray[np.bool_]]:
        """Check every row; return what is known of them, and which token ids occur (bool [vocab_size]).

        record: dataset.json. vocab_size: embedding rows of the target. held_out: share of input lines.
        Raises JobError(65) naming shard and row of the first that does not fit, or saying that no row can be trained.
        """
        parts: list[tuple[NDArray[Any], ...]] = []
        used = np.zeros(vocab_size, np.bool_)
        counts = dict.fromkeys(("rows", "tokens", "cut_rows", "cut_loss_tokens", "no_anchor", "held_out"), 0)
        rows_of_shard = [0] * len(self.paths)
        for number, batch in enumerate(self.batches):
            beat()
            path = self.paths[self.shard[number]]
            rows = _checked(batch, path, vocab_size)
            rows_of_shard[self.shard[number]] += batch.num_rows
            used[rows.ids] = True
            kept = cut(rows, self.max_length)
            lengths, before = np.diff(kept.offsets), np.diff(rows.offsets)
            places = loss_per_row(Rows(kept.ids, kept.offsets, _eligible(kept)))
            held = held_out_lines(batch.column("id").to_pylist(), held_out)
            counts["rows"] += batch.num_rows
            counts["tokens"] += int(lengths.sum())
            counts["cut_rows"] += int((before > lengths).sum())
            counts["cut_loss_tokens"] += int(loss_per_row(rows).sum()) - int(loss_per_row(kept).sum())
            counts["no_anchor"] += int((places == 0).sum())
            counts["held_out"] += int(held.sum())
            where = np.full(batch.num_rows, number, np.int32), np.arange(batch.num_rows, dtype=np.int32)
            parts.append((*where, lengths.astype(np.int32), places, held))
        for path, found, shard in zip(self.paths, rows_of_shard, record["shards"], strict=True):
            if found != shard["rows"]:
                raise JobError(
                    Exit.DATA, f"shard `{path}` has {found} rows, its record {shard['rows']}", "tokenize again"
                )
        if not parts:
            raise JobError(Exit.DATA, "the dataset has no row", "tokenize completions that hold some")
        columns = {name: np.concatenate(found) for name, found in zip(COLUMNS, zip(*parts, strict=True), strict=True)}
        index = Index(**columns, counts=counts)
        if not len(index.trained):
            raise JobError(
                Exit.DATA,
                f"none of {counts['rows']} rows can be trained: {counts['no_anchor']} have no place for an anchor,"
                f" {counts['held_out']} are held out",
                "raise --max-length, lower --held-out, or look at `dflashctl inspect`",
            )
        return index, used


def _schema_difference(found: pa.Schema) -> str:
    for field_ in SCHEMA:
        if field_.name not in found.names:
            return f"column `{field_.name}` is missing"
        if found.field(field_.name).type != field_.type:
            return f"column `{field_.name}` is {found.field(field_.name).type}, not {field_.type}"
    return f"columns are {', '.join(found.names)}, not {', '.join(SCHEMA.names)}"


def _checked(batch: pa.RecordBatch, path: Path, vocab_size: int) -> Rows:
    """The rows of a record batch, each of which fits; JobError(65) names the first that does not."""
    for name in SCHEMA.names:
        if batch.column(name).null_count:
            raise JobError(Exit.DATA, f"shard `{path}`: column `{name}` holds nulls", "tokenize again")

    def refuse(row: int, why: str) -> JobError:
        return JobError(Exit.DATA, f"shard `{path}`, row `{batch.column('id')[row]}`: {why}", "tokenize again")

    ids, offsets = list_column(batch.column("input_ids"), "<i4")
    mask, mask_offsets = list_column(batch.column("loss_mask"), "<i1")
    bad = np.flatnonzero(np.diff(offsets) != np.diff(mask_offsets))
    if len(bad):
        tokens, marks = (int(np.diff(column)[bad[0]]) for column in (offsets, mask_offsets))
        raise refuse(int(bad[0]), f"{tokens} tokens, but a loss mask of {marks}")
    bad = np.flatnonzero(np.diff(offsets) == 0)
    if len(bad):
        raise refuse(int(bad[0]), "has no token")
    rows = Rows(ids, offsets.astype(np.int64), mask)

    def row_of(token: Any) -> int:
        return int(np.searchsorted(offsets, token, "right")) - 1

    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(bad):
        raise refuse(row_of(bad[0]), f"token id {ids[bad[0]]} is none of the target's {vocab_size}")
    bad = np.flatnonzero((mask != 0) & (mask != 1))
    if len(bad):
        raise refuse(row_of(bad[0]), f"loss mask holds {mask[bad[0]]}, which is neither 0 nor 1")
    told = batch.column("n_loss").to_numpy()
    bad = np.flatnonzero(loss_per_row(rows) != told)
    if len(bad):
        raise refuse(int(bad[0]), f"{loss_per_row(rows)[bad[0]]} loss tokens, n_loss says {told[bad[0]]}")
    return rows


def _eligible(rows: Rows) -> NDArray[np.int8]:
    """int8 [tokens]: 1 where an anchor may stand, which is where the token and its row's next are learnt."""
    eligible = np.zeros_like(rows.mask)
    if len(rows.mask) > 1:
        eligible[:-1] = rows.mask[:-1] & rows.mask[1:]
        eligible[rows.offsets[1:] - 1] = 0
    return eligible


def held_out_lines(ids: Sequence[str], share: float) -> NDArray[np.bool_]:
    """bool [rows]: whether a row's input line is held out. All turns of a line are on one side: it is `path:line`."""
    limit = int(share * 2**32)
    if not limit:
        return np.zeros(len(ids), np.bool_)
    hashes = (blake2b(name.rpartition("#")[0].encode(), digest_size=4).digest() for name in ids)
    return np.fromiter((int.from_bytes(digest, "little") < limit for digest in hashes), np.bool_, len(ids))


def mix(seed: int, epoch: int, values: Int) -> NDArray[np.uint64]:
    """A well-mixed uint64 of (seed, epoch, value): splitmix64, the same in every version of every library."""
    state = int.from_bytes(blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest(), "little")
    z = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(state)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Item(NamedTuple):
    """A micro-batch. number: decides its ranks; slot: place within its step; rows: row numbers; width: S, padded."""

    step: int
    epoch: int
    number: int
    slot: int
    rows: tuple[int, ...]
    width: int
    held: bool = False


class Schedule:
    """Which micro-batches make which step. Steps are numbered from 0 and never cross an epoch's end."""

    def __init__(
        self, index: Index, *, seed: int, batch_rows: int, accumulate: int, epochs: int, steps: int = 0
    ) -> None:
        """steps: how many in all, 0 = those of `epochs`."""
        self.lengths, self.rows = index.length, index.trained
        self.seed, self.batch_rows, self.accumulate = seed, batch_rows, accumulate
        micros = sum(
            -(-min(WINDOW, len(self.rows) - start) // batch_rows) for start in range(0, len(self.rows), WINDOW)
        )
        self.micros_per_epoch, self.steps_per_epoch = micros, -(-micros // accumulate)
        self.total = steps or epochs * self.steps_per_epoch
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
        measured = index.measured
        order = measured[np.argsort(self.lengths[measured], kind="stable")]
        self.held_out = [
            self._item(-1, 0, number, number, order[start : start + batch_rows], held=True)
            for number, start in enumerate(range(0, len(order), batch_rows))
        ]

    def _item(self, step: int, epoch: int, number: int, slot: int, rows: Int, held: bool = False) -> Item:
        width = -(-int(self.lengths[rows].max()) // PAD) * PAD
        return Item(step, epoch, number, slot, tuple(rows.tolist()), width, held)

    def _make_epoch(self, epoch: int) -> list[Int]:
        shuffled = self.rows[np.argsort(mix(self.seed, 2 * epoch, self.rows), kind="stable")]
        micros: list[Int] = []
        for start in range(0, len(shuffled), WINDOW):
            window = shuffled[start : start + WINDOW]
            window = window[np.argsort(self.lengths[window], kind="stable")]
            micros += [window[at : at + self.batch_rows] for at in range(0, len(window), self.batch_rows)]
        order = np.argsort(mix(self.seed, 2 * epoch + 1, np.arange(len(micros))), kind="stable")
        return [micros[place] for place in order]

    def step(self, number: int) -> list[Item]:
        """The micro-batches of a step."""
        epoch, within = divmod(number, self.steps_per_epoch)
        first = within * self.accumulate
        rows = self._epoch(epoch)[first : first + self.accumulate]
        base = epoch * self.micros_per_epoch + first
        return [self._item(number, epoch, base + slot, slot, found) for slot, found in enumerate(rows)]

    @property
    def widest(self) -> int:
        """Positions of the widest micro-batch there can be."""
        used = [int(self.lengths[self.rows].max()), *(item.width for item in self.held_out)]
        return -(-max(used) // PAD) * PAD

    def measured_after(self, steps: int) -> bool:
        """Whether the held-out rows are measured after so many steps, those at the end apart."""
        return 0 < steps < self.total and steps % max(1, self.total // MEASUREMENTS) == 0

    def stream(self, start: int, finals: int = 0) -> Iterator[Item]:
        """Every micro-batch from step `start` on; the held-out ones where due, and `finals` times at the end.

        A walk comes right before the step that follows it, so a resume begins with the one that a stop broke off.
        """
        for number in range(start, self.total):
            if self.measured_after(number):
                yield from self.measurement(number)
            yield from self.step(number)
        for _ in range(finals):
            yield from self.measurement(self.total)

    def measurement(self, steps: int) -> list[Item]:
        """The held-out micro-batches as they come after so many steps."""
        return [item._replace(step=steps) for item in self.held_out]


class Padded(NamedTuple):
    """ids, mask: int64 and int8 [B, S], padded on the right with 0. names: row ids."""

    ids: NDArray[np.int64]
    mask: NDArray[np.int8]
    names: tuple[str, ...]


def load(dataset: Dataset, index: Index, item: Item) -> Padded:
    """The rows of a micro-batch. Raises JobError(65) for one that has another length than when it was checked."""
    ids = np.zeros((len(item.rows), item.width), np.int64)
    mask = np.zeros((len(item.rows), item.width), np.int8)
    names = []
    for place, number in enumerate(item.rows):
        batch = int(index.batch[number])
        tokens, marks, name = dataset.read(batch, int(index.row[number]))
        if not len(tokens) == len(marks) == index.length[number]:
            raise changed(dataset.paths[dataset.shard[batch]])
        ids[place, : len(tokens)], mask[place, : len(marks)] = tokens, marks
        names.append(name)
    return Padded(ids, mask, tuple(names))
