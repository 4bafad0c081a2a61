# SPDX-License-Identifier: Apache-2.0
"""What token weights read off a gradient say: which tokens train, one factor a response, and the fault that makes them.

Weights are compared as (weight of the token before aggregation) x (factor of its response) x (one constant). A fault
is named where the three together give the weights that were found.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from upref.errors import InputError
from upref.registry import get, names
from upref.rollouts import Rollouts
from upref.step.goal import Goal
from upref.step.rows import Padded, Row
from upref.step.shares import factor_words
from upref.verify.faults import Slip, known

BOUNDS = (0.1, 0.2, 0.28, 0.3, 0.4, 3.0, 10.0)  # of a clip, as people set them
NEAR = 1e-4  # how near weights read off a float32 gradient must come, relative to the largest


@dataclass(frozen=True)
class Tokens:
    """Weights that were found on the response tokens, and what each hypothesis starts from. All [B, T]."""

    goal: Goal
    rows: Sequence[Row]
    b: Padded
    lp: Tensor
    found: Tensor  # nan where it is not determined
    prompts: list[Tensor]
    expected: Tensor
    plain: Tensor  # lp at temperature 1
    tol: float = NEAR
    whole: Tensor | None = None  # factor of each response, where the gradient is one of each; sharper than `found`

    @property
    def here(self) -> Tensor:
        return self.b.here

    @property
    def size(self) -> float:
        return max(float(self.found.nan_to_num(0).abs().max()), float(self.expected.abs().max()), 1e-300)

    def zero(self, x: Tensor) -> Tensor:
        return x.isnan() | (x.abs() <= self.tol * self.size)

    def same(self, x: Tensor, y: Tensor) -> bool:
        return bool((self.zero(x - y) | x.isnan() | y.isnan()).all())

    def rollouts(self, mask: Tensor | None = None) -> Rollouts:
        b, group = self.b, self.b.group if self.goal.grouped else None
        old = self.lp if b.old is None else b.old
        return Rollouts.unchecked(
            logp=self.lp, logp_old=old, adv=b.adv, mask=b.mask if mask is None else mask, group=group, logp_ref=b.ref
        )


# ---- what the weights show -------------------------------------------------------------------------------------------
def observed(w: Tokens) -> list[tuple[str, str, str]]:
    """(what, expected, found) of everything that can be read without a hypothesis."""
    out = []
    top = lambda x: f"up to {float(x.nan_to_num(0).abs().max()):.3g}"
    trained = [~w.zero(p) for p in w.prompts]
    if n := int(sum(t.sum() for t in trained)):
        out.append((f"{n} prompt tokens train", "weight 0", top(torch.cat(w.prompts))))
    masked = w.here & ~w.b.mask
    if n := int((masked & ~w.zero(w.found)).sum()):
        out.append((f"{n} of {int(masked.sum())} masked response tokens train", "weight 0", top(w.found[masked])))
    live = w.b.mask & ~w.zero(w.expected) & ~w.found.isnan()
    lost = live & w.zero(w.found)
    if lost.any():
        gone = lambda i: w.whole is None or abs(w.whole[i]) <= 1e-7 * w.whole.abs().max()
        whole = [i for i in range(len(w.rows)) if live[i].any() and bool((lost | ~live)[i].all()) and gone(i)]
        if whole:
            rows = f"response{'s' * (len(whole) > 1)} {', '.join(map(str, whole))}"
            out.append((f"{rows} {'do' if len(whole) > 1 else 'does'} not train", "weights other than 0", "weight 0"))
        some = int(lost.sum()) - int(lost[whole].sum())
        if some:
            out.append((f"{some} tokens that should train do not", top(w.expected[lost]), "weight 0"))
    idle = w.b.mask & w.zero(w.expected)
    if n := int((idle & ~w.zero(w.found)).sum()):
        out.append((f"{n} tokens train that the objective stops", "weight 0", top(w.found[idle])))
    if (k := factors(w, w.expected)) is not None and not w.same(w.found.where(w.b.mask, torch.nan), w.expected):
        shown = ["-" if v.isnan() else f"{v:.4g}" for v in k]
        if len(set(shown) - {"-"}) > 1 and not lost.any():
            out.append(("each response has one factor", "1 for every response", " ".join(shown)))
    return out


def factors(w: Tokens, unit: Tensor) -> Tensor | None:
    """k_i of found = k_i unit on each row, nan where the row does not tell; None where there is no such k."""
    out = torch.full((len(w.rows),), torch.nan, dtype=torch.float64)
    for i in range(len(w.rows)):
        x, y = w.found[i], unit[i]
        use = w.here[i] & ~x.isnan() & ~y.isnan()
        x, y = x[use], y[use]
        if not y.any():
            if not w.zero(x).all():
                return None
            continue
        k = (x @ y) / (y @ y)
        if not ((x - k * y).abs() <= w.tol * max(w.size, float((k * y).abs().max()))).all():
            return None
        out[i] = k
    return out


# ---- which fault makes them ------------------------------------------------------------------------------------------
def named(w: Tokens) -> str:
    """The fault that gives exactly these weights on all response tokens, or nothing."""
    for words, unit in units(w):
        k = factors(w, unit)
        if k is None:
            continue
        dead = [i for i, v in enumerate(k) if abs(v) <= 1e-4 * k.nan_to_num(0).abs().max()]
        if len(dead) == len(k) - int(k.isnan().sum()):
            continue
        k[dead] = torch.nan
        because = factor_words(w.goal, w.rows, w.b, k, dead, w.tol)
        if because is None:
            continue
        lost = f"responses {', '.join(map(str, dead))} do not train" if dead else ""
        if said := "; ".join(filter(None, [words, lost, because])):
            return said
    return ""


def units(w: Tokens) -> Iterator[tuple[str, Tensor]]:
    """Weights per token before aggregation, with one fault each, the right ones first."""
    o, b = w.goal.o, w.b
    hp = w.goal.hp | ({"beta": w.goal.beta} if o.kl else {})
    every = w.here
    masks = {
        "": b.mask,
        "masked tokens train": every,
        "the mask is one token late": torch.roll(b.mask, 1, 1) & every & (torch.arange(every.shape[1]) > 0),
        "the mask is one token early": torch.roll(b.mask, -1, 1) & every,
        "the last token of each response does not train": b.mask & torch.roll(every, -1, 1)
        & (torch.arange(every.shape[1]) < every.shape[1] - 1),
        "the first token of each response does not train": b.mask & (torch.arange(every.shape[1]) > 0),
        "the first token after each hole does not train": b.mask & ~_moved(every & ~b.mask, 1),
    }  # fmt: skip
    for words, mask in masks.items():
        yield words, _unit(w, Slip("", "batches"), hp, w.rollouts(mask))
    r = w.rollouts()
    views = {
        "the old log-probabilities are the current ones: r = 1": {"logp_old": w.lp},
        "the advantages are one row too late": {"adv": r.adv.roll(1, 0)},
        "the advantages are one row too early": {"adv": r.adv.roll(-1, 0)},
        "the advantages are normalized again": {"adv": (r.adv - _mean(r)) / _std(r)},
        "the advantages are centered again": {"adv": r.adv - _mean(r)},
        "the sign of the advantages is lost": {"adv": r.adv.abs()},
        "the old and the current log-probabilities are exchanged in the ratio": {"logp_old": 2 * w.lp - r.logp_old},
        "the old log-probabilities are one token too late": {"logp_old": _moved(r.logp_old, 1)},
        "the old log-probabilities are one token too early": {"logp_old": _moved(r.logp_old, -1)},
        "the old log-probabilities are the current ones at temperature 1": {"logp_old": w.plain},
        "the old policy is used as the reference model": {"logp_ref": r.logp_old},
    }
    lengths = torch.tensor([len(x.response) for x in w.rows])
    for down in (False, True):
        order = lengths.argsort(descending=down, stable=True)
        words = f"responses are sorted by length{', longest first' * down}, and their advantages are not"
        views[words] = {"adv": r.adv[:, :1][order.argsort()].expand_as(r.adv)}
    for m in range(2, len(w.rows)):
        A = torch.cat([(x - x.mean()) / (x.std() if len(x) > 1 else 1) for x in r.adv[:, 0].split(m)])
        views[f"the advantages are normalized in each micro-batch of {m}"] = {"adv": A[:, None].expand_as(r.adv)}
    if r.logp_ref is not None:
        views["the reference model's log-probabilities are used as the old ones"] = {"logp_old": r.logp_ref}
        views["the reference model's log-probabilities are the current ones"] = {"logp_ref": w.lp}
    for words, change in views.items():
        yield words, _unit(w, Slip("", "batches"), hp, _with(r, **change))
    for words, mask in list(masks.items())[1:]:
        both = f"{words}; the old log-probabilities are the current ones: r = 1"
        yield both, _unit(w, Slip("", "batches"), hp, _with(w.rollouts(mask), logp_old=w.lp))
    for slip in _slips(w, hp):
        yield slip.words, _unit(w, slip, hp, r)


def _slips(w: Tokens, hp: dict) -> Iterator[Slip]:
    o, goal = w.goal.o, w.goal
    if goal.beta:
        yield Slip("the KL term is missing", "term", hp={"beta": 0.0})
        yield Slip("the KL term is added to J, not subtracted", "term", hp={"beta": -goal.beta})
    for k in sorted({"eps", "eps_low", "eps_high", "c"} & hp.keys()):
        for v in (v for v in BOUNDS if v != hp[k]):
            now = "absent" if hp[k] is None else f"{hp[k]:g}"
            yield Slip(f"{k} is {v:g}, not {now}", "hyperparameter", hp={k: v})
    yield from known(o, hp, [])
    for p in (get(n) for n in names() if n != o.name and not get(n).coupled):
        own = {k: v for k, v in hp.items() if k in p.hyperparameters and v is not None}
        yield Slip(f"the objective is {p.name}", "objective", objective=p, hp=own)


def _unit(w: Tokens, slip: Slip, hp: dict, b: Rollouts) -> Tensor:
    """Before aggregation, times the declared scale; nan everywhere where the slip does not fit this batch."""
    try:
        o = w.goal.o
        live = b.mask.any(1)
        x = torch.zeros_like(b.logp)
        some = Rollouts.unchecked(
            **{k: v[live] if isinstance(v, Tensor) else v for k, v in vars(b).items() if k in _FIELDS}
        )
        x[live] = slip.weights(o, hp, some) * w.goal.scale
        return x
    except (InputError, RuntimeError, TypeError, AttributeError, AssertionError):
        return torch.full_like(b.logp, torch.nan).nan_to_num(1e9)


_FIELDS = ("logp", "logp_old", "adv", "mask", "group", "logp_ref", "entropy", "totals")


def _with(b: Rollouts, **change) -> Rollouts:
    return Rollouts.unchecked(**{k: v for k, v in vars(b).items() if k in _FIELDS} | change)


def _mean(b: Rollouts) -> Tensor:
    return b.adv[:, 0].mean()


def _std(b: Rollouts) -> Tensor:
    return b.adv[:, 0].std()


def _moved(x: Tensor, by: int) -> Tensor:
    """Each row moved to the right or, by < 0, to the left; zeros come in."""
    zero = torch.zeros_like(x[:, :1])
    return torch.cat([zero, x[:, :-1]], 1) if by > 0 else torch.cat([x[:, 1:], zero], 1)
