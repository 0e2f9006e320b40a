"""Writes the tables of README.md and docs/ from the CSV files in benchmarks/results.

    python benchmarks/tables.py

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`; what is there is replaced.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import aims
import bf16_predictions
import bias_correlation
import camvid_ood
import choose
import compose
import compose_speed
import embedded_width
import fast_paths
import first_minute
import landscape
import measured
import mnist_ood
import momentum
import papers_page
import peers_page
import pretrained_page
import regression_page
import scaling
import shift
import task_results
import toy_entropy
import tradi_schedule
import uci_page
from minutes import with_minutes
from particles_toy import grouped_severities, sentences
from rows import Paired, by_key, grouped, markdown, origins_of, paired, read_rows, seeds_of, training_time

import calibration
from dissensus.bench.capacity_table import capacities
from dissensus.bench.report.comparisons import SIGNIFICANT, holm_p_values
from dissensus.bench.task import schema

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SCHEMA = Path(schema.__file__)
COMMAND = "python benchmarks/speed.py --csv FILE"
NETWORKS = dict.fromkeys(("mlp", "mlp16"), "MLP") | {"resnet18": "ResNet-18", "conv": "small conv net"}
LINE = {
    "region/between/sd": "sd between clusters",
    "region/outside/sd": "sd outside",
    "region/at_data/sd": "sd at the data",
    "rmse": "RMSE",
}
PLANE = {"region/off_data/total": "entropy off the data", "region/at_data/total": "at the data", "nll": "NLL"}
PARTICLES = {
    "toy-regression": LINE,
    "toy-regression-adam": LINE,
    "toy-classification": PLANE,
    "toy-regression-small": LINE,
    "toy-classification-small": PLANE,
    "lengthscales": {
        "severities 4–5": "severities 4–5",
        "nll": "NLL",
        "corrupt/nll": "NLL, damaged",
        "ece": "ECE",
        "corrupt/ece": "ECE, damaged",
        "ood/fashion/auroc": "AUROC, clothes",
    },
}
SMALL = ("deep_ensemble", "function_rde", "function_rde-paper", "forde")
LARGE = (
    *("deep_ensemble", "weight_rde", "function_rde", "function_rde-1_B", "feature_rde", "svgd-function"),
    *("lit", "forde"),
)
SHOWN = {  # methods of the tables of particles; the others are in the files
    "toy-regression": LARGE,
    "toy-regression-adam": ("deep_ensemble", "weight_rde", "function_rde", "forde"),
    "toy-classification": LARGE,
    "toy-regression-small": SMALL,
    "toy-classification-small": SMALL,
    "lengthscales": ("deep_ensemble", "lit", "forde", "forde-alpha100"),
}
HIDDEN = {  # columns that are compared, too, and that the files alone show
    "toy-regression": ("rmse",),
    "toy-regression-adam": ("region/at_data/sd", "rmse"),
    "toy-classification": ("nll",),
    "toy-regression-small": ("region/at_data/sd", "rmse"),
    "toy-classification-small": ("nll",),
    "lengthscales": ("nll", "ece"),
    "forde-variants": ("corrupt/ece", "ood/fashion/auroc"),
    "node-corruptions": ("ece", "corrupt/severity5/accuracy"),
    "remedies": ("corrupt/ece",),
    "node_digits": ("ece", "corrupt/ece"),
    "node_cubic_gap": ("region/at_data/sd",),
}
NODES = {  # file -> columns, what methods are compared with, and the command
    "node_digits": (
        {
            "nll": "NLL",
            "ece": "ECE",
            "accuracy": "accuracy",
            "corrupt/nll": "NLL, 19 corruptions",
            "corrupt/ece": "ECE, corrupted",
            "corrupt/accuracy": "accuracy, corrupted",
            "ood/fashion/auroc": "AUROC, clothes",
        },
        "map",
        "dissensus bench digits --methods map,node_bnn --seeds 15",
    ),
    "node_cubic_gap": (
        {
            "nll": "NLL",
            "shift/cubic_beyond/nll": "NLL, 3 < abs(x) < 4",
            "shift/cubic_beyond/coverage90": "coverage of 90 % intervals there",
            "region/at_data/sd": "sd of functions at the data",
            "region/outside/sd": "outside",
        },
        "deep_ensemble",
        "dissensus bench cubic-gap --seeds 5",
    ),
}
PICTURES = {
    "toy-regression": "Predictions along the line, method by method",
    "toy-regression-adam": "Predictions along the line, method by method",
    "toy-classification": "Total uncertainty over the plane, method by method",
    "toy-regression-small": "Predictions along the line, method by method",
    "toy-classification-small": "Total uncertainty over the plane, method by method",
    "lengthscales": "Test accuracy over alpha",
}
COMMANDS = {  # of tables that are not of a task as it stands
    "toy-regression-adam": "dissensus bench toy-regression --size paper --seeds 5 --out runs/toy-regression-adam --methods "
    "deep_ensemble,weight_rde,function_rde,feature_rde,svgd,svgd-function,lit,forde --set training.optimizer=adam "
    "--set training.lr=1e-3 --set training.floor=0.01 --set likelihood.noise=0.05 --set method.weight_prior_std=1.0 "
    "--set method.svgd.training.lr=1e-3"
}
SIDE_BY_SIDE = {
    "toy-regression": {"region/between/sd": "sd between"},
    "toy-classification": {"region/off_data/total": "entropy off the data"},
    "forde-variants": {
        "nll": "NLL",
        "corrupt/ece": "ECE, damaged",
        "ood/fashion/auroc": "AUROC, clothes",
        "distances/gradient": "angle",
    },
}


def rows(name: str) -> list[dict[str, str]]:
    return read_rows(RESULTS / name)


def speed_table() -> str:
    """The comparisons on an H200: the first of each network and kind, and those in which the loop is faster."""
    lines, seen = [], set()
    for row in rows("speed_h200.csv"):
        kind = (NETWORKS[row["case"]], re.sub(r" of \d+", "", row["what"]))
        if row["what"].startswith("epoch") or "bf16" in row["what"] or (kind in seen and float(row["ratio"]) >= 1):
            continue
        seen.add(kind)
        case = f"{row['members']} × {NETWORKS[row['case']]}, batch {row['batch']}"
        times = [f"{float(row['loop_ms']):.4g}", f"{float(row['ms']):.3g}", f"{float(row['ratio']):.3g}×"]
        lines.append([case, row["what"], *times, row["ran"]])
    table = markdown(["networks", "what", "loop, ms", "dissensus, ms", "ratio", "how it ran"], lines)
    more = "other sizes in `speed_h200.csv`; an Arm CPU in `speed_cpu.csv`"
    return f"{table}\n\n*`{COMMAND}`; {versions_of(rows('speed_h200.csv'))}; {more}.*"


def versions_of(found: list[dict[str, str]]) -> str:
    """The commits, by version of torch."""
    return "; ".join(
        f"commit {' and '.join(by_key(mine, 'commit'))}, torch {torch}"
        for torch, mine in by_key(found, "torch").items()
    )


GPU_SECTIONS = {
    "steps": ("A training step of {members} ResNet-18 on batches of {batch}, bf16", "times the deep ensemble"),
    "prediction": ("Prediction of {members} ResNet-18 in batches of {batch}", "times as fast as the float32 loop"),
}


GPU_LEFT_OUT = ("loop over networks, bf16", "summarise, bf16")


def gpu_tables(found: list[dict[str, str]]) -> str:
    """What a step and a prediction cost on a GPU."""
    parts = []
    for what, (title, ratio) in GPU_SECTIONS.items():
        mine = [row for row in found if row["what"] == what and row["name"] not in GPU_LEFT_OUT]
        columns = {"name": "what", "run": "run", "ms": "ms", "ratio": ratio, "error": "largest error of a probability"}
        if what == "steps":
            columns = {"name": "what", "ms": "ms", "ratio": ratio, "reserved_gib": "GiB"}
        table = markdown(list(columns.values()), [[row[key] for key in columns] for row in mine])
        parts += [f"*{title.format(**mine[0])}*", "", table, ""]
    more = "long runs, kernels and gradients in `gpu_h200.csv`"
    return "\n".join([*parts, f"*`python benchmarks/gpu.py --csv FILE`; {origins_of(found)}; {more}.*"])


def bf16_repulsion_table(found: list[dict[str, str]]) -> str:
    """Deviations in bf16, mean over seeds."""
    keys = ("activation", "batch norm", "steps")
    columns = ("directions", "repulsion")
    titles = (*keys, *(f"{column} %" for column in columns))
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for key, members in grouped((row for row in found if row["how"] == "bf16"), keys).items():
        cells = [f"{100 * statistics.mean(float(row[column]) for row in members):.2g}" for column in columns]
        lines.append(f"| {' | '.join((*key, *cells))} |")
    seeds = len({row["seed"] for row in found})
    facts = f"{seeds} seeds; {origins_of(found)}; other deviations, and in float32, in `bf16_repulsion.csv`"
    made = f"*`python benchmarks/bf16_repulsion.py --csv FILE`; {facts}.*"
    return "\n".join([*lines, "", made])


def seed_table(
    found: list[dict[str, str]],
    key: str,
    columns: dict[str, str],
    *,
    where: str,
    command: str,
    against: str = "",
    hidden: Sequence[str] = (),
) -> str:
    """One row per value of `key`, with its number of seeds where rows differ in it; bold: differs from `against`.

    Hidden columns are compared and counted as well.
    """
    groups, shown = by_key(found, key), {name: title for name, title in columns.items() if name not in hidden}
    differ = len({len(members) for members in groups.values()}) > 1
    compared = comparisons(groups, columns, [(name, against) for name in groups if against and name != against])
    lines = []
    for name, members in groups.items():
        cells = [marked(mean_and_spread(members, column), compared.get((name, against, column))) for column in shown]
        lines.append([f"{name}{f' ({len(members)} seeds)' if differ else ''}", *cells])
    facts = f"{seeds_of(found, {})}, mean ± standard deviation; {versions_of(found)}; {where}{training_time(found)}"
    parts = [markdown([key, *shown.values()], lines), f"*`{command}`; {facts}.*"]
    if against:
        parts.insert(1, bold(against, compared))
    return "\n\n".join(parts)


Compared = dict[tuple[str, str, str], tuple[Paired, float]]  # (method, other, column) -> difference, adjusted p-value


def comparisons(
    groups: dict[str, list[dict[str, str]]], columns: Iterable[str], pairs: Sequence[tuple[str, str]]
) -> Compared:
    """Differences of two methods on the seeds both have, by Student's t, with Holm's adjustment for all of them."""
    each = {(*pair, key): paired(*(groups[name] for name in pair), key) for key in columns for pair in pairs}
    there = {key: found for key, found in each.items() if found is not None and found.p_value == found.p_value}
    adjusted = holm_p_values([found.p_value for found in there.values()])
    return {key: (found, p) for (key, found), p in zip(there.items(), adjusted, strict=True)}


def marked(text: str, compared: tuple[Paired, float] | None) -> str:
    return f"**{text}**" if compared is not None and compared[1] < SIGNIFICANT else text


def bold(against: str, compared: Compared) -> str:
    sure = sum(p < SIGNIFICANT for _, p in compared.values())
    return f"Bold: differs from {against}, {sure} of {len(compared)} comparisons (paired by seed, p < {SIGNIFICANT:g} by Holm)."


def difference_sentences(
    found: list[dict[str, str]], columns: dict[str, str], pairs: Sequence[tuple[str, str]]
) -> Iterator[str]:
    """What differs beyond chance in each pair, and how much is within chance."""
    compared = comparisons(by_key(found, "method"), columns, pairs)
    for pair in pairs:
        mine = {key[2]: each for key, each in compared.items() if key[:2] == pair}
        sure = [f"{columns[key]} {each.difference:+.2g}" for key, (each, p) in mine.items() if p < SIGNIFICANT]
        rest = len(mine) - len(sure)
        within = f"; {rest} within chance" if sure and rest else "" if sure else f"all {rest} within chance"
        yield f"- {' − '.join(pair)}: {'; '.join(sure)}{within}."


def mean_and_spread(members: list[dict[str, str]], column: str) -> str:
    """Mean ± standard deviation over the rows that have the column; – where none has."""
    values = [float(row[column]) for row in members if row.get(column)]
    if not values:
        return "–"
    return f"{statistics.mean(values):.3g} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.2g}"


def particle_rows(task: str) -> list[dict[str, str]]:
    return grouped_severities(rows(f"{task.replace('-', '_')}.csv"))


def particle_table(task: str, columns: dict[str, str]) -> str:
    """A particle task: the methods that its page speaks of, bold where they differ, and its figures where there are any."""
    every = particle_rows(task)
    found = [row for row in every if row["method"] in SHOWN[task]]
    seeds = len({row["seed"] for row in found})
    command = COMMANDS.get(task, f"dissensus bench {task} --size paper --seeds {seeds}")
    where = " and ".join(dict.fromkeys(row["device"] for row in found))
    where += f"; all {len(by_key(every, 'method'))} methods in `{task.replace('-', '_')}.csv`"
    against = "deep_ensemble" if task == "lengthscales" else "forde"
    hidden = HIDDEN[task]
    table = seed_table(found, "method", columns, where=where, command=command, against=against, hidden=hidden)
    pictures = {task: PICTURES[task], f"{task}-distances": "How members differ, over training"}
    shown = [
        f"![{text}](figures/{name}.png)"
        for name, text in pictures.items()
        if (ROOT / "docs" / "figures" / f"{name}.png").exists()
    ]
    said = [each.partition(" On test images")[0] for each in sentences(every)] if task == "lengthscales" else []
    return "\n\n".join([table, *said, *shown])


def cost_table(found: list[dict[str, str]]) -> str:
    """FoRDE's training step beside a deep ensemble's."""
    titles = {"mlp": "MLP 784-200-200-200-10", "conv": "small conv net"}
    lines = [
        [
            titles[row["case"]],
            row["method"],
            f"{float(row['ms']):.3g}",
            f"{float(row['ratio']):.2f} ({float(row['lower']):.2f} to {float(row['upper']):.2f})",
        ]
        for row in found
        if row["method"] != "deep_ensemble"
    ]
    table = markdown(["networks", "method", "ms per step", "times a deep ensemble"], lines)
    threads = " and ".join(dict.fromkeys(row["threads"] for row in found))
    sizes = " and ".join(dict.fromkeys(f"{row['members']} members, batch {row['batch']}" for row in found))
    command = "python benchmarks/forde_cost.py --csv FILE"
    return f"{table}\n\n*`{command}`; {sizes}; medians and quartiles; {origins_of(found)}, {threads} thread(s).*"


def false_positive_table(found: list[dict[str, str]]) -> str:
    """How often equal methods are said to differ, and how often real differences are found."""
    titles = {
        "false_positives": "p < 0.05, %",
        "seeds_alone": "t over seeds alone, %",
        "examples_alone": "examples alone, %",
        "found_5": "found: 5 errors, %",
    }
    noises = {"0.0": "0 : 1", "inf": "1 : 0"}
    lines = [
        [noises.get(row["noise"], f"{float(row['noise']):g} : 1"), row["seeds"]]
        + [f"{100 * float(row[key]):.1f}" for key in titles]
        for row in found
        if row["metric"] == "nll" and row["seeds"] in ("2", "5") and row["noise"] not in ("0.3", "3.0")
    ]
    largest = []
    for metric, name in (("nll", "NLL"), ("accuracy", "accuracy"), ("ood/far/auroc", "AUROC")):
        mine = [row for row in found if row["metric"] == metric]
        rate = max(float(row["false_positives"]) for row in mine)
        cases = f"{len(mine)} cases of {mine[0]['simulations']} comparisons"
        largest.append(f"{name} {100 * rate:.1f} % ({cases}; an error of {100 * float(mine[0]['error']):.1f} points)")
    first = found[0]
    facts = f"seed {first['seed']}, {first['examples']} test examples, {first['resamples']} resamples; "
    facts += origins_of(found)
    said = f"The table is of the NLL. Largest share of p < 0.05 between equal methods: {', '.join(largest)}."
    return (
        f"{markdown(['noise of seeds : examples', 'seeds', *titles.values()], lines)}\n\n{said}\n\n"
        f"*`python benchmarks/false_positives.py --csv FILE`; {facts}; all cases in `false_positives.csv`.*"
    )


def few_examples_table(found: list[dict[str, str]]) -> str:
    """How often equal methods are said to differ with one seed and few examples."""
    names = {"nll": "NLL", "ood/far/auroc": "AUROC", "ood/far/aupr": "AUPR", "ood/far/fpr95": "FPR at 95 % TPR"}
    names |= {"ece": "ECE", "aurc": "AURC", "rmse": "RMSE", "skewed": "NLL, skewed"}
    metrics = list(dict.fromkeys(row["metric"] for row in found))
    share = {(row["metric"], row["examples"]): f"{100 * float(row['false_positives']):.1f}" for row in found}
    before = {row["examples"]: f"{100 * float(row['normal']):.1f}" for row in found if row["metric"] == "nll"}
    titles = ["p < 0.05, %; test examples", "NLL by the normal distribution", *(names.get(key, key) for key in metrics)]
    lines = [
        [count, before[count], *(share[key, count] for key in metrics)] for count in before if count in ("2", "5", "30")
    ]
    first = found[0]
    facts = (
        f"seed {first['seed']}, {first['simulations']} comparisons (error {100 * float(first['error']):.1f} points), "
    )
    facts += f"{first['resamples']} resamples; commit {first['commit']}, torch {first['torch']}, {first['device']}"
    return f"{markdown(titles, lines)}\n\n*`python benchmarks/false_positives.py --few --csv FILE`; {facts}.*"


def node_table(name: str) -> str:
    """A task of NodeBNN, beside the method it is compared with."""
    columns, against, command = NODES[name]
    found = rows(f"{name}.csv")
    where = " and ".join(dict.fromkeys(row["device"] for row in found)) + f"; `{name}.csv`"
    hidden = HIDDEN[name]
    return seed_table(found, "method", columns, where=where, command=command, against=against, hidden=hidden)


STEPS = (  # page, name, files, columns, script, what the numbers are
    (
        "results/node-bnn.md",
        "node-step",
        ("node_step_cpu", "node_step_h200"),
        measured.STEP,
        "node_step.py --repeats 30",
        "medians of steps in turns",
    ),
    (
        "results/embedded.md",
        "embedded-step",
        ("embedded_step_cpu", "embedded_step_h200"),
        measured.EMBEDDED_STEP,
        "embedded_step.py --csv FILE",
        "steps in turns, CPU with --threads 1",
    ),
    (
        "results/tracking.md",
        "tradi-overhead",
        ("tradi_overhead_cpu", "tradi_overhead_h200"),
        measured.TRACKED,
        "tradi_overhead.py --csv FILE",
        "medians of rounds in turns",
    ),
    ("guides/threads.md", "threads", ("threads_cpu",), measured.TURNS, "threads.py --csv FILE", ""),
    (
        "results/speed.md",
        "latency",
        ("latency_cpu",),
        measured.LATENCY,
        "latency.py --csv FILE",
        "both sides in turns in one process; medians, and of ratios also quartiles",
    ),
)


LEFT_OUT = {  # rows that the files alone have
    "node-step": re.compile("out"),
    "embedded-step": re.compile("784|activations"),
    "latency": re.compile("training"),
}


LAPLACE_MEANS = ("accuracy", "nll", "ece", "precision", "evidence")


def measurements() -> Iterator[tuple[str, str, str]]:
    """(page, name, table) of small measurements."""
    for page, name, files, columns, script, what in STEPS:
        found = [row for file in files for row in rows(f"{file}.csv")]
        if name in LEFT_OUT:
            found = [row for row in found if not LEFT_OUT[name].search(row.get("case", row.get("what")))]
        yield page, name, measured.measured(found, columns, f"python benchmarks/{script}", what)
    found = measured.averaged(
        [{"rows": "50000", **row} for row in rows("laplace_cifar10.csv")], ("program", "case", "rows"), LAPLACE_MEANS
    )
    found = [row for row in found if "prior 1" not in row["case"] and row["case"] != "covariance=joint, structure=kron"]
    command = "python benchmarks/laplace_cifar10.py --data FOLDER --weights resnet20.npz --seeds 5 --csv FILE"
    table = measured.measured(found, measured.LAPLACE, command, "means over seeds; all cases in `laplace_cifar10.csv`")
    yield "results/pretrained.md", "laplace-cifar10", table
    yield "results/pretrained.md", "laplace-gaps", laplace_gaps()
    found, command = (
        rows("ood_gate.csv"),
        "python benchmarks/ood_gate.py --data FOLDER --weights resnet20.npz --csv FILE",
    )
    for name, columns in (("ood-gate", measured.OOD_GATE), ("never-empty", measured.NEVER_EMPTY)):
        given = [row for row in found if row["size" if name == "never-empty" else "svhn"]]
        yield "guides/guarantees.md", name, measured.measured(given, columns, command)


def laplace_gaps() -> str:
    """NLL of Laplace less that of laplace-torch on the same rows, for each subset or, of all rows, each seed."""
    nll = {(r["program"], r["case"], r["rows"], r["seed"]): float(r["nll"]) for r in rows("laplace_cifar10.csv")}
    made = []
    for case, count in (("as it comes", "50000"), ("as it comes", "5000"), ("data_size=5000", "5000")):
        found = {seed: value for (_, name, size, seed), value in nll.items() if (name, size) == (case, count)}
        theirs = "laplace-torch", "full, prior marglik, probit", count
        gaps = sorted(value - nll.get((*theirs, seed), nll[*theirs, "0"]) for seed, value in found.items())
        made.append([case, count, str(len(gaps)), f"{gaps[0]:.4f}", f"{gaps[-1]:.4f}"])
    return markdown(["case", "rows", "seeds", "least", "most"], made)


def side_by_side() -> str:
    """Variants of FoRDE on all tasks that have them, one column per number."""
    shown = [
        (task, key, title)
        for task, columns in SIDE_BY_SIDE.items()
        for key, title in columns.items()
        if task != "forde-variants" or key not in HIDDEN[task]
    ]
    headings = [f"{title} ({task})" for task, _, title in shown]
    groups = {task: by_key(particle_rows(task), "method") for task in SIDE_BY_SIDE}
    every = dict.fromkeys(name for group in groups.values() for name in group)
    names = [name for name in every if name == "deep_ensemble" or name.startswith("forde")]
    pairs = [(name, "forde") for name in names if name not in ("forde", "deep_ensemble")]
    compared = {task: comparisons(groups[task], columns, pairs) for task, columns in SIDE_BY_SIDE.items()}
    lines = [
        [name]
        + [
            marked(mean_and_spread(groups[task].get(name, []), key), compared[task].get((name, "forde", key)))
            for task, key, _ in shown
        ]
        for name in names
    ]
    counts = ", ".join(str(len(each)) for each in compared.values())
    said = f"Bold: a variant differs from forde beyond chance (p < {SIGNIFICANT:g}, by Holm for a task's {counts} comparisons)."
    files = ", ".join(f"`{task.replace('-', '_')}.csv`" for task in SIDE_BY_SIDE)
    found = particle_rows("forde-variants")
    made = (
        f"*`dissensus bench forde-variants --size paper --seeds 5` and the runs above; {files}; {origins_of(found)}.*"
    )
    return f"{markdown(['method', *headings], lines)}\n\n{said}\n\n{made}"


def filled(text: str, name: str, table: str) -> str:
    """The text with the table between the marks of this name; an error where a page has no such marks."""
    block = f"<!-- {name} -->\n{table}\n<!-- /{name} -->"
    found, count = re.subn(rf"<!-- {name} -->(.*?<!-- /{name} -->)?", lambda _: block, text, count=1, flags=re.DOTALL)
    if not count:
        raise SystemExit(f"expected <!-- {name} --> in the page, got none; put it where the table goes")
    return found


def capacity_table() -> str:
    """Weights and nodes of the talk's networks, counted now."""
    lines = [
        [name, f"{each.weights:,}", f"{each.nodes:,}", f"{each.ratio:,.0f}", f"{each.parameters:,}"]
        for name, each in capacities([]).items()
    ]
    return (
        markdown(["network", "weights", "nodes", "weights / node", "parameters"], lines) + "\n\n*`dissensus capacity`.*"
    )


