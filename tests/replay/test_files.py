# SPDX-License-Identifier: Apache-2.0
"""Files of docs/dump.md are read back; whatever is wrong with one is a single sentence,
before memory is taken.
"""

import contextlib
import io
import json
import pickle
import zipfile
from fractions import Fraction

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from upref.errors import InputError
from upref.replay import advantages, gap, loss, make_batch, read, read_steps, write
from upref.replay.files import other_files
from upref.replay.lines import summary_line
from upref.replay.schema import COLUMNS, RESPONSE_COLUMNS

B, T = 4, 6
generator = torch.Generator().manual_seed(1)
LENGTHS = torch.tensor([6, 3, 5, 1])
MASK = torch.arange(T)[None, :] < LENGTHS[:, None]
OLD = torch.where(MASK, -torch.rand(B, T, generator=generator), 0.0)
PADDED = {
    "ids": torch.where(MASK, torch.randint(1, 99, (B, T), generator=generator), 0),
    "mask": MASK,
    "old": OLD,
    "sampler": OLD - 0.25 * MASK,
    "now": OLD,
    "ref": OLD,
    "entropy": -OLD,
    "adv": MASK * 0.5,
    "sampler_ids": torch.zeros(B, T).long(),
    "turn": torch.ones(B, T).long() * MASK,
    "reward": torch.rand(B),
    "group": torch.tensor([0, 0, 1, 1]),
    "version": torch.arange(B),
    "micro": torch.arange(B) // 2,
    "rank": torch.zeros(B).long(),
    "correction": 1 + MASK * 0.25,
    "grad": OLD * 0.5,
}


def arrays(columns=PADDED, ragged=False, **more):
    """Return the arrays of a file of docs/dump.md; `more` replaces some. ragged:
    columns of tokens are [N] with offsets, not [B, T].
    """
    out = {k: v.numpy() for k, v in columns.items()}
    if ragged:
        inside = MASK.numpy()
        out = {k: v if k in RESPONSE_COLUMNS else v[inside] for k, v in out.items()}
        out["offsets"] = np.concatenate([[0], LENGTHS.cumsum(0).numpy()])
    return (
        out
        | {"schema": 1, "step": 3, "logged": json.dumps({"loss": 0.5}), "meta": "{}"}
        | more
    )


def saved(tmp_path, name="a.npz", **changes):
    path = tmp_path / name
    np.savez(path, **arrays(**changes))
    return path


def refused(path, words):
    with pytest.raises(InputError, match=words) as e:
        list(read_steps([path]))
    assert "\n" not in str(e.value) and len(str(e.value)) < 400


def same(batch):
    """Assert that a batch that was read has every column as it was written, at trained
    tokens.
    """
    assert set(batch.recorded) == set(COLUMNS)
    for name, value in PADDED.items():
        read_back = getattr(batch, name)
        inside = torch.ones(B, dtype=torch.bool) if value.ndim == 1 else MASK
        assert torch.equal(read_back[inside].double(), value[inside].double()), name
    assert (batch.step, batch.logged) == (3, {"loss": 0.5})


@pytest.mark.parametrize("ragged", [False, True])
def test_npz_is_read_back(tmp_path, ragged):
    same(read(saved(tmp_path, ragged=ragged)))


def test_safetensors_are_read_back(tmp_path):
    facts = {"schema": "1", "step": "3", "logged": '{"loss": 0.5}', "meta": "{}"}
    save_file(
        {k: v.clone() for k, v in PADDED.items()},
        tmp_path / "a.safetensors",
        metadata=facts,
    )
    same(read(tmp_path / "a.safetensors"))


def test_what_write_writes_is_read_back(tmp_path):
    batch = make_batch(PADDED, file="f", step=3, logged={"loss": 0.5})
    write(tmp_path / "b.npz", batch)
    same(read(tmp_path / "b.npz"))


def test_groups_may_be_texts(tmp_path):
    path = saved(tmp_path, group=np.array(["b", "b", "a", "a"]))
    assert read(path).group.unique(return_counts=True)[1].tolist() == [2, 2]


