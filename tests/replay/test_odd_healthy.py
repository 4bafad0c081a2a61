# SPDX-License-Identifier: Apache-2.0
"""Odd dumps of healthy runs: no check fails, whatever the objective that ran.

Tokens are drawn from independent contexts, each with a sharpness of its own.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from upref import advantages as estimators
from upref.replay import loss, make_batch, replay

OBJECTIVES = ("dapo", "grpo", "cispo", "gspo", "up_dapo", "dr_grpo")
STEP = 9
ROUNDING = 0.003  # logits of the trainer are off by so much
UPDATE = 0.1  # the same, since the first optimizer step on the responses


@dataclass(frozen=True)
class Size:
    """What a dump consists of: prompts, responses of each, tokens and ids."""

    prompts: int = 6
    group: int = 4
    length: int = 40
    vocabulary: int = 48
    sharpness: float = 6.0


def columns(seed, size=Size(), *, late=ROUNDING, lengths=None, rewards=None):
    """Return the columns of a healthy run with GRPO's advantages.

    Args:
        seed: of all that is drawn.
        size: of the dump.
        late: how far the trainer's logits are from the sampler's.
        lengths: of the responses; None: drawn.
        rewards: one for each response; None: 0 and 1, drawn.
    """
    g = torch.Generator().manual_seed(seed)
    rows = size.prompts * size.group
    shape = (rows, size.length, size.vocabulary)

    def normal() -> Tensor:
        return torch.randn(shape, generator=g)

    z = normal()
    sharpness = size.sharpness * torch.rand(*shape[:2], 1, generator=g)
    z = z.scatter_add(-1, z.argmax(-1, keepdim=True), sharpness)
    old = z + late * normal()
    now = old + UPDATE * normal()
    ids = torch.multinomial(z.softmax(-1).flatten(0, 1), 1, generator=g)
    ids = ids.view(shape[:2])
    if lengths is None:
        lengths = torch.randint(3, size.length + 1, (rows,), generator=g)
    mask = torch.arange(size.length)[None, :] < lengths[:, None]
    if rewards is None:
        rewards = torch.bernoulli(torch.full((rows,), 0.5), generator=g)
    group = torch.arange(rows) // size.group
    out = {"ids": ids, "mask": mask, "reward": rewards, "group": group}
    for name, logits in (("old", old), ("sampler", z), ("now", now)):
        column = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        out[name] = column.masked_fill(~mask, 0.0)
    return with_advantages(out, estimators.group_norm(rewards.double(), group))


def with_advantages(made, A):
    """The columns with an advantage for each response, [B]."""
    return made | {"adv": A[:, None] * made["mask"]}


def with_mask(made, mask):
    """The columns in which only these tokens train."""
    return made | {"mask": mask, "adv": made["adv"] * mask}


def mixed(made, other, is_other):
    """Return the columns, with the trainer's numbers of other columns on some tokens."""
    names = ("old", "now")
    return made | {n: torch.where(is_other, other[n], made[n]) for n in names}


# ---- kinds of dumps ------------------------------------------------------------------
def one_response(seed):
    return with_advantages(columns(seed, Size(1, 1)), torch.ones(1))


def groups_of_one(seed):
    made = columns(seed, Size(12, 1))
    return with_advantages(made, 2.0 * made["reward"] - 1)


def equal_rewards(seed):
    return columns(seed, rewards=torch.ones(24))


def lengths_of_one_to_many(seed):
    lengths = torch.tensor([1, 1, 2, 600, 3, 5, 8, 1])
    return columns(seed, Size(2, 4, 600, 12), lengths=lengths)


def not_a_number_in_masked_slots(seed):
    made = columns(seed)
    names = ("old", "sampler", "now", "adv")
    return made | {n: made[n].masked_fill(~made["mask"], math.nan) for n in names}


def without_a_sampler(seed):
    made = columns(seed)
    del made["sampler"]
    return made


def without_a_reward(seed):
    made = columns(seed)
    del made["reward"], made["group"]
    return made


def three_decimals(seed):
    made = columns(seed, Size(sharpness=14.0))
    return made | {"sampler": made["sampler"].round(decimals=3)}


def two_decimals_on_both_sides(seed):
    made = columns(seed, Size(sharpness=14.0))
    return made | {n: made[n].round(decimals=2) for n in ("old", "sampler")}


def bfloat16_sampler(seed):
    made = columns(seed)
    return made | {"sampler": made["sampler"].bfloat16().double()}


def certain(seed):
    return columns(seed, Size(sharpness=300.0))


def first_token_alone(seed):
    made = columns(seed, Size(8, 8))
    order = made["mask"].cumsum(1)
    return with_mask(made, made["mask"] & (order == 1))


def last_token_alone(seed):
    made = columns(seed, Size(8, 8))
    order = made["mask"].cumsum(1)
    return with_mask(made, made["mask"] & (order == order[:, -1:]) & (order > 0))


