# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a loss whose weights are those of an objective: its factor, its
aggregation, its KL term, its parts, and its weights on unusual inputs.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from upref.aggregation import AGGREGATIONS, Totals
from upref.identification.identification import Match
from upref.identification.subject import Subject
from upref.registry import get
from upref.rollouts import Rollouts
from upref.verify.explain import reproduces, two_gradients
from upref.verify.factors import aggregation_words
from upref.verify.faults.losses import LossFault, words_for_other_kl
from upref.verify.finding import Cause
from upref.verify.measure import LossCase, unit_weights
from upref.verify.oracles.numerics import clamps
from upref.verify.oracles.side_effects import in_training
from upref.verify.oracles.unusual import stress_findings
from upref.verify.render import describe_pair
from upref.verify.report import UNKNOWN, Finding

# the keys of upref.weights.stress.AXES on which a loss is tested
AXES_COMPARED = ("ratios", "advantages", "certain tokens", "lengths")
MICRO_BATCHES = 4  # into which a batch is split
ROWS_OF_PARTS = 8  # TRL's micro-batches are equal: the rows are a multiple of this
MEAN_OF_PARTS = Cause(
    "the mean is taken of each micro-batch: the gradients of parts do not add up to the batch's"
)
MASKED_TRAINED = Cause("a gradient flows into masked slots")
PARTS_TOLERANCE = 1e-5  # of the largest gradient, by which the sum of parts may be off


def find_deviations(subject: Subject, match: Match) -> list[Cause]:
    """Return what is wrong with a loss whose weights are those of a match: beside the
    weights, and at the first unusual input that shows a difference; [] if nothing is.

    Args:
        subject: the loss.
        match: the objective that fits.
    """
    wrong = beside_weights(subject, match)
    if match.own and not wrong:
        return on_unusual_inputs_as_checked(subject, match)
    return [*wrong, *on_unusual_inputs(subject, match)]


def beside_weights(subject: Subject, match: Match) -> list[Cause]:
    """Return what is wrong with a loss on ordinary inputs, where its weights are right.

    Args:
        subject: the loss.
        match: the objective that fits.
    """
    box = subject.box
    wrong = []
    second_gradient = _second_gradient(subject, match)
    # where two gradients are added up, they explain the factor
    factor = math.copysign(1.0, box.scale) if second_gradient else box.scale
    wrong += of_factor(subject, factor)
    if second_gradient:
        wrong.append(second_gradient.cause)
    if box.agg and box.agg not in AGGREGATIONS:
        wrong.append(Cause(f"aggregated by {aggregation_words(box.agg)}"))
    wrong += of_kl_term(subject, match)
    wrong += _of_masked_slots(subject)
    in_training_mode = in_training.findings(subject.case_of(match))
    wrong += [Cause(finding.regime) for finding in in_training_mode]
    if box.loss.micro_batchable and not get(match.name).batch_coupled:
        wrong += _of_micro_batches(subject)
    return wrong


def of_factor(subject: Subject, factor: float) -> list[Cause]:
    """Return what is wrong with a factor of every weight.

    Args:
        subject: the loss. The factor of one whose aggregation divides by a length is
            right.
        factor: the factor.
    """
    wrong = []
    if factor < 0:
        wrong.append(
            Cause("the sign is flipped: J is returned where a loss, -J, should be")
        )
    if abs(factor) != 1 and not subject.divides_by_length:
        wrong.append(
            Cause(f"every weight is {abs(factor):.7g} times what it should be")
        )
    return wrong


def of_kl_term(subject: Subject, match: Match) -> list[Cause]:
    """Return that the KL term is not the objective's, if so.

    Args:
        subject: the loss.
        match: the objective that fits.
    """
    box = subject.box
    if not box.kl or match.same_kl:
        return []
    return [Cause(words_for_other_kl(get(match.name), box.beta, box.kl))]


def _second_gradient(subject: Subject, match: Match) -> LossFault | None:
    """Return the fault that the loss's own .backward() leaves a gradient beside that of
    the loss that it returns; None where it leaves none, or none that is known.
    """
    if not subject.loss.returns_live:
        return None
    case = subject.case_of(match)
    batch = subject.first_batch
    faults = two_gradients(case, batch)
    return reproduces(faults, case, batch, case.weights(batch), batch.mask)


def _of_masked_slots(subject: Subject) -> list[Cause]:
    """Return that masked slots, which hold ordinary numbers, have a gradient; [] if
    they have none.
    """
    first = subject.batches[0]
    of_masked = first.gradient[~first.batch.mask]
    return [MASKED_TRAINED] if (of_masked != 0).any() else []


