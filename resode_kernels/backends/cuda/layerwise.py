"""Stages layer by layer, by the CUDA kernels between PyTorch's products."""

from __future__ import annotations

from ..layerwise import Kernels, LayerwiseBackend
from .elementwise import activated, combine, slope_term, times_slope
from .normalization import normalized, statistics, vjp

KERNELS = Kernels(combine, activated, times_slope, slope_term, statistics, normalized, vjp)
LAYERWISE = LayerwiseBackend("cuda", KERNELS)
