# SPDX-License-Identifier: Apache-2.0
import torch
from torch import Tensor

from upref.verify.faults import Fault
from upref_course.exercise import Exercise, ExerciseBatch

NAN = float("nan")


def zero_padding(x: Tensor, mask: Tensor) -> Tensor:
    """Return x with its padding set to 0, whatever it holds.

    Args:
        x: [B, T].
        mask: [B, T], False on padding.

    Returns:
        [B, T].
    """
    return torch.where(mask, x, 0)


def J(x: Tensor, mask: Tensor, responses: int) -> Tensor:
    """Compute a part's share of Eq. 4's mean: the right answer.

    Args:
        x: what each token adds to the objective, [B, T]; padding may hold NaN.
        mask: [B, T], True on the tokens of the response.
        responses: number of responses of the whole mini-batch.

    Returns:
        A scalar; those of all parts add up to the mean.
    """
    return (zero_padding(x, mask).sum(1) / mask.sum(1)).sum() / responses


def batch(
    shows: str, x: list[list[float]], mask: list[list[bool]], responses: int
) -> ExerciseBatch:
    """Make a part of a mini-batch.

    Args:
        shows: what it shows, in words.
        x: what each token adds to the objective, [B, T].
        mask: [B, T], True on the tokens of the response.
        responses: number of responses of the whole mini-batch.

    Returns:
        A batch with these inputs.
    """
    return ExerciseBatch(
        shows,
        {
            "x": torch.tensor(x, dtype=torch.float64),
            "mask": torch.tensor(mask),
            "responses": responses,
        },
    )


EXERCISE = Exercise(
    number=8,
    slug="aggregation",
    title="aggregation, and its traps",
    function="J",
    gradient="x",
    value=True,
    right=J,
    batches=(
        batch("one response of two tokens", [[1.0, 3.0]], [[True, True]], 1),
        batch(
            "one response of a mini-batch of four: the other three are elsewhere",
            [[1.0, 3.0]],
            [[True, True]],
            4,
        ),
        batch(
            "a response of two tokens and one of one, with padding",
            [[1.0, 3.0], [4.0, 7.0]],
            [[True, True], [True, False]],
            2,
        ),
        batch(
            "the same, with NaN in the padding",
            [[1.0, 3.0], [4.0, NAN]],
            [[True, True], [True, False]],
            2,
        ),
        batch(
            "two responses of a mini-batch of six",
            [[1.0, 3.0, 2.0], [4.0, 9.0, 9.0]],
            [[True, True, True], [True, False, False]],
            6,
        ),
    ),
    faults=(
        Fault(
            "divided by the responses that are here, not by those of the mini-batch",
            lambda x, mask, n: (zero_padding(x, mask).sum(1) / mask.sum(1)).mean(),
            id="own-denominator-of-micro-batch",
            hint="the parts of a mini-batch must add up to its J: divide by `responses`, whatever the part's own "
            "size.",
        ),
        Fault(
            "the mean over tokens: long responses weigh more (DAPO's aggregation, and not of a mini-batch)",
            lambda x, mask, n: x[mask].mean(),
            id="aggregated-by-token-mean",
            hint="Eq. 4 has 1/|o_i| inside the sum over responses: first the mean of each row, then over rows.",
        ),
        Fault(
            "the mean over the tokens that are here, divided by the part's share of the responses",
            lambda x, mask, n: x[mask].mean() * len(mask) / n,
            id="token-mean-by-share-of-responses",
            hint="Eq. 4 has 1/|o_i| inside the sum over responses: first the mean of each row, then over rows.",
        ),
        Fault(
            "padding is counted in |o|",
            lambda x, mask, n: zero_padding(x, mask).mean(1).sum() / n,
            id="padded-width-for-length",
            hint="divide each row by its own number of tokens, mask.sum(1), not by the width.",
        ),
        Fault(
            "nothing is divided by |o|",
            lambda x, mask, n: zero_padding(x, mask).sum() / n,
            id="length-missing",
            hint="Eq. 4 has the mean over the tokens of each response: divide each row by mask.sum(1).",
        ),
        Fault(
            "0 * NaN is NaN: the padding is multiplied by the mask",
            lambda x, mask, n: ((x * mask).sum(1) / mask.sum(1)).sum() / n,
            id="nan-of-padding",
            hint="padding may hold anything. Select with torch.where(mask, x, 0), then add up.",
        ),
        Fault(
            "padding is added up",
            lambda x, mask, n: (x.sum(1) / mask.sum(1)).sum() / n,
            id="padding-summed",
            hint="a slot where the mask is False is padding: torch.where(mask, x, 0).",
        ),
        Fault(
            "the mask is not used at all",
            lambda x, mask, n: x.mean(1).sum() / n,
            id="mask-ignored",
            hint="a slot where the mask is False is padding: neither add it up nor count it.",
        ),
        Fault(
            "there is no 1/G: the responses' means are added up",
            lambda x, mask, n: (zero_padding(x, mask).sum(1) / mask.sum(1)).sum(),
            id="number-of-responses-missing",
            hint="divide by `responses`.",
        ),
        Fault(
            "the sign",
            lambda x, mask, n: -J(x, mask, n),
            id="sign-flipped",
            hint="this is J itself, to be maximized: no minus here.",
        ),
    ),
    notice="and DAPO's aggregation: which total must each part know? (The tokens of the mini-batch.)",
)