def _of_micro_batches(subject: Subject) -> list[Cause]:
    """Return that the gradients of MICRO_BATCHES parts do not add up to that of the
    batch; [] if they do.
    """
    case = subject.box.case
    batch = subject.first_batch
    rows = torch.arange(len(batch.mask) // ROWS_OF_PARTS * ROWS_OF_PARTS)
    group = None if batch.group is None else batch.group[rows]
    batch = batch.rows(rows, Totals.of(batch.mask[rows], group))
    whole = case.gradient(batch)
    parts = torch.cat([case.gradient(part) for part in batch.split(MICRO_BATCHES)])
    if (parts - whole).abs().max() > PARTS_TOLERANCE * whole.abs().max():
        return [MEAN_OF_PARTS]
    return []


# ---- unusual inputs ------------------------------------------------------------------
def on_unusual_inputs_as_checked(subject: Subject, match: Match) -> list[Cause]:
    """Return the first failure on unusual inputs, as `check` finds it, of a loss with the
    right weights on ordinary ones.

    Args:
        subject: the loss.
        match: the objective that fits.
    """
    box = subject.box
    is_whole = box.scale == 1 and match.own and match.same_kl
    if not is_whole or subject.is_loose or box.batch_coupled:
        return []
    case = subject.case_of(match)
    if not case.single:
        clamped = [
            Cause(f"{finding.regime}: {_cause_or_difference(finding)}")
            for finding in failures_of(clamps(case))
        ]
        if clamped:
            return clamped
    # after the clamps: these may switch the case to float32, which allows more
    for axis in AXES_COMPARED:
        found = stress_findings(case, axis, case.stress_batch(axis), ())
        for finding in failures_of(found):
            return [Cause(f"{finding.regime}: {finding.difference}")]
    return []


def failures_of(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that are failures, not notes.

    Args:
        findings: of a check.
    """
    return [finding for finding in findings if finding.severity == "failure"]


def _cause_or_difference(finding: Finding) -> str:
    """Return the cause of a finding; where it is unknown, the difference."""
    return finding.cause if finding.cause != UNKNOWN else finding.difference


@dataclass
class Claim(LossCase):
    """A LossCase whose expected weights are those of the answer: an objective with a
    fault or a factor in it.

    Attributes:
        claimed_weights: from a batch to the answer's weights, [B, T].
    """

    claimed_weights: Callable[[Rollouts], Tensor] = field(kw_only=True)

    def expected(self, batch: Rollouts) -> Tensor:
        """Return the answer's weights, [B, T]."""
        return self.claimed_weights(batch)


def on_unusual_inputs(subject: Subject, match: Match) -> list[Cause]:
    """Return where unusual inputs show that the match, with its factor and KL term, is
    not what the loss does.

    Args:
        subject: the loss.
        match: the objective that fits.
    """
    box = subject.box
    case = subject.case_of(match)
    # `kl_weights` has the KL term
    hp = {name: value for name, value in case.hp.items() if name != "beta"}

    def claimed_weights(batch: Rollouts) -> Tensor:
        """Return the weights of the match, with the factor and the KL term."""
        weights = unit_weights(case.objective, batch, hp)
        return box.scale * (weights + box.kl_weights(batch))

    return not_as_claimed(subject, case, claimed_weights)


def not_as_claimed(
    subject: Subject, case: LossCase, claimed_weights: Callable[[Rollouts], Tensor]
) -> list[Cause]:
    """Return the first unusual input on which the loss has other weights than these; []
    if there is none, or if unusual inputs cannot tell (loose bounds, coupled weights).

    Args:
        subject: the loss.
        case: the loss and its objective.
        claimed_weights: from a batch to the weights, [B, T].
    """
    box = subject.box
    if subject.is_loose or box.batch_coupled:
        return []
    values = {item.name: getattr(case, item.name) for item in fields(case)}
    claim = Claim(**values, claimed_weights=claimed_weights)
    for axis in (*AXES_COMPARED, "reference") if box.kl else AXES_COMPARED:
        found = stress_findings(claim, axis, case.stress_batch(axis), ())
        for finding in failures_of(found):
            return [elsewhere(finding)]
    return []


def elsewhere(finding: Finding) -> Cause:
    """Return that the loss has other weights than the answer where a finding says.

    Args:
        finding: a difference.
    """
    expected, measured = describe_pair(finding.expected, finding.found)
    return Cause(
        f"it differs elsewhere: {finding.regime}: this gives {expected}, {measured} found"
    )
