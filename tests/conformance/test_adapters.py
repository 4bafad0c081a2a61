# SPDX-License-Identifier: Apache-2.0
"""The adapters of TRL, verl and OpenRLHF: a sample of the suite by day, all of it with
its known failures nightly.

Those of torchtune and SkyRL run whole, where these are there.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.conformance.known_bugs import SKYRL_NEEDS, target
from tests.conformance.options import alter_openrlhf
from upref.conformance import CASES, Status, cases, load_adapter, run, run_ranks
from upref.conformance.results import read_expected_failures
from upref_frameworks.audits import framework
from upref_frameworks.audits.isolated.pin import place

HERE = Path(__file__).parent
FRAMEWORKS = [
    pytest.param("trl", marks=pytest.mark.trl),
    pytest.param("verl", marks=pytest.mark.verl),
    pytest.param("openrlhf"),
]
SAMPLE = ("objective/dapo", "micro/4/seq-mean", "generation/2/micro-2")


def _load(name, monkeypatch):
    """Load the adapter of an installed framework; OpenRLHF lies in the folder that its
    audit makes.
    """
    if name == "openrlhf":
        pytest.importorskip("peft", reason="OpenRLHF imports it")
        for path in place("openrlhf", framework("openrlhf").pin).paths:
            monkeypatch.syspath_prepend(path)
    else:
        pytest.importorskip(name)
    return load_adapter(target(name))


def _judge(adapter, chosen, expected, seed=0):
    """Return the cases whose end is not the expected one, with what they say."""
    wrong = {}
    for case in chosen:
        outcome = run(adapter, case, seed=seed, explain=False)
        fails = outcome.status in (Status.FAILED, Status.COULD_NOT_RUN)
        if fails != (case.id in expected):
            wrong[case.id] = str(outcome)
    return wrong


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_sample_agrees(name, monkeypatch):
    if name == "verl":
        pytest.importorskip(
            "pydantic", reason="`repro/venv.sh smoke` installs verl's trainer"
        )
    adapter = _load(name, monkeypatch)
    expected = read_expected_failures(HERE / f"{name}_xfails.toml")
    assert not _judge(adapter, [CASES[case] for case in SAMPLE], expected)


def test_torchtunes_recipe_agrees_on_all_that_it_has():
    """Where a checkout of torchtune is on PYTHONPATH: no wheel has the recipe."""
    pytest.importorskip(
        "torchtune.dev.grpo.loss", reason="it needs a checkout of torchtune"
    )
    adapter = load_adapter(f"{HERE}/torchtune_adapter.py:Torchtune")
    assert not _judge(adapter, cases(), expected={})


def _skyrl():
    """Return the adapter of SkyRL. Skip where it or what it imports is not on
    PYTHONPATH.
    """
    for name in SKYRL_NEEDS:
        pytest.importorskip(name, reason="docs/howto/conformance.md says how")
    return load_adapter(f"{HERE}/skyrl_adapter.py:SkyRL")


def test_skyrls_worker_agrees_but_for_its_known_failures():
    expected = read_expected_failures(HERE / "skyrl_xfails.toml")
    assert not _judge(_skyrl(), cases(), expected)


def test_skyrls_trainer_makes_its_own_rows():
    """Advantages of each prompt's group, old log-probabilities before the first update,
    and no token of a response that was cut off.
    """
    chosen = [CASES["prepare/old/updates-2"], CASES["prepare/old/cut-off"]]
    assert not _judge(_skyrl(), chosen, expected={})


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_skyrl_prepares_as_listed_for_three_seeds(seed):
    expected = read_expected_failures(HERE / "skyrl_xfails.toml")
    prepared = [case for case in CASES.values() if case.advantages]
    assert not _judge(_skyrl(), prepared, expected, seed)


@pytest.mark.nightly
def test_skyrls_references_fail_by_temperature_and_aggregation_alone(monkeypatch):
    """With the case's temperature, and an objective whose mean is the KL term's, the
    reference is as the case means it.
    """
    adapter = _skyrl()
    wrapper = adapter.train.__globals__["HFModelWrapper"]
    forward = wrapper.forward
    listed = [
        case
        for case in CASES.values()
        if case.advantages
        and case.id in read_expected_failures(HERE / "skyrl_xfails.toml")
    ]
    assert len(listed) == 5
    for case in listed:
        at_its_own = dict(temperature=case.temperature)
        monkeypatch.setattr(
            wrapper,
            "forward",
            lambda self, *args, own=at_its_own, **more: forward(
                self, *args, **own | more
            ),
        )
        assert not _judge(adapter, [replace(case, objective="grpo")], expected={})


@pytest.mark.nightly
def test_two_ranks_of_skyrl_have_the_gradient_of_one_process():
    """Ranks of FSDP that divide the rows, and of Ulysses that divide each sequence."""
    adapter = _skyrl()
    ids = [name for name in CASES if name.startswith(("ranks/dp2/", "ranks/sp2/"))]
    ends = {name: run_ranks(adapter, CASES[name], deadline=300).status for name in ids}
    assert ends == dict.fromkeys(ids, Status.PASSED)


def test_openrlhf_makes_its_own_rows(monkeypatch):
    """Its experience maker makes old log-probabilities and those of the model without
    adapters.
    """
    adapter = _load("openrlhf", monkeypatch)
    assert not _judge(adapter, [CASES["prepare/reference/adapter"]], expected={})


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_openrlhf_prepares_as_listed_for_three_seeds(seed, monkeypatch):
    adapter = _load("openrlhf", monkeypatch)
    expected = read_expected_failures(HERE / "openrlhf_xfails.toml")
    prepared = [case for case in CASES.values() if case.advantages]
    assert not _judge(adapter, prepared, expected, seed)


def test_a_second_epoch_of_openrlhf_is_noticed(monkeypatch):
    """Its driver recorded the steps of the first epoch alone, and the suite passed."""
    adapter = _load("openrlhf", monkeypatch)
    with alter_openrlhf(adapter, "", {"train.max_epochs": 2}):
        outcome = run(adapter, CASES["objective/ppo_clip"], explain=False)
    assert outcome.status is Status.COULD_NOT_RUN, outcome
    assert "made at least 2 steps, and the case has 1" in outcome.reason


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_each_case_ends_as_listed_for_three_seeds(name, seed, monkeypatch):
    """No false alarm on the release, and no known failure that passes."""
    adapter = _load(name, monkeypatch)
    expected = read_expected_failures(HERE / f"{name}_xfails.toml")
    assert not _judge(adapter, cases(), expected, seed)