def shift_table(task: str) -> str:
    """A task on damaged inputs: its table, bold where methods differ, other comparisons as sentences, and its figures."""
    found, columns = rows(f"{task.replace('-', '_')}.csv"), shift.COLUMNS[task]
    command = f"dissensus bench {task} --size {found[0]['size']} --seeds {len({row['seed'] for row in found})}"
    where = " and ".join(dict.fromkeys(row["device"] for row in found))
    where += f"; `{task.replace('-', '_')}.csv`"
    parts = [seed_table(found, "method", columns, where=where, command=command, against="map", hidden=HIDDEN[task])]
    title, pairs = shift.PAIRS[task]
    count = len(comparisons(by_key(found, "method"), columns, pairs))
    parts += [
        f"{title} (p < {SIGNIFICANT:g} after Holm's adjustment for these {count} comparisons):",
        "\n".join(difference_sentences(found, columns, pairs)),
    ]
    return "\n\n".join([*parts, *shift.shown(task, list(by_key(found, "method")))])


def tables() -> Iterator[tuple[Path, str, str]]:
    """(page, name, table) of every table there is a CSV for; figures are linked as the page's folder asks."""
    for page, name, table in tables_of_docs():
        up = "../" * (len(page.relative_to(ROOT / "docs").parts) - 1) if page.is_relative_to(ROOT / "docs") else "docs/"
        yield page, name, with_minutes(table.replace("](figures/", f"]({up}figures/"))


