# SPDX-License-Identifier: Apache-2.0
"""Megatron's own schedules and layers pass the cases of ranks that divide each row, and
fail where its loss is returned as NVIDIA/Megatron-LM#7513 describes.
"""

from pathlib import Path

import pytest

from upref.conformance import CASES, Status, load_adapter, run_ranks

ADAPTER = Path(__file__).parent / "megatron_adapter.py"
CONTEXT = "ranks/cp2/token-mean"
STAGES = "ranks/pp2/micro-4"


def _ends(kind, ids):
    """Return how each of these cases ends with an adapter of this kind, on its ranks.
    Skip without Megatron.
    """
    pytest.importorskip(
        "megatron.core", reason="pip install --no-deps megatron-core==0.16.1 einops"
    )
    adapter = load_adapter(f"{ADAPTER}:{kind}")
    return {name: run_ranks(adapter, CASES[name], deadline=300) for name in ids}


@pytest.mark.nightly
def test_two_ranks_that_divide_a_row_have_the_gradient_of_one():
    ids = [name for name in CASES if name.startswith(("ranks/cp2", "ranks/tp2"))]
    outcomes = _ends("Megatron", [*ids, STAGES])
    wrong = [str(one) for one in outcomes.values() if one.status is not Status.PASSED]
    assert not wrong
    assert len(outcomes) == 5


@pytest.mark.nightly
def test_three_values_need_the_setting_that_they_are_made_for():
    """Without it each rank's sum is divided by that rank's own tokens."""
    right = _ends("MegatronPerToken", [CONTEXT, "ranks/tp2/token-mean", STAGES])
    wrong = [str(one) for one in right.values() if one.status is not Status.PASSED]
    assert not wrong
    wrong = _ends("MegatronThreeValues", [CONTEXT])[CONTEXT]
    assert wrong.status is Status.FAILED
    assert wrong.report.error > 0.1
