"""The gate: how large the errors of a contestant's gradients may be for its time to count, and the
check that they are not larger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from networks import BFLOAT16_STATES, PLAIN, RULES, STANDARD, Config, Network
from torch import Tensor

# Relative errors of all parameter gradients, in float32. Methods that store or recompute the
# states, or invert a step exactly, are off by rounding only. So are two implementations of one rule
# (measured: up to 3e-6). But the gradient jumps where the kink of a relu lies between two roundings
# of a state. Then even PyTorch's two memory formats differ by 1e-3 (the inverse of a coupling:
# 5e-3), and by 3e-15 in float64. So do increments that one rounding takes to the next level of the
# rule "recorded" (measured: up to 2e-5).
ROUNDING = 1e-5
ROUNDING_OF_INCREMENTS = 1e-4
ROUNDING_AT_KINKS = 1e-2
# Methods that reconstruct the states approximately are off by CONSTANT · h^order. The orders hold
# for weights that are independent from layer to layer, as they are here. The kinks of relu halve
# them. One constant serves all workloads (measured: 0.02 to 2).
CONSTANT = 3
ORDERS = {
    "paper": 1, PLAIN: 1, "torchdiffeq": 1, "torchdiffeq, call per block": 1,
    "refined": 2, "predicted": 1, "recorded": 1,
}  # fmt: skip
# A state in bfloat16 is off by 2⁻⁹ at most, relatively (measured: 2e-3, at kinks 5e-2).
BFLOAT16 = 1e-2
BFLOAT16_AT_KINKS = 0.2


def rounding_error(config: Config, name: str = "") -> float:
    if config.activation == "relu":
        return ROUNDING_AT_KINKS
    return ROUNDING_OF_INCREMENTS if name == "recorded" else ROUNDING


def stated_error(name: str, config: Config) -> float:
    """The relative error that a contestant's gradients may have against plain backprop."""
    if name == BFLOAT16_STATES:
        return BFLOAT16_AT_KINKS if config.activation == "relu" else BFLOAT16
    if name not in ORDERS:
        return rounding_error(config)
    order = ORDERS[name] / (2 if config.activation == "relu" else 1)
    return max(CONSTANT * config.depth**-order, rounding_error(config))


@dataclass
class Contestant:
    """A way to train a network.

    network   the network that it trains: a stage of ours, or an architecture of another package
    step      a training step; it leaves output and gradients in the network
    stated    the error that its gradients may have
    twin      a step of the same algorithm in plain PyTorch. Only the rules have one: the error that
              they state is the error of the algorithm, which is too coarse to find a kernel that is
              wrong by a little
    rounding  the difference that step and twin may have
    """

    network: Network
    step: Callable[[], None]
    stated: float
    twin: Callable[[], None] | None = None
    rounding: float = ROUNDING


def own_contestant(network: Network, name: str) -> Contestant:
    """A contestant that needs no other package: one of the training steps of the network."""
    twin = network.reference_step(name) if name in RULES else None
    step = network.training_steps()[name]
    config = network.config
    return Contestant(network, step, stated_error(name, config), twin, rounding_error(config, name))


class Refused(Exception):
    """The results of a contestant are not what it states."""


class StepResult(NamedTuple):
    """The results of a training step."""

    output: Tensor
    gradients: Tensor


def run_step(network: Network, step: Callable[[], None]) -> StepResult:
    try:
        step()
        assert network.output is not None
        return StepResult(network.output, network.gradients())
    finally:
        network.forget()


def relative_error(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


class Gate:
    """Compares each contestant with plain backprop through the network that it trains."""

    def __init__(self) -> None:
        self.exact: dict[Network, StepResult] = {}

    def check(self, contestant: Contestant) -> float:
        """The error of its gradients. Raises Refused if the output is wrong or the error is larger
        than stated."""
        network = contestant.network
        if network not in self.exact:
            self.exact[network] = run_step(network, network.training_steps()[STANDARD])
        exact, mine = self.exact[network], run_step(network, contestant.step)
        if not (off := relative_error(mine.output, exact.output)) <= 1e-4:
            raise Refused(f"its output is off by {off:.1e}")
        if not (error := relative_error(mine.gradients, exact.gradients)) <= contestant.stated:
            raise Refused(f"gradients off by {error:.1e}, stated {contestant.stated:.1e}")
        if contestant.twin is not None:
            twin = run_step(network, contestant.twin)
            off = relative_error(mine.gradients, twin.gradients)
            if not off <= contestant.rounding:
                raise Refused(
                    f"gradients differ by {off:.1e} from the same rule in plain PyTorch, "
                    f"stated {contestant.rounding:.1e}"
                )
        return error
