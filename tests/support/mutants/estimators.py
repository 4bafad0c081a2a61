# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Mutants of advantage and KL estimators: each estimator written as others write it,
changed by one slip, searched, and judged by the checker.
"""

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import upref
from upref import advantages, kl
from upref.errors import InputError

from .operators import sample
from .store import digest
from .styles import KL

LOOP = """import math
import torch
def loss(rewards, group):
    out = torch.zeros_like(rewards)
    for g in group.unique():
        pick = group == g
        x = rewards[pick]
        n = len(x)
        if n > 1 and x.max() > x.min():
            out[pick] = {}
    return out
"""
WHOLE = "import math\nimport torch\ndef loss(rewards, group):\n    x = rewards\n    return {}\n"
SCATTER = """import math
import torch
def loss(rewards, group):
    ids, g, n = group.unique(return_inverse=True, return_counts=True)
    low = torch.zeros(len(ids), dtype=rewards.dtype).scatter_reduce(0, g, rewards, 'amin', include_self=False)
    R = rewards - low[g]
    mean = torch.zeros(len(ids), dtype=rewards.dtype).index_add(0, g, R) / n
    x = R - mean[g]
    n = n[g]
    return {}
"""
SPREAD = "torch.sqrt(torch.zeros(len(ids), dtype=x.dtype).index_add(0, g, x ** 2)[g] / (n - 1).clamp(min=1))"
FORMS: dict[str, list[tuple[str, dict[str, float]]]] = {
    "group_norm": [
        (LOOP.format("(x - x.mean()) / (x.std() + 1e-06)"), {"ddof": 1, "eps": 1e-6}),
        (LOOP.format("(x - x.sum() / n) / (torch.sqrt(((x - x.mean()) ** 2).sum() / n) + 0.0001)"), {"ddof": 0, "eps": 1e-4}),
        (SCATTER.format(f"x / ({SPREAD} + 1e-06)"), {"ddof": 1, "eps": 1e-6}),
    ],
    "group_mean": [(LOOP.format("x - x.mean()"), {}), (SCATTER.format("x"), {})],
    "leave_one_out": [(LOOP.format("x - (x.sum() - x) / (n - 1)"), {}), (LOOP.format("(x - x.mean()) * n / (n - 1)"), {}),
                      (SCATTER.format("x * n / (n - 1).clamp(min=1)"), {})],
    "whiten": [(WHOLE.format("(x - x.mean()) / (x.std(unbiased=False) + 1e-08)"), {"ddof": 0, "eps": 1e-8})],
    "signed": [(WHOLE.format("torch.where(x > 0, 1.0, -1.0).to(x.dtype)"), {}), (WHOLE.format("2.0 * x - 1.0"), {})],
    "reward": [(WHOLE.format("x.clone()"), {})],
}  # fmt: skip


def compiled(text: str):
    """Run a module's text and return its function `loss`. It raises what the text
    raises.
    """
    scope: dict[str, Any] = {}
    exec(compile(text, "<mutant>", "exec"), scope)
    return scope["loss"]


def batches(
    name: str, seed: int, n: int = 400
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield n batches (rewards [N], groups [N]) of N = 4 to 300 responses.

    Rewards are 0 or 1, normal, or quarters from -2 to 2; those of `signed` are only 0
    or 1. Other estimators' rewards are scaled by 5e-4 to 1e4 and shifted by 3 or -3 at
    times. Groups are of four in a row or random, and some ids are larger than float16
    or float32 holds. A constant batch is left out for `whiten`.
    """
    rng = np.random.default_rng([seed, 3])
    for i in range(n):
        N = int(rng.choice([4, 8, 12, 30, 300]))
        # 300 responses have two large groups
        count = N // int(rng.integers(2, 9)) if N < 300 else 2
        group = rng.integers(0, max(1, count), N)
        group = group * int(rng.integers(1, 50))  # ids with gaps
        if i % 3 == 0:
            group = np.arange(N) // 4
        # which float16 and float32 do not hold
        group = group + (0, 0, 0, 5000, 2**40)[i % 5]
        # all three are drawn: what a seed means depends on it
        zero_or_one = rng.integers(0, 2, N).astype(float)
        normal = rng.normal(size=N)
        quarters = rng.integers(-8, 9, N) / 4
        if name == "signed":
            R = zero_or_one
        else:
            R = (zero_or_one, normal, quarters)[i % 3]
            about_a_thousandth = 10 ** rng.uniform(-3.3, -2.7)
            R = R * rng.choice([1.0, 1.0, 8.0, 0.25, about_a_thousandth, 1e4])
            R = R + rng.choice([0.0, 0.0, 3.0, -3.0])
        if name == "whiten" and R.max() == R.min():
            continue
        yield torch.tensor(R), torch.tensor(group.astype(np.int64))


