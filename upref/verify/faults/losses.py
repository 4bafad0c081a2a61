# SPDX-License-Identifier: Apache-2.0
"""Known faults of losses: what is done otherwise, and the change it makes to the
reference.

`explain` searches the catalogue below for the one that reproduces a wrong loss; the
audit of a framework declares the ones that account for its deviations, and the ledger
names them. One file, because a catalogue is read as one.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor

from upref import kl
from upref.definition import weighed
from upref.ops import clip, exp, maximum, mean_t, minimum, sg, sum_t, where
from upref.registry import Objective, get
from upref.rollouts import Rollouts
from upref.verify.factors import FACTORS, declared_aggregation
from upref.verify.faults import SIGN_IDS, Fault, hyperparameter_id, known as known_of
from upref.verify.measure import kl_slope, unit_weights

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
    """What a fault makes of an objective: any of these, most have one."""

    objective: str | Objective | None = None
    hp: dict[str, Any] = field(default_factory=dict)
    agg: str | None = None
    J: Term | None = None  # in place of the objective's function
    view: Callable[[Rollouts], Rollouts] = lambda batch: batch
    scale: Callable[[Rollouts], Tensor | float] = lambda batch: 1.0
    term: Callable[[Rollouts], Tensor] | None = None  # added to J
    # tokens too near to a bound that rounding moves
    skip: Callable[[Rollouts], Tensor] = lambda batch: torch.zeros_like(batch.mask)
    weigh: Callable[[Rollouts], Tensor] | None = None  # the weights themselves

    def put_into(
        self, objective: Objective, hp: dict[str, Any]
    ) -> tuple[Objective, dict[str, Any]]:
        """The objective and hyperparameters that it leaves.

        Args:
            objective: the objective.
            hp: its hyperparameters.
        """
        if self.objective is None:
            return objective, hp | self.hp
        return get(self.objective) if isinstance(
            self.objective, str
        ) else self.objective, self.hp

    def weights(
        self, objective: Objective, hp: dict[str, Any], batch: Rollouts
    ) -> Tensor:
        """dJ_t/dlp_t of the objective with this change in it, before aggregation.

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
            return _in_place_of_fn(objective, hp, _slope(self.J, batch), batch)
        other, hp = self.put_into(objective, hp)
        return unit_weights(
            other, batch, hp if other is objective else other.resolve(hp)
        ) * self.scale(batch)


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
    """A fault by the fields of its Change."""
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


def _slope(J: Term, batch: Rollouts) -> Tensor:
    """dJ/dlp of a term on each token, times the length where the term is one of each
    response.
    """
    x = batch.logp.detach().clone().requires_grad_()
    y = J(x, batch.logp_old, batch.adv.expand_as(x), batch.mask)
    if not y.requires_grad:
        return torch.zeros_like(x)
    n = batch.mask.sum(-1, keepdim=True) if y.ndim == 1 else 1
    (gradient,) = torch.autograd.grad(
        where(batch.mask, y, 0).sum() if y.ndim == 2 else y.sum(), x
    )
    return torch.where(batch.mask, gradient * n, 0)


def _in_place_of_fn(
    objective: Objective, hp: dict[str, Any], w: Tensor, batch: Rollouts
) -> Tensor:
    """The weights of another function than the objective's, with its sampler's
    correction and its KL term.
    """
    plain_hp = {k: v for k, v in hp.items() if k != "beta"}
    if (factors := objective.factors(batch, **plain_hp)) is not None:
        w = weighed(w, objective.per_term(factors, batch.mask), batch.mask)
    return w - (hp["beta"] * kl_slope(objective.kl, batch) if hp.get("beta") else 0)


# ---- what an objective has, which a fault may be about -------------------------------
INVERTED_RATIO = "the ratio is inverted: exp(old - new)"
SIDES = {"below": -1, "above": 1}  # of a ratio of 1
NEAR = 1e-5  # |log r| below the narrowest bound
MODERATE = (-7.0, -1.0, -0.2, 0.2, 1.0, 3.5)  # log r at which the signs of A may differ
# (π_old, log r) beyond every bound, one of |π_θ - π_old| too
FAR = {"below": (0.9, -7.0), "above": (5e-4, 7.0)}


@dataclass(frozen=True)
class Shape:
    """What the weight of an objective is made of, by the sign of A and the side of r =
    1.
    """

    live: dict[float, bool]  # it has a weight on policy
    plain: dict[float, bool]  # near r = 1, on a side at least, it is r times that
    free: dict[float, bool]  # it is that at every ratio
    # plain near 1, and not far from it: a clip, a cap or a mask
    bounded: dict[tuple[float, str], bool]
    cut: dict[tuple[float, str], bool]  # plain near 1, and 0 far from it
    # it differs between the signs of A, by more than the sign and a term without A
    branches: bool
    constant: bool  # plain for both signs, as a constant weight on log π_θ
    masks: bool  # its value is 0 where it is cut

    @property
    def is_bounded(self) -> bool:
        return any(self.bounded.values())

    @property
    def is_pessimistic(self) -> bool:
        """As in PPO: no gradient beyond the bound on the side to which A pushes."""
        return self.cut[1.0, "above"] and self.cut[-1.0, "below"]

    @property
    def has_minimum(self) -> bool:
        """That is so by a minimum of two terms, not by a mask or in a constant."""
        return self.is_pessimistic and not self.constant and not self.masks

    @property
    def is_smooth(self) -> bool:
        """The ratio, with another term or factor beside it at every ratio, in place of
        a bound.
        """
        return all(self.live.values()) and not any(
            (*self.plain.values(), *self.free.values())
        )


