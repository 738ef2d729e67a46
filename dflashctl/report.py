"""One self-contained HTML page about a dataset or a training: no script, no font, no address of anything outside.

Pure: from the records of OUT to the text of the page. Everything that comes from data is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dflashctl import charts, show
from dflashctl.inspect import buckets
from dflashctl.inspect import report as inspected

Record = Mapping[str, Any]
TEXT = 400  # characters of a common text
SAMPLE = 4000  # characters of a sample row
LAST = 0.1  # share of the steps at the end that "now" means

STYLE = """
:root{--ink:#1a1d21;--paper:#fff;--soft:#5b6470;--grid:#e3e7ec;--one:#2563b0;--two:#c2571a;--learnt:#d8f0dc}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--paper:#15181c;--soft:#9aa4b0;--grid:#2c323a;--one:#6ba6f0;
--two:#f09a5e;--learnt:#1f4a2a}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1340px;margin:2em auto;
padding:0 1.2em}
h1{font-size:1.4em;margin-bottom:.2em}h2{font-size:1.1em;margin-top:2em}
table{border-collapse:collapse}td,th{padding:.15em 1.2em .15em 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}
th{font-weight:500;color:var(--soft)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:1em 2em}
figure{margin:0}figcaption{font-weight:600}svg{width:100%;height:auto}svg text{font-size:12px;fill:var(--soft)}
pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid var(--grid);padding:.8em;max-height:24em;overflow:auto}
mark{background:var(--learnt);color:inherit}.warn{color:var(--two);font-weight:600}
"""


def page(title: str, parts: Iterable[str]) -> str:
    """The whole file."""
    head = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    meta = '<meta name="viewport" content="width=device-width,initial-scale=1">'
    return f"{head}{meta}<style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"


def pairs(entries: Iterable[tuple[str, object]]) -> str:
    """A table of names and values."""
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in entries)
    return f"<table>{''.join(rows)}</table>"


def counted(entries: Iterable[tuple[str, int]]) -> str:
    """A table of names and numbers."""
    rows = (f"<tr><td>{escape(name)}</td><td class=n>{show.count(number)}</td></tr>" for name, number in entries)
    return f"<table>{''.join(rows)}</table>"


# ---- a dataset


def of_dataset(uri: str, record: Record) -> str:
    """The page about a dataset; record: dataset.json, refused.json, or the summary of what is committed so far."""
    shown = inspected(record)
    lines, loss = shown["lines"], shown["loss_per_row"]
    parts = [f"<h1>Dataset {escape(uri)}</h1>"]
    parts += [f'<p class="warn">{escape(reason)}</p>' for reason in shown["reasons"]]
    parts.append(
        pairs(
            [
                ("model", record.get("model") or "-"),
                ("lines", f"{show.count(lines['seen'])} seen, {show.count(lines['kept'])} kept"),
                ("rows", show.count(shown["rows"])),
                ("tokens", f"{show.count(shown['tokens'])}, {shown['loss_share']:.1%} of them learnt"),
                ("learnt a row", ", ".join(f"{name} {'-' if n is None else n}" for name, n in loss.items())),
            ]
        )
    )
    before = {str(key): int(rows) for key, rows in record["histogram"]["before"].items()}
    drawn = [
        charts.bars("Rows by learnt tokens", buckets(shown["histogram"]), "learnt tokens of a row"),
        charts.bars("The same before the filter", buckets(before), "learnt tokens of a row"),
    ]
    parts.append(f'<div class="charts">{"".join(drawn)}</div>')
    rejects = list(lines["rejected"].items())
    turns = [(f"turns of kept lines: {reason}", number) for reason, number in record["turns_rejected"].items()]
    parts += ["<h2>Not taken</h2>", counted([*rejects, *turns]) if rejects or turns else "<p>Nothing.</p>"]
    if shown["most_common_supervised"]:
        texts = [(show.one_line(text["text"], TEXT), text["count"]) for text in shown["most_common_supervised"][:20]]
        parts += ["<h2>Most common learnt texts, counted before the filter</h2>", counted(texts)]
    if record["samples"]:
        parts.append("<h2>Samples, learnt text marked</h2>")
    for sample in record["samples"]:
        parts.append(f"<h3>{escape(sample['id'])}</h3><pre>{_marked(sample['segments'])}</pre>")
    return page(f"Dataset {uri}", parts)


def _marked(segments: Sequence[Record]) -> str:
    left, text = SAMPLE, ""
    for segment in segments:
        words = escape(show.printable(segment["text"][:left]))
        left -= len(segment["text"])
        text += f"<mark>{words}</mark>" if segment["loss"] else words
        if left <= 0:
            return text + " ... (cut)"
    return text


# ---- a training


def read_metrics(data: bytes) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(lines of steps, lines of walks) of metrics.jsonl; a line that is cut is left out."""
    steps: list[dict[str, Any]] = []
    walks: list[dict[str, Any]] = []
    for line in data.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        (steps if "loss" in entry else walks).append(entry)
    return steps, walks


def of_training(uri: str, state: str, metrics: bytes, identity: Record, story: Record) -> str:
    """The page about a training. identity: of run.json; story: provenance.json, or {} while it is not there."""
    steps, walks = read_metrics(metrics)
    now = steps[-max(1, round(len(steps) * LAST)) :]

    def over(key: str) -> list[charts.Point]:
        return [(entry["step"], float(entry[key])) for entry in steps if entry.get(key) is not None]

    walked = [(entry["step"], float(entry["held_out_tau"])) for entry in walks if "held_out_tau" in entry]
    facts: list[tuple[str, object]] = [("state", state), ("steps", f"{steps[-1]['step'] if steps else 0} done")]
    if now:
        facts.append(("loss", f"{_mean(entry['loss'] for entry in now):.4f}, mean of the last {len(now)} steps"))
        facts.append(("speed", show.rate(_mean(entry["tokens_per_s"] for entry in now), "tokens")))
    if walked:
        facts.append(
            ("held-out tau", f"{walked[-1][1]:.3f} tokens a pass of the target, after step {walked[-1][0]:.0f}")
        )
    if story.get("exported_tau") is not None:
        facts.append(("exported tau", f"{story['exported_tau']:.3f}, of the files that are served"))
    facts += [(key, story[key]) for key in ("dataset", "target") if story.get(key)]
    positions = [
        (str(at + 1), _mean(e["accuracy"][at] for e in now)) for at in range(len(now[-1]["accuracy"]) if now else 0)
    ]
    drawn = [
        charts.lines("Loss", [("loss", over("loss"))], zero=False),
        charts.lines("Held-out tau (the walk: what serving accepts)", [("tau", walked)], dots=True),
        charts.bars("Accuracy by position in the block, now", positions, "position", share=True),
        charts.lines("Busy shares", [("target", over("target_busy")), ("drafter", over("drafter_busy"))]),
        charts.lines("Tokens a second", [("tokens/s", over("tokens_per_s"))]),
        charts.lines("Ring depth", [("micro-batches", over("ring_depth"))]),
        charts.lines("Gradient norm", [("norm", over("grad_norm"))]),
        charts.lines("Learning rate", [("rate", over("lr"))]),
    ]
    parts = [f"<h1>Training {escape(uri)}</h1>", pairs(facts)]
    parts.append(f'<div class="charts">{"".join(drawn)}</div>' if steps else "<p>No step is logged yet.</p>")
    parts += ["<h2>What is trained</h2>", pairs(sorted(identity.items()))]
    if story.get("versions"):
        parts += ["<h2>Versions</h2>", pairs(sorted(story["versions"].items()))]
    return page(f"Training {uri}", parts)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
