"""What may stand in a task file: the keys of each section, and the types of their values."""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial, reduce
from typing import Any

from dissensus.bench.fitting import Types, annotated
from dissensus.bench.names import listed
from dissensus.bench.own import imported
from dissensus.bench.rows.sources import SETS
from dissensus.bench.task.networks import maker
from dissensus.bench.task.objects import OBJECTS, argument_names, written
from dissensus.bench.task.variants import base_name, counted_by, parameters, setting_path, variants_of
from dissensus.core.posterior import Posterior
from dissensus.methods import METHODS
from dissensus.numerics.checks import number, one_of, share, whole

SEED = "seed"  # as a value in [data]: the seed of the run
# What a value may be: (what it is called, value) -> the value, or an error, as the functions of `numerics.checks`.
ValueRule = Callable[[str, Any], Any]


def of_type(what: str, value: Any, *, types: Types = ()) -> Any:
    """The value, of one of these types, () for any; booleans are not numbers here."""
    if types and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
        names = " or ".join("a table" if each is dict else each.__name__ for each in types)
        raise ValueError(f"expected {names} for {what}, got {value!r} ({type(value).__name__}); correct the value")
    return value


def number_with_error(what: str, value: Any) -> list[float]:
    """A published number, or one and its error."""
    pair = value if isinstance(value, list) else [value]
    if len(pair) not in (1, 2):
        raise ValueError(
            f"expected a number, or one and its error, for {what}, got {value}; write 0.95 or [0.95, 0.01]"
        )
    return [number(what, each) for each in pair]


ANY, TEXT, INTEGER, TRUTH, TEXTS, WHOLES, LIST, TABLE = (
    partial(of_type, types=types) for types in ((), (str,), (int,), (bool,), (list, str), (list, int), (list,), (dict,))
)
COUNT, POSITIVE, NOT_NEGATIVE = partial(whole, least=0), partial(number, above=0), partial(number, least=0)

