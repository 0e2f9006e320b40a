"""Tables of docs/choose.md and of the measured gains in README and home page, from the CSV files of benchmarks/results."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from regression_tables import MODELS
from rows import Row, markdown, origins_of, read_rows

RESULTS = Path(__file__).parent / "results"
# What is trained and what is kept, by how the methods are built; M members, S samples.
COST = {
    "map": ("1 network", "1 network"),
    "map-scaled": ("nothing", "1 network"),
    "map-tuned": ("1 network, 10 epochs", "1 network"),
    "gaussian_perturbation": ("nothing more", "1 network, S drawn"),
    "mc_dropout": ("1 network", "1 network"),
    "laplace": ("nothing more: 1 pass", "1 network, S last layers"),
    "deep_ensemble": ("M networks", "M networks"),
    "batch_ensemble": ("1 network, M times the batch", "1 network, M vectors"),
    "forde": ("M networks, twice differentiated", "M networks"),
    "swag": ("1 network", "rank + 2 networks, S drawn"),
    "swag-multi": ("M networks", "M (rank + 2) networks, S drawn"),
    "tradi": ("1 network", "3 networks, S drawn"),
    "node_bnn": ("1 network, 4 times the batch", "1 network"),
    "node_bnn-tuned": ("1 network, 10 epochs", "1 network"),
    "rank_one_bnn": ("1 network, 4 times the batch", "1 network"),
    "mean_field_vi": ("2 networks' numbers", "2 networks"),
    "sghmc": ("1 network, long", "members networks"),
}
TITLES = {
    "map": "the network itself",
    "map-scaled": "a temperature on held-out rows",
    "map-tuned": "fine-tuned without noise",
    "gaussian_perturbation": "[GaussianPerturbation](methods/gaussian-perturbation.md)",
    "swag-multi": "[SWAG](methods/swag.md) of several networks",
    "mc_dropout": "[MCDropout](methods/mc-dropout.md)",
    "laplace": "[Laplace](methods/laplace.md)",
    "deep_ensemble": "[DeepEnsemble](methods/deep-ensemble.md)",
    "batch_ensemble": "[BatchEnsemble](methods/batch-ensemble.md)",
    "forde": "[FoRDE](methods/forde.md)",
    "swag": "[SWAG](methods/swag.md)",
    "tradi": "[TRADI](methods/tradi.md)",
    "node_bnn": "[NodeBNN](methods/node-bnn.md)",
    "node_bnn-tuned": "[NodeBNN](methods/node-bnn.md) of a trained network",
    "rank_one_bnn": "[RankOneBNN](methods/rank-one-bnn.md)",
    "mean_field_vi": "[MeanFieldVI](methods/mean-field-vi.md)",
    "sghmc": "[SGHMC](methods/sghmc.md)",
}


def mean(rows: Sequence[Row], key: str, factor: float = 1.0, digits: int = 3) -> str:
    """The mean over rows; – where none has the number."""
    values = [factor * float(row[key]) for row in rows if row.get(key)]
    return f"{statistics.fmean(values):.{digits}f}" if values else "–"


def source(rows: Sequence[Row], command: str, file: str) -> str:
    return f"*`benchmarks/results/{file}`, made by `{command}`; means over seeds; {origins_of(rows)}.*"


def compared(rows: Sequence[Row], names: dict[str, str], columns: dict[str, tuple[str, float, int]]) -> str:
    """One line per method: what is trained, what is kept, what was measured; where methods differ in it, on how many seeds."""
    lines = []
    counts = {name: len({row["seed"] for row in rows if row["method"] == name}) for name in names}
    differ = len(set(counts.values())) > 1
    for name, method in names.items():
        mine = [row for row in rows if row["method"] == name]
        cells = [mean(mine, key, factor, digits) for key, (_, factor, digits) in columns.items()]
        lines.append([TITLES[method], *COST[method], *cells, *([str(counts[name])] if differ else [])])
    titles = [title for title, _, _ in columns.values()] + ["seeds"] * differ
    return markdown(["method", "you train", "you keep", *titles], lines)


SCORES = {"accuracy": ("accuracy %", 100, 1), "nll": ("NLL", 1, 3), "ece": ("ECE %", 100, 1)}


def trained() -> str:
    """A network that is there already: the published CIFAR-10 ResNet-20."""
    rows = [row for row in read_rows(RESULTS / "pretrained.csv") if row["network"] == "resnet20"]
    names = ("map", "map-scaled", "laplace", "map-tuned", "mc_dropout")
    names = {name: name for name in names} | {"node_bnn": "node_bnn-tuned"}
    columns = SCORES | {"calibrated/nll": ("NLL at a temperature", 1, 3), "corrupt/nll": ("NLL, damaged", 1, 2)}
    columns |= {"ood/svhn/auroc": ("AUROC %, SVHN", 100, 1)}
    table = compared(rows, names, columns)
    return f"{table}\n\n{source(rows, 'python benchmarks/pretrained.py --seeds 5', 'pretrained.csv')}"


def scratch() -> str:
    """A network to be trained: digits."""
    rows = read_rows(RESULTS / "tasks" / "standard.csv")
    names = {name: name for name in dict.fromkeys(row["method"] for row in rows)}
    columns = SCORES | {"ood/fashion/auroc": ("AUROC %, clothes", 100, 1), "cost/train_seconds": ("training, s", 1, 0)}
    table = compared(rows, names, columns)
    return f"{table}\n\n{source(rows, 'dissensus bench standard --seeds 5', 'tasks/standard.csv')}"


def pixels() -> str:
    """A class for every pixel: CamVid, with people as what was never shown."""
    rows = [row for row in read_rows(RESULTS / "camvid_ood.csv") if row["unknown"] == "pedestrian+bicyclist"]
    names = {name: name for name in dict.fromkeys(row["method"] for row in rows)}
    columns = {"miou": ("mIoU %", 100, 1)} | {key: SCORES[key] for key in ("nll", "ece")}
    columns |= {"ood/unknown/auroc": ("AUROC %, people", 100, 1), "cost/train_seconds": ("training, s", 1, 0)}
    table = compared(rows, names, columns)
    return f"{table}\n\n{source(rows, 'dissensus bench camvid-ood --data FOLDER', 'camvid_ood.csv')}"


def table_rows() -> str:
    """Rows of a table: ratios to boosted trees, geometric means over tables."""
    rows = read_rows(RESULTS / "regression_tables.csv")
    if not rows:
        return "Not measured yet."
    base = "histogram boosting (CV+)"

    def of(model: str, name: str, key: str) -> float:
        return statistics.fmean(float(row[key]) for row in rows if row["model"] == model and row["set"] == name)

    sets = list(dict.fromkeys(row["set"] for row in rows))
    lines = []
    for model in MODELS:
        ratios = [
            statistics.geometric_mean(of(model, name, key) / of(base, name, key) for name in sets)
            for key in ("rmse", "interval_score")
        ]
        others = [statistics.fmean(of(model, name, key) for name in sets) for key in ("coverage90", "seconds")]
        lines.append([model, *(f"{each:.2f}" for each in ratios), f"{100 * others[0]:.0f}", f"{others[1]:.1f}"])
    titles = ["model", "RMSE", "interval score", "coverage of 90 %, %", "seconds of one core"]
    said = f"RMSE and interval score are relative to {base}, geometric means over {len(sets)} tables; lower is better."
    made = source(rows, "python benchmarks/regression_tables.py --run", "regression_tables.csv").replace(
        "seeds", "splits"
    )
    return f"{markdown(titles, lines)}\n\n{said}\n\n{made}"


def readme_gains() -> str:
    """All measured gains, each with its file."""
    lines = [[*line[:-2], f"[{line[-1]}](benchmarks/results/{line[-1]})"] for line in gains()]
    return markdown(["what", "measure", "before", "after", "source"], lines)


def home_gains() -> str:
    """The last three measured gains, each with its page of results."""
    lines = [[f"[{what}]({page})", *numbers] for what, *numbers, page, _ in gains()[-3:]]
    return markdown(["what", "measure", "before", "after"], lines)


# Task of papers.py, method, its baseline, measure, its name, factor and digits, what was done; higher is better for
# accuracies and lower for the others.
PAPERS = [
    ("cifar100-forde", "forde-pca", "deep_ensemble", "corrupt/accuracy", "accuracy %", 100, 1,
     "CIFAR-100 under 15 corruptions: five ResNet-18 that repel (FoRDE), beside five independent ones"),
    ("cifar10-forde", "forde-pca", "deep_ensemble", "corrupt/accuracy", "accuracy %", 100, 1,
     "CIFAR-10 under 15 corruptions, the same"),
    ("cifar100-node", "node_bnn-out4", "swag", "corrupt/nll", "NLL", 1, 2,
     "CIFAR-100 under 15 corruptions: a ResNet-18 with noise on its nodes, beside SWAG"),
]  # fmt: skip


def paper_gains() -> list[list[str]]:
    """Gains in the papers' tables: those that were run and whose interval, against the task's baseline, is clear."""
    rows, pairs = (read_rows(RESULTS / "papers" / name) for name in ("papers.csv", "pairs.csv"))
    found = []
    for task, method, base, key, measure, factor, digits, what in PAPERS:
        mine, other = (
            [r for r in rows if (r["task"], r["size"], r["method"]) == (task, "short", m)] for m in (method, base)
        )
        clear = [
            float(p["lower"]) > 0 if key.endswith("accuracy") else float(p["upper"]) < 0
            for p in pairs
            if (p["task"], p["size"], p["method"], p["metric"]) == (task, "short", method, key)
        ]
        if mine and other and any(clear):
            numbers = (mean(each, key, factor, digits) for each in (other, mine))
            found.append([what, measure, *numbers, "results/papers.md", "papers/papers.csv"])
    return found


def gains() -> list[list[str]]:
    """What was done, the measure, its value before and after, the page of results and the file it is from."""
    pretrained = [row for row in read_rows(RESULTS / "pretrained.csv") if row["network"] == "resnet20"]
    every = [row for row in read_rows(RESULTS / "laplace_cifar10.csv") if row["program"] == "dissensus"]
    laplace = [row for row in every if row["rows"] in ("", "50000")]
    letters, speed = read_rows(RESULTS / "mnist_ood.csv"), read_rows(RESULTS / "speed_h200.csv")
    (fast,) = [
        row
        for row in speed
        if (row["case"], row["members"], row["batch"], row["what"], row["ran"])
        == ("mlp", "20", "128", "training step", "vectorised+captured")
    ]
    (scaled,) = [
        row
        for row in read_rows(RESULTS / "calibration.csv")
        if (row["method"], row["calibration"]) == ("map", "temperature")
    ]

    def of(rows: Sequence[Row], column: str, name: str) -> list[Row]:
        return [row for row in rows if row[column] == name]

    return [
        *paper_gains(),
        [
            "a published CIFAR-10 ResNet-20, ten epochs of noise on its nodes, both with a temperature",
            "NLL",
            mean(of(pretrained, "method", "map"), "calibrated/nll"),
            mean(of(pretrained, "method", "node_bnn"), "calibrated/nll"),
            "results/pretrained.md",
            "pretrained.csv",
        ],
        [
            "the same network, Laplace on its last layer, no training",
            "NLL",
            mean(of(laplace, "case", "map"), "nll"),
            mean(of(laplace, "case", "as it comes"), "nll"),
            "results/pretrained.md",
            "laplace_cifar10.csv",
        ],
        [
            "a published CIFAR-10 ResNet-20, a temperature from 2,000 held-out images",
            "ECE %",
            mean([scaled], "ece_before", 100, 1),
            mean([scaled], "ece", 100, 1),
            "results/calibration.md",
            "calibration.csv",
        ],
        [
            "MNIST against letters, TRADI beside a network of another run, trained as usual",
            "AUROC %",
            mean(of(letters, "method", "map"), "ood/notmnist/auroc", 100, 1),
            mean(of(letters, "method", "tradi"), "ood/notmnist/auroc", 100, 1),
            "results/tracking.md",
            "mnist_ood.csv",
        ],
        [
            "a training step of 20 MLPs on one H200, beside a loop over them",
            "ms",
            f"{float(fast['loop_ms']):.1f}",
            f"{float(fast['ms']):.2f}",
            "results/speed.md",
            "speed_h200.csv",
        ],
    ]
