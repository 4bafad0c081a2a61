# SPDX-License-Identifier: Apache-2.0
"""What is asked of runs: a weighted sum of numbers, each of one run.

    d(seed, base) = sum of weight_i · number(run of arm_i in group_i, base, seed)

A difference of two arms has the weights 1 and -1. A slope has those of least squares over
its groups. Shares are in points of 100.

In a plan a number has a name: METRIC, METRIC@AT, METRIC/DECODING or METRIC@AT/DECODING. AT
is a moment of training (AT_STEPS, AT_EVALS), "last" if it is left out; DECODING is by which
temperature or top-p the test set was answered ("t_1", "top_p_0.9").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upref.errors import InputError

RunRecord = dict[str, Any]  # a line of results/runs.jsonl: records.py
Numbers = NDArray[np.float64]

STEP_METRICS = (
    "reward",
    "valid",
    "length",
    "entropy",
    "kl_base",
    "kl_old",
    "grad_norm",
    "grad_norm_max",
    "clip_pos_high",
    "clip_neg_low",
    "clip_pos_low",
    "clip_neg_high",
    "alive",
    "overflow",
)
EVAL_METRICS = ("avg", "maj", "best", "best_bootstrap", "pass1")
# from 0 to 1 in a record; "malformed" is 1 minus "valid"
SHARES = ("reward", "malformed", *EVAL_METRICS)
# a difference at equal Avg@32 is computed of two arms' curves: no number of one run
EQUAL = "equal_avg"
WHERE = "test/top_p_0.7"  # the evaluation that a metric means if it names none
BIN = 5  # training steps in one entry of a record's columns
PER = 16  # rollouts: the unit of a slope over stalenesses


@dataclass(frozen=True)
class Term:
    """A number of the runs of one arm in one group.

    Attributes:
        metric: one of STEP_METRICS or EVAL_METRICS, "malformed", "survival", "pass@K".
        at: when. Of a step metric a key of AT_STEPS, of an evaluation one of AT_EVALS.
        where: SET/DECODING of an evaluation; the set "average" is the mean over the
            sets by difficulty.
        weight: of this number in the question.
    """

    arm: str
    group: str
    metric: str
    at: str = "last"
    where: str = WHERE
    weight: float = 1.0


@dataclass(frozen=True)
class Question:
    """An estimand, and what was said of it before the runs.

    Attributes:
        name: the number that is compared, as the plan writes it ("best/top_p_0.7").
        terms: the first has the arm that the question is about.
        ratio: the terms are logarithms, so that d is the logarithm of a ratio.
        margin: the smallest size of interest; 0 where none is registered.
        says: the same in words, where the plan gives them.
        bases: that are asked about; () for all of the first group.
    """

    name: str
    terms: tuple[Term, ...]
    ratio: bool = False
    margin: float = 0.0
    says: str = ""
    bases: tuple[str, ...] = ()

    @property
    def metric(self) -> str:
        """The metric of the first term; EQUAL for a distance of two curves."""
        return self.terms[0].metric

    @property
    def decoding(self) -> str:
        """The decoding of the first term, "t_1" or "top_p_0.7"."""
        return self.terms[0].where.partition("/")[2]

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms in the order of the terms, each once."""
        return tuple(dict.fromkeys(term.arm for term in self.terms))

    @property
    def first(self) -> str:
        """The arm that the question is about."""
        return self.arms[0]

    @property
    def other(self) -> str:
        """The second arm, which the first is compared with; "" for an arm's
        own number.
        """
        return self.arms[1] if len(self.arms) > 1 else ""

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups in the order of the terms, each once."""
        return tuple(dict.fromkeys(term.group for term in self.terms))

    @property
    def group(self) -> str:
        """The only group; "" for a slope or another comparison of groups."""
        return self.groups[0] if len(self.groups) == 1 else ""


def difference(
    name: str, first: str, other: str, group: str, margin: float = 0.0
) -> Question:
    """Return the question of one arm minus another in one group.

    Args:
        name: of the number, on the test set.
        first: the arm that is asked about.
        other: the arm that is subtracted.
        group: of both.
        margin: the smallest size of interest, in the metric's unit.
    """
    terms = (term_of(name, first, group), term_of(name, other, group, -1.0))
    return Question(name, terms, margin=margin)


def slope(name: str, first: str, other: str, levels: dict[str, float]) -> Question:
    """Return the question of the slope of a difference over groups, by least squares,
    per PER of their levels.

    Args:
        name: of the number, on the test set.
        first: the arm that is asked about.
        other: the arm that is subtracted.
        levels: group -> its place on the axis (its staleness in rollouts).
    """
    x = np.array(list(levels.values()), float)
    from_mean = x - x.mean()
    weights = PER * from_mean / (from_mean**2).sum()
    terms = []
    for group, weight in zip(levels, weights, strict=True):
        terms.append(term_of(name, first, group, float(weight)))
        terms.append(term_of(name, other, group, -float(weight)))
    return Question(name, tuple(terms))


def term_of(name: str, arm: str, group: str, weight: float = 1.0) -> Term:
    """Return the term that the name of a number in a plan means, on the test set.

    In "pass@K" the @ belongs to the metric, and no AT can follow.
    """
    metric, _, decoding = name.partition("/")
    at = "last"
    if "@" in metric and not metric.startswith("pass@"):
        metric, _, at = metric.partition("@")
    where = f"test/{decoding}" if decoding else WHERE
    return Term(arm, group, metric, at, where, weight)


# ---- what the tables of a plan ask ----------------------------------------------------
def questions_of(
    table: dict[str, Any], groups: dict[str, dict[str, Any]]
) -> tuple[Question, ...]:
    """Return the questions of a family: those written out, then differences or slopes,
    then numbers and changes of single arms.

    Args:
        table: of the family, as plan.py describes it.
        groups: of the plan, by name.

    Raises:
        InputError: a question names an arm, a group or a number that is not there.
    """
    asked = [_question(q) for q in table.get("questions", ())]
    if "metrics" in table:
        asked += _differences(table, groups)
    asked += _of_one_arm(table)
    bases = tuple(table.get("bases", ()))
    asked = [replace(question, bases=bases) for question in asked]
    for question in asked:
        _check_question(question, table["name"], groups)
    return tuple(asked)


def _of_one_arm(table: dict[str, Any]) -> list[Question]:
    """Return the questions of `numbers` and `changes` of a family, for each arm in each
    group; a change is its first number minus its second.
    """
    asked = [[name] for name in table.get("numbers", ())] + table.get("changes", [])
    found = []
    for names, group in product(asked, table.get("groups", ())):
        for arm in table.get("arms", ()):
            terms = [term_of(names[0], arm, group)]
            if len(names) == 2:
                terms.append(term_of(names[1], arm, group, -1.0))
            found.append(Question(" minus ".join(names), tuple(terms)))
    return found


def _differences(
    table: dict[str, Any], groups: dict[str, dict[str, Any]]
) -> list[Question]:
    """Return the questions of `metrics` of a family: one for every metric, group and
    other arm; with `slope` one for every metric and other arm.
    """
    first = table["first"]
    margins = table.get("margins", {})
    found = []
    for name in table["metrics"]:
        if table.get("slope"):
            levels = {g: groups[g]["settings"]["staleness"] for g in table["groups"]}
            found += [slope(name, first, other, levels) for other in table["others"]]
            continue
        margin = margins.get(name, 0.0)
        for group in table["groups"]:
            for other in table["others"]:
                found.append(difference(name, first, other, group, margin))
    return found


def contrast(table: dict[str, Any], group: str) -> Question:
    """Return the question of a contrast of a closed round: one arm's number, or one arm
    minus another.

    Args:
        table: arms (one or two) and metric; at, set, decoding and ratio where they are
            given.
        group: of the arms.
    """
    where = f"{table.get('set', 'test')}/{table.get('decoding', 'top_p_0.7')}"
    terms = [
        Term(arm, group, table["metric"], table.get("at", "last"), where, weight)
        for arm, weight in zip(table["arms"], (1.0, -1.0), strict=False)
    ]
    return Question(table["metric"], tuple(terms), ratio=table.get("ratio", False))


def _question(table: dict[str, Any]) -> Question:
    """Return a question whose terms are written out in a plan.

    Args:
        table: name, terms = [[weight, arm, group, number], ...], and ratio, margin and
            says where they are given.
    """
    terms = tuple(
        term_of(name, arm, group, float(weight))
        for weight, arm, group, name in table["terms"]
    )
    return Question(
        table["name"],
        terms,
        ratio=table.get("ratio", False),
        margin=table.get("margin", 0.0),
        says=table.get("says", ""),
    )


def _check_question(
    question: Question, family: str, groups: dict[str, dict[str, Any]]
) -> None:
    """Raise InputError where a term names an arm that its group lacks, a group that is
    not there, or a number that no record has.
    """
    for term in question.terms:
        if term.group not in groups:
            raise InputError(f"the family {family!r} names no group {term.group!r}.")
        if term.arm not in groups[term.group]["arms"]:
            raise InputError(
                f"the family {family!r} names {term.arm!r}, which is not in the group {term.group!r}."
            )
        if not known(term):
            raise InputError(
                f"the family {family!r} asks for {term.metric} at {term.at!r}: there is no such number."
            )


# ---- one number of one run -----------------------------------------------------------
def last_fifth(x: Numbers) -> float:
    """Return the mean of the last fifth, of at least one entry."""
    return float(x[-max(1, len(x) // 5) :].mean())


def _change(x: Numbers) -> float:
    """Return the mean of the last fifth minus the first entry."""
    return last_fifth(x) - float(x[0])


def _gain(x: Numbers) -> float:
    """Return the mean of the last fifth minus that of the first fifth."""
    return last_fifth(x) - float(x[: max(1, len(x) // 5)].mean())


def _largest_of_25(x: Numbers) -> float:
    """Return the largest entry of the first 25 training steps."""
    return float(x[: 25 // BIN].max())


# moment -> the number, of a column of a step metric
AT_STEPS: dict[str, Callable[[Numbers], float]] = {
    "mean": lambda x: float(x.mean()),
    "last": last_fifth,
    "max": lambda x: float(x.max()),
    "max25": _largest_of_25,
    "change": _change,
    "gain": _gain,
}
# moment -> the number, of the evaluated steps x and the values y
AT_EVALS: dict[str, Callable[[Numbers, Numbers], float]] = {
    "first": lambda x, y: float(y[0]),
    "last": lambda x, y: float(y[-1]),
    "highest": lambda x, y: float(y.max()),
    # the best one for Best@32 is often the untrained policy: it is left out
    "peak": lambda x, y: float(y[x > 0].max()),
    "area": lambda x, y: float(np.trapezoid(y, x) / (x[-1] - x[0])),
}


def known(term: Term) -> bool:
    """Return whether records have the number of a term: its metric exists, and its `at`
    is one of that metric's.

    "survival", "pass@K" and EQUAL have no `at`. K is a whole number.
    """
    metric = term.metric
    if metric in EVAL_METRICS:
        return term.at in AT_EVALS
    if metric in STEP_METRICS or metric == "malformed":
        return term.at in AT_STEPS
    if metric in ("survival", EQUAL):
        return True
    return metric.startswith("pass@") and metric.removeprefix("pass@").isdecimal()


def number(run: RunRecord, term: Term) -> float:
    """Return the term's number of one run, without its weight; shares in points of 100.

    Of a run that stopped, every number of the evaluations counts as 0.

    Args:
        run: a record.
        term: of what.

    Raises:
        InputError: the record has no such number.
        KeyError: it has no such column, or no such counts for Pass@k.
    """
    if term.metric == "survival":
        return survival(run)
    if term.metric == "malformed":
        return 100 * (1 - _of_steps(run, "valid", term.at))
    if term.metric in STEP_METRICS:
        scale = 100 if term.metric in SHARES else 1
        return scale * _of_steps(run, term.metric, term.at)
    if run["status"] != "done":  # what is left are numbers of the evaluations
        return 0.0
    if term.metric.startswith("pass@"):
        k = int(term.metric.removeprefix("pass@"))
        return 100 * pass_at(k, run["counts"][term.where])
    return 100 * _of_evaluations(run, term)


def _of_steps(run: RunRecord, metric: str, at: str) -> float:
    """Return the number of a step metric at a moment, of the entries that are finite.

    Raises:
        InputError: none is.
    """
    x = np.array(run["steps"].get(metric, ()), float)
    x = x[np.isfinite(x)]
    if not len(x):
        raise InputError(f"{run['name']} has no finite {metric} in its steps.")
    return AT_STEPS[at](x)


def _of_evaluations(run: RunRecord, term: Term) -> float:
    """Return a number of the evaluations, as a share; for the set "average" the mean
    over the sets by difficulty, each with equal weight.

    Raises:
        InputError: the record has no such evaluation.
    """
    set_name, _, decoding = term.where.partition("/")
    names = [term.where]
    if set_name == "average":
        names = [
            name
            for name in run["evals"]
            if name.endswith(f"/{decoding}") and not name.startswith("test/")
        ]
    if not names or not set(names) <= set(run["evals"]):
        there = ", ".join(run["evals"])
        raise InputError(
            f"{run['name']} has no evaluation on {term.where}, only {there}."
        )
    found = []
    for name in names:
        columns = run["evals"][name]
        steps = np.array(columns["step"])
        values = np.array(columns[term.metric])
        found.append(AT_EVALS[term.at](steps, values))
    return float(np.mean(found))


def survival(run: RunRecord) -> float:
    """Return the step of the first entry in which the reward is below half of its
    highest so far.

    If there is none: how many steps the run has, or, if it stopped, one more than the
    step of its last entry. An entry has the mean of BIN steps, and the first of them as
    its step.
    """
    steps = run["steps"]["step"]
    reward = np.array(run["steps"]["reward"])
    fallen = np.flatnonzero(reward < np.maximum.accumulate(reward) / 2)
    if len(fallen):
        return float(steps[fallen[0]])
    if run["status"] == "done":
        return float(run["settings"]["steps"])
    return float(steps[-1] + 1)


def pass_at(k: int, counts: Sequence[int]) -> float:
    """Return Pass@k, from 0 to 1, the mean over problems.

    Of a problem with c of n samples right it is 1 - C(n - c, k) / C(n, k), unbiased.

    Args:
        k: samples of which one must be right, at most n.
        counts: of how many problems 0, 1, ..., n of n samples are right.
    """
    n = len(counts) - 1
    by_right = [(comb(n, k) - comb(n - c, k)) / comb(n, k) for c in range(n + 1)]
    return float(np.dot(by_right, counts) / sum(counts))


def answers(run: RunRecord, term: Term, ratio: bool = False) -> bool:
    """Return whether the run has a finite number for the term.

    A run that stopped at its first step has none, and a KL of 0 has no logarithm.

    Args:
        run: a record.
        term: of what.
        ratio: the logarithm is asked for.
    """
    try:
        x = number(run, term)
    except (InputError, LookupError):
        return False
    return bool(np.isfinite(x)) and (x > 0 or not ratio)


# ---- Avg@32 and Best@32 by decoding: the points of an arm's curve -----------------------
def curve(run: RunRecord) -> Numbers:
    """Return Avg@32 and Best@32 on the test set in points, [evaluated steps, decodings,
    2].

    The decodings are in the order of the settings. 0 where a stopped run did not get.
    """
    s = run["settings"]
    names = [f"test/{decoding_name(p)}" for p in s["decodings"]]
    evaluated = [
        step
        for step in range(1, s["steps"] + 1)
        if step % s["eval_every"] == 0 or step == s["steps"]
    ]
    found = np.zeros((len(evaluated), len(names), 2))
    for i, name in enumerate(names):
        for j, metric in enumerate(("avg", "best")):
            column = run["evals"].get(name, {}).get(metric, [])
            found[: len(column), i, j] = 100 * np.array(column)
    return found


def decoding_name(top_p: float) -> str:
    """Return the name of a decoding in a record: "t_1" or "top_p_0.7"."""
    return "t_1" if top_p == 1 else f"top_p_{top_p:g}"
