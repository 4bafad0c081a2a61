# SPDX-License-Identifier: Apache-2.0
"""`upref.check`: what its report says, what is no loss, and the ways in. Verdicts:
tests/support/cases/table.py.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import upref
from tests.support.cases.bodies import calm, clipped
from tests.support.cases.styles import (
    accepts_kwargs,
    dead,
    float_mask,
    plain,
    poisoned,
    ppo,
    unreduced,
    wrong,
)
from upref.cli import main
from upref.errors import InputError
from upref.pytest_plugin import _assert_policy_loss, assert_policy_loss  # noqa: F401  the fixture, as pytest finds it
from upref.user_code import read
from upref.verify.check import every
from upref.verify.faults import known
from upref.verify.measure import make_case
from upref.verify.oracle import Oracle, run
from upref.verify.oracles.invariance import gradient_distance
from upref.verify.report import fail
from upref.weights.batches import random_batch


@pytest.mark.parametrize(
    "batches", [300, pytest.param(3000, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(
    ("loss", "name"), [(plain, "dapo"), (unreduced, "up_dapo"), (float_mask, "gspo")]
)
def test_no_false_alarm(loss, name, batches):
    o = upref.get(name)
    case, rng = make_case(read(loss, o, {}), o, o.resolve({})), np.random.default_rng(7)
    for _ in range(batches):
        assert (
            case.weight_error(case.ready(random_batch(rng, case.one_adv))).max()
            < 10 * case.tol
        )


@st.composite
def rollouts(draw):
    """Draw a batch: ragged, with holes, any signs and ratios."""
    B, T = draw(st.integers(2, 5)), draw(st.integers(1, 6))

    def table(low, high):
        """Draw a [B, T] tensor of floats in this range."""
        return torch.tensor(
            draw(
                st.lists(
                    st.lists(st.floats(low, high, width=32), min_size=T, max_size=T),
                    min_size=B,
                    max_size=B,
                )
            ),
            dtype=torch.float64,
        )

    mask = table(0, 1) > 0.3
    mask[:, draw(st.integers(0, T - 1))] = True
    old = table(-9, -1)
    return upref.Rollouts(
        torch.clamp(old + table(-3, 3), max=0.0), old, table(-3, 3), mask
    )


@settings(deadline=None, max_examples=100, derandomize=True)
@given(b=rollouts())
def test_hypothesis_finds_nothing_in_a_right_loss(b):
    x = b.logp.clone().requires_grad_()
    (g,) = torch.autograd.grad(plain(x, b.logp_old, b.adv, b.mask), x)
    torch.testing.assert_close(-g, upref.get("dapo").gradient(b), rtol=1e-6, atol=1e-12)


def test_a_loss_that_is_told_the_number_of_micro_batches():
    """Then they are equal, as in TRL: a mean over responses adds up, one over the
    micro-batch's own tokens does not.
    """

    def by_responses(log_prob, old_log_prob, advantages, mask, num_micro_batches):
        x = ppo((log_prob - old_log_prob).exp(), advantages, 0.8, 1.2).where(mask, 0)
        return -(x.sum(1) / mask.sum(1)).mean() / num_micro_batches

    def by_tokens(
        log_prob, old_log_prob, advantages, mask, gradient_accumulation_steps
    ):
        """Return DAPO's loss divided by the number of micro-batches."""
        return (
            plain(log_prob, old_log_prob, advantages, mask)
            / gradient_accumulation_steps
        )

    def twice(log_prob, old_log_prob, advantages, mask, totals, num_micro_batches=1):
        x = ppo((log_prob - old_log_prob).exp(), advantages, 0.8, 1.28).where(mask, 0)
        # who is told the totals is told this too
        return -x.sum() / totals.tokens / num_micro_batches

    assert "micro-batches" in {f.oracle for f in upref.check(twice, "dapo").failures}
    report = upref.check(by_responses, "grpo")
    assert report and report.oracles["micro-batches"] == "ok", str(report)
    assert "micro-batches have equally many responses" in report.text(verbose=True)
    assert "micro-batches" in {
        f.oracle for f in upref.check(by_tokens, "dapo").failures
    }


