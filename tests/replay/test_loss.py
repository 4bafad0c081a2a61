# SPDX-License-Identifier: Apache-2.0
"""The logged loss against the objective's, and what it is if it is another sum."""

import math
from dataclasses import replace

import pytest
import torch

from upref.errors import InputError
from upref.registry import get
from upref.replay import loss, make_batch, replay
from upref.replay.batch import merge
from upref.replay.terms import objective_as_run

B, T = 16, 12
generator = torch.Generator().manual_seed(3)
OLD = -torch.rand(B, T, generator=generator, dtype=torch.float64) * 2 - 0.1
LENGTHS = torch.randint(2, T + 1, (B,), generator=generator)
COLUMNS = {
    "ids": torch.ones(B, T).long(),
    "mask": torch.arange(T)[None, :] < LENGTHS[:, None],
    "old": OLD,
    "now": (
        OLD + 0.3 * torch.randn(B, T, generator=generator, dtype=torch.float64)
    ).clamp(max=0),
    "adv": torch.randn(B, 1, generator=generator, dtype=torch.float64).expand(B, T),
    "group": torch.arange(B) // 4,
    "sampler": OLD - 0.05,
    "micro": torch.arange(B) % 4,
    "rank": torch.arange(B) // 8,
}


def batch(step=None, logged=None, **more):
    return make_batch(COLUMNS | more, file="f", step=step, logged=logged or {})


def value(name="dapo", agg="", **hp):
    o = objective_as_run(name, hp)
    return float((o.aggregated(agg) if agg else o).loss(batch().rollouts(), **hp))


@pytest.mark.parametrize(
    "name", ["dapo", "grpo", "gspo", "cispo", "dr_grpo", "up_dapo", "reinforce"]
)
def test_the_loss_of_the_objective_is_equal(name):
    found = loss(batch(), name, value(name) * (1 + 1e-6))
    assert found and found.found == found.expected and not found.findings


def test_the_tokens_of_frameworks_are_one_mean():
    """dapo's formula has a mean within each prompt; verl and TRL have one over all
    tokens.
    """
    assert loss(batch(), "dapo", value()).expected == "token-mean"


@pytest.mark.parametrize(
    "agg", ["seq-mean-token-mean", "seq-mean-token-sum", "group-token-mean"]
)
def test_another_aggregation_is_named(agg):
    found = loss(batch(), "dapo", value(agg=agg))
    assert not found and found.found == agg


def test_a_mean_over_padded_slots_is_named():
    tokens = int(COLUMNS["mask"].sum())
    found = loss(batch(), "dapo", value() * tokens / (B * T))
    assert not found and f"all {B * T} slots" in found.found


def test_a_logged_zero_accuses_nobody():
    """At r = 1 the mean over responses cancels, where each has as many of either sign."""
    adv = (1.0 - 2.0 * (torch.arange(B) % 2))[:, None].expand(B, T)
    still = batch(adv=adv, now=OLD)
    found = loss(still, "dapo", 0.0)
    assert abs(found.value) > 1e-3
    assert found and [f.cause for f in found.notes] == ["logged_zero"]


def test_the_mean_of_micro_batches_is_named():
    o, b = objective_as_run("dapo", {}), batch()
    parts = [float(o.loss(b.rows(torch.arange(i, B, 4)).rollouts())) for i in range(4)]
    found = loss(b, "dapo", sum(parts) / 4)
    assert (
        not found and found.found == "mean over micro-batches of their own token-mean"
    )


def test_a_multiple_is_named():
    found = loss(batch(), "dapo", 4 * value())
    assert (
        not found
        and found.failures[0].cause == "multiple"
        and found.failures[0].numbers["factor"] == pytest.approx(4)
    )


def test_the_sampler_in_the_place_of_the_old_policy_is_named():
    b = batch().rollouts()
    swapped = float(
        objective_as_run("dapo", {}).loss(b.but(logp_old=b.logp_old - 0.05))
    )
    found = loss(batch(), "dapo", swapped)
    assert not found and "sampler's column" in found.found


