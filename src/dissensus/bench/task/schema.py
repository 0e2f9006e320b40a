"""The schema of task files: the keys of each section, and the types of their values."""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial, reduce
from typing import Any

from dissensus.bench.names import name_list
from dissensus.bench.rows.named_sets import SETS
from dissensus.bench.task.method_names import base_name, count_setting, parameters, setting_path, variants_of
from dissensus.bench.task.objects import OBJECTS, argument_names, network_maker, parse_object
from dissensus.bench.typecheck import Types, annotated_types
from dissensus.bench.user_code import is_import_path
from dissensus.core.posterior import Posterior
from dissensus.engine.precision import prediction_precision
from dissensus.methods import METHODS
from dissensus.utils.checks import fraction, integer, number, one_of

SEED = "seed"  # as a value in [data] it means the seed of the run
# A rule for values: (name in errors, value) -> the value, or an error; like the functions of `numerics.checks`.
ValueRule = Callable[[str, Any], Any]


def value_of_type(what: str, value: Any, *, types: Types = ()) -> Any:
    """The value; raises unless it has one of these types (() for any). Booleans are not numbers here."""
    if types and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
        names = " or ".join("a table" if each is dict else each.__name__ for each in types)
        raise ValueError(f"expected {names} for {what}, got {value!r} ({type(value).__name__}); correct the value")
    return value


def number_with_error(what: str, value: Any) -> list[float]:
    """A published number, or a list of a number and its error."""
    pair = value if isinstance(value, list) else [value]
    if len(pair) not in (1, 2):
        raise ValueError(f"expected {what} as a number or [value, error], got {value}; write 0.95 or [0.95, 0.01]")
    return [number(what, each) for each in pair]


ANY, TEXT, INTEGER, TRUTH, TEXTS, WHOLES, LIST, TABLE = (
    partial(value_of_type, types=types)
    for types in ((), (str,), (int,), (bool,), (list, str), (list, int), (list,), (dict,))
)
COUNT, POSITIVE, NOT_NEGATIVE = partial(integer, least=0), partial(number, above=0), partial(number, least=0)

