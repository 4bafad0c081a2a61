# SPDX-License-Identifier: Apache-2.0
"""Each objective's hand-written weight is the gradient of its function, for every value."""

from dataclasses import replace

import pytest
import torch

import upref
from tests.support.daily import daily
from upref.proof.compare import compare
from upref.proof.domain import Pattern, patterns
from upref.proof.subjects import closed_form_of, gradient_of
from upref.registry import get
from upref.transforms import CORRECTIONS
from upref.user_code import read

# why there is no proof, and words of it. A line that is not needed any more fails a test.
NOT_PROVED = {
    # bounds by eight steps of Newton's method, which begins at e^-800
    "bandpo_kl": "e to the power of -800",
    # a share of the batch's tokens, sorted by their covariance: an if for each order
    "clip_cov": "no point was found for the other side",
    # the same; and of two tokens the covariances are equal, up to rounding
    "kl_cov": "its numbers do not follow",
}
NAMES = upref.names()
FULL = Pattern(((True, True), (True, False)))
HOLE = Pattern(((True, False, True),))
GROUPS = Pattern(FULL.mask, (7, 3))
AMONG = [
    *patterns(1, 1, False),
    HOLE,
    FULL,
    replace(FULL, on_policy=True),
    replace(FULL, zeros=frozenset({(1, 0), (1, 1)})),
]


def compared(function, reference, objective, seconds=60):
    """Return the comparison of two gradients of an objective, with the batches and
    columns that it needs.
    """
    torch.set_num_threads(1)
    reads = {"entropy"} & set(objective.reads)
    if objective.sampler is not None:
        reads |= {"logp_sampler"}
    among = AMONG
    if objective.agg == "group-token-mean" or "group" in objective.reads:
        among = [*AMONG, GROUPS]
    is_mean = objective.level == "sequence_mean"
    return compare(
        function, reference, among, objective.one_adv, reads, seconds, is_mean
    )


def proof_of(name):
    o = get(name)
    return compared(gradient_of(read(o, o, {})), closed_form_of(o, {}), o)


@pytest.mark.parametrize("name", NAMES)
def test_the_weight_is_the_gradient(name):
    found = proof_of(name)
    assert found.status != "differs", found.counterexample
    if name in NOT_PROVED:
        assert NOT_PROVED[name] in found.reason
    else:
        assert found.status == "proved", found.reason


SYMBOLIC = [n for n in NAMES if n not in NOT_PROVED and not n.startswith("up")]


QUICK = [n for n in SYMBOLIC if n != "m2po"]
LONG = pytest.param("m2po", marks=pytest.mark.nightly)  # a dozen CPU seconds


@pytest.mark.parametrize("name", [*daily(QUICK, 3), LONG])
def test_up_of_it_has_the_weight_of_up(name):
    found = proof_of(f"up({name})")
    assert found.status == "proved", found.reason


@pytest.mark.parametrize("base", ["dapo", "gspo", "grpo"])
@pytest.mark.parametrize("made", daily([*CORRECTIONS, "opsm"], 2))
def test_a_transformed_weight_is_the_gradient(made, base):
    found = proof_of(f"{made}({base})")
    assert found.status == "proved", found.reason


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("_anchored")])
def test_the_anchored_form_has_the_gradient_of_its_partner(name):
    o = get(name)
    partner = get(name.removesuffix("_anchored"))
    found = compared(
        gradient_of(read(o, o, {})), gradient_of(read(partner, partner, {})), o
    )
    assert found.status == "proved", found.reason
