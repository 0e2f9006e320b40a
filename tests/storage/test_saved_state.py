"""What stood still in training stands still after load: frozen parameters and layers in eval mode."""

import pytest
import torch
from torch import nn

import dissensus as ds
from saved_files import config_of, reseal
from thinning import often

generator = torch.Generator().manual_seed(0)
x = torch.randn(32, 2, dtype=torch.float64, generator=generator)
loader = [(x[i : i + 8], (x[i : i + 8, 0] > 0).long()) for i in range(0, 32, 8)]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()


def with_norm_in_eval() -> nn.Module:
    made = network()
    made[1].eval()
    return made


def with_first_layer_frozen() -> nn.Module:
    made = network()
    made[0].requires_grad_(False)
    return made


METHODS = {
    "map": lambda make: ds.MAP(make()),
    "deep_ensemble": lambda make: ds.DeepEnsemble([make(), make()]),
    "mc_dropout": lambda make: ds.MCDropout(make(), rate=0.1, samples=2),
    "batch_ensemble": lambda make: ds.BatchEnsemble(make(), members=2, modulation=ds.Modulation.normal(1.0, 0.5)),
    "node_bnn": lambda make: ds.NodeBNN(make(), data_size=32, components=2, samples=2),
    "mean_field_vi": lambda make: ds.MeanFieldVI(make(), data_size=32, samples=2),
    "multi_mean_field_vi": lambda make: ds.MeanFieldVI([make(), make()], data_size=32, samples=2),
    "swag": lambda make: ds.SWAG(make(), rank=2, samples=2),
}
OFTEN = [name for name in METHODS if name != "multi_mean_field_vi"]


def trained_on_after_load(posterior, folder):
    """(tensors before, after) training what was saved and loaded into a network that knows nothing."""
    ds.save(posterior, folder)
    loaded = ds.load(folder, network=network())
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in loaded.parameters() if p.requires_grad], lr=0.1)
    ds.fit(loaded, loader, epochs=2, optimizer=optimizer, progress=False)
    return before, loaded.state_dict()


@pytest.mark.parametrize("method", often(OFTEN, ["multi_mean_field_vi"]))
def test_a_norm_layer_in_eval_mode_keeps_its_statistics_after_load(method, tmp_path):
    posterior = METHODS[method](with_norm_in_eval)
    before, after = trained_on_after_load(posterior, tmp_path)
    kept = [name for name in before if name.startswith("particles") and "running" in name]
    assert kept
    for name in kept:
        assert torch.equal(before[name], after[name]), name
    last = next(name for name in before if name.endswith("network.3.weight"))
    assert not torch.equal(before[last], after[last])


@pytest.mark.parametrize("method", often(OFTEN, ["multi_mean_field_vi"]))
def test_frozen_parameters_stay_frozen_after_load(method, tmp_path):
    posterior = METHODS[method](with_first_layer_frozen)
    before, after = trained_on_after_load(posterior, tmp_path)
    name = next(name for name in before if name.endswith("network.0.weight"))
    assert torch.equal(before[name], after[name])


def test_refreshing_a_loaded_draw_keeps_statistics_that_stood_still(tmp_path):
    posterior = ds.SWAG(with_norm_in_eval(), rank=2, samples=2, start=0, every=1)
    ds.fit(posterior, loader, epochs=1, progress=False)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, network=network())
    ds.refresh(loaded, loader)
    for name, tensor in posterior.stored.named_buffers():
        if "running" in name:
            assert torch.equal(tensor, loaded.stored.get_buffer(name))


def test_what_the_template_has_frozen_stays_so(tmp_path):
    ds.save(ds.MAP(network()), tmp_path)
    loaded = ds.load(tmp_path, network=with_norm_in_eval())
    assert loaded.particles.template.always_eval == ["network.1"]


def test_a_file_that_freezes_what_is_not_there_is_damaged(tmp_path):
    ds.save(ds.MAP(with_norm_in_eval()), tmp_path)
    wrong = (
        {"eval": ["network.7"]},
        {"frozen": ["particles.shared.network.9"]},
        {"eval": 3},
        {"eval": [3]},
        {"loop": ["a"]},
    )
    kept = config_of(tmp_path)["kept"]
    for each in (*(kept | other for other in wrong), [], {}):
        reseal(tmp_path, {**config_of(tmp_path), "kept": each})
        with pytest.raises(ValueError, match="damaged"):
            ds.load(tmp_path, network=network())
