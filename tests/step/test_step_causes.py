# SPDX-License-Identifier: Apache-2.0
"""A cause of a wrong step is printed only where it is true: cases in which a false one
fits as well, or nearly.
"""

from types import SimpleNamespace

import numpy
import pytest
import step_cases
import torch
import training
from loops import T, collated, log_probs, policy_step, qwen3, surrogate, with_
from training import BUGS, Own, collate

import upref
from upref.errors import InputError
from upref.step import TorchModel, check_step
from upref.step.compare.case import RowOptions, build_case, make_goal
from upref.step.inputs.families import tiny
from upref.step.inputs.rows import DESIGNS
from upref.verify.faults.batch_reading import shifted
from upref.weights.batches import random_batch


def cause(step, objective="dapo", model=None, **how):
    report = check_step(step, model or qwen3(), objective, temperature=T, **how)
    assert not report, report
    return report.failures[0].cause


# ---- what the sum is divided by ------------------------------------------------------
def divided(by):
    """Return a step of DAPO's sum over all tokens, divided by by(rows)."""

    def step(model, rows):
        ids, there, trains, old, adv, _ = collated(rows)
        J = surrogate(log_probs(model, ids, there), old[:, 1:], adv[:, 1:])
        (-(J * trains[:, 1:]).sum() / by(rows)).backward()

    return step


def tokens(rows):
    return sum(sum(r.trains) for r in rows)


def test_the_rows_tell_a_hole_from_one_more_token_a_response():
    assert sum(len(design.holes) for design in DESIGNS) % len(DESIGNS)
    assert "masked tokens" in cause(
        divided(lambda rows: sum(len(r.response) for r in rows))
    )
    one_more = cause(divided(lambda rows: tokens(rows) + len(rows)))
    assert one_more == "the sum over all tokens is divided by 51"


def test_where_the_two_are_one_number_both_are_said():
    model = qwen3()
    rows = build_case(TorchModel(model), make_goal("dapo", {}, T), None, ()).rows
    rows[2].trains[4] = rows[4].trains[4] = True  # eight holes, eight responses
    said = cause(divided(lambda rows: tokens(rows) + len(rows)), model=model, rows=rows)
    assert said == "the normalizer counts masked tokens too, or 1 more a response"


@pytest.mark.parametrize("by, said", [
    (lambda rows: 1024 * tokens(rows), "every weight is 1/1024 times what it should be"),
    (lambda rows: -1354863195, f"every weight is {-43 / 1354863195:.5g} times what it should be"),
    (lambda rows: 46081, f"every weight is {43 / 46081:.5g} times what it should be"),
    (lambda rows: 499, "the sum over all tokens is divided by 499"),
])  # fmt: skip
def test_no_number_is_taken_for_a_divisor_because_it_is_large(by, said):
    assert cause(divided(by)) == said


def in_micro_batches(size, J, times=1.0):
    """Return a step that averages the token means of its micro-batches, times a
    constant.

    J: the terms of (log-probabilities, batch, logits at T).
    """

    def step(model, rows):
        for part in training.parts(rows, size):
            b = collate(part)
            z = model(b.ids)
            lp = training.log_probs(z, b.ids)
            loss = training.term(lp, b, J=J(lp, b, z[:, :-1] / T))
            (loss * times * size / len(rows)).backward()

    return step


def clipped_term(lp, b, z):
    return surrogate(lp, b.old[:, 1:], b.adv[:, 1:])


def with_bonus(lp, b, z):
    return clipped_term(lp, b, z) + 0.05 * step_cases.entropy(z)


def with_kl(lp, b, z):
    return clipped_term(lp, b, z) - 0.02 * step_cases.k3(b.ref[:, 1:] - lp)


MEANS = "token-mean is taken over micro-batches of 2, and the results are averaged"


@pytest.mark.parametrize(
    "times, more", [(1, ""), (4, "; every weight is 4 times what it should be")]
)
def test_one_wrong_divisor_of_the_policy_term_and_the_bonus_is_named(times, more):
    step = in_micro_batches(2, with_bonus, times)
    assert cause(step, model=Own(), entropy_coef=0.05) == MEANS + more


def test_a_bonus_of_another_aggregation_is_not_said_to_share_it():
    """A wrong divisor of the policy term alone."""

    def step(model, rows):
        in_micro_batches(2, clipped_term)(model, rows)
        b = collate(rows)
        z = model(b.ids)
        bonus = 0.05 * step_cases.entropy(z[:, :-1] / T)
        training.term(training.log_probs(z, b.ids), b, J=bonus).backward()

    assert cause(step, model=Own(), entropy_coef=0.05) == MEANS