def shape_of(objective: Objective, hp: dict[str, Any]) -> Shape:
    """Measured on single tokens, without the KL term and the sampler's correction.

    Args:
        objective: the objective.
        hp: its hyperparameters.

    Returns:
        Where its weight is live, bounded, plain and free of A, on either side.
    """
    objective, own_hp = _inside(objective, _without_beta(hp))

    def token(A: float, mu: float, log_r: float) -> Rollouts:
        lp_old = torch.tensor([[mu]], dtype=torch.float64).log()
        ones = torch.ones_like(lp_old)
        return Rollouts(lp_old + log_r, lp_old, A * ones, ones.bool(), entropy=ones)

    def weight(A: float, mu: float, log_r: float) -> float:
        """The weight of that token."""
        return unit_weights(objective, token(A, mu, log_r), own_hp).item()

    signs = (1.0, -1.0)
    at_1 = {A: weight(A, 0.02, 0.0) for A in (1.0, -1.0)}
    measured = {
        (A, side): (at_1[A], weight(A, *FAR[side]), FAR[side][1])
        for A in signs
        for side in SIDES
    }
    near_weights = {
        (A, side): weight(A, 0.02, NEAR * s) for A in signs for side, s in SIDES.items()
    }
    times_r = {
        (A, side): abs(near_weights[A, side] - at_1[A] * math.exp(NEAR * s)) <= 1e-13
        for A in signs
        for side, s in SIDES.items()
    }
    live = {A: at_1[A] != 0 for A in signs}
    plain = {A: live[A] and any(times_r[A, side] for side in SIDES) for A in signs}
    same = {
        key: abs(near_weights[key] - w) <= 1e-13 and abs(far_ratio - w) <= 1e-13
        for key, (w, far_ratio, _) in measured.items()
    }
    free = {A: live[A] and all(same[A, side] for side in SIDES) for A in signs}
    bounded = {
        (A, side): plain[A] and abs(far_ratio / (w * math.exp(log_r)) - 1) > 1e-9
        for (A, side), (w, far_ratio, log_r) in measured.items()
    }
    cut = {
        key: bounded[key] and far_ratio == 0
        for key, (_, far_ratio, _) in measured.items()
    }

    def bend(log_r: float) -> float:
        """The second difference of the weight in A, which is 0 where it is linear."""
        up = weight(1.0, 0.02, log_r)
        down = weight(-1.0, 0.02, log_r)
        return up + down - 2 * weight(0.0, 0.02, log_r)

    branches = any(abs(bend(x)) > 1e-12 for x in MODERATE)
    far_batch = token(1.0, *FAR["above"])
    value = term_of(objective, own_hp)(
        far_batch.logp, far_batch.logp_old, far_batch.adv, far_batch.mask
    )
    return Shape(
        live,
        plain,
        free,
        bounded,
        cut,
        branches,
        all(plain.values()) and _is_linear(objective, own_hp),
        not value.any(),
    )


def _inside(
    objective: Objective, hp: dict[str, Any]
) -> tuple[Objective, dict[str, Any]]:
    """The objective without its sampler's correction, and its own hyperparameters."""
    objective = replace(objective, sampler=None) if objective.sampler else objective
    return objective, {k: v for k, v in hp.items() if k in objective.hyperparameters}


def _is_linear(objective: Objective, hp: dict[str, Any]) -> bool:
    """Whether the gradient of its function is a constant for autograd."""
    lp = torch.tensor([[-1.0], [-1.0]], dtype=torch.float64).requires_grad_()
    old = lp.detach() - 0.1
    A = torch.tensor([[1.0], [-1.0]])
    mask = torch.ones(2, 1, dtype=torch.bool)
    J = term_of(objective, hp)(lp, old, A, mask).sum()
    return (
        not J.requires_grad
        or not torch.autograd.grad(J, lp, create_graph=True)[0].requires_grad
    )


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


# what is done to the sampler's ratio π_old/μ
SAMPLER: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
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
        "sampler-ratio-unused",
        "the sampler's ratio has no effect",
        lambda batch: batch.logp_old,
    ),
)
GROUPS = fault(
    "one denominator for the batch, not one per prompt",
    "aggregation",
    id="one-denominator-per-batch",
    view=lambda batch: replace(batch, group=None),
)


# ---- the catalogue -------------------------------------------------------------------
def known(
    objective: Objective, hp: dict[str, Any], bounds: list[float]
) -> Iterator[LossFault]:
    """All of the catalogue, on this objective, with the bounds at which a wrong loss
    was seen to change.
    """
    j = term_of(objective, hp)
    yield fault(
        "the sign is flipped: it ascends the loss",
        "sign",
        id="sign-flipped",
        J=lambda lp, old, A, m: -j(lp, old, A, m),
    )
    if hp.get("beta"):
        yield from kl_faults(objective, hp)
    for id, words, of in SAMPLER if objective.sampler else ():
        yield fault(
            words,
            "ratio",
            id=id,
            view=lambda batch, of=of: batch.but(logp_sampler=of(batch)),
        )
    yield fault(
        "the ratio is to π_ref, not to π_old",
        "ratio",
        id="ratio-to-reference",
        view=lambda batch: (
            batch if batch.logp_ref is None else batch.but(logp_old=batch.logp_ref)
        ),
    )
    lo = hp.get("eps_low", hp.get("eps", 0.2))
    hi = hp.get("eps_high", hp.get("eps", hp.get("eps_low", 0.2)))
    low = [1 - x for x in bounds if 0 < x < 1][:2]
    high = [x - 1 for x in bounds if 1 < x < 10][:2]
    has = shape_of(objective, hp)
    # an objective of one bound, as UP is, has no pair of bounds that the loss misses
    has_bounds = has.is_bounded and (
        "eps" in hp or {"eps_low", "eps_high"} <= hp.keys()
    )
    bounds_ = [x for x in (1 - lo, 1 + hi) if x > 0]  # a bound below 0 is none
    bounds_words = (
        f", not {' and '.join(f'{x:g}' for x in bounds_)}" if has_bounds else ""
    )
    if objective.level == "custom" and (
        unbounded := {k: UNBOUNDED for k in hp if k.startswith("eps")}
    ):
        yield fault(
            "no bound has an effect on the gradient: it is as if the ratio were not clipped",
            "clip",
            id="no-bound",
            hp=unbounded,
        )
    for i, (a, e) in enumerate(dict.fromkeys(product([lo, *low], [hi, *high]))):
        for each in _forms(objective, hp, has, bounds, a, e):
            where_words = (
                f" (with bounds {1 - a:g} and {1 + e:g}{bounds_words})" if i else ""
            )
            yield replace(each, words=each.words + where_words)


