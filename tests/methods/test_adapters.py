"""Members made from one base: they hold its memory, train as copies would, and files and draws store it once."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from adapters import add_adapters, small_base, storage_bytes
from dissensus.storage.folder import read_posterior, serialise_posterior
from refusals import refuses
from thinning import thinned

WIDE = 256
KINDS = (
    (ds.DeepEnsemble, {}), (ds.FoRDE, {}), (ds.WeightRDE, {"data_size": 12}), (ds.FunctionRDE, {"data_size": 12}),
    (ds.SVGD, {"data_size": 12}), (ds.LIT, {"strength": 0.1}),
)  # fmt: skip


def copies_of_base(base, members):
    return [add_adapters(copy.deepcopy(base)) for _ in range(members)]


def train_alone(network, x, y, steps, clip):
    """A plain loop: AdamW, with the gradient norm clipped."""
    optimiser = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=0.01)
    network.train()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.eval()  # frozen
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimiser.step()
    return network.eval()


def test_members_hold_the_base_itself_and_leave_it_as_it_was():
    base, (x, y) = small_base(WIDE), tiny.points()
    before = {name: (tensor, tensor.clone()) for name, tensor in base.state_dict(keep_vars=True).items()}
    posterior = ds.DeepEnsemble(add_adapters, members=5, base=base)
    adapters = storage_bytes(*posterior.particles.own_parameters().values())
    assert storage_bytes(base, posterior) <= storage_bytes(base) + adapters + 64  # buffers of the posterior itself
    ds.fit(posterior, [(x, y)], epochs=1, optimizer=torch.optim.SGD(posterior.parameters(), lr=0.1), progress=False)
    posterior.predict(x)
    assert storage_bytes(base, posterior) <= storage_bytes(base) + adapters + 64
    posterior.float()
    after = base.state_dict(keep_vars=True)
    assert all(after[name] is tensor and torch.equal(tensor, value) for name, (tensor, value) in before.items())
    assert all(p.requires_grad for p in base.parameters())


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_members_of_a_base_are_those_of_copies(kind, settings):
    base, (x, _) = small_base(), tiny.points()
    torch.manual_seed(1)
    shared = kind(add_adapters, members=3, base=base, **settings)
    torch.manual_seed(1)
    copied = kind(copies_of_base(base, 3), **settings)
    assert shared.config() == copied.config()
    torch.testing.assert_close(shared.predict(x).member_means, copied.predict(x).member_means, rtol=0, atol=1e-12)


@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_adapters_train_as_loops_over_copies_do(clip):
    base, (x, y) = small_base(), tiny.points()
    networks = copies_of_base(base, 3)
    alone = [train_alone(copy.deepcopy(network), x, y, 5, clip) for network in networks]
    given = iter(networks)

    def with_adapters(shell):  # with the same start
        made, known = add_adapters(shell), next(given)
        for name, parameter in made.named_parameters():
            if parameter.requires_grad:
                parameter.data = known.get_parameter(name).detach().clone()
        return made

    posterior = ds.DeepEnsemble(with_adapters, members=3, base=base)
    trained = [p for p in posterior.parameters() if p.requires_grad]
    ds.fit(posterior, [(x, y)] * 5, epochs=1, optimizer=torch.optim.AdamW(trained, lr=0.01), clip=clip, progress=False)
    # torch adds 1e-6 to the norm that it clips by
    expected = torch.stack([network(x).softmax(-1) for network in alone])
    torch.testing.assert_close(posterior.predict(x).member_means, expected, rtol=0, atol=1e-8)


def reset_first(base):
    base[0].reset_parameters()
    return add_adapters(base)


def test_a_base_that_members_would_train_or_change_is_refused():
    base = small_base()
    refuses(lambda: ds.DeepEnsemble(lambda shell: shell, members=2, base=base), "leave the base frozen, got '0.weight'")
    refuses(lambda: ds.DeepEnsemble(reset_first, members=2, base=base), "'0.weight' changed in place")
    refuses(lambda: ds.DeepEnsemble([base], base=base), "and base=Sequential with list")
    refuses(lambda: ds.DeepEnsemble(add_adapters, members=2, base=3), "members=2 and base=int with function")


DRAWN = (
    (ds.SWAG, {"samples": 2, "rank": 2}), (ds.TRADI, {"samples": 2}), (ds.SnapshotEnsemble, {"members": 2}),
    (ds.SGHMC, {"members": 3, "cycles": 1, "data_size": 12}),
)  # fmt: skip


@pytest.mark.parametrize(("drawn", "several"), thinned(DRAWN, [False, True], every=2))
def test_stored_draws_hold_what_is_frozen(drawn, several, tmp_path):
    (kind, settings), base, (x, y) = drawn, small_base(WIDE), tiny.points()
    networks = ds.DeepEnsemble(add_adapters, members=2, base=base).particles if several else add_adapters(base)
    posterior = kind(networks, **settings)
    ds.fit(posterior, [(x, y)] * 8, epochs=1, progress=False)
    ds.refresh(posterior, [(x, y)])
    posterior.eval()
    mean = posterior.predict(x).mean
    assert storage_bytes(posterior, base) < 1.5 * storage_bytes(base)
    ds.save(posterior, tmp_path)
    assert (tmp_path / "posterior.safetensors").stat().st_size < 1.5 * storage_bytes(base)
    loaded = ds.load(tmp_path, add_adapters(small_base(WIDE)))
    assert torch.equal(loaded.predict(x).mean, mean)
    assert storage_bytes(loaded) < 1.5 * storage_bytes(base)
    loaded.float()  # moved together
    assert storage_bytes(loaded) < 0.75 * storage_bytes(base)


MADE = (
    lambda base: ds.DeepEnsemble(add_adapters, members=3, base=base),
    lambda base: ds.MAP(add_adapters(copy.deepcopy(base))),
    lambda base: ds.SWAG(add_adapters(copy.deepcopy(base)), samples=2, rank=2),
    lambda base: ds.SWAG(ds.DeepEnsemble(add_adapters, members=2, base=base).particles, samples=2, rank=2),
)


@pytest.mark.parametrize("make", MADE)
def test_a_base_left_out_of_a_file_is_taken_from_the_one_given(make, tmp_path):
    base, (x, y) = small_base(WIDE), tiny.points()
    posterior = make(base)
    ds.fit(posterior, [(x, y)] * 8, epochs=1, progress=False)
    mean = posterior.eval().predict(x).mean
    ds.save(posterior, tmp_path, base="omit")
    assert (tmp_path / "posterior.safetensors").stat().st_size < 0.5 * storage_bytes(base)
    loaded = ds.load(tmp_path, add_adapters, base=base)
    assert torch.equal(loaded.predict(x).mean, mean)
    assert storage_bytes(loaded, base) < 1.5 * storage_bytes(base)  # it holds the base itself
    summary = ds.summarise(tmp_path, [(x, y)], network=add_adapters(copy.deepcopy(base)))
    torch.testing.assert_close(summary.mean, mean, rtol=0, atol=1e-12)
    written = read_posterior(tmp_path)[0]["omitted"]["checksum"]
    for other, got in ((small_base(WIDE), "[0-9a-f]{64}"), (nn.Linear(2, 2), "none")):
        network = add_adapters(other) if got != "none" else other
        refuses(lambda network=network: ds.load(tmp_path, network), f"leaves out, with checksum {written}, got {got};")
    refuses(lambda: ds.load(tmp_path, base, base=base), "function that makes the network", TypeError)


def test_there_must_be_a_base_to_leave_out(tmp_path):
    told = "frozen tensors that all members share, got none"
    refuses(lambda: ds.save(ds.MAP(tiny.mlp()), tmp_path, base="omit"), told)
    refuses(lambda: ds.save(ds.MAP(tiny.mlp()), tmp_path, base="none"), "keep")


def test_files_whose_draw_has_its_own_copy_of_the_base_are_read(tmp_path):
    (x, y), network = tiny.points(), add_adapters(small_base())
    posterior = ds.SWAG(network, samples=2, rank=2)
    ds.fit(posterior, [(x, y)] * 8, epochs=1, progress=False)
    ds.save(posterior, tmp_path)
    config, tensors = read_posterior(tmp_path)
    tensors |= {name: tensors[source].clone() for name, source in config["tied"].items()}
    data, _ = serialise_posterior(tensors, {**config, "tied": {}})
    (tmp_path / "posterior.safetensors").write_bytes(data)
    assert torch.equal(ds.load(tmp_path, network).predict(x).mean, posterior.eval().predict(x).mean)


FIFTY_MILLION = """
import resource, torch
import dissensus as ds
from adapters import add_adapters, storage_bytes

def run(width):
    base = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(10)), torch.nn.Linear(width, 3))
    posterior = ds.DeepEnsemble(add_adapters, members=5, base=base)
    x, y = torch.randn(4, width), torch.arange(4) % 3
    ds.fit(posterior, [(x, y)], epochs=1, validation=[(x, y)], progress=False)
    posterior.predict(x)
    return storage_bytes(base), storage_bytes(base, posterior)

run(64)  # loads what torch loads once
with open("/proc/self/status") as status:
    before = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
base, held = run(2230)
print(base, held / base, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / base)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_five_adapters_on_fifty_million_weights_take_a_tenth_more_memory_at_most():
    """In a process of its own: tensors by storage, and the growth of resident memory to its peak."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(ds.__file__).parents[1])])
    started = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-c", FIFTY_MILLION]
    done = subprocess.run(call, env=started, capture_output=True, text=True, check=True)
    size, by_storage, by_peak = map(float, done.stdout.split()[-3:])
    assert size > 49.7e6 * 4
    assert by_storage <= 1.02
    assert by_peak <= 1.1