def task_keys() -> str:
    """Every key of a task's sections, with the comment that the schema has for it."""
    found = []
    for section in ("data", "network", "training", "evaluation", "calibration", "widths"):
        lines = SCHEMA.read_text().split(f"\nclass {section.title()}(", 1)[1].split("\n\n\n", 1)[0]
        joined = re.sub(r"\n +# ", " ", lines)
        for key in schema.fields_of(getattr(schema, section.title())):
            said = re.search(rf"\n    {key}: [^#\n]*#\s*([^\n]*)", joined)
            found.append([f"`{section}.{key}`", said[1].replace("|", "or") if said else ""])
    return markdown(["key", "meaning"], found)


PAGES: tuple[
    tuple[str, str, str, Callable[[list[dict[str, str]]], str]], ...
] = (  # page, name, file, table of its rows
    ("results/speed.md", "gpu", "gpu_h200.csv", gpu_tables),
    ("results/speed.md", "bf16-repulsion", "bf16_repulsion.csv", bf16_repulsion_table),
    ("results/tracking.md", "mnist-ood", "mnist_ood.csv", mnist_ood.page),
    ("results/tracking.md", "tradi-schedule", "tradi_schedule.csv", tradi_schedule.page),
    ("results/tracking.md", "uci", "uci.csv", uci_page.page),
    ("results/particles.md", "toy-entropy", "toy_entropy.csv", toy_entropy.page),
    ("results/composing.md", "compose", "compose.csv", compose.page),
    ("results/particles.md", "landscape", "landscape.csv", landscape.page),
    ("results/peers.md", "peers", "peers_cpu.csv", peers_page.page),
    ("results/peers.md", "peers-gpu", "peers_gpu_h200.csv", peers_page.page),
    ("results/statistics.md", "false-positives", "false_positives.csv", false_positive_table),
    ("results/statistics.md", "false-positives-few", "false_positives_few.csv", few_examples_table),
    ("theory.md", "bias-correlation", "bias_correlation.csv", bias_correlation.page),
    ("methods/forde.md", "forde-cost", "forde_cost_cpu.csv", cost_table),
    ("results/many-machines.md", "scaling-measured", scaling.MEASURED, scaling.measured_page),
    ("results/many-machines.md", "scaling-times", scaling.TIMES, scaling.times_page),
    ("results/many-machines.md", "scaling-predicted", scaling.PREDICTED, scaling.predicted_page),
)


