"""Stages layer by layer, on a GPU: the engine with PyTorch's matrix products and convolutions, and
fused kernels for everything between them. Triton and CUDA have such kernels.

Products are computed in the dtype of the weights. With 16-bit weights the operands are rounded to
that dtype; states and cotangents stay float32. With float32 weights PyTorch's own setting decides
about TF32. Several contributions to a parameter gradient are summed in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..kinks import Activation
from ..problem import Problem
from .contract import ReverseIO
from .engine import EngineBackend
from .rows import dense, laid_out_like

DEPTH_FUSED = ("mlp", "linear")
"""Blocks that cuda and triton can run depth-fused. All others run layer by layer."""


def can_be_depth_fused(problem: Problem) -> bool:
    """Whether cuda and triton have depth-fused kernels for the problem. For recorded increments
    and for the signs of relu's arguments they have none yet."""
    return problem.block in DEPTH_FUSED and not problem.is_recorded and not problem.keeps_signs


class Normalization(NamedTuple):
    """The numbers by which channels are normalized. Each tensor has one number per channel."""

    mean: Tensor
    variance: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    epsilon: float


class Kernels(NamedTuple):
    """The kernels between products and convolutions. z and d are [rows, channels] or
    [images, channels, height, width]; other tensors have one number per channel."""

    combine: reference.Combine
    activated: Callable[..., Tensor]
    """(z, bias or None, activation, dtype of the result if it is not z's) → σ(z + b)."""
    times_slope: Callable[[Tensor, Tensor, Tensor | None, str], Tensor]
    """(d, z, bias, activation) → d · σ′(z + b)."""
    slope_term: Callable[[Tensor, Tensor, str], Any]
    """(d, z, activation) → d · σ′(z), in a form that ``combine`` takes."""
    statistics: Callable[[Tensor], tuple[Tensor, Tensor]]
    """z → mean and biased variance."""
    normalized: Callable[[Tensor, Normalization, str | None, torch.dtype], Tensor]
    """(z, its normalization, activation or None, dtype of the result) → σ(bn(z))."""
    vjp: Callable[[Tensor, Tensor, Normalization, bool, str | None], tuple[Tensor, Tensor, Tensor]]
    """(d = ∂L/∂σ(bn(z)), z, its normalization, whether that uses z's own mean and variance,
    activation) → dz, dγ and dβ."""


