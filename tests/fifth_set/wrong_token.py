# SPDX-License-Identifier: Apache-2.0
"""Wrong losses that clip the ratio of a token: PPO, GRPO, DAPO, Dr. GRPO."""

import torch
import torch.nn.functional as F

from tests.fifth_set.case import wrong
from tests.fifth_set.parts import clipped, ratios


@wrong("dapo", "the ratio is π_old/π_θ")
def ratio_upside_down(log_prob, old_log_prob, advantages, mask):
    ratio = torch.exp(torch.where(mask, old_log_prob - log_prob, 0.0))
    adv = torch.where(mask, advantages, 0.0)
    pg = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.28))
    return pg.sum() / mask.sum()


@wrong("dapo", "the bounds -0.2 and 0.28 clip the log-ratio, not the ratio")
def bounds_on_the_log_ratio(logprobs, old_logprobs, adv, response_mask):
    m = response_mask.bool()
    d = (logprobs - old_logprobs).masked_fill(~m, 0)
    a = adv.masked_fill(~m, 0)
    un = d.exp() * a
    cl = d.clamp(-0.2, 0.28).exp() * a
    return -torch.minimum(un, cl).sum() / m.sum()


@wrong("dapo", "the optimistic of the two terms is taken: max in J")
def optimistic(new, old, adv, mask):
    r = torch.where(mask, new - old, 0).exp()
    a = torch.where(mask, adv, 0)
    return -torch.maximum(r * a, r.clamp(0.8, 1.28) * a).sum() / mask.sum()


@wrong("dapo", "the two bounds are exchanged: 1 - 0.28 and 1 + 0.2")
def bounds_exchanged(
    log_prob, old_log_prob, advantages, mask, clip_low=0.28, clip_high=0.2
):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    return -clipped(r, a, 0.72, 1.2).sum() / mask.sum()


@wrong("dapo", "advantages are centered over the tokens of the batch once more")
def centered_again(log_prob, old_log_prob, advantages, mask):
    n = mask.sum()
    a = torch.where(mask, advantages, 0)
    a = torch.where(mask, a - a.sum() / n, 0)
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    return -clipped(r, a, 0.8, 1.28).sum() / n


