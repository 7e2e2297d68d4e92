"""Ctrl-C stops a pass of the C++ kernels between two steps."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.needs_cpp

SCRIPT = """
import signal, sys, threading, time
import torch
import resode_kernels as rk

kind, direction, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(threads)
torch.manual_seed(0)
if kind == "conv":
    make = lambda depth, **options: rk.ConvStage(16, depth, tied=True, step=1e-6, **options)
    x = torch.randn(8, 16, 16, 16)
else:
    dim, rows = (256, 2) if kind == "crew" else (64, 256)
    make = lambda depth, **options: rk.MLPStage(dim, dim, depth, tied=True, step=1e-6, **options)
    x = torch.randn(rows, dim)
options = {"backward": "checkpoint", "anchor_every": 10**6} if direction == "recompute" else {}

def run(stage, direction):
    if direction == "forward":
        with torch.no_grad():
            return stage(x)
    stage.zero_grad()
    y = stage(x).sum()
    began.set()
    y.backward()

def seconds(depth):
    begin = time.perf_counter()
    run(make(depth, **options), direction)
    return time.perf_counter() - begin

began = threading.Event()
seconds(64)
depth = int(256 * 4 / min(seconds(256) for _ in range(3)))  # some seconds, also on a busy machine
stage = make(depth, **options)
before = {name: t.clone() for name, t in stage.state_dict().items()}
began.clear()
sent = None

def press():
    global sent
    if direction != "forward":
        began.wait()
    time.sleep(0.5)
    sent = time.perf_counter()
    signal.raise_signal(signal.SIGINT)  # handled by the main thread, whatever thread raises it

threading.Thread(target=press, daemon=True).start()
try:
    run(stage, direction)
    raise SystemExit("the pass ran to its end")
except KeyboardInterrupt:
    waited = time.perf_counter() - sent
assert waited < 0.2, f"{waited:.2f} s until KeyboardInterrupt"
if direction == "forward":
    for name, t in stage.state_dict().items():
        assert torch.equal(t, before[name]), name
assert all(p.grad is None for p in stage.parameters())

# What comes next is computed as ever.
results = []
for backend in ("cpp", "reference"):
    after = make(8, backend=backend, **{**options, "anchor_every": None})
    after.load_state_dict(stage.state_dict())
    y = after(x)
    y.sum().backward()
    results.append([y.detach(), *(p.grad for p in after.parameters())])
for a, b in zip(*results, strict=True):
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
print(f"{waited:.3f}")
"""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("direction", ["forward", "backward", "recompute"])
@pytest.mark.parametrize("kind", ["mlp", "crew", "conv"])
def test_a_long_pass_is_interrupted(kind: str, direction: str, threads: int) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, direction, str(threads)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
