# SPDX-License-Identifier: Apache-2.0
"""Adapters of trainers with a bug planted in them that many cases find: how long a red
run takes.

    pytest --pyargs upref.conformance --adapter tests/conformance/broken_adapters.py:BrokenTRL
"""

from tests.conformance.known_bugs import Bug, bugs, load, planted

SKYRL = Bug(
    framework="skyrl",
    source="planted",
    what="tokens that do not train are counted and trained",
    function="skyrl.backends.skyrl_train.utils.ppo_utils:reduce_loss",
    case="objective/ppo_clip",
    old="(loss * loss_mask).sum()",
    new="loss.sum()",
)


def recorded(framework: str, source: str) -> Bug:
    """Return the record of a bug in a framework, by the source that the record names."""
    return next(bug for bug in bugs(framework) if bug.source == source)


class Broken:
    """The adapter of a trainer, with a bug in it until the process ends."""

    bug: Bug

    def __init__(self):
        self.own = load(self.bug.framework)
        self.planting = planted(self.bug)
        self.planting.__enter__()
        self.name = f"{self.own.name} with a bug"

    def supports(self, case):
        return self.own.supports(case)

    def scale(self, case):
        return self.own.scale(case)

    def settings(self, case):
        return self.own.settings(case)

    def step(self, model, rows, case):
        return self.own.step(model, rows, case)


class BrokenTRL(Broken):
    bug = recorded("trl", "huggingface/trl#2708")


class BrokenVerl(Broken):
    bug = recorded("verl", "modelscope/ms-swift#8427")


class BrokenOpenRLHF(Broken):
    bug = recorded("openrlhf", "OpenRLHF/OpenRLHF#857")


class BrokenSkyRL(Broken):
    bug = SKYRL
