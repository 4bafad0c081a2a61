# SPDX-License-Identifier: Apache-2.0
"""The fast Qwen3 is transformers': logits, gradients, samples; and each gradient
written by hand is the function's.
"""

import ctypes

import pytest
import torch

from repro.mini import tasks
from repro.mini.policy import fused, models, packed
from repro.mini.policy.sample import nucleus, sample

MASKS = {
    "ragged": (13, 1, 5, 9, 2, 13, 7),
    "short": (1, 1, 2, 1, 1, 1, 2),
    "whole": (13,) * 7,
}


@pytest.fixture(scope="module")
def policy():
    """Return the task countdown, a small Qwen3, and three prompts."""
    task = tasks.get("countdown")
    return (
        task,
        models.new("qwen3", task, seed=1),
        models.inputs(task, task.problems("test", 3, 0)),
    )


@pytest.mark.parametrize(
    "words", [104, 2, 1], ids=["apart", "many begin alike", "all alike"]
)
@pytest.mark.parametrize("lengths", MASKS.values(), ids=MASKS)
def test_logits_and_every_gradient_are_those_of_transformers(policy, lengths, words):
    """Responses of several lengths, with holes in a mask: in one long row, and padded."""
    task, model, prompts = policy
    of = torch.tensor([2, 0, 0, 1, 1, 1, 2])
    tokens = torch.randint(
        3, 3 + words, (7, task.response_length), generator=tasks.generator(0)
    )
    mask = torch.arange(task.response_length) < torch.tensor(lengths)[:, None]
    mask[3, 1:3] = False  # holes are no trouble either
    found = []
    for logits in (
        packed.response_logits(model, prompts["input_ids"], of, tokens, mask),
        models.padded_logits(model, prompts, of, tokens)[mask],
    ):
        model.zero_grad()
        logits.log_softmax(-1).gather(-1, tokens[mask][:, None]).sum().backward()
        found.append(
            (
                logits.detach(),
                {name: p.grad.clone() for name, p in model.named_parameters()},
            )
        )
    (mine, my_grads), (theirs, their_grads) = found
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    for name, theirs in their_grads.items():
        torch.testing.assert_close(
            my_grads[name],
            theirs,
            rtol=1e-3,
            atol=2e-5 * theirs.abs().max().item(),
            msg=name,
        )


@pytest.mark.parametrize("lengths", MASKS.values(), ids=MASKS)
def test_what_is_said_alike_is_read_once(policy, lengths):
    """One place in the long row for each different beginning that something follows,
    found here one by one.
    """
    task, _, prompts = policy
    of = torch.tensor([2, 0, 0, 1, 1, 1, 2])
    tokens = torch.randint(
        3, 5, (7, task.response_length), generator=tasks.generator(0)
    )
    mask = torch.arange(task.response_length) < torch.tensor(lengths)[:, None]
    at = packed.places(prompts["input_ids"], of, tokens, mask)
    rows = list(zip(of.tolist(), tokens.tolist(), lengths, strict=True))
    beginnings = {
        (p, *said[: t + 1]) for p, said, length in rows for t in range(length - 1)
    }
    assert len(at.tokens) == prompts["input_ids"].numel() + len(beginnings)
    assert torch.equal(at.queries.flatten()[at.home], torch.arange(len(at.tokens)))


def test_it_draws_the_tokens_that_transformers_would(policy, monkeypatch):
    task, model, prompts = policy
    mine = sample(model, prompts, 32, task.response_length, tasks.generator(0))
    monkeypatch.setattr(packed, "fits", lambda model: False)
    theirs = sample(model, prompts, 32, task.response_length, tasks.generator(0))
    # rounding may tip a draw, rarely
    assert (mine.tokens == theirs.tokens).all(1).double().mean() > 0.9
    assert not theirs.mask.all()  # some end early and are left out of the reading


@pytest.mark.parametrize("heads", [(2, 1), (4, 2), (2, 2)], ids=str)
def test_any_number_of_heads(heads):
    """The sampler's and the packed logits are those of transformers for these numbers
    of heads.
    """
    task = tasks.get("countdown")
    model = models.new("qwen3", task)
    config = model.config
    config.num_attention_heads, config.num_key_value_heads = heads
    torch.manual_seed(0)
    model = models.ready(type(model)(config))
    prompts = models.inputs(task, task.problems("test", 3, 0))
    tokens, mask, logits, state = sample(
        model, prompts, 4, task.response_length, tasks.generator(0)
    )
    whole = models.padded_logits(
        model, prompts, torch.arange(3).repeat_interleave(4), tokens
    )
    torch.testing.assert_close(logits[state[mask]], whole[mask], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        packed.response_logits(model, prompts["input_ids"], torch.arange(3).repeat_interleave(4), tokens, mask),
        whole[mask], atol=1e-4, rtol=1e-4,
    )  # fmt: skip


def random(*shape):
    return torch.randn(
        shape, dtype=torch.float64, generator=tasks.generator(*shape)
    ).requires_grad_()


def test_gradients_by_hand_are_those_of_finite_differences():
    """Each backward pass written by hand: norm, norm with rotation, gate and attention."""
    check = torch.autograd.gradcheck
    cos, sin = random(5, 1, 4).detach(), random(5, 1, 4).detach()
    assert check(lambda x: fused.Rms.apply(x, 1e-6), random(5, 6))
    assert check(
        lambda x, w: fused.RmsTurn.apply(x, w, cos, sin, 1e-6),
        (random(5, 3, 4), random(3, 4)),
    )
    assert check(fused.Gate.apply, random(5, 8))
    hide = torch.zeros(2, 3, 20, dtype=torch.float64).masked_fill_(
        torch.arange(20) > 12, -1e300
    )

    def attend(q, k, v):
        return fused.Attend.apply(q, k, v, hide, 0.5)

    assert check(attend, (random(2, 3, 4), random(2, 20, 4), random(2, 20, 4)))


@pytest.mark.parametrize("n", [3, 15, 16, 40])
def test_softmax_of_short_and_long_rows(n):
    x = 30 * torch.randn(7, n, generator=tasks.generator(n))
    torch.testing.assert_close(fused.softmax(x.clone()), x.softmax(-1))


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.7, 0.95])
def test_the_nucleus_is_the_fewest_tokens(top_p):
    p = (4 * torch.randn(500, 30, generator=tasks.generator(0))).softmax(-1)
    p[0], p[1] = 1 / 30, torch.tensor([0.5, 0.5] + [0.0] * 28)
    kept = nucleus(p, top_p)
    for row, mine in zip(p, kept, strict=True):
        ordered = row.sort(descending=True).values
        fewest = int((ordered.cumsum(0) - ordered < top_p).sum())
        assert int((mine > 0).sum()) == fewest
        assert mine.sum() >= min(top_p, 1) - 1e-6
        assert set(mine.tolist()) <= {0.0, *row.tolist()}


def test_without_glibc_memory_is_not_kept_and_nothing_breaks(monkeypatch):
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name))
    )
    models.keep_memory()
