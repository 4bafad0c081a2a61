# SPDX-License-Identifier: Apache-2.0
"""A loss compared with an objective: what its gradient is made of, a weight per token
times a factor per response.

On policy the weight of nearly every objective is known (A), so the factors name the
aggregation whatever is wrong with the clipping; divided out, they leave the weights, to
be compared regime by regime.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from upref import kl
from upref.errors import InputError
from upref.ops import mean_t, sum_t
from upref.registry import REDUCE, Objective, get
from upref.rollouts import Rollouts
from upref.user_code import Loss, LossOutcome
from upref.verify.factors import FACTORS, common_value, declared_aggregation, names
from upref.verify.finding import Cause
from upref.weights.batches import (
    EDGES,
    MU,
    MU_READ,
    SINGLE_EDGES,
    fill_padding,
    kept_batch,
    near_a_bound,
    on_policy_batch,
    relative_error,
    sampler,
)
from upref.weights.stress import stress_batch

# float64; 1e-6 in a denominator; float32, beside the rounding of its inputs
EXACT = 1e-9
HABIT = 2e-6
SINGLE = 2e-5
# times the log-ratio of the batch's sampler: beyond usual caps and vetoes
FAR_SAMPLER = 6
ROUND = 2e-7  # of a log-probability in float32, relative


def unit_weights(o: Objective, b: Rollouts, hp: dict[str, Any]) -> Tensor:
    """dJ_t/dlp_t before `declared_aggregation(o)`, the KL term included.

    Args:
        o: the objective.
        b: the batch.
        hp: resolved hyperparameters.

    Returns:
        [B, T].
    """
    w = o.token_weights(b, **{k: v for k, v in hp.items() if k != "beta"})
    if o.agg == "seq-mean" and o.level != "sequence_product":
        w = w * b.mask.sum(-1, keepdim=True)
    if beta := hp.get("beta"):
        w = w - beta * kl_slope(o.kl, b)
    return torch.where(b.mask, w, 0)


def kl_slope(estimator: str, b: Rollouts) -> Tensor:
    """dKL/dlp of each token, 0 on masked slots.

    Args:
        estimator: a key of upref.kl.ESTIMATORS.
        b: the batch.

    Returns:
        [B, T].
    """
    assert b.logp_ref is not None
    x = torch.where(b.mask, b.logp, 0).detach().requires_grad_()
    ref, old = (torch.where(b.mask, lp, 0) for lp in (b.logp_ref, b.logp_old))
    return torch.autograd.grad(kl.per_token(estimator, x, ref, old).sum(), x)[0]


@dataclass
class LossCase:
    """A loss, the objective it is compared with at resolved hyperparameters, and its
    aggregation.
    """

    loss: Loss
    o: Objective
    hp: dict[str, Any]
    agg: str = ""  # a key of FACTORS
    # what the gradient is multiplied by on policy, beside the aggregation
    k: float = 1.0
    fits: bool = True  # some aggregation explains the on-policy gradient
    tol: float = HABIT
    edges: tuple[float, ...] = EDGES
    failed: set[str] = field(default_factory=set)  # oracles
    # of wrong weights, in words, where a known fault gives them on policy too
    cause: Cause = field(default_factory=Cause)
    # the unusual inputs on which it was right, in words
    covered: list[str] = field(default_factory=list)
    # calls that wrote or printed
    done: list[LossOutcome] = field(default_factory=list, repr=False)
    # what is made once for a case and its copies, by what it depends on
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    # ---- the loss --------------------------------------------------------------------
    def both(self, b: Rollouts, ranks: int = 1, **moved: Any) -> tuple[Tensor, Tensor]:
        """(value, dJ/dlp); the outcome of a call that wrote or printed is kept.

        Args:
            b: the batch.
            ranks: the number of data-parallel ranks that the loss is told.
            **moved: hyperparameters with other values.
        """
        outcome, g = self.loss.outcome(b, ranks, **moved)
        if outcome.wrote or outcome.printed:
            self.done.append(outcome)
        return outcome.value, g

    def answer(self, b: Rollouts) -> tuple[Tensor, Tensor]:
        """`both`, asked once by a case and its copies: for a batch that several oracles
        compare with another one.

        Args:
            b: the batch; another object with its numbers is asked again.

        Returns:
            The value and dJ/dlp, to which nobody may write.
        """
        answer: tuple[Tensor, Tensor] = self.once(
            ("answer", id(b)), lambda: (b, self.both(b))
        )[1]
        return answer

    def gradient(self, b: Rollouts, ranks: int = 1, **moved: Any) -> Tensor:
        """Measure the gradient of the user's loss.

        Args:
            b: the batch.
            ranks: the number of data-parallel ranks that the loss is told.
            **moved: hyperparameters with other values.

        Returns:
            dJ/dlp of every token, [B, T].
        """
        return self.both(b, ranks, **moved)[1]

    def weights(self, b: Rollouts) -> Tensor:
        """The loss's own dJ_t/dlp_t, its aggregation divided out.

        Args:
            b: the batch.

        Returns:
            [B, T].
        """
        return self.gradient(b) / self.factors(b)

    def factors(self, b: Rollouts, agg: str = "") -> Tensor:
        """Return what the aggregation multiplies the weights of each response by.

        Args:
            b: the batch.
            agg: a key of FACTORS; "" for the aggregation of the case.

        Returns:
            [B, 1].
        """
        return FACTORS[agg or self.agg](self.loss.visible_batch(b)).to(b.logp.dtype)[
            :, None
        ]

    # ---- the objective ---------------------------------------------------------------
    def expected(self, b: Rollouts) -> Tensor:
        """Return the objective's weights before its aggregation, the KL term included.

        Args:
            b: the batch.

        Returns:
            dJ_t/dlp_t of every token, [B, T].
        """
        return unit_weights(self.o, b, self.hp)

    def off(
        self,
        b: Rollouts,
        found: Tensor | None = None,
        floor: float = 0.1,
        times: float = 1.0,
    ) -> Tensor:
        """Relative difference of the weights, 0 on masked slots, infinite where one is
        not finite; beyond what rounding to float32 explains, where it computes in that.

        Args:
            b: the batch.
            found: the loss's weights, [B, T]; None: they are measured.
            floor: the least divisor.
            times: so many times the rounding of float32 is forgiven.

        Returns:
            [B, T].
        """
        found = self.weights(b) if found is None else found
        expected = self.expected(b)
        # the weight is a difference of two shares of a group, each rounded at its own
        # size
        if "group" in self.o.reads:
            floor = max(floor, expected.abs().max().item())
        apart = relative_error(found, expected, b.adv, floor)
        if self.single and apart.max() > self.tol:
            scale = torch.maximum(expected.abs(), b.adv.abs()).clamp(min=floor)
            apart = (apart - 2 * self.moves(b, expected, times) / scale).clamp(min=0)
        return torch.where(b.mask, apart, 0)

    def moves(self, b: Rollouts, expected: Tensor, times: float = 1.0) -> Tensor:
        """How far the expected weight moves where the log-probabilities are rounded to
        float32, a jump included.

        Args:
            b: the batch.
            expected: the objective's weights, [B, T].
            times: so many times the rounding of float32.

        Returns:
            [B, T].
        """
        d = torch.where(
            b.mask,
            torch.maximum(b.logp.abs(), b.logp_old.abs()).clamp(min=1) * ROUND * times,
            0,
        )
        shares = torch.zeros_like(d)
        ways = [d]
        if "group" in self.o.reads and b.group is not None:
            # the weight is a difference of two shares of a group, which shows only what
            # moves a response beside others
            peers = b.group[:, None] == b.group
            place = peers.tril(-1).sum(1, keepdim=True)
            ways += [d * (1 - 2 * (place // n % 2)) for n in (1, 2)]
            shares = (ROUND * peers.sum(1, keepdim=True)).expand_as(d)

        def apart(x: Rollouts) -> Tensor:
            """How far the expected weights of this batch are from those of b, [B, T]."""
            return (self.expected(x) - expected).abs().nan_to_num(nan=0.0)

        there = [
            x
            for way in ways
            for x in (b.but(logp=b.logp - way), b.but(logp_old=b.logp_old - way))
        ]
        moved = sum(map(apart, there), shares)
        # where π_old is 1, a bound that depends on it is met from below alone
        return torch.maximum(moved, apart(b.but(logp=b.logp + d)))

    def ratio(self, b: Rollouts) -> Tensor:
        """The ratio that the objective acts on, at each token.

        Args:
            b: the batch.

        Returns:
            [B, T].
        """
        x = torch.where(b.mask, b.logp - b.logp_old, 0)
        if reduce := {"sequence_mean": mean_t, "sequence_product": sum_t}.get(
            self.o.level
        ):
            x = reduce(x, b.mask)[:, None].expand_as(x)
        return x.exp()

    @property
    def plain_hp(self) -> dict[str, Any]:
        """The hyperparameters without the coefficient of the KL term.

        Returns:
            The numbers by their names.
        """
        return {k: v for k, v in self.hp.items() if k != "beta"}

    @property
    def wrong(self) -> bool:
        """The weights or their aggregation are wrong: what follows from that is not
        said again.
        """
        return bool(self.failed & {"gradient", "aggregation"})

    @property
    def single(self) -> bool:
        """It computes in float32."""
        return self.tol >= SINGLE

    # ---- batches ---------------------------------------------------------------------
    def grid(self, **options: Any) -> Rollouts:
        """Return the batch that visits every regime of the objective, made once.

        Args:
            **options: of `upref.weights.batches.batch`, such as thin.

        Returns:
            The batch, in the shapes that the loss takes. Do not write to it.
        """
        mus = MU + MU_READ if self.o.reads_mu else MU
        options = self.plain_hp | {"edges": self.edges, "mus": mus} | options
        return self.once(
            ("grid", *options.items()),
            lambda: self.ready(kept_batch(self.per_response, **options)),
        )

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` makes, made once for this key by a case and its copies.

        Args:
            key: what it is kept under.
            make: computes it.
        """
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    @property
    def per_response(self) -> Objective:
        """For the grid alone: one advantage per response where no more is asked."""
        if self.one_adv and self.o.level not in REDUCE:
            return _one_per_response(self.o)
        return self.o

    @property
    def one_adv(self) -> bool:
        """Also where the paper's action is the whole response: RLOO, W-REINFORCE."""
        whole = self.o.agg == "seq-mean-token-sum" and self.o.adv in (
            "leave_one_out",
            "signed",
        )
        return self.o.one_adv or whole or self.loss.adv_shape != "BT"

    def ready(self, b: Rollouts) -> Rollouts:
        """Masked slots hold numbers that could pass for tokens; a reference policy; no
        groups for who takes none.

        Args:
            b: the batch.

        Returns:
            One that the loss can read.
        """
        return self.visible_batch(fill_padding(b))

    def visible_batch(self, b: Rollouts) -> Rollouts:
        """The same of a batch that is ready.

        Args:
            b: the batch.

        Returns:
            The batch without groups where the loss takes none.
        """
        engine = b.logp_sampler
        if self.o.sampler is not None and engine is None:
            engine = sampler(b)
        return self.loss.visible_batch(b.but(logp_sampler=engine))

    def beyond(self, axis: str, ids: tuple[str, ...] = ()) -> Rollouts:
        """The batch of that axis.

        Args:
            axis: a key of upref.weights.stress.AXES.
            ids: how its groups are named.
        """
        return self.visible_batch(stress_batch(axis, self.o, ids=ids, **self.plain_hp))

    def singly(self, b: Rollouts) -> tuple["LossCase", Tensor]:
        """The case as one that computes in float32, and the weights found where the
        inputs are in that.

        Args:
            b: the batch.

        Returns:
            The other case, and [B, T].
        """
        one = replace(self)
        one.in_float32()
        found = one.gradient(b.floats(torch.float32)).double()
        return one, found / one.factors(b)

    def in_float32(self) -> None:
        """From here on it is compared as what computes in float32."""
        self.tol = SINGLE
        self.edges = SINGLE_EDGES

    def rounded(self, b: Rollouts) -> Tensor:
        """Tokens so near to a bound that rounding moves them over it, where the loss
        computes in float32.

        Args:
            b: the batch.

        Returns:
            [B, T].
        """
        return (
            near_a_bound(self.expected, b) if self.single else torch.zeros_like(b.mask)
        )


