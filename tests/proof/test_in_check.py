# SPDX-License-Identifier: Apache-2.0
"""The proof within `upref.check`, on the command line and in pytest."""

import json

import pytest
import torch

import upref
from upref.cli import main
from upref.proof import solver

QUICK = ("unusual-inputs", "one-response", "extremes")


def dapo(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    return -torch.minimum(r * A, r.clamp(0.8, 1.28) * A).sum() / mask.sum()


def beyond_a_thousand(log_prob, old_log_prob, advantages, mask):
    A = torch.where(advantages.abs() > 1000, 0, advantages)
    return dapo(log_prob, old_log_prob, A, mask)


def first_columns(log_prob, old_log_prob, advantages, mask):
    inputs = (log_prob, old_log_prob, advantages, mask)
    return dapo(*(x[:, :3000] for x in inputs))


class CutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        kept = grad[:, :3000]
        return torch.cat([kept, 0 * grad[:, kept.shape[1] :]], 1)


def first_columns_backward(log_prob, old_log_prob, advantages, mask):
    return dapo(CutBackward.apply(log_prob), old_log_prob, advantages, mask)


def few_rows(log_prob, old_log_prob, advantages, mask):
    value = dapo(log_prob, old_log_prob, advantages, mask)
    return value if len(mask) < 600 else 2 * value


def test_a_right_loss_is_proved():
    report = upref.check(dapo, "dapo", skip=QUICK)
    assert report.proved and "proved for every value within |log r| <= 20" in str(
        report
    )
    assert json.loads(report.json())["proved"]


def zero_is_padding(log_prob, advantages, mask):
    trained = mask & (log_prob != 0)
    return -torch.where(trained, log_prob * advantages, 0).sum() / len(mask)


def test_another_weight_at_probability_1_is_no_failure_and_no_proof():
    report = upref.check(zero_is_padding, "reinforce", skip=QUICK)
    assert report and not report.proved
    assert "proved" not in str(report).splitlines()[0]


def test_a_value_that_no_batch_has_is_found():
    """Advantages above 100 are in none of the batches of check."""
    report = upref.check(beyond_a_thousand, "dapo", skip=QUICK)
    assert [f.oracle for f in report.failures] == ["every-value"]
    assert "A > 1000" in str(report) and "upref.Rollouts(" in str(report)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (first_columns, "more columns than 3000, with"),
        (first_columns, "1 of 4502 tokens, in row 0 and column 3000, counted from 0"),
        (first_columns_backward, "more columns than 3000, with"),
        (few_rows, "600, with"),
    ],
)
def test_both_sides_of_a_size_are_run(loss, says):
    report = upref.check(loss, "dapo", skip=QUICK)
    assert [f.oracle for f in report.failures] == ["every-value"]
    assert says in str(report)


def test_a_proof_leaves_torch_as_it_was():
    """Python takes a tensor for a sequence once `Tensor.__getitem__` was assigned."""
    before, backward = dict(vars(torch.Tensor)), torch.autograd._engine_run_backward
    upref.prove(dapo, "dapo")
    assert dict(vars(torch.Tensor)) == before
    assert torch.autograd._engine_run_backward is backward
    assert torch.tensor([torch.tensor(-6)]).tolist() == [-6]


def test_without_the_solver_nothing_changes(monkeypatch):
    monkeypatch.setattr("upref.verify.oracles.every_value.find_z3", lambda: "")
    report = upref.check(beyond_a_thousand, "dapo", skip=QUICK)
    assert report and not report.proved and "every-value" not in str(report)
    found = upref.identify(beyond_a_thousand)
    assert found.kind == "objective" and not found.proved


def rounded(log_prob, old_log_prob, advantages, mask):
    A = advantages + 0 * old_log_prob.floor()
    return dapo(log_prob, old_log_prob, A, mask)


def half(log_prob, old_log_prob, advantages, mask):
    return dapo(log_prob, old_log_prob, advantages, mask) / 2


@pytest.mark.parametrize(
    ("loss", "kind", "says"),
    [
        (
            dapo,
            "objective",
            "proved       for every value within |log r| <= 20, in 7 batches of at most 2",
        ),
        (beyond_a_thousand, "pitfall", "it differs elsewhere: A > 1000, r > 0.8"),
        (rounded, "objective", ""),  # there is no formula of floor
        (half, "pitfall", ""),  # nothing is proved of an objective with a factor
    ],
)
def test_an_identification_is_confirmed_or_disproved(loss, kind, says):
    found = upref.identify(loss)
    assert found.kind == kind and says in str(found)
    assert bool(found.proved) == ("proved" in says) == ("\n  proved" in str(found))
    assert json.loads(found.json())["proved"] == found.proved


