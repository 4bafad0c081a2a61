# SPDX-License-Identifier: Apache-2.0
"""check_step on bare loops: right ones agree, and one bug each is named."""

import copy
import math
import os
import sys

import numpy
import pytest
import torch
from loops import BUGS, RIGHT, T, collated, policy_step, qwen3, right, surrogate

import upref
from tests.support.daily import daily
from upref.step import (
    Functions,
    Row,
    TorchModel,
    check_recorded,
    check_step,
    record_step,
)
from upref.step.compare.case import build_case, make_goal
from upref.step.compare.forward import Forward
from upref.step.explain.forwards import (
    _largest_packs,
    _repeated_id_variants,
    run_variants,
)
from upref.step.explain.scores import log_prob_variants
from upref.step.inputs.families import tiny
from upref.step.inputs.rows import make_rows


@pytest.fixture(scope="module")
def model():
    return qwen3()


@pytest.mark.parametrize("name, step", RIGHT)
def test_a_right_step_agrees(name, step, model):
    report = check_step(step, model, "dapo", temperature=T)
    assert report and report.error < 5e-6, report


@pytest.mark.parametrize("name, cause, step", daily(BUGS, 2))
def test_a_bug_is_rejected_and_named(name, cause, step, model):
    report = check_step(step, model, "dapo", temperature=T)
    assert not report
    assert cause in report.failures[0].cause, report


@pytest.mark.parametrize(("factor", "named"), [(1 + 4e-5, False), (1 + 4e-4, True)])
def test_a_difference_near_rounding_has_no_cause(factor, named, model):
    """An entropy bonus with a coefficient of 1e-4 would fit it, and rounding does too."""

    def scaled(m, rows):
        right(m, rows)
        for p in m.parameters():
            p.grad *= factor

    failure = check_step(scaled, model, "dapo", temperature=T).failures[0]
    assert bool(failure.fault_ids) == named, failure
    assert ("too little to tell a cause from" in failure.cause) != named


def test_the_model_is_as_it_was(model):
    before = copy.deepcopy(model.state_dict())
    check_step(right, model, "dapo", temperature=T)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_lazy_case_is_refused(model):
    """Give a temperature of 1, two rows, and an objective that needs what rows lack."""
    with pytest.raises(upref.InputError, match="temperature 1"):
        check_step(right, model, "dapo", temperature=1.0)
    rows = [
        Row([3, 4], [5, 6], [True, True], 1.0),
        Row([7, 8, 9], [10, 11], [True, True], -1.0),
    ]
    with pytest.raises(upref.InputError, match="could hide bugs"):
        check_step(right, model, "dapo", temperature=T, rows=rows)
    assert check_step(lambda m, r: policy_step(m, r, temperature=1.0), model, "dapo", temperature=1.0,
                      without=["temperature"])  # fmt: skip
    with pytest.raises(
        upref.InputError, match="tpo needs the prompt of each response and its share"
    ):
        check_step(right, model, "tpo", temperature=T)


@pytest.mark.parametrize(
    "step, sentence",
    [
        (lambda m, rows: None, "left no gradient"),
        (lambda m, rows: 1 / 0, "the step fails on these rows: ZeroDivisionError"),
        (lambda m, rows: sys.exit(0), r"the step ends the program \(SystemExit\)"),
        (lambda m, rows: os._exit(0), r"the step ends the program \(Ended\)"),
    ],
)
def test_a_step_that_cannot_be_judged_gets_a_sentence(step, sentence, model):
    before = copy.deepcopy(model.state_dict())

    def moved(m, rows):
        next(m.parameters()).data.zero_()
        return step(m, rows)

    with pytest.raises(upref.InputError, match=sentence):
        check_step(moved, model, "dapo", temperature=T)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_trainer_that_cannot_be_handed_rows_is_recorded(model):
    """Three epochs on the same rows: the weights move between the steps, and each is
    compared with its own.
    """
    net = copy.deepcopy(model)
    rows = build_case(TorchModel(net), make_goal("dapo", {}, T), None, ()).rows
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with record_step(net) as seen:
        for _ in range(3):
            policy_step(net, rows)
            optimizer.step()
            optimizer.zero_grad()
    assert len(seen.steps) == 3
    report = check_recorded(seen, rows, "dapo", temperature=T)
    assert report and report.error < 1e-5, report
    assert not check_recorded(seen, [rows], "dapo", temperature=T, eps_high=0.5)
    with pytest.raises(upref.InputError, match="bound is a number above 0"):
        check_recorded(seen, rows, "dapo", temperature=T, bound="bf16")


