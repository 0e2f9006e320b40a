"""What docs/results/pretrained.md shows: CSV files and a figure of packed runs, tables and sentences of the CSV files.

    python benchmarks/pretrained_page.py tried.tar.gz runs.tar.gz

The files are those that benchmarks/pretrained.py packs. Intervals in the CSV file of pairs are of paired bootstraps over the
8,000 test images, each image's numbers averaged over the seeds that both methods have: they count images alone. Those of the
page count the seeds as well, by the library's own formula (dissensus.bench.report.comparisons).
"""

from __future__ import annotations

import argparse
import json
import tarfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rows import FACTS, Row, markdown, origins_of, read_rows, write_rows
from safetensors.torch import load
from torch import Tensor

from dissensus.bench.report.comparisons import LEVEL, SIGNIFICANT, holm_p_values, spread_of
from dissensus.metrics import paired_test
from dissensus.metrics.bootstrap import comparison, resample_counts, student_quantile
from dissensus.metrics.classification import confidence_ece

ROOT = Path(__file__).parents[1]
RESULTS, FIGURE = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures" / "pretrained.png"
PAGE = ROOT / "docs" / "results" / "pretrained.md"
FILES = ("pretrained.csv", "pretrained_pairs.csv")
COMMAND = (
    "python benchmarks/pretrained.py --data FOLDER --seeds 5 --set training.engine=loop+captured --pack runs.tar.gz"
)
SIZES, MODES = (4, 8, 32), ("in", "out")
IMAGES = 8000  # that everything is measured on
NAMES = {
    "map": "as it came (MAP)",
    "map-scaled": "at a temperature",
    "map-tuned": "plain fine-tune, as many epochs",
    "gaussian_perturbation": "Gaussian perturbation",
    "mc_dropout-untrained": "MC dropout, not trained",
    "mc_dropout": "MC dropout, fine-tuned",
    "laplace": "Laplace, last layer",
    "node_bnn-untrained": "NodeBNN, not trained, σ = 0.1",
    "node_bnn-in4": "NodeBNN “in”, K = 4",
    "node_bnn": "NodeBNN “in”, K = 8: the recipe",
    "node_bnn-in32": "NodeBNN “in”, K = 32",
    **{f"node_bnn-out{k}": f"NodeBNN “out”, K = {k}" for k in SIZES},
}
METRICS = {  # metric -> (title, factor, digits)
    "accuracy": ("error %", 100, 2),
    "nll": ("NLL", 1, 4),
    "ece": ("ECE %", 100, 2),
    "calibrated/temperature": ("T", 1, 2),
    "calibrated/nll": ("NLL at T", 1, 4),
    "calibrated/ece": ("ECE % at T", 100, 2),
    "corrupt/accuracy": ("error %, corrupted", 100, 1),
    "corrupt/nll": ("NLL, corrupted", 1, 3),
    "corrupt/ece": ("ECE %, corrupted", 100, 1),
    "ood/svhn/auroc": ("AUROC %, SVHN", 100, 1),
    "ood/cifar100/auroc": ("AUROC %, CIFAR-100", 100, 1),
    "cost/train_seconds": ("training, s", 1, 0),
}
ELSEWHERE = (  # methods on the page on choosing, or in the figure and the file
    *("map", "map-tuned", "mc_dropout", "laplace", "node_bnn-in4", "node_bnn-in32"),
    *(f"node_bnn-out{k}" for k in SIZES),
)
SHOWN = (  # the others are in the file
    *("accuracy", "nll", "ece", "calibrated/nll", "corrupt/nll", "ood/svhn/auroc"),
)
TITLES = {
    "accuracy": "accuracy %",
    "nll": "NLL",
    "ece": "ECE %",
    "calibrated/nll": "NLL at T",
    "calibrated/ece": "ECE % at T",
}
FURTHER = ("calibration/nll", "calibration/nll_scaled", "calibrated/accuracy", "members/nll", "members/disagreement")
# column -> setting
SETTINGS = {key: key for key in ("mode", "components", "train_samples", "init_std", "batch_norm")}
SETTINGS |= {"gamma": "posterior_temperature", "rate": "lr"}
REFERENCES = [name for name in NAMES if not name.startswith("node_bnn") or "untrained" in name]
Run = dict[str, Any]  # its row, and "arrays"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "packed", type=Path, nargs="+", help="files of benchmarks/pretrained.py; of equal runs the last counts"
    )
    runs = {(r["network"], r["method"], r["seed"]): r for path in parser.parse_args().packed for r in unpacked(path)}
    found = sorted(
        runs.values(),
        key=lambda run: (run["network"] == "tried", str(run["network"]), order(run["method"]), run["seed"]),
    )
    rows = [{key: value for key, value in run.items() if key != "arrays"} for run in found]
    write_rows(RESULTS / FILES[0], rows)
    write_rows(RESULTS / FILES[1], list(comparisons(found)))
    if compared(rows):
        drawn(read_rows(RESULTS / FILES[0])).savefig(FIGURE, dpi=110)


