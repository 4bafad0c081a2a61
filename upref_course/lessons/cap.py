# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable

from upref.verify.faults import Fault
from upref.weights.capacity import capacity
from upref_course.exercise import Exercise, ExerciseBatch


def cap(p: float, mu: float, A: float, eps_low: float, eps_high: float) -> float:
    """Compute the Probability Capacity under DAPO: the right answer.

    Args:
        p: the token's probability now.
        mu: its probability when it was drawn.
        A: its advantage, not 0.
        eps_low: the lower bound of the ratio is 1 - eps_low.
        eps_high: the upper bound of the ratio is 1 + eps_high.

    Returns:
        A difference of probabilities, 0 or more.
    """
    return float(capacity("dapo", p, mu, A, eps_low=eps_low, eps_high=eps_high))


def batch(shows: str, p: float, mu: float, A: float) -> ExerciseBatch:
    """Make a token with the bounds 0.2 and 0.28.

    Args:
        shows: what it shows, in words.
        p: its probability now.
        mu: its probability when it was drawn.
        A: its advantage.

    Returns:
        A batch whose inputs are the arguments of the exercise.
    """
    return ExerciseBatch(
        shows, {"p": p, "mu": mu, "A": A, "eps_low": 0.2, "eps_high": 0.28}
    )


def by_sign(
    good: Callable[..., float], bad: Callable[..., float]
) -> Callable[..., float]:
    """Join a function for good tokens and one for bad tokens.

    Args:
        good: (p, mu, eps_high) -> the capacity where A > 0.
        bad: (p, mu, eps_low) -> the capacity where A <= 0.

    Returns:
        A function of (p, mu, A, eps_low, eps_high).
    """
    return lambda p, mu, A, low, high: good(p, mu, high) if A > 0 else bad(p, mu, low)


def room_upwards(p: float, mu: float, high: float) -> float:
    """Return how far a good token can rise.

    Args:
        p: its probability now.
        mu: its probability when it was drawn.
        high: eps_high.

    Returns:
        A difference of probabilities, 0 or more.
    """
    return max(0.0, min(1.0, (1 + high) * mu) - p)


def room_downwards(p: float, mu: float, low: float) -> float:
    """Return how far a bad token can fall.

    Args:
        p: its probability now.
        mu: its probability when it was drawn.
        low: eps_low.

    Returns:
        A difference of probabilities, 0 or more.
    """
    return max(0.0, p - (1 - low) * mu)


EXERCISE = Exercise(
    number=5,
    slug="probability-capacity",
    title="how far a token may go",
    function="cap",
    value=True,
    right=cap,
    batches=(
        batch("a rare good token that has not moved", 0.01, 0.01, 1.0),
        batch("a rare good token that is past its bound", 0.02, 0.01, 1.0),
        batch("a good token that has become less likely", 0.005, 0.01, 1.0),
        batch("a likely good token: probabilities end at 1", 0.9, 0.9, 1.0),
        batch("a bad token that has not moved", 0.5, 0.5, -1.0),
        batch("a bad token that is below its bound", 0.3, 0.5, -1.0),
        batch("a bad token that has become more likely", 0.9, 0.5, -1.0),
    ),
    faults=(
        Fault(
            "below 0 where the bound is passed",
            by_sign(
                lambda p, mu, h: min(1.0, (1 + h) * mu) - p,
                lambda p, mu, lo: p - (1 - lo) * mu,
            ),
            id="capacity-below-zero",
            hint="past its bound a token has no gradient left: its capacity is 0, not negative. max(0, ...).",
        ),
        Fault(
            "a probability above 1",
            by_sign(lambda p, mu, h: max(0.0, (1 + h) * mu - p), room_downwards),
            id="capacity-above-one",
            hint="(1 + eps_high) 0.9 is more than 1, and no token can go there: min(1, ...).",
        ),
        Fault(
            "both: below 0 where the bound is passed, and above 1",
            by_sign(
                lambda p, mu, h: (1 + h) * mu - p, lambda p, mu, lo: p - (1 - lo) * mu
            ),
            id="capacity-not-limited",
            hint="the room ends at 1, and it is never less than 0.",
        ),
        Fault(
            "the room of a token that has not moved: p is left out",
            by_sign(lambda p, mu, h: h * mu, lambda p, mu, lo: lo * mu),
            id="capacity-without-p",
            hint="eps_high mu is how far it is from mu to the bound. The token is at p now.",
        ),
        Fault(
            "the bound depends on p, not on mu",
            by_sign(
                lambda p, mu, h: max(0.0, min(1.0, (1 + h) * p) - p),
                lambda p, mu, lo: max(0.0, p - (1 - lo) * p),
            ),
            id="bound-of-p",
            hint="the window moves with the policy that drew the sample, mu; p is where the token is now.",
        ),
        Fault(
            "the room in the ratio, not in the probability",
            by_sign(
                lambda p, mu, h: max(0.0, 1 + h - p / mu),
                lambda p, mu, lo: max(0.0, p / mu - (1 - lo)),
            ),
            id="capacity-in-ratio",
            hint="1 + eps_high - r is how far r may go. In probability that is mu times as much.",
        ),
        Fault(
            "the sign of A is ignored",
            lambda p, mu, A, low, high: room_upwards(p, mu, high),
            id="sign-of-a-ignored",
            hint="a bad token goes down: its room is from p down to its lower bound, (1 - eps_low) mu.",
        ),
        Fault(
            "a bad token is clipped at the upper bound",
            by_sign(
                room_upwards,
                lambda p, mu, lo: (
                    max(0.0, p - (1 - lo) * mu) if p <= 1.28 * mu else 0.0
                ),
            ),
            id="negative-tokens-clipped-above",
            hint="for A < 0 the clip acts below (1 - eps_low) mu only. How far is it from p down to there?",
        ),
        Fault(
            "a bad token's room ends at 0, not at its lower bound",
            by_sign(room_upwards, lambda p, mu, lo: p),
            id="no-lower-clip",
            hint="it loses its gradient at (1 - eps_low) mu, before it is at 0.",
        ),
        Fault(
            "eps_low and eps_high have changed places",
            lambda p, mu, A, low, high: (
                room_upwards(p, mu, low) if A > 0 else room_downwards(p, mu, high)
            ),
            id="clip-sides-swapped",
            hint="upwards it is eps_high, downwards eps_low.",
        ),
        Fault(
            "downwards the difference is the wrong way round",
            by_sign(room_upwards, lambda p, mu, lo: max(0.0, (1 - lo) * mu - p)),
            id="capacity-negated-downwards",
            hint="a bad token is above its bound as long as it has room: p minus the bound.",
        ),
    ),
    notice="this is the room of a token's own gradient. It does not bound the policy: a token can move past it.",
)
