"""The paper's training strategy: train with tied weights, transfer deeper, untie, refine.

    stage = rk.MLPStage(64, 64, depth=4, tied=True)       # … train; short and with few parameters
    stage = rk.deepen(stage, 64)                          # hardly another function, 16 × the steps
    stage = rk.untie(stage)                               # the same function, 64 × the parameters
    optimizer = torch.optim.SGD(stage.parameters(), 1e-3) # … refine, in constant memory

Both return a new stage and leave the given one as it is. The two share no memory, and the new
parameters have no gradients yet: **make the optimizer anew**, the old one knows the old parameters.
The new stage is of the same class, on the same device, with the same dtypes, options,
train/eval modes, module hooks (those of single tensors are not copied) and frozen parameters.

Its ``state_dict`` has the keys and shapes of a stage that is made with its depth and ``tied``, and
loads into one. Parameters that are stacked get another first dimension (``w1 [blocks, hidden,
dim]``: 1 if tied, else depth, Heun depth + 1); a stage of modules has the keys ``blocks.0.…`` if
tied, else one such group per block.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeVar

from .interpolation import HALF, nearest
from .options import Options, choice, positive_int
from .stages import Stage

INTERPOLATIONS = ("nearest", "linear")

AnyStage = TypeVar("AnyStage", bound=Stage)


def deepen(stage: AnyStage, depth: int, *, interpolation: str = "nearest") -> AnyStage:
    """The stage with ``depth`` steps, more or fewer, over the same time N h.

    h = 1/N becomes 1/depth; an explicit ``step=h`` becomes h N / depth. Other options stay, and
    ``anchor_every`` still counts steps.

    A tied stage keeps its weights, and its output changes by O(1/N), with Heun O(1/N²). In an
    untied one block n stands for a place s in [0, 1]: Euler's for the middle of its step,
    s = (n + ½)/N, Heun's for the border of two steps, s = n/N. A new block gets, by its own place,

    interpolation  ``"nearest"``: a copy of the nearest block (the later of two equally near ones).
                   Euler to k times the depth: every block k times
                   ``"linear"``: parameters, and buffers of floating point (running statistics),
                   linear in s between two neighbours; beyond the outer ones, as those are.
                   Everything else is the nearest block's, whether a parameter is frozen, too. The
                   blocks must be of the same structure

    Linear interpolation makes neighbours more alike the deeper the stage becomes, which is what
    Heun's scheme and ``reverse="predicted"`` profit from; copies keep the jumps between them. With
    Euler, to k times the depth, both keep the mean of the weights over the depth, and so the
    function up to effects of second order in them. Blocks that shared modules or parameters get
    each its own. See the module ``depth`` for what is kept, and for optimizers.
    """
    _check(stage)
    positive_int("depth", depth)
    choice("interpolation", interpolation, INTERPOLATIONS)
    options = stage.options
    if options.step is not None:
        options = dataclasses.replace(options, step=options.step * stage.depth / depth)
    places = [Fraction(0)] if stage.tied else _places(options, stage.depth, depth)
    if interpolation == "nearest":
        places = [Fraction(nearest(place)) for place in places]
    return _rebuilt(stage, depth, stage.tied, options, places)


def untie(stage: AnyStage) -> AnyStage:
    """The same stage with a copy of the block for every step, one more with Heun.

    It computes the same function, bit by bit, in train and in eval mode; the gradients of its
    blocks add up to the tied one's. Running statistics are copied, and from then on each block
    has its own: those of a tied block are one average, which moves at every step and so has more of
    the last ones.

    Of an untied stage it is a copy, in which blocks that shared modules or parameters no longer do.
    See the module ``depth`` for what is kept, and for optimizers.
    """
    _check(stage)
    blocks = stage.options.blocks(stage.depth)
    places = [Fraction(0 if stage.tied else n) for n in range(blocks)]
    return _rebuilt(stage, stage.depth, False, stage.options, places)


def _check(stage: object) -> None:
    if not isinstance(stage, Stage):
        raise TypeError(
            f"stage must be a stage of resode_kernels, not a {type(stage).__name__}; "
            "of a model, put the new stage in the place of the old one"
        )


def _places(options: Options, old: int, new: int) -> list[Fraction]:
    """Where the blocks of a stage of ``new`` steps are among those of one of ``old``."""
    offset = HALF if options.scheme == "euler" else Fraction(0)
    last = options.blocks(old) - 1
    places = ((n + offset) * old / new - offset for n in range(options.blocks(new)))
    return [min(max(place, Fraction(0)), Fraction(last)) for place in places]


def _rebuilt(
    stage: AnyStage, depth: int, tied: bool, options: Options, places: Sequence[Fraction]
) -> AnyStage:
    result = copy.deepcopy(stage)
    result.depth, result.tied, result.options = depth, tied, options
    result.place_blocks(places)
    return result
