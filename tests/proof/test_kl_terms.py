# SPDX-License-Identifier: Apache-2.0
"""Functions of two log-probabilities, proved for every value."""

import math

import pytest
import torch

from upref import InputError
from upref.cli import main
from upref.verify.proof import prove_kl

FILE = """
def k1(lp, ref_lp):
    return lp - ref_lp

def k3(lp, ref_lp):
    d = ref_lp - lp
    return d.exp() - 1 - d

def k3_clamped(lp, ref_lp):
    d = (ref_lp - lp).clamp(max=2)
    return d.exp() - 1 - d
"""


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE, encoding="utf-8")
    return file


def test_the_command(mine, capsys):
    assert main(["prove", f"{mine}:k3", "--as-kl", "k3", "--rows", "1"]) == 0
    assert "PROVED" in capsys.readouterr().out
    assert main(["prove", f"{mine}:k3_clamped", "--as-kl", "k3", "--rows", "1"]) == 1
    text = capsys.readouterr().out
    assert "expected  gradient -" in text and "found     gradient 0" in text
    assert "ref_log_prob = torch.tensor" in text and "dJ/dlp" not in text


def test_another_estimator_differs(mine):
    proof = prove_kl(f"{mine}:k1", "k3", rows=1, columns=1)
    log_k = proof.numbers["log π_ref - log π_θ"]
    expected = {
        "value": math.exp(log_k) - 1 - log_k,
        "gradient": 1 - math.exp(log_k),
    }
    assert proof.status == "differs"
    assert proof.expected == pytest.approx(expected[proof.unit])
    assert proof.found == pytest.approx({"value": -log_k, "gradient": 1}[proof.unit])


@pytest.mark.parametrize("rows", [0, None, True, 1.5])
def test_sizes_are_whole_numbers(mine, rows):
    with pytest.raises(InputError, match="rows must be a whole number"):
        prove_kl(f"{mine}:k1", "k1", rows=rows)


def k3_of_a_series(lp, ref_lp):
    d = ref_lp - lp
    return d * (torch.expm1(d) / d - 1)


def k2_of_a_root(lp, ref_lp):
    return 0.5 * (lp - ref_lp).pow(2).sqrt() ** 2


@pytest.mark.parametrize(
    ("term", "name"), [(k3_of_a_series, "k3"), (k2_of_a_root, "k2")]
)
def test_a_term_that_is_nan_where_the_policies_are_equal_differs(term, name):
    proof = prove_kl(term, name, rows=1, columns=1)
    assert proof.status == "differs"
    assert math.isnan(proof.found) and proof.expected == 0
    assert proof.numbers == {"log π_ref - log π_θ": 0}


def k3_with_a_guard(lp, ref_lp):
    d = ref_lp - lp
    safe = torch.where(d == 0, 1, d)
    return torch.where(d == 0, d * d / 2, d * (torch.expm1(safe) / safe - 1))


def k3_of_a_ratio(lp, ref_lp):
    k = (ref_lp - lp).exp()
    return k - 1 - k.log()


@pytest.mark.parametrize("term", [k3_with_a_guard, k3_of_a_ratio])
def test_a_right_term_is_proved_where_the_policies_are_equal_too(term):
    assert prove_kl(term, "k3", rows=1, columns=2)
