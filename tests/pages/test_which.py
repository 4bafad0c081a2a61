# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.which`: every module of upref has tests, and a reader finds them."""

import pytest

from tests import which


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("upref/kl.py", "tests/core/test_kl.py"),
        ("upref/plugins.py", "tests/core/test_plugins.py"),
        ("upref/verify/faults/losses.py", "tests/verify/test_fault_search.py"),
        ("upref/user_code/function.py", "tests/user_code/test_function.py"),
        ("upref/identification/identify.py", "tests/verify/test_identify.py"),
        ("upref_frameworks/commands.py", "tests/core/test_plugins.py"),
        ("upref_frameworks/slime/audit.py", "tests/frameworks/test_audit.py"),
    ],
)
def test_the_tests_of_a_module_are_told(file, test, capsys):
    assert which.main([file]) == 0
    assert test in capsys.readouterr().out


def test_a_module_that_no_test_imports_is_reached_through_another():
    found = which.tests_of("upref.identification.pitfalls")
    assert found.through == ("upref.identification.identify",)
    assert found.tests[0] == "tests/verify/test_identify.py"
    assert "through upref.identification.identify" in str(found)


def test_every_module_of_upref_has_tests():
    own = [m for m in which.modules_of_packages() if m.split(".")[0] == "upref"]
    without = [module for module in own if not which.tests_of(module).tests]
    assert len(own) > 200 and not without


@pytest.mark.parametrize("arguments", [[], ["upref/no_such_file.py"], ["README.md"]])
def test_another_file_is_refused_in_a_sentence(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        which.main(arguments)
    assert left.value.code == 2
    assert "upref" in capsys.readouterr().err
