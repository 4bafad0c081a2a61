# SPDX-License-Identifier: Apache-2.0
"""`upref diff` of two adapters: the first quantity that differs, and no difference where
there is none.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

pytest.importorskip(
    "transformers",
    reason="the suite's models are made by transformers: repro/venv.sh trl",
)

from tests.conformance.engine_adapters import SOURCE, Plain
from tests.conformance.known_bugs import SKYRL_NEEDS, bugs, load, planted
from tests.conformance.test_preparation import Loop, MasksEnd, MixedGroups, SamplerIsOld
from tests.support.daily import daily
from upref.cli import main
from upref.conformance import CASES, Status, diff, run
from upref.conformance.closing import find_closing
from upref.conformance.diff import chosen_cases, diff_steps
from upref.conformance.runner import make_model, make_rows
from upref.errors import InputError

CHANGES = {
    "both_sides": (
        "torch.minimum(ratio * adv, ratio.clamp(1 - low, 1 + high) * adv)",
        "ratio.clamp(1 - low, 1 + high) * adv",
    ),
    "hot": (" / temperature", ""),
    "ends": (".bool()", ".bool() & (pad([row.response for row in rows]) != 2)"),
    "tools": (
        "pad([row.trains for row in rows]).bool()",
        "pad([[1] * len(row.trains) for row in rows]).bool()",
    ),
    "means": ("sum() / tokens", "sum() / mask.sum() / case.micro_batches"),
    "twice": ("sum() / tokens", "sum() / tokens / case.micro_batches"),
    "no_kl": ("if case.beta:", "if False:"),
    "no_clip": ("if case.clip:", "if False:"),
}
FIRST = [
    ("both_sides", "objective/ppo_clip", "mask, or weight of a token"),
    ("hot", "objective/ppo_clip", "log-probabilities"),
    ("ends", "objective/ppo_clip", "mask, or weight of a token"),
    ("tools", "objective/ppo_clip", "mask: "),
    ("means", "micro/4/token-mean", "divisor of a response"),
    ("twice", "micro/4/token-mean", "divisor"),
    ("no_kl", "kl/token-mean", "mask, or weight of a token, KL term included"),
    ("no_clip", "clip/norm", "clip of the gradient's norm"),
]


def _changed(change):
    """Return the plain adapter with one of CHANGES made in its source."""
    old, new = CHANGES[change]
    assert old in SOURCE
    namespace = {}
    exec(SOURCE.replace(old, new), namespace)
    return namespace["Plain"]()


@pytest.mark.parametrize(("change", "case", "quantity"), daily(FIRST, 3))
def test_the_first_quantity_that_differs_is_named(change, case, quantity):
    found = diff_steps(Plain(), _changed(change), [CASES[case]])
    assert not found
    (one,) = found.differing
    assert one.quantity.startswith(quantity), str(found)
    assert one.a != one.b
    assert one.causes[0] == "agrees with the objective"
    assert json.loads(found.json())["same"] is False


def test_one_trainer_does_not_differ_from_itself():
    chosen = chosen_cases(["micro/4", "kl/token", "generation/2/token"])
    found = diff_steps(Plain(), Plain(), chosen)
    assert found, str(found)
    assert len(found.compared) == len(chosen) - 1  # the loop has no gspo


@pytest.mark.parametrize(
    ("kind", "case", "quantity"),
    [
        (MixedGroups, "advantages/group-mean", "advantage or divisor of a response"),
        (MasksEnd, "mask/every-token-trains", "mask: "),
    ],
)
def test_what_a_trainer_makes_of_rewards_is_named(kind, case, quantity):
    found = diff_steps(Loop(), kind(), [CASES[f"prepare/{case}"]])
    (one,) = found.differing
    assert one.quantity.startswith(quantity), str(found)


@pytest.mark.nightly
def test_old_log_probabilities_of_the_sampler_are_named():
    """The question of a public thread, as docs/howto/diff.md answers it."""
    case = CASES["prepare/old/iterations-2/token-mean"]
    found = diff_steps(Loop(), SamplerIsOld(), [case])
    (one,) = found.differing
    assert one.quantity == "the step"
    assert one.causes == (
        "agrees with the objective",
        "old log-probabilities: the sampler's own",
    )


class Adjustable(Plain):
    """The loop, of which a case's fields are the settings."""

    changed: Mapping[str, float] = {}
    tries: tuple[dict[str, float], ...] = (dict(temperature=1.0), dict(beta=0.1))

    def settings(self, case):
        said = super().settings(case)
        return said | {key: repr(value) for key, value in self.changed.items()}

    def alternatives(self, case):
        return [*self.tries]

    def with_settings(self, changed):
        other = copy.copy(self)
        other.changed = {**self.changed, **changed}
        return other

    def step(self, model, rows, case):
        super().step(model, rows, replace(case, **self.changed))


