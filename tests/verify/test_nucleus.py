# SPDX-License-Identifier: Apache-2.0
"""upref.nucleus, and check_logprobs with top_k and top_p."""

import pytest
import torch

import upref
from upref import nucleus
from upref.cli import main

P = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()


def test_the_token_that_crosses_is_kept():
    assert nucleus.kept(P, top_p=0.7 - 1e-9).tolist() == [True, True, False, False]
    assert nucleus.kept(P, top_p=0.7 + 1e-9).tolist() == [True, True, True, False]
    assert nucleus.kept(P, top_p=1e-9).tolist() == [True, False, False, False]
    assert nucleus.kept(P).all()


def test_two_orders_of_the_cuts():
    """0.4 / 0.9 + 0.3 / 0.9 = 0.78 is enough for 0.75 of three tokens, 0.7 is not."""
    cuts = {"top_k": 3, "top_p": 0.75}
    assert nucleus.kept(P, **cuts).tolist() == [True, True, False, False]
    assert nucleus.kept_jointly(P, **cuts).tolist() == [True, True, True, False]


def test_the_temperature_acts_before_the_cut():
    assert nucleus.kept(P, top_p=0.65).sum() == 2
    assert nucleus.kept(P, top_p=0.65, temperature=4.0).sum() == 3


