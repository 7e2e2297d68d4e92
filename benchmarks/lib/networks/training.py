"""The training steps of a network: plain backprop, checkpointing, torch.compile, states in
bfloat16, the paper's rule in plain PyTorch, and the reverse rules of resode_kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .kept_states import kept_states
from .names import BFLOAT16_STATES, CHECKPOINT, COMPILED, PER_BLOCK, PLAIN, RULES, STANDARD
from .plain_adjoint import plain_adjoint

if TYPE_CHECKING:
    from .network import Network


def training_steps(network: Network) -> dict[str, Callable[[], None]]:
    """By name. Each runs one forward pass and one backward pass."""
    depth = network.config.depth
    segment = math.ceil(math.sqrt(depth))
    steps = {
        STANDARD: lambda: network.train(lambda x: network.plain_loop(0, depth, x)),
        COMPILED: lambda: network.train(lambda x: compiled_loop(network, x)),
        PER_BLOCK: lambda: network.train(lambda x: checkpointed_loop(network, 1, x)),
        CHECKPOINT: lambda: network.train(lambda x: checkpointed_loop(network, segment, x)),
        BFLOAT16_STATES: lambda: network.train(lambda x: kept_states_loop(network, x)),
        PLAIN: lambda: network.train(lambda x: plain_adjoint_loop(network, x)),
    }
    if network.config.scheme == "heun":
        del steps[PLAIN], steps[BFLOAT16_STATES]
    for rule in RULES:
        steps[rule] = rule_step(network, rule, "auto")
    return steps


def rule_step(network: Network, rule: str, backend: str) -> Callable[[], None]:
    return lambda: network.train(network.stage.configure(reverse=rule, backend=backend))


def checkpointed_loop(network: Network, length: int, x: Tensor) -> Tensor:
    """The plain loop in checkpointed segments of ``length`` steps."""
    depth = network.config.depth
    for begin in range(0, depth, length):
        end = min(begin + length, depth)
        x = checkpoint(network.plain_loop, begin, end, x, use_reentrant=False)
    return x


def compiled_loop(network: Network, x: Tensor) -> Tensor:
    """The plain loop in compiled segments.

    All segments use one compilation: of a function whose arguments are the parameters of the
    layers. Compiling a deep loop as a whole takes minutes. The length of a segment is what is
    fastest: small MLP blocks, compiled one by one, are slower than eager ones; modules, four at a
    time, are no faster than one by one.
    """
    depth, length = network.config.depth, network.compiled_length
    for begin in range(0, depth, length):
        end = min(begin + length, depth)
        x = network.compiled_walk(network.layers_between(begin, end, x), x)
    return x


def kept_states_loop(network: Network, x: Tensor) -> Tensor:
    depth = network.config.depth
    return kept_states(network.block, network.layers_between(0, depth, x), 1 / depth, x)


def plain_adjoint_loop(network: Network, x: Tensor) -> Tensor:
    depth = network.config.depth
    return plain_adjoint(network.block, network.layers_between(0, depth, x), 1 / depth, x)
