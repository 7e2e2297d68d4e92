"""Imports and includes follow the rules that docs/architecture.md states."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "resode_kernels"
PAGE = (ROOT / "docs" / "architecture.md").read_text()

# | row | modules | job |
ROWS = {
    module: int(row)
    for row, modules in re.findall(r"^\| (\d+) \| ((?:`\w+` ?)+)\|", PAGE, re.MULTILINE)
    for module in re.findall(r"`(\w+)`", modules)
}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def name_of(source: Path) -> tuple[str, ...]:
    """("backends", "cuda", "gpu") for backends/cuda/gpu.py; () for the package itself."""
    parts = source.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


NAMES = {name_of(source) for source in SOURCES}


def imports(source: Path) -> Iterator[tuple[str, ...]]:
    """The modules of the package that a file imports, also inside functions."""
    folder = source.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (
                *folder[: len(folder) - node.level + 1],
                *(node.module.split(".") if node.module else ()),
            )
            for alias in node.names:
                module = (*base, alias.name)
                yield module if module in NAMES else base


def external_imports(source: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.split(".")[0])
    return found


def row_of(module: tuple[str, ...]) -> int:
    return ROWS[module[0] if module else "__init__"]


def violations(source: Path) -> list[str]:
    own = name_of(source)
    return [
        f"{'.'.join(own) or '__init__'} imports {'.'.join(module) or '__init__'}"
        for module in imports(source)
        if module[:1] != own[:1]
        and row_of(module) >= row_of(own)
        # every module may read the version
        and not (not module and own in (("info",), ("__main__",)))
    ]


def test_the_page_lists_every_module() -> None:
    assert {name[0] for name in NAMES if name} | {"__init__"} == set(ROWS)


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_import_only_from_the_rows_below(source: Path) -> None:
    assert not violations(source)


def test_a_violation_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "backends"
    folder.mkdir()
    source = folder / "engine.py"
    source.write_text(
        "def f():\n    from ..fused import ops\n    from ..stages.mlp import MLPStage\n"
    )
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    assert violations(source) == [
        "backends.engine imports fused.ops",
        "backends.engine imports stages.mlp",
    ]


def test_backends_do_not_know_each_other() -> None:
    apart = {"cpp", "cuda", "triton"}
    for source in SOURCES:
        own = name_of(source)
        if len(own) > 1 and own[0] == "backends" and own[1] in apart:
            others = apart - {own[1]}
            assert not [m for m in imports(source) if m[0] == "backends" and m[1] in others], own


def test_only_their_backends_import_triton_and_compiled_modules() -> None:
    for source in SOURCES:
        own = name_of(source)
        if own[:2] != ("backends", "triton"):
            assert "triton" not in external_imports(source), own
        if own != ("backends", "native"):
            assert "import_module" not in source.read_text(), own


# ------------------------------------------------------------------------------------------ csrc


def includes(source: Path) -> list[Path]:
    """The files of csrc that a file includes."""
    named = re.findall(r'^#include "([^"]+)"', source.read_text(), re.MULTILINE)
    return [(source.parent / name).resolve() for name in named]


CPU = ROOT / "csrc" / "cpu"
ORDER = ["core", "blocks", "passes"]
C_SOURCES = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cpp", ".cu"))


@pytest.mark.parametrize("source", C_SOURCES, ids=lambda p: str(p.relative_to(ROOT / "csrc")))
def test_csrc_includes_only_what_comes_before(source: Path) -> None:
    text = source.read_text()
    assert "torch/" not in text
    assert "ATen" not in text
    binds = {"bindings.h", "module.cpp", "layerwise.cpp"}
    assert source.name in binds or "pybind11" not in text
    for included in includes(source):
        assert included.is_file(), included
        if not source.is_relative_to(CPU):
            continue
        folder, other = (p.relative_to(ROOT / "csrc").parts[1:-1][:1] for p in (source, included))
        if folder and included.is_relative_to(CPU):
            assert other, f"{source.name} includes {included.name}"
            assert ORDER.index(other[0]) <= ORDER.index(folder[0]), included
        assert not included.is_relative_to(ROOT / "csrc" / "cuda")


@pytest.mark.parametrize("suffix", ["py", "h"])
def test_files_are_short(suffix: str) -> None:
    """A file is one thing with one name; reference.py is the specification as a whole."""
    folder = PACKAGE if suffix == "py" else ROOT / "csrc"
    lengths = {p: len(p.read_text().splitlines()) for p in folder.rglob(f"*.{suffix}")}
    assert len(lengths) > 20
    assert [p for p, n in lengths.items() if n > 350 and p.name != "reference.py"] == []
