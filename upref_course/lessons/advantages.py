# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from upref.advantages import group_norm
from upref.verify.advantages import check_advantages
from upref.verify.faults import Fault
from upref_course.exercise import Exercise, ExerciseBatch

EPS = 1e-6


def batch(shows: str, rewards: list[float], group: Any) -> ExerciseBatch:
    return ExerciseBatch(
        shows,
        {
            "rewards": torch.tensor(rewards, dtype=torch.float64),
            "group": torch.tensor(group),
        },
    )


def each(rewards: Tensor, group: Tensor, one: Callable[..., Tensor]) -> Tensor:
    """one(rewards of a group) put where they came from."""
    A = torch.zeros_like(rewards)
    for g in group.unique():
        A[group == g] = one(rewards[group == g])
    return A


def everywhere(one: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An advantage function that takes all rewards as one group."""
    return lambda R, g: one(R)


def in_groups(one: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An advantage function that takes each group by itself."""
    return lambda R, g: each(R, g, one)


def in_order(R: Tensor, g: Tensor) -> Tensor:
    """group_norm of answers that stand together, whatever their group."""
    return group_norm(R, torch.arange(len(R)) // max(2, len(R) // len(g.unique())))


EXERCISE = Exercise(
    number=2,
    slug="baselines-and-groups",
    title="better than what?",
    function="advantages",
    value=True,
    right=group_norm,
    proof=lambda fn: check_advantages(fn, "group_norm", skip=("singletons",), ddof=1),
    batches=(
        batch("one prompt, one right answer and one wrong", [1.0, 0.0], [0, 0]),
        batch(
            "one prompt, all answers right: none is better than the others",
            [1.0, 1.0],
            [0, 0],
        ),
        batch("one prompt, one of three answers right", [0.0, 1.0, 0.0], [5, 5, 5]),
        batch(
            "an easy prompt and a hard one",
            [1.0, 1.0, 0.0, 0.0, 0.0, 1.0],
            [0, 0, 0, 1, 1, 1],
        ),
        batch(
            "two prompts whose answers come in turns",
            [1.0, 0.0, 3.0, 4.0, 0.0, 2.0],
            [0, 1, 0, 1, 0, 1],
        ),
    ),
    faults=(
        Fault(
            "there is no baseline: the rewards are divided, nothing is subtracted",
            in_groups(lambda R: R / (R.std() + EPS)),
            id="no-baseline",
            hint="better than what? Take away the mean reward of the same prompt first.",
        ),
        Fault(
            "the deviation of all prompts, not of each",
            lambda R, g: each(R, g, lambda x: x - x.mean()) / (R.std() + EPS),
            id="other-divisor",
            hint="you take away each prompt's own mean; divide by each prompt's own deviation, too.",
        ),
        Fault(
            "one mean for all prompts",
            everywhere(lambda R: (R - R.mean()) / (R.std() + EPS)),
            id="other-baseline-and-divisor",
            hint="hard prompts are compared with easy ones. Which rewards share its number in `group`?",
        ),
        Fault(
            "one mean for all prompts, though each has its own deviation",
            lambda R, g: each(R - R.mean(), g, lambda x: x / (x.std() + EPS)),
            id="other-baseline",
            hint="take away the mean of the rewards that share its number in `group`.",
        ),
        Fault(
            "the answers are taken in the order in which they come",
            in_order,
            id="groups-by-blocks",
            hint="answers of one prompt need not stand together: `group == g` says where they are.",
        ),
        Fault(
            "nothing is divided: this is Dr. GRPO's advantage",
            in_groups(lambda R: R - R.mean()),
            id="estimator-group_mean",
            hint="a fine advantage, but the exercise asks for group_norm: divide by the deviation of the group plus "
            "1e-6.",
        ),
        Fault(
            "the variance where the standard deviation belongs",
            in_groups(lambda R: (R - R.mean()) / (R.var() + EPS)),
            id="variance-for-std",
            hint="rewards ten times as large should give the same advantages. Do yours? torch.std is the root of "
            "torch.var.",
        ),
        Fault(
            "the deviation divides by G, not by G - 1",
            in_groups(lambda R: (R - R.mean()) / (R.std(correction=0) + EPS)),
            id="std-of-population",
            hint="both are used in the field. The exercise asks for torch.std as it comes, without correction=0.",
        ),
        Fault(
            "0/0: a group of equal rewards has no deviation",
            in_groups(lambda R: (R - R.mean()) / R.std()),
            id="std-of-equal-rewards",
            hint="add a small number to the denominator, 1e-6: x / (deviation + 1e-6), in brackets.",
        ),
        Fault(
            "only the mean is divided: brackets are missing around reward - mean",
            in_groups(lambda R: R - R.mean() / (R.std() + EPS)),
            id="mean-alone-divided",
            hint="a - b / c is a - (b / c).",
        ),
        Fault(
            "the sign: answers worse than the mean come out positive",
            in_groups(lambda R: (R.mean() - R) / (R.std() + EPS)),
            id="advantages-negated",
            hint="an advantage is the reward minus the mean.",
        ),
        Fault(
            "each response's baseline is the mean of the others, not of the whole group",
            in_groups(
                lambda R: (R - (R.sum() - R) / max(len(R) - 1, 1)) / (R.std() + EPS)
            ),
            id="estimator-leave_one_out-divided",
            hint="that is RLOO's baseline; here the response itself is counted in the mean.",
        ),
        Fault(
            "the baseline is the median",
            in_groups(lambda R: (R - R.median()) / (R.std() + EPS)),
            id="baseline-is-median",
            hint="only the mean makes the advantages of a group add up to 0.",
        ),
    ),
    notice="a group whose answers are all right, or all wrong, teaches nothing: every advantage is 0. "
    "DAPO keeps sampling until no such group is left.",
)
