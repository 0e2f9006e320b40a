"""Prediction, evaluation and promises on 1, 2 and 4 ranks: the same numbers, to the last bit where each runs whole batches."""

import copy
import functools
import math
from itertools import zip_longest

import pytest
import torch
from torch import distributed, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from workers import said, workers

import dissensus as ds
import test_contract
import tiny
from dissensus.core.drawn_functions import MemberFunctions
from dissensus.core.member_runner import Runner
from dissensus.data import Batches
from dissensus.engine.prediction_loop import FixedDraw
from dissensus.evaluation.robustness_curves import Corruptions
from thinning import often

N, BATCH = 90, 16  # 6 batches, the last one of 10: no multiple of 4
shape = [1, None]  # of the mesh: members, data


def rows(n=N, *, seed=1):
    """Images in [0, 1], and labels that have something to do with them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, 32, 32, generator=generator, dtype=torch.float64)
    return x, (x.flatten(1)[:, :3] + torch.rand(n, 3, generator=generator)).argmax(1)


def loader(n=N, *, seed=1, batch_size=BATCH):
    return Batches(*rows(n, seed=seed), batch_size=batch_size)


def on_the_mesh(posterior):
    """The posterior in eval mode; where there are several processes, on the mesh of all of them."""
    if distributed.is_initialized():
        posterior.mesh = ds.distributed.mesh(*shape)
    return posterior.double().eval()


def network(outputs=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(1024, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, outputs))


def ensemble(outputs=3, **about):
    torch.manual_seed(3)
    return on_the_mesh(ds.DeepEnsemble([network(outputs) for _ in range(3)], **about))


def numbers(evaluation):
    """Metrics and arrays, without times."""
    found = {**evaluation.metrics, **evaluation.arrays}
    return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in found.items() if name[:5] != "cost/"}


def evaluated_classes():
    posterior = ensemble()
    promises = ds.conformal(posterior, loader(200, seed=5), score="aps", randomised=True, by=by_brightness)
    ds.selective(posterior, loader(200, seed=6), risk=0.9)
    evaluation = ds.evaluate(
        posterior, loader(), ood={"other": loader(50, seed=2)}, shift={"moved": loader(60, seed=3)},
        corrupt=Corruptions(["brightness", "contrast"], [2, 4]),
        attack=ds.AttackCurves([0.1], ["fgsm", "transfer"], steps=2, fool_steps=1), progress=False,
    )  # fmt: skip
    return numbers(evaluation) | {"thresholds": promises.thresholds(torch.ones(1), torch.tensor([1]))}


def by_brightness(x):
    return (x.flatten(1)[:, 0] > 0.5).long()


def evaluated_regression():
    posterior = ensemble(1, likelihood=ds.Regression(0.7))
    x, y = rows()
    far = Batches(x * 3, y[:, None].double(), batch_size=BATCH)
    data = Batches(x, y[:, None].double(), batch_size=BATCH)
    ds.calibrate(posterior, data, "scale")
    ds.conformal(posterior, data)
    return numbers(ds.evaluate(posterior, data, ood={"far": far}, shift={"far": far}, progress=False))


def evaluated_pixels():
    torch.manual_seed(4)
    networks = [nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)) for _ in range(2)]
    posterior = on_the_mesh(ds.DeepEnsemble(networks, likelihood=ds.Classification(ignore_index=255)))
    x = torch.rand(9, 1, 8, 8, dtype=torch.float64)
    y = (3 * x[:, 0]).long().clamp(max=2)
    mask, y[:, 0] = (x[:, 0] > 0.8).long(), 255
    data, foreign = (Batches(x, each, batch_size=2) for each in (y, mask))
    image = ds.predict_image(posterior, x[0], tile=6, overlap=4)
    evaluation = ds.evaluate(posterior, data, ood={"odd": foreign}, shift={"same": data}, progress=False)
    return numbers(evaluation) | image._asdict()


def predicted():
    posterior = ensemble()
    before = ds.temperature_scale(posterior, loader(seed=4))
    vector = ds.calibrate(posterior, loader(seed=4), "vector")
    predictive = ds.predict(posterior, loader())
    y = predictive.targets
    summary = ds.summarise(posterior, loader())
    again = summary.targets
    parts, targets = zip(*ds.predict_batches(posterior, loader()), strict=True)
    sampled = on_the_mesh(ds.MCDropout(network(), samples=4))
    return {
        "temperature": torch.tensor([before, *vector[2:]]),
        "members": predictive.member_means,
        "targets": torch.stack([y, again, torch.cat(targets)]),
        "summary": torch.cat([summary.mean, summary.epistemic[:, None]], 1),
        "batches": torch.cat([part.member_means for part in parts], 1),
        "dropped": ds.predict(sampled, loader()).member_means,
        "regression": ds.calibrate(ensemble(), loader(), "isotonic").nll * torch.ones(1),
    }


@functools.cache
def alone(function):
    return function()


def on(sizes, function):
    shape[:] = sizes
    try:
        return function()
    finally:
        shape[:] = [1, None]


FUNCTIONS = [evaluated_classes, evaluated_regression, evaluated_pixels, predicted]
FAST = [(function, sizes) for function, sizes in zip(FUNCTIONS, 2 * [(1, 2), (2, 1)], strict=True)]
MORE = [(function, sizes) for function in FUNCTIONS for sizes in ((1, 2), (2, 1), (1, 4), (4, 1), (2, 2))]


@pytest.mark.parametrize(
    "case", often(FAST, [case for case in MORE if case not in FAST]), ids=lambda case: case[0].__name__
)
def test_ranks_find_what_one_process_finds(case):
    """On every rank. Bit for bit where each batch is predicted whole; a function that runs without others rounds otherwise."""
    function, sizes = case
    expected = alone(function)
    for found in workers().run(math.prod(sizes), on, sizes, function):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            close = 1e-12 if sizes[0] > 1 and value.dtype.is_floating_point else 0
            torch.testing.assert_close(found[name], value, rtol=close, atol=close, equal_nan=True, msg=name)


def parted(n, batch_size, drop_last=False, seed=1):
    data = TensorDataset(*rows(n, seed=seed))
    sampler = DistributedSampler(data, shuffle=False, drop_last=drop_last) if distributed.is_initialized() else None
    size = batch_size // (distributed.get_world_size() if distributed.is_initialized() else 1)
    return DataLoader(data, batch_size=size, sampler=sampler)


def of_parts():
    found = {}
    # one that four does not divide, one with fewer rows than ranks: a single batch, whose functions are divided
    for n in (N, 3):
        predictive = ds.predict(ensemble(), parted(n, 16))
        y = predictive.targets
        other = {"other": parted(40, 8, seed=2)}
        evaluation = numbers(ds.evaluate(ensemble(), parted(n, 16), ood=other, progress=False))
        found |= {f"{n}/{name}": value for name, value in evaluation.items()}
        found |= {f"{n}/members": predictive.member_means, f"{n}/y": y}
    posterior = ensemble()
    ds.conformal(posterior, parted(N, 16), score="aps", randomised=True)
    torch.manual_seed(6)
    normed = nn.Sequential(nn.Flatten(), nn.Linear(1024, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    drawn = on_the_mesh(ds.GaussianPerturbation(normed, samples=2))
    ds.refresh(drawn, parted(N, 16))
    refreshed = {name: tensor for name, tensor in drawn.state_dict().items() if "running" in name}
    laplace = on_the_mesh(ds.Laplace(copy.deepcopy(normed))).fit_posthoc(parted(N, 16))
    return found | {"scores": posterior.promises["conformal"].scores} | refreshed | laplace.variance


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_of_a_sampler_are_put_together_in_the_order_of_the_set(size):
    """Repeated rows that fill the sampler's last round are counted once."""
    expected = alone(of_parts)
    for found in workers().run(size, of_parts):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            close = 1e-12 if name[:2] == "3/" and value.dtype.is_floating_point else 0
            torch.testing.assert_close(found[name], value, rtol=close, atol=close, equal_nan=True, msg=name)


