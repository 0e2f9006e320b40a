"""Damaged files, the same ones every time: flipped bits, cut and repeated parts, edited numbers and words."""

import random
import re

NUMBERS = (*b"0 -1 1e999 NaN 4294967295 9223372036854775807".split(), b"1" + b"0" * 30, *b'1.5 null [] "a"'.split())
BYTES = (b"\0", b"\xff", b"\x7f", b"[" * 2000, b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\xff" * 8, b"(" * 500)


def mutated(raw: bytes, generator: random.Random) -> bytes:
    """The bytes with one to three things done to them."""
    for _ in range(generator.randint(1, 3)):
        raw = generator.choice(CHANGES)(raw, generator)
    return raw


def flip(raw: bytes, generator: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(generator.choice((1, 1, 4, 40)) if data else 0):
        data[_place(data, generator)] ^= 1 << generator.randrange(8)
    return bytes(data)


def cut(raw: bytes, generator: random.Random) -> bytes:
    return raw[: generator.randrange(len(raw) + 1)]


def splice(raw: bytes, generator: random.Random) -> bytes:
    """Part of the file once more, or in another place, or left out."""
    a, b = sorted(generator.randrange(len(raw) + 1) for _ in range(2))
    b = min(b, a + 300)
    at = generator.randrange(len(raw) + 1)
    changed = (raw[:at] + raw[a:b] + raw[at:], raw[:a] + raw[b:], raw[:at] + raw[a:b] + raw[at + b - a :])
    return generator.choice(changed)


def insert(raw: bytes, generator: random.Random) -> bytes:
    at, what = _place(raw, generator), generator.choice(BYTES)
    over = generator.random() < 0.5
    return raw[:at] + what + raw[at + (len(what) if over else 0) :]


def edit_number(raw: bytes, generator: random.Random) -> bytes:
    """Another number where one stands in text."""
    found = list(re.finditer(rb"-?\d+(\.\d+)?", raw[:20000]))
    if not found:
        return flip(raw, generator)
    spot = generator.choice(found)
    return raw[: spot.start()] + generator.choice(NUMBERS) + raw[spot.end() :]


def edit_word(raw: bytes, generator: random.Random) -> bytes:
    """One word of the text in place of another."""
    found = list(re.finditer(rb"[A-Za-z_]{2,}", raw[:20000]))
    if len(found) < 2:
        return insert(raw, generator)
    spot, other = generator.choice(found), generator.choice(found)
    return raw[: spot.start()] + other[0] + raw[spot.end() :]


def _place(raw: bytes | bytearray, generator: random.Random) -> int:
    """Somewhere; half of the time near the beginning or the end, where headers are."""
    size = max(len(raw), 1)
    near = generator.randrange(min(size, 120))
    return generator.choice((near, size - 1 - near, generator.randrange(size), generator.randrange(size)))


CHANGES = (flip, flip, cut, splice, insert, edit_number, edit_number, edit_word)
