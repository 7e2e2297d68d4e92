"""Every argument of the public API that is of a wrong kind or out of range is refused by an error
of the package, before torch or pybind11 meets it; every number is a number, also NumPy's."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import resode_kernels as rk
from resode_kernels.functional import (
    ConvLayer,
    conv_stage,
    linear_stage,
    mlp_stage,
    residual_stage,
)

PACKAGE = Path(rk.__file__).parent
NAN, HUGE = float("nan"), 2**70
X = torch.randn(4, 6)
IMAGES = torch.randn(2, 6, 4, 4)
WINDOWS = torch.randn(3, 6, 6, 3, 3)
STAGE = rk.MLPStage(6, 8, 5)
W1, B1, W2, B2 = (p.detach() for p in STAGE.parameters())
BLOCKS = [nn.Tanh(), nn.Tanh()]


def mlp(**options: Any) -> rk.MLPStage:
    return rk.MLPStage(**{"dim": 6, "hidden": 8, "depth": 5, **options})


def conv(**options: Any) -> rk.ConvStage:
    return rk.ConvStage(**{"channels": 6, "depth": 3, **options})


def layers(eps: float) -> torch.Tensor:
    return conv_stage(IMAGES, [ConvLayer(WINDOWS)] * 2, eps=eps)


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([X, X], layout=layout)


def of_inference(t: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return t.clone()


Refused = tuple[Callable[[], object], type[Exception], str]

NUMBERS: list[Refused] = [
    (
        lambda: rk.diagnose(STAGE, X, max_gradient_error=NAN),
        ValueError,
        "max_gradient_error .* nan",
    ),
    (
        lambda: rk.tune(STAGE, X, max_gradient_error=-1),
        ValueError,
        "max_gradient_error .*above 0.*-1",
    ),
    (lambda: rk.monitor(STAGE, max_gradient_error=NAN), ValueError, "max_gradient_error .* nan"),
    (lambda: rk.monitor(STAGE, every=0), ValueError, "every must be at least 1, not 0"),
    (lambda: rk.monitor(STAGE, every=HUGE), ValueError, f"every must be at most .*{HUGE}"),
    (lambda: rk.diagnose(STAGE, X, seconds=NAN), ValueError, "seconds must be a number, not nan"),
    (lambda: rk.diagnose(STAGE, X, seconds=True), TypeError, "seconds must be a number, not True"),
    (lambda: layers(NAN), ValueError, "eps must be a finite number, not nan"),
    (lambda: layers(-1.0), ValueError, "eps must be above 0, not -1"),
    (lambda: layers(None), TypeError, "eps must be a number, not None"),  # type: ignore[arg-type]
    (lambda: mlp(step=True), TypeError, "step must be a number, not True"),
    (lambda: mlp(step=NAN), ValueError, "step must be a finite number, not nan"),
    (lambda: mlp(step=10**400), ValueError, "step must be a finite number, not 1000"),
    (lambda: mlp(step="0.1"), TypeError, "step must be a number, not '0.1'"),
    (lambda: mlp(step=1j), TypeError, "step must be a number, not 1j"),
    (lambda: mlp(order=2**40), ValueError, "order must be at most 2147483647, not 1099511627776"),
    (lambda: mlp(order=torch.tensor(2)), TypeError, "order must be an int, not .*Tensor"),
    (lambda: mlp(anchor_every=HUGE), ValueError, "anchor_every must be at most"),
    (lambda: mlp(depth=HUGE), ValueError, "depth must be at most"),
    (lambda: mlp(depth=np.float64(5)), TypeError, r"depth must be an int, not .*5\.0"),
    (lambda: mlp(hidden=0), ValueError, "hidden must be at least 1, not 0"),
    (lambda: mlp(hidden=True), TypeError, "hidden must be an int, not True"),
    (lambda: rk.LinearStage(-1, 5), ValueError, "dim must be at least 1, not -1"),
    (lambda: rk.ResidualStage(nn.Tanh(), depth=True), TypeError, "depth must be an int, not True"),
    (
        lambda: linear_stage(X, torch.randn(1, 6, 6), depth=HUGE),
        ValueError,
        "depth must be at most",
    ),
    (lambda: rk.deepen(STAGE, "3"), TypeError, "depth must be an int, not '3'"),  # type: ignore[arg-type]
    (lambda: rk.models.ResNet(3), TypeError, "layers must be a list .*not 3"),  # type: ignore[arg-type]
    (lambda: rk.models.ResNet((2, 2), classes=0), ValueError, "classes must be at least 1, not 0"),
    (lambda: rk.models.ResNet((2, 2), width=1.5), TypeError, "width must be an int"),  # type: ignore[arg-type]
    (lambda: rk.models.SimpleResNet(3, channels=0), ValueError, "channels must be at least 1"),
    (lambda: rk.models.SimpleResNet(3, padding=-1), ValueError, "padding must be at least 0"),
    (lambda: rk.models.SimpleResNet(3, stride=0), ValueError, "stride must be at least 1"),
    (lambda: rk.models.SimpleResNet(3, in_channels=0), ValueError, "in_channels must be at least"),
]

CHOICES: list[Refused] = [
    (lambda: mlp(tied="no"), TypeError, "tied must be True or False, not 'no'"),
    (lambda: rk.LinearStage(6, 5, tied=None), TypeError, "tied must be True or False"),  # type: ignore[arg-type]
    (lambda: conv(tied="no"), TypeError, "tied must be True or False, not 'no'"),
    (lambda: conv(zero_init="no"), TypeError, "zero_init must be True or False, not 'no'"),
    (lambda: mlp(bias="no"), TypeError, "bias must be True or False, not 'no'"),
    (lambda: mlp(activation=["tanh"]), ValueError, "activation must be one of .*not .*list"),
    (lambda: mlp(activation=np.array(["tanh", "relu"])), ValueError, "activation must be one of"),
    (lambda: mlp(activation=None), ValueError, "activation must be one of .*not None"),
    (lambda: STAGE.configure(backward=None), ValueError, "backward must be one of"),  # type: ignore[arg-type]
    (lambda: mlp(dtype=torch.int64), TypeError, "dtype must be one of .*not torch.int64"),
    (lambda: conv(dtype="float32"), TypeError, "dtype must be one of .*not 'float32'"),
]

TENSORS: list[Refused] = [
    (
        lambda: mlp_stage(X, nn.UninitializedParameter(), B1, W2, B2),
        ValueError,
        "w1 must have a value, but is an UninitializedParameter",
    ),
    (
        lambda: mlp_stage(X.clone().requires_grad_(), of_inference(W1), B1, W2, B2),
        RuntimeError,
        r"w1 was made in torch.inference_mode\(\).*w1.clone",
    ),
    (
        lambda: STAGE(X.to_sparse()),
        TypeError,
        "x must be a dense tensor, not a sparse_coo .*to_dense",
    ),
    (lambda: STAGE(X.to_sparse_csr()), TypeError, "x must be a dense tensor, not a sparse_csr one"),
    (lambda: STAGE(X.to_mkldnn()), TypeError, "x must be a dense tensor, not a mkldnn one"),
    (
        lambda: STAGE(nested(torch.strided)),
        TypeError,
        "x must be a dense .*nested.*to_padded_tensor",
    ),
    (lambda: STAGE(nested(torch.jagged)), TypeError, "x must be a dense tensor, not a nested one"),
    (lambda: STAGE(X.numpy()), TypeError, "x must be a tensor, not .*ndarray"),
    (lambda: STAGE(X > 0), TypeError, "x must be of a floating-point dtype, not torch.bool"),
    (lambda: STAGE(torch.tensor(1.0)), ValueError, "x must have 6 as its last dimension"),
    (lambda: STAGE(X.to("meta")), ValueError, "w1 is on cpu, but x is on meta"),
    (lambda: mlp_stage(X, W1, B1.to("meta"), W2, B2), ValueError, "b1 is on meta, but x is on cpu"),
    (lambda: mlp_stage(X, W1, B1.to_sparse(), W2, B2), TypeError, "b1 must be a dense tensor"),
    (lambda: mlp_stage(X, W1.numpy(), B1, W2, B2), TypeError, "w1 must be a tensor, not .*ndarray"),
    (lambda: mlp_stage(X, W1, B1, W2, B2.cfloat()), TypeError, "b2 is torch.complex64"),
    (lambda: rk.ConvStage(6, 2)(IMAGES.to_sparse()), TypeError, "x must be a dense tensor"),
    (lambda: rk.ResidualStage(BLOCKS)(X.to_mkldnn()), TypeError, "x must be a dense tensor"),
    (
        lambda: rk.ResidualStage(BLOCKS)(nested(torch.strided)),
        TypeError,
        "x must be a dense tensor",
    ),
    (lambda: residual_stage(None, X), TypeError, "blocks must be a list of modules .*not None"),
    (lambda: conv_stage(IMAGES, None), TypeError, "layers must be a list .*not None"),
    (
        lambda: conv_stage(IMAGES, [WINDOWS] * 2),
        TypeError,
        r"layers\[0\] must be .*ConvLayer.*Tensor",
    ),
    (
        lambda: conv_stage(IMAGES, [(WINDOWS,) * 6] * 2),
        TypeError,
        r"layers\[0\] must be .*ConvLayer",
    ),
    (
        lambda: conv_stage(IMAGES, [(WINDOWS, [1.0])] * 2),
        TypeError,
        r"layers\[0\].gamma must be a ten",
    ),
    (lambda: conv_stage(IMAGES, [(WINDOWS[:0],)] * 2), ValueError, r"weight must not be empty"),
]

DIAGNOSTICS: list[Refused] = [
    (lambda: rk.diagnose(STAGE, None), TypeError, "x must be the stage's input, .*not None"),
    (lambda: rk.diagnose(STAGE, [X]), TypeError, "x must be the stage's input, .*list"),
    (lambda: rk.diagnose(None, X), TypeError, "stage must be a stage .*not None"),
    (lambda: rk.tune(None, None), TypeError, "stage must be a stage .*not None"),
    (lambda: rk.monitor(None), TypeError, "stage must be a stage .*not None"),
    (lambda: rk.input_of(None, print), TypeError, "stage must be a stage .*not None"),
    (lambda: rk.input_of(STAGE, None), TypeError, "run must be a function .*not None"),
    (lambda: rk.diagnose(STAGE, X, settings=3), TypeError, "settings must be a list .*not 3"),
    (lambda: rk.diagnose(STAGE, X, args=3), TypeError, "args must be a tuple .*not 3"),
    (lambda: rk.diagnose(STAGE, X, kwargs=[1]), TypeError, "kwargs must be a dict .*list"),
    (lambda: rk.diagnose(STAGE, X, loss=3), TypeError, "loss must be a function .*not 3"),
    (lambda: rk.deepen(None, 3), TypeError, "stage must be a stage"),
    (lambda: rk.untie(None), TypeError, "stage must be a stage"),
]


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype", "ignore:Sparse CSR")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [*NUMBERS, *CHOICES, *TENSORS, *DIAGNOSTICS],
    ids=lambda value: re.sub(r"[^\w ]+", "", value)[:50] if isinstance(value, str) else "",
)
def test_it_is_refused_by_name(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as refused:
        call()
    assert type(refused.value) is error
    last = traceback.extract_tb(refused.value.__traceback__)[-1]
    assert Path(last.filename).is_relative_to(PACKAGE), last


def test_numbers_of_numpy_are_numbers() -> None:
    numbers = {"step": np.float32(0.5), "order": np.int64(2), "anchor_every": np.int8(2)}
    stage = rk.MLPStage(np.int64(6), np.int32(8), np.int64(5), **numbers)
    same = rk.MLPStage(6, 8, 5, step=0.5, order=2, anchor_every=2)
    same.load_state_dict(stage.state_dict())
    assert torch.equal(stage(X), same(X))
    assert repr(stage) == repr(same)
    kept = [*vars(stage.options).values(), stage.dim, stage.hidden, stage.depth]
    assert {type(value) for value in kept if value is not None} <= {str, int, float}
    report = rk.diagnose(stage, X, max_gradient_error=np.float32(0.1), seconds=np.int64(0))
    assert report.recommended.error <= np.float32(0.1)
    assert rk.deepen(stage, np.int64(10)).depth == 10


def test_layers_may_be_plain_tuples() -> None:
    gamma = torch.rand(3, 6)
    named = conv_stage(IMAGES, [ConvLayer(WINDOWS, gamma), ConvLayer(WINDOWS)])
    assert torch.equal(conv_stage(IMAGES, ((WINDOWS, gamma), [WINDOWS])), named)
