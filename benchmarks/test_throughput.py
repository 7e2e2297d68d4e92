"""The training steps of stages under pytest-benchmark, to follow one machine over time:

    pytest benchmarks --benchmark-only --benchmark-autosave
    pytest benchmarks --benchmark-only --benchmark-compare

For ratios between contestants use compare.py, which interleaves them.
"""

from __future__ import annotations

from typing import Any

import pytest
from contestants import Contestant, Gate, enlist
from networks import RULES, STANDARD, Config, make_network
from workloads import shaped

CONFIGS = [
    shaped("64,1024,64"),
    shaped("256,1024,16"),
    shaped("64,32,64"),
    shaped("32,8,64"),
    shaped("16,64,16,10", "conv"),
    shaped("64,8,16,16", "conv"),
    shaped("64,8,16,16", "bottleneck"),
    shaped("128,256,8", "residual"),
]


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda config: config.name)
def contestants(request: pytest.FixtureRequest) -> dict[str, Contestant]:
    """Admitted by the gate."""
    config: Config = request.param
    gate, network = Gate(), make_network(config)
    admitted = enlist(network, (STANDARD, *RULES))
    for contestant in admitted.values():
        gate.check(contestant)
    return admitted


@pytest.mark.parametrize("name", [STANDARD, *RULES])
def test_training_step(benchmark: Any, contestants: dict[str, Contestant], name: str) -> None:
    network = contestants[name].network
    benchmark.group = network.config.name
    benchmark.pedantic(contestants[name].step, setup=network.forget, rounds=15, warmup_rounds=2)
