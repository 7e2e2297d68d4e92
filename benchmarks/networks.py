"""The contestants: one residual network, trained in different ways.

Every contestant is a function that runs a training step (forward and backward) of the same network
on the same batch; ``gradients`` then tells what it computed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from plain_adjoint import plain_adjoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import resode_kernels as rk
from resode_kernels.options import Options
from resode_kernels.stages.conv import WINDOWS

STANDARD = "standard backprop"
CHANNELS_LAST = "standard, channels last"
COMPILED = "standard, torch.compile"
PER_BLOCK = "checkpoint, per block"
CHECKPOINT = "checkpoint, √N segments"
PLAIN = "paper's rule in plain PyTorch"
RULES = ("paper", "refined", "predicted")
WEIGHTS = ("independent", "smooth", "tied")
STARTING = {"predicted": 4}
"""Evaluations that a rule makes beyond those of every step, until it can extrapolate: ``predicted``
of order 2 takes the paper's point and corrects it twice, and the next one once."""


@dataclass
class Config:
    """One network and one batch."""

    stage: str = "mlp"
    scheme: str = "euler"
    weights: str = "independent"
    dim: int = 64
    hidden: int = 64
    depth: int = 64
    batch: int = 1024
    size: int = 1
    """Height and width of images."""
    device: str = "cpu"
    activation: str = "tanh"

    @property
    def name(self) -> str:
        """``stage-dim-batch-depth``, and what is not the default."""
        more = [str(self.size)] * (self.size > 1) + ["heun"] * (self.scheme == "heun")
        return "-".join([self.stage, str(self.dim), str(self.batch), str(self.depth), *more])

    @property
    def order(self) -> tuple[Any, ...]:
        """In which workloads are listed."""
        kind = list(NETWORKS).index(self.stage)
        return kind, self.scheme, self.dim, self.batch, self.depth

    @property
    def tied(self) -> bool:
        return self.weights == "tied"


Layer = list[Tensor] | nn.Module
"""A block in the plain loop: its parameters, or a module."""


