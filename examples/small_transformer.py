"""A small transformer learns to write Python, byte by byte, from the standard library's sources.

    python examples/small_transformer.py                     reconstructs the activations
    python examples/small_transformer.py --backward stored   standard backprop, to compare

The layers are PyTorch's own, ``nn.TransformerEncoderLayer``, in a ``ResidualStage``. They run again
in the backward pass; the causal mask is passed to every layer. ``rk.monitor`` measures the error of
the gradients during training. When the layers have learned to change the states so much that it
exceeds 2 %, which is the error that bfloat16 would have, ``rk.tune`` sets a more accurate rule.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from memory import activations
from torch import Tensor, nn

import resode_kernels as rk

LENGTH, WIDTH, BOUND = 64, 64, 2e-2


class Transformer(nn.Module):
    def __init__(self, depth: int, backward: str) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layers = [
            nn.TransformerEncoderLayer(
                WIDTH, 4, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        ]
        branches = [rk.residual_branch(layer) for layer in layers]  # layer(x) − x
        self.stage = rk.ResidualStage(branches, backward=backward)  # x + branch(x) / depth
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, text: Tensor) -> Tensor:
        """The logits of the next byte at every place of [batch, length]."""
        count = text.shape[1]
        x = self.bytes(text) + self.places.weight[:count]
        logits: Tensor = self.head(self.stage(x, src_mask=self.mask[:count, :count]))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="training steps (300)")
    parser.add_argument("--depth", type=int, default=12, help="transformer layers (12)")
    parser.add_argument("--batch", type=int, default=16, help="pieces of text of a batch (16)")
    parser.add_argument(
        "--backward",
        choices=["adjoint", "stored", "checkpoint"],
        default="adjoint",
        help="adjoint: reconstruct activations; the others are exact and store all or some",
    )
    args = parser.parse_args()

    torch.manual_seed(0)
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)
    model = Transformer(args.depth, args.backward)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    monitor = rk.monitor(model, every=50, max_gradient_error=BOUND)
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        first = torch.randint(len(text) - LENGTH, (args.batch, 1))
        piece = text[first + torch.arange(LENGTH + 1)].long()
        with activations(model) as held:
            logits = model(piece[:, :-1])
        target = piece[:, 1:].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        last = monitor.last
        if last is not None and last.call == step and last.error > BOUND:
            report = rk.tune(
                model,
                piece[:, :-1],
                lambda logits: F.cross_entropy(logits.flatten(0, 1), target),  # noqa: B023
                max_gradient_error=BOUND,
                seconds=10,
            )
            print(f"rk.tune chose: {report.stages['stage'].recommended.setting}", flush=True)
        if step % 25 == 0 or step in (1, args.steps):
            print(
                f"step {step:4}/{args.steps}  loss {loss:.3f}  "
                f"{time.perf_counter() - start:5.1f} s  activations {held.mib:.2f} MiB",
                flush=True,
            )
    monitor.close()

    written = torch.tensor([list(b"def ")])
    with torch.no_grad():
        for _ in range(100):
            logits = model(written[:, -LENGTH:])[0, -1]
            written = torch.cat([written, (2 * logits).softmax(0).multinomial(1)[None]], 1)
    print(f"\nThe model writes:\n{bytes(written[0].tolist()).decode(errors='replace')}\n")
    worst = max(observation.error for observation in monitor.history)
    print(f"Largest relative gradient error that rk.monitor measured: {worst:.1e}")
    model.stage.configure(backward="stored")
    with activations(model) as stored:
        model(piece[:, :-1])
    print(
        f"Activation memory of a training step: {held.mib:.2f} MiB with --backward "
        f"{args.backward}, {stored.mib:.2f} MiB with standard backprop."
    )


if __name__ == "__main__":
    main()
