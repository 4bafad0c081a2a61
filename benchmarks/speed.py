# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of a loss, eager and compiled: upref, verl's and TRL's own
functions, and plain torch.

    python -m benchmarks.speed           [64, 4096] float32, as in docs/speed.md
    python -m benchmarks.speed --rows 8  a quick look

All run in one process on the same tensors, and all take their turn in each round. A
figure is the median over rounds of the CPU time beside that of a copy of one tensor in
the same round. Peak memory is what torch's allocator held at most, in tensors of that
shape. `upref` is Objective.J; `batch` is Objective.loss of a Rollouts, which is
validated in every call; `check` is that validation alone. `limit` is what memory takes:
log π_θ, log π_old, A and the mask are read once, and one gradient is written. What is compiled is the whole
function; verl's and TRL's have graph breaks where they log a number.
"""

import argparse
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import upref

GSPO = {
    "clip_ratio_low": 3e-4,
    "clip_ratio_high": 4e-4,
    "loss_agg_mode": "seq-mean-token-mean",
}
# verl's loss_mode, TRL's loss_type -> the reference of the same formula, its
# hyperparameters, and verl's config
PAIRS = [
    (
        "vanilla",
        "dapo",
        "dapo",
        {"c": 3.0},
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
    ),
    ("gspo", "grpo", "gspo", {}, GSPO),
    ("cispo", "", "cispo_verl", {}, {}),
    ("", "cispo", "cispo", {}, {}),
    ("sapo", "sapo", "sapo", {}, {}),
    ("geo_mean", "", "gmpo", {}, {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    ("dppo_tv", "", "dppo_tv_verl", {}, {}),
    ("dppo_kl", "", "dppo_kl_verl", {}, {}),
    ("", "", "dapo", {}, {}),
    ("", "", "up_dapo", {}, {}),
    ("", "", "up_gspo", {}, {}),
    ("", "", "m2po", {}, {}),
]
WHO = ("limit", "verl", "TRL", "torch", "upref", "batch", "check")
PEERS = ("verl", "TRL", "torch")
UNCOMPILED = ("limit", "batch", "check")
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def batch(rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw log π_θ, log π_old, advantages and mask, each [rows, tokens], always from
    one seed. At least half of each row trains, and log π_θ requires a gradient.
    """
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, tokens, generator=g) * 3
    lp = (old + 0.3 * torch.randn(rows, tokens, generator=g)).clamp(max=0)
    A = torch.randn(rows, 1, generator=g).expand(rows, tokens).contiguous()
    lengths = torch.randint(tokens // 2, tokens + 1, (rows, 1), generator=g)
    mask = torch.arange(tokens)[None] < lengths
    return lp.requires_grad_(), old, A, mask


# ---- the losses ----------------------------------------------------------------------
def plain(lp: Tensor, old: Tensor, A: Tensor, mask: Tensor) -> Tensor:
    """Return DAPO's loss with a dual clip, as one writes it without a library."""
    ratio = (lp - old).exp()
    J = torch.minimum(ratio * A, ratio.clamp(0.8, 1.28) * A)
    J = torch.where(A < 0, torch.maximum(J, 3 * A), J)
    return -(J * mask).sum() / mask.sum()


def of_verl(mode: str, settings: dict[str, Any]) -> Loss:
    """Return verl's loss of this loss_mode, with these settings of its actor."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    function = get_policy_loss_fn(mode)
    config = ActorConfig(
        strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, **settings
    )

    def loss(lp: Tensor, old: Tensor, A: Tensor, mask: Tensor) -> Tensor:
        """Return the loss, the first of what verl's function returns."""
        return function(old, lp, A, mask, config.loss_agg_mode, config)[0]

    return loss


def of_trl(mode: str, o: Any, hp: dict[str, Any], mask: Tensor) -> Loss:
    """Return the loss of TRL's GRPOTrainer, for a model that answers with the given
    log-probabilities.

    Args:
        mode: TRL's loss_type.
        o: the objective, whose hyperparameters the trainer is set to.
        hp: hyperparameters other than the objective's defaults.
        mask: [rows, tokens] of the batch, which the trainer counts once.
    """
    from upref_frameworks.trl import losses as trl

    cls, fields = trl.trainer_of(mode)
    trainer = trl._trainer(  # noqa: SLF001
        cls, tuple(sorted((fields | trl.settings_for(mode, o, hp)).items()))
    )
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    prompt, tokens = torch.zeros(len(mask), 1, dtype=torch.int64), mask.long()
    entropy = torch.ones(mask.shape)
    constant = {
        "prompt_ids": prompt,
        "prompt_mask": prompt + 1,
        "completion_ids": 0 * tokens,
        "completion_mask": tokens,
        "num_items_in_batch": tokens.sum(),
    }

    def loss(lp: Tensor, old: Tensor, A: Tensor, mask: Tensor) -> Tensor:
        """Return the trainer's loss. It has the mask of the outer function; the
        argument is not read.
        """
        inputs = constant | {"advantages": A[:, 0], "old_per_token_logps": old}
        value = trainer._compute_loss(trl._StandIn(lp, entropy), inputs)  # noqa: SLF001
        trainer._metrics["train"].clear()  # noqa: SLF001
        return value

    return loss


def losses(pair: tuple, mask: Tensor) -> dict[str, Loss]:
    """Return the losses of one formula by contestant: verl, TRL and torch where they
    have it, then upref and batch.

    Args:
        pair: a row of PAIRS.
        mask: [rows, tokens] of the batch, which TRL's trainer counts once.
    """
    verl, trl, name, hp, settings = pair
    o = upref.get(name)

    def of_upref(lp: Tensor, old: Tensor, A: Tensor, mask: Tensor) -> Tensor:
        return -o.J(lp, old, A, mask, **hp)

    def of_batch(lp: Tensor, old: Tensor, A: Tensor, mask: Tensor) -> Tensor:
        return o.loss(upref.Rollouts(lp, old, A, mask), **hp)

    by_contestant: dict[str, Loss] = {}
    if verl:
        by_contestant["verl"] = of_verl(verl, settings)
    if trl:
        by_contestant["TRL"] = of_trl(trl, o, hp, mask)
    if name == "dapo" and hp:
        by_contestant["torch"] = plain
    return by_contestant | {"upref": of_upref, "batch": of_batch}


def check_of_batch(o: upref.Objective, *tensors: Tensor) -> bool:
    """Validate a batch as Objective.loss does in every call; return whether the
    objective can take it.
    """
    b = upref.Rollouts(*tensors)
    return not o.one_adv or b.one_adv_per_response


# ---- what they take ------------------------------------------------------------------
def step(loss: Loss, lp: Tensor, *rest: Tensor) -> None:
    """Run forward and backward of a loss, and drop the gradient."""
    loss(lp, *rest).backward()
    lp.grad = None


def measured(
    runs: dict[str, Callable[[], object]], x: Tensor, rounds: int
) -> dict[str, float]:
    """Time functions relative to a copy of a tensor.

    Args:
        runs: name -> what is timed.
        x: the tensor that is copied.
        rounds: how often; in each round all take their turn, the copy too.

    Returns:
        Name -> the median over rounds of its time over the copy's; `copy` is there too,
        as 1.
    """
    target = torch.empty_like(x)
    runs = {"copy": lambda: target.copy_(x)} | runs
    ratios: dict[str, list[float]] = {k: [] for k in runs}
    for _ in range(rounds):
        # a copy is so short that the mean needs more of them
        times = {k: clock(f, 50 if k == "copy" else 3) for k, f in runs.items()}
        for k in runs:
            ratios[k].append(times[k] / times["copy"])
    return {k: statistics.median(v) for k, v in ratios.items()}


def clock(f: Callable[[], object], n: int) -> float:
    """Return the mean CPU seconds of n calls, after one that warms up."""
    f()
    start = time.process_time()
    for _ in range(n):
        f()
    return (time.process_time() - start) / n


def peak(f: Callable[[], object], size: int) -> float:
    """Return the most memory that torch's allocator held at once during a call, in
    tensors of `size` bytes.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        f()
    events = [
        e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    steps = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(steps), default=0) / size


def machine() -> str:
    """Return a sentence on what this machine does at most: bytes a second of a copy,
    and float32 operations a second of a matrix product.
    """
    x = torch.ones(2**25)
    target = torch.empty_like(x)
    copies = [clock(lambda: target.copy_(x), 3) for _ in range(5)]
    read_and_written = 2 * x.nbytes
    return (
        f"this machine: {read_and_written / min(copies) / 1e9:.1f} GB/s of a copy, "
        f"{operations_per_second() / 1e9:.0f} GFLOP/s of float32 products"
    )


def operations_per_second() -> float:
    """Return how many operations of a float32 product this machine does at most in a CPU
    second.
    """
    a = torch.ones(1024, 1024)
    product = torch.empty_like(a)
    seconds = [clock(lambda: torch.mm(a, a, out=product), 3) for _ in range(5)]
    return 2 * len(a) ** 3 / min(seconds)


def memory_limit(tensors: tuple[Tensor, ...]) -> float:
    """Return the least time of a loss, in copies of one tensor, whose bytes are read and
    written.
    """
    gradient = tensors[0].nbytes
    return (sum(x.nbytes for x in tensors) + gradient) / (2 * tensors[0].nbytes)


def bool_store() -> str:
    """Time the comparison of two float tensors, eager and compiled; return a sentence
    with both in copies of one tensor.
    """
    x, y = torch.randn(2, 64, 4096)
    compiled = torch.compile(torch.gt)
    runs = {"eager": lambda: torch.gt(x, y), "compiled": lambda: compiled(x, y)}
    times = measured(runs, x, 7)
    return (
        f"a comparison of two tensors takes {times['eager']:.1f} copies, "
        f"compiled {times['compiled']:.1f}"
    )


def versions() -> str:
    """Return the versions of torch, verl and TRL in words."""
    from importlib.metadata import version

    return ", ".join(f"{name} {version(name)}" for name in ("torch", "verl", "trl"))


def table(title: str, rows: list[tuple[str, dict[str, float]]]) -> None:
    """Print a table with a column for each contestant, eager and compiled; `-` where
    one has no such loss. The limit, the batch and the check have no compiled form.
    """
    print(f"\n{title}")
    heads, keys = [], []
    for who in WHO:
        heads.append(who)
        keys.append(who)
        if who not in UNCOMPILED:
            heads.append("compiled")
            keys.append(f"{who} compiled")
    print(f"{'':14}" + "".join(f"{head:>10}" for head in heads))
    for name, numbers in rows:
        cells = (f"{numbers[key]:.1f}" if key in numbers else "-" for key in keys)
        print(f"{name:14}" + "".join(f"{cell:>10}" for cell in cells))


def runs_of(pair: tuple, tensors: tuple[Tensor, ...]) -> dict[str, Callable]:
    """Return what is timed of one formula, by column of the table: a step of each loss,
    eager and compiled, and the validation of the batch.
    """
    eager = losses(pair, tensors[3])
    compiled = {
        f"{who} compiled": torch.compile(loss, fullgraph=who == "upref")
        for who, loss in eager.items()
        if who != "batch"  # it reads numbers, which a graph cannot
    }
    runs: dict[str, Callable] = {
        who: partial(step, loss, *tensors) for who, loss in (eager | compiled).items()
    }
    runs["check"] = partial(check_of_batch, upref.get(pair[2]), *tensors)
    return runs


def print_compiled(times: list[tuple[str, dict[str, float]]]) -> None:
    """Print, for each formula, the time of the compiled upref divided by that of each
    compiled peer; then the largest of these.
    """
    print("\ncompiled upref beside the compiled other, times")
    for name, seconds in times:
        upref_seconds = seconds["upref compiled"]
        others = [who for who in PEERS if who in seconds]
        if others:
            ratios = [
                f"{who} {upref_seconds / seconds[f'{who} compiled']:.2f}"
                for who in others
            ]
            print(f"{name:14} {', '.join(ratios)}")
    most = max(
        (seconds["upref compiled"] / seconds[f"{who} compiled"], f"{name} beside {who}")
        for name, seconds in times
        for who in PEERS
        if who in seconds
    )
    print(f"{'largest':14} {most[0]:.2f}, {most[1]}")


def main() -> None:
    """Time every formula, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tensors = batch(args.rows, args.tokens)
    size = tensors[0].numel() * tensors[0].element_size()
    print(
        f"[{args.rows}, {args.tokens}] float32, {args.threads} of {os.cpu_count()} cores, {platform.machine()}"
    )
    print(
        f"{versions()}; {args.rounds} rounds; load {os.getloadavg()[0]:.1f} at the start",
        flush=True,
    )
    print(f"{machine()}; {bool_store()}", flush=True)
    limit = {"limit": memory_limit(tensors)}
    times, memory = [], []
    for pair in PAIRS:
        torch.compiler.reset()
        name, runs = pair[2], runs_of(pair, tensors)
        times.append((name, measured(runs, tensors[0].detach(), args.rounds) | limit))
        memory.append((name, {k: peak(f, size) for k, f in runs.items()}))
    table("CPU time, in copies of one tensor", times)
    table("peak memory, in tensors", memory)
    print_compiled(times)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
