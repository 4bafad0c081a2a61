# SPDX-License-Identifier: Apache-2.0
"""What a step's updates did to the tokens, gathered minibatch by minibatch: one line of
steps.jsonl.

Clip fractions, alive and overflow are those of `upref.replay.clipping`, over all tokens
that had an advantage, each with the policy as it stood when its minibatch came up. KLs
and entropies are exact sums over the vocabulary.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from upref import Objective, Rollouts
from upref.replay.clipping import clipping

QUANTILES = torch.tensor([0.001, 0.01, 0.5, 0.99, 0.999], dtype=torch.float64)
CLIPS = {
    "clip_pos_high": "clip/pos_high",
    "clip_neg_low": "clip/neg_low",
    "clip_pos_low": "clip/pos_low",
    "clip_neg_high": "clip/neg_high",
    "alive": "alive",
    "overflow": "overflow",
}


class Tally:
    """Collects what each minibatch of one step saw.

    Args:
        width: T of the step's batch; a minibatch may have fewer columns.
    """

    def __init__(self, width: int):
        self.width = width
        # lp, lp_old, A, mask
        self.rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.entropy: list[Tensor] = []  # where the objective reads it
        self.kl = [0.0, 0.0]  # sum of the KLs of all tokens, and how many
        self.losses: list[float] = []
        self.norms: list[float] = []

    def add(
        self,
        lp: Tensor,
        lp_old: Tensor,
        A: Tensor,
        mask: Tensor,
        entropy: Tensor | None,
        kl_old: Tensor,
        loss: float,
        grad_norm: float,
    ) -> None:
        """Keep what a minibatch saw: all of the policy before its update.

        Args:
            lp: log π_θ of its tokens, [N, T].
            lp_old: likewise of π_old.
            A: [N, 1].
            mask: [N, T].
            entropy: [N, T], or None where the objective does not read it.
            kl_old: KL(π_old ‖ π_θ) of its unmasked tokens, one number each.
            loss: the scalar.
            grad_norm: before clipping.
        """

        def wide(x: Tensor) -> Tensor:
            """Return it with zeros up to the width of the step."""
            return pad(x.detach(), (0, self.width - x.shape[1]))

        self.rows.append((wide(lp), wide(lp_old), A, wide(mask)))
        if entropy is not None:
            self.entropy.append(wide(entropy))
        self.kl[0] += kl_old.double().sum().item()
        self.kl[1] += int(mask.sum())
        self.losses.append(loss)
        self.norms.append(grad_norm)

    def last(self) -> np.ndarray:
        """Return π_old(o_t), π_θ(o_t) and A of the last minibatch's tokens, [n, 3]."""
        lp, lp_old, A, mask = self.rows[-1]
        seen = torch.stack(
            [lp_old.exp()[mask], lp.exp()[mask], A.expand_as(mask)[mask]], 1
        )
        return seen.cpu().numpy()

    def numbers(self, objective: Objective, hp: dict) -> dict[str, float | list[float]]:
        """Return the numbers of the step for steps.jsonl, over all minibatches."""
        lp, lp_old, A, mask = (torch.cat(x) for x in zip(*self.rows, strict=True))
        entropy = torch.cat(self.entropy) if self.entropy else None
        found = clipping(
            objective,
            Rollouts(lp.clamp(max=0), lp_old.clamp(max=0), A, mask, entropy=entropy),
            **hp,
        )
        ratios = (lp - lp_old)[mask].double().exp()
        return {
            "kl_old": self.kl[0] / self.kl[1],
            "grad_norm": float(np.mean(self.norms)),
            "grad_norm_max": max(self.norms),
            "ratio_q": ratios.quantile(QUANTILES.to(ratios.device)).tolist(),
            **{ours: found[theirs] for ours, theirs in CLIPS.items()},
            "loss": float(np.mean(self.losses)),
        }


def entropy(lp: Tensor) -> Tensor:
    """Return -Σ_v p(v) log p(v) in nats, [n], of log-probabilities [n, V].
    `upref.logprobs` takes logits instead.
    """
    return -(lp.exp() * lp).sum(-1)


def kl(lp: Tensor, lq: Tensor) -> Tensor:
    """Return KL(p ‖ q) = Σ_v p(v) (log p(v) - log q(v)) in nats, [n], of
    log-probabilities [n, V].
    """
    return (lp.exp() * (lp - lq)).sum(-1)
