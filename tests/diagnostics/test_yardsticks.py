"""What a gradient error is compared with: the errors of autocast, and the noise of the batch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from test_diagnostics import KINDS, gradients, make, relative_error
from torch import Tensor, nn

import resode_kernels as rk
from resode_kernels.diagnostics.gradients import compare
from resode_kernels.states import parts, state_like


def loss(y: Any) -> Tensor:
    result: Any = sum((t**3).mean() for t in parts(y))
    return result  # type: ignore[no-any-return]


def even(kind: str, **options: Any) -> tuple[rk.Stage, Any]:
    """A stage in eval mode, and an input of six entries."""
    stage, x = make(kind, step=0.4, **options)
    stage.eval()
    return stage, state_like(x, [torch.randn(6, *t.shape[1:]) for t in parts(x)])


def diagnose(stage: rk.Stage, x: Any, loss: Any = loss, **options: Any) -> rk.Report:
    return rk.diagnose(stage, x, loss, **{"settings": [rk.Setting()], **options})


def plain(stage: rk.Stage, x: Any) -> Any:
    """The stage by its residual functions, in Euler's scheme with h = 0.4."""
    for n in range(stage.depth):
        fs = parts(stage.residual(n, x))
        new = [old + 0.4 * f.to(old.dtype) for old, f in zip(parts(x), fs, strict=True)]
        x = state_like(x, new)
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_autocast_is_that_found_by_hand(kind: str) -> None:
    """Exact backprop of the same network, blocks under autocast and states in float32. With a cache
    of casts the gradients of tied weights would be summed in bfloat16."""
    stage, x = even(kind)
    found: list[list[Tensor]] = []
    y = plain(stage, x)
    cotangent = torch.autograd.grad(loss(y), parts(y))
    for enabled in (True, False):
        leaves = tuple(t.clone().requires_grad_() for t in parts(x))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=False):
            y = plain(stage, state_like(x, leaves))
        grads = torch.autograd.grad(parts(y), (*leaves, *stage.parameters()), cotangent)
        found.append(list(grads))
    width = len(parts(x))
    mine, exact = found
    by_hand = max(compare(mine[s], exact[s]).error for s in (slice(width), slice(width, None)))
    autocast = diagnose(stage, x).yardsticks.autocast
    assert autocast is not None
    assert autocast == pytest.approx(by_hand, rel=5e-2)
    assert 1e-4 < autocast < 0.3


@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_is_that_of_two_halves_trained_by_themselves(kind: str, scheme: str) -> None:
    stage, x = even(kind, scheme=scheme)
    options = {"backward": "checkpoint"}
    first, second = (
        gradients(stage, state_like(x, half), loss, **options)
        for half in zip(*(t.chunk(2) for t in parts(x)), strict=True)
    )
    whole = gradients(stage, x, loss, **options)
    distance = torch.cat([(first[k] - second[k]).flatten() for k in whole]).norm() / 2
    size = torch.cat([g.flatten() for g in whole.values()]).norm()
    noise = diagnose(stage, x).yardsticks.noise
    assert noise == pytest.approx(float(distance / size), rel=1e-2)


def test_the_noise_of_rows_that_are_all_alike_is_nothing() -> None:
    stage = rk.MLPStage(8, 12, 6)
    same = diagnose(stage, torch.randn(1, 8).expand(4, 8)).yardsticks.noise
    assert same is not None
    assert same < 1e-5


def test_batch_norm_and_dropout_are_those_of_the_whole_batch() -> None:
    """The gradients of the halves add up to that of the batch, so the noise is at least finite and
    does not count what other masks or statistics would change."""
    stage, x = make("modules")
    stage.train()
    alike = torch.cat([x[:1]] * 2)
    for dropout in (m for m in stage.modules() if isinstance(m, nn.Dropout)):
        dropout.p = 0.0
    exact = diagnose(stage, alike).yardsticks
    assert exact.noise is not None
    assert exact.noise < 1e-5
    conv, images = make("conv")
    images = torch.cat([images[:1]] * 2)
    found = diagnose(conv, images).yardsticks.noise
    assert found is not None
    assert found < 1e-3


