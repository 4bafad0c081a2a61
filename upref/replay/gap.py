# SPDX-License-Identifier: Apache-2.0
"""The gap between the sampler's log-probabilities and the trainer's, and its cause.

x = log π_old by the trainer, y = log μ by the sampler, d = x - y = log ρ on every
trained token. Tokens are drawn from μ, so E[ρ] is the mass that π_old gives to the
support of μ, and E[d] = -KL(μ || π_old):

    E[ρ] = 1, E[d] <= 0     two normalized policies: rounding, stale or quantized
                            weights, other experts
    E[ρ] < 1, d <= 0        μ was cut and renormalized: top_p, top_k, min_p
    E[d] > 0                impossible for the distribution that sampled: the column is another one

The partial sums of ρ - 1 are a martingale whatever the lengths of the responses are, so
their standard error is sqrt(Σ (ρ - 1)²). A cause that can be undone is undone: a shift,
exchanged rows, a factor, a floor, tokens that were never drawn. It is a failure where
the difference vanishes with it. All else is a note: no statistic of one column proves a
cause, and a healthy sampler must never fail.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upref.replay.findings import Checked, ReplayFinding
from upref.replay.places import find_alignment, find_exchanged_rows, find_shift
from upref.replay.schema import RecordedBatch, expect_batch
from upref.replay.undo import Columns
from upref.replay.values import (
    find_factor,
    find_floor,
    find_placeholder,
    find_sums,
    is_bfloat16,
    is_one_number_a_row,
)

SIGNIFICANT = 5.0  # standard errors: 3e-7 one-sided, and a run asks thousands of times
LARGE_EXPONENT = 30.0  # e^30 stays finite in sums of squares
# bfloat16 has 8 bits: a logit of 8 is off by 0.016, and log π by a few times that in a
# deep model. Larger mean gaps are beyond rounding in the models and engines that were
# measured; smaller ones need no explanation.
ROUNDING_GAP = 0.03  # nats, mean |d|
# Rounding that is off in one direction shifts E[d] by less than this; a temperature
# shifts it by a KL of this or more.
LEAST_KL = 0.01  # nats
ROUNDED_ABOVE = 0.05  # nats above 0, which no rounding of a probability of 1 leaves
FAR = 4.0  # nats: the trainer finds a token e^4 times less likely than the sampler
FEW = 3  # tokens: fewer are no pattern
APART = 5  # times as far off as any other response
SOME = 0.25  # of the responses, beyond which those that are off are no exception
ONE_SIDED = 10  # times as many tokens below as above
# mean sign of d among likely tokens, and among rare ones: seven of eight have that sign
AGREEMENT = 0.75
# tokens of either kind: chance makes such a mean of 20 signs with probability 0.0004
LEAST_RARE = 20


@dataclass(frozen=True, kw_only=True)
class Gap(Checked):
    """The gap of one step, over the tokens that train and that the sampler drew.

    Args:
        tokens: number of tokens compared.
        mean: mean of d = log π_old - log μ, in nats.
        mean_abs: mean of |d|.
        largest: the largest |d|.
        rho_mean, rho_se: mean of ρ = π_old/μ and its standard error.
        inverse_mean: mean of 1/ρ.
        k3: mean of ρ - 1 - log ρ, which estimates KL(μ || π_old) in nats.
        effective: (Σ ρ)² / (n Σ ρ²), the share of tokens that counts under the weights
            ρ.
        cause: the cause of the first finding; "agree" if there is none.
    """

    tokens: int
    mean: float
    mean_abs: float
    largest: float
    rho_mean: float
    rho_se: float
    inverse_mean: float
    k3: float
    effective: float
    cause: str


def gap(batch: RecordedBatch) -> Gap:
    """Compare the sampler's column with the trainer's, and name the cause of a
    difference.

    Args:
        batch: with the columns sampler and old (or now).

    Returns:
        The Gap. It is false where a cause was undone, or where tokens train that the
        sampler did not draw.

    Raises:
        InputError: a column is missing.
    """
    expect_batch(batch, "the sampler's gap")
    batch.require("sampler", purpose="the sampler's gap")
    if batch.now is None:
        batch.require("old", purpose="the sampler's gap")
    assert batch.sampler is not None
    columns = Columns(batch.trainer(), batch.sampler, batch.mask)
    findings: list[ReplayFinding] = []

    def report(severity: Any, cause: str, **numbers: Any) -> None:
        findings.append(ReplayFinding("sampler", severity, cause, numbers))

    if batch.sampler_ids is not None:
        other = batch.mask & (batch.sampler_ids != batch.ids)
        if other.any():
            report(
                "failure", "other_ids", tokens=int(other.sum()), trained=batch.tokens
            )
            # what follows has another context
            columns = columns.without(other.cumsum(1) > 0)
    missing = columns.mask & columns.y.isnan()
    if missing.any():
        report(
            "failure",
            "not_sampled",
            tokens=int(missing.sum()),
            trained=batch.tokens,
            value="missing",
        )
        columns = columns.without(missing)
    if not columns.mask.any():
        return _result(columns, findings)
    y = columns.trained(columns.y)
    d = columns.trained(columns.d)
    if not y.any():
        report("note", "all_zero")
        return _result(columns, findings)
    if not d.any():
        report("note", "copied")
        return _result(columns, findings)

    if is_one_number_a_row(columns):
        report("failure", "one_number", responses=int(columns.mask.any(1).sum()))
        return _result(columns, findings)

    for undo in (
        find_factor,
        find_sums,
        find_shift,
        find_alignment,
        find_exchanged_rows,
        find_placeholder,
        find_floor,
    ):
        found = undo(columns)
        if found is not None:
            report(
                "failure",
                found.cause,
                **found.numbers,
                before=found.before,
                after=found.after,
            )
            columns = found.columns
            if not columns.mask.any():
                return _result(columns, findings)
    above = columns.trained(columns.y) > ROUNDED_ABOVE
    if above.any():
        report(
            "failure",
            "positive",
            tokens=int(above.sum()),
            trained=int(columns.mask.sum()),
        )
        return _result(columns, findings)
    if any(f.cause == "rows" for f in findings):
        # rows that are nearly certain are exchanged too, and nothing tells them
        return _result(columns, findings)
    if batch.ref is not None:
        against_ref = Columns(batch.ref, columns.y, columns.mask)
        before = columns.distance()
        after = against_ref.distance()
        if before > 2 * ROUNDING_GAP and after < before / 4:
            report("note", "reference_weights", before=before, after=after)
            return _result(columns, findings)
    off = _some_responses(columns)
    if off is not None:
        mean_abs, rest = (
            float(columns.d[columns.mask & rows[:, None]].abs().mean())
            for rows in (off, ~off)
        )
        numbers = {"rows": int(off.sum()), "of": int(columns.mask.any(1).sum())}
        report("note", "some_responses", mean_abs=mean_abs, rest=rest, **numbers)
        columns = columns.without(off[:, None])
    _signatures(columns, _first_draws(batch), report)
    return _result(columns, findings)


def _some_responses(columns: Columns) -> Tensor | None:
    """The responses [B] that are off where the others agree to rounding; None where
    there are none, or too many.

    Whatever changes all tokens alike leaves no distance between the two kinds.
    """
    there = columns.mask.sum(1) >= FEW
    own = torch.where(there, columns.row_distance(), 0.0)
    if int(there.sum()) < FEW:
        return None
    off = own > max(ROUNDING_GAP, 10 * float(own[there].median()))
    if not 2 <= int(off.sum()) <= SOME * int(there.sum()):
        return None
    apart = float(own[off].min()) > APART * float(own[~off].max())
    rest = columns.without(off[:, None])
    return off if apart and rest.distance() < ROUNDING_GAP / 3 else None


def _signatures(columns: Columns, first_draws: Tensor, report: Any) -> None:
    """Notes on what has a signature and cannot be undone."""
    x, y, d = (columns.trained(c) for c in (columns.x, columns.y, columns.d))
    first = first_draws[columns.mask]
    impossible = d < -FAR
    usual = d[~impossible]
    typical = float(usual.abs().median()) if len(usual) else 0.0
    # Weights that differ everywhere have a wide middle; lone tokens on a clean line
    # have a narrow one.
    lone = (
        max(FEW, 0.002 * len(d)) <= int(impossible.sum()) < 0.5 * len(d)
        and typical < ROUNDING_GAP
    )
    if lone:
        report(
            "note",
            "impossible_tokens",
            tokens=int(impossible.sum()),
            trained=len(d),
            far=FAR,
        )
        x = x[~impossible]
        y = y[~impossible]
        d = usual
        first = first[~impossible]
    numbers = _numbers(d)
    mean_abs = numbers["mean_abs"]
    mean = numbers["mean"]
    two = {"mean_abs": mean_abs, "rho": numbers["rho_mean"], "k3": numbers["k3"]}
    if len(d) < LEAST_RARE:  # too few for any signature
        if mean_abs > ROUNDING_GAP and not lone:
            report("note", "two_policies", **two)
        return
    rounded = [
        name for name, column in (("sampler", y), ("old", x)) if is_bfloat16(column)
    ]
    shape = _shape(x, y)
    if shape and _shape(x[first], y[first]) != shape:
        shape = ""  # only the draws from one context, counted many times, make it
    if shape == "stretched":
        cause = "raw_temperature" if mean > SIGNIFICANT * _error(d) else "temperature"
        if abs(mean) <= SIGNIFICANT * _error(d):
            cause = "above_one" if _above_one(d) else "some_temperature"
        more = {
            "mean": mean,
            "mean_abs": mean_abs,
            "rho": numbers["rho_mean"],
            "error": numbers["rho_se"],
        }
        report("note", cause, **more)
    elif shape in ("sampler above", "trainer above"):
        zeros = float(((y == 0) & (d < -ROUNDING_GAP / 10)).double().mean())
        above = d < 0 if shape == "sampler above" else d > 0
        if shape == "sampler above":
            cause = "cut" if zeros > 0 else "cut_or_divided"
        else:
            cause = "trainer_above"
        report(
            "note",
            cause,
            share=float(above.double().mean()),
            rho=numbers["rho_mean"],
            zeros=zeros,
        )
    elif shape == "impossible mean":
        report(
            "note",
            "not_the_sampler",
            mean=mean,
            rho=numbers["rho_mean"],
            inverse=numbers["inverse_mean"],
        )
    elif shape == "above one":
        report("note", "above_one", rho=numbers["rho_mean"], error=numbers["rho_se"])
    elif len(rounded) == 1:
        report("note", "bfloat16_column", column=rounded[0], mean_abs=mean_abs)
    elif mean_abs > ROUNDING_GAP and not lone:
        if columns.unrelated():
            report("note", "unrelated", correlation=columns.correlation(), **two)
        else:
            report("note", "two_policies", **two)


def _shape(x: Tensor, y: Tensor) -> str:
    """What the differences look like; "" where they have no signature."""
    d = x - y
    if len(d) < LEAST_RARE:
        return ""
    mean = float(d.mean())
    if float(d.abs().mean()) > ROUNDING_GAP and _stretched(x, y):
        return "stretched"
    side = _one_sided(d)
    if side < 0 and (_below_one(d) or _without_exception(d)):
        return "sampler above"
    if side > 0 and _below_one(-d):
        return "trainer above"
    if mean > LEAST_KL and mean > SIGNIFICANT * _error(d):
        return "impossible mean"
    return "above one" if _above_one(d) else ""


def _error(d: Tensor) -> float:
    """Standard error of the mean of d."""
    return float(d.std()) / len(d) ** 0.5


def _first_draws(batch: RecordedBatch) -> Tensor:
    """The first token drawn from each context, [B, T]: responses that begin alike
    repeat a context.

    The partial sums of ρ - 1 are a martingale of independent draws. Where a draw is
    nearly certain, its copies repeat one difference, and their number says nothing.
    Which row comes first does not depend on what it drew.
    """
    generator = torch.Generator().manual_seed(0)
    width = batch.ids.shape[1]
    factors = torch.randint(-(2**62), 2**62, (width + 1,), generator=generator)
    # wraps around: a hash of the tokens before each slot
    terms = batch.ids * factors[:width]
    context = terms.cumsum(1) - terms + torch.arange(width) * factors[width]
    if batch.group is not None:
        context = context + (batch.group * factors[0])[:, None]
    trained = batch.mask.nonzero()
    _, number = context[batch.mask].unique(return_inverse=True)
    places = torch.arange(len(number))
    first = torch.full((int(number.max()) + 1,), len(number)).scatter_reduce(
        0, number, places, "amin"
    )
    out = torch.zeros_like(batch.mask)
    out[tuple(trained[first].T)] = True
    return out


def _one_sided(d: Tensor) -> int:
    """-1 where μ is above π_old on nearly every token that differs, +1 where it is
    below, else 0.

    At some threshold nearly all differences have one sign, and at no larger one is
    there a tail of the other sign: a temperature has one, at rare tokens.
    """
    thresholds = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)
    counts = [(int((d < -t).sum()), int((d > t).sum())) for t in thresholds]
    many = max(FEW * ONE_SIDED, 0.05 * len(d))
    for side, (usual, rare) in ((-1, (0, 1)), (1, (1, 0))):
        for at, count in enumerate(counts):
            tail = [
                c
                for c in counts[at:]
                if c[rare] >= FEW and ONE_SIDED * c[rare] >= c[usual]
            ]
            if count[usual] >= many and not tail:
                return side
    return 0


def _below_one(d: Tensor) -> bool:
    """Whether the mean of e^d is below 1, by more than chance, and d varies little:
    mass is missing.

    Of quite other weights the few tokens with a large e^d, which would make the mean 1,
    are missing from a small batch; but their d varies.
    """
    ratio = d.clamp(max=LARGE_EXPONENT).exp()
    excess = ratio - 1
    missing = float(excess.sum()) < -SIGNIFICANT * float((excess**2).sum().sqrt())
    return missing and float(ratio.mean()) < 1.5 * math.exp(float(d.mean()))


def _without_exception(d: Tensor) -> bool:
    """Whether d is below 0 on most tokens and above it, by more than rounding, on fewer
    than one in a thousand.

    Other weights raise many tokens, whatever their size; a cut raises none, however
    little it keeps.
    """
    below = (d < -ROUNDING_GAP).double().mean()
    above = (d > ROUNDING_GAP / 10).double().mean()
    return float(below) > 0.5 and float(above) < 0.001


def _above_one(d: Tensor) -> bool:
    """Whether the mean of ρ is above 1 by more than chance: no normalized policy gives
    more mass than 1.
    """
    excess = d.clamp(max=LARGE_EXPONENT).expm1()
    significant = float(excess.sum()) > SIGNIFICANT * float((excess**2).sum().sqrt())
    return significant and float(excess.mean()) > 2 * LEAST_KL


def _stretched(x: Tensor, y: Tensor) -> bool:
    """Whether one column is at another temperature: above the other one on likely
    tokens and below it on rare ones.

    Other weights and rounding move a token either way, whatever its probability.
    """
    differs = (x - y).abs() > 1e-3
    sign = (x - y)[differs].sign()
    likely = (x + y)[differs]
    order = likely.argsort()
    sums = sign[order].cumsum(0)
    n = len(sign)
    if n <= 2 * LEAST_RARE:
        return False
    rare = torch.arange(LEAST_RARE, n - LEAST_RARE)
    low = sums[rare - 1] / rare
    high = (sums[-1] - sums[rare - 1]) / (n - rare)
    return bool(((low * high < 0) & (low.abs().minimum(high.abs()) > AGREEMENT)).any())


def _numbers(d: Tensor) -> dict[str, float]:
    if not len(d):
        zero = dict.fromkeys(("mean", "mean_abs", "largest", "k3", "rho_se"), 0.0)
        return zero | {"rho_mean": 1.0, "inverse_mean": 1.0, "effective": 1.0}
    rho = d.clamp(max=LARGE_EXPONENT).exp()
    return {
        "mean": float(d.mean()),
        "mean_abs": float(d.abs().mean()),
        "largest": float(d.abs().max()),
        "rho_mean": float(rho.mean()),
        "rho_se": float(((rho - 1) ** 2).sum().sqrt()) / len(d),
        "inverse_mean": float((-d).clamp(max=LARGE_EXPONENT).exp().mean()),
        "k3": float((d.expm1() - d).clamp(max=1e12).mean()),
        "effective": float(rho.sum() ** 2 / (len(d) * (rho**2).sum())),
    }


def _result(columns: Columns, findings: list[ReplayFinding]) -> Gap:
    cause = findings[0].cause if findings else "agree"
    d = columns.trained(columns.d)
    return Gap(tokens=len(d), cause=cause, findings=tuple(findings), **_numbers(d))
