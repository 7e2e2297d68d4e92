"""Who trains a network, how well its gradients must be for its time to count, and the gate that
sees to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from networks import (
    CHANNELS_LAST,
    CHECKPOINT,
    COMPILED,
    PER_BLOCK,
    PLAIN,
    RULES,
    STANDARD,
    Config,
    Network,
)
from peers import PEERS
from torch import Tensor

EXACT = (STANDARD, CHANNELS_LAST, COMPILED, PER_BLOCK, CHECKPOINT)
EVERYONE = (*EXACT, PLAIN, *PEERS, *RULES)

# Relative errors of all parameter gradients, in float32. What stores or recomputes the states, or
# inverts a step exactly, is off by rounding only, and so are two implementations of one rule
# (measured: up to 3e-6). But where a relu's kink lies between two roundings of a state the gradient
# jumps: even PyTorch's two memory formats differ by 1e-3 then (5e-3: a coupling's inverse), and by
# 3e-15 in float64.
ROUNDING = 1e-5
ROUNDING_AT_KINKS = 1e-2
# What reconstructs the states approximately is off by CONSTANT · h^order. The orders are those of
# the method for weights that are independent from layer to layer, as they are here; relu's kinks
# halve them. The constant is one for all workloads (measured: 0.02 to 2).
CONSTANT = 3
ORDERS = {
    "paper": 1, PLAIN: 1, "torchdiffeq": 1, "torchdiffeq, call per block": 1,
    "refined": 2, "predicted": 1,
}  # fmt: skip


def rounding(config: Config) -> float:
    return ROUNDING_AT_KINKS if config.activation == "relu" else ROUNDING


def stated_error(name: str, config: Config) -> float:
    """What a contestant's gradients may be off by, relative to plain backprop's."""
    if name not in ORDERS:
        return rounding(config)
    order = ORDERS[name] / (2 if config.activation == "relu" else 1)
    return max(CONSTANT * config.depth**-order, rounding(config))


@dataclass
class Contestant:
    """A way to train a network.

    network   that it trains: our own, or one of another architecture
    step      a training step; what came of it is in the network
    stated    error of its gradients
    twin      a step of the same algorithm, in plain PyTorch: they must agree to rounding. The rules
              have one, for what they state is the error of the algorithm, and too coarse to find a
              kernel that is wrong by a little.
    """

    network: Network
    step: Callable[[], None]
    stated: float
    twin: Callable[[], None] | None = None


def enlist(network: Network, names: Iterable[str]) -> dict[str, Contestant]:
    """Those of ``names`` who can train this network and are installed."""
    steps, config = network.training_steps(), network.config
    others: dict[Callable[[Network], Network], Network] = {}
    contestants = {}
    for name in names:
        stated = stated_error(name, config)
        if name in PEERS:
            peer = PEERS[name]
            if not peer.can_train(config) or peer.missing():
                continue
            if peer.network is not None and peer.network not in others:
                others[peer.network] = peer.network(network)
            theirs = others[peer.network] if peer.network else network
            contestants[name] = Contestant(theirs, _by(theirs, peer.forward(theirs)), stated)
        elif name in steps:
            twin = network.reference_step(name) if name in RULES else None
            contestants[name] = Contestant(network, steps[name], stated, twin)
    return contestants


def _by(network: Network, forward: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    return lambda: network.train(forward)


# --------------------------------------------------------------------------------------- the gate


class Refused(Exception):
    """A contestant's results are not what it states."""


class Result(NamedTuple):
    """What came of a training step."""

    output: Tensor
    gradients: Tensor


def run(network: Network, step: Callable[[], None]) -> Result:
    try:
        step()
        assert network.output is not None
        return Result(network.output, network.gradients())
    finally:
        network.forget()


def relative(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


class Gate:
    """Compares contestants with plain backprop through the network that each of them trains."""

    def __init__(self) -> None:
        self.exact: dict[Network, Result] = {}

    def check(self, contestant: Contestant) -> float:
        """The error of its gradients; Refused, if outputs or gradients are off beyond what is
        stated."""
        network = contestant.network
        if network not in self.exact:
            self.exact[network] = run(network, network.training_steps()[STANDARD])
        exact, mine = self.exact[network], run(network, contestant.step)
        if not (off := relative(mine.output, exact.output)) <= 1e-4:
            raise Refused(f"its output is off by {off:.1e}")
        if not (error := relative(mine.gradients, exact.gradients)) <= contestant.stated:
            raise Refused(f"gradients off by {error:.1e}, stated {contestant.stated:.1e}")
        if contestant.twin is not None:
            twin = run(network, contestant.twin)
            off, allowed = relative(mine.gradients, twin.gradients), rounding(network.config)
            if not off <= allowed:
                raise Refused(
                    f"gradients differ by {off:.1e} from the same rule in plain PyTorch, "
                    f"stated {allowed:.1e}"
                )
        return error
