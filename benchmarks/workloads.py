"""What is compared: networks and batches, and who trains them."""

from __future__ import annotations

from typing import NamedTuple

from contestants import EVERYONE
from networks import (
    CHANNELS_LAST,
    CHECKPOINT,
    COMPILED,
    NETWORKS,
    PER_BLOCK,
    RULES,
    STANDARD,
    Config,
)
from peers import PEERS

# Sweeps leave out those who are slower than these everywhere.
SWEEP = (STANDARD, CHANNELS_LAST, COMPILED, CHECKPOINT, "paper", "predicted")
# torchdiffeq's is the only other package with Heun's steps.
HEUN = (STANDARD, COMPILED, CHECKPOINT, *PEERS, *RULES)
# Where a step takes seconds: of those with the same idea, the fastest.
LARGE = (
    *(STANDARD, CHANNELS_LAST, COMPILED, CHECKPOINT),
    *("torchdiffeq, call per block", "momentumnet", "RevTorch"),
    *RULES,
)
# Stages of modules beside what PyTorch has.
MODULES = (STANDARD, COMPILED, PER_BLOCK, CHECKPOINT, *RULES)


class Workload(NamedTuple):
    config: Config
    names: tuple[str, ...]


def shaped(shape: str, stage: str = "mlp", scheme: str = "euler") -> Config:
    """``shape``: dim, batch, depth; of images: and their side."""
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


def workload(
    shape: str, names: tuple[str, ...], stage: str = "mlp", scheme: str = "euler"
) -> Workload:
    return Workload(shaped(shape, stage, scheme), names)


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

# Of every kind one that takes no time.
QUICK = [
    workload("64,128,16", EVERYONE),
    workload("64,32,16", SWEEP),
    workload("128,32,16", SWEEP),
    workload("64,32,16", HEUN, scheme="heun"),
    workload("16,8,16,8", EVERYONE, "conv"),
    workload("256,4,8,4", EVERYONE, "bottleneck"),
    workload("64,128,8", EVERYONE, "residual"),
]
