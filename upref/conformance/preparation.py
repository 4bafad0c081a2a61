# SPDX-License-Identifier: Apache-2.0
"""Cases in which the trainer makes advantages, masks and log-probabilities itself: the
responses that it is handed, and the rows that its optimizer steps should train on.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from upref import advantages
from upref.conformance.cases import Case
from upref.errors import InputError
from upref.step.check import StepReport, check_recorded
from upref.step.compare.case import with_weights
from upref.step.compare.forward import Forward
from upref.step.compare.record import Recorded
from upref.step.inputs import rows as step_rows
from upref.step.inputs.families import END, V
from upref.step.inputs.reference import TorchModel
from upref.step.inputs.rows import CASE_AXES, Row

GROUP_SIZE = 4  # responses to a prompt
# Spread of the rewards of a group. Where advantages are divided by a standard deviation
# it is so large that the eps beside it, which papers leave open, does not show.
SPREAD = 1.0  # standard deviation of the rewards
SPREAD_OVER_STD = 500.0  # the same, where advantages are divided by it
SAMPLER_NOISE = 0.05  # nats between the sampler's log-probabilities and the model's
REFERENCE_NOISE = 0.05  # of the spread of each matrix, between model and reference
LEAST_MOVE = 0.02  # of log r: below, old log-probabilities could be the current ones
# learning rate of SGD at which the ratios of the cases leave 1
LEARNING_RATE = 0.005


DIVIDED = ("group_norm", "batch_norm")  # estimators that divide by a deviation
ADVANTAGE_WORDS = {
    "reward": "there is no baseline: A is the reward",
    "group_mean": "A is R - mean, without a division",
    "leave_one_out": "the baseline leaves the response itself out",
    "group_norm": "R - mean is divided by the standard deviation of the group",
    "batch_norm": "R - mean is divided by the standard deviation of the batch",
}


def batch_norm(rewards: Tensor, group: Tensor, *, ddof: int = 1) -> Tensor:
    """Compute A_i = (R_i - mean_g) / std(R), with the standard deviation of all rewards
    of the batch: the normalization that arXiv 2508.08221 proposes.

    Args:
        rewards: R, [N].
        group: the prompt of each response, [N].
        ddof: 1 divides the squares by N - 1, 0 by N.

    Returns:
        A, [N].
    """
    return advantages.group_mean(rewards, group) / rewards.std(correction=ddof)


def _estimator(case: Case) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the estimator of a case, from rewards [N] and groups [N] to advantages
    [N], with an eps of 0.
    """
    if case.advantages == "group_norm":
        return partial(advantages.group_norm, ddof=case.ddof, eps=0.0)
    if case.advantages == "batch_norm":
        return partial(batch_norm, ddof=case.ddof)
    return advantages.get(case.advantages)


def is_truncated(row: Row) -> bool:
    """Tell whether a response was cut off: the end token does not end it.

    Args:
        row: of a case.
    """
    return row.response[-1] != END


