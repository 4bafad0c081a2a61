# SPDX-License-Identifier: Apache-2.0
"""`--zero`: one token whose bits differ is a failure that says where; equal columns that
may be copies show nothing.
"""

import json
from dataclasses import replace

import pytest
import torch

from upref.cli import main
from upref.errors import InputError
from upref.replay import make_batch, write
from upref.replay.zero import zero_mismatch

B, T = 8, 12
LENGTHS = torch.tensor([12, 12, 8, 8, 12, 12, 8, 8])
MASK = torch.arange(T) < LENGTHS[:, None]
OLD = -torch.rand(B, T, generator=torch.Generator().manual_seed(0)) - 0.1


def batch(off=None, **more):
    """Return a batch in which the sampler's numbers are the trainer's, but on the
    tokens `off` a little more.
    """
    sampler = OLD.clone()
    if off is not None:
        sampler[off] += 2**-20
    columns = {
        "ids": torch.arange(T).expand(B, T) + 5,
        "mask": MASK,
        "old": OLD,
        "sampler": sampler,
        "micro": torch.arange(B) // 2,
    }
    return make_batch(columns | more, file="f", step=7)


def test_the_tokens_that_differ_are_counted_by_place():
    off = torch.zeros(B, T).bool()
    off[4:6, 9:] = True  # the last quarter of two responses of twelve
    found = zero_mismatch(batch(off))
    assert not found
    assert (found.tokens, found.differ) == (int(MASK.sum()), 6)
    assert (found.responses, found.responses_off) == (8, 2)
    assert found.first == (4, 9)
    assert found.quarters == pytest.approx((0, 0, 0, 6 / 20))
    assert found.shapes == {(2, 8): 0.0, (2, 12): pytest.approx(6 / 48)}
    assert found.ids == {14: (2, 4), 15: (2, 4), 16: (2, 4)}
    assert found.beyond == {0.01: 0.0, 0.1: 0.0, 0.5: 0.0}
    assert "token 9 of response 4" in str(found.failures[0])


def test_the_tails_are_numbers():
    sampler = OLD.clone()
    sampler[0, :3] -= 0.6
    sampler[1, :2] -= 0.2
    found = zero_mismatch(batch(sampler=sampler))
    tokens = int(MASK.sum())
    assert found.beyond == pytest.approx(
        {0.01: 5 / tokens, 0.1: 5 / tokens, 0.5: 3 / tokens}
    )


def test_equal_columns_show_nothing_unless_the_trainer_computed_them_again():
    with pytest.raises(InputError, match="a copy of a column gives equal bits too"):
        zero_mismatch(batch())
    with pytest.raises(InputError, match="a copy of a column"):
        zero_mismatch(batch(now=OLD - 0.01))
    assert zero_mismatch(batch(now=OLD))


def test_responses_of_older_weights_are_not_compared():
    off = torch.zeros(B, T).bool()
    off[4:6] = True
    version = torch.full((B,), 7)
    version[4:6] = 6
    found = zero_mismatch(batch(off, now=OLD, version=version))
    assert found and found.responses == 6
    with pytest.raises(InputError, match="equal bits are not the aim"):
        zero_mismatch(batch(off, version=version * 0))


def test_what_overshoots_zero_by_rounding_is_equal():
    """The trainer's columns are read with 0 in its place."""
    old = OLD.clone()
    old[0, 0] = 1e-6
    assert zero_mismatch(batch(old=old, sampler=old, now=old))


def test_tokens_without_a_number_are_left_out():
    sampler = OLD.clone()
    sampler[0, 0] = torch.nan
    found = zero_mismatch(batch(sampler=sampler, now=OLD))
    assert found and found.tokens == int(MASK.sum()) - 1


def test_the_command_says_where_and_what_it_could_not_show(tmp_path, capsys):
    """One differing token fails with its place; no difference is no proof without
    another policy; of a run the steps are counted.
    """
    off = torch.zeros(B, T).bool()
    off[4, 9] = True
    write(tmp_path / "a.npz", batch(off))
    assert main(["replay", str(tmp_path / "a.npz"), "--zero", "--only", "sampler"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  zero: 1 of 80 tokens differ, in 1 of 8 responses" in out
    assert "by shape of the micro-batch: 2 x 8: 0%, 2 x 12: 2%" in out
    write(tmp_path / "a.npz", batch())
    assert main(["replay", str(tmp_path / "a.npz"), "--zero", "--only", "sampler"]) == 2
    assert "not run  zero: the 80 tokens are equal, but" in capsys.readouterr().out
    # of a run, the steps
    write(tmp_path / "a.npz", batch(now=OLD))
    write(tmp_path / "b.npz", replace(batch(off), step=8))
    assert main(["replay", str(tmp_path), "--zero", "--only", "sampler"]) == 1
    out = capsys.readouterr().out
    assert "Failed: zero at 1 of 2 steps: 8" in out.splitlines()[0]
    assert "differing most often: id 14 (1 of 4)" in out
    main(["replay", str(tmp_path), "--zero", "--only", "sampler", "--json"])
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [s["zero"]["differ"] for s in steps] == [0, 1]
