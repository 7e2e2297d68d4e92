"""Networks to draw from: a stage beside the loop of plain PyTorch that anyone would write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from derivatives import Plain as PlainFused
from fuzz_tensors import DTYPES, LAYOUTS
from helpers import make_conv_stage, make_stage
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import resode_kernels as rk
from resode_kernels.states import in_stream, parts, state_like

# ------------------------------------------------------------------------------- fused stages


@dataclass(frozen=True)
class Fused:
    """A stage with fused kernels. ``layouts`` are those of its parameters, in turn."""

    kind: str
    depth: int
    dtype: str
    options: dict[str, Any]
    tied: bool = False
    bias: bool = True
    functional: bool = False
    training: bool = True
    activation: str = "tanh"
    layouts: tuple[str, ...] = ("contiguous",)
    frozen: int | None = None
    """The number of a parameter that requires no gradient."""

    is_conv = property(lambda self: self.kind in ("basic", "bottleneck"))
    is_stateful = property(lambda self: self.is_conv and self.training and not self.functional)

    def module(self) -> nn.Module:
        options = {**self.options, "tied": self.tied}
        stage: rk.Stage
        if self.is_conv:
            stage = make_conv_stage(self.kind, self.activation, 4, self.depth, **options)
            for module in stage.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eps = 0.1  # few numbers are normalized: their variance may be tiny
        else:
            kind = "linear" if self.kind == "linear" else self.activation
            stage = make_stage(kind, 3, 5, self.depth, self.bias, **options)
        stage.to(DTYPES[self.dtype]).train(self.training)
        for i, (name, parameter) in enumerate(list(stage.named_parameters())):
            owner, _, key = name.rpartition(".")
            value = LAYOUTS[self.layouts[i % len(self.layouts)]](parameter.detach())
            value = value.as_subclass(Tensor)
            setattr(stage.get_submodule(owner), key, nn.Parameter(value, i != self.frozen))
        return Functional(stage) if self.functional else stage

    def plain(self, module: nn.Module) -> nn.Module:
        stage: Any = module.stage if self.functional else module
        if self.functional and self.training:  # the function moves no running statistics
            torch.func.replace_all_batch_norm_modules_(stage)
        return PlainFused(stage)

    def shape(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        return (2, 4, 3, 2) if self.is_conv else (*rows, 3)


class Functional(nn.Module):
    """The parameters of a stage, given to a function."""

    def __init__(self, stage: rk.Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        stage = self.stage
        options: dict[str, Any] = {
            **vars(stage.options),
            "depth": stage.depth if stage.tied else None,
        }
        if isinstance(stage, rk.LinearStage):
            return rk.functional.linear_stage(x, stage.weight, **options)
        if isinstance(stage, rk.MLPStage):
            theta = stage.w1, stage.b1, stage.w2, stage.b2
            return rk.functional.mlp_stage(x, *theta, activation=stage.activation, **options)
        options |= {"activation": stage.activation, "eps": 0.1}
        return rk.functional.conv_stage(x, conv_layers(stage), **options)


def conv_layers(stage: rk.ConvStage) -> list[rk.functional.ConvLayer]:
    layers = []
    for of_blocks in zip(*(block.layers for block in stage.blocks), strict=True):
        fields = [
            (conv.weight, bn.weight, bn.bias)
            if bn.training
            else (conv.weight, bn.weight, bn.bias, bn.running_mean, bn.running_var)
            for conv, bn in of_blocks
        ]
        with torch.autocast("cpu", enabled=False):
            stacked = [torch.stack(tensors) for tensors in zip(*fields, strict=True)]
        layers.append(rk.functional.ConvLayer(*stacked))
    return layers


# -------------------------------------------------------------------------- stages of modules


class Applied(nn.Module):
    """A block that calls a function with itself, its input and the stage's arguments."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, x, *args, **kwargs)


def count(m: Any, x: Tensor) -> Tensor:
    m.seen += 1
    return torch.tanh(m.linear(x)) * m.seen


def replace_count(m: Any, x: Tensor) -> Tensor:
    m.seen = m.seen + 1
    return torch.tanh(m.linear(x)) * m.seen


