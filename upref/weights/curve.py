# SPDX-License-Identifier: Apache-2.0
"""The gradient weight of a token by itself, w(r, A, mu) = dJ/dlp, of anything, with its
jumps.

It is the weight of a response of one token, alone in its batch, where the token's, the
sequence's and the trajectory's ratio are one number: `words_for_one_token` says so of a
weight that depends on the other tokens of its response. The rule for mu = π_old(o_t): mu r
= π_θ(o_t) <= 1 always. A curve that reads mu stays at r = 1/mu from there on; any other
is asked about a token of low probability (`low_probability`), whatever mu is given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from upref import user_code as losses
from upref.description import RATIO_SYMBOLS, RATIOS_OF_RESPONSES
from upref.errors import InputError
from upref.registry import REDUCE, Objective, get
from upref.rollouts import Rollouts
from upref.user_code.guard import state_restored
from upref.weights import black_box
from upref.weights.black_box import (
    AT_ONCE,
    MIDDLE_LOG_R,
    in_parts,
    low_probability,
    single_token_batch,
)
from upref.weights.jumps import GRID, Jump, JumpTable, find_jumps

RTOL_RATIO = 1e-12  # ratios of a smaller relative distance count as one
# the same of a loss that computes in float32, for ratios and for weights
SINGLE_RTOL_RATIO = 1e-5
SINGLE_FLOOR = 1e-4
ROWS = 512  # pairs (A, mu) scanned at a time
# advantages and π_old of the tokens with which a loss is measured; a Cap map has any mu
ADVANTAGES = (1.0, -1.0, 0.5, -2.0)
MUS = (1e-6, 1e-3, 0.3, 0.9, 0.99)


Numbers: TypeAlias = float | np.ndarray


@dataclass(frozen=True)
class Curve:
    """w(r, A, mu): call it on arrays that broadcast. `make_curve` makes it of a loss or an
    objective.
    """

    name: str
    # of (r, A, mu), arrays that broadcast, with mu r <= 1
    weight: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] = field(
        repr=False
    )
    reads_mu: bool
    level: str = "token"
    settings: dict[str, Any] = field(default_factory=dict)  # the hyperparameters
    # a token's weight depends on the others of its batch, so each is measured alone
    batch_coupled: bool = False
    # the weight depends on the other tokens of its response; `make_curve` finds out
    reads_others: bool = False
    rtol_ratio: float = RTOL_RATIO  # ratios of a smaller relative distance count as one
    floor: float = 1e-6  # weights of a smaller relative distance count as one

    def __call__(self, r: Numbers, A: Numbers, mu: Numbers | None = None) -> np.ndarray:
        """Return dJ/dlp in float64, in the shape to which r, A and mu broadcast.

        A ratio above 1/mu, which no probability has, counts as 1/mu. Without mu, or
        where the weight does not read it, mu is `low_probability(r)`.

        Raises:
            InputError: a loss has no finite gradient.
        """
        r = np.asarray(r, dtype=float)
        A = np.asarray(A, dtype=float)
        with np.errstate(all="ignore"):
            if self.reads_mu and mu is not None:
                mu = np.asarray(mu, dtype=float)
            else:
                mu = low_probability(r)
            possible_r = np.minimum(r, 1 / mu)  # mu r is a probability
            return self.weight(possible_r, A, mu)

    def jumps(
        self, A: float, mu: float | None = None, r: np.ndarray = GRID
    ) -> list[Jump]:
        """Find all jumps between the first and the last of the ratios r, ascending.

        The distance of two ratios is cut into 16 parts (by default of 0.15 % of r in
        1e-3..1e3, less near 1). A jump shows if it is more than a quarter of the whole
        change of the weight in these parts. Two jumps between the same two ratios may be
        missed if they undo each other. A weight that fades has no end.

        Args:
            A: the advantage.
            mu: π_old, where the weight depends on it.
            r: ratios, ascending.

        Returns:
            The jumps, each with the weight on both sides.
        """
        return self.all_jumps([A], None if mu is None else [mu], r)[0]

    def all_jumps(self, A: Any, mu: Any, r: np.ndarray) -> list[list[Jump]]:
        """Find the jumps of the weight for each of several A and mu.

        Args:
            A: advantages.
            mu: π_old, of as many; None as for `__call__`.
            r: the grid of ratios, ascending.

        Returns:
            A list for each pair (A, mu), ascending in r.
        """
        rows, mu = _columns(A, mu)
        found, _ = self._find_jumps(rows, mu, r, ends=False)
        jumps_of_pairs: list[list[Jump]] = [[] for _ in rows]
        for row, *jump in zip(*found, strict=True):
            jumps_of_pairs[row].append(Jump(*map(float, jump)))
        return jumps_of_pairs

    def ends(
        self, A: Numbers, mu: Numbers | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the ratios at which the weight turns to 0 or back, for each pair (A, mu).

        A dead band narrower than 2 % (r in 1e-3..1e3, less near 1) may be missed.

        Args:
            A: advantages, [n].
            mu: π_old, [n].

        Returns:
            The ratios, [n, k], ascending and padded with inf; and whether the weight is
            not 0 below them all, [n].
        """
        A, mu = _columns(A, mu)
        parts = [slice(n, n + ROWS) for n in range(0, max(len(A), 1), ROWS)]
        tables, alive = zip(
            *(
                self._find_jumps(
                    A[part], None if mu is None else mu[part], GRID, ends=True
                )
                for part in parts
            ),
            strict=True,
        )
        # of each end: the number of its pair (A, mu), and its place among that pair's
        pair = np.concatenate(
            [table.row + part.start for table, part in zip(tables, parts, strict=True)]
        )
        place = np.arange(len(pair)) - np.searchsorted(pair, pair)
        ratios = np.full((len(A), place.max(initial=-1) + 1), np.inf)
        ratios[pair, place] = np.concatenate([table.r for table in tables])
        return ratios, np.concatenate(alive)

    def in_float32(self) -> "Curve":
        """Return the curve as one that was measured in float32: it tells fewer ratios
        and weights apart.
        """
        return replace(self, rtol_ratio=SINGLE_RTOL_RATIO, floor=SINGLE_FLOOR)

    def _find_jumps(
        self, A: np.ndarray, mu: np.ndarray | None, r: np.ndarray, ends: bool
    ) -> tuple[JumpTable, np.ndarray]:
        """Find the jumps of the weight between these ratios, for each row of the
        columns A and mu; see `find_jumps`.
        """

        def weight_of_rows(r: np.ndarray, rows: np.ndarray) -> np.ndarray:
            """Return the weights at r [m, k], with A and mu of these rows."""
            return self(r, A[rows], None if mu is None else mu[rows])

        # mu r is a probability
        largest_r = 1 / mu if self.reads_mu and mu is not None else np.inf
        r = np.broadcast_to(np.minimum(r, largest_r), (len(A), len(r)))
        return find_jumps(weight_of_rows, r, ends, self.rtol_ratio, self.floor)


