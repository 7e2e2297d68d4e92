"""Checks of users' arguments. A failed check raises an exception that names the argument, what was
given and what is expected."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .options import Options, given, positive_int
from .problem import ConvLayer

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
OPTIONAL = ("b1", "b2")

# Name → tensor and the shape it must have. The first parameter's last dimension is that of x.
Parameters = dict[str, tuple[Tensor | None, tuple[int, ...]]]

Blocks = Sequence[nn.Module] | nn.Sequential | nn.ModuleList | nn.Module


def block_list(blocks: Blocks, depth: int | None, options: Options) -> list[nn.Module]:
    """The blocks as a list of modules. A single module serves every step."""
    if depth is not None and isinstance(blocks, nn.Sequential) and len(blocks) > 1:
        if len(blocks) == options.blocks(depth):
            raise ValueError(
                f"blocks: an nn.Sequential of {len(blocks)} modules with depth={depth} could mean "
                f"{len(blocks)} blocks or one tied block: leave out depth, or give [blocks] for "
                "one tied block"
            )
        blocks = [blocks]
    if isinstance(blocks, nn.Sequential | nn.ModuleList | list | tuple):
        modules = list(blocks)
    elif isinstance(blocks, nn.Module):
        if depth is None:
            raise ValueError("depth: blocks is one module; give the number of steps that it serves")
        modules = [blocks]
    else:
        raise TypeError(f"blocks must be a list of modules or one module, not {given(blocks)}")
    for n, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(f"blocks[{n}] must be an nn.Module, not {module!r}")
    if not modules:
        raise ValueError("blocks must hold at least one module, but is empty")
    return modules


def steps(depth: int | None, blocks: int, options: Options) -> int:
    """The number of steps that so many blocks take."""
    if depth is None:
        depth = blocks - (options.blocks(1) - 1)
        if depth < 1:
            raise ValueError(
                f"depth: {blocks} block(s) are too few for a step of scheme={options.scheme!r}; "
                "to tie one block over several steps, give depth"
            )
    depth = positive_int("depth", depth)
    if blocks not in (1, options.blocks(depth)):
        raise ValueError(
            f"depth={depth} with scheme={options.scheme!r} takes {options.blocks(depth)} blocks "
            f"(or 1, tied), not {blocks}"
        )
    return depth


def a_tensor(name: str, value: object) -> Tensor:
    """A tensor of numbers in memory. Errors about shapes come later: nested tensors have none."""
    if not isinstance(value, Tensor):
        if isinstance(value, torch.fx.Proxy):
            raise TypeError(
                f"{name} is a Proxy: torch.fx cannot trace through a stage. Give it a Tracer whose "
                "is_leaf_module is true for stages, or use torch.export"
            )
        raise TypeError(f"{name} must be a tensor, not {given(value)}")
    if type(value) is nn.UninitializedParameter:
        raise ValueError(f"{name} must have a value, but is an {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        layout, convert = str(value.layout).replace("torch.", "").strip("_"), "to_dense()"
        if value.is_nested:
            layout, convert = "nested", "to_padded_tensor(0.0)"
        raise TypeError(f"{name} must be a dense tensor, not a {layout} one: give its {convert}")
    return value


def parameter_dtype(dtype: object) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(
            f"dtype must be one of {', '.join(map(str, DTYPES))} or None, not "
            f"{dtype if isinstance(dtype, torch.dtype) else given(dtype)}"
        )


def floating(name: str, value: object) -> Tensor:
    tensor = a_tensor(name, value)
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} must be of a floating-point dtype, not {tensor.dtype}")
    return tensor


def three_dimensions(name: str, weight: Tensor, expected: str) -> torch.Size:
    if a_tensor(name, weight).dim() != 3:
        raise ValueError(f"{name} must have the shape {expected}, not {list(weight.shape)}")
    return weight.shape


def rows(x: Tensor, dim: int) -> None:
    if floating("x", x).dim() == 0 or x.shape[-1] != dim:
        raise ValueError(
            f"x must have {dim} as its last dimension, like the parameters, "
            f"but has the shape {list(x.shape)}"
        )


def stacked(x: Tensor, parameters: Parameters) -> None:
    """Checks the parameters of blocks that work row by row."""
    device, dtype = x.device, None
    for name, (value, shape) in parameters.items():
        if value is None and name in OPTIONAL:
            continue
        tensor = a_tensor(name, value)
        if tensor.shape != shape:
            raise ValueError(f"{name} must have the shape {list(shape)}, not {list(tensor.shape)}")
        if 0 in shape:
            raise ValueError(f"{name} must not be empty, but has the shape {list(shape)}")
        if tensor.dtype is not dtype or tensor.device != device:  # otherwise like those before
            dtype = kind(name, tensor, x, dtype)


def kind(name: str, tensor: Tensor, x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Checks dtype and device. Returns the dtype that all parameters must share."""
    own = tensor.dtype
    dtype = dtype or own
    if own not in DTYPES or own != dtype:
        raise TypeError(f"{name} is {own}; all parameters must share one floating-point dtype")
    if (own == torch.float64) != (x.dtype == torch.float64):
        raise TypeError(f"{name} is {own} and x is {x.dtype}: if one is float64, both must be")
    if tensor.device != x.device:
        raise ValueError(
            f"{name} is on {tensor.device}, but x is on {x.device}; move both to one device"
        )
    return dtype


