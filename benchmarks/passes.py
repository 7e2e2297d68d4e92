"""The traffic of a stage's forward and reverse pass on a GPU that need not be there: of the
depth-fused kernels, of standard backprop, and the least that a pass can do with.

The kernels' plan is the one they would make on that GPU; the launches of small problems with the
same tile are counted (``traffic.py``) and extended to the real size (``affine.py``). Standard
backprop is the plain loop of ``networks.py`` with autograd, in the dtype of the weights, counted
and extended in the same way. No anchors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from affine import Model, Size
from networks import Config, StackedNetwork, make_network
from traffic import Launch, counting

import resode_kernels as rk
from resode_kernels.backends.triton import fused
from resode_kernels.backends.triton.device import Device
from resode_kernels.backends.triton.form import Form
from resode_kernels.backends.triton.plan import Plan, form_of, plan_of
from resode_kernels.backends.triton.tiles import tiles_of
from resode_kernels.problem import Problem, stream_dtype


@dataclass(frozen=True)
class Case:
    """A stage, a batch and a reverse rule."""

    stage: str = "mlp"
    dim: int = 64
    hidden: int = 64
    depth: int = 256
    batch: int = 65536
    dtype: torch.dtype = torch.float32
    """Of x and of the weights."""
    rule: str = "refined"
    order: int | None = None
    scheme: str = "euler"
    tied: bool = False
    activation: str = "tanh"

    def problem(self, device: str = "cpu") -> Problem:
        how = rk.How(scheme=self.scheme, reverse=self.rule, order=self.order)
        blocks = 1 if self.tied else how.blocks(self.depth)
        d, m = self.dim, self.hidden
        shapes: tuple[tuple[int, ...], ...] = ((m, d), (m,), (d, m), (d,))
        if self.stage == "linear":
            shapes = ((d, d),)
        parameters = tuple(
            torch.zeros((blocks, *shape), dtype=self.dtype, device=device) for shape in shapes
        )
        activation = self.activation if self.stage == "mlp" else "identity"
        return Problem(self.stage, activation, parameters, how.method(self.depth))

    @property
    def first_steps(self) -> int:
        """Those at the end of the stage that are launches of their own in the reverse pass."""
        method = self.problem("meta").method
        return method.order if method.rule == "predicted" else 0


# ------------------------------------------------------------------------------------- kernels


def plan(case: Case, device: Device, *, reverse: bool) -> Plan | None:
    """The kernels' own, with their default tile and TF32 allowed. None: too wide for them."""
    problem = case.problem("meta")
    with _tf32():
        form = form_of(problem)
    tiles = tiles_of(form, device, case.dtype.itemsize, reverse)
    return plan_of(problem, device, case.batch, form, tiles[0]) if tiles else None


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def kernels(case: Case, plan: Plan, *, reverse: bool) -> dict[str, Launch]:
    """Of the kernels in a pass, by name."""
    of_any_size = replace(case, batch=0, depth=1)
    return _kernels_model(of_any_size, plan.form, reverse).at(size(case, plan, reverse=reverse))


