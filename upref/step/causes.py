# SPDX-License-Identifier: Apache-2.0
"""The fault that makes the token weights that were read off a gradient.

Weights are compared as (weight of the token before aggregation) x (factor of its
response) x (one constant). A fault is named where the three together give the weights
that were found.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.kl import ESTIMATORS
from upref.registry import Objective, get, names
from upref.rollouts import Rollouts
from upref.step.normalizers import factor_words, right_factors
from upref.step.rows import Row
from upref.step.weights import Tokens, factors, is_named, left_out
from upref.verify.faults import hyperparameter_id, known, measured
from upref.verify.faults.batch_reading import between, moved
from upref.verify.faults.losses import (
    KL_MISSING,
    LossFault,
    fault,
    kl_added,
    term_of,
)
from upref.verify.finding import NO_CAUSE, Cause, join_causes

BOUNDS = (0.1, 0.2, 0.28, 0.3, 0.4, 3.0, 10.0)  # of a clip, as people set them
# the same of a sampler's correction
CORRECTION_BOUNDS = (0.1, 0.2, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 8.0, 10.0)


# A fault of these kinds moves which tokens have a gradient. Beside it, a response
# without one is no second fault: if it is not explained by the first, the first is the
# wrong one.
STOPS = ("hyperparameter", "objective", "clip", "ratio", "stop-gradient", "rounding")


def named(w: Tokens, among: Cause = NO_CAUSE) -> tuple[Cause, Tensor] | None:
    """The fault that gives these weights on all response tokens, and the weights that
    it gives [B, T].

    among: a cause; faults that it does not name are not tried.
    """
    hp = w.goal.hp | ({"beta": w.goal.beta} if w.goal.o.kl else {})
    alike = _one_weight(w)
    if alike is not None and (not among or set(alike[0].ids) <= set(among.ids)):
        return alike
    for one in token_faults(w, hp):
        if not is_named(one, among):
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
        moving = int((mask & (unit != 0)).sum())
        found = factor_words(
            w.goal, w.rows, w.b, k, dead, w.tol, mask, moving, _odd_factor(one)
        )
        if found is None:
            continue
        because, factor = found
        lost = left_out(dead) if dead else NO_CAUSE
        alive = torch.ones(len(k), dtype=torch.bool)
        alive[dead] = False
        if said := join_causes(one.cause, lost, because):
            return said, unit * torch.where(alive, factor, 0)[:, None]
    return None


def _odd_factor(one: LossFault) -> float:
    """The largest constant, or inverse of one, that no loop is known to have and that
    may stand beside a fault: a free factor lets a wrong fault fit.
    """
    if one.kind == "objective":
        return 1.0
    return 1000.0 if one.words else math.inf


def _one_weight(w: Tokens) -> tuple[Cause, Tensor] | None:
    """The cause that all tokens that train have one weight, and the weights, where that
    is so and should not be.
    """
    x, right = w.found[w.b.mask], w.expected[w.b.mask]
    mean = float(x.nan_to_num(0).mean())
    differ = float((x - mean).abs().nan_to_num(torch.inf).max())
    if (
        not mean
        or differ > w.tol * abs(mean)
        or right.std() <= w.tol * right.abs().max()
    ):
        return None
    cause = measured.ONE_WEIGHT.cause(weight=mean)
    return cause, torch.where(w.b.mask, mean, 0.0)


def _put(
    words: str,
    hp: dict[str, Any] | None = None,
    *,
    id: str,
    beside: str = "",
    **change: Tensor,
) -> LossFault:
    """The objective on a batch of which something is replaced."""
    return fault(
        words,
        "batches",
        id=id,
        beside=beside,
        hp=hp or {},
        view=lambda b: b.but(**change),
    )


def token_faults(w: Tokens, hp: dict[str, Any]) -> Iterator[LossFault]:
    """One fault each, or none, the right one first.

    Args:
        w: the weights that were read off the gradient.
        hp: the objective's numbers.

    Yields:
        A fault that changes nothing; then the known faults, those of masks first.
    """
    r, o, goal, at = w.rollouts(), w.goal.o, w.goal, torch.arange(w.here.shape[1])
    off, last = (
        w.here & ~w.b.mask,
        torch.tensor([[len(x.response) - 1] for x in w.rows]),
    )
    masks: tuple[tuple[str, str, Tensor], ...] = (
        ("masked-tokens-train", "masked tokens train", w.here),
        (
            "mask-one-token-late",
            "the mask is one token late",
            moved(w.b.mask, 1) & w.here,
        ),
        (
            "mask-one-token-early",
            "the mask is one token early",
            moved(w.b.mask, -1) & w.here,
        ),
        (
            "last-token-left-out",
            "the last token of each response does not train",
            w.b.mask & (at != last),
        ),
        (
            "first-token-left-out",
            "the first token of each response does not train",
            w.b.mask & (at > 0),
        ),
        (
            "token-after-hole-left-out",
            "the first token after each hole does not train",
            w.b.mask & ~moved(off, 1),
        ),
        (
            "tokens-behind-hole-left-out",
            "no token behind the first hole of a response trains",
            w.b.mask & (off.cumsum(1) == 0),
        ),
        (
            "tokens-before-hole-left-out",
            "no token in front of the last hole of a response trains",
            w.b.mask & (off.flip(1).cumsum(1).flip(1) == 0),
        ),
        (
            "cut-responses-train-by-first-token",
            "a response without the end token trains by its first token alone",
            w.b.mask & (_ends(w.rows) | (at == 0)),
        ),
    )
    yield _put("", id="")
    for id, words, mask in masks:
        yield _put(words, id=id, mask=mask)
    now = "the old log-probabilities are the current ones"
    yield _put(f"{now}: r = 1", id="ratio-always-one", logp_old=w.lp)
    for id, words, mask in masks:
        yield _put(
            f"{words}; {now}: r = 1",
            id=id,
            beside="ratio-always-one",
            mask=mask,
            logp_old=w.lp,
        )
    yield _put(
        "the old and the current log-probabilities are exchanged in the ratio",
        id="old-and-new-log-probs-exchanged",
        logp_old=2 * w.lp - r.logp_old,
    )
    yield _put(
        f"{now} at temperature 1", id="old-log-probs-at-temperature-1", logp_old=w.plain
    )
    for by, where in {1: "late", -1: "early"}.items():
        yield _put(
            f"the old log-probabilities are one token too {where}",
            id=f"old-log-prob-one-token-{where}",
            logp_old=moved(r.logp_old, by),
        )
    yield _put(
        "the old log-probabilities are counted without the holes",
        id="old-log-probs-without-holes",
        logp_old=_without_holes(r.logp_old, w.b.mask),
    )
    orders = [*_orders(w.rows)]
    first = r.adv[:, :1]
    # with advantages of d and -d in turn, the sign and an exchange make the same ones
    opposite = [
        words for _, words, order in orders if torch.equal(first[order], -first)
    ]
    either = f", or are those of {opposite[0]}" if opposite else ""
    yield _put(
        f"the advantages have the opposite sign{either}",
        id="advantages-negated",
        adv=-r.adv,
    )
    for rows, words, order in orders:
        if words not in opposite:
            yield _put(
                f"the advantages are those of {words}",
                id=f"advantages-of-{rows}",
                adv=first[order].expand_as(r.adv),
            )
        for old in _exchanged(w.rows, r.logp_old, order):
            yield _put(
                f"the old log-probabilities are those of {words}",
                id=f"old-log-probs-of-{rows}",
                logp_old=old,
            )
    words = (
        "the advantages of the tokens that train are laid over all response tokens, "
        "one behind the other"
    )
    yield _put(
        words, id="advantages-laid-over", adv=_laid_over(r.adv, w.b.mask, w.here)
    )
    yield _put(
        "the sign of the advantages is lost", id="advantage-absolute", adv=r.adv.abs()
    )
    n = len(w.rows)
    parts = [("batch", "", torch.zeros(n)), ("group", " in each group", w.b.group)]
    for m in range(2, n):
        where = f" in each micro-batch of {m}"
        parts.append(("micro-batch", where, torch.arange(n) // m))
    for sample, where, part in parts:
        same = torch.eq(part[:, None], part).double()
        mean = partial(_means_of_parts, same)
        A = r.adv[:, 0]
        for step, how, center in (
            ("whitened", "normalized", mean(A)),
            ("divided", "divided by their standard deviation", 0 * A),
        ):
            for ddof in (1, 0):
                var = (mean(A**2) - mean(A) ** 2) * same.sum(1) / (same.sum(1) - ddof)
                its = torch.where(
                    same.sum(1) > 1, (A - center) / var.sqrt(), A - center
                )
                yield _put(
                    f"the advantages are {how} again{where}",
                    id=f"advantages-{step}-over-{sample}",
                    adv=its[:, None].expand_as(r.adv),
                )
    yield _put(
        "the advantages are centered again",
        id="advantages-centered-over-batch",
        adv=r.adv - r.adv[:, 0].mean(),
    )
    if r.logp_ref is not None:
        yield _put(
            "the reference model's log-probabilities are used as the old ones",
            id="ratio-to-reference",
            logp_old=r.logp_ref,
        )
        yield _put(
            "the reference model's log-probabilities are the current ones",
            id="reference-is-current-policy",
            logp_ref=w.lp,
        )
        yield _put(
            "the old policy is used as the reference model",
            id="reference-is-old-policy",
            logp_ref=r.logp_old,
        )
    if goal.beta:
        yield KL_MISSING
        yield kl_added(goal.beta)
        for name, kl in ESTIMATORS.items():
            words = (
                f"the KL term ({name}) of the old policy is folded into the advantage"
            )
            yield _put(
                words,
                {"beta": 0.0},
                id="kl-of-old-policy-in-advantage",
                adv=r.adv - goal.beta * kl(r.logp_old, w.b.ref),
            )
    bounds: dict[str, tuple[float, ...]] = {
        **dict.fromkeys(("eps", "eps_low", "eps_high", "c"), BOUNDS),
        **dict.fromkeys(("is_min", "is_max"), CORRECTION_BOUNDS),
    }
    for key in sorted(bounds.keys() & hp.keys()):
        for v in (v for v in bounds[key] if v != hp[key] and _takes(o, key, v)):
            is_ = "absent" if hp[key] is None else f"{hp[key]:g}"
            yield fault(
                f"{key} is {v:g}, not {is_}",
                "hyperparameter",
                id=hyperparameter_id(key),
                hp={key: v},
            )
    if o.level == "sequence_mean":
        yield from _over_the_width(w, hp)
    yield from known("losses", o, hp, [])
    for p in (get(n) for n in names() if n != o.name and not get(n).batch_coupled):
        own = {k: v for k, v in hp.items() if k in p.hyperparameters and v is not None}
        yield fault(
            f"the objective is {p.name}",
            "objective",
            id=f"other-objective-{p.name}",
            objective=p,
            hp=own,
        )
    # last: a lost sign may look like another response's advantage
    if (source := _sources(w, r, hp)) is not None:
        words = " ".join(map(str, source.tolist()))
        yield _put(
            f"the advantages are those of other responses: of {words}",
            id="advantages-of-other-responses",
            adv=r.adv[source, :1].expand_as(r.adv),
        )
    for tokens, words, lost in _lost(w, r):
        yield _put(
            f"{words} do not train", id=f"{tokens}-left-out", mask=w.b.mask & ~lost
        )


def _means_of_parts(same: Tensor, x: Tensor) -> Tensor:
    """[B]: the mean of x over each response's part; same: [B, B], 1 within a part."""
    return same @ x / same.sum(1)


