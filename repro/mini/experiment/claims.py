# SPDX-License-Identifier: Apache-2.0
"""What is said of a claim, by the rule that the second round registered.

[[claims]]            id, figure, says; source = "paper" or "ours" (a control that the paper lacks), and either
                      not_testable = "why", or contrasts, all of which must hold:
  arms                two: the first minus (or over) the second, paired by seed; one: its own number
  metric, at, set, decoding   as in questions.py
  more_than, less_than   the bound that the effect must pass;  ratio = true: the effect is first / second
  within              the effect is "comparable", between -within and within (ratio: 1/within and within)
  effect              the effect that the number of seeds was calculated for
gate                  an arm whose reward must rise, or the claim is not testable here

    several contrasts  all must hold: p_for is the largest, p_against k times the smallest of k
    families           Holm's correction over the claims of one experiment and one source: what the paper claims and
                       what we ask are two families; p_for and p_against are each corrected

    reproduced         corrected p_for < 0.05 ("holds" for what we ask)
    refuted            corrected p_against < 0.05: the opposite, or a difference that is not comparable, is shown
    in part            not these, but of several contrasts some hold (Holm within the claim) and some do not
    undecided          none of these
    not testable here  the gate failed, or the miniature has nothing that corresponds
    not finished       seeds are still to run
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log, nan, sqrt
from typing import Any

import numpy as np
from scipy.stats import t

from paper.claims import words as verdicts
from repro.mini.experiment import effects, words
from repro.mini.experiment.effects import Effect, Runs, holm
from repro.mini.experiment.plan import Plan
from repro.mini.experiment.questions import (
    POSITIVE,
    SHARES,
    Question,
    RunRecord,
    Term,
    known,
    number,
)
from upref.errors import InputError

ALPHA = 0.05
MOST = 200  # seeds: no more are looked for
POWER = 0.8
FINAL = ("reproduced", "holds", "refuted", "in part", "undecided")


@dataclass(frozen=True)
class Claim:
    """A statement that an experiment tests; the keys are described at the top."""

    id: str
    figure: str
    says: str
    source: str = "paper"
    not_testable: str = ""
    gate: str = ""
    questions: tuple[Question, ...] = ()


@dataclass(frozen=True)
class Standing:
    """What the runs say of a claim.

    Attributes:
        word: of the rule.
        effects: of the claim's questions.
        p_for: corrected over the family.
        p_against: likewise.
        n: seeds that are finished.
        of: seeds that are due.
        power: at the spread that was seen and the seeds that finished.
        seeds_needed: for POWER at that spread.
    """

    claim: Claim
    word: str
    why: str = ""
    effects: tuple[Effect, ...] = ()
    p_for: float = 1.0
    p_against: float = 1.0
    n: int = 0
    of: int = 0
    power: float = nan
    seeds_needed: int | None = None


# ---- reading -------------------------------------------------------------------------
def of_plan(plan: Plan) -> list[Claim]:
    """The claims of a plan, each held against its arms and the numbers that there are.

    Raises:
        InputError: a claim cannot be computed.
    """
    return [_claim(dict(table), plan) for table in plan.claims]


def _claim(table: dict[str, Any], plan: Plan) -> Claim:
    """One claim, if it can be computed."""
    contrasts = table.pop("contrasts", [])
    asked = tuple(_contrast(contrast, plan.name) for contrast in contrasts)
    claim = Claim(questions=asked, **table)
    where = f"{plan.name}: claim {claim.id}"
    if bool(asked) == bool(claim.not_testable):
        raise InputError(f"{where} needs contrasts or not_testable, and not both.")
    if claim.source not in ("paper", "ours"):
        raise InputError(f"{where} needs the source paper or ours.")
    gates = [claim.gate] if claim.gate else []
    for arm in [*(arm for q in asked for arm in q.arms), *gates]:
        if arm not in plan.arms:
            raise InputError(f"{where} names the arm {arm!r}, which is not there.")
    for question, contrast in zip(asked, contrasts, strict=True):
        if not question.bounds or not all(map(known, question.terms)):
            raise InputError(
                f"{where} has a contrast that cannot be computed: {contrast}."
            )
    return claim


def _contrast(table: dict[str, Any], group: str) -> Question:
    """A question of one or two arms with its bounds, on the scale of d."""
    metric = table["metric"]
    ratio = table.get("ratio", False)
    where = f"{table.get('set', 'test')}/{table.get('decoding', 'top_p_0.7')}"
    at = table.get("at", "last")
    terms = tuple(
        Term(arm, group, metric, at, where, weight)
        for arm, weight in zip(table["arms"], (1.0, -1.0), strict=False)
    )
    scale = 100 if metric in SHARES and not ratio else 1
    effect = table.get("effect")
    return Question(
        metric,
        terms,
        ratio=ratio,
        bounds=_bounds(table, ratio, scale),
        effect=None if effect is None else scale * effect,
    )


def _bounds(
    table: dict[str, Any], ratio: bool, scale: int
) -> tuple[tuple[int, float], ...]:
    """(side, bound): what is claimed lies above (1) or below (-1); () if not one is
    given.
    """
    given = [key for key in ("more_than", "less_than", "within") if key in table]
    if len(given) != 1:
        return ()
    size = log(table[given[0]]) if ratio else float(scale * table[given[0]])
    return {
        "more_than": ((1, size),),
        "less_than": ((-1, size),),
        "within": ((1, -size), (-1, size)),
    }[given[0]]


def bounds_alone(claim: Claim) -> bool:
    """Whether a claim is of bounds alone, so that a test against it shows no opposite.

    A bound is of one arm's own quantity, or of a difference or a ratio that the claim
    names a size of. The opposite of a claim is a difference between two arms on the
    other side of none.
    """
    return all(
        len(q.arms) == 1 or all(bound != 0 for _, bound in q.bounds)
        for q in claim.questions
    )


# ---- the rule ------------------------------------------------------------------------
def judge(plan: Plan, records: dict[str, RunRecord]) -> list[Standing]:
    """How each claim of a plan stands, with intervals at the level at which each is
    decided.
    """
    runs = plan.runs(records)
    seeds = plan.main["seeds"]
    found = {}
    for claim in of_plan(plan):
        measured = tuple(_measure(q, runs, seeds, plan) for q in claim.questions)
        found[claim.id] = Standing(claim, "", claim.not_testable, measured)
    for source in ("paper", "ours"):
        family = [s for s in found.values() if s.claim.source == source and s.effects]
        for s in _corrected(family, len(seeds)):
            word, why = _decide(s, _gain(s.claim, runs, seeds))
            found[s.claim.id] = replace(s, word=word, why=why)
        for s in _decisive([found[s.claim.id] for s in family]):
            found[s.claim.id] = s
    return [
        s if s.effects else replace(s, word="not testable here") for s in found.values()
    ]


def _measure(
    question: Question, runs: Runs, seeds: Sequence[int], plan: Plan
) -> Effect:
    """The question over the seeds of which every arm has finished."""
    if question.ratio and question.metric not in POSITIVE:
        raise InputError(
            f"{question.metric} can be 0: it is compared by differences, not by ratios."
        )
    bases = plan.bases_of(question)
    there = effects.finished(question, runs, seeds, bases)
    d = effects.differences(question, runs, there, bases)
    return effects.described(question, d)


def _ps(s: Standing) -> list[tuple[float, float]]:
    """p for and against of each effect, not corrected."""
    return [effects.p_values(e.question, np.array(e.values)) for e in s.effects]


def _against(s: Standing) -> float:
    """That one of k contrasts is refuted: k times the smallest p."""
    ps = _ps(s)
    return min(1.0, len(ps) * min(against for _, against in ps))


def _for(s: Standing) -> float:
    """That all contrasts hold: the largest p."""
    return max(p for p, _ in _ps(s))


def _corrected(family: list[Standing], due: int) -> list[Standing]:
    """With Holm's p-values over the family, and the power at its strictest level."""
    p_for = holm([_for(s) for s in family])
    p_against = holm([_against(s) for s in family])
    found = []
    for s, holds, refuted in zip(family, p_for, p_against, strict=True):
        n = min(e.n for e in s.effects)
        s = replace(s, p_for=holds, p_against=refuted, n=n, of=due)
        if n > 1:
            s = _with_power(s, ALPHA / len(family))
        found.append(s)
    return found