def test_a_constant_makes_no_token_another_one():
    """Weights are small beside the expected ones, or large, and no token has lost its
    own.
    """
    small = divided(lambda rows: 4096 * tokens(rows))
    report = check_step(small, qwen3(), "dapo", temperature=T)
    assert [failure.oracle for failure in report.failures] == ["gradient"], report
    large = in_micro_batches(2, with_kl, 2.0)
    report = check_step(large, Own(), "dapo", beta=0.02, temperature=T)
    assert "that the objective stops" not in str(report)
    assert "that should train" not in str(report)


def test_a_mean_over_responses_and_one_over_passes_of_one_are_both_named():
    said = "aggregated by seq-mean-token-mean, not by token-mean"
    both = f"{said}; each backward pass has one response, so it is also the mean of the passes' own token means"
    assert cause(in_micro_batches(1, clipped_term), model=Own()) == both

    def at_once(model, rows):
        ids, there, trains, old, adv, _ = collated(rows)
        J = surrogate(log_probs(model, ids, there), old[:, 1:], adv[:, 1:])
        m = trains[:, 1:]
        (-((J * m).sum(1) / m.sum(1)).mean()).backward()

    assert cause(at_once) == said


# ---- responses that do not train -----------------------------------------------------
def of_responses(bounded):
    """Return a step of responses' ratios s (geometric means) with the terms bounded(s,
    A).
    """

    def step(model, rows):
        ids, there, trains, old, adv, _ = collated(rows)
        m, lp = trains[:, 1:], log_probs(model, ids, there)
        s = (((lp - old[:, 1:]) * m).sum(1) / m.sum(1)).exp()
        (
            -bounded(s, adv[:, 1:].max(1).values + adv[:, 1:].min(1).values).mean()
        ).backward()

    return step


def test_a_mirrored_clip_of_responses_is_no_other_bound():
    """For A < 0 the ratio is bounded from above. A lower bound of 0.1 and a response
    that is left out fit as well.
    """

    def mirrored(s, A):
        return torch.where(A < 0, torch.maximum(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A),
                           torch.minimum(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A))  # fmt: skip

    said = cause(of_responses(mirrored), "gspo")
    assert (
        "eps_low" not in said
        and "where A < 0 the maximum is taken where the minimum belongs" in said
    ), said


def test_a_left_out_response_is_named_beside_another_fault():
    def step(model, rows):
        policy_step(model, rows, mask=lambda m, *_: m * (torch.arange(len(m)) > 0)[:, None], normalizer="step", size=8,
                    old=lambda old, lp: lp.detach())  # fmt: skip

    said = cause(step)
    assert (
        "response 0 does not train" in said
        and "the old log-probabilities are the current ones" in said
    ), said


# ---- rows of a pack ------------------------------------------------------------------
class Fading(torch.nn.Module):
    """A linear recurrence that forgets: after a row and a half nothing is left of what
    came before.
    """

    def __init__(self, V=64, H=16):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(V, H), torch.nn.Linear(H, V)
        self.gate, self.value = torch.nn.Linear(H, H), torch.nn.Linear(H, H)

    def forward(self, ids):
        """Return logits of a linear recurrence, whose state fades by a gate."""
        x = self.embed(ids)
        keep, h, out = self.gate(x).sigmoid() * 0.9, torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = keep[:, t] * h + self.value(x[:, t])
            out.append(h)
        return self.head(torch.stack(out, 1) + x)


def packed(model, rows):
    """Compute DAPO's gradient of all rows in one sequence. model: of ids [1, N], their
    logits.
    """
    ids = torch.tensor([[t for r in rows for t in r.ids]])

    def flat(f):
        """Return the numbers of all rows behind each other, 0 at prompts, without the
        first.
        """
        numbers = []
        for row in rows:
            numbers += [0.0] * len(row.prompt)
            numbers += [float(v) for v in f(row)]
        return torch.tensor(numbers)[1:]

    old = flat(lambda r: r.old)
    A = flat(lambda r: [r.adv] * len(r.response))
    mask = flat(lambda r: r.trains)
    lp = (model(ids)[0, :-1] / T).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    (-(surrogate(lp, old, A) * mask).sum() / mask.sum()).backward()


def test_a_state_that_runs_on_is_not_said_to_leave_rows_out():
    torch.manual_seed(0)
    said = cause(packed, model=Fading())
    assert "do not train" not in said and "rows of its pack" in said, said


class TakesMask(Fading):
    """As layers with a state do in transformers: the mask of a pack separates nothing
    in them.
    """

    def forward(self, ids, attention_mask=None):
        return super().forward(ids)


