# SPDX-License-Identifier: Apache-2.0
"""A run that is watched: what is right trains on with its numbers in the log, another
divisor stops it at step 1.
"""

import logging
from dataclasses import replace
from functools import wraps

import pytest
import torch

from tests.replay.test_loss import COLUMNS
from tests.replay.test_normalizer import gradient
from upref.errors import InputError
from upref.replay import make_batch
from upref.replay.record import Stopped
from upref.replay.terms import objective_as_run, terms_of
from upref.replay.watch import CAUSES, Watch, sink_of

DAPO = {"eps_high": 0.2}


def step(scale=1.0, **columns):
    """Return a recorded step whose loss and gradient are dapo's, times a factor."""
    held = COLUMNS | {"grad": scale * gradient("dapo", **DAPO)} | columns
    value = (
        terms_of(make_batch(COLUMNS, file="f"), objective_as_run("dapo", DAPO), DAPO)
        .by_recorded_counts()
        .loss()
    )
    return make_batch(held, file="f", step=50, logged={"loss": scale * value})


def test_what_is_right_is_logged():
    older = torch.full((len(COLUMNS["old"]),), 49)
    right = step(sampler=COLUMNS["old"], version=older)
    metrics = Watch("dapo", DAPO, "stop", None)(right)
    assert metrics["upref/loss_off"] < 1e-6 and metrics[
        "upref/normalizer"
    ] == pytest.approx(1)
    assert (
        metrics["upref/rho_mean"] == pytest.approx(1) and metrics["upref/failures"] == 0
    )
    assert metrics["upref/gap_cause"] == 1 + CAUSES.index("copied")


def test_another_divisor_stops_the_run_or_is_counted(caplog):
    with pytest.raises(
        Stopped, match=r"step 50: the logged loss .* is 2 times .*dL/dlp .* 2 times"
    ):
        Watch("dapo", DAPO, "stop", None)(step(2.0))
    watch = Watch("dapo", DAPO, "warn", None)
    assert watch(step(2.0))["upref/failures"] == 1
    assert (
        watch(step())["upref/failures"] == 1 and watch(step(0.5))["upref/failures"] == 2
    )
    assert "It trains on" in caplog.text


