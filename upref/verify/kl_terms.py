# SPDX-License-Identifier: Apache-2.0
"""KL terms of a loss: those that are known, right and wrong, and the slope of each.

A term is subtracted from J with a coefficient. It does not depend on A, so it is what is
left of the gradient of a loss where every A is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upref import kl
from upref.ops import exp, sg
from upref.rollouts import Rollouts


@dataclass(frozen=True)
class KLForm:
    """A KL term that is not k(π_θ, π_ref), for any estimator k.

    Attributes:
        id: of the fault.
        own_words: the fault where k is the objective's own estimator.
        words: the form where k is another estimator.
        other: the role of the policy that π_θ is compared with.
        make: from k to the term, a function of (log π_θ, log π_ref, log π_old, log μ).
    """

    id: str
    own_words: str
    words: str
    other: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]


KL_FORMS = (
    KLForm(
        "kl-exchanged",
        "π_θ and π_ref are exchanged in the KL term ({})",
        "π_θ and π_ref exchanged",
        "logp_ref",
        lambda k: lambda x, ref, old, mu: k(ref, x),
    ),
    KLForm(
        "kl-times-ratio",
        "the KL term ({}) is multiplied by the ratio",
        "times the ratio",
        "logp_ref",
        lambda k: lambda x, ref, old, mu: k(x, ref) * exp(x - old),
    ),
    KLForm(
        "kl-times-constant-ratio",
        "the KL term ({}) is multiplied by the ratio, which is a constant",
        "times the ratio, a constant",
        "logp_ref",
        lambda k: lambda x, ref, old, mu: k(x, ref) * sg(exp(x - old)),
    ),
    KLForm(
        "kl-to-old-policy",
        "the KL term ({}) is to π_old, not to π_ref",
        "to π_old",
        "logp_old",
        lambda k: lambda x, ref, old, mu: k(x, old),
    ),
    KLForm(
        "kl-to-sampler",
        "the KL term ({}) is to μ, the sampler's policy",
        "to μ",
        "logp_sampler",
        lambda k: lambda x, ref, old, mu: k(x, mu),
    ),
)


def term_of_estimator(k: Callable[..., Any]) -> Callable[..., Any]:
    """Return an estimator as a KL term, a function of log π_old and log μ too.

    Args:
        k: the estimator, a function of (log π_θ, log π_ref).
    """
    return lambda x, ref, old, mu: k(x, ref)


# the gradient of k1 is 1, whatever the other policy: it has no form of another one
FORMS_BY_NAME = {
    f"{name} ({form.words})": (k, form)
    for name, k in kl.ESTIMATORS.items()
    for form in KL_FORMS
    if name != "k1" or form.other == "logp_ref"
}
KL_TERMS = {name: term_of_estimator(k) for name, k in kl.ESTIMATORS.items()}
KL_TERMS |= {name: form.make(k) for name, (k, form) in FORMS_BY_NAME.items()}
# the name in KL_TERMS of each estimator of upref.kl
TERM_OF = {name: name for name in kl.ESTIMATORS} | {"k3_ratio": "k3 (times the ratio)"}


def term_slope(f: str | Callable[..., Tensor], batch: Rollouts) -> Tensor:
    """Return d f(lp, lp_ref, lp_old, log μ) / d lp of each token, 0 on masked slots.

    Args:
        f: the term, or its name in KL_TERMS.
        batch: the batch. Where it has no log π_ref or log μ, log π_old takes its place.

    Returns:
        [B, T].
    """
    return slope_of_term(KL_TERMS[f] if isinstance(f, str) else f, batch)


def possible_terms(first: str, reads: frozenset[str]) -> list[str]:
    """Return the names of the KL terms that a loss can have.

    Args:
        first: the name that comes first. After it come the usual estimators.
        reads: the roles of the inputs that the loss reads. A term to a policy whose
            log-probabilities it does not read is left out.

    Returns:
        Names of KL_TERMS.
    """

    def is_possible(name: str) -> bool:
        """Return whether the loss reads the other policy of this term."""
        if name == "k1":  # its gradient is the same for every other policy
            return True
        if name not in FORMS_BY_NAME:
            return "logp_ref" in reads
        _, form = FORMS_BY_NAME[name]
        return form.other == "logp_old" or form.other in reads

    return sorted(
        filter(is_possible, KL_TERMS),
        key=lambda name: (name != first, name not in kl.ESTIMATORS),
    )


def kl_slope(estimator: str, batch: Rollouts) -> Tensor:
    """Return dKL/dlp of each token, 0 on masked slots.

    Args:
        estimator: a key of upref.kl.ESTIMATORS, or one with a ratio.
        batch: the batch, with a reference policy.

    Returns:
        [B, T].
    """
    assert batch.logp_ref is not None

    def term(lp: Tensor, ref: Tensor, old: Tensor, mu: Tensor) -> Tensor:
        """Return the KL of each token by the estimator, which does not read mu."""
        return kl.per_token(estimator, lp, ref, old)

    return slope_of_term(term, batch)


def slope_of_term(term: Callable[..., Tensor], batch: Rollouts) -> Tensor:
    """Differentiate a term of J that does not depend on A. Nothing is written to the
    batch.

    Args:
        term: a function of (lp, lp_ref, lp_old, log μ), each [B, T].
        batch: the batch; π_old stands for a policy that it lacks.

    Returns:
        d term / d lp of each token, 0 on masked slots, [B, T].
    """
    lp = torch.where(batch.mask, batch.logp, 0).detach().requires_grad_()
    others = (
        batch.logp_old if x is None else x
        for x in (batch.logp_ref, batch.logp_old, batch.logp_sampler)
    )
    value = term(lp, *(torch.where(batch.mask, x, 0) for x in others))
    if not value.requires_grad:
        return torch.zeros_like(lp)
    return torch.autograd.grad(value.sum(), lp)[0]


def term_coefficient(weights: Tensor, slope: Tensor) -> float:
    """Find the coefficient of a term that is subtracted from J, by least squares.

    Args:
        weights: dJ/dlp of tokens on which nothing but the term acts, [n].
        slope: d term / d lp of the same tokens, [n].

    Returns:
        The coefficient, 0 where the term has no slope.
    """
    if not slope.any():
        return 0.0
    return -(weights @ slope / (slope @ slope)).item()