def test_a_state_is_not_said_to_be_attention():
    torch.manual_seed(0)
    said = cause(packed, model=TakesMask())
    assert "attend to each other" not in said and "rows of its pack" in said, said


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (False, "rows of a pack are not apart: the state of recurrent layers runs on"),
        (True, "in the attention, and the state of recurrent layers runs on"),
    ],
)
def test_a_pack_of_linear_attention_has_its_cause(cache, words):
    """Positions start again with each row. The attention of transformers then keeps the
    rows apart, but not where the model keeps a cache; its linear attention never does.
    """
    pytest.importorskip("transformers")

    def step(model, rows):
        where = torch.cat([torch.arange(len(r.ids)) for r in rows])[None]

        def logits(ids):
            return model(input_ids=ids, position_ids=where, use_cache=cache).logits

        packed(logits, rows)

    assert words in cause(step, model=tiny("qwen3_next"))


@pytest.mark.parametrize(
    "name",
    [
        "the KL term is taken at temperature 1",
        "a KL term of the old policy is added",
        "the advantages are shuffled",
    ],
)
def test_a_sample_of_the_table_has_its_cause(name):
    """The other rows are nightly."""
    words, model, step, options = next(row[1:] for row in BUGS if row[0] == name)
    torch.manual_seed(0)
    assert words in cause(step, model=model(), **options)


class Critic(Own):
    """A value head on the trunk of the policy."""

    def __init__(self):
        super().__init__()
        self.value = torch.nn.Linear(32, 1)


def test_a_value_loss_is_named():
    def step(model, rows):
        b = collate(rows)
        h = model.hidden(b.ids)
        lp = training.log_probs(model.head(h), b.ids)
        (training.term(lp, b) + 0.1 * model.value(h).square().mean()).backward()

    torch.manual_seed(0)
    said = cause(step, model=Critic())
    assert said.startswith("a gradient of value.weight, value.bias, on which no logit")


def of_rows(J):
    """Return a step with the terms J(lp, old, A, ref), averaged over all tokens."""

    def step(model, rows):
        ids, there, trains, old, adv, ref = collated(rows)
        terms = J(log_probs(model, ids, there), *(x[:, 1:] for x in (old, adv, ref)))
        (-(terms * trains[:, 1:]).sum() / trains[:, 1:].sum()).backward()

    return step


def test_k1_of_the_reference_is_not_said_to_be_of_the_old_policy():
    """Its gradient is the same for both."""

    def with_k1(lp, old, A, ref):
        return surrogate(lp, old, A) - 0.1 * (lp - ref)

    said = cause(of_rows(with_k1))
    assert said == "a KL term (k1) is subtracted, with the coefficient 0.1"


def test_a_lost_sign_is_not_an_exchange_of_advantages():
    """|A| of each response that has A < 0 is the advantage of another."""

    def without_sign(lp, old, A, ref):
        return surrogate(lp, old, A.abs())

    A = [1, -1, 0.5, -0.5, 2, -2, 0.7, -0.7]
    said = cause(of_rows(without_sign), advantages=A)
    assert said == "the sign of the advantages is lost"


