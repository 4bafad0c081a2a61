# SPDX-License-Identifier: Apache-2.0
"""Known bugs of trainers, planted one at a time in the released sources: which case of
the suite kills each.

    python -m tests.conformance.known_bugs trl|verl|openrlhf|skyrl [--every-case]

A bug is planted by compiling the changed text of one function in its module and giving
the code to the function that everybody holds. Nothing is written to the installed
package.
"""

import argparse
import importlib
import inspect
import sys
import textwrap
import tomllib
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from upref.conformance import CASES, LEVELS, Case, Status, cases, load_adapter, run
from upref.conformance.results import read_expected_failures
from upref_frameworks.audits import framework
from upref_frameworks.audits.isolated.pin import place

HERE = Path(__file__).parent
ADAPTERS = {
    "trl": "TRL",
    "verl": "Verl",
    "openrlhf": "OpenRLHF",
    "skyrl": "SkyRL",
    "torchtune": "Torchtune",
}
# what its adapter imports of other packages
SKYRL_NEEDS = ("skyrl.train", "skyrl_gym", "cloudpathlib", "ray", "peft")
IN_PACKAGE = ("trl", "verl", "openrlhf")  # the others are beside this file


@dataclass(frozen=True)
class Bug:
    """A change of one function's text, and where the bug was reported or mended."""

    framework: str
    source: str
    what: str
    function: str
    case: str
    old: str = ""
    new: str = ""
    old2: str = ""
    new2: str = ""
    replace_body: str = ""
    survives: str = ""

    def change(self, text: str) -> str:
        """Return the text of the function with the bug in it."""
        if self.replace_body:
            head = text[: text.index(":\n", text.index(")")) + 2]
            return head + textwrap.indent(self.replace_body, "    ") + "\n"
        for old, new in ((self.old, self.new), (self.old2, self.new2)):
            if old and old not in text:
                raise AssertionError(
                    f"{self.source}: {self.function} does not hold {old!r}"
                )
            text = text.replace(old, new) if old else text
        return text


def bugs(name: str = "") -> list[Bug]:
    """Return the bugs of a framework, or all of them."""
    every = tomllib.loads((HERE / "known_bugs.toml").read_text(encoding="utf-8"))["bug"]
    return [Bug(**one) for one in every if name in ("", one["framework"])]


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Plant a bug in the imported framework, and take it out at the end."""
    module_name, _, qualified = bug.function.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in qualified.split("."):
        found = inspect.getattr_static(found, part)
    function: types.FunctionType = inspect.unwrap(getattr(found, "__func__", found))
    changed = _compiled(textwrap.dedent(inspect.getsource(function)), function, bug)
    kept = function.__code__
    function.__code__ = changed
    try:
        yield
    finally:
        function.__code__ = kept


def _compiled(text: str, function: types.FunctionType, bug: Bug) -> types.CodeType:
    """Compile the changed text in a scope that has the function's free variables,
    `__class__` among them.
    """
    lines = text.splitlines(keepends=True)
    start = next(
        i for i, line in enumerate(lines) if line.startswith(("def ", "async def "))
    )
    body = bug.change(textwrap.indent("".join(lines[start:]), _indent_of(function)))
    free = ", ".join(function.__code__.co_freevars)
    scope = f"def scope({free}):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    module = compile(
        scope,
        f"<{bug.source}>",
        "exec",
        flags=_future_flags(function),
        dont_inherit=True,
    )
    outer = next(one for one in module.co_consts if isinstance(one, types.CodeType))
    return next(
        one
        for one in outer.co_consts
        if isinstance(one, types.CodeType) and one.co_name == function.__code__.co_name
    )


def _indent_of(function: types.FunctionType) -> str:
    """Return the indentation of the function in its file: texts to replace are as they
    are there.
    """
    first = next(line for line in inspect.getsourcelines(function)[0] if line.strip())
    return first[: len(first) - len(first.lstrip())]


def _future_flags(function: types.FunctionType) -> int:
    return function.__code__.co_flags & 0x1000000  # from __future__ import annotations


def target(name: str, kind: str = "") -> str:
    """Return what `--adapter` takes for a framework's adapter.

    Args:
        name: of the framework.
        kind: of the class, where a framework has several.
    """
    if name in IN_PACKAGE:
        return f"upref_frameworks.{name}.adapter:{ADAPTERS[name]}"
    return f"{HERE / name}_adapter.py:{kind or ADAPTERS[name]}"


def load(name: str) -> Any:
    """Load the adapter of a framework; OpenRLHF lies in the folder that its audit
    makes.
    """
    if name == "openrlhf":
        pin = framework("openrlhf").pin
        assert pin is not None
        for path in place("openrlhf", pin).paths:
            if str(path) not in sys.path:
                sys.path.insert(0, str(path))
    adapter = load_adapter(target(name))
    if name == "openrlhf":
        importlib.import_module("upref_frameworks.openrlhf.step")._import_classes()
    return adapter


def run_in_ci() -> list[Case]:
    """Return the cases that one process runs: those of level 6 among them."""
    return [case for case in cases(max(LEVELS)) if case.ranks == 1]


def killers(bug: Bug, adapter: Any, every: bool = False) -> list[str]:
    """Return the cases that fail with the bug, the one that its record names first;
    only the first unless `every`.
    """
    known = read_expected_failures(HERE / f"{bug.framework}_xfails.toml")
    rest: list[Case] = [case for case in run_in_ci() if case.id != bug.case]
    found = []
    with planted(bug):
        for case in [CASES[bug.case], *rest]:
            if (
                case.id in known
                or run(adapter, case, explain=False).status is not Status.FAILED
            ):
                continue
            found.append(case.id)
            if not every:
                break
    return found


def main() -> int:
    """Plant the bugs of a framework one by one, and print which cases kill each; return
    0.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("framework", choices=sorted({bug.framework for bug in bugs()}))
    parser.add_argument(
        "--every-case", action="store_true", help="run every case on every bug"
    )
    parser.add_argument(
        "--only", default="", help="only bugs whose source holds this text"
    )
    arguments = parser.parse_args()
    adapter = load(arguments.framework)
    chosen = [bug for bug in bugs(arguments.framework) if arguments.only in bug.source]
    killed = 0
    for bug in chosen:
        found = killers(bug, adapter, arguments.every_case)
        killed += bool(found)
        by = (
            ", ".join(found)
            if found
            else f"SURVIVES: {bug.survives or 'no case kills it'}"
        )
        print(f"{bug.source:42} {bug.what}\n    {by}", flush=True)
    print(f"{adapter.name}: {killed} of {len(chosen)} killed")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # the models are tiny: more threads wait for each other
    sys.exit(main())
