# SPDX-License-Identifier: Apache-2.0
"""For pytest: `assert_policy_loss(my_loss, "gspo", eps_low=3e-4,
eps_high=4e-4)`, `assert_advantages(my_fn, "group_norm")`, `assert_kl(my_fn,
"k3")`, `assert_logprobs(my_fn)`, `assert_step(step, model, "dapo", temperature=0.7)`,
imported or as fixtures.

Nothing of upref is imported before the first use: the plug-in is loaded into every
pytest run.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from upref.step.check import StepReport
    from upref.verify.report import Report

AnyReport = TypeVar("AnyReport", bound="Report")
CONFORMANCE = "upref.conformance"


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Add the options of `pytest --pyargs upref.conformance`, and only where the
    command line names the suite.

    Another plug-in may have an option of the same name, which would end every run of
    pytest.
    """
    if any(
        arg == CONFORMANCE or arg.startswith((f"{CONFORMANCE}.", f"{CONFORMANCE}::"))
        for arg in args
    ):
        from upref.conformance import pytest_options

        early_config.pluginmanager.register(pytest_options, pytest_options.__name__)


def assert_policy_loss(
    loss: Any, objective: Any, *, prove: bool = False, **hp: Any
) -> "Report":
    """Run `upref.check` and return its Report; fail the test if the loss is not the
    objective.

    Args:
        loss: a function of (log_prob, old_log_prob, advantages, mask), or its name.
        objective: a name of `upref list`, or an Objective.
        prove: also run `upref.prove`, and fail the test if the loss is not proved for
            every value; needs z3-solver.
        **hp: hyperparameters, by the objective's names or the function's own.

    Returns:
        The Report, without failures.
    """
    __tracebackhide__ = True
    from upref.verify.check import check

    report = _passed(check(loss, objective, **hp))
    if prove:
        from upref.verify.proof import prove as proof_of

        if not (proof := proof_of(loss, objective, **hp)):
            pytest.fail(f"\n{proof}", pytrace=False)
    return report


def assert_advantages(fn: Any, estimator: str, **hp: Any) -> "Report":
    """Run `upref.check_advantages` and return its Report; fail the test if fn is not
    the estimator.

    Args:
        fn: a function of (rewards [B], group [B]).
        estimator: a name of upref.advantages.
        **hp: arguments of the estimator.

    Returns:
        The Report, without failures.
    """
    __tracebackhide__ = True
    from upref.verify.advantages import check_advantages

    return _passed(check_advantages(fn, estimator, **hp))


def assert_kl(fn: Any, estimator: str, *, skip: Sequence[str] = ()) -> "Report":
    """Run `upref.check_kl` and return its Report; fail the test if fn is not the
    estimator.

    Args:
        fn: a function of (log_prob, ref_log_prob) that returns one value per token.
        estimator: k1, k2 or k3.
        skip: names of checks that are not run, as the report prints them; for example
            ("clamp",).

    Returns:
        The Report, without failures.
    """
    __tracebackhide__ = True
    from upref.verify.kl import check_kl

    return _passed(check_kl(fn, estimator, skip=skip))


def assert_logprobs(fn: Any, **settings: Any) -> "Report":
    """Run `upref.check_logprobs` and return its Report; fail the test if values or
    gradients differ.

    Args:
        fn: a function of logits, or of hidden states and a weight, and of tokens.
        **settings: as of `upref.check_logprobs`.

    Returns:
        The Report, without failures.
    """
    __tracebackhide__ = True
    from upref.verify.logprobs import check_logprobs

    return _passed(check_logprobs(fn, **settings))


def assert_step(
    step: Any,
    model: Any,
    objective: Any,
    *,
    half_precision: bool = False,
    **settings: Any,
) -> "StepReport":
    """Run `upref.check_step` and return its Report; fail the test if the gradient of
    the step differs.

    Args:
        step, model, objective, **settings: as for `check_step`.
        half_precision: the step is meant to compute in bfloat16 or float16. If not, a
            test fails where the step of a float32 model does: the comparison is then
            so wide that a factor of 1.05 passes.

    Returns:
        The Report.
    """
    __tracebackhide__ = True
    from upref.step import check_step

    report = _passed(check_step(step, model, objective, **settings))
    if report.computed_in and not half_precision:
        pytest.fail(
            f"the model is in float32, and the step computes in {report.computed_in}, which hides "
            "small errors: compute in float32, or pass half_precision=True if that is meant",
            pytrace=False,
        )
    return report


def _passed(report: "AnyReport") -> "AnyReport":
    """Return the report; fail the test where it has failures."""
    __tracebackhide__ = True
    if not report:
        pytest.fail(str(report), pytrace=False)  # its first line is in the summary
    return report


def _fixture(function: Callable[..., Any]) -> Any:
    """Make a fixture of the function's name that returns the function itself."""

    def fixture() -> Callable[..., Any]:
        """Replaced by a line that names the function, for `pytest --fixtures`."""
        return function

    fixture.__doc__ = f"The function `{function.__name__}` itself."
    return pytest.fixture(name=function.__name__)(fixture)


_assert_policy_loss = _fixture(assert_policy_loss)
_assert_advantages = _fixture(assert_advantages)
_assert_kl = _fixture(assert_kl)
_assert_logprobs = _fixture(assert_logprobs)
_assert_step = _fixture(assert_step)
