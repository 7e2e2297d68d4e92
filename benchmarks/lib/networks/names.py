"""The ways to train a network: their names, as tables and pictures print them."""

from __future__ import annotations

STANDARD = "standard backprop"
CHANNELS_LAST = "standard, channels last"
COMPILED = "standard, torch.compile"
PER_BLOCK = "checkpoint, per block"
CHECKPOINT = "checkpoint, √N segments"
PLAIN = "paper's rule in plain PyTorch"
RULES = ("paper", "refined", "predicted")
"""The reverse rules of resode_kernels."""


def label(name: str) -> str:
    """The name with the package, if it is one of the package's rules."""
    return f"resode_kernels, {name}" if name in RULES else name
