# SPDX-License-Identifier: Apache-2.0
"""Wrong only where two axes of the input meet: for every two of the AXES, group ids, size and dtype."""

from itertools import combinations, product

import pytest
import torch

import upref
from upref.registry import REDUCE
from upref.weights.batches import AXES, NAMED, beyond

UNUSUAL = {  # axis -> where a token is unusual on it; of lp, lp_old, A, mask, lp_ref, group
    "ratios": {"far": lambda lp, old, A, m, ref, g: (lp - old).abs() > 5},
    "advantages": {
        "large": lambda lp, old, A, m, ref, g: A.abs() > 6,
        "tiny": lambda lp, old, A, m, ref, g: A.abs() < 1e-4,
    },
    "certain tokens": {"certain": lambda lp, old, A, m, ref, g: old > -0.0513},
    "lengths": {"long": lambda lp, old, A, m, ref, g: m.cumsum(1) > 256},
    "reference": {"away": lambda lp, old, A, m, ref, g: (lp - ref).abs() > 2.5},
    "group ids": {
        "with gaps": lambda lp, old, A, m, ref, g: ((g > 50) & (g < 2**31))[:, None],
        "negative": lambda lp, old, A, m, ref, g: (g < 0)[:, None],
        "large": lambda lp, old, A, m, ref, g: (g > 2**31)[:, None],
    },
    "size": {"65,504": lambda lp, old, A, m, ref, g: m.sum() > 65_504},
    "dtype": {"float32": lambda lp, old, A, m, ref, g: torch.tensor(lp.dtype == torch.float32)},
}
PAIRS = [
    (f"{a} {x}, {b} {y}", p, q)
    for (a, some), (b, others) in combinations(UNUSUAL.items(), 2)
    for (x, p), (y, q) in product(some.items(), others.items())
]


def loss_wrong_where(objective, *predicates, **hp):
    """The objective, the gradient of whose tokens is half as large again where all of these hold."""

    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob, group):
        calm = lambda x: torch.where(mask, x, -1.0)
        given = calm(log_prob), calm(old_log_prob), calm(advantages), mask, calm(ref_log_prob), group
        hit = mask
        for p in predicates:
            hit = hit & p(*(x.detach() for x in given))
        lp, old, A, m, ref, _ = given
        lp = lp + 0.5 * (lp - lp.detach()) * hit
        return upref.get(objective).loss(upref.Rollouts(lp, old, A, m, None, ref), **hp)

    return loss


@pytest.mark.parametrize(("p", "q"), [pytest.param(p, q, id=name) for name, p, q in PAIRS])
def test_wrong_where_two_axes_meet(p, q):
    report = upref.check(loss_wrong_where("grpo", p, q, beta=0.04), "grpo", beta=0.04)
    assert {f.oracle for f in report.failures} & {"reach", "extremes", "gradient"}, str(report)


@pytest.mark.parametrize("axis", UNUSUAL)
def test_wrong_along_one_axis(axis):
    for p in UNUSUAL[axis].values():
        assert not upref.check(loss_wrong_where("grpo", p, beta=0.04), "grpo", beta=0.04)


NARROW = [("certain tokens", "certain"), ("lengths", "long"), ("advantages", "large"), ("dtype", "float32")]


@pytest.mark.parametrize(("axis", "level"), NARROW)
def test_wrong_near_narrow_bounds(axis, level):
    """Of GSPO, 3e-4 and 4e-4 beside 1."""
    near = lambda lp, old, A, m, ref, g: (((lp - old) * m).sum(1, keepdim=True) / m.sum(1, keepdim=True)).abs() < 1e-3
    loss = loss_wrong_where("gspo", near, UNUSUAL[axis][level])
    assert not upref.check(loss, "gspo")


def test_the_same_loss_without_its_fault_is_right():
    never = lambda lp, *_: torch.tensor(False)
    for report in (upref.check(loss_wrong_where("grpo", never, beta=0.04), "grpo", beta=0.04),
                   upref.check(loss_wrong_where("gspo", never), "gspo")):  # fmt: skip
        assert report, str(report)


@pytest.mark.parametrize("name", ["dapo", "gspo", "topr"])
def test_every_two_levels_meet_in_one_token(name):
    """In the batch of pairs, for all levels written down in the axis; a ratio above 1 has no certain token."""
    axis, o = AXES["every two"], upref.get(name)
    b = beyond("every two", o, ids=tuple(NAMED))
    kind, log_r, away = b.group[:, None], b.logp - b.logp_old, (b.logp_ref - b.logp)[b.mask]
    log_r = log_r.nansum(1, keepdim=True).expand_as(log_r) if o.level == "trajectory" else log_r
    every = {
        "length": {x: b.mask.sum(1, keepdim=True) == x for x in axis.lengths},
        "A": {x: (b.adv - x).abs() <= 1e-6 * abs(x) for x in axis.A},
        "ids": {"0": (kind >= 0) & (kind < 50), "-": kind < 0, "7": (kind > 50) & (kind < 2**31), "2^40": kind > 2**31},
        "π_old": {x: (b.logp_old.exp() - x).abs() < 1e-6 for x in axis.mu},
        "log r": {"near": log_r.abs() < 5, "below": log_r < -5, "above": log_r > 5},
    }
    missing = {
        (one, x, two, y)
        for one, two in combinations(every, 2)
        for (x, p), (y, q) in product(every[one].items(), every[two].items())
        if not (p & q & b.mask).any()
    }
    few = {m for m in missing if m[0] == "length" and m[1] <= 4}  # responses of 1 and 4 tokens hold few of them
    certain = {m for m in missing if m[3] == "above" and (m[0] == "π_old" or o.level in REDUCE)}  # μ r <= 1
    assert not missing - few - certain and len(few) < 12
    assert away.max() > 6 and away.min() < -5
