# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct on two-digit addition in verl: model, data, reward and settings
of `gpu_trial --size smollm2`. The task and the settings are those of docs/lm.md.
"""

import json
from pathlib import Path
from typing import Any

from repro.mini import tasks
from repro.mini.policy import smollm2
from repro.mini.tasks.addition import EXAMPLE, LINE, Addition
from repro.with_verl.config.compose import ACTOR
from upref.files import write_atomically

# SmolLM2's config.json, as far as verl's checks of sizes read it
SIZES: dict[str, Any] = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
PROBLEMS = 4000
ROLLOUT = "actor_rollout_ref.rollout"
SETTINGS: dict[str, object] = {
    "data.train_batch_size": 16,
    "data.max_prompt_length": 24,
    "data.max_response_length": Addition.response_length,
    f"{ACTOR}.ppo_mini_batch_size": 4,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 32,
    f"{ACTOR}.optim.lr": 5e-6,
    f"{ROLLOUT}.max_num_seqs": 128,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 128,
    # the largest tensor, the embedding, has 113 MB in float32
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 256,
    "reward.custom_reward_function.path": "pkg://repro.with_verl.addition",
    "trainer.save_freq": -1,
}
# the prompt is a text that goes on, and no dialog
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def text(a: int, b: int) -> str:
    """Return the prompt: a worked example, and the sum that is asked for."""
    c, d = EXAMPLE
    return f"{c} + {d} = {c + d}\n{a} + {b} ="


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, **_: Any
) -> dict[str, Any]:
    """Return verl's reward: 1 if the response is a blank, the sum and the end of the
    line, whatever follows; else 0. `pred` is its first line.
    """
    line, end, _rest = solution_str.partition("\n")
    right = float(end == "\n" and line == f" {ground_truth}")
    return {"score": right, "acc": right, "pred": line.strip()}


def make_data(path: Path) -> None:
    """Write the training problems of docs/lm.md to a parquet file, in the columns that
    verl reads.
    """
    import pandas

    problems = tasks.get("addition").problems("train", PROBLEMS, seed=0).tolist()
    prompts = [[{"role": "user", "content": text(a, b)}] for a, b in problems]
    answers = [{"style": "rule", "ground_truth": str(a + b)} for a, b in problems]
    pandas.DataFrame(
        {
            "data_source": "addition",
            "prompt": prompts,
            "ability": "addition",
            "reward_model": answers,
            "extra_info": [{"index": i} for i in range(len(problems))],
        }
    ).to_parquet(path)


def make_model(path: Path) -> None:
    """Make a folder that verl and vLLM load: links to the converted weights, a
    tokenizer that leaves the prompt as it is, and the end of the line as the end of a
    response.

    Args:
        path: the folder.

    Raises:
        InputError: the package with the weights is missing.
    """
    from transformers import AutoTokenizer

    source = smollm2.folder()
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    write_atomically(path / "config.json", json.dumps(config, indent=1) + "\n")
    end = json.dumps({"eos_token_id": LINE}) + "\n"
    write_atomically(path / "generation_config.json", end)
    for weights in source.glob("*.safetensors"):
        (path / weights.name).symlink_to(weights.resolve())