class Network:
    """A network as a stage and as the plain PyTorch loop that anyone would write, with the same
    numbers in both. A kind of network says what its stage is and what f its loop calls."""

    title: str
    contestant_names: tuple[str, ...] = (STANDARD, CHECKPOINT, *RULES)
    baselines: tuple[str, ...] = (STANDARD,)
    """The faster of these is what others are compared with."""
    products: ClassVar[dict[str, int]]
    """Products (a layer's, its data gradient's or its weight gradient's) per block and training
    step of an untied Euler stage, once it is under way."""
    states_moved: ClassVar[dict[str, int]] = {}
    """Fused stages: how often a state, a cotangent or an evaluation that is remembered is read or
    written per block and training step of an untied Euler stage. The forward pass takes the state
    in and out, the reverse pass state and cotangent; ``predicted`` of order 2 reads two evaluations
    and writes one."""
    depths: tuple[int, ...] = (4, 16, 64, 256, 1024)
    """To measure by default, as is what follows."""
    hidden_factor: float = 1
    compiled_length = 16
    """Steps that ``torch.compile`` is given at a time."""
    batch, size, activation = 1024, 1, "tanh"

    stage: rk.Stage
    x: Tensor
    cotangent: Tensor

    def __init__(self, config: Config) -> None:
        self.config = config
        self.output: Tensor | None = None
        self._walk_compiled: Callable[[list[Layer], Tensor], Tensor] | None = None

    def layers_of(self, x: Tensor) -> Sequence[Layer]:
        """The blocks as the plain loop has them for a state like x; tied: one."""
        raise NotImplementedError

    def block(self, layer: Layer, x: Tensor) -> Tensor:
        """f in the plain loop."""
        raise NotImplementedError

    def product_flops(self) -> float:
        """Of one product, as the plain formula counts them."""
        raise NotImplementedError

    def kernel_flops(self) -> float:
        """Of one product, as the fused kernels make it."""
        return self.product_flops()

    def product_count(self, name: str) -> float:
        """In a training step; an evaluation of f is a third of what standard backprop makes."""
        starting = STARTING.get(name, 0) * self.products[STANDARD] / 3
        return self.config.depth * self.products[name] + starting

    def bytes_moved(self, rule: str) -> float:
        """Of a training step of a fused stage, at least: each pass over a block takes its states
        once in and once out of memory, and its weights, and their gradients, once. If all of it
        stays in a cache, memory sees less."""
        weights = 3 * sum(p.nbytes for p in self.stage.parameters())
        return weights + self.config.depth * self.states_moved[rule] * self.x.nbytes

    def parameters(self) -> list[nn.Parameter | Tensor]:
        """Those of the stage and of the loop."""
        raise NotImplementedError

    def gradients(self) -> Tensor:
        """All parameter gradients of the step just taken, as one vector."""
        raise NotImplementedError

    # -- training steps

    def contestants(self) -> dict[str, Callable[[], None]]:
        steps = self.training_steps()
        return {name: steps[name] for name in self.contestant_names}

    def training_steps(self) -> dict[str, Callable[[], None]]:
        depth = self.config.depth
        steps = {
            STANDARD: lambda: self.train(lambda x: self.steps(0, depth, x)),
            COMPILED: lambda: self.train(self._compiled),
            PER_BLOCK: lambda: self.train(lambda x: self._checkpointed(1, x)),
            CHECKPOINT: lambda: self.train(
                lambda x: self._checkpointed(math.ceil(math.sqrt(depth)), x)
            ),
            PLAIN: lambda: self.train(self._plain_adjoint),
        }
        if self.config.scheme == "heun":
            del steps[PLAIN]
        for rule in RULES:
            steps[rule] = self._rule_step(rule, "auto")
        return steps

    def reference_step(self, rule: str) -> Callable[[], None]:
        """A training step by the rule's definition in plain PyTorch."""
        return self._rule_step(rule, "reference")

    def _rule_step(self, rule: str, backend: str) -> Callable[[], None]:
        return lambda: self.train(self.stage.configure(reverse=rule, backend=backend))

    def forget(self) -> None:
        """Drops gradients and the output, as between two steps."""
        self.output = None
        for p in self.parameters():
            p.grad = None

    def train(
        self, forward: Callable[[Tensor], Tensor], x: Tensor | None = None, g: Tensor | None = None
    ) -> None:
        """A training step with ``forward`` as the network."""
        x = (self.x if x is None else x).detach().requires_grad_()
        y = forward(x)
        self.output = y.detach()
        y.backward(self.cotangent if g is None else g)

    def steps(self, begin: int, end: int, x: Tensor) -> Tensor:
        """The plain loop, from x[begin] = x to x[end]."""
        return self.walk(self.layers_between(begin, end, x), x)

    def layers_between(self, begin: int, end: int, x: Tensor) -> list[Layer]:
        """Those of the steps from x[begin] = x to x[end]."""
        blocks = Options(scheme=self.config.scheme).blocks(end - begin)
        layers = self.layers_of(x)
        return [layers[0 if self.config.tied else n] for n in range(begin, begin + blocks)]

    def walk(self, layers: Sequence[Layer], x: Tensor) -> Tensor:
        h = 1 / self.config.depth
        if self.config.scheme == "euler":
            for layer in layers:
                x = torch.add(x, self.block(layer, x), alpha=h)
            return x
        for layer, following in pairwise(layers):
            a = self.block(layer, x)
            a = (a + self.block(following, torch.add(x, a, alpha=h))) * 0.5
            x = torch.add(x, a, alpha=h)
        return x

    def _checkpointed(self, length: int, x: Tensor) -> Tensor:
        for begin in range(0, self.config.depth, length):
            end = min(begin + length, self.config.depth)
            x = checkpoint(self.steps, begin, end, x, use_reentrant=False)
        return x

    def _compiled(self, x: Tensor) -> Tensor:
        """The plain loop in compiled segments: one compilation, of a function of the layers' own
        parameters, serves all of them, for that of a deep loop takes minutes. A segment is as long
        as it pays: small MLP blocks, compiled one by one, are slower than eager ones; modules, four
        at a time, no faster than one by one."""
        if self._walk_compiled is None:
            torch._dynamo.reset()  # the code of other networks is not searched for this one's
            self._walk_compiled = torch.compile(self.walk, fullgraph=True, dynamic=False)
        for begin in range(0, self.config.depth, self.compiled_length):
            end = min(begin + self.compiled_length, self.config.depth)
            x = self._walk_compiled(self.layers_between(begin, end, x), x)
        return x

    def _plain_adjoint(self, x: Tensor) -> Tensor:
        layers = self.layers_between(0, self.config.depth, x)
        return plain_adjoint(self.block, layers, 1 / self.config.depth, x)