def test_pytest_asks_for_a_proof(monkeypatch):
    assert upref.assert_policy_loss(dapo, "dapo", prove=True)
    monkeypatch.setattr(solver, "MEMORY", 1)
    with pytest.raises(pytest.fail.Exception, match="no proof"):
        upref.assert_policy_loss(dapo, "dapo", prove=True)


FILE = """
import torch

def dapo(lp, old, adv, mask):
    r = (lp - old).exp()
    return -(torch.minimum(r * adv, r.clamp(0.8, 1.28) * adv) * mask).sum() / mask.sum()

def clamped(lp, old, adv, mask):
    return dapo(lp, old, adv.clamp(-50, 50), mask)

def drawn(lp, old, adv, mask):
    return dapo(lp, old, adv * (1 + torch.rand(())), mask)

def of_responses(lp, old, adv, mask):
    r = (lp - old).exp()
    terms = torch.minimum(r * adv, r.clamp(0.8, 1.28) * adv) * mask
    return -(terms.sum(1) / mask.sum(1)).sum()

def k3(log_prob, ref_log_prob):
    d = ref_log_prob - log_prob
    return d.exp() - d - 1
"""


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["{}:dapo", "--as", "dapo"], 0, "is dapo(eps_low=0.2, eps_high=0.28): PROVED"),
        (["{}:clamped", "--as", "dapo"], 1, "A > 50"),
        (["{}:clamped", "--as", "{}:dapo"], 1, "FAIL"),
        # it differs almost everywhere: no bound is the reason
        (["{}:of_responses", "--as", "{}:dapo"], 1, "FAIL  A = "),
        (["{}:dapo", "--as", "{}"], 2, "is a file: name its function"),
        (["{}:drawn", "--as", "dapo"], 2, "mine.py:12 draws random numbers"),
        (["{}:k3", "--as-kl", "k3"], 0, "is k3: PROVED"),
        (["{}:k3", "--as-kl", "k2"], 1, "NOT k2"),
        (["{}:dapo", "--as", "dapoo"], 2, ""),
    ],
)
def test_the_command(arguments, status, says, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    words = [word.format(file) for word in arguments]
    sizes = ["--rows", "2", "--columns", "1"]
    assert main(["prove", *words, *sizes]) == status
    assert says in "".join(capsys.readouterr())


def test_the_counterexample_is_one_when_it_is_pasted(tmp_path):
    proof = upref.prove(beyond_a_thousand, "dapo")
    code = str(proof).partition("b = ")[2].partition(")\n      #")[0]
    b = eval(f"{code})", {"upref": upref, "torch": torch})
    lp = b.logp.clone().requires_grad_()
    value = beyond_a_thousand(lp, b.logp_old, b.adv, b.mask)
    (found,) = torch.autograd.grad(-value, lp)
    expected = upref.get("dapo").gradient(b)
    assert not torch.allclose(found, expected)
    assert torch.allclose(found, torch.tensor(proof.example.found).double())


def in_float32(log_prob, old_log_prob, advantages, mask):
    r = (log_prob - old_log_prob).exp().float().double()
    terms = torch.minimum(r * advantages, r.clamp(0.8, 1.28) * advantages)
    return -(terms * mask).sum() / mask.sum()


def test_a_proof_tells_of_a_shorter_float():
    proof = upref.prove(in_float32, "dapo", rows=1, columns=1)
    assert proof and "the proof leaves that rounding out" in str(proof)
    assert "that rounding" not in str(upref.prove(dapo, "dapo", rows=1, columns=1))


def with_options(log_prob, old_log_prob, advantages, mask):
    options = {"images": None, "ids": mask}
    given = {k: options[k] for k in options if k in options and options[k] is not None}
    return dapo(log_prob, old_log_prob, advantages, given["ids"])


def test_a_comparison_without_numbers_is_no_obstacle():
    assert upref.prove(with_options, "dapo", rows=1, columns=1)


def test_a_proof_of_a_mean_of_responses_names_the_bound_of_that_mean():
    report = upref.check(upref.get("gspo").loss, "gspo", skip=QUICK)
    assert "|log r| <= 20 (the mean of a response: 10)" in str(report)
