# SPDX-License-Identifier: Apache-2.0
"""The live comparison lets every objective through in every dtype, and stops a loss
that is a little wrong.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import upref
from upref import InputError, Totals
from upref.weights.batches import batch
from upref_frameworks.live import live
from upref_frameworks.parity import Monitor, ParityError, compare, roundings

# what frameworks do not hand over
RUNS = [n for n in upref.names() if not upref.get(n).needs]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def trained(name, dtype, wrong=lambda J, lp, b: J, dp_size=2, **hp):
    """Return (loss, what else `compare` takes, hyperparameters) of the regime grid in
    that dtype; `wrong` may spoil J.
    """
    o = upref.get(name)
    b = replace(batch(o), group=None)
    hp = {k: v for k, v in o.hyperparameters.items() if k != "beta"} | hp
    lp, old, A = (x.to(dtype) for x in (b.logp, b.logp_old, b.adv))
    lp.requires_grad_()
    totals = Totals(*map(float, Totals.of(b.mask)))
    loss = -dp_size * wrong(o.J(lp, old, A, b.mask, totals=totals, **hp), lp, b)
    return (
        loss,
        dict(logp=lp, logp_old=old, adv=A, mask=b.mask, totals=totals, dp_size=dp_size),
        hp,
    )


def parity(name, dtype=torch.float32, wrong=lambda J, lp, b: J, **hp):
    """Return the comparison of a trained loss with the objective; `wrong` changes its
    terms.
    """
    loss, args, hp = trained(name, dtype, wrong, **hp)
    (g,) = torch.autograd.grad(loss, args["logp"], retain_graph=True)
    return compare(
        upref.get(name), loss, g, roundings(loss, args["logp"]), **args, **hp
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", RUNS)
def test_every_objective_is_within_rounding_on_the_regime_grid(name, dtype):
    """At, just inside and just outside every bound, in dtypes too coarse to tell these
    apart.
    """
    p = parity(name, dtype)
    assert p.of_bound <= 1 and (p.max_abs > 0 or dtype == torch.float64), p
    few = 0.2 if torch.finfo(dtype).eps < 1e-4 else 1
    assert p.at_bound <= few * batch(upref.get(name)).mask.sum()


def one_token(J, lp, b, by):
    i = int(b.mask.any(1).nonzero()[3])
    t = int(b.mask[i].nonzero()[0])
    return J + by * (lp[i, t] - lp[i, t].detach()) / b.mask.sum()  # the value stays


WRONG = {
    "doubled": lambda J, lp, b: 2 * J,
    "sign": lambda J, lp, b: -J,
    "0.1 per cent": lambda J, lp, b: 1.001 * J,
    "no gradient": lambda J, lp, b: J.detach() + 0 * lp[b.mask].sum(),
    "a constant": lambda J, lp, b: J + 1e-2,
    "one token": lambda J, lp, b: one_token(J, lp, b, 1e-2),
    "not a number": lambda J, lp, b: J * torch.nan,
    "a leak": lambda J, lp, b: J + 1e-3 * lp[b.mask].mean(),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    "name", ["up_dapo", "dapo", "fipo", "gspo", "gmpo", "m2po", "topr"]
)
def test_a_wrong_loss_is_beyond_the_bound(name, wrong):
    if name in ("m2po", "fipo") and wrong == "a constant":
        pytest.skip(
            "the grid has a token at the cut-off of m2po's and fipo's sum: rounding may "
            "drop it, which moves the loss by more"
        )
    assert not parity(name, wrong=WRONG[wrong]).of_bound <= 1


@pytest.mark.parametrize(
    ("name", "other", "low"),
    [
        ("up_dapo", "dapo", "eps_low"),
        ("up_grpo", "grpo", "eps"),
        ("up_gspo", "gspo", "eps_low"),
    ],
)
def test_the_base_is_not_its_up(name, other, low):
    """Find a loss of the other objective beyond the bound in bfloat16."""
    loss, args, hp = trained(other, torch.bfloat16)
    (g,) = torch.autograd.grad(loss, args["logp"], retain_graph=True)
    assert (
        compare(
            upref.get(name),
            loss,
            g,
            roundings(loss, args["logp"]),
            **args,
            **{low: hp[low]},
        ).of_bound
        > 1
    )


def test_another_bound_is_noticed():
    """A loss with the bound 1.2801 agrees with itself; compared with the bound 1.28, a
    token whose ratio lies between the two is named.
    """
    loss, args, hp = trained("dapo", torch.float32, eps_high=0.2801)
    (g,) = torch.autograd.grad(loss, args["logp"], retain_graph=True)
    count = roundings(loss, args["logp"])
    assert compare(upref.get("dapo"), loss, g, count, **args, **hp).of_bound <= 1
    lp = args["logp"].detach().clone()
    i, t = (
        ((args["adv"] > 0) & args["mask"] & (args["logp_old"] < -2))
        .nonzero()[0]
        .tolist()
    )
    # between the two bounds
    lp[i, t] = args["logp_old"][i, t] + torch.tensor(1.28005).log()
    o, args = upref.get("dapo"), args | {"logp": lp.requires_grad_()}
    loss = -2 * o.J(
        lp, args["logp_old"], args["adv"], args["mask"], totals=args["totals"], **hp
    )
    (g,) = torch.autograd.grad(loss, lp, retain_graph=True)
    found = compare(o, loss, g, count, **args, **hp | {"eps_high": 0.28})
    assert found.of_bound > 1 and found.worst == (i, t)


def test_a_large_gradient_of_the_wrong_sign_at_a_bound_is_noticed():
    """At a bound of one token, the rounding of its neighbors allows nothing."""
    o = upref.get("dapo")
    lp = torch.full((1, 16), -1.0, dtype=torch.bfloat16)
    old = lp.clone()
    lp[0, 5] = -0.75390625  # r is below 1.28 by less than bfloat16 rounds
    lp.requires_grad_()
    mask = torch.ones(1, 16, dtype=torch.bool)
    args = dict(logp_old=old, adv=torch.ones_like(old), mask=mask)
    totals = Totals(*map(float, Totals.of(mask)))
    hp = {"eps_low": 0.2, "eps_high": 0.28}
    loss = -o.J(lp, *args.values(), totals=totals, **hp)
    (right,) = torch.autograd.grad(loss, lp, retain_graph=True)
    wrong = right.clone()
    wrong[0, 5] *= -1.4
    count = roundings(loss, lp)
    args |= {"logp": lp, "totals": totals}
    assert compare(o, loss, right, count, **args, **hp).of_bound <= 1
    found = compare(o, loss, wrong, count, **args, **hp)
    assert found.of_bound > 1 and found.worst == (0, 5), found


def test_a_loss_in_half_precision_under_float32_is_noticed():
    """The mistake that the bound of the dtype exists for."""
    o = upref.get("up_dapo")

    def careless(J, lp, b):
        def half(x):
            return x.to(torch.bfloat16)

        return o.J(half(lp), half(b.logp_old), half(b.adv), b.mask)

    assert parity("up_dapo", wrong=careless).of_bound > 10


def test_masked_slots_and_empty_responses_and_dtypes_of_old():
    """Infinity and NaN in masked slots, a response without a token, and old
    log-probabilities in float64 leave the comparison within its bound.
    """
    o = upref.get("up_gspo")
    b = replace(batch(o), group=None)
    mask = b.mask.clone()
    mask[0] = False
    lp = b.logp.float().nan_to_num(float("inf")).requires_grad_()
    old = b.logp_old.nan_to_num(float("nan"))
    totals = Totals(float(mask.sum()), len(mask), 1, float(mask.sum()))
    loss = -o.J(lp, old, b.adv[:, :1].float(), mask, totals=totals)
    (g,) = torch.autograd.grad(loss, lp, retain_graph=True)
    p = compare(
        o,
        loss,
        g,
        roundings(loss, lp),
        logp=lp,
        logp_old=old,
        adv=b.adv[:, :1],
        mask=mask,
        totals=totals,
    )
    assert p.of_bound <= 1


def test_roundings_are_counted_in_the_graph():
    x = torch.ones(2, requires_grad=True)
    assert roundings((x * 2).exp().sum(), x) == 4 * 4  # x's own node, then three
    y = x * 3
    assert (
        roundings((y * 2).exp().sum(), y) == 4 * 4
        and roundings(x.detach().sum(), x) == 4
    )


def test_the_monitor_looks_at_every_kth_and_keeps_the_largest():
    m = Monitor(upref.get("dapo"), first=2, every=5)
    assert [m.due() for _ in range(11)] == [i in (1, 2, 5, 10) for i in range(1, 12)]
    never = Monitor(upref.get("dapo"), first=0, every=0)
    assert not any(never.due() for _ in range(100))
    m = Monitor(upref.get("up_dapo"), first=1, every=0)
    one = m(*trained("up_dapo", torch.float32))
    assert (
        one == m(*trained("up_dapo", torch.float32, WRONG["sign"])) and m.checked == 1
    )
    assert 0 < one["upref/parity_max_abs"] < 1e-5


@pytest.mark.parametrize("setting", [{"first": -1}, {"every": 2.5}, {"first": True}])
def test_settings(setting):
    with pytest.raises(InputError, match="whole number"):
        Monitor(upref.get("dapo"), **setting)


def test_a_wrong_loss_stops_the_run_and_one_sentence_says_where():
    m = Monitor(upref.get("up_dapo"), first=3, every=0)
    m(*trained("up_dapo", torch.float32))
    m(*trained("up_dapo", torch.bfloat16))
    with pytest.raises(
        ParityError, match=r"micro-batch 3 .* response \d+, token \d+ is .*replay\.md"
    ):
        m(*trained("up_dapo", torch.float32, WRONG["one token"]))


def test_on_fail_warn_trains_on_and_counts(caplog):
    """Find that `on_fail="warn"` counts each alarm, and that NaN is counted as 1e9."""
    m = Monitor(upref.get("up_dapo"), first=99, on_fail="warn")
    for _ in range(10):
        found = m(*trained("up_dapo", torch.float32, WRONG["doubled"]))
    assert found["upref/parity_alarms"] == 10 and found["upref/parity_of_bound"] > 1
    assert "is not what trains" in caplog.text and "trains on" in caplog.text
    m = Monitor(upref.get("up_dapo"), first=99, on_fail="warn")
    found = m(*trained("up_dapo", torch.float32, WRONG["not a number"]))
    # JSON has no infinity
    assert found["upref/parity_alarms"] == 1 and found["upref/parity_of_bound"] == 1e9
    with pytest.raises(InputError, match="on_fail must be stop or warn"):
        Monitor(upref.get("up_dapo"), on_fail="ignore")


def a_mini_batch(name, dtype):
    """Return (loss, what else `compare` takes, hyperparameters) of a mini-batch as a
    run has them: 16 responses of 64 tokens, a policy that has moved by a thousandth.
    """
    o, g = upref.get(name), torch.Generator().manual_seed(0)
    old = -torch.rand(16, 64, generator=g) * 2
    lp = (old + 1e-3 * torch.randn(16, 64, generator=g)).to(dtype).requires_grad_()
    A = torch.randn(16, 1, generator=g).expand(16, 64).to(dtype)
    mask = torch.ones(16, 64, dtype=torch.bool)
    hp = {k: v for k, v in o.hyperparameters.items() if k != "beta"}
    totals = Totals(*map(float, Totals.of(mask)))
    batch = dict(logp=lp, logp_old=old.to(dtype), adv=A, mask=mask, totals=totals)
    return -o.J(lp, old.to(dtype), A, mask, totals=totals, **hp), batch, hp


def test_where_the_band_is_finer_than_the_dtype_it_says_so(caplog):
    """GSPO's band is 3e-4 wide, a step of bfloat16 at 1 is 8e-3."""
    found = Monitor(upref.get("gspo"))(*a_mini_batch("gspo", torch.bfloat16))
    assert found["upref/parity_blind"] == 1 and "100 % of the tokens" in caplog.text
    for name, dtype in (("gspo", torch.float32), ("dapo", torch.bfloat16)):
        assert (
            Monitor(upref.get(name))(*a_mini_batch(name, dtype))["upref/parity_blind"]
            < 0.1
        )


def test_the_glossary_has_every_logged_metric():
    loss, batch, hp = a_mini_batch("gspo", torch.float32)
    logged = Monitor(upref.get("gspo"))(loss, batch, hp)
    logged |= live(
        upref.get("gspo"), *(batch[k] for k in ("logp", "logp_old", "adv", "mask")), hp
    )
    page = (Path(__file__).parents[2] / "docs/glossary.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert logged.keys() <= {
        f"upref/{name}" for row in rows for name in re.findall(r"`([^`]+)`", row)
    }
