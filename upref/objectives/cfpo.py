# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import exp


@objective(
    paper="cagatan2026clipping",
    eq="7",
    level="token",
    agg="seq-mean-token-mean",
    adv="group_norm",
    kl="k3",
    known_from="two public texts that print Eq. 7; the authors' repository README",
    defaults={
        "eps": "0.2: the ε of the clip that it replaces; the README: no additional hyperparameters",
        "beta": "0: the paper's Eq. 8 subtracts β KL and no value was read",
    },
    note="The formula of SPO (xie2024simple). No clip, and the Cap of one: the weight is 0 at r = 1+ε (A > 0) and 1-ε "
    "(A < 0), and beyond it the token is pulled back.",
)
def cfpo(lp, lp_old, A, *, eps=0.2):
    """J = E 1/G Σ_i 1/|o_i| Σ_t { r A_i - |A_i|/(2ε) (r-1)² }"""
    r = exp(lp - lp_old)
    return r * A - abs(A) / (2 * eps) * (r - 1) * (r - 1)


@cfpo.with_weight
def cfpo_weight(r, A, *, eps):
    return r * (A - abs(A) / eps * (r - 1))
