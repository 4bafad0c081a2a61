# SPDX-License-Identifier: Apache-2.0
"""Train an objective in TRL beside another on one GPU: Qwen2.5-0.5B-Instruct on GSM8K,
boxed answers.

    bash repro/run.sh up_dapo trl [--against dapo] [--seeds 1,2,3] [--steps 300]
    bash repro/run.sh up_dapo trl --tiny          the same path on a CPU, with a model and data made here

Each run has a folder under runs/trl. The same command resumes it from its last
checkpoint, skips it when it is done, and ends with the report of all runs
(repro/with_verl/report.py). Exit status 1: a run differed from the reference. Exit
status 2: it could not start; what is missing is named.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import upref
from repro import Parser, parse_seeds
from repro.with_trl import memory
from repro.with_trl.log import StepLog
from repro.with_verl import report
from repro.with_verl.config.model import download, local, shape_of
from repro.with_verl.place import RUNS
from repro.with_verl.reward.score import compute_score, start_grader
from upref import InputError
from upref.replay.record import Stopped
from upref_frameworks.parity import ParityError

MODEL, DATA = "Qwen/Qwen2.5-0.5B-Instruct", RUNS / "data"
TEST = 128  # problems of the test set that a validation answers
# 32 prompts x 8 responses a generation, in four optimizer steps, so that three of four
# are off-policy
LONGEST = 512  # tokens of a response
BATCH = dict(num_generations=8, learning_rate=1e-6, warmup_steps=10, max_completion_length=LONGEST, logging_steps=1,
             save_steps=20, save_total_limit=2, eval_steps=50)  # fmt: skip
TINY = dict(num_generations=8, learning_rate=3e-3, warmup_steps=0, max_completion_length=6, logging_steps=1,
            save_steps=8, save_total_limit=2, eval_steps=12)  # fmt: skip
RESPONSES, UPDATES = 256, 4  # of a generation
TINY_STEPS, STEPS = 48, 300


def main(argv: list[str] | None = None) -> int:
    """Train the objectives that the options name with each seed, write the report of
    all runs, and return the exit status that the head of this file lists.
    """
    p = Parser(
        prog="trl", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("objective")
    p.add_argument(
        "--against", default="dapo", help="the other objective (dapo); none: no other"
    )
    p.add_argument(
        "--seeds", default="1", help="1,2,3: one run of each objective for each seed"
    )
    p.add_argument(
        "--steps", type=int, help=f"optimizer steps ({STEPS}; --tiny: {TINY_STEPS})"
    )
    p.add_argument(
        "--tiny", action="store_true", help="a model and data made here, on the CPU"
    )
    p.add_argument(
        "--model",
        default=MODEL,
        help="a directory, or a name whose files are in the hub's cache",
    )
    p.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help="where gsm8k_train.parquet and gsm8k_test.parquet are",
    )
    p.add_argument("--out", type=Path, default=RUNS / "trl")
    args = p.parse_args(argv)
    try:
        names = [args.objective]
        if args.against not in ("none", args.objective):
            names.append(args.against)
        seeds = parse_seeds(args.seeds)
        if args.steps is not None and args.steps < 1:
            raise InputError(f"--steps must be at least 1, got {args.steps}.")
        for name in names:
            upref.get(name)
        make_tiny(args) if args.tiny else check(args)
        folders = [run(args, name, int(seed)) for seed in seeds for name in names]
        report.main([*map(str, folders), "--out", str(args.out / "report")])
        return 0
    except (InputError, OSError) as e:
        print(f"trl: {e}", file=sys.stderr)
        return 2
    except (ParityError, Stopped) as e:
        print(f"trl: {e}", file=sys.stderr)
        return 1


def gpu() -> bool:
    """Return whether torch can use a GPU here."""
    import torch

    return torch.cuda.is_available()


def check(args: argparse.Namespace) -> None:
    """Refuse to start where something is missing; start the process that compares
    answers.

    Args:
        args: the options; `model` is replaced by the folder of its files.

    Raises:
        InputError: there is no GPU, the model, a data file or math-verify is not here;
            the sentence says what to do.
    """
    if not gpu():
        raise InputError(
            "no GPU is visible here; --tiny runs the same path on the CPU."
        )
    found = local(args.model)
    if found is None:
        raise InputError(
            f"the model {args.model} is not on this machine: `{download(args.model)}`."
        )
    for name in ("gsm8k_train", "gsm8k_test"):
        if not (args.data / f"{name}.parquet").exists():
            raise InputError(
                f"{args.data / name}.parquet is missing: {sys.executable} -m repro.with_verl.data.prepare {name} makes "
                "it; without a network, download its file elsewhere and add --from FILE."
            )
    start_grader()  # before the weights are loaded, which takes a minute
    args.model = str(found)


def make_tiny(args: argparse.Namespace) -> None:
    """Make a random Qwen3 of 100,000 parameters, and prompts of one digit whose answer
    is that digit in a box. A model that is there already stays, with its data.

    Args:
        args: the options; `out`, `model` and `data` are set to the folder OUT/tiny.
    """
    from repro.with_verl.cpu import toy
    from repro.with_verl.data import schema

    args.out = args.out / "tiny"
    args.model, args.data = str(args.out / "model"), args.out
    if not (args.out / "model").exists():
        args.out.mkdir(parents=True, exist_ok=True)
        toy.make_model(args.out / "model", words=toy.BOXED)
        for split, count in (("train", 256), ("test", 16)):
            digits = [str(i % toy.DIGITS) for i in range(count)]
            rows = [
                schema.row("toy", i, digit, digit, "boxed", split)
                for i, digit in enumerate(digits)
            ]
            schema.write(args.out / f"gsm8k_{split}.parquet", rows, {})


def run(args: argparse.Namespace, name: str, seed: int) -> Path:
    """Train one objective with one seed, from its last checkpoint if there is one.

    Args:
        args: the options.
        name: of the objective.
        seed: of the run.

    Returns:
        The folder of the run. If it was done before, nothing is trained.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

    from upref_frameworks.trl.training import GRPOTrainer

    steps = args.steps or (TINY_STEPS if args.tiny else STEPS)
    folder = args.out / f"{name}-seed{seed}-{steps}"
    if (folder / "done").exists():
        print(f"{folder.name}: done before")
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{folder.name}: {steps} steps", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    # bf16 would round away 1e-6
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    log = StepLog(folder)
    trainer = in_parts(GRPOTrainer, generated_together(args))(
        model,
        log.scored(reward),
        settings(args.tiny, folder, seed, steps),
        train_dataset=rows_of(args, "train"),
        eval_dataset=rows_of(args, "test").select(range(16 if args.tiny else TEST)),
        processing_class=tokenizer,
        objective=name,
        callbacks=[log],
        step_check=True,
    )
    last = last_whole(folder)
    log.begin(
        name, seed, steps, args, kept=int(last.name.rpartition("-")[2]) if last else 0
    )
    trainer.remove_callback(PrinterCallback)  # StepLog prints
    if not trainer.objective.batch_coupled:
        where = folder / "steps"
        upref.replay.watch(trainer, name, folder=where, keep="failed", known=True)
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    (folder / "done").touch()
    return folder


