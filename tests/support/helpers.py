"""What several test files need: stages to test, their gradients, and higher precision."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import resode_kernels as rk
from resode_kernels import reference
from resode_kernels.backends import REGISTRY, cpp, native
from resode_kernels.backends.contract import ForwardIO
from resode_kernels.backends.engine import EngineBackend
from resode_kernels.fused import ops
from resode_kernels.problem import Problem

RULES: list[dict[str, Any]] = [
    {"reverse": "paper"},
    {"reverse": "refined"},
    {"reverse": "refined", "order": 3},
    {"reverse": "predicted", "order": 1},
    {"reverse": "predicted", "order": 2},
    {"reverse": "predicted", "order": 3},
    {"reverse": "paper", "anchor_every": 2},
    {"reverse": "predicted", "order": 2, "anchor_every": 3},
    {"backward": "stored"},
    {"backward": "checkpoint", "anchor_every": 3},
]
RECORDED: list[dict[str, Any]] = [
    {"reverse": "recorded"},
    {"reverse": "recorded", "bits": 3, "anchor_every": 2},
]
# Reconstructs states to within round-off of float64, so that adjoint gradients can be compared with
# exact ones wherever truncation is not what is tested.
PRECISE: dict[str, Any] = {"reverse": "refined", "order": 9, "step": 0.05}
# relu's slope jumps at zero: nearer to it than this a rounding may decide a whole element.
KINK = 2e-6


class NearKink(Exception):
    """Draw other numbers."""


BLOCKS = [*rk.functional.ACTIVATIONS, "linear"]


def name(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


def make_stage(
    block: str, dim: int, hidden: int, depth: int, bias: bool = True, **options: Any
) -> rk.Stage:
    """An MLP stage with the activation ``block``, or a linear one."""
    if block == "linear":
        return rk.LinearStage(dim, depth, **options)
    return rk.MLPStage(dim, hidden, depth, block, bias, **options)


def make_conv_stage(
    block: str, activation: str, channels: int, depth: int = 4, **options: Any
) -> rk.ConvStage:
    """With normalizations that differ from one another, in training mode."""
    stage = rk.ConvStage(channels, depth, block, activation=activation, **options)
    for module in stage.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean):
                torch.nn.init.normal_(tensor, float(tensor is module.weight), 0.2)
    return stage


def gradients(stage: rk.Stage, x: Tensor, g: Tensor) -> list[Tensor]:
    """The output and the gradients of x and of every parameter."""
    x = x.detach().requires_grad_()
    y = stage(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *stage.parameters()], g)]


def kernel_gradients(stage: rk.Stage, x: Tensor, g: Tensor, threads: int) -> list[Tensor]:
    """``gradients`` by the C++ kernels on so many threads, in memory full of NaNs."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        return gradients(stage.configure(backend="cpp"), x, g)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)


def plain(stage: rk.Stage, x: Tensor) -> Tensor:
    """The network as anyone would write it, for autograd: standard backprop."""

    def f(n: int, x: Tensor) -> Tensor:
        n = 0 if stage.tied else n
        if isinstance(stage, rk.LinearStage):
            return x @ stage.weight[n].T
        z = x @ stage.w1[n].T
        z = z if stage.b1 is None else z + stage.b1[n]
        u = getattr(torch.nn.functional, stage.activation)(z)
        v = u @ stage.w2[n].T
        return v if stage.b2 is None else v + stage.b2[n]

    return steps(stage, f, x)


def steps(stage: rk.Stage, f: Callable[[int, Tensor], Tensor], x: Tensor) -> Tensor:
    """The loop of a stage whose n-th block is ``f(n, ·)``."""
    h = 1 / stage.depth if stage.options.step is None else stage.options.step
    for n in range(stage.depth):
        a = f(n, x)
        if stage.options.scheme == "heun":
            a = (a + f(n + 1, x + h * a)) / 2
        x = x + h * a
    return x


def relative_error(a: Tensor | np.ndarray, b: Tensor | np.ndarray) -> float:
    """‖a − b‖/‖b‖, in at least b's precision."""
    a, b = (np.asarray(t.to("cpu", torch.float64) if isinstance(t, Tensor) else t) for t in (a, b))
    return float(np.linalg.norm((a - b).ravel()) / max(np.linalg.norm(b.ravel()), 1e-300))


