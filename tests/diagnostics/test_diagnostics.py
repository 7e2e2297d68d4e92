"""``diagnose`` reports what one would find by hand, and leaves no trace."""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import peak_allocation
from torch import Tensor, nn

import resode_kernels as rk
from resode_kernels.diagnostics.constants import spectral_norm
from resode_kernels.diagnostics.measuring import Measurer
from resode_kernels.diagnostics.probe import Probe
from resode_kernels.diagnostics.trajectory import ProbedBlock

SETTINGS = [
    rk.Setting("adjoint", "paper", 1),
    rk.Setting("adjoint", "refined", 2, 3),
    rk.Setting("adjoint", "recorded", bits=4),
]


class Attention(nn.Module):
    """A pre-norm transformer block's residual function, with dropout."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        return self.dropout(self.attention(y, y, y, attn_mask=mask, need_weights=False)[0])


class Pair(nn.Module):
    """A residual function of a state of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.one(x[1])), torch.tanh(self.two(x[0]))


def make(kind: str, **options: Any) -> tuple[rk.Stage, Any]:
    count = 7 if options.get("scheme") == "heun" else 6
    if kind == "mlp":
        return rk.MLPStage(8, 12, 6, **options), torch.randn(5, 8)
    if kind == "tied":
        return rk.MLPStage(8, 12, 6, tied=True, **options), torch.randn(2, 3, 8)
    if kind == "linear":
        return rk.LinearStage(8, 6, **options), torch.randn(5, 8)
    if kind == "conv":
        return rk.ConvStage(4, 6, **options), torch.randn(3, 4, 5, 5)
    if kind == "modules":
        blocks = [Attention() for _ in range(count)]
        return rk.ResidualStage(blocks, **options), torch.randn(2, 4, 8)
    return rk.ResidualStage(Pair(), depth=6, **options), (torch.randn(3, 5), torch.randn(3, 5))


KINDS = ["mlp", "tied", "linear", "conv", "modules", "pair"]


def diagnose(stage: rk.Stage, x: Any, loss: Any = None, **options: Any) -> rk.Report:
    return rk.diagnose(stage, x, loss, **{"settings": SETTINGS, **options})


def gradients(stage: rk.Stage, x: Any, loss: Any, **options: Any) -> dict[str, Tensor]:
    """Of a training step, taken as anyone would."""
    stage.configure(**options)
    stage.zero_grad()
    torch.manual_seed(7)
    loss(stage(x)).backward()
    return {name: p.grad.clone() for name, p in stage.named_parameters()}


def relative_error(a: Any, b: Any) -> float:
    a, b = (torch.cat([t.flatten() for t in tensors]).double() for tensors in (a, b))
    return float((a - b).norm() / b.norm())


# -------------------------------------------------------------------------- the numbers are right


@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("kind", ["mlp", "tied", "linear", "conv"])
def test_gradient_errors_are_those_found_by_hand(kind: str, scheme: str) -> None:
    stage, x = make(kind, scheme=scheme, step=0.4)

    def loss(y: Tensor) -> Tensor:
        return (y**3).mean()

    report = diagnose(stage, x, loss)
    exact = gradients(stage, x, loss, backward="stored")
    for measured in report.settings[:4]:
        mine = gradients(stage, x, loss, **measured.setting._asdict())
        by_hand = relative_error(mine.values(), exact.values())
        assert measured.gradient.error == pytest.approx(by_hand, rel=1e-2, abs=1e-6)
        flat = [torch.cat([t.flatten() for t in g.values()]).double() for g in (mine, exact)]
        assert measured.gradient.cosine == pytest.approx(
            float(torch.cosine_similarity(*flat, dim=0)), abs=1e-7
        )
        if measured.setting == report.setting:
            assert report.gradient == measured.gradient
            for name, error in report.parameters.items():
                one = relative_error([mine[name]], [exact[name]])
                assert error.error == pytest.approx(one, rel=1e-2, abs=1e-6)


def test_errors_are_per_block_too() -> None:
    stage, x = make("mlp", step=0.4)

    def loss(y: Tensor) -> Tensor:
        return (y**3).mean()

    report = diagnose(stage, x, loss)
    exact = gradients(stage, x, loss, backward="stored")
    mine = gradients(stage, x, loss, backward="adjoint")
    for n, error in enumerate(report.blocks):
        by_hand = relative_error([g[n] for g in mine.values()], [g[n] for g in exact.values()])
        assert error.error == pytest.approx(by_hand, rel=1e-2)
    modules, y = make("modules")
    modules.eval()
    assert len(diagnose(modules, y).blocks) == 6


