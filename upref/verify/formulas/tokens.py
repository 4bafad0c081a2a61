# SPDX-License-Identifier: Apache-2.0
"""`upref.check_advantages` of tokens and turns: GAE, returns, turns and steps that are
normalized, a teacher's log-probabilities.

What a name leaves open (γ, λ, ddof, eps, ω) is passed where the function takes it, held
to what the user gives, or else found among usual values and said.
"""

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError, describe_kind
from upref.user_code import names
from upref.user_code.function import Called, other_outputs
from upref.user_code.load import verl_estimator
from upref.user_code.named import NamedFunction, Vocabulary, read
from upref.verify.finding import Number, number_pair
from upref.verify.formulas.case import (
    STATE,
    WRITES,
    FormulaCase,
    Inputs,
    Problem,
    Settings,
    alike,
    choose_case,
    guessed_settings,
    precision_in_words,
    worst,
)
from upref.verify.formulas.token_faults import (
    GAE,
    RESPONSES,
    RETURNS,
    SETTINGS,
    STEPS,
    TEACHER,
    TURNS,
    compute,
    known,
)
from upref.verify.oracle import Oracle, oracle, run, untouched_on, validate_names
from upref.verify.report import Finding, Report, fail, not_run, note

# values that are tried for a setting which the function neither takes nor is given
USUAL: dict[str, tuple[float, ...]] = {
    "gamma": (0.9, 1.0, 0.99, 0.95, 0.999, 0.98, 0.97, 0.8, 0.5),
    "lam": (0.8, 1.0, 0.95, 0.9, 0.98, 0.97, 0.99, 0.5, 0.0),
    "ddof": (1, 0),
    "eps": (1e-6, 1e-8, 1e-5, 1e-4, 0.0),
    "omega": (1.0, 0.5, 0.1),
    "coef": (1.0, 0.1, 0.5),
}
# other values at which a setting that the function takes is tried
OTHER: tuple[dict[str, Any], ...] = (
    {"gamma": 1.0, "lam": 1.0, "omega": 0.5, "coef": 0.25},
    {"gamma": 0.95, "lam": 0.5, "omega": 2.0, "coef": 2.0},
)
READS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GAE, ("rewards", "values", "mask", "bootstrap")),
    **dict.fromkeys(RETURNS, ("rewards", "mask")),
    **dict.fromkeys(TURNS, ("rewards", "mask", "group")),
    **dict.fromkeys(STEPS, ("rewards", "mask", "group", "state")),
    **dict.fromkeys(TEACHER, ("log_prob", "teacher_log_prob", "mask")),
    **dict.fromkeys(RESPONSES, ("rewards", "mask", "group")),
    "remax": ("rewards", "greedy_reward", "mask"),
    "optimal_token_baseline": (
        "rewards",
        "log_prob",
        "sum_pi_squared",
        "mask",
        "group",
    ),
    "distillation": ("log_prob", "teacher_log_prob", "mask", "advantages"),
}
# which compare the k-th slots of responses
BY_NUMBER = (
    *(name for name, turns in TURNS.items() if turns.by_number),
    "optimal_token_baseline",
)
OPTIONAL = ("bootstrap", "mask", "advantages")  # an estimator is defined without them


# ---- what arguments are called -------------------------------------------------------
REWARD_WORDS = {"reward", "rewards", "score", "scores", "r"}
VALUE_WORDS = {"value", "values", "v", "vpreds", "baseline", "baselines"}
MASK_WORDS = {"mask", "masks", "valid", "active"}
BEHIND = {"bootstrap", "last", "final", "next"}
STATES = {"state", "states", "anchor", "anchors", "obs", "observation", "observations"}
TEACHERS = {"teacher", "ref", "reference", "expert"}