def problem_of(stage: rk.Stage) -> Problem:
    """What a backend gets of a stage."""
    method = stage.options.method(stage.depth)
    if isinstance(stage, rk.ConvStage):
        parameters = [
            tensor
            for block in stage.blocks
            for conv, bn in block.layers
            for tensor in (
                conv.weight,
                bn.weight,
                bn.bias,
                *((None, None) if bn.training else (bn.running_mean, bn.running_var)),
            )
        ]
        block = stage.blocks[0]
        layers, epsilon = len(block.layers), block.bn1.eps
        return Problem("conv", stage.activation, tuple(parameters), method, layers, epsilon)
    if isinstance(stage, rk.LinearStage):
        return Problem("linear", "identity", (stage.weight,), method)
    return Problem("mlp", stage.activation, (stage.w1, stage.b1, stage.w2, stage.b2), method)


def start_of(problem: Problem, x: Tensor, y: Tensor, kept: Sequence[Tensor]) -> Tensor:
    """Where the reverse op starts, after the forward op."""
    if problem.is_recorded:
        return kept[0][-1]
    return x if problem.method.reverse_rule == "exact" else y


def crews_of(stage: rk.Stage, x: Tensor) -> tuple[int, int]:
    """Of the C++ kernels: how many crews of threads work on a stage, and how many are in each."""
    problem, threads = problem_of(stage), torch.get_num_threads()
    parameters = native.all_contiguous(problem.parameters)
    described = native.stage_of(cpp._C, problem, parameters, x, threads)
    _, statistics, kept = ops._new_states(x, problem)
    crews: tuple[int, int] = cpp._C.plan(
        described, native.forward_of(cpp._C, ForwardIO(x, x, problem.kept_of(kept), statistics))
    ).crews
    return crews


OUTSIDE_OF_OPS = (
    torch._C._dispatch_tls_local_include_set(),
    torch._C._dispatch_tls_local_exclude_set(),
)
"""torch's dispatch where no op runs. Autograd does nothing inside of an op."""


class Function(reference.Function):
    """``reference.Function`` inside of an op."""

    def linearize(self, x: Tensor, k: int, wrt_x: bool = True, value: bool = True) -> Any:
        with torch._C._ForceDispatchKeyGuard(*OUTSIDE_OF_OPS):
            y, pullback = super().linearize(x, k, wrt_x, value)

        def with_autograd(g: Tensor) -> Any:
            with torch._C._ForceDispatchKeyGuard(*OUTSIDE_OF_OPS):
                return pullback(g)

        return y, with_autograd


