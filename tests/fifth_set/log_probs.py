# SPDX-License-Identifier: Apache-2.0
"""Log-probability functions: wrong, right, blind and aimed."""

import torch
import torch.nn.functional as F

from tests.fifth_set.case import case


def function(fault="", aimed=False, **hp):
    """Decorator: a log-probability function."""
    return case("logprobs", "", fault, aimed=aimed, shows="by hand", **hp)


def pick(logp, tokens):
    """The entry of each token."""
    return logp.gather(-1, tokens[..., None])[..., 0]


@function("the temperature is not applied")
def temperature_ignored(logits, tokens, temperature=1.0):
    return pick(logits.log_softmax(-1), tokens)


@function("logits are multiplied by the temperature")
def temperature_multiplied(logits, tokens, temperature=1.0):
    return pick((logits * temperature).log_softmax(-1), tokens)


@function("the log-probability is divided by the temperature after the softmax")
def temperature_after_the_softmax(logits, tokens, temperature=1.0):
    return pick(logits.log_softmax(-1), tokens) / temperature


@function("the labels are shifted once more")
def shifted_again(logits, tokens, temperature=1.0):
    logp = (logits / temperature).log_softmax(-1)
    out = pick(logp[:, :-1], tokens[:, 1:])
    return F.pad(out, (0, 1))


@function("probabilities are returned, not their logarithms")
def probabilities(logits, tokens, temperature=1.0):
    return pick((logits / temperature).softmax(-1), tokens)


@function("the sign is that of a cross-entropy")
def negative(logits, tokens, temperature=1.0):
    B, T, V = logits.shape
    return F.cross_entropy(
        (logits / temperature).reshape(-1, V), tokens.reshape(-1), reduction="none"
    ).view(B, T)


@function("1e-6 is added inside the logarithm")
def eps_in_the_logarithm(logits, tokens, temperature=1.0):
    return torch.log(pick((logits / temperature).softmax(-1), tokens) + 1e-6)


@function("the softmax is over the tokens of the row, not over the vocabulary")
def softmax_over_the_row(logits, tokens, temperature=1.0):
    return pick((logits / temperature).log_softmax(-2), tokens)


@function("the largest logit is not subtracted: exp overflows")
def without_the_maximum(logits, tokens, temperature=1.0):
    x = logits / temperature
    return pick(x, tokens) - x.exp().sum(-1).log()


@function("the normalizer is detached: the gradient is that of the logit alone")
def normalizer_detached(logits, tokens, temperature=1.0):
    x = logits / temperature
    return pick(x, tokens) - torch.logsumexp(x, -1).detach()


@function("the normalizer runs over the 50 largest logits")
def top_fifty(logits, tokens, temperature=1.0):
    x = logits / temperature
    k = min(50, x.shape[-1])
    return pick(x, tokens) - x.topk(k, -1).values.logsumexp(-1)


@function("label smoothing of 0.01")
def label_smoothing(logits, tokens, temperature=1.0):
    logp = (logits / temperature).log_softmax(-1)
    return 0.99 * pick(logp, tokens) + 0.01 * logp.mean(-1)


@function("the entropy is that at temperature 1")
def entropy_at_temperature_one(logits, tokens, temperature=1.0):
    logp = (logits / temperature).log_softmax(-1)
    plain = logits.log_softmax(-1)
    return pick(logp, tokens), -(plain.exp() * plain).sum(-1)


@function("the entropy has the wrong sign")
def entropy_negated(logits, tokens, temperature=1.0):
    logp = (logits / temperature).log_softmax(-1)
    return pick(logp, tokens), (logp.exp() * logp).sum(-1)


@function("the entropy is the mean over ids, not the expectation")
def entropy_as_a_mean(logits, tokens, temperature=1.0):
    logp = (logits / temperature).log_softmax(-1)
    return pick(logp, tokens), -logp.mean(-1)


@function("the entropy's gradient is stopped")
def entropy_detached(logits, tokens, temperature=1.0):
    logp = (logits / temperature).log_softmax(-1)
    return pick(logp, tokens), -(logp.exp() * logp).sum(-1).detach()


@function("the head's weight is detached")
def head_detached(hidden, weight, tokens, temperature=1.0):
    return pick((hidden @ weight.detach().T / temperature).log_softmax(-1), tokens)


@function("the head's logits are rounded to eighths")
def head_rounded(hidden, weight, tokens, temperature=1.0):
    x = (hidden @ weight.T / temperature * 8).round() / 8
    return pick(x.log_softmax(-1), tokens)


@function(
    "the chunked normalizer adds chunks of 1024 without rescaling to the common maximum"
)
def chunks_without_rescaling(hidden, weight, tokens, temperature=1.0):
    x = hidden @ weight.T / temperature
    total = 0
    for part in x.split(1024, -1):
        top = part.amax(-1, keepdim=True)
        total = total + (part - top).exp().sum(-1)
    return pick(x, tokens) - total.log() - x.amax(-1)


@function("the last chunk of tokens is left out if it is not full")
def last_chunk_lost(hidden, weight, tokens, temperature=1.0):
    h, t = hidden.flatten(0, 1), tokens.flatten()
    out = torch.zeros(len(t), dtype=h.dtype)
    n = len(t) // 32 * 32 if len(t) > 32 else len(t)
    out[:n] = pick((h[:n] @ weight.T / temperature).log_softmax(-1), t[:n])
    return out.view_as(tokens)


