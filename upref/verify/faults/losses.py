# SPDX-License-Identifier: Apache-2.0
"""Known faults of losses: what is done otherwise, and the change it makes to the
reference.

`explain` searches the catalogue below for the one that reproduces a wrong loss; the
audit of a framework declares the ones that account for its deviations, and the ledger
names them. One file, because a catalogue is read as one.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor

from upref import kl
from upref.definition import is_clip_width, weighed
from upref.ops import clip, exp, maximum, mean_t, minimum, sg, sum_t, where
from upref.registry import Objective, get
from upref.rollouts import Rollouts
from upref.verify.factors import own_factor
from upref.verify.faults import SIGN_IDS, Fault, hyperparameter_id, known as known_of
from upref.verify.kl_terms import (
    KL_FORMS,
    TERM_OF,
    kl_slope,
    term_of_estimator,
    term_slope,
)
from upref.verify.measure import unit_weights
from upref.weights.batches import USUAL_MU

# what a fault changes
KINDS = (
    "sign",
    "hyperparameter",
    "objective",
    "clip",
    "ratio",
    "advantage",
    "stop-gradient",
    "aggregation",
    "term",
    "rounding",
    "batches",
)
# (lp, lp_old, A, mask), unreduced
Term = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Change:
    """The change that a fault makes to an objective. Most faults set one field.

    Attributes:
        objective: another objective, or its name; None keeps the objective.
        hp: hyperparameters with other values; with another objective, all of them.
        agg: the name of another aggregation.
        J: a function in place of the objective's own.
        view: from the batch to the batch that the faulty loss reads.
        scale: the factor on every weight.
        term: a term that is added to J.
        skip: the tokens so near to a bound that rounding decides; they are not
            compared.
        weigh: the weights themselves, where no other field describes them.
    """

    objective: str | Objective | None = None
    hp: dict[str, Any] = field(default_factory=dict)
    agg: str | None = None
    J: Term | None = None
    view: Callable[[Rollouts], Rollouts] = lambda batch: batch
    scale: Callable[[Rollouts], Tensor | float] = lambda batch: 1.0
    term: Callable[[Rollouts], Tensor] | None = None
    skip: Callable[[Rollouts], Tensor] = lambda batch: torch.zeros_like(batch.mask)
    weigh: Callable[[Rollouts], Tensor] | None = None

    def put_into(
        self, objective: Objective, hp: dict[str, Any]
    ) -> tuple[Objective, dict[str, Any]]:
        """Return the objective and the hyperparameters after this change.

        Args:
            objective: the objective before it.
            hp: its hyperparameters.
        """
        if self.objective is None:
            return objective, hp | self.hp
        if isinstance(self.objective, str):
            return get(self.objective), self.hp
        return self.objective, self.hp

    def weights(
        self, objective: Objective, hp: dict[str, Any], batch: Rollouts
    ) -> Tensor:
        """Return the weights dJ_t/dlp_t of the changed objective, before aggregation.

        `weigh` wins over `J`, and `J` over `objective`, `hp` and `scale`. With `J` the
        objective keeps its KL term and its sampler's correction. `agg`, `term` and `skip`
        have no effect here.

        Args:
            objective: the objective.
            hp: its hyperparameters.
            batch: the batch.

        Returns:
            [B, T], 0 on masked slots.
        """
        batch = self.view(batch)
        if self.weigh is not None:
            return torch.where(batch.mask, self.weigh(batch), 0)
        if self.J is not None:
            w = _weights_of_term(self.J, batch)
            return _with_sampler_and_kl(objective, hp, w, batch)
        other, hp = self.put_into(objective, hp)
        if other is not objective:
            hp = other.resolve(hp)
        return unit_weights(other, batch, hp) * self.scale(batch)


LossFault: TypeAlias = Fault[Change]


def fault(
    words: str,
    kind: str,
    *,
    id: str = "",
    meant: str = "",
    whole: bool = False,
    beside: str = "",
    **change: Any,
) -> LossFault:
    """Make a fault of losses.

    Args:
        words: what is done otherwise than by the reference.
        kind: one of KINDS.
        id: a name that never changes.
        meant: the objective that its author had in mind, where it is another one.
        whole: a few rows of a batch do not show the fault.
        beside: the id of a second fault, which is made together with this one.
        **change: the fields of its Change.
    """
    assert kind in KINDS, kind
    return Fault(
        words,
        Change(**change),
        kind,
        meant=meant,
        whole=whole,
        id=id,
        beside=beside,
    )


def _weights_of_term(J: Term, batch: Rollouts) -> Tensor:
    """Return dJ/dlp of each token, [B, T], 0 on masked slots and where J has no gradient.

    Where J has one number for each response, the derivative is multiplied by the length
    of the response.
    """
    lp = batch.logp.detach().clone().requires_grad_()
    value = J(lp, batch.logp_old, batch.adv.expand_as(lp), batch.mask)
    if not value.requires_grad:
        return torch.zeros_like(lp)
    if value.ndim == 1:
        total = value.sum()
        tokens_per_number: Tensor | int = batch.mask.sum(-1, keepdim=True)
    else:
        total = where(batch.mask, value, 0).sum()
        tokens_per_number = 1
    (gradient,) = torch.autograd.grad(total, lp)
    return torch.where(batch.mask, gradient * tokens_per_number, 0)


def _with_sampler_and_kl(
    objective: Objective, hp: dict[str, Any], w: Tensor, batch: Rollouts
) -> Tensor:
    """Return the weights w, multiplied by the factors of the objective's sampler
    correction, less beta times the slope of its KL term, [B, T].

    w are the weights of a function that replaces the objective's own. Without a
    correction, or without a beta, that step changes nothing.
    """
    factors = objective.factors(batch, **_without_beta(hp))
    if factors is not None:
        w = weighed(w, objective.per_term(factors, batch.mask), batch.mask)
    return w - (hp["beta"] * kl_slope(objective.kl, batch) if hp.get("beta") else 0)


# ---- what an objective has, which a fault may be about -------------------------------
INVERTED_RATIO = "the ratio is inverted: exp(old - new)"
# a loss is -J: its source has the opposite words
MAXIMUM_TAKEN = (
    "the maximum is taken where the minimum belongs (of losses: the minimum where the "
    "maximum belongs)"
)
SIGNS = (1.0, -1.0)  # of A
SIDES = {"below": -1, "above": 1}  # of a ratio of 1
NEAR = 1e-5  # |log r| below the narrowest bound
MODERATE = (-7.0, -1.0, -0.2, 0.2, 1.0, 3.5)  # log r at which the signs of A may differ
# (π_old, log r) beyond every bound, one of |π_θ - π_old| too
FAR = {"below": (0.9, -7.0), "above": (5e-4, 7.0)}
# the most by which rounding in float64 separates what is equal: two weights near r = 1;
# a weight at a ratio of FAR from a multiple of that ratio, relative; three weights at a
# ratio of MODERATE from a line
SAME_WEIGHT = 1e-13
ROUNDING_FAR = 1e-9
ROUNDING_OF_BEND = 1e-12


@dataclass(frozen=True)
class Shape:
    """The shape of an objective's weight as a function of the ratio r. The keys are the
    sign of A, or that sign and the side of r = 1 ("below" or "above").

    Attributes:
        trains: the weight at r = 1 is not 0.
        follows_ratio: near r = 1, on one side at least, the weight is proportional to r.
        ignores_ratio: the weight is the same number at every ratio: the term is A log π.
        bounded: near r = 1 the weight is proportional to r, and far from it it is not:
            a clip, a cap or a mask.
        zero_beyond: near r = 1 the weight is proportional to r, and far from it it is 0.
        depends_on_sign: the two signs of A have different formulas, beyond the factor A
            and a term without A.
        has_constant_weight: for both signs, the weight is proportional to r near r = 1,
            and it is a constant for autograd, a factor on log π_θ.
        value_is_masked: J is 0 far above r = 1.
    """

    trains: dict[float, bool]
    follows_ratio: dict[float, bool]
    ignores_ratio: dict[float, bool]
    bounded: dict[tuple[float, str], bool]
    zero_beyond: dict[tuple[float, str], bool]
    depends_on_sign: bool
    has_constant_weight: bool
    value_is_masked: bool

    @property
    def is_bounded(self) -> bool:
        """Whether a bound acts for some sign of A on some side."""
        return any(self.bounded.values())

    @property
    def survives_bounds(self) -> bool:
        """Whether, as in GPPO, the weight beyond a bound is a number other than 0 on the
        side to which A pushes.
        """
        return (
            self.bounded[1.0, "above"]
            and self.bounded[-1.0, "below"]
            and not self.zero_beyond[1.0, "above"]
            and not self.zero_beyond[-1.0, "below"]
        )

    @property
    def is_pessimistic(self) -> bool:
        """Whether, as in PPO, no gradient is left beyond the bound on the side to which
        A pushes.
        """
        return self.zero_beyond[1.0, "above"] and self.zero_beyond[-1.0, "below"]

    @property
    def has_minimum(self) -> bool:
        """Whether the objective is pessimistic because it takes the minimum of two
        terms, not because of a mask or a constant weight.
        """
        return (
            self.is_pessimistic
            and not self.has_constant_weight
            and not self.value_is_masked
        )

    @property
    def is_smooth(self) -> bool:
        """Whether, in place of a bound, another term or factor stands beside the ratio
        at every ratio.
        """
        return all(self.trains.values()) and not any(
            (*self.follows_ratio.values(), *self.ignores_ratio.values())
        )


def shape_of(objective: Objective, hp: dict[str, Any]) -> Shape:
    """Measure the shape of an objective's weight on single tokens, without its KL term
    and its sampler's correction.

    Args:
        objective: the objective.
        hp: its hyperparameters.
    """
    objective, own_hp = _without_sampler(objective, _without_beta(hp))
    # in the names below: "near" is |log r| = NEAR, "far" is beyond every bound

    def token(A: float, mu: float, log_r: float) -> Rollouts:
        """Make a batch of one token with this advantage, π_old and log r."""
        lp_old = torch.tensor([[mu]], dtype=torch.float64).log()
        ones = torch.ones_like(lp_old)
        return Rollouts(lp_old + log_r, lp_old, A * ones, ones.bool(), entropy=ones)

    def weight(A: float, mu: float, log_r: float) -> float:
        """Return the weight of that token."""
        return unit_weights(objective, token(A, mu, log_r), own_hp).item()

    def bend(log_r: float) -> float:
        """Return the second difference of the weight in A: 0 where it is linear in A."""
        positive = weight(1.0, USUAL_MU, log_r)
        negative = weight(-1.0, USUAL_MU, log_r)
        return positive + negative - 2 * weight(0.0, USUAL_MU, log_r)

    at_1 = {A: weight(A, USUAL_MU, 0.0) for A in SIGNS}
    far: dict[tuple[float, str], float] = {}
    is_proportional_near: dict[tuple[float, str], bool] = {}
    is_equal_everywhere: dict[tuple[float, str], bool] = {}
    for A, (side, direction) in product(SIGNS, SIDES.items()):
        log_r = NEAR * direction
        near = weight(A, USUAL_MU, log_r)
        far[A, side] = weight(A, *FAR[side])
        off_proportional = abs(near - at_1[A] * math.exp(log_r))
        is_proportional_near[A, side] = off_proportional <= SAME_WEIGHT
        off_equal = [abs(near - at_1[A]), abs(far[A, side] - at_1[A])]
        is_equal_everywhere[A, side] = all(off <= SAME_WEIGHT for off in off_equal)

    trains = {A: at_1[A] != 0 for A in SIGNS}
    follows_ratio: dict[float, bool] = {}
    ignores_ratio: dict[float, bool] = {}
    bounded: dict[tuple[float, str], bool] = {}
    for A in SIGNS:
        follows_ratio[A] = trains[A] and any(
            is_proportional_near[A, side] for side in SIDES
        )
        ignores_ratio[A] = trains[A] and all(
            is_equal_everywhere[A, side] for side in SIDES
        )
        for side, (_, log_r) in FAR.items():
            bounded[A, side] = False
            if follows_ratio[A]:
                proportional = at_1[A] * math.exp(log_r)
                off_far = abs(far[A, side] / proportional - 1)
                bounded[A, side] = off_far > ROUNDING_FAR

    far_above = token(1.0, *FAR["above"])
    value_far_above = term_of(objective, own_hp)(
        far_above.logp, far_above.logp_old, far_above.adv, far_above.mask
    )
    return Shape(
        trains=trains,
        follows_ratio=follows_ratio,
        ignores_ratio=ignores_ratio,
        bounded=bounded,
        zero_beyond={key: bounded[key] and far[key] == 0 for key in bounded},
        depends_on_sign=any(abs(bend(log_r)) > ROUNDING_OF_BEND for log_r in MODERATE),
        has_constant_weight=all(follows_ratio.values())
        and _is_linear(objective, own_hp),
        value_is_masked=not value_far_above.any(),
    )


def _without_beta(hp: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters without the coefficient of the KL term."""
    return {name: value for name, value in hp.items() if name != "beta"}