def test_ranks_of_a_step_are_joined_and_steps_come_in_order(tmp_path):
    """Files of one step become one batch with micro-batches numbered apart; the same
    responses twice, or two steps, are refused.
    """
    narrow = {
        k: v[:2, :3] if v.ndim == 2 else v[:2]
        for k, v in arrays().items()
        if getattr(v, "ndim", 0)
    }
    narrow["ids"] = narrow["ids"] + 1
    facts = {k: v for k, v in arrays().items() if k not in narrow}
    np.savez(tmp_path / "s4.npz", **(narrow | facts | {"step": 4}))
    np.savez(tmp_path / "s3_rank1.npz", **(narrow | facts))
    saved(tmp_path, "s3_rank0.npz")
    first, second = read_steps([tmp_path])
    assert (first.step, len(first.mask), first.mask.shape[1]) == (3, 6, 6)
    assert (second.step, len(second.mask)) == (4, 2)
    assert len(first.micro.unique()) == 3  # each file numbers its own micro-batches
    saved(tmp_path, "copy.npz")
    with pytest.raises(InputError, match="the same responses"):
        read([tmp_path / "copy.npz", tmp_path / "s3_rank0.npz"])
    with pytest.raises(InputError, match="2 steps"):
        read([tmp_path / "s4.npz", tmp_path / "s3_rank0.npz"])


# ---- bad files -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": 3.5}, "step is '3.5'; it must be a whole number"),
        ({"step": np.array([1, 2])}, "it must be a whole number"),
        ({"logged": '{"loss": {"a": 1}}'}, "loss under logged must be a number"),
        ({"logged": '{"loss": true}'}, "loss under logged must be a number"),
        ({"logged": '{"loss": 1' + "0" * 400 + "}"}, "beyond float32"),
        ({"logged": "{loss"}, "logged is no JSON"),
        ({"logged": "[" * 100_000}, "logged is no JSON"),
        ({"adv": np.full((B, T), 1e308)}, "adv holds numbers beyond"),
        ({"reward": np.full(B, 1e308)}, "reward holds numbers beyond"),
        ({"ids": np.full((B, T), -100)}, "ids is -100 at response"),
        ({"ids": np.full((B, T), 1e30)}, "ids must hold whole numbers"),
    ],
)
def test_a_number_that_is_none_is_named(tmp_path, changes, words):
    """And the file is not called damaged."""
    refused(saved(tmp_path, **changes), words)


def test_more_numbers_than_a_step_may_have_are_not_read(tmp_path):
    """They may take no room in the file: zeros, compressed."""
    path = tmp_path / "a.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|i1", "fortran_order": False, "shape": (2, 2**27)}
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ids.npy", header.getvalue())
    refused(path, "ids announces 268,435,456 numbers")


def test_a_missing_column_is_named(tmp_path):
    refused(
        saved(tmp_path, columns={k: v for k, v in PADDED.items() if k != "mask"}),
        "lacks the column mask",
    )
    path = saved(tmp_path, columns={k: v for k, v in PADDED.items() if k != "sampler"})
    with pytest.raises(InputError, match="needs the column sampler"):
        gap(read(path))


def test_an_unknown_column_is_named(tmp_path):
    refused(saved(tmp_path, extra=np.zeros(3)), "'extra' is no column")


@pytest.mark.parametrize("version", [None, 0, 2, "x"])
def test_another_schema_is_refused(tmp_path, version):
    fields = {k: v for k, v in arrays().items() if k != "schema"} | (
        {} if version is None else {"schema": version}
    )
    np.savez(tmp_path / "a.npz", **fields)
    refused(tmp_path / "a.npz", "schema version")


@pytest.mark.parametrize("name", ["old", "adv", "now", "ref", "entropy"])
def test_a_trained_nan_is_placed(tmp_path, name):
    value = PADDED[name].clone()
    value[1, 2] = torch.nan
    refused(
        saved(tmp_path, columns=PADDED | {name: value}),
        f"{name} is nan at response 1, token 2",
    )
    value = PADDED[name].clone()
    value[1, 5] = torch.nan  # masked: it may hold anything
    read(saved(tmp_path, columns=PADDED | {name: value}))


