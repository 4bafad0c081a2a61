# SPDX-License-Identifier: Apache-2.0
"""An engine that hides its gradients is checked by what the weights moved, which is the
gradient under SGD: docs/howto/check-your-trainer.md.
"""

import re

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
    """Return DAPO's loss of some rows at a temperature of 0.7, divided by `total`."""
    loss = 0
    for row in rows:
        ids = torch.tensor(row.ids)
        logp = (model(ids[None])[0, :-1] / 0.7).log_softmax(-1)
        logp = logp.gather(-1, ids[1:, None])[:, 0][len(row.prompt) - 1 :]
        r = (logp - torch.tensor(row.old)).exp()
        J = torch.minimum(r * row.adv, r.clamp(0.8, 1.28) * row.adv)
        loss = loss - (J * torch.tensor(row.trains)).sum() / total
    return loss


def gradient_of(model, rows, kept):
    """Return the gradient of these micro-batches in one vector, as flat engines keep
    it.
    """
    total = sum(sum(row.trains) for row in rows)
    weights = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in weights))
    for i in kept:
        part = [rows[k] for k in MICRO_BATCHES[i]]
        gradients = torch.autograd.grad(loss_of(model, part, total), weights)
        flat += torch.cat([g.flatten() for g in gradients])
    return flat


def pieces(flat, model):
    """Return the parts of a flat vector, in the shapes of the model's parameters."""
    weights = list(model.parameters())
    parts = flat.split([p.numel() for p in weights])
    return [part.view_as(p) for p, part in zip(weights, parts, strict=True)]


def engine(kept, learning_rate=1.0):
    """Return a step of an engine that keeps these micro-batches.

    It has flat gradients and an SGD of its own: no .grad, and no optimizer of torch.
    """

    def step(model, rows):
        flat = learning_rate * gradient_of(model, rows, kept)
        with torch.no_grad():
            for p, piece in zip(model.parameters(), pieces(flat, model), strict=True):
                p.sub_(piece)

    return step


def flat_engine(kept, make_optimizer, master=None):
    """Return a step whose optimizer of torch trains a flat copy of the weights:
    `master`, which lives longer than the step, or one that the step makes.
    """

    def step(model, rows):
        """Step a flat copy of the weights, and copy its pieces back into the model."""
        flat = master
        if flat is None:
            flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        flat.grad = gradient_of(model, rows, kept)
        make_optimizer([flat]).step()
        flat.grad = None
        with torch.no_grad():
            for p, piece in zip(model.parameters(), pieces(flat, model), strict=True):
                p.copy_(piece)

    return step


def adam(weights):
    return torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.1)


def check(step, model, **settings):
    settings = {"moved": True, "temperature": 0.7} | settings
    return upref.check_step(step, model, "dapo", **settings)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


EVERY = (0, 1, 2, 3)
ENDS = (0, 3)


def test_what_the_weights_moved_is_the_gradient(model):
    before = {name: x.clone() for name, x in model.state_dict().items()}
    report = check(engine(EVERY), model)
    assert report, str(report)
    assert "upref replaces none" in str(report) and "lr=1, momentum 0" in str(report)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


@pytest.mark.parametrize("step", [engine(ENDS), flat_engine(ENDS, adam)])
def test_dropped_micro_batches_are_named(model, step):
    """As DeepSpeed 0.18.8 drops them with ZeRO-2 and CPU offload."""
    report = check(step, model)
    assert not report and "responses 2, 3, 4, 5 do not train" in str(report)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        adam,
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True),
        lambda weights: torch.optim.RMSprop(weights, lr=0.1),
    ],
)
def test_any_optimizer_of_torch_is_replaced_and_named(model, make_optimizer):
    report = check(flat_engine(EVERY, make_optimizer), model)
    assert report and report.error < 2e-6, str(report)
    name = type(make_optimizer([torch.zeros(1)])).__name__
    assert f"the place of the update of {name}" in str(report)


def test_an_engine_that_lives_longer_than_the_step_has_its_weights_back(model):
    """Its copies are of before upref enlarged the weights, and are the same after."""
    master = torch.cat([p.detach().flatten() for p in model.parameters()])
    before = master.clone()
    for _ in range(2):
        report = check(flat_engine(EVERY, adam, master), model)
        assert report, str(report)
    assert torch.equal(master, before)
    assert not check(flat_engine(ENDS, adam, master), model)


def test_a_plain_loop_has_the_same_verdict(model):
    def step(model, rows):
        optimizer = adam(model.parameters())
        loss_of(model, rows, sum(sum(row.trains) for row in rows)).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert check(step, model) and check(step, model, moved=False)