def _with_power(s: Standing, level: float) -> Standing:
    """With the power of its weakest contrast, and the seeds that it would take."""
    powers = []
    needed = []
    for e in s.effects:
        powers.append(effects.power_of_bounds(e.question, e.sd, e.n, level))
        needed.append(_needed(e, level))
    return replace(s, power=min(powers), seeds_needed=max(needed))


def _needed(e: Effect, level: float) -> int:
    """Seeds for POWER, for the registered effect at the spread that was seen."""

    def power_of(n: int) -> float:
        return effects.power_of_bounds(e.question, e.sd, n, level)

    return effects.fewest(power_of, POWER, MOST)


def _gain(claim: Claim, runs: Runs, seeds: Sequence[int]) -> float | None:
    """By how many points the reward of the claim's gate rises; None without a gate."""
    if not claim.gate:
        return None
    group = claim.questions[0].groups[0]
    term = Term(claim.gate, group, "reward", "gain")
    gains = [
        number(run, term)
        for seed in seeds
        if (run := runs.get((claim.gate, group, "", seed)))
    ]
    return float(np.mean(gains)) if len(gains) == len(seeds) else None


def _decide(s: Standing, gain: float | None) -> tuple[str, str]:
    """The rule's word, and why. A few seeds close nothing."""
    if s.n < s.of or (s.claim.gate and gain is None):
        return "not finished", f"{s.n} of {s.of} seeds so far"
    if gain is not None and gain <= 0:
        why = f"{s.claim.gate} itself does not learn there: its reward changes by {gain:+.1f} points"
        return "not testable here", why
    if s.p_for < ALPHA:
        return ("reproduced" if s.claim.source == "paper" else "holds"), ""
    if s.p_against < ALPHA:
        comparable = len(s.effects[0].question.bounds) == 2
        why = "the difference is larger" if comparable else "the opposite is shown"
        return "refuted", why
    held = contrasts_that_hold(s)
    if held and len(s.effects) > 1:
        return "in part", f"{held} of {len(s.effects)} contrasts hold"
    return "undecided", ""


