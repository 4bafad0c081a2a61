# SPDX-License-Identifier: Apache-2.0
"""A user-supplied loss as one frozen type: a function of Rollouts to the scalar that an
optimizer would minimize.

One file, for the call and every measurement of it share their inputs."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from upref.aggregation import Totals, aggregate
from upref.errors import Gone, InputError, describe_kind
from upref.ops import recorded_sg
from upref.registry import Objective
from upref.result import name_first
from upref.rollouts import Rollouts, per_response
from upref.user_code import names
from upref.user_code.arrays import ArrayFunction, advice_on_array
from upref.user_code.function import is_same
from upref.user_code.guard import call_guarded, state_restored, stopped
from upref.user_code.settings import describe_fields

MAIN = ("logp", "logp_old", "adv", "mask")
SHAPES = {"BT": "[B, T]", "B1": "[B, 1]", "B": "[B]"}
FIRST = "first"  # [B, T], of which only the first column is read
ROWS = "rows"  # [B, T], one number for all tokens of a response
# the form of a result, and what of the aggregation it leaves to its caller, in words
SCALAR, PER_RESPONSE, UNREDUCED = "scalar", "per-response", "unreduced"
LEFT_TO_CALLER = {
    SCALAR: "",
    PER_RESPONSE: "the mean over responses, which its caller takes",
    UNREDUCED: "the aggregation, which its caller does",
}
# where the loss stands in such an answer
ALSO_LIVE = "its first element; another one has a gradient too"


@dataclass(frozen=True)
class LossOutcome:
    """What one call of a loss did.

    value: the scalar. form: a key of LEFT_TO_CALLER.
    """

    value: Tensor
    form: str
    # where the loss stood in a tuple or a dict, in words; empty where it was the answer
    # itself
    wrapped: str
    attached: bool  # it has a gradient
    wrote: frozenset[str]  # roles whose tensors it changed
    printed: bool
    calls_backward: bool = False  # it called .backward() itself
    # dJ/dlp that this left, where the loss that it returned has a gradient of its own
    # too
    own_gradient: Tensor | None = None


def _unchanged(batch: Rollouts) -> Rollouts:
    """Return the batch itself."""
    return batch


def _ones(batch: Rollouts) -> Tensor:
    """Return factors of 1, [B, 1]."""
    return torch.ones(len(batch.mask), 1, dtype=batch.logp.dtype)


class OtherInputs(NamedTuple):
    """Another way in which a trainer may give a loss the same batch.

    Attributes:
        words: what is given, or left out.
        call: as `Loss.call`, with these inputs.
        advice: what it costs if the gradient is not the one that is due.
        prepare: makes the batch on which both ways are compared.
        factor: what the gradient is multiplied by where the inputs have weights, [B, 1].
    """

    words: str
    call: Callable[[dict[str, Any], dict[str, Any]], Any]
    advice: str
    prepare: Callable[[Rollouts], Rollouts] = _unchanged
    factor: Callable[[Rollouts], Tensor] = _ones


@dataclass(frozen=True)
class Loss:
    """Call it on Rollouts for the scalar to minimize; `gradient` is dJ/dlp = -d loss/d
    logp, [B, T].

    call: inputs by role and hyperparameters by the objective's names, to whatever the
    function answers.
    """

    name: str
    call: Callable[[dict[str, Any], dict[str, Any]], Any] = field(repr=False)
    # what it is compared with: says how an unreduced answer is aggregated
    objective: Objective
    reads: frozenset[str]  # roles it takes
    # hyperparameters of the objective that it takes by name
    accepts: frozenset[str] = frozenset()
    accepts_kwargs: bool = False  # it has **kwargs
    # hyperparameters handed to it
    bound_args: dict[str, Any] = field(default_factory=dict)
    framework: str = ""
    read_as: str = ""
    assumptions: tuple[str, ...] = ()
    # optional arguments for the sampler's numbers, which are left at None
    unfed: tuple[str, ...] = ()
    takes_batch: bool = False  # it takes the whole batch in one argument
    adv_shape: str = "BT"
    float_mask: bool = False
    form: str = SCALAR
    # where it stands in the answer, in words; empty where it is the answer
    wrapped: str = ""
    calls_backward: bool = False  # it calls .backward() itself
    # ... and returns a loss that has a gradient too: its caller gets the sum
    returns_live: bool = False
    # the Question of each call of the function; None where a question took several calls
    log: list[Any] = field(default_factory=list, repr=False, compare=False)
    # of Python that a call may run before it is stopped, 0 for any number
    lines: int = 0
    # of its framework's config that were set; None where there is none
    fields: dict[str, Any] | None = None
    # what the framework ships for these fields
    defaults: dict[str, Any] = field(default_factory=dict)
    defaults_called: str = "shipped"  # what the defaults are to this loss
    # who passes it the counts of the mini-batch, and in what; empty where its arguments
    # say
    counts_from: str = ""
    # parts of it that its settings leave out of the comparison, in words
    switched_off: tuple[str, ...] = ()
    # inputs that its trainer may give it, and that no comparison gives it
    never_given: tuple[str, ...] = ()
    # other ways in which its trainer may give it a batch
    given_otherwise: tuple["OtherInputs", ...] = ()
    # hyperparameters that were given, and that none of its arguments takes
    unbound: dict[str, Any] = field(default_factory=dict)
    # hyperparameters of which it has a default of its own that was left as it is
    own_defaults: dict[str, float] = field(default_factory=dict)
    # the error where it fails, and its two policies were read by position alone
    order_unknown: str = ""
    # the function of another array library that computes it; None: it is torch's own
    arrays: ArrayFunction | None = None
    # a Loss: itself as shipped, where it was matched
    shipped: Any = field(default=None, repr=False)

    def exchanged(self) -> "Loss":
        """Return the same function with its two policies in the other order.

        Returns:
            Another Loss, with an empty log.
        """

        def call(full: dict[str, Any], settings: dict[str, Any]) -> Any:
            """Return what the function returns with the old log-probabilities for the new
            ones, and the other way round.
            """
            exchanged = {"logp": full["logp_old"], "logp_old": full["logp"]}
            return self.call(full | exchanged, settings)

        return replace(self, call=call, log=[], order_unknown="")

    @property
    def reads_ranks(self) -> bool:
        """Whether the loss multiplies itself by the number of ranks."""
        return self.framework == "verl" or "ranks" in self.reads

    @property
    def settings(self) -> str:
        """The fields of its framework's config that were set, in words; empty where it
        has no config.
        """
        if self.fields is None:
            return ""
        said = describe_fields(self.fields, self.defaults, self.defaults_called)
        return f"sets {said}" if self.fields else "as shipped"

    @property
    def unfed_words(self) -> list[str]:
        """What it makes of optional arguments that no comparison gives it, in words."""
        return [
            f"what it makes of {name}, which is left at None" for name in self.unfed
        ]

    @property
    def micro_batchable(self) -> bool:
        """Whether the losses of micro-batches can be added up to that of a mini-batch."""
        return self.form != SCALAR or bool({"totals", "parts"} & self.reads)

    @property
    def left_to_caller(self) -> str:
        """What of the aggregation its caller does, in words; empty: nothing."""
        return LEFT_TO_CALLER[self.form]

    @property
    def equal_cuts(self) -> bool:
        """Whether it is called with micro-batches of equal size only. It is told their
        number, which does not describe others.
        """
        return self.framework == "trl" or "parts" in self.reads

    def visible_batch(self, batch: Rollouts) -> Rollouts:
        """Return the batch without groups, if the loss does not take them; else the batch
        itself. Without groups, a batch that has no totals gets those of its mask.

        Args:
            batch: the batch.
        """
        if "group" in self.reads:
            return batch
        return batch.but(group=None, totals=batch.totals or Totals.of(batch.mask))

    def given(self, batch: Rollouts, ranks: int = 1) -> dict[str, Any]:
        """Return what the loss is given of a batch, by role. Masked slots are as they
        are, and the tensors are the batch's own.

        Args:
            batch: the batch.
            ranks: the number of data-parallel ranks that it is told.

        Returns:
            Role -> input.
        """
        adv = self._advantages(batch)
        mask = batch.mask.to(batch.logp.dtype) if self.float_mask else batch.mask
        totals = batch.counts
        given: dict[str, Any] = {
            "logp": batch.logp.detach(),
            "logp_old": batch.logp_old,
            "adv": adv,
            "mask": mask,
            "totals": totals,
            "ranks": ranks,
            # micro-batches of this size in the mini-batch
            "parts": max(1, round(float(totals.sequences) / len(batch.mask))),
        }
        optional = {
            "logp_ref": batch.logp_ref,
            "logp_sampler": batch.logp_sampler,
            "group": batch.group,
            "entropy": batch.entropy,
        }
        for policy in ("logp_ref", "logp_sampler"):
            if optional[policy] is None:
                optional[policy] = batch.logp_old
        if optional["group"] is None:
            optional["group"] = torch.zeros(len(batch.mask), dtype=torch.int64)
        if optional["entropy"] is None:
            optional["entropy"] = torch.ones_like(batch.logp_old)
        takes_all = self.takes_batch or bool(self.framework)
        for role, value in optional.items():
            if takes_all or role in self.reads:
                given[role] = value
        return given

    def _advantages(self, batch: Rollouts) -> Tensor:
        """Return the advantages of a batch in the shape in which the loss takes them."""
        of_tokens = batch.adv.expand_as(batch.mask)
        if self.adv_shape in ("BT", ROWS):
            return of_tokens
        of_responses = per_response(of_tokens, batch.mask)
        column = of_responses[:, None]
        by_shape = {
            "B": of_responses,
            "B1": column,
            FIRST: column.expand(batch.mask.shape),
        }
        return by_shape[self.adv_shape]

    def run(
        self,
        inputs: dict[str, Any],
        originals: dict[str, Any],
        batch: Rollouts,
        overrides: dict[str, Any] | None = None,
        leaves: tuple[Tensor, ...] = (),
    ) -> LossOutcome:
        """Call the loss once on these inputs.

        Args:
            inputs: the inputs; what the loss writes to them is found by comparing them
                with `originals`.
            originals: the same numbers in other tensors.
            batch: the batch that the inputs are of.
            overrides: hyperparameters with other values.
            leaves: the tensors from which inputs were computed, that of log_prob first;
                by default they are the inputs.

        Returns:
            The value, and what else the call did.

        Raises:
            InputError: the loss raises, or does not return a loss.
        """
        leaves = leaves or tuple(
            v
            for v in inputs.values()
            if isinstance(v, Tensor) and v.is_leaf and v.requires_grad
        )
        self.log.append(None)
        answer, printed = call_guarded(
            self.name,
            lambda: self.call(inputs, self.bound_args | (overrides or {})),
            self.lines,
            {names.CALLED[role]: x for role, x in inputs.items() if role in self.reads},
        )
        value, form, wrapped = self._scalar(answer, batch)
        wrote = frozenset(
            role
            for role, x in originals.items()
            if isinstance(x, Tensor) and not is_same(x, inputs[role])
        )
        outcome = LossOutcome(value, form, wrapped, value.requires_grad, wrote, printed)
        if all(x.grad is None for x in leaves):
            return outcome
        if form != SCALAR:
            raise InputError(
                f"{self.name} calls .backward() itself and returns {form} numbers: return the loss."
            )
        return self._with_left_gradients(outcome, leaves)

    def _with_left_gradients(
        self, outcome: LossOutcome, leaves: tuple[Tensor, ...]
    ) -> LossOutcome:
        """Return the outcome of a training step, which called .backward() itself. The
        gradient of its value is the sum of the gradient that it left and that of the
        loss that it returned: both train.
        """
        left = [x.grad for x in leaves]
        returned = self._gradients(outcome.value, leaves, freed=left[0] is not None)
        summed = [
            _plus(x, left_gradient, returned_gradient).detach()
            for x, left_gradient, returned_gradient in zip(
                leaves, left, returned, strict=True
            )
        ]
        value = _Stepped.apply(outcome.value.detach(), len(leaves), *leaves, *summed)
        own_gradient = None
        if any(gradient is not None for gradient in returned):
            own_gradient = 0 - _plus(leaves[0], left[0], None).detach()
        return replace(
            outcome,
            value=value,
            attached=value.requires_grad,
            calls_backward=True,
            own_gradient=own_gradient,
        )

    def _gradients(
        self, value: Tensor, leaves: tuple[Tensor, ...], freed: bool
    ) -> list[Tensor | None]:
        """Return the gradients of a value by the leaves.

        Args:
            value: what the loss returned.
            leaves: the tensors to differentiate by.
            freed: a backward pass of the loss may have freed the graph of the value.

        Returns:
            None for a leaf on which the value does not depend, and for each where the
            graph was freed.
        """
        nothing: list[Tensor | None] = [None] * len(leaves)
        if not value.requires_grad:
            return nothing

        def backward() -> tuple[Tensor | None, ...]:
            """Return the gradients of the value by its leaves."""
            return torch.autograd.grad(value, leaves, allow_unused=True)

        try:
            gradients, _ = call_guarded(f"the backward pass of {self.name}", backward)
            return list(gradients)
        except InputError:
            if freed:
                return nothing
            raise

    def _scalar(self, answer: Any, batch: Rollouts) -> tuple[Tensor, str, str]:
        """Make one number of what the loss returned. Unreduced terms are aggregated as
        the objective does.

        Returns:
            The scalar, its form, and where the loss was in the answer, in words.

        Raises:
            InputError: it returned no scalar and no terms of these shapes.
        """
        found, wrapped = self._tensor(answer)
        loss = _plain(found)
        if odd := _odd_kind(loss):
            raise InputError(
                f"{self.name} returns a {odd} tensor: return a real, dense one that holds numbers."
            )
        B, T = batch.mask.shape
        if loss.ndim and loss.shape in {(B, T), (B,), (B, 1)}:
            # [B, 1] is one number for each response, where T > 1
            terms = loss[:, 0] if loss.shape == (B, 1) and T > 1 else loss
            form = PER_RESPONSE if terms.ndim == 1 else UNREDUCED
            visible = self.visible_batch(batch)
            agg = self._aggregation(terms)
            value = aggregate(terms, batch.mask, agg, visible.group, visible.totals)
            return value, form, wrapped
        if loss.numel() != 1:
            raise InputError(
                f"{self.name} returns shape {list(loss.shape)} for inputs of shape {list(batch.mask.shape)}: "
                "return a scalar, or an unreduced [B, T] or [B]."
            )
        return loss.reshape(()), SCALAR, wrapped

    def _aggregation(self, terms: Tensor) -> str:
        """Return the name of the aggregation that the objective has for unreduced terms,
        [B, T] or [B].
        """
        objective = self.objective
        if terms.ndim == 1:
            return "seq-mean"
        if objective.agg != "seq-mean":
            return objective.agg
        # the objective has one term for each response, and the loss one for each token
        if objective.level == "sequence_product":
            return "seq-mean-token-sum"
        return "seq-mean-token-mean"

    def _tensor(self, answer: Any) -> tuple[Tensor, str]:
        """Find the loss in what the function returned.

        Returns:
            The loss, and where it was, in words; no words where it is the whole answer.

        Raises:
            InputError: it returned no loss with a gradient.
        """
        if isinstance(answer, Tensor):
            return answer, ""
        if isinstance(answer, dict):
            entry = answer.get("loss")
        else:
            entry = getattr(answer, "loss", None)
        if isinstance(entry, Tensor):
            return entry, "its entry `loss`"
        first = answer[0] if isinstance(answer, tuple | list) and answer else None
        if not isinstance(first, Tensor):
            raise InputError(_no_tensor(self.name, answer))
        if not any(isinstance(x, Tensor) and x.requires_grad for x in answer[1:]):
            return first, "its first element"
        if not first.requires_grad:
            kind = f"{self.name} returns {describe_kind(answer)}"
            raise InputError(
                f"{kind} of {len(answer)}, of which the first has no gradient. {_RETURN}"
            )
        return first, ALSO_LIVE

    def outcome(
        self,
        batch: Rollouts,
        ranks: int = 1,
        wanting: tuple[str, ...] | None = None,
        **overrides: Any,
    ) -> tuple[LossOutcome, Tensor]:
        """Call the loss once, and return what the call did and dJ/dlp.

        Args:
            batch: the batch.
            ranks: the number of data-parallel ranks that it is told.
            wanting: roles that are computed from leaves, as by a network, and so is
                log_prob; None: log_prob is a leaf.
            **overrides: hyperparameters with other values.

        Returns:
            The LossOutcome, and [B, T].
        """
        return self.ask("measured", batch, ranks, wanting, overrides)

    def ask(self, method: str, *inputs: Any) -> Any:
        """Call one of the methods below, and log the question. Every number that a
        verdict takes from the loss comes from here.

        Args:
            method: the name of the method.
            *inputs: its arguments.

        Returns:
            What the method returns.

        Raises:
            InputError: the method raises it, twice on these inputs.
            Gone: within a check, the method raises InputError only the first time.
        """
        before = len(self.log)
        try:
            answer = getattr(self, method)(*inputs)
        except InputError as e:
            self._must_recur(e, lambda: getattr(self, method)(*inputs))
            raise
        if len(self.log) == before + 1:
            self.log[-1] = Question(self, method, inputs, answer)
        return answer

    def _must_recur(self, error: InputError, again: Callable[[], Any]) -> None:
        """Stop the check if the same inputs do not raise an error again: then the error
        does not tell what the loss refuses.
        """
        try:
            again()
        except InputError:
            return
        raise stopped(
            Gone(
                f"{error}; on the same inputs {self.name} then answered: it has no one answer."
            )
        ) from error

    def measured(
        self,
        batch: Rollouts,
        ranks: int,
        wanting: tuple[str, ...] | None,
        overrides: dict[str, Any],
    ) -> tuple[LossOutcome, Tensor]:
        """Call the loss once and differentiate its value by log_prob.

        Args:
            batch: the batch.
            ranks: the number of data-parallel ranks that the loss is told.
            wanting: roles of further inputs that need a gradient, which are then
                computed from leaves as in training; None: log_prob is a leaf and the
                others need none.
            overrides: hyperparameters with other values.

        Returns:
            What the call did, and dJ/dlp of every token, [B, T].
        """
        originals = self.given(batch, ranks)
        inputs = _copies(originals)
        leaves = ()
        logp = inputs["logp"].requires_grad_()
        if wanting is not None:
            leaves = (logp, *(inputs[k].requires_grad_() for k in wanting))
            inputs |= {"logp": logp * 1} | {k: inputs[k] * 1 for k in wanting}
        outcome = self.run(inputs, originals, batch, overrides, leaves)
        if not outcome.attached:
            return outcome, torch.zeros_like(logp)

        def backward() -> tuple[Tensor | None, ...]:
            """Return the gradient of the loss by the log-probabilities, in a tuple."""
            return torch.autograd.grad(outcome.value, logp, allow_unused=True)

        (gradient,), printed = call_guarded(
            f"the backward pass of {self.name}", backward
        )
        outcome = replace(
            outcome, value=outcome.value.detach(), printed=outcome.printed or printed
        )
        if gradient is None:
            return outcome, torch.zeros_like(logp)
        return outcome, _negated(gradient)

    def gradient_by_input(
        self, batch: Rollouts, role: str, times: float = 1.0
    ) -> Tensor | None:
        """Return the gradient of the loss, times a number, by one of its inputs; None
        where it has none, or where the loss refuses an input with a gradient.

        Args:
            batch: the batch.
            role: of the input.
            times: the number.
        """

        originals = self.given(batch)

        def make_inputs() -> dict[str, Any]:
            """Return copies of the inputs, of which log_prob and the one of this role need
            a gradient.
            """
            full = _copies(originals)
            full["logp"].requires_grad_()
            full[role].requires_grad_()
            return full

        full = make_inputs()
        try:
            outcome = self.run(full, originals, batch)
        except InputError as e:
            self._must_recur(e, lambda: self.run(make_inputs(), originals, batch))
            return None
        if not outcome.attached:
            return None
        backward = partial(
            torch.autograd.grad, outcome.value * times, full[role], allow_unused=True
        )
        (gradient,), _ = call_guarded(f"the backward pass of {self.name}", backward)
        return gradient

    def gradient_in_layout(self, batch: Rollouts, layout: str) -> Tensor:
        """Measure dJ/dlp where each tensor of two dimensions has another layout.

        Where the loss takes advantages [B, T] and each response has one advantage, they
        are expanded from one number per response instead.

        Args:
            batch: the batch.
            layout: a key of LAYOUTS.

        Returns:
            [B, T].
        """
        change_layout = LAYOUTS[layout]
        originals = self.given(batch)
        inputs = {
            k: change_layout(v) if isinstance(v, Tensor) and v.ndim == 2 else v
            for k, v in _copies(originals).items()
        }
        logp = inputs["logp"].requires_grad_()
        if self.adv_shape in ("BT", ROWS, FIRST) and batch.one_adv_per_response:
            column = per_response(batch.adv, batch.mask)[:, None]
            inputs["adv"] = change_layout(column).expand(batch.mask.shape)
        outcome = self.run(inputs, originals, batch, None, (logp,))
        if not outcome.attached:
            return torch.zeros_like(batch.logp)
        backward = partial(torch.autograd.grad, outcome.value, logp, allow_unused=True)
        (gradient,), _ = call_guarded(f"the backward pass of {self.name}", backward)
        if gradient is None:
            return torch.zeros_like(batch.logp)
        return _negated(gradient).contiguous()

    def seeded(self, batch: Rollouts, seed: int) -> tuple[Tensor, Tensor]:
        """Return the value and dJ/dlp, with every random generator at this seed.

        Args:
            batch: the batch.
            seed: of all generators.
        """
        with state_restored():
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            outcome, gradient = self.measured(batch, 1, None, {})
        return outcome.value, gradient

    def differences(self, batch: Rollouts, steps: list[Tensor]) -> list[float]:
        """Return half the difference of the values after each step and after its opposite,
        a central difference that is not divided by the size of the step. Every sg(x) keeps
        the value that it has at the batch.

        Args:
            batch: the batch.
            steps: of log_prob, [B, T] each.

        Returns:
            A number for each step; [] where the loss has no sg.
        """
        values: list[Tensor] = []
        with recorded_sg(values):
            self(batch)

        if not values:
            return []

        def value_after(step: Tensor) -> Tensor:
            """Return the value where log_prob is moved by this step."""
            with recorded_sg(values):
                return self(batch.but(logp=batch.logp + step))

        return [(value_after(step) - value_after(-step)).item() / 2 for step in steps]

    def value_and_gradient(
        self, batch: Rollouts, ranks: int = 1, **overrides: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the value and dJ/dlp.

        Args:
            batch: the batch.
            ranks: the number of data-parallel ranks that it is told.
            **overrides: hyperparameters with other values.
        """
        outcome, gradient = self.outcome(batch, ranks, **overrides)
        return outcome.value, gradient

    def gradient(self, batch: Rollouts, ranks: int = 1, **overrides: Any) -> Tensor:
        """Return dJ/dlp of every token, [B, T].

        Args:
            batch: the batch.
            ranks: the number of data-parallel ranks that the loss is told.
            **overrides: hyperparameters with other values.
        """
        _, gradient = self.outcome(batch, ranks, **overrides)
        return gradient

    def __call__(self, batch: Rollouts, **overrides: Any) -> Tensor:
        originals = self.given(batch)
        inputs = _copies(originals)
        inputs["logp"].requires_grad_()
        return self.run(inputs, originals, batch, overrides).value.detach()