def test_the_setting_that_closes_a_difference_is_run_before_it_is_named(monkeypatch):
    monkeypatch.setattr(
        diff, "run", lambda *a, seed, explain=True: run(*a, seed=seed, explain=False)
    )
    found = diff_steps(Adjustable(), _changed("hot"), [CASES["objective/ppo_clip"]])
    (one,) = found.differing
    # the other loop cannot change its settings
    assert [(c.settings, c.runs) for c in one.closings] == [({"temperature": "1.0"}, 1)]
    words = "closed by temperature=1.0 of plain loop 1.0 (1), as run: nothing differs"
    assert words in str(found)
    assert json.loads(found.json())["compared"][0]["closings"][0]["runs"] == 1


def _closing(names, other_settings, is_closed):
    case = CASES["objective/ppo_clip"]
    return find_closing(Adjustable(), case, names, other_settings, is_closed)


def test_no_setting_that_closes_nothing_is_named():
    found = _closing(("a 1", "b 1"), {}, lambda _: False)
    assert found.text() == "closed by none of the 2 settings of a 1 that were run"
    # a setting that cannot run is not counted
    found = _closing(
        ("a 1", "b 1"), {}, lambda a: None if "beta" in a.changed else False
    )
    assert found.runs == 1
    assert find_closing(Plain(), None, ("a 1", "b 1"), {}, None) is None


def test_the_settings_of_another_adapter_of_a_trainer_are_tried():
    """Find that the settings are tried between two adapters of one trainer alone; else
    only those of the second.
    """
    settings = {"eps_low": "0.2", "temperature": "1.5", "clip": "0.5", "f": "<f>"}
    tried = []
    for names in (("a 1", "a 2"), ("a 1", "b 1")):
        found = _closing(names, settings, lambda a: tried.append(a.changed))
        assert (found.settings, found.runs) == ({}, 0)
        tried.append("next")
    own = [dict(temperature=1.0), dict(beta=0.1)]
    assert tried == [
        *(dict(temperature=1.5), dict(clip=0.5), dict(temperature=1.5, clip=0.5), *own),
        "next",
        # a setting that only another trainer has is none of this one
        *(dict(temperature=1.5), *own),
        "next",
    ]


@pytest.mark.trl
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "closing"),
    [
        ("generation/2/token-mean", {"loss_type": "'bnpo'"}),
        (
            "generation/2/micro-2",
            {
                "per_device_train_batch_size": "4",
                "gradient_accumulation_steps": "1",
                "steps_per_generation": "2",
                "loss_type": "'bnpo'",
            },
        ),
    ],
)
def test_a_setting_of_trl_closes_a_difference(case, closing):
    pytest.importorskip("trl", reason="docs/howto/conformance.md says how")
    (one,) = diff_steps(load("trl"), Plain(), [CASES[case]]).differing
    assert [found.settings for found in one.closings] == [closing]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["trl", "verl", "openrlhf", "skyrl"])
@pytest.mark.parametrize("case", ["kl/micro-4", "prepare/advantages/group-mean"])
def test_each_setting_that_an_adapter_names_can_run(name, case):
    needed = {"verl": ("pydantic", "peft"), "openrlhf": ("peft",), "skyrl": SKYRL_NEEDS}
    for package in needed.get(name, (name,)):
        pytest.importorskip(package, reason="docs/howto/conformance.md says how")
    adapter = load(name)
    for changed in adapter.alternatives(CASES[case]):
        other = adapter.with_settings(changed)
        said = other.settings(CASES[case])
        assert all(said[key] == repr(value) for key, value in changed.items())
        end = run(other, CASES[case], explain=False)
        assert end.status in (Status.PASSED, Status.FAILED), (changed, end.reason)


def test_a_documented_factor_is_no_difference():
    class Scaled(Plain):
        def scale(self, case):
            return 0.5

        def loss(self, *arguments):
            return 0.5 * super().loss(*arguments)

    assert diff_steps(Plain(), Scaled(), [CASES["objective/ppo_clip"]])


def test_a_case_that_one_trainer_lacks_is_left_out():
    found = diff_steps(Plain(), Plain(), [CASES["objective/cispo"]])
    assert not found
    assert found.left_out == {
        "objective/cispo": "plain loop 1.0 (1): the loop has no cispo"
    }
    assert "no case was compared" in str(found)


