"""Memory does not grow with depth, but for parameters and their gradients."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import peak_allocation
from torch import nn

import resode_kernels as rk
from resode_kernels.backends import cpp, native
from resode_kernels.backends.contract import ForwardIO
from resode_kernels.options import Options
from resode_kernels.problem import Kept, Problem

ROWS, DIM = 512, 48
STATE = ROWS * DIM * 4


def saved_bytes(stage: rk.Stage, x: torch.Tensor) -> int:
    """What autograd holds between the passes, parameters aside."""
    parameters = {p.data_ptr() for p in stage.parameters()}
    held = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            held[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        stage(x)
    return sum(held.values())


# At depth 64; stages of modules keep the whole graph for "stored", as standard training does.
HELD = [
    ({"reverse": "paper"}, 1),
    ({"reverse": "refined"}, 1),
    ({"reverse": "predicted", "order": 3}, 1),
    ({"anchor_every": 10}, 1 + 6),
    ({"backward": "checkpoint"}, 8),
]


@pytest.mark.parametrize(("options", "states"), [*HELD, ({"backward": "stored"}, 64)], ids=str)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_autograd_holds_one_state_and_the_anchors(
    options: dict[str, Any], states: int, scheme: str
) -> None:
    stage = rk.MLPStage(DIM, DIM, 64, scheme=scheme, **options)
    assert saved_bytes(stage, torch.randn(ROWS, DIM)) == states * STATE


@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("kind", ["mlp", "conv", "modules", "images of modules"])
def test_increments_in_8_bits_take_less_than_a_third_of_a_state_per_block(
    kind: str, scheme: str
) -> None:
    """Codes of 8 bits, and a scale of 16 bits for 32 elements: 0.266 float32 states."""
    depth, options = 24, {"scheme": scheme, "reverse": "recorded", "kinks": False}
    x = torch.randn(ROWS, 64)
    if kind == "mlp":
        stage: rk.Stage = rk.MLPStage(64, 64, depth, **options)
    elif kind == "conv":
        stage, x = rk.ConvStage(64, depth, tied=True, **options), torch.randn(4, 64, 6, 6)
    elif kind == "modules":
        stage = rk.ResidualStage([block(64)], depth=depth, **options)
    else:
        stage, x = rk.ResidualStage([nn.Tanh()], depth=depth, **options), torch.randn(4, 8, 4, 8)
        x.requires_grad_()
    held = saved_bytes(stage, x) / x.nbytes
    assert held <= 1 + 0.30 * depth
    assert held == pytest.approx(1 + (depth - 1) * (8 + 16 / 32) / 32)


def block(dim: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
    )


@pytest.mark.parametrize(("options", "states"), HELD, ids=str)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_autograd_holds_one_state_and_the_anchors_of_a_stage_of_modules(
    options: dict[str, Any], states: int, scheme: str
) -> None:
    if options == {"backward": "checkpoint"}:
        states = 64  # the activations of a block take more than all states
    stage = rk.ResidualStage([block(DIM)], depth=64, scheme=scheme, **options)
    assert saved_bytes(stage, torch.randn(ROWS, DIM)) == states * STATE


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("options", "states"), [({"reverse": "paper"}, 1), ({"anchor_every": 10}, 1 + 6)], ids=str
)
def test_autograd_holds_one_state_and_the_anchors_of_a_convolutional_stage(
    options: dict[str, Any], states: int, memory_format: torch.memory_format
) -> None:
    stage = rk.ConvStage(8, 64, tied=True, **options)
    x = torch.randn(4, 8, 6, 6).to(memory_format=memory_format)
    assert saved_bytes(stage, x) == states * x.nbytes


@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("options", [{"reverse": r} for r in ("paper", "refined", "predicted")])
@pytest.mark.parametrize("kind", ["modules", "conv"])
def test_live_memory_does_not_grow_with_depth(
    kind: str, options: dict[str, Any], scheme: str
) -> None:
    """What torch has allocated at the worst moment of a step, gradients of parameters aside."""

    def peak(depth: int) -> int:
        count = depth + (scheme == "heun")
        if kind == "conv":
            stage: rk.Stage = rk.ConvStage(16, depth, scheme=scheme, **options)
            x = torch.randn(16, 16, 12, 12, requires_grad=True)
        else:
            stage = rk.ResidualStage([block(DIM) for _ in range(count)], scheme=scheme, **options)
            x = torch.randn(ROWS, DIM, requires_grad=True)
        most = peak_allocation(lambda: stage(x).sum().backward(), [x, *stage.parameters()])
        return most - sum(p.grad.nbytes for p in stage.parameters())

    assert peak(40) <= 1.02 * peak(10)


@pytest.mark.parametrize("kind", ["modules", "conv"])
def test_live_memory_grows_by_what_is_recorded(kind: str) -> None:
    """Codes and scales, and nothing else."""

    def peak(depth: int) -> int:
        if kind == "conv":
            stage: rk.Stage = rk.ConvStage(32, depth, reverse="recorded")
            x = torch.randn(8, 32, 12, 12, requires_grad=True)
        else:
            stage = rk.ResidualStage([block(DIM) for _ in range(depth)], reverse="recorded")
            x = torch.randn(ROWS, DIM, requires_grad=True)
        held = saved_bytes(stage, x)
        most = peak_allocation(lambda: stage(x).sum().backward(), [x, *stage.parameters()])
        return most - sum(p.grad.nbytes for p in stage.parameters()) - held

    assert peak(40) <= 1.02 * peak(10)


def workspace_bytes(block: str, rule: str = "paper", order: int = 1, **changes: Any) -> int:
    """What the kernels ask for in the reverse pass of a stage of which all gradients are wanted."""
    sizes = {
        "activation": "tanh", "scheme": "euler", "steps": 10, "step": 0.1, "tied": False,
        "height": 1, "width": 1, "convolutions": [], "epsilon": 1e-5, "stream": "float32",
        "storage": "float32", "anchor_every": 0, "bits": [], "threads": 2,
        "hidden": changes["dim"], **changes,
    }  # fmt: skip
    blocks = 1 if sizes["tied"] else sizes["steps"] + (sizes["scheme"] == "heun")
    count = {"mlp": 4, "linear": 1, "conv": 5 * len(sizes["convolutions"]) * blocks}[block]
    memory, absent = (64, 1 << 50), (0, 0)  # never touched by a plan
    # Given mean and variance have no gradient.
    gradients = [absent if block == "conv" and i % 5 >= 3 else memory for i in range(count)]
    if rule == "recorded":
        sizes["bits"] = [8]
    stage = cpp._C.Stage(block=block, parameters=[memory] * count, **sizes)
    io = cpp._C.Reverse(
        reverse_rule=rule, order=order, start=memory, anchors=memory, codes=memory,
        scales=memory, signs=absent, cotangent=memory,
        grad_x=memory, gradients=gradients, nonfinite=absent,
    )  # fmt: skip
    return int(cpp._C.plan(stage, io).workspace_bytes)


@pytest.mark.needs_cpp
def test_a_plan_keeps_the_stage_and_io_that_it_was_made_of() -> None:
    x, y = torch.randn(8, 8), torch.empty(8, 8)
    method = Options(step=1.0).method(1)
    weights = [i * torch.eye(8).unsqueeze(0) for i in range(100)]

    def plan(weight: torch.Tensor) -> Any:
        problem = Problem("linear", "identity", (weight,), method)
        stage = native.stage_of(cpp._C, problem, [weight], x)
        return cpp._C.plan(stage, native.forward_of(cpp._C, ForwardIO(x, y, Kept(x), x)))

    for i, planned in enumerate([plan(weight) for weight in weights]):
        workspace = torch.empty(planned.workspace_bytes, dtype=torch.uint8)
        planned.run(native.memory(workspace), False)
        torch.testing.assert_close(y, (1 + i) * x)


def convolutional_workspace_bytes(channels: int, size: int, images: int, **changes: Any) -> int:
    return workspace_bytes(
        "conv", rows=images * size**2, dim=channels, height=size, width=size,
        convolutions=[(channels, channels, 3)] * 2, **changes,
    )  # fmt: skip


@pytest.mark.needs_cpp
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize(
    ("rule", "order", "states"),
    [("paper", 1, 1), ("refined", 2, 1), ("predicted", 3, 1 + 3), ("recorded", 1, 1)],
)
@pytest.mark.parametrize("tied", [False, True])
def test_workspace_of_the_reverse_pass(
    rule: str, order: int, states: int, scheme: str, tied: bool
) -> None:
    """One state (grad_x holds the cotangent), the history, and one block's scratch per thread."""

    def workspace(steps: int, rows: int) -> int:
        return workspace_bytes(
            "mlp", rule, order, scheme=scheme, tied=tied, steps=steps, rows=rows, dim=64
        )

    assert workspace(10, 8192) == workspace(10_000, 8192)
    shared = 1 if rule == "paper" and (scheme == "heun" or tied) else 0  # evaluations used twice
    per_row = (workspace(10, 16384 * 8) - workspace(10, 8192 * 8)) / (8192 * 8)
    assert per_row == pytest.approx((states + shared) * 64 * 4, rel=1e-3)


