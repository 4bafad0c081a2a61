# SPDX-License-Identifier: Apache-2.0
"""The rung `trl` of repro/run.sh at its real size, with random weights: Qwen2.5-0.5B's
architecture, made words and made problems.

Every 64th of the words is a boxed digit, so that a random model answers some problems.
The learning rate is above the rung's own, or no ratio would leave the bounds of an
objective in these few steps, and each micro-batch is compared with the reference.
Memory is taken apart for generation and for training; the process is killed once, after
a checkpoint, and started again.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.place import PartSetup, lines
from repro.with_trl import memory, train
from repro.with_verl.config.model import shape_of

# Qwen/Qwen2.5-0.5B-Instruct's config.json
CONFIG = {
    "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32_768,
    "max_window_layers": 21, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": True,
}  # fmt: skip
TRIAL = {
    "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
}  # fmt: skip
DIGITS, EVERY = 4, 64  # answers; one word of so many is a boxed digit
TEMPLATE = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
# with the rung's own, which warms up to 1e-6 in 10 steps, the ratios of 8 steps stay
# within 0.95 and 1.06
LEARNING_RATE = 2e-5
SAVE = 4  # steps between checkpoints: after the first generation


def make_model(folder: Path, small: bool, device: str) -> None:
    """Save a model with random weights, and a tokenizer with one token for each word.

    Args:
        folder: where both are saved.
        small: TRIAL's sizes instead of CONFIG's.
        device: where the weights are drawn.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    sizes = TRIAL if small else CONFIG
    words = ["<pad>", "<end>"] + [
        f"w{i}" if i % EVERY else f"\\boxed{{{i // EVERY % DIGITS}}} w{i}"
        for i in range(2, sizes["vocab_size"])
    ]
    level = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>")
    )
    level.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    PreTrainedTokenizerFast(
        tokenizer_object=level,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<pad>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        **sizes, pad_token_id=0, eos_token_id=1, bos_token_id=None, dtype="float32"
    )
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)


def make_data(folder: Path) -> None:
    """Write gsm8k_train.parquet and gsm8k_test.parquet with problems of a hundred made
    words and one digit as the answer.
    """
    from repro.with_verl.data import schema

    for split, count in (("train", 512), ("test", train.TEST)):
        rows = []
        for i in range(count):
            text = " ".join(f"w{65 + (i + k) % 60}" for k in range(100))
            digit = str(i % DIGITS)
            rows.append(schema.row("made", i, text, digit, "boxed", split))
        schema.write(folder / f"gsm8k_{split}.parquet", rows, {})


# ---- the run, in a process of its own ------------------------------------------------
def child(argv: list[str]) -> int:
    """Run repro.with_trl.train, changed: more checkpoints, a larger learning rate, no
    validation, each micro-batch compared with the reference, and the memory of its two
    phases written down.

    Args:
        argv: the file for the phases, "cpu" or "cuda", and the arguments of train.

    Returns:
        The exit status of train.
    """
    phases, device, *rest = argv
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.trainer_utils import IntervalStrategy

    train.BATCH["save_steps"] = SAVE
    train.BATCH["learning_rate"] = LEARNING_RATE
    train.BATCH["warmup_steps"] = 0
    settings = train.settings

    def without_validation(*arguments: Any) -> Any:
        """Return TRL's configuration without validations: one at the last step would be
        measured too.
        """
        config = settings(*arguments)
        config.eval_strategy = IntervalStrategy.NO
        return config

    train.settings = without_validation
    # AutoTokenizer would make Qwen2's own tokenizer, which splits words otherwise
    auto: Any = AutoTokenizer
    auto.from_pretrained = PreTrainedTokenizerFast.from_pretrained
    if device == "cpu":
        from benchmarks.gpu import on_cpu

        on_cpu.prepare()
    in_parts = train.in_parts

    def watched(trainer: type, count: int) -> type:
        """Return a class of the trainer that notes when it generates, and compares
        every micro-batch with the reference.
        """

        class Watched(in_parts(trainer, count)):  # type: ignore[misc]
            """Its base is known when it runs."""

            def __init__(self, *args: Any, **kw: Any) -> None:
                super().__init__(*args, **kw, parity={"every": 1})

            def _generate_single_turn(self, *args: Any, **kw: Any) -> Any:
                with generation(Path(phases)):
                    return super()._generate_single_turn(*args, **kw)

        return Watched

    train.in_parts = watched
    status = train.main(rest)
    note(Path(phases), "training")
    return status