TOP: dict[str, ValueRule] = {"title": TEXT, "description": TEXT, "methods": TEXTS, "baseline": TEXT}
SECTIONS = (
    *("data", "network", "likelihood", "method", "training", "evaluation", "calibration"),
    *("widths", "grid", "reference", "size"),
)
OWN = ("training", "network")  # sections that a method may change for itself, below [method.NAME]
NETWORK: dict[str, ValueRule] = {
    "name": TEXT,  # of NETS, or package.module:name
    "weights": TEXT,  # a file with the state to start from
}
DATA: dict[str, ValueRule] = {
    "name": TEXT,  # of SETS, or package.module:name
    "validation": NOT_NEGATIVE,  # rows held out of the training set, or their share; 0 holds none. Of a set with validation
    # rows of its own so many of those; all by default
    "train": whole,  # at most so many training rows
    "test": whole,  # at most so many test rows
    "calibration": NOT_NEGATIVE,  # of those, rows held out to fit temperatures, or their share; the others are tested on
    "ood": TEXTS,  # sets of foreign inputs
    "ood_rows": whole,  # at most so many of each
    "shift": TEXTS,  # labelled sets of another distribution
    "seed": INTEGER,  # of what is held out; the same for every run, so that runs are compared on the same rows
    "label_noise": partial(
        number, least=0, most=1
    ),  # of the training set's labels, replaced by wrong ones; test labels stay as they are
    "standardise": TEXT,  # inputs: by the training rows, images to [−1, 1] ("unit") or as "imagenet", or not ("none")
    "targets": TEXT,  # of a regression: "original", or learned "standardised" and measured in their own units
}
TRAINING: dict[str, ValueRule] = {
    "epochs": COUNT,  # 0: the network stays as it is, samples are drawn
    "batch_size": whole,
    "optimizer": TEXT,  # adamw, adam, sgd or default: what the method itself would take
    "lr": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "momentum": NOT_NEGATIVE,  # of sgd
    "nesterov": TRUTH,  # of sgd
    "schedule": TEXT,  # plateau, cosine, polynomial, thirds, late, constant or own: the method's
    "floor": NOT_NEGATIVE,  # where plateau and late end, as a share of lr
    "clip": POSITIVE,
    "patience": whole,
    "keep_best": TRUTH,  # by the validation likelihood
    "augment": lambda what, value: written("augment", value).check(),  # none, crop, flip_crop or segmentation
    "precision": TEXT,
    "engine": TEXT,
    "threads": whole,  # of the processor; small networks run faster on one
    "temperature": TRUTH,  # fit one afterwards, on the calibration rows or else on the validation rows
    "together": TRUTH,  # one training for all methods that hold the same network
    "branch_at": share,  # share of the epochs after which it goes on in two ways
    "tail_rate": NOT_NEGATIVE,  # learning rate of the constant tail (SWA, SWAG, snapshots) …
    "tail_factor": NOT_NEGATIVE,  # … or what it is of lr
}
EVALUATION: dict[str, ValueRule] = {
    "batch_size": whole,
    "corrupt": TEXTS,  # none, all, benchmark, or names
    "severities": WHOLES,
    "corrupt_rows": whole,  # at most so many test rows
    "attack": TEXTS,  # none, or fgsm, pgd, transfer
    "epsilons": LIST,  # radii of attacks, in pixels' range of 1 or in the units of the inputs, ascending
    "attack_norm": ANY,  # "inf" or "2"; inf and 2 are read as those
    "attack_steps": whole,  # of PGD
    "attack_rows": whole,  # at most so many test rows
    "implicit": POSITIVE,  # λ of implicit corruptions; not looked for where it is left out
    "implicit_rows": whole,  # of so many test rows, 10 by default
    "fool_steps": COUNT,  # from noise to every class; 0: not done
    "score": TEXT,  # what OOD inputs are ranked by
    "prevalence": share,  # share of OOD inputs that aupr_adjusted and ece_union are reweighted to
    "distances_every": whole,  # epochs between looks at how members differ; not looked at where it is left out
    "focus": TEXT,  # the method that the report compares region by region with every other
    "against": TEXT,  # the method whose predictive those of all others are compared with
    "sweep": TEXT,  # the setting that variants differ in: accuracy is drawn over it
    "curves_every": whole,  # epochs between looks at training and test accuracy; not looked at where it is left out
    "train_rows": TRUTH,  # whether training rows are measured, too
    "choose": TEXTS,  # corruptions of validation rows by which a value of that setting is chosen
}
CALIBRATION: dict[str, ValueRule] = {
    "rows": POSITIVE,  # test rows held out for it, or their share: short for data.calibration
    "method": TEXT,  # of ds.calibrate
    "level": share,  # of ds.conformal
    "score": TEXT,  # of ds.conformal
    "risk": share,  # of ds.selective
    "confidence": share,  # of ds.selective
}
WIDTHS: dict[str, ValueRule] = {  # of a task over widths: each is a cell with a run of its own
    "of": TEXT,  # the network's setting that is multiplied
    "factors": LIST,
    "members": LIST,  # of ensembles that share weights; independent ones are subsets of one with the most
    "rate": TEXT,  # "fixed", the method's, or "sharing": of those that share weights over (1 + √(M/N))²
    "p": LIST,  # of modulations p + √(1 − p²) N(0, 1), at γ = 1 and γ = M …
    "p_members": whole,  # … of so many members
    "p_factor": POSITIVE,  # … at this width …
    "p_rates": TABLE,  # … and these learning rates by regime, one for each p
}
GRID: dict[str, ValueRule] = {  # of an axis; its other keys are settings, as "data.train", with a value for each cell
    "label": TEXT,  # what figures call it
    "values": LIST,  # of the axis; those of the first setting where it is left out
    "log": TRUTH,  # whether figures draw it on a logarithmic scale
}


