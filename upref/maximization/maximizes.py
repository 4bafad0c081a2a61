# SPDX-License-Identifier: Apache-2.0
"""`upref.maximizes`: what a loss, an advantage estimator or a KL term maximizes on
average.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from upref import advantages as estimators, catalog, kl
from upref.errors import InputError
from upref.maximization import expected
from upref.maximization.expected import Estimator, Expected
from upref.maximization.functions import (
    FUNCTIONS,
    KL_OF_RESPONSES,
    MEAN_REWARD,
    Point,
    gradient,
)
from upref.maximization.maximization import Answer, Maximization, Term
from upref.maximization.policy import DIFFERENT_LENGTHS, ONE_LENGTH, Responses
from upref.registry import Objective, get
from upref.user_code import Loss, read
from upref.user_code.guard import state_restored
from upref.user_code.kl import read as read_term
from upref.user_code.load import name_of
from upref.verify.advantages.function import read as read_estimator

GROUP_SIZE = 4  # with 2 or 3 responses and two rewards, all groups have one deviation
LARGEST_GROUP = 8
POLICIES = 4
SEED = 20261128
PASS_RATES = (0.1, 0.3, 0.5, 0.7, 0.9)
STEP = 0.1  # of the logits, between sampling and the gradient that is off policy
TOLERANCE = 1e-5  # relative, of gradients that are the same; float32 is within it
ZERO = 1e-6  # of the mean length of the gradient of one batch
MOST_TERMS = 3
# relative asymmetry of the derivative of a field; a gradient's is symmetric
SYMMETRIC = 1e-4
ASYMMETRIC = 1e-2
DIFFERENCE = 3e-3  # of the logits, for derivatives by differences
BISECTIONS = 60

Field: TypeAlias = Callable[[Point], Expected]


def _pass_at_slope(k: int) -> Callable[[float], float]:
    """Return the derivative of pass@k = 1 - (1 - p)^k."""
    return lambda p: k * (1 - p) ** (k - 1)


def _harmonic_pass_at_slope(most: int) -> Callable[[float], float]:
    """Return the derivative of Σ pass@k / k for k from 1 to `most`."""
    return lambda p: (1 - (1 - p) ** most) / p


@dataclass(frozen=True)
class RateFunction:
    """A function of the pass rate p that has a name.

    Attributes:
        words: for the report.
        derivative: by p. It is the factor of the gradient of p.
    """

    words: str
    derivative: Callable[[float], float]


def _log_slope(p: float) -> float:
    """Return the derivative of log p."""
    return 1 / p


def _log_odds_slope(p: float) -> float:
    """Return the derivative of log p/(1 - p)."""
    return 1 / (p * (1 - p))


def _arcsine_slope(p: float) -> float:
    """Return the derivative of 2 arcsin √p."""
    return (p * (1 - p)) ** -0.5


# functions of the pass rate by id; the first whose derivative fits is the answer
FUNCTIONS_OF_RATE: dict[str, RateFunction] = {
    "log": RateFunction("the logarithm of the pass rate", _log_slope),
    "log-odds": RateFunction("the log-odds of the pass rate", _log_odds_slope),
    "arcsine": RateFunction("2 arcsin √(pass rate)", _arcsine_slope),
    **{
        f"pass-at-{k}": RateFunction(f"pass@{k}", _pass_at_slope(k))
        for k in range(2, LARGEST_GROUP + 1)
    },
    **{
        f"harmonic-pass-at-{most}": RateFunction(
            f"Σ pass@k / k, k = 1 to {most}", _harmonic_pass_at_slope(most)
        )
        for most in range(2, LARGEST_GROUP + 1)
    },
}


@dataclass(frozen=True)
class Setting:
    """The kind of rewards and of responses.

    Attributes:
        words: for the report.
        responses: all responses.
        rewards: the reward of each response, for each policy, [POLICIES, N].
    """

    words: tuple[str, ...]
    responses: Responses
    rewards: Tensor

    def points(self) -> list[Point]:
        """Return the policies at which gradients are compared, each with its rewards and
        its reference policy.
        """
        generator = torch.Generator().manual_seed(SEED)
        K = len(self.responses.prefixes)
        z, z_ref = torch.randn(2, POLICIES, K, generator=generator, dtype=torch.float64)
        return [
            Point(self.responses, *numbers)
            for numbers in zip(z, z_ref, self.rewards, strict=True)
        ]


def _settings() -> list[Setting]:
    """Return four settings: rewards that are 0 or 1, then graded rewards, each with
    responses of one length and of different lengths.
    """
    # which of the four responses are right, one to three at each policy
    right = torch.tensor(
        [[1, 0, 0, 1], [0, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 1]],
        dtype=torch.float64,
    )
    # of both signs, small and large: a clamp of rewards or of advantages changes them
    graded = torch.tensor(
        [
            [-7.3, 0.4, 2.9, 9.1],
            [1.7, -0.6, -9.4, 5.2],
            [0.8, 3.6, -2.2, -4.9],
            [6.5, -8.3, 0.15, 1.3],
        ],
        dtype=torch.float64,
    )
    return [
        Setting((rewards, responses.words), responses, numbers)
        for rewards, numbers in (("0 or 1", right), ("graded", graded))
        for responses in (ONE_LENGTH, DIFFERENT_LENGTHS)
    ]


def _accepted_settings(
    estimator: Estimator, group_size: int
) -> tuple[list[Setting], tuple[str, ...]]:
    """Return the settings whose rewards an estimator takes, and a sentence for each kind
    of rewards that it refuses.

    Raises:
        InputError: it refuses all of them.
    """
    accepted = []
    refused: dict[str, InputError] = {}
    for setting in _settings():
        R = setting.rewards[0][:group_size]
        try:
            estimator(R, torch.zeros(len(R), dtype=torch.int64))
        except InputError as e:
            refused[setting.words[0]] = e
        else:
            accepted.append(setting)
    if not accepted:
        raise next(iter(refused.values()))
    sentences = tuple(
        f"not run with rewards that are {rewards}: {e}"
        for rewards, e in refused.items()
    )
    return accepted, sentences


# ---- the verb ------------------------------------------------------------------------
def maximizes(
    fn: Any,
    *,
    kind: str = "loss",
    advantages: Any = None,
    group_size: int = GROUP_SIZE,
    **hp: Any,
) -> Maximization:
    """Tell which function of the policy a loss, an advantage estimator or a KL term
    maximizes on average.

    A policy of two tokens is listed whole: all responses, and all groups of them. The
    expected gradient E = Σ_groups P(group) ∇J(group), P held fixed as autograd holds
    it, is exact. It is compared with the gradients of `functions.FUNCTIONS` at four
    policies. Where none fits, the derivative of E shows whether E is a gradient at all.

    Args:
        fn: for "loss": a loss as for `check`, or the name of an objective. For
            "advantage": a function as for `check_advantages`, or the name of an
            estimator. For "kl-loss", "kl-reward" and "kl-advantage": a function as for
            `check_kl`, or the name of a KL estimator. Such a term is subtracted from J,
            from the reward of the response, or from the advantage of its own token.
        kind: what fn is.
        advantages: the estimator of a loss, by name or as a function. By default that
            of an objective's paper, and leave_one_out for other losses: with it, a loss
            that weighs responses alike maximizes the mean reward.
        group_size: G, the responses of a group, 2 to 8.
        **hp: hyperparameters of the loss.

    Returns:
        A Maximization: true unless an expected gradient is 0 or has the wrong sign.

    Raises:
        InputError: fn cannot be run.
    """
    if kind not in READERS:
        raise InputError(f"kind must be one of {', '.join(READERS)}, got {kind!r}.")
    is_size = isinstance(group_size, int) and 2 <= group_size <= LARGEST_GROUP
    if not is_size or isinstance(group_size, bool):
        raise InputError(
            f"group_size must be a whole number from 2 to {LARGEST_GROUP}, got {group_size!r}."
        )
    if advantages is not None and kind != "loss":
        raise InputError("advantages are of a loss: leave them out here.")
    if hp and kind != "loss":
        raise InputError(f"{next(iter(hp))!r} is no setting here: leave it out.")
    start = time.perf_counter()
    with state_restored():
        question = READERS[kind](fn, advantages, group_size, hp)
        answers = tuple(question.answer(setting) for setting in question.settings)
    return Maximization(
        question.name,
        question.advantages,
        question.heads,
        answers,
        question.group_size,
        question.groups,
        POLICIES,
        question.left_out,
        time.perf_counter() - start,
    )


@dataclass(frozen=True)
class Question:
    """A loss, an estimator or a KL term whose expected gradient is to be named, and how
    that gradient is computed.

    Attributes:
        name: of the loss, the estimator or the term.
        advantages: the estimator of a loss, in words.
        settings: the rewards and responses with which it is computed.
        heads: the names of the parts of a setting.
        target: the function that should be raised or lowered, a key of FUNCTIONS.
        direction: 1 to raise it, -1 to lower it.
        functions: keys of those that it is compared with.
        field: the expected gradient at a policy.
        off_policy: the same one step after sampling, with the policy that sampled.
        group_size: of a group, 0 without groups.
        groups: how many are listed.
        left_out: a sentence for each kind of rewards that the estimator refuses.
    """

    name: str
    advantages: str
    settings: Sequence[Setting]
    heads: tuple[str, ...]
    target: str
    direction: int
    functions: tuple[str, ...]
    field: Field
    off_policy: Callable[[Point, Tensor], Expected] | None = None
    group_size: int = 0
    groups: int = 0
    left_out: tuple[str, ...] = ()

    def answer(self, setting: Setting) -> Answer:
        """Name the expected gradient in one setting. The first kind of Answer that fits
        is taken: nothing, functions, pass rate, no function, some function, unknown.

        Args:
            setting: the rewards and the lengths.

        Raises:
            InputError: an expected gradient is not finite.
        """
        points = setting.points()
        found = [self.field(point) for point in points]
        E = [one.gradient for one in found]
        if any(not gradient.isfinite().all() for gradient in E):
            raise InputError(
                f"the gradient of {self.name} is not finite on a batch of {self.group_size or 1} responses."
            )
        target = [self.direction * gradient(self.target, point) for point in points]
        off_policy = None
        if self.off_policy:
            off_policy = self._off_policy(points)
        answer = Answer(
            setting.words,
            "unknown",
            (),
            FUNCTIONS[self.target].words,
            self.direction,
            _cosines(E, target),
            off_policy,
        )
        if all(float(one.gradient.norm()) <= ZERO * one.size for one in found):
            return replace(answer, kind="nothing", cosine=(0.0, 0.0), off_policy=None)
        terms = named_sum(E, points, self.functions)
        if terms:
            return replace(answer, kind="functions", terms=terms)
        if _is_pass_rate(setting, points) and answer.cosine[0] > 1 - TOLERANCE**2:
            factors = self._factors(points[0])
            return replace(
                answer, kind="pass rate", factors=factors, terms=_named_factor(factors)
            )
        asymmetry = _asymmetry(self.field, points[0])
        if asymmetry > ASYMMETRIC:
            return replace(answer, kind="no function")
        if asymmetry < SYMMETRIC:
            return replace(answer, kind="some function")
        return answer

    def _off_policy(self, points: Sequence[Point]) -> tuple[float, float]:
        """Return the smallest and the largest cosine of the expected gradient one step
        after sampling, to the gradient of the target where the policy is then. The step
        is STEP long and raises (or lowers) the target.
        """
        assert self.off_policy
        E = []
        target = []
        for point in points:
            ascent = self.direction * gradient(self.target, point)
            step = STEP * ascent / ascent.norm()
            moved = replace(point, z=point.z + step)
            E.append(self.off_policy(moved, point.z).gradient)
            target.append(self.direction * gradient(self.target, moved))
        return _cosines(E, target)

    def _factors(self, point: Point) -> dict[float, float]:
        """Return each of PASS_RATES with the factor between the expected gradient and
        that of the mean reward there, by least squares.
        """
        factors = {}
        for p in PASS_RATES:
            there = _at_pass_rate(point, p)
            slope = gradient(MEAN_REWARD, there)
            factors[p] = float(self.field(there).gradient @ slope / (slope @ slope))
        return factors


# ---- reading what the user gives -----------------------------------------------------
def _loss_question(
    fn: Any, advantages: Any, group_size: int, hp: Mapping[str, Any]
) -> Question:
    """Make the Question of a loss, or of an objective by its name.

    Args:
        fn: as for `maximizes`.
        advantages: the estimator, by name or as a function; None: the objective's own,
            or leave_one_out of a loss.
        group_size: responses of a group.
        hp: hyperparameters of the loss.

    Raises:
        InputError: the loss cannot be run, or the same batch has two gradients.
    """
    objective = _objective_of(fn)
    if objective is not None:
        objective.resolve(dict(hp))
    loss: Loss = read(fn if objective is None else objective, objective, dict(hp))
    if advantages is None:
        advantages = objective.adv if objective else "leave_one_out"
    name, estimator = _estimator(advantages)
    settings, left_out = _accepted_settings(estimator, group_size)
    with_ties = settings[0].points()[0]
    last = settings[-1].points()[0]
    _refuse_two_answers(loss, last, estimator, group_size)
    ordered = expected.depends_on_order(
        loss.gradient, with_ties, estimator, group_size
    ) or expected.depends_on_order(
        loss.gradient, last, estimator, group_size, z_old=last.z - STEP
    )

    def field(point: Point) -> Expected:
        """Return the expected gradient on policy."""
        return expected.of_loss(
            loss.gradient, point, estimator, group_size, ordered=ordered
        )

    def off_policy(point: Point, z_old: Tensor) -> Expected:
        """Return the expected gradient where the policy of logits z_old sampled."""
        return expected.of_loss(
            loss.gradient, point, estimator, group_size, ordered=ordered, z_old=z_old
        )

    return Question(
        loss.name,
        name,
        settings,
        ("rewards", "responses"),
        MEAN_REWARD,
        1,
        tuple(FUNCTIONS),
        field,
        off_policy,
        group_size,
        _number_of_groups(group_size, ordered),
        left_out,
    )


def _refuse_two_answers(
    loss: Loss, point: Point, estimator: Estimator, group_size: int
) -> None:
    """Raise InputError where two calls on the same batch give two gradients."""
    number = len(point.responses.tokens)
    group = tuple(i % number for i in range(group_size))
    batch = expected.make_batch(point, group, estimator, point.z)
    if not torch.equal(loss.gradient(batch), loss.gradient(batch)):
        raise InputError(
            f"{loss.name} gives two gradients for the same batch: remove its state or its random numbers."
        )


def _objective_of(fn: Any) -> Objective | None:
    """Return the objective that is meant: fn itself, or that of a word without a colon;
    None for a loss. InputError where no objective has the word as its name.
    """
    if isinstance(fn, Objective):
        return fn
    if isinstance(fn, str) and ":" not in fn:
        try:
            return get(fn)
        except InputError as e:
            raise catalog.no_loss(fn, e) from e
    return None


def _estimator(given: Any) -> tuple[str, Estimator]:
    """Return the name and the function of an advantage estimator."""
    if isinstance(given, str) and ":" not in given:
        return given, estimators.get(given)
    function = read_estimator(given, "group_mean", {})

    def estimator(rewards: Tensor, group: Tensor) -> Tensor:
        """Return the advantages of the user's function, [G], as a tensor."""
        outcome = function.outcome(rewards.tolist(), group.tolist())
        if outcome.differs_within_response:
            raise InputError(
                f"{function.name} gives the tokens of a response different advantages: return one for each response."
            )
        return torch.tensor(outcome.A, dtype=rewards.dtype)

    return name_of(given), estimator


