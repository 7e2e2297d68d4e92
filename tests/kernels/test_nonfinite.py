"""Reconstructions that are not finite are never silent: they raise or warn, and name the layer.

The networks that explode here have f_n(x) = −c_n x and h = 1, with c_n such that the state shrinks
a little from step to step but every rule's reconstruction grows, so that what is large to begin
with overflows after some steps back. (An MLP's units are relu(x) and relu(−x).)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import emulated
import pytest
import torch
from helpers import RULES, gradients, name
from torch import Tensor, nn

import resode_kernels as rk
from resode_kernels import nonfinite, reference
from resode_kernels.backends import cuda
from resode_kernels.options import Options

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = [pytest.param("cpp", marks=pytest.mark.needs_cpp), "reference", "cuda", "triton"]
# Who runs which blocks. On GPUs conv runs layer by layer, alike by CUDA's and Triton's kernels, of
# which the interpreter is slow.
KINDS = [
    *(("cpp", block) for block in ("relu", "linear", "conv")),
    *(("reference", block) for block in ("relu", "conv", "modules")),
    *(("cuda", block) for block in ("relu", "linear", "conv")),
    ("triton", "relu"),
    ("triton", "linear"),
]
NEEDS = {"cpp": [pytest.mark.needs_cpp]}
RECONSTRUCTING = [*RULES[:6], *({**rule, "anchor_every": 5} for rule in RULES[:5])]
LARGEST = torch.finfo(torch.float32).max
DEPTH, ROWS = 8, 5
# c_0 = c_2 = … and c_1 = c_3 = …: for both schemes x[n+1] = −0.99 x[n], and ``paper`` makes
# x̃[n] = 3 x̃[n+1].
STEEP = {"euler": (1.99, 1.99), "heun": (0.0025, 3.9875)}
LARGE = 6e36


def available(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "cuda" and DEVICE == "cpu":
        emulated.install(monkeypatch)
    elif backend == "cuda" and cuda.unavailable():
        pytest.skip(f"the CUDA kernels are not there: {cuda.unavailable()}")
    elif backend == "cpp" and DEVICE == "cuda":
        pytest.skip("the C++ kernels run on the CPU")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    available(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture(
    params=[pytest.param(kind, marks=NEEDS.get(kind[0], [])) for kind in KINDS], ids="-".join
)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    backend, block = request.param
    available(backend, monkeypatch)
    return {"backend": backend, "block": block}


# --------------------------------------------------------------------------- networks that explode


def exploding(
    block: str, c: float | list[float] | None = None, depth: int = DEPTH, **options: Any
) -> rk.Stage:
    """f_n(x) = −c_n x. ``conv``: for images whose second channel is minus the first."""
    options = {"step": 1.0, **options}
    if block == "linear":
        stage: rk.Stage = rk.LinearStage(3, depth, device=DEVICE, **options)
    elif block == "relu":
        stage = rk.MLPStage(3, 6, depth, "relu", device=DEVICE, **options)
    elif block == "conv":
        stage = rk.ConvStage(2, depth, device=DEVICE, **options).eval()
    else:
        blocks = [Scaled() for _ in range(Options(**options).blocks(depth))]
        stage = rk.ResidualStage(blocks, **options).to(DEVICE)
    eye = torch.eye(3)
    with torch.no_grad():
        for n, factor in enumerate(factors(stage, c)):
            if block == "linear":
                stage.weight[n] = -factor * eye
            elif block == "relu":
                stage.w1[n], stage.w2[n] = (
                    torch.cat([eye, -eye]),
                    -factor * torch.cat([eye, -eye], 1),
                )
                stage.b1[n], stage.b2[n] = 0, 0
            elif block == "conv":
                conv1, conv2 = stage.blocks[n].conv1.weight, stage.blocks[n].conv2.weight
                for weight in (conv1, conv2):
                    weight.zero_()
                conv1[:, :, 1, 1] = torch.eye(2)
                conv2[:, :, 1, 1] = -factor * torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
            else:
                stage.blocks[n].factor.fill_(-factor)
    return stage


def factors(stage: rk.Stage, c: float | list[float] | None) -> list[float]:
    """The c of every block."""
    if c is None:
        return [STEEP[stage.options.scheme][n % 2] for n in range(stage.num_blocks)]
    return c if isinstance(c, list) else [c] * stage.num_blocks


class Scaled(nn.Module):
    """f(x) = factor · x, of a tensor or a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(self.factor * part for part in x)
        return self.factor * x