TOP: dict[str, ValueRule] = {"title": TEXT, "description": TEXT, "methods": TEXTS, "baseline": TEXT}
SECTIONS = (
    *("data", "network", "likelihood", "method", "training", "evaluation", "calibration"),
    *("widths", "grid", "reference", "size"),
)
OWN = ("training", "network")  # sections that a method may override in [method.NAME]
NETWORK: dict[str, ValueRule] = {
    "name": TEXT,  # of NETS, or package.module:name
    "weights": TEXT,  # a file with the initial state
}
DATA: dict[str, ValueRule] = {
    "name": TEXT,  # of SETS, or package.module:name
    "validation": NOT_NEGATIVE,  # number or share of rows held out of the training set; 0 for none. If the set has validation
    # rows, how many of those to use; by default all
    "train": integer,  # most training rows
    "test": integer,  # most test rows
    "calibration": NOT_NEGATIVE,  # number or share of test rows held out for calibration; the others are tested on
    "ood": TEXTS,  # sets of foreign inputs
    "ood_rows": integer,  # most rows of each
    "shift": TEXTS,  # labelled sets of another distribution
    "seed": INTEGER,  # seed of held-out rows; the same for every run, so that runs are compared on the same rows
    "label_noise": partial(number, least=0, most=1),  # share of training labels that are replaced by wrong ones
    "standardise": TEXT,  # inputs: by the training rows, images to [−1, 1] ("unit") or as "imagenet", or not ("none")
    "targets": TEXT,  # of a regression: "original", or "standardised" for training and original for metrics
}
TRAINING: dict[str, ValueRule] = {
    "epochs": COUNT,  # 0: the network is not trained; samples are drawn around it
    "batch_size": integer,  # rows of a training batch
    "optimizer": TEXT,  # adamw, adam, sgd, or default for the method's
    "lr": NOT_NEGATIVE,  # learning rate of the weights
    "weight_decay": NOT_NEGATIVE,  # on parameters without a prior
    "momentum": NOT_NEGATIVE,  # of sgd
    "nesterov": TRUTH,  # of sgd
    "schedule": TEXT,  # plateau, cosine, polynomial, thirds, late, constant, or own for the method's
    "floor": NOT_NEGATIVE,  # final rate of plateau and late, as a share of lr
    "clip": POSITIVE,  # largest gradient norm of each member
    "patience": integer,  # epochs without a better validation score after which training stops
    "keep_best": TRUTH,  # keep the epoch with the best validation likelihood
    "augment": lambda what, value: parse_object("augment", value).check(),  # none, crop, flip_crop or segmentation
    "precision": TEXT,  # auto, float32 or bf16
    "engine": TEXT,  # how members run, as in ds.fit
    "threads": integer,  # processor threads; small networks run faster with one
    "temperature": TRUTH,  # fit a temperature after training, on the calibration rows or else the validation rows
    "together": TRUTH,  # one shared training for all methods that watch the same network
    "branch_at": fraction,  # share of the epochs after which the shared training branches into two tails
    "tail_rate": NOT_NEGATIVE,  # learning rate of the constant tail (SWA, SWAG, snapshots) …
    "tail_factor": NOT_NEGATIVE,  # … or its share of lr
}
EVALUATION: dict[str, ValueRule] = {
    "batch_size": integer,  # rows of an evaluation batch
    "precision": prediction_precision,  # of predictions: float32, or bf16 for mixed precision
    "corrupt": TEXTS,  # none, all, benchmark, or names
    "severities": WHOLES,  # of corruptions, 1 to 5
    "corrupt_rows": integer,  # most test rows to corrupt
    "attack": TEXTS,  # none, or fgsm, pgd, transfer
    "epsilons": LIST,  # radii of attacks, in pixels' range of 1 or in the units of the inputs, ascending
    "attack_norm": ANY,  # "inf" or "2"; inf and 2 are read as those
    "attack_steps": integer,  # of PGD
    "attack_rows": integer,  # most test rows to attack
    "implicit": POSITIVE,  # λ of implicit corruptions; not computed if left out
    "implicit_rows": integer,  # test rows for implicit corruptions, 10 by default
    "fool_steps": COUNT,  # steps from noise towards every class; 0: not done
    "score": TEXT,  # the score that ranks OOD inputs
    "prevalence": fraction,  # share of OOD inputs to which aupr_adjusted and ece_union are reweighted
    "distances_every": integer,  # epochs between measurements of members' distances; not measured if left out
    "focus": TEXT,  # the method that the report compares with every other, region by region
    "against": TEXT,  # the reference method, with whose predictive all others are compared
    "sweep": TEXT,  # the setting in which variants differ: accuracy is drawn over it
    "curves_every": integer,  # epochs between measurements of training and test accuracy; not measured if left out
    "train_rows": TRUTH,  # whether to measure training rows too
    "choose": TEXTS,  # corruptions of validation rows that choose a value of the swept setting
}
CALIBRATION: dict[str, ValueRule] = {
    "rows": POSITIVE,  # number or share of test rows held out for it: short for data.calibration
    "method": TEXT,  # of ds.calibrate: temperature, vector, …; if left out, only the best temperature is reported
    "level": fraction,  # coverage of sets or intervals (ds.conformal); none if left out
    "score": TEXT,  # the score of ds.conformal
    "risk": fraction,  # largest risk of accepted inputs (ds.selective); no gate if left out
    "confidence": fraction,  # the confidence of ds.selective
}
WIDTHS: dict[str, ValueRule] = {  # of a task over widths: one cell and run for each
    "of": TEXT,  # the network's setting to multiply
    "factors": LIST,  # by which it is multiplied
    "members": LIST,  # numbers of members that share weights; smaller independent ensembles are subsets of the largest
    "rate": TEXT,  # "fixed": the method's rate; "sharing": divided by (1 + √(M/N))² if members share weights
    "p": LIST,  # of modulations p + √(1 − p²) N(0, 1), at γ = 1 and γ = M …
    "p_members": integer,  # … with this many members
    "p_factor": POSITIVE,  # … at this width …
    "p_rates": TABLE,  # … and these learning rates by regime, one for each p
}
GRID: dict[str, ValueRule] = {  # of an axis; its other keys are settings, as "data.train", with a value for each cell
    "label": TEXT,  # its name in figures
    "values": LIST,  # numbers of the axis; by default those of the first setting
    "log": TRUTH,  # whether its scale in figures is logarithmic
}