def test_what_the_sampler_does_is_a_warning_once(caplog):
    watch = Watch("dapo", DAPO, "stop", None)
    tool = torch.where(
        torch.rand(COLUMNS["old"].shape) < 0.2, torch.nan, COLUMNS["old"] - 0.01
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            watch(step(sampler=tool))
    assert caplog.text.count("no log-probability of the sampler") == 1


def test_a_step_is_kept_before_it_stops_the_run():
    kept = []
    watch = Watch("dapo", DAPO, "stop", lambda batch, group: kept.append(batch.step))
    with pytest.raises(Stopped):
        watch(step(2.0))
    assert kept == [50]


def test_what_does_not_exist_is_said_at_once():
    with pytest.raises(InputError, match="stop or warn"):
        Watch("dapo", DAPO, "ignore", None)
    with pytest.raises(InputError, match="eps_higher"):
        Watch("dapo", {"eps_higher": 1}, "stop", None)


# ---- in the trainers -----------------------------------------------------------------
@pytest.mark.trl
def test_trls_own_loss_is_watched(tmp_path):
    """Today's loss passes at each step; the old one stops the run, or is logged and
    written where on_fail is "warn".
    """
    trl = pytest.importorskip("trl")
    from tests.replay.test_record import ROWS, old_trainer
    from upref.replay import watch
    from upref.step.compare.case import perturb
    from upref.step.inputs.families import tiny
    from upref_frameworks.trl import step as trls

    def train(base, **more):
        """Train by a trainer of this class under watch for some steps, and return the
        trainer.
        """

        class Watched(base):
            def __init__(self, *args, **kw):
                super().__init__(*args, **kw)
                watch(self, "dapo", every=1, **DAPO, **more)

        fields = {"logging_strategy": "steps", "logging_steps": 1}
        return trls.record_training(perturb(tiny("qwen3")), fields, ROWS, 3, Watched)[1]

    history = [h for h in train(trl.GRPOTrainer).state.log_history if "loss" in h]
    assert len(history) == 3
    assert all(
        h["upref/normalizer"] == pytest.approx(1, abs=1e-6) and h["upref/failures"] == 0
        for h in history
    )
    with pytest.raises(
        Stopped, match=r"step 1: .*43 tokens of the whole generation batch"
    ):
        train(old_trainer())
    warned = train(old_trainer(), on_fail="warn", folder=tmp_path)
    assert [h["upref/failures"] for h in warned.state.log_history if "loss" in h] == [
        1,
        2,
        3,
    ]
    assert len(list(tmp_path.glob("*.npz"))) == 3


@pytest.mark.verl
def test_verls_own_loss_is_watched(monkeypatch, tmp_path):
    """The objective of the environment variable passes at each step; another one stops
    the run.
    """
    pytest.importorskip("verl")
    pytest.importorskip(
        "pydantic", reason="`repro/venv.sh smoke` installs verl's trainer"
    )
    from tests.replay.trained import settings, verl_steps
    from upref_frameworks.verl import record

    s = next(s for s in settings("verl") if s.name == "loss_agg_mode=token-mean")
    seen = []
    judge = Watch.__call__

    def judged(self, batch, group=None):
        seen.append(judge(self, batch, group))
        return seen[-1]

    monkeypatch.setattr(Watch, "__call__", judged)
    monkeypatch.setenv("UPREF_REPLAY_EVERY", "1")
    monkeypatch.setenv("UPREF_WATCH", "dapo eps_high=0.2")
    verl_steps(s, None)
    assert [m["upref/normalizer"] for m in seen] == pytest.approx([1, 1, 1], abs=1e-6)
    monkeypatch.setenv("UPREF_WATCH", "grpo")
    with pytest.raises(Stopped, match=r"step 1: .*token-mean"):
        verl_steps(replace(s), None)
    with pytest.raises(InputError, match="KEY=NUMBER"):
        record.make_watch("dapo eps_high", None)


def test_only_the_steps_that_differ_are_kept(tmp_path):
    watch = Watch("dapo", DAPO, "warn", sink_of(tmp_path / "steps", "failed"), "failed")
    watch(step())
    assert not (tmp_path / "steps").exists()
    watch(step(2.0))
    assert len(list((tmp_path / "steps").glob("*.npz"))) == 1
    assert "users' texts" in (tmp_path / "steps" / "README.txt").read_text()
    with pytest.raises(InputError, match="all or failed"):
        Watch("dapo", DAPO, "warn", None, "some")


# ---- a loss of upref's in verl -------------------------------------------------------
META = {
    "loss_mode": "upref/up_dapo",
    "upref": '{"eps_low": 0.1}',
    "loss_agg_mode": "token-mean",
    "use_kl_loss": "False",
    "kl_loss_coef": "0.001",
    "kl_loss_type": "low_var_kl",
}


@pytest.fixture
def losses(monkeypatch):
    """Let the recorder know the losses of upref that a verl with the plug-in would
    have; return it.
    """
    import upref
    from upref_frameworks.verl import record

    names = ("up_dapo", "grpo", "dapo", "m2po")
    known = {f"upref/{name}": upref.get(name) for name in names}
    monkeypatch.setattr(record, "LOSSES", known)
    return record


def test_own_is_what_verls_configuration_says(losses):
    """Find the objective, aggregation and KL term of a configuration, and refuse those
    with another loss.
    """
    o, hp = losses.configured_objective(META)
    assert (o.name, o.agg, o.kl, hp) == ("up_dapo", "token-mean", "", {"eps_low": 0.1})
    o, hp = losses.configured_objective(META | {"use_kl_loss": "True"})
    assert (o.kl, hp) == ("k3", {"eps_low": 0.1, "beta": 0.001})
    for changed, why in (
        ({"loss_mode": "vanilla"}, "loss_mode is vanilla"),
        ({"loss_mode": "upref/m2po"}, "each micro-batch by itself"),
        ({"use_kl_loss": "True", "kl_loss_type": "abs"}, "the KL term abs"),
        ({"use_kl_loss": "True", "loss_agg_mode": "seq-mean-token-sum"}, "sum is not"),
    ):
        with pytest.raises(InputError, match=why):
            losses.configured_objective(META | changed)


def test_own_is_the_reference_whatever_was_registered_under_its_name(losses):
    """Register a loss a tenth too large under UP-DAPO's name."""
    import upref

    right = upref.get("up_dapo")

    @wraps(right.fn)
    def a_tenth_more(*given, **hp):
        return 1.1 * right.fn(*given, **hp)

    wrong = replace(right, fn=a_tenth_more)
    losses.LOSSES["upref/up_dapo"] = wrong
    assert losses.configured_objective(META)[0].fn is right.fn


def test_own_judges_by_it(losses):
    meta = META | {"loss_mode": "upref/dapo", "upref": '{"eps_high": 0.2}'}
    watch = losses.make_watch("own on_fail=warn")
    assert watch(replace(step(), meta=meta))["upref/normalizer"] == pytest.approx(1)
    assert watch(replace(step(2.0), meta=meta))["upref/failures"] == 1
    assert watch(replace(step(1.1), meta=meta))["upref/failures"] == 2
    user = Watch("dapo", DAPO, "stop", None)  # it may be another objective
    assert user(step(1.1))["upref/normalizer"] == pytest.approx(1.1)
    with pytest.raises(InputError, match="not 'eps_high'"):
        losses.make_watch("own eps_high=0.2")


# ---- several ranks -------------------------------------------------------------------
def a_rank(rank, place, folder):
    """Run a process that records one step together with another one, which cannot;
    write whether it was stopped to a file.
    """
    import torch.distributed as dist

    from upref.replay.record import finish, hand_over

    dist.init_process_group(
        "gloo", init_method=f"file://{place}", rank=rank, world_size=2
    )
    stopped = []

    def make():
        if rank == 0:
            raise InputError("this rank cannot")
        return step()

    def work():
        hand_over(make, Watch("dapo", DAPO, "stop", None), None)

    finish(work, lambda: stopped.append(True), None)
    (folder / f"{rank}").write_text(str(stopped))
    dist.destroy_process_group()


@pytest.mark.nightly
def test_a_rank_that_cannot_record_stops_all_and_nobody_waits(tmp_path):
    torch.multiprocessing.spawn(a_rank, (tmp_path / "store", tmp_path), nprocs=2)
    assert [(tmp_path / f"{rank}").read_text() for rank in (0, 1)] == ["[True]"] * 2
