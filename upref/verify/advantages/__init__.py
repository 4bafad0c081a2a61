# SPDX-License-Identifier: Apache-2.0
"""`upref.check_advantages`: is this function of rewards the advantage estimator that it
is meant to be?

Expected numbers are exact rationals (upref.verify.exact), on groups that are even,
uneven, interleaved, of one response, of equal rewards, large. What a name leaves open,
ddof and eps, is read off the function and said.
"""

import time
from typing import Any

from upref import advantages
from upref.errors import InputError
from upref.verify.advantages.case import AdvantageCase, choose_inputs
from upref.verify.advantages.function import read
from upref.verify.advantages.oracles import ORACLES
from upref.verify.exact import EVEN, NORMED
from upref.verify.oracle import run, validate_names
from upref.verify.report import Report, not_run, restores_state


@restores_state
def check_advantages(
    fn: Any, estimator: str, *, skip: tuple[str, ...] = (), **hp: Any
) -> Report:
    """Compare a function with an advantage estimator of upref.advantages.

    Args:
        fn: `(rewards [N], group [N]) -> A [N]`, by these names, their usual variants or
            by position. It may take a mask and return [N, T]; verl's
            `(token_level_rewards, response_mask, index, ...) -> (adv,
            returns)` and `(rewards, n)` for contiguous groups of n are recognized too.
            Or a name as for `check`.
        estimator: group_norm, leave_one_out, ...
        skip: names of oracles not to run.
        **hp: ddof and eps of estimators that have them. What is not given is measured
            and reported.

    Returns:
        A Report: true if nothing fails.

    Raises:
        InputError: fn cannot be run.
    """
    start = time.perf_counter()
    advantages.get(estimator)
    if unknown := sorted(
        hp.keys() - ({"ddof", "eps"} if estimator in NORMED else set())
    ):
        raise InputError(f"{estimator} has no setting {unknown[0]!r}.")
    for k, v in hp.items():
        if isinstance(v, bool) or not isinstance(v, int | float) or not 0 <= v < 1e300:
            raise InputError(f"{k} must be a number >= 0, got {repr(v)[:60]}.")
    validate_names(ORACLES, skip)
    case = choose_inputs(read(fn, estimator, hp), estimator, hp)
    found, ran = run(ORACLES, case, skip)
    return Report(
        loss=case.f.name,
        objective=estimator,
        hp={"ddof": case.divided.ddof, "eps": case.divided.eps} if case.known else hp,
        findings=found,
        read_as=str(case.f.reading),
        assumptions=[*case.f.assumptions(), *_assumed(case)],
        oracles=ran,
        tolerances={"advantage, relative": case.f.tol},
        seconds=time.perf_counter() - start,
        not_checked=not_run(ran),
    )


def _assumed(case: AdvantageCase) -> list[str]:
    """What the comparison has assumed, in words."""
    even_batch = case.batch(EVEN)
    by = case.divided
    out = []
    if (case.known or not (case.wrong or case.name in NORMED)) and case.f.tol > 1e-6:
        out.append("it computes in float32: compared to 1e-4")
    if case.f.outcome(even_batch.R, even_batch.group).uneven:
        out.append(
            "its advantages differ between the tokens of a response: the first is compared"
        )
    if case.known:
        over = "G - 1 (Bessel)" if by.ddof else "G (population)"
        down = f", seen beside a std of {by.least:.2g} and more" if by.least else ""
        out.append(f"std divides by {over}; the denominator is {by}{down}")
    return out
