# SPDX-License-Identifier: Apache-2.0
"""For pytest: `assert_policy_loss(my_loss, "gspo", eps_low=3e-4, eps_high=4e-4)`, imported or as a fixture.

Nothing of upref is imported before the first use: the plug-in is loaded into every pytest run.
"""

from typing import Any

import pytest


def assert_policy_loss(loss: Any, objective: Any, **hp) -> Any:
    """The Report of `upref.check`; fails the test with it where the loss is not the objective."""
    __tracebackhide__ = True
    from upref.check.verdict import check

    report = check(loss, objective, **hp)
    if not report:
        pytest.fail(f"\n{report}", pytrace=False)
    return report


@pytest.fixture(name="assert_policy_loss")
def _assert_policy_loss() -> Any:
    """The function `assert_policy_loss` itself."""
    return assert_policy_loss
