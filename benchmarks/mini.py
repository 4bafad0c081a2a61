# SPDX-License-Identifier: Apache-2.0
"""Speed of the miniature, as ratios within one process on one thread.

    python -m benchmarks.mini                   all of it, some minutes
    python -m benchmarks.mini rollout           only one part: rollout, step, scaling or hours

All that is compared takes turns, round by round. A ratio is the median of the rounds'
ratios, with the lowest and the highest; a rate is the median. Times are CPU seconds of
the process: other work on the machine disturbs them less. Tokens are those of the
responses, <eos> included and padding not.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers

from repro import engines
from repro.mini import tasks
from repro.mini.policy import bases, models
from repro.mini.policy.sample import sample
from repro.mini.tasks import response_mask
from repro.mini.train import loop
from repro.mini.train.checkpoint import Run
from repro.mini.train.measure import Tally
from repro.mini.train.rollout import rollout
from repro.mini.train.settings import Settings

PROMPTS, RESPONSES = 64, 16  # of a step
BASES = [
    ("walk", "countdown"),
    ("moe", "countdown"),
    ("chain", "chain"),
    ("vl", "geometry"),
]
ROOT = Path(__file__).parents[1]
BEFORE = "9d58855"  # the last commit before policy/packed.py
WHOLE = """
import json, sys, time
from pathlib import Path
import repro
assert repro.__path__[0].startswith(sys.argv[1])
try:
    from repro.mini.train import loop
    from repro.mini.train.settings import Settings
except ImportError:
    from repro.mini import train as loop
    from repro.mini.settings import Settings
s = Settings(**json.loads(sys.argv[3]))
start = time.process_time()
loop.train(s, Path(sys.argv[2]), say=lambda *_: None)
print(time.process_time() - start)
"""
# returns how many tokens it made, if that is to be known
Work = Callable[[], int | None]


def rounds(works: dict[str, Work], times: int) -> dict[str, list[float]]:
    """Of each work, tokens per CPU second in every round (or works per second), after
    one that warms up.
    """
    rates: dict[str, list[float]] = {name: [] for name in works}
    for i in range(times + 1):
        for name, work in works.items():
            start = time.process_time()
            made = work()
            rate = (made or 1) / (time.process_time() - start)
            if i:
                rates[name].append(rate)
    return rates


def ratio(rates: list[float], others: list[float]) -> str:
    """The median of the rounds' ratios, with the lowest and the highest."""
    r = [rate / other for rate, other in zip(rates, others, strict=True)]
    return f"{statistics.median(r):6.2f} ({min(r):.2f} .. {max(r):.2f})"


def sampler(model, prompts, length: int, responses: int = RESPONSES) -> Work:
    """The sampler of the miniature."""
    generator = tasks.generator("benchmark")

    def work() -> int:
        return int(sample(model, prompts, responses, length, generator).mask.sum())

    return work


def generate(model, prompts, length: int, responses: int = RESPONSES) -> Work:
    """The same responses by transformers' `generate`."""
    ids = prompts["input_ids"]
    settings = {
        "do_sample": True,
        "top_k": 0,
        "max_new_tokens": length,
        "num_return_sequences": responses,
    }

    def work() -> int:
        generated = model.generate(ids, **settings)
        return int(response_mask(generated[:, ids.shape[1] :]).sum())

    return work


def vllm(base: str, prompts, length: int) -> dict[str, Work]:
    """Its CPU build as fast as it goes here, the whole batch at once; and with what a
    reproducible rollout needs.
    """
    engines.vllm_in_this_process()
    from vllm import LLM, SamplingParams

    inputs = [{"prompt_token_ids": ids} for ids in prompts["input_ids"].tolist()]
    room = prompts["input_ids"].shape[1] + length
    rows = PROMPTS * RESPONSES
    llm = LLM(
        str(bases.ROOT / base),
        dtype="float32",
        max_model_len=room,
        max_num_seqs=rows,
        max_num_batched_tokens=rows * room,
        enforce_eager=True,
    )
    models.deterministic()  # vLLM has its own mind of threads

    def work(settings: list[dict]) -> int:
        rules = [
            SamplingParams(n=RESPONSES, max_tokens=length, detokenize=False, **own)
            for own in settings
        ]
        results = llm.generate(inputs, rules, use_tqdm=False)
        return sum(len(o.token_ids) for result in results for o in result.outputs)

    bare = [{}] * PROMPTS
    full = [{"seed": RESPONSES * p, "logprobs": 0} for p in range(PROMPTS)]
    return {"vLLM": partial(work, bare), "vLLM+": partial(work, full)}


