"""The mathematics of the package in plain PyTorch: the specification of every kernel, and the code
that runs stages of arbitrary modules.

A stage makes N steps  x[n+1] = x[n] + h φ_n(x[n]).  The reverse pass starts at x[N] with the
cotangent g = ∂L/∂x[N]. At each step the reverse rule chooses a point p, takes the step's
vector-Jacobian product (VJP) there, and reconstructs the state before the step. Nothing here
depends on what a block computes: a block is any object with ``f`` and ``linearize``. States are
tensors, tuples of tensors, or anything else with ``+`` and ``*``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from .kinks import Activation, Signs
from .recording import Recorder

# ---------------------------------------------------------------------------------------- states


Combine = Callable[..., Any]  # (x, (a_1, y_1), (a_2, y_2), …) → x + Σ a_i y_i


def on_states(weighted_sum: Callable[[Sequence[Any], Sequence[Any]], Any]) -> Combine:
    """x + Σ a_i y_i for states, by a function that computes Σ a_i y_i for tensors. Tuples are added
    entry by entry. None stands for zero, as x, as a y_i or as an entry of a tuple."""

    def combine(x: Any, *terms: tuple[float, Any]) -> Any:
        present = [(a, y) for a, y in ((1, x), *terms) if y is not None]
        if not present:
            return None
        a, y = zip(*present, strict=True)
        if isinstance(y[0], tuple):
            entries = zip(*y, strict=True)
            return tuple(combine(None, *zip(a, entry, strict=True)) for entry in entries)
        return y[0] if a == (1,) else weighted_sum(a, y)

    return combine


@on_states
def combine(a: Sequence[float], y: Sequence[Any]) -> Any:
    """x + Σ a_i y_i with ``+`` and ``*``: one pass over memory per term."""
    total = y[0] if a[0] == 1 else a[0] * y[0]
    for b, z in zip(a[1:], y[1:], strict=True):
        total = torch.add(total, z, alpha=b) if isinstance(total, Tensor) else total + b * z
    return total


# ---------------------------------------------------------------------------------------- blocks

Pullback = Callable[[Any], tuple[Any, tuple[Any, ...]]]


class Block:
    """A residual function f and its parameters θ.

    ``k`` is the number of an evaluation, counted through the forward pass. In the reverse pass it
    names the evaluation that is repeated, so that a block can draw the same random numbers again.
    """

    def f(self, x: Any, k: int) -> Any:
        """The residual function at x."""
        raise NotImplementedError

    def linearize(
        self, x: Any, k: int, wrt_x: bool = True, value: bool = True
    ) -> tuple[Any, Pullback]:
        """f(x), which may be None unless ``value``, and its pullback: g → ∂_x f(x)ᵀ g (None unless
        ``wrt_x``), every ∂_θ f(x)ᵀ g."""
        raise NotImplementedError

    def repeats(self, k: int, j: int) -> bool:
        """Whether evaluations k and j compute the same function."""
        return True


class ActivatedBlock(Block):
    """A block with an activation. ``signs`` keeps the signs of relu's arguments, or knows them."""

    def __init__(self, activation: str, signs: Signs | None) -> None:
        self.activation, self.signs = activation, signs

    def activation_at(self, k: int) -> Callable[[Tensor], Activation]:
        """A function of every argument of σ in evaluation k, in their order: σ and σ' there."""
        activation = ACTIVATIONS[self.activation]
        return (lambda _: activation) if self.signs is None else self.signs.at(k, activation)

    def repeats(self, k: int, j: int) -> bool:
        return k == j or self.signs is None


