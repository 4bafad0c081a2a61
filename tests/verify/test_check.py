# SPDX-License-Identifier: Apache-2.0
"""`upref.check` on losses of other people: right ones in several styles, wrong ones, and what is no loss at all.

The zoo (tests/support/zoo) holds many more of both kinds.
"""

import json
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import upref
from tests.support.cases.bodies import calm
from upref.cli import main
from upref.foreign import read
from upref.integrations.pytest_plugin import _assert_policy_loss, assert_policy_loss  # noqa: F401  the fixture, as pytest finds it
from upref.ops import sg
from upref.verify.check import every
from upref.verify.measure import make_case
from upref.weights.batches import random_batch


# ---- right, in several styles ----------------------------------------------------------------------------------------
def plain(log_prob, old_log_prob, advantages, mask, eps_low=0.2, eps_high=0.28, c=None):
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    r = (lp - old).clamp(-20, 20).exp()
    J = torch.min(r * A, r.clamp(1 - eps_low, 1 + eps_high) * A)
    if c is not None:
        J = torch.where(A < 0, torch.max(J, c * A), J)
    return -J.sum() / (mask.sum() + 1e-8)


def trl(per_token_logps, old_per_token_logps, advantages, completion_mask, eps=0.2):
    r = torch.exp((per_token_logps - old_per_token_logps).masked_fill(~completion_mask, 0))
    A = advantages.unsqueeze(1)
    loss = -torch.min(r * A, r.clamp(1 - eps, 1 + eps) * A)
    return ((loss * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1.0)).mean()


def unreduced(log_prob, old_log_prob, advantages, mask, eps_low=0.2):
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    r = torch.where(A > 0, 0, lp - old).exp()
    return -torch.where(A > 0, A * lp, torch.min(r * A, r.clamp(min=1 - eps_low) * A))


def float_mask(lp, old_lp, adv, mask, eps_low=3e-4, eps_high=4e-4):
    lp, old, A = calm(mask > 0, lp, old_lp, adv)
    one = 1 - (1 - mask)
    s = (((lp - old) * one).sum(1) / one.sum(1)).exp()
    A = A.sum(1) / mask.sum(1)
    return -torch.minimum(s * A, s.clamp(1 - eps_low, 1 + eps_high) * A).mean(), {"ratio": s.mean()}


def packed(log_prob, old_log_prob, advantages, mask, totals, eps_low=0.2, eps_high=0.2):
    lp, old, A = log_prob[mask], old_log_prob[mask], advantages[mask]
    weight = (lp - old).exp().clamp(1 - eps_low, 1 + eps_high).detach()
    return -(weight * A * lp).sum() / totals.tokens


def grouped(log_prob, old_log_prob, advantages, mask, group, eps_low=0.2, eps_high=0.28):
    loss, ids = 0.0, group.unique()
    for g in ids:
        m = mask & (group == g)[:, None]
        loss = loss + plain(log_prob, old_log_prob, advantages, m, eps_low, eps_high) / len(ids)
    return loss


def single(log_prob, old_log_prob, advantages, mask, eps_low=0.2, eps_high=0.28):
    return plain(*(x.float() for x in (log_prob, old_log_prob, advantages)), mask, eps_low, eps_high)


def soft(log_prob, old_log_prob, advantages, mask, tau_pos=1.0, tau_neg=1.05):
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    r, tau = (lp - old).clamp(-20, 20).exp(), torch.where(A > 0, tau_pos, tau_neg)
    J = 4 / tau * torch.sigmoid(tau * (r - 1)) * A
    return -(torch.where(mask, J, 0).sum(1) / mask.sum(1)).mean()


RIGHT = [
    (plain, "dapo", {}), (plain, "dapo", {"c": 3.0}), (grouped, "dapo", {}), (trl, "grpo", {}),
    (unreduced, "up_dapo", {}), (unreduced, "up_grpo", {}), (float_mask, "gspo", {}), (packed, "cispo_verl", {}),
    (single, "dapo", {}), (soft, "sapo", {}), (partial(plain, eps_high=0.2), "ppo_clip", {}),
    (upref.get("gmpo"), "gmpo", {}), (upref.up(upref.get("dapo")), "up_dapo", {}), (upref.get("m2po"), "m2po", {}),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "name", "hp"), RIGHT)
def test_right(loss, name, hp):
    report = upref.check(loss, name, **hp)
    assert report, str(report)
    assert report.assert_ok() is report


