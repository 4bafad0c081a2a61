# SPDX-License-Identifier: Apache-2.0
"""The Cap explorer: one self-contained HTML page, in which objectives stand side by
side and everything is dragged.

`write(file)` makes it, and so does `upref explorer FILE`. No server, no network,
nothing loaded: it can be mailed. Its formulas are printed by sympy from the functions
that train (formulas.py); the rest is plain JavaScript, the files of this folder one
after another in one scope. The first five compute and know no browser; a test runs them
in V8.
"""

import json
from pathlib import Path
from typing import Any

from upref.errors import InputError
from upref.files import write_atomically

HERE = Path(__file__).parent
PURE = ("cap", "words", "flow", "state", "python")
DRAWN = ("map", "curves", "flowview", "figure", "controls", "cards", "policy", "app")


def write(file: str | Path) -> Path:
    """Write the page of the explorer to a file.

    Args:
        file: its path, which ends in .html or .htm.

    Returns:
        The path.

    Raises:
        InputError: the name has another ending, or the file cannot be written.
    """
    if not isinstance(file, str | Path):
        raise InputError(
            f"the explorer is written to a file: give its name, not {type(file).__name__}."
        )
    file = Path(file)
    if file.suffix not in (".html", ".htm"):
        raise InputError(
            f"the explorer is a web page: end the name in .html, not as {file.name!r}."
        )
    try:
        write_atomically(file, page())
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise InputError(
            f"cannot write {str(file)!r}: {getattr(error, 'strerror', None) or error}."
        ) from error
    return file


def page() -> str:
    """Return the page of the explorer.

    Returns:
        HTML that loads nothing.
    """
    return assemble(HERE, f"{data()}\n{script(PURE + DRAWN)}")


def assemble(folder: Path, program: str) -> str:
    """Return the page.html of a folder as one file.

    Args:
        folder: it also has the style.css, which is put into the page.
        program: JavaScript, which is put into the page; it must not hold `</script`.

    Returns:
        HTML.
    """
    text = _read("page.html", folder)
    for name, part in (("style", _read("style.css", folder)), ("script", program)):
        assert f"/*{name}*/" in text and f"</{name}" not in part
        text = text.replace(f"/*{name}*/", part)
    return text


def script(names: tuple[str, ...] = PURE, folder: Path = HERE) -> str:
    """Join files of a folder to one program.

    Args:
        names: files without their ending, in this order; by default those that need no
            browser.
        folder: where they are.

    Returns:
        JavaScript.
    """
    return "\n".join(_read(f"{name}.js", folder) for name in names)


def data() -> str:
    """Return what Python computes for the page, as JavaScript constants.

    Returns:
        A line for each constant: VERSION, COLORS, LEFT_OUT (name -> why the page cannot
        draw it) and OBJECTIVES (name -> record, with its weight as a function).
    """
    from upref import __version__
    from upref.weights import plots
    from upref_course.explorer.formulas import formulas, obstacles

    colors = {"palette": plots.PALETTE, "ramp": plots.RAMP, "dead": plots.DEAD}
    records = [f"{as_json(name)}: {_record(r)}" for name, r in formulas().items()]
    objectives = ",\n".join(records)
    return "\n".join(
        [
            f"const VERSION = {as_json(__version__)};",
            f"const COLORS = {as_json(colors)};",
            f"const LEFT_OUT = {as_json(obstacles())};",
            f"const OBJECTIVES = {{\n{objectives}\n}};",
        ]
    )


def _record(r: dict[str, Any]) -> str:
    """Return a record as JavaScript, in which the weight and the edges are functions."""
    edges = ", ".join(f"[{as_json(label)}, {f}]" for label, f in r["edges"])
    facts = {k: v for k, v in r.items() if k not in ("w", "edges")}
    return f'{as_json(facts)[:-1]}, "w": {r["w"]}, "edges": [{edges}]}}'


def as_json(value: object) -> str:
    """Encode a value as JSON that may be part of a page's program.

    Args:
        value: without infinity and NaN.

    Returns:
        JSON, in which `<` is escaped.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace(
        "<", "\\u003c"
    )


def _read(name: str, folder: Path) -> str:
    """Return the text of a file of the page, without its SPDX line."""
    text = (folder / name).read_text(encoding="utf-8")
    return text.removeprefix("// SPDX-License-Identifier: Apache-2.0\n")
