"""Ops and compiled modules refuse what does not fit a problem before they touch memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import make_stage, problem_of
from torch import Tensor

import resode_kernels as rk
from resode_kernels.backends import cpp, native
from resode_kernels.options import Options
from resode_kernels.problem import Problem

OPS = torch.ops.resode_kernels
BACKENDS = [pytest.param("cpp", marks=pytest.mark.needs_cpp), "reference"]
ROWS, DIM, HIDDEN, DEPTH = 9, 5, 7, 6


def mlp(**method: Any) -> Problem:
    stage = make_stage("tanh", DIM, HIDDEN, DEPTH, anchor_every=2)
    problem = problem_of(stage)
    parameters = tuple(None if p is None else p.detach() for p in problem.parameters)
    return problem._replace(parameters=parameters, method=problem.method._replace(**method))


def with_parameter(i: int, change: Callable[[Tensor], Tensor | None]) -> Problem:
    problem = mlp()
    parameters = list(problem.parameters)
    parameters[i] = change(parameters[i])
    return problem._replace(parameters=tuple(parameters))


WRONG = {
    "w1 must have three dimensions or more rows": (
        lambda: with_parameter(0, lambda w: w[:, :, :2]), "w1 must have the shape"),
    "w2 too short": (lambda: with_parameter(2, lambda w: w[:, :1]), "w2 must have the shape"),
    "b1 of fewer blocks": (lambda: with_parameter(1, lambda b: b[:3]), "b1 must have the shape"),
    "b2 on another device": (lambda: with_parameter(3, lambda b: b.to("meta")), "b2 is on meta"),
    "w2 of another dtype": (lambda: with_parameter(2, Tensor.half), "w2 is torch.float16"),
    "w1 of float64": (lambda: with_parameter(0, Tensor.double), "w1 is torch.float64"),
    "w1 is flat": (lambda: with_parameter(0, Tensor.flatten), r"w1 the shape \[blocks"),
    "w1 is absent": (lambda: with_parameter(0, lambda w: None), r"w1 the shape \[blocks"),
    "w2 is absent": (lambda: with_parameter(2, lambda w: None), "w2 must be a tensor"),
    "w1 of too few blocks": (lambda: with_parameter(0, lambda w: w[:4]), "parameters of 6 blocks"),
    "a parameter is missing": (
        lambda: mlp()._replace(parameters=mlp().parameters[:3]), "parameters must be w1, b1, w2"),
    "too many steps": (lambda: mlp(steps=2**40), "steps must be from 1 to 2147483647, not 1099"),
    "no steps": (lambda: mlp(steps=0), "steps must be from 1"),
    "a NaN step": (lambda: mlp(step=float("nan")), "step must be a finite number, not nan"),
    "a huge order": (lambda: mlp(order=2**40), "order must be from 1"),
    "order beyond the rule's": (
        lambda: mlp(reverse_rule="predicted", order=4), "order must be from 1 to 3, not 4"),
    "anchor_every < 0": (lambda: mlp(anchor_every=-1), "anchor_every must be from 0"),
    "unknown block": (lambda: mlp()._replace(block="rnn"), "block must be one of"),
    "unknown activation": (lambda: mlp()._replace(activation="x"), "activation must be one of"),
    "identity of an mlp": (
        lambda: mlp()._replace(activation="identity"), "activation must be one of"),
    "unknown scheme": (lambda: mlp(scheme="rk4"), "scheme must be one of"),
    "unknown rule": (lambda: mlp(reverse_rule="x"), "reverse_rule must be one of"),
    "unknown nonfinite": (lambda: mlp(nonfinite="x"), "nonfinite must be one of"),
    "a NaN epsilon": (lambda: mlp()._replace(epsilon=float("nan")), "epsilon must be a finite"),
    "layers of an mlp": (lambda: mlp()._replace(layers=2), "layers must be from 0 to 0, not 2"),
}  # fmt: skip
ERRORS = (TypeError, ValueError)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", WRONG)
def test_both_ops_refuse_a_problem_that_does_not_fit(wrong: str, backend: str, device: str) -> None:
    make, message = WRONG[wrong]
    problem = make()
    if device == "meta":  # the ops' fakes
        if wrong == "b2 on another device":
            problem, message = mlp(), "w1 is on cpu, but the state is on meta"
        else:
            moved = tuple(None if p is None else p.to(device) for p in problem.parameters)
            problem = problem._replace(parameters=moved)
    x = torch.randn(ROWS, DIM, device=device)
    with pytest.raises(ERRORS, match=message):
        OPS.forward.default(x, *problem.flat(), backend)
    needs = [True] * (1 + len(problem.parameters))
    with pytest.raises(ERRORS, match=message):
        OPS.reverse.default(x, x, [x.new_empty(2, ROWS, DIM)], needs, *problem.flat(), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_exact_rule_takes_anchors(backend: str) -> None:
    problem, x = mlp(reverse_rule="exact", anchor_every=0), torch.randn(ROWS, DIM)
    OPS.forward.default(x, *problem.flat(), backend)  # of which nothing is differentiated
    with pytest.raises(ValueError, match="anchor_every must be at least 1"):
        OPS.reverse.default(x, x, [x.new_empty(0, ROWS, DIM)], [True] * 5, *problem.flat(), backend)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": (ROWS, DIM + 1)}, "w1 must have the shape"),
        ({"x": (ROWS, DIM, 1)}, r"the state must have the shape \[rows, dim\]"),
        ({"cotangent": (ROWS - 1, DIM)}, "cotangent must have the shape"),
        ({"anchors": (1, ROWS, DIM)}, r"anchors must have the shape \[2, 9, 5\]"),
        ({"anchors": (2, DIM, ROWS)}, r"anchors must have the shape \[2, 9, 5\]"),
        ({"anchors": (0,)}, r"anchors must have the shape \[2, 9, 5\]"),
        ({"needs": 3}, "needs must have 5 entries"),
        ({"needs": 6}, "needs must have 5 entries"),
        ({"dtype": torch.float16}, "the state must be of the stream's dtype"),
        ({"dtype": torch.int32}, "the state must be of the stream's dtype"),
        ({"anchors_dtype": torch.float16}, "anchors must be torch.float32 on"),
        ({"cotangent_dtype": torch.float64}, "cotangent must be torch.float32 on"),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_reverse_op_refuses_states_that_do_not_fit(
    changes: dict[str, Any], message: str, backend: str, device: str
) -> None:
    shapes = {"x": (ROWS, DIM), "cotangent": (ROWS, DIM), "anchors": (2, ROWS, DIM), **changes}
    dtype = changes.get("dtype", torch.float32)
    start, cotangent, anchors = (
        torch.zeros(shapes[name], dtype=changes.get(f"{name}_dtype", dtype), device=device)
        for name in ("x", "cotangent", "anchors")
    )
    problem = mlp()
    problem = problem._replace(parameters=tuple(p.to(device) for p in problem.parameters))
    with pytest.raises(ERRORS, match=message):
        OPS.reverse.default(
            start, cotangent, [anchors], [True] * changes.get("needs", 5), *problem.flat(), backend
        )


def test_an_op_refuses_a_backend_that_does_not_run_on_the_device() -> None:
    x = torch.randn(ROWS, DIM)
    with pytest.raises(ValueError, match="backend must be one of"):
        OPS.forward.default(x, *mlp().flat(), "fast")
    with pytest.raises(rk.BackendUnavailableError, match="backend='cuda' is not available"):
        OPS.forward.default(x, *mlp().flat(), "cuda")


def conv(changed: dict[int, Callable[[Tensor], Any]]) -> Problem:
    problem = problem_of(rk.ConvStage(4, 2))
    parameters = [None if p is None else p.detach() for p in problem.parameters]
    for i, change in changed.items():
        parameters[i] = change(parameters[i])
    return problem._replace(parameters=tuple(parameters))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({5: lambda w: w[:3]}, "the last layer must return the 4 channels"),
        ({10: lambda w: w[..., :1]}, "weight of block 1, layer 1 must have the shape"),
        ({11: lambda g: g[:2]}, "gamma of block 1, layer 1 must have the shape"),
        ({10: lambda w: None}, "weight of block 1, layer 1 must be a tensor"),
        ({0: lambda w: w[..., :2]}, "weight of block 0, layer 1 must have the shape"),
        ({3: lambda _: torch.zeros(4)}, "give both, or none"),
        ({17: lambda b: b.to("meta")}, "beta of block 1, layer 2 is on meta"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_parameters_of_convolutions_are_named(
    changed: dict[int, Any], message: str, backend: str
) -> None:
    with pytest.raises(ERRORS, match=message):
        OPS.forward.default(torch.randn(2, 4, 6, 6), *conv(changed).flat(), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient_is_made_up_for_given_statistics(backend: str) -> None:
    given = {3: lambda _: torch.zeros(4), 4: lambda _: torch.ones(4)}
    problem, x = conv(given), torch.randn(2, 4, 6, 6)
    needs = [True] * (1 + len(problem.parameters))
    with pytest.raises(ValueError, match="mean of block 0, layer 1 requires a gradient"):
        OPS.reverse.default(x, x, [x.new_empty(0, *x.shape)], needs, *problem.flat(), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:1] if t.dim() == 3 and t.shape[1:] == (ROWS, DIM) else t, "anchors must"),
        (lambda t: t[:-1] if t.shape == (ROWS, DIM) else t, "cotangent must have the shape"),
        (lambda t: t[:, :2] if t.shape == (DEPTH, HIDDEN, DIM) else t, "b1 must have the shape"),
        (lambda t: t.half() if t.dim() == 2 and t.shape[0] == DEPTH else t, "b1 is torch.float16"),
        (lambda t: t.to("meta"), "on meta"),
    ],
)
def test_what_a_hook_has_changed_is_refused(
    change: Callable[[Tensor], Tensor], message: str, backend: str
) -> None:
    stage = make_stage("tanh", DIM, HIDDEN, DEPTH, anchor_every=2, backend=backend)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, change):
        y = stage(torch.randn(ROWS, DIM))
    with pytest.raises((*ERRORS, rk.BackendUnavailableError), match=message):
        y.sum().backward()


@pytest.mark.needs_cpp
def test_numbers_between_the_places_of_numbers_are_copied() -> None:
    """torch makes such tensors of buffers and files."""
    stage = make_stage("tanh", DIM, HIDDEN, DEPTH)
    x = torch.randn(ROWS, DIM)
    raw = bytearray(1 + x.nbytes)
    raw[1:] = x.numpy().tobytes()
    shifted = torch.frombuffer(raw, dtype=torch.float32, offset=1).reshape(ROWS, DIM)
    assert shifted.data_ptr() % 4 == 1
    assert torch.equal(stage(shifted), stage(x))


# --------------------------------------------------------------------------- the compiled module

needs_cpp = pytest.mark.needs_cpp
ABSENT = (0, 0)


class Call:
    """A direct call of the compiled module, that can be changed before it is made."""

    def __init__(self) -> None:
        problem = mlp()
        self.parameters = [p for p in problem.parameters if p is not None]
        self.x, self.y, self.g = torch.randn(3, ROWS, DIM)
        self.anchors = torch.zeros(2, ROWS, DIM)
        self.gradients = [torch.full_like(p, torch.nan) for p in self.parameters]
        memory = native.memory
        self.stage: dict[str, Any] = {
            "block": "mlp", "activation": "tanh", "scheme": "euler", "steps": DEPTH, "step": 0.1,
            "tied": False, "rows": ROWS, "dim": DIM, "hidden": HIDDEN, "height": 1, "width": 1,
            "convolutions": [], "epsilon": 0.0, "stream": "float32", "storage": "float32",
            "parameters": [memory(p) for p in self.parameters], "anchor_every": 2, "bits": [],
            "threads": 1,
        }  # fmt: skip
        self.forward: dict[str, Any] = {
            "x": memory(self.x), "y": memory(self.y), "anchors": memory(self.anchors),
            "codes": ABSENT, "scales": ABSENT, "signs": ABSENT,
            "statistics": ABSENT,
        }  # fmt: skip
        self.reverse: dict[str, Any] = {
            "reverse_rule": "refined", "order": 1, "start": memory(self.x),
            "anchors": memory(self.anchors), "codes": ABSENT, "scales": ABSENT, "signs": ABSENT,
            "cotangent": memory(self.g), "grad_x": ABSENT,
            "gradients": [memory(g) for g in self.gradients], "nonfinite": ABSENT,
        }  # fmt: skip

    def plan(self, direction: str) -> Any:
        stage = cpp._C.Stage(**self.stage)
        io = (
            cpp._C.Forward(**self.forward)
            if direction == "forward"
            else cpp._C.Reverse(**self.reverse)
        )
        return cpp._C.plan(stage, io)


def shorter(memory: tuple[int, int]) -> tuple[int, int]:
    return memory[0], memory[1] - 1


def shifted(memory: tuple[int, int]) -> tuple[int, int]:
    return memory[0] + 1, memory[1]


@needs_cpp
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_call_that_fits_is_run(direction: str) -> None:
    call = Call()  # keeps the memory
    plan = call.plan(direction)
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8)
    plan.run(native.memory(workspace), False)


@needs_cpp
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", 0, "steps must be from 1"),
        ("steps", -1, "steps must be from 1"),
        ("steps", 2**40, "steps must be from 1"),
        ("steps", DEPTH + 1, r"parameters\[0\] must have 980 bytes, not 840"),
        ("rows", 0, "rows must be from 1"),
        ("rows", 2**62, "rows must be from 1"),
        ("dim", -1, "dim must be from 1"),
        ("dim", 2**24 + 1, "dim must be from 1"),
        ("hidden", HIDDEN + 1, r"parameters\[0\] must have 960 bytes"),
        ("threads", 0, "threads must be from 1"),
        ("threads", 2**30, "threads must be from 1"),
        ("anchor_every", -1, "anchor_every must be from 0"),
        ("step", float("nan"), "step must be finite"),
        ("epsilon", -1.0, "epsilon must be 0 or more"),
        ("storage", "float64", "must both be float64"),
        ("stream", "float64", "must both be float64"),
        ("stream", "float16", "unknown name 'float16'"),
        ("block", "rnn", "unknown name 'rnn'"),
        ("activation", "identity", "activation must not be 'identity'"),
        ("block", "linear", "parameters must have 1 entries, not 4"),
        ("block", "conv", "the number of convolutions must be from 2 to 3, not 0"),
        ("parameters", [], "parameters must have 4 entries, not 0"),
        ("parameters", [ABSENT] * 4, r"parameters\[0\] is a weight"),
        ("convolutions", [(1, 1, 3)] * 4, "the number of convolutions must be from 0 to 3"),
    ],
)
def test_a_stage_that_does_not_fit_is_refused(field: str, value: Any, message: str) -> None:
    call = Call()
    call.stage[field] = value
    with pytest.raises(ValueError, match=message):
        call.plan("forward")


@needs_cpp
@pytest.mark.parametrize("change", [shorter, shifted, lambda _: ABSENT])
@pytest.mark.parametrize(
    "field", ["x", "y", "anchors", "start", "cotangent", "grad_x", "parameters", "gradients"]
)
def test_memory_that_does_not_fit_is_refused(field: str, change: Callable[..., Any]) -> None:
    call = Call()
    call.reverse["grad_x"] = native.memory(call.y)
    for fields in (call.stage, call.forward, call.reverse):
        if field in ("parameters", "gradients") and field in fields:
            fields[field][2] = change(fields[field][2])
        elif field in fields:
            fields[field] = change(fields[field])
    if change(call.forward["x"]) == ABSENT and field in ("grad_x", "gradients"):
        call.plan("reverse")  # not wanted
        return
    forward = field in ("x", "y", "anchors", "parameters")
    with pytest.raises(ValueError, match=field):
        call.plan("forward" if forward else "reverse")


@needs_cpp
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("reverse_rule", "newest", "unknown name 'newest'"),
        ("order", 0, "order must be from 1"),
        ("gradients", [ABSENT] * 5, "gradients must have 4 entries, not 5"),
        ("nonfinite", (64, 3), "nonfinite must have 4 bytes, not 3"),
    ],
)
def test_a_reverse_pass_that_does_not_fit_is_refused(field: str, value: Any, message: str) -> None:
    call = Call()
    call.reverse[field] = value
    with pytest.raises(ValueError, match=message):
        call.plan("reverse")


@needs_cpp
@pytest.mark.parametrize("change", [shorter, shifted, lambda _: ABSENT])
def test_a_workspace_that_does_not_fit_is_refused(change: Callable[..., Any]) -> None:
    call = Call()
    plan = call.plan("reverse")
    workspace = torch.empty(plan.workspace_bytes + 1, dtype=torch.uint8)[:-1]
    with pytest.raises(ValueError, match="workspace must"):
        plan.run(change(native.memory(workspace)), False)


@needs_cpp
def test_anchors_beyond_the_end_take_no_memory() -> None:
    call = Call()
    before = call.plan("forward").workspace_bytes
    call.stage["anchor_every"] = 2**31 - 1
    call.reverse["reverse_rule"] = "exact"
    assert call.plan("forward").workspace_bytes == before
    assert call.plan("reverse").workspace_bytes < 1 << 20
    assert Options(anchor_every=2**20).method(DEPTH).anchor_every == 2**20


@needs_cpp
@pytest.mark.parametrize(("threads", "seconds"), [(0, 0.1), (-1, 0.1), (1, float("nan"))])
def test_the_peak_refuses_numbers_that_are_none(threads: int, seconds: float) -> None:
    with pytest.raises(ValueError, match=r"threads must be from 1|seconds must be finite"):
        cpp._C.fma_peak(threads, seconds)
