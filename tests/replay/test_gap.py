# SPDX-License-Identifier: Apache-2.0
"""The sampler's gap: every fault of the simulator is named, and no healthy sampler
fails.
"""

from dataclasses import replace

import pytest
import torch

import upref
from tests.replay import second, test_healthy as healthy
from tests.replay.grade import EXPECTED, UNDONE, cell, worlds
from tests.replay.simulator import (
    FAULTS,
    HELD_OUT,
    SCEPTICS,
    World,
    columns,
    make_policy,
    nucleus,
    sample,
    score,
    shifted_weights,
)
from tests.support.daily import daily
from upref.errors import InputError
from upref.replay import gap, make_batch
from upref.replay.lines import summary_line
from upref.replay.places import _move_each_row
from upref.replay.undo import Columns

SMALL = World("qwen3", 41, responses=32, length=24)
HEALTHY = (
    "healthy",
    "healthy_bfloat16",
    "healthy_both_bfloat16",
    "stale_by_one",
    "stale_by_four",
    "other_experts",
)


def test_every_fault_of_the_simulator_has_its_expected_causes():
    assert set(EXPECTED) == set(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault):
    found = cell(fault, SMALL)
    assert found.right, (
        f"{fault} was named {found.named}, which {'fails' if found.failed else 'is a note'}"
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2"])
@pytest.mark.parametrize("fault", HEALTHY)
def test_a_healthy_sampler_never_fails(fault, family):
    assert not cell(
        fault, World(family, 43, responses=32, length=24, temperature=0.7)
    ).failed


def test_quite_other_weights_are_no_failure_under_any_seed():
    """Nothing was undone: the rows, slots and scale are right."""
    for seed in range(3):
        world = World("llama", 60 + seed, responses=32, length=20)
        trainer = make_policy(world)
        drawn = sample(world, shifted_weights(trainer, 0.5, seed))
        found = gap(
            make_batch(columns(world, drawn, score(trainer, drawn.ids)), file="f")
        )
        assert found, [str(f) for f in found.failures]


@pytest.mark.nightly
def test_the_table_of_families_that_nothing_was_tuned_on():
    """The recorded table is of `python -m tests.replay.grade`; this draws two of its
    families with other seeds.
    """
    cells = [
        cell(fault, world)
        for world in worlds(("granite", "mixtral"), 900)
        for fault in FAULTS
    ]
    assert not [c for c in cells if c.false_alarm]
    assert sum(c.right for c in cells) >= 0.95 * len(cells), [
        c for c in cells if not c.right
    ]


def test_a_failure_is_what_was_undone():
    found = gap(make_batch(FAULTS["shifted"](SMALL), file="f"))
    assert not found and found.cause in UNDONE
    assert (
        found.failures[0].numbers["after"] < 1e-5 < found.failures[0].numbers["before"]
    )
    assert found.mean_abs < 1e-5  # the numbers are of the columns without the cause
    assert "+1" in str(found.failures[0])


def test_the_mean_ratio_is_the_mass_that_a_nucleus_keeps():
    world = World("qwen3", 47, responses=64, length=24)
    found = gap(make_batch(FAULTS["nucleus_cut"](world), file="f"))
    assert 0.9 < found.rho_mean < 1 - 5 * found.rho_se


def test_two_faults_are_named_together():
    world = SMALL
    out = FAULTS["tool_output"](world)
    out["sampler"] = out["sampler"].roll(1, 1) * out["mask"]
    causes = [f.cause for f in gap(make_batch(out, file="f")).findings]
    assert causes[0] == "shift" and "not_sampled" in causes


def test_columns_without_a_sampler_say_what_is_missing():
    out = FAULTS["healthy"](SMALL)
    del out["sampler"]
    with pytest.raises(InputError, match="needs the column sampler"):
        gap(make_batch(out, file="f"))


def test_a_gap_of_one_token_has_numbers():
    one = torch.full((1, 1), -1.0)
    batch = make_batch(
        {
            "ids": torch.ones(1, 1).long(),
            "mask": torch.ones(1, 1),
            "old": one,
            "sampler": one - 0.1,
        },
        file="f",
    )
    found = gap(batch)
    assert found and found.tokens == 1 and abs(found.mean - 0.1) < 1e-6
    assert found.cause == "two_policies"


@pytest.mark.parametrize("check", ["gap", "advantages", "loss", "weights"])
def test_what_is_no_batch_is_refused(check):
    more = {"loss": ["dapo"], "weights": [["dapo"]]}.get(check, [])
    with pytest.raises(InputError, match="recorded batch"):
        getattr(upref.replay, check)({"ids": [1]}, *more)


CLEAN = {"agree", "copied", "two_policies", "impossible_tokens"}
ALLOWED = {
    "eight_bit_floats": CLEAN,
    "temperature_in_trainer_only": {"temperature", "some_temperature", "two_policies"},
    "mask_past_the_end": {"not_sampled", "copied"},
    "shifted_nucleus": {"shift", "cut", "cut_or_divided"},
    "likeliest_token": {"impossible_tokens", "cut", "cut_or_divided"},
}


@pytest.mark.parametrize("family", ["recurrent_gemma", "codegen"])
@pytest.mark.parametrize("fault", HELD_OUT)
def test_a_fault_that_no_rule_was_tuned_on_gets_no_false_cause(fault, family):
    """Find for each held-out fault only causes that are true of it."""
    found = gap(
        make_batch(
            HELD_OUT[fault](World(family, 1311, responses=48, length=24)), file="f"
        )
    )
    assert {f.cause for f in found.findings} <= ALLOWED[fault]
    assert [f.cause for f in found.failures] == {
        "mask_past_the_end": ["not_sampled"],
        "shifted_nucleus": ["shift"],
    }.get(fault, [])
    # one column cannot tell it from the others, so each sentence names it
    if fault == "likeliest_token":
        assert found.notes and all("likeliest token" in str(f) for f in found.notes)


NAMED = {  # fault of a sceptic -> the failures, and what else may be named
    "logarithm_to_base_two": ("factor",),
    "running_sum": ("sums",),
    "mean_of_the_response": ("one_number",),
    "first_token_missing": ("not_sampled",),
    "last_token_missing": ("not_sampled",),
    "one_rank_is_shifted": ("shift",),
}
SHARED = {  # of those without a failure: what may be named
    "two_decimals": CLEAN,
    "minus_entropy": {
        "above_one",
        "some_temperature",
        "two_policies",
        "not_the_sampler",
    },
    "greedy": {"all_zero"},
    "draft_model": {"above_one", "not_the_sampler", "two_policies"},
    "padded_vocabulary": {"agree", "cut_or_divided"},
    "grammar": {"impossible_tokens", "cut", "cut_or_divided"},
    "banned_token": {"agree", "cut_or_divided"},
    "missing_first_token": CLEAN,
    "dropout": CLEAN,
    "weights_change_within_a_response": {*CLEAN, "not_the_sampler", "above_one"},
    "temperatures_of_requests": {
        "agree",
        "some_responses",
        "two_policies",
        "temperature",
        "some_temperature",
    },
    "reference_column": {"reference_weights", "two_policies"},
}


def test_a_number_above_zero_is_no_log_probability():
    held = FAULTS["healthy_bfloat16"](SMALL)
    place = held["mask"].nonzero()[7]
    held["sampler"][tuple(place)] = 0.4
    found = gap(make_batch(held, file="f"))
    assert [f.cause for f in found.failures] == ["positive"]
    assert "1 of" in str(found.failures[0])


def test_each_fault_of_the_sceptic_has_its_names():
    assert not set(NAMED) & set(SHARED) and {*NAMED, *SHARED} == set(SCEPTICS)


@pytest.mark.parametrize(
    ("fault", "family"),
    daily([(f, m) for f in SCEPTICS for m in ("stablelm", "gpt2")], every=4),
)
def test_a_fault_of_the_sceptic_gets_no_false_cause(fault, family):
    found = gap(
        make_batch(
            SCEPTICS[fault](World(family, 1411, responses=48, length=24)), file="f"
        )
    )
    assert tuple(f.cause for f in found.failures) == NAMED.get(fault, ())
    if fault in SHARED:
        assert {f.cause for f in found.findings} <= SHARED[fault]


@pytest.mark.parametrize(
    ("fault", "family"),
    daily([(f, m) for f in second.FAULTS for m in ("phi", *second.FAMILIES)], every=3),
)
def test_a_fault_of_the_second_reader_gets_no_false_cause(fault, family):
    """Each finding holds a word of the truth that was fixed before the first run."""
    world = World(family, second.drawn_seed(2), responses=48, length=24)
    found = cell(fault, world)
    assert not found.false, found.named


def test_numbers_at_the_other_end_of_the_rows_are_named():
    found = gap(make_batch(second.FAULTS["left_padded"](SMALL), file="f"))
    assert [f.cause for f in found.failures] == ["aligned"]
    assert "right end" in str(found.failures[0]) and found.mean_abs < 1e-5


def test_responses_that_are_off_alone_are_counted():
    """Two exchanged responses are too short to be told, and the others agree."""
    world = World("bloom", 24614, responses=32, length=20)
    found = gap(make_batch(FAULTS["exchanged_two"](world), file="f"))
    assert found and [f.cause for f in found.notes] == ["some_responses"]
    assert "2 of 32 responses" in str(found.notes[0])
    assert "exchanged rows" in str(found.notes[0])


def test_zeros_of_padding_in_wrong_places_are_no_tools_tokens():
    """All numbers stand in another order, those of padded slots too."""
    world = World("bloom", 24614, responses=32, length=20)
    found = gap(make_batch(second.FAULTS["context_parallel"](world), file="f"))
    assert found and [f.cause for f in found.notes] == ["unrelated"]


def test_rows_that_are_alike_by_chance_are_not_exchanged():
    """Nearly certain tokens stand in another order, which leaves most rows apart."""
    world = World("gpt_oss", 36269, 64, 36, temperature=1.2, entropy=0.3)
    found = gap(make_batch(second.FAULTS["context_parallel"](world), file="f"))
    assert found, [str(f) for f in found.failures]


def test_what_bars_tokens_is_named_where_the_sampler_is_above():
    """A grammar, banned tokens and a padded vocabulary leave the same trace as a
    nucleus.
    """
    found = gap(make_batch(SCEPTICS["grammar"](SMALL), file="f"))
    (cut,) = [f for f in found.notes if f.cause in ("cut", "cut_or_divided")]
    assert "grammar" in str(cut)


def test_a_cut_sampler_with_a_column_of_before_the_cut_has_no_gap():
    """The limit that docs/dump.md states."""
    trainer = make_policy(SMALL)
    drawn = sample(SMALL, replace(trainer, keep=nucleus(0.8)), record_raw=True)
    found = gap(make_batch(columns(SMALL, drawn, score(trainer, drawn.ids)), file="f"))
    assert found.cause in ("agree", "copied")


def test_a_moved_row_has_no_nan_where_the_sampler_is_minus_infinity():
    sampler = torch.tensor([[-1.0, -torch.inf]])
    columns = Columns(torch.zeros(1, 2), sampler, torch.ones(1, 2, dtype=torch.bool))
    moved = _move_each_row(columns, torch.tensor([1]))
    assert moved.sampler.tolist() == [[-torch.inf, 0.0]]
    assert moved.mask.tolist() == [[True, False]]


def cut_and_noisy(noise, top_p=0.9):
    """Return the gap of a sampler that is cut and a trainer that is not, whose logits
    are off by some noise besides.
    """
    generator = torch.Generator().manual_seed(3)
    z = 2 * torch.randn(64, healthy.LENGTH, healthy.VOCABULARY, generator=generator)
    is_kept = nucleus(top_p)(z.log_softmax(-1))
    mu = torch.where(is_kept, z, -torch.inf)
    pi = z + noise * torch.randn(z.shape, generator=generator)
    return gap(healthy.batch(mu, pi, generator))


def test_mass_that_is_missing_is_said_where_rounding_hides_the_cut():
    """Nearly all differences have one sign until other weights move them both ways."""
    assert cut_and_noisy(0.0).cause in ("cut", "cut_or_divided")
    hidden = cut_and_noisy(0.3)
    assert hidden and hidden.cause == "missing_mass"
    assert hidden.rho_mean < 0.95 and "cut and renormalized" in str(hidden.notes[0])
    assert cut_and_noisy(0.3, top_p=1.0).cause == "two_policies"


@pytest.mark.parametrize("bound", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("side", [1, -1])
def test_a_mask_by_the_ratio_is_among_the_causes_of_missing_mass(bound, side):
    """Two healthy policies, of which the tokens beyond a ratio are masked out."""
    generator = torch.Generator().manual_seed(3)
    z = 2 * torch.randn(64, healthy.LENGTH, healthy.VOCABULARY, generator=generator)
    pi = z + 0.5 * torch.randn(z.shape, generator=generator)
    b = healthy.batch(z, pi, generator)
    log_rho = b.old - b.sampler
    found = gap(replace(b, mask=b.mask & (side * log_rho < bound)))
    assert found and found.notes
    assert all("by their ratio" in str(note) for note in found.notes), found.notes


# ---- what is no comparison, or no proof ----------------------------------------------
def one_engine(**more):
    """Return a healthy step whose π_old is the sampler's own column."""
    world = World("qwen3", 71, responses=32, length=24)
    made = FAULTS["healthy_bfloat16"](world)
    return make_batch(
        made | {"old": made["sampler"], "now": made["old"]} | more, file="f", step=5
    )


def test_now_is_compared_where_old_is_the_samplers_own():
    batch = one_engine()
    healthy = gap(batch)
    assert healthy and healthy.cause == "agree" and healthy.mean_abs > 1e-5
    assert "old is the sampler's own column" in summary_line(batch)
    # the engine's column is that of another temperature, and stands in old as well
    engine = (batch.old / 0.7).double()
    found = gap(one_engine(old=engine, sampler=engine))
    assert not found and found.cause == "factor"
    assert found.findings[-1].cause == "now_compared"


def test_what_only_repeats_the_sampler_is_not_compared():
    """Without now, or where the weights are known to have moved since."""
    late = torch.full((32,), 4)
    for batch in (replace(one_engine(), now=None), one_engine(version=late)):
        found = gap(batch)
        assert found and found.cause == "copied"
        assert "nothing is compared" in str(found.findings[0])
        assert "own column, so" not in summary_line(batch)


@pytest.mark.parametrize("value", [-1.0, -5.0])
def test_a_constant_is_no_sum(value):
    """The differences of its neighbors are 0, and so is a peaked policy, nearly."""
    trainer = -torch.rand(32, 24, generator=torch.Generator().manual_seed(0)) * 0.4
    mask = torch.ones(32, 24).bool()
    columns = {"ids": mask.long(), "mask": mask, "old": trainer}
    batch = make_batch(columns | {"sampler": trainer * 0 + value}, file="f")
    found = gap(batch)
    assert found and [f.cause for f in found.findings] == ["constant"]
    # the sums of the same tokens are named as before
    sums = make_batch(columns | {"sampler": trainer.cumsum(1)}, file="f")
    assert gap(sums).cause == "sums"


def template(certain_elsewhere):
    """Return a batch whose engine has 0 on a run of six tokens that the trainer finds
    unlikely, and on a third of the other tokens or on none.
    """
    generator = torch.Generator().manual_seed(0)
    trainer = -0.3 * torch.rand(32, 24, generator=generator) - 0.05
    if certain_elsewhere:
        trainer[:, ::3] = -1e-5
    sampler = torch.where(trainer > -1e-3, 0.0, trainer)
    trainer[:, :6] = -3 - torch.rand(32, 6, generator=generator)
    sampler[:, :6] = 0.0
    mask = torch.ones(32, 24).bool()
    columns = {"ids": mask.long(), "mask": mask, "old": trainer, "sampler": sampler}
    return make_batch(columns, file="f")


def test_a_zero_is_no_proof_where_the_engine_writes_certainty_as_zero():
    proof = gap(template(certain_elsewhere=False))
    assert not proof and proof.cause == "not_sampled"
    found = gap(template(certain_elsewhere=True))
    assert found and [f.cause for f in found.findings] == ["zero"]
    assert "certain" in str(found.findings[0]) and "did not draw" in str(
        found.findings[0]
    )


def peaked(place, value):
    """Return a batch of a peaked policy, whose engine has 0 on a fifth of the tokens;
    at the place [B, T] stand tokens that the trainer finds unlikely, and the value.
    """
    generator = torch.Generator().manual_seed(1)
    trainer = -0.3 * torch.rand(32, 24, generator=generator) - 0.05
    trainer[:, [0, 3, 6, 18, 20]] = -1e-5
    sampler = torch.where(trainer > -1e-3, 0.0, trainer)
    sampler[place] = value
    trainer[place] = -3 - torch.rand(int(place.sum()), generator=generator)
    mask = torch.ones(32, 24).bool()
    columns = {"ids": mask.long(), "mask": mask, "old": trainer, "sampler": sampler}
    return make_batch(columns, file="f")


def test_a_tools_text_is_told_from_certainty_by_the_tokens_around_it():
    """It stands behind tokens that train, and all others agree."""
    place = torch.zeros(32, 24).bool()
    place[::2, 10:15] = True
    found = gap(peaked(place, 0.0))
    assert not found and found.cause == "not_sampled"
    assert found.findings[0].numbers["tokens"] == 16 * 5


def test_one_placeholder_at_the_end_of_each_response_of_a_peaked_policy():
    place = torch.zeros(32, 24).bool()
    place[:, 22] = True
    batch = peaked(place, 0.0)
    batch = replace(batch, mask=torch.arange(24).expand(32, 24) < 23)
    found = gap(batch)
    assert [f.cause for f in found.findings] == ["zero"] and found
    assert "each the last one with a number in its response, the" in str(
        found.findings[0]
    )


def test_a_list_that_is_padded_with_minus_one_needs_no_unlikely_token():
    """Half of the tokens under the padding are likely, and a token may have -1."""
    batch = peaked(torch.zeros(32, 24).bool(), 0.0)
    lengths = torch.randint(12, 20, (32, 1), generator=torch.Generator().manual_seed(2))
    padded = torch.arange(24) >= lengths
    trainer = torch.where(padded & (torch.arange(24) % 2 == 0), -0.95, batch.old)
    sampler = torch.where(padded, -1.0, batch.sampler)
    found = gap(replace(batch, old=trainer, sampler=sampler))
    assert not found and [f.cause for f in found.findings] == ["not_sampled"]
    assert found.findings[0].numbers["tokens"] == int(padded.sum())


def test_the_place_of_missing_numbers_is_told():
    """Leave whole responses, first tokens and fourth tokens without a number in turn."""
    made = FAULTS["healthy"](SMALL)
    mask = made["mask"].bool()
    order = mask.cumsum(1)
    rows = torch.arange(len(mask)) < 3
    for is_missing, words in (
        (rows[:, None] & mask, "all of 3 whole responses"),
        (mask & (order == 1), "each the first one with a number in its response"),
        (mask & (order == 4), "trained tokens have no"),
    ):
        sampler = made["sampler"].masked_fill(is_missing, torch.nan)
        (found,) = gap(make_batch(made | {"sampler": sampler}, file="f")).failures
        assert words in str(found), found


def test_a_rounded_column_is_named_by_its_own_name():
    """Without old, now is what is compared."""
    made = FAULTS["healthy"](SMALL)
    made["now"] = made.pop("old").bfloat16().double()
    (found,) = gap(make_batch(made, file="f")).notes
    assert str(found).startswith("the column now holds bfloat16 numbers"), found


def test_the_responses_that_are_counted_are_the_long_ones():
    made = FAULTS["shifted"](SMALL)
    mask = made["mask"].bool()
    is_short = torch.arange(len(mask)) < 4
    short = mask & ~(is_short[:, None] & (mask.cumsum(1) > 3))
    (found,) = gap(make_batch(made | {"mask": short}, file="f")).failures
    assert found.cause == "shift" and "responses of at least 8 tokens" in str(found)