# a KL term that is not k(π_θ, π_ref): the id, what is said of the objective's own, of another,
# and the term itself, a function of (log π_θ, log π_ref, log π_old, log μ)
KL_FORMS: tuple[tuple[str, str, str, Callable[..., Callable[..., Any]]], ...] = (
    (
        "kl-exchanged",
        "π_θ and π_ref are exchanged in the KL term ({})",
        "π_θ and π_ref exchanged",
        lambda k: lambda x, ref, old, mu: k(ref, x),
    ),
    (
        "kl-times-ratio",
        "the KL term ({}) is multiplied by the ratio",
        "times the ratio",
        lambda k: lambda x, ref, old, mu: k(x, ref) * exp(x - old),
    ),
    (
        "kl-times-constant-ratio",
        "the KL term ({}) is multiplied by the ratio, which is a constant",
        "times the ratio, a constant",
        lambda k: lambda x, ref, old, mu: k(x, ref) * sg(exp(x - old)),
    ),
    (
        "kl-to-old-policy",
        "the KL term ({}) is to π_old, not to π_ref",
        "to π_old",
        lambda k: lambda x, ref, old, mu: k(x, old),
    ),
    (
        "kl-to-sampler",
        "the KL term ({}) is to μ, the sampler's policy",
        "to μ",
        lambda k: lambda x, ref, old, mu: k(x, mu),
    ),
)
KL_TERMS = {
    name: lambda x, ref, old, mu, k=k: k(x, ref) for name, k in kl.ESTIMATORS.items()
}
KL_TERMS |= {
    f"{name} ({how})": form(k)
    for name, k in kl.ESTIMATORS.items()
    for _, _, how, form in KL_FORMS
}
for _how in ("to π_old", "to μ"):
    del KL_TERMS[f"k1 ({_how})"]  # the gradient of k1 is 1, whatever the other policy
# a name of KL_TERMS
TERM_OF = {name: name for name in kl.ESTIMATORS} | {"k3_ratio": "k3 (times the ratio)"}


def term_slope(f: str | Callable[..., Tensor], batch: Rollouts) -> Tensor:
    """d f(lp, lp_ref, lp_old, log μ) / d lp of each token, 0 on masked slots; f may be
    a name of KL_TERMS.

    Args:
        f: the term, or its name.
        batch: the batch.

    Returns:
        [B, T].
    """
    if isinstance(f, str):
        f = KL_TERMS[f]
    x = torch.where(batch.mask, batch.logp, 0).detach().requires_grad_()
    others = (
        batch.logp_old if v is None else v
        for v in (batch.logp_ref, batch.logp_old, batch.logp_sampler)
    )
    y = f(x, *(torch.where(batch.mask, v, 0) for v in others))
    return (
        torch.autograd.grad(y.sum(), x)[0] if y.requires_grad else torch.zeros_like(x)
    )


def terms(first: str, reads: frozenset[str]) -> list[str]:
    """The names of KL_TERMS that a loss which reads these can have: this one, then the
    usual ones.
    """
    can = {"μ": "logp_sampler" in reads, "π_old": True, "": "logp_ref" in reads}

    def is_possible(name: str) -> bool:
        """Whether the loss reads the policy that it is to; for k1 any one does."""
        return (
            name == "k1"
            or can[next(k for k in can if name.endswith(f"to {k})") or not k)]
        )

    return sorted(
        filter(is_possible, KL_TERMS),
        key=lambda k: (k != first, k not in kl.ESTIMATORS),
    )


OTHER_KL = "another estimator, or a part of it is detached"


def lacking(objective: Objective, beta: float, name: str) -> str:
    """Words for a KL term that the objective does not have, or not like this."""
    if name == TERM_OF.get(objective.kl) and beta < 0:
        return f"the KL term is added to J, not subtracted: {abs(beta):.7g} {name}"
    if beta > 0:
        verb, bonus = ("subtracted", "an entropy bonus")
    else:
        verb, bonus = ("added to J", "a bonus on the likelihood")
    whose = (
        f"is not {objective.name}'s {objective.kl}"
        if objective.kl
        else f"{objective.name} does not have"
    )
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
    """The fault that the KL term, of this coefficient, has the other sign.

    Args:
        beta: the coefficient of the KL term.
    """
    words = "the KL term is added to J, not subtracted"
    return fault(words, "term", id="kl-added", hp={"beta": -beta})