def test_an_unknown_case_gets_one_sentence():
    with pytest.raises(
        InputError, match="no case of one process begins with 'micro/3'"
    ):
        chosen_cases(["micro/3"])


def test_the_command_takes_two_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "b.py").write_text(SOURCE.replace(" / temperature", ""))
    words = ["diff", "--steps", "a.py:Plain", "b.py:Plain", "--case", "objective/ppo"]
    assert main(words) == 1
    assert "DIFF  objective/ppo_clip: log-probabilities" in capsys.readouterr().out


def test_two_adapters_without_the_option_get_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(SOURCE)
    assert main(["diff", "a.py:Plain", "ppo_clip"]) == 2
    assert "`upref diff --steps a.py:Plain ppo_clip`" in capsys.readouterr().err


PLANTED = [
    ("trl", "huggingface/trl#3029", "objective/ppo_clip", "log-probabilities"),
    ("trl", "huggingface/trl#4975", "objective/ppo_clip", "mask: "),
    ("trl", "modelscope/ms-swift#10117", "micro/2/token-mean", "divisor"),
    ("trl", "StarsfieldAI/R1-V#67", "prepare/advantages/group-mean", "advantage"),
    ("verl", "verl-project/verl#3133", "objective/ppo_clip", "log-probabilities"),
    ("verl", "modelscope/ms-swift#8427", "objective/ppo_clip", "mask: "),
    ("verl", "verl-project/verl#5625", "micro/2/token-mean", "divisor"),
    ("verl", "areal-project/AReaL#1419", "prepare/advantages/group-mean", "advantage"),
    ("openrlhf", "OpenRLHF/OpenRLHF#857", "objective/ppo_clip", "log-probabilities"),
    ("openrlhf", "OpenRLHF/OpenRLHF#1249", "micro/2/token-mean", "divisor"),
    ("openrlhf", "OpenRLHF/OpenRLHF@de254567", "mask/end-inside", "mask"),
    ("openrlhf", "verl-project/verl#2185", "prepare/advantages/group-mean", "advan"),
    ("skyrl", "verl-project/verl#3133", "objective/ppo_clip", "log-probabilities"),
    ("skyrl", "huggingface/trl#4975", "objective/ppo_clip", "mask: "),
    ("skyrl", "NovaSky-AI/SkyRL#1353", "kl/seq-mean", "mask, or weight of a token, KL"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "source", "case", "quantity"), PLANTED)
def test_a_difference_that_is_planted_in_a_release_is_found(
    name, source, case, quantity
):
    """The release is compared with itself with a known bug in it; the release itself
    agrees with the objective.
    """
    needed = {"verl": ("pydantic",), "openrlhf": ("peft",), "skyrl": SKYRL_NEEDS}
    for package in needed.get(name, (name,)):
        pytest.importorskip(package, reason="docs/howto/conformance.md says how")
    (bug,) = [one for one in bugs(name) if (one.source, one.case) == (source, case)]
    release = load(name)

    class Changed(type(release)):
        def step(self, *arguments):
            with planted(bug):
                return super().step(*arguments)

        def train(self, *arguments):
            with planted(bug):
                return super().train(*arguments)

    found = diff_steps(release, Changed(), [CASES[case]])
    (one,) = found.differing
    assert one.quantity.startswith(quantity), str(found)
    assert one.causes[0] == "agrees with the objective"


def test_a_response_that_trains_in_neither_has_no_factor():
    """What is read of it is rounding, and its quotient is no divisor."""
    case = CASES["micro/2/token-mean"]
    rows = make_rows(case, make_model(case), 0)[:2]
    ours = [torch.ones(len(row.prompt) - 1 + len(row.trains)) for row in rows]
    for weights, row in zip(ours, rows, strict=True):
        masked = [False] * (len(row.prompt) - 1) + row.trains
        weights[~torch.tensor(masked)] = 0
    rounding = 1e-9 * torch.rand(len(ours[1]), generator=torch.Generator())
    ours[1] = rounding
    theirs = [ours[0] / 2, rounding.flip(0)]
    quantity, a, b = diff._compare_weights(case, rows, ours, theirs)
    assert (quantity, a, b) == ("divisor", "2 times the other's", "1")


def test_two_steps_in_which_no_token_trains_have_no_factor():
    """As where each has a gradient of 0, of other parameters."""
    case = CASES["micro/2/token-mean"]
    rows = make_rows(case, make_model(case), 0)[:2]
    zero = [torch.zeros(len(row.prompt) - 1 + len(row.trains)) for row in rows]
    assert diff._compare_weights(case, rows, zero, zero) is None
