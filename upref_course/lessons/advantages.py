# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable

import torch
from torch import Tensor

from upref.advantages import group_norm
from upref.verify.advantages import check_advantages
from upref.verify.faults import Fault
from upref_course.exercise import Exercise, ExerciseBatch

EPS = 1e-6


def batch(shows: str, rewards: list[float], group: list[int]) -> ExerciseBatch:
    """Make a batch of answers.

    Args:
        shows: what it shows, in words.
        rewards: of each answer, [N].
        group: the number of the prompt that each answers, [N].

    Returns:
        A batch whose inputs are rewards and group.
    """
    return ExerciseBatch(
        shows,
        {
            "rewards": torch.tensor(rewards, dtype=torch.float64),
            "group": torch.tensor(group),
        },
    )


def apply_by_group(
    rewards: Tensor, group: Tensor, estimator: Callable[..., Tensor]
) -> Tensor:
    """Apply an estimator to each group by itself.

    Args:
        rewards: [N].
        group: the number of the prompt that each answers, [N].
        estimator: rewards of one group -> advantages.

    Returns:
        Advantages [N], in the order of the rewards.
    """
    A = torch.zeros_like(rewards)
    for g in group.unique():
        A[group == g] = estimator(rewards[group == g])
    return A


def as_one_group(estimator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make an advantage function that takes all rewards as one group.

    Args:
        estimator: rewards of one group -> advantages.

    Returns:
        A function of rewards and group.
    """
    return lambda R, g: estimator(R)


def group_by_group(estimator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make an advantage function that takes each group by itself.

    Args:
        estimator: rewards of one group -> advantages.

    Returns:
        A function of rewards and group.
    """
    return lambda R, g: apply_by_group(R, g, estimator)


def norm_of_blocks(R: Tensor, g: Tensor) -> Tensor:
    """Apply group_norm to answers that follow each other, whatever their group.

    Args:
        R: rewards, [N].
        g: the number of the prompt that each answers, [N]; only how many there are is
            read.

    Returns:
        Advantages [N], of blocks of the mean group's size, or of 2 where that is
        larger.
    """
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
        batch("one prompt, two rewards that are almost equal", [0.0, 0.001], [0, 0]),
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
            group_by_group(lambda R: R / (R.std() + EPS)),
            id="no-baseline",
            hint="better than what? Take away the mean reward of the same prompt first.",
        ),
        Fault(
            "the deviation of all prompts, not of each",
            lambda R, g: apply_by_group(R, g, lambda x: x - x.mean()) / (R.std() + EPS),
            id="other-divisor",
            hint="you take away each prompt's own mean; divide by each prompt's own deviation, too.",
        ),
        Fault(
            "one mean for all prompts",
            as_one_group(lambda R: (R - R.mean()) / (R.std() + EPS)),
            id="other-baseline-and-divisor",
            hint="hard prompts are compared with easy ones. Which rewards share its number in `group`?",
        ),
        Fault(
            "one mean for all prompts, though each has its own deviation",
            lambda R, g: apply_by_group(R - R.mean(), g, lambda x: x / (x.std() + EPS)),
            id="other-baseline",
            hint="take away the mean of the rewards that share its number in `group`.",
        ),
        Fault(
            "the answers are taken in the order in which they come",
            norm_of_blocks,
            id="groups-by-blocks",
            hint="answers of one prompt need not stand together: `group == g` says where they are.",
        ),
        Fault(
            "nothing is divided: this is Dr. GRPO's advantage",
            group_by_group(lambda R: R - R.mean()),
            id="estimator-group_mean",
            hint="a fine advantage, but the exercise asks for group_norm: divide by the deviation of the group plus "
            "1e-6.",
        ),
        Fault(
            "the variance where the standard deviation belongs",
            group_by_group(lambda R: (R - R.mean()) / (R.var() + EPS)),
            id="variance-for-std",
            hint="rewards ten times as large should give the same advantages. Do yours? torch.std is the root of "
            "torch.var.",
        ),
        Fault(
            "the deviation divides by G, not by G - 1",
            group_by_group(lambda R: (R - R.mean()) / (R.std(correction=0) + EPS)),
            id="std-of-population",
            hint="both are used in the field. The exercise asks for torch.std as it comes, without correction=0.",
        ),
        Fault(
            "1e-6 is added to the variance, under the root, not to the deviation",
            group_by_group(lambda R: (R - R.mean()) / (R.var() + EPS).sqrt()),
            id="eps-under-the-root",
            hint="under the root 1e-6 counts as 1e-3 where the deviation is small. Take the root first, then add.",
        ),
        Fault(
            "the small number is 1e-4, TRL's, where the exercise says 1e-6",
            group_by_group(lambda R: (R - R.mean()) / (R.std() + 1e-4)),
            id="eps-of-trl",
            hint="both are used in the field. The exercise asks for 1e-6.",
        ),
        Fault(
            "the small number is 1e-8, where the exercise says 1e-6",
            group_by_group(lambda R: (R - R.mean()) / (R.std() + 1e-8)),
            id="eps-smaller",
            hint="both are used in the field. The exercise asks for 1e-6.",
        ),
        Fault(
            "1e-6 is not added to a deviation above 0: nothing is, or much less",
            group_by_group(lambda R: (R - R.mean()) / R.std().clamp(min=EPS)),
            id="eps-by-clamp",
            hint="the denominator is the deviation plus 1e-6 in every group, without a clamp or a test for 0.",
        ),
        Fault(
            "0/0: a group of equal rewards has no deviation",
            group_by_group(lambda R: (R - R.mean()) / R.std()),
            id="std-of-equal-rewards",
            hint="add a small number to the denominator, 1e-6: x / (deviation + 1e-6), in brackets.",
        ),
        Fault(
            "only the mean is divided: brackets are missing around reward - mean",
            group_by_group(lambda R: R - R.mean() / (R.std() + EPS)),
            id="mean-alone-divided",
            hint="a - b / c is a - (b / c).",
        ),
        Fault(
            "the sign: answers worse than the mean come out positive",
            group_by_group(lambda R: (R.mean() - R) / (R.std() + EPS)),
            id="advantages-negated",
            hint="an advantage is the reward minus the mean.",
        ),
        Fault(
            "each response's baseline is the mean of the others, not of the whole group",
            group_by_group(
                lambda R: (R - (R.sum() - R) / max(len(R) - 1, 1)) / (R.std() + EPS)
            ),
            id="estimator-leave_one_out-divided",
            hint="that is RLOO's baseline; here the response itself is counted in the mean.",
        ),
        Fault(
            "the mean of the others is the baseline, and nothing is divided: this is RLOO's advantage",
            group_by_group(lambda R: R - (R.sum() - R) / max(len(R) - 1, 1)),
            id="estimator-leave_one_out",
            hint="a fine advantage, but the exercise asks for group_norm: the mean of the "
            "whole group, and its deviation.",
        ),
        Fault(
            "the baseline is the median",
            group_by_group(lambda R: (R - R.median()) / (R.std() + EPS)),
            id="baseline-is-median",
            hint="only the mean makes the advantages of a group add up to 0.",
        ),
    ),
    notice="a group whose answers are all right, or all wrong, teaches nothing: every advantage is 0. "
    "DAPO keeps sampling until no such group is left.",
)
