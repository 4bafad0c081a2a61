# SPDX-License-Identifier: Apache-2.0
"""Known faults of objectives in which the term of a token depends on other tokens: which
ones KL-Cov penalizes, and which ones FIPO's factor sums over.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from upref.objectives.cov import covariance, cut, largest
from upref.objectives.fipo import discounted_future, log_of
from upref.ops import clip, dual_clip, exp, minimum, sg, when, where
from upref.registry import Objective
from upref.rollouts import Rollouts
from upref.verify.faults import Catalogue
from upref.verify.faults.losses import LossFault, fault

# ---- KL-Cov: by what its tokens are selected -----------------------------------------
# the id, the words for the tokens that are penalized, and the score from the covariance
# (A - mean A)(log π_θ - mean) of each token: those of the largest score are penalized
SELECTIONS: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
    (
        "smallest-covariances-penalized",
        "the tokens of the smallest covariance (A - mean)(log π_θ - mean) are penalized, "
        "not those of the largest",
        lambda covariances: -covariances,
    ),
    (
        "covariances-penalized-by-size",
        "the tokens of the largest absolute covariance |(A - mean)(log π_θ - mean)| are "
        "penalized: negative ones count as positive ones",
        torch.abs,
    ),
    (
        "covariances-near-zero-penalized",
        "the tokens whose covariance (A - mean)(log π_θ - mean) is nearest to 0 are "
        "penalized, not those of the largest",
        lambda covariances: -covariances.abs(),
    ),
    (
        "every-token-penalized",
        "every token is penalized, not only those of the largest covariance",
        torch.zeros_like,
    ),
)
SAME_SCORE = 1e-9  # relative: rounding decides which of two such tokens is selected


def _kl_cov_faults(hp: dict[str, Any]) -> Iterator[LossFault]:
    """Yield the faults that other tokens are penalized, one for each of SELECTIONS.

    Args:
        hp: the hyperparameters of kl_cov.
    """
    share = hp["share"]

    def penalized_by(
        lp: Tensor, old: Tensor, A: Tensor, m: Tensor, score: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return KL-Cov's term with the penalty on the tokens of the largest score."""
        penalized = largest(score(covariance(lp, A, m)), m, share)
        return exp(lp - old) * A - when(penalized, hp["coef"] * abs(lp - old))

    def tied(batch: Rollouts, score: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the tokens that tie for the last place, [B, T]: code that takes a fixed
        number of tokens takes some of them.
        """
        scores = score(covariance(batch.logp, batch.adv, batch.mask))
        scores = scores.masked_fill(~batch.mask, -torch.inf)
        last = cut(scores, share, batch.mask, descending=True)
        is_tied = (scores - last).abs() <= SAME_SCORE * last.abs().clamp(min=1)
        if score is torch.zeros_like or is_tied.sum() < 2:
            # every token is penalized, or only the last one has its score
            return torch.zeros_like(is_tied)
        return is_tied

    for fault_id, words, score in SELECTIONS:
        yield fault(
            words,
            "term",
            id=fault_id,
            J=partial(penalized_by, score=score),
            skip=partial(tied, score=score),
            whole=True,
        )


# ---- FIPO: over which tokens its factor sums -----------------------------------------
def _from_behind(x: Tensor, half_life: float) -> Tensor:
    """Return the discounted sums over the tokens up to each one, [B, T]."""
    return discounted_future(x.flip(-1), half_life).flip(-1)


# the id, the words, and the sums from the log-ratios and the half-life
WINDOWS: tuple[tuple[str, str, Callable[[Tensor, float], Tensor]], ...] = (
    (
        "window-over-past",
        "the factor f of a token sums the log-ratios of what precedes it, not of what follows it",
        _from_behind,
    ),
    (
        "window-over-past-without-token",
        "the factor f of a token sums the log-ratios of what precedes it, without its own, "
        "not of what follows it",
        lambda x, half_life: _from_behind(x, half_life) - x,
    ),
    (
        "window-without-token",
        "the factor f of a token sums the log-ratios behind it, without its own",
        lambda x, half_life: discounted_future(x, half_life) - x,
    ),
    (
        "window-of-token-alone",
        "the factor f of a token is of its own log-ratio alone, not of what follows it too",
        lambda x, half_life: x,
    ),
    (
        "window-over-response",
        "the factor f of a token sums the log-ratios of the whole response, not of what "
        "follows it",
        lambda x, half_life: x.sum(-1, keepdim=True).expand_as(x),
    ),
)


def _fipo_faults(hp: dict[str, Any]) -> Iterator[LossFault]:
    """Yield the faults that the factor sums over other tokens, one for each of WINDOWS.

    Args:
        hp: the hyperparameters of fipo.
    """
    c = hp["c"]

    def factor_of(
        lp: Tensor,
        old: Tensor,
        A: Tensor,
        m: Tensor,
        sums: Callable[[Tensor, float], Tensor],
    ) -> Tensor:
        """Return FIPO's term with a factor of these sums."""
        log_r = sg(lp - old)
        counted = where(m & (log_r <= log_of(c)), log_r, 0)
        f = clip(
            exp(sums(counted, hp["half_life"])),
            1 - hp["eps_f_low"],
            1 + hp["eps_f_high"],
        )
        r = dual_clip(exp(lp - old), A, c)
        clipped = clip(r, 1 - hp["eps_low"], 1 + hp["eps_high"])
        return minimum(r * A * f, clipped * A * f)

    for fault_id, words, sums in WINDOWS:
        yield fault(words, "term", id=fault_id, J=partial(factor_of, sums=sums))


FAULTS_OF: dict[str, Callable[[dict[str, Any]], Iterator[LossFault]]] = {
    "kl_cov": _kl_cov_faults,
    "fipo": _fipo_faults,
}


def faults_of_other_tokens(
    objective: Objective, hp: dict[str, Any], bounds: list[float]
) -> Iterator[LossFault]:
    """Yield the faults of this file that the objective can have. They are the first that
    are tried: they are few, and no general one describes them.

    Args:
        objective: the objective.
        hp: its hyperparameters.
        bounds: the ratios at which the wrong loss was seen to change; not used.
    """
    if objective.name in FAULTS_OF:
        for own_fault in FAULTS_OF[objective.name](hp):
            yield replace(own_fault, rank=0)


CATALOGUE = Catalogue("losses", faults_of_other_tokens)
