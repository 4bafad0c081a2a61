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
from upref.step.compare.goal import Goal, Statistics
from upref.step.inputs.reference import Model, TorchModel
from upref.step.inputs.rows import Padded, Row, locate

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
        """Run the model where no logits are given, and make `leaves`: copies of the
        logits, [S, V], by which losses are differentiated.
        """
        self.ids = self.ids or [r.ids for r in self.rows]
        self.z = self.z or [self.model.logits(ids) for ids in self.ids]
        self.leaves = [z.detach().clone().requires_grad_() for z in self.z]

    def locate_rows(self, fed: Sequence[list[int]]) -> None:
        """Set `before` and `after`: what stands around the rows in the sequences that a
        trainer fed to its model. Nothing is set unless every row is found.

        Args:
            fed: token ids of each sequence.
        """
        places = [place for row in self.rows if (place := locate(fed, row))]
        if len(places) < len(self.rows):
            return
        self.before = [fed[n][:start] for n, start in places]
        self.after = [
            fed[n][start + len(row.ids) :]
            for (n, start), row in zip(places, self.rows, strict=True)
        ]

    def logits(self, i: int, first: int) -> Tensor:
        """Return the logits that predict row i's tokens from `first` on.

        Args:
            i: the row.
            first: the first token.

        Returns:
            [tokens, V]. A first token with nothing before it is predicted by nothing:
            it gets the logits of position 0.
        """
        return self.model.without_values(self._outputs(i, first))

    def _outputs(self, i: int, first: int) -> Tensor:
        """Return what the model has at the places that predict row i's tokens from `first`
        on: logits, and the value behind them if the model reads values.
        """
        n = len(self.rows[i].ids)
        positions = torch.arange(first, n) + len(self.z[i]) - n - self.shift
        return self.leaves[i][positions.clamp(min=0)]

    def values(self, i: int, first: int) -> Tensor:
        """Return the critic's values at the places that predict row i's tokens from
        `first` on.

        Args:
            i: the row.
            first: the first token.

        Returns:
            [tokens].
        """
        return self._outputs(i, first)[:, -1]

    def scored(self, i: int, first: int) -> Tensor:
        """Compute the log-probabilities of row i's tokens from `first` on.

        Args:
            i: the row.
            first: the first token.

        Returns:
            [n], in nats.
        """
        y = torch.tensor(self.rows[i].ids[first:])
        return (self.score or log_prob)(self.logits(i, first), y, self.temperature)

    def statistics(self) -> Statistics:
        """Compute lp, entropy, squared log-normalizer and value of every response token,
        [B, T], as functions of the leaves.

        Returns:
            They are padded with 0.
        """
        with torch.enable_grad():
            statistics_of_rows: list[tuple[Tensor, ...]] = []
            for i, r in enumerate(self.rows):
                z = self.logits(i, len(r.prompt)) / self.temperature
                lp = self.scored(i, len(r.prompt))
                log_p = z.log_softmax(-1)
                p = log_p.exp()
                H = -(p * torch.where(p > 0, log_p, 0)).sum(-1)
                V = [self.values(i, len(r.prompt))] if self.model.reads_values else []
                statistics_of_rows.append((lp, H, z.logsumexp(-1) ** 2, *V))
            columns = (
                nn.utils.rnn.pad_sequence([*column], batch_first=True)
                for column in zip(*statistics_of_rows, strict=True)
            )
            return Statistics(*columns)

    def lp(self) -> list[Tensor]:
        """Return the log-probabilities of each response's tokens.

        Returns:
            [T] of each response, detached.
        """
        lp = self.statistics().lp.detach()
        return [
            lp_of_row[: len(r.response)]
            for lp_of_row, r in zip(lp, self.rows, strict=True)
        ]

    def _by_logits(self, loss: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient of the loss by each row's logits."""
        with torch.enable_grad():
            return torch.autograd.grad(
                loss,
                self.leaves,
                allow_unused=True,
                retain_graph=True,
                materialize_grads=True,
            )

    def of_head(self, loss: Tensor) -> Tensor | None:
        """Return the entries of `by_row` that are the head's, [B, H]; None where the
        model has no head of its own.

        Args:
            loss: a function of the leaves.
        """
        model = self.model
        if not isinstance(model, TorchModel) or not model.head:
            return None
        rows = zip(self.z, self._by_logits(loss), strict=True)
        try:
            return torch.stack([model.pull_head(z, dz) for z, dz in rows])
        except RuntimeError:  # the logits are made without the head's parameters
            return None

    def by_row(self, loss: Tensor) -> Tensor:
        """Return the part of the loss's gradient that each row brings, [B, P].

        Args:
            loss: a function of the leaves.
        """
        dz_of_rows = self._by_logits(loss)
        size = sum(s.numel() for s in self.model.shapes.values())

        def pull(i: int, z: Tensor, dz: Tensor, ids: list[int]) -> Tensor:
            """Return one row's part, [P], without a backward pass where it is 0."""
            # `Functions` have no shapes, and so no size, before the first `pull`
            if dz.any() or not size:
                return self.model.of_row(i).pull(z, dz, ids)
            return dz.new_zeros(size)

        rows = enumerate(zip(self.z, dz_of_rows, self.ids, strict=True))
        return torch.stack([pull(i, *row) for i, row in rows])


def is_near(found: Tensor, want: Tensor, bound: float) -> bool:
    """Tell whether two tensors differ by at most a part of the norm of the second.

    Args:
        found: any shape.
        want: of the same shape.
        bound: the relative error that is allowed.
    """
    return bool((found - want).norm() <= bound * want.norm())


def reproduces(found: Tensor, want: Tensor, bound: float) -> bool:
    """Tell whether a gradient is the other one up to a constant within 1 % of 1: a
    cause's constant is known to 1e-3 only.

    Args:
        found, want: gradients, [P].
        bound: the relative error that is allowed.
    """
    k = float(found @ want / (found @ found).clamp(min=1e-300))
    return abs(k - 1) < 1e-2 and is_near(k * found, want, bound)


def best_factors(rows: Tensor, g: Tensor) -> tuple[Tensor, float]:
    """Find the factor per row that fits g best, and the part of g that is left.

    Args:
        rows: the gradient of each row, [B, P].
        g: the gradient, [P].

    Returns:
        The factors k, [B], and |g - Σ_i k_i rows_i| / |g|.
    """
    # the normal equations, rows @ rows.T @ k = rows @ g, with rows scaled to norm 1
    gram = rows @ rows.T
    norms = gram.diagonal().clamp(min=1e-300).sqrt()
    k = (
        torch.linalg.pinv(gram / norms / norms[:, None], hermitian=True, rtol=1e-12)
        @ (rows @ g / norms)
        / norms
    )
    return k, float((g - k @ rows).norm() / g.norm())


def clip_norm(g: Tensor, bound: float | None) -> Tensor:
    """Return a gradient, clipped as torch.nn.utils.clip_grad_norm_ does.

    Args:
        g: a gradient, [P].
        bound: of its norm; None: there is none.
    """
    return g if bound is None else g * min(1.0, bound / (float(g.norm()) + 1e-6))


def gradients_by_row(goal: Goal, forward: Forward, b: Padded) -> Tensor:
    """Compute the gradient by row, before any clip of its norm.

    Args:
        goal: the objective with its terms.
        forward: the rows' forward pass.
        b: the rows, padded.

    Returns:
        [B, P].
    """
    return forward.by_row(goal.loss(goal.parts(forward.statistics(), b)))


def changes_across_bounds(
    goal: Goal, forward: Forward, b: Padded, shift: float
) -> list[tuple[int, Tensor]]:
    """Find the tokens whose log r is within `shift` of a clip bound, and what each adds
    to the gradient if it is on the other side of that bound.

    A bound is where dL/dlp falls below its half, or doubles. No smooth weight changes by
    so much within a shift of a few hundredths.

    Args:
        goal: the objective with its numbers.
        forward: the reference's forward pass.
        b: the rows, padded.
        shift: how far rounding moves log r.

    Returns:
        (row, gradient) of each such token, or of each response where the objective
        clips responses.
    """
    statistics = forward.statistics()
    lp = statistics.lp

    def slope(distance: float) -> Tensor:
        """Return dL/dlp of each token, where all lp are moved by this distance."""
        moved_lp = (lp.detach() + distance).requires_grad_()
        loss = goal.loss(goal.parts(statistics._replace(lp=moved_lp), b))
        (dL,) = torch.autograd.grad(
            loss, moved_lp, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return dL

    slope_here = slope(0.0)
    change = torch.zeros_like(slope_here)
    # of several distances at which a slope jumps, the last one is nearest to the bound
    for distance in (shift, shift / 2, shift / 4, shift / 8):
        for slope_there in (slope(-distance), slope(distance)):
            largest = torch.maximum(slope_there.abs(), slope_here.abs())
            jumps = (slope_there - slope_here).abs() > largest / 2
            change = torch.where(jumps, slope_there - slope_here, change)
    by_response = goal.objective.level in REDUCE
    places = change.any(1).nonzero() if by_response else change.nonzero()
    alternatives = []
    for place in map(tuple, places.tolist()):
        row = place[0]
        single_change = torch.zeros_like(change)
        single_change[place] = change[place]
        alternatives.append((row, forward.by_row((single_change * lp).sum())[row]))
    return alternatives


def assign_sides(
    rows: Tensor, alternatives: list[tuple[int, Tensor]], found: Tensor
) -> tuple[Tensor, int]:
    """Put each token that is near a clip bound on the side of the bound that fits the
    step's gradient better.

    Args:
        rows: the gradient of each row, [B, P].
        alternatives: as from `changes_across_bounds`.
        found: the step's gradient, [P].

    Returns:
        The gradient of each row with these sides, and how many tokens change sides.
    """
    if not alternatives or not found.isfinite().all():
        return rows, 0
    columns = torch.stack([rows.sum(0), *(change for _, change in alternatives)], 1)
    # The first coefficient is that of the rows as they are: not 1 after a clip of the
    # norm. A token on the other side has the same coefficient, one on its own side 0.
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
