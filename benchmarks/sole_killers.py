# SPDX-License-Identifier: Apache-2.0
"""Which slow tests are the only ones that notice a mistake:
`python -m benchmarks.sole_killers [--tests 50] [--mutants 1] [--minutes 25]`.

A mutant is a copy of this checkout with one mistake in one function: a comparison, an
operation or a constant is another one. For each file that has some of the slowest tests
of tests/seconds.tsv, mutants are drawn from the modules that the file imports itself.
The fast tests of the file run first, then those of the other files that import the
module. Only a mutant that all of them accept is shown to the slow tests of the file, one
by one. A slow test earns its place by day if it rejects such a mutant.

A test that fails without a mistake too is left out. Each finished mutant is written
into sole_killers.json, and a run that is started again goes on. The exit status is 0.
"""

import argparse
import ast
import copy
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import upref
from upref.files import write_atomically

ROOT = Path(__file__).parents[1]
OUT = Path(__file__).with_name("sole_killers.json")
PACKAGES = ("upref", "upref_frameworks", "upref_course", "paper", "repro")
DAY = "not (smoke or site or nightly or slow)"
SLOWEST = 1800  # seconds that a run of tests may take
NO_END = "no end"  # of a run that took longer: it tells nothing
NO_TESTS = 5  # pytest's exit status where none was selected
NEIGHBOURS = 1  # other files whose fast tests are tried
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
               ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}  # fmt: skip
OPERATIONS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}


@dataclass
class Mutant:
    """One mistake in one line, and which tests noticed it."""

    file: str  # of the mistake
    line: int
    column: int  # in bytes
    before: str
    after: str
    tests: str  # the file of tests from whose imports it was drawn
    killed_by: str = ""  # a fast test; or NO_END
    slow: dict[str, bool] = field(default_factory=dict)  # slow test -> it failed
    seconds: float = 0.0  # of processor


def slow_tests(most: int) -> dict[str, list[str]]:
    """Return the slowest recorded tests by their file.

    Args:
        most: how many.
    """
    lines = (ROOT / "tests/seconds.tsv").read_text(encoding="utf-8").splitlines()
    names_of: dict[str, list[str]] = {}
    for line in lines[:most]:
        name = line.partition("\t")[2]
        names_of.setdefault(name.partition("::")[0], []).append(name)
    return names_of