class MLP(ActivatedBlock):
    """f(x) = W2 σ(W1 x + b1) + b2 for every row x of a matrix."""

    def __init__(
        self,
        activation: str,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        signs: Signs | None = None,
    ) -> None:
        super().__init__(activation, signs)
        self.w1, self.b1, self.w2, self.b2 = w1, b1, w2, b2

    def f(self, x: Tensor, k: int) -> Tensor:
        z = F.linear(x, self.w1, self.b1)
        sigma, _ = self.activation_at(k)(z)
        return F.linear(sigma(z), self.w2, self.b2)

    def linearize(
        self, x: Tensor, k: int, wrt_x: bool = True, value: bool = True
    ) -> tuple[Tensor | None, Pullback]:
        z = F.linear(x, self.w1, self.b1)
        sigma, slope = self.activation_at(k)(z)
        u = sigma(z)

        def pullback(g: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            dz = (g @ self.w2) * slope(z)
            return dz @ self.w1, (dz.T @ x, dz.sum(0), g.T @ u, g.sum(0))

        return F.linear(u, self.w2, self.b2) if value else None, pullback


class Linear(Block):
    """f(x) = θ x."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def f(self, x: Tensor, k: int) -> Tensor:
        return F.linear(x, self.weight)

    def linearize(
        self, x: Tensor, k: int, wrt_x: bool = True, value: bool = True
    ) -> tuple[Tensor | None, Pullback]:
        y = F.linear(x, self.weight) if value else None
        return y, lambda g: (g @ self.weight, (g.T @ x,))


class Function(Block):
    """Any function f(x, *parameters), differentiated by autograd."""

    def __init__(self, function: Callable[..., Tensor], *parameters: Tensor) -> None:
        self.function, self.parameters = function, parameters

    def f(self, x: Tensor, k: int) -> Tensor:
        with torch.no_grad():
            return self.function(x, *self.parameters)

    def linearize(
        self, x: Tensor, k: int, wrt_x: bool = True, value: bool = True
    ) -> tuple[Tensor, Pullback]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = self.function(x, *self.parameters)

        def pullback(g: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            gx, *grads = torch.autograd.grad(y, (x, *self.parameters), g)
            return gx, tuple(grads)

        return y.detach(), pullback


class Conv(ActivatedBlock):
    """f(x) = u_L with u_0 = x and u_l = bn_l(W_l ∗ σ(u_{l−1})).

    A layer is W, γ, β, mean and variance, the last four with one number per channel. A layer whose
    mean and variance are None normalizes by its batch. If ``statistics`` is given, evaluation k of
    the forward pass writes the batch's mean and unbiased variance to ``statistics[k]``.
    """

    def __init__(
        self,
        activation: str,
        epsilon: float,
        layers: Sequence[Sequence[Any]],
        statistics: Tensor | None = None,
        signs: Signs | None = None,
    ) -> None:
        super().__init__(activation, signs)
        self.epsilon, self.statistics = epsilon, statistics
        # The backward pass of torch's batch norm reads γ, mean and variance without their strides
        # if images are channels-last.
        self.layers = [
            [weight, *(None if t is None else t.contiguous() for t in vectors)]
            for weight, *vectors in layers
        ]

    def f(self, x: Tensor, k: int) -> Tensor:
        x, trace = self.evaluate(x, k)
        if self.statistics is not None:
            axes = (0, 2, 3)
            self.note(
                k,
                [
                    (z.mean(axes), z.var(axes)) if mean is None else None
                    for (*_, mean, _), (_, _, z, *_) in zip(self.layers, trace, strict=True)
                ],
            )
        return x

    def note(self, k: int, moments: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        """Writes the mean and the unbiased variance of every layer that normalizes by its batch to
        ``statistics[k]``."""
        assert self.statistics is not None
        row = self.statistics[k]
        for (weight, *_), pair in zip(self.layers, moments, strict=True):
            out = weight.shape[0]
            if pair is not None:
                row[:out], row[out : 2 * out] = (moment.detach() for moment in pair)
            row = row[2 * out :]

    def evaluate(self, x: Tensor, k: int) -> tuple[Tensor, list[tuple[Any, ...]]]:
        """f(x), and for every layer u, σ and σ' there, z and the batch statistics that its
        normalization used."""
        trace, activation_at = [], self.activation_at(k)
        for weight, gamma, beta, mean, variance in self.layers:
            activation = activation_at(x)
            z = F.conv2d(activation[0](x), weight, padding="same")
            u, batch = x, mean is None
            x, *batch_statistics = torch.native_batch_norm(
                z, gamma, beta, mean, variance, batch, 0.0, self.epsilon
            )
            trace.append((u, activation, z, *batch_statistics))
        return x, trace

    def linearize(
        self, x: Tensor, k: int, wrt_x: bool = True, value: bool = True
    ) -> tuple[Tensor, Pullback]:
        y, trace = self.evaluate(x, k)

        def pullback(g: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
            grads: list[Tensor | None] = []
            for layer, (u, (sigma, slope), z, *batch) in zip(
                reversed(self.layers), reversed(trace), strict=True
            ):
                weight, gamma, _, mean, variance = layer
                dz, d_gamma, d_beta = torch.ops.aten.native_batch_norm_backward(
                    g, z, gamma, mean, variance, *batch, mean is None, self.epsilon, [True] * 3
                )
                a, same = sigma(u), {"padding": weight.shape[-1] // 2}
                d_weight = conv2d_weight(a, weight.shape, dz, **same)
                g = conv2d_input(a.shape, weight, dz, **same) * slope(u)
                grads = [d_weight, d_gamma, d_beta, None, None, *grads]
            return g, tuple(grads)

        return y, pullback


def normal_cdf(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(z / math.sqrt(2)))


def normal_density(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def silu_slope(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s + z * s * (1 - s)


ACTIVATIONS: dict[str, Activation] = {
    "relu": (torch.relu, lambda z: (z > 0).to(z.dtype)),
    "tanh": (torch.tanh, lambda z: 1 - torch.tanh(z) ** 2),
    "gelu": (F.gelu, lambda z: normal_cdf(z) + z * normal_density(z)),
    "silu": (F.silu, silu_slope),
}

# --------------------------------------------------------------------------------------- schemes

Add = Callable[[Block, tuple[Any, ...]], None]  # adds a contribution to the parameter gradients
StepPullback = Callable[[Any, Add], Any]  # the cotangent of x[n+1] → the cotangent of x[n]


class Euler:
    """φ_n(x) = f_n(x): N blocks make N steps. Step n makes evaluation n of the forward pass."""

    def __init__(self, blocks: Sequence[Block], h: float, combine: Combine = combine) -> None:
        self.f, self.h, self.steps, self.combine = blocks, h, len(blocks), combine

    def slope(self, n: int, x: Any) -> Any:
        """φ_n(x)."""
        return self.f[n].f(x, n)

    def reverse_slope(self, n: int, x: Any, known: Any = None) -> Any:
        """ψ_n(x), the reverse-time slope. ``known``: f_{n+1}(x), if known and ``shares(n + 1)``."""
        return self.f[n].f(x, n) if known is None else known

    def linearize(
        self, n: int, x: Any, wrt_x: bool = True, value: bool = True
    ) -> tuple[Any, Any, StepPullback]:
        """φ_n(x) and f_n(x), of use only if ``value``, and the step's pullback."""
        a, back = self.f[n].linearize(x, n, wrt_x, value)

        def pullback(g: Any, add: Add) -> Any:
            gx, grads = back(self.combine(None, (self.h, g)))
            add(self.f[n], grads)
            return self.combine(g, (1, gx))

        return a, a, pullback

    def shares(self, n: int) -> bool:
        """Whether ψ_{n−1}(p) can use f_n(p), which step n has evaluated."""
        return n > 0 and self.f[n] is self.f[n - 1] and self.f[n].repeats(n, n - 1)


class Heun:
    """φ_n(x) = (a + b)/2, a = f_n(x), y = x + h a, b = f_{n+1}(y): N + 1 blocks make N steps.
    Evaluations 2n and 2n + 1 of the forward pass are a and b of step n."""

    def __init__(self, blocks: Sequence[Block], h: float, combine: Combine = combine) -> None:
        self.f, self.h, self.steps, self.combine = blocks, h, len(blocks) - 1, combine

    def slope(self, n: int, x: Any) -> Any:
        a = self.f[n].f(x, 2 * n)
        b = self.f[n + 1].f(self.combine(x, (self.h, a)), 2 * n + 1)
        return self.combine(None, (0.5, a), (0.5, b))

    def reverse_slope(self, n: int, x: Any, known: Any = None) -> Any:
        b = self.f[n + 1].f(x, 2 * n + 1) if known is None else known
        a = self.f[n].f(self.combine(x, (-self.h, b)), 2 * n)
        return self.combine(None, (0.5, a), (0.5, b))

    def linearize(
        self, n: int, x: Any, wrt_x: bool = True, value: bool = True
    ) -> tuple[Any, Any, StepPullback]:
        a, back_a = self.f[n].linearize(x, 2 * n, wrt_x)
        y = self.combine(x, (self.h, a))
        b, back_b = self.f[n + 1].linearize(y, 2 * n + 1, value=value)

        def pullback(g: Any, add: Add) -> Any:
            half = self.combine(None, (self.h / 2, g))
            gy, grads = back_b(half)
            add(self.f[n + 1], grads)
            gx, grads = back_a(self.combine(half, (self.h, gy)))
            add(self.f[n], grads)
            return self.combine(g, (1, gy), (1, gx))

        return self.combine(None, (0.5, a), (0.5, b)) if value else None, a, pullback

    def shares(self, n: int) -> bool:
        return n > 0 and self.f[n].repeats(2 * n, 2 * n - 1)


Scheme = Euler | Heun
SCHEMES: dict[str, type[Euler] | type[Heun]] = {"euler": Euler, "heun": Heun}

# ---------------------------------------------------------------------------------- forward pass


def forward(scheme: Scheme, x: Any, anchor_every: int = 0) -> tuple[Any, dict[int, Any]]:
    """x[N], and the anchors x[k], x[2k], … before it."""
    anchors = {}
    for n in range(scheme.steps):
        if anchor_every and n and n % anchor_every == 0:
            anchors[n] = x
        x = scheme.combine(x, (scheme.h, scheme.slope(n, x)))
    return x, anchors


class Record(NamedTuple):
    """What a forward pass has recorded of its states. The estimate x̂ starts as x[0] and moves by
    rounded increments:  x̂[n+1] = x̂[n] + d[n],  d[n] = Q(x[n+1] − x̂[n]).  So errors do not add up:
    |x[n] − x̂[n]| is a rounding error of the increment before, at every n."""

    bits: Sequence[int]
    """For each step n the bits of d[n]; 0: x̂[n] is kept, and x̂[n+1] is x[n+1]."""
    kept: dict[int, Any]
    """x̂[n] where ``bits`` is 0, so at the last step too."""
    increments: dict[int, Any]
    """d[n] where ``bits`` is not 0, as the recorder has returned it."""


def record(scheme: Scheme, x: Any, bits: Sequence[int], recorder: Recorder) -> tuple[Any, Record]:
    """x[N], and the record of the states before it."""
    result = Record(bits, {}, {})
    estimate = recorder.estimate(x)
    for n in range(scheme.steps):
        if not bits[n]:
            result.kept[n] = estimate
        x = scheme.combine(x, (scheme.h, scheme.slope(n, x)))
        if bits[n]:
            estimate, result.increments[n] = recorder.record(estimate, x, bits[n])
        else:
            estimate = recorder.estimate(x)
    return x, result


# ---------------------------------------------------------------------------------- reverse pass

Watch = Callable[[int, Any, Any], None]  # called with n, p and x̃[n]
EXTRAPOLATION = {1: (1,), 2: (2, -1), 3: (3, -3, 1)}


def point(
    rule: str,
    order: int,
    scheme: Scheme,
    n: int,
    x: Any,
    history: Sequence[Any] = (),
    known: Any = None,
) -> Any:
    """The point p of step n, from the state x = x̃[n+1] and the history of φ, newest first."""
    h = scheme.h
    if rule == "predicted" and history:
        factors = (-h * c for c in EXTRAPOLATION[len(history)])
        p = scheme.combine(x, *zip(factors, history, strict=True))
        corrections = order - len(history)
    else:
        p = scheme.combine(x, (-h, scheme.reverse_slope(n, x, known)))
        corrections = {"paper": 0, "refined": order - 1, "predicted": order}[rule]
    for _ in range(corrections):
        p = scheme.combine(x, (-h, scheme.slope(n, p)))
    return p


def adjoint(
    rule: str,
    order: int,
    scheme: Scheme,
    x: Any,
    anchors: dict[int, Any],
    last: int = 0,
    wrt_x: bool = True,
    watch: Watch | None = None,
) -> Iterator[StepPullback]:
    """The pullbacks of the steps N − 1 … ``last``, at points reconstructed from x = x[N]. ``watch``
    is called with the point and the reconstructed state of every step."""
    history: deque[Any] = deque(maxlen=order)
    known = None
    for n in reversed(range(last, scheme.steps)):
        if n + 1 in anchors:
            x, known = anchors[n + 1], None
        p = point(rule, order, scheme, n, x, history, known)
        slope, first, pullback = scheme.linearize(n, p, wrt_x or n > last)
        yield pullback
        if rule == "paper":
            x, known = p, first if scheme.shares(n) else None
        else:
            x = scheme.combine(x, (-scheme.h, slope))
            if rule == "predicted":
                history.appendleft(slope)
        if watch is not None:
            watch(n, p, x)


def exact(
    scheme: Scheme, x: Any, anchors: dict[int, Any], last: int = 0, wrt_x: bool = True
) -> Iterator[StepPullback]:
    """The pullbacks of the steps N − 1 … ``last``, at the exact states. Each segment of states is
    computed again, from x = x[0] or from an anchor, before its steps are differentiated one by
    one, so that the activations of only one block are held at a time."""
    end = scheme.steps
    for begin, start in sorted({**anchors, 0: x}.items(), reverse=True):
        if end <= last:
            return
        states = [start]
        for n in range(begin, end - 1):
            states.append(scheme.combine(states[-1], (scheme.h, scheme.slope(n, states[-1]))))
        for n in reversed(range(max(begin, last), end)):
            yield scheme.linearize(n, states.pop(), wrt_x or n > last, value=False)[2]
        end = begin


def recorded(
    scheme: Scheme,
    record: Record,
    recorder: Recorder,
    last: int = 0,
    wrt_x: bool = True,
    watch: Watch | None = None,
) -> Iterator[StepPullback]:
    """The pullbacks of the steps N − 1 … ``last``, at the states x̂[n] that the forward pass has
    recorded. No φ_n(x̂[n]) is needed, only what the pullback needs of it."""
    estimate = None
    for n in reversed(range(last, scheme.steps)):
        if n in record.kept:
            estimate = record.kept[n]
        else:
            estimate = recorder.undo(estimate, record.increments[n], record.bits[n])
        yield scheme.linearize(n, estimate, wrt_x or n > last, value=False)[2]
        if watch is not None:
            watch(n, estimate, estimate)


def reverse(pullbacks: Iterator[StepPullback], g: Any, add: Add) -> Any:
    """∂L/∂x[0]. Every contribution to a parameter gradient is passed to ``add``."""
    for pullback in pullbacks:
        g = pullback(g, add)
        del pullback  # frees its activations before the next step allocates memory
    return g


def accumulate(before: Any, more: Any) -> Any:
    """The sum of contributions to a gradient, in float32 at least. None stands for zero."""
    if before is None or more is None:
        return more if before is None else before
    if isinstance(before, Tensor):
        before = before.to(torch.promote_types(before.dtype, torch.float32))
    return before + more


class Sums(dict[Block, tuple[Any, ...]]):
    """The parameter gradients of each block, summed over the steps that use it."""

    def add(self, block: Block, grads: tuple[Any, ...]) -> None:
        before = self.get(block, (None,) * len(grads))
        self[block] = tuple(map(accumulate, before, grads))
