# SPDX-License-Identifier: Apache-2.0
"""The cause of a recorded step is named where two halves of its rows have it too, and
is called possible elsewhere.
"""

import pytest
import torch
from loops import BUGS, T, policy_step, qwen3, with_

from tests.support.daily import daily
from upref.step import (
    Row,
    TorchModel,
    check_dump,
    check_recorded,
    dump_step,
    record_step,
)
from upref.step.compare.case import build_case, make_goal
from upref.step.compare.record import Passed
from upref.step.explain.halves import NO_HALVES, ONE_PASS, UNFIT, halves_of

FORGOTTEN = "the temperature is left out (it is 1)"
COLD = with_(temperature=1.0)
MICRO_BATCHES = "token-mean is taken over micro-batches of 4"


def coincidence(model, rows):
    """Leave the gradient of a forgotten temperature. Its first backward pass adds
    noise, which the second one takes away.
    """
    random, sign = torch.Generator().manual_seed(1), [1e-3]

    def turn(model):
        sign[0] = -sign[0]

    def disturbed(p):
        noise = torch.randn(p.shape, generator=random)
        return p.register_hook(lambda g: g + sign[0] * noise)

    handles = [disturbed(p) for p in model.parameters()]
    policy_step(model, rows, temperature=1.0, after=turn)
    for handle in handles:
        handle.remove()


def recorded(step, *, clip=None, bound=None):
    """Return the report on one recorded step of a Qwen3. clip: the bound to which the
    step clips; bound: the one that is meant.
    """
    model = qwen3()
    rows = build_case(TorchModel(model), make_goal("dapo", {}, T), None, ()).rows
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record_step(model) as seen:
        step(model, rows)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return check_recorded(seen, [rows], "dapo", temperature=T, clip=bound)


def dumped(folder, step):
    """Return the report on one step of a Qwen3 that was written to a file."""
    model = qwen3()
    rows = build_case(TorchModel(model), make_goal("dapo", {}, T), None, ()).rows
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dump_step(model, rows, folder / "step.npz"):
        step(model, rows)
        optimizer.step()
    return check_dump(folder / "step.npz", qwen3(), "dapo", temperature=T)


@pytest.mark.parametrize(
    ("step", "cause"),
    [(COLD, FORGOTTEN), (with_(normalizer="micro-batch"), MICRO_BATCHES)],
)
def test_a_cause_that_both_halves_have_is_named(tmp_path, step, cause):
    for report in (recorded(step), dumped(tmp_path, step)):
        assert report.failures[0].cause.startswith(cause), report


@pytest.mark.parametrize(
    "name", daily(["gradients zeroed in the loop", "no attention mask"], 2)
)
def test_so_is_one_of_rows_that_are_lost_or_padded(name):
    ((cause, step),) = [(cause, step) for key, cause, step in BUGS if key == name]
    said = recorded(step).failures[0].cause
    assert cause in said and "possible" not in said, said


@pytest.mark.nightly
def test_a_coincidence_is_called_possible(tmp_path):
    for report in (recorded(coincidence), dumped(tmp_path, coincidence)):
        first = report.failures[0]
        assert first.cause == f"{UNFIT}{FORGOTTEN}", report


def test_of_one_backward_pass_a_cause_is_called_possible(tmp_path):
    whole = with_(temperature=1.0, size=8)
    for report in (recorded(whole), dumped(tmp_path, whole)):
        first = report.failures[0]
        assert not report and first.cause == f"{ONE_PASS}{FORGOTTEN}", report
        assert first.fault_ids == ("temperature-missing",)
    assert recorded(with_(size=8))


@pytest.mark.nightly
def test_of_gradients_that_are_changed_between_passes_nothing_is_tested(tmp_path):
    def halved(model):
        for p in model.parameters():
            p.grad *= 0.5

    step = with_(temperature=1.0, after=halved)
    for report in (recorded(step), dumped(tmp_path, step)):
        said = report.failures[0].cause
        assert said.startswith((NO_HALVES, "no known cause fits")), said


def test_a_clip_behind_the_last_pass_is_named_and_hides_no_cause():
    (failure,) = recorded(policy_step, clip=0.1).failures
    assert failure.cause.startswith("the gradient's norm is clipped to 0.1"), failure
    (failure,) = recorded(policy_step, bound=0.1).failures
    assert failure.cause == "the clip of the gradient's norm does not act"
    assert recorded(COLD, clip=0.1, bound=0.1).failures[0].cause == FORGOTTEN
    assert recorded(policy_step, clip=0.1, bound=0.1)


@pytest.mark.nightly
def test_of_large_parameters_some_entries_tell(tmp_path, monkeypatch):
    for module in ("compare.sketch", "explain.halves"):
        monkeypatch.setattr(f"upref.step.{module}.KEPT", 200)
    for report in (recorded(COLD), dumped(tmp_path, COLD)):
        assert report.failures[0].cause == FORGOTTEN, report
    assert recorded(coincidence).failures[0].cause == f"{UNFIT}{FORGOTTEN}"


def test_what_is_said_of_parameters_needs_no_halves():
    def frozen(model):
        model.lm_head.weight.grad = None

    said = recorded(with_(size=8, after=frozen)).failures[0].cause
    assert said.endswith("no gradient: lm_head.weight") and "possible" not in said


def test_rows_that_are_fed_twice_have_no_halves():
    """Find two halves of two passes, and none of one pass, of rows fed twice, or of
    passes that do not follow each other.
    """
    model = qwen3()
    rows = build_case(TorchModel(model), make_goal("dapo", {}, T), None, ()).rows
    one, two = ([row.ids for row in part] for part in (rows[:4], rows[4:]))
    x = {"w": torch.ones(3)}
    first, second = Passed(one, {}, x), Passed(two, x, {"w": torch.full((3,), 3.0)})
    halves = halves_of([first, second], rows)
    assert halves.of_row == [0] * 4 + [1] * 4
    assert [g["w"].tolist() for g in halves.gradients] == [[1.0] * 3, [2.0] * 3]
    assert halves_of([first, Passed(one + two, x, x)], rows) is None
    assert halves_of([first], rows[:4]) is None
    assert halves_of([first, Passed(two, {"w": 2 * x["w"]}, x)], rows) is None


class Bigram(torch.nn.Module):
    """A model whose one gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(32, 32, sparse=True)

    def forward(self, ids):
        return self.table(ids)


@pytest.mark.parametrize(("temperature", "cause"), [(0.7, ""), (1.0, FORGOTTEN)])
def test_a_sparse_gradient_is_recorded(temperature, cause):
    """The step of a model with sparse gradients agrees, or has the temperature's cause."""
    torch.manual_seed(0)
    model = Bigram()
    rows = [
        Row([3, 4], [5, 6, 7], [True, False, True], 1.0, old=[-3.0, -3.5, -3.4]),
        Row([8, 9, 10], [11, 12], [True, True], -1.0, old=[-3.2, -4.1]),
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record_step(model) as seen:
        for r in rows:
            z = model(torch.tensor([r.ids]))[0, len(r.prompt) - 1 : -1] / temperature
            lp = z.log_softmax(-1).gather(1, torch.tensor(r.response)[:, None])[:, 0]
            ratio = (lp - torch.tensor(r.old)).exp()
            J = torch.minimum(ratio * r.adv, ratio.clamp(0.8, 1.28) * r.adv)
            (-(J * torch.tensor(r.trains)).sum() / 4).backward()
        optimizer.step()
    report = check_recorded(seen, rows, "dapo", temperature=0.7)
    assert [f.cause for f in report.failures][:1] == ([cause] if cause else [])