def imported(file: Path) -> set[str]:
    """Return the files of this checkout that a file imports by name.

    Args:
        file: of Python.
    """
    words = set()
    homes = {name: getattr(upref, name).__module__ for name in upref.__all__}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            words |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "upref":
            words |= {homes.get(a.name, f"upref.{a.name}") for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            words |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "upref":
            words.add(homes.get(node.attr, ""))
    words -= {"", "upref"}  # upref itself holds names alone
    files = set()
    for word in words:
        path = Path(*word.split("."))
        if path.parts[0] not in PACKAGES:
            continue
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if (ROOT / candidate).is_file():
                files.add(str(candidate))
                break
    return files


def mistakes(text: str) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each expression inside a function that can be mistaken, and the mistake.

    Args:
        text: of a file of Python.
    """
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, functions):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                wrong = mistaken(node)
                if wrong is not None and isinstance(node, ast.expr):
                    yield node, wrong


def mistaken(node: ast.AST) -> ast.expr | None:
    """Return a wrong expression in the place of a right one; None for others.

    Args:
        node: of a syntax tree.
    """
    wrong: Any = copy.deepcopy(node)
    match node:
        case ast.Compare(ops=[operation]) if type(operation) in COMPARISONS:
            wrong.ops = [COMPARISONS[type(operation)]()]
        case ast.BinOp(op=operation, left=left) if type(operation) in OPERATIONS:
            if isinstance(left, ast.JoinedStr) or isinstance(
                getattr(left, "value", None), str
            ):
                return None  # text is put together
            wrong.op = OPERATIONS[type(operation)]()
        case ast.BoolOp(op=operation):
            wrong.op = ast.Or() if isinstance(operation, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            wrong = operand
        case ast.Constant(value=bool(value)):
            wrong.value = not value
        case ast.Constant(value=int(value) | float(value)):
            wrong.value = value + 1
        case _:
            return None
    return wrong


def draw(tests: str, slow: list[str], many: int, seed: int) -> Iterator[Mutant]:
    """Yield mutants of the modules that a file of tests imports.

    Args:
        tests: the file of tests, from the top of the checkout.
        slow: its slow tests.
        many: how many for each of these.
        seed: of the draw.
    """
    rng = random.Random(f"{seed} {tests}")
    mutants = []
    for file in sorted(imported(ROOT / tests)):
        text = (ROOT / file).read_text(encoding="utf-8")
        for node, wrong in mistakes(text):
            before = ast.get_source_segment(text, node)
            if before and "\n" not in before:
                after = f"({ast.unparse(wrong)})"
                mutants.append(
                    Mutant(file, node.lineno, node.col_offset, before, after, tests)
                )
    yield from rng.sample(mutants, min(len(mutants), many * len(slow)))


class Copy:
    """A copy of the checkout at its commit, in which one line at a time is wrong."""

    def __init__(self, folder: Path):
        self.folder = folder
        archive = ["git", "-C", str(ROOT), "archive", "HEAD"]
        packed = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", str(folder)], check=True, input=packed)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        self.right: dict[str, str] = {}  # the texts of files that had a mistake
        self.broken: set[str] = set()  # what fails without a mistake
        self.whole: set[str] = set()  # what passes without one

    def put(self, mutant: Mutant | None, file: str) -> None:
        """Write a file as it was, or with the mistake of the mutant."""
        if file not in self.right:
            self.right[file] = (self.folder / file).read_text(encoding="utf-8")
        text = self.right[file]
        if mutant is not None:
            lines = text.splitlines(keepends=True)
            line = lines[mutant.line - 1].encode()
            start, before = line[: mutant.column], mutant.before.encode()
            rest = line[mutant.column :].removeprefix(before)
            lines[mutant.line - 1] = (start + mutant.after.encode() + rest).decode()
            text = "".join(lines)
            ast.parse(text)
        (self.folder / file).write_text(text, encoding="utf-8")

    def fails(self, *tests: str, leave: tuple[str, ...] = ()) -> list[str]:
        """Run tests up to the first failure, and return the names that failed.

        Args:
            tests: files, or names of tests.
            leave: names that do not run.

        Returns:
            Names; [NO_END] where they did not end.
        """
        options = ["-q", "-x", "-p", "no:cacheprovider", "-rfE"]
        options += [word for name in leave for word in ("--deselect", name)]
        if "::" not in tests[0]:
            options += ["-m", DAY]
        environment = os.environ | {
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SLOWEST,
            )
        except subprocess.TimeoutExpired:
            return [NO_END]
        failed = [
            line.split(" ", 1)[1].partition(" - ")[0]
            for line in done.stdout.splitlines()
            if line.startswith(("FAILED", "ERROR"))
        ]
        if not failed and done.returncode not in (0, NO_TESTS):
            return [tests[0]]  # pytest itself ended
        return failed

    def passes(self, test: str, mutant: Mutant) -> bool:
        """Whether a test passes without the mistake of the mutant."""
        if test not in self.whole:
            self.put(None, mutant.file)
            failed = self.fails(test)
            self.put(mutant, mutant.file)
            if failed:
                return False
            self.whole.add(test)
        return True

    def killer(self, file: str, mutant: Mutant, slow: list[str]) -> str:
        """Find a fast test of a file that fails, and passes without the mistake.

        Args:
            file: of tests.
            mutant: whose mistake is in place, and is in place again afterwards.
            slow: names that are not fast.

        Returns:
            Its name; "" where there is none, NO_END where a run did not end.
        """
        while failed := self.fails(file, leave=(*slow, *self.broken)):
            if failed == [NO_END] or self.passes(failed[0], mutant):
                return failed[0]
            self.broken.update(failed)
        return ""


def used() -> float:
    """Return the processor seconds of all processes that ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def judge(mutant: Mutant, place: Copy, slow: dict[str, list[str]]) -> None:
    """Show a mutant to the fast tests, and to the slow ones where these accept it.

    Args:
        mutant: whose findings are filled in.
        place: where the tests run.
        slow: names of slow tests by their file.
    """
    listed = [name for names in slow.values() for name in names]
    others = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "tests").glob("*/test_*.py"))
        if mutant.file in imported(file)
    ]
    others = [file for file in others if file != mutant.tests][:NEIGHBOURS]
    place.put(mutant, mutant.file)
    try:
        for file in (mutant.tests, *others):
            mutant.killed_by = place.killer(file, mutant, listed)
            if mutant.killed_by:
                return
        for name in slow[mutant.tests]:
            failed = place.fails(name)
            if failed == [NO_END]:
                mutant.killed_by = NO_END
                return
            mutant.slow[name] = bool(failed) and place.passes(name, mutant)
    finally:
        place.put(None, mutant.file)


