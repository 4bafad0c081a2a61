# SPDX-License-Identifier: Apache-2.0
"""The expectation of an objective over everything that π_old can say, without a sample.

    E_{q, o_1..o_G ~ π_old} J(o_1..o_G),   J the registry's own, by its weights per row

A mini-batch of infinitely many prompts, each answered by a group of G. Two exact ways
to write that down:

* by counts: rewards are 0 or 1, so that the advantage of o knows of its peers only how
  many are right: a row is (o, K), of probability π_old(o) Binomial(K; G-1, share of
  right);
* G = None: a group of infinitely many, whose mean and deviation are those of π_old.

What asks for a list of every group (graded rewards, lengths that differ under a
denominator per group, objectives that couple a batch) is refused where G is finite; the
program at commit 3fd30ed9 lists them.

Normalizations over a batch (`whiten`, `group_mean_whiten`) use the moments of the
infinite batch.
"""

from dataclasses import dataclass
from math import comb
from typing import Any

import torch
from torch import Tensor

from repro.exact.task import F64, Task, per_prompt
from upref import advantages
from upref.aggregation import Totals
from upref.errors import InputError
from upref.registry import Objective

# the defaults of upref.advantages; a test looks
EPS = {"group_norm": 1e-6, "whiten": 1e-8, "group_mean_whiten": 1e-8}


@dataclass(frozen=True)
class Rows:
    """What is in the batch: row b is response[b] of policy[b], of advantage A[b], and
    counts weight[b] times.

    Attributes:
        policy: index, 0 to S - 1.
        response: index, 0 to N - 1.
        A: advantage.
        weight: a probability; the rows of one policy add up to 1.
        group: of given groups only (flow.drawn), which group a row is of.
        groups: how many of these there are.
    """

    policy: Tensor
    response: Tensor
    A: Tensor
    weight: Tensor
    group: Tensor | None = None
    groups: int = 0


def rows(
    task: Task,
    lp_old: Tensor,
    objective: Objective,
    G: int | None,
    adv: str | None = None,
) -> Rows:
    """Return the rows of the expectation under π_old.

    Args:
        task: all responses.
        lp_old: log π_old of their tokens, [S, N, T].
        objective: decides the advantage, unless it is given.
        G: responses to a prompt; None: infinitely many.
        adv: an advantage estimator.

    Raises:
        InputError: the estimator does not fit G, or every group would have to be
            listed.
    """
    adv = adv or objective.adv
    if objective.batch_coupled:
        raise InputError(
            f"{objective.name} couples the batch ({objective.batch_coupled}): it has no exact expectation here."
        )
    pi = task.responses(lp_old)
    if G is None:
        return _infinite(task, pi, adv)
    if G < 2 and adv not in ("signed", "reward", "whiten"):
        raise InputError(f"{adv} needs groups of at least two, got G = {G}.")
    if not task.binary:
        raise InputError("groups of G need rewards of 0 and 1: choose G=None.")
    if objective.agg == "group-token-mean" and not task.one_length:
        raise InputError(
            f"{objective.name} has a denominator per group: give the responses one length."
        )
    return _counts(task, pi, adv, G)


def J(
    task: Task,
    objective: Objective,
    lp: Tensor,
    lp_old: Tensor,
    rows: Rows,
    table: Tensor,
    **hp,
) -> Tensor:
    """Return the sum over the policies of the expected J, a scalar.

    Args:
        task: all responses.
        objective: whose J.
        lp: log π_θ, [S, N, T]; carries the gradient.
        lp_old: log π_old, [S, N, T].
        rows: of the expectation.
        table: log π of every token in every context, [S, C, V], for objectives that
            read the entropy.
        **hp: hyperparameters; beta must be 0.

    Raises:
        InputError: beta is not 0.
    """
    if hp.get("beta"):
        raise InputError("the exact expectation has no KL term: leave beta at 0.")
    b = (rows.policy, rows.response)  # picks what the rows are of out of [S, N, ...]
    entropy = None
    if "entropy" in objective.reads:
        H = -(table.exp() * table).sum(-1)
        entropy = H[:, task.contexts][b]
    batch = (lp[b], lp_old[b], rows.A[:, None], task.mask[rows.response])
    if objective.batch_coupled:
        return torch.stack(
            [_one_group(objective, batch, rows, g, hp) for g in range(rows.groups)]
        ).sum()
    # `objective.J` divides by the number of rows
    weights = (rows.weight * len(rows.weight))[:, None].expand_as(batch[3])
    totals = _totals(batch[3], rows)
    return objective.J(
        *batch,
        group=rows.group,
        entropy=entropy,
        totals=totals,
        is_weights=weights,
        **hp,
    )


def _totals(mask: Tensor, rows: Rows) -> Totals:
    """Return counts by which every aggregation becomes Σ weight · (what it makes of
    that row in a batch of infinitely many).
    """
    B, lengths, S = len(mask), mask.sum(1).to(F64), int(rows.policy.max()) + 1
    zeros = torch.zeros(S, dtype=F64)
    length = zeros.index_add(0, rows.policy, rows.weight * lengths)
    total = zeros.index_add(0, rows.policy, rows.weight)
    tokens = B * (length / total)[rows.policy]  # E|o| in each of the B rows
    if rows.group is None:
        return Totals(tokens, B, 1, tokens)
    of_group = torch.zeros(rows.groups, dtype=F64).index_add(0, rows.group, lengths)
    return Totals(tokens, B, rows.groups, of_group[rows.group])


