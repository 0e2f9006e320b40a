"""Your own training loop: gradient accumulation, a schedule, and what every member is doing.

A posterior is an `nn.Module`: one optimiser trains all members, each as it would train alone. `backward` gives each
member's loss and adds to `.grad`, so accumulating over batches is what it always was. The table shows what an ensemble
gains: the mixture's loss lies below the mean of its members' by exactly their disagreement about the true label.

    python examples/own_loop.py
"""

from __future__ import annotations

import argparse

import torch

import dissensus as ds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per step")
    parser.add_argument("--quick", action="store_true", help="a second's worth, to see that it runs")
    options = parser.parse_args()
    rows, epochs = (1000, 2) if options.quick else (6000, 6)

    torch.manual_seed(0)
    digits, test_digits = ds.data.digits()
    standardise = ds.data.Standardiser.of_channels(digits.images)
    images, labels = standardise(digits.images[:rows]), digits.labels[:rows]
    loader = ds.data.Batches(images, labels, batch_size=50, shuffle=True, seed=0)
    x_test, y_test = standardise(test_digits.images), test_digits.labels

    ensemble = ds.DeepEnsemble([ds.nets.MLP(28 * 28, 10, hidden=(100,)) for _ in range(options.members)])
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader) // options.accumulate)

    seen = 0  # batches, over all epochs: what is left at the end of one goes into the first step of the next
    print(f"{'epoch':>5}  {'train loss of each':28}{'test: members':>14}{'mixture':>9}{'gain':>8}{'accuracy':>10}")
    for epoch in range(epochs):
        ensemble.train()
        losses = torch.zeros(options.members)
        for x, y in loader:
            losses += ensemble.backward(x, y).detach()  # (M,); the same gradients as ensemble.loss(x, y).backward()
            seen += 1
            if seen % options.accumulate == 0:
                for parameter in ensemble.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= options.accumulate  # the mean over batches, not their sum
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                ensemble.observe(optimizer)  # the method's clock; an ensemble has nothing to do, SWAG would
        predictive = ensemble.predict(x_test)  # in eval mode, which ends when it returns
        gain = ds.metrics.ensemble_gain(predictive.log_probs, y_test)
        accuracy = ds.metrics.accuracy(predictive.mean, y_test)
        each = " ".join(f"{loss:.3f}" for loss in losses / len(loader))
        print(
            f"{epoch:5}  {each:28}{gain.member_nll:14.4f}{gain.mixture_nll:9.4f}{gain.diversity:8.4f}{accuracy:10.4f}"
        )


if __name__ == "__main__":
    main()
