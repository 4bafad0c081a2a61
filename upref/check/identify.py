# SPDX-License-Identifier: Apache-2.0
"""`upref.identify`: which objective a loss is, by its gradients alone."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.aggregate import AGGREGATIONS
from upref.check.adapters import adapt
from upref.check.blackbox import SIGNS, BlackBox, measure, neutral
from upref.check.causes import cause
from upref.check.conduct import mutation
from upref.check.curve import random_batch
from upref.check.fit import Case, promised, unit_weights
from upref.check.identity import Identity, Match
from upref.check.regimes import LOG_R, MU, lay
from upref.check.regimes import SIGNS as ALL_SIGNS
from upref.check.solve import Candidate, candidate
from upref.errors import InputError
from upref.registry import REDUCE, Objective, get, names
from upref.rollouts import Rollouts

RANDOM = 12  # random batches beside the grid
TRIED = 6  # candidates of which the distance is taken where none fits


def identify(loss: Any) -> Identity:
    """The objective that `loss` is: an Identity, true where one is named, printable, and JSON.

    loss: as for `upref.check`. Compared are gradients, for |log r| <= 8 (what the loss does to the value, to masked
    slots or to advantages before it is called is not seen). A loss that takes no group ids sees one group. Raises
    InputError where the loss cannot be run, is not differentiable or changes its inputs.
    """
    start = time.perf_counter()
    box = measure(adapt(loss, neutral(), {}))
    if changed := mutation(box.case):
        raise InputError(f"{box.loss.name} changes its inputs ({changed[0].regime}): copy them before writing.")
    seconds = lambda: time.perf_counter() - start
    facts: dict[str, Any] = dict(
        loss=box.loss.name, bounds={s: box.bounds(A) for s, A in zip(("A > 0", "A < 0"), SIGNS, strict=True)}
    )
    tried, grids = _candidates(box), _grids(box)
    if box.random:
        two = "two calls on the same batch give different gradients"
        return Identity(**facts, kind="none", matches=[], why=two, contract=_contract(box), seconds=seconds())
    fitting = [_match(box, c, grids) for c in tried if c.fits]
    if matches := sorted((m for m in fitting if m.distance <= 10 * box.tol), key=_simplest):
        wrong = _slips(box, matches[0], grids)
        kind = "pitfall" if wrong else "up" if matches[0].name.startswith("up(") else "objective"
        return Identity(**facts, kind=kind, matches=matches, why="; ".join(wrong), contract=_contract(box), seconds=seconds())
    near = sorted(tried, key=lambda c: (c.stuck, c.miss))[:TRIED]
    nearest = sorted((_match(box, c, grids) for c in near), key=lambda m: (m.mean, m.distance))[:1]
    kind, why = "none", ""
    if found := _pitfall(box, [get(m.name) for m in nearest], grids):
        kind, (match, why) = "pitfall", found
        nearest = [match]
    return Identity(**facts, kind=kind, matches=nearest, why=why, contract=_contract(box), seconds=seconds())


def _candidates(box: BlackBox) -> list[Candidate]:
    every = [get(n) for n in names()]
    every += [get(f"up({o.name})") for o in every if not o.name.startswith("up_")]
    tried = [c for o in every if (c := candidate(o, box))]
    return tried or [Candidate(o, box) for o in every if not (o.coupled or "entropy" in o.reads)]


# ---- batches ---------------------------------------------------------------------------------------------------------
def _grids(box: BlackBox) -> list[tuple[Rollouts, bool]]:
    """Tokens, responses by mean and by sum, random ones; with whether advantages differ within a response."""
    rng = np.random.default_rng(0)
    jumps = [p for p, _ in box.jumps if not p.unsure]
    cases = [(A, mu, float(r)) for A in ALL_SIGNS for mu in MU for r in np.exp(LOG_R) if mu * r < 0.999]
    for p in jumps:
        for A in (A for A in ALL_SIGNS if A * p.A > 0):
            for r in (p.r * (1 - box.near), p.r * (1 + box.near)):
                cases += [(A, mu, r) for mu in ([p.mu] if box.reads_mu else MU) if mu * r < 0.999]
    cases = [cases[i] for i in rng.permutation(len(cases))]
    few = [c for c in cases if c[1] not in MU[1:]]  # the bounds of a response's ratio do not depend on mu
    one = replace(box.case, o=replace(neutral(), agg="seq-mean"))
    out = [(lay(cases, "token", True, rng), False), *((lay(few, level, True, rng), False) for level in REDUCE)]
    mixed = lay(cases, "token", False, rng)
    out += [(mixed, True)] if box.takes(mixed) else []
    out += [(random_batch(one, rng), False) for _ in range(RANDOM)]
    return [(box.case.ready(b), mixed) for b, mixed in out]


def _off(box: BlackBox, o: Objective, hp: dict[str, Any], b: Rollouts) -> Tensor:
    """Relative difference of the weights on each token, 0 on masked slots; hp without beta."""
    expected = unit_weights(o, b, hp) + box.kl_weights(b)
    found = box.loss.gradient(b) / box.case.factors(b, box.agg or promised(o)) / box.scale
    scale = torch.maximum(expected.abs(), b.adv.abs()).clamp(min=0.1)
    off = ((found - expected).abs() / scale).nan_to_num(nan=torch.inf)
    return torch.where(b.mask, off.masked_fill(_rounded(box, o, hp, b), 0) if box.tol > 1e-4 else off, 0)


def _rounded(box: BlackBox, o: Objective, hp, b: Rollouts) -> Tensor:
    """Tokens whose weight jumps within the rounding of float32."""
    step = [unit_weights(o, replace(b, logp_old=b.logp_old + d), hp) for d in (-2e-5, 2e-5)]
    return (step[1] - step[0]).abs() > 1e-3 * step[0].abs().clamp(min=1e-6)


# ---- candidates ------------------------------------------------------------------------------------------------------
def _match(box: BlackBox, c: Candidate, grids) -> Match:
    offs = []
    for b, mixed in grids:
        if mixed and c.o.agg == "seq-mean":
            continue
        offs.append(_off(box, c.o, c.hp, b))
    distance = max(x.max().item() for x in offs)
    mean = sum(x.clamp(max=1).sum().item() for x in offs) / sum(int(b.mask.sum()) for b, _ in grids)
    hp, same_kl = c.seen(), bool(box.kl) and c.o.kl == box.kl
    if c.o.kl and (same_kl or not box.kl):
        hp["beta"] = box.beta
    return Match(c.o.name, hp, _agg(box), _own(box, c.o), same_kl or not box.kl, distance, mean)


def _own(box: BlackBox, o: Objective) -> bool:
    """Whether the aggregation is the objective's; without group ids the batch is one group."""
    same = promised(o) == box.agg or ("group" not in box.loss.reads and {promised(o), box.agg} == {"token-mean", "group-token-mean"})
    return same and box.scale == 1


