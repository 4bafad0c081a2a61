# SPDX-License-Identifier: Apache-2.0
"""Options of `pytest --pyargs upref.conformance`, and the fixtures of its one test."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from upref.conformance.adapter import Adapter, load_adapter
from upref.conformance.cases import SINGLE, SUITES, Case, cases
from upref.conformance.ranks import DEADLINE, run_ranks
from upref.conformance.results import read_expected_failures, write_results
from upref.conformance.runner import Outcome, Status, run
from upref.errors import InputError
from upref.step.check import NOT_SEARCHED
from upref.user_code.guard import one_thread
from upref.verify.report import counted

# unexpected failures of a run whose cause is searched: a search may take longer than
# its case
EXPLAINED = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite to pytest."""
    group = parser.getgroup("upref.conformance")
    group.addoption(
        "--adapter",
        metavar="FILE:CLASS",
        help="the adapter: FILE.py:CLASS or package.module:CLASS",
    )
    group.addoption(
        "--upref-xfails",
        metavar="FILE",
        help="a TOML file with the known failures and their reasons",
    )
    group.addoption(
        "--level",
        type=int,
        default=SINGLE,
        help=f"the highest level to run (default {SINGLE})",
    )
    group.addoption(
        "--suite", default=SUITES[-1], help=f"the dated suite (default {SUITES[-1]})"
    )
    group.addoption(
        "--upref-results",
        metavar="FILE",
        help="write the result of each case to this JSON file",
    )
    group.addoption(
        "--upref-deadline",
        type=float,
        default=DEADLINE,
        metavar="SECONDS",
        help=f"after which a case of several ranks is ended (default {DEADLINE:g})",
    )
    group.addoption(
        "--upref-seed", type=int, default=0, help="seed of the rows (default 0)"
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Read the options into the stash of the configuration; pytest.UsageError where one
    is missing or wrong. `--help` starts no session, so it needs no adapter, and neither
    does `--collect-only`.
    """
    config = session.config
    target = config.getoption("--adapter")
    try:
        if target:
            config.stash[ADAPTER] = load_adapter(target)
        elif not config.getoption("--collect-only"):
            raise InputError("name an adapter: --adapter FILE.py:CLASS.")
        config.stash[CASES_TO_RUN] = cases(
            config.getoption("--level"), config.getoption("--suite")
        )
        file_of_failures = config.getoption("--upref-xfails")
        config.stash[EXPECTED_FAILURES] = (
            read_expected_failures(Path(file_of_failures)) if file_of_failures else {}
        )
    except InputError as error:
        raise pytest.UsageError(f"upref.conformance: {error}") from error
    config.stash[OUTCOMES] = []


ADAPTER: pytest.StashKey[Adapter] = pytest.StashKey()
CASES_TO_RUN: pytest.StashKey[list[Case]] = pytest.StashKey()
EXPECTED_FAILURES: pytest.StashKey[dict[str, str]] = pytest.StashKey()
OUTCOMES: pytest.StashKey[list[Outcome]] = pytest.StashKey()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `case` once for each case of the suite and level."""
    if "case" in metafunc.fixturenames:
        to_run: list[Case] = metafunc.config.stash[CASES_TO_RUN]
        metafunc.parametrize("case", to_run, ids=str)


@pytest.fixture
def expected_failure(case: Case, request: pytest.FixtureRequest) -> str:
    """Return the reason of the case in the list of known failures; "" where it has
    none.
    """
    return request.config.stash[EXPECTED_FAILURES].get(case.id, "")


@pytest.fixture
def outcome(
    case: Case, expected_failure: str, request: pytest.FixtureRequest
) -> Outcome:
    """Run the case and return its outcome. A case that could not run is an error of the
    test's setup, neither a pass nor a failure, unless it is a known failure. The cause
    is searched for the first EXPLAINED unexpected failures of a run.
    """
    config = request.config
    outcomes = config.stash[OUTCOMES]
    expected_failures = config.stash[EXPECTED_FAILURES]
    unexpected = 0
    for earlier in outcomes:
        if earlier.status is Status.FAILED and earlier.case.id not in expected_failures:
            unexpected += 1
    explain = unexpected < EXPLAINED and not expected_failure
    options: dict[str, Any] = {
        "seed": config.getoption("--upref-seed"),
        "explain": explain,
    }
    run_case = run
    if case.ranks > 1:
        run_case = run_ranks
        options["deadline"] = config.getoption("--upref-deadline")
    result = run_case(config.stash[ADAPTER], case, **options)
    outcomes.append(result)
    if result.status is Status.COULD_NOT_RUN and not expected_failure:
        pytest.fail(str(result), pytrace=False)
    return result


@pytest.fixture
def failure(outcome: Outcome, request: pytest.FixtureRequest) -> str:
    """Return what a failed test prints: the outcome, and where the cause was not
    searched the command that searches it.
    """
    text = outcome.text(verbose=_is_verbose(request.config))
    if outcome.reason != NOT_SEARCHED:
        return text
    command = _command(request.config, outcome.case)
    words = f"{NOT_SEARCHED}; this command searches it:\n    {command}"
    return text.replace(NOT_SEARCHED, words, 1)


def _is_verbose(config: pytest.Config) -> bool:
    """Tell whether the command line has `-v`. Beside `-q`, pytest's verbosity is 0."""
    arguments = map(str, config.invocation_params.args)
    return config.get_verbosity() > 0 or any(arg.startswith("-v") for arg in arguments)


def _command(config: pytest.Config, case: Case) -> str:
    """Return the command that runs the case alone."""
    words = ["python", "-m", "pytest", "--pyargs", "upref.conformance"]
    words += ["--adapter", config.getoption("--adapter")]
    if case.level > SINGLE:
        words += ["--level", str(case.level)]
    if seed := config.getoption("--upref-seed"):
        words += ["--upref-seed", str(seed)]
    return shlex.join([*words, "-k", case.id])


@pytest.fixture(scope="session", autouse=True)
def in_one_thread() -> Iterator[None]:
    """Run all cases in one thread of torch: their models are tiny."""
    with one_thread():
        yield


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the results file, where one is asked for."""
    path = session.config.getoption("--upref-results")
    outcomes = session.config.stash.get(OUTCOMES, [])
    if path and outcomes:
        options: Any = session.config.getoption
        name = session.config.stash[ADAPTER].name
        write_results(
            Path(path), name, options("--suite"), options("--level"), outcomes
        )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print one line about all cases."""
    outcomes = config.stash.get(OUTCOMES, [])
    if not outcomes:
        return
    expected_failures = config.stash[EXPECTED_FAILURES]
    terminalreporter.write_line(
        f"upref {config.getoption('--suite')}: {config.stash[ADAPTER].name}: {_summary(outcomes, expected_failures)}"
    )


def _summary(outcomes: Sequence[Outcome], expected_failures: Mapping[str, str]) -> str:
    """Return how many cases ended in each way, in words. Known failures that did not
    pass are counted apart, as expected ones, and so are those that passed.
    """
    known = []
    others = []
    for outcome in outcomes:
        is_known = outcome.case.id in expected_failures
        if is_known and outcome.status is not Status.SKIPPED:
            known.append(outcome.status)
        else:
            others.append(outcome.status)
    words = []
    for status in Status:
        if status in others:
            words.append(f"{others.count(status)} {status}")
    passes = known.count(Status.PASSED)
    if len(known) > passes:
        words.append(counted(len(known) - passes, "expected failure"))
    if passes:
        words.append(f"{passes} passed that the list of known failures has")
    return ", ".join(words)
