"""The memory of a training step."""

from __future__ import annotations

import os

import torch

from ..stages import StackedStage
from ..states import parts
from .probe import Probe, saved_bytes
from .settings import Setting


def peak(probe: Probe, setting: Setting, held: int, block: int) -> int:
    """The peak of states and activations, see ``Measurement.memory``. ``held`` is what autograd
    holds between the passes, ``block`` what one evaluation of a block saves (``block_bytes``). In
    addition the reverse pass needs the cotangent. Rules that reconstruct states need the state, p,
    the history and the activations of one step. ``recorded`` needs the state, which is p, and the
    activations; its codes, scales and kept states are among what is held. Exact ones need a segment
    of states, and the activations of one step. Stages with stacked parameters work on tiles of
    rows, whose activations and p do not count."""
    stage = probe.stage
    state: int = sum(t.nbytes for t in parts(probe.in_stream(probe.x)))
    method = setting.method(stage)
    if setting.backward == "stored" and stage.runs_modules:
        return held + state  # autograd keeps everything
    evaluations = 2 if method.scheme == "heun" else 1
    in_tiles = isinstance(stage, StackedStage)
    activations = 0 if in_tiles else evaluations * block
    if method.reverse_rule == "exact":
        return held + state + state * method.anchor_every + activations
    if method.bits:
        return held + 2 * state + activations
    history = method.order if method.reverse_rule == "predicted" else 0
    return held + (2 + (not in_tiles) + history) * state + activations


def block_bytes(probe: Probe) -> int:
    """The bytes that autograd saves for one evaluation of a block, without its parameters."""
    with probe.untouched() as named, torch.enable_grad():
        known = {t.untyped_storage().data_ptr() for t in named.values()}
        with saved_bytes(known) as held:
            probe.evaluate(0, probe.in_stream(probe.x))
    return sum(held.values())


def stored_fits(probe: Probe, block: int) -> bool:
    """Whether standard backprop would take less than half of the free memory, if autograd saves
    ``block`` bytes for every evaluation."""
    stage = probe.stage
    evaluations = 2 if stage.options.scheme == "heun" else 1
    state: int = sum(t.nbytes for t in parts(probe.in_stream(probe.x)))
    estimate = stage.depth * evaluations * (block + state)
    device = parts(probe.x)[0].device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return estimate < free / 2
    try:
        return estimate < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    except (ValueError, OSError, AttributeError):  # not every platform has these
        return False
