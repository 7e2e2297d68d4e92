"""What a network is and on which batch it is trained, as numbers and names."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS = ("independent", "smooth", "tied")
"""How weights depend on depth: a draw for every layer, linear between two draws, or one draw."""


@dataclass
class Config:
    """One network and one batch."""

    stage: str = "mlp"
    """A key of ``NETWORKS``."""
    scheme: str = "euler"
    weights: str = "independent"
    dim: int = 64
    hidden: int = 64
    depth: int = 64
    batch: int = 1024
    size: int = 1
    """Height and width of images."""
    device: str = "cpu"
    activation: str = "tanh"

    @property
    def name(self) -> str:
        """``stage-dim-batch-depth``, then the size of images and ``heun``, if they apply."""
        more = [str(self.size)] * (self.size > 1) + ["heun"] * (self.scheme == "heun")
        return "-".join([self.stage, str(self.dim), str(self.batch), str(self.depth), *more])

    @property
    def tied(self) -> bool:
        return self.weights == "tied"