def contrasts_that_hold(s: Standing) -> int:
    """How many, by Holm's correction within the claim."""
    return sum(p < ALPHA for p in holm([p for p, _ in _ps(s)]))


def _decisive(family: list[Standing]) -> list[Standing]:
    """With each interval at the level at which its claim was decided.

    That is Holm's level for the claim, or against it, where that was shown; where
    neither was, the strictest, ALPHA over the claims of the family: these intervals
    hold for all of the family at once.
    """
    levels_for = effects.holm_levels(list(map(_for, family)))
    levels_against = effects.holm_levels(list(map(_against, family)))
    found = []
    for i, s in enumerate(family):
        level = ALPHA / len(family)
        if s.word in ("reproduced", "holds"):
            level = levels_for[i]
        elif s.word == "refuted":
            level = levels_against[i] / len(s.effects)
        at_level = tuple(_at_level(e, level) for e in s.effects)
        found.append(replace(s, effects=at_level))
    return found


def _at_level(e: Effect, level: float) -> Effect:
    """With its interval at this level."""
    if e.n < 2:
        return e
    half = float(t.ppf(1 - level / 2, e.n - 1)) * e.sd / sqrt(e.n)
    return replace(e, low=e.mean - half, high=e.mean + half)


# ---- in words ------------------------------------------------------------------------
def excluded(e: Effect) -> bool:
    """Whether the interval ends short of the effect that was registered."""
    q = e.question
    if q.effect is None or not e.n:
        return False
    registered = log(q.effect) if q.ratio else q.effect
    return e.high < registered if q.bounds[0][0] > 0 else e.low > registered


def verdict(s: Standing) -> str:
    """The word of the common vocabulary."""
    return verdicts.of_rule(s.word, s.why, any(map(excluded, s.effects)))


def limit(s: Standing) -> str:
    """Of an excluded effect: above or below what; "" of another."""
    if verdict(s) != verdicts.EXCLUDED:
        return ""
    e = next(filter(excluded, s.effects))
    above = e.question.bounds[0][0] > 0
    end = words.rounded(e.question, e.high if above else e.low)
    return f"{verdicts.EXCLUDED} {'above' if above else 'below'} {end}"


def shown(s: Standing) -> str:
    """The effects; of many, how many hold, and the weakest."""
    there = [e for e in s.effects if e.n]
    if len(there) <= 3:
        return "<br>".join(_one(e) for e in there)
    ps = [effects.p_values(e.question, np.array(e.values)) for e in there]
    weakest = max(range(len(there)), key=lambda i: (ps[i][0], -ps[i][1]))
    held = contrasts_that_hold(replace(s, effects=tuple(there)))
    return f"{held} of {len(there)} hold; weakest: {_one(there[weakest])}"


def _one(e: Effect) -> str:
    return f"{words.shown(e)}: {words.claimed(e.question)}"