def order(method: str) -> int:
    return list(NAMES).index(method) if method in NAMES else len(NAMES)


def unpacked(path: Path) -> Iterator[Run]:
    """One run each: network ("tried" for those that settings were chosen by), method, seed, metrics, facts, arrays."""
    with tarfile.open(path) as archive:
        files = {entry.name: archive.extractfile(entry) for entry in archive}
        content = {name: file.read() for name, file in files.items() if file is not None}
    for name in content:
        folder, _, last = name.rpartition("/")
        if last != "metrics.json":
            continue
        metrics = json.loads(content[name])["metrics"]
        config = tomllib.loads(content[f"{folder}/config.toml"].decode())
        made, training, settings = config["provenance"], config["training"], config["settings"]
        network = folder.partition("/")[0]
        kept = {key: metrics[key] for key in (*METRICS, *FURTHER) if key in metrics}
        severities = {key: value for key, value in metrics.items() if key.startswith("corrupt/severity")}
        first = next((line for line in content[f"{folder}/log.jsonl"].splitlines() if b'"lr"' in line), b"{}")
        told = {"epochs": training["epochs"], "lr": json.loads(first).get("lr", "")}
        told |= {key: settings[each] for key, name in SETTINGS.items() for each in (key, name) if each in settings}
        told |= {"gamma": told["gamma"] - 1} if "gamma" in told else {}  # γ is the temperature − 1
        numbers = {key: f"{value:.6g}" for key, value in (kept | severities).items()}
        facts = {key: made[key] for key in FACTS} | {"weights": made.get("weights_sha256", "")[:12]}
        origin = {"network": network, "method": config["method"], "seed": config["seed"]}
        yield origin | told | numbers | facts | {"arrays": load(content[f"{folder}/arrays.safetensors"])}


def comparisons(runs: Sequence[Run]) -> Iterator[Row]:
    """NodeBNNs against the others of a network, and 32 components against 4, image by image.

    As they come, and at the best temperatures.
    """
    for network in dict.fromkeys(run["network"] for run in runs if run["network"] != "tried"):
        here: dict[str, dict[int, dict[str, Tensor]]] = {}
        for run in runs:
            if run["network"] == network and run["method"] in NAMES:
                here.setdefault(run["method"], {})[run["seed"]] = run["arrays"]
        for first in (name for name in here if name not in REFERENCES):
            fewest = [first.replace("32", "4")] if first.endswith("32") else []
            for second in (name for name in [*REFERENCES, *fewest] if name in here):
                seeds = sorted(here[first].keys() & here[second].keys())
                for metric, compare in COMPARED.items() if seeds else ():
                    c = compare([here[first][s] for s in seeds], [here[second][s] for s in seeds])
                    found = {key: f"{value:.5f}" for key, value in c._asdict().items()}
                    origin = {
                        "network": network,
                        "metric": metric,
                        "first": first,
                        "second": second,
                        "seeds": len(seeds),
                    }
                    yield origin | found


