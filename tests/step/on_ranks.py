# SPDX-License-Identifier: Apache-2.0
"""Steps of several ranks for `upref step`: one row of packed responses under FSDP2, and
what may be wrong with it.
"""

import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention

T = 0.7


class Model(nn.Module):
    """One attention layer; of: [B, S], the number of each token's row in the pack."""

    def __init__(self, V=64, H=16):
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.qkv = nn.Linear(H, 3 * H)
        self.head = nn.Linear(H, V)

    def forward(self, ids, of=None):
        """Return logits [B, S, V] of one layer of attention; tokens attend to earlier
        ones with the same number in `of`.
        """
        of = torch.zeros_like(ids) if of is None else of
        x = self.embed(ids)
        attends = (of[:, :, None] == of[:, None, :]).tril()
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(x + scaled_dot_product_attention(q, k, v, attn_mask=attends))


def loss_sum(model, rows):
    """Return DAPO's loss summed over the tokens of one pack, and how many tokens train."""

    def flat(of):
        """Return of(row) of all rows behind each other, 0 at prompts, without the first
        token.
        """
        values = []
        for row in rows:
            values += [0.0] * len(row.prompt)
            values += [float(v) for v in of(row)]
        return torch.tensor(values)[1:]

    tokens, row_of_token = [], []
    for i, row in enumerate(rows):
        tokens += row.ids
        row_of_token += [i] * len(row.ids)
    ids, of = torch.tensor([tokens]), torch.tensor([row_of_token])
    old = flat(lambda row: row.old)
    A = flat(lambda row: [row.adv] * len(row.response))
    mask = flat(lambda row: row.trains)
    logp = (model(ids, of)[0, :-1] / T).log_softmax(-1)
    r = (logp.gather(-1, ids[0, 1:, None])[:, 0] - old).exp()
    J = torch.minimum(r * A, r.clamp(0.8, 1.28) * A)
    return -(J * mask).sum(), mask.sum()


def sharded(model, rows, over_all=True):
    """Train the model under FSDP2 for one step of SGD. over_all: divide by the tokens
    of all ranks, not of this one.
    """
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss, n = loss_sum(model, rows)
    if over_all:
        dist.all_reduce(n)
        n /= dist.get_world_size()  # FSDP averages the gradients
    (loss / n).backward()
    optimizer.step()


def own_tokens(model, rows):
    """Each rank divides by its own tokens."""
    sharded(model, rows, over_all=False)


def not_reduced(model, rows):
    """Compute the gradient of each rank's own rows: nothing adds up the ranks'
    gradients.
    """
    loss, n = loss_sum(model, rows)
    dist.all_reduce(n)
    (loss / n).backward()


def one_fails(model, rows):
    if dist.get_rank() == 1:
        raise ValueError("no data on this rank")
    sharded(model, rows)


def flat_shards(model, rows):
    """Compute the gradient under FSDP1, which keeps parameters and gradients in flat
    buffers of its own.
    """
    net = torch.distributed.fsdp.FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True
    )
    loss, n = loss_sum(net, rows)
    (loss / n).backward()
