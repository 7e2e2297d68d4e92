"""Stages as functions of their input and parameters. See ``resode_kernels.options.How`` for the
options that all of them take."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from . import autograd, backends, checks, residual
from .options import How, choice
from .problem import ConvLayer, Problem
from .replay import State, parts

ACTIVATIONS = ("relu", "tanh", "gelu", "silu")


def mlp_stage(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    activation: str = "tanh",
    depth: int | None = None,
    **how: Any,
) -> Tensor:
    """Residual steps with f(x) = W2 σ(W1 x + b1) + b2.

    x           [..., dim]
    w1, b1      [blocks, hidden, dim], [blocks, hidden] or None
    w2, b2      [blocks, dim, hidden], [blocks, dim] or None
    activation  σ: ``"relu"``, ``"tanh"``, ``"gelu"`` (exact) or ``"silu"``
    depth       the number of steps N. None: from the number of blocks. Given with one block, the
                block is tied: it serves every step
    returns     [..., dim], in x's dtype
    """
    choice("activation", activation, ACTIVATIONS)
    return run_mlp(x, w1, b1, w2, b2, activation, depth, How.from_options(how))


def linear_stage(x: Tensor, weight: Tensor, *, depth: int | None = None, **how: Any) -> Tensor:
    """Residual steps with f(x) = θ x.

    x        [..., dim]
    weight   [blocks, dim, dim]
    depth    as in ``mlp_stage``
    returns  [..., dim], in x's dtype
    """
    return run_linear(x, weight, depth, How.from_options(how))


def conv_stage(
    x: Tensor,
    layers: Sequence[ConvLayer],
    *,
    activation: str = "relu",
    eps: float = 1e-5,
    depth: int | None = None,
    **how: Any,
) -> Tensor:
    """Residual steps with f(x) = u_L, u_0 = x and u_l = bn_l(W_l ∗ σ(u_{l−1})).

    x           [images, channels, height, width] in any memory format
    layers      the L layers of a block, 2 or 3
    activation  σ: ``"relu"``, ``"tanh"``, ``"gelu"`` (exact) or ``"silu"``
    depth       as in ``mlp_stage``
    returns     as x
    """
    choice("activation", activation, ACTIVATIONS)
    if len(layers) not in (2, 3):
        raise ValueError(f"layers: a block has 2 or 3 layers, not {len(layers)}")
    for i, layer in enumerate(layers):
        if checks.a_tensor(f"layers[{i}].weight", layer.weight).dim() != 5:
            raise ValueError(
                f"layers[{i}].weight must have the shape [blocks, out, in, size, size], "
                f"not {list(layer.weight.shape)}"
            )
    count = layers[0].weight.shape[0]
    for i, layer in enumerate(layers):
        for name, tensor in layer._asdict().items():
            if tensor is not None and (tensor.dim() == 0 or tensor.shape[0] != count):
                raise ValueError(
                    f"layers[{i}].{name} must be stacked over {count} blocks, as the first weight "
                    f"is, but has the shape {list(tensor.shape)}"
                )
    blocks = [
        [tuple(None if t is None else t[n] for t in layer) for layer in layers]
        for n in range(count)
    ]
    return run_conv(x, blocks, activation, eps, depth, How.from_options(how))[0]


def residual_stage(
    blocks: checks.Blocks, x: State, *args: Any, depth: int | None = None, **kwargs: Any
) -> State:
    """Residual steps whose f is any module: x + h block(x, *args, **kwargs).

    blocks   modules computing f (not x + f), one per step, with ``scheme="heun"`` one more
    x        a tensor, or a tuple of tensors; then f returns a tuple of the same shapes
    args     go to every block, as do keywords that are not options of ``How``. Tensors among them
             (in lists and dicts too) get their gradients
    depth    the number of steps, given with one block: it is tied, and serves every step
    returns  as x

    A block's own keyword that has the name of an option (``step``, ``order``) cannot be passed this
    way; ``ResidualStage`` takes its options earlier and passes every keyword on.
    """
    options = {key: kwargs.pop(key) for key in How.__dataclass_fields__ if key in kwargs}
    how = How.from_options(options)
    modules = checks.block_list(blocks, depth, how)
    for n, module in enumerate(modules):
        taken = options.keys() & inspect.signature(module.forward).parameters.keys()
        if taken:
            raise TypeError(
                f"{min(taken)} is an option of the stage and an argument of block {n} "
                f"({type(module).__name__}): use ResidualStage, which takes its options apart"
            )
    return run_residual(modules, x, args, kwargs, checks.steps(depth, len(modules), how), how)


def run_residual(
    modules: Sequence[nn.Module],
    x: State,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    depth: int,
    how: How,
) -> State:
    for i, part in enumerate(parts(x)):
        checks.floating(f"x[{i}]" if isinstance(x, tuple) else "x", part)
    if not parts(x):
        raise ValueError("x must hold at least one tensor, but is an empty tuple")
    if how.backend not in ("auto", "cuda", "triton", "reference"):
        raise backends.BackendUnavailableError(
            f"backend={how.backend!r} is not available: blocks that are modules run in PyTorch "
            "(backend='auto', 'reference', or 'cuda' or 'triton', which update the states by their "
            "kernels)"
        )
    blocks = list(modules) * how.blocks(depth) if len(modules) == 1 else modules
    chosen = {backends.choose(how.backend, t.device, t.dtype) for t in parts(x)}
    result: State = residual.run(
        blocks,
        x,
        args,
        kwargs,
        how.method(depth),
        stored=how.backward == "stored",
        backend=chosen.pop() if chosen in ({"cuda"}, {"triton"}) else "reference",
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
    how: How,
) -> Tensor:
    blocks, hidden, dim = checks.three_dimensions("w1", w1, "[blocks, hidden, dim]")
    parameters = {
        "w1": (w1, (blocks, hidden, dim)),
        "b1": (b1, (blocks, hidden)),
        "w2": (w2, (blocks, dim, hidden)),
        "b2": (b2, (blocks, dim)),
    }
    return _run("mlp", activation, x, parameters, depth, how)


def run_conv(
    x: Tensor,
    blocks: Sequence[Sequence[tuple[Tensor | None, ...]]],
    activation: str,
    epsilon: float,
    depth: int | None,
    how: How,
) -> tuple[Tensor, Tensor]:
    """The result and the statistics of the batch (``Problem.statistics``). A block is its layers,
    each a ``ConvLayer`` of that block alone."""
    checks.images(x, blocks)
    method = how.method(checks.steps(depth, len(blocks), how))
    parameters = tuple(tensor for block in blocks for layer in block for tensor in layer)
    problem = Problem("conv", activation, parameters, method, len(blocks[0]), epsilon)
    return autograd.run(x, problem, backends.choose(how.backend, x.device, x.dtype))


def run_linear(x: Tensor, weight: Tensor, depth: int | None, how: How) -> Tensor:
    blocks, _, dim = checks.three_dimensions("weight", weight, "[blocks, dim, dim]")
    return _run("linear", "identity", x, {"weight": (weight, (blocks, dim, dim))}, depth, how)


def _run(
    block: str,
    activation: str,
    x: Tensor,
    parameters: checks.Parameters,
    depth: int | None,
    how: How,
) -> Tensor:
    tensors, shapes = zip(*parameters.values(), strict=True)
    blocks, dim = shapes[0][0], shapes[0][-1]
    checks.rows(x, dim, parameters)
    method = how.method(checks.steps(depth, blocks, how))
    backend = backends.choose(how.backend, x.device, x.dtype)
    problem = Problem(block, activation, tuple(tensors), method)
    if x.dim() == 2:  # a reshape to the same is two nodes of the graph, too
        return autograd.run(x, problem, backend)[0]
    return autograd.run(x.reshape(-1, dim), problem, backend)[0].reshape(x.shape)
