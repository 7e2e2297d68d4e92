"""What a gradient error can be compared with: errors that training has anyway.

autocast  the error of the same stage with exact backprop under bfloat16 autocast
noise     half the distance between the gradients of the two halves of the batch, relative to the
          gradient of the batch

A gradient is linear in the cotangent. Therefore the gradient of half a batch is that of the whole
batch with a cotangent that is zero in the other half. So nothing has to be split but the cotangent,
and batch norm has the statistics of the whole batch. With the gradients G₁ and G₂ of the halves,
G = G₁ + G₂, and of a mean over half as many rows, 2 G₁ and 2 G₂, the noise is
‖2 G₁ − 2 G₂‖ / (2 ‖G‖) = ‖2 G₁ − G‖ / ‖G‖.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..stages import ResidualStage, StackedStage, Stage
from ..states import State, parts, state_like
from .budget import Budget
from .gradients import compare
from .measuring import Measurer
from .probe import Gradients, Probe
from .settings import CHECKPOINT

AUTOCAST_STEPS = 4.0
"""The time of a step under autocast, in steps of the exact gradient: blocks are verified, and many
processors have no arithmetic in bfloat16."""
NOT_POSSIBLE = (NotImplementedError, RuntimeError, TypeError, ValueError)
"""What blocks raise if they cannot run under autocast."""


@dataclass(frozen=True)
class Yardsticks:
    """Errors that training has anyway, relative to the exact gradient. None: not measured, for the
    reason in ``reasons``."""

    autocast: float | None
    """The error of exact backprop under bfloat16 autocast: of all parameter gradients together or
    of the input's gradient, whichever is larger."""
    noise: float | None
    """Half the distance between the parameter gradients of the two halves of the batch."""
    reasons: dict[str, str]
    """Why a yardstick was not measured, by its name."""

    def lines(self) -> list[str]:
        """Both as text, each with a sentence of explanation."""
        return [
            "Yardsticks: errors that training has anyway",
            f"  bfloat16 autocast with exact backprop  {self._value('autocast')}",
            f"  sampling noise of the batch            {self._value('noise')}",
        ]

    def cell(self, name: str) -> str:
        """A number for a table."""
        value = getattr(self, name)
        return "–" if value is None else f"{value:.1e}"

    def missing(self) -> list[str]:
        """What was not measured for lack of time."""
        return [f"the yardstick {key}" for key, why in self.reasons.items() if why == NO_TIME]

    def _value(self, name: str) -> str:
        value = getattr(self, name)
        if value is None:
            return f"not measured: {self.reasons[name]}"
        return f"{value:.1e}. {EXPLANATIONS[name]}"


EXPLANATIONS = {
    "autocast": "Training in mixed precision accepts this error.",
    "noise": "Half the distance between the gradients of the batch's halves: errors far below it "
    "change little.",
}
NO_TIME = "no time was left"


def measure(measurer: Measurer, *, has_loss: bool, budget: Budget) -> Yardsticks:
    """Each while there is time for it. ``has_loss``: the cotangent is that of a loss."""
    found: dict[str, float | None] = {"autocast": None, "noise": None}
    probe = measurer.probe
    reasons = {
        "autocast": why_no_autocast(probe),
        "noise": why_no_noise(measurer, has_loss),
    }
    costs = {"noise": measurer.step, "autocast": AUTOCAST_STEPS * measurer.step}
    for name, cost in costs.items():
        if reasons[name]:
            continue
        if not budget.allows(cost):
            reasons[name] = NO_TIME
            continue
        budget.show(f"measuring yardsticks: {name}")
        try:
            found[name] = {"noise": noise, "autocast": autocast}[name](measurer)
        except NOT_POSSIBLE as error:
            if name == "noise":
                raise
            reasons[name] = f"a block does not run under it ({type(error).__name__})"
    return Yardsticks(**found, reasons={name: why for name, why in reasons.items() if why})


# ---------------------------------------------------------------------------------------- autocast


def why_no_autocast(probe: Probe) -> str:
    """Empty if nothing is against it."""
    tensors = (*parts(probe.x), *probe.stage.parameters())
    if any(t.is_floating_point() and t.dtype != torch.float32 for t in tensors):
        return "autocast is for float32"
    if not torch.amp.is_autocast_available(parts(probe.x)[0].device.type):
        return "the device has no autocast"
    if any(enabled for enabled, _ in probe.around.autocast):
        return "the stage is under autocast already"
    if in_modules(probe.stage) is None:
        return "its parameters are parametrized"
    return ""


def autocast(measurer: Measurer) -> float:
    """The larger error of the two gradients."""
    probe = measurer.probe
    stage = in_modules(probe.stage)
    assert stage is not None
    with torch.autocast(parts(probe.x)[0].device.type, torch.bfloat16):
        plain = Probe(stage, probe.x, probe.args, probe.kwargs)
    plain.generators = probe.generators
    mine = plain.gradients(measurer.cotangent, **CHECKPOINT._asdict())
    exact = measurer.exact
    pairs = ((by_block(stage, mine), by_block(probe.stage, exact)), (mine.x, exact.x))
    return max(compare(*pair).error for pair in pairs)


def by_block(stage: Stage, gradients: Gradients) -> list[Tensor]:
    return [t for block in stage.by_block(gradients.parameters) for t in block]


def in_modules(stage: Stage) -> ResidualStage | None:
    """The same steps with the blocks as modules, in plain PyTorch, because kernels know no
    autocast. They share parameters and buffers with the stage. None if that is not possible."""
    options = stage.options
    if isinstance(stage, ResidualStage):
        blocks: list[nn.Module] = list(stage.blocks)
    elif isinstance(stage, StackedStage) and "parametrizations" not in stage._modules:
        blocks = [StackedBlock(stage, n) for n in range(stage.num_blocks)]
    else:
        return None
    return ResidualStage(
        blocks[0] if stage.tied else blocks,
        depth=stage.depth if stage.tied else None,
        scheme=options.scheme,
        step=options.step,
        stream=options.stream,
        backward="checkpoint",
    )


class StackedBlock(nn.Module):
    """Block n of a stage with stacked parameters. Its parameters are views of the stage's."""

    def __init__(self, stage: StackedStage, n: int) -> None:
        super().__init__()
        tied = copy.copy(stage)
        tied.depth, tied.tied = 1, True
        tied._parameters = {
            name: None if p is None else nn.Parameter(p.detach()[n : n + 1], p.requires_grad)
            for name, p in stage._parameters.items()
        }
        self.stage = tied

    def forward(self, x: Any) -> Any:
        return self.stage.residual(0, x)


# ------------------------------------------------------------------------------------------- noise


def why_no_noise(measurer: Measurer, has_loss: bool) -> str:
    """Empty if nothing is against it."""
    if not has_loss:
        return "it needs a loss"
    if not measurer.exact.parameters:
        return "the stage has no trainable parameters"
    rows = {len(t) if t.dim() else 0 for t in parts(measurer.cotangent)}
    if len(rows) > 1 or rows.pop() % 2:
        return "it needs a batch (dimension 0) of an even size"
    return ""


def noise(measurer: Measurer) -> float:
    half = measurer.probe.gradients(first_half(measurer.cotangent), **CHECKPOINT._asdict())
    exact = list(measurer.exact.parameters.values())
    return compare([2 * g for g in half.parameters.values()], exact).error


def first_half(cotangent: State) -> State:
    """The cotangent, zero in the second half of the batch."""
    halves = [t.clone() for t in parts(cotangent)]
    for t in halves:
        t[len(t) // 2 :] = 0
    result: State = state_like(cotangent, halves)
    return result
