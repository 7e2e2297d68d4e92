"""``ConvStage``: the paper's convolutional blocks."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import backends, functional, transforms
from ..defaults import KINKED, SmoothBatchNormOptions
from ..options import Options, StageOptions, choice, documents_options, positive_int
from ..reference import ACTIVATIONS
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
        sigma, _ = ACTIVATIONS[self.activation]
        for conv, bn in self.layers:
            x = bn(conv(sigma(x)))
        return x

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


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
        positive_int("channels", channels)
        positive_int("depth", depth)
        choice("block", block, tuple(WINDOWS))
        choice("activation", activation, functional.ACTIVATIONS)
        if hidden is None:
            if block == "bottleneck" and channels % 4:
                raise ValueError(
                    "channels of a bottleneck must be a multiple of 4, of which it has a quarter "
                    f"inside, not {channels}; or give the number of channels inside, hidden="
                )
            hidden = channels if block == "basic" else channels // 4
        positive_int("hidden", hidden)
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
        self.channels, self.block = channels, block
        self.hidden, self.activation = hidden, activation

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.warn_of_defaults()
        reason = self._unsupported_by_kernels()
        if reason is not None:
            if self.options.backend not in ("auto", "reference"):
                raise backends.BackendUnavailableError(
                    f"backend={self.options.backend!r} cannot run this stage: {reason} "
                    "(backend='auto' runs the blocks as modules)"
                )
            result: Tensor = super().forward(x)  # type: ignore[assignment]
            return result
        layers = self._layers()
        blocks = [
            [(conv.weight, bn.weight, bn.bias, *_constants(bn)) for conv, bn in block]
            for block in layers
        ]
        depth = self.depth if self.tied else None
        y, statistics = functional.run_conv(
            x, blocks, self.activation, layers[0][0][1].eps, depth, self.options
        )
        self._move_statistics(statistics)
        return y

    @property
    def runs_modules(self) -> bool:
        return self._unsupported_by_kernels() is not None

    def _layers(self) -> list[list[tuple[nn.Conv2d, nn.BatchNorm2d]]]:
        """The layers of every block."""
        return [block.layers for block in self.blocks]  # type: ignore[misc]

    def _unsupported_by_kernels(self) -> str | None:
        """Why the kernels cannot run the blocks, or None. They support unchanged blocks only."""
        eps = None
        for n, block in enumerate(self.blocks):
            if type(block) is not ConvBlock:
                return f"block {n} is a {type(block).__name__}, not a ConvBlock"
            for module in block.modules():
                if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
                    return f"block {n} has hooks"
            for size, (conv, bn) in zip(WINDOWS[self.block], block.layers, strict=True):
                if type(conv) is not nn.Conv2d or type(bn) is not nn.BatchNorm2d:
                    return f"block {n} has a layer other than nn.Conv2d and nn.BatchNorm2d"
                if any(getattr(conv, key) != value for key, value in _convolution(size).items()):
                    return f"a convolution of block {n} was changed (its stride, bias, …)"
                eps = bn.eps if eps is None else eps
                if bn.eps != eps:
                    return "its batch norms differ in eps"
        return None

    @torch.no_grad()
    def _move_statistics(self, statistics: Tensor) -> None:
        """Updates running statistics as ``nn.BatchNorm2d`` does, evaluation by evaluation."""
        layers = self._layers()
        if not any(bn.training for block in layers for _, bn in block):
            return
        if transforms.are_active():
            for _, bn in chain(*layers):
                if bn.training and bn.running_mean is not None:
                    transforms.refuse_captured(statistics, bn.running_mean)
        euler = self.options.scheme == "euler"
        for evaluation, row in enumerate(statistics.unbind()):
            n = evaluation if euler else evaluation // 2 + evaluation % 2
            rest = row
            for _, bn in layers[0 if self.tied else n]:
                mean, variance, rest = rest.tensor_split((bn.num_features, 2 * bn.num_features))
                running = (bn.running_mean, bn.running_var)
                tracked = bn.num_batches_tracked
                if not bn.training or tracked is None:
                    continue
                tracked.add_(1)
                for old, new in zip(running, (mean, variance), strict=True):
                    if old is not None:
                        if bn.momentum is None:  # the mean of all batches
                            share = tracked.to(old.dtype).reciprocal()
                        else:
                            share = old.new_tensor(bn.momentum)
                        old.lerp_(new.to(old.dtype), share)

    def extra_repr(self) -> str:
        return ", ".join(
            [
                f"channels={self.channels}",
                super().extra_repr(),
                f"block={self.block!r}",
                f"hidden={self.hidden}",
            ]
        )


def _convolution(size: int) -> dict[str, Any]:
    """The attributes that the kernels require of a block's convolution."""
    return {
        "kernel_size": (size, size),
        "padding": (size // 2, size // 2),
        "padding_mode": "zeros",
        "stride": (1, 1),
        "dilation": (1, 1),
        "groups": 1,
        "bias": None,
    }


def _constants(bn: nn.BatchNorm2d) -> tuple[Tensor | None, Tensor | None]:
    """Mean and variance to normalize by; None: normalize by the batch."""
    return (None, None) if bn.training else (bn.running_mean, bn.running_var)
