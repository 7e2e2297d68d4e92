"""The quantiser of recorded increments: the reference is what its formulas say, and the C++ kernels
are what the reference is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import (
    decode_by_kernels,
    each_instruction_set,
    encode,
    encode_by_kernels,
    off_bound,
    rotated,
    spread,
)
from torch import Tensor

from resode_kernels import recording
from resode_kernels.backends import cpp
from resode_kernels.options import BITS
from resode_kernels.recording import GROUP, Increment

ENCODERS = [encode, pytest.param(encode_by_kernels, marks=pytest.mark.needs_cpp)]
DTYPES = [torch.float32, torch.float64]
KINDS = ("normal", "outlier", "sparse", "constant", "one sign", "quarters", "wide range")


@st.composite
def increments(draw: st.DrawFn, dtype: torch.dtype | None = None) -> Tensor:
    """[rows, row], of any magnitude from denormal numbers on; some groups are zero."""
    dtype = dtype or draw(st.sampled_from(DTYPES))
    shape = draw(st.integers(1, 6)), draw(st.integers(1, 130))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    v = torch.randn(shape, dtype=torch.float64, generator=generator)
    match draw(st.sampled_from(KINDS)):
        case "outlier":
            v[0, draw(st.integers(0, shape[1] - 1))] *= 1e4
        case "sparse":
            v *= torch.rand(shape, generator=generator) < 0.1
        case "constant":
            v = torch.ones_like(v)
        case "one sign":
            v = v.abs()
        case "quarters":
            v = (4 * v).round() / 4
        case "wide range":
            v *= 10 ** (4 * torch.randn(shape, dtype=torch.float64, generator=generator))
    smallest = -45 if dtype == torch.float32 else -310
    v *= 10.0 ** draw(st.integers(-30, 30) | st.integers(smallest, 30))
    v = v.clamp(-1e30, 1e30)
    for g in draw(st.sets(st.integers(0, recording.groups(shape[1]) - 1))):
        v[draw(st.integers(0, shape[0] - 1)), g * GROUP : (g + 1) * GROUP] = 0
    return v.to(dtype)


def by_group(v: Tensor) -> Tensor:
    """[rows, groups, 32], ragged ends filled with zeros."""
    return torch.nn.functional.pad(v, (0, -v.shape[1] % GROUP)).unflatten(-1, (-1, GROUP))


def check(v: Tensor, bits: int, quantised: Tensor, increment: Increment) -> None:
    w, q = rotated(v), rotated(quantised)
    assert ((q - w).abs() <= off_bound(increment.scales, v.shape[1], bits, v.dtype)).all()
    largest, scales = by_group(w).abs().amax(-1), increment.scales.double()
    slack = 4 * torch.finfo(v.dtype).eps
    zero = scales == 0
    assert (largest[zero] <= (1 + slack) * recording.SMALLEST).all()
    assert (scales >= (1 - slack) * largest)[~zero].all()
    assert (scales <= (1 + 2**-7) * (1 + slack) * largest)[~zero].all()
    assert (quantised[spread(increment.scales, v.shape[1]) == 0] == 0).all()


@pytest.mark.parametrize("bits", BITS)
@given(v=increments())
@settings(max_examples=60, deadline=None)
def test_within_half_a_level(bits: int, v: Tensor) -> None:
    check(v, bits, *encode(v, bits))


@pytest.mark.needs_cpp
@pytest.mark.parametrize("bits", BITS)
@given(v=increments())
@settings(max_examples=60, deadline=None)
def test_kernels_are_within_half_a_level(bits: int, v: Tensor) -> None:
    for _ in each_instruction_set():
        check(v, bits, *encode_by_kernels(v, bits))


def is_near_a_tie(v: Tensor, bits: int) -> bool:
    """Whether a rounding decides a code: kernels may round w/u − shift once, not twice."""
    increment = recording.encode(v, bits)
    _, shift, c = recording.levels(bits)
    w = recording.rotate(v)
    q = (w / (spread(increment.scales, v.shape[1]) * c)).nan_to_num(0) - shift
    distance = (q - q.floor() - 0.5).abs()
    return bool(((distance < 4 * torch.finfo(v.dtype).eps * (1 + q.abs())) & (w != 0)).any())


@pytest.mark.needs_cpp
@pytest.mark.parametrize("bits", BITS)
@given(v=increments(torch.float64))
@settings(max_examples=60, deadline=None)
def test_kernels_write_the_bits_of_the_reference(bits: int, v: Tensor) -> None:
    expected, increment = encode(v, bits)
    tie = is_near_a_tie(v, bits)
    for _ in each_instruction_set():
        quantised, found = encode_by_kernels(v, bits)
        assert torch.equal(found.scales, increment.scales)
        if not tie:
            assert torch.equal(found.codes, increment.codes)
            # Products and sums are rounded once there.
            rounding = 8 * torch.finfo(v.dtype).eps * spread(increment.scales, v.shape[1])
            assert ((quantised - expected).abs() <= rounding).all()


@pytest.mark.needs_cpp
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("row", [1, 7, 8, 9, 31, 32, 33, 40, 64, 95, 130])
def test_decoders_agree_on_any_bytes(
    row: int, bits: int, dtype: torch.dtype, instruction_set: str
) -> None:
    codes = torch.randint(0, 256, (9, recording.code_bytes(row, bits)), dtype=torch.uint8)
    scales = torch.randn(9, recording.groups(row)).abs().bfloat16()
    scales[0] = 0
    increment = Increment(codes, scales)
    expected = recording.decode(increment, bits, row, dtype)
    found = decode_by_kernels(increment, bits, row, dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=2 * torch.finfo(dtype).eps * 4)


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_packed_tightly_as_documented(bits: int) -> None:
    """Element by element: byte i of a field of w bits holds the elements i, i + w, …, the lowest
    bits first."""
    codes = torch.randint(0, 2**bits, (3, 40), dtype=torch.int32)
    packed = recording._pack(codes, bits)
    assert packed.shape == (3, 5 * bits)
    expected = [[0] * (5 * bits) for _ in range(3)]
    for r, line in enumerate(codes.tolist()):
        for element, code in enumerate(line):
            octet, e = divmod(element, 8)
            at, start = octet * bits, 0
            for width in recording.FIELDS[bits]:
                field = (code >> start) & (2**width - 1)
                expected[r][at + e % width] |= field << (e // width * width)
                at, start = at + width, start + width
    assert packed.tolist() == expected
    assert torch.equal(recording._unpack(packed, bits), codes)


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [3, 70])
def test_what_is_not_finite_stays_so(column: int, value: float, bits: int, encoder: Any) -> None:
    """Its group has no finite element any more, and the other groups have no other."""
    if encoder is encode_by_kernels:
        for _ in each_instruction_set():
            check_nonfinite(column, value, bits, encoder)
    else:
        check_nonfinite(column, value, bits, encoder)


def check_nonfinite(column: int, value: float, bits: int, encoder: Any) -> None:
    for dtype in DTYPES:
        v = torch.randn(3, 75, dtype=dtype)
        expected, _ = encoder(v, bits)
        v[1, column] = value
        quantised, increment = encoder(v, bits)
        group = torch.zeros_like(v, dtype=torch.bool)
        group[1, column // GROUP * GROUP : (column // GROUP + 1) * GROUP] = True
        decoders = [recording.decode]
        if encoder is encode_by_kernels:
            decoders.append(decode_by_kernels)
        for found in (quantised, *(d(increment, bits, 75, dtype) for d in decoders)):
            assert not found[group].isfinite().any()
            torch.testing.assert_close(found[~group], expected[~group])


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_outlier_is_spread_over_four(dtype: torch.dtype, bits: int, encoder: Any) -> None:
    """So the scale is half of it, and a group at a ragged end has all of it."""
    v = torch.zeros(1, 40, dtype=dtype)
    v[0, 5], v[0, 37] = 1.0, 1.0
    _, increment = encoder(v, bits)
    assert increment.scales.tolist() == [[0.5, 1.0]]


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_are_rounded_up(dtype: torch.dtype, encoder: Any) -> None:
    """However little is missing, so that no element is beyond the largest level."""
    exactly, beyond = torch.tensor(1.0, dtype=dtype), torch.tensor(1.0, dtype=dtype)
    beyond = torch.nextafter(beyond, beyond + 1)
    v = torch.stack([exactly, beyond, -exactly, -beyond]).unsqueeze(1)
    _, increment = encoder(v, 8)
    assert increment.scales.flatten().tolist() == [1, 1 + 2**-7] * 2


@pytest.mark.needs_cpp
@pytest.mark.parametrize("bits", BITS)
def test_threads_write_the_same_bits(bits: int, threads: int) -> None:
    v = torch.randn(1001, 70)
    expected = encode_by_kernels(v[:900], bits)
    torch.set_num_threads(threads)
    assert v.numel() // cpp.ELEMENTS_PER_THREAD >= 3
    quantised, increment = encode_by_kernels(v, bits)
    assert torch.equal(quantised[:900], expected[0])
    assert torch.equal(increment.codes[:900], expected[1].codes)
    check(v, bits, quantised, increment)
