# SPDX-License-Identifier: Apache-2.0
"""Rules of the house that no linter has."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("upref", "upref_frameworks", "upref_course", "paper")
TRUTHS = (
    "bool",
    "any",
    "all",
    "isinstance",
    "hasattr",
    "callable",
    "startswith",
    "endswith",
    "is_integer",
)
METHODS = ("startswith", "endswith", "find", "index", "count", "split", "partition")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
EVERYWHERE = sorted(f for p in (*PACKAGES, "repro", "docs", "benchmarks", "tests", "derivations", "figures")
                    for f in (ROOT / p).rglob("*.py"))  # fmt: skip


def test_every_file_has_its_licence_in_one_line():
    assert all(
        f.read_text(encoding="utf-8").startswith("# SPDX")
        for f in FILES
        if f.stat().st_size
    )


def test_what_a_docstring_returns_is_a_class_that_there_is():
    """`Returns: An Identity`, of a class that is called Identification."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
    classes = {
        n.name
        for tree in trees.values()
        for n in ast.walk(tree)
        if isinstance(n, ast.ClassDef)
    }
    named = []
    for file, tree in trees.items():
        for n in ast.walk(tree):
            text = ast.get_docstring(n) if isinstance(n, ast.FunctionDef) else None
            for word in re.findall(
                r"(?:Returns|Yields):\n +(?:An?|The) ([A-Z][a-z]\w*)", text or ""
            ):
                named.append(word)
                assert word in classes, (
                    f"{file.relative_to(ROOT)}:{n.lineno}: there is no class {word}"
                )
    assert len(named) > 9


def test_no_decision_on_the_words_of_a_fault():
    """A fault is a record: what is done with it follows from its fields."""
    for file in FILES:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        called = {id(n.func) for n in nodes if isinstance(n, ast.Call)}

        def words(n):
            """Return whether this is an attribute `words` that is not called."""
            return (
                isinstance(n, ast.Attribute)
                and n.attr == "words"
                and id(n) not in called  # noqa: B023
            )

        asked = [
            n
            for n in nodes
            if isinstance(n, ast.Compare) and any(map(words, ast.walk(n)))
        ]
        asked += [
            n
            for n in nodes
            if isinstance(n, ast.Attribute) and words(n.value) and n.attr in METHODS
        ]
        assert not asked, f"{file.relative_to(ROOT)}:{asked[0].lineno}"


def test_nothing_is_multiplied_by_a_condition():
    """`"text" * condition` is a conditional expression that ends in a TypeError where
    the condition is numpy's.
    """
    fields = true_or_false(FILES)
    found = [
        f"{f.relative_to(ROOT)}:{n.lineno}"
        for f in EVERYWHERE
        for n in multiplied_by_a_condition(f, fields)
    ]
    assert not found, f"write `x if condition else ...`: {', '.join(found)}"


@pytest.mark.parametrize(
    "line",
    [
        "'s' * (n > 1)",
        "f'{n}' * bool(n)",
        "'s' * (n > 1 and m)",
        "[n] * (n == 0)",
        "(1,) * (name != 'signed')",
        "rows * (not out)",
        "out += [n] * bool(n)",
        "bool(n) * 0.1",
        "0.04 * (which == 'gains')",
        "'s' * flag",
        "'s' * plain",
        "['s'] * down",
        "'s' * text.startswith('a')",
        "f'{\"s\" * (n > 1)}'",
    ],
)
def test_a_product_with_a_condition_is_found(tmp_path, line):
    file = tmp_path / "one.py"
    head = "def f(n, m, text, flag: bool, plain=False):\n  for down in (True, False):\n    out = rows = which = name = n\n"
    file.write_text(f"{head}    {line}\n", encoding="utf-8")
    assert multiplied_by_a_condition(file)


def test_a_product_with_a_number_or_a_mask_is_none(tmp_path):
    file = tmp_path / "one.py"
    lines = [
        "[0] * n",
        "'x' * len(s)",
        "A * (r > 1)",
        "4 * (x or 0)",
        "1e-3 * (max(xs) or 1.0)",
        "'-' * (n or 1)",
    ]
    file.write_text("\n".join(lines), encoding="utf-8")
    assert not multiplied_by_a_condition(file)


