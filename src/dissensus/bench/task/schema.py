"""The schema of task files: the keys of each section, and the types of their values."""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial, reduce
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic reads the one of `typing` only from Python 3.12 on

from dissensus.bench.rows.named_sets import SETS
from dissensus.bench.setting_checks import annotated_types, name_list
from dissensus.bench.task import objects
from dissensus.bench.user_code import is_import_path
from dissensus.core.posterior import Posterior
from dissensus.engine.prediction_loop import prediction_precision
from dissensus.methods import METHODS
from dissensus.utils.checks import one_of

SEED = "seed"  # as a value in [data] it means the seed of the run
Fields = dict[str, Any]  # key of a section -> the annotation of its value, as pydantic reads it
Whole = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(gt=0, lt=1)]
Published = dict[str, dict[str, Number | Annotated[list[Number], Field(min_length=1, max_length=2)]]]
Names = list[Any] | str
Augmentation = Annotated[Any, AfterValidator(lambda value: objects.parse_object("augment", value).check())]
Precision = Annotated[str, AfterValidator(partial(prediction_precision, "evaluation.precision"))]


def check_published(table: dict[str, Any]) -> None:
    """Raises unless [reference] has a text as source, and methods with published numbers: a number, or [value, error]."""
    rows = {name: row for name, row in table.items() if name != "source"}
    check_value("reference.source", table.get("source", ""), str)
    check_value("reference", rows, Published)
    for name in rows:
        objects.base_name(name)


class OwnTables(TypedDict, total=False):  # what a method or a size may override; it has other keys, too
    training: dict[str, Any]
    network: dict[str, Any]


class TaskFile(TypedDict, total=False):
    title: str
    description: str
    methods: Annotated[Names, AfterValidator(name_list)]
    baseline: str
    data: dict[str, Any]
    network: dict[str, Any]
    likelihood: Any  # written in several forms
    method: dict[str, OwnTables]
    training: dict[str, Any]
    evaluation: dict[str, Any]
    calibration: dict[str, Any]
    widths: dict[str, Any]
    grid: dict[str, OwnTables]
    reference: Annotated[dict[str, Any], AfterValidator(check_published)]
    size: dict[str, OwnTables]


OWN = ("training", "network")  # sections that a method may override in [method.NAME]


class Network(TypedDict, total=False):
    name: str  # of NETS, or package.module:name
    weights: str  # a file with the initial state


class Data(TypedDict, total=False):
    name: str  # of SETS, or package.module:name
    validation: NotNegative  # number or share of rows held out of the training set; 0 for none. If the set has
    # validation rows, how many of those to use; by default all
    train: Whole  # most training rows
    test: Whole  # most test rows
    calibration: NotNegative  # number or share of test rows held out for calibration; the others are tested on
    ood: Names  # sets of foreign inputs
    ood_rows: Whole  # most rows of each
    shift: Names  # labelled sets of another distribution
    seed: int  # seed of held-out rows; the same for every run, so that runs are compared on the same rows
    label_noise: Annotated[Number, Field(ge=0, le=1)]  # share of training labels that are replaced by wrong ones
    standardise: str  # inputs: by the training rows, images to [−1, 1] ("unit") or as "imagenet", or not ("none")
    targets: str  # of a regression: "original", or "standardised" for training and original for metrics


class Training(TypedDict, total=False):
    epochs: Count  # 0: the network is not trained; samples are drawn around it
    batch_size: Whole  # rows of a training batch
    optimizer: str  # adamw, adam, sgd, or default for the method's
    lr: NotNegative  # learning rate of the weights
    weight_decay: NotNegative  # on parameters without a prior
    momentum: NotNegative  # of sgd
    nesterov: bool  # of sgd
    schedule: str  # plateau, cosine, polynomial, thirds, late, constant, or own for the method's
    floor: NotNegative  # final rate of plateau and late, as a share of lr
    clip: Positive  # largest gradient norm of each member
    patience: Whole  # epochs without a better validation score after which training stops
    keep_best: bool  # keep the epoch with the best validation likelihood
    augment: Augmentation  # none, crop, flip_crop or segmentation
    precision: str  # auto, float32 or bf16
    engine: str  # how members run, as in ds.fit
    threads: Whole  # processor threads; small networks run faster with one
    temperature: bool  # fit a temperature after training, on the calibration rows or else the validation rows
    together: bool  # one shared training for all methods that watch the same network
    branch_at: Fraction  # share of the epochs after which the shared training branches into two tails
    tail_rate: NotNegative  # learning rate of the constant tail (SWA, SWAG, snapshots) …
    tail_factor: NotNegative  # … or its share of lr


