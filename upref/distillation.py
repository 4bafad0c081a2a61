# SPDX-License-Identifier: Apache-2.0
"""Losses that pull a student towards a teacher: a divergence of two distributions over the vocabulary, for each token.

    z, z_T     logits of the student and of the teacher, [B, T, V];  τ the temperature
    π, π_T     softmax(z / τ), softmax(z_T / τ)

    reverse_kl   Σ_v π (log π - log π_T)                                  KL(π ‖ π_T)
    forward_kl   Σ_v π_T (log π_T - log π)                                KL(π_T ‖ π)
    jsd          β KL(π_T ‖ m) + (1 - β) KL(π ‖ m),  m = β π_T + (1 - β) π   GKD (arXiv 2306.13649)

A truncation keeps the k most likely tokens of one of the two: `student_top_k(X)`, `teacher_top_k(X)`. What becomes of the
rest is part of the name:

    X_top_k            the sum over these tokens alone: no divergence any more, it may be negative
    X_top_k_tail       the rest is one more token, with the probability that is left
    X_top_k_renormalized   both distributions are normalized over these tokens

Where only the sampled token's two log-probabilities are known, a loss needs the right gradient *in expectation over
samples of π*, and its value means nothing:

    sampled_reverse_kl   sg(log π - log π_T) log π(o)      its expected gradient is that of KL(π ‖ π_T) of this token
    sampled_forward_kl   -sg(π_T / π) log π(o)             its expected gradient is that of KL(π_T ‖ π)

log π - log π_T itself (k1), used as a loss, has the expected gradient 0. (log π - log π_T)² / 2 (k2) has the gradient of
sampled_reverse_kl. A constant added to every token's weight changes nothing in expectation: k3 has the gradient of
sampled_forward_kl plus that of log π(o). Effects on later tokens are left out by all of these:
`upref.token_advantages.minillm` has them.

The teacher is a constant: no gradient flows into it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from upref import catalog
from upref.errors import InputError
from upref.tensors import describe, is_materialized

Logits = Float[Tensor, "*N V"]
PerToken = Float[Tensor, "*N"]


# ---- divergences of log-probabilities ------------------------------------------------
def reverse_kl(lp: Logits, lp_teacher: Logits) -> PerToken:
    """Return KL(π ‖ π_T) = Σ_v π (log π - log π_T).

    Args:
        lp: log π, in nats.
        lp_teacher: log π_T.

    Returns:
        Nats, one number per distribution.
    """
    _check_pair(lp, lp_teacher)
    return _weighted(lp, lp - lp_teacher)


def forward_kl(lp: Logits, lp_teacher: Logits) -> PerToken:
    """Return KL(π_T ‖ π) = Σ_v π_T (log π_T - log π).

    Args:
        lp: log π, in nats.
        lp_teacher: log π_T.

    Returns:
        Nats, one number per distribution.
    """
    _check_pair(lp, lp_teacher)
    return _weighted(lp_teacher, lp_teacher - lp)


def jsd(lp: Logits, lp_teacher: Logits, *, beta: float = 0.5) -> PerToken:
    """Return β KL(π_T ‖ m) + (1 - β) KL(π ‖ m), m = β π_T + (1 - β) π: GKD's generalized divergence.

    TRL's ends are forward_kl for β = 0 and reverse_kl for β = 1, where this formula is 0.

    Args:
        lp: log π, in nats.
        lp_teacher: log π_T.
        beta: between 0 and 1, without the ends.

    Returns:
        Nats, one number per distribution.

    Raises:
        InputError: beta is outside.
    """
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 < beta < 1:
        raise InputError(
            f"beta must be between 0 and 1, got {repr(beta)[:60]}: at 0 use forward_kl, at 1 reverse_kl."
        )
    _check_pair(lp, lp_teacher)
    weights = torch.tensor([1 - beta, beta], dtype=lp.dtype, device=lp.device).log()
    is_impossible = (lp == -torch.inf) & (lp_teacher == -torch.inf)
    both = torch.stack([lp + weights[0], lp_teacher + weights[1]])
    m = torch.logsumexp(both.masked_fill(is_impossible, 0.0), dim=0)
    return beta * _weighted(lp_teacher, lp_teacher - m) + (1 - beta) * _weighted(
        lp, lp - m
    )


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (reverse_kl, forward_kl, jsd)
}


def _check_pair(lp: Tensor, lp_teacher: Tensor) -> None:
    """Raise InputError for what are no two tensors of one shape, the first of floats."""
    fits = is_materialized(lp) and is_materialized(lp_teacher)
    if not fits or lp.shape != lp_teacher.shape or not lp.is_floating_point():
        raise InputError(
            f"lp and lp_teacher must be tensors of floating-point numbers of one shape, got {describe(lp)} and "
            f"{describe(lp_teacher)}."
        )


def _weighted(log_weight: Tensor, x: Tensor) -> Tensor:
    """Return Σ_v exp(log_weight) x; a token of probability 0 adds 0."""
    is_possible = log_weight > -torch.inf
    terms = log_weight.exp() * torch.where(is_possible, x, 0)
    return torch.where(is_possible, terms, 0).sum(-1)


# ---- truncations ---------------------------------------------------------------------
def _top_k(lp: Tensor, lp_teacher: Tensor, k: int, by: Tensor) -> tuple[Tensor, Tensor]:
    """Return both log-probabilities over the k tokens most likely by one of the two.

    Args:
        lp, lp_teacher: log π and log π_T, [..., V].
        k: how many tokens; all where there are fewer.
        by: the log-probabilities that choose the tokens, [..., V].

    Returns:
        [..., k] each, the likeliest first.
    """
    index = by.topk(min(k, by.shape[-1]), -1).indices
    return lp.gather(-1, index), lp_teacher.gather(-1, index)


def _tail(lp: Tensor, lp_teacher: Tensor, k: int, by: Tensor) -> tuple[Tensor, Tensor]:
    """Return the k tokens as `_top_k` does, with the log-probability that is left as
    one more token; without it where all tokens are kept.
    """
    index = by.topk(min(k, by.shape[-1]), -1).indices
    is_kept = torch.zeros_like(by, dtype=torch.bool).scatter(-1, index, True)

    def with_rest(x: Tensor) -> Tensor:
        """Return the kept log-probabilities, and the log-probability of the rest."""
        rest = x.masked_fill(is_kept, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([x.gather(-1, index), rest], -1)

    if is_kept.all():
        return _top_k(lp, lp_teacher, k, by)
    return with_rest(lp), with_rest(lp_teacher)


def _renormalized(
    lp: Tensor, lp_teacher: Tensor, k: int, by: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the k tokens as `_top_k` does, both distributions normalized over them."""
    first, second = _top_k(lp, lp_teacher, k, by)
    return first.log_softmax(-1), second.log_softmax(-1)


