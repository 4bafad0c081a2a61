# SPDX-License-Identifier: Apache-2.0
"""The inputs of a proof: a small batch, whose numbers are variables.

A token has r = π_θ/π_old and π_old, both as variables above 0, so that log π_θ is
log r + log π_old; and where they are read, k = π_ref/π_θ, rho = π_old/μ of the sampler,
and the entropy. Masks and group ids are enumerated, up to the order of the rows.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from upref.proof.trace import Trace
from upref.proof.values import Values
from upref.rollouts import Rollouts

# |log r| of a token, and added up over a response: beyond, a clamp is a guard; of the
# mean of a response (docs/what-check-sees.md)
MOST_LOG_RATIO = 20.0
MOST_MEAN_LOG_RATIO = 10.0
LEAST_LOG_PROB = -200.0  # log π_old: beyond, a clamp is a guard
FAR = {  # |log r| and |log |A|| of points that are far from common ones
    "far": (9.0, 14.0),
    "extreme": (19.5, 30.0),
}
# for what a loss is proved, in a few words; Proof.domain has all of them. Then the same
# for an objective of the mean of a response
EVERY_VALUE = f"for every value within |log r| <= {MOST_LOG_RATIO:g}"
EVERY_MEAN = f"{EVERY_VALUE} (the mean of a response: {MOST_MEAN_LOG_RATIO:g})"
RATIO = (math.exp(-MOST_LOG_RATIO), math.exp(MOST_LOG_RATIO))
PROBABILITY = (math.exp(LEAST_LOG_PROB), 1.0)


@dataclass(frozen=True)
class Pattern:
    """What is fixed of a batch.

    Attributes:
        mask: a tuple of bools for each row.
        group: the prompt of each row; empty: all rows are of one prompt.
        zeros: tokens whose advantage is 0, as (row, column).
        on_policy: π_θ, π_old and π_ref are equal.
        advantages: of which kind, one of ADVANTAGES.
        certain: one policy or both give tokens the probability 1, as in short floats.
        free_reference: π_ref is another policy, even where π_θ and π_old are fixed.
        padded: masked slots hold 0, for log-probabilities and advantages of tokens.
    """

    mask: tuple[tuple[bool, ...], ...]
    group: tuple[int, ...] = ()
    zeros: frozenset[tuple[int, int]] = frozenset()
    on_policy: bool = False
    advantages: str = "free"
    certain: bool = False
    free_reference: bool = False
    padded: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.mask), len(self.mask[0])

    @property
    def is_free(self) -> bool:
        """Whether all ratios and advantages are variables."""
        is_fixed = self.on_policy or self.zeros or self.certain or self.padded
        return not is_fixed and self.advantages == "free"

    @property
    def tokens(self) -> int:
        """How many tokens train."""
        return sum(map(sum, self.mask))

    def __str__(self) -> str:
        return " ".join("".join("x" if x else "." for x in row) for row in self.mask)


ADVANTAGES = ("of a response", "equal", "1 and -1", "-1 and 1")
# of prompts: with gaps, in no order, with 0, and in another order as texts; small ones;
# two of them are equal where an id is divided by 2, or is taken modulo 2, 3 or 4
IDS = ((10, 9, 4, 13), (7, 3, 6, 12), (0, 6, 5, 11), (1, 2, 0, 3), (2, 3, 1, 0))


def patterns(
    rows: int, columns: int, with_groups: bool, with_reference: bool = False
) -> Iterator[Pattern]:
    """Yield every mask of a shape up to the order of the rows, each row with a token.

    Points at which two compared values are equal are no part of a proof. Some of them
    are common in training, so they have patterns of their own: `_special`.

    Args:
        rows, columns: of the batch.
        with_groups: the ways to divide the rows into prompts, too.
        with_reference: equal policies beside another reference policy, too.
    """
    masks = itertools.combinations_with_replacement(_masks_of_row(columns), rows)
    for number, (mask, ids) in enumerate(zip(masks, itertools.cycle(IDS))):
        yield Pattern(mask)
        if with_groups:
            yield from (Pattern(mask, group) for group in _groups(rows, ids))
        if with_groups and rows > 1 and number == 0:
            yield from (Pattern(mask, _own_prompts(rows, x)) for x in IDS[1:])
    yield from _special(rows, columns, with_reference)
    if with_groups and rows > 1:
        # a prompt for each row, on two masks
        few = _masks_of_special(rows, columns)
        first_and_last = {few[0], few[-1]}
        special = _special(rows, columns, with_reference)
        chosen = (p for p in special if p.mask in first_and_last)
        for pattern, ids in zip(chosen, itertools.cycle(IDS)):
            yield replace(pattern, group=_own_prompts(rows, ids))


def _masks_of_row(columns: int) -> list[tuple[bool, ...]]:
    """Return every mask of a row with a token, the full one first; the last one has the
    last token alone.
    """
    each = itertools.product((True, False), repeat=columns)
    return [row for row in each if any(row)]


def _masks_of_special(rows: int, columns: int) -> list[tuple[tuple[bool, ...], ...]]:
    """Return the masks on which special values are tried: each mask of the last row, where
    the other rows are full.
    """
    each = _masks_of_row(columns)
    return [(each[0],) * (rows - 1) + (last,) for last in each]


def _special(rows: int, columns: int, with_reference: bool) -> Iterator[Pattern]:
    """Yield the patterns of values that are common in training, and at which compared
    values are equal, of one prompt. The report names them:
    `describe_special` of upref/verify/proof.py.

    Equal policies, advantages of 0 in all rows, and masked slots of 0 come with each mask
    of `_masks_of_special`. Advantages of 0 elsewhere come with the first and the last of
    them. Other advantages, and probabilities of 1, come with full masks.

    Args:
        rows, columns: of the batch.
        with_reference: a reference policy is read.
    """
    masks = _masks_of_special(rows, columns)
    full = masks[0]
    every_zero, *other_zeros = _zeros(rows, columns)
    for mask in masks:
        yield Pattern(mask, on_policy=True)
        if with_reference:
            yield Pattern(mask, on_policy=True, free_reference=True)
        yield Pattern(mask, zeros=every_zero)
        if mask != full:
            yield Pattern(mask, padded=True)
    for mask in dict.fromkeys((full, masks[-1])):
        yield from (Pattern(mask, zeros=zeros) for zeros in other_zeros)
    yield from (Pattern(full, advantages=kind) for kind in ADVANTAGES)
    yield Pattern(full, certain=True)
    if with_reference:
        yield Pattern(full, certain=True, free_reference=True)


def _zeros(rows: int, columns: int) -> Iterator[frozenset[tuple[int, int]]]:
    """Yield sets of tokens whose advantage is 0: all rows, some rows, and one token."""
    for count in range(rows, 0, -1):
        for chosen in itertools.combinations(range(rows), count):
            yield frozenset(itertools.product(chosen, range(columns)))
    if columns > 1:
        yield frozenset({(0, 0)})


def partitions(count: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to divide things into sets, by the number of the set of each.

    Args:
        count: of the things.
    """
    if count == 0:
        yield ()
        return
    for numbers in partitions(count - 1):
        for number in range(max(numbers, default=-1) + 2):
            yield (*numbers, number)


