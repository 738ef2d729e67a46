"""What the user sees: stdout is data, stderr is talk.

No markup language anywhere: text from data, stores and servers is printed character for character, so `[3]` and `[/x]`
stay what they are. Colour is a decoration that is added at the very end and only on a terminal; without one, progress
comes as whole lines, at most one in ten seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

GREEN, RED, YELLOW, DIM, BOLD = "32", "31", "33", "2", "1"
FORMATS = ("table", "wide", "json", "yaml", "name")
EVERY = 10.0  # seconds between two progress lines without a terminal


def say(text: str) -> None:
    """One line of talk; names in it come from data, and cannot drive the terminal."""
    print(printable(text), file=sys.stderr, flush=True)


def out(text: str) -> None:
    """Data, on stdout."""
    print(text, flush=True)


def warn(text: str, hint: str = "") -> None:
    """Something the user should know although the command goes on."""
    _marked("warning", YELLOW, text, hint)


def fail(message: str, hint: str = "") -> None:
    """The last words of a command that fails."""
    _marked("error", RED, message, hint)


def _marked(word: str, colour: str, text: str, hint: str) -> None:
    lines = f"{paint(word, colour, sys.stderr)}: {printable(text)}"
    lines += f"\n{paint('hint', DIM, sys.stderr)}: {printable(hint)}" if hint else ""
    print(lines, file=sys.stderr, flush=True)


def is_terminal(stream: TextIO) -> bool:
    """Whether `stream` may be redrawn and coloured."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: TextIO) -> str:
    """`text` in a colour, on a terminal whose user has not asked for none."""
    if not text or not _coloured(stream):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def _coloured(stream: TextIO) -> bool:
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def printable(text: str) -> str:
    """`text` with control characters spelt out, all but newline and tab: data cannot drive the terminal."""
    if text.isprintable():
        return text
    return "".join(_escaped(c) if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" else c for c in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii") if char.isascii() else f"\\u{ord(char):04x}"


def learnt(text: str) -> str:
    """Supervised text on stdout: green on a terminal, `{+between marks+}` anywhere else."""
    return paint(text, GREEN, sys.stdout) if _coloured(sys.stdout) else f"{{+{text}+}}"


def segments(parts: Iterable[Mapping[str, Any]]) -> str:
    """Segments {"text", "loss"} of a row as one text, the learnt ones marked; nothing else is changed or added."""
    return "".join(learnt(printable(p["text"])) if p["loss"] else printable(p["text"]) for p in parts)


def one_line(text: str, width: int) -> str:
    """`text` as one line of at most `width` characters, cut with an ellipsis."""
    flat = printable(text.replace("\n", "\\n").replace("\t", "\\t"))
    return flat if len(flat) <= width else flat[: width - 3] + "..."


def width_of(text: str) -> int:
    """Columns of `text` in a terminal: wide characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Lines of an aligned table; `right` names the columns that hold numbers."""
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(width_of(line[i]) for line in lines) for i in range(len(header))]
    numbers = set(right)
    return [
        "  ".join(
            " " * (widths[i] - width_of(cell)) + cell if i in numbers else cell + " " * (widths[i] - width_of(cell))
            for i, cell in enumerate(line)
        ).rstrip()
        for line in lines
    ]


def pairs(entries: Iterable[tuple[str, str]]) -> list[str]:
    """Lines `name  value`, aligned."""
    listed = list(entries)
    width = max((len(name) for name, _ in listed), default=0)
    return [f"{name:<{width}}  {value}".rstrip() for name, value in listed]


def emit(
    document: Mapping[str, Any] | Sequence[Any], output: str, lines: Callable[[], Iterable[str]], name: str = ""
) -> None:
    """Print one result on stdout in the asked format; `lines` makes the table only when it is wanted."""
    if output == "json":
        text = json.dumps(document, ensure_ascii=False, indent=2)
    elif output == "yaml":
        import yaml

        text = yaml.safe_dump(document, allow_unicode=True, sort_keys=False).rstrip("\n")
    elif output == "name":
        text = name
    else:
        text = "\n".join(lines())
    if text:
        out(text)


def count(number: int | float) -> str:
    """A count with thousands separated, e.g. `12,345`."""
    return f"{number:,.0f}"


def number(value: float) -> str:
    """A number in a few digits, e.g. `1.2 M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f} {letter}"
    return f"{value:.0f}"


def rate(value: float, unit: str) -> str:
    """A rate in a few digits, e.g. `1.2 M tokens/s`."""
    return f"{number(value)} {unit}/s"


def size(number: int) -> str:
    """Bytes in a few digits, e.g. `96.0 MiB`."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def span(seconds: float) -> str:
    """A duration in the two largest units, e.g. `1h05m`, `2m03s`, `8s`."""
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


class Screen:
    """A block of lines that is redrawn in place on a terminal, and reported as lines anywhere else.

    Without a terminal a line is printed when `EVERY` seconds have passed since the last one, and at once when `change`
    (what a watcher waits for) is another than before. `clock` gives seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream, self._clock = stream, clock
        self._live = is_terminal(stream)
        self._drawn = 0
        self._change: object = None
        self._last = clock()

    def update(self, block: Callable[[], list[str]], line: str, change: object = None) -> None:
        """Show the present state: the block of lines (terminal) or the one line (anywhere else)."""
        if self._live:
            self._redraw(block())
        elif change != self._change or self._clock() - self._last >= EVERY:
            print(printable(line), file=self._stream, flush=True)
            self._change, self._last = change, self._clock()

    def _redraw(self, lines: list[str]) -> None:
        columns, rows = shutil.get_terminal_size()
        if len(lines) > rows - 1:
            lines = [*lines[: rows - 2], f"... {len(lines) - rows + 2} more lines"]
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        body = "".join(f"\x1b[2K{one_line(line, columns)}\n" for line in lines)
        self._stream.write(f"{up}{body}\x1b[J")
        self._stream.flush()
        self._drawn = len(lines)
