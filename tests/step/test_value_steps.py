# SPDX-License-Identifier: Apache-2.0
"""check_step on steps that train a policy and a critic by one backward pass: right ones
agree, and what is wrong with the value loss is named.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import upref
from tests.support.daily import daily
from upref.step import Row, check_step

T = 0.7


class Shared(nn.Module):
    """A trunk with a head for the policy and one for the critic."""

    def __init__(self, V=64, H=32):
        """Make a policy and a critic on one recurrent network, always with the same
        weights.
        """
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, H)
        self.rnn = nn.GRU(H, H, batch_first=True)
        self.head = nn.Linear(H, V)
        self.value = nn.Linear(H, 1)

    def hidden(self, ids):
        return self.rnn(self.embed(ids))[0]

    def forward(self, ids):
        h = self.hidden(ids)
        return self.head(h), self.value(h)


class Output:
    """As transformers and TRL return it: fields, some of them empty."""

    def __init__(self, logits, value):
        self.logits, self.loss, self.value = logits, None, value


class Fields(Shared):
    def forward(self, ids):
        logits, value = super().forward(ids)
        return Output(logits, value[..., 0])


def clipped(V, R, old, clip=0.2):
    near = old + (V - old).clamp(-clip, clip)
    return torch.maximum((V - R) ** 2, (near - R) ** 2) / 2


def smaller(V, R, old):
    near = old + (V - old).clamp(-0.2, 0.2)
    return torch.minimum((V - R) ** 2, (near - R) ** 2) / 2


def clipped_alone(V, R, old):
    return (old + (V - old).clamp(-0.2, 0.2) - R) ** 2 / 2


def near_clip(V, R, old):
    return clipped(V, R, old, 0.1)


def mse(V, R, old):
    return (V - R) ** 2 / 2


def tokens_of_responses(rows):
    return sum(len(r.response) for r in rows)


def advantages(r):
    return [r.adv] * len(r.response)


def detached(model, hidden):
    return model.value(hidden.detach())[..., 0]


def ppo(
    model,
    rows,
    *,
    coef=0.5,
    loss: Callable[..., Any] = clipped,
    place=0,
    target=lambda r: r.returns,
    values=lambda m, h: m.value(h)[..., 0],
    temperature=T,
    counts=lambda r: r.trains,
    divisor=None,
    bonus=0.0,
):
    """Compute the gradient of PPO's loss with a value loss, a row at a time; without
    options, it is right.

    Args:
        coef: of the value loss.
        loss: of (values, targets, old values).
        place: by how many tokens the values are shifted.
        target: of a row, what values are compared with.
        values: of (model, hidden states), the values.
        temperature: of the logits.
        counts: of a row, the tokens that the value loss counts.
        divisor: of the rows, that of the value loss.
        bonus: coefficient of the entropy.
    """
    total = sum(sum(r.trains) for r in rows)
    for r in rows:
        h = model.hidden(torch.tensor([r.ids]))[0]
        first, n = len(r.prompt) - 1, len(r.response)
        logp = (model.head(h[first : first + n]) / temperature).log_softmax(-1)
        lp = logp[range(n), r.response]
        V = values(model, torch.cat([h, h[-1:]]))[first + place : first + place + n]
        ratio = (lp - torch.tensor(r.old)).exp()
        J = torch.minimum(ratio * r.adv, ratio.clamp(0.8, 1.2) * r.adv)
        J = J - bonus * (logp.exp() * logp).sum(-1)
        error = loss(V, torch.tensor(target(r)), torch.tensor(r.old_values))
        policy = (J * torch.tensor(r.trains)).sum() / total
        value = (error * torch.tensor(counts(r))).sum() / (
            divisor or (lambda rows: total)
        )(rows)
        (coef * value - policy).backward()


def with_(**options):
    return lambda model, rows: ppo(model, rows, **options)


def over_prompts(model, rows):
    """Compute PPO's gradient with a value loss averaged over all tokens, with returns
    of 0 on prompts.
    """
    count = sum(len(r.ids) - 1 for r in rows)
    ppo(model, rows, coef=0)
    for r in rows:
        V = model(torch.tensor([r.ids]))[1][0, :-1, 0]
        zeros = [0.0] * (len(r.prompt) - 1)
        R, old = (torch.tensor(zeros + x) for x in (r.returns, r.old_values))
        (0.5 * clipped(V, R, old).sum() / count).backward()


def check(step, model: nn.Module | None = None, value="clipped", coef=0.5, **how):
    """Return the report of check_step on a PPO step with a value loss."""
    return check_step(
        step,
        model or Shared(),
        "ppo_clip",
        temperature=T,
        value=value,
        value_coef=coef,
        **how,
    )


RIGHT: list[Any] = [
    (ppo, {}),
    (with_(loss=mse), {"value": "mse"}),
    (with_(loss=lambda *x: 2 * mse(*x)), {"value": "mse", "coef": 1.0}),
    (with_(loss=lambda V, R, old: clipped(V, R, old, 0.5)), {"value_clip": 0.5}),
    (with_(bonus=0.01), {"entropy_coef": 0.01}),
    (ppo, {"model": Fields()}),
]


@pytest.mark.parametrize("number", range(len(RIGHT)))
def test_a_right_step_with_a_shared_trunk_agrees(number):
    step, how = RIGHT[number]
    report = check(step, **how)
    assert report and report.error < 5e-6, report
    assert f"the value loss {how.get('value', 'clipped')}" in report.exercised


BUGS: list[Any] = [
    (
        "another coefficient",
        "the coefficient of the value loss is 0.1, not 0.5",
        with_(coef=0.1),
    ),
    (
        "without the half",
        "is 1, not 0.5 (the value loss of a token is 1/2",
        with_(coef=1.0),
    ),
    ("the sign", "the coefficient of the value loss is -0.5", with_(coef=-0.5)),
    ("no value loss", "the value loss has no gradient", with_(coef=0)),
    (
        "a detached trunk",
        "does not reach the layers that policy and critic share",
        with_(values=detached),
    ),
    (
        "a detached trunk and coefficient",
        "; and its coefficient is 0.25, not 0.5",
        with_(coef=0.25, values=detached),
    ),
    ("min", "the smaller of the two errors (min)", with_(loss=smaller)),
    (
        "the clipped error alone",
        "has the clipped error alone",
        with_(loss=clipped_alone),
    ),
    ("no clip", "the value loss is not clipped", with_(loss=mse)),
    (
        "another range",
        "value_clip is another number, such as 0.1, not 0.2",
        with_(loss=near_clip),
    ),
    ("one token late", "the critic's values are read one token late", with_(place=1)),
    (
        "one token early",
        "the critic's values are read one token early",
        with_(place=-1),
    ),
    (
        "masked tokens",
        "has masked tokens of responses too",
        with_(counts=lambda r: [True] * len(r.trains)),
    ),
    ("prompts", "counts tokens of prompts and masked tokens too", over_prompts),
    (
        "another divisor is another coefficient",
        "the value loss is 0.4057, not 0.5",
        with_(divisor=tokens_of_responses),
    ),
    (
        "the advantages",
        "the target of the value loss is the advantages",
        with_(target=advantages),
    ),
    (
        "the advantages, one token late",
        "one token late: at the token itself, not at the place that predicts it; the target",
        with_(place=1, target=advantages),
    ),
    (
        "returns one late",
        "is the returns, one token late",
        with_(target=lambda r: [0.0, *r.returns[:-1]]),
    ),
    (
        "old values",
        "the target of the value loss is the old values",
        with_(target=lambda r: r.old_values),
    ),
    ("the policy's temperature", "the temperature is left out", with_(temperature=1.0)),
]


@pytest.mark.parametrize("name, cause, step", daily(BUGS, 6))
def test_what_is_wrong_with_the_value_loss_is_named(name, cause, step):
    report = check(step)
    assert not report
    assert cause in report.failures[0].cause, report


def test_a_critic_that_shares_no_layer_gets_a_note():
    class Detached(Shared):
        def forward(self, ids):
            h = self.hidden(ids)
            return self.head(h), self.value(h.detach())

    report = check(with_(values=detached), Detached())
    assert report
    assert any("no parameter has a gradient of both" in n.about for n in report.notes)
    assert not check(ppo).notes


def test_a_clip_that_is_not_meant_is_named():
    assert "values are clipped" in check(ppo, value="mse").failures[0].cause


def test_a_value_loss_of_no_known_kind_is_told_by_a_token():
    """log cosh: at 0.8 its slope is 0.66."""
    step = with_(loss=lambda V, R, old: (V - R).cosh().log())
    report = check(step, value="mse")
    assert not report
    assert report.failures[0].cause.startswith(
        "the policy term is right, and the value loss is not: its slope by the value of token"
    ), report


def test_two_faults_get_no_false_cause():
    report = check(with_(temperature=1.0, loss=smaller))
    assert not report
    assert "no known cause fits" in report.failures[0].cause
    assert "or the value loss is wrong as well" in report.failures[0].cause


def test_a_value_loss_that_is_not_declared_is_told_how():
    report = check_step(
        lambda model, rows: ppo(model, [with_values(r) for r in rows]),
        Shared(),
        "ppo_clip",
        temperature=T,
    )
    assert "declare a value loss (value=, value_coef=)" in report.failures[0].cause


def with_values(row):
    row.returns = row.old_values = [0.1 * t for t in range(len(row.response))]
    return row


@pytest.mark.parametrize(
    "how, sentence",
    [
        ({"value_coef": 0.5}, "pass value='mse' or value='clipped' as well"),
        ({"value": "mse"}, "needs value_coef"),
        ({"value": "huber", "value_coef": 1.0}, "huber"),
        (
            {"value": "mse", "value_coef": 0.0},
            "value_coef must be a finite number above 0",
        ),
        (
            {"value": "clipped", "value_coef": 1.0, "value_clip": -1},
            "value_clip must be a finite number above 0",
        ),
    ],
)
def test_what_cannot_be_declared_is_refused(how, sentence):
    with pytest.raises(upref.InputError, match=sentence):
        check_step(ppo, Shared(), "ppo_clip", temperature=T, **how)


def test_a_model_without_values_is_refused():
    class Policy(Shared):
        def forward(self, ids):
            return self.head(self.hidden(ids))

    with pytest.raises(upref.InputError, match="returns logits and values"):
        check(ppo, Policy())


def test_rows_without_returns_are_refused_and_a_clip_out_of_reach_is_told():
    """A value loss needs returns; where no value leaves the clip's range, the report
    says that the clip was not exercised.
    """
    rows = [
        Row([3, 4], [5, 6, 7], [True, False, True], 1.0, old=[-3.0, -3.5, -3.4]),
        Row([8, 9, 10], [11, 12], [True, True], -1.0, old=[-3.2, -4.1]),
    ]
    with pytest.raises(upref.InputError, match="reads returns"):
        check(ppo, rows=rows)
    for row in rows:
        row.returns = [0.5] * len(row.response)
        row.old_values = [0.0] * len(row.response)
    report = check(
        with_(loss=lambda V, R, old: clipped(V, R, old, 50.0)),
        rows=rows,
        value_clip=50.0,
    )
    assert report
    assert "the clip of values (no value has left its range)" in report.unexercised
