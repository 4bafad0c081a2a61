# SPDX-License-Identifier: Apache-2.0
"""The conformance suite and replay where the trainer is on a GPU.

As in test_on_gpu.py, `UPREF_TEST_DEVICE=cpu` runs these tests on the CPU.
"""

import copy

import pytest
import torch

import upref
from tests.conformance.test_suite import Plain
from tests.gpu import test_on_gpu
from upref.conformance import CASES, Status, run
from upref.replay import read_steps
from upref.replay.files import write
from upref.replay.record import keep_gradient, step_batch
from upref.weights.batches import batch

DEVICE = test_on_gpu.DEVICE
pytestmark = test_on_gpu.pytestmark  # skips without a GPU
SAMPLE = (
    "objective/dapo",
    "kl/seq-mean",
    "clip/norm",
    "micro/4/token-mean",
    "generation/2/micro-2",
    "precision/bfloat16",
)


class OnDevice(Plain):
    """The loop of docs/howto/conformance.md, on the device."""

    def step(self, model, rows, case):
        with torch.device(DEVICE):
            return super().step(model.to(DEVICE), rows, case)


class TrainsCopy(OnDevice):
    """It trains a copy on the device, and returns the gradients by name."""

    def step(self, model, rows, case):
        trained = copy.deepcopy(model).to(DEVICE)
        with torch.device(DEVICE):
            self.loss(trained, rows, case, tokens_of(rows), len(rows)).backward()
        return {name: p.grad for name, p in trained.named_parameters()}


class AveragesMicroBatches(OnDevice):
    """It divides by the tokens of each micro-batch."""

    def loss(self, model, rows, case, tokens, responses):
        own = tokens_of(rows) * case.micro_batches
        return super().loss(model, rows, case, own, responses)


def tokens_of(rows):
    """Return how many tokens of the rows train."""
    return sum(sum(row.trains) for row in rows)


@pytest.mark.parametrize("case", SAMPLE)
def test_a_right_loop_on_the_device_passes(case):
    outcome = run(OnDevice(), CASES[case])
    assert outcome.status is Status.PASSED, outcome


def test_the_gradients_of_a_copy_on_the_device_are_compared():
    outcome = run(TrainsCopy(), CASES["objective/dapo"])
    assert outcome.status is Status.PASSED, outcome


def test_a_fault_on_the_device_is_named():
    outcome = run(AveragesMicroBatches(), CASES["micro/4/token-mean"])
    assert outcome.status is Status.FAILED, outcome
    assert "token-mean is taken over micro-batches" in outcome.reason


# ---- replay --------------------------------------------------------------------------
def recorded(folder):
    """Record one step of DAPO, whose tensors and backward pass are on the device."""
    b = batch(upref.get("dapo"))
    lp = b.logp.detach().float().to(DEVICE).requires_grad_()
    columns = {
        "ids": torch.arange(b.mask.numel(), device=DEVICE).reshape(b.mask.shape),
        "mask": b.mask.to(DEVICE),
        "now": lp.detach(),
        "old": b.logp_old.float().to(DEVICE),
        "adv": b.adv.float().to(DEVICE),
    }
    keep_gradient(columns, lp)
    r = torch.where(columns["mask"], lp - columns["old"], 0).exp()
    adv = torch.where(columns["mask"], columns["adv"], 0)
    J = torch.minimum(r * adv, r.clamp(0.8, 1.28) * adv)
    loss = -J.sum() / columns["mask"].sum()
    loss.backward()
    logged = {"loss": loss.item()}
    one = step_batch([columns], step=1, rank=0, logged=logged, meta={})
    write(folder / "step000001.npz", one)
    return next(iter(read_steps([folder])))


def test_a_step_recorded_on_the_device_is_judged(tmp_path):
    step = recorded(tmp_path)
    assert upref.replay.loss(step, "dapo")
    assert upref.replay.normalizer(step, "dapo").found == "token-mean"
    assert not upref.replay.normalizer(step, "dapo", eps_high=5.0).found


@pytest.mark.trl
def test_trls_trainer_on_the_device_is_recorded(tmp_path):
    """Four steps of TRL's trainer are recorded, and their loss and divisor are the
    objective's.
    """
    trl = pytest.importorskip("trl", reason="needs TRL")
    from tests.replay.test_record import ROWS
    from upref.step.compare.case import perturb
    from upref.step.inputs.families import tiny
    from upref_frameworks.trl import step

    class Recorded(trl.GRPOTrainer):
        """GRPOTrainer, which records itself."""

        def __init__(self, *args, **kw):
            super().__init__(*args, **kw)
            self.recording = upref.replay.record(self, tmp_path, every=1)

    logs = {"logging_strategy": "steps", "logging_steps": 1}
    fields = logs | {"use_cpu": DEVICE == "cpu"}
    _, trainer = step.record_training(perturb(tiny("qwen3")), fields, ROWS, 4, Recorded)
    assert trainer.accelerator.device.type == DEVICE
    steps = list(read_steps([tmp_path]))
    assert [b.step for b in steps] == [1, 2, 3, 4]
    for b in steps:
        assert upref.replay.loss(b, "dapo", eps_high=0.2)
        assert upref.replay.normalizer(b, "dapo", eps_high=0.2)
