# SPDX-License-Identifier: Apache-2.0
"""Files that the frameworks' own writers wrote are read to the bit; the same numbers written by this test too.

files/written_by.json has the commit of each writer and the digest of each file.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from upref.errors import InputError
from upref.replay import advantages, gap, read

FILES = Path(__file__).parent / "files"
WRITTEN = json.loads((FILES / "written_by.json").read_text(encoding="utf-8"))
NEMO_RL, SLIME, MILES = FILES / "train_data_step12.jsonl", FILES / "slime_7.pt", FILES / "miles_7_0.pt"


@pytest.mark.parametrize("name", WRITTEN)
def test_the_files_are_as_they_were_written(name):
    assert hashlib.sha256((FILES / name).read_bytes()).hexdigest() == WRITTEN[name]["sha256"]


def test_nemo_rl_is_read_to_the_bit():
    batch = read(NEMO_RL)
    lines = [json.loads(line) for line in NEMO_RL.read_text(encoding="utf-8").splitlines()]
    assert (batch.step, len(batch.mask), len(batch.group.unique())) == (12, 16, 4)
    columns = {"ids": "token_ids", "adv": "advantages", "sampler": "generation_logprobs", "old": "prev_logprobs"}
    for name, key in columns.items():
        written = torch.tensor([line[key][0] for line in lines], dtype=torch.float64)
        assert torch.equal(getattr(batch, name)[batch.mask].double(), written[batch.mask])
    assert batch.reward.tolist() == [line["rewards"][0] for line in lines]


def test_the_default_advantages_of_nemo_rl_are_named():
    assert advantages(read(NEMO_RL)).estimator.startswith("leave_one_out over the standard deviation")


def test_slime_is_read_to_the_bit():
    batch = read(SLIME)
    held = torch.load(SLIME, weights_only=True)
    for i, sample in enumerate(held["samples"]):
        inside = batch.mask[i]
        for name, key in {"old": "log_probs", "sampler": "rollout_log_probs", "adv": "advantages"}.items():
            assert torch.equal(getattr(batch, name)[i][inside], sample[key].double())
        assert batch.ids[i][inside].tolist() == sample["tokens"][-sample["response_lengths"] :].tolist()
        assert batch.reward[i] == held["raw_reward"][sample["rollout_position"]]
    assert batch.rank.tolist() == [0, 1] * 8
    assert len(batch.micro.unique()) == 4 and len(batch.group.unique()) == 4


def test_advantages_over_the_wrong_rows_fail_in_slimes_file():
    """It was written with the mistake of THUDM/slime#2230: eight rows where a prompt has four."""
    found = advantages(read(SLIME))
    assert not found and "8 consecutive rows" in str(found.failures[0])


def test_miles_is_read_and_says_what_it_lacks():
    batch = read(MILES)
    assert gap(batch) and batch.version.tolist() == [6] * 8
    with pytest.raises(InputError, match="raw rewards"):
        advantages(batch)


# ---- written here in the same format ---------------------------------------------------------------------------------
def lines_of_nemo_rl(**changes):
    """Two responses to one prompt as `log_batched_dict_as_jsonl` writes them: every value has a batch axis of one."""
    row = {
        "content": [""], "rewards": [1.0], "input_lengths": [5], "token_ids": [[7, 8, 3, 4, 0]],
        "token_loss_mask": [[0, 0, 1, 1, 0]], "sample_loss_mask": [1.0], "advantages": [[0.5] * 5],
        "generation_logprobs": [[0.0, 0.0, -1.0, -2.0, 0.0]], "prev_logprobs": [[0.0, 0.0, -1.5, -2.5, 0.0]],
    }  # fmt: skip
    return [json.dumps(row | changes | {"idx": i}) for i in range(2)]


def batch_of(tmp_path, lines):
    path = tmp_path / "train_data_step3.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read(path)


def test_a_dropped_response_does_not_train(tmp_path):
    first, second = lines_of_nemo_rl()
    batch = batch_of(tmp_path, [first, second.replace('"sample_loss_mask": [1.0]', '"sample_loss_mask": [0.0]')])
    assert batch.mask.sum(1).tolist() == [2, 0]


def test_zeros_in_place_of_the_trainers_column_are_no_column(tmp_path):
    batch = batch_of(tmp_path, lines_of_nemo_rl(prev_logprobs=[[0.0] * 5]))
    with pytest.raises(InputError, match="force_on_policy_ratio"):
        gap(batch)


def test_the_rewards_that_train_are_the_filtered_ones(tmp_path):
    assert batch_of(tmp_path, lines_of_nemo_rl(filtered_rewards=[0.25])).reward.tolist() == [0.25, 0.25]


@pytest.mark.parametrize(("change", "words"), [
    ({"advantages": [[0.5] * 3]}, "adv has shape"),
    ({"token_ids": ["text"]}, "damaged"),
    ({"prev_logprobs": [[0, 0, None, -1, 0]]}, "damaged|nan"),
    ({"rewards": []}, "damaged"),
])  # fmt: skip
def test_an_altered_line_is_refused(tmp_path, change, words):
    with pytest.raises(InputError, match=words) as e:
        batch_of(tmp_path, lines_of_nemo_rl(**change))
    assert "\n" not in str(e.value)


def test_a_cut_line_is_refused(tmp_path):
    first, second = lines_of_nemo_rl()
    with pytest.raises(InputError, match="damaged or cut off"):
        batch_of(tmp_path, [first, second[: len(second) // 2]])


@pytest.mark.parametrize(("change", "words"), [
    ({"format_version": 1}, "format_version 1"),
    ({"samples": []}, "no sample"),
    ({"samples": [{"tokens": [1, 2]}]}, "damaged"),
    ({"rollout_id": None}, "damaged"),
])  # fmt: skip
def test_an_altered_dump_of_slime_is_refused(tmp_path, change, words):
    held = torch.load(SLIME, weights_only=True) | change
    torch.save(held, tmp_path / "7.pt")
    with pytest.raises(InputError, match=words):
        read(tmp_path / "7.pt")


def test_parts_of_responses_are_refused(tmp_path):
    torch.save(torch.load(MILES, weights_only=True) | {"cp_size": 2}, tmp_path / "m.pt")
    with pytest.raises(InputError, match="context parallel"):
        read(tmp_path / "m.pt")