def test_the_sampler_is_an_old_policy_where_no_other_is_recorded():
    """A run whose one ratio is to the engine records now and sampler."""
    swapped = batch().rollouts().but(logp_old=COLUMNS["sampler"])
    logged = float(objective_as_run("dapo", {}).loss(swapped))
    alone = make_batch(
        {k: v for k, v in COLUMNS.items() if k != "old"}, file="f", logged={}
    )
    found = loss(alone, "dapo", logged)
    assert found and not found.findings and "sampler's column" in found.found
    assert found.unused == loss(batch(old=COLUMNS["sampler"]), "dapo", logged).unused
    # a loss that it is not stays a note
    assert [f.cause for f in loss(alone, "dapo", 1.01 * logged).notes] == ["divided"]


def test_the_other_sign_is_a_failure():
    found = loss(batch(), "dapo", -value())
    assert not found and [f.cause for f in found.failures] == ["negated"]
    # and stays one where all steps have it
    steps = [batch(step=n, logged={"loss": -value()}) for n in (1, 2)]
    assert len(replay(steps, "dapo").failures) == 2
    # of one step among right ones it is chance
    steps = [batch(step=n, logged={"loss": s * value()}) for n, s in ((1, 1), (2, -1))]
    assert not replay(steps, "dapo").failures


@pytest.mark.parametrize(("sign", "severity"), [(-1, "failure"), (1, "note")])
def test_the_recorded_gradient_tells_whose_sign_is_wrong(sign, severity):
    """With a right gradient, the number alone is negated."""
    lp = COLUMNS["now"].clone().requires_grad_()
    o = objective_as_run("dapo", {})
    o.loss(batch(now=lp.detach()).rollouts().but(logp=lp)).backward()
    found = loss(batch(grad=sign * lp.grad), "dapo", -value())
    (negated,) = [f for f in found.findings if f.cause == "negated"]
    assert negated.severity == severity


def test_a_negated_gradient_alone_is_a_note():
    """The column grad may have the other sign."""
    lp = COLUMNS["now"].clone().requires_grad_()
    o = objective_as_run("dapo", {})
    o.loss(batch(now=lp.detach()).rollouts().but(logp=lp)).backward()
    found = loss(batch(grad=-lp.grad), "dapo", value())
    assert found and [f.cause for f in found.notes] == ["gradient_sign"]


def test_files_of_a_step_with_other_losses_are_named():
    """Merge two files of one step that log 0.5 and 0.25."""
    parts = [
        batch(step=1, logged={"loss": x}).rows(torch.arange(B) % 2 == n)
        for n, x in enumerate((0.5, 0.25))
    ]
    parts = [replace(part, file=f"{n}.npz") for n, part in enumerate(parts)]
    whole = merge(parts)
    found = replay([whole], "dapo")
    assert found.status == 2
    assert "log different numbers" in found.not_run["loss"]
    assert "(loss 0.5 in 0.npz and loss 0.25 in 1.npz)" in found.not_run["loss"]
    assert "loss" not in replay([whole], "dapo", logged=0.5).not_run
    # no objective was given, so no check of the loss was asked for
    assert "loss" not in replay([whole]).not_run


def test_another_divisor_is_a_note_with_its_number():
    tokens = int(COLUMNS["mask"].sum())
    found = loss(batch(), "dapo", value() * tokens / (tokens + 1))
    assert found and found.divisor == pytest.approx(tokens + 1, rel=1e-9)
    assert found.notes[0].cause == "divided"


def test_a_divisor_that_is_no_count_is_said_to_be_none():
    found = loss(batch(), "dapo", 1.2345 * value())
    assert "(no whole number) in place of" in str(found.notes[0]), found
    tokens = int(COLUMNS["mask"].sum())
    found = loss(batch(), "dapo", value() * tokens / (tokens + 1))
    assert f"about {tokens + 1} in place of" in str(found.notes[0]), found


