# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from upref.verify.faults import Fault
from upref_course.exercise import Exercise, ExerciseBatch

if TYPE_CHECKING:
    from upref.step.check import StepReport
    from upref.step.inputs.rows import Row


def step(
    shift: int = 1,
    heat: Callable[..., Any] = lambda x, T: x / T,
    over: Callable[..., Any] = lambda trains, tokens: tokens,
    mask: Callable[..., Any] = lambda m: m,
    before: Callable[..., Any] = lambda old, lp: old,
    high: float = 1.28,
    sign: float = -1.0,
) -> Callable[..., Tensor]:
    """Make the loss of a response, with switches for what goes wrong.

    Args:
        shift: 1: logits[s] predict the token after ids[s]; 0: ids[s] itself.
        heat: (logits, temperature) -> the logits of the policy.
        over: (trains, tokens) -> what the sum is divided by.
        mask: which tokens train -> what their terms are multiplied by.
        before: (old, lp) -> the old log-probabilities.
        high: the upper bound of the ratio.
        sign: of the loss.

    Returns:
        A function with the arguments of the exercise; with the defaults, the right
        answer.
    """

    def loss(
        logits: Tensor,
        ids: Tensor,
        prompt: int,
        trains: Tensor,
        old: Tensor,
        A: Tensor,
        tokens: int,
        temperature: float,
    ) -> Tensor:
        """Return the loss of one response."""
        n = len(ids) - prompt
        log_prob = heat(logits, temperature).log_softmax(-1)
        lp = log_prob[prompt - shift :][:n].gather(-1, ids[prompt:, None])[:, 0]
        r = (lp - before(old, lp)).exp()
        J = torch.minimum(r * A, r.clamp(0.8, high) * A)
        return sign * (J * mask(trains)).sum() / over(trains, tokens)

    return loss


def batch(
    shows: str,
    ids: list[int],
    prompt: int,
    trains: list[bool],
    A: float,
    tokens: int,
    temperature: float,
) -> ExerciseBatch:
    """Make one response of a training step, with logits drawn from a fixed seed.

    Args:
        shows: what it shows, in words.
        ids: tokens 0 .. 3, the prompt's and then the response's.
        prompt: number of tokens of the prompt.
        trains: whether each response token trains.
        A: the advantage.
        tokens: number of tokens that train in the whole step.
        temperature: of the sampler.

    Returns:
        A batch whose inputs are the arguments of the exercise. The first four ratios
        are e^0.1, e^0.22, e^0.4 and e^-0.5, but for rounding.
    """
    random = torch.Generator().manual_seed(len(ids) + tokens)
    logits = torch.randn(len(ids), 4, generator=random, dtype=torch.float64)
    lp = (
        (logits[prompt - 1 : -1] / temperature)
        .log_softmax(-1)
        .gather(-1, torch.tensor(ids[prompt:])[:, None])[:, 0]
    )
    # log r, on both sides of the clip
    away = torch.tensor([0.1, 0.22, 0.4, -0.5])[: len(lp)]
    return ExerciseBatch(
        shows,
        {
            "logits": logits.round(decimals=2),
            "ids": torch.tensor(ids),
            "prompt": prompt,
            "trains": torch.tensor(trains),
            "old": (lp - away).round(decimals=3),
            "A": A,
            "tokens": tokens,
            "temperature": temperature,
        },
    )


def proof(loss: Callable[..., Tensor]) -> "StepReport":
    """Run `upref.check_step` on a training step made of the student's function.

    Args:
        loss: the function.

    Returns:
        The report, with DAPO as the objective and a temperature of 0.7.
    """
    from upref.step import check_step

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(48, 16), nn.Linear(16, 48))

    def student_step(model: nn.Module, rows: "list[Row]") -> None:
        """Backpropagate the student's loss of each row."""
        tokens = sum(sum(r.trains) for r in rows)
        for r in rows:
            ids = torch.tensor(r.ids)
            loss(
                model(ids[None])[0],
                ids,
                len(r.prompt),
                torch.tensor(r.trains),
                torch.tensor(r.old),
                r.adv,
                tokens,
                0.7,
            ).backward()

    return check_step(student_step, model, "dapo", temperature=0.7)


