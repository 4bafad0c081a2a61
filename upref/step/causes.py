# SPDX-License-Identifier: Apache-2.0
"""The fault that makes the token weights that were read off a gradient.

Weights are compared as (weight of the token before aggregation) x (factor of its
response) x (one constant). A fault is named where the three together give the weights
that were found.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from upref.errors import InputError
from upref.kl import ESTIMATORS
from upref.registry import Objective, get, names
from upref.rollouts import Rollouts
from upref.step.normalizers import factor_words, right_factors
from upref.step.rows import Row
from upref.step.weights import Tokens, factors, is_named, left_out
from upref.verify.faults import known
from upref.verify.faults.batch_reading import between, moved
from upref.verify.faults.losses import LossFault, fault, term_of

BOUNDS = (0.1, 0.2, 0.28, 0.3, 0.4, 3.0, 10.0)  # of a clip, as people set them


# A fault of these kinds moves which tokens have a gradient. Beside it, a response
# without one is no second fault: if it is not explained by the first, the first is the
# wrong one.
STOPS = ("hyperparameter", "objective", "clip", "ratio", "stop-gradient", "rounding")


def named(w: Tokens, among: str = "") -> tuple[str, Tensor] | None:
    """The fault that gives these weights on all response tokens: in words, and the
    weights that it gives [B, T].

    among: words of a cause; other faults are not tried.
    """
    hp = w.goal.hp | ({"beta": w.goal.beta} if w.goal.o.kl else {})
    for one in _faults(w, hp):
        if not is_named(one.words, among):
            continue
        unit, mask = _unit(w, one, hp)
        k = factors(w, unit)
        if k is None:
            continue
        dead = [
            i for i, v in enumerate(k) if abs(v) <= 1e-4 * k.nan_to_num(0).abs().max()
        ]
        if len(dead) == len(k) - int(k.isnan().sum()) or (dead and one.kind in STOPS):
            continue
        k[dead] = torch.nan
        found = factor_words(
            w.goal, w.rows, w.b, k, dead, w.tol, mask, int((mask & (unit != 0)).sum())
        )
        if found is None:
            continue
        because, factor = found
        lost = left_out(dead) if dead else ""
        alive = torch.ones(len(k), dtype=torch.bool)
        alive[dead] = False
        if said := "; ".join(filter(None, [one.words, lost, because])):
            return said, unit * torch.where(alive, factor, 0)[:, None]
    return None


def _put(words: str, hp: dict | None = None, **change: Tensor) -> LossFault:
    """The objective on a batch of which something is replaced."""
    return fault(words, "batches", hp=hp or {}, view=lambda b: b.but(**change))


def _faults(w: Tokens, hp: dict) -> Iterator[LossFault]:
    """One fault each, or none, the right one first."""
    r, o, goal, at = w.rollouts(), w.goal.o, w.goal, torch.arange(w.here.shape[1])
    off, last = (
        w.here & ~w.b.mask,
        torch.tensor([[len(x.response) - 1] for x in w.rows]),
    )
    masks = {
        "masked tokens train": w.here,
        "the mask is one token late": moved(w.b.mask, 1) & w.here,
        "the mask is one token early": moved(w.b.mask, -1) & w.here,
        "the last token of each response does not train": w.b.mask & (at != last),
        "the first token of each response does not train": w.b.mask & (at > 0),
        "the first token after each hole does not train": w.b.mask & ~moved(off, 1),
        "no token behind the first hole of a response trains": w.b.mask
        & (off.cumsum(1) == 0),
        "no token in front of the last hole of a response trains": w.b.mask
        & (off.flip(1).cumsum(1).flip(1) == 0),
        "a response without the end token trains by its first token alone": w.b.mask
        & (_ends(w.rows) | (at == 0)),
    }
    yield _put("")
    for words, mask in masks.items():
        yield _put(words, mask=mask)
    now = "the old log-probabilities are the current ones"
    yield _put(f"{now}: r = 1", logp_old=w.lp)
    for words, mask in masks.items():
        yield _put(f"{words}; {now}: r = 1", mask=mask, logp_old=w.lp)
    yield _put(
        "the old and the current log-probabilities are exchanged in the ratio",
        logp_old=2 * w.lp - r.logp_old,
    )
    yield _put(f"{now} at temperature 1", logp_old=w.plain)
    for by, where in {1: "late", -1: "early"}.items():
        yield _put(
            f"the old log-probabilities are one token too {where}",
            logp_old=moved(r.logp_old, by),
        )
    yield _put(
        "the old log-probabilities are counted without the holes",
        logp_old=_without_holes(r.logp_old, w.b.mask),
    )
    for words, order in _orders(w.rows).items():
        yield _put(
            f"the advantages are those of {words}",
            adv=r.adv[:, :1][order].expand_as(r.adv),
        )
        for old in _exchanged(w.rows, r.logp_old, order):
            yield _put(f"the old log-probabilities are those of {words}", logp_old=old)
    words = (
        "the advantages of the tokens that train are laid over all response tokens, "
        "one behind the other"
    )
    yield _put(words, adv=_laid_over(r.adv, w.b.mask, w.here))
    yield _put("the sign of the advantages is lost", adv=r.adv.abs())
    n = len(w.rows)
    parts = {"": torch.zeros(n), " in each group": w.b.group}
    parts |= {f" in each micro-batch of {m}": torch.arange(n) // m for m in range(2, n)}
    for where, part in parts.items():
        same = torch.eq(part[:, None], part).double()
        mean = partial(_means_of_parts, same)
        A = r.adv[:, 0]
        for how, center in {
            "normalized": mean(A),
            "divided by their standard deviation": 0 * A,
        }.items():
            for ddof in (1, 0):
                var = (mean(A**2) - mean(A) ** 2) * same.sum(1) / (same.sum(1) - ddof)
                its = torch.where(
                    same.sum(1) > 1, (A - center) / var.sqrt(), A - center
                )
                yield _put(
                    f"the advantages are {how} again{where}",
                    adv=its[:, None].expand_as(r.adv),
                )
    yield _put("the advantages are centered again", adv=r.adv - r.adv[:, 0].mean())
    if r.logp_ref is not None:
        yield _put(
            "the reference model's log-probabilities are used as the old ones",
            logp_old=r.logp_ref,
        )
        yield _put(
            "the reference model's log-probabilities are the current ones",
            logp_ref=w.lp,
        )
        yield _put("the old policy is used as the reference model", logp_ref=r.logp_old)
    if goal.beta:
        yield fault("the KL term is missing", "term", hp={"beta": 0.0})
        yield fault(
            "the KL term is added to J, not subtracted", "term", hp={"beta": -goal.beta}
        )
        for name, kl in ESTIMATORS.items():
            words = (
                f"the KL term ({name}) of the old policy is folded into the advantage"
            )
            yield _put(
                words, {"beta": 0.0}, adv=r.adv - goal.beta * kl(r.logp_old, w.b.ref)
            )
    for key in sorted({"eps", "eps_low", "eps_high", "c"} & hp.keys()):
        for v in (v for v in BOUNDS if v != hp[key] and _takes(o, key, v)):
            is_ = "absent" if hp[key] is None else f"{hp[key]:g}"
            yield fault(f"{key} is {v:g}, not {is_}", "hyperparameter", hp={key: v})
    if o.level == "sequence_mean":
        yield from _over_the_width(w, hp)
    yield from known("losses", o, hp, [])
    for p in (get(n) for n in names() if n != o.name and not get(n).batch_coupled):
        own = {k: v for k, v in hp.items() if k in p.hyperparameters and v is not None}
        yield fault(f"the objective is {p.name}", "objective", objective=p, hp=own)
    # last: a lost sign may look like another response's advantage
    if (source := _sources(w, r, hp)) is not None:
        words = " ".join(map(str, source.tolist()))
        yield _put(
            f"the advantages are those of other responses: of {words}",
            adv=r.adv[source, :1].expand_as(r.adv),
        )
    for words, lost in _lost(w, r):
        yield _put(f"{words} do not train", mask=w.b.mask & ~lost)


def _means_of_parts(same: Tensor, x: Tensor) -> Tensor:
    """[B]: the mean of x over each response's part; same: [B, B], 1 within a part."""
    return same @ x / same.sum(1)


