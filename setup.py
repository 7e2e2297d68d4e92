"""Hands the compiled modules to setuptools. tools/build_kernels.py builds them.

The modules `resode_kernels_cpu` and `resode_kernels_cuda` are top-level modules, so that Python
finds them also where it finds the package's sources first: in a checkout. Beside them lies the
report of the build, for `python -m resode_kernels info`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import editable_wheel
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import build_kernels  # noqa: E402

REPORT = "resode_kernels_build.json"
BUILD = ROOT / "build" / f"kernels{build_kernels.SUFFIX.removesuffix('.so')}"
WRITABLE = all(os.access(path, os.W_OK) for path in (ROOT, BUILD.parent, BUILD) if path.exists())


class BuildKernels(build_ext):
    """Puts what could be built into ``build_lib``; with ``--inplace`` into the checkout as well."""

    def build_extensions(self) -> None:
        target = Path(self.build_lib).resolve()
        # Not build_temp, which pip makes anew for every editable installation.
        directory = BUILD if WRITABLE else Path(self.build_temp).resolve()
        try:
            report = build_kernels.build(directory)
        except build_kernels.BuildError as error:
            raise CompileError(str(error)) from None
        self.outputs = [REPORT]
        for name, module in build_kernels.MODULES.items():
            if "error" not in report[name]:
                self.outputs.append(module)
        target.mkdir(parents=True, exist_ok=True)
        for name in (*build_kernels.MODULES.values(), REPORT):
            (target / name).unlink(missing_ok=True)  # of an earlier build
        (target / REPORT).write_text(json.dumps(report, indent=1) + "\n")
        for name in self.outputs[1:]:
            shutil.copy2(directory / name, target)

    def copy_extensions_to_source(self) -> None:
        if self.editable_mode:  # EditableWheel takes them
            return
        for name in (*build_kernels.MODULES.values(), REPORT):
            (ROOT / name).unlink(missing_ok=True)
        for path in self.get_outputs():
            shutil.copy2(path, ROOT)

    def get_outputs(self) -> list[str]:
        return [str(Path(self.build_lib, name)) for name in self.outputs]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class EditableWheel(editable_wheel):
    """The wheel of ``pip install -e`` contains the compiled modules, so that uninstalling the
    package removes them."""

    def _run_build_commands(self, name: str, wheel: Path, lib: Path, temporary: Path) -> Any:
        result = super()._run_build_commands(name, wheel, lib, temporary)
        for path in self.get_finalized_command("build_ext").get_outputs():
            shutil.copy2(path, wheel)
        return result


options = {}
if not WRITABLE:  # sources of another user, or on a medium that is read-only
    scratch = tempfile.mkdtemp(prefix="resode_kernels-")
    build_kernels.say(f"{ROOT} cannot be written to; building in {scratch}")
    options = {"build": {"build_base": scratch}, "egg_info": {"egg_base": scratch}}
modules = [name.split(".")[0] for name in build_kernels.MODULES.values()]
setup(
    ext_modules=[Extension(module, sources=[]) for module in modules],
    cmdclass={"build_ext": BuildKernels, "editable_wheel": EditableWheel},
    options=options,
)