def multiplied_by_a_condition(
    file: Path, fields: frozenset[str] = frozenset()
) -> list[ast.BinOp]:
    """Return the products of a condition, and of anything that repeats if the other
    side is one.

    A comparison counts only beside what repeats, since it may be a mask. fields:
    attributes that are True or False.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    flags = flags_of(tree)
    products = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)
    ]
    return [
        n
        for n in products
        for value, factor in ((n.left, n.right), (n.right, n.left))
        if is_truth(factor)
        or (isinstance(factor, ast.Attribute) and factor.attr in fields)
        or (repeats(value) and is_condition(factor, flags))
    ]


def true_or_false(files: list[Path]) -> frozenset[str]:
    """Return the attributes that are annotated as bool, in every class that has them."""
    annotated: dict[str, set[str]] = {}
    for file in files:
        for one in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for n in one.body if isinstance(one, ast.ClassDef) else []:
                match n:
                    case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                        annotated.setdefault(name, set()).add(ast.unparse(annotation))
                    case ast.FunctionDef(name=name, returns=ast.expr() as returns):
                        annotated.setdefault(name, set()).add(ast.unparse(returns))
    return frozenset(name for name, types in annotated.items() if types == {"bool"})


def repeats(n: ast.expr) -> bool:
    """Return whether this is a list, a tuple or a text, which a product repeats."""
    return isinstance(n, ast.List | ast.Tuple | ast.JoinedStr) or (
        isinstance(n, ast.Constant) and isinstance(n.value, str | bytes)
    )


def is_truth(n: ast.expr) -> bool:
    """Return whether this is True or False, never a mask."""
    if isinstance(n, ast.Call):
        called = (
            n.func.id
            if isinstance(n.func, ast.Name)
            else n.func.attr
            if isinstance(n.func, ast.Attribute)
            else ""
        )
        return called in TRUTHS
    if isinstance(n, ast.Compare):
        of_text = any(
            isinstance(x, ast.Constant) and isinstance(x.value, str)
            for x in (n.left, *n.comparators)
        )
        return of_text or isinstance(n.ops[0], ast.In | ast.NotIn | ast.Is | ast.IsNot)
    return isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.Not)


def is_condition(n: ast.expr, flags: set[str]) -> bool:
    """Return whether this is a comparison, a truth value, a name of `flags`, or `and`
    and `or` of one.
    """
    if isinstance(n, ast.BoolOp):
        return any(is_condition(x, flags) for x in n.values)
    named = isinstance(n, ast.Name) and n.id in flags
    return (
        named
        or is_truth(n)
        or isinstance(n, ast.Compare)
        or (isinstance(n, ast.Constant) and isinstance(n.value, bool))
    )


def flags_of(tree: ast.Module) -> set[str]:
    """Return the names that hold True or False somewhere in a file, as a parameter, a
    variable of a loop or a result.
    """
    flags = set()
    for n in ast.walk(tree):
        match n:
            case ast.arg(arg=name, annotation=ast.Name(id="bool")):
                flags.add(name)
            case ast.arguments():
                with_defaults = [*n.posonlyargs, *n.args][
                    len(n.posonlyargs) + len(n.args) - len(n.defaults) :
                ]
                given = [
                    *zip(with_defaults, n.defaults, strict=True),
                    *zip(n.kwonlyargs, n.kw_defaults, strict=True),
                ]
                flags |= {
                    a.arg
                    for a, x in given
                    if isinstance(x, ast.Constant) and isinstance(x.value, bool)
                }
            case ast.For(
                target=ast.Name(id=name),
                iter=ast.Tuple(elts=[ast.Constant(value=True | False), *_]),
            ):
                flags.add(name)
            case ast.comprehension(
                target=ast.Name(id=name),
                iter=ast.Tuple(elts=[ast.Constant(value=True | False), *_]),
            ):
                flags.add(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_condition(
                value, set()
            ):
                flags.add(name)
    return flags


def test_a_name_of_a_test_fits_on_a_line():
    """Those that the claims cite keep the name under which their verdicts were
    computed.
    """
    cited = (ROOT / "paper/claims/claims.toml").read_text(encoding="utf-8")
    texts = (f.read_text(encoding="utf-8") for f in (ROOT / "tests").rglob("*.py"))
    names = re.findall(r"def (test_\w+)", "".join(texts))
    assert [n for n in names if len(n) > 80 and n not in cited] == []