def kl_faults(objective: Objective, hp: dict[str, Any]) -> Iterator[LossFault]:
    """What is done to a KL term, each put beside the objective's own weights."""
    beta = hp["beta"]
    plain = {**hp, "beta": 0.0}
    inside, own_hp = _inside(objective, _without_beta(plain))

    def rest(batch: Rollouts) -> Tensor:
        """The weights without the KL term."""
        return unit_weights(objective, batch, plain)

    def made(words: str, f: str | Callable[..., Tensor], id: str) -> LossFault:
        """The fault that f is the KL term."""
        return fault(
            words,
            "term",
            id=id,
            weigh=lambda batch: rest(batch) - beta * term_slope(f, batch),
        )

    def only_where(batch: Rollouts, on: Callable[[Tensor], Tensor]) -> Tensor:
        """The weights with the KL term only on tokens whose A is so."""
        return rest(batch) - beta * kl_slope(objective.kl, batch) * on(
            batch.adv.expand_as(batch.mask)
        )

    for name, k in sorted(
        kl.ESTIMATORS.items(), key=lambda item: item[0] != objective.kl
    ):
        if name != objective.kl:
            yield made(
                f"the KL term has the gradient of {name}, not of {objective.kl}: {OTHER_KL}",
                name,
                id=f"kl-gradient-of-{name}",
            )
        yield from (
            made(words.format(name), form(k), id=id) for id, words, _, form in KL_FORMS
        )
        for whose, old in (
            (("", False), (" of the old policy", True))
            if objective.level == "token"
            else ()
        ):

            def folded(
                batch: Rollouts, k: Callable[..., Any] = k, old: bool = old
            ) -> Tensor:
                """The weights where the KL term is subtracted from the advantages."""
                kl = sg(
                    _of(k, batch.but(logp=batch.logp_old) if old else batch, batch.mask)
                )
                w = _slope(
                    lambda lp, old, A, m: inside.fn(lp, old, A - beta * kl, **own_hp),
                    batch,
                )
                return _in_place_of_fn(objective, plain, w, batch)

            yield fault(
                f"the KL term ({name}){whose} is folded into the advantage, without a gradient of its own",
                "term",
                id="kl-of-old-policy-in-advantage" if old else "kl-in-advantage",
                weigh=folded,
            )
    for kl_fault in known_of("kl"):
        yield made(
            f"the KL term: {kl_fault.words}",
            lambda x, ref, old, mu, f=kl_fault.change: f(x, ref),
            id=kl_fault.id,
        )
    for x in CLAMPED:
        yield made(
            f"the KL term is clamped at {x:g}, or left out beyond it",
            lambda lp, ref, old, mu, x=x: kl.per_token(
                objective.kl, lp, ref, old
            ).clamp(-x, x),
            id="kl-clamped",
        )
        yield made(
            f"the KL term's log-ratio is clamped to ±{x:g}, or the term is left out beyond it",
            lambda lp, ref, old, mu, x=x: kl.per_token(
                objective.kl, lp, lp - (lp - ref).clamp(-x, x), old
            ),
            id="kl-log-ratio-clamped",
        )
    for said, on in (
        ("A > 0", lambda A: A > 0),
        ("A <= 0", lambda A: A <= 0),
        ("A < 0", lambda A: A < 0),
        ("A is not 0", lambda A: A != 0),
    ):
        part = partial(only_where, on=on)
        id = f"kl-only-where-{SIGN_IDS[said]}"
        yield fault(
            f"the KL term is there only where {said}", "term", id=id, weigh=part
        )


# a distance from a ratio of 1, or of its logarithm from 0, that none has
UNBOUNDED = 1e6
DROPPED = {
    "A < 0": "negative-advantages-dropped",
    "A > 0": "positive-advantages-dropped",
}
LONGEST = "log-ratio-over-longest-response"  # the id of a fault
CLAMPED = (10.0, 5.0, 20.0, 1.0, 0.1)  # where KL terms are clamped
CAPS = (math.inf, 1.0, 2.0, 3.0, 5.0, 10.0)  # of importance weights, as people set them


def _of(k: Callable[..., Any], batch: Rollouts, mask: Tensor) -> Tensor:
    assert batch.logp_ref is not None
    return k(torch.where(mask, batch.logp, 0), torch.where(mask, batch.logp_ref, 0))


def clamp_faults(
    objective: Objective, hp: dict[str, Any], low: float, high: float, said: str
) -> Iterator[LossFault]:
    """log r, of the response or of each token, clamped: before its gradient, where A <=
    0 alone, or in a constant.
    """
    j, wide = (
        term_of(objective, hp),
        {"sequence_mean": mean_t, "sequence_product": sum_t}.get(objective.level),
    )

    def of_response(lp: Tensor, old: Tensor, m: Tensor) -> Tensor:
        assert wide is not None
        x = wide(where(m, lp - old, 0), m)[:, None]
        n = m.sum(-1, keepdim=True)
        return lp + (x.clamp(low, high) - x) / (
            n if objective.level == "sequence_product" else 1
        )

    def of_token(lp: Tensor, old: Tensor, m: Tensor) -> Tensor:
        """log π_θ such that the token's log-ratio is clamped."""
        return old + (lp - old).clamp(low, high)

    def below(
        lp: Tensor, old: Tensor, A: Tensor, m: Tensor, inside: Callable[..., Tensor]
    ) -> Tensor:
        """J with the clamp where A <= 0 alone."""
        return where(A > 0, j(lp, old, A, m), j(inside(lp, old, m), old, A, m))

    def held(batch: Rollouts, inside: Callable[..., Tensor]) -> Rollouts:
        """The batch with old_log_prob moved so that log r is the clamped one."""
        return batch.but(
            logp_old=batch.logp_old
            + batch.logp
            - inside(batch.logp, batch.logp_old, batch.mask)
        )

    clamped = [("log-ratio-clamped", "log r", of_token)]
    if wide:
        clamped.insert(
            0, ("response-log-ratio-clamped", "the response's log r", of_response)
        )
    for id, what, inside in clamped:
        words = f"{what} is clamped {said}"
        yield fault(
            words,
            "clip",
            id=id,
            J=lambda lp, old, A, m, f=inside: j(f(lp, old, m), old, A, m),
        )
        yield fault(
            f"{words} where A <= 0",
            "clip",
            id=f"{id}-where-a-negative",
            J=partial(below, inside=inside),
        )
        constant = partial(held, inside=inside)
        yield fault(
            f"{words} in a constant weight",
            "clip",
            id=f"{id}-in-constant",
            view=constant,
        )