def inputs(block: str, value: float = LARGE, rows: int = ROWS, **_: Any) -> Tensor:
    """Ordinary numbers, and one entry (conv: a pixel) of the given size."""
    if block != "conv":
        x = torch.randn(rows, 3, device=DEVICE)
        x[rows // 2, 1] = value
        return x
    x = torch.randn(rows, 1, 4, 4, device=DEVICE)
    x[rows // 2, 0, 1, 2] = value
    return torch.cat([x, -x], 1)


def exploded_at(stage: rk.Stage, c: float | list[float] | None = None, value: float = LARGE) -> int:
    """The first point on the way back that float32 cannot hold, by a walk of the specification with
    one number in float64, where nothing overflows."""
    method = stage.options.method(stage.depth)
    one = torch.ones(1, 1, dtype=torch.float64)
    blocks = [reference.Linear(-factor * one) for factor in factors(stage, c)]
    scheme = reference.SCHEMES[method.scheme](blocks, method.step)
    end, kept = reference.forward(scheme, value * one, method.anchor_every)
    found = []

    def watch(n: int, p: Tensor, _: Tensor) -> None:
        if p.abs().item() > LARGEST:
            found.append(n)

    walk = reference.adjoint(method.reverse_rule, method.order, scheme, end, kept, watch=watch)
    reference.reverse(walk, one, lambda *_: None)
    return max(found)


def backward(stage: rk.Stage, x: Any, g: float = 1.0) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = stage(x)
    return list(torch.autograd.grad(y, [x, *stage.parameters()], torch.full_like(y, g)))


@contextmanager
def raises(n: int) -> Iterator[None]:
    with pytest.raises(
        rk.NonFiniteReconstructionError, match=rf"state x\[{n}\] of a stage of N = "
    ):
        yield


@contextmanager
def silence() -> Iterator[None]:
    """Neither an exception nor a warning of ours; Triton's interpreter may have its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", rk.NonFiniteReconstructionWarning)
        yield


# ------------------------------------------------------------------------------ the layer's number


# In Triton's interpreter, which is slow, one rule without and one with anchors.
NAMED = [
    pytest.param(
        kind, options, id=f"{'-'.join(kind)}-{name(options)}", marks=NEEDS.get(kind[0], [])
    )
    for kind in KINDS
    for options in RECONSTRUCTING[:: len(RECONSTRUCTING) - 1 if kind[0] == "triton" else 1]
]


@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize(("kind", "options"), NAMED, indirect=["kind"])
def test_the_layer_is_named(options: dict[str, Any], scheme: str, kind: dict[str, str]) -> None:
    stage = exploding(**kind, scheme=scheme, **options)
    with raises(exploded_at(stage)):
        backward(stage, inputs(**kind))


@pytest.mark.parametrize("rule", ["paper", "refined"])
def test_the_layer_is_the_one_found_by_hand(rule: str, backend: str) -> None:
    stage = exploding("linear", reverse=rule, backend=backend)
    c, n = STEEP["euler"][0], DEPTH
    x = LARGE * (1 - c) ** n
    while True:
        n -= 1
        p = x + c * x
        if abs(p) > LARGEST:
            break
        x = p if rule == "paper" else x + c * p
    with raises(n):
        backward(stage, inputs("linear"))


def test_a_segment_that_explodes_in_the_middle_is_found(kind: dict[str, str]) -> None:
    """An anchor makes the states before it, and x̃[0], finite again."""
    c = [0.0] * 4 + [1.99] * 4 + [0.0] * 4
    stage = exploding(**kind, c=c, depth=12, anchor_every=4, order=2)
    n = exploded_at(stage, c)
    assert 4 <= n < 8
    with raises(n):
        backward(stage, inputs(**kind))


@pytest.mark.needs_cpp
@pytest.mark.parametrize("row", [0, 150, 399])
def test_whichever_thread_finds_it(row: int, threads: int, nan_memory: None) -> None:
    stage = exploding("relu", backend="cpp").cpu()
    x = torch.randn(4000, 3)
    x[10 * row, 2] = LARGE
    with raises(exploded_at(stage)):
        backward(stage, x)


@pytest.mark.needs_cpp
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_entry_of_a_point_is_looked_at(
    bad: float, dtype: torch.dtype, instruction_set: str
) -> None:
    """x[1] = b2 for x[0] = 0, and x̃[0] is what W2 relu(W1 x[1]) makes of it: too much."""
    for dim in (1, 5, 16, 33):
        stage = rk.MLPStage(dim, dim, 1, "relu", step=1.0, dtype=dtype, backend="cpp")
        huge = torch.finfo(dtype).max
        for entry in {0, dim // 2, dim - 1}:
            with torch.no_grad():
                for parameter in stage.parameters():
                    parameter.zero_()
                stage.b2[0, entry] = 2
                stage.w1[0, entry, entry] = 1
                # W2 u = ±∞; or ∞ − ∞ with two units of the same input
                stage.w2[0, entry, entry] = -huge if bad > 0 else huge
                if math.isnan(bad) and dim > 1:
                    other = (entry + 1) % dim
                    stage.w1[0, other, entry] = 1
                    stage.w2[0, entry, other] = -huge
            with raises(0):
                backward(stage, torch.zeros(7, dim, dtype=dtype))


# ------------------------------------------------------- what neither states nor gradients tell


def test_finite_gradients_of_infinite_points_are_found(backend: str) -> None:
    """tanh has no slope at infinity: without the gradient of w1 all are finite, and garbage."""
    dim = 32  # no kernel pads it with zeros, which infinity would turn into NaNs
    stage = rk.MLPStage(dim, dim, 8, "tanh", step=1.0, backend=backend, device=DEVICE)
    with torch.no_grad():
        for p, value in zip(stage.parameters(), (1.0, 0.0, -1e38 / dim, 0.0), strict=True):
            p.fill_(value)
    stage.w1.requires_grad_(False)
    x = torch.full((ROWS, dim), 5e37, device=DEVICE).requires_grad_()

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(stage(x).sum(), [x, stage.b1, stage.w2, stage.b2])

    with raises(5):  # 0.5e38, 1.5e38, 2.5e38 and then 3.5e38
        run()
    stage.configure(nonfinite="ignore")
    assert all(gradient.isfinite().all() for gradient in run())


def test_an_infinite_point_between_finite_states_is_found(backend: str) -> None:
    """x[0] = −1 and x[1] = −1 + b2 = 1, where f overflows: p = −∞. But φ(p) = b2 again, and x̃[0] is
    exact. The gradient of w1 would be 0 · ∞."""
    stage = rk.MLPStage(1, 1, 1, "relu", step=1.0, backend=backend, device=DEVICE)
    with torch.no_grad():
        for p, value in zip(stage.parameters(), (1e20, 0.0, 1e20, 2.0), strict=True):
            p.fill_(value)
    x = -torch.ones(ROWS, 1, device=DEVICE)
    with raises(0):
        backward(stage, x)
    assert backward(stage.configure(nonfinite="ignore"), x)[1].isnan().all()


class Exponential(nn.Module):
    """f(x) = θ eˣ: zero at −∞."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta * x.exp()


def test_an_infinite_point_of_a_module_is_found() -> None:
    stage = rk.ResidualStage([Exponential()], step=1.0)
    x = torch.full((2, 3), 5.0)  # x[1] = 153, and e^153 is too much for float32
    with raises(0):
        backward(stage, x)
    assert all(t.isfinite().all() for t in backward(stage.configure(nonfinite="ignore"), x))


# ----------------------------------------------------------------------------- what is silent


@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_an_infinite_cotangent_is_silent(scheme: str, kind: dict[str, str]) -> None:
    """As loss scaling makes it when it tries out how far it can go."""
    stage = exploding(**kind, c=0.5, depth=3, scheme=scheme)
    with silence():
        grads = backward(stage, inputs(**kind, value=1.0), g=math.inf)
    assert not all(gradient.isfinite().all() for gradient in grads)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_result_that_was_not_finite_is_silent(bad: float, kind: dict[str, str]) -> None:
    stage = exploding(**kind, c=0.5, depth=5, anchor_every=2)
    with silence():
        backward(stage, inputs(**kind, value=bad))


@pytest.mark.parametrize("options", [RULES[8], RULES[9]], ids=name)
def test_what_is_exact_is_silent(options: dict[str, Any], kind: dict[str, str]) -> None:
    stage = exploding(**kind, **options)
    with silence():
        grads = backward(stage, inputs(**kind))
    assert all(gradient.isfinite().all() for gradient in grads)


# ------------------------------------------------------------------------------------- the option


def test_a_warning_names_the_layer_and_gradients_are_as_if_ignored(kind: dict[str, str]) -> None:
    stage = exploding(**kind, nonfinite="warn")
    x, n = inputs(**kind), exploded_at(stage)
    with pytest.warns(rk.NonFiniteReconstructionWarning, match=rf"state x\[{n}\] of a stage"):
        warned = backward(stage, x)
    with silence():
        ignored = backward(stage.configure(nonfinite="ignore"), x)
    for a, b in zip(warned, ignored, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_to_look_changes_no_gradient(kind: dict[str, str], nan_memory: None) -> None:
    stage = exploding(**kind, c=0.5, depth=4)
    x = inputs(**kind, value=1.0)
    looked, ignored = (backward(stage.configure(nonfinite=k), x) for k in ("raise", "ignore"))
    for a, b in zip(looked, ignored, strict=True):
        assert torch.equal(a, b)


def test_the_message_says_what_happened_and_what_helps() -> None:
    for reverse, said in (("refined", "reverse='refined', order=1"), ("paper", "reverse='paper'")):
        stage = exploding("linear", reverse=reverse)
        with pytest.raises(rk.NonFiniteReconstructionError) as error:
            backward(stage, inputs("linear"))
        message = str(error.value)
        for text in (
            f"N = {DEPTH} steps",
            "h = 1",
            said,
            "rk.tune(stage, x)",
            "anchor_every=",
            "backward='checkpoint'",
            "nonfinite='warn'",
        ):
            assert text in message
    assert issubclass(rk.NonFiniteReconstructionError, RuntimeError)


def test_another_value_is_refused() -> None:
    with pytest.raises(ValueError, match="nonfinite must be one of 'raise', 'warn', 'ignore'"):
        rk.LinearStage(3, 4, nonfinite="quiet")


def test_a_stage_is_as_before_when_it_raised() -> None:
    stage = exploding("modules")
    before = list(stage.parameters())
    with pytest.raises(rk.NonFiniteReconstructionError):
        stage(inputs("modules")).sum().backward()
    for a, b in zip(stage.parameters(), before, strict=True):
        assert a is b
        assert a.grad is None
    assert all(gradient.isfinite().all() for gradient in backward(stage, torch.randn(2, 3)))


# -------------------------------------------------------------------------------- surroundings


@pytest.mark.parametrize("part", [0, 1])
def test_every_part_of_a_state_is_looked_at(part: int) -> None:
    stage = exploding("modules")
    x = [torch.randn(2, 3), torch.randn(4, dtype=torch.float64)]
    x[part][1] = LARGE if part == 0 else 1e304
    x = tuple(t.requires_grad_() for t in x)
    y = stage(x)
    with pytest.raises(rk.NonFiniteReconstructionError, match=r"x\[\d+\]"):
        torch.autograd.backward(y, [torch.ones_like(t) for t in y])


def test_a_stage_without_rows_is_silent() -> None:
    for block in ("relu", "modules"):
        with silence():
            backward(exploding(block), torch.empty(0, 3, device=DEVICE))


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_compiled_stages_raise_too(backend: str) -> None:
    torch._dynamo.reset()
    stage = exploding("relu", backend=backend)
    compiled = torch.compile(stage, fullgraph=True)
    y = compiled(inputs("relu").requires_grad_())
    with raises(exploded_at(stage)):
        y.sum().backward()
    with silence():
        compiled(inputs("relu", value=1.0).requires_grad_()).sum().backward()


def test_parameters_in_bfloat16(backend: str) -> None:
    stage = exploding("linear", backend=backend).to(torch.bfloat16)
    x = inputs("linear").to(torch.bfloat16)
    c = -stage.weight[0, 0, 0].item()
    with raises(exploded_at(stage, c, x.max().item())):
        backward(stage, x)


def test_products_that_float16_cannot_hold(backend: str) -> None:
    """Kernels on GPUs round operands to the dtype of the weights: p is not finite where they
    overflow, and everybody else goes on."""
    stage = exploding("linear", backend=backend).to(torch.float16)
    x = inputs("linear", value=6e4).to(torch.float16)
    if backend in ("cuda", "triton"):
        with pytest.raises(rk.NonFiniteReconstructionError):
            backward(stage, x)
    else:
        with silence():
            backward(stage, x)


def test_nobody_waits_for_a_gpu_whose_stream_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    method = Options().method(3)
    state: Any = SimpleNamespace(is_meta=False, is_cuda=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert nonfinite.is_checked(method, state)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not nonfinite.is_checked(method, state)
    assert nonfinite.is_checked(method, torch.ones(2))
    assert not nonfinite.is_checked(Options(nonfinite="ignore").method(3), torch.ones(2))


def test_gradients_of_an_ordinary_stage_are_silent(backend: str, nan_memory: None) -> None:
    stage = rk.MLPStage(5, 7, 4, backend=backend, device=DEVICE)
    with silence():
        gradients(stage, *torch.randn(2, 13, 5, device=DEVICE))
