"""The launches that the depth-fused CUDA kernels would make on a given GPU. Needs none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from targets import Target

from resode_kernels.backends import cuda

DIMS = (16, 32, 64, 128, 256)
ROWS, DEPTH = 65536, 16
SOMEWHERE = (1 << 20, 1 << 50)  # an address and bytes: planning reads nothing
ABSENT = (0, 0)
KEPT = {"anchors": ABSENT, "codes": ABSENT, "scales": ABSENT, "signs": ABSENT}


@dataclass(frozen=True)
class Plan:
    """A launch: the width of the stage, the tile of a thread block, its dynamic shared memory."""

    dim: int | None
    rows: int | None
    chunk: int | None
    shared: int


def plans(kernel: str, precision: str, target: Target) -> Iterator[Plan]:
    """For a depth-fused kernel, a plan for every width of a stage that it covers. For any other
    kernel, one empty plan."""
    if not precision:
        yield Plan(None, None, None, 0)
        return
    module: Any = cuda._CUDA
    gpu = module.Gpu(
        index=0,
        processors=target.multiprocessors,
        shared_memory=target.shared_per_block,
        cache=target.cache,
        tf32=precision == "tf32",
        stream=0,
    )
    for dim in DIMS:
        block = "mlp" if "Mlp" in kernel else "linear"
        stage = _stage(block, dim, precision)
        io = _reverse(block) if "reverse" in kernel else _forward()
        plan = module.plan(stage, io, gpu)
        if plan is not None:
            layout = plan.layout
            yield Plan(dim, layout["rows"], layout["chunk"], layout["shared"])


def _stage(block: str, dim: int, precision: str) -> Any:
    count = 4 if block == "mlp" else 1
    return cuda._CUDA.Stage(
        block=block,
        activation="tanh" if block == "mlp" else "identity",
        scheme="euler",
        steps=DEPTH,
        step=1 / DEPTH,
        tied=False,
        rows=ROWS,
        dim=dim,
        hidden=dim,
        height=1,
        width=1,
        convolutions=[],
        epsilon=0.0,
        stream="float32",
        storage="float32" if precision == "tf32" else precision,
        parameters=[SOMEWHERE] * count,
        anchor_every=0,
        bits=[],
        threads=1,
    )


def _forward() -> Any:
    return cuda._CUDA.Forward(x=SOMEWHERE, y=SOMEWHERE, **KEPT, statistics=ABSENT)


def _reverse(block: str) -> Any:
    count = 4 if block == "mlp" else 1
    return cuda._CUDA.Reverse(
        reverse_rule="refined",
        order=1,
        start=SOMEWHERE,
        **KEPT,
        cotangent=SOMEWHERE,
        grad_x=SOMEWHERE,
        gradients=[SOMEWHERE] * count,
        nonfinite=SOMEWHERE,
    )
