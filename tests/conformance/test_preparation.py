# SPDX-License-Identifier: Apache-2.0
"""Level 6: a plain loop that makes advantages, masks and log-probabilities itself
passes, and a loop with a fault of its preparation gets that fault named.
"""

import math

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.conformance.known_bugs import run_in_ci
from upref.conformance import CASES, Status, run
from upref.conformance.preparation import make_samples
from upref.conformance.runner import NO_TRAIN, make_model
from upref.step.inputs.families import END


def pad(lists):
    return pad_sequence([torch.tensor(x) for x in lists], batch_first=True)


class Loop:
    """A loop in plain PyTorch, from rewards to SGD. Its methods are what faults change."""

    name = "loop 1.0"
    rate = 0.005

    def supports(self, case):
        """Return "" for a case that the loop can run, else why not."""
        if case.objective != "ppo_clip" or case.reference == "adapter":
            return "the loop has one objective, and no adapters"
        if case.advantages not in ("group_mean", "group_norm"):
            return "the loop has no such advantages"
        return ""

    def scale(self, case):
        return 1.0

    def settings(self, case):
        return {}

    def step(self, model, rows, case):
        raise AssertionError("cases of level 6 call train")

    def advantages(self, rewards, case):
        """Return the advantages of rewards whose groups are four in a row."""
        grouped = rewards.view(-1, 4)
        centered = grouped - grouped.mean(1, keepdim=True)
        if case.advantages == "group_norm":
            centered = centered / grouped.std(1, keepdim=True, correction=case.ddof)
        return centered.flatten()

    def trains(self, row, case):
        is_dropped = case.drop_truncated and row.response[-1] != END
        return [t and not is_dropped for t in row.trains]

    def counts(self, row, case):
        return sum(self.trains(row, case))

    def old(self, model, rows, case):
        return self.log_probs(model, rows, case.temperature)

    def ref(self, model, rows, case):
        return self.log_probs(model, rows, case.temperature)

    def train(self, model, rows, case, reference):
        """Make advantages, masks and old log-probabilities from the rows, and train by
        SGD on PPO's loss with a KL term, averaged over tokens.
        """
        A = self.advantages(torch.tensor([row.reward for row in rows]), case)
        mask = pad([self.trains(row, case) for row in rows])
        with torch.no_grad():
            old = self.old(model, rows, case)
            ref = self.ref(reference, rows, case) if reference is not None else None
        optimizer = torch.optim.SGD(model.parameters(), lr=self.rate)
        tokens = sum(self.counts(row, case) for row in rows)
        size = len(rows) // case.micro_batches
        for _ in range(case.iterations):
            for i in range(0, len(rows), size):
                part = slice(i, i + size)
                lp = self.log_probs(model, rows[part], case.temperature)
                width = lp.shape[1]
                r = (lp - old[part, :width]).exp()
                a = A[part, None]
                J = torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
                if ref is not None:
                    d = ref[part, :width] - lp
                    J = J - case.beta * (d.exp() - d - 1)
                (-(J * mask[part, :width]).sum() / tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

    def log_probs(self, model, rows, temperature):
        """Return the log-probabilities of the responses, [B, longest response], 0
        behind each.
        """
        ids = pad([row.ids for row in rows])
        attention = pad([[1] * len(row.ids) for row in rows])
        logits = model(ids, attention_mask=attention).logits[:, :-1] / temperature
        every = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return pad_sequence(
            [
                lp[len(row.prompt) - 1 : len(row.ids) - 1]
                for lp, row in zip(every, rows, strict=True)
            ],
            batch_first=True,
        )


class PopulationStd(Loop):
    def advantages(self, rewards, case):
        grouped = rewards.view(-1, 4)
        std = grouped.std(1, keepdim=True, correction=0)
        return ((grouped - grouped.mean(1, keepdim=True)) / std).flatten()


class MixedGroups(Loop):
    def advantages(self, rewards, case):
        grouped = rewards.view(4, 2)
        return (grouped - grouped.mean(0)).flatten()


class MasksEnd(Loop):
    def trains(self, row, case):
        return [t and i != END for t, i in zip(row.trains, row.response, strict=True)]


class CountsDropped(Loop):
    def counts(self, row, case):
        return sum(row.trains)


class DropsFromGroups(Loop):
    """Its groups are those of the responses that are not dropped."""

    def train(self, model, rows, case, reference):
        self.kept = torch.tensor([row.response[-1] == END for row in rows]).view(-1, 4)
        super().train(model, rows, case, reference)

    def advantages(self, rewards, case):
        grouped = rewards.view(-1, 4)
        kept = self.kept.float()
        mean = (grouped * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)
        return (grouped - mean).flatten()


class SamplerIsOld(Loop):
    def old(self, model, rows, case):
        return pad([row.sampler for row in rows])


class OldAtOne(Loop):
    def old(self, model, rows, case):
        return self.log_probs(model, rows, 1.0)


class RefAtOne(Loop):
    def ref(self, model, rows, case):
        return self.log_probs(model, rows, 1.0)


class RefIsPolicy(Loop):
    def train(self, model, rows, case, reference):
        super().train(model, rows, case, model)


FAULTS = [
    (
        PopulationStd,
        "advantages/group-std",
        "squares under the standard deviation are divided by G, not by G - 1",
    ),
    (MixedGroups, "advantages/group-mean", "groups mix the prompts"),
    (MasksEnd, "mask/every-token-trains", "end tokens do not train"),
    (
        CountsDropped,
        "mask/cut-off-dropped/token-mean",
        "divisor: tokens of responses that were cut off count",
    ),
    (
        DropsFromGroups,
        "mask/cut-off-dropped/token-mean",
        "responses that were cut off do not count in their group",
    ),
    (
        SamplerIsOld,
        "old/iterations-2/token-mean",
        "old log-probabilities: the sampler's own",
    ),
    (
        OldAtOne,
        "old/iterations-2/token-mean",
        "old log-probabilities: at temperature 1",
    ),
    (RefAtOne, "reference/model/token-mean", "reference: its log-probabilities are at"),
    (RefIsPolicy, "reference/model/token-mean", "reference: it is the policy itself"),
]


BY_DAY = (MixedGroups, CountsDropped)


@pytest.mark.parametrize(
    ("kind", "case", "cause"),
    [
        pytest.param(
            *fault,
            id=fault[0].__name__,
            marks=() if fault[0] in BY_DAY else pytest.mark.nightly,
        )
        for fault in FAULTS
    ],
)
def test_a_fault_of_the_preparation_is_named(kind, case, cause):
    outcome = run(kind(), CASES[f"prepare/{case}"])
    assert outcome.status is Status.FAILED, outcome
    assert cause in outcome.reason, outcome.reason


@pytest.mark.slow
def test_a_right_loop_passes_each_case_that_it_has():
    ends = {
        case.id: run(Loop(), case, explain=False)
        for case in run_in_ci()
        if case.level == 6
    }
    wrong = {
        name: str(outcome)
        for name, outcome in ends.items()
        if outcome.status not in (Status.PASSED, Status.SKIPPED)
    }
    assert not wrong
    passed = [o for o in ends.values() if o.status is Status.PASSED]
    assert len(passed) >= 10


def test_an_adapter_without_train_skips_the_level():
    class Older(Loop):
        train = property()

    outcome = run(Older(), CASES["prepare/mask/cut-off"])
    assert (outcome.status, outcome.reason) == (Status.SKIPPED, NO_TRAIN)


def test_weights_that_hardly_move_give_no_verdict():
    """Else any old log-probabilities would do."""

    class Slow(Loop):
        rate = 1e-7

    outcome = run(Slow(), CASES["prepare/old/iterations-2/token-mean"])
    assert outcome.status is Status.COULD_NOT_RUN
    assert "let the weights move further in each step" in outcome.reason


def test_an_optimizer_step_too_few_is_no_verdict():
    class Once(Loop):
        def train(self, model, rows, case, reference):
            once = type(case)(**{**vars(case), "iterations": 1})
            super().train(model, rows, once, reference)

    outcome = run(Once(), CASES["prepare/old/iterations-2/token-mean"])
    assert outcome.status is Status.COULD_NOT_RUN
    assert outcome.reason.startswith("the adapter's optimizer made 1 steps")


def test_samples_lack_what_the_trainer_makes():
    case = CASES["prepare/mask/cut-off"]
    rows = make_samples(case, make_model(case))
    assert all(math.isnan(row.adv) and row.old is row.ref is None for row in rows)
    assert [row.group for row in rows] == [0] * 4 + [1] * 4
    assert [row.response[-1] == END for row in rows].count(False) == 2