def generated_together(args: argparse.Namespace) -> int:
    """Return how many responses are generated at a time: all of a batch on a CPU; else
    what fits the GPU by the estimate, which is printed.
    """
    if not gpu():
        return RESPONSES
    shape, micro, longest = shape_of(args.model), micro_batch(gpu_bytes()), LONGEST
    count = memory.together(shape, gpu_bytes(), micro, longest)
    print(
        f"  estimate: {memory.words(shape, gpu_bytes(), micro, longest, count)}; "
        "docs/gpu.md has what was measured on an H100",
        flush=True,
    )
    return count


def in_parts(trainer: type, count: int) -> type:
    """Return the trainer that generates `count` responses at a time: TRL generates all
    of a batch together.

    Args:
        trainer: TRL's GRPOTrainer, or a class of it.
        count: responses.

    Returns:
        A class of it.
    """

    class InParts(trainer):
        """Its base is known when it runs."""

        def _generate_single_turn(
            self, prompt_ids: list, *rest: Any, **more: Any
        ) -> tuple[list, Any]:
            """Generate for `count` prompts at a time, and join the completions."""
            turn = super()._generate_single_turn
            parts = [
                turn(prompt_ids[i : i + count], *rest, **more)
                for i in range(0, len(prompt_ids), count)
            ]
            if len(parts) == 1:
                return parts[0]
            # the second is a sampler's log-probabilities, which there are with vLLM only
            return [ids for completions, _ in parts for ids in completions], None

    return InParts


