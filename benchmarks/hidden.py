# SPDX-License-Identifier: Apache-2.0
"""From hidden states to log-probabilities and entropy: memory, time and error of
upref.hidden and of its peers.

    python -m benchmarks.hidden              # needs verl, TRL, and a network for Liger and Unsloth
    python -m benchmarks.hidden --quick      # N = 64, V = 8192
    python -m benchmarks.hidden memory       # one section

Memory is the peak resident set of a fresh process, beyond the inputs. Times are CPU
seconds of forward and backward on one thread, as ratios to `naive`: at full size once,
in the process of the memory; at the miniature's size in 30 rounds in which both take
their turn. Errors are against float64; half of the rows have a token with p near 0.9.
`naive` is float32 logits and torch's log_softmax. torch's linear_cross_entropy has no
entropy: it stands beside the log-probs alone of naive and of upref.hidden.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path

import torch

import upref.hidden
import upref.logprobs

V, H = 151_936, 896  # of Qwen2.5-0.5B
TAU = 0.8


# ---- who is compared: (hidden [N, H], weight [V, H], tokens [N]) -> (log-probs, entropy or None) --------------------
def upref_hidden():
    return lambda h, W, tokens: upref.hidden.token_log_probs(
        h, W, tokens, temperature=TAU
    )


def naive():
    def f(h, W, tokens):
        lp = ((h @ W.T).float() / TAU).log_softmax(-1)
        return lp.gather(1, tokens[:, None])[:, 0], -(lp.exp() * lp).sum(1)

    return f


def trl_chunked():
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    return lambda h, W, tokens: ChunkedLogProbFunction.apply(
        h, W, None, tokens, TAU, 32768, None, 1.0, ("entropy",)
    )[:2]


def verl_fused():
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return lambda h, W, tokens: FusedLinearForPPO()(h, W, tokens, TAU)


def liger_scaled():
    """The one file: the package wants triton, and this function does not on a CPU."""
    path = placed("liger") / "liger_kernel/ops/fused_linear_scaled_cross_entropy.py"
    spec = importlib.util.spec_from_file_location("liger_scaled", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def f(h, W, tokens):
        nll, entropy = module.LigerFusedLinearScaledCrossEntropyFunction.apply(
            h, W, tokens, TAU, -100, 1, True
        )
        return -nll, entropy

    return f


def unsloth_fused():
    """The one file, uncompiled: the package wants a GPU, and this function does not."""
    os.environ["UNSLOTH_COMPILE_DISABLE"] = "1"
    root = placed("unsloth") / "unsloth_zoo"
    for name in (
        "unsloth_zoo",
        "unsloth_zoo.fused_losses",
        "unsloth_zoo.temporary_patches",
    ):
        # its __init__ is skipped
        shell = sys.modules.setdefault(name, types.ModuleType(name))
        shell.__path__ = [str(root.parent / name.replace(".", "/"))]
    fused = importlib.import_module(
        "unsloth_zoo.fused_losses.fused_linear"
    ).fused_linear_logprobs
    return lambda h, W, tokens: fused(
        h, W, tokens, temperature=TAU, return_entropy=True
    )


def torch_linear_ce():
    F, options = torch.nn.functional, torch.nn.LinearCrossEntropyOptions()
    f = lambda h, W, tokens: (
        -F.linear_cross_entropy(h / TAU, W, tokens, reduction="none", options=options)
    )
    return lambda h, W, tokens: (f(h, W, tokens), None)


def placed(name):
    from upref_frameworks.audits import framework
    from upref_frameworks.audits.isolated.pin import place

    return Path(place(name, framework(name).pin).paths[0])


def log_probs_of(f):
    return lambda h, W, tokens: (f(h, W, tokens)[0], None)


WHO = {
    "upref.hidden": upref_hidden,
    "naive": naive,
    "TRL chunked": trl_chunked,
    "verl fused": verl_fused,
    "Liger scaled": liger_scaled,
    "Unsloth fused": unsloth_fused,
}
CE, ONLY = "torch linear_ce", "log-probs of "
ALONE = {name: lambda make=make: log_probs_of(make()) for name, make in WHO.items()} | {
    CE: torch_linear_ce
}


# ---- one run -------------------------------------------------------------------------
def inputs(N, V, H=H, dtype=torch.float32, seed=0):
    """Rows 0, 2, ... have a token with p near 0.9 at temperature TAU; it is the sampled
    one in rows 0, 4, ...
    """
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(V, H, generator=g).mul_(H**-0.5)
    h, tokens = torch.randn(N, H, generator=g), torch.randint(V, (N,), generator=g)
    peak = tokens[::2].clone()
    h[::2] = W[peak] * (TAU * (torch.tensor(V).log() + 2.3))
    tokens[::4] = peak[::2]
    return h.to(dtype).requires_grad_(), W.to(dtype).requires_grad_(), tokens


def step(f, h, W, tokens):
    lp, entropy = f(h, W, tokens)
    (lp.sum() + 0.1 * (0 if entropy is None else entropy.sum())).backward()
    h.grad = W.grad = None


def status(key):
    return (
        int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
        / 1024
    )


def one(who, N, V, dtype="float32"):
    """[peak beyond the inputs in MB, CPU seconds], in this process, which must be
    fresh.
    """
    makers, who = (
        (ALONE, who.removeprefix(ONLY)) if who.startswith(ONLY) else (WHO, who)
    )
    f, (h, W, tokens) = makers[who](), inputs(N, V, dtype=getattr(torch, dtype))
    step(f, *inputs(4, 1000))  # what is imported and compiled at the first call
    before, start = status("VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    step(f, h, W, tokens)
    print(json.dumps([status("VmHWM") - before, time.process_time() - start]))


def fresh(who, N, V, dtype="float32"):
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.hidden",
        "--one",
        who,
        str(N),
        str(V),
        dtype,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        return None
    return json.loads(done.stdout.splitlines()[-1])


# ---- the tables ----------------------------------------------------------------------
def memory(cases, who, only=""):
    of = "; log-probs alone" if only else ""
    print(
        f"\nPeak memory of forward and backward, MB: beyond the inputs, and of that beyond dh and dW; CPU seconds{of}"
    )
    print(
        f"{'':16} {'N':>5} {'V':>7} {'MB':>7} {'beyond dh, dW':>14} {'of naive':>9} {'seconds':>8} {'of naive':>9}"
    )
    base = {}
    for N, V in cases:
        for name in who:
            if (found := fresh(only + name, N, V)) is None:
                print(f"{name:16} {N:5} {V:7}  does not run", flush=True)
                continue
            rest, seconds = found[0] - 4 * H * (N + V) / 2**20, found[1]
            base |= {"naive": (rest, seconds)} if name == "naive" else {}
            share = [
                f"{x / y:9.3f}"
                for x, y in zip((rest, seconds), base.get("naive", ()), strict=False)
            ] or ["", ""]
            print(
                f"{name:16} {N:5} {V:7} {found[0]:7.0f} {rest:14.0f} {share[0]:>9} {seconds:8.1f} {share[1]:>9}",
                flush=True,
            )


def times(N, V, who, rounds, H=H):
    runs = {name: WHO[name]() for name in who}
    h, W, tokens = inputs(N, V, H)
    ratios = {name: [] for name in runs}
    small = inputs(4, 1000)
    for f in runs.values():
        step(f, *small)  # what is imported and compiled at the first call
    for _ in range(rounds):
        seconds = {}
        for name, f in runs.items():
            start = time.process_time()
            step(f, h, W, tokens)
            seconds[name] = time.process_time() - start
        for name in runs:
            ratios[name].append(seconds[name] / seconds["naive"])
    load = os.getloadavg()[0]
    print(
        f"\nCPU time of forward and backward, of naive's; N = {N}, V = {V}, H = {H}; {rounds} rounds, load {load:.0f}"
    )
    for name, r in sorted(ratios.items(), key=lambda x: statistics.median(x[1])):
        print(
            f"{name:16} {statistics.median(r):5.2f} ({min(r):.2f} .. {max(r):.2f})",
            flush=True,
        )


def errors(N, V, who):
    print(
        f"\nLargest error against float64; N = {N}, V = {V}, float32; dW relative to its largest element"
    )
    h, W, tokens = inputs(N, V)
    double = [x.detach().double().requires_grad_() for x in (h, W)]
    want = gradients(
        lambda h, W, t: upref.hidden.token_log_probs(h, W, t, temperature=TAU),
        *double,
        tokens,
    )
    for name in who:
        found = gradients(WHO[name](), h, W, tokens)
        off = [
            "-" if x is None else f"{(x - y).abs().max():.1e}"
            for x, y in zip(found[:2], want[:2], strict=True)
        ]
        dW = (
            (found[2] - want[2]).abs().max() / want[2].abs().max()
            if found[1] is not None
            else None
        )
        print(
            f"{name:16} log-prob {off[0]:8} entropy {off[1]:8} dW {'-' if dW is None else f'{dW:.1e}'}",
            flush=True,
        )


def gradients(f, h, W, tokens):
    lp, entropy = f(h, W, tokens)
    (lp.sum() + 0.1 * (0 if entropy is None else entropy.sum())).backward()
    dW, h.grad, W.grad = W.grad, None, None
    return lp.detach(), None if entropy is None else entropy.detach(), dW


def bf16(N, V, who):
    print(
        f"\ndW for bfloat16 weights, N = {N}, V = {V}: largest error, in those of rounding the exact one once"
    )
    h, W, tokens = inputs(N, V, dtype=torch.bfloat16)
    double = [x.detach().double().requires_grad_() for x in (h, W)]
    want = gradients(
        lambda h, W, t: upref.hidden.token_log_probs(h, W, t, temperature=TAU),
        *double,
        tokens,
    )[2]
    once = (want.bfloat16() - want).abs().max()
    for name in who:
        try:
            found = gradients(WHO[name](), h, W, tokens)
        except Exception as e:
            print(f"{name:16} {type(e).__name__}")
            continue
        if found[1] is not None:
            print(f"{name:16} {(found[2] - want).abs().max() / once:6.2f}", flush=True)


def by_kind(sizes):
    """upref.logprobs from logits, and torch.log_softmax, which it used before."""
    print(
        "\nupref.logprobs in float32: largest error against float64 over 32 rows; before: by torch.log_softmax"
    )
    print(
        f"{'V':>7} {'rows':12} {'log-prob before':>16} {'now':>8} {'entropy before':>15} {'now':>8}"
    )
    for V in sizes:
        for kind in ("flat", "mixed", "peaked", "peak first"):
            g = torch.Generator().manual_seed(V)
            z = torch.randn(32, V, generator=g) * {"flat": 0.1, "mixed": 3.0}.get(
                kind, 1.0
            )
            tokens = torch.randint(V, (32,), generator=g)
            if kind.startswith("peak"):
                at = (
                    torch.zeros(32, 1, dtype=torch.int64)
                    if kind == "peak first"
                    else torch.randint(V, (32, 1), generator=g)
                )
                z.scatter_(1, at, z.logsumexp(1, keepdim=True) + 2.2)  # p = 0.9
                tokens[::2] = at[::2, 0]
            want = [
                upref.logprobs.token_log_probs(z.double(), tokens),
                upref.logprobs.entropy(z.double()),
            ]
            now = [upref.logprobs.token_log_probs(z, tokens), upref.logprobs.entropy(z)]
            lp = z.log_softmax(-1)
            before = [lp.gather(1, tokens[:, None])[:, 0], -(lp.exp() * lp).sum(-1)]
            a, b, c, d = (
                (x - y).abs().max().item()
                for i in (0, 1)
                for x, y in ((before[i], want[i]), (now[i], want[i]))
            )
            print(f"{V:7} {kind:12} {a:16.1e} {b:8.1e} {c:15.1e} {d:8.1e}", flush=True)


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--quick", action="store_true")
    p.add_argument(
        "sections",
        nargs="*",
        help="accuracy, time, memory, growth, alone; all of them unless given",
    )
    p.add_argument(
        "--one", nargs=4, metavar=("WHO", "N", "V", "DTYPE"), help=argparse.SUPPRESS
    )
    args = p.parse_args()
    torch.set_num_threads(1)
    if args.one:
        return one(args.one[0], int(args.one[1]), int(args.one[2]), args.one[3])
    n, v = (64, 8192) if args.quick else (2048, V)
    versions = {k: importlib.metadata.version(k) for k in ("torch", "trl", "verl")}
    print(
        f"H = {H}, 1 thread, {platform.machine()}, "
        + ", ".join(f"{k} {x}" for k, x in versions.items())
    )
    asked = args.sections or ["accuracy", "time", "memory", "growth", "alone"]
    if "accuracy" in asked:
        by_kind([1000, 32_000, v, 262_144])
        errors(n // 16, v, WHO)
        bf16(n, v // 32, WHO)
    if "time" in asked:
        # a minibatch of the miniature
        times(832, 107, ["naive", "upref.hidden"], 30, 64)
    if "memory" in asked:
        memory([(n, v)], ["naive", *(k for k in WHO if k != "naive")])
    if "growth" in asked:
        memory([(n * k // 4, v // 8) for k in (1, 4, 8)], ["naive", "upref.hidden"])
    if "alone" in asked:
        memory([(n, v)], ["naive", "upref.hidden", CE], ONLY)


if __name__ == "__main__":
    main()