def test_ties_of_top_k_are_kept_and_the_rest_is_normalized():
    z = torch.tensor([[2.0, 1.0, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    keep = nucleus.kept(z, top_k=2)
    assert keep.tolist() == [[True, True, True, False]]
    lp = nucleus.nucleus_log_probs(z, torch.tensor([1]), keep)
    assert torch.allclose(lp.exp(), 1 / (2 + torch.e * torch.ones(1)).double())
    (g,) = torch.autograd.grad(lp.sum(), z)
    assert g[0, 3] == 0 and torch.allclose(g.sum(), torch.zeros(()).double())
    outside = nucleus.nucleus_log_probs(z, torch.tensor([3]), keep)
    assert outside.item() == float("-inf")


@pytest.mark.parametrize(
    "settings", [{"top_k": 0}, {"top_k": 1.5}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_cuts_that_are_none_are_refused(settings):
    with pytest.raises(upref.InputError, match=r"top_[kp] must be"):
        nucleus.kept(P, **settings)
    with pytest.raises(upref.InputError, match=r"top_[kp] must be"):
        upref.check_logprobs(right, **settings)


# ---- functions of other people's kind --------------------------------------------------
def keep_of(z, top_k=None, top_p=1.0):
    """Return which ids stay after top-k and top-p, as in vLLM's torch sampler: in
    ascending order, what cumulates to at most 1 - p goes.
    """
    z = z.detach()
    s, order = z.sort(-1)
    if top_k:
        s = s.masked_fill(s < s[..., -top_k, None], -torch.inf)
    drop = s.softmax(-1).cumsum(-1) <= 1 - top_p
    drop[..., -1] = False
    kept = ~drop & (s > -torch.inf)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def pick(lp, tokens):
    return lp.gather(-1, tokens[..., None])[..., 0]


def cut(z, keep):
    return z.masked_fill(~keep, -torch.inf).log_softmax(-1)


def right(logits, tokens, temperature, top_k=None, top_p=1.0):
    z = logits / temperature
    return pick(cut(z, keep_of(z, top_k, top_p)), tokens)


def in_float32(logits, tokens, temperature, top_k=None, top_p=1.0):
    return right(logits.float(), tokens, temperature, top_k, top_p)


def built_in(logits, tokens, temperature):
    return right(logits, tokens, temperature, 5, 0.9)


def with_entropy(logits, tokens, temperature, top_k, top_p):
    z = logits / temperature
    lp = cut(z, keep_of(z, top_k, top_p))
    return pick(lp, tokens), -(lp.exp() * lp.masked_fill(lp.isinf(), 0)).sum(-1)


def of_hidden(hidden, weight, tokens, temperature, top_k, top_p):
    return right(hidden @ weight.T, tokens, temperature, top_k, top_p)


def jointly(logits, tokens, temperature, top_k, top_p):
    z = logits / temperature
    return pick(cut(z, keep_of(z, top_k) & keep_of(z, top_p=top_p)), tokens)


def some_of_ties(logits, tokens, temperature, top_k, top_p):
    z = logits / temperature
    top = z.topk(top_k).indices
    z = z.masked_fill(torch.ones_like(z).scatter(-1, top, 0) > 0, -torch.inf)
    return pick(cut(z, keep_of(z, top_p=top_p)), tokens)


def label_restored(logits, tokens, temperature, top_k, top_p):
    """Return log-probabilities in which a token that the cut leaves out is counted as
    kept.
    """
    z = logits / temperature
    keep = keep_of(z, top_k, top_p).scatter(-1, tokens[..., None], True)
    return pick(cut(z, keep), tokens)


def not_renormalized(logits, tokens, temperature, top_k, top_p):
    z = logits / temperature
    return pick(
        z.log_softmax(-1).masked_fill(~keep_of(z, top_k, top_p), -torch.inf), tokens
    )


def before_temperature(logits, tokens, temperature, top_k, top_p):
    return pick(cut(logits / temperature, keep_of(logits, top_k, top_p)), tokens)


def in_ascending_order(logits, tokens, temperature, top_k, top_p):
    """Return log-probabilities that keep the least probable tokens: no known fault, and
    every token is left out.
    """
    return pick(
        cut(logits / temperature, ~keep_of(logits / temperature, top_k, top_p)), tokens
    )


def cold(logits, tokens, temperature, top_k, top_p):
    return right(logits, tokens, 1.0, top_k, top_p)


def by_order(logits, tokens, temperature, top_k, top_p, kept):
    """Return log-probabilities after top-k and a top-p by descending order, in which
    kept(p, cumulated p, top_p) says what stays. The most probable id always stays.
    """
    z = logits / temperature
    p, order = cut(z, keep_of(z, top_k)).detach().exp().sort(-1, descending=True)
    keep = kept(p, p.cumsum(-1), top_p)
    keep[..., 0] = True
    return pick(
        cut(z, torch.zeros_like(keep).scatter(-1, order, keep) & keep_of(z, top_k)),
        tokens,
    )


def without_crossing(logits, tokens, temperature, top_k, top_p):
    return by_order(
        logits, tokens, temperature, top_k, top_p, lambda p, mass, top: mass <= top
    )


def one_more(logits, tokens, temperature, top_k, top_p):
    """Return log-probabilities of a nucleus with one id more than needed."""

    def kept(p, mass, top):
        crossed = mass - p < top
        return crossed | crossed.roll(1, -1)

    return by_order(logits, tokens, temperature, top_k, top_p, kept)


def no_top_p(logits, tokens, temperature, top_k, top_p):
    return right(logits, tokens, temperature, top_k)


def no_top_k(logits, tokens, temperature, top_k, top_p):
    return right(logits, tokens, temperature, None, top_p)


def one_k_more(logits, tokens, temperature, top_k, top_p):
    return right(logits, tokens, temperature, min(top_k + 1, logits.shape[-1]), top_p)


def whole_entropy(logits, tokens, temperature, top_k, top_p):
    lp = (logits / temperature).log_softmax(-1)
    return right(logits, tokens, temperature, top_k, top_p), -(lp.exp() * lp).sum(-1)


def whole_gradient(logits, tokens, temperature, top_k, top_p):
    value = right(logits, tokens, temperature, top_k, top_p).detach()
    whole = pick((logits / temperature).log_softmax(-1), tokens)
    return value + whole - whole.detach()


RIGHT = [
    (right, "", {"top_k": 5, "top_p": 0.9}),
    (right, "", {"top_k": 5}),
    (right, "", {"top_p": 0.8}),
    (in_float32, "", {"top_k": 5, "top_p": 0.9}),
    (built_in, "", {"top_k": 5, "top_p": 0.9}),
    (with_entropy, "", {"top_k": 5, "top_p": 0.9}),
    (of_hidden, "", {"top_k": 5, "top_p": 0.9}),
    (jointly, "both cut the whole distribution", {"top_k": 5, "top_p": 0.9}),
    (
        some_of_ties,
        "of two equal logits at the edge of top_k one is kept",
        {"top_k": 5, "top_p": 0.9},
    ),
    (
        label_restored,
        "a token that the cut leaves out does not get -inf",
        {"top_k": 5, "top_p": 0.9},
    ),
]
WRONG = [
    (
        not_renormalized,
        "normalized over the whole vocabulary, not over the tokens that are kept",
    ),
    (before_temperature, "the cut is made before the temperature"),
    (cold, "the temperature is left out"),
    (without_crossing, "the token that crosses top_p is left out"),
    (one_more, "one token behind the one that crosses top_p is kept"),
    (no_top_p, "top_p is left out"),
    (no_top_k, "top_k is left out"),
    (one_k_more, "top_k keeps one token more"),
    (whole_entropy, "the entropy is that of the whole distribution"),
    (
        whole_gradient,
        "the gradient of the log-probabilities is that of the whole distribution",
    ),
]


@pytest.mark.parametrize("fn, says, settings", RIGHT)
def test_a_right_cut_agrees(fn, says, settings):
    report = upref.check_logprobs(fn, **settings)
    assert report, report
    notes = [n.about for n in report.notes]
    assert bool(notes) == bool(says) and says in "".join(notes), notes


@pytest.mark.parametrize("fn, cause", WRONG)
def test_a_wrong_cut_is_named(fn, cause):
    report = upref.check_logprobs(fn, top_k=5, top_p=0.9)
    assert not report
    assert cause in report.failures[0].cause, report


def test_a_cut_of_no_known_kind_gets_no_cause():
    report = upref.check_logprobs(in_ascending_order, top_k=5, top_p=0.9)
    assert not report
    assert not report.failures[0].cause, report


def test_another_built_in_number_is_no_agreement():
    assert not upref.check_logprobs(built_in, top_k=6, top_p=0.9)


def test_the_command_takes_the_cuts(capsys):
    command = ["check", f"{__file__}:with_entropy", "--as-logprobs"]
    assert main([*command, "--hp", "top_k=5", "--hp", "top_p=0.9"]) == 0
    assert "agrees" in capsys.readouterr().out
    assert main(command) == 2
    assert "needs top_k: say what it is, `--hp top_k=20`" in capsys.readouterr().err
    assert main([*command, "--hp", "top_k=5", "--hp", "softcap=3"]) == 2
    assert "without softcap" in capsys.readouterr().err


@pytest.mark.parametrize("top_k", [20, 200])
def test_a_vocabulary_is_larger_than_top_k(top_k):
    """`torch.topk` raises where it is smaller."""

    def by_topk(logits, tokens, temperature, top_k):
        z = logits / temperature
        edge = z.topk(top_k).values[..., -1:]
        return pick(cut(z, z >= edge), tokens)

    report = upref.check_logprobs(by_topk, top_k=top_k)
    assert report, str(report)