@pytest.mark.parametrize("batches", [300, pytest.param(3000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("loss", "name", "hp"), [RIGHT[0], RIGHT[4], RIGHT[6]])
def test_no_false_alarm(loss, name, hp, batches):
    o = upref.get(name)
    case, rng = make_case(read(loss, o, hp), o, o.resolve(hp)), np.random.default_rng(7)
    for _ in range(batches):
        assert case.off(case.ready(random_batch(rng, case.one_adv))).max() < 10 * case.tol


@st.composite
def rollouts(draw):
    """Ragged, with holes, any signs and ratios, groups or none."""
    B, T = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    table = lambda low, high: torch.tensor(
        draw(st.lists(st.lists(st.floats(low, high, width=32), min_size=T, max_size=T), min_size=B, max_size=B)),
        dtype=torch.float64,
    )
    mask = table(0, 1) > 0.3
    mask[:, draw(st.integers(0, T - 1))] = True
    old = table(-9, -1)
    return upref.Rollouts(torch.clamp(old + table(-3, 3), max=0.0), old, table(-3, 3), mask)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(b=rollouts())
def test_hypothesis_finds_nothing_in_a_right_loss(b):
    x = b.logp.clone().requires_grad_()
    (g,) = torch.autograd.grad(plain(x, b.logp_old, b.adv, b.mask), x)
    torch.testing.assert_close(-g, upref.get("dapo").gradient(b), rtol=1e-6, atol=1e-12)


# ---- wrong -----------------------------------------------------------------------------------------------------------
def wrong(J, agg=lambda x, mask: x.sum() / mask.sum()):
    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        return -agg(torch.where(mask, J(lp, (lp - old).exp(), A), 0), mask)

    return loss


def ppo(r, A, low=0.8, high=1.28):
    return torch.min(r * A, r.clamp(low, high) * A)


def dead(log_prob, old_log_prob, advantages, mask, eps_low=0.3, eps_high=0.28):
    return plain(log_prob, old_log_prob, advantages, mask, 0.2, eps_high)


def accepts_kwargs(log_prob, old_log_prob, advantages, mask, **kwargs):
    return plain(log_prob, old_log_prob, advantages, mask)


def random(log_prob, old_log_prob, advantages, mask):
    return plain(log_prob, old_log_prob, advantages, mask) * (1 + 0.1 * torch.rand(()))


def first_row(log_prob, old_log_prob, advantages, mask):
    return plain(log_prob, old_log_prob, advantages - advantages[0, 0], mask)


def mutates(log_prob, old_log_prob, advantages, mask):
    advantages.masked_fill_(~mask, 0)
    return plain(log_prob, old_log_prob, advantages, mask)


def local(log_prob, old_log_prob, advantages, mask, totals):
    return plain(log_prob, old_log_prob, advantages, mask)


def forgets_the_ranks(log_prob, old_log_prob, advantages, mask, totals, dp_size=1):
    return plain(log_prob, old_log_prob, advantages, mask) * mask.sum() / totals.tokens


def in_words(log_prob, old_log_prob, advantages, mask):
    """upref's own words, and one .detach() that is not among them."""
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    weight = sg((lp - old).exp().clamp(0.8, 1.2)) * (1 + lp - lp.detach())
    return -(weight * A * lp).sum() / mask.sum()


def padded(log_prob, old_log_prob, advantages, mask):
    return plain(log_prob, old_log_prob, advantages, mask) * mask.sum() / mask.numel()


def poisoned(log_prob, old_log_prob, advantages, mask):
    r = (log_prob - old_log_prob).clamp(-20, 20).exp()
    return -(ppo(r, advantages) * mask).sum() / mask.sum()


WRONG = [
    (wrong(lambda lp, r, A: -ppo(r, A)), "gradient", "A > 0", "sign"),
    (wrong(lambda lp, r, A: r.clamp(0.8, 1.28) * A), "gradient", "A > 0, r < 0.8", "minimum is missing"),
    (wrong(lambda lp, r, A: ppo(r, A, 0.8, 1.2)), "gradient", "A > 0, 1.2 < r < 1.28", "eps_high is 0.2, not 0.28"),
    (wrong(lambda lp, r, A: ppo(r, A, 0.72, 1.2)), "gradient", "A > 0", "swapped"),
    (wrong(lambda lp, r, A: torch.where(A < 0, torch.max(ppo(r, A), 3 * A), ppo(r, A))), "gradient", "A < 0, r > 3",
     "c is 3"),
    (wrong(lambda lp, r, A: r * A), "gradient", "A > 0, r > 1.28", "not clipped"),
    (wrong(lambda lp, r, A: ppo(r.detach() * 0 + 1, A) * lp), "gradient", "A < 0", "always 1"),
    (wrong(lambda lp, r, A: A * lp + ppo(r, A).detach()), "gradient", "A > 0", ""),
    (wrong(lambda lp, r, A: ppo(r, A), lambda x, m: (x.sum(1) / m.sum(1)).mean()), "aggregation", "ragged",
     "seq-mean-token-mean"),
    (wrong(lambda lp, r, A: ppo(r, A), lambda x, m: x.sum() / len(m)), "aggregation", "ragged", "seq-mean-token-sum"),
    (padded, "padding", "columns of padding", ""),
    (wrong(lambda lp, r, A: ppo(r, A / A.std())), "scaling", "times 3", ""),
    (random, "determinism", "twice", ""), (first_row, "permutation", "another order", ""),
    (local, "micro-batches", "micro-batches", "mini-batch"),
    (forgets_the_ranks, "data-parallel", "averaged", "number of ranks"),
    (in_words, "stop-gradient", "finite differences", "not declared"), (mutates, "mutation", "advantages", ""),
    (wrong(lambda lp, r, A: ppo(r, A) - 0.01 * lp), "zero-advantage", "A = 0", ""),
    (wrong(lambda lp, r, A: torch.min((lp - lp + r.log().clamp(-9, 9)).exp() * A, r.clamp(0.8, 1.28) * A)), "extremes",
     "log r = 9.5, as of a token", "log r is clamped to ±9"),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "oracle", "regime", "cause"), WRONG)
def test_wrong(loss, oracle, regime, cause):
    report = upref.check(loss, "dapo")
    hit = [f for f in report.failures if f.oracle == oracle]
    assert not report and hit, str(report)
    assert any(regime in f.regime for f in hit), str(report)
    assert any(cause in f.cause for f in hit), str(report)


def test_a_loss_that_is_told_the_number_of_micro_batches():
    """Then they are equal, as in TRL: a mean over responses adds up, one over the micro-batch's own tokens does not."""

    def by_responses(log_prob, old_log_prob, advantages, mask, num_micro_batches):
        x = ppo((log_prob - old_log_prob).exp(), advantages, 0.8, 1.2).where(mask, 0)
        return -(x.sum(1) / mask.sum(1)).mean() / num_micro_batches

    def by_tokens(log_prob, old_log_prob, advantages, mask, gradient_accumulation_steps):
        return plain(log_prob, old_log_prob, advantages, mask) / gradient_accumulation_steps

    def twice(log_prob, old_log_prob, advantages, mask, totals, num_micro_batches=1):
        x = ppo((log_prob - old_log_prob).exp(), advantages, 0.8, 1.28).where(mask, 0)
        return -x.sum() / totals.tokens / num_micro_batches  # who is told the totals is told this too

    assert "micro-batches" in {f.oracle for f in upref.check(twice, "dapo").failures}
    report = upref.check(by_responses, "grpo")
    assert report and report.oracles["micro-batches"] == "ok", str(report)
    assert "micro-batches have equally many responses" in report.text(verbose=True)
    assert "micro-batches" in {f.oracle for f in upref.check(by_tokens, "dapo").failures}


def test_a_nan_under_the_mask_is_a_note_and_a_number_is_not():
    report = upref.check(poisoned, "dapo")
    assert report and [
        f for f in report.notes if f.oracle == "masked-values" and "nan" in f.regime and "NaN" in f.cause
    ]
    report = upref.check(lambda lp, old, adv, mask: plain(lp, old, adv, mask) + 0 * lp.sum() + old.mean(), "dapo")
    assert any(f.oracle == "masked-values" and "hold 0" in f.regime for f in report.failures), str(report)


def test_dead_and_swallowed_hyperparameters():
    for loss, key, value in ((dead, "eps_low", 0.2), (accepts_kwargs, "c", 3.0)):
        report = upref.check(loss, "dapo", **{key: value})
        assert [f for f in report.failures if f.oracle == "dead-hyperparameter" and key in f.regime], str(report)


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


# ---- no loss at all --------------------------------------------------------------------------------------------------
BAD = {
    "raises": ("raise KeyError('nope')", "raised KeyError"),
    "nan": ("return log_prob.sum() * float('nan')", "is nan on a good batch"),
    "vector": ("return log_prob.sum(0)[:3]", "returns shape"),
    "detached": ("return log_prob.detach().sum()", "no gradient"),
    "number": ("return 1.0", "not a tensor"),
    "mutates": ("advantages.mul_(2); return -(advantages * log_prob)[mask].mean()", "changes its inputs"),
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
        upref.check(lambda log_prob, old_log_prob, advantages, mask, temperature: log_prob.sum(), "dapo")
    with pytest.raises(upref.InputError, match="cannot tell"):
        upref.check(lambda a, b: a.sum(), "dapo")
    with pytest.raises(upref.InputError, match="no oracle"):
        upref.check(plain, "dapo", skip=("nothing",))
    with pytest.raises(upref.InputError, match="no hyperparameter"):
        upref.check(plain, "dapo", epsilon=0.2)


# ---- the ways in -----------------------------------------------------------------------------------------------------
def test_command_and_json(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("def f(log_prob, old_log_prob, advantages, mask):\n    print('hello')\n"
                    "    return -(advantages[mask] * log_prob[mask]).mean()\n")  # fmt: skip
    assert main(["check", f"{file}:f", "--as", "dapo", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main(["check", f"{file}:f", "--as", "reinforce_pp", "--hp", "eps=0.2"]) in (1, 2)
    capsys.readouterr()


def test_plugin(assert_policy_loss):
    assert_policy_loss(float_mask, "gspo", eps_low=3e-4, eps_high=4e-4)
    with pytest.raises(pytest.fail.Exception, match="A > 0"):
        assert_policy_loss(plain, "up_dapo")


def test_plugin_by_import():
    assert assert_policy_loss(plain, "dapo")


def test_every_oracle_has_its_turn():
    report = upref.check(plain, "dapo")
    assert list(report.oracles) == [o.name for o in every()] and len(report.oracles) == 20


def test_import_is_light():
    heavy = ("sympy", "matplotlib", "verl", "upref.verify")
    code = f"import upref, sys; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.verl
@pytest.mark.parametrize(
    ("mode", "name", "ok"),
    [("vanilla", "dapo", True), ("sapo", "sapo", True), ("cispo", "cispo_verl", True), ("vanilla", "up_dapo", False)],
)
def test_verl(mode, name, ok):
    pytest.importorskip("verl")
    report = upref.check(f"verl:{mode}@matched", name)
    assert bool(report) is ok, str(report)


@pytest.mark.verl
def test_a_named_loss_is_the_one_that_ships():
    """verl's vanilla loss is not DAPO: its upper clip is 0.2, and its dual clip is on."""
    pytest.importorskip("verl")
    quick = [o.name for o in every() if o.name not in ("gradient", "on-policy", "aggregation")]
    shipped = upref.check("verl:vanilla", "dapo", skip=quick)
    assert not shipped and "eps_high is 0.2, not 0.28; c is 3, not absent" in str(shipped)
    assert str(shipped).splitlines()[0].endswith("; as shipped")
    matched = str(upref.check("verl:vanilla@matched", "dapo", skip=quick)).splitlines()[0]
    assert matched.startswith("dapo: agrees") and matched.endswith("as shipped: NOT dapo")
    assert "clip_ratio_high=0.28 (shipped: 0.2)" in matched and "clip_ratio_c=1e+10 (shipped: 3)" in matched
    one = str(upref.check("verl:vanilla,clip_ratio_high=0.28", "dapo", skip=quick)).splitlines()[0]
    assert one.startswith("NOT dapo") and one.endswith("; sets clip_ratio_high=0.28 (shipped: 0.2)")


def test_matched_needs_an_objective(capsys):
    for words in (["identify", "verl:vanilla@matched"], ["check", "verl:vanilla@like", "--as", "dapo"]):
        assert main(words) == 2 and "as shipped" in capsys.readouterr().err


def verl_style(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **_):
    lp, old, A = calm(response_mask, log_prob, old_log_prob, advantages)
    r = (lp - old).clamp(-20, 20).exp()
    J = torch.min(r * A, r.clamp(1 - config.clip_ratio_low, 1 + config.get("clip_ratio_high", 0.2)) * A)
    J = torch.where(A < 0, torch.max(J, config.clip_ratio_c * A), J)
    counts = config.global_batch_info
    return -(J * response_mask).sum() / counts["batch_num_tokens"] * counts["dp_size"], {}


@pytest.mark.parametrize("there", [pytest.param(True, marks=pytest.mark.verl), False])
def test_a_function_of_verls_signature_needs_no_verl(there, monkeypatch):
    if there:
        pytest.importorskip("verl")
    else:
        for name in [m for m in sys.modules if m.split(".")[0] == "verl"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "verl", None)
    report = upref.check(verl_style, "dapo", skip=("extremes",), eps_high=0.3)
    assert report and report.oracles["micro-batches"] == "ok", str(report)
    assert not upref.check(verl_style, "up_dapo", skip=("extremes",))
