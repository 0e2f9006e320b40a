"""Priors on the weights: they add −log p(θ) / N to the mean loss over N data points."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypedDict, get_args

import torch
from torch import Tensor, nn

from dissensus.utils.batch_norm_names import norm_parameters
from dissensus.utils.checks import integer, number, suggest_keywords
from dissensus.utils.tensor_tree import Tensors


class Prior(nn.Module, ABC):
    """Base class: a density of one member's trained tensors, given by their names in the network.

    Subclasses define `log_prob`. Files hold only a prior's class and its attributes that are numbers or text: predictions
    need no prior, and before further training you set it again (`posterior.use_prior`). Register the prior's tensors as
    buffers; they move with the posterior and are not saved.
    """

    norm_layers: bool = True  # whether parameters of norm layers are among the tensors

    @abstractmethod
    def log_prob(self, params: Tensors) -> Tensor:
        """() log p(θ) up to a constant: a pure function of name -> tensor, one member's, in float32 or wider."""

    def covers(self, name: str) -> bool:
        """Whether the prior includes this tensor; weight decay acts on the others."""
        return True

    def draw(self, name: str, like: Tensor) -> Tensor:
        """A draw of this tensor from the prior, by torch's generator; only `FunctionRDE(functional_prior=True)` uses it."""
        raise TypeError(f"expected a prior that can be sampled, got {type(self).__name__}; define its draw(name, like)")

    def check_fits(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raises if this prior does not fit a network with tensors of these names and shapes."""

    def config(self) -> dict[str, Any]:
        """Its class and its attributes that are numbers, text or tables, for files and checkpoints."""
        numbers = {k: v for k, v in vars(self).items() if k[0] != "_" and type(v) in (int, float, str, dict)}
        parts = {name: part.config() for name, part in self.named_children() if isinstance(part, Prior)}
        return {"name": type(self).__name__, **numbers, **parts}

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = False) -> None:
        super().register_buffer(name, tensor, persistent=False)


class GaussianPrior(Prior):
    """N(0, std²) on weights and biases, but not on norm layers: −log p(θ) = Σ θ² / (2 std²) up to a constant.

    Args:
        std: standard deviation of every weight; or a table from name patterns to standard deviations
            ({"head.*": 0.1, "*": 1.0}). The first matching pattern wins; tensors without a match have no prior.
    """

    norm_layers = False

    def __init__(self, std: float | Mapping[str, float]) -> None:
        super().__init__()
        self.std: float | dict[str, float] = (
            {name: float(number(f"std of {name!r}", value, above=0)) for name, value in std.items()}
            if isinstance(std, Mapping)
            else float(number("std", std, above=0))
        )

    def deviation(self, name: str) -> float | None:
        """The standard deviation of this tensor's entries; None if it has no prior."""
        if not isinstance(self.std, dict):
            return self.std
        return next((std for pattern, std in self.std.items() if fnmatchcase(name, pattern)), None)

    def covers(self, name: str) -> bool:
        return self.deviation(name) is not None

    def log_prob(self, params: Tensors) -> Tensor:
        squares = {name: tensor.square().sum() for name, tensor in params.items()}
        if not isinstance(self.std, dict):
            return -torch.stack(list(squares.values())).sum() / (2 * self.std**2)
        deviations = {name: self.deviation(name) for name in squares}
        return -torch.stack([squares[name] / (2 * std**2) for name, std in deviations.items() if std]).sum()

    def check_fits(self, shapes: Mapping[str, torch.Size]) -> None:
        for pattern in self.std if isinstance(self.std, dict) else ():
            if not any(fnmatchcase(name, pattern) for name in shapes):
                names = ", ".join(shapes)
                raise ValueError(f"expected patterns that match names, got {pattern!r}; the names are {names}")

    def draw(self, name: str, like: Tensor) -> Tensor:
        std = self.deviation(name)
        assert std is not None  # `covers` is true
        return std * torch.randn_like(like)


LogDensity = Callable[[Tensors], Tensor]


class FunctionPrior(Prior):
    """A prior given by a function of one member's tensors; without a function, only the description from a file."""

    def __init__(self, function: LogDensity | None, noted: Mapping[str, Any]) -> None:
        super().__init__()
        self.function, self.noted = function, dict(noted)

    def log_prob(self, params: Tensors) -> Tensor:
        if self.function is None:
            advice = "call posterior.use_prior(prior), or use_prior(None) to train without a prior"
            wanted = f"the prior {self.noted.get('name')} of the training"
            raise ValueError(f"expected {wanted}, got only its description; {advice}")
        return self.function(params)

    def config(self) -> dict[str, Any]:
        return self.noted


class PriorKeywords(TypedDict, total=False):
    """Keywords of every method, explained in `Posterior`: the prior, its short form for a Gaussian, and N."""

    prior: Prior | LogDensity | None
    weight_prior_std: float | Mapping[str, float] | None
    data_size: int | None


def expanded_signature(constructor: Callable[..., Any]) -> inspect.Signature:
    """A constructor's signature with `**prior` replaced by keywords of every method, for `help` and the bench."""
    *known, last = list(inspect.signature(constructor).parameters.values())[1:]
    if last.kind is not last.VAR_KEYWORD or last.name != "prior":
        return inspect.Signature([*known, last])
    added = {} if {"likelihood", "particles"} & {each.name for each in known} else {"likelihood": "Likelihood | None"}
    kinds = (added | PriorKeywords.__annotations__).items()
    spelled = (last.replace(name=k, kind=last.KEYWORD_ONLY, default=None, annotation=v) for k, v in kinds)
    return inspect.Signature([*known, *spelled])


def passed_keywords(constructor: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keywords that a constructor's `**prior: Unpack[…]` stands for, also as a string."""
    kind = constructor.__annotations__.get("prior", "")
    name = kind.removeprefix("Unpack[").removesuffix("]") if isinstance(kind, str) else get_args(kind)[0].__name__
    found = getattr(constructor.__globals__.get(name), "__annotations__", ())
    return {each: inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in found}


@suggest_keywords
def make_prior(
    prior: Any = None, weight_prior_std: float | Mapping[str, float] | None = None, data_size: int | None = None
) -> Prior | None:
    """The prior given by a method's keywords; a dict is the description from a file."""
    if data_size is not None:
        integer("data_size", data_size, hint="pass len(training_set)")
    if weight_prior_std is not None:
        if not isinstance(weight_prior_std, Mapping):
            number("weight_prior_std", weight_prior_std, above=0)
        if prior is not None:
            raise ValueError("expected prior or weight_prior_std, got both; pass one: the second is GaussianPrior(std)")
        prior = GaussianPrior(weight_prior_std)
    if prior is not None and data_size is None:
        raise ValueError("expected data_size with a prior, got none; pass data_size=len(training_set)")
    if prior is None or isinstance(prior, Prior):
        return prior
    if isinstance(prior, Mapping):
        return FunctionPrior(None, prior)
    if not callable(prior) or isinstance(prior, type):
        raise TypeError(f"expected a prior, got {prior!r}; pass GaussianPrior(std), or a function of {{name: tensor}}")
    return FunctionPrior(prior, {"name": getattr(prior, "__qualname__", type(prior).__name__)})


def names_under_prior(prior: Prior | None, network: nn.Module, names: Iterable[str]) -> set[str]:
    """The names in `names` whose parameters are under the prior."""
    if prior is None:
        return set()
    norms = set() if prior.norm_layers else norm_parameters(network)
    return {name for name in names if name not in norms and prior.covers(name)}