@pytest.mark.needs_cpp
def test_few_wide_rows_take_no_copy_of_a_block_for_every_thread() -> None:
    """Threads share it where rows are few."""

    def workspace(rows: int) -> int:
        return workspace_bytes("linear", rows=rows, dim=512, threads=32)

    copy = 32 * 512 * 512 * 4
    assert workspace(8192) > copy
    assert workspace(32) < copy


@pytest.mark.needs_cpp
@pytest.mark.parametrize(
    ("rule", "order", "states"),
    [("paper", 1, 1), ("refined", 2, 1), ("predicted", 3, 1 + 3), ("recorded", 1, 1)],
)
def test_workspace_of_a_convolutional_stage(rule: str, order: int, states: int) -> None:
    """The same: one state, the history, and of one block p, both layers' results and the cotangent
    between them."""
    size, channels = 8, 32

    def workspace(steps: int, images: int) -> int:
        return convolutional_workspace_bytes(
            channels, size, images, rule=rule, order=order, steps=steps
        )

    assert workspace(10, 64) == workspace(1000, 64)
    per_image = (workspace(10, 2048) - workspace(10, 1024)) / 1024
    assert per_image == pytest.approx((states + 4) * size**2 * channels * 4, rel=1e-3)


@pytest.mark.needs_cpp
def test_wide_convolutions_take_four_sums_of_weight_gradients_at_most() -> None:
    """Not one for every thread."""
    channels, size = 256, 8

    def workspace(threads: int) -> int:
        return convolutional_workspace_bytes(channels, size, images=64, threads=threads)

    sums = 2 * 16 * channels**2 * 4  # at the 16 points of Winograd's scheme
    assert workspace(4) - workspace(1) > 3 * sums
    assert workspace(32) - workspace(4) < 28 * sums / 2


