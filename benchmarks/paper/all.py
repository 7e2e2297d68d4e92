"""Every figure and table of the paper, reproduced, with one report of all verdicts.

    python benchmarks/paper/all.py          small versions, some minutes on two cores
    python benchmarks/paper/all.py --full   as the scripts run by themselves

Writes README.md, and a CSV and a PNG of every experiment, to benchmarks/results/paper.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from experiment import Options, Result, parser, save
from measure import machine

EXPERIMENTS = (
    "fig1_trajectories",
    "prop1_distance",
    "fig2_linear_weights",
    "props3_6_orders",
    "fig3a_step",
    "fig3b_failure",
    "fig3c_gradient_error",
    "fig4_depth",
    "table2_finetune",
)


@dataclass
class Done:
    name: str
    result: Result
    seconds: float


def section(done: Done) -> str:
    result = done.result
    verdicts = "\n".join(f"- {verdict}" for verdict in result.verdicts)
    parts = [
        f"## {result.title}",
        f"![{result.title}]({done.name}.png)",
        *result.notes,
        result.table,
        verdicts,
        f"`python benchmarks/paper/{done.name}.py`, [numbers]({done.name}.csv)",
    ]
    return "\n\n".join(part for part in parts if part)


def report(experiments: Sequence[Done], options: Options) -> str:
    size = "small versions (`all.py`)" if options.quick else "full size (`all.py --full`)"
    verdicts = [verdict for done in experiments for verdict in done.result.verdicts]
    kept = sum(verdict.holds for verdict in verdicts)
    lines = [
        "# The paper, reproduced",
        "Sander, Ablin, Peyré: *Do Residual Neural Networks discretize Neural Ordinary "
        "Differential Equations?* (2022), figure by figure and claim by claim; "
        f"{size}, on {options.data or 'digits and synthetic data'}. {machine(options.device)}. "
        f"**{kept} of {len(verdicts)} claims hold.**",
        "\n".join(
            [
                "| experiment | claims that hold | time |",
                "|---|---|---|",
                *(
                    f"| {done.result.title} | {sum(v.holds for v in done.result.verdicts)} of "
                    f"{len(done.result.verdicts)} | {done.seconds:.0f} s |"
                    for done in experiments
                ),
            ]
        ),
        *map(section, experiments),
    ]
    return "\n\n".join(lines) + "\n"


def main(names: Sequence[str] = EXPERIMENTS) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--full", action="store_true", help="not the small versions")
    chosen = vars(arguments.parse_args())
    chosen["quick"] = not chosen.pop("full")
    options = Options(**chosen)
    experiments = []
    for i, name in enumerate(names):
        print(f"{i + 1}/{len(names)} {name}", file=sys.stderr)
        torch.manual_seed(0)
        begin = time.perf_counter()
        result = importlib.import_module(name).run(options)
        experiments.append(Done(name, result, time.perf_counter() - begin))
        save(result, name, options.out)
        print(f"\n{result.title}", *result.verdicts, sep="\n", flush=True)
    path = options.out / "README.md"
    path.write_text(report(experiments, options))
    print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
