# SPDX-License-Identifier: Apache-2.0
"""No failure on a healthy sampler: a hundred thousand tokens of policies whose every
quirk is allowed.

Tokens are drawn from μ, position by position, from peaked logits; the trainer's logits
differ as each case says.
"""

import pytest
import torch

from upref.replay import gap, make_batch

RESPONSES, LENGTH, VOCABULARY, GROUP = 500, 200, 24, 10


def logits(generator, responses=RESPONSES):
    """Return logits of which most positions are nearly certain, as in a language model;
    a third of them to the last bit.
    """
    z = torch.randn(responses, LENGTH, VOCABULARY, generator=generator)
    peak = 40 * torch.rand(responses, LENGTH, 1, generator=generator)
    return z.scatter_add(-1, z.argmax(-1, keepdim=True), peak)


def of_drawn(lp, ids):
    """The log-probability of each drawn token: [B, T] of lp [B, T, V]."""
    return lp.gather(-1, ids[..., None])[..., 0]


def plain(y):
    return y


def batch(mu, pi, generator, column=plain, **more):
    """Draw from μ; both columns in float32."""
    y = mu.log_softmax(-1)
    ids = torch.multinomial(y.exp().flatten(0, 1), 1, generator=generator).view(
        y.shape[:2]
    )
    lengths = torch.randint(LENGTH // 4, LENGTH + 1, (len(ids),), generator=generator)
    mask = torch.arange(LENGTH)[None, :] < lengths[:, None]
    return make_batch(
        {
            "ids": ids,
            "mask": mask,
            "old": of_drawn(pi.log_softmax(-1), ids),
            "sampler": column(of_drawn(y, ids)),
        }
        | more,
        file="f",
    )


def same(z, generator):
    return z


def rounded(z, generator):
    return z.bfloat16().float()


def stale(z, generator):
    return z + 0.3 * torch.randn(z.shape, generator=generator)


def lone_other_experts(z, generator):
    """Return logits of which one token in three hundred is computed by other experts,
    though the engine was certain of many of them.
    """
    other = torch.rand(z.shape[:2], generator=generator) < 1 / 300
    return torch.where(other[..., None], torch.randn(z.shape, generator=generator), z)


def mixed_lags(z, generator):
    """Return logits of which half of the responses were sampled by older weights."""
    old = (torch.arange(len(z)) % 2 == 0)[:, None, None]
    return torch.where(old, z + 1.0 * torch.randn(z.shape, generator=generator), z)


def far(z, generator):
    return torch.randn(z.shape, generator=generator)


def sharper(z, generator):
    """The policy has become sharper since, as training makes it."""
    return 1.3 * z + 0.1 * torch.randn(z.shape, generator=generator)


def biased(z, generator):
    """Rounding that is off in one direction on every token."""
    return (z.bfloat16().float()).log_softmax(-1) - 0.002


def bfloat16(y):
    return y.bfloat16().float()


def float16(y):
    return y.half().float()


@pytest.mark.parametrize("column", [plain, bfloat16, float16])
@pytest.mark.parametrize(
    "change",
    [same, rounded, stale, lone_other_experts, mixed_lags, far, sharper, biased],
)
def test_nothing_fails(change, column):
    generator = torch.Generator().manual_seed(5)
    z = logits(generator)
    found = gap(batch(z, change(z, generator), generator, column))
    assert found, [str(f) for f in found.failures]


@pytest.mark.parametrize("change", [stale, mixed_lags, lone_other_experts])
def test_equal_texts_of_several_lags_are_not_exchanged_rows(change):
    """Ten responses to a prompt are the same text; each was sampled by weights of its
    own age.
    """
    generator = torch.Generator().manual_seed(6)
    z = logits(generator, RESPONSES // GROUP)
    y, ids = z.log_softmax(-1), z.argmax(-1)
    rows = torch.arange(RESPONSES) // GROUP
    lag = torch.arange(RESPONSES) % 4
    x = torch.stack(
        [
            of_drawn(change(z * (1 - 0.1 * k), generator).log_softmax(-1), ids)
            for k in range(4)
        ]
    )
    column = of_drawn(y, ids)[rows]
    columns = {
        "ids": ids[rows],
        "mask": torch.ones(RESPONSES, LENGTH),
        "old": x[0][rows],
        "sampler": torch.where((lag == 0)[:, None], column, x[lag, rows]),
    }
    found = gap(make_batch(columns, file="f"))
    assert found, [str(f) for f in found.failures]


def test_loops_of_text_are_not_shifted():
    """Responses repeat three tokens for ever, under a large gap."""
    generator = torch.Generator().manual_seed(7)
    z = logits(generator)[:, :3].repeat(1, LENGTH // 3 + 1, 1)[:, :LENGTH]
    for change in (stale, mixed_lags, far):
        found = gap(batch(z, change(z, generator), generator))
        assert found, [str(f) for f in found.failures]


def test_short_answers_do_not_fail():
    """Answers of one to four tokens, of which many are equal."""
    generator = torch.Generator().manual_seed(8)
    z = logits(generator)[:, :1].expand(-1, LENGTH, -1)
    mask = torch.arange(LENGTH)[None, :] < torch.randint(
        1, 5, (RESPONSES, 1), generator=generator
    )
    found = gap(batch(z, stale(z, generator), generator, mask=mask))
    assert found, [str(f) for f in found.failures]


@pytest.mark.parametrize("change", [rounded, stale])
def test_copies_of_one_response_bear_no_signature(change):
    """Ten draws are no more evidence when fifty rows repeat them: rare tokens, whose ρ
    is large, are missing.
    """
    causes = set()
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        z = logits(generator, 1)[:, :40]
        y = z.log_softmax(-1)
        ids = torch.multinomial(y[0].exp(), 1, generator=generator).T
        x = change(z, generator).log_softmax(-1)
        columns = {
            "ids": ids.expand(50, -1),
            "mask": torch.ones(50, 40),
            "sampler": of_drawn(y, ids).expand(50, -1),
            "old": of_drawn(x, ids).expand(50, -1),
        }
        found = gap(make_batch(columns, file="f"))
        assert found, [str(f) for f in found.failures]
        causes.add(found.cause)
    assert causes <= {
        "agree",
        "two_policies",
        "impossible_tokens",
        "bfloat16_column",
    }, causes