@lru_cache(64)
def _one_per_response(o: Objective) -> Objective:
    """The objective with one advantage per response: one object, so that its batches
    are found again.
    """
    return replace(o, agg="seq-mean")


def make_case(loss: Loss, o: Objective, hp: dict[str, Any]) -> LossCase:
    """The LossCase of a loss and an objective; its aggregation is that of its on-policy
    gradient, or the declared one.

    Args:
        loss: as read.
        o: the objective.
        hp: resolved hyperparameters.
    """
    case = LossCase(loss, o, hp, declared_aggregation(o))
    b = case.ready(
        replace(
            on_policy_batch(),
            logp_sampler=None if o.sampler is None else on_policy_batch().logp,
        )
    )
    # a KL term, right or wrong, has no gradient there, or one without A
    b = replace(b, logp_ref=b.logp)
    found = without_rest(case, b)
    W = case.expected(b)
    live = b.mask & (W.abs() > 1e-6)
    sides = live & (b.adv > 0), live & (b.adv < 0)
    # then what is wrong is the other sign's
    own = any(_is_own(case, b, found, W, side) for side in sides)
    answers = (
        _explain(case, b, found, W, use) for use in (live, *(() if own else sides))
    )
    answer = next(filter(None, answers), None)
    case.fits = own or answer is not None
    case.agg, case.k = answer or (case.agg, 1.0)
    if is_float32(case, b):
        case.in_float32()
    return case


