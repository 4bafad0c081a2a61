# SPDX-License-Identifier: Apache-2.0
"""The oracles of advantage functions. Each takes an AdvantageCase and yields Findings."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np

from upref.errors import InputError, OutOfMemory, TooManyLines
from upref.verify import exact
from upref.verify.advantages.case import UNCOUPLED, AdvantageCase
from upref.verify.advantages.row_masks import response_mask
from upref.verify.advantages.sizes import shift_and_scale
from upref.verify.advantages.tokens import token_rewards
from upref.verify.exact import (
    EVEN_GROUPS,
    LONE_RESPONSES,
    UNEVEN_GROUPS,
    RewardBatch,
    nearly_equal,
)
from upref.verify.finding import Number, number_pair
from upref.verify.oracle import Not, Oracle, oracle, untouched
from upref.verify.report import Finding, fail, note
from upref.weights.stress import EQUAL_MODULUS, SMALL_MODULUS

LARGE_EPS = 1e-3  # beside rewards of 0 and 1, whose std is near 1/2
NO_ADVANTAGE = 1e-6  # a smaller number is rounding of 0
LARGE_ADVANTAGE = 0.05  # of equal rewards; a smaller one is rounding divided by eps
# the lines of Python that a call with large prompt ids may run: a loop up to the largest
# id runs more
MOST_LINES = 100_000
# prompt ids in place of 0, 1 and 2, by the words for them
IDS = {
    "with gaps": (3, 3000, 40),
    "below 0": (-7, 5, -2),
    "equal modulo 2 to 12, 64 and 100": tuple(11 + SMALL_MODULUS * g for g in range(3)),
    "equal in 32 bits and modulo 10^6": (7, 7 + EQUAL_MODULUS, 7 + 2 * EQUAL_MODULUS),
    "above 2^53": (2**60, 2**60 + 1, 2**60 + 2),
}


# ---- why an oracle does not apply ----------------------------------------------------
def either(*reasons: Not) -> Not:
    """Return a function from a case to the first of these reasons that applies to it, or
    to "".
    """
    return lambda case: next((words for why in reasons if (words := why(case))), "")


def no_ids(case: AdvantageCase) -> str:
    """Return why prompt ids are not tried; "" where they are."""
    if case.function.groups_are_contiguous:
        return "it takes no group ids: groups are contiguous and of one size"
    return ""


def no_groups(case: AdvantageCase) -> str:
    """Return why groups are not tried; "" where they are."""
    return f"{case.name} does not read groups" if case.name in exact.UNGROUPED else ""


def wrong_already(case: AdvantageCase) -> str:
    """Return why nothing more is compared; "" where it is."""
    return "the values are wrong already" if case.wrong else ""


def no_baseline(case: AdvantageCase) -> str:
    """Return why no baseline is tried; "" where one is."""
    return f"{case.name} subtracts nothing" if case.name in UNCOUPLED else ""


def silent_if_wrong(
    find: Callable[[AdvantageCase], Iterator[Finding]],
) -> Callable[[AdvantageCase], Iterator[Finding]]:
    """Decorate an oracle so that it stays silent when a function raises whose values
    are wrong already.
    """

    def find_unless_wrong(case: AdvantageCase) -> Iterator[Finding]:
        """Yield the findings up to an error of such a function."""
        try:
            yield from find(case)
        except InputError:
            if not case.wrong:
                raise

    return find_unless_wrong


@oracle("values", needed=True)
def values(case: AdvantageCase) -> Iterator[Finding]:
    """Compare on groups of one size, and report the eps that was measured if the user gave
    none: an eps above LARGE_EPS is a failure, a smaller one a note.
    """
    yield from case.compare("values", "even groups", EVEN_GROUPS)
    eps = case.denominator.eps
    if not eps or "eps" in case.hp:
        return
    if eps > LARGE_EPS:
        yield fail(
            "values",
            "the denominator",
            "an eps that is small beside the std",
            str(case.denominator),
            cause=exact.FORMS[case.denominator.form].effect_of_large_eps,
        )
    else:
        yield note(
            "values",
            f"the denominator is {case.denominator}",
            cause="harmless: small beside the std",
        )


@oracle("uneven-groups", not_run=either(no_ids, wrong_already))
def uneven_groups(case: AdvantageCase) -> Iterator[Finding]:
    """Compare on groups of several sizes."""
    yield from case.compare("uneven-groups", "groups of 2, 5, 3 and 2", UNEVEN_GROUPS)


@oracle("interleaving", not_run=either(no_ids, no_groups, wrong_already))
def interleaving(case: AdvantageCase) -> Iterator[Finding]:
    """Compare on a batch whose prompts are mixed."""
    yield from case.compare(
        "interleaving", "prompts in no order", exact.INTERLEAVED_PROMPTS
    )


@oracle("graded-rewards", not_run=wrong_already)
def graded_rewards(case: AdvantageCase) -> Iterator[Finding]:
    """Compare on rewards that float32 rounds."""
    yield from case.compare(
        "graded-rewards", "rewards between 0 and 1", exact.GRADED_REWARDS
    )


@oracle("large-groups", not_run=wrong_already)
def large_groups(case: AdvantageCase) -> Iterator[Finding]:
    """Compare on many responses to a prompt, and on many prompts."""
    yield from case.compare(
        "large-groups",
        "groups of 128 with one success and with two",
        exact.LARGE_GROUPS,
    )
    yield from case.compare("large-groups", "a hundred prompts", exact.HUNDRED_PROMPTS)


@oracle("group-ids", not_run=either(no_ids, no_groups, wrong_already))
def group_ids(case: AdvantageCase) -> Iterator[Finding]:
    """Compare on prompt ids that are not 0, 1, 2, ... A function may refuse some ids, but
    its numbers may not depend on them.

    Args:
        case: the function and its estimator.

    Yields:
        A failure for each kind of ids that changes the numbers; then a note with the kinds
        that are refused, and one with those that take too many lines of Python.
    """
    if "interleaving" in case.failed:
        return
    case = replace(case, function=replace(case.function, lines=MOST_LINES))
    refused: list[str] = []
    untested: list[str] = []
    why_refused = ""
    why_untested = ""
    usual = exact.INTERLEAVED_PROMPTS
    cause = "it depends on the values of the ids: renumber them 0, 1, 2, ... first"
    for words, ids in IDS.items():
        batch = replace(usual, group=tuple(ids[group_id] for group_id in usual.group))
        try:
            case.function(batch)
        except TooManyLines as e:
            untested.append(words)
            why_untested = why_untested or str(e)
            continue
        # a table with a row for each id up to 2^40 needs too much memory
        except (InputError, OutOfMemory) as e:
            refused.append(words)
            why_refused = why_refused or str(e)
            continue
        findings = list(case.compare("group-ids", f"prompt ids {words}", batch, cause))
        modulus = _modulus(case) if findings else None
        if modulus:
            equal = f"prompts whose ids are equal modulo {modulus:,} count as one"
            findings = [replace(finding, cause=equal) for finding in findings]
        yield from findings
    if refused:
        text = f"it takes no prompt ids {' or '.join(refused)}"
        yield note("group-ids", text, cause=why_refused)
    if untested:
        text = f"prompt ids {' or '.join(untested)} were not tested"
        yield note("group-ids", text, cause=why_untested)


# by which a function may divide ids, the smallest first
MODULI = sorted(
    {*range(2, 13), *(2**n for n in range(4, 33)), *(10**n for n in range(2, 7))}
)


def _modulus(case: AdvantageCase) -> int | None:
    """Return the smallest number such that ids with one rest count as one prompt, and
    ids with different rests do not; None where no such number is found.
    """
    usual = exact.INTERLEAVED_PROMPTS
    one_prompt = replace(usual, group=(0,) * len(usual.group))

    def answers(m: int, rest_of_prompt: int, first: int) -> list[float]:
        """Return the advantages where prompt g has the id first + g (m + rest_of_prompt).
        Modulo m, the ids of all prompts are equal if rest_of_prompt is 0, and 0, 1, 2, ...
        if it is 1 and first is 0.
        """
        step = m + rest_of_prompt
        ids = tuple(first + g * step for g in usual.group)
        return [float(x) for x in case.function(replace(usual, group=ids))]

    def are_near(x: list[float], y: list[float]) -> bool:
        """Return whether two lists of advantages are the same."""
        return all(abs(a - b) <= 1e-5 for a, b in zip(x, y, strict=True))

    try:
        joined = [float(x) for x in case.function(one_prompt)]
        apart = answers(0, 1, 0)
        for m in MODULI:
            if are_near(answers(m, 0, 3), joined):
                return m if are_near(answers(m, 1, 0), apart) else None
    except (InputError, OutOfMemory):  # it refuses such ids
        return None
    return None


RANDOM_BATCHES = 200


@oracle("random", not_run=either(no_ids, wrong_already))
def random(case: AdvantageCase) -> Iterator[Finding]:
    """Compare on random batches of groups whose rewards differ, up to the first that
    fails.
    """
    rng = np.random.default_rng(0)
    for n in range(RANDOM_BATCHES):
        N = int(rng.integers(2, 13))
        group = tuple(rng.integers(0, max(1, N // 2), N).tolist())
        rewards = tuple(Fraction(int(k), 4) for k in rng.integers(-8, 9, N))
        batch = _groups_with_spread(RewardBatch(rewards, group))
        if not batch.R:
            continue
        if findings := list(case.compare("random", f"random batch {n}", batch)):
            yield from findings
            return


def _groups_with_spread(batch: RewardBatch) -> RewardBatch:
    """Return the rows of the groups whose rewards differ, with ids from 0 in the order in
    which they come first. The batch is empty where there are none. `singletons` and
    `equal_rewards` compare the other groups.
    """

    def has_spread(group_id: int) -> bool:
        """Return whether the rewards of a group differ."""
        return len({batch.R[row] for row in batch.rows_of(group_id)}) > 1

    rows = [i for i, group_id in enumerate(batch.group) if has_spread(group_id)]
    kept = batch.take(rows)
    number_of = {group_id: i for i, group_id in enumerate(dict.fromkeys(kept.group))}
    return replace(kept, group=tuple(number_of[group_id] for group_id in kept.group))


LONE_ROWS = (0, 4)  # of LONE_RESPONSES: those without a peer


@oracle("singletons", not_run=either(no_ids, no_groups))
@silent_if_wrong
def singletons(case: AdvantageCase) -> Iterator[Finding]:
    """Report a prompt with one response whose advantage is not 0, of the first that is
    found: a note for a finite number of leave_one_out, else a failure. A function that is
    wrong anyhow is reported only for a number that is not finite.
    """
    A = case.function(LONE_RESPONSES)
    expected = case.expected(LONE_RESPONSES)
    for row in LONE_ROWS:
        if not abs(A[row] - expected[row]) <= NO_ADVANTAGE:
            break
    else:
        return
    is_finite = math.isfinite(A[row])
    if case.wrong and is_finite:
        return
    if is_finite and case.name == "leave_one_out":
        make: Callable[..., Finding] = note
        zero = Number(0, "A", "or any convention that is finite")
    else:
        make = fail
        zero = Number(0, "A", "for it has no peer to be better than")
    is_reward_itself = all(
        abs(A[i] - float(LONE_RESPONSES.R[i])) < 1e-5 for i in LONE_ROWS
    )
    if not is_finite:
        why = "a division by 0: by G - 1, or by the std of one reward"
    elif is_reward_itself:
        why = "the reward itself, without a baseline"
    else:
        why = ""
    yield make(
        "singletons",
        f"a response without a peer, reward {LONE_RESPONSES.R[row]}",
        zero,
        Number(A[row], "A"),
        cause=why,
    )


@oracle("equal-rewards", not_run=no_baseline)
@silent_if_wrong
def equal_rewards(case: AdvantageCase) -> Iterator[Finding]:
    """Report a prompt whose responses all have one reward, and an advantage that is not
    0: a note where rounding of the mean, divided by eps, makes it at most
    LARGE_ADVANTAGE; else a failure. A function that is wrong anyhow is reported only for
    a number that is not finite.
    """
    batch = exact.EQUAL_REWARDS
    if case.name == "whiten":
        # its mean is of the whole batch: all rewards have to be equal
        batch = batch.take(batch.rows_of(0))
    elif case.function.groups_are_contiguous:
        # such a function takes prompts of one size
        batch = RewardBatch(
            (Fraction(1, 10),) * 8 + EVEN_GROUPS.R[:8], (0,) * 8 + (1,) * 8
        )
    rows = batch.rows_of(0)
    regime = f"{len(rows)} equal rewards of 0.1 to one prompt"
    A = case.function(batch)
    sizes = {i: abs(A[i]) if math.isfinite(A[i]) else math.inf for i in rows}
    worst_row = max(rows, key=lambda i: sizes[i])
    largest = sizes[worst_row]
    if largest <= NO_ADVANTAGE:
        return
    # of a function that is wrong anyhow, only a number that is not finite is news
    if case.wrong and math.isfinite(largest):
        return
    # the mean of rewards of 1/2 is not rounded
    A_of_halves = case.function(replace(batch, R=tuple(5 * x for x in batch.R)))
    is_rounding = not any(
        math.isfinite(A_of_halves[i]) and abs(A_of_halves[i]) > NO_ADVANTAGE
        for i in rows
    )
    if largest <= LARGE_ADVANTAGE and is_rounding:
        yield note(
            "equal-rewards",
            regime,
            *number_pair("A", 0, largest),
            "rounding of the mean, divided by eps",
        )
        return
    if largest == math.inf:
        why = "0/0: no eps in the denominator"
    elif not is_rounding:
        why = ""
    elif case.denominator.eps:
        why = f"rounding divided by rounding: eps = {case.denominator.eps:.3g} is too small"
    else:
        why = "rounding divided by rounding: eps is missing"
    numbers = number_pair("A", 0, A[worst_row])
    yield fail("equal-rewards", regime, *numbers, case.example(batch), why)


@oracle("solved-prompts", not_run=either(no_groups, no_baseline, wrong_already))
def solved_prompts(case: AdvantageCase) -> Iterator[Finding]:
    """Compare on prompts whose responses all have one reward: no response of theirs is
    better than another, so each advantage is 0.
    """
    text = "prompts of which all responses have one reward: 0, 1 or -1"
    yield from case.compare("solved-prompts", text, exact.SOLVED_PROMPTS)


MISSING_TOL = 1e-3  # of advantages without the missing reward


@oracle("missing-reward")
@silent_if_wrong
def missing_reward(case: AdvantageCase) -> Iterator[Finding]:
    """Report a reward of NaN that becomes a number. A function may refuse it, answer NaN
    for its prompt, or leave out the response or the prompt.
    """
    batch = case.batch(EVEN_GROUPS)
    function = case.function
    complete = function(batch)
    for missing in (math.nan, None) if function.kind == "list" else (math.nan,):
        try:
            A = function.outcome([missing, *batch.R[1:]], batch.group).A
        except InputError:
            continue
        if case.wrong or _is_left_out(case, batch, A):
            continue
        words = f"one reward is {missing}"
        finding = _finding_of_missing_reward(case, batch, complete, A, words)
        if finding is not None:
            yield finding
            return


def _is_left_out(case: AdvantageCase, batch: RewardBatch, A: list[float]) -> bool:
    """Tell whether the advantages are those of the batch without its first response, or
    without the prompt of it.

    Args:
        case: the function and its estimator.
        batch: the batch with all rewards.
        A: the advantages found where the first reward is missing.
    """
    others = range(1, len(batch.R))
    other_prompts = [i for i in others if batch.group[i] != batch.group[0]]
    peers = batch.rows_of(batch.group[0])[1:]
    if nearly_equal(A[1:], case.expected(batch.take(others)), MISSING_TOL):
        return True
    return all(not A[i] or math.isnan(A[i]) for i in peers) and nearly_equal(
        [A[i] for i in other_prompts],
        case.expected(batch.take(other_prompts)),
        MISSING_TOL,
    )


def _finding_of_missing_reward(
    case: AdvantageCase,
    batch: RewardBatch,
    complete: list[float],
    A: list[float],
    words: str,
) -> Finding | None:
    """Return what a missing reward does to the advantages of other responses; None where
    it does nothing, or makes those NaN whose baseline it enters.

    Args:
        case: the function and its estimator.
        batch: the batch with all rewards.
        complete: the advantages of that batch.
        A: the advantages found where the first reward is missing.
        words: which reward is missing.
    """
    function = case.function
    others = range(1, len(batch.R))
    # the rows whose baseline the missing reward enters
    if case.name in ("whiten", "group_mean_whiten"):
        coupled = list(others)
    else:
        coupled = batch.rows_of(batch.group[0])[1:]
    changed = [
        i for i in others if not nearly_equal([A[i]], [complete[i]], function.tol)
    ]
    if set(changed) - set(coupled):
        if all(math.isnan(A[i]) for i in changed):
            return note(
                "missing-reward", f"{words}: all prompts' advantages become NaN"
            )
        what = "other prompts' advantages change"
    elif all(math.isnan(A[i]) for i in coupled) or case.name in UNCOUPLED:
        return None
    else:
        with_zero = function.outcome([0, *batch.R[1:]], batch.group).A
        counts_as_zero = nearly_equal(
            [A[i] for i in coupled], [with_zero[i] for i in coupled], function.tol
        )
        what = "its peers' advantages change"
        if counts_as_zero:
            what = "it counts as 0, also in its peers' baselines"
    return fail(
        "missing-reward",
        words,
        "an error, NaN, or the row left out",
        what,
        cause="drop or refuse responses without a reward before the baseline",
    )


@oracle("permutation", not_run=no_ids)
@silent_if_wrong
def permutation(case: AdvantageCase) -> Iterator[Finding]:
    """Report that the rows in another order have other advantages."""
    batch = case.batch(UNEVEN_GROUPS)
    order = [5, 0, 11, 3, 8, 1, 10, 2, 7, 4, 9, 6]
    A = [case.function(batch)[i] for i in order]
    batch = batch.take(order)
    B = case.function(batch)
    if not nearly_equal(A, B, 10 * case.function.tol):
        i = max(range(len(order)), key=lambda k: abs(A[k] - B[k]))
        expected_number, found_number = number_pair("A", A[i], B[i], "as before")
        why = "the result depends on the order of the rows, not only on their prompt"
        yield fail(
            "permutation",
            "the responses in another order",
            expected_number,
            found_number,
            case.example(batch),
            why,
        )


@oracle("determinism")
@silent_if_wrong
def determinism(case: AdvantageCase) -> Iterator[Finding]:
    """Report that the same rewards have other advantages in another call."""
    batch = case.batch(EVEN_GROUPS)
    if not all(
        nearly_equal(case.function(batch), case.function(batch), 0.0) for _ in range(3)
    ):
        yield fail(
            "determinism",
            "the same batch twice",
            "the same numbers",
            "different numbers",
            cause="it draws random numbers or keeps state between calls",
        )


@oracle("mutation")
@silent_if_wrong
def mutation(case: AdvantageCase) -> Iterator[Finding]:
    """Report an input whose values the function changes."""
    batch = case.batch(EVEN_GROUPS)
    yield from untouched(
        case.function.outcome(batch.R, batch.group),
        cause="an in-place operation (-=, /=, scores[i] =)",
    )


ORACLES: tuple[Oracle, ...] = (
    determinism,
    values,
    uneven_groups,
    interleaving,
    graded_rewards,
    large_groups,
    group_ids,
    shift_and_scale,
    random,
    token_rewards,
    response_mask,
    singletons,
    equal_rewards,
    solved_prompts,
    missing_reward,
    permutation,
    mutation,
)