def rollouts(times: int) -> None:
    """Print how fast the samplers make a rollout, for each base."""
    print(
        f"Rollout of {PROMPTS} x {RESPONSES} responses, tokens per second, and how many times faster `sample` is"
    )
    heads = ["sample", "generate", "vLLM", "vLLM+"]
    print(
        f"{'base':8}{''.join(f'{h:>10}' for h in heads)}   {''.join(f'than {h:17}' for h in heads[1:])}"
    )
    for base, task_name in BASES[:3]:
        task, model = tasks.get(task_name), bases.load(base, task_name)
        prompts = models.inputs(task, task.problems("train", PROMPTS, 0))
        length = task.response_length
        works = {
            "sample": sampler(model, prompts, length),
            "generate": generate(model, prompts, length),
        }
        if base == "walk" and importlib.util.find_spec("vllm"):
            works |= vllm(base, prompts, length)
        rates = rounds(works, times)
        speeds = "".join(
            f"{statistics.median(rates[h]):10.0f}" if h in rates else f"{'-':>10}"
            for h in heads
        )
        versus = [ratio(rates["sample"], rates[h]) for h in heads[1:] if h in rates]
        print(
            f"{base:8}{speeds}   {''.join(f'{v:22}' for v in versus)}".rstrip(),
            flush=True,
        )
    if importlib.util.find_spec("vllm"):
        print(
            "vLLM+: with a seed for each response and the log-probabilities of its tokens, which `sample` gives too."
        )
    else:
        print(
            "vLLM is not installed here (repro/venv.sh smoke installs its CPU build), so it was not measured."
        )


def steps(times: int) -> None:
    """Print how long a step takes, and the share of each part, for each base."""
    print(f"One RL step of {PROMPTS} x {RESPONSES} responses, up_dapo, 16 minibatches")
    print(
        f"{'base':8}{'seconds':>8}{'sample':>8}{'score':>8}{'update':>8}   responses with an advantage"
    )
    for base, task_name in (b for b in BASES if (bases.ROOT / b[0]).exists()):
        works, alive = step(Settings(task=task_name, base=base))
        seconds = {
            name: statistics.median(1 / r for r in rates)
            for name, rates in rounds(works, times).items()
        }
        whole = sum(seconds.values())
        shares = "".join(f"{part / whole:8.0%}" for part in seconds.values())
        print(f"{base:8}{whole:8.2f}{shares}   {alive:.0%}", flush=True)


def hours(times: int) -> None:
    """Print how long whole runs take: the first round's, before the miniature was made
    fast and now, and the second's.
    """
    # as registered
    first = {"steps": 150}
    second = {"steps": 100, "lean_eval": True, "checkpoint_every": 50}
    with tempfile.TemporaryDirectory() as folder:
        old = checkout_before(Path(folder) / "before")
        runs = {
            f"first round, at {BEFORE}": (old, first),
            "first round, now": (ROOT, first),
            "second round, low dose, now": (ROOT, second),
        }
        seconds_of: dict[str, list[float]] = {name: [] for name in runs}
        for seed in range(times):
            for j, (name, (checkout, settings)) in enumerate(runs.items()):
                own = settings | {"objective": "up_dapo", "seed": seed}
                out = f"{folder}/{seed}-{j}"
                seconds_of[name].append(seconds_of_run(checkout, out, own))
    print(
        "Whole runs of up_dapo, another seed each round: seconds, runs an hour of one core"
    )
    for name, seconds in seconds_of.items():
        median = statistics.median(seconds)
        print(f"{name:28}{median:6.0f}{3600 / median:6.0f}")
    before, now, _ = ([1 / x for x in seconds] for seconds in seconds_of.values())
    print(f"now, of the first round's, times as many: {ratio(now, before).strip()}")


def checkout_before(folder: Path) -> Path:
    """Make a checkout of BEFORE in a folder, and return the folder."""
    folder.mkdir()
    tree = subprocess.run(
        ["git", "archive", BEFORE], cwd=ROOT, stdout=subprocess.PIPE, check=True
    ).stdout
    subprocess.run(["tar", "x", "-C", folder], input=tree, check=True)
    for package in ("repro", "repro/mini"):
        # without them an installed checkout would be taken for it
        (folder / package / "__init__.py").touch()
    return folder


def seconds_of_run(checkout: Path, out: str, settings: dict) -> float:
    """CPU seconds of a whole run, in a process of its own.

    Args:
        checkout: whose code runs.
        out: the folder of the run.
        settings: those that are not the default.
    """
    arguments = [str(checkout), out, json.dumps(settings)]
    done = subprocess.run(
        [sys.executable, "-c", WHOLE, *arguments],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.splitlines()[-1])


