# SPDX-License-Identifier: Apache-2.0
"""A clip of the gradient's norm hides a constant factor, and nothing else: terms, fault
and name are found, and no fact is read off the size of the weights.
"""

from functools import partial

import pytest
import torch
from loops import T, collated, log_probs, qwen3, surrogate

import upref
from tests.support.daily import daily
from upref.step import check_step
from upref.step.compare.goal import Goal
from upref.step.explain.gradient_clipping import find_change

CLIP = 0.05  # it acts on each of these steps


def clipped_step(*, temperature=T, k1=0.0, k3=0.0, clip=CLIP, larger=1.0):
    """Return a step of DAPO with a KL term, in two micro-batches, whose gradient's norm
    is clipped.

    Args:
        temperature: by which the logits are divided.
        k1: the coefficient of the KL term whose gradient is that of log π.
        k3: the coefficient of the KL term k3.
        clip: the bound of the norm; None: there is none.
        larger: a factor of the logits' distance from their mean, which makes the
            gradient of another temperature much larger.
    """

    def step(model, rows):
        """Compute the gradient in two halves, and clip its norm where `clip` is given."""
        total = sum(sum(r.trains) for r in rows)
        for part in (rows[:4], rows[4:]):
            ids, there, trains, old, adv, ref = (x for x in collated(part))
            lp = log_probs(model, ids, there, temperature / larger)
            apart = ref[:, 1:] - lp
            J = surrogate(lp, old[:, 1:], adv[:, 1:]) - k1 * lp
            J = J - k3 * (apart.exp() - 1 - apart)
            (-(J * trains[:, 1:]).sum() / total).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)

    return step


def causes(step, **how):
    report = check_step(step, qwen3(), "dapo", temperature=T, clip=CLIP, **how)
    assert not report, report
    return report.failures


def test_a_right_step_agrees():
    assert check_step(clipped_step(), qwen3(), "dapo", temperature=T, clip=CLIP)


@pytest.mark.parametrize("beta", daily([0.05, 0.005], 2))
def test_an_undeclared_kl_term_is_named(beta):
    (one,) = causes(clipped_step(k1=beta))
    words = f"a KL term (k1) is subtracted, with the coefficient {beta:g}"
    assert one.cause == words


def test_an_undeclared_term_of_the_objective_is_named():
    (one,) = causes(clipped_step(k3=0.05))
    assert one.cause == "the coefficient of the KL term is 0.05, not 0"


def test_another_coefficient_is_named():
    (one,) = causes(clipped_step(k3=0.1), beta=0.05)
    assert one.cause == "the coefficient of the KL term is 0.1, not 0.05"


@pytest.mark.nightly
@pytest.mark.parametrize("clip", [CLIP, None])
def test_a_kl_term_is_named_beside_a_temperature(clip):
    step = clipped_step(temperature=1.0, k1=0.05, clip=clip)
    report = check_step(step, qwen3(), "dapo", temperature=T, clip=clip)
    assert report.failures[0].cause == (
        "the temperature is left out (it is 1); "
        "a KL term (k1) is subtracted, with the coefficient 0.05"
    )


@pytest.mark.nightly
def test_a_much_larger_gradient_leaves_no_response_out():
    """The right gradient was taken for the one before the clip: weights looked 100
    times smaller, and responses seemed not to train.
    """
    report = check_step(
        clipped_step(temperature=1.0, k3=0.3, larger=4.0),
        qwen3(),
        "dapo",
        temperature=T,
        clip=CLIP,
        beta=0.05,
    )
    assert not report
    said = str(report)
    assert "do not train" not in said, said
    assert "one factor" not in said, said


def test_the_objective_is_identified():
    found = upref.identify_step(clipped_step(), qwen3(), temperature=T)
    first = found.matches[0]
    assert (first.name, first.scale, first.clip) == ("dapo", 1, CLIP), found
    assert f"temperature={T}, clip={CLIP})" in str(found)


def test_a_clip_that_does_not_act_is_none():
    found = upref.identify_step(clipped_step(clip=1e3), qwen3(), temperature=T)
    assert found.matches[0].clip is None, found


