# SPDX-License-Identifier: Apache-2.0
"""Two ranks over gloo with unequal numbers of tokens: a bare loop under DDP."""

import json

import torch
from torch import distributed as dist
from torch import nn

from upref.step import TorchModel, check_recorded, record_step
from upref.step.case import built, disturb, meant

T, RANKS = 0.7, 2


class Small(nn.Module):
    def __init__(self, V=64, H=16):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(V, H), nn.GRU(H, H, batch_first=True), nn.Linear(H, V)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def rows_of(model):
    return built(TorchModel(model), meant("dapo", {}, T), None, ()).rows


def bare(rank, over_all):
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
    return seen, rows


def rank(number, folder, over_all):
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=number, world_size=RANKS)
    torch.set_num_threads(1)
    seen, rows = bare(number, over_all)
    if number == 0:
        report = check_recorded(seen, [rows], "dapo", temperature=T)
        said = {"ok": bool(report), "error": report.error, "text": str(report)}
        (folder / "report.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


def reported(folder, over_all):
    torch.multiprocessing.spawn(rank, (folder, over_all), nprocs=RANKS)
    return json.loads((folder / "report.json").read_text())


def test_a_loop_that_counts_the_tokens_of_all_ranks_agrees(tmp_path):
    found = reported(tmp_path, True)
    assert found["ok"] and found["error"] < 5e-6 and "not exercised: several ranks" not in found["text"]


def test_a_loop_that_counts_its_own_tokens_is_named(tmp_path):
    found = reported(tmp_path, False)
    assert "token-mean is taken over 2 ranks with every 2nd row" in found["text"], found["text"]
