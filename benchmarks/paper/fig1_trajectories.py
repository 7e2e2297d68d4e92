"""Figure 1: trajectories of ResNets with 300 layers.

The paper: learning x → x²/2 the trajectories are smooth and do not intersect; learning x → −x²/2
they are not smooth and intersect. So a ResNet can break the topology of its input space, which is
impossible for a Neural ODE.

Measured: one-dimensional states, inputs in [0, 1], where x²/2 keeps the order of the inputs and
−x²/2 reverses it. The paper's ResNet, with step 1/N and weights that start equal in all layers,
learns the first map. It stays close to an ODE, and so it cannot learn the second: it maps all
inputs to about one value. The classical ResNet, with step 1 and independent random weights, learns
it. Counted are the layers in which neighbours at the input change their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from experiment import Options, Result, Verdict, main, panels, plt, progress
from states import trajectory
from torch import Tensor
from torch.nn.functional import mse_loss

import resode_kernels as rk

DEPTH = 300
SHOWN = 21
LEARNED = 0.03
"""Root of the mean squared error; the best constant makes 0.16."""


@dataclass(frozen=True)
class Network:
    target: str
    sign: int
    like_an_ode: bool
    """Step 1/N, and the same weights in all layers at the start: those of the identity."""

    def stage(self) -> rk.MLPStage:
        hidden, step = (8, None) if self.like_an_ode else (1, 1.0)
        # Exact gradients: the claim is about what is learned, not about how.
        options = {"step": step, "backward": "stored", "dtype": torch.float64}
        stage = rk.MLPStage(1, hidden, DEPTH, **options)
        spreads = {"w1": 2.0, "b1": 2.0, "w2": 0.0 if self.like_an_ode else 0.2, "b2": 0.0}
        for name, spread in spreads.items():
            p = torch.nn.init.normal_(getattr(stage, name), std=spread)
            if self.like_an_ode:
                p.data.copy_(p.data[:1].expand_as(p).clone())
        return stage

    def map(self, x: Tensor) -> Tensor:
        return self.sign * x**2 / 2


SMOOTH = Network("x²/2", +1, like_an_ode=True)
STUCK = Network("−x²/2", -1, like_an_ode=True)
CROSSING = Network("−x²/2", -1, like_an_ode=False)


@dataclass(frozen=True)
class Learned:
    network: Network
    error: float
    states: Tensor
    """[N + 1, inputs], the inputs in rising order."""

    @property
    def crossings(self) -> int:
        above = self.states.diff(dim=1) > 0
        return int((above[1:] != above[:-1]).sum())

    @property
    def kink(self) -> float:
        """The largest change from one update of a state to the next."""
        return float(self.states.diff(n=2, dim=0).abs().max())


def inputs(count: int) -> Tensor:
    return torch.linspace(0, 1, count, dtype=torch.float64).unsqueeze(1)


def train(network: Network, iterations: int, seed: int = 0) -> Learned:
    torch.manual_seed(seed)
    stage, x = network.stage(), inputs(64)
    rate = 0.1 if network.like_an_ode else 1e-3
    optimizer = torch.optim.Adam(stage.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    for _ in range(iterations):
        optimizer.zero_grad()
        mse_loss(stage(x), network.map(x)).backward()
        torch.nn.utils.clip_grad_norm_(stage.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    shown = inputs(SHOWN)
    states = trajectory(stage, shown)
    error = mse_loss(states[-1], network.map(shown)).sqrt()
    return Learned(network, float(error), states.squeeze(-1))


def run(options: Options) -> Result:
    iterations = 250 if options.quick else 1000
    seeds = options.seeds or (2 if options.quick else 5)
    todo = [(SMOOTH, 0), (STUCK, 0), *((CROSSING, seed) for seed in range(seeds))]
    trained: list[Learned] = []
    for network, seed in progress(todo, "training", len(todo)):
        trained.append(train(network, iterations, seed))
        if network is not CROSSING:
            options.rows.extend(rows(trained[-1]))
    smooth, stuck, *draws = trained
    crossing = min(draws, key=lambda draw: draw.error)
    options.rows.extend(rows(crossing))
    results = (smooth, stuck, crossing)

    title = f"Figure 1: trajectories of ResNets with {DEPTH} layers, coloured by their input"
    figure, axes = panels(3, title, width=4.6)
    colours = plt.get_cmap("viridis")(torch.linspace(0, 0.95, SHOWN).numpy())
    for one, result in zip(axes, results, strict=True):
        for states, colour in zip(result.states.T, colours, strict=True):
            one.plot(states, color=colour, lw=0.9)
        step = "1/N" if result.network.like_an_ode else "1"
        one.set_title(
            f"x → {result.network.target}, step {step}: error {result.error:.2g}, "
            f"{result.crossings} crossings",
            fontsize=10,
        )
        one.set_xlabel("layer n")
    axes[0].set_ylabel("state xₙ")

    constant = float(smooth.states[0].square().div(2).std(correction=0))
    learned = sum(draw.error < LEARNED for draw in draws)
    verdicts = [
        Verdict(
            "x²/2 is learned, the trajectories are smooth and do not intersect",
            smooth.error < LEARNED and smooth.crossings == 0 and smooth.kink < 0.1 / DEPTH,
            f"error {smooth.error:.1e}, {smooth.crossings} crossings, updates of a state differ "
            f"from layer to layer by at most {smooth.kink:.0e}",
        ),
        Verdict(
            "−x²/2 is learned, the trajectories are not smooth and intersect",
            crossing.error < LEARNED and crossing.crossings > 0 and crossing.kink > 0.1,
            f"error {crossing.error:.1e}, {crossing.crossings} crossings of {SHOWN - 1} pairs of "
            f"neighbours, updates differ by up to {crossing.kink:.2f}",
        ),
        Verdict(
            "what an ODE cannot do, a ResNet close to an ODE cannot: −x²/2 is not learned",
            stuck.error > 0.9 * constant and stuck.crossings == 0,
            f"error {stuck.error:.3f}, the best constant's is {constant:.3f}",
        ),
    ]
    notes = [
        f"Adam, {iterations} full batches of 64 inputs, exact gradients, float64; residual "
        "functions have 8 hidden units with step 1/N, and 1 with step 1, where with more of them "
        f"training fails more often. {learned} of {seeds} draws of the network on the "
        f"right learned −x²/2 to {LEARNED}, the best is shown."
    ]
    return Result(title, options.rows, figure, verdicts, notes)


def rows(result: Learned) -> list[dict[str, Any]]:
    return [
        {
            "map": result.network.target,
            "step": 1 / DEPTH if result.network.like_an_ode else 1.0,
            "layer": n,
            **{f"x{i}": round(x, 4) for i, x in enumerate(states)},
        }
        for n, states in enumerate(result.states.tolist())
    ]


if __name__ == "__main__":
    main(run, __doc__)
