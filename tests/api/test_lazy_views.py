"""Tensors whose memory is not their value: resolved, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from derivatives import BACKENDS, EXACT, KINDS, pair
from helpers import problem_of
from torch import Tensor, nn
from torch.func import functional_call

import resode_kernels as rk

close = torch.testing.assert_close


def lazily(t: Tensor, how: str) -> Tensor:
    """t's value, as a view whose memory holds −t."""
    if how == "negative":
        return torch._neg_view(-t)
    return torch.complex(t, -t).conj().imag  # a view of −t with the negative bit


@pytest.mark.parametrize("how", ["negative", "conjugate"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_lazy_views_have_their_value(kind: str, backend: str, how: str) -> None:
    """As x, as each parameter and as the cotangent: in the forward and in the backward pass."""
    stage, _, x = pair(kind, backend)
    inputs = {"x": x, **{name: p.detach() for name, p in stage.named_parameters()}}
    g = torch.randn_like(x)

    def results(inputs: dict[str, Tensor], g: Tensor) -> list[Tensor]:
        leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
        x, *_ = leaves.values()
        y = functional_call(stage, {k: t for k, t in leaves.items() if k != "x"}, (x,))
        with torch.no_grad():
            frozen = functional_call(stage, {k: t for k, t in inputs.items() if k != "x"}, (x,))
        return [y.detach(), frozen, *torch.autograd.grad(y, list(leaves.values()), g)]

    expected = results(inputs, g)
    close(results(inputs, lazily(g, how)), expected, rtol=0, atol=0)
    for name, t in inputs.items():
        view = lazily(t, how)
        assert view.is_neg()
        got = results({**inputs, name: view}, g)
        close([t.resolve_neg() for t in got], expected, msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_tensors_are_zero(backend: str) -> None:
    stage, _, x = pair("tanh", backend)
    zero = torch._efficientzerotensor(stage.b1.shape, dtype=x.dtype)
    w1, b1, w2, b2 = (p.detach() for p in stage.parameters())
    run = rk.functional.mlp_stage
    got = run(x, w1, zero, w2, b2, backend=backend)
    close(got, run(x, w1, torch.zeros_like(b1), w2, b2, backend=backend), rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lazy_views_in_a_traced_graph(backend: str) -> None:
    torch._dynamo.reset()
    stage, _, x = pair("tanh", backend)
    compiled = torch.compile(stage, backend="aot_eager", fullgraph=True)
    close(compiled(torch._neg_view(-x)), stage(x), rtol=0, atol=0)


# ---------------------------------------------------------------------------------------- layouts

LAYOUTS = {
    "sparse_coo": lambda t: t.to_sparse(),
    "sparse_csr": lambda t: t.to_sparse_csr(dense_dim=t.dim() - 2),
    "_mkldnn": lambda t: t.float().to_mkldnn(),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["tanh", "linear", "basic"])
def test_the_ops_refuse_other_layouts(kind: str, backend: str, layout: str) -> None:
    stage, _, x = pair(kind, backend)
    problem = problem_of(stage.requires_grad_(False))
    bad, ops = LAYOUTS[layout](problem.parameters[0]), torch.ops.resode_kernels
    bad_problem = problem._replace(parameters=(bad, *problem.parameters[1:]))
    label = {"tanh": "w1", "linear": "weight", "basic": "weight of block 0, layer 1"}[kind]
    with pytest.raises(TypeError, match=rf"^{label} is .*{layout}.*must be a dense torch\.Tensor"):
        ops.forward.default(x, *bad_problem.flat(), backend)
    y, _, kept = ops.forward.default(x, *problem.flat(), backend)
    needs = [True] * (1 + len(problem.parameters))
    with pytest.raises(TypeError, match=rf"^cotangent is .*{layout}"):
        ops.reverse.default(y, LAYOUTS[layout](y), kept, needs, *problem.flat(), backend)


# ------------------------------------------------------------------------------------- subclasses


class Harmless(Tensor):
    """A subclass as users write them: another type, the same memory."""


class Elsewhere(Tensor):
    """Keeps its value in another tensor, as quantized and sharded weights do."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> Elsewhere:
        return Tensor._make_wrapper_subclass(
            cls, value.shape, dtype=value.dtype, requires_grad=value.requires_grad
        )

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].value.detach())
        raise NotImplementedError(f"{cls.__name__} does not know {func}")


class Unwraps(Elsewhere):
    """Runs every op on its value."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda t: t.value, (args, kwargs))
        return func(*args, **(kwargs or {}))


class Blind(Elsewhere):
    """Runs every op on its own memory, of which it has none."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].value.detach())
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kind",
    [
        lambda t: t.as_subclass(Harmless),
        nn.Parameter,
        nn.Buffer,
        lambda t: nn.Parameter(t.as_subclass(Harmless)),
        Unwraps,
    ],
    ids=["Harmless", "Parameter", "Buffer", "Parameter of Harmless", "Unwraps"],
)
def test_subclasses_that_the_ops_can_read_work(kind: Any, backend: str) -> None:
    stage, _, x = pair("tanh", backend)
    w1, *others = (p.detach() for p in stage.parameters())
    got = rk.functional.mlp_stage(x, kind(w1), *others, backend=backend)
    close(got.detach().as_subclass(Tensor), stage(x).detach(), rtol=0, atol=0)


@pytest.mark.parametrize("cls", [Elsewhere, Blind])
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("label", ["x", "w1", "b2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_subclasses_without_memory_are_refused(
    backend: str, label: str, trainable: bool, cls: Any
) -> None:
    stage, _, x = pair("tanh", backend)
    inputs = {"x": x, **dict(stage.named_parameters())}
    inputs = {name: t.detach().requires_grad_(trainable) for name, t in inputs.items()}
    inputs[label] = cls(inputs[label])
    with pytest.raises(TypeError, match=rf"^{label} is a {cls.__name__}, but the kernels read"):
        rk.functional.mlp_stage(**inputs, backend=backend)


def test_dtensors_are_refused(tmp_path: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch.distributed with gloo is not available")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        stage, _, x = pair("tanh", "reference")
        stage.w2 = nn.Parameter(distribute_tensor(stage.w2, init_device_mesh("cpu", (1,))))
        with pytest.raises(TypeError, match=r"^w2 is a DTensor.*\.full_tensor\(\)"):
            stage(x)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("backend", BACKENDS)
def test_fake_tensors_have_shapes(backend: str) -> None:
    stage, _, x = pair("tanh", backend)
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        y = stage(mode.from_tensor(x))
        y.sum().backward()
    assert isinstance(y, torch._subclasses.FakeTensor)
    assert y.shape == x.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exported_stage_is_the_stage(backend: str) -> None:
    stage, _, x = pair("tanh", backend)
    exported = torch.export.export(stage.requires_grad_(False), (x,)).module()
    close(exported(x), stage(x), rtol=0, atol=0)
    close(exported(torch._neg_view(-x)), stage(x), rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parametrized_weights(backend: str) -> None:
    stage, _, x = pair("tanh", backend)

    class Negative(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return torch._neg_view(w)

    expected = rk.functional.mlp_stage(
        x, -stage.w1, stage.b1, stage.w2, stage.b2, backend=backend, backward="checkpoint"
    )
    torch.nn.utils.parametrize.register_parametrization(stage, "w1", Negative())
    close(stage(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("training", [True, False])
def test_normalizations_are_read_by_their_strides(training: bool, backend: str) -> None:
    """Of channels-last images too, for which torch's own batch norm does not."""

    def results(lay_out: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
        weight, gamma, beta = (
            torch.randn(3, 4, 4, 3, 3) / 6,
            torch.rand(3, 4) + 0.5,
            torch.ones(3, 4),
        )
        leaves = [lay_out(t).requires_grad_() for t in (weight, gamma, beta)]
        moments = [] if training else [lay_out(torch.ones(3, 4)), lay_out(torch.rand(3, 4) + 0.5)]
        layers = [(*leaves, *moments)] * 2
        y = rk.functional.conv_stage(x, layers, activation="tanh", backend=backend, **EXACT)
        return [y.detach(), *torch.autograd.grad(y.sin().sum(), [x, *leaves])]

    def between_nans(t: Tensor) -> Tensor:
        memory = t.new_full((*t.shape, 2), float("nan"))
        memory[..., 0] = t
        return memory[..., 0]

    close(results(between_nans), results(torch.clone), rtol=1e-4, atol=1e-4)
