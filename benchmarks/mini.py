# SPDX-License-Identifier: Apache-2.0
"""Speed of the miniature, as ratios within one process on one thread, in CPU seconds (a busy machine matters less).

python -m benchmarks.mini
"""

import time
from collections.abc import Callable

import torch
from transformers import set_seed

from repro.mini import policies, tasks, train
from repro.mini.measure import Tally
from repro.mini.rollout import rollout
from repro.mini.run import Run
from repro.mini.sample import sample
from repro.mini.settings import Settings


def seconds(work: Callable[[], object], times: int = 5) -> float:
    """CPU seconds, the median of so many after one that warms up."""
    work()
    taken = []
    for _ in range(times):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return sorted(taken)[times // 2]


def sampler(base: str, task_name: str) -> None:
    run = Run(Settings(task=task_name, base=base))
    task, n = run.task, 64
    prompts = policies.inputs(task, task.problems("train", n, 0))
    g, length = tasks.generator(0), task.response_length
    mine = seconds(lambda: sample(run.policy, prompts, 16, length, g))
    set_seed(0)
    how = {"do_sample": True, "top_k": 0, "max_new_tokens": length}
    theirs = seconds(lambda: run.policy.generate(prompts["input_ids"], num_return_sequences=16, **how))
    print(f"{base:8} 1024 responses of {length} tokens at most: sample {1024 * length / mine:7.0f} tokens/s, ", end="")
    print(f"transformers.generate {1024 * length / theirs:7.0f}: {theirs / mine:.1f} times")


def step(base: str, task_name: str) -> None:
    s = Settings(task=task_name, base=base)
    run = Run(s)
    problems = run.task.problems("train", s.train_problems, 0)
    batch = rollout(run.policy, run.task, problems, s, 0)
    rows = torch.arange(len(batch.tokens))
    quarter = rows[: len(rows) // 4]

    def score():
        with torch.no_grad():
            policies.response_logits(run.base, *batch.prompts_of(quarter), batch.tokens[quarter])

    def update():
        tally = Tally(batch.tokens.shape[1])
        for part in rows.chunk(s.minibatches):
            train.update(run, batch, None, part, tally)
        tally.numbers(run.objective, {})

    parts = {
        "sample": seconds(lambda: rollout(run.policy, run.task, problems, s, 0), 3),
        "score": seconds(score, 3),
        "update": seconds(update, 3),
    }
    whole = sum(parts.values())
    split = ", ".join(f"{name} {part / whole:.0%}" for name, part in parts.items())
    alive = (batch.adv != 0).double().mean()
    print(f"{base:8} RL step of 64 x 16 responses: {whole:.2f} s ({split}; {alive:.0%} have an advantage)")


if __name__ == "__main__":
    policies.deterministic()
    for base, task_name in (("walk", "countdown"), ("moe", "countdown"), ("chain", "chain")):
        sampler(base, task_name)
    for base, task_name in (("walk", "countdown"), ("moe", "countdown"), ("chain", "chain")):
        step(base, task_name)
