# SPDX-License-Identifier: Apache-2.0
"""The options of the trainers that have an adapter: each is sorted, and the case that
notices another value is the measured one.
"""

import dataclasses

import pytest

from tests.conformance.known_bugs import load
from tests.conformance.options import (
    MEASURED,
    TRAINERS,
    Option,
    measure,
    measure_together,
    option_names,
    options,
    read_list,
    reasons,
    results,
    set_path,
    unsorted,
)
from upref.conformance import CASES

MARKS = {"trl": pytest.mark.trl, "verl": pytest.mark.verl}
FRAMEWORKS = [pytest.param(name, marks=MARKS.get(name, ())) for name in MEASURED]
NEEDS = {
    "trl": ("trl",),
    "verl": ("verl", "pydantic"),
    "openrlhf": ("peft",),
    "skyrl": ("skyrl.train", "skyrl_gym", "cloudpathlib", "ray", "peft"),
}


def _load(name):
    for module in NEEDS[name]:
        pytest.importorskip(module)
    return load(name)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_field_of_the_configuration_is_sorted(name):
    """A release that brings an option, or drops one, fails here."""
    _load(name)
    trainer = TRAINERS[name]
    assert set(read_list(name)) == set(trainer.sections)
    for section in trainer.sections:
        new, gone = unsorted(name, section, trainer.fields(section))
        assert not new, f"{section} has fields that nobody has sorted"
        assert not gone, f"{section} has no such fields any more"


@pytest.mark.trl
def test_a_new_field_is_found():
    trl = pytest.importorskip("trl")

    @dataclasses.dataclass
    class Newer(trl.GRPOConfig):
        loss_exponent: float = 1.0

    assert unsorted("trl", "GRPOConfig", option_names(Newer)) == (
        {"loss_exponent"},
        set(),
    )


@pytest.mark.parametrize("name", MEASURED)
def test_an_option_is_in_one_list(name):
    for section, those in reasons(name).items():
        changing = {one.name for one in options(name) if one.section == section}
        assert not changing & set(those), section
        lists = read_list(name)[section].get("keeps", {}).values()
        assert sum(map(len, lists)) == len(those), section


@pytest.mark.parametrize("name", MEASURED)
def test_the_results_are_of_the_list(name):
    measured = results(name)["options"]
    assert [*measured] == [option.key for option in options(name)]
    for option in options(name):
        assert [one["to"] for one in measured[option.key]] == option.to, option.key
        assert option.case in CASES


@pytest.mark.parametrize("name", MEASURED)
def test_an_option_has_a_reason_where_no_case_notices_it(name):
    """The lists may only shrink: what a case notices needs no reason."""
    measured = results(name)["options"]
    for option in options(name):
        ends = measured[option.key]
        unseen = [one for one in ends if not one["case"]]
        if option.why:
            unmeasured = all("said" in one for one in ends)
            assert unseen or unmeasured, f"{option.key} is noticed: it needs no reason"
        else:
            assert not unseen, option.key


ONE_BY_DAY = {
    "trl": ("GRPOConfig.epsilon", 0.1),
    "verl": ("ActorConfig.clip_ratio_high", 0.1),
    "openrlhf": ("train_ppo_ray.{prefix}.max_norm", 0.25),
    "skyrl": ("SkyRLTrainConfig.trainer.algorithm.eps_clip_low", 0.1),
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_case_notices_an_option_of_each_framework(name):
    adapter = _load(name)
    key, value = ONE_BY_DAY[name]
    option = next(one for one in options(name) if one.key == key)
    assert measure(name, adapter, option, value)["case"] == option.case


@pytest.mark.trl
def test_the_adapters_own_value_is_not_noticed(monkeypatch):
    """An alteration that changes nothing fails no case: the measurement has no effect
    of its own.
    """
    adapter = _load("trl")
    few = [CASES["objective/ppo_clip"], CASES["temperature/1.5"]]
    monkeypatch.setattr("tests.conformance.options.cases", lambda: few)
    same = Option("GRPOConfig", "epsilon", [0.2])
    found = measure("trl", adapter, same, 0.2)
    assert (found["passed"], found["case"]) == (2, None)


@pytest.mark.trl
def test_options_that_are_altered_together_are_told_apart(monkeypatch):
    """Where a case notices one of several, they are halved."""
    adapter = _load("trl")
    few = [CASES["objective/ppo_clip"]]
    monkeypatch.setattr("tests.conformance.options.cases", lambda: few)
    loud = Option("GRPOConfig", "epsilon", [0.1])
    quiet = Option("GRPOConfig", "entropy_target", [10.0])
    found = measure_together("trl", adapter, [loud, quiet])
    assert found[loud.key][0]["case"] == "objective/ppo_clip"
    assert found[quiet.key][0]["case"] is None


def test_a_path_leads_into_nested_arguments():
    given = {"policy_loss": {"loss_mode": "gspo"}, "clip": 1}
    assert set_path(given, "policy_loss.ratio", 2) == {
        "policy_loss": {"loss_mode": "gspo", "ratio": 2},
        "clip": 1,
    }
    assert given["policy_loss"] == {"loss_mode": "gspo"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_option_ends_as_recorded(name):
    """Measure an adapter's options, those without effect together, and find the
    recorded cases.
    """
    adapter = _load(name)
    measured = results(name)["options"]
    quiet = [option for option in options(name) if option.why]
    found = measure_together(name, adapter, quiet)
    for option in options(name):
        if not option.why:
            found[option.key] = [
                measure(name, adapter, option, value) for value in option.to
            ]

    def cases_of(results_by_option):
        """Return the case that notices each value, by option."""
        found_cases = {}
        for key, each in results_by_option.items():
            found_cases[key] = [one["case"] for one in each]
        return found_cases

    assert cases_of(found) == cases_of(measured)
