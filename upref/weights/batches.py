# SPDX-License-Identifier: Apache-2.0
"""Every synthetic batch: the regime grid (sign of A x ratio below, at and above every bound x π_old x ragged masks), on
policy, random, far; and what two weights differ by. One file, so that what is covered can be read off in one place.

On policy (r = 1) nearly all objectives have the same gradient, so a test at r = 1 proves nothing. Everything that
compares losses reads its batches from here. `batch` is the grid; AXES are the ways in which an input can be unusual,
each by itself, every two together, all at once: the table of docs/what-check-sees.md is made of them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle, product

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError
from upref.registry import REDUCE, Objective
from upref.rollouts import Rollouts
from upref.weights.curve import alone, of_objective, rare
from upref.weights.jumps import GRID

MU = (0.02, 0.3, 0.9)  # π_old of a rare, a likely and a nearly certain token
MU_READ = (1e-4, 0.07, 0.6, 0.97, 0.995)  # and of more, where the bounds depend on it
SIGNS = (1.0, -1.0, 0.5, -2.0, 0.0)
LOG_R = np.unique(np.r_[np.linspace(-4, 4, 33), np.outer((-1, 1), np.geomspace(1e-5, 0.3, 12)).ravel()])
FAR = GRID[abs(np.log(GRID)) < 8]  # where bounds are looked for
EDGES = (-1e-9, 0.0, 1e-9)  # just inside, on and just outside a bound, relative to r
OFF_EDGES = (-1e-3, 1e-3)  # for whoever steps or re-sums
SINGLE_EDGES = (-3e-5, 3e-5)  # for whoever computes in float32: narrower than any bound, GSPO's of 3e-4 too
LENGTHS = (1, 5, 2, 7, 3, 4, 6, 2)
ANCHOR_A = (1.0, -1.0, -0.5, 0.5, 2.0, -2.0, 1.5, -0.75)
OVERFLOW = (20.0, 60.0, 80.0, 100.0, 800.0)  # log r
# of |log r|: a clamp from there on is a guard that training does not meet; a response's is a mean over its tokens
GUARD = {"token": 20.0, "free": 20.0, "trajectory": 20.0, "sequence": 10.0}
PRODUCT = 80.0  # |log| of a product of ratios that float32 holds
CLAMPS = (9.5, 10.5, 19.5, 20.5, 25.0)  # on both sides of where implementations clamp log r


@lru_cache(4096)
def kinks(objective: Objective, A: float, mu: float, **hp) -> list[float]:
    """The ratios with mu r < 1 at which the weight of a token by itself jumps, ascending."""
    if objective.coupled:
        return []
    curves = [of_objective(objective, **hp)]
    curves += [replace(curves[0], weight=unsure(objective, hp))] if "entropy" in objective.reads else []
    return sorted({jump.r for curve in curves for jump in curve.jumps(A, mu, FAR) if jump.r * mu < 1})


def unsure(objective: Objective, hp) -> Callable:
    """The weight of a token beside one of half its entropy."""

    def weight(r, A, mu):
        points = np.broadcast_arrays(r, A, mu)
        x, A, mu = (torch.tensor(v.reshape(-1, 1)).expand(-1, 2).clone() for v in points)
        x[:, 1] = 1.0
        H = torch.tensor([2.0, 1.0], dtype=x.dtype).expand_as(x)
        w = objective.weight(x, A, mu, torch.ones_like(x, dtype=torch.bool), H, **hp)
        return w[:, 0].numpy().reshape(points[0].shape)

    return weight


def ratios(objective: Objective, A: float, mu: float, edges: tuple[float, ...] = EDGES, **hp) -> list[float]:
    """r at the given distances from every bound, and on a fixed grid of log r; all with mu r < 1."""
    bounds = kinks(objective, A, mu, **hp) if A else []
    # with a bound that depends on mu, on which side of it "at" falls is a matter of rounding
    near = [k * (1 + e) for k in bounds for e in edges if e or not objective.reads_mu]
    return [r for r in [*near, *np.exp(LOG_R)] if mu * r < 0.999]


def interval(low: float | None, high: float | None, digits: int = 4) -> str:
    """`r > 1.28`, or with both ends `0.8 < r <= 1.28`, in as many digits as tell the two apart."""
    if low is None or high is None:
        return f"r <= {high:.{digits}g}" if low is None else f"r > {low:.{digits}g}"
    if low == high:
        return f"r = {low:.{digits}g} alone"
    while digits < 17 and f"{low:.{digits}g}" == f"{high:.{digits}g}":
        digits += 1
    return f"{low:.{digits}g} < r <= {high:.{digits}g}"


def words(A: float, r: float, bounds: list[float]) -> str:
    """The regime of a token in words: `A < 0, r > 1.28`."""
    sign = "A > 0" if A > 0 else "A < 0" if A < 0 else "A = 0"
    below, above = [k for k in bounds if k < r], [k for k in bounds if k >= r]
    if not bounds:
        return f"{sign}, any r"
    return f"{sign}, {interval(below[-1] if below else None, above[0] if above else None)}"


def batch(
    objective: Objective, *, seed: int = 0, edges: tuple[float, ...] = EDGES, thin: int = 1, mus=MU, **hp
) -> Rollouts:
    """A float64 batch that visits every regime of the objective, masked slots poisoned with NaN, groups interleaved.

    A token-level objective meets one regime per token; one that acts on a response meets one per response, reached by
    tokens whose ratios differ. thin=k keeps every k-th regime. mus: π_old.
    """
    # the bounds of a response's ratio do not depend on mu
    mus = mus[:1] if objective.level in REDUCE else mus
    cases = [(A, mu, r) for A, mu in product(SIGNS, mus) for r in ratios(objective, A, mu, edges, **hp)]
    cases *= 3 if "entropy" in objective.reads else 1  # each beside calmer tokens and beside less calm ones
    if objective.coupled:  # no two tokens tie where the batch is sorted
        cases = [(A, mu, r * (1 - 1e-5 * i)) for i, (A, mu, r) in enumerate(cases)]
    rng = np.random.default_rng(seed)
    cases = [cases[i] for i in rng.permutation(len(cases))][::thin]
    b = lay(cases, objective.level, objective.agg == "seq-mean", rng)
    return b if objective.sampler is None else replace(b, logp_sampler=sampler(b))


def lay(cases: list[tuple[float, float, float]], level: str, one_adv: bool, rng: np.random.Generator) -> Rollouts:
    """A batch of these (A, mu, r): one a token, or one a response at a level of responses."""
    return _rollouts(_responses(cases, level, rng) if level in REDUCE else _tokens(cases, one_adv, rng), rng)


def _tokens(cases, one_adv, rng):
    """Rows of 1 to 9 tokens; the tokens of one row share A where one advantage per response is wanted."""
    if one_adv:
        cases = sorted(cases, key=lambda c: c[0])
    rows, lengths = [], cycle((3, 1, 9, 5, 2, 7))
    while cases:
        n = next(lengths)
        row, cases = cases[:n], cases[n:]
        if one_adv:
            same = [c for c in row if c[0] == row[0][0]]  # sorted by A: what is cut off begins the next row
            row, cases = same, row[len(same) :] + cases
        rows.append([(A, math.log(mu), math.log(r)) for A, mu, r in row])
    return [rows[i] for i in rng.permutation(len(rows))]


def _responses(cases, level, rng):
    """One response per case: token log-ratios that differ and have the wanted mean (or sum)."""
    rows = []
    for (A, _, r), n in zip(cases, cycle((3, 1, 5, 2)), strict=False):
        spread = rng.normal(size=n)
        target = math.log(r) if level == "sequence" else math.log(r) / n
        rows.append([(A, -6.0 - abs(x), target + x) for x in spread - spread.mean()])
    return rows


def _rollouts(rows, rng) -> Rollouts:
    if not rows:
        raise InputError("the regime grid is empty: choose a smaller thin.")
    T = max(map(len, rows)) + 1  # one column of padding at least
    full = lambda i: torch.tensor(
        [[c[i] for c in row] + [math.nan] * (T - len(row)) for row in rows], dtype=torch.float64
    )
    adv, logp_old, log_r = full(0), full(1), full(2)
    group = torch.as_tensor(rng.permutation(np.arange(len(rows)) % max(1, len(rows) // 3)))
    entropy = torch.as_tensor(rng.uniform(0, 3, size=adv.shape))
    return Rollouts(logp_old + log_r, logp_old, adv, ~adv.isnan(), group, entropy=entropy)


# ---- other batches ---------------------------------------------------------------------------------------------------
def anchor(width: int = 9) -> Rollouts:
    """π_θ = π_old, ragged lengths, three groups of other sizes, one advantage per response."""
    mask = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    lp = -0.5 - torch.arange(mask.numel(), dtype=torch.float64).reshape(mask.shape).sin() ** 2
    adv = torch.tensor(ANCHOR_A, dtype=torch.float64)[:, None].expand_as(mask).clone()
    return Rollouts(lp, lp.clone(), adv, mask, torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]), entropy=1 + lp**2)


def random_batch(rng: np.random.Generator, one_adv: bool = False, shape: tuple[int, int] | None = None) -> Rollouts:
    """Any batch: ragged masks with holes, ratios near and far, a few zero advantages, groups or none."""
    B, T = shape or (int(rng.integers(2, 7)), int(rng.integers(1, 9)))
    mask = rng.random((B, T)) < rng.choice([0.3, 0.8, 1.0])
    mask[:, rng.integers(T)] = True
    old = -rng.exponential(rng.choice([0.2, 2.0, 8.0]), (B, T)) - 1e-3
    step = rng.normal(size=(B, T)) * rng.choice([1e-4, 0.02, 0.2, 1.0, 3.0])
    lp = np.minimum(old + step, -1e-6)
    A = rng.normal(size=(B, 1 if one_adv else T)) * (rng.random((B, 1)) < 0.9)
    group = rng.permutation(np.arange(B) % max(1, B // 2)) if rng.random() < 0.7 else None
    t = lambda x: torch.tensor(np.broadcast_to(x, (B, T)))
    groups = None if group is None else torch.tensor(group)
    return Rollouts(t(lp), t(old), t(A), t(mask), groups, entropy=t(rng.uniform(0, 3, (B, T))))


@lru_cache(16)
def random_batches(seed: int, n: int, one_adv: bool) -> list[Rollouts]:
    """The first n of that seed, ready; kept for the next check: do not write to their tensors."""
    rng = np.random.default_rng(seed)
    return [ready(random_batch(rng, one_adv)) for _ in range(n)]


def column(A: float, rs) -> Rollouts:
    """One response of one rare token for each ratio."""
    r = np.asarray(rs, dtype=float)
    return alone(A, r, rare(r))


def paired(A, r, mu) -> Rollouts:
    """`alone`, with a token behind each whose ratio is 1 and whose entropy is half of the first one's."""
    b = alone(A, r, mu)
    lp, old, adv = (torch.cat(x, 1) for x in ((b.logp, b.logp_old), (b.logp_old,) * 2, (b.adv, b.adv)))
    mask, H = torch.ones_like(lp, dtype=torch.bool), torch.tensor([2.0, 1.0], dtype=lp.dtype)
    return Rollouts(lp, old, adv, mask, logp_ref=lp, entropy=H.expand_as(lp).clone())


