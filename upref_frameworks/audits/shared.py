# SPDX-License-Identifier: Apache-2.0
"""What several frameworks do alike, as faults: the ledger of each says it of its own
code.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from upref.aggregation import aggregate
from upref.kl import k1
from upref.ops import exp, minimum, sg
from upref.registry import Objective, get
from upref.rollouts import Rollouts, per_response
from upref.verify.faults import Fault
from upref.verify.faults.losses import LossFault, aggregated, fault
from upref_frameworks.audits.case import MICRO


def _clamp_log_ratio(batch: Rollouts) -> Rollouts:
    """Return the batch with log r clamped to [-20, 20]."""
    return batch.but(logp=batch.logp_old + (batch.logp - batch.logp_old).clamp(-20, 20))


def _clamp_log_sequence_ratio(most: float) -> Callable[[Rollouts], Rollouts]:
    """Return a view of a batch in which the mean log r of each response is at most
    `most`.
    """

    def view(batch: Rollouts) -> Rollouts:
        """Return the batch in which a response above the clamp has log r = `most` on
        each token, and so no gradient.
        """
        log_s = torch.where(batch.mask, batch.logp - batch.logp_old, 0).sum(
            1, keepdim=True
        ) / batch.mask.sum(1, keepdim=True)
        return batch.but(
            logp=torch.where(log_s > most, batch.logp_old + most, batch.logp)
        )

    return view


def _clamp_k3(batch: Rollouts) -> Rollouts:
    """Return the batch with the policy as its reference where k3 is clamped at 10: the
    gradient of k3 is 0 there.
    """
    assert batch.logp_ref is not None
    d = batch.logp_ref - batch.logp
    return batch.but(
        logp_ref=torch.where(d.exp() - d - 1 > 10, batch.logp.detach(), batch.logp_ref),
    )


def _masked_slots_term(batch: Rollouts) -> Tensor:
    """Return what LUSPO's masked slots add to J; its other faults then scale it."""
    r = exp(batch.logp - batch.logp_old)
    A = per_response(batch.adv, batch.mask)[:, None]
    return torch.where(
        batch.mask, 0, minimum(r * A, r.clamp(0.8, 1.2) * A)
    ).sum() / len(batch.mask)


def _micro_batch_mean_scale(batch: Rollouts) -> Tensor:
    """Return the factor of each response [B, 1] by which a mean over micro-batches of
    their token means differs from the token mean: all tokens over MICRO times the
    tokens of the response's micro-batch.
    """
    scales = [batch.mask.sum() / (MICRO * m.mask.sum()) for m in batch.split(MICRO)]
    return torch.cat(
        [
            scale.expand(len(m.mask), 1)
            for scale, m in zip(scales, batch.split(MICRO), strict=True)
        ]
    ).to(batch.logp)


BETA = 0.04
NO_KL = {"beta": 0.0}


def kl_term(
    words: str,
    k: Callable[[Tensor, Tensor, Tensor], Tensor],
    beta: float = BETA,
    agg: str = "seq-mean-token-mean",
    instead: bool = True,
) -> LossFault:
    """Make the fault of a KL term -beta k(log π_θ, log π_ref, log π_old) in the loss.

    Args:
        words: what the framework does, as the ledger says it.
        k: (log π_θ, log π_ref, log π_old) -> the estimate on each token, [B, T].
        beta: the coefficient.
        agg: how the estimates become one number.
        instead: whether it replaces the objective's own KL term; else it is added.

    Returns:
        The fault.
    """

    def term(batch: Rollouts) -> Tensor:
        """Return the KL term of a batch, a scalar that is added to J."""
        assert batch.logp_ref is not None
        return -beta * aggregate(
            k(batch.logp, batch.logp_ref, batch.logp_old), batch.mask, agg
        )

    return fault(words, "term", hp=NO_KL if instead else {}, term=term)