def fused_stream(x: Tensor, options: Options) -> None:
    if options.stream == "input" and x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"stream='input' asks for states in {x.dtype}, like x, but the kernels keep them in "
            "float32: leave out stream, or use a ResidualStage, whose blocks are modules"
        )


def conv_layers(layers: object) -> list[ConvLayer]:
    """The layers of ``conv_stage``, which may be given as plain tuples."""
    if not isinstance(layers, list | tuple) or isinstance(layers, ConvLayer):
        raise TypeError(f"layers must be a list of rk.functional.ConvLayer, not {given(layers)}")
    if len(layers) not in (2, 3):
        raise ValueError(f"layers: a block has 2 or 3 layers, not {len(layers)}")
    result = []
    for i, layer in enumerate(layers):
        if not isinstance(layer, list | tuple) or not 1 <= len(layer) <= len(ConvLayer._fields):
            raise TypeError(
                f"layers[{i}] must be a rk.functional.ConvLayer or a tuple of its fields "
                f"({', '.join(ConvLayer._fields)}), not {given(layer)}"
            )
        result.append(ConvLayer(*layer))
        if a_tensor(f"layers[{i}].weight", layer[0]).dim() != 5:
            raise ValueError(
                f"layers[{i}].weight must have the shape [blocks, out, in, size, size], "
                f"not {list(layer[0].shape)}"
            )
    count = result[0].weight.shape[0]
    if count == 0:
        raise ValueError("layers[0].weight must not be empty")
    for i, layer in enumerate(result):
        for name, value in layer._asdict().items():
            if value is None:
                continue
            tensor = a_tensor(f"layers[{i}].{name}", value)
            if tensor.dim() == 0 or tensor.shape[0] != count:
                raise ValueError(
                    f"layers[{i}].{name} must be stacked over {count} blocks, as the first weight "
                    f"is, but has the shape {list(tensor.shape)}"
                )
    return result


def images(x: Tensor, blocks: Sequence[Sequence[tuple[Tensor | None, ...]]]) -> None:
    if floating("x", x).dim() != 4:
        raise ValueError(
            f"x must have the shape [images, channels, height, width], not {list(x.shape)}"
        )
    dtype = None
    for n, block in enumerate(blocks):
        channels = x.shape[1]
        for i, layer in enumerate(block):
            weight = a_tensor(f"the weight of block {n}, layer {i + 1}", layer[0])
            if weight.dim() != 4 or 0 in weight.shape:
                raise ValueError(
                    f"the weight of block {n}, layer {i + 1} must have the shape [out, in, size, "
                    f"size] and not be empty, but has the shape {list(weight.shape)}"
                )
            out, size = weight.shape[0], weight.shape[-1]
            shapes = ((out, channels, size, size), *[(out,)] * 4)
            for what, shape, tensor in zip(ConvLayer._fields, shapes, layer, strict=True):
                if tensor is None:
                    continue
                name = f"{what} of block {n}, layer {i + 1}"
                a_tensor(name, tensor)
                if tuple(tensor.shape) != shape or size not in (1, 3):
                    raise ValueError(
                        f"{name} must have the shape {list(shape)} (size 1 or 3) to match x and "
                        f"the layers before it, not {list(tensor.shape)}"
                    )
                dtype = kind(name, tensor, x, dtype)
            if (layer[3] is None) != (layer[4] is None):
                raise ValueError(f"block {n}, layer {i + 1}: give both mean and variance, or none")
            if layer[3] is None and x.shape[0] * x.shape[2] * x.shape[3] < 2:
                raise ValueError(
                    "x must have more than one value per channel to be normalized by its batch, "
                    f"but has the shape {list(x.shape)}"
                )
            channels = out
        if channels != x.shape[1]:
            raise ValueError(
                f"block {n} returns {channels} channels for {x.shape[1]} channels of x; a block "
                "must keep their number"
            )
