# SPDX-License-Identifier: Apache-2.0
"""Why the value loss of a step is wrong where the rest of its gradient is right.

Each fault is put into the reference's value loss. It is named only if that loss then has
the gradient that the other terms leave.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from upref.aggregation import Totals, aggregate
from upref.step.compare.forward import Forward
from upref.step.compare.goal import Goal
from upref.step.compare.value_term import ValueTerm
from upref.step.explain.weights import solve_least_squares
from upref.step.inputs.rows import Padded
from upref.verify.factors import TOKEN_SUM, declared_aggregation
from upref.verify.faults.batch_reading import moved
from upref.verify.finding import NO_CAUSE, Cause, join_causes

SAME_FACTOR = 1e-3  # relative: two factors of the value loss so near are one
USUAL_CLIPS = (0.1, 0.2, 0.3, 0.4, 0.5, 1.0)  # of values, as people set them

SEPARATE_CRITIC = (
    "no parameter has a gradient of both the policy and the critic: the critic is a "
    "network of its own, or the model detaches the hidden states that the critic reads"
)


def shares_layers(forward: Forward) -> bool:
    """Tell whether a parameter of the model has an effect on logits and on values.

    Args:
        forward: of a model that reads values.
    """
    generator = torch.Generator().manual_seed(0)
    of_policy = torch.zeros(())
    of_critic = torch.zeros(())
    for z, ids in zip(forward.z, forward.ids, strict=True):
        dz = torch.randn(z.shape, generator=generator, dtype=z.dtype)
        is_value = torch.zeros_like(dz)
        is_value[:, -1] = 1
        pull = forward.model.pull
        of_policy = of_policy + pull(z, dz * (1 - is_value), ids).abs()
        of_critic = of_critic + pull(z, dz * is_value, ids).abs()
    return bool(((of_policy > 0) & (of_critic > 0)).any())


# a fault of the value loss, and the gradient that the loss then has, [P]
Candidate = tuple[Cause, Tensor]


@dataclass(frozen=True)
class ValueSearch:
    """The part of a gradient that the value loss should have made.

    Args:
        goal: with a value loss.
        forward: the reference's forward pass over the rows.
        batch: the rows, padded.
        rest: the gradient that was found, less the other terms, [P].
        allowed: the norm of the difference that rounding may make.
        of_critic: which entries of a gradient are of parameters without effect on any
            logit, the value head's, [P].
    """

    goal: Goal
    forward: Forward
    batch: Padded
    rest: Tensor
    allowed: float
    of_critic: Tensor

    @property
    def value(self) -> ValueTerm:
        """The value loss of the goal."""
        assert self.goal.value is not None
        return self.goal.value

    @property
    def returns(self) -> Tensor:
        """The returns R, [B, T]."""
        assert self.batch.returns is not None
        return self.batch.returns

    def find(self) -> Cause:
        """Return the fault of the value loss; no cause where none fits, or where the rest
        is 0, because the step has no value loss then. Most faults may come with another
        coefficient, which the cause names. One that changes nothing on these rows is the
        right loss, and is left out.
        """
        if self.rest.norm() <= self.allowed:
            return NO_CAUSE
        right = self._gradient(self._loss(self._values(self.forward)))
        for cause, gradient in self._faults():
            factor = self._factor(gradient)
            changes = (gradient - right).norm() > self.allowed
            if factor is not None and changes:
                return join_causes(cause, self._other_coefficient(factor))
        # another count of tokens scales a gradient too, so that a coefficient beside it
        # would fit many gradients
        for cause, gradient in self._faults_of_tokens():
            changes = (gradient - right).norm() > self.allowed
            if changes and (self.rest - gradient).norm() <= self.allowed:
                return cause
        return NO_CAUSE

    def by_values(self) -> Cause:
        """Return in which value of a token the slope of the loss differs most; no cause
        where no slopes give the rest of the gradient.
        """
        V = self._values(self.forward)
        (right_slopes,) = torch.autograd.grad(
            self._times_factor(self._loss(V)), V, retain_graph=True
        )
        places = self.batch.is_token.nonzero().tolist()
        columns = [self.forward.by_row(V[i, t]).sum(0) for i, t in places]
        slopes, errors, residual = solve_least_squares(
            torch.stack(columns, 1), self.rest
        )
        is_unclear = residual * float(self.rest.norm()) > self.allowed
        if is_unclear or not errors.isfinite().any():
            return NO_CAUSE
        right = right_slopes[self.batch.is_token]
        # the slopes that the gradient determines
        apart = torch.where(errors.isfinite(), (slopes - right).abs(), 0)
        worst = int(apart.argmax())
        i, t = places[worst]
        return Cause(
            "the policy term is right, and the value loss is not: its slope by the value of "
            f"token {t} of response {i} is {float(slopes[worst]):.4g}, not {float(right[worst]):.4g}",
            ("value-loss-differs",),
        )

    def _factor(self, gradient: Tensor) -> float | None:
        """Return the factor by which a gradient is the rest; None where it is not."""
        factor = float(self.rest @ gradient / (gradient @ gradient).clamp(min=1e-300))
        is_multiple = (self.rest - factor * gradient).norm() <= self.allowed
        return factor if is_multiple and factor else None

    def _other_coefficient(self, factor: float) -> Cause:
        """Return the cause that the coefficient is so many times its own; none at 1."""
        if abs(factor - 1) < SAME_FACTOR:
            return NO_CAUSE
        right = self.value.coef
        words = f"and its coefficient is {factor * right:.4g}, not {right:.4g}"
        return Cause(words, ("other-coefficient-of-value-loss",))

    def _times_factor(self, loss: Tensor) -> Tensor:
        """Return a mean value loss as it counts in the loss of the step."""
        return self.goal.scale * self.value.coef * loss

    def _gradient(self, loss: Tensor, forward: Forward | None = None) -> Tensor:
        """Return the gradient of a mean value loss of a forward pass, [P]."""
        return (forward or self.forward).by_row(self._times_factor(loss)).sum(0)

    def _values(self, forward: Forward) -> Tensor:
        """Return the values of a forward pass, [B, T]."""
        V = forward.statistics().V
        assert V is not None
        return V

    def _mean(
        self, errors: Tensor, mask: Tensor, counted: Tensor | None = None
    ) -> Tensor:
        """Return the mean of errors as the objective is averaged.

        Args:
            errors: [B, T].
            mask: tokens whose errors are added up, [B, T].
            counted: tokens that are counted, [B, T]; None: the same.
        """
        agg = declared_aggregation(self.goal.objective)
        agg = "token-sum" if agg == TOKEN_SUM else agg
        group = self.batch.group if self.goal.grouped else None
        totals = Totals.of(mask if counted is None else counted, group)
        return aggregate(errors, mask, agg, totals=totals)

    def _loss(
        self, V: Tensor, *, value: ValueTerm | None = None, target: Tensor | None = None
    ) -> Tensor:
        """Return the mean value loss over the tokens that train.

        Args:
            V: values, [B, T].
            value: another loss; None: the goal's.
            target: in place of the returns, [B, T].
        """
        errors = (value or self.value).per_token(
            V, self.returns if target is None else target, self.batch.old_values
        )
        return self._mean(errors, self.batch.mask)

    def _faults(self) -> Iterator[Candidate]:
        """Yield faults beside which the coefficient may be wrong too."""
        yield from self._trunk_faults()
        yield from self._clip_faults()
        yield from self._target_faults()
        yield from self._place_faults()

    def _trunk_faults(self) -> Iterator[Candidate]:
        """Yield a value loss that does not reach the layers that policy and critic share."""
        if self.of_critic.any() and not self.of_critic.all():
            gradient = self._gradient(self._loss(self._values(self.forward)))
            words = (
                "the value loss does not reach the layers that policy and critic share: "
                "the critic reads detached hidden states"
            )
            yield Cause(words, ("value-trunk-detached",)), gradient * self.of_critic

    def _clip_faults(self) -> Iterator[Candidate]:
        """Yield other clips of the values; none where the rows have no old values."""
        V = self._values(self.forward)
        old = self.batch.old_values
        if old is None:
            return
        value = self.value
        if not value.reads_old_values:
            for clip in USUAL_CLIPS:
                clipped = replace(value, loss="clipped", clip=clip)
                words = (
                    f"values are clipped, with an ε such as {clip:g}: value='clipped'"
                )
                cause = Cause(words, ("value-loss-clipped",))
                yield cause, self._gradient(self._loss(V, value=clipped))
            return
        near = old + (V - old).clamp(-value.clip, value.clip)
        error = (V - self.returns) ** 2 / 2
        clipped_error = (near - self.returns) ** 2 / 2
        smaller = torch.minimum(error, clipped_error)
        for words, fault_id, errors in (
            (
                "the value loss takes the smaller of the two errors (min), not the larger",
                "value-loss-minimum",
                smaller,
            ),
            (
                "the value loss has the clipped error alone, and not the larger of the two",
                "value-loss-clipped-alone",
                clipped_error,
            ),
            ("the value loss is not clipped", "value-loss-unclipped", error),
        ):
            loss = self._mean(errors, self.batch.mask)
            yield Cause(words, (fault_id,)), self._gradient(loss)
        for clip in USUAL_CLIPS:
            if clip != value.clip:
                words = f"value_clip is another number, such as {clip:g}, not {value.clip:g}"
                loss = self._loss(V, value=replace(value, clip=clip))
                yield Cause(words, ("other-value-clip",)), self._gradient(loss)

    def _target_faults(self) -> Iterator[Candidate]:
        """Yield other numbers in the place of the returns."""
        V = self._values(self.forward)
        for cause, target in self._other_targets():
            yield cause, self._gradient(self._loss(V, target=target))

    def _other_targets(self) -> Iterator[tuple[Cause, Tensor]]:
        """Yield what may stand in the place of the returns, [B, T]."""
        late, early = moved(self.returns, 1), moved(self.returns, -1)
        targets = [
            ("the advantages", "advantages", self.batch.adv),
            ("the returns, one token late", "late-returns", late),
            ("the returns, one token early", "early-returns", early),
        ]
        if self.batch.old_values is not None:
            targets.append(("the old values", "old-values", self.batch.old_values))
        for words, fault_id, target in targets:
            cause = Cause(
                f"the target of the value loss is {words}, not the returns",
                (f"value-target-{fault_id}",),
            )
            yield cause, target

    def _place_faults(self) -> Iterator[Candidate]:
        """Yield values that are read at other places of the sequence, and beside them
        other targets.
        """
        targets = [(NO_CAUSE, self.returns), *self._other_targets()]
        late = "one token late: at the token itself, not at the place that predicts it"
        for words, fault_id, shift in (
            (late, "late", 0),
            ("one token early", "early", 2),
        ):
            forward = replace(self.forward, shift=shift)
            cause = Cause(
                f"the critic's values are read {words}",
                (f"values-one-token-{fault_id}",),
            )
            V = self._values(forward)
            for beside, target in targets:
                gradient = self._gradient(self._loss(V, target=target), forward)
                yield join_causes(cause, beside), gradient

    def _faults_of_tokens(self) -> Iterator[Candidate]:
        """Yield value losses that count other tokens."""
        V = self._values(self.forward)
        errors = self.value.per_token(V, self.returns, self.batch.old_values)
        trained, tokens = self.batch.mask, self.batch.is_token
        yield (
            Cause(
                "the value loss counts masked tokens of responses too",
                ("value-loss-masked-tokens",),
            ),
            self._gradient(self._mean(errors, tokens)),
        )
        yield (
            Cause(
                "the value loss has masked tokens of responses too, and is divided by those that train",
                ("value-loss-masked-tokens-added",),
            ),
            self._gradient(self._mean(errors, tokens, trained)),
        )
        yield from self._faults_of_prompts()

    def _faults_of_prompts(self) -> Iterator[Candidate]:
        """Yield value losses over prompts too, where returns and old values are 0."""
        rows = self.forward.rows
        prompt_loss = torch.zeros((), dtype=torch.float64)
        V = self._values(self.forward)
        errors = self.value.per_token(V, self.returns, self.batch.old_values)
        for i, row in enumerate(rows):
            values = self.forward.values(i, 1)[: len(row.prompt) - 1]
            zeros = torch.zeros_like(values)
            prompt_loss = prompt_loss + self.value.per_token(values, zeros, zeros).sum()
        trained_loss = (errors * self.batch.mask).sum()
        masked_loss = (errors * (self.batch.is_token & ~self.batch.mask)).sum()
        prompt_tokens = sum(len(row.prompt) - 1 for row in rows)
        trained_tokens = int(self.batch.mask.sum())
        masked_tokens = int(self.batch.is_token.sum()) - trained_tokens
        for beside, loss, tokens in (
            ("", prompt_loss + trained_loss, prompt_tokens + trained_tokens),
            (
                " and masked tokens",
                prompt_loss + trained_loss + masked_loss,
                prompt_tokens + trained_tokens + masked_tokens,
            ),
        ):
            cause = Cause(
                f"the value loss counts tokens of prompts{beside} too",
                ("value-loss-over-prompts",),
            )
            for divisor in (tokens, trained_tokens):
                yield cause, self._gradient(loss / divisor)
