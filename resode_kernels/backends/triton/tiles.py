"""The tiles of the depth-fused kernels, and which of them a problem may use on a device.

The default of every width compiles without register spills on all targets, for every rule
(benchmarks/results/gpu_resources.csv); the others are there for ``tuning.py`` to try. With rows and
chunk less than the width all products of the reverse kernel share one layout (``blocks.py``).
"""

from __future__ import annotations

from .device import Device
from .spec import KernelSpec, Tile

Tiles = dict[int, tuple[Tile, ...]]

# By the width of the state. The forward kernel holds two states, the reverse kernel five and more,
# which must fit the registers of a program.
FORWARD: Tiles = {
    16: (Tile(64, 32, 128), Tile(32, 32, 128)),
    32: (Tile(64, 32, 128), Tile(32, 32, 128)),
    64: (Tile(64, 32, 256), Tile(32, 32, 128)),
    128: (Tile(32, 32, 256), Tile(16, 32, 256)),
}
REVERSE: Tiles = {
    16: (Tile(16, 16, 64), Tile(16, 16, 128)),
    32: (Tile(16, 16, 128), Tile(16, 16, 64)),
    64: (Tile(32, 32, 256), Tile(16, 32, 256), Tile(16, 16, 128)),
    128: (Tile(16, 16, 256), Tile(16, 32, 256)),
}
# A step of Heun's scheme has two blocks.
REVERSE_HEUN: Tiles = {**REVERSE, 64: (Tile(16, 16, 256), Tile(16, 32, 256))}
# Products that do not run on NVIDIA's tensor cores hold their operands in registers as well.
REVERSE_SCALAR: Tiles = {16: (Tile(16, 16, 128),), 32: (Tile(16, 16, 256), Tile(16, 16, 128))}


def tiles_of(spec: KernelSpec, device: Device, element: int, reverse: bool) -> tuple[Tile, ...]:
    """The tiles that fit the device, the default first; empty if the problem is too wide.

    element  bytes of a weight
    """
    table = reverse_table(spec, device, element)
    if spec.width not in table:
        return ()
    choice = (table if reverse else FORWARD)[spec.width]
    return tuple(tile for tile in choice if shared_bytes(tile, spec, element) <= device.shared)


def reverse_table(spec: KernelSpec, device: Device, element: int) -> Tiles:
    """The tiles of the reverse kernel, up to the widest state that fits into the registers."""
    scalar = element == 4 and spec.precision == "ieee" and device.target.startswith("cuda")
    if spec.scheme == "euler":
        return REVERSE_SCALAR if scalar else REVERSE
    table, limit = (REVERSE_SCALAR, 16) if scalar else (REVERSE_HEUN, 64 if element == 4 else 128)
    return {width: tiles for width, tiles in table.items() if width <= limit}


def shared_bytes(tile: Tile, spec: KernelSpec, element: int) -> int:
    """An upper bound on a kernel's shared memory: weights as loaded and as operands, two states as
    operands, and a gradient before it is stored."""
    if spec.block == "mlp":
        weight, copies = tile.chunk * spec.width, 4
    else:
        weight, copies = spec.width * spec.width, 6 if spec.scheme == "heun" else 4
    return element * (copies * weight + 2 * tile.rows * spec.width) + 4 * weight
