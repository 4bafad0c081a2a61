# SPDX-License-Identifier: Apache-2.0
"""Gradient ascent on the expected objective: k updates from one π_old, then a new π_old, and
so on.

    θ <- θ + lr ∇ E_old[J(θ)]

Plain ascent, so that an update is nothing but the objective's: no momentum, no clipping
of gradients. The mini-batch is infinite, so a path is the limit of many prompts, not the
mean of the paths of small batches. `drawn` makes k epochs on given groups, each alone:
lesson 6 uses it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.exact import expected
from repro.exact.expected import Rows
from repro.exact.task import F64, Task
from upref import advantages
from upref.errors import InputError
from upref.registry import Objective


@dataclass(frozen=True)
class State:
    """Before the update number `update` (0, 1, ...): S policies and the π_old of each.

    Attributes:
        theta: [S, D, V].
        lp: log π of every token of every response.
        lp_old: likewise of π_old.
        pi: probability of every response.
        gradient: of the expected J at theta, [S, D, V].
        rows: of the expectation under π_old.
    """

    update: int
    theta: Tensor
    lp: Tensor  # [S, N, T]
    lp_old: Tensor  # [S, N, T]
    pi: Tensor  # [S, N]
    gradient: Tensor
    rows: Rows


def path(
    task: Task,
    objective: Objective,
    theta: Tensor,
    *,
    lr: float | list[float] | Tensor,
    k: int | list[int] | Tensor,
    G: int | None = 8,
    adv: str | None = None,
    **hp,
) -> Iterator[State]:
    """Yield the states one after another, without end.

    Args:
        task: all responses.
        objective: whose expectation rises.
        theta: where it starts, [S, D, V].
        lr: learning rate, a number, or one per policy.
        k: updates from one π_old, a number, or one per policy; 0: π_old stays.
        G: responses to a prompt; None: infinitely many.
        adv: an advantage estimator instead of the objective's own.
        **hp: hyperparameters of the objective.

    Raises:
        InputError: lr is not a finite number above 0, k is below 0, or there is no such
            expectation.
    """
    theta, S = theta.clone(), len(theta)
    lr, k = torch.as_tensor(lr, dtype=F64).expand(S), torch.as_tensor(k).expand(S)
    if not (lr.isfinite() & (lr > 0)).all() or (k < 0).any():
        raise InputError(
            "a path needs a learning rate > 0 and k >= 0 updates from one π_old."
        )
    lp_old, update = task.log_probs(theta), 0
    rows = expected.rows(task, lp_old, objective, G, adv)
    while True:
        # the policies that get a new π_old
        new = (k > 0) & (update % k.clamp(min=1) == 0)
        lp = task.log_probs(theta)
        if update and new.any():
            lp_old = torch.where(new[:, None, None], lp, lp_old)
            rows = expected.rows(task, lp_old, objective, G, adv)
        g = gradient(task, objective, theta, lp_old, rows, **hp)
        yield State(update, theta, lp, lp_old, task.responses(lp), g, rows)
        update += 1
        theta = theta + lr[:, None, None] * g


def gradient(
    task: Task, objective: Objective, theta: Tensor, lp_old: Tensor, rows: Rows, **hp
) -> Tensor:
    """Return ∇ of the expected J by theta, [S, D, V], by autograd through the function
    that trains.
    """
    theta = theta.detach().requires_grad_()
    table = task.table(theta)
    lp = table[:, task.contexts, task.tokens]
    return torch.autograd.grad(
        expected.J(task, objective, lp, lp_old, rows, table, **hp), theta
    )[0]


def drawn(
    task: Task,
    objective: Objective,
    theta: Tensor,
    groups: Tensor,
    *,
    lr: float,
    k: int,
    watch: Callable[[Tensor], object] = lambda g: None,
    **hp,
) -> Tensor:
    """Return θ after k epochs on each group alone, by plain ascent, [M, D, V].

    Args:
        task: all responses.
        objective: whose J rises.
        theta: where each starts, [1, D, V] or [M, D, V].
        groups: [M, G], indices of responses to one prompt; one policy each.
        lr: learning rate.
        k: epochs.
        watch: called with the gradient of each epoch.
        **hp: hyperparameters of the objective.
    """
    M, G = groups.shape
    start = theta.expand(M, *theta.shape[1:])
    policy = torch.arange(M)[:, None].expand(M, G).reshape(-1)
    A = advantages.get(objective.adv)(task.reward[groups].reshape(-1), policy)
    rows = Rows(
        policy=policy,
        response=groups.reshape(-1),
        A=A,
        weight=torch.full((M * G,), 1 / G, dtype=F64),
        group=policy,
        groups=M,
    )
    lp_old, theta = task.log_probs(start), start
    for _ in range(k):
        g = gradient(task, objective, theta, lp_old, rows, **hp)
        watch(g)
        theta = theta + lr * g
    return theta
