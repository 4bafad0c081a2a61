# SPDX-License-Identifier: Apache-2.0
"""What is compared: a function of a batch to the numbers that must be equal.

Each runs the user's code as `check` does, and the same way with formulas and without.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from upref.definition import Objective
from upref.proof.paths import Outputs
from upref.rollouts import Rollouts
from upref.user_code import Loss
from upref.user_code.guard import call_guarded
from upref.user_code.kl import Term


def gradient_of(loss: Loss) -> Outputs:
    """Return the function of a batch to dJ/dlp of a loss, and to dJ/dH where the batch has
    entropies.

    The loss is multiplied by a factor, as trainers do.

    Args:
        loss: as read.
    """

    def gradient(batch: Rollouts, scale: Tensor) -> Tensor:
        """Return dJ/dlp, [1, B, T], or with dJ/dH behind it, [2, B, T]; 0 where the
        loss does not depend on one.
        """
        visible = loss.visible_batch(batch)
        inputs = {role: _copied(x) for role, x in loss.given(visible).items()}
        leaves = [inputs["logp"].requires_grad_()]
        if batch.entropy is not None and "entropy" in inputs:
            leaves.append(inputs["entropy"].requires_grad_())
        outcome = loss.run(inputs, {}, visible, None, tuple(leaves))
        nothing = torch.zeros_like(batch.logp)
        gradients: list[Tensor | None] = [None] * len(leaves)
        if outcome.attached:

            def backward() -> tuple[Tensor | None, ...]:
                """Return the gradients of the loss, times the factor, by its inputs."""
                return torch.autograd.grad(
                    outcome.value * scale, leaves, allow_unused=True
                )

            answer, _ = call_guarded(f"the backward pass of {loss.name}", backward)
            gradients = list(answer)
        out = [nothing if x is None else -x for x in gradients]
        if batch.entropy is not None and len(out) == 1:
            out.append(nothing)
        return torch.stack(out)

    return gradient


def closed_form_of(objective: Objective, hp: Mapping[str, Any]) -> Outputs:
    """Return the function of a batch to dJ/dlp by the hand-written weight.

    Args:
        objective: the objective.
        hp: its hyperparameters.
    """

    def gradient(batch: Rollouts, scale: Tensor) -> Tensor:
        """Return dJ/dlp, [1, B, T]; beside entropies [2, B, T], with 0 for them."""
        weights = objective.gradient(batch, **hp).detach() * scale
        if batch.entropy is None:
            return weights[None]
        return torch.stack([weights, torch.zeros_like(weights)])

    return gradient


def term_of(term: Term) -> Outputs:
    """Return the function of a batch to a KL estimator's values and gradients.

    The advantages stand for the gradient that comes from above.

    Args:
        term: as read.
    """

    def values_and_gradients(batch: Rollouts, scale: Tensor) -> Tensor:
        """Return the values and their gradients by log π_θ, [2, B, T]."""
        assert batch.logp_ref is not None
        lp = batch.logp.clone().requires_grad_()
        k = term.outcome(lp, batch.logp_ref).k
        left: Tensor | None = None
        if k.requires_grad:

            def backward() -> Tensor | None:
                """Return the gradient of Σ k A by the log-probabilities; None where
                there is none.
                """
                total = (k * batch.adv).sum()
                return torch.autograd.grad(total, lp, allow_unused=True)[0]

            left, _ = call_guarded(f"the backward pass of {term.name}", backward)
        return torch.stack([k.detach(), torch.zeros_like(k) if left is None else left])

    return values_and_gradients


def advantages_of(estimator: Callable[[Tensor, list[int]], Tensor]) -> Outputs:
    """Return the function of a batch of rewards to advantages.

    Args:
        estimator: rewards [N] and the prompt of each response to advantages.
    """

    def advantages(batch: Rollouts, scale: Tensor) -> Tensor:
        """Return the advantages of a batch of rewards, in the estimator's shape."""
        assert batch.group is not None
        return estimator(batch.adv[:, 0].clone(), batch.group.tolist())

    return advantages


def _copied(x: Any) -> Any:
    """Return a tensor with the same numbers in memory of its own; anything else as it
    is.
    """
    return x.clone() if isinstance(x, Tensor) else x


__all__ = ["advantages_of", "closed_form_of", "gradient_of", "term_of"]
