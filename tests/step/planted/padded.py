# SPDX-License-Identifier: Apache-2.0
"""A loop of functions: prompts padded left, responses padded right, uneven
micro-batches, old log-probabilities handed in.

A batch is [B, P + T]: P columns of prompts, then T columns of responses. All numbers of
response tokens are [B, T]. Each step leaves its gradients in the model; its decorator
says what was planted, or which unusual form is right.
"""

import copy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.step.planted.case import Loop
from upref.step import Row

T, PAD, END = 0.6, 0, 2
SIZE = 3  # rows of a micro-batch: 3, 3, 2


def llama():
    """Return a Llama of two layers whose sequences end in token 2."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=112,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    return transformers.LlamaForCausalLM(config)


loop = Loop("padded", llama, {"objective": "grpo", "temperature": T})


# ---- the loop ----
@dataclass
class Batch:
    """A micro-batch: ids and seen are [B, P + T], all else [B, T]."""

    ids: Tensor
    seen: Tensor  # not padding
    mask: Tensor  # trains
    there: Tensor  # holds a response token
    old: Tensor
    ref: Tensor
    adv: Tensor


def columns(lists, value, left=False):
    """Return lists of any length as one tensor, padded with `value`."""
    tensors = [torch.tensor(x) for x in lists]
    side = "left" if left else "right"
    return torch.nn.utils.rnn.pad_sequence(tensors, True, value, side)


def collate(rows: list[Row]) -> Batch:
    """Return a micro-batch of rows, with prompts on the left and responses on the right
    of one seam.
    """
    prompts = columns([r.prompt for r in rows], PAD, left=True)
    responses = columns([r.response for r in rows], PAD)
    seen_left = columns([[1] * len(r.prompt) for r in rows], 0, left=True)
    there = columns([[1.0] * len(r.response) for r in rows], 0.0)
    return Batch(
        torch.cat([prompts, responses], 1),
        torch.cat([seen_left, there.long()], 1),
        columns([[float(t) for t in r.trains] for r in rows], 0.0),
        there,
        columns([r.old for r in rows], 0.0),
        columns([r.ref for r in rows], 0.0),
        torch.tensor([[r.adv] for r in rows]).expand_as(there),
    )


def response_logits(model, b: Batch, seen=None, positions=None):
    """Return the logits over the temperature that predict the response tokens, [B, T,
    V].

    seen, positions: in place of the batch's attention mask and of positions counted
    from it.
    """
    seen = b.seen if seen is None else seen
    if positions is None:
        positions = (seen.cumsum(1) - 1).clamp(min=0)
    z = model(input_ids=b.ids, attention_mask=seen, position_ids=positions).logits
    width = b.mask.shape[1]
    return z[:, -width - 1 : -1] / T


def responses(b: Batch):
    """Ids of the response tokens, [B, T]."""
    return b.ids[:, -b.mask.shape[1] :]


def log_probs(model, b: Batch, **how):
    """Return the log-probabilities of the response tokens, [B, T]."""
    z = response_logits(model, b, **how)
    return z.log_softmax(-1).gather(-1, responses(b)[..., None])[..., 0]


def surrogate(lp, old, A, low=0.8, high=1.2):
    """Return PPO's clipped surrogate of each token."""
    ratio = (lp - old).exp()
    return torch.minimum(ratio * A, ratio.clamp(low, high) * A)


def mean_of_responses(x, mask):
    """The mean of each response, [B]."""
    return (x * mask).sum(1) / mask.sum(1)


def micro_batches(rows):
    """The rows in parts of three, the last one smaller."""
    return [rows[i : i + SIZE] for i in range(0, len(rows), SIZE)]


def kl_to(ref, lp):
    """The estimator k3 of each token."""
    return (ref - lp).exp() - 1 - (ref - lp)


# ---- planted: normalizers and accumulation ----
@loop.bug(
    "uneven micro-batches are averaged with equal weight",
    r"seq-mean-token-mean is taken over micro-batches of 3, and the results are averaged",
)
def equal_weight_of_uneven_parts(model, rows):
    parts = micro_batches(rows)
    for part in parts:
        b = collate(part)
        J = mean_of_responses(surrogate(log_probs(model, b), b.old, b.adv), b.mask)
        (-J.mean() / len(parts)).backward()


@loop.bug(
    "the number of responses is rounded down to whole micro-batches",
    r"every weight is (1\.333\d* \(?.*)?(1\.33|4/3)",
)
def rounded_down(model, rows):
    steps = len(rows) // SIZE
    for part in micro_batches(rows):
        b = collate(part)
        J = mean_of_responses(surrogate(log_probs(model, b), b.old, b.adv), b.mask)
        (-J.sum() / (SIZE * steps)).backward()


@loop.bug(
    "a response is divided by the padded width of its micro-batch",
    r"micro-batches of 3 is divided by the slots of the padded responses",
)
def width_of_the_part(model, rows):
    for part in micro_batches(rows):
        b = collate(part)
        J = surrogate(log_probs(model, b), b.old, b.adv) * b.mask
        (-J.mean(1).sum() / len(rows)).backward()


