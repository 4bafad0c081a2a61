# SPDX-License-Identifier: Apache-2.0
"""The ways in which an input can be unusual, and a batch of each by itself, of every
two together, of all at once.

The table of docs/what-check-sees.md is made of AXES.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.registry import REDUCE, Objective
from upref.rollouts import Rollouts
from upref.weights.batches import GUARD, MU, breakpoints

SIZES = (1.0, -1.0)
LONG = (1, 15, 17, 65, 129, 256, 257, 300, 512, 520)  # tokens
TILES = (256, 512)  # columns of a batch, all of which some of its responses fill
LONGEST = (1025, 2049)  # tokens: a little more than limits of real runs
FULL = 48  # columns of a batch without padding
WIDE = (63, 64, 65, 128)  # responses of a batch, and columns
# tokens, parts of a response, columns before it
HOLES = (16, 40, 100, 300)
TURNS = (5, 12, 20)
LATE = (33, 100)
MASKS = ("plain", "a hole", "turns", "left padding", "late")
MOSTLY = ("A = 0", "A > 0", "A < 0", "clipped")
PRODUCT = 80.0  # |log| of a product of ratios that float32 holds
# log π_old/μ of a token; most of it over a response
RHO = (3.0, -3.0, 6.0, -6.0, 12.0, -12.0)
RHO_PRODUCT = 19.0
# log π_ref / π_θ, beside what is unusual otherwise
CROSSED_REF = (1.0, -1.0, 3.0, -3.0, 6.0, -6.0, 9.0, -9.0)
# estimators whose advantages are as large as the rewards
ANY_SIZE = ("group_mean", "reward", "leave_one_out")
MOST_ENTROPY = 12.5  # nats: ln of 268,000 tokens
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
    # its numbers are the same in float32, and it is asked in that "too", or in that
    # "alone"
    single: str = ""
    masks: tuple[str, ...] = MASKS[:1]
    mostly: str = ""  # what most of its responses, or of its tokens, are
    width: int = 0  # columns, where not as many as its responses need
    more_A: tuple[float, ...] = ()  # where the objective's advantages have any size
    # log π_old/μ, where the objective corrects for its sampler
    rho: tuple[float, ...] = ()
    entropy: float = 3.0  # the largest one, in nats
    # whether it is 0 for the lower half of a response's tokens
    zero_entropy: bool = False
    is_on_policy: bool = False  # every ratio is 1
    by_token: bool = False  # each token has an advantage of its own, of either sign

    def exact(self, x: np.ndarray) -> np.ndarray:
        """Rounded to float32 where the axis has only such numbers."""
        return x.astype(np.float32).astype(float) if self.single else x


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
        "|A| from 1e-6 to 40, and of 100 where the estimator does not divide by a standard deviation",
        A=(1e-6, -1e-6, 1e-3, -1e-3, 7.0, -7.0, 12.0, -12.0, 40.0, -40.0),
        more_A=(100.0, -100.0),
        mu=(0.001, *MU),
    ),
    "certain tokens": Axis(
        "π_old from 0.95 to exactly 1; π_old and π_θ both from 0.9 to 1 - 1e-6",
        mu=(0.95, 0.97, 0.99, 0.999, 0.99999, 1.0),
        lengths=(1, 4, 17, 40),
        sure=True,
    ),
    "lengths": Axis(
        f"responses of up to 520 tokens, of {TILES[0]} and {TILES[1]} too",
        lengths=LONG,
        rows=WIDE[2],
    ),
    "masks": Axis(
        f"holes of {HOLES[0]} to {HOLES[-1]} tokens, {TURNS[0]} to {TURNS[-1]} turns, left padding, responses that "
        f"begin {LATE[0]} to {LATE[-1]} columns late",
        lengths=(1, 6, 40, 300),
        rows=WIDE[0],
        masks=MASKS,
    ),
    "reference": Axis(
        f"|log π_ref / π_θ| up to 19; up to {max(CROSSED_REF):g} in the batches below",
        ref=(*CROSSED_REF, 14.0, -14.0, 19.0, -19.0),
        mu=(1e-9, *MU),
    ),
}
_ORDINARY = tuple(AXES.values())
AXES["sampler"] = Axis(
    f"beside a sampler's correction: |log π_old/μ| up to {max(RHO):g} for a token, and up to {RHO_PRODUCT:g} added up "
    "over a response, in responses of 1 to 300 tokens; μ of exactly 1 for some tokens, and for all of some responses",
    lengths=(1, 4, 17, 65, 300),
    rows=WIDE[2],
    rho=RHO,
)
AXES["entropies"] = Axis(
    f"beside entropies: 0 for half of the tokens, the rest up to {MOST_ENTROPY:g} nats",
    lengths=(1, 4, 17, 65),
    entropy=MOST_ENTROPY,
    zero_entropy=True,
)
TILED = f"{TILES[0]} and {TILES[1]} columns, all of which some responses fill"
for _T in TILES:
    AXES[f"{_T} columns"] = Axis(
        TILED,
        lengths=(1, _T // 4, _T - 1, _T),
        rows=16,
        width=_T,
    )
AXES["no padding"] = Axis(
    f"batches in which every response fills all {FULL} columns",
    lengths=(FULL,),
    rows=16,
    width=FULL,
)
AXES["long responses"] = Axis(
    f"responses of {LONGEST[0]:,} and {LONGEST[1]:,} tokens beside short ones",
    lengths=(1, *LONGEST),
    rows=6,
    width=LONGEST[-1] + 1,
)
AXES["advantages of tokens"] = Axis(
    "where tokens have advantages of their own: both signs within one response, of 17 to 300 tokens",
    lengths=(17, 65, 129, 300),
    rows=16,
    by_token=True,
)
AXES["first step"] = Axis(
    "64 responses of a first step, where π_θ, π_old and π_ref are equal; none of them has a token in the first "
    f"{LATE[0]} columns, as behind prompts",
    lengths=(1, 17, 65),
    rows=WIDE[1],
    ref=(0.0,),
    masks=("late",),
    width=LATE[-1] + 66,
    is_on_policy=True,
)
_TWO = replace(
    AXES["masks"],
    A=(1.0, -1.0, 1e-6, -1e-6, 7.0, -7.0, 40.0, -40.0),
    mu=(1e-4, 0.02, 0.3, 0.9, 0.95, 0.99, 0.999, 0.99999, 1.0),
    ref=(0.1, -0.2, *CROSSED_REF),
    far=(6.0, -6.0, 15.0, -15.0),
)
AXES["every two"] = replace(
    _TWO,
    words="every two of these together, in float64 and in float32",
    lengths=(1, 17, 129, 257, 520),
    rows=WIDE[1],  # 8 x 5 of them have each A with each length
    single="too",
)
CROSSED = "every two of these, batches of {0} responses and {0} columns, and batches of which most or all is {1}".format(
    ", ".join(map(str, WIDE)), ", ".join(MOSTLY)
)
# each with each B and each T, and in both dtypes
for _i, _kind in enumerate(("", *MOSTLY)):
    for _j, _B in enumerate(WIDE):
        _T = WIDE[(_i + _j) % len(WIDE)]
        AXES[f"{_B} x {_T}{_kind and f', {_kind}'}"] = replace(
            _TWO,
            words=CROSSED,
            lengths=(1, _T // 3, _T),
            rows=_B,
            mostly=_kind,
            width=_T,
            single="alone" if (_i + _j // 2) % 2 else "",
        )
_ALL = replace(
    _TWO,
    words=f"all at once, in {WIDE[3]} responses of up to 640 tokens, {LARGE}, in float64 and in float32",
    A=tuple(x for a in _ORDINARY for x in a.A),
    mu=tuple(
        x
        for name, a in AXES.items()
        for x in (MU if name in ("ratios", "advantages") else a.mu)
    ),
    lengths=(640,) * 30 + LONG,
    rows=WIDE[3],
    ref=CROSSED_REF,
)
AXES["all at once"] = replace(_ALL, single="too")
for _i, _kind in enumerate(MOSTLY):
    AXES[f"all at once, {_kind}"] = replace(
        _ALL,
        words="the same where most is " + ", ".join(MOSTLY),
        mostly=_kind,
        single="alone" if _i % 2 else "",
    )
GAPS = "with gaps"  # every loss must take these
NEGATIVE = "that are negative"
COLLIDE = math.lcm(*range(1, 13), 64, 100)
SAME = math.lcm(2**32, 10**6)
NAMED: dict[str, Callable[[Tensor], Tensor]] = {  # group ids
    GAPS: lambda g: 7 + 300 * g,
    NEGATIVE: lambda g: -1 - g,
    "equal modulo 2 to 12, 64 and 100": lambda g: 11 + COLLIDE * g,
    "beyond 2^40, some equal in 32 bits and modulo 10^6": lambda g: (
        2**40 + g % 2 + SAME * (g // 2)
    ),
}


def stress_batch(
    axis: str, objective: Objective, seed: int = 0, ids: tuple[str, ...] = (), **hp: Any
) -> Rollouts:
    """The batch of that axis: one advantage per response, ratios drawn around 1 and
    around the objective's bounds. ids: the keys of NAMED by which its groups are named,
    each in some rows of every A and of every length. It is ready, and kept for the next
    check: do not write to its tensors.

    Args:
        axis: a key of AXES.
        objective: whose bounds the ratios are around.
        seed: of everything.
        ids: keys of NAMED.
        **hp: hyperparameters.

    Returns:
        A batch that others share.
    """
    bounds = tuple(
        tuple(breakpoints(objective, sign, 0.02, **hp)) or (1.5,)
        for sign in (1.0, -1.0)
    )
    any_size = bool(AXES[axis].more_A) and objective.adv in ANY_SIZE
    corrects = bool(AXES[axis].rho) and objective.sampler is not None
    return _stress_batch(axis, objective.level, bounds, any_size, corrects, seed, ids)


@lru_cache(128)  # of about 2 MB
def _stress_batch(
    axis: str,
    level: str,
    bounds: tuple[tuple[float, ...], ...],
    any_size: bool,
    corrects: bool,
    seed: int,
    ids: tuple[str, ...],
) -> Rollouts:
    """The batch for all objectives with that level and these bounds of r, for A > 0 and
    for A < 0.

    Args:
        axis: a key of AXES.
        level: of what the ratio is, as in Objective.
        bounds: the ratios at which the weight jumps, by the sign of A.
        any_size: whether the estimator gives advantages of any size.
        corrects: whether there is a correction of the sampler.
        seed: of the draws.
        ids: as for `stress_batch`.
    """
    of = AXES[axis]
    wide = level in REDUCE
    drawn = _drawn(axis, level, any_size, seed, ids)
    A = drawn.A
    n = drawn.n
    mask = drawn.b.mask.numpy()
    above, below = (np.log(side) for side in bounds)
    nth = (drawn.which * np.where(A > 0, len(above), len(below))).astype(int)
    bound = np.where(A > 0, above[nth % len(above)], below[nth % len(below)])
    x = np.where(drawn.is_near, bound[:, None] * drawn.spread, drawn.calm)
    if of.mostly == "clipped":
        last = np.where(A > 0, max(above.max(), 0.1), min(below.min(), -0.1))
        x = np.where(drawn.is_clipped, last[:, None] * drawn.beyond, x)
    if of.far:
        x = np.where(drawn.is_far, drawn.away, x)
    # which may multiply ratios: a response that can be sampled keeps them in range
    if level == "custom":
        order = drawn.order
        sums = np.cumsum(np.where(mask, np.abs(x), 0)[:, order], 1)[:, order.argsort()]
        x = np.where(sums < PRODUCT, x * drawn.apart, drawn.tiny)
    if wide:  # the response's own ratio is drawn, its tokens are scattered around it
        x = x[:, :1] / (1 if level == "sequence_mean" else n[:, None])
        x = x + drawn.noise - drawn.noise.sum(1, keepdims=True) / n[:, None]
    x = np.zeros_like(x) if of.is_on_policy else x
    old = np.minimum(drawn.old, np.where(x > 0, -x - 1e-3, 0))
    lp = np.minimum(old + x, 0)
    if of.sure and not wide:
        old, lp = np.where(drawn.is_sure, drawn.sure, (old, lp))
    if of.rho and corrects:
        old = np.minimum(old, drawn.log_rho - 1e-3)  # μ is a probability too
        old = np.where(drawn.is_sampled_surely, drawn.log_rho, old)
        lp = np.minimum(old + x, 0)
    ref = np.minimum(lp + drawn.ref, -1e-3)

    def filled(x: np.ndarray, padding: float) -> Tensor:
        """[B, T], as `fill_padding` has it."""
        return torch.from_numpy(np.where(mask, of.exact(x), padding))

    # looked at by a test, and not for each objective
    return drawn.b.but(
        logp=filled(lp, -1.0),
        logp_old=filled(old, -1.1),
        logp_ref=filled(ref, -1.2),
        logp_sampler=filled(old - drawn.log_rho, -1.2) if of.rho and corrects else None,
    )


@dataclass(frozen=True)
class Drawn:
    """The random numbers of a batch, which depend on no bound of an objective, [B, T]
    but where it says otherwise.

    b: the batch, of which log-probabilities are missing. A, n: the advantage and the
    number of tokens of each response, [B]. which: which bound of a response's side is
    near, from 0 to 1, [B].
    """

    b: Rollouts
    A: np.ndarray
    n: np.ndarray
    which: np.ndarray
    spread: np.ndarray  # log r near a bound, as a multiple of it
    is_near: np.ndarray
    calm: np.ndarray  # log r elsewhere
    beyond: np.ndarray  # log r of a clipped token, as a multiple of the last bound
    is_clipped: np.ndarray
    away: np.ndarray  # a far log r
    is_far: np.ndarray
    old: np.ndarray  # log π_old
    ref: np.ndarray  # log π_ref / π_θ
    is_sure: np.ndarray
    sure: np.ndarray  # log π_old and log π_θ of certain tokens, [2, B, T]
    log_rho: np.ndarray
    is_sampled_surely: np.ndarray  # μ is 1
    # of a response's ratio
    noise: np.ndarray
    # of ratios that may be multiplied: an order of the columns, [T], and what keeps two
    # tokens from having one ratio
    order: np.ndarray
    apart: np.ndarray
    tiny: np.ndarray


NOTHING = np.zeros((1, 1))  # what an axis or a level does not draw


@lru_cache(160)  # of about 2 MB
def _drawn(
    axis: str, level: str, any_size: bool, seed: int, ids: tuple[str, ...]
) -> Drawn:
    """The draws of that axis; arguments as of `_stress_batch`."""
    of = AXES[axis]
    wide = level in REDUCE
    B = AXES[axis].rows
    is_few, A, n, name, side, mask, state = _composition(axis, any_size, seed, len(ids))
    T, rng = mask.shape[1], np.random.default_rng()
    rng.bit_generator.state = state

    def draw(among: tuple[float, ...]) -> np.ndarray:
        """Independent draws from these numbers, each equally probable."""
        return np.array(among)[rng.integers(len(among), size=(B, T))]

    drawn: dict[str, np.ndarray] = dict.fromkeys(
        (field.name for field in fields(Drawn)[1:]), NOTHING
    )  # all but the batch
    drawn |= {"A": A, "n": n, "which": rng.random(B)}
    drawn["spread"] = rng.uniform(0.2, 1.8, (B, T))
    drawn["is_near"] = rng.random((B, T)) < 0.5
    drawn["calm"] = rng.normal(size=(B, T)) * draw((1e-4, 0.02, 0.3))
    if of.mostly == "clipped":
        chosen = ~is_few[:, None] if wide else rng.random((B, T)) >= 0.1
        drawn |= {"is_clipped": chosen, "beyond": rng.uniform(1.1, 2, (B, T))}
    if of.far:
        away = draw(of.far)
        share = of.share / (4 if of.mostly == "clipped" else 1)
        picked = rng.random((B, T)) < share
        if wide:
            away = np.abs(away) * np.where(side == 1, 1, -1)[:, None]
            picked = side[:, None] > 0
        guard = GUARD[level] - 1
        drawn |= {"is_far": picked, "away": away.clip(-guard, guard)}
    if level == "custom":
        drawn["order"] = rng.permutation(T)
        drawn["apart"] = rng.uniform(0.98, 1, (B, T))
        drawn["tiny"] = rng.normal(size=(B, T)) * 1e-4
    if wide:
        drawn["noise"] = np.where(mask, rng.normal(size=(B, T)) * 0.1, 0)
    with np.errstate(divide="ignore"):
        drawn["old"] = np.log(draw(of.mu))
    if of.sure and not wide:
        drawn["is_sure"] = rng.random((B, T)) < 0.6
        drawn["sure"] = np.log1p(-(10 ** rng.uniform(-6, -1, (2, B, T))))
    if of.rho:
        log_rho = _sampler_ratios(of.rho, mask, rng)
        # of the responses whose ratios are near 1
        is_whole = (np.arange(B) % 6 == 5)[:, None]
        log_rho = np.where(is_whole, -np.abs(log_rho), log_rho)
        surely = (log_rho <= 0) & (is_whole | (rng.random((B, T)) < 0.1))
        drawn |= {"log_rho": log_rho, "is_sampled_surely": surely}
    drawn["ref"] = draw(of.ref)
    H = rng.uniform(0, of.entropy, size=(B, T))
    # below the 80 % quantile of a response, at which objectives tell tokens apart
    if of.zero_entropy:
        rank = np.where(mask, H, np.inf).argsort(1).argsort(1)
        H = np.where((rank < n[:, None] // 2) & (n[:, None] >= 4), 0, H)
    kinds = len(ids) + 1
    # every group has several rows
    nth = (np.cumsum(name[:, None] == np.arange(kinds), 0) - 1)[np.arange(B), name]
    plain = group = torch.as_tensor(
        name + kinds * (nth % 3) if ids else rng.permutation(B) % max(1, B // 4)
    )
    for k, said in enumerate(ids):
        group = torch.where(plain % kinds == k + 1, NAMED[said](plain), group)
    by_token = _own_shares(mask) if of.by_token else np.ones((B, T))
    batch = Rollouts.unchecked(
        adv=torch.tensor(of.exact(A[:, None] * by_token)),
        mask=torch.tensor(mask),
        group=group,
        entropy=torch.as_tensor(np.where(mask, of.exact(H), 1.0)),
    )
    return Drawn(batch, **drawn)


def _own_shares(mask: np.ndarray) -> np.ndarray:
    """What the advantage of a response is multiplied by at each token, [B, T]: five
    sizes, and the other sign at every third token; in the padding that of the first.
    """
    B, T = mask.shape
    place = np.arange(B)[:, None] + np.arange(T)
    share = np.where(place % 3 == 2, -0.5, 1) * (1 + place % 5 / 4)
    first = np.take_along_axis(share, mask.argmax(1)[:, None], 1)
    return np.where(mask, share, first)


@lru_cache(512)
def _composition(axis: str, any_size: bool, seed: int, ids: int) -> tuple[Any, ...]:
    """What does not depend on an objective: which responses are as most are not, their
    A, lengths, kinds of ids and sides of the ratio, the mask, and the state of the
    generator after these draws."""
    of = AXES[axis]
    rng = np.random.default_rng(seed)
    of = replace(of, A=of.A + of.more_A) if any_size else of
    B = of.rows
    is_few = (
        np.arange(B) % max(1, B // FEW) == 0 if of.mostly else np.ones(B, dtype=bool)
    )
    A, n, kind, name, side = _rows(of, ids + 1, is_few, rng)
    A = np.where(is_few, A, 0.0) if of.mostly == "A = 0" else A
    if of.mostly in MOSTLY[1:3]:  # in every second of these batches all
        A = (
            (1 if ">" in of.mostly else -1)
            * np.abs(A)
            * np.where(is_few & (B != 64) & (B != 128), -1, 1)
        )
    T = of.width or max(of.lengths) + 1 + (max(HOLES) if len(of.masks) > 1 else 0)
    mask = np.zeros((B, T), dtype=bool)
    for i in range(B):
        mask[i, _columns(n[i], of.masks[kind[i]], T, rng)] = True
    return is_few, A, n, name, side, mask, rng.bit_generator.state


def _sampler_ratios(
    rho: tuple[float, ...], mask: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """log π_old/μ of each token: in turn far for some tokens of a response, spread over
    all of them, and near 0.
    """
    B, T = mask.shape
    kind = (np.arange(B) % 3)[:, None]
    n = mask.sum(1, keepdims=True)
    near_ratios = rng.normal(size=(B, T)) * 1e-3
    far_ratios = np.array(rho)[rng.integers(len(rho), size=(B, T))] * rng.uniform(
        0.9, 1, (B, T)
    )
    mixed = np.where((rng.random((B, T)) < 0.3) | (n == 1), far_ratios, near_ratios)
    order = rng.permutation(T)
    sums = np.cumsum(np.where(mask, np.abs(mixed), 0)[:, order], 1)[:, order.argsort()]
    mixed = np.where(sums < RHO_PRODUCT, mixed, near_ratios)
    total = np.array([*rho, RHO_PRODUCT, -RHO_PRODUCT])[
        rng.integers(len(rho) + 2, size=(B, 1))
    ]
    spread = (
        total * rng.uniform(0.9, 1, (B, 1)) / n
        + near_ratios
        - np.where(mask, near_ratios, 0).sum(1, keepdims=True) / n
    )
    return np.select([kind == 0, kind == 1], [mixed, spread], near_ratios)


def _rows(
    of: Axis, kinds: int, is_few: np.ndarray, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Of each response A, the length, the number of its mask, of the kind of its id,
    and the side of its ratio: every two levels of two of them meet where there are rows
    enough, else each level is in as many rows as any other."""
    levels = (len(of.A), len(of.lengths), len(of.masks), kinds, 3)

    def spread_evenly(m: int, size: int) -> np.ndarray:
        """The numbers below m in random order, as evenly as the size allows."""
        return rng.permutation(np.resize(rng.permutation(m), size))

    table = np.zeros((0, len(levels)), dtype=int)
    if np.prod(sorted(levels)[-2:]) <= of.rows and is_few.all():
        table = _table(of, levels)
    if not len(table):  # in the few that are not as most are, and in the rest
        order = np.r_[np.flatnonzero(is_few), np.flatnonzero(~is_few)].argsort()
        table = np.stack(
            [
                np.r_[
                    spread_evenly(m, is_few.sum()), spread_evenly(m, (~is_few).sum())
                ][order]
                for m in levels
            ],
            1,
        )
    other_rows = np.stack([spread_evenly(m, of.rows - len(table)) for m in levels], 1)
    A, n, *rest = np.concatenate([table, other_rows]).T
    return iter((np.array(of.A)[A], np.array(of.lengths)[n], *rest))