def test_a_loss_of_the_other_sign_has_no_divisor():
    (found,) = loss(batch(), "dapo", -2.5 * value()).notes
    assert found.cause == "other_sign" and "it is -2.5 times that" in str(found)


def test_a_multiple_is_told_where_each_prompt_has_a_divisor():
    groups = batch(group=torch.arange(B) % 3)
    o = get("dapo").aggregated("group-token-mean")
    logged = 1.2345 * float(o.loss(groups.rollouts()))
    (found,) = loss(groups, o, logged).notes
    assert found.cause == "times" and "is 1.2345 times the" in str(found)
    (found,) = loss(groups, o, 0.0).notes
    assert found.cause in ("unexplained", "logged_zero") and "divisor" in str(found)


def test_few_digits_accuse_nobody():
    near = round(value(agg="seq-mean-token-mean"), 3)
    found = loss(batch(), "dapo", near, digits=5e-4)
    assert found


def test_terms_that_cancel_say_nothing():
    adv = torch.tensor([1.0, -1.0]).repeat(B // 2)[:, None].expand(B, T).double()
    even = torch.ones(B, T, dtype=torch.bool)
    found = loss(batch(adv=adv, mask=even, now=OLD), "dapo", 0.0)
    assert found and [f.cause for f in found.notes] == ["uninformative"]


def test_hyperparameters_and_corrections_enter():
    b = batch().rollouts(sampler=True)
    o = objective_as_run("tis(dapo)", {})
    logged = float(o.loss(b, eps_high=0.1))
    assert loss(batch(), "tis(dapo)", logged, eps_high=0.1).found == "token-mean"
    assert not loss(batch(), "tis(dapo)", logged).found


def test_the_number_is_asked_for():
    with pytest.raises(InputError, match="--loss"):
        loss(batch(), "dapo")
    assert (
        loss(make_batch(COLUMNS, file="f", logged={"loss": value()}), "dapo").found
        == "token-mean"
    )


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_refused(number):
    with pytest.raises(InputError, match="the loss that the run logged is"):
        loss(batch(), "dapo", number)


def test_what_no_token_exercises_is_told():
    """At r = 1 no bound acts; beyond it those of which a token is."""
    first = make_batch(COLUMNS | {"now": COLUMNS["old"]}, file="f")
    assert set(loss(first, "dapo", 0.5, eps_low=0.2, eps_high=0.28).unused) >= {
        "eps_low",
        "eps_high",
    }
    assert not loss(batch(), "dapo", 0.5, eps_low=0.2, eps_high=0.28).unused


# ---- attacks on the divisor, and on what is called another sum ------------------------
@pytest.mark.parametrize(
    ("name", "hp"),
    [("dapo", {}), ("grpo", {}), ("gspo", {}), ("dapo", {"beta": 0.1}), ("grpo", {"beta": 0.1})],
)  # fmt: skip
def test_the_divisor_is_that_of_the_objectives_own_sum(name, hp):
    """Of a mean over responses it is a number of responses; the KL term is in the sum."""
    ref = OLD - 0.2 * torch.rand(B, T, generator=generator, dtype=torch.float64)
    recorded = batch(ref=ref)
    o = objective_as_run(name, hp)
    value = float(o.loss(recorded.rollouts(), **hp))
    count = int(COLUMNS["mask"].sum()) if o.agg == "token-mean" else B
    found = loss(recorded, name, value * count / (count + 3), **hp)
    assert found and [f.cause for f in found.findings] == ["divided"]
    assert found.divisor == pytest.approx(count + 3, rel=1e-9)
    unit = "tokens" if o.agg == "token-mean" else "responses"
    assert f"{count + 3} in place of {count} {unit}" in str(found.notes[0])


def test_a_divisor_has_no_more_digits_than_the_logged_number():
    tokens = int(COLUMNS["mask"].sum())
    logged = float(f"{value() * tokens / (tokens + 40):.2g}")
    digits = 0.5 * 10.0 ** (math.floor(math.log10(abs(logged))) - 1)
    found = loss(batch(), "dapo", logged, digits=digits)
    (said,) = [str(f) for f in found.notes if f.cause == "divided"]
    shown = said.partition("about ")[2].partition(" in place")[0]
    assert len(shown.replace(".", "").strip("0")) <= 2, said


def test_no_divisor_is_named_where_the_terms_cancel():
    """Then any other term of the logged number, such as a KL, is more than their sum."""
    adv = torch.tensor([1.0, -1.0]).repeat(B // 2)[:, None].expand(B, T).double()
    even = torch.ones(B, T, dtype=torch.bool)
    found = loss(batch(adv=adv, mask=even, now=OLD), "dapo", 0.02)
    assert found and [f.cause for f in found.notes] == ["beside_zero"]
    assert "divisor" not in str(found.notes[0])


def test_the_aggregation_that_was_asked_for_is_compared():
    """A mean within each prompt is dapo's formula; frameworks have another default."""
    o = get("dapo").aggregated("group-token-mean")
    found = replay([batch(logged={"loss": value(agg="group-token-mean")})], o)
    assert not found.failures
    assert found.steps[0].loss.expected == "group-token-mean"


def with_other_bounds(steps):
    """Yield recorded steps of a run with other clip bounds than those that replay gets."""
    for n in range(steps):
        draw = torch.Generator().manual_seed(n)
        old = -torch.rand(B, T, generator=draw, dtype=torch.float64) * 2 - 0.1
        moved = 0.4 * torch.randn(B, T, generator=draw, dtype=torch.float64)
        adv = torch.randn(B, 1, generator=draw, dtype=torch.float64).expand(B, T)
        columns = {"old": old, "now": (old + moved).clamp(max=0), "adv": adv}
        one = batch(**columns)
        ran = float(
            objective_as_run("dapo", {}).loss(one.rollouts(), eps_high=0.1, eps_low=0.4)
        )
        yield batch(**columns, step=n, logged={"loss": ran})


def test_another_sum_is_a_failure_where_it_is_that_of_each_step():
    """With wrong hyperparameters some step equals another sum by chance."""
    steps = []
    for s in with_other_bounds(4):
        logged = float(
            objective_as_run("dapo", {})
            .aggregated("seq-mean-token-mean")
            .loss(s.rollouts())
        )
        steps.append(replace(s, logged={"loss": logged}))
    found = replay(steps, "dapo", only=["loss"])
    assert len(found.failures) == 4
    steps[2] = replace(steps[2], logged={"loss": 1.2345 * steps[2].logged["loss"]})
    assert not replay(steps, "dapo", only=["loss"]).failures


def test_a_failure_of_a_step_stays_with_a_sum_that_all_steps_share():
    """a or b, then a, then b: no one sum is the loss of all three."""
    from upref.replay.findings import ReplayFinding
    from upref.replay.loss import OR_ELSE, LoggedLoss, settle

    def step(*names):
        """Return a step whose logged loss fits each of these sums, and fails."""
        found = OR_ELSE.join(names)
        failure = ReplayFinding("loss", "failure", "other_sum", {"found": found})
        return LoggedLoss(
            objective="dapo",
            logged=1.0,
            value=2.0,
            expected="token-mean",
            found=found,
            divisor=None,
            fits=names,
            findings=(failure,),
        )

    settled = settle([step("a", "b"), step("a"), step("b")])
    assert [[f.cause for f in x.findings] for x in settled] == [["only_here"]] * 3
    assert settled[0].findings[0].numbers["what"] == "a or b"
    settled = settle([step("a", "b"), step("a"), step("a", "c")])
    assert [[f.cause for f in x.findings] for x in settled] == [["other_sum"]] * 3