def _groups(rows: int, ids: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the ways to divide rows into two prompts or more, by their ids."""
    for numbers in partitions(rows):
        if any(numbers):
            yield named_by(numbers, ids)


def _own_prompts(rows: int, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ids of prompts of which each has one row."""
    return named_by(tuple(range(rows)), ids)


def named_by(numbers: tuple[int, ...], ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return an id for each row, that of its prompt's number. Where there are more
    prompts than ids, the others get larger ones.

    Args:
        numbers: of the prompt of each row.
        ids: one of IDS.
    """
    return tuple(ids[n % len(ids)] + 20 * (n // len(ids)) for n in numbers)


@dataclass(frozen=True)
class Domain:
    """The variables of a batch of one pattern.

    Attributes:
        values: all formulas.
        pattern: mask and prompts.
        per_response: one advantage for each row, not for each token.
        reads: of logp_ref, logp_sampler and entropy, those that are variables.
        bounds_mean: the mean of log r over a response lies within 10, as where an
            objective has a ratio of the whole response.
        ids: of each input, made here.
        known_assumptions: by the variables that are read, made once for each set of them.
    """

    values: Values
    pattern: Pattern
    per_response: bool
    reads: frozenset[str] = frozenset()
    bounds_mean: bool = False
    ids: dict[str, Tensor] = field(default_factory=dict)
    known_assumptions: dict[frozenset[str], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the columns: a variable for each slot, or what the pattern fixes there."""
        v = self.values
        B, T = self.pattern.shape
        certain = self.pattern.certain
        on_policy = self.pattern.on_policy
        log_r = self._logs_of_one() if on_policy else self._logs("r", *RATIO)
        log_mu = self._logs("mu", *PROBABILITY)
        if certain:
            self._make_certain(log_r, log_mu)
        if self.pattern.padded:
            self._pad(log_r)
            self._pad(log_mu)
        lp = _each(v.add, log_r, log_mu)
        advantages = [[self._advantage(i, t) for t in range(T)] for i in range(B)]
        rows = {"logp": lp, "logp_old": log_mu, "adv": advantages}
        if "logp_ref" in self.reads:
            is_fixed = (on_policy or certain) and not self.pattern.free_reference
            log_k = self._logs_of_one() if is_fixed else self._logs("k", *RATIO)
            if self.pattern.padded:
                self._pad(log_k)
            rows["logp_ref"] = _each(v.add, lp, log_k)
        if "logp_sampler" in self.reads and certain:
            rows["logp_sampler"] = log_mu
        elif "logp_sampler" in self.reads:
            log_rho = self._logs("rho", *RATIO)
            if self.pattern.padded:
                self._pad(log_rho)
            rows["logp_sampler"] = _each(v.subtract, log_mu, log_rho)
        if "entropy" in self.reads:
            rows["entropy"] = [
                [v.variable(f"H{i}_{t}", 0.0) for t in range(T)] for i in range(B)
            ]
        self.ids.update({name: torch.tensor(x) for name, x in rows.items()})

    def _logs_of_one(self) -> list[list[int]]:
        """Return the id of log 1, which is 0, for each token, a list for each row."""
        B, T = self.pattern.shape
        return [[self.values.zero] * T for _ in range(B)]

    def _pad(self, logs: list[list[int]]) -> None:
        """Write the id of 0 to masked slots, as trainers pad."""
        for row, mask in zip(logs, self.pattern.mask, strict=True):
            for t, is_trained in enumerate(mask):
                if not is_trained:
                    row[t] = self.values.zero

    def _make_certain(self, log_r: list[list[int]], log_mu: list[list[int]]) -> None:
        """Give the first token the probability 1 of both policies, the second one that of
        the old policy, the third one that of the new policy.
        """
        v = self.values
        for row_r, row_mu in zip(log_r, log_mu, strict=True):
            for t, x in enumerate(row_r):
                row_mu[t] = v.negative(x) if t % 3 == 2 else v.zero
                row_r[t] = v.zero if t % 3 == 0 else x

    def _advantage(self, row: int, column: int) -> int:
        """Return the id of a token's advantage: a variable, or a number that the
        pattern fixes.
        """
        v = self.values
        match self.pattern.advantages:
            case "of a response":
                return v.variable(f"A{row}")
            case "equal":
                return v.variable("A0")
            case "1 and -1":
                return v.number(-1 if row % 2 else 1)
            case "-1 and 1":
                return v.number(1 if row % 2 else -1)
        if not self.per_response:
            is_padding = self.pattern.padded and not self.pattern.mask[row][column]
            is_zero = is_padding or (row, column) in self.pattern.zeros
            return v.zero if is_zero else v.variable(f"A{row}_{column}")
        tokens = [(row, t) for t in range(self.pattern.shape[1])]
        is_zero = set(tokens) <= self.pattern.zeros
        return v.zero if is_zero else v.variable(f"A{row}")

    @property
    def is_moderate(self) -> bool:
        """Whether no number overflows that is made of these: they are ratios, so one may."""
        return False

    @property
    def scale(self) -> int:
        """The factor by which the caller multiplies the loss."""
        return self.values.variable("scale", 0.0)

    @property
    def ids_of_all(self) -> list[int]:
        """The ids of all inputs."""
        of_inputs = (x for ids in self.ids.values() for x in ids.reshape(-1).tolist())
        return [self.scale, *of_inputs]

    def _logs(self, name: str, low: float, high: float) -> list[list[int]]:
        """Return the ids of log x of each token, a list for each row, x a variable of
        this name between the bounds.
        """
        v = self.values
        B, T = self.pattern.shape
        return [
            [v.log(v.variable(f"{name}{i}_{t}", low, high)) for t in range(T)]
            for i in range(B)
        ]

    def assumptions(self, names: set[str]) -> list[int]:
        """Return the conditions on the variables that are read: no probability is above
        1.

        Args:
            names: of the variables that are read.
        """
        key = frozenset(names)
        if key not in self.known_assumptions:
            self.known_assumptions[key] = self._assumptions(names)
        return self.known_assumptions[key]

    def _assumptions(self, names: set[str]) -> list[int]:
        """Compute what `assumptions` returns."""
        v = self.values
        if self.pattern.certain:
            out = self._below_one_where_certain(names)
        else:
            out = self._below_one(names)
        for i in range(self.pattern.shape[0]):
            for name in ("r", "rho"):
                out += self._bounds_of_response(name, i, names)
        return [condition for condition in out if condition != v.one]

    def _below_one(self, names: set[str]) -> list[int]:
        """Return the conditions that probabilities of the new, the reference and the
        sampling policy are below 1, of the tokens whose variables are read.
        """
        v = self.values
        B, T = self.pattern.shape
        out = []
        # each is a product of mu and the variable beside it
        variables = {"logp": "r", "logp_ref": "k", "logp_sampler": "rho"}
        for role, beside in variables.items():
            if role not in self.ids:
                continue
            for i, t in itertools.product(range(B), range(T)):
                log = int(self.ids[role][i, t])
                is_read = {f"mu{i}_{t}", f"{beside}{i}_{t}"} <= names
                if is_read and v.varies(log):
                    out.append(v.greater(v.zero, log))
        return out

    def _below_one_where_certain(self, names: set[str]) -> list[int]:
        """Return the conditions that probabilities are below 1 where the pattern fixes
        some at 1: of those that vary and whose variables are read.
        """
        v = self.values
        roles = [x for x in ("logp", "logp_old", "logp_ref") if x in self.ids]
        logs = torch.stack([self.ids[role] for role in roles])
        out = []
        for log in logs.reshape(-1).tolist():
            if v.varies(log) and v.variables((log,)) <= names:
                out.append(v.greater(v.zero, log))
        return out

    def _bounds_of_response(self, name: str, row: int, names: set[str]) -> list[int]:
        """Return the bounds of a ratio that is multiplied over a response, of the
        tokens whose variables are read; [] where the bounds of its tokens suffice.
        """
        v = self.values
        read = [
            t
            for t, inside in enumerate(self.pattern.mask[row])
            if inside and f"{name}{row}_{t}" in names
        ]
        if not read:
            return []
        most = MOST_LOG_RATIO
        if name == "r" and self.bounds_mean:
            most = min(most, MOST_MEAN_LOG_RATIO * len(read))
        elif len(read) < 2:
            return []
        total = v.zero
        for t in read:
            total = v.add(total, v.log(v.variable(f"{name}{row}_{t}", *RATIO)))
        return [
            v.greater(v.number(most), total),
            v.greater(total, v.number(-most)),
        ]

    def is_inside(self, point: Mapping[str, float]) -> bool:
        """Tell whether each variable of a point lies between its bounds.

        Args:
            point: a number for each variable.
        """
        bounds = {"r": RATIO, "k": RATIO, "rho": RATIO, "mu": PROBABILITY}
        bounds["H"] = bounds["scale"] = (0.0, math.inf)
        for name, number in point.items():
            low, high = bounds.get(name.rstrip("0123456789_"), (-math.inf, math.inf))
            if not low < number < high:
                return False
        return True

    # ---- points ----------------------------------------------------------------------
    def draw(self, seed: int, where: str = "near") -> dict[str, float]:
        """Return a point at random, the same one for each seed and pattern.

        Args:
            seed: of the draw.
            where: "near", where batches mostly lie, "rare", the same with tokens of
                any probability among them, or one of FAR.
        """
        numbered = f"{seed} rare" if where == "rare" else f"{seed}"
        chance = random.Random(f"{numbered} {self.pattern}")
        point = {}
        B, T = self.pattern.shape
        for i, t in itertools.product(range(B), range(T)):
            at = f"{i}_{t}"
            point[f"mu{at}"] = math.exp(-chance.uniform(0.3, 3))
            spread = chance.choice((0.01, 0.3, 1.0, 3.0))
            point[f"r{at}"] = math.exp(chance.gauss(0, spread))
            point[f"k{at}"] = math.exp(chance.gauss(0, 0.5))
            point[f"rho{at}"] = math.exp(chance.gauss(0, chance.choice((0.001, 0.4))))
            point[f"H{at}"] = chance.uniform(0.1, 3)
            point[f"A{at}"] = chance.choice((1, -1)) * math.exp(chance.gauss(0, 1))
        for i in range(B):
            point[f"A{i}"] = chance.choice((1, -1)) * math.exp(chance.gauss(0, 1))
        if where in FAR:
            _move_far(point, chance, *FAR[where])
        if where == "rare":
            for name in point:
                if name[:2] == "mu":
                    _make_rare(point, name, chance)
        if self.pattern.certain:
            # π_old is 1/r at every third token, and π_θ is r at others: neither above 1
            for i, t in itertools.product(range(B), range(T)):
                log_r = abs(math.log(point[f"r{i}_{t}"]))
                point[f"r{i}_{t}"] = math.exp(log_r if t % 3 == 2 else -log_r)
        point["scale"] = 1.0
        return self.complete(point, {})

    def complete(
        self, point: Mapping[str, float], found: Mapping[str, float]
    ) -> dict[str, float]:
        """Return a point with the numbers that a solver found, and the other numbers
        moved so that no probability is above 1: π_old is mu, π_θ is mu r, π_ref is
        mu r k, and the sampler's is mu / rho.

        Args:
            point: a number for each variable.
            found: those that are fixed.
        """
        out = dict(point) | dict(found)
        B, T = self.pattern.shape
        for i, t in itertools.product(range(B), range(T)):
            mu, r, k, rho = (f"{name}{i}_{t}" for name in ("mu", "r", "k", "rho"))
            # π_θ/π_old; where the policies are equal, r is no variable of the batch
            ratio = 1.0 if self.pattern.on_policy else out[r]
            if self.pattern.certain:
                # π_θ is r at the second of three tokens, and 1 at the others
                of_policy = out[r] if t % 3 == 1 else 1.0
                if k not in found:
                    out[k] = min(out[k], 0.9 / of_policy)
                elif t % 3 == 1 and r not in found:
                    out[r] = min(out[r], 0.9 / out[k])
            elif mu not in found:
                of_ref = out[k] if "logp_ref" in self.ids else 1.0
                of_sampler = out[rho] if "logp_sampler" in self.ids else 1.0
                largest = max(1.0, ratio, ratio * of_ref, 1 / of_sampler)
                out[mu] = min(out[mu], 0.9 / largest)  # clearly below 1
            elif k not in found and "logp_ref" in self.ids:
                out[k] = min(out[k], 0.9 / (out[mu] * ratio))
            if rho not in found:
                out[rho] = max(out[rho], 1.1 * out[mu])
        return out

    def batch(self, point: Mapping[str, float]) -> Rollouts:
        """Return the batch of a point, in float64.

        Args:
            point: a number for each variable.
        """
        known: dict[int, float] = {}

        def numbers(ids: Tensor) -> Tensor:
            """Return the numbers of ids at the point, in their shape, in float64."""
            flat = [
                self.values.evaluate(x, point, known) for x in ids.reshape(-1).tolist()
            ]
            return torch.tensor(flat, dtype=torch.float64).view(ids.shape)

        fields = {name: numbers(ids) for name, ids in self.ids.items()}
        group = torch.tensor(self.pattern.group) if self.pattern.group else None
        return Rollouts.unchecked(
            mask=torch.tensor(self.pattern.mask), group=group, **fields
        )

    def magnitude(self, batch: Rollouts) -> float:
        """Return the size of numbers that matter: a thousandth of the largest A max(r, 1)
        of a batch, and at least that of 1. Terms of this size may cancel.

        Args:
            batch: of `batch`.
        """
        r = (batch.logp - batch.logp_old).exp().clamp(min=1)
        return 1e-3 * max(1.0, (batch.adv.abs() * r).max().item())

    def describe(self, point: Mapping[str, float]) -> str:
        """Return the numbers of a point, in words.

        Args:
            point: a number for each variable.
        """
        batch = self.batch(point)
        shown = {"r": (batch.logp - batch.logp_old).exp(), "A": batch.adv}
        shown["log π_old"] = batch.logp_old
        if batch.logp_ref is not None:
            shown["π_ref/π_θ"] = (batch.logp_ref - batch.logp).exp()
        if batch.logp_sampler is not None:
            shown["π_old/μ"] = (batch.logp_old - batch.logp_sampler).exp()
        if batch.entropy is not None:
            shown["entropy"] = batch.entropy
        return "; ".join(
            f"{name} = {', '.join(f'{n:.9g}' for n in x[batch.mask].tolist())}"
            for name, x in shown.items()
        )

    def introduce(self, trace: Trace, batch: Rollouts) -> None:
        """Give the tensors of a batch their variables.

        Args:
            trace: the state of the call.
            batch: of `batch`.
        """
        for name, ids in self.ids.items():
            trace.introduce(getattr(batch, name), ids)


@dataclass(frozen=True)
class TermDomain(Domain):
    """The variables of two log-probabilities of which a KL term is a function."""

    @property
    def is_moderate(self) -> bool:
        """Whether no number overflows that is made of these: none does where the
        policies are equal, since no ratio is far from 1.
        """
        return self.pattern.on_policy and not self.pattern.free_reference

    def describe(self, point: Mapping[str, float]) -> str:
        """Return log π_ref - log π_θ and log π_θ of a point, in words.

        Args:
            point: a number for each variable.
        """
        batch = self.batch(point)
        assert batch.logp_ref is not None
        shown = {"log π_ref - log π_θ": batch.logp_ref - batch.logp}
        shown["log π_θ"] = batch.logp
        return "; ".join(
            f"{name} = {', '.join(f'{n:.9g}' for n in x[batch.mask].tolist())}"
            for name, x in shown.items()
        )


def _move_far(
    point: dict[str, float],
    chance: random.Random,
    most_log_ratio: float,
    most_log_advantage: float,
) -> None:
    """Replace all numbers of a point by numbers far from common ones; π_old of every
    second token, on average, by one down to the least of the domain.

    Args:
        point: it is written to.
        chance: draws the numbers.
        most_log_ratio: of |log x| of any ratio and entropy.
        most_log_advantage: of |log |A||.
    """
    for name in point:
        if name[:2] == "mu":
            _make_rare(point, name, chance)
            continue
        sign = 1
        most = most_log_ratio
        if name[0] == "A":
            sign = chance.choice((1, -1))
            most = most_log_advantage
        point[name] = sign * math.exp(chance.uniform(-most, most))


def _make_rare(point: dict[str, float], name: str, chance: random.Random) -> None:
    """Replace π_old of a token, at a chance of one half, by any down to the least."""
    if chance.random() < 0.5:
        point[name] = math.exp(chance.uniform(LEAST_LOG_PROB, 0))


def _each(
    of: Callable[[int, int], int], x: list[list[int]], y: list[list[int]]
) -> list[list[int]]:
    """Apply a function to the entries of two lists of rows."""
    rows = zip(x, y, strict=True)
    return [[of(a, b) for a, b in zip(p, q, strict=True)] for p, q in rows]