def size(case: Case, plan: Plan, *, reverse: bool) -> Size:
    tiles = -(-case.batch // plan.form.rows)
    if not reverse:
        return Size(case.batch, case.depth, tiles, programs=tiles, launches=1, longest=case.depth)
    x = torch.empty(case.batch, case.dim, device="meta")
    launches = list(fused.reconstructing(case.problem("meta"), plan, x, x.new_empty(0)))
    alone = case.first_steps
    if len(launches) <= alone:
        raise ValueError(f"depth {case.depth} is too small: {case.rule} only begins there")
    return Size(
        case.batch,
        case.depth - alone,
        tiles,
        plan.programs,
        len(launches) - alone,
        max(steps.end - steps.begin for steps in launches),
    )


def count_kernels(case: Case, plan: Plan, *, reverse: bool) -> list[Launch]:
    """The launches of a pass, run in full, with the casts of ``autograd.py`` around it."""
    problem, shape = case.problem(), (case.batch, case.dim)
    x = torch.zeros(shape, dtype=case.dtype)
    stream = stream_dtype(case.dtype)
    state, no_anchors = torch.zeros(shape, dtype=stream), torch.empty((0, *shape), dtype=stream)
    with counting() as launches:
        result = torch.empty_like(state)
        if reverse:
            gradients = [torch.empty_like(p) for p in problem.parameters if p is not None]
            fused.reverse(problem, plan, state, no_anchors, x.to(stream), [result, *gradients])
        else:
            fused.forward(problem, plan, x.to(stream), result, no_anchors)
        result.to(case.dtype)
    return launches


@functools.cache
def _kernels_model(case: Case, form: Form, reverse: bool) -> Model:
    """From tiles of full size, but few of them. Every program of the reverse pass has two at least,
    or else it would not come back to its partial sums."""
    rows = form.rows
    samples = []
    batches = [(2 * rows, 1), (2 * rows - rows // 2, 1), (3 * rows, 1), (4 * rows, 2)]
    for batch, programs in batches if reverse else batches[:3]:
        for steps, longest in [(1, 1), (2, 2), (2, 1)] if reverse else [(1, 1), (2, 2)]:
            depth = steps + case.first_steps if reverse else steps
            small = replace(case, batch=batch, depth=depth)
            plan = Plan(batch, form, {}, programs, longest)
            launches = count_kernels(small, plan, reverse=reverse)
            samples.append((size(small, plan, reverse=reverse), launches))
    if reverse:
        return Model(samples, along=("launches", "steps"), across=("rows", "tiles", "programs"))
    return Model(samples, along=("steps",), across=("rows", "tiles"))


# ----------------------------------------------------------------------------- standard backprop


def standard(case: Case, *, reverse: bool) -> dict[str, Launch]:
    """Of the torch operations in a pass, by name."""
    model = _standard_models(replace(case, batch=0, depth=1))[reverse]
    return model.at(Size(case.batch, case.depth, longest=case.depth))


def count_standard(case: Case) -> tuple[list[Launch], list[Launch]]:
    """The launches of the forward and of the backward pass, run in full."""
    network = make_network(
        Config(
            stage=case.stage,
            scheme=case.scheme,
            weights="tied" if case.tied else "independent",
            dim=case.dim,
            hidden=case.hidden,
            depth=case.depth,
            batch=case.batch,
            activation=case.activation,
        )
    )
    assert isinstance(network, StackedNetwork)
    network.layers = [
        [p.detach().to(case.dtype).requires_grad_() for p in layer] for layer in network.layers
    ]
    x = network.x.to(case.dtype).requires_grad_()
    cotangent = network.cotangent.to(case.dtype)
    with counting() as forward:
        y = network.steps(0, case.depth, x)
    with counting() as backward:
        y.backward(cotangent)
    return forward, backward


@functools.cache
def _standard_models(case: Case) -> tuple[Model, Model]:
    smalls = [replace(case, batch=batch, depth=depth) for batch in (16, 32) for depth in (2, 3)]
    sizes = [Size(small.batch, small.depth, longest=small.depth) for small in smalls]
    forwards, backwards = zip(*map(count_standard, smalls), strict=True)
    forward, backward = (
        Model(list(zip(sizes, counts, strict=True)), along=("steps",), across=("rows",))
        for counts in (forwards, backwards)
    )
    return forward, backward


# -------------------------------------------------------------------------------------- minimum


def minimum(case: Case, groups: int, *, reverse: bool) -> int:
    """Bytes of a pass that reads and writes the state (reverse: and the cotangent) once, in the
    stream's dtype, and the weights (reverse: and their gradients) once per group of tiles."""
    state = case.batch * case.dim * stream_dtype(case.dtype).itemsize
    weights = sum(p.nbytes for p in case.problem("meta").parameters if p is not None)
    return (4 if reverse else 2) * state + groups * (2 if reverse else 1) * weights
