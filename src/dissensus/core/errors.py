"""Errors of this library that a caller may want to tell from others."""


class Diverged(ValueError):
    """A member's loss is no longer finite; `.members` lists which, `.step` says at which optimiser step it was seen."""

    def __init__(self, members: list[int], step: int) -> None:
        self.members = members
        self.step = step
        who = ", ".join(str(i) for i in members)
        super().__init__(
            f"expected finite losses, got a loss that is not finite in member {who} at step {step}; "
            "lower the learning rate, clip gradients (clip=1.0) or look for extreme inputs"
        )