K1 = kl_term(
    "the KL term is k1, whose gradient has mean 0 on policy",
    lambda lp, ref, old: k1(lp, ref),
)
CLAMP = fault("log r clamped to ±20", "clip", view=_clamp_log_ratio)
CLAMP_S = fault("log s clamped to 10", "clip", view=_clamp_log_sequence_ratio(10))
CLAMP_S20 = fault("log s clamped to ±20", "clip", view=_clamp_log_sequence_ratio(20))
CLAMP_K3 = fault("k3 clamped to 10", "term", view=_clamp_k3)
MICRO_MEAN = fault(
    "the token mean of each micro-batch, then their mean",
    "batches",
    scale=_micro_batch_mean_scale,
)
BNPO = replace(MICRO_MEAN, words=f"{MICRO_MEAN.words}: bnpo by definition")
ALWAYS = replace(
    aggregated("token-mean"),
    words="aggregated by token-mean, and no setting gives another",
)
LUSPO = fault(
    "the ratio of each token (importance_sampling_level), eps = 0.2",
    "objective",
    objective=replace(get("grpo"), agg="seq-mean-token-sum"),
)
SLOTS = fault("masked slots have a gradient", "term", term=_masked_slots_term)
WIDTH = fault(
    "divided by the padded width",
    "aggregation",
    scale=lambda batch: batch.mask.sum(1, keepdim=True) / batch.mask.shape[1],
)
LENGTH = fault(
    "divided by max_completion_length = 512", "aggregation", scale=lambda batch: 1 / 512
)
F32 = fault(
    "1.05 held in float32", "rounding", hp={"tau_neg": torch.tensor(1.05).item()}
)
BY_TOKENS = fault(
    "every token weighs alike, as in the authors' code of VESPO",
    "aggregation",
    agg="token-mean",
)


# the settings of VESPO's authors
VESPO = {
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}
ALONE = "one response in a group: its advantage is its reward"
SAMPLE = "the variance is the sample's (N - 1), 1e-8 is added to it and not to std"
NARROW = "log-ratio clamped to ±20, the estimate to ±10"


def keep_singletons(
    estimator: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor], Tensor]:
    """Change an estimator: a response that is alone in its group gets its reward.

    Args:
        estimator: (rewards [N], group [N]) -> advantages [N].

    Returns:
        A function of the same arguments.
    """
    return lambda rewards, group: torch.where(
        torch.bincount(group)[group] == 1, rewards, estimator(rewards, group)
    )


def whiten_by_sample(R: Tensor, g: Tensor | None = None) -> Tensor:
    """Whiten by the sample's variance (N - 1), with 1e-8 added to it under the root.

    Args:
        R: [N], rewards or advantages.
        g: not read: whitening is over all responses.

    Returns:
        [N].
    """
    return (R - R.mean()) * torch.rsqrt(R.var(correction=1) + 1e-8)


def _narrow_k3(lp: Tensor, ref: Tensor) -> Tensor:
    """Return k3 of a log-ratio clamped to [-20, 20], clamped to [-10, 10]."""
    d = (ref - lp).clamp(-20, 20)
    return (d.exp() - d - 1).clamp(-10, 10)


NARROW_K3 = Fault(NARROW, _narrow_k3)


def clamp_kl(
    estimator: Callable[[Tensor, Tensor], Tensor],
) -> Fault[Callable[[Tensor, Tensor], Tensor]]:
    """Make the fault of a KL estimator whose value is clamped to ±10.

    Args:
        estimator: (log π_θ, log π_ref) -> the estimate on each token.

    Returns:
        The fault, whose change is the clamped estimator.
    """
    return Fault("clamped to ±10", lambda lp, ref: estimator(lp, ref).clamp(-10, 10))


def cap_cispo(cap: float) -> Objective:
    """Make CISPO with weights of at most `cap`, where the paper has 1 + ε_high.

    Args:
        cap: the largest weight.

    Returns:
        An objective that is not registered.
    """
    return replace(
        get("cispo"),
        name=f"cispo, weights at most {cap:g}",
        fn=lambda lp, lp_old, A: sg(minimum(exp(lp - lp_old), cap)) * A * lp,
        closed_form=lambda r, A: A * minimum(r, cap),
    )


FLOOR = fault(
    "weights in [0.8, 1.2], from both sides", "objective", objective="cispo_verl"
)
CAP = fault(
    "epsilon_high is the cap itself: every weight is at most 0.2",
    "objective",
    objective=cap_cispo(0.2),
)
