# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a run, started again it ends as the run that nothing happened to,
to the bit; or says why not.
"""

import json
import multiprocessing
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from repro.mini import files
from repro.mini.train import checkpoint, command, loop
from repro.mini.train.checkpoint import Run
from repro.mini.train.failed_minibatch import NotFinite, keep_minibatch
from repro.mini.train.rollout import rollout
from repro.mini.train.settings import Settings
from upref.errors import InputError

ROOT = Path(__file__).parents[2]
S = Settings(
    steps=4,
    prompts=8,
    responses=4,
    minibatches=2,
    warmup=0,
    train_problems=100,
    eval_every=2,
    eval_problems=4,
    eval_samples=2,
    checkpoint_every=1,
)
LOGS = ("steps.jsonl", "evals.jsonl")


def contents(out):
    return [(out / name).read_bytes() for name in LOGS]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Train a run without interruption, and return its folder."""
    out = tmp_path_factory.mktemp("mini") / "whole"
    loop.train(S, out, say=lambda _: None)
    return out


def same_end(out, whole):
    assert contents(out) == contents(whole)
    last = f"checkpoints/step-{S.steps}/model.safetensors"
    assert (out / last).read_bytes() == (whole / last).read_bytes()
    assert json.loads((out / "done.json").read_text())["key"] == S.key


def test_again_is_the_same_and_another_seed_is_not(whole, tmp_path):
    loop.train(S, tmp_path / "again", say=lambda _: None)
    same_end(tmp_path / "again", whole)
    loop.train(replace(S, seed=1), tmp_path / "other", say=lambda _: None)
    assert contents(tmp_path / "other")[0] != contents(whole)[0]


def test_a_finished_run_is_not_run_again(whole):
    before = (whole / "done.json").stat().st_mtime_ns
    loop.train(S, whole, watch=lambda *_: pytest.fail("it ran"))
    assert (whole / "done.json").stat().st_mtime_ns == before


class Killed(BaseException):
    """No code catches this: as kill -9, but within one process."""


def test_killed_at_every_moment(whole, tmp_path, monkeypatch):
    """The run dies at the first touch of the disk, started again at the second after
    that, and so on to the end.
    """
    out, deaths = tmp_path / "run", 0
    touches = {"left": 0}

    def deadly(original):
        """Return the function, which raises Killed once the calls left are used up."""

        def touch(*args, **kwargs):
            if touches["left"] == 0:
                raise Killed
            touches["left"] -= 1
            return original(*args, **kwargs)

        return touch

    for owner, name in (
        (files, "flush"),
        (files.Log, "add"),
        (Path, "rename"),
        (Path, "write_bytes"),
        (shutil, "rmtree"),
    ):
        monkeypatch.setattr(owner, name, deadly(getattr(owner, name)))
    while not (out / "done.json").exists():
        touches["left"] = 2 + 7 * deaths
        try:
            loop.train(S, out, say=lambda _: None)
        except Killed:
            deaths += 1
    assert deaths >= 5
    same_end(out, whole)


def test_one_process_at_a_time_and_killed_for_real(whole, tmp_path, capsys):
    """A second process is refused while one trains; after kill -9 the run goes on from
    its checkpoint to the same end.
    """
    out, file = tmp_path / "run", tmp_path / "s.json"
    S.write(file)
    start = [sys.executable, "-m", "repro.mini.train", "--settings", file, "--out", out]
    victim = subprocess.Popen(start, cwd=ROOT, stderr=subprocess.DEVNULL)
    while not any((out / "checkpoints").glob("step-[23]")):
        assert victim.poll() is None
        time.sleep(0.01)
    before = contents(out)
    assert command.main(["--settings", str(file), "--out", str(out)]) == 2
    assert capsys.readouterr().err == (
        f"train: {out} is in use by another process that trains: wait for it or stop it.\n"
    )
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert not (out / "done.json").exists()
    assert all(
        now.startswith(then) for now, then in zip(contents(out), before, strict=True)
    )
    assert command.main(["--settings", str(file), "--out", str(out)]) == 0
    same_end(out, whole)