def of_uneven_parts():
    """Rank r reads rows of its own: 40, none, 33 and 17 of them."""
    sizes = [40, 0, 33, 17]
    rank, size = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    x, y = rows()
    pairs = zip(x.split(sizes), y.split(sizes), strict=True)
    parts = [Batches(*pair, batch_size=BATCH) for pair in pairs if len(pair[0])]
    parts.insert(1, [])
    mine = parts[rank] if size > 1 else [batch for turn in zip_longest(*parts) for batch in turn if batch is not None]
    posterior = ensemble()
    posterior.mesh = ds.distributed.mesh(data=size, batches="parts") if size > 1 else None
    ds.calibrate(posterior, mine, "vector")
    scores = ds.conformal(posterior, mine, score="aps").scores
    twice = said(ds.predict, posterior, (x, y)) if size > 1 else ""
    return numbers(ds.evaluate(posterior, mine, progress=False)) | {"scores": scores, "twice": twice}


def test_parts_that_ranks_read_themselves_may_be_uneven_or_empty():
    expected = alone(of_uneven_parts)
    for found in workers().run(4, of_uneven_parts):
        assert found.pop("twice").startswith("ValueError: expected different rows on every rank")
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, equal_nan=True, msg=name)
        assert torch.equal(found["test/correct"], expected["test/correct"])


class Failing:
    """A loader that a rank's disk fails in."""

    def __iter__(self):
        for number, batch in enumerate(loader()):
            if number == 3 and distributed.get_rank() == 1:
                raise OSError("disk gone")
            yield batch


