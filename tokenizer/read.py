"""From the raw bytes of one object to chunks of whole lines, whatever the object's size.

    lines = LineReader(store.open_stream(key, etag, size), key)
    for chunk in lines:
        for number, line in chunk.numbered(): ...
    lines.sha256, lines.bytes_read     # of the raw bytes; complete once the loop has ended

JSON lines, plain or as gzip (several members) or zstd (several frames), told apart by their first bytes: names lie.
Lines end at b"\\n" alone. Where chunks are cut depends on the content only, never on how the bytes arrived: a chunk
ends with the first line end at or beyond `chunk_bytes` of it, and is one record batch of the shard.

What cannot be read to its end, or is no JSON lines file at all, is refused as a whole: JobError(Exit.DATA).
"""

from __future__ import annotations

import hashlib
import shlex
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tokenizer.job import Exit, JobError

CHUNK = 8 << 20  # bytes of lines after which a chunk ends
LONGEST_LINE = 16 << 20  # bytes; a longer one is rejected, not held
HEAD = 64 << 10  # bytes kept of an over-long line
GZIP_STEP, GZIP_OUT = 256 << 10, 1 << 20  # bytes fed and bytes taken at a time
ZSTD_STEP = 1 << 10  # bytes fed: 4 bytes can be a block of 128 KiB, so at most 32 MiB come out
ZSTD_WINDOW = 128 << 20  # bytes of memory that a frame may ask for


class LongLine(NamedTuple):
    """A line that is too long to take (reason line_too_long): its number and its first 64 KiB."""

    number: int
    head: bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive lines, blank ones included, without their b"\\n"; an over-long line can only be the last."""

    first: int  # number of lines[0] in the object, from 1
    lines: list[bytes]
    too_long: LongLine | None = None

    def numbered(self) -> Iterator[tuple[int, bytes]]:
        """Number and bytes of the lines that are not blank; the b"\\r" of a CRLF is dropped."""
        for number, line in enumerate(self.lines, self.first):
            if line and not line.isspace():
                yield number, line[:-1] if line[-1] == 13 else line


class LineReader:
    """Iterate once. `bytes_read` and `sha256` (hex) are of the raw bytes taken from `pieces` so far."""

    def __init__(
        self, pieces: Iterable[bytes], key: str, chunk_bytes: int = CHUNK, longest_line: int = LONGEST_LINE
    ) -> None:
        if longest_line < chunk_bytes:
            raise ValueError("longest_line must be at least chunk_bytes")
        self.key = key
        self.bytes_read = 0
        self._pieces, self._chunk_bytes, self._longest = pieces, chunk_bytes, longest_line
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[Chunk]:
        text = _without_mark(decompress(self._counted(), self.key))
        checked = False
        for chunk in cut_lines(text, self._chunk_bytes, self._longest):
            if not checked:
                refuse_other_formats(chunk, self.key)
                checked = any(chunk.numbered()) or chunk.too_long is not None
            yield chunk

    def _counted(self) -> Iterator[bytes]:
        for piece in self._pieces:
            self._hash.update(piece)
            self.bytes_read += len(piece)
            yield piece


def cut_lines(text: Iterable[bytes], chunk_bytes: int, longest: int) -> Iterator[Chunk]:
    """Chunks of whole lines; holds at most chunk_bytes + longest + one element of `text`."""
    first = 1  # number of the first line of the chunk in hand
    held: list[bytes] = []  # its bytes so far
    size = 0
    skipped: Chunk | None = None  # the chunk in hand, once its last line has turned out to be too long
    for piece in text:
        position = 0
        while position < len(piece):
            end = piece.find(b"\n", position + (0 if skipped else max(0, chunk_bytes - size - 1)))
            if end < 0:
                if skipped is None:
                    held.append(piece[position:])
                    size += len(piece) - position
                    if size > chunk_bytes + longest:  # its last line began before chunk_bytes
                        skipped = _chunk(first, b"".join(held), longest)
                        held = []
                break
            if skipped is None:
                held.append(piece[position : end + 1])
                skipped = _chunk(first, b"".join(held), longest)
            yield skipped
            first += len(skipped.lines) + (skipped.too_long is not None)
            held, size, skipped = [], 0, None
            position = end + 1
    if skipped is None and held:
        skipped = _chunk(first, b"".join(held), longest)
    if skipped is not None:
        yield skipped


def _chunk(first: int, data: bytes, longest: int) -> Chunk:
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    if len(data) > longest and len(lines[-1]) > longest:
        head = lines.pop()[:HEAD]
        return Chunk(first, lines, LongLine(first + len(lines), head))
    return Chunk(first, lines)


# -- compression


def decompress(pieces: Iterable[bytes], key: str) -> Iterator[bytes]:
    """The bytes behind gzip or zstd, in elements of bounded size; anything else as it is.

    Raises JobError(Exit.DATA) for data that is cut, corrupt, or of a format that is not read.
    """
    pieces = _with_start(pieces)
    start = next(pieces, b"")
    if start.startswith(b"\x1f\x8b"):
        return _gunzip(start, pieces, key)
    if start.startswith(b"\x28\xb5\x2f\xfd") or (start[1:4] == b"\x2a\x4d\x18" and start[0] & 0xF0 == 0x50):
        return _unzstd(start, pieces, key)
    if start and len(start) < 4 and key.lower().endswith((".gz", ".zst")):
        raise Refused(key, "cut off within its first bytes", "transfer it again")
    return _chained(start, pieces)


def _with_start(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, where the first element has at least 4 of them if there are so many."""
    start = b""
    pieces = iter(pieces)
    for piece in pieces:
        start += piece
        if len(start) >= 4:
            break
    if start:
        yield start
    yield from pieces


