# SPDX-License-Identifier: Apache-2.0
"""Oracles of a mini-batch that is cut up: micro-batches whose gradients add up, ranks whose gradients are averaged."""

from dataclasses import replace

import torch

from upref.aggregate import Totals
from upref.check.fit import Case
from upref.check.invariance import BIT
from upref.check.oracles import as_python, fail, moved, note, oracle, worst
from upref.check.report import Finding
from upref.regimes import anchor
from upref.rollouts import Rollouts


def _batch(case: Case) -> Rollouts:
    b = case.ready(anchor())
    return replace(b, logp=b.logp - 0.05 * b.logp.cos().abs())


def _slack(case: Case) -> float:
    return max(1e-7, case.tol if case.tol > 1e-4 else BIT)


@oracle("split")
def split(case: Case) -> list[Finding]:
    loss, b = case.loss, _batch(case)
    v, g = loss.both(b)
    for n in loss.parts:
        parts = [loss.both(m) for m in b.split(n)]
        g2, v2 = torch.cat([p[1] for p in parts]), sum(p[0] for p in parts)
        off = moved(g2, g, b.mask, _slack(case))
        if off.max() > 0:
            i, t = worst(off)
            why = "it is normalised by the micro-batch, not by the mini-batch's totals"
            regime = f"{n} micro-batches of unequal lengths, their losses added up"
            before, after = f"dJ/dlp {g[i, t].item():.6g}, as of the whole", f"{g2[i, t].item():.6g}"
            return [fail("split", regime, before, after, as_python(b), why)]
        if (v2 - v).abs() > 1e-6 * v.abs().clamp(min=1e-3):
            return [note("split", f"the value of {n} micro-batches does not add up, the gradient does")]
    return []


@oracle("data-parallel")
def data_parallel(case: Case) -> list[Finding]:
    """K ranks with rows dealt out in turn, so that groups lie on several; the framework averages their gradients."""
    loss, b = case.loss, _batch(case)
    g, totals = loss.gradient(b), b.totals or Totals.of(b.mask, b.group)
    for ranks in (2, 4):
        mean = torch.zeros_like(g)
        for k in range(ranks):
            rows = torch.arange(k, len(g), ranks)
            mine = b._rows(rows, totals)
            if not loss.splits:
                mine = replace(mine, totals=None, group=None)
            loss.ranks = ranks
            try:
                mean[rows] = loss.gradient(mine) / ranks * (1 if loss.reads_ranks or not loss.splits else ranks)
            finally:
                loss.ranks = 1
        off = moved(mean, g, b.mask, _slack(case))
        if off.max() > 0:
            i, t = worst(off)
            return [
                fail(
                    "data-parallel",
                    f"{ranks} ranks of {len(g) // ranks} responses, gradients averaged: {contract(case)}",
                    f"dJ/dlp {g[i, t].item():.6g}, as on one rank",
                    f"{mean[i, t].item():.6g}",
                    as_python(b),
                    "it is normalised by the rank's own rows, or not scaled by the number of ranks",
                )
            ]
    return []


def contract(case: Case) -> str:
    """What a rank is taken to be told, in words."""
    loss = case.loss
    if not loss.splits:
        return "each rank holds equally many responses and knows its own alone"
    if loss.reads_ranks:
        return "each rank is told the counts of the whole mini-batch and the number of ranks"
    return "each rank is told the counts of the whole mini-batch, and its loss is multiplied by the number of ranks"


def not_parallel(case: Case) -> str:
    """Why this loss cannot be asked."""
    if not case.loss.splits and (not case.o.agg.startswith("seq-mean") or "group" in case.loss.reads):
        return "it takes no `totals`: the ranks' own token means, averaged, are not the mini-batch's"
    return ""
