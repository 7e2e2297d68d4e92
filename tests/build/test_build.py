"""The build of the compiled modules, with a compiler that writes a word instead of code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

COMPILER = """#!{python}
import os, signal, sys
from pathlib import Path
arguments = sys.argv[1:]
if "-o" not in arguments:
    sys.exit()
output, interrupted = Path(arguments[arguments.index("-o") + 1]), Path("{folder}/interrupted")
if output.name == "module.o" and not interrupted.exists():
    interrupted.touch()
    output.write_text("a part")
    os.killpg(os.getsid(0), signal.SIGKILL)
    sys.exit(1)
output.write_text("all")
if "-MF" in arguments:
    Path(arguments[arguments.index("-MF") + 1]).write_text(f"{{output}}: {{arguments[-3]}}\\n")
"""

BUILD = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "tools")!r})
import build_kernels
build_kernels.build(Path(sys.argv[1]))
"""


def build(compiler: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        env={**os.environ, "CXX": str(compiler), "RESODE_CUDA": "0", "RESODE_ISAS": "baseline"},
        capture_output=True,
        text=True,
        start_new_session=True,
    )


def test_an_interrupted_build_is_finished_by_the_next_one(tmp_path: Path) -> None:
    """Also if ninja and the compiler are killed while an object is half written."""
    pytest.importorskip("ninja")
    pytest.importorskip("pybind11")
    compiler, folder = tmp_path / "compiler", tmp_path / "build"
    compiler.write_text(COMPILER.format(python=sys.executable, folder=tmp_path))
    compiler.chmod(0o755)
    assert build(compiler, folder).returncode < 0
    assert (folder / "module.o").read_text() == "a part"
    run = build(compiler, folder)
    assert run.returncode == 0, run.stderr
    made = [path for path in folder.iterdir() if path.suffix in (".o", ".so")]
    assert len(made) == 3
    assert {path.read_text() for path in made} == {"all"}
