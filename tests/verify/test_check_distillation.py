# SPDX-License-Identifier: Apache-2.0
"""`upref.check_distillation` on losses that are right and wrong."""

import pytest
import torch

import upref
from tests.support.cases import distill
from upref import cli, distillation


def ids(x):
    return getattr(x, "__name__", None)


@pytest.mark.parametrize(("loss", "name", "agg"), distill.RIGHT, ids=ids)
def test_a_right_loss_is_accepted(loss, name, agg):
    report = upref.check_distillation(loss, name, agg=agg)
    assert report, str(report)


@pytest.mark.parametrize(("loss", "name", "fault_id"), distill.WRONG, ids=ids)
def test_a_wrong_loss_fails_with_its_cause(loss, name, fault_id):
    report = upref.check_distillation(loss, name)
    assert not report
    assert report.failures[0].fault_ids == (fault_id,), str(report)


@pytest.mark.parametrize(
    "name", [n for n in distillation.names() if n not in distillation.SAMPLED]
)
def test_the_reference_is_accepted(name):
    d = distillation.get(name)

    def loss(student_logits, teacher_logits, mask, temperature, k=8, beta=0.5):
        values = {"temperature": temperature, "k": k, "beta": beta}
        own = {key: v for key, v in values.items() if key in d.hyperparameters}
        return d(student_logits, teacher_logits, **own)[mask].mean()

    report = upref.check_distillation(loss, name)
    assert report and not report.notes, str(report)


def test_the_square_of_the_temperature_is_a_note():
    (note,) = upref.check_distillation(distill.forward_times_square, "forward_kl").notes
    assert note.oracle == "settings" and "square of the temperature" in note.about


def test_the_square_of_a_temperature_that_is_set_is_the_cause():
    report = upref.check_distillation(
        distill.forward_times_square, "forward_kl", temperature=2.0
    )
    (failure,) = report.failures
    assert failure.fault_ids == ("loss-times-square-of-temperature",)


def test_a_constant_in_the_value_is_a_note():
    report = upref.check_distillation(distill.forward_by_cross_entropy, "forward_kl")
    assert [n.oracle for n in report.notes if n.oracle == "value"] == ["value"]


def test_k_is_found_or_held_to():
    def fixed(student_logits, teacher_logits, mask):
        return distill.teacher_top(student_logits, teacher_logits, mask, 5)

    name = "teacher_top_k(forward_kl)"
    assert upref.check_distillation(fixed, name).hp["k"] == 5
    assert not upref.check_distillation(fixed, name, k=8)


def test_what_cannot_be_read_is_one_sentence():
    def unknown(student_logits, teacher_logits, weights):
        return student_logits.sum()

    with pytest.raises(upref.InputError, match="what is weights"):
        upref.check_distillation(unknown, "reverse_kl")
    with pytest.raises(upref.InputError, match="teacher_logits"):
        upref.check_distillation(lambda student_logits, mask: 0.0, "reverse_kl")
    with pytest.raises(upref.InputError, match="return a scalar"):
        upref.check_distillation(
            lambda student_logits, teacher_logits: student_logits, "reverse_kl"
        )
    with pytest.raises(upref.InputError, match="did you mean reverse_kl"):
        upref.check_distillation(distill.reverse, "reversekl")


