"""tokenizer.read against an independent splitter, and against every way in which a file is not what its name says."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer.job import Exit, JobError
from tokenizer.read import HEAD, Chunk, LineReader, LongLine

ROWS = [json.dumps({"n": n, "text": "é\u2028\x85 " * (n % 7)}, ensure_ascii=False).encode() for n in range(500)]
PLAIN = b"\n".join(ROWS) + b"\n"


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def read(data: bytes, size: int = 1000, name: str = "s3://b/raw/a.jsonl", **limits: int) -> list[Chunk]:
    return list(LineReader(pieces(data, size), name, **limits))


def numbered(chunks: list[Chunk]) -> list[tuple[int, bytes]]:
    return [pair for chunk in chunks for pair in chunk.numbered()]


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def test_lines_end_at_newline_bytes_alone() -> None:
    assert numbered(read(PLAIN)) == list(enumerate(ROWS, 1))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"a":1}\r\n{"a":2}\r\n', [(1, b'{"a":1}'), (2, b'{"a":2}')]),
        (b'\xef\xbb\xbf{"a":1}\n', [(1, b'{"a":1}')]),
        (b'{"a":1}\n{"a":2}', [(1, b'{"a":1}'), (2, b'{"a":2}')]),
        (b'\n\r\n  \n{"a":1}\n\n{"a":2}\n\n', [(4, b'{"a":1}'), (6, b'{"a":2}')]),
        (b'{"a":1}\r', [(1, b'{"a":1}')]),
        (b"", []),
        (b"\n\n\n", []),
        (b"1", [(1, b"1")]),
    ],
    ids=["crlf", "bom", "no last newline", "blank lines count", "cr at the end", "empty", "blank", "one byte"],
)
@pytest.mark.parametrize("size", [1, 2, 1000])
def test_line_endings_and_numbers(data: bytes, expected: list[tuple[int, bytes]], size: int) -> None:
    assert numbered(read(data, size)) == expected


@given(
    lines=st.lists(st.binary(max_size=60).map(lambda b: b"{" + b.replace(b"\n", b"")), max_size=40),
    size=st.integers(1, 90),
    chunk=st.integers(1, 40),
    last=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_chunks_depend_on_content_alone(lines: list[bytes], size: int, chunk: int, last: bool) -> None:
    """Against the rule spelled out line by line: a chunk ends with the first line end at or beyond chunk_bytes."""
    data = b"\n".join(lines) + (b"\n" if last and lines else b"")
    expected: list[tuple[int, list[bytes], LongLine | None]] = []
    first, taken, held = 1, [], 0
    for number, line in enumerate(lines, 1):
        held += len(line) + 1
        if len(line) > 40:
            expected.append((first, taken, LongLine(number, line)))
        elif held >= chunk:
            expected.append((first, [*taken, line], None))
        else:
            taken.append(line)
            continue
        first, taken, held = number + 1, [], 0
    if taken and taken != [b""]:
        expected.append((first, taken, None))
    from tokenizer.read import cut_lines

    got = [(c.first, c.lines, c.too_long) for c in cut_lines(pieces(data, size), chunk, 40)]
    assert got == expected


def test_an_over_long_line_is_a_marker_and_the_rest_is_read() -> None:
    long = b'{"t":"' + b"x" * 200_000 + b'"}'
    data = b"\n".join([ROWS[0], b"", long, ROWS[1]]) + b"\n"
    for size in (777, 70_000, 1 << 20):
        chunks = read(data, size, chunk_bytes=4096, longest_line=100_000)
        assert numbered(chunks) == [(1, ROWS[0]), (4, ROWS[1])]
        assert [c.too_long for c in chunks if c.too_long] == [LongLine(3, long[:HEAD])]
    assert read(long, 5000, chunk_bytes=4096, longest_line=100_000)[0].too_long == LongLine(1, long[:HEAD])


def test_a_line_of_exactly_the_limit_is_taken() -> None:
    line = b'{"t":"' + b"x" * 4000 + b'"}'
    assert numbered(read(line + b"\n", 100, chunk_bytes=1000, longest_line=len(line))) == [(1, line)]
    assert numbered(read(line + b"\n", 100, chunk_bytes=1000, longest_line=len(line) - 1)) == []


SKIPPABLE = b"\x53\x2a\x4d\x18\x03\x00\x00\x00abc"
FORMS = {
    "plain": PLAIN,
    "gzip": gzip.compress(PLAIN),
    "gzip members": b"".join(gzip.compress(part) for part in pieces(PLAIN, 3333)),
    "gzip padded": gzip.compress(PLAIN) + bytes(500),
    "gzip empty member": gzip.compress(b"") + gzip.compress(PLAIN),
    "zstd": zstd(PLAIN),
    "zstd frames": b"".join(zstd(part) for part in pieces(PLAIN, 3333)),
    "zstd skippable": SKIPPABLE + zstd(PLAIN[:100]) + SKIPPABLE + zstd(PLAIN[100:]),
    "gzip with a mark": gzip.compress(b"\xef\xbb\xbf" + PLAIN),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_every_form_gives_the_same_lines_whatever_its_name(form: str, name: str) -> None:
    for size in (1, 3, 1000, 1 << 20):
        reader = LineReader(pieces(FORMS[form], size), name)
        assert numbered(list(reader)) == list(enumerate(ROWS, 1))
        assert reader.bytes_read == len(FORMS[form])
        assert reader.sha256 == hashlib.sha256(FORMS[form]).hexdigest()


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_little_that_unpacks_to_much(compress: Callable[[bytes], bytes]) -> None:
    data = compress(b"\n" * 3_000_000 + ROWS[0])
    assert len(data) < 10_000
    assert numbered(read(data, len(data), chunk_bytes=1 << 20)) == [(3_000_001, ROWS[0])]


def parquet() -> bytes:
    sink = io.BytesIO()
    pa.parquet.write_table(pa.table({"a": [1]}), sink)
    return sink.getvalue()


def arrow(stream: bool) -> bytes:
    sink, table = io.BytesIO(), pa.table({"a": [1]})
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def zipped() -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("a.jsonl", PLAIN)
    return sink.getvalue()


def flipped(data: bytes) -> bytes:
    return data[:-6] + bytes([data[-6] ^ 0xFF]) + data[-5:]


LIST = json.dumps([json.loads(row) for row in ROWS[:3]], indent=2).encode()
OBJECT = json.dumps({"messages": [{"role": "user", "content": "hi"}], "id": "1"}, indent=2).encode()
REFUSED = {
    "cut gzip": (gzip.compress(PLAIN)[:-20], "cut gzip"),
    "cut gzip trailer": (gzip.compress(PLAIN)[:-3], "cut gzip"),
    "cut second member": (gzip.compress(PLAIN) + gzip.compress(PLAIN)[:-9], "cut gzip"),
    "gzip, first bytes": (b"\x1f\x8b\x08", "cut gzip"),
    "gzip, one byte": (b"\x1f", "cut off"),
    "corrupt gzip": (flipped(gzip.compress(PLAIN)), "corrupt gzip"),
    "gzip and garbage": (gzip.compress(PLAIN) + b"garbage", "corrupt gzip"),
    "cut zstd": (zstd(PLAIN)[:-20], "cut zstd"),
    "corrupt zstd": (zstd(PLAIN) + b"garbage", "corrupt zstd"),
    "zstd header alone": (zstd(PLAIN)[:5], "cut zstd"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "Git LFS pointer"),
    "list": (LIST, "JSON list"),
    "one-line list": (json.dumps([{"a": 1}, {"a": 2}]).encode(), "JSON list"),
    "list after blank lines and a mark": (b"\xef\xbb\xbf\n\n  " + LIST, "JSON list"),
    "gzipped list": (gzip.compress(LIST), "JSON list"),
    "pretty object": (OBJECT, "pretty-printed"),
    "pretty object, tabs": (json.dumps({"a": {"b": [1]}}, indent="\t").encode(), "pretty-printed"),
    "pretty objects": (OBJECT + b"\n" + OBJECT, "pretty-printed"),
    "object over lines": (b'{"a": 1,\n "b": 2}\n', "pretty-printed"),
    "utf-16": (PLAIN.decode().encode("utf-16"), "UTF-16"),
    "utf-16 be": (b"\xfe\xff" + PLAIN.decode().encode("utf-16-be"), "UTF-16"),
    "utf-16, no mark": (PLAIN.decode().encode("utf-16-le"), "UTF-16"),
    "utf-32": (PLAIN.decode().encode("utf-32"), "UTF-32"),
    "utf-32 be, no mark": (PLAIN.decode().encode("utf-32-be"), "UTF-32"),
    "zeros": (bytes(5000), "binary"),
    "parquet": (parquet(), "Parquet"),
    "arrow file": (arrow(False), "Arrow"),
    "arrow stream": (arrow(True), "Arrow"),
    "zip": (zipped(), "zip"),
    "gzip in gzip": (gzip.compress(gzip.compress(PLAIN)), "gzip inside"),
    "html": (b"\n<!DOCTYPE html><html><body>404</body></html>", "HTML"),
    "s3 error": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "XML"),
    "bzip2": (b"BZh91AY&SY" + bytes(range(1, 90)), "bzip2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_as_a_whole_with_name_and_remedy(case: str) -> None:
    data, words = REFUSED[case]
    for size in (1, 4096, 1 << 20):
        with pytest.raises(JobError) as error:
            read(data, size, "s3://b/raw/a.jsonl.gz")
        assert error.value.code is Exit.DATA
        assert "s3://b/raw/a.jsonl.gz" in error.value.message and words in error.value.message
        assert error.value.hint


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": "cut in the middle,\nof a string"}\n{"a":1}\n',  # one torn row is a reject, not a refusal
        b'{"a": [\n{"a":1}\n',
        b'{"a":1}\n[1]\n',
        b'{"a":1}\n\x00\x00\x00\x00\n',
        b"not json\n",
        b'{"a":1}',
        b'{"a":"' + b"\\u0000" * 50 + b'"}\n',
    ],
)
def test_a_bad_line_does_not_refuse_the_object(data: bytes) -> None:
    assert b"\n".join(line for _, line in numbered(read(data))) == data.rstrip(b"\n")


MEASURE = """
import gzip, sys, zlib, zstandard
from tokenizer.read import LineReader
def rss():  # the peak of this process image; ru_maxrss would include that of the parent before exec
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
def stream(total):
    piece = ((b'{"t":"' + b"x" * 2000 + b'"}\\n') * 4200)[:8 << 20]
    for _ in range(total >> 23): yield piece
