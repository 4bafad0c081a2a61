# SPDX-License-Identifier: Apache-2.0
"""Rules of operators have torch's answer where a number is infinite, NaN or missing."""

import math

import pytest
import torch
from torch import Tensor

from upref.proof.operators import Operation, find_rule
from upref.proof.trace import NoProof, Trace
from upref.proof.values import Values

ATEN = torch.ops.aten
SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 2, -2, 0], dtype=torch.float64)
PAIRS = SPECIAL[:, None], SPECIAL[None, :]
NONE = torch.empty(2, 0, dtype=torch.float64)
ROWS = torch.tensor([[1, 1], [2, 4]], dtype=torch.float64)


def answer_of_rule(operator, *arguments, **options) -> Tensor:
    """Return what the rule of an operator computes of constants."""
    operation = Operation(Trace(Values(), {}), operator, arguments, options)
    ids = find_rule(operation.name)(operation)
    v = operation.values
    numbers = [float(v.special(i) or v.constant(i)) for i in ids.reshape(-1).tolist()]
    return torch.tensor(numbers, dtype=torch.float64).view(ids.shape)


@pytest.mark.parametrize("name", ["minimum", "maximum", "fmin", "fmax"])
def test_the_smaller_of_two_values_is_torchs_with_nan(name):
    operator = getattr(ATEN, name).default
    found, expected = answer_of_rule(operator, *PAIRS), operator(*PAIRS)
    assert torch.equal(found.nan_to_num(9), expected.nan_to_num(9))
    assert torch.equal(found.isnan(), expected.isnan())


def test_a_quotient_is_torchs_with_infinity_nan_and_0():
    found, expected = answer_of_rule(ATEN.div.Tensor, *PAIRS), PAIRS[0] / PAIRS[1]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", ["var", "std"])
@pytest.mark.parametrize("rows", [NONE, ROWS, ROWS[:, :1]], ids=["no", "two", "one"])
@pytest.mark.parametrize("correction", [0, 1, 2, 3])
def test_a_variance_is_torchs_with_too_few_values(name, rows, correction):
    operator = getattr(ATEN, name).correction
    found = answer_of_rule(operator, rows, [1], correction=correction)
    expected = operator(rows, [1], correction=correction)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_variance_that_divides_what_varies_by_0_is_not_proved():
    """Two values and a correction of 2: infinite, or NaN where both are equal."""
    trace = Trace(Values(), {"x": 1.0})
    x = torch.zeros(2, dtype=torch.float64)
    trace.put(x, torch.tensor([trace.values.variable("x"), trace.values.zero]))
    operation = Operation(trace, ATEN.var.correction, (x, None), {"correction": 2})
    with pytest.raises(NoProof, match="divides by 0"):
        find_rule("var")(operation)


def test_the_bounds_of_a_product_are_those_of_all_its_factors():
    """Of two counts, and of a choice between 5 and -5 with a count: each fits int64 by
    its bounds, and five times two counts do not.
    """
    v = Values()
    v.positive_totals = {v.one}
    tokens = v.call("sum over the row", v.one)
    rows = v.call("sum over the rows", v.one)
    _, most = v.whole_bounds(tokens)
    both = v.multiply(tokens, rows)
    assert v.whole_bounds(both) == (1, most**2)
    r = v.variable("r", 0, math.inf)
    choice = v.choose(v.greater(r, v.one), v.number(5), v.number(-5))
    assert v.whole_bounds(v.multiply(choice, tokens)) == (-5 * most, 5 * most)
    assert most**2 <= torch.iinfo(torch.int64).max < 5 * most**2
    assert v.whole_bounds(v.multiply(v.number(5), both)) == (5, 5 * most**2)
