"""Modulations: the random factors u, v by which members of an embedded ensemble differ.

Members share weights and multiply activations by their own factors (BatchEnsemble, Wen et al. 2020; fixed dropout masks).
A few moments of their distribution determine what a wide ensemble does: E u, E u², and for kinked activations E max(±v, 0).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dissensus.utils.checks import number, one_of

LAWS: dict[str, tuple[str, ...]] = {"constant": ("value",), "sign": ("p",), "normal": ("mean", "std")}
LAWS["bernoulli"] = ("keep", "scale")


@dataclass(frozen=True)
class Modulation:
    """The distribution of the independent random factors by which members differ; made by one of the functions below.

        Modulation.sign()  .normal(mean, std)  .bernoulli(keep, scale)  .between(p)  .constant(value)

    `mean`, `second_moment` and `collectivity` determine how such members behave in the wide limit.
    """

    law: str
    parameters: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.law in LAWS and self.second_moment == 0:
            raise ValueError(f"expected factors that are not all 0, got {self}; pass other values")

    @staticmethod
    def constant(value: float = 1.0) -> Modulation:
        """The same factor for all members, so that they do not differ."""
        return Modulation("constant", (float(number("value", value)),))

    @staticmethod
    def sign(p: float = 0.5) -> Modulation:
        """+1 with probability p, else −1. At p = ½ wide members are independent."""
        return Modulation("sign", (_probability("p", p),))

    @staticmethod
    def normal(mean: float, std: float) -> Modulation:
        """N(mean, std²); a mean of 1 and a small std hardly change a pretrained network."""
        return Modulation("normal", (float(number("mean", mean)), float(number("std", std, least=0))))

    @staticmethod
    def bernoulli(keep: float, scale: float = 1.0) -> Modulation:
        """`scale` with probability keep, else 0: dropout's masks; scale = 1/keep is inverted dropout."""
        return Modulation("bernoulli", (_probability("keep", keep), float(number("scale", scale))))

    @staticmethod
    def between(p: float) -> Modulation:
        """p + √(1 − p²) N(0, 1), of second moment 1: from independent members (p = 0) to equal ones (p = 1)."""
        number("p", p, least=-1, most=1, hint="p² is the collectivity")
        return Modulation.normal(p, math.sqrt(1 - p**2))

    @property
    def mean(self) -> float:
        """U₁ = E u."""
        return sum(value * weight for value, weight in self.atoms()) if self.discrete else self.parameters[0]

    @property
    def second_moment(self) -> float:
        """U₂ = E u²."""
        if self.discrete:
            return sum(value**2 * weight for value, weight in self.atoms())
        mean, std = self.parameters
        return mean**2 + std**2

    @property
    def collectivity(self) -> float:
        """ρ = U₁²/U₂, from 0 (members independent in the wide limit) to 1 (members equal)."""
        return self.mean**2 / self.second_moment

    @property
    def halves(self) -> tuple[float, float]:
        """(E max(u, 0), E max(−u, 0))."""
        if self.discrete:
            positive = sum(max(value, 0.0) * weight for value, weight in self.atoms())
        else:
            # m₊ = m Φ(m/s) + s φ(m/s)
            mean, std = self.parameters
            at = mean / std
            density = math.exp(-(at**2) / 2) / math.sqrt(2 * math.pi)
            positive = mean * 0.5 * math.erfc(-at / math.sqrt(2)) + std * density
        return positive, positive - self.mean

    @property
    def discrete(self) -> bool:
        """Whether the distribution is discrete."""
        return self.law != "normal" or self.parameters[1] == 0

    def atoms(self) -> list[tuple[float, float]]:
        """(value, probability) pairs of a discrete distribution, without values of probability 0."""
        if not self.discrete:
            raise TypeError(f"expected a discrete modulation, got {self}; a normal one has a density")
        first, *rest = self.parameters
        if self.law == "sign":
            found = [(1.0, first), (-1.0, 1 - first)]
        elif self.law == "bernoulli":
            found = [(rest[0], first), (0.0, 1 - first)]
        else:
            found = [(first, 1.0)]
        return [(value, weight) for value, weight in found if weight > 0]

    def sample(
        self,
        shape: Sequence[int],
        generator: torch.Generator | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """A tensor of independent factors of this shape, by default on the generator's device."""
        if device is None and generator is not None:
            device = generator.device
        size, first = tuple(shape), self.parameters[0]
        if self.law == "constant":
            return torch.full(size, first, dtype=dtype or torch.get_default_dtype(), device=device)
        if self.law == "normal":
            drawn = torch.randn(size, generator=generator, dtype=dtype, device=device)
            return first + self.parameters[1] * drawn
        drawn = torch.rand(size, generator=generator, dtype=torch.float64, device=device)
        hit = (drawn < first).to(dtype or torch.get_default_dtype())
        return 2 * hit - 1 if self.law == "sign" else self.parameters[1] * hit

    def config(self) -> dict[str, Any]:
        """{"law": …, its parameters by name}: JSON values for `from_config`."""
        return {"law": self.law, **dict(zip(LAWS[self.law], self.parameters, strict=True))}

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> Modulation:
        """The modulation that `config` describes."""
        law: str = one_of("law", config.get("law", ""), LAWS, hint="pass the result of .config()")
        return getattr(Modulation, law)(**{key: value for key, value in config.items() if key != "law"})

    def __str__(self) -> str:
        named = zip(LAWS[self.law], self.parameters, strict=True)
        return f"{self.law}({', '.join(f'{name}={value:g}' for name, value in named)})"


def _probability(name: str, value: float) -> float:
    return float(number(name, value, least=0, most=1, hint="it is a probability"))
