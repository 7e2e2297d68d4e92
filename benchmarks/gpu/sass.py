"""The machine code of CUDA kernels, by cuobjdump: from CUDA's toolkit, or Triton's copy of it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

FUNCTION = re.compile(r"^\s*Function : (\w+)$", re.MULTILINE)
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", re.MULTILINE)
NAMESPACES = re.compile(r"\(anonymous namespace\)::|\bresode::")


@dataclass(frozen=True)
class Code:
    """One kernel's instructions, by their name without modifiers."""

    instructions: Counter[str]

    @property
    def tensor_core(self) -> int:
        return sum(n for name, n in self.instructions.items() if name.endswith("MMA"))

    @property
    def async_copies(self) -> int:
        return self.instructions["LDGSTS"]

    @property
    def local_memory(self) -> int:
        """Loads and stores of what did not find a register."""
        return self.instructions["LDL"] + self.instructions["STL"]


def cuobjdump() -> str | None:
    """Its path, if it is here."""
    triton = importlib.util.find_spec("triton")
    copy = Path(triton.origin).parent / "backends/nvidia/bin" if triton and triton.origin else None
    return shutil.which("cuobjdump") or (copy and shutil.which("cuobjdump", path=str(copy)))


def kernels(file: Path, target: str) -> dict[str, Code]:
    """The kernels that a library, a fatbin or a cubin has for a target, by their mangled names."""
    tool = cuobjdump()
    assert tool
    command = [tool, "-sass", "-arch", target, str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, *parts = FUNCTION.split(text)
    return {
        name: Code(Counter(op.partition(".")[0] for op in INSTRUCTION.findall(code)))
        for name, code in zip(parts[::2], parts[1::2], strict=True)
    }


def readable(names: list[str]) -> list[str]:
    """Mangled names as in the source, without namespaces, parameters and the fused kernels'
    precision: reverse_kernel<Mlp>."""
    run = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    plain = [NAMESPACES.sub("", name) for name in run.stdout.splitlines()]
    plain = [re.sub(r"^void |\(.*", "", name) for name in plain]
    return [re.sub(r"<(Mlp|Linear)<.*", r"<\1>", name) for name in plain]
