# SPDX-License-Identifier: Apache-2.0
import itertools
from dataclasses import replace

import pytest
import torch

from upref import kl
from upref.aggregation import aggregate
from upref.errors import InputError
from upref.registry import get
from upref.transforms import unbiased_kl
from upref.verify.kl import check_kl
from upref.weights.batches import batch


def test_values_against_definitions():
    lp, ref = (
        torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64),
        torch.tensor([-1.5, -0.5, -0.5], dtype=torch.float64),
    )
    ratio = (ref - lp).exp()
    torch.testing.assert_close(kl.k1(lp, ref), -ratio.log())
    torch.testing.assert_close(kl.k2(lp, ref), ratio.log() ** 2 / 2)
    torch.testing.assert_close(kl.k3(lp, ref), ratio - 1 - ratio.log())


def test_k3_is_accurate_where_the_naive_form_is_not():
    d = torch.tensor([1e-3, -1e-3, 1e-2])
    exact = (d.double().expm1() - d.double()).float()
    stable, naive = kl.k3(-d, torch.zeros(3)), d.exp() - 1 - d
    assert (
        ((stable - exact).abs() / exact).max()
        < 1e-3
        < ((naive - exact).abs() / exact).max()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_k3_stays_finite(dtype):
    lp = torch.tensor([-1000.0, -0.0], dtype=dtype, requires_grad=True)
    kl.k3(lp, torch.tensor([-0.0, -1000.0], dtype=dtype)).sum().backward()
    assert lp.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "estimator"),
    [("grpo", "k3"), ("up_grpo", "k3"), ("reinforce_pp_baseline", "k2")],
)
def test_the_term_has_the_objectives_own_aggregation(name, estimator):
    o = get(name)
    b = batch(o)
    b = replace(b, logp_ref=(b.logp - 0.3).masked_fill(~b.mask, float("nan")))
    k = kl.ESTIMATORS[estimator](b.logp, b.logp_ref)
    torch.testing.assert_close(o(b, beta=0.1), o(b) - 0.1 * aggregate(k, b.mask, o.agg))
    parts = sum(o(part, beta=0.1) for part in b.split(4))
    torch.testing.assert_close(parts, o(b, beta=0.1))


def test_masked_slots_are_inert_and_the_reference_constant():
    """NaN in masked slots changes no gradient by log π_θ, and the reference gets none."""
    o = get("grpo")
    b = batch(o)
    ref = (b.logp_old - 0.3).requires_grad_()
    bad = replace(
        b, logp=b.logp.masked_fill(~b.mask, float("nan")).requires_grad_(), logp_ref=ref
    )
    o.loss(bad, beta=0.1).backward()
    calm = replace(
        b,
        logp=b.logp.masked_fill(~b.mask, -1.0).requires_grad_(),
        logp_ref=ref.detach().nan_to_num(),
    )
    o.loss(calm, beta=0.1).backward()
    assert (
        torch.equal(bad.logp.grad, calm.logp.grad)
        and (bad.logp.grad[~b.mask] == 0).all()
    )
    assert ref.grad is None


def test_k3_beyond_overflow_stops_and_does_not_push_away():
    lp = torch.tensor([-87.0, -89.0, -200.0], requires_grad=True)
    kl.k3(lp, torch.zeros(3)).sum().backward()
    assert lp.grad[0] < -1e30 and (lp.grad[1:] == 0).all()


def test_the_ratio_makes_the_gradient_of_k3_that_of_the_divergence_itself():
    """Enumerated over three tokens, off policy: E_old ∇(r k3) = ∇KL(π ‖ ref), and
    without the ratio it is another.
    """
    z = torch.tensor([0.3, -0.8, 0.1], dtype=torch.float64, requires_grad=True)
    old, ref = (
        torch.tensor(x, dtype=torch.float64).log_softmax(0)
        for x in ([1.0, 0.2, -0.5], [0.1, 0.9, 0.4])
    )
    lp = z.log_softmax(0)

    def slope(value):
        return torch.autograd.grad(value, z, retain_graph=True)[0]

    divergence = slope((lp.exp() * (lp - ref)).sum())
    torch.testing.assert_close(
        slope((old.exp() * kl.k3_ratio(lp, ref, old)).sum()), divergence
    )
    assert (slope((old.exp() * kl.k3(lp, ref)).sum()) - divergence).abs().max() > 0.05
    torch.testing.assert_close(
        (old.exp() * kl.k3_ratio(lp, ref, old)).sum(), (lp.exp() * (lp - ref)).sum()
    )


