# SPDX-License-Identifier: Apache-2.0
"""Wrong only where two axes of the input meet: for every two of the AXES, group ids,
sizes and dtype.
"""

import re
from itertools import combinations, product

import pytest
import torch

import upref
from tests.support.daily import daily
from upref.registry import REDUCE
from upref.user_code import read
from upref.verify.measure import make_case, unit_weights
from upref.verify.oracles.batches import one_response
from upref.verify.oracles.unusual import unusual_inputs
from upref.weights.stress import AXES, NAMED, SMALL_MODULUS, WIDE_SIZES, stress_batch


def runs(m):
    """Return how many runs of live tokens each response has, [B, 1]."""
    return (m & ~m.roll(1, 1)).sum(1, keepdim=True) + (m[:, :1] & m[:, -1:])


def gap(m):
    """Return the number of columns without a token between each token and the one
    before it, [B, T]; 0 before the first.
    """
    at = torch.arange(m.shape[1]).expand(m.shape)
    last = torch.where(m, at, -1).cummax(1).values.roll(1, 1)
    last[:, 0] = -1
    return torch.where(last >= 0, at - last - 1, 0)


def most(which):
    return lambda lp, old, A, m, ref, g: (which(lp - old, A) & m).sum() > 0.8 * m.sum()


# axis -> where a token is unusual on it; of lp, lp_old, A, mask, lp_ref, group
UNUSUAL = {
    "ratios": {"far": lambda lp, old, A, m, ref, g: (lp - old).abs() > 5},
    "advantages": {
        "large": lambda lp, old, A, m, ref, g: A.abs() > 6,
        "tiny": lambda lp, old, A, m, ref, g: (A.abs() < 1e-4) & (A != 0),
    },
    "certain tokens": {"certain": lambda lp, old, A, m, ref, g: old > -0.0513},
    "lengths": {"long": lambda lp, old, A, m, ref, g: m.cumsum(1) > 256},
    "masks": {
        "hole": lambda lp, old, A, m, ref, g: gap(m).amax(1, keepdim=True) >= 16,
        "turns": lambda lp, old, A, m, ref, g: runs(m) >= 5,
        "left padding": lambda lp, old, A, m, ref, g: m[:, -1:] & ~m[:, :1],
        "late": lambda lp, old, A, m, ref, g: ~m[:, :30].any(1, keepdim=True),
    },
    "reference": {"away": lambda lp, old, A, m, ref, g: (lp - ref).abs() > 2.5},
    "group ids": {
        "with gaps": lambda lp, old, A, m, ref, g: ((g > 50) & (g < 10**6))[:, None],
        "negative": lambda lp, old, A, m, ref, g: (g < 0)[:, None],
        "colliding": lambda lp, old, A, m, ref, g: (
            (g > 10**6) & (g % SMALL_MODULUS == 11)
        )[:, None],
        "large": lambda lp, old, A, m, ref, g: (g >= 2**40)[:, None],
    },
    "most": {
        "A = 0": most(lambda x, A: A == 0),
        "A > 0": most(lambda x, A: A > 0),
        "A < 0": most(lambda x, A: A < 0),
        "clipped": most(lambda x, A: ((A > 0) & (x > 0.19)) | ((A < 0) & (x < -0.23))),
    },
    "responses": {
        str(n): lambda lp, old, A, m, ref, g, n=n: torch.tensor(len(m) == n)
        for n in (1, *WIDE_SIZES)
    },
    "columns": {
        str(n): lambda lp, old, A, m, ref, g, n=n: torch.tensor(m.shape[1] == n)
        for n in WIDE_SIZES
    },
    "size": {"65,504": lambda lp, old, A, m, ref, g: m.sum() > 65_504},
    "dtype": {
        "float32": lambda lp, old, A, m, ref, g: torch.tensor(lp.dtype == torch.float32)
    },
}
PAIRS = {
    f"{a} {x}, {b} {y}": (p, q)
    for (a, some), (b, others) in combinations(UNUSUAL.items(), 2)
    for (x, p), (y, q) in product(some.items(), others.items())
}
# in so few columns, in one response of one advantage, with so few responses
IMPOSSIBLE = re.compile(
    "lengths long, columns|columns .*, size|responses (1|63|64|65), size|responses 1, columns"
)


def loss_wrong_where(objective, *predicates, **hp):
    """Return the objective's loss, whose gradient is half as large again on tokens
    where all predicates(lp, old, A, mask, ref, group) hold.
    """

    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob, group):
        def calm(x):
            return torch.where(mask, x, -1.0)

        given = (
            calm(log_prob),
            calm(old_log_prob),
            calm(advantages),
            mask,
            calm(ref_log_prob),
            group,
        )
        hit = mask
        for p in predicates:
            hit = hit & p(*(x.detach() for x in given))
        lp, old, A, m, ref, _ = given
        lp = lp + 0.5 * (lp - lp.detach()) * hit
        return upref.get(objective).loss(upref.Rollouts(lp, old, A, m, None, ref), **hp)

    return loss


