# SPDX-License-Identifier: Apache-2.0
"""The laws reject what is wrong: an objective registered tomorrow inherits tests that
can fail.
"""

import pytest
import torch

import upref
from tests.support import laws
from upref.ops import clip, exp, maximum, mean_t, minimum, when, where
from upref.registry import Objective

FACTS = dict(
    paper="fan2026up",
    eq="14",
    agg="token-mean",
    adv="group_norm",
    defaults={"eps": "a test's"},
)


def make(fn, weight, level="token", **facts) -> Objective:
    return Objective(
        fn.__name__, fn, fn.__doc__, level=level, closed_form=weight, **FACTS | facts
    )


def right(lp, lp_old, A, *, eps=0.2):
    """J = min(r A, clip(r, 1-ε, 1+ε) A)"""
    r = exp(lp - lp_old)
    return minimum(r * A, clip(r, 1 - eps, 1 + eps) * A)


def right_weight(r, A, *, eps):
    return where(A > 0, when(r <= 1 + eps, A * r), when(r >= 1 - eps, A * r))


def wrong_sign(lp, lp_old, A, *, eps=0.2):
    """The minus of the loss, taken twice."""
    return -right(lp, lp_old, A, eps=eps)


def clipped_before_multiplying(lp, lp_old, A, *, eps=0.2):
    """No minimum: both sides clipped for both signs."""
    return clip(exp(lp - lp_old), 1 - eps, 1 + eps) * A


def nan_branch(lp, lp_old, A, *, eps=0.2):
    """Return UP's terms as torch's where computes them naively: the ratio of the branch
    not taken overflows, and 0 * inf = NaN comes back.
    """
    r = torch.exp(lp - lp_old)
    return torch.where(A > 0, A * lp, torch.minimum(r * A, r.clamp(min=1 - eps) * A))


def up_weight(r, A, *, eps):
    return where(A > 0, A, when(r >= 1 - eps, A * r))


def rounds_to_nothing(lp, lp_old, A, *, eps=0.2):
    """Return SAPO's terms through the sigmoid that rounds to 1: in half precision the
    gate's gradient is lost far too early.
    """
    return A * 4 * torch.sigmoid(torch.exp((lp - lp_old).clamp(max=20)) - 1) + 0 * eps


def padding_leak(lp, lp_old, A, mask, *, eps=0.2):
    """Return the terms with the response's mean taken over the padded width."""
    s = exp((lp - lp_old).mean(-1))
    return A[..., 0] * s + 0 * eps


def leak_weight(log_r, A, mask, *, eps):
    return A * (exp(log_r.mean(-1)) / log_r.shape[-1])[..., None] + 0 * A


def batch_baseline(lp, lp_old, A, mask, *, eps=0.2):
    """Advantages centered once more, over whatever micro-batch this is."""
    return (A - mean_t(A, mask).mean()) * lp + 0 * eps


def ratio_of_itself(lp, lp_old, A, *, eps=0.2):
    """ratio = exp(lp - lp): the clip can never bind, its knob is dead."""
    return A * exp(lp - lp) * lp + 0 * eps


def squared_advantage(lp, lp_old, A, *, eps=0.2):
    """J(kA) != k J(A)."""
    return A * abs(A) * lp + 0 * eps


def value_off(lp, lp_old, A, *, eps=0.2):
    """Return terms with the right gradient and a wrong value: a constant that depends
    on lp comes in through detach.
    """
    from upref.ops import sg

    return (
        right(lp, lp_old, A, eps=eps)
        + A * lp
        - A * lp.detach()
        - (A * lp - A * sg(lp))
        + 0 * eps
    )


def off_policy_constant(lp, lp_old, A, *, eps=0.2):
    """w = 0.2 A at r = 1: TRL's CISPO default with the cap taken as absolute."""
    return maximum(minimum(exp(lp - lp_old), eps), eps).detach() * A * lp


EXTREMES = "extreme_ratios_never_make_nan"
CASES = [
    (make(right, lambda r, A, *, eps: when(r <= 1 + eps, A * r)), "autograd_is_weight_times_aggregation"),
    (make(wrong_sign, right_weight), "autograd_is_weight_times_aggregation"),
    (make(wrong_sign, lambda r, A, *, eps: -right_weight(r, A, eps=eps)), "on_policy_weight_is_the_advantage"),
    (make(clipped_before_multiplying, right_weight), "autograd_is_weight_times_aggregation"),
    (make(nan_branch, up_weight), "extreme_ratios_never_make_nan"),
    (make(rounds_to_nothing, lambda r, A, *, eps: upref.get("sapo").weight(r, A, tau_neg=1.0)), EXTREMES),
    (make(padding_leak, leak_weight, "custom", agg="seq-mean"), "padding_is_inert"),
    (make(batch_baseline, lambda log_r, A, mask, *, eps: A - mean_t(A, mask).mean(), "custom"), "micro_batches_add_up"),
    (make(squared_advantage, lambda r, A, *, eps: A * abs(A)), "scales_with_the_advantage"),
    (make(value_off, right_weight), "finite_differences_agree"),
    (make(off_policy_constant, lambda r, A, *, eps: eps * A), "on_policy_weight_is_the_advantage"),
    (make(ratio_of_itself, lambda r, A, *, eps: A), "every_hyperparameter_is_alive"),
    (make(right, right_weight, defaults={}), "record_is_complete"),
    (make(right, right_weight, on_policy_exception="claimed, not true"), "on_policy_weight_is_the_advantage"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "name"), CASES, ids=lambda x: getattr(x, "name", x))
def test_law_rejects(wrong, name):
    law = next(f for f in laws.LAWS if f.__name__ == name)
    with pytest.raises(AssertionError):
        law(wrong)


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda f: f.__name__)
def test_laws_accept_the_right_one(law):
    law(make(right, right_weight))


def test_a_new_file_is_found_and_inherits(tmp_path, monkeypatch):
    """Adding an objective is one file: dropped into the folder, it is listed and
    tested.
    """
    from upref import definition, objectives, registry

    (tmp_path / "fresh.py").write_text(
        "from upref.definition import objective\n"
        "@objective(paper='fan2026up', eq='1', level='token', agg='token-mean', adv='reward')\n"
        "def fresh(lp, lp_old, A):\n    '''J = A log π'''\n    return A * lp\n"
        "@fresh.with_weight\ndef fresh(r, A):\n    return A + 0 * r\n"
    )
    monkeypatch.setattr(objectives, "__path__", [*objectives.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "_loaded", [])
    monkeypatch.setattr(definition, "OBJECTIVES", dict(definition.OBJECTIVES))
    assert "fresh" in upref.names()
    for law in laws.LAWS:
        if law.__name__ != "sympy_derivative_is_autograd":
            law(upref.get("fresh"))