def _without_sampler(
    objective: Objective, hp: dict[str, Any]
) -> tuple[Objective, dict[str, Any]]:
    """Return the objective without its sampler's correction, and the hyperparameters
    that are then left.
    """
    if objective.sampler:
        objective = replace(objective, sampler=None)
    own_hp = {
        name: value for name, value in hp.items() if name in objective.hyperparameters
    }
    return objective, own_hp


def _is_linear(objective: Objective, hp: dict[str, Any]) -> bool:
    """Return whether the gradient of the objective's function is a constant for autograd
    at r = exp(0.1), for A = 1 and A = -1. A function without a gradient counts as one.
    """
    lp = torch.tensor([[-1.0], [-1.0]], dtype=torch.float64).requires_grad_()
    old = lp.detach() - 0.1
    A = torch.tensor([[1.0], [-1.0]])
    mask = torch.ones(2, 1, dtype=torch.bool)
    J = term_of(objective, hp)(lp, old, A, mask).sum()
    if not J.requires_grad:
        return True
    (gradient,) = torch.autograd.grad(J, lp, create_graph=True)
    return not gradient.requires_grad


# ---- faults that need a word only ----------------------------------------------------
def with_hp(**hp: float) -> LossFault:
    """Make the fault of other hyperparameters.

    Args:
        **hp: their values, by name.
    """
    return fault(
        ", ".join(f"{k} = {v:g}" for k, v in hp.items()),
        "hyperparameter",
        id=hyperparameter_id(*hp),
        hp=hp,
    )


def aggregated(name: str) -> LossFault:
    """Make the fault of another aggregation.

    Args:
        name: of the aggregation.
    """
    return fault(
        f"aggregated by {name}", "aggregation", id=f"aggregated-by-{name}", agg=name
    )


# Faults of the sampler's ratio π_old/μ: id, words, and the log μ that makes the
# reference use the wrong ratio.
SAMPLER_FAULTS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    (
        "sampler-ratio-inverted",
        "the sampler's ratio is inverted: μ/π_old",
        lambda batch: 2 * batch.logp_old - batch.logp_sampler,
    ),
    (
        "sampler-ratio-of-current-policy",
        "the sampler's ratio is of π_θ, not of π_old",
        lambda batch: batch.logp_old + batch.logp_sampler - batch.logp,
    ),
    (
        "sampler-ratio-of-update",
        "the sampler's correction reads π_θ/π_old, the ratio of the update, not π_old/μ",
        lambda batch: 2 * batch.logp_old - batch.logp,
    ),
    (
        "sampler-ratio-unused",
        "the sampler's ratio has no effect",
        lambda batch: batch.logp_old,
    ),
)
GROUPS = fault(
    "one denominator for the batch, not one per prompt",
    "aggregation",
    id="one-denominator-per-batch",
    view=lambda batch: batch.but(group=None),
)


# ---- the catalogue -------------------------------------------------------------------
MEASURED_BOUNDS = 2  # of a wrong loss that are tried on either side of r = 1


def known(
    objective: Objective, hp: dict[str, Any], bounds: list[float]
) -> Iterator[LossFault]:
    """Yield every fault of this file that the objective can have, in the order of their
    ranks: those that no bound concerns, then those of each pair of bounds, the
    objective's own first, in the order of FAMILIES.

    Args:
        objective: the objective that the loss should be.
        hp: its hyperparameters.
        bounds: the ratios at which the wrong loss was seen to change. Faults of the clip
            are tried with them too.
    """
    for number, known_fault in enumerate(_faults_without_bounds(objective, hp)):
        yield replace(known_fault, rank=number)
    shape = shape_of(objective, hp)
    for number, (eps_low, eps_high) in enumerate(_pairs_of_bounds(hp, bounds)):
        form = ClippedForm(objective, hp, shape, eps_low, eps_high, tuple(bounds))
        # the first pair is the objective's own
        at_bounds = _words_for_bounds(form) if number else ""
        for family in sorted(FAMILIES, key=lambda family: family.rank):
            if not family.applies(form):
                continue
            rank = RANKS_OF_A_PAIR * (1 + number) + family.rank
            for known_fault in family.faults(form):
                words = known_fault.words + at_bounds
                yield replace(known_fault, words=words, rank=rank)


RANKS_OF_A_PAIR = 1000  # more than any rank of FAMILIES, and than faults without bounds


def _pairs_of_bounds(
    hp: dict[str, Any], bounds: list[float]
) -> list[tuple[float, float]]:
    """Return pairs (eps_low, eps_high), each once: the objective's own first, then all
    combinations with those at which the wrong loss was seen to change, at most
    MEASURED_BOUNDS on either side of r = 1. A missing hyperparameter counts as 0.2, or as
    that of the other side.

    Args:
        hp: hyperparameters of the objective.
        bounds: the ratios at which the wrong loss was seen to change. One of 10 or more
            is left out.
    """
    own_low = hp.get("eps_low", hp.get("eps", 0.2))
    own_high = hp.get("eps_high", hp.get("eps", hp.get("eps_low", 0.2)))
    measured_low = [1 - x for x in bounds if 0 < x < 1][:MEASURED_BOUNDS]
    measured_high = [x - 1 for x in bounds if 1 < x < 10][:MEASURED_BOUNDS]
    pairs = product([own_low, *measured_low], [own_high, *measured_high])
    return list(dict.fromkeys(pairs))


def _words_for_bounds(form: "ClippedForm") -> str:
    """Return what is added to the words of a fault that is tried at bounds that are not
    the objective's own, such as " (with bounds 0.9 and 1.1, not 0.8 and 1.28)".
    """
    hp = form.hp
    (own_low, own_high), *_ = _pairs_of_bounds(hp, [])
    not_own = ""
    # an objective of one bound, as UP is, has no pair of bounds that the loss misses
    has_pair = "eps" in hp or {"eps_low", "eps_high"} <= hp.keys()
    if form.shape.is_bounded and has_pair:
        # a bound below 0 is none
        own_bounds = [f"{x:g}" for x in (1 - own_low, 1 + own_high) if x > 0]
        not_own = f", not {' and '.join(own_bounds)}"
    return f" (with bounds {form.lower:g} and {form.upper:g}{not_own})"