def test_a_loop_that_normalizes_rewards_is_identified():
    normalize = partial(upref.advantages.group_norm, eps=1e-4)

    def step(model, rows):
        rewards = torch.tensor([r.reward for r in rows])
        A = normalize(rewards, torch.tensor([r.group for r in rows]))
        ids, there, trains, old, _, _ = collated(rows)
        lp = log_probs(model, ids, there)
        J = surrogate(lp, old[:, 1:], A[:, None].float())
        (-(J * trains[:, 1:]).sum() / trains.sum()).backward()

    rewards = [1.0, 0, 0, 2, 0, 1, 3, 1]
    how = {"temperature": T, "group_size": 4, "rewards": rewards}
    found = upref.identify_step(step, qwen3(), advantages=normalize, **how)
    assert found.matches[0].name == "dapo", found
    assert "rewards=rewards, advantages=advantages)" in str(found)


@pytest.mark.parametrize("by", daily([1, 2], 2))
def test_labels_that_stand_too_early_are_named(by):
    """Those of 1:1 + keep in place of -keep:."""

    def step(model, rows):
        """Score each response's columns with the tokens `by` places earlier."""
        total = sum(sum(r.trains) for r in rows)
        for r in rows:
            start = len(r.prompt)
            ids = torch.tensor([r.ids])
            z = model(input_ids=ids).logits[0, start - 1 : -1] / T
            labels = ids[0, start - by : len(r.ids) - by]
            lp = z.log_softmax(-1).gather(1, labels[:, None])[:, 0]
            J = surrogate(lp, torch.tensor(r.old), r.adv)
            (-(J * torch.tensor(r.trains)).sum() / total).backward()

    report = check_step(step, qwen3(), "dapo", temperature=T)
    tokens = "token" if by == 1 else "tokens"
    assert report.failures[0].cause == f"labels stand {by} {tokens} too early"


def test_two_gradients_of_one_norm_are_not_told_apart_by_their_norms():
    (one,) = causes(clipped_step(temperature=1.0))
    text = one.text()
    assert "found     the same norm in another direction" in text, text
    assert "the difference of the two gradients has norm 0.0" in text


@pytest.mark.parametrize(
    "rewards", [[1, 0, 0, 2, 1, 1, 1, 1], [1, 0, 0, 2, 0, 1, 3, 1]]
)
def test_a_factor_is_no_clip(rewards):
    """Where the last rows have no gradient, a clip of what has accumulated before them
    gives each factor below 1.
    """
    right = clipped_step(clip=None)

    def step(model, rows):
        right(model, rows)
        for p in model.parameters():
            p.grad *= 0.73

    how = {"temperature": T, "group_size": 4, "rewards": list(map(float, rewards))}
    report = check_step(step, qwen3(), "dapo", **how)
    assert report.failures[0].cause == "every weight is 0.73 times what it should be"


class Parts:
    """A model of two parameters of other sizes."""

    def split(self, gradient):
        return {"first": gradient[:30], "last": gradient[30:]}


def test_in_low_precision_any_norm_is_a_round_number():
    """A factor is then no clip, whatever the norm is."""
    goal = Goal(upref.get("dapo"), {}, 1.0)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 100, dtype=torch.float64, generator=generator)
    total = rows.sum(0)
    for factor in (0.3, 0.31, 0.7, 0.73):
        found = factor * total
        clip = float(f"{found.norm():.2g}")
        assert not find_change(goal, Parts(), rows, total, found, 1e-2)
        clipped = total * (clip / total.norm())
        assert find_change(goal, Parts(), rows, total, clipped, 2e-5)


@pytest.mark.nightly
def test_a_divisor_of_masked_tokens_is_no_clip_to_a_round_number():
    """The advantages are such that the wrong gradient has a norm of two digits."""
    norms = []

    def step(model, rows):
        ids, there, trains, old, adv, _ = collated(rows)
        lp = log_probs(model, ids, there)
        J = surrogate(lp, old[:, 1:], adv[:, 1:])
        responses = sum(len(r.response) for r in rows)
        (-(J * trains[:, 1:]).sum() / responses).backward()
        parts = [p.grad.norm() for p in model.parameters()]
        norms.append(float(torch.stack(parts).norm()))

    A = torch.tensor([1.0, -1, 2, -2, 1, -1, 3, -3], dtype=torch.float64)
    check_step(step, qwen3(), "dapo", temperature=T, advantages=A.tolist())
    scaled = float(f"{norms[0]:.2g}") / norms[0] * A
    report = check_step(
        step, qwen3(), "dapo", temperature=T, advantages=scaled.tolist()
    )
    words = "the normalizer counts masked tokens too"
    assert report.failures[0].cause.startswith(words), report