def _advantage_question(
    fn: Any, advantages: Any, group_size: int, hp: Mapping[str, Any]
) -> Question:
    """Make the Question of an advantage estimator; `advantages` and `hp` are not used."""
    name, estimator = _estimator(fn)
    settings, left_out = _accepted_settings(estimator, group_size)
    ordered = any(
        expected.is_order_read(estimator, setting.rewards[0], group_size)
        for setting in (settings[0], settings[-1])
    )

    def field(point: Point) -> Expected:
        """Return the expected gradient of the plain policy gradient with it."""
        return expected.of_estimator(point, estimator, group_size, ordered=ordered)

    return Question(
        name,
        "",
        settings,
        ("rewards", "responses"),
        MEAN_REWARD,
        1,
        tuple(FUNCTIONS),
        field,
        group_size=group_size,
        groups=_number_of_groups(group_size, ordered),
        left_out=left_out,
    )


def _kl_question(use: str) -> Callable[..., Question]:
    """Return the function that makes the Question of a KL term, subtracted where `use`,
    one of expected.USES, says.
    """

    def question(
        fn: Any, advantages: Any, group_size: int, hp: Mapping[str, Any]
    ) -> Question:
        """Make the Question of a KL term; only fn is used."""
        if isinstance(fn, str) and ":" not in fn:
            if fn not in kl.ESTIMATORS:
                raise InputError(
                    f"there is no KL estimator {fn!r}: name one of {', '.join(kl.ESTIMATORS)}, or FILE.py:FUNCTION."
                )
            term = replace(read_term(kl.ESTIMATORS[fn]), name=fn)
        else:
            term = read_term(fn)
        # a KL term reads no rewards: one kind of them is enough, and is not named
        settings = [
            replace(setting, words=setting.words[1:]) for setting in _settings()[2:]
        ]
        divergences = tuple(id for id, f in FUNCTIONS.items() if f.is_divergence)
        return Question(
            f"{term.name} {WHERE[use]}",
            "",
            settings,
            ("responses",),
            KL_OF_RESPONSES,
            -1,
            divergences,
            lambda point: expected.of_kl(term, point, use),
        )

    return question


