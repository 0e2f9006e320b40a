"""Members that run one after the other without gradients: their rows of the stacked tensors, kept between predictions."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from dissensus.core.running import stacked
from dissensus.numerics.tree import Places, assign, named_tensors

_shape = attrgetter("shape")


class KeptRows:
    """Each member's tensors, a list in the order of a template's places. To cut hundreds of rows takes as long as some layers.

    They are views: values written into the stacks show up in them. A stack that lies elsewhere than before is cut again.
    """

    def __init__(self) -> None:
        self.places: Places | None = None  # in the template
        self.known: tuple[list[Any], list[list[Tensor]]] | None = None

    def __reduce__(self) -> tuple[type["KeptRows"], tuple[()]]:
        return KeptRows, ()  # neither copied nor saved

    def drop(self) -> None:
        """Forgets the rows, so that the memory of stacks that are replaced is freed."""
        self.known = None

    def serve(self, particles: Any) -> bool:
        """Whether these particles can run by `one_by_one` now: in eval mode, in one template and with tensors to cut."""
        alone = particles.held or particles.divided or particles.runner.lanes or len(particles.templates) > 1
        return not (alone or particles.training) and bool(particles.own._modules) and _may_keep()

    def one_by_one(self, particles: Any, function: Callable[..., Any], *args: Any) -> Any:
        """function(member, *args) of every member, stacked; afterwards the template has its own tensors again."""
        template, found = particles.templates[0], []
        with particles.turn(), particles.runner.running():
            self.places = places = self.places or Places(template)
            before = [*map(dict.__getitem__, places.registries, places.keys)]
            lent = particles._written[0].lend(template)
            try:
                for tensors in self.rows(particles, places.names):
                    assign(places, tensors)
                    found.append(function(template, *args))
                    if lent is not None:
                        lent.take_back(again=True)
            finally:
                assign(places, before)
                if lent is not None:
                    lent.take_back()
            return stacked(found)

    def rows(self, particles: Any, names: Sequence[str]) -> list[list[Tensor]]:
        """Each member's own and shared tensors, in the order of the names."""
        trees = map(named_tensors, (particles.own, particles.shared))
        own, shared = ({**params, **buffers} for params, buffers in trees)
        stacks = [*own.values()]
        # `parameter.data = ...` gives a stack other memory, but not another name.
        where = [*map(id, shared.values()), *map(Tensor.data_ptr, stacks), *map(Tensor.stride, stacks)]
        where += map(_shape, stacks)
        if self.known is None or self.known[0] != where:
            cut = zip(*(stack.detach().unbind() for stack in stacks), strict=True)
            each = [{**shared, **dict(zip(own, row, strict=True))} for row in cut]
            self.known = where, [[tensors[name] for name in names] for tensors in each]
        return self.known[1]


def _may_keep() -> bool:
    """Whether tensors made now can be used later: not with gradients, by compilers, in transforms or of fake tensors."""
    plain = not (torch.is_grad_enabled() or torch.is_inference_mode_enabled() or torch.compiler.is_compiling())
    return plain and _functorch.peek_interpreter_stack() is None and not torch._C._len_torch_dispatch_stack()
