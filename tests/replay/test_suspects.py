# SPDX-License-Identifier: Apache-2.0
"""Of the causes that share a signature, at most four are named, in the order in which the
file speaks for them.
"""

import re
from dataclasses import replace

import pytest
import torch

from tests.replay import second
from tests.replay.simulator import FAULTS, World
from upref.replay import gap, make_batch
from upref.replay.suspects import (
    MOST_NAMED,
    USUAL,
    Evidence,
    _stands_earlier,
    find_evidence,
    rank,
)
from upref.replay.undo import Columns
from upref.replay.words import SUSPECTS

WORLD = World("llama", 23, responses=64, length=28)
NOTHING = Evidence(
    repeats=False,
    stretched=False,
    position=False,
    sparse=False,
    small=False,
    one_sided=False,
    never_below=False,
    both_ways=False,
    certain=False,
    turns=False,
    same_ids=False,
    late=None,
    lags="",
    bfloat16=False,
)


@pytest.mark.parametrize("finding", USUAL)
def test_at_most_four_causes_are_named(finding):
    named = rank(finding, NOTHING)
    assert 1 <= len(named) <= MOST_NAMED == 4
    assert set(USUAL[finding]) <= set(SUSPECTS)


def text_of(columns, **more):
    """Return the sentence of causes in the note on the gap, after asserting that it
    names at most MOST_NAMED.
    """
    found = gap(make_batch(columns | more, file="f"))
    (note,) = (f for f in found.notes if "causes" in f.numbers)
    named = re.split(r"\)\s*;|\);", note.numbers["causes"])
    assert len(named) <= MOST_NAMED
    return note.numbers["causes"]


def test_a_penalty_shows_in_the_repeated_tokens():
    causes = text_of(second.FAULTS["repetition_penalty"](WORLD))
    assert causes.startswith("penalties")


def drawn_from(change, *, responses=80, length=40, vocabulary=60):
    """Return columns of a sampler that changes the logits.

    Some tokens are frequent, so they repeat, and most of all in sharp contexts.
    """
    g = torch.Generator().manual_seed(4)
    shape = (responses, length, vocabulary)
    sharpness = torch.rand(responses, length, 1, generator=g, dtype=torch.float64) * 3
    z = torch.randn(shape, generator=g, dtype=torch.float64)
    z = (z - torch.arange(vocabulary, dtype=torch.float64).log1p()) * sharpness
    y = change(z).log_softmax(-1)
    ids = torch.multinomial(y.exp().view(-1, vocabulary), 1, generator=g)
    ids = ids.view(responses, length)
    x = z.log_softmax(-1)
    columns = {"ids": ids, "mask": torch.ones(responses, length)}
    for name, column in (("old", x), ("sampler", y)):
        columns[name] = column.gather(2, ids[..., None])[..., 0]
    return columns


def cut_to(k):
    """Leave the k largest logits."""
    return lambda z: z.masked_fill(z < z.topk(k).values[..., -1:], -torch.inf)


def evidence_of(columns):
    batch = make_batch(columns, file="f")
    columns = Columns(batch.old, batch.sampler, batch.mask)
    return find_evidence(batch, columns, columns)


@pytest.mark.parametrize("temperature", [0.8, 1.25])
def test_a_temperature_is_no_penalty(temperature):
    """It changes likely tokens otherwise, and these repeat."""
    columns = drawn_from(lambda z: z / temperature)
    evidence = evidence_of(columns)
    assert evidence.stretched and not evidence.repeats
    assert text_of(columns).startswith("another temperature")
    for finding in ("two_policies", "impossible_tokens"):
        assert rank(finding, evidence)[0] == "temperature"


@pytest.mark.parametrize("k", [5, 20])
def test_a_cut_is_no_penalty(k):
    columns = drawn_from(cut_to(k))
    assert not evidence_of(columns).repeats
    assert text_of(columns).startswith("a sampler that was cut")


def test_the_number_of_the_likeliest_token_is_never_below():
    columns = drawn_from(lambda z: z)
    assert not evidence_of(columns).never_below
    g = torch.Generator().manual_seed(6)
    least = torch.rand(columns["old"].shape, generator=g, dtype=torch.float64).log()
    columns["sampler"] = columns["old"].maximum(least)
    evidence = evidence_of(columns)
    assert evidence.never_below and rank("two_policies", evidence)[0] == "likeliest"


def test_other_weights_are_no_temperature():
    generator = torch.Generator().manual_seed(5)

    def move(z):
        return z + 0.5 * torch.randn(z.shape, generator=generator, dtype=z.dtype)

    causes = text_of(drawn_from(move))
    assert causes.startswith("other weights") and "temperature or scale" not in causes


def test_other_ids_and_another_context_are_said_once():
    evidence = replace(NOTHING, position=True)
    for finding in USUAL:
        assert not {"ids", "context"} <= set(rank(finding, evidence))
    assert "context" in rank("impossible_tokens", replace(evidence, same_ids=True))


