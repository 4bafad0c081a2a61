# SPDX-License-Identifier: Apache-2.0
"""Files that the frameworks' own writers wrote are read to the bit; the same numbers
written by this test too.

files/written_by.json has the commit of each writer and the digest of each file.
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from upref.errors import InputError
from upref.replay import advantages, gap, read
from upref_frameworks.skyrl.convert import to_recorded_batch

FILES = Path(__file__).parent / "files"
WRITTEN = json.loads((FILES / "written_by.json").read_text(encoding="utf-8"))
NEMO_RL, SLIME, MILES = (
    FILES / "train_data_step12.jsonl",
    FILES / "slime_7.pt",
    FILES / "miles_7_0.pt",
)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_files_are_as_they_were_written(name):
    assert (
        hashlib.sha256((FILES / name).read_bytes()).hexdigest()
        == WRITTEN[name]["sha256"]
    )


def test_nemo_rl_is_read_to_the_bit():
    batch = read(NEMO_RL)
    lines = [
        json.loads(line) for line in NEMO_RL.read_text(encoding="utf-8").splitlines()
    ]
    assert (batch.step, len(batch.mask), len(batch.group.unique())) == (12, 16, 4)
    columns = {
        "ids": "token_ids",
        "adv": "advantages",
        "sampler": "generation_logprobs",
        "old": "prev_logprobs",
    }
    for name, key in columns.items():
        written = torch.tensor([line[key][0] for line in lines], dtype=torch.float64)
        assert torch.equal(
            getattr(batch, name)[batch.mask].double(), written[batch.mask]
        )
    assert batch.reward.tolist() == [line["rewards"][0] for line in lines]


def test_the_default_advantages_of_nemo_rl_are_named():
    assert advantages(read(NEMO_RL)).estimator.startswith(
        "leave_one_out over the standard deviation"
    )


def test_slime_is_read_to_the_bit():
    batch = read(SLIME)
    held = torch.load(SLIME, weights_only=True)
    for i, sample in enumerate(held["samples"]):
        inside = batch.mask[i]
        for name, key in {
            "old": "log_probs",
            "sampler": "rollout_log_probs",
            "adv": "advantages",
        }.items():
            assert torch.equal(getattr(batch, name)[i][inside], sample[key].double())
        assert (
            batch.ids[i][inside].tolist()
            == sample["tokens"][-sample["response_lengths"] :].tolist()
        )
        assert batch.reward[i] == held["raw_reward"][sample["rollout_position"]]
    assert batch.rank.tolist() == [0, 1] * 8
    assert len(batch.micro.unique()) == 4 and len(batch.group.unique()) == 4


def test_advantages_over_the_wrong_rows_fail_in_slimes_file():
    """It was written with the mistake of THUDM/slime#2230: eight rows where a prompt
    has four.
    """
    found = advantages(read(SLIME))
    assert not found and "8 consecutive rows" in str(found.failures[0])


def test_miles_is_read_and_says_what_it_lacks():
    batch = read(MILES)
    assert gap(batch) and batch.version.tolist() == [6] * 8
    with pytest.raises(InputError, match="raw rewards"):
        advantages(batch)


# ---- written here in the same format -------------------------------------------------
def lines_of_nemo_rl(**changes):
    """Return the lines of two responses to one prompt as `log_batched_dict_as_jsonl`
    writes them: every value has a batch axis of one.
    """
    row = {
        "content": [""],
        "rewards": [1.0],
        "input_lengths": [5],
        "token_ids": [[7, 8, 3, 4, 0]],
        "token_loss_mask": [[0, 0, 1, 1, 0]],
        "sample_loss_mask": [1.0],
        "advantages": [[0.5] * 5],
        "generation_logprobs": [[0.0, 0.0, -1.0, -2.0, 0.0]],
        "prev_logprobs": [[0.0, 0.0, -1.5, -2.5, 0.0]],
    }
    return [json.dumps(row | changes | {"idx": i}) for i in range(2)]


def batch_of(tmp_path, lines):
    path = tmp_path / "train_data_step3.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read(path)


def test_a_dropped_response_does_not_train(tmp_path):
    first, second = lines_of_nemo_rl()
    batch = batch_of(
        tmp_path,
        [
            first,
            second.replace('"sample_loss_mask": [1.0]', '"sample_loss_mask": [0.0]'),
        ],
    )
    assert batch.mask.sum(1).tolist() == [2, 0]


def test_zeros_in_place_of_the_trainers_column_are_no_column(tmp_path):
    batch = batch_of(tmp_path, lines_of_nemo_rl(prev_logprobs=[[0.0] * 5]))
    with pytest.raises(InputError, match="force_on_policy_ratio"):
        gap(batch)


def test_the_rewards_that_train_are_the_filtered_ones(tmp_path):
    assert batch_of(
        tmp_path, lines_of_nemo_rl(filtered_rewards=[0.25])
    ).reward.tolist() == [0.25, 0.25]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"advantages": [[0.5] * 3]}, "adv has shape"),
        ({"token_ids": ["text"]}, "damaged"),
        ({"prev_logprobs": [[0, 0, None, -1, 0]]}, "damaged|nan"),
        ({"rewards": []}, "damaged"),
    ],
)
def test_an_altered_line_is_refused(tmp_path, change, words):
    with pytest.raises(InputError, match=words) as e:
        batch_of(tmp_path, lines_of_nemo_rl(**change))
    assert "\n" not in str(e.value)


def test_a_cut_line_is_refused(tmp_path):
    first, second = lines_of_nemo_rl()
    with pytest.raises(InputError, match="damaged or cut off"):
        batch_of(tmp_path, [first, second[: len(second) // 2]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format_version": 1}, "format_version 1"),
        ({"samples": []}, "no sample"),
        ({"samples": [{"tokens": [1, 2]}]}, "damaged"),
        ({"rollout_id": None}, "damaged"),
    ],
)
def test_an_altered_dump_of_slime_is_refused(tmp_path, change, words):
    held = torch.load(SLIME, weights_only=True) | change
    torch.save(held, tmp_path / "7.pt")
    with pytest.raises(InputError, match=words):
        read(tmp_path / "7.pt")


def test_parts_of_responses_are_refused(tmp_path):
    torch.save(torch.load(MILES, weights_only=True) | {"cp_size": 2}, tmp_path / "m.pt")
    with pytest.raises(InputError, match="context parallel"):
        read(tmp_path / "m.pt")


@pytest.fixture
def msgspec():
    return pytest.importorskip("msgspec", reason="prime-rl's files are read with it")


def test_prime_rl_is_read_to_the_bit(msgspec):
    """Its samples are packed and padded; msgspec reads what it wrote, without this
    reader.
    """
    batch = read(sorted((FILES / "step_7").iterdir()))
    assert (batch.step, len(batch.mask), batch.tokens) == (7, 16, 132)
    assert batch.rank.unique().tolist() == [0, 1] and len(batch.group.unique()) == 2
    # the first fields: ids, mask, advantages, log-probabilities
    written = {0: [], 1: [], 2: [], 3: []}
    for rank in range(2):
        for micro in msgspec.msgpack.decode(
            (FILES / f"step_7/rank_{rank}.bin").read_bytes()
        ):
            for field, values in written.items():
                values += [
                    value
                    for value, trains in zip(micro[field], micro[1], strict=True)
                    if trains
                ]
    for field, name in ((0, "ids"), (2, "adv"), (3, "sampler")):
        assert getattr(batch, name)[batch.mask].tolist() == written[field], name


def test_weights_that_prime_rl_leaves_out_are_one(tmp_path, msgspec):
    """One micro-batch has weights and the other one none: no weight is lost."""
    held = msgspec.msgpack.decode((FILES / "step_7/rank_0.bin").read_bytes())
    first, second = held
    size = len(first[0])
    weights = [0.5] * size
    trained = [place for place, trains in enumerate(first[1]) if trains]
    weights[trained[0]] = 0.0
    first[13:14] = [weights]
    file = tmp_path / "step_7/rank_0.bin"
    file.parent.mkdir()
    file.write_bytes(msgspec.msgpack.encode(held))
    batch = read(file)
    assert batch.tokens == len(trained) - 1 + sum(second[1])
    of_first = (batch.micro == 0)[:, None] & batch.mask
    assert batch.correction[of_first].unique().tolist() == [0.5]
    assert batch.correction[batch.mask & ~of_first].unique().tolist() == [1.0]


def test_what_prime_rl_lacks_is_told(msgspec):
    with pytest.raises(InputError, match="no log-probability of the trainer"):
        gap(read(sorted((FILES / "step_7").iterdir())))


def traces_of(batch, rewards):
    """Return traces.jsonl as prime-rl's file monitor writes it: a prompt, an answer
    that is a leaf, and a tree with a second leaf in every other trace.
    """
    lines = []
    for i, reward in enumerate(rewards):
        ids, trains = batch.ids[i].tolist(), batch.mask[i]
        first, end = int(trains.int().argmax()), int(trains.nonzero().max()) + 1
        answer = {"parent": 0, "token_ids": ids[first:end]}
        nodes = [{"token_ids": ids[:first]}, answer]
        if i % 2:
            nodes.append({"parent": 0, "token_ids": [90_001 + i]})
        parts = {
            "a": {"score": reward, "weight": 1.0},
            "b": {"score": 2.0, "weight": 0.5},
        }
        trace = {"nodes": nodes, "rewards": parts | {"unscored": None}}
        lines.append(json.dumps({"id": f"e{i}", "traces": [trace]}))
    return "\n".join(lines) + "\n"


def test_the_rewards_of_prime_rl_are_in_the_traces_beside(tmp_path, msgspec):
    """Weighted rewards are read from traces.jsonl; where a sample has no trace there
    are none, and a cut file is refused.
    """
    shutil.copytree(FILES / "step_7", tmp_path / "step_7")
    ranks = sorted((tmp_path / "step_7").iterdir())
    without = read(ranks)
    traces = tmp_path / "step_7/train/effective/traces.jsonl"
    traces.parent.mkdir(parents=True)
    advantages = without.adv.sum(1) / without.mask.sum(1)
    rewards = (advantages + 3.0).tolist()
    traces.write_text(traces_of(without, rewards))
    batch = read(ranks)
    assert batch.reward.tolist() == pytest.approx([r + 1 for r in rewards])
    # a step whose traces lack a sample has no rewards
    traces.write_text("\n".join(traces.read_text().splitlines()[1:]))
    assert read(ranks[0]).reward is None
    traces.write_text(traces.read_text()[:-40])
    with pytest.raises(InputError, match="no episode of prime-rl"):
        read(ranks)


def test_prompts_have_one_number_in_the_files_of_all_ranks(msgspec):
    """Eight samples of each prompt stand in two files."""
    ranks = [read(FILES / f"step_7/rank_{rank}.bin") for rank in range(2)]
    assert set(ranks[0].group.tolist()) & set(ranks[1].group.tolist())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[3].pop(),
        lambda m: m[8].append(1),
        lambda m: m.clear(),
        lambda m: m.append(0),
    ],
)
def test_an_altered_file_of_prime_rl_is_refused(tmp_path, msgspec, change):
    held = msgspec.msgpack.decode((FILES / "step_7/rank_0.bin").read_bytes())
    change(held[0])
    file = tmp_path / "step_7/rank_0.bin"
    file.parent.mkdir()
    file.write_bytes(msgspec.msgpack.encode(held))
    with pytest.raises(InputError, match=r"prime-rl|numbers|seq_lens"):
        read(file)


def test_skyrl_is_converted_to_the_bit():
    """Its columns end where the sequences end; the expected ones are those that went
    into its batch.
    """
    batch = read(FILES / "global_step_7_training_input.npz")
    expected = np.load(FILES / "skyrl_expected.npz")
    assert batch.step == 7 and torch.equal(
        batch.mask, torch.from_numpy(expected["mask"]) != 0
    )
    for name in ("adv", "old", "sampler"):
        assert torch.equal(
            getattr(batch, name).float(), torch.from_numpy(expected[name])
        ), name
    assert [len(batch.group[batch.group == g]) for g in batch.group.unique()] == [8, 8]


def test_a_pickle_of_skyrl_is_not_opened(tmp_path):
    """The pickle would write a file."""
    file = tmp_path / "global_step_3_training_input.pkl"
    trace = tmp_path / "opened"
    file.write_bytes(
        f"cpathlib\nPath.touch\n(cpathlib\nPath\n(S'{trace}'\ntRtR.".encode()
    )
    with pytest.raises(InputError, match=r"skyrl\.convert"):
        read(file)
    assert not trace.exists()


def test_a_training_input_without_its_mask_is_refused():
    with pytest.raises(InputError, match="lacks loss_mask"):
        to_recorded_batch({"sequences": torch.ones(2, 3)}, {}, "f")


def test_appended_rows_of_skyrl_are_left_out():
    held = {
        "sequences": torch.ones(3, 4, dtype=torch.long),
        "loss_mask": torch.ones(3, 2),
    }
    batch = to_recorded_batch(
        held,
        {"pad_size": 1, "policy_prompt_boundaries": [(0, 1), (1, 2)]},
        "global_step_9_x.pkl",
    )
    assert (len(batch.mask), batch.step, batch.group.tolist()) == (2, 9, [0, 1])


SKYRL = {
    "sequences": torch.ones(3, 4, dtype=torch.long),
    "loss_mask": torch.ones(3, 2),
}


@pytest.mark.parametrize(
    ("change", "metadata", "sentence"),
    [
        ({"loss_mask": torch.ones(3)}, {}, "loss_mask must be a tensor of two dim"),
        ({"sequences": torch.ones(3)}, {}, "sequences must be a tensor of two dim"),
        ({"advantages": [1.0, 2.0]}, {}, "advantages must be a tensor of two dim"),
        ({}, {"pad_size": 4}, "pad_size is 4, and it has 3 rows: none is left"),
    ],
)
def test_a_training_input_of_another_shape_is_refused(change, metadata, sentence):
    with pytest.raises(InputError, match=sentence):
        to_recorded_batch(SKYRL | change, metadata, "f")


def test_a_training_input_may_have_no_count_of_appended_rows():
    batch = to_recorded_batch(SKYRL, {"pad_size": None}, "f")
    assert len(batch.mask) == 3