def role(name: str) -> str:
    """Return the input that a name of an argument means, or "": the first of the rules
    below that fits decides.

    Args:
        name: of an argument.
    """
    words = names.words(name)
    every = set(words)
    if every & MASK_WORDS or any(w.startswith("mask") for w in words):
        return "" if every & {"state", "token"} and "ids" in every else "mask"
    if "greedy" in every or (
        every & REWARD_WORDS and every & {"baseline", "baselines"}
    ):
        return "greedy_reward"
    if every >= {"sum", "pi", "squared"} or every >= {"sum", "pi", "sq"}:
        return "sum_pi_squared"
    if every & BEHIND and every & (VALUE_WORDS | {"bootstrap"}):
        return "bootstrap"
    if every & STATES and not every & VALUE_WORDS:
        return "state"
    if names.LOG_P.search("_".join(words)) or every & {"logps", "logp"}:
        return "teacher_log_prob" if every & TEACHERS else "log_prob"
    if any(w.startswith("adv") for w in words):
        return "" if every & names.COUNTS - {"values"} else "advantages"
    if every & REWARD_WORDS and not every & (names.COUNTS - {"values"}):
        return "rewards"
    if every & VALUE_WORDS and not every & {"clip", "coef", "fn", "function"}:
        return "values"
    return "group" if names.reward_role(name) == "group" else ""


def setting(name: str) -> str:
    """Return the setting that a name of an argument means, or "".

    Args:
        name: of an argument.
    """
    words = set(names.words(name))
    if words & {"gamma", "discount", "discounting"} or name == "γ":
        return "gamma"
    if words & {"lam", "lambda", "lambd", "lmbda"} or name == "λ":
        return "lam"
    if words & {"omega"} or words >= {"step", "advantage", "w"}:
        return "omega"
    if words & {"coef", "coeff", "coefficient"}:
        return "coef"
    if words & {"ddof"}:
        return "ddof"
    return "eps" if words & {"eps", "epsilon"} else ""


VOCABULARY = Vocabulary(
    "an advantage function of tokens or turns",
    role,
    setting,
    (
        "rewards",
        "values",
        "mask",
        "group",
        "state",
        "bootstrap",
        "greedy_reward",
        "log_prob",
        "sum_pi_squared",
        "teacher_log_prob",
        "advantages",
    ),
    ids=("group",),
)


# ---- what a function returns ---------------------------------------------------------
def advantages_of(name: str, outcome: Called, inputs: Inputs) -> Tensor:
    """Read the advantages from what a function returned.

    Args:
        name: of the function.
        outcome: of a call.
        inputs: of that call.

    Returns:
        [N, K] in float64, 0 on slots that are left out.

    Raises:
        InputError: it returned something else.
    """
    shape = inputs["mask"].shape
    A = _tensor(name, outcome.returned)
    if A.shape != shape:
        raise InputError(
            f"{name} returns shape {list(A.shape)} for rewards {list(shape)}: return one advantage per slot."
        )
    return torch.where(inputs["mask"], A.double(), 0)


def _advantages_in(returned: Any) -> Any:
    """Return the advantages of what a function returned: the value itself, the first of
    a tuple, or the entry "advantages".
    """
    if isinstance(returned, tuple) and returned:
        returned = returned[0]
    if isinstance(returned, dict) and "advantages" in returned:
        returned = returned["advantages"]
    return returned


def _tensor(name: str, returned: Any) -> Tensor:
    """Return the advantages in what a function returned, as a tensor."""
    returned = _advantages_in(returned)
    try:
        if isinstance(returned, Tensor):
            return returned.detach().cpu()
        return torch.as_tensor(np.asarray(returned, dtype=float))
    except (TypeError, ValueError) as e:
        raise InputError(
            f"{name} returns {describe_kind(returned)}: return advantages [N, K]."
        ) from e


# ---- batches -------------------------------------------------------------------------
def _inputs(mask: Tensor, group: list[int], seed: int) -> dict[str, Tensor]:
    """Return inputs of every role for a mask. Slots that are left out hold rewards of 0
    and other numbers that are no part of any answer. All numbers are exact in float32.

    Args:
        mask: [N, K].
        group: the prompt of each response.
        seed: of the numbers.
    """
    rng = np.random.default_rng(seed)

    def eighths(low: int, high: int, *shape: int) -> Tensor:
        """Return random multiples of 1/8."""
        return torch.tensor(rng.integers(low, high, shape) / 8.0)

    n, k = mask.shape
    rewards = torch.where(mask, eighths(-8, 9, n, k), 0)
    last = _last_trained_slots(mask)
    inputs = {
        "rewards": rewards,
        "values": eighths(-6, 13, n, k),
        "mask": mask,
        "group": torch.tensor(group),
        "state": torch.tensor(rng.integers(0, 3, (n, k))),
        # no response is truncated; the draw keeps the random numbers of the next inputs
        "bootstrap": torch.where(last >= 0, eighths(-6, 13, n), 0) * 0,
        "log_prob": -eighths(1, 25, n, k),
        "teacher_log_prob": -eighths(1, 25, n, k),
        "advantages": eighths(-8, 9, n, k),
    }
    # the square of π itself is a part of the sum
    sum_pi_squared = inputs["log_prob"].exp() ** 2 + eighths(0, 3, n, k) / 8
    return inputs | {
        "sum_pi_squared": sum_pi_squared.float().double(),
        "greedy_reward": eighths(-8, 9, n),
    }