class Truncation(NamedTuple):
    """A way to leave out tokens.

    Attributes:
        of_student: whether the k tokens are the student's likeliest; else the teacher's.
        truncate: (log π, log π_T, k, the log-probabilities that choose the k tokens) ->
            both over the tokens that are kept.
    """

    of_student: bool
    truncate: Callable[[Tensor, Tensor, int, Tensor], tuple[Tensor, Tensor]]


TRUNCATIONS = {
    "student_top_k": Truncation(True, _top_k),
    "student_top_k_tail": Truncation(True, _tail),
    "student_top_k_renormalized": Truncation(True, _renormalized),
    "teacher_top_k": Truncation(False, _top_k),
    "teacher_top_k_tail": Truncation(False, _tail),
    "teacher_top_k_renormalized": Truncation(False, _renormalized),
}


# ---- sampled tokens ------------------------------------------------------------------
def sampled_reverse_kl(lp: PerToken, lp_teacher: PerToken) -> PerToken:
    """Return sg(log π - log π_T) log π(o): its gradient is, in expectation, that of KL(π ‖ π_T) of this token.

    Args:
        lp: log π(o) of the tokens that π sampled, in nats.
        lp_teacher: log π_T(o).

    Returns:
        One number per token. Its value means nothing.
    """
    _check_pair(lp, lp_teacher)
    return (lp - lp_teacher).detach() * lp


