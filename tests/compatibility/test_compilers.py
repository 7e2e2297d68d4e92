"""Compilers and tracers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compatibility import NOT_APPLICABLE, Case, Cell, Section, backward, loss, refused, works
from functorch.compile import aot_module, nop
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import resode_kernels as rk

section = Section(__file__)
KEPT = works("activations are kept")


@section.row("`torch.compile`", works("`fullgraph=True`"), works("a graph break"))
def test_compile(case: Case) -> None:
    torch._dynamo.reset()
    fullgraph = case.kind != "ResidualStage"

    def run(module: nn.Module, x: Tensor) -> object:
        if module is case.stage:
            module = torch.compile(module, backend="aot_eager", fullgraph=fullgraph)
        return backward(module, x)

    case.agree(run)
    if not fullgraph:
        with pytest.raises(RuntimeError, match=r"torch\.compiler\.disable"):
            torch.compile(case.stage, backend="eager", fullgraph=True)(case.x)


@section.row("`torch.compile(dynamic=True)`", works("`fullgraph=True`"), works("a graph break"))
def test_dynamic_compile(case: Case) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        case.stage, backend="aot_eager", dynamic=True, fullgraph=case.kind != "ResidualStage"
    )

    def run(module: nn.Module, x: Tensor) -> object:
        module = compiled if module is case.stage else module
        batches = [x, torch.cat([x, 2 * x]), torch.cat([x, -x, x + 1])]
        return [backward(module, batch.detach().requires_grad_()) for batch in batches]

    case.agree(run)


section.proved(
    "`torch.compile` of a block",
    "modules/test_residual_state.py::test_compiled_blocks",
    fused=NOT_APPLICABLE,
)


@section.row("`torch.export`, inference and training", modules=KEPT)
def test_export(case: Case) -> None:
    program = torch.export.export(case.stage, (case.x,))
    case.stage = program.module()
    case.agree(backward)
    with torch.no_grad():
        torch.testing.assert_close(case.stage(case.x), case.twin(case.x))


@section.row("`torch.export` with dynamic shapes, `torch.export.save` and `load`", modules=KEPT)
def test_saved_export(case: Case, tmp_path: Path) -> None:
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(case.stage, (case.x,), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "program.pt2")
    case.stage = torch.export.load(tmp_path / "program.pt2").module()
    case.x = torch.cat([case.x, -case.x, case.x + 1])
    case.agree(backward)


@section.row("Decomposed `torch.export` (`run_decompositions`)", modules=KEPT)
def test_decomposed_export(case: Case) -> None:
    case.stage.eval(), case.twin.eval()
    program = torch.export.export(case.stage, (case.x,)).run_decompositions()
    case.stage = program.module()
    case.agree(backward)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@section.row("`make_fx`", modules=KEPT)
def test_make_fx(case: Case, mode: str) -> None:
    def run(module: nn.Module, x: Tensor) -> object:
        def step(x: Tensor, *parameters: Tensor) -> object:
            y = torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))
            return torch.autograd.grad(loss(y), [x, *parameters])

        names = [name for name, _ in module.named_parameters()]
        inputs = [x, *module.parameters()]
        if module is case.stage:
            step = make_fx(step, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)
            inputs[0] = x.detach().clone().requires_grad_()
        return step(*inputs)

    case.stage.eval(), case.twin.eval()
    case.agree(run)


@section.row("AOTAutograd (`aot_module`)", modules=KEPT)
def test_aot_autograd(case: Case) -> None:
    def run(module: nn.Module, x: Tensor) -> object:
        return backward(aot_module(module, nop) if module is case.stage else module, x)

    case.agree(run)


@section.row("`FakeTensorMode`")
def test_fake_tensors(case: Case) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.randn(case.x.shape, dtype=torch.float64, requires_grad=True)
        y = case.stage(x)
        y.sum().backward()
    assert (y.shape, x.grad.shape) == (case.x.shape, case.x.shape)


@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@section.row("`torch.jit.trace`", works("runs PyTorch's operations"), KEPT)
def test_jit_trace(case: Case) -> None:
    case.stage.eval(), case.twin.eval()

    def run(module: nn.Module, x: Tensor) -> object:
        if module is case.stage:
            module = torch.jit.trace(module, case.x + 1)
        return backward(module, x)

    case.agree(run)


@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning")
@section.row(
    "`torch.jit.script`",
    refused(r"torch\.jit\.script cannot compile a \w+Stage: use torch\.compile"),
    refused(r"torch\.jit\.script cannot compile a \w+Stage: use torch\.compile"),
)
def test_jit_script(case: Case) -> None:
    torch.jit.script(nn.Sequential(nn.Identity(), case.stage))


class StagesAreLeaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return isinstance(m, rk.Stage) or super().is_leaf_module(m, name)


PROXY = r"is a Proxy: torch\.fx cannot trace through a stage.*is_leaf_module"


@section.row(
    "`torch.fx.symbolic_trace`",
    refused(PROXY, "works where stages are leaf modules"),
    refused(PROXY, "works where stages are leaf modules"),
)
def test_symbolic_trace(case: Case) -> None:
    model = nn.Sequential(nn.Identity(), case.stage)
    traced = fx.GraphModule(model, StagesAreLeaves().trace(model))
    torch.testing.assert_close(traced(case.x), case.twin(case.x))
    torch.fx.symbolic_trace(model)


section.proved("CUDA graphs", fused=Cell("not tested"), modules=Cell("not tested"))
