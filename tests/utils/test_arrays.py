"""Arrays, Series and DataFrames are taken where tensors are, and what they would lose is said."""

import contextlib

import numpy as np
import pytest
import torch

import dissensus as ds
from dissensus.utils.arrays import as_tensor
from refusals import refuses

pd = pytest.importorskip("pandas")


def test_numbers_keep_their_values():
    frame = pd.DataFrame({"a": [1, 2], "b": [0.5, 1.5], "c": [True, False], "d": pd.array([3, None], dtype="Int64")})
    assert as_tensor(frame).dtype == torch.float32
    assert as_tensor(frame)[:, :3].tolist() == [[1, 0.5, 1], [2, 1.5, 0]]
    assert as_tensor(frame)[:, 3].isnan().tolist() == [False, True]
    assert as_tensor(pd.Series([2, 0])).tolist() == [2, 0]
    assert as_tensor(pd.Series([2, 0])).dtype == torch.int64
    assert as_tensor(np.zeros((2, 3), np.uint8)).dtype == torch.uint8
    assert as_tensor(np.arange(3, dtype=">f8")).tolist() == [0, 1, 2]
    assert as_tensor([1]) == [1]


def test_a_tensor_does_not_share_the_memory_of_an_array():
    array = np.zeros(3, np.float32)
    tensor = as_tensor(array)
    array += 1
    assert tensor.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("values", "error"), [
    (pd.DataFrame({"a": [1.0], "city": ["Oslo"]}), "got str in column 'city' of a DataFrame; encode the table"),
    (pd.DataFrame({"day": pd.to_datetime(["2020-01-01"])}), "in column 'day' of a DataFrame"),
    (pd.Series(["a", "b"]), "got str in a Series"),
    (np.array(["a"]), "got <U1 in a ndarray"),
])  # fmt: skip
def test_other_values_are_refused_in_words(values, error):
    refuses(lambda: as_tensor(values), error, TypeError)


def test_numbers_that_float32_cannot_tell_apart_are_refused():
    stamps = 1.7e9 + np.arange(50.0)
    with pytest.raises(ValueError, match=r"can tell apart, got 1.7e\+09 to 1.7e\+09 in column 1; standardise"):
        as_tensor(np.stack([np.arange(50.0), stamps], 1))
    refuses(lambda: as_tensor(pd.DataFrame({"id": [2**40, 2**40 + 1]})), "can tell apart")
    assert as_tensor(stamps[:1]).shape == (1,)
    assert as_tensor(np.full(5, 0.1)).dtype == torch.float32
    frame = pd.DataFrame({"t": stamps.astype(np.int64)})
    z = ds.data.Standardiser.of_rows(frame)(frame)
    assert z.dtype == torch.float32
    assert torch.allclose(z.flatten(), torch.linspace(-1.6974, 1.6974, 50), atol=1e-3)
    whole = torch.from_numpy(stamps.astype(np.int64))[:, None]
    assert torch.equal(ds.data.Standardiser.of_rows(whole)(whole), z)


def test_pixels_are_pixels_in_arrays_too():
    images = torch.randint(0, 256, (4, 3, 2, 2), dtype=torch.uint8)
    standardiser = ds.data.Standardiser.of_channels(images)
    assert torch.equal(standardiser(images.numpy()), standardiser(images))


