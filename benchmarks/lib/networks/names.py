"""The ways to train a network: their names, as tables and pictures print them."""

from __future__ import annotations

STANDARD = "standard backprop"
CHANNELS_LAST = "standard, channels last"
COMPILED = "standard, torch.compile"
PER_BLOCK = "checkpoint, per block"
CHECKPOINT = "checkpoint, √N segments"
BFLOAT16_STATES = "states in bfloat16"
PLAIN = "paper's rule in plain PyTorch"
RULES = ("paper", "refined", "predicted", "recorded")
"""The reverse rules of resode_kernels."""


def label(name: str) -> str:
    """The name with the package, if it is one of the package's rules."""
    bits = " 8 bits" if name == "recorded" else ""  # the default
    return f"resode_kernels, {name}{bits}" if name in RULES else name
