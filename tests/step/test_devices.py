# SPDX-License-Identifier: Apache-2.0
"""A model on another device: token ids go there, logits and gradients come back.

A stand-in device takes the place of a GPU. The verdicts must be those of the CPU, and
no operation may get tensors of both devices.
"""

import pytest
import torch
from loops import T, qwen3
from stand_in import DEVICE, DevicesMeetError, StandIn
from torch import nn
from training import gemma, gpt2

from upref.step import Row, check_recorded, check_step, record_step


class Recurrent(nn.Module):
    """A model of a user's own, with an attention and a recurrent layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.rnn = nn.Embedding(64, 16), nn.GRU(16, 16, batch_first=True)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 64)

    def forward(self, ids):
        x = self.rnn(self.embed(ids))[0]
        q, k, v = self.qkv(x).chunk(3, -1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + attended)


def make_step(temperature=T, left=False, exponent=1.0):
    """Return a DAPO step that moves what it makes to the model's device.

    Args:
        temperature: by which logits are divided.
        left: pad left, and count positions over the padding.
        exponent: of the ratio; no known cause has another than 1.
    """

    def step(model, rows):
        """Compute DAPO's gradient, row by row, on the model's device."""
        device = next(model.parameters()).device
        width = max(len(r.ids) for r in rows)
        total = sum(sum(r.trains) for r in rows)
        for r in rows:
            front = width - len(r.ids) if left else 0
            ids = torch.tensor([[0] * front + r.ids]).to(device)
            z = model(ids)
            z = getattr(z, "logits", z)[0, front + len(r.prompt) - 1 : -1] / temperature
            labels = torch.tensor(r.response).to(device)[:, None]
            lp = z.log_softmax(-1).gather(1, labels)[:, 0]
            ratio = (lp - torch.tensor(r.old).to(device)).exp() ** exponent
            J = torch.minimum(ratio * r.adv, ratio.clamp(0.8, 1.28) * r.adv)
            (-(J * torch.tensor(r.trains).to(device)).sum() / total).backward()

    return step


def check(model, step):
    return check_step(step, model, "dapo", temperature=T)


CASES = {
    "a right step of an own model": (Recurrent, make_step()),
    "a right step of a model of transformers": (qwen3, make_step()),
    "a known cause": (gpt2, make_step(temperature=1.0)),
    "every forward pass that the search knows, of gemma2": (
        gemma,
        make_step(left=True),
    ),
    "every forward pass that the search knows": (Recurrent, make_step(exponent=1.1)),
}


def marked(case):
    """Return the case as a parameter of a test: a search for a cause takes up to half a
    minute of CPU time, and runs by night.
    """
    marks = [] if case.startswith("a right step") else [pytest.mark.nightly]
    return pytest.param(case, marks=marks)


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_a_model_on_a_device_has_the_verdict_of_the_cpu(case):
    make, step = CASES[case]
    torch.manual_seed(0)
    model = make()
    want = check(model, step)
    with StandIn() as device:
        report = check(model.to(DEVICE), step)
        assert next(model.parameters()).device == DEVICE
    assert device.met == []
    assert bool(report) == bool(want) == case.startswith("a right step")
    assert [f.cause for f in report.failures] == [f.cause for f in want.failures]


def test_a_recorded_step_of_a_device_agrees():
    """Record one step on the stand-in, and find no operation in which both devices met."""
    with StandIn() as device:
        model = Recurrent().to(DEVICE)
        rows = [
            Row([3, 4], [5, 6, 7], [True, False, True], 1.0, old=[-3.0, -3.5, -3.4]),
            Row([8, 9, 1], [11, 12], [True, True], -1.0, old=[-3.2, -4.1]),
        ]
        with record_step(model) as seen:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            make_step()(model, rows)
            optimizer.step()
        assert check_recorded(seen, rows, "dapo", temperature=T)
    assert device.met == []


def test_operations_on_both_devices_are_noticed():
    with StandIn() as device, pytest.raises(DevicesMeetError):
        torch.ones(2).to(DEVICE) + torch.ones(2)
    assert len(device.met) == 1
