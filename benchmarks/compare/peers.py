"""Other packages that train deep residual networks in little memory: those of the extra
``bench-peers``, each called as its own documentation does.

torchdiffeq trains the same network as we do. Each of the others has an architecture of its own. It
is built here with as many parameters, and so as many matrix products, as the network beside it:

    memcnn, revlib, RevTorch   y1 = x1 + F(x2), y2 = x2 + G(y1): F and G see half of the state each
    momentumnet                v ← γ v + (1 − γ) f(x), x ← x + v

memcnn and momentumnet require torchvision, which requires one particular torch, but they need
neither: install them with ``pip install --no-deps memcnn momentumnet``.

All inverses are exact up to rounding. Gradients are compared with those of plain backprop through
the same architecture. The last layer of every f, F and G starts with weights of 1/depth the usual
size. This replaces the factor h of our stages at no cost. Without it states explode with depth.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from networks import Config, Layer, Network, parameters_of
from torch import Tensor, nn

from resode_kernels.stages.conv import WINDOWS, ConvBlock

Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Peer:
    """A package that trains networks in little memory.

    forward   makes the forward pass of a network of that architecture, by the package
    network   builds the architecture that is compared with a given network. None: the package
              trains the given network itself
    """

    package: str
    forward: Callable[[Any], Forward]
    network: Callable[[Network], Network] | None = None
    schemes: tuple[str, ...] = ("euler",)

    def missing(self) -> str | None:
        """Why the package cannot be used here; None if it can."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(self.package)
        except Exception as error:  # old packages fail in many ways
            return str(error)
        return None

    def can_train(self, config: Config) -> bool:
        return config.scheme in self.schemes and not config.tied


# ------------------------------------------------------------------------------------ torchdiffeq

METHODS = {"euler": "euler", "heun": "heun2"}


def odeint(network: Network) -> Forward:
    """The network as an ODE, in one call.

    It keeps only two states, but carries the gradients of all parameters through every step of the
    reverse pass: quadratic work in the depth. Euler's right-hand side jumps at the ends of a step.
    ``perturb`` makes the solver evaluate on the side of the step, in the reverse pass as well.
    Heun's step has a block at each of its ends.
    """
    from torchdiffeq import odeint_adjoint

    config, euler = network.config, network.config.scheme == "euler"
    options = {"step_size": 1 / config.depth, "perturb": euler}
    interval = torch.tensor([0.0, 1.0], dtype=torch.float64)

    def forward(x: Tensor) -> Tensor:
        layers = network.layers_between(0, config.depth, x)

        def f(t: Tensor, x: Tensor) -> Tensor:
            n = t.item() * config.depth
            return network.block(layers[int(n) if euler else round(n)], x)

        return _solve(odeint_adjoint, f, x, interval, layers, METHODS[config.scheme], options)

    return forward


def odeint_per_block(network: Network) -> Forward:
    """The network as an ODE, in a call for every step, as a careful user would write it: linear
    work in the depth, but it keeps two states for every step."""
    from torchdiffeq import odeint_adjoint

    config = network.config
    times = torch.arange(config.depth + 1, dtype=torch.float64) / config.depth

    def forward(x: Tensor) -> Tensor:
        for begin, end in pairwise(range(config.depth + 1)):
            layers = network.layers_between(begin, end, x)
            middle = (begin + 0.5) / config.depth

            def f(t: Tensor, x: Tensor, layers: Any = layers, middle: float = middle) -> Tensor:
                return network.block(layers[0 if t.item() < middle else -1], x)

            interval = times[begin : end + 1]
            x = _solve(odeint_adjoint, f, x, interval, layers, METHODS[config.scheme])
        return x

    return forward


def _solve(
    odeint_adjoint: Any,
    f: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    interval: Tensor,
    layers: Sequence[Layer],
    method: str,
    options: dict[str, Any] | None = None,
) -> Tensor:
    parameters = tuple(p for layer in layers for p in parameters_of(layer))
    interval = interval.to(x.device)
    states = odeint_adjoint(
        f, x, interval, method=method, options=options, adjoint_params=parameters
    )
    return states[-1]


