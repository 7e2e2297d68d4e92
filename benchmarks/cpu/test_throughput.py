"""Times training steps under pytest-benchmark, to follow one machine over time.

    pytest benchmarks --benchmark-only --benchmark-autosave
    pytest benchmarks --benchmark-only --benchmark-compare

For ratios between contestants use compare/compare.py, whose steps take turns.
"""

from __future__ import annotations

from typing import Any

import pytest
from gate import Contestant, Gate, own_contestant
from networks import RULES, STANDARD, Config, config_of_shape, make_network

CONFIGS = [
    config_of_shape("64,1024,64"),
    config_of_shape("256,1024,16"),
    config_of_shape("64,32,64"),
    config_of_shape("32,8,64"),
    config_of_shape("16,64,16,10", "conv"),
    config_of_shape("64,8,16,16", "conv"),
    config_of_shape("64,8,16,16", "bottleneck"),
    config_of_shape("128,256,8", "residual"),
]


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda config: config.name)
def contestants(request: pytest.FixtureRequest) -> dict[str, Contestant]:
    """Those of one network, after the gate has admitted them."""
    config: Config = request.param
    gate, network = Gate(), make_network(config)
    admitted = {name: own_contestant(network, name) for name in (STANDARD, *RULES)}
    for contestant in admitted.values():
        gate.check(contestant)
    return admitted


@pytest.mark.parametrize("name", [STANDARD, *RULES])
def test_training_step(benchmark: Any, contestants: dict[str, Contestant], name: str) -> None:
    network = contestants[name].network
    benchmark.group = network.config.name
    benchmark.pedantic(contestants[name].step, setup=network.forget, rounds=15, warmup_rounds=2)
