"""The theory of wide ensembles: what they will do, computed before they are trained."""

from dissensus.theory.activations import Activation, Smooth, activation_of
from dissensus.theory.blocks import EnsembleBlocks, ensemble_blocks, posterior_blocks
from dissensus.theory.descent import residuals
from dissensus.theory.dynamics import EnsembleDynamics, EnsembleLaw, ensemble_dynamics
from dissensus.theory.embedded import EmbeddedKernels, embedded_kernels
from dissensus.theory.embedded_network import EmbeddedNetwork
from dissensus.theory.empirical import empirical_ntk
from dissensus.theory.kernel import Kernels, kernel
from dissensus.theory.random_network import random_network
from dissensus.theory.regime import Regime, regime
from dissensus.theory.regression import gp_predict
from dissensus.theory.toy import ToyLosses, largest_eigenvalue, optimal_members, toy_losses, toy_spectrum, transition
from dissensus.theory.training import train_embedded

__all__ = [
    "Activation",
    "EmbeddedKernels",
    "EmbeddedNetwork",
    "EnsembleBlocks",
    "EnsembleDynamics",
    "EnsembleLaw",
    "Kernels",
    "Regime",
    "Smooth",
    "ToyLosses",
    "activation_of",
    "embedded_kernels",
    "empirical_ntk",
    "ensemble_blocks",
    "ensemble_dynamics",
    "gp_predict",
    "kernel",
    "largest_eigenvalue",
    "optimal_members",
    "posterior_blocks",
    "random_network",
    "regime",
    "residuals",
    "toy_losses",
    "toy_spectrum",
    "train_embedded",
    "transition",
]
