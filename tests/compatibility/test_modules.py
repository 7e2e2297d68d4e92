"""Modules, parameters and files."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from compatibility import (
    FUSED,
    NOT_APPLICABLE,
    OF_MODULES,
    Case,
    Cell,
    Section,
    Twin,
    backward,
    refused,
    works,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

section = Section(__file__)
AS_MODULES = "blocks of a `ConvStage` then run as modules"


@section.row("Forward hooks and pre-hooks of a stage")
def test_forward_hooks(case: Case) -> None:
    def run(module: nn.Module, x: Tensor) -> object:
        calls: list[str] = []

        def before(module: nn.Module, args: Any) -> Any:
            calls.append("before")
            return (2 * args[0],)

        def after(module: nn.Module, args: Any, y: Tensor) -> Tensor:
            calls.append("after")
            return y + args[0]

        handles = [
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after),
        ]
        result = backward(module, x)
        for handle in handles:
            handle.remove()
        assert calls == ["before", "after"]
        return result

    case.agree(run)


@section.row("Full backward hooks and pre-hooks of a stage")
def test_backward_hooks(case: Case) -> None:
    def run(module: nn.Module, x: Tensor) -> object:
        seen: list[object] = []

        def before(module: nn.Module, g: Any) -> Any:
            seen.append(g)
            return (2 * g[0],)

        def after(module: nn.Module, grad_x: Any, g: Any) -> Any:
            seen.extend((grad_x, g))
            return (3 * grad_x[0],)

        handles = [
            module.register_full_backward_pre_hook(before),
            module.register_full_backward_hook(after),
        ]
        result = backward(module, x)
        for handle in handles:
            handle.remove()
        return [result, seen]

    case.agree(run)


@section.row("Full backward hooks and pre-hooks of blocks", works(AS_MODULES), kinds=OF_MODULES)
def test_backward_hooks_of_blocks(case: Case) -> None:
    def run(module: Any, x: Tensor) -> object:
        seen: list[object] = []
        blocks = module.blocks if module is case.stage else module.stage.blocks
        handles = [
            handle
            for n, b in enumerate(blocks)
            for handle in (
                b.register_full_backward_pre_hook(lambda m, g, n=n: seen.append((n, g))),
                b.register_full_backward_hook(lambda m, gx, g, n=n: seen.append((n, gx, g))),
            )
        ]
        result = backward(module, x)
        for handle in handles:
            handle.remove()
        return [result, seen]

    case.agree(run)


@section.row("`copy.deepcopy`, `pickle`, `torch.save` of a stage")
def test_copies(case: Case) -> None:
    buffer = io.BytesIO()
    torch.save(case.stage, buffer)
    buffer.seek(0)
    original = case.stage
    for twin in (
        copy.deepcopy(original),
        pickle.loads(pickle.dumps(original)),
        torch.load(buffer, weights_only=False),
    ):
        assert twin.options == original.options
        case.stage, case.twin = twin, Twin(original)
        case.agree(backward)


@section.row("`state_dict`, `torch.load` with `weights_only=True` and `mmap=True`")
def test_state_dict(case: Case, tmp_path: Path) -> None:
    for assign in (False, True):
        torch.save(case.stage.state_dict(), tmp_path / "state")
        state = torch.load(tmp_path / "state", weights_only=True, mmap=assign)
        other = case.make().configure(**vars(case.stage.options))
        other.load_state_dict(state, assign=assign)
        case.stage, case.twin = other, Twin(case.stage)
        case.agree(backward)


@section.row("`load_state_dict(assign=True)` into a stage on the meta device")
def test_meta_and_assign(case: Case) -> None:
    state = copy.deepcopy(case.stage.state_dict())
    case.stage.to("meta").load_state_dict(state, assign=True)
    case.agree(backward)


@section.row("Meta device, then `to_empty`")
def test_to_empty(case: Case) -> None:
    state = copy.deepcopy(case.stage.state_dict())
    empty = case.stage.to("meta")
    assert empty(case.x.to("meta")).shape == case.x.shape
    case.stage = empty.to_empty(device="cpu")
    case.stage.load_state_dict(state)
    case.agree(backward)


@section.row("`stage.to(dtype)`, `.half()`, `.bfloat16()`")
def test_to_dtype(case: Case) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        stage = copy.deepcopy(case.stage).to(dtype)
        got = backward(stage, case.x.to(dtype).requires_grad_())
        expected = backward(Twin(stage).double(), case.x.to(dtype).double().requires_grad_())
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a.double(), b, rtol=0.05, atol=0.05)


def parametrize_all(module: nn.Module, change: Any) -> None:
    """``change(owner, name)`` for all weights."""
    for name in [name for name, p in module.named_parameters() if p.dim() > 1]:
        owner, _, last = name.rpartition(".")
        if last not in ("b1", "b2"):
            change(module.get_submodule(owner), last)


def with_changes(case: Case, change: Any) -> None:
    """The stage and its twin, both changed alike."""
    for module in (case.stage, case.twin):
        torch.manual_seed(1)
        parametrize_all(module, change)


@section.row("`parametrizations.weight_norm`, `spectral_norm`, `orthogonal`")
def test_parametrizations(case: Case) -> None:
    for change in (
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
    ):
        one = Case(case.kind)
        with_changes(one, change)
        one.agree(backward)


@section.row("Parametrizations that are cached (`parametrize.cached`)")
def test_cached_parametrizations(case: Case) -> None:
    def run(module: nn.Module, x: Tensor) -> object:
        with parametrize.cached():
            return backward(module, x)

    with_changes(case, parametrizations.weight_norm)
    case.agree(run)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@section.row("The older `nn.utils.weight_norm` and `spectral_norm`")
def test_older_weight_norm(case: Case) -> None:
    for change in (nn.utils.weight_norm, nn.utils.spectral_norm):
        one = Case(case.kind)
        with_changes(one, change)
        one.agree(backward)


@section.row("Pruning (`torch.nn.utils.prune`)")
def test_pruning(case: Case) -> None:
    with_changes(case, lambda owner, name: prune.l1_unstructured(owner, name, amount=0.5))
    case.agree(backward)
    assert any((b == 0).any() for b in case.stage.buffers())


class LowRank(nn.Module):
    """A frozen layer, and a trainable one of low rank beside it, as LoRA has."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = (nn.Parameter(torch.randn_like(base.weight[:1])) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.base, nn.Conv2d):
            beside = nn.functional.conv2d(x, self.a, padding="same")
        else:
            beside = nn.functional.linear(x, self.a)
        return self.base(x) + beside * self.b.mean()


