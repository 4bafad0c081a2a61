# SPDX-License-Identifier: Apache-2.0
"""`upref.check_advantages`: is this function of rewards the advantage estimator that it
is meant to be?

Expected numbers are exact rationals (upref.verify.exact), on groups that are even,
uneven, interleaved, of one response, of equal rewards, large. What a name leaves open,
ddof and eps, is read off the function and said.
"""

import time
from typing import Any

from upref import advantages, catalog, token_advantages
from upref.errors import InputError
from upref.verify.advantages.case import AdvantageCase, choose_inputs
from upref.verify.advantages.function import read
from upref.verify.advantages.oracles import ORACLES
from upref.verify.exact import DIVIDED_BY_STD, EVEN_GROUPS
from upref.verify.formulas.tokens import check_token_advantages
from upref.verify.oracle import run, validate_names
from upref.verify.report import Report, not_run, restores_state

FLOAT64_TOL = 1e-6  # a larger tolerance is that of float32


@restores_state
def check_advantages(
    fn: Any, estimator: str, *, skip: tuple[str, ...] = (), **hp: Any
) -> Report:
    """Compare a function with an advantage estimator of upref.advantages, or with one of
    tokens and turns of upref.token_advantages.

    Args:
        fn: `(rewards [N], group [N]) -> A [N]`, by these names, their usual variants or
            by position. It may take a mask and return [N, T]; verl's
            `(token_level_rewards, response_mask, index, ...) -> (adv,
            returns)` and `(rewards, n)` for contiguous groups of n are recognized too.
            Or a name as for `check`. For an estimator of tokens or turns: a function of
            rewards, values, mask, group, ..., [N, K] and [N], whose arguments are read by
            their names alone.
        estimator: group_norm, leave_one_out, ...; gae, discounted_returns, gigpo, ...
        skip: names of oracles not to run.
        **hp: ddof and eps of estimators that have them; gamma, lam, ... of those of
            tokens. What is not given is measured and reported.

    Returns:
        A Report: true if nothing fails.

    Raises:
        InputError: fn cannot be run.
    """
    start = time.perf_counter()
    known_names = [*advantages.ADVANTAGES, *token_advantages.TOKEN_ADVANTAGES]
    if not isinstance(estimator, str) or estimator not in known_names:
        raise catalog.unknown_advantage(estimator, known_names)
    if estimator in token_advantages.TOKEN_ADVANTAGES:
        return check_token_advantages(fn, estimator, skip, hp)
    settings = {"ddof", "eps"} if estimator in DIVIDED_BY_STD else set()
    if unknown := sorted(hp.keys() - settings):
        raise InputError(f"{estimator} has no setting {unknown[0]!r}.")
    for k, v in hp.items():
        if isinstance(v, bool) or not isinstance(v, int | float) or not 0 <= v < 1e300:
            raise InputError(f"{k} must be a number >= 0, got {repr(v)[:60]}.")
    validate_names(ORACLES, skip)
    case = choose_inputs(read(fn, estimator, hp), estimator, hp)
    found, ran = run(ORACLES, case, skip)
    if case.denominator_is_known:
        hp = {"ddof": case.denominator.ddof, "eps": case.denominator.eps}
    return Report(
        loss=case.function.name,
        objective=estimator,
        hp=hp,
        findings=found,
        read_as=str(case.function.reading),
        assumptions=[*case.function.assumptions(), *_assumptions_of_comparison(case)],
        oracles=ran,
        tolerances={"advantage, relative": case.function.tol},
        seconds=time.perf_counter() - start,
        not_checked=[
            *case.function.other_outputs(EVEN_GROUPS),
            *not_run(ran),
        ],
    )


def _assumptions_of_comparison(case: AdvantageCase) -> list[str]:
    """Return the assumptions under which the function was compared, as sentences."""
    denominator = case.denominator
    sentences = []
    is_divided_by_std = case.name in DIVIDED_BY_STD
    # otherwise the oracle `values` reports the difference
    tolerance_is_meant = case.denominator_is_known or not (
        case.wrong or is_divided_by_std
    )
    if tolerance_is_meant and case.function.tol > FLOAT64_TOL:
        sentences.append("it computes in float32: compared to 1e-4")
    if case.denominator_is_known:
        over = "G - 1 (Bessel)" if denominator.ddof else "G (population)"
        smallest = denominator.smallest_std
        range_of_std = (
            f", seen beside a std of {smallest:.2g} and more" if smallest else ""
        )
        sentences.append(
            f"std divides by {over}; the denominator is {denominator}{range_of_std}"
        )
    return sentences
