# SPDX-License-Identifier: Apache-2.0
"""Known faults of losses in how they read a batch: tokens shifted or left out,
advantages changed before the loss.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError
from upref.ops import mean_t
from upref.registry import REDUCE, Objective
from upref.rollouts import Rollouts, per_response
from upref.verify.factors import FACTORS, common_value, declared_aggregation
from upref.verify.faults import Catalogue
from upref.verify.faults.losses import LossFault, fault, term_of
from upref.verify.measure import LossCase, unit_weights
from upref.weights.batches import on_policy_batch
from upref.weights.black_box import relative_error

# how far each token is from where a discount is 1
POSITIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "from the first token on": lambda m: m.cumsum(1) - 1,
    "from the first column on": lambda m: torch.arange(m.shape[1]).expand(m.shape),
    "back from the last token": lambda m: m.flip(1).cumsum(1).flip(1) - 1,
    "back from the last column": lambda m: (
        torch.arange(m.shape[1]).flip(0).expand(m.shape)
    ),
    "back from column |o| - 1": lambda m: (
        m.sum(1, keepdim=True) - 1 - torch.arange(m.shape[1])
    ),
}


def _to_the_end(m: Tensor) -> Tensor:
    """The number of trained tokens from each token to its response's last."""
    return m.flip(1).cumsum(1).flip(1)


# tokens of which this number exceeds a limit do not train: their id, what they are
# called, of which number, the limit in words
LEFT_OUT: tuple[
    tuple[str, str, Callable[[Rollouts], Tensor], Callable[[float], float]], ...
] = (
    (
        "late-tokens",
        "tokens behind the first {:g} of a response",
        lambda batch: batch.mask.cumsum(1),
        float,
    ),
    (
        "first-tokens",
        "the first {:g} tokens of each response",
        lambda batch: -batch.mask.cumsum(1),
        lambda x: -x - 1,
    ),
    (
        "early-tokens",
        "tokens in front of the last {:g} of a response",
        lambda batch: _to_the_end(batch.mask),
        float,
    ),
    (
        "last-tokens",
        "the last {:g} tokens of each response",
        lambda batch: -_to_the_end(batch.mask),
        lambda x: -x - 1,
    ),
    (
        "late-columns",
        "tokens behind the first {:g} columns",
        lambda batch: torch.arange(1, len(batch.mask[0]) + 1).expand(batch.mask.shape),
        float,
    ),
    (
        "long-responses",
        "responses of more than {:g} tokens",
        lambda batch: batch.mask.sum(1, keepdim=True).expand(batch.mask.shape),
        float,
    ),
    (
        "short-responses",
        "responses of fewer than {:g} tokens",
        lambda batch: -batch.mask.sum(1, keepdim=True).expand(batch.mask.shape),
        abs,
    ),
    (
        "likely-tokens",
        "tokens with a log_prob above {:g}",
        lambda batch: batch.logp,
        float,
    ),
    (
        "unlikely-tokens",
        "tokens with a log_prob below {:g}",
        lambda batch: -batch.logp,
        lambda x: -x,
    ),
)
# tokens that a mask may lack: their id, and what they are called
CUT: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
    (
        "first-column",
        "the first column of the batch",
        lambda m: torch.arange(m.shape[1]) == 0,
    ),
    (
        "last-column",
        "the last column of the batch",
        lambda m: torch.arange(m.shape[1]) == m.shape[1] - 1,
    ),
    (
        "first-token",
        "the first token of each response",
        lambda m: m.cumsum(1) == 1,
    ),
    (
        "last-token",
        "the last token of each response",
        lambda m: m.flip(1).cumsum(1).flip(1) == 1,
    ),
)


def left_out_id(tokens: str, counted: bool) -> str:
    """The id of the fault that these tokens do not train.

    Args:
        tokens: their id.
        counted: whether the denominator counts them.
    """
    return f"{tokens}-left-out" if not counted else f"{tokens}-left-out-but-counted"


LARGE = 1e3  # times the advantages of the on-policy batch: a bound of them shows
LONGEST = 40  # tokens, of the responses among which `left_out` looks


def moved(x: Tensor, by: int) -> Tensor:
    """Each row moved by so many places to the right, by < 0 to the left; zeros come in."""
    result = torch.zeros_like(x)
    if by > 0:
        result[:, by:] = x[:, :-by]
    elif by < 0:
        result[:, :by] = x[:, -by:]
    else:
        result = x.clone()
    return result