def _ends(rows: Sequence[Row]) -> Tensor:
    """[B, 1]: the response ends in the token in which two responses or more end."""
    last = [row.response[-1] for row in rows]
    end, count = Counter(last).most_common(1)[0]
    return torch.tensor([[count < 2 or token == end] for token in last])


def _sources(w: Tokens, r: Rollouts, hp: dict) -> Tensor | None:
    """[B]: the response whose advantage the weights of each response have.

    None where each has its own, or where the responses are not exchanged one for one: a
    number that happens to equal the advantage of another response is not taken from it.
    """
    n = len(w.rows)
    right = right_factors(w.goal, w.b)[:, None]
    # response i has the weights that the advantage of response j makes
    has = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        unit, mask = _unit(w, _put("", adv=r.adv[j, 0].expand_as(r.adv)), hp)
        has[:, j] = (w.zero(w.found - unit * right) | ~mask).all(1)
    own = has.diagonal()
    if own.all() or (~own & (has.sum(1) != 1)).any():
        return None
    source = torch.where(own, torch.arange(n), has.int().argmax(1))
    return source if len(source.unique()) == n else None


def _laid_over(x: Tensor, mask: Tensor, here: Tensor) -> Tensor:
    """[B, T]: the numbers of the tokens that train, in the places of all response
    tokens from the first on.
    """
    out = torch.zeros_like(x.expand_as(mask))
    places = here.nonzero()[: int(mask.sum())]
    out[places[:, 0], places[:, 1]] = x.expand_as(mask)[mask]
    return out


