# SPDX-License-Identifier: Apache-2.0
"""The weight of every token, read off a gradient: g = -Σ_t w_t ∇_θ log π(o_t).

With more parameters than tokens the w_t are determined. The Jacobian [∇_θ log π(o_t)]
has a column for every token, prompts and masked tokens included; its columns are scaled
to norm 1, and its SVD gives the weights and the residual.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.step.compare.forward import Forward
from upref.step.compare.goal import Goal
from upref.step.inputs.reference import TorchModel
from upref.step.inputs.rows import Padded, Row
from upref.verify.faults import Fault, measured
from upref.verify.finding import Cause

# entries of the gradient that are read; chosen at random where there are more
COORDINATES = 30_000
# the same where only the head's part of the gradient is read
HEAD_COORDINATES = 2_000
# Two weights that were read off a float32 gradient are the same if they differ by less,
# relative to the largest weight.
WEIGHT_TOLERANCE = 1e-4
# A token is lost if its weight is below this part of the expected one. It trains though
# it should not if the expected weight is below this part of its own.
LOST_SHARE = 0.1
SINGULAR_TOLERANCE = 1e-10  # singular values below this part of the largest are zero


@dataclass(frozen=True)
class TokenWeights:
    """w_t of every token but the first of each row, and how much of the gradient they
    leave unexplained.
    """

    # [S - 1] of each row, nan where the gradient does not determine it
    weights: list[Tensor]
    residual: float  # |g + Σ w ∇log π| / |g|
    extra: Tensor  # coefficients of the columns beside the tokens'


def log_prob_gradients(forward: Forward, entries: Tensor) -> Tensor:
    """Return ∇ log π(o_t) of every token but the first of each row.

    Args:
        forward: the rows' forward pass.
        entries: the entries of the gradients that are returned, by their numbers.

    Returns:
        [entries, tokens].
    """
    columns = []
    for i, (z, ids) in enumerate(zip(forward.z, forward.ids, strict=True)):
        identity = torch.eye(len(forward.rows[i].ids) - 1, dtype=torch.float64)
        with torch.enable_grad():
            lp = forward.scored(i, 1)
        (dz,) = torch.autograd.grad(
            lp, forward.leaves[i], identity, is_grads_batched=True
        )
        columns += [
            g[:, entries] for g in forward.model.of_row(i).pull_each(z, dz, ids)
        ]
    return torch.cat(columns).T


def solve_least_squares(A: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
    """Solve A x = y by least squares.

    Args:
        A: [entries, tokens].
        y: [entries].

    Returns:
        x, [tokens]; the error of each x_t, infinite where A does not determine it; and
        the residual |A x - y| / |y|.
    """
    norms = A.norm(dim=0)
    has_gradient = norms > 1e-12 * norms.max().clamp(min=1e-300)
    # R is small, and its SVD cheap
    Q, R = torch.linalg.qr(A[:, has_gradient] / norms[has_gradient])
    U, S, Vh = torch.linalg.svd(R, full_matrices=False)
    is_kept = S > SINGULAR_TOLERANCE * S[0]
    inverse = (Vh[is_kept].T / S[is_kept]) @ U[:, is_kept].T
    x = torch.zeros(A.shape[1], dtype=A.dtype)
    error = torch.full_like(x, torch.inf)
    x[has_gradient] = inverse @ (Q.T @ y) / norms[has_gradient]
    error[has_gradient] = inverse.norm(dim=1) / norms[has_gradient]
    # A does not determine an x_t that has a part in its null space
    null_space_share = 1 - (Vh[is_kept] ** 2).sum(0)
    is_undetermined = null_space_share > 1e-8
    error[has_gradient] = torch.where(is_undetermined, torch.inf, error[has_gradient])
    residual = (A @ x - y).norm() / y.norm().clamp(min=1e-300)
    return x, error * residual * y.norm(), float(residual)


def read_weights(
    forward: Forward, gradient: Tensor, extra: Sequence[Tensor] = ()
) -> TokenWeights:
    """Read the token weights that give a gradient with this forward pass.

    Args:
        forward: the rows' forward pass.
        gradient: the gradient, [P].
        extra: further gradients, [P] each, of which multiples may be part of it.
    """
    generator = torch.Generator().manual_seed(0)
    coordinates = torch.randperm(len(gradient), generator=generator)[:COORDINATES]
    A = torch.cat(
        [
            log_prob_gradients(forward, coordinates),
            *(column[coordinates, None] for column in extra),
        ],
        1,
    )
    tokens = A.shape[1] - len(extra)
    solution, error, residual = solve_least_squares(A, -gradient[coordinates])
    largest = solution[:tokens].abs().max().clamp(min=1e-300)
    solution = torch.where(error > 1e-3 * largest, torch.nan, solution)
    weights = solution[:tokens].split([len(r.ids) - 1 for r in forward.rows])
    return TokenWeights([*weights], residual, solution[tokens:])


def head_residual(forward: Forward, gradient: Tensor) -> float:
    """Return the part of the head's gradient that the best token weights leave, relative
    to that gradient; infinity where this cannot be measured, as without a head.

    Args:
        forward: the rows' forward pass.
        gradient: the gradient, [P].
    """
    model = forward.model
    if not isinstance(model, TorchModel) or not model.head:
        return math.inf
    parts = model.split(gradient)
    found = torch.cat([parts[n] for n in model.head_names])
    coordinates = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    coordinates = coordinates[:HEAD_COORDINATES]
    columns = []
    try:
        for i, z in enumerate(forward.z):
            identity = torch.eye(len(forward.rows[i].ids) - 1, dtype=torch.float64)
            with torch.enable_grad():
                lp = forward.scored(i, 1)
            leaf = forward.leaves[i]
            (dz,) = torch.autograd.grad(lp, leaf, identity, is_grads_batched=True)
            columns.append(model.pull_head_each(z, dz)[:, coordinates])
    except (RuntimeError, InputError):
        return math.inf
    A = torch.cat(columns).T
    # so few entries leave a small part whatever the weights are
    if A.shape[0] < 4 * A.shape[1] or not found[coordinates].any() or not A.any():
        return math.inf
    return solve_least_squares(A, -found[coordinates])[2]


def gradient_of_weights(forward: Forward, weights: Sequence[Tensor]) -> Tensor:
    """Return -Σ_t w_t ∇_θ log π(o_t) over every token but the first of each row.

    Args:
        forward: the rows' forward pass.
        weights: of each row, [S - 1]; nan counts as 0.

    Returns:
        [P].
    """
    with torch.enable_grad():
        loss = torch.zeros(())
        for i, row_weights in enumerate(weights):
            loss = loss + row_weights.nan_to_num(0) @ forward.scored(i, 1)
    return forward.by_row(-loss).sum(0)


def constant_between(found: Tensor, expected: Tensor) -> float:
    """Return the median of expected over found weights; 1 where no token has both.

    Where one factor brings at least half of the weights to the expected ones, the median
    is that factor.

    Args:
        found: weights, nan where they are not known, [B, T].
        expected: weights, [B, T].
    """
    found = found.nan_to_num(0).abs()
    expected = expected.abs()
    in_both = (found > WEIGHT_TOLERANCE * found.max()) & (
        expected > WEIGHT_TOLERANCE * expected.max()
    )
    return float((expected / found)[in_both].median()) if in_both.any() else 1.0


# ---- what weights show ---------------------------------------------------------------
@dataclass(frozen=True)
class Tokens:
    """Weights that were found on the response tokens, and the numbers that a fault
    changes. Tensors are [B, T], but for `prompts` and `row_factors`.
    """

    goal: Goal
    rows: Sequence[Row]
    padded: Padded
    lp: Tensor
    found: Tensor  # nan where it is not determined
    prompts: list[Tensor]
    expected: Tensor
    lp_at_temperature_1: Tensor
    largest: float  # of all weights that were read, prompts included
    tol: float = WEIGHT_TOLERANCE
    # The factor of each response, where the gradient is that of responses with factors:
    # it is known more exactly than the weights of tokens in `found`.
    row_factors: Tensor | None = None

    @property
    def is_token(self) -> Tensor:
        """Which slots hold a token, [B, T]."""
        return self.padded.is_token

    def has_no_weight(self, found: Tensor) -> Tensor:
        """Tell which weights that were read are 0, to the precision at which the largest
        of them is known.

        Args:
            found: weights of any tokens; nan counts as 0.
        """
        return found.isnan() | (found.abs() <= self.tol * self.largest)

    @property
    def is_stopped(self) -> Tensor:
        """Which tokens have no weight in the objective, [B, T]."""
        return self.expected.abs() <= self.tol * self.expected.abs().max()

    @property
    def rescaled_expected(self) -> Tensor:
        """The expected weights, multiplied so that the largest is as large as the
        largest that was read, [B, T]: a constant factor of all weights is no fault of
        single tokens.
        """
        largest = self.found.nan_to_num(0).abs().max()
        if self.has_no_weight(largest):  # none of the responses' tokens trains
            largest = torch.tensor(self.largest)
        return self.expected * largest / self.expected.abs().max().clamp(min=1e-300)

    def near(self, x: Tensor, y: Tensor) -> Tensor:
        """Tell which weights are the same, relative to the largest that was read or is
        expected.

        Args:
            x, y: weights of the same tokens; nan is the same as anything.
        """
        largest = max(self.largest, float(self.expected.abs().max()))
        return x.isnan() | y.isnan() | ((x - y).abs() <= self.tol * largest)

    def same(self, x: Tensor, y: Tensor) -> bool:
        """Tell whether all of these weights are the same.

        Args:
            x, y: as for `near`.
        """
        return bool(self.near(x, y).all())

    def rollouts(self) -> Rollouts:
        """Return the rows as a batch of log-probabilities.

        Where the rows have no old log-probabilities, the current ones are used instead.

        Returns:
            The batch, with its groups where the goal counts by group.
        """
        padded = self.padded
        group = self.padded.group if self.goal.grouped else None
        old = self.lp if padded.old is None else padded.old
        return Rollouts.unchecked(
            logp=self.lp,
            logp_old=old,
            adv=padded.adv,
            mask=padded.mask,
            group=group,
            logp_ref=padded.ref,
            logp_sampler=padded.sampler,
        )


def _largest_words(weights: Tensor) -> str:
    """Return the largest absolute value, in words; NaN counts as 0."""
    return f"up to {float(weights.nan_to_num(0).abs().max()):.3g}"


# what differs, what was expected, and what was found, in words
Observation = tuple[Cause, str, str]


def observe_weights(tokens: Tokens) -> list[Observation]:
    """List what the weights show by themselves, whatever the fault is.

    Args:
        tokens: the weights that were read.

    Returns:
        What differs, what was expected, and what was found, in words.
    """
    return [
        *_observe_prompts(tokens),
        *_observe_masked_tokens(tokens),
        *_observe_lost_tokens(tokens),
        *_observe_stopped_tokens(tokens),
        *_observe_factors_of_responses(tokens),
    ]


def _observe_prompts(tokens: Tokens) -> Iterator[Observation]:
    """Yield that tokens of prompts train, if they do."""
    trained = [~tokens.has_no_weight(prompt) for prompt in tokens.prompts]
    if count := int(sum(trains.sum() for trains in trained)):
        what = measured.OBSERVED_PROMPTS_TRAIN.cause(tokens=count)
        yield what, "weight 0", _largest_words(torch.cat(tokens.prompts))


def _observe_masked_tokens(tokens: Tokens) -> Iterator[Observation]:
    """Yield that masked tokens train, if they do."""
    masked = tokens.is_token & ~tokens.padded.mask
    if count := int((masked & ~tokens.has_no_weight(tokens.found)).sum()):
        what = measured.OBSERVED_MASKED_TOKENS_TRAIN.cause(
            tokens=count, masked=int(masked.sum())
        )
        yield what, "weight 0", _largest_words(tokens.found[masked])


def _observe_lost_tokens(tokens: Tokens) -> Iterator[Observation]:
    """Yield that responses do not train, and that further tokens do not, if they
    should.
    """
    should_train = tokens.padded.mask & ~tokens.is_stopped & ~tokens.found.isnan()
    far_below = tokens.found.abs() <= LOST_SHARE * tokens.rescaled_expected.abs()
    is_lost = should_train & tokens.has_no_weight(tokens.found) & far_below
    if not is_lost.any():
        return

    def is_response_lost(i: int) -> bool:
        """Tell whether the whole response is lost. Where the factor of the response was
        measured, it decides: it is known more exactly than the tokens' weights.
        """
        if not should_train[i].any() or not is_lost[i][should_train[i]].all():
            return False
        if tokens.row_factors is None:
            return True
        least = 1e-7 * tokens.row_factors.abs().max()
        return bool(abs(tokens.row_factors[i]) <= least)

    lost_rows = [i for i in range(len(tokens.rows)) if is_response_lost(i)]
    if lost_rows:
        what = measured.OBSERVED_RESPONSES_LEFT_OUT.cause(
            **_subject_and_verb(lost_rows)
        )
        yield what, "weights other than 0", "weight 0"
    lost_tokens = int(is_lost.sum()) - int(is_lost[lost_rows].sum())
    if lost_tokens:
        what = measured.OBSERVED_TOKENS_LEFT_OUT.cause(tokens=lost_tokens)
        yield what, _largest_words(tokens.expected[is_lost]), "weight 0"


def _observe_stopped_tokens(tokens: Tokens) -> Iterator[Observation]:
    """Yield that tokens train that the clip should stop, if they do."""
    should_stop = tokens.padded.mask & tokens.is_stopped
    far_above = tokens.rescaled_expected.abs() <= LOST_SHARE * tokens.found.abs()
    trains_though_stopped = should_stop & far_above
    if count := int(
        (trains_though_stopped & ~tokens.has_no_weight(tokens.found)).sum()
    ):
        what = measured.OBSERVED_STOPPED_TOKENS_TRAIN.cause(tokens=count)
        yield what, "weight 0", _largest_words(tokens.found[trains_though_stopped])


def _observe_factors_of_responses(tokens: Tokens) -> Iterator[Observation]:
    """Yield the factor of each response, if the weights are right up to several such
    factors.
    """
    row_factors = factors_of_rows(tokens, tokens.expected)
    found_in_mask = tokens.found.where(tokens.padded.mask, torch.nan)
    if row_factors is None or tokens.same(found_in_mask, tokens.expected):
        return
    shown = []
    for factor in row_factors.tolist():
        rounded = factor if abs(factor) > tokens.tol else 0
        shown.append("-" if math.isnan(factor) else f"{rounded:.4g}")
    if len(set(shown) - {"-", "0"}) > 1:
        what = measured.OBSERVED_FACTORS_OF_RESPONSES.cause()
        yield what, "1 for every response", " ".join(shown)


def is_named(fault: Fault[Any], cause: Cause) -> bool:
    """Tell whether a fault is to be tried on a second draw of rows: the cause that was
    found on the first draw names it.

    It saves time and decides nothing: a fault that is tried must make the gradient of
    the second draw itself.

    Args:
        fault: the fault.
        cause: what was found on the first draw. On the first draw itself it is empty,
            and every fault is tried.
    """
    return not cause or not fault.id or fault.id in cause.ids


def left_out_cause(rows: Sequence[int]) -> Cause:
    """Return the cause that these responses do not train.

    Args:
        rows: numbers of responses.
    """
    return measured.RESPONSES_LEFT_OUT.cause(**_subject_and_verb(rows))


def _subject_and_verb(rows: Sequence[int]) -> dict[str, str]:
    """Return the subject and the verb of the sentence that these responses do not
    train.
    """
    if len(rows) == 1:
        return {"responses": f"response {rows[0]}", "do": "does"}
    return {"responses": f"responses {', '.join(map(str, rows))}", "do": "do"}


def factors_of_rows(tokens: Tokens, weights: Tensor) -> Tensor | None:
    """Return the factor of each response by which weights become those that were found.

    Args:
        tokens: the weights that were read.
        weights: weights before aggregation, [B, T].

    Returns:
        [B], nan where all weights of a response are 0; None where a response has no
        such factor.
    """
    factors = torch.full((len(tokens.rows),), torch.nan, dtype=torch.float64)
    for i in range(len(tokens.rows)):
        found = tokens.found[i]
        expected = weights[i]
        is_known = tokens.is_token[i] & ~found.isnan() & ~expected.isnan()
        found = found[is_known]
        expected = expected[is_known]
        if not expected.any():
            if not tokens.has_no_weight(found).all():
                return None
            continue
        factor = (found @ expected) / (expected @ expected)
        largest = max(tokens.largest, float((factor * expected).abs().max()))
        if not ((found - factor * expected).abs() <= tokens.tol * largest).all():
            return None
        factors[i] = factor
    return factors
