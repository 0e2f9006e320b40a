"""Evaluation: the result of `evaluate`, with all metrics and the arrays behind intervals, tests and figures."""

from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal, NoReturn

from torch import Tensor

from dissensus.utils.arrays import as_dataframe
from dissensus.utils.checks import ListedAttributes, unknown_name
from dissensus.utils.example_table import example_frame

PredictionKind = Literal["classification", "multilabel", "regression", "segmentation", "tokens"]

FIRST = ("accuracy", "miou", "rmse", "nll", "perplexity", "ece", "coverage90")  # shown in a short text
# heading of a table -> the first parts of its metrics' names
GROUPS = {
    "Accuracy": "accuracy miou iou exact_match average_precision rmse crps nll gaussian_nll perplexity brier",
    "Calibration": "ece adaptive_ece smooth_ece coverage90 width90 temperature calibrated calibration",
    "Refusing to answer": "aurc augrc coverage_at_risk5",
    "Guarantees": "",  # named by the user
    "Foreign inputs": "ood",
    "Robustness": "shift corrupt attack fool",
    "Members": "members networks distances",
    "Cost": "cost",
    "Other": "",
}
FLAGS = ("correct", "covered", "accepted", "error", "exact_match")  # arrays of 0 and 1, the first two of classes only
ABOUT = ("classes", "calibration", "unit", "precision")  # notes on what was evaluated


class Metrics(dict[str, float]):
    """Metrics by name; the error about a name that is missing lists them and the nearest one."""

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(unknown_name("a metric", name, self))


@dataclass(frozen=True, eq=False)
class Evaluation(ListedAttributes):
    """The result of `evaluate`: all metrics of a posterior, and the arrays behind intervals, tests and figures.

    Args:
        kind: "classification", "multilabel", "regression", "segmentation" or "tokens".
        metrics: flat name ("nll", "ood/SET/auroc", "corrupt/accuracy", "members/…", "cost/…") -> number.
        arrays: `test/NAME` (N,) or (N, D) per example, the columns of `examples`; `test/score/NAME` and
            `ood/SET/score/NAME` (higher = more foreign), `reliability/…`, `risk_coverage/…`, `corrupt/…` (types × severities
            and by severity), `attack/NAME/METRIC` (over ε, `attack/epsilons`), `examples/GROUP/…`. Segmentations have one
            number per image, tokens one per sequence: `test/correct`, `test/nll`, and for `ood/…` metrics that are means over
            images, the value of every image under the same key. `test/intersection` and `test/union` (N, C) give mIoU;
            `test/target` (N, C) counts the pixels of every class.
        score: the score that ranks inputs in the ood/… metrics.
        ood, shift: names of the foreign and the shifted sets.
        corruptions, severities: the corruptions applied, in the order of the arrays' axes.
        notes: class names, the unit of targets, the calibration of the predictions (a temperature is a metric), their
            precision if it is not float32, and the method's warnings about its numbers (`.cautions`).
    """

    kind: PredictionKind
    metrics: dict[str, float]
    arrays: dict[str, Tensor]
    score: str  # the score that ranks inputs in ood/… metrics
    ood: tuple[str, ...] = ()
    shift: tuple[str, ...] = ()
    corruptions: tuple[str, ...] = ()
    severities: tuple[int, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)  # class names, and the method's warnings about its numbers

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", Metrics(self.metrics))

    def table(self) -> str:
        """The metrics as aligned text, in GROUPS. Single corruptions and ε are only in `.metrics`."""
        single = {f"corrupt/{name}" for name in (*self.corruptions, *(f"severity{s}" for s in self.severities))}
        single |= {k.rpartition("/")[0] for k in self.metrics if k.startswith("attack/") and k.count("/") > 2}
        hidden = tuple(f"{prefix}/" for prefix in single)
        shown = {k: v for k, v in self.metrics.items() if not k.startswith(hidden)}
        heading = {name: group for group, names in GROUPS.items() for name in names.split()}
        heading |= {k.rpartition("/")[0]: "Guarantees" for k in shown if k.endswith(("/level", "/promised"))}
        groups, width = {group: [group] for group in GROUPS}, max(map(len, shown), default=0)
        for key, value in shown.items():
            groups[heading.get(key.partition("/")[0], "Other")].append(f"  {key:<{width}}  {metric_text(value)}")
        return "\n".join("\n".join(lines) for lines in groups.values() if len(lines) > 1)

    def __repr__(self) -> str:
        calibrated = f", calibrated: {self.notes['calibration']}" if "calibration" in self.notes else ""
        calibrated += f", in {self.notes['precision']}" if "precision" in self.notes else ""
        first = "".join(f"{key} {metric_text(self.metrics[key])}, " for key in FIRST if key in self.metrics)
        line = f"Evaluation({self.kind}: {first}{len(self.metrics)} metrics in all{calibrated})"
        return "\n".join([line, *self.cautions.values()])

    def _repr_html_(self) -> str:
        said = "".join(f"<p>{escape(text)}</p>" for text in self.cautions.values())
        head = escape(repr(self).splitlines()[0])
        return f"<details><summary><code>{head}</code></summary><pre>{escape(self.table())}</pre></details>{said}"

    def to_dataframe(self) -> Any:
        """A pandas.DataFrame: one row per metric, in the column `value`."""
        return as_dataframe([{"metric": name, "value": value} for name, value in self.metrics.items()], index="metric")

    def examples(self) -> Any:
        """A pandas.DataFrame with a row per test example: truth, prediction, confidence, parts of the uncertainty, losses.

        Also NAME/set, covered, size and accepted of promises. Segmentations have a row per image, tokens one per sequence,
        with the share of right answers. Rows with an ignored label are left out.
        """
        rows, flags = self.kind not in ("segmentation", "tokens"), FLAGS if self.kind == "classification" else FLAGS[2:]
        found = {}
        for key, values in self.arrays.items():
            group, _, name = key.partition("/")
            if group == "test" and not name.startswith(("score/", "cumulative")) and (rows or values.ndim == 1):
                found[name] = values.bool() if name.rpartition("/")[2] in flags else values
        return example_frame(found, self.notes.get("classes", "").splitlines())

    def plot(self, kind: str = "reliability") -> Any:
        """Draws the evaluation as a matplotlib figure.

        Args:
            kind: "reliability" (for a regression, the coverage of its intervals), "risk" (error among the most certain
                inputs), "ood" (scores of test and foreign inputs), "corruptions" (accuracy, NLL and ECE by severity) or
                "gallery" (the least certain images and the most certain mistakes, with their truth).
        """
        from dissensus.plots.charts import notebook_figure  # loads matplotlib
        from dissensus.plots.prediction_figures import evaluation_figure

        return notebook_figure(evaluation_figure(self, kind))

    @property
    def cautions(self) -> dict[str, str]:
        """The method's warnings about these numbers, by name; for example, that its members count as one."""
        return {name: text for name, text in self.notes.items() if name not in ABOUT}


def metric_text(value: float) -> str:
    """A metric as text, with four decimals if the number is neither large nor tiny."""
    if float(value).is_integer() and abs(value) >= 1:
        return f"{value:.0f}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3g}"
