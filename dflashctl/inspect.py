"""The report on a dataset: what is in it, what is learnt, what was left out, and why it was refused if it was.

Pure: from the record that finalising wrote (dataset.json or refused.json), or the same figures of an unfinished run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dflashctl import show

SHOWN_TEXT = 60  # characters of a text in a table
BAR = 40  # characters of the longest bar
Record = Mapping[str, Any]


def report(record: Record) -> dict[str, Any]:
    """The object of `inspect -o json`. loss_share: learnt tokens / tokens; histogram: loss tokens of a row -> rows."""
    histogram = {str(loss): int(rows) for loss, rows in sorted(record["histogram"]["after"].items(), key=_by_number)}
    tokens = int(record["tokens"])
    return {
        "schema": "dflash.inspect/1",
        "rows": record["rows"],
        "tokens": tokens,
        "loss_tokens": record["loss_tokens"],
        "loss_share": record["loss_tokens"] / tokens if tokens else 0.0,
        "lines": {key: record["lines"][key] for key in ("seen", "kept", "rejected")},
        "loss_per_row": percentiles(histogram),
        "histogram": histogram,
        "most_common_supervised": [{"text": s["text"], "count": s["count"]} for s in record["supervised"]],
        "degenerate": record["degenerate"],
        "reasons": list(record["reasons"]),
    }


def _by_number(item: tuple[str, Any]) -> int:
    return int(item[0])


def percentiles(histogram: Mapping[str, int]) -> dict[str, int | None]:
    """min, p10, p50, p90, max by nearest rank; None each where there is no row."""
    total = sum(histogram.values())
    ranks = {"min": 1, "p10": -(-total // 10), "p50": -(-total // 2), "p90": -(-9 * total // 10), "max": total}
    found: dict[str, int | None] = dict.fromkeys(ranks)
    passed = 0
    for loss, rows in histogram.items():
        for name, rank in ranks.items():
            if passed < rank <= passed + rows:
                found[name] = int(loss)
        passed += rows
    return found


def buckets(histogram: Mapping[str, int]) -> list[tuple[str, int]]:
    """Rows by loss tokens in powers of two: ("0", n), ("1", n), ("2-3", n), ... up to the highest that is used."""
    sums: dict[int, int] = {}
    for loss, rows in histogram.items():
        sums[int(loss).bit_length()] = sums.get(int(loss).bit_length(), 0) + rows
    span = range(min(sums), max(sums) + 1) if sums else range(0)
    return [(str(bits) if bits < 2 else f"{1 << bits - 1}-{(1 << bits) - 1}", sums.get(bits, 0)) for bits in span]


def lines(record: Record, wide: bool) -> list[str]:
    """The report as text; `wide` adds the histogram of all rows before the filter, and the samples."""
    shown = report(record)
    text = show.pairs([(name, value) for name, value in _figures(record, shown)])
    text += ["", "loss tokens per row", *_bars(shown["histogram"])]
    if wide:
        text += ["", "loss tokens per row, before the filter", *_bars(record["histogram"]["before"])]
    if shown["most_common_supervised"]:
        rows = [
            (show.count(s["count"]), show.one_line(s["text"], SHOWN_TEXT)) for s in shown["most_common_supervised"][:10]
        ]
        text += [
            "",
            "most common supervised texts, counted before the filter",
            *show.table(("rows", "text"), rows, right=(0,)),
        ]
    for sample in record["samples"] if wide else record["samples"][:1]:
        text += ["", f"sample {sample['id']}, learnt text {show.learnt('marked')}", show.segments(sample["segments"])]
    if standing(record) == "not complete":
        text += ["", *shown["reasons"]]
    elif shown["degenerate"]:
        text += ["", "degenerate", *(f"  {reason}" for reason in shown["reasons"])]
    elif shown["reasons"]:
        text += ["", "refused", *(f"  {reason}" for reason in shown["reasons"])]
    return text


def standing(record: Record) -> str:
    """Whether what the record tells of is complete, refused, or not complete."""
    if not record.get("complete", True):
        return "not complete"
    return "refused" if record["reasons"] and "shards" not in record else "complete"


def _figures(record: Record, shown: Record) -> Iterable[tuple[str, str]]:
    seen, kept = shown["lines"]["seen"], shown["lines"]["kept"]
    loss = shown["loss_per_row"]
    yield "lines", f"{show.count(seen)} seen, {show.count(kept)} kept, {show.count(seen - kept)} rejected"
    for reason, number in shown["lines"]["rejected"].items():
        yield f"  {reason}", show.count(number)
    for reason, number in record["turns_rejected"].items():
        yield f"  turns {reason}", show.count(number)
    yield "rows", show.count(shown["rows"])
    yield "tokens", show.count(shown["tokens"])
    yield "loss tokens", f"{show.count(shown['loss_tokens'])} ({shown['loss_share']:.1%})"
    yield "loss per row", ", ".join(f"{name} {'-' if value is None else value}" for name, value in loss.items())
    if record["cut"].get("rows"):
        yield "cut", f"{show.count(record['cut']['rows'])} rows, {show.count(record['cut']['loss_tokens'])} loss tokens"
    if record["control_tokens"]:
        yield "control tokens", f"{show.count(record['control_tokens'])} quoted in replies, as ordinary text"
    if left_out := record.get("left_out"):
        yield "not read", ", ".join(f"{number} {reason}" for reason, number in left_out.items())
    for key in record["skipped"]:
        yield "skipped file", key


def _bars(histogram: Mapping[str, int]) -> list[str]:
    found = buckets(histogram)
    most = max((rows for _, rows in found), default=0)
    rows = [(name, show.count(number), "#" * round(BAR * number / most) if most else "") for name, number in found]
    return show.table(("loss tokens", "rows", ""), rows, right=(1,)) if rows else ["no row"]


def against(left: tuple[str, Record], right: tuple[str, Record]) -> dict[str, Any]:
    """Two datasets, each a name and a record: their reports, what differs in the spec, and whether rows are equal."""
    (name, record), (other, that) = left, right
    spec = {**_spec(record), **_spec(that)}
    return {
        "schema": "dflash.inspect-against/1",
        "datasets": [{"out": name, **report(record)}, {"out": other, **report(that)}],
        "spec": {
            key: [_spec(record).get(key), _spec(that).get(key)]
            for key in spec
            if _spec(record).get(key) != _spec(that).get(key)
        },
        "same_rows": bool(record.get("content_sha256")) and record.get("content_sha256") == that.get("content_sha256"),
    }


def _spec(record: Record) -> Mapping[str, Any]:
    spec: Mapping[str, Any] = record.get("spec") or {}
    return spec


def against_lines(document: Record, standings: Sequence[str]) -> list[str]:
    """The comparison as a table of two columns; standings: `standing` of each. Then why one is not complete."""
    pair: Sequence[Record] = document["datasets"]
    rows: list[tuple[str, str, str]] = []

    def row(name: str, values: Iterable[object]) -> None:
        left, right = (show.count(v) if isinstance(v, int) and not isinstance(v, bool) else str(v) for v in values)
        rows.append((name, left, right))

    row("dataset", standings)
    row("lines seen", [d["lines"]["seen"] for d in pair])
    row("lines kept", [d["lines"]["kept"] for d in pair])
    for reason in sorted({r for d in pair for r in d["lines"]["rejected"]}):
        row(f"  {reason}", [d["lines"]["rejected"].get(reason, 0) for d in pair])
    for name in ("rows", "tokens", "loss_tokens"):
        row(name.replace("_", " "), [d[name] for d in pair])
    row("loss share", [f"{d['loss_share']:.1%}" for d in pair])
    for name in pair[0]["loss_per_row"]:
        row(f"loss per row {name}", ["-" if d["loss_per_row"][name] is None else d["loss_per_row"][name] for d in pair])
    told = [("no", "yes")[d["degenerate"]] for d in pair]
    row("degenerate", ["-" if is_ == "not complete" else word for is_, word in zip(standings, told, strict=True)])
    for key, values in document["spec"].items():
        row(f"spec {key}", [show.one_line(str(value), SHOWN_TEXT) for value in values])
    row("same rows", ["yes" if document["same_rows"] else "no", ""])
    text = show.table(("", *(d["out"] for d in pair)), rows, right=(1, 2))
    for dataset, is_ in zip(pair, standings, strict=True):
        if is_ != "complete":
            text.append(f"{dataset['out']} is {'; '.join([*['refused'] * (is_ == 'refused'), *dataset['reasons']])}")
    return text
