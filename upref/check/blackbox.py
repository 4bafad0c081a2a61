# SPDX-License-Identifier: Apache-2.0
"""A loss as a black box: its aggregation, its KL term, and its weight w(r, A, π_old) as a curve, every jump located.

The curve is measured on responses of one token, where token, sequence and trajectory ratios are the same number.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from upref import kl
from upref.aggregate import AGGREGATIONS
from upref.check.adapters import Loss
from upref.check.fit import FACTORS, SINGLE, Case
from upref.check.verdict import probe
from upref.curve import alone
from upref.errors import InputError
from upref.regimes import OFF_EDGES, anchor, off, paired
from upref.registry import Objective, get
from upref.rollouts import Rollouts

SIGNS = (1.0, -1.0)
LOG_R = np.unique(np.r_[np.linspace(-8, 8, 49), np.outer((-1, 1), np.geomspace(1e-6, 0.3, 25)).ravel()])
MUS = (0.3, 0.9)  # π_old, beside that of a rare token, where the weight depends on it


class Point(NamedTuple):
    """Where a weight is asked for. unsure: the token has the higher entropy of a response of two, else it is alone."""

    A: float
    r: float
    mu: float
    unsure: bool = False


def neutral() -> Objective:
    """An objective without hyperparameters, so that every framework's loss runs at its own defaults."""
    return replace(get("reinforce"), name="identify", agg="token-mean")


@dataclass
class BlackBox:
    """What the gradients of one loss say about it before any objective is tried."""

    loss: Loss
    case: Case
    agg: str = ""  # a key of FACTORS, "" where none explains the on-policy gradient
    scale: float = 1.0  # what every weight is multiplied by beside it
    kl: str = ""
    beta: float = 0.0
    reads_mu: bool = False
    reads_entropy: bool = False
    coupled: bool = False  # the weight of a token depends on other responses
    random: bool = False
    points: list[Point] = field(default_factory=list)
    weights: np.ndarray = field(default_factory=lambda: np.zeros(0))
    sides: int = 0  # how many of the last points stand beside a jump
    jumps: list[tuple[Point, float]] = field(default_factory=list)  # with the weight halfway through the jump

    def ask(self, points: list[Point]) -> np.ndarray:
        """w = dJ_t/dlp_t at each point, aggregation, scale and KL divided out (π_ref = π_θ)."""
        if self.coupled and len(points) > 1:
            return np.concatenate([self.ask([p]) for p in points])
        out = np.zeros(len(points))
        for unsure in (False, True):
            if at := [i for i, p in enumerate(points) if p.unsure is unsure]:
                b = self.case.loss.view(responses([points[i] for i in at]))
                g = self.loss.gradient(b) / self.case.factors(b, self.agg or "token-mean")
                out[at] = g[:, 0].numpy() / self.scale
        return out

    def gradient(self, b: Rollouts) -> Tensor:
        """The weights on any batch."""
        return self.loss.gradient(b) / self.case.factors(b, self.agg or "token-mean") / self.scale

    def takes(self, b: Rollouts) -> bool:
        """Whether the loss runs on advantages that differ within a response."""
        try:
            return self.loss.adv_shape == "BT" and bool(self.loss.gradient(self.case.ready(b)).isfinite().all())
        except InputError:
            return False

    def kl_weights(self, b: Rollouts) -> Tensor:
        """dKL/dlp of each token, times -beta."""
        if not self.beta:
            return torch.zeros_like(b.logp)
        return torch.where(b.mask, -self.beta * _kl(self.kl, b), 0)

    @property
    def tol(self) -> float:
        return self.case.tol

    @property
    def near(self) -> float:
        """How near to a bound the two sides are still told apart, relative to r."""
        return max(abs(e) for e in self.case.edges)

    def beside(self):
        """Add to the curve both sides of every jump."""
        n = len(self.points) - self.sides
        sides = [p._replace(r=p.r * (1 + s * self.near)) for p, _ in self.jumps for s in (-1, 1)]
        self.points, self.sides = self.points[:n] + sides, len(sides)
        if sides:
            self.weights = np.r_[self.weights[:n], self.ask(sides)]

    def loosen(self):
        """Look no nearer at the bounds than 0.1 %."""
        self.case.edges = OFF_EDGES
        self.beside()

    def bounds(self, A: float) -> list[float]:
        """The ratios at which the weight jumps for this sign of A, for a rare token."""
        mine = [p.r for p, _ in self.jumps if p.A == A and not p.unsure and p.mu not in MUS]
        return sorted(mine)