def shifted(objective: Objective, hp: dict[str, Any]) -> Iterator[LossFault]:
    """One argument is that of the token before or behind, with its masked slots as they
    are, or 0.
    """
    ways = moved, lambda x, by: x.roll(by, 1)

    def all_but_log_prob(
        batch: Rollouts, view: Callable[..., Rollouts], by: int
    ) -> Rollouts:
        """The batch with everything moved but log_prob."""
        return view(batch, "logp_old", "adv", "mask", by=by)

    def mask_moved(
        batch: Rollouts, way: Callable[[Tensor, int], Tensor], by: int
    ) -> Tensor:
        """The mask, moved."""
        return way(batch.mask, by)

    for (by, where), way, zeros in product(
        {1: "late", -1: "early"}.items(), ways, (False, True)
    ):

        def view(
            batch: Rollouts,
            *fields: str,
            by: int = by,
            way: Any = way,
            zeros: bool = zeros,
        ) -> Rollouts:
            """The batch with these fields shifted."""
            every = {
                "logp_old": batch.logp_old,
                "adv": batch.adv.expand_as(batch.mask),
                "mask": batch.mask,
            }
            if zeros:
                every = {
                    k: torch.where(batch.mask, x, torch.zeros_like(x))
                    for k, x in every.items()
                }
            return batch.but(**{k: way(every[k], by) for k in fields})

        yield fault(
            f"old_log_prob is one token too {where}",
            "batches",
            id=f"old-log-prob-one-token-{where}",
            view=lambda batch, view=view: view(batch, "logp_old"),
        )
        yield fault(
            f"the advantages are one token too {where}",
            "batches",
            id=f"advantages-one-token-{where}",
            view=lambda batch, view=view: view(batch, "adv"),
        )
        all_but = partial(all_but_log_prob, view=view, by=-by)
        yield fault(
            f"log_prob is one token too {where}",
            "batches",
            id=f"log-prob-one-token-{where}",
            view=all_but,
        )
        masked = partial(mask_moved, way=way, by=by)
        yield fault(
            f"the mask is one token too {where}",
            "batches",
            id=f"mask-one-token-{where}",
            weigh=_under(objective, hp, masked),
            whole=True,
        )


def untrained(objective: Objective, hp: dict[str, Any]) -> Iterator[LossFault]:
    """Tokens that the mask leaves out, of the denominator too or not."""

    def rest(batch: Rollouts, cut: Callable[[Tensor], Tensor]) -> Tensor:
        """The mask without these tokens."""
        return batch.mask & ~cut(batch.mask)

    for (tokens, said, cut), counted in product(CUT, (True, False)):
        words = f"{said} is not trained, {'though' if counted else 'and not'} counted in the denominator"
        rest_of = partial(rest, cut=cut)
        yield fault(
            words,
            "batches",
            id=left_out_id(tokens, counted),
            weigh=_under(objective, hp, rest_of, counted),
            whole=True,
        )


def uncounted(objective: Objective, hp: dict[str, Any]) -> Iterator[LossFault]:
    """Tokens that the denominator leaves out for their advantage, or because they have
    no gradient.
    """

    def adv(batch: Rollouts) -> Tensor:
        """A of each token."""
        return batch.adv.expand_as(batch.mask)

    def those(batch: Rollouts, on: Callable[[Rollouts], Tensor]) -> Tensor:
        """The mask of these tokens alone."""
        return batch.mask & on(batch)

    for id, said, on in (
        (
            "zero-advantages-not-counted",
            "tokens with A = 0 are not counted",
            lambda batch: adv(batch) != 0,
        ),
        (
            "not-positive-tokens-left-out",
            "tokens with A <= 0 are not trained, and not counted",
            lambda batch: adv(batch) > 0,
        ),
        (
            "not-negative-tokens-left-out",
            "tokens with A >= 0 are not trained, and not counted",
            lambda batch: adv(batch) < 0,
        ),
        (
            "tokens-without-gradient-not-counted",
            "tokens without a gradient, as clipped ones, are not counted",
            lambda batch: unit_weights(objective, batch, hp) != 0,
        ),
    ):
        those_of = partial(those, on=on)
        yield fault(
            f"{said} in the denominator",
            "batches",
            id=id,
            weigh=_under(objective, hp, those_of),
            whole=True,
        )


