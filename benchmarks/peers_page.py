"""The page of benchmarks/peers.py: one row for each case, one column for each library."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rows import Row, markdown, origins_of

NETWORKS = {
    "mlp": "MLP",
    "mlp-dropout": "MLP",
    "mlp-wide": "MLP 784-512-512-512-10",
    "conv": "small conv net",
    "resnet20": "ResNet-20",
    "resnet18": "ResNet-18",
}
TITLES = {
    "ensemble": "{members} × {network}, batch {batch}",
    "ensemble predicts": "{members} × {network}, {inputs} inputs",
    "ensemble, one input": "{members} × {network}, 1 input",
    "single": "1 × {network}, batch {batch}",
    "single, one input": "1 × {network}, 1 input",
    "dropout predicts": "MC dropout, {members} samples, {network}, {inputs} inputs",
    "dropout, one input": "MC dropout, {members} samples, {network}, 1 input",
    "batch ensemble": "BatchEnsemble of {members}, {network}, batch {batch}",
    "batch ensemble predicts": "BatchEnsemble of {members}, {network}, {inputs} inputs",
    "Laplace, full": "full, {network}, {inputs} inputs",
    "Laplace, kron": "Kronecker, {network}, {inputs} inputs",
    "Laplace, full, predicts": "full, {network}, {inputs} inputs",
    "Laplace, kron, predicts": "Kronecker, {network}, {inputs} inputs",
    "Laplace, kron, one input": "Kronecker, {network}, 1 input",
    "SGHMC": "SGHMC, {network}, batch {batch}",
    "mean-field VI": "mean-field VI, {network}, batch {batch}",
    "empirical kernel": "empirical tangent kernel, {network}, {inputs} inputs",
    "analytic kernel": "analytic kernels, {network}, {inputs} inputs",
}
SECTIONS = {  # title -> which measure of which operations
    "Training, one step": ("training step", ("ensemble", "single", "batch ensemble", "SGHMC", "mean-field VI")),
    "Training, one epoch in one call": ("epoch", ("ensemble", "single", "batch ensemble", "SGHMC", "mean-field VI")),
    "Prediction": ("prediction", ("ensemble predicts", "dropout predicts", "batch ensemble predicts")),
    "Prediction of one input": (
        "prediction of one",
        ("single, one input", "ensemble, one input", "dropout, one input", "Laplace, kron, one input"),
    ),
    "Last-layer Laplace: fit": ("fit", ("Laplace, full", "Laplace, kron")),
    "Kernels": ("kernel", ("empirical kernel", "analytic kernel")),
}
GPU = """## On a GPU

Larger cases, float32 without TF32; cuDNN times its algorithms. A *step* is GPU time from one batch to the next, an *epoch*
ends when the GPU has finished (twenty batches, ten for ResNet-18). Predictions agree within `1e-4`, after training within
`1e-3`, of ResNets `0.05`."""
ON_CPU = ("Training, one step", "Prediction", "Prediction of one input", "Last-layer Laplace: fit", "Kernels")
ON_GPU = ("Training, one step", "Training, one epoch in one call", "Prediction", "Prediction of one input")
LEFT_OUT = {  # rows that the files alone have
    "5 × small conv net, batch 128",
    "1 × small conv net, batch 128",
    "BatchEnsemble of 4, small conv net, batch 128",
    "5 × small conv net, 256 inputs",
    "20 × MLP, 1280 inputs",
    "1 × ResNet-20, 1 input",
}
WORST = 2  # that are named
CAUSES = {  # what takes the time where plain torch is faster, by operation, as profiles show
    "single, one input": "Log-probabilities, a lock, the prediction's object",
    "ensemble, one input": "Log-probabilities, a lock, the prediction's object",
    "dropout, one input": "A draw in each call, locks, modes",
    "ensemble predicts": "Checks of inputs and outputs; modes, locks and random states per batch",
    "ensemble": "Checks of gradients; a run's set-up",
    "single": "Checks of gradients; a run's set-up",
}
LOST = 0.95  # below this ratio the other side is called faster


def title(row: Row) -> str:
    return TITLES[row["operation"]].format(**{**row, "network": NETWORKS.get(row["network"], row["network"])})


def time(row: Row) -> str:
    """Milliseconds and how they compare; bold where the other library is faster."""
    milliseconds = 1e3 * float(row["seconds"])
    text = f"{milliseconds:,.0f}" if milliseconds >= 1000 else f"{milliseconds:.3g}"
    if row["library"] == "dissensus" or not row["ratio"]:
        return text
    ratio = float(row["ratio"])
    compared = f"{text} ({ratio:.2f}×)" if ratio < 10 else f"{text} ({ratio:.0f}×)"
    return f"**{compared}**" if ratio < LOST else compared


def matrix(rows: Sequence[Row], name: Callable[[Row], str], cell: Callable[[Row], str]) -> str:
    """A table with a column for each library that has a number or a failure in one of the rows."""
    shown = [row for row in rows if (row["seconds"] or row["note"] != "not offered") and name(row) not in LEFT_OUT]
    libraries = list(dict.fromkeys(row["library"] for row in shown))
    lines: dict[str, dict[str, str]] = {}
    for row in shown:
        lines.setdefault(name(row), {})[row["library"]] = cell(row) if row["seconds"] else row["note"]
    table = [[key, *(cells.get(library, "–") for library in libraries)] for key, cells in lines.items()]
    return markdown(["ms", *libraries], table)


def lost(rows: Sequence[Row]) -> str:
    """How much others do faster, the worst named; apart, the number of those whose quartiles overlap with dissensus's."""
    case = ("operation", "measure", "network", "members", "batch", "inputs")
    ours = {tuple(row[key] for key in case): row for row in rows if row["library"] == "dissensus" and row["seconds"]}
    compared = [row for row in rows if row["ratio"] and row["operation"] != "import" and row["library"] != "dissensus"]
    clear, near = [], 0
    for row in sorted(compared, key=lambda row: float(row["ratio"])):
        if float(row["ratio"]) < LOST:
            if float(row["upper"]) < float(ours[tuple(row[key] for key in case)]["lower"]):
                clear.append(
                    (f"- {row['library']}, {row['measure']}, {title(row)}: {1 / float(row['ratio']):.2f}×.", row)
                )
            else:
                near += 1
    if not clear:
        return "Nothing here is clearly faster elsewhere."
    rest = [1 / float(row["ratio"]) for _, row in clear[WORST:]]
    said = f"dissensus takes longer in {len(clear)} of {len(compared)} comparisons; in {near} more, quartiles overlap."
    said += f" {len(rest)} are {min(rest):.2f}× to {max(rest):.2f}×; the worst:" if rest else ""
    return "\n\n".join([said, "\n".join(text for text, _ in clear[:WORST])])


