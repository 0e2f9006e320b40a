"""What a wide ensemble will do, computed before it is trained: members that share weights, in both regimes.

    python examples/wide_limit.py
    python examples/wide_limit.py --out wide_limit.png

Four members share the weights of a two-layer ReLU network and differ by factors u on their hidden units. Random signs make them
independent; dropout masks tie them together. The kernels say so without a network; then one is trained and compared.
"""

import argparse
from functools import partial
from pathlib import Path

import torch

import dissensus as ds
from dissensus import theory

MEMBERS, STEPS = 4, 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a narrow network")
    parser.add_argument("--out", type=Path, help="draw the training curves")
    arguments = parser.parse_args()
    width = 300 if arguments.quick else 1500
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    one = ds.Modulation.constant(1.0)
    regimes = {
        "independent": (ds.Modulation.sign(), "both", float(MEMBERS)),
        "collective": (ds.Modulation.bernoulli(0.8), "none", 1.0),
    }
    print(f"{'regime':<12}{'K_o/K_d':>10}{'Theta_o/d':>11}{'stable rate':>13}{'error %':>9}")
    curves = {}
    for name, (u, trained, gamma) in regimes.items():
        law = {"depth": 2, "activation": "relu", "u": u, "v": one, "weight_variance": 2.0}
        kernels = partial(theory.embedded_kernels, trained=trained, **law)
        # Before any network: are members related, and how fast may they be trained?
        found = kernels(x)
        related = [float(found.gp_cross[0, 0] / found.gp_same[0, 0])]
        related.append(float(found.common_cross[0, 0] / found.common_same[0, 0]))
        dynamics = theory.ensemble_dynamics(x, y, kernels=kernels, members=MEMBERS, gamma=gamma)
        rate = dynamics.largest_rate / 20
        # A network of finite width, trained.
        network = theory.EmbeddedNetwork.draw(4, width=width, members=MEMBERS, generator=generator, **law)
        outputs, _ = theory.train_embedded(
            network, x, y, steps=STEPS, learning_rate=rate, gamma=gamma, train_modulations=trained == "both"
        )
        predicted = dynamics.members(outputs[0], range(STEPS + 1), learning_rate=rate, descent="steps")
        error = (outputs - predicted).flatten(1).norm(dim=1).max() / (outputs[0] - y).norm()
        print(f"{name:<12}{related[0]:>10.3f}{related[1]:>11.3f}{dynamics.largest_rate:>13.3f}{100 * error:>9.1f}")
        curves[name] = (outputs, predicted)
    if arguments.out:
        draw(curves, arguments.out)


def draw(curves: dict[str, tuple[torch.Tensor, torch.Tensor]], path: Path) -> None:
    """Outputs of all members at the first input, trained (dots) and predicted (lines)."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for axes, (name, (outputs, predicted)) in zip(panels, curves.items(), strict=True):
        axes.plot(predicted[:, :, 0, 0])
        axes.set_prop_cycle(None)
        axes.plot(range(0, STEPS + 1, 4), outputs[::4, :, 0, 0], ".")
        axes.set(title=name, xlabel="steps", ylabel="members' output at one input")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