def test_dropout_draws_the_same_masks_under_autocast() -> None:
    stage, x = make("modules", step=0.4)
    autocast = diagnose(stage, x).yardsticks.autocast
    assert autocast is not None
    assert autocast < 0.05


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        ({"dtype": torch.float64}, "autocast", "autocast is for float32"),
        ({"rows": 5}, "noise", "a batch (dimension 0) of an even size"),
        ({"loss": None}, "noise", "needs a loss"),
        ({"frozen": True}, "noise", "no trainable parameters"),
        ({"autocast": True}, "autocast", "under autocast already"),
        ({"parametrized": True}, "autocast", "parametrized"),
        ({"seconds": 0}, "autocast", "no time was left"),
        ({"seconds": 0}, "noise", "no time was left"),
    ],
)
def test_a_yardstick_that_is_missing_says_why(
    change: dict[str, Any], name: str, reason: str
) -> None:
    dtype = change.get("dtype", torch.float32)
    stage = rk.MLPStage(8, 12, 6, dtype=dtype)
    stage.requires_grad_(not change.get("frozen", False))
    if change.get("parametrized"):
        nn.utils.parametrizations.spectral_norm(stage, "w1")
        stage.eval()
    x = torch.randn(change.get("rows", 6), 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=change.get("autocast", False)):
        report = diagnose(
            stage, x, change.get("loss", loss), seconds=change.get("seconds", 60), settings=None
        )
    assert getattr(report.yardsticks, name) is None
    assert any(reason in line for line in report.yardsticks.lines())
    text = str(report)
    assert (f"the yardstick {name}" in text) == ("seconds" in change)


def test_blocks_that_do_not_run_under_autocast_are_no_error() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            if y.dtype != torch.float32:
                raise TypeError("only float32")
            return torch.tanh(y)

    report = diagnose(rk.ResidualStage([Strict() for _ in range(4)]), torch.randn(6, 8))
    assert report.yardsticks.autocast is None
    assert report.yardsticks.noise is not None
    assert "a block does not run under it (TypeError)" in str(report)


def test_yardsticks_leave_no_trace() -> None:
    stage, x = make("conv")
    before = {name: t.clone() for name, t in stage.state_dict().items()}
    generator, options = torch.get_rng_state(), stage.options
    diagnose(stage, x)
    assert torch.equal(generator, torch.get_rng_state())
    assert stage.options is options
    assert all(torch.equal(before[name], t) for name, t in stage.state_dict().items())
    assert all(p.grad is None for p in stage.parameters())


def test_a_report_explains_its_yardsticks() -> None:
    stage, x = even("mlp")
    report = diagnose(stage, x)
    text = str(report)
    assert f"bfloat16 autocast with exact backprop  {report.yardsticks.autocast:.1e}. Train" in text
    assert f"{report.yardsticks.noise:.1e}. Half the distance between the gradients" in text
    numbers = json.loads(json.dumps(report.to_dict()))
    assert numbers["yardsticks"]["noise"] == report.yardsticks.noise


def test_a_models_report_has_those_of_its_stages() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), rk.MLPStage(8, 12, 6), nn.Linear(8, 2))
    x = torch.randn(10, 3)
    report = rk.diagnose(model, x, loss, settings=[rk.Setting()])
    found = report.stages["1"].yardsticks
    line = next(line for line in str(report).splitlines() if line.startswith("1 "))
    assert line.split()[-2:] == [f"{found.autocast:.1e}", f"{found.noise:.1e}"]
    assert "training in mixed precision accepts" in str(report)
    # The noise is that of the stage's parameters in the gradient of the model's loss.
    parameters = tuple(model[1].parameters())
    first, second = (torch.autograd.grad(loss(model(h)), parameters) for h in x.chunk(2))
    whole = torch.autograd.grad(loss(model(x)), parameters)
    difference = [(a - b) / 2 for a, b in zip(first, second, strict=True)]
    by_hand = relative_error([w + d for w, d in zip(whole, difference, strict=True)], whole)
    assert found.noise == pytest.approx(by_hand, rel=1e-2)
    without = rk.diagnose(model, x, settings=[rk.Setting()])
    assert without.stages["1"].yardsticks.noise is None