def _last_trained_slots(mask: Tensor) -> Tensor:
    """Return the index of the last trained slot of each response, [N]; -1 without one."""
    index = torch.arange(mask.shape[1]) * mask
    return torch.where(mask.any(1), index.amax(1), -1)


def _prefixes(lengths: list[int], width: int) -> Tensor:
    """Return a mask of responses of these lengths, [N, width]."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def _mask(rows: list[str]) -> Tensor:
    """Return a mask that is written with x on trained slots."""
    return torch.tensor([[c == "x" for c in row] for row in rows])


EVEN = [0, 0, 0, 1, 1, 1]
UNEVEN = [4, 7, 4, 7, 7, 4, 4]
FULL = Problem("no padding", _inputs(_prefixes([5] * 6, 5), EVEN, 1))
PADDED = Problem(
    "responses of several lengths, any values in the padding",
    _inputs(_prefixes([3, 6, 2, 5, 1, 4, 6], 7), UNEVEN, 2),
)
HOLES = Problem(
    "untrained slots between trained ones (a tool's tokens)",
    _inputs(
        _mask(["x..xx.", "xx.x..", ".x.x.x", "xxxx..", "..xx..", "x....x"]), EVEN, 3
    ),
)
MIXED = Problem(
    "prompts in no order",
    _inputs(_prefixes([4, 3, 4, 2, 4, 3], 4), [9, 3, 9, 3, 3, 9], 4),
)
_RNG = np.random.default_rng(0)
LARGE = Problem(
    "48 responses of up to 33 slots",
    _inputs(
        _prefixes(_RNG.integers(1, 34, 48).tolist(), 33),
        [i // 8 for i in range(48)],
        5,
    ),
)
SINGLE_SLOTS = Problem(
    "responses of one trained slot",
    _inputs(_prefixes([1, 4, 1, 3], 4), [0, 0, 0, 0], 6),
)
EMPTY = Problem(
    "a response without a trained slot",
    _inputs(_prefixes([3, 0, 4, 2, 4, 3], 4), EVEN, 7),
)


def _one_prompt_solved() -> Problem:
    """Make a batch in which all responses to one of two prompts have one reward."""
    mask = _prefixes([1, 2, 1, 2, 1, 1], 2)
    first = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.0, 1.0]).double()
    rewards = torch.nn.functional.pad(first[:, None], (0, 1))
    words = "a prompt whose responses all have one reward, beside another prompt"
    return Problem(words, {**_inputs(mask, EVEN, 9), "rewards": rewards})


ONE_SOLVED = _one_prompt_solved()


def _far() -> Problem:
    """Return a batch of large rewards and values, and of log-probabilities of student and
    teacher that are far apart.
    """
    problem = _inputs(_prefixes([3, 6, 2, 5, 1, 4, 6], 7), UNEVEN, 10)
    large = {r: 40 * problem[r] for r in ("rewards", "values", "greedy_reward")}
    rng = np.random.default_rng(11)
    for r in ("log_prob", "teacher_log_prob"):
        large[r] = -torch.tensor(rng.integers(1, 156, (7, 7)) / 8.0)
    words = "large rewards, values and log-ratios"
    return Problem(words, {**problem, **large})


FAR = _far()


def _best_tie() -> Problem:
    """Return a batch in which two responses to a prompt share the largest reward."""
    mask = _prefixes([1, 2, 1, 2, 1, 1], 2)
    first = torch.tensor([1.0, 1.0, 0.0, 0.5, -1.0, 0.5]).double()
    rewards = torch.nn.functional.pad(first[:, None], (0, 1))
    words = "two responses that share the largest reward"
    return Problem(words, {**_inputs(mask, EVEN, 12), "rewards": rewards})


BEST_TIE = _best_tie()


def _equal_rewards() -> Problem:
    """Make a batch of one prompt, whose responses have one trained slot each and all the
    same reward and state.
    """
    mask = _prefixes([1, 1, 1, 1], 2)
    inputs = _inputs(mask, [0, 0, 0, 0], 8)
    rewards = torch.where(mask, 0.5, 0.0).double()
    state = torch.zeros(4, 2, dtype=torch.int64)
    words = "equal rewards of a prompt"
    return Problem(words, {**inputs, "rewards": rewards, "state": state})


EQUAL = _equal_rewards()


def _without_padding(problem: Problem) -> Problem:
    """Return the batch with every slot trained. Slots that were padding have rewards of
    0.
    """
    full = torch.ones_like(problem.inputs["mask"])
    return problem.but(problem.words, mask=full)


# of a function without a mask
FULL_MIXED = _without_padding(MIXED)
FULL_ONE_SOLVED = _without_padding(ONE_SOLVED)
FULL_BEST_TIE = _without_padding(BEST_TIE)
FULL_EQUAL = EQUAL.take(range(4), [0])


def problems_of(name: str, has_mask: bool) -> list[Problem]:
    """Return the batches on which an estimator is compared, the plain one first.

    Args:
        name: a key of TOKEN_ADVANTAGES.
        has_mask: whether the function takes a mask.
    """
    if not has_mask:
        full_of_responses = [FULL_ONE_SOLVED, FULL_BEST_TIE]
        return [FULL, FULL_MIXED, *(full_of_responses if name in RESPONSES else [])]
    has_holes = name not in (*TEACHER, *BY_NUMBER)
    of_responses = [ONE_SOLVED, BEST_TIE] if name in RESPONSES else []
    holes = [HOLES] if has_holes else []
    return [FULL, PADDED, *holes, MIXED, LARGE, *of_responses, FAR]


# ---- the oracles ---------------------------------------------------------------------
def no_mask(case: FormulaCase) -> str:
    """Return why masks are not tried; "" where they are."""
    return "" if case.has_mask else "it takes no mask: every slot counts"


def no_mask_or_wrong(case: FormulaCase) -> str:
    """Return why nothing more of masks is tried; "" where it is."""
    return no_mask(case) or wrong_already(case)


def wrong_already(case: FormulaCase) -> str:
    """Return why nothing more is compared; "" where it is."""
    return "the values are wrong already" if case.wrong else ""


@oracle("values", needed=True)
def values(case: FormulaCase) -> Iterator[Finding]:
    """Compare on responses without padding."""
    yield from case.compare("values", FULL)


@oracle("settings", not_run=wrong_already)
def settings(case: FormulaCase) -> Iterator[Finding]:
    """Compare at other values of the settings that the function takes, up to the first that
    fail.
    """
    for other in OTHER:
        changed = {k: v for k, v in other.items() if k in case.function.takes}
        changed = {k: v for k, v in changed.items() if k in case.settings}
        if not changed:
            return
        words = ", ".join(f"{k} = {v:g}" for k, v in changed.items())
        problem = replace(FULL, words=words)
        found = list(case.compare("settings", problem, {**case.settings, **changed}))
        yield from found
        if found:
            return


@oracle("padding", not_run=no_mask_or_wrong)
def padding(case: FormulaCase) -> Iterator[Finding]:
    """Compare on responses of several lengths."""
    yield from case.compare("padding", PADDED)


def no_holes(case: FormulaCase) -> str:
    """Return why holes are not tried; "" where they are."""
    if case.name in BY_NUMBER:
        return "a slot that is left out between others has no usual number"
    return no_mask_or_wrong(case)


@oracle("holes", not_run=no_holes)
def holes(case: FormulaCase) -> Iterator[Finding]:
    """Compare on responses with untrained slots between trained ones. Whether distances
    between a student's tokens count these is a convention: of an estimator with a teacher
    a difference is a note.
    """
    if case.name not in TEACHER:
        yield from case.compare("holes", HOLES)
    elif case.differs(HOLES):
        cause = case.cause(HOLES)
        expected, found = case.expected(HOLES), case.found(HOLES)
        index = worst(expected, found)
        numbers = number_pair("A", expected[index].item(), found[index].item())
        yield note("holes", HOLES.words, *numbers, cause or "another discount there")


@oracle("groups", not_run=wrong_already)
def groups(case: FormulaCase) -> Iterator[Finding]:
    """Compare on prompts whose responses are mixed."""
    yield from case.compare("groups", MIXED if case.has_mask else FULL_MIXED)


@oracle("single-slots", not_run=no_mask_or_wrong)
def single_slots(case: FormulaCase) -> Iterator[Finding]:
    """Compare on responses of one trained slot."""
    yield from case.compare("single-slots", SINGLE_SLOTS)


@oracle("large", not_run=no_mask_or_wrong)
def large(case: FormulaCase) -> Iterator[Finding]:
    """Compare on many long responses, and on large numbers."""
    for problem in (LARGE, FAR):
        found = list(case.compare("large", problem))
        yield from found
        if found:
            return


@oracle("bootstrap", not_run=wrong_already)
def bootstrap(case: FormulaCase) -> Iterator[Finding]:
    """Compare on truncated responses, behind which the critic has a value."""
    if case.name not in GAE or "bootstrap" not in case.function.reads:
        return
    value = torch.tensor([0.5, 0.0, -0.25, 0.75, 1.0, 0.0, 0.5], dtype=torch.float64)
    words = "truncated responses, with a value behind them"
    truncated = [
        problem.but(words, bootstrap=value[: len(problem.inputs["mask"])])
        for problem in ((FULL, PADDED) if case.has_mask else (FULL,))
    ]
    # a cause must hold on those that fill the batch too
    case = replace(case, problems=[*case.problems, *truncated])
    for problem in truncated:
        yield from case.compare("bootstrap", problem)


@oracle("empty-response", not_run=no_mask_or_wrong)
def empty_response(case: FormulaCase) -> Iterator[Finding]:
    """Compare on a batch of which one response has no trained slot, and a reward on a
    slot that is not trained.
    """
    if case.name in ("gigpo", *RESPONSES) and _counts_empty_responses(case):
        words = f"{EMPTY.words} counts among those of its prompt, with a reward of 0"
        why = "the reference leaves it out; both conventions are in use"
        yield note("empty-response", words, cause=why)
        return
    yield from case.compare("empty-response", EMPTY)


def _counts_empty_responses(case: FormulaCase) -> bool:
    """Return whether a mean over the responses to a prompt counts those without a trained
    slot, as if they had one with a reward of 0.
    """
    inputs = EMPTY.inputs
    mask = inputs["mask"].clone()
    is_empty = ~mask.any(1)
    mask[is_empty, 0] = True
    state = inputs["state"].masked_fill(is_empty[:, None], -1)  # which no step shares
    counted = {**inputs, "mask": mask, "state": state}
    expected = compute(case.name, counted, case.settings)
    return alike(torch.where(inputs["mask"], expected, 0), case.found(EMPTY), case.tol)


@oracle("untrained-numbers", not_run=no_mask_or_wrong)
def untrained_numbers(case: FormulaCase) -> Iterator[Finding]:
    """Note each input of which NaN on untrained slots reaches trained ones. An input with
    which the function raises is left out.
    """
    inputs = PADDED.inputs
    nan = torch.full_like(inputs["values"], torch.nan)
    for r in ("values", "log_prob", "teacher_log_prob"):
        if r not in case.function.reads or r not in READS[case.name]:
            continue
        filled = torch.where(inputs["mask"], inputs[r], nan)
        problem = PADDED.but(f"NaN among the {r} of padding", **{r: filled})
        try:
            found = case.found(problem)
        except InputError:
            continue
        if not alike(case.expected(PADDED), found, case.tol):
            text = f"NaN among the {r} of untrained slots reaches trained ones"
            yield note("untrained-numbers", text, cause="0 times NaN is NaN: fill them")


@oracle("untrained-rewards", not_run=no_mask_or_wrong)
def untrained_rewards(case: FormulaCase) -> Iterator[Finding]:
    """Say what becomes of a reward that arrives on an untrained slot, behind the last
    trained one. Both usual conventions are right: a reward that is dropped is a note, and
    of one that counts at the last trained slot nothing is said. Anything else is a
    failure; a function that refuses such rewards gets a note.
    """
    if "rewards" not in case.function.reads or case.name in TEACHER:
        return
    base = HOLES if HOLES in case.problems else PADDED
    mask = base.inputs["mask"]
    on_untrained = torch.where(mask, base.inputs["rewards"], 0)
    moved = on_untrained.clone()
    for row in range(len(mask)):
        last = int(mask[row].nonzero()[-1])
        if last + 1 < mask.shape[1]:
            on_untrained[row, last + 1] += 1
            moved[row, last] += 1
    words = "a reward behind the last trained slot"
    problem = base.but(words, rewards=on_untrained)
    try:
        found = case.found(problem)
    except InputError as e:
        yield note("untrained-rewards", f"{words} is refused", cause=str(e))
        return
    if alike(case.expected(base), found, case.tol):
        why = "move it to that slot beforehand, or the response trains without it"
        yield note("untrained-rewards", f"{words} is dropped", cause=why)
        return
    if alike(case.expected(base.but("", rewards=moved)), found, case.tol):
        return
    expected = case.expected(base.but("", rewards=moved))
    index = worst(expected, found)
    yield fail(
        "untrained-rewards",
        words,
        Number(expected[index].item(), "A", "if it counts as of the last trained slot"),
        Number(found[index].item(), "A"),
        cause="it is neither counted in full nor dropped: it decays, or it enters a mean as a slot of its own",
    )


def no_equal_rewards(case: FormulaCase) -> str:
    """Return why equal rewards are not tried; "" where they are."""
    if case.name not in (*RESPONSES, *TURNS, *STEPS):
        return f"there is no batch of equal rewards for {case.name}"
    return wrong_already(case)


@oracle("equal-rewards", not_run=no_equal_rewards)
def equal_rewards(case: FormulaCase) -> Iterator[Finding]:
    """Report numbers that are not 0 where all rewards of a prompt are equal, and wrong ones
    where the largest two are.
    """
    if case.name not in RESPONSES:
        yield from case.compare("equal-rewards", EQUAL if case.has_mask else FULL_EQUAL)
        return
    solved, tie = ONE_SOLVED, BEST_TIE
    if not case.has_mask:
        solved, tie = FULL_ONE_SOLVED, FULL_BEST_TIE
    for problem in (solved, tie):
        found = list(case.compare("equal-rewards", problem))
        yield from found
        if found:
            return


@oracle("untrained-answers", not_run=no_mask_or_wrong)
def untrained_answers(case: FormulaCase) -> Iterator[Finding]:
    """Note that advantages are not 0 on untrained slots."""
    base = HOLES if HOLES in case.problems else PADDED
    A = _tensor(case.function.name, case.call(base)[0].returned)
    outside = A[~base.inputs["mask"]]
    if bool((outside != 0).any()):
        text = "untrained slots have advantages that are not 0"
        yield note("untrained-answers", text, cause="harmless: the loss masks them")


@oracle("determinism")
def determinism(case: FormulaCase) -> Iterator[Finding]:
    """Report other numbers for the same batch."""
    first, second = case.found(FULL), case.found(FULL)
    if not torch.equal(first.nan_to_num(), second.nan_to_num()):
        words = "the same batch twice"
        yield fail("determinism", words, "the same numbers", "others", cause=STATE)


@oracle("mutation")
def mutation(case: FormulaCase) -> Iterator[Finding]:
    """Report what the function changes or prints."""
    problems = (FULL, PADDED) if case.has_mask else (FULL,)
    calls = (case.call(problem)[0] for problem in problems)
    yield from untouched_on(calls, WRITES)


@oracle("stop-gradient", not_run=wrong_already)
def stop_gradient(case: FormulaCase) -> Iterator[Finding]:
    """Note that a gradient flows through the advantages into log_prob, of an estimator with
    a teacher.
    """
    if case.name not in TEACHER or "log_prob" not in case.function.reads:
        return
    log_prob = FULL.inputs["log_prob"].detach().clone().requires_grad_()
    A = case.call(FULL.but("", log_prob=log_prob))[0].returned
    if isinstance(A, Tensor) and A.requires_grad:
        yield note(
            "stop-gradient",
            "a gradient flows through the advantages into log_prob",
            cause="detach them, or compute them under no_grad",
        )


ORACLES: tuple[Oracle, ...] = (
    determinism,
    values,
    settings,
    padding,
    holes,
    groups,
    single_slots,
    large,
    bootstrap,
    equal_rewards,
    empty_response,
    untrained_rewards,
    untrained_numbers,
    untrained_answers,
    stop_gradient,
    mutation,
)


# ---- the check -----------------------------------------------------------------------
def check_token_advantages(
    fn: Any, estimator: str, skip: tuple[str, ...], hp: Mapping[str, Any]
) -> Report:
    """Compare a function with an estimator of upref.token_advantages.

    Args:
        fn: the function, or its name.
        estimator: a key of TOKEN_ADVANTAGES.
        skip: names of oracles not to run.
        hp: settings of the estimator, or arguments that only the function has.

    Returns:
        A Report.

    Raises:
        InputError: fn cannot be read or run.
    """
    start = time.perf_counter()
    validate_names(ORACLES, skip)
    own = SETTINGS[estimator]
    required = [r for r in READS[estimator] if r not in OPTIONAL]
    function = read(_framework(fn), VOCABULARY, required, hp, own)
    if unknown := [k for k in hp if k not in own and k not in function.bound]:
        known_names = ", ".join(own)
        raise InputError(
            f"{estimator} has no setting {unknown[0]!r}, and {function.name} no such argument; it takes {known_names}."
        )
    given = {k: v for k, v in hp.items() if k in own}
    case, is_right = choose_case(
        function, partial(_make, estimator), _grid(function, own, given)
    )
    findings, outcomes = run(ORACLES, case, skip)
    return Report(
        loss=function.name,
        objective=estimator,
        hp=dict(case.settings),
        findings=findings,
        read_as=function.read_as,
        assumptions=_assumptions(case, given, is_right),
        guessed=guessed_settings(case, given, is_right),
        oracles=outcomes,
        tolerances={"advantage, relative": case.tol},
        seconds=time.perf_counter() - start,
        not_checked=[
            *_other_outputs(case),
            *_not_checked(case),
            *not_run(outcomes),
        ],
    )


def _other_outputs(case: FormulaCase) -> list[str]:
    """Say which outputs of the function are no advantages; none where it refuses a
    batch.
    """
    try:
        returned = case.call(FULL)[0].returned
    except InputError:
        return []
    return other_outputs(returned, _advantages_in(returned))


def _framework(fn: Any) -> Any:
    """Return verl's own estimator where its name is given, else what was given."""
    if isinstance(fn, str) and fn.startswith("verl:"):
        return verl_estimator(fn.removeprefix("verl:"))
    return fn


