# SPDX-License-Identifier: Apache-2.0
"""The one test of the suite:
`pytest --pyargs upref.conformance --adapter FILE.py:CLASS`.
"""

import pytest

from upref.conformance.cases import Case
from upref.conformance.runner import Outcome, Status


def test_step(
    case: Case, outcome: Outcome, expected_failure: str, failure: str
) -> None:
    """The gradient that the optimizer gets is the gradient of the objective."""
    if outcome.status is Status.SKIPPED:
        pytest.skip(f"{case.id}: {outcome.reason}")
    if expected_failure and outcome.status is Status.PASSED:
        pytest.fail(
            f"{case.id} passes, and the list of known failures has it: take it out.",
            pytrace=False,
        )
    if expected_failure:
        pytest.xfail(expected_failure)
    if outcome.status is Status.FAILED:
        pytest.fail(failure, pytrace=False)
