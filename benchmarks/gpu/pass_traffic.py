"""The traffic of a stage's forward and reverse pass on a given GPU: that of the kernels, that of
standard backprop, and the least that a pass needs. No GPU has to be there.

The depth-fused kernels have the plan that they would make on that GPU. The launches of small
problems with the same tile are counted (``traffic.py``) and extrapolated to the real size
(``extrapolation.py``). A convolutional stage has no plan: it runs by layers, PyTorch's convolutions
and the kernels between them, in the same way on every GPU. Its rows are the positions of all
images, channels-last. Its batch norms are in training mode, and the update of their running
statistics is left out. Standard backprop is the plain loop of ``lib/networks`` with autograd, in
the dtype of the weights, counted and extrapolated in the same way. There are no anchors, and no
test whether states are finite.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from extrapolation import PassSize, TrafficModel
from networks import Config, ConvNetwork, StackedNetwork, make_network
from torch import Tensor
from traffic import Launch, counting

from resode_kernels.backends.contract import ForwardIO, ReverseIO
from resode_kernels.backends.triton import fused, layerwise, normalization
from resode_kernels.backends.triton.device import Device
from resode_kernels.backends.triton.plan import Plan, plan_of, spec_of
from resode_kernels.backends.triton.rows import TILE, Rows
from resode_kernels.backends.triton.spec import KernelSpec
from resode_kernels.backends.triton.tiles import tiles_of
from resode_kernels.options import Options
from resode_kernels.problem import Kept, Problem
from resode_kernels.states import stream_dtype


@dataclass(frozen=True)
class Case:
    """A stage, a batch and a reverse rule."""

    stage: str = "mlp"
    dim: int = 64
    hidden: int = 64
    depth: int = 256
    batch: int = 65536
    size: int = 1
    """Height and width of images: conv only, as ``hidden`` is mlp only."""
    dtype: torch.dtype = torch.float32
    """Of x and of the weights."""
    rule: str = "refined"
    order: int | None = None
    scheme: str = "euler"
    tied: bool = False
    activation: str = "tanh"

    def problem(self, device: str = "cpu") -> Problem:
        options = Options(scheme=self.scheme, reverse=self.rule, order=self.order)
        blocks = 1 if self.tied else options.blocks(self.depth)
        d, m = self.dim, self.hidden
        if self.stage == "conv":
            weight = torch.zeros((d, d, 3, 3), dtype=self.dtype, device=device)
            layer = (weight.to(memory_format=torch.channels_last), *weight.new_zeros(2, d))
            layers = 2 * (*layer, None, None) * blocks
            return Problem("conv", self.activation, layers, options.method(self.depth), 2, 1e-5)
        shapes: tuple[tuple[int, ...], ...] = ((m, d), (m,), (d, m), (d,))
        if self.stage == "linear":
            shapes = ((d, d),)
        parameters = tuple(
            torch.zeros((blocks, *shape), dtype=self.dtype, device=device) for shape in shapes
        )
        activation = self.activation if self.stage == "mlp" else "identity"
        return Problem(self.stage, activation, parameters, options.method(self.depth))

    def zeros(self, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        """A batch."""
        if self.stage != "conv":
            return torch.zeros(self.batch, self.dim, dtype=dtype, device=device)
        shape = (self.batch, self.dim, self.size, self.size)
        images = torch.zeros(shape, dtype=dtype, device=device)
        return images.contiguous(memory_format=torch.channels_last)

    @property
    def rows(self) -> int:
        """Of the batch: positions of images."""
        return self.batch * self.size**2

    @property
    def of_any_size(self) -> Case:
        """What it has in common with smaller cases."""
        return replace(self, batch=0, depth=1, size=2 if self.stage == "conv" else 1)

    @property
    def first_steps(self) -> int:
        """Those at the end of the stage that are steps of their own kind in the reverse pass."""
        method = self.problem("meta").method
        return method.order if method.reverse_rule == "predicted" else 0


# ------------------------------------------------------------------------------------- kernels


def plan_on(case: Case, device: Device, *, reverse: bool) -> Plan | None:
    """The plan of the kernels, with their default tile and TF32 allowed. None: the stage runs by
    layers."""
    if case.stage == "conv":
        return None
    problem = case.problem("meta")
    with _tf32():
        spec = spec_of(problem)
    tiles = tiles_of(spec, device, case.dtype.itemsize, reverse)
    return plan_of(problem, device, case.batch, spec, tiles[0]) if tiles else None


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def kernel_traffic(case: Case, plan: Plan | None, *, reverse: bool) -> dict[str, Launch]:
    """Of the kernels in a pass, by name. If the stage runs by layers, they include PyTorch's."""
    if plan is None:
        model = _layers_model(case.of_any_size, reverse)
    else:
        model = _kernels_model(case.of_any_size, plan.spec, reverse)
    return model.at(pass_size(case, plan, reverse=reverse))


