# SPDX-License-Identifier: Apache-2.0
"""The gradient that a step should have: one row at a time, float64, eager attention, no
padding, no dropout, no cache.

    lp_t = log softmax(z_{t-1} / T)[o_t],    g = -∇_θ { J(lp) + c_H H - c_z Z }

with J the registered objective over the counts of the whole step, H the entropy bonus,
Z the z-loss. Where rounding may move a ratio over a clip bound, the gradient on either
side of the bound is right: `sides`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from upref.registry import REDUCE
from upref.step.goal import Goal
from upref.step.reference import Model, TorchModel
from upref.step.rows import Padded, Row, locate

# a gradient in float32 is one of these log-probabilities if they leave no more of it
MAX_RESIDUAL = 5e-5


def log_prob(z: Tensor, y: Tensor, temperature: float) -> Tensor:
    """Return the log-probability of each token at a temperature.

    Args:
        z: logits, [T, V].
        y: the tokens, [T].
        temperature: what logits are divided by.

    Returns:
        [T], in nats.
    """
    return (z / temperature).log_softmax(-1).gather(1, y[:, None])[:, 0]


@dataclass
class Forward:
    """All rows through the model: logits at the positions that predict response tokens,
    and what follows from them.
    """

    model: Model
    rows: Sequence[Row]
    temperature: float
    # [S, V], attached; S may count tokens in front of the row's own
    z: list[Tensor] = field(default_factory=list)
    shift: int = 1  # how far the logits stand before the token that they predict
    # logits, labels, temperature -> log-probabilities
    score: Callable[[Tensor, Tensor, float], Tensor] | None = None
    ids: list[list[int]] = field(default_factory=list)  # that the logits are of
    # what was fed in front of each row, if known
    before: list[list[int]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)  # and what behind it

    def __post_init__(self) -> None:
        self.ids = self.ids or [r.ids for r in self.rows]
        self.z = self.z or [self.model.logits(ids) for ids in self.ids]
        self.leaves = [z.detach().clone().requires_grad_() for z in self.z]

    def locate_rows(self, fed: Sequence[list[int]]) -> None:
        """Note what stands around the rows in the sequences that a trainer fed to its
        model.

        Args:
            fed: token ids of each sequence.
        """
        placed = [(p, r) for r in self.rows if (p := locate(fed, r))]
        if len(placed) == len(self.rows):
            self.before = [fed[n][:start] for (n, start), _ in placed]
            self.after = [fed[n][start + len(r.ids) :] for (n, start), r in placed]

    def logits(self, i: int, first: int) -> Tensor:
        """Return the logits that predict row i's tokens from `first` on.

        Args:
            i: the row.
            first: the first token.

        Returns:
            [tokens, V]. A first token with nothing before it is predicted by nothing:
            it gets the logits of position 0.
        """
        n = len(self.rows[i].ids)
        positions = torch.arange(first, n) + len(self.z[i]) - n - self.shift
        return self.leaves[i][positions.clamp(min=0)]

    def scored(self, i: int, first: int) -> Tensor:
        """Log-probabilities of row i's tokens from `first` on.

        Args:
            i: the row.
            first: the first token.

        Returns:
            [n], in nats.
        """
        y = torch.tensor(self.rows[i].ids[first:])
        return (self.score or log_prob)(self.logits(i, first), y, self.temperature)

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """lp, entropy and squared log-normalizer of every response token, [B, T],
        functions of the leaves.

        Returns:
            (lp, H, Z), padded with 0; Z is (log Σ exp z)².
        """
        with torch.enable_grad():
            found: list[tuple[Tensor, ...]] = []
            for i, r in enumerate(self.rows):
                x = self.logits(i, len(r.prompt)) / self.temperature
                lp = self.scored(i, len(r.prompt))
                logp = x.log_softmax(-1)
                p = logp.exp()
                H = -(p * torch.where(p > 0, logp, 0)).sum(-1)
                found.append((lp, H, x.logsumexp(-1) ** 2))
            lp, H, Z = (
                nn.utils.rnn.pad_sequence([*each], batch_first=True)
                for each in zip(*found, strict=True)
            )
            return lp, H, Z

    def lp(self) -> list[Tensor]:
        """Log-probabilities of each response's tokens.

        Returns:
            [T] of each response, detached.
        """
        lp = self.statistics()[0].detach()
        return [x[: len(r.response)] for x, r in zip(lp, self.rows, strict=True)]

    def _by_logits(self, loss: Tensor) -> tuple[Tensor, ...]:
        """The gradient of the loss by each row's logits."""
        with torch.enable_grad():
            return torch.autograd.grad(
                loss,
                self.leaves,
                allow_unused=True,
                retain_graph=True,
                materialize_grads=True,
            )

    def of_head(self, loss: Tensor) -> Tensor | None:
        """[B, H]: the entries of `by_row` that are the head's; None where the model has
        no head of its own.

        Args:
            loss: a function of the leaves.
        """
        model = self.model
        if not isinstance(model, TorchModel) or not model.head:
            return None
        each = zip(self.z, self._by_logits(loss), strict=True)
        try:
            return torch.stack([model.pull_head(z, d) for z, d in each])
        except RuntimeError:  # the logits are made without the head's parameters
            return None

    def by_row(self, loss: Tensor) -> Tensor:
        """[B, P]: the part of the loss's gradient that each row brings.

        Args:
            loss: a function of the leaves.
        """
        dz = self._by_logits(loss)
        size = sum(s.numel() for s in self.model.shapes.values())

        def pull(i: int, z: Tensor, d: Tensor, ids: list[int]) -> Tensor:
            """[P]: one row's part, without a backward pass where it is 0."""
            if d.any() or not size:
                return self.model.of_row(i).pull(z, d, ids)
            return d.new_zeros(size)

        each = enumerate(zip(self.z, dz, self.ids, strict=True))
        return torch.stack([pull(i, *row) for i, row in each])