@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize(
    ("rule", "order", "every"),
    [("paper", 1, None), ("refined", 1, None), ("refined", 2, 4), ("predicted", 2, 2)],
)
def test_reconstruction_errors_are_those_found_by_hand(
    rule: str, order: int, every: int | None, scheme: str
) -> None:
    """By the table of reverse rules, written out once more."""
    options = {
        "scheme": scheme,
        "reverse": rule,
        "order": order,
        "anchor_every": every,
        "step": 0.4,
    }
    stage, x = make("mlp", **options, dtype=torch.float64)
    x, h, steps = x.double(), 0.4, stage.depth

    def f(n: int, z: Tensor) -> Tensor:
        u = torch.tanh(z @ stage.w1[n].T + stage.b1[n])
        return u @ stage.w2[n].T + stage.b2[n]

    def phi(n: int, z: Tensor) -> Tensor:
        a = f(n, z)
        return a if scheme == "euler" else (a + f(n + 1, z + h * a)) / 2

    def psi(n: int, z: Tensor) -> Tensor:
        if scheme == "euler":
            return f(n, z)
        b = f(n + 1, z)
        return (b + f(n, z - h * b)) / 2

    with torch.no_grad():
        true = [x]
        for n in range(steps):
            true.append(true[-1] + h * phi(n, true[-1]))
        state, past, expected = true[-1], [], {}
        for n in reversed(range(steps)):
            if every and n + 1 < steps and (n + 1) % every == 0:
                state = true[n + 1]
            if rule == "predicted" and past:
                newest = past[0] if len(past) == 1 else 2 * past[0] - past[1]
                p, corrections = state - h * newest, order - len(past)
            else:
                p = state - h * psi(n, state)
                corrections = {"paper": 0, "refined": order - 1, "predicted": order}[rule]
            for _ in range(corrections):
                p = state - h * phi(n, p)
            slope = phi(n, p)
            past = [slope, *past][:order]
            state = p if rule == "paper" else state - h * slope
            size = true[n].norm()
            expected[n] = ((state - true[n]).norm() / size, (p - true[n]).norm() / size)

    report = diagnose(stage, x)
    assert [layer.n for layer in report.layers] == list(range(steps))
    for layer in report.layers:
        assert layer.state_error == pytest.approx(float(expected[layer.n][0]), rel=1e-6, abs=1e-15)
        assert layer.point_error == pytest.approx(float(expected[layer.n][1]), rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("bits", [4, (8, 2, None, 6, 12, 16)])
def test_the_errors_of_recorded_states_are_those_of_their_rounding(bits: Any, scheme: str) -> None:
    stage, x = make("mlp", scheme=scheme, step=0.4, reverse="recorded", bits=bits)
    layers = diagnose(stage, x).layers
    assert [layer.n for layer in layers] == list(range(6))
    assert all(layer.state_error == layer.point_error for layer in layers)
    errors = [layer.state_error for layer in layers]
    assert errors[0] < 1e-6  # x[0] is the estimate to begin with
    if isinstance(bits, int):
        assert all(1e-3 < e < 0.1 for e in errors[1:])
    else:  # the increment of step n decides about x[n+1]; x̂[3] is the state itself, as x̂[2] is kept
        assert errors[2] > 10 * errors[1]
        assert errors[3] < 1e-6
        assert errors[4] > 10 * errors[5]


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_power_iteration_finds_the_norm_of_the_jacobian(activation: str) -> None:
    stage = rk.MLPStage(6, 20, 3, activation, dtype=torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64)
    block = ProbedBlock(Probe(stage, x), 1)
    jacobian = torch.autograd.functional.jacobian(lambda z: stage.residual(1, z), x)
    exact = float(torch.linalg.matrix_norm(jacobian.reshape(24, 24), 2))
    assert spectral_norm(block, x, 1, iterations=100) == pytest.approx(exact, rel=1e-3)
    assert 0.9 * exact <= spectral_norm(block, x, 1) <= 1.001 * exact


@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("kind", ["mlp", "tied", "conv", "modules"])
def test_the_papers_bound_is_above_what_is_measured(kind: str, scheme: str) -> None:
    stage, x = make(kind, scheme=scheme)
    stage.eval()
    report = diagnose(stage, x)
    assert report.bound.proposition == (3 if scheme == "euler" else 5)
    assert report.bound.layers is not None
    if scheme == "heun" and kind == "tied":  # of higher order than the bound tells
        assert report.bound.largest == 0
        return
    for limit, measured in zip(report.bound.layers, report.bound.measured, strict=True):
        assert limit > measured


def test_constants_by_hand() -> None:
    stage = rk.LinearStage(6, 4)
    x = torch.randn(3, 6)
    report = diagnose(stage, x)
    with torch.no_grad():
        slopes, state = [], x
        for theta in stage.weight:
            slopes.append(float((state @ theta.T).norm()))
            state = state + state @ theta.T / 4
        change = max(float((b - a).norm()) for a, b in pairwise(stage.weight))
    assert report.constants.c_f == pytest.approx(max(slopes), rel=0.1)
    assert report.constants.c_f >= max(slopes) * 0.9999
    norms = torch.linalg.matrix_norm(stage.weight.detach(), 2)
    assert report.constants.l_f == pytest.approx(float(norms.max()), rel=0.05)
    assert report.constants.smoothness == pytest.approx(change)
    # Prop. 3 with these numbers
    l_f, c_f = report.constants.l_f, report.constants.c_f
    assert report.bound.layers is not None
    assert report.bound.layers[0] * float(x.norm()) == pytest.approx(math.expm1(l_f) * c_f / 4)
    tied, y = make("tied")
    assert diagnose(tied, y).constants.smoothness == 0


# ---------------------------------------------------------------------------------- no trace left


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_nothing_changes(kind: str, training: bool) -> None:
    stage, x = make(kind)
    stage.train(training)
    blocks = list(getattr(stage, "blocks", []))
    if blocks:
        blocks[0].eval()  # a mode of its own
    fired = []
    for p in stage.parameters():
        p.grad = torch.full_like(p, 3.0)
        p.register_hook(lambda g: fired.append(g))
    modes = [m.training for m in stage.modules()]
    before = {name: t.clone() for name, t in stage.state_dict().items()}
    identities = [id(t) for t in (*stage.parameters(), *stage.buffers())]
    options, generator = stage.options, torch.get_rng_state()
    rk.diagnose(stage, x, settings=SETTINGS)
    assert torch.equal(generator, torch.get_rng_state())
    assert stage.options is options
    assert not fired
    assert modes == [m.training for m in stage.modules()]
    assert identities == [id(t) for t in (*stage.parameters(), *stage.buffers())]
    after = stage.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all((p.grad == 3).all() for p in stage.parameters())


def test_nothing_changes_when_it_fails() -> None:
    stage, x = make("conv")
    before = {name: t.clone() for name, t in stage.state_dict().items()}
    options = stage.options
    with pytest.raises(TypeError, match="loss must return one number"):
        rk.diagnose(stage, x, lambda y: y)
    assert stage.options is options
    assert all(torch.equal(before[name], t) for name, t in stage.state_dict().items())


def test_it_works_inside_no_grad_and_with_frozen_parameters() -> None:
    stage, x = make("conv")
    for name, p in stage.named_parameters():
        p.requires_grad_("conv1" in name)
    with torch.no_grad():
        report = diagnose(stage, x)
    assert list(report.parameters) == [f"blocks.{n}.conv1.weight" for n in range(6)]
    stage.requires_grad_(False)
    frozen = diagnose(stage, x)
    assert frozen.parameters == {}
    assert frozen.input_gradient.error > 0


def test_arguments_reach_the_blocks() -> None:
    stage, x = make("modules")
    stage.eval()
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    masked, plain = (diagnose(stage, x, **options) for options in ({"args": (mask,)}, {}))
    named = diagnose(stage, x, kwargs={"mask": mask})
    assert masked.gradient == named.gradient
    assert masked.gradient != plain.gradient


def test_random_blocks_are_diagnosed_with_one_draw() -> None:
    """Dropout is no error of the method."""
    stage, x = make("modules", reverse="refined", order=3)
    report = diagnose(stage, x)
    assert report.gradient.error < 1e-4
    assert max(layer.state_error for layer in report.layers) < 1e-4


# -------------------------------------------------------------------------------------- the report


def test_a_report_prints_plots_and_becomes_a_dict(tmp_path: Path) -> None:
    stage, x = make("mlp")
    report = rk.diagnose(stage, x)
    text = str(report)
    words = ("states", "input gradient", "L_f", "Prop. 3", "predicted 3", "anchors every", "*")
    for word in (*words, "recorded 8 bits", "bfloat16 autocast", "sampling noise"):
        assert word in text
    assert report.recommendation in text
    assert text.splitlines()[0].startswith("Stage: MLPStage(dim=8, depth=6")
    report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000
    numbers = json.loads(json.dumps(report.to_dict()))
    assert len(numbers["layers"]) == 6
    assert numbers["gradient"]["error"] == report.gradient.error
    assert [m["setting"] for m in numbers["settings"]] == [str(m.setting) for m in report.settings]
    assert numbers["recommendation"] == report.recommendation


def test_every_rule_and_order_is_compared_with_and_without_anchors() -> None:
    stage, x = make("mlp")
    settings = [m.setting for m in rk.diagnose(stage, x).settings]
    orders = [(rule, k) for rule in ("refined", "predicted") for k in (1, 2, 3)]
    for rule in [("paper", 1), *orders]:
        mine = [s for s in settings if (s.reverse, s.order) == rule]
        assert sum(s.anchor_every is None for s in mine) == 1
        assert sum(s.anchor_every is not None for s in mine) >= 1
    for bits in (4, 6, 8):
        assert settings.count(rk.Setting("adjoint", "recorded", bits=bits)) == 1
    assert rk.Setting("checkpoint") in settings


def test_memory_counts_codes_scales_and_the_state_that_is_kept() -> None:
    """Codes of ``bits``, a bfloat16 for every 32 elements of a row, and x̂[N − 1]; besides, the
    state and the cotangent of the reverse pass."""
    stage, x = rk.MLPStage(48, 16, 64), torch.randn(256, 48)
    bits = (*[4] * 32, *[12] * 31, 12)
    settings = [rk.Setting("adjoint", "recorded", bits=b) for b in (4, 8, bits)]
    report = rk.diagnose(stage, x, settings=settings, seconds=5)
    found = {m.setting.bits: m.memory for m in report.settings if m.setting.records}
    scales = 256 * 2 * 2
    for b, codes in ((4, 63 * 4), (8, 63 * 8), (bits, 32 * 4 + 31 * 12)):
        assert found[b] == x.nbytes * codes // 32 + 63 * scales + 3 * x.nbytes


def test_memory_grows_with_anchors_and_stays_below_standard_backprop() -> None:
    stage, x = rk.MLPStage(16, 16, 64), torch.randn(256, 16)
    found = {m.setting: m.memory for m in rk.diagnose(stage, x).settings}
    none, eight = (found[rk.Setting("adjoint", "refined", 1, k)] for k in (None, 8))
    assert eight - none == 7 * x.nbytes
    assert none < found[rk.Setting("checkpoint")] < found[rk.Setting("stored")]


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("mlp", 0.85, 1.2), ("conv", 0.4, 1.1), ("modules", 0.65, 1.1)]
)
def test_memory_is_near_what_is_allocated(kind: str, low: float, high: float) -> None:
    """Scratch of the kernels is not counted: those for convolutions have much of it, those for
    rows little where states are large and fill their vectors."""
    if kind == "mlp":
        stage: rk.Stage = rk.MLPStage(64, 64, 64)
    elif kind == "conv":
        stage = rk.ConvStage(16, 36)
    else:
        blocks = [nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(36)]
        stage = rk.ResidualStage(blocks)
    shape = {"mlp": (8192, 64), "conv": (32, 16, 12, 12), "modules": (2048, 48)}[kind]
    x = torch.randn(shape)
    probe = Probe(stage, x)
    cotangent = probe.cotangent(None)
    measurer = Measurer(probe, cotangent)
    parameters = sum(p.nbytes for p in stage.parameters())
    recorded = [rk.Setting("adjoint", "recorded", bits=bits) for bits in (2, 8, 16)]
    for setting in (*SETTINGS, *recorded, rk.Setting("checkpoint"), rk.Setting("stored")):
        most = peak_allocation(partial(probe.gradients, cotangent, **setting._asdict()))
        measurer.measure(setting)
        assert low < measurer.found[setting][-1] / (most - parameters) < high, setting


def test_explosions_are_reported_not_hidden() -> None:
    stage, x = rk.MLPStage(8, 64, 12, "relu", step=30.0), torch.randn(4, 8)
    report = diagnose(stage, x)
    assert report.gradient.error > 1
    assert "checkpoint" in report.recommendation
    str(report)
