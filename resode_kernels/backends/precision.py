"""The precision of products on GPUs."""

from __future__ import annotations

import torch


def tf32_allowed() -> bool:
    """Whether products of float32 numbers may be made in TF32: by torch's new setting, or by the
    old one (``torch.set_float32_matmul_precision``), which sets the new one."""
    chosen = torch.backends.cuda.matmul.fp32_precision
    if chosen == "none":
        chosen = getattr(torch.backends, "fp32_precision", "ieee")  # mypy does not see it
    return bool(chosen == "tf32")
