"""The rows of docs/compatibility.md name tests that exist, and every test of a row has one."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from docs_tables import TABLES, TESTS

FILES = sorted((TESTS / "compatibility").glob("test_*.py"))


def functions(file: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", file.read_text(), re.M))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_rows_and_tests_belong_together(file: Path) -> None:
    section = runpy.run_path(str(file))["section"]
    tests = [test.split("::") for row in section.rows for test in row.tests]
    for path, name in tests:
        assert name in functions(TESTS / path), f"{path} has no {name}"
    own = str(file.relative_to(TESTS))
    assert functions(file) == {name for path, name in tests if path == own}


def test_every_file_has_a_table() -> None:
    names = {file.stem.removeprefix("test_") for file in FILES}
    assert names == {name.partition("works_")[2] for name in TABLES if name.startswith("works_")}


def test_only_what_nobody_tested_has_no_test() -> None:
    rows = [row for file in FILES for row in runpy.run_path(str(file))["section"].rows]
    assert [row.feature for row in rows if not row.tests] == ["CUDA graphs"]
    assert len({row.feature for row in rows}) == len(rows)
