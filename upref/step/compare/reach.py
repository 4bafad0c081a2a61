# SPDX-License-Identifier: Apache-2.0
"""Which numbers of an objective the rows of a step exercise: what another value of each
would do to its gradient.

A clip bound that no ratio of the rows comes near has no effect on them, so a loop with
another bound agrees just as well. This is measured: the reference is computed once more
with each number at a part and at a multiple of its value.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from upref.errors import InputError
from upref.registry import REDUCE
from upref.step.compare.forward import Forward, clip_norm
from upref.step.compare.goal import Goal
from upref.step.inputs.rows import Padded

# multiples of a number that are tried, outwards
FACTORS_BELOW = (1 / 2, 1 / 10)
FACTORS_ABOVE = (2.0, 10.0, 100.0)
# in place of FACTORS_BELOW, where a number cannot have half of its value
NEARER_FACTORS = (3 / 4,)
# values that are tried for a number that is 0; a count takes the second pair alone
FOR_ZERO = [0.1, 0.2], [1.0, 2.0]


@dataclass(frozen=True)
class Reference:
    """The reference on the rows, against which other values of its numbers are
    compared.
    """

    goal: Goal
    forward: Forward
    padded: Padded
    bound: float  # the relative error of a gradient that the check allows
    rows: Tensor  # [B, P], the gradient that the goal has
    slope: Tensor  # [B, T], its derivative by the log-probabilities

    @classmethod
    def of(
        cls, goal: Goal, forward: Forward, padded: Padded, bound: float, rows: Tensor
    ) -> "Reference":
        """Make the reference, with the derivative of the goal's loss."""
        return cls(
            goal, forward, padded, bound, rows, _loss_gradient(goal, forward, padded)
        )

    def agrees(self, goal: Goal) -> bool:
        """Return whether a step that has this goal in place of its own passes the check
        on these rows.

        Args:
            goal: with another number.
        """
        change = _loss_gradient(goal, self.forward, self.padded) - self.slope
        changed_rows = self.rows
        if float(change.norm()) > 1e-9 * float(self.slope.norm()):
            lp = self.forward.statistics().lp
            changed_rows = self.rows + self.forward.by_row((change * lp).sum())
        want = clip_norm(self.rows.sum(0), self.goal.clip)
        found = clip_norm(changed_rows.sum(0), goal.clip)
        return bool((found - want).norm() <= self.bound * want.norm())


def not_reached(
    goal: Goal, forward: Forward, padded: Padded, bound: float, rows: Tensor
) -> dict[str, str]:
    """Find the numbers that the rows do not exercise, each with the values at which the
    gradient is the same.

    Args:
        goal: the objective with its hyperparameters, beta, and the clip of the norm.
        forward: the reference's forward pass over these rows.
        bound: the relative error of a gradient that the check allows.
        rows: [B, P], the gradient of the goal by row.

    Returns:
        `name = value` -> the values, in words. A bound that is noticed on one side
        alone is not exercised: a loop with a wider one agrees.
    """
    reference = Reference.of(goal, forward, padded, bound, rows)
    out = {}
    for name, value, changed in _numbers_of_goal(goal):
        same = []
        number_of_tries = 0
        for values, nearer_values in _other_values(value):
            goals = _possible_goals(changed, values, padded) or _possible_goals(
                changed, nearer_values, padded
            )
            number_of_tries += len(goals)
            number_agreeing = len([*takewhile(reference.agrees, goals.values())])
            same += [*goals][:number_agreeing][-1:]  # the farthest of them
        if not number_of_tries:
            out[f"{name} = {value:g}"] = "no other value can be tried on these rows"
        elif same:
            words = " and ".join(f"{v:.4g}" for v in same)
            out[f"{name} = {value:g}"] = (
                f"{words} {'agree' if len(same) > 1 else 'agrees'} too"
            )
    return out


def reach(goal: Goal, forward: Forward, padded: Padded) -> str:
    """Return in words how far the rows go in what the objective reads: its ratio, the
    change of a probability, the advantage.

    Args:
        goal: the objective with its terms.
        forward: the rows' forward pass.
        padded: the rows, padded.

    Returns:
        Words.
    """
    lp = forward.statistics().lp.detach()
    live = padded.mask.any(1)
    log_r = torch.zeros_like(lp) if padded.old is None else lp - padded.old
    ratios = (
        REDUCE[goal.objective.level](log_r, padded.mask)[live]
        if goal.objective.level in REDUCE
        else log_r[padded.mask]
    ).exp()
    low, high = (float(v) for v in (ratios.min(), ratios.max()))
    # ratios of responses may be 1e-5 from 1
    digits = 3 if f"{low:.3g}" != f"{high:.3g}" else 6
    parts = [
        f"{goal.objective.ratio_symbol} from {low:.{digits}g} to {high:.{digits}g}"
    ]
    if goal.objective.reads_mu:
        difference = (lp.exp() - (lp - log_r).exp())[padded.mask]
        parts.append(f"|p - mu| up to {float(difference.abs().max()):.2g}")
    parts.append(
        f"|A| up to {float(padded.adv.expand_as(padded.mask)[padded.mask].abs().max()):.3g}"
    )
    return ", ".join(parts)


def _numbers_of_goal(
    goal: Goal,
) -> Iterator[tuple[str, float, Callable[[float], Goal]]]:
    """Yield (name, value, function that returns the goal with another value) for each
    number of the goal; a value that is None or infinite is left out.
    """
    for name, value in goal.hp.items():
        if value is not None and abs(value) < float("inf"):

            def changed(other: float, name: str = name) -> Goal:
                """Return the goal with another value of this hyperparameter."""
                resolved = goal.objective.resolve(goal.hp | {name: other})
                return replace(
                    goal, hp={k: v for k, v in resolved.items() if k != "beta"}
                )

            yield name, float(value), changed
    if "beta" in goal.objective.hyperparameters or goal.beta:
        yield "beta", float(goal.beta), lambda other: replace(goal, beta=other)
    if goal.clip is not None:
        yield "clip", float(goal.clip), lambda other: replace(goal, clip=other)


def _other_values(value: float) -> list[tuple[list[float], list[float]]]:
    """Return two pairs, of smaller values and of larger ones. Each is (values from the
    nearest to the farthest, values to try where the number can have none of those).
    """
    if value == 0:
        return [FOR_ZERO]  # one pair

    def times(factors: Sequence[float]) -> list[float]:
        """Return the value multiplied by each factor."""
        return [value * k for k in factors]

    return [(times(FACTORS_BELOW), times(NEARER_FACTORS)), (times(FACTORS_ABOVE), [])]


def _possible_goals(
    changed: Callable[[float], Goal], values: Sequence[float], padded: Padded
) -> dict[float, Goal]:
    """Return value -> goal with that value, for each value that the number can have and
    that these rows allow: a KL term needs their reference log-probabilities.
    """
    goals = {}
    for value in values:
        with suppress(InputError):
            goal = changed(value)
            if not goal.beta or padded.ref is not None:
                goals[value] = goal
    return goals


def _loss_gradient(goal: Goal, forward: Forward, padded: Padded) -> Tensor:
    """Return the derivative of the loss by the log-probabilities, [B, T], without
    entropy bonus, z-loss and value loss.
    """
    statistics = forward.statistics()
    lp = statistics.lp.detach().requires_grad_()
    # the value loss reads no log-probability
    policy = replace(goal, value=None)
    loss = policy.loss(policy.parts(statistics._replace(lp=lp), padded))
    (gradient,) = torch.autograd.grad(
        loss, lp, allow_unused=True, materialize_grads=True
    )
    return gradient
