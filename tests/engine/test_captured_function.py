"""Prediction from graphs, and members in lanes: where there is no GPU both are what they were before."""

from contextlib import nullcontext

import torch
from torch import nn

import dissensus as ds
from dissensus.core.particles import Particles
from dissensus.data import Batches
from dissensus.engine.captured_function import CapturedFunction


def networks(count: int = 3) -> list[nn.Module]:
    return [nn.Sequential(nn.Conv1d(2, 3, 1), nn.Flatten(), nn.Linear(12, 4)) for _ in range(count)]


def test_looped_members_each_run_in_their_lane_and_are_waited_for() -> None:
    particles = Particles.stack(networks(), ds.Classification())
    x, happened = torch.randn(5, 2, 4), []

    def lane(index: int):
        happened.append(index)
        return nullcontext()

    plain = particles.each(lambda member, inputs: member.network(inputs), x)
    with particles.runner.in_lanes((lane, lambda: happened.append("joined"))):
        beside = particles.each(lambda member, inputs: member.network(inputs), x)
    again = particles.each(lambda member, inputs: member.network(inputs), x)
    assert happened == [0, 1, 2, "joined"]
    assert torch.equal(plain, beside)
    assert torch.equal(plain, again)


def test_without_a_gpu_every_call_is_a_plain_one_in_its_context() -> None:
    posterior = ds.DeepEnsemble(networks())
    drawn, entered = posterior.draw(), []

    def context():
        entered.append(True)
        return nullcontext()

    captured = CapturedFunction(drawn.describe, drawn, context)
    x = torch.randn(5, 2, 4)
    for _ in range(5):
        assert torch.equal(captured(x)[0], drawn.describe(x)[0])
    assert len(entered) == 5
    assert not captured.graphs


def test_predicted_batches_leave_the_modes_as_they_were_between_them() -> None:
    posterior = ds.DeepEnsemble(networks()).train()
    loader = Batches(torch.randn(9, 2, 4), torch.randint(4, (9,)), batch_size=3)
    for predictive, _ in ds.predict_batches(posterior, loader):
        assert posterior.training
        assert torch.is_grad_enabled()
        assert not predictive.mean.requires_grad
