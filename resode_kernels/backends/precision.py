"""The precision of products on GPUs."""

from __future__ import annotations

import torch


def tf32_allowed() -> bool:
    """Whether torch's settings allow TF32 in products of float32 numbers. The old setting
    (``torch.set_float32_matmul_precision``) changes the new one, which is read here."""
    chosen = torch.backends.cuda.matmul.fp32_precision
    if chosen == "none":
        chosen = getattr(torch.backends, "fp32_precision", "ieee")  # unknown to mypy
    return bool(chosen == "tf32")
