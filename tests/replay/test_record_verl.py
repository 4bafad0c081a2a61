# SPDX-License-Identifier: Apache-2.0
"""verl's unmodified worker, recorded through its plug-in entry: the columns, two ranks,
and what goes wrong.
"""

import logging
import os

import numpy as np
import pytest
import torch

from upref.replay import loss, normalizer, read_steps
from upref.step.compare.case import build_case, make_goal, perturb
from upref.step.inputs.families import tiny
from upref.step.inputs.reference import TorchModel
from upref_frameworks.steps.host import spawn_ranks

pytest.importorskip(
    "verl", reason="`repro/venv.sh verl` installs what verl's losses need"
)
from upref_frameworks.verl import record, step

pytestmark = pytest.mark.verl
MODEL = perturb(tiny("qwen3"))
ROWS = build_case(
    TorchModel(MODEL), make_goal("dapo", {"eps_high": 0.2}, 0.7), None, []
).rows
SAMPLER = -0.5


def as_verls_trainer(rows, *how):
    """Return the batch of `step`, through DataProto as verl's trainer sends it, with
    scores, the sampler's column and uids.
    """
    from verl import DataProto
    from verl.utils import tensordict_utils as tu

    data = plain(rows, *how)
    width = data["response_mask"].shape[1]
    scores = torch.zeros(len(rows), width)
    scores[:, 0] = torch.tensor([row.adv for row in rows])
    extra = DataProto.from_single_dict(
        {
            "token_level_scores": scores,
            "rollout_log_probs": torch.full((len(rows), width), SAMPLER),
            "uid": np.array(
                [f"prompt {i // 4}" for i in range(len(rows))], dtype=object
            ),
        }
    ).to_tensordict()
    for key in ("token_level_scores", "rollout_log_probs"):
        data[key] = extra[key]
    tu.assign_non_tensor_stack(data, "uid", tu.get(extra, "uid"))
    return data


plain = step._batch


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Record four updates of verl's worker, every second one; return the folder and
    what was recorded of the step.
    """
    pytest.importorskip(
        "pydantic", reason="`repro/venv.sh smoke` installs verl's trainer"
    )
    folder = tmp_path_factory.mktemp("dumps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "_batch", as_verls_trainer)
        patch.setenv("UPREF_REPLAY", str(folder))
        patch.setenv("UPREF_REPLAY_EVERY", "2")
        with record.by_environment():
            seen = step.record_training(
                MODEL, ROWS, 0.7, updates=4, engine={"micro_batch_size_per_gpu": 2}
            )
    return folder, seen


def test_the_first_step_and_each_second_one_are_recorded(run):
    assert sorted(p.name for p in run[0].glob("*.npz")) == [
        f"step00000{n}-rank0000.npz" for n in (1, 2, 4)
    ]
    assert "users' texts" in (run[0] / "README.txt").read_text()
    assert len(run[1].steps) == 4


def test_the_columns_are_those_of_the_batch(run):
    """Each recorded row holds the mask, old log-probabilities and reward of the
    response that was trained.
    """
    rows = {tuple(r.response): r for r in ROWS}
    for b in read_steps([run[0]]):
        assert {
            "old",
            "sampler",
            "now",
            "ref",
            "adv",
            "reward",
            "group",
            "micro",
            "rank",
            "grad",
        } <= set(b.recorded)
        assert b.micro.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        for i in range(len(b.ids)):
            row = next(
                r
                for ids, r in rows.items()
                if list(ids) == b.ids[i][: len(ids)].tolist()
            )
            n = len(row.response)
            assert b.mask[i][:n].tolist() == [bool(t) for t in row.trains]
            old = torch.tensor(row.old).double()[b.mask[i][:n]]
            assert torch.allclose(b.old[i][b.mask[i]], old, atol=1e-6)
            assert b.reward[i] == pytest.approx(row.adv, rel=1e-6)
        assert len(b.group.unique()) == 2 and b.meta["loss_mode"] == "vanilla"
        assert (b.sampler[b.mask] == SAMPLER).all()


def test_the_logged_loss_and_the_gradient_are_the_objectives(run):
    """The divisor is the mean over tokens, unless every token of a step is clipped:
    then there is no gradient to tell.
    """
    for b in read_steps([run[0]]):
        found = loss(b, "dapo", eps_high=0.2)
        assert (
            found
            and found.found == "token-mean"
            and found.value == pytest.approx(found.logged, abs=1e-6)
        )
        one = normalizer(b, "dapo", eps_high=0.2)
        if b.grad.any():
            assert not found.findings and one.factor == pytest.approx(1, abs=1e-6)
        else:  # every token is clipped
            assert (
                b.step > 1
                and [f.cause for f in found.findings] == ["no_gradient"]
                and one.factor is None
            )


def test_a_resumed_run_goes_on_counting(run, tmp_path):
    (tmp_path / "step000049-rank0000.npz").touch()
    with record.in_verl(tmp_path):
        step.record_training(MODEL, ROWS, 0.7)
    assert (tmp_path / "step000050-rank0000.npz").exists()


def test_what_the_environment_says_wrongly_is_one_warning(
    monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("UPREF_REPLAY", str(tmp_path))
    monkeypatch.setenv("UPREF_REPLAY_EVERY", "often")
    with caplog.at_level(logging.WARNING):
        assert record.by_environment() is None
    assert "nothing of this run: UPREF_REPLAY_EVERY" in caplog.text
    monkeypatch.delenv("UPREF_REPLAY")
    assert record.by_environment() is None


def on_a_rank(model, rows, temperature, folder="", **fields):
    """Run a step of one rank, recorded and judged over both; return what was recorded.
    The name is one that another process can import.
    """
    with record.in_verl(folder, 1, "dapo eps_high=0.2"):
        return step.record_training(model, rows, temperature, **fields)


@pytest.mark.nightly
def test_two_ranks_make_one_step(tmp_path):
    """Each file holds what its rank has; the loss and the gradient are judged over
    both, and refused for one.
    """
    pytest.importorskip("peft", reason="verl's engines import it")
    fields = {"folder": str(tmp_path)}
    with spawn_ranks(2, on_a_rank, MODEL, ROWS, 0.7, fields) as mine:
        on_a_rank(MODEL, mine, 0.7, **fields)
    assert len(list(tmp_path.glob("*.npz"))) == 2
    (b,) = read_steps([tmp_path])
    found = loss(b, "dapo", eps_high=0.2)
    assert (
        found
        and not found.findings
        and found.value == pytest.approx(found.logged, abs=1e-6)
    )
    assert found.gradient == "token-mean" and b.rank.unique().tolist() == [0, 1]
    (half,) = read_steps([tmp_path / "step000001-rank0000.npz"])
    with pytest.raises(Exception, match="holds 1 of 2 ranks"):
        loss(half, "dapo", eps_high=0.2)


@pytest.mark.nightly
def test_the_plug_in_records_in_a_process_of_its_own(tmp_path):
    """verl loads the entry point, which reads the environment."""
    pytest.importorskip("peft", reason="verl's engines import it")
    import subprocess
    import sys

    code = "import verl; from verl.workers.engine.base import BaseEngine; print(BaseEngine.train_batch.__module__)"
    env = os.environ | {"UPREF_REPLAY": str(tmp_path / "dumps")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "upref_frameworks.verl.record", done.stderr[-500:]
    assert (tmp_path / "dumps" / "README.txt").exists()
