"""Random stages, options, tensors and ways to call: equal to plain PyTorch, or refused by name.

    pytest tests/fuzz                      300 cases, always the same ones
    RESODE_FUZZ=5000 pytest tests/fuzz     so many, others each time

A failure prints the smallest case that fails, the seed (pytest --hypothesis-seed=…) and a line
``@reproduce_failure(…)`` to put above the test. If a case ends the process, run again with the
seed, ``-s`` and ``--hypothesis-verbosity=verbose``: the last case printed is the one.
"""

from __future__ import annotations

import copy
import os
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fuzz_arguments import FUNCTIONS, WRONG_OPTIONS, StrangeCall, check_strange
from fuzz_checks import DIGITS, Snapshot, assert_equal, assert_own, full_of_nans
from fuzz_networks import MODULES, Fused, Modules
from fuzz_tensors import DTYPES, LAYOUTS, LEAVES, STRANGE, Leaf
from fuzz_transforms import TRANSFORMS
from fuzz_wrappers import (
    COMMON,
    COMPILED,
    SAME_AS_PLAIN,
    Inputs,
    numbers,
    plainly,
)
from helpers import PRECISE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import resode_kernels as rk
from resode_kernels.backends import cpp
from resode_kernels.options import BITS

WRAPPERS = {**COMMON, **TRANSFORMS, **COMPILED}
CASES = int(os.environ.get("RESODE_FUZZ", "300"))