def last_whole(folder: Path) -> Path | None:
    """Return the last checkpoint whose files can be read, None if there is none. A
    later one may be broken, if the process died while it was written; its name is
    printed.
    """
    import torch
    from safetensors import safe_open

    for checkpoint in sorted(
        folder.glob("checkpoint-*"), key=lambda p: -int(p.name.rpartition("-")[2])
    ):
        try:
            # the last file of a checkpoint
            json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
            for state in ("optimizer.pt", "scheduler.pt"):
                torch.load(checkpoint / state, weights_only=True, map_location="meta")
            safe_open(checkpoint / "model.safetensors", "pt")
            return checkpoint
        except Exception as e:  # torch.load raises whatever its parts raise
            print(
                f"  {checkpoint.name} is left out, it is not whole ({type(e).__name__})",
                flush=True,
            )
    return None


def gpu_bytes() -> float:
    """Return the bytes of the GPU that trains; 0 without one."""
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory) if gpu() else 0.0


def micro_batch(held: float) -> int:
    """Return how many responses a micro-batch has on a GPU of `held` bytes: as many as
    fit, a power of two that divides a step's responses.
    """
    if held > 30e9:
        return 8
    if held > 14e9:
        return 4
    return 2


def settings(tiny: bool, folder: Path, seed: int, steps: int) -> Any:
    """Return TRL's GRPOConfig for a run.

    Args:
        tiny: for the small model on a CPU.
        folder: of the run.
        seed: of the weights' and the data's random numbers.
        steps: optimizer steps.
    """
    import trl

    # a generation has `responses`, in UPDATES optimizer steps of equal size
    micro = 16 if tiny else micro_batch(gpu_bytes())
    responses = 128 if tiny else RESPONSES
    return trl.GRPOConfig(
        str(folder),
        max_steps=steps,
        seed=seed,
        data_seed=seed,
        per_device_train_batch_size=micro,
        steps_per_generation=responses // micro,
        gradient_accumulation_steps=responses // micro // UPDATES,
        per_device_eval_batch_size=16,
        num_generations_eval=1,
        eval_strategy="steps",
        save_strategy="steps",
        lr_scheduler_type="constant_with_warmup",
        beta=0.0,
        scale_rewards="group",
        temperature=1.0,
        bf16=not tiny,
        use_cpu=tiny,
        gradient_checkpointing=not tiny,
        report_to="none",
        disable_tqdm=True,
        **(TINY if tiny else BATCH),
    )


def rows_of(args: argparse.Namespace, split: str) -> Any:
    """Return the prepared file of a split, "train" or "test", as a data set of TRL with
    the columns prompt and answer.
    """
    import pyarrow.parquet as pq
    from datasets import Dataset

    table = pq.read_table(args.data / f"gsm8k_{split}.parquet").to_pylist()
    return Dataset.from_list(
        [
            {"prompt": r["prompt"], "answer": r["reward_model"]["ground_truth"]}
            for r in table
        ]
    )


def reward(
    prompts: list, completions: list, answer: list[str], **_: Any
) -> list[float]:
    """Return 1 for each completion whose last box has the answer, else 0. The function
    that scores verl's runs decides.
    """
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [
        compute_score("gsm8k", text, truth)["acc"]
        for text, truth in zip(texts, answer, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
