# SPDX-License-Identifier: Apache-2.0
"""Measure how dense Python packages are, beside packages that are known as good to
read.

    python -m benchmarks.readability                     upref's packages
    python -m benchmarks.readability rlax optax attrs    the same, and these from the package index
    python -m benchmarks.readability --draw SEED         twelve functions for a reader who has never seen them

Each figure is counted from the syntax of the source alone; nothing is imported. The
table is a thermometer: whether a stranger understands a function is the question, and
no figure answers it.
"""

import argparse
import ast
import io
import random
import subprocess
import sys
import tempfile
import tokenize
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from upref import markdown

ROOT = Path(__file__).parents[1]
OURS = ("upref", "upref_frameworks", "upref_course")

# The letters of the paper and of its neighbors, defined in upref/rollouts.py, and what
# mathematics calls an index.
LETTERS = {
    "A",
    "J",
    "B",
    "T",
    "N",
    "G",
    "V",
    "H",
    "c",
    "lp",
    "mu",
    "pi",
    "p",
    "r",
    "s",
    "w",
    "R",
    "kl",
    "hp",
    "up",
}
INDICES = {"i", "j", "k", "n", "t", "_"}

# Written as equations: their names are the paper's.
EQUATIONS = ("objectives/", "kl.py", "transforms.py")

DRAWN_LINES = 8  # of a function that `--draw` may choose, at least

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass
class Counts:
    """What was counted in the files of one package.

    Args:
        code_lines: lines that hold a token of code; docstrings, comments and blank
            lines do not count.
        tokens: tokens of code.
        names: bindings of variables, parameters, functions and classes.
        short_names: those of one or two letters, without LETTERS, INDICES and the files
            of EQUATIONS.
        public_functions: functions and methods whose name has no underscore at its
            start.
        documented: public functions whose docstring has a section Args or Returns.
        named_lambdas: lambdas that are assigned to a name.
        format_skips: comments that switch the formatter off.
    """

    code_lines: int = 0
    tokens: int = 0
    names: int = 0
    short_names: int = 0
    public_functions: int = 0
    documented: int = 0
    named_lambdas: int = 0
    format_skips: int = 0


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines on which docstrings stand."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            continue
        if ast.get_docstring(node, clean=False) is None:
            continue
        text = node.body[0]
        lines.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return lines


def bound_names(tree: ast.Module) -> Iterator[str]:
    """Yield each name that the module binds, once for each binding."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def public_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions and methods without a leading underscore; a function inside a
    function is not public.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if not child.name.startswith("_"):
                yield child
        elif isinstance(child, ast.ClassDef):
            if not child.name.startswith("_"):
                yield from public_functions(child)
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from public_functions(child)


def is_documented(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether the docstring names the arguments or the result."""
    text = ast.get_docstring(function) or ""
    return any(
        section in text
        for section in ("Args:", "Returns:", ":param", ":returns:", "Parameters\n")
    )


def add_file(counts: Counts, path: str, text: str) -> None:
    """Add what one file holds to the counts.

    Args:
        counts: changed in place.
        path: the path of the file inside its package, with slashes.
        text: the source.
    """
    tree = ast.parse(text)
    docstrings = docstring_lines(tree)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and "fmt: skip" in token.string:
            counts.format_skips += 1
        if token.type in LAYOUT or (
            token.type == tokenize.STRING and token.start[0] in docstrings
        ):
            continue
        counts.tokens += 1
        lines.update(range(token.start[0], token.end[0] + 1))
    counts.code_lines += len(lines)

    if not path.startswith(EQUATIONS):
        names = list(bound_names(tree))
        counts.names += len(names)
        counts.short_names += sum(
            len(name) <= 2 and name not in LETTERS | INDICES for name in names
        )

    functions = list(public_functions(tree))
    counts.public_functions += len(functions)
    counts.documented += sum(map(is_documented, functions))

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
            node.value, ast.Lambda
        ):
            counts.named_lambdas += 1


def count_package(files: dict[str, str]) -> Counts:
    """Count all files of a package.

    Args:
        files: source by path inside the package. Tests and examples are left out.
    """
    counts = Counts()
    for path, text in files.items():
        parts = path.split("/")
        if (
            "tests" in parts
            or "examples" in parts
            or parts[-1].endswith("_test.py")
            or parts[-1].startswith("test_")
        ):
            continue
        add_file(counts, path, text)
    return counts