def test_a_correction_that_is_bounded_below_is_a_verdict():
    """The search for causes multiplies by the ratio, up to bounds that numpy has
    computed.
    """

    def bounded(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
        w = (old_log_prob - rollout_log_probs).exp().clamp(max=2).detach()
        r = (log_prob - old_log_prob).exp().detach().clamp(0.8, 5.0)
        return -(w * r * advantages * log_prob).where(mask, 0).sum() / mask.sum()

    report = upref.check(bounded, "tis(cispo)")
    assert {f.oracle for f in report.failures} >= {"gradient"}, report.text()


def test_a_loss_centered_over_the_batch_is_a_verdict():
    def centered(log_prob, old_log_prob, advantages, mask):
        A, n = advantages - advantages[mask].mean(), mask.sum(1, keepdim=True)
        s = ((log_prob - old_log_prob).where(mask, 0).sum(1, keepdim=True) / n).exp()
        x = torch.minimum(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A)
        return -(x.where(mask, 0).sum(1) / n[:, 0]).mean()

    report = upref.check(centered, "gspo")
    assert {f.oracle for f in report.failures} >= {"gradient"}, report.text()


@pytest.mark.parametrize("name", ["gspo", "cispo", "dapo"])
def test_the_search_for_causes_takes_bounds_of_numpy(name):
    o = upref.get(name)

    def words_of_faults(kind):
        return [
            f.words for f in known("losses", o, o.resolve({}), [kind(0.8), kind(1.28)])
        ]

    assert words_of_faults(np.float64) == words_of_faults(float)


def test_determinism_can_be_skipped():
    """A loss that changes from call to call fails that oracle alone; without it, the
    others say what they find.
    """
    calls = []

    def counts(log_prob, old_log_prob, advantages, mask):
        calls.append(0)
        return plain(log_prob, old_log_prob, advantages, mask) * (
            1 + 1e-3 * (len(calls) % 5)
        )

    assert {f.oracle for f in upref.check(counts, "dapo").failures} == {"determinism"}
    report = upref.check(counts, "dapo", skip=["determinism"])
    assert report.oracles["determinism"] == "skipped on request"
    assert (
        report.oracles["in-training"]
        == "what it found is for determinism, which is skipped"
    )
    assert report.oracles["gradient"] == "failure"
    assert "determinism" not in {f.oracle for f in report.findings}
    assert upref.check(plain, "dapo", skip=["determinism"])


def test_a_loss_that_writes_into_its_inputs_differs(tmp_path, capsys):
    """Its inputs are fresh at each call, so it is judged like any other: status 1."""
    text = (
        "def f(log_prob, old_log_prob, advantages, mask):\n    A = advantages.clone()\n    advantages.mul_(2)\n"
        "    return -(A * log_prob)[mask].mean()\n"
    )
    (tmp_path / "writes.py").write_text(text)
    exec(text, names := {})
    report = upref.check(names["f"], "reinforce_off_policy")
    assert [(f.oracle, f.regime) for f in report.failures] == [
        ("mutation", "advantages is changed in place")
    ]
    assert (
        main(["check", f"{tmp_path / 'writes.py'}:f", "--as", "reinforce_off_policy"])
        == 1
    )
    assert "NOT reinforce_off_policy: 1 failure" in capsys.readouterr().out
    identity = upref.identify(names["f"])
    assert (identity.kind, identity.name) == ("pitfall", "reinforce_off_policy"), str(
        identity
    )
    assert identity.why == "advantages is changed in place"


def test_a_refusal_of_group_ids_is_noted_once():
    """A table over all ids asks for terabytes, each time for another number of bytes."""

    def table(log_prob, old_log_prob, advantages, mask, group):
        """Return DAPO's loss with the tokens of each prompt in a table over all ids up
        to the largest, which asks for too much memory where ids are large.
        """
        sizes = torch.zeros(int(group.max()) + 1, dtype=log_prob.dtype).index_add(
            0, group, mask.sum(1).double()
        )
        terms = (
            ppo((log_prob - old_log_prob).exp(), advantages, 0.8, 1.28)
            .where(mask, 0)
            .sum(1)
        )
        return -(terms / sizes[group]).sum() / len(group.unique())

    report = upref.check(table, "dapo")
    assert report, report.text()
    (refused,) = [f for f in report.notes if "2^40" in f.regime]
    assert "asked for more memory than there is" in refused.found


def test_a_nan_under_the_mask_is_a_note_and_a_number_is_not():
    """Find a note where masked NaN spoils a loss, and a failure where masked numbers
    change it.
    """
    report = upref.check(poisoned, "dapo")
    assert report and [
        f
        for f in report.notes
        if f.oracle == "masked-values" and "nan" in f.regime and "NaN" in f.cause
    ]
    report = upref.check(
        lambda lp, old, adv, mask: (
            plain(lp, old, adv, mask) + 0 * lp.sum() + old.mean()
        ),
        "dapo",
    )
    assert any(
        f.oracle == "masked-values" and "hold 0" in f.regime for f in report.failures
    ), str(report)


def test_what_padding_holds_has_no_effect_on_the_distance_of_two_gradients():
    mask = torch.tensor([[True, True, False]])
    due = torch.tensor([[1.0, 4.0, 0.0]])
    found = torch.tensor([[1.5, 4.0, 0.0]])
    for padding in (0.0, 1e6, torch.inf, torch.nan):
        due[0, 2] = padding
        distance = gradient_distance(found, due, mask, tol=1e-6)
        assert distance.tolist() == [[0.125, 0, 0]], padding
    infinite = torch.tensor([[torch.inf, 4.0, 0.0]])
    assert gradient_distance(infinite, found, mask, 1e-6).tolist() == [
        [torch.inf, 0, 0]
    ]
    assert gradient_distance(found, infinite, mask, 1e-6).tolist() == [
        [torch.inf, 0, 0]
    ]
    assert gradient_distance(infinite, infinite, mask, 1e-6).tolist() == [[0, 0, 0]]


def test_padding_of_a_wrong_loss_hides_no_fault_and_makes_none():
    """The oracles of padding report a gradient there, such as NaN of 0 times an infinite
    slope. Other oracles compare the tokens that train.
    """

    def divided_by_the_mask(log_prob, old_log_prob, advantages, mask):
        J = clipped(log_prob - old_log_prob, advantages) / mask
        return -torch.where(mask.bool(), J, 0).sum() / mask.sum()

    def huge_in_padding_and_weighed_by_rank(log_prob, old_log_prob, advantages, mask):
        J = clipped(log_prob - old_log_prob, advantages)
        J = J * (1 + torch.arange(len(mask), dtype=J.dtype)[:, None])
        return -(J * torch.where(mask.bool(), 1.0, 1e12)).sum() / mask.sum()

    skip = ("unusual-inputs", "one-response")
    report = upref.check(divided_by_the_mask, "dapo", skip=skip)
    assert {failure.oracle for failure in report.failures} == {
        "padding",
        "masked-values",
        "zero-advantage",
    }, str(report)
    report = upref.check(huge_in_padding_and_weighed_by_rank, "dapo", skip=skip)
    oracles = {failure.oracle for failure in report.failures}
    assert {"padding", "permutation"} <= oracles, str(report)


def test_dead_and_swallowed_hyperparameters():
    for loss, key, value in ((dead, "eps_low", 0.2), (accepts_kwargs, "c", 3.0)):
        report = upref.check(loss, "dapo", **{key: value})
        assert [
            f
            for f in report.failures
            if f.oracle == "dead-hyperparameter" and key in f.regime
        ], str(report)


def test_the_batch_shown_is_python_that_shows_it():
    loss = wrong(lambda lp, r, A: ppo(r, A, 0.8, 1.2))
    f = upref.check(loss, "dapo").failures[0]
    scope = {"torch": torch, "upref": upref}
    exec(f.batch, scope)
    b = scope["b"]
    assert b.mask.shape == (1, 1)
    assert upref.get("dapo").gradient(b).item() > 0
    x = b.logp.requires_grad_()
    assert torch.autograd.grad(loss(x, b.logp_old, b.adv, b.mask), x)[0].item() == 0


# ---- no loss at all ------------------------------------------------------------------
BAD = {
    "raises": ("raise KeyError('nope')", "raised KeyError"),
    "nan": ("return log_prob.sum() * float('nan')", "is nan on a good batch"),
    "vector": ("return log_prob.sum(0)[:3]", "returns shape"),
    "detached": ("return log_prob.detach().sum()", "no gradient"),
    "number": ("return 1.0", "as .item() or float() gives it"),
    "nothing": ("log_prob.sum()", "does it end without `return`?"),
    "keys": (
        "return {'clip': 0.0, 'pg': log_prob.sum()}",
        "its keys are 'clip', 'pg'; of these only ['pg'] has",
    ),
    "last": (
        "return {}, log_prob.sum()",
        "holds dict, Tensor; of these only [1] has a gradient",
    ),
    "text": ("return 'a'", "returns a str, not a tensor"),
    "overwrites": ("log_prob.mul_(2); return log_prob.sum()", "raised RuntimeError"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_losses_are_one_sentence(name, tmp_path, capsys):
    body, said = BAD[name]
    file = tmp_path / "bad.py"
    file.write_text(f"def f(log_prob, old_log_prob, advantages, mask):\n    {body}\n")
    assert main(["check", f"{file}:f", "--as", "reinforce_off_policy"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("target", "said"),
    [("nofile.py:f", "no file"), ("no_such_module:f", "does not import"), ("math:no", "has no"), ("math", "not a loss"),
     ("math:pi", "not a function")],
)  # fmt: skip
def test_bad_names(target, said, capsys):
    assert main(["check", target, "--as", "dapo"]) == 2
    assert said in capsys.readouterr().err


def test_arguments_that_nobody_has():
    with pytest.raises(upref.InputError, match="temperature"):
        upref.check(
            lambda log_prob, old_log_prob, advantages, mask, temperature: (
                log_prob.sum()
            ),
            "dapo",
        )
    with pytest.raises(upref.InputError, match="cannot tell"):
        upref.check(lambda a, b: a.sum(), "dapo")
    with pytest.raises(upref.InputError, match="no oracle"):
        upref.check(plain, "dapo", skip=("nothing",))
    with pytest.raises(upref.InputError, match="no hyperparameter"):
        upref.check(plain, "dapo", epsilon=0.2)


def test_an_aggregation_by_a_length_is_refused(tmp_path, capsys):
    """An objective has no length L, so the name is no answer to --agg."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def loss(log_prob, old_log_prob, advantages, mask):\n    return -log_prob.sum()\n"
    )
    for name in ("dapo", "dr_grpo"):
        command = ["check", f"{file}:loss", "--as", name, "--agg"]
        assert main([*command, "seq-mean-token-sum-norm"]) == 2
        said = capsys.readouterr().err
        assert "a bug in upref" not in said
        assert "a fixed length L, which an objective does not have" in said
    assert main([*command, "mean"]) == 2
    said = capsys.readouterr().err
    assert "unknown aggregation 'mean'" in said
    assert "seq-mean-token-sum," in said and "sum-norm" not in said


def by_length(log_prob, old_log_prob, advantages, mask, max_len=1024):
    """Return Dr. GRPO's loss divided by a fixed length, as its code does."""
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    J = torch.minimum(r * A, r.clamp(0.8, 1.2) * A) * mask
    return -(J.sum(1) / max_len).mean()


def test_a_fixed_length_is_named_where_it_is_all_that_differs():
    report = upref.check(by_length, "dr_grpo")
    assert not report
    for f in report.failures:
        assert f.cause.startswith("every weight is 1/1024 times what it should be: ")
        assert "seq-mean-token-sum-norm" in f.cause and "1024" in f.cause
    assert upref.check(by_length, "dr_grpo", max_len=1)
    three = upref.check(by_length, "dr_grpo", max_len=1 / 3)
    assert "seq-mean-token-sum-norm" not in three.text()
    other = upref.check(by_length, "dr_grpo", max_len=1024, eps=0.3)
    assert "1/1024" not in other.text()


def cispo_of_its_own(logps, old_logps, adv, mask, eps_high=0.28):
    w = torch.where(mask, logps - old_logps, 0).exp().clamp(max=1 + eps_high)
    A = torch.where(mask, adv, 0)
    return -(w.detach() * A * torch.where(mask, logps, 0)).sum() / mask.sum()


def twice_cispo(logps, old_logps, adv, mask, eps_high=0.28):
    return 2 * cispo_of_its_own(logps, old_logps, adv, mask, eps_high)


def test_a_default_of_the_loss_with_which_it_agrees_is_said():
    hint = "it agrees with --hp eps_high=0.28"
    report = upref.check(cispo_of_its_own, "cispo")
    (failure,) = report.failures
    assert failure.cause == f"eps_high is 0.28, not 4; {hint}, the loss's own default"
    assert upref.check(cispo_of_its_own, "cispo", eps_high=0.28)
    # given, it is no default; and what is wrong with it too is not hidden
    report = upref.check(twice_cispo, "cispo")
    assert not report and hint not in report.text()
    assert hint not in upref.check(cispo_of_its_own, "cispo", eps_high=3).text()
    both = upref.check(dapo_of_its_own, "dapo")
    assert "--hp eps_low=0.1 --hp eps_high=0.3, the loss's own defaults" in both.text()


def dapo_of_its_own(logps, old_logps, adv, mask, eps_low=0.1, eps_high=0.3):
    r = torch.where(mask, logps - old_logps, 0).exp()
    A = torch.where(mask, adv, 0)
    J = torch.minimum(r * A, r.clamp(1 - eps_low, 1 + eps_high) * A)
    return -J.sum() / mask.sum()


# ---- the ways in ---------------------------------------------------------------------
def test_command_and_json(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("def f(log_prob, old_log_prob, advantages, mask):\n    print('hello')\n"
                    "    return -(advantages[mask] * log_prob[mask]).mean()\n")  # fmt: skip
    assert main(["check", f"{file}:f", "--as", "dapo", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main(["check", f"{file}:f", "--as", "reinforce_pp", "--hp", "eps=0.2"]) in (
        1,
        2,
    )
    capsys.readouterr()


def test_plugin(assert_policy_loss):
    assert_policy_loss(float_mask, "gspo", eps_low=3e-4, eps_high=4e-4)
    with pytest.raises(pytest.fail.Exception, match="A > 0"):
        assert_policy_loss(plain, "up_dapo")


def test_plugin_by_import():
    assert assert_policy_loss(plain, "dapo")


def test_every_oracle_has_its_turn():
    report = upref.check(plain, "dapo")
    assert list(report.oracles) == [o.name for o in every()]
    assert len(report.oracles) == 24


def test_import_is_light():
    heavy = ("sympy", "matplotlib", "verl", "upref.verify")
    code = f"import upref, sys; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True
        ).stdout.strip()
        == "[]"
    )


@pytest.mark.verl
@pytest.mark.parametrize(
    ("mode", "name", "ok"),
    [
        ("vanilla", "dapo", True),
        ("sapo", "sapo", True),
        ("cispo", "cispo_verl", True),
        ("vanilla", "up_dapo", False),
    ],
)
def test_verl(mode, name, ok):
    pytest.importorskip("verl")
    report = upref.check(f"verl:{mode}@matched", name)
    assert bool(report) is ok, str(report)


@pytest.mark.verl
def test_a_named_loss_is_the_one_that_ships():
    """verl's vanilla loss is not DAPO: its upper clip is 0.2, and its dual clip is on."""
    pytest.importorskip("verl")
    quick = [
        o.name
        for o in every()
        if o.name not in ("gradient", "on-policy", "aggregation")
    ]
    shipped = upref.check("verl:vanilla", "dapo", skip=quick)
    assert not shipped and "eps_high is 0.2, not 0.28; c is 3, not absent" in str(
        shipped
    )
    assert str(shipped).splitlines()[0].endswith("; as shipped")
    matched = str(upref.check("verl:vanilla@matched", "dapo", skip=quick)).splitlines()[
        0
    ]
    assert matched.startswith("dapo: agrees") and matched.endswith(
        "as shipped: NOT dapo"
    )
    assert (
        "clip_ratio_high=0.28 (shipped: 0.2)" in matched
        and "clip_ratio_c=1e+10 (shipped: 3)" in matched
    )
    one = str(
        upref.check("verl:vanilla,clip_ratio_high=0.28", "dapo", skip=quick)
    ).splitlines()[0]
    assert one.startswith("NOT dapo") and one.endswith(
        "; sets clip_ratio_high=0.28 (shipped: 0.2)"
    )


def test_matched_needs_an_objective(capsys):
    for words in (
        ["identify", "verl:vanilla@matched"],
        ["check", "verl:vanilla@like", "--as", "dapo"],
    ):
        assert main(words) == 2 and "as shipped" in capsys.readouterr().err


def verl_style(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    **_,
):
    """Return DAPO's loss in verl's style: settings in a config, the number of tokens in
    its global_batch_info.
    """
    lp, old, A = calm(response_mask, log_prob, old_log_prob, advantages)
    r = (lp - old).clamp(-20, 20).exp()
    J = torch.min(
        r * A,
        r.clamp(1 - config.clip_ratio_low, 1 + config.get("clip_ratio_high", 0.2)) * A,
    )
    J = torch.where(A < 0, torch.max(J, config.clip_ratio_c * A), J)
    counts = config.global_batch_info
    return -(J * response_mask).sum() / counts["batch_num_tokens"] * counts[
        "dp_size"
    ], {}


@pytest.fixture
def no_verl(monkeypatch):
    """Make verl impossible to import, as in an installation without it."""
    for name in [m for m in sys.modules if m.split(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "verl", None)


@pytest.mark.parametrize("there", [pytest.param(True, marks=pytest.mark.verl), False])
def test_a_function_of_verls_signature_needs_no_verl(there, request):
    if there:
        pytest.importorskip("verl")
    else:
        request.getfixturevalue("no_verl")
    report = upref.check(verl_style, "dapo", skip=("extremes",), eps_high=0.3)
    assert report and report.oracles["micro-batches"] == "ok", str(report)
    assert not upref.check(verl_style, "up_dapo", skip=("extremes",))


def test_a_loss_with_verls_argument_names_is_told_that_it_counts_as_verls(no_verl):
    """With its own micro-batch's mean: what verl passes it instead, and what the
    matched config switches off.
    """

    def own(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights,
    ):
        """Return verl's PPO loss by a config, averaged over the tokens of the batch."""
        r = (log_prob - old_log_prob).exp()
        J = torch.min(
            r * advantages,
            r.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high) * advantages,
        )
        J = torch.where(
            advantages < 0,
            torch.max(J, config.get("clip_ratio_c", 3.0) * advantages),
            J,
        )
        return -(J * response_mask).sum() / response_mask.sum(), {}

    ran = ("gradient", "on-policy", "aggregation", "micro-batches")
    report = upref.check(
        own, "dapo", skip=[o.name for o in every() if o.name not in ran]
    )
    assert "clip_ratio_high=0.28 (verl's default: 0.2)" in report.settings
    assert report.read_as.startswith("by its arguments' names a policy loss of verl")
    assert (
        report.not_checked[0]
        == "a dual clip, if it has one: config.clip_ratio_c = 1e+10 switches it off here"
    )
    assert [f.cause for f in report.failures] == [
        "it divides by the micro-batch's own tokens or responses, not by the mini-batch's, which verl passes in "
        "config.global_batch_info"
    ]


def test_a_config_that_is_not_verls_needs_a_wrapper(no_verl):
    def own(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights,
    ):
        """Return a loss that reads a setting of its own from the config."""
        return -(log_prob * advantages * config.my_scale * response_mask).sum(), {}

    with pytest.raises(upref.InputError, match="ActorConfig does not have"):
        upref.check(own, "reinforce")


def test_a_gradient_of_a_fully_masked_row_is_shown_in_numbers_that_differ():
    """The report shows 0 and 1, not two equal numbers."""

    def leaks(log_prob, old_log_prob, advantages, mask):
        """Return PPO's loss less the log-probabilities of responses without a token."""
        r = (log_prob - old_log_prob).exp()
        J = torch.minimum(r * advantages, r.clamp(0.8, 1.2) * advantages)
        empty_rows = mask.sum(1) == 0
        leak = torch.where(empty_rows, log_prob.sum(1), 0).sum()
        return -torch.where(mask, J, 0).sum() / mask.sum() - leak

    ran = ("gradient", "padding")
    report = upref.check(
        leaks, "ppo_clip", eps=0.2, skip=[o.name for o in every() if o.name not in ran]
    )
    (failure,) = report.failures
    assert failure.oracle == "padding" and "masked throughout" in failure.regime
    assert (failure.expected.value, failure.found.value) == (0, 1)
    assert failure.cause == "the masked row has a gradient of its own"


# ---- losses that raise ---------------------------------------------------------------
def refusing(is_refused):
    """Return DAPO's loss, which raises a ValueError on the masks that is_refused
    selects.
    """

    def loss(log_prob, old_log_prob, advantages, mask):
        if is_refused(mask):
            raise ValueError("not such a batch")
        r = torch.where(mask, log_prob - old_log_prob, 0).exp()
        return -(ppo(r, advantages, 0.8, 1.28) * mask).sum() / mask.sum()

    return loss


def test_a_batch_without_which_there_is_no_verdict_may_not_be_refused():
    loss = refusing(lambda mask: len(mask) % 2)
    with pytest.raises(InputError, match=r"float64\[33, 10\].* of the oracle determ"):
        upref.check(loss, "dapo")


def test_what_is_not_tested_for_a_refusal_is_a_note():
    others = [oracle.name for oracle in every() if oracle.name != "unusual-inputs"]
    loss = refusing(lambda mask: mask.shape[1] > 64)
    report = upref.check(loss, "dapo", skip=others)
    (said,) = [f for f in report.notes if "refused, so not tested" in f.regime]
    assert report and "520 tokens" in said.regime and "more kinds" in said.regime
    assert "520 tokens" not in report.assumptions[-1]


def test_a_difference_stays_found_where_another_batch_is_refused():
    def findings(case):
        yield fail("one", "here")
        raise InputError("not such a batch")

    case = SimpleNamespace(failed=set())
    found, outcomes = run([Oracle("one", findings)], case)
    assert [f.severity for f in found] == ["failure", "note"]
    assert outcomes == {"one": "failure"} and case.failed == {"one"}


def test_a_loss_that_refuses_batches_is_not_said_to_refuse_float32():
    many = refusing(lambda mask: mask.shape[1] > 64)
    one = refusing(lambda mask: len(mask) == 1)
    assert "float32 inputs are refused" not in str(upref.check(many, "dapo"))
    said = str(upref.check(one, "dapo"))
    assert "one-response: a batch of one token is refused" in said


def test_a_loss_that_refuses_float32_is_told_so_once():
    def loss(log_prob, old_log_prob, advantages, mask):
        assert log_prob.dtype == torch.float64
        return refusing(lambda mask: False)(log_prob, old_log_prob, advantages, mask)

    said = str(upref.check(loss, "dapo"))
    assert said.count("unusual-inputs: float32 inputs are refused") == 1
    assert "a batch of one token, in float32, is refused" in said


def test_a_masked_row_that_makes_the_loss_nan_says_so():
    def of_responses(log_prob, old_log_prob, advantages, mask):
        """Return the mean of responses' means: NaN where one has no token."""
        r = torch.where(mask, log_prob - old_log_prob, 0).exp()
        J = torch.where(
            mask, torch.minimum(r * advantages, r.clamp(0.8, 1.28) * advantages), 0
        )
        return -(J.sum(1) / mask.sum(1)).mean()

    skip = [o.name for o in every() if o.name != "padding"]
    [failure] = upref.check(of_responses, "dapo", skip=skip).failures
    assert failure.about.endswith("masked throughout, where the loss itself is NaN")