@pytest.fixture(scope="module")
def asked():
    """Return every batch on which two oracles call a loss (the one of unusual inputs
    and the one of one response), with where the objective's weight is not 0.
    """
    batches = []

    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob, group):
        """Keep the batch, and return GRPO's loss."""

        def calm(x):
            return torch.where(mask, x.detach(), -1.0)

        given = (
            calm(log_prob),
            calm(old_log_prob),
            calm(advantages),
            mask,
            calm(ref_log_prob),
            group,
        )
        _, old, A, m, ref, _ = given
        batches.append(given)
        return upref.get("grpo").loss(
            upref.Rollouts.unchecked(
                logp=log_prob, logp_old=old, adv=A, mask=m, logp_ref=ref
            ),
            beta=0.04,
        )

    o = upref.get("grpo")
    case = make_case(read(loss, o, {"beta": 0.04}), o, o.resolve({"beta": 0.04}))
    for one in (unusual_inputs, one_response):
        batches[:], before = [], batches[:]
        assert not [f for f in one.findings(case) if f.severity == "failure"]
        batches[:0] = before

    def as_batch(lp, old, A, m, ref, g):
        return upref.Rollouts.unchecked(
            logp=lp, logp_old=old, adv=A, mask=m, logp_ref=ref
        )

    return [(b, unit_weights(o, as_batch(*b), case.hp) != 0) for b in batches]


@pytest.mark.parametrize(
    "name", [name for name in PAIRS if not IMPOSSIBLE.search(name)]
)
def test_every_two_levels_meet_where_the_gradient_shows_it(asked, name):
    """A loss that is wrong on these tokens alone is wrong by half a weight on one of
    the batches.
    """
    p, q = PAIRS[name]
    assert any((p(*b) & q(*b) & live).any() for b, live in asked)


@pytest.mark.parametrize(("a", "b"), daily(combinations(UNUSUAL, 2), 30))
def test_wrong_where_two_axes_meet(a, b):
    """A loss that is wrong only where an unusual level of each axis holds is rejected;
    one pair of levels is drawn by the names.
    """
    levels = [
        (x, y)
        for x, y in product(UNUSUAL[a], UNUSUAL[b])
        if not IMPOSSIBLE.search(f"{a} {x}, {b} {y}")
    ]
    if not levels:
        return
    x, y = levels[len(a + b) % len(levels)]
    report = upref.check(
        loss_wrong_where("grpo", UNUSUAL[a][x], UNUSUAL[b][y], beta=0.04),
        "grpo",
        beta=0.04,
    )
    assert {f.oracle for f in report.failures} & {
        "unusual-inputs",
        "extremes",
        "gradient",
        "one-response",
    }, f"{x}, {y}\n{report}"


@pytest.mark.parametrize("axis", daily(UNUSUAL, 8))
def test_wrong_along_one_axis(axis):
    for p in UNUSUAL[axis].values():
        assert not upref.check(
            loss_wrong_where("grpo", p, beta=0.04), "grpo", beta=0.04
        )


NARROW = [
    ("certain tokens", "certain"),
    ("lengths", "long"),
    ("advantages", "large"),
    ("dtype", "float32"),
]


@pytest.mark.parametrize(("axis", "level"), daily(NARROW, 4))
def test_wrong_near_narrow_bounds(axis, level):
    """Of GSPO, 3e-4 and 4e-4 beside 1."""

    def near(lp, old, A, m, ref, g):
        return (
            ((lp - old) * m).sum(1, keepdim=True) / m.sum(1, keepdim=True)
        ).abs() < 1e-3

    loss = loss_wrong_where("gspo", near, UNUSUAL[axis][level])
    assert not upref.check(loss, "gspo")


def test_the_same_loss_without_its_fault_is_right():
    def never(lp, *_):
        return torch.tensor(False)

    for report in (upref.check(loss_wrong_where("grpo", never, beta=0.04), "grpo", beta=0.04),
                   upref.check(loss_wrong_where("gspo", never), "gspo")):  # fmt: skip
        assert report, str(report)


@pytest.mark.parametrize("name", ["dapo", "gspo", "topr"])
def test_every_two_levels_meet_in_one_token(name):
    """In the batch of pairs, for all levels written down in the axis; a ratio above 1
    has no certain token.
    """
    axis, o = AXES["every two"], upref.get(name)
    b = stress_batch("every two", o, ids=tuple(NAMED))
    group = b.group[:, None]
    log_r = b.logp - b.logp_old
    if o.level == "sequence_product":
        log_r = (log_r * b.mask).sum(1, keepdim=True).expand_as(log_r)
    fields = (b.logp, b.logp_old, b.adv, b.mask, b.logp_ref, b.group)
    # axis -> level -> the tokens that have it
    every = {
        "length": {x: b.mask.sum(1, keepdim=True) == x for x in axis.lengths},
        "mask": {level: has(*fields) for level, has in UNUSUAL["masks"].items()},
        "A": {x: (b.adv - x).abs() <= 1e-6 * abs(x) for x in axis.A},
        "ids": {
            "0": (group >= 0) & (group < 50),
            "-": group < 0,
            "7": (group > 50) & (group < 10**6),
            "11": (group > 10**6) & (group % SMALL_MODULUS == 11),
            "2^40": group >= 2**40,
        },
        "π_old": {x: (b.logp_old.exp() - x).abs() < 1e-6 for x in axis.mu},
        "log r": {"near": log_r.abs() < 5, "below": log_r < -5, "above": log_r > 5},
    }
    unexpected = []
    in_short_responses = 0
    for one, two in combinations(every, 2):
        pairs = product(every[one].items(), every[two].items())
        for (x, has_x), (y, has_y) in pairs:
            if (has_x & has_y & b.mask).any():
                continue
            # μ r <= 1
            no_room_above = y == "above" and (one == "π_old" or o.level in REDUCE)
            # responses of 1 and 4 tokens hold few of them
            if one == "length" and x <= 4:
                if two != "mask":  # most masks have no room there
                    in_short_responses += 1
            elif not no_room_above:
                unexpected.append((one, x, two, y))
    assert not unexpected and in_short_responses < 12
    away = (b.logp_ref - b.logp)[b.mask]
    assert away.max() > 6 and away.min() < -5
