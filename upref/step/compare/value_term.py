# SPDX-License-Identifier: Apache-2.0
"""The value loss of a step that trains a policy and a critic with one backward pass.

loss = -J + c_V mean(l),    l of `upref.critic`, of V(s_t) at the place that predicts token t
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from upref import critic
from upref.errors import InputError
from upref.step.inputs.rows import Row

# distances of V from V_old, in units of ε: on both sides of the clip, and not beside it
DISTANCES = (-2.7, -1.6, -0.7, -0.35, 0.35, 0.7, 1.6, 2.7)
# distances of R from V, in units of ε: no R is halfway between V and V_clip
ERRORS = (-4.0, -2.4, -0.9, 0.9, 2.4, 4.0)


@dataclass(frozen=True)
class ValueTerm:
    """A value loss with its numbers.

    Args:
        loss: its name in `upref.critic`.
        coef: c_V, its coefficient.
        clip: ε, how far a value may move, in the unit of V; `clipped` reads it.
    """

    loss: str
    coef: float
    clip: float = 0.2

    def __post_init__(self) -> None:
        """Refuse an unknown loss, and a coefficient or clip that is not a finite number
        above 0.
        """
        critic.get(self.loss)
        for name, number in (("value_coef", self.coef), ("value_clip", self.clip)):
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not is_number or not 0 < number < float("inf"):
                raise InputError(
                    f"{name} must be a finite number above 0, got {repr(number)[:60]}."
                )

    @property
    def reads_old_values(self) -> bool:
        """Whether the loss reads V_old."""
        return self.loss == "clipped"

    def per_token(
        self, V: Tensor, returns: Tensor, old_values: Tensor | None
    ) -> Tensor:
        """Return the loss of each token.

        Args:
            V: values, [B, T].
            returns: R, [B, T].
            old_values: V_old, [B, T]; None where the loss does not read it.

        Returns:
            [B, T], to be minimized, without the coefficient.
        """
        if not self.reads_old_values:
            return critic.mse(V, returns)
        assert old_values is not None  # `require` was called
        return critic.clipped(V, returns, old_values, clip=self.clip)

    def require(self, rows: Sequence[Row]) -> None:
        """Raise InputError where a row lacks what the loss reads.

        Args:
            rows: of the step.
        """
        needed = ["returns", *(["old_values"] if self.reads_old_values else [])]
        for name in needed:
            if any(getattr(row, name) is None for row in rows):
                raise InputError(
                    f"value={self.loss!r} reads {name}: give every row `{name}`, one number per response token."
                )


def make_value_term(
    value: str | None, coef: float | None, clip: float
) -> ValueTerm | None:
    """Make the value loss of a step.

    Args:
        value: its name; None: the step has none.
        coef: its coefficient.
        clip: how far a value may move.

    Returns:
        The loss with its numbers; None without a name.

    Raises:
        InputError: a name or a number is not possible, or one comes without the other.
    """
    if value is None:
        if coef is not None:
            raise InputError(
                "value_coef is the coefficient of a value loss: pass value='mse' or value='clipped' as well."
            )
        return None
    critic.get(value)
    if coef is None:
        raise InputError(
            f"value={value!r} needs value_coef, the factor of the value loss in the loss of the step. "
            "The value loss of a token is 1/2 (V - R)²; a loss without the 1/2 has twice its factor."
        )
    return ValueTerm(value, coef, clip)


def add_values(rows: Sequence[Row], values: Tensor, clip: float, seed: int) -> None:
    """Give rows old values and returns, so that the clip acts on some tokens and the
    error has both signs.

    Args:
        rows: they are changed.
        values: the critic's values of the response tokens, [B, T].
        clip: ε.
        seed: of the distances.
    """
    rng = np.random.default_rng(seed + 2)
    for row, V in zip(rows, values.detach().double().numpy(), strict=True):
        n = len(row.response)
        row.old_values = (V[:n] - clip * rng.choice(DISTANCES, n)).tolist()
        row.returns = (V[:n] + clip * rng.choice(ERRORS, n)).tolist()
