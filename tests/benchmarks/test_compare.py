"""The comparison with other packages is fair, and prints no time that means nothing."""

from __future__ import annotations

import csv
import functools
import importlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import compare
import compare_builds
import gate
import measure
import output
import peers
import profile_step
import pytest
import report
import scaling
import torch
import workloads
from contestants import EVERYONE, EXACT, contestants_of
from gate import Gate, Refused, relative_error, run_step
from measure import Times, bandwidth, in_fresh_process, interleaved, keep_memory, time_limit
from networks import (
    CHANNELS_LAST,
    COMPILED,
    PLAIN,
    RULES,
    STANDARD,
    Config,
    Network,
    config_of_shape,
    make_network,
)
from peers import PEERS, CouplingNetwork, MomentumNetwork
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from resode_kernels.backends import cpp
from resode_kernels.fused import ops

pytestmark = pytest.mark.needs_cpp

MLP = config_of_shape("64,16,16")
CONV = config_of_shape("16,2,8,6", "conv")
BOTTLENECK = config_of_shape("256,2,4,4", "bottleneck")
TRANSFORMER = config_of_shape("64,64,8", "residual")
KINDS = [MLP, CONV, BOTTLENECK, TRANSFORMER]
# Compiling takes longer than all the rest, and has a test of its own.
QUICK_TO_START = [name for name in EVERYONE if name != COMPILED]


def by_name(config: Config) -> str:
    return config.name


def in_this_process(function: Callable[..., Any], *args: Any) -> Any:
    """Instead of a fresh one: a test is not about memory."""
    return 1 << 20


@pytest.fixture
def measured_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "in_fresh_process", in_this_process)
    monkeypatch.setattr(compare, "bandwidth", lambda device: 1e10)
    monkeypatch.setattr(compare, "peak_rate", lambda device: 1e11)


def compare_quickly(config: Config, names: list[str]) -> dict[str, report.Row]:
    workload = workloads.Workload(config, tuple(names))
    rows = compare.compare(workload, seconds=0, rounds=(2, 2))
    return {row.contestant: row for row in rows}


# --------------------------------------------------------------------------------------- the gate


@pytest.mark.parametrize("config", KINDS, ids=by_name)
def test_the_gate_admits_everyone_as_they_are(config: Config) -> None:
    gate = Gate()
    errors = {
        name: gate.check(contestant)
        for name, contestant in contestants_of(make_network(config), QUICK_TO_START).items()
    }
    assert set(errors) >= {STANDARD, PLAIN, *RULES}
    if config.activation != "relu":
        assert all(errors[name] < 1e-5 for name in EXACT if name in errors)


@pytest.mark.parametrize("rule", RULES)
def test_the_gate_refuses_a_kernel_that_is_wrong_by_a_little(rule: str) -> None:
    """By less than its rule's own error."""
    network = make_network(MLP)
    contestant = contestants_of(network, [rule])[rule]
    error = Gate().check(contestant)

    def wrong() -> None:
        contestant.step()
        for p in network.stage.parameters():
            p.grad.mul_(1 + error / 2)

    assert error / 2 > contestant.rounding
    with pytest.raises(Refused, match="same rule in plain PyTorch"):
        Gate().check(replace(contestant, step=wrong))


@pytest.mark.parametrize("name", [STANDARD, PLAIN, "paper"])
def test_the_gate_refuses_gradients_beyond_what_is_stated(name: str) -> None:
    network = make_network(MLP)
    contestant = contestants_of(network, [name])[name]

    def wrong() -> None:
        contestant.step()
        for p in network.parameters():
            if p.grad is not None:
                p.grad.mul_(1 + 2 * contestant.stated)

    with pytest.raises(Refused, match=r"gradients off by .*, stated"):
        Gate().check(replace(contestant, step=wrong))


def test_a_refused_contestant_has_no_time(
    measured_quickly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "ROUNDING", 0.0)
    rows = compare_quickly(MLP, [STANDARD, "predicted"])
    row = rows["predicted"]
    assert row.seconds is row.time_ratio is row.fraction_of_peak is row.peak_bytes is None
    assert "same rule in plain PyTorch" in row.note
    assert row.note in report.table(list(rows.values()))
    assert rows[STANDARD].seconds is not None


