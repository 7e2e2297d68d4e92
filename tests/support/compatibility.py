"""The rows of docs/compatibility.md. A row is a feature of PyTorch, what happens to stages that
meet it, and the tests that prove so. ``tools/docs_tables.py`` writes the tables from them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import PRECISE, make_conv_stage, steps
from torch import Tensor, nn

import resode_kernels as rk

STACKED = ("MLPStage", "LinearStage")
FUSED = (*STACKED, "ConvStage")
OF_MODULES = ("ConvStage", "ResidualStage")
KINDS = (*FUSED, "ResidualStage")
PACKAGE = Path(rk.__file__).parent
TESTS = Path(__file__).parents[1]
RECORDED: dict[str, Any] = {"reverse": "recorded", "order": None, "bits": 16, "step": 1e-3}
"""As precise as ``PRECISE``, but for tests whose numbers the step makes small."""
WITH_RECORDED = " recorded"
"""The end of the name of a case with these options."""


class Cell(NamedTuple):
    """What happens: a test of "works" passes, a test of "refused" ends in an error of the package
    that matches ``error``."""

    text: str
    error: str | None = None

    @contextmanager
    def holds(self) -> Iterator[None]:
        if self.error is None:
            yield
            return
        with pytest.raises(Exception, match=self.error) as caught:
            yield
        assert PACKAGE in Path(caught.traceback[-1].path).parents, "not an error of the package"


NOT_APPLICABLE = Cell("–")


def works(note: str = "") -> Cell:
    return Cell(f"works{note and f'; {note}'}")


def refused(error: str, note: str = "") -> Cell:
    return Cell(f"refused{note and f'; {note}'}", error)


class Row(NamedTuple):
    feature: str
    fused: Cell
    modules: Cell
    tests: tuple[str, ...]
    """Each as ``folder/file.py::function``."""


class Section:
    """The rows of a file of tests/compatibility."""

    def __init__(self, file: str) -> None:
        self.file = f"compatibility/{Path(file).name}"
        self.rows: list[Row] = []

    def row(
        self,
        feature: str,
        fused: Cell = works(),  # noqa: B008
        modules: Cell = works(),  # noqa: B008
        kinds: Sequence[str] = KINDS,
        recorded: bool = True,
    ) -> Any:
        """Decorator of the test of a row. It runs with a ``case`` of each kind of stage, and with
        recorded increments if ``recorded``."""
        cases = [*kinds, *(kind + WITH_RECORDED for kind in kinds if recorded)]

        def decorate(test: Callable[..., None]) -> Any:
            self.rows.append(Row(feature, fused, modules, (f"{self.file}::{test.__name__}",)))

            @functools.wraps(test)
            def checked(case: Case, **fixtures: Any) -> None:
                with (modules if case.kind == "ResidualStage" else fused).holds():
                    test(case=case, **fixtures)

            return pytest.mark.parametrize("case", cases, indirect=True)(checked)

        return decorate

    def proved(
        self,
        feature: str,
        *tests: str,
        fused: Cell = works(),  # noqa: B008
        modules: Cell = works(),  # noqa: B008
    ) -> None:
        """A row that tests in other folders prove."""
        self.rows.append(Row(feature, fused, modules, tests))


class Twin(nn.Module):
    """The network of a stage in plain PyTorch, with parameters of its own. Parametrizations are
    computed once, as in a forward pass of the stage."""

    def __init__(self, stage: rk.Stage) -> None:
        super().__init__()
        self.stage = copy.deepcopy(stage)

    def forward(self, x: Tensor) -> Tensor:
        stage: Any = self.stage
        if hasattr(stage, "blocks"):
            return steps(stage, lambda n, x: stage.blocks[n](x), x)
        for hook in stage._forward_pre_hooks.values():
            hook(stage, (x,))
        theta = [getattr(stage, name) for name in stage.stacked]
        return steps(stage, lambda n, x: mlp(x, *(t[n] for t in theta)), x)


def mlp(x: Tensor, w1: Tensor, b1: Any = None, w2: Any = None, b2: Any = None) -> Tensor:
    """The residual function of an ``MLPStage``, with w1 alone that of a ``LinearStage``."""
    z = F.linear(x, w1, b1)
    return z if w2 is None else F.linear(z.tanh(), w2, b2)


class Case:
    """A stage whose gradients are precise, the same in plain PyTorch, and an input."""

    def __init__(self, kind: str, depth: int = 3, **options: Any) -> None:
        self.kind = kind
        self.stage = self.make(depth, **{**PRECISE, **options})
        self.twin = Twin(self.stage)
        shape = (2, 4, 3, 3) if kind == "ConvStage" else (3, 4)
        self.x = torch.randn(shape, dtype=torch.float64)

    def make(self, depth: int = 3, **options: Any) -> Any:
        """Another stage of the kind."""
        if self.kind == "MLPStage":
            return rk.MLPStage(4, 5, depth, **options).double()
        if self.kind == "LinearStage":
            return rk.LinearStage(4, depth, **options).double()
        if self.kind == "ConvStage":
            return make_conv_stage("basic", "tanh", 4, depth, **options).double()
        return rk.ResidualStage([block() for _ in range(depth)], **options).double()

    def agree(self, run: Callable[[nn.Module, Tensor], Any], **tolerance: float) -> None:
        """``run(module, x)`` returns the same for the stage and its twin, and leaves the same
        parameters, gradients and buffers behind."""
        results = []
        for module in (self.stage, self.twin):
            result = run(module, self.x.clone().requires_grad_())
            kept = [*module.parameters(), *module.buffers()]
            results.append([result, kept, [p.grad for p in module.parameters()]])
        torch.testing.assert_close(*results, **tolerance)


def block(dim: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, 5), nn.Tanh(), nn.Linear(5, dim))


def loss(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum() + y.pow(3).sum()


def backward(module: nn.Module, x: Tensor) -> list[Tensor | None]:
    """A forward and a backward pass."""
    y = module(x)
    loss(y).backward()
    return [y.detach(), x.grad]
