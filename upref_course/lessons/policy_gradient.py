# SPDX-License-Identifier: Apache-2.0
import torch
from torch import Tensor

from upref.verify.faults import Fault
from upref_course.exercise import Exercise, ExerciseBatch
from upref_course.samples import numbers


def loss(logits: Tensor, action: Tensor, reward: Tensor) -> Tensor:
    """Compute the policy-gradient loss of N samples: the right answer.

    Args:
        logits: [K], a number for each action.
        action: [N], the actions that were taken.
        reward: [N], what each of them earned.

    Returns:
        A scalar, to be minimized.
    """
    return -(reward * torch.log_softmax(logits, 0)[action]).mean()


def batch(
    shows: str, logits: list[float], action: list[int], reward: list[float]
) -> ExerciseBatch:
    """Make samples of a policy of K actions.

    Args:
        shows: what it shows, in words.
        logits: [K].
        action: [N], 0 .. K - 1.
        reward: [N].

    Returns:
        A batch with these inputs.
    """
    return ExerciseBatch(
        shows,
        {
            "logits": numbers(logits),
            "action": torch.tensor(action),
            "reward": numbers(reward),
        },
    )


def softmax(logits: Tensor) -> Tensor:
    """Return the probability of each action.

    Args:
        logits: [K].

    Returns:
        [K].
    """
    return torch.softmax(logits, 0)


def log_softmax(logits: Tensor) -> Tensor:
    """Return the log-probability of each action.

    Args:
        logits: [K].

    Returns:
        [K].
    """
    return torch.log_softmax(logits, 0)


EXERCISE = Exercise(
    number=1,
    slug="policy-gradient",
    title="a policy is a softmax",
    function="loss",
    gradient="logits",
    right=loss,
    batches=(
        batch("one sample: action 0, which earned 1", [0.0, 0.0], [0], [1.0]),
        batch("one sample: action 1, which was bad", [1.0, 0.0], [1], [-1.0]),
        batch("two samples of two actions", [0.0, 0.0], [0, 1], [1.0, 3.0]),
        batch(
            "three samples, three actions",
            [0.5, -1.0, 0.0],
            [2, 0, 2],
            [1.0, 0.0, -2.0],
        ),
    ),
    faults=(
        Fault(
            "the sign: this makes actions that earned more less likely",
            lambda z, a, R: (R * log_softmax(z)[a]).mean(),
            id="sign-flipped",
            hint="an optimizer goes downhill. You want the mean of reward x log-probability to go up: what do you "
            "hand it?",
        ),
        Fault(
            "`action` is not used: the log-probabilities of all actions are trained",
            lambda z, a, R: -(R * log_softmax(z)).mean(),
            id="action-unused",
            hint="reward[i] belongs to the action that was taken in sample i: pick its log-probability by "
            "`action`.",
        ),
        Fault(
            "π itself where log π belongs",
            lambda z, a, R: -(R * softmax(z)[a]).mean(),
            id="probabilities-for-log-probs",
            hint="look at Eq. 2: it has ∇log π. An action is drawn as often as π says: π is in the average already.",
        ),
        Fault(
            "the logits where log π belongs: the other actions do not go down",
            lambda z, a, R: -(R * z[a]).mean(),
            id="normalizer-missing",
            hint="a logit is not a log-probability until the softmax has made all of them add up to 1: "
            "torch.log_softmax.",
        ),
        Fault(
            "the softmax twice",
            lambda z, a, R: -(R * log_softmax(softmax(z))[a]).mean(),
            id="softmax-twice",
            hint="torch.log_softmax takes the logits as they are: it has the softmax in it.",
        ),
        Fault(
            "the sum over the samples where their mean belongs",
            lambda z, a, R: -(R * log_softmax(z)[a]).sum(),
            id="sum-for-mean",
            hint="with twice as many samples the step should not be twice as long: an expectation is estimated by a "
            "mean.",
        ),
        Fault(
            "every action is pushed, not the one that was taken",
            lambda z, a, R: -(R[:, None] * log_softmax(z)).mean(),
            id="every-action-pushed",
            hint="of all the log-probabilities take the one of each sample's action: log_prob[action].",
        ),
        Fault(
            "every action is pushed, not the one that was taken",
            lambda z, a, R: -(R[:, None] * log_softmax(z)).sum(1).mean(),
            id="every-action-pushed",
            hint="of all the log-probabilities take the one of each sample's action: log_prob[action].",
        ),
        Fault(
            "one mean reward for all the samples",
            lambda z, a, R: -R.mean() * log_softmax(z)[a].mean(),
            id="mean-reward-for-all",
            hint="each sample's log-probability is weighed by that sample's own reward: multiply first, then take "
            "the mean.",
        ),
        Fault(
            "a baseline, the mean reward: a sample that stands alone is no better than itself, and pushes nothing",
            lambda z, a, R: -((R - R.mean()) * log_softmax(z)[a]).mean(),
            id="baseline-of-mean-reward",
            hint="that is lesson 2. Here a sample counts as much as it earned.",
        ),
        Fault(
            "the reward is left out: every action that was taken is made more likely",
            lambda z, a, R: -log_softmax(z)[a].mean(),
            id="advantage-left-out",
            hint="this is how a language model is trained on written text. Here each sample counts as much as it "
            "earned.",
        ),
        Fault(
            "the logarithm's base",
            lambda z, a, R: -(R * log_softmax(z)[a]).mean() / torch.tensor(2.0).log(),
            id="base-2",
            hint="∇π = π ∇log π holds for the natural logarithm: torch.log, not torch.log2 or log10.",
        ),
    ),
    notice="the loss is no measure of progress: the samples change with the policy, so its value goes anywhere. "
    "Only its gradient means something.",
)
