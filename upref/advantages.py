# SPDX-License-Identifier: Apache-2.0
"""From one reward per response to one advantage per response.

    R_i, A_i        reward and advantage of response i, [N]
    g(i), G         its prompt, given by `group` [N] (any integers, in any order), and how many responses that has
    mean_g, std_g   over the responses to prompt g; std_g = √(Σ (R - mean_g)² / (G - ddof))

Every estimator of ADVANTAGES takes `(rewards, group)`, so that `get(name)(rewards, group)` works for all of them,
computes in float64, answers in the rewards' own dtype and passes no gradient: an advantage is a constant. `whiten_tokens`,
`gdpo` and `distillation` have arguments of their own. Where a group mean is subtracted,
a response without a peer and a group of equal rewards get exactly 0. InputError on what has no advantage: a reward that
is not finite, shapes and dtypes that do not fit, ddof other than 0 and 1. In a mean every row counts: a response to be
ignored is dropped beforehand.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from upref import catalog
from upref.errors import InputError
from upref.tensors import describe, is_materialized

Rewards = Float[Tensor, " N"]
Advantages = Float[Tensor, " N"]
Group = Int[Tensor, " N"]


def group_norm(
    rewards: Rewards, group: Group, *, ddof: int = 1, eps: float = 1e-6
) -> Advantages:
    """A_i = (R_i - mean_g) / (std_g + eps): GRPO (arXiv 2402.03300).

    The paper states neither ddof nor eps; these defaults are verl's. ddof=0 makes A larger by √(G/(G-1)), 7 % at G = 8.
    eps has the unit of R (TRL: 1e-4) and matters only where std_g is not much larger.

    Args:
        rewards: R, [N].
        group: the prompt of each response, [N].
        ddof: 1 divides by G - 1, 0 by G, the size of the group.
        eps: added to the standard deviation, in the unit of the rewards.

    Returns:
        A, [N].
    """
    centered, g, _ = _centered(rewards, group)
    return _over_std(centered, g, ddof, eps).to(rewards.dtype)


def group_mean(rewards: Rewards, group: Group) -> Advantages:
    """A_i = R_i - mean_g: Dr. GRPO (arXiv 2503.20783).

    Args:
        rewards: R, [N].
        group: the prompt of each response, [N].

    Returns:
        A, [N].
    """
    return _centered(rewards, group)[0].to(rewards.dtype)


def leave_one_out(rewards: Rewards, group: Group) -> Advantages:
    """A_i = R_i - 1/(G-1) Σ_{j≠i} R_j = G/(G-1) (R_i - mean_g): RLOO (arXiv 2402.14740).

    Args:
        rewards: R, [N].
        group: the prompt of each response, [N].

    Returns:
        A, [N].
    """
    centered, g, size = _centered(rewards, group)
    size = size.double()
    return (centered * (size / (size - 1).clamp(min=1))[g]).to(rewards.dtype)


def whiten(
    rewards: Rewards, group: Group | None = None, *, ddof: int = 0, eps: float = 1e-8
) -> Advantages:
    """A_i = (R_i - mean) / (std + eps) over the batch, whatever the prompt: REINFORCE++ (arXiv 2501.03262, Eq. 5).

    The population is the N responses, as in the paper's appendix B.2; the paper gives no ddof and no value of eps.
    verl and OpenRLHF whiten over tokens instead, where a long response counts more: `whiten_tokens`.

    Args:
        rewards: R, [N].
        group: not read; estimators are called alike.
        ddof: 1 divides by N - 1, 0 by N.
        eps: added to the standard deviation, in the unit of the rewards.

    Returns:
        A, [N].
    """
    _check(rewards, group, optional=True)
    return group_norm(
        rewards, torch.zeros_like(rewards, dtype=torch.int64), ddof=ddof, eps=eps
    )


def group_mean_whiten(
    rewards: Rewards, group: Group, *, ddof: int = 0, eps: float = 1e-8
) -> Advantages:
    """A'_i = R_i - mean_g,  A_i = A'_i / (std(A') + eps), std over the batch: REINFORCE++ with baseline, Eqs. 6-7.

    (arXiv 2501.03262.) Eq. 7 also subtracts the mean of A', which is 0 already; leaving it out keeps exact zeros exact.

    Args:
        rewards: R, [N].
        group: the prompt of each response, [N].
        ddof: 1 divides by N - 1, 0 by N.
        eps: added to the standard deviation, in the unit of the rewards.

    Returns:
        A, [N].
    """
    centered, g, _ = _centered(rewards, group)
    return _over_std(centered, torch.zeros_like(g), ddof, eps).to(rewards.dtype)


def signed(rewards: Rewards, group: Group | None = None) -> Advantages:
    """A_i = +1 if correct, -1 if not: W-REINFORCE (arXiv 2506.01347) and TOPR (arXiv 2503.14286).

    Rewards are all in {0, 1} or all in {-1, +1}; anything else is an InputError. (W-REINFORCE's own code tests for
    equality with 1 and with 0 and lets every other reward through as it is.)

    Args:
        rewards: R, [N].
        group: not read; estimators are called alike.

    Returns:
        A, [N].
    """
    _check(rewards, group, optional=True)
    bad = (rewards.abs() != 1) & ((rewards != 0) | (rewards == -1).any())
    if bad.any():
        i = int(bad.nonzero()[0])
        raise InputError(
            f"rewards[{i}] is {rewards[i].item():.9g}, but `signed` reads either {{0, 1}} or {{-1, +1}}, not a mix: "
            "threshold the rewards first or choose another advantage."
        )
    return torch.where(rewards > 0, 1, -1).to(rewards.dtype)


def reward(rewards: Rewards, group: Group | None = None) -> Advantages:
    """A_i = R_i: plain REINFORCE (Williams 1992).

    Args:
        rewards: R, [N].
        group: not read; estimators are called alike.

    Returns:
        A, [N].
    """
    _check(rewards, group, optional=True)
    return rewards.detach().clone()


def maxrl(rewards: Rewards, group: Group) -> Advantages:
    """A_i = (R_i - mean_g) / mean_g, and 0 where mean_g <= 0: MaxRL (arXiv 2602.02710).

    It is meant for rewards >= 0, canonically 0 and 1. This is prime-rl's max_rl; SkyRL and the authors' code divide by
    mean_g + 1e-6.

    Args:
        rewards: R, [N].
        group: the prompt of each response, [N].

    Returns:
        A, [N].
    """
    centered, g, size = _centered(rewards, group)
    R = rewards.detach().double()
    mean = (torch.zeros_like(size, dtype=R.dtype).index_add(0, g, R) / size)[g]
    return torch.where(mean > 0, centered / mean, 0).to(rewards.dtype)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (
        group_norm,
        group_mean,
        leave_one_out,
        whiten,
        group_mean_whiten,
        signed,
        reward,
        maxrl,
    )
}


def get(name: str) -> Callable[..., Tensor]:
    """Return the estimator of this name. Raise InputError, with the nearest name, if there is none.

    Args:
        name: a key of ADVANTAGES.

    Returns:
        The estimator, a function of (rewards [B], group [B]).
    """
    if not isinstance(name, str) or name not in ADVANTAGES:
        raise catalog.unknown_advantage(name, ADVANTAGES)
    return ADVANTAGES[name]


def whiten_tokens(
    adv: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    ddof: int = 1,
    eps: float = 1e-8,
) -> Float[Tensor, "B T"]:
    """A_it = (A_it - mean) / √(var + eps) over the unmasked tokens: REINFORCE++ as verl computes it.

    OpenRLHF has ddof=0 and √max(var, eps). Masked slots may hold anything, NaN included, and return 0.

    Args:
        adv: [B, T].
        mask: [B, T], True on the tokens that count.
        ddof: 1 divides the variance by N - 1, 0 by N, the number of these tokens.
        eps: added to the variance.

    Returns:
        [B, T], 0 on masked slots.

    Raises:
        InputError: the shapes differ, mask is no bool tensor or is False everywhere, or
            an unmasked advantage is not finite.
    """
    is_checked = (
        is_materialized(adv) and is_materialized(mask) and adv.shape == mask.shape
    )
    if not (is_checked and adv.ndim == 2 and adv.is_floating_point()):
        raise InputError(
            "adv and mask must be two tensors of the same shape [B, T]: expand [B, 1] advantages first."
        )
    if mask.dtype != torch.bool:
        raise InputError(f"mask must be bool, got {mask.dtype}.")
    if not mask.any():
        raise InputError("mask is False everywhere: there is nothing to whiten.")
    bad = mask & ~adv.isfinite()
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        raise InputError(
            f"adv is {adv[index].item()} at {index}, an unmasked slot: mask it or fix it."
        )
    x = adv[mask]
    out = torch.zeros_like(adv)
    centered, g, _ = _centered(x, torch.zeros_like(x, dtype=torch.int64))
    var = _variance(centered, g, ddof, eps)
    out[mask] = torch.where(var > 0, centered / (var + eps).sqrt(), 0).to(adv.dtype)
    return out


def gdpo(
    rewards: Float[Tensor, "N K"],
    group: Group,
    weights: Float[Tensor, " K"] | None = None,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Advantages:
    """Return the advantages of K rewards per response, each normalized by itself: GDPO (arXiv 2601.05242).

        A_ik = (R_ik - mean_g R_k) / (std_g R_k + eps),   A_i = Σ_k w_k A_ik,   then (A_i - mean) / (std + eps)

    The last mean and standard deviation are over the batch's responses. verl whitens over tokens instead
    (`whiten_tokens`), and TRL's eps is 1e-4; the defaults are verl's.

    Args:
        rewards: [N, K].
        group: the prompt of each response [N].
        weights: w_k [K]; 1 each where none are given.
        ddof: 1 divides variances by the count minus 1, 0 by the count.
        eps: in the unit of the rewards, and then of A.

    Returns:
        Advantages [N], in the rewards' dtype.

    Raises:
        InputError: rewards that are not [N, K] or not finite, weights that are not [K], and what group_norm refuses.
    """
    if not is_materialized(rewards) or rewards.ndim != 2 or rewards.shape[1] == 0:
        raise InputError(
            f"rewards must be a tensor [N, K], K numbers per response, got {describe(rewards)}."
        )
    K = rewards.shape[1]
    w = torch.ones(K) if weights is None else weights
    if not is_materialized(w) or w.shape != (K,) or not w.isfinite().all():
        raise InputError(
            f"weights must be {K} finite numbers, one for each reward, got {describe(w)}."
        )
    each = [
        group_norm(column.double(), group, ddof=ddof, eps=eps)
        for column in rewards.unbind(1)
    ]
    total = torch.stack(each, 1) @ w.to(each[0])
    return whiten(total, ddof=ddof, eps=eps).to(rewards.dtype)


def distillation(
    lp: Float[Tensor, "B T"],
    lp_teacher: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    adv: Float[Tensor, "B T"] | Float[Tensor, "B 1"] | None = None,
    *,
    coef: float = 1.0,
) -> Float[Tensor, "B T"]:
    """Return A_t - coef (log π(o_t) - log π_teacher(o_t)): on-policy distillation (lu2025onpolicy) as an advantage.

    Through REINFORCE's or PPO's term the gradient is, on policy and in expectation, that of -KL(π ‖ π_teacher) of each
    token, given the tokens before it. It is not that of whole responses: see upref.kl. slime and miles add it to another
    advantage (--opd-kl-coef, 1.0 by default).

    Args:
        lp: log-probabilities of the policy that samples, [B, T], in nats; constants.
        lp_teacher: the teacher's, of the same tokens.
        mask: True on the response's tokens. Masked slots may hold anything and return 0.
        adv: the advantages to which it is added; 0 where none are given.
        coef: in units of the advantage per nat.

    Returns:
        Advantages [B, T].

    Raises:
        InputError: the shapes differ, coef is no finite number, or an unmasked slot is not finite.
    """
    is_number = isinstance(coef, int | float) and not isinstance(coef, bool)
    if not is_number or not -math.inf < coef < math.inf:
        raise InputError(f"coef must be a finite number, got {repr(coef)[:60]}.")
    is_checked = (
        is_materialized(lp) and is_materialized(lp_teacher) and is_materialized(mask)
    )
    if not (
        is_checked
        and lp.ndim == 2
        and lp.shape == lp_teacher.shape == mask.shape
        and mask.dtype == torch.bool
    ):
        raise InputError(
            "lp, lp_teacher and mask must be tensors of one shape [B, T], the mask of bool."
        )
    if adv is not None and (
        not is_materialized(adv) or adv.shape not in (lp.shape, (len(lp), 1))
    ):
        raise InputError(
            f"adv must be a tensor {list(lp.shape)} or {[len(lp), 1]}, got {describe(adv)}."
        )
    start = lp.new_zeros(()) if adv is None else adv.detach()
    A = torch.where(mask, start - coef * (lp - lp_teacher).detach(), 0)
    if not A.isfinite().all():
        index = tuple((~A.isfinite()).nonzero()[0].tolist())
        raise InputError(
            f"the advantage is {A[index].item()} at {index}, an unmasked slot: mask it or fix its inputs."
        )
    return A


def _centered(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return R - mean_g [N], the groups renumbered 0, 1, ... [N], and G of each of those."""
    _check(rewards, group)
    _, g, size = torch.unique(group, return_inverse=True, return_counts=True)
    R = rewards.detach().double()
    zero = torch.zeros(len(size), dtype=torch.float64, device=rewards.device)
    # equal rewards become 0, not an ulp
    R = R - zero.scatter_reduce(0, g, R, "amin", include_self=False)[g]
    return R - (zero.index_add(0, g, R) / size)[g], g, size


def _variance(centered: Tensor, g: Tensor, ddof: int, eps: float) -> Tensor:
    """Return Σ_g centered² / (G - ddof) of each response's group, [N]; 0 for a group of one.

    Args:
        centered: R - mean_g, [N].
        g: the groups, numbered from 0, [N].
        ddof: 0 or 1.
        eps: of the caller; it is only checked here.

    Raises:
        InputError: ddof or eps is another number than it may be.
    """
    # True is an int that a tensor refuses
    if type(ddof) is not int or ddof not in (0, 1):
        raise InputError(
            f"ddof must be 0 (divide by G) or 1 (divide by G - 1), got {repr(ddof)[:60]}."
        )
    if not (isinstance(eps, int | float) and 0 <= eps < 1e300):
        raise InputError(f"eps must be a finite number >= 0, got {repr(eps)[:60]}.")
    size = torch.bincount(g)
    squares = torch.zeros_like(size, dtype=centered.dtype).index_add(0, g, centered**2)
    return (squares / (size - ddof).clamp(min=1))[g]


def _over_std(centered: Tensor, g: Tensor, ddof: int, eps: float) -> Tensor:
    """Return centered / (std + eps) of each response's group, [N]; 0 where the standard
    deviation is 0.
    """
    std = _variance(centered, g, ddof, eps).sqrt()
    return torch.where(std > 0, centered / (std + eps), 0)


def _check(rewards: Tensor, group: Tensor | None, optional: bool = False) -> None:
    """Raise InputError for rewards and group ids that no estimator can read.

    Args:
        rewards: [N].
        group: [N], or None where `optional`.
        optional: the estimator reads no group.
    """
    if not is_materialized(rewards) or rewards.ndim != 1 or rewards.numel() == 0:
        raise InputError(
            f"rewards must be a tensor [N], one number per response, and not empty, got {describe(rewards)}."
        )
    if rewards.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"rewards must be float32 or float64, got {rewards.dtype}: convert with .float()."
        )
    # squares and sums of anything smaller stay finite in float64
    bad = ~(rewards.abs() < 1e30)
    if bad.any():
        i = int(bad.nonzero()[0])
        raise InputError(
            f"rewards[{i}] is {rewards[i].item()}, not a reward: drop that row or fix its reward."
        )
    if optional and group is None:
        return
    if (
        not is_materialized(group)
        or group.is_floating_point()
        or group.is_complex()
        or group.dtype == torch.bool
    ):
        raise InputError(
            f"group must be an integer tensor, one prompt id per response, got {describe(group)}."
        )
    if group.shape != rewards.shape or group.device != rewards.device:
        got = f"{tuple(group.shape)} on {group.device}, rewards {tuple(rewards.shape)} on {rewards.device}"
        raise InputError(
            f"group is {got}: give one prompt id per response, on the same device."
        )
