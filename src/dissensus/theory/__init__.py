"""The theory of wide ensembles: what they will do, computed before they are trained."""

from dissensus.theory.activations import Activation, Smooth, activation_of
from dissensus.theory.blocks import EnsembleBlocks, ensemble_blocks
from dissensus.theory.embedded import EmbeddedKernels, embedded_kernels
from dissensus.theory.embedded_network import EmbeddedNetwork
from dissensus.theory.empirical import empirical_ntk
from dissensus.theory.kernel import Kernels, kernel
from dissensus.theory.random_network import random_network

__all__ = [
    "Activation",
    "EmbeddedKernels",
    "EmbeddedNetwork",
    "EnsembleBlocks",
    "Kernels",
    "Smooth",
    "activation_of",
    "embedded_kernels",
    "empirical_ntk",
    "ensemble_blocks",
    "kernel",
    "random_network",
]
