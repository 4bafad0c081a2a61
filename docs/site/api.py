# SPDX-License-Identifier: Apache-2.0
"""The API pages: every public name, by Sphinx's autodoc. One without a docstring, or in
no group, ends the build.
"""

import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import upref

_CONTENTS = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
GROUPS: dict[str, list[str]] = _CONTENTS["groups"]
MODULES: dict[str, str] = _CONTENTS["modules"]
EXAMPLES: dict[str, str] = tomllib.loads(
    (Path(__file__).parent / "examples.toml").read_text(encoding="utf-8")
)


def pages() -> dict[str, str]:
    """Return docname -> Markdown, of the first page of the API and of each module's.

    Raises:
        AssertionError: a public name is in no group, or has no docstring.
    """
    named = [name for group in GROUPS.values() for name in group]
    assert sorted(named) == sorted(upref.__all__), (
        f"in no group, or gone: {set(named) ^ set(upref.__all__)}"
    )
    front = (
        "# API\n\nEvery public name, by what it is for. The examples begin with `import torch, upref`. "
        'The type of a tensor is its shape: `Float[Tensor, "B T"]` has B responses of T tokens.\n'
    )
    for head, names in GROUPS.items():
        front += f"\n## {head}\n\n" + "".join(_entry("upref", name) for name in names)
    out = {"api": front}
    for name, head in MODULES.items():
        text = _module(name, head)
        if text:
            out[f"api/{name.removeprefix('upref.')}"] = text
    return out


def _module(name: str, head: str) -> str:
    """Return the page of a module: what it defines; "" where it cannot be imported.

    Args:
        name: of the module.
        head: its title.
    """
    try:
        module = import_module(name)
    except ImportError:  # TRL or verl is not installed
        return ""
    assert module.__doc__, f"{name} has no docstring"
    body = "\n".join(_restructured(module.__doc__.splitlines()))
    entries = "".join(
        _entry(name, public)
        for public, value in vars(module).items()
        if public[0] != "_" and _is_of(value, public, module)
    )
    return f"# {head}: `{name}`\n\n```{{eval-rst}}\n{body}\n```\n\n{entries}"


def _is_of(value: object, public: str, module: ModuleType) -> bool:
    """Return whether a value is a function or a class of this module, not an imported
    one; a package has those of its modules that are in its __all__.
    """
    if not inspect.isroutine(value) and not inspect.isclass(value):
        return False
    defined_in = getattr(value, "__module__", "")
    is_own = defined_in.startswith(module.__name__ + ".")
    is_public = public in getattr(module, "__all__", ())
    return defined_in == module.__name__ or (is_own and is_public)


def _entry(module: str, name: str) -> str:
    """Return the directive by which autodoc writes the entry of a name.

    Raises:
        AssertionError: it has no docstring.
    """
    value = getattr(import_module(module), name)
    assert inspect.getdoc(value), f"{module}.{name} has no docstring"
    kind = "function"
    options = ""
    if inspect.isclass(value):
        kind = "class"
        options += "   :members:\n"
        if value.__bases__ == (Exception,):
            options += "   :show-inheritance:\n"
    if module != "upref" and name in upref.__all__:
        options += "   :no-index:\n"
    return f"```{{eval-rst}}\n.. auto{kind}:: {module}.{name}\n{options}```\n\n"


# ---- docstrings ----------------------------------------------------------------------
SECTIONS = {
    "Args:": "param",
    "Attributes:": "ivar",
    "Returns:": "returns",
    "Raises:": "raises",
}


def _restructured(lines: list[str]) -> list[str]:
    """Turn a docstring, which is plain text, into reStructuredText.

    A paragraph stays one, what is set out in columns stays so, and Args, Attributes,
    Returns and Raises become lists.
    """
    out: list[str] = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        if not paragraph.strip():
            continue
        rows = paragraph.splitlines()
        if rows[0] in SECTIONS:
            out += [*_fields(SECTIONS[rows[0]], rows[1:]), ""]
        elif any(re.search(r"\S {2,}\S", row) or row.startswith(" ") for row in rows):
            out += [".. code-block:: none", "", *(f"   {row}" for row in rows), ""]
        else:
            out += [*map(_escaped, rows), ""]
    return out


def _fields(field: str, rows: list[str]) -> Iterator[str]:
    """Yield one line for each entry of a section: `name: text`, with the lines that are
    indented below it.
    """
    margin = min((len(row) - len(row.lstrip()) for row in rows), default=0)
    entries: list[str] = []
    for row in rows:
        if entries and (field == "returns" or row[margin:].startswith(" ")):
            entries[-1] += " " + row.strip()
        else:
            entries.append(row.strip())
    for entry in entries:
        name, colon, text = entry.partition(": ")
        if field == "returns" or not colon:
            yield f":{field}: {_escaped(entry)}"
        else:
            yield f":{field} {_escaped(name)}: {_escaped(text)}"


def _escaped(row: str) -> str:
    """Return a line with `x` as code, and everything else escaped, so that it means
    nothing in reStructuredText.
    """
    out = ""
    for i, part in enumerate(re.split(r"`([^`]+)`", row)):
        is_code = i % 2 == 1
        out += f"``{part}``" if is_code else re.sub(SPECIAL, r"\\\1", part)
    return out.lstrip(" ")


SPECIAL = r"([\\*_|`<>\[\]])"  # what means something in reStructuredText


def process(app, what, name, obj, options, lines):
    """Change the lines of a docstring in place, with its example below: Sphinx's event
    autodoc-process-docstring.
    """
    lines[:] = _restructured(lines)
    module, _, public = name.partition(".")
    if module == "upref" and public in EXAMPLES:
        rows = EXAMPLES[public].rstrip("\n").splitlines()
        lines += ["", ".. code-block:: pycon", "", *(f"   {row}" for row in rows), ""]
