"""The gradient errors of networks as they are, and of what they are compared with."""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradient_error
import jobs
import output
import pytest
import samples
import torch
import unchanged
from networks import minilm
from networks.gpt import ByteGPT
from networks.kept_states import Bfloat16, Keep, Quantised, kept_states
from networks.resnet import DeepMLP
from torch import Generator, Tensor
from unchanged import AUTOCAST, SETTINGS, Setting

Chosen = Sequence[tuple[Setting, bool]]


def setting(name: str, bits: int | None = None) -> Setting:
    return next(s for s in SETTINGS if (s.name, s.bits) == (name, bits))


def errors_of(case: unchanged.Case, *chosen: Setting) -> list[float]:
    return list(unchanged.errors(case, [(one, False) for one in chosen]).values())


# ------------------------------------------------------------------------------------ the errors


@pytest.fixture(scope="module")
def transformer() -> unchanged.Case:
    return unchanged.initial("GPT, 24 layers", seed=0)


def test_recorded_increments_are_precise_in_a_transformer_of_24_layers(
    transformer: unchanged.Case,
) -> None:
    """As the tables say of which these are made again."""
    eight, four = errors_of(transformer, setting("recorded", 8), setting("recorded", 4))
    assert eight <= 2e-3
    assert eight == pytest.approx(1.1e-3, rel=0.2)
    assert four == pytest.approx(2.0e-2, rel=0.2)


def test_baselines_have_the_errors_that_are_known_of_them(transformer: unchanged.Case) -> None:
    half, eighth, autocast = errors_of(
        transformer, setting("states rounded", 16), setting("states rounded", 8), AUTOCAST
    )
    assert half == pytest.approx(1.5e-3, rel=0.2)
    assert autocast == pytest.approx(6.0e-3, rel=0.2)
    assert eighth > 3 * half


def test_rules_that_keep_nothing_fail_on_trained_networks() -> None:
    case = unchanged.trained("ViT, 12 layers", seed=0, steps=20)
    paper, refined, recorded = errors_of(
        case, setting("paper"), setting("refined 1"),
        setting("recorded", 8),
    )  # fmt: skip
    assert min(paper, refined) > 0.1
    assert recorded < 2e-3


@pytest.mark.parametrize("name", ["ResNet, pre-activation, 23 blocks", "MLP, 32 blocks"])
def test_more_bits_are_more_precise(name: str) -> None:
    case = unchanged.initial(name, seed=0)
    found = errors_of(case, *(setting("recorded", bits) for bits in (2, 4, 8, 12)))
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] / 10


@pytest.mark.parametrize("activation", ["pre", "post"])
def test_remembered_kinks_make_residual_networks_precise(activation: str) -> None:
    case = unchanged.initial(f"ResNet, {activation}-activation, 23 blocks", seed=0)
    eight = setting("recorded", 8)
    forgotten, remembered = unchanged.errors(case, [(eight, False), (eight, True)]).values()
    assert remembered <= 5e-3
    assert forgotten > 0.1


def test_all_settings_apply_to_every_network() -> None:
    assert [one for one, _ in unchanged.settings(relu=False)] == list(SETTINGS)
    assert not any(kinks for _, kinks in unchanged.settings(relu=False))
    remembered = [one for one, kinks in unchanged.settings(relu=True) if kinks]
    assert remembered == [one for one in SETTINGS if one.options]
    for kinks in (False, True):
        assert unchanged.options(setting("recorded", 8), kinks)["kinks"] == kinks


def test_measuring_leaves_the_stage_as_it_was() -> None:
    case = unchanged.initial("MLP, 32 blocks", seed=0)
    before = case.stage.options
    unchanged.gradients(case, setting("recorded", 4))
    assert case.stage.options == before


# ----------------------------------------------------------------------------- states that are kept


