# SPDX-License-Identifier: Apache-2.0
"""The runs are made by docs/course/runs.py, which holds this key against what it did to
them.
"""

from typing import Any

from upref_course.exercise import Exercise, ExerciseBatch

SIGNS = {  # what may be wrong -> what one would see
    "nothing": "reward and pass@8 rise, entropy falls slowly, r is 1 at the first update, and a few are clipped later",
    "sign": "the reward falls, and everything else looks orderly",
    "no baseline": "every answer that is drawn is pushed up: entropy and pass@8 fall together, the reward hardly rises",
    "no signal": "all groups are all right or all wrong, every advantage is 0, and so is the gradient",
    "recomputed": "lp_old is taken anew before each update, so r is always 1, and nothing is ever clipped",
    "temperature": "r is not 1 even before the first step, where π_θ is π_old, and tokens are clipped from the start",
}
KEY = {
    "A": "temperature",
    "B": "no baseline",
    "C": "nothing",
    "D": "recomputed",
    "E": "no signal",
    "F": "sign",
}
LOOK = {  # where to look in each run
    "A": "what should r be at the first update after sampling?",
    "B": "what becomes of pass@8?",
    "C": "go through the columns one by one: is there any that should not be so?",
    "D": "there are eight updates on each batch. What should r be at the last one?",
    "E": "what is an advantage in a group whose answers are all alike?",
    "F": "in which direction does the reward go?",
}


def diagnosis(run: str) -> str:
    """Return what is wrong with a run: the right answer.

    Args:
        run: a key of KEY.

    Returns:
        A key of SIGNS.
    """
    return KEY[run]


def hint(batch: ExerciseBatch, answer: Any) -> str:
    """Say what the student's answer would look like in a run, and where to look.

    Args:
        batch: the run.
        answer: what the student's function returns.

    Returns:
        A sentence or two.
    """
    run = batch.inputs["run"]
    if not isinstance(answer, str) or answer not in SIGNS:
        return f"{repr(answer)[:60]} is none of: {', '.join(SIGNS)}."
    return f"with {answer!r} one would see: {SIGNS[answer]}. Run {run} is not so: {LOOK[run]}"


EXERCISE = Exercise(
    number=10,
    slug="reading-a-run",
    title="read a run, and say what is wrong with it",
    function="diagnosis",
    value=True,
    answer_kept_back=True,
    hint=hint,
    right=diagnosis,
    batches=tuple(ExerciseBatch(f"run {run}", {"run": run}) for run in KEY),
    faults=(),
    notice="run D earns most here, though its clip is dead: at this learning rate the clip was not needed. A fault "
    "need not show in the reward: look first at what must be so, r = 1 at the first update, then at what you hope for.",
)
