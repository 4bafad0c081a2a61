# SPDX-License-Identifier: Apache-2.0
"""`upref.prove_advantages`: is this function of rewards the advantage estimator for every
reward? A proof, the rewards at which it differs, or why there is neither.
"""

import inspect
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from upref import advantages, catalog, token_advantages
from upref.errors import InputError
from upref.proof.compare import Comparison, compare
from upref.proof.rewards import (
    ALL_TIES,
    LARGEST,
    RewardDomain,
    reward_patterns,
    two_valued_patterns,
)
from upref.proof.solver import require_z3
from upref.proof.state import kept
from upref.proof.subjects import advantages_of
from upref.rollouts import Rollouts
from upref.user_code.guard import state_restored
from upref.verify.advantages.case import choose_inputs
from upref.verify.advantages.function import Function, read
from upref.verify.exact import DIVIDED_BY_STD
from upref.verify.finding import Example
from upref.verify.proof import (
    ADVANTAGE,
    ROUNDED,
    SECONDS,
    Proof,
    check_limits,
    with_changes,
    without_state,
)

ROUNDING = 2e-6  # of a difference, relative to an advantage, in float64
NEXT_TO_0 = 1e-3  # of the largest advantage: smaller ones are compared on this scale
NOISE = 1e-9  # of the largest reward: what its rounding may make of an advantage of 0
TWO_VALUED = ("signed",)  # estimators that read right and wrong alone
MEASURED = "ddof and eps, where they were not given, are those that its numbers show"


def prove_advantages(
    fn: Any,
    estimator: str,
    *,
    responses: int = 4,
    seconds: float = SECONDS,
    **hp: Any,
) -> Proof:
    """Prove that a function of rewards is an advantage estimator for every reward.

    Args:
        fn: as of `upref.check_advantages`.
        estimator: of one reward per response: group_norm, leave_one_out, ...
        responses: of the largest batch; every way to divide them among prompts is proved.
        seconds: the limit of CPU time.
        **hp: ddof and eps of estimators that have them. What is not given is measured.

    Returns:
        A Proof: true if it is proved.

    Raises:
        InputError: the function cannot be run, or the solver is not installed.
    """
    require_z3()
    check_limits(seconds, responses=responses)
    if estimator in token_advantages.TOKEN_ADVANTAGES:
        raise InputError(
            f"{estimator} is an estimator of tokens, of which there are no proofs: "
            "`upref check --as-advantage` compares it."
        )
    if not isinstance(estimator, str) or estimator not in advantages.ADVANTAGES:
        raise catalog.unknown_advantage(estimator, advantages.ADVANTAGES)
    settings = {"ddof", "eps"} if estimator in DIVIDED_BY_STD else set()
    if unknown := sorted(hp.keys() - settings):
        raise InputError(f"{estimator} has no setting {unknown[0]!r}.")
    with state_restored() as changed:
        function = read(fn, estimator, hp)
        first = kept(function.fn)
        case = choose_inputs(function, estimator, hp)
        full_hp = _with_defaults(estimator, hp)
        remarks: tuple[str, ...] = ()
        if case.denominator_is_known and settings - hp.keys():
            eps = _meant_eps(case.denominator.eps)
            full_hp |= {"ddof": case.denominator.ddof, "eps": eps} | hp
            remarks = (MEASURED,)

        def compared(is_small: bool) -> Proof:
            """Compare in batches of up to two responses, or of as many as are asked for."""
            most = 2 if is_small else responses
            return _proved(case.function, estimator, full_hp, most, seconds)

        proof = without_state(case.function.fn, compared, first)
    proof = replace(proof, remarks=(*remarks, *proof.remarks))
    return with_changes(proof, changed)


def _meant_eps(measured: float) -> float:
    """Return a measured eps without the rounding of its measurement: of three digits if
    it is that close, else as it is, such as 2^-23.
    """
    short = float(f"{measured:.3g}")
    return short if math.isclose(short, measured, rel_tol=1e-4) else measured


