"""Why FoRDE's repulsion deviates in bf16: units whose sign the rounding changes; CSV out.

    python benchmarks/bf16_repulsion.py --csv benchmarks/results/bf16_repulsion.csv

Three small convolutional networks on digits from the package, before training and after `--steps` steps. In bf16, and in
float32 with noise as large as bf16's rounding on the output of every convolution: the deviation ‖a − b‖ / ‖b‖ from float32 of
the likelihood's gradient, of the input gradients' directions, and of the repulsion's gradient by the weights; and the share of
ReLUs that open or close. GELU is smooth, so nothing opens or closes.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from rows import Row, made_on, write_rows
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import dissensus as ds
from dissensus.core.batch import Batch
from dissensus.core.gradients import backward, cotangents, detached_state

MEMBERS, SIZE = 3, 128
ROUNDING = 2.0**-9 / 3**0.5  # standard deviation of bf16's relative rounding error, uniform within ± 2⁻⁹
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"ReLU": nn.ReLU, "GELU": nn.GELU}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    facts = made_on(device)
    rows: list[Row] = []
    for seed in range(given.seeds):
        for activation in ACTIVATIONS:
            for normed in (False, True):
                for row in study(activation, normed, given.steps, seed, device):
                    rows.append(row | {"seed": seed} | facts)
                    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                    if given.csv is not None:
                        write_rows(given.csv, rows)


def study(activation: str, normed: bool, steps: int, seed: int, device: torch.device) -> Iterator[Row]:
    torch.manual_seed(seed)
    train = ds.data.digits()[0]
    x, y = train.images.to(device, torch.float32) / 255, train.labels.to(device)
    x = (x - x.mean()) / x.std()
    posterior = ds.FoRDE([network(activation, normed) for _ in range(MEMBERS)]).to(device).train()
    optimizer = torch.optim.Adam(posterior.parameters(), lr=1e-3)
    batch = Batch(x[:SIZE], y[:SIZE])
    for after in (0, steps):
        for _ in range(after):
            at = torch.randint(len(x), (SIZE,), device=device)
            optimizer.zero_grad()
            backward(posterior, Batch(x[at], y[at]))
            optimizer.step()
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            exact = found(posterior, batch, nullcontext)
            for how, context in (
                ("bf16", lambda: torch.autocast(device.type, dtype=torch.bfloat16)),
                ("float32 with noise", lambda: noise(posterior)),
            ):
                other = found(posterior, batch, context)
                far = {
                    name: f"{apart(other[name], exact[name]):.4f}" for name in ("likelihood", "directions", "repulsion")
                }
                flipped = float((other["open"] != exact["open"]).double().mean())
                yield {
                    "activation": activation, "batch norm": normed, "steps": after, "how": how, **far,
                    "flipped": f"{flipped:.5f}",
                }  # fmt: skip


def network(activation: str, normed: bool) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 1
    for width, stride in ((16, 1), (16, 1), (32, 2), (32, 1), (64, 2), (64, 1)):
        layers += [nn.Conv2d(channels, width, 3, stride, 1), *([nn.BatchNorm2d(width)] if normed else [])]
        layers += [ACTIVATIONS[activation]()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def found(posterior: ds.FoRDE, batch: Batch, context: Callable[..., object]) -> dict[str, Tensor]:
    """Gradients by the weights of the likelihood and of the repulsion, directions of input gradients, and open units."""
    state, results, opened = detached_state(posterior), [], []
    hooks = [
        part.register_forward_pre_hook(lambda _, given: opened.append(given[0].detach().flatten() > 0))
        for part in posterior.particles.template.modules()
        if isinstance(part, tuple(ACTIVATIONS[name] for name in ACTIVATIONS))  # type: ignore[arg-type]
    ]
    for i in range(MEMBERS):
        mine = state.member(i)
        leaves = mine.leaves()
        with context(), torch.enable_grad():  # type: ignore[attr-defined]
            results.append((leaves, *posterior.member_loss(mine.parameters(leaves), mine.buffers(), batch)[:2]))
    for hook in hooks:
        hook.remove()
    z = pytree.tree_map(lambda *parts: torch.stack(parts), *(z for _, _, z in results))
    v = cotangents(posterior, z)["gradients"]
    likelihood, repulsion = [], []
    for i, (leaves, value, z) in enumerate(results):
        weights = list(leaves.values())
        likelihood += torch.autograd.grad(value, weights, retain_graph=True, materialize_grads=True)
        repulsion += torch.autograd.grad(z["gradients"], weights, v[i].to(z["gradients"].dtype), materialize_grads=True)
    g = torch.stack([z["gradients"].detach().double() for _, _, z in results])
    return {
        "likelihood": torch.cat([each.double().flatten() for each in likelihood]),
        "repulsion": torch.cat([each.double().flatten() for each in repulsion]),
        "directions": g / g.norm(dim=-1, keepdim=True),
        "open": torch.cat(opened),
    }


@contextmanager
def noise(posterior: ds.FoRDE) -> Iterator[None]:
    """Inside, outputs of convolutions have relative noise as large as bf16's rounding."""
    hooks = [
        part.register_forward_hook(lambda _, __, out: out * (1 + ROUNDING * torch.randn_like(out)))
        for part in posterior.particles.template.modules()
        if isinstance(part, nn.Conv2d)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


if __name__ == "__main__":
    main()