def powered(objective: Objective, hp: dict[str, Any], k: float) -> Iterator[LossFault]:
    """The ratio to the power k, the factor seen on policy; without a ratio in the
    objective k is a plain factor.
    """
    if abs(k - 1) > 1e-5 and any(
        any(_ends(objective, hp, s)) != all(_ends(objective, hp, s))
        for s in ("lower", "upper")
    ):
        yield fault(
            f"the ratio is taken to the power {k:.5g}: every log-ratio is multiplied by it",
            "ratio",
            id="ratio-to-a-power",
            J=lambda lp, old, A, m: term_of(objective, hp)(
                old + k * (lp - old), old, A, m
            ),
        )


def _without_beta(hp: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in hp.items() if k != "beta"}


def cuts(lo: float, hi: float) -> tuple[tuple[str, Callable[..., Any]], ...]:
    return ("clipped", lambda r: clip(r, 1 - lo, 1 + hi)), (
        "truncated",
        lambda r: r.clamp(max=1 + hi),
    )


def term_of(objective: Objective, hp: dict[str, Any]) -> Term:
    """The objective's function, without the KL term and the sampler's correction.

    Args:
        objective: the objective.
        hp: its hyperparameters.

    Returns:
        A function (lp, lp_old, A, mask) -> J of each token or response.
    """
    objective, own_hp = _inside(objective, _without_beta(hp))
    return lambda lp, old, A, m: objective.unreduced(
        lp, old, A, m, torch.ones_like(lp), **own_hp
    )


def _ends(objective: Objective, hp: dict[str, Any], side: str) -> list[bool]:
    """Whether the objective's term has a gradient on that side of its clip: at a ratio
    of 1, and far beyond a bound.
    """
    lp = torch.tensor([[-0.01], [-21.0 if side == "lower" else -0.01]])
    old = torch.tensor([[-0.01], [-0.01]])
    old = old if side == "lower" else torch.tensor([[-0.01], [-21.0]])
    A = torch.full_like(lp, -1.0 if side == "lower" else 1.0)
    everything = torch.ones_like(lp, dtype=torch.bool)
    return (
        (_slope(term_of(objective, hp), Rollouts(lp, old, A, everything)) != 0)
        .flatten()
        .tolist()
    )


def by_token(x: Tensor, lp: Tensor) -> Tensor:
    """x, with the gradient of each token's own log-probability, as GSPO-token has it.

    Args:
        x: a value for each response or token, broadcast to lp.
        lp: log-probabilities, [B, T].

    Returns:
        The numbers of x, [B, T].
    """
    return sg(x) + lp - sg(lp)


def _without_the_rest(
    objective: Objective, hp: dict[str, Any], form: Callable[[Callable[..., Any]], Term]
) -> Iterator[LossFault]:
    """A smooth objective without what it has beside the ratio, or log π_θ: a penalty or
    a gate; or with that turned.
    """
    plain = _without_beta(hp)

    def rest(batch: Rollouts) -> Tensor:
        """The weights without the KL term."""
        return unit_weights(objective, batch, plain)

    for id, term, J in (
        ("ratio-term-alone", "r A", form(lambda r, A, lp: r * A)),
        ("log-prob-term-alone", "A log π_θ", form(lambda r, A, lp: A * lp)),
    ):
        words = f"the term is {term} alone: what else {objective.name} has is missing"
        yield fault(words, "objective", id=id, J=J)

        def turned(batch: Rollouts, J: Term = J) -> Tensor:
            alone = _in_place_of_fn(objective, plain, _slope(J, batch), batch)
            return _in_place_of_fn(
                replace(objective, sampler=None), hp, 2 * alone - rest(batch), batch
            )

        yield fault(
            f"what {objective.name} has beside {term} has the opposite sign",
            "objective",
            id=f"all-but-{id}-negated",
            weigh=turned,
        )


def _words_beyond(x: float, bound: float, how: str) -> str:
    """Words for a ratio beyond which no gradient is left: for both signs of A, but where
    x is beyond the bound from which on A > 0 has none anyway.
    """
    where_negative = "where A < 0 " if x >= bound else ""
    return (
        f"{where_negative}no gradient is left beyond r = {x:.6g}: {how}, or such tokens "
        "are left out"
    )


