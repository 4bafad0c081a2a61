# SPDX-License-Identifier: Apache-2.0
"""The weight of every token, read off a gradient: g = -Σ_t w_t ∇_θ log π(o_t).

With more parameters than tokens the w_t are determined. The Jacobian [∇_θ log π(o_t)]
has a column for every token, prompts and masked tokens included; its columns are scaled
to norm 1, and its SVD gives the weights and the residual.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.step.forward import Forward
from upref.step.goal import Goal
from upref.step.reference import TorchModel
from upref.step.rows import Padded, Row
from upref.verify.faults import Fault, measured
from upref.verify.finding import Cause

# of the gradient that are read; chosen at random where there are more
COORDINATES = 30_000
# of the head's part, where only that is looked at
HEAD_COORDINATES = 2_000
# how near weights read off a float32 gradient must come, relative to the largest
NEAR = 1e-4
# a weight below this part of what the others foretell is another one
OTHER = 0.1
SMALL = 1e-10  # singular values below this part of the largest are zero


@dataclass(frozen=True)
class TokenWeights:
    """w_t of every token but the first of each row, and how much of the gradient they
    leave unexplained.
    """

    # [S - 1] of each row, nan where the gradient does not determine it
    weights: list[Tensor]
    residual: float  # |g + Σ w ∇log π| / |g|
    extra: Tensor  # coefficients of the columns beside the tokens'


def columns(forward: Forward, at: Tensor) -> Tensor:
    """[∇ log π(o_t)] of every token but the first of each row, those entries of it.

    Args:
        forward: the rows' forward pass.
        at: numbers of entries of the gradient.

    Returns:
        [entries, tokens].
    """
    out = []
    for i, (z, ids) in enumerate(zip(forward.z, forward.ids, strict=True)):
        identity = torch.eye(len(forward.rows[i].ids) - 1, dtype=torch.float64)
        with torch.enable_grad():
            lp = forward.scored(i, 1)
        (dz,) = torch.autograd.grad(
            lp, forward.leaves[i], identity, is_grads_batched=True
        )
        out += [g[:, at] for g in forward.model.of_row(i).pull_each(z, dz, ids)]
    return torch.cat(out).T


def solved(A: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
    """x of A x = y, how far each x_t is determined (its error over the residual's), and
    |A x - y| / |y|.

    Args:
        A: [entries, tokens].
        y: [entries].
    """
    size = A.norm(dim=0)
    live = size > 1e-12 * size.max().clamp(min=1e-300)
    Q, R = torch.linalg.qr(A[:, live] / size[live])  # R is small, and its SVD cheap
    U, S, Vh = torch.linalg.svd(R, full_matrices=False)
    keep = S > SMALL * S[0]
    inverse = (Vh[keep].T / S[keep]) @ U[:, keep].T
    x = torch.zeros(A.shape[1], dtype=A.dtype)
    error = torch.full_like(x, torch.inf)
    x[live] = inverse @ (Q.T @ y) / size[live]
    error[live] = inverse.norm(dim=1) / size[live]
    lost = 1 - (Vh[keep] ** 2).sum(0)  # a part in the null space is not determined
    error[live] = torch.where(lost > 1e-8, torch.inf, error[live])
    rest = (A @ x - y).norm() / y.norm().clamp(min=1e-300)
    return x, error * rest * y.norm(), float(rest)


def read(forward: Forward, g: Tensor, extra: Sequence[Tensor] = ()) -> TokenWeights:
    """The weights that make g of this forward pass. extra: more gradients that may be
    part of it.

    Args:
        forward: the rows' forward pass.
        g: the gradient, [P].
    """
    coordinates = torch.randperm(len(g), generator=torch.Generator().manual_seed(0))[
        :COORDINATES
    ]
    A = torch.cat(
        [columns(forward, coordinates), *(e[coordinates, None] for e in extra)], 1
    )
    tokens = A.shape[1] - len(extra)
    x, error, residual = solved(A, -g[coordinates])
    x = torch.where(
        error > 1e-3 * x[:tokens].abs().max().clamp(min=1e-300), torch.nan, x
    )
    weights = x[:tokens].split([len(r.ids) - 1 for r in forward.rows])
    return TokenWeights([*weights], residual, x[tokens:])


def head_residual(forward: Forward, g: Tensor) -> float:
    """At least so much of the head's part of a gradient is left by any weights of the
    tokens, relative to that part; infinity where the model has no head of its own.

    Args:
        forward: the rows' forward pass.
        g: the gradient, [P].
    """
    model = forward.model
    if not isinstance(model, TorchModel) or not model.head:
        return math.inf
    parts = model.split(g)
    found = torch.cat([parts[n] for n in model.head_names])
    coordinates = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    coordinates = coordinates[:HEAD_COORDINATES]
    out = []
    try:
        for i, z in enumerate(forward.z):
            identity = torch.eye(len(forward.rows[i].ids) - 1, dtype=torch.float64)
            with torch.enable_grad():
                lp = forward.scored(i, 1)
            leaf = forward.leaves[i]
            (dz,) = torch.autograd.grad(lp, leaf, identity, is_grads_batched=True)
            out.append(model.pull_head_each(z, dz)[:, coordinates])
    except (RuntimeError, NotImplementedError, InputError):
        return math.inf
    A = torch.cat(out).T
    if A.shape[0] < 4 * A.shape[1] or not found[coordinates].any() or not A.any():
        return math.inf
    return solved(A, -found[coordinates])[2]


def gradient(forward: Forward, weights: Sequence[Tensor]) -> Tensor:
    """-Σ_t w_t ∇_θ log π(o_t) over every token but the first of each row; nan counts as
    0.

    Args:
        forward: the rows' forward pass.
        weights: of each row, [S - 1].

    Returns:
        [P].
    """
    with torch.enable_grad():
        loss = sum(
            (w.nan_to_num(0) @ forward.scored(i, 1) for i, w in enumerate(weights)),
            torch.zeros(()),
        )
    return forward.by_row(-loss).sum(0)


def constant_between(found: Tensor, expected: Tensor) -> float:
    """The factor that brings half of the weights found, or more, to those expected,
    where one does: the median of their ratios; 1 where no token has both.

    Args:
        found: weights, nan where they are not known, [B, T].
        expected: weights, [B, T].
    """
    found = found.nan_to_num(0).abs()
    expected = expected.abs()
    in_both = (found > NEAR * found.max()) & (expected > NEAR * expected.max())
    return float((expected / found)[in_both].median()) if in_both.any() else 1.0


# ---- what weights show ---------------------------------------------------------------
@dataclass(frozen=True)
class Tokens:
    """Weights that were found on the response tokens, and what each hypothesis starts
    from. Tensors are [B, T], but for `prompts` and `whole`.
    """

    goal: Goal
    rows: Sequence[Row]
    b: Padded
    lp: Tensor
    found: Tensor  # nan where it is not determined
    prompts: list[Tensor]
    expected: Tensor
    plain: Tensor  # lp at temperature 1
    largest: float  # of all weights that were read, prompts included
    tol: float = NEAR
    # factor of each response, where the gradient is one of each; sharper than `found`
    whole: Tensor | None = None

    @property
    def here(self) -> Tensor:
        return self.b.here

    def no_weight(self, found: Tensor) -> Tensor:
        """Which of the weights that were read are 0, for the precision at which the
        largest of them is known.

        Args:
            found: weights of any tokens; nan counts as 0.
        """
        return found.isnan() | (found.abs() <= self.tol * self.largest)

    @property
    def stopped(self) -> Tensor:
        """Which tokens have no weight in the objective, [B, T]."""
        return self.expected.abs() <= self.tol * self.expected.abs().max()

    @property
    def foretold(self) -> Tensor:
        """The expected weights in the size of those that were read, [B, T]: a constant
        factor makes no token another one.
        """
        largest = self.found.nan_to_num(0).abs().max()
        if self.no_weight(largest):  # none of the responses' tokens trains
            largest = torch.tensor(self.largest)
        return self.expected * largest / self.expected.abs().max().clamp(min=1e-300)

    def near(self, x: Tensor, y: Tensor) -> Tensor:
        """Which weights are the same, relative to the largest that was read or is
        expected.

        Args:
            x, y: weights of the same tokens; nan is the same as anything.
        """
        size = max(self.largest, float(self.expected.abs().max()))
        return x.isnan() | y.isnan() | ((x - y).abs() <= self.tol * size)

    def same(self, x: Tensor, y: Tensor) -> bool:
        """Whether all of these weights are the same.

        Args:
            x, y: as for `near`.
        """
        return bool(self.near(x, y).all())

    def rollouts(self) -> Rollouts:
        """The rows as a batch of log-probabilities.

        Where the rows have no old log-probabilities, the current ones are used instead.

        Returns:
            The batch, with its groups where the goal counts by group.
        """
        b = self.b
        group = self.b.group if self.goal.grouped else None
        old = self.lp if b.old is None else b.old
        return Rollouts.unchecked(
            logp=self.lp,
            logp_old=old,
            adv=b.adv,
            mask=b.mask,
            group=group,
            logp_ref=b.ref,
            logp_sampler=b.sampler,
        )


def _top(x: Tensor) -> str:
    """The largest absolute value, in words; NaN counts as 0."""
    return f"up to {float(x.nan_to_num(0).abs().max()):.3g}"


def observed(w: Tokens) -> list[tuple[Cause, str, str]]:
    """(what, expected, found) of everything that can be read without a hypothesis.

    Args:
        w: the weights that were read.
    """
    out = []
    trained = [~w.no_weight(p) for p in w.prompts]
    if n := int(sum(t.sum() for t in trained)):
        what = measured.OBSERVED_PROMPTS_TRAIN.cause(tokens=n)
        out.append((what, "weight 0", _top(torch.cat(w.prompts))))
    masked = w.here & ~w.b.mask
    if n := int((masked & ~w.no_weight(w.found)).sum()):
        out.append(
            (
                measured.OBSERVED_MASKED_TOKENS_TRAIN.cause(
                    tokens=n, masked=int(masked.sum())
                ),
                "weight 0",
                _top(w.found[masked]),
            )
        )
    live = w.b.mask & ~w.stopped & ~w.found.isnan()
    lost = live & w.no_weight(w.found) & (w.found.abs() <= OTHER * w.foretold.abs())
    if lost.any():

        def gone(i: int) -> bool:
            """Whether no weight of the response is left, where that was measured."""
            if w.whole is None:
                return True
            return bool(abs(w.whole[i]) <= 1e-7 * w.whole.abs().max())

        lost_rows = [
            i
            for i in range(len(w.rows))
            if live[i].any() and bool((lost | ~live)[i].all()) and gone(i)
        ]
        if lost_rows:
            what = measured.OBSERVED_RESPONSES_LEFT_OUT.cause(**_named(lost_rows))
            out.append((what, "weights other than 0", "weight 0"))
        lost_tokens = int(lost.sum()) - int(lost[lost_rows].sum())
        if lost_tokens:
            out.append(
                (
                    measured.OBSERVED_TOKENS_LEFT_OUT.cause(tokens=lost_tokens),
                    _top(w.expected[lost]),
                    "weight 0",
                )
            )
    idle = w.b.mask & w.stopped & (w.foretold.abs() <= OTHER * w.found.abs())
    if n := int((idle & ~w.no_weight(w.found)).sum()):
        out.append(
            (
                measured.OBSERVED_STOPPED_TOKENS_TRAIN.cause(tokens=n),
                "weight 0",
                _top(w.found[idle]),
            )
        )
    if (k := factors(w, w.expected)) is not None and not w.same(
        w.found.where(w.b.mask, torch.nan), w.expected
    ):
        shown = ["-" if v.isnan() else f"{v if abs(v) > w.tol else 0:.4g}" for v in k]
        if len(set(shown) - {"-", "0"}) > 1:
            out.append(
                (
                    measured.OBSERVED_FACTORS_OF_RESPONSES.cause(),
                    "1 for every response",
                    " ".join(shown),
                )
            )
    return out


def is_named(fault: Fault[Any], cause: Cause) -> bool:
    """Tell whether a fault is to be tried on a second draw of rows: the cause found on
    the first names it.

    It saves time and decides nothing: a fault that is tried must make the gradient of
    the second draw itself.

    Args:
        fault: the fault.
        cause: what was found on the first draw. It is empty where this is the first,
            and every fault is tried.
    """
    return not cause or not fault.id or fault.id in cause.ids


def left_out(rows: Sequence[int]) -> Cause:
    """The cause that these responses do not train.

    Args:
        rows: numbers of responses.
    """
    return measured.RESPONSES_LEFT_OUT.cause(**_named(rows))


def _named(rows: Sequence[int]) -> dict[str, str]:
    """The subject and the verb of a sentence on what these responses do not."""
    if len(rows) == 1:
        return {"responses": f"response {rows[0]}", "do": "does"}
    return {"responses": f"responses {', '.join(map(str, rows))}", "do": "do"}


def factors(w: Tokens, unit: Tensor) -> Tensor | None:
    """k_i of found = k_i unit on each row, nan where the row does not tell; None where
    there is no such k.

    Args:
        w: the weights that were read.
        unit: weights before aggregation, [B, T].

    Returns:
        [B].
    """
    out = torch.full((len(w.rows),), torch.nan, dtype=torch.float64)
    for i in range(len(w.rows)):
        x = w.found[i]
        y = unit[i]
        use = w.here[i] & ~x.isnan() & ~y.isnan()
        x = x[use]
        y = y[use]
        if not y.any():
            if not w.no_weight(x).all():
                return None
            continue
        k = (x @ y) / (y @ y)
        size = max(w.largest, float((k * y).abs().max()))
        if not ((x - k * y).abs() <= w.tol * size).all():
            return None
        out[i] = k
    return out