def files_of_checkout(folder: Path) -> dict[str, str]:
    """Return the Python files of a package of this checkout, by their path inside it."""
    return {
        f.relative_to(folder).as_posix(): f.read_text(encoding="utf-8")
        for f in sorted(folder.rglob("*.py"))
    }


def files_of_index(requirement: str) -> tuple[str, dict[str, str]]:
    """Download a wheel and return its name with version, and its Python files.

    Args:
        requirement: what pip takes, such as `optax` or `optax==0.2.8`.

    Raises:
        SystemExit: pip found no wheel.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
        ]
        done = subprocess.run([*command, "--dest", folder, requirement], check=False)
        if done.returncode:
            sys.exit(
                f"pip found no wheel of {requirement}: give a name of the package index, such as optax."
            )
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            paths = [p for p in archive.namelist() if p.endswith(".py") and "/" in p]
            name, version = wheel.name.split("-")[:2]
            files = {p.partition("/")[2]: archive.read(p).decode() for p in paths}
    return f"{name} {version}", files


def exempt_modules(package: str) -> int:
    """Return how many modules of a package pyproject.toml exempts from strict typing,
    EQUATIONS left out.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    exempt: set[str] = set()
    for override in settings["tool"]["mypy"]["overrides"]:
        if override.get("disallow_untyped_defs") is False:
            exempt.update(override["module"])
    equations = {
        f"{package}.{path.removesuffix('/').removesuffix('.py')}" for path in EQUATIONS
    }
    return sum(
        (module == package or module.startswith(f"{package}."))
        and module.removesuffix(".*") not in equations
        for module in exempt
    )


def table_row(name: str, counts: Counts, exempt: str) -> list[object]:
    """Return the cells of one row of the table."""
    density = counts.tokens / counts.code_lines
    short = counts.short_names / max(counts.names, 1)
    documented = counts.documented / max(counts.public_functions, 1)
    return [
        name,
        f"{counts.code_lines:,}",
        f"{density:.1f}",
        f"{short:.0%}",
        f"{documented:.0%}",
        counts.named_lambdas,
        counts.format_skips,
        exempt,
    ]


def draw_functions(seed: int, number: int = 12) -> list[str]:
    """Draw functions of our packages, whose results a stranger predicts before a run.

    A reader who has never seen the code counts the names and lines that stop him, and
    the other files that he opens.

    Args:
        seed: of the draw.
        number: how many.

    Returns:
        `path:line name` of each, in the order of the draw. Functions of fewer than
        DRAWN_LINES lines, and those inside other functions, are not drawn.
    """
    places = []
    for package in OURS:
        for path, text in files_of_checkout(ROOT / package).items():
            if path.startswith((*EQUATIONS, "exercises/")):
                continue
            for node in top_functions(ast.parse(text)):
                if (node.end_lineno or 0) - node.lineno + 1 >= DRAWN_LINES:
                    places.append(f"{package}/{path}:{node.lineno} {node.name}")
    return random.Random(seed).sample(sorted(places), number)


def top_functions(node: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield the functions and methods that are not inside another function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield child
        elif isinstance(child, ast.ClassDef):
            yield from top_functions(child)


def main() -> int:
    """Print the table, or the functions that are drawn."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.readability",
        description="Measure how dense upref's packages are, beside others.",
    )
    parser.add_argument(
        "others", nargs="*", help="packages of the index to measure too, such as optax"
    )
    parser.add_argument(
        "--draw", type=int, metavar="SEED", help="draw twelve functions, and stop"
    )
    args = parser.parse_args()
    if args.draw is not None:
        print("\n".join(draw_functions(args.draw)))
        return 0
    rows = []
    for package in OURS:
        folder = ROOT / package
        if folder.is_dir():
            counts = count_package(files_of_checkout(folder))
            rows.append(table_row(package, counts, str(exempt_modules(package))))
    for requirement in args.others:
        name, files = files_of_index(requirement)
        rows.append(table_row(name, count_package(files), ""))
    columns = ["package", "code lines", "tokens per line", "short names"]
    columns += ["functions with Args or Returns", "named lambdas", "`fmt: skip`"]
    print(markdown.table([*columns, "modules without strict types"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
