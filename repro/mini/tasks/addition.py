# SPDX-License-Identifier: Apache-2.0
"""Addition of two numbers of two digits, after one worked example, in the tokens of
SmolLM2.

    prompt    14 + 23 = 37\\n58 + 67 =
    response  125\\n              with the space before it; the line ends the response

SmolLM2 reads and writes a number digit by digit, so all prompts have the same length.
"""

import torch
from torch import Tensor

from repro.mini.tasks import NO_ANSWER, Verdict, generator
from upref.errors import InputError

# tokens of SmolLM2: of digit d DIGIT + d, then " ", "\n", " +" and " ="
DIGIT, SPACE, LINE, PLUS, EQUALS = 32, 216, 198, 1232, 446
FIRST, LAST = 10, 99
EXAMPLE = (14, 23)


class Addition:
    """The task of this file, as tasks.Task describes it."""

    words = ()
    vocabulary, end = 49152, LINE
    prompt_length = 18
    response_length = 5
    levels = ()

    def problems(self, split: str, n: int, seed: int) -> Tensor:
        """Return pairs of numbers, [n, 2]; none comes twice before all of the set came
        once.

        Held out is a fifth of all pairs, by a hash that no digit decides. The worked
        example is in no set.

        Raises:
            InputError: there is no such set.
        """
        if split not in ("train", "test"):
            raise InputError(f"addition has no set {split!r}: choose train or test.")
        numbers = torch.arange(FIRST, LAST + 1, device="cpu")
        pairs = torch.cartesian_prod(numbers, numbers)
        a, b = pairs.unbind(1)
        held_out = (37 * a + 61 * b) % 97 % 5 == 0
        is_example = (a == EXAMPLE[0]) & (b == EXAMPLE[1])
        mine = pairs[~is_example & (held_out == (split == "test"))]
        g = generator("addition", split, seed)
        rounds = -(-n // len(mine))
        orders = [
            torch.randperm(len(mine), generator=g, device="cpu") for _ in range(rounds)
        ]
        return mine[torch.cat(orders)[:n]]

    def prompts(self, problems: Tensor) -> Tensor:
        """Return the tokens of a worked example, then of the sum that is asked for, [n,
        18].
        """
        example = torch.tensor([EXAMPLE], device=problems.device)
        total = example.sum(1)
        line = torch.full_like(total, LINE)
        space = torch.full_like(total, SPACE)
        worked = torch.stack([space, *_digits(total), line], 1)
        asked = torch.cat([self._sum(example), worked], 1)
        return torch.cat([asked.expand(len(problems), -1), self._sum(problems)], 1)

    def pictures(self, problems: Tensor) -> None:
        """Return None: the task has no pictures."""
        return None

    def verify(self, problems: Tensor, tokens: Tensor) -> Verdict:
        """Judge responses [N, T]: a valid one is a space, a number that does not begin
        with 0, and the end of the line; what follows is not read.
        """
        is_digit = (tokens >= DIGIT) & (tokens < DIGIT + 10)
        goes_on = (tokens[:, 0] == SPACE) & (tokens[:, 1] != DIGIT)
        value = torch.zeros_like(tokens[:, 0])
        valid = torch.zeros_like(goes_on)
        # token by token: goes_on while there were digits only, value is their number
        for t in range(1, tokens.shape[1]):
            valid |= goes_on & (tokens[:, t] == LINE) & (t > 1)
            goes_on = goes_on & is_digit[:, t]
            value = torch.where(goes_on, 10 * value + tokens[:, t] - DIGIT, value)
        right = valid & (value == problems.to(tokens.device).sum(1))
        return Verdict(right.float(), valid, torch.where(valid, value, NO_ANSWER))

    def _sum(self, problems: Tensor) -> Tensor:
        """Return the tokens of `58 + 67 =`, [n, 7]."""
        a, b = problems.unbind(1)
        plus = torch.full_like(a, PLUS)
        space = torch.full_like(a, SPACE)
        equals = torch.full_like(a, EQUALS)
        return torch.stack([*_digits(a), plus, space, *_digits(b), equals], 1)


def _digits(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens of tens and ones of numbers of two digits."""
    return numbers // 10 + DIGIT, numbers % 10 + DIGIT


task = Addition()
