"""Draws that do not fit on the device are made in parts, which are kept on the host."""

import copy
import functools
import logging

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.methods.parts import sampling_posterior
from dissensus.numerics.randomness import own_generator
from thinning import thinned

METHODS = {
    "swag": lambda networks: ds.SWAG(networks, rank=3, samples=5),
    "tradi": lambda networks: ds.TRADI(networks, samples=5),
    "gaussian_perturbation": lambda networks: ds.GaussianPerturbation(networks, samples=5),
    "mean_field_vi": lambda networks: ds.MeanFieldVI(networks, samples=5, data_size=24),
}


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def trained(method, members):
    """A copy: the training itself is done once."""
    return copy.deepcopy(_trained(method, members))


@functools.cache
def _trained(method, members):
    networks = network(0) if members == 1 else [network(seed) for seed in range(members)]
    posterior = METHODS[method](networks)
    ds.fit(posterior, [tiny.points(24)], epochs=12, progress=False)
    return posterior


def with_room_for_two(posterior, monkeypatch):
    monkeypatch.setattr(
        sampling_posterior, "free_bytes", lambda device: int(2 * posterior.drawn_bytes() * 2.1 / (5 * 0.45))
    )
    return posterior


@pytest.mark.parametrize(("method", "members"), thinned(list(METHODS), [1, 3], every=2))
def test_parts_have_the_functions_of_their_samples_network_by_network(method, members, monkeypatch, caplog):
    posterior, loader = trained(method, members), [tiny.points(24)]
    x = tiny.points(7)[0]
    posterior.stored = None
    with_room_for_two(posterior, monkeypatch)
    torch.manual_seed(3)
    generator = own_generator(posterior.device)
    samples = [posterior.sample(size, generator) for size in (2, 2, 1)]  # name -> (M, S, ...) of each part
    torch.manual_seed(3)
    with caplog.at_level(logging.INFO, logger="dissensus"):
        ds.refresh(posterior, loader)
    assert "it is made in parts of 2 of 5 samples" in caplog.text
    assert posterior.stored.sizes == [2, 2, 1] * members
    drawn = posterior.draw()
    assert (drawn.members, drawn.networks) == (5 * members, members)
    whole = {name: torch.cat([part[name] for part in samples], dim=1) for name in samples[0]}
    monkeypatch.setattr(sampling_posterior, "free_bytes", lambda device: None)
    families = posterior._make_families(whole)  # the same samples at once
    posterior._refresh_statistics(families.each, loader)
    torch.testing.assert_close(drawn(x), posterior.make_functions(families)(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(drawn.member(3)(x), drawn(x)[3], rtol=0, atol=1e-12)
    torch.testing.assert_close(posterior.predict(x).mean, drawn.predict(x).mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("method", "members"), thinned(list(METHODS), [3, 1], every=4))
def test_a_draw_in_parts_is_saved_and_loaded_bit_for_bit(method, members, monkeypatch, tmp_path):
    posterior, x = with_room_for_two(trained(method, members), monkeypatch), tiny.points(7)[0]
    ds.refresh(posterior, [tiny.points(24)])
    ds.save(posterior, tmp_path / "saved")
    monkeypatch.undo()
    loaded = ds.load(tmp_path / "saved", network(9))
    assert loaded.stored.sizes == [2, 2, 1] * members
    assert torch.equal(loaded(x), posterior(x))
    other = trained(method, members)  # has a whole draw, which gives way to the parts
    other.load_state_dict(posterior.state_dict())
    assert torch.equal(other(x), posterior(x))
    posterior.load_state_dict(trained(method, members).state_dict())
    assert posterior.stored.sizes == [5 * members]


def test_parts_follow_the_posteriors_precision_and_copies_stay_what_they_were(monkeypatch):
    posterior, x = with_room_for_two(trained("swag", 3), monkeypatch), tiny.points(7)[0]
    ds.refresh(posterior, [tiny.points(24)])
    before, copied = posterior(x), copy.deepcopy(posterior)
    assert posterior.float()(x.float()).dtype == torch.float32
    assert torch.equal(copied(x), before)


def test_an_interrupted_run_with_a_draw_in_parts_goes_on_with_it(monkeypatch, tmp_path):
    posterior = ds.SWAG([network(0), network(1)], rank=3, samples=5)
    with_room_for_two(posterior, monkeypatch)
    settings = {"progress": False, "checkpoint": tmp_path / "c.pt"}
    ds.fit(posterior, [tiny.points(24)], epochs=12, **settings)
    assert posterior.stored.parts
    again = ds.SWAG([network(0), network(1)], rank=3, samples=5)
    ds.fit(again, [tiny.points(24)], epochs=12, **settings)
    assert torch.equal(again(tiny.points(7)[0]), posterior(tiny.points(7)[0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_parts_stay_on_the_host_and_run_on_the_gpu(monkeypatch):
    posterior = trained("swag", 3).to("cuda")
    with_room_for_two(posterior, monkeypatch)
    x = tiny.points(7)[0].to("cuda")
    loader = [tuple(t.to("cuda") for t in tiny.points(24))]
    ds.refresh(posterior, loader)
    posterior.to("cuda")
    assert {family.device.type for family in posterior.stored.each} == {"cpu"}
    on_gpu = posterior(x)
    assert on_gpu.device.type == "cuda"
    torch.testing.assert_close(posterior.draw().member(4)(x), on_gpu[4], rtol=0, atol=1e-10)
    torch.testing.assert_close(posterior.to("cpu")(x.cpu()), on_gpu.cpu(), rtol=0, atol=1e-10)
    assert ds.summarise(posterior.to("cuda"), loader).mean.device.type == "cuda"
