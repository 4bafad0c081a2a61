# SPDX-License-Identifier: Apache-2.0
"""Two ranks over gloo with unequal numbers of tokens: a bare loop under DDP, and verl's
worker under FSDP2.
"""

import contextlib
import time
from unittest.mock import patch

import pytest
import torch
from torch import distributed as dist, nn

from tests.support.daily import daily
from upref.step import record_step
from upref.step.compare.case import perturb
from upref.step.inputs.families import tiny
from upref_frameworks.steps.host import report, spawn_ranks

RANKS = 2


class Small(nn.Module):
    def __init__(self, V=64, H=16):
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(V, H),
            nn.GRU(H, H, batch_first=True),
            nn.Linear(H, V),
        )

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def bare(net, rows, T, over_all):
    """Return what record_step records of one DAPO step under DDP. over_all: divide by
    the tokens of all ranks.

    DDP averages gradients, so that the count is divided by the number of ranks.
    """
    counted = torch.tensor(float(sum(sum(r.trains) for r in rows)))
    if over_all:
        dist.all_reduce(counted)
        counted /= RANKS
    with record_step(net) as seen:
        model, optimizer = (
            nn.parallel.DistributedDataParallel(net),
            torch.optim.SGD(net.parameters(), 0.1),
        )
        loss = 0.0
        for r in rows:
            z = model(torch.tensor([r.ids]))[0, len(r.prompt) - 1 : -1] / T
            ratio = (
                z.log_softmax(-1).gather(1, torch.tensor(r.response)[:, None])[:, 0]
                - torch.tensor(r.old)
            ).exp()
            J = torch.minimum(ratio * r.adv, ratio.clamp(0.8, 1.28) * r.adv)
            loss = loss - (J * torch.tensor(r.trains)).sum() / counted
        loss.backward()
        optimizer.step()
    return seen


def test_a_loop_that_counts_the_tokens_of_all_ranks_agrees():
    found = report(bare, perturb(Small()), "dapo", {}, {}, ranks=RANKS, over_all=True)
    assert found and found.error < 5e-6 and "several ranks" not in found.unexercised, (
        found
    )


def test_a_loop_that_counts_its_own_tokens_is_named():
    found = report(bare, perturb(Small()), "dapo", {}, {}, ranks=RANKS, over_all=False)
    assert (
        "token-mean is taken over 2 ranks with every 2nd row" in found.failures[0].cause
    ), found


def verls(model, rows, T, over_all):
    """Return what is recorded of one step of verl's worker.

    over_all=False: the counts of tokens are not reduced over the ranks.
    """
    from upref_frameworks.verl.step import record_training

    reduce = dist.all_reduce

    def reduce_all_but_counts(x, *a, **kw):
        """Reduce over the ranks, but no scalar count unless `over_all`."""
        return (
            reduce(x, *a, **kw) if over_all or x.ndim or x.is_floating_point() else None
        )

    with patch.object(dist, "all_reduce", reduce_all_but_counts):
        return record_training(model, rows, T, actor=dict(clip_ratio_high=0.28))


@pytest.mark.nightly
@pytest.mark.verl
@pytest.mark.parametrize("over_all", [True, False])
def test_verl_counts_the_tokens_of_all_ranks(over_all):
    pytest.importorskip("verl.workers.engine_workers", exc_type=ImportError)
    found = report(
        verls, perturb(tiny("qwen3")), "dapo", {}, {}, ranks=RANKS, over_all=over_all
    )
    assert bool(found) == over_all, found
    assert (
        over_all
        or "token-mean is taken over 2 ranks with every 2nd row"
        in found.failures[0].cause
    ), found


class SlowLastRank:
    """A step that writes a file for each rank; the last rank is slow, and may fail."""

    def __init__(self, folder, fails):
        self.folder, self.fails = folder, fails

    def __call__(self, model, rows, temperature):
        """Leave a file named by the rank. Rank 2 waits two seconds first, and then
        raises a ValueError if `fails`.
        """
        rank = dist.get_rank()
        if rank == 2:
            time.sleep(2)
            if self.fails:
                raise ValueError("the last rank fails")
        (self.folder / str(rank)).touch()


@pytest.mark.nightly
@pytest.mark.parametrize("fails", daily([True, False], 2))
def test_three_ranks_wait_for_the_slowest_and_pass_on_its_error(tmp_path, fails):
    step = SlowLastRank(tmp_path, fails)
    expected = (
        pytest.raises(Exception, match="the last rank fails")
        if fails
        else contextlib.nullcontext()
    )
    with (
        expected,
        spawn_ranks(3, step, nn.Linear(1, 1), list("abcdef"), 0.7, {}) as rows,
    ):
        step(None, rows, 0.7)
    assert (tmp_path / "2").exists() != fails