def in_dtype(dtype: torch.dtype) -> EngineBackend:
    """Plain PyTorch with products in a dtype, differentiated by autograd."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    def mlp(x: Tensor, activation: str, *theta: Tensor) -> Tensor:
        w1, b1, w2, b2 = theta
        return linear(getattr(F, activation)(linear(x, w1, b1)), w2, b2).to(x.dtype)

    def conv(x: Tensor, activation: str, epsilon: float, *theta: Tensor) -> Tensor:
        u = x
        for i in range(0, len(theta), 3):
            weight, gamma, beta = theta[i : i + 3]
            z = F.conv2d(getattr(F, activation)(u).to(dtype), weight.to(dtype), padding="same")
            u = F.batch_norm(z, None, None, gamma, beta, training=True, eps=epsilon)
        return u.to(x.dtype)

    class Conv(Function):
        def linearize(self, x: Tensor, k: int, wrt_x: bool = True, value: bool = True) -> Any:
            y, pullback = super().linearize(x, k, wrt_x, value)

            def padded(g: Tensor) -> Any:
                gx, grads = pullback(g)
                return gx, sum(
                    ((*grads[i : i + 3], None, None) for i in range(0, len(grads), 3)), ()
                )

            return y, padded

    def leaf(t: Tensor) -> Tensor:
        return t.detach().requires_grad_()

    return EngineBackend(
        "reference",
        mlp=lambda activation, *theta: Function(
            lambda x, *theta: mlp(x, activation, *theta), *map(leaf, theta)
        ),
        linear=lambda weight: Function(
            lambda x, weight: linear(x, weight).to(x.dtype), leaf(weight)
        ),
        conv=lambda activation, epsilon, layers, _: Conv(
            lambda x, *theta: conv(x, activation, epsilon, *theta),
            *(leaf(t) for layer in layers for t in layer[:3]),
        ),
    )


def shifted(t: Tensor) -> Tensor:
    """A copy, laid out like t, in memory that begins one element beyond a boundary of 16 bytes."""
    memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    assert memory.data_ptr() % 16 == 0
    return memory.as_strided(t.shape, t.stride(), 1).copy_(t)


# ------------------------------------------------------------------- more precise than float64


def _erf(z: np.ndarray) -> np.ndarray:
    """erf(z) = 2/√π e^(−z²) Σ_n 2^n z^(2n+1)/(2n+1)!!, a series without cancellation."""
    z = np.clip(z, -8, 8)
    term = total = z
    for n in range(1, 300):
        term = term * 2 * z * z / (2 * n + 1)
        total = total + term
    return total * np.exp(-z * z) / np.sqrt(np.arctan(np.longdouble(1)))


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def _cdf(z: np.ndarray) -> np.ndarray:
    return (1 + _erf(z / np.sqrt(np.longdouble(2)))) / 2


def _density(z: np.ndarray) -> np.ndarray:
    return np.exp(-z * z / 2) / np.sqrt(8 * np.arctan(np.longdouble(1)))


LONG_ACTIVATIONS = {
    "relu": (lambda z: np.maximum(z, 0), lambda z: (z > 0).astype(np.longdouble)),
    "tanh": (np.tanh, lambda z: 1 - np.tanh(z) ** 2),
    "gelu": (lambda z: z * _cdf(z), lambda z: _cdf(z) + z * _density(z)),
    "silu": (lambda z: z * _sigmoid(z), lambda z: _sigmoid(z) * (1 + z * (1 - _sigmoid(z)))),
}


class LongMLP(reference.Block):
    """``reference.MLP`` in numpy's long double."""

    def __init__(self, activation: str, w1: Any, b1: Any, w2: Any, b2: Any) -> None:
        self.sigma, self.slope = LONG_ACTIVATIONS[activation]
        self.w1, self.w2 = w1, w2
        self.b1, self.b2 = (0 if b is None else b for b in (b1, b2))

    def f(self, x: np.ndarray, k: int) -> np.ndarray:
        return self.sigma(x @ self.w1.T + self.b1) @ self.w2.T + self.b2

    def linearize(self, x: np.ndarray, k: int, wrt_x: bool = True, value: bool = True) -> Any:
        z = x @ self.w1.T + self.b1
        u = self.sigma(z)

        def pullback(g: np.ndarray) -> Any:
            dz = (g @ self.w2) * self.slope(z)
            return dz @ self.w1, (dz.T @ x, dz.sum(0), g.T @ u, g.sum(0))

        return u @ self.w2.T + self.b2, pullback


class LongLinear(reference.Block):
    def __init__(self, weight: np.ndarray) -> None:
        self.weight = weight

    def f(self, x: np.ndarray, k: int) -> np.ndarray:
        return x @ self.weight.T

    def linearize(self, x: np.ndarray, k: int, wrt_x: bool = True, value: bool = True) -> Any:
        return x @ self.weight.T, lambda g: (g @ self.weight, (g.T @ x,))