def _make(
    estimator: str, function: NamedFunction, settings: Settings, tol: float
) -> FormulaCase:
    """Return the case of a function at these settings."""
    has_mask = "mask" in function.reads
    return FormulaCase(
        estimator,
        function,
        partial(compute, estimator),
        partial(advantages_of, function.name),
        settings,
        problems_of(estimator, has_mask),
        known(estimator),
        "A",
        shown=READS[estimator],
        absent=() if "advantages" in function.reads else ("advantages",),
        tol=tol,
    )


def _grid(
    function: NamedFunction, own: Settings, given: Settings
) -> list[dict[str, Any]]:
    """Return the settings that are tried, each combination as a dictionary, the likeliest
    first: those that the user gave; the first value for those that the function takes; all
    usual values for the rest. A setting that only the function requires has its first
    usual value.
    """
    columns = []
    for key, first in own.items():
        if key in given:
            columns.append([given[key]])
        # ddof and eps may mean something else there than in the formula
        elif key in function.takes and key in ("gamma", "lam", "omega", "coef"):
            columns.append([first])
        else:
            columns.append(list(USUAL[key]))
    keys = [*own]
    for key in sorted(function.required - set(own)):
        keys.append(key)
        columns.append([USUAL[key][0]])
    return [dict(zip(keys, row, strict=True)) for row in itertools.product(*columns)]


def _assumptions(case: FormulaCase, given: Settings, is_right: bool) -> list[str]:
    """Return what was assumed of the function, as sentences."""
    sentences = []
    for key, value in case.settings.items():
        if key in given:
            continue
        if key in case.function.takes:
            sentences.append(f"it takes {key}: compared at {value:g} and other values")
        elif is_right:
            sentences.append(f"{key} = {value:g} was found among the usual values")
    if case.function.mask_kind != "bool" and case.has_mask:
        sentences.append("it takes the mask as numbers")
    if case.function.id_kind != "tensor":
        sentences.append("it takes prompts as numpy strings")
    if precision := precision_in_words(case, is_right):
        sentences.append(precision)
    return sentences


def _not_checked(case: FormulaCase) -> list[str]:
    """Return what the verdict says nothing about, in words."""
    out = []
    if not case.has_mask:
        out.append("masks, which it does not take")
    if case.name in GAE and "bootstrap" not in case.function.reads:
        out.append("truncated responses: it takes no value behind the last slot")
    if case.name not in GAE and "bootstrap" in case.function.reads:
        out.append(
            f"values behind the last slot, which {case.name} does not have: they are 0"
        )
    return out