def is_near(found: Tensor, want: Tensor, bound: float) -> bool:
    """Tell whether two tensors differ by at most a part of the norm of the second.

    Args:
        found: any shape.
        want: of the same shape.
        bound: the relative error that is allowed.
    """
    return bool((found - want).norm() <= bound * want.norm())


def reproduces(found: Tensor, want: Tensor, bound: float) -> bool:
    """Whether it is the other gradient up to one constant near 1, which was read off to
    1e-3.

    Args:
        found, want: gradients, [P].
        bound: the relative error that is allowed.
    """
    k = float(found @ want / (found @ found).clamp(min=1e-300))
    return abs(k - 1) < 1e-2 and is_near(k * found, want, bound)


def best_factors(rows: Tensor, g: Tensor) -> tuple[Tensor, float]:
    """The factor per row that fits g best, and the relative residual.

    Args:
        rows: the gradient of each row, [B, P].
        g: the gradient, [P].

    Returns:
        [B], and a number.
    """
    G = rows @ rows.T
    y = rows @ g
    scale = G.diagonal().clamp(min=1e-300).sqrt()
    k = (
        torch.linalg.pinv(G / scale / scale[:, None], hermitian=True, rtol=1e-12)
        @ (y / scale)
        / scale
    )
    return k, float((g - k @ rows).norm() / g.norm())


def clip_norm(g: Tensor, bound: float | None) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_ leaves it.

    Args:
        g: a gradient, [P].
        bound: of its norm; None: there is none.
    """
    return g if bound is None else g * min(1.0, bound / (float(g.norm()) + 1e-6))


def gradients_by_row(goal: Goal, forward: Forward, b: Padded) -> Tensor:
    """The gradient by row, before any clip of its norm.

    Args:
        goal: the objective with its terms.
        forward: the rows' forward pass.
        b: the rows, padded.

    Returns:
        [B, P].
    """
    return forward.by_row(goal.loss(goal.parts(*forward.statistics(), b)))


def changes_across_bounds(
    goal: Goal, forward: Forward, b: Padded, shift: float
) -> list[tuple[int, Tensor]]:
    """What each token within `shift` of a clip bound, in log r, adds to the gradient on
    the bound's other side.

    A bound is where dL/dlp more than halves: within a shift of a few hundredths no
    smooth weight does.

    Args:
        goal: the objective with its numbers.
        forward: the reference's forward pass.
        b: the rows, padded.
        shift: how far rounding moves log r.

    Returns:
        (row, gradient) of each such token, or of each response where the objective
        clips responses.
    """
    lp, H, Z = forward.statistics()

    def slope(by: float) -> Tensor:
        x = (lp.detach() + by).requires_grad_()
        loss = goal.loss(goal.parts(x, H, Z, b))
        (g,) = torch.autograd.grad(
            loss, x, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return g

    slope_at_0 = slope(0.0)
    change = torch.zeros_like(slope_at_0)
    # the last one that jumps is nearest to the bound
    for by in (shift, shift / 2, shift / 4, shift / 8):
        for to in (slope(-by), slope(by)):
            change = torch.where(
                (to - slope_at_0).abs() > torch.maximum(to.abs(), slope_at_0.abs()) / 2,
                to - slope_at_0,
                change,
            )
    by_response = goal.objective.level in REDUCE
    places = change.any(1).nonzero() if by_response else change.nonzero()
    out = []
    for place in map(tuple, places.tolist()):
        single_change = torch.zeros_like(change)
        single_change[place] = change[place]
        out.append((place[0], forward.by_row((single_change * lp).sum())[place[0]]))
    return out


def assign_sides(
    rows: Tensor, alternatives: list[tuple[int, Tensor]], found: Tensor
) -> tuple[Tensor, int]:
    """The rows' gradients with each of `near` on the side that fits found better, and
    how many change sides.

    Args:
        rows: the gradient of each row, [B, P].
        near: as of `sides`.
        found: the step's gradient, [P].
    """
    if not alternatives or not found.isfinite().all():
        return rows, 0
    columns = torch.stack([rows.sum(0), *(change for _, change in alternatives)], 1)
    # x_0: a clip of the norm
    coefficients = torch.linalg.lstsq(columns, found[:, None], driver="gelsd").solution[
        :, 0
    ]
    crossed = [
        alternative
        for alternative, is_crossed in zip(
            alternatives, (coefficients[1:] > coefficients[0] / 2).tolist(), strict=True
        )
        if is_crossed and coefficients[0] > 0
    ]
    rows = rows.clone()
    for i, change in crossed:
        rows[i] += change
    return rows, len(crossed)
