"""Compressed bytes, opened no further than their size makes likely: a small file cannot ask for gigabytes."""

from __future__ import annotations

import zlib

FLOOR = 1 << 26  # bytes that any file may unpack to
RATIO = 200  # times its size that a larger one may; images and tables reach 2 to 20, deflate ends at 1,000
GZIP, ZLIB = 31, 15  # what zlib calls the two containers


def most(size: int) -> int:
    """How many bytes a compressed file of `size` bytes may unpack to."""
    return max(FLOOR, RATIO * size)


def inflated(raw: bytes | memoryview, limit: int, *, container: int) -> bytes:
    """The unpacked bytes, at most `limit` of them; a gzip file may have several parts. ValueError where it is damaged."""
    parts: list[bytes] = []
    left, rest = limit, bytes(raw)
    while rest:
        stream = zlib.decompressobj(container)
        try:
            part = stream.decompress(rest, left + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        parts.append(part)
        left -= len(part)
        if left < 0:
            raise ValueError(
                f"more than {limit} bytes in {len(raw)}, far more than data usually are; unpack it yourself"
            )
        if not stream.eof:
            raise ValueError("it ends too early")
        rest = stream.unused_data.lstrip(b"\0") if container == GZIP else b""  # tapes pad with zeros
        if container == GZIP and len(parts) > 1000:
            raise ValueError("more than a thousand parts")
    return b"".join(parts)
