# SPDX-License-Identifier: Apache-2.0
"""Countdown: combine some of four numbers by + - * to reach a target.

    prompt    <bos> 3 7 12 4 T 57          four numbers of 1..20, a target of 0..99
    response  7 * 12 84 84 - 3 81 <eos>    up to three steps "a op b result"; every value is used once, and is in 0..99

Correct paths are rare among the valid ones, and a wrong path shows where it went wrong
only at its end.
"""

import torch
from torch import Tensor

from repro.mini.tasks import BOS, EOS, NO_ANSWER, PAD, SPECIAL, Verdict, generator
from upref.errors import InputError

NUMBERS = 4  # of a problem
LARGEST = 20  # of them
TOP = 99  # the largest target, and value on the way
STEPS = 3  # at most
ZERO = len(SPECIAL)  # the token of number n is ZERO + n
PLUS, MINUS, TIMES = range(ZERO + TOP + 1, ZERO + TOP + 4)
TARGET = TIMES + 1
# Every way to combine two of four slots, (first, second, operation): the result replaces
# the first, the second is gone.
WAYS = torch.tensor(
    [
        (i, j, op)
        for i in range(4)
        for j in range(4)
        if i != j
        for op in (PLUS, MINUS, TIMES)
    ]
)


def combine(a: Tensor, op: Tensor, b: Tensor) -> Tensor:
    """Return a + b, a - b or a * b: the last for any token that is not PLUS or MINUS."""
    return torch.where(op == PLUS, a + b, torch.where(op == MINUS, a - b, a * b))


