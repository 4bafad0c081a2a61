# SPDX-License-Identifier: Apache-2.0
"""Objectives whose weights depend on the whole batch or on groups: no curve of single
tokens shows them, so they are compared on whole batches, at the values of papers.
"""

import contextlib
from dataclasses import replace
from typing import Any

from torch import Tensor

from upref.errors import InputError
from upref.identification.explanation import Explanation
from upref.identification.identification import Match
from upref.identification.subject import Subject
from upref.registry import Objective, get, names
from upref.rollouts import Rollouts
from upref.verify.factors import declared_aggregation
from upref.verify.faults.targets import ETAS
from upref.verify.measure import LossCase
from upref.verify.probe import RANDOM_BATCHES
from upref.weights.batches import on_policy_batch, random_batches

LEAST_FACTOR_APART = 1.25  # the factor between two values that batches must tell apart
Answers = list[
    tuple[Rollouts, Tensor]
]  # batches that the loss takes, and its gradients


def explain_coupled(subject: Subject) -> Explanation | None:
    """Return the explanation of a loss whose weights depend on whole batches or on
    groups; None where no such objective fits.

    Args:
        subject: the loss.
    """
    answers = _measure_gradients(subject)
    objectives = [get(name) for name in names() if get(name).batch_coupled]
    found = (_match_of(subject, objective, answers) for objective in objectives)
    matches = list(filter(None, found))
    if not matches:
        return None
    not_checked = tuple(undetermined(matches[0]))
    return Explanation(subject, matches, not_checked=not_checked)


def _measure_gradients(subject: Subject) -> Answers:
    """Return the batches that the loss takes, of one on policy and RANDOM_BATCHES
    random ones, each with its gradient; those that it refuses are left out.
    """
    case = subject.box.case
    batches = [
        case.ready(on_policy_batch()),
        *map(case.visible_batch, random_batches(0, RANDOM_BATCHES, True)),
    ]
    answers = []
    for batch in batches:
        with contextlib.suppress(InputError):
            answers.append((batch, case.gradient(batch)))
    return answers


def _match_of(subject: Subject, objective: Objective, answers: Answers) -> Match | None:
    """Return the match of an objective whose weights, at its defaults or at one of
    ETAS, are those of the loss on all of these batches; None where it has none such, or
    fewer than half of the batches could be compared.
    """
    box = subject.box
    values: list[dict[str, Any]] = [{}]
    if "eta" in objective.hyperparameters:
        values += [{"eta": eta} for eta in ETAS]
    for hp in values:
        agg = declared_aggregation(objective)
        resolved = objective.resolve(hp)
        case = LossCase(box.loss, objective, resolved, agg, tol=box.tol)
        errors = [
            case.weight_error(batch, gradient / case.factors(batch)).max().item()
            for batch, gradient in answers
        ]
        if len(errors) > RANDOM_BATCHES / 2 and max(errors) <= 10 * box.tol:
            return Match(
                objective.name,
                {k: v for k, v in case.hp.items() if _is_determined(case, k, answers)},
                objective.agg,
                own=True,
                same_kl=not box.kl,
                distance=max(errors),
                mean=0.0,
            )
    return None


def _is_determined(case: LossCase, key: str, answers: Answers) -> bool:
    """Tell whether the weights on these batches differ at a larger and at a smaller
    value of the hyperparameter; of 0, at 1 alone. False for beta and for None.
    """
    value = case.hp[key]
    if key == "beta" or value is None:
        return False

    def differs(other: float) -> bool:
        """Tell whether the weights of some batch differ at this value."""
        changed = replace(case, hp=case.hp | {key: other})
        return any(
            not changed.expected(batch).equal(case.expected(batch))
            for batch, _ in answers
        )

    if not value:
        return differs(1)
    return differs(value * LEAST_FACTOR_APART) and differs(value / LEAST_FACTOR_APART)


def undetermined(match: Match) -> list[str]:
    """Return one sentence on the hyperparameters whose value no batch shows; [] where
    there is none.

    Args:
        match: an objective with those that batches show.
    """
    defaults = get(match.name).hyperparameters
    names = [
        name
        for name, default in defaults.items()
        if name not in match.hp and name != "beta" and default is not None
    ]
    return [f"{', '.join(names)}: these batches do not tell the value"] if names else []