def responses(points: list[Point]) -> Rollouts:
    """One response a point; behind an unsure token stands one of lower entropy with r = 1."""
    make = paired if points[0].unsure else alone
    return make(*(np.array([getattr(p, k) for p in points]) for k in ("A", "r", "mu")))


def rare(A: float, r: float, unsure: bool = False) -> Point:
    return Point(A, float(r), float(min(0.02, 0.9 / r)), unsure)


def measure(loss_) -> BlackBox:
    """Everything of BlackBox, by a few hundred small batches. Raises InputError where the loss cannot be run."""
    case = probe(loss_, neutral(), {})
    box = BlackBox(loss_, case)
    b = case.ready(anchor())
    on = replace(b, logp_ref=b.logp)
    g = loss_.gradient(on)
    if not (g[b.mask].isfinite().all() and g[b.mask].any()):
        why = "no gradient" if g[b.mask].isfinite().all() else "a gradient that is not finite"
        raise InputError(f"{loss_.name} has {why} on a good batch (π_θ = π_old, finite log-probabilities).")
    far = replace(b, logp=b.logp - 0.4 * (1 + torch.arange(b.mask.numel()).reshape(b.mask.shape).sin()))
    moved = loss_.gradient(far)
    box.random = any(not torch.equal(loss_.gradient(far), moved) for _ in range(2))
    rows = {k: v[:5, :8] for k in ("logp", "logp_old", "adv", "mask") if (v := getattr(on, k)) is not None}
    group = None if on.group is None else on.group[:5]
    fewer = box.loss.view(replace(on, **rows, logp_ref=on.logp[:5, :8], entropy=None, group=group, totals=None))
    box.agg, box.scale = _aggregation(box, [(on, g), (fewer, loss_.gradient(fewer))])
    _find_kl(box, b)
    some = [rare(A, np.exp(A * x)) for A in SIGNS for x in (-1, -0.1, *np.geomspace(0.03, 3, 12))]
    crowd = [rare(A, r) for A in SIGNS for r in np.exp(LOG_R)]
    few, many = box.ask(some), box.ask(some + crowd)[: len(some)]
    alone = np.concatenate([box.ask([p]) for p in some[::5]])
    box.coupled = _differ(few, many, box.tol) or _differ(few[::5], alone, box.tol)
    pairs = [(A, r, mu) for A in SIGNS for mu in MUS for r in np.exp(np.linspace(-3, 3, 41)) if mu * r < 0.99]
    likely = box.ask([Point(A, float(r), mu) for A, r, mu in pairs])
    box.reads_mu = _differ(likely, box.ask([rare(A, r) for A, r, _ in pairs]), box.tol)
    if "entropy" in loss_.reads:
        two = responses([rare(A, r, True) for A in SIGNS for r in np.exp(np.linspace(-1.5, 1.5, 301))])
        g, turned = (loss_.gradient(x) for x in (two, replace(two, entropy=torch.ones_like(two.logp))))
        box.reads_entropy = not torch.allclose(g, turned, rtol=1e-6, atol=0)
    _curve(box)
    return box


def _differ(x: np.ndarray, y: np.ndarray, tol: float) -> bool:
    return bool((off(x, y, x) > tol).any())


def _aggregation(box: BlackBox, seen: list[tuple[Rollouts, Tensor]]) -> tuple[str, float]:
    """The aggregation that leaves one number on each sign of A, and that number where both signs share it."""
    found: list[tuple[bool, bool, int, str, float]] = []
    for name in sorted(FACTORS, key=lambda n: n not in AGGREGATIONS):
        units = [(b, g / (b.adv * box.case.factors(b, name))) for b, g in seen]
        sides = [torch.cat([u[b.mask & (b.adv * A > 0)] for b, u in units]) for A in SIGNS]
        if any(not k.isfinite().all() or (k - k.mean()).abs().max() > 1e-5 * k.mean().abs() for k in sides):
            continue
        alive = [k.mean().item() for k in sides if k.any()] or [1.0]
        even = max(alive) - min(alive) <= 1e-5 * abs(alive[0])
        one = next((k for k in alive if abs(k - 1) < 1e-5), None)
        # a side at 1 is at its own scale; both off by the same factor are a factor
        scale = alive[0] if even and one is None else one or 1.0
        found.append((one is None, not even, len(found), name, scale))
    if not found:
        return "", 1.0
    *_, name, scale = min(found)
    return name, 1.0 if abs(scale - 1) < min(1e-5, box.tol) else scale


