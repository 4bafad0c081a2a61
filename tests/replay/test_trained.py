# SPDX-License-Identifier: Apache-2.0
"""TRL's and verl's own losses, recorded over several steps: logged loss and dL/dlp are
the reference's to 1e-6.
"""

import pytest

from tests.replay import trained

CASES = [(trainer, s) for trainer in trained.NAMES for s in trained.settings(trainer)]
# as `upref step trl` has it
DIFFERS = {"loss_type=bnpo": "mean over micro-batches of their own token-mean"}
# verl clamps its KL term at 10 nats, and step 3 has a token beyond: ledger, verl-kl-clamp
DIFFERS |= {
    name: "is not the token-mean of dapo's terms"
    for name in (
        "use_kl_loss, kl_loss_type=k3",
        "use_kl_loss, kl_loss_type=low_var_kl (default)",
    )
}
# verl's geo_mean takes the mean of each micro-batch alone (its audit: MICRO_MEAN)
DIFFERS["loss_mode=geo_mean"] = "sum over micro-batches of their own seq-mean"
BY_DAY = (
    "loss_type=dr_grpo",
    "loss_type=bnpo",
    "beta=0.04, loss_type=dapo",
    "loss_mode=sapo",
)


def case(trainer, s):
    """Return a parameter of a test: a trainer and a setting, nightly unless it is in
    BY_DAY.
    """
    marks = [pytest.mark.trl if trainer == "trl" else pytest.mark.verl]
    return pytest.param(
        trainer,
        s,
        id=f"{trainer}-{s.name}",
        marks=marks + ([] if s.name in BY_DAY else [pytest.mark.nightly]),
    )


@pytest.mark.parametrize(("trainer", "s"), [case(*c) for c in CASES])
def test_a_loss_over_several_steps(trainer, s, monkeypatch):
    """Train a trainer's loss for several steps, and find it agrees unless it is listed
    as different.
    """
    pytest.importorskip(trainer)
    if trainer == "verl":
        pytest.importorskip(
            "pydantic", reason="`repro/venv.sh smoke` installs verl's trainer"
        )
    monkeypatch.setenv("CI", "1")
    line = trained.run(trainer, s)
    assert line.steps == trained.STEPS[trainer] and line.moved > 1e-3
    if s.name in DIFFERS:
        assert DIFFERS[s.name] in line.said
    else:
        assert line.agrees and line.off < 1e-6 and line.factors < 1e-5


def test_ten_losses_of_trl_and_every_aggregation_of_verl_are_there():
    types = [s for s in trained.settings("trl") if "beta" not in s.name]
    assert len(types) >= 10
    assert {
        s.fields["actor"].get("loss_agg_mode", "token-mean")
        for s in trained.settings("verl")
    } == {
        "token-mean",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
    }
