"""Closed-form expectations of activations under Gaussian inputs; activations.py defines the letters."""

import math

import torch
from torch import Tensor


def piecewise_linear(a: Tensor, b: Tensor, c: Tensor, negative_slope: float) -> tuple[Tensor, Tensor]:
    """(C, D) of φ(z) = max(z, 0) + slope·min(z, 0); Z = C, since z φ'(z) = φ(z) (Cho & Saul 2009)."""
    low, high = min(float(a.min()), float(b.min())), max(float(a.max()), float(b.max()))
    usual = low >= math.sqrt(torch.finfo(c.dtype).tiny) and high <= math.sqrt(torch.finfo(c.dtype).max)
    scale = (a * b).sqrt_() if usual else _geometric_mean(a, b)  # of equal a and b exactly a
    some = None if usual else scale > 0
    angle = (c / (scale if some is None else scale.where(some, 1.0))).clamp_(-1, 1).acos_()
    # G = (π − θ)/2π, F = √(ab) sin θ/2π + G c, and of −c they are ½ − G and F − c/2
    part = (1 - negative_slope) ** 2
    value = angle.sin().mul_(scale).mul_(part / (2 * math.pi))
    slope = angle.mul_(-part / (2 * math.pi)).add_((1 + negative_slope**2) / 2)
    value.addcmul_(slope, c)
    if some is None:
        return value, slope
    # At variance 0, φ'(0) is the slope below 0, as in torch, and the two sides are independent.
    mean = (1 + negative_slope) / 2
    at_zero = torch.where(a > 0, mean, negative_slope) * torch.where(b > 0, mean, negative_slope)
    return value.where(some, 0.0), slope.where(some, at_zero.to(slope.dtype))


def _geometric_mean(a: Tensor, b: Tensor) -> Tensor:
    """√(ab) without ab, which may leave the range of floats."""
    most = torch.maximum(a, b)
    return most * (torch.minimum(a, b).clamp(min=0) / most.where(most > 0, 1.0)).sqrt()


def erf(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(C, D, Z) of φ = erf (Williams 1997)."""
    product = (1 + 2 * a) * (1 + 2 * b)
    determinant = product - 4 * c**2
    value = 2 / math.pi * torch.asin((2 * c / product.sqrt()).clamp(-1, 1))
    slope = 4 / math.pi / determinant.sqrt()
    return value, slope, slope * c / determinant


def gelu(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(C, D, Z) of φ(z) = z Φ(z), by Stein's lemma from E ΦΦ' and E ϕϕ', Φ and ϕ the normal distribution and density."""
    determinant = (1 + a) * (1 + b) - c**2
    both = 0.25 + torch.asin((c / ((1 + a) * (1 + b)).sqrt()).clamp(-1, 1)) / (2 * math.pi)  # E Φ(z) Φ(z')
    density = 1 / (2 * math.pi * determinant.sqrt())  # E ϕ(z) ϕ(z')
    left = c * density / (1 + a)  # E zϕ(z) Φ(z')
    right = c * density / (1 + b)  # E Φ(z) z'ϕ(z')
    # Under the density tilted by ϕϕ' the covariance is S = I − (I + Σ)⁻¹.
    s_aa, s_bb, s_ab = 1 - (1 + b) / determinant, 1 - (1 + a) / determinant, c / determinant
    value = a * density * (b - c**2 / (1 + a)) + c * (both + right)
    slope = both + left + right + density * s_ab
    # φ' = Φ + zϕ: Z = E zz'ΦΦ' + E z²ϕ z'Φ' + E zΦ z'²ϕ' + E z²ϕ z'²ϕ'
    cubic_left = (2 * a * left + c * density * s_aa) / (1 + a)  # E z³ϕ(z) Φ(z')
    cubic_right = (2 * b * right + c * density * s_bb) / (1 + b)
    square_left = c * (2 * left - cubic_left) + b * density * s_aa  # E z²ϕ(z) z'Φ(z')
    square_right = c * (2 * right - cubic_right) + a * density * s_bb
    product = value + square_left + square_right + density * (s_aa * s_bb + 2 * s_ab**2)
    return value, slope, product
