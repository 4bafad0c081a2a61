# SPDX-License-Identifier: Apache-2.0
"""The oracles of advantage functions: each looks at an AdvantageCase from one side and answers
with Findings.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np

from upref.errors import InputError, OutOfMemory, TooManyLines
from upref.verify import exact
from upref.verify.advantages.case import UNCOUPLED, AdvantageCase
from upref.verify.advantages.sizes import shift_and_scale
from upref.verify.exact import EVEN, SINGLE, UNEVEN, RewardBatch, nearly_equal
from upref.verify.finding import Number, number_pair
from upref.verify.oracle import Not, Oracle, oracle, untouched
from upref.verify.report import Finding, fail, note
from upref.weights.stress import COLLIDE, SAME

LARGE_EPS = 1e-3  # beside rewards of 0 and 1, whose std is near 1/2
# of Python that a call with large prompt ids may run: a loop up to the largest id has
# more
LINES = 100_000
IDS = {
    "with gaps": (3, 3000, 40),
    "below 0": (-7, 5, -2),
    "equal modulo 2 to 12, 64 and 100": tuple(11 + COLLIDE * g for g in range(3)),
    "equal in 32 bits and modulo 10^6": (7, 7 + SAME, 7 + 2 * SAME),
    "above 2^53": (2**60, 2**60 + 1, 2**60 + 2),
}


# ---- why an oracle does not apply ----------------------------------------------------
def either(*whys: Not) -> Not:
    return lambda case: next((said for why in whys if (said := why(case))), "")


def no_ids(case: AdvantageCase) -> str:
    if case.f.contiguous:
        return "it takes no group ids: groups are contiguous and of one size"
    return ""


def no_groups(case: AdvantageCase) -> str:
    return f"{case.name} does not read groups" if case.name in exact.UNGROUPED else ""


def wrong_already(case: AdvantageCase) -> str:
    return "the values are wrong already" if case.wrong else ""


def no_baseline(case: AdvantageCase) -> str:
    return f"{case.name} subtracts nothing" if case.name in UNCOUPLED else ""


def quiet(
    look: Callable[[AdvantageCase], Iterator[Finding]],
) -> Callable[[AdvantageCase], Iterator[Finding]]:
    """A function that is wrong already and raises is told once."""

    def again(case: AdvantageCase) -> Iterator[Finding]:
        try:
            yield from look(case)
        except InputError:
            if not case.wrong:
                raise

    return again


@oracle("values")
def values(case: AdvantageCase) -> Iterator[Finding]:
    """The advantages of even groups, and what an eps that was found does to them."""
    yield from case.compare("values", "even groups", EVEN)
    eps = case.divided.eps
    if not eps or "eps" in case.hp:
        return
    if eps > LARGE_EPS:
        said = "an eps that is small beside the std"
        yield fail(
            "values",
            "the denominator",
            said,
            str(case.divided),
            cause=exact.FORMS[case.divided.form].large,
        )
    else:
        yield note(
            "values",
            f"the denominator is {case.divided}",
            cause="harmless: small beside the std",
        )


@oracle("uneven-groups", not_run=either(no_ids, wrong_already))
def uneven_groups(case: AdvantageCase) -> Iterator[Finding]:
    yield from case.compare("uneven-groups", "groups of 2, 5, 3 and 2", UNEVEN)


@oracle("interleaving", not_run=either(no_ids, no_groups, wrong_already))
def interleaving(case: AdvantageCase) -> Iterator[Finding]:
    yield from case.compare("interleaving", "prompts in no order", exact.INTERLEAVED)


@oracle("large-groups", not_run=wrong_already)
def large_groups(case: AdvantageCase) -> Iterator[Finding]:
    """Many responses to a prompt, graded rewards, many prompts."""
    yield from case.compare(
        "large-groups", "graded rewards between 0 and 1", exact.FINE
    )
    yield from case.compare(
        "large-groups", "groups of 128 with one success and with two", exact.LARGE
    )
    yield from case.compare("large-groups", "a hundred prompts", exact.PROMPTS)


@oracle("group-ids", not_run=either(no_ids, no_groups, wrong_already))
def group_ids(case: AdvantageCase) -> Iterator[Finding]:
    """Any integers are ids. A function may refuse some; it may not answer with other
    numbers.
    """
    if "interleaving" in case.failed:
        return
    case = replace(case, f=replace(case.f, lines=LINES))
    refused: list[str] = []
    untested: list[str] = []
    why = ""
    why_untested = ""
    for words, ids in IDS.items():
        batch = replace(
            exact.INTERLEAVED,
            group=tuple(ids[group_id] for group_id in exact.INTERLEAVED.group),
        )
        try:
            case.f(batch)
        except TooManyLines as e:
            untested.append(words)
            why_untested = why_untested or str(e)
            continue
        except (InputError, OutOfMemory) as e:  # a table of 2^40 ids needs memory
            refused.append(words)
            why = why or str(e)
            continue
        other = "it depends on the values of the ids: renumber them 0, 1, 2, ... first"
        yield from case.compare("group-ids", f"prompt ids {words}", batch, other)
    if refused:
        text = f"it takes no prompt ids {' or '.join(refused)}"
        yield note("group-ids", text, cause=why)
    if untested:
        text = f"prompt ids {' or '.join(untested)} were not tested"
        yield note("group-ids", text, cause=why_untested)


@oracle("random", not_run=either(no_ids, wrong_already))
def random(case: AdvantageCase) -> Iterator[Finding]:
    """The first difference on random batches."""
    rng = np.random.default_rng(0)
    for n in range(200):
        N = int(rng.integers(2, 13))
        group = tuple(rng.integers(0, max(1, N // 2), N).tolist())
        batch = _with_peers(
            RewardBatch(
                tuple(Fraction(int(k), 4) for k in rng.integers(-8, 9, N)), group
            )
        )
        if batch.R and (
            got := list(case.compare("random", f"random batch {n}", batch))
        ):
            yield from got
            return


def _with_peers(batch: RewardBatch) -> RewardBatch:
    """Only groups whose rewards differ, numbered from 0: the others are the business of
    two other oracles.
    """
    batch = batch.take(
        [
            i
            for i, group_id in enumerate(batch.group)
            if len({batch.R[j] for j in batch.rows_of(group_id)}) > 1
        ]
    )
    again = {group_id: i for i, group_id in enumerate(dict.fromkeys(batch.group))}
    return replace(batch, group=tuple(again[group_id] for group_id in batch.group))


@oracle("singletons", not_run=either(no_ids, no_groups))
@quiet
def singletons(case: AdvantageCase) -> Iterator[Finding]:
    """A prompt with one response."""
    A = case.f(SINGLE)
    want = case.expected(SINGLE)
    alone = (0, 4)
    i = next((i for i in alone if not abs(A[i] - want[i]) <= 1e-6), None)
    if i is None or (case.wrong and math.isfinite(A[i])):
        return
    finite = math.isfinite(A[i])
    make = note if finite and case.name == "leave_one_out" else fail
    said = Number(0, "A", "or any convention that is finite")
    if make is fail:
        said = Number(0, "A", "for it has no peer to be better than")
    if all(abs(A[j] - float(SINGLE.R[j])) < 1e-5 for j in alone):
        raw = "the reward itself, without a baseline"
    else:
        raw = ""
    why = raw if finite else "a division by 0: by G - 1, or by the std of one reward"
    yield make(
        "singletons",
        f"a response without a peer, reward {SINGLE.R[i]}",
        said,
        Number(A[i], "A"),
        cause=why,
    )


@oracle("equal-rewards", not_run=no_baseline)
@quiet
def equal_rewards(case: AdvantageCase) -> Iterator[Finding]:
    """A prompt whose responses all have one reward."""
    b = exact.EQUAL
    if case.f.contiguous:
        b = RewardBatch((Fraction(1, 10),) * 8 + EVEN.R[:8], (0,) * 8 + (1,) * 8)
    elif case.name == "whiten":
        b = exact.EQUAL.take(range(7))
    regime = f"{b.rows_of(0)[-1] + 1} equal rewards of 0.1 to one prompt"
    A = [case.f(b)[i] for i in b.rows_of(0)]
    largest = max(abs(a) if math.isfinite(a) else math.inf for a in A)
    if largest <= 1e-6 or (case.wrong and math.isfinite(largest)):
        return
    # the mean of 1/2, 1/2, ... is not rounded
    exactly = case.f(replace(b, R=tuple(5 * x for x in b.R)))
    rounded = not any(
        math.isfinite(exactly[i]) and abs(exactly[i]) > 1e-6 for i in b.rows_of(0)
    )
    if largest > 0.05 or not rounded:
        nan = largest == math.inf
        if case.divided.eps:
            eps = f"eps = {case.divided.eps:.3g} is too small"
        else:
            eps = "eps is missing"
        why = f"rounding divided by rounding: {eps}" if rounded else ""
        if nan:
            why = "0/0: no eps in the denominator"
        yield fail(
            "equal-rewards", regime, *number_pair("A", 0, A[0]), case.example(b), why
        )
        return
    yield note(
        "equal-rewards",
        regime,
        *number_pair("A", 0, largest),
        "rounding of the mean, divided by eps",
    )


@oracle("solved-prompts", not_run=either(no_groups, no_baseline, wrong_already))
def solved_prompts(case: AdvantageCase) -> Iterator[Finding]:
    """Prompts without a signal: an estimator of groups may not make one up."""
    text = "prompts of which all responses have one reward: 0, 1 or -1"
    yield from case.compare("solved-prompts", text, exact.SOLVED)


@oracle("missing-reward")
@quiet
def missing_reward(case: AdvantageCase) -> Iterator[Finding]:
    """NaN may be refused, poison its own prompt, or be left out, alone or with its
    prompt, but not become a number.
    """
    batch = case.batch(EVEN)
    f = case.f
    now = f(batch)
    rows = range(1, len(batch.R))
    over_batch = case.name in ("whiten", "group_mean_whiten")
    others_in_group = [
        i for i in rows if over_batch or batch.group[i] == batch.group[0]
    ]
    peers = batch.rows_of(batch.group[0])[1:]
    rest = [i for i in rows if batch.group[i] != batch.group[0]]
    for bad in (math.nan, None) if f.kind == "list" else (math.nan,):
        try:
            A = f.outcome([bad, *batch.R[1:]], batch.group).A
        except InputError:
            continue
        alone = nearly_equal(A[1:], case.expected(batch.take(rows)), 1e-3)
        dropped = all(not A[i] or math.isnan(A[i]) for i in peers)
        dropped = dropped and nearly_equal(
            [A[i] for i in rest], case.expected(batch.take(rest)), 1e-3
        )
        changed = [i for i in rows if not nearly_equal([A[i]], [now[i]], f.tol)]
        if alone or dropped or case.wrong:
            continue
        if set(changed) - set(others_in_group):
            if all(math.isnan(A[i]) for i in changed):
                yield note(
                    "missing-reward",
                    f"one reward is {bad}: all prompts' advantages become NaN",
                )
                return
            what = "other prompts' advantages change"
        elif all(math.isnan(A[i]) for i in others_in_group) or case.name in UNCOUPLED:
            continue
        else:
            zero = f.outcome([0, *batch.R[1:]], batch.group).A
            as_zero = nearly_equal(
                [A[i] for i in others_in_group],
                [zero[i] for i in others_in_group],
                f.tol,
            )
            if as_zero:
                what = "it counts as 0, also in its peers' baselines"
            else:
                what = "its peers' advantages change"
        yield fail(
            "missing-reward",
            f"one reward is {bad}",
            "an error, NaN, or the row left out",
            what,
            cause="drop or refuse responses without a reward before the baseline",
        )
        return


@oracle("permutation", not_run=no_ids)
@quiet
def permutation(case: AdvantageCase) -> Iterator[Finding]:
    """The rows in another order have the same advantages."""
    batch = case.batch(UNEVEN)
    order = [5, 0, 11, 3, 8, 1, 10, 2, 7, 4, 9, 6]
    A = [case.f(batch)[i] for i in order]
    batch = batch.take(order)
    B = case.f(batch)
    if not nearly_equal(A, B, 10 * case.f.tol):
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
@quiet
def determinism(case: AdvantageCase) -> Iterator[Finding]:
    """The same rewards get the same advantages each time."""
    batch = case.batch(EVEN)
    if not all(nearly_equal(case.f(batch), case.f(batch), 0.0) for _ in range(3)):
        yield fail(
            "determinism",
            "the same batch twice",
            "the same numbers",
            "other numbers",
            cause="it draws random numbers or keeps state between calls",
        )


@oracle("mutation")
@quiet
def mutation(case: AdvantageCase) -> Iterator[Finding]:
    batch = case.batch(EVEN)
    yield from untouched(
        case.f.outcome(batch.R, batch.group),
        cause="an in-place operation (-=, /=, scores[i] =)",
    )


ORACLES: tuple[Oracle, ...] = (
    determinism,
    values,
    uneven_groups,
    interleaving,
    large_groups,
    group_ids,
    shift_and_scale,
    random,
    singletons,
    equal_rewards,
    solved_prompts,
    missing_reward,
    permutation,
    mutation,
)
