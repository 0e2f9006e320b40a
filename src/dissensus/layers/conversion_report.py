"""Account: a table of the layers of a user's network that were changed, and of those that were not, with reasons."""

from dataclasses import dataclass, field


@dataclass
class ConversionReport:
    """`converted`: layer -> what was changed; `left`: layer -> why it was not. `str()` is a table of both."""

    converted: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [("layer", "converted", "left alone")]
        rows += [(name or "(itself)", done, "") for name, done in self.converted.items()]
        rows += [(name or "(itself)", "", reason) for name, reason in self.left.items()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines)
