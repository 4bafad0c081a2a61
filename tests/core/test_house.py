# SPDX-License-Identifier: Apache-2.0
"""Rules of the house that no linter has."""

import ast
import re
from pathlib import Path

import upref

ROOT = Path(upref.__file__).parent
MOST = 250
METHODS = ("startswith", "endswith", "find", "index", "count", "split", "partition")
FILES = sorted(ROOT.rglob("*.py"))


def test_a_long_file_says_why_at_its_top():
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        top = ast.get_docstring(ast.parse(text)) or ""
        assert len(text.splitlines()) <= MOST or "One file" in top, f"{file.relative_to(ROOT)} is long and says not why"


def test_every_file_has_its_licence_in_one_line():
    assert all(f.read_text(encoding="utf-8").startswith("# SPDX") for f in FILES if f.stat().st_size)


def test_no_decision_on_the_words_of_a_fault():
    """A fault is a record: what is done with it follows from its fields."""
    for file in FILES:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        called = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
        words = lambda n: isinstance(n, ast.Attribute) and n.attr == "words" and id(n) not in called  # noqa: B023
        asked = [n for n in nodes if isinstance(n, ast.Compare) and any(map(words, ast.walk(n)))]
        asked += [n for n in nodes if isinstance(n, ast.Attribute) and words(n.value) and n.attr in METHODS]
        assert not asked, f"{file.relative_to(ROOT)}:{asked[0].lineno}"


def test_a_name_of_a_test_is_at_most_60_letters():
    """Those that the claims cite keep the name under which their verdicts were computed."""
    cited = (ROOT / "paper/claims/claims.toml").read_text(encoding="utf-8")
    texts = (f.read_text(encoding="utf-8") for f in (ROOT.parent / "tests").rglob("*.py"))
    names = re.findall(r"def (test_\w+)", "".join(texts))
    assert [n for n in names if len(n) > 60 and n not in cited] == []