class StackedNetwork(Network):
    """A stage with the parameters of all blocks in one tensor; the loop has one per layer."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(0)
        self.stage = self.make_stage(tied=config.tied, scheme=config.scheme, device=config.device)
        for parameter in self.stage.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 3 else 0.1
            with torch.no_grad():
                parameter.copy_(scale * self._draw(parameter.shape, generator))
        self.layers = [
            [p[n].detach().clone().requires_grad_() for p in self.stage.parameters()]
            for n in range(self.stage.num_blocks)
        ]
        batch = torch.randn(2, config.batch, config.dim, generator=generator)
        self.x, self.cotangent = batch.to(config.device)

    def make_stage(self, **options: Any) -> rk.Stage:
        raise NotImplementedError

    def product_flops(self) -> float:
        return 2 * self.config.batch * self.config.dim * self.config.hidden

    def layers_of(self, x: Tensor) -> Sequence[Layer]:
        return self.layers

    def parameters(self) -> list[nn.Parameter | Tensor]:
        return [*self.stage.parameters(), *(p for layer in self.layers for p in layer)]

    def gradients(self) -> Tensor:
        if self.layers[0][0].grad is not None:
            grads = [
                torch.stack([layer[i].grad for layer in self.layers])
                for i in range(len(self.layers[0]))
            ]
        else:
            grads = [p.grad for p in self.stage.parameters()]
        return torch.cat([g.flatten() for g in grads])

    def _draw(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Standard normal entries: one draw per layer, or linear in depth between two draws."""
        if self.config.weights != "smooth":
            return torch.randn(shape, generator=generator)
        first, last = torch.randn(2, *shape[1:], generator=generator)
        t = torch.linspace(0, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
        return (1 - t) * first + t * last


class MLPNetwork(StackedNetwork):
    title = "Residual MLP stage"
    products: ClassVar = {STANDARD: 6, "paper": 9, "refined": 10, "predicted": 8}
    states_moved: ClassVar = {"paper": 6, "refined": 6, "predicted": 9}

    def make_stage(self, **options: Any) -> rk.Stage:
        c = self.config
        return rk.MLPStage(c.dim, c.hidden, c.depth, c.activation, **options)

    def block(self, layer: Layer, x: Tensor) -> Tensor:
        w1, b1, w2, b2 = layer
        sigma = getattr(F, self.config.activation)
        return torch.addmm(b2, sigma(torch.addmm(b1, x, w1.t())), w2.t())


class LinearNetwork(StackedNetwork):
    title = "Residual linear stage"
    products: ClassVar = {STANDARD: 3, "paper": 4, "refined": 5, "predicted": 4}
    states_moved: ClassVar = {"paper": 6, "refined": 6, "predicted": 9}

    def make_stage(self, **options: Any) -> rk.Stage:
        return rk.LinearStage(self.config.dim, self.config.depth, **options)

    def block(self, layer: Layer, x: Tensor) -> Tensor:
        return torch.mm(x, layer[0].t())


class ModuleNetwork(Network):
    """A stage of modules; the loop calls the same ones."""

    contestant_names = (STANDARD, PER_BLOCK, CHECKPOINT, *RULES)
    depths = (4, 16, 64)
    compiled_length = 1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        torch.manual_seed(0)
        self.stage = self.make_stage().to(config.device)
        if config.weights == "smooth":
            self._interpolate(self.stage.blocks)
        self.x, self.cotangent = torch.randn(2, *self.shape()).to(config.device)

    def make_stage(self) -> rk.ResidualStage:
        raise NotImplementedError

    def shape(self) -> tuple[int, ...]:
        """Of the batch."""
        raise NotImplementedError

    def layers_of(self, x: Tensor) -> Sequence[Layer]:
        return self.stage.blocks

    def block(self, layer: Layer, x: Tensor) -> Tensor:
        return layer(x)

    def parameters(self) -> list[nn.Parameter | Tensor]:
        return list(self.stage.parameters())

    def gradients(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.stage.parameters()])

    @staticmethod
    def _interpolate(blocks: nn.ModuleList) -> None:
        """Parameters linear in depth between those of the first and the last block."""
        for n, block in enumerate(blocks):
            between = zip(
                block.parameters(), blocks[0].parameters(), blocks[-1].parameters(), strict=True
            )
            with torch.no_grad():
                for p, first, last in between:
                    p.copy_(torch.lerp(first, last, n / (len(blocks) - 1)))


class TransformerNetwork(ModuleNetwork):
    """Pre-norm transformer blocks; the batch is split into sequences of 64 tokens."""

    title = "Stage of transformer blocks"
    products: ClassVar = {STANDARD: 3, PER_BLOCK: 4, "paper": 5, "refined": 5, "predicted": 4}
    hidden_factor = 4

    def make_stage(self) -> rk.ResidualStage:
        c = self.config
        count = 1 if c.tied else Options(scheme=c.scheme).blocks(c.depth)
        blocks = [TransformerBlock(c.dim, c.hidden) for _ in range(count)]
        return rk.ResidualStage(blocks, depth=c.depth, scheme=c.scheme)

    def product_flops(self) -> float:
        """Of all a block's matrix products in one direction."""
        c, (_, tokens, _) = self.config, self.shape()
        return 2 * c.batch * c.dim * (4 * c.dim + 2 * c.hidden + 2 * tokens)

    def shape(self) -> tuple[int, ...]:
        tokens = math.gcd(self.config.batch, 64)
        return self.config.batch // tokens, tokens, self.config.dim