def _agg(box: BlackBox) -> str:
    if box.agg == "seq-mean-token-sum" and 0 < box.scale < 1:
        return f"seq-mean-token-sum-norm, L = {1 / box.scale:.7g}"
    return box.agg


def _simplest(m: Match):
    """The objective whose own aggregation it is goes first, then the one with fewer hyperparameters."""
    plain = sum(v is not None and k != "beta" for k, v in m.hp.items())
    inert = len(get(m.name).hyperparameters) - len(m.hp)
    return not m.own, not m.same_kl, m.name.startswith("up("), plain, inert, len(m.hp.keys() - {"beta"}), "anchored" in m.name, m.name


# ---- slips -----------------------------------------------------------------------------------------------------------
def _slips(box: BlackBox, m: Match, grids) -> list[str]:
    """What keeps a loss with the right weights from being right."""
    out = []
    if box.scale < 0:
        out.append("the sign is flipped: J is returned where a loss, -J, should be")
    if abs(box.scale) != 1 and not _agg(box).startswith("seq-mean-token-sum-norm"):
        out.append(f"every weight is {abs(box.scale):.7g} times what it should be")
    if box.agg not in AGGREGATIONS:
        out.append(f"aggregated by {box.agg}")
    if box.kl and not m.same_kl:
        out.append(f"a KL term is subtracted that {m.name} does not have: {box.beta:.7g} {box.kl}")
    b = grids[0][0]
    if box.loss.splits and not get(m.name).coupled:
        parts = torch.cat([box.loss.gradient(part) for part in b.split(4)])
        whole = box.loss.gradient(b)
        if (parts - whole).abs().max() > 1e-5 * whole.abs().max():
            out.append("the mean is taken of each micro-batch: the gradients of parts do not add up to the batch's")
    return out


def _pitfall(box: BlackBox, nearest: list[Objective], grids) -> tuple[Match, str] | None:
    """A known slip (upref.check.causes) on the clip that the jumps suggest, else on the nearest objective."""
    bounds = sorted({round(r, 9) for A in SIGNS for r in box.bounds(A)})
    low = next((1 - x for x in bounds if 0 < x < 1), None)
    high = next((x - 1 for x in bounds if 1 < x < 10), None)
    both = {"eps_low": low or high, "eps_high": high or low} if bounds and (low or high) else {}
    even = both and abs(both["eps_low"] - both["eps_high"]) < 1e-6
    mean = "grpo" if box.agg == "seq-mean-token-mean" else "dr_grpo" if box.agg == "seq-mean-token-sum" else "ppo_clip"
    bases = [(get(mean), {"eps": both["eps_low"]})] if even else []
    bases += [(get("dapo"), both), (get("gspo"), both), *((o, both) for o in nearest)]
    b = grids[0][0]
    for o, clip in bases:
        hp = {k: v for k, v in o.resolve({k: v for k, v in clip.items() if k in o.hyperparameters}).items() if k != "beta"}
        case = Case(box.loss, o, hp, box.agg or promised(o), tol=box.tol, edges=box.case.edges)
        found = box.loss.gradient(b) / case.factors(b) / box.scale - box.kl_weights(b)
        if why := cause(case, b, found, torch.zeros_like(b.mask), bounds):
            used = {k: v for k, v in hp.items() if clip.get(k) is not None}
            return Match(o.name, used, _agg(box) or case.agg, _own(box, o), not box.kl, 0.0, 0.0), why
    return None


def _contract(box: BlackBox) -> list[str]:
    loss, out = box.loss, list(box.loss.contract)
    if "group" not in loss.reads and box.agg == "token-mean":
        out.append("the loss takes no group ids: token-mean and group-token-mean are one")
    if loss.unreduced:
        out.append("it answers without reduction: its caller chooses the aggregation")
    elif not loss.splits:
        out.append("one call sees the whole mini-batch: what its micro-batches add up to is not seen")
    if box.tol > 1e-4:
        out.append("it computes in float32: compared to 0.2 %, bounds known to about 1e-6")
    return out
