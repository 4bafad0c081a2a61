# SPDX-License-Identifier: Apache-2.0
"""Geometry: two rectangles in a picture, and a question about both.

picture   48 x 48 pixels, a 6 x 6 grid: a red rectangle in the left half, a blue one in the right
prompt    <bos> <|vision_start|> <|image_pad|> x 9 <|vision_end|> area sum
response  6 10 16 <eos>               of the red, of the blue, and the answer; only the answer is judged
"""

import torch
from torch import Tensor

from repro.mini.tasks import BOS, EOS, NO_ANSWER, SPECIAL, Verdict, generator
from upref.errors import InputError

GRID, CELL, HALF = 6, 8, 3  # cells of a side, pixels of a cell, cells of half a side
MOST = 49  # a rectangle is misread as 4 x 6 at most, and two of those add up to 48
ZERO = len(SPECIAL)  # the token of number n is ZERO + n
AREA, SUM = ZERO + MOST, ZERO + MOST + 2  # then perimeter, and difference
START, IMAGE, VIDEO, END = range(SUM + 2, SUM + 6)
IMAGE_TOKENS = (GRID // 2) ** 2
# of a demonstrated area or perimeter: one side is taken for one longer or shorter
MISREAD = 0.6
# of the red rectangle; the blue one's stand 4 further on, then what, and how
W, H, X, Y = range(4)
WHAT, HOW = 8, 9


class Geometry:
    """The task of this file, as tasks.Task describes it."""

    words = (
        *SPECIAL,
        *map(str, range(MOST)),
        *("area", "perimeter", "sum", "difference"),
        *("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"),
    )
    vocabulary, end = len(words), EOS
    prompt_length = 1 + 2 + IMAGE_TOKENS + 2
    response_length = 4
    levels = ("area", "perimeter")

    def problems(self, split: str, n: int, seed: int) -> Tensor:
        """Return rows of w, h, x, y of the red and then of the blue rectangle, in
        cells; 0 for area or 1 for perimeter; 0 for sum or 1 for difference; [n, 10].

        Raises:
            InputError: there is no such set.
        """
        if split not in ("train", "test", *self.levels):
            raise InputError(
                f"geometry has no set {split!r}: choose test, {', '.join(self.levels)}."
            )
        rows = self._draw(n, split != "train", generator("geometry", split, seed))
        if split in self.levels:
            rows[:, WHAT] = self.levels.index(split)
        return rows

    def prompts(self, problems: Tensor) -> Tensor:
        """Return the tokens of the picture's place and of the question, [n, 14]."""
        before = torch.tensor([BOS, START, *[IMAGE] * IMAGE_TOKENS, END]).expand(
            len(problems), -1
        )
        return torch.cat([before, problems[:, WHAT:] + torch.tensor([AREA, SUM])], 1)

    def pictures(self, problems: Tensor) -> Tensor:
        """Return float32 [n, 3, 48, 48] in [-1, 1]: both rectangles on white."""
        at = torch.arange(GRID)
        picture = torch.ones(len(problems), 3, GRID, GRID)
        for start, color in ((0, (1.0, -1.0, -1.0)), (4, (-1.0, -1.0, 1.0))):
            w, h, x, y = problems[:, start : start + 4, None].unbind(1)
            inside = ((at >= y) & (at < y + h))[:, :, None] & (
                (at >= x) & (at < x + w)
            )[:, None, :]
            picture = torch.where(
                inside[:, None], torch.tensor(color)[:, None, None], picture
            )
        return picture.repeat_interleave(CELL, 2).repeat_interleave(CELL, 3)

    def demonstrations(
        self, n: int, style: str, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return problems [n, 10] and responses [n, 4]. In a share MISREAD of the
        rectangles, one side is taken for longer or shorter by one, but never below 1;
        the style is not read.
        """
        problems = self._draw(n, False, generator)
        seen = problems.clone()
        for start in (0, 4):
            side = torch.stack([seen[:, start + W], seen[:, start + H]], 1)
            off = torch.nn.functional.one_hot(
                torch.randint(2, (n,), generator=generator), 2
            )
            off *= 1 - 2 * torch.randint(2, (n, 1), generator=generator)
            misread = torch.rand(n, 1, generator=generator) < MISREAD
            seen[:, start : start + 2] = (side + off * misread).clamp(min=1)
        return problems, torch.cat(
            [self._answers(seen) + ZERO, torch.full((n, 1), EOS)], 1
        )

    def verify(self, problems: Tensor, tokens: Tensor) -> Verdict:
        """Judge responses [N, 4]: a valid one is three numbers and <eos>; right is one
        whose third number is the answer to the question.
        """
        numbers = (tokens[:, :3] >= ZERO) & (tokens[:, :3] < ZERO + MOST)
        valid = numbers.all(1) & (tokens[:, 3] == EOS)
        # NO_ANSWER is never the answer, so that only a valid response is right
        answer = torch.where(valid, tokens[:, 2] - ZERO, NO_ANSWER)
        return Verdict((answer == self._answers(problems)[:, 2]).float(), valid, answer)

    def _answers(self, problems: Tensor) -> Tensor:
        """Return the number of the red rectangle, of the blue one, and of
        both, [n, 3].
        """
        w, h = problems[:, [W, 4 + W]], problems[:, [H, 4 + H]]
        each = torch.where(problems[:, WHAT, None] == 0, w * h, 2 * (w + h))
        a, b = each.unbind(1)
        return torch.stack(
            [a, b, torch.where(problems[:, HOW] == 0, a + b, (a - b).abs())], 1
        )

    def _draw(self, n: int, held_out: bool, g: torch.Generator) -> Tensor:
        """Return n problems, [n, 10]; a fifth of all pairs of shapes is held out,
        wherever they are.

        Args:
            n: how many.
            held_out: whether to return held-out problems alone, or the others alone.
            g: draws them.
        """

        def below(most: Tensor) -> Tensor:
            """Draw a whole number from 0 to most - 1 for each entry."""
            return (torch.rand(len(most), generator=g) * most).long()

        N = 10 * n + 40
        sides = []
        for left in (0, HALF):
            w = 1 + torch.randint(HALF, (N,), generator=g)
            h = 1 + torch.randint(GRID, (N,), generator=g)
            sides += [w, h, left + below(HALF - w + 1), below(GRID - h + 1)]
        rows = torch.stack([*sides, *torch.randint(2, (2, N), generator=g)], 1)
        # a hash of the sides
        shapes = rows[:, [W, H, 4 + W, 4 + H]] @ torch.tensor([1, 2, 3, 4])
        return rows[(shapes % 5 == 0) == held_out][:n]


task = Geometry()