def _columns(A: Numbers, mu: Numbers | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return A and mu as columns [n, 1]; None for a mu that is None."""
    A = np.atleast_1d(np.asarray(A, dtype=float))
    if mu is None:
        return A[:, None], None
    A, mu = np.broadcast_arrays(A, mu)
    return A[:, None], mu[:, None]


# ---- from an objective ---------------------------------------------------------------
def obstacle(objective: Objective) -> str:
    """Say why the weight of a token by itself is not a function of (r, A, mu), so that
    there is no Cap; "" if it is one.

    Args:
        objective: any.

    Returns:
        A sentence, or nothing.
    """
    if objective.batch_coupled:
        return objective.batch_coupled
    if "entropy" in objective.reads:
        return "its clip depends on the token's entropy"
    return ""


def make_curve_of_objective(objective: Objective, **hp: Any) -> Curve:
    """Make the curve of an objective from its closed form. Where it reads the entropy,
    the curve is that of a token of entropy 1.

    Args:
        objective: with a weight of a token by itself.
        **hp: hyperparameters.

    Returns:
        The curve.
    """
    settings = objective.resolve(hp)
    weight_of = _closed_form_weight
    if objective.level == "custom":
        weight_of = _weight_of_coupled_tokens
    weight = partial(weight_of, objective, hp)
    return Curve(objective.name, weight, objective.reads_mu, objective.level, settings)


def _closed_form_weight(
    objective: Objective,
    hp: dict[str, Any],
    r: Any,
    A: Any,
    mu: Any,
) -> np.ndarray:
    """Return the weight of an objective, in the shape that it and the ratios broadcast
    to: the weight of some objectives does not depend on r.
    """
    return objective.weight(r, A, mu=mu, **hp) + 0 * r  # + 0 * r: in the shape of r


def _weight_of_coupled_tokens(
    objective: Objective,
    hp: dict[str, Any],
    r: Any,
    A: Any,
    mu: Any,
) -> np.ndarray:
    """Return the weight of an objective that couples tokens: each point is a response
    of one token.
    """
    points = np.broadcast_arrays(r, A, mu)
    r, A, mu = (torch.tensor(column.reshape(-1, 1)) for column in points)
    mask = torch.ones_like(r, dtype=torch.bool)
    entropy = torch.ones_like(r)
    weights = objective.weight(r, A, mu, mask, entropy, **hp)
    return weights.numpy().reshape(points[0].shape)


# ---- from anybody's loss -------------------------------------------------------------
def make_curve_of_loss(loss: Any, settings: dict[str, Any] | None = None) -> Curve:
    """Make the curve of whatever has a name and a `gradient(Rollouts)`, dJ/dlp as
    [B, T], measured by autograd.

    A hundred small batches at most tell whether its weight depends on mu and on the
    other tokens, and whether the loss computes in float32.

    Args:
        loss: the object.
        settings: keywords of its `gradient`.

    Returns:
        The curve.

    Raises:
        InputError: it has no finite gradient.
    """
    curve = Curve(loss.name, partial(_measured, loss), True, settings=settings or {})
    columns = np.meshgrid(np.exp(MIDDLE_LOG_R), ADVANTAGES)
    r, A = (column.ravel() for column in columns)
    batch = single_token_batch(A, r, low_probability(r))
    if black_box.computes_in_float32(loss.gradient, batch):
        curve = curve.in_float32()
    if black_box.is_coupled(partial(_in_one_batch, loss), ADVANTAGES, curve.floor):
        return replace(curve, weight=partial(_one_by_one, loss), batch_coupled=True)
    reads_mu = black_box.reads_old_probability(
        curve.weight, ADVANTAGES, MUS, curve.floor
    )
    return replace(curve, reads_mu=reads_mu)


def _measured(loss: Any, r: Any, A: Any, mu: Any) -> np.ndarray:
    """Measure the weight of a loss at each point, AT_ONCE points in one batch;
    InputError where one is not finite.
    """
    weights = in_parts(partial(_in_one_batch, loss), AT_ONCE, r, A, mu)
    _refuse_infinite(loss, weights, r, mu)
    return weights


def _one_by_one(loss: Any, r: Any, A: Any, mu: Any) -> np.ndarray:
    """Measure the weight of a loss at each point, one point in each batch; InputError
    where one is not finite.
    """
    weights = in_parts(partial(_gradient, loss), 1, r, A, mu)
    _refuse_infinite(loss, weights, r, mu)
    return weights


def _in_one_batch(loss: Any, r: Any, A: Any, mu: Any) -> np.ndarray:
    """Measure the weights of tokens, each a response of its own, in one batch, [n].

    The loss divides the batch's gradient by a count of its tokens or responses. The
    token with the largest gradient shows which: it is measured alone too, and its
    gradient in a batch of one is its weight. Where that is 0 or NaN, so are all
    weights.
    """
    gradient = _gradient(loss, r, A, mu)
    if len(gradient) == 1:
        return gradient
    _refuse_infinite(loss, gradient, r, mu)
    strongest = abs(gradient).argmax()
    if not gradient[strongest]:
        return gradient
    token = slice(strongest, strongest + 1)
    alone = _gradient(loss, r[token], A[token], mu[token])
    return gradient * (alone / gradient[strongest])


def _gradient(loss: Any, r: Any, A: Any, mu: Any) -> np.ndarray:
    """Measure the gradient of a loss, less that of its KL term, at each point of one
    batch.
    """
    gradient = _without_kl_term(loss, single_token_batch(A, r, mu))
    return gradient[:, 0].double().numpy() + 0.0  # makes 0 of -0


def _without_kl_term(loss: Any, batch: Rollouts) -> Tensor:
    """Return the gradient of a loss, less that of its KL term. Of a loss that reads the
    reference policy, the gradient at A = 0 is that of the KL term.
    """
    gradient: Tensor = loss.gradient(batch)
    if "logp_ref" not in getattr(loss, "reads", ()):
        return gradient
    return gradient - black_box.gradient_at_zero_advantage(loss.gradient, batch)


def _refuse_infinite(loss: Any, weights: np.ndarray, r: Any, mu: Any) -> None:
    """Raise InputError where a weight is not finite, with the probability of its token."""
    infinite = ~np.isfinite(weights)
    if infinite.any():
        p = np.broadcast_to(r * mu, weights.shape)[infinite][0]
        raise InputError(
            f"{loss.name} has no finite gradient in log_prob at pi={p:.3g}."
        )


# ---- from whatever a user names ------------------------------------------------------
def make_curve(
    what: "str | Objective | Callable[..., Any] | Curve", **hp: Any
) -> Curve:
    """Make the curve of a registered name, an Objective, or any loss or its name
    (path/to/file.py:function, package.module:function, verl:loss_mode, trl:loss_type).

    Args:
        what: the name, Objective, loss or Curve.
        **hp: hyperparameters of the objective, or keywords of the loss's own.

    Returns:
        The weight as a function of (r, A, mu).

    Raises:
        InputError: the weight of a token by itself is no such function: see `obstacle`.
            Of a loss, the tokens of a batch are coupled, the weight depends on the
            entropy, or two calls give two gradients.
    """
    if isinstance(what, Curve):
        return what
    what = get(what) if isinstance(what, str) and ":" not in what else what
    if isinstance(what, Objective):
        what.resolve(hp)
        if why := obstacle(what):
            raise InputError(f"{what.name} has no weight of a single token: {why}.")
        curve = make_curve_of_objective(what, **hp)
        return replace(curve, reads_others=_couples_a_response(what, hp))
    loss = losses.read(what, None, hp)
    why = _obstacle_of_loss(loss)
    curve = make_curve_of_loss(loss, hp)
    if not why and curve.batch_coupled:
        why = "it depends on the other tokens of a batch"
    if why:
        raise InputError(f"{curve.name} has no weight of a single token: {why}.")
    gradient = partial(_without_kl_term, loss)
    reads_others = black_box.reads_other_tokens(gradient, ADVANTAGES, curve.floor)
    return replace(curve, reads_others=reads_others)


def _couples_a_response(objective: Objective, hp: dict[str, Any]) -> bool:
    """Tell whether the weight of a token depends on the other tokens of its response:
    of a custom level, this is measured.
    """
    if objective.level != "custom":
        return objective.level in REDUCE

    def weights(b: Rollouts) -> Tensor:
        """Return the weights of a batch, [B, T]."""
        r = (b.logp - b.logp_old).exp()
        mu = b.logp_old.exp()
        return objective.weight(r, b.adv, mu, b.mask, b.entropy, **hp)

    return black_box.reads_other_tokens(weights, ADVANTAGES, 1e-6)


def _obstacle_of_loss(loss: losses.Loss) -> str:
    """Return why the weight of a token by itself is not a function of (r, A, mu), as
    `obstacle` does for an objective; "" if it may be one.
    """
    r = np.exp(MIDDLE_LOG_R)
    batch = single_token_batch(1.0, r, low_probability(r))
    with state_restored():  # else each call draws the same random numbers
        if black_box.gives_two_answers(loss.gradient, batch):
            return "two calls on the same batch give different gradients"
        if "entropy" in loss.reads and black_box.reads_entropy(loss.gradient):
            return "it depends on the token's entropy"
    return ""


def make_curves(whats: Sequence[Any], hp: dict[str, Any]) -> list[Curve]:
    """Make the curve of each of several objectives and losses.

    Args:
        whats: names, Objectives or losses.
        hp: hyperparameters; each objective or loss gets those that it has.

    Returns:
        A curve for each.

    Raises:
        InputError: there is no objective, none of them has a hyperparameter, or
            `make_curve` raises it.
    """
    if not whats:
        raise InputError("name at least one objective.")
    named = []
    for what in whats:
        is_name = isinstance(what, str) and ":" not in what  # else FILE:FUNCTION
        named.append(get(what) if is_name else what)
    for key in hp:
        if any(_has_hyperparameter(what, key) for what in named):
            continue
        if len(whats) == 1:
            make_curve(whats[0], **{key: hp[key]})  # its error names what there is
        loss_names = (
            getattr(what, "name", None) or losses.name_of(what) for what in whats
        )
        raise InputError(
            f"none of {', '.join(loss_names)} has a hyperparameter {key!r}."
        )
    curves = []
    for what in named:
        own = {key: hp[key] for key in hp if _has_hyperparameter(what, key)}
        curves.append(make_curve(what, **own))
    return curves


def common_ratio_symbol(curves: Sequence[Curve]) -> str:
    """Return the letter of the ratio on which these act: r where they act on several.

    Args:
        curves: of a token by itself, whose ratio is its response's too.
    """
    symbols = {RATIO_SYMBOLS[curve.level] for curve in curves}
    return symbols.pop() if len(symbols) == 1 else "r"


def words_for_one_token(curves: Sequence[Curve], ratio: str = "") -> str:
    """Say of which curves the numbers hold for a response of one token alone.

    Args:
        curves: of a token by itself.
        ratio: the letter under which they are shown. A curve of a level whose own letter
            it is holds for every response, and is left out.

    Returns:
        A line without its end; "" where there is no such curve.
    """
    names_by_ratio: dict[str, list[str]] = {}
    for curve in curves:
        letter = RATIO_SYMBOLS[curve.level]
        is_of_response = letter in RATIOS_OF_RESPONSES
        if curve.reads_others and not (is_of_response and letter == ratio):
            its_ratio = letter if is_of_response else "its ratio"
            names_by_ratio.setdefault(its_ratio, []).append(curve.name)
    parts = [
        f"{', '.join(names)}: of a response of one token, where {its_ratio} = r"
        for its_ratio, names in names_by_ratio.items()
    ]
    return "; ".join(parts)


def _has_hyperparameter(what: Any, name: str) -> bool:
    """Tell whether an objective, or a loss, has a hyperparameter of this name."""
    if isinstance(what, Objective):
        return name in what.hyperparameters
    return losses.accepts(what, name)
