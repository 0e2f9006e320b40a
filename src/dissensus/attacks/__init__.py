"""Attacks on a posterior's averaged prediction p̄ = (1/M) Σ_m p_m, not on its members one by one."""

from dissensus.attacks.gradient_attacks import Adversarial, fgsm, fool, gradient, pgd
from dissensus.attacks.implicit import ImplicitCorruptions, implicit_corruptions

__all__ = ["Adversarial", "ImplicitCorruptions", "fgsm", "fool", "gradient", "implicit_corruptions", "pgd"]