def pair(m: Any, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.tanh(m.linear(x[1])), m.linear(x[0]).sin() * 0.5


def scaled(m: Any, x: Tensor, scale: Tensor, *, more: dict[str, Tensor]) -> Tensor:
    return torch.tanh(m.linear(x)) * scale + more["bias"]


def attend(m: Any, x: Tensor) -> Tensor:
    return m.attention(x, x, x, need_weights=False)[0]


def recur(m: Any, x: Tensor) -> Tensor:
    return m.gru(x)[0]


def recompute(m: Any, x: Tensor) -> Tensor:
    return checkpoint(m.inner, x, use_reentrant=False)


def spread(m: Any, x: Tensor) -> Tensor:
    return m.shift.expand_as(x)


def half_used(m: Any, x: Tensor) -> Tensor:
    return torch.sin(m.used(x))


def widened(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(m.linear(x)).double()


def itself(m: Any, x: Tensor) -> Tensor:
    return x


def reversed_view(m: Any, x: Tensor) -> Tensor:
    return x.transpose(0, 1).transpose(0, 1)[..., :]


def noise(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(m.linear(x)) + 0.1 * torch.rand_like(x)


def sine(m: Any, x: Tensor) -> Tensor:
    return x.sin()


def in_place(m: Any, x: Tensor) -> Tensor:
    return F.silu(m.linear(x).mul_(0.5).add_(1), inplace=True)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def frozen() -> nn.Module:
    block = nn.Sequential(linear(), nn.Tanh(), linear())
    block[0].requires_grad_(False)
    return block


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(linear(), nn.Tanh(), nn.Linear(4, 4)),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(4, eps=0.1), linear(), nn.GELU()),
    "batch norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(4, eps=0.1), nn.Tanh()),
    "dropout": lambda: nn.Sequential(linear(), nn.Dropout(0.5), nn.Tanh()),
    "noise": lambda: Applied(noise, linear=linear()),
    "in place": lambda: Applied(in_place, linear=linear()),
    "spectral norm": lambda: nn.Sequential(spectral_norm(linear()), nn.Tanh()),
    "weight norm": lambda: nn.Sequential(weight_norm(linear()), nn.Tanh()),
    "counter": lambda: Applied(count, linear=linear(), seen=torch.zeros(())),
    "replaced counter": lambda: Applied(replace_count, linear=linear(), seen=torch.zeros(())),
    "stage inside": lambda: rk.MLPStage(4, 3, 2, backward="stored"),
    "stage of modules inside": lambda: rk.ResidualStage([linear()], backward="checkpoint"),
    "checkpoint inside": lambda: Applied(
        recompute, inner=nn.Sequential(linear(), nn.Dropout(0.3), nn.Tanh())
    ),
    "frozen": frozen,
    "half used": lambda: Applied(half_used, used=linear(), unused=linear()),
    "widened": lambda: Applied(widened, linear=linear()),
    "constant": lambda: Applied(spread, shift=nn.Parameter(torch.randn(4))),
    "itself": lambda: Applied(itself),
    "view": lambda: Applied(reversed_view),
    "sine": lambda: Applied(sine),
    "scaled": lambda: Applied(scaled, linear=linear()),
    "pair": lambda: Applied(pair, linear=linear()),
    "attention": lambda: Applied(
        attend, attention=nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
    ),
    "gru": lambda: Applied(recur, gru=nn.GRU(4, 4, batch_first=True)),
}
STATEFUL = ("batch norm", "counter", "replaced counter", "spectral norm")
RANDOM = ("dropout", "noise", "checkpoint inside", "attention")


@dataclass(frozen=True)
class Modules:
    """A stage of modules. ``shared``: all blocks hold one layer, and all but the first others."""

    kind: str
    depth: int
    dtype: str
    options: dict[str, Any]
    tied: bool = False
    functional: bool = False
    training: bool = True
    shared: bool = False
    layouts: tuple[str, ...] = field(default=(), init=False)

    is_conv = property(lambda self: False)
    is_stateful = property(lambda self: self.kind in STATEFUL)
    is_random = property(lambda self: self.kind in RANDOM)

    def module(self) -> nn.Module:
        heun = self.options.get("scheme") == "heun"
        number = 1 if self.tied else self.depth + heun
        blocks = [MODULES[self.kind]() for _ in range(number)]
        if self.shared:
            layer = linear()
            blocks = [nn.Sequential(block, layer) for block in blocks]
        depth = self.depth if self.tied else None
        if self.functional:
            module: nn.Module = FunctionalModules(nn.ModuleList(blocks), depth, self.options)
        else:
            module = rk.ResidualStage(blocks, depth=depth, **self.options)
        return module.to(DTYPES[self.dtype]).train(self.training)

    def plain(self, module: nn.Module) -> nn.Module:
        return PlainModules(module.blocks, self)

    def shape(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        if self.kind in ("attention", "gru"):
            return (2, 3, 4)
        return (3, 4) if self.kind == "batch norm" else (*rows[:1], 2, 4)

    @property
    def states(self) -> int:
        return 2 if self.kind == "pair" else 1


class FunctionalModules(nn.Module):
    def __init__(self, blocks: nn.ModuleList, depth: int | None, options: dict[str, Any]) -> None:
        super().__init__()
        self.blocks, self.depth, self.options = blocks, depth, options

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = {**kwargs, **self.options}
        return rk.functional.residual_stage(self.blocks, x, *args, depth=self.depth, **kwargs)


class PlainModules(nn.Module):
    """The loop, with states in the dtype that the option ``stream`` asks for."""

    def __init__(self, blocks: nn.ModuleList, of: Modules) -> None:
        super().__init__()
        self.blocks, self.of = blocks, of

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        options, depth = self.of.options, self.of.depth
        dtype = parts(x)[0].dtype
        h = options.get("step") or 1 / depth

        def f(n: int, state: Any) -> Any:
            given = state_like(state, [t.to(dtype) for t in parts(state)])
            y = self.blocks[0 if self.of.tied else n](given, *args, **kwargs)
            return [new.to(t.dtype) for new, t in zip(parts(y), parts(state), strict=True)]

        def moved(state: Any, a: Any) -> Any:
            moves = zip(parts(state), a, strict=True)
            return state_like(state, [t + h * slope for t, slope in moves])

        state = in_stream(x, options.get("stream", "float32"))
        for n in range(depth):
            a = f(n, state)
            if options.get("scheme") == "heun":
                b = f(n + 1, moved(state, a))
                a = [(s + t) / 2 for s, t in zip(a, b, strict=True)]
            state = moved(state, a)
        return state_like(x, [t.to(dtype) for t in parts(state)])
