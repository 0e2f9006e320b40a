"""Heads on a frozen backbone train on cached features as they do on the inputs, and hold one backbone."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from adapters import storage_bytes
from refusals import refuses


def small_backbone():
    backbone = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()).double()
    with torch.no_grad():
        backbone(torch.randn(32, 1, 6, 6, dtype=torch.float64))  # moves the batch statistics
    return backbone


def make_head():
    return nn.Linear(8 * 16, 3).double()


def images():
    return torch.randn(48, 1, 6, 6, dtype=torch.float64), torch.arange(48) % 3


LOADERS = {
    "data": lambda x, y: (x, y),
    "weighted data": lambda x, y: (x, y, torch.linspace(0, 1, len(y))),
    "Batches": lambda x, y: ds.data.Batches(x, y, batch_size=8, shuffle=True, seed=3),
    "DataLoader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True),
    "its own generator": lambda x, y: DataLoader(
        TensorDataset(x, y), batch_size=10, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(4)
    ),
    "labelled mappings": lambda x, y: ds.Loader(
        DataLoader([{"input": each, "class": label} for each, label in zip(x, y, strict=True)], batch_size=10),
        labels="class",
    ),
    "list": lambda x, y: [(x[:30], y[:30]), (x[30:], y[30:])],
}


@pytest.mark.parametrize("name", LOADERS)
def test_training_on_cached_features_is_training_on_the_inputs(name):
    backbone, (x, y) = small_backbone(), images()
    posterior = ds.heads(backbone, make_head, members=3)
    cached_too = copy.deepcopy(posterior)
    features = ds.cache_features(backbone, LOADERS[name](x, y))
    for each, loader in ((posterior, LOADERS[name](x, y)), (cached_too, features)):
        torch.manual_seed(5)
        ds.fit(each, loader, epochs=1, progress=False)
    expected = posterior.predict(x).member_means
    torch.testing.assert_close(cached_too.predict(x).member_means, expected, rtol=0, atol=1e-9)
    on_features = ds.predict(posterior, ds.cache_features(posterior.member(0), [(x, y)]))
    torch.testing.assert_close(on_features.member_means, expected, rtol=0, atol=1e-9)


def test_the_backbone_is_held_once_frozen_in_eval_mode_and_left_as_it_was():
    backbone, (x, y) = small_backbone(), images()
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    posterior = ds.heads(backbone, make_head, members=5)
    heads = storage_bytes(*posterior.particles.own_parameters().values())
    assert storage_bytes(backbone, posterior) <= storage_bytes(backbone) + heads + 64
    assert not any(name.startswith("network.backbone") for name, _ in posterior.particles.own.named_buffers())
    runs = []
    posterior.particles.template.network.backbone.register_forward_hook(lambda *_: runs.append(1))
    posterior.predict(x)
    assert len(runs) < 5  # not once for each member
    ds.fit(posterior, (x, y), epochs=1, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())
    assert backbone.training
    assert all(parameter.requires_grad for parameter in backbone.parameters())


@pytest.mark.parametrize("kind", [ds.Laplace, ds.SWAG])
def test_other_methods_take_cached_features(kind):
    backbone, (x, y) = small_backbone(), images()
    posterior = kind(ds.BackboneAndHead(backbone, make_head()))
    loader = ds.cache_features(backbone, DataLoader(TensorDataset(x, y), batch_size=12))
    ds.fit(posterior, loader, epochs=2, progress=False)
    if kind is ds.Laplace:
        posterior.fit_posthoc(loader)
    torch.manual_seed(0)
    on_images = posterior.eval().predict(x).mean
    torch.manual_seed(0)
    torch.testing.assert_close(ds.predict(posterior, loader).mean, on_images, rtol=0, atol=1e-9)


def test_heads_are_saved_without_their_backbone(tmp_path):
    backbone, (x, _) = small_backbone(), images()
    posterior = ds.heads(backbone, make_head, members=3).eval()
    ds.save(posterior, tmp_path, base="omit")
    loaded = ds.load(tmp_path, ds.BackboneAndHead(backbone, make_head()))
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)


def test_what_cannot_be_cached_or_made_anew_is_refused():
    backbone, (x, y) = small_backbone(), images()
    refuses(lambda: ds.heads(backbone, make_head()), "a function that makes a head, got Linear", TypeError)
    noisy = ds.data.Batches(x, y, batch_size=8, augment=lambda given: given + torch.randn_like(given))
    refuses(lambda: ds.cache_features(backbone, noisy), "Batches without augment")