class Identity:
    def pack(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def unpack(self, kept: tuple[Tensor, ...], like: Tensor) -> Tensor:
        return kept[0].clone()


def trained_with(keep: Any) -> list[Tensor]:
    torch.manual_seed(0)
    case = unchanged.initial("MLP, 32 blocks", seed=0).to(torch.float64)
    blocks = list(case.stage.blocks)[:4]
    x = case.x.requires_grad_()
    if keep is None:
        y = x
        for block in blocks:
            y = y + 0.5 * block(y)
    else:
        y = kept_states(lambda f, x: f(x), blocks, 0.5, x, keep)
    parameters = [p for block in blocks for p in block.parameters()]
    return list(torch.autograd.grad(y.square().sum(), [x, *parameters]))


def test_kept_states_have_the_gradients_of_backprop() -> None:
    for mine, exact in zip(trained_with(Identity()), trained_with(None), strict=True):
        torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize(("keep", "bits"), [(Bfloat16(), 16), (Quantised(8), 8.5)])
def test_kept_states_take_their_bits(keep: Keep, bits: float) -> None:
    """Those of the scales too: one of 16 bits for a group of 32."""
    saved: list[Tensor] = []
    x = torch.randn(4, 64, requires_grad=True)
    blocks = [torch.nn.Tanh()] * 3
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        kept_states(lambda f, x: f(x), blocks, 1.0, x, keep)
    assert 8 * sum(t.nbytes for t in saved) == 3 * bits * x.numel()


def test_images_are_rounded_alike_in_every_memory_format() -> None:
    x = torch.randn(2, 32, 4, 4)
    keep = Quantised(8)
    last = x.to(memory_format=torch.channels_last)
    plain, other = (keep.unpack(keep.pack(t), like=u) for t, u in ((x, last), (last, x)))
    assert torch.equal(plain, other)
    assert (plain - x).abs().max() < x.abs().max() / 127


# ----------------------------------------------------------------------------- networks and samples


def test_training_teaches_the_networks_something() -> None:
    before, after = (unchanged.trained("MLP, 32 blocks", 0, steps) for steps in (0, 40))
    losses = [float(case.loss(case.stage(case.x)).detach()) for case in (before, after)]
    assert losses[1] < 0.7 * losses[0]


def test_a_byte_sees_only_those_before_it() -> None:
    network = ByteGPT(2, 16, context=8, heads=2)
    text = torch.randint(256, (1, 8))
    other = text.clone()
    other[0, 5] = (other[0, 5] + 1) % 256
    first, second = network(text), network(other)
    torch.testing.assert_close(first[:, :5], second[:, :5])
    assert not torch.allclose(first[:, 5:], second[:, 5:])


def test_the_text_is_split_by_file() -> None:
    train, held_out = samples.standard_library()
    assert 3 < len(train) / len(held_out) < 30
    assert held_out[:500].numpy().tobytes() not in train.numpy().tobytes()
    x, y = samples.windows(held_out, 3, 16, Generator().manual_seed(0))
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert x.dtype == torch.int64


# ------------------------------------------------------------------------------------- the script


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Small networks in this process, and folders of results."""
    monkeypatch.setattr(output, "RESULTS", tmp_path / "published")
    monkeypatch.setattr(output, "QUICK", tmp_path / "quick")
    monkeypatch.setattr(jobs, "WORKERS", 1)
    networks = {"GPT": lambda: ByteGPT(1, 16, 8, 2), "MLP": lambda: DeepMLP(2, 8)}
    monkeypatch.setattr(unchanged, "NETWORKS", networks)
    monkeypatch.setattr(unchanged, "BATCH", 2)
    monkeypatch.setattr(minilm, "missing", lambda: "it is a test")
    return tmp_path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_script_writes_all_settings_of_all_networks(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gradient_error.main(["--only", "unchanged", "--seeds", "2", "--steps", "1"])
    rows = rows_of(small / "quick/gradient_error_unchanged.csv")
    assert len(rows) == 2 * 2 * len(SETTINGS)
    assert {row["seeds"] for row in rows} == {"2"}
    assert all(float(r["low"]) <= float(r["error"]) <= float(r["high"]) for r in rows)
    assert (small / "quick/gradient_error_unchanged.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "GPT, trained" in printed
    assert "MiniLM, 6 layers is left out: it is a test" in printed
    assert "× the error of bfloat16 autocast" in printed
    assert not (small / "quick/gradient_error.csv").exists()


def test_the_networks_that_are_complete_are_kept(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = unchanged.measure

    def then_stop(job: unchanged.Job) -> Any:
        if job.network == "MLP":
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(job)

    monkeypatch.setattr(unchanged, "measure", then_stop)
    with pytest.raises(SystemExit) as stopped:
        gradient_error.main(["--only", "unchanged", "--seeds", "1", "--steps", "0"])
    assert stopped.value.code == 130
    rows = rows_of(small / "quick/gradient_error_unchanged.csv")
    assert {row["network"] for row in rows} == {"GPT"}


def test_the_verdict_names_networks_where_autocast_is_more_precise() -> None:
    def row(network: str, name: str, bits: int | None, error: float) -> unchanged.Row:
        return unchanged.Row(network, "trained", False, name, bits, error, error, error, 1)

    text = gradient_error.yardstick(
        [
            *(row("a", AUTOCAST.name, None, 1e-2), row("a", "recorded", 8, 1e-3)),
            *(row("b", AUTOCAST.name, None, 1e-2), row("b", "recorded", 8, 2e-2)),
        ]
    )
    assert "2.00 × at worst" in text
    assert text.endswith("larger for b, trained")
