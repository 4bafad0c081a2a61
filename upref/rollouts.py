# SPDX-License-Identifier: Apache-2.0
"""The batch that every objective reads, validated once at the boundary, and the letters
used everywhere.

lp, lp_old    log π_θ(o_t | q, o_<t) and log π_old(o_t | q, o_<t), in nats, [B, T]
lp_sampler    log μ(o_t | q, o_<t) of the engine that sampled, where it differs from π_old; ρ = exp(lp_old - lp_sampler)
A             advantage, [B, T], or [B, 1] for one number per response
r = exp(lp - lp_old)    token ratio (Eq. 3);    s = exp(mean_t(lp - lp_old))    sequence ratio (Eq. 5)
mu, p         π_old(o_t) and π_θ(o_t) = mu r
mask          True on the tokens of the response, [B, T];    group    prompt id of each response, [B]
eps, eps_low, eps_high, c, beta    clip bounds, dual-clip constant, KL coefficient
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields as fields_of, replace
from functools import cached_property
from typing import Any, get_args

import torch
from jaxtyping import Bool, Float, Int, jaxtyped
from torch import Tensor

from upref.aggregation import Totals
from upref.errors import InputError
from upref.tensors import describe, is_materialized

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BESIDE_MASK = (
    "logp",
    "logp_old",
    "adv",
    "group",
    "logp_ref",
    "entropy",
    "logp_sampler",
)  # on its device


# compared by identity: tensors have no one truth value
@dataclass(frozen=True, eq=False)
class Rollouts:
    """A batch of B sampled responses of at most T tokens: the input of every objective.

    Args:
        logp: log π_θ(o_t) [B, T] in nats, <= 0 and finite on unmasked slots. Masked
            slots may hold anything.
        logp_old: log π_old(o_t), the same.
        adv: advantages, [B, T] or [B, 1].
        mask: [B, T], True on response tokens. Every response has at least one.
        group: prompt id of each response [B]; None: all responses count as one prompt.
        logp_ref: log π_ref(o_t) for a KL term.
        entropy: policy entropy per token in nats; aspo_code and top_entropy(X) need it.
        totals: counts of the mini-batch, if this is one of its micro-batches (see
            `split`).
        logp_sampler: log-probabilities of the inference engine, for sampler
            corrections: upref.transforms.

    Raises:
        InputError: invalid input.
    """

    logp: Float[Tensor, "B T"]
    logp_old: Float[Tensor, "B T"]
    adv: Float[Tensor, "B T"] | Float[Tensor, "B 1"]
    mask: Bool[Tensor, "B T"]
    group: Int[Tensor, " B"] | None = None
    logp_ref: Float[Tensor, "B T"] | None = None
    entropy: Float[Tensor, "B T"] | None = None
    totals: Totals | None = None
    logp_sampler: Float[Tensor, "B T"] | None = None

    def __post_init__(self) -> None:
        """Check the types, the devices, the totals and every column."""
        self._check_types()
        self._check_devices()
        self._check_totals()
        for name in ("logp", "logp_old", "logp_ref", "logp_sampler"):
            x = getattr(self, name)
            if x is not None:
                self._check_logp(name, x)
        self._check_mask()
        self._check_entropy()
        self._check_adv()
        self._check_group()

    def _check_totals(self) -> None:
        """Raise InputError where the totals are not those of these rows."""
        if self.totals is None:
            return
        B = len(self.mask)
        per_row = getattr(self.totals, "group_tokens", None)
        if not isinstance(self.totals, Totals) or (
            isinstance(per_row, Tensor) and per_row.shape not in ((), (B,))
        ):
            raise InputError(
                f"totals must be the mini-batch's Totals, cut to these {B} rows by Totals.rows."
            )

    def _check_mask(self) -> None:
        """Raise InputError for a response without a token."""
        empty = self.mask.view(torch.uint8).amax(1) == 0
        if empty.any():
            raise InputError(
                f"response {_first(empty)[0]} has no unmasked token: drop that row before the loss."
            )

    def _check_entropy(self) -> None:
        """Raise InputError for an entropy that is negative or NaN."""
        if self.entropy is not None and (bad := ~(self.entropy >= 0) & self.mask).any():
            raise InputError(
                f"entropy is {self.entropy[_first(bad)].item()} at {_first(bad)}: give nats, 0 or more."
            )

    def _check_adv(self) -> None:
        """Raise InputError for an advantage that is not finite."""
        least, most = _ends(self.adv)
        if -math.inf < least <= most < math.inf:
            return
        bad = ~self.adv.isfinite()
        if self.adv.shape[1] > 1:
            bad = bad & self.mask
        if bad.any():
            raise InputError(
                f"adv is not finite at {_first(bad)}: check the rewards and the group's standard deviation."
            )

    def _check_group(self) -> None:
        """Raise InputError for a group of one response, in a whole mini-batch."""
        if self.group is None or self.totals is not None:
            return
        ids, counts = self.group.unique(return_counts=True)
        if (counts == 1).any():
            only = ids[counts == 1][0].item()
            raise InputError(
                f"group {only} has one response, so it has no group-relative advantage: sample at least two, "
                "drop it, or pass group=None if the advantages do not come from groups."
            )

    def _plain(self) -> bool:
        """Return whether every field has the commonest types and the right shape: no
        need to ask jaxtyping, which is slow.
        """
        mask = self.mask
        if not (is_materialized(mask) and mask.dtype is torch.bool and mask.ndim == 2):
            return False
        B, T = mask.shape
        log_probs = [self.logp, self.logp_old]
        for optional in (self.logp_ref, self.entropy, self.logp_sampler):
            if optional is not None:
                log_probs.append(optional)
        for x in log_probs:
            if not is_materialized(x) or x.dtype not in FLOATS or x.shape != (B, T):
                return False
        adv = self.adv
        if not is_materialized(adv) or adv.dtype not in FLOATS:
            return False
        if adv.shape not in ((B, T), (B, 1)):
            return False
        group = self.group
        if group is None:
            return True
        if not is_materialized(group) or group.dtype is not torch.int64:
            return False
        return group.shape == (B,)

    def _check_types(self) -> None:
        """Refuse fields of another type or shape than they are declared with."""
        if self._plain() and self.mask.numel():
            return
        with jaxtyped("context"):  # binds B and T over all the fields
            for field in fields_of(self):
                if field.name != "totals":
                    self._check_type(field.name, field.type)
        if self.mask.numel() == 0:
            raise InputError(
                f"the batch is empty (mask has shape {tuple(self.mask.shape)}): give at least one response."
            )

    def _check_type(self, name: str, declared: Any) -> None:
        """Raise InputError where a field has another type or shape than is declared."""
        x = getattr(self, name)
        kinds = get_args(declared) or (declared,)
        is_of_kind = any(isinstance(x, kind) for kind in kinds)
        is_empty_shell = isinstance(x, Tensor) and not is_materialized(x)
        if is_of_kind and not is_empty_shell:
            return
        want = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
        shapes = ""
        if isinstance(self.logp, Tensor):
            shapes = f" (logp is {describe(self.logp)})"
        mend = ""
        if name == "mask" and isinstance(x, Tensor):
            mend = ": pass mask.bool()"
        if name == "adv" and isinstance(x, Tensor) and x.dim() == 1:
            mend = ": pass adv[:, None]"
        raise InputError(f"{name} must be {want}, got {describe(x)}{shapes}{mend}.")

    def _check_devices(self) -> None:
        """Raise InputError where two tensors are on different devices."""
        for name in BESIDE_MASK:
            x = getattr(self, name)
            if x is not None and x.device != self.mask.device:
                raise InputError(
                    f"{name} is on {x.device} and mask on {self.mask.device}: move the batch to one device."
                )

    def _check_logp(self, name: str, x: Tensor) -> None:
        """Refuse log-probabilities above 0, NaN or infinite, on unmasked slots."""
        # a fused log-softmax may overshoot 0 by rounding, not by more
        most = min(100 * torch.finfo(x.dtype).eps, 1e-3)
        low, high = _ends(x)
        if low > -math.inf and high <= most:  # of masked slots too: the usual case
            return
        is_right = (x <= most) & (x > -math.inf)
        if (is_right | ~self.mask).all():
            return
        bad = ~x.isfinite() & self.mask
        if bad.any():
            raise InputError(
                f"{name} is {x[_first(bad)].item()} at {_first(bad)}, an unmasked slot: mask it or fix it."
            )
        first = _first((x > most) & self.mask)
        raise InputError(
            f"{name} is {x[first].item():.4g} > 0 at {first}: log-probabilities are never positive; "
            "are these probabilities, losses or logits?"
        )

    @classmethod
    def unchecked(cls, **fields: Any) -> "Rollouts":
        """Make a batch that is not checked: for one that is being trained on, and one
        that is wrong on purpose.

        Args:
            **fields: as of the constructor; those that are missing are None.

        Returns:
            The batch, right or wrong.
        """
        b = object.__new__(cls)
        b.__dict__.update(dict.fromkeys(cls.__dataclass_fields__) | fields)
        return b

    def but(self, **changes: Any) -> "Rollouts":
        """Return a copy with other fields, which is not checked again.

        Args:
            **changes: fields and what they become.

        Returns:
            The other batch, which shares the tensors that are not changed.
        """
        return self.unchecked(
            **{name: getattr(self, name) for name in self.__dataclass_fields__}
            | changes
        )

    @cached_property
    def one_adv_per_response(self) -> bool:
        """Whether the unmasked advantages of each response are equal."""
        return one_per_response(self.adv, self.mask)

    @cached_property
    def counts(self) -> Totals:
        """The counts of the mini-batch: this batch's own where it is all of it."""
        return self.totals or Totals.of(self.mask, self.group)

    def split(self, n: int) -> "list[Rollouts]":
        """Return n micro-batches whose losses (and gradients) *add up* to this batch's,
        whatever the response lengths. Those of an objective with `batch_coupled` do not,
        and kept-mean refuses parts.

        Each carries the whole mini-batch's `totals`. Data-parallel ranks do the same
        with `Totals.of_lengths` of the gathered lengths and groups, and sum the
        gradients; multiply by the world size where the framework averages.

        Args:
            n: how many parts; those without a response are left out.

        Returns:
            The micro-batches, in the order of the rows.

        Raises:
            InputError: n is no number of parts of this batch.
        """
        if (
            isinstance(n, bool)
            or not isinstance(n, int)
            or not 1 <= n <= max(len(self.mask), 64)
        ):
            raise InputError(
                f"n must be a whole number of parts from 1 to {max(len(self.mask), 64)}, got {n!r}."
            )
        totals = self.counts
        rows = torch.arange(len(self.mask)).tensor_split(n)
        return [self.rows(i, totals) for i in rows if len(i)]

    def rows(self, i: Tensor, totals: Totals) -> "Rollouts":
        """Return some rows of the mini-batch that the totals count, as a checked batch.

        Args:
            i: numbers of responses.
            totals: the counts of the mini-batch.

        Returns:
            A micro-batch.
        """
        cut = {name: x[i] for name, x in self.tensors().items()}
        return replace(self, **cut, totals=totals.rows(i))

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that hold a tensor, by name: all but None and the totals."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: x for name, x in fields.items() if isinstance(x, Tensor)}

    def map(self, change: Callable[[str, Tensor], Tensor]) -> "Rollouts":
        """Return a batch of other tensors, without totals.

        Args:
            change: what becomes of a field, from its name and its tensor.

        Raises:
            InputError: the tensors are no batch.
        """
        changed = {name: change(name, x) for name, x in self.tensors().items()}
        return replace(self, totals=None, **changed)

    def floats(self, dtype: torch.dtype) -> "Rollouts":
        """Return the same batch with every floating-point tensor in this dtype.

        Args:
            dtype: of floating-point numbers.

        Returns:
            The batch; ids, masks and counts are as before.
        """
        cast = {
            name: x.to(dtype)
            for name, x in self.tensors().items()
            if x.is_floating_point()
        }
        return self.but(**cast)

    def take(
        self,
        rows: Sequence[int] | slice | Tensor,
        columns: Sequence[int] | None = None,
    ) -> "Rollouts":
        """Return some rows, and some columns of them, as a batch of its own, without totals.

        Args:
            rows: numbers of responses; some may be taken twice.
            columns: numbers of tokens; None: all.

        Raises:
            InputError: they are no batch, such as a response without a token.
        """

        def cut(name: str, x: Tensor) -> Tensor:
            """Return the part of one field, [B], [B, 1] or [B, T]."""
            part = x[rows]
            takes_all = columns is None or part.ndim == 1 or part.shape[1] == 1
            return part if takes_all else part[:, columns]

        return self.map(cut)