class Question(NamedTuple):
    """A question that one call of the function answered.

    Attributes:
        loss: what was asked.
        method: the name of the method of Loss that asked it.
        inputs: of the method.
        answer: what the method returned.
    """

    loss: Loss
    method: str
    inputs: tuple[Any, ...]
    answer: Any


class _Stepped(torch.autograd.Function):
    """Gives a value chosen gradients: those that a loss left by its own backward pass.

    It is applied to the value, the number of inputs, the inputs, and their gradients.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, n: int, *inputs: Tensor) -> Tensor:
        """Return a copy of the value, and keep the gradients, which are the last n of
        `inputs`.
        """
        ctx.save_for_backward(*inputs[n:])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the kept gradients times that of the value, for the n inputs; None for
        all other arguments.
        """
        return (
            None,
            None,
            *(gradient * x for x in ctx.saved_tensors),
            *(None for _ in ctx.saved_tensors),
        )


_WRAPPER = "def loss(log_prob, old_log_prob, advantages, mask): return f(...)"
_RETURN = f"Check a wrapper: `{_WRAPPER}[i]` with the place or key of the loss for i."
LISTED = 12  # keys or elements that a message lists


def _odd_kind(loss: Tensor) -> str:
    """Return what keeps a tensor from being a loss, in words: it is complex, nested, meta,
    or not dense; "" where nothing does.
    """
    kinds = {
        "complex": loss.is_complex(),
        "nested": loss.is_nested,
        "meta": loss.is_meta,
        str(loss.layout).removeprefix("torch."): loss.layout is not torch.strided,
    }
    return next((kind for kind, is_so in kinds.items() if is_so), "")


