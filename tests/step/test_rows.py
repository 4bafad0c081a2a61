# SPDX-License-Identifier: Apache-2.0
"""The rows that upref makes: a sampler could have made them, and loops of several kinds
can take them.
"""

from functools import partial

import pytest
import torch
from loops import T, policy_step, qwen3, right

import upref
from upref.advantages import group_norm
from upref.step import check_step
from upref.step.inputs.rows import DESIGNS, make_rows


@pytest.mark.parametrize("vocabulary", [60, 96, 196])
@pytest.mark.parametrize("end", [0, 1, 2, -1])
@pytest.mark.parametrize("seed", range(3))
def test_an_end_token_ends_each_response_but_one_of_full_length(vocabulary, end, seed):
    end %= vocabulary
    longest = max(design.response_length for design in DESIGNS)
    for row in make_rows(vocabulary, seed, end=end):
        assert end not in row.response[:-1] and row.trains[-1]
        assert (row.response[-1] == end) == (len(row.response) < longest)


def masked_behind_the_end(model, rows):
    """Run the right step on responses that train up to their first end token alone. It
    writes into the rows.
    """

    def cut(r):
        return r.response.index(2) + 1 if 2 in r.response else len(r.response)

    for r in rows:
        r.trains = [t and i < cut(r) for i, t in enumerate(r.trains)]
    policy_step(model, rows)


@pytest.mark.parametrize("seed", range(3))
def test_a_loop_that_masks_behind_the_end_is_right(seed):
    assert check_step(masked_behind_the_end, qwen3(), "dapo", temperature=T, seed=seed)


# ---- groups and rewards --------------------------------------------------------------
@pytest.mark.parametrize("size", [2, 4, 8])
def test_responses_of_a_group_share_their_prompt(size):
    seen = []

    def step(model, rows):
        seen.extend(rows)
        policy_step(model, rows)

    assert check_step(step, qwen3(), "dapo", temperature=T, group_size=size)
    prompts = [tuple(r.prompt) for r in seen]
    assert [prompts[i] == prompts[0] for i in range(8)] == [i < size for i in range(8)]
    assert [r.group for r in seen] == [i // size for i in range(8)]
    assert len({tuple(r.response) for r in seen}) == 8


def one_prompt(model, rows):
    """Compute DAPO's gradient with all responses scored behind one prompt, and
    advantages normalized here from their rewards.
    """
    R = torch.tensor([r.reward for r in rows])
    A = (R - R.mean()) / (R.std() + 1e-4)
    total = sum(sum(r.trains) for r in rows)
    for r, a in zip(rows, A, strict=True):
        z = (
            model(input_ids=torch.tensor([rows[0].prompt + r.response])).logits[
                0, len(r.prompt) - 1 : -1
            ]
            / T
        )
        ratio = (
            z.log_softmax(-1)[range(len(r.response)), r.response] - torch.tensor(r.old)
        ).exp()
        J = torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
        (-(J * torch.tensor(r.trains)).sum() / total).backward()


def test_a_loop_with_one_prompt_that_normalizes_inside():
    """The loop agrees with advantages of its own epsilon, given as a function or as
    numbers, and not with the objective's.
    """
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.2, 1.0]
    check = partial(
        check_step,
        one_prompt,
        qwen3(),
        "dapo",
        temperature=T,
        group_size=8,
        rewards=rewards,
    )
    assert check(advantages=partial(group_norm, eps=1e-4))
    assert not check(explain=False)  # the objective's own has eps = 1e-6
    A = group_norm(
        torch.tensor(rewards, dtype=torch.float64),
        torch.zeros(8, dtype=torch.int64),
        eps=1e-4,
    )
    assert check(advantages=A.tolist())


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (dict(group_size=3), "group_size is 2, 4, 8 or None, got 3"),
        (dict(rewards=[1.0]), "rewards are 8 finite numbers, one for each response"),
        (dict(rewards=[float("nan")] * 8), "rewards are 8 finite numbers"),
        (dict(advantages=group_norm), "pass rewards= as well"),
        (
            dict(rewards=[1.0] * 8, rows=make_rows(96, end=2)),
            "rewards is of the rows that upref makes",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(how, sentence):
    with pytest.raises(upref.InputError, match=sentence):
        check_step(right, qwen3(), "dapo", temperature=T, **how)