class TransformerBlock(nn.Module):
    """f(x) = a + MLP(norm(x + a)), a = attention(norm(x)): what such a block adds to x."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, dim // 64)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1)
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        a = self.out(y.transpose(1, 2).reshape(batch, tokens, dim))
        return a + self.mlp(self.norm2(x + a))


class ConvNetwork(ModuleNetwork):
    """The paper's basic blocks; PyTorch's loop runs in both memory formats."""

    title = "Residual convolutional stage"
    kind = "basic"
    states_moved: ClassVar = {"paper": 6, "refined": 6, "predicted": 9}
    contestant_names = (STANDARD, CHANNELS_LAST, CHECKPOINT, *RULES)
    baselines = (STANDARD, CHANNELS_LAST)
    products: ClassVar = {STANDARD: 6, CHANNELS_LAST: 6, "paper": 10, "refined": 10, "predicted": 8}
    depths = (4, 16, 64, 128)
    batch, size, activation = 32, 16, "relu"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        last = torch.channels_last
        self.blocks_last = copy.deepcopy(self.stage.blocks).to(memory_format=last)
        self.batch_last = [t.contiguous(memory_format=last) for t in (self.x, self.cotangent)]

    def make_stage(self) -> rk.ResidualStage:
        c = self.config
        options = {"activation": c.activation, "tied": c.tied, "scheme": c.scheme}
        return rk.ConvStage(c.dim, c.depth, self.kind, hidden=c.hidden, **options)

    def shape(self) -> tuple[int, ...]:
        return self.config.batch, self.config.dim, self.config.size, self.config.size

    def product_flops(self) -> float:
        c = self.config
        return 2 * c.batch * c.size**2 * 9 * c.dim * c.hidden

    def kernel_flops(self) -> float:
        """Winograd's: 16 products for each patch of 2 × 2 pixels, in both directions."""
        c = self.config
        return 2 * c.batch * 16 * math.ceil(c.size / 2) ** 2 * c.dim * c.hidden

    def bytes_moved(self, rule: str) -> float:
        """Evaluating a layer takes its input in and its result out; on the way back there are
        gradients beside both. So an evaluation and a product of the way back move the same."""
        c = self.config
        layers = len(WINDOWS[self.kind])
        inside = 2 * (c.dim + (layers - 1) * c.hidden) * c.batch * c.size**2 * self.x.itemsize
        evaluations = self.products[rule] / (self.products[STANDARD] / 3)
        return super().bytes_moved(rule) + c.depth * evaluations * inside

    def training_steps(self) -> dict[str, Callable[[], None]]:
        depth = self.config.depth
        return {
            **super().training_steps(),
            CHANNELS_LAST: lambda: self.train(lambda x: self.steps(0, depth, x), *self.batch_last),
        }

    def layers_of(self, x: Tensor) -> Sequence[Layer]:
        last = x.is_contiguous(memory_format=torch.channels_last)
        return self.blocks_last if last else self.stage.blocks

    def parameters(self) -> list[nn.Parameter | Tensor]:
        return [*self.stage.parameters(), *self.blocks_last.parameters()]

    def gradients(self) -> Tensor:
        grads = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
        return torch.cat(grads)


class BottleneckNetwork(ConvNetwork):
    title = "Residual stage of bottlenecks"
    kind = "bottleneck"
    products: ClassVar = {STANDARD: 3, CHANNELS_LAST: 3, "paper": 5, "refined": 5, "predicted": 4}
    hidden_factor = 0.25

    def product_flops(self) -> float:
        """Of all three convolutions in one direction."""
        c = self.config
        return 2 * c.batch * c.size**2 * c.hidden * (2 * c.dim + 9 * c.hidden)

    def kernel_flops(self) -> float:
        c = self.config
        patches = math.ceil(c.size / 2) ** 2
        return 2 * c.batch * c.hidden * (2 * c.size**2 * c.dim + 16 * patches * c.hidden)


class ConvModulesNetwork(ConvNetwork):
    """The same blocks, run as modules."""

    title = "Stage of convolutional modules"
    contestant_names = (STANDARD, PER_BLOCK, CHECKPOINT, *RULES)
    products: ClassVar = {STANDARD: 6, PER_BLOCK: 8, "paper": 10, "refined": 10, "predicted": 8}
    states_moved: ClassVar = {}

    def make_stage(self) -> rk.ResidualStage:
        c = self.config
        blocks = list(super().make_stage().blocks)
        return rk.ResidualStage(blocks, depth=c.depth if c.tied else None, scheme=c.scheme)


NETWORKS: dict[str, type[Network]] = {
    "mlp": MLPNetwork,
    "linear": LinearNetwork,
    "conv": ConvNetwork,
    "bottleneck": BottleneckNetwork,
    "residual": TransformerNetwork,
    "residual-conv": ConvModulesNetwork,
}


def make_network(config: Config) -> Network:
    return NETWORKS[config.stage](config)
