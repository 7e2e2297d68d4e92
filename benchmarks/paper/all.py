"""Every figure and table of the paper, reproduced, with one report of all verdicts.

    python benchmarks/paper/all.py                    small versions, some minutes on two cores
    python benchmarks/paper/all.py --full             as the scripts run by themselves
    python benchmarks/paper/all.py --full fig4_depth  this one again, the rest as it was

Writes README.md, report.json (the same as data), and a CSV and a PNG of every experiment: with
--full to benchmarks/results/paper, small versions to benchmarks/results/quick/paper. If it is
stopped, the report has the experiments that are complete.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from experiment import Options, Verdict, announce, machine, parser, save
from output import results_folder
from progress import Stoppable

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
    """An experiment that was run, and its result; ``Result`` explains the fields."""

    name: str
    quick: bool
    seconds: float
    machine: str
    title: str
    notes: list[str]
    table: str
    verdicts: list[Verdict]

    @staticmethod
    def load(fields: dict[str, Any]) -> Done:
        verdicts = [Verdict(**verdict) for verdict in fields.pop("verdicts")]
        return Done(**fields, verdicts=verdicts)


def section(done: Done) -> str:
    verdicts = "\n".join(f"- {verdict}" for verdict in done.verdicts)
    quick = " --quick" if done.quick else ""
    parts = [
        f"## {done.title}",
        f"![{done.title}]({done.name}.png)",
        *done.notes,
        done.table,
        verdicts,
        f"`python benchmarks/paper/{done.name}.py{quick}`, [numbers]({done.name}.csv)",
    ]
    return "\n\n".join(part for part in parts if part)


def report(experiments: Sequence[Done]) -> str:
    verdicts = [verdict for done in experiments for verdict in done.verdicts]
    kept = sum(verdict.holds for verdict in verdicts)
    machines = "; ".join(dict.fromkeys(done.machine for done in experiments))
    lines = [
        "# The paper, reproduced",
        "Sander, Ablin, Peyré: *Do Residual Neural Networks discretize Neural Ordinary "
        f"Differential Equations?* (2022), figure by figure and claim by claim. {machines}. "
        f"**{kept} of {len(verdicts)} claims hold.**",
        "\n".join(
            [
                "| experiment | claims that hold | time |",
                "|---|---|---|",
                *(
                    f"| {done.title} | {sum(v.holds for v in done.verdicts)} of "
                    f"{len(done.verdicts)} | {done.seconds:.0f} s |"
                    for done in experiments
                ),
            ]
        ),
        *map(section, experiments),
    ]
    return "\n\n".join(lines) + "\n"


def perform(name: str, options: Options, out: Path) -> Done:
    torch.manual_seed(0)
    begin = time.perf_counter()
    result = importlib.import_module(name).run(options)
    seconds = time.perf_counter() - begin
    save(result, name, out)
    print(f"\n{result.title}", *result.verdicts, sep="\n", flush=True)
    return Done(
        name,
        options.quick,
        seconds,
        machine(options.device),
        result.title,
        result.notes,
        result.table,
        result.verdicts,
    )


def main(known: Sequence[str] = EXPERIMENTS) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--full", action="store_true", help="not the small versions")
    arguments.add_argument("names", nargs="*", metavar="experiment", help="only these")
    args = arguments.parse_args()
    names = args.names or known
    unknown = [name for name in names if name not in known]
    if unknown:
        arguments.error(f"no experiment {unknown[0]!r}; there are {', '.join(known)}")
    out = results_folder(
        arguments, args, folder="paper", besides=["full", "names"], published=args.full
    )
    options = Options(not args.full, args.data, args.seeds, args.device)

    data = out / "report.json"
    before = json.loads(data.read_text()) if data.exists() else []
    experiments = {fields["name"]: Done.load(fields) for fields in before}
    announce(names, options)
    with Stoppable() as stoppable:
        for i, name in enumerate(names):
            print(f"{i + 1}/{len(names)} {name}", file=sys.stderr)
            experiments[name] = perform(name, replace(options, rows=[]), out)
    done = [experiments[name] for name in known if name in experiments]
    if done:
        data.write_text(json.dumps([asdict(one) for one in done], indent=1, ensure_ascii=False))
        (out / "README.md").write_text(report(done))
        print(f"\nWrote {out / 'README.md'}")
    stoppable.end()


if __name__ == "__main__":
    main()
