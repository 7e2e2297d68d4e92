"""The traffic of a pass at any size, from counts at small ones.

The traffic of a pass is affine in its steps and launches (``along`` the depth) and, for each of
these, in the rows, tiles and programs that share the work (``across`` the batch). So a few counts
at small sizes give the coefficients. They are exact, because they are whole numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from traffic import Launch, sum_by_kernel

SUMMED = ("count", "issued_loads", "issued_stores", "loads", "stores", "flops")


class PassSize(NamedTuple):
    """The size of a pass: what its traffic depends on."""

    rows: int
    steps: int
    tiles: int = 0
    """Of rows: the last of them may have fewer."""
    programs: int = 0
    launches: int = 0
    longest: int = 0
    """Steps of the longest launch."""

    def terms(self, along: Sequence[str], across: Sequence[str]) -> list[int]:
        """What a pass's traffic is a linear combination of."""
        depth = [1, *(getattr(self, name) for name in along)]
        batch = [1, *(getattr(self, name) for name in across)]
        return [a * b for a in depth for b in batch]


class TrafficModel:
    """Traffic of each kernel in a pass, as a function of the pass's size.

    ``revisited`` is no sum but that of the longest launch: affine in the steps of that one.
    """

    def __init__(
        self,
        samples: Sequence[tuple[PassSize, Sequence[Launch]]],
        along: Sequence[str],
        across: Sequence[str],
    ) -> None:
        self.along, self.across = along, across
        sizes = [size for size, _ in samples]
        counts = [sum_by_kernel(launches) for _, launches in samples]
        self.coefficients: dict[str, dict[str, list[int]]] = {}
        for name in dict.fromkeys(name for count in counts for name in count):
            of_kernel = [count.get(name, Launch(name, count=0)) for count in counts]
            self.coefficients[name] = {
                field: _solve(
                    [size.terms(self._along(field), across) for size in sizes],
                    [getattr(launch, field) for launch in of_kernel],
                )
                for field in (*SUMMED, "revisited")
            }

    def _along(self, field: str) -> Sequence[str]:
        return ("longest",) if field == "revisited" else self.along

    def at(self, size: PassSize) -> dict[str, Launch]:
        """By name, as ``sum_by_kernel`` would count them."""
        return {
            name: Launch(
                name,
                **{
                    field: _dot(size.terms(self._along(field), self.across), coefficients)
                    for field, coefficients in fields.items()
                },
            )
            for name, fields in self.coefficients.items()
        }


def _solve(terms: list[list[int]], values: list[int]) -> list[int]:
    solution, _, rank, _ = np.linalg.lstsq(np.array(terms, float), np.array(values, float))
    coefficients = [round(c) for c in solution]
    if rank < len(coefficients) or [_dot(row, coefficients) for row in terms] != values:
        raise ValueError(f"{values} at {terms} is not affine in whole numbers")
    return coefficients


def _dot(terms: list[int], coefficients: list[int]) -> int:
    return sum(t * c for t, c in zip(terms, coefficients, strict=True))
