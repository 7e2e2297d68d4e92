"""Stages layer by layer, between PyTorch's products by Triton's kernels."""

from __future__ import annotations

from ..layerwise import Kernels, kit, passes
from .elementwise import activated, combine, slope_term, times_slope
from .normalization import normalized, statistics, vjp

KERNELS = Kernels(combine, activated, times_slope, slope_term, statistics, normalized, vjp)
FUSED = kit(KERNELS)

forward, reverse = passes(FUSED)
