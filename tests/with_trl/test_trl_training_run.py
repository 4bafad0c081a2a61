# SPDX-License-Identifier: Apache-2.0
"""The TRL rung on a CPU: two objectives, ended and resumed, one report; what is missing
is one sentence.
"""

import json
import os
import signal
import subprocess
import sys

import pytest

NEED = "`repro/venv.sh verl trl` installs what the TRL rung needs"
pytest.importorskip("trl", reason=NEED)
from repro.with_trl import memory, train  # noqa: E402
from repro.with_verl.config.model import download, shape_of  # noqa: E402
from repro.with_verl.machine import ladder  # noqa: E402
from repro.with_verl.place import ROOT  # noqa: E402


def steps(folder):
    rows = [
        json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()
    ]
    return [r["step"] for r in rows if "training/global_step" in r["data"]]


DIES_AT_STEP_9 = """
import builtins, os, signal, sys
from repro.with_trl import train

plain = builtins.print

def show(*words, **how):
    plain(*words, **how)
    if words and str(words[0]).startswith("  step    9 "):
        os.kill(os.getpid(), signal.SIGKILL)

builtins.print = show
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.trl
def test_it_trains_on_a_cpu_is_resumed_and_reported(tmp_path):
    """It kills itself, for a reader of its lines may come late on a busy machine."""
    given = ["up_dapo", "--tiny", "--steps", "12", "--out", str(tmp_path)]
    dying = [sys.executable, "-c", DIES_AT_STEP_9, *given]
    first = subprocess.run(dying, cwd=ROOT, capture_output=True, text=True)
    # the checkpoint of step 8 is there
    assert first.returncode == -signal.SIGKILL, first.stderr[-2000:]
    command = [sys.executable, "-m", "repro.with_trl.train", *given]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "  resumes from step 8" in again.stdout and "step    9 of 12" in again.stdout
    folders = [tmp_path / "tiny" / f"{name}-seed1-12" for name in ("up_dapo", "dapo")]
    assert all(steps(folder) == list(range(1, 13)) for folder in folders)
    report = (tmp_path / "tiny/report/report.md").read_text()
    assert (
        "## Health of up_dapo seed 1" in report
        and "## Health of dapo seed 1" in report
        and "\\boxed{" in report
    )


@pytest.mark.trl
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "no GPU is visible here; --tiny runs the same path on the CPU"),
        (["--seeds", "1,1"], "--seeds must be different whole numbers"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--against", "dappo"], "did you mean dapo"),
        (
            ["--tiny", "--out", "/proc/nowhere"],
            "No such file or directory: '/proc/nowhere'",
        ),
    ],
)
def test_what_is_missing_is_one_sentence(more, said, capsys, monkeypatch):
    monkeypatch.setattr(train, "gpu", lambda: False)
    assert train.main(["up_dapo", *more]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.trl
@pytest.mark.parametrize("kept", [0, 40])
@pytest.mark.parametrize(
    "name", ["trainer_state.json", "optimizer.pt", "scheduler.pt", "model.safetensors"]
)
def test_a_half_written_checkpoint_is_left_out(name, kept, tmp_path, capsys):
    """With a file of the last checkpoint cut, the one before counts; with a file of
    that missing too, none does.
    """
    import torch
    from safetensors.torch import save_file

    for step in (8, 16):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(
            json.dumps({"global_step": step, "log_history": [0.5] * 20})
        )
        save_file({"w": torch.ones(9)}, folder / "model.safetensors")
        for state in ("optimizer.pt", "scheduler.pt"):
            torch.save({"state": torch.ones(9)}, folder / state)
    assert train.last_whole(tmp_path).name == "checkpoint-16"
    whole = (tmp_path / "checkpoint-16" / name).read_bytes()
    (tmp_path / "checkpoint-16" / name).write_bytes(whole[:kept])
    assert train.last_whole(tmp_path).name == "checkpoint-8"
    (tmp_path / "checkpoint-8" / name).unlink()
    assert train.last_whole(tmp_path) is None
    assert capsys.readouterr().out.count("is left out, it is not whole") == 3


@pytest.mark.trl
@pytest.mark.parametrize(
    "words", [["--bogus"], ["--tiny", "stray"], ["--steps", "x"], ["--seeds"]]
)
def test_words_that_it_does_not_take_are_one_line(words, capsys):
    with pytest.raises(SystemExit) as end:
        train.main(["up_dapo", *words])
    err = capsys.readouterr().err
    assert (
        end.value.code == 2
        and err.startswith("trl: ")
        and words[-1] in err
        and err.count("\n") == 1
    )


@pytest.mark.trl
def test_without_a_network_it_says_what_to_download(capsys, monkeypatch, tmp_path):
    # not torch.cuda.is_available: libraries keep what that said
    monkeypatch.setattr(train, "gpu", lambda: True)
    assert train.main(["up_dapo", "--model", "nobody/nothing"]) == 2
    assert "`hf download nobody/nothing`" in capsys.readouterr().err
    assert (
        train.main(["up_dapo", "--model", str(tmp_path), "--data", str(tmp_path)]) == 2
    )
    assert "repro.with_verl.data.prepare gsm8k_train" in capsys.readouterr().err


LONGEST = train.LONGEST


@pytest.mark.trl
def test_keys_and_values_are_in_the_memory_of_a_small_card():
    """All 256 responses were generated together: their keys and values did not fit
    12 GB beside Adam's moments.
    """
    shape, card = shape_of(train.MODEL), 12 * 2**30
    assert memory.generating(shape, train.RESPONSES, LONGEST) > card
    count = memory.together(shape, card, train.micro_batch(card), LONGEST)
    assert (
        count < train.RESPONSES
        and memory.generating(shape, count, LONGEST) < card - memory.MARGIN
    )
    # of the GPUs for which the ladder names this rung
    smallest = ladder.SOLD_AS * ladder.TRL_GB * 1e9
    assert memory.together(shape, smallest, 2, LONGEST) >= 16
    with pytest.raises(
        train.InputError,
        match=r"training needs about \d+\.\d GB of the GPU, which has 8\.6",
    ):
        memory.together(shape, 8 * 2**30, 2, LONGEST)


def test_the_page_downloads_the_pinned_model():
    assert f"    {download(train.MODEL)}\n" in (ROOT / "docs/trl.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.trl
def test_autocast_keeps_keys_and_values_in_float32():
    """The estimate counts four bytes: half of that would let twice as many responses
    in.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = dict(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    config = Qwen2Config(**sizes, num_key_value_heads=2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        held = Qwen2ForCausalLM(config)(
            torch.zeros(3, 5, dtype=torch.long), use_cache=True
        ).past_key_values
    found = sum(
        x.numel() * x.element_size()
        for layer in held.layers
        for x in (layer.keys, layer.values)
    )
    from repro.with_verl.config.model import parse

    shape = parse(config.to_dict())
    assert found == memory.cache(shape, 3, 5 - memory.PROMPT), (
        "3 responses of 5 tokens in all"
    )


@pytest.mark.trl
@pytest.mark.parametrize(("count", "asked"), [(2, [2, 2, 1]), (5, [5]), (8, [5])])
def test_responses_are_generated_in_parts_and_keep_their_order(count, asked):
    class Trainer:
        def _generate_single_turn(self, prompt_ids, images, num_generations):
            self.seen.append(len(prompt_ids))
            return [[*ids, num_generations] for ids in prompt_ids], None

    trainer = train.in_parts(Trainer, count)()
    trainer.seen = []
    completions, logprobs = trainer._generate_single_turn(
        [[i] for i in range(5)], None, num_generations=7
    )
    assert (completions, logprobs) == (
        [[i, 7] for i in range(5)],
        None,
    ) and trainer.seen == asked


CHECK = """
import sys
from pathlib import Path
from types import SimpleNamespace
from repro.with_trl import train
train.gpu = lambda: True
train.check(SimpleNamespace(model="somebody/something", data=Path(sys.argv[1])))
from huggingface_hub import constants
print(constants.HF_HUB_OFFLINE)
"""


@pytest.mark.trl
def test_what_is_here_is_read_without_the_hub(tmp_path):
    """huggingface_hub reads the variable when it is imported; set later, each file
    waits for the network's time-out.
    """
    cached = tmp_path / "hub/models--somebody--something"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("0" * 40)
    (cached / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for file in (
        cached / "snapshots" / ("0" * 40) / "config.json",
        "gsm8k_train.parquet",
        "gsm8k_test.parquet",
    ):
        (tmp_path / file).write_text("{}")
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "TRANSFORMERS_"))
    }
    command = [sys.executable, "-c", CHECK, str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env | {"HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr[-2000:]