class LongConv(reference.Block):
    """``reference.Conv``; x is [images, channels, height, width]."""

    def __init__(self, activation: str, layers: Any, epsilon: float) -> None:
        self.sigma, self.slope = LONG_ACTIVATIONS[activation]
        self.layers, self.epsilon = layers, epsilon
        self.nearest_kink = np.inf  # the smallest |u| that σ was applied to

    @staticmethod
    def shifts(x: np.ndarray, size: int) -> list[np.ndarray]:
        """x seen through every position of a window, zeros around it."""
        rim, (height, width) = size // 2, x.shape[2:]
        wide = np.pad(x, ((0, 0), (0, 0), (rim, rim), (rim, rim)))
        return [wide[:, :, i : i + height, j : j + width] for i in range(size) for j in range(size)]

    def convolve(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        taps = weight.reshape(*weight.shape[:2], -1)
        return sum(
            np.einsum("nihw,oi->nohw", seen, taps[:, :, t])
            for t, seen in enumerate(self.shifts(x, weight.shape[-1]))
        )

    def f(self, x: np.ndarray, k: int) -> np.ndarray:
        return self.linearize(x, k)[0]

    def linearize(self, x: np.ndarray, k: int, wrt_x: bool = True, value: bool = True) -> Any:
        def column(v: np.ndarray) -> np.ndarray:
            return v[:, None, None]

        trace, axes = [], (0, 2, 3)
        for weight, gamma, beta, mean, variance in self.layers:
            u, a = x, self.sigma(x)
            self.nearest_kink = min(self.nearest_kink, np.abs(x).min())
            z = self.convolve(a, weight)
            batch = mean is None
            if batch:
                mean, variance = z.mean(axes), z.var(axes)
            r = 1 / np.sqrt(variance + self.epsilon)
            normal = (z - column(mean)) * column(r)
            x = column(gamma) * normal + column(beta)
            trace.append((weight, gamma, u, a, normal, r, batch))

        def pullback(g: np.ndarray) -> Any:
            gradients: list[Any] = []
            for weight, gamma, u, a, normal, r, batch in reversed(trace):
                count, size = g[:, 0].size, weight.shape[-1]
                d_beta, d_gamma = g.sum(axes), (g * normal).sum(axes)
                if batch:
                    g = g - column(d_beta / count) - normal * column(d_gamma / count)
                dz = column(gamma * r) * g
                d_weight = np.stack(
                    [np.einsum("nohw,nihw->oi", dz, seen) for seen in self.shifts(a, size)], -1
                ).reshape(weight.shape)
                gradients = [d_weight, d_gamma, d_beta, None, None, *gradients]
                turned = weight.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1]
                g = self.convolve(dz, turned) * self.slope(u)
            return g, tuple(gradients)

        return x, pullback


def long(t: Tensor | None) -> Any:
    return None if t is None else t.detach().to("cpu", torch.float64).numpy().astype(np.longdouble)


def long_conv_blocks(stage: rk.ConvStage) -> list[LongConv]:
    def layer(conv: torch.nn.Conv2d, bn: torch.nn.BatchNorm2d) -> tuple[Any, ...]:
        constants = (None, None) if bn.training else (bn.running_mean, bn.running_var)
        return tuple(long(t) for t in (conv.weight, bn.weight, bn.bias, *constants))

    epsilon = stage.blocks[0].bn1.eps
    return [
        LongConv(stage.activation, [layer(*pair) for pair in block.layers], epsilon)
        for block in stage.blocks
    ]


def kinds(stage: rk.Stage) -> list[str]:
    """Parameter names, without the block's number."""
    return list(dict.fromkeys(re.sub(r"blocks\.\d+\.", "", n) for n, _ in stage.named_parameters()))


def by_kind(stage: rk.Stage, values: Sequence[Any]) -> list[Any]:
    """Output, ∂x and parameter gradients, those of all blocks' parameters of a kind as one."""
    if not isinstance(stage, rk.ConvStage):
        return list(values)
    y, grad_x, *gradients = values
    count = len(kinds(stage))
    as_arrays = [np.asarray(long(g) if isinstance(g, Tensor) else g) for g in gradients]
    return [y, grad_x, *(np.stack(as_arrays[k::count]) for k in range(count))]