def _faults_without_bounds(
    objective: Objective, hp: dict[str, Any]
) -> Iterator[LossFault]:
    """Yield the faults that no bound on the ratio concerns: the sign, the KL term, the
    sampler's ratio, the ratio to another policy.

    Args:
        objective: the objective that the loss should be.
        hp: its hyperparameters.
    """
    j = term_of(objective, hp)
    ascends = "it ascends the loss"
    beside_kl = "the KL term apart, " if hp.get("beta") else ""
    yield fault(
        f"{beside_kl}the sign is flipped: {ascends}",
        "sign",
        id="sign-flipped",
        J=lambda lp, old, A, m: -j(lp, old, A, m),
    )
    if hp.get("beta"):
        yield fault(
            f"the sign of the whole loss is flipped, of the KL term too: {ascends}",
            "sign",
            id="sign-flipped",
            scale=lambda batch: -1.0,
        )
        yield from kl_faults(objective, hp)
    for fault_id, words, wrong_log_mu in SAMPLER_FAULTS if objective.sampler else ():
        yield fault(
            words,
            "ratio",
            id=fault_id,
            view=partial(_with_sampler, log_mu=wrong_log_mu),
        )
    yield fault(
        "the ratio is to π_ref, not to π_old",
        "ratio",
        id="ratio-to-reference",
        view=lambda batch: (
            batch if batch.logp_ref is None else batch.but(logp_old=batch.logp_ref)
        ),
    )
    if hp.get("beta"):
        yield fault(
            "the ratio is π_ref/π_θ, as in the KL term, not π_θ/π_old",
            "ratio",
            id="ratio-of-reference",
            weigh=partial(_weights_at_ratio_of_reference, objective, hp),
        )
    if objective.level == "custom" and (
        unbounded := {k: UNBOUNDED for k in hp if is_clip_width(k)}
    ):
        yield fault(NO_BOUND, "clip", id="no-bound", hp=unbounded)


def _weights_at_ratio_of_reference(
    objective: Objective, hp: dict[str, Any], batch: Rollouts
) -> Tensor:
    """Return the weights, the KL term included, where the objective's ratio is
    π_ref/π_θ, [B, T]. It falls with π_θ: the slope of the term has the opposite sign.
    """
    own_hp = _without_beta(hp) | {"beta": 0.0}
    of_reference = batch.but(logp=batch.logp_ref, logp_old=batch.logp)
    of_term = -unit_weights(objective, of_reference, own_hp)
    return of_term - hp["beta"] * kl_slope(objective.kl, batch)


def _with_sampler(batch: Rollouts, log_mu: Callable[[Rollouts], Tensor]) -> Rollouts:
    """Return the batch with log μ from this function of it."""
    return batch.but(logp_sampler=log_mu(batch))


OTHER_KL = "another estimator, or a part of it is detached"


def words_for_other_kl(objective: Objective, beta: float, name: str) -> str:
    """Return the words for a KL term that the objective does not have, or not with this
    estimator or this sign.

    Args:
        objective: the objective.
        beta: the coefficient that was found; above 0 the term is subtracted from J.
        name: the name of the term that was found, of KL_TERMS.
    """
    if name == TERM_OF.get(objective.kl) and beta < 0:
        return f"the KL term is added to J, not subtracted: {abs(beta):.7g} {name}"
    if beta > 0:
        verb = "subtracted"
        bonus = "an entropy bonus"
    else:
        verb = "added to J"
        bonus = "a bonus on the likelihood"
    if objective.kl:
        whose = f"is not {objective.name}'s {objective.kl}"
    else:
        whose = f"{objective.name} does not have"
    words = f"a KL term is {verb} that {whose}: {abs(beta):.7g} {name}"
    if name == "k1":
        return f"{words}, to any policy; {bonus} of the sampled tokens has this gradient too"
    return words


KL_MISSING = fault(
    "the KL term is missing, or carries no gradient",
    "term",
    id="kl-missing",
    hp={"beta": 0.0},
)


def kl_added(beta: float) -> LossFault:
    """Make the fault that the KL term, of this coefficient, has the other sign.

    Args:
        beta: the coefficient of the KL term.
    """
    words = "the KL term is added to J, not subtracted"
    return fault(words, "term", id="kl-added", hp={"beta": -beta})


