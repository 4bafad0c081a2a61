# SPDX-License-Identifier: Apache-2.0
import torch

from upref.advantages import group_norm
from upref.course.exercise import Batch, Exercise, Slip
from upref.verify.advantages import check_advantages

EPS = 1e-6


def batch(shows, rewards, group):
    return Batch(shows, {"rewards": torch.tensor(rewards, dtype=torch.float64), "group": torch.tensor(group)})


def each(rewards, group, one):
    """one(rewards of a group) put where they came from."""
    A = torch.zeros_like(rewards)
    for g in group.unique():
        A[group == g] = one(rewards[group == g])
    return A


everywhere = lambda one: lambda R, g: one(R)
in_groups = lambda one: lambda R, g: each(R, g, one)
in_order = lambda R, g: group_norm(R, torch.arange(len(R)) // max(2, len(R) // len(g.unique())))

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
        batch("one prompt, all answers right: none is better than the others", [1.0, 1.0], [0, 0]),
        batch("one prompt, one of three answers right", [0.0, 1.0, 0.0], [5, 5, 5]),
        batch("an easy prompt and a hard one", [1.0, 1.0, 0.0, 0.0, 0.0, 1.0], [0, 0, 0, 1, 1, 1]),
        batch("two prompts whose answers come in turns", [1.0, 0.0, 3.0, 4.0, 0.0, 2.0], [0, 1, 0, 1, 0, 1]),
    ),
    slips=(
        Slip(
            "there is no baseline: the rewards are divided, nothing is subtracted",
            "better than what? Take away the mean reward of the same prompt first.",
            in_groups(lambda R: R / (R.std() + EPS)),
        ),
        Slip(
            "the deviation of all prompts, not of each",
            "you take away each prompt's own mean; divide by each prompt's own deviation, too.",
            lambda R, g: each(R, g, lambda x: x - x.mean()) / (R.std() + EPS),
        ),
        Slip(
            "one mean for all prompts",
            "hard prompts are compared with easy ones. Which rewards share its number in `group`?",
            everywhere(lambda R: (R - R.mean()) / (R.std() + EPS)),
        ),
        Slip(
            "one mean for all prompts, though each has its own deviation",
            "take away the mean of the rewards that share its number in `group`.",
            lambda R, g: each(R - R.mean(), g, lambda x: x / (x.std() + EPS)),
        ),
        Slip(
            "the answers are taken in the order in which they come",
            "answers of one prompt need not stand together: `group == g` says where they are.",
            in_order,
        ),
        Slip(
            "nothing is divided: this is Dr. GRPO's advantage (liu2025understanding)",
            "a fine advantage, but the exercise asks for group_norm: divide by the deviation of the group plus 1e-6.",
            in_groups(lambda R: R - R.mean()),
        ),
        Slip(
            "the variance where the standard deviation belongs",
            "rewards ten times as large should give the same advantages. Do yours? torch.std is the root of torch.var.",
            in_groups(lambda R: (R - R.mean()) / (R.var() + EPS)),
        ),
        Slip(
            "the deviation divides by G, not by G - 1",
            "both are used in the field. The exercise asks for torch.std as it comes, without correction=0.",
            in_groups(lambda R: (R - R.mean()) / (R.std(correction=0) + EPS)),
        ),
        Slip(
            "0/0: a group of equal rewards has no deviation",
            "add a small number to the denominator, 1e-6: x / (deviation + 1e-6), in brackets.",
            in_groups(lambda R: (R - R.mean()) / R.std()),
        ),
        Slip(
            "only the mean is divided: brackets are missing around reward - mean",
            "a - b / c is a - (b / c).",
            in_groups(lambda R: R - R.mean() / (R.std() + EPS)),
        ),
        Slip(
            "the sign: answers worse than the mean come out positive",
            "an advantage is the reward minus the mean.",
            in_groups(lambda R: (R.mean() - R) / (R.std() + EPS)),
        ),
        Slip(
            "each response's baseline is the mean of the others, not of the whole group",
            "that is RLOO's baseline (ahmadian2024back); here the response itself is counted in the mean.",
            in_groups(lambda R: (R - (R.sum() - R) / max(len(R) - 1, 1)) / (R.std() + EPS)),
        ),
        Slip(
            "the baseline is the median",
            "only the mean makes the advantages of a group add up to 0.",
            in_groups(lambda R: (R - R.median()) / (R.std() + EPS)),
        ),
    ),
    notice="a group whose answers are all right, or all wrong, teaches nothing: every advantage is 0. "
    "DAPO (yu2025dapo) samples on until there are none such.",
)  # fmt: skip
