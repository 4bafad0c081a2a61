# SPDX-License-Identifier: Apache-2.0
"""Every finding has a sentence, every sentence a finding, and no other file says what
one means.
"""

import ast
from pathlib import Path

import upref.replay
from upref.replay.words import CAUSES, sentence

FOLDER = Path(upref.replay.__file__).parent


def literals(file):
    """Return the texts in a file's code."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return {
        n.value
        for n in nodes
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }


def test_every_sentence_belongs_to_a_cause_that_is_found():
    used = set().union(
        *(literals(f) for f in FOLDER.glob("*.py") if f.name != "words.py")
    )
    assert set(CAUSES) <= used, set(CAUSES) - used


def test_a_sentence_quotes_its_numbers():
    text = sentence(
        "rows",
        {"rows": 2, "of": 64, "first": 3, "second": 4, "before": 0.5, "after": 0.01},
    )
    assert (
        text.startswith("2 of 64 responses")
        and "row 3" in text
        and "0.5 to 0.01" in text
    )


def test_every_sentence_ends():
    assert all(text.endswith(".") and "  " not in text for text in CAUSES.values())
