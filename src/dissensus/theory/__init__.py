"""The theory of wide ensembles: what they will do, computed before they are trained."""

from dissensus.theory.activations import Activation, Smooth, activation_of
from dissensus.theory.embedded import EmbeddedKernels, embedded_kernels
from dissensus.theory.kernel import Kernels, kernel

__all__ = ["Activation", "EmbeddedKernels", "Kernels", "Smooth", "activation_of", "embedded_kernels", "kernel"]