def table(mutants: list[dict[str, Any]], slow: dict[str, list[str]]) -> str:
    """Return the matrix as text: a row for each slow test.

    Args:
        mutants: as they are recorded.
        slow: names of slow tests by their file.
    """
    rows = ["mutants  by fast tests  by it alone  by it and others  by none  slow test"]
    for file, names in slow.items():
        of = [m for m in mutants if m["tests"] == file and m["killed_by"] != NO_END]
        fast = sum(bool(m["killed_by"]) for m in of)
        for name in names:
            noticed = [m for m in of if m["slow"].get(name)]
            alone = sum(sum(m["slow"].values()) == 1 for m in noticed)
            none = sum(not m["killed_by"] and not any(m["slow"].values()) for m in of)
            counts = (len(of), fast, alone, len(noticed) - alone, none)
            widths = (7, 15, 13, 18, 9)
            cells = (f"{n:{w}d}" for n, w in zip(counts, widths, strict=True))
            rows.append(f"{''.join(cells)}  {name}")
    spent = sum(m["seconds"] for m in mutants)
    unknown = sum(m["killed_by"] == NO_END for m in mutants)
    rows.append(
        f"{len(mutants)} mutants, of which {unknown} were not decided in {SLOWEST} s; "
        f"{spent:.0f} processor seconds"
    )
    return "\n".join(rows)


def main() -> int:
    """Draw mutants, show them to the tests, and print the matrix."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.sole_killers", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tests", type=int, default=50, help="of the slowest")
    parser.add_argument("--mutants", type=int, default=1, help="for each of them")
    parser.add_argument("--minutes", type=float, default=25.0, help="of processor")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a word in the names of test files")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--print", action="store_true", help="what is recorded; run nothing"
    )
    options = parser.parse_args()
    slow = slow_tests(options.tests)
    record: dict[str, Any] = {"seed": options.seed, "mutants": []}
    if options.out.exists():
        record = json.loads(options.out.read_text(encoding="utf-8"))
    if not options.print:
        fill(record, slow, options)
    print(table(record["mutants"], slow))
    return 0


def fill(record: dict[str, Any], slow: dict[str, list[str]], options: Any) -> None:
    """Judge the mutants that are not recorded yet, while there is time.

    Args:
        record: of the file that is written after each mutant.
        slow: names of slow tests by their file.
        options: of the command line.
    """
    known = {
        (m["file"], m["before"], m["after"], m["tests"]) for m in record["mutants"]
    }
    drawn = [
        [*draw(file, names, options.mutants, options.seed)]
        for file, names in slow.items()
        if options.only in file
    ]
    # one of each file before the second of any
    queue = [mutant for nth in zip_longest(*drawn) for mutant in nth if mutant]
    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    record["commit"] = subprocess.run(
        head, capture_output=True, text=True
    ).stdout.strip()
    record["date"] = time.strftime("%Y-%m-%d")
    with tempfile.TemporaryDirectory(prefix="upref-") as folder:
        place = Copy(Path(folder))
        for mutant in queue:
            if (mutant.file, mutant.before, mutant.after, mutant.tests) in known:
                continue
            before = used()
            judge(mutant, place, slow)
            mutant.seconds = round(used() - before, 1)
            record["mutants"].append(asdict(mutant))
            write_atomically(options.out, json.dumps(record, indent=1) + "\n")
            print(mutant, flush=True)
            if used() > 60 * options.minutes:
                break


if __name__ == "__main__":
    sys.exit(main())