def step(s: Settings) -> tuple[dict[str, Work], float]:
    """The parts of loop.one_step, each on its own; and the share of the responses that
    an update computes.
    """
    run = Run(s)
    problems = run.task.problems("train", s.train_problems, 0)
    batch = rollout(run.policy, run.task, problems, s, 0)
    rows = torch.arange(len(batch.tokens))

    def again() -> None:
        rollout(run.policy, run.task, problems, s, 0)

    def score() -> None:
        quarter = rows[: len(rows) // 4]
        with torch.no_grad():
            prompts = batch.prompts_of(quarter)
            models.response_logits(
                run.base, *prompts, batch.tokens[quarter], batch.mask[quarter]
            )

    def update() -> None:
        tally = Tally(batch.tokens.shape[1])
        for part in rows.chunk(s.minibatches):
            loop.update(run, batch, None, part, tally)
        tally.numbers(run.objective, {})

    share = (batch.adv != 0).double().mean().item()
    return {"sample": again, "score": score, "update": update}, share


def scaling(times: int) -> None:
    """Of untrained Qwen3 policies whose responses rarely end: batch, length, size, each
    from the middle point.
    """
    print(
        "Scaling of an untrained Qwen3, tokens per second; learn: forward and backward of the same"
    )
    print(
        f"{'responses':>9}{'length':>7}{'hidden':>7}{'layers':>7}{'weights':>9}{'sample':>9}{'learn':>9}",
        end="",
    )
    print("   sample / generate")
    for n, length, hidden, layers in (
        (64, 16, 64, 2),
        (256, 16, 64, 2),
        (1024, 16, 64, 2),
        (4096, 16, 64, 2),
        (256, 64, 64, 2),
        (256, 120, 64, 2),
        (256, 16, 128, 4),
        (256, 16, 256, 4),
    ):
        task, model = tasks.get("countdown"), qwen3(hidden, layers)
        prompts = models.inputs(task, task.problems("train", n // RESPONSES, 0))
        works = {
            "sample": sampler(model, prompts, length),
            "generate": generate(model, prompts, length),
            "learn": learn(model, prompts, length),
        }
        rates = rounds(works, times)
        sample_speed = statistics.median(rates["sample"])
        learn_speed = statistics.median(rates["learn"])
        weights = f"{sum(p.numel() for p in model.parameters()) / 1000:.0f}k"
        print(
            f"{n:9}{length:7}{hidden:7}{layers:7}{weights:>9}{sample_speed:9.0f}{learn_speed:9.0f}",
            end="",
        )
        print(f" {ratio(rates['sample'], rates['generate'])}", flush=True)


def qwen3(hidden: int, layers: int):
    """An untrained Qwen3 of this width and depth, with the words of countdown."""
    torch.manual_seed(0)
    size = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "num_hidden_layers": layers,
        "max_position_embeddings": 256,
    }
    words = {
        "vocab_size": len(tasks.get("countdown").words),
        "tie_word_embeddings": True,
        **models.TOKENS,
    }
    config = transformers.Qwen3Config(**models.SIZE | size, **words)
    return models.ready(transformers.Qwen3ForCausalLM(config))


def learn(model, prompts, length: int) -> Work:
    """Forward and backward of sampled responses."""
    generator = tasks.generator("benchmark")
    tokens, mask, _, _ = sample(model, prompts, RESPONSES, length, generator)
    prompt = torch.arange(len(tokens) // RESPONSES).repeat_interleave(RESPONSES)

    def work() -> int:
        model.zero_grad()
        logits = models.response_logits(model, prompts, prompt, tokens, mask)
        logits.log_softmax(-1).mean().backward()
        return int(mask.sum())

    return work


def main() -> None:
    """Print the parts that are named, or all of them."""
    parts = {
        "rollout": (rollouts, 15),
        "step": (steps, 5),
        "scaling": (scaling, 3),
        "hours": (hours, 3),
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", choices=[[], *parts], help="default: all")
    parser.add_argument("--rounds", type=int, help="default: 15, 5, 3 and 3")
    args = parser.parse_args()
    models.deterministic()
    transformers.set_seed(0)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(
        f"float32, 1 thread, {platform.machine()}, {versions}, {engines.vllm_version() or 'no vLLM'}"
    )
    print(
        "medians (lowest .. highest) of rounds in which all that is compared takes its turn, by CPU seconds"
    )
    for name, (part, times) in parts.items():
        if name in (args.part or parts):
            print(f"\n{args.rounds or times} rounds. ", end="")
            part(args.rounds or times)


if __name__ == "__main__":
    main()
