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

HALVES = (torch.bfloat16, torch.float16)
# numbers of a row that a loop may keep in half precision
ROUNDED = {
    "logp_old": "old log-probabilities",
    "adv": "advantages",
    "logp_ref": "reference model's log-probabilities",
}
ROUNDED_IDS = {
    "logp_old": "old-log-probs",
    "adv": "advantages",
    "logp_ref": "reference-log-probs",
}
BOUNDS = (0.1, 0.2, 0.28, 0.3, 0.4, 3.0, 10.0)  # of a clip, as people set them
# the same of a sampler's correction
CORRECTION_BOUNDS = (0.1, 0.2, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 8.0, 10.0)


# A fault of these kinds moves which tokens have a gradient. Beside it, a response
# without one is no second fault: if it is not explained by the first, the first is the
# wrong one.
STOPS = ("hyperparameter", "objective", "clip", "ratio", "stop-gradient", "rounding")


def named(tokens: Tokens, among: Cause = NO_CAUSE) -> tuple[Cause, Tensor] | None:
    """The fault that gives these weights on all response tokens, and the weights that
    it gives [B, T].

    among: a cause; faults that it does not name are not tried.
    """
    hp = tokens.goal.hp | ({"beta": tokens.goal.beta} if tokens.goal.o.kl else {})
    alike = _one_weight(tokens)
    if alike is not None and (not among or set(alike[0].ids) <= set(among.ids)):
        return alike
    silent = tokens.no_weight(tokens.found).all(1)
    right = right_factors(tokens.goal, tokens.b)[:, None]
    for known_fault in token_faults(tokens, hp):
        if not is_named(known_fault, among):
            continue
        unit, mask = _unit(tokens, known_fault, hp)
        k = factors(tokens, unit)
        if k is None:
            continue
        # what is within the noise, and should be, tells nothing of its factor
        k[silent & tokens.near(unit * right, 0 * unit).all(1)] = torch.nan
        dead = [
            i for i, v in enumerate(k) if abs(v) <= 1e-4 * k.nan_to_num(0).abs().max()
        ]
        if (
            k.isnan().all()
            or len(dead) == len(k) - int(k.isnan().sum())
            or (dead and known_fault.kind in STOPS)
        ):
            continue
        k[dead] = torch.nan
        moving = int((mask & (unit != 0)).sum())
        found = factor_words(
            tokens.goal,
            tokens.rows,
            tokens.b,
            k,
            dead,
            tokens.tol,
            mask,
            moving,
            _odd_factor(known_fault),
        )
        if found is None:
            continue
        because, factor = found
        if known_fault.id == "advantages-negated" and bool(
            (factor * ~k.isnan() < 0).any()
        ):
            continue  # two signs that cancel are another fault
        lost = left_out(dead) if dead else NO_CAUSE
        alive = torch.ones(len(k), dtype=torch.bool)
        alive[dead] = False
        if said := join_causes(known_fault.cause, lost, because):
            return said, unit * torch.where(alive, factor, 0)[:, None]
    return None


def _odd_factor(one: LossFault) -> float:
    """The largest constant, or inverse of one, that no loop is known to have and that
    may stand beside a fault: a free factor lets a wrong fault fit.
    """
    if one.kind == "objective":
        return 1.0
    return 1000.0 if one.words else math.inf


def _one_weight(tokens: Tokens) -> tuple[Cause, Tensor] | None:
    """The cause that all tokens that train have one weight, and the weights, where that
    is so and should not be.
    """
    x = tokens.found[tokens.b.mask]
    right = tokens.expected[tokens.b.mask]
    mean = float(x.nan_to_num(0).mean())
    differ = float((x - mean).abs().nan_to_num(torch.inf).max())
    if (
        not mean
        or differ > tokens.tol * abs(mean)
        or right.std() <= tokens.tol * right.abs().max()
    ):
        return None
    cause = measured.ONE_WEIGHT.cause(weight=mean)
    return cause, torch.where(tokens.b.mask, mean, 0.0)


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
        view=lambda batch: batch.but(**change),
    )


