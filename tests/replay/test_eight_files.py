# SPDX-License-Identifier: Apache-2.0
"""The report of an engineer whose reward fell at step 300: eight recorded steps, 250 to
320. The first three lines answer which check, which steps, and since when.
"""

import pytest
import torch

from tests.replay.simulator import (
    World,
    columns,
    make_policy,
    sample,
    score,
    shifted_weights as moved,
)
from upref.cli import main
from upref.replay import loss, make_batch, write

STEPS = range(250, 330, 10)
WORLD = World("llama", 61, responses=32, length=20)


@pytest.fixture(scope="module")
def policies():
    """Return the trainer's policy at each step: each is a small distance from the one
    before.
    """
    out = [make_policy(WORLD)]
    for step in STEPS[1:]:
        out.append(moved(out[-1], 0.02, step))
    return out


def in_order(policies, n):
    """The engine has the trainer's weights."""
    return policies[n]


def bad_at_two(policies, n):
    """At 300 and 310 the engine has the weights of 250."""
    return policies[0] if STEPS[n] in (300, 310) else policies[n]


def none_since_290(policies, n):
    """No update arrives after that of 280."""
    return policies[min(n, STEPS.index(280))]


def run_of(policies, engine, folder, change=None):
    """Write eight files of a run: each with its loss, as DAPO's."""
    folder.mkdir()
    for n, step in enumerate(STEPS):
        drawn = sample(WORLD, engine(policies, n), seed=step)
        made = columns(WORLD, drawn, score(policies[n], drawn.ids))
        made["now"] = made["old"] - 0.01 * made["mask"]  # a later optimizer step
        value = loss(make_batch(made, file="f"), "dapo", 1.0).value
        logged = {"loss": value}
        if change is not None:
            made, logged = change(step, made, logged)
        batch = make_batch(made, file="f", step=step, logged=logged)
        write(folder / f"step{step}.npz", batch)
    return folder


def negated_loss(step, made, logged):
    return made, ({"loss": -logged["loss"]} if step >= 300 else logged)


def negated_advantages(step, made, logged):
    """Return the step with the sign of its advantages changed, in the loss too, from
    step 300 on.
    """
    if step < 300:
        return made, logged
    made = made | {"adv": -made["adv"]}
    return made, {"loss": loss(make_batch(made, file="f"), "dapo", 1.0).value}


def next_prompt(step, made, logged):
    """Return step 300 with the advantages of the next prompt for each response; other
    steps as they are.
    """
    if step != 300:
        return made, logged
    A = made["adv"].sum(1) / made["mask"].sum(1)
    made = made | {"adv": A.roll(-WORLD.group)[:, None] * made["mask"]}
    return made, {"loss": loss(make_batch(made, file="f"), "dapo", 1.0).value}


def tool_trains(step, made, logged):
    """Return the step with an answer of a tool that trains, from step 300 on: the
    engine has no number for it.
    """
    if step < 300:
        return made, logged
    tool = torch.zeros_like(made["mask"])
    tool[::2, 6:9] = made["mask"][::2, 6:9]
    return made | {"sampler": made["sampler"].masked_fill(tool, torch.nan)}, logged


def own_number(step, made, logged):
    """At one step the logged loss is half."""
    return made, ({"loss": 0.5 * logged["loss"]} if step == 300 else logged)


def same(step, made, logged):
    return made, logged


@pytest.mark.parametrize(
    ("engine", "change", "status", "said"),
    [
        (in_order, same, 0, ["8 steps, 250 to 320. Nothing failed."]),
        (bad_at_two, same, 0, ["stands out at 2 of 8 steps: 300, 310", "sampler at 2"]),
        (none_since_290, same, 0, ["from step", "run"]),
        (in_order, negated_loss, 1, ["Failed: loss from step 300 on (3 of 8 steps)"]),
        (
            in_order,
            negated_advantages,
            1,
            ["Failed: advantages from step 300 on (3 of 8 steps)", "other sign"],
        ),
        (
            in_order,
            next_prompt,
            1,
            ["Failed: advantages at 1 of 8 steps: 300", "of the row 8"],
        ),
        (
            in_order,
            tool_trains,
            1,
            ["Failed: sampler from step 300 on (3 of 8 steps)", "no log-probability"],
        ),
        (in_order, own_number, 0, ["loss at 1 of 8 steps: 300"]),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_the_answer_is_in_the_first_three_lines(
    policies, tmp_path, capsys, engine, change, status, said
):
    folder = run_of(policies, engine, tmp_path / "run", change)
    found = main(["replay", str(folder), "--as", "dapo"])
    out = capsys.readouterr().out
    answer = " ".join(" ".join(out.splitlines()[:3]).split())
    assert found == status, out
    assert all(words in answer for words in said), out