class AnyKey(dict[str, ValueRule]):
    """Rules of a section that also allows other keys, with any value."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> ValueRule:
        return ANY


def check_task(settings: Mapping[str, Any], where: str) -> None:
    """Raises for the first key of a task that is unknown or has a wrong value."""
    check_tables(settings, where)
    own = variants_of(settings)
    for section, known in known_keys(settings).items():
        if section.rpartition(".")[2] in OBJECTS:
            continue  # an object, which has several forms and its own check
        table = reduce(lambda table, part: table.get(part, {}), setting_path(section, own), settings)
        for key, value in table.items():
            if section.startswith("method.") and key in OWN:
                continue  # a table with its own check
            if key not in known:  # some sections allow any key
                one_of(f"a key of [{section}]", key, known)
            if not (section == "data" and value == SEED):
                known[key](f"{where}: {section}.{key}", value)
    for name, table in settings.get("method", {}).items():
        base_name(name)
        if "-" not in name:  # a variant may override parts of an object; `run_config` checks the whole
            for key in table.keys() & OBJECTS.keys():
                parse_object(key, table[key])
    if settings.get("likelihood"):
        parse_object("likelihood", settings["likelihood"]).check()


def check_tables(settings: Mapping[str, Any], where: str) -> None:
    """Raises for the first key of a task that is unknown, or that should be a table."""
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
    name_list(settings.get("methods", []))


def known_keys(settings: Mapping[str, Any]) -> dict[str, dict[str, ValueRule]]:
    """Section -> key -> rule: the allowed keys of a task with this data set, network and methods."""
    data, network = (TEXT(f"{each}.name", settings.get(each, {}).get("name", "")) for each in ("data", "network"))
    if not is_import_path(data):
        one_of("data.name (or package.module:name)", data, SETS)
    found: dict[str, dict[str, ValueRule]] = {
        "data": AnyKey(DATA) if is_import_path(data) else parameter_rules(SETS[data].make, "folder", "asked") | DATA,
        "network": AnyKey(NETWORK) if is_import_path(network) else NETWORK | parameter_rules(network_maker(network)),
        "likelihood": _object_rules(argument_names("likelihood", settings.get("likelihood"))),
        "training": TRAINING,
        "evaluation": EVALUATION,
        "calibration": CALIBRATION,
        "widths": WIDTHS,
    }
    found |= {f"grid.{axis}": AnyKey(GRID) for axis in settings.get("grid", {})}
    for name in [*METHODS, *variants_of(settings)]:
        # The keys of the user's code are known only after importing it, which reading settings should not do.
        found[f"method.{name}"] = AnyKey() if is_import_path(name) else method_keys(METHODS[base_name(name)])
        found[f"method.{name}.training"] = TRAINING
        found[f"method.{name}.network"] = found["network"]
        own = settings.get("method", {}).get(name, {})
        for key in own.keys() & OBJECTS.keys() & found[f"method.{name}"].keys():
            if isinstance(own[key], Mapping) and "name" in own[key]:  # opened, so that one argument can be set
                found[f"method.{name}.{key}"] = _object_rules(argument_names(key, own[key]))
    return found


def _object_rules(arguments: Collection[str]) -> dict[str, ValueRule]:
    return {"name": TEXT, **dict.fromkeys(arguments, ANY)}


def method_keys(method: type[Posterior]) -> dict[str, ValueRule]:
    """The settings of a method with their rules."""
    several: dict[str, ValueRule] = {key: integer for key in [count_setting(method)] if key is not None}
    known = annotated_types(method)
    given = ("likelihood", "network", "networks")  # the first one is the method's own, the others those of base classes
    asked = [name for name in list(parameters(method))[1:] if name not in given]
    named = {name: partial(value_of_type, types=known.get(name, ())) for name in asked}
    return named | several | dict.fromkeys(named.keys() & OBJECTS, ANY)


def parameter_rules(function: Callable[..., Any], *without: str) -> dict[str, ValueRule]:
    """The names of a function's parameters, with the types of their values."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    known = annotated_types(function)
    parameters = inspect.signature(function).parameters.items()
    return {
        name: partial(value_of_type, types=known.get(name, ()))
        for name, parameter in parameters
        if name not in without and parameter.kind not in kinds
    }
