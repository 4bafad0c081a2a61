# SPDX-License-Identifier: Apache-2.0
"""Functions of two log-probabilities, proved for every value."""

import math

import pytest

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
