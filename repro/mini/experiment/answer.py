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
    """Return the effects of the answer's family against one control.

    Args:
        plan: with an [answer].
        found: the effects of the whole plan, in its order.
        control: an arm.

    Returns:
        Those of the answer's group, in the order of the plan; [] if there is none.
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
    """Return the word against one control: one of those at the top of this file.

    "not finished" if at least one of the effects is.

    Args:
        plan: with an [answer].
        found: the effects of the whole plan, in its order.
        control: an arm.

    Raises:
        InputError: no effect of the answer's family and group is against it.
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
    """Return "yes", "no", "undecided" or "not finished", as described above.

    "not finished" if it is against at least one control.

    Args:
        plan: with an [answer].
        found: the effects of the whole plan, in its order.

    Raises:
        InputError: no effect is against one of the controls.
    """
    words = [against(plan, found, control) for control in plan.answer["controls"]]
    if "not finished" in words:
        return "not finished"
    if all(word == "more" for word in words):
        return "yes"
    return "no" if {"nothing more", "less"} & set(words) else "undecided"
