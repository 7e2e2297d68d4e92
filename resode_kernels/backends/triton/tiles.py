"""The tiles of the depth-fused kernels, and which of them a problem may use on a device.

The default of every width is the largest that compiles without register spills on all targets, for
every scheme and rule; the others are there for ``tuning.py`` to try. With rows and chunk less than
the width all products of the reverse kernel share one layout (``blocks.py``).
"""

from __future__ import annotations

from .device import Device
from .form import Form, Tile

Tiles = dict[int, tuple[Tile, ...]]

# Of the reverse kernel, by the width of the state. Five states and more must fit the registers of
# a program, which ends at a width of 128.
REVERSE: Tiles = {
    16: (Tile(16, 16, 64), Tile(16, 16, 128)),
    32: (Tile(16, 16, 128), Tile(32, 16, 128)),
    64: (Tile(32, 32, 256), Tile(16, 32, 256), Tile(16, 16, 128)),
    128: (Tile(16, 16, 256), Tile(16, 32, 256)),
}
# Where matrix instructions take 64 rows at least: wgmma, tcgen05.
REVERSE_TALL: Tiles = {**REVERSE, 64: (Tile(64, 64, 256), *REVERSE[64])}
# Float32 products on NVIDIA's ordinary units hold their operands in registers, too.
REVERSE_SCALAR: Tiles = {width: REVERSE[width] for width in (16, 32)}
# The forward kernel holds two states.
FORWARD: Tiles = {
    width: (Tile(64, 32, 128), Tile(32, 32, 128), Tile(128, 32, 256)) for width in REVERSE
}


def tiles_of(form: Form, device: Device, element: int, reverse: bool) -> tuple[Tile, ...]:
    """Those that fit the device, the default first; none: the problem is too wide.

    element  bytes of a weight
    """
    scalar = element == 4 and form.precision == "ieee" and device.target.startswith("cuda")
    if not reverse:
        table = FORWARD
    elif scalar:
        table = REVERSE_SCALAR
    else:
        table = REVERSE_TALL if device.tensor_cores_of_64_rows else REVERSE
    fitting = (
        t for t in table.get(form.width, ()) if shared_bytes(t, form, element) <= device.shared
    )
    return tuple(fitting)


def shared_bytes(tile: Tile, form: Form, element: int) -> int:
    """At most what a kernel needs of shared memory: the weights of a chunk as loaded and as an
    operand, two states as operands, and a gradient on its way to memory."""
    columns = tile.chunk if form.block == "mlp" else form.width
    weights, states = 4 * columns * form.width, 2 * tile.rows * form.width
    return element * (weights + states) + 4 * columns * form.width