def test_killed_for_real_at_random_moments(whole, tmp_path):
    """Each process may live half as long again as the one before, up to one that
    finishes.
    """
    out, lives, g = tmp_path / "run", 0, random.Random(0)
    while not (out / "done.json").exists():
        lives += 1
        victim = multiprocessing.get_context("fork").Process(
            target=loop.train, args=(S, out)
        )
        victim.start()
        victim.join(g.uniform(0, 0.1 * 1.5**lives))
        victim.kill()
        victim.join()
    assert lives > 2
    same_end(out, whole)


def test_a_run_of_the_second_round_killed_for_real(tmp_path):
    """As dose_middle trains: two epochs, the lean evaluation, a checkpoint every second
    step only.
    """
    s = replace(S, lean_eval=True, epochs=2, lr=3e-4, checkpoint_every=2)
    loop.train(s, tmp_path / "whole", say=lambda _: None)
    out = tmp_path / "run"
    # killed in step 2, in step 3, and not at all
    for last in ("steps.jsonl", "checkpoints/step-2", "done.json"):
        victim = multiprocessing.get_context("fork").Process(
            target=loop.train, args=(s, out)
        )
        victim.start()
        while victim.is_alive() and not (out / last).exists():
            time.sleep(0.005)
        if last == "done.json":
            victim.join()
        victim.kill()
        victim.join()
    assert contents(out) == contents(tmp_path / "whole")
    model = f"checkpoints/step-{S.steps}/model.safetensors"
    assert (out / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()


@pytest.fixture
def interrupted(whole, tmp_path):
    """Stop a run after step 3, and return its folder: it has checkpoints of steps 2 and
    3, and lines of step 4 that no checkpoint knows of.
    """
    out = tmp_path / "run"

    def watch(step, _):
        return (_ for _ in ()).throw(Killed) if step == 4 else None

    with pytest.raises(Killed):
        loop.train(S, out, watch=watch, say=lambda _: None)
    assert [p.name for p in checkpoint.checkpoints(out)] == ["step-2", "step-3"]
    return out


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", "truncated"),
        ("model.safetensors", "one bit"),
        ("trainer.safetensors", "gone"),
        ("trainer.safetensors", "one bit"),
        ("provenance.json", "truncated"),
        ("config.json", "gone"),
    ],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    interrupted, whole, name, damage
):
    """With a file of the last checkpoint gone, cut or changed by a bit, the run goes on
    from the one before, to the same end.
    """
    file, said = interrupted / "checkpoints" / "step-3" / name, []
    content = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    loop.train(S, interrupted, say=said.append)
    assert "step-3" in said[0]
    assert "the checkpoint before it" in said[0]
    assert "going on from step 2" in said[1]
    same_end(interrupted, whole)


def test_without_any_whole_checkpoint_it_starts_over(interrupted, whole):
    for folder in checkpoint.checkpoints(interrupted):
        (folder / "trainer.safetensors").write_bytes(b"")
    loop.train(S, interrupted, say=lambda _: None)
    same_end(interrupted, whole)


def test_a_shortened_log_is_one_sentence(interrupted):
    (interrupted / "steps.jsonl").write_text("")
    with pytest.raises(InputError, match="shorter than when the checkpoint was made"):
        loop.train(S, interrupted, say=lambda _: None)


@pytest.mark.parametrize("name", LOGS)
def test_one_digit_changed_in_a_log_is_one_sentence(name, interrupted):
    """Of the same length, before the checkpoint: the run would end with a log that
    nobody wrote.
    """
    text = (interrupted / name).read_text()
    at = text.index(".") + 1
    (interrupted / name).write_text(
        text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
    )
    with pytest.raises(
        InputError, match=f"{name} is not what it was when the checkpoint was made"
    ):
        loop.train(S, interrupted, say=lambda _: None)


def test_done_json_has_the_digests_of_what_it_ends(whole):
    digests = json.loads((whole / "done.json").read_text())["sha256"]
    assert set(digests) == set(checkpoint.FINAL)
    assert all(files.sha256(whole / name) == digest for name, digest in digests.items())


