"""Closed-form expectations of activations under Gaussian inputs; activations.py defines the letters."""

import math

import torch
from torch import Tensor


def piecewise_linear(a: Tensor, b: Tensor, c: Tensor, negative_slope: float) -> tuple[Tensor, Tensor]:
    """(C, D) of φ(z) = max(z, 0) + slope·min(z, 0); Z = C, since z φ'(z) = φ(z) (Cho & Saul 2009)."""
    most = torch.maximum(a, b)  # √(ab) without ab, which may overflow float64
    scale = most * (torch.minimum(a, b).clamp(min=0) / most.where(most > 0, torch.ones_like(most))).sqrt()
    some = scale > 0
    safe = scale.where(some, torch.ones_like(scale))
    cosine = (c / safe).clamp(-1, 1)
    angle = torch.acos(cosine)
    # F(c) = √(ab)/2π (sin θ + (π − θ) cos θ), F(−c) the same with π − θ; G(c) = (π − θ)/2π
    sine = torch.sin(angle)
    same = scale * (sine + (math.pi - angle) * cosine) / (2 * math.pi)
    opposite = scale * (sine - angle * cosine) / (2 * math.pi)
    agree, differ = (math.pi - angle) / (2 * math.pi), angle / (2 * math.pi)
    value = (1 + negative_slope**2) * same - 2 * negative_slope * opposite
    slope = (1 + negative_slope**2) * agree + 2 * negative_slope * differ
    # At variance 0, φ'(0) is the slope below 0, as in torch, and the two sides are independent.
    mean = (1 + negative_slope) / 2
    at_zero = torch.where(a > 0, mean, negative_slope) * torch.where(b > 0, mean, negative_slope)
    return value.where(some, torch.zeros_like(value)), slope.where(some, at_zero.to(slope.dtype).expand_as(slope))


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
