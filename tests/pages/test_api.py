# SPDX-License-Identifier: Apache-2.0
"""The examples of the API page run, and print what it shows."""

import doctest
import sys

import pytest
import torch

import upref
from docs.site.api import EXAMPLES, GROUPS
from upref import definition

FLAGS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
# it takes what `record_step` yields: the example of `record_step` calls it
ELSEWHERE = {"check_recorded"}


def test_each_public_name_has_an_example():
    assert set(EXAMPLES) == set(upref.__all__) - ELSEWHERE
    assert all(f"upref.{name}(" in EXAMPLES["record_step"] for name in ELSEWHERE)


def test_each_public_name_is_in_one_group_of_the_page():
    named = [name for group in GROUPS.values() for name in group]
    assert sorted(named) == sorted(upref.__all__)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_prints_what_it_shows(name, monkeypatch):
    assert upref.names()  # loads all, before an example registers one more
    monkeypatch.setattr(definition, "OBJECTIVES", dict(definition.OBJECTIVES))
    torch.manual_seed(0)
    space = {"torch": torch, "upref": upref}
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name], space, name, None, 0)
    assert example.examples and all(
        e.want or "test_" in EXAMPLES[name] for e in example.examples[-1:]
    )
    result = doctest.DocTestRunner(optionflags=FLAGS).run(example, out=sys.stdout.write)
    assert result.attempted and not result.failed