def without_rest(case: LossCase, b: Rollouts) -> Tensor:
    """The part of the gradient that depends on A.

    Args:
        case: the loss and its objective.
        b: the batch.

    Returns:
        [B, T].
    """
    g = case.gradient(b)
    try:
        rest = case.gradient(replace(b, adv=torch.zeros_like(b.adv)))
    except InputError:  # it refuses A = 0, which is an oracle's finding
        return g
    return g - rest if rest.isfinite().all() and rest.any() else g


def ignores_sampler(case: LossCase) -> bool:
    """Whether the loss can correct for its sampler and the comparison gives it π_old's
    log-probabilities instead. Of a loss that takes the whole batch in one argument, its
    gradient has to depend on the sampler's.

    Args:
        case: the loss and its objective.
    """
    loss = case.loss
    if case.o.sampler is not None or "logp_sampler" not in loss.reads:
        return False
    if not loss.takes_batch:
        return True
    b = case.ready(on_policy_batch())
    near = sampler(b)
    far = (b.logp_old + FAR_SAMPLER * (near - b.logp_old)).clamp(max=-1e-3)
    try:
        g = case.gradient(b)
        return any(
            not torch.equal(case.gradient(b.but(logp_sampler=mu)), g)
            for mu in (near, far)
        )
    except InputError:  # it refuses a sampler that is far away
        return True


