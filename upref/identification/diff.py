# SPDX-License-Identifier: Apache-2.0
"""`upref.diff`: where the gradients of two losses part, quantity by quantity in the
order in which a loss makes them.

Both losses are measured as `upref.identify` measures one. No objective is involved.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from upref.errors import InputError
from upref.identification.identification import OF_RESPONSE
from upref.registry import get
from upref.result import Result
from upref.rollouts import Rollouts
from upref.user_code import Loss, read
from upref.user_code.frameworks import closing_settings
from upref.user_code.guard import state_restored
from upref.verify.factors import aggregation_words
from upref.verify.probe import BlackBox, measure
from upref.weights.batches import (
    interval_words,
    on_policy_batch,
    random_batches,
    sampler_logp,
)
from upref.weights.black_box import MANY_LOG_R, SIGNS

ADVANTAGES = (1.0, -1.0, 0.5, -2.0)
LARGEST_ADVANTAGE = 40.0  # the largest |A| that `check` has too
LARGE_ADVANTAGES = (LARGEST_ADVANTAGE, -LARGEST_ADVANTAGE)
PROBABILITIES = (0.02, 0.3, 0.9)  # π_old, where a weight depends on it
LIKELY = (0.97, 0.999)  # π_old of tokens that are compared at |A| = 1 whatever it reads
NOT_COMPARED = (
    "not compared: long responses, many rows, other orders of rows, half precision; "
    "`upref check` has batches for these"
)
LARGER_NOT_COMPARED = f"not compared: |A| above {LARGEST_ADVANTAGE:g}"
SAMPLER_NOT_COMPARED = (
    "not compared: what a framework's loss does with the log-probabilities of a sampler"
)
BESIDE_EMPTY = "gradient beside a response without a trained token"
MEASURED = (
    "measured: the mask and the divisor on policy, the weight on tokens by themselves, "
    "the ratio and factors of the divisor on random batches"
)
BATCHES = 3  # random ones on which whole gradients are compared
BESIDE = 1e-3  # a ratio so near to a jump is not shown: it prints as the jump itself
SMALLEST_PART = 1e-12  # of the largest weight of a batch: below, it is rounding
FAR_REFERENCE = 12.0  # |log π_ref/π_θ|, beyond the usual clamp of 10
SAME_FACTOR = 1e-3  # relative: factors of tokens that are one number


@dataclass(frozen=True)
class Quantity:
    """One quantity of two losses.

    Attributes:
        name: of the quantity.
        differs: whether the losses have two values of it.
        a, b: the values, in words.
        where: the tokens on which they differ, in words; "" where it is all of them.
    """

    name: str
    differs: bool
    a: str
    b: str
    where: str = ""


@dataclass(frozen=True)
class Example:
    """A token to which the losses give two gradients.

    Attributes:
        batch: in words.
        row, column: of the token.
        A, r: its advantage and its ratio.
        a, b: dJ/dlp by each loss.
    """

    batch: str
    row: int
    column: int
    A: float
    r: float
    a: float
    b: float

    def __str__(self) -> str:
        times = f", {self.b / self.a + 0.0:.6g} times as much" if self.a else ""
        return (
            f"{self.batch}, response {self.row}, column {self.column} (A = {self.A:.6g}, "
            f"r = {self.r:.6g}): {self.a:.6g} and {self.b:.6g}{times}"
        )


@dataclass(frozen=True)
class Difference(Result):
    """Where two losses differ. Truth value: nowhere, on all that was compared.

    Attributes:
        a, b: the names of the losses.
        quantities: in the order in which a loss makes them.
        example: the first token of the first batch whose gradients differ.
        compared: what was compared, in words.
        not_compared: what was not, a sentence each.
        closed_by: settings of a framework's loss with which nothing differs; each was
            run.
        seconds: the wall time.
    """

    a: str
    b: str
    quantities: tuple[Quantity, ...]
    example: Example | None
    compared: str
    not_compared: tuple[str, ...] = (NOT_COMPARED, LARGER_NOT_COMPARED)
    closed_by: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    def __bool__(self) -> bool:
        """Return whether no quantity and no gradient of a token differs."""
        return self.first is None and self.example is None

    @property
    def first(self) -> Quantity | None:
        """The first quantity that differs."""
        return next((q for q in self.quantities if q.differs), None)

    @property
    def failures(self) -> Sequence[str]:
        return [f"{q.name}: {q.a} and {q.b}" for q in self.quantities if q.differs]

    def data(self) -> dict[str, Any]:
        """Return the fields, `same` first."""
        return {"same": bool(self)} | asdict(self)

    def text(self, verbose: bool = False) -> str:
        """Return the report: the first quantity that differs, all quantities with the
        values of both losses, and a token on which they differ.

        Args:
            verbose: with what was compared. Where nothing differs, this is there
                anyway, and `verbose` adds the quantities.
        """
        if self:
            lines = [f"nothing differs between {self.a} and {self.b}"]
        elif self.first is not None:
            lines = [f"{self.a} and {self.b} differ first in the {self.first.name}"]
        else:
            lines = [
                f"{self.a} and {self.b} differ, but in none of the quantities below, "
                "where each is measured"
            ]
        width = max(24, len(self.a), len(self.b))
        for q in self.quantities:
            if q.differs:
                where = f": {q.where}" if q.where else ""
                lines.append(f"DIFF  {q.name}{where}")
                lines.append(f"      {self.a:<{width}}  {q.a}")
                lines.append(f"      {self.b:<{width}}  {q.b}")
            elif verbose or not self:
                lines.append(f"same  {q.name}: {q.a}")
        if self.example is not None:
            lines.append(f"first token: {self.example}")
        if not self and self.first is None:
            lines.append(MEASURED)
        lines += [f"closed by: {words}" for words in self.closed_by]
        if verbose or self:
            lines.append(f"compared: {self.compared}")
            lines += self.not_compared
        return "\n".join(lines)


def diff(a: Any, b: Any) -> Difference:
    """Compare the gradients of two losses: which tokens train, the weight of a token,
    the divisor, the KL term, a sampler's correction, and what all of these leave.

    Args:
        a, b: losses as for `upref.check`: functions, objectives, or names such as
            `path/to/file.py:function` and `verl:vanilla`.

    Returns:
        A Difference: true where nothing differs, printable, and JSON. Weights are
        compared for |log r| <= 8.

    Raises:
        InputError: a loss cannot be run, or is not differentiable.
    """
    found = compare_losses(a, b)
    if found:
        return found
    return replace(found, closed_by=tuple(closing_settings(a, b)))


def compare_losses(a: Any, b: Any) -> Difference:
    """Compare two losses as `diff` does, without a search for settings.

    Args:
        a, b: the losses.

    Returns:
        A Difference.
    """
    start = time.perf_counter()
    with state_restored():
        losses = [read(_loss_of(loss)) for loss in (a, b)]
        boxes = [measure(loss) for loss in losses]
        names = _names(losses)
        tol = max(box.tol for box in boxes)
        quantities = tuple(_quantities(boxes, tol))
        first = next((q.name for q in quantities if q.differs), "")
        example = _first_token(boxes, tol, by_weight=first == "weight of a token")
        compared = _compared_words(boxes, tol)
        not_compared = tuple(_not_compared_sentences(boxes, names))
    return Difference(
        *names,
        quantities,
        example,
        compared,
        not_compared,
        seconds=time.perf_counter() - start,
    )


def _compared_words(boxes: Sequence[BlackBox], tol: float) -> str:
    """Return in words what is compared of two losses.

    Args:
        boxes: the losses, measured.
        tol: the relative error of a weight that is allowed.
    """
    ratios = _ratios(boxes)
    tokens = len(ADVANTAGES + LARGE_ADVANTAGES) * len(ratios)
    tokens += len(SIGNS) * sum(int((ratios * mu < 1).sum()) for mu in LIKELY)
    batches = [
        "a batch on policy",
        f"{BATCHES} random ones",
        f"one of |A| up to {LARGEST_ADVANTAGE:g}",
        "one with A = 0 in every second response",
        "one of likely tokens",
    ]
    if all(_takes_empty(box) for box in boxes):
        batches.append("one with a response without a trained token")
    return (
        f"weights of {tokens} tokens by themselves, with π_old up to {max(LIKELY):g}; "
        f"{', '.join(batches)}; to {tol:.1g} of a weight"
    )


def _not_compared_sentences(
    boxes: Sequence[BlackBox], names: Sequence[str]
) -> Iterator[str]:
    """Yield what is not compared of two losses, a sentence each.

    Args:
        boxes: the losses, measured.
        names: of the losses.
    """
    yield NOT_COMPARED
    yield LARGER_NOT_COMPARED
    named = list(zip(names, boxes, strict=True))
    refusing = [name for name, box in named if not _takes_empty(box)]
    if refusing:
        yield (
            "not compared: a response without a trained token, beside which no finite "
            f"gradient or value comes from {' and from '.join(refusing)}"
        )
    one_each = [name for name, box in named if not _takes_varied(box)]
    if one_each:
        verb = "read" if len(one_each) > 1 else "reads"
        yield (
            "not compared: advantages that differ within a response: "
            f"{' and '.join(one_each)} {verb} one for each response"
        )
    reads_sampler = any("logp_sampler" in box.loss.reads for box in boxes)
    if reads_sampler and any(box.loss.framework for box in boxes):
        yield SAMPLER_NOT_COMPARED


def _loss_of(loss: Any) -> Any:
    """Return the objective that a word without a colon names; else the loss as it is."""
    return get(loss) if isinstance(loss, str) and ":" not in loss else loss


def _names(losses: Sequence[Loss]) -> tuple[str, str]:
    """Return the names of two losses, told apart where they are one."""
    first, second = (loss.name for loss in losses)
    return (first, second) if first != second else (f"{first} (1)", f"{second} (2)")


def _quantities(boxes: Sequence[BlackBox], tol: float) -> Iterator[Quantity]:
    """Yield each quantity of both losses, in the order in which a loss makes them:
    mask, weight of a token, ratio, divisor, KL term, and where it is compared the
    sampler's correction. Where the masks differ, nothing else is compared.

    Args:
        boxes: the two losses, measured.
        tol: the relative error of a weight that is allowed.
    """
    trains, other_trains = (_trained_tokens(box) for box in boxes)
    masks_differ = not torch.equal(trains, other_trains)
    of_batch = "tokens train, in a batch on policy"
    a = f"{int(trains.sum())} {of_batch}"
    b = f"{int(other_trains.sum())} {of_batch}"
    yield Quantity("mask", masks_differ, a, b)
    if masks_differ:
        return  # what is measured on other tokens is not comparable
    of_token = _token_weight(boxes, tol)
    yield of_token
    beside = [_beside_others(box) for box in boxes]
    ratio = _ratio(boxes, beside, of_token.differs)
    yield ratio
    divisor = _divisor(boxes, [measured.factors for measured in beside], tol)
    if not (divisor.differs or of_token.differs):
        divisor = _divisor_of_batches(boxes) or divisor
    yield divisor
    kl_term = _kl_term(boxes, tol)
    yield kl_term
    if _sampler_is_compared(boxes):
        yield _sampler_correction(boxes, tol)
    is_same = not any(q.differs for q in (of_token, ratio, divisor, kl_term))
    if is_same and all(_takes_empty(box) for box in boxes):
        yield from _beside_empty(boxes, tol)


def _kl_term(boxes: Sequence[BlackBox], tol: float) -> Quantity:
    """Compare the estimators and the coefficients of the KL terms."""
    box, other_box = boxes
    differs = box.kl != other_box.kl or abs(box.beta - other_box.beta) > tol
    words = ["none", "none"]
    for place, one in enumerate(boxes):
        if one.beta:
            words[place] = f"{one.beta:.6g} x {one.kl}"
    return Quantity("KL term", differs, *words)


def _trained_tokens(box: BlackBox) -> torch.Tensor:
    """Return which tokens of a batch on policy have a gradient above SMALLEST_PART of
    the largest, [B, T].
    """
    batch = box.case.ready(on_policy_batch())
    gradient = box.case.gradient(batch).abs()
    return gradient > SMALLEST_PART * gradient.max()


def _divisor(
    boxes: Sequence[BlackBox], factors: Sequence[tuple[float, ...]], tol: float
) -> Quantity:
    """Compare the aggregations, and the factors that all tokens of a batch share."""
    differs = (
        boxes[0].agg != boxes[1].agg
        or abs(boxes[0].scale - boxes[1].scale) > tol * abs(boxes[0].scale)
        or not np.allclose(factors[0], factors[1], rtol=SAME_FACTOR)
    )
    return Quantity("divisor", differs, *map(_divisor_words, boxes, factors))


def _divisor_of_batches(boxes: Sequence[BlackBox]) -> Quantity | None:
    """Return the divisor as a quantity that differs, where on some batch all weights of
    one loss are those of the other one times a factor; else None.

    Args:
        boxes: two losses whose weights of a token by itself are the same.
    """
    for name, batch in [*_batches_of_policies(boxes), *_batches_of_advantages(boxes)]:
        one, other = (_Weights.of(box, box.case.ready(batch)) for box in boxes)
        factor = other.factor_beside(one.weights, one.rounding)
        if factor is not None and abs(factor - 1) > SAME_FACTOR:
            agg, other_agg = (_divisor_words(box, ()) for box in boxes)
            times = f"{other_agg}, times {factor:.6g} in {name}"
            return Quantity("divisor", True, agg, times)
    return None


def _beside_empty(boxes: Sequence[BlackBox], tol: float) -> Iterator[Quantity]:
    """Yield the gradient beside a response without a trained token, where it differs and
    that of the same batch with all responses does not.

    Args:
        boxes: two losses that take such a response.
        tol: the relative error of a weight that is allowed.
    """
    all_responses = _random_batches(boxes, BATCHES)[0]
    batch = _with_empty_response(all_responses)
    differs_in = []
    for one_batch in (all_responses, batch):
        gradients = [box.case.gradient(box.case.ready(one_batch)) for box in boxes]
        differs = _differ(gradients, tol) & one_batch.mask
        differs_in.append(bool(differs.any()))
    if differs_in != [False, True]:
        return
    one, other = (_Weights.of(box, box.case.ready(batch)) for box in boxes)
    factor = one.factor_beside(other.weights, other.rounding)
    a = b = "not that of the other loss"
    if factor:
        a, b = (f"{x:.6g} times the other loss's" for x in (factor, 1 / factor))
    yield Quantity(BESIDE_EMPTY, True, a, b)


def _divisor_words(box: BlackBox, factors: tuple[float, ...]) -> str:
    """Return the aggregation of a loss in words, with its factor on policy and the
    first factor of a random batch that is not 1.
    """
    words = aggregation_words(box.agg) or "no aggregation that is known"
    if box.scale != 1:
        words += f", times {box.scale:.6g}"
    for i, factor in enumerate(factors):
        if abs(factor - 1) > SAME_FACTOR:
            return f"{words}, where all ratios are 1; times {factor:.6g} on random batch {i}"
    return words


def _ratios(boxes: Sequence[BlackBox]) -> np.ndarray:
    """Return the ratios at which the weights are compared, ascending: a grid over
    |log r| <= 8, and both sides of each jump of either loss, as near as it is measured.
    """
    at = [jump.r for box in boxes for jump, _ in box.jumps]
    near = max(box.resolution for box in boxes)
    sides = np.outer(at, (1 - 2 * near, 1 + 2 * near)).ravel()
    return np.unique(np.r_[np.exp(MANY_LOG_R), sides])


def _token_weight(boxes: Sequence[BlackBox], tol: float) -> Quantity:
    """Compare the weights of a token by itself: where they differ, and what each loss
    has at one ratio there.

    Args:
        boxes: the two losses, measured.
        tol: the relative error of a weight that is allowed. A weight counts as 0.1 |A|
            at least.
    """
    differing = [w for w in _weights_of_tokens(boxes, tol) if w.differs.any()]
    if not differing:
        bounds = [_bound_words(box) for box in boxes]
        return Quantity("weight of a token", False, *bounds)
    places = []
    met: list[float] = []
    for weights in differing:
        sign = "A > 0" if weights.A > 0 else "A < 0"
        for interval in _intervals(boxes, weights.r, weights.differs):
            tokens = f"{sign}, {interval}"
            if weights.A in LARGE_ADVANTAGES and tokens not in places:
                tokens = f"A = {weights.A:g}, {interval}"
            if weights.mu in LIKELY:  # where no jump is searched
                tokens = f"{sign}, about {interval} at π_old = {weights.mu}"
            else:
                met += interval.met
            places.append(tokens)
    where = "; ".join(dict.fromkeys(places))
    if met:
        named = ", ".join(dict.fromkeys(f"{end:.4g}" for end in sorted(met)))
        where += f" (near {named} neither jumps: there the two meet)"
    shown = differing[0]
    place = _place_to_show(boxes, shown)
    at = f"at A = {shown.A:g}, r = {shown.r[place]:.6g}"
    if shown.mu is not None:
        at += f", π_old = {shown.mu}"
    box, other_box = boxes
    a = f"{shown.x[place]:.6g} {at}; {_bound_words(box)}"
    b = f"{shown.y[place]:.6g} {at}; {_bound_words(other_box)}"
    return Quantity("weight of a token", True, a, b, where)


@dataclass(frozen=True)
class _WeightsOfToken:
    """The weights of a token by itself under two losses, at many ratios.

    Attributes:
        A: its advantage.
        mu: its π_old; None where neither loss reads it.
        r: the ratios, ascending.
        x, y: the weights by either loss.
        differs: whether the two differ.
    """

    A: float
    mu: float | None
    r: np.ndarray
    x: np.ndarray
    y: np.ndarray
    differs: np.ndarray


def _weights_of_tokens(
    boxes: Sequence[BlackBox], tol: float
) -> Iterator[_WeightsOfToken]:
    """Yield the weights of a token by itself, for each of ADVANTAGES and then of
    LARGE_ADVANTAGES, and for each of PROBABILITIES where a loss reads π_old; then those
    of likely tokens. Of these, what differs at another π_old too counts as equal.
    """
    ratios = _ratios(boxes)
    usual = PROBABILITIES if any(box.reads_mu for box in boxes) else (None,)
    differs_at_usual = {A: np.zeros(len(ratios), dtype=bool) for A in SIGNS}
    points = [(A, mu) for A in ADVANTAGES + LARGE_ADVANTAGES for mu in usual]
    for A, mu in [*points, *((A, mu) for A in SIGNS for mu in LIKELY)]:
        r = ratios if mu is None else ratios[ratios * mu < 1]
        x, y = (box.curve()(r, np.full_like(r, A), mu) for box in boxes)
        size = np.maximum.reduce([abs(x), abs(y), np.full_like(x, 0.1 * abs(A))])
        differs = abs(x - y) > tol * size
        if mu in LIKELY:
            differs &= ~differs_at_usual[A][: len(r)]
        elif A in SIGNS:
            differs_at_usual[A][: len(r)] |= differs
        yield _WeightsOfToken(A, mu, r, x, y, differs)


def _place_to_show(boxes: Sequence[BlackBox], weights: _WeightsOfToken) -> int:
    """Return the index of the ratio at which the report shows that weights differ: the
    clearest one that is not beside a jump, or where there is none, the clearest one.
    """
    jumps = [jump.r for box in boxes for jump, _ in box.jumps]
    is_far = np.array(
        [all(abs(ratio / jump - 1) > BESIDE for jump in jumps) for ratio in weights.r]
    )
    candidates = weights.differs & is_far
    if not candidates.any():
        candidates = weights.differs
    return _clearest(weights.r, weights.x, weights.y, candidates)


def _clearest(r: np.ndarray, x: np.ndarray, y: np.ndarray, wrong: np.ndarray) -> int:
    """Return the index of the ratio nearest to 1 at which weights differ by more than a
    tenth, or else of the largest relative difference.

    Args:
        r: ratios.
        x, y: the weights of either loss there.
        wrong: where they differ; somewhere they do.
    """
    difference = abs(x - y) / np.maximum(np.maximum(abs(x), abs(y)), 1e-300)
    clear = wrong & (difference > 0.1)
    if not clear.any():
        return int(np.where(wrong, difference, 0).argmax())
    return int(np.where(clear, abs(np.log(r)), np.inf).argmin())


# on which tokens the weight of one depends
LEVELS = {
    "token": "of the token",
    "mean": "of the response: the geometric mean of the ratios of its tokens",
    "product": "of the response: the product of the ratios of its tokens",
    "response": OF_RESPONSE,
    "batch": "the weight of a token depends on other responses",
    "unknown": "not measured: no aggregation that is known",
}
OF_RESPONSES = ("mean", "product", "response")
IN_ANOTHER_WAY = ", in another way"
ADVANTAGES_DIFFER = "; advantages that differ within a response are used otherwise"


@dataclass(frozen=True)
class BesideOthers:
    """How the weights of tokens depend on the other tokens of their batch.

    Attributes:
        level: on which tokens the weight of one depends, a key of LEVELS.
        factors: of each random batch, the factor of all its weights beside those of
            the same tokens alone; 1 where there is no such factor.
    """

    level: str
    factors: tuple[float, ...] = (1.0,) * BATCHES


def _ratio(
    boxes: Sequence[BlackBox], beside: Sequence[BesideOthers], weights_differ: bool
) -> Quantity:
    """Compare whose ratio the weight of a token reads: its own or its response's, and
    of the latter, in which way.

    Args:
        boxes: the losses.
        beside: what each weight depends on.
        weights_differ: the weights of a token by itself differ, so that those of several
            tokens tell nothing of the ratio.
    """
    levels = [b.level for b in beside]
    a, b = (LEVELS[level] for level in levels)
    if levels[0] != levels[1]:
        return Quantity("ratio", True, a, b)
    is_same = levels[0] not in OF_RESPONSES or weights_differ
    if is_same or _weights_are_equal(boxes):
        return Quantity("ratio", False, a, b)
    if levels[0] != "response":  # equal where a response has one advantage
        return Quantity("ratio", True, f"{a}{ADVANTAGES_DIFFER}", f"{b}, the same")
    return Quantity("ratio", True, a, b + IN_ANOTHER_WAY)


def _weights_are_equal(boxes: Sequence[BlackBox]) -> bool:
    """Tell whether the weights of two losses on each random batch are equal, but for a
    factor that all tokens of the batch share.
    """
    for batch in _random_batches(boxes, BATCHES):
        one, other = (_Weights.of(box, box.case.ready(batch)) for box in boxes)
        if one.factor_beside(other.weights, other.rounding) is None:
            return False
    return True


@dataclass(frozen=True)
class _Weights:
    """The weights of the tokens of a batch, without the KL term and the aggregation.

    Attributes:
        weights: of each token.
        adv: the advantage of each token.
        rounding: how far rounding may move each weight.
    """

    weights: np.ndarray
    adv: np.ndarray
    rounding: np.ndarray

    @classmethod
    def of(cls, box: BlackBox, batch: Rollouts) -> "_Weights":
        """Measure the weights of a loss on the tokens of a batch that train."""
        mask = batch.mask
        gradient = box.gradient(batch)
        kl_weights = box.kl_weights(batch)
        # where A is 0, only the rounding of the two KL weights is left
        rounding = box.tol * kl_weights.abs() + SMALLEST_PART * gradient.abs().max()
        return cls(
            (gradient - kl_weights)[mask].numpy(),
            batch.adv.expand_as(batch.logp)[mask].numpy(),
            rounding[mask].numpy(),
        )

    def factor_beside(
        self, others: np.ndarray, rounding: np.ndarray | float = 0.0
    ) -> float | None:
        """Return the one factor of these weights beside others of the same tokens; None
        where they have several.

        Args:
            others: the other weights.
            rounding: how far rounding may move each of them.
        """
        trains = abs(others) > SAME_FACTOR * abs(others).max(initial=0)
        ratios = self.weights[trains] / others[trains]
        factor = float(np.median(ratios)) if trains.any() else 1.0
        error = abs(self.weights - factor * others)
        least = np.maximum(abs(others), 0.1 * abs(self.adv))
        allowed = abs(factor) * (SAME_FACTOR * least + rounding) + self.rounding
        return None if (error > allowed).any() else factor


def _beside_others(box: BlackBox) -> BesideOthers:
    """Compare the weights of the tokens of random batches with those of each alone; the
    level is "token" where they are equal but for a factor of each batch.
    """
    if not box.agg:
        return BesideOthers("unknown")
    factors = []
    for batch in _random_batches([box], BATCHES):
        factor = _common_factor(box, box.case.ready(batch))
        if factor is None and box.batch_coupled:
            return BesideOthers("batch")
        if factor is None:
            return BesideOthers(_level_of_response(box))
        factors.append(factor)
    is_one = np.allclose(factors, 1, rtol=SAME_FACTOR)
    if box.batch_coupled and is_one:  # on other batches than these
        return BesideOthers("batch")
    return BesideOthers("token", tuple(factors))


def _common_factor(box: BlackBox, batch: Rollouts) -> float | None:
    """Return the one factor of the weights of a batch beside those of the same tokens
    alone; None where they have several.
    """
    r = (batch.logp - batch.logp_old)[batch.mask].exp().numpy()
    mu = batch.logp_old[batch.mask].exp().numpy()
    found = _Weights.of(box, batch)
    alone = np.zeros_like(r)
    # apart, because a loss may not count tokens whose A is 0
    for chosen in (found.adv == 0, found.adv != 0):
        alone[chosen] = box.curve()(r[chosen], found.adv[chosen], mu[chosen])
    return found.factor_beside(alone)


def _level_of_response(box: BlackBox) -> str:
    """Return which ratio of a response gives the weight that one token of this ratio
    has alone, a key of LEVELS; "response" where neither does. All tokens of a response
    have one advantage here.
    """
    for level, reduce in (("mean", torch.div), ("product", _undivided)):
        factors = [
            _factor_of_response(box, box.case.ready(batch), reduce)
            for batch in random_batches(0, BATCHES, one_adv=True)
        ]
        if all(f is not None and abs(f - 1) <= SAME_FACTOR for f in factors):
            return level
    return "response"


def _undivided(total: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Return the total: a product of ratios has no length under it, unlike their mean."""
    return total


