# SPDX-License-Identifier: Apache-2.0
"""A loss compared with an objective: what its gradient is made of, a weight per token
times a factor per response.

On policy the weight of nearly every objective is known (A), so the factors name the
aggregation whatever is wrong with the clipping; divided out, they leave the weights, to
be compared regime by regime.
"""

import contextlib
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from upref.aggregation import KEPT_MEAN
from upref.errors import InputError
from upref.ops import mean_t, sum_t
from upref.registry import REDUCE, Objective, get
from upref.rollouts import Rollouts
from upref.user_code import Loss, LossOutcome
from upref.verify.factors import (
    FACTORS,
    common_value,
    declared_aggregation,
    is_one,
    names,
)
from upref.verify.finding import Cause
from upref.verify.kl_terms import kl_slope
from upref.weights.batches import (
    BOUND_EDGES,
    MU,
    MU_READ,
    SINGLE_EDGES,
    USUAL_MU,
    breakpoints,
    fill_padding,
    is_near_bound,
    kept_batch,
    on_policy_batch,
    sampler_logp,
)
from upref.weights.black_box import (
    SIGNS,
    computes_in_float32,
    part_with_advantage,
    relative_error,
)
from upref.weights.stress import stress_batch

# float64; 1e-6 in a denominator; float32, beside the rounding of its inputs
EXACT_TOL = 1e-9
HABIT_TOL = 2e-6
FLOAT32_TOL = 2e-5
# times the log-ratio of the batch's sampler: beyond usual caps and vetoes
FAR_SAMPLER = 6
ON_BOUND = 1e-11  # relative: a ratio so near to a bound is on it
# how far from a bound, in log r, its two sides are compared, and by how much a weight
# may lie beside theirs, relative
BESIDE_TIE = 1e-9
SLACK_OF_TIE = 1e-6
VALUE_ROUNDING = 1e-6  # of the value of a loss, relative to max(1, |value|)
FLOAT32_ROUNDING = 2e-7  # of a log-probability in float32, relative
# of the on-policy batch: more tokens than a least divisor, and longer responses
MORE_ROWS = (1, 3, 5, 6) * 8


Made = TypeVar("Made")  # what a cache keeps


def unit_weights(objective: Objective, batch: Rollouts, hp: dict[str, Any]) -> Tensor:
    """Return dJ_t/dlp_t before `declared_aggregation(objective)`, the KL term included.

    Args:
        objective: the objective.
        batch: the batch.
        hp: resolved hyperparameters.

    Returns:
        [B, T], 0 on masked slots.
    """
    w = objective.token_weights(batch, **{k: v for k, v in hp.items() if k != "beta"})
    if objective.agg == "seq-mean" and objective.level != "sequence_product":
        # the declared aggregation is a mean over tokens: it divides by the length
        w = w * batch.mask.sum(-1, keepdim=True)
    if beta := hp.get("beta"):
        w = w - beta * kl_slope(objective.kl, batch)
    return torch.where(batch.mask, w, 0)


