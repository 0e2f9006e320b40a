"""Errors that a caller may want to catch."""

PLURALS = {"loss": "losses"}


class Diverged(ValueError):
    """Raised by `fit` and `predict` when a member has values that are not finite; a ValueError.

    Attributes: `.members`, the indices of these members; `.step`, the optimiser step at which it was noticed; `.what`, the
    kind of value: "loss", "gradient", "weight", "buffer", "moment" (of the optimiser) or "prediction".
    """

    def __init__(self, members: list[int], step: int, what: str = "loss") -> None:
        self.members, self.step, self.what = members, step, what
        who = ", ".join(str(i) for i in members)
        super().__init__(
            f"expected finite {PLURALS.get(what, f'{what}s')}, got a {what} that is not finite in member {who} at step {step}; "
            "lower the learning rate, clip gradients (clip=1.0) or look for extreme inputs"
        )

    def __reduce__(self) -> tuple[type["Diverged"], tuple[list[int], int, str]]:
        return type(self), (self.members, self.step, self.what)  # how it is pickled for another process
