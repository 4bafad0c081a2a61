# SPDX-License-Identifier: Apache-2.0
"""Known faults of an objective: the search for the one that gives the weights of a
loss which no objective gives.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upref.identification.deviations import (
    not_as_claimed,
    of_factor,
    of_kl_term,
)
from upref.identification.explanation import Explanation
from upref.identification.identification import Match
from upref.identification.subject import Subject
from upref.registry import Objective, get
from upref.rollouts import Rollouts
from upref.verify.explain import fits, reproduces, two_gradients
from upref.verify.factors import aggregation_words, declared_aggregation
from upref.verify.faults import known
from upref.verify.faults.losses import LossFault, fault
from upref.verify.measure import LossCase
from upref.verify.probe import RANDOM_BATCHES, Measured

# aggregation -> the objective that has PPO's clip with it
OBJECTIVE_OF_MEAN = {"seq-mean-token-mean": "grpo", "seq-mean-token-sum": "dr_grpo"}
SAME_WIDTH = 1e-6  # two widths of a clip are equal up to this


@dataclass(frozen=True)
class Base:
    """An objective in which a fault is searched.

    Attributes:
        objective: the objective.
        clip: the widths of its clip that the jumps of the loss suggest.
        is_mirrored: the bounds are those of 1 / r, because π_θ and π_old may be
            exchanged.
    """

    objective: Objective
    clip: dict[str, float]
    is_mirrored: bool = False


@dataclass(frozen=True)
class Pitfall:
    """A known fault that gives the weights of a loss.

    Attributes:
        fault: the fault.
        base: the objective that has it.
        case: the loss beside that objective.
        factor: of every weight.
    """

    fault: LossFault
    base: Base
    case: LossCase
    factor: float


def explain_pitfall(subject: Subject) -> Explanation | None:
    """Return the explanation of a loss with a known fault, of an objective with the clip
    that the jumps suggest, else of the nearest one; None where no fault fits.

    Args:
        subject: the loss.
    """
    pitfall = _find_pitfall(subject)
    if pitfall is None:
        return None
    known_fault, case = pitfall.fault, pitfall.case
    match = _match_of(subject, pitfall)

    def claimed_weights(batch: Rollouts) -> Tensor:
        """Return the weights of the reference with the fault, times the factor."""
        weights = known_fault.change.weights(case.objective, case.hp, batch)
        return pitfall.factor * (weights + subject.box.kl_weights(batch))

    why = (
        known_fault.cause,
        *of_factor(subject, pitfall.factor),
        *of_kl_term(subject, match),
        *not_as_claimed(subject, case, claimed_weights),
    )
    return Explanation(subject, [match], why)


def _find_pitfall(subject: Subject) -> Pitfall | None:
    """Find the first known fault of the first base that gives the weights of the loss.
    None where none does, and where the objective without a fault gives them too: the
    loss is then right on all of this, and wrong elsewhere.
    """
    box = subject.box
    compared = subject.batches[:2] + subject.batches[-RANDOM_BATCHES:]
    batch, weights_of = _stack(compared)
    for base in _bases(subject):
        case = _case_of(subject, base)
        # The factor that was measured on policy may be the fault's own: an inverted ratio
        # changes the sign there. So a fault that needs no factor goes first.
        weights_with_factor = weights_of(case)
        for factor in dict.fromkeys((1.0, box.scale)):
            found = weights_with_factor / factor - box.kl_weights(batch)
            faults = _faults_of(base, case, batch, subject.bounds)
            known_fault = reproduces(faults, case, batch, found, batch.mask)
            if known_fault is None:
                continue
            no_fault = fault("", known_fault.kind)
            if fits(no_fault, case, batch, found, batch.mask, case.tol):
                return None
            return Pitfall(known_fault, base, case, factor)
    return None


# ---- the objectives to search --------------------------------------------------------
def clip_widths(bounds: list[float]) -> tuple[float, float]:
    """Return the widths below and above 1 of a clip with these bounds, ascending. Where
    one bound is absent, its width is that of the other; where both are absent, 0.

    Args:
        bounds: ratios at which the weight jumps.
    """
    # the bounds nearest to 1: a guard against overflow is farther away, beyond 10
    low = next((1 - bound for bound in reversed(bounds) if 0 < bound < 1), None)
    high = next((bound - 1 for bound in bounds if 1 < bound < 10), None)
    return low or high or 0.0, high or low or 0.0


def _bases(subject: Subject) -> Iterator[Base]:
    """Yield the objectives to search for a fault: first with the bounds of 1 / r, last
    the nearest objective.
    """
    low, high = clip_widths(subject.bounds)
    if high and 0 < low < 1:
        mirrored_low = 1 - 1 / (1 + high)
        mirrored_high = 1 / (1 - low) - 1
        for objective, clip in _clipped(subject, mirrored_low, mirrored_high):
            yield Base(objective, clip, is_mirrored=True)
    for objective, clip in _clipped(subject, low, high):
        yield Base(objective, clip)
    yield Base(get(subject.nearest.name), _two_widths(low, high))


def _clipped(
    subject: Subject, low: float, high: float
) -> Iterator[tuple[Objective, dict[str, float]]]:
    """Yield the objectives that may have a clip of these widths, with its
    hyperparameters: one with a single width, where the two are equal or there is no
    clip, then DAPO and GSPO.
    """
    if not low or abs(low - high) < SAME_WIDTH:
        objective = get(OBJECTIVE_OF_MEAN.get(subject.box.agg, "ppo_clip"))
        yield objective, {"eps": low} if low else {}
    yield get("dapo"), _two_widths(low, high)
    yield get("gspo"), _two_widths(low, high)


def _two_widths(low: float, high: float) -> dict[str, float]:
    """Return the widths as hyperparameters, none where there is no clip."""
    return {"eps_low": low, "eps_high": high} if low else {}


def only_those_of(objective: Objective, hp: dict[str, float]) -> dict[str, float]:
    """Return those of the hyperparameters that the objective has.

    Args:
        objective: the objective.
        hp: values by name.
    """
    own = objective.hyperparameters
    return {name: value for name, value in hp.items() if name in own}


def _case_of(subject: Subject, base: Base) -> LossCase:
    """Return the loss beside an objective with this clip and without its KL term."""
    box = subject.box
    resolved = base.objective.resolve(only_those_of(base.objective, base.clip))
    return LossCase(
        box.loss,
        base.objective,
        {name: value for name, value in resolved.items() if name != "beta"},
        box.agg or declared_aggregation(base.objective),
        tol=box.tol,
        edges=box.case.edges,
    )


def _faults_of(
    base: Base, case: LossCase, batch: Rollouts, bounds: list[float]
) -> Iterator[LossFault]:
    """Yield the faults to try on a base. Its bounds are mirrored by a wrong ratio alone,
    so a mirrored base is tried with the faults of the ratio.
    """
    yield from two_gradients(case, batch)
    seen_bounds = [] if base.is_mirrored else bounds
    for known_fault in known("losses", case.objective, case.hp, seen_bounds):
        if known_fault.kind == "ratio" or not base.is_mirrored:
            yield known_fault


def _match_of(subject: Subject, pitfall: Pitfall) -> Match:
    """Return the match of an objective with a fault. It shows the clip, and the KL
    coefficient where the KL term is the objective's own.
    """
    box = subject.box
    clip = pitfall.base.clip
    if pitfall.fault.meant:
        objective = get(pitfall.fault.meant)
        low, high = clip_widths(subject.bounds)
        shown = only_those_of(objective, {"eps_low": low, "eps_high": high})
    else:
        objective = pitfall.base.objective
        hp = pitfall.case.hp
        shown = {name: hp[name] for name in hp if clip.get(name) is not None}
    same_kl = subject.has_kl_of(objective)
    if box.kl and same_kl:
        shown = shown | {"beta": box.beta}
    return Match(
        objective.name,
        shown,
        subject.aggregation or aggregation_words(pitfall.case.agg),
        subject.has_aggregation_of(objective, pitfall.case.agg),
        same_kl,
        distance=0.0,
        mean=0.0,
        length=subject.length,
    )


# ---- several batches as one ----------------------------------------------------------
# what the padding of a narrower batch holds
PADDING: dict[str, Any] = {
    "logp": -1.0,
    "logp_old": -1.1,
    "logp_ref": -1.2,
    "entropy": 1.0,
    "mask": False,
}


def _stack(measured: list[Measured]) -> tuple[Rollouts, Callable[[LossCase], Tensor]]:
    """Return batches of several widths as one, padded on the right, and the function
    from a case to the loss's weights on it, [B, T].
    """
    batches = [one.batch for one in measured]
    T = max(batch.mask.shape[1] for batch in batches)

    def widened(x: Tensor, padding: Any) -> Tensor:
        """Return the tensor padded on the right to the width of the widest batch."""
        return torch.nn.functional.pad(x, (0, T - x.shape[1]), value=padding)

    stacked: dict[str, Any] = {
        name: torch.cat([widened(getattr(batch, name), padding) for batch in batches])
        for name, padding in PADDING.items()
    }
    # the padding of a response has its advantage
    A = [
        widened(batch.adv, 0.0).where(widened(batch.mask, False), batch.adv[:, :1])
        for batch in batches
    ]

    def weights_of(case: LossCase) -> Tensor:
        """Return the gradients that were measured, without the aggregation of a case."""
        weights = [one.gradient / case.factors(one.batch) for one in measured]
        return torch.cat([widened(w, 0.0) for w in weights])

    return Rollouts(adv=torch.cat(A), **stacked), weights_of
