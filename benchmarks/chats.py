"""Chats to measure on: no text twice, lengths and mixture like regenerated completions.

    python benchmarks/chats.py OUT_DIR --chats 4500

The words are cut from the Python files and documents of this environment; mathematics and Chinese are made from a seed.
Rows are `{"id", "conversations": [{"role", "content", "reasoning_content"?}]}`, 500 a file: a fifth of the chats have
several, shorter turns; six sevenths of the characters are the model's. 4,500 chats are about 10 M Qwen3.6 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

ROWS_PER_FILE = 500
MEAN_REPLY = 6000  # characters of one reply, thinking included


def slices(paths: list[Path], rnd: random.Random) -> Iterator[str]:
    """Non-overlapping stretches of some thousand characters of the files, no line of 40 characters or more twice."""
    seen: set[int] = set()
    rnd.shuffle(paths)
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        lines: list[str] = []
        size = 0
        for line in text.splitlines(keepends=True):
            if len(line) >= 40:
                if hash(line) in seen:
                    continue
                seen.add(hash(line))
            lines.append(line[:2000])
            size += len(line)
            if size > 3000:
                yield "".join(lines)
                lines, size = [], 0


def mathematics(rnd: random.Random) -> Iterator[str]:
    """Worked equations with numbers of their own."""
    while True:
        out = []
        for _ in range(25):
            a, b, c = rnd.randint(2, 99), rnd.randint(100, 9999), rnd.randint(-500, 500)
            out.append(
                f"Let $f(x) = {a}x^2 + {b}x {c:+d}$. Then $f'(x) = {2 * a}x + {b}$, which is zero at "
                f"$x = -\\frac{{{b}}}{{{2 * a}}} \\approx {-b / (2 * a):.4f}$, and the discriminant is "
                f"${b}^2 - 4 \\cdot {a} \\cdot {c} = {b * b - 4 * a * c}$.\n"
            )
        yield "".join(out)


def chinese(rnd: random.Random) -> Iterator[str]:
    """Sentences of common characters, drawn so that words repeat as in a language and texts do not."""
    common = [chr(c) for c in range(0x4E00, 0x9FA5) if len(chr(c).encode("gb2312", "ignore")) == 2]
    words = ["".join(rnd.choices(common[:2500], k=rnd.choice((1, 2, 2, 2, 3, 4)))) for _ in range(20_000)]
    weights = [1 / (n + 5) for n in range(len(words))]
    while True:
        drawn = iter(rnd.choices(words, weights, k=1200))
        out = []
        for word in drawn:
            out.append(word)
            if rnd.random() < 0.15:
                out.append(rnd.choice("，，，。。、；：？！") + ("\n\n" if rnd.random() < 0.1 else ""))
        yield "".join(out)


class Texts:
    """A stream of characters of one kind, taken in pieces."""

    def __init__(self, source: Iterator[str]) -> None:
        self.source = source
        self.rest = ""

    def take(self, size: int) -> str:
        while len(self.rest) < size:
            self.rest += next(self.source)
        text, self.rest = self.rest[:size], self.rest[size:]
        return text.strip() or "-"


def chats(count: int, seed: int = 7) -> Iterator[dict[str, object]]:
    """`count` rows; StopIteration of a source would mean that this environment has too few files."""
    rnd = random.Random(seed)
    roots = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    found = sorted({path for root in roots for path in root.rglob("*") if path.is_file()})
    python = [path for path in found if path.suffix == ".py"]
    code = Texts(slices([path for i, path in enumerate(python) if i % 3], rnd))
    documents = [p for p in found if p.suffix in (".md", ".rst", ".txt", ".pyi", ".h") or p.name == "METADATA"]
    prose = Texts(chain(slices(documents, rnd), slices(python[::3], rnd)))  # few documents: then code serves as prose
    maths, han = Texts(mathematics(rnd)), Texts(chinese(rnd))
    for number in range(count):
        turns = []
        kind = rnd.random()
        thinking = prose if kind < 0.75 else han if kind < 0.85 else maths
        parts = rnd.choice((2, 3)) if rnd.random() < 0.19 else 1
        for _ in range(parts):
            size = min(60_000, int(rnd.lognormvariate(0, 0.9) / 1.5 * MEAN_REPLY) + 40) // parts
            answer = han if thinking is han else code if rnd.random() < 0.7 else prose
            turns.append(
                {"role": "user", "content": (han if thinking is han else prose).take(rnd.randint(150, 1500) // parts)}
            )
            reply = {"role": "assistant", "content": answer.take(size * 2 // 5 + 1)}
            if rnd.random() < 0.8:
                reply["reasoning_content"] = thinking.take(size * 3 // 5 + 1)
            turns.append(reply)
        yield {"id": f"chat-{number:06d}", "conversations": turns}


def write(directory: Path, count: int, seed: int = 7) -> int:
    """Writes the chats as directory/chats-NNN.jsonl; returns the bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    size = 0
    lines: list[bytes] = []
    for number, row in enumerate(chats(count, seed), 1):
        lines.append(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        if len(lines) == ROWS_PER_FILE or number == count:
            path = directory / f"chats-{(number - 1) // ROWS_PER_FILE:03d}.jsonl"
            size += path.write_bytes(b"".join(lines))
            lines = []
    return size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write chats to measure on")
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    parser.add_argument("--chats", type=int, default=4500)
    arguments = parser.parse_args()
    print(f"{write(arguments.directory, arguments.chats):,} bytes")