def _with_defaults(estimator: str, hp: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an estimator, those that were given among them."""
    parameters = inspect.signature(advantages.get(estimator)).parameters
    own = {
        name: p.default
        for name, p in parameters.items()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    return own | hp


def _proved(
    function: Function, estimator: str, hp: dict[str, Any], most: int, seconds: float
) -> Proof:
    """Compare a function with an estimator, in batches of at most so many responses."""

    def reference(rewards: Tensor, group: list[int]) -> Tensor:
        """Return the estimator's advantages in the shape of the function's, [N, T]."""
        A = advantages.get(estimator)(rewards, torch.tensor(group), **hp)
        return function.per_token(A, len(group))

    if estimator in TWO_VALUED:
        among = two_valued_patterns(most)
    else:
        among = reward_patterns(most, function.groups_are_contiguous)
    found = compare(
        advantages_of(function.on_tensor),
        advantages_of(reference),
        among,
        per_response=True,
        reads=(),
        seconds=seconds,
        differs=is_different,
        domain_of=RewardDomain,
    )
    settings = ", ".join(f"{name}={x:g}" for name, x in hp.items())
    words = f"{estimator}({settings})" if settings else estimator
    of_rewards = _words_for_rewards(estimator, function, most)
    return _report(function, words, found, of_rewards)


def _words_for_rewards(estimator: str, function: Function, most: int) -> str:
    """Return for which rewards and prompts a proof holds, in words.

    Args:
        estimator: its name.
        function: the user's.
        most: responses of the largest batch.
    """
    if estimator in TWO_VALUED:
        return "for rewards of 0 and 1, and of -1 and 1, all of one prompt"
    prompts = "every way to divide responses among prompts"
    if function.groups_are_contiguous:
        prompts = "prompts of one size, each in one piece"
    beyond = (
        f" of up to {ALL_TIES} responses, and some of more" if most > ALL_TIES else ""
    )
    return (
        f"for every reward, |R| <= {LARGEST:,.0f}; {prompts}; ties, and rewards of 0 and 1, "
        f"of -1 and 1, in all batches{beyond}"
    )


def is_different(expected: Tensor, found: Tensor, batch: Rollouts) -> bool:
    """Tell whether advantages differ by more than rounding: relative to each, or to the
    largest where that is far larger, and by more than what rounding of a reward makes.

    Args:
        expected, found: advantages.
        batch: the rewards.
    """
    if not found.isfinite().all():
        return bool(expected.isfinite().all())
    noise = NOISE * batch.adv.abs().max().clamp(min=1)
    least = torch.maximum(NEXT_TO_0 * expected.abs().max(), noise / ROUNDING)
    size = torch.maximum(expected.abs(), found.abs()).clamp(min=least)
    return bool(((expected - found).abs() > ROUNDING * size).any())


def _report(
    function: Function, words: str, found: Comparison, of_rewards: str
) -> Proof:
    """Return what was found as a Proof, with the advantage that differs most if there is a
    counterexample.

    Args:
        function: the user's.
        words: the estimator, in words.
        found: what the comparison found.
        of_rewards: for which rewards and prompts the proof holds, in words.
    """
    is_rounded = found.is_rounded and found.status == "proved"
    proof = Proof(
        function.name,
        words,
        found.status,
        found.reason,
        tuple(dict.fromkeys(p.shape for p in found.patterns)),
        len(found.patterns),
        found.paths,
        True,
        bounds=tuple((b.number, b.line) for b in found.bounds),
        read_as=str(function.reading),
        remarks=(ROUNDED,) if is_rounded else (),
        unit=ADVANTAGE,
        left_out=("masks with holes",) if "mask" in function.reads else (),
        of_rewards=of_rewards,
        seconds=found.seconds,
    )
    if found.counterexample is None:
        return proof
    expected, got = found.counterexample.expected, found.counterexample.found
    gap = (expected - got).abs().nan_to_num(float("inf"))
    row, column = divmod(int(gap.argmax()), gap.shape[1])
    batch = found.counterexample.batch
    assert batch.group is not None
    rewards, group = batch.adv[:, 0].tolist(), batch.group.tolist()
    peers = group.count(group[row])
    token = f", token {column + 1}" if gap.shape[1] > 1 else ""
    return replace(
        proof,
        place=f"response {row}{token}, one of {peers} to its prompt, of {len(group)} in the batch",
        numbers={"R": rewards[row]},
        expected=expected[row, column].item(),
        found=got[row, column].item(),
        example=Example(
            {"rewards": rewards, "group": group},
            expected=expected[:, column].tolist(),
            found=got[:, column].tolist(),
        ),
    )
