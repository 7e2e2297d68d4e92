"""The same training steps under pytest-benchmark, to follow one machine over time:

    pytest benchmarks --benchmark-only --benchmark-autosave
    pytest benchmarks --benchmark-only --benchmark-compare

For ratios between contestants use throughput.py, which interleaves them.
"""

from __future__ import annotations

from typing import Any

import pytest
from memory_vs_depth import compare_gradients
from networks import Config, MLPNetwork, Network, make_network

SHAPES = [(64, 1024, 64), (256, 1024, 8), (64, 32, 64)]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda s: "dim{}-batch{}-depth{}".format(*s))
def network(request: pytest.FixtureRequest) -> Network:
    dim, batch, depth = request.param
    network = make_network(Config(dim=dim, hidden=dim, batch=batch, depth=depth))
    compare_gradients(network)  # refuses outputs that disagree
    return network


@pytest.mark.parametrize("contestant", MLPNetwork.products)
def test_training_step(benchmark: Any, network: Network, contestant: str) -> None:
    benchmark.group = f"dim {network.config.dim}, batch {network.config.batch}"
    step = network.contestants()[contestant]
    benchmark.pedantic(step, setup=network.forget, rounds=15, warmup_rounds=2)