def _under(
    objective: Objective,
    hp: dict[str, Any],
    mask: Callable[[Rollouts], Tensor],
    counted: bool = False,
) -> Callable[[Rollouts], Tensor]:
    """The weights under another mask. counted: the tokens of the batch's own mask
    count, not those of the other.
    """

    def weigh(batch: Rollouts) -> Tensor:
        """The weights under the other mask."""
        changed = batch.but(mask=mask(batch), totals=None)
        f = declared_aggregation(objective)
        times = 1.0 if counted else (FACTORS[f](changed) / FACTORS[f](batch))[:, None]
        return torch.where(
            batch.mask & changed.mask,
            unit_weights(objective, batch if counted else changed, hp) * times,
            0,
        )

    return weigh


def _tokens(batch: Rollouts) -> tuple[Tensor, Tensor]:
    """The advantages of all tokens [N], and which of them count for a row [B, N]."""
    x = batch.adv.expand_as(batch.mask)[batch.mask]
    return x, x.new_ones(len(batch.mask), len(x))


def _responses(
    batch: Rollouts, of: Callable[[Tensor, Tensor], Tensor], grouped: bool
) -> tuple[Tensor, Tensor]:
    """The same of responses; of: the advantage of each."""
    x = of(batch.adv.expand_as(batch.mask), batch.mask)
    group = batch.group if grouped and batch.group is not None else torch.zeros(len(x))
    return x, torch.eq(group[:, None], group).to(x.dtype)


SAMPLES: tuple[tuple[str, str, Callable[..., tuple[Tensor, Tensor]]], ...] = (
    ("tokens", "the tokens of each batch", _tokens),
    *(
        (
            which,
            f"the responses of each {which}",
            partial(_responses, of=of, grouped=which == "group"),
        )
        for of, which in product((per_response, mean_t), ("batch", "group"))
    ),
)
# whether they are centered and divided: the id, and the words
STEPS = {
    (True, True): ("whitened", "whitened again"),
    (False, True): ("divided", "divided by their standard deviation"),
    (True, False): ("centered", "centered again"),
}


def renormalized() -> Iterator[LossFault]:
    """The advantages lose their mean, or are divided by their standard deviation, once
    more.
    """
    for (sample, over, of), ((center, divide), (step, how)) in product(
        SAMPLES, STEPS.items()
    ):
        for ddof, eps, root in (
            product((0, 1), (1e-8, 1e-6, 1e-5, 1e-4), (0, 1))
            if divide
            else [(0, 0.0, 0)]
        ):

            def view(
                batch: Rollouts,
                of: Any = of,
                at: Any = (center, divide, ddof, eps, root),
            ) -> Rollouts:
                """The batch with advantages that are normalized once more."""
                (x, same), (center, divide, ddof, eps, root) = of(batch), at
                n = same.sum(1, keepdim=True)
                mean = (same @ x)[:, None] / n
                var = (same @ x**2)[:, None] / n - mean**2
                std = (var * n / (n - ddof) + eps * root).clamp(min=0).sqrt() + eps * (
                    1 - root
                )
                centered = batch.adv - mean if center else batch.adv
                return batch.but(
                    adv=centered / std.nan_to_num() if divide else centered
                )

            yield fault(
                f"the advantages are {how}, over {over}",
                "advantage",
                id=f"advantages-{step}-over-{sample}",
                view=view,
                whole=True,
            )


def reading_faults(
    objective: Objective, hp: dict[str, Any], bounds: list[float]
) -> Iterator[LossFault]:
    yield from untrained(objective, hp)
    yield from uncounted(objective, hp)
    yield from shifted(objective, hp)
    yield from renormalized()


CATALOGUE = Catalogue("losses", reading_faults)


def _lengths(m: Tensor) -> Tensor:
    """The number of trained tokens of each token's response."""
    return m.sum(1, keepdim=True).double().expand(m.shape)


def _bonus_slope(batch: Rollouts) -> Tensor:
    """The gradient of -π log π of each token."""
    return torch.where(batch.mask, -batch.logp.exp() * (1 + batch.logp), 0)


