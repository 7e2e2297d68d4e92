"""A CIFAR-style ResNet learns handwritten digits (scikit-learn's, 8 × 8 pixels).

    python examples/digits_resnet.py                     reconstructs the activations
    python examples/digits_resnet.py --backward stored   standard backprop, to compare

Two stages of 32 residual blocks with batch norm run in fused kernels. ``rk.monitor`` measures the
error of their gradients during training.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.nn.functional as F
from memory import activations
from torch import Tensor, nn

import resode_kernels as rk


def digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] and labels [1797], in random order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("The digits come with scikit-learn: pip install scikit-learn")
    data = load_digits()
    order = torch.randperm(len(data.target))
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return images[order], torch.tensor(data.target)[order]


def convolution(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="training steps (200)")
    parser.add_argument("--depth", type=int, default=32, help="residual blocks of a stage (32)")
    parser.add_argument("--batch", type=int, default=64, help="images of a batch (64)")
    parser.add_argument(
        "--backward",
        choices=["adjoint", "stored", "checkpoint"],
        default="adjoint",
        help="adjoint: reconstruct activations; the others are exact and store all or some",
    )
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels = digits()
    train, test = slice(0, 1500), slice(1500, None)
    stages = [
        rk.ConvStage(channels, args.depth, zero_init=True, backward=args.backward)
        for channels in (16, 32)
    ]
    model = nn.Sequential(
        convolution(1, 16, stride=1),
        stages[0],  # 8 × 8 pixels
        convolution(16, 32, stride=2),
        stages[1],  # 4 × 4 pixels
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    monitor = rk.monitor(model, every=50)
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        batch = torch.randint(1500, (args.batch,))
        with activations(model) as held:
            logits = model(images[train][batch])
        loss = F.cross_entropy(logits, labels[train][batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 25 == 0 or step in (1, args.steps):
            right = (logits.argmax(1) == labels[train][batch]).float().mean()
            print(
                f"step {step:4}/{args.steps}  loss {loss:.4f}  right {right:6.1%}  "
                f"{time.perf_counter() - start:5.1f} s  activations {held.mib:.2f} MiB",
                flush=True,
            )

    model.eval()
    with torch.no_grad():
        right = (model(images[test]).argmax(1) == labels[test]).float().mean()
    print(f"\n{right:.1%} of the {len(labels[test])} test images are classified correctly.")
    worst = max(seen.error for seen in monitor.history)
    print(f"Largest relative gradient error that rk.monitor measured: {worst:.1e}")
    model.train()
    monitor.close()
    for stage in stages:
        stage.configure(backward="stored")
    with activations(model) as stored:
        model(images[train][batch])
    print(
        f"Activation memory of a training step: {held.mib:.2f} MiB with --backward "
        f"{args.backward}, {stored.mib:.2f} MiB with standard backprop."
    )


if __name__ == "__main__":
    main()
