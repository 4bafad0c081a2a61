# SPDX-License-Identifier: Apache-2.0
"""From rewards of tokens or turns to one advantage per token or turn.

    r_k, V_k, A_k   reward, value and advantage of slot k of a response, [N, K]; a slot is a token or a turn
    mask            True on the slots that the policy wrote and trains, [N, K]
    k⁺              the next trained slot of the same response; there is none behind the last one

Slots between trained ones (a tool's tokens) and padding are left out: the discount acts from trained slot to trained
slot, so one step of discount is one trained token, or one turn. Rewards and values of slots that are left out may hold
anything and are not read; a reward that arrives behind the last trained slot must be moved there beforehand. Sums
run in float64; the functions answer in the rewards' own dtype, return 0 on slots that are left out, and pass no
gradient: an advantage is a constant. A response without a trained slot gets 0 everywhere and enters no mean;
the two estimators that whiten refuse a batch without any.

InputError on what has no advantage: shapes and dtypes that do not fit, a number that is not finite on a trained slot.
`upref.advantages` has the estimators of one reward per response.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from upref import catalog
from upref.advantages import distillation, group_norm, whiten_tokens
from upref.errors import InputError
from upref.tensors import describe, is_materialized

Slots = Float[Tensor, "N K"]
Mask = Bool[Tensor, "N K"]
Group = Int[Tensor, " N"]


# ---- from the back to the front of a response ----------------------------------------
def gae(
    rewards: Slots,
    values: Slots,
    mask: Mask,
    bootstrap: Float[Tensor, " N"] | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Slots:
    """A_k = δ_k + γ λ A_k⁺,  δ_k = r_k + γ V_k⁺ - V_k: GAE (arXiv 1506.02438).

    Behind the last trained slot V⁺ is the bootstrap and A⁺ is 0. A response that ended has the bootstrap 0; one that
    was cut off (truncated) has the critic's value of the state behind its last token. The returns that a critic learns
    are A + V.

    Args:
        rewards: r, [N, K].
        values: V before each slot, [N, K].
        mask: True on trained slots, [N, K].
        bootstrap: the value of the state behind the last trained slot, [N]; None: 0.
        gamma: γ, per trained slot.
        lam: λ.

    Returns:
        A, [N, K].
    """
    _check(mask, rewards=rewards, values=values)
    _check_factors(gamma=gamma, lam=lam)
    r, V = _trained(rewards, mask), _trained(values, mask)
    next_value = torch.zeros(len(r), dtype=torch.float64, device=r.device)
    if bootstrap is not None:
        next_value = _check_bootstrap(bootstrap, mask).double()
    next_advantage = torch.zeros_like(next_value)
    out = torch.zeros_like(r)
    for k in reversed(range(r.shape[1])):
        trained = mask[:, k]
        delta = r[:, k] + gamma * next_value - V[:, k]
        advantage = delta + gamma * lam * next_advantage
        out[:, k] = torch.where(trained, advantage, 0)
        next_value = torch.where(trained, V[:, k], next_value)
        next_advantage = torch.where(trained, advantage, next_advantage)
    return out.to(rewards.dtype)


def gae_whitened(
    rewards: Slots,
    values: Slots,
    mask: Mask,
    bootstrap: Float[Tensor, " N"] | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Slots:
    """A'_k = (A_k - mean) / √(var + 1e-8) of `gae`, over the batch's n trained slots, var by n - 1: verl's and TRL's PPO.

    Args:
        rewards, values, mask, bootstrap, gamma, lam: as of `gae`.

    Returns:
        A', [N, K].

    Raises:
        InputError: as `gae`, or no slot is trained.
    """
    A = gae(rewards, values, mask, bootstrap, gamma=gamma, lam=lam)
    return whiten_tokens(A, mask)


def discounted_returns(rewards: Slots, mask: Mask, *, gamma: float = 1.0) -> Slots:
    """A_k = G_k = r_k + γ G_k⁺: the return from slot k on (Sutton and Barto, Eq. 3.9).

    With γ = 1 it is the reward to go.

    Args:
        rewards: r, [N, K].
        mask: True on trained slots, [N, K].
        gamma: γ, per trained slot.

    Returns:
        G, [N, K].
    """
    _check(mask, rewards=rewards)
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)


def discounted_returns_whitened(
    rewards: Slots, mask: Mask, *, gamma: float = 1.0
) -> Slots:
    """A_k = (G_k - mean) / √(var + 1e-8), G the discounted returns, over the batch's n trained slots, var by n - 1.

    It is verl's REINFORCE++ where no untrained slot lies between trained ones.

    Args:
        rewards, mask, gamma: as of `discounted_returns`.

    Returns:
        A, [N, K].

    Raises:
        InputError: as `discounted_returns`, or no slot is trained.
    """
    return whiten_tokens(discounted_returns(rewards, mask, gamma=gamma), mask)


# ---- turns, normalized among those of the same prompt --------------------------------
def turns_normalized_discounted(
    rewards: Slots,
    mask: Mask,
    group: Group,
    *,
    gamma: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Slots:
    """A_k = Ã_k + γ A_k⁺,  Ã = (r - mean) / (std + eps): normalize, then discount (IGPO, arXiv 2510.14967).

    Mean and standard deviation are over all turns of all responses to the prompt. A prompt with one turn, or with equal
    rewards, has Ã = 0.

    Args:
        rewards: of turns, [N, K].
        mask: True on turns that there are, [N, K].
        group: the prompt of each response, [N].
        gamma: γ, per turn.
        ddof: 1 divides the variance by n - 1, 0 by n.
        eps: added to the standard deviation, in the unit of the rewards.

    Returns:
        A, [N, K].
    """
    _check(mask, rewards=rewards)
    ids = _check_group(group, mask)[:, None].expand(mask.shape)
    normalized = _normalized(rewards, mask, ids, ddof, eps)
    return discounted_returns(normalized, mask, gamma=gamma)


def turns_discounted_normalized(
    rewards: Slots,
    mask: Mask,
    group: Group,
    *,
    gamma: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Slots:
    """A = (G - mean) / (std + eps), G the discounted returns of turns: discount, then normalize.

    Mean and standard deviation are over all turns of all responses to the prompt.

    Args:
        rewards, mask, group, gamma, ddof, eps: as of `turns_normalized_discounted`.

    Returns:
        A, [N, K].
    """
    returns = discounted_returns(rewards, mask, gamma=gamma)
    ids = _check_group(group, mask)[:, None].expand(mask.shape)
    return _normalized(returns, mask, ids, ddof, eps)


def turn_index_normalized_discounted(
    rewards: Slots,
    mask: Mask,
    group: Group,
    *,
    gamma: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Slots:
    """A_k = Ã_k + γ A_k⁺,  Ã_k = (r_k - mean_k) / (std_k + eps): each turn among the turns of the same number.

    Mean and standard deviation of turn k are over the k-th turns of all responses to the prompt.

    Args:
        rewards, mask, group, gamma, ddof, eps: as of `turns_normalized_discounted`.

    Returns:
        A, [N, K].
    """
    _check(mask, rewards=rewards)
    ids = _turn_ids(mask, group)
    normalized = _normalized(rewards, mask, ids, ddof, eps)
    return discounted_returns(normalized, mask, gamma=gamma)


def turn_index_discounted_normalized(
    rewards: Slots,
    mask: Mask,
    group: Group,
    *,
    gamma: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Slots:
    """A_k = (G_k - mean_k) / (std_k + eps): the returns of each turn among the turns of the same number.

    Args:
        rewards, mask, group, gamma, ddof, eps: as of `turns_normalized_discounted`.

    Returns:
        A, [N, K].
    """
    returns = discounted_returns(rewards, mask, gamma=gamma)
    return _normalized(returns, mask, _turn_ids(mask, group), ddof, eps)


# ---- steps, normalized among those from the same state -------------------------------
def step_group_norm(
    rewards: Slots,
    mask: Mask,
    group: Group,
    state: Int[Tensor, "N K"],
    *,
    gamma: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Slots:
    """A^S_k = (G_k - mean) / (std + eps) over the steps of the prompt that begin in the same state: GiGPO's step part.

    (arXiv 2505.10978.) G are the discounted returns. A step whose state no other step shares gets 0.

    Args:
        rewards: of steps, [N, K].
        mask: True on steps that there are, [N, K].
        group: the prompt of each response, [N].
        state: an id of the state (the anchor) in which each step begins, [N, K].
        gamma: γ, per step.
        ddof: 1 divides the variance by n - 1, 0 by n.
        eps: added to the standard deviation, in the unit of the rewards.

    Returns:
        A^S, [N, K].
    """
    returns = discounted_returns(rewards, mask, gamma=gamma)
    return _normalized(returns, mask, _step_ids(mask, group, state), ddof, eps)


def gigpo(
    rewards: Slots,
    mask: Mask,
    group: Group,
    state: Int[Tensor, "N K"],
    *,
    gamma: float = 1.0,
    omega: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Slots:
    """A_k = A^E + ω A^S_k: GiGPO (arXiv 2505.10978).

    A^E is `group_norm` of the sums of the responses' rewards, and A^S is `step_group_norm`.

    Args:
        rewards, mask, group, state, gamma, ddof, eps: as of `step_group_norm`.
        omega: ω, the weight of the step part.

    Returns:
        A, [N, K].
    """
    step = step_group_norm(rewards, mask, group, state, gamma=gamma, ddof=ddof, eps=eps)
    has_slots = mask.any(1)
    episode = torch.zeros(len(mask), dtype=rewards.dtype, device=rewards.device)
    if has_slots.any():
        totals = _trained(rewards, mask).sum(1)[has_slots].to(rewards.dtype)
        episode[has_slots] = group_norm(totals, group[has_slots], ddof=ddof, eps=eps)
    return torch.where(mask, episode[:, None] + omega * step, 0)


# ---- baselines of responses and of tokens --------------------------------------------
def opo(rewards: Slots, mask: Mask, group: Group) -> Slots:
    """A_i = R_i - Σ_j |o_j| R_j / Σ_j |o_j| over the responses to the prompt: OPO (arXiv 2505.23585).

    R_i is the sum of the response's rewards. The baseline weighs each response by its length, which is optimal where
    the squared norm of a response's gradient grows with it. A prompt with one response has A = 0, up to rounding.

    Args:
        rewards: r, [N, K].
        mask: True on trained slots, [N, K]; |o_i| is their number.
        group: the prompt of each response, [N].

    Returns:
        A, [N, K]: one number per response, on its trained slots.
    """
    _check(mask, rewards=rewards)
    R, length = _trained(rewards, mask).sum(1), mask.sum(1).double()
    same = _same_prompt(group, mask)
    baseline = same @ (length * R) / (same @ length).clamp(min=1)
    return _on_slots(R - baseline, mask, rewards)


def gpg(rewards: Slots, mask: Mask, group: Group) -> Slots:
    """A_i = N / (N - M) (R_i - mean_g): GPG (arXiv 2504.02546), M of N responses are to prompts with equal rewards.

    If all are, A is 0.

    Args:
        rewards, mask, group: as of `opo`.

    Returns:
        A, [N, K]: one number per response, on its trained slots.
    """
    _check(mask, rewards=rewards)
    R = _trained(rewards, mask).sum(1)
    same = _same_prompt(group, mask)
    centered = torch.where(mask.any(1), R - same @ R / same.sum(1).clamp(min=1), 0)
    # the mean of equal rewards is off by rounding
    centered = torch.where(centered.abs() > 1e-12 * (1 + R.abs()), centered, 0)
    has_gradient = (same * centered.abs()).sum(1) > 0
    factor = mask.any(1).sum() / has_gradient.sum().clamp(min=1)
    return _on_slots(factor.double() * centered, mask, rewards)


def pass_at_k(rewards: Slots, mask: Mask, group: Group) -> Slots:
    """A_i = max_j R_j - max_{j≠i} R_j over the responses to the prompt: Pass@k with k their number (arXiv 2503.19595).

    Only the best response has an advantage: by how much it exceeds the second best. A lone response has A = 0.

    Args:
        rewards, mask, group: as of `opo`.

    Returns:
        A, [N, K]: one number per response, on its trained slots.
    """
    _check(mask, rewards=rewards)
    R = _trained(rewards, mask).sum(1)
    A = torch.zeros_like(R)
    is_same = _same_prompt(group, mask) > 0
    for i in range(len(R)):
        others = is_same[i].clone()
        others[i] = False
        if mask[i].any() and others.any():
            A[i] = (R[i] - R[others].max()).clamp(min=0)
    return _on_slots(A, mask, rewards)


def remax(rewards: Slots, greedy_reward: Float[Tensor, " N"], mask: Mask) -> Slots:
    """A_k = Σ_{k' ≥ k} r_k' - b: ReMax (arXiv 2310.10505), b the reward of the prompt's greedy response.

    Args:
        rewards: r, [N, K].
        greedy_reward: b, [N]: the reward of the response that takes the likeliest token at each step.
        mask: True on trained slots, [N, K].

    Returns:
        A, [N, K].
    """
    baseline = _check_bootstrap(greedy_reward, mask, "greedy_reward").double()
    returns = discounted_returns(rewards, mask)
    return torch.where(mask, returns - baseline[:, None], 0).to(rewards.dtype)


def optimal_token_baseline(
    rewards: Slots,
    log_prob: Slots,
    sum_pi_squared: Slots,
    mask: Mask,
    group: Group,
) -> Slots:
    """A_t = G_t - B_t,  B_t = Σ_j W_jt G_jt / Σ_j W_jt,  W_t = Σ_{s ≤ t} (1 - 2 π_s + Σ_v π_v²): arXiv 2602.07078.

    As verl 0.9.1 computes it (`optimal_token_baseline`). G are the rewards to go, W is the squared norm of the gradient
    of log π by the logits, added up to token t, and the sums over j are over the t-th tokens of the responses to the
    prompt. Where no other response has a t-th token, or where every W_jt is 0 (all tokens so far were certain), B_t = 0.

    Args:
        rewards: r, [N, K].
        log_prob: log π(o_t), [N, K], in nats.
        sum_pi_squared: Σ_v π(v)² over the vocabulary, [N, K].
        mask: True on trained slots, [N, K].
        group: the prompt of each response, [N].

    Returns:
        A, [N, K].
    """
    _check(mask, rewards=rewards, log_prob=log_prob, sum_pi_squared=sum_pi_squared)
    returns = discounted_returns(rewards, mask).double()
    squared_norm = (
        1 - 2 * _trained(log_prob, mask).exp() + _trained(sum_pi_squared, mask)
    )
    W = torch.where(mask, squared_norm, 0).cumsum(1)
    out = torch.zeros_like(returns)
    _, ids = torch.unique(_turn_ids(mask, group)[mask], dim=0, return_inverse=True)
    g, w = returns[mask], W[mask]
    n = int(ids.max()) + 1 if len(ids) else 0
    zeros = torch.zeros(n, dtype=torch.float64)
    weight = zeros.index_add(0, ids, w)
    total = zeros.index_add(0, ids, w * g)
    has_others = ids.bincount(minlength=n)[ids] > 1
    has_baseline = has_others & (weight[ids] > 0)
    baseline = torch.where(has_baseline, (total / weight)[ids], 0)
    out[mask] = g - baseline
    return out.to(rewards.dtype)


# ---- a teacher's log-probabilities as rewards ----------------------------------------
def minillm(
    log_prob: Slots, teacher_log_prob: Slots, mask: Mask, *, gamma: float = 1.0
) -> Slots:
    """A_t = Σ_{t' ≥ t} γ^(t'-t) (log π_teacher - log π): MiniLLM's return (arXiv 2306.08543; γ is TRL's).

    Differences t' - t count trained tokens. Its policy gradient is, on policy and at γ = 1, that of the reverse KL of
    whole responses, the effect of a token on later ones included; `distillation` leaves that effect out.

    Args:
        log_prob: log π(o_t) of the student, [N, K], in nats.
        teacher_log_prob: log π_teacher(o_t), [N, K].
        mask: True on trained tokens, [N, K].
        gamma: γ, per trained token.

    Returns:
        A, [N, K].
    """
    _check(mask, log_prob=log_prob, teacher_log_prob=teacher_log_prob)
    rewards = torch.where(mask, teacher_log_prob - log_prob, 0).detach()
    return discounted_returns(rewards, mask, gamma=gamma)


def minillm_length_normalized(
    log_prob: Slots, teacher_log_prob: Slots, mask: Mask, *, gamma: float = 1.0
) -> Slots:
    """A_t = Σ_{t' ≥ t} γ^(t'-t) (log π_teacher - log π) / Σ_{t' ≥ t} γ^(t'-t): TRL's MiniLLM with length_normalization.

    Args:
        log_prob, teacher_log_prob, mask, gamma: as of `minillm`.

    Returns:
        A, [N, K].
    """
    total = minillm(log_prob, teacher_log_prob, mask, gamma=gamma)
    count = discounted_returns(torch.ones_like(log_prob), mask, gamma=gamma)
    return torch.where(mask, total / count, 0)


TOKEN_ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (
        gae,
        gae_whitened,
        discounted_returns,
        discounted_returns_whitened,
        turns_normalized_discounted,
        turns_discounted_normalized,
        turn_index_normalized_discounted,
        turn_index_discounted_normalized,
        step_group_norm,
        gigpo,
        opo,
        gpg,
        pass_at_k,
        remax,
        optimal_token_baseline,
        minillm,
        minillm_length_normalized,
        distillation,
    )
}


def get(name: str) -> Callable[..., Tensor]:
    """Return the estimator of this name. Raise InputError, with the nearest name, if there is none.

    Args:
        name: a key of TOKEN_ADVANTAGES.

    Returns:
        The estimator.
    """
    if not isinstance(name, str) or name not in TOKEN_ADVANTAGES:
        raise catalog.unknown_advantage(name, TOKEN_ADVANTAGES)
    return TOKEN_ADVANTAGES[name]


# ---- checks and parts ----------------------------------------------------------------
def _trained(x: Tensor, mask: Tensor) -> Tensor:
    """Return x in float64, 0 on slots that are left out."""
    return torch.where(mask, x.detach(), 0).double()


def _normalized(x: Tensor, mask: Tensor, ids: Tensor, ddof: int, eps: float) -> Tensor:
    """Return x, [N, K], normalized among the trained slots of equal ids; 0 elsewhere."""
    out = torch.zeros_like(x)
    if mask.any():
        _, groups = torch.unique(ids[mask], dim=0, return_inverse=True)
        out[mask] = group_norm(x[mask].detach(), groups, ddof=ddof, eps=eps)
    return out


def _same_prompt(group: Tensor, mask: Tensor) -> Tensor:
    """Return 1 for each two responses to one prompt that have trained slots, [N, N]."""
    ids = _check_group(group, mask)
    has_slots = mask.any(1)
    same = (ids[:, None] == ids) & has_slots & has_slots[:, None]
    return same.double()


def _on_slots(A: Tensor, mask: Tensor, rewards: Tensor) -> Tensor:
    """Return one number per response on its trained slots, [N, K]."""
    return torch.where(mask, A[:, None], 0).to(rewards.dtype)


def _turn_ids(mask: Tensor, group: Tensor) -> Tensor:
    """Return (prompt, number of the turn) of each slot, [N, K, 2]. Turns are counted
    among those that there are.
    """
    number = mask.long().cumsum(1)
    prompt = _check_group(group, mask)[:, None].expand(mask.shape)
    return torch.stack([prompt, number], -1)


def _step_ids(mask: Tensor, group: Tensor, state: Tensor) -> Tensor:
    """Return (prompt, state) of each slot, [N, K, 2]; raise InputError unless states are whole numbers [N, K]."""
    is_whole = (
        is_materialized(state)
        and not state.is_floating_point()
        and state.shape == mask.shape
    )
    if not is_whole:
        raise InputError(
            f"state must be whole numbers {list(mask.shape)}, an id of the state in which each step begins, "
            f"got {describe(state)}."
        )
    prompt = _check_group(group, mask)[:, None].expand(mask.shape)
    return torch.stack([prompt, state], -1)


def _check(mask: Tensor, **slots: Tensor) -> None:
    """Raise InputError for a mask that is none, and for numbers of slots that do not fit it."""
    if not is_materialized(mask) or mask.dtype != torch.bool or mask.ndim != 2:
        raise InputError(f"mask must be a bool tensor [N, K], got {describe(mask)}.")
    for name, x in slots.items():
        fits = is_materialized(x) and x.shape == mask.shape and x.device == mask.device
        if not fits or x.dtype not in (torch.float32, torch.float64):
            raise InputError(
                f"{name} must be float32 or float64 {list(mask.shape)} as the mask, on its device, got {describe(x)}."
            )
        # squares and sums of anything smaller stay finite in float64
        bad = mask & ~(x.abs() < 1e30)
        if bad.any():
            index = tuple(bad.nonzero()[0].tolist())
            raise InputError(
                f"{name} is {x[index].item()} at {index}, a trained slot: mask it or fix it."
            )


def _check_factors(**factors: float) -> None:
    """Raise InputError for a factor that is no number from 0 to 1."""
    for name, value in factors.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= 1:
            raise InputError(
                f"{name} must be a number from 0 to 1, got {repr(value)[:60]}."
            )


def _check_bootstrap(
    bootstrap: Tensor, mask: Tensor, name: str = "bootstrap"
) -> Tensor:
    """Return the numbers, [N], without a graph; raise InputError unless they are one finite
    number per response.
    """
    fits = is_materialized(bootstrap) and bootstrap.shape == mask.shape[:1]
    if not fits or not bootstrap.isfinite().all():
        raise InputError(
            f"{name} must be {len(mask)} finite numbers, one per response, got {describe(bootstrap)}."
        )
    return bootstrap.detach()


def _check_group(group: Tensor, mask: Tensor) -> Tensor:
    """Return the prompt ids; raise InputError unless they are one whole number per response."""
    is_whole = (
        is_materialized(group)
        and not group.is_floating_point()
        and not group.is_complex()
        and group.dtype != torch.bool
    )
    if not is_whole or group.shape != mask.shape[:1]:
        raise InputError(
            f"group must be {len(mask)} whole numbers, one prompt id per response, got {describe(group)}."
        )
    return group