def _no_tensor(name: str, answer: Any) -> str:
    """Say that an answer holds no loss where one is looked for, and what to do.

    Args:
        name: of the function.
        answer: what it returned.
    """
    kind = f"{name} returns {describe_kind(answer)}"
    if answer is None:
        return f"{name} returns None: does it end without `return`? Return the loss."
    if advice := advice_on_array(answer):
        return f"{kind} of another library, not a torch tensor: {advice}."
    if isinstance(answer, int | float):
        return (
            f"{kind}, a number without a gradient, as .item() or float() gives it: "
            "return the tensor."
        )
    holds: dict[Any, Any] = {}
    if isinstance(answer, dict):
        if "loss" in answer:
            entry = describe_kind(answer["loss"])
            return f"{kind} whose entry 'loss' is {entry}: put the tensor itself there."
        holds = answer
        keys = [f"{key!r:.40}" for key in answer]
        listed = f"its keys are {name_first(keys, LISTED)}"
    elif isinstance(answer, tuple | list):
        holds = dict(enumerate(answer))
        types = [type(x).__name__ for x in answer]
        listed = f"it holds {name_first(types, LISTED)}"
    if not holds:
        return f"{kind}, not a tensor: return the loss itself."
    alive = [
        key for key, x in holds.items() if isinstance(x, Tensor) and x.requires_grad
    ]
    if len(alive) == 1:
        found = f"of these only [{alive[0]!r:.40}] has a gradient"
        return f"{kind}, not a tensor: {listed}; {found}. Check a wrapper: `{_WRAPPER}[{alive[0]!r:.40}]`."
    return f"{kind}, not a tensor: {listed}. {_RETURN}"