def test_a_closure_and_a_maximizing_optimizer_are_read(model):
    def step(model, rows):
        """Maximize the negative loss in a closure."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)

        def closure():
            optimizer.zero_grad()
            loss = -loss_of(model, rows, sum(sum(row.trains) for row in rows))
            loss.backward()
            return loss

        optimizer.step(closure)

    report = check(step, model)
    assert report, str(report)


def test_a_step_in_another_process_returns_the_weights_after_it(model):
    """The model that it is handed does not move."""

    def step(model, rows, kept=EVERY):
        """Return the weights after a step, by name; kept: the micro-batches that train."""
        moves = pieces(gradient_of(model, rows, kept), model)
        names = [name for name, _ in model.named_parameters()]
        weights = [p.detach().numpy() for p in model.parameters()]
        return {
            f"module.{name}": w - move.numpy()
            for name, w, move in zip(names, weights, moves, strict=True)
        }

    assert check(step, model)
    report = check(lambda model, rows: step(model, rows, ENDS), model)
    assert "responses 2, 3, 4, 5 do not train" in str(report)


class Large(Model):
    """Its weights are of size 1, and its gradient is `size` times as small."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        with torch.no_grad():
            for p in self.head.parameters():
                p.normal_(1.0)

    def forward(self, ids):
        return self.size * super().forward(ids)


def test_rounding_is_told_and_allowed():
    """Weights of size 1 keep 24 bits, of which a gradient of 1e-4 has about 10."""
    torch.manual_seed(0)
    model = Large(1e-4)
    report = check(engine(EVERY), model, perturb_weights=False)
    assert report, str(report)
    rounding = float(re.search(r"to (\S+) of its norm", report.moved)[1])
    assert 5e-3 < rounding < 2e-2 and report.error < rounding
    assert "pass moved=1024" in report.moved
    assert 2 * rounding < report.tolerances["gradient, relative"] < 4 * rounding + 1e-2
    assert not check(engine(ENDS), model, perturb_weights=False)


def test_a_larger_learning_rate_is_read_more_finely():
    torch.manual_seed(0)
    model = Large(1e-4)
    report = check(engine(EVERY, 1024.0), model, perturb_weights=False, moved=1024)
    assert report and report.error < 2e-5, str(report)
    assert report.tolerances["gradient, relative"] < 1e-4
    # and is not taken for another one
    assert not check(engine(EVERY, 1024.0), model, perturb_weights=False)


def test_a_replaced_optimizer_needs_no_larger_one():
    torch.manual_seed(0)
    report = check(flat_engine(EVERY, adam), Large(1e-4), perturb_weights=False)
    assert report and report.tolerances["gradient, relative"] < 2.1e-5, str(report)


def test_what_cannot_be_read_is_refused(model):
    """Steps whose gradient cannot be told from the weights, each with its reason."""

    def still(model, rows):
        """Trains nothing."""

    def twice(model, rows):
        optimizer = adam(model.parameters())
        for _ in range(2):
            loss_of(model, rows, 1).backward()
            optimizer.step()

    def signs(model, rows):
        move = 1e-3 * gradient_of(model, rows, EVERY).sign()
        with torch.no_grad():
            for p, piece in zip(model.parameters(), pieces(move, model), strict=True):
                p.sub_(piece)

    def another(model, rows):
        """Let an optimizer of torch train another model, while this one moves by
        itself.
        """
        other = torch.ones(3, requires_grad=True)
        other.grad = torch.ones(3)
        adam([other]).step()
        engine(EVERY)(model, rows)

    def lost(model, rows):
        engine(EVERY)(model, rows)
        return {"head.weight": model.head.weight.detach()}

    refusals = {
        still: "moved no weight",
        twice: "2 optimizer steps",
        signs: "the sign of the gradient",
        another: "did not move with those that AdamW trains",
        lost: "embed.weight of the model is gone",
    }
    for step, words in refusals.items():
        with pytest.raises(upref.InputError, match=words):
            check(step, model)
    tiny = Large(1e-6)
    with pytest.raises(upref.InputError, match="so little that rounding"):
        check(engine(EVERY), tiny, perturb_weights=False)


@pytest.mark.parametrize("moved", [-1.0, float("nan"), float("inf"), "yes"])
def test_moved_is_true_or_a_learning_rate(model, moved):
    with pytest.raises(upref.InputError, match="moved is True, or the learning rate"):
        check(engine(EVERY), model, moved=moved)


def test_a_step_that_hides_its_gradient_is_shown_the_way(model):
    with pytest.raises(upref.InputError, match=r"pass moved=True.*\{name: array\}"):
        check(engine(EVERY), model, moved=False)


def test_a_step_may_return_what_the_weights_moved(model):
    def step(model, rows):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine(EVERY)(model, rows)
        return {name: before[name] - p.detach() for name, p in model.named_parameters()}

    assert check(step, model, moved=False)
