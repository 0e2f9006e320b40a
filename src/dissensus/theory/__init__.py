"""The theory of wide ensembles: predicts their behaviour before they are trained."""

# ruff: noqa: F403, F405 - the names of __all__ are those of the files below
from dissensus.landscape.sharpness import sharpness
from dissensus.theory.activations import Activation, Smooth, activation_of
from dissensus.theory.dynamics import EnsembleDynamics, EnsembleLaw, ensemble_dynamics, residuals
from dissensus.theory.embedded_ensembles import EmbeddedKernels, EmbeddedNetwork, embedded_kernels, train_embedded
from dissensus.theory.empirical_kernels import EnsembleBlocks, empirical_ntk, ensemble_blocks, posterior_blocks
from dissensus.theory.linear_model import *
from dissensus.theory.regime import Regime, regime
from dissensus.theory.wide_kernel import Kernels, gp_predict, kernel, random_network

__all__ = [
    "Activation", "EmbeddedKernels", "EmbeddedNetwork", "EnsembleBlocks", "EnsembleDynamics", "EnsembleLaw", "Kernels",
    "Regime", "Smooth", "ToyLosses", "activation_of", "embedded_kernels", "empirical_ntk", "ensemble_blocks",
    "ensemble_dynamics", "gp_predict", "kernel", "largest_eigenvalue", "optimal_members", "posterior_blocks",
    "random_network", "regime", "residuals", "sharpness", "toy_losses", "toy_spectrum", "train_embedded", "transition",
]  # fmt: skip