OWN = "divide by `tokens`: the parts of a step add up only if all divide by the same number."
SHIFT = "logits[s] predict the token after ids[s]: the first response token is predicted by logits[prompt - 1]."
HEAT = "the sampler drew from softmax(logits / temperature): divide the logits before log_softmax."


def own_tokens(trains: Tensor, tokens: int) -> Tensor:
    """Return the response's own number of tokens that train, in place of the step's.

    Args:
        trains: [n], whether each response token trains.
        tokens: of the step; part of the exercise's signature; not read.
    """
    return trains.sum()


EXERCISE = Exercise(
    number=11,
    slug="around-the-loss",
    title="around the loss",
    function="loss",
    gradient="logits",
    right=step(),
    batches=(
        batch(
            "one response token, temperature 1: only the shift can be wrong",
            [0, 1],
            1,
            [True],
            1.0,
            1,
            1.0,
        ),
        batch(
            "two response tokens, at temperature 0.7",
            [0, 1, 2],
            1,
            [True, True],
            1.0,
            2,
            0.7,
        ),
        batch(
            "two response tokens of a step of eight",
            [0, 1, 2],
            1,
            [True, True],
            -1.0,
            8,
            0.7,
        ),
        batch(
            "a token of a tool between others",
            [3, 0, 1, 2, 0],
            2,
            [True, False, True],
            -1.0,
            8,
            0.7,
        ),
        batch(
            "a ratio beyond each bound",
            [3, 0, 1, 2, 0, 3],
            2,
            [True, True, True, True],
            1.0,
            8,
            0.7,
        ),
    ),
    faults=(
        Fault(
            "it is as it was: all three bugs are there",
            step(shift=0, heat=lambda x, T: x, over=own_tokens),
            id="three-bugs",
            hint=SHIFT,
        ),
        Fault(
            "two bugs: the labels are not shifted, and the temperature is left out",
            step(shift=0, heat=lambda x, T: x),
            beside="temperature-missing",
            id="labels-not-shifted",
            hint=SHIFT,
        ),
        Fault(
            "two bugs: the labels are not shifted, and it divides by the response's own tokens",
            step(shift=0, over=own_tokens),
            beside="own-denominator-of-response",
            id="labels-not-shifted",
            hint=SHIFT,
        ),
        Fault(
            "two bugs: the temperature is left out, and it divides by the response's own tokens",
            step(heat=lambda x, T: x, over=own_tokens),
            beside="own-denominator-of-response",
            id="temperature-missing",
            hint=HEAT,
        ),
        Fault(
            "the labels are not shifted: logits are read at the token that they should predict",
            step(shift=0),
            id="labels-not-shifted",
            hint=SHIFT,
        ),
        Fault(
            "the temperature is left out",
            step(heat=lambda x, T: x),
            id="temperature-missing",
            hint=HEAT,
        ),
        Fault(
            "logits are multiplied by the temperature",
            step(heat=lambda x, T: x * T),
            id="temperature-multiplied",
            hint=HEAT,
        ),
        Fault(
            "it divides by the response's own tokens, not by those of the step",
            step(over=own_tokens),
            id="own-denominator-of-response",
            hint=OWN,
        ),
        Fault(
            "it divides by the response's length, tool tokens included",
            step(over=lambda trains, tokens: len(trains)),
            id="normalizer-counts-masked-tokens",
            hint=OWN,
        ),
        Fault(
            "the tokens of the tool train",
            step(mask=lambda m: torch.ones_like(m)),
            id="masked-tokens-train",
            hint="multiply by `trains`: the policy did not sample what a tool wrote.",
        ),
        Fault(
            "the old log-probabilities are the current ones: r = 1",
            step(before=lambda old, lp: lp.detach()),
            id="ratio-always-one",
            hint="the ratio is to `old`, given as it was sampled.",
        ),
        Fault(
            "the clip is PPO's, 1.2 above",
            step(high=1.2),
            id="other-eps-high",
            hint="DAPO's upper bound is 1.28.",
        ),
        Fault(
            "the sign",
            step(sign=1.0),
            id="sign-flipped",
            hint="this is a loss, to be minimized: it has a minus.",
        ),
    ),
    notice="which of the three bugs could a test at temperature 1, with one length and without tools have shown?",
    proof=proof,
)
