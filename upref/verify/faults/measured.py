# SPDX-License-Identifier: Apache-2.0
"""Faults that a check reads off a gradient at once. The other faults of this folder are
searched: each is put into the reference, and named where the numbers are then equal.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from upref.verify.finding import Cause


@dataclass(frozen=True)
class MeasuredFault:
    """A known fault that a check reads off a gradient.

    Attributes:
        id: a name that never changes.
        words: a template. What stands in braces is measured.
        applies_to: what can have it: "loss", "advantages", "KL" or "step".
    """

    id: str
    words: str
    applies_to: tuple[str, ...]

    def cause(self, **measured: Any) -> Cause:
        """Return the fault as the cause of a finding, with its words filled in.

        Args:
            **measured: numbers and names, for the words.
        """
        return Cause(self.words.format(**measured), (self.id,))


# ---- a whole gradient of a step ------------------------------------------------------
GRADIENT_NOT_FINITE = MeasuredFault(
    "gradient-not-finite",
    "the gradient is not finite, in {parameter} first",
    ("step",),
)
NO_GRADIENT = MeasuredFault(
    "no-gradient",
    "no gradient reaches the parameters: the loss is detached from them",
    ("step",),
)
RANDOM_STEP = MeasuredFault(
    "random-step",
    "two runs of the step on the same rows have different gradients: dropout or "
    "sampling is active",
    ("step",),
)
STEP_KEEPS_STATE = MeasuredFault(
    "step-keeps-state",
    "two runs of the step on the same rows have different gradients, with one seed "
    "too: the step keeps a state from run to run",
    ("step",),
)
LOSS_OF_OTHER_PARAMETERS = MeasuredFault(
    "loss-of-other-parameters",
    "a gradient of {parameters}, on which no logit of these rows depends: a value loss "
    "or another term is added to the objective: declare a value loss (value=, "
    "value_coef=), and leave any other term out of the step",
    ("step",),
)
SOME_PARAMETERS_WRONG = MeasuredFault(
    "some-parameters-wrong",
    "all is right but the gradients of {parameters}",
    ("step",),
)
SOME_PARAMETERS_SCALED = MeasuredFault(
    "some-parameters-wrong", "the other parameters are right; {each}", ("step",)
)

# ---- clips and weight decay, between the backward pass and the optimizer -------------
NORM_NOT_CLIPPED = MeasuredFault(
    "norm-not-clipped", "the clip of the gradient's norm does not act", ("step",)
)
NORM_CLIPPED_BEFORE_DIVISION = MeasuredFault(
    "norm-clipped-before-division",
    "the norm is clipped to {norm:.4g} before the gradient is divided by {number}, the "
    "number of {what}",
    ("step",),
)
ENTROPY_BONUS_OVER_PROMPTS = MeasuredFault(
    "entropy-bonus-over-prompts",
    "the entropy bonus is {how} over the tokens of prompts as well",
    ("step",),
)
NORM_CLIPPED = MeasuredFault(
    "norm-clipped",
    "the gradient's norm is clipped to {norm:.4g}: pass clip={norm:.4g} if that is meant",
    ("step",),
)
WEIGHT_DECAY_IN_GRADIENT = MeasuredFault(
    "weight-decay-in-gradient",
    "weight decay is in the gradient: {rate:.4g} times the parameters",
    ("step",),
)
ENTRIES_CLIPPED = MeasuredFault(
    "entries-clipped",
    "each entry of the gradient is clipped to {largest:.4g}",
    ("step",),
)
PARAMETERS_CLIPPED = MeasuredFault(
    "parameters-clipped",
    "the gradient of each parameter is clipped to norm {norm:.4g} by itself",
    ("step",),
)
ACCUMULATED_NORM_CLIPPED = MeasuredFault(
    "accumulated-norm-clipped",
    "the norm of what has accumulated is clipped to {norm:.4g} after each micro-batch of "
    "{responses}",
    ("step",),
)
MICRO_BATCH_NORMS_CLIPPED = MeasuredFault(
    "micro-batch-norms-clipped",
    "each micro-batch's gradient (of {responses} responses) is clipped to norm {norm:.4g}",
    ("step",),
)

# what is read off the gradients of the parameters, whatever the rows
OF_PARAMETERS = frozenset(
    fault.id
    for fault in (
        GRADIENT_NOT_FINITE,
        NO_GRADIENT,
        LOSS_OF_OTHER_PARAMETERS,
        SOME_PARAMETERS_WRONG,
    )
)
# what was done to the right gradient behind the last backward pass
AFTER_BACKWARD = frozenset(
    fault.id
    for fault in (
        NORM_NOT_CLIPPED,
        NORM_CLIPPED_BEFORE_DIVISION,
        NORM_CLIPPED,
        WEIGHT_DECAY_IN_GRADIENT,
        ENTRIES_CLIPPED,
        PARAMETERS_CLIPPED,
    )
)

# ---- the weights of the tokens of a step ---------------------------------------------
PROMPTS_TRAIN = MeasuredFault("prompts-train", "prompt tokens train", ("step",))
TOKENS_BEHIND_RESPONSES_TRAIN = MeasuredFault(
    "tokens-behind-responses-train",
    "{tokens} tokens behind the responses train: padding, or the next row",
    ("step",),
)
ONE_WEIGHT = MeasuredFault(
    "one-weight",
    "all tokens that train have one weight, {weight:.4g}: the advantage and the ratio of "
    "a response have no effect on it",
    ("step",),
)
RATIO_ALWAYS_ONE = MeasuredFault(
    "ratio-always-one",
    "the old log-probabilities are the current ones, or have no effect: r = 1",
    ("step",),
)
KL_NOT_OF_OBJECTIVE = MeasuredFault(
    "kl-not-of-objective",
    "a KL term{whose} ({estimator}) is subtracted, with the coefficient {beta:.3g}",
    ("step",),
)
ENTROPY_BONUS_OR_Z_LOSS = MeasuredFault(
    "entropy-bonus-or-z-loss",
    "the gradient has a term that is no Σ w ∇log π: an entropy bonus or a z-loss with "
    "coefficients {coefficients} (H, Z)",
    ("step",),
)

# ---- what is observed of these weights where no known fault makes them ---------------
OBSERVED_PROMPTS_TRAIN = MeasuredFault(
    "observed-prompts-train", "{tokens} prompt tokens train", ("step",)
)
OBSERVED_MASKED_TOKENS_TRAIN = MeasuredFault(
    "observed-masked-tokens-train",
    "{tokens} of {masked} masked response tokens train",
    ("step",),
)
OBSERVED_TOKENS_LEFT_OUT = MeasuredFault(
    "observed-tokens-left-out",
    "{tokens} tokens that should train do not",
    ("step",),
)
OBSERVED_RESPONSES_LEFT_OUT = MeasuredFault(
    "observed-responses-left-out", "{responses} {do} not train", ("step",)
)
OBSERVED_STOPPED_TOKENS_TRAIN = MeasuredFault(
    "observed-stopped-tokens-train",
    "{tokens} tokens train that the objective stops",
    ("step",),
)
OBSERVED_FACTORS_OF_RESPONSES = MeasuredFault(
    "observed-factors-of-responses", "each response has one factor", ("step",)
)
# such a cause needs no second draw of rows
OBSERVATIONS = frozenset(
    fault.id
    for fault in (
        OBSERVED_PROMPTS_TRAIN,
        OBSERVED_MASKED_TOKENS_TRAIN,
        OBSERVED_TOKENS_LEFT_OUT,
        OBSERVED_RESPONSES_LEFT_OUT,
        OBSERVED_STOPPED_TOKENS_TRAIN,
        OBSERVED_FACTORS_OF_RESPONSES,
    )
)

# ---- what the responses of a step are divided by -------------------------------------
RESPONSES_LEFT_OUT = MeasuredFault(
    "responses-left-out", "{responses} {do} not train", ("step",)
)
NORMALIZER_COUNTS_OTHERS_ONLY = MeasuredFault(
    "normalizer-counts-others-only",
    "the normalizer counts the others only",
    ("step",),
)
LAST_MICRO_BATCH_REDUCED_ALONE = MeasuredFault(
    "last-micro-batch-reduced-alone",
    "only the last micro-batch, of {responses} responses, is reduced over {ranks} ranks",
    ("step",),
)

# ---- functions -----------------------------------------------------------------------
OWN_DENOMINATOR_OF_MICRO_BATCH = MeasuredFault(
    "own-denominator-of-micro-batch",
    "it divides by the micro-batch's own tokens or responses, not by the "
    "mini-batch's{counts}",
    ("loss",),
)
OWN_DENOMINATOR_OF_RANK = MeasuredFault(
    "own-denominator-of-rank",
    "it divides by the rank's own tokens or responses, not by the mini-batch's{counts}",
    ("loss",),
)
WEIGHT_OF_EARLIER_CALL = MeasuredFault(
    "weight-of-earlier-call",
    "the numbers are those of the weight as it was in an earlier call: a copy of it is "
    "kept, so training goes on with the weight of its first step",
    ("log-probs",),
)
PART_IN_LOW_PRECISION = MeasuredFault(
    "part-in-low-precision",
    "right but for rounding: a part is computed with the digits of {number_format}, so "
    "weights jump by about {jump:.1%} where {role} changes by {step:.2%}",
    ("loss",),
)
MASK_IGNORED = MeasuredFault("mask-ignored", "the mask is ignored", ("loss",))
PADDED_WIDTH_FOR_LENGTH = MeasuredFault(
    "padded-width-for-length", "it divides by the padded width", ("loss",)
)
STD_OF_EQUAL_REWARDS = MeasuredFault(
    "std-of-equal-rewards",
    "0/0: the std of a group of one, or of equal rewards, is 0 or NaN",
    ("advantages",),
)
ADVANTAGES_OF_TOKENS_DIFFER = MeasuredFault(
    "advantages-of-tokens-differ",
    "the trained tokens of a response have different advantages: each should have that "
    "of the response",
    ("advantages",),
)
ADVANTAGES_OF_TWO_REWARDS = MeasuredFault(
    "advantages-of-two-rewards", "{each}", ("advantages",)
)
NUMBERS_SCALED = MeasuredFault(
    "numbers-scaled",
    "every number is {factor:.6g} times what it should be",
    ("tokens", "distillation", "value"),
)
ESTIMATOR_SCALED = MeasuredFault(
    "estimator-scaled", "{factor:.6g} times {estimator}", ("KL",)
)
CONSTANT_ADDED_TO_ESTIMATOR = MeasuredFault(
    "constant-added-to-estimator", "{estimator} plus {constant:.4g}", ("KL",)
)


def every() -> Iterator[MeasuredFault]:
    """Yield all faults of this file.

    Yields:
        In the order in which they stand here.
    """
    for value in globals().values():
        if isinstance(value, MeasuredFault):
            yield value
