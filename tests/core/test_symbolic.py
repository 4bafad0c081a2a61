# SPDX-License-Identifier: Apache-2.0
"""An objective in pieces: between its breakpoints it reads as one expression."""

import pytest
import sympy

from upref.symbolic import Where, pieces

LP, LP_OLD = sympy.symbols("lp lp_old", real=True)
R = sympy.Symbol("r", positive=True)
C = sympy.Symbol("c", positive=True)
RATIO = sympy.exp(LP - LP_OLD)


def test_every_breakpoint_ends_a_piece():
    J = Where(RATIO > C, RATIO, sympy.Integer(1))
    found = pieces([J], LP, LP_OLD, R, {C: 2})
    assert [(low, high) for low, high, _ in found] == [(0, C), (C, sympy.oo)]


@pytest.mark.parametrize("bound", [RATIO**2, RATIO + RATIO**2])
def test_a_breakpoint_without_a_closed_form_is_refused(bound):
    J = Where(bound > C, RATIO, sympy.Integer(1))
    with pytest.raises(ValueError, match="no closed form"):
        pieces([J], LP, LP_OLD, R, {C: 2})
