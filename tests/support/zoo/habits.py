# SPDX-License-Identifier: Apache-2.0
"""Borderline habits, each decided once: how people write it, the verdict, and why.
docs/what-check-sees.md shows them.

verdict: accepted | noted (accepted, and the report says so) | rejected. text: words in
the findings or assumptions of the report of a habit that is noted or rejected.
"""

import torch

from tests.support.cases import ACCEPTED, NOTED, REJECTED, Case
from tests.support.cases.bodies import calm, named as N


def Habit(words, verdict, why, function, on, text="", kind="loss"):
    """Return a case of this file. words: what people do."""
    return Case(
        function,
        on,
        kind=kind,
        verdict=verdict,
        text=text,
        why=why,
        words=words,
        file="habits",
    )


# ---- overflow beyond what a sampler draws --------------------------------------------
def up_as_most_write_it(log_prob, old_log_prob, advantages, mask, *, eps_low=0.2):
    """Return UP's loss with a ratio that is computed on both branches: where the branch
    that is not taken overflows, 0 * inf is NaN.
    """
    lp, old, A = log_prob[mask], old_log_prob[mask], advantages[mask]
    r = torch.exp(lp - old)
    negative = torch.min(r * A, r.clamp(min=1 - eps_low) * A)
    return -torch.where(A > 0, (lp - lp.detach()).exp() * A, negative).mean()


def infinite_ratio_is_zero(log_prob, old_log_prob, advantages, mask, *, eps_high=4.0):
    """Return CISPO's loss with a ratio in float32, and 0 where it overflows."""
    weight = torch.exp((log_prob - old_log_prob).detach().float())
    weight = (
        torch.where(weight.isinf(), 0.0, weight)
        .to(log_prob.dtype)
        .clamp(max=1 + eps_high)
    )
    return -(weight * advantages * log_prob)[mask].mean()


