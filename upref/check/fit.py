# SPDX-License-Identifier: Apache-2.0
"""What a foreign gradient is made of: a weight per token times a factor per response, told apart on policy.

On policy the weight of nearly every objective is known (A), so the factors name the aggregation whatever is wrong with
the clipping; divided out, they leave the weights, to be compared regime by regime.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from upref import kl, regimes
from upref.aggregate import Totals, row_weights
from upref.check.adapters import Loss
from upref.regimes import EDGES, OFF_EDGES, anchor, batch
from upref.registry import REDUCE, Objective
from upref.rollouts import Rollouts

EXACT, HABIT, SINGLE = 1e-9, 2e-7, 2e-3  # float64; a 1e-8 in a denominator; a loss that computes in float32


def promised(o: Objective) -> str:
    """The objective's aggregation as row weights of terms per token."""
    own = "seq-mean-token-sum" if o.level == "trajectory" else "seq-mean-token-mean"
    return own if o.agg == "seq-mean" else o.agg


def unit_weights(o: Objective, b: Rollouts, hp: dict[str, Any]) -> Tensor:
    """dJ_t/dlp_t before `promised(o)`, the KL term included."""
    own = {k: v for k, v in hp.items() if k != "beta"}
    w = o.token_weights(b, **own)
    if o.agg == "seq-mean" and o.level != "trajectory":
        w = w * b.mask.sum(-1, keepdim=True)
    if beta := hp.get("beta"):
        assert b.logp_ref is not None
        x = torch.where(b.mask, b.logp, 0).detach().requires_grad_()
        k = kl.ESTIMATORS[o.kl](x, torch.where(b.mask, b.logp_ref, 0)).sum()
        w = w - beta * torch.autograd.grad(k, x)[0]
    return torch.where(b.mask, w, 0)


def _rows(agg: str) -> Callable[[Rollouts], Tensor]:
    def f(b: Rollouts) -> Tensor:
        w = row_weights(agg, b.mask, b.totals or Totals.of(b.mask, b.group))
        return torch.as_tensor(w, dtype=torch.float64).expand(len(b.mask))

    return f


_one = lambda b: torch.ones(len(b.mask), dtype=torch.float64)
_n = lambda b: b.mask.sum(-1).double()
FACTORS: dict[str, Callable[[Rollouts], Tensor]] = {
    **{a: _rows(a) for a in ("token-mean", "group-token-mean", "seq-mean-token-mean", "seq-mean-token-sum")},
    "the mean over the padded width (seq-mean-token-sum-norm by it)": lambda b: _one(b) / b.mask.numel(),
    "a plain sum over all tokens": _one,
    "the sum, not the mean, of the responses' token means": lambda b: 1 / _n(b),
    "token-mean divided once more by the number of responses": lambda b: _rows("token-mean")(b) / len(b.mask),
    "the responses' token means, divided by all tokens": lambda b: 1 / (_n(b) * b.mask.sum()),
    "token-mean of each group, not divided by the number of groups": lambda b: (
        _rows("group-token-mean")(b) * (1 if b.group is None else len(b.group.unique()))
    ),
    "the sum over tokens by the longest response": lambda b: _one(b) / (len(b.mask) * _n(b).max()),
    "the sum over each response divided by the square of its length": lambda b: 1 / (len(b.mask) * _n(b) ** 2),
    "the sum over each response divided by the square root of its length": lambda b: 1 / (len(b.mask) * _n(b).sqrt()),
    "the mean over responses of length-weighted terms": lambda b: _n(b) / len(b.mask),
    "token-mean of length-weighted terms": lambda b: _n(b) / b.mask.sum(),
}


@dataclass
class Case:
    """A loss held against an objective at resolved hyperparameters, its aggregation found."""

    loss: Loss
    o: Objective
    hp: dict[str, Any]
    agg: str = ""  # a key of FACTORS
    k: float = 1.0  # what the gradient is multiplied by on policy, beside the aggregation
    fits: bool = True  # some aggregation explains the on-policy gradient
    tol: float = HABIT
    edges: tuple[float, ...] = EDGES
    wrong: bool = False  # the gradient oracle has failed: what follows from that is not said again

    def expected(self, b: Rollouts) -> Tensor:
        return unit_weights(self.o, b, self.hp)

    def weights(self, b: Rollouts) -> Tensor:
        """The loss's own dJ_t/dlp_t, its aggregation divided out."""
        return self.loss.gradient(b) / self.factors(b)

    def factors(self, b: Rollouts, agg: str = "") -> Tensor:
        return FACTORS[agg or self.agg](self.loss.view(b)).to(b.logp.dtype)[:, None]

    def off(self, b: Rollouts, found: Tensor | None = None) -> Tensor:
        """Relative difference of the weights, 0 on masked slots, infinite where one is not finite."""
        found = self.weights(b) if found is None else found
        expected = self.expected(b)
        return torch.where(b.mask, regimes.off(found, expected, b.adv), 0)

    def grid(self, **options) -> Rollouts:
        return self.ready(batch(self.per_response, **{"edges": self.edges} | options, **self.plain_hp))

    @property
    def plain_hp(self) -> dict[str, Any]:
        return {k: v for k, v in self.hp.items() if k != "beta"}

    @property
    def per_response(self) -> Objective:
        """For the grid alone: one advantage per response where the loss cannot take more."""
        o = self.o
        return o if self.loss.adv_shape == "BT" or o.level in REDUCE else replace(o, agg="seq-mean")

    @property
    def one_adv(self) -> bool:
        return self.o.agg == "seq-mean" or self.loss.adv_shape != "BT"

    def ready(self, b: Rollouts) -> Rollouts:
        """A batch as this loss can know it, see regimes.ready."""
        return self.loss.view(regimes.ready(b))


def fit(loss: Loss, o: Objective, hp: dict[str, Any]) -> Case:
    """The Case: its aggregation named where one explains the on-policy gradient, else the promised one assumed."""
    case = Case(loss, o, o.resolve(hp), promised(o))
    b = case.ready(anchor())
    found, W = loss.gradient(b), case.expected(b)
    A = b.adv
    for among in (b.mask, b.mask & (A > 0), b.mask & (A < 0)):
        use = among & (W.abs() > 1e-6)
        if answer := _explain(case, b, found, W, use):
            case.agg, case.k = answer
            break
    else:
        case.fits = False
    if found[b.mask].abs().max() > 0 and torch.equal(found.float().double(), found):
        off = case.ready(replace(b, logp=b.logp + 1e-3 * b.logp.sin().abs()))
        g = loss.gradient(off)
        if torch.equal(g.float().double(), g):
            case.tol, case.edges = SINGLE, OFF_EDGES
    return case


def _explain(case: Case, b: Rollouts, found: Tensor, W: Tensor, use: Tensor) -> tuple[str, float] | None:
    if not use.any():
        return None
    names = sorted(FACTORS, key=lambda name: name != promised(case.o))
    scaled = []
    for name in names:
        k = (found / (W * case.factors(b, name)))[use]
        if not k.isfinite().all() or k.mean().abs() < 1e-9 or (k - k.mean()).abs().max() > 1e-5 * k.mean().abs():
            continue
        if abs(k.mean() - 1) < 1e-5:
            return name, float(k.mean())
        scaled.append((name, float(k.mean())))
    return scaled[0] if scaled else None
