# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import exp, inf, sg, when


def in_group(x, group, mask):
    """log softmax of x [B] over the responses to one prompt that have a token."""
    peers = (group[:, None] == group) & mask.any(-1)
    return x - x.masked_fill(~mask.any(-1), 0).expand_as(peers).masked_fill(
        ~peers, -inf
    ).logsumexp(1)


def pull(lp, lp_old, A, group, mask, eta):
    """G (q_i - p_i): how far a response's share of its group is below its target."""
    size = (group[:, None] == group).sum(1)
    q, p = exp(in_group(lp_old + A / eta, group, mask)), exp(in_group(lp, group, mask))
    return when(mask.any(-1), size * (q - p))


@objective(
    paper="kaddour2026target",
    eq="1 to 3",
    level="sequence_product",
    agg="seq-mean",
    adv="group_norm",
    defaults={"eta": '1.0: kaddour2026target Sec. 2: "we use η = 1 throughout"'},
    not_symbolic="it normalizes over the responses of a group",
    batch_coupled="the weight of a response depends on the others of its group",
    on_policy_exception="at π_θ = π_old it is G (q - p), which is A G p (1 - p)/η only for one small A",
    scale_exception="the target is exponential in A",
    note="The gradient of the cross-entropy -Σ_i q_i log p_i, as a surrogate: its value is another. A is the "
    "standardized score u; the paper divides by the population's deviation (group_norm with ddof=0). TRL's "
    "experimental tpo, Triple Preference Optimization, is another method.",
)
def tpo(lp, lp_old, A, mask, group, *, eta=1.0):
    """J = E Σ_i sg(q_i - p_i) log π_θ(o_i),  p_i = π_θ(o_i)/Σ_j π_θ(o_j),  q_i ∝ p_i^old e^(A_i/η), over a group"""
    return sg(pull(lp, lp_old, A, group, mask, eta)) * lp


@tpo.with_weight
def tpo_weight(log_r, A, log_mu, mask, group, *, eta):
    return pull(log_mu + log_r, log_mu, A, group, mask, eta)