def per_response(A: Tensor, mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Return each response's one advantage: its first unmasked slot's.

    Args:
        A: [B, T] or [B, 1].
        mask: [B, T], with a True in every row.

    Returns:
        [B].
    """
    if A.shape[-1] == 1:
        return A[:, 0]
    return A.gather(1, mask.int().argmax(1, keepdim=True))[:, 0]


def one_per_response(A: Tensor, mask: Bool[Tensor, "B T"]) -> bool:
    """Return whether the unmasked advantages of each response are equal.

    Args:
        A: [B, T] or [B, 1].
        mask: [B, T].

    Returns:
        True where no row has two different ones.
    """
    # of masked slots too: the usual case, in two passes without a copy
    if bool((A.amax(1) == A.amin(1)).all()):
        return True
    return bool(((A == per_response(A, mask)[:, None]) | ~mask).all())


def _ends(x: Tensor) -> tuple[float, float]:
    """Return the least and the greatest number, of masked slots too; NaN where there is
    one. It takes one pass and no copy.
    """
    least, greatest = torch.aminmax(x.detach())
    return least.item(), greatest.item()


def _first(bad: Tensor) -> tuple[int, ...]:
    """Return the index of the first True."""
    return tuple(bad.nonzero()[0].tolist())


def autograd_gradient(f: Callable[[Rollouts], Tensor], batch: Rollouts) -> Tensor:
    """Compute d f(batch) / d logp by autograd.

    Args:
        f: maps Rollouts to a scalar.
        batch: the batch.

    Returns:
        [B, T].
    """
    logp = batch.logp.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(batch.but(logp=logp)), logp)
    return gradient