def _chained(start: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    if start:
        yield start
    yield from pieces


def _without_mark(text: Iterator[bytes]) -> Iterator[bytes]:
    """Drop the byte order mark of UTF-8 at the start."""
    text = _with_start(text)
    if start := next(text, b""):
        yield start.removeprefix(b"\xef\xbb\xbf")
    yield from text


def _steps(start: bytes, pieces: Iterator[bytes], size: int) -> Iterator[memoryview]:
    for piece in _chained(start, pieces):
        view = memoryview(piece)
        for at in range(0, len(view), size):
            yield view[at : at + size]


def _gunzip(start: bytes, pieces: Iterator[bytes], key: str) -> Iterator[bytes]:
    member = zlib.decompressobj(wbits=31)
    begun, members = False, 0  # within a member; members that were complete
    for step in _steps(start, pieces, GZIP_STEP):
        data: bytes | memoryview = step
        while True:
            if not begun:
                data = bytes(data)
                if members:
                    data = data.lstrip(b"\0")  # tape blocks are padded so
                if not data:
                    break
                member, begun = zlib.decompressobj(wbits=31), True
            try:
                out = member.decompress(data, GZIP_OUT)
            except zlib.error as error:
                raise Refused(key, f"corrupt gzip: {error}", "compress it again from its source") from error
            if out:
                yield out
            if member.eof:
                data, begun, members = member.unused_data, False, members + 1
            else:
                data = member.unconsumed_tail
                if not data:  # what zlib still holds comes out before the trailer is taken
                    break
    if begun:
        raise Refused(key, "cut gzip: it ends in the middle", "transfer it again from its source")


def _unzstd(start: bytes, pieces: Iterator[bytes], key: str) -> Iterator[bytes]:
    import zstandard

    reader = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW)
    frame = reader.decompressobj()
    begun = False
    for step in _steps(start, pieces, ZSTD_STEP):
        data = bytes(step)
        while data:
            if not begun:
                frame, begun = reader.decompressobj(), True
            try:
                out = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise Refused(key, f"corrupt zstd: {error}", "compress it again from its source") from error
            if out:
                yield out
            data, begun = (frame.unused_data, False) if frame.eof else (b"", True)
    if begun:
        raise Refused(key, "cut zstd: it ends in the middle", "transfer it again from its source")


# -- what is no JSON lines file


class Refused(JobError):
    """Ends an index (65): an object that cannot be taken. `mend`: what would make it one that can."""

    def __init__(self, key: str, what: str, mend: str, line: int | None = None) -> None:
        place = key if line is None else f"{key}:{line}"
        hint = f"{mend}, or leave it out with `resume --skip-file {shlex.quote(key)}`"
        super().__init__(Exit.DATA, f"{place}: {what}", hint)
        self.key, self.mend = key, mend


def refused_by_head(pieces: Iterable[bytes], key: str) -> JobError | None:
    """What refuses an object by its first bytes alone, None if nothing does; takes 64 KiB of text and no more."""
    head = b""
    try:
        for text in _without_mark(decompress(pieces, key)):
            head += text
            if len(head) >= HEAD:
                break
        refuse_other_formats(Chunk(1, head[:HEAD].split(b"\n")), key)
    except JobError as error:
        return error
    return None


_MAGIC = {
    b"PAR1": "Parquet",
    b"PK\x03\x04": "zip",
    b"ARROW1": "Arrow",
    b"\xff\xff\xff\xff": "Arrow",
    b"\x1f\x8b": "gzip inside of a compressed file",
    b"\x28\xb5\x2f\xfd": "zstd inside of a compressed file",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"7z\xbc\xaf": "7-Zip",
    b"\x04\x22\x4d\x18": "lz4",
    b"Obj\x01": "Avro",
    b"\x89HDF": "HDF5",
    b"\x80\x04\x95": "pickle",
}
_WIDE = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def refuse_other_formats(chunk: Chunk, key: str) -> None:
    """Raise JobError(Exit.DATA) if an object that begins with this chunk holds something else than JSON lines."""
    lines = (line for _, line in chunk.numbered())
    one = next(lines, chunk.too_long.head if chunk.too_long else b"")
    two = next(lines, b"")
    for magic, name in _WIDE.items():
        if one.startswith(magic):
            raise Refused(key, f"{name} text, expected UTF-8", f"convert it: iconv -f {name} -t UTF-8")
    for magic, name in _MAGIC.items():
        if one.startswith(magic):
            raise Refused(key, f"a file of format {name}, expected JSON lines", "convert it to .jsonl")
    if one[:256].count(0) * 4 >= len(one[:256]) > 0:
        raise Refused(key, "UTF-16, UTF-32 or binary data, expected UTF-8", "convert it to UTF-8")
    if one.startswith(b"version https://git-lfs"):
        raise Refused(key, "a Git LFS pointer, not the file itself", "fetch it: git lfs pull")
    first = one.lstrip()[:1]
    if first == b"<":
        raise Refused(key, "an HTML or XML page, expected JSON lines", "it may be an error page: download it again")
    if first == b"[":
        raise Refused(key, "one JSON list, expected one object per line", "convert it: jq -c '.[]'")
    if first == b"{" and one.rstrip()[-1:] in (b"{", b"[", b",") and two[:1] in (b" ", b"\t", b'"', b"}", b"]"):
        raise Refused(key, "pretty-printed JSON, expected one object per line", "convert it: jq -c .")
