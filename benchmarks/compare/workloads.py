"""The workloads of compare.py: networks, batches, and the contestants that train them."""

from __future__ import annotations

from typing import NamedTuple

from contestants import EVERYONE
from networks import (
    BFLOAT16_STATES,
    CHANNELS_LAST,
    CHECKPOINT,
    COMPILED,
    PER_BLOCK,
    RULES,
    STANDARD,
    Config,
    config_of_shape,
)
from peers import PEERS

# For sweeps: without the contestants that are slower than these everywhere.
SWEEP = (STANDARD, CHANNELS_LAST, COMPILED, CHECKPOINT, "paper", "predicted", "recorded")
# torchdiffeq is the only other package with Heun's steps.
HEUN = (STANDARD, COMPILED, CHECKPOINT, *PEERS, *RULES)
# For steps that take seconds: the fastest of the contestants with the same idea.
LARGE = (
    *(STANDARD, CHANNELS_LAST, COMPILED, PER_BLOCK, CHECKPOINT, BFLOAT16_STATES),
    *("torchdiffeq, call per block", "momentumnet", "RevTorch"),
    *RULES,
)
# For stages of modules: PyTorch's own methods and the rules.
MODULES = (STANDARD, COMPILED, PER_BLOCK, CHECKPOINT, BFLOAT16_STATES, *RULES)


class Workload(NamedTuple):
    config: Config
    names: tuple[str, ...]


def workload(
    shape: str, names: tuple[str, ...], stage: str = "mlp", scheme: str = "euler"
) -> Workload:
    return Workload(config_of_shape(shape, stage, scheme), names)


# Depths are such that standard backprop needs less than some two seconds and 6 GB on two cores.
BATCHES = {
    32: ("32,32,256", "32,256,256", "32,2048,64", "32,16384,32", "32,65536,16"),
    64: ("64,32,256", "64,256,256", "64,2048,64", "64,16384,16", "64,65536,16"),
    128: ("128,32,256", "128,256,128", "128,2048,64", "128,16384,16"),
    256: ("256,32,64", "256,256,64", "256,2048,16", "256,16384,16"),
    512: ("512,32,64", "512,256,16", "512,2048,16"),
}
DEPTHS = ("64,1024,16", "64,1024,64", "64,1024,256", "64,1024,1024")
# A small and a large batch, and every width.
ALL = ("64,32,64", "64,2048,64", "128,2048,64", "256,2048,16", "512,256,16")

WORKLOADS = [
    *(workload(shape, EVERYONE) for shape in ALL),
    *(
        workload(shape, SWEEP)
        for shape in (*DEPTHS, *(shape for shapes in BATCHES.values() for shape in shapes))
        if shape not in ALL
    ),
    workload("64,1024,64", HEUN, scheme="heun"),
    workload("16,256,64,10", EVERYONE, "conv"),
    workload("64,32,16,32", LARGE, "conv"),
    workload("256,32,16,8", LARGE, "conv"),
    workload("256,32,16,8", EVERYONE, "bottleneck"),
    workload("256,512,16", EVERYONE, "residual"),
    workload("32,16,64,16", MODULES, "residual-conv"),
]

# One of every kind, each in a fraction of a second.
QUICK = [
    workload("64,128,16", EVERYONE),
    workload("64,32,16", SWEEP),
    workload("128,32,16", SWEEP),
    workload("64,32,16", HEUN, scheme="heun"),
    workload("16,8,16,8", EVERYONE, "conv"),
    workload("256,4,8,4", EVERYONE, "bottleneck"),
    workload("64,128,8", EVERYONE, "residual"),
]