class AnyKey(dict[str, ValueRule]):
    """Keys and their rules of a section that others may stand in as well, with any value."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> ValueRule:
        return ANY


def check_task(settings: Mapping[str, Any], where: str) -> None:
    """An error that names the first key of a task that does not belong, or whose value is not what it may be."""
    check_tables(settings, where)
    own = variants_of(settings)
    for section, known in known_keys(settings).items():
        if section.rpartition(".")[2] in OBJECTS:
            continue  # written in one of several forms, checked as such
        table = reduce(lambda table, part: table.get(part, {}), setting_path(section, own), settings)
        for key, value in table.items():
            if section.startswith("method.") and key in OWN:
                continue  # a table of its own, checked as such
            if key not in known:  # a section may take any
                one_of(f"a key of [{section}]", key, known)
            if not (section == "data" and value == SEED):
                known[key](f"{where}: {section}.{key}", value)
    for name, table in settings.get("method", {}).items():
        base_name(name)
        if "-" not in name:  # a variant may say only what is different in an object; `run_config` checks the whole
            for key in table.keys() & OBJECTS.keys():
                written(key, table[key])
    if settings.get("likelihood"):
        written("likelihood", settings["likelihood"]).check()


def check_tables(settings: Mapping[str, Any], where: str) -> None:
    """An error that names the first key of a task that is not known, or is no table and should be."""
    rules: dict[str, ValueRule] = TOP | dict.fromkeys(SECTIONS, TABLE) | {"likelihood": ANY}  # written in several forms
    for key, value in settings.items():
        rules[one_of(f"a key of the task {where}", key, rules)](f"{where}: {key}", value)
    for section in ("method", "size", "grid"):
        for name, value in settings.get(section, {}).items():
            TABLE(f"{where}: {section}.{name}", value)
            for own in OWN:
                TABLE(f"{where}: {section}.{name}.{own}", value.get(own, {}))
    published = dict(settings.get("reference", {}))
    TEXT(f"{where}: reference.source", published.pop("source", ""))
    for name, row in published.items():
        base_name(name)
        for key, value in TABLE(f"{where}: reference.{name}", row).items():
            number_with_error(f"{where}: reference.{name}.{key}", value)
    listed(settings.get("methods", []))


def known_keys(settings: Mapping[str, Any]) -> dict[str, dict[str, ValueRule]]:
    """Section -> key -> what its value may be: all that a task with this data set, network and methods may hold."""
    data, network = (TEXT(f"{each}.name", settings.get(each, {}).get("name", "")) for each in ("data", "network"))
    if not imported(data):
        one_of("data.name (or package.module:name)", data, SETS)
    found: dict[str, dict[str, ValueRule]] = {
        "data": AnyKey(DATA) if imported(data) else typed(SETS[data].make, "folder", "asked") | DATA,
        "network": AnyKey(NETWORK) if imported(network) else NETWORK | typed(maker(network)),
        "likelihood": _named_with(argument_names("likelihood", settings.get("likelihood"))),
        "training": TRAINING,
        "evaluation": EVALUATION,
        "calibration": CALIBRATION,
        "widths": WIDTHS,
    }
    found |= {f"grid.{axis}": AnyKey(GRID) for axis in settings.get("grid", {})}
    for name in [*METHODS, *variants_of(settings)]:
        # What an own one takes is known when it is imported, which settings alone are no reason for.
        found[f"method.{name}"] = AnyKey() if imported(name) else method_keys(METHODS[base_name(name)])
        found[f"method.{name}.training"] = TRAINING
        found[f"method.{name}.network"] = found["network"]
        own = settings.get("method", {}).get(name, {})
        for key in own.keys() & OBJECTS.keys() & found[f"method.{name}"].keys():
            if isinstance(own[key], Mapping) and "name" in own[key]:  # opened, so that one argument can be set
                found[f"method.{name}.{key}"] = _named_with(argument_names(key, own[key]))
    return found


def _named_with(arguments: Collection[str]) -> dict[str, ValueRule]:
    return {"name": TEXT, **dict.fromkeys(arguments, ANY)}


def method_keys(method: type[Posterior]) -> dict[str, ValueRule]:
    """The settings of a method, with what their values may be."""
    several: dict[str, ValueRule] = {key: whole for key in [counted_by(method)] if key is not None}
    given = ("likelihood", "module", "modules", "network", "networks")
    known = annotated(method)
    named = {name: partial(of_type, types=known.get(name, ())) for name in parameters(method) if name not in given}
    return named | several | dict.fromkeys(named.keys() & OBJECTS, ANY)


def typed(function: Callable[..., Any], *without: str) -> dict[str, ValueRule]:
    """The names of a function's parameters, with the types of their values."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    known = annotated(function)
    parameters = inspect.signature(function).parameters.items()
    return {
        name: partial(of_type, types=known.get(name, ()))
        for name, parameter in parameters
        if name not in without and parameter.kind not in kinds
    }
