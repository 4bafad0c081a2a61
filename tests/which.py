# SPDX-License-Identifier: Apache-2.0
"""Which tests belong to a module: `python -m tests.which FILE ...`, or `--all`.

    python -m tests.which upref/verify/match.py

A file of tests belongs to a module that it imports, or whose public name it uses, as
`upref.identify`. If no file of tests does so, those belong to it that reach it through
the fewest other modules, and these are printed too. Only the source is read.
"""

import argparse
import ast
import sys
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FRAMEWORKS = "upref_frameworks"
PACKAGES = ("upref", FRAMEWORKS, "upref_course")
# packages whose files are found by the names of the files
OF_FILES = (
    "upref.objectives",
    "upref.verify.oracles",
    "upref.verify.faults",
    "upref_course.lessons",
)
OWN_TESTS = "tests.pages.test_which"  # they name modules as examples
SHOWN = 6  # files of tests of one module, the ones that name it most


@dataclass(frozen=True)
class Belonging:
    """The tests of one module.

    Attributes:
        module: such as upref.verify.match.
        tests: files of tests, the one that names it most first.
        through: the modules between the first of them and the module; none where it
            imports the module.
    """

    module: str
    tests: tuple[str, ...]
    through: tuple[str, ...]

    def __str__(self) -> str:
        """Return the module's path and its tests, a line each; at most SHOWN of them."""
        path = path_of(self.module)
        if not self.tests:
            return f"{path}\n    no test reaches it by imports"
        more = len(self.tests) - SHOWN
        lines = [str(path), *(f"    {test}" for test in self.tests[:SHOWN])]
        if more > 0:
            lines.append(f"    and {more} more")
        if self.through:
            lines.append(f"    through {', '.join(self.through)}")
        return "\n".join(lines)


def module_of(path: Path) -> str:
    """Return the name of the module of a file.

    Args:
        path: of a Python file, relative to the checkout.
    """
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def path_of(module: str) -> Path:
    """Return the file of a module, relative to the checkout.

    Args:
        module: its name.
    """
    path = Path(*module.split("."))
    is_package = (ROOT / path / "__init__.py").is_file()
    return path / "__init__.py" if is_package else path.with_suffix(".py")


@cache
def modules() -> frozenset[str]:
    """Return the modules of the packages and of the tests."""
    folders = (*PACKAGES, "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return frozenset(module_of(file.relative_to(ROOT)) for file in files)


@cache
def public_names() -> dict[str, str]:
    """Return the module in which each public name of upref lives."""
    tree = ast.parse((ROOT / "upref/__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME":
            homes: dict[str, str] = ast.literal_eval(node.value)
            return {name: f"upref.{home}" for name, home in homes.items()}
    raise AssertionError("upref/__init__.py has no table _HOME")


@cache
def attached() -> tuple[str, ...]:
    """Return the modules that upref.plugins imports: those of the entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = project["project"]["entry-points"]
    named = (groups[group] for group in ("upref.frameworks", "upref.commands"))
    targets = (target for points in named for target in points.values())
    return tuple(sorted({target.partition(":")[0] for target in targets}))


def audits() -> list[str]:
    """Return the modules that upref_frameworks.audits imports, one of each framework."""
    return sorted(m for m in modules() if m.split(".")[::2] == [FRAMEWORKS, "audit"])


@cache
def imported(module: str) -> tuple[str, ...]:
    """Return the modules that a module imports or whose public names it uses, each as
    often as it does. A package of OF_FILES imports its own modules. What an entry point
    or a name of a framework stands for is imported too.

    Args:
        module: its name.
    """
    path = ROOT / path_of(module)
    if not path.is_file():
        return ()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [name for node in ast.walk(tree) for name in _named_in(node)]
    # the import of a module runs its package
    packages = {name.rpartition(".")[0] for name in found}
    found += sorted(packages - {*OF_FILES, *found})
    if module in OF_FILES:
        found += sorted(m for m in modules() if m.rpartition(".")[0] == module)
    if module == "upref.plugins":
        found += attached()
    if module == f"{FRAMEWORKS}.audits":
        found += audits()
    return tuple(name for name in found if name in modules() and name != module)


def _named_in(node: ast.AST) -> Iterator[str]:
    """Yield the modules that one node of the syntax names."""
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom(module=str() as module, level=0):
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                if inner in modules():
                    yield inner
                elif module == "upref":
                    yield public_names().get(alias.name, module)
                else:
                    yield module
        case ast.Constant(value="upref"):  # of a command: python -m upref
            yield "upref.__main__"
        case ast.Constant(value=str() as name):
            yield name
        case ast.Attribute(value=ast.Name(id="upref"), attr=name):
            yield public_names().get(name, f"upref.{name}")


@cache
def test_files() -> tuple[str, ...]:
    """Return the modules that hold tests."""
    named = (m for m in modules() if m.rpartition(".")[2].startswith("test_"))
    return tuple(sorted(m for m in named if m != OWN_TESTS))


@cache
def reached(test: str) -> dict[str, tuple[str, ...]]:
    """Return the modules that a file of tests reaches, each with the modules between.

    Args:
        test: the module of the tests.
    """
    ways: dict[str, tuple[str, ...]] = {test: ()}
    queue = deque([test])
    while queue:
        module = queue.popleft()
        way = ways[module] if module == test else (*ways[module], module)
        for name in imported(module):
            if name not in ways:
                ways[name] = way
                queue.append(name)
    return ways


def tests_of(module: str) -> Belonging:
    """Return the tests that belong to a module.

    Args:
        module: its name.
    """
    ways = {
        test: reached(test)[module] for test in test_files() if module in reached(test)
    }
    if not ways:
        return Belonging(module, (), ())
    fewest = min(map(len, ways.values()))
    nearest = [test for test, way in ways.items() if len(way) == fewest]

    def times_named(test: str) -> int:
        """Return how often the tests name the module, or the first one on the way."""
        return imported(test).count((*ways[test], module)[0])

    nearest.sort(key=lambda test: (-times_named(test), test))
    tests = tuple(str(path_of(test)) for test in nearest)
    return Belonging(module, tests, ways[nearest[0]])


def modules_of_packages() -> list[str]:
    """Return the modules with code, to which tests belong, in alphabetical order."""
    named = [m for m in modules() if m.split(".")[0] in PACKAGES]
    return sorted(m for m in named if _has_code(ROOT / path_of(m)))


def _has_code(path: Path) -> bool:
    """Return whether a file has more than a docstring."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(not isinstance(node, ast.Expr) for node in body)


def main(arguments: Iterable[str] | None = None) -> int:
    """Print the tests of modules; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.which", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="such as upref/kl.py")
    parser.add_argument("--all", action="store_true", help="every module")
    args = parser.parse_args(None if arguments is None else list(arguments))
    if bool(args.files) == args.all:
        parser.error("name a file of upref, upref_frameworks or upref_course, or --all")
    named = [module_of(Path(file)) for file in args.files]
    for file, module in zip(args.files, named, strict=True):
        if module not in modules_of_packages():
            parser.error(f"{file} is no module of {', '.join(PACKAGES)}")
    for module in modules_of_packages() if args.all else named:
        print(tests_of(module))
    return 0


if __name__ == "__main__":
    sys.exit(main())