def sampled_forward_kl(lp: PerToken, lp_teacher: PerToken) -> PerToken:
    """Return -sg(π_T/π) log π(o): its gradient is, in expectation, that of KL(π_T ‖ π) of this token.

    Args:
        lp: log π(o) of the tokens that π sampled, in nats.
        lp_teacher: log π_T(o).

    Returns:
        One number per token. Its value means nothing.
    """
    _check_pair(lp, lp_teacher)
    return -(lp_teacher - lp).detach().exp() * lp


SAMPLED: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (sampled_reverse_kl, sampled_forward_kl)
}


# ---- by name -------------------------------------------------------------------------
@dataclass(frozen=True)
class Distillation:
    """A divergence of a student's and a teacher's logits, for each token. Call it.

    Attributes:
        name: such as reverse_kl, or student_top_k_tail(reverse_kl).
        divergence: a key of DIVERGENCES.
        truncation: a key of TRUNCATIONS, or "".
    """

    name: str
    divergence: str
    truncation: str = ""

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Name -> default value."""
        hp: dict[str, float] = {"temperature": 1.0}
        if self.truncation:
            hp["k"] = 8
        if self.divergence == "jsd":
            hp["beta"] = 0.5
        return hp

    def __call__(
        self,
        student_logits: Float[Tensor, "B T V"],
        teacher_logits: Float[Tensor, "B T V"],
        **hp: Any,
    ) -> Float[Tensor, "B T"]:
        """Return the divergence of each token, to be minimized.

        Args:
            student_logits: z, [B, T, V]; gradients flow into it alone.
            teacher_logits: z_T, of the same shape.
            **hp: temperature, k of a truncation, beta of jsd.

        Returns:
            Nats, [B, T].

        Raises:
            InputError: the shapes differ, or a setting is unknown or out of range.
        """
        fits = is_materialized(student_logits) and is_materialized(teacher_logits)
        if (
            not fits
            or student_logits.shape != teacher_logits.shape
            or not student_logits.ndim
            or not student_logits.is_floating_point()
        ):
            raise InputError(
                f"student_logits and teacher_logits must be tensors of one shape [B, T, V], got "
                f"{describe(student_logits)} and {describe(teacher_logits)}."
            )
        if unknown := [key for key in hp if key not in self.hyperparameters]:
            raise InputError(
                f"{self.name} has no setting {unknown[0]!r}; it takes {', '.join(self.hyperparameters)}."
            )
        values = self.hyperparameters | hp
        for key in ("temperature", "k"):
            value = values.get(key, 1)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"{key} must be a number, got {repr(value)[:60]}.")
            if not 0 < value < 1e9:
                raise InputError(f"{key} must be above 0 and below 1e9, got {value:g}.")
            if key == "k" and value != int(value):
                raise InputError(f"k must be a whole number, got {value:g}.")
        temperature = values["temperature"]
        lp = (student_logits / temperature).log_softmax(-1)
        lp_teacher = (teacher_logits.detach() / temperature).log_softmax(-1)
        if self.truncation:
            truncation = TRUNCATIONS[self.truncation]
            by = (lp if truncation.of_student else lp_teacher).detach()
            lp, lp_teacher = truncation.truncate(lp, lp_teacher, int(values["k"]), by)
        own = {"beta": values["beta"]} if "beta" in values else {}
        return DIVERGENCES[self.divergence](lp, lp_teacher, **own)


def names() -> list[str]:
    """Return the names of all divergences, whole and truncated, and of sampled forms."""
    truncated = [f"{t}({d})" for t in TRUNCATIONS for d in DIVERGENCES]
    return [*DIVERGENCES, *truncated, *SAMPLED]


def get(name: str) -> Distillation:
    """Return the divergence of this name.

    Args:
        name: a key of DIVERGENCES, or TRUNCATION(DIVERGENCE).

    Raises:
        InputError: there is none, with the nearest name.
    """
    match = (
        re.fullmatch(r"(?:(\w+)\()?(\w+)\)?", name) if isinstance(name, str) else None
    )
    if name in SAMPLED:
        raise InputError(
            f"{name} compares sampled tokens, without logits: call upref.distillation.{name}(lp, lp_teacher)."
        )
    if not match or name not in names():
        raise catalog.unknown_distillation(
            name, [n for n in names() if n not in SAMPLED]
        )
    return Distillation(name, match[2], match[1] or "")