@section.row("Replaced layers in blocks (LoRA and the like)", works(AS_MODULES), kinds=OF_MODULES)
def test_replaced_layers(case: Case) -> None:
    for b in case.stage.blocks:
        name = "conv1" if case.kind == "ConvStage" else "0"
        setattr(b, name, LowRank(getattr(b, name)))
    case.twin = Twin(case.stage)
    case.agree(backward)


@section.row(
    "Dynamic quantisation (`torch.ao.quantization.quantize_dynamic`)",
    NOT_APPLICABLE,
    kinds=["ResidualStage"],
)
@pytest.mark.filterwarnings("ignore")
def test_dynamic_quantisation(case: Case) -> None:
    stage = torch.ao.quantization.quantize_dynamic(case.stage.float(), {nn.Linear})
    assert "DynamicQuantizedLinear" in repr(stage)
    x = case.x.float()
    torch.testing.assert_close(stage(x), Twin(stage)(x))
    with torch.no_grad():
        torch.testing.assert_close(stage(x), Twin(stage)(x))


@section.row(
    "Quantized parameters",
    refused("qint8; all parameters must share one floating-point dtype"),
    NOT_APPLICABLE,
    kinds=FUSED,
)
def test_quantized_parameters(case: Case) -> None:
    case.stage.float().requires_grad_(False)
    name = next(name for name, _ in case.stage.named_parameters())
    owner, _, last = name.rpartition(".")
    module = case.stage.get_submodule(owner)
    weight = module._parameters.pop(last)
    module.__dict__[last] = torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)
    case.stage(case.x.float())


REPLAYS = "modules/test_replays.py::test"
section.proved(
    "Caches of keys and values",
    f"{REPLAYS}_a_cache_is_refused_by_name",
    f"{REPLAYS}_a_cache_works_where_every_block_runs_once",
    fused=NOT_APPLICABLE,
    modules=Cell('refused; `use_cache=False`, or `backward="stored"`'),
)
section.proved(
    "Forward hooks of blocks",
    f"{REPLAYS}_what_hooks_see_inside_has_no_gradient",
    "modules/test_changed_stages.py::test_changed_blocks_compute_what_they_are",
    fused=works(AS_MODULES),
    modules=works("they fire again in the backward pass; a loss on what they see is refused"),
)
section.proved(
    "Replaced `forward` of a block",
    "modules/test_changed_stages.py::test_changed_blocks_compute_what_they_are",
    fused=works(AS_MODULES),
)
