# SPDX-License-Identifier: Apache-2.0
"""`upref step FILE.py:step`, in this process and on two ranks of torchrun."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from upref import InputError
from upref.cli import main
from upref.step import Row
from upref.step.check import check_recorded
from upref.step.compare.record import Recorded
from upref.step.inputs.reference import TorchModel
from upref_frameworks.steps.own import Rank

HERE = Path(__file__).parent
TWO_RANKS = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "-m",
    "upref",
    "step",
]


def on_two_ranks(step, *more):
    """Run `upref step` on two ranks of torchrun; return the exit status, stdout and
    stderr.
    """
    run = subprocess.run(
        [*TWO_RANKS, f"on_ranks.py:{step}", "--as", "dapo", *more],
        cwd=HERE,
        capture_output=True,
        text=True,
    )
    return run.returncode, run.stdout, run.stderr


@pytest.mark.nightly
def test_a_divisor_of_one_rank_is_named():
    status, out, _ = on_two_ranks("own_tokens")
    assert (
        "token-mean is taken over 2 ranks with every 2nd row, and the results are averaged"
        in out
    ), out
    assert status == 1 and out.count("NOT dapo") == 1


STEP = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(48, 16), nn.Linear(16, 48))

    def forward(self, ids):
        return self.body(ids)

def step(model, rows, T=1.0):
    count = sum(sum(r.trains) for r in rows)
    for r in rows:
        p = len(r.prompt)
        ids = torch.tensor(r.ids)
        lp = (model(ids[None])[0, :-1] / T).log_softmax(-1)
        lp = lp.gather(-1, ids[1:, None])[p - 1 :, 0]
        ratio = (lp - torch.tensor(r.old)).exp()
        A = torch.tensor(r.adv)
        J = torch.minimum(ratio * A, ratio.clamp(0.8, 1.28) * A)
        (-(J * torch.tensor(r.trains).float()).sum() / count).backward()

def warm(model, rows):
    step(model, rows, 0.7)

def doubled(model, rows):
    step(model, rows, 0.7)
    for p in model.parameters():
        p.grad *= 2
"""


def test_a_loop_without_a_temperature_is_told_its_flags(tmp_path, capsys):
    """Find that the suggested flags make the loop agree, and that no other loop is told
    of them.
    """
    file = tmp_path / "loop.py"
    file.write_text(STEP)
    flags = "--temperature 1 --without temperature"
    command = ["step", f"{file}:step", "--as", "dapo"]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "the temperature is left out" in said and f"`{flags}`" in said
    assert "the difference of the two gradients has norm" in said
    assert main([*command, *flags.split()]) == 0
    assert "agrees" in capsys.readouterr().out
    assert main([*command, "--json"]) == 1
    json.loads(capsys.readouterr().out)
    for right, status in (("warm", 0), ("doubled", 1)):
        assert main(["step", f"{file}:{right}", "--as", "dapo"]) == status
        assert flags not in capsys.readouterr().out


@pytest.mark.nightly
def test_a_right_step_under_fsdp2_agrees():
    status, out, err = on_two_ranks("sharded")
    assert status == 0 and out.startswith("dapo: agrees"), out + err
    assert "several ranks" not in out


@pytest.mark.nightly
@pytest.mark.parametrize(
    "step, words",
    [
        ("not_reduced", "the ranks do not share one gradient"),
        (
            "one_fails",
            "rank 1 of 2: the step fails on these rows: ValueError: no data on this rank",
        ),
        ("flat_shards", "use FSDP2 or DDP"),
    ],
)
def test_what_is_wrong_on_one_rank_is_one_sentence(step, words):
    status, out, err = on_two_ranks(step)
    assert status and (out + err).count(words) == 1, out + err


@pytest.mark.nightly
def test_a_refusal_of_all_ranks_is_printed_once():
    status, _, err = on_two_ranks("sharded", "--model", "Nosuch")
    assert status and err.count("has no 'Nosuch'") == 1, err


def test_the_first_rank_that_refuses_says_why():
    store = dist.HashStore()
    assert Rank(1, store).is_first_to_refuse()
    assert not Rank(0, store).is_first_to_refuse()
    assert Rank().is_first_to_refuse()


def test_a_step_of_a_file_runs_without_ranks(capsys):
    found = main(
        ["step", f"{HERE}/loops.py:right", "--model", "qwen3", "--as", "dapo", "--json"]
    )
    assert found == 0 and '"dapo"' in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["nosuch"], "there is no step of 'nosuch'"),
        ([f"{HERE}/loops.py:right"], "--as NAME"),
        ([f"{HERE}/loops.py:right", "--as", "dapo", "--only", "x"], "--only"),
        (["trl", "--as", "dapo"], "a step of your own"),
        ([f"{HERE}/loops.py:right", "--as", "dapo"], "has no 'Model'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(capsys, words, sentence):
    assert main(["step", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("name", ["temperature", "model", "without"])
def test_an_argument_of_the_check_is_no_hyperparameter(tmp_path, capsys, name):
    file = tmp_path / "own.py"
    file.write_text(STEP)
    words = ["step", f"{file}:step", "--as", "dapo", "--model", "Model"]
    assert main([*words, "--hp", f"{name}=1"]) == 2
    sentence = f"--hp {name}: {name} is not a hyperparameter."
    assert sentence in capsys.readouterr().err


def test_a_plain_list_of_rows_is_refused_on_several_ranks(monkeypatch):
    """Each rank records what it was fed: the rest of the list is not left out, but on
    another rank.
    """
    monkeypatch.setattr("upref.step.check.world_size", lambda: 2)
    seen = Recorded(TorchModel(torch.nn.Embedding(8, 8)), [None])
    with pytest.raises(InputError, match="pass a list per step"):
        check_recorded(seen, [Row([1], [2], [True], 1.0)], "dapo", temperature=0.7)
