"""What a network cannot take is said in our words; what it can take is left to it."""

import copy
import logging
from collections import Counter, OrderedDict
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dissensus as ds
import tiny
from refusals import refuses
from thinning import thinned


def convolutions(outputs=3):
    """Takes (B, 3, H, W) and, as torch's convolutions do, single images (3, H, W)."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, outputs, 1))


USES = {  # the ways inputs reach a posterior
    "fit": lambda posterior, x, y: ds.fit(posterior, [(x, y)], epochs=1, progress=False),
    "backward": lambda posterior, x, y: posterior.backward(x, y),
    "predict": lambda posterior, x, y: posterior.predict(x),
    "predict_loader": lambda posterior, x, y: ds.predict(posterior, [(x, y)]),
    "evaluate": lambda posterior, x, y: ds.evaluate(posterior, [(x, y)]),
    "temperature": lambda posterior, x, y: ds.temperature_scale(posterior, [(x, y)]),
}
every_use = pytest.mark.parametrize("use", USES.values(), ids=USES)


@every_use
@pytest.mark.parametrize("build", [ds.MAP, lambda net: ds.DeepEnsemble([net, tiny.mlp()])], ids=["map", "ensemble"])
def test_double_inputs_of_a_single_network_are_a_clear_error(use, build):
    x, y = tiny.points()
    told = r"expected inputs that the network can take.*[dD]ouble.*; pass x.to\(torch.float32\)"
    refuses(lambda: use(build(tiny.mlp()), x, y), told)
    use(build(tiny.mlp()), x.float(), y)


def test_a_posterior_that_changed_its_dtype_is_asked_again():
    posterior, (x, _) = ds.MAP(tiny.mlp()), tiny.points()
    posterior.predict(x.float())
    posterior.double()
    told = r"expected inputs that the network can take.*[fF]loat.*; pass x.to\(torch.float64\)"
    refuses(lambda: posterior.predict(x.float()), told)


def test_images_as_bytes_are_an_error_only_where_the_network_does_not_convert_them():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    x, y = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8), torch.arange(6) % 2
    for use in USES.values():
        use(ds.MAP(tiny.Network(lambda self, x: self.net(x.float() / 255), net=net)), x, y)
        told = r"unsigned char.*; pass x.to\(torch.float32\), or divide pixels by 255"
        refuses(partial(use, ds.MAP(net), x, y), told)


def test_indices_are_for_embeddings():
    layers = {"embedding": nn.Embedding(7, 4), "head": nn.Linear(4, 3)}
    words = tiny.Network(lambda self, x: self.head(self.embedding(x).mean(1)), **layers)
    x, y = torch.randint(7, (6, 5)), torch.arange(6) % 3
    for use in USES.values():
        use(ds.MAP(words), x, y)
        told = r"expected inputs that the network can take.*Embedding.*; pass x.long"
        refuses(partial(use, ds.MAP(words), x.float(), y), told)


def test_other_failures_of_a_network_stay_its_own():
    class Fails(nn.Linear):
        def forward(self, x):
            raise KeyError("mine")

    class Refuses(nn.Linear):
        def forward(self, x):
            raise ValueError("mine too")

    class Multiplies(nn.Linear):
        def forward(self, x):
            return x @ torch.zeros(7, 7)

    for kind, error, words in (
        (Fails, KeyError, "mine"), (Refuses, ValueError, "^mine too"), (Multiplies, RuntimeError, "^(mm: )?mat1 and mat2")
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            ds.MAP(kind(4, 3)).predict(torch.zeros(5, 4))


BUILDS = {
    "map": lambda net: ds.MAP(net()),
    "ensemble": lambda net: ds.DeepEnsemble([net(), net()]),
    "batch": lambda net: ds.BatchEnsemble(net(), members=2, modulation=ds.Modulation.sign()),
    "node": lambda net: ds.NodeBNN(net(), data_size=6, samples=4),
}


@pytest.mark.parametrize(("name", "method"), thinned(list(USES), list(BUILDS), every=2))
def test_a_layer_that_cannot_take_its_inputs_is_named_with_the_shapes(name, method):
    def net():
        return nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 3), flat=nn.Flatten(), fc=nn.Linear(4 * 9, 3)))

    use, posterior = USES[name], BUILDS[method](net)
    y = torch.arange(6) % 3
    for x, words in (
        (torch.randn(6, 5, 5, 3), r"got \(6, 5, 5, 3\): layer 'conv', .*Conv2d\(3, 4.*instead; .*pass x.movedim\(-1, 1\)"),
        (torch.randn(6, 2, 5, 5), r"layer 'conv', .* got \(6, 2, 5, 5\) and raised: Given groups=1.* that layer$"),
        (torch.randn(6, 3, 6, 6), r"got \(6, 3, 6, 6\): layer 'fc', .*in_features=36.* got \(6, 64\) and raised: .*64"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"expected inputs that the network can take, .*{words}") as caught:
            use(posterior, x, y)
        assert type(caught.value.__cause__) is RuntimeError  # torch's own, with the place
    use(posterior, torch.randn(6, 5, 5, 3).movedim(-1, 1), y)


@pytest.mark.parametrize(("layer", "x", "words"), [
    (nn.Linear(4, 3), torch.zeros(5, 9), r"the network, Linear\(in_features=4.* mat1 and mat2 shapes"),
    (nn.Sequential(nn.Embedding(7, 4)), torch.full((5, 2), 9), r"layer '0', Embedding\(7, 4\).* index out of"),
    (nn.Sequential(nn.BatchNorm2d(4)), torch.zeros(5, 4), r"layer '0', BatchNorm2d.* expected 4D input"),
    (nn.Sequential(nn.LSTM(4, 3)), torch.zeros(5, 2, 9), r"layer '0', LSTM.* Expected 4, got 9"),
], ids=["linear", "embedding", "norm", "lstm"])  # fmt: skip
def test_whatever_layer_fails_is_named(layer, x, words):
    refuses(lambda: ds.MAP(layer).predict(x), rf"expected inputs that the network can take, got .*{words}")


@every_use
def test_one_example_without_a_batch_axis_is_a_clear_error(use):
    """Of four numbers into four classes the outputs have the length of a batch of four."""
    outputs, logits = r"expected outputs with the batch axis first \(", r"expected logits of shape \(B, C\)"
    for x, network, y, words in (
        (torch.randn(4), nn.Linear(4, 3), torch.tensor(1), outputs),
        (torch.randn(4), nn.Linear(4, 4), torch.zeros(4).long(), logits),
        (torch.randn(3, 8, 8), convolutions(5), torch.zeros(8, 8).long(), outputs),
        (torch.randn(1, 8, 8), nn.Conv2d(1, 5, 3), torch.zeros(8, 8).long(), outputs),
        (torch.randn(3, 8, 8), ds.nets.ResNet(20), torch.tensor(1), r"expected inputs that the network can take, got"),
    ):
        with pytest.raises(ValueError, match=rf"{words}.*a single example .*x\[None\]"):
            use(ds.MAP(network), x, y)


@pytest.mark.parametrize("name", ["fit", "backward", "evaluate", "temperature"])
def test_one_image_into_as_many_classes_as_channels_does_not_fit_its_labels(name):
    with pytest.raises(ValueError, match=r"expected (integer class indices of shape|logits \(B, C, T\))"):
        USES[name](ds.MAP(convolutions(3)), torch.randn(3, 8, 8), torch.zeros(8, 8).long())


class Squeezes(nn.Linear):
    def forward(self, x):
        return super().forward(x).squeeze()


class OneSize(nn.Linear):
    """Runs with batches of six only."""

    def forward(self, x):
        assert len(x) == 6
        return super().forward(x.reshape(6, -1))


def without_statistics(width):
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width, track_running_stats=False), nn.Linear(width, 3))


@pytest.mark.parametrize(("network", "x", "y"), [
    (Squeezes(4, 1), torch.randn(6, 4), torch.randn(6)),
    (tiny.Scaled(), torch.randn(6), torch.randn(6)),
    (OneSize(4, 2), torch.randn(6, 4), torch.randn(6, 2)),
    (nn.Linear(4, 4), torch.randn(1, 4), torch.randn(1, 4)),
    (nn.Conv2d(3, 3, 1), torch.randn(6, 3, 5, 5), torch.randn(6, 3, 5, 5)),
    # Of as many examples as channels, without statistics: one is too few, and with an axis more it runs.
    (without_statistics(6), torch.randn(6, 4), torch.randn(6, 3)),
    (without_statistics(2), torch.randn(2, 4), torch.randn(2, 3)),
], ids=["squeezed", "numbers", "one size", "a batch of one", "images", "batch norm", "batch norm, two"])  # fmt: skip
@pytest.mark.parametrize("name", [name for name in USES if name != "evaluate"])
def test_networks_that_are_unusual_are_left_alone(name, network, x, y):
    USES[name](ds.MAP(copy.deepcopy(network), likelihood=ds.Regression(noise=1.0)), x, y)


def test_predicting_tries_one_example_once_for_each_kind_of_inputs():
    sizes = []

    class Watched(nn.Linear):
        def forward(self, x):
            sizes.append(len(x))
            return super().forward(x)

    posterior, x = ds.MAP(Watched(4, 3)), torch.randn(50, 4)
    posterior.predict(x)
    posterior.predict(x[:20])
    assert sizes == [1, 50, 20]


def test_a_first_step_on_a_cpu_runs_the_whole_batch_once_and_little_more():
    """Once more only where a network wants all rows."""
    sizes = []

    def watched(self, x):
        sizes.append(len(x))
        return self.layer(x.view(50, 4) if self.fixed else x)

    for fixed, expected in ((False, {8: 1, 5: 1, 2: 1, 3: 1, 50: 1}), (True, {8: 1, 5: 1, 2: 1, 50: 3})):
        sizes.clear()
        posterior = ds.MAP(tiny.Network(watched, layer=nn.Linear(4, 3), fixed=fixed))
        ds.fit(posterior, [(torch.randn(50, 4), torch.randint(3, (50,)))], epochs=1, device="cpu", progress=False)
        assert Counter(sizes) == expected


def test_a_network_may_compare_all_rows_of_a_batch():
    network = tiny.Network(lambda self, x: (z := self.layer(x)) @ z.T, layer=nn.Linear(4, 3))
    rows = [(torch.randn(16, 4), torch.arange(16)) for _ in range(2)]
    ds.fit(ds.MAP(network), rows, epochs=1, device="cpu", progress=False)


def test_an_empty_batch_predicts_nothing():
    assert len(ds.MAP(nn.Linear(4, 3)).predict(torch.zeros(0, 4))) == 0


class Integers(Dataset):
    """As torchvision's sets: labels are numbers of Python."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index >= 12:
            raise IndexError
        return torch.zeros(4), index % 3


