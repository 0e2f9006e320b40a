"""The theory of wide ensembles: what they will do, computed before they are trained."""

from dissensus.theory.activations import Activation, Smooth, activation_of
from dissensus.theory.embedded import EmbeddedKernels, embedded_kernels

__all__ = ["Activation", "EmbeddedKernels", "Smooth", "activation_of", "embedded_kernels"]
