"""Remembered kinks of single calls: replays compute the pieces of the recorded arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import relative_error
from torch import Tensor, nn

from resode_kernels.replay.kinks import FUNCTIONS, Recording, Replaying

Piece = Callable[[Tensor], Tensor]
WHERE_THREE: tuple[Piece, Piece] = (lambda u: u <= -3, lambda u: u >= 3)


class Case:
    """A function with kinks.

    forms  calls that compute it
    low    where an argument is on the lower piece, high where on the upper one, and the pieces
    """

    def __init__(
        self,
        forms: list[Callable[[Tensor], Any]],
        low: Piece | None,
        below: Piece,
        between: Piece = lambda u: u,
        high: Piece | None = None,
        above: Piece = lambda u: u,
    ) -> None:
        self.forms, self.low, self.high = forms, low, high
        self.below, self.between, self.above = below, between, above

    @property
    def kinks(self) -> int:
        return (self.low is not None) + (self.high is not None)

    def at(self, u: Tensor, recorded: Tensor) -> Tensor:
        """The pieces of ``recorded`` at u."""
        y = self.between(u)
        if self.low is not None:
            y = torch.where(self.low(recorded), self.below(u), y)
        if self.high is not None:
            y = torch.where(self.high(recorded), self.above(u), y)
        return y


def constant(c: float) -> Piece:
    return lambda u: torch.full_like(u, c)


SLOPES = torch.linspace(0.1, 0.4, 6)
CASES = {
    "relu": Case(
        [
            *(F.relu, torch.relu, torch.Tensor.relu, nn.ReLU(), lambda u: F.relu(input=u)),
            *(nn.ReLU(inplace=True), torch.relu_, F.relu_, lambda u: u.relu_()),
            *(lambda u: F.relu(u, True), lambda u: F.relu(u, inplace=True)),
        ],
        lambda u: u <= 0,
        constant(0),
    ),
    "leaky_relu": Case(
        [
            *(nn.LeakyReLU(0.2), nn.LeakyReLU(0.2, inplace=True)),
            *(lambda u: F.leaky_relu(u, 0.2), lambda u: F.leaky_relu_(u, negative_slope=0.2)),
        ],
        lambda u: u <= 0,
        lambda u: 0.2 * u,
    ),
    "prelu": Case(
        [lambda u: F.prelu(u, SLOPES), lambda u: u.prelu(SLOPES), lambda u: torch.prelu(u, SLOPES)],
        lambda u: u <= 0,
        lambda u: SLOPES.view(6, 1) * u,
    ),
    "abs": Case(
        [
            *(abs, torch.abs, torch.absolute, lambda u: u.abs(), lambda u: u.absolute()),
            *(torch.abs_, lambda u: u.abs_(), lambda u: u.absolute_()),
        ],
        lambda u: u < 0,
        lambda u: -u,
    ),
    "relu6": Case(
        [nn.ReLU6(), nn.ReLU6(inplace=True), F.relu6, lambda u: F.relu6(u, inplace=True)],
        lambda u: u <= 0,
        constant(0),
        high=lambda u: u >= 6,
        above=constant(6),
    ),
    "hardtanh": Case(
        [
            *(nn.Hardtanh(-0.5, 2), nn.Hardtanh(-0.5, 2, inplace=True)),
            *(lambda u: F.hardtanh(u, -0.5, 2.0), lambda u: F.hardtanh_(u, -0.5, 2.0)),
        ],
        lambda u: u <= -0.5,
        constant(-0.5),
        high=lambda u: u >= 2,
        above=constant(2),
    ),
    "hardswish": Case(
        [nn.Hardswish(), nn.Hardswish(inplace=True), F.hardswish],
        WHERE_THREE[0],
        constant(0),
        lambda u: u * (u + 3) / 6,
        WHERE_THREE[1],
    ),
    "hardsigmoid": Case(
        [nn.Hardsigmoid(), nn.Hardsigmoid(inplace=True), F.hardsigmoid],
        WHERE_THREE[0],
        constant(0),
        lambda u: (u + 3) / 6,
        WHERE_THREE[1],
        constant(1),
    ),
    "clamp": Case(
        [
            *(lambda u: u.clamp(-1, 0.5), lambda u: torch.clamp(u, min=-1, max=0.5)),
            *(lambda u: u.clip(-1, 0.5), lambda u: torch.clip(u, -1, 0.5)),
            *(lambda u: u.clamp_(-1, 0.5), lambda u: torch.clamp_(u, -1, max=0.5)),
            lambda u: u.clip_(-1, 0.5),
        ],
        lambda u: u < -1,
        constant(-1),
        high=lambda u: u > 0.5,
        above=constant(0.5),
    ),
    "clamp_min": Case(
        [
            *(lambda u: u.clamp(min=-1), lambda u: u.clamp_min(-1), lambda u: u.clamp_(-1)),
            *(lambda u: torch.clamp_min(u, -1), lambda u: torch.clamp_min_(u, min=-1)),
        ],
        lambda u: u < -1,
        constant(-1),
    ),
    "clamp_max": Case(
        [
            *(lambda u: u.clamp(max=0.5), lambda u: u.clamp_max(0.5), lambda u: u.clip(None, 0.5)),
            lambda u: u.clamp_max_(0.5),
        ],
        None,
        constant(0),
        high=lambda u: u > 0.5,
        above=constant(0.5),
    ),
}
FORMS = [(name, i) for name, case in CASES.items() for i in range(len(case.forms))]


def moved(u: Tensor) -> Tensor:
    """Many of the arguments on another side."""
    return u + 2 * torch.randn_like(u)


# ----------------------------------------------------------------------------------------- a call


@pytest.mark.parametrize("layout", ["contiguous", "permuted"])
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_replays_compute_the_recorded_pieces(name: str, form: int, layout: str) -> None:
    case, function = CASES[name], CASES[name].forms[form]
    at = 3 * (torch.randn(5, 6, 3) if layout == "contiguous" else torch.randn(3, 6, 5).mT.mT)
    if layout == "permuted":
        at = at.permute(2, 1, 0)
    plain, given = at.clone(), at.clone()
    expected = function(plain)
    with Recording() as recording:
        result = function(given)
    assert torch.equal(result, expected)
    assert torch.equal(given, plain)  # as it is left, whether in place or not
    assert (result is given) == (expected is plain)
    assert [seen.kinks for seen in recording.seen] == [case.kinks]
    assert recording.sides().nbytes == case.kinks * -(-at.numel() // 8)

    u = moved(at).requires_grad_()
    given, wanted = u * 1, case.at(u, at)
    with Replaying(recording.seen, recording.sides(), "block"):
        y = function(given)
    assert (y is given) == (expected is plain)
    assert relative_error(wanted.detach(), function(u.detach().clone())) > 0.05
    torch.testing.assert_close(y, wanted)
    g = torch.randn_like(u)
    (own,), (other,) = (torch.autograd.grad(t, u, g) for t in (y, wanted))
    torch.testing.assert_close(own, other)


def test_every_function_is_tested() -> None:
    names = {name for name, *_ in FUNCTIONS.values()}
    assert {"absolute": "abs", "clip": "clamp"}.keys() | CASES.keys() == names


def test_what_else_is_called_keeps_its_own_value() -> None:
    """Bounds that are tensors, results written elsewhere, integers, constants, batched tensors."""
    u, low = 3 * torch.randn(2, 7), torch.zeros(7)

    def calls(u: Tensor) -> list[Tensor]:
        return [
            u.clamp(min=low),
            torch.clamp(u, low, low + 1),
            torch.clamp(u, 0, 1, out=torch.empty_like(u)),
            torch.abs(u, out=torch.empty_like(u)),
            u.long().abs(),
            torch.relu(u.long()),
            u.to(torch.complex64).abs(),
            u.clamp(1, 0),
            torch.vmap(torch.relu)(u),
        ]

    with Recording() as recording:
        first = calls(u)
    assert recording.seen == []
    with Replaying([], None, "block"):
        second = calls(u)
    for a, b, c in zip(first, second, calls(u), strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, c)


@pytest.mark.parametrize("name", CASES)
def test_numbers_that_are_not_finite(name: str) -> None:
    """They are replayed as they were. (hardswish(−∞) is NaN.)"""
    smallest = -1e9 if name == "hardswish" else -torch.inf
    u = torch.tensor([torch.nan, torch.inf, smallest, 1.0, -1.0, 0.0]).repeat(2, 1)
    function = CASES[name].forms[0]
    with Recording() as recording:
        first = function(u.clone())
    with Replaying(recording.seen, recording.sides(), "block"):
        second = function(u.clone())
    torch.testing.assert_close(first, second, equal_nan=True)
    leaf = u.clone().requires_grad_()
    with Replaying(recording.seen, recording.sides(), "block"):
        (gradient,) = torch.autograd.grad(function(leaf * 1).sum(), leaf)
    assert gradient[:, 3:].isfinite().all()


def test_replays_of_other_calls_are_refused() -> None:
    u = torch.randn(3, 5)
    with Recording() as recording:
        u.relu().abs()
    seen, sides = recording.seen, recording.sides()

    def replay(function: Callable[[], object]) -> None:
        with Replaying(seen, sides, "block 7 (Foo)"):
            function()

    with pytest.raises(RuntimeError, match=r"block 7 \(Foo\) calls other functions .* call 2 is "):
        replay(lambda: u.relu().relu())
    with pytest.raises(
        RuntimeError, match=r"call 1 is of relu .* \[5, 3\], and it was .* \[3, 5\]"
    ):
        replay(lambda: u.T.relu())
    with pytest.raises(
        RuntimeError, match=r"call 2 is of no function with kinks, and it was of abs"
    ):
        replay(lambda: u.relu())
    with pytest.raises(RuntimeError, match=r"call 3 is of relu .* and it was of no function with"):
        replay(lambda: u.relu().abs().relu())
    with pytest.raises(KeyError):  # an error of the block's own is not covered up
        replay(lambda: {}["key"])
