"""What files say of a method: its constructor's keywords, read from attributes of the same names."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.core.description import describe_settings

if TYPE_CHECKING:
    from somewhere import Unknown  # type: ignore[import-not-found]

# name of a method -> its config when built by `build`, as earlier versions wrote it
CONFIGS = json.loads((Path(__file__).parent / "configs.json").read_text())
ADDED = {"mc_dropout": {"layers": None}}  # keywords that they did not know, with their defaults
STACKED = {"deep_ensemble", "weight_rde", "function_rde", "feature_rde", "forde", "svgd", "lit"}
KEYWORDS = {
    "function_rde": {"repel_at": (torch.ones(2, 3), torch.ones(1, 3)), "annealing": ds.Annealing("cyclic", steps=10)},
    "feature_rde": {"layer": "1", "head": "2"},
    "forde": {"lengthscales": ds.Lengthscales(torch.eye(3)[:, :2], torch.ones(2)), "every": 2},
    "lit": {"strength": 0.5},
    "mc_dropout": {"rate": 0.3},
    "batch_ensemble": {"members": 3, "modulation": ds.Modulation.normal(1.0, 0.5), "layers": ["0"]},
    "tradi": {"state_noise": (1.0, 0.5)},
    "node_bnn": {"annealing": ds.Annealing("linear")},
    "rank_one_bnn": {"annealing": ds.Annealing("linear")},
    "mean_field_vi": {"annealing": ds.Annealing("linear", steps=3)},
    "sghmc": {"members": 4},
}


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def build(name):
    torch.manual_seed(0)
    networks = [network(), network()] if name in STACKED else network()
    return ds.METHODS[name](networks, data_size=12, weight_prior_std=0.5, **KEYWORDS.get(name, {}))


@pytest.mark.parametrize("name", ds.METHODS)
def test_a_config_is_what_earlier_versions_wrote_and_builds_the_same_method(name):
    posterior, config = build(name), CONFIGS[name]
    assert json.loads(json.dumps(posterior.config())) == config | ADDED.get(name, {})
    prior = [key for key in posterior.config() if key in ("weight_prior_std", "data_size")]
    assert prior == ["weight_prior_std", "data_size"], "an error names the first setting that differs"
    again = type(posterior).skeleton(network(), config, ds.Classification())
    assert again.config() == posterior.config()
    again.load_state_dict(posterior.state_dict())


class Passing(ds.NetworksPosterior):
    """Takes keywords of its own, passes the others on, and has an annotation that only type checkers can read."""

    name = "passing"

    def __init__(self, networks, *, strength: "Unknown" = 2.0, forgotten=1, **others):
        super().__init__(networks, **others)
        self.strength = strength


def test_keywords_that_are_passed_on_are_those_of_the_base_class():
    posterior = Passing(network(), strength=3.0, data_size=5)
    assert describe_settings(posterior) == {"strength": 3.0, "data_size": 5, "weight_prior_std": None}
    again = Passing.skeleton(network(), posterior.config(), ds.Classification())
    assert (again.strength, again.data_size) == (3.0, 5)