def overflowing() -> Rollouts:
    """Far ratios of both signs, and rare tokens whose ratio is near 1; pairs of equal tokens."""
    far = (*(s * y for y in OVERFLOW for s in (1, -1)), 0.1)
    cases = [(A, x, 0.5) for A in (1.0, -1.0, 0.0, 1e-4, -1e-4) for x in far]
    cases += [(A, 0.0625, lp) for A in (1.0, -1.0) for lp in (50.0, 120.0, 1000.0)]
    A, x, lp = (torch.tensor(c, dtype=torch.float64)[:, None].expand(-1, 2) for c in zip(*cases, strict=True))
    new, one = torch.where(x > 0, -lp, x - lp), torch.ones_like(A)
    return Rollouts(new, new - x, A.clone(), one.bool(), logp_ref=new, entropy=one)


def clamped() -> Rollouts:
    """Two responses of three tokens for each sign of A and log r on both sides of where implementations clamp it."""
    cases = [(A, side * x) for A in (1.0, -1.0) for side in (-1, 1) for x in CLAMPS for _ in "ab"]
    adv, log_r = torch.tensor(cases, dtype=torch.float64).T[:, :, None].expand(2, -1, 3)
    old = torch.where(log_r > 0, -30.0, -1.0)
    return Rollouts(old + log_r, old, adv, torch.ones(adv.shape, dtype=torch.bool), torch.arange(len(cases)) // 2)


def ready(b: Rollouts) -> Rollouts:
    """The batch with numbers that could pass for tokens in its masked slots, and with a reference policy."""
    A = torch.where(b.mask, b.adv.expand_as(b.mask), 0)
    first = A.gather(1, b.mask.int().argmax(1, keepdim=True))
    b = b.but(
        logp=b.logp.masked_fill(~b.mask, -1.0),
        logp_old=b.logp_old.masked_fill(~b.mask, -1.1),
        adv=torch.where(b.mask, A, first),
        entropy=None if b.entropy is None else b.entropy.masked_fill(~b.mask, 1.0),
    )
    return b if b.logp_ref is not None else b.but(logp_ref=reference(b))


def reference(b: Rollouts) -> Tensor:
    """log π_ref of each token, near to π_old."""
    return b.logp_old - 0.3 - 0.2 * torch.arange(b.mask.numel(), dtype=b.logp.dtype).reshape(b.mask.shape).sin()


def sampler(b: Rollouts) -> Tensor:
    """log μ of each token: rows in turn equal to π_old but for rounding, near to it, and off by up to e^±2."""
    B, T = b.mask.shape
    spread = torch.tensor([1e-5, 0.1, 2.0], dtype=b.logp.dtype)[torch.arange(B) % 3, None]
    wave = (1.7 * torch.arange(B * T, dtype=b.logp.dtype) + 0.3).sin().reshape(B, T)
    return torch.where(b.mask, (b.logp_old - spread * wave).clamp(max=0), -1.2)


# ---- axes of the input -----------------------------------------------------------------------------------------------
SIZES = (1.0, -1.0)
LONG = (1, 15, 17, 65, 129, 257, 300, 520)  # tokens
WIDE = (63, 64, 65, 128)  # responses of a batch, and columns
HOLES, TURNS, LATE = (16, 40, 100, 300), (5, 12, 20), (33, 100)  # tokens, parts of a response, columns before it
MASKS = ("plain", "a hole", "turns", "left padding", "late")
MOSTLY = ("A = 0", "A > 0", "A < 0", "clipped")
FEW = 6  # responses of a batch that is mostly something which are otherwise


@dataclass(frozen=True)
class Axis:
    """One way in which an input can be unusual; the rest of it is ordinary."""

    words: str
    A: tuple[float, ...] = SIZES
    mu: tuple[float, ...] = MU
    lengths: tuple[int, ...] = (1, 4, 2, 6)
    rows: int = 48
    ref: tuple[float, ...] = (0.1, -0.2)  # log π_ref / π_θ
    far: tuple[float, ...] = ()  # log r of a part of the tokens
    share: float = 0.25  # how large a part
    sure: bool = False  # another part: 1 - π_old and 1 - π_θ from 0.1 to 1e-6
    single: str = ""  # its numbers are the same in float32, and it is asked in that "too", or in that "alone"
    masks: tuple[str, ...] = MASKS[:1]
    mostly: str = ""  # what most of its responses, or of its tokens, are
    width: int = 0  # columns, where not as many as its responses need


LARGE = "more than 65,504 tokens"
AXES = {
    "ratios": Axis(
        "|log r| of 4.5 to 15 (a response's: to 9) at π_old from 0.02 to 0.9",
        mu=(0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 0.9),
        lengths=(1, 4, 17, 40),
        far=(4.5, -4.5, 6.0, -6.0, 8.0, -8.0, 11.0, -11.0, 15.0, -15.0),
        share=0.6,
    ),
    "advantages": Axis(
        "|A| from 1e-6 to 40", A=(1e-6, -1e-6, 1e-3, -1e-3, 7.0, -7.0, 12.0, -12.0, 40.0, -40.0), mu=(0.001, *MU)
    ),
    "certain tokens": Axis(
        "π_old from 0.95 to exactly 1; π_old and π_θ both from 0.9 to 1 - 1e-6",
        mu=(0.95, 0.97, 0.99, 0.999, 0.99999, 1.0),
        lengths=(1, 4, 17, 40),
        sure=True,
    ),
    "lengths": Axis("responses of up to 520 tokens", lengths=LONG, rows=WIDE[2]),
    "masks": Axis(
        f"holes of {HOLES[0]} to {HOLES[-1]} tokens, {TURNS[0]} to {TURNS[-1]} turns, left padding, responses that "
        f"begin {LATE[0]} to {LATE[-1]} columns late",
        lengths=(1, 6, 40, 300),
        rows=WIDE[0],
        masks=MASKS,
    ),
    "reference": Axis("|log π_ref / π_θ| up to 9", ref=(1.0, -1.0, 3.0, -3.0, 6.0, -6.0, 9.0, -9.0)),
}
_ORDINARY = tuple(AXES.values())
_TWO = replace(
    AXES["masks"],
    A=(1.0, -1.0, 1e-6, -1e-6, 7.0, -7.0, 40.0, -40.0),
    mu=(1e-4, 0.02, 0.3, 0.9, 0.95, 0.99, 0.999, 0.99999, 1.0),
    ref=(0.1, -0.2, *AXES["reference"].ref),
    far=(6.0, -6.0, 15.0, -15.0),
)
AXES["every two"] = replace(
    _TWO,
    words="every two of these together, in float64 and in float32",
    lengths=(1, 17, 129, 257, 520),
    rows=WIDE[1],  # 8 x 5 of them have each A with each length
    single="too",
)
CROSSED = (
    "every two of these, batches of {0} responses and {0} columns, and batches of which most or all is {1}".format(
        ", ".join(map(str, WIDE)), ", ".join(MOSTLY)
    )
)
for _i, _kind in enumerate(("", *MOSTLY)):  # each with each B and each T, and in both dtypes
    for _j, _B in enumerate(WIDE):
        _T = WIDE[(_i + _j) % len(WIDE)]
        AXES[f"{_B} x {_T}{_kind and f', {_kind}'}"] = replace(
            _TWO, words=CROSSED, lengths=(1, _T // 3, _T), rows=_B, mostly=_kind, width=_T,
            single="alone" if (_i + _j // 2) % 2 else "",
        )  # fmt: skip
_ALL = replace(
    _TWO,
    words=f"all at once, in {WIDE[3]} responses of up to 640 tokens, {LARGE}, in float64 and in float32",
    A=tuple(x for a in _ORDINARY for x in a.A),
    mu=tuple(x for name, a in AXES.items() for x in (MU if name in ("ratios", "advantages") else a.mu)),
    lengths=(640,) * 30 + LONG,
    rows=WIDE[3],
    ref=AXES["reference"].ref,
)
AXES["all at once"] = replace(_ALL, single="too")
for _i, _kind in enumerate(MOSTLY):
    AXES[f"all at once, {_kind}"] = replace(
        _ALL, words="the same where most is " + ", ".join(MOSTLY), mostly=_kind, single="alone" if _i % 2 else ""
    )
NEGATIVE, COLLIDE = "that are negative", math.lcm(*range(1, 13), 64, 100)
NAMED: dict[str, Callable[[Tensor], Tensor]] = {  # group ids
    "with gaps": lambda g: 7 + 300 * g,
    NEGATIVE: lambda g: -1 - g,
    "equal modulo 2 to 12, 64 and 100": lambda g: 11 + COLLIDE * g,
    "beyond 2^40, some equal in 32 bits": lambda g: 2**40 + g % 2 + 2**32 * (g // 2),
}


@lru_cache(64)  # of about 2 MB
def beyond(axis: str, objective: Objective, seed: int = 0, ids: tuple[str, ...] = (), **hp) -> Rollouts:
    """The batch of that axis: one advantage per response, ratios drawn around 1 and around the objective's bounds. ids:
    the keys of NAMED by which its groups are named, each in some rows of every A and of every length. It is ready, and
    kept for the next check: do not write to its tensors."""
    of, rng, wide = AXES[axis], np.random.default_rng(seed), objective.level in REDUCE
    B = of.rows
    few = np.arange(B) % max(1, B // FEW) == 0 if of.mostly else np.ones(B, dtype=bool)
    A, n, kind, name, side = _rows(of, len(ids) + 1, few, rng)
    A = np.where(few, A, 0.0) if of.mostly == "A = 0" else A
    if of.mostly in MOSTLY[1:3]:  # in every second of these batches all
        A = (1 if ">" in of.mostly else -1) * np.abs(A) * np.where(few & (B != 64) & (B != 128), -1, 1)
    T = of.width or max(of.lengths) + 1 + (max(HOLES) if len(of.masks) > 1 else 0)
    mask = np.zeros((B, T), dtype=bool)
    for i in range(B):
        mask[i, _columns(n[i], of.masks[kind[i]], T, rng)] = True
    draw = lambda among, shape: np.array(among)[rng.integers(len(among), size=shape)]
    near = [np.log([k for k in kinks(objective, s, 0.02, **hp)] or [1.5]) for s in (1.0, -1.0)]
    bound = np.array([rng.choice(near[0] if a > 0 else near[1]) for a in A])[:, None]
    around = bound * rng.uniform(0.2, 1.8, (B, T))
    x = np.where(rng.random((B, T)) < 0.5, around, rng.normal(size=(B, T)) * draw((1e-4, 0.02, 0.3), (B, T)))
    if of.mostly == "clipped":
        last = np.where(A > 0, max(near[0].max(), 0.1), min(near[1].min(), -0.1))[:, None]
        x = np.where(few[:, None] if wide else rng.random((B, T)) < 0.1, x, last * rng.uniform(1.1, 2, (B, T)))
    guard = GUARD[objective.level] - 1
    if of.far:
        away = np.abs(draw(of.far, (B, T))) * np.where(side == 1, 1, -1)[:, None] if wide else draw(of.far, (B, T))
        some = side[:, None] > 0 if wide else rng.random((B, T)) < of.share / (4 if of.mostly == "clipped" else 1)
        x = np.where(some, away.clip(-guard, guard), x)
    if objective.level == "free":  # which may multiply ratios: a response that can be sampled keeps them in range
        order = rng.permutation(T)
        moved = np.cumsum(np.where(mask, np.abs(x), 0)[:, order], 1)[:, order.argsort()]
        x = np.where(moved < PRODUCT, x * rng.uniform(0.98, 1, (B, T)), rng.normal(size=(B, T)) * 1e-4)  # without ties
    if wide:  # the response's own ratio is drawn, its tokens are scattered around it
        noise = np.where(mask, rng.normal(size=(B, T)) * 0.1, 0)
        x = x[:, :1] / (1 if objective.level == "sequence" else n[:, None])
        x = x + noise - noise.sum(1, keepdims=True) / n[:, None]
    with np.errstate(divide="ignore"):
        old = np.minimum(np.log(draw(of.mu, (B, T))), np.where(x > 0, -x - 1e-3, 0))
    lp = np.minimum(old + x, 0)
    if of.sure and not wide:
        here, q = rng.random((B, T)) < 0.6, 10 ** rng.uniform(-6, -1, (2, B, T))
        old, lp = np.where(here, np.log1p(-q), (old, lp))
    ref = np.minimum(lp + draw(of.ref, (B, T)), -1e-3)
    exact = (lambda v: v.astype(np.float32).astype(float)) if of.single else (lambda v: v)
    t = lambda v: torch.tensor(exact(np.where(mask, v, math.nan)), dtype=torch.float64)
    entropy = torch.as_tensor(exact(rng.uniform(0, 3, size=(B, T))))
    adv = torch.tensor(exact(A))[:, None].expand(B, T).clone()
    kinds = len(ids) + 1
    nth = (np.cumsum(name[:, None] == np.arange(kinds), 0) - 1)[np.arange(B), name]  # every group has several rows
    plain = group = torch.as_tensor(name + kinds * (nth % 3) if ids else rng.permutation(B) % max(1, B // 4))
    for k, said in enumerate(ids):
        group = torch.where(plain % kinds == k + 1, NAMED[said](plain), group)
    return ready(Rollouts(t(lp), t(old), adv, torch.tensor(mask), group, t(ref).nan_to_num(nan=-1.2), entropy))


def _rows(of: Axis, kinds: int, few: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Of each response A, the length, the number of its mask, of the kind of its id, and the side of its ratio: every
    two levels of two of them meet where there are rows enough, else each level is in as many rows as any other."""
    levels = (len(of.A), len(of.lengths), len(of.masks), kinds, 3)
    even = lambda m, size: rng.permutation(np.resize(rng.permutation(m), size))
    some = _table(of, levels) if np.prod(sorted(levels)[-2:]) <= of.rows and few.all() else ()
    if not len(some):  # in the few that are not as most are, and in the rest
        order = np.r_[np.flatnonzero(few), np.flatnonzero(~few)].argsort()
        some = np.stack([np.r_[even(m, few.sum()), even(m, (~few).sum())][order] for m in levels], 1)
    more = np.stack([even(m, of.rows - len(some)) for m in levels], 1)
    A, n, *rest = np.concatenate([some, more]).T
    return iter((np.array(of.A)[A], np.array(of.lengths)[n], *rest))


def _table(of: Axis, levels: tuple[int, ...]) -> np.ndarray:
    """The covering array; responses too short to show a mask stand beside it, each level of the rest with each."""
    short = [i for i, n in enumerate(of.lengths) if n < TURNS[0] and len(of.masks) > 1]
    rows = pairwise((levels[0], levels[1] - len(short), *levels[2:])).copy()
    rows[:, 1] = np.delete(np.arange(levels[1]), short)[rows[:, 1]]
    beside = [[n % levels[0], i, 0, *(n % m for m in levels[3:])] for i in short for n in range(2 * max(levels))]
    return np.concatenate([rows, np.array(beside, dtype=int).reshape(-1, len(levels))])


@lru_cache(64)
def pairwise(levels: tuple[int, ...]) -> np.ndarray:
    """A covering array of strength 2 (all-pairs testing), built greedily: rows in which every level of a factor meets
    every level of every other."""
    rest = np.array(list(product(*map(range, levels[2:]))))
    pairs = [(i, j) for i in range(len(levels)) for j in range(i)]
    open_ = {(i, j): np.ones((levels[i], levels[j]), dtype=bool) for i, j in pairs}
    rows: list[np.ndarray] = []
    while any(x.any() for x in open_.values()):
        for first in product(range(levels[0]), range(levels[1])):
            some = np.c_[np.broadcast_to(first, (len(rest), 2)), rest]
            gain = sum(open_[i, j][some[:, i], some[:, j]].astype(int) for i, j in pairs)
            if gain.any():
                rows.append(some[int(np.argmax(gain))])
                for i, j in pairs:
                    open_[i, j][rows[-1][i], rows[-1][j]] = False
    return np.array(rows, dtype=int).reshape(-1, len(levels))


def _columns(n: int, mask: str, T: int, rng: np.random.Generator) -> np.ndarray:
    """Which of T columns hold the n tokens of a response."""
    at, room, turns = np.arange(n), T - n, min(n, int(rng.choice(TURNS)))
    match mask:
        case "a hole":
            return at + (at >= (n + 1) // 2) * min(room, int(rng.choice(HOLES)))
        case "turns":
            return at + (at * turns // n) * (min(room, 3 * turns) // turns)
        case "left padding":
            return at + room
        case "late":
            return at + min(room, int(rng.choice(LATE)))
    return at


def renamed(b: Rollouts) -> dict[str, list[Rollouts]]:
    """The batch with other ids for all of its groups, and for all but one: who refuses some ids may not drop them."""
    assert b.group is not None
    g, one = b.group, b.group == b.group.max()
    return {k: [replace(b, group=x, totals=None) for x in (f(g), torch.where(one, g, f(g)))] for k, f in NAMED.items()}


# ---- reading and comparing -------------------------------------------------------------------------------------------
def off(found, expected, beside=0.0, floor: float | Tensor = 0.1) -> Tensor:
    """|found - expected| relative to |expected|, |beside| or the floor, whichever is largest; inf where it is NaN."""
    found, expected, beside, floor = map(torch.as_tensor, (found, expected, beside, floor))
    scale = torch.maximum(torch.maximum(expected.abs(), beside.abs()), floor)
    return ((found - expected).abs() / scale).nan_to_num(nan=torch.inf)


def near_a_bound(weights: Callable[[Rollouts], Tensor], b: Rollouts, step: float = 2e-5) -> Tensor:
    """Tokens whose weight jumps within that distance of log r (by default the rounding of float32), [B, T]."""
    below, above = (weights(b.but(logp_old=b.logp_old + d)) for d in (-step, step))
    return off(above, below, floor=1e-6) > 1e-3


def at(b: Rollouts, i: int, t: int) -> tuple[float, float, float]:
    """(A, r, mu) of one token of a batch."""
    A = b.adv[i, t if b.adv.shape[1] > 1 else 0]
    return A.item(), (b.logp[i, t] - b.logp_old[i, t]).exp().item(), b.logp_old[i, t].exp().item()


def grad(f, b: Rollouts) -> Tensor:
    """d f(batch) / d logp by autograd, [B, T]; f maps Rollouts to a scalar."""
    x = b.logp.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(f(replace(b, logp=x)), x)
    return g