class Evaluation(TypedDict, total=False):
    batch_size: Whole  # rows of an evaluation batch
    precision: Precision  # of predictions: float32, or bf16 for mixed precision
    corrupt: Names  # none, all, benchmark, or names
    severities: list[Any] | int  # of corruptions, 1 to 5
    corrupt_rows: Whole  # most test rows to corrupt
    corrupt_files: str  # folder of published corrupted images, such as CIFAR-10-C, that take the place of ours
    attack: Names  # none, or fgsm, pgd, transfer
    epsilons: list[Any]  # radii of attacks, in pixels' range of 1 or in the units of the inputs, ascending
    attack_norm: Any  # "inf" or "2"; inf and 2 are read as those
    attack_steps: Whole  # of PGD
    attack_rows: Whole  # most test rows to attack
    implicit: Positive  # λ of implicit corruptions; not computed if left out
    implicit_rows: Whole  # test rows for implicit corruptions, 10 by default
    fool_steps: Count  # steps from noise towards every class; 0: not done
    score: str  # the score that ranks OOD inputs
    prevalence: Fraction  # share of OOD inputs to which aupr_adjusted and ece_union are reweighted
    distances_every: Whole  # epochs between measurements of members' distances; not measured if left out
    focus: str  # the method that the report compares with every other, region by region
    against: str  # the reference method, with whose predictive all others are compared
    sweep: str  # the setting in which variants differ: accuracy is drawn over it
    curves_every: Whole  # epochs between measurements of training and test accuracy; not measured if left out
    train_rows: bool  # whether to measure training rows too
    choose: Names  # corruptions of validation rows that choose a value of the swept setting


class Calibration(TypedDict, total=False):
    rows: Positive  # number or share of test rows held out for it: short for data.calibration
    method: str  # of ds.calibrate: temperature, vector, …; if left out, only the best temperature is reported
    level: Fraction  # coverage of sets or intervals (ds.conformal); none if left out
    score: str  # the score of ds.conformal
    risk: Fraction  # largest risk of accepted inputs (ds.selective); no gate if left out
    confidence: Fraction  # the confidence of ds.selective


class Widths(TypedDict, total=False):  # of a task over widths: one cell and run for each
    of: str  # the network's setting to multiply
    factors: list[Any]  # by which it is multiplied
    members: list[Any]  # numbers of members that share weights; independent ensembles are subsets of the largest
    rate: Literal["fixed", "sharing"]  # "fixed": the method's rate; "sharing": divided by (1 + √(M/N))² if members
    # share weights
    p: list[Any]  # of modulations p + √(1 − p²) N(0, 1), at γ = 1 and γ = M …
    p_members: Whole  # … with this many members
    p_factor: Positive  # … at this width …
    p_rates: dict[str, Any]  # … and these learning rates by regime, one for each p


class GridAxis(TypedDict, total=False):  # other keys are settings, as "data.train", with a value for each cell
    label: str  # its name in figures
    values: list[Any]  # numbers of the axis; by default those of the first setting
    log: bool  # whether its scale in figures is logarithmic


class AnyKey(Fields):
    """Fields of a section that also allows other keys, with any value."""

    def __contains__(self, key: object) -> bool:
        return True


@cache
def fields_of(model: Any) -> Fields:
    """The keys of a declared section with their annotations."""
    return get_type_hints(model, include_extras=True)


TOP = ("title", "description", "methods", "baseline")
SECTIONS = tuple(key for key in fields_of(TaskFile) if key not in TOP)
WANTED = {  # pydantic's name of an error -> what was expected
    "int_type": "a whole number", "float_type": "a number", "finite_number": "a finite number", "string_type": "a text",
    "bool_type": "true or false", "list_type": "a list", "dict_type": "a table", "literal_error": "{expected}",
    "greater_than_equal": "a number of at least {ge:g}", "greater_than": "a number above {gt:g}",
    "less_than_equal": "a number of at most {le:g}", "less_than": "a number below {lt:g}",
    "too_long": "a list of at most {max_length}", "too_short": "a list of at least {min_length}",
}  # fmt: skip


type_adapter = cache(TypeAdapter)  # making one takes longer than reading a task


def check_value(what: str, value: Any, annotation: Any) -> Any:
    """The value; raises "expected …, got …; do …" for the first part of it that does not fit the annotation."""
    try:
        type_adapter(annotation).validate_python(value, strict=True)
    except ValidationError as error:
        raise ValueError(_error_line(what, value, error)) from error
    return value