@wrong("dapo", "the mean runs over all columns, padding included")
def mean_of_all_columns(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    return torch.maximum(-r * a, -r.clamp(0.8, 1.28) * a).mul(mask).mean()


@wrong("dapo", "a dual clip at c = 3 that was not asked for")
def dual_clip_by_default(
    log_prob, old_log_prob, advantages, eos_mask, clip_ratio_c=3.0
):
    keep = eos_mask.bool()
    r = (log_prob - old_log_prob).masked_fill(~keep, 0).exp()
    a = advantages.masked_fill(~keep, 0)
    one = torch.maximum(-a * r, -a * r.clamp(0.8, 1.28))
    two = torch.minimum(-a * 3.0, one)
    return torch.where(a < 0, two, one).sum() / keep.sum()


@wrong("dapo", "the clipped term is detached as a whole: no weight is ever 0")
def detached_minimum(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    w = clipped(r, a, 0.8, 1.28).detach()
    return -(w * torch.where(mask, log_prob, 0)).sum() / mask.sum()


@wrong("dapo", "the mask is one column late")
def mask_one_late(log_prob, old_log_prob, advantages, mask):
    m = F.pad(mask, (1, 0))[:, :-1] & mask
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    return -(clipped(r, a, 0.8, 1.28) * m).sum() / mask.sum()


@wrong("dapo", "the mean of the means of the responses, not the mean over tokens")
def mean_of_means(log_prob, old_log_prob, advantages, mask):
    m = mask.to(log_prob.dtype)
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    t = clipped(r, a, 0.8, 1.28)
    return -((t * m).sum(1) / m.sum(1).clamp(min=1)).mean()


@wrong("dapo", "an entropy estimate -log π of the sampled token is added as a bonus")
def entropy_of_samples(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    n = mask.sum()
    pg = -clipped(r, a, 0.8, 1.28).sum() / n
    entropy = -torch.where(mask, log_prob, 0).sum() / n
    return pg - 0.003 * entropy


@wrong("dapo", "tokens with a ratio above 10 or below 0.1 are dropped")
def outliers_dropped(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0)
    r = d.exp()
    a = torch.where(mask, advantages, 0)
    sane = (r < 10) & (r > 0.1)
    t = clipped(r, a, 0.8, 1.28)
    return -torch.where(sane, t, 0).sum() / mask.sum()


@wrong("dapo", "tokens with A = 0 are left out of the denominator")
def zero_advantages_not_counted(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    n = (a != 0).sum().clamp(min=1)
    return -clipped(r, a, 0.8, 1.28).sum() / n


@wrong("dapo", "the first token of each response is not trained")
def first_token_dropped(log_prob, old_log_prob, advantages, mask):
    m = mask & (mask.cumsum(1) > 1)
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    t = clipped(r, a, 0.8, 1.28)
    return -torch.where(m, t, 0).sum() / mask.sum()


@wrong("grpo", "the last token of each response, the end of text, is not trained")
def end_of_text_dropped(logps, old_logps, advantages, completion_mask):
    m = completion_mask.bool()
    n = m.sum(1, keepdim=True)
    inner = m & (m.cumsum(1) < n)
    r = torch.where(m, logps - old_logps, 0).exp()
    a = torch.where(m, advantages, 0)
    t = torch.where(inner, clipped(r, a, 0.8, 1.2), 0)
    return -(t.sum(1) / n[:, 0]).mean()


@wrong("ppo_clip", "advantages are divided by their standard deviation in the loss")
def divided_by_the_spread(log_prob, old_log_prob, advantages, mask):
    a = torch.where(mask, advantages, 0)
    a = a / (a[mask].std(correction=0) + 1e-8) if mask.sum() > 1 else a
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    return -clipped(r, a, 0.8, 1.2).sum() / mask.sum()


@wrong("dapo", "a temperature of 0.9 divides the log-ratio")
def temperature_in_the_ratio(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, (log_prob - old_log_prob) / 0.9, 0).exp()
    a = torch.where(mask, advantages, 0)
    return -clipped(r, a, 0.8, 1.28).sum() / mask.sum()


@wrong("dapo", "π_old is replaced by π_θ where they differ by more than a factor e")
def stale_tokens_reset(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0)
    old = torch.where(d.abs() > 1, log_prob.detach(), old_log_prob)
    r = torch.where(mask, log_prob - old, 0).exp()
    a = torch.where(mask, advantages, 0)
    return -clipped(r, a, 0.8, 1.28).sum() / mask.sum()


@wrong("grpo", "advantages are clamped to ±5")
def advantages_clamped_to_five(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, advantages.clamp(-5, 5), 0)
    t = clipped(r, a, 0.8, 1.2)
    return -(t.sum(1) / mask.sum(1)).mean()


@wrong("grpo", "negative advantages count half")
def half_for_losers(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    a = torch.where(mask, F.leaky_relu(advantages, 0.5), 0)
    t = clipped(r, a, 0.8, 1.2)
    return -(t.sum(1) / mask.sum(1)).mean()


@wrong("ppo_clip", "the square root of the ratio is clipped and used")
def root_of_the_ratio(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp().sqrt()
    a = torch.where(mask, advantages, 0)
    return -clipped(r, a, 0.8, 1.2).sum() / mask.sum()


@wrong("dapo", "in the hinge form one ε bounds both sides")
def hinge_with_one_eps(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0)
    a = torch.where(mask, advantages, 0)
    gain = torch.sign(a) * torch.expm1(d)
    return -(a + a.abs() * gain.clamp(max=0.28)).sum() / mask.sum()


@wrong("ppo_clip", "a straight-through clip: the value is clipped, the gradient is not")
def straight_through_clip(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    c = r + (r.clamp(0.8, 1.2) - r).detach()
    return -torch.minimum(r * a, c * a).sum() / mask.sum()


@wrong("ppo_clip", "the product of ratio and advantage is clipped")
def product_clipped(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    t = r * a
    return -torch.minimum(t, t.clamp(0.8, 1.2)).sum() / mask.sum()


@wrong("dapo", "the loss is multiplied by the share of unclipped tokens")
def scaled_by_the_clip_fraction(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    n = mask.sum()
    fraction = ((r > 1.28) & (a > 0) | (r < 0.8) & (a < 0)).sum() / n
    return -(1 - fraction) * clipped(r, a, 0.8, 1.28).sum() / n


@wrong("dapo", "only the first turn of a response with several turns is trained")
def first_turn_alone(log_prob, old_log_prob, advantages, loss_mask):
    m = loss_mask.bool()
    starts = (m & ~F.pad(m, (1, 0))[:, :-1]).cumsum(1)
    first = m & (starts == 1)
    r = torch.where(m, log_prob - old_log_prob, 0).exp()
    a = torch.where(m, advantages, 0)
    t = clipped(r, a, 0.8, 1.28)
    return -torch.where(first, t, 0).sum() / first.sum()


@wrong("dapo", "the ratio is computed in half precision")
def ratio_in_half(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0)
    r = d.half().exp().to(log_prob.dtype)
    a = torch.where(mask, advantages, 0)
    return -clipped(r, a, 0.8, 1.28).sum() / mask.sum()


@wrong("grpo", "log-probabilities are rounded to bfloat16 before they are subtracted")
def rounded_log_probs(log_prob, old_log_prob, advantages, mask):
    new, old = (x.bfloat16().to(x.dtype) for x in (log_prob, old_log_prob))
    r = torch.where(mask, new - old, 0).exp()
    a = torch.where(mask, advantages, 0)
    t = clipped(r, a, 0.8, 1.2)
    return -(t.sum(1) / mask.sum(1)).mean()


@wrong("grpo", "a row's tokens are taken to be its first |o| columns")
def first_columns(log_prob, old_log_prob, advantages, mask):
    rows = []
    for lp, old, a, m in zip(log_prob, old_log_prob, advantages, mask, strict=True):
        n = int(m.sum())
        r = (lp[:n] - old[:n]).exp()
        rows.append(torch.minimum(r * a[:n], r.clamp(0.8, 1.2) * a[:n]).mean())
    return -torch.stack(rows).mean()


@wrong(
    "grpo",
    "the advantage is read from the last column, which may be padding",
    shows="padding",
)
def advantage_of_the_last_column(log_prob, old_log_prob, advantages, mask):
    a = advantages[:, -1:]
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    t = torch.where(mask, clipped(r, a, 0.8, 1.2), 0)
    return -(t.sum(1) / mask.sum(1)).mean()


@wrong("dapo", "1e-3 is added to the number of tokens")
def a_thousandth_of_a_token(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    return -clipped(r, a, 0.8, 1.28).sum() / (mask.sum() + 1e-3)


@wrong("dapo", "each micro-batch divides by its own tokens", shows="micro-batches")
def own_tokens_of_the_micro_batch(log_prob, old_log_prob, advantages, mask, totals):
    share = mask.shape[0] / float(totals.sequences)
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    t = clipped(r, a, 0.8, 1.28)
    return -t.sum() / mask.sum() * share


@wrong(
    "dapo", "it is scaled by the number of ranks twice", shows="ranks", agg="token-mean"
)
def ranks_counted_twice(log_prob, old_log_prob, advantages, mask, totals, dp_size):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    t = clipped(r, a, 0.8, 1.28)
    return -t.sum() / totals.tokens * dp_size**2


@wrong(
    "ppo_clip",
    "it runs backward for a gradient norm and returns a live loss",
    shows="its backward",
)
def backward_for_the_norm(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    loss = -clipped(r, a, 0.8, 1.2).sum() / mask.sum()
    loss.backward(retain_graph=True)
    return loss


class Tracker:
    """A moving average of the advantages, kept between calls."""

    mean = 0.0


@wrong(
    "grpo", "a moving average of advantages is subtracted: state", shows="a second call"
)
def moving_baseline(log_prob, old_log_prob, advantages, mask):
    a = torch.where(mask, advantages, 0)
    Tracker.mean = 0.99 * Tracker.mean + 0.01 * float(a.sum() / mask.sum())
    a = torch.where(mask, a - Tracker.mean, 0)
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    t = clipped(r, a, 0.8, 1.2)
    return -(t.sum(1) / mask.sum(1)).mean()


@wrong("dapo", "a tenth of the tokens is dropped at random", shows="a second call")
def dropout_of_tokens(log_prob, old_log_prob, advantages, mask):
    keep = mask & (torch.rand(mask.shape) > 0.1)
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    t = clipped(r, a, 0.8, 1.28)
    return -torch.where(keep, t, 0).sum() / keep.sum().clamp(min=1)


@wrong(
    "grpo",
    "it multiplies the caller's advantages by the mask in place",
    shows="its inputs",
)
def advantages_masked_in_place(log_prob, old_log_prob, advantages, mask):
    advantages.masked_fill_(~mask, 0).mul_(1 - 1e-3)
    a = advantages / (1 - 1e-3)
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    t = clipped(r, a, 0.8, 1.2)
    return -(t.sum(1) / mask.sum(1)).mean()


@wrong("dr_grpo", "the sum of a response is divided by its length")
def dr_grpo_by_length(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    t = clipped(r, a, 0.8, 1.2)
    return -(t.sum(-1) / mask.sum(-1)).mean()


@wrong("dr_grpo", "the sum of a response is divided by the padded width of the batch")
def dr_grpo_by_width(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    t = clipped(r, a, 0.8, 1.2)
    return -(t.sum(-1) / mask.shape[1]).mean()


@wrong(
    "dr_grpo", "the sum of a response is divided by the longest response of the batch"
)
def dr_grpo_by_the_longest(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    t = clipped(r, a, 0.8, 1.2)
    return -(t.sum(-1) / mask.sum(-1).max()).mean()


@wrong("dr_grpo", "the sums of all responses are added up, not averaged")
def dr_grpo_summed(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    return -clipped(r, a, 0.8, 1.2).sum()


@wrong(
    "dapo",
    "prompts are averaged with a weight by their number of responses",
    shows="gradient",
)
def prompts_weighted(log_prob, old_log_prob, advantages, mask, group_ids):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    t = clipped(r, a, 0.8, 1.28).sum(1)
    loss = 0.0
    for g in group_ids.unique():
        mine = group_ids == g
        loss = loss - mine.sum() * t[mine].sum() / mask[mine].sum()
    return loss / len(group_ids)


@wrong("dapo", "the tokens of a prompt are averaged by response first")
def prompts_of_means(log_prob, old_log_prob, advantages, mask, prompt_ids):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    t = clipped(r, a, 0.8, 1.28).sum(1) / mask.sum(1)
    ids, where, count = prompt_ids.unique(return_inverse=True, return_counts=True)
    per = torch.zeros(len(ids), dtype=t.dtype).index_add(0, where, t) / count
    return -per.mean()


@wrong(
    "dapo",
    "the clip is left out for the first of several equal tokens: top ratio of a row",
)
def largest_ratio_unclipped(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0)
    r = d.exp()
    a = torch.where(mask, advantages, 0)
    t = clipped(r, a, 0.8, 1.28)
    i = d.abs().argmax(1, keepdim=True)
    t = t.scatter(1, i, (r * a).gather(1, i))
    return -t.sum() / mask.sum()


@wrong("ppo_clip", "the clip is a tanh of the same slope")
def soft_clip_by_tanh(log_prob, old_log_prob, advantages, mask):
    x = torch.where(mask, log_prob - old_log_prob, 0).expm1()
    a = torch.where(mask, advantages, 0)
    c = 1 + 0.2 * torch.tanh(x / 0.2)
    return -torch.minimum((1 + x) * a, c * a).sum() / mask.sum()


@wrong("ppo_clip", "a Huber-like clip: beyond the bound the slope is a tenth, not 0")
def leaky_clip(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    c = r.clamp(0.8, 1.2)
    c = c + 0.1 * (r - c)
    return -torch.minimum(r * a, c * a).sum() / mask.sum()


@wrong("ppo_clip", "log r is taken for r - 1", shows="gradient")
def first_order_ratio(log_prob, old_log_prob, advantages, mask):
    r = 1 + torch.where(mask, log_prob - old_log_prob, 0)
    a = torch.where(mask, advantages, 0)
    return -clipped(r, a, 0.8, 1.2).sum() / mask.sum()


@wrong(
    "ppo_clip",
    "probabilities are used where log-probabilities were meant: exp is missing",
)
def ratio_of_log_probs(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob / (old_log_prob - 1e-6), 1)
    a = torch.where(mask, advantages, 0)
    return -clipped(r, a, 0.8, 1.2).sum() / mask.sum()


@wrong("dapo", "A > 0 is clipped at 1.28, A < 0 is not clipped at all")
def losers_unclipped(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    t = torch.where(a > 0, r.clamp(max=1.28), r) * a
    return -t.sum() / mask.sum()


@wrong("dapo", "a response that hits a bound at one token is dropped whole")
def response_dropped_at_a_clip(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    hit = ((r > 1.28) & (a > 0) | (r < 0.8) & (a < 0)).any(1, keepdim=True)
    return -torch.where(hit, 0, r * a).sum() / mask.sum()


@wrong(
    "grpo", "the lengths are those of the batch in rotated order: a collator's mistake"
)
def lengths_of_a_neighbor(log_prob, old_log_prob, advantages, mask):
    n = mask.sum(1).roll(1)
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    return -(clipped(r, a, 0.8, 1.2).sum(1) / n).mean()


@wrong("grpo", "|o| is counted as one more than it is")
def one_token_too_many(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    return -(clipped(r, a, 0.8, 1.2).sum(1) / (mask.sum(1) + 1)).mean()


@wrong("grpo", "|o| is at least 8")
def at_least_eight_tokens(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    n = mask.sum(1).clamp(min=8)
    return -(clipped(r, a, 0.8, 1.2).sum(1) / n).mean()


@wrong("grpo", "|o| counts the columns up to the last token, tool output included")
def length_with_tool_output(log_prob, old_log_prob, advantages, mask):
    T = mask.shape[1]
    last = T - mask.flip(1).int().argmax(1)
    first = mask.int().argmax(1)
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    t = clipped(r, a, 0.8, 1.2).sum(1)
    return -(t / (last - first)).mean()


@wrong("grpo", "responses with A = 0 are left out of the mean over responses")
def undecided_prompts_not_counted(log_prob, old_log_prob, advantages, mask):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    t = clipped(r, a, 0.8, 1.2).sum(1) / mask.sum(1)
    return -t.sum() / (a != 0).any(1).sum().clamp(min=1)


@wrong("grpo", "the KL term is k1, whose expected gradient is 0", beta=0.04)
def k1_as_the_penalty(
    log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04
):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    kl = torch.where(mask, log_prob - ref_log_prob, 0)
    t = clipped(r, a, 0.8, 1.2) - beta * kl
    return -(t.sum(1) / mask.sum(1)).mean()


@wrong("grpo", "k3 is computed with π_θ/π_ref in place of π_ref/π_θ", beta=0.04)
def k3_the_other_way(log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    d = torch.where(mask, log_prob - ref_log_prob, 0)
    t = clipped(r, a, 0.8, 1.2) - beta * (d.exp() - d - 1)
    return -(t.sum(1) / mask.sum(1)).mean()


@wrong(
    "grpo", "the KL term is added to J: it pushes away from the reference", beta=0.04
)
def kl_with_the_wrong_sign(
    log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04
):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    d = torch.where(mask, ref_log_prob - log_prob, 0)
    t = clipped(r, a, 0.8, 1.2) + beta * (d.exp() - d - 1)
    return -(t.sum(1) / mask.sum(1)).mean()


@wrong("grpo", "the KL term is taken to π_old, not to the reference", beta=0.04)
def kl_to_the_old_policy(
    log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04
):
    x = torch.where(mask, log_prob - old_log_prob, 0)
    r, d = x.exp(), -x
    a = torch.where(mask, advantages, 0)
    t = clipped(r, a, 0.8, 1.2) - beta * (d.exp() - d - 1)
    return -(t.sum(1) / mask.sum(1)).mean() + 0 * ref_log_prob[mask].sum()


@wrong("grpo", "the KL term is multiplied by the ratio", beta=0.04)
def kl_times_the_ratio(
    log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04
):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    d = torch.where(mask, ref_log_prob - log_prob, 0)
    t = clipped(r, a, 0.8, 1.2) - beta * r * (d.exp() - d - 1)
    return -(t.sum(1) / mask.sum(1)).mean()


@wrong("grpo", "the KL term of good responses alone", beta=0.1)
def kl_of_winners(log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.1):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    d = torch.where(mask, ref_log_prob - log_prob, 0)
    kl = torch.where(a > 0, d.exp() - d - 1, 0)
    t = clipped(r, a, 0.8, 1.2) - beta * kl
    return -(t.sum(1) / mask.sum(1)).mean()


@wrong(
    "grpo", "the KL term is a mean over tokens beside a mean over responses", beta=0.04
)
def kl_by_tokens(log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    d = torch.where(mask, ref_log_prob - log_prob, 0)
    pg = (clipped(r, a, 0.8, 1.2).sum(1) / mask.sum(1)).mean()
    return -pg + beta * (d.exp() - d - 1).sum() / mask.sum()


@wrong("grpo", "the KL term is clamped to 1 per token", beta=0.04)
def kl_clamped_to_one(
    log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04
):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    d = torch.where(mask, ref_log_prob - log_prob, 0)
    kl = (d.exp() - d - 1).clamp(max=1)
    t = clipped(r, a, 0.8, 1.2) - beta * kl
    return -(t.sum(1) / mask.sum(1)).mean()


@wrong(
    "dr_grpo",
    "the KL term is subtracted inside the minimum, from the unclipped side",
    beta=0.1,
)
def kl_inside_the_minimum(
    log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.1
):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    d = torch.where(mask, ref_log_prob - log_prob, 0)
    kl = d.exp() - d - 1
    t = torch.minimum(r * a - beta * kl, r.clamp(0.8, 1.2) * a)
    return -t.sum(1).mean()


@wrong("reinforce_pp_baseline", "the penalty is k3, the paper's is k2", beta=0.05)
def k3_for_k2(log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.05):
    r, a = ratios(mask, log_prob, old_log_prob, advantages)
    d = torch.where(mask, ref_log_prob - log_prob, 0)
    t = clipped(r, a, 0.8, 1.2) - beta * (d.exp() - 1 - d)
    return -(t.sum(1) / mask.sum(1)).mean()


@torch.jit.script
def scripted_terms(
    lp: torch.Tensor, old: torch.Tensor, a: torch.Tensor, m: torch.Tensor
):
    """Return DAPO's loss; right in eager mode."""
    d = (lp - old).masked_fill(m.logical_not(), 0.0)
    r = torch.exp(d)
    a = a.masked_fill(m.logical_not(), 0.0)
    return torch.max(-a * r, -a * torch.clamp(r, 0.8, 1.28)).sum() / m.sum()


@wrong(
    "dapo",
    "TorchScript's derivative of max is 0 at a tie: nothing trains within the window",
)
def by_torchscript(log_prob, old_log_prob, advantages, mask):
    return scripted_terms(log_prob, old_log_prob, advantages, mask)
