# SPDX-License-Identifier: Apache-2.0
"""Known faults of per-token KL estimators: what each makes of (log_prob, ref_log_prob)."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from upref.kl import ESTIMATORS, k1, k2, k3
from upref.verify.faults import Fault

Formula = Callable[[Tensor, Tensor], Tensor]
KLFault: TypeAlias = Fault[Formula]

FLIPPED = Fault(
    "k1 with its sign flipped: log π_ref - log π_θ",
    lambda lp, ref: ref - lp,
    id="k1-sign-flipped",
)
INVERTED = Fault(
    "k3 the other way round: it has π_θ/π_ref where π_ref/π_θ belongs",
    lambda lp, ref: k3(ref, lp),
    id="k3-inverted",
)
PLUS = Fault(
    "k3 with the sign of its logarithm swapped: π_ref/π_θ - 1 + log(π_ref/π_θ)",
    lambda lp, ref: (ref - lp).exp() - 1 + (ref - lp),
    id="k3-log-sign-swapped",
)
NEGATIVE = Fault(
    "k3 with its sign flipped", lambda lp, ref: -k3(lp, ref), id="k3-sign-flipped"
)
NO_LOG = Fault(
    "k3 without its logarithm: π_ref/π_θ - 1",
    lambda lp, ref: (ref - lp).exp() - 1,
    id="k3-log-missing",
)
ABSOLUTE = Fault(
    "|log π_θ - log π_ref|", lambda lp, ref: (lp - ref).abs(), id="absolute-log-ratio"
)
SQUARE = Fault(
    "k2 without its 1/2", lambda lp, ref: (lp - ref) ** 2, id="k2-half-missing"
)
WEIGHTED = Fault(
    "π_θ (log π_θ - log π_ref): weighted by a probability though it is sampled",
    lambda lp, ref: lp.exp() * (lp - ref),
    id="k1-times-probability",
)
HALF = Fault(
    "half of |log π_θ - log π_ref|",
    lambda lp, ref: (lp - ref).abs() / 2,
    id="half-absolute-log-ratio",
)
HUBER = Fault(
    "the smooth L1 loss of the log-probabilities",
    lambda lp, ref: smooth_l1_loss(lp, ref, reduction="none"),
    id="smooth-l1",
)
SQUARED = Fault(
    "(π_θ - π_ref)²",
    lambda lp, ref: (lp.exp() - ref.exp()) ** 2,
    id="squared-difference-of-probabilities",
)
DROPPED = Fault(
    "k1 without its values below 0",
    lambda lp, ref: (lp - ref).clamp(min=0),
    id="k1-negative-dropped",
)
FORWARD = Fault(
    "π_ref/π_θ (log π_ref - log π_θ)",
    lambda lp, ref: (ref - lp).exp() * (ref - lp),
    id="k1-sign-flipped-times-inverse-ratio",
)
BACKWARD = Fault(
    "π_ref/π_θ (log π_θ - log π_ref)",
    lambda lp, ref: (ref - lp).exp() * (lp - ref),
    id="k1-times-inverse-ratio",
)


def known() -> Iterator[KLFault]:
    """Yield all known faults of a KL term, in the order in which they are tried."""
    yield from (FLIPPED, INVERTED, PLUS, NEGATIVE, NO_LOG, ABSOLUTE)
    yield Fault("half of k3", lambda lp, ref: k3(lp, ref) / 2, id="k3-halved")
    yield SQUARE
    yield from (WEIGHTED, HALF, HUBER, SQUARED, DROPPED, FORWARD, BACKWARD)
    yield from (
        Fault(f"{name} itself", f, id=f"estimator-{name}")
        for name, f in ESTIMATORS.items()
    )
    for name, k in ESTIMATORS.items():
        yield Fault(
            f"the mean of {name} over each row",
            partial(_mean_over_row, k=k),
            id=f"{name}-averaged-over-row",
        )
        for places, where in ((1, "late"), (-1, "early")):
            yield Fault(
                f"{name}, with ref_log_prob one token too {where}",
                partial(_at_moved_reference, k=k, places=places),
                id=f"{name}-reference-one-token-{where}",
            )
    # last: where only the gradient is compared, k2 itself has the same one
    for name, k in {"k3": k3, "k1": k1}.items():
        yield Fault(
            f"the value of {name} with the gradient of k2 (straight through)",
            partial(_with_gradient_of_k2, k=k),
            id=f"{name}-straight-through",
        )


def _mean_over_row(lp: Tensor, ref: Tensor, k: Formula) -> Tensor:
    """Return the mean of an estimator over each row, on all its tokens."""
    return k(lp, ref).mean(-1, keepdim=True).expand_as(lp)


def _at_moved_reference(lp: Tensor, ref: Tensor, k: Formula, places: int) -> Tensor:
    """Return an estimator with log π_ref moved by so many places to the right; what leaves
    a row comes in on its other side.
    """
    return k(lp, ref.roll(places, -1))


def _with_gradient_of_k2(lp: Tensor, ref: Tensor, k: Formula) -> Tensor:
    """Return the value of an estimator that has the gradient of k2."""
    return k2(lp, ref) + (k(lp, ref) - k2(lp, ref)).detach()
