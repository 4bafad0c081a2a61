# SPDX-License-Identifier: Apache-2.0
"""Does the loss that upref hands to a trainer agree with the reference? Compared on the
training batch, by two routes.

    trained      the scalar that the framework is handed, and dL/dlp by autograd through it, in the dtype that trains
    reference    weight x aggregation in float64: the closed form, which no gradient has passed through; -J in float64

How far rounding may part them follows from the unit roundoff u of the dtype, not from
runs:

* log r is off by at most δ = u (|log r| + 8): one subtraction, and 8 for exp and for a
  bound held in that dtype; where the objective sums over a response, by u (log₂ n + 16)
  mean_t(|lp| + |lp_old|) more: torch sums pairwise, in blocks of 16. The reference is
  evaluated at log r - δ, log r and log r + δ, and what it spans there is allowed. Where
  an objective weighs a token by what others of its response do, and that weight jumps
  there, the sum of the response's δ is allowed besides.
* each operation between lp and L rounds at most 4 times, twice forward (exp: 2 units)
  and twice backward: 4 u times the longest chain in autograd's graph, relative to each
  token's weight.
* a token that some of these evaluations call alive and others dead is at a bound:
  either is allowed, and it is counted.
* a log-probability above 0 is rounding, which online softmax kernels leave (+1e-7): it
  counts as 0.

Where the band of an objective is finer than the dtype, nearly every token is at a bound
and the comparison of gradients proves little: GSPO's, 3e-4 wide, in bfloat16.
`Parity.blind`, the share of such tokens, says how much.

It compares one micro-batch of one rank inside the loss, and keeps nothing. What comes
after the loss (accumulation, ranks, the trainer's own divisor) and the losses of
frameworks are the work of `upref.replay.watch`, which also records the steps that it
judges.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals, row_weights
from upref.errors import InputError
from upref.ops import mean_t
from upref.registry import REDUCE, Objective
from upref.rollouts import Rollouts

log = logging.getLogger(__name__)
HOW_TO_RECORD = "docs/howto/replay.md says how the steps of a run are recorded."
LARGEST = 1e9  # of a metric: infinity and not-a-number have no place in JSON


class ParityError(RuntimeError):
    """The loss that trains is not the objective: one sentence that says where and by
    how much.
    """


@dataclass(frozen=True)
class Parity:
    """How far a trained loss and its gradient are from the reference.

    Attributes:
        max_abs: the largest |trained - reference|: of gradient weights in units of the
            largest one, of the loss in units of Σ |terms|.
        of_bound: the same, each in units of what rounding allows: above 1 is an error.
        at_bound: number of tokens that rounding may put on either side of a clip bound.
        worst: (response, token) where `of_bound` is; (-1, -1): it is the loss.
        blind: the share of tokens at a bound.
    """

    max_abs: float
    of_bound: float
    at_bound: int
    worst: tuple[int, int]
    blind: float = 0.0


def roundings(loss: Tensor, lp: Tensor) -> int:
    """Bound the rounding between log-probabilities and a loss, in units of roundoff.

    Args:
        loss: a scalar.
        lp: the log-probabilities [B, T] that it was computed from.

    Returns:
        4 for each operation on the longest chain of autograd's graph that ends with the
        loss; 4 where there is no graph. A chain through `lp` begins with the operation
        that made it. Chains beside `lp` count whole, so this is an upper bound.
    """
    lp_node = lp.grad_fn
    # operation -> the number of operations on the longest chain that ends with it
    depth: dict[Any, int] = {}
    stack = [loss.grad_fn] if loss.grad_fn is not None else []
    while stack:
        node = stack[-1]
        inputs = []
        if node is not lp_node:
            inputs = [n for n, _ in node.next_functions if n is not None]
        unknown = [n for n in inputs if n not in depth]
        if unknown:
            stack += unknown
        else:
            depth[stack.pop()] = 1 + max((depth[n] for n in inputs), default=0)
    return 4 * max(depth.values(), default=1)


@torch.no_grad()
def compare(
    objective: Objective,
    loss: Tensor,
    gradient: Tensor | None,
    count: int,
    *,
    logp: Tensor,
    logp_old: Tensor,
    adv: Tensor,
    mask: Tensor,
    totals: Totals,
    dp_size: int = 1,
    is_weights: Tensor | None = None,
    entropy: Tensor | None = None,
    logp_sampler: Tensor | None = None,
    **hp: Any,
) -> Parity:
    """Compare a trained loss and its gradient with the reference.

    Token tensors are [B, T] in the dtype that trains; masked slots may hold anything.

    Args:
        objective: the reference.
        loss: the scalar of one rank, times dp_size, as verl needs it.
        gradient: dL/dlp [B, T] of this loss; None: only the loss is compared.
        count: of `roundings`.
        logp: log π_θ.
        logp_old: log π_old.
        adv: advantages, [B, T] or [B, 1].
        mask: True on tokens that train.
        totals: counts of the whole batch, by which the loss is divided.
        dp_size: number of ranks.
        is_weights: factors of the token terms; None: 1.
        entropy: of each token, where the objective reads it.
        logp_sampler: log μ, where the objective corrects for its sampler.
        **hp: hyperparameters.

    Returns:
        The largest differences, also in units of what rounding allows.
    """
    trained_dtype = logp.dtype
    u = torch.finfo(trained_dtype).eps / 2

    def wide(x: Tensor) -> Tensor:
        """Return x as [B, T] in float64, 0 in masked slots."""
        return torch.where(mask, x.expand_as(mask), 0).double()

    lp = wide(logp).clamp(max=0)
    old = wide(logp_old).clamp(max=0)
    A = wide(adv)
    H = None if entropy is None else wide(entropy)
    lp_sampler = None if logp_sampler is None else wide(logp_sampler)
    own_factors = torch.ones_like(lp) if is_weights is None else wide(is_weights)
    factors = _factors_of_terms(objective.agg, mask, totals, own_factors)
    log_r = _size_of_log_ratio(objective, lp, old, mask)
    delta = _rounding_of_log_prob(objective, log_r, lp, old, mask, u)

    def reference(
        moved_lp: Tensor, dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor]:
        """Return weights and terms at these log-probabilities, each times its factor. A
        term of a whole response stands in its first column.
        """
        tensors = dict(
            logp=moved_lp.to(dtype), logp_old=old.to(dtype), adv=A.to(dtype), mask=mask
        )
        if lp_sampler is not None:
            tensors["logp_sampler"] = lp_sampler.to(dtype)
        # unchecked: this is what was trained on, whatever it holds
        batch = Rollouts.unchecked(**tensors, totals=totals, entropy=H)
        terms = objective.unreduced(
            batch.logp, batch.logp_old, batch.adv, mask, H, batch.logp_sampler, **hp
        )
        if terms.ndim == 1:
            first_column = torch.where(mask.any(1), terms, 0)[:, None]
            terms = torch.nn.functional.pad(first_column, (0, mask.shape[1] - 1))
        else:
            terms = torch.where(mask, terms, 0)
        weights = objective.token_weights(batch, **hp)
        return weights.double() * factors, terms.double() * factors

    evaluations = [
        reference(lp),
        reference(lp + delta),
        reference(lp - delta),
        reference(lp, trained_dtype),
    ]
    # [4, B, T] each, in the order of the evaluations
    W = torch.stack([weights for weights, _ in evaluations])
    terms = torch.stack([own_terms for _, own_terms in evaluations])
    overflows = log_r > math.log(torch.finfo(trained_dtype).max) - 1
    is_alive = torch.ne(W, 0)
    is_at_bound = mask & ((is_alive.any(0) != is_alive.all(0)) | overflows)

    # the loss
    slack = (terms[1:3] - terms[0]).abs().amax(0)
    slack += torch.where(is_at_bound, (terms[3] - terms[0]).abs(), 0)
    size = terms[0].abs().sum()
    value_gap = (loss.detach().double() / dp_size + terms[0].sum()).abs()
    additions = math.log2(max(2, mask.numel())) + 16
    allowed_value_gap = slack.sum() + u * (count + additions) * size
    max_abs = ratio(value_gap, size)
    of_bound = ratio(value_gap, allowed_value_gap)
    worst = (-1, -1)

    if gradient is not None:
        g = -wide(gradient) / dp_size
        gap, of_allowed = _gaps_of_gradient(
            g,
            W,
            delta,
            u * count,
            torch.finfo(trained_dtype).tiny,
            is_at_bound,
            overflows,
            objective.level == "custom",
        )
        max_abs = max(max_abs, ratio(gap.max(), W[0].abs().max()))
        if (largest_of_allowed := of_allowed.max().item()) > of_bound:
            of_bound = largest_of_allowed
            worst = divmod(int(of_allowed.argmax()), mask.shape[1])
    return Parity(
        max_abs,
        of_bound,
        int(is_at_bound.sum()),
        worst,
        float(is_at_bound.sum() / mask.sum().clamp(min=1)),
    )


def _gaps_of_gradient(
    g: Tensor,
    W: Tensor,
    delta: Tensor,
    rounding: float,
    tiny: float,
    is_at_bound: Tensor,
    overflows: Tensor,
    sums_over_response: bool,
) -> tuple[Tensor, Tensor]:
    """Return how far the gradient at each token is from the reference weight, and this
    gap in units of what rounding allows, [B, T] each.

    Args:
        g: minus the trained gradient, [B, T].
        W: weights [4, B, T]: at the log-probabilities, above them, below them, and in
            the trained dtype.
        delta: how far the log-probabilities were moved, [B, T].
        rounding: the relative error of all roundings of a weight.
        tiny: the absolute error that is allowed besides.
        is_at_bound: where the evaluations differ in which weights are 0, or overflow.
        overflows: where the ratio may overflow in the trained dtype.
        sums_over_response: whether the weight of a token may sum over its response.
    """
    gap = (g - W[0]).abs()
    largest, second = (W[1:3] - W[0]).abs().sort(0, descending=True).values
    allowed = largest + rounding * W[:3].abs().amax(0)
    allowed += tiny
    if sums_over_response:
        # Where the weight jumps, every other token's rounding still moves it, and the
        # other side may jump too.
        smooth = delta.sum(1, keepdim=True) * W[:3].abs().amax(0)
        allowed += torch.where(largest > smooth, second + smooth, 0)
    # a token at a bound may have the weight of any of the evaluations
    fits_one = ((g - W).abs() <= allowed + rounding * W.abs()).any(0)
    gap = torch.where(is_at_bound & fits_one | overflows, 0, gap)
    return gap, (gap / allowed).nan_to_num(nan=float("inf"))


def _factors_of_terms(
    agg: str, mask: Tensor, totals: Totals, own_factors: Tensor
) -> Tensor:
    """Return the factor of each term, [B, T]: that of the aggregation for its response,
    times its own. One term of a whole response has the mean of its tokens' own factors.
    """
    if agg == "seq-mean":
        own_factors = mean_t(own_factors, mask)[:, None].expand_as(mask)
    agg_factors = torch.as_tensor(row_weights(agg, mask, totals), dtype=torch.float64)
    if agg_factors.ndim:
        agg_factors = agg_factors[:, None]
    return agg_factors * own_factors


def _size_of_log_ratio(
    objective: Objective, lp: Tensor, old: Tensor, mask: Tensor
) -> Tensor:
    """Return |log r| of each token, [B, T]; that of its response where the objective
    acts on responses.
    """
    if objective.level in REDUCE:
        log_r = REDUCE[objective.level](lp - old, mask)
        return log_r.abs()[:, None].expand_as(lp)
    return (lp - old).abs()


def _rounding_of_log_prob(
    objective: Objective,
    log_r: Tensor,
    lp: Tensor,
    old: Tensor,
    mask: Tensor,
    u: float,
) -> Tensor:
    """Return by how much log π must move to have the effect of all rounding of the
    ratio, [B, T].

    Args:
        objective: whose level decides what is rounded.
        log_r: |log r|, as `_size_of_log_ratio` returns it.
        lp, old: log-probabilities, [B, T].
        mask: the tokens that train.
        u: the unit roundoff of the dtype that trains.
    """
    # the head of this file derives 8 and 16
    delta = u * (log_r + 8)
    if objective.level not in REDUCE and objective.level != "custom":
        return delta
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    additions = lengths.double().log2().ceil() + 16
    return delta + u * additions * mean_t(lp.abs() + old.abs(), mask)[:, None]


def ratio(part: Tensor, whole: Tensor) -> float:
    """Divide two numbers, neither of which is negative.

    Args:
        part: a scalar.
        whole: a scalar.

    Returns:
        part / whole; 0 where part is 0, else infinity where whole is 0 or NaN, or part
        is not finite.
    """
    numerator = float(part)
    denominator = float(whole)
    if numerator == 0:
        return 0.0
    if denominator > 0 and math.isfinite(numerator):
        return numerator / denominator
    return math.inf


@dataclass
class Monitor:
    """Compares the first micro-batches of a process and then every so many.

    Attributes:
        objective: the reference.
        first: how many are compared at the beginning.
        every: later ones whose number is a multiple of it are compared; 0: none.
        on_fail: `stop` raises ParityError, `warn` logs it, counts it and trains on.
        seen: number of micro-batches so far.
        max_abs, of_bound, blind: the largest so far, as of Parity.
        alarms: number of comparisons beyond what rounding explains.
        checked: number of comparisons.
    """

    objective: Objective
    first: int = 4
    every: int = 50
    on_fail: str = "stop"
    seen: int = 0
    max_abs: float = 0.0
    of_bound: float = 0.0
    blind: float = 0.0
    alarms: int = 0
    checked: int = 0

    @classmethod
    def of(cls, objective: Objective, settings: dict[str, Any]) -> "Monitor":
        """Make a monitor with the settings of a run.

        Args:
            objective: the reference.
            settings: `first`, `every` and `on_fail`; the others have their defaults.

        Returns:
            A monitor that has compared nothing yet.

        Raises:
            InputError: there is no such setting, or a value is wrong.
        """
        known = ("first", "every", "on_fail")
        if unknown := set(settings) - set(known):
            raise InputError(
                f"parity has no setting {sorted(unknown)[0]!r}; it takes: {', '.join(known)}."
            )
        return cls(objective, **settings)

    def __post_init__(self) -> None:
        """Raise InputError for a wrong `first`, `every` or `on_fail`."""
        for name in ("first", "every"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InputError(
                    f"parity: {name} must be a whole number >= 0 (0: never), got {value!r}."
                )
        if self.on_fail not in ("stop", "warn"):
            raise InputError(
                f"upref_frameworks.parity.on_fail must be stop or warn, got {self.on_fail!r}."
            )

    def due(self) -> bool:
        """Count one more micro-batch, and decide whether it is compared.

        Returns:
            True for the `first` ones, and then for each `every`-th.
        """
        self.seen += 1
        return self.seen <= self.first or (
            self.every > 0 and self.seen % self.every == 0
        )

    def __call__(
        self, loss: Tensor, batch: dict[str, Any], hp: dict[str, Any]
    ) -> dict[str, float]:
        """Compare the micro-batch if its turn has come, and return the metrics so far,
        `upref/parity_KEY` -> number. Raise ParityError where rounding cannot explain
        the difference and `on_fail` is "stop".

        Args:
            loss: the scalar that trains; its graph is kept.
            batch: keywords of `compare`.
            hp: hyperparameters of the objective.
        """
        if self.due():
            self.check(loss, batch, hp)
        metrics = ("max_abs", "of_bound", "blind", "alarms")
        return {
            f"upref/parity_{k}": min(float(getattr(self, k)), LARGEST) for k in metrics
        }

    def check(self, loss: Tensor, batch: dict[str, Any], hp: dict[str, Any]) -> None:
        """Compare one micro-batch, keep the largest differences so far, and count it as
        an alarm if rounding cannot explain them. Log a warning when the comparison
        first proves little.

        Args:
            loss: the scalar that trains; its graph is kept.
            batch: keywords of `compare`.
            hp: hyperparameters of the objective.

        Raises:
            ParityError: rounding cannot explain the difference, and `on_fail` is
                "stop".
        """
        lp = batch["logp"]
        gradient = None
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, lp, retain_graph=True)
        count = roundings(loss, lp)
        found = compare(self.objective, loss, gradient, count, **batch, **hp)
        self.checked += 1
        self.max_abs = max(self.max_abs, found.max_abs)
        self.of_bound = max(self.of_bound, found.of_bound)
        if found.blind > 0.5 >= self.blind:
            log.warning(
                "upref/%s: %.0f %% of the tokens are within %s rounding of a clip bound, where parity proves little",
                self.objective.name,
                100 * found.blind,
                str(lp.dtype)[6:],
            )
        self.blind = max(self.blind, found.blind)
        bad = not found.of_bound <= 1  # True for NaN
        self.alarms += bad
        if bad:
            if found.worst[0] < 0:
                what = "the loss"
            else:
                what = "response {}, token {}".format(*found.worst)
            sentence = (
                f"upref/{self.objective.name} is not what trains: in micro-batch {self.seen} of this process {what} is "
                f"{found.of_bound:.3g} times as far from the float64 reference as {lp.dtype} explains (largest "
                f"difference {found.max_abs:.2g} of the largest weight). {HOW_TO_RECORD}"
            )
            if self.on_fail == "stop":
                raise ParityError(sentence)
            log.error("%s It trains on (parity.on_fail=warn).", sentence)