@pytest.mark.parametrize("clip", daily([0.3, None], 2))
@pytest.mark.parametrize(
    ("above", "moved", "others"),
    # how far log r is above the bound log 0.8, how far a bfloat16 step may move it, and
    # how many change sides
    [
        (0.004, 0.0, 0), (0.004, 0.008, 1), (-0.004, -0.008, 1), (1e-6, 2e-6, 1),
        (0.15, 0.2, None), (-0.15, -0.2, None),  # no rounding: a wrong bound
    ],
)  # fmt: skip
def test_a_token_near_a_bound_may_be_on_either_side(model, above, moved, others, clip):
    """The step's own bound is moved, so that one token is on the other side than in
    float64: rounding explains that only very near the bound.
    """
    goal, model = make_goal("dapo", {}, T), copy.deepcopy(model)
    case = build_case(TorchModel(model), goal, None, (), coarse=True)
    t, lp = case.rows[0].trains.index(True), case.forward.lp()[0]
    row = case.rows[0]
    row.adv = numpy.broadcast_to(row.adv, len(row.response)).tolist()
    row.adv[t] = -1.0
    row.old[t] = float(lp[t]) - math.log(0.8) - above
    low = torch.full((8, max(len(r.ids) for r in case.rows) - 1), 0.2)
    low[0, len(row.prompt) - 1 + t] = 1 - 0.8 * math.exp(moved)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with record_step(model) as seen:
        policy_step(model, case.rows, size=8, low=low, high=torch.tensor(0.28))
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    bound = None if abs(above) < 1e-5 else torch.bfloat16  # None: float32
    report = check_recorded(
        seen, [case.rows], "dapo", temperature=T, bound=bound, clip=clip
    )
    assert bool(report) == (others is not None), report
    if others is not None:
        assert report.error < 1e-3, report
        assert (report.at_bound, report.other_side) == (1, others), report
        text = report.text(verbose=True)
        assert "which rounding may cross: 1; " in text, text


@pytest.mark.parametrize("bound", [0.3, 1e-3, 1e-7])
def test_a_clip_that_is_not_declared_is_one_factor(bound, model):
    def step(model, rows):
        policy_step(model, rows)
        torch.nn.utils.clip_grad_norm_(model.parameters(), bound)

    report = check_step(step, model, "dapo", temperature=T)
    assert f"the gradient's norm is clipped to {bound:g}" in report.failures[0].cause, (
        report
    )
    assert "do not train" not in str(report)


@pytest.mark.nightly
def test_the_case_decides(model):
    """With equal lengths, r = 1 and no holes some of the bugs cannot be seen; with the
    case that upref makes, all.
    """
    from upref.step.compare.case import FLOAT32_BOUND, compare, perturbed, run_step

    goal, bound = make_goal("dapo", {}, T), FLOAT32_BOUND

    def seen(without):
        """Return the names of the bugs whose error is larger than the bound on a case
        without those parts.
        """
        with perturbed(model, True):
            case = build_case(TorchModel(model), goal, None, without)
            error = {
                name: compare(goal, case, run_step(step, model, case)[0], bound).error
                for name, _, step in BUGS
            }
        return {name for name, e in error.items() if e > bound}

    full = seen(())
    assert full == {name for name, *_ in BUGS}
    unseen = {
        "lengths": {"mean of micro-batch means", "no attention mask"},
        "ratio": {"old log-probs are the current ones"},
    }
    for axis, names in unseen.items():
        assert full - seen([axis]) == names
    assert full - seen(["lengths", "ratio", "holes"]) == set.union(*unseen.values())


# ---- models that are not torch's -----------------------------------------------------
def bigram(np=numpy):
    """Return (logits, pull) of a table of logits with a row for the token before, by
    numpy or JAX's numpy.

    pull(params, ids, dz) is the gradient by the table.
    """

    def pull(params, ids, dz):
        g = numpy.zeros(params["table"].shape)
        numpy.add.at(g, numpy.array(ids), numpy.asarray(dz))
        return {"table": g}

    return (lambda params, ids: params["table"][np.array(ids)]), pull


def by_hand(params, rows, temperature=T):
    """Return DAPO's gradient by the table, without autograd."""
    total, g = sum(sum(r.trains) for r in rows), numpy.zeros_like(params["table"])
    for r in rows:
        before, n = r.ids[len(r.prompt) - 1 : -1], range(len(r.response))
        z = params["table"][before] / temperature
        logp = z - numpy.log(numpy.exp(z).sum(1, keepdims=True))
        ratio = numpy.exp(logp[n, r.response] - numpy.array(r.old))
        w = (
            numpy.where(ratio > 1.28 if r.adv > 0 else ratio < 0.8, 0, ratio * r.adv)
            * numpy.array(r.trains)
            / total
        )
        dz = (
            -w[:, None]
            * (numpy.eye(z.shape[1])[r.response] - numpy.exp(logp))
            / temperature
        )
        numpy.add.at(g, before, dz)
    return {"table": g}


