# SPDX-License-Identifier: Apache-2.0
"""What a step is meant to maximize: the registered objective over the counts of the
whole step, and what is added.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from upref.aggregation import Totals, aggregate
from upref.errors import InputError
from upref.kl import per_token
from upref.registry import Objective
from upref.step.compare.value_term import ValueTerm
from upref.step.inputs.rows import Padded
from upref.verify.factors import TOKEN_SUM, declared_aggregation


class Statistics(NamedTuple):
    """What the terms of a goal read of the model's output, of each response token, [B, T]."""

    lp: Tensor  # log-probability, in nats
    H: Tensor  # entropy, in nats
    Z: Tensor  # (log Σ exp z)²
    V: Tensor | None = None  # the critic's value; None without a value loss


@dataclass(frozen=True)
class Goal:
    """What the step is meant to maximize, and how its gradient is used."""

    objective: Objective
    hp: dict[str, Any]  # resolved, without beta
    temperature: float
    beta: float = 0.0
    entropy_coef: float = 0.0
    z_loss_coef: float = 0.0
    clip: float | None = None  # bound of the gradient's norm
    scale: float = 1.0  # a constant factor that is meant
    # group-token-mean over the rows' groups, else over the whole step
    grouped: bool = False
    value: ValueTerm | None = None  # of a step that trains a critic as well

    def parts(
        self, statistics: Statistics, padded: Padded, agg: str = ""
    ) -> dict[str, Tensor]:
        """Return the terms of the sum that is maximized, without their coefficients.

        Args:
            statistics: of each token.
            padded: the rows, padded.
            agg: aggregation of the KL term, the entropy and the value loss; "": the
                objective's own.

        Returns:
            J, KL, H, Z and V -> a scalar.

        Raises:
            InputError: beta is not 0, and the rows have no `ref`.
        """
        lp, H, Z, V = statistics
        agg = agg or declared_aggregation(self.objective)
        agg = "token-sum" if agg == TOKEN_SUM else agg
        group = padded.group if self.grouped else None
        totals = Totals.of(padded.mask, group)
        # a response without a token that trains counts in the totals, and adds nothing
        trains = padded.mask.any(1)
        old = lp.detach() if padded.old is None else padded.old
        J = self.objective.J(
            lp[trains],
            old[trains],
            padded.adv[trains],
            padded.mask[trains],
            entropy=H.detach()[trains],
            totals=totals.rows(trains.nonzero()[:, 0]),
            lp_sampler=None if padded.sampler is None else padded.sampler[trains],
            **self.hp,
        )
        terms = {"J": J}
        if self.beta and padded.ref is None:
            raise InputError(
                "beta needs the reference model's log-probabilities: give every row `ref`."
            )
        if padded.ref is not None:
            kl = per_token(
                self.objective.kl or "k3",
                *(
                    torch.where(padded.mask, log_probs, 0)
                    for log_probs in (lp, padded.ref, old)
                ),
            )
            terms["KL"] = aggregate(kl, padded.mask, agg, totals=totals)
        terms["H"] = aggregate(H, padded.mask, agg, totals=totals)
        terms["Z"] = aggregate(
            Z, padded.mask, "token-mean", totals=Totals.of(padded.mask)
        )
        if self.value is not None:
            assert V is not None
            assert padded.returns is not None
            errors = self.value.per_token(V, padded.returns, padded.old_values)
            terms["V"] = aggregate(errors, padded.mask, agg, totals=totals)
        return terms

    @property
    def coefficients(self) -> dict[str, float]:
        """The coefficient of each term of J.

        Returns:
            Of the objective J, the KL term, the entropy H, Z = (log Σ exp z)², and the
            value loss V.
        """
        return {
            "J": 1.0,
            "KL": -self.beta,
            "H": self.entropy_coef,
            "Z": -self.z_loss_coef,
            "V": 0.0 if self.value is None else -self.value.coef,
        }

    def loss(self, parts: dict[str, Tensor]) -> Tensor:
        """Add up the terms with their coefficients.

        Args:
            parts: each term as a scalar, by the keys of `coefficients`.

        Returns:
            The loss, to be minimized: a scalar in float64.
        """
        coefficients = self.coefficients
        return -self.scale * sum(
            (coefficients[k] * term for k, term in parts.items() if coefficients[k]),
            torch.zeros((), dtype=torch.float64),
        )