@loop.bug(
    "the KL term is not divided by the number of micro-batches",
    r"^the KL term: .*micro-batches of 3",
    beta=0.04,
)
def kl_of_each_part(model, rows):
    for part in micro_batches(rows):
        b = collate(part)
        lp = log_probs(model, b)
        J = mean_of_responses(surrogate(lp, b.old, b.adv), b.mask).sum() / len(rows)
        kl = mean_of_responses(kl_to(b.ref, lp), b.mask).mean()
        (-J + 0.04 * kl).backward()


@loop.bug(
    "responses that were cut are masked, and still counted",
    r"response 6 does not train",
)
def cut_responses_masked(model, rows):
    for part in micro_batches(rows):
        b = collate(part)
        ended = torch.tensor([float(r.response[-1] == END) for r in part])
        J = mean_of_responses(surrogate(log_probs(model, b), b.old, b.adv), b.mask)
        (-(J * ended).sum() / len(rows)).backward()


# ---- planted: the surrogate and what goes in ----
@loop.bug(
    "the ratio is clipped by its logarithm: exp(clamp(log r, -0.2, 0.2))",
    r"(eps|bound|clip).*(0\.18|0\.22|log)",
    objective="dapo",
    eps_high=0.2,
)
def clipped_in_log_space(model, rows):
    total = sum(sum(r.trains) for r in rows)
    for part in micro_batches(rows):
        b = collate(part)
        log_r = log_probs(model, b) - b.old
        J = torch.minimum(log_r.exp() * b.adv, log_r.clamp(-0.2, 0.2).exp() * b.adv)
        (-(J * b.mask).sum() / total).backward()


@loop.bug(
    "the two clip bounds are exchanged",
    r"bounds are exchanged",
    objective="dapo",
)
def bounds_exchanged(model, rows):
    total = sum(sum(r.trains) for r in rows)
    for part in micro_batches(rows):
        b = collate(part)
        J = surrogate(log_probs(model, b), b.old, b.adv, 1 - 0.28, 1 + 0.2)
        (-(J * b.mask).sum() / total).backward()


@loop.bug(
    "the minimum is taken of the two losses, not the maximum",
    r"maximum",
)
def minimum_of_losses(model, rows):
    for part in micro_batches(rows):
        b = collate(part)
        ratio = (log_probs(model, b) - b.old).exp()
        loss = torch.minimum(-ratio * b.adv, -ratio.clamp(0.8, 1.2) * b.adv)
        (mean_of_responses(loss, b.mask).sum() / len(rows)).backward()


@loop.bug(
    "the dual clip, which is for A < 0, is applied to A > 0",
    r"responses 0, 2, 4, 6 do not train",
    c=3.0,
)
def dual_clip_of_gains(model, rows):
    for part in micro_batches(rows):
        b = collate(part)
        J = surrogate(log_probs(model, b), b.old, b.adv)
        J = torch.where(b.adv > 0, torch.maximum(J, 3.0 * b.adv), J)
        (-mean_of_responses(J, b.mask).sum() / len(rows)).backward()


@loop.bug(
    "the sampler keeps the old log-probabilities in bfloat16",
    r"old log-probabilities .*(bfloat16|rounded)",
)
def old_in_bfloat16(model, rows):
    for part in micro_batches(rows):
        b = collate(part)
        old = b.old.bfloat16().float()
        J = mean_of_responses(surrogate(log_probs(model, b), old, b.adv), b.mask)
        (-J.sum() / len(rows)).backward()


@loop.bug(
    "rows are shuffled, and their old log-probabilities are not",
    r"old log-probabilities are those of other responses",
)
def old_not_shuffled(model, rows):
    order = (5, 2, 7, 0, 6, 1, 4, 3)
    olds = [r.old for r in rows]
    shuffled = [
        replace(rows[i], old=[*olds[k], *[0.0] * 11][: len(rows[i].response)])
        for k, i in enumerate(order)
    ]
    for part in micro_batches(shuffled):
        b = collate(part)
        J = mean_of_responses(surrogate(log_probs(model, b), b.old, b.adv), b.mask)
        (-J.sum() / len(rows)).backward()


@loop.bug(
    "the advantage is discounted by 0.95 for each token before the last one",
    r"discount.*0\.95|0\.95.*discount",
)
def discounted(model, rows):
    for part in micro_batches(rows):
        b = collate(part)
        left = b.there.flip(1).cumsum(1).flip(1) - 1
        A = b.adv * 0.95 ** left.clamp(min=0)
        J = mean_of_responses(surrogate(log_probs(model, b), b.old, A), b.mask)
        (-J.sum() / len(rows)).backward()


# ---- planted: the forward pass ----
@loop.bug(
    "the attention mask is shifted with the labels, one place early",
    r"padding.*attended|attention mask.*(early|shift)|one place",
)
def attention_mask_early(model, rows):
    for part in micro_batches(rows):
        b = collate(part)
        seen = F.pad(b.seen, (0, 1))[:, 1:]
        positions = (b.seen.cumsum(1) - 1).clamp(min=0)
        lp = log_probs(model, b, seen=seen, positions=positions)
        J = mean_of_responses(surrogate(lp, b.old, b.adv), b.mask)
        (-J.sum() / len(rows)).backward()