class MLP(reference.MLP):
    """f(x) = W2 σ(W1 x + b1) + b2. Bias and σ take one pass over memory, and so does their VJP; but
    where signs are kept, PyTorch computes both."""

    def __init__(self, kernels: Kernels, *theta: Any, **signs: Any) -> None:
        super().__init__(*theta, **signs)
        self.kernels = kernels

    def f(self, x: Tensor, k: int) -> Tensor:
        x = x.to(self.w1.dtype)
        if self.signs is not None:
            return super().f(x, k)
        z = F.linear(x, self.w1)
        return F.linear(self.kernels.activated(z, self.b1, self.activation), self.w2, self.b2)

    def linearize(
        self, x: Tensor, k: int, wrt_x: bool = True, value: bool = True
    ) -> tuple[Tensor | None, reference.Pullback]:
        x = x.to(self.w1.dtype)
        if self.signs is not None:
            y, pullback_of_signs = super().linearize(x, k, wrt_x, value)
            return y, lambda g: pullback_of_signs(g.to(self.w2.dtype))
        z = F.linear(x, self.w1)
        u = self.kernels.activated(z, self.b1, self.activation)

        def pullback(g: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            d_b2 = g.sum(0)
            g = g.to(self.w2.dtype)
            dz = self.kernels.times_slope(g @ self.w2, z, self.b1, self.activation)
            d_b1 = dz.sum(0, dtype=d_b2.dtype)
            return dz @ self.w1, (dz.T @ x, d_b1, g.T @ u, d_b2)

        return F.linear(u, self.w2, self.b2) if value else None, pullback


class Linear(reference.Linear):
    """f(x) = θ x."""

    def f(self, x: Tensor, k: int) -> Tensor:
        return super().f(x.to(self.weight.dtype), k)

    def linearize(
        self, x: Tensor, k: int, wrt_x: bool = True, value: bool = True
    ) -> tuple[Tensor | None, reference.Pullback]:
        y, pullback = super().linearize(x.to(self.weight.dtype), k, value=value)
        return y, lambda g: pullback(g.to(self.weight.dtype))


class Evaluated(NamedTuple):
    """An evaluated layer of ``Conv``: z = W ∗ a, u = bn(z)."""

    z: Tensor
    normalization: Normalization
    of_batch: bool
    """Whether z is normalized by its own mean and variance."""
    activation: str | None
    """The activation of the next layer; None: this layer is the last, or signs are kept."""

    def moments(self) -> tuple[Tensor, Tensor] | None:
        """Mean and unbiased variance of the batch, if z is normalized by them."""
        values = self.z.numel() // self.z.shape[1]
        if not self.of_batch:
            return None
        return self.normalization.mean, self.normalization.variance * values / (values - 1)


class Conv(reference.Conv):
    """f(x) = u_L, u_l = bn_l(z_l), z_l = W_l ∗ σ(u_{l−1}). Between the convolutions there is one
    pass over memory for the statistics and one for everything else, but for σ where signs are kept.
    A layer stores only z; the VJP computes σ(u) from it again."""

    def __init__(self, kernels: Kernels, *arguments: Any, **signs: Any) -> None:
        super().__init__(*arguments, **signs)
        self.kernels = kernels

    def f(self, x: Tensor, k: int) -> Tensor:
        if self.statistics is None:
            return self.forward(x, k)
        moments: list[tuple[Tensor, Tensor] | None] = []
        y = self.forward(x, k, lambda layer: moments.append(layer.moments()))
        self.note(k, moments)
        return y

    def forward(
        self,
        x: Tensor,
        k: int,
        watch: Callable[[Evaluated], None] = lambda _: None,
        watch_signs: Callable[[Activation], None] = lambda _: None,
    ) -> Tensor:
        """f(x). ``watch`` is called with every layer, ``watch_signs`` (where signs are kept) with σ
        and σ' of every layer's input."""
        of_signs, activation_at = self.signs is not None, self.activation_at(k)

        def by_signs(u: Tensor) -> Tensor:
            activation = activation_at(u)
            watch_signs(activation)
            return activation[0](u)

        dtype = self.layers[0][0].dtype
        if of_signs:
            a = by_signs(x).to(dtype)
        else:
            a = self.kernels.activated(x, None, self.activation, dtype)
        fused = None if of_signs else self.activation
        following = [*[fused] * (len(self.layers) - 1), None]
        for i, ((weight, gamma, beta, mean, variance), activation) in enumerate(
            zip(self.layers, following, strict=True)
        ):
            is_last = i == len(self.layers) - 1
            z, of_batch = dense(F.conv2d(a, weight, padding="same")), mean is None
            del a  # no longer needed: frees memory for the next one
            if of_batch:
                mean, variance = self.kernels.statistics(z)
            normalization = Normalization(mean, variance, gamma, beta, self.epsilon)
            layer = Evaluated(z, normalization, of_batch, activation)
            a = self.result(layer, x.dtype if is_last else z.dtype)
            if of_signs and not is_last:
                a = by_signs(a)
            watch(layer)
        return a

    def result(self, layer: Evaluated, dtype: torch.dtype) -> Tensor:
        """σ(u); u for the last layer, or where signs are kept."""
        return self.kernels.normalized(layer.z, layer.normalization, layer.activation, dtype)

    def linearize(
        self, x: Tensor, k: int, wrt_x: bool = True, value: bool = True
    ) -> tuple[Tensor, reference.Pullback]:
        trace: list[Evaluated] = []
        by_signs: list[Activation] = []
        y = self.forward(x, k, trace.append, by_signs.append)

        def pullback(g: Tensor) -> tuple[Any, tuple[Tensor | None, ...]]:
            grads: list[Tensor | None] = []
            for i in reversed(range(len(trace))):
                layer, weight = trace[i], self.layers[i][0]
                dz, d_gamma, d_beta = self.kernels.vjp(g, *layer)
                a = self.result(trace[i - 1], weight.dtype) if i else x
                if by_signs:
                    sigma, slope = by_signs[i]
                    g, d_weight = convolution_vjp(dz, sigma(a).to(weight.dtype), weight)
                    g = g * slope(g)
                else:
                    if not i:
                        a = self.kernels.activated(x, None, self.activation, weight.dtype)
                    g, d_weight = convolution_vjp(dz, a, weight)
                grads = [d_weight, d_gamma, d_beta, None, None, *grads]
            gx = g if by_signs else self.kernels.slope_term(g, x, self.activation)
            return gx, tuple(grads)

        return y, pullback


def convolution_vjp(dz: Tensor, a: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a and of the weight."""
    one, zero, same = (1, 1), (0, 0), (weight.shape[-1] // 2,) * 2
    with repeatable():
        da, d_weight, _ = torch.ops.aten.convolution_backward(
            dz, a, weight, None, one, same, one, False, zero, 1, (True, True, False)
        )
    return da, d_weight


@contextmanager
def repeatable() -> Iterator[None]:
    """Context in which cuDNN uses only algorithms whose results repeat from run to run."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


class LayerwiseBackend(EngineBackend):
    """The engine with the blocks of this file and the given kernels."""

    def __init__(self, name: str, kernels: Kernels) -> None:
        super().__init__(
            name,
            mlp=functools.partial(MLP, kernels),
            linear=Linear,
            conv=functools.partial(Conv, kernels),
            combine=kernels.combine,
            widens=False,
        )
        self.kernels = kernels

    def reverse(self, problem: Problem, io: ReverseIO) -> None:
        start = dense(io.start)
        # States and cotangents with the same layout can be combined in one pass.
        cotangent = laid_out_like(io.cotangent, start)
        super().reverse(problem, io._replace(start=start, cotangent=cotangent))