def test_a_model_by_two_functions():
    params = {"table": numpy.random.default_rng(0).normal(size=(64, 64))}
    model = Functions(*bigram(), params, vocabulary=64)
    report = check_step(by_hand, model, "dapo", temperature=T)
    assert report and report.error < 1e-9, report
    wrong = check_step(
        lambda p, rows: by_hand(p, rows, 1.0), model, "dapo", temperature=T
    )
    assert "the temperature is left out" in wrong.failures[0].cause, wrong


def test_a_model_of_jax():
    """A table of bigrams, with a step by jax.grad."""
    jax = pytest.importorskip("jax", reason="JAX is not installed: `pip install jax`")
    jnp = jax.numpy
    params = {"table": jnp.array(numpy.random.default_rng(0).normal(size=(64, 64)))}

    def loss(params, rows):
        """Return DAPO's loss of a table of logits, in JAX."""
        J = 0.0
        for r in rows:
            z = params["table"][jnp.array(r.ids[len(r.prompt) - 1 : -1])] / T
            lp = jax.nn.log_softmax(z)[
                jnp.arange(len(r.response)), jnp.array(r.response)
            ]
            ratio = jnp.exp(lp - jnp.array(r.old))
            J += (
                jnp.minimum(ratio * r.adv, ratio.clip(0.8, 1.28) * r.adv)
                * jnp.array(r.trains)
            ).sum()
        return -J / sum(sum(r.trains) for r in rows)

    report = check_step(
        jax.grad(loss),
        Functions(*bigram(jnp), params, vocabulary=64),
        "dapo",
        temperature=T,
    )
    assert report, report


@pytest.mark.parametrize("family", ["qwen3", "recurrent_gemma"])
def test_a_forward_pass_that_a_model_lacks_is_not_tried(family):
    """RecurrentGemma returns no key-value cache."""
    model = TorchModel(tiny(family))
    words = [
        cause.words
        for cause, _ in run_variants(
            Forward(model, make_rows(model.vocabulary), T), log_prob_variants
        )
    ]
    assert ("prompts are run without a gradient" in words) == (
        family == "qwen3"
    ) and len(words) > 5


def test_ids_of_rows_that_start_again_are_tried_once_each():
    """Of 8 rows, ids that start again after 4 rows or more have no second time."""
    model = TorchModel(tiny("qwen3"))
    right = Forward(model, make_rows(model.vocabulary), T)
    (pack,) = _largest_packs(right)
    variants = [*_repeated_id_variants(model, right, pack)]
    periods = {}
    for variant in variants:
        period = int(variant.words.split(" start again after ")[1].split()[0])
        periods.setdefault(variant.id, []).append(period)
    assert periods == {
        "ids-of-pack-start-again-once": [1, 2, 3, 4, 5, 6, 7],
        "ids-of-pack-start-again": [2, 3],
    }
    passes = [variant.change().statistics()[0].detach() for variant in variants]
    for number, lp in enumerate(passes):
        assert not any(torch.allclose(lp, other) for other in passes[:number])


def half_softmax(model, rows):
    """Compute DAPO's gradient with the log-softmax of a float32 model in bfloat16."""
    ids, there, trains, old, adv, _ = collated(rows)
    z = model(input_ids=ids, attention_mask=there).logits[:, :-1]
    lp = (z.bfloat16() / T).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].float()
    J = surrogate(lp, old[:, 1:], adv[:, 1:])
    (-(J * trains[:, 1:]).sum() / trains[:, 1:].sum()).backward()


def test_half_precision_that_nobody_declared_fails_a_test():
    with pytest.raises(pytest.fail.Exception, match="the step computes in bfloat16"):
        upref.assert_step(half_softmax, qwen3(), "dapo", temperature=T)
    assert upref.assert_step(
        half_softmax, qwen3(), "dapo", temperature=T, half_precision=True
    )


@pytest.mark.parametrize("large", [False, True])
def test_a_large_model_is_checked_in_the_threads_of_the_process(monkeypatch, large):
    """A small model runs in one thread, a large one in the process's two; afterwards
    there are two again.
    """
    monkeypatch.setattr("upref.step.check.LARGE", 0 if large else 10**9)
    seen = set()

    class FirstCall(Exception):
        """Ends the check: one call shows the threads."""

    def step(model, rows):
        seen.add(torch.get_num_threads())
        raise FirstCall

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(upref.InputError, match="FirstCall"):
            check_step(step, qwen3(), "dapo", temperature=T)
        assert seen == ({2} if large else {1})
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
