# SPDX-License-Identifier: Apache-2.0
"""Bugs of step_cases.py are rejected, most by name; the right loops in unusual forms of
right_steps.py are not.

Nightly: a check that finds no cause tries every one that it knows, so that 80 of them
take minutes.
"""

import pytest
import right_steps  # noqa: F401  adds to RIGHT
import torch
from step_cases import in_parts
from training import BUGS, RIGHT, Own, T

import upref

pytestmark = pytest.mark.nightly


def checked(step, model, options):
    """Return the report of check_step on a row of the tables; DAPO unless its options
    name another objective.
    """
    torch.manual_seed(0)
    options = {"objective": "dapo"} | options
    return upref.check_step(
        step, model(), options.pop("objective"), temperature=T, **options
    )


@pytest.mark.parametrize(
    "cause, words, model, step, options", BUGS, ids=[b[0] for b in BUGS]
)
def test_a_bug_is_rejected(cause, words, model, step, options):
    report = checked(step, model, options)
    assert not report
    assert words in report.failures[0].cause, report


@pytest.mark.parametrize("name, model, step, options", RIGHT, ids=[r[0] for r in RIGHT])
def test_a_right_loop_is_accepted(name, model, step, options):
    report = checked(step, model, options)
    assert report, report


def test_a_step_that_shards_its_model_is_refused(tmp_path):
    """FSDP2 replaces the parameters of the very module; `record_step` gathers its
    gradients.
    """

    def step(model, rows):
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
        )
        torch.distributed.fsdp.fully_shard(
            model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        )
        in_parts(model, rows)

    try:
        with pytest.raises(upref.InputError, match="use record_step"):
            checked(step, Own, {})
    finally:
        torch.distributed.destroy_process_group()


def test_a_step_for_each_micro_batch_is_refused():
    opt = []

    def step(model, rows):
        opt[:] = [torch.optim.SGD(model.parameters(), lr=0.05)]
        in_parts(
            model, rows, 4, after=lambda model: (opt[0].step(), opt[0].zero_grad())
        )

    with pytest.raises(upref.InputError, match="2 optimizer steps"):
        checked(step, Own, {})