def _means(key: str) -> Callable[..., Any]:
    def compare(first: Sequence[Mapping[str, Tensor]], second: Sequence[Mapping[str, Tensor]]) -> Any:
        a, b = (torch.stack([each[key].double() for each in several]).mean(0) for several in (first, second))
        return paired_test(a, b)

    return compare


def _eces(group: str) -> Callable[..., Any]:
    """Means over seeds, all of which are resampled with the same images."""

    def compare(first: Sequence[Mapping[str, Tensor]], second: Sequence[Mapping[str, Tensor]]) -> Any:
        (a, drawn_a), (b, drawn_b) = (
            torch.stack([_ece(each[f"{group}/confidence"], each[f"{group}/correct"]) for each in several])
            .mean(0)
            .split([1, 1000])
            for several in (first, second)
        )
        return comparison((a - b)[0], drawn_a - drawn_b, examples=len(first[0][f"{group}/correct"]))

    return compare


@cache
def _ece(confidence: Tensor, correct: Tensor) -> Tensor:
    """(1 + 1000,) the ECE of these images, and of 1,000 resamples of them, the same for all runs."""
    generator = torch.Generator().manual_seed(0)
    drawn = [
        confidence_ece(confidence, correct, weights=resample_counts(len(correct), 100, generator)) for _ in range(10)
    ]
    return torch.cat([confidence_ece(confidence, correct)[None], *drawn])


COMPARED = {
    "accuracy": _means("test/correct"),
    "nll": _means("test/nll"),
    "ece": _eces("test"),
    "calibrated/nll": _means("calibrated/nll"),
    "calibrated/ece": _eces("calibrated"),
}


def pages(rows: Sequence[Row], pairs: Sequence[Row]) -> Iterator[tuple[Path, str, str]]:
    """(page, name, table) of every table of the page; none where nothing has been run."""
    if not rows:
        return
    networks = compared(rows)
    made = f"{provenance(rows)[:-2]}; {', '.join(networks[1:])} and all columns in `{FILES[0]}`.*"
    yield PAGE, "pretrained", f"{table(rows, networks[0])}\n\n{made}"
    pairs = judged(pairs, rows)
    yield PAGE, "recipe", recipe_table(rows, pairs)
    pairs = [pair for pair in pairs if pair["network"] in networks]
    yield PAGE, "pretrained-says", says(pairs)
    yield PAGE, "pretrained-components", components_table(pairs, networks)
    yield PAGE, "pretrained-tried", tried_table(rows)


def compared(rows: Sequence[Row]) -> list[str]:
    """The networks that ran all methods."""
    return list(dict.fromkeys(row["network"] for row in rows if row["method"] == "laplace"))


def node(mode: str, components: int) -> str:
    return "node_bnn" if (mode, components) == ("in", 8) else f"node_bnn-{mode}{components}"


def recipe_table(rows: Sequence[Row], pairs: Sequence[Row]) -> str:
    """Every network as it came, at its temperature and with the recipe."""
    compared = [p for p in pairs if (p["first"], p["second"]) == ("node_bnn", "map-scaled")]
    found, tempered = (
        {pair["network"]: pair for pair in adjusted([p for p in compared if p["metric"] == metric])}
        for metric in ("nll", "calibrated/nll")
    )
    lines = []
    for name in found:
        mine = {m: [r for r in rows if (r["network"], r["method"]) == (name, m)] for m in ("map", "node_bnn")}

        def mean(method: str, key: str, mine: dict[str, list[Row]] = mine) -> float:
            return fmean(float(row[key]) for row in mine[method])

        cells = [f"{100 * mean(method, 'accuracy'):.1f}" for method in ("map", "node_bnn")]
        lines.append([name, *(_difference(each[name], "nll") for each in (found, tempered)), *cells])
    heads = ["network", "NLL less the original's at T", "both at T", "accuracy %", "recipe"]
    table = markdown(heads, lines)
    bold = f"Bold: p < {SIGNIFICANT:g}, test images and seeds counted, by Holm for the networks of a column."
    said = f"Against the original at its temperature, the recipe as it comes is {counted(found)};"
    said += f" at a temperature of its own it is {counted(tempered)}."
    return f"{table}\n\n{bold} {said}\n\n{provenance([row for row in rows if row['network'] in found])}"