def kl_faults(objective: Objective, hp: dict[str, Any]) -> Iterator[LossFault]:
    """Yield the faults of the KL term. Each keeps the objective's other weights.

    For each estimator, the objective's own first: it is another one, has another form, or
    is folded into the advantage. Then a known fault of an estimator, a clamp, one number
    for each response, and a term for some A alone.

    Args:
        objective: an objective with a KL term.
        hp: its hyperparameters; beta is not 0.
    """
    beta = hp["beta"]
    hp_without_kl = {**hp, "beta": 0.0}

    def weights_without_kl(batch: Rollouts) -> Tensor:
        """Return the weights of the objective without its KL term."""
        return unit_weights(objective, batch, hp_without_kl)

    def other_term(words: str, f: str | Callable[..., Tensor], id: str) -> LossFault:
        """Make the fault that f is the KL term."""
        return fault(
            words,
            "term",
            id=id,
            weigh=lambda batch: weights_without_kl(batch) - beta * term_slope(f, batch),
        )

    def weights_with_kl_where(
        batch: Rollouts, selects: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the weights with the KL term only on the tokens that `selects` chooses
        by their A.
        """
        selected = selects(torch.where(batch.mask, batch.adv, 0))
        kl_weights = beta * kl_slope(objective.kl, batch) * selected
        return weights_without_kl(batch) - kl_weights

    def clamped_term(
        lp: Tensor, ref: Tensor, old: Tensor, mu: Tensor, limit: float
    ) -> Tensor:
        """Return the objective's KL term, clamped to ±limit."""
        return kl.per_token(objective.kl, lp, ref, old).clamp(-limit, limit)

    def term_of_clamped_log_ratio(
        lp: Tensor, ref: Tensor, old: Tensor, mu: Tensor, limit: float
    ) -> Tensor:
        """Return the objective's KL term at log π_θ / π_ref, clamped to ±limit."""
        nearer_ref = lp - (lp - ref).clamp(-limit, limit)
        return kl.per_token(objective.kl, lp, nearer_ref, old)

    own_first = sorted(kl.ESTIMATORS.items(), key=lambda item: item[0] != objective.kl)
    for name, k in own_first:
        if name != objective.kl:
            yield other_term(
                f"the KL term has the gradient of {name}, not of {objective.kl}: {OTHER_KL}",
                name,
                id=f"kl-gradient-of-{name}",
            )
        for form in KL_FORMS:
            words = form.own_words.format(name)
            yield other_term(words, form.make(k), id=form.id)
        if objective.level == "token":
            yield from _kl_in_advantage_faults(objective, hp, name)
    for kl_fault in known_of("kl"):
        yield other_term(
            f"the KL term: {kl_fault.words}",
            term_of_estimator(kl_fault.change),
            id=kl_fault.id,
        )
    for limit in CLAMPED:
        yield other_term(
            f"the KL term is clamped at {limit:g}, or left out beyond it",
            partial(clamped_term, limit=limit),
            id="kl-clamped",
        )
        yield other_term(
            f"the KL term's log-ratio is clamped to ±{limit:g}, or the term is left out beyond it",
            partial(term_of_clamped_log_ratio, limit=limit),
            id="kl-log-ratio-clamped",
        )
    yield from _kl_of_response_faults(objective, hp)
    for condition, selects in (
        ("A > 0", lambda A: A > 0),
        ("A <= 0", lambda A: A <= 0),
        ("A < 0", lambda A: A < 0),
        ("A is not 0", lambda A: A != 0),
    ):
        yield fault(
            f"the KL term is there only where {condition}",
            "term",
            id=f"kl-only-where-{SIGN_IDS[condition]}",
            weigh=partial(weights_with_kl_where, selects=selects),
        )
    yield fault(
        "the KL term is left out of responses of which every A is 0",
        "term",
        id="kl-only-where-a-not-zero",
        weigh=partial(
            weights_with_kl_where, selects=lambda A: (A != 0).any(1, keepdim=True)
        ),
    )


def _kl_of_response_faults(
    objective: Objective, hp: dict[str, Any]
) -> Iterator[LossFault]:
    """Yield the faults that the KL term is one number for each response, of its summed or
    averaged log-probabilities.
    """

    def weights(batch: Rollouts, k: Callable[..., Any], of_response: Any) -> Tensor:
        """Return the weights with the mean of these numbers as the KL term."""
        lp = batch.logp.detach().clone().requires_grad_()
        ref = batch.logp_old if batch.logp_ref is None else batch.logp_ref
        term = k(of_response(lp, batch.mask), of_response(ref, batch.mask)).mean()
        (slope,) = torch.autograd.grad(term, lp)
        rest = unit_weights(objective, batch, {**hp, "beta": 0.0})
        return rest - hp["beta"] * slope / own_factor(objective)(batch)[:, None]

    inverted = {"k3 the other way round": lambda lp, ref: kl.k3(ref, lp)}
    estimators: dict[str, Callable[..., Any]] = kl.ESTIMATORS | inverted
    for (name, k), (how, of_response) in product(
        estimators.items(), (("summed", sum_t), ("averaged", mean_t))
    ):
        yield fault(
            f"the KL term is {name} of the response's {how} log-probabilities, not of each token's",
            "term",
            id="kl-of-response",
            weigh=partial(weights, k=k, of_response=of_response),
        )


def _kl_in_advantage_faults(
    objective: Objective, hp: dict[str, Any], name: str
) -> Iterator[LossFault]:
    """Yield the two faults that the KL term, by the estimator of this name, is
    subtracted from the advantage: the KL of π_θ, and that of π_old.
    """
    estimator = kl.ESTIMATORS[name]
    beta = hp["beta"]
    hp_without_kl = {**hp, "beta": 0.0}
    without_sampler, own_hp = _without_sampler(objective, _without_beta(hp))

    def weights_with_penalty(batch: Rollouts, of_old_policy: bool) -> Tensor:
        """Return the weights where beta times the KL is subtracted from A."""
        policy = batch.but(logp=batch.logp_old) if of_old_policy else batch
        penalty = beta * sg(_kl_per_token(estimator, policy, batch.mask))
        w = _weights_of_term(
            lambda lp, old, A, m: without_sampler.fn(lp, old, A - penalty, **own_hp),
            batch,
        )
        return _with_sampler_and_kl(objective, hp_without_kl, w, batch)

    for fault_id, whose, of_old_policy in (
        ("kl-in-advantage", "", False),
        ("kl-of-old-policy-in-advantage", " of the old policy", True),
    ):
        yield fault(
            f"the KL term ({name}){whose} is folded into the advantage, without a gradient of its own",
            "term",
            id=fault_id,
            weigh=partial(weights_with_penalty, of_old_policy=of_old_policy),
        )


def _kl_per_token(
    estimator: Callable[..., Any], batch: Rollouts, mask: Tensor
) -> Tensor:
    """Return the KL of π_θ and π_ref on each token, that of equal policies on masked
    slots.
    """
    assert batch.logp_ref is not None
    lp = torch.where(mask, batch.logp, 0)
    lp_ref = torch.where(mask, batch.logp_ref, 0)
    return estimator(lp, lp_ref)


# a distance from a ratio of 1, or of its logarithm from 0, that none has
UNBOUNDED = 1e6
NO_BOUND = (
    "no bound has an effect on the gradient: it is as if the ratio were not clipped"
)
DROPPED = {
    "A < 0": "negative-advantages-dropped",
    "A > 0": "positive-advantages-dropped",
}
# ids of faults
LONGEST = "log-ratio-over-longest-response"
MEAN_LENGTH = "log-ratio-over-mean-length"
CLAMPED = (10.0, 5.0, 20.0, 1.0, 0.1)  # where KL terms are clamped
CAPS = (math.inf, 1.0, 2.0, 3.0, 5.0, 10.0)  # of importance weights, as people set them
# the log-ratio of a response from those of its tokens, by the level of the objective
LOG_RATIO_OF_RESPONSE: dict[str, Callable[..., Tensor]] = {
    "sequence_mean": mean_t,
    "sequence_product": sum_t,
}


def clamp_faults(
    objective: Objective, hp: dict[str, Any], low: float, high: float, interval: str
) -> Iterator[LossFault]:
    """Yield the faults that clamp log r to [low, high], first that of the response, if
    the objective has a ratio of responses, then that of each token. Each has three
    forms:

    * everywhere: beyond the interval no gradient is left;
    * where A <= 0 alone;
    * in a constant weight: r is clamped, and the gradient stays.

    Args:
        objective: the objective.
        hp: its hyperparameters.
        low: the lower end of the interval.
        high: the upper end.
        interval: the words for the interval.
    """
    j = term_of(objective, hp)

    def clamp_response(lp: Tensor, old: Tensor, m: Tensor) -> Tensor:
        """Return log π_θ, shifted such that the response's log-ratio is clamped."""
        log_r = LOG_RATIO_OF_RESPONSE[objective.level](where(m, lp - old, 0), m)
        shift = (log_r.clamp(low, high) - log_r)[:, None]
        if objective.level == "sequence_product":  # all tokens share the shift
            shift = shift / m.sum(-1, keepdim=True)
        return lp + shift

    def clamp_token(lp: Tensor, old: Tensor, m: Tensor) -> Tensor:
        """Return log π_θ, moved such that each token's log-ratio is clamped."""
        return old + (lp - old).clamp(low, high)

    def J_clamped(
        lp: Tensor, old: Tensor, A: Tensor, m: Tensor, clamp: Callable[..., Tensor]
    ) -> Tensor:
        """Return J of the clamped log-ratio."""
        return j(clamp(lp, old, m), old, A, m)

    def J_clamped_where_not_positive(
        lp: Tensor, old: Tensor, A: Tensor, m: Tensor, clamp: Callable[..., Tensor]
    ) -> Tensor:
        """Return J of the clamped log-ratio where A <= 0, and J elsewhere."""
        return where(A > 0, j(lp, old, A, m), j(clamp(lp, old, m), old, A, m))

    def with_clamped_ratio(batch: Rollouts, clamp: Callable[..., Tensor]) -> Rollouts:
        """Return the batch with lp_old moved such that log r is the clamped one."""
        clamped_lp = clamp(batch.logp, batch.logp_old, batch.mask)
        return batch.but(logp_old=batch.logp_old + batch.logp - clamped_lp)

    clamps = [("log-ratio-clamped", "log r", clamp_token)]
    if objective.level in LOG_RATIO_OF_RESPONSE:
        of_response = f"the response's log {objective.ratio_symbol}"
        clamps.insert(0, ("response-log-ratio-clamped", of_response, clamp_response))
    for fault_id, what, clamp in clamps:
        words = f"{what} is clamped {interval}"
        yield fault(words, kind="clip", id=fault_id, J=partial(J_clamped, clamp=clamp))
        yield fault(
            f"{words} where A <= 0",
            kind="clip",
            id=f"{fault_id}-where-a-negative",
            J=partial(J_clamped_where_not_positive, clamp=clamp),
        )
        yield fault(
            f"{words} in a constant weight",
            kind="clip",
            id=f"{fault_id}-in-constant",
            view=partial(with_clamped_ratio, clamp=clamp),
        )


def ratio_power_faults(
    objective: Objective, hp: dict[str, Any], k: float
) -> Iterator[LossFault]:
    """Yield the fault that the ratio is taken to the power k.

    Nothing is yielded if k is 1 to 1e-5, or if on neither side a bound takes the
    objective's gradient away: then k may as well be a factor on the loss.

    Args:
        objective: the objective.
        hp: its hyperparameters.
        k: the factor on the weights that was found at r = 1.
    """
    if abs(k - 1) <= 1e-5:
        return
    ends = [_trains_at_ends(objective, hp, side) for side in ("lower", "upper")]
    if any(at_1 != beyond_bound for at_1, beyond_bound in ends):
        j = term_of(objective, hp)
        yield fault(
            f"the ratio is taken to the power {k:.5g}: every log-ratio is multiplied by it",
            "ratio",
            id="ratio-to-a-power",
            J=lambda lp, old, A, m: j(old + k * (lp - old), old, A, m),
        )


def term_of(objective: Objective, hp: dict[str, Any]) -> Term:
    """Return the objective's function, without the KL term and the sampler's correction.

    Args:
        objective: the objective.
        hp: its hyperparameters.

    Returns:
        A function (lp, lp_old, A, mask) -> J of each token or response.
    """
    objective, own_hp = _without_sampler(objective, _without_beta(hp))
    return lambda lp, old, A, m: objective.unreduced(
        lp, old, A, m, torch.ones_like(lp), **own_hp
    )


def _trains_at_ends(
    objective: Objective, hp: dict[str, Any], side: str
) -> tuple[bool, bool]:
    """Return whether the objective's term has a gradient at r = 1, and whether it has
    one far beyond the bound on this side, "lower" (with A < 0) or "upper" (with A > 0).
    """
    likely, rare = -0.01, -21.0  # log-probabilities: r is exp(-21) or exp(21) beyond
    lp = torch.tensor([[likely], [rare if side == "lower" else likely]])
    old = torch.tensor([[likely], [likely if side == "lower" else rare]])
    A = torch.full_like(lp, -1.0 if side == "lower" else 1.0)
    all_tokens = torch.ones_like(lp, dtype=torch.bool)
    batch = Rollouts(lp, old, A, all_tokens)
    w = _weights_of_term(term_of(objective, hp), batch)
    at_1, beyond_bound = (w != 0).flatten().tolist()
    return at_1, beyond_bound


def by_token(x: Tensor, lp: Tensor) -> Tensor:
    """Return x, with the gradient of each token's own log-probability, as GSPO-token
    has it.

    Args:
        x: a value for each response or token, broadcast to lp.
        lp: log-probabilities, [B, T].

    Returns:
        The numbers of x, [B, T].
    """
    return sg(x) + lp - sg(lp)


# ---- faults of the ratio and the clip ------------------------------------------------
def is_positive(A: Tensor) -> Tensor:
    """Return where A > 0."""
    return A > 0


def is_negative(A: Tensor) -> Tensor:
    """Return where A < 0."""
    return A < 0


BY_SIGN = (("A > 0", is_positive), ("A < 0", is_negative))


@dataclass(frozen=True)
class ClippedForm:
    """An objective with one pair of bounds on its ratio, and the parts from which the
    faults of its ratio and its clip are built. The ratio is the objective's own: that
    of a token or that of a response.

    Attributes:
        objective: the objective.
        hp: its hyperparameters.
        shape: the shape of its weight.
        eps_low: the lower bound is 1 - eps_low.
        eps_high: the upper bound is 1 + eps_high.
        bounds: the ratios at which the wrong loss was seen to change.
    """

    objective: Objective
    hp: dict[str, Any]
    shape: Shape
    eps_low: float
    eps_high: float
    bounds: tuple[float, ...] = ()

    @property
    def lower(self) -> float:
        """The lower bound on the ratio."""
        return 1 - self.eps_low

    @property
    def upper(self) -> float:
        """The upper bound on the ratio."""
        return 1 + self.eps_high

    @property
    def has_ratio_of_response(self) -> bool:
        """Whether all tokens of a response share one ratio."""
        return self.objective.level in LOG_RATIO_OF_RESPONSE

    @property
    def weighs_log_prob(self) -> bool:
        """Whether the objective is a bounded constant weight on log π_θ, as CISPO is."""
        return self.shape.has_constant_weight and self.shape.is_bounded

    def own_term(self) -> Term:
        """Return the objective's own function."""
        return term_of(self.objective, self.hp)

    def log_ratio(self, lp: Tensor, old: Tensor, m: Tensor) -> Tensor:
        """Return log r of each token, [B, T]; all tokens of a response have the
        response's where the objective has a ratio of responses.
        """
        log_r = where(m, lp - old, 0)
        if self.has_ratio_of_response:
            of_response = LOG_RATIO_OF_RESPONSE[self.objective.level](log_r, m)
            return of_response[:, None].expand_as(log_r)
        return log_r

    def ratio(self, lp: Tensor, old: Tensor, m: Tensor) -> Tensor:
        """Return r of each token, [B, T], as `log_ratio` defines it."""
        return exp(self.log_ratio(lp, old, m))

    def clip(self, r: Tensor) -> Tensor:
        """Return r, clipped to the two bounds."""
        return clip(r, self.lower, self.upper)

    def cap(self, r: Tensor) -> Tensor:
        """Return r, at most the upper bound."""
        return r.clamp(max=self.upper)

    def caps(self) -> tuple[tuple[str, Callable[[Tensor], Tensor]], ...]:
        """Return the two ways to bound a weight, each after the word for it: "clipped"
        with `clip`, "truncated" with `cap`.
        """
        return ("clipped", self.clip), ("truncated", self.cap)

    def ppo(self, r: Tensor, A: Tensor) -> Tensor:
        """Return PPO's term at this ratio: the minimum of r A and clip(r) A."""
        return minimum(r * A, self.clip(r) * A)

    def term(self, formula: Callable[..., Any]) -> Term:
        """Return a Term, which takes (lp, lp_old, A, mask), from a function of (r, A,
        log π_θ).
        """
        return lambda lp, old, A, m: formula(self.ratio(lp, old, m), A, lp)


def _log_prob_where_negative_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the fault that A log π_θ is the term for both signs of A."""
    yield fault(
        "log π_θ replaces the ratio where A <= 0 too",
        kind="ratio",
        id="log-prob-where-a-negative",
        J=form.term(lambda r, A, lp: A * lp),
    )


def _ratio_always_one_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the fault that the old log-probabilities have no effect."""
    yield fault(
        "old_log_prob has no effect: every weight is as where the ratio is 1",
        kind="ratio",
        id="ratio-always-one",
        J=lambda lp, old, A, m: A * lp,
    )


def _dual_clip_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the fault that the dual clip takes the wrong one of its two terms."""
    c = form.hp["c"]

    def other_term(r: Tensor, A: Tensor, lp: Tensor) -> Tensor:
        """Return min(J, c A) where A < 0, and J elsewhere."""
        return where(A < 0, minimum(form.ppo(r, A), c * A), form.ppo(r, A))

    yield fault(
        "the dual clip takes the other one of its two terms: min(J, c A) where A < 0",
        kind="clip",
        id="other-term-of-dual-clip",
        J=form.term(other_term),
    )


def _ppo_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the fault that the clip is PPO's."""
    if form.shape.is_bounded:
        words = "the clip is that of PPO on both sides"
    else:
        ratio = form.objective.ratio_symbol
        clipped = f"min({ratio} A, clip({ratio}, {form.lower:g}, {form.upper:g}) A)"
        words = f"the term is PPO's, {clipped}: {form.objective.name} has no clip"
    yield fault(
        words,
        kind="clip",
        id="ppo-clip",
        J=form.term(lambda r, A, lp: form.ppo(r, A)),
    )


def _early_factor_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the fault that the factor lam on positive advantages multiplies the ratio,
    so that the clip acts on the product.
    """
    ratio = form.objective.ratio_symbol
    lam = form.hp["lam"]
    yield fault(
        f"lam multiplies the ratio before the clip where A > 0: the bounds act on lam {ratio}, "
        f"so that {ratio} is clipped at {form.upper / lam:.6g}, not at {form.upper:g}",
        kind="clip",
        id="factor-before-clip",
        J=form.term(lambda r, A, lp: form.ppo(where(A > 0, lam * r, r), A)),
    )


def _drifted_response_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the fault that off-policy sequence masking masks nothing."""
    yield fault(
        "no response with A < 0 is masked, however far it has drifted: opsm_delta has no effect",
        kind="clip",
        id="drifted-responses-kept",
        J=term_of(form.objective, {**form.hp, "opsm_delta": math.inf}),
    )


def _detached_term_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the fault that the objective's term is a constant."""
    j = form.own_term()
    yield fault(
        "the whole term is detached: a constant weight on log π_θ",
        kind="stop-gradient",
        id="term-detached",
        J=lambda lp, old, A, m: sg(j(lp, old, A, m)) * lp,
    )


def _missing_ratio_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the fault that the weight inside the bounds has no ratio."""

    def masked(r: Tensor, A: Tensor, lp: Tensor) -> Tensor:
        """Return A log π_θ, or 0 beyond the bound on the side to which A pushes."""
        return A * lp * where(A > 0, r <= form.upper, r >= form.lower)

    yield fault(
        "the ratio is missing from the weight: 1 in its place inside the bounds",
        kind="ratio",
        id="ratio-missing-inside-bounds",
        J=form.term(masked),
    )


def _exponential_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the fault that UP's exponential has no anchor."""
    j = form.own_term()
    yield fault(
        "stop-gradient: exp(log π_θ) without an anchor",
        kind="stop-gradient",
        id="exponential-without-anchor",
        J=lambda lp, old, A, m: where(A > 0, A * exp(lp), j(lp, old, A, m)),
    )


def _capped_weight_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the faults of a cap on a constant weight, as CISPO has it."""

    def capped_ratio_times_A(
        r: Tensor, A: Tensor, lp: Tensor, cap: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return cap(r) A, with the gradient of the ratio."""
        return cap(r) * A

    def capped_for_one_sign(
        r: Tensor,
        A: Tensor,
        lp: Tensor,
        cap: Callable[[Tensor], Tensor],
        has_sign: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return A log π_θ with the constant weight r, capped where A has the sign."""
        return sg(where(has_sign(A), cap(r), r)) * A * lp

    for participle, cap in form.caps():
        yield fault(
            f"beyond the cap no gradient is left: the {participle} ratio multiplies A itself, or it masks log π",
            kind="stop-gradient",
            id=f"{participle}-ratio-times-advantage",
            J=form.term(partial(capped_ratio_times_A, cap=cap)),
        )
        for sign, has_sign in BY_SIGN:
            yield fault(
                f"the weight is {participle} only where {sign}",
                kind="clip",
                id=f"{participle}-only-where-{SIGN_IDS[sign]}",
                J=form.term(partial(capped_for_one_sign, cap=cap, has_sign=has_sign)),
            )


def _lone_term_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the faults of a smooth objective. It has a penalty or a gate beside a term
    in the ratio or in log π_θ: the penalty is missing, or its sign is flipped.
    """
    objective = form.objective
    ratio = objective.ratio_symbol
    hp = form.hp
    hp_without_kl = _without_beta(hp)

    def weights_with_rest_negated(batch: Rollouts, J: Term) -> Tensor:
        """Return the weights of J, less what the objective has beside J."""
        w = _weights_of_term(J, batch)
        of_term = _with_sampler_and_kl(objective, hp_without_kl, w, batch)
        of_objective = unit_weights(objective, batch, hp_without_kl)
        return _with_sampler_and_kl(
            replace(objective, sampler=None), hp, 2 * of_term - of_objective, batch
        )

    for fault_id, term, J in (
        ("ratio-term-alone", f"{ratio} A", form.term(lambda r, A, lp: r * A)),
        ("log-prob-term-alone", "A log π_θ", form.term(lambda r, A, lp: A * lp)),
    ):
        yield fault(
            f"the term is {term} alone: what else {objective.name} has is missing",
            kind="objective",
            id=fault_id,
            J=J,
        )
        yield fault(
            f"what {objective.name} has beside {term} has the opposite sign",
            kind="objective",
            id=f"all-but-{fault_id}-negated",
            weigh=partial(weights_with_rest_negated, J=J),
        )


def _other_sign_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the fault that an objective with a term for one sign of A alone has that
    term for the other sign too. Nothing is yielded for an objective that trains both
    signs, or one with one term per response (seq-mean).
    """
    objective = form.objective
    j = form.own_term()

    def negated_where(
        lp: Tensor,
        old: Tensor,
        A: Tensor,
        m: Tensor,
        has_sign: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the term of -A with the opposite sign where A has the sign, and the
        objective's own elsewhere.
        """
        return where(has_sign(A), -j(lp, old, -A, m), j(lp, old, A, m))

    for A_0, sign, has_sign in (
        (1.0, "A > 0", is_positive),
        (-1.0, "A < 0", is_negative),
    ):
        is_one_sided = not form.shape.trains[A_0] and form.shape.trains[-A_0]
        if is_one_sided and objective.agg != "seq-mean":
            yield fault(
                f"where {sign} there is the term of the other sign of A, though {objective.name} has none there",
                kind="clip",
                id=f"term-of-other-sign-where-{SIGN_IDS[sign]}",
                J=partial(negated_where, has_sign=has_sign),
            )


def _minimum_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the faults of the minimum of r A and clip(r) A: it is missing or a maximum, one
    of its terms is detached, or the clip acts on something else.
    """
    ratio = form.objective.ratio_symbol

    def maximum_of_two(r: Tensor, A: Tensor, lp: Tensor) -> Tensor:
        """Return the maximum of the two terms."""
        return maximum(r * A, form.clip(r) * A)

    def maximum_for_one_sign(
        r: Tensor, A: Tensor, lp: Tensor, has_sign: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the maximum where A has the sign, and the minimum elsewhere."""
        return where(has_sign(A), maximum_of_two(r, A, lp), form.ppo(r, A))

    def clipped_detached(r: Tensor, A: Tensor, lp: Tensor) -> Tensor:
        """Return the minimum, where the clipped term has no gradient."""
        return minimum(r * A, sg(form.clip(r) * A))

    def unclipped_detached(r: Tensor, A: Tensor, lp: Tensor) -> Tensor:
        """Return the minimum, where the unclipped term has no gradient."""
        return minimum(sg(r * A), form.clip(r) * A)

    def bounds_on_product(lp: Tensor, old: Tensor, A: Tensor, m: Tensor) -> Tensor:
        """Return the geometric mean of the ratios times A, and 0 where their product
        leaves the bounds.
        """
        product = exp(sum_t(where(m, lp - old, 0), m))[:, None].expand_as(A)
        is_beyond = (A > 0) & (product > form.upper) | (A < 0) & (product < form.lower)
        return where(is_beyond, 0, form.ratio(lp, old, m) * A)

    yield fault(
        "the ratio is clipped on both sides, whatever the sign of A: the minimum is missing",
        kind="clip",
        id="minimum-missing",
        J=form.term(lambda r, A, lp: form.clip(r) * A),
    )
    yield fault(
        f"{ratio} A is clamped to [(1 - eps_low) A, (1 + eps_high) A], which is empty where A < 0: "
        "no gradient is left there",
        kind="clip",
        id="product-clamped-between-products",
        J=form.term(lambda r, A, lp: where(A > 0, form.clip(r) * A, 0 * r)),
    )
    yield fault(
        f"the clip acts on the product {ratio} A, not on {ratio}: its bounds move with "
        "the size of A",
        kind="clip",
        id="product-clipped",
        J=form.term(lambda r, A, lp: minimum(r * A, form.clip(r * A))),
    )
    yield fault(
        MAXIMUM_TAKEN,
        kind="clip",
        id="maximum-for-minimum",
        J=form.term(maximum_of_two),
    )
    halves = "where the two are equal, half of the gradient is lost"
    yield fault(
        f"the clipped term of the minimum is detached: {halves}",
        kind="clip",
        id="clipped-term-detached",
        J=form.term(clipped_detached),
    )
    yield fault(
        f"the unclipped term of the minimum is detached: {halves}, and all of it elsewhere",
        kind="clip",
        id="unclipped-term-detached",
        J=form.term(unclipped_detached),
    )
    if form.objective.level == "sequence_mean":
        yield fault(
            "the bounds act on the product of the response's ratios, not on their mean",
            kind="clip",
            id="bounds-on-product-of-ratios",
            J=bounds_on_product,
        )
    for sign, has_sign in BY_SIGN:
        yield fault(
            f"where {sign} {MAXIMUM_TAKEN}",
            kind="clip",
            id=f"maximum-for-minimum-where-{SIGN_IDS[sign]}",
            J=form.term(partial(maximum_for_one_sign, has_sign=has_sign)),
        )
    yield fault(
        f"A multiplies after the minimum: min({ratio}, clip({ratio})) A, which bounds "
        "the wrong side where A < 0",
        kind="clip",
        id="advantage-after-minimum",
        J=form.term(lambda r, A, lp: minimum(r, form.clip(r)) * A),
    )


def _unbounded_positive_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the faults of an objective like UP: A log π_θ where A > 0, a ratio where
    A < 0.
    """

    def lower_clipped(r: Tensor, A: Tensor) -> Tensor:
        """Return the term of A < 0: its ratio has the lower bound alone."""
        return minimum(r * A, r.clamp(min=form.lower) * A)

    bounded = form.shape.bounded
    if bounded[-1.0, "below"] or bounded[-1.0, "above"]:
        if bounded[-1.0, "below"]:
            fault_id = "no-lower-clip"
            what = "the clip has no lower side"
        else:
            fault_id = "no-upper-bound-where-a-negative"
            what = "the ratio has no upper bound"
        yield fault(
            f"{what} where A <= 0",
            kind="clip",
            id=fault_id,
            J=form.term(lambda r, A, lp: where(A > 0, A * lp, r * A)),
        )
    yield fault(
        "the branches are exchanged: log π_θ where A < 0",
        kind="ratio",
        id="branches-exchanged",
        J=form.term(lambda r, A, lp: where(A < 0, A * lp, lower_clipped(r, A))),
    )
    yield fault(
        "the tokens of A > 0 are clipped too, or left out beyond the bound",
        kind="clip",
        id="positive-tokens-clipped",
        J=form.term(
            lambda r, A, lp: where(
                A > 0, A * lp * (r <= form.upper), lower_clipped(r, A)
            )
        ),
    )
    yield fault(
        "the ratio still multiplies A where A > 0: unclipped importance sampling, not UP",
        kind="ratio",
        id="ratio-where-a-positive",
        J=form.term(lambda r, A, lp: where(A > 0, r * A, form.ppo(r, A))),
    )


def _no_bound_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the fault that no bound acts: the term is r A, or 0 for a sign of A that the
    objective does not train. Of an objective whose term is A log π_θ for some sign, yield
    it also with A log π_θ there and the constant weight r on log π_θ elsewhere.
    """
    shape = form.shape

    def trained_advantage(A: Tensor) -> Tensor:
        """Return A, or 0 for a sign that the objective does not train."""
        return where(A > 0, A * shape.trains[1.0], A * shape.trains[-1.0])

    def constant_weight(r: Tensor, A: Tensor, lp: Tensor) -> Tensor:
        """Return the term without a bound, as a constant weight on log π_θ."""
        without_ratio = where(
            A > 0, A * shape.ignores_ratio[1.0], A * shape.ignores_ratio[-1.0]
        )
        with_ratio = trained_advantage(A) - without_ratio
        return (without_ratio + sg(r) * with_ratio) * lp

    yield fault(
        NO_BOUND,
        kind="clip",
        id="no-bound",
        J=form.term(lambda r, A, lp: r * trained_advantage(A)),
    )
    if any(shape.ignores_ratio.values()):  # as in TOPR
        yield fault(NO_BOUND, kind="clip", id="no-bound", J=form.term(constant_weight))


def _inverted_ratio_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the fault that π_θ and π_old are exchanged: in PPO's term, and in the
    objective's own where it is a function of the token alone.
    """
    objective = form.objective
    yield fault(
        INVERTED_RATIO,
        kind="ratio",
        id="ratio-inverted",
        J=lambda lp, old, A, m: form.ppo(form.ratio(old, lp, m), A),
    )
    if objective.level == "token" and not objective.reads:
        own_hp = _without_beta(form.hp)
        yield fault(
            INVERTED_RATIO,
            kind="ratio",
            id="ratio-inverted",
            J=lambda lp, old, A, m: objective.surrogate(old, lp, A, **own_hp),
        )


def _advantage_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the faults that a function of A replaces it, that one sign of A has no
    gradient, and that the formulas of the two signs are exchanged.
    """
    j = form.own_term()

    def of_other_advantage(
        lp: Tensor,
        old: Tensor,
        A: Tensor,
        m: Tensor,
        change: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the objective's term of change(A)."""
        return j(lp, old, change(A), m)

    for fault_id, words, change in (
        ("advantage-absolute", "A enters by its absolute value", torch.abs),
        ("advantage-sign-alone", "A enters by its sign alone", torch.sign),
        ("advantage-exponentiated", "exp(A) replaces A", torch.exp),
        ("advantage-tanh", "tanh(A) replaces A", torch.tanh),
        ("advantage-squared", "A enters squared", lambda A: A * A.abs()),
    ):
        yield fault(
            words,
            kind="advantage",
            id=fault_id,
            J=partial(of_other_advantage, change=change),
        )
    dual_clip = ", as by a dual clip that acts where A > 0 too"
    for sign, without_sign, how in (
        ("A < 0", partial(torch.clamp, min=0.0), ""),
        ("A > 0", partial(torch.clamp, max=0.0), dual_clip if form.hp.get("c") else ""),
    ):
        yield fault(
            f"no token with {sign} has a gradient: its advantage is dropped, "
            f"its term is detached, or its term is constant{how}",
            kind="advantage",
            id=DROPPED[sign],
            J=partial(of_other_advantage, change=without_sign),
        )
    if form.shape.depends_on_sign:
        yield fault(
            "the branches of the two signs of A are exchanged",
            kind="advantage",
            id="signs-exchanged",
            J=lambda lp, old, A, m: -j(lp, old, -A, m),
        )


def _missing_side_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the faults that PPO's clip lacks one of its sides, or one sign of A."""

    def without_lower_bound(r: Tensor, A: Tensor, lp: Tensor) -> Tensor:
        """Return PPO's term with the upper bound alone."""
        return minimum(r * A, r.clamp(max=form.upper) * A)

    def without_upper_bound(r: Tensor, A: Tensor, lp: Tensor) -> Tensor:
        """Return PPO's term with the lower bound alone."""
        return minimum(r * A, r.clamp(min=form.lower) * A)

    for side, sign, stopped, one_sided in (
        ("lower", "A < 0", f"above {form.upper:g} where A > 0", without_lower_bound),
        ("upper", "A > 0", f"below {form.lower:g} where A < 0", without_upper_bound),
    ):
        at_1, beyond_bound = _trains_at_ends(form.objective, form.hp, side)
        if not at_1:
            words = f"where {sign} the ratio multiplies A, though {form.objective.name} has no term there"
        elif beyond_bound:  # the objective has no bound there either
            words = f"the ratio multiplies A, without a bound where {sign}, without a gradient {stopped}"
        else:
            words = f"the clip has no {side} side"
        yield fault(
            words,
            kind="clip",
            id=f"no-{side}-clip",
            J=form.term(one_sided),
        )
    if form.shape.is_pessimistic:
        yield fault(
            "only positive advantages are clipped",
            kind="clip",
            id="only-positive-clipped",
            J=form.term(lambda r, A, lp: where(A > 0, form.ppo(r, A), r * A)),
        )
        yield fault(
            "only negative advantages are clipped",
            kind="clip",
            id="only-negative-clipped",
            J=form.term(lambda r, A, lp: where(A < 0, form.ppo(r, A), r * A)),
        )


# Other log-ratios: the id, words, and the function of (log π_θ - log π_old, mask) that
# returns [B, T], or [B, 1] for one number of each response.
OTHER_LOG_RATIOS: tuple[tuple[str, str, Callable[[Any, Any], Any]], ...] = (
    (
        "ratio-of-response",
        "the ratio of the response replaces the token's",
        lambda x, m: mean_t(x, m)[:, None],
    ),
    (
        "ratio-of-token",
        "the ratio of the token replaces the response's",
        lambda x, m: x,
    ),
    (
        "log-ratio-summed",
        "the response's log-ratio is summed, not averaged over its tokens",
        lambda x, m: sum_t(x, m)[:, None],
    ),
    (
        "log-ratio-ignores-mask",
        "the response's log-ratio is averaged over the padded width, padding included: the mask is ignored",
        lambda x, m: x.mean(-1, keepdim=True),
    ),
    (
        "log-ratio-over-padded-width",
        "the response's log-ratio is divided by the padded width",
        lambda x, m: sum_t(x, m)[:, None] / m.shape[1],
    ),
    (
        LONGEST,
        "the response's log-ratio is divided by the length of the longest response",
        lambda x, m: sum_t(x, m)[:, None] / m.sum(1).max(),
    ),
    (
        MEAN_LENGTH,
        "the response's log-ratio is divided by the mean length of the batch's responses",
        lambda x, m: sum_t(x, m)[:, None] / (m.sum() / len(m)),
    ),
    (
        "log-ratio-over-columns-with-holes",
        "the response's log-ratio is divided by the number of columns from its first to "
        "its last token: holes are counted",
        lambda x, m: (
            sum_t(x, m)[:, None]
            / ((m.cumsum(1) > 0) & (m.flip(1).cumsum(1) > 0).flip(1)).sum(1, True)
        ),
    ),
    (
        "log-ratio-over-columns-to-last-token",
        "the response's log-ratio is divided by the number of columns up to its last token: "
        "masked slots before it are counted",
        lambda x, m: (
            sum_t(x, m)[:, None] / (m.flip(1).cumsum(1) > 0).sum(1, keepdim=True)
        ),
    ),
    (
        "log-ratio-over-tokens-before-hole",
        "the response's log-ratio is divided by the number of tokens in front of the first "
        "masked slot of its row: those behind a hole are not counted",
        lambda x, m: (
            sum_t(x, m)[:, None] / m.cumprod(1).sum(1, keepdim=True).clamp(min=1)
        ),
    ),
    (
        "log-ratio-over-length-plus-one",
        "the response's log-ratio is divided by its length plus 1",
        lambda x, m: sum_t(x, m)[:, None] / (m.sum(1, keepdim=True) + 1),
    ),
    (
        "arithmetic-mean-of-ratios",
        "the response's ratio is the mean of its tokens' ratios, not their geometric mean",
        lambda x, m: mean_t(exp(x), m).log()[:, None],
    ),
)


def _response_ratio_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the faults that PPO's term has another ratio, one of OTHER_LOG_RATIOS: a
    response's for a token's, a token's for a response's, or another average over the
    response. An objective with a ratio of responses may have each with the gradient of
    the response or with each token's own.

    Before these, yield that the term of an objective on the product of a response's
    ratios is that of each token.
    """

    def ppo_at(
        lp: Tensor, old: Tensor, A: Tensor, m: Tensor, log_ratio: Callable[..., Tensor]
    ) -> Tensor:
        """Return PPO's term at exp(log_ratio)."""
        return form.ppo(exp(log_ratio(lp - old, m).expand_as(lp)), A)

    def ppo_at_by_token(
        lp: Tensor, old: Tensor, A: Tensor, m: Tensor, log_ratio: Callable[..., Tensor]
    ) -> Tensor:
        """Return the same numbers; the gradient is each token's own, as in
        GSPO-token.
        """
        return form.ppo(exp(by_token(log_ratio(lp - old, m).expand_as(lp), lp)), A)

    objective = form.objective
    if objective.level == "sequence_product" and not objective.batch_coupled:
        surrogate, hp = _without_sampler(objective, _without_beta(form.hp))
        yield fault(
            "the ratio of the token replaces the response's",
            kind="ratio",
            id="ratio-of-token",
            J=lambda lp, old, A, m: surrogate.fn(lp, old, A.expand_as(lp), **hp),
        )
    for fault_id, words, log_ratio in OTHER_LOG_RATIOS:
        # the longest response and the mean length are others in a few rows of a batch
        whole = fault_id in (LONGEST, MEAN_LENGTH)
        yield fault(
            words,
            kind="ratio",
            id=fault_id,
            whole=whole,
            J=partial(ppo_at, log_ratio=log_ratio),
        )
        if form.has_ratio_of_response:
            yield fault(
                words,
                kind="ratio",
                id=fault_id,
                whole=whole,
                J=partial(ppo_at_by_token, log_ratio=log_ratio),
            )


def _batch_ratio_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the faults that all tokens of the batch share one ratio."""
    objective = form.objective

    def weights_at_ratio_of_batch(
        batch: Rollouts,
        count: Callable[[Tensor], Any],
        with_gradient: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return the weights with the summed log-ratio over `count` of the mask."""
        factors = own_factor(objective)(batch)[:, None]

        def aggregated_ppo(lp: Tensor, old: Tensor, A: Tensor, m: Tensor) -> Tensor:
            """Return PPO's term, times the factor of the response in the loss. The
            factor belongs inside: each token moves the ratio of all responses.
            """
            log_r = (where(m, lp - old, 0).sum() / count(m)).expand_as(lp)
            return factors * form.ppo(exp(with_gradient(log_r, lp)), A)

        w = _weights_of_term(aggregated_ppo, batch) / factors
        return _with_sampler_and_kl(objective, form.hp, w, batch)

    for participle, count in (
        ("averaged", lambda m: m.sum()),
        ("summed", lambda m: 1),
    ):
        for with_gradient in (lambda log_r, lp: log_r, by_token):
            yield fault(
                f"the log-ratio is {participle} over the whole batch, not over each response",
                kind="ratio",
                id=f"log-ratio-{participle}-over-batch",
                weigh=partial(
                    weights_at_ratio_of_batch, count=count, with_gradient=with_gradient
                ),
                whole=True,
            )


def _product_of_ratios_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the fault that the product of a response's ratios replaces each token's."""

    def ppo_at_product(lp: Tensor, old: Tensor, A: Tensor, m: Tensor) -> Tensor:
        """Return PPO's term at the product of the response's ratios."""
        log_product = sum_t(where(m, lp - old, 0), m)[:, None]
        return form.ppo(exp(log_product.expand_as(lp)), A)

    def weights_at_product(batch: Rollouts) -> Tensor:
        """Return the weights where a response has one term, not one for each token."""
        lengths = batch.mask.sum(-1, keepdim=True)
        w = _weights_of_term(ppo_at_product, batch) / lengths
        return _with_sampler_and_kl(form.objective, form.hp, w, batch)

    yield fault(
        "the product of the response's ratios replaces the token's: one term for each response",
        kind="ratio",
        id="product-for-token-ratio",
        weigh=weights_at_product,
    )


def _misread_bound_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the faults that eps_low and eps_high are read as other bounds."""
    low = form.eps_low
    high = form.eps_high
    yield fault(
        "the bounds are taken as absolute, [eps_low, eps_high], not as 1 - eps_low and 1 + eps_high",
        kind="clip",
        id="bounds-absolute",
        J=form.term(lambda r, A, lp: minimum(r * A, clip(r, low, max(low, high)) * A)),
    )
    if form.objective.level == "custom":
        of_token = " of each token: the ratio of the token replaces the response's"
    else:
        of_token = ""
    is_one = "eps" in form.objective.hyperparameters
    bounds = "[-eps, eps]" if is_one else "[-eps_low, eps_high]"
    yield fault(
        f"the bounds are on log {form.objective.ratio_symbol}: {bounds}{of_token}",
        kind="clip",
        id="bounds-on-log-ratio",
        J=form.term(
            lambda r, A, lp: minimum(r * A, exp(r.log().clamp(-low, high)) * A)
        ),
    )


def _ratio_replaced_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the faults that log r replaces the ratio, that the ratio is there twice, or
    that it replaces log π_θ.
    """
    j = form.own_term()
    log_ratio = f"log {form.objective.ratio_symbol}"

    def ppo_at_log_ratio(lp: Tensor, old: Tensor, A: Tensor, m: Tensor) -> Tensor:
        """Return PPO's term with log r in place of r."""
        log_r = form.log_ratio(lp, old, m)
        return minimum(log_r * A, log_r.clamp(-form.eps_low, form.eps_high) * A)

    def ratio_twice(
        lp: Tensor, old: Tensor, A: Tensor, m: Tensor, cap: float
    ) -> Tensor:
        """Return the objective's term times min(r, cap), a constant."""
        return sg(form.ratio(lp, old, m).clamp(max=cap)) * j(lp, old, A, m)

    yield fault(
        # a constant beside log r has no gradient
        f"{log_ratio}, or 1 + {log_ratio}, replaces the ratio: the weight is A itself, up to "
        f"{log_ratio} = {form.eps_high:g} where A > 0 and down to "
        f"{log_ratio} = {-form.eps_low:g} where A < 0",
        kind="ratio",
        id="log-ratio-for-ratio",
        J=ppo_at_log_ratio,
    )
    for cap in (*CAPS, *form.bounds):
        at_most = f", at most {cap:g}" if cap < math.inf else ""
        yield fault(
            f"the term is multiplied by the ratio once more, as a constant{at_most}",
            kind="ratio",
            id="ratio-twice",
            J=partial(ratio_twice, cap=cap),
        )
    yield fault(
        "where A > 0 the ratio to π_old replaces log π_θ",
        kind="ratio",
        id="ratio-where-a-positive",
        J=form.term(lambda r, A, lp: where(A > 0, r * A, form.ppo(r, A))),
    )


def _weight_on_log_prob_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the faults that a bounded ratio multiplies A log π_θ: as a constant, and
    with its gradient.
    """
    clipped = f"clip({form.objective.ratio_symbol}, 1 - eps_low, 1 + eps_high)"
    if form.weighs_log_prob:
        kind = "clip"
        words = f"the weight is bounded on both sides: {clipped}"
    elif form.shape.survives_bounds:
        kind = "clip"
        words = (
            f"the weight is {clipped} whatever the sign of A: the minimum is missing"
        )
    else:
        kind = "stop-gradient"
        words = "stop-gradient: the clipped ratio is a constant weight on log π_θ, though it should carry the gradient"
    yield fault(
        words,
        kind=kind,
        id="weight-clipped",
        J=form.term(lambda r, A, lp: sg(form.clip(r)) * A * lp),
    )

    def capped_ratio_on_log_prob(
        r: Tensor, A: Tensor, lp: Tensor, cap: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return cap(r) A log π_θ, with the gradient of the ratio too."""
        return cap(r) * A * lp

    has_lower_bound = any(0 < x < 1 for x in form.bounds)
    for participle, cap in form.caps():
        yield fault(
            f"stop-gradient: the {participle} ratio on log π_θ is not detached",
            kind="stop-gradient",
            id=f"{participle}-ratio-not-detached",
            meant="cispo_verl" if has_lower_bound else "cispo",
            J=form.term(partial(capped_ratio_on_log_prob, cap=cap)),
        )


LEAST_GUARD = 0.05  # of |log r|; a smaller one is a bound on the response's ratio


def _bound_elsewhere_faults(form: ClippedForm) -> Iterator[LossFault]:
    """Yield the faults that a ratio at which the loss was seen to change is a guard on
    log r, a cap on r, or a dual clip.
    """
    j = form.own_term()
    ratio = form.objective.ratio_symbol

    def guarded(lp: Tensor, old: Tensor, A: Tensor, m: Tensor, guard: float) -> Tensor:
        """Return the objective's term at log r clamped to ±guard."""
        return j(old + (lp - old).clamp(-guard, guard), old, A, m)

    def capped(lp: Tensor, old: Tensor, A: Tensor, m: Tensor, bound: float) -> Tensor:
        """Return the objective's term at a ratio of at most the bound."""
        return j(old + (lp - old).clamp(max=math.log(bound)), old, A, m)

    def ppo_of_capped_ratio(r: Tensor, A: Tensor, lp: Tensor, bound: float) -> Tensor:
        """Return PPO's term at a ratio of at most the bound."""
        return form.ppo(r.clamp(max=bound), A)

    def dual_clip(r: Tensor, A: Tensor, lp: Tensor, bound: float) -> Tensor:
        """Return PPO's term, with the ratio capped at the bound where A < 0."""
        return where(A < 0, form.ppo(r.clamp(max=bound), A), form.ppo(r, A))

    guards = {round(abs(float(torch.tensor(x).log())), 4) for x in form.bounds if x > 0}
    for guard in sorted(x for x in guards if x >= LEAST_GUARD):
        yield fault(
            f"no token has a gradient where |log r| > {guard:g}: log r is clamped there, or the term is left out",
            kind="clip",
            id="log-ratio-clamped",
            J=partial(guarded, guard=guard),
        )
    for bound in form.bounds:
        is_beyond_upper = bound >= form.upper  # A > 0 has no gradient there anyway
        yield fault(
            _words_beyond(
                ratio, bound, "the ratio is capped there", only_negative=is_beyond_upper
            ),
            kind="clip",
            id="ratio-capped",
            J=form.term(partial(ppo_of_capped_ratio, bound=bound)),
        )
        if bound > 0 and not (form.shape.is_bounded or form.has_ratio_of_response):
            yield fault(
                _words_beyond(
                    ratio, bound, "the ratio is capped there", only_negative=False
                ),
                kind="clip",
                id="ratio-capped",
                J=partial(capped, bound=bound),
            )
        yield fault(
            _words_beyond(
                ratio, bound, f"a dual clip at c = {bound:.6g}", only_negative=True
            ),
            kind="clip",
            id="dual-clip",
            J=form.term(partial(dual_clip, bound=bound)),
        )


def _words_beyond(ratio: str, bound: float, how: str, only_negative: bool) -> str:
    """Return the words for a ratio beyond which no gradient is left.

    Args:
        ratio: its symbol.
        bound: its value.
        how: the words for what the loss does there.
        only_negative: whether the words are about A < 0 alone.
    """
    where_negative = "where A < 0 " if only_negative else ""
    return (
        f"{where_negative}no gradient is left beyond {ratio} = {bound:.6g}: {how}, or such tokens "
        "are left out"
    )


# ---- the families of faults ----------------------------------------------------------
def _always(form: ClippedForm) -> bool:
    """Return True: every objective may have the fault."""
    return True


def _is_bounded(form: ClippedForm) -> bool:
    """Return whether a bound acts."""
    return form.shape.is_bounded


def _is_like_up(form: ClippedForm) -> bool:
    """Return whether the term is A log π_θ where A > 0, and a ratio where A < 0."""
    return form.shape.ignores_ratio[1.0] and form.shape.follows_ratio[-1.0]


@dataclass(frozen=True)
class Family:
    """Faults of the ratio, the clip or the advantage that are made alike.

    Attributes:
        rank: of two faults that give the same numbers, that of the lower rank is named.
            So the special ones come before the general ones.
        faults: makes them of an objective with one pair of bounds.
        applies: whether such an objective may have them.
    """

    rank: int
    faults: Callable[[ClippedForm], Iterable[LossFault]]
    applies: Callable[[ClippedForm], bool] = _always


FAMILIES = (
    Family(10, _capped_weight_faults, lambda form: form.weighs_log_prob),
    Family(20, _lone_term_faults, lambda form: form.shape.is_smooth),
    Family(30, _other_sign_faults),
    Family(
        35,
        _early_factor_faults,
        lambda form: bool(form.hp.get("lam")) and _is_bounded(form),
    ),
    Family(40, _minimum_faults, lambda form: form.shape.has_minimum),
    Family(50, _log_prob_where_negative_faults, _is_like_up),
    Family(60, _unbounded_positive_faults, _is_like_up),
    Family(70, _ratio_always_one_faults),
    Family(80, _no_bound_faults, _is_bounded),
    Family(90, _inverted_ratio_faults),
    Family(100, _dual_clip_faults, lambda form: bool(form.hp.get("c"))),
    Family(110, _advantage_faults),
    Family(120, _missing_side_faults),
    Family(125, _drifted_response_faults, lambda form: "opsm_delta" in form.hp),
    Family(130, _ppo_faults),
    Family(140, _response_ratio_faults),
    Family(150, _batch_ratio_faults),
    Family(160, _product_of_ratios_faults),
    Family(170, _detached_term_faults),
    Family(180, _misread_bound_faults, _is_bounded),
    Family(190, _ratio_replaced_faults),
    Family(200, _log_prob_where_negative_faults),
    Family(210, _weight_on_log_prob_faults),
    Family(220, _missing_ratio_faults, _is_bounded),
    Family(230, _exponential_faults),
    Family(240, _bound_elsewhere_faults),
)