def _table(of: Axis, levels: tuple[int, ...]) -> np.ndarray:
    """The covering array; responses too short to show a mask stand beside it, each
    level of the rest with each.
    """
    short = [i for i, n in enumerate(of.lengths) if n < TURNS[0] and len(of.masks) > 1]
    rows = pairwise((levels[0], levels[1] - len(short), *levels[2:])).copy()
    rows[:, 1] = np.delete(np.arange(levels[1]), short)[rows[:, 1]]
    beside = [
        [n % levels[0], i, 0, *(n % m for m in levels[3:])]
        for i in short
        for n in range(2 * max(levels))
    ]
    return np.concatenate([rows, np.array(beside, dtype=int).reshape(-1, len(levels))])


@lru_cache(64)
def pairwise(levels: tuple[int, ...]) -> np.ndarray:
    """A covering array of strength 2 (all-pairs testing), built greedily: rows in which
    every level of a factor meets every level of every other.

    Args:
        levels: how many levels each factor has.

    Returns:
        Integers [rows, factors].
    """
    rest = np.array(list(product(*map(range, levels[2:]))))
    pairs = [(i, j) for i in range(len(levels)) for j in range(i)]
    open_ = {(i, j): np.ones((levels[i], levels[j]), dtype=bool) for i, j in pairs}
    rows: list[np.ndarray] = []
    while any(x.any() for x in open_.values()):
        for first in product(range(levels[0]), range(levels[1])):
            candidates = np.c_[np.broadcast_to(first, (len(rest), 2)), rest]
            gain = sum(
                open_[i, j][candidates[:, i], candidates[:, j]].astype(int)
                for i, j in pairs
            )
            if gain.any():
                rows.append(candidates[int(np.argmax(gain))])
                for i, j in pairs:
                    open_[i, j][rows[-1][i], rows[-1][j]] = False
    return np.array(rows, dtype=int).reshape(-1, len(levels))


def _columns(n: int, mask: str, T: int, rng: np.random.Generator) -> np.ndarray:
    """Which of T columns hold the n tokens of a response."""
    positions = np.arange(n)
    room = T - n
    turns = min(n, int(rng.choice(TURNS)))
    match mask:
        case "a hole":
            return positions + (positions >= (n + 1) // 2) * min(
                room, int(rng.choice(HOLES))
            )
        case "turns":
            return positions + (positions * turns // n) * (
                min(room, 3 * turns) // turns
            )
        case "left padding":
            return positions + room
        case "late":
            return positions + min(room, int(rng.choice(LATE)))
    return positions


def relabel_groups(batch: Rollouts) -> dict[str, list[Rollouts]]:
    """The batch with other ids for all of its groups, and for all but one.

    Args:
        batch: a batch with groups.

    Returns:
        What the ids are called -> the two batches.
    """
    assert batch.group is not None
    group = batch.group
    is_last_group = batch.group == batch.group.max()
    return {
        k: [
            replace(batch, group=x, totals=None)
            for x in (f(group), torch.where(is_last_group, group, f(group)))
        ]
        for k, f in NAMED.items()
    }
