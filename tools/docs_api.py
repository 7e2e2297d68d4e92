"""Writes docs/api.md from the signatures and docstrings of the public names:

python tools/docs_api.py"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from docs_pages import ROOT

import resode_kernels as rk
from resode_kernels import diagnostics, functional
from resode_kernels.options import StageOptions

PAGE = ROOT / "docs" / "api.md"
HEAD = """# Python API

<!-- Written by tools/docs_api.py from the docstrings. Change those, then run it. -->

`import resode_kernels as rk`. The [guide](guide.md) shows how these names work together. Every
stage takes the keywords of [`StageOptions`](#stageoptions) as `**options`.
"""
SECTIONS = {
    "stages": "Stages",
    "options": "Stages",
    "diagnostics": "Gradient errors",
    "depth": "Other depths",
    "defaults": "Errors and warnings",
    "nonfinite": "Errors and warnings",
    "backends": "Errors and warnings",
    "functional": "`rk.functional`: stages as functions",
    "models": "`rk.models`: the paper's networks",
}
"""Title by module, in the order of the page."""


def entries() -> Iterator[tuple[str, str, Any]]:
    """Module of the package, name, and object of everything public."""
    for name in {*rk.__all__, *diagnostics.__all__}:
        thing = getattr(rk, name, None) or getattr(diagnostics, name)
        if isinstance(thing, ModuleType):
            continue
        yield thing.__module__.split(".")[1], name, thing
    for module in (functional, rk.models):
        for name, thing in vars(module).items():
            if is_public(module, name, thing):
                yield module.__name__.split(".")[1], name, thing
    yield "functional", "ConvLayer", functional.ConvLayer
    yield "functional", "ACTIVATIONS", functional.ACTIVATIONS


def is_public(module: ModuleType, name: str, thing: Any) -> bool:
    """Whether a name belongs to users. The functions ``run_…`` are called by the stages."""
    return getattr(thing, "__module__", None) == module.__name__ and not name.startswith(
        ("_", "run_")
    )


def page() -> str:
    known = list(SECTIONS)
    found = sorted(
        set(entries()), key=lambda entry: (known.index(entry[0]), entry[1].lower(), entry[1])
    )
    parts = [HEAD]
    for title in dict.fromkeys(SECTIONS.values()):
        parts.append(f"## {title}\n")
        parts += [described(n, thing) for module, n, thing in found if SECTIONS[module] == title]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))


def described(name: str, thing: Any) -> str:
    if not callable(thing):
        return f"### {name}\n\n{', '.join(f'`{value!r}`' for value in thing)}\n"
    parts = [f"### {name}\n", signature(name, thing), text_of(name, thing)]
    if inspect.isclass(thing):
        for method, value in vars(thing).items():
            own = getattr(value, "fget", value)
            if method.startswith("_") or not getattr(own, "__doc__", None):
                continue
            doc = inspect.cleandoc(own.__doc__)
            if isinstance(value, property):
                parts.append(f"**`{name}.{method}`** — {markdown(doc)}")
            elif inspect.isfunction(value):
                parts += [f"**`{name}.{method}`**\n", signature(method, value), markdown(doc)]
    return "\n".join(parts)


class Annotation(str):
    """An annotation that ``inspect`` prints without quotes."""

    def __repr__(self) -> str:
        return str(self)


def unquoted(annotation: Any) -> Any:
    text = getattr(annotation, "__forward_arg__", annotation)
    return Annotation(text) if isinstance(text, str) else annotation


def signature(name: str, thing: Any) -> str:
    if thing is StageOptions or (inspect.isclass(thing) and issubclass(thing, Exception)):
        return ""
    full = inspect.signature(thing)
    short = full.replace(
        parameters=[p.replace(annotation=unquoted(p.annotation)) for p in full.parameters.values()],
        return_annotation=unquoted(full.return_annotation),
    )
    if inspect.isclass(thing):
        short = short.replace(return_annotation=inspect.Signature.empty)
    text = f"{name}{short}"
    if len(text) > 88:
        lines = [str(part) for part in broken(short)]
        end = "" if short.return_annotation is short.empty else f" -> {short.return_annotation!r}"
        text = f"{name}(\n" + "".join(f"    {line},\n" for line in lines) + f"){end}"
    return f"```py\n{text}\n```\n"


def broken(full: inspect.Signature) -> Iterator[str]:
    """The parameters of a signature, with the star before keywords."""
    starred = False
    for p in full.parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            starred = True
        if p.kind is p.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield str(p)


def text_of(name: str, thing: Any) -> str:
    doc = inspect.getdoc(thing) or ""
    if doc.startswith(f"{name}("):  # of a NamedTuple without a docstring
        return ""
    if thing is not StageOptions:  # every stage repeats them
        doc = doc.partition("The options that every stage takes as keywords:")[0]
    return markdown(doc)


COLUMNS = re.compile(r"^(?P<name>\S.{0,30}?) {2,}(?P<text>\S.*)$")


def markdown(doc: str) -> str:
    """A docstring as Markdown. Two columns, a name and its text, become a list."""
    out: list[str] = []
    column = 0
    for line in doc.splitlines():
        entry = COLUMNS.match(line)
        if entry:
            column = entry.start("text")
            if out and out[-1] and not out[-1].startswith("- "):
                out.append("")
            out.append(f"- `{entry['name'].replace('`', '')}`: {escaped(entry['text'])}")
        elif column and line.startswith(" " * min(column, 8)):
            out[-1] += " " + escaped(line.strip())
        else:
            column = 0
            out.append(line if line.startswith("    ") else escaped(line))
    return "\n".join(out).strip() + "\n"


def escaped(text: str) -> str:
    """Docstrings mark code by two backticks; a star outside of code is a star."""
    parts = text.replace("``", "`").split("`")
    return "`".join(p if i % 2 else p.replace("*", r"\*") for i, p in enumerate(parts))


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