def inverse_of_the_inverse_ratio(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss with the ratio as 1 / exp(lp_old - lp)."""
    r = 1 / torch.exp(old_log_prob - log_prob)
    J = torch.minimum(r * advantages, r.clamp(0.8, 1.28) * advantages)
    return -torch.where(mask, J, 0).sum() / mask.sum()


def quotient_of_probabilities(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return PPO's loss with the ratio as a quotient of probabilities."""
    ratio = log_prob[mask].exp() / old_log_prob[mask].exp()
    A = advantages[mask]
    return -torch.min(ratio * A, ratio.clamp(1 - eps, 1 + eps) * A).mean()


# ---- losses --------------------------------------------------------------------------
def ppo(r, A, low=0.2, high=0.28):
    return torch.minimum(r * A, r.clamp(1 - low, 1 + high) * A)


def dapo(change, add=0.0):
    """Return a loss: minus the sum of change(lp, old, A) over tokens, divided by the
    number of tokens plus `add`.
    """

    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        return -torch.where(mask, change(lp, old, A), 0).sum() / (mask.sum() + add)

    return loss


def grpo(add=0.0, least=0.0):
    """Return GRPO's loss with `add` added to each length, and lengths of at least
    `least`.
    """

    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        n = (mask.sum(1) + add).clamp(min=least)
        return -(
            torch.where(mask, ppo((lp - old).exp(), A, 0.2, 0.2), 0).sum(1) / n
        ).mean()

    return loss


def gspo(clamp):
    """Return GSPO's loss with log s at most `clamp`."""

    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        s = ((lp - old).sum(1) / mask.sum(1)).clamp(max=clamp).exp()
        return -ppo(s, A.sum(1) / mask.sum(1), 3e-4, 4e-4).mean()

    return loss


def plain(lp, old, A):
    return ppo((lp - old).exp(), A)


def clamped(x):
    return lambda lp, old, A: ppo((lp - old).clamp(-x, x).exp(), A)


def mask_multiplied(log_prob, old_log_prob, advantages, mask):
    return -(ppo((log_prob - old_log_prob).exp(), advantages) * mask).sum() / mask.sum()


def not_detached(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    return -torch.where(mask, ppo(r, advantages), 0).sum() / mask.sum()


def strictly_inside(lp, old, A):
    r = (lp - old).exp()
    dead = (A > 0) & (r >= 1.28) | (A < 0) & (r <= 0.8)
    return torch.where(dead, (r.clamp(0.8, 1.28) * A).detach(), r * A)


def anchored(lp, old, A):
    r = torch.where(A > 0, lp - lp.detach(), lp - old).exp()
    return torch.where(A > 0, r * A, torch.minimum(r * A, r.clamp(min=0.8) * A))


def up_dapo_by_groups(present, counted):
    """Return UP-DAPO's loss by a loop over all ids up to the largest.

    present: pass over ids that are absent. counted: divide by the number of ids that
    the loop used, not by the largest plus 1.
    """

    def loss(log_prob, old_log_prob, advantages, mask, group):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        J, total, n = torch.where(mask, anchored(lp, old, A), 0).sum(1), 0.0, 0
        for g in range(int(group.max()) + 1):
            rows = group == g
            if present and not rows.any():
                continue
            total, n = total + J[rows].sum() / mask[rows].sum().clamp(min=1), n + 1
        return -total / (n if counted else int(group.max()) + 1)

    return loss


def ties_one_by_one(log_prob, old_log_prob, advantages, mask):
    """Return M2PO's loss by its Algorithm 1 as it is written: the largest (log r)² are
    dropped one by one, until the mean of the rest is at most 0.04.
    """
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    x = lp.detach() - old
    beyond = mask & ((A > 0) & (x > 0) | (A < 0) & (x < 0))
    order = (
        torch.where(beyond, x**2, -1).flatten().argsort(descending=True, stable=True)
    )
    squares, drop = (x**2).flatten(), torch.zeros(x.numel(), dtype=torch.bool)
    left = squares[beyond.flatten()].sum().item()
    n = int(beyond.sum())
    for i in order.tolist():
        if n == 0 or left / n <= 0.04:
            break
        drop[i], left, n = True, left - squares[i].item(), n - 1
    J = torch.where(drop.reshape(x.shape), 0, (lp - old).exp() * A)
    return -torch.where(mask, J, 0).sum() / mask.sum()


def scaled_by_the_largest(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss with advantages over the largest |A| of the batch."""
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    return (
        -torch.where(
            mask, ppo((lp - old).exp(), A / A.abs().max().clamp(min=1e-8)), 0
        ).sum()
        / mask.sum()
    )


def printing(log_prob, old_log_prob, advantages, mask):
    print("loss")
    return dapo(plain)(log_prob, old_log_prob, advantages, mask)


def seeding(log_prob, old_log_prob, advantages, mask):
    torch.manual_seed(0)
    return dapo(plain)(log_prob, old_log_prob, advantages, mask)


def in_place(log_prob, old_log_prob, advantages, mask):
    advantages.masked_fill_(~mask, 0)
    return dapo(plain)(log_prob, old_log_prob, advantages, mask)


def twice(log_prob, old_log_prob, advantages, mask):
    return 2 * dapo(plain)(log_prob, old_log_prob, advantages, mask)


LOSSES = [
    Habit("1e-8 added to the number of tokens", ACCEPTED, "no gradient moves by more than the rounding of float32",
          N("tokens_1e_8", dapo(plain, 1e-8)), "dapo"),
    Habit("1e-6 added to the number of tokens, or to each length", NOTED,
          "at most 1e-6 of a gradient, for a response of one token; the limit is 2e-6",
          N("lengths_1e_6", grpo(1e-6)), "grpo", "below the limit"),
    Habit("1e-4 added to each length", REJECTED, "short responses count 0.01 % less: above the limit, and no gain",
          N("lengths_1e_4", grpo(1e-4)), "grpo"),
    Habit("a length is clamped to at least 1", ACCEPTED, "it changes only responses without tokens",
          N("lengths_of_1", grpo(least=1)), "grpo"),
    Habit("no guard for a response without tokens: the loss is NaN", NOTED,
          "the paper's 1/|o| has no value there, and upref.Rollouts refuses such a row; avoid empty rows as padding",
          N("no_guard", grpo()), "grpo", "masked throughout"),
    Habit("log r clamped to ±20 before exp", NOTED,
          "training does not reach a ratio of 5e8; without the clamp exp overflows in half precision",
          N("clamp_20", dapo(clamped(20.0))), "dapo", "log r is clamped at 20"),
    Habit("exp(log r) overflows in a branch that is not taken, and 0 * inf is NaN", NOTED,
          "it starts at log r = 709 in float64, 88.7 in float32: no sampler draws a token of probability e^-88",
          up_as_most_write_it, "up_dapo", "0 * inf is NaN"),
    Habit("the ratio as 1 / exp(lp_old - lp), whose derivative squares it", NOTED,
          "the square overflows at log r = 355 in float64, 44.4 in float32: no sampler draws a token of probability e^-44",
          inverse_of_the_inverse_ratio, "dapo", "exp(log r)²"),
    Habit("an infinite ratio in float32 gets weight 0, not the cap", NOTED,
          "a ratio of e^88.7 needs a sampled token of probability e^-88",
          infinite_ratio_is_zero, "cispo", "log r = 100"),
    Habit("another finite weight where π_θ is exactly 1, as of a guard `torch.minimum(lp, zero)`", NOTED,
          "no logit has a gradient there; NaN is a failure",
          N("at_most_0", dapo(lambda lp, old, A: plain(lp.minimum(torch.zeros(())), old, A))), "dapo", "log π = 0"),
    Habit("the ratio as exp(lp) / exp(lp_old)", NOTED,
          "0 / 0 from log π = -104 on in float32, -745 in float64: no sampler draws a token of probability e^-88",
          quotient_of_probabilities, "ppo_clip", "exp(log_prob) underflows"),
    Habit("log r of a token clamped to ±10", REJECTED,
          "rare tokens reach it: a token that moves from π_old = 1e-6 to 0.02 has log r = 10",
          N("clamp_10", dapo(clamped(10.0))), "dapo", "log r is clamped to ±10"),
    Habit("log s of a response clamped at 10, as in verl's GSPO", NOTED,
          "log s is a mean over tokens: every token would have to be e^10 times as likely as before",
          N("gspo_10", gspo(10.0)), "gspo", "log r is clamped at 10"),
    Habit("log s of a response clamped at 5", REJECTED, "responses of one token reach e^5",
          N("gspo_5", gspo(5.0)), "gspo"),
    Habit("the ratio as exp(lp) / (exp(lp_old) + 1e-8)", REJECTED,
          "tokens rarer than 1e-8 lose their gradient; a difference of logarithms needs no guard",
          N("quotient", dapo(lambda lp, old, A: ppo(lp.exp() / (old.exp() + 1e-8), A))), "dapo"),
    Habit("1e-8 inside a logarithm: log(π + 1e-8)", REJECTED, "rare tokens lose their gradient",
          N("log_eps", lambda log_prob, old_log_prob, advantages, mask: -torch.where(
              mask, advantages * (log_prob.exp() + 1e-8).log(), 0).sum() / mask.sum()), "reinforce"),
    Habit("computed in float32, in whole or in part", NOTED,
          "compared to float32's precision (2e-5), at a distance from each bound above its rounding",
          N("float32", dapo(lambda lp, old, A: plain(lp.float(), old.float(), A.float()).double())), "dapo", "float32"),
    Habit("computed in bfloat16 or float16, in whole or in part", REJECTED,
          "a ratio is rounded by 0.4 %, and GSPO's clip range is narrower",
          N("bfloat16", dapo(lambda lp, old, A: plain(lp.bfloat16(), old.bfloat16(), A.bfloat16()).double())), "dapo"),
    Habit("the loss multiplies by the mask instead of selecting with it", NOTED,
          "right while padding is finite, as in the frameworks; NaN there would reach the gradient",
          N("mask_multiplied", mask_multiplied), "dapo", "NaN in a masked slot"),
    Habit("a ratio exactly on a bound is treated as on the other side", ACCEPTED,
          "a floating-point ratio practically never equals a bound; `-v` says what decides there",
          N("strictly_inside", dapo(strictly_inside)), "dapo"),
    Habit("a gradient flows into π_old or A if they require one", NOTED,
          "frameworks pass both without requires_grad; add .detach() to be safe",
          N("not_detached", not_detached), "dapo", "would flow"),
    Habit("`for g in range(max_id + 1)` over group ids, absent ids skipped", NOTED,
          "right for ids from 0 on; negative ids are dropped, and ids beyond 2^40 are not tested",
          N("range_of_ids", up_dapo_by_groups(True, True)), "up_dapo", "beyond 2^40"),
    Habit("the same loop, absent ids counted in the mean", REJECTED,
          "gaps in the ids, as in a filtered batch, shrink the gradient",
          N("range_of_ids_counted", up_dapo_by_groups(False, False)), "up_dapo"),
    Habit("M2PO: of tokens that tie at the cut, some are dropped and some kept", ACCEPTED,
          "Algorithm 1 drops tokens one by one and does not define ties",
          N("ties", ties_one_by_one), "m2po"),
    Habit("advantages divided by max|A| of the batch", REJECTED,
          "the step depends on the largest advantage of the batch, and J(kA) = k J(A) is lost",
          N("largest", scaled_by_the_largest), "dapo"),
    Habit("a constant factor, a sum for a mean", REJECTED,
          "a factor changes the learning rate; check the loss divided by it",
          N("twice", twice), "dapo"),
    Habit("the value differs, the gradient does not", NOTED, "training uses only the gradient; loggers show the value",
          N("another_value", lambda log_prob, old_log_prob, advantages, mask: 3 + dapo(plain)(
              log_prob, old_log_prob, advantages, mask)), "dapo", "value"),
    Habit("it prints", NOTED, "training calls a loss thousands of times", N("prints", printing), "dapo", "prints"),
    Habit("it changes the process: a seed, the default dtype, the number of threads", NOTED,
          "restored after the check, not in training", N("seeds", seeding), "dapo", "it changes"),
    Habit("it writes into its inputs", REJECTED, "a second call, or a log of the inputs, gets changed numbers",
          N("writes", in_place), "dapo", "in place"),
]  # fmt: skip


# ---- estimators ----------------------------------------------------------------------
def normed(scale, reward=lambda x: x):
    """Return an estimator: reward(rewards) less their mean, over scale(rewards), prompt
    by prompt; 0 for a single response.
    """

    def estimator(rewards, group):
        rewards, out = reward(rewards), torch.zeros_like(rewards)
        for g in group.unique():
            x = rewards[group == g]
            out[group == g] = (x - x.mean()) / scale(x) if len(x) > 1 else 0 * x
        return out

    return estimator


def left_out(rewards, group):
    ok = ~rewards.isnan()
    out = torch.zeros_like(rewards)
    out[ok] = normed(lambda x: x.std() + 1e-6)(rewards[ok], group[ok])
    return out


def k3(clamp):
    """Return k3 with the log-ratio clamped to ±clamp."""

    def estimator(log_prob, ref_log_prob):
        d = (ref_log_prob - log_prob).clamp(-clamp, clamp)
        return d.exp() - d - 1

    return estimator


ESTIMATORS = [
    Habit("an eps of at most 1e-3 added to the standard deviation; division by G or by G - 1", NOTED,
          "papers leave both open; the report names the function's",
          N("eps", normed(lambda x: x.std() + 1e-4)), "group_norm", "eps = 0.0001", kind="advantages"),
    Habit("a floor under the standard deviation", NOTED, "papers leave it open; the report names it",
          N("floor", normed(lambda x: x.std().clamp(min=1e-3))), "group_norm", "max(std, eps)", kind="advantages"),
    Habit("responses without a reward (NaN) left out", ACCEPTED,
          "the baseline is that of the responses with a reward",
          N("left_out", left_out), "group_norm", kind="advantages"),
    Habit("a NaN reward makes its prompt's advantages NaN", ACCEPTED, "the error is visible",
          N("nan", normed(lambda x: x.std() + 1e-6)), "group_norm", kind="advantages"),
    Habit("a NaN reward read as 0", REJECTED, "a response that nobody judged moves its peers' baseline",
          N("zero", normed(lambda x: x.std() + 1e-6, lambda x: x.nan_to_num(nan=0.0))), "group_norm", "counts as 0",
          kind="advantages"),
    Habit("a KL estimator clamped at 20 or beyond", NOTED, "as for ratios",
          N("kl_20", k3(20.0)), "k3", "clamp", kind="kl"),
    Habit("a KL estimator clamped at 10", REJECTED, "the tokens furthest from the reference are not pulled back",
          N("kl_10", k3(10.0)), "k3", "clamp", kind="kl"),
]  # fmt: skip
HABITS = [*LOSSES, *ESTIMATORS]
