"""Stages as functions of their input and parameters. See ``resode_kernels.options.How`` for the
options that all of them take."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import autograd, backends, residual
from .options import How, choice, positive_int
from .problem import Problem
from .replay import State, parts

ACTIVATIONS = ("relu", "tanh", "gelu", "silu")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
OPTIONAL = ("b1", "b2")
MAX_LAYERS = 3

# Names, tensors and the shapes they must have; the first parameter's last dimension is x's.
Parameters = dict[str, tuple[Tensor | None, tuple[int, ...]]]


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


class ConvLayer(NamedTuple):
    """A layer of ``conv_stage``: convolution, then batch normalization, stacked over blocks.

    weight          [blocks, out, in, size, size], size 1 or 3
    gamma, beta     [blocks, out] or None
    mean, variance  [blocks, out] to normalize by; None: by those of the batch
    """

    weight: Tensor
    gamma: Tensor | None = None
    beta: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None


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
    layers      the L layers of a block, at most 3
    activation  σ: ``"relu"``, ``"tanh"``, ``"gelu"`` (exact) or ``"silu"``
    depth       as in ``mlp_stage``
    returns     as x
    """
    choice("activation", activation, ACTIVATIONS)
    if not 1 <= len(layers) <= MAX_LAYERS:
        raise ValueError(f"layers: a block has 1 to {MAX_LAYERS} layers, not {len(layers)}")
    for i, layer in enumerate(layers):
        if _tensor(f"layers[{i}].weight", layer.weight).dim() != 5:
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
    blocks: Blocks, x: State, *args: Any, depth: int | None = None, **kwargs: Any
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
    modules = block_list(blocks, depth, how)
    for n, module in enumerate(modules):
        taken = options.keys() & inspect.signature(module.forward).parameters.keys()
        if taken:
            raise TypeError(
                f"{min(taken)} is an option of the stage and an argument of block {n} "
                f"({type(module).__name__}): use ResidualStage, which takes its options apart"
            )
    return run_residual(modules, x, args, kwargs, steps(depth, len(modules), how), how)


Blocks = Sequence[nn.Module] | nn.Sequential | nn.ModuleList | nn.Module


def block_list(blocks: Blocks, depth: int | None, how: How) -> list[nn.Module]:
    """The blocks, one by one. One alone serves every step."""
    if depth is not None and isinstance(blocks, nn.Sequential) and len(blocks) > 1:
        if len(blocks) == how.blocks(depth):
            raise ValueError(
                f"blocks: with depth={depth} an nn.Sequential of {len(blocks)} could be that many "
                "blocks or one, tied; write blocks without depth, or [blocks]"
            )
        blocks = [blocks]
    if isinstance(blocks, nn.Sequential | nn.ModuleList | list | tuple):
        modules = list(blocks)
    elif isinstance(blocks, nn.Module):
        if depth is None:
            raise ValueError("depth: blocks is one module; give the number of steps it serves")
        modules = [blocks]
    else:
        raise TypeError(f"blocks must be a list of modules or one module, not {type(blocks)}")
    for n, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(f"blocks[{n}] must be an nn.Module, not {module!r}")
    if not modules:
        raise ValueError("blocks must hold at least one module, but is empty")
    return modules