def reweighted(case: LossCase) -> Iterator[LossFault]:
    """What has a number that is read off on policy: a factor of A by its sign, its
    response's length or the token's position, a bound of A, a factor of
    log-probabilities, or a bonus."""
    batch = case.ready(on_policy_batch())
    found = case.weights(batch)
    A = batch.adv.expand_as(batch.mask)
    use = batch.mask & (A != 0) & found.isfinite()
    q = found / case.expected(batch)

    def made(words: str, times: Callable[..., Tensor], id: str) -> LossFault:
        """The fault that A has this factor."""
        return fault(
            words,
            "advantage",
            id=id,
            view=lambda batch: batch.but(adv=batch.adv * times(batch)),
        )

    up, down = (common_value(q[use & side]) for side in (A > 0, A < 0))
    if up and down and abs(up - down) > 1e-5:
        pairs = (up, ">"), (down, "<")
        said = [
            f"{k:.5g} times what it should be where A {sign} 0"
            for k, sign in pairs
            if abs(k - 1) > 1e-5
        ]
        yield made(
            f"every weight is {' and '.join(said)}",
            lambda batch: torch.where(batch.adv > 0, up, down),
            id="weights-scaled-by-sign",
        )
    if (q[use] > 0).all() and use.any():
        power = _slope(_lengths(batch.mask)[use].log(), q[use].log())
        yield made(
            f"every weight is multiplied by |o|^{power:.4g}, |o| its response's length",
            lambda batch: _lengths(batch.mask) ** power,
            id="weights-times-power-of-length",
        )
        for where, place in POSITIONS.items():
            gamma = float(
                torch.tensor(
                    _slope(place(batch.mask)[use].double(), q[use].log())
                ).exp()
            )
            yield made(
                f"A is discounted by {gamma:.6g} a token, {where}",
                lambda batch, gamma=gamma, place=place: (
                    gamma ** place(batch.mask).double()
                ),
                id="advantages-discounted",
            )
    yield clipped(case)
    if constant := common_value((found - case.expected(batch))[batch.mask]):
        yield fault(
            f"{constant:.5g} is added to every advantage",
            "advantage",
            id="constant-added-to-advantages",
            view=lambda batch: batch.but(adv=batch.adv + constant),
        )
    live = use & (q > 0)
    j = term_of(case.objective, case.hp)
    if live.sum() > 2:
        k = _slope(batch.logp[live], q[live].log())
        as_by = "as by one over a temperature"
        yield fault(
            f"log_prob is multiplied by {1 + k:.5g}, {as_by}, and old_log_prob is not",
            "ratio",
            id="log-prob-scaled",
            J=lambda lp, old, A, m: j(lp + k * lp, old, A, m),
        )
        yield fault(
            f"old_log_prob is multiplied by {1 - k:.5g}, {as_by}, and log_prob is not",
            "ratio",
            id="old-log-prob-scaled",
            view=lambda batch: batch.but(logp_old=batch.logp_old - k * batch.logp_old),
        )

    def rest(batch: Rollouts) -> Tensor:
        """The weights without the bonus."""
        return unit_weights(case.objective, batch, case.hp)

    push = _bonus_slope(batch)
    c = float(((found - rest(batch)) * push).nan_to_num().sum() / (push**2).sum())
    yield fault(
        f"{c:.5g} times -π log π of the sampled token is added to J, which is not the entropy",
        "term",
        id="sampled-entropy-bonus",
        weigh=lambda batch: rest(batch) + c * _bonus_slope(batch),
    )


def clipped(case: LossCase, times: float = 1.0) -> LossFault:
    """At the largest weight that it has on policy, at advantages so many times as
    large.
    """
    batch = case.ready(on_policy_batch())
    top = 0.0
    with contextlib.suppress(InputError):  # it refuses such advantages
        top = float(
            case.weights(batch.but(adv=times * batch.adv)).nan_to_num().abs().max()
        )
    if top > 0.999 * float((times * batch.adv)[batch.mask].abs().max()):
        top = math.inf  # nothing is clipped there
    return fault(
        f"advantages are clipped to ±{top:.6g}",
        "advantage",
        id="advantages-clipped",
        view=lambda batch: batch.but(adv=batch.adv.clamp(-top, top)),
    )


def left_out(case: LossCase) -> Iterator[LossFault]:
    """What no token that trains exceeds, and all that do not train: a position, a
    length or a log-probability.
    """
    n = torch.arange(1, LONGEST + 1, dtype=torch.float64)[:, None]
    lp = -6 * (n * n.T.sqrt() % 1) - 0.01
    batch = case.ready(
        Rollouts(
            lp, lp, (-1.0) ** n + 0 * lp, n.T <= n, entropy=1 + n / LONGEST + 0 * lp
        )
    )
    try:
        found = case.weights(batch)
        weighted = batch.mask & (case.expected(batch) != 0)
    except InputError:  # it refuses such a batch
        return

    def within(
        batch: Rollouts, number: Callable[[Rollouts], Tensor], limit: float
    ) -> Tensor:
        """The mask of the tokens of which the number is no more than the limit."""
        return batch.mask & (number(batch) <= limit)

    for tokens, words, x, said in LEFT_OUT:
        gone, trains = (x(batch)[weighted & side] for side in (found == 0, found != 0))
        if (
            len(gone)
            and len(trains)
            and (limit := between(float(trains.max()), float(gone.min()))) is not None
        ):
            within_limit = partial(within, number=x, limit=limit)
            for counted in (True, False):
                told = f"{words.format(said(limit))} are not trained, {'though' if counted else 'and not'} counted"
                yield fault(
                    f"{told} in the denominator",
                    "batches",
                    id=left_out_id(tokens, counted),
                    weigh=_under(case.objective, case.hp, within_limit, counted),
                    whole=True,
                )


