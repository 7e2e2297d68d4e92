"""Stages as modules: stacks of residual blocks that train in constant memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import checks, functional, reference
from .interpolation import module_at, tensor_at
from .options import How, choice, positive_int
from .replay import State


class Stage(nn.Module):
    """What all stages share: a depth, tied or untied blocks and the options of ``How``."""

    def __init__(self, depth: int, tied: bool, options: dict[str, Any]) -> None:
        super().__init__()
        positive_int("depth", depth)
        self.depth, self.tied = depth, tied
        self.how = How.from_options(options)

    @property
    def num_blocks(self) -> int:
        """The number of blocks that have parameters of their own."""
        return 1 if self.tied else self.how.blocks(self.depth)

    @property
    def runs_modules(self) -> bool:
        """Whether its blocks run as modules, not in kernels."""
        return False

    def residual(self, n: int, x: Any, *args: Any, **kwargs: Any) -> Any:
        """f_n(x): the residual function of block n, in plain PyTorch. Tied: of any n."""
        raise NotImplementedError

    def by_block(self, named: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """Tensors that are named and shaped as the parameters, or some of them, block by block."""
        raise NotImplementedError

    def configure(self, **options: Any) -> Stage:
        """Changes options, say ``stage.configure(backward="stored")``; returns the stage."""
        how = How.from_options({**vars(self.how), **options})
        if not self.tied and how.blocks(self.depth) != self.num_blocks:
            raise ValueError(
                f"scheme={how.scheme!r} takes {how.blocks(self.depth)} blocks at depth "
                f"{self.depth}, but this stage has {self.num_blocks}; make a new stage"
            )
        self.how = how
        return self

    def place_blocks(self, places: Sequence[Fraction]) -> None:
        """The blocks become those at these places among the present ones, all of them copies."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        changed = [f"{k}={v!r}" for k, v in vars(self.how).items() if v != getattr(How, k)]
        tied = ["tied=True"] if self.tied else []
        return ", ".join([f"depth={self.depth}", *tied, *changed])


class StackedStage(Stage):
    """A stage whose parameters are stacked over its blocks."""

    stacked: ClassVar[tuple[str, ...]]
    """Their names. Any of them may be None."""

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
                    "remove it (torch.nn.utils.parametrize.remove_parametrizations)"
                )
            new = torch.stack([tensor_at(old, place) for place in places])
            setattr(self, name, nn.Parameter(new, requires_grad=old.requires_grad))


