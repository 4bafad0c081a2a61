# SPDX-License-Identifier: Apache-2.0
"""The gradients of J, of the KL term, of the entropy bonus and of the z-loss by themselves, and their coefficients."""

from dataclasses import dataclass

import torch
from torch import Tensor

from upref.step.forward import Forward, added
from upref.step.goal import Goal
from upref.step.reference import Gradient
from upref.step.rows import Padded


@dataclass
class Terms:
    """The gradients of J, KL, H and Z, each of its own, negative as a loss has them."""

    goal: Goal
    each: dict[str, Gradient]
    slope: Tensor  # d(J - β KL)/dlp
    lp: Tensor

    @classmethod
    def of(cls, goal: Goal, forward: Forward, b: Padded) -> "Terms":
        lp, H, Z = forward.statistics()
        parts = goal.parts(lp, H, Z, b)
        c = goal.coefficients
        each = {k: added(forward.by_row(-v)) for k, v in parts.items()}
        (slope,) = torch.autograd.grad(
            goal.scale * (parts["J"] + (c["KL"] * parts["KL"] if "KL" in parts else 0)), lp, retain_graph=True
        )
        return cls(goal, each, slope.detach(), lp.detach())

    @property
    def bonuses(self) -> list[Gradient]:
        return [self.each["H"], self.each["Z"]]

    def without_bonus(self, g: Gradient) -> Gradient:
        c, s = self.goal.coefficients, self.goal.scale
        return {n: v - s * sum(c[k] * self.each[k][n] for k in ("H", "Z")) for n, v in g.items()}

    def coefficients(self, g: Gradient, bound: float) -> str:
        """The coefficients at which the terms of the objective add up to g, where they do."""
        c, names = self.goal.coefficients, [*self.each]
        flat = lambda x: torch.cat([x[n].expand_as(g[n]).reshape(-1) for n in g])
        G, y = torch.stack([flat(self.each[k]) for k in names], 1), flat(g) / self.goal.scale
        size = G.norm(dim=0).clamp(min=1e-300)
        x = torch.linalg.lstsq(G / size, y[:, None], driver="gelsd").solution[:, 0] / size
        rest = (G @ x - y).norm() / y.norm()
        if rest > bound or abs(x[0] - 1) > 1e-3:
            return ""
        words = {"J": "the policy term", "KL": "the KL term", "H": "the entropy bonus", "Z": "the z-loss"}
        said = []
        for k, v in zip(names, x.tolist(), strict=True):
            effect = abs(v - c[k]) * size[names.index(k)] / y.norm()
            if effect > 2 * bound:
                sign = -1 if k in ("KL", "Z") else 1
                said.append(f"the coefficient of {words[k]} is {sign * v + 0.0:.4g}, not {sign * c[k] + 0.0:.4g}")
        return "; ".join(said)