def test_positive_log_probabilities_are_placed(tmp_path):
    refused(saved(tmp_path, columns=PADDED | {"old": -PADDED["old"]}), "never positive")


@pytest.mark.parametrize("name", ["old", "reward", "sampler_ids"])
def test_other_lengths_are_refused(tmp_path, name):
    refused(
        saved(tmp_path, columns=PADDED | {name: PADDED[name][:3]}), f"{name} has shape"
    )
    ragged = arrays(ragged=True)
    np.savez(tmp_path / "r.npz", **(ragged | {name: ragged[name][:3]}))
    refused(tmp_path / "r.npz", f"{name} has shape")


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("shape", [(B,), (B, 1)])
def test_an_advantage_of_each_response_is_that_of_its_tokens(tmp_path, ragged, shape):
    of_responses = np.array([1.0, -1.0, 0.5, 2.0])
    columns = arrays(ragged=ragged) | {"adv": of_responses.reshape(shape)}
    np.savez(tmp_path / "a.npz", **columns)
    adv = read(tmp_path / "a.npz").adv
    for found, mask, expected in zip(adv, MASK, of_responses, strict=True):
        assert (found[: len(mask)][mask] == expected).all()


def test_advantages_of_neither_tokens_nor_responses_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", **(arrays(ragged=True) | {"adv": np.ones(3)}))
    refused(tmp_path / "a.npz", r"adv has shape \[3\], expected \[4, 6\]")


@pytest.mark.parametrize(
    "offsets", [[0, 6, 9, 14, 99], [0, 9, 6, 14, 15], [1, 6, 9, 14, 15], [0], [[0, 15]]]
)
def test_offsets_that_do_not_fit_are_refused(tmp_path, offsets):
    np.savez(
        tmp_path / "a.npz", **(arrays(ragged=True) | {"offsets": np.array(offsets)})
    )
    refused(tmp_path / "a.npz", "offsets must")


def test_values_of_other_kinds_are_refused(tmp_path):
    refused(
        saved(tmp_path, columns=PADDED | {"mask": MASK * 2.0}), "mask must hold 0 and 1"
    )
    refused(
        saved(tmp_path, columns=PADDED | {"ids": OLD}), "ids must hold whole numbers"
    )
    refused(saved(tmp_path, old=np.array([["x"] * T] * B)), "not numbers")
    refused(saved(tmp_path, columns=PADDED | {"mask": MASK & False}), "no token trains")


def test_a_pickle_is_never_run(tmp_path):
    """Put a pickle that would make a file into three kinds of files, and find each
    refused and none made.
    """

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    np.savez(tmp_path / "a.npz", **arrays(old=np.array([Bomb()], dtype=object)))
    refused(tmp_path / "a.npz", "pickle")
    torch.save(
        {"rollout_id": 1, "samples": [Bomb()], "format_version": 2}, tmp_path / "a.pt"
    )
    refused(tmp_path / "a.pt", "damaged|weights")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Bomb()))
    refused(tmp_path / "b.pt", "no recorded batch")
    assert not (tmp_path / "ran").exists()


def test_announced_sizes_are_not_believed(tmp_path):
    """Files that announce gigabytes, in an .npz or a .pt, are refused before memory is
    taken.
    """
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (10**5, 10**5)}
    )
    path = saved(tmp_path, columns={k: v for k, v in PADDED.items() if k != "turn"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("turn.npy", header.getvalue())
    refused(path, "announces 74.5 GiB|announces 80,000,000,000|damaged")
    torch.save(
        {
            "rollout_id": 1,
            "format_version": 2,
            "samples": [
                {
                    "tokens": torch.zeros(1).expand(10**11),
                    "loss_masks": torch.zeros(1).expand(10**11),
                }
            ],
        },
        tmp_path / "a.pt",
    )
    refused(tmp_path / "a.pt", "more than")


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, -40])
def test_a_cut_file_is_refused(tmp_path, keep):
    whole = saved(tmp_path).read_bytes()
    (tmp_path / "c.npz").write_bytes(
        whole[: int(len(whole) * keep) if 0 < keep < 1 else keep]
    )
    refused(tmp_path / "c.npz", "damaged|cut off|is empty")


