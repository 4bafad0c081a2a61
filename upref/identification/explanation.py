# SPDX-License-Identifier: Apache-2.0
"""One explanation of a loss, and the answer that is made of it."""

from dataclasses import dataclass, replace

from torch import Tensor

from upref.identification.identification import Identification, Match
from upref.identification.subject import Subject, is_up
from upref.rollouts import Rollouts
from upref.verify.finding import Cause
from upref.verify.measure import sampler_words
from upref.weights.black_box import SIGNS, reads_other_tokens


@dataclass(frozen=True)
class Explanation:
    """What a loss is said to be.

    Attributes:
        subject: the loss, as it was compared.
        matches: objectives, the simplest first; for none, the nearest.
        why: what is wrong with it, or why it is none.
        is_none: no objective explains it, with or without a fault.
        assumptions: what the comparison assumes, beside the usual.
        not_checked: what it says nothing about, beside the usual.
        is_corrected: the match has the loss's correction for its sampler.
        proved: for which values and batches it is proved, in words.
        far: for none, the nearest objective by its name, where that is far.
    """

    subject: Subject
    matches: list[Match]
    why: tuple[Cause, ...] = ()
    is_none: bool = False
    assumptions: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    is_corrected: bool = False
    proved: str = ""
    far: str = ""

    @property
    def match(self) -> Match:
        """The simplest match."""
        return self.matches[0]

    @property
    def is_named(self) -> bool:
        """Whether it is an objective, or up(...) of one, and nothing is wrong."""
        return not self.is_none and not self.why

    @property
    def kind(self) -> str:
        """The kind of the answer: none, pitfall, up or objective."""
        if self.is_none:
            return "none"
        if self.why:
            return "pitfall"
        return "up" if is_up(self.match) else "objective"

    @property
    def ignores_sampler(self) -> bool:
        """Whether the loss reads its sampler's log-probabilities, and none was given."""
        return not self.is_corrected and self.subject.box.case.ignores_sampler()

    def has_fault(self, fault_id: str) -> bool:
        """Tell whether a known fault is among what is wrong.

        Args:
            fault_id: the id of the fault.
        """
        return any(fault_id in cause.ids for cause in self.why)

    def but(self, *wrong: Cause) -> "Explanation":
        """Return this explanation of a loss that has more wrong with it.

        Args:
            *wrong: what is wrong; none changes nothing.
        """
        return replace(self, why=(*self.why, *wrong))


def answer(explanation: Explanation) -> Identification:
    """Return the answer, with the bounds of the loss and with what was not checked.

    Args:
        explanation: of the loss.
    """
    subject = explanation.subject
    box = subject.box
    at_old_probability = " (π_old = 0.02)" if box.reads_mu else ""
    bounds = {
        f"{sign_words}{at_old_probability}": box.bounds(A)
        for sign_words, A in (("A > 0", 1.0), ("A < 0", -1.0))
    }
    matches = explanation.matches
    on_sampler = explanation.ignores_sampler
    return Identification(
        subject.loss.name,
        explanation.kind,
        matches,
        "; ".join(cause.words for cause in explanation.why),
        bounds,
        subject.loss.read_as,
        [*_assumptions(subject), *explanation.assumptions],
        [*_not_checked(explanation, on_sampler), *explanation.not_checked],
        on_sampler,
        seconds=0.0,
        proved=explanation.proved,
        reads_others=_reads_others(subject),
        aggregation=subject.aggregation,
        far=explanation.far,
    )


def _reads_others(subject: Subject) -> bool:
    """Tell whether the weight of a token depends on the other tokens of its response. It
    is not measured of a loss whose weights depend on other responses, or on chance.
    """
    box = subject.box
    if box.batch_coupled or box.random:
        return False

    def gradient(batch: Rollouts) -> Tensor:
        """Return the gradient, less that of the KL term."""
        ready = box.case.ready(batch)
        return box.case.gradient(ready) - box.kl_weights(ready)

    return reads_other_tokens(gradient, SIGNS, 10 * box.tol)


def _not_checked(explanation: Explanation, on_sampler: bool) -> list[str]:
    """Return sentences on what no batch shows of the loss."""
    loss = explanation.subject.loss
    not_checked = []
    if on_sampler:
        matches = explanation.matches
        not_checked.append(sampler_words(matches[0].name if matches else ""))
    not_checked += loss.unfed_words
    if loss.left_to_caller:
        not_checked.append(loss.left_to_caller)
    elif not loss.micro_batchable:
        not_checked.append("micro-batches")
    return not_checked


def _assumptions(subject: Subject) -> list[str]:
    """Return sentences on what the comparison assumes of the loss."""
    box = subject.box
    sentences = list(box.loss.assumptions)
    if "group" not in box.loss.reads and box.agg == "token-mean":
        sentences.append(
            "the loss takes no group ids: token-mean and group-token-mean are one"
        )
    if box.case.single:
        sentences.append(
            "it computes in float32: weights of single tokens compared to 0.002 %, "
            "batches to 0.02 %, bounds known to about 1e-6"
        )
    elif subject.is_loose:
        sentences.append(
            "its bounds are the objective's to 0.1 %, not exactly: compared no nearer to them"
        )
    elif subject.has_rounded_bounds:
        sentences.append("a bound is rounded to float32: compared no nearer to it")
    return sentences
