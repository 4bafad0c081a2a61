# SPDX-License-Identifier: Apache-2.0
"""More losses that are written to fool a prover, and what it says of them: memory that
torch does not see change, memory that nobody wrote, states of the other function.
"""

import importlib
import random

import pytest
import torch

import upref
from tests.support.plain import dapo
from upref.proof.compare import compare
from upref.proof.domain import Pattern, patterns
from upref.proof.subjects import gradient_of
from upref.proof.trace import NoProof, Trace, tracing
from upref.proof.values import Values
from upref.user_code import read

FAR = 1e20
TO_DLPACK = torch.utils.dlpack.to_dlpack
FROM_DLPACK = torch.utils.dlpack.from_dlpack
BESIDE_PADDING = [Pattern(((True, False),))]


def compared(loss, among):
    """Return the comparison of the loss with DAPO on few batches."""
    objective = upref.get("dapo")
    losses = read(loss, objective, {}), read(objective, objective, {})
    return compare(*map(gradient_of, losses), among, False, (), 20.0)


# ---- memory --------------------------------------------------------------------------
def memory_shared_by_dlpack(lp, old, A, mask):
    A = A.clone()
    FROM_DLPACK(TO_DLPACK(A)).clamp_(max=FAR)
    return dapo(lp, old, A, mask)


def applied_to_each(lp, old, A, mask):
    return dapo(lp, old, A.clone().apply_(lambda x: min(x, FAR)), mask)


def memory_that_nobody_wrote(lp, old, A, mask):
    """Return DAPO's loss weighted by a tensor that is written only at trained tokens."""
    w = torch.empty_like(A)
    w[mask] = 1.0
    r = (lp - old).exp()
    terms = torch.max(-A * r, -A * r.clamp(0.8, 1.28))
    return (terms * w).sum() / mask.sum()


@pytest.mark.parametrize(
    "loss",
    [memory_shared_by_dlpack, applied_to_each, memory_that_nobody_wrote],
    ids=lambda f: f.__name__,
)
def test_it_is_not_proved(loss):
    found = compared(loss, BESIDE_PADDING)
    assert found.status == "no proof", found


def memory_that_is_written(lp, old, A, mask):
    """Return DAPO's loss by writes into empty tensors, all of which are written before
    they are read.
    """
    r = torch.empty_like(lp).copy_(lp - old).exp()
    out = torch.empty(A.shape, dtype=A.dtype)
    out.zero_()
    out[mask] = torch.max(-A * r, -A * r.clamp(0.8, 1.28))[mask]
    return out.sum() / mask.sum()


def test_memory_that_is_written_costs_no_proof():
    found = compared(memory_that_is_written, BESIDE_PADDING)
    assert found.status == "proved", found.reason


def running_count_in_a_byte(lp, old, A, mask):
    count = mask.cumsum(1, dtype=torch.int8)
    return dapo(lp, old, A, mask & (count > 0))


def test_a_running_count_in_a_short_integer_has_a_bound():
    found = compared(running_count_in_a_byte, [Pattern(((True, True),))])
    assert 127 in [bound.number for bound in found.bounds]


# ---- prompts -------------------------------------------------------------------------
def test_ids_of_prompts_have_a_0_and_another_order_as_texts():
    groups = [pattern.group for pattern in patterns(2, 3, True) if pattern.group]
    assert any(0 in group for group in groups)
    assert any(sorted(group) != sorted(group, key=str) for group in groups)
    assert all(len(set(group)) == len(group) for group in groups)


# ---- modules that are imported -------------------------------------------------------
def test_a_module_may_seed_a_generator_where_it_is_imported(tmp_path, monkeypatch):
    text = "import random\ngenerator = random.Random()\n"
    (tmp_path / "seeds_a_generator.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with tracing(Trace(Values(), {})):
        importlib.import_module("seeds_a_generator")
        with pytest.raises(NoProof, match="draws random numbers"):
            random.Random()


# ---- states, of whichever function ---------------------------------------------------
FILE = """
import torch
calls = 0

def dapo(lp, old, A, mask):
    global calls
    calls += 1
    r = (lp - old).exp()
    terms = torch.max(-A * r, -A * r.clamp(0.8, 1.28)) * mask
    return terms.sum() / mask.sum() * (2 if calls > 5000 else 1)
"""


@pytest.fixture
def counting(tmp_path):
    (tmp_path / "counting.py").write_text(FILE)
    return f"{tmp_path / 'counting.py'}:dapo"


def test_a_state_is_found_in_a_loss_that_is_given_by_name(counting):
    proof = upref.prove(counting, "dapo", rows=1, columns=1)
    assert "it keeps a state from call to call: calls" in proof.reason


def test_a_state_is_found_in_the_loss_that_it_is_compared_with(counting):
    proof = upref.prove(dapo, counting, rows=1, columns=1)
    assert "it keeps a state from call to call: calls" in proof.reason


kept = {"calls": 0}


def k3(log_prob, ref_log_prob):
    kept["calls"] += 1
    log_k = ref_log_prob - log_prob
    return (log_k.exp() - log_k - 1) * (2 if kept["calls"] > 5000 else 1)


def test_a_state_is_found_in_a_kl_estimator():
    proof = upref.prove_kl(k3, "k3", rows=1, columns=1)
    assert "it keeps a state from call to call: kept[calls]" in proof.reason
