# SPDX-License-Identifier: Apache-2.0
"""What all user-supplied functions share: loading, refusing, comparing their inputs, and
trying one way after another.
"""

from math import nan

import numpy as np
import pytest
import torch

import upref
from upref.errors import InputError
from upref.user_code import kl, logprobs
from upref.user_code.function import Snapshot, UserFunction, first_that_runs


def test_the_inputs_that_a_call_writes_to_are_told():
    inputs = {
        "kept": torch.tensor([1.0, nan]),
        "tensor": torch.tensor([1.0, nan]),
        "to nan": torch.zeros(2),
        "array": np.array(["a", "b"], dtype=object),
        "list": [1, 2],
        "number": 3,
    }

    def write():
        """Change all but the first and the last."""
        inputs["tensor"][0] = 2
        inputs["to nan"][0] = nan
        inputs["array"][1] = "c"
        inputs["list"].append(3)
        return "done"

    called = UserFunction("write", write).watched(write, inputs, {})
    assert called.returned == "done"
    assert called.wrote == {"tensor", "to nan", "array", "list"}


def test_nothing_is_changed_by_itself():
    assert not Snapshot({"x": torch.tensor([nan]), "ids": [1]}).changed()


class Estimator:
    """A class, which is no function."""


@pytest.mark.parametrize(
    ("check", "kind"),
    [
        (lambda f: upref.check_kl(f, "k3"), "a KL estimator"),
        (upref.check_logprobs, "a log-probability function"),
        (
            lambda f: upref.check_advantages(f, "group_norm"),
            "an advantage function",
        ),
    ],
)
def test_a_class_and_a_number_are_refused_in_one_way(check, kind):
    with pytest.raises(InputError, match=f"Estimator is a class, not {kind}: pass a"):
        check(Estimator)
    with pytest.raises(InputError, match=f"an int is not {kind}: pass a function"):
        check(3)


def test_an_argument_that_nothing_fills_is_refused_in_one_way():
    def estimator(log_prob, ref_log_prob, alpha):
        """It needs a number that nobody gives."""

    with pytest.raises(InputError, match="estimator needs 'alpha', which upref cannot"):
        kl.read(estimator)
    with pytest.raises(InputError, match="needs 'alpha', which upref cannot"):
        logprobs.read(lambda logits, tokens, temperature, alpha: None)


def test_the_first_way_that_runs_is_taken_and_the_first_error_raised():
    def run(way):
        """Return ten times the number; raise an InputError for numbers below 2."""
        if way < 2:
            raise InputError(f"{way} is too small")
        return 10 * way

    assert first_that_runs([1, 2, 3], run) == (2, 20)
    with pytest.raises(InputError, match="1 is too small"):
        first_that_runs([1, 0], run)