class Countdown:
    """The task of this file, as tasks.Task describes it."""

    words = (*SPECIAL, *map(str, range(TOP + 1)), "+", "-", "*", "T")
    vocabulary, end = len(words), EOS
    prompt_length = NUMBERS + 3
    response_length = 4 * STEPS + 1
    # the fewest steps that reach the target
    levels = ("one_step", "two_steps", "three_steps")

    def problems(self, split: str, n: int, seed: int) -> Tensor:
        """Draw n problems of a set, [n, 5]: the numbers, then the target.

        A random walk of two or three steps reaches the target. In a set by difficulty
        the walk has its steps, and none with fewer reaches the target.

        Raises:
            InputError: there is no such set.
        """
        g = generator("countdown", split, seed)
        found: list[Tensor] = []
        while sum(map(len, found)) < n:
            numbers = self._numbers(2 * n, g, held_out=split != "train")
            steps = (
                2 + torch.randint(2, (len(numbers),), generator=g)
                if split in ("train", "test")
                else None
            )
            if steps is None:
                if split not in self.levels:
                    raise InputError(
                        f"countdown has no set {split!r}: choose test, {', '.join(self.levels)}."
                    )
                steps = torch.full((len(numbers),), 1 + self.levels.index(split))
            target = self._walk(numbers, steps, "walk", g)[1]
            rows = torch.cat([numbers, target[:, None]], 1)
            if split in self.levels:
                rows = rows[self._fewest_steps(rows) == steps]
            found.append(rows)
        return torch.cat(found)[:n]

    def prompts(self, problems: Tensor) -> Tensor:
        """Return the tokens of <bos>, the four numbers, T and the target, [n, 7]."""
        start = torch.full((len(problems), 1), BOS)
        return torch.cat(
            [
                start,
                problems[:, :4] + ZERO,
                torch.full_like(start, TARGET),
                problems[:, 4:] + ZERO,
            ],
            1,
        )

    def pictures(self, problems: Tensor) -> None:
        """Return None: the task has no pictures."""
        return None

    def demonstrations(
        self, n: int, style: str, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return problems [n, 5] and random valid walks, responses [n, 13].

        About half of the walks reach the target. The others have that of another walk:
        the policy learns the form well, and the way to the target a little.

        Args:
            n: how many.
            style: "walk", or "biased" toward + and the order of the numbers.
            generator: draws them.
        """
        numbers = self._numbers(n, generator, held_out=False)
        # one step in 1 of 6 walks, two in 2, three in 3
        steps = torch.tensor([1, 2, 2, 3, 3, 3])[
            torch.randint(6, (n,), generator=generator)
        ]
        responses, reached = self._walk(numbers, steps, style, generator)
        shown = torch.rand(n, generator=generator) < 0.5
        target = torch.where(shown, reached, reached.roll(1))
        return torch.cat([numbers, target[:, None]], 1), responses

    def verify(self, problems: Tensor, tokens: Tensor) -> Verdict:
        """Judge responses [N, 13]: a valid one computes each step right, from values
        that are left, and ends after it; right is one whose last result is the target.
        """
        N = len(tokens)
        # the numbers, then the result of each step; and which of them are left
        pool = torch.cat([problems[:, :4], torch.full((N, STEPS), NO_ANSWER)], 1)
        alive = pool >= 0
        running = torch.ones(N, dtype=torch.bool)  # no <eos> yet
        sound = torch.ones(N, dtype=torch.bool)  # no step so far was wrong
        answer = pool[:, -1].clone()
        ends = torch.cat([tokens, torch.full((N, 1), PAD)], 1)
        for step in range(STEPS):
            a, op, b, c = tokens[:, 4 * step : 4 * step + 4].unbind(1)
            running = running & (ends[:, 4 * step] != EOS)
            fine = (op >= PLUS) & (op <= TIMES)
            for number in (a, b):
                slot = alive & (pool == (number - ZERO)[:, None])
                fine = fine & slot.any(1)
                first = slot.int().argmax(1, keepdim=True)
                alive = alive.scatter(1, first, alive.gather(1, first) & ~fine[:, None])
            fine = (
                fine
                & (combine(a - ZERO, op, b - ZERO) == c - ZERO)
                & (c >= ZERO)
                & (c <= ZERO + TOP)
            )
            sound = sound & (fine | ~running)
            pool[:, 4 + step] = torch.where(running & fine, c - ZERO, NO_ANSWER)
            alive[:, 4 + step] = running & fine
            answer = torch.where(running, c - ZERO, answer)
        is_end = tokens == EOS
        place = torch.arange(tokens.shape[1])
        at_end = is_end & (place % 4 == 0) & (place > 0)  # after a whole step
        # without <eos>: place 0, which is no end
        first_end = torch.where(is_end.any(1), is_end.int().argmax(1), 0)
        valid = sound & at_end.gather(1, first_end[:, None])[:, 0]
        # NO_ANSWER is never a target, so that only a valid response is right
        answer = torch.where(valid, answer, NO_ANSWER)
        return Verdict((answer == problems[:, 4]).float(), valid, answer)

    def _numbers(self, n: int, g: torch.Generator, held_out: bool) -> Tensor:
        """Return four numbers a row, [n, 4]. Held out are those whose sum is a multiple
        of 5, so that no other order of held-out numbers is trained on.
        """
        # a fifth of the rows is held out
        drawn = 10 * n if held_out else 3 * n
        numbers = torch.randint(1, LARGEST + 1, (drawn, NUMBERS), generator=g)
        return numbers[(numbers.sum(1) % 5 == 0) == held_out][:n]

    def _walk(
        self, numbers: Tensor, steps: Tensor, style: str, g: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw a random valid walk from each row: of all ways to go on, one with equal
        chance, or by the bias of the style.

        Args:
            numbers: [n, 4].
            steps: [n], of each walk.
            style: "biased" or any other.
            g: draws it.

        Returns:
            The tokens of the responses, [n, 13], and the values with which they end,
            [n].
        """
        n = len(numbers)
        i, j, op = WAYS.unbind(1)
        taste = torch.ones(len(WAYS))  # how likely each way is, up to a factor
        # prefers + and the order of the prompt, so that other correct paths have low
        # confidence
        if style == "biased":
            of_operation = torch.tensor([0.85, 0.10, 0.05])[op - PLUS]
            taste = of_operation * torch.where(i < j, 1.0, 0.05)
        pool = numbers.clone()  # what is in the four slots
        alive = torch.ones_like(numbers, dtype=torch.bool)
        tokens = torch.full((n, self.response_length), PAD)
        value = numbers[:, 0].clone()
        for step in range(STEPS):
            results = combine(pool[:, i], op.expand(n, -1), pool[:, j])
            ok = alive[:, i] & alive[:, j] & (results >= 0) & (results <= TOP)
            way = torch.multinomial(taste * ok, 1, generator=g)[:, 0]
            go = step < steps  # walks that have this step
            row = torch.arange(n)
            a, b = i[way], j[way]  # slots
            c = results.gather(1, way[:, None])[:, 0]
            said = torch.stack(
                [pool[row, a] + ZERO, op[way], pool[row, b] + ZERO, c + ZERO], 1
            )
            tokens[:, 4 * step : 4 * step + 4] = torch.where(go[:, None], said, PAD)
            tokens[step == steps, 4 * step] = EOS
            value = torch.where(go, c, value)
            pool[row, a] = torch.where(go, c, pool[row, a])
            alive[row, b] &= ~go
        tokens[steps == STEPS, 4 * STEPS] = EOS
        return tokens, value

    def _fewest_steps(self, problems: Tensor) -> Tensor:
        """Return the fewest steps that reach the target, [n], by trying all; STEPS + 1
        where none does.

        Args:
            problems: [n, 5].
        """
        i, j, op = WAYS.unbind(1)
        fewest = torch.full((len(problems),), STEPS + 1)
        # 64 at once: each has up to 36 · 18 · 6 walks
        for at in torch.arange(len(problems)).split(64):
            row = at  # of each walk its problem
            pool = problems[at, :4]
            alive = torch.ones(len(at), 4, dtype=torch.bool)
            for step in range(1, STEPS + 1):
                c = combine(pool[:, i], op.expand(len(pool), -1), pool[:, j])
                ok = alive[:, i] & alive[:, j] & (c >= 0) & (c <= TOP)
                # every walk goes on in every way that it can
                which, way = ok.nonzero(as_tuple=True)
                row, c = row[which], c[which, way]
                hit = row[c == problems[row, 4]]  # problems whose target is reached
                fewest[hit] = fewest[hit].clamp(max=step)
                pool = pool[which].scatter(1, i[way][:, None], c[:, None])
                alive = alive[which].scatter(1, j[way][:, None], False)
        return fewest


task = Countdown()
