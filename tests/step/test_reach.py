# SPDX-License-Identifier: Apache-2.0
"""What the rows of a step exercise of an objective: a number whose value makes no
difference is printed as such.
"""

from dataclasses import replace

import pytest
import torch
from loops import T, collated, log_probs, policy_step, qwen3, right

import upref
from upref.step import Row, TorchModel, check_step
from upref.step.compare.case import FLOAT32_BOUND, build_case, make_goal, perturb
from upref.step.compare.forward import gradients_by_row
from upref.step.compare.reach import not_reached


class Bigram(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(64, 64)

    def forward(self, ids):
        return self.table(ids)


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    return TorchModel(perturb(Bigram()))


NAMES = [n for n in upref.names() if "group" not in upref.get(n).reads]


BY_DAY = ("dapo", "gspo", "dppo_kl", "cppo", "sapo")


@pytest.mark.parametrize(
    "name",
    [n if n in BY_DAY else pytest.param(n, marks=pytest.mark.nightly) for n in NAMES],
)
def test_each_number_makes_a_difference_or_is_printed(reference, name):
    """Half and twice its value, or 0.1 and 0.2 for 0: the whole gradient is computed
    anew with each.
    """
    o = upref.get(name)
    with_dual_clip = {"c": 3.0} if "c" in o.hyperparameters else {}
    goal = make_goal(o, with_dual_clip, T)
    case = build_case(reference, goal, None, ())
    rows = gradients_by_row(goal, case.forward, case.padded)
    want = rows.sum(0)
    printed = not_reached(goal, case.forward, case.padded, FLOAT32_BOUND, rows)

    def error(**hp):
        """Return the relative error of the case's gradient at other numbers."""
        beta = hp.pop("beta", 0.0)
        other = make_goal(o, goal.hp | hp, T, beta=beta)
        gradient = gradients_by_row(other, case.forward, case.padded).sum(0)
        return float((gradient - want).norm() / want.norm())

    for number, value in (o.hyperparameters | with_dual_clip).items():
        if number == "seed":
            others = (1, 2)
        elif value == 0:
            others = (0.1, 0.2)
        else:
            others = (value / 2, value * 2)
        seen = all(error(**{number: v}) > FLOAT32_BOUND for v in others)
        assert seen or f"{number} = {value:g}" in printed, (number, printed)


def step_of(name, **hp):
    """Return a step written with the registered objective at these numbers."""
    o = upref.get(name)

    def step(model, rows):
        ids, there, trains, old, adv, _ = collated(rows)
        lp = log_probs(model, ids, there).double()
        J = o.J(
            lp, old[:, 1:].double(), adv[:, 1:].double(), trains[:, 1:].bool(), **hp
        )
        (-J).backward()

    return step


@pytest.mark.parametrize(
    "low, high", [(3e-4, 4e-4), (2e-4, 4e-4), (3e-4, 6e-4), (3e-3, 4e-3), (0.03, 0.03)]
)
def test_a_bound_of_gspo_is_noticed(low, high):
    report = check_step(
        step_of("gspo", eps_low=low, eps_high=high),
        qwen3(),
        "gspo",
        temperature=T,
        explain=False,
    )
    assert bool(report) == ((low, high) == (3e-4, 4e-4)) and not report.not_reached, (
        report
    )


def clamped(log_r=None, A=None, c=None):
    """Return a DAPO step with a guard: of log r, of the advantage, or a dual clip."""

    def surrogate(lp, old, adv):
        d = (lp - old).clamp(-log_r, log_r) if log_r else lp - old
        adv = adv.clamp(-A, A) if A else adv
        r = d.exp()
        J = torch.minimum(r * adv, r.clamp(0.8, 1.28) * adv)
        return torch.where(adv < 0, torch.maximum(J, c * adv), J) if c else J

    def step(model, rows):
        ids, there, trains, old, adv, _ = collated(rows)
        J = surrogate(log_probs(model, ids, there), old[:, 1:], adv[:, 1:])
        (-(J * trains[:, 1:]).sum() / trains.sum()).backward()

    return step


@pytest.mark.parametrize(
    "guard",
    [
        dict(log_r=1.0),
        dict(log_r=2.0),
        dict(A=2.0),
        dict(A=5.0),
        dict(c=3.0),
        dict(c=10.0),
    ],
)
def test_a_guard_inside_a_loop_is_noticed(guard):
    assert not check_step(
        clamped(**guard), qwen3(), "dapo", temperature=T, explain=False
    )


@pytest.mark.parametrize(
    "c, right", [(3.0, True), (2.0, False), (3.5, False), (10.0, False), (None, False)]
)
def test_a_dual_clip_is_noticed(c, right):
    report = check_step(
        clamped(c=c), qwen3(), "dapo", temperature=T, c=3.0, explain=False
    )
    assert bool(report) == right and not report.not_reached, report


def test_a_bound_beyond_the_ratios_is_not_vouched_for():
    report = check_step(clamped(c=50.0), qwen3(), "dapo", temperature=T, c=40.0)
    assert report and [*report.not_reached] == ["c = 40"]
    assert (
        "not exercised: c = 40 (20 and 4000 agree too); clamps and bounds beyond the rows' range (r from 0.07"
        in str(report)
    )


def test_what_the_rows_do_exercise_is_not_printed():
    report = check_step(right, qwen3(), "dapo", temperature=T)
    assert report.not_reached == {} and "|A| up to 5.5" in str(report)


def test_on_policy_no_bound_is_exercised():
    report = check_step(right, qwen3(), "dapo", temperature=T, without=["ratio"])
    assert {*report.not_reached} == {
        "eps_low = 0.2",
        "eps_high = 0.28",
    } and report.reach.startswith("r from 1 to 1")


@pytest.mark.parametrize("clip, acts", [(0.5, True), (1e3, False)])
def test_a_clip_of_the_norm_that_does_not_act(clip, acts):
    def step(model, rows):
        policy_step(model, rows)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)

    report = check_step(step, qwen3(), "dapo", temperature=T, clip=clip)
    assert report and (f"clip = {clip:g}" in report.not_reached) != acts, report