WHERE = {
    "loss": "as a loss",
    "reward": "in the reward of the response",
    "advantage": "in the advantage of its own token",
}
READERS: dict[str, Callable[..., Question]] = {
    "loss": _loss_question,
    "advantage": _advantage_question,
    **{f"kl-{use}": _kl_question(use) for use in expected.USES},
}


def _number_of_groups(size: int, ordered: bool) -> int:
    """Return how many groups of the four responses are listed, each order by itself if
    `ordered`.
    """
    return sum(1 for _ in expected.groups_of(len(ONE_LENGTH.tokens), size, ordered))


# ---- what a field of gradients is ----------------------------------------------------
def named_sum(
    E: Sequence[Tensor], points: Sequence[Point], ids: Sequence[str]
) -> tuple[Term, ...]:
    """Return the smallest sum of named functions whose gradient is E at every policy;
    of several of one size, the first in the order of ids.

    Args:
        E: the expected gradient at each policy.
        points: the policies.
        ids: keys of FUNCTIONS.

    Returns:
        The terms, with factors that are the same at all policies; empty if no sum of up
        to three fits.
    """
    goal = torch.cat(list(E))
    columns = {id: torch.cat([gradient(id, point) for point in points]) for id in ids}
    columns = _without_doubles(columns)
    for size in range(1, MOST_TERMS + 1):
        for chosen in itertools.combinations(columns, size):
            matrix = torch.stack([columns[id] for id in chosen], 1)
            times = torch.linalg.lstsq(matrix, goal[:, None]).solution[:, 0]
            if float((matrix @ times - goal).norm()) <= TOLERANCE * float(goal.norm()):
                return tuple(
                    Term(_rounded(float(factor)), FUNCTIONS[id].words)
                    for factor, id in zip(times, chosen, strict=True)
                )
    return ()