def share(of_cases: float) -> settings:
    return settings(
        max_examples=max(1, round(of_cases * CASES)),
        derandomize="RESODE_FUZZ" not in os.environ,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class Case:
    network: Any
    wrapper: str
    dtype: str
    """Of the state."""
    layout: str = "contiguous"
    role: str = "leaf"
    cotangent: str = "contiguous"
    rows: tuple[int, ...] = (2,)
    special: float = 0.0
    """An entry of the state: an ordinary number, infinity or NaN."""
    seed: int = 0

    def inputs(self, dtype: torch.dtype) -> Inputs:
        state = []
        for i in range(getattr(self.network, "states", 1)):
            value = numbers(self.network.shape(self.rows), self.seed + i).to(dtype)
            if self.special and value.numel():
                value.view(-1)[-1] = self.special
            state.append(Leaf(value, self.layout, self.role))
        arguments = {}
        if getattr(self.network, "kind", "") == "scaled":
            for i, name in enumerate(("scale", "bias")):
                value = numbers((4,), self.seed + 5 + i).to(dtype)
                arguments[name] = Leaf(value, "contiguous", ("leaf", "frozen")[self.seed % 2])
        return Inputs(state, arguments, self.cotangent, len(state) > 1)

    def may_be_refused(self) -> bool:
        network = self.network
        if isinstance(network, Fused):
            mixed = (self.dtype == "float64") != (network.dtype == "float64")
            kept_in_16_bits = network.options.get("stream") == "input" and "16" in self.dtype
            return mixed or kept_in_16_bits
        return False


def check(case: Case) -> None:
    network = case.network
    is_fused = isinstance(network, Fused)
    torch.manual_seed(case.seed)
    module = network.module()
    twin = copy.deepcopy(module)
    options = network.options
    exact = (
        "reverse" not in options
        or options.get("order") == PRECISE["order"]
        or options["step"] == TINY
        or options.get("bits") == [None] * network.depth
    )
    if is_fused:
        twin.double()
    reference = network.plain(twin)
    if not exact:  # compared with the same rule
        reference = twin
        (twin.stage if network.functional else twin).configure(backend="reference")
    inputs, same = case.inputs(DTYPES[case.dtype]), case.inputs(DTYPES[case.dtype])
    if is_fused:
        for leaf in same.state:
            leaf.leaf = leaf.leaf.detach().double().requires_grad_(leaf.leaf.requires_grad)
    wrapper = WRAPPERS[case.wrapper]
    torch.manual_seed(case.seed)
    try:
        expected = (plainly if case.wrapper in SAME_AS_PLAIN else wrapper)(reference, same)
    except Exception as error:
        expected, impossible = {}, error
    else:
        impossible = None
    generator = torch.get_rng_state()

    before = Snapshot(module, inputs)
    torch.manual_seed(case.seed)
    try:
        with full_of_nans():
            got = wrapper(module, inputs)
    except Exception as error:
        if str(error) != str(impossible):
            assert_own(error)
        before.assert_unchanged()
        if impossible is None and not case.may_be_refused():
            raise
        return
    before.assert_unchanged()
    if impossible is not None:  # a block that changes its buffers in place can only be replayed
        assert not is_fused, f"plain PyTorch raises {impossible!r}"
        return
    assert torch.equal(torch.get_rng_state(), generator), "the random generator has moved"
    dtypes = [DTYPES[case.dtype], DTYPES[network.dtype]]
    if case.wrapper == "autocast" and not is_fused:
        dtypes.append(torch.bfloat16)
    digits = max(DIGITS[dtype] for dtype in dtypes)
    got, expected = (
        {name.removeprefix("stage."): t for name, t in results.items()}
        for results in (got, expected)
    )
    assert_equal(got, expected, digits, overflows=bool(case.special))
    for t in (t for name, t in got.items() if name[0] == "y"):
        assert t is not None
        assert t.dtype == DTYPES[case.dtype]
    # torch's checkpoint stops early when it runs again, and so moves some statistics only once.
    if case.wrapper != "checkpoint" and not (network.functional and is_fused):
        state, buffers = dict(twin.named_buffers()), dict(module.named_buffers())
        assert_equal(buffers, state, digits, bool(case.special))  # type: ignore[arg-type]


# --------------------------------------------------------------------------------- strategies

some = st.sampled_from
depths = st.integers(1, 6)
BACKENDS = ["auto", "reference", *(["cpp"] if cpp.unavailable() is None else [])]
schemes = some(["euler", "heun"])
TINY = 5e-4
"""A step with which the error of 16 bits is smaller than all that counts."""
EXACT: list[dict[str, Any]] = [
    {"backward": "stored"},
    {"backward": "checkpoint"},
    {"backward": "checkpoint", "anchor_every": 2},
    {"backward": "checkpoint", "anchor_every": 3},
    {"backward": "checkpoint", "anchor_every": 9},
    {"backward": "checkpoint", "step": -0.2},
    {"backward": "checkpoint", "step": 1.0},
    PRECISE,
    {**PRECISE, "anchor_every": 2},
    {"reverse": "recorded", "bits": 16, "step": TINY},
    {"reverse": "recorded", "bits": 16, "step": TINY, "anchor_every": 2},
]
RULES: list[dict[str, Any]] = [
    {"reverse": "paper"},
    {"reverse": "refined", "order": 1},
    {"reverse": "refined", "order": 3},
    *({"reverse": "predicted", "order": order} for order in (1, 2, 3)),
    {"reverse": "paper", "anchor_every": 2},
    {"reverse": "predicted", "order": 2, "anchor_every": 3},
    {"reverse": "recorded"},
    {"reverse": "recorded", "anchor_every": 2},
]
RARE = 60
"""One case in so many compiles, which takes a second."""


@st.composite
def wrappers(draw: st.DrawFn) -> str:
    if draw(st.integers(0, RARE - 1)) == RARE - 1:
        return draw(some(list(COMPILED)))
    return draw(some([*COMMON, *TRANSFORMS]))


@st.composite
def bits_of(draw: st.DrawFn, depth: int, all_of: bool) -> Any:
    """A number of bits or one for each step. Unless ``all_of`` so many that it makes no difference
    when a rounding to float32 or less decides a code."""
    number = some(BITS if all_of else (12, 16))
    kept = st.lists(st.none(), min_size=depth, max_size=depth)
    return draw(number | st.lists(number | st.none(), min_size=depth, max_size=depth) | kept)


@st.composite
def fused_cases(draw: st.DrawFn) -> Case:
    wrapper = draw(wrappers())
    depth, dtype = draw(depths), draw(some(list(DTYPES)))
    state_dtype = dtype if draw(st.integers(0, 3)) else draw(some(list(DTYPES)))
    options = dict(draw(some(EXACT)))
    if wrapper in COMMON and draw(st.booleans()):
        options = {**draw(some(RULES)), "step": draw(some([0.05, 0.02]))}
        if options["reverse"] == "recorded":
            options["bits"] = draw(bits_of(depth, {dtype, state_dtype} == {"float64"}))
    options |= {"scheme": draw(schemes), "backend": draw(some(BACKENDS))}
    if draw(st.integers(0, 9)) == 9:
        options["stream"] = "input"
    if options["backend"] != "cpp":  # which has none yet
        options["kinks"] = draw(st.booleans())
    network = Fused(
        kind=draw(some(["mlp", "mlp", "linear", "basic", "bottleneck"])),
        depth=depth,
        dtype=dtype,
        options=options,
        tied=draw(st.booleans()),
        bias=draw(st.booleans()),
        functional=draw(st.booleans()),
        training=draw(st.booleans()),
        activation=draw(some(list(rk.functional.ACTIVATIONS))),
        layouts=tuple(draw(st.lists(some(list(LAYOUTS)), min_size=1, max_size=3))),
        frozen=draw(st.none() | st.integers(0, 3)),
    )
    if network.is_conv and "order" in options:  # batch norm makes the slopes of f large
        options["step"] = 0.01
    special = 0.0
    unreported = "backward" in options or options["reverse"] == "recorded"
    if unreported and draw(st.integers(0, 15)) == 15:
        special = draw(some([float("inf"), float("-inf"), float("nan")]))
    if network.is_stateful and wrapper in (*TRANSFORMS, "threads"):
        network = replace(network, functional=True)
    return draw(cases(network, wrapper, state_dtype, special))


@st.composite
def module_cases(draw: st.DrawFn) -> Case:
    wrapper = draw(wrappers())
    options, depth = {**draw(some(EXACT)), "scheme": draw(schemes)}, draw(depths)
    if draw(st.booleans()):
        options["stream"] = draw(some(["float32", "input"]))
    if options.get("reverse") == "recorded" and draw(st.booleans()):
        options |= {"bits": [None] * depth, "step": 0.3}
    dtype = draw(some(list(DTYPES)))
    network = Modules(
        kind=draw(some(list(MODULES))),
        depth=depth,
        dtype=dtype,
        options=options,
        tied=draw(st.booleans()),
        functional=draw(st.booleans()),
        training=draw(st.booleans()),
        shared=draw(st.integers(0, 4)) == 4,
    )
    swapped = (
        wrapper in TRANSFORMS or wrapper == "functional_call"
    )  # torch unties shared layers there
    if network.kind != "checkpoint inside":  # which is refused with kinks
        options["kinks"] = draw(st.booleans())
    if network.kind == "pair" or swapped:
        network = replace(network, shared=False)
    if network.kind == "checkpoint inside" and (
        wrapper == "functional_call" or wrapper.startswith("saved")
    ):  # torch's checkpoint runs again with the module's own parameters, or what the hooks made
        wrapper = "plain"
    if "counter" in network.kind and ("checkpoint" in wrapper or wrapper == "save_on_cpu"):
        wrapper = "plain"  # torch computes with a counter that has counted on
    if wrapper == "saved strided":  # of which torch's own batch norm computes wrong gradients
        wrapper = "saved copies"
    if wrapper == "threads" and (network.is_random or network.is_stateful):
        wrapper = "plain"
    return draw(cases(network, wrapper, dtype, 0.0))


@st.composite
def cases(draw: st.DrawFn, network: Any, wrapper: str, dtype: str, special: float) -> Case:
    compiled = wrapper in COMPILED  # whose AOT autograd takes no subclass that it has not seen
    layouts = list(LAYOUTS)
    if compiled and isinstance(network, Fused):  # torch 2.13 takes none at all
        layouts.remove("subclass")
    return Case(
        network,
        wrapper,
        dtype,
        layout=draw(some(layouts)),
        role=draw(some(LEAVES)),
        cotangent="contiguous" if compiled else draw(some(list(LAYOUTS))),
        rows=draw(some([(2,), (1,), (5,), (2, 3), (), (0,), (2, 0), (17,)])),
        special=special,
        seed=draw(st.integers(0, 10**6)),
    )


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@share(0.45)
@given(fused_cases())
def test_fused_stages_are_right_however_they_are_called(case: Case) -> None:
    check(case)


@share(0.35)
@given(module_cases())
def test_stages_of_modules_are_right_however_they_are_called(case: Case) -> None:
    check(case)


@st.composite
def strange_calls(draw: st.DrawFn) -> StrangeCall:
    options = dict(draw(some(EXACT[:3])))
    what = draw(some(list(STRANGE)))
    layouts = ["contiguous", "transposed", "strided", "subclass"]
    if what != "two tensors":  # torch takes such a tensor of lazy views for its negative
        layouts.append("negative")
    return StrangeCall(
        function=draw(some(list(FUNCTIONS))),
        slot=draw(st.integers(0, 10)),
        what=what,
        layout=draw(some(layouts)),
        dtype=draw(some(["float64", "float32", "bfloat16"])),
        option=draw(some(WRONG_OPTIONS)) if draw(st.integers(0, 3)) == 3 else None,
        options={**options, "backend": draw(some(BACKENDS))},
        grad=draw(st.booleans()),
        seed=draw(st.integers(0, 10**6)),
    )


@share(0.2)
@given(strange_calls())
def test_strange_arguments_are_right_or_refused(call: StrangeCall) -> None:
    check_strange(call)
