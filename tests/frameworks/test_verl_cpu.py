# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of verl's platform for a CPU take torch.cuda's keywords."""

import pytest

pytest.importorskip("verl")
from upref_frameworks.verl.cpu import device_module


def test_each_stand_in_takes_a_device_as_a_keyword():
    module = device_module()
    assert module.get_device_name(device=0) == "CPU"
    assert module.memory_allocated(device=0) > 0
    available, total = module.mem_get_info(device=0)
    assert 0 < available <= total
    state = module.get_rng_state(device=0)
    module.set_rng_state(new_state=state, device=0)
    assert module.get_rng_state().equal(state)
