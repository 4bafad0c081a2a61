# SPDX-License-Identifier: Apache-2.0
"""Plain English in what people read: phrases that a review found hard to read, and what
to write instead.
"""

import argparse
import ast
import inspect
import re
from pathlib import Path

import pytest

import upref
from upref.cli import _parser

ROOT = Path(__file__).parents[2]
THING = r"(?:upref|check|identify|code|loss|function|objective|verl|TRL|trainer|page|report|test|lesson|oracle|command)"
PLAIN = {
    r"\b(?:any|no|some)body's\b": "user-supplied",
    r"\bin the place of\b": "in place of",
    r"\b(?:is|are) told\b": "gets, receives",
    r"\bwhoever\b": "anyone who; or name the person",
    r"\bstands? (?:in|on|at|above|below|beside|behind|there|here|first|before|after|under)\b": "is in, is on, ...",
    r"\bwhat stands\b": "what is",
    r"\bh(?:eld|olds?|olding) (?:\w+ ){0,3}against\b": "compare with",
    rf"\b{THING} (?:sees|wants|knows|thinks|minds|asks)\b": "code reads, needs, has, computes",
    r"\bnowhere\b": "not ... anywhere",
    r"\bhow manieth\b": "index",
    r"\bbe it\b": "whether",
    r"\bfor who\b": "for those who",
    r"\bno more\b(?= [a-z]+ed\b)": "no longer",
    r"\b(?:is|are|was|were|not) asked\b(?! for)": "tested",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bhangs? on\b": "depends on",
    r"\bcomes? of it\b": "results from it",
    r"\bhand(?:s|ed)? (?:over|on|back|each)\b": "pass, give, return",
    r"\b(?:set|put) back\b": "restore",
    r"\bas good as\b": "as precise as, almost",
    r"\b(?:any|every|some)body\b": "a user, people; or name the person",
    r"\blikelier\b": "more likely",
    r"\bcounts? alike\b": "have equal weight",
    r"\b(?:optim|normal|maxim|minim|recogn|summar|initial)is(?:e|ing|er|ation)": "-ize",
    r"\b(?:colou|behaviou|neighbou)rs?\b": "-or",
    r"\bthe more so\b|\bof its own accord\b|\bas the case may be\b": "plain words",
}
GENERATED = ("claims.md",)  # quotations, and records with dates


def pages():
    """Return the pages that people read, without those of GENERATED."""
    named = [
        ROOT / n
        for n in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
    ]
    folders = [
        f
        for d in ("docs", "docs/course", "docs/howto")
        for f in sorted((ROOT / d).glob("*.md"))
    ]
    return [f for f in named + folders if f.name not in GENERATED]


def faults(text):
    """Return the phrases of PLAIN in a text without its code, each with its line and
    what to write.
    """
    text = re.sub(
        r"^(`{3,}|~{3,}).*?^\1",
        lambda m: "\n" * m[0].count("\n"),
        text,
        flags=re.M | re.S,
    )
    text = re.sub(r"`[^`\n]*`", "x", text)
    hits = ((text.count("\n", 0, m.start()) + 1, m[0], better)
            for phrase, better in PLAIN.items() for m in re.finditer(phrase, text, re.I))  # fmt: skip
    return [
        f"line {line}: {found!r}: write {better}"
        for line, found, better in sorted(hits)
    ]


@pytest.mark.parametrize("page", pages(), ids=lambda f: f.relative_to(ROOT).as_posix())
def test_pages_have_no_odd_phrase(page):
    assert faults(page.read_text(encoding="utf-8")) == []


def test_public_docstrings_have_no_odd_phrase():
    texts = {name: inspect.getdoc(getattr(upref, name)) or "" for name in upref.__all__}
    assert {
        name: found for name, text in texts.items() if (found := faults(text))
    } == {}


def test_help_has_no_odd_phrase():
    (verbs,) = (
        a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)
    )
    assert {
        name: found
        for name, p in verbs.choices.items()
        if (found := faults(p.format_help()))
    } == {}


def printed(file):
    """Return the strings of three words and more in a file, but for docstrings: errors,
    notes, causes, hints, pages.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    said = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    strings = (
        n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in said
    )
    return [
        s.value for s in strings if isinstance(s.value, str) and s.value.count(" ") > 1
    ]


@pytest.mark.parametrize(
    "folder", ["upref", "upref_frameworks", "upref_course", "paper", "repro", "docs"]
)
def test_what_code_prints_has_no_odd_phrase(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    hits = {
        str(f.relative_to(ROOT)): found
        for f in files
        if (found := [x for s in printed(f) for x in faults(s)])
    }
    assert len(files) > 5 and hits == {}


@pytest.mark.parametrize(
    "text",
    ["it stands in\nthe file", "the loss is held against it", "The loss wants a mask."],
)
def test_an_odd_phrase_is_found(text):
    assert (
        len(faults(text)) == 1
        and not faults(f"```text\n{text}\n```")
        and not faults("Nobody. It stands.")
    )
