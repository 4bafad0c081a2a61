# SPDX-License-Identifier: Apache-2.0
"""Chain: add and subtract two-digit numbers modulo 100, digit by digit, one running
total after the other.

    prompt    <bos> 4 7 + 2 6 - 1 3 + 0 0 =       2 to 4 terms; those that are missing are + 0 0
    response  7 3 ; 6 0 ; 6 0 <eos>               only the last total is judged

Unlike Countdown's, the answer stands nowhere in the prompt, and a right answer has many
wrong neighbours that vote.
"""

import torch
from torch import Tensor

from repro.mini.tasks import BOS, EOS, NO_ANSWER, SPECIAL, Verdict, generator
from upref.errors import InputError

TERMS = 4
ZERO = len(SPECIAL)  # the token of digit d is ZERO + d
PLUS, MINUS, EQUALS, THEN = range(ZERO + 10, ZERO + 14)
# of a demonstrated total: its carry or borrow is forgotten, or its last digit is off by
# one
MISTAKE = 0.5


class Chain:
    """The task of this file, as tasks.Task describes it."""

    words = (*SPECIAL, *map(str, range(10)), "+", "-", "=", ";")
    vocabulary, end = len(words), EOS
    prompt_length = 1 + 3 * TERMS
    response_length = 3 * (TERMS - 1)
    levels = ("two_terms", "three_terms", "four_terms")

    def problems(self, split: str, n: int, seed: int) -> Tensor:
        """Return rows of the first term and the signed others, 0 where a term is
        missing, [n, 4].

        Raises:
            InputError: there is no such set.
        """
        if split not in ("train", "test", *self.levels):
            raise InputError(
                f"chain has no set {split!r}: choose test, {', '.join(self.levels)}."
            )
        terms = self.levels.index(split) + 2 if split in self.levels else None
        return self._draw(n, terms, split != "train", generator("chain", split, seed))

    def prompts(self, problems: Tensor) -> Tensor:
        """Return the tokens of <bos>, each term with its sign, and =, [n, 13]."""
        n, size = len(problems), problems.abs()
        signs = torch.where(problems < 0, MINUS, PLUS)
        signs[:, 0] = BOS
        parts = torch.stack([signs, size // 10 + ZERO, size % 10 + ZERO], 2).view(n, -1)
        return torch.cat([parts, torch.full((n, 1), EQUALS)], 1)

    def pictures(self, problems: Tensor) -> None:
        """Return None: the task has no pictures."""
        return None

    def demonstrations(
        self, n: int, style: str, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return problems [n, 4] and responses [n, 9] of somebody who errs in a share
        MISTAKE of the totals, and goes on from the error; the style is not read.
        """
        problems = self._draw(n, None, False, generator)
        total, said = problems[:, 0], []
        for term in problems[:, 1:].unbind(1):
            exact = (total + term) % 100
            is_of_carry = torch.rand(n, generator=generator) < 0.5
            tens = (total // 10 + term.sign() * (term.abs() // 10)) % 10
            without_carry = tens * 10 + exact % 10
            step = 1 - 2 * torch.randint(2, (n,), generator=generator)  # 1 or -1
            one_off = exact // 10 * 10 + (exact + step) % 10
            slip = torch.where(is_of_carry, without_carry, one_off)
            total = torch.where(
                torch.rand(n, generator=generator) < MISTAKE, slip, exact
            )
            said += [total // 10 + ZERO, total % 10 + ZERO, torch.full((n,), THEN)]
        said[-1].fill_(EOS)
        return problems, torch.stack(said, 1)

    def verify(self, problems: Tensor, tokens: Tensor) -> Verdict:
        """Judge responses [N, 9]: a valid one has the form of three totals; right is
        one whose last total is the sum modulo 100.
        """
        parts = tokens.view(len(tokens), TERMS - 1, 3)
        digits = ((parts[..., :2] >= ZERO) & (parts[..., :2] < ZERO + 10)).all(2).all(1)
        ends = (parts[:, :-1, 2] == THEN).all(1) & (parts[:, -1, 2] == EOS)
        valid = digits & ends
        answer = (parts[:, -1, 0] - ZERO) * 10 + parts[:, -1, 1] - ZERO
        right = valid & (answer == problems.sum(1) % 100)
        return Verdict(right.float(), valid, torch.where(valid, answer, NO_ANSWER))

    def _draw(
        self, n: int, terms: int | None, held_out: bool, g: torch.Generator
    ) -> Tensor:
        """Return n problems, [n, 4]; held out are those whose terms, without their
        signs, add up to a multiple of 5.

        Args:
            n: how many.
            terms: of each; None draws 2 to 4 for each.
            held_out: whether to return held-out problems alone, or the others alone.
            g: draws them.
        """
        # a fifth of the rows is held out
        rows = torch.randint(1, 100, (10 * n + 20, TERMS), generator=g)
        signs = 1 - 2 * torch.randint(2, rows.shape, generator=g)
        signs[:, 0] = 1
        count = (
            torch.randint(2, TERMS + 1, (len(rows), 1), generator=g)
            if terms is None
            else terms
        )
        rows = rows * (torch.arange(TERMS) < count)
        mine = (rows.sum(1) % 5 == 0) == held_out
        return (rows * signs)[mine][:n]


task = Chain()
