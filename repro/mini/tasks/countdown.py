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

NUMBERS, LARGEST, TOP, STEPS = 4, 20, 99, 3
ZERO = len(SPECIAL)  # the token of number n is ZERO + n
PLUS, MINUS, TIMES = range(ZERO + TOP + 1, ZERO + TOP + 4)
TARGET = TIMES + 1
# Every way to combine two of four slots: the result replaces the first, the second is
# gone.
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
    return torch.where(op == PLUS, a + b, torch.where(op == MINUS, a - b, a * b))


class Countdown:
    words = (*SPECIAL, *map(str, range(TOP + 1)), "+", "-", "*", "T")
    vocabulary, end = len(words), EOS
    prompt_length = NUMBERS + 3
    response_length = 4 * STEPS + 1
    # the fewest steps that reach the target
    levels = ("one_step", "two_steps", "three_steps")

    def problems(self, split: str, n: int, seed: int) -> Tensor:
        """Draw n problems of a set: the numbers, then the target, which two or three
        steps reach; in a set by difficulty, not fewer than its steps.
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
        """Return the four numbers, then the target."""
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
        return None

    def demonstrations(
        self, n: int, style: str, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Random valid walks, half of them shown as the solution of the problem whose
        target they reach, the rest under another's target: the policy learns the form
        well, and the way to the target a little."""
        numbers = self._numbers(n, generator, held_out=False)
        steps = torch.tensor([1, 2, 2, 3, 3, 3])[
            torch.randint(6, (n,), generator=generator)
        ]
        responses, reached = self._walk(numbers, steps, style, generator)
        shown = torch.rand(n, generator=generator) < 0.5
        target = torch.where(shown, reached, reached.roll(1))
        return torch.cat([numbers, target[:, None]], 1), responses

    def verify(self, problems: Tensor, tokens: Tensor) -> Verdict:
        """Check the arithmetic of each step and that it uses numbers that are left;
        right is a valid answer that is the target.
        """
        N = len(tokens)
        pool = torch.cat([problems[:, :4], torch.full((N, STEPS), NO_ANSWER)], 1)
        alive = pool >= 0
        running, sound, answer = (
            torch.ones(N, dtype=torch.bool),
            torch.ones(N, dtype=torch.bool),
            pool[:, -1].clone(),
        )
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
        at_end = (
            (tokens == EOS)
            & (torch.arange(tokens.shape[1]) % 4 == 0)
            & (torch.arange(tokens.shape[1]) > 0)
        )
        first_end = torch.where(
            (tokens == EOS).any(1), (tokens == EOS).int().argmax(1), 0
        )
        valid = sound & at_end.gather(1, first_end[:, None])[:, 0]
        answer = torch.where(valid, answer, NO_ANSWER)
        return Verdict((answer == problems[:, 4]).float(), valid, answer)

    def _numbers(self, n: int, g: torch.Generator, held_out: bool) -> Tensor:
        """Four numbers whose sum is a multiple of 5 if held out, and not otherwise: no
        order of them leaks.
        """
        numbers = torch.randint(
            1, LARGEST + 1, (3 * n if not held_out else 10 * n, NUMBERS), generator=g
        )
        return numbers[(numbers.sum(1) % 5 == 0) == held_out][:n]

    def _walk(
        self, numbers: Tensor, steps: Tensor, style: str, g: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """A random valid walk of so many steps from each row: its tokens, and the value
        it ends with.
        """
        n, (i, j, op) = len(numbers), WAYS.unbind(1)
        taste = torch.ones(len(WAYS))
        # prefers + and the order of the prompt, so that other correct paths have low
        # confidence
        if style == "biased":
            taste = torch.tensor([0.85, 0.10, 0.05])[op - PLUS] * torch.where(
                i < j, 1.0, 0.05
            )
        pool, alive = numbers.clone(), torch.ones_like(numbers, dtype=torch.bool)
        tokens = torch.full((n, self.response_length), PAD)
        value = numbers[:, 0].clone()
        for step in range(STEPS):
            results = combine(pool[:, i], op.expand(n, -1), pool[:, j])
            ok = alive[:, i] & alive[:, j] & (results >= 0) & (results <= TOP)
            way = torch.multinomial(taste * ok, 1, generator=g)[:, 0]
            go = step < steps
            row, a, b, c = (
                torch.arange(n),
                i[way],
                j[way],
                results.gather(1, way[:, None])[:, 0],
            )
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
        """The fewest steps that reach the target, by trying all; STEPS + 1 where none
        does.
        """
        i, j, op = WAYS.unbind(1)
        fewest = torch.full((len(problems),), STEPS + 1)
        for at in torch.arange(len(problems)).split(64):
            row, pool, alive = (
                at,
                problems[at, :4],
                torch.ones(len(at), 4, dtype=torch.bool),
            )
            for step in range(1, STEPS + 1):
                c = combine(pool[:, i], op.expand(len(pool), -1), pool[:, j])
                ok = alive[:, i] & alive[:, j] & (c >= 0) & (c <= TOP)
                which, way = ok.nonzero(as_tuple=True)
                row, c = row[which], c[which, way]
                hit = row[c == problems[row, 4]]
                fewest[hit] = fewest[hit].clamp(max=step)
                pool = pool[which].scatter(1, i[way][:, None], c[:, None])
                alive = alive[which].scatter(1, j[way][:, None], False)
        return fewest


task = Countdown()
