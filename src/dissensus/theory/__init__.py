"""The theory of wide ensembles: predicts their behaviour before they are trained."""

from dissensus.landscape.sharpness import sharpness as sharpness
from dissensus.theory.activations import Activation as Activation
from dissensus.theory.activations import Smooth as Smooth
from dissensus.theory.activations import activation_of as activation_of
from dissensus.theory.dynamics import EnsembleDynamics as EnsembleDynamics
from dissensus.theory.dynamics import EnsembleLaw as EnsembleLaw
from dissensus.theory.dynamics import ensemble_dynamics as ensemble_dynamics
from dissensus.theory.dynamics import residuals as residuals
from dissensus.theory.embedded_ensembles import EmbeddedKernels as EmbeddedKernels
from dissensus.theory.embedded_ensembles import EmbeddedNetwork as EmbeddedNetwork
from dissensus.theory.embedded_ensembles import embedded_kernels as embedded_kernels
from dissensus.theory.embedded_ensembles import train_embedded as train_embedded
from dissensus.theory.empirical_kernels import EnsembleBlocks as EnsembleBlocks
from dissensus.theory.empirical_kernels import empirical_ntk as empirical_ntk
from dissensus.theory.empirical_kernels import ensemble_blocks as ensemble_blocks
from dissensus.theory.empirical_kernels import posterior_blocks as posterior_blocks
from dissensus.theory.linear_model import ToyLosses as ToyLosses
from dissensus.theory.linear_model import largest_eigenvalue as largest_eigenvalue
from dissensus.theory.linear_model import optimal_members as optimal_members
from dissensus.theory.linear_model import toy_losses as toy_losses
from dissensus.theory.linear_model import toy_spectrum as toy_spectrum
from dissensus.theory.linear_model import transition as transition
from dissensus.theory.regime import Regime as Regime
from dissensus.theory.regime import regime as regime
from dissensus.theory.wide_kernel import Kernels as Kernels
from dissensus.theory.wide_kernel import gp_predict as gp_predict
from dissensus.theory.wide_kernel import kernel as kernel
from dissensus.theory.wide_kernel import random_network as random_network

__all__ = sorted(
    {"sharpness", *(k for k, value in globals().items() if getattr(value, "__module__", "").startswith(__name__))}
)
