"""Random strings that tokenizers disagree on: edges of added tokens, combining marks, odd spaces, every code point."""

from __future__ import annotations

import random
from collections.abc import Sequence

POOLS = (
    "abcXYZ \n\t",
    "'s 't 're 'LL 'ſ 'd",
    " \n\r\t\u00a0\u3000\u2028\x0b\x0c\x85",
    "0123456789٣四Ⅷ½",
    "éüñ\u0308\u0301e\u0301A\u030a한글中文字テスト",
    '.,!?;:-_()[]{}<>|/\\"`~@#$%^&*+=',
    "👍🏽👩\u200d👧\ufe0f",
    "\u0338>=<",
    "\u1100\u1161\u11a8\uac00",
    "\u2126\u212a\u212b",
)


def strings(count: int, added: Sequence[str], words: Sequence[str], seed: int) -> list[str]:
    """`count` strings made of pieces of `added` tokens, of `words`, and of characters of every kind."""
    rnd = random.Random(seed)

    def part() -> str:
        kind = rnd.random()
        if kind < 0.15:
            return rnd.choice(added)
        if kind < 0.25:
            token = rnd.choice(added)
            return token[: rnd.randint(1, len(token))]
        if kind < 0.35:
            point = rnd.randrange(0x110000 - 0x800)
            return chr(point if point < 0xD800 else point + 0x800)
        if kind < 0.45:
            return chr(rnd.randrange(0x20, 0x3000))
        if kind < 0.55:
            return chr(rnd.randrange(0x300, 0x370)) + chr(rnd.randrange(0x300, 0x370))
        if kind < 0.7:
            return rnd.choice(words)
        pool = rnd.choice(POOLS)
        return "".join(rnd.choice(pool) for _ in range(rnd.randint(1, 10)))

    return ["".join(part() for _ in range(rnd.randint(1, 12))) for _ in range(count)]
