# SPDX-License-Identifier: Apache-2.0
"""The inputs of a proof of an advantage estimator: a few responses, whose rewards are
variables, equal variables or numbers, and the prompts that they belong to.

Points at which two rewards are equal are no part of a proof of free rewards. In training
most rewards are equal, so equal ones have patterns of their own: all ways in which up to
three responses can tie, groups that tie, and rewards of 0 and 1, of -1 and 1.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from upref.proof.domain import IDS, Domain, Pattern, named_by, partitions
from upref.rollouts import Rollouts

LARGEST = 1e6  # |R|: beyond, a clamp is a guard
APART = 1e-6  # relative difference of two rewards at which functions are said to differ
NUDGE = 1e-4  # of the largest reward: by which equal ones are moved apart
ALL_TIES = 3  # responses, up to which every way to tie is a pattern
TWO_VALUES = ((0.0, 1.0), (-1.0, 1.0))
SPREADS = (1.0, 1.0, 0.3, 1e-2, 1e-4, 1e-6)  # of rewards that are drawn
FAR = {"far": 1e-3, "extreme": 1e5}


@dataclass(frozen=True)
class RewardPattern(Pattern):
    """What is fixed of a batch of rewards.

    Attributes:
        rewards: the name of a variable for each response, or a number.
    """

    rewards: tuple[str | float, ...] = field(kw_only=True)

    @property
    def is_free(self) -> bool:
        """Whether all rewards are variables."""
        return not any(isinstance(x, float) for x in self.rewards)

    def __str__(self) -> str:
        """Return the rewards and the prompts in words."""
        words = [x if isinstance(x, str) else f"{x:g}" for x in self.rewards]
        return f"rewards {' '.join(words)} of prompts {' '.join(map(str, self.group))}"


def pattern_of(rewards: Sequence[str | float], group: Sequence[int]) -> RewardPattern:
    """Return the pattern of a batch of responses, each of one token that trains.

    Args:
        rewards: names and numbers.
        group: the prompt of each response.
    """
    mask = ((True,),) * len(rewards)
    return RewardPattern(mask, tuple(group), rewards=tuple(rewards))


def reward_patterns(responses: int, contiguous: bool) -> list[RewardPattern]:
    """Return the batches of an estimator, the smallest first.

    Args:
        responses: of the largest batch.
        contiguous: prompts are contiguous and have as many responses each.
    """
    out: dict[RewardPattern, None] = {}
    for count in range(1, responses + 1):
        for group in partitions(count):
            if not contiguous or _is_even(group):
                out |= dict.fromkeys(_free_tied_and_two_valued(group))
    return sorted(out, key=lambda pattern: pattern.tokens)


def two_valued_patterns(responses: int) -> list[RewardPattern]:
    """Return the batches of an estimator that reads right and wrong alone.

    Args:
        responses: of the largest batch.
    """
    return [
        pattern_of(rewards, (0,) * count)
        for count in range(1, responses + 1)
        for values in TWO_VALUES
        for rewards in itertools.product(values, repeat=count)
    ]


def _free_tied_and_two_valued(group: tuple[int, ...]) -> Iterator[RewardPattern]:
    """Yield the batches of one way to divide responses among prompts: with rewards that
    are variables, with equal ones, and with rewards of two values.
    """
    count = len(group)
    free = [f"R{i}" for i in range(count)]
    yield pattern_of(free, group)
    yield pattern_of(free, named_by(group, IDS[0]))
    yield pattern_of([f"R{g}" for g in group], group)  # each prompt's responses tie
    yield pattern_of(["R0"] * count, group)
    yield pattern_of([0.0] * count, group)
    for i in range(min(count, ALL_TIES)):
        yield pattern_of(
            [0.0 if i == j else name for j, name in enumerate(free)], group
        )
    if count <= ALL_TIES:
        for ties in partitions(count):
            yield pattern_of([f"R{tie}" for tie in ties], group)
    # of more responses in two ways alone: the batches double with each response
    one_prompt = (0,) * count
    two_prompts = (0,) * 2 + (1,) * (count - 2)
    if count <= ALL_TIES or group in (one_prompt, two_prompts):
        for values in TWO_VALUES:
            for rewards in itertools.product(values, repeat=count):
                yield pattern_of(rewards, group)


def _is_even(group: tuple[int, ...]) -> bool:
    """Tell whether prompts are contiguous and have as many responses each."""
    sizes = {group.count(g) for g in group}
    runs = [g for g, _ in itertools.groupby(group)]
    return len(sizes) == 1 and len(runs) == len(set(group))


@dataclass(frozen=True)
class RewardDomain(Domain):
    """The variables of a batch of rewards: they stand in the place of the advantages."""

    def __post_init__(self) -> None:
        """Make the ids of the rewards, [N, 1], in place of advantages: variables and
        numbers.
        """
        v = self.values
        ids = [
            v.variable(x, -LARGEST, LARGEST) if isinstance(x, str) else v.number(x)
            for x in self._rewards
        ]
        self.ids["adv"] = torch.tensor(ids)[:, None]

    @property
    def _rewards(self) -> tuple[str | float, ...]:
        """The name of a variable for each response, or a number."""
        assert isinstance(self.pattern, RewardPattern)
        return self.pattern.rewards

    @property
    def _names(self) -> list[str]:
        """The names of the variables, each once."""
        return list(dict.fromkeys(x for x in self._rewards if isinstance(x, str)))

    @property
    def is_moderate(self) -> bool:
        """Whether no number overflows that is made of these rewards."""
        return True

    def assumptions(self, names: set[str]) -> list[int]:
        """Return no conditions: the bounds of each variable suffice."""
        return []

    def is_inside(self, point: Mapping[str, float]) -> bool:
        """Tell whether the rewards of a point are within their bounds, and further apart
        than rounding.

        Args:
            point: a number for each variable.
        """
        numbers = [point[name] for name in self._names]
        return all(abs(x) < LARGEST for x in numbers) and all(
            abs(x - y) > APART * max(abs(x), abs(y))
            for x, y in itertools.combinations(numbers, 2)
        )

    def draw(self, seed: int, where: str = "near") -> dict[str, float]:
        """Return rewards at random, nearly equal ones and small ones too.

        Args:
            seed: of the draw.
            where: "near", where rewards mostly lie, or one of FAR.
        """
        chance = random.Random(f"{seed} {self.pattern}")
        spread = FAR.get(where) or SPREADS[seed % len(SPREADS)]
        middle = chance.choice((0, 1)) * chance.gauss(0, 1) if spread > 0.1 else 0.0
        drawn = {name: middle + spread * chance.gauss(0, 1) for name in self._names}
        return self.complete(drawn, {})

    def complete(
        self, point: Mapping[str, float], found: Mapping[str, float]
    ) -> dict[str, float]:
        """Return a point with the numbers that a solver found; of equal ones, which it
        likes, each is moved a little.

        Args:
            point: a number for each variable.
            found: those that are fixed.
        """
        out = {"scale": 1.0} | dict(point) | dict(found)
        size = max((abs(out[name]) for name in self._names), default=0.0) or 1.0
        seen: set[float] = set()
        for name in self._names:
            while out[name] in seen:
                out[name] += NUDGE * size
            seen.add(out[name])
        return out

    def batch(self, point: Mapping[str, float]) -> Rollouts:
        """Return the batch of a point, in float64: rewards stand as advantages.

        Args:
            point: a number for each variable.
        """
        rewards = [point[x] if isinstance(x, str) else x for x in self._rewards]
        zeros = torch.zeros(len(rewards), 1, dtype=torch.float64)
        return Rollouts.unchecked(
            logp=zeros,
            logp_old=zeros.clone(),
            adv=torch.tensor(rewards, dtype=torch.float64)[:, None],
            mask=torch.ones(len(rewards), 1, dtype=torch.bool),
            group=torch.tensor(self.pattern.group),
        )

    def magnitude(self, batch: Rollouts) -> float:
        """Return the size of numbers that matter: that of the largest reward. Where equal
        rewards are no binary fractions, their gap to their mean is one rounding, and it
        is divided by eps.

        Args:
            batch: of `batch`.
        """
        return batch.adv.abs().max().item()

    def describe(self, point: Mapping[str, float]) -> str:
        """Return the rewards of a point, in words.

        Args:
            point: a number for each variable.
        """
        numbers = [point[x] if isinstance(x, str) else x for x in self._rewards]
        return "R = " + ", ".join(f"{x:.9g}" for x in numbers)
