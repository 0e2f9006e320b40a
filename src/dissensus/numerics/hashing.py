"""Integer hashes in tensors: random bits computed from a counter, and the fingerprint of tensors' values.

SplitMix64 (Steele, Lea and Flood 2014): a Weyl sequence through a 64-bit finaliser, without a state. The bits are the same on
every device, under vmap and in a captured CUDA graph, unlike those of `torch.Generator`.
"""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor


def mix_bits(words: Tensor) -> Tensor:
    """The finaliser of SplitMix64, a bijection of the 64-bit words (int64); integer products wrap around, as intended."""
    words = (words ^ shift_right(words, 30)).mul_(_FIRST)
    words = words.bitwise_xor_(shift_right(words, 27)).mul_(_SECOND)
    return words.bitwise_xor_(shift_right(words, 31))


def shift_right(words: Tensor, places: int) -> Tensor:
    """Logical shift to the right, not arithmetic: the sign bit is not copied."""
    return (words >> places) & ((1 << (64 - places)) - 1)


def as_signed(word: int) -> int:
    """The 64-bit word as the signed integer with the same bits."""
    return (word + 2**63) % 2**64 - 2**63


WEYL, _FIRST, _SECOND = (as_signed(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """64 bits that depend on every value and its place: the same on every device, and for equal values in a wider dtype."""
    totals: dict[torch.device, Tensor] = {}
    for number, tensor in enumerate(tensors):
        flat = tensor.detach().reshape(-1)
        if flat.is_floating_point():  # in float32 if that is exact, else in float64
            single = flat.float()
            flat = single if flat.dtype != torch.float64 or torch.equal(single.double(), flat) else flat
        words = (flat if flat.is_floating_point() else flat.long()).view(torch.int32)
        for part in torch.split(words, PART):  # bounds the memory of products
            total = (part * odd_numbers(part.device)[: len(part)]).sum() * as_signed((2 * number + 1) * _ODD % 2**64)
            totals[part.device] = total + totals.get(part.device, 0)
    return sum(int(total) for total in totals.values()) % 2**64


@functools.cache
def odd_numbers(device: torch.device) -> Tensor:
    """As many different odd factors as a part has words: a changed word changes its product."""
    return torch.arange(1, 2 * PART, 2, device=device).mul_(WEYL).to(torch.int32)


PART = 1 << 20  # words that are multiplied at once
_ODD = 0x94D049BB133111EB