PEAK = """
import sys, torch, resode_kernels as rk
depth, rule = int(sys.argv[1]), sys.argv[2]
def peak():
    lines = open("/proc/self/status")
    return next(int(l.split()[1]) * 1024 for l in lines if l.startswith("VmHWM"))
def step(stage, x):
    stage(x).sum().backward()
x = torch.randn(4096, 64)
step(rk.MLPStage(64, 64, 8, reverse=rule), x)
stage = rk.MLPStage(64, 64, depth, reverse=rule)
open("/proc/self/clear_refs", "w").write("5")
before = peak()
step(stage, x)
print(peak() - before, sum(p.nbytes for p in stage.parameters()))
"""


@pytest.mark.slow
@pytest.mark.needs_cpp
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads peak memory from /proc")
@pytest.mark.parametrize("rule", ["paper", "refined", "predicted"])
def test_peak_memory_of_a_training_step(rule: str, tmp_path: Path) -> None:
    """From depth 64 to 1024 the resident peak grows by what the parameters' gradients take."""

    def run(depth: int) -> tuple[int, int]:
        command = [sys.executable, "-c", PEAK, str(depth), rule]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        peak, parameters = map(int, result.stdout.split())
        return peak, parameters

    (shallow, shallow_parameters), (deep, deep_parameters) = run(64), run(1024)
    # The parameters themselves were there before the step: only their gradients are new.
    assert deep - shallow < 1.05 * (deep_parameters - shallow_parameters)


PAGE = 2 << 20
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def asks_for_large_pages(address: int) -> bool:
    """Whether the mapping that the address is in was advised to have them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(text, 16) for text in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    raise ValueError(f"{address:#x} is not mapped")


@pytest.mark.needs_cpp
@pytest.mark.skipif(not THP.exists(), reason="this kernel has no transparent huge pages")
def test_large_gradients_are_made_of_large_pages() -> None:
    stage = rk.MLPStage(512, 512, 40, backend="cpp", reverse="paper")  # 40 MiB: mapped anew
    stage(torch.randn(4, 512)).sum().backward()
    assert stage.w1.grad is not None
    begin = stage.w1.grad.data_ptr()
    end = begin + stage.w1.grad.nbytes
    assert asks_for_large_pages(-(-begin // PAGE) * PAGE)
    assert asks_for_large_pages(end // PAGE * PAGE - 1)


@pytest.mark.needs_cpp
@pytest.mark.skipif(not THP.exists(), reason="this kernel has no transparent huge pages")
def test_only_whole_large_pages_are_asked_for() -> None:
    with mmap.mmap(-1, 8 * PAGE) as memory:
        view = torch.frombuffer(memory, dtype=torch.uint8)
        first = -(-view.data_ptr() // PAGE) * PAGE
        cpp._C.use_large_pages(first + 4096, 2 * PAGE)  # the rest of a page, a page, its beginning
        cpp._C.use_large_pages(first + 3 * PAGE + 4096, PAGE)  # no whole one
        asked = [asks_for_large_pages(first + i * PAGE) for i in range(5)]
        del view
    assert asked == [False, True, False, False, False]
