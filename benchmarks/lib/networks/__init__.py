"""The networks of the benchmarks. Those of ``NETWORKS`` are compared in time and memory: each is a
stage of resode_kernels, the same network as a plain PyTorch loop, and the training steps of both.

config.py         what a network and its batch are
names.py          the names of the ways to train
network.py        what all networks have in common
training.py       their training steps; plain_adjoint.py: the paper's rule in plain PyTorch;
                  kept_states.py: states kept in a low precision
mlp.py            MLP and linear stages
conv.py           convolutional stages
modules.py        stages of modules; transformer.py: transformer blocks

Whole networks, which compute x + f(x) and are trained on data, are modules of PyTorch:

whole.py          what they have in common
gpt.py            a language model over bytes
vit.py            a vision transformer
resnet.py         residual networks with batch norm and relu; an MLP
minilm.py         a pretrained network
"""

from __future__ import annotations

from .config import WEIGHTS, Config
from .conv import BottleneckNetwork, ConvModulesNetwork, ConvNetwork
from .mlp import LinearNetwork, MLPNetwork, StackedNetwork
from .names import (
    BFLOAT16_STATES,
    CHANNELS_LAST,
    CHECKPOINT,
    COMPILED,
    PER_BLOCK,
    PLAIN,
    RULES,
    STANDARD,
    label,
)
from .network import Layer, Network
from .plain_adjoint import parameters_of
from .transformer import TransformerBlock, TransformerNetwork

__all__ = [
    "BFLOAT16_STATES",
    "CHANNELS_LAST",
    "CHECKPOINT",
    "COMPILED",
    "NETWORKS",
    "PER_BLOCK",
    "PLAIN",
    "RULES",
    "STANDARD",
    "WEIGHTS",
    "Config",
    "ConvNetwork",
    "Layer",
    "Network",
    "StackedNetwork",
    "TransformerBlock",
    "config_of_shape",
    "label",
    "make_network",
    "parameters_of",
]

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


def config_of_shape(shape: str, stage: str = "mlp", scheme: str = "euler") -> Config:
    """``shape``: dim, batch and depth, and for images their side: ``"16,256,64,10"``."""
    kind = NETWORKS[stage]
    dim, batch, depth, *size = map(int, shape.split(","))
    return Config(
        stage=stage,
        scheme=scheme,
        dim=dim,
        hidden=int(kind.hidden_factor * dim),
        batch=batch,
        depth=depth,
        size=size[0] if size else kind.size,
        activation=kind.activation,
    )
