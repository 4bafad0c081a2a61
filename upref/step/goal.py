# SPDX-License-Identifier: Apache-2.0
"""What a step is meant to maximize: the registered objective over the counts of the
whole step, and what is added.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals, aggregate
from upref.errors import InputError
from upref.kl import per_token
from upref.registry import Objective
from upref.step.rows import Padded
from upref.verify.factors import TOKEN_SUM, declared_aggregation


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

    def parts(
        self, lp: Tensor, H: Tensor, Z: Tensor, padded: Padded, agg: str = ""
    ) -> dict[str, Tensor]:
        """Return the terms of the sum that is maximized, without their coefficients.

        Args:
            lp, H, Z: log-probability, entropy and squared log-normalizer of each token, [B, T].
            padded: the rows, padded.
            agg: aggregation of the KL term and the entropy; "": the objective's own.

        Returns:
            J, KL, H and Z -> a scalar.
        """
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
        return terms

    @property
    def coefficients(self) -> dict[str, float]:
        """The coefficient of each term of J.

        Returns:
            Of the objective J, the KL term, the entropy H, and Z = (log Σ exp z)².
        """
        return {
            "J": 1.0,
            "KL": -self.beta,
            "H": self.entropy_coef,
            "Z": -self.z_loss_coef,
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