def _as_slice(x: Tensor) -> Tensor:
    """Return the same numbers as columns of a wider tensor, in which other numbers stand
    beside them.
    """
    other = False if x.dtype is torch.bool else 0.5
    wider = torch.nn.functional.pad(x, (2, 1), value=other)
    return wider[:, 2:-1]


def _as_transpose(x: Tensor) -> Tensor:
    """Return the same numbers, with those of a column beside each other in memory."""
    return x.T.contiguous().T


# in words, of a tensor [B, T]
LAYOUTS = {"a slice of a wider one": _as_slice, "a transposed [T, B]": _as_transpose}


def _plain(x: Tensor) -> Tensor:
    """Return the tensor without its subclass, which may redefine comparisons."""
    if type(x) is Tensor or type(x) is torch.nn.Parameter:
        return x
    return x.as_subclass(Tensor)


def _negated(gradient: Tensor) -> Tensor:
    """Return the gradient of J, from that of the loss; 0 stays 0, and does not become
    -0.
    """
    return 0 - _plain(gradient)


def _plus(like: Tensor, x: Tensor | None, y: Tensor | None) -> Tensor:
    """Return the sum of two gradients, either of which may be missing; zeros in the shape
    of `like` without both.
    """
    return sum(
        (_plain(gradient) for gradient in (x, y) if gradient is not None),
        torch.zeros_like(like),
    )


def _copies(given: dict[str, Any]) -> dict[str, Any]:
    """Return the same inputs by role, each in memory of its own."""
    return {role: _copied(x) for role, x in given.items()}


def _copied(x: Any) -> Any:
    """Return the same numbers in memory of their own, to which a loss may write; what is
    neither a tensor nor Totals stays as it is.
    """
    if isinstance(x, Totals):
        return Totals(*map(_copied, x))
    return x.clone() if isinstance(x, Tensor) else x