class TinyPolicy:
    """All responses of a policy over three tokens, at most three of them; token 0 ends
    a response.
    """

    def __init__(self, seed=0):
        """Draw logits of two policies over three tokens, for every prefix of up to two
        tokens; token 0 ends a response. List every response.
        """
        draw = torch.Generator().manual_seed(seed)
        steps = [itertools.product((1, 2), repeat=n) for n in range(3)]
        self.prefixes = [prefix for of_length in steps for prefix in of_length]
        shape = len(self.prefixes), 3
        self.logits = torch.randn(shape, generator=draw, dtype=torch.float64)
        self.logits.requires_grad_()
        reference = torch.randn(shape, generator=draw, dtype=torch.float64)
        self.reference = reference.log_softmax(1)
        self.policy = self.logits.log_softmax(1)
        ended = [(*prefix, 0) for prefix in self.prefixes]
        whole = itertools.product((1, 2), repeat=3)
        self.responses = [*ended, *whole]

    def tokens(self, table, response):
        """Return log-probabilities of the tokens of a response, [T]."""
        rows = [self.prefixes.index(response[:t]) for t in range(len(response))]
        return table[rows, list(response)]

    def mean(self, function):
        """Return the mean of function(lp, lp_ref) over responses, which are held fixed."""
        total = 0
        for response in self.responses:
            lp = self.tokens(self.policy, response)
            lp_ref = self.tokens(self.reference, response)
            total = total + lp.sum().exp().detach() * function(lp, lp_ref)
        return total

    def slope(self, value):
        (gradient,) = torch.autograd.grad(value, self.logits, retain_graph=True)
        return gradient

    def divergence(self):
        """Return KL(π_θ ‖ π_ref) of responses."""
        total = 0
        for response in self.responses:
            lp = self.tokens(self.policy, response)
            lp_ref = self.tokens(self.reference, response)
            total = total + lp.sum().exp() * (lp - lp_ref).sum()
        return total

    def at_fixed_prefixes(self):
        """Return the sum of KL(π_θ ‖ π_ref) at each prefix times how often the prefix
        is reached, which is held fixed.
        """
        every = self.policy.exp() * (self.policy - self.reference)
        total = 0
        for prefix, token_mean in zip(self.prefixes, every.sum(1), strict=True):
            lp = self.tokens(self.policy, prefix) if prefix else torch.zeros(1)
            total = total + lp.sum().exp().detach() * token_mean
        return total


def cosine(x, y):
    return torch.cosine_similarity(x.flatten(), y.flatten(), dim=0).item()


AS_LOSS = {
    "k2": kl.k2,
    "k3_ratio": lambda lp, lp_ref: kl.k3_ratio(lp, lp_ref, lp.detach()),
}


@pytest.mark.parametrize("name", AS_LOSS)
def test_the_gradient_of_an_estimator_is_of_a_token_after_a_given_prefix(name):
    """As a loss it has the gradient of the divergence where prefixes are held fixed,
    and points elsewhere than that of responses.
    """
    tiny = TinyPolicy()
    found = tiny.slope(tiny.mean(lambda lp, ref: AS_LOSS[name](lp, ref).sum()))
    torch.testing.assert_close(found, tiny.slope(tiny.at_fixed_prefixes()))
    assert cosine(found, tiny.slope(tiny.divergence())) == pytest.approx(0.51, abs=0.01)


def test_the_reward_has_the_gradient_of_the_divergence_of_responses():
    """Find that k1 as a reward of the later tokens has the right gradient, and k1 in a
    loss none.
    """
    tiny = TinyPolicy()
    right = tiny.slope(tiny.divergence())

    def rest_of_response(lp, lp_ref):
        later = kl.k1(lp, lp_ref).detach().flip(0).cumsum(0).flip(0)
        return (later * lp).sum()

    torch.testing.assert_close(tiny.slope(tiny.mean(rest_of_response)), right)
    k1 = tiny.mean(lambda lp, ref: kl.k1(lp, ref).sum())
    torch.testing.assert_close(k1, tiny.divergence())
    torch.testing.assert_close(tiny.slope(k1), torch.zeros_like(right))


def test_a_report_says_of_what_the_gradient_is():
    report = check_kl(kl.k2, "k2")
    assert "of one token after a given prefix" in " ".join(report.assumptions)


def test_the_unbiased_term_is_of_grpo_with_the_ratio():
    o, b = get("unbiased_kl(grpo)"), batch(get("grpo"))
    b = replace(b, logp_ref=(b.logp_old - 0.3).masked_fill(~b.mask, float("nan")))
    term = kl.k3_ratio(b.logp, b.logp_ref, b.logp_old)
    torch.testing.assert_close(
        o(b, beta=0.1), get("grpo")(b) - 0.1 * aggregate(term, b.mask, o.agg)
    )


@pytest.mark.parametrize("base", ["dapo", None])
def test_a_ratio_needs_a_kl_term(base):
    with pytest.raises(InputError, match="takes an Objective with a KL term"):
        unbiased_kl(get(base) if base else None)
