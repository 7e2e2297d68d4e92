"""The contestants: PyTorch's ways to train a network, other packages, and our rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gate import Contestant, own_contestant, stated_error
from networks import (
    BFLOAT16_STATES,
    CHANNELS_LAST,
    CHECKPOINT,
    COMPILED,
    PER_BLOCK,
    PLAIN,
    RULES,
    STANDARD,
    Network,
)
from peers import PEERS
from torch import Tensor

EXACT = (STANDARD, CHANNELS_LAST, COMPILED, PER_BLOCK, CHECKPOINT)
EVERYONE = (*EXACT, BFLOAT16_STATES, PLAIN, *PEERS, *RULES)


def contestants_of(network: Network, names: Iterable[str]) -> dict[str, Contestant]:
    """The contestants among ``names`` that can train this network and are installed."""
    own = network.training_steps()
    architectures: dict[Callable[[Network], Network], Network] = {}
    contestants = {}
    for name in names:
        if name in PEERS:
            peer = PEERS[name]
            if not peer.can_train(network.config) or peer.missing():
                continue
            theirs = network
            if peer.network is not None:
                if peer.network not in architectures:
                    architectures[peer.network] = peer.network(network)
                theirs = architectures[peer.network]
            step = _training_step(theirs, peer.forward(theirs))
            contestants[name] = Contestant(theirs, step, stated_error(name, network.config))
        elif name in own:
            contestants[name] = own_contestant(network, name)
    return contestants


def _training_step(network: Network, forward: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    return lambda: network.train(forward)
