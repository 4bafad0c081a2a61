# SPDX-License-Identifier: Apache-2.0
"""The commands whose output is docs/speed.md: they run, and what they compare is one loss."""

import pytest
import torch

from benchmarks import check, speed

NEED = "`repro/venv.sh verl trl` installs what it is compared with"


def test_the_start_of_the_command_is_measured():
    """It asked for a module that is not there, so that the whole benchmark ended without its last table."""
    assert 0 < check.starting() < 60


@pytest.mark.verl
@pytest.mark.trl
@pytest.mark.parametrize("pair", speed.PAIRS, ids=lambda pair: "-".join(part for part in pair[:3] if part))
def test_all_that_stand_in_one_row_have_one_gradient(pair):
    pytest.importorskip("verl", reason=NEED)
    pytest.importorskip("trl", reason=NEED)
    lp, *rest = speed.batch(6, 16)
    lp = lp.detach().double().requires_grad_()
    rest = [x.double() if x.is_floating_point() else x for x in rest]
    found = {}
    for who, loss in speed.losses(pair, rest[-1]).items():
        (found[who],) = torch.autograd.grad(loss(lp, *rest), lp)
    for who, gradient in found.items():
        torch.testing.assert_close(gradient, found["upref"], rtol=1e-5, atol=1e-9, msg=lambda s, who=who: f"{who}: {s}")
