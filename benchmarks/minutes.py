"""How long the commands of the results pages take; `results/minutes.csv` out, which tables.py writes beside each command.

    python benchmarks/minutes.py "python benchmarks/latency.py --csv FILE" --data FOLDER
    python benchmarks/minutes.py --rows                     # of those whose results hold seconds, summed

A command is run to its end, and the processor time of all its processes is taken, so that other work does not count. FILE and
FOLDER are put in its place. `dissensus bench` is stopped at its own line on the time it expects. `--stop SECONDS DONE ALL`
stops a command after so long and counts, in its output, the lines with DONE, of ALL in a whole run. Rows that are "estimated"
in the file were written by hand; `how` says from what.
"""

import argparse
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rows import Row, made_on, read_rows, write_rows

HERE = Path(__file__).parent
FILE = HERE / "results" / "minutes.csv"
ROWS = {  # command: file, column, its unit in minutes
    "python benchmarks/compose.py": ("compose.csv", "seconds", 1 / 60),
    "dissensus bench embedded-width --seeds 3 --jobs N": ("embedded_width.csv", "seconds", 1 / 60),
    "python benchmarks/regression_tables.py --run": ("regression_tables.csv", "seconds", 1 / 60),
}
EXPECTED = re.compile(r"in all (?:about|under) (\d+) min")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*")
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--data", default="")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--stop", nargs=3, metavar=("SECONDS", "DONE", "ALL"))
    parser.add_argument("--csv", type=Path, default=FILE)
    given = parser.parse_args()
    found = [summed_row(command) for command in ROWS] if given.rows else []
    for command in given.commands:
        found.append(timed_row(command, given.data, given.device, given.stop))
        print(found[-1], flush=True)
    rows = {row["command"]: row for row in [*read_rows(given.csv), *found]}
    write_rows(given.csv, [rows[command] for command in sorted(rows)])


def summed_row(command: str) -> Row:
    """The minutes that the rows of a file state themselves."""
    file, column, unit = ROWS[command]
    rows = read_rows(HERE / "results" / file)
    minutes = unit * sum(float(row[column] or 0) for row in rows)
    facts = {name: " and ".join(dict.fromkeys(row[name] for row in rows)) for name in ("commit", "torch", "device")}
    return {"command": command, "minutes": round(minutes, 1), "how": "summed", **facts}


def timed_row(command: str, data: str, device: str, stop: list[str] | None) -> Row:
    """The minutes that a command takes: of the processor, of the clock on a GPU, or those that it expects itself."""
    with tempfile.TemporaryDirectory() as folder:
        words = command.replace("FILE", f"{folder}/out.csv").replace("FOLDER", data or folder).replace("RUNS", folder)
        words = re.sub(r"^python", sys.executable, words)
        if is_bench := words.startswith("dissensus bench"):
            words = f"{sys.executable} -m dissensus{words.removeprefix('dissensus')} --out {folder}/runs"
        before, started = processor_seconds(), time.perf_counter()
        process = subprocess.Popen(words.split(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines, expected = 0, None
        for line in process.stdout or ():
            expected = EXPECTED.search(line) if is_bench else None
            lines += bool(stop and stop[1] in line)
            if expected or (stop and time.perf_counter() - started > float(stop[0])):
                process.terminate()
                break
        failed = process.wait() and not expected and not stop
    if failed:
        raise SystemExit(f"expected `{command}` to end well, got exit status {process.returncode}")
    if expected:
        minutes, how = float(expected[1]), "its own expectation"
    else:
        seconds = time.perf_counter() - started if device == "cuda" else processor_seconds() - before
        minutes = seconds / 60 * (float(stop[2]) / max(lines, 1) if stop else 1)
        how = f"from {lines} of {stop[2]} parts" if stop else "run"
    return {"command": command, "minutes": round(minutes, 1), "how": how, **made_on(device)}


def processor_seconds() -> float:
    """Of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def with_minutes(table: str) -> str:
    """A page's table whose lines on commands also say how long these take, where it is known and not yet said."""
    known = {row["command"]: row for row in read_rows(FILE)}

    def add(found: re.Match[str]) -> str:
        row = next((known[each] for each in re.findall("`([^`]+)`", found[1]) if each in known), None)
        if row is None or " min of " in found[0]:
            return found[0]
        minutes, what = float(row["minutes"]), "a GPU" if row["device"].startswith("cuda") else "a core"
        about = "over" if row["how"].startswith("stopped") else "about"
        return f"{found[1]}; {f'{about} {minutes:,.0f}' if minutes >= 1 else 'under 1'} min of {what}.*"

    return re.sub(r"^(\*[^\n]*`[^\n]*)\.\*$", add, table, flags=re.MULTILINE)


if __name__ == "__main__":
    main()
