# SPDX-License-Identifier: Apache-2.0
"""What a wrong loss is: the record, put into the reference, that reproduces its weights; searched, never guessed."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from upref.errors import InputError
from upref.kl import ESTIMATORS
from upref.regimes import off
from upref.registry import Objective, get, names
from upref.rollouts import Rollouts
from upref.transforms import up
from upref.verify.measure import Case, kl_slope, unit_weights
from upref.verify.slips import Slip, known

FEW = 24  # responses: most slips fail on a few already
NOTHING = Slip("no gradient reaches log_prob: it is detached, or rounded away", "stop-gradient", scale=lambda b: 0.0)


def explain(case: Case, b: Rollouts, found: Tensor, ignore: Tensor, bounds: list[float]) -> Slip | None:
    """The first slip that, put into the reference, has the found weights on every token of the batch.

    Tried in this order: other hyperparameters, the catalogue, the plug-in, other objectives. ignore: tokens at a bound.
    """
    use = b.mask & ~ignore
    if not (found[use].abs() > 0).any():
        return NOTHING
    every = (
        slip
        for slips in (
            _retuned(case, bounds),
            _other_kl(case, b, found, use),
            known(case.o, case.hp, bounds),
            _others(case),
        )
        for slip in slips
    )
    return reproduces(every, case, b, found, use)


def reproduces(slips: Iterable[Slip], case: Case, b: Rollouts, found: Tensor, use: Tensor) -> Slip | None:
    """The first that agrees on all used tokens."""
    few = slice(0, FEW)
    fields = ("logp", "logp_old", "adv", "mask", "logp_ref", "entropy")
    rows = {k: v[few] for k in fields if (v := getattr(b, k)) is not None}
    small = replace(b, group=None, totals=None, **rows)
    rounded = case.rounded(b)

    def fits(slip: Slip, part: Rollouts, n: slice) -> bool:
        try:
            apart = off(found[n], slip.weights(case.o, case.hp, part), part.adv)
        except (InputError, RuntimeError, TypeError):  # of other shapes: not this objective's form
            return False
        return bool((apart[use[n] & ~rounded[n]] < case.tol).all())

    return next((s for s in slips if (s.whole or fits(s, small, few)) and fits(s, b, slice(None))), None)


def _retuned(case: Case, bounds: list[float]) -> Iterator[Slip]:
    """The objective at other hyperparameters: its two sides swapped, or as the matcher recovers them from the loss."""
    from upref.verify.match import recover

    hp = case.hp
    if {"eps_low", "eps_high"} <= hp.keys() and hp["eps_low"] != hp["eps_high"]:
        swapped = {"eps_low": hp["eps_high"], "eps_high": hp["eps_low"]}
        yield Slip("the two sides of the clip are swapped (eps_low, eps_high)", "hyperparameter", hp=swapped)
    for moved in recover(case):
        yield Slip(_said(moved, hp), "hyperparameter", hp=moved)
    if hp.get("beta"):
        yield Slip("the KL term is missing, or carries no gradient", "term", hp={"beta": 0.0})
        yield Slip("the KL term is added to J, not subtracted", "term", hp={"beta": -hp["beta"]})


def _other_kl(case: Case, b: Rollouts, found: Tensor, use: Tensor) -> Iterator[Slip]:
    """A KL term of another size, or that the objective does not have: where A = 0 nothing else is left."""
    zero = use & (b.adv.expand_as(use) == 0)
    if b.logp_ref is None or "logp_ref" not in case.loss.reads or not zero.any():
        return
    o, plain = case.o, {k: v for k, v in case.hp.items() if k != "beta"}
    rest = lambda b: unit_weights(o, b, o.resolve(plain))
    for name in sorted(ESTIMATORS, key=lambda k: k != o.kl):
        d = kl_slope(name, b)[zero]
        beta = -(found[zero] @ d / (d @ d)).item() if d.any() else 0.0
        if not abs(beta) > case.tol:
            continue
        if name == o.kl:
            yield Slip(_said({"beta": beta}, case.hp), "hyperparameter", hp={"beta": beta})
        elif not case.hp.get("beta"):
            done = "subtracted" if beta > 0 else "added to J"
            yield Slip(f"a KL term is {done} that {o.name} does not have: {abs(beta):.6g} {name}", "term",
                       weigh=lambda b, beta=beta, name=name: rest(b) - beta * kl_slope(name, b))  # type: ignore[misc]  # fmt: skip


def _said(moved: dict[str, Any], hp: dict[str, Any]) -> str:
    number = lambda v, digits: "absent" if v is None else f"{v:.{digits}g}"
    said = " and ".join(f"{k} is {number(v, 6)}, not {number(hp[k], 6)}" for k, v in moved.items())
    if moved and all(_absolute(k, v, hp[k]) for k, v in moved.items()):
        said += ": taken as absolute, not as a distance from 1"
    return said


def _absolute(key: str, v: Any, now: Any) -> bool:
    """Whether this distance from 1 makes the number itself the bound."""
    if v is None or now is None or key not in ("eps_low", "eps_high"):
        return False
    return abs((1 - v if key == "eps_low" else 1 + v) - now) < 1e-6


def _others(case: Case) -> Iterator[Slip]:
    o, hp = case.o, case.hp
    if not o.name.startswith("up("):
        yield Slip(f"it is up({o.name}): log π_θ in the place of the clipped ratio where A > 0", "objective",
                   objective=up(o), hp=hp)  # fmt: skip
    for p in (get(n) for n in names() if n != o.name and not get(n).coupled):
        own = {k: v for k, v in hp.items() if k in p.hyperparameters and v is not None}
        for h in (own, {}):
            yield Slip(f"it is {_called(p, h)}", "objective", objective=p, hp=h)


def _called(p: Objective, h: dict[str, Any]) -> str:
    return f"{p.name}({', '.join(f'{k}={v:g}' for k, v in p.resolve(h).items() if v)})"
