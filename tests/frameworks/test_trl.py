# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers, run by their own code on given log-probabilities, as `check` and
`audit` see them.
"""

import logging
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import upref
from upref import InputError
from upref.cli import main
from upref.rollouts import autograd_gradient
from upref.user_code import read
from upref.verify.measure import make_case
from upref.verify.oracles.contract import contract
from upref.weights.batches import OFF_EDGES, batch
from upref_frameworks import audits as A

pytest.importorskip("trl", reason="`repro/venv.sh trl` installs what TRL's losses need")
from trl import GRPOTrainer, RLOOTrainer

from upref_frameworks.trl.adapter import mute
from upref_frameworks.trl.audit import COMPARISONS
from upref_frameworks.trl.losses import loss_types, trl_loss

pytestmark = pytest.mark.trl
# the slow oracles are exercised in the two tests that run all of them
QUICK = ("gradient", "extremes", "dead-hyperparameter", "masked-values")


@pytest.fixture(scope="module")
def audit():
    return A.audit("trl")


def test_check_runs_every_oracle_on_trl():
    report = upref.check("trl:dapo@matched", "dapo")
    assert report, str(report)
    assert report.oracles["micro-batches"] == "ok" and any(
        "num_items_in_batch" in c for c in report.assumptions
    )


@pytest.mark.parametrize(
    ("loss", "name", "hp"),
    [("grpo", "grpo", {"eps": 0.15}), ("grpo", "gspo", {}), ("dr_grpo", "dr_grpo", {}), ("sapo", "sapo", {}),
     ("cispo", "cispo", {"eps_high": 3.0}), ("dapo", "dapo", {"c": 10.0}),
     ("grpo", "grpo", {"beta": 0.04})],
)  # fmt: skip
def test_right(loss, name, hp):
    """Aggregation, split and the on-policy gradient; and the whole regime grid at once."""
    report = upref.check(f"trl:{loss}@matched", name, skip=QUICK, **hp)
    assert report, str(report)
    o = upref.get(name)
    theirs = read(f"trl:{loss}@matched", o, hp)
    b = replace(
        batch(o, edges=OFF_EDGES, **{k: v for k, v in hp.items() if k != "beta"}),
        group=None,
    )
    b = replace(
        b,
        **{
            k: getattr(b, k).masked_fill(~b.mask, -1.0)
            for k in ("logp", "logp_old", "adv")
        },
    )
    b = replace(b, logp_ref=b.logp_old - 0.1)
    torch.testing.assert_close(
        theirs.gradient(b),
        autograd_gradient(lambda x: o(x, **hp), b),
        rtol=2e-7,
        atol=1e-10,
    )


@pytest.mark.parametrize(
    ("loss", "name", "oracle"),
    [("cispo", "cispo", "on-policy"), ("dapo@matched", "gspo", "aggregation"), ("bnpo", "ppo_clip", "micro-batches"),
     ("grpo", "dapo", "aggregation"), ("dapo", "dapo", "one-response")],
)  # fmt: skip
def test_wrong(loss, name, oracle):
    report = upref.check(f"trl:{loss}", name, skip=QUICK)
    assert oracle in {f.oracle for f in report.failures}, str(report)


def test_rloo_is_not_its_papers():
    report = upref.check("trl:rloo@matched", "rloo", skip=("extremes",))
    assert {f.oracle for f in report.failures} == {"gradient"}, str(report)


class Halved(GRPOTrainer):
    """A user's own loss, in place of TRL's."""

    def _compute_loss(self, model, inputs):
        return 0.5 * super()._compute_loss(model, inputs)


class IgnoresTools(GRPOTrainer):
    """Trains on what tools answered."""

    def _compute_loss(self, model, inputs):
        inputs = {k: x for k, x in inputs.items() if k != "tool_mask"}
        return super()._compute_loss(model, inputs)


class IgnoresRatios(GRPOTrainer):
    """Leaves out the correction for vLLM."""

    def _compute_loss(self, model, inputs):
        self.use_vllm = False
        return super()._compute_loss(model, inputs)


class NeedsOld(GRPOTrainer):
    """Reads old log-probabilities that TRL leaves out on policy."""

    def _compute_loss(self, model, inputs):
        assert inputs["old_per_token_logps"] is not None
        return super()._compute_loss(model, inputs)


def contract_notes(loss, name="dapo"):
    objective = upref.get(name)
    case = make_case(read(loss, objective, {}), objective, objective.resolve({}))
    return [finding.about for finding in contract.findings(case)]


@pytest.mark.parametrize("loss", ["grpo", "dapo", "sapo", "vespo", "rloo", "gmpo"])
def test_trls_losses_take_their_inputs_in_every_way_of_its_trainers(loss):
    # gmpo's trainer has a loss of its own, which does not read the ratios
    ratios = ["sampling_per_token_logps and importance_sampling_ratio, as from vLLM"]
    assert contract_notes(f"trl:{loss}") == (ratios if loss == "gmpo" else [])


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        (IgnoresTools, "tool_mask, with the tokens of tools in completion_mask"),
        (IgnoresRatios, "sampling_per_token_logps and importance_sampling_ratio"),
        (NeedsOld, "no old_per_token_logps, on policy are refused"),
    ],
)
def test_an_input_that_a_class_ignores_or_needs_is_noted(trainer, said):
    [about] = contract_notes(trainer)
    assert about.startswith(said)


def test_a_report_says_which_inputs_of_the_contract_were_never_given():
    own = upref.check(Halved, "dapo", skip=QUICK)
    assert "advantages [B, T]" in " ".join(own.not_checked)


def test_a_trainer_of_ones_own():
    """check takes a trainer class of TRL: a wrong one is rejected, TRL's own agrees by
    the command.
    """
    report = upref.check(Halved, "dapo", skip=QUICK)
    assert [f.oracle for f in report.failures][:1] == [
        "on-policy"
    ] and "0.5 times" in str(report), str(report)
    assert (
        main(
            [
                "check",
                "trl.trainer.grpo_trainer:GRPOTrainer",
                "--as",
                "dapo",
                *(f"--skip={q}" for q in QUICK),
            ]
        )
        == 0
    )


@pytest.mark.parametrize(
    ("target", "said"),
    [("trl:dap", "has no loss 'dap'"), ("trl:dapo,epsilon", "FIELD=VALUE"), ("trl:dapo,epsilonn=1", "trl refuses"),
     ("trl:sft", "has no loss"), ("trl:", "has no loss")],
)  # fmt: skip
def test_bad_names_are_one_sentence(target, said, capsys):
    assert main(["check", target, "--as", "dapo"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_the_whole_training_step_runs(monkeypatch):
    """TRL's loss, and what transformers does to it before backward: RLOO's is divided
    there, not in the loss.
    """
    b = batch(upref.get("gspo"), thin=3)
    b = replace(
        b, group=None, totals=upref.Totals(4 * b.mask.sum(), 4 * len(b.mask), 1, 1)
    )
    called = []
    for cls in (GRPOTrainer, RLOOTrainer):
        true = cls._compute_loss
        monkeypatch.setattr(
            cls, "_compute_loss", lambda *a, f=true: called.append(f(*a)) or called[-1]
        )
    rloo, grpo = trl_loss("rloo", b), trl_loss("grpo", b)
    assert len(called) == 2
    assert rloo == called[0] / 4 and grpo == called[1]


def test_unequal_micro_batches_are_refused():
    b = batch(upref.get("gspo"), thin=3)
    with pytest.raises(InputError, match="equal"):
        trl_loss(
            "grpo",
            replace(b, group=None, totals=upref.Totals(1000, len(b.mask) + 1, 1, 1)),
        )


def test_without_trl(monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(InputError, match=r"repro/venv.sh trl"):
        A.audit("trl")


def test_nothing_of_trl_is_imported_for_a_plain_loss():
    code = (
        "import sys, upref, upref.verify.check, upref_frameworks.trl.losses\n"
        "f = lambda log_prob, old_log_prob, advantages, mask: -(log_prob * advantages)[mask].mean()\n"
        "upref.check(f, 'reinforce_off_policy', skip=('gradient',))\n"
        "print(sorted({'trl', 'verl', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True
        ).stdout.strip()
        == "[]"
    )


# ---- the audit -----------------------------------------------------------------------
def test_what_trl_is_known_for(audit):
    """TRL's losses that are known to agree with a paper, to differ, or to depend on
    micro-batches, do so in the audit.
    """
    row = {(r.setting, r.mode, r.objective, r.micro_batches): r for r in audit.rows}
    assert not audit.unaudited and {*loss_types(), "rloo", "gmpo"} <= {
        c.mode for c in COMPARISONS
    } | {"vespo"}
    assert (
        row["default", "cispo", "cispo", 1]
        .reasons[0][0]
        .endswith("every weight is at most 0.2")
    )
    for mode, name in (
        ("grpo", "grpo"),
        ("gmpo", "gmpo"),
        ("dr_grpo", "dr_grpo"),
        ("grpo", "gspo"),
    ):
        assert row["paper", mode, name, 1].agrees
    assert [r.mode for r in audit.rows if r.micro_batches > 1] == ["bnpo"]
    assert "dapo" in audit.nan_in_padding


@pytest.mark.parametrize("mode", ["dapo", "rloo", "luspo", "sapo"])
def test_without_its_last_reason_a_row_is_unexplained(mode):
    c = next(c for c in COMPARISONS if c.mode == mode and c.reasons)
    without = A.audit("trl", (replace(c, setting="default", reasons=c.reasons[:-1]),))
    assert not without.explained and "UNEXPLAINED" in str(without)


def test_a_changed_trl_is_found(monkeypatch):
    c = next(c for c in COMPARISONS if c.mode == "grpo")
    assert A.audit("trl", (c,))
    true = GRPOTrainer._compute_loss
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda *a: 1.001 * true(*a))
    # as GRPOTrainer's own it would take [B, T] advantages
    monkeypatch.setattr(
        "upref_frameworks.trl.losses.token_advantages", lambda cls: True
    )
    assert not A.audit("trl", (c,)).explained


def test_a_new_loss_is_reported(monkeypatch):
    fresh = replace(A.framework("trl"), modes=lambda: ["grpo", "brand_new"])
    monkeypatch.setattr(A, "framework", lambda name: fresh)
    table = A.audit("trl", COMPARISONS[:0])
    assert table.unaudited == ["brand_new"] and "brand_new" in str(table)


@pytest.mark.parametrize(
    ("loss", "name", "hp", "agg", "why"),
    [
        (
            "trl:grpo,importance_sampling_level=sequence",
            "gspo",
            {"eps_low": 0.2},
            "seq-mean-token-mean",
            "",
        ),
        ("trl:cispo,epsilon_high=5", "cispo", {"eps_high": 4.0}, "token-mean", ""),
        ("trl:bnpo", "ppo_clip", {"eps": 0.2}, "token-mean", "micro-batch"),
    ],
)
def test_identify_reads_trl(loss, name, hp, agg, why):
    who = upref.identify(loss)
    assert (who.name, who.agg, bool(who.why)) == (
        name,
        agg,
        bool(why),
    ) and why in who.why, str(who)
    assert {k: who.hp[k] for k in hp} == pytest.approx(hp, abs=1e-6)


def test_the_adapter_restores_logging_when_a_step_raises():
    before = logging.root.manager.disable
    logging.disable(logging.DEBUG)
    try:
        with pytest.raises(ZeroDivisionError), mute():
            assert not logging.getLogger("trl").isEnabledFor(logging.WARNING)
            raise ZeroDivisionError
        assert logging.root.manager.disable == logging.DEBUG
    finally:
        logging.disable(before)
