# SPDX-License-Identifier: Apache-2.0
"""The audit of the installed verl passes, needs its reasons, and fails on a verl that
computes otherwise.
"""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch

from upref import InputError, Rollouts
from upref.registry import get
from upref.rollouts import autograd_gradient
from upref.weights.batches import batch
from upref_frameworks import audits as A
from upref_frameworks.audits.case import MICRO, TOL

NEED = "`repro/venv.sh verl` installs what verl's losses need"
core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason=NEED)
from upref_frameworks.verl.audit import (  # noqa: E402
    COMPARISONS,
    UNUSED,
    _centered_by_trainer,
    _compute_advantage,
)
from upref_frameworks.verl.losses import verl_loss  # noqa: E402

pytestmark = pytest.mark.verl
IDS = [
    f"{c.setting}-{c.mode}-{c.objective}-{c.config['loss_agg_mode']}"
    for c in COMPARISONS
]


@pytest.fixture(scope="module")
def audit():
    return A.audit("verl")


def test_verl_agrees_or_differs_for_the_named_reasons(audit):
    assert audit, str(audit)
    assert all(r.remains <= (1e-7 if r.kind == "loss" else r.tol) for r in audit.rows)
    assert not audit.unaudited, "a mode of verl that the audit does not know"


def test_what_verl_0_9_1_is_known_for(audit):
    """Each statement of the documentation about verl, as the row that shows it."""
    row = {(r.setting, r.mode, r.objective, r.micro_batches): r for r in audit.rows}
    dual = row["default", "vanilla", "ppo_clip", 1].spot
    assert dual.where == "A < 0, r > 3" and dual.found == 0 and dual.expected < -3
    dppo = [words for words, _ in row["default", "dppo_tv", "dppo_tv", 1].reasons]
    assert dppo[0].startswith("ratio cut at 3 ") and dppo[1] == "delta = 0.2"
    assert (
        row["paper", "sapo", "sapo", 1].agrees
        and row["paper", "gpg", "reinforce", 1].difference == 0
    )
    split = row["paper", "geo_mean", "gmpo", MICRO].spot
    assert split.found / split.expected == pytest.approx(MICRO)
    assert [r.mode for r in audit.rows if r.micro_batches > 1] == ["geo_mean"]
    # agg_loss sums loss * mask, except under token-mean
    assert "vanilla (seq-mean-token-mean)" in audit.nan_in_padding
    assert "vanilla (token-mean)" not in audit.nan_in_padding


def test_every_reason_is_needed(audit):
    for r in audit.rows:
        for said, spot in r.reasons:
            assert spot.difference > TOL or said.endswith("left out)"), (r.mode, said)


@pytest.mark.parametrize(
    "c",
    [pytest.param(c, id=i) for c, i in zip(COMPARISONS, IDS, strict=True) if c.reasons],
)
def test_without_its_last_reason_a_row_is_unexplained(c):
    without = A.audit("verl", (replace(c, setting="default", reasons=c.reasons[:-1]),))
    assert not without.explained and "UNEXPLAINED" in str(without)


WRONG = {
    "clip": dict(clip_ratio_low=0.25),
    "upper clip": dict(clip_ratio_high=0.27),
    "dual clip": dict(clip_ratio_c=5.0),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_setting_is_found(name):
    c = COMPARISONS[IDS.index("paper-vanilla-dapo-token-mean")]
    assert not A.audit("verl", (replace(c, config=c.config | WRONG[name]),)).explained


def test_a_changed_verl_is_found(monkeypatch):
    """A sign, a detached ratio, a tenth of a percent."""
    true = core_algos.POLICY_LOSS_REGISTRY["sapo"]
    c = next(c for c in COMPARISONS if c.mode == "sapo")
    assert A.audit("verl", (c,))
    for change in (
        lambda kw: kw | {"advantages": -kw["advantages"]},
        lambda kw: kw | {"log_prob": kw["log_prob"].detach() + 0 * kw["log_prob"]},
        lambda kw: kw | {"advantages": 1.001 * kw["advantages"]},
    ):
        monkeypatch.setitem(
            core_algos.POLICY_LOSS_REGISTRY,
            "sapo",
            lambda _f=change, **kw: true(**_f(kw)),
        )
        assert not A.audit("verl", (c,)).explained


def test_a_new_mode_is_reported(monkeypatch):
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "brand_new", None)
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "upref/dapo", None)
    audit = A.audit("verl", COMPARISONS[-1:])
    assert (
        "brand_new" in audit.unaudited
        and "upref/dapo" not in audit.unaudited
        and "brand_new" in str(audit)
    )


def test_printing_and_json(audit):
    text = str(audit)
    assert all(r.label in text for r in audit.rows[:3]) and "differs, explained" in text
    data = json.loads(audit.json())
    assert data["ok"] is True and len(data["rows"]) == len(audit.rows)
    assert data["rows"][0]["verdict"] == audit.rows[0].verdict
    assert (
        data["rows"][0]["command"]
        == "upref check verl:vanilla,loss_agg_mode=token-mean --as ppo_clip"
    )


@pytest.mark.parametrize(
    ("mode", "kw"),
    [("vanila", {}), ("vanilla", {"epsilon": 1}), ("gpg", {"agg": "sum"})],
)
def test_what_verl_refuses_is_one_sentence(mode, kw):
    with pytest.raises(InputError, match="verl refuses"):
        verl_loss(mode, batch(get("dapo"), thin=20), **kw)


def test_compute_advantage_needs_no_more_packages_than_the_losses(monkeypatch):
    """Neither the trainer nor a stand-in is left behind."""
    trainer = "verl.trainer.ppo.ray_trainer"
    for name in [m for m in sys.modules if m.split(".")[0] == "torchdata"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("torchdata", "peft", "pydantic"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in (trainer, *UNUSED):
        monkeypatch.delitem(sys.modules, name, raising=False)
    _compute_advantage.cache_clear()
    R, group = torch.tensor([1.0, 0, 0, 0]), torch.zeros(4)
    assert _centered_by_trainer("grpo")(R, group)[0] == 0.75
    assert not {trainer, *UNUSED} & set(sys.modules)


def test_without_verl(monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(InputError, match=r"repro/venv.sh verl"):
        A.audit("verl")


def test_dual_clip_passes_half_the_gradient_at_exactly_c():
    """A half-open kink in name: at r = c torch.min ties, and verl's token keeps half
    its weight; ours keeps all.
    """
    lp_old = torch.full((1, 1), -2.0, dtype=torch.float64)
    b = Rollouts(
        lp_old + math.log(2.0),
        lp_old,
        torch.full_like(lp_old, -1.0),
        torch.ones(1, 1, dtype=torch.bool),
    )
    assert (b.logp - b.logp_old).exp().item() == 2.0
    assert (
        -autograd_gradient(
            lambda b: verl_loss("vanilla", b, clip_ratio_c=2.0), b
        ).item()
        == -1.0
    )
    assert get("ppo_clip").gradient(b, c=2.0).item() == -2.0


def test_a_gradient_that_leaks_into_masked_slots_is_seen(monkeypatch):
    """Masked slots hold finite junk, as the tool's tokens of a multi-turn response do."""
    sapo = core_algos.POLICY_LOSS_REGISTRY["sapo"]

    def leaky(**args):
        loss, metrics = sapo(**args)
        return loss + 1e-3 * args["log_prob"].masked_fill(
            args["response_mask"], 0
        ).sum(), metrics

    mine = tuple(c for c in COMPARISONS if c.mode == "sapo")
    assert A.audit("verl", mine)
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "sapo", leaky)
    assert not A.audit("verl", mine).explained