FLOORS = np.linspace(-1, -80, 80)  # log-probabilities among which `floored` looks
HALVINGS = 50  # of an interval of log-probabilities, or of log-ratios


def floored(case: LossCase) -> Iterator[LossFault]:
    """Log-probabilities, of π_θ alone or of both policies, are at least a number that
    the loss shows on policy.
    """

    def dead(lps: np.ndarray) -> np.ndarray:
        lp = torch.as_tensor(lps)[:, None]
        ones = torch.ones_like(lp)
        batch = case.ready(
            Rollouts(lp, lp, ones, ones.bool(), logp_ref=lp, entropy=ones)
        )
        return ((case.weights(batch) == 0) & (case.expected(batch) != 0))[:, 0].numpy()

    with contextlib.suppress(InputError):  # it refuses such a batch
        hit = dead(FLOORS)
        if not hit.any() or hit[0]:
            return
        first = int(hit.argmax())
        gone = bisected(
            lambda lp: bool(dead(np.array([lp]))[0]), FLOORS[first - 1], FLOORS[first]
        )
        yield from _floors(case, float(f"{gone:.6g}"))


def bisected(holds: Callable[[float], bool], no: float, yes: float) -> float:
    """Where this begins to hold, between a number for which it does not and one for
    which it does.
    """
    for _ in range(HALVINGS):
        middle = (no + yes) / 2
        no, yes = (no, middle) if holds(middle) else (middle, yes)
    return yes


def _floors(case: LossCase, low: float) -> Iterator[LossFault]:
    """What sets log-probabilities below this number to it; the case tells which of them
    the loss can be.
    """
    term = term_of(case.objective, case.hp)

    def of_both(lp: Tensor, old: Tensor, A: Tensor, m: Tensor) -> Tensor:
        return term(lp.clamp(min=low), old.clamp(min=low), A, m)

    def of_one(lp: Tensor, old: Tensor, A: Tensor, m: Tensor) -> Tensor:
        return term(lp.clamp(min=low), old, A, m)

    alone = f"tokens with a log_prob below {low:g} have no gradient: they are left out, or log_prob is set to it"
    if (
        case.objective.level in REDUCE
    ):  # the ratios of the other tokens tell the two apart
        alone = f"log_prob below {low:g} is set to it"
    set_words = f"log-probabilities below {low:g} are set to it"
    for id, words, J in (
        ("log-probs-floored", set_words, of_both),
        ("log-prob-floored", alone, of_one),
    ):
        floor_fault = fault(words, "rounding", id=id, J=J)
        if _alike_across(case, floor_fault, low):
            yield floor_fault


STEPS_ACROSS = (0.02, 0.05, 1.0)  # from a floor of log-probabilities


def _alike_across(case: LossCase, one: LossFault, low: float) -> bool:
    """Whether a fault has the weights of the loss where log π_θ is above this number
    and log π_old is below it.
    """
    steps = torch.tensor(STEPS_ACROSS, dtype=torch.float64)
    above, below, A = torch.cartesian_prod(
        steps, steps, torch.tensor([1.0, -1.0], dtype=torch.float64)
    ).T[..., None]
    lp = low + above
    old = low - below
    ones = torch.ones_like(A)
    batch = case.ready(Rollouts(lp, old, A, ones.bool(), logp_ref=lp, entropy=ones))
    errors = relative_error(
        case.weights(batch),
        one.change.weights(case.objective, case.hp, batch),
        batch.adv,
    )
    return bool((errors < 10 * case.tol).all())


def between(low: float, high: float) -> float | None:
    """The roundest number from low on that is below high, if there is one."""
    limits = (math.ceil(low * 10**d) / 10**d for d in range(9))
    return next((v for v in limits if low <= v < high), None)


def _slope(x: Tensor, y: Tensor) -> float:
    """Of the line through these points, by least squares."""
    x = x - x.mean()
    return float((x * y).sum() / (x**2).sum())
