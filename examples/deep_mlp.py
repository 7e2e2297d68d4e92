"""A deep MLP learns which arm of three spirals a point lies on.

    python examples/deep_mlp.py                     reconstructs the activations
    python examples/deep_mlp.py --backward stored   standard backprop, to compare

The stage of 128 residual blocks runs in fused kernels. ``rk.tune`` chooses how its activations are
reconstructed, such that the gradients are at most 1 % off. ``rk.monitor`` measures the error during
training and warns when the weights have changed so much that the stage must be tuned again.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
import torch.nn.functional as F
from memory import activations
from torch import Tensor, nn

import resode_kernels as rk

ARMS, BOUND = 3, 1e-2


def spirals(count: int) -> tuple[Tensor, Tensor]:
    """Points [count, 2] and the arms [count] that they belong to."""
    arm = torch.randint(ARMS, (count,))
    radius = torch.rand(count).sqrt()
    angle = 2 * math.pi * (arm / ARMS + radius) + 0.1 * torch.randn(count)
    return radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1), arm


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600, help="training steps (600)")
    parser.add_argument("--depth", type=int, default=128, help="residual blocks (128)")
    parser.add_argument("--width", type=int, default=64, help="width of a block (64)")
    parser.add_argument("--batch", type=int, default=256, help="points of a batch (256)")
    parser.add_argument(
        "--backward",
        choices=["adjoint", "stored", "checkpoint"],
        default="adjoint",
        help="adjoint: reconstruct activations; the others are exact and store all or some",
    )
    args = parser.parse_args()

    torch.manual_seed(0)
    stage = rk.MLPStage(args.width, args.width, args.depth, activation="tanh")
    model = nn.Sequential(nn.Linear(2, args.width), stage, nn.Linear(args.width, ARMS))

    def tune() -> None:
        points, arms = spirals(args.batch)
        report = rk.tune(
            model,
            points,
            lambda logits: F.cross_entropy(logits, arms),
            max_gradient_error=BOUND,
            seconds=5,
        )
        print(f"rk.tune chose: {report.stages['1'].recommended.setting}", flush=True)

    if args.backward == "adjoint":
        tune()
    else:
        stage.configure(backward=args.backward)

    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    watching = rk.monitor(model, every=50, max_gradient_error=BOUND)
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        points, arms = spirals(args.batch)
        with activations(model) as held:
            logits = model(points)
        loss = F.cross_entropy(logits, arms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        last = watching.last
        if last is not None and last.call == step and last.error > BOUND:
            tune()
        if step % 50 == 0 or step in (1, args.steps):
            right = (logits.argmax(1) == arms).float().mean()
            print(
                f"step {step:4}/{args.steps}  loss {loss:.4f}  right {right:6.1%}  "
                f"{time.perf_counter() - start:5.1f} s  activations {held.mib:.2f} MiB",
                flush=True,
            )

    watching.close()

    points, arms = spirals(4096)
    with torch.no_grad():
        right = (model(points).argmax(1) == arms).float().mean()
    print(f"\n{right:.1%} of new points are classified correctly.")
    worst = max(observation.error for observation in watching.history)
    print(f"Largest relative gradient error that rk.monitor measured: {worst:.1e}")
    stage.configure(backward="stored")
    points, _ = spirals(args.batch)
    with activations(model) as stored:
        model(points)
    print(
        f"Activation memory of a training step: {held.mib:.2f} MiB with --backward "
        f"{args.backward}, {stored.mib:.2f} MiB with standard backprop."
    )


if __name__ == "__main__":
    main()
