# SPDX-License-Identifier: Apache-2.0
"""The recorded steps of a real run, of a pretrained language model (docs/lm.md): replay
finds nothing wrong with them, and names what is then done to them.
"""

import json
import re
from dataclasses import replace

import pytest
import torch

from docs import lm
from repro.mini.experiment.records import record
from repro.mini.train.recorder import FOLDER
from upref import registry
from upref.cli import main
from upref.replay import advantages, gap, loss, read_steps, replay
from upref.replay.lines import heading

STEPS = list(read_steps([lm.RUN / FOLDER]))
OBJECTIVE = lm.settings().target()
PAGE = (lm.ROOT / "docs" / "lm.md").read_text(encoding="utf-8")


def changed(b, **columns):
    """The step with other columns, for all tokens that train."""
    return replace(b, **{k: torch.where(b.mask, x, 0.0) for k, x in columns.items()})


def test_the_record_is_whole_and_small():
    files = [p for p in lm.RUN.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 300_000
    facts = record(lm.RUN)  # raises where a file is not what the run wrote
    assert facts["status"] == "done" and not facts["provenance"]["commit"]["dirty"]
    s = lm.settings()
    assert (s.base, s.task, s.objective) == ("smollm2", "addition", "up_dapo")
    number = -(-s.steps // s.record_every) * s.minibatches
    assert len(STEPS) == number and STEPS[0].step == 1


def test_every_check_runs_and_agrees():
    found = replay(STEPS, OBJECTIVE)
    assert found.status == 0
    for step in found.steps:
        assert not step.not_run
        assert not step.sampler.findings and not step.loss.failures
        assert step.advantages is not None and step.advantages
    # off policy: bounds of the objective were reached
    r = torch.cat([(b.now - b.old)[b.mask] for b in STEPS]).exp()
    A = torch.cat([b.adv[b.mask] for b in STEPS])
    assert ((A > 0) & (r > 1.28)).any() and ((A < 0) & (r < 0.8)).any()


def test_the_page_s_commands_print_what_it_shows(capsys, monkeypatch):
    monkeypatch.chdir(lm.ROOT)
    guide = (lm.ROOT / "docs/howto/replay.md").read_text(encoding="utf-8")
    (command,) = set(re.findall(r"upref (replay repro/lm/run/recorded .*)", PAGE))
    assert f"upref {command}\n" in guide
    assert main(command.split()) == 0
    assert capsys.readouterr().out.rstrip() in PAGE


def test_the_command_draws_a_sheet(tmp_path, monkeypatch):
    monkeypatch.chdir(lm.ROOT)
    guide = (lm.ROOT / "docs/howto/replay.md").read_text(encoding="utf-8")
    (command,) = set(re.findall(r"upref (replay repro/lm/run.*) -o sheet.html", guide))
    sheet = tmp_path / "sheet.html"
    assert main([*command.split(), "-o", str(sheet)]) == 0
    assert "<svg" in sheet.read_text(encoding="utf-8")


def test_another_objective_is_told_from_the_one_that_ran():
    """UP-DAPO's loss and DAPO's differ on these tokens, and so do their aggregations."""
    for name in ("dapo", "grpo", "reinforce"):
        assert not all(loss(b, name).found for b in STEPS), name


# ---- faults, on the tokens of a real run ---------------------------------------------
def floored(b):
    return changed(b, sampler=b.sampler.clamp(min=-1))


def divided(b):
    """Log-probabilities divided by a temperature in place of logits."""
    return changed(b, sampler=b.sampler / 0.7)


def negated(b):
    return changed(b, sampler=-b.sampler)


@pytest.mark.parametrize(
    ("fault", "cause"), [(floored, "floor"), (divided, "factor"), (negated, "sign")]
)
def test_a_fault_of_the_sampler_is_named(fault, cause):
    causes = {f.cause for b in STEPS for f in gap(fault(b)).failures}
    # log-probabilities above 0 are said where nearly all tokens are certain
    assert cause in causes and causes <= {cause, "positive"}


def test_advantages_over_groups_that_mix_prompts_are_named():
    """Two prompts in one group, as where a batch is normalized in halves."""
    b = STEPS[0]
    half = b.group.unique(return_inverse=True)[1] // 2
    mixed = torch.zeros_like(b.adv)
    for g in half.unique():
        rows = half == g
        R = b.reward[rows]
        mixed[rows] = ((R - R.mean()) / (R.std() + 1e-6))[:, None].expand_as(
            b.adv[rows]
        )
    causes = {f.cause for f in advantages(changed(b, adv=mixed)).findings}
    assert causes and causes <= {"wrong_grouping", "no_estimator"}


def test_a_loss_that_is_divided_by_responses_is_named():
    """The mean over responses in place of the mean of each group's token mean."""
    b = STEPS[0]
    o = OBJECTIVE.aggregated("seq-mean-token-mean")
    batch = b.rollouts()
    other = replace(
        b, logged=dict(b.logged) | {"loss": float(o.loss(batch))}, grad=None
    )
    found = loss(other, OBJECTIVE)
    assert found.found == "seq-mean-token-mean" and found.failures


def test_what_the_run_logged_is_in_its_files():
    """Compare each logged step's loss and reward with the means over its recorded
    minibatches.
    """
    lines = [
        json.loads(line) for line in (lm.RUN / "steps.jsonl").read_text().splitlines()
    ]
    s = lm.settings()
    assert len(lines) == s.steps
    for line in lines:
        mine = [b for b in STEPS if (b.step - 1) // s.minibatches == line["step"]]
        if line["step"] % s.record_every:
            assert not mine
            continue
        mean = sum(b.logged["loss"] for b in mine) / len(mine)
        assert mean == pytest.approx(line["loss"], rel=1e-6)
        rewards = torch.cat([b.reward for b in mine])
        assert rewards.mean().item() == pytest.approx(line["reward"])
        assert line["parity_of_bound"] < 1


def test_the_gradient_of_another_objective_fails_and_names_it():
    steps = [b for b in STEPS if b.step in (2, 3)]
    found = replay(steps, registry.get("dapo"))
    assert found.status == 1
    assert [f.cause for f in found.failures] == ["gradient_of_another"] * 2
    assert "of the terms of up_dapo " in found.failures[0].numbers["found"]
    assert "not that of dapo at eps_low=0.2, eps_high=0.28" in found.text()


def test_a_gradient_of_no_known_objective_does_not_fail_and_is_not_acquitted():
    (step,) = [b for b in STEPS if b.step == 2]
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(step.grad.shape, generator=generator) * step.grad.abs().max()
    found = replay([replace(step, grad=step.grad + noise)], registry.get("dapo"))
    assert found.status == 0
    head = heading(found)
    assert head.startswith("Nothing failed, but the recorded gradient is not dapo's")


def test_two_steps_must_have_the_gradient_of_the_same_objective():
    one, two = (b for b in STEPS if b.step in (2, 3))
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(two.grad.shape, generator=generator) * two.grad.abs().max()
    found = replay([one, replace(two, grad=two.grad + noise)], registry.get("dapo"))
    assert not found.failures


def test_a_trainer_with_a_ratio_of_1_is_not_accused_of_another_objective():
    """REINFORCE has this gradient, and so has each objective at r = 1."""
    (step,) = [b for b in STEPS if b.step == 2]
    at_one = -step.adv.expand(step.mask.shape) * step.mask / step.mask.sum()
    found = replay([replace(step, grad=at_one)], registry.get("dapo"))
    assert found.status == 0
    assert heading(found).startswith("Nothing failed, but")
