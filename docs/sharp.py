# SPDX-License-Identifier: Apache-2.0
"""The list of docs/sharp-bits.md: the wrong losses of the tests' zoo that sharp.toml
names, each with the first finding of `upref check`.
"""

import importlib
import inspect
import tomllib
from pathlib import Path

import upref

ENTRIES = Path(__file__).with_suffix(".toml")


def text() -> str:
    """Return a section for each: why it is wrong, where it was discussed in public, the
    code, the first finding.
    """
    cases = {str(c): c for c in importlib.import_module("tests.support.zoo").WRONG}
    entries = tomllib.loads(ENTRIES.read_text(encoding="utf-8"))
    parts = []
    for number, (name, entry) in enumerate(entries.items(), 1):
        parts.append(section(number, entry["title"], entry["why"], cases[name]))
    return "\n\n".join(parts)


def section(number: int, title: str, why: str, case) -> str:
    """Return the section of a wrong loss.

    Args:
        number: of the section.
        title: what is wrong.
        why: what follows from it.
        case: the loss in the zoo.

    Raises:
        AssertionError: `upref check` finds nothing wrong.
    """
    report = upref.check(case.function, case.objective, **case.hp)
    assert not report, case
    repo, issue = case.source.split("#")
    thread = f"[{case.source}](https://github.com/{repo}/issues/{issue})"
    parts = [
        f"## {number}. {title}",
        f"{why} Meant as `{case.objective}`. Discussed in {thread}.",
        f"```py\n{inspect.getsource(case.function).rstrip()}\n```",
        f"```text\n{report.failures[0].text()}\n```",
    ]
    return "\n\n".join(parts)