def test_the_gate_refuses_another_network() -> None:
    network = make_network(MLP)
    contestant = contestants_of(network, [STANDARD])[STANDARD]
    other = lambda: network.train(lambda x: 1.001 * network.plain_loop(0, MLP.depth, x))  # noqa: E731
    with pytest.raises(Refused, match="output"):
        Gate().check(replace(contestant, step=other))


def test_stated_errors_shrink_with_depth_as_the_orders_promise() -> None:
    deeper = replace(MLP, depth=4 * MLP.depth)
    for name, order in gate.ORDERS.items():
        smooth = gate.stated_error(name, MLP) / gate.stated_error(name, deeper)
        assert smooth == pytest.approx(4**order)
        kinks = gate.stated_error(name, replace(MLP, activation="relu", depth=16))
        assert kinks > gate.stated_error(name, MLP)


def test_one_who_fails_or_takes_too_long_says_so_and_the_others_go_on(
    measured_quickly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(network: Network) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            raise RuntimeError("does not work here\nfor a long reason")

        return forward

    def dawdle(network: Network) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            while True:
                x = x + 1

        return forward

    monkeypatch.setitem(PEERS, "failing", peers.Peer("torch", fail))
    monkeypatch.setitem(PEERS, "slow", peers.Peer("torch", dawdle))
    monkeypatch.setattr(compare, "LIMIT", 0.3)
    rows = compare_quickly(MLP, ["failing", "slow", STANDARD])
    assert rows["failing"].note == "RuntimeError: does not work here"
    assert "took more than 0.3 s" in rows["slow"].note
    assert rows[STANDARD].time_ratio == 1
    monkeypatch.setattr(compare, "in_fresh_process", lambda *_: None)
    assert compare_quickly(MLP, [STANDARD])[STANDARD].note == "out of memory"


# -------------------------------------------------------------------------------------- contestants


@pytest.mark.slow
def test_the_compiled_loop_is_the_same_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, and not made into machine code, which takes long."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    network = make_network(config_of_shape("16,8,6", scheme="heun"))
    network.compiled_length = 4  # the last segment is shorter
    assert Gate().check(contestants_of(network, [COMPILED])[COMPILED]) < 1e-5


@pytest.mark.parametrize("config", KINDS, ids=by_name)
def test_other_architectures_have_equal_parameters(config: Config) -> None:
    beside = make_network(config)
    wanted = sum(p.numel() for p in beside.stage.parameters())
    for architecture in (CouplingNetwork, MomentumNetwork):
        mine = sum(p.numel() for p in architecture(beside).parameters())
        assert mine == pytest.approx(wanted, rel=0.01)


def test_couplings_of_other_sizes_are_refused() -> None:
    beside = make_network(MLP)
    beside.config.hidden //= 2
    with pytest.raises(ValueError, match="parameters beside"):
        CouplingNetwork(beside)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("config", [*KINDS, replace(MLP, scheme="heun")], ids=by_name)
def test_packages_train_what_their_plain_loop_defines(name: str, config: Config) -> None:
    peer = PEERS[name]
    pytest.importorskip(peer.package, reason="needs the bench-peers extra")
    found = contestants_of(make_network(config), [name])
    assert (name in found) == (config.scheme in peer.schemes)
    for contestant in found.values():
        network = contestant.network
        plain, theirs = (
            run_step(network, network.training_steps()[STANDARD]),
            run_step(network, contestant.step),
        )
        assert relative_error(theirs.output, plain.output) < 1e-4
        assert relative_error(theirs.gradients, plain.gradients) <= contestant.stated


def test_packages_that_are_not_installed_are_left_out_with_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import_module = importlib.import_module

    def none_of_them(name: str, *args: Any) -> Any:
        if name in {peer.package for peer in PEERS.values()}:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return import_module(name, *args)

    monkeypatch.setattr(importlib, "import_module", none_of_them)
    assert list(contestants_of(make_network(MLP), [STANDARD, *PEERS, "paper"])) == [
        STANDARD,
        "paper",
    ]
    monkeypatch.setattr(compare, "WORKLOADS", [])
    monkeypatch.setattr(compare, "QUICK", [workloads.Workload(MLP, (STANDARD,))])
    monkeypatch.setattr(compare, "in_fresh_process", in_this_process)
    compare.main(["--quick", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    for package in {peer.package for peer in PEERS.values()}:
        assert printed.count(f"{package} is left out (No module named '{package}')") == 1


# ---------------------------------------------------------------------------------- what is counted


def test_bytes_and_products_are_counted_as_the_kernels_headers_say() -> None:
    network = make_network(config_of_shape("64,1000,4"))
    state, weights = 4 * 64 * 1000, 4 * (2 * 64 * 64 + 2 * 64)
    assert network.bytes_moved("paper") == 4 * ((2 + 4) * state + 3 * weights)
    assert network.bytes_moved("predicted") == 4 * ((2 + 4 + 3) * state + 3 * weights)
    assert network.bytes_moved("recorded") == 4 * ((4 + 4 + 2 / 4) * state + 3 * weights)
    assert network.product_flops() == network.kernel_flops() == 2 * 1000 * 64 * 64

    conv = make_network(CONV)
    image, depth = 4 * 2 * 6 * 6 * 16, CONV.depth
    weights = 4 * sum(p.numel() for p in conv.stage.parameters())
    # two layers, in and out; the way back has gradients beside both
    evaluation, vjp = 4 * image, 8 * image
    passes = 3 * evaluation + vjp  # paper: forward, reconstruction, and what the VJP needs
    assert conv.bytes_moved("paper") == depth * (6 * image + passes) + 3 * weights
    passes = 2 * evaluation + vjp
    assert conv.bytes_moved("predicted") == depth * (9 * image + passes) + 3 * weights
    assert conv.kernel_flops() == conv.product_flops() * 16 / 36

    assert make_network(TRANSFORMER).states_moved == {}


def test_rates_are_work_over_time_over_what_was_measured() -> None:
    network = make_network(MLP)
    rows = {name: report.Row(MLP.name, name, peak_bytes=100) for name in (STANDARD, "paper")}
    times = {STANDARD: Times(0.4, 0.3, 0.5), "paper": Times(0.2, 0.1, 0.3)}
    compare.fill(rows, times, network, peak=1e9, stream=1e8)
    row = rows["paper"]
    assert row.time_ratio == 0.5
    assert row.fraction_of_peak == 9 * 16 * network.product_flops() / 0.2 / 1e9
    assert row.fraction_of_bandwidth == network.bytes_moved("paper") / 0.2 / 1e8
    assert rows[STANDARD].fraction_of_bandwidth is None


def test_the_faster_memory_format_is_the_unit() -> None:
    network = make_network(CONV)
    names = (STANDARD, CHANNELS_LAST, "paper")
    rows = {name: report.Row(CONV.name, name, peak_bytes=100) for name in names}
    times = dict(zip(names, (Times(s, s, s) for s in (0.4, 0.1, 0.2)), strict=True))
    compare.fill(rows, times, network, peak=1e9, stream=1e8)
    assert [rows[name].time_ratio for name in names] == [4, 1, 2]


def test_bandwidth_is_positive_and_finite() -> None:
    assert 1e8 < bandwidth() < 1e13


def test_turns_have_orders_of_their_own_and_all_are_timed_as_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "SHORT", 0)
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = interleaved(steps, seconds=0, rounds=(9, 9))
    turns = [tuple(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert len(turns) == 1 + 9
    assert {tuple(sorted(turn)) for turn in turns} == {("a", "b", "c")}
    assert len(set(turns)) > 1
    assert set(times) == set("abc")


def test_time_limits_end_with_their_block() -> None:
    with pytest.raises(TimeoutError, match=r"0\.05 s"), time_limit(0.05):
        time.sleep(5)
    with time_limit(0.05):
        pass
    time.sleep(0.1)


# -------------------------------------------------------------------------------------- end to end


def test_a_whole_run_writes_csv_and_pictures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = tuple(QUICK_TO_START)
    tiny = [workloads.Workload(config, names) for config in (MLP, CONV)]
    monkeypatch.setattr(compare, "QUICK", tiny)
    monkeypatch.setattr(compare, "in_fresh_process", in_this_process)
    compare.main(["--quick", "--out", str(tmp_path), "--only", "mlp-*"])
    with (tmp_path / "compare.csv").open() as file:
        rows = {row["contestant"]: row for row in csv.DictReader(file)}
    assert {STANDARD, PLAIN, *RULES} <= set(rows)
    assert {row["workload"] for row in rows.values()} == {MLP.name}
    assert all(row["machine"] and float(row["time_ratio"]) > 0 for row in rows.values())
    assert 0 < float(rows["paper"]["fraction_of_peak"]) < 1.5
    for picture in ("compare_batch", "compare_peers", "compare_roofline"):
        assert (tmp_path / f"{picture}.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "resode_kernels, predicted" in printed
    assert str(tmp_path / "compare.csv") in printed
    markdown = (tmp_path / "compare.md").read_text()
    assert f"| {MLP.name} | " in markdown
    assert "resode_kernels, predicted" in markdown


@pytest.mark.slow
def test_memory_of_a_step_is_measured_in_a_fresh_process() -> None:
    config = config_of_shape("64,4096,16")
    standard, ours = (
        compare.in_fresh_process(compare.step_memory, config, name) for name in (STANDARD, "paper")
    )
    assert standard > 16 * 4096 * 64 * 4
    assert ours < standard / 4


# Not "paper": the reference's evaluation at p ends with f(p), which that rule does not need.
@pytest.mark.parametrize("name", [STANDARD, "refined", "predicted", "recorded"])
def test_products_are_counted_as_they_are_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the dispatcher between them, the counter sees what the operators do.
    monkeypatch.setattr(ops, "forward", lambda x, p, b: ops._forward(x, *p.flat(), b))
    monkeypatch.setattr(ops, "reverse", lambda *a: ops._reverse(*a[:4], *a[4].flat(), a[5]))
    network = make_network(MLP)
    step = network.reference_step(name) if name in RULES else network.training_steps()[name]
    with FlopCounterMode(display=False) as counter:
        step()
    made = counter.get_total_flops() / network.product_flops()
    assert made == network.product_count(name)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    configs = {c.name: c for c in (MLP, CONV)}
    rows = [
        report.Row(MLP.name, STANDARD, 0.5, 0.4, 0.6, 1.0, 1000, 1.0, 0.0, 1e-5, 0.3, None, 200.0),
        report.Row(CONV.name, "momentumnet", stated_error=1e-5, note="gradients off, by a lot"),
    ]
    report.write(tmp_path / "compare.csv", configs, rows)
    assert report.read(tmp_path / "compare.csv") == (rows, configs, output.machine())


def test_scaling_reports_every_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scaling, "in_fresh_process", lambda f, config, rule, count, s: 1 / count)
    scaling.main(["--only", "small", "threads", "--seconds", "0", "--out", str(tmp_path)])
    with (tmp_path / "scaling.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {(line["experiment"], line["rule"]) for line in lines} >= {("small", r) for r in RULES}
    assert all(line["value"] == "2.0" for line in lines if line["experiment"] == "threads")


def test_scaling_reports_growth_with_memory_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def in_process(f: Any, experiment: Any, seconds: float, rule: str) -> Any:
        asked.append(f)
        return list(experiment(seconds, [rule]))

    asked: list[Any] = []
    monkeypatch.setattr(scaling, "in_fresh_process", in_process)
    monkeypatch.setattr(scaling, "config_of_shape", lambda _: config_of_shape("8,4,1"))
    scaling.main(["--only", "depth-kept", "--seconds", "0", "--out", str(tmp_path)])
    with (tmp_path / "scaling.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert asked == [scaling._kept] * len(RULES)
    assert {line["experiment"] for line in lines} == {"depth, memory kept"}
    assert {line["rule"] for line in lines} == set(RULES)


def test_kept_memory_is_not_given_back() -> None:
    """A block that would be mapped anew, page by page, has its pages when it is made again."""
    kept, usual = (in_fresh_process(fewest_faults, keep) for keep in (True, False))
    assert 10 * kept < usual


def fewest_faults(kept: bool) -> int:
    """Of the pages of several blocks, one after the other. (What lies behind the first blocks may
    keep the next from their places; of 20, more than half find one.)"""
    if kept:
        keep_memory()
    faults = []
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(16 << 20)  # 64 MiB
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(faults)


def test_scaling_holds_every_instruction_set_against_its_own_peak(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_use = cpp._C.selected()
    monkeypatch.setattr(scaling, "BUILT", ("16,64,4",))
    scaling.main(["--only", "builds", "--seconds", "0", "--out", str(tmp_path)])
    with (tmp_path / "scaling.csv").open() as file:
        lines = list(csv.DictReader(file))
    supported = cpp._C.supported()
    assert [line["rule"] for line in lines] == [n for n in supported if n != "avx512_narrow"]
    assert max(float(line["value"]) for line in lines) == 1
    assert cpp._C.selected() == in_use


def test_scaling_reports_every_direction_of_a_convolution(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scaling, "CONVOLUTIONS", ("16,4,4,10",))
    scaling.main(["--only", "products", "--seconds", "0", "--out", str(tmp_path)])
    with (tmp_path / "scaling.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["rule"] for line in lines] == ["forward", "data gradient", "weight gradient"]


def test_a_step_can_be_profiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["profile_step.py", "16,8,4", "--steps", "3"])
    profile_step.main()
    assert "3 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_steps_can_be_timed_by_pytest_benchmark() -> None:
    """With the project's own options; those of parallel runs would disable it."""
    root = Path(compare.__file__).parents[2]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    pytest_of_here = str(Path(sys.executable).with_name("pytest"))
    command = [pytest_of_here, "benchmarks", "--benchmark-only", "--collect-only"]
    run = subprocess.run(command, cwd=root, env=alone, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "test_throughput.py" in run.stdout


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, which a comparison of builds replaces."""
    monkeypatch.setattr(cpp, "_C", cpp._C)


@pytest.fixture
def two_builds(tmp_path: Path, put_back: None) -> list[Path]:
    builds = [tmp_path / name / "resode_kernels_cpu.so" for name in ("before", "after")]
    for build in builds:
        build.parent.mkdir(parents=True)
        shutil.copy(cpp._C.__file__, build)
    return builds


def test_two_builds_are_two(two_builds: list[Path]) -> None:
    before, after = (compare_builds.load(path, i) for i, path in enumerate(two_builds))
    assert before is not after
    assert [Path(build.__file__) for build in (before, after)] == two_builds
    first, last = cpp._C.supported()[0], cpp._C.supported()[-1]
    before.select(first)
    after.select(last)
    assert (before.selected(), after.selected()) == (first, last)


def test_the_build_in_use_can_be_one_of_them(put_back: None) -> None:
    assert compare_builds.load(Path(cpp._C.__file__), 1) is cpp._C


def test_builds_are_compared(
    two_builds: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*map(str, two_builds), "--shapes", "16,8,4", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["compare_builds.py", *arguments])
    compare_builds.main()
    _, before, after = capsys.readouterr().out.splitlines()
    assert "1 before" in before
    assert "2 after" in after
    assert "1.00" in before


def test_builds_that_disagree_are_not_timed(put_back: None) -> None:
    class Wrong:
        """Takes twice the step."""

        def __init__(self, build: Any) -> None:
            self.build = build

        def __getattr__(self, name: str) -> Any:
            return getattr(self.build, name)

        def Stage(self, *fields: Any) -> Any:
            return self.build.Stage(*fields[:4], 2 * fields[4], *fields[5:])  # step is the fifth

    builds = {"right": cpp._C, "wrong": Wrong(cpp._C)}
    with pytest.raises(SystemExit, match="wrong's gradients are off"):
        compare_builds.compare(MLP, "paper", builds, seconds=0)


def test_the_summary_has_a_line_for_each_workload_and_no_speed_for_the_refused() -> None:
    def row(workload: str, contestant: str, ratio: float | None) -> report.Row:
        return report.Row(workload, contestant, ratio, time_ratio=ratio, gradient_error=0.1)

    text = report.summary(
        [
            row("a", STANDARD, 1.0),
            row("a", "momentumnet", 4.0),
            row("a", "RevTorch", 2.0),
            row("a", "paper", 0.5),
            row("a", "predicted", None),
            row("b", STANDARD, 1.0),
        ]
    )
    _, _, a, b = text.splitlines()
    assert "0.50 × (RevTorch)" in a
    assert "2.00 ×" in a
    assert a.count("×") == 2
    assert b.startswith("| b | 1,000.0 ms |")


def test_every_workload_has_a_name_of_its_own() -> None:
    for every in (workloads.WORKLOADS, workloads.QUICK):
        names = [workload.config.name for workload in every]
        assert len(set(names)) == len(names)
