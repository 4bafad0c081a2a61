# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of a loss, in copies of one tensor: upref eager, upref compiled, and verl's own function.

    python benchmarks/speed.py            [256, 4096] float32, as in docs/speed.md
    python benchmarks/speed.py --rows 32  a quick look

All run in one process, in turn, on the same tensors; every figure is the median over rounds of the ratio to the copy
measured in the same round. Peak memory is what torch's allocator held at most, in tensors of that shape.
"""

import argparse
import itertools
import platform
import statistics
import time

import torch

import upref

# verl's loss_mode -> the reference of the same formula, its hyperparameters, and verl's config
PAIRS = [
    ("vanilla", "dapo", {"c": 3.0}, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}),
    ("gspo", "gspo", {}, {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    ("cispo", "cispo_verl", {}, {}),
    ("sapo", "sapo", {}, {}),
    ("geo_mean", "gmpo", {}, {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    ("dppo_tv", "dppo_tv_verl", {}, {}),
    ("dppo_kl", "dppo_kl_verl", {}, {}),
    (None, "dapo", {}, {}),
    (None, "up_dapo", {}, {}),
    (None, "up_gspo", {}, {}),
    (None, "m2po", {}, {}),
]


def batch(rows: int, tokens: int):
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, tokens, generator=g) * 3
    lp = (old + 0.3 * torch.randn(rows, tokens, generator=g)).clamp(max=0).requires_grad_()
    A = torch.randn(rows, 1, generator=g).expand(rows, tokens).contiguous()
    mask = torch.arange(tokens)[None] < torch.randint(tokens // 2, tokens + 1, (rows, 1), generator=g)
    return lp, old, A, mask


def contestants(mode, name, hp, config, lp, old, A, mask):
    o = upref.get(name)

    def eager():
        (-o.J(lp, old, A, mask, **hp)).backward()
        lp.grad = None

    fast = torch.compile(lambda lp, old, A, mask: -o.J(lp, old, A, mask, **hp), fullgraph=True)

    def compiled():
        fast(lp, old, A, mask).backward()
        lp.grad = None

    runs = {"upref": eager, "compiled": compiled}
    if mode:
        from verl.trainer.ppo.core_algos import get_policy_loss_fn
        from verl.workers.config import ActorConfig

        f = get_policy_loss_fn(mode)
        cfg = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, **config)

        def verl():
            f(old, lp, A, mask, cfg.loss_agg_mode, cfg)[0].backward()
            lp.grad = None

        runs["verl"] = verl
    return runs


def measure(runs, x, rounds):
    """Median over rounds of time / time of the copy. All take turns in a round, the copy too, each warmed up."""
    target = torch.empty_like(x)
    runs = {"copy": lambda: target.copy_(x)} | runs
    ratios = {k: [] for k in runs}
    for _ in range(rounds):
        times = {k: clock(f) for k, f in runs.items()}
        for k in runs:
            ratios[k].append(times[k] / times["copy"])
    return {k: statistics.median(v) for k, v in ratios.items()}


def clock(f, n=5):
    f()
    start = time.perf_counter()
    for _ in range(n):
        f()
    return (time.perf_counter() - start) / n


def peak(f, size) -> float:
    """Most memory the allocator held at once during f, in tensors of `size` bytes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        f()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    steps = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(steps), default=0) / size


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", type=int, default=256)
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--threads", type=int, default=2)
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    lp, old, A, mask = batch(args.rows, args.tokens)
    size = lp.numel() * lp.element_size()
    print(
        f"[{args.rows}, {args.tokens}] float32, {args.threads} threads, {platform.machine()}, torch {torch.__version__}"
    )
    heads = ("verl", "upref", "upref/verl", "compiled", "verl", "upref", "compiled")
    print(f"{'':25}{'time, in copies of one tensor':>42}   {'peak memory, in tensors':>28}")
    print(f"{'objective':14} {'verl mode':10}" + "".join(f"{h:>11}" for h in heads))
    for mode, name, hp, config in PAIRS:
        torch.compiler.reset()
        runs = contestants(mode, name, hp, config, lp, old, A, mask)
        t = measure(runs, lp.detach(), args.rounds)
        m = {k: peak(f, size) for k, f in runs.items()}
        ratio = t["upref"] / t["verl"] if mode else None
        row = [t.get("verl"), t["upref"], ratio, t["compiled"], m.get("verl"), m["upref"], m["compiled"]]
        cells = ["-" if x is None else f"{x:.2f}" if x is ratio else f"{x:.1f}" for x in row]
        print(f"{name:14} {mode or '-':10}" + "".join(f"{c:>11}" for c in cells), flush=True)


if __name__ == "__main__":
    main()
