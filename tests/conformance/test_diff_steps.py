# SPDX-License-Identifier: Apache-2.0
"""`upref diff` of two adapters: the first quantity that differs, and no difference where
there is none.
"""

import json

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
from upref.conformance import CASES, diff
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