# ------------------------------------------------------------------------- architectures of others


class OtherNetwork(Network):
    """Another architecture, with the batch of the network that it is compared with. Its plain loop
    is its definition, for autograd."""

    def __init__(self, beside: Network) -> None:
        super().__init__(beside.config)
        torch.manual_seed(0)
        self.x, self.cotangent = beside.x, beside.cotangent
        self.blocks = nn.ModuleList(self.make_block(beside) for _ in range(self.config.depth)).to(
            self.config.device
        )

    def make_block(self, beside: Network) -> nn.Module:
        raise NotImplementedError

    def layers_of(self, x: Tensor) -> Sequence[Layer]:
        return self.blocks

    def parameters(self) -> list[nn.Parameter | Tensor]:
        return list(self.blocks.parameters())

    def gradients(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.blocks.parameters()])


class MomentumNetwork(OtherNetwork):
    gamma = 0.99
    """As in momentumnet's documentation. With the 0.9 of its ``transform_to_momentumnet`` the
    velocities' exact representation overflows beyond depth 128: the gradients are lost."""

    def make_block(self, beside: Network) -> nn.Module:
        c = self.config
        if c.stage == "mlp":
            block: nn.Module = MLP(c.dim, c.hidden, c.activation)
        else:
            block = copy.deepcopy(beside.stage.blocks[0])
            for module in block.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        return shrink(block, 1 / c.depth)

    def walk(self, layers: Sequence[Layer], x: Tensor) -> Tensor:
        v = torch.zeros_like(x)
        for f in layers:
            v = self.gamma * v + (1 - self.gamma) * f(x)
            x = x + v
        return x


def momentumnet(network: MomentumNetwork) -> Forward:
    from momentumnet import MomentumNet

    net: Forward = MomentumNet(network.blocks, gamma=network.gamma, use_backprop=False)
    return net


class CouplingNetwork(OtherNetwork):
    """Additive couplings. Each has as many parameters as a block of the given network, to 1 %."""

    def make_block(self, beside: Network) -> nn.Module:
        block = Coupling(*BRANCHES[self.config.stage](self.config), axis_of(self.config))
        mine, wanted = (
            sum(p.numel() for p in parameters_of(layer))
            for layer in (block, beside.layers_of(beside.x)[0])
        )
        if abs(mine / wanted - 1) > 0.01:
            raise ValueError(f"a coupling of {mine} parameters beside a block of {wanted}")
        shrink(block.f, 1 / self.config.depth)
        shrink(block.g, 1 / self.config.depth)
        return block

    def walk(self, layers: Sequence[Layer], x: Tensor) -> Tensor:
        for coupling in layers:
            x = coupling(x)
        return x


class Coupling(nn.Module):
    def __init__(self, f: nn.Module, g: nn.Module, axis: int) -> None:
        super().__init__()
        self.f, self.g, self.axis = f, g, axis

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, self.axis)
        y1 = x1 + self.f(x2)
        return torch.cat([y1, x2 + self.g(y1)], self.axis)


def memcnn(network: CouplingNetwork) -> Forward:
    from memcnn import AdditiveCoupling, InvertibleModuleWrapper

    axis = axis_of(network.config)
    blocks = nn.Sequential(
        *(
            InvertibleModuleWrapper(AdditiveCoupling(c.f, c.g, split_dim=axis))
            for c in network.blocks
        )
    )
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")
    # memcnn frees the memory of its input, and all contestants share the batch.
    return lambda x: blocks(x.clone())


def revlib(network: CouplingNetwork) -> Forward:
    from revlib import ReversibleSequential

    branches = [branch for c in network.blocks for branch in (c.f, c.g)]
    net: Forward = ReversibleSequential(*branches, split_dim=axis_of(network.config))
    return net


