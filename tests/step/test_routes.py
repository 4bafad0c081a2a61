# SPDX-License-Identifier: Apache-2.0
"""Steps that replay recorded routes of experts: a model of two experts takes them by an
argument, and gathers the scores itself.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

import upref
from upref.errors import InputError
from upref.step import Row, dump_step

V, H = 40, 12


class Experts(nn.Module):
    """A layer of two experts, of which each token takes one."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(H, 2)
        self.experts = nn.Parameter(torch.randn(2, H, H) / H**0.5)

    def forward(self, x, routes=None):
        scores = self.router(x).softmax(-1)
        if routes is None:
            score, chosen = scores.topk(1, -1)
        else:
            chosen = routes
            score = self.gather(scores, routes)
        outputs = torch.einsum("bsh,ehk->bsek", x, self.experts).tanh()
        picked = outputs.gather(2, chosen[..., None].expand(-1, -1, -1, H))[:, :, 0]
        return x + score * picked

    def gather(self, scores, routes):
        return scores.gather(-1, routes)


class NoGradient(Experts):
    def gather(self, scores, routes):
        return scores.detach().gather(-1, routes)


class Model(nn.Module):
    """Two layers of experts on a sum over the tokens before."""

    def __init__(self, layer=Experts):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(V, H), nn.Linear(H, V)
        self.layers = nn.ModuleList([layer(), layer()])

    def forward(self, ids, routes=None):
        x = self.embed(ids)
        x = x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        for i, layer in enumerate(self.layers):
            x = layer(x, None if routes is None else routes[:, :, i])
        return self.head(x)


def step_with(change):
    """A step of DAPO whose rows have changed routes."""

    def step(model, rows):
        total = sum(sum(row.trains) for row in rows)
        for row in rows:
            routes = change(torch.tensor([row.routes]))
            z = model(torch.tensor([row.ids]), routes)[0, len(row.prompt) - 1 : -1]
            lp = (z / 0.7).log_softmax(-1)[range(len(row.response)), row.response]
            r = (lp - torch.tensor(row.old)).exp()
            J = torch.minimum(r * row.adv, r.clamp(0.8, 1.28) * row.adv)
            (-(J * torch.tensor(row.trains)).sum() / total).backward()

    return step


right = step_with(lambda routes: routes)
ignores = step_with(lambda routes: None)
FAULTS = [
    (ignores, Experts, "the recorded routes are not replayed: routers choose experts"),
    (right, NoGradient, "the scores of replayed experts have no gradient"),
    (
        step_with(lambda routes: routes.roll(1, 2)),
        Experts,
        "each layer of experts has the routes of the layer before it",
    ),
    (
        step_with(lambda routes: routes.roll(1, 1)),
        Experts,
        "each token has the routes of the token before it",
    ),
    (
        step_with(lambda routes: routes.roll(-1, 1)),
        Experts,
        "each token has the routes of the token behind it",
    ),
]


def check(step, model, **options):
    return upref.check_step(
        step, model, "dapo", temperature=0.7, routes=True, **options
    )


def test_a_step_that_replays_the_routes_agrees():
    report = check(right, Model())
    assert report, report
    assert "replayed routes of experts" in report.exercised


def test_routes_are_those_of_the_model_and_others():
    seen = []

    def step(model, rows):
        for row in rows:
            routes = torch.tensor(row.routes)
            assert routes.shape == (len(row.ids), 2, 1)
            with torch.no_grad():
                own = model.layers[0].router(first_inputs(model, row.ids)).argmax(-1)
            seen.append((routes[:, 0, 0] == own[0]).float())
        right(model, rows)

    def first_inputs(model, ids):
        x = model.embed(torch.tensor([ids]))
        return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]

    assert check(step, Model())
    assert 0.5 < float(torch.cat(seen).mean()) < 0.8


def test_a_step_that_ignores_the_routes_differs():
    assert not check(ignores, Model(), explain=False)


@pytest.mark.nightly
@pytest.mark.parametrize(("step", "layer", "cause"), FAULTS)
def test_a_fault_of_the_replay_is_named(step, layer, cause):
    model = Model(layer)
    if layer is NoGradient:  # the reference has the model's own choice, with a gradient
        for one in model.layers:
            one.__class__ = NoGradient
    report = check(step, model)
    assert not report
    assert cause in str(report.failures[0].cause), report


def test_rows_of_ones_own_bring_their_routes():
    rows = []

    def step(model, given):
        rows.extend(given)
        right(model, given)

    assert check(step, Model())
    own = dict(temperature=0.7, rows=rows, perturb_weights=True)
    assert upref.check_step(right, Model(), "dapo", **own)
    with pytest.raises(InputError, match="some rows have routes"):
        partly = [replace(rows[0], routes=None), *rows[1:]]
        upref.check_step(right, Model(), "dapo", **own | dict(rows=partly))
    with pytest.raises(InputError, match=r"lists \[token\]\[layer\]\[expert\]"):
        short = [replace(row, routes=row.routes[1:]) for row in rows]
        upref.check_step(right, Model(), "dapo", **own | dict(rows=short))
    with pytest.raises(InputError, match="the routes have 1 layers"):
        one = [replace(row, routes=[t[:1] for t in row.routes]) for row in rows]
        upref.check_step(right, Model(), "dapo", **own | dict(rows=one))


def test_routes_that_the_model_takes_anyway_exercise_nothing():
    model = Model()
    rows = []

    def step(model, given):
        for row in given:
            x = model.embed(torch.tensor([row.ids]))
            x = x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
            own = []
            for layer in model.layers:
                own.append(layer.router(x).argmax(-1)[0, :, None].tolist())
                x = layer(x)
            rows.append(replace(row, routes=[*map(list, zip(*own, strict=True))]))
        ignores(model, given)

    check(step, model, perturb_weights=False, explain=False)
    report = upref.check_step(
        ignores, model, "dapo", temperature=0.7, rows=rows, perturb_weights=False
    )
    assert "the replay of routes" in " ".join(report.unexercised), report


def test_a_model_without_routers_has_no_routes():
    with pytest.raises(InputError, match="needs a model whose routers choose"):
        check(right, nn.Sequential(nn.Embedding(V, H), nn.Linear(H, V)))


def test_a_dump_has_no_routes(tmp_path):
    row = Row([3], [4, 5], [True, True], 1.0, routes=[[[0]], [[1]], [[0]]])
    with (
        pytest.raises(InputError, match="no place for routes"),
        dump_step(Model(), [row], tmp_path / "step.npz"),
    ):
        pass