def advantage_truth(f, name: str, hp: dict[str, float], seed: int) -> str:
    """Compare an estimator with the registry's on the search's batches: return "equal",
    "differs", "unclear" or "stillborn".

    The difference is relative to the largest advantage of the batch: over 1e-3 it
    differs, over 1e-7 it is unclear, and the first such batch decides. "stillborn" is
    an error on the first batch; a later error, or a NaN, is a difference. Any number
    will do that `leave_one_out` gives a response without a peer.
    """
    right, ran = advantages.get(name), False
    for R, group in batches(name, seed):
        want = right(R, group, **hp)
        try:
            got = f(R.clone(), group.clone())
            off = (got - want).abs() / want.abs().max().clamp(min=1e-9)
            # what a response without a peer gets is a convention, if it is a number
            if name == "leave_one_out":
                size = (group[:, None] == group).sum(1)
                off = off.where((size > 1) | ~off.isfinite(), 0)
            largest = float(off.nan_to_num(nan=math.inf).max())
        except Exception:
            if not ran:
                return "stillborn"
            largest = math.inf
        ran = True
        if largest > 1e-3:
            return "differs"
        if largest > 1e-7:
            return "unclear"
    return "equal"


def kl_truth(f, name: str, seed: int) -> str:
    """Compare a KL estimator's values and slopes by log π_θ with the registry's, on 200
    batches [4, 7]: return "equal", "differs", "unclear" or "stillborn".

    The tolerances are those of `advantage_truth`, relative to values above 1. An error
    or another shape on the first batch is "stillborn", and on a later one "differs".
    """
    rng, right = np.random.default_rng([seed, 4]), kl.ESTIMATORS[name]
    for n in range(200):
        broken = "stillborn" if n == 0 else "differs"
        log_pi = -rng.exponential(2, (4, 7))
        log_ratio = rng.normal(size=(4, 7)) * rng.choice([0.05, 1, 4])
        log_ref = np.minimum(log_pi - np.clip(log_ratio, -15, 15), 0)
        lp = torch.tensor(log_pi, requires_grad=True)
        ref = torch.tensor(log_ref)
        want = right(lp, ref)
        try:
            got = f(lp, ref)
            slope = None
            if got.requires_grad:
                slope = torch.autograd.grad(got.sum(), lp, allow_unused=True)[0]
        except Exception:
            return broken
        if got.shape != want.shape:
            return broken
        want_slope = torch.autograd.grad(want.sum(), lp)[0]
        if slope is None:
            slope = torch.zeros_like(want_slope)
        off = max(
            _largest_difference(got, want), _largest_difference(slope, want_slope)
        )
        if off > 1e-3:
            return "differs"
        if off > 1e-7:
            return "unclear"
    return "equal"


def _largest_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference of two tensors, relative to values above 1; infinite
    where it is not a number.
    """
    off = (got - want).abs() / want.abs().clamp(min=1)
    return float(off.nan_to_num(nan=math.inf).max())


def subjects(
    seed: int, each: int = 40
) -> Iterator[tuple[str, str, dict[str, float], str, str]]:
    """Yield (kind, estimator, hyperparameters, slip, text of a module) of every form,
    unchanged (its slip is "") and then with one slip.

    Args:
        seed: of the slips.
        each: the most mutants of one form.
    """
    for name, forms in FORMS.items():
        for i, (text, hp) in enumerate(forms):
            yield "advantage", name, hp, "", text
            for m in sample(text, each, np.random.default_rng([seed, 5, i])):
                yield "advantage", name, hp, m.what, m.text
    for name, form in KL.items():
        text = f"import math\nimport torch\ndef loss(log_prob, ref_log_prob):\n    lp = log_prob\n    ref = ref_log_prob\n    return {form}\n"
        yield "KL", name, {}, "", text
        for m in sample(text, each, np.random.default_rng([seed, 6])):
            yield "KL", name, {}, m.what, m.text


def judged(
    kind: str, name: str, hp: dict[str, float], what: str, text: str, seed: int
) -> dict[str, Any]:
    """Return the row of one estimator: its truth, and unless it is stillborn the
    checker's verdict.

    Args:
        kind: "advantage" or "KL".
        name: of the registry's estimator.
        hp: hyperparameters of an advantage estimator.
        what: the slip, as in "x -> y"; "" where there is none.
        text: of the module.
        seed: of the search.

    `quick` is whether it was accepted, `said` the first failure or the refusal,
    `seconds_` CPU seconds.
    """
    row = {
        "id": digest(kind, name, text),
        "config": name,
        "objective": name,
        "style": kind,
        "operator": f"{kind} estimator",
        "what": what,
    }
    try:
        f = compiled(text)
    except Exception:
        return row | {"truth": "stillborn"}
    if kind == "advantage":
        truth = advantage_truth(f, name, hp, seed)
    else:
        truth = kl_truth(f, name, seed)
    row["truth"] = truth
    if truth == "stillborn":
        return row
    start = time.process_time()
    try:
        if kind == "advantage":
            report = upref.check_advantages(f, name, **hp)
        else:
            report = upref.check_kl(f, name)
    except InputError as e:
        return row | {"quick": False, "said": f"refused: {e}"[:300]}
    said = ""
    if report.failures:
        first = report.failures[0]
        said = f"{first.oracle}: {first.regime}: {first.difference}"
    return row | {
        "quick": bool(report),
        "said": said[:300],
        "seconds_": time.process_time() - start,
    }