def _kl(name: str, b: Rollouts) -> Tensor:
    assert b.logp_ref is not None
    x = torch.where(b.mask, b.logp, 0).detach().requires_grad_()
    return torch.autograd.grad(kl.ESTIMATORS[name](x, torch.where(b.mask, b.logp_ref, 0)).sum(), x)[0]


def _find_kl(box: BlackBox, b: Rollouts):
    """With A = 0 only the KL term is left."""
    if "logp_ref" not in box.loss.reads:
        return
    b = replace(b, adv=torch.zeros_like(b.adv), logp=b.logp - 0.2)
    g = box.gradient(b)[b.mask]
    if not g.abs().max() > 0:
        return
    for name in kl.ESTIMATORS:
        d = _kl(name, b)[b.mask]
        beta = -(g @ d / (d @ d)).item()
        if (g + beta * d).abs().max() <= max(1e-6, box.tol) * g.abs().max():
            box.kl, box.beta = name, beta


def _curve(box: BlackBox):
    """Sample the weight, then close in on every jump by nine points at a time."""
    rs = np.exp(LOG_R[:: 3 if box.coupled else 1])  # one call a point where the batch matters
    lines = [[rare(A, r) for r in rs] for A in SIGNS]
    if box.reads_mu:
        lines += [[Point(A, float(r), mu) for r in rs if mu * r < 0.99] for A in SIGNS for mu in MUS]
    if box.reads_entropy:
        lines += [[rare(A, r, True) for r in rs] for A in SIGNS]
    points = [p for line in lines for p in line]
    w = box.ask(points)
    box.points, box.weights = points, w
    if box.random:
        return
    ends = np.cumsum([0, *map(len, lines)])
    gaps = [(points[i], points[i + 1], w[i], w[i + 1]) for a, e in pairwise(ends) for i in range(a, e - 1)]
    gaps = [x for x in gaps if abs(x[3] - x[2]) > 100 * box.tol * max(abs(x[2]), abs(x[3]), 0.01)]
    while gaps and max(np.log(hi.r / lo.r) for lo, hi, *_ in gaps) > (2e-6 if box.tol >= SINGLE else 1e-14):
        gaps = _closer(box, gaps)
    for lo, hi, a, z in gaps:
        middle = lo._replace(r=float(np.sqrt(lo.r * hi.r)))
        box.jumps.append((middle, (a + z) / 2))
    box.beside()


def _closer(box: BlackBox, gaps):
    """Of each gap the ninth that holds most of the change; none where it is spread evenly, as a smooth weight's is."""
    inner = [np.exp(np.linspace(np.log(lo.r), np.log(hi.r), 10))[1:-1] for lo, hi, *_ in gaps]
    asked = box.ask(
        [gap[0]._replace(r=float(r), mu=_mu(gap[0], r)) for gap, rs in zip(gaps, inner, strict=True) for r in rs]
    )
    out = []
    for n, ((lo, hi, a, z), rs) in enumerate(zip(gaps, inner, strict=True)):
        ps = [lo, *(lo._replace(r=float(r), mu=_mu(lo, r)) for r in rs), hi]
        ws = np.r_[a, asked[8 * n : 8 * n + 8], z]
        change = np.abs(np.diff(ws))
        i = int(change.argmax())
        if change[i] > 0.3 * abs(z - a) and ps[i + 1].r > ps[i].r:  # a tie at the bound halves a jump, no more
            out.append((ps[i], ps[i + 1], ws[i], ws[i + 1]))
    return out


def _mu(p: Point, r: float) -> float:
    return p.mu if p.mu in MUS else float(min(0.02, 0.9 / r))
