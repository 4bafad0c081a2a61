# SPDX-License-Identifier: Apache-2.0
"""A real vLLM as the sampler, and transformers as the trainer, both on a CPU.

    python -m tests.replay.engine LOGPROBS_MODE FOLDER

vLLM draws responses of a tiny model with its own log-probabilities, once for each entry
of DRAWS. The model is scored at the sampling temperature, as trainers do. Each goes
into FOLDER as a file of docs/dump.md. `logprobs_mode` is a setting of the whole engine:
raw_logprobs are of before the temperature and the cut, processed_logprobs of after
them.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from upref.replay.batch import make_batch
from upref.replay.files import write

DRAWS = {  # name of the file -> how tokens are drawn
    "cool": {"temperature": 0.7, "top_p": 1.0},
    "cool_cut": {"temperature": 0.7, "top_p": 0.9},
    "plain_cut": {"temperature": 1.0, "top_p": 0.9},
}
ENVIRONMENT = {  # one process and one thread: a tiny model needs no more
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
PROMPTS, GROUP, LENGTH = 8, 8, 20
SHARPER = 30.0  # times the logits of random weights, which are nearly uniform


def make_model(folder: Path) -> Any:
    """Save the tiny model of the smoke run, with sharper logits, for vLLM.

    Returns:
        The same model, of transformers.
    """
    from transformers import AutoModelForCausalLM

    from repro.with_verl.cpu import toy

    toy.make_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    model.model.norm.weight.data *= SHARPER
    model.save_pretrained(folder)
    return model


def start(mode: str, folder: Path) -> Any:
    """Return vLLM with the model of the folder; `mode` says which log-probabilities it
    reports.
    """
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    return LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=32,
        max_num_seqs=PROMPTS * GROUP,
        max_num_batched_tokens=1024,
        logprobs_mode=mode,
        distributed_executor_backend="uni",
    )


def recorded(
    engine: Any, model: Any, draw: dict[str, float]
) -> dict[str, torch.Tensor]:
    """Return columns of docs/dump.md: what the engine drew and reports, and what the
    trainer computes.
    """
    from vllm import SamplingParams

    prompts = [[3 + n, 4 + n] for n in range(PROMPTS)]
    sampling = SamplingParams(
        **draw, n=GROUP, logprobs=0, max_tokens=LENGTH, seed=1, ignore_eos=True
    )
    answers = engine.generate(
        [{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False
    )
    ids, sampler, group = [], [], []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        for response in answer.outputs:
            ids.append([*prompt, *response.token_ids])
            slots = zip(response.token_ids, response.logprobs, strict=True)
            sampler.append(
                [0.0] * len(prompt) + [slot[token].logprob for token, slot in slots]
            )
            group.append(number)
    drawn = torch.tensor(ids)
    logits = model(drawn).logits[:, :-1].double() / draw["temperature"]
    old = logits.log_softmax(-1).gather(-1, drawn[:, 1:, None])[..., 0]
    mask = torch.ones_like(drawn, dtype=torch.bool)
    mask[:, : len(prompts[0])] = False
    return {
        "ids": drawn,
        "mask": mask,
        "sampler": torch.tensor(sampler),
        "old": torch.nn.functional.pad(old, (1, 0)),
        "group": torch.tensor(group),
    }


def main(mode: str, folder: str) -> None:
    """Draw and record."""
    place = Path(folder)
    model = make_model(place / "model")
    engine = start(mode, place / "model")
    for name, draw in DRAWS.items():
        write(
            place / f"{name}.npz", make_batch(recorded(engine, model, draw), file=name)
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
