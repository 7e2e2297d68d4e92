"""What all networks have in common: a stage, the same network as a plain PyTorch loop, and the
count of what a training step multiplies and moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

import resode_kernels as rk
from resode_kernels.options import Options

from . import training
from .config import Config
from .names import CHECKPOINT, RULES, STANDARD

Layer = list[Tensor] | nn.Module
"""A block in the plain loop: its parameters, or a module."""

EXTRA_EVALUATIONS = {"predicted": 4}
"""Evaluations of f that a rule makes beyond those of every step. ``predicted`` of order 2 has no
history to extrapolate from at first: it takes the paper's point and corrects it twice, and corrects
the next point once."""


class Network:
    """One network in two forms that have the same numbers: a stage of resode_kernels, and the loop
    that anyone would write in plain PyTorch. A subclass builds the stage and defines the f that the
    loop calls."""

    title: str
    contestant_names: tuple[str, ...] = (STANDARD, CHECKPOINT, *RULES)
    """The ways to train it that memory_vs_depth.py compares."""
    baselines: tuple[str, ...] = (STANDARD,)
    """Others are compared with the fastest of these."""
    products: ClassVar[dict[str, int]]
    """Products per block and training step of an untied Euler stage, without the extra evaluations
    of its first steps. A product is that of a layer, of its data gradient or of its weight
    gradient."""
    states_moved: ClassVar[dict[str, float]] = {}
    """Of fused stages: how often a training step of an untied Euler stage reads or writes a state,
    a cotangent or a remembered evaluation, per block. The forward pass reads and writes the state,
    the reverse pass state and cotangent; ``predicted`` of order 2 reads two evaluations and writes
    one. ``recorded`` reads and writes a second state, the estimate, in the forward pass, and writes
    and reads codes of a quarter of a state."""

    # The defaults of memory_vs_depth.py and of ``config_of_shape``.
    depths: tuple[int, ...] = (4, 16, 64, 256, 1024)
    hidden_factor: float = 1
    batch, size, activation = 1024, 1, "tanh"

    compiled_length = 16
    """Steps in a segment of the loop that ``torch.compile`` gets."""

    stage: rk.Stage
    x: Tensor
    cotangent: Tensor

    def __init__(self, config: Config) -> None:
        self.config = config
        self.output: Tensor | None = None

    def layers_of(self, x: Tensor) -> Sequence[Layer]:
        """The blocks of the plain loop for a state like x; one block if the network is tied."""
        raise NotImplementedError

    def block(self, layer: Layer, x: Tensor) -> Tensor:
        """f in the plain loop."""
        raise NotImplementedError

    def parameters(self) -> list[nn.Parameter | Tensor]:
        """The parameters of the stage and those of the loop."""
        raise NotImplementedError

    def gradients(self) -> Tensor:
        """All parameter gradients of the last training step, as one vector."""
        raise NotImplementedError

    # -- what a training step multiplies and moves

    def product_flops(self) -> float:
        """FLOPs of one product by the plain formula."""
        raise NotImplementedError

    def kernel_flops(self) -> float:
        """FLOPs of one product in the fused kernels."""
        return self.product_flops()

    def product_count(self, name: str) -> float:
        """Products in a training step. An evaluation of f is a third of those of standard
        backprop."""
        extra = EXTRA_EVALUATIONS.get(name, 0) * self.products[STANDARD] / 3
        return self.config.depth * self.products[name] + extra

    def bytes_moved(self, rule: str) -> float:
        """Bytes that a training step of a fused stage must move: each pass over a block reads and
        writes its states once, and its weights and their gradients once. Memory sees fewer bytes if
        everything stays in a cache."""
        weights = 3 * sum(p.nbytes for p in self.stage.parameters())
        return weights + self.config.depth * self.states_moved[rule] * self.x.nbytes

    # -- training steps

    def contestants(self) -> dict[str, Callable[[], None]]:
        """The training steps of ``contestant_names``."""
        steps = self.training_steps()
        return {name: steps[name] for name in self.contestant_names}

    def training_steps(self) -> dict[str, Callable[[], None]]:
        return training.training_steps(self)

    def reference_step(self, rule: str) -> Callable[[], None]:
        """A training step by the definition of the rule in plain PyTorch."""
        return training.rule_step(self, rule, "reference")

    def train(
        self, forward: Callable[[Tensor], Tensor], x: Tensor | None = None, g: Tensor | None = None
    ) -> None:
        """A training step with ``forward`` as the network."""
        x = (self.x if x is None else x).detach().requires_grad_()
        y = forward(x)
        self.output = y.detach()
        y.backward(self.cotangent if g is None else g)

    def forget(self) -> None:
        """Drops gradients and the output, as between two steps."""
        self.output = None
        for p in self.parameters():
            p.grad = None

    # -- the plain loop

    def plain_loop(self, begin: int, end: int, x: Tensor) -> Tensor:
        """The steps from x[begin] = x to x[end]."""
        return self.walk(self.layers_between(begin, end, x), x)

    def layers_between(self, begin: int, end: int, x: Tensor) -> list[Layer]:
        """The layers of the steps from x[begin] = x to x[end]."""
        blocks = Options(scheme=self.config.scheme).blocks(end - begin)
        layers = self.layers_of(x)
        return [layers[0 if self.config.tied else n] for n in range(begin, begin + blocks)]

    def walk(self, layers: Sequence[Layer], x: Tensor) -> Tensor:
        """The state behind these layers."""
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

    @cached_property
    def compiled_walk(self) -> Callable[[list[Layer], Tensor], Tensor]:
        torch._dynamo.reset()  # or torch would search the code of other networks for this one's
        return torch.compile(self.walk, fullgraph=True, dynamic=False)
