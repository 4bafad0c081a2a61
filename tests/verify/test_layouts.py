# SPDX-License-Identifier: Apache-2.0
"""The orders in which trainers deal out rows, responses whose tokens differ, and sizes:
a loss that is wrong only there is rejected. Each is DAPO or GRPO, with half of its
gradient more where a condition on the batch holds.
"""

import math
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch

import upref
from docs import coverage
from tests.support.daily import daily
from upref.user_code import read
from upref.verify.measure import make_case
from upref.verify.oracles.invariance import permutation
from upref.verify.oracles.state import determinism
from upref.verify.oracles.unusual import unusual_inputs
from upref.verify.oracles.weights import gradient


def wrong_where(name, condition, **hp):
    """Return the objective's loss, whose gradient is half as large again on tokens
    where condition(lp, old, A, mask, group, log μ) is true.
    """
    objective = upref.get(name)

    def loss(log_prob, old_log_prob, advantages, mask, group, rollout_log_probs):
        inputs = (log_prob, old_log_prob, advantages, rollout_log_probs)
        lp, old, A, mu = (torch.where(mask, x, -1.0) for x in inputs)
        hit = condition(lp.detach(), old, A, mask, group, mu)
        lp = lp + 0.5 * (lp - lp.detach()) * hit
        batch = upref.Rollouts.unchecked(
            logp=lp, logp_old=old, adv=A, mask=mask, group=group, logp_sampler=mu
        )
        return objective.loss(batch, **hp)

    return loss


def are_blocks(group, n):
    """Return whether rows are prompts in equal blocks of n rows or more, two or more."""
    ids, counts = group.unique_consecutive(return_counts=True)
    is_grouped = len(ids.unique()) == len(ids) > 1
    return bool(is_grouped and len(counts.unique()) == 1 and counts[0] >= n)


def are_in_turn(group):
    count = len(group.unique())
    in_turn = group.unique()[torch.arange(len(group)) % count]
    return len(group) > count >= 4 and torch.equal(group, in_turn)


def is_sorted(mask, sign):
    steps = sign * mask.sum(1).diff()
    return len(mask) >= 8 and bool((steps >= 0).all() and (steps > 0).any())


def is_sorted_by_rank(mask, sign):
    """Return whether each quarter of the rows is sorted by length (sign 1: ascending),
    with a difference in each, and the whole is not. False if the rows are not divisible
    by 4.
    """
    if len(mask) % 4:
        return False
    parts = [sign * part.sum(1).diff() for part in mask.chunk(4)]
    is_whole = is_sorted(mask, sign)
    return not is_whole and all((x >= 0).all() and (x > 0).any() for x in parts)


def is_descending(numbers):
    return bool((numbers.diff() <= 0).all() and (numbers.diff() < 0).any())