def long_gradients(stage: rk.Stage, x: Tensor, g: Tensor) -> list[np.ndarray]:
    """What ``gradients`` returns, by the reference in long double (64 bits of mantissa)."""
    distinct: Sequence[Any]
    if isinstance(stage, rk.ConvStage):
        distinct = long_conv_blocks(stage)
    else:
        names = ["weight"] if isinstance(stage, rk.LinearStage) else ["w1", "b1", "w2", "b2"]
        parameters = [getattr(stage, n) for n in names]
        stacked = [long(p) for p in parameters]
        block_class = LongLinear if len(names) == 1 else lambda *t: LongMLP(stage.activation, *t)
        distinct = [
            block_class(*(None if p is None else p[n] for p in stacked))
            for n in range(stage.num_blocks)
        ]
    blocks = list(distinct) * stage.options.blocks(stage.depth) if stage.tied else distinct
    method = stage.options.method(stage.depth)
    scheme = reference.SCHEMES[method.scheme](blocks, method.step)
    y, kept = reference.forward(scheme, long(x), method.anchor_every)
    if method.reverse_rule == "exact":
        pullbacks = reference.exact(scheme, long(x), kept)
    else:
        pullbacks = reference.adjoint(method.reverse_rule, method.order, scheme, y, kept)
    sums = reference.Sums()
    grad_x = reference.reverse(pullbacks, long(g), sums.add)
    if isinstance(stage, rk.ConvStage):
        if stage.activation == "relu" and min(block.nearest_kink for block in distinct) < KINK:
            raise NearKink
        flat = [gradient for block in distinct for gradient in sums[block]]
        return [y, grad_x, *(gradient for gradient in flat if gradient is not None)]
    stacked_gradients = [
        np.stack([sums[block][i] for block in distinct])
        for i, p in enumerate(parameters)
        if p is not None
    ]
    return [y, grad_x, *stacked_gradients]


# ----------------------------------------------------------------------------------- the rule

Run = Callable[[rk.Stage, Tensor, Tensor], list[Tensor]]


def gradients_by(backend: str) -> Run:
    """``gradients`` by a backend."""
    return lambda stage, x, g: gradients(stage.configure(backend=backend), x, g)


def running(engine: EngineBackend) -> Run:
    """``gradients`` by the reference's passes with other blocks."""

    def run(stage: rk.Stage, x: Tensor, g: Tensor) -> list[Tensor]:
        with patch.dict(REGISTRY, reference=engine):
            return gradients_by("reference")(stage, x, g)

    return run


CPP, PYTORCH = gradients_by("cpp"), gradients_by("reference")


def assert_as_accurate_as_pytorch(
    stage: rk.Stage,
    x: Tensor,
    g: Tensor,
    kernel: Run = CPP,
    pytorch: Run = PYTORCH,
) -> None:
    """The rule for what ``gradients`` returns, by the kernels and by plain PyTorch."""
    exact = long_gradients(stage, x, g)
    results = [kernel(stage, x, g), pytorch(stage, x, g)]
    dtypes = [t.dtype for t in results[0]]
    assert dtypes == [t.dtype for t in results[1]]
    values = (by_kind(stage, result) for result in (*results, exact))
    labels = ["y", "grad_x", *kinds(stage)]
    for label, dtype, k, p, e in zip(labels, dtypes, *values, strict=False):
        factor = 2 if label in ("y", "grad_x") else 3
        assert_error(k, p, e, dtype, factor, label)


def assert_error(
    kernel: Any, pytorch: Any, exact: Any, dtype: torch.dtype, factor: float = 2, label: str = ""
) -> None:
    """A kernel's error is at most ``factor`` × PyTorch's. Neither can be expected to be better than
    a rounding of the result."""
    allowed = max(factor * relative_error(pytorch, exact), torch.finfo(dtype).eps / 2)
    assert relative_error(kernel, exact) <= allowed, label


def peak_allocation(step: Callable[[], Any], leaves: Iterable[Tensor] = ()) -> int:
    """Bytes that torch has allocated at the worst moment of a step, those before it aside. It makes
    the gradients of ``leaves``. Now and then the profiler misses some events, so the step is made
    until two profiles agree."""
    leaves, seen = list(leaves), []
    for _ in range(10):
        for leaf in leaves:
            leaf.grad = None
        with torch.profiler.profile(profile_memory=True) as profile:
            step()
        events = sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns())
        sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
        seen.append(max(accumulate(sizes)))
        if seen[-1] in seen[:-1]:
            return seen[-1]
    raise AssertionError(f"ten profiles of a step, no two of which agree: {seen}")