def test_a_kl_term_without_reference_is_not_exercised(reference):
    """Take the reference's log-probabilities from the rows, and find beta named as not
    reached.
    """
    goal = make_goal("grpo", {}, T)
    case = build_case(reference, goal, None, ())
    rows = [replace(r, ref=None) for r in case.rows]
    case = build_case(reference, goal, rows, ())
    printed = not_reached(
        goal,
        case.forward,
        case.padded,
        FLOAT32_BOUND,
        gradients_by_row(goal, case.forward, case.padded),
    )
    assert printed == {"beta = 0": "no other value can be tried on these rows"}


# ---- parameters of odd shapes, and gradients that are not finite ---------------------
class Gated(Bigram):
    def __init__(self, gate):
        super().__init__()
        self.gate = torch.nn.Parameter(torch.full(gate, 1.5))

    def forward(self, ids):
        return self.table(ids) * self.gate.sum()


def bare_step(model, rows):
    """Compute DAPO's gradient, one row at a time."""
    total = sum(sum(r.trains) for r in rows)
    for r in rows:
        z = model(torch.tensor([r.ids]))[0, len(r.prompt) - 1 : -1] / T
        ratio = (
            z.log_softmax(-1)[range(len(r.response)), r.response] - torch.tensor(r.old)
        ).exp()
        J = torch.minimum(ratio * r.adv, ratio.clamp(0.8, 1.28) * r.adv)
        (-(J * torch.tensor(r.trains)).sum() / total).backward()


@pytest.mark.parametrize("gate", [(1,), (1, 1), (1, 1, 1)])
def test_one_number_has_no_standard_deviation(gate):
    torch.manual_seed(0)
    report = check_step(bare_step, Gated(gate), "dapo", temperature=T)
    assert report and not [n for n in report.notes if n.oracle == "mutation"], report


def test_a_gradient_that_is_not_finite_is_not_called_zero():
    """A NaN in the model is refused as that; rows whose advantages are 0 are refused
    for a gradient of 0.
    """
    torch.manual_seed(0)
    model = Gated((1,))
    model.gate.data.fill_(torch.nan)
    with pytest.raises(upref.InputError, match="is not finite, in gate first"):
        check_step(
            bare_step,
            model,
            "dapo",
            temperature=T,
            rows=rows_of(Gated((1,))),
            perturb_weights=False,
        )
    with pytest.raises(upref.InputError, match="gradient is 0 on these rows"):
        zero = [replace(r, adv=0.0) for r in rows_of(Gated((1,)))]
        check_step(
            bare_step,
            Gated((1,)),
            "dapo",
            temperature=T,
            rows=zero,
            perturb_weights=False,
        )


def rows_of(model) -> list[Row]:
    return build_case(TorchModel(model), make_goal("dapo", {}, T), None, ()).rows
