"""Batch normalization with the activation around it, and its VJP (csrc/cuda/normalization.cu, which
has the formulas). z is [images, channels, height, width], dense; tensors are float32, float16 or
bfloat16 and arithmetic is in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..layerwise import Normalization
from ..rows import laid_out_like
from .arguments import array, rows_of
from .gpu import gpu_of, module

# CTAs in the first stage of a reduction: several for each multiprocessor of a large GPU. The number
# is constant because it decides the order of summation.
PROGRAMS = 1024


def _arguments(normalization: Normalization) -> tuple[object, ...]:
    return *(array(t) for t in normalization[:4]), normalization.epsilon


def _in_workspace(run: Callable[[int], int], like: Tensor) -> None:
    """Calls ``run`` in a workspace. With the address 0 it only returns the bytes it needs."""
    workspace = like.new_empty(run(0), dtype=torch.uint8)
    run(workspace.data_ptr())


def _per_channel(z: Tensor) -> Tensor:
    """Memory for two numbers per channel."""
    return z.new_empty((2, z.shape[1]), dtype=torch.float32)


def statistics(z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel."""
    mean, variance = _per_channel(z)
    arguments = gpu_of(z), rows_of(z), array(z), mean.data_ptr(), variance.data_ptr(), PROGRAMS
    _in_workspace(lambda workspace: module().statistics(*arguments, workspace), z)
    return mean, variance


def normalized(
    z: Tensor, normalization: Normalization, activation: str | None, dtype: torch.dtype
) -> Tensor:
    """σ(γ (z − μ) r + β), without σ if ``activation`` is None."""
    out = torch.empty_like(z, dtype=dtype)
    module().normalize(
        gpu_of(z),
        rows_of(z),
        array(out),
        array(z),
        _arguments(normalization),
        activation or "identity",
    )
    return out


def vjp(
    d: Tensor, z: Tensor, normalization: Normalization, of_batch: bool, activation: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dz in z's dtype, dγ and dβ, from d = ∂L/∂a. ``of_batch``: μ and v are z's own."""
    d, dz = laid_out_like(d, z), torch.empty_like(z)
    d_gamma, d_beta = _per_channel(z)
    arguments = (
        gpu_of(z), rows_of(z), array(dz), d_gamma.data_ptr(), d_beta.data_ptr(), array(d), array(z),
        _arguments(normalization), of_batch, activation or "identity", PROGRAMS,
    )  # fmt: skip
    _in_workspace(lambda workspace: module().normalization_vjp(*arguments, workspace), z)
    return dz, d_gamma, d_beta