def counted(pairs: Mapping[str, Row]) -> str:
    """In how many networks a loss is lower beyond chance, and in how many higher."""
    sure = [float(pair["difference"]) for pair in pairs.values() if pair["p_value"] < SIGNIFICANT]
    ahead = sum(value < 0 for value in sure)
    return f"ahead beyond chance on {ahead} of {len(pairs)} networks and behind on {len(sure) - ahead}"


def judged(pairs: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """The pairs with intervals and p-values that count seeds as well: the file's count the test images alone."""
    numbers = {(row["network"], row["method"], row["seed"]): row for row in rows}
    found = []
    for pair in pairs:
        network, metric, difference = pair["network"], pair["metric"], float(pair["difference"])
        seeds = [s for d, m, s in numbers if (d, m) == (network, pair["first"]) and (d, pair["second"], s) in numbers]
        each = [
            float(numbers[network, pair["first"], s][metric]) - float(numbers[network, pair["second"], s][metric])
            for s in seeds
        ]
        images = (float(pair["upper"]) - float(pair["lower"])) / 2 / student_quantile(LEVEL, IMAGES - 1)
        spread = spread_of(each, images, IMAGES)
        half = spread.half_width()
        ends = {"lower": difference - half, "upper": difference + half, "p_value": spread.p_value(difference)}
        found.append({**pair, **ends})
    return found


def adjusted(pairs: Sequence[Row]) -> list[Row]:
    """The pairs of one table, with p-values after Holm's adjustment for their number."""
    return [
        {**pair, "p_value": p}
        for pair, p in zip(pairs, holm_p_values([pair["p_value"] for pair in pairs]), strict=True)
    ]


def says(pairs: Sequence[Row]) -> str:
    """In how many of its cases NodeBNN is ahead of each other beyond chance, and behind."""
    lines = []
    for second in REFERENCES:
        cells = [NAMES[second]]
        for metric in TITLES:
            mine = adjusted([p for p in pairs if (p["second"], p["metric"]) == (second, metric)])
            sure = [float(p["difference"]) for p in mine if p["p_value"] < SIGNIFICANT]
            ahead = sum(value > 0 if metric == "accuracy" else value < 0 for value in sure)
            behind = f", behind in {len(sure) - ahead}" if len(sure) > ahead else ""
            cells.append(f"{ahead}/{len(mine)}{behind}")
        lines.append(cells)
    title = "cases in which NodeBNN is ahead beyond chance of"
    table = markdown([title, *(name.replace(" %", "") for name in TITLES.values())], lines)
    bold = f"Beyond chance: p < {SIGNIFICANT:g}, test images and seeds counted, by Holm for the cases of a cell"
    return f"{table}\n\n{bold} (`{FILES[1]}`)."


def table(rows: Sequence[Row], network: str) -> str:
    """The methods of one network."""
    lines = []
    for name, title in NAMES.items():
        mine = [row for row in rows if row["method"] == name and row["network"] == network]
        if not mine or name in ELSEWHERE:
            continue
        cells = []
        for key in SHOWN:
            _, factor, digits = METRICS[key]
            values = [float(row[key]) for row in mine if row.get(key)]
            if not values:
                cells.append("–")
                continue
            mean = fmean(values)
            cells.append(f"{factor * (1 - mean if key.endswith('accuracy') else mean):.{digits}f}")
        lines.append([title, *cells])
    return markdown([network, *(METRICS[key][0] for key in SHOWN)], lines)


def components_table(pairs: Sequence[Row], networks: Sequence[str]) -> str:
    """32 components less 4."""
    mine = adjusted([p for p in pairs if p["second"].endswith("4") and p["second"].startswith("node_bnn")])
    lines = []
    for network in networks:
        for mode in MODES:
            if not any((p["network"], p["first"]) == (network, node(mode, 32)) for p in mine):
                continue
            key = (network, node(mode, 32), node(mode, 4))
            found = {p["metric"]: p for p in mine if (p["network"], p["first"], p["second"]) == key}
            shown = (_difference(found.get(metric), metric) for metric in ("nll", "calibrated/nll"))
            lines.append([f"{network}, “{mode}”", *shown])
    return markdown(["K = 32 less K = 4", "NLL", "NLL at T"], lines)


def _difference(pair: Row | None, metric: str) -> str:
    if pair is None:
        return "–"
    factor, digits = (1, 4) if metric.endswith("nll") else (100, 2)
    d, low, high = (factor * float(pair[key]) for key in ("difference", "lower", "upper"))
    text = f"{d:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
    return f"**{text}**" if pair["p_value"] < SIGNIFICANT else text


def tried_table(rows: Sequence[Row]) -> str:
    """What the recipe was chosen by: the best five."""
    lines = []
    tries = [row for row in rows if row["network"] == "tried"]
    usual = next((row for row in tries if row["method"].endswith("-recipe")), {})
    for row in sorted(tries, key=lambda row: float(row["calibration/nll_scaled"]))[:5]:
        other = [
            f"{key} {row[key]}" for key in ("epochs", *SETTINGS) if row is not usual and row[key] != usual.get(key)
        ]
        told = ", ".join(other) or "the recipe"
        keys = ("calibration/nll_scaled", "calibrated/nll")
        lines.append([told, *(f"{float(row[key]):.4f}" for key in keys)])
    heads = ["tried", "NLL at T, held out", "test"]
    return f"{markdown(heads, lines)}\n\n{provenance(tries)[:-2]}; all in `{FILES[0]}`.*"


def provenance(rows: Sequence[Row]) -> str:
    """The command and the facts of a table's rows."""
    return f"*`{COMMAND}`, then `python benchmarks/pretrained_page.py runs.tar.gz`; {origins_of(rows)}.*"


def drawn(rows: Sequence[Row]) -> Any:
    """A figure: error, NLL and ECE over the number of components, a curve for each mode, with levels to compare with."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    networks = [
        net for net in compared(rows) if any((r["network"], r["method"]) == (net, node("in", 32)) for r in rows)
    ]
    shown = ("accuracy", "nll", "calibrated/nll", "ece", "calibrated/ece")
    figure, grid = pyplot.subplots(len(networks), len(shown), figsize=(15, 3.2 * len(networks)), squeeze=False)
    for line, network in zip(grid, networks, strict=True):
        for axes, key in zip(line, shown, strict=True):
            title, factor, _ = METRICS[key]

            def value(name: str, key: str = key, factor: float = factor, network: str = network) -> float | None:
                found = [float(r[key]) for r in rows if (r["network"], r["method"]) == (network, name) and r.get(key)]
                mean = fmean(found) if found else None
                return None if mean is None else factor * (1 - mean if key.endswith("accuracy") else mean)

            for mode in MODES:
                points = {k: value(node(mode, k)) for k in SIZES}
                kept = {k: v for k, v in points.items() if v is not None}
                axes.plot(list(kept), list(kept.values()), marker="o", label=f"NodeBNN “{mode}”")
            for name, style in (("map-scaled", ":"), ("map-tuned", "--"), ("laplace", "-.")):
                if (level := value(name)) is not None:
                    axes.axhline(level, linestyle=style, color="0.4", linewidth=1, label=NAMES[name])
            axes.set_xscale("log", base=2)
            axes.set_xticks(SIZES, [str(k) for k in SIZES])
            axes.set(title=f"{network}: {title}", xlabel="components K")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="lower center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return figure


if __name__ == "__main__":
    main()