def _over_the_width(w: Tokens, hp: dict) -> Iterator[LossFault]:
    """The mean of a response's log-ratio runs over the columns of the padded batch,
    with prompts and without.
    """
    term = term_of(w.goal.o, hp)

    def over(width: int, lp: Tensor, old: Tensor, A: Tensor, mask: Tensor) -> Tensor:
        return term(old + (lp - old) * mask.sum(1, keepdim=True) / width, old, A, mask)

    whole = max(len(row.ids) for row in w.rows)
    for width in dict.fromkeys(
        (whole - 1, whole, max(len(row.response) for row in w.rows))
    ):
        yield fault(
            "the response's log-ratio is divided by the padded width",
            "ratio",
            J=partial(over, width),
        )


def _takes(o: Objective, key: str, value: float) -> bool:
    try:
        o.resolve({key: value})
    except InputError:
        return False
    return True


def _lost(w: Tokens, r: Rollouts) -> Iterator[tuple[str, Tensor]]:
    """What the tokens that should train and do not have in common, and no token that
    trains has.
    """
    live = w.b.mask & ~w.zero(w.expected) & ~w.found.isnan()
    gone, left = live & w.zero(w.found), live & ~w.zero(w.found)
    if gone.sum() < 2 or not left.any():
        return
    at, log_r = torch.arange(live.shape[1]).expand(live.shape) + 1.0, w.lp - r.logp_old
    place = at + torch.tensor([[len(row.prompt)] for row in w.rows])
    ids = torch.zeros_like(at)
    for i, row in enumerate(w.rows):
        ids[i, : len(row.response)] = torch.tensor(row.response)
    for words, x in {
        "tokens that equal {:g}": ids,
        "the tokens at place {:g} of each row": place,
    }.items():
        if len(its := x[gone].unique()) == 1 and not (x[left] == its).any():
            yield words.format(float(its)), x == its
    features = {
        "tokens behind the first {:g} of a row": place,
        "tokens behind the first {:g} of a response": at,
        "tokens before place {:g} of a row": -place,
        "tokens with a log r above {:g} or below -{:g}": log_r.abs(),
        "tokens with a log r above {:g}": log_r,
        "tokens with a log r below -{:g}": -log_r,
        "tokens with an advantage above {:g}": r.adv,
        "tokens with an advantage below -{:g}": -r.adv,
    }
    for words, x in features.items():
        low, high = float(x[left].max()), float(x[gone].min())
        if (limit := between(low, high)) is not None:
            yield words.format(abs(limit), abs(limit)), x > limit


def _orders(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Words -> which row's numbers each row gets."""
    n, out = len(rows), {}
    for m in dict.fromkeys((n, *(m for m in (4, 2) if m < n))):
        for k in range(1, m):
            by = f"row i + {k}" if k <= m // 2 else f"row i - {m - k}"
            order = torch.arange(n).split(m)
            out[by + (f" of micro-batches of {m}" if m < n else "")] = torch.cat(
                [x.roll(-k) for x in order]
            )
    lengths = torch.tensor([len(x.response) for x in rows])
    for down in (False, True):
        order = lengths.argsort(descending=down, stable=True)
        how = "by length, longest first" if down else "by length"
        by = f"another row: responses are sorted {how}, and these are not"
        out[by] = order.argsort()
    return out


def _exchanged(rows: Sequence[Row], x: Tensor, order: Tensor) -> Iterator[Tensor]:
    """x [B, T] in that order of its rows: of the responses, or of whole rows padded
    right or left.
    """
    n, p = [len(r.response) for r in rows], [len(r.prompt) for r in rows]
    width = max(len(r.ids) for r in rows)
    for start in ([0] * len(n), p, [width - k for k in n]):
        wide = x.new_zeros(len(n), width + x.shape[1])
        for i, at in enumerate(start):
            wide[i, at : at + n[i]] = x[i, : n[i]]
        wide = wide[order]
        yield torch.stack([wide[i, at : at + x.shape[1]] for i, at in enumerate(start)])


def _unit(w: Tokens, one: LossFault, hp: dict) -> tuple[Tensor, Tensor]:
    """Before aggregation, times the declared scale, and the tokens that train; far off
    where the one does not fit.
    """
    b = w.rollouts()
    x = torch.zeros_like(b.logp)
    try:
        b = one.change.view(b)
        live = b.mask.any(1)
        some = b.but(
            **{k: v[live] for k, v in vars(b).items() if isinstance(v, Tensor)}
        )
        x[live] = (
            replace(one.change, view=lambda b: b).weights(w.goal.o, hp, some)
            * w.goal.scale
        )
    except (InputError, RuntimeError, TypeError, AttributeError, AssertionError):
        x += 1e9
    return x, b.mask


def _without_holes(x: Tensor, mask: Tensor) -> Tensor:
    """The numbers of the tokens that train from the start of each row on, and zeros."""
    out = torch.zeros_like(x)
    for i, m in enumerate(mask):
        out[i, : m.sum()] = x[i, m]
    return out
