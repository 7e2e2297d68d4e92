"""Stages as functions of their input and parameters. All of them take the options
``resode_kernels.StageOptions`` as keywords."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from . import backends, checks, reference
from .defaults import BatchNormOptions
from .fused import autograd
from .options import Options, StageOptions, choice, number
from .problem import ConvLayer, Problem
from .replay import function
from .states import State, parts

ACTIVATIONS = tuple(reference.ACTIVATIONS)
"""The activations σ. "gelu" is the exact gelu, not its tanh approximation."""


def mlp_stage(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    activation: str = "tanh",
    depth: int | None = None,
    **options: Unpack[StageOptions],
) -> Tensor:
    """Residual steps with f(x) = W2 σ(W1 x + b1) + b2.

    x           [..., dim]
    w1, b1      [blocks, hidden, dim], [blocks, hidden] or None
    w2, b2      [blocks, dim, hidden], [blocks, dim] or None
    activation  σ, one of ``functional.ACTIVATIONS``
    depth       the number of steps N. None: N follows from the number of blocks. If depth is given
                with one block, the block is tied: it serves every step
    returns     [..., dim], in x's dtype
    """
    return run_mlp(x, w1, b1, w2, b2, activation, depth, Options.of(options))


def linear_stage(
    x: Tensor, weight: Tensor, *, depth: int | None = None, **options: Unpack[StageOptions]
) -> Tensor:
    """Residual steps with f(x) = θ x.

    x        [..., dim]
    weight   [blocks, dim, dim]
    depth    as in ``mlp_stage``
    returns  [..., dim], in x's dtype
    """
    return run_linear(x, weight, depth, Options.of(options))


def conv_stage(
    x: Tensor,
    layers: Sequence[ConvLayer],
    *,
    activation: str = "relu",
    eps: float = 1e-5,
    depth: int | None = None,
    **options: Unpack[StageOptions],
) -> Tensor:
    """Residual steps with f(x) = u_L, u_0 = x and u_l = bn_l(W_l ∗ σ(u_{l−1})).

    x           [images, channels, height, width] in any memory format
    layers      the L layers of a block, 2 or 3: ``ConvLayer``s, or tuples of their fields
    activation  σ, one of ``functional.ACTIVATIONS``
    depth       as in ``mlp_stage``
    returns     as x
    """
    layers = checks.conv_layers(layers)
    blocks = [
        [tuple(None if t is None else t[n] for t in layer) for layer in layers]
        for n in range(layers[0].weight.shape[0])
    ]
    return run_conv(x, blocks, activation, eps, depth, BatchNormOptions.of(options))[0]


def residual_stage(
    blocks: checks.Blocks, x: State, *args: Any, depth: int | None = None, **kwargs: Any
) -> State:
    """Residual steps whose f is any module: x + h block(x, *args, **kwargs).

    blocks   modules that compute f (not x + f), one per step, with ``scheme="heun"`` one more
    x        a tensor, or a tuple of tensors; f then returns a tuple of the same shapes
    args     passed to every block, like the keywords that are not ``StageOptions``. Tensors among
             them, also in lists and dicts, receive gradients
    depth    the number of steps, if there is one block. The block is tied: it serves every step
    returns  as x

    A keyword of a block that has the name of an option (``step``, ``order``) cannot be passed this
    way. Use ``ResidualStage``: it takes options when it is made and passes every keyword on.
    """
    own = {key: kwargs.pop(key) for key in Options.names() if key in kwargs}
    options = Options.of(own)
    modules = checks.block_list(blocks, depth, options)
    for n, module in enumerate(modules):
        taken = own.keys() & inspect.signature(module.forward).parameters.keys()
        if taken:
            raise TypeError(
                f"{min(taken)} is an option of the stage and an argument of block {n} "
                f"({type(module).__name__}): use ResidualStage, which takes options when it is made"
            )
    return run_residual(
        modules, x, args, kwargs, checks.steps(depth, len(modules), options), options
    )


def run_residual(
    modules: Sequence[nn.Module],
    x: State,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    depth: int,
    options: Options,
) -> State:
    for i, part in enumerate(parts(x)):
        checks.floating(f"x[{i}]" if isinstance(x, tuple) else "x", part)
    if not parts(x):
        raise ValueError("x must hold at least one tensor, but is an empty tuple")
    combine = backends.choose_combine(options.backend, parts(x))
    blocks = list(modules) * options.blocks(depth) if len(modules) == 1 else modules
    result: State = function.run(
        blocks,
        x,
        args,
        kwargs,
        options.method(depth, of_modules=True),
        stored=options.backward == "stored",
        combine=combine,
        recorder=backends.choose_recorder(options.backend, parts(x)),
        stream=options.stream,
    )
    return result


def run_mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: str,
    depth: int | None,
    options: Options,
) -> Tensor:
    choice("activation", activation, ACTIVATIONS)
    blocks, hidden, dim = checks.three_dimensions("w1", w1, "[blocks, hidden, dim]")
    parameters = {
        "w1": (w1, (blocks, hidden, dim)),
        "b1": (b1, (blocks, hidden)),
        "w2": (w2, (blocks, dim, hidden)),
        "b2": (b2, (blocks, dim)),
    }
    return _run("mlp", activation, x, parameters, depth, options)


def run_conv(
    x: Tensor,
    blocks: Sequence[Sequence[tuple[Tensor | None, ...]]],
    activation: str,
    epsilon: float,
    depth: int | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """x[N] and the batch statistics (``Problem.statistics``). A block is a list of layers, whose
    fields are those of ``ConvLayer``, not stacked."""
    choice("activation", activation, ACTIVATIONS)
    epsilon = number("eps", epsilon, above=0)
    checks.images(x, blocks)
    checks.fused_stream(x, options)
    method = options.method(checks.steps(depth, len(blocks), options))
    parameters = tuple(tensor for block in blocks for layer in block for tensor in layer)
    problem = Problem("conv", activation, parameters, method, len(blocks[0]), epsilon)
    return autograd.run(x, problem, backends.choose(options.backend, x.device, x.dtype))


def run_linear(x: Tensor, weight: Tensor, depth: int | None, options: Options) -> Tensor:
    blocks, _, dim = checks.three_dimensions("weight", weight, "[blocks, dim, dim]")
    return _run("linear", "identity", x, {"weight": (weight, (blocks, dim, dim))}, depth, options)


def _run(
    block: str,
    activation: str,
    x: Tensor,
    parameters: checks.Parameters,
    depth: int | None,
    options: Options,
) -> Tensor:
    tensors, shapes = zip(*parameters.values(), strict=True)
    blocks, dim = shapes[0][0], shapes[0][-1]
    checks.rows(x, dim)
    checks.fused_stream(x, options)
    if torch.compiler.is_compiling():
        checks.stacked(x, parameters)
    try:
        method = options.method(checks.steps(depth, blocks, options))
        problem = Problem(block, activation, tensors, method)
        backend = backends.choose(options.backend, x.device, x.dtype)
        if x.dim() == 2:  # even a reshape to the same shape would add two nodes to the graph
            return autograd.run(x, problem, backend)[0]
        return autograd.run(x.reshape(-1, dim), problem, backend)[0].reshape(x.shape)
    except Exception:
        checks.stacked(x, parameters)  # the ops check the same, but know less of what x was
        raise