def make_samples(case: Case, model: Any, seed: int = 0) -> list[Row]:
    """Return eight responses to two prompts, with a reward and the log-probabilities of
    the sampler. The fields that the trainer makes are absent: `old` and `ref` are None,
    and `adv` is not a number.

    Args:
        case: its fields decide masks and ends.
        model: a causal language model of transformers, which could have sampled them.
        seed: of tokens, rewards and the sampler's rounding.

    Returns:
        The rows. Unless `case.ends`, the second response of each prompt is cut off.
    """
    without = () if case.holes else ("holes",)
    rows = step_rows.make_rows(V, seed, without, END, group_size=GROUP_SIZE)
    rng = np.random.default_rng(seed + 2)
    spread = SPREAD_OVER_STD if case.advantages in DIVIDED else SPREAD
    rewards = spread * (rng.normal(0, 1, len(rows)) + [row.group for row in rows])
    log_probs = Forward(TorchModel(model), rows, case.temperature).lp()
    for i, (row, reward, lp) in enumerate(zip(rows, rewards, log_probs, strict=True)):
        is_cut = not case.ends and i % GROUP_SIZE == 1
        row.response[-1] = 3 + i if is_cut else END  # 3 + i: any token but END
        if case.end_inside and len(row.response) > 4:
            row.response[len(row.response) // 2] = END
        row.reward = float(np.float32(reward))
        noise = rng.normal(0, SAMPLER_NOISE, len(row.response))
        row.sampler = np.minimum(lp.numpy() + noise, 0.0).tolist()
        row.adv = float("nan")
    return rows


@torch.no_grad()
def make_reference(model: Any) -> Any:
    """Return a copy of the model with noise on the weights of its matrices, the same in
    each call.

    Args:
        model: the policy that is trained.
    """
    reference = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for p in reference.parameters():
        if p.ndim > 1:
            noise = torch.randn(p.shape, generator=generator)
            p.add_(REFERENCE_NOISE * float(p.std()) * noise)
    return reference


@dataclass(frozen=True)
class Preparation:
    """How a trainer makes what its loss reads.

    Attributes:
        advantages: from rewards [N] and groups [N].
        trains: which tokens of a row train.
        old: whose log-probabilities are the old ones: those of the weights that the
            generation batch began with, of each step, or of the sampler.
        old_temperature: at which they are taken.
        reference: whose log-probabilities are the reference's: a model's of its own, or
            those of the weights that the generation batch began with.
        ref_temperature: at which they are taken.
    """

    advantages: Callable[[Tensor, Tensor], Tensor]
    trains: Callable[[Row], list[bool]]
    old: Literal["generation", "current", "sampler"]
    old_temperature: float
    reference: Literal["reference", "generation"]
    ref_temperature: float


def meant(case: Case) -> Preparation:
    """Return how a case means that the trainer prepares its rows.

    Args:
        case: of level 6.
    """

    def trains(row: Row) -> list[bool]:
        """Return the row's own mask; all False where it was cut off and is dropped."""
        if case.drop_truncated and is_truncated(row):
            return [False] * len(row.response)
        return row.trains

    return Preparation(
        _estimator(case),
        trains,
        "generation" if case.steps > 1 else "current",
        case.temperature,
        "reference",
        case.temperature,
    )


@dataclass
class Trained:
    """What a trainer did with the samples of a case.

    Attributes:
        case: the case.
        samples: the rows that the trainer was handed.
        seen: its optimizer steps.
        numbers: which of the samples each step trained on.
        reference: the reference policy.
        scale: the factor by which the framework documents that its loss differs.
    """

    case: Case
    samples: list[Row]
    seen: Recorded
    numbers: list[list[int]]
    reference: TorchModel
    scale: float
    log_probs: dict[tuple[int, float], list[Any]] = field(default_factory=dict)

    def rows(self, preparation: Preparation) -> list[list[Row]]:
        """Return the rows of each optimizer step: the samples that it trained on, with
        advantages, masks and log-probabilities filled in.

        Args:
            preparation: how the trainer makes what the samples lack.
        """
        R = torch.tensor([row.reward for row in self.samples], dtype=torch.float64)
        group = torch.tensor([row.group for row in self.samples])
        A = preparation.advantages(R, group).tolist()
        ref = self._ref(preparation)
        rows_of_steps = []
        for step, numbers in enumerate(self.numbers):
            old = self._old(preparation, step)
            rows = []
            for i in numbers:
                sample = self.samples[i]
                row = replace(
                    sample,
                    adv=A[i],
                    trains=preparation.trains(sample),
                    old=old[i] if old else None,
                    ref=ref[i] if ref else None,
                    sampler=None,
                )
                rows.append(row)
            rows_of_steps.append(rows)
        return rows_of_steps

    def _old(self, preparation: Preparation, step: int) -> list[Any] | None:
        """Return the old log-probabilities of all samples; None where r = 1."""
        if preparation.old == "sampler":
            return [row.sampler for row in self.samples]
        if preparation.old == "current":
            if preparation.old_temperature == self.case.temperature:
                return None
            return self._log_probs(step, preparation.old_temperature)
        return self._log_probs(0, preparation.old_temperature)

    def _ref(self, preparation: Preparation) -> list[Any] | None:
        """Return the reference's log-probabilities of all samples; None where the case
        has no reference policy.
        """
        if not self.case.reference:
            return None
        step = -1 if preparation.reference == "reference" else 0
        return self._log_probs(step, preparation.ref_temperature)

    def _log_probs(self, step: int, temperature: float) -> list[Any]:
        """Return log-probabilities of all samples in nats, by the weights before a
        step; -1: by the reference. They are computed once.
        """
        key = (step, temperature)
        if key not in self.log_probs:
            if step < 0:
                model = self.reference
            else:
                model = with_weights(self.seen.model, self.seen.steps[step])
            forward = Forward(model, self.samples, temperature)
            self.log_probs[key] = [lp.tolist() for lp in forward.lp()]
        return self.log_probs[key]

    def compare(self, preparation: Preparation, explain: bool) -> StepReport:
        """Compare the recorded gradients with the objective's on the rows so prepared.

        Args:
            preparation: how the trainer makes what the samples lack.
            explain: search for the cause of a difference.
        """
        case = self.case
        return check_recorded(
            self.seen,
            self.rows(preparation),
            case.objective,
            temperature=case.temperature,
            beta=case.beta,
            scale=self.scale,
            without=CASE_AXES,
            explain=explain,
            **case.hp,
        )

    def refuse_small_moves(self) -> None:
        """Raise InputError where the ratios stay at 1 in later steps: then the old
        log-probabilities could be any.
        """
        if self.case.steps == 1:
            return
        last_step = len(self.numbers) - 1
        first = self._log_probs(0, self.case.temperature)
        last = self._log_probs(last_step, self.case.temperature)
        moves = [
            abs(now - before)
            for i in self.numbers[-1]
            for now, before in zip(last[i], first[i], strict=True)
        ]
        if max(moves) < LEAST_MOVE:
            raise InputError(
                f"log r is at most {max(moves):.1g} in the last optimizer step: let the weights move "
                f"further in each step, for example by SGD with lr={LEARNING_RATE:g}."
            )


def find_fault(trained: Trained) -> str:
    """Return the first known fault of the preparation that makes the gradients that
    were found, in words; "" where none does.

    Args:
        trained: what the trainer did.
    """
    for words, preparation in _faults(trained.case, trained.samples):
        try:
            if trained.compare(preparation, explain=False):
                return words
        except InputError:
            # the objective's gradient is 0 or not finite with this fault
            continue
    return ""


def _faults(case: Case, samples: Sequence[Row]) -> Iterator[tuple[str, Preparation]]:
    """Yield faults of a preparation in words, and the preparation that has each."""
    right = meant(case)
    for words, estimator in _wrong_advantages(case, samples):
        yield f"advantages: {words}", replace(right, advantages=estimator)
    for words, trains in _wrong_masks(case):
        yield f"mask: {words}", replace(right, trains=trains)
    if case.drop_truncated:
        yield from _wrong_drops(right, samples)
    if case.steps > 1:
        yield (
            "old log-probabilities: those of the current weights, so r = 1",
            replace(right, old="current"),
        )
    yield "old log-probabilities: the sampler's own", replace(right, old="sampler")
    yield "old log-probabilities: at temperature 1", replace(right, old_temperature=1.0)
    if case.reference:
        yield (
            "reference: it is the policy itself",
            replace(right, reference="generation"),
        )
        yield (
            "reference: its log-probabilities are at temperature 1",
            replace(right, ref_temperature=1.0),
        )
        yield (
            "the log-probabilities of the old and the reference policy are at temperature 1",
            replace(right, ref_temperature=1.0, old_temperature=1.0),
        )


def _wrong_drops(
    right: Preparation, samples: Sequence[Row]
) -> Iterator[tuple[str, Preparation]]:
    """Yield preparations in which responses that are dropped count where they should
    not, or do not count where they should.
    """
    complete = torch.tensor([not is_truncated(row) for row in samples])

    def complete_alone(rewards: Tensor, group: Tensor) -> Tensor:
        """Return the estimator on the responses that are not dropped; 0 for the others."""
        A = torch.zeros_like(rewards)
        A[complete] = right.advantages(rewards[complete], group[complete])
        return A

    def zero_where_dropped(rewards: Tensor, group: Tensor) -> Tensor:
        """Return the estimator on all responses, and 0 for those that are dropped."""
        return torch.where(complete, right.advantages(rewards, group), 0)

    yield (
        "advantages: responses that were cut off do not count in their group",
        replace(right, advantages=complete_alone),
    )
    # a token with A = 0 adds nothing, and counts
    yield (
        "divisor: tokens of responses that were cut off count, and do not train",
        replace(right, advantages=zero_where_dropped, trains=attrgetter("trains")),
    )


def _wrong_advantages(
    case: Case, samples: Sequence[Row]
) -> Iterator[tuple[str, Callable[[Tensor, Tensor], Tensor]]]:
    """Yield estimators that are not the case's, with what is wrong about each."""
    estimator = _estimator(case)
    other_ddof = 1 - case.ddof
    divisors = {1: "G - 1", 0: "G"}
    if case.advantages in DIVIDED:
        divided = replace(case, ddof=other_ddof)
        yield (
            f"the squares under the standard deviation are divided by {divisors[other_ddof]}, not by {divisors[case.ddof]}",
            _estimator(divided),
        )
    prompts = len({row.group for row in samples})

    def across_prompts(rewards: Tensor, group: Tensor) -> Tensor:
        """Return the estimator on groups of responses to different prompts."""
        return estimator(rewards, torch.arange(len(rewards)) % prompts)

    def of_the_batch(rewards: Tensor, group: Tensor) -> Tensor:
        """Return the estimator with one group."""
        return estimator(rewards, torch.zeros_like(group))

    yield "groups mix the prompts: every second response is one", across_prompts
    yield "the baseline is the mean of the batch, not of the group", of_the_batch
    for name, words in ADVANTAGE_WORDS.items():
        if name != case.advantages:
            yield words, _estimator(replace(case, advantages=name))


def _wrong_masks(case: Case) -> Iterator[tuple[str, Callable[[Row], list[bool]]]]:
    """Yield masks that are not the case's, with what is wrong about each."""
    trains = meant(case).trains

    def without_end(row: Row) -> list[bool]:
        """Return the mask without the end tokens."""
        pairs = zip(trains(row), row.response, strict=True)
        return [is_trained and token != END for is_trained, token in pairs]

    def until_first_end(row: Row) -> list[bool]:
        """Return the mask up to the first end token, which is included."""
        return [
            is_trained and END not in row.response[:place]
            for place, is_trained in enumerate(trains(row))
        ]

    def without_last(row: Row) -> list[bool]:
        """Return the mask without the last token."""
        return [*trains(row)[:-1], False]

    def everything(row: Row) -> list[bool]:
        """Return True for every token, but for those of dropped responses."""
        own_mask = trains(row)
        return [True] * len(row.response) if any(own_mask) else own_mask

    def without_cut(row: Row) -> list[bool]:
        """Return the mask without the responses that were cut off."""
        if is_truncated(row):
            return [False] * len(row.response)
        return row.trains

    yield "end tokens do not train", without_end
    yield "tokens behind the first end token do not train", until_first_end
    yield "the last token of each response does not train", without_last
    if case.holes:
        yield "response tokens that the sampler masks train", everything
    if case.drop_truncated:
        yield "responses that were cut off train", attrgetter("trains")
    elif not case.ends:
        yield "responses that were cut off do not train", without_cut
