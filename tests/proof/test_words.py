# SPDX-License-Identifier: Apache-2.0
"""What a proof says where it has no answer, and of a name that it does not know."""

from dataclasses import replace

import pytest
import torch

import upref
from upref.proof.paths import Path, _undecided
from upref.proof.trace import Step
from upref.verify.proof import Proof


def shifted(log_prob, old_log_prob, advantages, mask):
    r = (log_prob - old_log_prob).exp()
    A = advantages
    per_token = torch.max(-A * r, -A * r.clamp(0.8, 1.28)) * mask
    return per_token.sum() / mask.sum() / (1 + (mask.shape[1] >> 10))


def test_a_size_that_is_shifted_is_divided_by_a_power_of_two():
    proof = upref.prove(shifted, "dapo", rows=1, columns=1)
    assert [number for number, _ in proof.bounds] == [1024]


def test_the_usual_names_of_estimators_are_known_in_the_words_of_the_error():
    with pytest.raises(upref.InputError, match="did you mean 'leave_one_out'"):
        upref.prove_advantages(lambda rewards: rewards, "rloo")


def test_an_undecided_question_names_the_line_of_its_path():
    ids = torch.zeros(1, dtype=torch.int64)
    steps = (Step(5, True, "mine.py:3"), Step(6, True, ""))
    assert "mine.py:3" in _undecided(Path({}, steps, ids, ids))
    assert "fewer --rows" in _undecided(Path({}, (), ids, ids))


def test_other_sizes_are_part_of_no_proof_but_that_of_every_size():
    sizes = Proof("mine.py:loss", "dapo", "proved", shapes=((1, 1), (1, 3)), batches=23)
    assert "not part of the proof: batches of other sizes; ties" in sizes.text()
    assert "other sizes" not in replace(sizes, every_size=True).text()
    assert "other sizes" not in replace(sizes, status="differs").text()


def test_masked_slots_have_the_advantage_of_their_response_in_a_proof():
    proof = Proof("mine.py:loss", "gspo", "proved", shapes=((1, 2),), per_response=True)
    assert "masked slots with another advantage" in proof.text()
    assert "masked slots" not in replace(proof, per_response=False).text()


def test_the_line_of_a_bound_names_all_that_the_number_may_be_about():
    bounds = ((5000, "mine.py:9"),)
    proof = Proof("mine.py:loss", "dapo", "proved", shapes=((1, 1),), bounds=bounds)
    line = "a size, count, setting or kept state is compared with 5000 (mine.py:9)"
    assert line in proof.text()


def _terms(logp, logp_old, adv, mask):
    """Return DAPO's terms with the sign of a loss, [B, T]."""
    r = (logp - logp_old).exp()
    return -torch.minimum(r * adv, r.clamp(0.8, 1.28) * adv) * mask


def _sums(logp, logp_old, adv, mask):
    """One number for each response, [B]."""
    return _terms(logp, logp_old, adv, mask).sum(1)


def test_what_a_loss_leaves_to_its_caller_is_no_part_of_the_proof():
    terms = upref.prove(_terms, "dapo", rows=1, columns=1)
    assert terms
    assert (
        "proof: the aggregation, which its caller does; the mean within" in terms.text()
    )
    sums = upref.prove(_sums, "dapo", rows=1, columns=2)
    assert not sums
    assert "proof: the mean over responses, which its caller takes; " in sums.text()
    report = upref.check(_sums, "dapo", skip=("every-value",))
    assert "result -> one number for each response, whose mean upref takes" in str(
        report
    )
    assert "the aggregation, which its caller does" not in str(report)


def _of_clamped_terms(logp, logp_old, adv, mask):
    """Return DAPO's loss, whose terms are clamped: the bound is one of A r."""
    return _terms(logp, logp_old, adv, mask).clamp(-50, 50).sum() / mask.sum()


def _of_clamped_advantages(logp, logp_old, adv, mask):
    """Return DAPO's loss, whose advantages are clamped."""
    return _terms(logp, logp_old, adv.clamp(-50, 50), mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("loss", "is_whole"), [(_of_clamped_terms, False), (_of_clamped_advantages, True)]
)
def test_a_condition_of_several_variables_is_not_dropped_without_a_word(loss, is_whole):
    proof = upref.prove(loss, "dapo", rows=1, columns=1)
    assert proof.status == "differs" and proof.place
    assert proof.place.endswith("at some tokens") != is_whole