def test_parameters_of_prompts_alone_are_no_value_loss():
    """Logits depend on them, though none of a token that should train."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(96, 96)
            self.first = torch.nn.Parameter(torch.randn(96))

        def forward(self, input_ids, **_):
            z = self.table(input_ids)
            at_start = torch.zeros(z.shape[1], 1)
            at_start[0] = 1
            return SimpleNamespace(logits=z + at_start * self.first)

    def step(model, rows):
        ids, there, trains, old, *_ = collated(rows)
        lp = log_probs(model, ids, there)
        old = torch.where(trains[:, 1:] > 0, old[:, 1:], lp.detach())
        A = torch.tensor([[row.adv] for row in rows])
        J = surrogate(lp, old, A) * there[:, 1:]
        (-J.sum() / trains.sum()).backward()

    torch.manual_seed(0)
    said = cause(step, model=Model())
    assert "value loss" not in said and "prompt tokens train" in said, said


# ---- the search itself ---------------------------------------------------------------
@pytest.mark.parametrize(
    "error", [RuntimeError, InputError, ZeroDivisionError, AssertionError]
)
def test_an_error_of_the_search_leaves_the_verdict(monkeypatch, error):
    def broken(*_):
        raise error("mask must be a boolean tensor [B, T], got int64[8, 11].")

    monkeypatch.setattr("upref.step.explain.diagnose._explain_by_weights", broken)
    report = check_step(with_(temperature=1.0), qwen3(), "dapo", temperature=T)
    assert not report and "no known cause fits" in report.failures[0].cause
    assert error.__name__ in report.failures[0].cause, report


@pytest.mark.parametrize("objective", ["grpo", "gspo", "dapo", "ppo_clip"])
def test_one_ratio_a_response_and_a_maximum(objective):
    """A loop in the wild: the search takes log_prob for one token too late, and a mask
    of whole numbers came of it.
    """

    def step(model, rows):
        """Take one ratio for each response, and the maximum in place of the minimum
        where A < 0.
        """
        ids, there, trains, old, adv, _ = collated(rows)
        m, lp = trains[:, 1:], log_probs(model, ids, there)
        A = adv[:, 1:].sum(1) / (adv[:, 1:] != 0).sum(1)
        r = ((lp - old[:, 1:]) * m).sum(1).exp()
        clipped = r.clamp(0.8, 1.2) * A
        (
            -torch.where(
                A < 0, torch.maximum(r * A, clipped), torch.minimum(r * A, clipped)
            ).mean()
        ).backward()

    report = check_step(step, qwen3(), objective, temperature=T, without=["holes"])
    assert not report and "boolean" not in str(report), report


def test_a_fault_keeps_the_mask_boolean():
    o = upref.get("dapo")
    b = random_batch(numpy.random.default_rng(0))
    views = [f.change.view for f in shifted(o, o.resolve({})) if f.change.weigh is None]
    assert len(views) == 36 and all(view(b).mask.dtype == torch.bool for view in views)


# ---- a loop that makes its old log-probabilities itself ------------------------------
def own_old(model, rows):
    """Compute a gradient with log-probabilities at temperature 1, old ones of its own,
    and the sum of the means of four micro-batches.
    """
    for i in range(0, len(rows), 2):
        ids, there, trains, _, adv, _ = collated(rows[i : i + 2])
        lp = log_probs(model, ids, there, temperature=1.0)
        J = (lp - lp.detach()).exp() * adv[:, 1:]
        each = (J * trains[:, 1:]).sum(1) / trains.sum(1)
        (-each.mean()).backward()


HOT = "the temperature is left out (it is 1)"
FOUR = "every weight is 4 times what it should be"
R_1 = "the old log-probabilities are the current ones, or have no effect: r = 1"


def test_the_temperature_of_a_loop_on_policy_is_named_beside_a_second_fault():
    assert cause(own_old, "grpo", without=["ratio"]) == f"{HOT}; {FOUR}"


def test_the_temperature_is_named_where_the_ratio_of_the_rows_is_not_used():
    assert cause(own_old, "grpo") == f"{HOT}; {R_1}; {FOUR}"


def test_a_prompt_that_a_group_shares_has_the_end_token_inside():
    rows = build_case(
        TorchModel(qwen3()),
        make_goal("grpo", {}, T),
        None,
        (),
        row_options=RowOptions(8),
    ).rows
    assert all(2 in row.prompt for row in rows)


def test_one_ratio_of_the_whole_batch_is_no_other_objective():
    def step(model, rows):
        ids, there, trains, old, _, _ = collated(rows)
        log_r = (log_probs(model, ids, there) - old[:, 1:]) * trains[:, 1:]
        ratio = log_r.sum().exp()
        A = torch.tensor([r.adv for r in rows])
        (-torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A).mean()).backward()

    said = cause(step, "grpo", seed=1)
    assert said.startswith("all tokens that train have one weight, ")


# ---- the sign ------------------------------------------------------------------------
def negated(model, rows):
    """Compute DAPO's gradient with the advantages of the opposite sign."""
    ids, there, trains, old, adv, _ = collated(rows)
    J = surrogate(log_probs(model, ids, there), old[:, 1:], -adv[:, 1:])
    (-(J * trains[:, 1:]).sum() / tokens(rows)).backward()


def test_the_opposite_sign_is_named():
    assert cause(negated) == "the advantages have the opposite sign"


@pytest.mark.nightly
def test_where_an_exchange_makes_the_same_advantages_both_are_said():
    said = cause(negated, advantages=[1.5, -1.5, 0.5, -0.5, 2.0, -2.0, 0.7, -0.7])
    assert said == (
        "the advantages have the opposite sign, "
        "or are those of row i + 1 of micro-batches of 2"
    )


def test_a_cause_is_possible_where_the_step_agrees_on_other_rows():
    first = []

    def divisor(rows):
        responses = [list(row.response) for row in rows]
        first[:] = first or responses
        return tokens(rows) * (2 if responses == first else 1)

    said = cause(divided(divisor))
    assert said.startswith("possible, though the step agrees on other rows: ")
    assert "1/2 times" in said