def bomb(total, compress, flush):
    yield compress(b'{"t":1}\\n{"t":"')
    for _ in range(total >> 23): yield compress(b"x" * (8 << 20))
    yield compress(b'"}\\n{"t":3}\\n') + flush()
kind, total = sys.argv[1], int(sys.argv[2]) << 20
if kind == "plain": source = stream(total)
elif kind == "gzip":
    c = zlib.compressobj(1, wbits=31); source = iter([b"".join(bomb(total, c.compress, c.flush))])
else:
    c = zstandard.ZstdCompressor(level=1).compressobj(); source = iter([b"".join(bomb(total, c.compress, c.flush))])
before = rss()
lines = long = 0
for chunk in LineReader(source, "k"):
    lines += len(chunk.lines); long += chunk.too_long is not None
print(rss() - before, lines, long)
"""


def measure(kind: str, mib: int) -> tuple[float, int, int]:
    """Growth of peak RSS in MiB while `mib` MiB of text are read in a fresh process; lines; over-long lines."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, kind, str(mib)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    grown, lines, long = done.stdout.split()
    return float(grown), int(lines), int(long)


def test_memory_does_not_grow_with_the_object() -> None:
    small, lines, _ = measure("plain", 32)
    large, more, _ = measure("plain", 200)
    assert lines > 15_000 and more > 6 * lines
    assert large < small + 8 and large < 64


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_memory_is_bounded_for_a_line_that_unpacks_without_end(kind: str) -> None:
    grown, lines, long = measure(kind, 512)
    assert (lines, long) == (2, 1)
    assert grown < 160
