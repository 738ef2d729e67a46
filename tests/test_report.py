"""`report`: one page with its charts, from what OUT holds; nothing of it leaves the file, nothing in it runs."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import ctl, tokenize
from job_fixtures import write_corpus

from dflashctl import charts, report

VOID = {"meta", "!doctype"}


class Nested(HTMLParser):
    """Fails on a tag that is closed wrongly; collects tags and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def whole(text: str) -> Nested:
    """The page, once nothing in it runs or points outside."""
    found = Nested(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert not re.search(r"https?://|@import|url\(|\bon\w+=", text)
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(svg)
    return found


def steps(count: int) -> list[dict[str, Any]]:
    figures = {"lr": 1e-4, "grad_norm": 1.0, "tokens_per_s": 5e3, "target_busy": 0.9, "drafter_busy": 0.5}
    return [
        {"step": n, "loss": 5 - n / count, "accuracy": [0.5, 0.25], "ring_depth": 1.5, "rows": [n], **figures}
        for n in range(1, count + 1)
    ]


def lines(entries: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def test_ticks_are_round_and_cover_the_range() -> None:
    assert charts.ticks(0, 1) == [0, 0.2, 0.4, pytest.approx(0.6), 0.8, 1]
    assert charts.ticks(3, 1204, 8) == [200, 400, 600, 800, 1000, 1200]
    assert charts.ticks(2, 2) == [2]


def test_many_points_are_averaged_and_what_is_no_number_is_left_out() -> None:
    points = [(float(n), 2.0) for n in range(1000)] + [(1000.0, float("nan"))]
    found = charts.thinned(points)
    assert len(found) <= charts.POINTS and {y for _, y in found} == {2.0}
    assert charts.thinned(points[:3]) == points[:3]


def test_a_line_goes_where_its_figures_are() -> None:
    svg = re.search(r"<svg.*</svg>", charts.lines("t", [("a", [(0, 0), (5, 10), (10, 5)])]))
    assert svg
    [line] = ET.fromstring(svg[0]).findall("polyline")
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
    assert x1 - x0 == x2 - x1 > 0
    assert y0 - y1 == pytest.approx(2 * (y0 - y2)) and y1 == charts.TOP and y0 == charts.HEIGHT - charts.BOTTOM


def test_the_page_of_a_training_shows_its_curves() -> None:
    metrics = (
        lines([*steps(20), {"step": 10, "held_out_tau": 1.5}, {"step": 20, "held_out_tau": 2.25}]) + b'{"step": 21'
    )
    story = {"exported_tau": 2.2, "dataset": "s3://d", "target": "<b>T</b>", "versions": {"torch": "2.1"}}
    page = whole(report.of_training("s3://x/out", "complete", metrics, {"lr": 6e-4}, story))
    assert page.tags.count("svg") == 8
    for words in ("2.250 tokens a pass of the target, after step 20", "2.200, of the files", "<b>T</b>", "20 done"):
        assert words in page.text
    assert "1: 50.0%" in page.text and "2: 25.0%" in page.text and "tau 1.5 at step 10" in page.text


def test_a_training_without_a_step_has_a_page() -> None:
    page = whole(report.of_training("out", "not complete", b"", {"lr": 6e-4}, {}))
    assert "No step is logged yet." in page.text and "svg" not in page.tags


def test_reports_of_a_real_dataset(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 1, 40)
    done = tokenize(tmp_path, str(corpus), "out", "--min-loss-tokens", "1", "--max-reject", "1")
    assert done.code == 0, done.err
    made = ctl(tmp_path, "report", "out", "--html")
    assert (made.code, made.out) == (0, "out-report.html\n"), made.err
    record = json.loads((tmp_path / "out/dataset.json").read_text())
    page = whole((tmp_path / "out-report.html").read_text())
    assert page.tags.count("svg") == 2 and "mark" in page.tags
    assert f"{record['rows']:,}" in page.text and record["samples"][0]["id"] in page.text
    text = ctl(tmp_path, "report", "out")
    assert text.out == ctl(tmp_path, "inspect", "out").out
    none = ctl(tmp_path, "report", "nowhere", "--html")
    assert (none.code, "neither a dataset nor a training" in none.err) == (4, True)
    assert not (tmp_path / "nowhere-report.html").exists()


def test_text_of_data_stays_text(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 1, 8)
    assert tokenize(tmp_path, str(corpus), "out", "--min-loss-tokens", "1").code == 0
    record = json.loads((tmp_path / "out/dataset.json").read_text())
    evil = "<script>alert(1)</script>\x1b[2J&"
    record["samples"] = [{"id": evil, "segments": [{"text": evil, "loss": True}, {"text": "x" * 9000, "loss": False}]}]
    record["supervised"] = [{"text": evil, "count": 3}]
    record["reasons"] = [evil]
    page = whole(report.of_dataset(evil, record))
    assert page.text.count("<script>alert(1)</script>") >= 4 and "... (cut)" in page.text