class MLPStage(StackedStage):
    """``depth`` residual steps with f(x) = W2 σ(W1 x + b1) + b2.

    Parameters are stacked over blocks, each in ``nn.Linear``'s layout: w1 [blocks, hidden, dim],
    b1 [blocks, hidden], w2 [blocks, dim, hidden], b2 [blocks, dim]. There are ``depth`` blocks,
    one more with ``scheme="heun"``, and one in all if ``tied``. ``how``: see ``options.How``.
    """

    stacked = ("w1", "b1", "w2", "b2")

    def __init__(
        self,
        dim: int,
        hidden: int,
        depth: int,
        activation: str = "tanh",
        bias: bool = True,
        tied: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **how: Any,
    ) -> None:
        super().__init__(depth, tied, how)
        positive_int("dim", dim)
        positive_int("hidden", hidden)
        choice("activation", activation, functional.ACTIVATIONS)
        self.dim, self.hidden, self.activation = dim, hidden, activation

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(self.num_blocks, *shape, device=device, dtype=dtype))

        self.w1 = parameter(hidden, dim)
        self.b1 = parameter(hidden) if bias else None
        self.w2 = parameter(dim, hidden)
        self.b2 = parameter(dim) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``nn.Linear``: uniform in ±1/√(inputs)."""
        for weight, bias in ((self.w1, self.b1), (self.w2, self.b2)):
            _init_linear(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        return functional.run_mlp(
            x, self.w1, self.b1, self.w2, self.b2, self.activation, self.depth, self.how
        )

    def residual(self, n: int, x: Any, *args: Any, **kwargs: Any) -> Any:
        theta = [self.in_block(n, p, x) for p in (self.w1, self.b1, self.w2, self.b2)]
        return reference.MLP(self.activation, *theta).f(x, n)

    def extra_repr(self) -> str:
        bias = [] if self.b1 is not None else ["bias=False"]
        return ", ".join(
            [
                f"dim={self.dim}",
                super().extra_repr(),
                f"hidden={self.hidden}",
                f"activation={self.activation!r}",
                *bias,
            ]
        )


class LinearStage(StackedStage):
    """``depth`` residual steps with f(x) = θ x; weight [blocks, dim, dim].

    There are as many blocks as in an ``MLPStage``. ``how``: see ``options.How``.
    """

    stacked = ("weight",)

    def __init__(
        self,
        dim: int,
        depth: int,
        tied: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **how: Any,
    ) -> None:
        super().__init__(depth, tied, how)
        positive_int("dim", dim)
        self.dim = dim
        self.weight = nn.Parameter(
            torch.empty(self.num_blocks, dim, dim, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _init_linear(self.weight, None)

    def forward(self, x: Tensor) -> Tensor:
        return functional.run_linear(x, self.weight, self.depth, self.how)

    def residual(self, n: int, x: Any, *args: Any, **kwargs: Any) -> Any:
        return reference.Linear(self.in_block(n, self.weight, x)).f(x, n)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, {super().extra_repr()}"


class ResidualStage(Stage):
    """Residual steps whose f is any module: x + h block(x, *args, **kwargs).

    blocks  modules computing f (not x + f: see ``residual_branch``) that keep the shape of x: a
            list, ``nn.Sequential`` or ``nn.ModuleList``, one per step, with ``scheme="heun"`` one
            more; or one module with ``depth``: tied, it serves every step. The same module
            throughout is tied too
    how     see ``options.How``; ``step=1.0`` makes the classical x + f(x)

    ``stage(x, *args, **kwargs)`` passes the arguments on to every block; tensors among them get
    their gradients. x is a tensor, or a tuple of tensors and f returns a tuple.

    In the backward pass blocks run again, with the parameters, buffers, random numbers (of torch's
    global generators), train/eval mode and autocast of the forward pass. Nothing of that shows but
    in forward hooks of the blocks and attributes that their ``forward`` sets. Under
    ``torch.compile`` a stage is a graph break; its blocks may be compiled.
    """

    def __init__(self, blocks: checks.Blocks, *, depth: int | None = None, **how: Any) -> None:
        options = How.from_options(how)
        modules = checks.block_list(blocks, depth, options)
        steps = checks.steps(depth, len(modules), options)
        tied = all(module is modules[0] for module in modules) and (
            len(modules) > 1 or depth is not None
        )
        super().__init__(steps, tied, how)
        self.blocks = nn.ModuleList(modules[:1] if tied else modules)

    def forward(self, x: State, *args: Any, **kwargs: Any) -> State:
        return functional.run_residual(list(self.blocks), x, args, kwargs, self.depth, self.how)

    @property
    def runs_modules(self) -> bool:
        return True

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
    """The residual function of a block that computes x + f(x), or of any other that keeps the shape
    of x: block(x, …) − x. With ``step=1.0`` a stage of such branches is the stack of the blocks."""
    return ResidualBranch(block)


class ResidualBranch(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        y = self.block(x, *args, **kwargs)
        if isinstance(x, tuple):
            return tuple(new - old for new, old in zip(y, x, strict=True))
        return y - x


def _init_linear(weight: nn.Parameter, bias: nn.Parameter | None) -> None:
    bound = 1 / math.sqrt(weight.shape[-1])
    for parameter in (weight, bias):
        if parameter is not None:
            nn.init.uniform_(parameter, -bound, bound)
