# SPDX-License-Identifier: Apache-2.0
"""The tables of one framework, and what its losses compute on a batch."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals
from upref.errors import InputError
from upref.rollouts import Rollouts, autograd_gradient, per_response
from upref.verify.faults.losses import LossFault
from upref_frameworks.audits.case import MICRO, TOL, Comparison
from upref_frameworks.audits.components import Component
from upref_frameworks.audits.isolated.pin import Pin
from upref_frameworks.settings import Bare

# (mode, fields, batch, padding) -> the scalar
LossFunction = Callable[[str, dict[str, Any], Rollouts | Bare, float | None], Tensor]


@dataclass(frozen=True)
class Measurement:
    """What a framework computes on the batch of a comparison.

    Attributes:
        in_one: the gradient of -loss with respect to logp, [B, T].
        split: the same, of MICRO micro-batches, one below the other.
        nan_in_padding: whether the loss is NaN when a masked slot holds NaN.
    """

    in_one: Tensor
    split: Tensor
    nan_in_padding: bool


@dataclass(frozen=True)
class Framework:
    """The tables of one framework, from which the audit is made.

    Attributes:
        name: of its folder in upref_frameworks.
        modes: makes the list of all losses that the installed version has.
        comparisons: what is compared with what.
        out_of_scope: losses that are not compared -> why.
        split_reasons: label or mode -> why the gradient of micro-batches differs.
        version: reads the installed version; a framework with a pin does not need it.
        loss: (mode, fields, batch, padding) -> the scalar that is differentiated;
            fields are those of the comparison; masked slots hold the padding, or what
            the batch has there.
        loss_by_names: (mode, config, ...) -> the scalar, in place of `loss`. It is
            called with those arguments that its signature names, of log_prob,
            old_log_prob, advantages, mask, ref_log_prob, entropy, group (the prompt of
            each response), totals and num_micro_batches. config is defaults(mode) with
            the comparison's fields over it.
        defaults: mode -> the fields of the framework's own config class.
        parts: makes the table of what the framework computes beside its losses.
        kernels: makes the table of functions that check_logprobs takes and that are no
            part.
        remarks: sentences that are printed below the table.
        pin: what makes its folder of packages; without one it is imported from the
            running environment.
        one_adv: whether its losses take one advantage per response, [B]; else they get
            [B, T].
        tol: the largest difference that counts as rounding; larger where it computes in
            float32.
    """

    name: str
    _: KW_ONLY
    modes: Callable[[], list[str]]
    comparisons: tuple[Comparison, ...]
    out_of_scope: dict[str, str] = field(default_factory=dict)
    split_reasons: dict[str, LossFault] = field(default_factory=dict)
    version: Callable[[], str] = lambda: "?"
    loss: LossFunction | None = None
    loss_by_names: Callable[..., Tensor] | None = None
    defaults: Callable[[str], dict[str, Any]] = lambda mode: {}
    parts: Callable[[], tuple[Component, ...]] = tuple
    kernels: Callable[[], dict[str, Callable[..., Any]]] = dict
    remarks: Sequence[str] = ()
    pin: Pin | None = None
    one_adv: bool = False
    tol: float = TOL

    def measure(
        self, comparison: Comparison, defaults: dict[str, Any], batch: Rollouts
    ) -> Measurement:
        """Compute all numbers of a loss that the audit compares.

        Args:
            comparison: which of its losses, with which fields of its config.
            defaults: the fields of that loss with their defaults.
            batch: token tensors [B, T] in float64.

        Returns:
            Gradients of the whole batch and of micro-batches; whether NaN spreads.

        Raises:
            InputError: the framework has no such field.
        """
        mode = comparison.mode
        config = self.configured(mode, defaults, comparison.config)

        def loss(rows: Rollouts) -> Tensor:
            """Compute the framework's loss of some rows of the batch."""
            return self.compute_loss(mode, config, rows, None)

        [whole] = batch.split(1)
        poisoned = self.compute_loss(mode, config, whole, math.nan)
        split = [-autograd_gradient(loss, rows) for rows in batch.split(MICRO)]
        return Measurement(
            in_one=-autograd_gradient(loss, whole),
            split=torch.cat(split),
            nan_in_padding=bool(poisoned.isnan()),
        )

    def compute_loss(
        self,
        mode: str,
        config: dict[str, Any],
        batch: Rollouts | Bare,
        padding: float | None,
    ) -> Tensor:
        """Compute the framework's loss of a batch.

        Args:
            mode: which of its losses.
            config: as `configured` returns it.
            batch: token tensors [B, T]; gradients flow into `batch.logp`.
            padding: what masked slots of all token tensors are set to; None leaves in
                them what the batch holds.

        Returns:
            The scalar that the framework minimizes.

        Raises:
            InputError: `loss_by_names` takes an argument that an audit does not have.
        """
        if self.loss_by_names is None:
            assert self.loss is not None
            return self.loss(mode, config, batch, padding)
        loss = partial(self.loss_by_names, mode, config)
        arguments = self._arguments(batch, padding)
        parameters = inspect.signature(loss).parameters
        if unknown := next((name for name in parameters if name not in arguments), ""):
            raise InputError(
                f"the loss of {self.name} takes {unknown!r}, which an audit does not have: it has "
                f"{', '.join(arguments)}."
            )
        return loss(**{name: arguments[name] for name in parameters})

    def _arguments(
        self, batch: Rollouts | Bare, padding: float | None
    ) -> dict[str, Any]:
        """Return all arguments that `loss_by_names` may take, by name; token tensors
        are [B, T]. What the batch lacks is replaced by numbers without an effect.
        """

        def padded(tensor: Tensor) -> Tensor:
            """Return a tensor with masked slots set to the padding, if one is given."""
            return (
                tensor if padding is None else torch.where(batch.mask, tensor, padding)
            )

        # Some losses take the reference policy, the entropy and the groups in every
        # setting. A batch lacks them where the coefficient of their term is 0, or where
        # they are not read: then any finite numbers have the same effect, none.
        logp_ref = batch.logp_old if batch.logp_ref is None else batch.logp_ref
        entropy = batch.entropy
        if entropy is None:
            entropy = torch.ones_like(batch.logp_old)
        group = getattr(batch, "group", None)
        totals = batch.totals or Totals.of(batch.mask, group)
        if group is None:
            group = torch.zeros(len(batch.mask), dtype=torch.int64)
        if self.one_adv:
            advantages = per_response(batch.adv, batch.mask)
        else:
            advantages = padded(batch.adv.expand_as(batch.mask))
        # the batch may be a micro-batch, with the totals of its mini-batch
        sequences_in_minibatch = float(totals.sequences)
        num_micro_batches = max(1, round(sequences_in_minibatch / len(batch.mask)))
        return {
            "log_prob": padded(batch.logp),
            "old_log_prob": padded(batch.logp_old),
            "advantages": advantages,
            "mask": batch.mask,
            "ref_log_prob": padded(logp_ref),
            "entropy": padded(entropy),
            "group": group,
            "totals": totals,
            "num_micro_batches": num_micro_batches,
        }

    def configured(
        self, mode: str, defaults: dict[str, Any], fields: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the config that the framework's function takes.

        Args:
            mode: a loss of the framework.
            defaults: all fields of its config with their defaults.
            fields: field -> value, where it is another one than the default.

        Returns:
            For `loss_by_names` all fields; for `loss`, which knows its defaults, these
            alone.

        Raises:
            InputError: the framework has no such field.
        """
        if self.loss_by_names is None:
            return fields
        if unknown := next((k for k in fields if k not in defaults), ""):
            raise InputError(
                f"{mode} of {self.name} has no setting {unknown!r}: it has {', '.join(defaults)}."
            )
        return defaults | fields