def test_responses_of_other_weights_are_told_from_those_that_agree():
    """Two of five responses were sampled by older weights."""
    right, other = drawn_from(lambda z: z), drawn_from(lambda z: 0.3 * z + z.roll(1, 2))
    is_old = (torch.arange(80) % 5 < 2)[:, None]
    mixed = {name: torch.where(is_old, other[name], right[name]) for name in right}
    mixed["sampler"] = mixed["sampler"] + 1e-6
    found = gap(make_batch(mixed, file="f"))
    assert [f.cause for f in found.findings] == ["some_responses"]
    assert "32 of 80 responses are off" in str(found.notes[0])
    assert found.notes[0].numbers["causes"].startswith("other weights")


def test_a_certain_sampler_has_a_grammar_and_no_penalty():
    """A grammar forces tokens at places where others repeat."""
    evidence = replace(NOTHING, repeats=True, certain=True, sparse=True)
    named = rank("impossible_tokens", evidence)
    assert named[0] == "undrawn" and "settings" in named and "penalties" not in named
    assert "a grammar" in SUSPECTS["settings"][0]
    assert rank("impossible_tokens", replace(evidence, certain=False))[0] == "penalties"


def test_a_forgotten_context_is_among_the_causes():
    assert "a cache, a window" in text_of(second.FAULTS["forgotten_context"](WORLD))


def test_numbers_in_another_order_are_off_both_ways():
    assert "another order" in text_of(second.FAULTS["context_parallel"](WORLD))


def test_the_samplers_own_ids_rule_other_ids_out():
    columns = FAULTS["retokenized"](WORLD)
    assert text_of(columns).startswith("other ids")
    assert "other ids" not in text_of(columns, sampler_ids=columns["ids"])


def test_weights_that_are_known_to_be_late_come_first():
    columns = FAULTS["quantized_weights"](WORLD)
    late = make_batch(columns | {"version": torch.full((64,), 3)}, file="f", step=7)
    assert gap(late).findings[0].numbers["causes"].startswith("other weights")


def test_a_token_that_stands_earlier_is_found_in_its_own_row():
    columns = {
        "ids": torch.tensor([[5, 7, 5, 7, 9], [9, 9, 5, 5, 7]]),
        "mask": torch.ones(2, 5),
        "old": -torch.ones(2, 5),
        "sampler": -torch.ones(2, 5),
    }
    assert _stands_earlier(make_batch(columns, file="f")).int().tolist() == [
        [0, 0, 1, 1, 0],
        [0, 1, 0, 1, 0],
    ]


def batch_of(difference):
    """Return a batch in which log π_old less the sampler's log-probability is this, [B,
    T].
    """
    B, T = difference.shape
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(B, T, dtype=torch.float64, generator=generator)
    columns = {
        "ids": torch.arange(B * T).view(B, T),
        "mask": torch.ones(B, T),
        "old": old,
        "sampler": old - difference,
    }
    return make_batch(columns, file="f")


def test_lone_tokens_make_no_response_that_is_off():
    """Two of twenty responses have one token that is off, or five."""
    difference = torch.zeros(20, 30, dtype=torch.float64)
    difference[:2, 3] = 2.0
    assert gap(batch_of(difference)).cause == "agree"
    difference[:2, 3:8] = 2.0
    assert gap(batch_of(difference)).cause == "some_responses"


def test_a_gap_of_few_tokens_is_sparse():
    difference = torch.zeros(20, 30, dtype=torch.float64)
    difference[:, 3] = 2.0
    batch = batch_of(difference)
    columns = Columns(batch.old, batch.sampler, batch.mask)
    evidence = find_evidence(batch, columns, columns)
    assert evidence.sparse and evidence.small  # 2/30 nats on average


def test_the_gap_at_each_lag_is_told_where_version_is_recorded():
    """Half of the responses are late, and these alone are off."""
    current = FAULTS["healthy"](WORLD)
    late = FAULTS["stale_by_four"](WORLD)
    is_late = torch.arange(len(current["mask"])) % 2 == 1
    mixed = {
        name: torch.where(is_late[:, None], late[name], current[name])
        for name in ("ids", "mask", "old", "sampler")
    }
    mixed["version"] = torch.where(is_late, 3, 7)
    (note,) = gap(make_batch(mixed, file="f", step=7)).notes
    told = re.search(
        r"by version, the mean gap is (\S+) nats at lag 0 and (\S+) nats at lag 4",
        note.numbers["causes"],
    )
    at_none, at_four = map(float, told.groups())
    assert at_none < 0.01 < at_four


def test_a_strong_penalty_may_leave_two_unrelated_columns():
    """Of peaked policies that repeat themselves, nearly each token is penalized."""
    assert rank("unrelated", replace(NOTHING, repeats=True))[0] == "penalties"
    assert "penalties" not in rank("unrelated", NOTHING)
