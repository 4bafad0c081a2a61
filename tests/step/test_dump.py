# SPDX-License-Identifier: Apache-2.0
"""A real step in a file: written where it is made, checked on another machine."""

import pytest
import torch
from loops import T, policy_step, qwen3, with_

from upref import replay
from upref.errors import InputError
from upref.step import TorchModel, check_dump, dump_step
from upref.step.compare.case import build_case, make_goal
from upref.step.dump import DIRECTIONS, project


def rows_of(model):
    return build_case(TorchModel(model), make_goal("dapo", {}, T), None, ()).rows


def written(folder, step, clip=None, model=None):
    """Write the first of two optimizer steps to a file; return the file, the model from
    before it, and the model after both.

    clip: the bound of the first gradient's norm.
    """
    model = model or qwen3()
    before = qwen3()
    before.load_state_dict(model.state_dict())
    path = folder / "step.npz"
    rows = rows_of(model)
    with dump_step(model, rows, path):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step(model, rows)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        step(model, rows)
        optimizer.step()
    return path, before, model


def test_a_right_step_agrees_on_another_machine(tmp_path):
    path, before, _ = written(tmp_path, policy_step)
    report = check_dump(path, before, "dapo", temperature=T)
    assert report, report
    assert report.error < 1e-5


def test_a_wrong_step_has_its_cause(tmp_path):
    path, before, _ = written(tmp_path, with_(temperature=1.0))
    report = check_dump(path, before, "dapo", temperature=T)
    assert report.failures[0].cause == "the temperature is left out (it is 1)"


def test_where_the_norm_was_clipped_the_direction_is_compared(tmp_path):
    path, before, _ = written(tmp_path, policy_step, clip=1e-3)
    assert not check_dump(path, before, "dapo", temperature=T, explain=False)
    report = check_dump(path, before, "dapo", temperature=T, clip=1e-3)
    assert report
    assert "direction" in str(report)


def test_other_weights_are_refused(tmp_path):
    path, _, after = written(tmp_path, policy_step)
    with pytest.raises(InputError, match="weights are not those of the dumped step"):
        check_dump(path, after, "dapo", temperature=T)


def test_the_file_is_a_recorded_batch(tmp_path):
    path, before, _ = written(tmp_path, policy_step)
    batch = replay.read(path)
    rows = rows_of(before)
    assert batch.tokens == sum(sum(r.trains) for r in rows)
    assert {"ids", "mask", "adv", "old", "ref", "group"} <= set(batch.recorded)


def test_a_recorded_batch_without_gradients_is_refused(tmp_path):
    path, before, _ = written(tmp_path, policy_step)
    batch = replay.read(path)
    object.__setattr__(batch, "meta", {})
    replay.write(path, batch)
    with pytest.raises(InputError, match=r"write it with upref\.step\.dump_step"):
        check_dump(path, before, "dapo", temperature=T)


def test_without_a_step_nothing_is_written(tmp_path):
    model = qwen3()
    with (
        pytest.raises(InputError, match="no optimizer step"),
        dump_step(model, rows_of(model), tmp_path / "step.npz"),
    ):
        pass
    assert not [*tmp_path.iterdir()]


def test_the_sketch_is_linear_and_keeps_the_norm():
    torch.manual_seed(0)
    x, y = torch.randn(2, 200, 300, dtype=torch.float64)
    both = project("w", 2 * x - y)
    assert len(both) == DIRECTIONS
    torch.testing.assert_close(both, 2 * project("w", x) - project("w", y))
    sizes = [float(project(str(i), x).norm() / x.norm()) for i in range(50)]
    assert abs(sum(sizes) / 50 - 1) < 0.05
    assert project("b", x[0, :5]).tolist() == x[0, :5].tolist()