def test_altered_bytes_are_refused_or_harmless(tmp_path):
    whole = bytearray(saved(tmp_path).read_bytes())
    for at in range(0, len(whole), 37):
        changed = bytearray(whole)
        changed[at] ^= 0xFF
        (tmp_path / "c.npz").write_bytes(changed)
        with contextlib.suppress(InputError):
            list(read_steps([tmp_path / "c.npz"]))


@pytest.mark.parametrize("number", ["0", "-3", "NaN", "1e999"])
@pytest.mark.parametrize("name", ["tokens", "ranks", "length"])
def test_counts_that_cannot_divide_are_refused(tmp_path, name, number):
    refused(
        saved(tmp_path, logged=f'{{"loss": 0.5, "{name}": {number}}}'),
        f"{name} under logged",
    )


def test_a_file_of_another_kind_is_refused(tmp_path):
    for name in ("a.pkl", "a.txt", "a.jsonl", "a.safetensors"):
        (tmp_path / name).write_text("hello\n")
        refused(tmp_path / name, "no recorded batch|damaged")
    refused(tmp_path / "none.npz", "there is no file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "there is no recorded batch")


# ---- folders -------------------------------------------------------------------------
def without(name, tmp_path, file):
    """Write a file of the same step with other responses, which lacks a column; return
    its path.
    """
    held = {k: v for k, v in arrays().items() if k != name}
    held["ids"] = held["ids"] + 1
    np.savez(tmp_path / file, **held)
    return tmp_path / file


def test_numbers_of_the_other_byte_order_are_read(tmp_path):
    same(read(saved(tmp_path, old=OLD.numpy().astype(">f8"))))


def test_a_column_that_one_file_lacks_is_named(tmp_path):
    lacks = without("turn", tmp_path, "b.npz")
    batch = read([saved(tmp_path), lacks])
    assert batch.turn is None and batch.dropped == {"turn": str(lacks)}
    assert f"turn is left out, because {lacks} lacks it" in summary_line(batch)


@pytest.mark.parametrize("name", ["now", "correction", "group", "ref"])
def test_no_loss_is_compared_where_one_file_lacks_what_enters_it(tmp_path, name):
    """Without the column the sum of the terms would be that of another run."""
    whole = saved(tmp_path)
    batch = read([whole, without(name, tmp_path, "b.npz")])
    with pytest.raises(InputError, match=f"column {name} of all files"):
        loss(batch, "grpo", 0.5)


def test_no_gap_is_taken_from_another_column_where_one_file_lacks_old(tmp_path):
    batch = read([saved(tmp_path), without("old", tmp_path, "b.npz")])
    assert batch.now is not None
    with pytest.raises(InputError, match="column old of all files"):
        gap(batch)


def test_a_prompt_has_one_number_in_all_files(tmp_path):
    """The prompt m has responses in both files; a and z in one."""
    first = saved(tmp_path, "a.npz", group=np.array(["a", "a", "m", "m"]))
    other = torch.full((B, T), 7)
    second = saved(tmp_path, "b.npz", ids=other, group=np.array(["m", "m", "z", "z"]))
    group = read([first, second]).group
    assert len(group.unique()) == 3
    assert group[2] == group[4] and group[0] != group[6]


def test_advantages_need_the_groups_of_all_files(tmp_path):
    batch = read([saved(tmp_path), without("group", tmp_path, "b.npz")])
    with pytest.raises(InputError, match="column group of all files"):
        advantages(batch)


def test_files_of_other_programs_in_a_folder_are_left_out(tmp_path):
    saved(tmp_path)
    others = ["eval.npz", "log.jsonl", "model.safetensors", "old.pt", "optimizer.pt"]
    np.savez(tmp_path / "eval.npz", accuracy=np.ones(3))
    (tmp_path / "log.jsonl").write_text('{"loss": 0.5}\n')
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save(1, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"rate": Fraction(1, 2)}, tmp_path / "optimizer.pt")
    (batch,) = read_steps([tmp_path])
    assert batch.file == str(tmp_path / "a.npz")
    assert [path.name for path in other_files([tmp_path])] == others
    (tmp_path / "a.npz").unlink()
    refused(tmp_path, "there is no recorded batch")


