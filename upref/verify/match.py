# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters of an objective recovered from a measured weight: one-dimensional
solves on its own closed form.

Nothing here knows a hyperparameter by name: at a jump of the measured weight the
objective's weight has to pass the middle of the jump, elsewhere it has to meet the
measured value. Nothing here changes after it was made. One file, for candidate and
solves share their points.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from upref.definition import is_clip_width
from upref.errors import InputError
from upref.registry import Objective, get, names
from upref.user_code import Loss
from upref.verify.measure import LossCase
from upref.verify.probe import BlackBox, Point, measure, termed

# hyperparameter -> its smallest and largest value in a search; c <= 1 is no dual clip
SEARCH_RANGE = {"c": (1 + 1e-9, 1e4), "entropy_quantile": (0.0, 0.99)}
DEFAULT_RANGE = (1e-9, 1e4)
# a value that is not between these is near an end: the search ran off
LEAST_FOUND, MOST_FOUND = 1e-7, 9e3
HALVINGS = 52  # halvings of the logarithm of the range: to 1e-14
# A search ends if a larger share of the points disagrees after each hyperparameter was
# solved for once.
HOPELESS_MISS = 0.2
GAUSS_NEWTON = 20  # steps
# Most closed forms are elementwise, in their hyperparameters too. Those with `c or inf`,
# and those that take the mask, are not: with an array they raise one of these.
NOT_ELEMENTWISE = (ValueError, TypeError, RuntimeError)
# log r of the points at which a hyperparameter is solved for where the weight is
# continuous in it
SMOOTH_LOG_R = (-5.0, -2.0, -0.6, 0.6, 2.0, 5.0)


def _column(numbers: np.ndarray) -> torch.Tensor:
    """Return the numbers as a batch of one token in each row."""
    return torch.as_tensor(numbers)[:, None]


class ClosedFormWeights:
    """The closed form of an objective at given points, as a function of its
    hyperparameters.
    """

    def __init__(self, objective: Objective, points: list[Point]):
        """Take the points apart into arrays, and prepare the calls of the closed form.

        Args:
            objective: the objective.
            points: where its weight is computed.
        """
        self.objective = objective
        self.A, self.r, self.mu = (
            np.array([getattr(point, name) for point in points])
            for name in ("A", "r", "mu")
        )
        self.high_entropy = np.array([p.high_entropy for p in points], dtype=bool)
        self.calls: list[tuple[np.ndarray, Callable[..., Any]]] = list(self._calls())

    def __call__(self, hp: dict[str, Any]) -> np.ndarray:
        """Return the weight at each point with these hyperparameters; NaN or infinity
        where the closed form overflows.
        """
        weights = np.empty(len(self.r))
        with np.errstate(all="ignore"):
            for rows, weights_at in self.calls:
                weights[rows] = weights_at(**hp)
        return weights

    def _calls(self) -> Iterator[Any]:
        """Yield rows of points, and the function from hyperparameters to their
        weights.
        """
        objective = self.objective
        if objective.level != "custom":
            available = {
                "mu": self.mu,
                "log_mu": np.log(self.mu),
                "mask": None,
                "entropy": None,
            }
            ratio = np.log(self.r) if objective.reads_log_r else self.r
            inputs = {name: available[name] for name in objective.reads}
            yield (
                np.arange(len(self.r)),
                partial(objective.closed_form, ratio, self.A, **inputs),
            )
            return
        for high_entropy in (False, True):
            rows = np.flatnonzero(self.high_entropy == high_entropy)
            if len(rows):
                yield rows, self._batch_form(rows, high_entropy)

    def _batch_form(
        self, rows: np.ndarray, high_entropy: bool
    ) -> Callable[..., np.ndarray]:
        """Return the function from hyperparameters to the weights of these points, for
        a closed form that reads a batch. Each point is a row, and a batch of its own
        where the form reads other rows. With `high_entropy` the row has a second token
        of half the entropy.
        """
        objective = self.objective
        r, A, mu = _column(self.r[rows]), _column(self.A[rows]), _column(self.mu[rows])
        H = torch.ones_like(r)
        if high_entropy:
            r = torch.cat([r, torch.ones_like(r)], 1)
            A = torch.cat([A, A], 1)
            mu = torch.cat([mu, mu], 1)
            H = torch.cat([2 * H, H], 1)
        available = {
            "mu": mu,
            "log_mu": mu.log(),
            "mask": torch.ones_like(r, dtype=torch.bool),
            "entropy": H,
        }
        ratio = r.log() if objective.reads_log_r else r
        inputs = {name: available[name] for name in objective.reads}

        def weights_at(**hp: Any) -> np.ndarray:
            """Return the weights of the points with these hyperparameters."""
            form = partial(objective.closed_form, **hp)
            if objective.batch_coupled:
                weights = _in_batches_of_one_row(form, ratio, A, inputs)
            else:
                weights = form(ratio, A, **inputs)
            return np.asarray(weights[:, 0].numpy())

        return weights_at