@loop.bug(
    "the end token is forbidden but at the end, as a minimum length of samplers does",
    r"end token|token 2|without token",
)
def end_token_forbidden(model, rows):
    for part in micro_batches(rows):
        b = collate(part)
        z, y = response_logits(model, b), responses(b)
        forbid = (
            F.one_hot(torch.tensor(END), z.shape[-1]).bool() & (y != END)[..., None]
        )
        z = z.masked_fill(forbid, -1e9)
        lp = z.log_softmax(-1).gather(-1, y[..., None])[..., 0]
        J = mean_of_responses(surrogate(lp, b.old, b.adv), b.mask)
        (-J.sum() / len(rows)).backward()


@loop.bug(
    "prompts are cut to the last five tokens",
    r"prompts are cut to their last 5 tokens",
)
def prompts_cut(model, rows):
    for part in micro_batches([replace(r, prompt=r.prompt[-5:]) for r in rows]):
        b = collate(part)
        J = mean_of_responses(surrogate(log_probs(model, b), b.old, b.adv), b.mask)
        (-J.sum() / len(rows)).backward()


# ---- right ----
@loop.right("positions of padding are 1, and its ids are the end token")
def padding_filled(model, rows):
    for part in micro_batches(rows):
        b = collate(part)
        b.ids = torch.where(b.seen > 0, b.ids, END)
        positions = (b.seen.cumsum(1) - 1).masked_fill(b.seen == 0, 1)
        lp = log_probs(model, b, positions=positions)
        J = mean_of_responses(surrogate(lp, b.old, b.adv), b.mask)
        (-J.sum() / len(rows)).backward()


@loop.right("rows are sorted by length, and all their numbers with them")
def sorted_whole(model, rows):
    for part in micro_batches(sorted(rows, key=lambda r: len(r.ids))):
        b = collate(part)
        J = mean_of_responses(surrogate(log_probs(model, b), b.old, b.adv), b.mask)
        (-J.sum() / len(rows)).backward()


@loop.right("weights are made by hand, and a weighted cross entropy is minimized")
def weighted_cross_entropy(model, rows):
    for part in micro_batches(rows):
        b = collate(part)
        z = response_logits(model, b)
        labels = torch.where(b.mask > 0, responses(b), -100)
        ce = F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none")
        ce = ce.view_as(b.mask)
        r = torch.where(b.mask > 0, (-ce.detach() - b.old).exp(), 0)
        active = torch.where(b.adv > 0, r <= 1.2, r >= 0.8)
        w = b.adv * r * active / b.mask.sum(1, keepdim=True) / len(rows)
        (w * ce).sum().backward()


@loop.right("weights come from a pass without a graph; a second pass pulls them back")
def two_passes(model, rows):
    for part in micro_batches(rows):
        b = collate(part)
        with torch.no_grad():
            first = log_probs(model, b)
        leaf = first.requires_grad_()
        J = mean_of_responses(surrogate(leaf, b.old, b.adv), b.mask).sum() / len(rows)
        (w,) = torch.autograd.grad(-J, leaf)
        for i, r in enumerate(part):
            one = collate([r])
            log_probs(model, one).backward(gradient=w[i : i + 1, : len(r.response)])


@loop.right("each row is fed twice, with half of its weight")
def fed_twice(model, rows):
    for part in micro_batches([r for r in rows for _ in range(2)]):
        b = collate(part)
        J = mean_of_responses(surrogate(log_probs(model, b), b.old, b.adv), b.mask)
        (-J.sum() / (2 * len(rows))).backward()


@loop.right("a copy of the model trains, and hands its gradients over")
def gradients_of_a_copy(model, rows):
    worker = copy.deepcopy(model)
    for part in micro_batches(rows):
        b = collate(part)
        J = mean_of_responses(surrogate(log_probs(worker, b), b.old, b.adv), b.mask)
        (-J.sum() / len(rows)).backward()
    for mine, its in zip(model.parameters(), worker.parameters(), strict=True):
        mine.grad = its.grad.clone()


@loop.right("the KL term is put in by its gradient's weight", beta=0.04)
def kl_by_its_weight(model, rows):
    for part in micro_batches(rows):
        b = collate(part)
        lp = log_probs(model, b)
        slope = (1 - (b.ref - lp.detach()).exp()) * lp
        J = surrogate(lp, b.old, b.adv) - 0.04 * slope
        (-mean_of_responses(J, b.mask).sum() / len(rows)).backward()


@loop.right(
    "a token mean whose count is kept as a running sum, and divided at the end",
    objective="dapo",
)
def divided_at_the_end(model, rows):
    count = 0.0
    for part in micro_batches(rows):
        b = collate(part)
        J = surrogate(log_probs(model, b), b.old, b.adv, 0.8, 1.28) * b.mask
        (-J.sum()).backward()
        count += float(b.mask.sum())
    for p in model.parameters():
        p.grad.div_(count)
