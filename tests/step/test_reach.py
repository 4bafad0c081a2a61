# SPDX-License-Identifier: Apache-2.0
"""What the rows of a step exercise of an objective: a number whose value makes no difference is printed as such."""

from dataclasses import replace

import pytest
import torch
from loops import T, collated, log_probs, policy_step, qwen3, right

import upref
from upref.step import Row, TorchModel, check_step
from upref.step.case import BOUND, built, meant, perturb
from upref.step.forward import expected
from upref.step.reach import not_reached


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


@pytest.mark.parametrize("name", NAMES)
def test_each_number_makes_a_difference_or_is_printed(reference, name):
    """Half and twice its value, or 0.1 and 0.2 for 0: the whole gradient is computed anew with each."""
    o = upref.get(name)
    with_dual_clip = {"c": 3.0} if "c" in o.hyperparameters else {}
    goal = meant(o, with_dual_clip, T)
    case = built(reference, goal, None, ())
    rows = expected(goal, case.forward, case.b)
    want = rows.sum(0)
    printed = not_reached(goal, case.forward, case.b, BOUND, rows)

    def error(**hp):
        other = meant(o, goal.hp | {k: v for k, v in hp.items() if k != "beta"}, T, beta=hp.get("beta", 0.0))
        return float((expected(other, case.forward, case.b).sum(0) - want).norm() / want.norm())

    for number, value in (o.hyperparameters | with_dual_clip).items():
        others = (1, 2) if number == "seed" else (0.1, 0.2) if value == 0 else (value / 2, value * 2)
        seen = all(error(**{number: v}) > BOUND for v in others)
        assert seen or f"{number} = {value:g}" in printed, (number, printed)
    if o.level == "token" and not o.reads:  # its bounds are of the ratio, and rows have ratios beside each of them
        assert not {f"{k} = {v:g}" for k, v in goal.hp.items() if k in ("eps", "eps_low", "eps_high")} & {*printed}


def test_a_much_too_wide_bound_of_gspo_is_not_vouched_for():
    """No response of the rows has a ratio between the bounds of GSPO and 1.03."""
    o = upref.get("gspo")

    def step(model, rows):
        ids, there, trains, old, adv, _ = collated(rows)
        lp = log_probs(model, ids, there).double()
        J = o.J(lp, old[:, 1:].double(), adv[:, 1:].double(), trains[:, 1:].bool(), eps_low=0.03, eps_high=0.03)
        (-J).backward()

    report = check_step(step, qwen3(), "gspo", temperature=T)
    assert report and report.not_reached["eps_low = 0.0003"].endswith("0.03 agree too"), report.not_reached
    said = report.text().splitlines()[-1]
    assert said.startswith("not exercised: eps_low = 0.0003 (") and "s from 0.95" in said, said


def test_a_dual_clip_beyond_the_ratios_is_not_vouched_for():
    report = check_step(right, qwen3(), "dapo", temperature=T, c=3.0)  # the loop has none
    assert report and [*report.not_reached] == ["c = 3"]
    assert "not exercised: c = 3 (300 agrees too); clamps and bounds beyond the rows' range (r from 0.51 to 2" in str(
        report
    )
    low = check_step(right, qwen3(), "dapo", temperature=T, c=1.5)
    assert not low


def test_what_the_rows_do_exercise_is_not_printed():
    report = check_step(right, qwen3(), "dapo", temperature=T)
    assert report.not_reached == {} and "|A| up to 2" in str(report)


def test_on_policy_no_bound_is_exercised():
    report = check_step(right, qwen3(), "dapo", temperature=T, without=["ratio"])
    assert {*report.not_reached} == {"eps_low = 0.2", "eps_high = 0.28"} and report.reach.startswith("r from 1 to 1")


@pytest.mark.parametrize("clip, acts", [(0.5, True), (1e3, False)])
def test_a_clip_of_the_norm_that_does_not_act(clip, acts):
    def step(model, rows):
        policy_step(model, rows)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)

    report = check_step(step, qwen3(), "dapo", temperature=T, clip=clip)
    assert report and (f"clip = {clip:g}" in report.not_reached) != acts, report


def test_a_kl_term_without_reference_is_not_exercised(reference):
    goal = meant("grpo", {}, T)
    case = built(reference, goal, None, ())
    rows = [replace(r, ref=None) for r in case.rows]
    case = built(reference, goal, rows, ())
    printed = not_reached(goal, case.forward, case.b, BOUND, expected(goal, case.forward, case.b))
    assert printed == {"beta = 0": "no other value can be tried on these rows"}


# ---- parameters of odd shapes, and gradients that are not finite -----------------------------------------------------
class Gated(Bigram):
    def __init__(self, gate):
        super().__init__()
        self.gate = torch.nn.Parameter(torch.full(gate, 1.5))

    def forward(self, ids):
        return self.table(ids) * self.gate.sum()


def bare_step(model, rows):
    total = sum(sum(r.trains) for r in rows)
    for r in rows:
        z = model(torch.tensor([r.ids]))[0, len(r.prompt) - 1 : -1] / T
        ratio = (z.log_softmax(-1)[range(len(r.response)), r.response] - torch.tensor(r.old)).exp()
        J = torch.minimum(ratio * r.adv, ratio.clamp(0.8, 1.28) * r.adv)
        (-(J * torch.tensor(r.trains)).sum() / total).backward()


@pytest.mark.parametrize("gate", [(1,), (1, 1), (1, 1, 1)])
def test_one_number_has_no_standard_deviation(gate):
    torch.manual_seed(0)
    report = check_step(bare_step, Gated(gate), "dapo", temperature=T)
    assert report and not [n for n in report.notes if n.oracle == "mutation"], report


def test_a_gradient_that_is_not_finite_is_not_called_zero():
    torch.manual_seed(0)
    model = Gated((1,))
    model.gate.data.fill_(torch.nan)
    with pytest.raises(upref.InputError, match="is not finite, in gate first"):
        check_step(bare_step, model, "dapo", temperature=T, rows=rows_of(Gated((1,))), stir=False)
    with pytest.raises(upref.InputError, match="gradient is 0 on these rows"):
        zero = [replace(r, adv=0.0) for r in rows_of(Gated((1,)))]
        check_step(bare_step, Gated((1,)), "dapo", temperature=T, rows=zero, stir=False)


def rows_of(model) -> list[Row]:
    return built(TorchModel(model), meant("dapo", {}, T), None, ()).rows
