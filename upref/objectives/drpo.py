# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import exp


@objective(
    paper="yao2026rethinking",
    eq="Sec. 3; its gradient Eq. 9, its weight Table 1",
    level="token",
    agg="token-mean",
    adv="group_norm",
    known_from="the authors' code, which cites section, equation and table",
    defaults={
        "eps": '12.5: the authors\' code, citing Sec. 4: "we set the regularization threshold to 12.5"'
    },
    note="CFPO's penalty with ε/π_old in place of ε: DPPO's trust region |π_θ - π_old| <= ε, made smooth. No token "
    "reaches 12.5: the weight A r (1 ∓ |π_θ - π_old|/ε) is between 0.92 and 1.08 A r there. Another method of this "
    "name, Decoupled Reward Policy Optimization (arXiv 2510.04474), rewards short responses.",
)
def drpo(lp, lp_old, A, *, eps=12.5):
    """J = E 1/Σ_i|o_i| Σ_i Σ_t { r A - |A| π_old(o_t)/(2ε) (r-1)² }"""
    r = exp(lp - lp_old)
    return r * A - abs(A) / (2 * eps) * (exp(lp) - exp(lp_old)) * (r - 1)


@drpo.with_weight
def drpo_weight(r, A, mu, *, eps):
    return r * (A - abs(A) / eps * mu * (r - 1))