class Chunks(DistributedSampler):
    """Rank r has the r-th part of the rows, not every W-th."""

    def __iter__(self):
        return iter([self.num_samples * self.rank + i for i in range(self.num_samples)])


def bad_days():
    rank = distributed.get_rank()
    posterior, other = ensemble(), ensemble()
    with torch.no_grad():
        next(other.parameters())[0] += 1e-7 * rank
    shuffled = DataLoader(TensorDataset(*rows()), batch_size=BATCH, shuffle=True)
    nan = loader()
    nan.x[70] = torch.nan
    diverged = ensemble()
    with torch.no_grad():
        diverged.particles.own_parameters()["network.4.bias"][1] = torch.nan
    sampler = DistributedSampler(TensorDataset(*rows()), num_replicas=3, rank=rank)
    unlike = DistributedSampler(TensorDataset(*rows(N - rank)), shuffle=False)
    chunks = DistributedSampler(TensorDataset(*rows()), shuffle=False)
    chunks.__class__ = Chunks
    chunked = DataLoader(chunks.dataset, sampler=chunks, batch_size=8)
    not_on_it = ensemble()
    not_on_it.mesh = None
    drawn = on_the_mesh(ds.MCDropout(network(), samples=2))
    tempered = ensemble()
    tempered.temperature += rank
    torch.manual_seed(rank)
    return {
        "other calls": said(ds.summarise if rank else ds.predict, posterior, loader()),
        "temperature": said(ds.predict, tempered, loader()),
        "other rows": said(ds.predict, posterior, loader(seed=rank)),
        "fewer rows": said(ds.evaluate, posterior, loader(N - 40 * rank), progress=False),
        "none on one": said(ds.predict, posterior, loader() if rank else []),
        "none at all": said(ds.predict, posterior, []),
        "shuffled": said(ds.conformal, posterior, shuffled),
        "other functions": said(ds.evaluate, other, loader(), progress=False),
        "other draws": said(ds.predict, drawn, loader()),
        "disk": said(ds.predict, posterior, Failing()),
        "nan": said(ds.evaluate, posterior, nan, progress=False),
        "diverged": said(ds.predict, diverged, loader()),
        "sampler": said(ds.predict, posterior, DataLoader(sampler.dataset, sampler=sampler)),
        "sets": said(ds.predict, posterior, DataLoader(unlike.dataset, sampler=unlike, batch_size=8)),
        "chunks": said(ds.predict, posterior, chunked),
        "chunks in training": said(ds.fit, ensemble(), chunked, epochs=1, mesh=ds.distributed.mesh(1, 2)),
        "no mesh": said(ds.predict, not_on_it, parted(N, 16)),
        "afterwards": said(ds.predict, posterior, loader()),
    }


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_what_differs_between_ranks_is_an_error_on_all_of_them(sizes):
    expected = {
        "other calls": "ValueError: expected the same calls on all ranks",
        "temperature": "ValueError: expected the same calibrations and promises on all ranks",
        "other rows": "ValueError: expected the same batches on all ranks, got unequal ones on ranks 1 and 0; pass",
        "fewer rows": "ValueError: expected the same batches on all ranks",
        "none on one": "ValueError: expected the same batches on all ranks",
        "none at all": "ValueError: expected at least one batch from the loader, got none",
        "shuffled": "ValueError: expected the same batches on all ranks",
        "other functions": "ValueError: expected the same functions on all ranks, got unequal ones on ranks 1 and 0; load",
        "other draws": "ValueError: expected the same functions on all ranks",
        "disk": "OSError: disk gone",
        "nan": "ValueError: expected finite inputs, got NaN",
        "diverged": "Diverged: expected finite predictions, got a prediction that is not finite in member 1",
        "sampler": "ValueError: expected samplers of ranks 0 to 1, got [0, 1] of 3",
        "sets": "ValueError: expected the same sampler and set on all ranks",
        "chunks": "ValueError: expected samplers that deal out rows in turns",
        "chunks in training": "ValueError: expected samplers that deal out rows in turns",
        "no mesh": "ValueError: expected a posterior with a mesh, since the loader gives each process a part of the da",
        "afterwards": "no error",
    }
    for found in workers().run(2, on, sizes, bad_days):
        assert {name: text[: len(expected[name])] for name, text in found.items()} == expected


class Noisy(nn.Linear):
    """Draws in eval mode too: functions that run apart would draw other numbers."""

    def forward(self, x):
        return super().forward(x) + torch.randn(len(x), self.out_features, dtype=x.dtype)


class OtherFunctions(MemberFunctions):
    """Functions that a method of one's own has changed, and does not say how to cut."""

    def map_members(self, function, *args):
        return pytree.tree_map(lambda found: found.roll(1, 0), super().map_members(function, *args))