@dataclass
class LossCase:
    """A loss, the objective it is compared with at resolved hyperparameters, and its
    aggregation.
    """

    loss: Loss
    objective: Objective
    hp: dict[str, Any]
    agg: str = ""  # a key of FACTORS
    # what the gradient is multiplied by on policy, beside the aggregation
    scale: float = 1.0
    fits: bool = True  # some aggregation explains the on-policy gradient
    tol: float = HABIT_TOL
    edges: tuple[float, ...] = BOUND_EDGES
    failed: set[str] = field(default_factory=set)  # oracles
    # of wrong weights, in words, where a known fault gives them on policy too
    cause: Cause = field(default_factory=Cause)
    # the search for a cause took too long, and stopped
    search_ended: bool = False
    # the unusual inputs on which it was right, in words
    covered: list[str] = field(default_factory=list)
    # calls that wrote or printed
    noted_calls: list[LossOutcome] = field(default_factory=list, repr=False)
    # by how much the value of one batch changes from call to call, relative to
    # max(1, |value|): 0 where it never does, infinity where the loss keeps a state
    value_tol: float = 0.0
    # coefficient of an entropy bonus that the user declares: loss = -J - c H
    entropy_coef: float = 0.0
    # what is made once for a case and its copies, by what it depends on
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    # ---- the loss --------------------------------------------------------------------
    def value_and_gradient(
        self, batch: Rollouts, ranks: int = 1, **overrides: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the value of the user's loss, and dJ/dlp, [B, T]. The outcome of a call
        that wrote or printed is added to `noted_calls`.

        Args:
            batch: the batch.
            ranks: the number of data-parallel ranks that the loss is told.
            **overrides: hyperparameters with other values.

        Raises:
            InputError: the loss refuses the batch.
        """
        outcome, gradient = self.loss.outcome(batch, ranks, **overrides)
        if outcome.wrote or outcome.printed:
            self.noted_calls.append(outcome)
        return outcome.value, gradient

    def kept_value_and_gradient(self, batch: Rollouts) -> tuple[Tensor, Tensor]:
        """Return `value_and_gradient`, measured once by a case and its copies: for a batch
        that several oracles compare with another one.

        Args:
            batch: the batch; another object with its numbers is asked again.

        Returns:
            The value and dJ/dlp, to which nobody may write.
        """
        # the batch is kept with its answer, so that no other one gets its id
        _, answer = self.cached(
            ("answer", id(batch)), lambda: (batch, self.value_and_gradient(batch))
        )
        return answer

    def is_same_value(self, x: Tensor, y: Tensor) -> bool:
        """Return whether two values of the loss differ by no more than those of one batch
        do. NaN is no value.

        Args:
            x: a value.
            y: the one that it is compared with.
        """
        return bool((x - y).abs() <= self.value_tol * y.abs().clamp(min=1))

    def allow_values(self, values: Sequence[Tensor]) -> None:
        """Set `value_tol` so that values of one batch, of several calls, count as the
        same.

        Args:
            values: of the calls.
        """
        for value in values:
            both_nan = value.isnan() and values[0].isnan()
            if both_nan or self.is_same_value(value, values[0]):
                continue
            self.value_tol = max(VALUE_ROUNDING, self.tol)
            if not self.is_same_value(value, values[0]):
                self.value_tol = math.inf
                return

    def gradient(self, batch: Rollouts, ranks: int = 1, **overrides: Any) -> Tensor:
        """Measure the gradient of the user's loss.

        Args:
            batch: the batch.
            ranks: the number of data-parallel ranks that the loss is told.
            **overrides: hyperparameters with other values.

        Returns:
            dJ/dlp of every token, [B, T].
        """
        _, gradient = self.value_and_gradient(batch, ranks, **overrides)
        return gradient

    def weights(self, batch: Rollouts) -> Tensor:
        """Measure the loss's own dJ_t/dlp_t, its aggregation divided out.

        Args:
            batch: the batch.

        Returns:
            [B, T].
        """
        return self.gradient(batch) / self.factors(batch)

    def kept_weights(self, batch: Rollouts) -> Tensor:
        """Return `weights`, of a gradient that is measured once: for a batch of which
        several numbers are shown.

        Args:
            batch: the batch; another object with its numbers is asked again.

        Returns:
            [B, T].
        """
        _, gradient = self.kept_value_and_gradient(batch)
        return gradient / self.factors(batch)

    def factors(self, batch: Rollouts, agg: str = "") -> Tensor:
        """Return what the aggregation multiplies the weights of each response by.

        Args:
            batch: the batch.
            agg: a key of FACTORS; "" for the aggregation of the case.

        Returns:
            [B, 1].
        """
        name = agg or self.agg
        if name == KEPT_MEAN:
            kept = self.kept(batch).sum().clamp(min=1).to(batch.logp.dtype)
            return (1 / kept).expand(len(batch.mask), 1)
        return FACTORS[name](self.loss.visible_batch(batch)).to(batch.logp.dtype)[
            :, None
        ]

    def kept(self, batch: Rollouts) -> Tensor:
        """Return the tokens that the objective's filters and its sampler correction
        keep.

        Args:
            batch: the batch.

        Returns:
            [B, T].
        """
        return self.objective.kept(self.visible_batch(batch), **self.hp_without_kl)

    # ---- the objective ---------------------------------------------------------------
    def expected_value(self, batch: Rollouts) -> float:
        """Return the value that the loss should have, the declared bonus included.

        Args:
            batch: the batch.
        """
        value = self.objective.loss(batch, **self.hp).item()
        if not self.entropy_coef:
            return value
        entropy = self.loss.given(batch)["entropy"]
        mean = (self.factors(batch) * torch.where(batch.mask, entropy, 0)).sum()
        return value - self.entropy_coef * mean.item()

    def expected(self, batch: Rollouts) -> Tensor:
        """Return the objective's weights before its aggregation, the KL term included.

        Args:
            batch: the batch.

        Returns:
            dJ_t/dlp_t of every token, [B, T].
        """
        return unit_weights(self.objective, batch, self.hp)

    def weight_error(
        self,
        batch: Rollouts,
        found: Tensor | None = None,
        floor: float = 0.1,
        rounding_allowance: float = 1.0,
    ) -> Tensor:
        """Return how far the loss's weights are from the objective's.

        Args:
            batch: the batch.
            found: the loss's weights, [B, T]; None: they are measured.
            floor: the least divisor.
            rounding_allowance: so many times the rounding of float32 is forgiven.

        Returns:
            The relative error of each token, [B, T]: 0 on masked slots, and on a bound
            where the weight lies between those of its two sides; infinite where a weight
            is not finite. For a loss that computes in float32, only what rounding does
            not explain is left.
        """
        found = self.weights(batch) if found is None else found
        expected = self.expected(batch)
        # the weight is a difference of two shares of a group, each rounded at its own
        # size
        if "group" in self.objective.reads:
            floor = max(floor, expected.abs().max().item())
        errors = relative_error(found, expected, batch.adv, floor)
        is_wrong = errors > self.tol
        if is_wrong.any():
            ties = self._is_tie_between_sides(batch, found, is_wrong)
            errors = errors.masked_fill(ties, 0)
        if self.single and errors.max() > self.tol:
            scale = torch.maximum(expected.abs(), batch.adv.abs()).clamp(min=floor)
            errors = (
                errors
                - 2 * self.rounding_effect(batch, expected, rounding_allowance) / scale
            ).clamp(min=0)
        return torch.where(batch.mask, errors, 0)

    def bounds(self, A: float) -> list[float]:
        """Return the ratios at which the objective's own weight jumps.

        Args:
            A: the advantage.

        Returns:
            Ratios, ascending; none where they depend on more than the ratio.
        """
        if self.objective.batch_coupled or self.objective.reads_mu or not A:
            return []
        return breakpoints(self.objective, A, USUAL_MU, **self.hp_without_kl)

    def is_on_bound(self, batch: Rollouts) -> Tensor:
        """Mark the tokens whose ratio lies exactly on a bound of the objective, whatever
        the sign of A: min(r A, clip(r) A) has a tie on each bound.

        Args:
            batch: the batch.

        Returns:
            [B, T], False on masked slots.
        """
        ratio = self.ratio(batch)
        ties = torch.zeros_like(batch.mask)
        for bound in (*self.bounds(1.0), *self.bounds(-1.0)):
            ties |= (ratio / bound - 1).abs() < ON_BOUND
        return ties & batch.mask

    def _is_tie_between_sides(
        self, batch: Rollouts, found: Tensor, is_wrong: Tensor
    ) -> Tensor:
        """Mark the tokens exactly on a bound whose weight lies between those on its two
        sides, or between these and none, [B, T]: there < or <=, rounding and the
        version of torch decide which share of the clipped ratio's gradient is left.

        Args:
            batch: the batch.
            found: the loss's weights, [B, T].
            is_wrong: the tokens that are asked about, [B, T].
        """
        ties = self.is_on_bound(batch) & is_wrong
        if not ties.any():
            return ties
        possible = torch.stack(
            [
                self.expected(batch.but(logp=batch.logp - BESIDE_TIE)),
                self.expected(batch.but(logp=batch.logp + BESIDE_TIE)),
                self.expected(batch.but(adv=torch.zeros_like(batch.adv))),
            ]
        )
        slack = SLACK_OF_TIE * possible.abs().amax(0)
        least = possible.amin(0) - slack
        largest = possible.amax(0) + slack
        return ties & (found >= least) & (found <= largest)

    def rounding_effect(
        self, batch: Rollouts, expected: Tensor, rounding_allowance: float = 1.0
    ) -> Tensor:
        """Return how far the expected weight moves where the log-probabilities are rounded
        to float32, a jump included. The changes by several shifts of lp and of lp_old
        are added up.

        Args:
            batch: the batch.
            expected: the objective's weights, [B, T].
            rounding_allowance: so many times the rounding of float32.

        Returns:
            [B, T].
        """
        rounding = torch.where(
            batch.mask,
            torch.maximum(batch.logp.abs(), batch.logp_old.abs()).clamp(min=1)
            * FLOAT32_ROUNDING
            * rounding_allowance,
            0,
        )
        effect_of_shares = torch.zeros_like(rounding)
        shifts = [rounding]
        if "group" in self.objective.reads and batch.group is not None:
            # the weight is a difference of two shares of a group, which shows only what
            # moves a response beside others
            is_same_group = batch.group[:, None] == batch.group
            index_in_group = is_same_group.tril(-1).sum(1, keepdim=True)
            for run_length in (1, 2):
                # a sign that alternates from response to response, or from pair to pair
                is_second = index_in_group // run_length % 2
                shifts.append(rounding * (1 - 2 * is_second))
            effect_of_shares = (
                FLOAT32_ROUNDING * is_same_group.sum(1, keepdim=True)
            ).expand_as(rounding)

        def change_of_weights(batch: Rollouts) -> Tensor:
            """Return how far the weights of a shifted batch are from the expected ones,
            [B, T].
            """
            return (self.expected(batch) - expected).abs().nan_to_num(nan=0.0)

        shifted_batches = [
            shifted_batch
            for shift in shifts
            for shifted_batch in (
                batch.but(logp=batch.logp - shift),
                batch.but(logp_old=batch.logp_old - shift),
            )
        ]
        changes = sum(map(change_of_weights, shifted_batches), effect_of_shares)
        # where π_old is 1, a bound that depends on it is met from below alone
        return torch.maximum(
            changes, change_of_weights(batch.but(logp=batch.logp + rounding))
        )

    def ratio(self, batch: Rollouts) -> Tensor:
        """Return the ratio that the objective acts on, at each token: the token's own, or
        the geometric mean or the product over its response.

        Args:
            batch: the batch.

        Returns:
            [B, T]. Of a token's own ratio, masked slots have 1.
        """
        log_ratio = torch.where(batch.mask, batch.logp - batch.logp_old, 0)
        reductions = {"sequence_mean": mean_t, "sequence_product": sum_t}
        reduce = reductions.get(self.objective.level)
        if reduce is not None:
            log_ratio = reduce(log_ratio, batch.mask)[:, None].expand_as(log_ratio)
        return log_ratio.exp()

    @property
    def hp_without_kl(self) -> dict[str, Any]:
        """The hyperparameters without the coefficient of the KL term.

        Returns:
            The numbers by their names.
        """
        return {k: v for k, v in self.hp.items() if k != "beta"}

    @property
    def wrong(self) -> bool:
        """Whether the weights or their aggregation are wrong: what follows from that is
        not said again.
        """
        return bool(self.failed & {"gradient", "aggregation"})

    @property
    def single(self) -> bool:
        """Whether the loss is compared as one that computes in float32."""
        return self.tol >= FLOAT32_TOL

    def allowed_error(self, least: float = HABIT_TOL) -> float:
        """Return the relative error that is allowed. The default allows 1e-6 in a
        denominator, which has another effect in a batch with other rows or columns.

        Args:
            least: the error that is allowed in float64.
        """
        return max(least, self.tol if self.single else 0)

    def ignores_sampler(self) -> bool:
        """Return whether the loss can correct for its sampler and the comparison gives
        it π_old's log-probabilities instead. Of a loss that takes the whole batch in
        one argument, its gradient has to depend on the sampler's.
        """
        loss = self.loss
        if self.objective.sampler is not None or "logp_sampler" not in loss.reads:
            return False
        if not loss.takes_batch:
            return True
        batch = self.on_policy()
        near_sampler = sampler_logp(batch)
        far_sampler = (
            batch.logp_old + FAR_SAMPLER * (near_sampler - batch.logp_old)
        ).clamp(max=-1e-3)
        try:
            gradient = self.gradient(batch)
            return any(
                not torch.equal(self.gradient(batch.but(logp_sampler=mu)), gradient)
                for mu in (near_sampler, far_sampler)
            )
        except InputError:  # it refuses a sampler that is far away
            return True

    # ---- batches ---------------------------------------------------------------------
    def on_policy(self) -> Rollouts:
        """Return the batch at r = 1, made once.

        Returns:
            The batch, in the shapes that the loss takes. Do not write to it.
        """
        key = ("on policy", self.objective.name)
        return self.cached(key, lambda: self.ready(on_policy_batch()))

    def grid(self, **options: Any) -> Rollouts:
        """Return the batch that visits every regime of the objective, made once.

        Args:
            **options: of `upref.weights.batches.batch`, such as thin.

        Returns:
            The batch, in the shapes that the loss takes. Do not write to it.
        """
        mus = MU + MU_READ if self.objective.reads_mu else MU
        options = self.hp_without_kl | {"edges": self.edges, "mus": mus} | options
        return self.cached(
            ("grid", *options.items()),
            lambda: self.ready(kept_batch(self.per_response, **options)),
        )

    def cached(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what `make` makes. A case and its copies make it once for each key.

        Args:
            key: what it is kept under.
            make: computes it.
        """
        if key not in self.cache:
            self.cache[key] = make()
        made: Made = self.cache[key]
        return made

    @property
    def per_response(self) -> Objective:
        """The objective of which the grid is made. It has one advantage per response
        where the loss or the objective has no more.
        """
        if self.one_adv and self.objective.level not in REDUCE:
            return _one_per_response(self.objective)
        return self.objective

    @property
    def one_adv(self) -> bool:
        """Whether a response has one advantage, as also where the paper's action is the
        whole response: RLOO, W-REINFORCE.
        """
        by_response = (
            self.objective.agg == "seq-mean-token-sum"
            and self.objective.adv
            in (
                "leave_one_out",
                "signed",
            )
        )
        return self.objective.one_adv or by_response or self.loss.adv_shape != "BT"

    def ready(self, batch: Rollouts) -> Rollouts:
        """Return a batch that the loss can take. Masked slots hold numbers that could
        pass for tokens; there is a reference policy; there are no groups where the loss
        takes none.

        Args:
            batch: the batch.

        Returns:
            The batch.
        """
        return self.visible_batch(fill_padding(batch))

    def visible_batch(self, batch: Rollouts) -> Rollouts:
        """Return a ready batch as the loss gets it. Where the objective corrects for a
        sampler, the batch has log-probabilities of one.

        Args:
            batch: the batch.

        Returns:
            The batch, without groups where the loss takes none.
        """
        lp_sampler = batch.logp_sampler
        if self.objective.sampler is not None and lp_sampler is None:
            lp_sampler = sampler_logp(batch)
        return self.loss.visible_batch(batch.but(logp_sampler=lp_sampler))

    def stress_batch(self, axis: str, ids: tuple[str, ...] = ()) -> Rollouts:
        """Return the batch of one axis of unusual inputs.

        Args:
            axis: a key of upref.weights.stress.AXES.
            ids: how its groups are named.
        """
        return self.visible_batch(
            stress_batch(axis, self.objective, ids=ids, **self.hp_without_kl)
        )

    def singly(self, batch: Rollouts) -> tuple["LossCase", Tensor]:
        """Return a copy of the case that is compared as float32, and its weights on the
        batch in float32.

        Args:
            batch: the batch.

        Returns:
            The other case, and [B, T].
        """
        single_case = replace(self)
        single_case.in_float32()
        found = single_case.gradient(batch.floats(torch.float32)).double()
        return single_case, found / single_case.factors(batch)

    def in_float32(self) -> None:
        """Compare the loss as one that computes in float32 from here on: set its
        tolerance, and how far from a bound the batches are, in place.
        """
        self.tol = FLOAT32_TOL
        self.edges = SINGLE_EDGES

    def rounded(self, batch: Rollouts) -> Tensor:
        """Mark the tokens so near to a bound that rounding moves them over it, where the
        loss computes in float32.

        Args:
            batch: the batch.

        Returns:
            [B, T]; all False where it computes in float64.
        """
        if self.single:
            return is_near_bound(self.expected, batch)
        return torch.zeros_like(batch.mask)


@lru_cache(64)
def _one_per_response(objective: Objective) -> Objective:
    """Return the objective with one advantage per response: for one objective always the
    same object, so that the cache of batches finds it again.
    """
    return replace(objective, agg="seq-mean")


@dataclass(frozen=True)
class OnPolicy:
    """The part of a loss's gradient that depends on A, and the objective's weights, on
    a batch with π_θ = π_old = π_ref.
    """

    case: LossCase
    batch: Rollouts
    found: Tensor  # [B, T]
    expected: Tensor  # [B, T], before the aggregation

    def multiples(self, agg: str, sign: float = 0.0) -> Tensor:
        """Return what the tokens are multiplied by beside their weights and an
        aggregation.

        Args:
            agg: a key of FACTORS.
            sign: of A, of the tokens that are used; 0: both.

        Returns:
            A number for each token that has a weight in the objective, [n]. All are one
            number where the aggregation explains the gradient.
        """
        tokens = self.batch.mask & (self.expected.abs() > 1e-6)
        if sign:
            tokens = tokens & (self.batch.adv * sign > 0)
        due = self.expected * self.case.factors(self.batch, agg)
        return (self.found / due)[tokens]


def measure_on_policy(case: LossCase, rows: Sequence[int] = ()) -> OnPolicy:
    """Measure the gradient of a loss on a batch with π_θ = π_old = π_ref, beside the
    weights of its objective there.

    Args:
        case: the loss and its objective.
        rows: indices of responses, of eight; then the batch has these alone, without its
            last column. Empty: the whole batch. Two divisors may be equal in one batch,
            and differ in another.

    Returns:
        The measurement.
    """
    whole = on_policy_batch()
    if case.objective.sampler is not None:
        whole = replace(whole, logp_sampler=whole.logp)
    ready = case.ready(whole)
    # a KL term, right or wrong, has no gradient there, or one without A
    batch = replace(ready, logp_ref=ready.logp)
    if rows:
        part = batch.take(list(rows), range(whole.mask.shape[1] - 1))
        # fewer rows may have another layout, if the loss takes one
        batch = case.loss.visible_batch(part)
    found = part_with_advantage(case.gradient, batch)
    return OnPolicy(case, batch, found, case.expected(batch))


def make_case(loss: Loss, objective: Objective, hp: dict[str, Any]) -> LossCase:
    """Make the LossCase of a loss and an objective; its aggregation is that of its
    on-policy gradient, or the declared one.

    Args:
        loss: as read.
        objective: the objective.
        hp: resolved hyperparameters.

    Returns:
        The case, with the aggregation, the factor beside it and the precision of the
        loss.
    """
    case = LossCase(loss, objective, hp, declared_aggregation(objective))
    measured = measure_on_policy(case)
    # if it fits one sign of A, the weights of the other sign are wrong
    has_own_aggregation = any(
        is_one(common_value(measured.multiples(case.agg, sign))) for sign in SIGNS
    )
    signs = (0.0,) if has_own_aggregation else (0.0, *SIGNS)
    possible_fits = (_fitting_aggregation(measured, sign) for sign in signs)
    fit = next(filter(None, possible_fits), None)
    case.fits = has_own_aggregation or fit is not None
    case.agg, case.scale = fit or (case.agg, 1.0)
    if computes_in_float32(case.gradient, measured.batch):
        case.in_float32()
    return case


def _fitting_aggregation(measured: OnPolicy, sign: float) -> tuple[str, float] | None:
    """Return the aggregation that explains the gradient on tokens of this sign of A,
    and the factor beside it; None where none does.

    The objective's own is tried first. One without a factor is returned at once; else
    one whose factor is the same on more responses; else the first.
    """
    case = measured.case
    fits_with_factor: list[tuple[str, float]] = []
    aggregations = names(declared_aggregation(case.objective))
    if case.objective.rejects and KEPT_MEAN not in aggregations:
        aggregations.append(KEPT_MEAN)
    for name in aggregations:
        k = common_value(measured.multiples(name, sign))
        if k is not None and is_one(k):
            return name, k
        if k is not None:
            fits_with_factor.append((name, k))
    if len(fits_with_factor) < 2:
        return next(iter(fits_with_factor), None)
    try:
        on_more_responses = measure_on_policy(case, MORE_ROWS)
    except InputError:  # it refuses so many
        return fits_with_factor[0]
    for name, k in fits_with_factor:
        k_on_more = common_value(on_more_responses.multiples(name, sign))
        if k_on_more is not None and is_one(k_on_more / k):
            return name, k
    return fits_with_factor[0]


def sampler_words(name: str) -> str:
    """Return the words for what was left out of a comparison with this objective, with a
    hint at the objective that has a correction, if there is one.

    Args:
        name: of the objective.
    """
    with_one = ""
    with contextlib.suppress(InputError):  # it has one already, or the name is none
        with_one = f' ("{get(f"tis({name})").name}" has a correction)'
    return f"what it makes of the sampler's log-probabilities, which are π_old's here{with_one}"
