"""Noise of a training step: every process draws the noise of the whole batch, as one process would, and takes its part.

The random operations of a member's run have a fixed order (`Draw`, found once by running members on two and on three rows).
The axis that grows with the rows is the batch axis; with all members at once, axis 0 is the member axis. `FullBatchNoise` makes
each operation draw for all rows and members, so that all generators have the state that those of one process would have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dissensus.core.batch import Batch, count_examples, map_tensors
from dissensus.utils.torch_private import DispatchMode

aten = torch.ops.aten
# Operations by what says the shape of what they draw: their first tensor, or a list of sizes.
FILLING = {
    each.overloadpacket for each in (
        aten.bernoulli_.float, aten.normal_.default, aten.uniform_.default, aten.exponential_.default, aten.cauchy_.default,
        aten.log_normal_.default, aten.geometric_.default, aten.random_.default,
    )
}  # fmt: skip
LIKE = {aten.randn_like, aten.rand_like, aten.randint_like, aten.bernoulli, aten.native_dropout}
SIZED = {aten.randn, aten.rand, aten.randint}

ELSE = 'train on one process, or pass fit(mesh="independent")'


@dataclass
class Draw:
    """One random operation of a member's run: what it was called with, and its axis and numbers per row of the batch."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: torch.Size
    uses_generator: bool  # whether it took numbers from a generator: attention without dropout does not
    axis: int | None = None
    per_row: int = 0

    def draw_with_shape(self, shape: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operation gives with these arguments, for another shape."""
        packet = self.func.overloadpacket
        if packet in SIZED:
            where = next(i for i, each in enumerate(args) if isinstance(each, list | tuple | torch.Size))
            return self.func(*args[:where], list(shape), *args[where + 1 :], **kwargs)
        like, *rest = args
        # In the order of axes in memory, which is the order that numbers are drawn in.
        order = sorted(range(len(shape)), key=lambda axis: -like.stride(axis))
        back = [order.index(axis) for axis in range(len(shape))]
        whole = like.new_empty([shape[axis] for axis in order]).permute(back)
        filled = whole.fill_(0.5) if packet in (aten.bernoulli, aten.native_dropout) else whole
        return self.func(filled, *rest, **kwargs)


def drawn_shape(func: Any, args: tuple[Any, ...]) -> torch.Size:
    """The shape of what a random operation draws."""
    sizes = next((each for each in args if isinstance(each, list | tuple | torch.Size)), None)
    found = next((each for each in args if isinstance(each, Tensor)), None)
    return found.shape if found is not None else torch.Size(sizes or ())


class DrawRecorder(DispatchMode):
    """Inside, random operations are noted, in their order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = _generator_states(kwargs.get("generator"))
        found = func(*args, **kwargs)
        after = _generator_states(kwargs.get("generator"))
        drew = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        held = tuple(each.detach() if isinstance(each, Tensor) else each for each in args)
        self.draws.append(Draw(func, held, kwargs, drawn_shape(func, args), drew))
        return found


def _generator_states(generator: torch.Generator | None) -> list[Tensor]:
    if generator is not None:
        return [generator.get_state()]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]  # type: ignore[no-untyped-call]


def record_draws(run: Callable[[Batch], Any], batch: Batch, rows: int) -> tuple[list[Draw], Any]:
    """(random operations of a run on the first example so many times, what it gave)."""
    count = count_examples(batch.x)

    def repeat_row(tensor: Tensor) -> Tensor:
        return tensor[:1].expand(rows, *tensor.shape[1:]) if tensor.ndim and len(tensor) == count else tensor

    weight = None if batch.weight is None else torch.ones_like(repeat_row(batch.weight))
    with DrawRecorder() as seen:
        found = run(Batch(map_tensors(batch.x, repeat_row), repeat_row(batch.y), weight))
    return seen.draws, found


def find_row_axis(two: torch.Size, three: torch.Size) -> tuple[int | None, int]:
    """(the axis that grows with the rows, how much with each), of a tensor's shapes with two rows and with three."""
    if two == three:
        return None, 0
    axes = [axis for axis, (a, b) in enumerate(zip(two, three, strict=False)) if a != b]
    axis, per_row = axes[0], three[axes[0]] - two[axes[0]]
    if len(two) != len(three) or len(axes) > 1 or two[axis] != 2 * per_row:
        got, advice = f"{tuple(two)} for two and {tuple(three)} for three examples", "divide only members: mesh(data=1)"
        raise ValueError(f"expected noise and z with a row for each example, got {got}; {advice}")
    return axis, per_row


def plan_draws(two: list[Draw], three: list[Draw]) -> list[Draw]:
    """The draws of a run, with their axes, from those of two runs."""
    if [each.func for each in two] != [each.func for each in three]:
        raise ValueError(f"expected random operations that do not depend on the batch, got some that do; {ELSE}")
    for small, large in zip(two, three, strict=True):
        small.axis, small.per_row = find_row_axis(small.shape, large.shape)
    return two


class FullBatchNoise(DispatchMode):
    """Inside, random operations of this plan draw for the whole batch and all members, and give what lies here.

    `members`: (M, which lie here), where all run at once; `rows`: (B, which lie here).
    """

    def __init__(self, draws: list[Draw], *, members: tuple[int, slice] | None, rows: tuple[int, slice]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws, self.members, self.rows = draws, members, rows
        self.position = 0
        self.paused = False

    def full_shape(self, draw: Draw, shape: torch.Size) -> tuple[list[int], tuple[slice, ...]]:
        """(the shape for all, which of it lies here)."""
        full, here = list(shape), [slice(None)] * len(shape)
        if self.members is not None:
            full[0], here[0] = self.members
        if draw.axis is not None:
            count, part = self.rows
            here[draw.axis] = slice(part.start * draw.per_row, part.stop * draw.per_row)
            expected, full[draw.axis] = (part.stop - part.start) * draw.per_row, count * draw.per_row
            if shape[draw.axis] != expected:
                raise ValueError(f"expected noise with a row for each example, got shape {tuple(shape)}; {ELSE}")
        return full, tuple(here)

    def draw_for_others(self, runs: int) -> None:
        """Draws what so many other members would."""
        self.paused = True
        for draw in [each for each in self.draws if each.uses_generator] * runs:
            shape = list(draw.shape)
            if draw.axis is not None:
                shape[draw.axis] = self.rows[0] * draw.per_row
            draw.draw_with_shape(shape, draw.args, draw.kwargs)
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        draw = self.draws[self.position % len(self.draws)] if self.draws else None
        self.position += 1
        if draw is None or draw.func is not func:
            raise ValueError(f"expected the random operations of the first batch, got {func}; {ELSE}")
        shape = drawn_shape(func, args)
        full, here = self.full_shape(draw, shape)
        if not draw.uses_generator or full == list(shape):
            return func(*args, **kwargs)
        packet = func.overloadpacket
        if packet not in FILLING | LIKE | SIZED or any(isinstance(each, Tensor) for each in args[1:]):
            raise ValueError(f"expected noise that can be divided over processes, got {func}; {ELSE}")
        if packet is aten.bernoulli and func is aten.bernoulli.default:  # of a probability for each entry
            chances = args[0].new_zeros(full)
            chances[here] = args[0]
            return func(chances, **kwargs)[here]
        drawn = draw.draw_with_shape(full, args, kwargs)
        if packet in FILLING:
            return args[0].copy_(drawn[here])
        if packet is aten.native_dropout:
            kept = drawn[1][here]
            return args[0] * kept * (1 / (1 - args[1]) if args[1] < 1 else 0.0), kept
        return drawn[here]