def _ends(rows: Sequence[Row]) -> Tensor:
    """[B, 1]: the response ends in the token in which two responses or more end."""
    last = [row.response[-1] for row in rows]
    end, count = Counter(last).most_common(1)[0]
    return torch.tensor([[count < 2 or token == end] for token in last])


def _sources(w: Tokens, r: Rollouts, hp: dict[str, Any]) -> Tensor | None:
    """[B]: the response whose advantage the weights of each response have.

    None where each has its own, or where the responses are not exchanged one for one: a
    number that happens to equal the advantage of another response is not taken from it.
    """
    n = len(w.rows)
    right = right_factors(w.goal, w.b)[:, None]
    # response i has the weights that the advantage of response j makes
    has = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        unit, mask = _unit(w, _put("", id="", adv=r.adv[j, 0].expand_as(r.adv)), hp)
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


def _over_the_width(w: Tokens, hp: dict[str, Any]) -> Iterator[LossFault]:
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
            id="log-ratio-over-padded-width",
            J=partial(over, width),
        )


def _takes(o: Objective, key: str, value: float) -> bool:
    try:
        o.resolve({key: value})
    except InputError:
        return False
    return True


def _lost(w: Tokens, r: Rollouts) -> Iterator[tuple[str, str, Tensor]]:
    """What the tokens that should train and do not have in common, and no token that
    trains has: the id of these tokens, what they are called, and which they are.
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
    for id, words, x in (
        ("tokens-of-one-id", "tokens that equal {:g}", ids),
        ("tokens-at-one-place", "the tokens at place {:g} of each row", place),
    ):
        if len(its := x[gone].unique()) == 1 and not (x[left] == its).any():
            yield id, words.format(float(its)), x == its
    features = (
        ("late-tokens-of-row", "tokens behind the first {:g} of a row", place),
        ("late-tokens", "tokens behind the first {:g} of a response", at),
        ("early-tokens-of-row", "tokens before place {:g} of a row", -place),
        ("far-tokens", "tokens with a log r above {:g} or below -{:g}", log_r.abs()),
        ("likelier-tokens", "tokens with a log r above {:g}", log_r),
        ("less-likely-tokens", "tokens with a log r below -{:g}", -log_r),
        ("large-advantages", "tokens with an advantage above {:g}", r.adv),
        ("small-advantages", "tokens with an advantage below -{:g}", -r.adv),
    )
    for id, words, x in features:
        low, high = float(x[left].max()), float(x[gone].min())
        if (limit := between(low, high)) is not None:
            yield id, words.format(abs(limit), abs(limit)), x > limit


def _orders(rows: Sequence[Row]) -> list[tuple[str, str, Tensor]]:
    """An id, words, and which row's numbers each row gets."""
    n, out = len(rows), []
    for m in dict.fromkeys((n, *(m for m in (4, 2) if m < n))):
        for k in range(1, m):
            id, words = "later-rows", f"row i + {k}"
            if k > m // 2:
                id, words = "earlier-rows", f"row i - {m - k}"
            if m < n:
                id, words = f"{id}-of-part", f"{words} of micro-batches of {m}"
            order = torch.cat([x.roll(-k) for x in torch.arange(n).split(m)])
            out.append((id, words, order))
    lengths = torch.tensor([len(x.response) for x in rows])
    for down in (False, True):
        order = lengths.argsort(descending=down, stable=True)
        how = "by length, longest first" if down else "by length"
        words = f"another row: responses are sorted {how}, and these are not"
        id = "rows-by-length-down" if down else "rows-by-length"
        out.append((id, words, order.argsort()))
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


def _unit(w: Tokens, one: LossFault, hp: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Before aggregation, times the declared scale, and the tokens that train; far off
    where the one does not fit.
    """
    b = w.rollouts()
    x = torch.zeros_like(b.logp)
    try:
        b = one.change.view(b)
        live = b.mask.any(1)
        some = b.but(**{name: x[live] for name, x in b.tensors().items()})
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