@pytest.mark.parametrize("dataset", [TensorDataset(tiny.points()[0].float(), tiny.points()[1]), Integers()])
def test_a_dataset_in_a_loaders_place_is_a_clear_error(dataset):
    posterior, good = ds.SWAG(tiny.mlp(), samples=2), DataLoader(dataset, batch_size=6)
    ds.fit(posterior, good, epochs=1, progress=False)
    message = (
        rf"expected a loader of batches, got {type(dataset).__name__}, a Dataset of single examples; pass DataLoader"
    )
    for use in (
        lambda: ds.fit(posterior, dataset, epochs=1, progress=False),
        lambda: ds.fit(posterior, good, epochs=1, validation=dataset, progress=False),
        lambda: ds.predict(posterior, dataset),
        lambda: ds.summarise(posterior, dataset),
        lambda: ds.evaluate(posterior, dataset),
        lambda: ds.evaluate(posterior, good, ood={"far": dataset}),
        lambda: ds.temperature_scale(posterior, dataset),
        lambda: ds.refresh(posterior, dataset),
    ):
        refuses(use, message, TypeError)


def test_datasets_that_give_batches_are_loaders():
    x, y = tiny.points()

    class Whole(Dataset):
        def __getitem__(self, index):
            if index > 1:
                raise IndexError
            return x, y

    for loader in (Whole(), tiny.Stream(lambda: [(x, y)])):
        posterior = ds.MAP(tiny.mlp().double())
        ds.fit(posterior, loader, epochs=1, progress=False)
        assert len(ds.predict(posterior, loader).targets) % len(y) == 0