def _in_batches_of_one_row(
    form: Callable[..., torch.Tensor],
    ratio: torch.Tensor,
    A: torch.Tensor,
    inputs: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return the weights of a closed form that is given each row as a whole batch."""

    def of_batch(
        ratio: torch.Tensor, A: torch.Tensor, inputs: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the weights of one batch, [1, T]."""
        return form(ratio, A, **inputs)

    batches = {name: x[:, None] for name, x in inputs.items()}
    try:
        return torch.func.vmap(of_batch)(ratio[:, None], A[:, None], batches)[:, 0]
    except RuntimeError:  # vmap cannot follow a form that branches on a number
        rows = range(len(ratio))
        weights = [
            of_batch(ratio[[i]], A[[i]], {n: x[[i]] for n, x in inputs.items()})
            for i in rows
        ]
        return torch.cat(weights)


@dataclass(frozen=True)
class Candidate:
    """An objective compared with the curve of a black box."""

    objective: Objective
    hp: dict[str, Any]  # the best that were found
    miss: tuple[float, float]  # their score: see HyperparameterSearch.score
    # the share that disagrees of the points that depend on no hyperparameter
    unexplained: float
    curve: "HyperparameterSearch" = field(repr=False)

    @property
    def fits(self) -> bool:
        """Whether it agrees, and no hyperparameter is at a limit: sapo at tau -> 0 has
        the weight of another objective.
        """
        return self.curve.explains(self.hp, self.miss)

    @property
    def is_extreme(self) -> bool:
        """Whether a hyperparameter has a value that nobody sets: there the search ended
        without an answer.
        """
        return any(
            value is not None and not (1e-5 < value < 100 or value == 0)
            for value in self.hp.values()
        )

    def effective_hp(self) -> dict[str, Any]:
        """Return the hyperparameters that have an effect on the weights here, and those
        that are None.

        Returns:
            Their values by name.
        """
        return {
            name: value
            for name, value in self.hp.items()
            if value is None or self.curve.matters(self.hp, name, value)
        }


@dataclass(frozen=True)
class HyperparameterSearch:
    """The search for the hyperparameters with which the closed form of an objective
    gives a measured curve.
    """

    objective: Objective
    box: BlackBox
    points: list[Point]
    measured: np.ndarray
    closed_form: ClosedFormWeights

    # ---- how far ---------------------------------------------------------------------
    def relative_errors(self, w: np.ndarray) -> np.ndarray:
        """Return how far weights are from the measured ones.

        Args:
            w: of the objective, one for each point.

        Returns:
            |w - measured| over max(|w|, |A|), one for each point; infinity where w is
            NaN.
        """
        scale = np.maximum(np.abs(w), np.abs(self.closed_form.A))
        with np.errstate(all="ignore"):
            return np.nan_to_num(np.abs(w - self.measured) / scale, nan=np.inf)

    def score(self, hp: dict[str, Any]) -> tuple[float, float]:
        """Return how badly hyperparameters explain the measured weights.

        Args:
            hp: of the objective.

        Returns:
            The share of the points that differ, and the sum of their distances, 1 at
                most each.
        """
        errors = self.relative_errors(self.closed_form(hp))
        return float((errors > self.box.tol).mean()), float(np.minimum(errors, 1).sum())

    def explains(self, hp: dict[str, Any], miss: tuple[float, float]) -> bool:
        """Tell whether hyperparameters explain every point and are possible values.

        One that is not its default, and near an end of the search, was not found. A clip
        width may be 0.

        Args:
            hp: of the objective.
            miss: their score.
        """
        changed = (
            (name, value)
            for name, value in hp.items()
            if value is not None and value != self.objective.hyperparameters[name]
        )
        ran_off = any(
            not LEAST_FOUND < value < MOST_FOUND
            and not (value == 0 and is_clip_width(name))
            for name, value in changed
        )
        return miss[0] == 0 and not ran_off and in_range(self.objective, hp)

    def matters(self, hp: dict[str, Any], key: str, value: float) -> bool:
        """Tell whether another value of one hyperparameter would change the weights.

        Args:
            hp: of the objective.
            key: the name of the hyperparameter.
            value: its value.
        """
        lowest, _ = SEARCH_RANGE.get(key, DEFAULT_RANGE)
        other_values = [value * 0.5, value * 1.5, value * 1e-3]
        if value == 0:
            other_values.append(0.1)
        changed_weights = [
            self.closed_form(hp | {key: max(lowest, other)}) for other in other_values
        ]
        return any(
            self.relative_errors(w).max() > 10 * self.box.tol for w in changed_weights
        )

    # ---- the search ------------------------------------------------------------------
    def best(self) -> Candidate:
        """Search the hyperparameters with which the objective comes nearest.

        Returns:
            The candidate, which may not fit.
        """
        hp = self.objective.surrogate_hyperparameters({})
        miss = self.score(hp)
        unexplained, continuous_at = self._unexplained_and_continuous(hp)
        if (unexplained == 0 or self.box.tol > 1e-4) and miss[0] > 0:
            hp, miss = self._search_from(hp, miss, continuous_at)
            clip = self._clip_widths_at_jumps(hp)
            if not self.explains(hp, miss) and clip:
                from_jumps = self._search_from(
                    hp | clip, self.score(hp | clip), continuous_at, clip.keys()
                )
                hp, miss = min((hp, miss), from_jumps, key=lambda found: found[1])
        return Candidate(self.objective, hp, miss, unexplained, self)

    def _search_from(
        self,
        hp: dict[str, Any],
        miss: tuple[float, float],
        continuous_at: dict[str, np.ndarray],
        fixed: Collection[str] = (),
    ) -> tuple[dict[str, Any], tuple[float, float]]:
        """Return the best hyperparameters that a search from these finds, and their
        score. It does not change the fixed ones.
        """
        hp, miss = self._descend(hp, miss, continuous_at, fixed)
        if fixed:
            return hp, miss
        if self.explains(hp, miss):
            return hp, miss
        return self._solve_jointly(hp, miss, continuous_at)

    def _clip_widths_at_jumps(self, hp: dict[str, Any]) -> dict[str, float]:
        """Return the clip widths whose bounds are where the weight jumps. Without them a
        search may end where other hyperparameters make up for a wrong clip.
        """
        if not {"eps_low", "eps_high"} <= hp.keys():
            return {}
        jump_ratios = [point.r for point, _ in self.box.jumps if not point.high_entropy]
        low = max((r for r in jump_ratios if r < 1 - 1e-6), default=None)
        high = min((r for r in jump_ratios if 1 + 1e-6 < r < 10), default=None)
        widths = {}
        if low is not None:
            widths["eps_low"] = 1 - low
        if high is not None:
            widths["eps_high"] = high - 1
        return widths

    def _trials(self, key: str) -> list[Any]:
        """Return values of a hyperparameter, from one end of its range to the other."""
        lowest, highest = SEARCH_RANGE.get(key, DEFAULT_RANGE)
        # the range of c begins at 1: its values are that much larger
        offset = lowest if lowest > 1 else 0
        between = np.geomspace(max(lowest, 0.01), highest, 9)[:-1] + offset
        trials: list[Any] = [lowest, *between, highest]
        if self.objective.hyperparameters[key] is None:
            trials.append(None)
        return trials

    def _unexplained_and_continuous(
        self, hp: dict[str, Any]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Return the share of points that disagree whatever the hyperparameters; and for
        each hyperparameter, the points whose weight is continuous in it.
        """
        weights = self.closed_form(hp)
        depends = np.zeros(len(weights), dtype=bool)
        continuous_at = {}
        for key in hp:
            at_trials = [
                self.closed_form(hp | {key: value}) for value in self._trials(key)
            ]
            tried_weights = np.array([weights, *at_trials])
            is_changed = np.abs(tried_weights - weights) > 1e-12 * np.abs(weights)
            depends |= is_changed.any(0)
            # a weight that takes more than three values does not merely jump
            steps = np.abs(np.diff(np.sort(tried_weights, 0), axis=0))
            continuous_at[key] = (steps > 1e-9).sum(0) > 2
        errors = self.relative_errors(weights)
        if depends.all():
            return 0.0, continuous_at
        unexplained = float((errors[~depends] > self.box.tol).mean())
        return unexplained, continuous_at

    def _descend(
        self,
        hp: dict[str, Any],
        miss: Any,
        continuous_at: Any,
        fixed: Collection[str] = (),
    ) -> Any:
        """Set each hyperparameter in turn to the best of its solutions, until none
        improves, at most three times each. Return them and their score.
        """
        for _ in range(3):
            before = miss
            for key in (name for name in hp if name not in fixed):
                for solution in self._solutions(hp, key, continuous_at):
                    score = self.score(hp | {key: solution})
                    if score < miss:
                        hp = hp | {key: solution}
                        miss = score
                    if self.explains(hp, miss):
                        return hp, miss
            if miss == before or miss[0] > HOPELESS_MISS:
                break
        return hp, miss

    def _solve_jointly(self, hp: dict[str, Any], miss: Any, continuous_at: Any) -> Any:
        """Solve for all continuous hyperparameters at once, by Gauss-Newton steps in
        their logarithms. Where two of them shape the same tokens, neither can be solved
        for alone.
        """
        keys = [
            name
            for name, value in hp.items()
            if value and (continuous_at[name] & ~self.closed_form.high_entropy).any()
        ]
        if len(keys) < 2:
            return hp, miss

        def hp_of(logarithms: np.ndarray) -> dict[str, Any]:
            """Return the hyperparameters, of which `keys` have these logarithms."""
            return hp | dict(zip(keys, np.exp(logarithms).tolist(), strict=True))

        logarithms = np.log([hp[key] for key in keys])
        step_size = 1e-6
        for _ in range(GAUSS_NEWTON):
            weights = self.closed_form(hp_of(logarithms))
            with np.errstate(all="ignore"):
                slopes = [
                    (
                        self.closed_form(hp_of(logarithms + step_size * direction))
                        - weights
                    )
                    / step_size
                    for direction in np.eye(len(keys))
                ]
            is_finite = np.isfinite([weights, *slopes]).all(0)
            if not is_finite.any():
                return hp, miss
            step = np.linalg.lstsq(
                np.array(slopes).T[is_finite],
                (self.measured - weights)[is_finite],
                rcond=None,
            )[0]
            logarithms = logarithms + step.clip(-1, 1)
        return min(
            (hp, miss),
            (hp_of(logarithms), self.score(hp_of(logarithms))),
            key=lambda found: found[1],
        )

    # ---- the solves ------------------------------------------------------------------
    def _solutions(
        self, hp: dict[str, Any], key: str, continuous_at: dict[str, np.ndarray]
    ) -> Iterator[float | None]:
        """Yield values of one hyperparameter, each of which gives the objective the
        measured weight at one point: at a jump, or where the weight is continuous in it.
        A jump at a high entropy counts for objectives that read the entropy alone.
        None comes first if it may be absent, then 0 for a clip width if the weight jumps
        at r = 1. A point is left out if both ends of the range are on one side of it.
        """
        if self.objective.hyperparameters[key] is None:
            yield None
        if is_clip_width(key) and any(_is_at_1(point) for point, _ in self.box.jumps):
            yield 0.0
        jumps = [
            (point, middle)
            for point, middle in self.box.jumps
            if not point.high_entropy or "entropy" in self.objective.reads
        ]
        targets = [*jumps, *self._continuous_points(continuous_at[key])]
        if not targets:
            return
        lowest, highest = SEARCH_RANGE.get(key, DEFAULT_RANGE)
        weights = ClosedFormWeights(self.objective, [point for point, _ in targets])
        target_weights = np.array([weight for _, weight in targets])
        signs_at_lowest = np.sign(weights(hp | {key: lowest}) - target_weights)
        signs_at_highest = np.sign(weights(hp | {key: highest}) - target_weights)
        bracketed = np.flatnonzero(signs_at_lowest != signs_at_highest).tolist()
        if not bracketed:
            return
        signs = signs_at_lowest[bracketed]
        try:
            yield from self._solve(
                hp, key, [targets[i] for i in bracketed], lowest, highest, signs
            )
        except NOT_ELEMENTWISE:
            for i, sign in zip(bracketed, signs, strict=True):
                yield from self._solve(hp, key, [targets[i]], lowest, highest, sign)

    def _continuous_points(self, continuous: np.ndarray) -> list[tuple[Point, float]]:
        """Return a few points at which the weight is continuous in a hyperparameter,
        each with its measured weight.
        """
        indices = np.flatnonzero(continuous & ~self.closed_form.high_entropy)
        if not len(indices):
            return []
        log_r = np.log(self.closed_form.r[indices])
        A = self.closed_form.A[indices]

        def distance(target: float, sign: int) -> np.ndarray:
            """Return how far each log r is from the target; 100 farther where A has
            another sign.
            """
            return np.abs(log_r - target) + 100 * (sign != A)

        picked = {
            int(indices[distance(target, sign).argmin()])
            for target in SMOOTH_LOG_R
            for sign in (1, -1)
        }
        return [(self.points[i], float(self.measured[i])) for i in sorted(picked)]

    def _solve(
        self,
        hp: dict[str, Any],
        key: str,
        targets: list[tuple[Point, float]],
        lowest: float,
        highest: float,
        sign_at_lowest: Any,
    ) -> list[float]:
        """Solve for a hyperparameter at each target, by bisection in its logarithm."""
        weights = ClosedFormWeights(self.objective, [point for point, _ in targets])
        target_weights = np.array([weight for _, weight in targets])
        low = np.full(len(targets), lowest)
        high = np.full(len(targets), highest)
        for _ in range(HALVINGS):
            middle = np.sqrt(low * high)
            # a number where there is one target: some closed forms take no arrays
            value = middle if len(targets) > 1 else float(middle[0])
            signs = np.sign(weights(hp | {key: value}) - target_weights)
            is_below = signs == sign_at_lowest
            low = np.where(is_below, middle, low)
            high = np.where(is_below, high, middle)
        return np.sqrt(low * high).tolist()


def best_candidate(objective: Objective, box: BlackBox) -> Candidate:
    """Return the objective with the hyperparameters that fit the box best.

    Args:
        objective: the objective.
        box: the loss, measured.
    """
    # such a point is for objectives whose weight depends on the entropy
    kept = [
        i
        for i, point in enumerate(box.points)
        if not point.high_entropy or "entropy" in objective.reads
    ]
    points = [box.points[i] for i in kept]
    return HyperparameterSearch(
        objective, box, points, box.weights[kept], ClosedFormWeights(objective, points)
    ).best()


def in_range(objective: Objective, hp: dict[str, Any]) -> bool:
    """Tell whether the objective takes these hyperparameters, and somebody could have
    set them.

    Args:
        objective: the objective.
        hp: hyperparameters.
    """
    largest = {"eps": 1.0, "eps_low": 1.0, "eps_high": 100.0}
    set_hp = {name: value for name, value in hp.items() if value is not None}
    for name, value in set_hp.items():
        # twice the default is possible too: WAPO's eps is 9
        default = objective.hyperparameters.get(name) or 0
        if value > (1 + 1e-6) * max(largest.get(name, math.inf), 2 * default):
            return False
    try:
        objective.resolve(set_hp)
    except InputError:
        return False
    return True


def _is_at_1(point: Point) -> bool:
    """Tell whether the ratio of this point is 1."""
    return abs(point.r - 1) < 1e-9


def candidate_or_none(objective: Objective, box: BlackBox) -> Candidate | None:
    """Return the best candidate. None where the objective reads what the loss does not,
    or the other way round, or reads groups: points have none.

    Args:
        objective: the objective.
        box: the loss, measured.
    """
    reads = (
        objective.reads_mu,
        "entropy" in objective.reads,
        bool(objective.batch_coupled),
    )
    if "group" in objective.reads or reads != (
        box.reads_mu,
        box.reads_entropy,
        box.batch_coupled,
    ):
        return None
    try:
        return best_candidate(objective, box)
    except InputError:
        return None


def all_objectives() -> list[Objective]:
    """Return all objectives that a loss may be: the registered ones, and up(...) of those
    that are no UP already.

    Returns:
        The registered ones first, in alphabetical order.
    """
    registered = [get(n) for n in names()]
    return registered + [
        get(f"up({objective.name})") for objective in registered if not objective.is_up
    ]


def find_candidates(box: BlackBox) -> list[Candidate]:
    """Return the objectives that read what the loss reads, each at its best; where there
    is none, those whose weight depends on the token alone.

    Args:
        box: the loss, measured.
    """
    found = (candidate_or_none(objective, box) for objective in all_objectives())
    return list(filter(None, found)) or uncoupled_candidates(box)


def uncoupled_candidates(box: BlackBox) -> list[Candidate]:
    """Return a candidate for each objective whose weight depends on the token alone.

    Args:
        box: the loss, measured.
    """
    return [
        best_candidate(objective, box)
        for objective in all_objectives()
        if not (
            objective.batch_coupled
            or objective.reads_mu
            or "entropy" in objective.reads
        )
    ]


def fitting(loss: Loss) -> Iterator[tuple[BlackBox, Objective, dict[str, Any]]]:
    """Yield all objectives that fit the loss as a black box, also after a KL term of an
    unusual form is subtracted.

    Args:
        loss: as read.

    Returns:
        The measured loss, an objective and its hyperparameters, each.
    """
    with contextlib.suppress(InputError):
        box = measure(loss, False)
        boxes = [] if box.random or box.batch_coupled else [box, termed(box)]
        for measured_loss, objective in product(filter(None, boxes), all_objectives()):
            if (found := candidate_or_none(objective, measured_loss)) and found.fits:
                yield measured_loss, objective, found.hp


def recover(case: LossCase) -> list[dict[str, Any]]:
    """Find other hyperparameters at which the objective of a case has the weights that
    its loss shows; [] where there are none.

    Args:
        case: the loss and its objective.
    """
    try:
        found = candidate_or_none(
            case.objective, measure(case.loss, bool(case.objective.batch_coupled))
        )
    except InputError:
        return []
    if found is None or not found.fits:
        return []
    changed = {
        name: _rounded(value)
        for name, value in found.effective_hp().items()
        if not _is_close(value, case.hp.get(name))
    }
    return [changed] if changed else []


def _rounded(value: float | None) -> float | None:
    """Round a result of bisection to a number of few digits, such as 0.28, if near."""
    if value is None:
        return value
    for digits in (3, 6, 9):
        rounded = float(f"{value:.{digits}g}")
        if _is_close(rounded, value):
            return rounded
    return value


def _is_close(x: Any, y: Any) -> bool:
    """Tell whether two values are equal up to 1e-9; None equals only None."""
    return x is y if x is None or y is None else abs(x - y) <= 1e-9 * max(1, abs(y))