def pass_size(case: Case, plan: Plan | None, *, reverse: bool) -> PassSize:
    if reverse and case.depth <= case.first_steps:
        raise ValueError(f"depth {case.depth} is too small: {case.rule} only begins there")
    if plan is None:  # tiles, and programs that sum over the batch, of every launch
        images = Rows.of(case.zeros(case.dtype, "meta"))
        tiles, programs = images.grid[0], normalization._partials(images)
        return PassSize(case.rows, case.depth, tiles, programs, longest=case.depth)
    tiles = -(-case.batch // plan.spec.rows)
    if not reverse:
        return PassSize(
            case.batch, case.depth, tiles, programs=tiles, launches=1, longest=case.depth
        )
    x = torch.empty(case.batch, case.dim, device="meta")
    launches = list(fused.reconstructing(case.problem("meta"), plan, x, x.new_empty(0)))
    alone = case.first_steps
    return PassSize(
        case.batch,
        case.depth - alone,
        tiles,
        plan.programs,
        len(launches) - alone,
        max(steps.end - steps.begin for steps in launches),
    )


def count_kernels(
    case: Case, plan: Plan | None, *, reverse: bool, known: dict[Any, Launch] | None = None
) -> list[Launch]:
    """The launches of a pass, run in full (unless ``known``, see ``counting``), with the casts of
    ``autograd.py`` around it."""
    problem, stream = case.problem(), stream_dtype(case.dtype)
    x, state = case.zeros(case.dtype), case.zeros(stream)
    nothing = Kept(state.new_empty((0, *state.shape)))
    with counting(known) as launches:
        result = torch.empty_like(state)
        if reverse:
            parameters = problem.parameters
            gradients = [None if p is None else torch.empty_like(p) for p in parameters]
            io = ReverseIO(state, nothing, x.to(stream), [result, *gradients], None)
            if plan is None:
                layerwise.LAYERWISE.reverse(problem, io)
            else:
                fused.reverse(problem, plan, io)
        else:
            shape = problem.statistics if plan is None else (0,)
            forward = ForwardIO(x.to(stream), result, nothing, state.new_zeros(shape))
            if plan is None:
                layerwise.LAYERWISE.forward(problem, forward)
            else:
                fused.forward(problem, plan, forward)
        result.to(case.dtype)
    return launches


@functools.cache
def _kernels_model(case: Case, spec: KernelSpec, reverse: bool) -> TrafficModel:
    """From tiles of full size, but few of them. Every program of the reverse pass has two at least,
    or else it would not come back to its partial sums."""
    rows = spec.rows
    samples = []
    batches = [(2 * rows, 1), (2 * rows - rows // 2, 1), (3 * rows, 1), (4 * rows, 2)]
    for batch, programs in batches if reverse else batches[:3]:
        for steps, longest in [(1, 1), (2, 2), (2, 1)] if reverse else [(1, 1), (2, 2)]:
            depth = steps + case.first_steps if reverse else steps
            small = replace(case, batch=batch, depth=depth)
            plan = Plan(spec, {}, programs, longest)
            launches = count_kernels(small, plan, reverse=reverse)
            samples.append((pass_size(small, plan, reverse=reverse), launches))
    if reverse:
        return TrafficModel(
            samples, along=("launches", "steps"), across=("rows", "tiles", "programs")
        )
    return TrafficModel(samples, along=("steps",), across=("rows", "tiles"))


@functools.cache
def _layers_model(case: Case, reverse: bool) -> TrafficModel:
    """From few tiles of full size, whole ones and a half, and few programs: the reductions' number
    of programs, fixed on a GPU, is one of the variables. There are two of both at least, or else no
    launch would come back to the parameters of its channels. A stage of one step does without
    a product, as h = 1: what is predicted for it is a bound."""
    of_full_tiles = Rows.of(replace(case, batch=TILE).zeros(case.dtype, "meta"))
    positions, columns = of_full_tiles.tile[0], of_full_tiles.grid[1]
    samples = []
    known: dict[Any, Launch] = {}  # steps are alike
    for half_tiles, programs in [(4, 2), (3, 2), (6, 2), (6, 3)]:
        for steps in (2, 3):
            batch = half_tiles * positions // 2 // case.size**2
            small = replace(case, batch=batch, depth=steps + case.first_steps)
            with patch.object(normalization, "PROGRAMS", programs * columns):
                launches = count_kernels(small, None, reverse=reverse, known=known)
                samples.append((pass_size(small, None, reverse=reverse), launches))
    return TrafficModel(samples, along=("steps",), across=("rows", "tiles", "programs"))


# ----------------------------------------------------------------------------- standard backprop


def standard_traffic(case: Case, *, reverse: bool) -> dict[str, Launch]:
    """Of the torch operations in a pass, by name."""
    model = _standard_models(case.of_any_size)[reverse]
    return model.at(PassSize(case.rows, case.depth, longest=case.depth))


def count_standard(case: Case) -> tuple[list[Launch], list[Launch]]:
    """The launches of the forward and of the backward pass, run in full."""
    network = make_network(
        Config(
            stage=case.stage,
            scheme=case.scheme,
            weights="tied" if case.tied else "independent",
            dim=case.dim,
            hidden=case.hidden if case.stage == "mlp" else case.dim,
            depth=case.depth,
            batch=case.batch,
            size=case.size,
            activation=case.activation,
        )
    )
    if isinstance(network, ConvNetwork):
        network.blocks_channels_last.to(case.dtype)
    else:
        assert isinstance(network, StackedNetwork)
        network.layers = [
            [p.detach().to(case.dtype).requires_grad_() for p in layer] for layer in network.layers
        ]
    x, cotangent = case.zeros(case.dtype).requires_grad_(), case.zeros(case.dtype)
    with counting() as forward:
        y = network.plain_loop(0, case.depth, x)
    with counting() as backward:
        y.backward(cotangent)
    return forward, backward


@functools.cache
def _standard_models(case: Case) -> tuple[TrafficModel, TrafficModel]:
    smalls = [replace(case, batch=batch, depth=depth) for batch in (16, 32) for depth in (2, 3)]
    sizes = [PassSize(small.rows, small.depth, longest=small.depth) for small in smalls]
    forwards, backwards = zip(*map(count_standard, smalls), strict=True)
    forward, backward = (
        TrafficModel(list(zip(sizes, counts, strict=True)), along=("steps",), across=("rows",))
        for counts in (forwards, backwards)
    )
    return forward, backward


# -------------------------------------------------------------------------------------- minimum


def minimum_bytes(case: Case, groups: int, *, reverse: bool) -> int:
    """Bytes of a pass that reads and writes the state (reverse: and the cotangent) once, in the
    stream's dtype, and the weights (reverse: and their gradients) once per group of tiles."""
    state = case.rows * case.dim * stream_dtype(case.dtype).itemsize
    weights = sum(p.nbytes for p in case.problem("meta").parameters if p is not None)
    return (4 if reverse else 2) * state + groups * (2 if reverse else 1) * weights