@contextlib.contextmanager
def generation(phases: Path) -> Iterator[None]:
    """Write down the memory of the training before, and then that of the generation
    inside, with its seconds.
    """
    note(phases, "training")
    start = time.perf_counter()
    yield
    note(phases, "generation", time.perf_counter() - start)


def note(phases: Path, phase: str, seconds: float | None = None) -> None:
    """Append a row with the largest GPU memory since the last note, in bytes (0 without
    a GPU), and count anew from here.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.synchronize()
    row = {
        "phase": phase,
        "seconds": seconds,
        "allocated": torch.cuda.max_memory_allocated() if has_gpu else 0,
        "reserved": torch.cuda.max_memory_reserved() if has_gpu else 0,
    }
    with open(phases, "a", encoding="utf-8") as f:
        f.write(json.dumps(row) + "\n")
    if has_gpu:
        torch.cuda.reset_peak_memory_stats()


# ---- what is done with it ------------------------------------------------------------
def main(place: PartSetup) -> None:
    """Make the model and the data; train UP-DAPO, kill it, train it on; and train DAPO.
    Write a row of each.
    """
    folder = place.folder / "trl"
    folder.mkdir(parents=True, exist_ok=True)
    with place.row(run="model and data"):
        make_model(folder / "model", place.small, place.device)
        make_data(folder)
    estimate(place, folder)
    with place.row(run="up_dapo, killed") as row:
        row |= go(place, folder, "up_dapo", 8, "first", SAVE)
    with place.row(run="up_dapo, the same command again") as row:
        row |= go(place, folder, "up_dapo", 8, "again")
    with place.row(run="dapo") as row:
        row |= go(place, folder, "dapo", 4, "dapo")


def estimate(place: PartSetup, folder: Path) -> None:
    """Write a row of what memory.py estimates for this GPU; a trial pretends one of 80
    GB.
    """
    import torch

    size = 80e9
    if place.device == "cuda":
        size = float(torch.cuda.get_device_properties(0).total_memory)
    shape = shape_of(str(folder / "model"))
    micro_batch = train.micro_batch(size)
    together = memory.together(shape, size, micro_batch, train.LONGEST)
    place.write(
        estimate="memory.py",
        micro_batch=micro_batch,
        together=together,
        training=memory.training(shape, micro_batch, train.LONGEST),
        generating=memory.generating(shape, together, train.LONGEST),
        cache=memory.cache(shape, together, train.LONGEST),
        words=memory.words(shape, size, micro_batch, train.LONGEST, together),
    )


def go(
    place: PartSetup,
    folder: Path,
    objective: str,
    steps: int,
    log_name: str,
    ends_at: int = 0,
) -> dict[str, Any]:
    """Run a training, and return what it left.

    Args:
        place: where.
        folder: of the model, the data and the runs.
        objective: its name.
        steps: optimizer steps.
        log_name: the name of its log and of its file of phases.
        ends_at: step of a checkpoint, two seconds after which the process is killed;
            0: it is not killed.

    Returns:
        status, steps (logged rows), phases (rows of memory), checkpoints (names of
        folders) and text (the end of the log).
    """
    phases = folder / f"phases-{log_name}.jsonl"
    command = [
        sys.executable, "-m", "benchmarks.gpu", "--child", str(phases), place.device,
        objective, "--against", "none", "--steps", str(steps), "--model", str(folder / "model"),
        "--data", str(folder), "--out", str(folder / "runs"),
    ]  # fmt: skip
    run = folder / "runs" / f"{objective}-seed1-{steps}"
    log_file = folder / f"{log_name}.log"
    with open(log_file, "a", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                checkpoint = run / f"checkpoint-{ends_at}" / "trainer_state.json"
                if ends_at and checkpoint.exists():
                    time.sleep(2)  # it generates the next batch
                    process.kill()
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.kill()
    text = log_file.read_text(encoding="utf-8")
    print(text[-8000:], flush=True)
    return {
        "status": process.returncode,
        "steps": steps_of(run),
        "phases": lines(phases),
        "checkpoints": sorted(p.name for p in run.glob("checkpoint-*")),
        "text": text[-3000:],
    }


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Return all rows that a run logged, of every process that continued it."""
    return [row for part in sorted(run.glob("steps-*.jsonl")) for row in lines(part)]
