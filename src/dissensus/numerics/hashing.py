"""SplitMix64 (Steele, Lea and Flood 2014) in integer tensors: random bits computed from a counter, without a state.

A Weyl sequence through a 64-bit finaliser. The bits are the same on every device, under vmap and in a captured CUDA graph,
unlike those of `torch.Generator`.
"""

from torch import Tensor


def mixed(words: Tensor) -> Tensor:
    """The finaliser of SplitMix64, a bijection of the 64-bit words (int64); integer products wrap around, as intended."""
    words = (words ^ shifted(words, 30)).mul_(_FIRST)
    words = words.bitwise_xor_(shifted(words, 27)).mul_(_SECOND)
    return words.bitwise_xor_(shifted(words, 31))


def shifted(words: Tensor, places: int) -> Tensor:
    """Logical shift to the right, not arithmetic: the sign bit is not copied."""
    return (words >> places) & ((1 << (64 - places)) - 1)


def signed(word: int) -> int:
    """The 64-bit word as the signed integer with the same bits."""
    return (word + 2**63) % 2**64 - 2**63


WEYL, _FIRST, _SECOND = (signed(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
