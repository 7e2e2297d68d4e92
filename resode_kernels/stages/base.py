"""The base classes of all stages and of stages with stacked parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import defaults
from ..interpolation import tensor_at
from ..options import Options, StageOptions, flag, given, positive_int
from .known import tensor_of


class Stage(nn.Module):
    """A stack of residual blocks: a depth, tied or untied blocks, and options."""

    def __init__(
        self, depth: int, tied: bool, options: StageOptions, kind: type[Options] = Options
    ) -> None:
        """``kind``: ``Options`` with the defaults of this kind of stage."""
        super().__init__()
        flag("tied", tied)
        self.depth, self.tied = positive_int("depth", depth), tied
        self.options = kind.of(options)
        self.reverse_is_chosen = defaults.chooses_reverse(options)
        self._checked: Options | None = None  # the options of the last training call

    @property
    def num_blocks(self) -> int:
        """The number of blocks that have parameters of their own."""
        return 1 if self.tied else self.options.blocks(self.depth)

    @property
    def runs_modules(self) -> bool:
        """Whether the blocks run as modules instead of in fused kernels."""
        return False

    def residual(self, n: int, x: Any, *args: Any, **kwargs: Any) -> Any:
        """f_n(x): the residual function of block n, in plain PyTorch. A tied stage ignores n."""
        raise NotImplementedError

    def by_block(self, named: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """The tensors sorted by block. They have the names and shapes of (some) parameters."""
        raise NotImplementedError

    def configure(self, **options: Unpack[StageOptions]) -> Stage:
        """Changes options, as in ``stage.configure(backward="stored")``. Returns the stage."""
        new = type(self.options).of({**vars(self.options), **options})
        if not self.tied and new.blocks(self.depth) != self.num_blocks:
            raise ValueError(
                f"scheme={new.scheme!r} takes {new.blocks(self.depth)} blocks at depth "
                f"{self.depth}, but this stage has {self.num_blocks}; make a new stage"
            )
        self.options = new
        self.reverse_is_chosen |= defaults.chooses_reverse(options)
        return self

    def count_blocks(self) -> int:
        """The number of blocks that are there; ``num_blocks`` is the number that there must be."""
        raise NotImplementedError

    def refuse_changes(self) -> None:
        """Every ``forward`` begins with this. Options, depth and blocks may have been changed after
        the stage was made. They must fit each other."""
        if not isinstance(self.options, Options):
            raise TypeError(
                f"stage.options must be Options, not {given(self.options)}: change options with "
                "stage.configure(...)"
            )
        positive_int("stage.depth", self.depth)
        flag("stage.tied", self.tied)
        blocks = self.count_blocks()
        if blocks != self.num_blocks:
            raise ValueError(
                f"this {type(self).__name__} has {blocks} blocks now, but tied={self.tied}, "
                f"depth={self.depth} and scheme={self.options.scheme!r} take {self.num_blocks}: "
                "set stage.depth as well, or make a new stage (rk.deepen makes one of another "
                "depth, rk.untie one that is not tied)"
            )

    def warn_of_defaults(self) -> None:
        """Every ``forward`` begins with this: at the first training call with certain options, see
        ``defaults.warn_once``. Not under ``torch.compile``, where a warning would split the graph.
        """
        if torch.compiler.is_compiling():  # asked first: a guard on what follows would recompile
            return
        if self._checked is self.options or not torch.is_grad_enabled():
            return
        self._checked = self.options
        if not self.reverse_is_chosen:
            defaults.warn_once(type(self).__name__, self.options, self.depth)

    def __prepare_scriptable__(self) -> Stage:
        """``torch.jit.script`` calls this."""
        raise TypeError(
            f"torch.jit.script cannot compile a {type(self).__name__}: use torch.compile, "
            "torch.export or torch.jit.trace"
        )

    def place_blocks(self, places: Sequence[Fraction]) -> None:
        """Replaces the blocks by copies interpolated at these positions (``interpolation.py``)."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        changed = [f"{k}={v!r}" for k, v in vars(self.options).items() if v != getattr(Options, k)]
        tied = ["tied=True"] if self.tied else []
        return ", ".join([f"depth={self.depth}", *tied, *changed])


class Fixed:
    """An attribute of a stage that says how it was made, such as its width. It cannot be set again,
    because the parameters would not follow."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, stage: Any, owner: type | None = None) -> Any:
        return self if stage is None else stage.__dict__[self.name]

    def __set__(self, stage: Any, value: Any) -> None:
        if self.name in stage.__dict__:
            raise AttributeError(
                f"{self.name} of a {type(stage).__name__} cannot be changed after it was made: "
                f"make a new stage with {self.name}={value!r}"
            )
        stage.__dict__[self.name] = value


class StackedStage(Stage):
    """A stage whose parameters are stacked over its blocks."""

    stacked: ClassVar[tuple[str, ...]]
    """The names of the parameters. Any parameter may be None."""

    def count_blocks(self) -> int:
        """Those of the first parameter. ``functional`` compares the others with it, and refuses
        what is not a tensor of three dimensions. A parametrization is left to it as well, since
        computing it twice would move the statistics of ``spectral_norm`` twice."""
        if "parametrizations" in self._modules:
            return self.num_blocks
        first = tensor_of(self, self.stacked[0])
        return first.shape[0] if isinstance(first, Tensor) and first.dim() == 3 else self.num_blocks

    def by_block(self, named: Mapping[str, Tensor]) -> list[list[Tensor]]:
        return [[tensor[n] for tensor in named.values()] for n in range(self.num_blocks)]

    def in_block(self, n: int, tensor: Tensor | None, x: Tensor) -> Any:
        """Block n's part of a parameter, in x's dtype."""
        return None if tensor is None else tensor[0 if self.tied else n].to(x.dtype)

    def place_blocks(self, places: Sequence[Fraction]) -> None:
        for name in self.stacked:
            old = getattr(self, name)
            if old is None:
                continue
            if name not in self._parameters:
                raise ValueError(
                    f"{name} is computed by a parametrization, which cannot be split into blocks; "
                    "remove it first (torch.nn.utils.parametrize.remove_parametrizations)"
                )
            new = torch.stack([tensor_at(old, place) for place in places])
            setattr(self, name, nn.Parameter(new, requires_grad=old.requires_grad))


def init_linear(weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
    """Initializes like ``nn.Linear``: uniform in ±1/√(inputs)."""
    bound = 1 / math.sqrt(weight.shape[-1])
    for parameter in (weight, bias):
        if parameter is not None:
            nn.init.uniform_(parameter, -bound, bound)