class Functional(nn.Linear):
    def forward(self, x):
        return super().forward(x).softmax(1)


@pytest.mark.parametrize(("network", "said"), [
    (nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), True), (Functional(4, 3), True),
    (nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)), False), (nn.Linear(4, 3), False),
    (nn.Sequential(nn.Linear(4, 3), nn.Sigmoid()), False), (nn.Sequential(nn.Linear(4, 3), nn.ReLU()), False),
], ids=["softmax", "functional", "log-softmax", "logits", "sigmoid", "relu"])  # fmt: skip
def test_a_network_that_ends_in_a_softmax_is_warned_of_once(network, said, caplog):
    posterior, (x, y) = ds.MAP(copy.deepcopy(network).double()), tiny.points()
    with caplog.at_level(logging.WARNING, "dissensus"):
        ds.fit(posterior, [(x, y), (x.float().double()[:5], y[:5])], epochs=2, progress=False)
        ds.evaluate(posterior, [(x, y)])
        posterior.float().backward(x.float(), y)  # another kind of inputs
    warned = [record.message for record in caplog.records if "seems to end in a softmax" in record.message]
    assert len(warned) == said
    assert all("remove the last softmax, or return log-probabilities" in message for message in warned)


@pytest.mark.parametrize("use", [
    lambda posterior, x, y: [posterior.predict(x), posterior.predict(x[:3])],
    lambda posterior, x, y: [ds.predict(posterior, [(x, y)]), posterior.predict(x)],
    lambda posterior, x, y: [ds.summarise(posterior, [(x, y)]), ds.evaluate(posterior, [(x, y)])],
], ids=["predict", "ds.predict", "summarise"])  # fmt: skip
def test_prediction_alone_warns_of_a_last_softmax_once(use, caplog):
    use(ds.MAP(nn.Sequential(nn.Linear(2, 2), nn.Softmax(1))), 100 * torch.randn(6, 2), torch.arange(6) % 2)
    assert caplog.text.count("seems to end in a softmax") == 1


def test_pixels_that_end_in_a_softmax_are_warned_of_and_regressions_are_not(caplog):
    image = torch.randn(2, 3, 5, 5)
    net = nn.Sequential(convolutions(), nn.Softmax(1))
    with caplog.at_level(logging.WARNING, "dissensus"):
        ds.MAP(net, likelihood=ds.Regression(noise=1.0)).backward(image, torch.randn(2, 3, 5, 5))
        assert not caplog.records
        ds.MAP(net.half().bfloat16()).backward(image.bfloat16(), torch.zeros(2, 5, 5).long())
    assert len(caplog.records) == 1