class Other(ds.StackedPosterior):
    name = "other"

    def draw(self):
        return OtherFunctions(self.particles)


class Scaled(nn.Linear):
    """Members that differ in more than tensors: each runs in a template of its own."""

    def __init__(self, factor):
        super().__init__(4, 3)
        self.factor = factor

    def forward(self, x):
        return super().forward(x) * self.factor


SHARED = {
    "whole": lambda net: ds.DeepEnsemble([net() for _ in range(5)]),
    "in a loop": lambda net: ds.DeepEnsemble([Scaled(factor) for factor in (1.0, 2.0, 3.0)]),
    "noisy": lambda net: ds.DeepEnsemble([Noisy(4, 3) for _ in range(4)]),
    "uncut": lambda net: Other([net() for _ in range(4)]),
}
SINGLE = ["map", "hmc", "multi_hmc"]  # of one function, or drawn by chains that take long


def said_by(name):
    """(everything that is predicted by a method for three batches and for one, functions that ran here for each)."""
    torch.manual_seed(0)
    posterior = on_the_mesh((SHARED.get(name) or test_contract.METHODS[name])(tiny.mlp))
    x, y = tiny.points(12)
    found, ran = [], []
    torch.manual_seed(1)
    for size in (4, 12):
        data = Batches(x, y, batch_size=size)
        before = len(counted)
        predictive = ds.predict(posterior, data)
        ran.append(len(counted) - before)
        summary = ds.summarise(posterior, data)
        evaluation = numbers(ds.evaluate(posterior, data, progress=False))
        found += [
            predictive.member_means, summary.mean, summary.epistemic, evaluation["nll"], evaluation["test/correct"],
        ]  # fmt: skip
    return found, ran, posterior.draw().members


counted = []


def counting(names):
    """What `said_by` gives, counting functions as they run."""

    def counts(self, one, rows, count, **about):
        counted.extend(range(count))
        return run(self, one, rows, count, **about)

    run, Runner.run = Runner.run, counts
    try:
        return [said_by(name) for name in names]
    finally:
        Runner.run = run


@functools.cache
def counted_alone(*names):
    return counting(names)


KINDS = ["deep_ensemble", "batch_ensemble", "multi_swag", "multi_node_bnn", "multi_mc_dropout", "laplace"]


REST = [name for name in test_contract.METHODS if name not in [*KINDS, *SINGLE]]


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        ([*KINDS[:3], "whole", "in a loop"], (2, 1)),
        ([*KINDS[3:], "noisy", "uncut"], (1, 2)),
        *(
            pytest.param(names, sizes, marks=pytest.mark.slow)
            for names in ([*KINDS, *SHARED], REST)
            for sizes in ((2, 1), (1, 2), (2, 2))
        ),
    ],
)
def test_functions_divided_over_ranks_say_what_they_say_in_one_process(names, sizes):
    """Each runs in one process alone, of ensembles and of draws; those that cannot be divided run whole."""
    expected = counted_alone(*names)
    everyone = workers().run(math.prod(sizes), on, sizes, functools.partial(counting, names))
    for name, (wanted, alone, members), *ranks in zip(names, expected, *everyone, strict=True):
        for found, _, _ in ranks:
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
            if name == "in a loop":
                assert torch.equal(found[0], wanted[0])
                assert torch.equal(found[5], wanted[5])
        here = [ran for _, ran, _ in ranks]  # (functions that ran for three batches, for one), of each rank
        if name != "noisy":
            # alone, three batches may be one run of each function
            assert [*map(sum, zip(*here, strict=True))] == [3 * alone[1], alone[1]], name
        if name not in ("noisy", "uncut"):
            assert [one for _, one in here] == [*map(len, torch.arange(members).tensor_split(len(here)))], name


def after_the_group():
    """One rank goes on alone when the group is no more."""
    posterior = ensemble()
    distributed.destroy_process_group()
    return ds.predict(posterior, loader()).member_means if posterior.mesh.is_first else None


def test_a_rank_may_go_on_alone_after_the_group():
    found = workers().run(2, after_the_group)
    assert torch.equal(found[0], ds.predict(ensemble(), loader()).member_means)


def test_one_process_takes_no_turns():
    posterior = ensemble()
    said = (torch.ones(3, 2),)
    functions = FixedDraw(posterior)
    assert functions.portion.gather_tensors(lambda: said) is said
    assert functions.portion.local_functions is functions.drawn
    posterior.mesh = ds.distributed.mesh()
    taken = FixedDraw(posterior).run_batches(lambda batch: -batch, iter([1, 2]))
    assert next(taken) == (1, -1), "and reads no batch before it is its turn"
    assert [*taken] == [(2, -2)]