@pytest.fixture
def rows():
    x = torch.randn(70, 3, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def frames(x, y):
    index = torch.arange(len(x)).flip(0).tolist()
    return pd.DataFrame(x.double().numpy(), columns=list("abc"), index=index), pd.Series(y.numpy(), index=index)


def ensemble():
    torch.manual_seed(1)
    return ds.DeepEnsemble([ds.nets.MLP(3, 2, hidden=(8,)) for _ in range(2)])


def fitted(data, **keywords):
    posterior = ensemble()
    torch.manual_seed(2)
    ds.fit(posterior, data, epochs=2, progress=False, **keywords)
    return posterior


def test_data_in_the_place_of_a_loader_are_batches_of_32_shuffled(rows):
    x, y = rows
    expected = fitted(ds.data.Batches(x, y, batch_size=32, shuffle=True)).predict(x).member_means
    assert torch.equal(fitted((x, y)).predict(x).member_means, expected)
    assert torch.equal(fitted((x.numpy(), y.numpy())).predict(x.numpy()).member_means, expected)
    frame, labels = frames(x, y)
    posterior = fitted((frame, labels), validation=(frame, labels))
    assert torch.equal(fitted((frame, labels)).predict(frame).member_means, expected)
    assert torch.allclose(posterior(frame), posterior(x))
    predictive = ds.predict(posterior, (frame, labels))
    assert torch.equal(predictive.targets, y)
    assert torch.allclose(predictive.member_means, posterior.predict(x).member_means)
    found = ds.evaluate(posterior, (frame, labels), ood={"far": (10 * frame, labels)}).metrics
    assert found["nll"] == pytest.approx(-float(predictive.log_prob(y).mean()), abs=1e-6)
    ds.temperature_scale(posterior, (frame, labels))


def test_a_list_of_batches_stays_one(rows):
    x, y = rows
    seen = []
    posterior = ensemble()
    posterior.before_step = lambda batch: seen.append(batch.size)
    for loader in ([(x, y)], ((x, y),), [(x[:3], y[:3]), (x, y)], ((x[:3], y[:3]), (x, y))):
        ds.fit(posterior, loader, epochs=1, progress=False)
    assert seen == [70, 70, 3, 70, 3, 70]
    seen.clear()
    ds.fit(posterior, (x, y, torch.ones(70)), epochs=1, progress=False)
    ds.fit(posterior, [{"x": x}["x"], y], epochs=1, progress=False)
    assert seen == [32, 32, 6] * 2


def test_rows_of_frames_are_paired_by_index_or_not_at_all(rows):
    frame, labels = frames(*rows)
    with pytest.raises(ValueError, match=r"with one index, got two; pass y.loc\[x.index\]"):
        ds.data.Batches(frame, labels.sort_index(), batch_size=8)
    refuses(lambda: fitted((frame, labels.reset_index(drop=True))), "one index")
    assert len(ds.data.Batches(frame, labels.sort_index().loc[frame.index], batch_size=8)) == 9


def test_inputs_without_targets_are_no_data(rows):
    frame, _ = frames(*rows)
    refuses(lambda: ds.predict(ensemble(), frame), r"a loader or \(x, y\), got DataFrame; pass those", TypeError)
    refuses(lambda: ds.fit(ensemble(), rows[0], epochs=1), "got Tensor", TypeError)


TABLE = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [0.5, 0.25, 1.0], "c": [3.0, 1.0, 2.0]})
TEXT = TABLE.assign(b=["x", "y", "z"])
LABELS = pd.Series([0, 1, 0])
ASKED = {  # what a table may be handed to, by mistake or not
    "predict": lambda p, x: p.predict(x),
    "call": lambda p, x: p(x),
    "loss": lambda p, x: p.loss(x, LABELS),
    "backward": lambda p, x: p.backward(x, LABELS),
    "fit": lambda p, x: ds.fit(p, (x, LABELS), epochs=1, progress=False),
    "fit alone": lambda p, x: ds.fit(p, x, epochs=1),
    "ds.predict": lambda p, x: ds.predict(p, (x, LABELS)),
    "summarise": lambda p, x: ds.summarise(p, (x, LABELS)),
    "predict_image": lambda p, x: ds.predict_image(p, x),
    "evaluate": lambda p, x: ds.evaluate(p, (x, LABELS)),
    "evaluate alone": lambda p, x: ds.evaluate(p, x),
    "ood": lambda p, x: ds.evaluate(p, (x, LABELS), ood=x),
    "temperature_scale": lambda p, x: ds.temperature_scale(p, x),
    "conformal": lambda p, x: ds.conformal(p, (x, LABELS), level=0.5).set(x),
    "conformal alone": lambda p, x: ds.conformal(p, x),
    "selective": lambda p, x: ds.selective(p, x),
    "refresh": lambda p, x: ds.refresh(ds.SWAG(ds.nets.MLP(3, 2)), x),
    "fit_posthoc": lambda p, x: ds.Laplace(ds.nets.MLP(3, 2)).fit_posthoc(x),
    "convergence": lambda p, x: ds.convergence(p, x),
    "member_distances": lambda p, x: ds.member_distances(p, x, LABELS),
    "attack": lambda p, x: ds.attacks.fgsm(p, x, LABELS, 0.1),
    "pca_lengthscales": lambda p, x: ds.pca_lengthscales(x),
    "empirical_ntk": lambda p, x: ds.theory.empirical_ntk(ds.nets.MLP(3, 2), x),
    "regime": lambda p, x: ds.theory.regime(p, x),
    "Batches": lambda p, x: ds.data.Batches(x, LABELS, batch_size=2),
    "of_rows": lambda p, x: ds.data.Standardiser.of_rows(x)(x),
    "of_channels": lambda p, x: ds.data.Standardiser.of_channels(x),
    "inverse": lambda p, x: ds.data.Standardiser.of_rows(TABLE).inverse(x),
    "accuracy": lambda p, x: ds.metrics.accuracy(x, LABELS),
    "rmse": lambda p, x: ds.metrics.rmse(x, x),
    "auroc": lambda p, x: ds.metrics.auroc(x, x),
    "log_prob": lambda p, x: p.predict(TABLE).log_prob(x),
    "interval": lambda p, x: p.predict(TABLE).interval(x),
    "sample": lambda p, x: p.predict(TABLE).sample(x),
    "DeepEnsemble": lambda p, x: ds.DeepEnsemble(x),
    "MAP": lambda p, x: ds.MAP(x),
    "save": lambda p, x: ds.save(x, "nowhere"),
    "report": lambda p, x: ds.report(x, "nowhere"),
}


class Refused(Exception):
    pass


@pytest.mark.parametrize("asked", ASKED)
def test_a_table_is_taken_or_refused_in_words(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for table in (TABLE, TEXT, {}):
        with contextlib.suppress(Refused):
            try:
                ASKED[asked](ensemble(), table)
            except (TypeError, ValueError) as error:
                raise (Refused if str(error).startswith("expected ") else AssertionError)(asked) from error