def _factor_of_response(
    box: BlackBox,
    batch: Rollouts,
    reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> float | None:
    """Return the one factor of the weights of a batch beside those of single tokens
    that have the ratio of their response; None where they have several.

    Args:
        box: the loss, measured.
        batch: with one advantage per response.
        reduce: makes log s [B, 1] of the sums of log r and the lengths, [B, 1].
    """
    log_r = torch.where(batch.mask, batch.logp - batch.logp_old, 0)
    log_s = reduce(log_r.sum(1, keepdim=True), batch.mask.sum(1, keepdim=True))
    s = log_s.exp().expand_as(log_r)[batch.mask].numpy()
    found = _Weights.of(box, batch)
    return found.factor_beside(box.curve()(s, found.adv, None))


def _sampler_is_compared(boxes: Sequence[BlackBox]) -> bool:
    """Return whether a loss reads log-probabilities of a sampler, and no loss is a
    framework's, whose settings decide what it does with them.
    """
    return any("logp_sampler" in box.loss.reads for box in boxes) and not any(
        box.loss.framework for box in boxes
    )


def _with_sampler(batch: Rollouts) -> Rollouts:
    """Return the batch with log-probabilities of a sampler other than π_old."""
    return batch.but(logp_sampler=sampler_logp(batch))


def _with_far_reference(batch: Rollouts) -> Rollouts:
    """Return the batch with a reference policy near to π_θ on some tokens and far on
    others, where a KL term may be clamped.
    """
    wave = torch.arange(batch.mask.numel(), dtype=batch.logp.dtype).sin()
    log_ratio = FAR_REFERENCE * wave.reshape(batch.mask.shape)
    return batch.but(logp_ref=(batch.logp + log_ratio).clamp(max=0))


def _sampler_correction(boxes: Sequence[BlackBox], tol: float) -> Quantity:
    """Compare the factors that a sampler's log-probabilities put on the gradients, at
    the first token where they differ; where none does, at the first where they are not
    1.
    """
    words = ["none", "none"]
    for name, batch in _batches_of_policies(boxes):
        factors = []
        is_large = batch.mask  # tokens whose quotient rounding does not spoil
        for box in boxes:
            plain = box.case.gradient(box.case.ready(batch))
            corrected = box.case.gradient(box.case.ready(_with_sampler(batch)))
            is_large = is_large & (plain.abs() > 1e-3 * plain.abs().max())
            factors.append(corrected / plain)
        a, b = factors
        differs = is_large & ((a - b).abs() > 10 * tol * a.abs().clamp(min=1))
        shown = differs if differs.any() else is_large & ((a - 1).abs() > 10 * tol)
        if shown.any():
            i, t = shown.nonzero()[0].tolist()
            rho = (batch.logp_old - sampler_logp(batch))[i, t].exp()
            at = f"where π_old/μ = {rho:.6g} ({name}, response {i}, column {t})"
            words = [f"times {x[i, t]:.6g} {at}" for x in factors]
        if differs.any():
            return Quantity("sampler's correction", True, *words)
    return Quantity("sampler's correction", False, *words)


def _bound_words(box: BlackBox) -> str:
    """Return at which ratios the weight of a token jumps, by sign of A."""
    parts = []
    for A, sign in ((1.0, ">"), (-1.0, "<")):
        bounds = ", ".join(f"{bound:.6g}" for bound in box.bounds(A))
        parts.append(f"A {sign} 0: {bounds or 'none'}")
    return f"jumps at {'; '.join(parts)}"


@dataclass(frozen=True)
class Interval:
    """Ratios at which two weights differ.

    Attributes:
        low, high: the ends; None: there is none.
        met: those ends at which no weight jumps, so that the two meet there.
    """

    low: float | None
    high: float | None
    met: tuple[float, ...]

    def __str__(self) -> str:
        if self.low is None and self.high is None:
            return "any r"
        return interval_words(self.low, self.high, below="<")


def _intervals(
    boxes: Sequence[BlackBox], r: np.ndarray, wrong: np.ndarray
) -> Iterator[Interval]:
    """Yield the intervals of ratios on which the weights differ. Their ends are jumps of
    a loss where there is one, and else in the middle of two ratios.

    Args:
        boxes: the two losses, measured.
        r: ratios, ascending.
        wrong: whether the weights differ there.
    """
    jumps = np.array(sorted(jump.r for box in boxes for jump, _ in box.jumps))
    # indices at which an interval starts, and those behind its last ratio, in turn
    edges = np.flatnonzero(np.diff(np.r_[False, wrong, False].astype(int)))
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        low = None if start == 0 else _end(jumps, r[start - 1], r[start])
        high = None if stop == len(r) else _end(jumps, r[stop - 1], r[stop])
        ends = [end for end in (low, high) if end is not None]
        yield Interval(low, high, tuple(end for end in ends if end not in jumps))


def _end(jumps: np.ndarray, below: float, above: float) -> float:
    """Return the first jump between two ratios, or their geometric mean."""
    between = jumps[(jumps > below) & (jumps < above)]
    return float(between[0] if len(between) else (below * above) ** 0.5)


def _batches(boxes: Sequence[BlackBox]) -> Iterator[tuple[str, Rollouts]]:
    """Yield batches that both losses take, each with its name: of two policies, with
    unusual advantages or tokens, where it matters also with a sampler's log-probabilities
    or a far reference, and with a response without a trained token.
    """
    yield from _batches_of_policies(boxes)
    yield from _batches_of_advantages(boxes)
    if _sampler_is_compared(boxes):
        for name, batch in _batches_of_policies(boxes):
            yield f"{name} of a sampler", _with_sampler(batch)
    if any(box.beta for box in boxes):
        for name, batch in _batches_of_policies(boxes):
            yield f"{name} with a far reference", _with_far_reference(batch)
    if all(_takes_empty(box) for box in boxes):
        first_batch = _random_batches(boxes, BATCHES)[0]
        name = "random batch 0 with a response without a trained token"
        yield name, _with_empty_response(first_batch)


def _batches_of_policies(boxes: Sequence[BlackBox]) -> Iterator[tuple[str, Rollouts]]:
    """Yield batches whose sampler is π_old, each with its name."""
    yield "batch on policy", on_policy_batch()
    for i, batch in enumerate(_random_batches(boxes, BATCHES)):
        yield f"random batch {i}", batch


def _batches_of_advantages(
    boxes: Sequence[BlackBox],
) -> Iterator[tuple[str, Rollouts]]:
    """Yield batches with advantages that are large, or 0 in every second response, and
    one of likely tokens, each with its name.
    """
    batch = _random_batches(boxes, BATCHES)[0]
    yield "random batch 0 with large advantages", _with_large_advantages(batch)
    is_first = torch.arange(len(batch.mask))[:, None] % 2 == 0
    zero = batch.but(adv=torch.where(is_first, batch.adv, 0))
    yield "random batch 0 with A = 0 in every second response", zero
    wave = torch.arange(batch.mask.numel(), dtype=batch.logp.dtype)
    wave = wave.reshape(batch.mask.shape)
    # probabilities from 0.9 to 0.9999
    lp, lp_old = (
        torch.log1p(-(10 ** (-2.5 + 1.5 * (wave + shift).sin()))) for shift in (0, 1)
    )
    yield "random batch 0 with likely tokens", batch.but(logp=lp, logp_old=lp_old)


def _with_empty_response(batch: Rollouts) -> Rollouts:
    """Return the batch without the tokens of its last response."""
    mask = batch.mask.clone()
    mask[-1] = False
    return batch.but(mask=mask)


def _takes_empty(box: BlackBox) -> bool:
    """Return whether a loss and its gradient are finite beside a response without a
    trained token.
    """
    batch = _with_empty_response(_random_batches([box], BATCHES)[0])
    try:
        value, gradient = box.case.value_and_gradient(box.case.ready(batch))
    except InputError:
        return False
    return bool(value.isfinite() and gradient.isfinite().all())


def _takes_varied(box: BlackBox) -> bool:
    """Return whether a loss takes advantages that differ within a response."""
    (varied,) = random_batches(0, 1, one_adv=False)
    return box.accepts(varied)


def _with_large_advantages(batch: Rollouts) -> Rollouts:
    """Return the batch with advantages times one factor, the largest of size
    LARGEST_ADVANTAGE.
    """
    sizes = batch.adv.expand_as(batch.logp)[batch.mask].abs()
    return batch.but(adv=batch.adv * (LARGEST_ADVANTAGE / sizes.max()))


def _random_batches(boxes: Sequence[BlackBox], n: int) -> list[Rollouts]:
    """Return n random batches, with one advantage per response where a loss refuses
    several.
    """
    return random_batches(0, n, not all(_takes_varied(box) for box in boxes))


def _first_token(
    boxes: Sequence[BlackBox], tol: float, by_weight: bool
) -> Example | None:
    """Return the first token of the first batch whose gradients differ.

    Args:
        boxes: the losses.
        tol: the relative error that is allowed.
        by_weight: a token is preferred whose weights differ by itself: another one
            shows what differs later alone, such as the divisor.

    Returns:
        The token; None where the gradients agree on all batches.
    """
    first = None
    for name, batch in _batches(boxes):
        gradients = [box.case.gradient(box.case.ready(batch)) for box in boxes]
        differs = _differ(gradients, tol) & batch.mask
        weights_differ = differs
        if by_weight:
            weights = [_weights_alone(box, box.case.ready(batch)) for box in boxes]
            weights_differ = differs & _differ(weights, tol)
        if weights_differ.any():
            return _example(name, batch, gradients, weights_differ)
        if differs.any() and first is None:
            first = _example(name, batch, gradients, differs)
    return first


def _differ(pair: Sequence[torch.Tensor], tol: float) -> torch.Tensor:
    """Return where two gradients differ by more than 10 tol, relative to the larger
    one, which counts as a thousandth of the largest of all at least.
    """
    x, y = pair
    size = torch.maximum(x.abs(), y.abs())
    return (x - y).abs() > 10 * tol * size.clamp(min=1e-3 * float(size.max()))


def _weights_alone(box: BlackBox, batch: Rollouts) -> torch.Tensor:
    """Return the weight of each token by itself, [B, T]; 0 on masked slots."""
    mask = batch.mask
    r = (batch.logp - batch.logp_old)[mask].exp().numpy()
    adv = batch.adv.expand_as(batch.logp)[mask].numpy()
    alone = box.curve()(r, adv, batch.logp_old[mask].exp().numpy())
    weights = torch.zeros(mask.shape, dtype=torch.float64)
    weights[mask] = torch.from_numpy(alone)
    return weights


def _example(
    name: str, batch: Rollouts, gradients: Sequence[torch.Tensor], chosen: torch.Tensor
) -> Example:
    """Return the first of the chosen tokens of a batch as an Example.

    Args:
        name: of the batch, in words.
        batch: the batch.
        gradients: dJ/dlp by each loss, [B, T].
        chosen: [B, T], True somewhere.
    """
    i, t = chosen.nonzero()[0].tolist()
    A = batch.adv[i, t if batch.adv.shape[1] > 1 else 0]
    r = (batch.logp - batch.logp_old)[i, t].exp()
    x, y = gradients
    return Example(name, i, t, float(A), float(r), float(x[i, t]), float(y[i, t]))
