"""``ConvStage``: the paper's convolutional blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import backends, checks, functional, transforms
from ..defaults import KINKED, SmoothBatchNormOptions
from ..options import Options, StageOptions, choice, documents_options, flag, positive_int
from ..reference import ACTIVATIONS
from .base import Fixed
from .known import Known, global_hooks, tensor_of
from .residual import ResidualStage

WINDOWS = {"basic": (3, 3), "bottleneck": (1, 3, 1)}


class ConvBlock(nn.Module):
    """f(x) = u_L with u_0 = x and u_l = bn_l(conv_l(σ(u_{l−1}))): the pre-activation block.

    windows  the window sizes of the convolutions conv1, conv2, …
    hidden   the number of channels between the convolutions
    outputs  the number of channels of f(x); None: ``channels``
    stride   the stride of the first 3 × 3 convolution

    In a stage every block keeps the shape of x: ``outputs`` and ``stride`` have their defaults.
    """

    def __init__(
        self,
        channels: int,
        hidden: int,
        windows: tuple[int, ...] = WINDOWS["basic"],
        activation: str = "relu",
        zero_init: bool = False,
        *,
        outputs: int | None = None,
        stride: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        flag("zero_init", zero_init)
        checks.parameter_dtype(dtype)
        self.activation = activation
        widths = [channels, *[hidden] * (len(windows) - 1), outputs or channels]
        self.names = [(f"conv{i}", f"bn{i}") for i in range(1, len(windows) + 1)]
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        strides = [stride if i == windows.index(3) else 1 for i in range(len(windows))]
        for (conv, bn), size, by, (inputs, results) in zip(
            self.names, windows, strides, pairwise(widths), strict=True
        ):
            self.add_module(
                conv, nn.Conv2d(inputs, results, size, by, size // 2, bias=False, **options)
            )
            self.add_module(bn, nn.BatchNorm2d(results, **options))
        if zero_init:
            nn.init.zeros_(self.layers[-1][1].weight)

    @property
    def layers(self) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
        modules = self._modules
        return [(modules[conv], modules[bn]) for conv, bn in self.names]  # type: ignore[misc]

    def forward(self, x: Tensor) -> Tensor:
        choice("activation", self.activation, tuple(ACTIVATIONS))
        sigma, _ = ACTIVATIONS[self.activation]
        for conv, bn in self.layers:
            x = bn(conv(sigma(x)))
        return x

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


BLOCK = Known(ConvBlock, ("forward", "layers"))
CONVOLUTION = Known(
    nn.Conv2d,
    ("forward", "_conv_forward"),
    stride=(1, 1),
    dilation=(1, 1),
    groups=1,
    padding_mode="zeros",
)
NORMALIZATION = Known(nn.BatchNorm2d, ("forward", "_check_input_dim"))


class Layer(NamedTuple):
    """A layer of a block with its tensors."""

    conv: nn.Conv2d
    bn: nn.BatchNorm2d
    weight: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    mean: Tensor | None
    variance: Tensor | None

    @property
    def constants(self) -> tuple[Tensor | None, ...]:
        """The tensors that the kernels take. In training mode they normalize by the batch."""
        running = (None, None) if self.bn.training else (self.mean, self.variance)
        return self.weight, self.gamma, self.beta, *running

    def move_statistics(self, new: Sequence[Tensor]) -> None:
        """Updates the running mean and variance with those of a batch."""
        bn = self.bn
        if not bn.training or not bn.track_running_stats:
            return
        tracked = bn.num_batches_tracked
        if tracked is not None:
            tracked.add_(1)
        for old, value in zip((self.mean, self.variance), new, strict=True):
            if old is None:
                continue
            if bn.momentum is not None:
                share = old.new_tensor(bn.momentum)
            elif tracked is not None:  # the mean of all batches
                share = tracked.to(old.dtype).reciprocal()
            else:
                continue
            old.lerp_(value.to(old.dtype), share)


def known_layers(block: nn.Module) -> list[Layer] | str:
    """The layers of a block that the kernels know, or what was changed in the block."""
    if changed := BLOCK.difference(block):
        return changed
    layers = []
    for conv, bn in block.layers:  # type: ignore[union-attr]
        if changed := CONVOLUTION.difference(conv) or NORMALIZATION.difference(bn):
            return f"has a layer that {changed}"
        weight, bias = tensor_of(conv, "weight"), tensor_of(conv, "bias")
        mean, variance = tensor_of(bn, "running_mean"), tensor_of(bn, "running_var")
        if not isinstance(weight, Tensor) or weight.dim() != 4 or weight.shape[-1] not in (1, 3):
            return "has a convolution whose windows are not of the size 1 or 3"
        half = weight.shape[-1] // 2
        if bias is not None or conv.padding != (half, half):
            return "has a convolution with a bias or another padding"
        if (mean is None) != (variance is None):
            return "has a batch norm with one of two running statistics"
        gamma, beta = tensor_of(bn, "weight"), tensor_of(bn, "bias")
        layers.append(Layer(conv, bn, weight, gamma, beta, mean, variance))
    if len(layers) not in (2, 3):
        return f"has {len(layers)} layers, not 2 or 3"
    return layers


@documents_options
class ConvStage(ResidualStage):
    """``depth`` residual steps with the paper's blocks. A layer is σ, convolution, batch norm.

    block       ``"basic"``: two layers, 3 × 3; ``"bottleneck"``: three, 1 × 1, 3 × 3, 1 × 1
    hidden      channels inside a block; None: ``channels``, for a bottleneck ``channels // 4``
    activation  σ, one of ``rk.functional.ACTIVATIONS``
    zero_init   the last batch norm's weight starts at zero, so that f = 0 at first
    tied        one block for all steps

    ``stage(x)`` takes and returns [images, channels, height, width] in any memory format.
    ``stage.blocks`` are ordinary modules (``ConvBlock``) with ``nn.Conv2d`` and ``nn.BatchNorm2d``
    inside, so that a ``ResidualStage`` of the same blocks has the same ``state_dict``. In training
    mode every evaluation normalizes by its batch, also in the backward pass; running statistics
    move once per evaluation of the forward pass. If a block is changed in a way that the kernels do
    not support (another kind of layer, a hook), the stage runs as a ``ResidualStage`` does.
    """

    channels, block, hidden = Fixed(), Fixed(), Fixed()

    def __init__(
        self,
        channels: int,
        depth: int,
        block: str = "basic",
        *,
        hidden: int | None = None,
        activation: str = "relu",
        zero_init: bool = False,
        tied: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[StageOptions],
    ) -> None:
        channels, depth = positive_int("channels", channels), positive_int("depth", depth)
        flag("tied", tied)
        choice("block", block, tuple(WINDOWS))
        choice("activation", activation, functional.ACTIVATIONS)
        if hidden is None:
            if block == "bottleneck" and channels % 4:
                raise ValueError(
                    "channels of a bottleneck must be a multiple of 4, of which it has a quarter "
                    f"inside, not {channels}; or give the number of channels inside, hidden="
                )
            hidden = channels if block == "basic" else channels // 4
        hidden = positive_int("hidden", hidden)
        count = 1 if tied else Options.of(options).blocks(depth)
        blocks = [
            ConvBlock(
                channels,
                hidden,
                WINDOWS[block],
                activation,
                zero_init,
                device=device,
                dtype=dtype,
            )
            for _ in range(count)
        ]
        super().__init__(blocks, depth=depth if tied else None, **options)
        if activation not in KINKED:
            self.options = SmoothBatchNormOptions.of(options)
        self.channels, self.block, self.hidden = channels, block, hidden

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.refuse_changes()
        self.warn_of_defaults()
        known = self._known()
        if not isinstance(known, str):
            blocks = [[layer.constants for layer in layers] for layers in known]
            if reason := self._unlike(known):
                checks.images(x, blocks)  # each by itself must fit
                known = reason
        if isinstance(known, str):
            if self.options.backend not in ("auto", "reference"):
                raise backends.BackendUnavailableError(
                    f"backend={self.options.backend!r} cannot run this stage: {known} "
                    "(backend='auto' runs the blocks as modules)"
                )
            result: Tensor = super().forward(x)  # type: ignore[assignment]
            return result
        depth = self.depth if self.tied else None
        y, statistics = functional.run_conv(
            x, blocks, self.activation, known[0][0].bn.eps, depth, self.options
        )
        if any(layer.bn.training for layers in known for layer in layers):
            self._move_statistics(known, statistics.detach())
        return y

    @property
    def runs_modules(self) -> bool:
        known = self._known()
        return isinstance(known, str) or self._unlike(known) is not None

    @property
    def activation(self) -> str:
        """That of the blocks. Setting it sets that of every block."""
        return getattr(self.blocks[0], "activation", "unknown")

    @activation.setter
    def activation(self, activation: str) -> None:
        choice("activation", activation, functional.ACTIVATIONS)
        for block in self.blocks:
            block.activation = activation  # type: ignore[assignment]

    def _known(self) -> list[list[Layer]] | str:
        """The layers of all blocks if the kernels know each of them, otherwise what was changed."""
        if global_hooks():
            return "hooks are registered for all modules"
        blocks = []
        for n, block in enumerate(self.blocks):
            layers = known_layers(block)
            if isinstance(layers, str):
                return f"block {n} {layers}"
            blocks.append(layers)
        return blocks

    def _unlike(self, known: list[list[Layer]]) -> str | None:
        """Why the kernels cannot run these blocks together, or None."""
        first = None
        for n, (block, layers) in enumerate(zip(self.blocks, known, strict=True)):
            own = block.activation, [(bn.eps, weight.shape) for _, bn, weight, *_ in layers]
            first = first or own
            if own != first:
                return f"block {n} differs from block 0 in its activation, eps or shapes"
            for _, _, weight, _, _, *running in layers:
                if any(t is not None and t.shape != weight.shape[:1] for t in running):
                    return f"block {n} has running statistics of another size"
        if len({layer.bn.eps for layer in known[0]}) > 1:
            return "its batch norms differ in eps"
        return None

    def _move_statistics(self, blocks: list[list[Layer]], statistics: Tensor) -> None:
        """Updates running statistics as ``nn.BatchNorm2d`` does, evaluation by evaluation."""
        if transforms.are_active():
            for layer in chain(*blocks):
                if layer.bn.training and layer.bn.running_mean is not None:
                    transforms.refuse_captured(statistics, layer.bn.running_mean)
        euler = self.options.scheme == "euler"
        for evaluation, row in enumerate(statistics.unbind()):
            n = evaluation if euler else evaluation // 2 + evaluation % 2
            rest = row
            for layer in blocks[0 if self.tied else n]:
                width = layer.weight.shape[0]
                *new, rest = rest.tensor_split((width, 2 * width))
                layer.move_statistics(new)

    def extra_repr(self) -> str:
        return ", ".join(
            [
                f"channels={self.channels}",
                super().extra_repr(),
                f"block={self.block!r}",
                f"hidden={self.hidden}",
            ]
        )
