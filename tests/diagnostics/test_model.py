"""``diagnose``, ``tune`` and ``monitor`` take a whole model: one bound for all of its stages."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import resode_kernels as rk
from resode_kernels.diagnostics.budget import Budget, Display
from resode_kernels.diagnostics.calls import stages_of
from resode_kernels.diagnostics.gradients import GradientError
from resode_kernels.diagnostics.model import ModelProbe, choose
from resode_kernels.diagnostics.settings import CHECKPOINT, Measurement, Setting


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.linear(self.dropout(x)))
        return y if mask is None else y * mask


class Model(nn.Module):
    """Two stages, batch norm between them, dropout in one and an unused stage."""

    def __init__(self, step: float | None = 0.25) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.early = rk.ResidualStage([Masked() for _ in range(6)], step=step)
        self.norm = nn.BatchNorm1d(8)
        self.late = rk.MLPStage(8, 12, 6, step=step)
        self.last = nn.Linear(8, 2)
        self.spare = rk.MLPStage(8, 8, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.early(self.first(x), mask=mask)
        y = self.late(self.norm(y))
        result: Tensor = self.last(y)
        return result


def loss(y: Tensor) -> Tensor:
    return F.cross_entropy(y, torch.arange(len(y)) % 2)


def gradients(model: nn.Module, run: Callable[[], Tensor], **options: Any) -> list[Tensor]:
    """Of a training step, taken as anyone would."""
    before = {stage: stage.options for stage in stages_of(model).values()}
    buffers = [b.clone() for b in model.buffers()]
    for stage in before:
        stage.configure(**options)
    torch.manual_seed(3)
    grads = torch.autograd.grad(run(), tuple(model.parameters()), allow_unused=True)
    with torch.no_grad():
        for b, old in zip(model.buffers(), buffers, strict=True):
            b.copy_(old)
    for stage, old in before.items():
        stage.options = old
    pairs = zip(model.parameters(), grads, strict=True)
    return [torch.zeros_like(p) if g is None else g for p, g in pairs]


def error(model: nn.Module, run: Callable[[], Tensor]) -> float:
    mine, exact = gradients(model, run), gradients(model, run, backward="stored")
    a, b = (torch.cat([g.flatten() for g in grads]).double() for grads in (mine, exact))
    return float((a - b).norm() / b.norm())


def test_the_error_is_that_of_all_parameters_of_the_model() -> None:
    model, x = Model(), torch.randn(10, 3)
    torch.manual_seed(3)
    report = rk.diagnose(model, x, loss)
    assert report.gradient.error == pytest.approx(error(model, lambda: loss(model(x))), rel=1e-2)
    assert list(report.stages) == ["early", "late"]
    assert report.left_out == ["spare"]


def test_every_stage_gets_the_true_cotangent_of_the_loss() -> None:
    model, x = Model(), torch.randn(10, 3)
    torch.manual_seed(3)
    _, calls = ModelProbe(model, x, loss).exact()
    true: dict[str, Tensor] = {}
    model.early.configure(backward="stored")
    model.late.configure(backward="stored")
    torch.manual_seed(3)
    y = model.early(model.first(x))
    y.register_hook(lambda g: true.update(early=g))
    z = model.late(model.norm(y))
    z.register_hook(lambda g: true.update(late=g))
    loss(model.last(z)).backward()
    assert list(calls) == ["early", "late"]
    for name, call in calls.items():
        assert torch.allclose(call.cotangent, true[name], rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("bound", [1e-2, 1e-4])
def test_the_bound_holds_for_the_model_after_tuning(bound: float) -> None:
    model, x = Model(), torch.randn(10, 3)
    report = rk.tune(model, x, loss, max_gradient_error=bound)
    assert 2 * error(model, lambda: loss(model(x))) <= bound
    for name, stage in (("early", model.early), ("late", model.late)):
        assert Setting.in_force(stage.options) == report.stages[name].recommended.setting
    assert model.spare.options == rk.MLPStage(8, 8, 2).options


class Fake:
    """Stands in for the examination of a stage: the higher the order, the smaller the error."""

    def __init__(self) -> None:
        self.limits: list[float] = []

    def recommend(self, limit: float, budget: Budget) -> Measurement:
        self.limits.append(limit)
        exact = GradientError(0.0, 1.0)
        kept = [k for k in (1, 2, 3) if 2 * 10.0**-k <= limit]
        if not kept:
            return Measurement(CHECKPOINT, exact, exact, 1, 1.0)
        error = GradientError(10.0 ** -kept[0], 1.0)
        return Measurement(Setting("adjoint", "refined", kept[0]), error, exact, 1, 1.0)


class FakeProbe:
    """Stands in for a model whose error is ``growth`` times that of its stages."""

    def __init__(self, growth: float) -> None:
        self.growth = growth
        self.runs: list[list[int | None]] = []

    def gradients(self, settings: dict[str, Setting]) -> list[Tensor]:
        self.runs.append([setting.order for setting in settings.values()])
        far = max(0.0 if s == CHECKPOINT else 10.0**-s.order for s in settings.values())
        return [torch.tensor([1 + self.growth * far], dtype=torch.float64)]


@pytest.mark.parametrize(
    ("growth", "order", "error"),
    [(0.5, 1, 0.05), (5, 2, 0.05), (20, 3, 0.02), (1000, None, 0.0), (math.inf, None, 0.0)],
)
def test_errors_that_add_up_tighten_the_limits(
    growth: float, order: int | None, error: float
) -> None:
    """The error of the whole model decides, and the choice is among what was measured."""
    probe, stages = FakeProbe(growth), {"one": Fake(), "two": Fake()}
    exact = [torch.ones(1, dtype=torch.float64)]
    budget = Budget(60.0, Display("", 60.0))
    chosen, limit, found = choose(probe, exact, stages, 0.2, budget)  # type: ignore[arg-type]
    assert [m.setting.order for m in chosen.values()] == [order, order]
    assert (chosen["one"].setting == CHECKPOINT) == (order is None)
    assert found.error == pytest.approx(error)
    assert limit == stages["one"].limits[-1] == stages["two"].limits[-1]
    assert stages["one"].limits == sorted(stages["one"].limits, reverse=True)
    assert len(probe.runs) == len({tuple(run) for run in probe.runs})  # none is measured twice


def test_without_time_to_choose_a_model_gets_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that leaves the model's bound is never set."""
    monkeypatch.setattr("resode_kernels.diagnostics.model.MARGIN", 1e9)
    model, x = Model(), torch.randn(10, 3)
    report = rk.tune(model, x, loss, seconds=0)
    assert model.early.options.backward == model.late.options.backward == "checkpoint"
    assert report.recommended_gradient.error == 0
    assert error(model, lambda: loss(model(x))) < 1e-5


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_changes_in_a_model(fails: bool) -> None:
    model, x = Model(), torch.randn(10, 3)
    model.last.eval()  # a mode of its own
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
        p.register_hook(lambda g: pytest.fail("a hook of a parameter was called"))
    state = {name: t.clone() for name, t in model.state_dict().items()}
    kept = [id(t) for t in (*model.parameters(), *model.buffers())]
    modes = [m.training for m in model.modules()]
    stages = (model.early, model.late, model.spare)
    options = [stage.options for stage in stages]
    generator = torch.get_rng_state()
    with rk.monitor(model) as watching:
        if fails:
            with pytest.raises(TypeError, match="loss must return one number"):
                rk.diagnose(model, x, lambda y: y)
        else:
            rk.diagnose(model, x, loss, settings=[Setting()])
    assert watching.calls.total() == 0
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(state[name], t) for name, t in model.state_dict().items())
    assert kept == [id(t) for t in (*model.parameters(), *model.buffers())]
    assert modes == [m.training for m in model.modules()]
    assert all(stage.options is old for stage, old in zip(stages, options, strict=True))
    assert all((p.grad == 3).all() for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_a_batch_is_a_tensor_a_tuple_or_a_dict() -> None:
    model, x, mask = Model().eval(), torch.randn(10, 3), torch.ones(8)
    mask[:4] = 0
    plain, one = (rk.diagnose(model, b, loss, seconds=0).gradient for b in (x, (x,)))
    masked, named = (
        rk.diagnose(model, b, loss, seconds=0).gradient for b in ((x, mask), {"x": x, "mask": mask})
    )
    assert plain == one
    assert masked == named != plain


def test_arguments_recorded_by_input_of_reach_the_blocks() -> None:
    model, x, mask = Model().eval(), torch.randn(10, 3), torch.ones(8)
    mask[:4] = 0
    seen = rk.input_of(model.early, lambda: model(x, mask))
    whole = rk.diagnose(model.early, seen, seconds=0)
    by_hand = rk.diagnose(model.early, seen.x, kwargs={"mask": mask}, seconds=0)
    assert whole.gradient == by_hand.gradient
    assert whole.gradient != rk.diagnose(model.early, seen.x, seconds=0).gradient
    tuned = rk.tune(model.early, seen, seconds=0)
    assert tuned.gradient == whole.gradient


def test_recorded_inputs_are_copies() -> None:
    """A model may change the tensor that it gave to a stage."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = rk.MLPStage(4, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            y: Tensor = self.stage(x)
            x.zero_()
            return y

    model, x = InPlace(), torch.randn(3, 4)
    assert torch.equal(rk.input_of(model.stage, lambda: model(x)).x, 2 * x)


def test_a_nested_stage_belongs_to_the_outer_one() -> None:
    inner = rk.MLPStage(4, 4, 2)
    outer = rk.ResidualStage([nn.Sequential(inner, nn.Tanh()), nn.Linear(4, 4)])
    model = nn.Sequential(nn.Linear(4, 4), outer)
    report = rk.diagnose(model, torch.randn(3, 4), seconds=0)
    assert list(report.stages) == ["1"]
    assert rk.monitor(model).stages == {"1": outer}
    assert "model.get_submodule('1').configure" in report.stages["1"].recommendation


def test_a_stage_that_is_called_twice_keeps_the_bound_of_the_model() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = rk.MLPStage(8, 12, 6, step=0.3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.stage(3 * self.stage(x))
            return y

    model, x = Twice(), torch.randn(10, 8)
    report = rk.tune(model, x, lambda y: y.square().mean(), max_gradient_error=1e-3)
    assert report.calls == {"stage": 2}
    assert "stage is called 2 times in a forward pass" in str(report)
    assert 2 * error(model, lambda: model(x).square().mean()) <= 1e-3


def test_a_compiled_model_is_not_compiled_again() -> None:
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(4, 8), rk.MLPStage(8, 8, 4), nn.Linear(8, 1))
    fast, x = torch.compile(model, backend=backend), torch.randn(3, 4)
    before = fast(x)
    count = len(compiled)
    assert count > 0
    report = rk.diagnose(fast, x, settings=[Setting()])
    seen = rk.input_of(model[1], lambda: fast(x))
    assert torch.equal(seen.x, model[0](x))
    assert report.gradient == rk.diagnose(model, x, settings=[Setting()]).gradient
    assert torch.equal(fast(x), before)
    assert len(compiled) == count


def test_frozen_stages_are_left_out_unless_gradients_pass_through_them() -> None:
    model = nn.Sequential(rk.MLPStage(4, 4, 2), nn.Linear(4, 4), rk.MLPStage(4, 4, 2))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    report = rk.diagnose(model, torch.randn(3, 4), seconds=0)
    assert list(report.stages) == ["2"]
    assert report.left_out == ["0"]
    assert "0 is left out: no gradient passes through it" in str(report)


def test_outputs_of_any_kind_go_to_the_loss() -> None:
    class Dict(Model):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return {"loss": super().forward(x).square().mean()}

    model, x = Dict(), torch.randn(10, 3)
    assert rk.diagnose(model, x, lambda out: out["loss"], seconds=0).gradient.error > 0
    with pytest.raises(TypeError, match=r"loss must be given, because the model returns .* dict"):
        rk.diagnose(model, x)


def test_a_models_report_prints_plots_and_becomes_a_dict(tmp_path: Path) -> None:
    model, x = Model(), torch.randn(10, 3)
    report = rk.diagnose(model, x, loss)
    text = str(report)
    for word in ("Model with 2 stages", "[10, 3] float32", "early", "late", "spare is left out"):
        assert word in text
    assert report.recommendation in text
    assert "rk.tune(model, batch, loss, max_gradient_error=0.01)" in report.recommendation
    numbers = json.loads(json.dumps(report.to_dict()))
    assert numbers["gradient"]["error"] == report.gradient.error
    assert numbers["stages"]["late"]["recommended"]["setting"] == str(
        report.stages["late"].recommended.setting
    )
    report.plot(tmp_path / "model.png")
    assert (tmp_path / "model.png").stat().st_size > 20_000


# --------------------------------------------------------------------------------------- monitor


def test_a_monitor_watches_all_stages_of_a_model(tmp_path: Path) -> None:
    model, x = Model(step=None), torch.randn(10, 3)
    with rk.monitor(model, every=2, max_gradient_error=1.0) as watching:
        assert "early: ResidualStage, late: MLPStage" in repr(watching)
        assert "nothing measured yet" in repr(watching)
        for _ in range(3):
            loss(model(x)).backward()
    assert [(seen.call, seen.stage) for seen in watching.history] == [
        (1, "late"), (1, "early"), (3, "late"), (3, "early"),
    ]  # fmt: skip
    last = watching.history[-1].error
    assert (
        f"4 measurements, the last of early at training step 3: gradient error {last:.1e}; "
        "max_gradient_error=1.0e+00, closed"
    ) in repr(watching)
    watching.plot(tmp_path / "errors.png")
    assert (tmp_path / "errors.png").stat().st_size > 5_000


def test_a_monitors_warning_names_the_stage() -> None:
    model, x = Model(), torch.randn(10, 3)
    with (
        rk.monitor(model, max_gradient_error=1e-9),
        pytest.warns(rk.GradientErrorWarning) as caught,
    ):
        loss(model(x)).backward()
    named = ("'late' (MLPStage)", "'early' (ResidualStage)")
    # Beside them there may be the warning that a process gives once of each kind of stage.
    texts = [text for w in caught if (text := str(w.message)).startswith("training step")]
    for text, name in zip(texts, named, strict=True):
        start = f"training step 1: the relative gradient error of the stage {name} is "
        assert text.startswith(start)
        assert "rk.tune(model, batch, loss, max_gradient_error=...)" in text


def test_a_tuned_model_trains_below_its_bound() -> None:
    model, x = Model(), torch.randn(10, 3)
    rk.tune(model, x, loss, max_gradient_error=1e-2)
    with warnings.catch_warnings(), rk.monitor(model, every=1):
        warnings.simplefilter("error")
        loss(model(x)).backward()


# ----------------------------------------------------------------------------- wrong arguments

STAGE, X = rk.MLPStage(4, 4, 2), torch.randn(3, 4)
SEEN = rk.diagnostics.StageInput(X, (), {})


@pytest.mark.parametrize("call", [rk.diagnose, rk.tune])
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((None, X), {}, TypeError, "stage must be a stage .* not None"),
        ((nn.Linear(4, 4), X), {}, ValueError, r"the model \(Linear\) contains no stage"),
        ((STAGE, None), {}, TypeError, "x must be the stage's input.* not None"),
        ((STAGE, ()), {}, TypeError, "x must be the stage's input"),
        ((STAGE, [X]), {}, TypeError, "x must be the stage's input.* of type list"),
        ((STAGE, SEEN), {"args": (1,)}, TypeError, "rk.input_of .* leave out args and kwargs"),
        ((STAGE, SEEN), {"kwargs": {"a": 1}}, TypeError, "leave out args and kwargs"),
        ((nn.Sequential(STAGE), SEEN), {}, TypeError, "a model was given: give that stage"),
        ((nn.Sequential(STAGE), X), {"args": (1,)}, TypeError, "a tuple of positional arguments"),
        ((nn.Sequential(STAGE), [X]), {}, TypeError, r"batch must be .* list; write \(batch,\)"),
        ((nn.Sequential(STAGE), None), {}, TypeError, "batch must be .* not None"),
        ((STAGE, X, 3), {}, TypeError, "loss must be a function .* not 3"),
        ((STAGE, X, lambda y: y), {}, TypeError, r"one number as a tensor.*shape \[3, 4\]"),
        ((STAGE, X, lambda y: 1.0), {}, TypeError, "one number as a tensor, not 1.0"),
        ((STAGE, X, lambda y: torch.tensor(1.0)), {}, ValueError, "loss must depend on the output"),
        ((nn.Sequential(STAGE), X, lambda y: y), {}, TypeError, "one number as a tensor"),
        ((STAGE, X), {"max_gradient_error": 0}, ValueError, "max_gradient_error must be above 0"),
        ((STAGE, X), {"max_gradient_error": "1"}, TypeError, "max_gradient_error must be a number"),
        ((STAGE, X), {"seconds": -1}, ValueError, "seconds must be at least 0, not -1"),
        ((STAGE, X), {"settings": ["paper"]}, TypeError, r"settings\[0\] must be an rk.Setting"),
    ],
)
def test_wrong_arguments_are_refused(
    call: Any, arguments: tuple[Any, ...], options: Any, error: type[Exception], message: str
) -> None:
    before = STAGE.options
    with pytest.raises(error, match=message):
        call(*arguments, **options)
    assert STAGE.options is before


def test_a_model_whose_stages_are_not_called_is_refused() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.stage = nn.Linear(4, 4), rk.MLPStage(4, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.first(x)
            return result

    with pytest.raises(RuntimeError, match=r"no gradient passes .*\(Idle\).* did not call stage"):
        rk.diagnose(Idle(), X)


def test_a_monitor_refuses_at_once() -> None:
    with pytest.raises(ValueError, match=r"the model \(Linear\) contains no stage"):
        rk.monitor(nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"stage must be a stage .* not None"):
        rk.monitor(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_gradient_error must be above 0"):
        rk.monitor(STAGE, max_gradient_error=0.0)
    with pytest.raises(TypeError, match="stage must be a stage inside your model"):
        rk.input_of(None, lambda: None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="run must be a function"):
        rk.input_of(STAGE, X)  # type: ignore[arg-type]
    assert not STAGE._forward_hooks
