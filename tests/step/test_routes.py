# SPDX-License-Identifier: Apache-2.0
"""Steps that replay recorded routes of experts: a model of a few experts takes them by an
argument, and gathers the scores itself.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import upref
from upref.errors import InputError
from upref.step import Row, dump_step
from upref.step.compare.case import RowOptions, build_case, make_goal
from upref.step.inputs.reference import TorchModel
from upref.step.inputs.routes import Routes, draw_routes, routes_in, routes_of

V, H = 40, 12


class Experts(nn.Module):
    """A layer of two experts, of which each token takes one."""

    count, taken = 2, 1

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(H, self.count)
        self.experts = nn.Parameter(torch.randn(self.count, H, H) / H**0.5)

    def forward(self, x, routes=None):
        """Return x plus the outputs of the chosen experts, weighted by their scores.
        routes: their indices [B, S, taken], in place of the router's.
        """
        scores = self.router(x).softmax(-1)
        if routes is None:
            score, chosen = scores.topk(self.taken, -1)
        else:
            chosen = routes
            score = self.gather(scores, routes)
        outputs = torch.einsum("bsh,ehk->bsek", x, self.experts).tanh()
        picked = outputs.gather(2, chosen[..., None].expand(-1, -1, -1, H))
        return x + (score[..., None] * picked).sum(2)

    def gather(self, scores, routes):
        return scores.gather(-1, routes)


class NoGradient(Experts):
    def gather(self, scores, routes):
        return scores.detach().gather(-1, routes)


class ThreeOfFive(Experts):
    count, taken = 5, 3


class Model(nn.Module):
    """Two layers of experts on a sum over the tokens before."""

    def __init__(self, layer=Experts):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(V, H), nn.Linear(H, V)
        self.layers = nn.ModuleList([layer(), layer()])

    def forward(self, ids, routes=None):
        """Return logits [B, S, V]. routes: [B, S, layers, taken]."""
        x = self.embed(ids)
        x = x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        for i, layer in enumerate(self.layers):
            x = self.run_layer(layer, x, None if routes is None else routes[:, :, i])
        return self.head(x)

    def run_layer(self, layer, x, routes):
        return layer(x, routes)


class Checkpointed(Model):
    """A model that computes its layers again in the backward pass."""

    reentrant = False

    def run_layer(self, layer, x, routes):
        return checkpoint(layer, x, routes, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class Again(torch.autograd.Function):
    """A checkpoint that is not torch's, of a layer that takes no routes."""

    @staticmethod
    def forward(ctx, layer, x):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        """Run the layer again for the gradient, as activation checkpointing does."""
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.layer(x)
        out.backward(gradient)
        return None, x.grad


class OwnCheckpoint(Model):
    def run_layer(self, layer, x, routes):
        return Again.apply(layer, x)


def step_with(change):
    """Return a step of DAPO whose rows have changed routes."""

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


def pads_on_the_left(model, rows):
    """Run the right step on rows with padding in front, whose routes are 0, and to
    which tokens attend.
    """
    width = max(len(row.ids) for row in rows)
    lefts = [width - len(row.ids) for row in rows]
    padded = [
        replace(
            row,
            prompt=[0] * left + row.prompt,
            routes=[[[0]] * 2] * left + row.routes,
        )
        for row, left in zip(rows, lefts, strict=True)
    ]
    right(model, padded)


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
    (pads_on_the_left, Experts, "what precedes a row is attended to"),
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
    """Half to four fifths of the given routes are the experts that the model would
    choose; the rest are others.
    """
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
    """Rows with routes are checked; rows that lack some, or have too few tokens or
    layers, are refused.
    """
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
    """A step that ignores routes agrees where they are the model's own, and the report
    says that the replay was not exercised.
    """
    model = Model()
    rows = []

    def step(model, given):
        """Collect in `rows` the rows with the model's own routes, and take a step that
        ignores routes.
        """
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


def test_the_order_of_the_experts_of_a_token_exercises_nothing():
    """The model's own experts in the reverse order count as its own."""
    model = Model(ThreeOfFive)
    rows = []

    def step(model, given):
        rows.extend(given)
        right(model, given)

    replayed = check(step, model)
    assert replayed, replayed
    assert all(len({*experts}) == 3 for t in rows[0].routes for experts in t)
    assert "the replay of routes" not in " ".join(replayed.unexercised)
    own = [
        replace(row, routes=torch.tensor(x).flip(-1).tolist())
        for row, x in zip(rows, own_routes(model, rows), strict=True)
    ]
    report = upref.check_step(
        ignores, model, "dapo", temperature=0.7, rows=own, perturb_weights=False
    )
    assert "the replay of routes" in " ".join(report.unexercised), report
    assert "replayed routes" not in " ".join(report.exercised), report


def own_routes(model, rows):
    """Return the experts that a model chooses in float64, for each row as nested lists
    [tokens, layers, 3].
    """
    reference = TorchModel(model)
    routes = []
    for row in rows:
        layers = []
        hooks = [
            layer.router.register_forward_hook(
                lambda _, __, z: layers.append(z.topk(3).indices[0])  # noqa: B023
            )
            for layer in reference.net.layers
        ]
        reference.logits(row.ids)
        routes.append(torch.stack(layers, 1).tolist())
        for hook in hooks:
            hook.remove()
    return routes


def test_a_step_in_half_precision_gets_the_same_routes_once_more():
    model, goal = TorchModel(Model()), make_goal("dapo", {}, 0.7)
    options = RowOptions(routes=True)
    cases = [
        build_case(model, goal, None, [], coarse=coarse, row_options=options)
        for coarse in (False, True)
    ]
    first, second = ([row.routes for row in case.rows] for case in cases)
    assert first == second


