"""``ResidualStage``: blocks that are modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Unpack

from .. import checks, functional
from ..defaults import BatchNormOptions
from ..interpolation import module_at
from ..options import Options, StageOptions, documents_options
from ..states import State, in_stream, parts, state_like
from .base import Stage


@documents_options
class ResidualStage(Stage):
    """Residual steps whose f is any module: x + h block(x, *args, **kwargs).

    blocks  modules that compute f (not x + f: see ``rk.residual_branch``) and keep the shape of x:
            a list, ``nn.Sequential`` or ``nn.ModuleList`` with one module per step, one more with
            ``scheme="heun"``. One module with ``depth`` makes the stage tied: it serves every step.
            So does a list that repeats one module

    ``stage(x, *args, **kwargs)`` passes the arguments on to every block; tensors among them receive
    gradients. x is a tensor or a tuple of tensors; for a tuple f returns a tuple.
    ``step=1.0`` makes the classical x + f(x).

    In the backward pass the blocks run again, with the parameters, buffers, random numbers (of
    torch's global generators), train/eval mode and autocast of the forward pass. This second run is
    visible only to forward hooks of the blocks and in attributes that their ``forward`` sets. Under
    ``torch.compile`` a stage is a graph break; its blocks may be compiled.
    """

    def __init__(
        self, blocks: checks.Blocks, *, depth: int | None = None, **options: Unpack[StageOptions]
    ) -> None:
        checked = Options.of(options)
        modules = checks.block_list(blocks, depth, checked)
        steps = checks.steps(depth, len(modules), checked)
        tied = all(module is modules[0] for module in modules) and (
            len(modules) > 1 or depth is not None
        )
        normalized = any(isinstance(m, _BatchNorm) for block in modules for m in block.modules())
        super().__init__(steps, tied, options, BatchNormOptions if normalized else Options)
        self.blocks = nn.ModuleList(modules[:1] if tied else modules)

    def forward(self, x: State, *args: Any, **kwargs: Any) -> State:
        self.refuse_changes()
        self.warn_of_defaults()
        return functional.run_residual(list(self.blocks), x, args, kwargs, self.depth, self.options)

    @property
    def runs_modules(self) -> bool:
        return True

    def count_blocks(self) -> int:
        return len(self.blocks)

    def residual(self, n: int, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.blocks[0 if self.tied else n](x, *args, **kwargs)

    def by_block(self, named: Mapping[str, Tensor]) -> list[list[Tensor]]:
        blocks: list[list[Tensor]] = [[] for _ in self.blocks]
        for name, tensor in named.items():
            blocks[int(name.split(".")[1])].append(tensor)
        return blocks

    def place_blocks(self, places: Sequence[Fraction]) -> None:
        blocks = [module_at(self.blocks, place) for place in places]
        del self.blocks[:]
        self.blocks.extend(blocks)


def residual_branch(block: nn.Module) -> ResidualBranch:
    """The residual function f(x, …) = block(x, …) − x of a block that keeps the shape of x. With
    ``step=1.0`` a stage of such branches computes what the stack of blocks does, up to rounding
    errors of float32, also where the blocks compute in float16 or bfloat16.

    All blocks of a stage get the same arguments. Where a model gives its layers different ones
    (masks or rotary embeddings by kind of layer) or leaves some layers out at random, make a stage
    for each run of layers that are called alike."""
    return ResidualBranch(block)


class ResidualBranch(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        y = self.block(x, *args, **kwargs)
        # Subtracted in float32 at least: the stage adds in it, and so finds y again.
        f = [in_stream(new) - in_stream(old) for new, old in zip(parts(y), parts(x), strict=True)]
        return state_like(x, f)