def token_faults(w: Tokens, hp: dict[str, Any]) -> Iterator[LossFault]:
    """One fault each, or none, the right one first.

    Args:
        w: the weights that were read off the gradient.
        hp: the objective's numbers.

    Yields:
        A fault that changes nothing; then the known faults, those of masks first.
    """
    r = w.rollouts()
    objective = w.goal.o
    goal = w.goal
    positions = torch.arange(w.here.shape[1])
    untrained = w.here & ~w.b.mask
    last = torch.tensor([[len(x.response) - 1] for x in w.rows])
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
            w.b.mask & (positions != last),
        ),
        (
            "first-token-left-out",
            "the first token of each response does not train",
            w.b.mask & (positions > 0),
        ),
        (
            "token-after-hole-left-out",
            "the first token after each hole does not train",
            w.b.mask & ~moved(untrained, 1),
        ),
        (
            "tokens-behind-hole-left-out",
            "no token behind the first hole of a response trains",
            w.b.mask & (untrained.cumsum(1) == 0),
        ),
        (
            "tokens-before-hole-left-out",
            "no token in front of the last hole of a response trains",
            w.b.mask & (untrained.flip(1).cumsum(1).flip(1) == 0),
        ),
        (
            "cut-responses-train-by-first-token",
            "a response without the end token trains by its first token alone",
            w.b.mask & (_ends(w.rows) | (positions == 0)),
        ),
    )
    yield _put("", id="")
    for id, words, mask in masks:
        yield _put(words, id=id, mask=mask)
    now = "the old log-probabilities are the current ones"
    yield _put(f"{now}, or have no effect: r = 1", id="ratio-always-one", logp_old=w.lp)
    for id, words, mask in masks:
        yield _put(
            f"{words}; {now}, or have no effect: r = 1",
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
        if where:
            yield _put(
                f"the advantages are centered again{where}",
                id=f"advantages-centered-over-{sample}",
                adv=(A - mean(A))[:, None].expand_as(r.adv),
            )
        for step, how, center in (
            ("whitened", "normalized", mean(A)),
            ("divided", "divided by their standard deviation", 0 * A),
        ):
            for ddof in (1, 0):
                var = (mean(A**2) - mean(A) ** 2) * same.sum(1) / (same.sum(1) - ddof)
                normalized = torch.where(
                    same.sum(1) > 1, (A - center) / var.sqrt(), A - center
                )
                yield _put(
                    f"the advantages are {how} again{where}",
                    id=f"advantages-{step}-over-{sample}",
                    adv=normalized[:, None].expand_as(r.adv),
                )
    yield _put(
        "the advantages are centered again",
        id="advantages-centered-over-batch",
        adv=r.adv - r.adv[:, 0].mean(),
    )
    yield from _rounded(r)
    yield from _of_numbers(w, r)
    if r.logp_ref is not None:
        for by, where in {1: "late", -1: "early"}.items():
            yield _put(
                f"the reference model's log-probabilities are one token too {where}",
                id=f"reference-one-token-{where}",
                logp_ref=moved(r.logp_ref, by),
            )
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
        for v in (v for v in bounds[key] if v != hp[key] and _takes(objective, key, v)):
            is_ = "absent" if hp[key] is None else f"{hp[key]:g}"
            yield fault(
                f"{key} is {v:g}, not {is_}",
                "hyperparameter",
                id=hyperparameter_id(key),
                hp={key: v},
            )
    low = hp.get("eps_low")
    high = hp.get("eps_high")
    if (
        low is not None
        and high is not None
        and low != high
        and _takes(objective, "eps_low", high)
    ):
        yield fault(
            f"the clip bounds are exchanged: eps_low is {high:g} and eps_high is {low:g}",
            "hyperparameter",
            id="clip-bounds-exchanged",
            hp={"eps_low": high, "eps_high": low},
        )
    if objective.level == "sequence_mean":
        yield from _over_the_width(w, hp)
    yield from known("losses", objective, hp, [])
    for p in (
        get(n) for n in names() if n != objective.name and not get(n).batch_coupled
    ):
        shared_hp = {
            k: v for k, v in hp.items() if k in p.hyperparameters and v is not None
        }
        yield fault(
            f"the objective is {p.name}",
            "objective",
            id=f"other-objective-{p.name}",
            objective=p,
            hp=shared_hp,
        )
    # last: a lost sign may look like another response's advantage
    n = len(w.rows)
    for id, numbers, name, each in (
        (
            "advantages-of-other-responses",
            "advantages",
            "adv",
            [r.adv[j, 0].expand_as(r.adv) for j in range(n)],
        ),
        (
            "old-log-probs-of-other-responses",
            "old log-probabilities",
            "logp_old",
            [r.logp_old[j].expand_as(r.logp_old) for j in range(n)],
        ),
    ):
        if (found := _sources(w, name, each, hp)) is not None:
            source, sure = found
            if name == "adv" and not sure.all():
                continue
            if 2 * int(sure.sum()) < n:
                continue
            of = zip(source.tolist(), sure.tolist(), strict=True)
            words = " ".join(str(j) if known_one else "?" for j, known_one in of)
            exchanged = torch.stack([each[j][i] for i, j in enumerate(source)])
            change: Any = {name: exchanged}
            of_others = f"the {numbers} are those of other responses: of {words}"
            yield _put(of_others, id=id, **change)
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


def _sources(
    tokens: Tokens, name: str, each: Sequence[Tensor], hp: dict[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """[B]: the response whose numbers the weights of each response have, and whether
    they are those of no other.

    None where each has its own, or where the responses are not exchanged one for one: a
    number that happens to equal that of another response is not taken from it.

    Args:
        tokens: the weights that were read.
        name: of the numbers, as of `Rollouts`.
        each: the numbers of each response, given to all, [B, T].
        hp: the numbers of the objective.
    """
    n = len(tokens.rows)
    right = right_factors(tokens.goal, tokens.b)[:, None]
    # response i has the weights that the numbers of response j make
    has = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        fields: Any = {name: each[j]}
        unit, mask = _unit(tokens, _put("", id="", **fields), hp)
        has[:, j] = (tokens.near(tokens.found, unit * right) | ~mask).all(1)
    if name == "adv":  # that its own fits is no chance
        is_own = has.diagonal()
        has = torch.where(is_own[:, None], torch.eye(n, dtype=torch.bool), has)
    return _one_for_one(has)


def _one_for_one(has: Tensor) -> tuple[Tensor, Tensor] | None:
    """[B]: the one of each row, and whether only that one is possible; None where no
    exchange is possible, or none of a row is certain.

    Args:
        has: row i may have that of row j, [B, B].
    """
    n = len(has)
    source = torch.full((len(has),), -1)
    remaining = has.clone()
    if has.diagonal().all():
        return None
    while len(rows := ((remaining.sum(1) == 1) & (source < 0)).nonzero()[:, 0]):
        i = int(rows[0])
        j = int(remaining[i].int().argmax())
        source[i] = j
        remaining[:, j] = False
    sure = source >= 0
    if not (sure & (source != torch.arange(n))).any():
        return None
    for i in sorted((~sure).nonzero()[:, 0].tolist(), key=lambda i: int(has[i].sum())):
        if not remaining[i].any():
            return None
        source[i] = i if remaining[i, i] else int(remaining[i].int().argmax())
        remaining[:, source[i]] = False
    return source, sure


def _rounded(rollouts: Rollouts) -> Iterator[LossFault]:
    """Numbers of the rows that were kept in half precision."""
    for kind in HALVES:
        said = str(kind).removeprefix("torch.")
        for name, words in ROUNDED.items():
            x = getattr(rollouts, name)
            if x is not None:
                yield _put(
                    f"the {words} are rounded to {said}",
                    id=f"{ROUNDED_IDS[name]}-rounded",
                    **{name: x.to(kind).to(x.dtype)},
                )


def _of_numbers(tokens: Tokens, rollouts: Rollouts) -> Iterator[LossFault]:
    """Changes of the advantages by a number that the weights show."""
    live = (
        tokens.b.mask
        & ~tokens.stopped
        & ~tokens.found.isnan()
        & ~tokens.no_weight(tokens.found)
    )
    q = torch.where(
        live, tokens.found / torch.where(live, tokens.expected, 1), torch.nan
    )
    of_row = q.nanmedian(1).values
    is_smaller = of_row < 1 - 1e-3
    A = rollouts.adv[:, 0].abs()
    tops = (A * of_row)[is_smaller]
    if len(tops) > 1 and bool(((tops / tops[0] - 1).abs() < 1e-3).all()):
        top = float(f"{float(tops.median()):.4g}")
        yield _put(
            f"advantages are clipped to ±{top:g}",
            id="advantages-clipped",
            adv=rollouts.adv.clamp(-top, top),
        )
    if not live.any() or not bool((q[live] > 0).all()):
        return
    positions = torch.arange(live.shape[1], dtype=torch.float64).expand(live.shape)
    n = torch.tensor([[len(row.response)] for row in tokens.rows])
    trained = tokens.b.mask.double().cumsum(1) - 1
    for where, place in (
        ("from the last token back", n - 1 - positions),
        ("from the first token on", positions),
        (
            "from the last token that trains back",
            trained.amax(1, keepdim=True) - trained,
        ),
    ):
        x = _within(place, live)
        y = _within(q.clamp(min=1e-300).log(), live)
        if not bool(x.any()):
            continue
        gamma = float(((x * y).sum() / (x * x).sum()).exp())
        if abs(gamma - 1) > 1e-4:
            yield _put(
                f"A is discounted by {gamma:.4g} a token, {where}",
                id="advantages-discounted",
                adv=rollouts.adv * float(f"{gamma:.4g}") ** place.clamp(min=0),
            )


def _within(x: Tensor, live: Tensor) -> Tensor:
    """x less its mean over the live tokens of each row; 0 elsewhere."""
    x = torch.where(live, x, 0)
    mean = x.sum(1, keepdim=True) / live.sum(1, keepdim=True).clamp(min=1)
    return torch.where(live, x - mean, 0)


def _laid_over(x: Tensor, mask: Tensor, here: Tensor) -> Tensor:
    """[B, T]: the numbers of the tokens that train, in the places of all response
    tokens from the first on.
    """
    out = torch.zeros_like(x.expand_as(mask))
    places = here.nonzero()[: int(mask.sum())]
    out[places[:, 0], places[:, 1]] = x.expand_as(mask)[mask]
    return out


def _over_the_width(tokens: Tokens, hp: dict[str, Any]) -> Iterator[LossFault]:
    """The mean of a response's log-ratio runs over the columns of the padded batch,
    with prompts and without.
    """
    term = term_of(tokens.goal.o, hp)

    def over(
        width: int | Tensor, lp: Tensor, old: Tensor, A: Tensor, mask: Tensor
    ) -> Tensor:
        return term(old + (lp - old) * mask.sum(1, keepdim=True) / width, old, A, mask)

    for id, words, of in (
        ("whole-row", "prompt and response", lambda row: row.ids),
        ("response", "the response, masked tokens included", lambda row: row.response),
    ):
        lengths = torch.tensor([[len(of(row))] for row in tokens.rows])[
            tokens.b.mask.any(1)
        ]
        yield fault(
            f"the response's log-ratio is divided by the length of {words}",
            "ratio",
            id=f"log-ratio-over-{id}",
            J=partial(over, lengths),
        )
    width_of_all = max(len(row.ids) for row in tokens.rows)
    for width in dict.fromkeys(
        (width_of_all - 1, width_of_all, max(len(row.response) for row in tokens.rows))
    ):
        yield fault(
            "the response's log-ratio is divided by the padded width",
            "ratio",
            id="log-ratio-over-padded-width",
            J=partial(over, width),
        )


def _takes(objective: Objective, key: str, value: float) -> bool:
    try:
        objective.resolve({key: value})
    except InputError:
        return False
    return True


def _lost(tokens: Tokens, rollouts: Rollouts) -> Iterator[tuple[str, str, Tensor]]:
    """What the tokens that should train and do not have in common, and no token that
    trains has: the id of these tokens, what they are called, and which they are.
    """
    live = tokens.b.mask & ~tokens.stopped & ~tokens.found.isnan()
    zero = tokens.no_weight(tokens.found)
    gone = live & zero
    kept_tokens = live & ~zero
    if gone.sum() < 2 or not kept_tokens.any():
        return
    positions = torch.arange(live.shape[1]).expand(live.shape) + 1.0
    log_r = tokens.lp - rollouts.logp_old
    place = positions + torch.tensor([[len(row.prompt)] for row in tokens.rows])
    ids = torch.zeros_like(positions)
    for i, row in enumerate(tokens.rows):
        ids[i, : len(row.response)] = torch.tensor(row.response)
    for id, words, x in (
        ("tokens-of-one-id", "tokens that equal {:g}", ids),
        ("tokens-at-one-place", "the tokens at place {:g} of each row", place),
    ):
        if (
            len(values := x[gone].unique()) == 1
            and not (x[kept_tokens] == values).any()
        ):
            yield id, words.format(float(values)), x == values
    features = (
        ("late-tokens-of-row", "tokens behind the first {:g} of a row", place),
        ("late-tokens", "tokens behind the first {:g} of a response", positions),
        ("early-tokens-of-row", "tokens before place {:g} of a row", -place),
        ("far-tokens", "tokens with a log r above {:g} or below -{:g}", log_r.abs()),
        ("likelier-tokens", "tokens with a log r above {:g}", log_r),
        ("less-likely-tokens", "tokens with a log r below -{:g}", -log_r),
        ("large-advantages", "tokens with an advantage above {:g}", rollouts.adv),
        ("small-advantages", "tokens with an advantage below -{:g}", -rollouts.adv),
    )
    for id, words, x in features:
        low = float(x[kept_tokens].max())
        high = float(x[gone].min())
        if (limit := between(low, high)) is not None:
            yield id, words.format(abs(limit), abs(limit)), x > limit


def _orders(rows: Sequence[Row]) -> list[tuple[str, str, Tensor]]:
    """An id, words, and which row's numbers each row gets."""
    n = len(rows)
    out = []
    for m in dict.fromkeys((n, *(m for m in (4, 2) if m < n))):
        for k in range(1, m):
            id = "later-rows"
            words = f"row i + {k}"
            if k > m // 2:
                id = "earlier-rows"
                words = f"row i - {m - k}"
            if m < n:
                id = f"{id}-of-part"
                words = f"{words} of micro-batches of {m}"
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
    n = [len(r.response) for r in rows]
    p = [len(r.prompt) for r in rows]
    width = max(len(r.ids) for r in rows)
    for start in ([0] * len(n), p, [width - k for k in n]):
        wide = x.new_zeros(len(n), width + x.shape[1])
        for i, first_column in enumerate(start):
            wide[i, first_column : first_column + n[i]] = x[i, : n[i]]
        wide = wide[order]
        yield torch.stack(
            [
                wide[i, first_column : first_column + x.shape[1]]
                for i, first_column in enumerate(start)
            ]
        )


def _unit(tokens: Tokens, one: LossFault, hp: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Before aggregation, times the declared scale, and the tokens that train; far off
    where the one does not fit.
    """
    batch = tokens.rollouts()
    x = torch.zeros_like(batch.logp)
    try:
        batch = one.change.view(batch)
        live = batch.mask.any(1)
        live_rows = batch.but(**{name: x[live] for name, x in batch.tensors().items()})
        x[live] = (
            replace(one.change, view=lambda batch: batch).weights(
                tokens.goal.o, hp, live_rows
            )
            * tokens.goal.scale
        )
    except (InputError, RuntimeError, TypeError, AttributeError, AssertionError):
        x += 1e9
    return x, batch.mask


def _without_holes(x: Tensor, mask: Tensor) -> Tensor:
    """The numbers of the tokens that train from the start of each row on, and zeros."""
    out = torch.zeros_like(x)
    for i, m in enumerate(mask):
        out[i, : m.sum()] = x[i, m]
    return out