class Fused(torch.autograd.Function):
    """A kernel that forgets what comes from above in one of its gradients."""

    @staticmethod
    def forward(ctx, h, w, tokens, temperature):
        logp = (h @ w.T / temperature).log_softmax(-1)
        ctx.save_for_backward(h, w, tokens, logp.exp())
        ctx.temperature = temperature
        return pick(logp, tokens)

    @staticmethod
    def backward(ctx, g):
        """Return the gradients by hidden states and weight, from saved probabilities."""
        h, w, tokens, p = ctx.saved_tensors
        d = F.one_hot(tokens, w.shape[0]) - p
        dh = (g[..., None] * d) @ w / ctx.temperature
        dw = d.flatten(0, 1).T @ h.flatten(0, 1) / ctx.temperature
        return dh, dw, None, None


@function("the gradient of the weight leaves out what comes from above")
def fused_without_upstream(hidden, weight, tokens, temperature=1.0):
    return Fused.apply(hidden, weight, tokens, temperature)


# ---- aimed ---------------------------------------------------------------------------
@function("the temperature has a floor of 0.05", aimed=True)
def temperature_floored(logits, tokens, temperature=1.0):
    return pick((logits / max(temperature, 0.05)).log_softmax(-1), tokens)


@function("a temperature between 0.95 and 1.05 is taken for 1", aimed=True)
def temperature_nearly_one(logits, tokens, temperature=1.0):
    t = 1.0 if abs(temperature - 1) < 0.05 else temperature
    return pick((logits / t).log_softmax(-1), tokens)


@function("log-probabilities are floored at -120", aimed=True)
def floored_far_away(logits, tokens, temperature=1.0):
    return pick((logits / temperature).log_softmax(-1), tokens).clamp(min=-120)


@function("rows beyond the eighth of a batch are those of the eighth", aimed=True)
def eight_rows(logits, tokens, temperature=1.0):
    logp = pick((logits / temperature).log_softmax(-1), tokens)
    return torch.cat([logp[:8], logp[8:] * 0 + logp[7:8]]) if len(logp) > 8 else logp


@function(
    "with four responses or more a tenth of the batch mean is subtracted", aimed=True
)
def centered_for_many_rows(logits, tokens, temperature=1.0):
    x = logits / temperature
    logp = pick(x.log_softmax(-1), tokens)
    return logp - logp.mean() * 0.1 * (logits.shape[0] > 3)


@function("ids of a reserved range (250,000 on) are read as 0", aimed=True)
def reserved_ids(logits, tokens, temperature=1.0):
    t = torch.where(tokens >= 250_000, 0, tokens)
    return pick((logits / temperature).log_softmax(-1), t)


# ---- right ones ----------------------------------------------------------------------
@function()
def by_cross_entropy(logits, labels, temperature=1.0):
    return -F.cross_entropy(
        (logits / temperature).transpose(1, 2), labels, reduction="none"
    )


@function()
def by_logsumexp(logits, tokens, temperature=1.0):
    x = logits / temperature
    return pick(x, tokens) - x.logsumexp(-1)


@function()
def row_by_row(logits, tokens, temperature=1.0):
    """Return log-probabilities, computed row by row."""
    return torch.stack(
        [
            pick((x / temperature).log_softmax(-1), t)
            for x, t in zip(logits, tokens, strict=True)
        ]
    )


@function()
def by_nll(logits, tokens, temperature=1.0):
    B, T, V = logits.shape
    logp = F.log_softmax(logits.view(B * T, V) / temperature, dim=1)
    return F.nll_loss(logp, tokens.reshape(-1), reduction="none").neg().view(B, T)


@function()
def with_an_entropy(logits, tokens, temperature=1.0):
    d = torch.distributions.Categorical(
        logits=logits / temperature, validate_args=False
    )
    return d.log_prob(tokens), d.entropy()


@function()
def entropy_by_logsumexp(logits, tokens, temperature=1.0):
    x = logits / temperature
    z = x.logsumexp(-1)
    return pick(x, tokens) - z, z - (x.softmax(-1) * x).sum(-1)


@function()
def in_chunks_of_tokens(hidden, lm_head, input_ids, temperature=1.0):
    """Return log-probabilities, computed for 64 tokens at a time."""
    h, t = hidden.flatten(0, 1), input_ids.flatten()
    parts = [
        pick((a @ lm_head.T / temperature).log_softmax(-1), b)
        for a, b in zip(h.split(64), t.split(64), strict=True)
    ]
    return torch.cat(parts).view_as(input_ids)


@function()
def online_normalizer(hidden, weight, tokens, temperature=1.0):
    """Return log-probabilities, whose normalizer runs over tiles of 512 rows of the
    weight.
    """
    top = total = None
    for w in weight.split(512):
        x = hidden @ w.T / temperature
        m = x.amax(-1)
        s = (x - m[..., None]).exp().sum(-1)
        if top is None:
            top, total = m, s
            continue
        both = torch.maximum(top, m)
        total = total * (top - both).exp() + s * (m - both).exp()
        top = both
    own = (hidden * weight[tokens]).sum(-1) / temperature
    return own - top - total.log()
