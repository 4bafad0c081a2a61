# SPDX-License-Identifier: Apache-2.0
"""Two ranks over gloo with unequal numbers of tokens: a bare loop under DDP, and verl's worker under FSDP2."""

import json

import pytest
import torch
from torch import distributed as dist
from torch import nn

from upref.step import TorchModel, check_recorded, record_step
from upref.step.case import built, disturb, meant
from upref.step.families import tiny

T, RANKS = 0.7, 2


class Small(nn.Module):
    def __init__(self, V=64, H=16):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(V, H), nn.GRU(H, H, batch_first=True), nn.Linear(H, V)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def rows_of(model):
    return built(TorchModel(model), meant("dapo", {}, T), None, ()).rows


def bare(rank, folder, over_all):
    """DDP averages gradients, so that each rank's sum is multiplied by their number."""
    torch.manual_seed(0)
    net = disturb(Small())
    rows = rows_of(net)
    mine = rows[rank::RANKS]
    counted = sum(sum(r.trains) for r in rows) / RANKS if over_all else sum(sum(r.trains) for r in mine)
    with record_step(net) as seen:
        model, optimizer = nn.parallel.DistributedDataParallel(net), torch.optim.SGD(net.parameters(), 0.1)
        loss = 0.0
        for r in mine:
            z = model(torch.tensor([r.ids]))[0, len(r.prompt) - 1 : -1] / T
            ratio = (z.log_softmax(-1).gather(1, torch.tensor(r.response)[:, None])[:, 0] - torch.tensor(r.old)).exp()
            J = torch.minimum(ratio * r.adv, ratio.clamp(0.8, 1.28) * r.adv)
            loss = loss - (J * torch.tensor(r.trains)).sum() / counted
        loss.backward()
        optimizer.step()
    return seen, rows, {}


def of_verl(rank, folder, agg):
    from upref.step import verl

    model = disturb(tiny("qwen3"))
    rows = rows_of(model)
    seen = verl.trained(model, rows[rank::RANKS], T, actor=dict(loss_agg_mode=agg), engine=dict(
        micro_batch_size_per_gpu=3))  # fmt: skip
    return seen, rows, dict(eps_high=0.2)


def rank(number, folder, job, objective, given):
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=number, world_size=RANKS)
    torch.set_num_threads(1)
    seen, rows, hp = job(number, folder, given)
    if number == 0:
        report = check_recorded(seen, [rows], objective, temperature=T, **hp if objective == "dapo" else {})
        said = {"ok": bool(report), "error": report.error, "text": str(report)}
        (folder / "report.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


def reported(folder, job, objective, given):
    torch.multiprocessing.spawn(rank, (folder, job, objective, given), nprocs=RANKS)
    return json.loads((folder / "report.json").read_text())


def test_a_loop_that_counts_the_tokens_of_all_ranks_agrees(tmp_path):
    found = reported(tmp_path, bare, "dapo", True)
    assert found["ok"] and found["error"] < 5e-6 and "not exercised: several ranks" not in found["text"]


def test_a_loop_that_counts_its_own_tokens_is_named(tmp_path):
    found = reported(tmp_path, bare, "dapo", False)
    assert "token-mean is taken over 2 ranks with every 2nd row" in found["text"], found["text"]


@pytest.mark.verl
@pytest.mark.parametrize("agg, objective", [("token-mean", "dapo"), ("seq-mean-token-mean", "grpo")])
def test_verl_counts_the_tokens_of_all_ranks(agg, objective, tmp_path):
    pytest.importorskip("verl.workers.engine_workers", reason="`repro/venv.sh smoke` installs verl's trainer")
    found = reported(tmp_path, of_verl, objective, agg)
    assert found["ok"] and found["error"] < 2e-5, found["text"]