def test_an_interrupt_is_one_sentence_and_status_130(tmp_path, whole):
    """Interrupt a run after its first checkpoint, go on, and find the end of an
    uninterrupted run.
    """
    file, out = tmp_path / "s.json", tmp_path / "run"
    S.write(file)
    start = [sys.executable, "-m", "repro.mini.train", "--settings", file, "--out", out]
    victim = subprocess.Popen(start, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not (out / "checkpoints" / "step-1").exists():
        assert victim.poll() is None
        time.sleep(0.01)
    victim.send_signal(signal.SIGINT)
    said = victim.communicate()[1]
    assert victim.returncode == 130 and "Traceback" not in said
    assert said.endswith(
        "python -m repro.mini.train: interrupted; the same command goes on from the last checkpoint.\n"
    )
    loop.train(S, out, say=lambda _: None)
    same_end(out, whole)


def test_another_run_s_folder_is_left_alone(whole):
    with pytest.raises(InputError, match="holds a run with other settings"):
        loop.train(replace(S, seed=5), whole)


# ---- what cannot go on ---------------------------------------------------------------
@contextmanager
def no_file_larger_than(size):
    """Limit the size of files while the context lasts, as a full disk does: the write
    that reaches the limit fails, in the middle of a line or a tensor.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "size",
    [100, 2500, 100_000, 600_000],
    ids=["settings", "log", "policy", "optimizer"],
)
def test_a_full_disk_is_one_sentence_and_loses_nothing(
    size, interrupted, whole, capsys
):
    """At a limit of the file size the command ends with status 2 and keeps its
    checkpoints; without it the run ends as the whole one.
    """
    S.write(interrupted.parent / "s.json")
    if size == 100:
        shutil.rmtree(interrupted)
    args = ["--settings", str(interrupted.parent / "s.json"), "--out", str(interrupted)]
    with no_file_larger_than(size):
        assert command.main(args) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("train: cannot write")
    if size > 100:
        assert [p.name for p in checkpoint.checkpoints(interrupted)] == [
            "step-2",
            "step-3",
        ]
        assert not list((interrupted / "checkpoints").glob(".*"))
    assert command.main(args) == 0
    same_end(interrupted, whole)


def test_an_unwritable_folder_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert command.main(["--steps", "1", "--out", str(tmp_path / "file" / "run")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("train: cannot write in") and err.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [
        ["--objective", "up_dappo"],
        ["--base", "wlak"],
        ["--task", "chess"],
        ["--steps", "0"],
        ["--settings", "none.json"],
        ["--minibatch", "none.pt"],
    ],
)
def test_bad_arguments_are_one_sentence(args, tmp_path, capsys):
    assert command.main([*args, "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("train: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "run" / "steps.jsonl").exists()


def test_a_loss_that_is_no_number_stops_and_can_be_repeated(
    tmp_path, capsys, monkeypatch
):
    """The minibatch is kept, and its command stops again until the code is mended."""
    args = [
        "--steps",
        "3",
        "--prompts",
        "8",
        "--responses",
        "4",
        "--minibatches",
        "2",
        "--eval-every",
        "0",
    ]
    args += ["--out", str(tmp_path / "run"), "--seed", "1"]
    original, calls = loop.models.response_logits, []

    def spoilt(*args):
        calls.append(1)
        logits = original(*args)
        # the base's and two minibatches a step
        return logits * float("nan") if len(calls) == 6 else logits

    monkeypatch.setattr(loop.models, "response_logits", spoilt)
    assert command.main(args) == 1
    err = capsys.readouterr().err
    kept = tmp_path / "run" / "minibatch-1-1.safetensors"
    assert "step 1, minibatch 1: loss nan" in err
    assert f"python -m repro.mini.train --minibatch {kept}" in err
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 1
    calls[:] = [1] * 5
    assert command.main(["--minibatch", str(kept)]) == 1  # it stops again
    assert "loss nan" in capsys.readouterr().err
    calls[:] = [1] * 6
    assert command.main(["--minibatch", str(kept)]) == 0  # mended
    assert "grad_norm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "says"), [(MemoryError, "not enough memory"), (KeyError, "Traceback")]
)
def test_only_a_loss_that_is_not_finite_is_status_1(
    error, says, tmp_path, capsys, monkeypatch
):
    def ends(*_, **__):
        raise error

    monkeypatch.setattr(loop, "train", ends)
    assert (
        command.main(["--out", str(tmp_path)]) == 2 and says in capsys.readouterr().err
    )


def test_a_kept_minibatch_of_another_version_is_one_sentence(tmp_path, capsys):
    """A minibatch that was kept is read again; one with a changed byte, or with other
    columns, is refused.
    """
    s = Settings(prompts=4, responses=2, minibatches=2)
    run = Run(s)
    batch = rollout(run.policy, run.task, run.task.problems("train", 8, 0), s, 0)
    said = keep_minibatch(
        run, batch, None, torch.arange(4), tmp_path, 0, NotFinite("loss nan")
    )
    kept = tmp_path / "minibatch-0-0.safetensors"
    assert str(kept) in said and command.main(["--minibatch", str(kept)]) == 0
    whole = kept.read_bytes()
    for at in range(len(whole) // 3, len(whole), len(whole) // 4):  # a byte of a tensor
        kept.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert command.main(["--minibatch", str(kept)]) == 2
        assert "its content is not what was written" in capsys.readouterr().err
    vars(batch)["logits"] = vars(batch).pop("state")  # as it was in another version
    keep_minibatch(
        run, batch, None, torch.arange(4), tmp_path, 0, NotFinite("loss nan")
    )
    capsys.readouterr()
    assert command.main(["--minibatch", str(kept)]) == 2
    assert (
        "is not a kept minibatch of this version: ValueError: logits, state of its batch"
        in capsys.readouterr().err
    )


def test_a_half_written_minibatch_is_one_sentence(tmp_path, capsys):
    path = tmp_path / "minibatch.safetensors"
    files.save_tree(path, {"step": 1, "rows": torch.arange(3)})
    content = path.read_bytes()
    for part in (content, content[:100], b"", b"\x80\x04K\x01."):
        path.write_bytes(part)
        assert command.main(["--minibatch", str(path)]) == 2
        err = capsys.readouterr().err
        assert "is not a kept minibatch" in err and err.count("\n") == 1


class Payload:
    """What a pickle runs when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_kept_minibatch_and_a_checkpoint_run_no_code(
    tmp_path, interrupted, whole, capsys
):
    """Put a pickle that would make a file in place of each, with the right digest, and
    find no file.
    """
    for path in (tmp_path / "minibatch-0-0.safetensors", tmp_path / "minibatch-0-0.pt"):
        torch.save({"settings": {}, "batch": Payload(tmp_path / "ran")}, path)
        assert command.main(["--minibatch", str(path)]) == 2
        assert "is not a kept minibatch" in capsys.readouterr().err
    for folder in checkpoint.checkpoints(interrupted):
        torch.save(Payload(tmp_path / "ran"), folder / checkpoint.TRAINER)
        facts = json.loads((folder / files.PROVENANCE).read_text())
        facts["sha256"][checkpoint.TRAINER] = files.sha256(folder / checkpoint.TRAINER)
        (folder / files.PROVENANCE).write_text(json.dumps(facts))
    with pytest.raises(InputError, match="cannot be read"):
        loop.train(S, interrupted, say=lambda _: None)
    assert not (tmp_path / "ran").exists()


def test_a_tree_comes_back_as_it_was(tmp_path):
    """Tensors, numbers and keys survive being saved, -0.0, integer keys and empty
    tensors among them; tuples become lists.
    """
    tree = {
        "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
        "groups": [{"betas": (0.9, 0.999), "on": None}],
        "é": -0.0,
    }
    tree["ring"] = [
        {"w": torch.ones(2, 3).t()},
        {"w": torch.zeros(0, dtype=torch.bool)},
    ]
    files.save_tree(tmp_path / "tree", tree)
    back = files.load_tree(tmp_path / "tree")
    assert back["state"][0]["step"] == 3 and list(back["state"]) == [0, 1]
    assert (
        back["groups"] == [{"betas": [0.9, 0.999], "on": None}]
        and str(back["é"]) == "-0.0"
    )
    assert (
        torch.equal(back["ring"][0]["w"], torch.ones(3, 2))
        and back["ring"][1]["w"].dtype == torch.bool
    )
