# SPDX-License-Identifier: Apache-2.0
"""One loss of a framework against the objective its name promises: gradients, and the
faults that account for them.

Where gradients differ, the faults declared are put into the reference, and the
difference that remains is the proof: at
most TOL, or the row is unexplained. Each fault is then shown by itself: on the token,
and on the share of a typical batch's gradient, that repairing it alone would change. No
number is of a step between the paper and the framework.
One file: a row of the table and its numbers are read together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from upref.advantages import group_norm
from upref.aggregation import Totals, row_weights
from upref.registry import REDUCE, Objective, get
from upref.rollouts import Rollouts
from upref.verify.factors import declared_aggregation
from upref.verify.faults.losses import LossFault
from upref.weights.batches import (
    BOUND_EDGES,
    LOG_R,
    SINGLE_EDGES,
    autograd_gradient,
    batch,
    breakpoints,
    clamped_batch,
    reference_logp,
    regime_words,
    token_at,
)
from upref_frameworks.settings import loss_name

TOL = 1e-7
MICRO = 8
MASKED = "a masked slot"  # the regime of a token that does not count


@dataclass(frozen=True)
class Comparison:
    """A loss of a framework, what it is compared with, and why the two differ.

    Attributes:
        setting: `default` or `paper`: whose hyperparameters the loss has.
        mode: the framework's name of the loss.
        config: fields of the framework's config, over its defaults.
        objective: the name of the objective that the loss promises.
        hp: hyperparameters of the objective.
        reasons: the faults that account for the difference.
        one_adv: whether the loss takes one advantage per response.
    """

    setting: str
    mode: str
    config: dict[str, Any]
    objective: str
    hp: dict[str, Any]
    reasons: tuple[LossFault, ...] = ()
    one_adv: bool = False

    @property
    def label(self) -> str:
        """Return the loss as `upref check FRAMEWORK:LABEL` reads it: MODE,FIELD=VALUE."""
        return loss_name(self.mode, self.config)

    @property
    def promise(self) -> str:
        """Return the objective with its hyperparameters, such as `dapo, eps_high=0.28`."""
        return self.objective + "".join(f", {k}={v:g}" for k, v in self.hp.items())


@dataclass(frozen=True)
class Example:
    """A token on which two gradients differ most.

    Tokens within |log r| <= 5 go before the farther ones.

    Attributes:
        difference: relative to max(1, |expected|).
        where: the regime of the token, in words.
        expected: its weight dJ_t/dlp by the one gradient.
        found: its weight by the other one.
    """

    difference: float
    where: str
    expected: float
    found: float

    @property
    def weights(self) -> tuple[str, str]:
        """Return expected and found, with as many digits as tell them apart.

        Returns:
            Two numbers as text, of 4, 8 or 12 significant digits; equal only where 12
            digits are.
        """
        for digits in (4, 8, 12):
            texts = f"{self.expected:.{digits}g}", f"{self.found:.{digits}g}"
            if texts[0] != texts[1]:
                break
        return texts

    def __str__(self) -> str:
        return f"{self.where}: {' -> '.join(self.weights)}"


@dataclass(frozen=True)
class FaultEffect:
    """What a fault does to the gradient of a typical batch.

    w is the gradient with the fault repaired, and v the one with the fault in it.

    Attributes:
        change: |v - w| / |w|.
        cosine: of the angle between v and w.
        factor: |v| / |w|.
    """

    change: float
    cosine: float
    factor: float

    @property
    def severity(self) -> str:
        """Return a key of SEVERITY in upref_frameworks/ledger.py.

        Returns:
            `cosmetic` below a change of 2 %, else `breaks` up to a cosine of 0.5, else
            `rescales` where the sine of the angle is below half of the change, else
            `weakens`.
        """
        if self.change < 0.02:
            return "cosmetic"
        if self.cosine <= 0.5:
            return "breaks"
        sine = math.sqrt(max(1 - self.cosine**2, 0))
        return "rescales" if sine < self.change / 2 else "weakens"

    @classmethod
    def between(cls, found: Tensor, expected: Tensor) -> "FaultEffect":
        """Measure what turns one gradient into another: distance, angle and length.

        Args:
            found: the gradient v with the fault, of any shape.
            expected: the gradient w without it, of the same shape.

        Returns:
            Where w is 0 and v is not: change 1, cosine 0 and factor infinity. Where
            both are 0: change 0, cosine 1, factor 1.
        """
        w = expected.norm().item()
        v = found.norm().item()
        if not w:
            return cls(float(v > 0), float(v == 0), math.inf if v else 1.0)
        change = (found - expected).norm().item() / w
        return cls(
            change, (found * expected).sum().item() / (w * v) if v else 0.0, v / w
        )


@dataclass(frozen=True)
class ComparisonRow:
    """One comparison: the difference before any reason, what repairing each would
    change, the difference after all.
    """

    setting: str
    mode: str
    label: str
    objective: str
    promise: str
    command: str
    micro_batches: int
    difference: float
    spot: Example
    reasons: list[tuple[str, Example]]
    remains: float
    tol: float = TOL  # wider for a framework that computes in float32
    kind: str = "loss"  # or what else it is: advantages, kl, logprobs, aggregation
    effects: list[FaultEffect] = field(default_factory=list)  # of each reason

    @property
    def agrees(self) -> bool:
        """Return whether the difference is within the tolerance without any reason."""
        return self.difference <= self.tol

    @property
    def ok(self) -> bool:
        """Return whether it agrees, or differs for reasons that leave no difference."""
        return self.remains <= self.tol

    @property
    def verdict(self) -> str:
        """Return the verdict in the words of the table, with the size of an agreement."""
        if self.agrees:
            if self.difference == 0:
                return "agrees exactly"
            return f"agrees to {self.difference:.0e}"
        return "differs, explained" if self.ok else "differs, UNEXPLAINED"


@dataclass(frozen=True)
class Explanation:
    """The objective that a comparison promises, and the one that its faults leave.

    promised, promised_hp: what the comparison names. faulty, faulty_hp: the same with
    the faults put into it.
    """

    promised: Objective
    promised_hp: dict[str, Any]
    faults: tuple[LossFault, ...]
    faulty: Objective
    faulty_hp: dict[str, Any]

    def with_faults(self, faults: Sequence[LossFault]) -> "Explanation":
        """Return the explanation of the same promise by other faults.

        Args:
            faults: they are put into the promised objective one after the other.
        """
        faulty = self.promised
        hp = self.promised_hp
        for fault in faults:
            faulty, hp = fault.change.put_into(faulty, hp)
        return replace(self, faults=tuple(faults), faulty=faulty, faulty_hp=hp)

    @property
    def level(self) -> str:
        """Return the level whose ratio a regime is printed in: the response's, where
        either objective acts on it.
        """
        levels = [self.promised.level, self.faulty.level]
        return next((level for level in levels if level in REDUCE), levels[0])


def explanation(comparison: Comparison, faults: Sequence[LossFault]) -> Explanation:
    """Look up the objective that a comparison promises, and put faults into it.

    Args:
        comparison: it names the objective.
        faults: they are put into it one after the other.
    """
    objective = get(comparison.objective)
    promise = Explanation(objective, comparison.hp, (), objective, comparison.hp)
    return promise.with_faults(faults)


# ---- comparing -----------------------------------------------------------------------
def grid(comparison: Comparison, single: bool = False) -> Rollouts:
    """Make the batch on which a framework's loss is compared with its promise.

    Args:
        comparison: the regimes of its promised objective are in the batch, and those of
            the objective that its faults leave.
        single: for a framework that computes in float32; ratios keep a larger distance
            from the bounds.

    Returns:
        Rollouts [B, T] in float64; B is a multiple of MICRO. Also in it are responses
        far from π_old. Masked slots hold numbers that could pass for tokens.
    """
    explained = explanation(comparison, comparison.reasons)
    promised = explained.promised
    pairs = [
        (promised, explained.promised_hp),
        (explained.faulty, explained.faulty_hp),
    ]
    # a framework sums a response's ratio in another order: on a bound, rounding would
    # decide
    edges = tuple(e for e in BOUND_EDGES if e or promised.level == "token")
    if single:
        edges = SINGLE_EDGES
    if comparison.one_adv or promised.one_adv:
        pairs = [
            (
                objective
                if objective.level in REDUCE
                else replace(objective, agg="seq-mean"),
                hp,
            )
            for objective, hp in pairs
        ]
    b = _concatenate(
        *(
            batch(objective, edges=edges, seed=i, **hp)
            for i, (objective, hp) in enumerate(pairs)
        ),
        clamped_batch(),
    )
    # masked slots hold what could pass for tokens, as a tool's answer in a multi-turn
    # response does
    junk = {"logp": -1.0, "logp_old": -2.0, "adv": 0.5}
    b = replace(
        b, **{k: getattr(b, k).masked_fill(~b.mask, v) for k, v in junk.items()}
    )
    return replace(b, logp_ref=reference_logp(b))


@cache
def typical_batch() -> Rollouts:
    """Make a batch such as training meets, from a fixed seed.

    π_old is above 0.9 for half of the tokens and has a long tail; log r has a standard
    deviation of 0.15 (1 - π_old), log π_θ - log π_ref of 0.3 (1 - π_old). Each prompt
    has at least one right and one wrong response; A is group-normalized. A tenth of the
    responses has a tool's answer inside, which is masked.

    Returns:
        Rollouts [128, 160] in float64: 16 prompts with 8 responses of 8 to 160 tokens.
    """
    generator = torch.Generator().manual_seed(25)
    G = 16
    n = 8
    T = 160

    def normal(*shape: int) -> Tensor:
        """Return standard normal numbers of this batch's own generator."""
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def rand(*shape: int) -> Tensor:
        """Return uniform numbers of the same generator."""
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    length = (60 * (0.7 * normal(G * n)).exp()).clamp(8, T).long()
    slot = torch.arange(T)
    mask = slot < length[:, None]
    tool = (
        (rand(G * n) < 0.1)[:, None]
        & (slot >= length[:, None] // 3)
        & (slot < length[:, None] // 2)
    )
    lp_old = -(4 * rand(G * n, T).clamp(min=1e-12).log().neg()) * rand(G * n, T) ** 4
    open_ = 1 - lp_old.exp()
    lp = (lp_old + 0.15 * open_ * normal(G * n, T)).clamp(max=-1e-9)
    ref = (lp + 0.3 * open_ * normal(G * n, T)).clamp(max=-1e-9)
    right = rand(G, n) < (0.1 + 0.8 * rand(G))[:, None]
    right[:, 0], right[:, 1] = True, False
    group = torch.arange(G).repeat_interleave(n)
    adv = group_norm(right.double().flatten(), group)[:, None].expand(-1, T)
    return Rollouts(lp, lp_old, adv, mask & ~tool, group, logp_ref=ref)


def _concatenate(*batches: Rollouts) -> Rollouts:
    """Return several batches as one, with groups of their own. Some rows occur twice,
    so that all micro-batches are of one size.
    """
    T = max(batch.mask.shape[1] for batch in batches)

    def padded(name: str) -> Tensor:
        """Return this array of all batches, padded to the longest response."""
        return torch.cat(
            [
                torch.nn.functional.pad(
                    getattr(part, name), (0, T - part.mask.shape[1])
                )
                for part in batches
            ]
        )

    group = []
    n = 0
    for part in batches:
        assert part.group is not None
        group.append(part.group + n)
        n = int(group[-1].max()) + 1
    arrays = [
        padded("logp"),
        padded("logp_old"),
        padded("adv"),
        padded("mask"),
        torch.cat(group),
    ]
    # some rows twice, so that micro-batches are of one size, as TRL's are
    logp, old, adv, mask, groups = (
        torch.cat([v, v[: -len(v) % MICRO]]) for v in arrays
    )
    return Rollouts(logp, old, adv, mask, groups)


def unit(objective: Objective, batch: Rollouts) -> Tensor:
    """Return the weight that the promised aggregation gives to each token.

    Args:
        objective: the promised one.
        batch: token tensors [B, T].

    Returns:
        [B, 1]. A gradient of J divided by it is the token's own weight dJ_t/dlp.
    """
    rows = row_weights(objective.agg, batch.mask, Totals.of(batch.mask, batch.group))
    return torch.as_tensor(rows, dtype=batch.logp.dtype).expand(len(batch.mask))[
        :, None
    ]


def _faulty_gradient(explained: Explanation, batch: Rollouts) -> Tensor:
    """Return the gradient [B, T] of the promised objective with the faults put into it."""
    promised_agg = declared_aggregation(explained.promised)
    faulty_agg = declared_aggregation(explained.faulty)
    factor: Tensor | float = 1.0
    agg = promised_agg
    for fault in explained.faults:
        factor = factor * fault.change.scale(batch)
        agg = fault.change.agg or agg
    # as row weights, so that an objective with one term per response can be
    # aggregated in another way
    if agg != faulty_agg:
        seen = batch
        for fault in explained.faults:
            seen = fault.change.view(seen)
        totals = Totals.of(batch.mask, seen.group)
        new = row_weights(agg, batch.mask, totals)
        old = row_weights(faulty_agg, batch.mask, totals)
        ratio = torch.as_tensor(new / old, dtype=batch.logp.dtype)
        factor = factor * ratio.reshape(-1, 1)

    def J(batch: Rollouts) -> Tensor:
        """Compute the objective with the faults, and the terms that they add."""
        for fault in explained.faults:
            batch = fault.change.view(batch)
        terms = [
            fault.change.term(batch) for fault in explained.faults if fault.change.term
        ]
        return sum(terms, explained.faulty(batch, **explained.faulty_hp))

    return autograd_gradient(J, batch) * factor


def difference(found: Tensor, expected: Tensor) -> Tensor:
    """Return |found - expected| / max(1, |expected|), element by element.

    Args:
        found: any shape.
        expected: the same shape.

    Returns:
        The same shape, not negative.
    """
    return (found - expected).abs() / expected.abs().clamp(min=1)


def compare(
    framework: str,
    comparison: Comparison,
    batch: Rollouts,
    found: Tensor,
    reasons: Sequence[LossFault],
    micro: int,
    tol: float = TOL,
) -> ComparisonRow:
    """Make the row of a gradient that was found on the grid of a comparison.

    Args:
        framework: its name, for the command that repeats the comparison.
        comparison: the loss, its config and the promised objective.
        batch: the grid.
        found: [B, T], the gradient of -loss with respect to `batch.logp`.
        reasons: the faults that should explain the difference; not used where there is
            none.
        micro: into how many micro-batches the loss was split.
        tol: the largest difference, as of `difference`, that counts as rounding.

    Returns:
        The difference without any reason, what repairing each one alone changes, and
        the difference that remains with all of them.
    """
    promise = explanation(comparison, ())
    each = unit(promise.promised, batch)
    found = found / each
    paper = _faulty_gradient(promise, batch) / each
    largest = difference(found, paper).max().item()
    reasons = reasons if largest > tol else ()
    explained = promise.with_faults(reasons)
    explained_weights = _faulty_gradient(explained, batch) / each
    skip = torch.stack(
        [why.change.skip(batch) for why in reasons] or [torch.zeros_like(batch.mask)]
    ).any(0)
    remains = difference(found, explained_weights).masked_fill(skip, 0).max().item()
    repaired = [
        promise.with_faults([x for x in reasons if x is not why]) for why in reasons
    ]
    changes = [
        (
            why.words,
            _worst_token(
                explained,
                batch,
                explained_weights,
                _faulty_gradient(without, batch) / each,
            ),
        )
        for why, without in zip(reasons, repaired, strict=True)
    ]
    hp = "".join(f" --hp {k}={v:g}" for k, v in comparison.hp.items())
    command = (
        f"upref check {framework}:{comparison.label} --as {comparison.objective}{hp}"
    )
    worst = _worst_token(explained, batch, found, paper)
    names = (
        comparison.setting,
        comparison.mode,
        comparison.label,
        comparison.objective,
        comparison.promise,
        command,
    )
    effects = []
    if reasons:
        of_typical = _faulty_gradient(explained, typical_batch())
        effects = [
            FaultEffect.between(of_typical, _faulty_gradient(without, typical_batch()))
            for without in repaired
        ]
    return ComparisonRow(
        *names, micro, largest, worst, changes, remains, tol, effects=effects
    )


def _worst_token(
    explained: Explanation,
    batch: Rollouts,
    found: Tensor,
    expected: Tensor,
) -> Example:
    """Return an example: a token whose gradient differs most.

    Of several that differ as much, it takes one whose ratio is on the fixed grid rather
    than at the edge of a bound, and of these the one nearest to π_old. Tokens with a
    log-ratio beyond 5 count only where no other token differs.
    """
    differences = difference(found, expected)
    log_r = torch.where(batch.mask, batch.logp - batch.logp_old, 0)
    if reduce := REDUCE.get(explained.level):
        log_r = reduce(log_r, batch.mask)[:, None].expand_as(log_r)
    near_differences = differences.masked_fill(log_r.abs() > 5, 0)
    differences = near_differences if near_differences.max() > TOL else differences
    is_off_grid = (log_r[..., None] - torch.as_tensor(LOG_R)).abs().amin(-1) > 1e-12
    rank = torch.where(
        differences >= differences.max() * (1 - 1e-6),
        log_r.abs() + 100 * is_off_grid,
        math.inf,
    )
    i, t = divmod(int(rank.argmin()), rank.shape[1])
    where = _regime_of_token(explained, batch, i, t, log_r[i, t].exp().item())
    return Example(
        differences[i, t].item(),
        where,
        expected[i, t].item() + 0.0,
        found[i, t].item() + 0.0,
    )


def _regime_of_token(
    explained: Explanation, batch: Rollouts, i: int, t: int, r: float
) -> str:
    """Name the regime of a token, by the bounds of the promised objective and of the
    one that its faults leave.
    """
    if not batch.mask[i, t]:
        return MASKED
    A, _, mu = token_at(batch, i, t)
    bounds: list[float] = []
    if A:
        promised = breakpoints(explained.promised, A, mu, **explained.promised_hp)
        faulty = breakpoints(explained.faulty, A, mu, **explained.faulty_hp)
        bounds = sorted({*promised, *faulty})
    regime = regime_words(A, r, bounds)
    if explained.promised.reads_mu:
        regime += f" (mu = {mu:.2g})"
    letters = {"sequence_mean": " s", "sequence_product": " S"}
    return regime.replace(" r", letters.get(explained.level, " r"))