@pytest.mark.parametrize("name", ["cut.npz", "cut.pt"])
def test_a_cut_file_in_a_folder_is_no_file_of_another_program(tmp_path, name):
    """Its step would be judged without it."""
    content = saved(tmp_path).read_bytes()
    (tmp_path / name).write_bytes(content[:-40])
    refused(tmp_path, "damaged|cut off")


def test_an_empty_list_of_files_is_refused():
    with pytest.raises(InputError, match="the list of files is empty"):
        read([])


def test_files_without_a_step_are_said_to_name_none(tmp_path):
    without_step = {k: v for k, v in arrays().items() if k != "step"}
    files = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for file in files:
        np.savez(file, **without_step)
    with pytest.raises(InputError, match="2 of them name no step"):
        read(files)


def test_files_of_two_runs_are_not_joined(tmp_path):
    """Of two frameworks, or of one rank under one name in two folders."""
    other = {"ids": arrays()["ids"] + 1}
    for name, framework in (("a", "TRL 1.0"), ("b", "verl 0.9")):
        (tmp_path / name).mkdir()
        meta = json.dumps({"framework": framework})
        more = other if name == "b" else {}
        saved(tmp_path / name, f"{name}.npz", meta=meta, **more)
    with pytest.raises(InputError, match=r"of TRL 1\.0 and in .* of verl 0\.9: give"):
        read([tmp_path / "a" / "a.npz", tmp_path / "b" / "b.npz"])
    for name, more in (("c", {}), ("d", other)):
        (tmp_path / name).mkdir()
        saved(tmp_path / name, "step3-rank0.npz", **more)
    files = [tmp_path / name / "step3-rank0.npz" for name in ("c", "d")]
    with pytest.raises(InputError, match="of the same rank is in"):
        read(files)
    # another rank has a folder of its own
    saved(tmp_path / "d", "step3-rank0.npz", rank=np.ones(B, int), **other)
    assert len(read(files).mask) == 2 * B


def two_files(folder, names=("a.npz", "b.npz"), leave_out=(), **more):
    """Write two files of one step with other responses; return their paths."""
    held = {k: v for k, v in (arrays() | more).items() if k not in leave_out}
    paths = [folder / name for name in names]
    for shift, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        np.savez(path, **held | {"ids": held["ids"] + shift})
    return paths


def test_files_of_one_name_without_a_rank_are_not_joined(tmp_path):
    files = two_files(tmp_path, ("c/7.npz", "d/7.npz"), ["rank"])
    with pytest.raises(InputError, match=r"no column rank says that .* of two ranks"):
        read(files)


def test_more_responses_than_the_step_has_are_not_joined(tmp_path):
    stated = json.dumps({"loss": 0.1, "responses": B})
    with pytest.raises(InputError, match=f"hold {2 * B} responses, .* has {B}: they"):
        read(two_files(tmp_path, logged=stated))
    stated = json.dumps({"loss": 0.1, "responses": 2 * B})
    assert len(read(two_files(tmp_path, logged=stated)).mask) == 2 * B


@pytest.mark.parametrize(
    ("leave_out", "why"), [(["rank"], "name no rank"), ([], "are of one rank")]
)
def test_the_report_says_what_was_joined(leave_out, why, tmp_path):
    joined = read(two_files(tmp_path, leave_out=leave_out))
    told = f"its 2 files {why}, and are joined: if they are of two runs"
    assert told in summary_line(joined)


def test_a_column_that_a_file_holds_twice_is_refused(tmp_path):
    path = saved(tmp_path)
    content = io.BytesIO()
    np.save(content, arrays()["old"])
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning):
        archive.writestr("old.npy", content.getvalue())
    refused(path, "holds old.npy several times")