def _one_group(
    objective: Objective,
    batch: tuple[Tensor, ...],
    rows: Rows,
    g: int,
    hp: dict[str, Any],
) -> Tensor:
    """Return P(group) times J of group number g alone; 0, with a gradient of 0, where
    it is never drawn.
    """
    here = rows.group == g
    lp, lp_old, A, mask = (x[here] for x in batch)
    P = rows.weight[here].sum()
    return P * objective.J(lp, lp_old, A, mask, **hp) if P > 0 else lp.sum() * 0


# ---- advantages ----------------------------------------------------------------------
def _advantage_by_count(adv: str, G: int, P: Tensor) -> Tensor:
    """Return A of a wrong (0) and of a right (1) response in a group of G with K right
    ones, [S, 2, G + 1].

    It is computed by the registry's own function on the rewards themselves. A
    normalization over the batch is computed here, from the moments of the infinite
    batch.

    Args:
        adv: an estimator.
        G: responses to a prompt.
        P: the share of right responses to each prompt, [S, Q].
    """
    # what a normalization over the batch starts from
    own = {"whiten": "reward", "group_mean_whiten": "group_mean"}.get(adv, adv)
    A = torch.zeros(2, G + 1, dtype=F64)
    for k in range(G + 1):
        R = (torch.arange(G) < k).to(F64)
        a = advantages.get(own)(R, torch.zeros(G, dtype=torch.int64))
        # the last is wrong, the first right, unless there is none
        A[0, k], A[1, k] = a[-1], a[0]
    A = A.expand(len(P), 2, G + 1)
    if adv == own:
        return A
    if adv == "whiten":
        mean = P.mean(1)[:, None, None]
        var = mean * (1 - mean)  # of rewards 0 or 1
        return torch.where(var > 0, (A - mean) / (var.sqrt() + EPS[adv]), 0)
    share = torch.arange(G + 1, dtype=F64) / G  # of right ones in a group
    in_group = share * (1 - share)
    var = (binomial(G, P) * in_group).sum(-1).mean(1)[:, None, None]
    return torch.where(var > 0, A / (var.sqrt() + EPS[adv]), 0)


def binomial(n: int, p: Tensor) -> Tensor:
    """Return P(K = 0..n) for each probability p, in a new last dimension."""
    k = torch.arange(n + 1)
    ways = torch.tensor([float(comb(n, i)) for i in range(n + 1)], dtype=F64)
    return ways * p[..., None] ** k * (1 - p).clamp(min=0)[..., None] ** (n - k)


def _counts(task: Task, pi: Tensor, adv: str, G: int) -> Rows:
    """Return the rows of groups of G, one for each response and number of right peers.

    The advantage must depend on this number and the response's own reward alone. π is
    [S, N].
    """
    S, N = pi.shape
    P = task.right(pi).clamp(0, 1)  # share of right responses, [S, Q]
    peers = binomial(G - 1, P)[:, task.prompt]  # [S, N, G]: right ones among the others
    A = _advantage_by_count(adv, G, P)
    R = task.reward.long()
    K = torch.arange(G) + R[:, None]  # [N, G]: right ones in all
    table = A[:, R[:, None].expand(N, G), K]
    weight = pi[..., None] * peers / P.shape[1]  # prompts are equally frequent
    policy, response = torch.arange(S)[:, None, None], torch.arange(N)[:, None]

    def flat(x: Tensor) -> Tensor:
        """Return one number per policy, response and count of right peers."""
        return x.expand(S, N, G).reshape(-1)

    return Rows(
        policy=flat(policy),
        response=flat(response),
        A=flat(table),
        weight=flat(weight),
    )


def _infinite(task: Task, pi: Tensor, adv: str) -> Rows:
    """Return the rows of groups that are infinitely large, one for each response: mean
    and deviation of a group are those of the policy. π is [S, N].
    """
    S, N = pi.shape
    P = task.right(pi)  # E R of each prompt, [S, Q]
    square = per_prompt(task, pi * task.reward**2)  # E R²
    var = (square - P**2).clamp(min=0)
    centered = task.reward - P[:, task.prompt]

    def over(x: Tensor, variance: Tensor) -> Tensor:
        """Divide by a standard deviation; 0 where there is none."""
        return torch.where(variance > 0, x / (variance.sqrt() + EPS[adv]), 0)

    if adv == "group_norm":
        A = over(centered, var[:, task.prompt])
    elif adv in ("group_mean", "leave_one_out"):
        A = centered
    elif adv == "group_mean_whiten":
        A = over(centered, var.mean(1, keepdim=True).expand(S, N))
    elif adv == "whiten":
        mean = P.mean(1, keepdim=True)  # over all prompts
        of_batch = (square.mean(1, keepdim=True) - mean**2).clamp(min=0)
        A = over(task.reward - mean, of_batch.expand(S, N))
    else:
        A = advantages.get(adv)(task.reward).expand(S, N)

    def flat(x: Tensor) -> Tensor:
        """Return a number for each policy and response, in one column."""
        return x.expand(S, N).reshape(-1)

    return Rows(
        policy=flat(torch.arange(S)[:, None]),
        response=flat(torch.arange(N)),
        A=flat(A),
        weight=flat(pi / P.shape[1]),  # prompts are equally frequent
    )