DOCS = ROOT / "docs"
RESULTS_PAGES = DOCS / "results"


def tables_of_docs() -> Iterator[tuple[Path, str, str]]:
    """The same with links as in docs itself."""
    docs, results = DOCS, RESULTS_PAGES
    yield ROOT / "README.md", "gains", choose.readme_gains()
    yield docs / "index.md", "gains", choose.home_gains()
    for name, table in fast_paths.page_tables(rows("fast_paths.csv")):
        yield fast_paths.PAGE, name, table
    for name, table in (("trained", choose.trained), ("scratch", choose.scratch), ("pixels", choose.pixels)):
        yield docs / "choose.md", name, table()
    yield docs / "choose.md", "table", choose.table_rows()
    yield results / "speed.md", "speed", speed_table()
    halves = [*rows("bf16_predictions.csv"), *rows("bf16_predictions_h200.csv")]
    yield results / "speed.md", "bf16-predictions", bf16_predictions.half_table(halves)
    yield docs / "methods/node-bnn.md", "capacity", capacity_table()
    yield docs / "reference/tasks.md", "task-keys", task_keys()
    for name in NODES:
        yield results / "node-bnn.md", name.replace("_", "-"), node_table(name)
    for page, name, table in measurements():
        yield docs / page, name, table
    yield results / "speed.md", "aims", aims.page(rows)
    for page, name, file, table in PAGES:
        if found := rows(file):
            yield docs / page, name, table(found)
    yield from tables_of_tasks()
    yield from tables_of_studies()


