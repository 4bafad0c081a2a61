# SPDX-License-Identifier: Apache-2.0
"""The shapes in which a user-supplied loss takes its advantages and mask, found by
calling it on a small batch.
"""

from dataclasses import replace
from typing import NoReturn

import torch

from upref.aggregation import Totals
from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.user_code.arrays import watched
from upref.user_code.guard import without_call
from upref.user_code.loss import (
    ALSO_LIVE,
    FIRST,
    PER_RESPONSE,
    SCALAR,
    SHAPES,
    UNREDUCED,
    Loss,
)

# what a loss returns -> how it was read
RESULTS = {
    SCALAR: "",
    PER_RESPONSE: "result -> one number for each response, whose mean upref takes",
    UNREDUCED: "result -> unreduced, aggregated by upref",
}
# whether the loss that it returns has a gradient too -> what is compared
BACKWARD = {
    False: "what its own .backward() leaves",
    True: "what its own .backward() leaves, plus that of the loss that it returns",
}


def infer_shapes(loss: Loss) -> Loss:
    """Find the plainest shapes of advantages and mask at which the loss runs and keeps
    responses separate; if it keeps them separate at none, those at which it couples them
    least.

    Args:
        loss: whose arguments are known. A framework's keeps its shape of advantages.

    Returns:
        The Loss with its shapes.

    Raises:
        InputError: it runs at none.
    """
    # sentence -> the shape at which it was raised first, in words, and the error
    errors: dict[str, tuple[str, InputError]] = {}
    # (leak, its place in this list, loss): of two with one leak, the first is the least
    leaky_losses: list[tuple[float, int, Loss]] = []
    shapes = [loss.adv_shape] if loss.framework else list(SHAPES)
    for shape in shapes:
        for as_float in (False, True):
            try:
                candidate, leak = _run_on_probe(
                    replace(loss, adv_shape=shape, float_mask=as_float)
                )
            except InputError as e:
                errors.setdefault(without_call(e), (SHAPES[shape], e))
                continue
            if leak <= 1e-6:  # rounding alone leaves as much
                if shape == "BT" and _reads_first_column(candidate):
                    return _with_one_per_response(candidate)
                return candidate
            leaky_losses.append((leak, len(leaky_losses), candidate))
            break
    if not leaky_losses:
        _raise_error_of_shapes(errors)
    return min(leaky_losses)[2]


def _raise_error_of_shapes(errors: dict[str, tuple[str, InputError]]) -> NoReturn:
    """Raise one InputError for a loss that runs at no shape.

    Args:
        errors: sentence -> the shape of advantages, in words, at which the loss raised it
            first, and the error itself.
    """
    for _, error in errors.values():
        # The loss ran, and its answer is wrong: that error counts, and not those of the
        # other shapes.
        if error.__cause__ is None:
            raise error
    _, first = next(iter(errors.values()))
    if len(errors) == 1:
        raise InputError(str(first)) from first.__cause__
    sentences = [
        f"{sentence.rstrip('.')} (advantages {shape})"
        for sentence, (shape, _) in errors.items()
    ]
    raise InputError("; ".join(sentences)) from first.__cause__


def _run_on_probe(loss: Loss) -> tuple[Loss, float]:
    """Run the loss on the probe. Return it with its form, and how far the advantage of
    one response moves the gradients of others, relative to the largest gradient; 0 where
    all gradients are 0.
    """
    batch = loss.visible_batch(probe())
    with watched() as called:
        outcome, gradient = loss.outcome(batch)
    if not outcome.attached:
        raise InputError(
            f"the result of {loss.name} has no gradient: it is computed under no_grad, detached, or a new tensor."
        )
    if not outcome.value.isfinite():
        raise InputError(
            f"{loss.name} is {outcome.value.item()} on a good batch (π_θ = π_old, finite log-probabilities)."
        )
    read_as = _join(loss.read_as, RESULTS[outcome.form])
    if outcome.calls_backward:
        read_as = _join(
            read_as, f"gradient -> {BACKWARD[outcome.own_gradient is not None]}"
        )
    if outcome.wrapped == ALSO_LIVE:
        read_as = _join(read_as, f"result -> {ALSO_LIVE}")
    loss = replace(
        loss,
        arrays=called[-1] if called else None,
        form=outcome.form,
        wrapped=outcome.wrapped,
        calls_backward=outcome.calls_backward,
        returns_live=outcome.own_gradient is not None,
        read_as=read_as,
    )
    # another advantage for the first response alone: the gradients of the others stay,
    # if the loss keeps responses separate
    A = batch.adv.clone()
    A[0] *= 1.5
    change = loss.gradient(replace(batch, adv=A)) - gradient
    change_of_others = change[1:][batch.mask[1:]].abs().max().item()
    largest = gradient[batch.mask].abs().max().item()
    return loss, change_of_others / largest if largest else 0.0


def _reads_first_column(loss: Loss) -> bool:
    """Return whether the advantages act through their first column alone."""
    batch = loss.visible_batch(probe())
    column = torch.arange(batch.mask.shape[1])
    others = torch.where(column > 0, batch.adv * (2 + column.sin()), batch.adv)
    try:
        with_own, with_others, opposite = (
            loss.gradient(replace(batch, adv=A)) for A in (batch.adv, others, -others)
        )
    except InputError:
        return False
    return torch.equal(with_own, with_others) and not torch.equal(with_others, opposite)


def _with_one_per_response(loss: Loss) -> Loss:
    """Return the loss as one that takes one advantage per response."""
    note = "advantages -> one per response, of which it reads the first column"
    return replace(loss, adv_shape=FIRST, read_as=_join(loss.read_as, note))


def _join(read_as: str, more: str) -> str:
    """Join two texts by a semicolon; either may be empty."""
    return "; ".join(filter(None, (read_as, more)))


def probe() -> Rollouts:
    """Make the batch on which shapes are tried: on policy, ragged, and with more
    responses than tokens, so that no shape passes for another.

    Returns:
        Eight responses of one to five tokens, in two groups, in float64.
    """
    mask = torch.arange(5) < torch.tensor([1, 3, 2, 5, 2, 3, 4, 1])[:, None]
    lp = (
        -0.6
        - 0.3
        * torch.arange(mask.numel(), dtype=torch.float64).reshape(mask.shape).sin()
    )
    A = torch.tensor(
        [1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 1.5, -0.75], dtype=torch.float64
    )[:, None]
    group = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    A = A.expand(mask.shape).clone()
    H = torch.ones_like(lp)
    totals = Totals.of(mask, group)
    return Rollouts(lp, lp.clone(), A, mask, group, lp - 0.1, H, totals)
