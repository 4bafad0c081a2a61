# SPDX-License-Identifier: Apache-2.0
"""A trainer as an object: rows are packed into bins by a budget of tokens, without
padding, with a KL term, an entropy bonus, and a temperature that is computed.

All numbers of a bin are [N], one for each of its tokens but the first.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.step.planted.case import Loop
from upref.step import Row

T = 1.25
BUDGET = 40  # tokens of a bin


# ---- the model ----
def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Return x [1, heads, N, D] with rotary positions."""
    half = x.shape[-1] // 2
    frequencies = 50.0 ** -(torch.arange(half) / half)
    angle = (positions[0, :, None] * frequencies).to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat(
        [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1
    )


class Block(nn.Module):
    """Attention and a gated layer, each behind a norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_out = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 48), nn.Linear(width, 48)
        self.down = nn.Linear(48, width, bias=False)

    def forward(self, x: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
        """Return x after attention and the gated layer; allowed: which tokens attend to
        which.
        """
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_in(x)).chunk(3, -1)
        )
        q, k = rotated(q, positions), rotated(k, positions)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm_out(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Ragged(nn.Module):
    """A model of packed rows. segments: the row of each token; tokens attend to those
    of their own row.
    """

    def __init__(self, vocabulary: int = 104, width: int = 32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary)

    def hidden(self, ids, segments=None, positions=None):
        """Return the hidden states behind the last norm, [1, S, width]."""
        if positions is None:
            positions = torch.arange(ids.shape[1])[None]
        segments = torch.zeros_like(ids) if segments is None else segments
        allowed = (segments[:, :, None] == segments[:, None, :]).tril()[:, None]
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, positions, allowed)
        return self.norm(x)

    def forward(self, ids, segments=None, positions=None):
        return self.head(self.hidden(ids, segments, positions))


def ragged():
    """Return the model, with weights of a seed of its own."""
    torch.manual_seed(5)
    return Ragged()


loop = Loop("ragged", ragged, {"objective": "ppo_clip", "temperature": T})


# ---- the trainer ----
class Trainer:
    """A right trainer; what a bug or a variation changes is a method."""

    level = "token"
    low, high = 0.2, 0.2
    entropy_coef, beta = 0.0, 0.0
    inverse_temperature = 0.8  # T is computed from it

    def __init__(self, model: nn.Module):
        self.model = model

    def __call__(self, rows: list[Row]) -> None:
        """Leave the gradient of one step."""
        self.rows = rows
        for part in self.bins(rows):
            self.loss(self.forward(part)).backward()

    def bins(self, rows: list[Row]) -> list[list[Row]]:
        """Return consecutive rows in bins, as many rows as fit into the budget; a
        longer row has a bin of its own.
        """
        out: list[list[Row]] = [[]]
        for row in rows:
            if out[-1] and sum(len(r.ids) for r in [*out[-1], row]) > BUDGET:
                out.append([])
            out[-1].append(row)
        return out

    @property
    def temperature(self) -> float:
        return 1.0 / self.inverse_temperature

    def pack(self, part: list[Row]) -> SimpleNamespace:
        """Return a pack of rows: ids, segments and positions [1, S], and numbers of the
        S - 1 predicted tokens, which are 0 in prompts.
        """

        def flat(values) -> Tensor:
            each = [[0.0] * len(r.prompt) + list(map(float, values(r))) for r in part]
            return torch.tensor([x for row in each for x in row])[1:]

        return SimpleNamespace(
            rows=part,
            ids=torch.tensor([[t for r in part for t in r.ids]]),
            segments=torch.tensor([[i for i, r in enumerate(part) for _ in r.ids]]),
            positions=torch.tensor([[t for r in part for t in range(len(r.ids))]]),
            mask=flat(lambda r: r.trains),
            there=flat(lambda r: [1] * len(r.response)),
            old=flat(lambda r: r.old),
            ref=flat(lambda r: r.ref),
            adv=flat(lambda r: [r.adv] * len(r.response)),
        )

    def logits(self, p: SimpleNamespace) -> Tensor:
        """Return the logits of the predicted tokens over the temperature, [S - 1, V]."""
        z = self.model(p.ids, p.segments, p.positions)[0, :-1]
        return z / self.temperature

    def forward(self, part: list[Row]) -> SimpleNamespace:
        """Return the pack with its log-probabilities and entropies, [S - 1]."""
        p = self.pack(part)
        z = self.logits(p)
        logp = z.log_softmax(-1)
        p.lp = logp.gather(-1, p.ids[0, 1:, None])[:, 0]
        p.entropy = -(logp.exp() * logp).sum(-1)
        return p

    def policy(self, p: SimpleNamespace) -> Tensor:
        """Return the surrogate of each token."""
        ratio = (p.lp - p.old).exp()
        bounded = ratio.clamp(1 - self.low, 1 + self.high)
        return torch.minimum(ratio * p.adv, bounded * p.adv)

    def kl(self, p: SimpleNamespace) -> Tensor:
        """Return k3 of each token."""
        d = p.ref - p.lp
        return d.exp() - 1 - d

    def bonus(self, p: SimpleNamespace) -> Tensor:
        """Return the entropy's part of the sum."""
        return (p.entropy * p.mask).sum() / self.total

    @property
    def total(self) -> int:
        """Tokens of the whole step that train."""
        return sum(sum(r.trains) for r in self.rows)

    def loss(self, p: SimpleNamespace) -> Tensor:
        J = ((self.policy(p) - self.beta * self.kl(p)) * p.mask).sum() / self.total
        return -J - self.entropy_coef * self.bonus(p)


def run(kind):
    """Return a step that lets a new trainer of that kind train."""

    def step(model, rows):
        kind(model)(rows)

    step.__name__ = kind.__name__
    return step


def bug(truth, words, **own):
    """Decorator of a trainer: add its step."""
    return lambda kind: loop.bug(truth, words, **own)(run(kind)) and kind


def right(truth, **own):
    """Decorator of a right trainer: add its step."""
    return lambda kind: loop.right(truth, **own)(run(kind)) and kind


# ---- planted: bins and normalizers ----
@bug(
    "the mean of each bin is weighted by its rows",
    r"token-mean is taken over .*weighted by its responses",
)
class WeightedByRows(Trainer):
    def loss(self, p):
        share = len(p.rows) / len(self.rows)
        return -(self.policy(p) * p.mask).sum() / p.mask.sum() * share


@bug(
    "advantages are centered in each bin once more",
    r"advantages are (centered|normalized) again in .*",
)
class CenteredInEachBin(Trainer):
    def pack(self, part):
        p = super().pack(part)
        p.adv = p.adv - sum(r.adv for r in part) / len(part)
        return p


@bug(
    "the head runs over chunks of 8 tokens, and a rest of a chunk is lost",
    r"tokens .*do not( train)?",
)
class ChunksWithoutTheRest(Trainer):
    def forward(self, part):
        p = super().forward(part)
        p.mask = p.mask * (torch.arange(len(p.mask)) < len(p.mask) // 8 * 8)
        return p


@bug(
    "the norm is clipped before the gradient is divided by the count of tokens",
    r"clip.*(before|then|divided)|(before|then|divided).*clip",
    clip=0.3,
)
class ClippedBeforeDivision(Trainer):
    def __call__(self, rows):
        super().__call__(rows)
        for p in self.model.parameters():
            p.grad *= self.total
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        for p in self.model.parameters():
            p.grad /= self.total


# ---- planted: the terms ----
@bug(
    "the entropy is averaged over prompts as well",
    r"entropy.*prompt|prompt.*entropy",
    entropy_coef=0.02,
)
class EntropyOfPrompts(Trainer):
    entropy_coef = 0.02

    def bonus(self, p):
        own = torch.tensor([t > 0 for r in p.rows for t in range(len(r.ids))])[1:]
        count = sum(len(r.ids) - 1 for r in self.rows)
        return (p.entropy * own).sum() / count


@bug(
    "the entropy is averaged in each bin, and the means are added",
    r"^the entropy bonus: .*micro-batches (\(responses|of 3)",
    entropy_coef=0.02,
)
class EntropyOfEachBin(Trainer):
    entropy_coef = 0.02

    def bonus(self, p):
        return (p.entropy * p.mask).sum() / p.mask.sum()


@bug(
    "the KL term has the estimator k2",
    r"k2",
    beta=0.1,
)
class KlByK2(Trainer):
    beta = 0.1

    def kl(self, p):
        return 0.5 * (p.ref - p.lp) ** 2


@bug(
    "the reference model's log-probabilities are those of the token before",
    r"reference.*one token (too )?late",
    beta=0.1,
)
class ReferenceOneTokenLate(Trainer):
    beta = 0.1

    def pack(self, part):
        p = super().pack(part)
        p.ref = F.pad(p.ref, (1, 0))[:-1]
        return p


# ---- planted: the policy term ----
@bug(
    "GSPO's mean of log-ratios is divided by the length of prompt and response",
    r"divided by .*prompt",
    objective="gspo",
)
class DividedByTheWholeRow(Trainer):
    def loss(self, p):
        """Return GSPO's loss of the responses in one bin, as its share of the mean over
        all rows; the log-ratios are divided by the length of prompt and response.
        """
        out = 0.0
        at = 0
        for r in p.rows:
            here = slice(max(at - 1, 0), at + len(r.ids) - 1)
            at += len(r.ids)
            log_s = ((p.lp - p.old) * p.mask)[here].sum() / len(r.ids)
            s = log_s.exp()
            out = out - torch.minimum(s * r.adv, s.clamp(1 - 3e-4, 1 + 4e-4) * r.adv)
        return out / len(self.rows)


@bug(
    "the gradient flows through CISPO's weight too",
    r"detach|stop-gradient|flows through",
    objective="cispo",
)
class WeightNotDetached(Trainer):
    def policy(self, p):
        return (p.lp - p.old).exp().clamp(max=5.0) * p.adv * p.lp


@bug(
    "advantages are clamped to 3 in absolute value",
    r"advantage.*\b3\b",
)
class ClampedAdvantages(Trainer):
    def pack(self, part):
        p = super().pack(part)
        p.adv = p.adv.clamp(-3, 3)
        return p


SCALE = SimpleNamespace(of_advantages=1.0)


@bug(
    "advantages are divided by a running scale that outlives the step",
    r"different gradients.*(state|keeps)",
)
class RunningScale(Trainer):
    def pack(self, part):
        p = super().pack(part)
        spread = float(torch.tensor([r.adv for r in part]).abs().mean())
        SCALE.of_advantages = 0.9 * SCALE.of_advantages + 0.1 * spread
        p.adv = p.adv / SCALE.of_advantages
        return p


# ---- planted: the forward pass ----
@bug(
    "the temperature is rounded to a whole number",
    r"temperature is left out \(it is 1\)",
)
class RoundedTemperature(Trainer):
    @property
    def temperature(self):
        return round(1.0 / self.inverse_temperature)


@bug(
    "rows of one group attend to each other: the group stands for the row",
    r"rows? .*(one|same|a) (id|group).*attend to each other|group.*attend",
)
class GroupsAttend(Trainer):
    def pack(self, part):
        p = super().pack(part)
        p.segments = torch.tensor([[r.group for r in part for _ in r.ids]])
        return p


@bug(
    "the vocabulary is padded to 128 with logits of 0",
    r"vocabulary is padded|24 (more )?logits|logits of 0",
)
class PaddedVocabulary(Trainer):
    def logits(self, p):
        z = super().logits(p)
        return F.pad(z, (0, 128 - z.shape[1]))


# ---- right ----
@right("rows stand in the pack from the last to the first, a token of 0 between them")
class SeparatedAndReversed(Trainer):
    def bins(self, rows):
        return super().bins(rows[::-1])

    def pack(self, part):
        """Pack rows that each have one more token, 0, which is not trained."""
        empty = [
            Row(
                r.prompt,
                [*r.response, 0],
                [*r.trains, False],
                r.adv,
                old=[*r.old, 0.0],
                ref=[*r.ref, 0.0],
            )
            for r in part
        ]
        return super().pack(empty)


@right("the log-normalizer is made shard by shard of the vocabulary")
class NormalizedByShards(Trainer):
    def forward(self, part):
        p = self.pack(part)
        z = self.logits(p)
        shards = torch.stack([x.logsumexp(-1) for x in z.split(17, -1)])
        top = shards.amax(0).detach()
        whole = (shards - top).exp().sum(0).log() + top
        p.lp = z.gather(-1, p.ids[0, 1:, None])[:, 0] - whole
        p.entropy = torch.zeros_like(p.lp)
        return p


@right(
    "the entropy is the log-normalizer less the mean logit, and k3 is made by expm1",
    entropy_coef=0.02,
    beta=0.1,
)
class EntropyByMeanLogit(Trainer):
    entropy_coef, beta = 0.02, 0.1

    def forward(self, part):
        p = super().forward(part)
        z = self.logits(p)
        p.entropy = z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)
        return p

    def kl(self, p):
        return torch.expm1(p.ref - p.lp) - (p.ref - p.lp)


@right("GSPO by a product with a matrix of means", objective="gspo")
class MeansByMatrix(Trainer):
    def loss(self, p):
        of = p.segments[0, 1:]
        member = F.one_hot(of, len(p.rows)).float().T * p.mask
        s = (member @ (p.lp - p.old) / member.sum(1)).exp()
        A = torch.tensor([r.adv for r in p.rows])
        J = torch.minimum(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A)
        return -J.sum() / len(self.rows)


class Reinforced(torch.autograd.Function):
    """The value of the surrogate, with CISPO's gradient."""

    @staticmethod
    def forward(ctx, lp, old, A):
        w = (lp - old).exp().clamp(max=5.0) * A
        ctx.save_for_backward(w)
        return w

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None, None


@right("CISPO's gradient is a backward pass by hand", objective="cispo")
class CispoByHand(Trainer):
    def policy(self, p):
        return Reinforced.apply(p.lp, p.old, p.adv)


@right("the temperature is in the head's weight and bias, and in no logit")
class TemperatureInHead(Trainer):
    def logits(self, p):
        h = self.model.hidden(p.ids, p.segments, p.positions)[0, :-1]
        head, b = self.model.head, self.inverse_temperature
        return F.linear(h, head.weight * b, head.bias * b)


@right(
    "rewards are made into advantages inside, and a group shares one prompt in the pack",
    objective="grpo",
    group_size=4,
    rewards=[1.0, 0.0, 0.3, 0.9, 0.1, 0.8, 0.2, 0.0],
)
class SharedPrompt(Trainer):
    """Each prompt stands once; all responses of its group attend to it, and not to each
    other.
    """

    def __call__(self, rows):
        for group in sorted({r.group for r in rows}):
            its = [r for r in rows if r.group == group]
            R = torch.tensor([r.reward for r in its])
            A = (R - R.mean()) / R.std()
            self.group_loss(its, A, len(rows)).backward()

    def group_loss(self, rows, A, count):
        """Return the loss of the responses to one prompt, whose prompt is there once;
        all responses attend to it, and not to each other.
        """
        prompt = rows[0].prompt
        lengths = [len(prompt), *(len(r.response) for r in rows)]
        of = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)])
        positions = torch.tensor(
            [*range(len(prompt))]
            + [len(prompt) + t for r in rows for t in range(len(r.response))]
        )
        ids = torch.tensor([prompt + [t for r in rows for t in r.response]])
        allowed = ((of[:, None] == of) | (of == 0)).tril()[None, None]
        x = self.model.embed(ids)
        for block in self.model.blocks:
            x = block(x, positions[None], allowed)
        z = self.model.head(self.model.norm(x))[0] / self.temperature
        logp, loss, at = z.log_softmax(-1), 0.0, len(prompt)
        for r, a in zip(rows, A, strict=True):
            n = len(r.response)
            before = torch.tensor([len(prompt) - 1, *range(at, at + n - 1)])
            at += n
            lp = logp[before, torch.tensor(r.response)]
            p = SimpleNamespace(lp=lp, old=torch.tensor(r.old), adv=a)
            mask = torch.tensor(r.trains).float()
            loss = loss - (self.policy(p) * mask).sum() / mask.sum() / count
        return loss
