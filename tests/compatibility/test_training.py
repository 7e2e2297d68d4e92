"""Training."""

from __future__ import annotations

import functools
from typing import Any

import torch
from compatibility import FUSED, NOT_APPLICABLE, Case, Section, backward, works
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

section = Section(__file__)


@section.row("`torch.autocast` around fused stages", works("in float32"), NOT_APPLICABLE, FUSED)
def test_autocast(case: Case) -> None:
    case.stage.float(), case.twin.float()
    case.x = case.x.float()

    def run(module: nn.Module, x: Tensor) -> object:
        with torch.autocast("cpu", torch.bfloat16, enabled=module is case.stage):
            return backward(module, x)

    case.agree(run, rtol=1e-4, atol=1e-4)  # that of float32, not of bfloat16


section.proved(
    "`torch.autocast` around modules",
    "modules/test_residual_state.py::test_autocast_is_captured_and_replayed",
    fused=NOT_APPLICABLE,
    modules=works("captured and replayed"),
)


def train(optimizer: Any) -> Any:
    """Three steps; the parameters are compared afterwards."""

    def run(module: nn.Module, x: Tensor) -> object:
        one = optimizer(module.parameters())
        losses = []
        for _ in range(3):
            one.zero_grad()
            y = module(x).square().mean()
            y.backward()
            one.step()
            losses.append(y.detach())
        return losses

    return run


@section.row("Optimizers, also with `foreach=True` and `fused=True`")
def test_optimizers(case: Case) -> None:
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        case.agree(train(functools.partial(torch.optim.SGD, lr=0.1, **options)))
        # Adam divides by the gradient: without eps, rounding errors of tiny ones show.
        case.agree(train(functools.partial(torch.optim.Adam, lr=0.1, eps=1e-2, **options)))


@section.row("`torch.amp.GradScaler`")
def test_grad_scaler(case: Case) -> None:
    """One of the steps overflows and is left out."""

    def run(module: nn.Module, x: Tensor) -> object:
        module.float()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scales = []
        for factor in (1.0, 1e38, 1.0):
            optimizer.zero_grad()
            scaler.scale(module(x.detach().float()).square().mean() * factor).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [2.0**10, 2.0**9, 2.0**9]
        return scales

    case.agree(run, rtol=1e-4, atol=1e-5)


@section.row("`clip_grad_norm_`, `clip_grad_value_`")
def test_clipping(case: Case) -> None:
    def run(module: nn.Module, x: Tensor) -> object:
        backward(module, x)
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        nn.utils.clip_grad_value_(module.parameters(), 0.05)
        return norm

    case.agree(run)


@section.row("Averaged weights (`swa_utils.AveragedModel`, EMA)")
def test_averaged_model(case: Case) -> None:
    def run(module: nn.Module, x: Tensor) -> object:
        average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
            average.update_parameters(module)
        return average.eval()(x)

    case.agree(run)


@section.row("`torch.use_deterministic_algorithms(True)`")
def test_deterministic_algorithms(case: Case) -> None:
    def run(module: nn.Module, x: Tensor) -> object:
        torch.use_deterministic_algorithms(True)
        try:
            return backward(module, x)
        finally:
            torch.use_deterministic_algorithms(False)

    case.agree(run)


@section.row("`torch.profiler`")
def test_profiler(case: Case) -> None:
    def run(module: nn.Module, x: Tensor) -> object:
        with torch.profiler.profile(record_shapes=True, with_stack=True, profile_memory=True) as p:
            result = backward(module, x)
        if module is case.stage:
            names = {event.key for event in p.key_averages()}
            expected = {"resode_kernels::forward", "resode_kernels::reverse"}
            if case.kind == "ResidualStage":
                expected = {"ResidualFunction", "ResidualFunctionBackward"}
            assert expected <= names
        return result

    case.agree(run)
