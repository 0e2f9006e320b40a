"""Settings under their former names: constructors name the new one, files load as if they had it."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import dissensus as ds
import tiny
from dissensus.storage.folder import CHECKSUM, METADATA, checksum

ROWS = [  # method, former settings, settings now
    (ds.DropoutEnsemble, {"keep": 0.9}, {"rate": 0.1}),
    (ds.DropoutEnsemble, {"keep": 0.7}, {"rate": 0.3}),
    (ds.NodeBNN, {"gamma": 4.0, "rate": "curvature"}, {"posterior_temperature": 5.0, "lr": "curvature"}),
    (ds.SWAG, {"scale": 0.25}, {"posterior_temperature": 0.25}),
]
NEEDED = {ds.NodeBNN: {"data_size": 12}}


@pytest.mark.parametrize(("method", "former", "now"), ROWS)
def test_a_file_with_former_names_loads(method, former, now, tmp_path):
    posterior = method(ds.nets.MLP(2, 3, hidden=(4,)), **now, **NEEDED.get(method, {}))
    if method is ds.SWAG:
        ds.fit(posterior, [(torch.randn(12, 2), tiny.points()[1])] * 2, epochs=4, progress=False)
    ds.refresh(posterior, [])
    ds.save(posterior, tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    with safe_open(path, framework="pt") as file:
        config = json.loads(file.metadata()[METADATA])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    del config[CHECKSUM]
    assert now.items() <= config["arguments"].items()
    config["arguments"] = {k: v for k, v in config["arguments"].items() if k not in now} | former
    config[CHECKSUM] = checksum(config, tensors)
    save_file(tensors, path, {METADATA: json.dumps(config)})
    loaded = ds.load(tmp_path)
    assert loaded.config() == posterior.config()
    assert torch.equal(loaded.predict(torch.ones(3, 2)).mean, posterior.predict(torch.ones(3, 2)).mean)


@pytest.mark.parametrize(("method", "former", "now"), ROWS)
def test_a_former_keyword_is_an_error_that_names_the_new_one(method, former, now):
    for (old, value), new in zip(former.items(), now, strict=True):
        with pytest.raises(TypeError, match=f"expected a keyword of {method.__name__}, got '{old}'; pass {new}="):
            method(ds.nets.MLP(2, 3, hidden=(4,)), **{old: value}, **NEEDED.get(method, {}))
