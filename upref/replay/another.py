# SPDX-License-Identifier: Apache-2.0
"""Which other objective has the recorded gradient, where it is not that of the one that
was named.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from upref import registry
from upref.definition import Objective
from upref.errors import InputError
from upref.replay.checks import StepChecks
from upref.replay.findings import ReplayFinding
from upref.replay.normalizer import ROUNDING, normalizer
from upref.replay.schema import RecordedBatch
from upref.replay.terms import OR_ELSE, objective_as_run

# causes of the notes that compare the logged number, or the gradient, with those of the
# named objective: the failure replaces them
NOTES_ON_NAMED = (
    "beside_zero",
    "divided",
    "gradient_other",
    "only_here",
    "other_sign",
    "times",
    "unexplained",
)


def sums_with_gradient(
    batch: RecordedBatch, objective: Objective, names: Sequence[str], hp: dict[str, Any]
) -> tuple[tuple[str, str], ...]:
    """Name the sums of other objectives' terms whose gradient is the recorded one.

    In bfloat16 none is named, because its rounding hides small differences.

    Args:
        batch: a step with the column grad.
        objective: the one that was named.
        names: of the others.
        hp: hyperparameters; each objective takes those that it has.

    Returns:
        (sum, objective), for example (("token-mean", "up_dapo"),).
    """
    sums: list[tuple[str, str]] = []
    for name in names:
        other = objective_as_run(name, hp)
        if other.name == objective.name:
            continue
        own_hp = {k: v for k, v in hp.items() if k in other.hyperparameters}
        try:
            found = normalizer(batch, other, **own_hp)
        except InputError:
            continue  # a column that it needs is missing
        if found.found and found.tolerance <= ROUNDING:
            sums += [(words, name) for words in found.found.split(OR_ELSE)]
    return tuple(sums)


def settle_objective(
    steps: Sequence[StepChecks], hp: dict[str, Any], objective: Objective
) -> list[StepChecks]:
    """Let the gradient fail where at every step at which it is not the named
    objective's it is that of one and the same other sum.

    It stays a note where it is also the gradient of an objective without a ratio: the
    trainer may have used the named one with r = 1.

    Args:
        steps: of one run; `same_gradient` is what `sums_with_gradient` returned.
        hp: hyperparameters of the named objective.
        objective: the one that was named.

    Returns:
        The steps in their order. A failure "gradient_of_another" replaces the notes of
        each step that fails.
    """
    wrong = [s for s in steps if s.has_other_gradient]
    if not wrong:
        return list(steps)
    shared = [
        pair
        for pair in wrong[0].same_gradient
        if all(pair in step.same_gradient for step in wrong)
    ]
    if not shared or any(_has_no_ratio(name) for _, name in shared):
        return list(steps)
    used = {k: v for k, v in objective.resolve(hp).items() if v is not None}
    settings = ", ".join(f"{k}={v:g}" for k, v in used.items())
    numbers = {
        "objective": objective.name,
        "settings": f" at {settings}" if settings else "",
        "found": _sums_in_words(shared),
    }
    settled = []
    for step in steps:
        if step.has_other_gradient:
            step = _with_failure(step, numbers)
        settled.append(step)
    return settled


def _has_no_ratio(name: str) -> bool:
    """Return whether the weights of an objective are the same at the ratios 0.5, 1 and
    1.5, for A of either sign. False for one whose weight needs other inputs.
    """
    objective = registry.get(name)
    if objective.reads or objective.level == "custom":
        return False
    r = torch.tensor([0.5, 1.0, 1.5])
    A = torch.tensor([[1.0], [-1.0]])
    weights = objective.weight(r, A)
    return bool((weights == weights[:, :1]).all())


def _sums_in_words(sums: Sequence[tuple[str, str]]) -> str:
    """Name sums, each once with the objectives of whose terms it is: "token-mean of the
    terms of dapo or up_dapo".

    Args:
        sums: (sum, objective), as `sums_with_gradient` returns them.
    """
    objectives: dict[str, list[str]] = {}
    for words, name in sums:
        objectives.setdefault(words, []).append(name)
    return OR_ELSE.join(
        f"{words} of the terms of {' or '.join(names)}"
        for words, names in objectives.items()
    )


def _with_failure(step: StepChecks, numbers: dict[str, Any]) -> StepChecks:
    """Return the step with the failure that its gradient is another objective's, in
    place of the notes of NOTES_ON_NAMED.
    """
    assert step.loss is not None
    (other,) = (f for f in step.loss.findings if f.cause == "gradient_other")
    counts = {k: other.numbers[k] for k in ("tokens", "trained")}
    failure = ReplayFinding("loss", "failure", "gradient_of_another", numbers | counts)
    kept = [f for f in step.loss.findings if f.cause not in NOTES_ON_NAMED]
    return replace(step, loss=replace(step.loss, findings=(failure, *kept)))