@pytest.mark.nightly
def test_a_step_in_half_precision_is_checked():
    def step(model, rows):
        with torch.autocast("cpu", torch.bfloat16):
            right(model, rows)

    report = check(step, Model(), explain=False)
    assert "the step computes in bfloat16" in str(report), report


def test_other_tokens_than_those_of_a_row_take_expert_0():
    routes = {
        (5, 6, 7): Routes(torch.tensor([[[2, 1]], [[3, 1]], [[1, 2]]])),
        (8, 9): Routes(torch.tensor([[[4, 2]], [[2, 3]]])),
    }
    first, second = ([[[2, 1]], [[3, 1]], [[1, 2]]], [[[4, 2]], [[2, 3]]])
    for ids, want in (
        ([5, 6, 7], first),
        ([0, 0, 8, 9], [[[0, 0]], [[0, 0]], *second]),
        ([5, 6, 7, 8, 9, 0], [*first, *second, [[0, 0]]]),
        ([6, 7], first[1:]),
    ):
        assert routes_in(routes, ids).experts.tolist() == want
    assert routes_in(routes, [5, 7]) is None


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ([[[True]], [[False]]], "row 0: routes are whole numbers"),
        ([[[0, True]], [[2, 3]]], "row 0: routes are whole numbers"),
        (([[2, 3]], ((0, np.True_),)), "row 0: routes are whole numbers"),
        ([[[0.0]], [[1.0]]], "row 0: routes are whole numbers"),
        ([[[0]], [[-1]]], "row 0: routes name expert -1"),
        (
            [[[0, 1, 2]], [[1, 2, 1]]],
            "row 0: token 1 takes an expert twice in layer 0",
        ),
        ([[[0]]], r"row 0: routes are lists \[token\]\[layer\]\[expert\]"),
        ([[], []], r"row 0: routes are lists \[token\]\[layer\]\[expert\]"),
    ],
)
def test_routes_that_no_router_chooses_are_refused(routes, words):
    with pytest.raises(InputError, match=words):
        routes_of([Row([3], [4], [True], 1.0, routes=routes)])


def test_routes_are_numbers_of_any_width_of_experts_that_there_are():
    scores = torch.tensor([[0.1, 0.7, 0.2], [0.3, 0.3, 0.4]])
    table = np.array([[[2]], [[0]]], np.int16)
    (routes,) = routes_of([Row([3], [4], [True], 1.0, routes=table)]).values()
    with routes.replayed():
        assert torch.equal(scores.topk(1).values, scores[[0, 1], [2, 0]][:, None])
    with (
        pytest.raises(InputError, match="expert 99, and a router of the model chooses"),
        Routes(torch.tensor([[[2]], [[99]]])).replayed(),
    ):
        scores.topk(1)


def test_routers_that_choose_tokens_have_no_routes():
    with pytest.raises(InputError, match=r"calls topk with dim=1 on scores of 3"):
        draw_routes(lambda ids: torch.rand(1, len(ids), 4).topk(2, dim=1), [[3, 4]], 0)


class Grouped(Experts):
    """Two of the four experts in the best two of three groups, as DeepSeek-V3 chooses."""

    count, taken = 12, 2
    fill = 0.0

    def forward(self, x, routes=None):
        """Return x plus the scores of the experts chosen within the best two of three
        groups.
        """
        scores = self.router(x).sigmoid()
        groups = scores.unflatten(-1, (3, 4))
        best = self.group_scores(groups).topk(2, -1).indices
        is_best = torch.zeros(groups.shape[:-1]).scatter(-1, best, 1)[..., None].bool()
        masked = torch.where(is_best, groups, self.fill).flatten(-2)
        chosen = masked.topk(self.taken, -1).indices
        return x + scores.gather(-1, chosen).sum(-1, keepdim=True)

    def group_scores(self, groups):
        return groups.topk(2, -1).values.sum(-1)


class GroupedByTheBest(Grouped):
    fill = -torch.inf

    def group_scores(self, groups):
        return groups.amax(-1)


@pytest.mark.parametrize("layer", [Grouped, GroupedByTheBest])
def test_routers_that_choose_groups_first_are_refused(layer):
    with pytest.raises(
        InputError, match="chooses 2 of 3 groups of experts for a token, and then 2 of"
    ):
        check(right, Model(layer))


def test_routes_of_ones_own_are_refused_for_a_router_that_chooses_groups_first():
    with (
        pytest.raises(
            InputError, match="chooses 2 for each of 6: upref replays no router"
        ),
        Routes(torch.tensor([[[2, 1]], [[3, 0]]])).replayed(),
    ):
        Grouped()(torch.ones(1, 2, H))


class TwoThenFour(Model):
    """Two layers of different numbers of experts, which are no groups."""

    def __init__(self):
        super().__init__()
        self.layers[1].router = nn.Linear(H, 4)
        self.layers[1].experts = nn.Parameter(torch.randn(4, H, H) / H**0.5)


def test_layers_may_have_different_numbers_of_experts():
    assert check(right, TwoThenFour())


@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_a_checkpoint_of_torch_changes_nothing(kind):
    ids = [3, 4, 5]
    gradients = []
    for model in (Model(), kind()):
        reference = TorchModel(model)
        reference.routes = {tuple(ids): Routes(torch.tensor([[[0], [1]]] * 3))}
        z = reference.logits(ids)
        gradients.append(reference.pull(z, z.detach(), ids))
    assert torch.equal(*gradients)


def test_a_checkpoint_that_chooses_again_is_refused():
    with pytest.raises(InputError, match="calls topk in the backward pass"):
        check(right, OwnCheckpoint())


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
