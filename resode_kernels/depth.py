"""The paper's training strategy: train with tied weights, transfer deeper, untie, refine.

    stage = rk.MLPStage(64, 64, depth=4, tied=True)       # train: few steps, few parameters
    stage = rk.deepen(stage, 64)                          # almost the same function, 16 × the steps
    stage = rk.untie(stage)                               # the same function, 64 × the parameters
    optimizer = torch.optim.SGD(stage.parameters(), 1e-3) # refine, in constant memory

``deepen`` and ``untie`` return a new stage and leave the given one as it is. The two share no
memory, and the new parameters have no gradients yet. **Make a new optimizer**: the old one holds
the old parameters. The new stage has the same class, device, dtypes, options, train/eval modes,
module hooks and frozen parameters. Hooks of single tensors are not copied.

Its ``state_dict`` loads into a stage that is made with the new ``depth`` and ``tied``. Stacked
parameters get another first dimension (``w1 [blocks, hidden, dim]``: 1 if tied, else depth, Heun
depth + 1). A stage of modules has the keys ``blocks.0.…`` if tied, else one such group per block.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeVar

from .interpolation import HALF, nearest
from .options import Options, choice, positive_int
from .stages import Stage

INTERPOLATIONS = ("nearest", "linear")

AnyStage = TypeVar("AnyStage", bound=Stage)


def deepen(stage: AnyStage, depth: int, *, interpolation: str = "nearest") -> AnyStage:
    """A copy of the stage with ``depth`` steps, more or fewer, over the same time N h.

    h = 1/N becomes 1/depth; an explicit ``step=h`` becomes h N / depth. If ``bits`` has an entry
    for each step, a new step gets that of the nearest old one. Other options stay, and
    ``anchor_every`` still counts steps.

    A tied stage keeps its weights; its output changes by O(1/N), with Heun by O(1/N²). In an untied
    stage block n has a position s in [0, 1]: with Euler the middle of its step, s = (n + ½)/N, with
    Heun the border of two steps, s = n/N. A new block is made from the old blocks at its position:

    interpolation  ``"nearest"``: a copy of the nearest block (the later of two equally near ones).
                   With Euler and k times the depth, every block is copied k times
                   ``"linear"``: parameters and floating-point buffers (running statistics) are
                   linear in s between two neighbours, and constant beyond the outermost blocks.
                   Everything else is copied from the nearest block, also whether a parameter is
                   frozen. The blocks must have the same structure

    Linear interpolation makes neighbouring blocks more alike the deeper the stage becomes. Heun's
    scheme and ``reverse="predicted"`` profit from that; copies keep the jumps between blocks. With
    Euler and k times the depth, both keep the mean of the weights over the depth, and therefore the
    function up to effects of second order in the weights. Blocks that shared modules or parameters
    get their own. The docstring of the module ``depth`` says what is kept and what optimizers need.
    """
    _check(stage)
    depth = positive_int("depth", depth)
    choice("interpolation", interpolation, INTERPOLATIONS)
    options = stage.options
    if options.step is not None:
        options = dataclasses.replace(options, step=options.step * stage.depth / depth)
    if not isinstance(options.bits, int):
        options = dataclasses.replace(options, bits=_bits(options.bits, depth))
    places = [Fraction(0)] if stage.tied else _places(options, stage.depth, depth)
    if interpolation == "nearest":
        places = [Fraction(nearest(place)) for place in places]
    return _rebuilt(stage, depth, stage.tied, options, places)


def untie(stage: AnyStage) -> AnyStage:
    """The same stage with a copy of the block for every step, one more with Heun.

    It computes the same function, bit by bit, in train and in eval mode; the gradients of its
    blocks add up to the gradient of the tied block. Running statistics are copied; from then on
    each block updates its own. (A tied block has one running average. It moves at every step, so
    that the last steps weigh most.)

    An untied stage is copied; blocks that shared modules or parameters get their own. The docstring
    of the module ``depth`` says what is kept and what optimizers need.
    """
    _check(stage)
    blocks = stage.options.blocks(stage.depth)
    places = [Fraction(0 if stage.tied else n) for n in range(blocks)]
    return _rebuilt(stage, stage.depth, False, stage.options, places)


def _check(stage: object) -> None:
    if not isinstance(stage, Stage):
        raise TypeError(
            f"stage must be a stage of resode_kernels, not a {type(stage).__name__}; "
            "give the stage inside your model, and replace it there by the result"
        )
    stage.refuse_changes()


def _places(options: Options, old: int, new: int) -> list[Fraction]:
    """The positions of the blocks of ``new`` steps among the blocks of ``old`` steps."""
    offset = HALF if options.scheme == "euler" else Fraction(0)
    last = options.blocks(old) - 1
    places = ((n + offset) * old / new - offset for n in range(options.blocks(new)))
    return [min(max(place, Fraction(0)), Fraction(last)) for place in places]


def _bits(old: Sequence[int | None], depth: int) -> tuple[int | None, ...]:
    """For every new step the entry of the old step in whose time its middle lies."""
    return tuple(old[math.floor((n + HALF) * len(old) / depth)] for n in range(depth))


def _rebuilt(
    stage: AnyStage, depth: int, tied: bool, options: Options, places: Sequence[Fraction]
) -> AnyStage:
    result = copy.deepcopy(stage)
    result.depth, result.tied, result.options = depth, tied, options
    result.place_blocks(places)
    return result
