"""Train residual networks of any depth in constant memory.

A residual stage  x[n+1] = x[n] + h f(x[n], θ[n])  is run backwards in time in the backward pass:
activations are reconstructed instead of stored. See docs/guide.md for when that works.
"""

from importlib.metadata import version

__version__ = version("resode_kernels")

from . import functional, models
from .backends import BackendUnavailableError, MissingKernelsWarning
from .depth import deepen, untie
from .diagnostics import (
    GradientErrorWarning,
    ModelReport,
    Report,
    Setting,
    diagnose,
    input_of,
    monitor,
    tune,
)
from .nonfinite import NonFiniteReconstructionError, NonFiniteReconstructionWarning
from .options import StageOptions
from .stages import ConvStage, LinearStage, MLPStage, ResidualStage, Stage, residual_branch

__all__ = [
    "BackendUnavailableError",
    "ConvStage",
    "GradientErrorWarning",
    "LinearStage",
    "MLPStage",
    "MissingKernelsWarning",
    "ModelReport",
    "NonFiniteReconstructionError",
    "NonFiniteReconstructionWarning",
    "Report",
    "ResidualStage",
    "Setting",
    "Stage",
    "StageOptions",
    "deepen",
    "diagnose",
    "functional",
    "input_of",
    "models",
    "monitor",
    "residual_branch",
    "tune",
    "untie",
]
