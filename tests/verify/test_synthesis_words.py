# SPDX-License-Identifier: Apache-2.0
"""Numbers of an edited formula are folded where they can be, and printed where not."""

import ast

import pytest

from upref.verify.synthesis.formula import _Folded


@pytest.mark.parametrize(
    ("written", "printed"),
    [("1 - 0.2", "0.8"), ("1 / (1 - 1)", "1 / 0.0"), ("10.0 ** 400", "10.0 ** 400")],
)
def test_numbers_are_folded_where_they_can_be(written, printed):
    tree = ast.parse(written, mode="eval").body
    assert ast.unparse(_Folded().visit(tree)) == printed
