# SPDX-License-Identifier: Apache-2.0
"""A plan's own verdict: is its first arm more than every control of [answer]?

Against one control, over the questions of the answer's family in its group:

    more              the first arm gains in one at least, and loses in none
    less              it loses in one at least, and gains in none
    a trade           it gains in one and loses in another
    nothing more      none of these, and every interval ends below the margin
    undecided         none of these (what is out of reach is undecided)

The answer is "yes" if it is more than every control, "no" if it is nothing more or less
than one of them at least, and else "undecided".
"""

from collections.abc import Sequence

from repro.mini.experiment.effects import Effect
from repro.mini.experiment.plan import Plan
from upref.errors import InputError


def of_control(plan: Plan, found: Sequence[Effect], control: str) -> list[Effect]:
    """The effects of the answer's family against one control.

    Args:
        plan: with an [answer].
        found: the effects of the whole plan.
        control: an arm.
    """
    wanted = plan.answer
    for family, effects in plan.by_family(found):
        if family.name == wanted["family"]:
            return [
                e
                for e in effects
                if (e.question.group, e.question.other) == (wanted["group"], control)
            ]
    return []


def against(plan: Plan, found: Sequence[Effect], control: str) -> str:
    """The word against one control.

    Args:
        plan: with an [answer].
        found: the effects of the whole plan.
        control: an arm.
    """
    effects = of_control(plan, found, control)
    if not effects:
        raise InputError(
            f"no effect is against {control!r}: fix the family, group or control in [answer] of the plan."
        )
    words = [e.word for e in effects]
    if "not finished" in words:
        return "not finished"
    gains = any(word.startswith("gains") for word in words)
    loses = any(word.startswith("loses") for word in words)
    if gains and loses:
        return "a trade"
    if gains or loses:
        return "more" if gains else "less"
    below = all(e.reached and e.high < e.question.margin for e in effects)
    return "nothing more" if below else "undecided"


def answer(plan: Plan, found: Sequence[Effect]) -> str:
    """ "yes", "no", "undecided" or "not finished".

    Args:
        plan: with an [answer].
        found: the effects of the whole plan.
    """
    words = [against(plan, found, control) for control in plan.answer["controls"]]
    if "not finished" in words:
        return "not finished"
    if all(word == "more" for word in words):
        return "yes"
    return "no" if {"nothing more", "less"} & set(words) else "undecided"