def revtorch(network: CouplingNetwork) -> Forward:
    from revtorch import ReversibleBlock, ReversibleSequence

    axis = axis_of(network.config)
    net: Forward = ReversibleSequence(
        nn.ModuleList(ReversibleBlock(c.f, c.g, split_along_dim=axis) for c in network.blocks)
    )
    return net


# ------------------------------------------------------------------- branches F and G of couplings


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.sigma = getattr(F, activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.sigma(self.inner(x)))


class NormedMLP(MLP):
    """The second half of a transformer block."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(dim, hidden, "gelu")
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Attention(nn.Module):
    """The first half of a transformer block, ``inner`` wide inside."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.heads = max(1, inner // 64)
        self.norm = nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * inner), nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, -1)
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        return self.out(y.transpose(1, 2).reshape(batch, tokens, -1))


Branches = tuple[nn.Module, nn.Module]


def mlp_branches(c: Config) -> Branches:
    """2 · 2 · (dim/2) · hidden = 2 · dim · hidden."""
    f, g = (MLP(c.dim // 2, c.hidden, c.activation) for _ in range(2))
    return f, g


def conv_branches(c: Config) -> Branches:
    f, g = (ConvBlock(c.dim // 2, c.hidden, activation=c.activation) for _ in range(2))
    return f, g


def bottleneck_branches(c: Config) -> Branches:
    """The 3 × 3 convolution works on the hidden channels, not on half of the state. So the function
    searches for the two hidden widths, as equal as possible, that give the right number of
    parameters."""

    def weights(channels: int, hidden: int) -> int:
        return hidden * (2 * channels + 9 * hidden)

    wanted = weights(c.dim, c.hidden)
    pairs = ((m, m + more) for m in range(1, c.hidden) for more in (0, 1))
    widths = min(pairs, key=lambda pair: abs(sum(weights(c.dim // 2, m) for m in pair) - wanted))
    f, g = (ConvBlock(c.dim // 2, m, WINDOWS["bottleneck"], c.activation) for m in widths)
    return f, g


def transformer_branches(c: Config) -> Branches:
    """4 · (dim/2) · 2 dim = 4 dim², and 2 · (dim/2) · 2 hidden = 2 dim · hidden. Queries and keys
    are twice as wide as those of the block. So the products of queries, keys and values, which have
    no parameters, are twice as much work: 4 % of the block's at dim 256 and 64 tokens."""
    return Attention(c.dim // 2, 2 * c.dim), NormedMLP(c.dim // 2, 2 * c.hidden)


BRANCHES: dict[str, Callable[[Config], Branches]] = {
    "mlp": mlp_branches,
    "conv": conv_branches,
    "residual-conv": conv_branches,
    "bottleneck": bottleneck_branches,
    "residual": transformer_branches,
}


def axis_of(config: Config) -> int:
    """The axis of features or channels."""
    return -1 if config.stage == "residual" else 1


def shrink(block: nn.Module, factor: float) -> nn.Module:
    """Scales the initial weights of the last layer."""
    *_, last = (m for m in block.modules() if any(True for _ in m.parameters(recurse=False)))
    with torch.no_grad():
        for p in last.parameters():
            p.mul_(factor)
    return block


# --------------------------------------------------------------------------------------- the list

PEERS: dict[str, Peer] = {
    "torchdiffeq": Peer("torchdiffeq", odeint, schemes=("euler", "heun")),
    "torchdiffeq, call per block": Peer("torchdiffeq", odeint_per_block, schemes=("euler", "heun")),
    "momentumnet": Peer("momentumnet", momentumnet, MomentumNetwork),
    "memcnn": Peer("memcnn", memcnn, CouplingNetwork),
    "revlib": Peer("revlib", revlib, CouplingNetwork),
    "RevTorch": Peer("revtorch", revtorch, CouplingNetwork),
}
