"""Stages layer by layer: the reference's engine with PyTorch's matrix products and convolutions,
and fused kernels for everything between them.

Products are in the dtype of the weights: with 16-bit weights their operands are rounded to it and
states and cotangents stay float32; with float32 weights PyTorch's own setting decides about TF32.
Parameter gradients are summed in float32 where a block has several contributions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import reference
from .. import reference as engine
from .elementwise import activated, combine, times_slope
from .normalization import Normalization, normalized, statistics, vjp
from .rows import dense


class MLP(reference.MLP):
    """f(x) = W2 σ(W1 x + b1) + b2: bias and σ in one pass, and so its VJP."""

    def f(self, x: Tensor, k: int) -> Tensor:
        z = F.linear(x.to(self.w1.dtype), self.w1)
        return F.linear(activated(z, self.b1, self.activation), self.w2, self.b2)

    def linearize(self, x: Tensor, k: int, wrt_x: bool = True) -> tuple[Tensor, reference.Pullback]:
        x = x.to(self.w1.dtype)
        z = F.linear(x, self.w1)
        u = activated(z, self.b1, self.activation)

        def pullback(g: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            d_b2 = g.sum(0)
            g = g.to(self.w2.dtype)
            dz = times_slope(g @ self.w2, z, self.b1, self.activation)
            d_b1 = dz.sum(0, dtype=d_b2.dtype)
            return dz @ self.w1, (dz.T @ x, d_b1, g.T @ u, d_b2)

        return F.linear(u, self.w2, self.b2), pullback


class Linear(reference.Linear):
    """f(x) = θ x."""

    def f(self, x: Tensor, k: int) -> Tensor:
        return super().f(x.to(self.weight.dtype), k)

    def linearize(self, x: Tensor, k: int, wrt_x: bool = True) -> tuple[Tensor, reference.Pullback]:
        y, pullback = super().linearize(x.to(self.weight.dtype), k)
        return y, lambda g: pullback(g.to(self.weight.dtype))


class Evaluated(NamedTuple):
    """A layer of ``Conv`` at some x: u = bn(z), z = W ∗ a."""

    z: Tensor
    by: Normalization
    of_batch: bool
    """Whether z is normalized by its own mean and variance."""
    activation: str | None
    """σ of the layer that follows; None: it is the last."""

    def result(self, dtype: torch.dtype) -> Tensor:
        """σ(u), of the last layer u."""
        return normalized(self.z, self.by, self.activation, dtype)

    def moments(self) -> tuple[Tensor, Tensor] | None:
        """Mean and unbiased variance of the batch, if z is normalized by them."""
        values = self.z.numel() // self.z.shape[1]
        return (self.by.mean, self.by.variance * values / (values - 1)) if self.of_batch else None


class Conv(reference.Conv):
    """f(x) = u_L, u_l = bn_l(z_l), z_l = W_l ∗ σ(u_{l−1}). Between the convolutions there is one
    pass for the statistics and one for everything else. Of a layer only z is kept; σ(u) is computed
    from it again on the way back."""

    def f(self, x: Tensor, k: int) -> Tensor:
        if self.statistics is None:
            return self.forward(x)
        moments: list[tuple[Tensor, Tensor] | None] = []
        y = self.forward(x, lambda layer: moments.append(layer.moments()))
        self.note(k, moments)
        return y

    def forward(self, x: Tensor, see: Callable[[Evaluated], None] = lambda _: None) -> Tensor:
        """f(x); ``see`` is called with every layer."""
        a = activated(x, None, self.activation, self.layers[0][0].dtype)
        following = [*[self.activation] * (len(self.layers) - 1), None]
        for (weight, gamma, beta, mean, variance), activation in zip(
            self.layers, following, strict=True
        ):
            z, of_batch = dense(F.conv2d(a, weight, padding="same")), mean is None
            del a  # is read no more: let the next one have its memory
            if of_batch:
                mean, variance = statistics(z)
            by = Normalization(mean, variance, gamma, beta, self.epsilon)
            layer = Evaluated(z, by, of_batch, activation)
            a = layer.result(z.dtype if activation else x.dtype)
            see(layer)
        return a

    def linearize(self, x: Tensor, k: int, wrt_x: bool = True) -> tuple[Tensor, reference.Pullback]:
        trace: list[Evaluated] = []
        y = self.forward(x, trace.append)

        def pullback(g: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
            grads: list[Tensor | None] = []
            for i in reversed(range(len(trace))):
                layer, weight = trace[i], self.layers[i][0]
                dz, d_gamma, d_beta = vjp(g, *layer)
                if i:
                    a = trace[i - 1].result(weight.dtype)
                else:
                    a = activated(x, None, self.activation, weight.dtype)
                g, d_weight = convolution_vjp(dz, a, weight)
                grads = [d_weight, d_gamma, d_beta, None, None, *grads]
            return times_slope(g, x, None, self.activation), tuple(grads)

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
    """Inside, cuDNN takes no algorithm whose results differ from run to run."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


FUSED = engine.Kit(MLP, Linear, Conv, combine, widens=False)

forward = functools.partial(engine.forward, kit=FUSED)
reverse = functools.partial(engine.reverse, kit=FUSED)
