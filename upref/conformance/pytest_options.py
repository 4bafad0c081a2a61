# SPDX-License-Identifier: Apache-2.0
"""Options of `pytest --pyargs upref.conformance`, and the fixtures of its one test."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from upref.conformance.adapter import Adapter, load_adapter
from upref.conformance.cases import SINGLE, SUITES, Case, cases
from upref.conformance.ranks import run_ranks
from upref.conformance.results import read_expected_failures, write_results
from upref.conformance.runner import Outcome, Status, run
from upref.errors import InputError
from upref.user_code.guard import one_thread

# failures whose cause is searched: a red build must not take longer than a green one
EXPLAINED = 3


class CouldNotRunError(Exception):
    """The adapter or the framework raised an error, so that no gradient was compared."""


def pytest_addoption(parser: pytest.Parser) -> None:
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
        "--upref-seed", type=int, default=0, help="seed of the rows (default 0)"
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        if not config.getoption("--adapter"):
            raise InputError("name an adapter: --adapter FILE.py:CLASS.")
        config.stash[ADAPTER] = load_adapter(config.getoption("--adapter"))
        config.stash[CASES_TO_RUN] = cases(
            config.getoption("--level"), config.getoption("--suite")
        )
        listed = config.getoption("--upref-xfails")
        config.stash[EXPECTED_FAILURES] = (
            read_expected_failures(Path(listed)) if listed else {}
        )
    except InputError as error:
        raise pytest.UsageError(f"upref.conformance: {error}") from error
    config.stash[OUTCOMES] = []


ADAPTER: pytest.StashKey[Adapter] = pytest.StashKey()
CASES_TO_RUN: pytest.StashKey[list[Case]] = pytest.StashKey()
EXPECTED_FAILURES: pytest.StashKey[dict[str, str]] = pytest.StashKey()
OUTCOMES: pytest.StashKey[list[Outcome]] = pytest.StashKey()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        to_run: list[Case] = metafunc.config.stash[CASES_TO_RUN]
        metafunc.parametrize("case", to_run, ids=str)


@pytest.fixture
def expected_failure(case: Case, request: pytest.FixtureRequest) -> str:
    """The reason of a known failure, or ""."""
    return request.config.stash[EXPECTED_FAILURES].get(case.id, "")


@pytest.fixture
def outcome(
    case: Case, expected_failure: str, request: pytest.FixtureRequest
) -> Outcome:
    """The outcome of the case. What could not run is an error of the test's setup:
    neither a pass nor a failure.
    """
    outcomes = request.config.stash[OUTCOMES]
    failed = sum(each.status is Status.FAILED for each in outcomes)
    explain = failed < EXPLAINED and not expected_failure
    run_case = run_ranks if case.ranks > 1 else run
    found = run_case(
        request.config.stash[ADAPTER],
        case,
        seed=request.config.getoption("--upref-seed"),
        explain=explain,
    )
    outcomes.append(found)
    if found.status is Status.COULD_NOT_RUN and not expected_failure:
        raise CouldNotRunError(str(found))
    return found


@pytest.fixture(scope="session", autouse=True)
def in_one_thread() -> Iterator[None]:
    """Run all cases in one thread of torch: their models are tiny."""
    with one_thread():
        yield


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--upref-results")
    outcomes = session.config.stash.get(OUTCOMES, [])
    if path and outcomes:
        options: Any = session.config.getoption
        name = session.config.stash[ADAPTER].name
        write_results(
            Path(path), name, options("--suite"), options("--level"), outcomes
        )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    outcomes = config.stash.get(OUTCOMES, [])
    if not outcomes:
        return
    counts = {
        status: sum(outcome.status is status for outcome in outcomes)
        for status in Status
    }
    words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    terminalreporter.write_line(
        f"upref {config.getoption('--suite')}: {config.stash[ADAPTER].name}: {words}"
    )