def beside_torch(rows: Sequence[Row]) -> list[str]:
    """The rows of plain torch that are faster, by what takes the time."""
    found: dict[str, list[str]] = {}
    for row in rows:
        known = row["library"] == "torch" and row["operation"] in CAUSES and title(row) not in LEFT_OUT
        if known and row["ratio"] and float(row["ratio"]) < LOST:
            which = f"{title(row)}{', epoch' * (row['measure'] == 'epoch')} ({float(row['ratio']):.2f}×)"
            found.setdefault(CAUSES[row["operation"]], []).append(which)
    said = [f"- {cause}: {'; '.join(which)}." for cause, which in found.items()]
    number = sum(map(len, found.values()))
    return [f"Below {LOST}× of plain torch ({number} rows):", "\n".join(said)] if said else []


def memory(rows: Sequence[Row]) -> str:
    """In how many cases dissensus takes more memory than another library, and the most."""
    peaks = {(title(row), row["measure"], row["library"]): float(row["peak_mb"]) for row in rows}
    ratios = [
        peaks[what, measure, "dissensus"] / mb
        for (what, measure, library), mb in peaks.items()
        if library != "dissensus" and mb and peaks.get((what, measure, "dissensus"))
    ]
    more = sum(ratio > 1 for ratio in ratios)
    return (
        f"Resident memory beyond the import's: dissensus takes more than the other library in {more} of {len(ratios)} "
        f"comparisons, at most {max(ratios):.1f} times as much (`peak_mb` in the file)."
    )


def page(rows: Sequence[Row]) -> str:
    """Tables of one file; those of a GPU have headings a level lower, since they stand below those of the CPU."""
    gpu = any(row["device"].startswith("cuda") for row in rows)
    head, parts = ("###", [GPU]) if gpu else ("##", [])
    for heading in ON_GPU if gpu else ON_CPU:
        measure, operations = SECTIONS[heading]
        mine = [row for row in rows if row["operation"] in operations and row["measure"] in (measure, "")]
        if any(row["seconds"] for row in mine):
            kept = [row for row in mine if gpu or row["members"] != "10"]  # between 5 and 20
            parts += [f"{head} {heading}", matrix(kept, title, time)]
    whole = [row for row in rows if row["measure"] in ("epoch", "prediction", "fit", "kernel") and row["peak_mb"]]
    if whole:
        parts += [memory(whole)]
    if imported := [row for row in rows if row["operation"] == "import"]:
        each = [f"{row['library']} {time(row)}" for row in imported if row["measure"] == "import of what is used"]
        parts += [f"Import of what is used, ms beyond that of torch or jax (torch: its own): {', '.join(each)}."]
    if held := [row for row in rows if row["operation"] == "packages"]:
        each = [f"{row['library']} {row['packages']} ({float(row['mb']):,.0f} MB)" for row in held]
        parts += [f"Packages installed beside torch and what it needs (jax for neural-tangents): {', '.join(each)}."]
    parts += [f"{head} Where dissensus is slower", lost(rows), *beside_torch(rows)]
    seen = {row["library"]: f"{row['library']} {row['version']}" for row in rows if row["version"]}
    rounds = " and ".join(dict.fromkeys(row["rounds"] for row in rows if row["rounds"]))
    threads = " and ".join(dict.fromkeys(row["threads"] for row in rows if row["threads"]))
    made = origins_of([row for row in rows if row["torch"]])
    clocks = {"perf_counter": "", "process_time": "processor time, "}
    clock = " and ".join(dict.fromkeys(clocks[row["clock"]] for row in rows if row["clock"]))
    facts = f"{clock}medians of {rounds} rounds in turns, {threads} thread(s); {', '.join(seen.values())}"
    flags = f" --threads {threads}" + " --clock processor --restarts 4" * ("processor" in clock)
    command = f"python benchmarks/peers.py {'--device cuda' if gpu else '--venvs FOLDER'}{flags} --csv FILE"
    file = "peers_gpu_h200.csv" if gpu else "peers_cpu.csv"
    return "\n\n".join([*parts, f"*`{command}`; {facts}; {made}; all measures in `{file}`.*"])