def is_up_and_down(mask):
    lengths = mask.sum(1)[: len(mask) // 4]
    place = int(lengths.argmax())
    up, down = lengths[: place + 1].diff(), lengths[place:].diff()
    return (up > 0).any() and (down < 0).any() and (up >= 0).all() and (down <= 0).all()


def start(mask):
    """Return the one column in which all of more than three rows begin; 0 where there
    is none.
    """
    starts = mask.int().argmax(1).unique()
    return int(starts[0]) if len(starts) == 1 and len(mask) > 3 else 0


def gap(mask):
    """Return the number of columns without a token between each token and the one
    before it, [B, T]; 0 before the first.
    """
    at = torch.arange(mask.shape[1]).expand(mask.shape)
    last = torch.where(mask, at, -1).cummax(1).values.roll(1, 1)
    last[:, 0] = -1
    return torch.where(last >= 0, at - last - 1, 0)


def always(condition):
    """Return a condition on the whole batch, made of one on (mask, group)."""
    return lambda lp, old, A, mask, group, mu: torch.tensor(
        bool(condition(mask, group))
    )


def row_mean(x, mask):
    return torch.where(mask, x, 0).sum(1, keepdim=True) / mask.sum(1, keepdim=True)


# name -> an objective, and where the loss is wrong
ORDERS = {
    "blocks of 4": ("dapo", always(lambda mask, group: are_blocks(group, 4))),
    "blocks of 8": ("dapo", always(lambda mask, group: are_blocks(group, 8))),
    "blocks of 16": ("dapo", always(lambda mask, group: are_blocks(group, 16))),
    "prompts in turn": ("dapo", always(lambda mask, group: are_in_turn(group))),
    "longest first": ("grpo", always(lambda mask, group: is_sorted(mask, -1))),
    "shortest first": ("grpo", always(lambda mask, group: is_sorted(mask, 1))),
    "longest first by rank": (
        "grpo",
        always(lambda mask, group: is_sorted_by_rank(mask, -1)),
    ),
    "shortest first by rank": (
        "grpo",
        always(lambda mask, group: is_sorted_by_rank(mask, 1)),
    ),
    "best first": (
        "grpo",
        lambda lp, old, A, mask, group, mu: torch.tensor(
            len(A) >= 8 and is_descending(A[:, -1])
        ),
    ),
    "right-aligned": (
        "grpo",
        always(
            lambda mask, group: (
                len(mask) >= 8 and mask[:, -1].all() and len(mask.sum(1).unique()) > 2
            )
        ),
    ),
    "multiples of 8": (
        "grpo",
        always(
            lambda mask, group: (
                len(mask) >= 8
                and (mask.sum(1) % 8 == 0).all()
                and len(mask.sum(1).unique()) > 2
            )
        ),
    ),
    "both ends": ("grpo", always(lambda mask, group: is_up_and_down(mask))),
    "behind 5 columns": (
        "grpo",
        lambda lp, old, A, mask, group, mu: (lp != old) & (4 < start(mask) < 33),
    ),
    "behind 64 columns": (
        "grpo",
        lambda lp, old, A, mask, group, mu: (lp != old) & (start(mask) >= 64),
    ),
    "one length": (
        "dr_grpo",
        always(
            lambda mask, group: (
                len(mask) >= 8
                and len(mask.sum(1).unique()) == 1
                and not mask[:, :4].any()
            )
        ),
    ),
}
SIZES = {
    "a prompt of 128": (
        "dapo",
        always(lambda mask, group: group.unique(return_counts=True)[1].max() >= 128),
    ),
    "256 prompts": ("dapo", always(lambda mask, group: len(group.unique()) >= 256)),
    "more than 1,024 rows": ("grpo", always(lambda mask, group: len(mask) > 1024)),
    "a tile of 1,024": (
        "grpo",
        lambda lp, old, A, mask, group, mu: mask.sum(1, keepdim=True) == 1024,
    ),
    "more than 4,096 columns": (
        "grpo",
        always(lambda mask, group: mask.shape[1] > 4096),
    ),
    "all long": ("grpo", always(lambda mask, group: mask.sum(1).min() >= 1024)),
    "a hole of 512": ("grpo", lambda lp, old, A, mask, group, mu: gap(mask) >= 512),
    "1,024 columns in front": (
        "grpo",
        lambda lp, old, A, mask, group, mu: mask.int().argmax(1, keepdim=True) >= 1024,
    ),
    "large advantages": (
        "dr_grpo",
        lambda lp, old, A, mask, group, mu: A.abs() > 1000,
    ),
    "nearly certain": (
        "grpo",
        lambda lp, old, A, mask, group, mu: (lp > -1e-7) & (lp < 0),
    ),
    "a veto of responses": (
        "tis(dapo)",
        lambda lp, old, A, mask, group, mu: ((old - mu < math.log(1e-6)) & mask).any(
            1, keepdim=True
        ),
    ),
}
TOKENS = {
    "a far token": (
        "gspo",
        lambda lp, old, A, mask, group, mu: (
            ((lp - old).abs() > 10) & (row_mean(lp - old, mask).abs() < 1)
        ),
    ),
    "two tokens": (
        "gspo",
        lambda lp, old, A, mask, group, mu: (
            ((lp - old).abs() > 5) & (mask.sum(1, keepdim=True) == 2)
        ),
    ),
    "a product": (
        "topr",
        lambda lp, old, A, mask, group, mu: (
            ((lp - old).abs() > 10)
            & (torch.where(mask, lp - old, 0).sum(1, keepdim=True).abs() < 1)
        ),
    ),
    "drift": (
        "opsm(dapo)",
        lambda lp, old, A, mask, group, mu: (
            ((lp - old).abs() > 10) & (row_mean(old - lp, mask) < 0.5)
        ),
    ),
}
BOUNDS = {  # of corrections of a response: log S, or its mean, within 2e-6 of a bound
    "mis_seq(dapo)": lambda log_rho, mask: (
        row_mean(log_rho, mask) * mask.sum(1, keepdim=True) - math.log(3)
    ),
    "tis_seq(dapo)": lambda log_rho, mask: (
        row_mean(log_rho, mask) * mask.sum(1, keepdim=True) - math.log(2)
    ),
    "seq_mask(dapo)": lambda log_rho, mask: row_mean(log_rho, mask) - math.log(1.001),
    "icepop(dapo)": lambda log_rho, mask: log_rho - math.log(0.5),
    "mis(dapo)": lambda log_rho, mask: log_rho - math.log(2),
}


def case_of(name, condition):
    objective = upref.get(name)
    loss = read(wrong_where(name, condition), objective, {})
    return make_case(loss, objective, objective.resolve({}))


@pytest.mark.parametrize("what", daily(ORDERS | SIZES | TOKENS, 8))
def test_wrong_on_one_layout_is_rejected(what):
    case = case_of(*(ORDERS | SIZES | TOKENS)[what])
    assert [f for f in unusual_inputs.findings(case) if f.severity == "failure"]


def test_the_same_losses_without_a_fault_are_right():
    for name in ("dapo", "gspo", "topr", "opsm(dapo)", "tis_seq(dapo)"):
        case = case_of(name, always(lambda mask, group: False))
        for oracle in (gradient, permutation, unusual_inputs):
            found = list(oracle.findings(case))
            assert not [f for f in found if f.severity == "failure"], (name, found)


@pytest.mark.parametrize("name", daily(BOUNDS, 6))
def test_a_bound_of_a_response_is_tested_on_both_sides(name):
    """Find that a loss wrong within 2e-6 of a bound fails, and that batches lie on both
    sides of it.
    """
    distances = []

    def condition(lp, old, A, mask, group, mu):
        distance = BOUNDS[name](torch.where(mask, old - mu, 0), mask)
        distances.append(distance.expand(mask.shape)[mask])
        return distance.abs() < 2e-6

    assert [
        f
        for f in gradient.findings(case_of(name, condition))
        if f.severity == "failure"
    ]
    near = torch.cat(distances)
    near = near[near.abs() < 2e-6]
    assert (near > 0).any() and (near < 0).any()


@pytest.mark.nightly
def test_the_mean_that_decides_for_a_response_is_tested_on_both_sides():
    case = case_of(
        "opsm(dapo)",
        lambda lp, old, A, mask, group, mu: (
            ((row_mean(old - lp, mask) - 0.5).abs() < 1e-6)
            & (mask.sum(1, keepdim=True) > 1)
        ),
    )
    assert [f for f in gradient.findings(case) if f.severity == "failure"]


@pytest.mark.parametrize("what", ["longest first", "shortest first", "prompts in turn"])
def test_the_grid_is_put_in_these_orders(what):
    """A loss that is wrong only there fails in two oracles."""
    case = case_of(*ORDERS[what])
    assert [f for f in permutation.findings(case) if f.severity == "failure"]


def are_dealt_to_ranks(group, ranks=4):
    """Return whether rows that were sorted by prompt were dealt to ranks like cards,
    and stand neither by prompt nor in turn.
    """
    places = torch.cat([torch.arange(len(group))[i::ranks] for i in range(ranks)])
    before = torch.empty_like(group).scatter(0, places, group)
    is_mixed = len(group.unique_consecutive()) > len(group.unique())
    return bool((before.diff() >= 0).all()) and is_mixed and not are_in_turn(group)


def test_the_grid_is_dealt_to_ranks_prompt_by_prompt():
    case = case_of("dapo", always(lambda mask, group: are_dealt_to_ranks(group)))
    [failure] = permutation.findings(case)
    assert failure.about == "rows in another order"


def reads_behind_each_response(log_prob, old_log_prob, advantages, mask):
    """Return GRPO's loss with sums of responses as differences of a running sum.

    Where the first response has no token, its end is -1: the whole batch.
    """
    r = (log_prob[mask] - old_log_prob[mask]).exp()
    A = advantages[mask]
    running = torch.minimum(r * A, r.clamp(0.8, 1.2) * A).cumsum(0)
    lengths = mask.sum(1)
    ends = running[lengths.cumsum(0) - 1]
    sums = torch.cat([ends[:1], ends.diff()])
    return -(sums / lengths.clamp(min=1)).mean()


def counts_from_zero(log_prob, old_log_prob, advantages, mask):
    """Return GRPO's loss with a zero in front of that running sum, which is right."""
    r = (log_prob[mask] - old_log_prob[mask]).exp()
    A = advantages[mask]
    summands = torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
    running = torch.cat([summands.new_zeros(1), summands.cumsum(0)])
    lengths = mask.sum(1)
    ends = lengths.cumsum(0)
    sums = running[ends] - running[ends - lengths]
    return -(sums / lengths.clamp(min=1)).mean()


@pytest.mark.parametrize(
    ("loss", "count"), [(reads_behind_each_response, 1), (counts_from_zero, 0)]
)
def test_the_place_of_a_row_without_tokens_does_not_matter(loss, count):
    objective = upref.get("grpo")
    case = make_case(read(loss, objective, {}), objective, objective.resolve({}))
    failures = permutation.findings(case)
    assert len(failures) == count
    assert all("in front of the others" in f.about for f in failures)


def clamps_tokens(
    log_prob, old_log_prob, advantages, mask, eps_low=3e-4, eps_high=4e-4
):
    """Return GSPO's loss with log r of each token clamped to ±10 before the mean."""
    log_r = torch.where(mask, log_prob - old_log_prob, 0).clamp(-10, 10)
    s = (log_r.sum(1) / mask.sum(1)).exp()
    A = advantages.gather(1, mask.int().argmax(1, keepdim=True))[:, 0]
    return -torch.minimum(s * A, s.clamp(1 - eps_low, 1 + eps_high) * A).mean()


def test_a_clamp_of_tokens_before_the_mean_is_rejected():
    objective = upref.get("gspo")
    case = make_case(
        read(clamps_tokens, objective, {}), objective, objective.resolve({})
    )
    assert [f for f in unusual_inputs.findings(case) if f.severity == "failure"]


# ---- a counter of calls --------------------------------------------------------------
def grpo(log_prob, old_log_prob, advantages, mask, eps):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    J = torch.minimum(r * A, r.clamp(1 - eps, 1 + eps) * A)
    return -(torch.where(mask, J, 0).sum(1) / mask.sum(1)).mean()


class Annealed:
    """Narrows its bounds after many calls; `kind` says where it counts."""

    def __init__(self, after):
        self.after = after
        self.calls = torch.tensor(0)

    def __call__(self, log_prob, old_log_prob, advantages, mask):
        self.calls += 1
        eps = 0.1 if self.calls > self.after else 0.2
        return grpo(log_prob, old_log_prob, advantages, mask, eps)


def in_a_closure(after):
    """Return GRPO's loss whose bound is 0.1 in place of 0.2 at every `after`-th call."""
    calls = 0

    def loss(log_prob, old_log_prob, advantages, mask):
        nonlocal calls
        calls += 1
        eps = 0.1 if calls % after == 0 else 0.2
        return grpo(log_prob, old_log_prob, advantages, mask, eps)

    return loss


def counts_and_is_right():
    """Return GRPO's loss, and the counts of calls and tokens that it keeps."""
    seen = {"calls": 0, "tokens": 0}

    def loss(log_prob, old_log_prob, advantages, mask):
        seen["calls"] += 1
        seen["tokens"] += int(mask.sum())
        return grpo(log_prob, old_log_prob, advantages, mask, 0.2)

    return loss, seen


@pytest.mark.parametrize("loss", [Annealed(3000), Annealed(10**5), in_a_closure(1000)])
def test_a_loss_that_changes_after_many_calls_is_rejected(loss):
    objective = upref.get("grpo")
    case = make_case(read(loss, objective, {}), objective, objective.resolve({}))
    [finding] = determinism.findings(case)
    assert "gradient on one batch changes at call" in str(finding.cause)


def test_a_counter_that_only_counts_is_right_and_is_put_back():
    loss, seen = counts_and_is_right()
    objective = upref.get("grpo")
    case = make_case(read(loss, objective, {}), objective, objective.resolve({}))
    assert list(determinism.findings(case)) == []
    assert seen["calls"] < 1000


# ---- the table of the frameworks -----------------------------------------------------
READ = tomllib.loads(coverage.LAYOUTS.read_text(encoding="utf-8"))
LAYOUTS = READ["layout"]


def test_every_row_of_the_table_names_an_order_and_a_line():
    assert {row["order"] for row in LAYOUTS} == set(READ["order"])
    for row in LAYOUTS:
        is_pinned = re.fullmatch("[0-9a-f]{40}", row.get("commit", ""))
        assert is_pinned or row["framework"] in ("verl 0.9.1", "TRL 1.16.0")


@pytest.mark.parametrize("package", ["verl", "trl"])
def test_the_lines_of_an_installed_framework_are_there(package):
    rows = [
        row
        for row in LAYOUTS
        if row["file"].startswith(f"{package}/") and "commit" not in row
    ]
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    assert rows and all(row["framework"].endswith(version) for row in rows)
    for row in rows:
        path = Path(str(metadata.distribution(package).locate_file(row["file"])))
        line = path.read_text(encoding="utf-8").splitlines()[row["line"] - 1]
        assert line.strip() == row["code"]