def two_ids(seed):
    return columns(seed, Size(8, 8, length=3, vocabulary=2))


def late(seed):
    return columns(seed, late=0.6)


def very_late(seed):
    return columns(seed, late=2.5)


def half_of_the_responses_late(seed):
    is_late = torch.arange(24) % 2 == 1
    made = mixed(columns(seed), columns(seed, late=1.0), is_late[:, None])
    return made | {"version": torch.where(is_late, STEP - 6, STEP)}


def first_tokens_late(seed):
    """Return the columns of a rollout that went on after an update: the first twelve
    tokens are older.
    """
    is_late = (torch.arange(40) < 12).expand(24, 40)
    made = mixed(columns(seed), columns(seed, late=1.0), is_late)
    return made | {"version": torch.where(is_late, STEP - 6, STEP)}


def padded_on_the_left(seed):
    """Return healthy columns whose padding is in front."""
    made = columns(seed)
    free = (~made["mask"]).sum(1).tolist()
    return {
        name: x
        if x.ndim == 1
        else torch.stack([r.roll(n) for r, n in zip(x, free, strict=True)])
        for name, x in made.items()
    }


def tools(seed):
    """Return healthy columns of up to 80 tokens in which a tool wrote columns 20 to 39
    of every second response; the sampler has NaN there.
    """
    made = columns(seed, Size(length=80))
    mask = made["mask"].clone()
    mask[::2, 20:40] = False
    made = with_mask(made, mask)
    return made | {"sampler": made["sampler"].masked_fill(~mask, math.nan)}


def untrained_responses(seed):
    made = columns(seed)
    trains = torch.arange(24) % 7 != 3
    return with_mask(made, made["mask"] & trains[:, None])


def equal_responses(seed):
    """Return healthy columns of six responses, each eight times with rewards of its
    own.
    """
    made = columns(seed, Size(6, 1))
    rows = torch.arange(6).repeat_interleave(8)
    made = {name: x[rows] for name, x in made.items()}
    rewards = torch.rand(48, generator=torch.Generator().manual_seed(seed))
    made |= {"reward": rewards, "group": rows}
    return with_advantages(made, estimators.group_norm(rewards.double(), rows))


def part_of_a_generation(seed):
    """Return the columns of a mini-batch that cuts groups."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randperm(32, generator=g)[:16]
    return {name: x[rows] for name, x in columns(seed, Size(4, 8)).items()}


def rewards_shaped_after_the_record(seed):
    made = columns(seed, Size(4, 8))
    shaped = made["reward"] - 0.01 * made["mask"].sum(1)
    return with_advantages(made, estimators.group_norm(shaped.double(), made["group"]))


def advantages_of_a_teacher(seed):
    made = columns(seed)
    noise = torch.rand(made["old"].shape, generator=torch.Generator().manual_seed(seed))
    ref = (made["old"] - 0.3 * noise) * made["mask"]
    return made | {"ref": ref, "adv": ref - made["old"]}


def clipped_advantages(seed):
    made = columns(seed)
    return made | {"adv": made["adv"].clamp(-0.8, 0.8)}


def micro_batches_of_ranks(seed):
    rows = torch.arange(24)
    return columns(seed) | {"micro": rows // 6, "rank": rows // 12}


def on_policy(seed):
    made = columns(seed)
    return made | {"now": made["old"]}


KINDS = (
    one_response,
    groups_of_one,
    equal_rewards,
    lengths_of_one_to_many,
    not_a_number_in_masked_slots,
    without_a_sampler,
    without_a_reward,
    three_decimals,
    two_decimals_on_both_sides,
    bfloat16_sampler,
    certain,
    first_token_alone,
    last_token_alone,
    two_ids,
    late,
    very_late,
    half_of_the_responses_late,
    first_tokens_late,
    padded_on_the_left,
    tools,
    untrained_responses,
    equal_responses,
    part_of_a_generation,
    rewards_shaped_after_the_record,
    advantages_of_a_teacher,
    clipped_advantages,
    micro_batches_of_ranks,
    on_policy,
)


def failures(kind, seed):
    """Return what fails in a dump of a run whose logged loss is its objective's."""
    objective = OBJECTIVES[seed % len(OBJECTIVES)]
    made = kind(seed)
    value = loss(make_batch(made, file="f", step=STEP), objective, 1.0).value
    batch = make_batch(made, file="f", step=STEP, logged={"loss": value})
    return replay([batch], objective).failures


@pytest.mark.parametrize("kind", KINDS)
def test_an_odd_dump_does_not_fail(kind):
    assert not failures(kind, KINDS.index(kind))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_none_of_twenty_seeds_fails(kind):
    found = {seed: failures(kind, seed) for seed in range(100, 120)}
    assert not any(found.values()), found