# ---- the reference -------------------------------------------------------------------
def logits(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("k, words", [(0.5, "whole number"), (2e9, "below 1e9")])
def test_a_truncation_to_no_number_of_tokens_is_refused(k, words):
    logits = torch.zeros(1, 1, 4)
    with pytest.raises(upref.InputError, match=words):
        distillation.get("student_top_k(reverse_kl)")(logits, logits, k=k)


def test_a_sampled_form_is_no_divergence_of_logits():
    with pytest.raises(upref.InputError, match="without logits: call"):
        distillation.get("sampled_reverse_kl")


def test_divergences_by_their_definitions():
    """Reverse KL, forward KL and JSD against torch's categorical distributions."""
    z, t = logits(2, 3, 7), logits(2, 3, 7, seed=1)
    q, p = z.softmax(-1), t.softmax(-1)
    d = torch.distributions

    def categorical_kl(a, b):
        return d.kl_divergence(d.Categorical(a), d.Categorical(b))

    torch.testing.assert_close(
        distillation.get("reverse_kl")(z, t), categorical_kl(q, p)
    )
    torch.testing.assert_close(
        distillation.get("forward_kl")(z, t), categorical_kl(p, q)
    )
    m = 0.25 * p + 0.75 * q
    torch.testing.assert_close(
        distillation.get("jsd")(z, t, beta=0.25),
        0.25 * categorical_kl(p, m) + 0.75 * categorical_kl(q, m),
    )


def test_a_tail_is_one_more_token_and_all_tokens_are_the_whole():
    z, t = logits(2, 3, 7), logits(2, 3, 7, seed=1)
    whole = distillation.get("reverse_kl")(z, t)
    for name in distillation.TRUNCATIONS:
        every = distillation.get(f"{name}(reverse_kl)")(z, t, k=7)
        torch.testing.assert_close(every, whole)
    tail = distillation.get("student_top_k_tail(reverse_kl)")(z, t, k=2)
    q, p = z.softmax(-1), t.softmax(-1)
    top = q.topk(2, -1).indices
    both = [
        torch.cat([x.gather(-1, top), 1 - x.gather(-1, top).sum(-1, keepdim=True)], -1)
        for x in (q, p)
    ]
    expected = (both[0] * (both[0] / both[1]).log()).sum(-1)
    torch.testing.assert_close(tail, expected)
    assert (tail <= whole + 1e-12).all() and (tail >= 0).all()


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl"])
def test_sampled_forms_have_the_expected_gradient(name):
    """Every token of the vocabulary, weighted by its probability."""
    z, t = logits(1, 1, 7), logits(1, 1, 7, seed=1)
    z.requires_grad_()
    (right,) = torch.autograd.grad(distillation.get(name)(z, t).sum(), z)
    lp, lp_teacher = z.log_softmax(-1), t.log_softmax(-1)
    terms = distillation.SAMPLED[f"sampled_{name}"](lp, lp_teacher)
    (found,) = torch.autograd.grad((lp.detach().exp() * terms).sum(), z)
    torch.testing.assert_close(found, right)


def test_a_token_that_both_forbid_adds_nothing():
    z, t = logits(1, 2, 5), logits(1, 2, 5, seed=1)
    forbidden = torch.tensor([True, False, False, False, False])
    z2, t2 = (x.masked_fill(forbidden, -torch.inf) for x in (z, t))
    for name in ("reverse_kl", "forward_kl", "jsd"):
        whole = distillation.get(name)(z2, t2)
        torch.testing.assert_close(
            whole, distillation.get(name)(z[..., 1:], t[..., 1:])
        )


@pytest.mark.parametrize("floor", [1e-6, 1e-8])
@pytest.mark.parametrize("is_added", [False, True])
def test_a_floor_of_the_teachers_probabilities_is_wrong(floor, is_added):
    def loss(student_logits, teacher_logits, mask):
        q, p = student_logits.softmax(-1), teacher_logits.softmax(-1)
        p = p + floor if is_added else p.clamp(min=floor)
        return (q * (q.log() - p.log())).sum(-1)[mask].mean()

    assert not upref.check_distillation(loss, "reverse_kl")


@pytest.mark.parametrize(("floor", "is_right"), [(1e-3, False), (1e-7, True)])
def test_a_floor_of_the_teachers_tail_is_wrong_where_it_acts(floor, is_right):
    def loss(student_logits, teacher_logits, mask, k=8):
        """Return the reverse KL divergence over the teacher's top k and one tail, whose
        probabilities are at least `floor`.
        """
        q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        top = p.topk(k, -1)
        q = q.gather(-1, top.indices)
        tails = [
            torch.log1p(-x.exp().sum(-1).clamp(max=1 - floor)) for x in (q, top.values)
        ]
        of_tail = tails[0].exp() * (tails[0] - tails[1])
        of_top = (q.exp() * (q - top.values)).sum(-1)
        return (of_top + of_tail)[mask].mean()

    report = upref.check_distillation(loss, "teacher_top_k_tail(reverse_kl)")
    assert bool(report) is is_right, str(report)


def test_a_gradient_of_0_has_all_its_causes():
    def loss(student_logits, teacher_logits, mask):
        q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        return (q.exp().detach() * (q - p)).sum(-1)[mask].mean()

    cause = str(upref.check_distillation(loss, "reverse_kl").failures[0].cause)
    assert "or the weights π alone are detached" in cause


def test_a_setting_of_the_function_alone_is_passed_to_it():
    def loss(student_logits, teacher_logits, mask, beta=0.5):
        q, p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        assert beta == 0
        return (p.exp() * (p - q)).sum(-1)[mask].mean()

    assert upref.check_distillation(loss, "forward_kl", beta=0)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("reverse_kl", "--as-distillation"),
        ("k3", "--as-kl"),
        ("gae", "--as-advantage"),
        ("mse", "--as-value"),
    ],
)
def test_a_name_of_another_option_is_told_its_option(name, option, capsys, tmp_path):
    (tmp_path / "my.py").write_text("def loss(a, b): return a")
    assert cli.main(["check", f"{tmp_path}/my.py:loss", "--as", name]) == 2
    assert f"{option} {name}" in capsys.readouterr().err