def _without_doubles(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out gradients that are 0, and those that are a multiple of an earlier one."""
    kept: dict[str, Tensor] = {}
    for name, column in columns.items():
        length = float(column.norm())
        if length < ZERO:
            continue
        if all(
            abs(float(column @ other)) < (1 - ZERO**2) * length * float(other.norm())
            for other in kept.values()
        ):
            kept[name] = column
    return kept


def _rounded(x: float) -> float:
    """Return x with five digits if it is within TOLERANCE of that; else x."""
    near = float(f"{x:.5g}")
    return near if abs(near - x) <= TOLERANCE * abs(x) else x


def _cosines(E: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[float, float]:
    """Return the smallest and the largest cosine of pairs of gradients; 0 where one of a
    pair is 0.
    """
    cosines = [
        float(x @ y / max(float(x.norm() * y.norm()), 1e-300))
        for x, y in zip(E, other, strict=True)
    ]
    return min(cosines), max(cosines)


def _is_pass_rate(setting: Setting, points: Sequence[Point]) -> bool:
    """Return whether all rewards are 0 or 1, so that the mean reward is a pass rate."""
    return all(bool(((point.R == 0) | (point.R == 1)).all()) for point in points)


def _at_pass_rate(point: Point, p: float) -> Point:
    """Return the point with its logits moved along the gradient of the mean reward,
    until the right responses have the probability p: found by bisection.
    """
    direction = gradient(MEAN_REWARD, point)
    direction = direction / direction.norm()
    low, high = -50.0, 50.0  # steps at which a probability is 0 or 1 to rounding

    def moved(step: float) -> Point:
        """Return the policy so far along the direction."""
        return replace(point, z=point.z + step * direction)

    def pass_rate(there: Point) -> float:
        """Return the probability of the right responses."""
        return float((there.responses.probabilities(there.z) * there.R).sum())

    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if pass_rate(moved(middle)) < p:
            low = middle
        else:
            high = middle
    return moved((low + high) / 2)


def _named_factor(factors: Mapping[float, float]) -> tuple[Term, ...]:
    """Return the first of FUNCTIONS_OF_RATE whose derivative is proportional to these
    factors, pass rate -> factor, as one term; () where none is.
    """
    for function in FUNCTIONS_OF_RATE.values():
        ratios = [factor / function.derivative(p) for p, factor in factors.items()]
        if max(ratios) - min(ratios) <= TOLERANCE * abs(ratios[0]):
            return (Term(_rounded(ratios[0]), function.words),)
    return ()


def _asymmetry(field: Field, point: Point) -> float:
    """Measure how far the derivative of a field is from symmetric, relative to its
    norm: 0 for a gradient, whose derivative is a matrix of second derivatives.

    Args:
        field: the expected gradient at a policy.
        point: the policy.
    """
    h = DIFFERENCE
    columns = []
    for k in range(len(point.z)):
        unit = torch.zeros_like(point.z)
        unit[k] = h

        def at(steps: int, unit: Tensor = unit) -> Tensor:
            """Return the field so many steps away along this logit."""
            return field(replace(point, z=point.z + steps * unit)).gradient

        columns.append((at(1) - at(-1)) / (2 * h))
    derivative = torch.stack(columns, 1)
    return float((derivative - derivative.T).norm() / derivative.norm())