def _error_line(what: str, value: Any, error: ValidationError) -> str:
    """One line about the first place with an error: all that was expected there, what was found, what to do."""
    errors = error.errors(include_url=False)
    if errors[0]["type"] == "value_error":  # of a function that checks a value and says all of this itself
        return str(errors[0]["ctx"]["error"])
    at = []
    for part in errors[0]["loc"]:  # behind the keys come the kinds of a union
        if not (part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)):
            break
        value = value[part]
        at.append(part)
    here = [each for each in errors if list(each["loc"][: len(at)]) == at]
    wanted = " or ".join(dict.fromkeys(WANTED[each["type"]].format(**each.get("ctx", {})) for each in here))
    place = "".join([what, *(f".{part}" for part in at)])
    return f"expected {wanted} for {place}, got {value!r}; correct the value"


def check_section(section: str, table: Mapping[str, Any], fields: Fields, where: str) -> None:
    """Raises for the first key of a section that is unknown or has a wrong value."""
    for key in table:
        if key not in fields:  # some sections allow any key
            one_of(f"a key of [{section}]" if section else f"a key of the task {where}", key, fields)
    for key, value in table.items():
        check_value(f"{where}: {section}.{key}".replace(": .", ": "), value, fields.get(key, Any))


def check_task(settings: Mapping[str, Any], where: str) -> None:
    """Raises for the first key of a task that is unknown or has a wrong value."""
    check_section("", settings, fields_of(TaskFile), where)
    own = objects.variants_of(settings)
    for section, fields in known_keys(settings).items():
        table = reduce(lambda table, part: table.get(part, {}), objects.setting_path(section, own), settings)
        if table and section.rpartition(".")[2] not in objects.OBJECTS:  # an object has several forms and its own check
            apart = OWN if section.startswith("method.") else ()  # tables with their own check
            seeds = [key for key, value in table.items() if section == "data" and value == SEED]
            check_section(section, {k: v for k, v in table.items() if k not in (*apart, *seeds)}, fields, where)
    for name, table in settings.get("method", {}).items():
        if objects.base_name(name) == name:  # a variant may override parts of an object; `run_config` checks the whole
            for key in table.keys() & objects.OBJECTS.keys():
                objects.parse_object(key, table[key])
    if settings.get("likelihood"):
        objects.parse_object("likelihood", settings["likelihood"]).check()


def known_keys(settings: Mapping[str, Any]) -> dict[str, Fields]:
    """Section -> its fields: the allowed keys of a task with this data set, network and methods."""
    names = {each: settings.get(each, {}).get("name", "") for each in ("data", "network")}
    data, network = (check_value(f"{each}.name", name, str) for each, name in names.items())
    if not is_import_path(data):
        one_of("data.name (or package.module:name)", data, SETS)
    of_data, of_network = fields_of(Data), fields_of(Network)
    rows = AnyKey(of_data) if is_import_path(data) else parameter_fields(SETS[data].make, "folder", "asked") | of_data
    layers: Fields = AnyKey(of_network)
    if not is_import_path(network):
        layers = of_network | parameter_fields(objects.network_maker(network))
    noise = _object_fields(objects.argument_names("likelihood", settings.get("likelihood")))
    found: dict[str, Fields] = {"data": rows, "network": layers, "likelihood": noise}
    found |= {model.__name__.lower(): fields_of(model) for model in (Training, Evaluation, Calibration, Widths)}
    found |= {f"grid.{axis}": AnyKey(fields_of(GridAxis)) for axis in settings.get("grid", {})}
    for name in [*METHODS, *objects.variants_of(settings)]:
        # The keys of the user's code are known only after importing it, which reading settings should not do.
        found[f"method.{name}"] = AnyKey() if is_import_path(name) else method_fields(METHODS[objects.base_name(name)])
        found[f"method.{name}.training"] = found["training"]
        found[f"method.{name}.network"] = found["network"]
        own = settings.get("method", {}).get(name, {})
        for key in own.keys() & objects.OBJECTS.keys() & found[f"method.{name}"].keys():
            if isinstance(own[key], Mapping) and "name" in own[key]:  # opened, so that one argument can be set
                found[f"method.{name}.{key}"] = _object_fields(objects.argument_names(key, own[key]))
    return found


def _object_fields(arguments: Collection[str]) -> Fields:
    return {"name": str, **dict.fromkeys(arguments, Any)}


@cache
def method_fields(method: type[Posterior]) -> Fields:
    """The settings of a method with their annotations."""
    given = ("likelihood", "network", "networks")  # the first one is the method's own, the others those of base classes
    known = annotated_types(method)
    named = {name: known.get(name, Any) for name in list(objects.parameters(method))[1:] if name not in given}
    several = {key: Whole for key in [objects.count_setting(method)] if key is not None}
    return named | several | dict.fromkeys(named.keys() & objects.OBJECTS, Any)


def parameter_fields(function: Callable[..., Any], *without: str) -> Fields:
    """The names of a function's parameters, with the annotations of their values."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    known = annotated_types(function)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: known.get(p.name, Any) for p in parameters if p.name not in without and p.kind not in kinds}