def run_residual(
    modules: Sequence[nn.Module],
    x: State,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    depth: int,
    how: How,
) -> State:
    for i, part in enumerate(parts(x)):
        name = f"x[{i}]" if isinstance(x, tuple) else "x"
        if _tensor(name, part).dtype not in DTYPES:
            raise TypeError(f"{name} must be of a floating-point dtype, not {part.dtype}")
    if not parts(x):
        raise ValueError("x must hold at least one tensor, but is an empty tuple")
    if how.backend not in ("auto", "reference"):
        raise backends.BackendUnavailableError(
            f"backend={how.backend!r} is not available: blocks that are modules run in PyTorch "
            "(backend='auto' or 'reference')"
        )
    blocks = list(modules) * how.blocks(depth) if len(modules) == 1 else modules
    result: State = residual.run(
        blocks, x, args, kwargs, how.method(depth), stored=how.backward == "stored"
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
    blocks, hidden, dim = _three_dimensions("w1", w1, "[blocks, hidden, dim]")
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
    _check_images(x, blocks)
    method = how.method(steps(depth, len(blocks), how))
    parameters = tuple(tensor for block in blocks for layer in block for tensor in layer)
    problem = Problem("conv", activation, parameters, method, len(blocks[0]), epsilon)
    return autograd.run(x, problem, backends.choose(how.backend, x.device))


def run_linear(x: Tensor, weight: Tensor, depth: int | None, how: How) -> Tensor:
    blocks, _, dim = _three_dimensions("weight", weight, "[blocks, dim, dim]")
    return _run("linear", "identity", x, {"weight": (weight, (blocks, dim, dim))}, depth, how)


def _run(
    block: str,
    activation: str,
    x: Tensor,
    parameters: Parameters,
    depth: int | None,
    how: How,
) -> Tensor:
    tensors, shapes = zip(*parameters.values(), strict=True)
    blocks, dim = shapes[0][0], shapes[0][-1]
    _check(x, dim, parameters)
    method = how.method(steps(depth, blocks, how))
    backend = backends.choose(how.backend, x.device)
    problem = Problem(block, activation, tuple(tensors), method)
    y, _ = autograd.run(x.reshape(-1, dim), problem, backend)
    return y.reshape(x.shape)


def steps(depth: int | None, blocks: int, how: How) -> int:
    if depth is None:
        depth = blocks - (how.blocks(1) - 1)
        if depth < 1:
            raise ValueError(
                f"depth: {blocks} block(s) are too few for a step of scheme={how.scheme!r}; "
                "to tie one block over several steps, give depth"
            )
    positive_int("depth", depth)
    if blocks not in (1, how.blocks(depth)):
        raise ValueError(
            f"depth={depth} with scheme={how.scheme!r} takes {how.blocks(depth)} blocks "
            f"(or 1, tied), not {blocks}"
        )
    return depth


def _check_images(x: Tensor, blocks: Sequence[Sequence[tuple[Tensor | None, ...]]]) -> None:
    if _tensor("x", x).dtype not in DTYPES:
        raise TypeError(f"x must be of a floating-point dtype, not {x.dtype}")
    if x.dim() != 4:
        raise ValueError(
            f"x must have the shape [images, channels, height, width], not {list(x.shape)}"
        )
    dtype = None
    for n, block in enumerate(blocks):
        channels = x.shape[1]
        for i, layer in enumerate(block):
            weight = _tensor(f"the weight of block {n}, layer {i + 1}", layer[0])
            out, size = weight.shape[0], weight.shape[-1]
            shapes = ((out, channels, size, size), *[(out,)] * 4)
            for what, shape, tensor in zip(ConvLayer._fields, shapes, layer, strict=True):
                if tensor is None:
                    continue
                name = f"{what} of block {n}, layer {i + 1}"
                if tuple(tensor.shape) != shape or size not in (1, 3):
                    raise ValueError(
                        f"{name} must have the shape {list(shape)} (size 1 or 3), as x and the "
                        f"layers before demand, not {list(tensor.shape)}"
                    )
                dtype = _check_kind(name, tensor, x, dtype)
            if (layer[3] is None) != (layer[4] is None):
                raise ValueError(f"block {n}, layer {i + 1}: give both mean and variance, or none")
            if layer[3] is None and x.shape[0] * x.shape[2] * x.shape[3] < 2:
                raise ValueError(
                    "x must have more than one value per channel to normalize by its batch, "
                    f"but has the shape {list(x.shape)}"
                )
            channels = out
        if channels != x.shape[1]:
            raise ValueError(
                f"block {n} makes {channels} channels of {x.shape[1]}; it must keep their number"
            )


def _tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, not {value if value is None else type(value)}")
    return value


def _three_dimensions(name: str, weight: Tensor, expected: str) -> torch.Size:
    if _tensor(name, weight).dim() != 3:
        raise ValueError(f"{name} must have the shape {expected}, not {list(weight.shape)}")
    return weight.shape


def _check(x: Tensor, dim: int, parameters: Parameters) -> None:
    if _tensor("x", x).dtype not in DTYPES:
        raise TypeError(f"x must be of a floating-point dtype, not {x.dtype}")
    if x.dim() == 0 or x.shape[-1] != dim:
        raise ValueError(
            f"x must have {dim} as its last dimension, as the parameters have, "
            f"but has the shape {list(x.shape)}"
        )
    dtype = None
    for name, (value, shape) in parameters.items():
        if value is None and name in OPTIONAL:
            continue
        tensor = _tensor(name, value)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have the shape {list(shape)}, not {list(tensor.shape)}")
        if 0 in shape:
            raise ValueError(f"{name} must not be empty, but has the shape {list(shape)}")
        dtype = _check_kind(name, tensor, x, dtype)


def _check_kind(name: str, tensor: Tensor, x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Dtype and device; returns the dtype that all parameters must share."""
    dtype = dtype or tensor.dtype
    if tensor.dtype not in DTYPES or tensor.dtype != dtype:
        raise TypeError(
            f"{name} is {tensor.dtype}; the parameters must share one floating-point dtype"
        )
    if (tensor.dtype == torch.float64) != (x.dtype == torch.float64):
        raise TypeError(
            f"{name} is {tensor.dtype} and x is {x.dtype}: float64 does not mix with others"
        )
    if tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}")
    return dtype