def unfed_words(loss: Loss) -> list[str]:
    """Words for what the loss makes of optional arguments that no comparison gives it.

    Args:
        loss: as read.
    """
    return [f"what it makes of {name}, which is left at None" for name in loss.unfed]


def sampler_words(name: str) -> str:
    """Words for what was left out of a comparison with this objective.

    Args:
        name: of the objective.
    """
    with_one = ""
    with contextlib.suppress(InputError):  # it has one already, or the name is none
        with_one = f' ("{get(f"tis({name})").name}" has a correction)'
    return f"what it makes of the sampler's log-probabilities, which are π_old's here{with_one}"


def is_float32(case: LossCase, b: Rollouts) -> bool:
    """Whether gradients carry only the digits of float32, at advantages and ratios that
    have more.

    Args:
        case: the loss and its objective.
        b: a batch in float64.
    """
    i = torch.arange(b.mask.numel(), dtype=b.logp.dtype).reshape(b.mask.shape)
    A = b.adv * (1 + 0.1 * i[:, :1].sin())
    g = case.gradient(replace(b, logp=b.logp - 1e-3 * (1.1 + i.cos()), adv=A))[b.mask]
    return bool((g != 0).any() and torch.equal(g.float().double(), g))


def _is_own(case: LossCase, b: Rollouts, found: Tensor, W: Tensor, use: Tensor) -> bool:
    """Whether these tokens have the objective's own aggregation, without a factor."""
    k = common_value((found / (W * case.factors(b)))[use]) if use.any() else None
    return k is not None and abs(k - 1) < 1e-5


def _explain(
    case: LossCase, b: Rollouts, found: Tensor, W: Tensor, use: Tensor
) -> tuple[str, float] | None:
    if not use.any():
        return None
    scaled = []
    for name in names(declared_aggregation(case.o)):
        k = common_value((found / (W * case.factors(b, name)))[use])
        if k is not None and abs(k - 1) < 1e-5:
            return name, k
        if k is not None:
            scaled.append((name, k))
    return scaled[0] if scaled else None
