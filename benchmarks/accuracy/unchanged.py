"""The gradient errors of networks as they are: each computes x + f(x) (``step=1.0``), at
initialisation, trained for some hundred steps, or pretrained."""

from __future__ import annotations

import copy
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

import torch
from jobs import side_by_side
from networks import minilm
from networks.gpt import ByteGPT
from networks.kept_states import Bfloat16, Quantised, kept_states
from networks.resnet import DeepMLP, PostActivation, PreActivation
from networks.vit import DigitsViT
from networks.whole import WholeNetwork
from torch import Generator, Tensor, nn

import resode_kernels as rk

NETWORKS: dict[str, Callable[[], WholeNetwork]] = {
    "GPT, 24 layers": lambda: ByteGPT(24, 64),
    "GPT, 12 layers": lambda: ByteGPT(12, 64),
    "ViT, 12 layers": lambda: DigitsViT(12, 64),
    "ResNet, pre-activation, 23 blocks": lambda: PreActivation(23, 64, 16),
    "ResNet, post-activation, 23 blocks": lambda: PostActivation(23, 64, 16),
    "MLP, 32 blocks": lambda: DeepMLP(32, 32),
}
PRETRAINED = "MiniLM, 6 layers"
BATCH = 16
"""Images, texts or pairs of sentences in the batch on which gradients are compared."""
RATE = 1e-3


# ------------------------------------------------------------------------------------------- cases


@dataclass
class Case:
    """A stage, a batch of states in front of it, and a loss of the states behind it."""

    stage: rk.ResidualStage
    x: Tensor
    loss: nn.Module
    relu: bool = False

    def to(self, dtype: torch.dtype) -> Case:
        """A copy."""
        stage, loss = (copy.deepcopy(module).to(dtype) for module in (self.stage, self.loss))
        return Case(stage, self.x.to(dtype), loss, self.relu)


class Projection(nn.Module):
    """A linear loss."""

    def __init__(self, cotangent: Tensor) -> None:
        super().__init__()
        self.register_buffer("cotangent", cotangent)

    def forward(self, y: Tensor) -> Tensor:
        return (y * self.cotangent).sum()


class Objective(nn.Module):
    """The loss of a network, from the state behind its stage."""

    def __init__(self, network: WholeNetwork, targets: Tensor) -> None:
        super().__init__()
        self.head, self.loss, self.targets = network.head, network.loss, targets

    def forward(self, y: Tensor) -> Tensor:
        return self.loss(self.head(y), self.targets)


