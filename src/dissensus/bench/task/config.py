"""Tasks: TOML files with sizes, overridden from the command line and resolved into one table of settings per run."""

import copy
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import reduce
from importlib.resources import files
from pathlib import Path
from typing import Any

from dissensus.bench.rows.dataset_rows import SetKind
from dissensus.bench.rows.named_sets import task_set
from dissensus.bench.setting_checks import name_list
from dissensus.bench.task import objects, schema
from dissensus.bench.task.schema import SECTIONS
from dissensus.bench.user_code import is_import_path
from dissensus.core.likelihood import HeteroscedasticRegression, Regression
from dissensus.engine.prediction_loop import PredictionPrecision
from dissensus.methods import METHODS
from dissensus.utils.checks import one_of
from dissensus.utils.file_errors import read_errors

SIZES = ("smoke", "short", "paper")
REAL = (Regression, HeteroscedasticRegression)  # likelihoods of values
Settings = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A task at one size: all settings except the method and the seed."""

    name: str
    size: str
    settings: Settings
    folder: Path | None = None  # folder of the user's task file; None for shipped tasks

    @property
    def methods(self) -> list[str]:
        return name_list(self.settings["methods"])

    @property
    def title(self) -> str:
        return str(self.settings.get("title", self.name))

    @property
    def description(self) -> str:
        return str(self.settings.get("description", ""))


@dataclass(frozen=True)
class RunConfig:
    """All settings of one run: written into its folder, and sufficient to repeat the run."""

    task: str
    size: str
    method: str
    seed: int
    title: str
    description: str
    baseline: str
    data: Settings
    network: Settings
    likelihood: Settings | str
    settings: Settings  # of the method
    training: Settings
    evaluation: Settings
    reference: Settings = field(compare=False)  # published numbers: the run does not depend on them
    calibration: Settings = field(default_factory=dict)
    folder: str = field(default="", compare=False)  # folder of the task file, which may contain its files and modules

    @property
    def kind(self) -> SetKind:
        """The kind of the data; the likelihood decides if the data fit several."""
        fixed = task_set(self.data["name"]).kind
        real = bool(self.likelihood) and objects.parse_object("likelihood", self.likelihood).constructor in REAL
        return fixed or ("regression" if real else "classification")

    @property
    def precision(self) -> PredictionPrecision:
        """The precision of predictions."""
        return self.evaluation.get("precision", "float32")

    def table(self) -> Settings:
        return asdict(self)


def task_names() -> list[str]:
    """Names of the tasks that come with the package."""
    return sorted(path.name.removesuffix(".toml") for path in _task_folder().iterdir() if path.name.endswith(".toml"))


def own_tasks() -> dict[str, Settings]:
    """The unresolved task files in the current folder, by name; other TOML files are skipped."""
    found: dict[str, Settings] = {}
    for path in sorted(Path().glob("*.toml")):
        with suppress(ValueError, OSError):
            settings = read_task(str(path))
            schema.check_section("", settings, schema.fields_of(schema.TaskFile), path.name)
            schema.check_value("data.name", settings.get("data", {}).get("name"), str)
            found |= {path.name: settings} if "methods" in settings else {}
    return found


def load_task(
    name: str, *, size: str = "short", overrides: Sequence[str] = (), methods: Sequence[str] | None = None
) -> Task:
    """Loads a task by name or from a .toml file, at a size, with "key=value" overrides applied last.

    `methods`: the methods that will run, to which method.key=value applies; by default the task's.
    """
    settings = read_task(name)
    schema.check_section("", settings, schema.fields_of(schema.TaskFile), name)
    sizes = settings.pop("size", {})
    for each in (size, *sizes):
        one_of("a size", each, SIZES)
    settings = merge_settings(settings, sizes.get(size, {}))
    folder = Path(name).absolute().parent if name.endswith(".toml") else None
    for override in sorted(overrides, key=_override_order):
        settings = apply_override(settings, override, methods=methods, beside=str(folder or ""))
    schema.check_task(settings, name)
    if not name_list(settings.get("methods", [])):
        raise ValueError(f"expected methods in the task {name}, got none; add methods = [...]")
    objects.check_methods(name_list(settings["methods"]), settings)
    return Task(Path(name).stem, size, settings, folder)


def read_task(name: str) -> Settings:
    """The unresolved task file."""
    if name.endswith(".toml") and Path(name).is_file():
        raw = Path(name).read_bytes()
    elif {".", "/", "\\"} & set(name):  # characters of a path, which no shipped task has
        raise FileNotFoundError(f"expected a task of `dissensus list` or a .toml file, got {name!r}; correct the path")
    else:
        raw = (_task_folder() / f"{one_of('a task', name, task_names())}.toml").read_bytes()
    try:
        return tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # not TOML, not text, or nested too deeply
        raise ValueError(f"expected TOML in {name}, got a file that is not ({error}); correct it") from error


def run_config(task: Task, method: str, seed: int) -> RunConfig:
    """The config of a run: one method or variant with one seed."""
    objects.check_methods([method], task.settings)
    if "grid" in task.settings:  # settings differ between cells, and there is no cell here
        raise ValueError(f"expected a task without [grid], or a cell of one, got {task.name}; use `dissensus bench`")
    tables = {section: copy.deepcopy(task.settings.get(section, {})) for section in SECTIONS}
    data = {key: seed if value == schema.SEED and key != "name" else value for key, value in tables["data"].items()}
    if (rows := tables["calibration"].pop("rows", None)) is not None:
        data["calibration"] = rows
    settings = merge_settings(tables["method"].get(objects.base_name(method), {}), tables["method"].get(method, {}))
    training = merge_settings(tables["training"], settings.pop("training", {}))
    network = merge_settings({"network": tables["network"]}, {"network": settings.pop("network", {})})["network"]
    if "epochs" not in training:
        raise ValueError(f"expected training.epochs for {method}, got none; write epochs = … below [training]")
    check_validation(data, training, tables["evaluation"])
    for keyword in settings.keys() & objects.OBJECTS.keys():
        objects.parse_object(keyword, settings[keyword]).check()
    return RunConfig(
        task=task.name,
        size=task.size,
        method=method,
        seed=seed,
        title=task.title,
        description=task.description,
        baseline=str(task.settings.get("baseline", "")),
        data=data,
        network=network,
        settings=settings,
        training=training,
        **{section: tables[section] for section in ("likelihood", "evaluation", "reference", "calibration")},
        folder=str(task.folder or ""),
    )


def run_config_from_table(table: Settings, where: str) -> RunConfig:
    """The RunConfig of a table read from a file; raises if a value is missing or has another type."""
    with read_errors(where):  # a missing or unknown key
        config = RunConfig(**table)
    for key, annotation in schema.parameter_fields(RunConfig).items():
        schema.check_value(f"{where}: {key}", getattr(config, key), annotation)
    sections = {section: table[section] for section in SECTIONS if section in table and section != "size"}
    schema.check_task({**sections, "method": {config.method: config.settings}}, where)
    return config


def check_validation(data: Settings, training: Settings, evaluation: Settings) -> None:
    """Raises if training or a choice needs validation rows and none are held out."""
    asking = {
        "training.keep_best": training["epochs"] and training.get("keep_best", True),
        "training.patience": training["epochs"] and training.get("patience"),
        "training.temperature": training.get("temperature") and not data.get("calibration"),
        "evaluation.choose": evaluation.get("choose"),
    }
    for key, asked in asking.items():
        if asked and data.get("validation") == 0:
            advice = f"set {key} = false" if asked is True else f"leave {key} out"
            raise ValueError(f"expected validation rows for {key}, got data.validation = 0; hold some out, or {advice}")


def apply_override(
    settings: Settings,
    override: str,
    *,
    methods: Sequence[str] | None = None,
    sections: Collection[str] = SECTIONS,
    beside: str = "",
) -> Settings:
    """Settings with one "section.key=value" applied.

    method.key=value applies to every method that runs and has the key, and to all variants of the task: `methods`, or those
    of the task; also to the user's methods, imported from `beside`. `sections`: the sections that are read, for errors.
    """
    name, equals, text = override.partition("=")
    running = name_list(settings.get("methods", [])) if methods is None else list(methods)
    path = objects.setting_path(name, [*running, *map(objects.base_name, running), *objects.variants_of(settings)])
    if not equals or not all(path):
        raise ValueError(f"expected key=value for --set, got {override!r}; write for example training.epochs=3")
    value = parse_value(text.strip())
    if path[1:] == ["name"]:
        renamed = merge_settings(settings, {path[0]: {"name": str(value)}})
        if path[0] in ("network", "data"):
            return renamed
    changed = copy.deepcopy(settings)
    # The command line may define a variant, and may name the user's method without a table.
    if path[0] == "method" and len(path) > 2 and ("-" in path[1] or is_import_path(path[1])):
        objects.base_name(path[1])
        changed.setdefault("method", {}).setdefault(path[1], {})
    objects.expand_objects(changed, path[:-1])
    known = schema.known_keys(renamed if path[1:] == ["name"] else changed)
    if path[:-1] == ["method"] and path[1] not in METHODS:
        _set_for_all(changed, path[1], value, running, known, beside)
        return changed
    known[""] = dict.fromkeys((*schema.TOP, "likelihood"))
    if path[-1] not in known.get(".".join(path[:-1]), {}):
        _raise_unknown_key(path, override, known, running, sections)
    reduce(lambda table, part: table.setdefault(part, {}), path[:-1], changed)[path[-1]] = value
    return changed


def _set_for_all(
    settings: Settings, key: str, value: Any, running: Sequence[str], known: dict[str, schema.Fields], beside: str
) -> None:
    """Sets a setting, in place, for every method that runs and has it, and for all variants that have it."""
    variants = objects.variants_of(settings)
    for each in dict.fromkeys(filter(is_import_path, [*running, *variants])):
        for name in (each, objects.base_name(each)):
            known[f"method.{name}"] = schema.method_fields(objects.method_class(name, beside))
    there = {each for method in running for each in known[f"method.{objects.base_name(method)}"]}
    others = [method for method in METHODS if key in known[f"method.{method}"]]
    hint = f"choose a method that has it ({', '.join(others)}), or leave it out" if others else ""
    one_of(f"a setting of the methods that run ({', '.join(running)})", key, there, hint=hint)
    # A setting for all methods does not define a variant.
    for each in [*(each for each in running if objects.base_name(each) == each), *variants]:
        if key in known[f"method.{each}"]:
            settings.setdefault("method", {}).setdefault(each, {})[key] = value


def _raise_unknown_key(
    path: list[str], override: str, known: dict[str, schema.Fields], running: list[str], sections: Collection[str]
) -> None:
    """Raises for a key that no section has: names the nearest, or the forms of an object that is set in part."""
    section = ".".join(path[:-1])
    owners = [f"method.{each}" for each in path[1:-2] or map(objects.base_name, running)]
    of_object = len(path) > 1 and path[-2] in objects.OBJECTS
    if of_object and (section == "likelihood" or any(path[-2] in known.get(each, {}) for each in owners)):
        advice = f"write --set '{section}={{NAME=…}}' with one of {objects.constructor_forms(path[-2])}"
        raise ValueError(f"expected {section} as a whole, got {override!r}; {advice}")

    def is_read(each: str) -> bool:  # a key of the named section, or a key that is read
        first, *rest = each.split(".")
        return each in ("", section) or (rest[0] in running if first == "method" else first in sections)

    every = [f"{s}.{k}" if s else k for s, keys in known.items() if is_read(s) for k in keys]
    what = f"a key of [{section}]" if section in known else "a key"
    top = ["title", "methods"] if sections is SECTIONS else []
    shown = known.get(section) or [*top, *(f"{each}.…" for each in sections if each != "size")]
    one_of(what, ".".join(path), every, shown=shown)


def parse_value(text: str) -> Any:
    """The TOML value of a text, or the text itself if it is not TOML: 3, 0.1, true, [1, 2], "a", a."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def merge_settings(base: Mapping[str, Any], over: Mapping[str, Any]) -> Settings:
    """`base` overridden by `over`, key by key; another network or data set drops the settings of the earlier one."""
    result = copy.deepcopy(dict(base))
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        named = key in ("network", "data") and both and "name" in value and "name" in result[key]
        if named and result[key]["name"] != value["name"]:
            kept = schema.fields_of(schema.Data) if key == "data" else {}
            result[key] = {name: each for name, each in result[key].items() if name in kept}
        both = both and not objects.replaces_object(key, result[key], value)
        result[key] = merge_settings(result[key], value) if both else copy.deepcopy(value)
    return result


def _override_order(override: str) -> int:
    """Order of overrides: methods first, then keys that decide a section's contents, then the others."""
    key = override.partition("=")[0].strip()
    return 0 if key == "methods" else 1 if key in ("network.name", "data.name") else 2


def _task_folder() -> Any:
    return files("dissensus.bench") / "tasks"
