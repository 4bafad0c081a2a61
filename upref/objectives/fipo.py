# SPDX-License-Identifier: Apache-2.0
from upref.definition import objective
from upref.ops import clip, dual_clip, exp, inf, log, minimum, sg, when, where


def discounted_future(x, half_life):
    """Σ_{k>=t} γ^(k-t) x_k for each t, with γ = 2^(-1/half_life): [B, T] -> [B, T]."""
    sums = x.double().clone()  # float64, which autocast does not lower
    for t in range(x.shape[-1] - 2, -1, -1):  # no matrix [T, T]: responses are long
        sums[..., t] += sums[..., t + 1] / 2 ** (1 / half_life)
    return sums.to(x.dtype)


def influence(log_r, mask, half_life, low, high, c):
    """f_t = clip(exp(Σ_{k>=t} γ^(k-t) M_k log r_k), low, high), M_k = 0 on masked tokens and where r_k > c."""
    counts = mask & (log_r <= log_of(c))
    future_kl = discounted_future(where(counts, log_r, 0), half_life)
    return clip(exp(future_kl), low, high)


def log_of(c):
    """log c, infinite where there is no dual clip."""
    return inf if c is None else float(log(c))


@objective(
    paper="ma2026fipo",
    eq="the loss of the authors' README; their loss_mode future_kl",
    known_from="the authors' README, core_algos.py and run_fipo_qwen2.5_32b.sh (ee25452), and ms-swift 4.6.0, "
    "loss_type fipo",
    level="custom",
    agg="token-mean",
    adv="group_norm",
    defaults={
        "eps_low": "0.2: the authors' run_fipo_qwen2.5_32b.sh, clip_ratio_low",
        "eps_high": "0.28: the authors' run_fipo_qwen2.5_32b.sh, clip_ratio_high",
        "half_life": "32.0: the authors' run_fipo_qwen2.5_32b.sh, decay_rate",
        "eps_f_low": "0.0: the authors' run_fipo_qwen2.5_32b.sh, future_kl_clip_high_only=True",
        "eps_f_high": "0.2: the authors' run_fipo_qwen2.5_32b.sh, future_kl_clip_ratio",
        "c": "10.0: the authors' run_fipo_qwen2.5_32b.sh, clip_ratio_c: of the dual clip, and of M",
    },
    not_symbolic="the factor of a token is a sum over those that follow",
    note="DAPO's clip with A f. γ^half_life = 1/2. The authors' code also caps f at 1 where A < 0 and r > 10, where "
    "the dual clip leaves no gradient, and drops a response in which the dual clip stops two tokens or more.",
)
def fipo(
    lp,
    lp_old,
    A,
    mask,
    *,
    eps_low=0.2,
    eps_high=0.28,
    half_life=32.0,
    eps_f_low=0.0,
    eps_f_high=0.2,
    c=10.0,
):
    """J = E 1/Σ_i|o_i| Σ_i Σ_t min(r A f, clip(r, 1-ε_low, 1+ε_high) A f),  f of what follows:
    f_t = clip(exp Σ_{k>=t} γ^(k-t) M_k log r_k, 1-ε_f_low, 1+ε_f_high), a constant;  M_k = 0 where r_k > c"""
    log_r = sg(lp - lp_old)
    f = influence(log_r, mask, half_life, 1 - eps_f_low, 1 + eps_f_high, c)
    r = dual_clip(exp(lp - lp_old), A, c)
    return minimum(r * A * f, clip(r, 1 - eps_low, 1 + eps_high) * A * f)


@fipo.with_weight
def fipo_weight(
    log_r, A, mask, *, eps_low, eps_high, half_life, eps_f_low, eps_f_high, c
):
    r = exp(log_r)
    f = influence(log_r, mask, half_life, 1 - eps_f_low, 1 + eps_f_high, c)
    alive = where(A > 0, r <= 1 + eps_high, (r >= 1 - eps_low) & (r <= (c or inf)))
    return when(alive, A * r * f)