class Contrastive(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return minilm.contrastive_loss(y)


def initial(name: str, seed: int) -> Case:
    """Random weights, states and cotangents."""
    torch.manual_seed(seed)
    network = NETWORKS[name]()
    generator = Generator().manual_seed(seed)
    x = network.state(BATCH, generator)
    cotangent = torch.randn(x.shape, generator=generator)
    return Case(network.stage, x, Projection(cotangent), network.relu)


def trained(name: str, seed: int, steps: int) -> Case:
    """A batch of the data, after ``steps`` steps of training with exact gradients."""
    torch.manual_seed(seed)
    network = NETWORKS[name]()
    generator = Generator().manual_seed(seed)
    network.stage.configure(backward="stored")
    optimizer = torch.optim.AdamW(network.parameters(), RATE)
    for _ in range(steps):
        inputs, targets = network.batch(network.training_batch, generator)
        optimizer.zero_grad()
        network.loss(network(inputs), targets).backward()
        optimizer.step()
    inputs, targets = network.batch(BATCH, generator)
    with torch.no_grad():
        x = network.stem(inputs)
    return Case(network.stage, x, Objective(network, targets), network.relu)


def pretrained(seed: int, pairs: int = BATCH) -> Case:
    network = minilm.MiniLM()
    with torch.no_grad():
        x = network.stem(minilm.sentence_pairs(pairs, seed))
    return Case(network.stage, x, Contrastive())


# ---------------------------------------------------------------------------------------- settings


@dataclass(frozen=True)
class Setting:
    """A way to compute gradients."""

    name: str
    bits: int | None = None
    """What is kept of an element of a state at every step, in bits; None: nothing."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Of the stage, unless states are kept or the network runs under autocast."""
    keep: type[Bfloat16] | type[Quantised] | None = None
    autocast: bool = False

    def __str__(self) -> str:
        return self.name if self.bits is None else f"{self.name}, {self.bits} bits"


RECORDED = (2, 3, 4, 5, 6, 8, 12)
AUTOCAST = Setting("bfloat16 autocast", autocast=True)
SETTINGS = (
    Setting("paper", options={"reverse": "paper"}),
    *(Setting(f"refined {k}", options={"reverse": "refined", "order": k}) for k in (1, 2, 3)),
    Setting("predicted 2", options={"reverse": "predicted", "order": 2}),
    *(Setting("recorded", b, {"reverse": "recorded", "bits": b}) for b in RECORDED),
    Setting("states rounded", 8, keep=Quantised),
    Setting("states rounded", 16, keep=Bfloat16),
    AUTOCAST,
)


def settings(relu: bool) -> Iterator[tuple[Setting, bool]]:
    """Each, and whether kinks are remembered."""
    for setting in SETTINGS:
        yield setting, False
    if relu:
        for setting in SETTINGS:
            if setting.options:
                yield setting, True


def gradients(case: Case, setting: Setting | None = None, kinks: bool = False) -> Tensor:
    """Of all parameters of the stage, as one vector; ``setting=None``: exact."""
    stage, before = case.stage, case.stage.options
    try:
        if setting is not None and setting.keep is not None:
            keep = Bfloat16() if setting.keep is Bfloat16 else Quantised(setting.bits or 8)
            y = kept_states(lambda f, x: f(x), list(stage.blocks), 1.0, case.x, keep)
            loss = case.loss(y)
        else:
            stage.configure(**options(setting, kinks))
            autocast = setting is not None and setting.autocast
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = case.loss(stage(case.x))
        grads = torch.autograd.grad(loss, list(stage.parameters()))
    finally:
        stage.options = before
    return torch.cat([g.flatten() for g in grads]).double()


def options(setting: Setting | None, kinks: bool) -> dict[str, Any]:
    """Of the stage."""
    if setting is None or setting.autocast:
        return {"backward": "stored"}
    return {"backward": "adjoint", "nonfinite": "ignore", "kinks": kinks, **setting.options}


def errors(
    case: Case, chosen: Sequence[tuple[Setting, bool]] | None = None
) -> dict[tuple[Setting, bool], float]:
    """The relative errors of the gradients of all parameters, by setting and kinks, of all that
    apply or of those that are chosen. Computed in float64; under autocast in float32."""
    double, single = case.to(torch.float64), case.to(torch.float32)
    exact = gradients(double)
    found = {}
    for setting, kinks in chosen or settings(case.relu):
        mine = gradients(single if setting.autocast else double, setting, kinks)
        error = float((mine - exact).norm() / exact.norm())
        found[setting, kinks] = error if math.isfinite(error) else math.inf
    return found


# --------------------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Job:
    network: str
    weights: str
    """``"initial"``, ``"trained"`` or ``"pretrained"``."""
    seed: int
    steps: int


@dataclass
class Row:
    """A line of the CSV: median, least and largest error over the seeds."""

    network: str
    weights: str
    kinks: bool
    """Whether they are remembered."""
    setting: str
    bits: int | None
    error: float
    low: float
    high: float
    seeds: int


def jobs_of(names: Sequence[str], seeds: int, steps: int) -> list[Job]:
    """Seed by seed, so that a run that is stopped has all networks first."""
    return [
        Job(name, weights, seed, steps)
        for seed in range(seeds)
        for name in names
        for weights in (("pretrained",) if name == PRETRAINED else ("trained", "initial"))
    ]


def measure(job: Job) -> dict[tuple[Setting, bool], float]:
    if job.weights == "pretrained":
        return errors(pretrained(job.seed))
    if job.weights == "trained":
        return errors(trained(job.network, job.seed, job.steps))
    return errors(initial(job.network, job.seed))


Found = dict[tuple[str, str], list[dict[tuple[Setting, bool], float]]]
"""Errors by network and weights, one for each seed."""


def run(jobs: Sequence[Job], found: Found) -> None:
    """Adds what every job measures as soon as it is done."""
    for job, one in side_by_side(measure, jobs, unit="network"):
        found.setdefault((job.network, job.weights), []).append(one)


def rows(found: Found) -> list[Row]:
    result = []
    for (network, weights), seeds in found.items():
        for setting, kinks in seeds[0]:
            values = [one[setting, kinks] for one in seeds]
            result.append(
                Row(
                    network,
                    weights,
                    kinks,
                    setting.name,
                    setting.bits,
                    statistics.median(values),
                    min(values),
                    max(values),
                    len(values),
                )
            )
    return result


COLUMNS = (
    *(("paper", None), ("refined 3", None), ("predicted 2", None)),
    *(("recorded", bits) for bits in (2, 4, 6, 8)),
    *(("states rounded", 8), ("states rounded", 16), ("bfloat16 autocast", None)),
)
"""Of the printed table: setting and bits. The CSV has all."""


def table(rows: Sequence[Row]) -> str:
    """A line for each network."""
    heads = [name if bits is None else f"{name} {bits}" for name, bits in COLUMNS]
    names = [
        f"{network}, {weights}{', kinks' if kinks else ''}"
        for network, weights, kinks in dict.fromkeys((r.network, r.weights, r.kinks) for r in rows)
    ]
    width = max(map(len, names))
    lines = [" ".join([" " * width, *(f"{head:>17}" for head in heads)])]
    for name, key in zip(
        names, dict.fromkeys((r.network, r.weights, r.kinks) for r in rows), strict=True
    ):
        mine = {
            (r.setting, r.bits): r.error for r in rows if (r.network, r.weights, r.kinks) == key
        }
        cells = [f"{mine[column]:.1e}" if column in mine else "" for column in COLUMNS]
        lines.append(" ".join([f"{name:<{width}}", *(f"{cell:>17}" for cell in cells)]))
    return "\n".join(lines)
