# SPDX-License-Identifier: Apache-2.0
"""An engine that hides its gradients is checked by what an SGD step of learning rate 1
moved: docs/howto/check-your-trainer.md.
"""

import pytest
import torch

import upref

MICRO_BATCHES = ((0, 1), (2, 3), (4, 5), (6, 7))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 16)
        self.head = torch.nn.Linear(16, 64)

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


def loss_of(model, rows, total):
    """DAPO's share of the loss of a micro-batch, at a temperature of 0.7."""
    loss = 0
    for row in rows:
        ids = torch.tensor(row.ids)
        logp = (model(ids[None])[0, :-1] / 0.7).log_softmax(-1)
        logp = logp.gather(-1, ids[1:, None])[:, 0][len(row.prompt) - 1 :]
        r = (logp - torch.tensor(row.old)).exp()
        J = torch.minimum(r * row.adv, r.clamp(0.8, 1.28) * row.adv)
        loss = loss - (J * torch.tensor(row.trains)).sum() / total
    return loss


def engine(kept):
    """A step of an engine that keeps these micro-batches. It has flat gradients of its
    own: no .grad, and no optimizer of torch.
    """

    def step(model, rows):
        total = sum(sum(row.trains) for row in rows)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        weights = list(model.parameters())
        flat = torch.zeros(sum(p.numel() for p in weights))
        for i in kept:
            part = [rows[k] for k in MICRO_BATCHES[i]]
            gradients = torch.autograd.grad(loss_of(model, part, total), weights)
            flat += torch.cat([g.flatten() for g in gradients])
        pieces = flat.split([p.numel() for p in weights])
        with torch.no_grad():
            for p, piece in zip(weights, pieces, strict=True):
                p.sub_(piece.view_as(p))
        return {name: before[name] - p.detach() for name, p in model.named_parameters()}

    return step


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def test_what_the_weights_moved_is_the_gradient(model):
    report = upref.check_step(engine((0, 1, 2, 3)), model, "dapo", temperature=0.7)
    assert report, str(report)


def test_dropped_micro_batches_are_named(model):
    """As DeepSpeed 0.18.8 drops them with ZeRO-2 and CPU offload."""
    report = upref.check_step(engine((0, 3)), model, "dapo", temperature=0.7)
    assert not report and "responses 2, 3, 4, 5 do not train" in str(report)


def test_a_step_that_leaves_nothing_is_refused(model):
    hidden = engine((0, 1, 2, 3))
    with pytest.raises(upref.InputError, match=r"return \{name: array\}"):
        upref.check_step(
            lambda model, rows: hidden(model, rows) and None,
            model,
            "dapo",
            temperature=0.7,
        )