def _forms(
    objective: Objective,
    hp: dict[str, Any],
    has: Shape,
    bounds: list[float],
    lo: float,
    hi: float,
) -> Iterator[LossFault]:
    """The ratio is the objective's: a token's or a response's."""
    j = term_of(objective, hp)
    wide = objective.level in ("sequence_mean", "sequence_product")

    def log_r(lp: Tensor, old: Tensor, m: Tensor) -> Tensor:
        x = where(m, lp - old, 0)
        if wide:
            return {"sequence_mean": mean_t, "sequence_product": sum_t}[
                objective.level
            ](x, m)[:, None].expand_as(x)
        return x

    def ratio(lp: Tensor, old: Tensor, m: Tensor) -> Tensor:
        """r of each token, the response's where the objective's is."""
        return exp(log_r(lp, old, m))

    def ppo(r: Tensor, A: Tensor) -> Tensor:
        """PPO's term at this ratio."""
        return minimum(r * A, clip(r, 1 - lo, 1 + hi) * A)

    def form(f: Callable[..., Any]) -> Term:
        """J by a function of r, A and log π_θ."""
        return lambda lp, old, A, m: f(ratio(lp, old, m), A, lp)

    def made(
        kind: str, words: str, J: Callable[..., Any], id: str, **more: Any
    ) -> LossFault:
        """The fault that J is the objective."""
        return fault(words, kind, id=id, J=J, **more)

    def expanded(x: Tensor, m: Tensor, of: Callable[..., Tensor]) -> Tensor:
        """A number of each response, by `of`, on all its tokens."""
        return of(x, m).expand_as(x)

    def by_tokens(
        lp: Tensor, old: Tensor, A: Tensor, m: Tensor, wide_r: Callable[..., Tensor]
    ) -> Tensor:
        """PPO's term at the response's ratio, whose gradient is each token's own."""
        return ppo(exp(by_token(wide_r(lp - old, m), lp)), A)

    # a constant weight on log π_θ is what CISPO and its like are
    weighs = has.constant and has.is_bounded
    two_sided = any(0 < x < 1 for x in bounds)

    for said, cut in cuts(lo, hi) if weighs else ():
        yield made(
            "stop-gradient",
            f"beyond the cap no gradient is left: the {said} ratio multiplies A itself, or it masks log π",
            form(lambda r, A, lp, f=cut: f(r) * A),
            id=f"{said}-ratio-times-advantage",
        )
        for sign, on in (("A > 0", lambda A: A > 0), ("A < 0", lambda A: A < 0)):
            yield made(
                "clip",
                f"the weight is {said} only where {sign}",
                form(lambda r, A, lp, f=cut, on=on: sg(where(on(A), f(r), r)) * A * lp),
                id=f"{said}-only-where-{SIGN_IDS[sign]}",
            )
    if has.is_smooth:
        yield from _without_the_rest(objective, hp, form)
    for A0, sign_words, on in (
        (1.0, "A > 0", lambda A: A > 0),
        (-1.0, "A < 0", lambda A: A < 0),
    ):
        if not has.live[A0] and has.live[-A0] and objective.agg != "seq-mean":
            words = f"where {sign_words} there is the term of the other sign of A, though {objective.name} has none there"
            yield made(
                "clip",
                words,
                lambda lp, old, A, m, on=on: where(
                    on(A), -j(lp, old, -A, m), j(lp, old, A, m)
                ),
                id=f"term-of-other-sign-where-{SIGN_IDS[sign_words]}",
            )
    if has.has_minimum:
        yield made(
            "clip",
            "the ratio is clipped on both sides, whatever the sign of A: the minimum is missing",
            form(lambda r, A, lp: clip(r, 1 - lo, 1 + hi) * A),
            id="minimum-missing",
        )
        yield made(
            "clip",
            "the clip acts on the product r A, not on r: its bounds move with the size of A",
            form(lambda r, A, lp: minimum(r * A, clip(r * A, 1 - lo, 1 + hi))),
            id="product-clipped",
        )
        yield made(
            "clip",
            "the maximum is taken where the minimum belongs",
            form(lambda r, A, lp: maximum(r * A, clip(r, 1 - lo, 1 + hi) * A)),
            id="maximum-for-minimum",
        )

        def clipped_detached(r: Tensor, A: Tensor, lp: Tensor) -> Tensor:
            return minimum(r * A, sg(clip(r, 1 - lo, 1 + hi) * A))

        def unclipped_detached(r: Tensor, A: Tensor, lp: Tensor) -> Tensor:
            return minimum(sg(r * A), clip(r, 1 - lo, 1 + hi) * A)

        halves = "where the two are equal, half of the gradient is lost"
        words = f"the clipped term of the minimum is detached: {halves}"
        yield made("clip", words, form(clipped_detached), id="clipped-term-detached")
        words = f"the unclipped term of the minimum is detached: {halves}, and all of it elsewhere"
        yield made(
            "clip", words, form(unclipped_detached), id="unclipped-term-detached"
        )
        if objective.level == "sequence_mean":

            def by_sum(lp: Tensor, old: Tensor, A: Tensor, m: Tensor) -> Tensor:
                """The geometric mean of the ratios, cut where their product leaves the
                bounds.
                """
                S = exp(sum_t(where(m, lp - old, 0), m))[:, None].expand_as(A)
                return where(
                    (A > 0) & (S > 1 + hi) | (A < 0) & (S < 1 - lo),
                    0,
                    ratio(lp, old, m) * A,
                )

            yield made(
                "clip",
                "the bounds act on the product of the response's ratios, not on their mean",
                by_sum,
                id="bounds-on-product-of-ratios",
            )
        for sign, on in (("A > 0", lambda A: A > 0), ("A < 0", lambda A: A < 0)):
            yield made(
                "clip",
                f"where {sign} the maximum is taken where the minimum belongs",
                form(
                    lambda r, A, lp, on=on: where(
                        on(A), maximum(r * A, clip(r, 1 - lo, 1 + hi) * A), ppo(r, A)
                    )
                ),
                id=f"maximum-for-minimum-where-{SIGN_IDS[sign]}",
            )
        yield made(
            "clip",
            "A multiplies after the minimum: min(r, clip(r)) A, which bounds the wrong side where A < 0",
            form(lambda r, A, lp: minimum(r, clip(r, 1 - lo, 1 + hi)) * A),
            id="advantage-after-minimum",
        )
    no_ratio = made(
        "ratio",
        "log π_θ replaces the ratio where A <= 0 too",
        form(lambda r, A, lp: A * lp),
        id="log-prob-where-a-negative",
    )
    if has.free[1.0] and has.plain[-1.0]:  # as in UP
        yield no_ratio
        if has.bounded[-1.0, "below"] or has.bounded[-1.0, "above"]:
            id = "no-upper-bound-where-a-negative"
            side = "the ratio has no upper bound"
            if has.bounded[-1.0, "below"]:
                id = "no-lower-clip"
                side = "the clip has no lower side"
            yield made(
                "clip",
                f"{side} where A <= 0",
                form(lambda r, A, lp: where(A > 0, A * lp, r * A)),
                id=id,
            )
        yield made(
            "ratio",
            "the branches are exchanged: log π_θ where A < 0",
            form(
                lambda r, A, lp: where(
                    A < 0, A * lp, minimum(r * A, r.clamp(min=1 - lo) * A)
                )
            ),
            id="branches-exchanged",
        )
        yield made(
            "clip",
            "the tokens of A > 0 are clipped too, or left out beyond the bound",
            form(
                lambda r, A, lp: where(
                    A > 0,
                    A * lp * (r <= 1 + hi),
                    minimum(r * A, r.clamp(min=1 - lo) * A),
                )
            ),
            id="positive-tokens-clipped",
        )
        yield made(
            "ratio",
            "the ratio still multiplies A where A > 0: unclipped importance sampling, not UP",
            form(lambda r, A, lp: where(A > 0, r * A, ppo(r, A))),
            id="ratio-where-a-positive",
        )
    yield made(
        "ratio",
        "old_log_prob has no effect: every weight is as where the ratio is 1",
        lambda lp, old, A, m: A * lp,
        id="ratio-always-one",
    )
    if has.is_bounded:

        def trained(A: Tensor) -> Tensor:
            """A, or 0 where the objective does not train it."""
            return where(A > 0, A * has.live[1.0], A * has.live[-1.0])

        yield made(
            "clip",
            "no bound has an effect on the gradient: it is as if the ratio were not clipped",
            form(lambda r, A, lp: r * trained(A)),
            id="no-bound",
        )
        if has.free[1.0] or has.free[-1.0]:  # log π_θ there, as in TOPR

            def unbounded(r: Tensor, A: Tensor, lp: Tensor) -> Tensor:
                free = where(A > 0, A * has.free[1.0], A * has.free[-1.0])
                return (free + sg(r) * (trained(A) - free)) * lp

            yield made(
                "clip",
                "no bound has an effect on the gradient: it is as if the ratio were not clipped",
                form(unbounded),
                id="no-bound",
            )
    yield made(
        "ratio",
        INVERTED_RATIO,
        lambda lp, old, A, m: ppo(ratio(old, lp, m), A),
        id="ratio-inverted",
    )
    if objective.level == "token" and not objective.reads:
        yield made(
            "ratio",
            INVERTED_RATIO,
            lambda lp, old, A, m: objective.surrogate(old, lp, A, **_without_beta(hp)),
            id="ratio-inverted",
        )
    if c := hp.get("c"):
        yield made(
            "clip",
            "the dual clip takes the other one of its two terms: min(J, c A) where A < 0",
            form(lambda r, A, lp: where(A < 0, minimum(ppo(r, A), c * A), ppo(r, A))),
            id="other-term-of-dual-clip",
        )
    yield made(
        "advantage",
        "A enters by its absolute value",
        lambda lp, old, A, m: j(lp, old, A.abs(), m),
        id="advantage-absolute",
    )
    yield made(
        "advantage",
        "A enters by its sign alone",
        lambda lp, old, A, m: j(lp, old, A.sign(), m),
        id="advantage-sign-alone",
    )
    yield made(
        "advantage",
        "exp(A) replaces A",
        lambda lp, old, A, m: j(lp, old, A.exp(), m),
        id="advantage-exponentiated",
    )
    yield made(
        "advantage",
        "tanh(A) replaces A",
        lambda lp, old, A, m: j(lp, old, A.tanh(), m),
        id="advantage-tanh",
    )
    yield made(
        "advantage",
        "A enters squared",
        lambda lp, old, A, m: j(lp, old, A * A.abs(), m),
        id="advantage-squared",
    )
    for sign, clamp in (("A < 0", {"min": 0.0}), ("A > 0", {"max": 0.0})):
        yield made(
            "advantage",
            f"no token with {sign} has a gradient: its advantage is dropped, its term is detached, or its term is constant",
            lambda lp, old, A, m, clamp=clamp: j(lp, old, A.clamp(**clamp), m),
            id=DROPPED[sign],
        )
    if has.branches:
        yield made(
            "advantage",
            "the branches of the two signs of A are exchanged",
            lambda lp, old, A, m: -j(lp, old, -A, m),
            id="signs-exchanged",
        )
    for side, sign_words, range_words, clamp in (
        ("lower", "A < 0", f"above {1 + hi:g} where A > 0", {"max": 1 + hi}),
        ("upper", "A > 0", f"below {1 - lo:g} where A < 0", {"min": 1 - lo}),
    ):
        near_end, far_end = _ends(objective, hp, side)
        said = f"the clip has no {side} side"
        if not near_end:
            said = f"where {sign_words} the ratio multiplies A, though {objective.name} has no term there"
        elif far_end:  # the objective's has none either
            said = f"the ratio multiplies A, without a bound where {sign_words}, without a gradient {range_words}"
        yield made(
            "clip",
            said,
            form(lambda r, A, lp, clamp=clamp: minimum(r * A, r.clamp(**clamp) * A)),
            id=f"no-{side}-clip",
        )
    if has.is_pessimistic:

        def one_sided(on: Callable[..., Any]) -> Term:
            """J that is clipped only where A is so."""
            return form(lambda r, A, lp: where(on(A), ppo(r, A), r * A))

        yield made(
            "clip",
            "only positive advantages are clipped",
            one_sided(lambda A: A > 0),
            id="only-positive-clipped",
        )
        yield made(
            "clip",
            "only negative advantages are clipped",
            one_sided(lambda A: A < 0),
            id="only-negative-clipped",
        )
    yield made(
        "clip",
        "the clip is that of PPO on both sides",
        form(lambda r, A, lp: ppo(r, A)),
        id="ppo-clip",
    )
    for id, said, of in (
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
            "arithmetic-mean-of-ratios",
            "the response's ratio is the mean of its tokens' ratios, not their geometric mean",
            lambda x, m: mean_t(exp(x), m).log()[:, None],
        ),
    ):
        wide_r = partial(expanded, of=of)
        longest = id == LONGEST  # a few rows have another one
        yield made(
            "ratio",
            said,
            lambda lp, old, A, m, f=wide_r: ppo(exp(f(lp - old, m)), A),
            id=id,
            whole=longest,
        )
        if wide:
            yield made(
                "ratio", said, partial(by_tokens, wide_r=wide_r), id=id, whole=longest
            )
    for said, over in (("averaged", lambda m: m.sum()), ("summed", lambda m: 1)):
        words = f"the log-ratio is {said} over the whole batch, not over each response"
        for way in (lambda x, lp: x, by_token):

            def shared(
                batch: Rollouts,
                over: Callable[..., Any] = over,
                way: Callable[..., Any] = way,
            ) -> Tensor:
                """The weights with one ratio for all tokens."""
                f = FACTORS[declared_aggregation(objective)](batch)[:, None]

                def log_r_of_all(lp: Tensor, old: Tensor, m: Tensor) -> Tensor:
                    """One log-ratio for every token of the batch."""
                    return (where(m, lp - old, 0).sum() / over(m)).expand_as(lp)

                w = (
                    _slope(
                        lambda lp, old, A, m: (
                            f * ppo(exp(way(log_r_of_all(lp, old, m), lp)), A)
                        ),
                        batch,
                    )
                    / f
                )
                return _in_place_of_fn(objective, hp, w, batch)

            yield fault(
                words,
                "ratio",
                id=f"log-ratio-{said}-over-batch",
                weigh=shared,
                whole=True,
            )

    def multiplied(batch: Rollouts) -> Tensor:
        """The weights with the product of a response's ratios."""
        w = _slope(
            lambda lp, old, A, m: ppo(
                exp(sum_t(where(m, lp - old, 0), m))[:, None].expand_as(lp), A
            ),
            batch,
        )
        return _in_place_of_fn(
            objective, hp, w / batch.mask.sum(-1, keepdim=True), batch
        )

    words = "the product of the response's ratios replaces the token's: one term for each response"
    yield fault(words, "ratio", id="product-for-token-ratio", weigh=multiplied)
    yield made(
        "stop-gradient",
        "the whole term is detached: a constant weight on log π_θ",
        lambda lp, old, A, m: sg(j(lp, old, A, m)) * lp,
        id="term-detached",
    )
    if has.is_bounded:
        words = "the bounds are taken as absolute, [eps_low, eps_high], not as 1 - eps_low and 1 + eps_high"
        yield made(
            "clip",
            words,
            form(lambda r, A, lp: minimum(r * A, clip(r, lo, max(lo, hi)) * A)),
            id="bounds-absolute",
        )
        if objective.level == "custom":
            of_token = " of each token: the ratio of the token replaces the response's"
        else:
            of_token = ""
        yield made(
            "clip",
            f"the bounds are on log r: [-eps_low, eps_high]{of_token}",
            form(lambda r, A, lp: minimum(r * A, exp(r.log().clamp(-lo, hi)) * A)),
            id="bounds-on-log-ratio",
        )
    yield made(
        "ratio",
        # a constant beside log r has no gradient
        "log r, or 1 + log r, replaces the ratio: the weight is A itself, up to "
        f"log r = {hi:g} where A > 0 and down to log r = {-lo:g} where A < 0",
        lambda lp, old, A, m: minimum(
            (x := log_r(lp, old, m)) * A, x.clamp(-lo, hi) * A
        ),
        id="log-ratio-for-ratio",
    )
    for x in (*CAPS, *bounds):
        cap = f", at most {x:g}" if x < math.inf else ""
        yield made(
            "ratio",
            f"the term is multiplied by the ratio once more, as a constant{cap}",
            lambda lp, old, A, m, x=x: (
                sg(ratio(lp, old, m).clamp(max=x)) * j(lp, old, A, m)
            ),
            id="ratio-twice",
        )
    yield made(
        "ratio",
        "where A > 0 the ratio to π_old replaces log π_θ",
        form(lambda r, A, lp: where(A > 0, r * A, ppo(r, A))),
        id="ratio-where-a-positive",
    )
    yield no_ratio
    constant = form(lambda r, A, lp: sg(clip(r, 1 - lo, 1 + hi)) * A * lp)
    if weighs:
        yield made(
            "clip",
            "the weight is bounded on both sides: clip(r, 1 - eps_low, 1 + eps_high)",
            constant,
            id="weight-clipped",
        )
    else:
        said = "stop-gradient: the clipped ratio is a constant weight on log π_θ, though it should carry the gradient"
        yield made("stop-gradient", said, constant, id="weight-clipped")
    for said, cut in cuts(lo, hi):
        yield made(
            "stop-gradient",
            f"stop-gradient: the {said} ratio on log π_θ is not detached",
            form(lambda r, A, lp, f=cut: f(r) * A * lp),
            id=f"{said}-ratio-not-detached",
            meant="cispo_verl" if two_sided else "cispo",
        )
    if has.is_bounded:
        yield made(
            "ratio",
            "the ratio is missing from the weight: 1 in its place inside the bounds",
            form(lambda r, A, lp: A * lp * where(A > 0, r <= 1 + hi, r >= 1 - lo)),
            id="ratio-missing-inside-bounds",
        )
    yield made(
        "stop-gradient",
        "stop-gradient: exp(log π_θ) without an anchor",
        lambda lp, old, A, m: where(A > 0, A * exp(lp), j(lp, old, A, m)),
        id="exponential-without-anchor",
    )
    for x in sorted(
        {round(abs(float(torch.tensor(v).log())), 4) for v in bounds if v > 0}
    ):
        if x >= 0.05:  # below, a bound of the response's ratio, no guard
            yield made(
                "clip",
                f"no token has a gradient where |log r| > {x:g}: log r is clamped there, or the term is left out",
                lambda lp, old, A, m, x=x: j(old + (lp - old).clamp(-x, x), old, A, m),
                id="log-ratio-clamped",
            )
    for x in bounds:
        yield made(
            "clip",
            _words_beyond(x, 1 + hi, "the ratio is capped there"),
            form(lambda r, A, lp, x=x: ppo(r.clamp(max=x), A)),
            id="ratio-capped",
        )
        yield made(
            "clip",
            _words_beyond(x, 0.0, f"a dual clip at c = {x:.6g}"),
            form(lambda r, A, lp, x=x: where(A < 0, ppo(r.clamp(max=x), A), ppo(r, A))),
            id="dual-clip",
        )