def tables_of_tasks() -> Iterator[tuple[Path, str, str]]:
    """Results of tasks, by page."""
    results = RESULTS_PAGES
    for task in shift.COLUMNS:
        yield results / "covariate-shift.md", task, shift_table(task)
    for task, columns in PARTICLES.items():
        if particle_rows(task):
            yield results / "particles.md", task, particle_table(task, columns)
    if all(particle_rows(task) for task in SIDE_BY_SIDE):
        yield results / "particles.md", "side-by-side", side_by_side()
    yield from papers_page.pages()
    yield from pretrained_page.pages(rows("pretrained.csv"), rows("pretrained_pairs.csv"))
    for task, table in task_results.pages():
        yield results / "standard.md", task, table


def tables_of_studies() -> Iterator[tuple[Path, str, str]]:
    """Results of benchmarks that have a page, where they were measured."""
    docs, results = DOCS, RESULTS_PAGES
    if found := rows(camvid_ood.NUMBERS):
        yield results / "segmentation.md", "camvid-ood", camvid_ood.page(found, rows(camvid_ood.PAIRS))
    if found := rows(calibration.NUMBERS):
        yield results / "calibration.md", "calibration", calibration.page(found, rows(calibration.SETS))
    if found := [*rows("compose_speed_h200.csv"), *rows("compose_speed_cpu.csv")]:
        yield results / "composing.md", "compose-speed", compose_speed.page(found)
    if found := [row for file in first_minute.FILES for row in rows(file)]:
        yield results / "speed.md", "first-minute", first_minute.page(found)
    if found := rows("momentum.csv"):
        yield docs / "theory.md", "momentum", momentum.page(found, rows("momentum_trials.csv"))
    yield results / "tables.md", "regression-tables", regression_page.page(rows("regression_tables.csv"))
    if rows("embedded_width.csv"):
        yield results / "embedded.md", "embedded-width", embedded_width.page()
        yield results / "embedded.md", "embedded-verdicts", embedded_width.verdict_page()
    if rows("embedded_width_fashion.csv"):
        fashion = embedded_width.verdict_page(embedded_width.FASHION)
        yield results / "embedded.md", "embedded-verdicts-fashion", fashion


def main() -> None:
    for path, name, table in tables():
        path.write_text(filled(path.read_text(), name, table))


if __name__ == "__main__":
    main()
